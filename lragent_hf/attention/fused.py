"""PyTorch's own fused attention on CPU, where a call needs nothing that it lacks.

It knows neither a bottom-right diagonal nor a low-rank part. The diagonal comes from two calls, one over the keys before
the queries (all visible) and one over the queries' own (a square triangle), merged by their log-sum-exps: no mask is
built and nothing above the diagonal is computed. A low-rank part must be in ``v`` already.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .merge import merge

__all__ = ["fusable", "fused_attention"]

_flash = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_IDLE = 1.2  # packing a group pays unless more than a fifth of the threads' time would be spent waiting


def fusable(q: Tensor, k: Tensor, causal: bool, window: int | None, softcap: float | None, grad: bool) -> bool:
    """Whether `fused_attention` can take this call."""
    return (
        _flash is not None
        and q.device.type == "cpu"
        and window is None
        and softcap is None
        and not grad
        and q.shape[2] > 0
        and k.shape[2] > 0
        and (not causal or q.shape[2] <= k.shape[2])
    )


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, key_padding_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """softmax(scale Q K^T) V with bottom-right causal masking: [B, Hq, Lq, D] laid out [B, Lq, Hq, D], and lse [B, Hq, Lq].

    Rows that see no key give whatever finite numbers.
    """
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    batch, heads, Lq, D = q.shape
    kv_heads, Lk = k.shape[1], k.shape[2]
    mask = None
    if key_padding_mask is not None:
        mask = q.new_zeros(batch, 1, 1, Lk).masked_fill_(~key_padding_mask[:, None, None], float("-inf"))
    if Lq == 1:
        pairs, threads = batch * kv_heads, _threads()
        if -(-pairs // threads) * threads <= _IDLE * pairs:  # a group's heads as rows: K and V are read once for all
            q = q.reshape(batch, kv_heads, heads // kv_heads, D)
        out, lse = _flash(q, k, v, 0.0, False, attn_mask=mask, scale=scale)  # type: ignore[misc]
        return out.reshape(batch, heads, 1, D), lse.reshape(batch, heads, 1)

    past = Lk - Lq if causal else Lk
    parts = []
    for first, stop, triangle in ((0, past, False), (past, Lk, True)):
        if first < stop:
            own = None if mask is None else mask[..., first:stop]
            out, lse = _flash(q, k[:, :, first:stop], v[:, :, first:stop], 0.0, triangle, attn_mask=own, scale=scale)  # type: ignore[misc]
            if key_padding_mask is not None:  # of a row that sees nothing it says 0
                real = key_padding_mask[:, first:stop].cumsum(1)
                blind = real == 0 if triangle else (real[:, -1:] == 0)
                lse = lse.masked_fill(blind[:, None], float("-inf"))
            parts.append((out, lse))
    if len(parts) == 1:
        return parts[0]
    return merge(*parts[0], *parts[1])


@torch.compiler.assume_constant_result
def _threads() -> int:
    return torch.get_num_threads()
