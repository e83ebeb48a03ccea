"""Tensors that grow in place and can share a prefix."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["GrowableBuffer", "is_expanded"]

_SPARE = 256  # positions of spare room at least: growing a short buffer often costs more than the room
_FORK_SPARE = 16  # the same for the tail of a fork, of which there may be many
_MAX_PIECES = 8  # of a prefix: each is a pass of attention of its own


class Frozen:
    """Rows that several buffers read and none writes. Whoever lent them looks whether anyone still holds them."""

    __slots__ = ("__weakref__", "origin", "rows")

    def __init__(self, rows: Tensor, origin: "Frozen | None" = None):
        self.rows, self.origin = rows, origin


class GrowableBuffer:
    """A tensor with room to spare along ``dim``, written in place: appending never copies what is there.

    It does not know how much of it is valid: lengths live once, in the cache. Growing adds an eighth (or ``_SPARE``), so
    a token is copied eight times on average however long the buffer, and long buffers reserve 12.5 % at most.

    A fork begins as a frozen prefix, read from its origin's storage, and writes into a tail of its own. Writing below the
    end of the prefix, or below what was lent to a fork, first copies what lies from there on; what is before stays shared.

    Args:
        dim: the dimension of positions: 2 for K and V [B, H, L, D], 1 for LR [B, L, R] and for the token record [B, L].
        least: the smallest capacity to allocate.
        device: where to keep the tensor, or ``None``: where the rows come from.
        fixed: ``least`` is the capacity, once and for all. What is not written yet is zero: compiled code reads that too.

    Attributes:
        data: the tail; position p lies at p - ``start``.
        prefix, start: frozen pieces that hold positions 0 to ``start``.
    """

    __slots__ = ("_lent", "data", "device", "dim", "fixed", "least", "prefix", "start")

    def __init__(self, dim: int, least: int = 0, device: torch.device | None = None, fixed: bool = False):
        self.dim, self.least, self.device, self.fixed = dim, least, device, fixed
        self.clear()

    def clear(self) -> None:
        """Let go of all storage."""
        self.data: Tensor | None = None
        self.prefix: tuple[Frozen, ...] = ()
        self.start = 0
        self._lent: list[weakref.ref[Frozen]] = []

    @property
    def capacity(self) -> int:
        """Positions there is room for."""
        return self.start + (0 if self.data is None else self.data.shape[self.dim])

    @property
    def frozen(self) -> int:
        """Positions below this are shared with forks, so they are not written in place."""
        if not self._lent:
            return self.start
        held = [piece for ref in self._lent if (piece := ref()) is not None]
        self._lent = [weakref.ref(piece) for piece in held]
        return self.start + max((piece.rows.shape[self.dim] for piece in held), default=0)

    def write(self, start: int, rows: Tensor) -> None:
        """Put ``rows`` at positions ``start`` and after. Positions below ``start`` are kept, whatever happens."""
        count = rows.shape[self.dim]
        data = self.data
        if data is None or self.prefix or self._lent or start + count > data.shape[self.dim]:
            data = self._room(start, rows)
        data.narrow(self.dim, start - self.start, count).copy_(rows.detach() if rows.requires_grad else rows)

    def read(self, stop: int, start: int = 0) -> Tensor:
        """Positions ``start`` to ``stop``: a view, or a copy where they lie in several pieces."""
        if not self.prefix and self.data is not None:
            return self.data.narrow(self.dim, start, stop - start)
        pieces = self.pieces(stop, start)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def pieces(self, stop: int, start: int = 0) -> list[Tensor]:
        """Views that together are positions ``start`` to ``stop``."""
        if not self.prefix:
            if self.data is None:
                raise IndexError(f"positions {start} to {stop} were asked of a buffer that holds none")
            return [self.data.narrow(self.dim, start, stop - start)]
        found, first = [], 0
        for rows in self._all_rows():
            last = first + rows.shape[self.dim]
            low, high = max(start, first), min(stop, last)
            if low < high:
                found.append(rows.narrow(self.dim, low - first, high - low))
            first = last
        return found or [next(self._all_rows()).narrow(self.dim, 0, 0)]

    def ends(self) -> list[int]:
        """Positions at which a piece of the prefix ends."""
        ends: list[int] = []
        for piece in self.prefix:
            ends.append(piece.rows.shape[self.dim] + (ends[-1] if ends else 0))
        return ends

    def truncate(self, length: int) -> None:
        """Positions from ``length`` on are not needed any more: what is shared with forks is let go of."""
        if length < self.frozen:
            self._part(length, keep_rest=False)
            self.prefix = tuple(map(_without_the_rest, self.prefix))

    def fork(self, length: int) -> "GrowableBuffer":
        """A buffer that reads the first ``length`` positions from this one's storage, and writes into its own."""
        new = GrowableBuffer(self.dim, device=self.device)
        new.prefix = self._pieces_below(length)
        if length > self.start:
            self._lent.append(weakref.ref(new.prefix[-1]))
        new.start = length
        if len(new.prefix) > _MAX_PIECES:
            new._part(new.ends()[_MAX_PIECES // 2 - 1], keep_rest=True)
        return new

    def expand(self, count: int) -> None:
        """Be of ``count`` rows in place of one. For a fork without a tail: all rows read its prefix from where it lies."""
        assert self.data is None
        self.prefix = tuple(Frozen(_expanded(piece.rows, count), piece) for piece in self.prefix)

    def select(self, rows: Tensor) -> None:
        """Keep batch rows ``rows`` (an index, repetitions allowed), in that order."""
        if self.prefix and all(map(is_expanded, (piece.rows for piece in self.prefix))):
            prefix = tuple(Frozen(_expanded(piece.rows[:1], rows.numel()), piece) for piece in self.prefix)
            tail = self.data
            self._become(
                prefix, self.start, None if tail is None else lambda: tail.index_select(0, rows.to(tail.device))
            )
        elif self.fixed and self.data is not None and not self.prefix and rows.numel() == self.data.shape[0]:
            self.data.copy_(self.data.index_select(0, rows.to(self.data.device)))  # compiled code knows this storage
        elif self.capacity:
            whole = self.read(self.capacity)
            self._become((), 0, lambda: whole.index_select(0, rows.to(whole.device)))

    def state(self) -> tuple[Any, ...]:
        """What `restore` needs to undo a `select`, which leaves the old tensors untouched."""
        return self.data, self.prefix, self.start, self._lent

    def restore(self, state: tuple[Any, ...]) -> None:
        """Be again what `state` was asked of."""
        self.data, self.prefix, self.start, self._lent = state

    def move(self, device: torch.device) -> None:
        """Keep the tensor on ``device`` from now on. What is shared with forks moves as a copy."""
        if any(rows.device != device for rows in self._all_rows()):
            whole = self.read(self.capacity)
            self._become((), 0, lambda: whole.to(device))
        self.device = device

    def nbytes(self, length: int) -> int:
        """Bytes that ``length`` positions take: where all rows read the same, once."""
        found = 0
        for rows in self._all_rows():
            count = min(length, rows.shape[self.dim])
            found += (1 if is_expanded(rows) else rows.shape[0]) * count * self.row_nbytes
            length -= count
        return found

    @property
    def row_nbytes(self) -> int:
        """Bytes of one position of one row."""
        rows = next((rows for rows in self._all_rows() if rows.numel()), None)
        return 0 if rows is None else rows.numel() // (rows.shape[self.dim] * rows.shape[0]) * rows.element_size()

    def copy(self) -> "GrowableBuffer":
        """An independent copy. What is frozen stays so and is shared; the tail's storage is copied."""
        new = GrowableBuffer(self.dim, self.least, self.device, self.fixed)
        new._become(self.prefix, self.start, None if self.data is None else self.data.clone)
        return new

    def _all_rows(self) -> Iterator[Tensor]:
        yield from (piece.rows for piece in self.prefix)
        if self.data is not None:
            yield self.data

    def _pieces_below(self, length: int) -> tuple[Frozen, ...]:
        """Positions 0 to ``length`` as frozen pieces."""
        below, first = [], 0
        for piece in self.prefix:
            rows = piece.rows.shape[self.dim]
            if first < length:
                fits = rows <= length - first
                below.append(piece if fits else Frozen(piece.rows.narrow(self.dim, 0, length - first), piece))
            first += rows
        if length > self.start:
            below.append(Frozen(self.data.narrow(self.dim, 0, length - self.start)))  # type: ignore[union-attr]
        return tuple(below)

    def _part(self, position: int, keep_rest: bool) -> None:
        """Positions below ``position`` become the prefix; those after it (a copy) the tail, or nothing."""
        rest = self.pieces(self.capacity, position) if keep_rest and position < self.capacity else None
        prefix = self._pieces_below(position)
        self._become(prefix, position, None if rest is None else lambda: torch.cat(rest, self.dim))

    def _room(self, start: int, rows: Tensor) -> Tensor:
        """The tail, once it can take ``rows`` at ``start`` and what lies there is nobody else's."""
        if start < self.frozen:
            self._part(start, keep_rest=True)
        stop = start + rows.shape[self.dim]
        if stop > self.capacity:
            if self.frozen > self.start:
                self._part(self.frozen, keep_rest=True)  # what is lent is shared, not copied to grow
            self._grow(rows, start - self.start, stop - self.start)
        assert self.data is not None
        return self.data

    def _grow(self, like: Tensor, kept: int, needed: int) -> None:
        shape = list(like.shape)
        spare = _FORK_SPARE if self.prefix else _SPARE
        shape[self.dim] = self.least if self.fixed else max(needed + max(spare, needed // 8), self.least)
        make = torch.zeros if self.fixed else torch.empty
        # A buffer born in inference mode could not be written outside it.
        with torch.inference_mode(False):
            data = make(shape, dtype=like.dtype, device=self.device or like.device)
        if self.data is not None and kept:
            data.narrow(self.dim, 0, kept).copy_(self.data.narrow(self.dim, 0, kept))
        self.data = data

    def _become(self, prefix: tuple[Frozen, ...], start: int, make: Callable[[], Tensor] | None) -> None:
        """Hold this from now on; if there is no memory for it, what was held before."""
        data = None
        if make is not None:
            with torch.inference_mode(False), torch.no_grad():
                data = make()
        self.clear()
        self.prefix, self.start, self.data = prefix, start, data


def is_expanded(rows: Tensor) -> bool:
    """Whether several batch rows are one in memory."""
    return rows.shape[0] > 1 and rows.stride(0) == 0


def _expanded(rows: Tensor, count: int) -> Tensor:
    return rows.expand(count, *rows.shape[1:])


def _without_the_rest(piece: Frozen) -> Frozen:
    """The piece in storage of its own, if it would keep much more than itself alive."""
    rows = piece.rows[:1] if is_expanded(piece.rows) else piece.rows
    needed = rows.numel() * rows.element_size()
    if 2 * needed >= piece.rows.untyped_storage().nbytes():
        return piece
    with torch.inference_mode(False), torch.no_grad():
        return Frozen(_expanded(rows.clone(), piece.rows.shape[0]))
