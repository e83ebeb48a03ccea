"""Calls of attention to test backends with, and the test: equal to the oracle in float64, within eager's error."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from attention_oracle import assert_close_to_oracle, eager_attention, in_float64

__all__ = ["FLOATS", "Case", "check"]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """One call. `layout`: "cache" = [B, Hkv, capacity, D] buffers, "interleaved" = [B, capacity, Hkv, D] transposed.

    `key_rank`: with key LR. `rotary`: its angles, "none", "half" or "pairs", over `turning` of the D columns (None: all).
    """

    batch: int = 2
    kv_heads: int = 2
    group: int = 2
    Lq: int = 5
    past: int = 7
    D: int = 16
    rank: int | None = 8
    b_per_row: bool = False
    layout: str = "cache"
    padding: str = "none"
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    dtype: torch.dtype = torch.float32
    key_rank: int | None = None
    rotary: str = "half"
    turning: int | None = None
    block_bytes: int = 256
    copy_size: int = 1 << 15
    seed: int = 0

    @property
    def Lk(self) -> int:
        return max(0, self.Lq + self.past)

    def tensors(self):
        """q, k, v_base, v_lr, b: views of longer buffers whose other parts are NaN."""
        make = torch.Generator().manual_seed(self.seed)

        def random(*shape):
            return torch.randn(*shape, generator=make).to(self.dtype)

        def in_buffer(t, dim, before=0, after=3):
            """t as a view of a buffer that is longer along dim, NaN before and after it."""
            shape = list(t.shape)
            shape[dim] += before + after
            view = torch.full(shape, math.nan, dtype=self.dtype).narrow(dim, before, t.shape[dim])
            return view.copy_(t)

        def heads(t):
            if self.layout == "interleaved":
                return in_buffer(t.transpose(1, 2), 1).transpose(1, 2)
            return in_buffer(t, 2)

        B, H, D = self.batch, self.kv_heads, self.D
        q = random(B, self.Lq, H * self.group, D).transpose(1, 2)
        k, v_base = heads(random(B, H, self.Lk, D)), heads(random(B, H, self.Lk, D))
        if self.rank is None:
            return q, k, v_base, None, None
        v_lr = torch.full((B, self.Lk + 3, self.rank + 9), math.nan, dtype=self.dtype)[:, : self.Lk, 4 : 4 + self.rank]
        v_lr.copy_(random(B, self.Lk, self.rank))
        b = random(*([B] if self.b_per_row else []), H, D, self.rank).mT / self.rank**0.5
        return q, k, v_base, v_lr, b

    def options(self):
        mask = None
        if self.padding != "none":
            make = torch.Generator().manual_seed(self.seed + 1)
            real = torch.randint(0, self.Lk + 1, (self.batch, 1), generator=make)
            if self.padding == "left":
                mask = torch.arange(self.Lk) >= real
            else:
                mask = torch.rand(self.batch, self.Lk, generator=make) < 0.6
            if self.padding == "blind":
                mask[0] = False
        plain = {"scale": self.scale, "causal": self.causal, "window": self.window, "softcap": self.softcap}
        return plain | {"key_padding_mask": mask} | (self.key_lr() if self.key_rank else {})

    def key_lr(self):
        """k_lr, b_k, cos, sin and the pairing of columns, with the batch in front or not."""
        make = torch.Generator().manual_seed(self.seed + 2)
        B, rank, D = self.batch, self.key_rank, self.D
        k_lr = torch.full((B, self.Lk + 3, rank + 9), math.nan, dtype=self.dtype)[:, : self.Lk, 4 : 4 + rank]
        k_lr.copy_(torch.randn(B, self.Lk, rank, generator=make))
        b_k = torch.randn(*([B] if self.b_per_row else []), self.kv_heads, rank, D, generator=make) / rank**0.5
        given = {"k_lr": k_lr, "b_k": b_k.to(self.dtype)}
        if self.rotary == "none":
            return given
        angles = torch.randn(*([B] if self.b_per_row else []), self.Lk, (self.turning or D) // 2, generator=make)
        angles = angles.to(torch.float32) * 3
        return given | {"cos": angles.cos(), "sin": angles.sin(), "rotary_interleaved": self.rotary == "pairs"}


def check(case: Case, run: Callable[..., Any]) -> None:
    """`run` takes the arguments of `flash_lora_attention` except the backend. With and without the log-sum-exp."""
    tensors, options = case.tensors(), case.options()
    oracle, oracle_lse = in_float64(*tensors, **options, return_lse=True)
    eager, eager_lse = eager_attention(*tensors, **options)
    out, lse = run(*tensors, **options, return_lse=True)
    alone = run(*tensors, **options)
    # What enters the sums: values for the output, for the log-sum-exp scores, at most scale |q| |k|. The low-rank terms are
    # many and cancel; sums are accumulated in float32.
    ulp = torch.finfo(case.dtype).eps
    q, k, v_base, v_lr, b = tensors
    values = max((float(t.abs().max()) for t in (v_base, v_lr) if t is not None and t.numel()), default=0.0)
    terms = 0.0 if v_lr is None or not v_lr.numel() else float((v_lr[:, None].abs().float() @ b.abs().float()).max())
    scores = (case.scale or case.D**-0.5) * float(q.norm(dim=-1).max() * k.norm(dim=-1).max()) if k.numel() else 0.0
    assert_close_to_oracle("output", out, oracle, eager, rounding=ulp * values + torch.finfo(torch.float32).eps * terms)
    assert_close_to_oracle("log-sum-exp", lse, oracle_lse, eager_lse, rounding=ulp * max(1.0, scores))
    assert torch.equal(alone, out)
