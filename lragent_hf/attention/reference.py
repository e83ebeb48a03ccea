"""The plain definition of attention with a decomposed value cache: the oracle every faster backend is tested against.

The letters are the paper's (LRAgent, arXiv 2602.01053): V_base = X W0, V_lr = X A, B the adapter's second factor.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["column_pairs", "reference_attention", "rotated"]


def reference_attention(
    q: Tensor,
    k: Tensor,
    v_base: Tensor,
    v_lr: Tensor | None = None,
    b: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    key_padding_mask: Tensor | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    k_lr: Tensor | None = None,
    b_k: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    rotary_interleaved: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(Q K^T) (V_base + V_lr B), with everything materialised: O(Lq * Lk) memory, differentiable.

    Arguments and results as for `lragent_hf.attention.flash_lora_attention`. Computes in the inputs' dtype promoted to
    at least float32 (float64 stays float64); the output is in q's dtype, the log-sum-exp in the dtype computed in.
    A row that sees no key gives zeros and a log-sum-exp of -inf.
    With key LR, the keys are K + rot(K_lr B_k).
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    batch, heads, Lq, D = q.shape
    kv_heads, Lk = k.shape[1], k.shape[2]
    Q = q.to(dtype).reshape(batch, kv_heads, heads // kv_heads, Lq, D)  # query heads grouped by the kv head they read
    K = k.to(dtype)
    if k_lr is not None and b_k is not None:
        K = K + rotated(k_lr.to(dtype)[:, None] @ b_k.to(dtype), cos, sin, rotary_interleaved)
    V = v_base.to(dtype)
    if v_lr is not None and b is not None:
        V = V + v_lr.to(dtype)[:, None] @ b.to(dtype)  # [B, 1, Lk, R] @ [(B,) Hkv, R, D]

    S = (D**-0.5 if scale is None else scale) * (Q @ K[:, :, None].mT)  # [B, Hkv, G, Lq, Lk]
    if softcap is not None:
        S = softcap * torch.tanh(S / softcap)
    S = S.masked_fill(~_visible(batch, Lq, Lk, causal, window, key_padding_mask, q.device), float("-inf"))

    lse = S.logsumexp(-1)
    P = torch.exp(S - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])  # rows that see nothing: exp(-inf) = 0
    O = (P @ V[:, :, None]).reshape(q.shape).to(q.dtype)  # noqa: E741 (the paper's letter)
    return (O, lse.reshape(batch, heads, Lq)) if return_lse else O


def rotated(x: Tensor, cos: Tensor | None, sin: Tensor | None, interleaved: bool = False) -> Tensor:
    """x [B, H, L, D] turned by rotary angles: cos, sin [L, Dr / 2] or [B or 1, L, Dr / 2], one for each pair of columns.

    Pairs are (i, i + Dr / 2), or if interleaved (2i, 2i + 1); columns from Dr on do not turn. In x's dtype.
    """
    if cos is None or sin is None:
        return x
    cos, sin = cos.to(x.dtype).unsqueeze(-3), sin.to(x.dtype).unsqueeze(-3)  # [(B,) 1, L, Dr / 2]
    width = cos.shape[-1]
    turned = x.clone()
    first, second = column_pairs(x, width, interleaved)
    new_first, new_second = column_pairs(turned, width, interleaved)
    new_first.mul_(cos).addcmul_(second, sin, value=-1)
    new_second.mul_(cos).addcmul_(first, sin)
    return turned


def column_pairs(x: Tensor, width: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and the second column of each of ``width`` pairs."""
    if interleaved:
        return x[..., 0 : 2 * width : 2], x[..., 1 : 2 * width : 2]
    return x[..., :width], x[..., width : 2 * width]


def _visible(
    batch: int,
    Lq: int,
    Lk: int,
    causal: bool,
    window: int | None,
    key_padding_mask: Tensor | None,
    device: torch.device,
) -> Tensor:
    """[B, 1, 1, Lq, Lk], True where query i attends to key j. Query i stands at key Lk - Lq + i (bottom-right)."""
    i = torch.arange(Lk - Lq, Lk, device=device)[:, None]
    j = torch.arange(Lk, device=device)
    see = torch.ones(batch, 1, 1, Lq, Lk, dtype=torch.bool, device=device)
    if causal:
        see = see & (j <= i)
    if window is not None:
        see = see & (i - j < window)
    if key_padding_mask is not None:
        see = see & key_padding_mask[:, None, None, None, :]
    return see
