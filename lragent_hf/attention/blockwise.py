"""Attention with a decomposed value cache in plain PyTorch: the default on CPU.

With the letters of the paper (LRAgent, arXiv 2602.01053, Flash-LoRA-Attention), S = scale Q K^T and P = softmax(S):

    O = P (V_base + V_lr B) = P V_base + (P V_lr) B

The low-rank part has two forms, equal by associativity, and the cheaper one is taken:

    few queries    (P V_lr) B             Lq * Hq * Lk * R multiply-adds; V_base is only read
    many queries   P (V_base + V_lr B)    D * Hkv * Lk * R, whatever Lq; a temporary of V_base's size, freed on return

so the second wins once Lq * Hq / Hkv reaches D. With no low-rank part left to add, PyTorch's fused attention does the
rest where it can (`fused.py`). Elsewhere a loop walks over blocks of query rows: plain matrix products over exactly the
keys the block may see, one softmax in place, one scratch for all blocks; query heads are grouped by the kv head they
read, keys are never repeated. Decode (Lq = 1) is the same arithmetic as one block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lragent_hf.attention.decode import decode, decode_row
from lragent_hf.attention.fused import fusable, fused_attention
from lragent_hf.attention.products import hide, log_sum_exp, lowest, mix, product
from lragent_hf.attention.reference import rotated

__all__ = ["blockwise_attention"]

_BLOCK_BYTES = 256  # rows of a query block times the element size: 64 rows in float32, 128 in half precision
_MIN_ROWS = 16
_SCRATCH_BYTES = 64 << 20  # blocks get shorter, down to _MIN_ROWS, rather than the score scratch larger than this


def blockwise_attention(
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
    """softmax(Q K^T) (V_base + V_lr B) by blocks of query rows.

    Arguments and results as for `lragent_hf.attention.flash_lora_attention`. Products run in the inputs' dtype, the
    softmax in at least float32. Any strides are taken without copying K or V (views of longer cache buffers above all).
    Temporaries: one score block of O(block * Lk), in long prefills one V of the call, and with key LR one K (none in
    decode, see `keys.py`). The
    output's memory is laid out [B, Lq, Hq, D], which is what a model's output projection reads. Differentiable, at the
    cost of keeping P.
    """
    batch, heads, Lq, D = q.shape
    kv_heads, Lk = k.shape[1], k.shape[2]
    given = (q, k, v_base, v_lr, b, k_lr, b_k)
    grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    special = any(one is not None for one in (k_lr, window, key_padding_mask, softcap))
    if (
        Lq == batch == 1
        and Lk
        and v_lr is not None
        and b is not None
        and not (special or grad or q.element_size() == 2)
    ):
        return decode_row(q[0], k[0], v_base[0], v_lr[0], b, D**-0.5 if scale is None else scale, return_lse)
    options = {"scale": scale, "causal": causal, "window": window, "softcap": softcap, "return_lse": return_lse}
    extra = None
    if k_lr is not None and b_k is not None:
        if Lq == 1 and not grad and _merges(k) and _merges(v_base):
            extra = (k_lr, b_k, cos, sin, rotary_interleaved)
        else:
            k = k + rotated(k_lr[:, None] @ b_k, cos, sin, rotary_interleaved)
    if window is not None:
        if (drop := Lk - Lq - window + 1) > 0:  # keys before the first query's window
            k, v_base = k[:, :, drop:], v_base[:, :, drop:]
            if extra is not None:
                lr, b_k, cos, sin, interleaved = extra
                cos, sin = (None if part is None else part[..., drop:, :] for part in (cos, sin))
                extra = (lr[:, drop:], b_k, cos, sin, interleaved)
            v_lr = v_lr if v_lr is None else v_lr[:, drop:]
            key_padding_mask = key_padding_mask if key_padding_mask is None else key_padding_mask[:, drop:]
            Lk -= drop
        if window >= Lk and causal:
            window = None
    scale = D**-0.5 if scale is None else scale
    fused = extra is None and fusable(q, k, causal, window, softcap, grad)
    many = Lq * heads >= D * kv_heads
    out: Tensor
    lse: Tensor | None
    if fused and v_lr is None:
        out, lse = fused_attention(q, k, v_base, scale, causal, key_padding_mask)
    elif batch > 1 and not (_merges(k) and _merges(v_base)):
        return _row_by_row(q, k, v_base, v_lr, b, key_padding_mask, options)
    else:
        values = v_base.flatten(0, 1)  # [B*Hkv, Lk, D], a view; so are all below that are as long as Lk
        if v_lr is not None and b is not None:
            b = b.flatten(0, 1) if b.dim() == 4 else b if batch == 1 else b.repeat(batch, 1, 1)  # [B*Hkv, R, D]
            if many:
                spread = v_lr[:, None].expand(-1, kv_heads, -1, -1).flatten(0, 1)
                values, v_lr = torch.baddbmm(values, spread, b), None
        if fused and many:
            values = values.unflatten(0, (batch, kv_heads))
            out, lse = fused_attention(q, k, values, scale, causal, key_padding_mask)
        else:
            keys = k.flatten(0, 1).transpose(1, 2)  # [B*Hkv, D, Lk]
            if Lq == 1 and Lk:
                out, lse = decode(q, keys, values, v_lr, b, extra, scale, key_padding_mask, softcap, return_lse, grad)
            else:
                out, lse = _blocks(
                    q, keys, values, v_lr, b, scale, causal, window, key_padding_mask, softcap, return_lse, grad
                )

    if key_padding_mask is not None:
        blind = _blind(key_padding_mask, Lq, Lk, causal, window)[:, None]  # [B, 1, Lq]
        out = out.masked_fill_(blind[..., None], 0.0)
        lse = lse if lse is None else lse.masked_fill(blind, float("-inf"))
    if return_lse:
        assert lse is not None
        return out, lse
    return out


def _blocks(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    v_lr: Tensor | None,
    b: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    key_padding_mask: Tensor | None,
    softcap: float | None,
    return_lse: bool,
    grad: bool,
) -> tuple[Tensor, Tensor | None]:
    """The loop over query blocks. keys [B*Hkv, D, Lk], values [B*Hkv, Lk, D]; v_lr None if values holds it already."""
    batch, heads, Lq, D = q.shape
    kv, Lk = keys.shape[0], keys.shape[2]
    group = batch * heads // kv
    past = Lk - Lq  # query i stands at key past + i
    out = q.new_empty(batch, Lq, heads, D).transpose(1, 2)
    lse = q.new_empty(batch, heads, Lq, dtype=torch.promote_types(q.dtype, torch.float32)) if return_lse else None
    first = Lq if Lk == 0 else max(0, -past) if causal else 0
    if first:  # queries that stand before the first key
        out[:, :, :first] = 0.0
        if lse is not None:
            lse[:, :, :first] = float("-inf")

    rows = min(Lq, _BLOCK_BYTES // q.element_size())
    span = min(Lk, window + rows) if window is not None and causal else Lk  # the most keys a block may see
    rows = min(rows, max(_MIN_ROWS, _SCRATCH_BYTES // max(1, batch * heads * span * q.element_size())))
    scratch = None if grad else q.new_empty(batch * heads * rows * span)
    padding = None if key_padding_mask is None else _padding_span(key_padding_mask)

    for i in range(first, Lq, rows):
        n = min(rows, Lq - i)
        low = 0 if window is None else max(0, past + i - window + 1)
        high = past + i + n if causal else Lk
        rows_of_q = q[:, :, i : i + n].reshape(kv, group * n, D)
        scores = _scores(rows_of_q, keys[:, :, low:high], scale, softcap, scratch)
        by_row = scores.view(kv, group, n, high - low)
        if causal and n > 1:
            _hide_above_diagonal(by_row)
        if window is not None and (end := past + i + n - window) > low:
            position = torch.arange(past + i, past + i + n, device=q.device)
            left = position[:, None] - torch.arange(low, end, device=q.device) >= window
            by_row[..., : end - low].masked_fill_(left, lowest(scores))
        if padding is not None and (start := max(low, padding[0])) < (stop := min(high, padding[1])):
            assert key_padding_mask is not None
            hide(scores[:, :, start - low : stop - low], ~key_padding_mask[:, start:stop])
        if lse is not None:
            lse[:, :, i : i + n] = log_sum_exp(scores).view(batch, heads, n)
        probs = torch.softmax(scores, -1) if grad else torch.softmax(scores, -1, out=scores)
        mixed = mix(probs, values[:, low:high], v_lr if v_lr is None else v_lr[:, low:high], b, grad)
        out[:, :, i : i + n] = mixed.view(batch, heads, n, D)
    return out, lse


def _scores(rows: Tensor, keys: Tensor, scale: float, softcap: float | None, scratch: Tensor | None) -> Tensor:
    """scale * rows @ keys, soft-capped: rows [N, M, D], keys [N, D, Lk] -> [N, M, Lk], in scratch if there is one."""
    shape = (rows.shape[0], rows.shape[1], keys.shape[2])
    place = None if scratch is None else scratch[: shape[0] * shape[1] * shape[2]].view(shape)
    scores = product(rows, keys, place, scale if softcap is None else scale / softcap)
    if softcap is None:
        return scores
    return scores.tanh_() * softcap if place is None else scores.tanh_().mul_(softcap)


def _hide_above_diagonal(by_row: Tensor) -> None:
    """by_row [..., n, keys]: the last n keys are the block's own; each row sees those up to itself."""
    n = by_row.shape[-2]
    above = torch.ones(n, n, dtype=torch.bool, device=by_row.device).triu_(1)
    by_row[..., by_row.shape[-1] - n :].masked_fill_(above, lowest(by_row))


def _padding_span(key_padding_mask: Tensor) -> tuple[int, int] | None:
    """The range of keys that some row of the batch hides: with left padding short, and only it needs a mask."""
    columns = key_padding_mask.all(0).logical_not_().nonzero()
    return (int(columns[0]), int(columns[-1]) + 1) if len(columns) else None


def _blind(key_padding_mask: Tensor, Lq: int, Lk: int, causal: bool, window: int | None) -> Tensor:
    """[B, Lq] bool: True where a query sees no key at all, from the number of real keys before each position."""
    real = torch.nn.functional.pad(key_padding_mask.cumsum(1), (1, 0))  # [B, Lk + 1]
    position = torch.arange(Lk - Lq, Lk, device=key_padding_mask.device)
    high = (position + 1).clamp_(min=0) if causal else torch.full_like(position, Lk)
    low = torch.zeros_like(position) if window is None else (position - window + 1).clamp_(min=0)
    return real[:, high] <= real[:, low]


def _merges(t: Tensor) -> bool:
    """Whether [B, H, ...] can be seen as [B*H, ...] without a copy."""
    return t.shape[1] == 1 or t.stride(0) == t.shape[1] * t.stride(1)


def _row_by_row(
    q: Tensor,
    k: Tensor,
    v_base: Tensor,
    v_lr: Tensor | None,
    b: Tensor | None,
    key_padding_mask: Tensor | None,
    options: dict[str, Any],
) -> Tensor | tuple[Tensor, Tensor]:
    """For layouts in which batch and heads do not merge (say [B, Lk, Hkv, D] transposed): no copy, a call a row."""
    results: list[Any] = []
    for row in range(q.shape[0]):
        one = slice(row, row + 1)
        results.append(
            blockwise_attention(
                q[one],
                k[one],
                v_base[one],
                v_lr if v_lr is None else v_lr[one],
                b[one] if b is not None and b.dim() == 4 else b,
                key_padding_mask=key_padding_mask if key_padding_mask is None else key_padding_mask[one],
                **options,
            )
        )
    if options["return_lse"]:
        outs, lses = zip(*results, strict=True)
        return torch.cat(outs), torch.cat(lses)
    return torch.cat(results)
