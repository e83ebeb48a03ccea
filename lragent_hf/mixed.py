"""Batch rows with agents of their own, where an agent keeps K, V or LR of its own.

Such a batch is an agent of its own too. Row i reads what row i's agent reads: what that agent has cached of row i is
copied when the batch first runs, and each goes its own way from there.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .agents import Agent, Mixed, agent_label, of_rows, select_rows
from .buffer import GrowableBuffer
from .errors import CacheModelMismatchError, UnsupportedAdapterError

if TYPE_CHECKING:
    from .cache import LoRASharedCache

__all__ = ["branch_off", "follow_rows", "prefix_to_take", "take_over"]


def prefix_to_take(cache: "LoRASharedCache", agent: Agent, check: bool = False) -> int:
    """Positions that a mixed batch would take over from its rows' agents, if those are more than it has read itself.

    Raises:
        UnsupportedAdapterError: with ``check``: it has read nothing, and its rows' agents have read unequal lengths, or an
            A of theirs is not the one that what they read was cached with (AdapterChangedError).
    """
    scheme, ledger = cache.scheme, cache.ledger
    if not isinstance(agent, Mixed) or not ledger.total:
        return 0
    if scheme.recompute_layers is not None:  # K and V are there for all, so that there is nothing to copy
        return min(ledger.read_by(row, ()) for row in agent.rows)
    if "per_agent" not in (scheme.kv, scheme.lr):
        return 0
    own = ledger.read_by(agent, cache.own_keys(agent))
    if own == ledger.total:
        return 0
    keys = {row: cache.own_keys(row) for row in dict.fromkeys(agent.rows)}
    read = {row: ledger.read_by(row, keys[row]) for row in keys if keys[row] or scheme.kv == "per_agent"}
    if check and not own and len(set(read.values())) > 1:
        have = ", ".join(f"{agent_label(row)} {length:,}" for row, length in read.items())
        raise UnsupportedAdapterError(
            f"Rows with adapters of their own can run together under {scheme.name!r} if these have read equally far, but "
            f"of {ledger.total:,} tokens have been read: {have}. Run the others on the whole batch first (set_adapter and "
            "a forward over what they lack), or use a scheme whose hand-over costs nothing, as base_lr_stacked."
        )
    least = min(read.values(), default=0)
    if least <= own:
        return 0
    if check:
        for row in read:
            cache.roster.check_unchanged(cache.binding, row, ledger)
    return least


def take_over(cache: "LoRASharedCache", agent: Mixed, start: int) -> Callable[[], None]:
    """Give the batch the first ``start`` positions of what its rows' agents keep. Returns what undoes it."""
    before: list[tuple[dict[Hashable, GrowableBuffer], GrowableBuffer | None]] = []
    try:
        for index, layer in enumerate(cache.layers):
            for name, group in layer.groups():
                lr = name in ("lr", "k_lr")
                rows = _lr_rows(cache, index, name, group, agent, start) if lr else _kv_rows(group, agent, start)
                if rows is not None:
                    buffer = layer.new_buffer(name)
                    buffer.write(0, rows)
                    before.append((group, group.get(agent)))
                    group[agent] = buffer
    except BaseException:
        _put_back(before, agent)
        raise
    return lambda: _put_back(before, agent)


def branch_off(cache: "LoRASharedCache", agents: Sequence[str | None]) -> "LoRASharedCache":
    """A fork with a row for each of ``agents``, all of which read what is there from one place. See ``branch``."""
    if isinstance(agents, str) or not agents:
        raise ValueError(f"branch() takes a list of agents, one a row, not {agents!r}.")
    known = cache.binding.adapters()
    if unknown := [agent for agent in agents if agent is not None and agent not in known]:
        raise ValueError(f"branch(): {unknown[0]!r} is no adapter of the model. Loaded: {known}.")
    if cache.batch_size > 1:
        raise CacheModelMismatchError(
            f"branch() makes rows out of one, and the cache holds {cache.batch_size}. Choose one first: adopt(row)."
        )
    cache.binding.settle()
    prefix_to_take(cache, of_rows([() if agent is None else (agent,) for agent in agents]), check=True)
    new = cache.fork()
    if cache.ledger.total and len(agents) > 1:
        record = new.trajectory
        record.tokens, record.mask = (buffer.fork(record.total) for buffer in record.buffers())
        for buffer in new.buffers():
            buffer.expand(len(agents))
        record.rows = len(agents)
    new.ledger.last = None  # nothing that was checked was checked for a batch
    return new


def follow_rows(cache: "LoRASharedCache", rows: Tensor) -> None:
    """The batch now consists of these of its rows: mixed agents become those of the rows that are left."""
    known = (*cache.ledger.turns, *cache.ledger.streams, *cache.ledger.lr)
    if not any(isinstance(key, Mixed) for key in known):
        return
    left = rows.tolist()

    def name(key: Any) -> Any:
        return select_rows(key, left) if isinstance(key, Mixed) else key

    if all(name(key) == key for key in known):
        return
    streams, banks = cache.ledger.rename(name)
    cache.roster.rename(banks)
    cache.trajectory.rename(name)
    for layer in cache.layers:
        for sources, group in ((streams, layer.k), (streams, layer.v), (banks, layer.lr), (banks, layer.k_lr)):
            kept = {new: group[old] for new, old in sources.items() if old in group}
            shared = {key: buffer for key, buffer in group.items() if key is None}
            group.clear()
            group.update(shared | kept)
    for new, old in banks.items():
        if isinstance(old, Mixed) and not isinstance(new, Mixed):
            _narrow(cache, new)


def _narrow(cache: "LoRASharedCache", key: Any) -> None:
    """A bank that serves one agent now keeps that agent's columns only."""
    bank, length = cache.roster.banks[key], cache.ledger.lr[key]
    cache.roster.banks[key] = bank.only(key)
    for index, layer in cache.binding.layers.items():
        store = cache.layers[index]
        for name, site in (("lr", layer.v), ("k_lr", layer.k)):
            old = store.group(name).pop(key, None)
            kept = cache.roster.banks[key].stacks[site.position] if old is not None else None
            if old is not None and kept is not None:
                low = next(
                    bank.columns[site.position][adapter][0] for adapter in key if adapter in bank.columns[site.position]
                )
                store.write_lr(name, key, 0, old.read(length)[..., low : low + kept.shape[0]])


def _kv_rows(group: dict[Hashable, GrowableBuffer], agent: Mixed, start: int) -> Tensor | None:
    """Row i of what row i's agent has of a layer's K or V, [B, Hkv, start, D]."""
    found = {row: group[row].read(start) for row in dict.fromkeys(agent.rows) if row in group}
    if len(found) < len(set(agent.rows)):
        return None
    return torch.stack([found[row][index] for index, row in enumerate(agent.rows)])


def _lr_rows(
    cache: "LoRASharedCache", index: int, name: str, group: dict[Hashable, GrowableBuffer], agent: Mixed, start: int
) -> Tensor | None:
    """Row i of what row i's adapter has of a layer's LR [B, start, width], in its columns of the batch's bank."""
    bank, layer = cache.roster.banks.get(agent), cache.binding.layers.get(index)
    if bank is None or layer is None or (name == "k_lr" and not cache.roster.keys):
        return None
    position = (layer.v if name == "lr" else layer.k).position
    stack = bank.stacks[position]
    if stack is None:
        return None
    rows: Tensor | None = None
    for adapter, (first, rank) in bank.columns[position].items():
        source = group[adapter,].read(start)
        if rows is None:
            rows = source.new_zeros((len(agent.rows), start, stack.shape[0]))
        low = cache.roster.banks[adapter,].columns[position][adapter][0]
        mine = agent.rows_of(adapter)
        rows[mine, :, first : first + rank] = source[mine, :, low : low + rank]
    return rows


def _put_back(before: list[tuple[dict[Hashable, GrowableBuffer], GrowableBuffer | None]], agent: Mixed) -> None:
    for group, buffer in before:
        if buffer is None:
            group.pop(agent, None)
        else:
            group[agent] = buffer
