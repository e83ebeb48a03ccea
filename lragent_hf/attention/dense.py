"""Attention under a dense mask, for what neither a window nor padding expresses."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dense_attention"]


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, softcap: float | None
) -> Tensor:
    """Plain attention under a dense mask [B, 1 or Hq, Lq, L]: bool (True = attend) or additive.

    Returns:
        [B, Hq, Lq, D]. A row that attends to nothing gives zeros.
    """
    rows, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.view(rows, kv_heads, heads // kv_heads, length, dim)
    scores = (grouped @ key.unsqueeze(2).transpose(-1, -2)).float() * (dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    mask = mask[..., : key.shape[2]]
    mask = mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, (kv_heads, -1))
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores, -1).masked_fill(~mask.any(-1, keepdim=True), 0.0)
    else:
        weights = torch.softmax(scores + mask, -1)
    weights = weights.to(value.dtype)
    return (weights @ value.unsqueeze(2)).view(rows, heads, length, dim)
