"""Who shares what: a scheme is data, and the rest of the package reads it."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["DROIDSPEAK_LAYERS", "SCHEMES", "Scheme", "resolve_scheme"]

DROIDSPEAK_LAYERS: dict[str, tuple[int, ...]] = {
    "llama-3.1-8b": (0, 2, 16, 19, 20, 22, 23, 24, 26, 30, 31),
    "ministral-8b": (1, 4, 5, 12, 14, 15, 17, 21, 22, 25, 29, 31),
}
"""Layers that DroidSpeak recomputes, as probed on HotpotQA with LRAgent's adapters (its table 11). Of 32 and 36 layers."""


@dataclass(frozen=True)
class Scheme:
    """How keys, values and their low-rank (LR) parts are shared between agents.

    Attributes:
        name: the name users pass to ``LoRASharedCache(scheme=...)``.
        kv: ``"shared"``: one copy of K and V (or V_base) for all agents; ``"per_agent"``: one copy each.
        lr: what becomes of the adapter's part X A of the value, [L, rank].
            ``"none"``: V is stored whole; ``"per_agent"``: each agent keeps its own; ``"one_a"``: one LR cache, all
            adapters must have the same A; ``"stacked"``: one LR cache per distinct A, all written by every agent.
        summary: one line for the repr and the docs.
        recompute_layers: with shared K and V: an agent runs what it has not read itself, and rewrites K and V of these
            layers as it goes (DroidSpeak, Liu et al., NSDI 2026). ``None``: it goes on from what others wrote.
    """

    name: str
    kv: Literal["shared", "per_agent"]
    lr: Literal["none", "per_agent", "one_a", "stacked"]
    summary: str
    recompute_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.kv == "per_agent" and self.lr != "none":
            raise ValueError(f"Scheme {self.name!r}: values that each agent keeps for itself have no LR to share.")
        if self.recompute_layers is not None:
            if self.kv == "per_agent" or self.lr != "none":
                raise ValueError(
                    f"Scheme {self.name!r}: recompute_layers goes with shared K and V that are kept whole."
                )
            layers = sorted({operator.index(layer) for layer in self.recompute_layers})
            object.__setattr__(self, "recompute_layers", tuple(layers))

    @property
    def splits_values(self) -> bool:
        """Whether V is stored as base cache plus LR cache (paper, section 3)."""
        return self.lr != "none"

    @property
    def takes_window(self) -> bool:
        """Whether ``handover_window`` means anything: some of what an agent reads was written by another."""
        return self.kv == "shared" and self.lr != "per_agent" and self.recompute_layers is None

    @property
    def counts_agents(self) -> bool:
        """Whether how far an agent has read is a count of its own, not a matter of whose LR is there."""
        return self.kv == "per_agent" or self.recompute_layers is not None


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("non_shared", "per_agent", "none", "K and V per agent: exact, N times the memory"),
        Scheme("full_shared", "shared", "none", "one K and V as first written: the adapters' part is lost"),
        Scheme("base_shared", "shared", "per_agent", "one base cache, an LR cache per agent, built by LR prefill"),
        Scheme("base_lr_shared", "shared", "one_a", "one base cache, one LR cache: adapters share A on v_proj"),
        Scheme("base_lr_stacked", "shared", "stacked", "one base cache, one LR cache per distinct A, no LR prefill"),
        Scheme(
            "droidspeak",
            "shared",
            "none",
            "one K and V; an agent runs what it has not read, rewriting chosen layers",
            (),
        ),
    )
}
"""The named schemes, by name. ``LoRASharedCache(scheme=...)`` takes a name, or a ``Scheme`` of your own."""


def resolve_scheme(scheme: "str | Scheme", recompute_layers: Sequence[int] | None = None) -> Scheme:
    """The ``Scheme`` of that name, with the layers that it recomputes; a ``Scheme`` is returned as it is.

    Raises:
        ValueError: no scheme has that name, or the layers are missing, or given to one that recomputes none.
    """
    if not isinstance(scheme, Scheme):
        if scheme not in SCHEMES:
            raise ValueError(f"Unknown scheme {scheme!r}. Choose one of {', '.join(map(repr, SCHEMES))}.")
        scheme = SCHEMES[scheme]
    if recompute_layers is not None:
        if scheme.recompute_layers is None:
            raise ValueError(f"recompute_layers means nothing under {scheme.name!r}: it is for 'droidspeak'.")
        scheme = replace(scheme, recompute_layers=tuple(recompute_layers))
    if scheme.recompute_layers == ():
        raise ValueError(
            f"{scheme.name!r} needs recompute_layers=[...], layer indices: droidspeak_layers() finds them for your model, "
            "DROIDSPEAK_LAYERS has the paper's. With none it would be full_shared."
        )
    return scheme
