"""The active agent's keys or values, materialised once: K_base + rot(K_lr B_k), or V_base + V_lr B, where time is dearer
than memory."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .banks import Place
from .buffer import GrowableBuffer

__all__ = ["WorkingCopy"]

_CHUNK = 1024  # positions made at once, to bound the temporaries


class WorkingCopy:
    """One layer's keys, or its values, [B, Hkv, L, D] of whichever agent ran last.

    Extended as tokens come, made anew at a hand-over.

    Attributes:
        buffer: where they lie.
        valid: positions that are as base, LR and B are now.
        places, b: the LR and the B that they were made with.
    """

    def __init__(self) -> None:
        self.buffer = GrowableBuffer(2)
        self.valid = 0
        self.places: list[Place] = []
        self.b: Tensor | None = None

    def cut(self, length: int) -> None:
        """Positions from ``length`` on are not as they were."""
        self.valid = min(self.valid, length)

    def read(self, places: Sequence[Place], b: Tensor, stop: int, make: Callable[[int, int], Tensor]) -> Tensor:
        """Those of positions 0 to ``stop``, of which ``make(start, stop)`` gives those that are missing."""
        if self.b is None or self.places != list(places) or self.b.shape != b.shape or not torch.equal(self.b, b):
            self.places, self.b, self.valid = list(places), b.clone(), 0
        while self.valid < stop:
            last = min(self.valid + _CHUNK, stop)
            self.buffer.write(self.valid, make(self.valid, last))
            self.valid = last
        return self.buffer.read(stop)
