"""How far each agent has read: the arithmetic of lengths, without a tensor.

Lengths live here and nowhere else. A forward is planned, run, and committed; a forward that fails is never committed,
so nothing here changes.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .agents import Agent
from .schemes import Scheme

__all__ = ["Ledger", "Plan"]


@dataclass(frozen=True)
class Plan:
    """What one forward reads and writes. Positions are indices on the trajectory.

    Attributes:
        agent: who runs.
        past: the first position it runs.
        stop: one past the last.
        kv_from: K, V (or V_base) are written from here on; at or beyond ``stop``: not at all.
        rewrite_from: the same for the layers that a scheme recomputes.
        lr_from: bank -> its LR rows are written from here on; banks that are not written are missing.
        rotary_from: the angles that keys turn by are written from here on, where they are kept at all.
    """

    agent: Agent
    past: int
    stop: int
    kv_from: int
    rewrite_from: int
    lr_from: dict[Hashable, int]
    rotary_from: int = 0


@dataclass
class Ledger:
    """Lengths of one cache.

    Attributes:
        scheme, window: what the cache was made with.
        total: positions on the trajectory.
        streams: agent -> positions it has run itself, where the scheme counts them; under ``non_shared`` of its own K, V.
        lr: bank -> positions for which its LR rows are right. Always a prefix.
        rotary: positions whose angles are kept.
        writers: who wrote each position of the shared K and V last.
        progress: (agent, position) of a hand-over window that is being run in chunks.
        turns: agents that have run, in order of first appearance.
        last: the agent that ran last.
    """

    scheme: Scheme
    window: int = 0
    total: int = 0
    streams: dict[Agent, int] = field(default_factory=dict)
    lr: dict[Hashable, int] = field(default_factory=dict)
    rotary: int = 0
    writers: list[Agent] = field(default_factory=list)
    progress: tuple[Agent, int] | None = None
    turns: dict[Agent, None] = field(default_factory=dict)
    last: Agent | None = None

    def read_by(self, agent: Agent, banks: Sequence[Hashable]) -> int:
        """Positions the agent can attend to: those it has its own part of. ``banks``: where its LR lies."""
        if self.scheme.counts_agents:
            return self.streams.get(agent, 0)
        return min([self.total, *(self.lr.get(bank, 0) for bank in banks)])

    def valid(self, group: str, key: Hashable) -> int:
        """Positions of a layer's buffer that hold something: its ``group``, and ``key``, a stream or a bank."""
        if group in ("lr", "k_lr"):
            return self.lr.get(key, 0)
        return self.total if key is None else self.streams.get(key, 0)  # type: ignore[call-overload]

    def length(self, agent: Agent, banks: Sequence[Hashable]) -> int:
        """What ``get_seq_length`` answers: ``read_by``, less the hand-over window the agent has yet to run."""
        read = self.read_by(agent, banks)
        if not self.window or not self.total or self.writers[-1] == agent:
            return read
        if self.progress is not None and self.progress[0] == agent:
            return min(read, self.progress[1])
        return min(read, max(0, self.total - self.window))

    def plan(self, agent: Agent, banks: Sequence[Hashable], past: int, count: int) -> Plan:
        """The next forward of ``agent``, over ``count`` tokens from position ``past`` on: its `length`, if not more."""
        stop = past + count
        if self.scheme.kv == "per_agent":
            return Plan(agent, past, stop, past, past, {})
        kv_from = self.total
        if self.window and self.total and self.writers[-1] != agent:
            started = self.progress is not None and self.progress[0] == agent
            kv_from = past if started else max(past, self.total - self.window)
        lr_from = {}
        for bank, length in self.lr.items():
            own = bank in banks
            if own or (self.scheme.lr in ("stacked", "one_a") and length >= self.total):
                # A bank that lags is extended; one at the head is written with the base cache.
                first = min(length, kv_from) if own else kv_from
                if first < stop:
                    lr_from[bank] = max(first, past)
        rewrite_from = kv_from if self.scheme.recompute_layers is None else past
        return Plan(agent, past, stop, kv_from, rewrite_from, lr_from, max(past, min(self.rotary, kv_from)))

    def commit(self, plan: Plan, angles: bool = False) -> None:
        """The forward ran to its end: what it wrote (``angles``: these too) is now part of the cache."""
        agent, stop = plan.agent, plan.stop
        if angles:
            self.rotary = max(self.rotary, stop)
        if self.scheme.counts_agents:
            self.streams[agent] = stop
            self.writers += [agent] * (stop - len(self.writers))
        elif plan.kv_from < stop:
            self.writers[plan.kv_from : stop] = [agent] * (stop - plan.kv_from)
        for bank in plan.lr_from:
            self.lr[bank] = max(self.lr[bank], stop)
        if self.progress is not None and self.progress[0] != agent:
            self.progress = None
        self.total = max(self.total, stop)
        if self.window:
            in_window = plan.kv_from < stop < self.total
            self.progress = (agent, stop) if in_window else None
        self.turns[agent] = None
        self.last = agent

    def crop(self, agent: Agent, banks: Sequence[Hashable], count: int) -> None:
        """Undo the agent's last ``count`` tokens.

        At the head of the trajectory that cuts it, for everybody. An agent that lags (LR prefill, or under
        ``non_shared``) only loses what is its own; one in the middle of a hand-over window runs that part again.
        """
        read = self.read_by(agent, banks)
        if self.progress is not None and self.progress[0] == agent:
            self.progress = (agent, max(0, self.progress[1] - count))
        elif read == self.total:
            self.truncate(max(0, self.total - count))
        elif self.scheme.counts_agents:
            self.streams[agent] = max(0, read - count)
        else:
            for bank in banks:
                if bank in self.lr and self.lr[bank] < self.total:
                    self.lr[bank] = min(self.lr[bank], max(0, read - count))

    def truncate(self, total: int) -> None:
        """Cut the trajectory to ``total`` positions for every agent."""
        if total >= self.total:
            return
        if total == 0:
            self.clear()
            return
        self.total = total
        self.streams = {agent: min(length, total) for agent, length in self.streams.items()}
        self.lr = {bank: min(length, total) for bank, length in self.lr.items()}
        self.rotary = min(self.rotary, total)
        del self.writers[total:]
        self.progress = None

    def rename(self, name: Callable[[Any], Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Call each agent ``name(agent)`` from now on. Of two that become one, the one that has read more counts.

        Returns:
            New name -> old one, of streams and of banks.
        """
        streams, banks = _sources(self.streams, name), _sources(self.lr, name)
        self.streams = {new: self.streams[old] for new, old in streams.items()}
        self.lr = {new: self.lr[old] for new, old in banks.items()}
        self.writers = [name(writer) for writer in self.writers]
        self.turns = dict.fromkeys(name(agent) for agent in self.turns)
        self.last = None if self.last is None else name(self.last)
        if self.progress is not None:
            self.progress = name(self.progress[0]), self.progress[1]
        return streams, banks

    def clear(self) -> None:
        """Forget everything but the scheme."""
        self.total, self.rotary, self.progress, self.last = 0, 0, None, None
        for container in (self.streams, self.lr, self.writers, self.turns):
            container.clear()

    def copy(self) -> "Ledger":
        """An independent ledger."""
        return Ledger(
            self.scheme, self.window, self.total, dict(self.streams), dict(self.lr), self.rotary, list(self.writers),
            self.progress, dict(self.turns), self.last,
        )  # fmt: skip


def _sources(lengths: Mapping[Any, int], name: Callable[[Any], Any]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for old, length in lengths.items():
        new = name(old)
        if new not in found or length > lengths[found[new]]:
            found[new] = old
    return found
