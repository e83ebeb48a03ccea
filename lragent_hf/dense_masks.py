"""Dense masks, which ``generate`` makes for static caches, and the 2-D masks that they were made from."""

from typing import Any

import torch
from torch import Tensor

from .attention.masks import WindowMask
from .buffer import GrowableBuffer

__all__ = ["padding_of", "without_squares"]

_FULL = "full_attention"


def padding_of(
    masks: Any, past: int, count: int, record: GrowableBuffer, total: int, window: int | None
) -> Tensor | None:
    """The 2-D mask [B, past + count] behind dense masks, or ``None`` where there are none.

    New positions are real where they see themselves. What the last query sees of older ones is real; what lies outside a
    sliding window is as it was when it was cached.

    Args:
        masks: [B, 1, q, at least past + count], or such by kind of layer.
        record, total: mask bits of the positions that are cached, and how many these are.
        window: the model's sliding window, if it has one.
    """
    sliding = window is not None
    if isinstance(masks, dict):
        sliding = _FULL not in masks
        masks = masks.get(_FULL, next(iter(masks.values()), None))
    if not _is_dense(masks):
        return None
    seen = masks[:, 0, :, : past + count]
    seen = seen if seen.dtype == torch.bool else seen >= 0
    bits: Tensor = seen[:, -1].clone()
    bits[:, past:] = seen[:, :, past:].diagonal(dim1=1, dim2=2)
    outside = min(past, total, past + count - window) if sliding and window is not None else 0
    if outside > 0:
        bits = bits.expand(record.read(0).shape[0], -1).clone()
        bits[:, :outside] = record.read(outside).to(bits.device)
    return bits


def without_squares(masks: Any, bits: Tensor | None, stop: int, window: int | None, dense: bool) -> Any:
    """Masks for ``stop`` positions: a causal one as the 2-D mask (or none) that says the same, unless ``dense``.

    Args:
        masks: as for `padding_of`.
        bits: what that returned. ``None``: ``masks`` are returned as they are.
    """
    if bits is None:
        return masks
    kinds = masks if isinstance(masks, dict) else {_FULL if window is None else "": masks}
    made = {
        kind: mask if not _is_dense(mask) else _plain(mask[..., :stop], bits, None if kind == _FULL else window, dense)
        for kind, mask in kinds.items()
    }
    return made if isinstance(masks, dict) else next(iter(made.values()))


def _plain(mask: Tensor, bits: Tensor, window: int | None, dense: bool) -> Tensor | None:
    """A dense mask [B, 1, q, L], or the 2-D one with a window that says the same."""
    if dense or mask.dtype != torch.bool:
        return mask
    count, length = mask.shape[-2:]
    query = torch.arange(length - count, length, device=mask.device)[:, None]
    key = torch.arange(length, device=mask.device)
    sees = key <= query if window is None else (key <= query) & (key > query - window)
    if not torch.equal(mask[:, 0], (sees & bits[:, None]).expand(mask[:, 0].shape)):
        return mask
    window = None if window is not None and length <= window else window
    return None if window is None and bool(bits.all()) else WindowMask.of(bits.contiguous(), window)


def _is_dense(mask: Any) -> bool:
    return isinstance(mask, Tensor) and mask.ndim == 4
