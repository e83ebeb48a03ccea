"""LoRA on k_proj: K = rot(X W_k) + rot((X A_k) B_k), under every scheme, rotary layout and backend."""

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import NaiveRun, activate, assert_turns, exact_twin
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import (
    SCHEMES,
    SPLITTING,
    assert_alone,
    assert_close,
    assert_same_state,
    base_model,
    config,
    peft_model,
    raising,
    randomise,
    run,
    snapshot,
    tokens,
    turn,
    write,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from lragent_hf import CACHE_ARG, LoRASharedCache
from lragent_hf.attention import flash_lora_attention
from lragent_hf.errors import (
    AdapterChangedError,
    CacheModelMismatchError,
    SharedAMismatchError,
    UnsupportedAdapterError,
    UnsupportedModelError,
)

QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]
IDS = tokens(40, rows=2)
MASK = torch.ones_like(IDS)
MASK[1, :3] = 0
TURNS = ((("plan",), 12), (("act",), 18), ((), 22), (("reflect",), 30), (("plan",), 35), (("act", "plan"), 40))
SIZE = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.15, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None, "max_position_embeddings": 256,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 10000.0,
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "llama": {},  # pairs (i, i + D / 2), an angle of each given twice, one half after the other
    "llama yarn": {"rope_parameters": YARN},  # cos and sin are scaled
    "llama llama3": {"rope_parameters": LLAMA3},
    "cohere": {},  # pairs (2i, 2i + 1), each angle given twice in a row
    "glm": {"partial_rotary_factor": 0.5},  # pairs (2i, 2i + 1) of half of the columns
    "phi": {"partial_rotary_factor": 0.5},  # half of the columns, turned apart
    "gemma2": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "smollm3": {"no_rope_layers": [1, 0], "use_sliding_window": False},  # one layer does not turn
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 128},  # each angle given once
    "olmo": {},
}


def agents_on(name: str, modules: Any = QKVO, shared: bool = False, **options: Any) -> PeftModel:
    """A tiny model of that layout with the agents plan, act and reflect; ``options`` are its config's."""
    cfg = AutoConfig.for_model(name.split()[0], **{**SIZE, **LAYOUTS.get(name, {}), **options})
    torch.manual_seed(0)
    model: PeftModel | None = None
    for agent, rank in (("plan", 5), ("act", 5), ("reflect", 5 if shared else 3)):
        chosen = LoraConfig(r=rank, lora_alpha=10, target_modules=modules)
        if model is None:
            model = get_peft_model(
                AutoModelForCausalLM.from_config(cfg, attn_implementation="eager"), chosen, adapter_name=agent
            )
        else:
            model.add_adapter(agent, chosen)
    assert model is not None
    randomise(model, shared=shared)
    return model.eval()


@pytest.mark.parametrize("working", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("scheme", SPLITTING)
def test_every_rotary_layout_is_the_plain_definition(scheme: str, name: str, working: bool) -> None:
    """Left-padded rows, agents in turn, in fp64: the model's own rotation, applied to what was materialised."""
    model = agents_on(name, shared=scheme == "base_lr_shared").double()
    if name == "gpt_oss":
        model.get_base_model().set_experts_implementation("eager")
    twin = exact_twin(model)
    naive = NaiveRun(twin, scheme)
    assert naive.keys
    # That one turns in fp32, whatever the model's dtype.
    allowed = 64 * torch.finfo(torch.float32).eps if name == "cohere" else 1e-9
    cache = LoRASharedCache(model, scheme, key_working_copy=working)
    assert_turns(model, cache, naive, IDS, TURNS, MASK, allowed)


@pytest.mark.parametrize(
    "options",
    [{"attention": "keep"}, {"backend": "reference", "key_working_copy": False}, {"key_working_copy": False}, {}],
)
@pytest.mark.parametrize("modules", [QKVO, ["k_proj"], "all-linear"])
@pytest.mark.parametrize("scheme", SPLITTING)
def test_adapters_on_any_projections_with_any_backend(scheme: str, modules: Any, options: dict[str, Any]) -> None:
    model = peft_model(shared=scheme == "base_lr_shared", target_modules=modules).double()
    twin = exact_twin(model)
    assert_turns(model, LoRASharedCache(model, scheme, **options), NaiveRun(twin, scheme), IDS, TURNS, MASK)


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_token_at_a_time_from_the_first(name: str) -> None:
    """At position 0 nothing turns, so it does not show which layout it is."""
    model = agents_on(name)
    for scheme in SPLITTING[:1] + SPLITTING[2:]:
        assert_alone(model, LoRASharedCache(model, scheme), IDS[:1], (1, 1, 1, 5, 1))


@pytest.mark.parametrize("scheme", ["base_lr_shared", "base_lr_stacked"])
def test_a_window_as_long_as_the_context_is_exact(scheme: str) -> None:
    model = agents_on("llama", shared=True).double()
    cache, plain = LoRASharedCache(model, scheme, handover_window=64), LoRASharedCache(model, "non_shared")
    for agent, stop in (("plan", 12), ("act", 20), ("reflect", 31), ("plan", 40)):
        got, want = (turn(model, each, agent, IDS[:, :stop], MASK[:, :stop]) for each in (cache, plain))
        count = min(got.shape[1], want.shape[1])
        assert_close(
            got[:, -count:][MASK[:, stop - count : stop].bool()], want[:, -count:][MASK[:, stop - count : stop].bool()]
        )


@pytest.mark.parametrize("scheme", SPLITTING)
def test_keys_shared_whole_are_as_they_were_first_written(scheme: str) -> None:
    """``key_lr=False``, the paper's main setting."""
    model = agents_on("llama", shared=scheme == "base_lr_shared").double()
    naive = NaiveRun(exact_twin(model), scheme, key_lr=False)
    cache = LoRASharedCache(model, scheme, key_lr=False)
    assert_turns(model, cache, naive, IDS, TURNS, MASK)
    assert "keys shared whole" in repr(cache)
    assert not {row.part for row in cache.memory_report().rows} & {"K LR", "angles", "K_base"}
    apart = LoRASharedCache(model, scheme)
    assert_turns(model, apart, NaiveRun(exact_twin(model), scheme), IDS, TURNS[:3], MASK)
    assert "keys shared whole" not in repr(apart)


@pytest.mark.parametrize("name", ["qwen3", "olmo2"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_keys_that_are_normalised_are_refused_by_name_or_shared_whole(scheme: str, name: str) -> None:
    model = agents_on(name, shared=True)
    cache = LoRASharedCache(model, scheme)
    if scheme in SPLITTING:
        before = snapshot(cache)
        with pytest.raises(UnsupportedModelError, match="key_lr=False"):
            run(model, cache, IDS)
        assert_same_state(snapshot(cache), before)
        cache = LoRASharedCache(model, scheme, key_lr=False)
    assert_alone(model, cache, IDS)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}])
def test_what_is_not_x_a_b_is_refused_on_k_proj(options: dict[str, Any]) -> None:
    model = peft_model(target_modules=["k_proj"], **options)
    with pytest.raises(UnsupportedAdapterError, match=r"layers.0.self_attn.k_proj.*key_lr=False"):
        LoRASharedCache(model)
    assert_alone(model, LoRASharedCache(model, key_lr=False), IDS)


def test_unequal_a_on_k_proj_is_refused_by_base_lr_shared() -> None:
    model = agents_on("llama", shared=True)
    layer = model.get_base_model().model.layers[1].self_attn
    layer.k_proj.lora_A["act"].weight.data.add_(0.1)
    with pytest.raises(SharedAMismatchError, match=r"layers.1.self_attn.k_proj"):
        LoRASharedCache(model, "base_lr_shared")
    assert_alone(model, LoRASharedCache(model, "base_lr_shared", key_lr=False), IDS)


@pytest.mark.parametrize("scheme", SPLITTING)
def test_an_a_on_k_proj_that_changes_is_noticed(scheme: str, tmp_path: Path) -> None:
    model = agents_on("llama", shared=True)
    cache = LoRASharedCache(model, scheme)
    turn(model, cache, "plan", IDS[:, :20])
    cache.save(tmp_path / "saved")
    before = snapshot(cache)
    layer = model.get_base_model().model.layers[1].self_attn
    layer.k_proj.lora_A["plan"].weight.data.add_(0.1)
    with pytest.raises(AdapterChangedError, match=r"layers.1.self_attn.k_proj"):
        turn(model, cache, "plan", IDS)
    assert_same_state(snapshot(cache), before)
    with pytest.raises((CacheModelMismatchError, SharedAMismatchError), match="k_proj"):
        LoRASharedCache.load(model, tmp_path / "saved")


@pytest.mark.parametrize("scheme", SPLITTING)
def test_forks_copies_and_saved_caches_turn_on(scheme: str, tmp_path: Path) -> None:
    model = agents_on("glm", shared=True).double()
    cache = LoRASharedCache(model, scheme)
    turn(model, cache, "plan", IDS[:, :14])
    turn(model, cache, "act", IDS[:, :20])
    cache.save(tmp_path / "saved")
    others = [cache.fork(), copy.deepcopy(cache), LoRASharedCache.load(model, tmp_path / "saved")]
    for stop, agent in ((22, "act"), (23, "act"), (30, "plan")):
        want = turn(model, cache, agent, IDS[:, :stop])
        for other in others:
            assert_close(turn(model, other, agent, IDS[:, :stop]), want)
    cache.crop(-12)
    cache.batch_select_indices(torch.tensor([1]))
    stock = LoRASharedCache(model, scheme)
    for agent, stop in (("plan", 14), ("act", 18)):
        turn(model, stock, agent, IDS[1:, :stop])
    assert_close(turn(model, cache, "act", IDS[1:]), turn(model, stock, "act", IDS[1:]))


@pytest.mark.parametrize("working", [False, True])
def test_an_adapter_with_keys_that_joins_late_pays_one_prefill(working: bool) -> None:
    """Loaded when tokens are cached: the module is replaced, the angles of what is there come with its prefill."""
    model = get_peft_model(base_model(config()), LoraConfig(r=4, target_modules=["v_proj"]), adapter_name="plan")
    randomise(model)
    model = model.double().eval()
    cache = LoRASharedCache(model, key_working_copy=working)
    first = turn(model, cache, "plan", IDS[:1, :12])
    model.add_adapter("act", LoraConfig(r=3, target_modules=["k_proj", "v_proj"]))
    randomise(model, only="act")
    model = model.double().eval()
    naive = NaiveRun(exact_twin(model), "base_lr_stacked", agents=("plan",))
    activate(naive.model, ("plan",))
    assert_close(first, naive.forward(("plan",), IDS[:1, :12], torch.ones_like(IDS[:1, :12])))
    assert_turns(model, cache, naive, IDS[:1], [(("act",), 20), (("plan",), 24), (("act",), 30)])


@pytest.mark.parametrize("scheme", ["base_shared", "base_lr_stacked"])
def test_angles_have_no_holes(scheme: str) -> None:
    """One without LoRA on k_proj runs ahead while another has read only part: nothing of what lies between is known."""
    adapters: dict[str, dict[str, Any]] = {"plan": {}, "act": {"target_modules": QKVO}}
    model, ids = peft_model(adapters=adapters).double(), IDS[:1]
    cache, naive = (
        LoRASharedCache(model, scheme, agents=["plan"]),
        NaiveRun(exact_twin(model), scheme, agents=("plan",)),
    )
    ones = torch.ones_like(ids)
    for agent, start, stop in (("plan", 0, 20), ("act", 0, 10), ("plan", 20, 25), ("act", 10, 30)):
        for each in (model, naive.model):
            activate(each, (agent,))
        assert cache.get_seq_length() == start == naive.length((agent,))
        with torch.no_grad():
            got = model(ids[:, start:stop], attention_mask=ones[:, :stop], **{CACHE_ARG: cache}).logits
        assert_close(got, naive.forward((agent,), ids[:, start:stop], ones[:, :stop]))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("first", ["plan", None])
def test_a_failed_forward_leaves_no_working_copy_of_its_own(first: str | None, error: type[BaseException]) -> None:
    """Beams expand a cache of one row; the forward fails in a later layer."""
    model, ids = agents_on("llama"), IDS[:1]
    caches = [LoRASharedCache(model, key_working_copy=working) for working in (True, False)]
    want = []
    for cache in caches:
        turn(model, cache, first, ids[:, :20])
        model.set_adapter("act")
        layer = model.get_base_model().model.layers[1].mlp
        with raising(layer, error("torn")), pytest.raises(error, match="torn"):
            write(model, ids[:, :22], 3, cache, num_beams=3)
        want.append(turn(model, cache, "act", ids[:, :24]))
    assert_close(*want)


def test_a_crop_by_one_who_never_ran_leaves_rows_as_they_are() -> None:
    model = agents_on("llama")
    cache = LoRASharedCache(model, "base_shared")
    with torch.no_grad():
        model(IDS[:, :10], adapter_names=["plan", "act"], **{CACHE_ARG: cache})
    model.set_adapter("reflect")
    cache.crop(-5)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.agents == {"[act, plan]": 10}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_turns_keys_in_another_dtype_than_it_projects_them(dtype: torch.dtype) -> None:
    model = agents_on("llama")
    got, want = [], []
    for options in ({"key_working_copy": True}, {"key_working_copy": False}, {"attention": "keep"}):
        cache, stock = LoRASharedCache(model, **options), DynamicCache()
        with torch.autocast("cpu", dtype):
            got.append(torch.cat([turn(model, cache, "plan", IDS[:1, :stop]) for stop in (12, 13, 20)], 1))
            want.append(torch.cat([turn(model, stock, "plan", IDS[:1, :stop]) for stop in (12, 13, 20)], 1))
    exact = turn(model, DynamicCache(), "plan", IDS[:1, :20])
    for ours, theirs in zip(got, want, strict=True):
        assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max() + 8 * torch.finfo(dtype).eps


def test_a_first_token_shows_less_pairs_than_turn() -> None:
    """gpt_oss gives each angle once; at position 0 that looks like angles given twice, of half as many pairs."""
    model = agents_on("gpt_oss", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    cache, plain = LoRASharedCache(model, handover_window=8), LoRASharedCache(model, "non_shared")
    for agent, stop in (("plan", 1), ("act", 6), ("plan", 8)):
        got, want = (turn(model, each, agent, IDS[:1, :stop]) for each in (cache, plain))
        assert_close(got[:, -1], want[:, -1])


@pytest.mark.parametrize("scheme", ["base_shared", "base_lr_stacked"])
def test_angles_that_move_as_the_context_grows(scheme: str) -> None:
    """Keys stay as they were turned, as in any cache; what is added to them turns by the same angles."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    moving = {"rope_parameters": rope, "max_position_embeddings": 8}
    model = agents_on("llama", **moving).double()
    naive = NaiveRun(exact_twin(model), scheme)
    assert_turns(
        model, LoRASharedCache(model, scheme), naive, IDS[:1], [(("plan",), 12), (("act",), 18), (("plan",), 30)]
    )
    late = agents_on("llama", **moving)
    cache = LoRASharedCache(late, scheme, agents=[])
    turn(late, cache, None, IDS[:1, :12])
    with pytest.raises(UnsupportedModelError, match=r"agents="):
        turn(late, cache, "act", IDS[:1, :18])


def test_the_working_copy_is_let_go_of_where_it_is_not_used() -> None:
    model = agents_on("llama")
    cache = LoRASharedCache(model)

    def parts() -> set[str]:
        return {row.part for row in cache.memory_report().rows}

    turn(model, cache, "plan", IDS[:, :20])
    assert "K working copy" in parts()
    cache.offload(0)
    cache.offload(1)
    assert "K working copy" not in parts()
    turn(model, cache, "plan", IDS[:, :22])
    assert "K working copy" in parts()  # on a CPU, where it was offloaded to
    cache.batch_select_indices(torch.tensor([1, 0]))
    assert "K working copy" not in parts()
    branch = cache.fork()
    turn(model, branch, "plan", IDS[[1, 0], :26])
    assert not any(layer.work["k"].valid for layer in branch.layers)


def test_an_edited_b_counts_from_the_next_token_for_every_key() -> None:
    """With a working copy as without: keys that are made already are made anew."""
    model = agents_on("llama").double()
    caches = [LoRASharedCache(model, key_working_copy=working) for working in (True, False)]
    for cache in caches:
        turn(model, cache, "plan", IDS[:, :20])
    b = model.get_base_model().model.layers[1].self_attn.k_proj.lora_B["plan"].weight
    before = [turn(model, cache.fork(), "plan", IDS[:, :21]) for cache in caches]
    b.data.mul_(2)
    got = [turn(model, cache, "plan", IDS[:, :21]) for cache in caches]
    assert_close(*before)
    assert_close(*got)
    assert (got[0] - before[0]).abs().max() > 1e-3


def test_report_counts_what_keys_take() -> None:
    model = agents_on("llama", shared=True)
    cache = LoRASharedCache(model, "base_lr_shared")
    turn(model, cache, "plan", IDS)
    rows = {row.part: row.in_use_bytes for row in cache.memory_report().rows}
    width = 8  # rank 5, in blocks of 16 bytes: of 4 columns
    assert rows["K LR"] == rows["LR"] == 2 * 40 * width * 4 * 2  # rows, tokens, columns, bytes, layers
    assert rows["angles"] == 2 * 40 * 4 * 4 * 2  # rows, tokens, pairs, bytes; cos and sin; once for both layers
    assert rows["K_base"] == rows["V_base"] == rows["K working copy"]
    lean = LoRASharedCache(model, "base_lr_shared", key_working_copy=False)
    turn(model, lean, "plan", IDS)
    assert {row.part: row.in_use_bytes for row in lean.memory_report().rows} == {
        part: count for part, count in rows.items() if part != "K working copy"
    }


def test_full_and_unshared_schemes_take_k_proj_as_it_is() -> None:
    model = agents_on("llama")
    stock, shared = DynamicCache(), LoRASharedCache(model, "full_shared")
    for agent, stop in (("plan", 14), ("act", 20)):
        assert_close(turn(model, shared, agent, IDS[:, :stop]), turn(model, stock, agent, IDS[:, :stop]))


class Peak(TorchDispatchMode):
    """Counts the bytes that tensors made while it is open hold at most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        found = function(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, torch.Tensor) and (store := one.untyped_storage())._cdata not in known:
                key = id(store)
                self.live[key] = store.nbytes()
                weakref.finalize(store, self.live.pop, key, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return found


def test_a_decode_step_without_working_copy_takes_no_memory_that_grows_with_the_keys() -> None:
    """What key LR adds to the peak of one step of attention is no more at 16k keys than at 1k."""

    def peak(length: int, keys: bool) -> int:
        make = torch.Generator().manual_seed(0)
        shapes = ((1, 8, 1, 64), (1, 2, length, 64), (1, 2, length, 64), (1, length, 4), (2, 4, 64), (length, 32))
        q, k, v, lr, b, angles = (torch.randn(*shape, generator=make) for shape in shapes)
        extra = {"k_lr": lr, "b_k": b, "cos": angles, "sin": angles} if keys else {}
        with Peak() as mode:
            flash_lora_attention(q, k, v, lr, b, backend="blockwise", **extra)
        return mode.peak

    added = [peak(length, True) - peak(length, False) for length in (1024, 16384)]
    assert added[1] <= added[0] < 512 << 10, added  # K has 8 MiB at 16k
