"""What attention results are judged by: an error budget relative to eager, both against the oracle in float64."""

from typing import Any

import torch
from torch import Tensor

from lragent_hf.attention.reference import reference_attention

__all__ = ["assert_close_to_oracle", "eager_attention", "in_float64"]


def assert_close_to_oracle(
    name: str, got: Tensor, oracle_fp64: Tensor, eager_same_dtype: Tensor, *, rounding: float | None = None
) -> None:
    """Largest error at most twice what eager makes in the same dtype, plus `rounding`.

    `rounding` is a unit in the last place of the largest number that entered the sums; by default half that of the
    largest result. It matters where results are so few that eager may be right by luck. Infinities (the log-sum-exp of
    rows that see nothing) must be in the same places. NaN never passes.
    """
    assert got.shape == oracle_fp64.shape, f"{name}: shape {list(got.shape)}, not {list(oracle_fp64.shape)}"
    assert got.dtype == eager_same_dtype.dtype, f"{name}: dtype {got.dtype}, not {eager_same_dtype.dtype}"
    finite = oracle_fp64.isfinite()
    assert torch.equal(got[~finite].double(), oracle_fp64[~finite]), f"{name}: infinities differ"
    if not finite.any():
        return
    exact = oracle_fp64[finite]
    error = (got[finite].double() - exact).abs()
    error_eager = (eager_same_dtype[finite].double() - exact).abs()
    tiny = torch.finfo(got.dtype).eps / 2 * float(exact.abs().max()) if rounding is None else rounding
    rms, rms_eager = error.square().mean().sqrt(), error_eager.square().mean().sqrt()
    assert error.max() <= 2 * error_eager.max() + tiny, (
        f"{name}: max error {error.max():.3g}, eager {error_eager.max():.3g}, tiny {tiny:.3g}; "
        f"RMS {rms:.3g} = {rms / rms_eager:.3g} x eager's"
    )


def in_float64(q: Tensor, k: Tensor, v_base: Tensor, v_lr: Tensor | None, b: Tensor | None, **options: Any) -> Any:
    wide = {name: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for name, t in options.items()}
    return reference_attention(*(t if t is None else t.double() for t in (q, k, v_base, v_lr, b)), **wide)


def eager_attention(
    q: Tensor,
    k: Tensor,
    v_base: Tensor,
    v_lr: Tensor | None,
    b: Tensor | None,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    key_padding_mask: Tensor | None = None,
    softcap: float | None = None,
    k_lr: Tensor | None = None,
    b_k: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    rotary_interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """As a stock model runs it: K and V built in the dtype, heads repeated, products in the dtype, softmax in float32."""
    if k_lr is not None:
        k = k + _rotated(k_lr[:, None] @ b_k, cos, sin, rotary_interleaved)
    v = v_base if v_lr is None else v_base + v_lr[:, None] @ b
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    Lq, Lk = q.shape[2], k.shape[2]
    distance = torch.arange(Lq)[:, None] + (Lk - Lq) - torch.arange(Lk)
    hidden = torch.zeros(q.shape[0], 1, Lq, Lk, dtype=torch.bool)
    if causal:
        hidden |= distance < 0
    if window is not None:
        hidden |= distance >= window
    if key_padding_mask is not None:
        hidden |= ~key_padding_mask[:, None, None]
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)).masked_fill(hidden, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0).to(q.dtype) @ v, scores.logsumexp(-1)


def _rotated(x: Tensor, cos: Tensor | None, sin: Tensor | None, interleaved: bool) -> Tensor:
    """x * cos + rotate(x) * sin as model files spell it, with the angles repeated for both columns of a pair."""
    if cos is None or sin is None:
        return x
    turning = 2 * cos.shape[-1]
    cos, sin = (
        (t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1)).to(x.dtype)[..., None, :, :]
        for t in (cos, sin)
    )
    head = x[..., :turning]
    if interleaved:
        half = torch.stack((-head[..., 1::2], head[..., ::2]), -1).flatten(-2)
    else:
        half = torch.cat((-head[..., turning // 2 :], head[..., : turning // 2]), -1)
    return torch.cat((head * cos + half * sin, x[..., turning:]), -1)
