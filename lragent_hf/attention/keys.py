"""Scores of one query a row against keys that are kept in two parts, K + rot(K_lr B_k), without building the second.

rot turns pair p of the columns of key j by the angle j has there. Turned back onto the query, with u = K_lr[j] B_k:

    q . rot_j(u) = sum_p cos[j, p] (q1 u1 + q2 u2)[p] + sin[j, p] (q2 u1 - q1 u2)[p]  +  q . u over columns that stay

and u is linear in K_lr[j]: with C[r, p] = q1 b1[r] + q2 b2[r] and S[r, p] = q2 b1[r] - q1 b2[r], which no key enters,

    q . rot_j(u) = sum_r K_lr[j, r] (cos[j] . C[r] + sin[j] . S[r] + Z[r])

So a step takes one product of the angles [Lk, Dr] with a matrix [Dr, Hq R], in tiles of keys; nothing is as long as K.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lragent_hf.attention.reference import column_pairs

__all__ = ["add_key_scores"]

_TILE = 1024  # keys: the temporary of a tile is [B, Hq R, _TILE]


def add_key_scores(
    scores: Tensor, q: Tensor, k_lr: Tensor, b_k: Tensor, cos: Tensor | None, sin: Tensor | None, interleaved: bool
) -> None:
    """Add Q rot(K_lr B_k)^T to ``scores`` [B*Hkv, G, Lk] in place.

    Args:
        q: [B*Hkv, G, D], scaled as the scores are.
        k_lr, b_k, cos, sin, interleaved: as for `lragent_hf.attention.flash_lora_attention`.
    """
    batch, length, rank = k_lr.shape
    grouped = q.view(batch, -1, *q.shape[1:])  # [B, Hkv, G, D]
    width = 0 if cos is None else cos.shape[-1]
    each_q = grouped[..., None, :]  # [B, Hkv, G, 1, D]
    each_b = (b_k if b_k.dim() == 4 else b_k[None])[:, :, None]  # [B or 1, Hkv, 1, R, D]
    q1, q2 = column_pairs(each_q, width, interleaved)
    b1, b2 = column_pairs(each_b, width, interleaved)
    by_cos, by_sin = (part.flatten(1, 3) for part in (q1 * b1 + q2 * b2, q2 * b1 - q1 * b2))  # [B, Hq R, Dr / 2]
    still = (each_q[..., 2 * width :] * each_b[..., 2 * width :]).sum(-1).flatten(1)[..., None]  # [B, Hq R, 1]
    heads = scores.view(batch, -1, length)  # [B, Hq, Lk]
    for first in range(0, length, _TILE):
        last = min(first + _TILE, length)
        tile = still
        if cos is not None and sin is not None:
            for angles, part in ((cos, by_cos), (sin, by_sin)):
                rows = angles[..., first:last, :].to(part.dtype).expand(batch, -1, -1)
                tile = torch.baddbmm(tile, part, rows.transpose(1, 2))  # [B, Hq R, n]
        low_rank = k_lr[:, first:last].transpose(1, 2)[:, None]  # [B, 1, R, n]
        heads[..., first:last] += (tile.unflatten(1, (-1, rank)) * low_rank).sum(2)
