"""`share_lora_A`: one A for several adapters, tied or copied and frozen; trained, saved, and run with one cache."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from one_a import (
    IDS,
    KINDS,
    SMALL,
    assert_as_made,
    assert_frozen,
    assert_tied,
    flags,
    layers,
    loss,
    moved,
    three_adapters,
    train,
    values,
    weights,
)
from oracle import NaiveRun, assert_turns, exact_twin
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny import AGENTS, assert_alone, assert_same_state, base_model, config, run, snapshot, tokens

from lragent_hf import LoRASharedCache, share_lora_A
from lragent_hf.errors import AdapterChangedError, SharedAMismatchError


@pytest.fixture
def model() -> PeftModel:
    return three_adapters()


# --- tied -------------------------------------------------------------------------------------------------------------


def test_tied_adapters_hold_the_first_ones_parameter(model: PeftModel) -> None:
    first, theirs = weights(model, "plan"), values(model, "plan")
    queries = values(model, "act", part="q_proj")
    where = share_lora_A(model, AGENTS)
    assert [model.get_submodule(name) for name in where] == layers(model)
    for name in AGENTS:
        assert all(one is other for one, other in zip(weights(model, name), first, strict=True))
        assert values(model, name) == theirs
    assert values(model, "act", part="q_proj") == queries
    assert_tied(model)


@pytest.mark.parametrize("before", AGENTS)
@pytest.mark.parametrize("now", AGENTS)
def test_whoever_is_active_trains_the_tied_a(model: PeftModel, before: str, now: str) -> None:
    share_lora_A(model, AGENTS)
    model.set_adapter(before)
    model.set_adapter(now)
    loss(model).backward()
    for weight in weights(model, "plan"):
        assert weight.grad is not None
        assert weight.grad.abs().max() > 0
    for name in AGENTS:
        assert all((weight.grad is not None) == (name == now) for weight in weights(model, name, "lora_B"))
        assert all(weight.requires_grad == (name == now) for weight in weights(model, name, "lora_B"))


def test_the_gradient_of_a_tied_a_is_the_sum_of_theirs(model: PeftModel) -> None:
    twin = copy.deepcopy(model)
    share_lora_A(model, AGENTS)
    for name in AGENTS:
        for a, own in zip(weights(twin, "plan"), weights(twin, name), strict=True):
            own.data.copy_(a.data)  # equal, and a Parameter of its own
        for one in (model, twin):
            one.set_adapter(name)
            loss(one).backward()
    for index, weight in enumerate(weights(model, "plan")):
        apart = [weights(twin, name)[index].grad for name in AGENTS]
        torch.testing.assert_close(weight.grad, sum(apart))


def test_the_tied_a_is_frozen_while_no_adapter_that_has_it_trains(model: PeftModel) -> None:
    share_lora_A(model, ["plan", "act"])
    for name in ("plan", "act"):
        model.set_adapter(name)
        assert flags(model, "plan") == {True}
        model.set_adapter("reflect")
        assert flags(model, "plan") == {False}
        model.set_adapter(name)
        with model.disable_adapter():
            assert flags(model, "plan") == {False}
        assert flags(model, "plan") == {True}
        model.set_adapter(name, inference_mode=True)
        assert flags(model, "plan") == {False}
    model.base_model.set_adapter(["act", "reflect"])
    assert flags(model, "plan") == {True}
    model.set_requires_grad("act", requires_grad=False)
    assert flags(model, "plan") == {False}
    model.set_requires_grad(["plan", "act"])
    model.set_requires_grad("plan", requires_grad=False)
    assert flags(model, "plan") == {True}
    model.set_requires_grad("act", requires_grad=False)
    assert flags(model, "plan") == {False}


@pytest.mark.parametrize("name", ["plan", "act"])
def test_a_flag_on_the_parameter_itself_is_for_all_until_the_next_set_adapter(model: PeftModel, name: str) -> None:
    share_lora_A(model, ["plan", "act"])
    model.set_adapter(name)
    model.requires_grad_(False)
    assert not any(weight.requires_grad for layer in layers(model) for weight in layer.lora_A["act"].parameters())
    assert flags(model, "plan") == {False}
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    model.set_requires_grad("plan", requires_grad=False)
    assert flags(model, "plan") == {True}  # act still wants it
    model.set_adapter("reflect")
    assert flags(model, "plan") == {False}
    model.set_adapter(name)
    assert flags(model, "plan") == {True}


@pytest.mark.parametrize("name", ["plan", "act"])
def test_looking_at_tied_parameters_changes_nothing(model: PeftModel, name: str) -> None:
    share_lora_A(model, ["plan", "act"])
    model.set_adapter(name)
    for layer in layers(model):
        for holder in (layer.lora_A["plan"], layer.lora_A["act"]):
            assert next(holder.parameters()) is holder.weight
            assert list(holder.parameters()) == [holder.weight]
            assert [name for name, _ in holder.named_parameters()] == ["weight"]
    model.get_layer_status()
    assert model.get_model_status().requires_grad == {"plan": name == "plan", "act": name == "act", "reflect": False}
    assert flags(model, "plan") == {True}


def test_rows_with_adapters_of_their_own_train_the_tied_a(model: PeftModel) -> None:
    share_lora_A(model, ["plan", "act"])
    model.base_model.set_adapter(["plan", "act"])
    rows = tokens(12, rows=2)
    loss(model, rows, adapter_names=["plan", "act"]).backward()
    both = [weight.grad for weight in weights(model, "plan")]
    assert all(grad is not None for grad in both)
    model.zero_grad()
    for row, name in enumerate(("plan", "act")):
        model.set_adapter(name)
        (loss(model, rows[row : row + 1]) / 2).backward()
    for weight, grad in zip(weights(model, "plan"), both, strict=True):
        torch.testing.assert_close(weight.grad, grad)


# --- copied and frozen ------------------------------------------------------------------------------------------------


def test_a_copied_a_stays_bit_for_bit_while_b_trains(model: PeftModel) -> None:
    source, theirs = weights(model, "plan"), values(model, "plan")
    where = share_lora_A(model, ["act", "reflect"], source="plan")
    assert [model.get_submodule(name) for name in where] == layers(model)
    assert_frozen(model)
    train(model, ["act", "reflect"], steps=4)
    assert all(values(model, name) == theirs for name in AGENTS)
    assert all(one is other for one, other in zip(weights(model, "plan"), source, strict=True))
    train(model, ["plan"])  # the source is as it was
    assert moved(values(model, "plan"), theirs)
    assert values(model, "act") == theirs


UNFREEZE: dict[str, Callable[[PeftModel], Any]] = {
    "set_adapter": lambda model: model.set_adapter("act"),
    "inference_mode=False": lambda model: model.set_adapter("act", inference_mode=False),
    "set_requires_grad": lambda model: model.set_requires_grad(["act"]),
    "enable_adapter_layers": lambda model: model.base_model.enable_adapter_layers(),
    "model.requires_grad_": lambda model: model.requires_grad_(True),
    "every parameter": lambda model: [parameter.requires_grad_(True) for parameter in model.parameters()],
    "A.requires_grad_": lambda model: [layer.lora_A["act"].requires_grad_(True) for layer in layers(model)],
}


@pytest.mark.parametrize("how", UNFREEZE)
def test_nothing_unfreezes_a_copied_a(model: PeftModel, how: str) -> None:
    share_lora_A(model, ["plan", "act"], source="plan")
    a, b = values(model, "act"), values(model, "act", "lora_B")
    model.set_adapter("act")
    UNFREEZE[how](model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.5)
    for _ in range(2):
        loss(model).backward()
        optimizer.step()
    assert values(model, "act") == a
    assert moved(values(model, "act", "lora_B"), b)


def test_a_copy_into_a_wider_dtype_is_exact(model: PeftModel) -> None:
    for weight in (*weights(model, "plan"), *weights(model, "plan", "lora_B")):
        weight.data = weight.data.bfloat16()
    share_lora_A(model, ["plan", "act"], source="plan")
    for source, own in zip(weights(model, "plan"), weights(model, "act"), strict=True):
        assert own.dtype == torch.float32
        assert torch.equal(source.float(), own)
    LoRASharedCache(model, "base_lr_shared", agents=["plan", "act"])
    assert_frozen(model, ("act",))


# --- trained, saved, loaded, run with one cache -----------------------------------------------------------------------


@KINDS
def test_trained_saved_loaded_and_run_with_base_lr_shared(source: str | None, tmp_path: Path) -> None:
    lora = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"])  # as PEFT makes them: B is zero
    model = get_peft_model(base_model(config(**SMALL)), lora, adapter_name="plan")
    model.add_adapter("act", copy.deepcopy(lora))
    model.train()
    if source is None:
        share_lora_A(model, ["plan", "act"])
        train(model, ["plan", "act"], steps=30)
    else:
        train(model, ["plan"], steps=15)
        share_lora_A(model, ["act"], source="plan")
        train(model, ["act"], steps=15)
    model.save_pretrained(tmp_path)

    fresh = PeftModel.from_pretrained(base_model(config(**SMALL)), tmp_path / "plan", adapter_name="plan").eval()
    fresh.load_adapter(tmp_path / "act", adapter_name="act")
    for name in ("plan", "act"):
        assert values(fresh, name) == values(model, name) == values(model, "plan")
        assert all(b.abs().max() > 0 for b in weights(fresh, name, "lora_B"))
    assert not any(one is two for one, two in zip(weights(fresh, "plan"), weights(fresh, "act"), strict=True))
    fresh = fresh.double()
    naive = NaiveRun(exact_twin(fresh), "base_lr_shared", agents=("plan", "act"))
    assert_alone(fresh, LoRASharedCache(fresh, "base_lr_shared"), IDS)
    turns: list[tuple[tuple[str, ...], int]] = [(("plan",), 9), (("act",), 15), (("plan",), 20)]
    assert_turns(fresh, LoRASharedCache(fresh, "base_lr_shared"), naive, IDS, turns)

    weights(fresh, "act")[1].data[2, 7] += 1e-3
    with pytest.raises(SharedAMismatchError, match=r"'plan' and 'act' differ at layers\.1\.self_attn\.v_proj"):
        LoRASharedCache(fresh, "base_lr_shared")


@KINDS
def test_files_are_plain_and_complete(model: PeftModel, source: str | None, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "before")
    share_lora_A(model, AGENTS, source)
    model.save_pretrained(tmp_path / "after")
    plan = load_file(tmp_path / "before" / "plan" / "adapter_model.safetensors")
    for name in AGENTS:
        before, after = (tmp_path / when / name for when in ("before", "after"))
        assert {file.name for file in after.iterdir()} == {file.name for file in before.iterdir()}
        old, new = (load_file(folder / "adapter_model.safetensors") for folder in (before, after))
        assert set(old) == set(new)
        for key in old:
            assert torch.equal(new[key], plan[key] if "v_proj.lora_A" in key else old[key])


@pytest.mark.parametrize("source", [None, "act"], ids=["tied", "copied"])
def test_a_cache_with_tokens_notices_at_the_next_forward(model: PeftModel, source: str | None) -> None:
    cache = LoRASharedCache(model)
    run(model, cache, IDS[:, :10])
    before = snapshot(cache)
    share_lora_A(model, ["act", "plan", "reflect"], source)
    with pytest.raises(AdapterChangedError, match=r"'plan' at layers\.0\.self_attn\.v_proj.*10 cached"):
        run(model, cache, IDS[:, :14])
    assert_same_state(snapshot(cache), before)
    cache.reset()
    assert_alone(model, cache, IDS)
    assert_alone(model, LoRASharedCache(model, "base_lr_shared"), IDS)


@KINDS
def test_a_step_of_training_is_noticed_too(model: PeftModel, source: str | None) -> None:
    share_lora_A(model, AGENTS, source)
    cache = LoRASharedCache(model, "base_lr_shared")
    run(model, cache, IDS[:, :10])
    train(model, ["act"])
    model.set_adapter("plan")
    if source is None:
        with pytest.raises(AdapterChangedError, match=r"'plan' at layers\.0\.self_attn\.v_proj"):
            run(model, cache, IDS[:, :14])
    else:
        run(model, cache, IDS[:, :14])  # only B moved
    assert_as_made(model, source)
