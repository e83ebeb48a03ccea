"""One attention layer: its modules, and what passes between v_proj, storage and attention during a forward."""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from .attention.parts import Part
from .dora import GainStore
from .tap import Tap

if TYPE_CHECKING:
    from .binding import ModelBinding

__all__ = ["ATTRIBUTE", "LayerBinding", "Place", "Reading"]

ATTRIBUTE = "lragent_binding"
"""Where a binding is kept: on the decoder and on each attention module; it lives and dies with the model."""

Place = tuple[Hashable, tuple[int, int]]
"""Where an adapter's LR lies: bank, and (first column, rank)."""


class Reading(NamedTuple):
    """What the attention function of one layer adds to ``value``: LR [B, L, R], B [Hkv, R, D], a constant [Hkv, 1, D].

    Where each batch row runs adapters of its own, B and the constant have a first dimension for the rows.

    With DoRA the sum of ``value`` and LR B is multiplied by ``gain`` [Hkv, 1, D] before the constant is added.

    ``value`` is V_base as `update` handed it out: attention over anything else would add the LR to the wrong thing.
    ``parts``: where the cache lies in several, all of it; ``value`` and the K with it are then the last part's.
    """

    value: Tensor
    v_lr: Tensor | None = None
    b: Tensor | None = None
    bias: Tensor | None = None
    gain: Tensor | None = None
    parts: Sequence[Part] = ()


class LayerBinding:
    """One attention layer: its modules, and during a forward what passes between v_proj, storage and attention.

    Attributes:
        index, name: layer index and full name of the attention module; ``position``: its place among these layers.
        v_proj: the projection as PEFT left it, a LoRA layer or a plain one.
        v_out: v_proj's output of this forward, to see that nothing transforms it on the way into the cache.
        lr_rows: bank -> (first position, LR rows) that v_proj's hook computed and `update` stores.
        places: where the LR of the agent's adapters lies.
        reading: what `update` leaves for the attention function, which takes it.
        tap, gains: what stands in for its adapters' variants; the gains of those that are DoRA.
    """

    def __init__(self, owner: "ModelBinding", position: int, index: int, name: str, attention: nn.Module):
        self.owner, self.position, self.index, self.name, self.attention = owner, position, index, name, attention
        self.tap, self.gains = Tap(), GainStore()
        self.v_proj: nn.Module | None = None
        self._handle: Any = None
        self.forget()

    def forget(self) -> None:
        """Drop what belongs to one forward."""
        self.v_out: Tensor | None = None
        self.v_version = -1
        self.lr_rows: dict[Hashable, tuple[int, Tensor]] = {}
        self.places: list[Place] = []
        self.reading: Reading | None = None
        self.tap.passed = 0

    @property
    def k_proj(self) -> nn.Module | None:
        return getattr(self.attention, "k_proj", None)

    def resolve(self) -> bool:
        """Hook v_proj as it is now (loading an adapter can replace the module). Returns whether it had changed."""
        v_proj: nn.Module = self.attention.v_proj  # type: ignore[assignment]
        if v_proj is self.v_proj:
            return False
        if self._handle is not None:
            self._handle.remove()
        self.v_proj = v_proj
        self._handle = v_proj.register_forward_hook(self._project, with_kwargs=True)
        return True

    def detach(self) -> None:
        """Remove hook, taps and the mark on the module."""
        self.tap.remove()
        if self._handle is not None:
            self._handle.remove()
        self.attention.__dict__.pop(ATTRIBUTE, None)

    def _project(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        forward = self.owner.forward
        if forward is None or not forward.splits:
            return None
        return forward.project(self, args[0], output)
