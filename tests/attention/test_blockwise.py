"""The plain PyTorch backend against the oracle, over shapes, masks, layouts and dtypes."""

import functools
import logging
import math
import sys
from unittest import mock

import cases
import pytest
import torch
from cases import FLOATS, Case
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lragent_hf import attention
from lragent_hf.attention import blockwise, flash_lora_attention, products
from lragent_hf.attention.reference import reference_attention
from lragent_hf.errors import BackendUnavailableError


def check(case: Case) -> None:
    blocks = mock.patch.multiple(blockwise, _BLOCK_BYTES=case.block_bytes, _MIN_ROWS=1)
    with blocks, mock.patch.object(products, "_COPY_SIZE", case.copy_size):
        cases.check(case, functools.partial(flash_lora_attention, backend="blockwise"))


calls = st.builds(
    Case,
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4]),
    Lq=st.one_of(st.just(1), st.integers(1, 40), st.sampled_from([63, 64, 65, 129])),
    past=st.one_of(st.just(0), st.integers(-9, 9), st.integers(10, 150)),
    D=st.sampled_from([8, 16, 20, 64]),
    rank=st.one_of(st.none(), st.integers(1, 128), st.sampled_from([1, 8, 16, 64, 128])),
    b_per_row=st.booleans(),
    layout=st.sampled_from(["cache", "interleaved"]),
    padding=st.sampled_from(["none", "none", "left", "arbitrary", "blind"]),
    causal=st.sampled_from([True, True, False]),
    window=st.one_of(st.none(), st.integers(1, 160)),
    softcap=st.sampled_from([None, None, 2.0, 30.0]),
    scale=st.sampled_from([None, 0.05, 0.2]),
    dtype=st.sampled_from(FLOATS),
    key_rank=st.one_of(st.none(), st.none(), st.integers(1, 128)),
    rotary=st.sampled_from(["none", "half", "pairs"]),
    turning=st.sampled_from([None, None, 4]),
    block_bytes=st.sampled_from([4, 12, 64, 256]),
    copy_size=st.sampled_from([1, 1 << 15]),
    seed=st.integers(0, 2**20),
)


@settings(max_examples=150, deadline=None)
@given(calls)
@example(Case(Lq=3, past=-3))
@example(Case(Lq=1, past=0, rank=1))
@example(Case(batch=1, Lq=1, past=70, rank=8))
@example(Case(batch=1, Lq=1, past=70, rank=3, b_per_row=True, scale=0.2, layout="interleaved"))
@example(Case(Lq=200, past=100, group=4, D=64))
@example(Case(Lq=9, past=-4, padding="blind"))
@example(Case(key_rank=8, rotary="pairs", turning=4, b_per_row=True))
@example(Case(Lq=130, past=1, window=3, padding="left", dtype=torch.bfloat16))
def test_equals_the_oracle(case):
    check(case)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("Lq", [1, 8, 300])
def test_equals_the_oracle_over_a_long_context(Lq, dtype):
    check(Case(batch=1, kv_heads=2, group=4, Lq=Lq, past=1500, D=64, dtype=dtype))


@pytest.mark.parametrize("Lq", [1, 6, 40])
def test_low_rank_term_counts(Lq):
    q, k, v_base, v_lr, b = Case(Lq=Lq).tensors()
    with_lr, without = flash_lora_attention(q, k, v_base, v_lr, b), flash_lora_attention(q, k, v_base)
    assert (with_lr - without).abs().max() > 0.1
    torch.testing.assert_close(flash_lora_attention(q, k, torch.zeros_like(v_base), v_lr, b), with_lr - without)


def test_scratch_bound_shortens_blocks(monkeypatch):
    monkeypatch.setattr(blockwise, "_SCRATCH_BYTES", 1)
    check(Case(Lq=70, past=11))


def test_oracle_is_the_definition():
    """The oracle itself, against sums written out for each head, query and key."""
    case = Case(batch=2, kv_heads=2, group=3, Lq=4, past=2, D=3, rank=2, padding="arbitrary", window=4, softcap=2.0)
    q, k, v_base, v_lr, b = (t.double() for t in case.tensors())
    out, lse = reference_attention(q, k, v_base, v_lr, b, **case.options(), return_lse=True)
    mask = case.options()["key_padding_mask"]
    for row in range(2):
        for head in range(6):
            kv = head // 3
            for i in range(4):
                keys = [j for j in range(6) if j <= 2 + i and 2 + i - j < 4 and mask[row, j]]
                weights = [math.exp(2 * math.tanh(float(q[row, head, i] @ k[row, kv, j]) / 3**0.5 / 2)) for j in keys]
                values = [v_base[row, kv, j] + v_lr[row, j] @ b[kv] for j in keys]
                total = sum(weights)
                want = sum((w / total * v for w, v in zip(weights, values, strict=True)), torch.zeros(3).double())
                torch.testing.assert_close(out[row, head, i], want)
                assert float(lse[row, head, i]) == pytest.approx(math.log(total) if keys else -math.inf)


def test_agrees_with_sdpa():
    q, k, v_base, v_lr, b = Case(batch=1, Lq=33, past=0).tensors()
    v = v_base + v_lr[:, None] @ b
    sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(flash_lora_attention(q, k, v_base, v_lr, b), sdpa)


@pytest.mark.parametrize("Lq", [1, 20])
def test_parts_of_a_context_merge_by_lse(Lq):
    case = Case(Lq=Lq, past=30, padding="left")
    q, k, v_base, v_lr, b = case.tensors()
    mask = case.options()["key_padding_mask"]
    whole = flash_lora_attention(q, k, v_base, v_lr, b, key_padding_mask=mask)
    outs, lses = [], []
    for part, causal in ((slice(0, 30), False), (slice(30, None), True)):
        out, lse = flash_lora_attention(
            q,
            k[:, :, part],
            v_base[:, :, part],
            v_lr[:, part],
            b,
            key_padding_mask=mask[:, part],
            causal=causal,
            return_lse=True,
        )
        outs.append(out)
        lses.append(lse)
    weights = torch.stack(lses).softmax(0).nan_to_num(0.0)
    torch.testing.assert_close((weights[..., None] * torch.stack(outs)).sum(0), whole)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"window": 5, "padding": "blind"}], ids=str)
@pytest.mark.parametrize("Lq", [1, 4, 70])
def test_gradients_equal_the_oracles(Lq, options):
    case = Case(Lq=Lq, past=9, dtype=torch.float64, **options)
    leaves = [t.detach().clone().requires_grad_() for t in case.tensors()]
    weight = torch.randn(leaves[0].shape, dtype=torch.float64)
    both = []
    for backend in ("blockwise", "reference"):
        out, lse = flash_lora_attention(*leaves, **case.options(), return_lse=True, backend=backend)
        loss = (out * weight).sum() + lse.masked_fill(lse == -math.inf, 0.0).sum()
        both.append(torch.autograd.grad(loss, leaves))
    for name, got, want in zip(("q", "k", "v_base", "v_lr", "b"), *both, strict=True):
        torch.testing.assert_close(got, want, msg=lambda m, name=name: f"gradient of {name}: {m}")


class Allocations(TorchDispatchMode):
    """The sizes, in elements, of every storage that operations bring into being."""

    def __init__(self, *known):
        super().__init__()
        self.seen = {t.untyped_storage().data_ptr() for t in known}
        self.kept, self.sizes = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in self.seen:
                self.kept.append(t)  # alive, so that its address is not handed out again
                self.seen.add(t.untyped_storage().data_ptr())
                self.sizes.append(t.untyped_storage().nbytes() // t.element_size())
        return result


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", ["cache", "interleaved"])
@pytest.mark.parametrize("Lq", [1, 4])
def test_few_queries_copy_neither_keys_nor_values(Lq, layout, dtype):
    case = Case(batch=3, Lq=Lq, past=400, D=64, layout=layout, dtype=dtype, padding="left", window=300)
    tensors, options = case.tensors(), case.options()
    with Allocations(*tensors) as allocations:
        flash_lora_attention(*tensors, **options)
    per_row = 300 * 2 * 64  # elements of one row's K within the window
    assert max(allocations.sizes) < per_row / 2 * (3 if layout == "cache" else 1)


def test_prefill_never_holds_all_scores():
    case = Case(batch=1, kv_heads=1, group=4, Lq=512, past=100, D=8)
    tensors = case.tensors()
    with Allocations(*tensors) as allocations:
        flash_lora_attention(*tensors)
    assert max(allocations.sizes) <= 4 * 64 * case.Lk


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("Lq", [1, 9])
def test_autograd_contexts(Lq, context):
    case = Case(Lq=Lq)
    tensors = case.tensors()
    with torch.inference_mode():
        born_in_inference = [t.clone() for t in tensors]
    with context():
        for these in (tensors, born_in_inference):
            torch.testing.assert_close(flash_lora_attention(*these), reference_attention(*these))


@pytest.mark.parametrize("Lq", [1, 9])
def test_memory_layout_suits_the_output_projection(Lq):
    assert flash_lora_attention(*Case(Lq=Lq).tensors()).transpose(1, 2).is_contiguous()


def arguments(**changes):
    names = ("q", "k", "v_base", "v_lr", "b")
    return dict(zip(names, Case().tensors(), strict=True)) | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 3, 5, 16)}, "multiple of Hkv"),
        ({"q": torch.zeros(2, 4, 16)}, "q must be"),
        ({"q": torch.zeros(2, 4, 5, 16).half()}, "one floating dtype"),
        ({"k": torch.zeros(2, 2, 11, 16)}, r"k \[2, 2, 11, 16\]"),
        ({"b": None}, "without b"),
        ({"v_lr": None}, "without v_lr"),
        ({"v_lr": torch.zeros(2, 2, 12, 8)}, "one for all heads"),
        ({"v_lr": torch.zeros(2, 11, 8)}, "v_lr must be"),
        ({"b": torch.zeros(2, 16, 8)}, "lora_B"),
        ({"b": torch.zeros(3, 2, 8, 16)}, "b must be"),
        ({"b": torch.zeros(2, 8, 16).half()}, "dtype and device"),
        ({"window": 0}, "window must be"),
        ({"softcap": 0.0}, "softcap must be"),
        ({"key_padding_mask": torch.ones(2, 12)}, r"mask\.bool\(\)"),
        ({"key_padding_mask": torch.ones(2, 5).bool()}, "key_padding_mask"),
        ({"backend": "flash"}, "'blockwise'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        flash_lora_attention(**arguments(**changes))


@pytest.fixture
def fresh_choice(monkeypatch):
    monkeypatch.setattr(attention, "_said", set())
    monkeypatch.setattr(attention, "_chosen", {})


def test_auto_says_once_what_it_took(fresh_choice, caplog):
    with caplog.at_level(logging.INFO, logger="lragent_hf"):
        for _ in range(3):
            flash_lora_attention(**arguments())
    assert [r.getMessage() for r in caplog.records if "blockwise" in r.getMessage()] == [
        "flash_lora_attention: backend blockwise (PyTorch matrix products suit device 'cpu')"
    ]


def test_backend_that_cannot_be_loaded_is_refused(fresh_choice, monkeypatch):
    monkeypatch.setitem(sys.modules, "lragent_hf.kernels", None)  # what Python does for a module that is not there
    with pytest.raises(BackendUnavailableError, match="backend='auto'"):
        flash_lora_attention(**arguments(), backend="triton")
    assert attention._automatic("cuda") == "blockwise"
