"""The kernels as a torch operator, which torch.compile keeps whole, and the function that checks and calls it."""

from __future__ import annotations

import torch
from torch import Tensor

from . import launch

__all__ = ["flash_lora_attention", "unsupported"]

_MAX_RANK, _MAX_D = 128, 256
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_library = torch.library.Library("lragent_hf", "DEF")
_library.define(
    "flash_lora_attention(Tensor q, Tensor k, Tensor v_base, Tensor? v_lr, Tensor? b, Tensor? k_lr, Tensor? b_k, "
    "Tensor? cos, Tensor? sin, Tensor? key_padding_mask, float scale, bool causal, SymInt? window, float? softcap, "
    "bool interleaved, bool return_lse) -> (Tensor, Tensor)",
    tags=[torch.Tag.pt2_compliant_tag],
)


def _results(q: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
    batch, heads, Lq, D = q.shape
    out = q.new_empty(batch, Lq, heads, D).transpose(1, 2)  # what a model's output projection reads
    lse = q.new_empty((batch, heads, Lq) if return_lse else (0,), dtype=torch.float32)
    return out, lse


def _run(
    q: Tensor,
    k: Tensor,
    v_base: Tensor,
    v_lr: Tensor | None,
    b: Tensor | None,
    k_lr: Tensor | None,
    b_k: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    key_padding_mask: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    interleaved: bool,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    out, lse = _results(q, return_lse)
    launch.attend(
        q, k, v_base, v_lr, b, k_lr, b_k, cos, sin, key_padding_mask,
        scale, causal, window, softcap, interleaved, out, lse if return_lse else None,
    )  # fmt: skip
    return out, lse


def _fake(q: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return _results(q, bool(args[-1]))


_library.impl("flash_lora_attention", _run, "CompositeExplicitAutograd")
torch.library.register_fake("lragent_hf::flash_lora_attention", _fake, lib=_library)


def unsupported(
    q: Tensor,
    k: Tensor,
    v_base: Tensor,
    v_lr: Tensor | None = None,
    b: Tensor | None = None,
    *,
    k_lr: Tensor | None = None,
    b_k: Tensor | None = None,
) -> str | None:
    """Why the kernels cannot serve this call (arguments that fit together), or None if they can.

    They take float16, bfloat16 and float32, head_dim up to 256 and ranks up to 128, on CUDA (from sm_80) and ROCm, and
    in Triton's interpreter float16 and float32 on CPU. Inference only.
    """
    tensors = [t for t in (q, k, v_base, v_lr, b, k_lr, b_k) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "the Triton kernels have no backward: call under torch.no_grad(), or take backend='reference' or 'blockwise'"
    if q.dtype not in _DTYPES:
        return f"the Triton kernels take float16, bfloat16 and float32, not {q.dtype}"
    if q.shape[3] > _MAX_D:
        return f"the Triton kernels take head_dim up to {_MAX_D}, not {q.shape[3]}"
    for name, t in (("v_lr", v_lr), ("k_lr", k_lr)):
        if t is not None and not 1 <= t.shape[2] <= _MAX_RANK:
            return f"the Triton kernels take ranks 1 to {_MAX_RANK}, {name} has {t.shape[2]}"
    if launch.INTERPRETED:
        if q.dtype == torch.bfloat16:
            return "Triton's interpreter (TRITON_INTERPRET=1) gets bfloat16 products wrong"
        return None
    if q.device.type != "cuda":
        return f"the Triton kernels run on CUDA and ROCm, not on {q.device.type}"
    if torch.version.hip is None and torch.cuda.get_device_capability(q.device) < (8, 0):
        return "the Triton kernels need compute capability 8.0 or newer"
    return None


def flash_lora_attention(
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
    """softmax(scale Q K^T) (V_base + V_lr B) on a GPU, in one pass over K, V_base and V_lr.

    Arguments and results as for `lragent_hf.attention.flash_lora_attention`, which checks that they fit together: here
    only what the kernels cannot do is refused. Strides are free except the last (K, V_base and LR buffers with another
    last stride are copied). Products of float16 and bfloat16 accumulate in float32; P is rounded to the inputs' dtype
    before it meets the values, and P V_lr before it meets B. float32 products are full float32, never TF32.

    Returns:
        [B, Hq, Lq, D] in q's dtype, laid out [B, Lq, Hq, D]; with return_lse also [B, Hq, Lq] float32.

    Raises:
        NotImplementedError: gradients would be needed, or a dtype, head_dim, rank or device outside `unsupported`.
    """
    if problem := unsupported(q, k, v_base, v_lr, b, k_lr=k_lr, b_k=b_k):
        raise NotImplementedError(f"{problem}.")
    out, lse = torch.ops.lragent_hf.flash_lora_attention(
        q, k, v_base, v_lr, b, k_lr, b_k, cos, sin, key_padding_mask,
        float(q.shape[3] ** -0.5 if scale is None else scale),
        causal, window, softcap, rotary_interleaved, return_lse,
    )  # fmt: skip
    return (out, lse) if return_lse else out
