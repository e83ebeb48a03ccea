"""The cost model, against what the kernels do: addresses that the interpreter sees. And the rule of plan.py."""

import dataclasses
from unittest import mock

import cases
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton.runtime import interpreter

from lragent_hf.attention import flash_lora_attention
from lragent_hf.kernels import launch
from lragent_hf.kernels.configs import ARCHITECTURES
from lragent_hf.kernels.cost import flops, key_bytes, unique_bytes
from lragent_hf.kernels.plan import MAX_SPLITS, plan


class Traffic:
    """Every address that interpreted kernels load or store, as spans of storages that are known by name."""

    def __init__(self, **tensors):
        self.spans = {
            name: (t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for name, t in tensors.items()
        }
        self.touched = set()

    def __enter__(self):
        builder = interpreter.interpreter_builder
        load, store = builder.create_masked_load, builder.create_masked_store

        def counted_load(ptrs, mask, *args):
            self.see(ptrs, mask)
            return load(ptrs, mask, *args)

        def counted_store(ptrs, value, mask, *args):
            self.see(ptrs, mask)
            return store(ptrs, value, mask, *args)

        self.patch = mock.patch.multiple(builder, create_masked_load=counted_load, create_masked_store=counted_store)
        self.patch.__enter__()
        return self

    def __exit__(self, *error):
        self.patch.__exit__(*error)

    def see(self, ptrs, mask):
        self.touched.update(np.asarray(ptrs.data)[np.asarray(mask.data, dtype=bool)].reshape(-1).tolist())

    def bytes_of(self, name, itemsize):
        start, size = self.spans[name]
        return itemsize * sum(start <= address < start + size for address in self.touched)


@pytest.mark.parametrize("shape", [(1, 16, 8, 1, 300, 128, 8), (2, 4, 2, 5, 90, 64, 24)], ids=str)
def test_bytes_are_those_the_kernels_touch(shape):
    batch, heads, kv_heads, Lq, Lk, D, R = shape
    tensors = {
        "q": torch.randn(batch, heads, Lq, D),
        "k": torch.randn(batch, kv_heads, Lk, D),
        "v_base": torch.randn(batch, kv_heads, Lk, D),
        "v_lr": torch.randn(batch, Lk, R),
        "b": torch.randn(kv_heads, R, D),
    }
    tensors = {name: t.half() for name, t in tensors.items()}
    with Traffic(**tensors) as traffic:
        out = flash_lora_attention(**tensors, backend="triton")
    traffic.spans["out"] = (out.untyped_storage().data_ptr(), out.untyped_storage().nbytes())
    counted = {name: traffic.bytes_of(name, 2) for name in traffic.spans}
    cost = unique_bytes(batch, heads, kv_heads, Lq, Lk, D, R, 2)
    assert counted["q"] + counted["k"] + counted["v_base"] + counted["out"] == cost.base
    assert counted["v_lr"] + counted["b"] == cost.low_rank


@pytest.mark.parametrize("shape", [(1, 16, 8, 1, 300, 128, 8, 128), (2, 4, 2, 5, 90, 64, 24, 32)], ids=str)
def test_bytes_of_key_lr_are_those_the_kernels_touch(shape):
    batch, heads, kv_heads, Lq, Lk, D, R, turning = shape
    q, k, v = (torch.randn(batch, count, length, D) for count, length in ((heads, Lq), (kv_heads, Lk), (kv_heads, Lk)))
    tensors = {
        "k_lr": torch.randn(batch, Lk, R),
        "b_k": torch.randn(kv_heads, R, D),
        "cos": torch.randn(Lk, turning // 2),
        "sin": torch.randn(Lk, turning // 2),
    }
    tensors = {name: t.half() for name, t in tensors.items()}
    with Traffic(**tensors) as traffic:
        flash_lora_attention(q.half(), k.half(), v.half(), **tensors, backend="triton")
    counted = sum(traffic.bytes_of(name, 2) for name in tensors)
    assert counted == key_bytes(batch, kv_heads, Lk, D, R, turning, 2)


def test_what_key_lr_costs_on_llama_shapes():
    base = unique_bytes(1, 32, 8, 1, 65536, 128, 8, 2).base
    assert key_bytes(1, 8, 65536, 128, 8, 128, 2) / base < 0.07
    assert key_bytes(8, 8, 65536, 128, 8, 128, 2) / (8 * base) < 0.012


@pytest.mark.parametrize("Lk", [1024, 8192, 65536])
@pytest.mark.parametrize("batch", [1, 8])
def test_what_rank_8_costs_on_llama_shapes(batch, Lk):
    assert unique_bytes(batch, 32, 8, 1, Lk, 128, 8, 2).overhead < 0.02
    pairs = Lk * (Lk + 1) // 2
    assert flops(batch, 32, pairs, Lk, 128, 8).overhead < 0.10
    assert flops(batch, 32, pairs, Lk, 128, 8, padded=False).overhead < 0.10


ARCHES = [ARCHITECTURES[name] for name in ("sm_80", "sm_90", "sm_100", "gfx942")]
PROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "gfx942": 304}


@pytest.mark.parametrize("arch", ARCHES, ids=lambda arch: arch.name)
def test_one_row_at_64k_fills_a_gpu(arch):
    processors = PROCESSORS[arch.name]
    way = plan(1, 32, 8, 1, 65536, 128, 2, 8, processors=processors, architecture=arch)
    assert way.pack == 4
    assert processors <= 8 * way.splits <= 2 * processors


@given(
    batch=st.integers(1, 64),
    kv_heads=st.integers(1, 16),
    group=st.integers(1, 16),
    Lq=st.integers(1, 4096),
    Lk=st.integers(0, 1 << 20),
    D=st.integers(32, 256),
    rank=st.integers(0, 128),
    itemsize=st.sampled_from([2, 4]),
    arch=st.sampled_from(ARCHES),
    window=st.one_of(st.none(), st.integers(1, 8192)),
)
def test_the_rule(batch, kv_heads, group, Lq, Lk, D, rank, itemsize, arch, window):
    heads, processors = kv_heads * group, 132
    way = plan(
        batch, heads, kv_heads, Lq, Lk, D, itemsize, rank, processors=processors, architecture=arch, window=window
    )  # fmt: skip
    assert 1 <= way.splits <= MAX_SPLITS
    if way.mode == "prefill":
        assert way.pack == way.splits == 1
        assert Lq * group > 16
    else:
        assert way.pack == group
        programs = batch * kv_heads * -(-Lq * group // way.config.BM) * way.splits
        assert way.splits == 1 or programs <= processors * arch.resident
        assert way.splits == 1 or Lk // way.splits >= 256
    if Lq * group <= 16:
        assert way.mode == "decode"


def test_small_Lq_goes_by_the_rule():
    def mode(Lq, Lk, batch=1):
        way = plan(batch, 32, 8, Lq, Lk, 128, 2, 8, processors=132, architecture=ARCHITECTURES["sm_90"])
        return way.mode, way.splits > 1

    assert mode(1, 65536) == ("decode", True)
    assert mode(4, 65536) == ("decode", True)  # speculative decoding: 16 rows
    assert mode(16, 65536) == ("split", True)  # a short tool result: 64 rows
    assert mode(64, 65536) == ("split", True)  # prefill would leave 100 processors idle
    assert mode(64, 300) == ("prefill", False)  # nothing to split
    assert mode(64, 65536, batch=8) == ("prefill", False)  # 256 tiles
    assert mode(4096, 65536) == ("prefill", False)


def test_float32_leaves_the_expansion_to_the_combine_kernel_on_nvidia(monkeypatch):
    """The interpreter's row, made to behave as NVIDIA's do: one split, parts nonetheless."""
    arch = dataclasses.replace(ARCHITECTURES["interpreter"], float32_units=False)
    monkeypatch.setattr(launch, "architecture", lambda device: arch)
    parts = mock.Mock(wraps=launch.leaves_parts)
    monkeypatch.setattr(launch, "leaves_parts", parts)
    case = cases.Case(Lq=40, past=5, D=32, batch=1)
    cases.check(case, lambda *tensors, **options: flash_lora_attention(*tensors, **options, backend="triton"))
    way, *rest = parts.call_args.args
    assert way.splits == 1
    assert launch.leaves_parts(way, *rest)
