"""Attention over a cache that lies in several parts: each part by itself, merged by the log-sum-exps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import backend_for, flash_lora_attention
from .merge import merge
from .one_prefix import attend_one_prefix
from .reference import rotated

__all__ = ["KeyLR", "Part", "attend_parts", "join_parts"]


class KeyLR(NamedTuple):
    """What adapters on k_proj add to n keys: LR [B, n, R], B [(B,) Hkv, R, D], turned by angles [B, n, Dr / 2]."""

    k_lr: Tensor
    b: Tensor
    cos: Tensor | None = None
    sin: Tensor | None = None
    interleaved: bool = False

    def to(self, dtype: torch.dtype) -> KeyLR:
        """All of it in that dtype."""
        cos, sin = (None if part is None else part.to(dtype) for part in (self.cos, self.sin))
        return KeyLR(self.k_lr.to(dtype), self.b.to(dtype), cos, sin, self.interleaved)

    def added(self) -> Tensor:
        """rot(K_lr B) [B, Hkv, n, D]."""
        return rotated(self.k_lr.unsqueeze(1) @ self.b, self.cos, self.sin, self.interleaved)

    def arguments(self) -> dict[str, object]:
        """As `flash_lora_attention` takes it."""
        return {
            "k_lr": self.k_lr,
            "b_k": self.b,
            "cos": self.cos,
            "sin": self.sin,
            "rotary_interleaved": self.interleaved,
        }


class Part(NamedTuple):
    """K and V_base [B, Hkv, n, D], LR [B, n, R], and what is added to the keys, of n positions."""

    k: Tensor
    v: Tensor
    v_lr: Tensor | None = None
    key: KeyLR | None = None


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

    O = sum_p w_p O_p with w = softmax of the parts' log-sum-exps: exact, and each part is read where it lies. One that is
    the same for all batch rows (a branch's prefix) is read once for all of them where PyTorch's products do it.
    """
    blockwise = backend_for(q.device.type, backend) == "blockwise"
    whole: tuple[Tensor, Tensor] | None = None
    first = 0
    for part in parts:
        stop = first + part.k.shape[2]
        mask = None if key_padding_mask is None else key_padding_mask[:, first:stop]
        if blockwise and part.key is None and _is_one(part.k):
            v_lr = part.v_lr if part.v_lr is None or not _is_one(part.v_lr) else part.v_lr[0]
            out = attend_one_prefix(
                q, part.k[0], part.v[0], v_lr, b,
                scale=q.shape[-1] ** -0.5 if scale is None else scale, key_padding_mask=mask, softcap=softcap,
            )  # fmt: skip
        else:
            out = flash_lora_attention(  # type: ignore[assignment]  # a tuple: return_lse
                q, part.k, part.v, part.v_lr, b, scale=scale, causal=causal and part is parts[-1], softcap=softcap,
                return_lse=True, key_padding_mask=mask, backend=backend,
                **({} if part.key is None else part.key.arguments()),  # type: ignore[arg-type]
            )  # fmt: skip
        assert isinstance(out, tuple)
        whole = out if whole is None else merge(*whole, *out)
        first = stop
    assert whole is not None
    return whole[0]


def _is_one(rows: Tensor) -> bool:
    """Whether several batch rows are one in memory."""
    return rows.shape[0] > 1 and rows.stride(0) == 0


def join_parts(parts: Sequence[Part]) -> Part:
    """The parts copied into one, for attention that cannot take them apart."""

    def join(pieces: list[Tensor | None], dim: int) -> Tensor | None:
        found = [piece for piece in pieces if piece is not None]
        return torch.cat(found, dim) if found else None

    keys = [part.key for part in parts if part.key is not None]
    key = None
    if keys:
        cos, sin = (join([getattr(one, name) for one in keys], 1) for name in ("cos", "sin"))
        key = KeyLR(torch.cat([one.k_lr for one in keys], 1), keys[0].b, cos, sin, keys[0].interleaved)
    return Part(
        torch.cat([part.k for part in parts], 2),
        torch.cat([part.v for part in parts], 2),
        join([part.v_lr for part in parts], 1),
        key,
    )
