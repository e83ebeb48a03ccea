"""Whatever LoRA adapters can be: each kind alone, and in turns against the plain definition; and adapters that come, change
and go while their LR is cached."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import NaiveRun, assert_turns, exact_twin
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from peft.utils.other import AuxiliaryTrainingWrapper
from tiny import (
    SCHEMES,
    SPLITTING,
    assert_alone,
    assert_same_state,
    base_model,
    config,
    decoder_of,
    peft_model,
    randomise,
    run,
    snapshot,
    tokens,
)
from torch import nn

from lragent_hf import LoRASharedCache, detach
from lragent_hf.errors import AdapterChangedError, SharedAMismatchError, UnsupportedAdapterError

IDS = tokens(60)
STACKED = ("base_shared", "base_lr_stacked")
TURNS = [(("plan",), 9), (("act",), 14), ((), 18), (("reflect",), 23), (("act", "plan"), 28), (("plan",), 31)]

# --- kinds ------------------------------------------------------------------------------------------------------------

LINEAR = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_COPIES = {"modules_to_save": ["lm_head", "embed_tokens", "norm"]}
_NO_FIRST_V = {"target_modules": LINEAR, "exclude_modules": r".*layers\.0\.self_attn\.v_proj"}
_RANKS = {"rank_pattern": {"v_proj": 9, r"layers\.1\.self_attn\.q_proj": 2}}
_PATTERN = {"target_modules": r".*\.(q|v|o|up|down)_proj"}
_EMBEDDED = {"target_modules": ["q_proj", "v_proj", "embed_tokens"]}
_TOKENS = [{"trainable_token_indices": [3, 4, 5, 6]}, {"trainable_token_indices": [1, 4, 7, 9]}]
KINDS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "modules_to_save": ({}, {"plan": _COPIES, "act": {}, "reflect": {"modules_to_save": ["lm_head"]}}),
    "trainable tokens": ({}, {"plan": _TOKENS[0], "act": _TOKENS[1], "reflect": {}}),
    "trainable tokens, tied": ({"tie_word_embeddings": True}, {"plan": {}, "act": _TOKENS[0], "reflect": {}}),
    "rank and alpha pattern": ({}, {"plan": _RANKS, "act": {"alpha_pattern": {"v_proj": 3}}, "reflect": {}}),
    "layers_to_transform": ({}, {"plan": {"layers_to_transform": 0}, "act": {"layers_to_transform": 1}, "reflect": {}}),
    "exclude_modules": ({}, {"plan": _NO_FIRST_V, "act": {}, "reflect": {"exclude_modules": ["v_proj"]}}),
    "all linear layers by pattern": ({}, {"plan": _PATTERN, "act": _PATTERN, "reflect": _PATTERN}),
    "rslora": ({}, {"plan": {"use_rslora": True}, "act": {"use_rslora": True, "lora_alpha": 3}, "reflect": {}}),
    "lora_bias": ({"attention_bias": True}, {"plan": {"lora_bias": True}, "act": {}, "reflect": {"lora_bias": True}}),
    "LoRA on embeddings": ({}, {"plan": _EMBEDDED, "act": {}, "reflect": {}}),
    "layers repeated": ({}, {"plan": {"layer_replication": [[0, 2], [1, 2]]}}),
}
SHARED = [kind for kind in KINDS if kind != "rank and alpha pattern"]  # ranks differ, so A does


def model_with(kind: str, shared: bool = False) -> PeftModel:
    options, adapters = KINDS[kind]
    model = peft_model(config(num_hidden_layers=2, **options), adapters, shared=shared)
    generator = torch.Generator().manual_seed(4)
    for module in model.modules():
        if isinstance(module, AuxiliaryTrainingWrapper):  # trainable copies and tokens that have been trained
            for name, parameter in module.named_parameters():
                if "modules_to_save" in name or "trainable_tokens_delta" in name:
                    parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
        for parameter in getattr(module, "lora_embedding_B", {}).values():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


biased = pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed but the targeted layer")
tied = pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")


@biased
@tied
@pytest.mark.parametrize(
    ("scheme", "kind"),
    [(scheme, kind) for scheme in SCHEMES for kind in (SHARED if scheme == "base_lr_shared" else KINDS)],
)
def test_kinds_of_adapters_equal_the_plain_definition(scheme: str, kind: str) -> None:
    shared = scheme == "base_lr_shared"
    model = model_with(kind, shared).double()
    twin = exact_twin(model)
    agents = tuple(name for name in model.peft_config)
    alone = kind == "trainable tokens"  # PEFT activates one adapter with tokens of its own at a time
    turns = [(agent, stop) for agent, stop in TURNS if set(agent) <= set(agents) and not (alone and len(agent) > 1)]
    assert_turns(model, LoRASharedCache(model, scheme), NaiveRun(twin, scheme, agents=agents), IDS, turns)


@pytest.mark.parametrize("init", [False, "gaussian", "pissa", "pissa_niter_2", "olora", "orthogonal", "eva"])
@pytest.mark.parametrize("scheme", ["non_shared", "full_shared", *STACKED])
def test_initialisations_that_change_the_base_weight_too(scheme: str, init: Any) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=init)
    model = get_peft_model(base_model(config(num_hidden_layers=2)), lora, adapter_name="plan")
    model.add_adapter("act", copy.deepcopy(lora))
    for module in model.modules():
        for name in getattr(module, "lora_B", ()):
            if not module.lora_B[name].weight.any():
                nn.init.normal_(module.lora_B[name].weight, std=0.3)
    model = model.eval().double()
    naive = NaiveRun(exact_twin(model), scheme, agents=("plan", "act"))
    turns = [(agent, stop) for agent, stop in TURNS if "reflect" not in agent]
    assert_turns(model, LoRASharedCache(model, scheme), naive, IDS, turns)


# --- several at once, and weighted ones -------------------------------------------------------------------------------


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "one is DoRA"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_two_active_adapters(scheme: str, dora: bool) -> None:
    adapters: dict[str, Any] = {"plan": {"use_dora": dora}, "act": {}, "reflect": {}}
    model = peft_model(config(num_hidden_layers=2), adapters, shared=scheme == "base_lr_shared").double()
    naive = NaiveRun(exact_twin(model), scheme)
    turns = [(("act", "plan"), 9), (("plan", "reflect"), 14), (("act",), 18), (("act", "plan", "reflect"), 23)]
    assert_turns(model, LoRASharedCache(model, scheme), naive, IDS, turns)


COMBINATIONS = [
    {"combination_type": "linear"}, {"combination_type": "cat"}, {"combination_type": "svd", "svd_rank": 4},
    {"combination_type": "ties", "density": 0.5}, {"combination_type": "magnitude_prune", "density": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("options", COMBINATIONS, ids=lambda options: options["combination_type"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_weighted_adapter_joins_late(scheme: str, options: dict[str, Any]) -> None:
    shared = scheme == "base_lr_shared"
    model = peft_model(config(num_hidden_layers=2), {"plan": {}, "act": {}, "reflect": {}}, shared=shared).double()
    twin = exact_twin(model)
    cache, naive = LoRASharedCache(model, scheme), NaiveRun(twin, scheme)
    assert_turns(model, cache, naive, IDS, TURNS[:2])
    for each in (model, twin):
        each.add_weighted_adapter(["plan", "act"], [0.7, 0.5], "mixed", **options)
        each.eval()
    assert any(parameter.any() for name, parameter in model.named_parameters() if "lora_B.mixed" in name)
    if shared:
        model.set_adapter("mixed")
        before = snapshot(cache)
        with pytest.raises(SharedAMismatchError, match="'plan' and 'mixed'"):
            run(model, cache, IDS)
        assert_same_state(snapshot(cache), before)
        return
    assert_turns(
        model, cache, naive, IDS, [(("mixed",), 20), (("plan",), 24), (("mixed",), 28), (("act", "mixed"), 33)]
    )


# --- adapters that come, change and go --------------------------------------------------------------------------------


def v_proj(model: nn.Module, index: int = 1) -> Any:
    return decoder_of(model).layers[index].self_attn.v_proj


def started(scheme: str, **options: Any) -> tuple[PeftModel, LoRASharedCache]:
    """Plan has read 10 tokens, act 20, and plan 22."""
    model = peft_model(config(num_hidden_layers=2), {"plan": {}, "act": {}, "reflect": {}}, shared=True, **options)
    cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :10])
    model.set_adapter("act")
    run(model, cache, IDS[:, :20])
    model.set_adapter("plan")
    run(model, cache, IDS[:, :22])
    return model, cache


def changed(model: PeftModel, cache: LoRASharedCache, name: str, ids: Any = IDS) -> None:
    """The agent's next forward says that its A changed, where, and what to do; and changes nothing."""
    model.set_adapter(name)
    before = snapshot(cache)
    with pytest.raises(AdapterChangedError) as caught:
        run(model, cache, ids)
    for part in (f"adapter {name!r}", "layers.0.self_attn.v_proj", "reset()", "another name"):
        assert part in str(caught.value)
    assert_same_state(snapshot(cache), before)


@pytest.mark.parametrize("one_token", [False, True], ids=["prefill", "one token"])
@pytest.mark.parametrize("scheme", SPLITTING)
def test_a_hotswapped_adapter_is_noticed_and_may_be_swapped_back(scheme: str, one_token: bool, tmp_path: Path) -> None:
    model, cache = started(scheme)
    act = {"act": {"r": 5}}
    model.set_adapter("act")
    model.save_pretrained(tmp_path / "old", selected_adapters=["act"])
    peft_model(config(num_hidden_layers=2), act, seed=5).save_pretrained(tmp_path / "new")
    undisturbed = copy.deepcopy(cache)
    want = run(model, undisturbed, IDS)
    hotswap_adapter(model, str(tmp_path / "new" / "act"), adapter_name="act")
    changed(model, cache, "act", IDS[:, : cache.get_seq_length() + 1] if one_token else IDS)
    hotswap_adapter(model, str(tmp_path / "old" / "act"), adapter_name="act")
    assert torch.equal(run(model, cache, IDS), want)
    hotswap_adapter(model, str(tmp_path / "new" / "act"), adapter_name="act")
    cache.reset()
    if scheme != "base_lr_shared":
        assert_alone(model, cache, IDS)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_deleted_adapter_leaves_the_others_as_they_were(scheme: str) -> None:
    model, cache = started(scheme)
    undisturbed = copy.deepcopy(cache)
    want = [run(model, undisturbed, IDS[:, :stop]) for stop in (25, 26)]
    model.delete_adapter("act")
    assert all(
        torch.equal(run(model, cache, IDS[:, :stop]), logits) for stop, logits in zip((25, 26), want, strict=True)
    )
    assert "act" in repr(cache)
    assert cache.memory_report().in_use_bytes
    model.set_adapter("reflect")
    assert run(model, cache, IDS).isfinite().all()
    cache.reset()
    assert_alone(model, cache, IDS)


@pytest.mark.parametrize("active", [False, True], ids=["waiting", "active"])
@pytest.mark.parametrize("scheme", SPLITTING)
def test_an_adapter_deleted_and_loaded_again_is_compared_with_what_is_cached(scheme: str, active: bool) -> None:
    model, cache = started(scheme)
    model.set_adapter("act")
    old, lora = copy.deepcopy(model.state_dict()), model.peft_config["act"]
    want = run(model, copy.deepcopy(cache), IDS)
    if not active:
        model.set_adapter("plan")
    model.delete_adapter("act")
    model.add_adapter("act", lora)
    randomise(model, seed=9, only="act")
    model.eval()
    changed(model, cache, "act")
    model.load_state_dict(old)
    assert torch.equal(run(model, cache, IDS), want)


@pytest.mark.filterwarnings("ignore:Could not find a config file")
@pytest.mark.parametrize("scheme", SPLITTING)
def test_a_renamed_adapter_finds_its_lr_again_where_lr_is_shared(scheme: str, tmp_path: Path) -> None:
    """An adapter is renamed by loading it under the other name and deleting it under the first."""
    model, cache = started(scheme)
    model.set_adapter("act")
    want = run(model, copy.deepcopy(cache), IDS)
    model.save_pretrained(tmp_path, selected_adapters=["act"])
    model.load_adapter(str(tmp_path / "act"), adapter_name="actor")
    model.eval().set_adapter("actor")
    model.delete_adapter("act")
    assert cache.get_seq_length() == (0 if scheme == "base_shared" else 22)
    got = run(model, cache, IDS)[:, -want.shape[1] :]
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)
    assert list(cache.agents) == ["plan", "act", "actor"]


# --- dtypes and devices -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SPLITTING)
@pytest.mark.parametrize("of_adapters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_base", [torch.float32, torch.bfloat16])
def test_the_lr_cache_has_the_dtype_of_the_base(scheme: str, of_base: torch.dtype, of_adapters: torch.dtype) -> None:
    model = peft_model(config(num_hidden_layers=2), shared=True)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(of_adapters if "lora_" in name else of_base)
    cache = LoRASharedCache(model, scheme)
    ids = IDS[:, :20]
    got, want = run(model, cache, ids), model(ids).logits
    coarse = torch.finfo(torch.bfloat16 if torch.bfloat16 in (of_base, of_adapters) else torch.float32).eps
    assert (got - want).abs().max() <= 16 * coarse * want.abs().max()
    assert {buffer.data.dtype for layer in cache.layers for buffer in layer.lr.values()} == {of_base}
    assert v_proj(model).lora_A["plan"].weight.dtype == of_adapters


@pytest.mark.parametrize("scheme", SPLITTING)
def test_an_adapter_that_is_not_in_memory_is_refused(scheme: str) -> None:
    model = peft_model(config(num_hidden_layers=2), shared=True)
    cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :10])
    before = snapshot(cache)
    old = copy.deepcopy(v_proj(model).lora_A["plan"])
    v_proj(model).lora_A["plan"].to("meta")
    for by in (lambda: run(model, cache, IDS), lambda: LoRASharedCache(model, scheme)):
        with pytest.raises(UnsupportedAdapterError, match=r"layers\.1\.self_attn\.v_proj.*'plan'.*device meta.*load"):
            by()
    assert_same_state(snapshot(cache), before)
    v_proj(model).lora_A["plan"] = old
    detach(model)
    assert_alone(model, LoRASharedCache(model, scheme), IDS)
