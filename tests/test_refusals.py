"""What cannot be served exactly is refused: by name, before anything is written, with a way out that works."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, TaskType, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from tiny import (
    SCHEMES,
    SPLITTING,
    VOCAB,
    assert_alone,
    assert_close,
    assert_same_state,
    base_model,
    config,
    decoder_of,
    peft_model,
    randomise,
    run,
    snapshot,
    tokens,
    write,
)
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    GPT2Config,
    OlmoConfig,
    Phi3Config,
    T5Config,
    T5ForConditionalGeneration,
)

from lragent_hf import CACHE_ARG, LoRASharedCache, attach, detach, errors
from lragent_hf.errors import (
    AdapterChangedError,
    CacheModelMismatchError,
    LRAgentError,
    OutsideForwardError,
    SharedAMismatchError,
    TrajectoryMismatchError,
    UnsupportedAdapterError,
    UnsupportedModelError,
)

IDS = tokens(40)
STACKED = ("base_shared", "base_lr_stacked")
WHOLE = ("non_shared", "full_shared")


@pytest.fixture(scope="module")
def shared_a() -> PeftModel:
    return peft_model(shared=True)


@pytest.fixture
def model(shared_a: PeftModel) -> Iterator[PeftModel]:
    """Agents with one A, so that every scheme takes them. Left as it is found."""
    shared_a.set_adapter("plan")
    yield shared_a
    shared_a.eval()
    detach(shared_a)


def refused(cache: LoRASharedCache, error: type[Exception], *parts: str, by: Callable[[], Any]) -> Exception:
    """``by()`` raises exactly ``error``, whose message has all ``parts``, and the cache is what it was."""
    before = snapshot(cache)
    with pytest.raises(error) as caught:
        by()
    assert type(caught.value) is error
    for part in parts:
        assert part in str(caught.value)
    assert_same_state(snapshot(cache), before)
    return caught.value


def not_made(model: nn.Module, scheme: str, error: type[Exception], *parts: str, **options: Any) -> None:
    """No cache of that scheme can be made."""
    with pytest.raises(error) as caught:
        LoRASharedCache(model, scheme, **options)
    assert type(caught.value) is error
    for part in parts:
        assert part in str(caught.value)


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"scheme": "shared"}, "'base_lr_stacked'"),
        ({"attention": "flash"}, "'auto' or 'keep'"),
        ({"backend": "cuda"}, "cuda"),
        ({"handover_window": -1}, "-1"),
        ({"scheme": "base_shared", "handover_window": 4}, "Leave it 0"),
        ({"scheme": "non_shared", "handover_window": 4}, "Leave it 0"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_wrong_options_are_refused_at_once(model: PeftModel, options: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError) as caught:
        LoRASharedCache(model, **options)
    assert part in str(caught.value)


def test_agents_that_are_not_loaded_are_refused(model: PeftModel) -> None:
    not_made(model, "base_lr_stacked", UnsupportedAdapterError, "'critic'", "plan", agents=["plan", "critic"])
    assert_alone(model, LoRASharedCache(model, agents=["plan", "act"]), IDS)


def test_an_option_out_of_range_leaves_the_model_unattached() -> None:
    model = peft_model()
    with pytest.raises(ValueError):
        LoRASharedCache(model, handover_window=-1)
    assert not any(vars(module).get("_forward_pre_hooks") for module in model.modules())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_positive_crop_is_refused(model: PeftModel, scheme: str) -> None:
    cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :10])
    refused(cache, ValueError, "negative", by=lambda: cache.crop(4))
    cache.crop(-4)
    assert cache.get_seq_length() == 6


# --- adapters that cannot be split ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SPLITTING)
def test_merged_adapters_are_refused_at_creation(scheme: str) -> None:
    model = peft_model(shared=True)
    model.merge_adapter()
    not_made(model, scheme, UnsupportedAdapterError, "layers.0.self_attn.v_proj", "plan", "merged", "unmerge_adapter()")
    for whole in WHOLE:
        assert_alone(model, LoRASharedCache(model, whole), IDS)
    model.unmerge_adapter()
    assert_alone(model, LoRASharedCache(model, scheme), IDS)


@pytest.mark.parametrize("scheme", SPLITTING)
@pytest.mark.parametrize("stop", [11, 20], ids=["decode", "prefill"])
def test_adapters_merged_between_forwards_are_refused(scheme: str, stop: int) -> None:
    model = peft_model(shared=True)
    cache, undisturbed = LoRASharedCache(model, scheme), LoRASharedCache(model, scheme)
    for each in (cache, undisturbed):
        run(model, each, IDS[:, :10])
    model.merge_adapter()
    refused(cache, UnsupportedAdapterError, "layers.0.self_attn.v_proj", by=lambda: run(model, cache, IDS[:, :stop]))
    model.unmerge_adapter()
    assert_close(run(model, cache, IDS[:, :stop]), run(model, undisturbed, IDS[:, :stop]))


@pytest.mark.parametrize("scheme", SPLITTING)
def test_trainable_copies_of_v_proj_are_refused(scheme: str) -> None:
    model = peft_model(adapters={"plan": {"target_modules": ["q_proj"], "modules_to_save": ["v_proj"]}})
    for module in model.modules():
        if isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict):
            for copied in module.modules_to_save.values():
                nn.init.normal_(copied.weight, std=0.2)
    not_made(model, scheme, UnsupportedAdapterError, "layers.0.self_attn.v_proj", "modules_to_save", "full_shared")
    for whole in WHOLE:
        assert_alone(model, LoRASharedCache(model, whole), IDS)


@pytest.mark.parametrize("scheme", SPLITTING)
def test_ia3_is_refused_before_the_first_token(scheme: str) -> None:
    model = get_peft_model(base_model(config()), IA3Config(target_modules=["v_proj"], feedforward_modules=[])).eval()
    for name, parameter in model.named_parameters():
        if "ia3" in name:
            nn.init.normal_(parameter, mean=1.0, std=0.5)

    def first_token() -> None:
        run(model, LoRASharedCache(model, scheme), IDS[:, :10])

    with pytest.raises(UnsupportedAdapterError, match=r"layers\.0\.self_attn\.v_proj.*LoRA.*full_shared"):
        first_token()
    for whole in WHOLE:
        assert_alone(model, LoRASharedCache(model, whole), IDS)


@pytest.mark.parametrize("scheme", SPLITTING)
def test_active_dropout_is_refused(scheme: str) -> None:
    model = peft_model(shared=True, lora_dropout=0.5)
    cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :10])
    model.train()
    refused(cache, UnsupportedAdapterError, "dropout", "'plan'", "model.eval()", by=lambda: run(model, cache, IDS))
    model.eval()
    assert_close(run(model, cache, IDS), model(IDS).logits[:, 10:])


# --- one A for all ----------------------------------------------------------------------------------------------------


def test_unequal_a_is_refused_at_creation_under_base_lr_shared() -> None:
    model = peft_model()
    not_made(
        model, "base_lr_shared", SharedAMismatchError, "'plan'", "'act'", "layers.0.self_attn.v_proj", "base_lr_stacked"
    )
    assert_alone(model, LoRASharedCache(model, "base_lr_stacked"), IDS)
    assert_alone(model, LoRASharedCache(model, "base_lr_shared", agents=["plan"]), IDS)


def test_a_that_differs_in_the_last_layer_only_is_refused(shared_a: PeftModel) -> None:
    model = copy.deepcopy(shared_a)
    decoder_of(model).layers[2].self_attn.v_proj.lora_A["reflect"].weight.data[0, 0] += 1e-3
    not_made(model, "base_lr_shared", SharedAMismatchError, "'reflect'", "layers.2.self_attn.v_proj")


def test_unequal_a_is_refused_when_it_joins_later() -> None:
    model = peft_model()
    cache = LoRASharedCache(model, "base_lr_shared", agents=["plan"])
    run(model, cache, IDS[:, :10])
    model.set_adapter("act")
    refused(cache, SharedAMismatchError, "'plan'", "'act'", "base_lr_stacked", by=lambda: write(model, IDS, 2, cache))
    refused(cache, SharedAMismatchError, "'act'", by=lambda: run(model, cache, IDS))
    model.set_adapter("plan")
    assert_close(run(model, cache, IDS), model(IDS).logits[:, 10:])


# --- adapters that change ---------------------------------------------------------------------------------------------


def a_of(model: nn.Module, name: str, index: int = 1) -> nn.Parameter:
    return decoder_of(model).layers[index].self_attn.v_proj.lora_A[name].weight


def edit_in_place(model: PeftModel, name: str, folder: Path) -> None:
    with torch.no_grad():
        a_of(model, name).mul_(1.01)


def edit_data(model: PeftModel, name: str, folder: Path) -> None:
    a_of(model, name).data[1, 2] += 0.5


def edit_replace(model: PeftModel, name: str, folder: Path) -> None:
    a_of(model, name, 2).data = a_of(model, name, 2).data + 0.1


def edit_parameter(model: PeftModel, name: str, folder: Path) -> None:
    layer = decoder_of(model).layers[0].self_attn.v_proj.lora_A[name]
    layer.weight = nn.Parameter(layer.weight.data.flip(0))


def edit_hotswap(model: PeftModel, name: str, folder: Path) -> None:
    other = peft_model(seed=5, adapters={name: {"r": a_of(model, name).shape[0]}})
    other.save_pretrained(folder)
    hotswap_adapter(model, str(folder / name), adapter_name=name)


EDITS = [edit_in_place, edit_data, edit_replace, edit_parameter, edit_hotswap]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("scheme", SPLITTING)
@pytest.mark.parametrize("moment", ["hand-over", "one token hand-over", "same agent"])
def test_a_changed_after_caching_is_refused(scheme: str, moment: str, edit: Any, tmp_path: Path) -> None:
    model = peft_model(shared=scheme == "base_lr_shared")
    cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :10])
    name, stop = "plan", 20
    if moment != "same agent":
        model.set_adapter("act")
        run(model, cache, IDS[:, :12])
        name = "reflect" if moment == "hand-over" else "plan"
        model.set_adapter("plan")
        if moment == "one token hand-over":
            run(model, cache, IDS[:, :13])
            model.set_adapter("act")
            run(model, cache, IDS[:, :14])
            model.set_adapter("plan")
            stop = cache.get_seq_length() + 1
    model.set_adapter(name)
    cached, ids = name in cache.agents or scheme != "base_shared", IDS[:, :stop]
    old = copy.deepcopy(model.state_dict())
    edit(model, name, tmp_path)
    if cached:
        parts = (f"'{name}'", "self_attn.v_proj", "reset()", "another name")
        refused(cache, AdapterChangedError, *parts, by=lambda: run(model, cache, ids))
        refused(cache, AdapterChangedError, *parts, by=lambda: write(model, ids, 1, cache))

    reset = copy.deepcopy(cache)  # way out: run it all again
    reset.reset()
    if scheme != "base_lr_shared":  # there, one adapter is no longer like the others
        assert_close(run(model, reset, ids), model(ids).logits)
    model.load_state_dict(old)  # way out: the old weights
    assert run(model, cache, ids).isfinite().all()


def test_a_of_an_agent_that_waits_may_change_until_it_takes_over() -> None:
    model = peft_model()
    cache = LoRASharedCache(model)
    run(model, cache, IDS[:, :10])
    old = a_of(model, "act").data.clone()
    edit_data(model, "act", Path())
    run(model, cache, IDS[:, :20])
    model.set_adapter("act")
    refused(cache, AdapterChangedError, "'act'", by=lambda: run(model, cache, IDS[:, :21]))
    a_of(model, "act").data.copy_(old)
    run(model, cache, IDS[:, :21])


def test_a_changed_adapter_joins_under_another_name(tmp_path: Path) -> None:
    model = peft_model()
    cache = LoRASharedCache(model)
    run(model, cache, IDS[:, :10])
    peft_model(seed=5, adapters={"plan": {}}).save_pretrained(tmp_path)
    model.load_adapter(str(tmp_path / "plan"), adapter_name="plan2")
    model.eval().set_adapter("plan2")
    run(model, cache, IDS)
    assert cache.agents == {"plan": 40, "plan2": 40}  # plan's LR is written along, plan2's from its own LR prefill


def test_an_edited_b_or_scale_counts_from_the_next_token() -> None:
    model = peft_model()
    cache, stock = LoRASharedCache(model, "base_lr_stacked"), LoRASharedCache(model, "base_shared")
    for each in (cache, stock):
        run(model, each, IDS[:, :10])
    for layer in decoder_of(model).layers:
        layer.self_attn.v_proj.lora_B["plan"].weight.data.mul_(0.5)
        layer.self_attn.v_proj.scaling["plan"] *= 3.0
    assert_close(run(model, cache, IDS), run(model, stock, IDS))


@pytest.mark.parametrize("old", ["q_proj only", "v_proj of one layer"])
@pytest.mark.parametrize("scheme", STACKED)
def test_an_adapter_that_got_lora_on_v_proj_is_not_taken_for_the_old_one(scheme: str, old: str) -> None:
    """An adapter replaced under its name runs as a new one would, or is refused: never as if it had no v_proj LoRA."""
    first = {"target_modules": ["q_proj"]} if old == "q_proj only" else {"layers_to_transform": [2]}
    models = [peft_model(adapters={"plan": {}, "act": first}) for _ in range(2)]
    caches = [LoRASharedCache(model, scheme) for model in models]
    for model, cache, name in zip(models, caches, ("act", "new"), strict=True):
        run(model, cache, IDS[:, :10])
        model.set_adapter("act")
        run(model, cache, IDS[:, :20])
        model.set_adapter("plan")
        if name == "act":
            model.delete_adapter("act")
        model.add_adapter(name, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        randomise(model, seed=3, only=name)
        model.eval().set_adapter(name)
    want = run(models[1], caches[1], IDS)[:, -20:]
    try:
        got = run(models[0], caches[0], IDS)[:, -20:]
    except AdapterChangedError:
        return
    assert_close(got, want)


# --- whose forward it is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_cache_of_another_model_is_refused(model: PeftModel, scheme: str) -> None:
    other = peft_model(shared=True, seed=3)
    cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :10])
    refused(cache, OutsideForwardError, "model", by=lambda: run(other, cache, IDS))  # not attached
    attach(other)
    refused(cache, CacheModelMismatchError, "another model", by=lambda: run(other, cache, IDS))
    refused(cache, CacheModelMismatchError, "another model", by=lambda: write(other, IDS, 2, cache))
    assert_alone(other, LoRASharedCache(other, scheme), IDS)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_update_outside_a_forward_is_refused(model: PeftModel, scheme: str) -> None:
    cache, other = LoRASharedCache(model, scheme), LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :10])
    state = torch.zeros(1, 2, 1, 8)
    for call in (lambda: cache.update(state, state, 0), lambda: cache.layers[0].update(state, state)):
        refused(cache, OutsideForwardError, "outside a forward", by=call)

    def misuse(*_: Any) -> None:
        cache.update(state, state, 0)

    handle = decoder_of(model).layers[0].register_forward_pre_hook(misuse)  # while another cache's forward runs
    try:
        refused(cache, OutsideForwardError, "outside a forward", by=lambda: run(model, other, IDS[:, :4]))
    finally:
        handle.remove()
    assert other.get_seq_length() == 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_cache_is_refused_after_detach(model: PeftModel, scheme: str) -> None:
    cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :10])
    detach(model)
    refused(cache, OutsideForwardError, "attach(model)", by=lambda: run(model, cache, IDS))
    refused(cache, OutsideForwardError, "attach(model)", by=lambda: write(model, IDS, 1, cache))
    attach(model)
    assert_close(run(model, cache, IDS), model(IDS).logits[:, 10:])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_training_forward_is_refused(model: PeftModel, scheme: str) -> None:
    cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :10])
    model.train()
    refused(
        cache, CacheModelMismatchError, "training mode", "model.eval()", "torch.no_grad()",
        by=lambda: model(input_ids=IDS[:, 10:], **{CACHE_ARG: cache}),
    )  # fmt: skip
    expected = model.eval()(IDS).logits[:, 10:]
    model.train()
    assert_close(run(model, cache, IDS), expected)  # no_grad, no dropout


@pytest.mark.parametrize("scheme", SCHEMES)
def test_another_batch_size_is_refused(model: PeftModel, scheme: str) -> None:
    cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :10])
    rows = torch.cat([IDS[:, :10].expand(3, -1), tokens(6, rows=3, seed=2)], 1)
    cache.batch_repeat_interleave(3)
    refused(
        cache, CacheModelMismatchError, "3 row(s)", "brings 6", "batch_repeat_interleave",
        by=lambda: write(model, rows, 1, cache, num_return_sequences=2, do_sample=True),
    )  # fmt: skip
    assert_close(run(model, cache, rows), model(rows).logits[:, 10:])
    refused(
        cache,
        CacheModelMismatchError,
        "batch_select_indices",
        by=lambda: run(model, cache, torch.cat([rows, rows[:, :2]], 1)[:2]),
    )
    cache.batch_select_indices(torch.tensor([2]))
    more = torch.cat([rows[2:], tokens(3)], 1)
    assert_close(run(model, cache, more), model(more).logits[:, 16:])


# --- what does not continue the trajectory ----------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["base_shared"])
def test_other_tokens_than_those_cached_are_refused(model: PeftModel, scheme: str) -> None:
    cache, rows = LoRASharedCache(model, scheme), tokens(20, rows=2)
    run(model, cache, rows[:, :15])
    model.set_adapter("act")
    wrong = rows.clone()
    wrong[1, 7] = (wrong[1, 7] % (VOCAB - 1)) + 1
    error = refused(cache, TrajectoryMismatchError, "Token 7 of row 1", "align", by=lambda: run(model, cache, wrong))
    assert (error.position, error.row) == (7, 1)
    refused(cache, TrajectoryMismatchError, by=lambda: run(model, cache, rows[:, torch.randperm(20)]))
    refused(cache, TrajectoryMismatchError, by=lambda: run(model, cache, rows.flip(0)))
    assert cache.align(wrong) == 7
    run(model, cache, wrong)


@pytest.mark.parametrize("scheme", ["full_shared", "base_lr_shared", "base_lr_stacked"])
def test_other_tokens_in_the_window_are_refused(model: PeftModel, scheme: str) -> None:
    cache = LoRASharedCache(model, scheme, handover_window=5)
    run(model, cache, IDS[:, :15])
    model.set_adapter("act")
    wrong = IDS.clone()
    wrong[0, 12] = (wrong[0, 12] % (VOCAB - 1)) + 1
    error = refused(cache, TrajectoryMismatchError, "Token 12 of row 0", by=lambda: run(model, cache, wrong))
    assert (error.position, error.row) == (12, 0)
    refused(  # only what is new, although the window is asked for
        cache,
        TrajectoryMismatchError,
        by=lambda: write(model, IDS[:, 15:], 1, cache, attention_mask=torch.ones_like(IDS)),
    )
    run(model, cache, IDS)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shift", [-1, 1, 10], ids=["before", "after", "far"])
def test_wrong_position_ids_are_refused(model: PeftModel, scheme: str, shift: int) -> None:
    cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :10])
    right = torch.arange(10, 20)[None]
    wrong = right + shift
    error = refused(
        cache,
        TrajectoryMismatchError,
        "position_ids",
        "align",
        by=lambda: run(model, cache, IDS[:, :20], position_ids=wrong),
    )
    assert error.position == 10
    wrong = right.clone()
    wrong[0, 4] += shift
    error = refused(
        cache, TrajectoryMismatchError, "position 14", by=lambda: run(model, cache, IDS[:, :20], position_ids=wrong)
    )
    assert error.position == 14

    def without_mask() -> None:
        with torch.no_grad():
            model(input_ids=IDS[:, 10:20], position_ids=wrong, **{CACHE_ARG: cache})

    refused(cache, TrajectoryMismatchError, "position_ids", by=without_mask)
    refused(
        cache, TrajectoryMismatchError, "position_ids covers 9",
        by=lambda: run(model, cache, IDS[:, :20], position_ids=right[:, :9]),
    )  # fmt: skip
    assert_close(run(model, cache, IDS[:, :20], position_ids=right), model(IDS[:, :20]).logits[:, 10:])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [10, 19, 21])
def test_a_mask_of_another_width_is_refused(model: PeftModel, scheme: str, width: int) -> None:
    cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :10])

    def forward() -> None:
        with torch.no_grad():
            model(input_ids=IDS[:, 10:20], attention_mask=torch.ones(1, width), **{CACHE_ARG: cache})

    error = refused(cache, TrajectoryMismatchError, f"attention_mask covers {width}", "expected 20", by=forward)
    assert error.position == min(width, 20)
    run(model, cache, IDS[:, :20])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_attending_to_a_recorded_pad_is_refused(model: PeftModel, scheme: str) -> None:
    cache, rows, mask = LoRASharedCache(model, scheme), tokens(20, rows=2), torch.ones(2, 20, dtype=torch.long)
    mask[1, :3] = 0
    rows = rows.masked_fill(mask == 0, 0)
    run(model, cache, rows[:, :12], mask[:, :12])
    seen = mask.clone()
    seen[1, 2] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, 12:]
    error = refused(
        cache, TrajectoryMismatchError, "Position 2 of row 1", "attends to it",
        by=lambda: run(model, cache, rows, seen, position_ids=positions),
    )  # fmt: skip
    assert (error.position, error.row) == (2, 1)

    def without_mask() -> None:
        with torch.no_grad():
            model(input_ids=rows[:, 12:], **{CACHE_ARG: cache})

    error = refused(cache, TrajectoryMismatchError, "Position 0 of row 1", "is missing", by=without_mask)
    assert error.position == 0
    refused(  # positions that count the padding, after those that did not
        cache, TrajectoryMismatchError, "position_ids",
        by=lambda: run(model, cache, rows, mask, position_ids=torch.arange(12, 20).expand(2, -1)),
    )  # fmt: skip
    got = run(model, cache, rows, mask)
    assert_close(got[1:], model(rows[1:, 3:]).logits[:, 9:])
    assert_close(got[:1], model(rows[:1]).logits[:, 12:])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_whole_prompt_again_is_refused_and_align_is_the_way_out(model: PeftModel, scheme: str) -> None:
    cache = LoRASharedCache(model, scheme)
    done = write(model, IDS[:, :20], 4, cache)
    prompt = done[:, :-1]
    assert cache.get_seq_length() == prompt.shape[1]
    refused(cache, TrajectoryMismatchError, "align(input_ids)", by=lambda: write(model, prompt, 3, cache))
    assert cache.align(prompt) == prompt.shape[1] - 1
    assert torch.equal(write(model, prompt, 3, cache), write(model, prompt, 3))
    refused(cache, TrajectoryMismatchError, "align(input_ids)", by=lambda: write(model, IDS[:, :20], 3, cache))
    assert cache.align(IDS[:, :20]) == 19
    assert torch.equal(write(model, IDS[:, :20], 3, cache), write(model, IDS[:, :20], 3))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_shorter_prompt_is_refused(model: PeftModel, scheme: str) -> None:
    cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :20])
    refused(cache, TrajectoryMismatchError, "align", by=lambda: write(model, IDS[:, :12], 3, cache))
    cache.align(IDS[:, :12])
    assert torch.equal(write(model, IDS[:, :12], 3, cache), write(model, IDS[:, :12], 3))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_prompt_lookup_works_on_an_empty_cache(model: PeftModel, scheme: str) -> None:
    prompt = IDS[:, :6].repeat(1, 3)
    cache = LoRASharedCache(model, scheme)
    got = write(model, prompt, 8, cache, prompt_lookup_num_tokens=3)
    assert torch.equal(got, write(model, prompt, 8))
    more = torch.cat([got, IDS[:, :5]], 1)
    assert torch.equal(write(model, more, 4, cache), write(model, more, 4))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_prompt_lookup_on_a_cache_with_tokens_is_refused(model: PeftModel, scheme: str) -> None:
    prompt = IDS[:, :6].repeat(1, 3)
    cache = LoRASharedCache(model, scheme)
    run(model, cache, prompt[:, :10])
    refused(cache, TrajectoryMismatchError, by=lambda: write(model, prompt, 8, cache, prompt_lookup_num_tokens=3))
    assert torch.equal(write(model, prompt, 8, cache), write(model, prompt, 8))  # without the lookup
    cache.reset()
    assert torch.equal(write(model, prompt, 8, cache, prompt_lookup_num_tokens=3), write(model, prompt, 8))


# --- embeddings -------------------------------------------------------------------------------------------------------


def embedded(model: nn.Module, cache: Any, ids: Tensor, past: int) -> Tensor:
    with torch.no_grad():
        embeds = decoder_of(model).get_input_embeddings()(ids[:, past:])
        return model(inputs_embeds=embeds, attention_mask=torch.ones_like(ids), **{CACHE_ARG: cache}).logits


@pytest.mark.parametrize("scheme", SCHEMES)
def test_embeddings_are_continued_by_their_own_agent_only(model: PeftModel, scheme: str) -> None:
    cache, prompt = LoRASharedCache(model, scheme), IDS[:, :10]
    assert_close(embedded(model, cache, prompt, 0), model(prompt).logits)
    assert_close(run(model, cache, IDS[:, :20]), model(IDS[:, :20]).logits[:, 10:])
    assert_close(embedded(model, cache, IDS[:, :25], 20), model(IDS[:, :25]).logits[:, 20:])
    model.set_adapter("act")
    refused(
        cache,
        TrajectoryMismatchError,
        "inputs_embeds",
        "'plan'",
        "'act'",
        "input_ids",
        by=lambda: run(model, cache, IDS),
    )
    refused(cache, TrajectoryMismatchError, "inputs_embeds", by=lambda: write(model, IDS, 2, cache))
    with model.disable_adapter():
        refused(cache, TrajectoryMismatchError, "base model", by=lambda: run(model, cache, IDS))
    new = LoRASharedCache(model, scheme)  # way out: a new cache
    assert_close(run(model, new, IDS), model(IDS).logits)
    model.set_adapter("plan")
    assert_close(run(model, cache, IDS), model(IDS).logits[:, 25:])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_embeddings_in_the_place_of_cached_tokens_are_refused(model: PeftModel, scheme: str) -> None:
    if scheme in ("full_shared", "base_lr_shared", "base_lr_stacked"):
        cache = LoRASharedCache(model, scheme, handover_window=100)
    else:
        cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :10])
    model.set_adapter("act")
    assert cache.get_seq_length() == 0
    refused(cache, TrajectoryMismatchError, "inputs_embeds", "input_ids", by=lambda: embedded(model, cache, IDS, 0))
    run(model, cache, IDS)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_embeddings_that_are_cut_off_bind_nobody(model: PeftModel, scheme: str) -> None:
    cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :10])
    embedded(model, cache, IDS[:, :20], 10)
    cache.crop(-10)
    model.set_adapter("act")
    run(model, cache, IDS)


def test_a_forward_without_inputs_is_refused(model: PeftModel) -> None:
    cache = LoRASharedCache(model)
    with pytest.raises(ValueError):
        model(**{CACHE_ARG: cache})
    assert cache.get_seq_length() == 0


# --- models -----------------------------------------------------------------------------------------------------------

_TINY = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
_DECODER = {
    **_TINY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "initializer_range": 0.15,
}  # fmt: skip


@pytest.mark.parametrize("scheme", SPLITTING)
@pytest.mark.parametrize("kind", ["gpt2", "phi3"])
def test_fused_qkv_is_refused(kind: str, scheme: str) -> None:
    if kind == "gpt2":
        cfg: Any = GPT2Config(**_TINY, n_embd=48, n_layer=2, n_head=6, initializer_range=0.15)
        model = peft_model(cfg, {"plan": {}, "act": {}}, target_modules=["c_attn"], fan_in_fan_out=True)
    else:
        model = peft_model(Phi3Config(**_DECODER), {"plan": {}, "act": {}}, target_modules=["qkv_proj"])
    not_made(model, scheme, UnsupportedModelError, "fused qkv", "v_proj", "full_shared", "non_shared")
    for whole in WHOLE:
        cache = LoRASharedCache(model, whole)
        assert_alone(model, cache, IDS)
        model.set_adapter("act")
        run(model, cache, IDS[:, :20])
        assert cache.agents == {"plan": 20 if whole == "full_shared" else 11, "act": 20}
        model.set_adapter("plan")


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("count", [1, 10], ids=["one token", "prompt"])
@pytest.mark.parametrize("scheme", SPLITTING)
def test_clipped_values_are_refused(scheme: str, count: int, inference: bool) -> None:
    model = peft_model(OlmoConfig(**_DECODER, clip_qkv=0.05), shared=True)
    cache = LoRASharedCache(model, scheme)
    with torch.inference_mode(inference):
        refused(
            cache, UnsupportedModelError, "layers.0.self_attn", "v_proj", "full_shared", "non_shared",
            by=lambda: run(model, cache, IDS[:, :count]),
        )  # fmt: skip
        for whole in WHOLE:
            assert_alone(model, LoRASharedCache(model, whole), IDS)


@pytest.mark.parametrize("scheme", SPLITTING)
def test_normed_values_are_refused(scheme: str) -> None:
    cfg = Gemma3nTextConfig(
        **{**_DECODER, "num_hidden_layers": 2}, head_dim=8, layer_types=["full_attention"] * 2, laurel_rank=4,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB, num_kv_shared_layers=0, altup_num_inputs=2,
        activation_sparsity_pattern=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = get_peft_model(
        Gemma3nForCausalLM(cfg), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), adapter_name="plan"
    ).eval()
    randomise(model)
    cache = LoRASharedCache(model, scheme)
    refused(
        cache, UnsupportedModelError, "layers.0.self_attn", "norm", "full_shared", "non_shared",
        by=lambda: run(model, cache, IDS[:, :10]),
    )  # fmt: skip
    for whole in WHOLE:
        assert_alone(model, LoRASharedCache(model, whole), IDS)


def test_values_scaled_out_of_place_after_v_proj_are_refused() -> None:
    model = peft_model()
    cache = LoRASharedCache(model)

    def scale(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 1.5

    for layer in decoder_of(model).layers:
        layer.self_attn.v_proj.register_forward_hook(scale)
    refused(cache, UnsupportedModelError, "layers.0.self_attn", by=lambda: run(model, cache, IDS[:, :10]))
    assert_alone(model, LoRASharedCache(model, "full_shared"), IDS)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_encoder_decoder_is_refused(scheme: str) -> None:
    cfg = T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    model = get_peft_model(T5ForConditionalGeneration(cfg), LoraConfig(target_modules=["q", "v"]))
    not_made(model, scheme, UnsupportedModelError, "T5ForConditionalGeneration", "encoder-decoder")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_prompt_tuning_is_refused(scheme: str) -> None:
    base = base_model(config())
    model = get_peft_model(base, PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4))
    not_made(model, scheme, UnsupportedAdapterError, "'default'", "prompt learning", "LoRA")
    assert_alone(base, LoRASharedCache(base, scheme), IDS)


def test_what_is_no_model_is_refused() -> None:
    not_made(nn.Linear(2, 2), "base_lr_stacked", UnsupportedModelError, "Linear")


@pytest.mark.parametrize("scheme", SPLITTING)
def test_layers_that_disagree_on_who_is_active_are_refused(scheme: str) -> None:
    model = peft_model(shared=True)
    cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :10])
    decoder_of(model).layers[1].self_attn.v_proj.set_adapter("act")
    refused(
        cache, UnsupportedAdapterError, "layers.1.self_attn.v_proj", "set_adapter()", by=lambda: run(model, cache, IDS)
    )
    model.set_adapter("act")
    run(model, cache, IDS)


def test_every_refusal_is_one_of_the_library() -> None:
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), LRAgentError)


def test_sequences_of_one_agent_are_not_refused(model: PeftModel) -> None:
    """The checks let through what stock does: chunks, single tokens, a bool mask, a float mask, no mask."""
    cache, stock = LoRASharedCache(model), DynamicCache()
    with torch.no_grad():
        for start, stop, kind in ((0, 6, None), (6, 7, torch.bool), (7, 12, torch.float32), (12, 13, torch.int64)):
            mask = None if kind is None else torch.ones(1, stop, dtype=kind)
            got, want = (
                model(input_ids=IDS[:, start:stop], attention_mask=mask, **{CACHE_ARG: each}).logits
                for each in (cache, stock)
            )
            assert_close(got, want)


def test_a_prompt_shorter_than_what_is_cached_is_told_the_way_out(shared_a: PeftModel) -> None:
    """`generate` leaves nothing of such a prompt, and the model is run on no tokens."""
    cache = LoRASharedCache(shared_a)
    run(shared_a, cache, IDS)
    before = snapshot(cache)
    prompt = IDS[:, :10]
    arguments: dict[str, Any] = {CACHE_ARG: cache, "attention_mask": torch.ones_like(prompt), "max_new_tokens": 2}
    with pytest.raises(TrajectoryMismatchError, match=r"40 position.* are cached .* cache\.align"):
        shared_a.generate(prompt, **arguments)
    assert_same_state(before, snapshot(cache))
    assert cache.align(prompt) == 9
    assert torch.equal(shared_a.generate(prompt, **arguments), shared_a.generate(prompt, max_new_tokens=2))
