"""The kernels in Triton's interpreter against the oracle: over shapes, masks, layouts and ways to run a call."""

import contextlib
import functools
import math
from unittest import mock

import cases
import pytest
import torch
from cases import Case
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from lragent_hf.attention import flash_lora_attention
from lragent_hf.attention.reference import reference_attention
from lragent_hf.kernels import launch
from lragent_hf.kernels.configs import Config
from lragent_hf.kernels.plan import Plan, plan

triton_attention = functools.partial(flash_lora_attention, backend="triton")


@contextlib.contextmanager
def way(mode: str, splits: int, BM: int, BN: int):
    """Run every call this way, whatever the rule would take. "packed": heads of a group in one tile."""

    def fixed(batch, heads, kv_heads, *args, **kwargs):
        return Plan(mode, heads // kv_heads if mode == "packed" else 1, splits, Config(BM, BN, 1, 1))

    with mock.patch.object(launch, "plan", fixed):
        yield


def check(case: Case, mode: str = "prefill", splits: int = 1, BM: int = 16, BN: int = 16) -> None:
    with way(mode, splits, BM, BN):
        cases.check(case, triton_attention)


calls = st.builds(
    Case,
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3]),
    Lq=st.one_of(st.just(1), st.integers(1, 12), st.integers(13, 36)),
    past=st.one_of(st.just(0), st.integers(-9, 9), st.integers(10, 50)),
    D=st.sampled_from([32, 40, 64, 80, 96]),
    rank=st.one_of(st.none(), st.integers(1, 128), st.sampled_from([1, 8, 16, 64, 128])),
    b_per_row=st.booleans(),
    layout=st.sampled_from(["cache", "interleaved"]),
    padding=st.sampled_from(["none", "none", "left", "arbitrary", "blind"]),
    causal=st.sampled_from([True, True, False]),
    window=st.one_of(st.none(), st.none(), st.integers(1, 70)),
    softcap=st.sampled_from([None, None, 2.0, 30.0]),
    scale=st.sampled_from([None, 0.05, 0.2]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    key_rank=st.one_of(st.none(), st.none(), st.sampled_from([1, 8, 24, 128])),
    rotary=st.sampled_from(["none", "half", "pairs"]),
    turning=st.sampled_from([None, None, 12]),
    seed=st.integers(0, 2**20),
)
tile = st.sampled_from([16, 32])
relaxed = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes minutes in the interpreter
)


@settings(relaxed, max_examples=30)
@given(calls, tile, tile)
@example(Case(Lq=3, past=-3, D=32), 16, 16)
@example(Case(Lq=9, past=-4, padding="blind"), 16, 16)
@example(Case(Lq=40, past=1, window=3, padding="left", dtype=torch.float16), 16, 16)
@example(Case(Lq=60, past=20, window=30, D=32, rank=None), 16, 16)
@example(Case(Lq=60, past=0, D=32, rank=None, group=1), 16, 16)
@example(Case(key_rank=8, rotary="pairs", turning=4, b_per_row=True), 16, 16)
def test_prefill_equals_the_oracle(case, BM, BN):
    check(case, "prefill", 1, BM, BN)


@settings(relaxed, max_examples=30)
@given(calls, st.sampled_from([1, 2, 3, 7]), tile, tile)
@example(Case(Lq=3, past=-3, D=32), 2, 16, 16)
@example(Case(Lq=1, past=0, rank=1), 3, 16, 16)
@example(Case(Lq=1, past=100, window=40, padding="arbitrary", key_rank=5), 3, 16, 16)
@example(Case(Lq=9, past=-4, padding="blind"), 2, 16, 16)
@example(Case(Lq=5, past=120, group=3, dtype=torch.float16), 4, 16, 16)
def test_split_keys_equal_the_oracle(case, splits, BM, BN):
    check(case, "packed", splits, BM, BN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("D", [32, 80, 128, 256])
@pytest.mark.parametrize("Lq", [1, 37])
def test_equals_the_oracle_the_way_the_rule_takes(Lq, D, dtype):
    cases.check(
        Case(batch=1, kv_heads=2, group=4, Lq=Lq, past=600 if Lq == 1 else 40, D=D, dtype=dtype), triton_attention
    )


@pytest.mark.parametrize(("mode", "splits"), [("prefill", 1), ("packed", 1), ("packed", 3)])
def test_hidden_tiles_are_not_computed(mode, splits):
    """Keys and values of tiles that nobody may see are NaN: even a weight of 0 would bring it into the output."""
    case = Case(batch=2, kv_heads=1, Lq=20, past=140, D=32)
    q, k, v_base, v_lr, b = case.tensors()
    mask = torch.ones(2, 160, dtype=torch.bool)
    mask[0, :48] = False  # left padding, to a tile's end
    mask[1, 16:32] = mask[1, 64:112] = False  # holes
    windowed = {"window": 25, "causal": True}  # of no query: keys before 140 - 25 + 1 = 116, so tiles before 112
    with way(mode, splits, 16, 16):
        for options, hidden in (
            ({"key_padding_mask": mask}, ~mask),
            (windowed, (torch.arange(160) < 112).expand(2, -1)),
        ):
            want = reference_attention(q, k, v_base, v_lr, b, **options)
            poisoned_k, poisoned_v, poisoned_lr = k.clone(), v_base.clone(), v_lr.clone()
            poisoned_k.transpose(1, 2)[hidden] = math.nan
            poisoned_v.transpose(1, 2)[hidden] = math.nan
            poisoned_lr[hidden] = math.nan
            got = triton_attention(q, poisoned_k, poisoned_v, poisoned_lr, b, **options)
            torch.testing.assert_close(got, want)


def test_keys_behind_the_last_query_of_a_tile_are_not_read():
    q, k, v_base, v_lr, b = Case(batch=1, kv_heads=1, Lq=40, past=24, D=32).tensors()
    poisoned = v_base.clone()
    poisoned[:, :, 48:] = math.nan  # the tiles of keys behind 24 + 16, where the first tile of rows ends
    with way("prefill", 1, 16, 16):
        got = triton_attention(q, k, poisoned, v_lr, b)
    torch.testing.assert_close(got[:, :, :16], reference_attention(q, k, v_base, v_lr, b)[:, :, :16])


@pytest.mark.parametrize("strided", ["plain", "stacked"])
def test_column_slices_of_a_stacked_cache(strided):
    """An agent's LR is a column slice of a wider buffer: rows 24 elements apart, starting at column 8."""
    case = Case(Lq=3, past=40, D=32, rank=8)
    q, k, v_base, v_lr, b = case.tensors()
    if strided == "stacked":
        stacked = torch.full((2, 64, 24), math.nan)
        stacked[:, :43, 8:16] = v_lr
        v_lr = stacked[:, :43, 8:16]
        assert launch._align(v_lr) == 8
    torch.testing.assert_close(triton_attention(q, k, v_base, v_lr, b), reference_attention(q, k, v_base, v_lr, b))


def test_values_without_unit_stride_are_copied_not_misread():
    q, k, v_base, v_lr, b = Case(Lq=3, past=40, D=32).tensors()
    odd = [t.mT.contiguous().mT for t in (q, k, v_base, v_lr)]
    torch.testing.assert_close(triton_attention(*odd, b), reference_attention(q, k, v_base, v_lr, b))


def test_low_rank_term_counts():
    q, k, v_base, v_lr, b = Case(Lq=4).tensors()
    with_lr, without = triton_attention(q, k, v_base, v_lr, b), triton_attention(q, k, v_base)
    assert (with_lr - without).abs().max() > 0.1


def test_the_rule_is_in_use():
    with mock.patch.object(launch, "plan", wraps=plan) as asked:
        cases.check(Case(Lq=1, past=3, D=32), triton_attention)
    assert asked.call_count == 2
