"""Who keeps LR where: the banks of one cache, and which of them each adapter reads."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from .adapters import lora_a
from .agents import Agent
from .banks import LRBank
from .binding import ModelBinding
from .errors import AdapterChangedError, SharedAMismatchError, UnsupportedAdapterError
from .ledger import Ledger
from .schemes import Scheme

__all__ = ["Roster"]


@dataclass
class Roster:
    """The banks of a cache.

    Attributes:
        scheme: whose banks.
        align: columns at whose multiples the block of an adapter starts.
        keys: whether what adapters add to keys is kept in rank r too, beside what they add to values.
        declared: adapters whose LR is kept from the first token on, or ``None``: all that are loaded then.
        banks: by key: the agent where each keeps its own LR, else numbers in order of joining.
        bank_of: adapter -> its bank, where banks are shared.
    """

    scheme: Scheme
    align: int
    keys: bool = True
    declared: list[str] | None = None
    banks: dict[Hashable, LRBank] = field(default_factory=dict)
    bank_of: dict[str, Hashable] = field(default_factory=dict)

    @property
    def splits_keys(self) -> bool:
        """Whether any adapter here has LoRA on k_proj that is kept apart from the keys."""
        # `ModelBinding.sites`: the second half of a bank's lists is of k_proj.
        return self.keys and any(
            stack is not None for bank in self.banks.values() for stack in bank.stacks[len(bank.stacks) // 2 :]
        )

    def plan(self, binding: ModelBinding, agent: Agent, empty: bool) -> "Roster":
        """The roster once ``agent`` runs (``empty``: on a cache without tokens); this one if that changes nothing.

        Raises:
            SharedAMismatchError: the scheme needs one A, and there are two.
        """
        kind = self.scheme.lr
        if kind == "none" or (not empty and (agent in self.banks or all(adapter in self.bank_of for adapter in agent))):
            return self
        sites = [site.module for site in binding.sites(self.keys)]
        new = Roster(self.scheme, self.align, self.keys, self.declared)
        if not empty:
            new.banks, new.bank_of = dict(self.banks), dict(self.bank_of)
        banks, bank_of = new.banks, new.bank_of
        if kind == "per_agent":
            if agent not in banks and any(lora_a(site, name) is not None for site in sites for name in agent):
                banks[agent] = LRBank.build(sites, agent, self.align)
            return new
        if not banks:
            adapters = self.starting(binding, agent)
            banks[0] = LRBank.build(sites, adapters, self.align)
            bank_of.update({adapter: 0 for adapter in adapters if adapter in banks[0]})
            difference = banks[0].unshared() if kind == "one_a" else None
            if difference is not None:
                raise self._unequal(binding, *difference)
        for adapter in agent:
            if adapter in bank_of or all(lora_a(site, adapter) is None for site in sites):
                continue
            differs = 0
            for key, bank in banks.items():
                columns, missing = bank.alias(sites, adapter)
                if missing is None:
                    banks[key], bank_of[adapter] = bank.copy(), key
                    banks[key].join(columns)
                    break
                differs = missing
            else:
                if kind == "one_a" and bank_of:
                    raise self._unequal(binding, differs, next(iter(bank_of)), adapter)
                bank_of[adapter] = len(banks)
                banks[len(banks)] = LRBank.build(sites, [adapter], self.align)
        return new

    def own(self, agent: Agent) -> list[tuple[str, Hashable]]:
        """(adapter, bank) for each adapter of the agent that has an LR."""
        if self.scheme.lr == "per_agent":
            return [(adapter, agent) for adapter in agent if agent in self.banks and adapter in self.banks[agent]]
        return [(adapter, self.bank_of[adapter]) for adapter in agent if adapter in self.bank_of]

    def starting(self, binding: ModelBinding, agent: Agent) -> list[str]:
        """Adapters whose LR is kept from the first token on, if ``agent`` runs it."""
        names = self.declared if self.declared is not None else binding.adapters()
        return list(dict.fromkeys([*names, *agent]))

    def check_declared(self, binding: ModelBinding) -> None:
        """Raise if an adapter was declared that is not there."""
        unknown = set(self.declared or ()) - set(binding.adapters())
        if unknown:
            raise UnsupportedAdapterError(
                f"agents names {sorted(unknown)}, which are not loaded. Loaded LoRA adapters: {binding.adapters()}."
            )

    def check_unchanged(self, binding: ModelBinding, agent: Agent, ledger: Ledger) -> None:
        """Raise if an A of the agent is not the one that its LR was cached with."""
        for adapter, key in self.own(agent):
            position = self.banks[key].changed([site.module for site in binding.sites(self.keys)], adapter)
            if position is not None:
                raise AdapterChangedError(
                    f"A of adapter {adapter!r} at {binding.sites(self.keys)[position].name} is not the one its "
                    f"{ledger.lr.get(key, 0)} cached positions were written with. Call cache.reset() and run the prompt "
                    "again, load the adapter under another name, or put the old weights back."
                )

    def rename(self, sources: Mapping[Hashable, Hashable]) -> None:
        """Keep the banks that ``sources`` takes its new keys from."""
        self.banks = {new: self.banks[old] for new, old in sources.items()}

    def clear(self) -> None:
        """Forget all banks."""
        self.banks, self.bank_of = {}, {}

    def copy(self) -> "Roster":
        """An independent roster; the stacked A's, which never change, are shared."""
        declared = None if self.declared is None else list(self.declared)
        banks: dict[Hashable, LRBank] = {key: bank.copy() for key, bank in self.banks.items()}
        return Roster(self.scheme, self.align, self.keys, declared, banks, dict(self.bank_of))

    def _unequal(self, binding: ModelBinding, position: int, first: str, second: str) -> SharedAMismatchError:
        return SharedAMismatchError(
            f"base_lr_shared needs one A for all adapters, but {first!r} and {second!r} differ at "
            f"{binding.sites(self.keys)[position].name}. Use scheme='base_lr_stacked', which keeps an LR cache per "
            "distinct A, train adapters with one A (share_lora_A), or name the ones that share it in agents=."
        )
