"""What transformers calls: our attention function."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ..errors import UnsupportedModelError
from . import flash_lora_attention, run_backend
from .dense import dense_attention
from .masks import WindowMask, attends, mask
from .parts import Part, attend_parts, join_parts

__all__ = ["NAME", "register"]

NAME = "lragent"
"""Registered name. One that contained ``flash`` would be taken for a FlashAttention package."""


def register() -> None:
    """Register attention and mask function with transformers. Again is a no-op."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over K and V_base [B, Hkv, L, D] as `cache.update` returned them, with the LR left by it.

    Which keys are seen is the mask's to say (its window, not the ``sliding_window`` argument), as it is for sdpa.

    Returns:
        Output [B, Lq, Hq, D], contiguous, and no weights.

    Raises:
        UnsupportedModelError: an argument that changes scores in a way this function does not know.
    """
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} passes {name} to its attention function, which this one does not take. "
                "Make the cache with attention='keep'."
            )
    if key.shape != value.shape:
        raise UnsupportedModelError(
            f"{type(module).__name__} has keys {tuple(key.shape)} and values {tuple(value.shape)}, which this attention "
            "function takes in one shape only. Make the cache with attention='keep'."
        )
    layer = getattr(module, "lragent_binding", None)
    if layer is not None and layer.step is not None:
        return layer.step.attend(query, attention_mask, scaling, softcap), None
    v_lr = b = bias = gain = extra = None
    parts: Sequence[Part] = ()
    backend = "auto"
    known = False
    if layer is not None and layer.owner.forward is not None:
        backend = layer.owner.forward.backend
        # One more token of the same agent through the same modules: as what was checked before, unless dtypes changed.
        known = not layer.owner.forward.fresh
        query = forbid_backward(query, query)
        if layer.owner.forward.splits or layer.reading is not None:
            reading = _take(layer, key, value)
            v_lr, b, bias, gain = reading.v_lr, reading.b, reading.bias, reading.gain
            known = known and (b is None or b.dtype == key.dtype == value.dtype)
            extra, parts = reading.key, reading.parts
    window = None
    if isinstance(attention_mask, WindowMask):
        window, attention_mask = attention_mask.window, attention_mask.as_subclass(Tensor)
    elif attention_mask is not None and attention_mask.ndim == 2:
        raise UnsupportedModelError(
            f"{type(module).__name__} changed the attention mask on its way, so its window is unknown. "
            "Make the cache with attention='keep'."
        )
    dense = attention_mask is not None and attention_mask.ndim != 2
    # A window, a dense mask and autocast's mixed dtypes need the cache in one piece.
    if parts and (dense or window is not None or key.dtype != value.dtype):
        key, value, v_lr, extra = join_parts(parts)
        parts = ()
    if query.dtype != value.dtype:  # autocast, where rotated queries and keys come in fp32; sdpa casts as well
        query, key = query.to(value.dtype), key.to(value.dtype)
        extra = None if extra is None else extra.to(value.dtype)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if dense:
        assert attention_mask is not None
        if v_lr is not None and b is not None:
            value = value + v_lr.unsqueeze(1) @ b
        if extra is not None:
            key = key + extra.added()
        output = dense_attention(query, key, value, attention_mask, scaling, softcap)
    else:
        if parts:
            output = attend_parts(
                query, parts, b, scale=scaling, causal=bool(is_causal), key_padding_mask=attention_mask, softcap=softcap,
                backend=backend,
            )  # fmt: skip
        else:
            attend = run_backend if known and query.shape[2] == 1 else flash_lora_attention
            output = attend(  # type: ignore[assignment]  # a tensor: no return_lse
                query, key, value, v_lr, b, scale=scaling, causal=bool(is_causal), window=window,
                key_padding_mask=attention_mask, softcap=softcap, backend=backend,
                **({} if extra is None else extra.arguments()),
            )  # fmt: skip
    output = output.transpose(1, 2)
    dtype, groups = output.dtype, query.shape[1] // value.shape[1]
    if gain is not None:
        output = output * gain.repeat_interleave(groups, 0).transpose(0, 1)
    if bias is not None:
        constant = bias.repeat_interleave(groups, -3).transpose(-3, -2)
        if attention_mask is not None:
            constant = constant * attends(attention_mask, window, output.shape[1])
        output = output + constant
    return (output if output.dtype == dtype else output.to(dtype)).contiguous(), None


def _take(layer: Any, key: Tensor, value: Tensor) -> Any:
    """The `Reading` that `update` left for this layer's one attention over V_base."""
    reading, layer.reading = layer.reading, None
    same = reading is not None and reading.value.data_ptr() == value.data_ptr() and reading.value.shape == value.shape
    if not same or (reading.k is not None and reading.k.data_ptr() != key.data_ptr()):
        raise UnsupportedModelError(
            f"{layer.name} does not attend once to keys and values as the cache returned them, so the rest of them cannot "
            "be added on the way. Make the cache with attention='keep'."
        )
    return reading


class _ForbidBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, trained: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            "backward() through a forward with a LoRASharedCache: what is cached has no gradient, so the result would be "
            "wrong. Train with a forward without the cache."
        )


def forbid_backward(tensor: Tensor, trained: Tensor) -> Tensor:
    """``tensor`` itself, but a backward pass through it raises if ``trained`` takes part in one."""
    if torch.is_grad_enabled() and trained.requires_grad:
        result: Tensor = _ForbidBackward.apply(tensor, trained)
        return result
    return tensor
