"""The buffers of one decoder layer, as transformers sees them."""

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .banks import Place
from .buffer import GrowableBuffer, is_expanded
from .working import WorkingCopy

__all__ = ["SharedLayer"]

_DIM = {"k": 2, "v": 2, "lr": 1, "k_lr": 1}
"""The dimension of positions in the buffers of each group."""


class SharedLayer(CacheLayerMixin):
    """One decoder layer's buffers: K and V (or V_base) by stream, LR of values and of keys by bank.

    A stream is the key under which K and V lie: ``None`` where all agents share them, the agent under ``non_shared``.
    The layer stores and hands out; what is read, by whom and how far is the cache's to say.
    """

    is_croppable = True
    is_sliding = False

    def __init__(
        self, cache: Any = None, reserve: int = 0, device: torch.device | None = None, limit: int | None = None
    ):
        # CacheLayerMixin.__init__ would set `keys` and `values`, which are views here.
        self.k: dict[Hashable, GrowableBuffer] = {}
        self.v: dict[Hashable, GrowableBuffer] = {}
        self.lr: dict[Hashable, GrowableBuffer] = {}
        self.k_lr: dict[Hashable, GrowableBuffer] = {}
        self.work = {"k": WorkingCopy(), "v": WorkingCopy()}
        self.reserve, self.device, self.limit = limit or reserve, device, limit
        self.step: Any = None  # a `StaticLayer`, while one token of fixed shape runs
        self.home: torch.device | None = None  # where the rows come from
        # Weakly: buffers must die with their cache, not when the garbage collector gets round to it.
        self._cache = None if cache is None else weakref.ref(cache)

    def groups(self) -> tuple[tuple[str, dict[Hashable, GrowableBuffer]], ...]:
        """The layer's buffers by name: whole-cache operations are written once over this, or over `buffers`."""
        return ("k", self.k), ("v", self.v), ("lr", self.lr), ("k_lr", self.k_lr)

    def group(self, name: str) -> dict[Hashable, GrowableBuffer]:
        """Buffers of that name."""
        found: dict[Hashable, GrowableBuffer] = getattr(self, name)
        return found

    def new_buffer(self, group: str) -> GrowableBuffer:
        """An empty buffer for that group."""
        return GrowableBuffer(_DIM[group], self.reserve, self.device, fixed=self.limit is not None)

    def buffers(self) -> Iterator[GrowableBuffer]:
        """Every buffer of the layer, but the working copies."""
        for _, group in self.groups():
            yield from group.values()

    def write_kv(self, stream: Hashable, start: int, key: Tensor, value: Tensor) -> None:
        """Store K and V [B, Hkv, q, D] of positions ``start`` and after."""
        self.home = key.device
        self.cut_work(start)
        if stream not in self.k:
            self.k[stream], self.v[stream] = (self.new_buffer(name) for name in "kv")
        self.k[stream].write(start, key)
        self.v[stream].write(start, value)

    def write_lr(self, group: str, bank: Hashable, start: int, rows: Tensor) -> None:
        """Store LR rows [B, q, width] of positions ``start`` and after: of values ("lr") or of keys ("k_lr")."""
        buffers = self.group(group)
        self.cut_work(start)
        if bank not in buffers:
            buffers[bank] = self.new_buffer(group)
        buffers[bank].write(start, rows)

    def read(self, group: str, key: Hashable, stop: int, start: int = 0) -> Tensor:
        """Positions ``start`` to ``stop`` of a buffer, where its rows came from: a view unless it is offloaded."""
        rows: Tensor = self.group(group)[key].read(stop, start)
        return rows if self.device is None or self.home is None else rows.to(self.home, non_blocking=True)

    def read_lr(self, group: str, places: Sequence[Place], stop: int, start: int = 0) -> Tensor | None:
        """LR [B, n, R] of these places, side by side: a view where there is one. ``None`` where there is none."""
        slices = [self.read(group, key, stop, start)[..., first : first + rank] for key, (first, rank) in places]
        if len(slices) < 2:
            return slices[0] if slices else None
        if all(map(is_expanded, slices)):  # one row in memory stays one
            return torch.cat([one[:1] for one in slices], -1).expand(slices[0].shape[0], -1, -1)
        return torch.cat(slices, -1)

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
        self.cut_work(max((length_of("k", stream) for stream in self.k), default=0))

    def clear(self) -> None:
        """Give all storage back."""
        for _, group in self.groups():
            group.clear()
        self.drop_work()

    def cut_work(self, length: int) -> None:
        """What the working copies hold of positions from ``length`` on is not as it was."""
        for copy in self.work.values():
            copy.cut(length)

    def drop_work(self, *names: str) -> None:
        """Let go of the working copies of these ("k", "v"), or of both: they are made anew when they are asked for."""
        for name in names or self.work:
            if self.work[name].buffer.capacity:
                self.work[name] = WorkingCopy()

    def works_on_copy(self, name: str, stream: Hashable, wanted: bool) -> bool:
        """Whether a working copy is used, if it is ``wanted``.

        Not by a fork, which would copy what it shares, nor where buffers are offloaded.
        """
        works = wanted and self.device in (None, self.home) and not self.group(name)[stream].prefix
        if not works:
            self.drop_work(name)
        return works

    def copy(self, cache: Any) -> "SharedLayer":
        """A copy of all buffers, for another cache."""
        new = SharedLayer(cache, self.reserve, self.device, self.limit)
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
        self.drop_work()
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
        return -1 if self.limit is None else self.limit
