"""The steps that prefill and decode of the blockwise backend have in common: products, hidden keys, log-sum-exps."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["hide", "log_sum_exp", "lowest", "mix", "product"]

_COPY_SIZE = 1 << 15  # elements a head: a half-precision product of this size goes head by head, see `product`


def mix(probs: Tensor, values: Tensor, v_lr: Tensor | None, b: Tensor | None, grad: bool) -> Tensor:
    """P V_base + (P V_lr) B: probs [B*Hkv, M, Lk], values [B*Hkv, Lk, D], v_lr [B, Lk, R], b [B*Hkv, R, D]."""
    grad = grad or torch.compiler.is_compiling()
    out = product(probs, values, None if grad else probs.new_empty(*probs.shape[:2], values.shape[2]))
    if v_lr is None or b is None:
        return out
    # V_lr is the same for every head, so one product serves them all; B expands the small result, once a block.
    every = probs.view(v_lr.shape[0], -1, probs.shape[2])  # [B, Hkv*M, Lk]
    low_rank = product(every, v_lr, None if grad else probs.new_empty(*every.shape[:2], v_lr.shape[2]))
    low_rank = low_rank.view(out.shape[0], out.shape[1], -1)
    if out.element_size() == 2:  # small, and faster in float32 than a half-precision product is set up
        return torch.baddbmm(out.float(), low_rank.float(), b.float()).to(out.dtype)
    return torch.baddbmm(out, low_rank, b) if grad else out.baddbmm_(low_rank, b)


def product(a: Tensor, b: Tensor, out: Tensor | None, alpha: float = 1.0) -> Tensor:
    """alpha * a @ b, batched, into out if there is one; out is only written (beta=0 leaves what it held unread)."""
    if torch.compiler.is_compiling():  # which plans memory by itself, and refuses to write into what is not given to it
        found = torch.bmm(a, b)
        return found if alpha == 1.0 else found * alpha
    if out is None:
        return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0, alpha=alpha)
    if a.element_size() == 2 and b.shape[1] * b.shape[2] >= _COPY_SIZE:
        # Batched half-precision products on CPU first copy an operand whose heads lie apart, as those of a view of a
        # longer buffer do: all of K at every step. One head's matrix is taken as it lies.
        for out_h, a_h, b_h in zip(out.unbind(0), a.unbind(0), b.unbind(0), strict=True):
            torch.addmm(out_h, a_h, b_h, beta=0, alpha=alpha, out=out_h)
        return out
    return torch.baddbmm(out, a, b, beta=0, alpha=alpha, out=out)


def lowest(scores: Tensor) -> float:
    """What hides a key. Finite, so that a row that sees nothing has no NaN on its way to being zeroed."""
    return torch.finfo(scores.dtype).min


def hide(scores: Tensor, hidden: Tensor) -> None:
    """scores [B*Hkv, M, keys], hidden [B, keys] bool, True = do not attend."""
    scores.unflatten(0, (hidden.shape[0], -1)).masked_fill_(hidden[:, None, None], lowest(scores))


def log_sum_exp(scores: Tensor) -> Tensor:
    return scores.logsumexp(-1) if scores.element_size() > 2 else scores.float().logsumexp(-1)
