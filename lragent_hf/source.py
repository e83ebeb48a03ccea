"""What an agent reads of one layer: from buffers as they lie, in pieces where a fork left some, or from working copies."""

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from .attention.parts import Part
from .key_split import KeySplit
from .layer import LayerBinding, Reading
from .storage import SharedLayer

__all__ = ["Source", "reconstruct"]


@dataclass(slots=True)
class Source:
    """The buffers of one layer for the agent of one forward.

    Attributes:
        store, stream: where they lie, and under which key its K and V.
        layer: the binding; ``None`` where attention has no v_proj.
        keys: what the forward knows of keys in two parts, or ``None``.
        b, b_k: the agent's B on values and on keys, [Hkv, r, D], ``None`` without.
    """

    store: SharedLayer
    stream: Hashable
    layer: LayerBinding | None
    keys: KeySplit | None
    b: Tensor | None
    b_k: Tensor | None

    def whole(self, key_copy: bool, value_copy: bool, stop: int) -> Part:
        """Positions 0 to ``stop`` in one piece, from working copies where these are wanted and can be had."""
        store, layer, keys, b, b_k = self.store, self.layer, self.keys, self.b, self.b_k
        k_copy = b_k is not None and store.works_on_copy("k", self.stream, key_copy)
        v_copy = b is not None and store.works_on_copy("v", self.stream, value_copy)
        part = self._part(0, stop, k_lr=not k_copy, v_lr=not v_copy)
        if k_copy and layer is not None and keys is not None and b_k is not None:
            part = part._replace(k=keys.materialised(store, self.stream, layer, b_k))
        if v_copy and layer is not None and b is not None:

            def make(start: int, stop: int) -> Tensor:
                piece = self._part(start, stop, k_lr=False)
                return piece.v if piece.v_lr is None else piece.v + piece.v_lr.unsqueeze(1) @ b

            part = part._replace(v=store.work["v"].read(layer.v.places, b, stop, make))
        return part

    def parts(self, past: int, stop: int) -> list[Part]:
        """The cache of a fork as it lies, if attention over rows from ``past`` on can take it apart; else nothing."""
        store, layer = self.store, self.layer
        if layer is None:
            return []
        read = [store.k[self.stream], *(store.lr[key] for key, _ in layer.v.places)]
        read += [store.k_lr[key] for key, _ in layer.k.places]
        if not any(buffer.prefix for buffer in read):
            return []
        cuts = sorted({end for buffer in read for end in buffer.ends()})
        if cuts[-1] > past:
            return []
        store.drop_work()
        return [self._part(first, last) for first, last in pairwise([0, *cuts, stop]) if first < last]

    def _part(self, start: int, stop: int, k_lr: bool = True, v_lr: bool = True) -> Part:
        """Positions ``start`` to ``stop`` as they lie, with what is added to keys and values or without."""
        store, layer = self.store, self.layer
        k, v = store.read("k", self.stream, stop, start), store.read("v", self.stream, stop, start)
        if layer is None:
            return Part(k, v)
        keys, b_k = self.keys, self.b_k
        extra = keys.added(store, layer, b_k, start, stop) if k_lr and keys is not None and b_k is not None else None
        return Part(k, v, store.read_lr("lr", layer.v.places, stop, start) if v_lr else None, extra)


def reconstruct(key: Tensor, value: Tensor, reading: Reading) -> tuple[Tensor, Tensor]:
    """K and V = V_base + V_lr B (paper, section 3; DoRA: times its gain), for attention that knows only K and V."""
    dtype = value.dtype
    if reading.key is not None:
        key = key + reading.key.added()
    if reading.v_lr is not None and reading.b is not None:
        value = value + reading.v_lr.unsqueeze(1) @ reading.b
    if reading.gain is not None:
        value = value * reading.gain
    if reading.bias is not None:
        value = value + reading.bias
    return key, value.to(dtype)
