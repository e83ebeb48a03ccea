"""One query a row against all keys: the decode step of the blockwise backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lragent_hf.attention.keys import add_key_scores
from lragent_hf.attention.products import hide, log_sum_exp, mix

__all__ = ["decode", "decode_row"]


def decode_row(
    q: Tensor, k: Tensor, v_base: Tensor, v_lr: Tensor, b: Tensor, scale: float, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """The common case of `decode` in as few operations as it takes: at short contexts it is these that cost.

    q [Hq, 1, D], k and v_base [Hkv, Lk, D], v_lr [Lk, R], b [Hkv, R, D] or with one row in front.
    """
    kv_heads, Lk, D = k.shape
    rows = q.reshape(kv_heads, -1, D)
    scores = torch.bmm(rows * scale, k.transpose(1, 2))
    probs = torch.softmax(scores, -1)
    low_rank = torch.mm(probs.view(-1, Lk), v_lr).view(kv_heads, rows.shape[1], -1)
    out = torch.bmm(probs, v_base).baddbmm_(low_rank, b if b.dim() == 3 else b[0]).view(1, -1, 1, D)
    return (out, log_sum_exp(scores).view(1, -1, 1)) if return_lse else out


def decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    v_lr: Tensor | None,
    b: Tensor | None,
    extra: tuple[Any, ...] | None,
    scale: float,
    key_padding_mask: Tensor | None,
    softcap: float | None,
    return_lse: bool,
    grad: bool,
) -> tuple[Tensor, Tensor | None]:
    """One query a row, the last position: it sees every key. The query is scaled, not its Lk scores."""
    batch, heads, _, D = q.shape
    rows = q.reshape(keys.shape[0], -1, D) * (scale if softcap is None else scale / softcap)
    if q.element_size() == 2:  # keys as the left factor are read as they lie; as the right one they would be packed
        scores = torch.bmm(keys.transpose(1, 2), rows.transpose(1, 2)).transpose(1, 2).contiguous()
    else:
        scores = torch.bmm(rows, keys)
    if extra is not None:
        add_key_scores(scores, rows, *extra)
    if softcap is not None:
        scores = scores.tanh_() * softcap
    if key_padding_mask is not None:
        hide(scores, ~key_padding_mask)
    lse = log_sum_exp(scores).view(batch, heads, 1) if return_lse else None
    return mix(torch.softmax(scores, -1), values, v_lr, b, grad).view(batch, heads, 1, D), lse
