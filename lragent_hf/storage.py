"""Tensors that grow in place, and the layer of them that transformers sees."""

import weakref
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

__all__ = ["GrowableBuffer", "SharedLayer"]

_SPARE = 256  # positions of spare room at least: growing a short buffer often costs more than the room


class GrowableBuffer:
    """A tensor with room to spare along ``dim``, written in place: appending never copies what is there.

    It does not know how much of it is valid: lengths live once, in the cache. Growing adds an eighth (or ``_SPARE``), so
    a token is copied eight times on average however long the buffer, and long buffers reserve 12.5 % at most.

    Args:
        dim: the dimension of positions: 2 for K and V [B, H, L, D], 1 for LR [B, L, R] and for the token record [B, L].
        least: the smallest capacity to allocate.
    """

    __slots__ = ("data", "dim", "least")

    def __init__(self, dim: int, least: int = 0):
        self.dim, self.least = dim, least
        self.data: Tensor | None = None

    @property
    def capacity(self) -> int:
        """Positions there is room for."""
        return 0 if self.data is None else self.data.shape[self.dim]

    def write(self, start: int, rows: Tensor) -> None:
        """Put ``rows`` at positions ``start`` and after. Positions below ``start`` are kept, whatever happens."""
        count = rows.shape[self.dim]
        if self.data is None or start + count > self.capacity:
            self._grow(rows, start, start + count)
        self.data.narrow(self.dim, start, count).copy_(rows.detach())  # type: ignore[union-attr]

    def read(self, stop: int, start: int = 0) -> Tensor:
        """A view of positions ``start`` to ``stop``."""
        if self.data is None:
            raise IndexError(f"positions {start} to {stop} were asked of a buffer that holds none")
        return self.data.narrow(self.dim, start, stop - start)

    def select(self, rows: Tensor) -> None:
        """Keep batch rows ``rows`` (an index, repetitions allowed), in that order."""
        if self.data is not None:
            self._replace(lambda data: data.index_select(0, rows.to(data.device)))

    def nbytes(self, length: int) -> int:
        """Bytes that ``length`` positions take."""
        if self.data is None or self.capacity == 0:
            return 0
        return self.data.numel() // self.capacity * length * self.data.element_size()

    def copy(self) -> "GrowableBuffer":
        """An independent copy, storage included."""
        new = GrowableBuffer(self.dim, self.least)
        new.data = self.data
        new._replace(torch.clone)
        return new

    def _grow(self, like: Tensor, kept: int, needed: int) -> None:
        shape = list(like.shape)
        shape[self.dim] = max(needed + max(_SPARE, needed // 8), self.least)
        # A buffer born in inference mode could not be written outside it.
        with torch.inference_mode(False):
            data = torch.empty(shape, dtype=like.dtype, device=like.device)
        if self.data is not None and kept:
            data.narrow(self.dim, 0, kept).copy_(self.data.narrow(self.dim, 0, kept))
        self.data = data

    def _replace(self, function: Any) -> None:
        if self.data is not None:
            with torch.inference_mode(False), torch.no_grad():
                self.data = function(self.data)


class SharedLayer(CacheLayerMixin):
    """One decoder layer's buffers: K and V (or V_base) by stream, LR by bank.

    A stream is the key under which K and V lie: ``None`` where all agents share them, the agent under ``non_shared``.
    The layer stores and hands out; what is read, by whom and how far is the cache's to say.
    """

    is_croppable = True
    is_sliding = False

    def __init__(self, cache: Any = None, reserve: int = 0):
        # CacheLayerMixin.__init__ would set `keys` and `values`, which are views here.
        self.k: dict[Hashable, GrowableBuffer] = {}
        self.v: dict[Hashable, GrowableBuffer] = {}
        self.lr: dict[Hashable, GrowableBuffer] = {}
        self.reserve = reserve
        # Weakly: buffers must die with their cache, not when the garbage collector gets round to it.
        self._cache = None if cache is None else weakref.ref(cache)

    def buffers(self) -> Iterator[GrowableBuffer]:
        """Every buffer of the layer: whole-cache operations are written once over this."""
        for group in (self.k, self.v, self.lr):
            yield from group.values()

    def write_kv(self, stream: Hashable, start: int, key: Tensor, value: Tensor) -> None:
        """Store K and V [B, Hkv, q, D] of positions ``start`` and after."""
        if stream not in self.k:
            self.k[stream], self.v[stream] = GrowableBuffer(2, self.reserve), GrowableBuffer(2, self.reserve)
        self.k[stream].write(start, key)
        self.v[stream].write(start, value)

    def write_lr(self, bank: Hashable, start: int, rows: Tensor) -> None:
        """Store LR rows [B, q, width] of positions ``start`` and after."""
        if bank not in self.lr:
            self.lr[bank] = GrowableBuffer(1, self.reserve)
        self.lr[bank].write(start, rows)

    def clear(self) -> None:
        """Give all storage back."""
        for group in (self.k, self.v, self.lr):
            group.clear()

    def copy(self, cache: Any) -> "SharedLayer":
        """A copy of all buffers, for another cache."""
        new = SharedLayer(cache, self.reserve)
        for name in ("k", "v", "lr"):
            setattr(new, name, {key: buffer.copy() for key, buffer in getattr(self, name).items()})
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

    def get_seq_length(self) -> int:
        return self._owner().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner().get_mask_sizes(query_length, 0)

    def get_max_length(self) -> int:
        return -1
