"""Rotary positions as a model applies them, read from what it does: for keys whose adapter part is cached before them.

    K = rot(X W_k) + rot((X A_k) B_k)        rot is linear, and the same for both parts (paper, appendix D.1)

The angles come from the ``position_embeddings`` that the attention module is given; how it uses them is found by turning
the projection's output and comparing with the keys that reach the cache. A model that does anything else to its keys (a
norm, a clip) matches no way, and is refused.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attention.reference import rotated
from .buffer import GrowableBuffer

__all__ = ["Angles", "RotaryStore", "Rotation", "find_rotation", "matches", "read_angles"]

Angles = tuple[Tensor, Tensor]
"""cos and sin [B or 1, q, n] as a model hands them to its attention modules."""


class Rotation(NamedTuple):
    """How one attention layer turns its keys.

    Attributes:
        form: where the angle of each pair of columns stands in cos and sin: ``"cat"``: their first half, ``"repeat"``:
            every second, ``"half"``: all of it. ``"none"``: keys do not turn.
        interleaved: pairs are columns (2i, 2i + 1), else (i, i + n).
    """

    form: str
    interleaved: bool = False

    def angles(self, given: Angles) -> Angles:
        """One angle a pair, [B or 1, q, Dr / 2]."""
        return _FORMS[self.form](given[0]), _FORMS[self.form](given[1])

    def turn(self, states: Tensor, given: Angles | None) -> Tensor:
        """``states`` [B, H, q, D] as the model turns them."""
        if self.form == "none" or given is None:
            return states
        return rotated(states, *self.angles(given), self.interleaved)


_FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "cat": lambda t: t[..., : t.shape[-1] // 2],
    "repeat": lambda t: t[..., ::2],
    "half": lambda t: t,
}


def read_angles(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Angles | None:
    """``position_embeddings`` of an attention module's call: two equal shapes [B or 1, q, n], or ``None``."""
    for given in (kwargs.get("position_embeddings"), *args):
        if isinstance(given, tuple | list) and len(given) == 2 and all(isinstance(part, Tensor) for part in given):
            cos, sin = given
            if cos.shape == sin.shape and cos.ndim == 3 and cos.is_floating_point():
                return cos, sin
    return None


def find_rotation(states: Tensor, key: Tensor, given: Angles | None) -> tuple[Rotation | None, bool]:
    """The way in which ``states`` [B, H, q, D] became ``key``, and whether it is the only one that fits.

    At position 0 alone most ways fit; each of them is then right.
    """
    found = [rotation for rotation in _candidates(states, given) if matches(rotation, states, key, given)]
    return (found[0], len(found) == 1) if found else (None, False)


def matches(rotation: Rotation, states: Tensor, key: Tensor, given: Angles | None) -> bool:
    """Whether ``key`` is ``states`` turned that way, to rounding (models turn in their own dtype, or in fp32)."""
    turned = rotation.turn(states, given)
    if turned.shape != key.shape:
        return False
    scale = states.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(key.dtype).tiny)
    # Some turn in fp32 whatever their dtype, and under autocast keys come in fp32 from half-precision projections.
    eps = max(torch.finfo(dtype).eps for dtype in (key.dtype, states.dtype, torch.float32))
    return bool(((turned - key).abs() <= 3 * eps * scale).all())


def _candidates(states: Tensor, given: Angles | None) -> Iterator[Rotation]:
    if given is not None and given[0].shape[-2] == states.shape[-2]:
        width = given[0].shape[-1]
        half = width // 2
        forms = []
        if width % 2 == 0 and width <= states.shape[-1]:
            if all(torch.equal(part[..., :half], part[..., half:]) for part in given):
                forms.append("cat")
            if all(torch.equal(part[..., ::2], part[..., 1::2]) for part in given):
                forms.append("repeat")
        if 2 * width <= states.shape[-1]:
            forms.append("half")
        yield from (Rotation(form, interleaved) for form in forms for interleaved in (False, True))
    yield Rotation("none")


class RotaryStore:
    """cos and sin of every cached position, [B, L, Dr / 2] each: once per kind of layer and device, not per layer.

    Attributes:
        groups: (kind of layer, device) -> cos and sin.
    """

    def __init__(self) -> None:
        self.groups: dict[tuple[str, torch.device], tuple[GrowableBuffer, GrowableBuffer]] = {}

    def buffers(self) -> Iterator[GrowableBuffer]:
        """Every buffer of the store."""
        for pair in self.groups.values():
            yield from pair

    def group(self, kind: str, device: torch.device, length: int, width: int) -> tuple[GrowableBuffer, GrowableBuffer]:
        """cos and sin of ``width`` pairs for layers of that kind on that device, right for ``length`` positions.

        They may come from another device, or have been written at position 0, where it does not show how many pairs turn:
        all their angles are the same there.
        """
        found = self.groups.get((kind, device))
        if found is None:
            found = GrowableBuffer(1), GrowableBuffer(1)
            other = next((pair for (name, _), pair in self.groups.items() if name == kind), None)
            for mine, theirs in zip(found, other or (), strict=False):
                if length:
                    mine.write(0, theirs.read(length).to(device))
            self.groups[kind, device] = found
        for buffer in found if length else ():
            if (kept := buffer.read(length)).shape[-1] != width:
                buffer.clear()
                buffer.write(0, kept[..., :1].expand(-1, -1, width))
        return found

    def write(self, kind: str, start: int, angles: Angles) -> None:
        """Store the angles of positions ``start`` and after."""
        for buffer, rows in zip(self.group(kind, angles[0].device, start, angles[0].shape[-1]), angles, strict=True):
            buffer.write(start, rows)

    def read(self, kind: str, device: torch.device, stop: int, start: int = 0) -> Angles:
        """Angles of positions ``start`` to ``stop``."""
        cos, sin = self.groups[kind, device]
        return cos.read(stop, start), sin.read(stop, start)

    def clear(self) -> None:
        """Forget all angles."""
        self.groups.clear()

    def clone(self, buffer: Callable[[GrowableBuffer], GrowableBuffer]) -> "RotaryStore":
        """A store of which every buffer is ``buffer(mine)``."""
        new = RotaryStore()
        new.groups = {group: (buffer(cos), buffer(sin)) for group, (cos, sin) in self.groups.items()}
        return new
