"""Attention over a cache that lies in several parts: each part by itself, merged by the log-sum-exps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import flash_lora_attention
from .merge import merge

__all__ = ["Part", "attend_parts", "join_parts"]

Part = tuple[Tensor, Tensor, Tensor | None]
"""K and V_base [B, Hkv, n, D] and LR [B, n, R] of n positions."""


def attend_parts(
    q: Tensor,
    parts: Sequence[Part],
    b: Tensor | None,
    *,
    scale: float | None,
    causal: bool,
    key_padding_mask: Tensor | None,
    softcap: float | None,
    backend: str,
) -> Tensor:
    """`flash_lora_attention` over the parts laid end to end. The queries stand within the last one.

    O = sum_p w_p O_p with w = softmax of the parts' log-sum-exps: exact, and each part is read where it lies.
    """
    whole: tuple[Tensor, Tensor] | None = None
    first = 0
    for k, v, v_lr in parts:
        stop = first + k.shape[2]
        out = flash_lora_attention(
            q, k, v, v_lr, b, scale=scale, causal=causal and k is parts[-1][0], softcap=softcap, return_lse=True,
            key_padding_mask=None if key_padding_mask is None else key_padding_mask[:, first:stop], backend=backend,
        )  # fmt: skip
        assert isinstance(out, tuple)
        whole = out if whole is None else merge(*whole, *out)
        first = stop
    assert whole is not None
    return whole[0]


def join_parts(parts: Sequence[Part]) -> Part:
    """The parts copied into one, for attention that cannot take them apart."""
    keys, values, lrs = zip(*parts, strict=True)
    lr = None if lrs[0] is None else torch.cat([lr for lr in lrs if lr is not None], 1)
    return torch.cat(keys, 2), torch.cat(values, 2), lr
