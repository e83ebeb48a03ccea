"""Attention of several batch rows over keys and values that are one for all of them: the rows are queries of one batch."""

from __future__ import annotations

import torch
from torch import Tensor

from .products import hide, log_sum_exp, product

__all__ = ["attend_one_prefix"]

_SCORES = 1 << 22  # elements of one block of scores


def attend_one_prefix(
    q: Tensor,
    k: Tensor,
    v_base: Tensor,
    v_lr: Tensor | None,
    b: Tensor | None,
    *,
    scale: float,
    key_padding_mask: Tensor | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """`flash_lora_attention` over keys that every query sees, read once for all rows.

    Args:
        q: [B, Hq, Lq, D].
        k, v_base: [Hkv, L, D].
        v_lr: [L, R], or [B, L, R] where each row has its own.
        b: [Hkv, R, D], or [B, Hkv, R, D] where rows have agents of their own.
        scale, softcap: as there.
        key_padding_mask: [B, L] bool, True = attend.

    Returns:
        [B, Hq, Lq, D] (zeros for rows that see no key), and the log-sum-exps [B, Hq, Lq] in fp32 (fp64 for fp64).
    """
    batch, heads, count, dim = q.shape
    kv_heads, length, _ = k.shape
    rows = q.unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(2, 3)  # [Hkv, B, G * Lq, D]
    rows = rows * (scale if softcap is None else scale / softcap)
    step = max(1, _SCORES // (kv_heads * rows.shape[2] * length))  # batch rows at once
    outs, sums = [], []
    for first in range(0, batch, step):
        some = rows[:, first : first + step]
        scores = torch.matmul(some.flatten(1, 2), k.transpose(1, 2))
        if softcap is not None:
            scores = scores.tanh_() * softcap
        if key_padding_mask is not None:
            mine = scores.view(kv_heads, -1, rows.shape[2], length).transpose(0, 1).flatten(0, 1)
            hide(mine, ~key_padding_mask[first : first + step])
            scores = mine.unflatten(0, (-1, kv_heads)).transpose(0, 1).flatten(1, 2)
        probs = torch.softmax(scores, -1)
        out = product(probs, v_base, None).unflatten(1, (some.shape[1], -1))  # [Hkv, B, G * Lq, D]
        if v_lr is not None and b is not None:
            if v_lr.dim() == 2:
                low_rank = torch.matmul(probs.flatten(0, 1), v_lr).view(*out.shape[:3], -1)
            else:
                low_rank = torch.matmul(probs.view(*out.shape[:3], length), v_lr[first : first + step])
            mine = b[first : first + step].transpose(0, 1) if b.dim() == 4 else b[:, None]
            out = out + low_rank @ mine
        outs.append(out)
        sums.append(log_sum_exp(scores).view(out.shape[:3]))
    out, lse = torch.cat(outs, 1), torch.cat(sums, 1)
    if key_padding_mask is not None and not bool((seen := key_padding_mask.any(1)).all()):
        out.mul_(seen[None, :, None, None])
        lse.masked_fill_(~seen[None, :, None], float("-inf"))
    return (
        out.transpose(0, 1).reshape(batch, heads, count, dim),
        lse.transpose(0, 1).reshape(batch, heads, count),
    )
