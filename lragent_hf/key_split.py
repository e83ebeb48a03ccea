"""What one forward does for keys that are kept in two parts: what was done to them, by which angles, and what is added."""

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._compat import moving_angles
from .attention.parts import KeyLR
from .buffer import GrowableBuffer
from .errors import UnsupportedModelError
from .layer import LayerBinding
from .ledger import Plan
from .rotary import Angles, Rotation, find_rotation, matches
from .storage import SharedLayer

if TYPE_CHECKING:
    from .cache import LoRASharedCache

__all__ = ["KeySplit"]


class KeySplit:
    """The keys of one forward.

    Attributes:
        rotations: how layers turn their keys, as far as this forward tells.
        angles: (kind of layer, device) -> what the layers of it were given.
        writes: whether angles are stored: like an LR they are right as a prefix, so not by who starts beyond it. Nobody
            with LoRA on k_proj does.
    """

    def __init__(
        self,
        cache: "LoRASharedCache",
        plan: Plan,
        own: list[tuple[str, Hashable]],
        keep: Callable[[GrowableBuffer, int, int], None],
    ):
        self.cache, self.plan, self.own, self._keep = cache, plan, own, keep
        self.rotations: dict[int, Rotation | None] = {}
        self.angles: dict[tuple[str, torch.device], Angles] = {}
        self.writes = plan.past <= cache.ledger.rotary

    def check(self, layer: LayerBinding, key: Tensor) -> None:
        """K must be k_proj's output under the rotary embedding and nothing else; finds out how it turns."""
        layer.k.check(self.plan.agent, self.own, self.cache.roster.banks)
        states = layer.k.states(key)
        fits = False
        if states is not None and layer.rotation is not None:
            fits = key.shape[2] == 1 or matches(layer.rotation, states, key, layer.angles)
        elif states is not None:
            self.rotations[layer.index], certain = find_rotation(states, key, layer.angles)
            fits = self.rotations[layer.index] is not None
            if certain:
                layer.rotation = self.rotations[layer.index]
        if not fits:
            raise UnsupportedModelError(
                f"{layer.name} does more to its keys than turn them by the position_embeddings it is given (a norm, a "
                "clip, angles of its own), so what adapters add to them on k_proj cannot be kept apart. Use key_lr=False, "
                "which shares keys whole, or scheme='full_shared' or 'non_shared'."
            )

    def fold(self, layer: LayerBinding, key: Tensor) -> Tensor | None:
        """The agent's B on K; stores the angles of the positions that are new, once per kind of layer."""
        rotation, given = self._rotation(layer), layer.angles
        if rotation.form != "none" and given is not None:
            known = self.angles.get((layer.kind, given[0].device))
            if known is None or known[0] is not given[0]:
                self._write_angles(layer, given, rotation.angles(given), key.shape[0])
        b, _ = layer.k.fold(self.plan.agent, self.own, self.cache.roster.banks, key)
        return b

    def added(self, store: SharedLayer, layer: LayerBinding, b: Tensor, start: int, stop: int) -> KeyLR | None:
        """What the agent's adapters add to the keys of positions ``start`` to ``stop``."""
        k_lr = store.read_lr("k_lr", layer.k.places, stop, start)
        if k_lr is None:
            return None
        rotation = self._rotation(layer)
        if rotation.form == "none" or layer.angles is None:
            return KeyLR(k_lr, b)
        cos, sin = self.cache.rotary.read(layer.kind, layer.angles[0].device, stop, start)
        return KeyLR(k_lr, b, cos, sin, rotation.interleaved)

    def materialised(self, store: SharedLayer, stream: Hashable, layer: LayerBinding, b: Tensor) -> Tensor:
        """The agent's keys, K_base and what its adapters add, from the layer's working copy."""

        def make(start: int, stop: int) -> Tensor:
            extra = self.added(store, layer, b, start, stop)
            base = store.read("k", stream, stop, start)
            return base if extra is None else extra.added().add_(base)

        return store.work["k"].read(layer.k.places, b, self.plan.stop, make)

    def _rotation(self, layer: LayerBinding) -> Rotation:
        rotation = layer.rotation or self.rotations[layer.index]
        assert rotation is not None  # `check` came before
        return rotation

    def _write_angles(self, layer: LayerBinding, given: Angles, angles: Angles, rows: int) -> None:
        group = layer.kind, given[0].device
        known = self.angles.get(group)
        if known is not None:
            if not all(map(torch.equal, known, given)):
                raise UnsupportedModelError(
                    f"{layer.name} turns its keys by other angles than the layers of its kind before it. Use key_lr=False."
                )
            return
        self.angles[group] = given
        if not self.writes:
            return
        first, valid = self.plan.rotary_from, self.cache.ledger.rotary
        if self.cache.ledger.total > valid and moving_angles(self.cache.binding.decoder.config):
            raise UnsupportedModelError(
                f"{layer.name} turns keys by angles that change as the context grows, and what is cached was turned before "
                "an adapter on k_proj joined. Name it in agents= from the start (under base_shared: let it run first), or "
                "use key_lr=False."
            )
        for buffer in self.cache.rotary.group(*group, valid, angles[0].shape[-1]):
            self._keep(buffer, first, valid)
        if first < self.plan.stop:
            cos, sin = (part[:, first - self.plan.past :].expand(rows, -1, -1) for part in angles)
            self.cache.rotary.write(layer.kind, first, (cos, sin))
