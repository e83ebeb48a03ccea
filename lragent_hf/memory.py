"""How many bytes a cache holds, for what, and what the same tokens would take without sharing."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._compat import sliding_windows
from .agents import Mixed, agent_label
from .buffer import GrowableBuffer

if TYPE_CHECKING:
    from .cache import LoRASharedCache

__all__ = ["MemoryReport", "MemoryRow", "memory_report"]


@dataclass(frozen=True)
class MemoryRow:
    """One kind of storage, summed over layers.

    Attributes:
        part: ``"K"`` (whole), ``"K_base"``, ``"V"`` (whole), ``"V_base"``, ``"LR"``, ``"K LR"``, ``"angles"`` (cos
            and sin, by which what adapters add to keys is turned), ``"K working copy"``, ``"V working copy"`` or
            ``"hidden states"``.
        owner: the agents it serves.
        tokens: positions in use.
        in_use_bytes, reserved_bytes: bytes of those positions, and of the buffers that hold them.
        shared_bytes: of ``in_use_bytes``, what forks of this cache, or the cache it is a fork of, hold as well.
    """

    part: str
    owner: str
    tokens: int
    in_use_bytes: int
    reserved_bytes: int
    shared_bytes: int = 0


@dataclass(frozen=True)
class MemoryReport:
    """``cache.memory_report()``: exact to the byte for what is in use.

    Attributes:
        scheme: its name.
        rows: K, V and LR, per owner.
        record_bytes: the token record (tokens and mask bits); not part of the sums.
        beyond_window_bytes: of ``in_use_bytes``, positions that have left the sliding window of their layer. Agents that
            lag, crops and forks still need them; a plain cache drops them.
        unshared_bytes: K and V of the whole trajectory, once per agent that has taken a turn (what a cache per agent
            takes as soon as each has read everything).
    """

    scheme: str
    rows: tuple[MemoryRow, ...]
    record_bytes: int
    unshared_bytes: int
    beyond_window_bytes: int = 0

    @property
    def in_use_bytes(self) -> int:
        """Bytes in use, of all rows."""
        return sum(row.in_use_bytes for row in self.rows)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all buffers, spare room included."""
        return sum(row.reserved_bytes for row in self.rows)

    @property
    def shared_bytes(self) -> int:
        """Of ``in_use_bytes``, what forks hold as well: it exists once for all of them."""
        return sum(row.shared_bytes for row in self.rows)

    def __str__(self) -> str:
        lines = [f"{'part':18}{'agents':28}{'tokens':>8}{'in use':>14}{'reserved':>14}"]
        lines += [
            f"{row.part:18}{row.owner:28.28}{row.tokens:>8}{row.in_use_bytes:>14,}{row.reserved_bytes:>14,}"
            for row in self.rows
        ]
        lines.append(f"{'all':18}{self.scheme:28}{'':8}{self.in_use_bytes:>14,}{self.reserved_bytes:>14,}")
        lines.append(self._note())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        cells = [(r.part, r.owner, f"{r.tokens:,}", f"{r.in_use_bytes:,}", f"{r.reserved_bytes:,}") for r in self.rows]
        cells.append(("all", self.scheme, "", f"{self.in_use_bytes:,}", f"{self.reserved_bytes:,}"))
        head = "".join(f"<th>{name}</th>" for name in ("part", "agents", "tokens", "bytes in use", "bytes reserved"))
        body = "".join("<tr>" + "".join(f"<td>{_escape(cell)}</td>" for cell in row) + "</tr>" for row in cells)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{self._note()}</p>"

    def _note(self) -> str:
        shared = f"shared with forks: {self.shared_bytes:,} bytes; " if self.shared_bytes else ""
        if self.beyond_window_bytes:
            shared += f"beyond sliding windows: {self.beyond_window_bytes:,} bytes; "
        return f"{shared}unshared: {self.unshared_bytes:,} bytes; token record: {self.record_bytes:,} bytes"


def memory_report(cache: "LoRASharedCache") -> MemoryReport:
    """Count the bytes of a cache. See ``MemoryReport``."""
    ledger, scheme = cache.ledger, cache.scheme
    sums: dict[tuple[str, str], list[int]] = {}
    windows = sliding_windows(cache.binding.decoder.config)
    beyond = 0

    def add(part: str, owner: str, tokens: int, buffer: GrowableBuffer) -> None:
        row = sums.setdefault((part, owner), [tokens, 0, 0, 0])
        for column, length in enumerate((tokens, buffer.capacity, min(tokens, buffer.frozen)), start=1):
            row[column] += buffer.nbytes(length)

    everyone = ", ".join(map(agent_label, ledger.turns)) or "all"
    k = "K_base" if cache.roster.splits_keys else "K"
    per_token = 0
    rows = max(1, cache.batch_size)
    ran = [{agent.rows[row] if isinstance(agent, Mixed) else agent for agent in ledger.turns} for row in range(rows)]
    for index, layer in enumerate(cache.layers):
        window = windows[index] if index < len(windows) else None
        if window is not None:  # a plain cache keeps one position less than the window: the query is the last one in it
            lengths = (
                (buffer, ledger.valid(name, key)) for name, group in layer.groups() for key, buffer in group.items()
            )
            beyond += sum(buffer.nbytes(max(0, length - window + 1)) for buffer, length in lengths)
        for part, name, group in ((k, "k", layer.k), ("V_base" if scheme.splits_values else "V", "v", layer.v)):
            for stream, buffer in group.items():
                owner = everyone if stream is None else agent_label(stream)
                add(part, owner, ledger.valid(name, stream), buffer)
            if group:
                per_token += next(iter(group.values())).row_nbytes
        for part, name in (("LR", "lr"), ("K LR", "k_lr")):
            for key, buffer in layer.group(name).items():
                owner = agent_label(key) if isinstance(key, tuple) else ", ".join(cache.roster.banks[key].adapters)
                add(part, owner, ledger.valid(name, key), buffer)
        for name, copy in layer.work.items():
            if copy.valid:
                add(f"{name.upper()} working copy", "the active agent", copy.valid, copy.buffer)
    for buffer in cache.rotary.buffers():
        add("angles", everyone, ledger.rotary, buffer)
    if cache.hidden.capacity:
        add("hidden states", everyone, ledger.total, cache.hidden)
    return MemoryReport(
        scheme=scheme.name,
        rows=tuple(MemoryRow(part, owner, *numbers) for (part, owner), numbers in sums.items()),
        record_bytes=sum(buffer.nbytes(cache.trajectory.total) for buffer in cache.trajectory.buffers()),
        unshared_bytes=per_token * ledger.total * sum(map(len, ran)),
        beyond_window_bytes=beyond,
    )


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
