"""Tensors that grow in place and can share a prefix, and the layer of them that transformers sees."""

import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

__all__ = ["GrowableBuffer", "SharedLayer"]

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

    Attributes:
        data: the tail; position p lies at p - ``start``.
        prefix, start: frozen pieces that hold positions 0 to ``start``.
    """

    __slots__ = ("_lent", "data", "device", "dim", "least", "prefix", "start")

    def __init__(self, dim: int, least: int = 0, device: torch.device | None = None):
        self.dim, self.least, self.device = dim, least, device
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
        if start < self.frozen:
            self._part(start, keep_rest=True)
        count = rows.shape[self.dim]
        if start + count > self.capacity:
            if self.frozen > self.start:
                self._part(self.frozen, keep_rest=True)  # what is lent is shared, not copied to grow
            self._grow(rows, start - self.start, start + count - self.start)
        self.data.narrow(self.dim, start - self.start, count).copy_(rows.detach())  # type: ignore[union-attr]

    def read(self, stop: int, start: int = 0) -> Tensor:
        """Positions ``start`` to ``stop``: a view, or a copy where they lie in several pieces."""
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

    def select(self, rows: Tensor) -> None:
        """Keep batch rows ``rows`` (an index, repetitions allowed), in that order."""
        if self.capacity:
            whole = self.read(self.capacity)
            self.clear()
            self._replace(lambda: whole.index_select(0, rows.to(whole.device)))

    def state(self) -> tuple[Any, ...]:
        """What `restore` needs to undo a `select`, which leaves the old tensors untouched."""
        return self.data, self.prefix, self.start, self._lent

    def restore(self, state: tuple[Any, ...]) -> None:
        """Be again what `state` was asked of."""
        self.data, self.prefix, self.start, self._lent = state

    def move(self, device: torch.device) -> None:
        """Keep the tensor on ``device`` from now on. What is shared with forks moves as a copy."""
        self.device = device
        if any(rows.device != device for rows in self._all_rows()):
            whole = self.read(self.capacity)
            self.clear()
            self._replace(lambda: whole.to(device))

    def nbytes(self, length: int) -> int:
        """Bytes that ``length`` positions take."""
        rows = next(self._all_rows(), None)
        if rows is None or not rows.shape[self.dim]:
            return 0
        return rows.numel() // rows.shape[self.dim] * length * rows.element_size()

    def copy(self) -> "GrowableBuffer":
        """An independent copy. What is frozen stays so and is shared; the tail's storage is copied."""
        new = GrowableBuffer(self.dim, self.least, self.device)
        new.prefix, new.start = self.prefix, self.start
        if (data := self.data) is not None:
            new._replace(data.clone)
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
        self.clear()
        self.prefix, self.start = prefix, position
        if rest is not None:
            self._replace(lambda: torch.cat(rest, self.dim))

    def _grow(self, like: Tensor, kept: int, needed: int) -> None:
        shape = list(like.shape)
        spare = _FORK_SPARE if self.prefix else _SPARE
        shape[self.dim] = max(needed + max(spare, needed // 8), self.least)
        # A buffer born in inference mode could not be written outside it.
        with torch.inference_mode(False):
            data = torch.empty(shape, dtype=like.dtype, device=self.device or like.device)
        if self.data is not None and kept:
            data.narrow(self.dim, 0, kept).copy_(self.data.narrow(self.dim, 0, kept))
        self.data = data

    def _replace(self, make: Callable[[], Tensor]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.data = make()


class SharedLayer(CacheLayerMixin):
    """One decoder layer's buffers: K and V (or V_base) by stream, LR by bank.

    A stream is the key under which K and V lie: ``None`` where all agents share them, the agent under ``non_shared``.
    The layer stores and hands out; what is read, by whom and how far is the cache's to say.
    """

    is_croppable = True
    is_sliding = False

    def __init__(self, cache: Any = None, reserve: int = 0, device: torch.device | None = None):
        # CacheLayerMixin.__init__ would set `keys` and `values`, which are views here.
        self.k: dict[Hashable, GrowableBuffer] = {}
        self.v: dict[Hashable, GrowableBuffer] = {}
        self.lr: dict[Hashable, GrowableBuffer] = {}
        self.reserve, self.device = reserve, device
        self.home: torch.device | None = None  # where the rows come from
        # Weakly: buffers must die with their cache, not when the garbage collector gets round to it.
        self._cache = None if cache is None else weakref.ref(cache)

    def groups(self) -> tuple[tuple[str, dict[Hashable, GrowableBuffer]], ...]:
        """The layer's buffers by name: whole-cache operations are written once over this, or over `buffers`."""
        return ("k", self.k), ("v", self.v), ("lr", self.lr)

    def buffers(self) -> Iterator[GrowableBuffer]:
        """Every buffer of the layer."""
        for _, group in self.groups():
            yield from group.values()

    def write_kv(self, stream: Hashable, start: int, key: Tensor, value: Tensor) -> None:
        """Store K and V [B, Hkv, q, D] of positions ``start`` and after."""
        self.home = key.device
        if stream not in self.k:
            self.k[stream], self.v[stream] = (GrowableBuffer(2, self.reserve, self.device) for _ in range(2))
        self.k[stream].write(start, key)
        self.v[stream].write(start, value)

    def write_lr(self, bank: Hashable, start: int, rows: Tensor) -> None:
        """Store LR rows [B, q, width] of positions ``start`` and after."""
        if bank not in self.lr:
            self.lr[bank] = GrowableBuffer(1, self.reserve, self.device)
        self.lr[bank].write(start, rows)

    def read(self, group: str, key: Hashable, stop: int, start: int = 0) -> Tensor:
        """Positions ``start`` to ``stop`` of a buffer, where its rows came from: a view unless it is offloaded."""
        rows: Tensor = getattr(self, group)[key].read(stop, start)
        return rows if self.device is None or self.home is None else rows.to(self.home, non_blocking=True)

    def fork(self, cache: Any, length_of: Callable[[str, Hashable], int]) -> "SharedLayer":
        """A layer for another cache that shares what is here; ``length_of(group, key)``: how much of a buffer is valid."""
        new = SharedLayer(cache, device=self.device)
        new.home = self.home
        for name, group in self.groups():
            setattr(new, name, {key: buffer.fork(length_of(name, key)) for key, buffer in group.items()})
        return new

    def truncate(self, length_of: Callable[[str, Hashable], int]) -> None:
        """Let go of shared storage beyond what is valid."""
        for name, group in self.groups():
            for key, buffer in group.items():
                buffer.truncate(length_of(name, key))

    def clear(self) -> None:
        """Give all storage back."""
        for _, group in self.groups():
            group.clear()

    def copy(self, cache: Any) -> "SharedLayer":
        """A copy of all buffers, for another cache."""
        new = SharedLayer(cache, self.reserve, self.device)
        new.home = self.home
        for name, group in self.groups():
            setattr(new, name, {key: buffer.copy() for key, buffer in group.items()})
        return new

    # --- what transformers asks of a layer ---------------------------------------------------------------------------

    @property
    def is_initialized(self) -> bool:
        return bool(self.k)

    @property
    def keys(self) -> Tensor | None:
        """K of the active agent, [B, Hkv, L, D], a view."""
        return self._active(self.k)

    @property
    def values(self) -> Tensor | None:
        """V of the active agent, or V_base where the scheme splits values, [B, Hkv, L, D], a view."""
        return self._active(self.v)

    def _active(self, group: dict[Hashable, GrowableBuffer]) -> Tensor | None:
        owner = self._owner()
        buffer, length = group.get(owner.active_stream()), owner.get_seq_length()
        return buffer.read(length) if buffer is not None and length else None

    def _owner(self) -> Any:
        owner = self._cache() if self._cache is not None else None
        if owner is None:
            raise RuntimeError("This layer belongs to no cache any more: keep the LoRASharedCache it came from.")
        return owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: buffers are made by the first write."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        owner = self._owner()
        return owner.update(key_states, value_states, owner.layers.index(self))

    @property
    def batch_size(self) -> int:
        return self._owner().batch_size

    @property
    def max_batch_size(self) -> int:
        return self.batch_size

    def offload(self) -> None:
        """Keep the layer's buffers in CPU memory until `prefetch`. A forward then reads them from there."""
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Bring the layer's buffers back to where its rows come from."""
        if self.home is not None:
            self._move(self.home)

    def _move(self, device: torch.device) -> None:
        self.device = device
        for buffer in self.buffers():
            buffer.move(device)

    def crop(self, tokens_to_remove: int) -> None:
        raise self._whole("crop")

    def reset(self) -> None:
        raise self._whole("reset")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise self._whole("reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise self._whole("batch_repeat_interleave")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise self._whole("batch_select_indices")

    def _whole(self, name: str) -> NotImplementedError:
        return NotImplementedError(
            f"{name}() of one layer: layers share their lengths and the token record. Call the cache's {name}()."
        )

    def get_seq_length(self) -> int:
        return self._owner().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner().get_mask_sizes(query_length, 0)

    def get_max_length(self) -> int:
        return -1
