"""Rows of a batch over keys that are one for all of them: against the plain definition over expanded keys."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lragent_hf.attention import flash_lora_attention, one_prefix
from lragent_hf.attention.one_prefix import attend_one_prefix


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 5), kv_heads=st.integers(1, 3), group=st.integers(1, 3), count=st.integers(1, 4),
    length=st.integers(1, 20), dim=st.sampled_from([8, 10]), rank=st.integers(0, 5), own_b=st.booleans(),
    own_lr=st.booleans(), masked=st.booleans(), softcap=st.sampled_from([None, 5.0]),
    block=st.sampled_from([1, 64, 1 << 22]), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_it_is_the_definition(
    batch: int, kv_heads: int, group: int, count: int, length: int, dim: int, rank: int, own_b: bool, own_lr: bool,
    masked: bool, softcap: float | None, block: int, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    q = torch.randn(batch, kv_heads * group, count, dim, dtype=torch.float64)
    k, v = (torch.randn(kv_heads, length, dim, dtype=torch.float64) for _ in range(2))
    v_lr = b = mask = None
    if rank:
        v_lr = torch.randn(*((batch,) if own_lr else ()), length, rank, dtype=torch.float64)
        b = torch.randn(*((batch,) if own_b else ()), kv_heads, rank, dim, dtype=torch.float64)
    if masked:  # a row may see nothing at all
        mask = torch.rand(batch, length) < 0.5
    wide = [part.expand(batch, -1, -1, -1) for part in (k, v)]
    wide_lr = v_lr if v_lr is None or own_lr else v_lr.expand(batch, -1, -1)
    want, want_lse = flash_lora_attention(
        q, *wide, wide_lr, b, scale=0.3, causal=False, key_padding_mask=mask, softcap=softcap, return_lse=True,
        backend="reference",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_prefix, "_SCORES", block)
        got, lse = attend_one_prefix(q, k, v, v_lr, b, scale=0.3, key_padding_mask=mask, softcap=softcap)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(lse, want_lse, rtol=1e-11, atol=1e-11)
