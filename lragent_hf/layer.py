"""One attention layer: its projections, and what passes between them, storage and attention during a forward."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from .attention.parts import KeyLR, Part
from .dora import GainStore
from .rotary import Angles, Rotation, read_angles
from .site import Site

if TYPE_CHECKING:
    from .binding import ModelBinding

__all__ = ["ATTRIBUTE", "LayerBinding", "Reading"]

ATTRIBUTE = "lragent_binding"
"""Where a binding is kept: on the decoder and on each attention module; it lives and dies with the model."""


class Reading(NamedTuple):
    """What the attention function of one layer adds to ``value``: LR [B, L, R], B [Hkv, R, D], a constant [Hkv, 1, D].

    Where each batch row runs adapters of its own, B and the constant have a first dimension for the rows.
    With DoRA the sum of ``value`` and LR B is multiplied by ``gain`` [Hkv, 1, D] before the constant is added.
    ``key``: what it adds to the keys.

    ``value`` is V_base as `update` handed it out: attention over anything else would add the LR to the wrong thing.
    ``k``: the K that goes with it, where something is added to keys too, or they are in parts.
    ``parts``: where the cache lies in several, all of it; ``value`` and the K with it are then the last part's.
    """

    value: Tensor
    v_lr: Tensor | None = None
    b: Tensor | None = None
    bias: Tensor | None = None
    gain: Tensor | None = None
    key: KeyLR | None = None
    parts: Sequence[Part] = ()
    k: Tensor | None = None


class LayerBinding:
    """One attention layer: its projections, and during a forward what passes between them, storage and attention.

    Attributes:
        index, name, kind: layer index, full name of the attention module, and its layer type where the model has several.
        v, k: the projections whose adapters can be split off.
        reading: what `update` leaves for the attention function, which takes it.
        gains: the gains of adapters on v_proj that are DoRA.
        angles: what the attention module was given as ``position_embeddings``, where keys are split.
        rotation: how it turns its keys, once that is known.
        step: in static mode, the tensors it works on during one token; compiled code asks for nothing else here.
    """

    def __init__(self, owner: "ModelBinding", position: int, index: int, name: str, attention: nn.Module):
        self.owner, self.index, self.name, self.attention = owner, index, name, attention
        self.v = Site(attention, name, "v_proj", position, owner.project)
        self.k = Site(attention, name, "k_proj", position, owner.project)
        kinds = getattr(owner.decoder.config, "layer_types", None) or ()
        self.kind: str = kinds[index] if index < len(kinds) else "all"
        self.gains = GainStore()
        self.rotation: Rotation | None = None
        self.step: Any = None
        self._listener: Any = None
        self.forget()

    @property
    def sites(self) -> tuple[Site, Site]:
        """Both projections."""
        return self.v, self.k

    def forget(self) -> None:
        """Drop what belongs to one forward."""
        for site in self.sites:
            site.forget()
        self.reading: Reading | None = None
        self.angles: Angles | None = None

    def resolve(self) -> bool:
        """Hook the projections as they are now (k_proj once keys are split). Returns whether one had changed."""
        changed = [site.resolve() for site in (self.sites if self._listener is not None else (self.v,))]
        return any(changed)

    def split_keys(self) -> None:
        """From now on hook k_proj too, and note the angles that the attention module is given."""
        if self._listener is None:
            self._listener = self.attention.register_forward_pre_hook(self._hear, with_kwargs=True)
            self.k.resolve()

    def detach(self) -> None:
        """Remove hooks, taps and the mark on the module."""
        for site in self.sites:
            site.detach()
        if self._listener is not None:
            self._listener.remove()
        self.attention.__dict__.pop(ATTRIBUTE, None)

    def _hear(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.owner.forward is not None:
            self.angles = read_angles(args, kwargs)
