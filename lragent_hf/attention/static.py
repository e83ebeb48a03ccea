"""One token of one layer on tensors of fixed shape: where its K, V and LR go, and attention over whole buffers."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from . import flash_lora_attention
from .dense import dense_attention

__all__ = ["StaticLayer"]


class _Source(Protocol):
    stacks: tuple[Tensor, ...]
    rows: tuple[Tensor, ...]


class StaticLayer:
    """The tensors that one decoder layer works on during one token. torch.compile traces `update` and `attend`.

    Attributes:
        position: the position that is written, [1].
        backend: of ``flash_lora_attention``.
        k, v: K and V (or V_base) of the active agent, [B, Hkv, max_cache_len, D].
        source: what has computed the token's LR rows, ``source.rows``; ``None`` without LoRA on v_proj.
        banks: the LR buffers that they go to, [B, max_cache_len, width].
        v_lr: the LR buffer that the active agent reads, all its columns, or ``None`` if it has none.
        b: its B [Hkv, width, D], zeros at the columns of others: a view of its own would lie elsewhere for each agent.
    """

    def __init__(self, position: Tensor, backend: str):
        self.position, self.backend = position, backend
        self.k: Tensor
        self.v: Tensor
        self.source: _Source | None = None
        self.banks: tuple[Tensor, ...] = ()
        self.v_lr: Tensor | None = None
        self.b: Tensor | None = None

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store K and V [B, Hkv, 1, D], and the LR rows; return all of K and V."""
        self.k.index_copy_(2, self.position, key.to(self.k.dtype))
        self.v.index_copy_(2, self.position, value.to(self.v.dtype))
        if self.source is not None:
            for buffer, rows in zip(self.banks, self.source.rows, strict=True):
                buffer.index_copy_(1, self.position, rows.to(buffer.dtype))
            self.source.rows = ()
        return self.k, self.v

    def attend(self, query: Tensor, mask: Tensor, scale: float | None, softcap: float | None) -> Tensor:
        """Attention of the token's queries [B, Hq, 1, D] over K and V as stored.

        Args:
            mask: [B or 1, 1 or Hq, 1, max_cache_len], bool (True = attend) or additive.

        Returns:
            [B, 1, Hq, D].
        """
        query = query.to(self.v.dtype)  # autocast turns queries in float32
        if mask.dtype == torch.bool and mask.shape[1] == 1:
            output = flash_lora_attention(
                query, self.k, self.v, self.v_lr, None if self.v_lr is None else self.b, scale=scale, causal=False,
                key_padding_mask=mask[:, 0, 0].expand(query.shape[0], -1), softcap=softcap, backend=self.backend,
            )  # fmt: skip
            assert isinstance(output, Tensor)
        else:
            value = self.v if self.v_lr is None or self.b is None else self.v + self.v_lr.unsqueeze(1) @ self.b
            output = dense_attention(query, self.k, value, mask, scale, softcap)
        return output.transpose(1, 2).contiguous()
