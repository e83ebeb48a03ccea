"""What people do to models leaves one A one: conversion, copies, loading, adapters that come and go, a second call."""

import copy
import io
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
    everything,
    flags,
    layers,
    three_adapters,
    train,
    values,
    weights,
)
from peft import LoraConfig, PeftModel
from tiny import AGENTS, assert_alone, base_model, config, decoder_of, randomise, raw

from lragent_hf import LoRASharedCache, share_lora_A


@pytest.fixture
def model() -> PeftModel:
    return three_adapters()


def pickled(model: PeftModel) -> PeftModel:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


def overwritten(model: PeftModel) -> PeftModel:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return model.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def from_meta(model: PeftModel) -> PeftModel:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    angles = copy.deepcopy(decoder_of(model).rotary_emb)  # not in state dicts
    model = model.to("meta").to_empty(device="cpu")
    model.load_state_dict(state)
    decoder_of(model).rotary_emb = angles
    return model


def loaded(model: PeftModel, assign: bool = False) -> PeftModel:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    randomise(model, seed=9)
    model.load_state_dict(state, assign=assign)
    return model


def called_functionally(model: PeftModel) -> PeftModel:
    state = {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    torch.func.functional_call(model, state, kwargs={"input_ids": IDS})
    return model


def with_others(model: PeftModel) -> PeftModel:
    for name in AGENTS:  # whoever is active meanwhile
        model.set_adapter(name)
        trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
        model.add_adapter(f"after_{name}", LoraConfig(r=5, target_modules=["q_proj", "v_proj"]))
        assert {parameter for parameter in model.parameters() if parameter.requires_grad} == trained
    return model


def merged_and_back(model: PeftModel) -> PeftModel:
    for name in AGENTS:
        model.set_adapter(name)
        model.merge_adapter()
        model.unmerge_adapter()
    return model


OPERATIONS: dict[str, Callable[[PeftModel], PeftModel]] = {
    "to float64": lambda model: model.double(),
    "to float64 and back": lambda model: model.double().float(),
    "to float64, overwriting": overwritten,
    "to meta and back": from_meta,
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "load_state_dict": loaded,
    "load_state_dict, assigning": lambda model: loaded(model, assign=True),
    "functional_call": called_functionally,
    "add_adapter": with_others,
    "merge and unmerge": merged_and_back,
}


@KINDS
@pytest.mark.parametrize("operation", OPERATIONS)
def test_sharing_survives(model: PeftModel, operation: str, source: str | None) -> None:
    share_lora_A(model, AGENTS, source)
    want = [weight.detach().clone().double() for weight in weights(model, "plan")]
    model = OPERATIONS[operation](model)
    for name in AGENTS:
        assert all(torch.equal(a.double(), b) for a, b in zip(weights(model, name), want, strict=True))
    assert_as_made(model, source)


@KINDS
def test_sharing_survives_loading_under_the_same_names(model: PeftModel, source: str | None, tmp_path: Path) -> None:
    share_lora_A(model, AGENTS, source)
    want = values(model, "plan")
    model.save_pretrained(tmp_path)
    randomise(model, seed=9)
    for name in AGENTS:
        model.load_adapter(tmp_path / name, adapter_name=name, is_trainable=True)
    assert all(values(model, name) == want for name in AGENTS)
    assert_as_made(model, source)


@KINDS
@pytest.mark.parametrize("gone", AGENTS)
def test_sharing_survives_delete_adapter(model: PeftModel, gone: str, source: str | None) -> None:
    share_lora_A(model, AGENTS, source)
    model.set_adapter(gone)
    left = tuple(name for name in AGENTS if name != gone)
    model.set_adapter(left[0])
    model.delete_adapter(gone)
    if source is None:
        assert_tied(model, left)
    else:
        assert_frozen(model, tuple(name for name in left if name != source))


@pytest.mark.filterwarnings("ignore:Adapter plan was active which is now deleted")
def test_an_adapter_that_was_deleted_has_no_say(model: PeftModel) -> None:
    share_lora_A(model, ["plan", "act"])
    model.set_adapter("plan")
    for layer in layers(model):
        layer.delete_adapter("plan")
        layer.set_adapter("reflect")
    assert {weight.requires_grad for weight in weights(model, "act")} == {False}


def test_a_copy_of_one_a_alone_is_not_tied(model: PeftModel) -> None:
    share_lora_A(model, AGENTS)
    model.set_adapter("act")
    held = layers(model)[0].lora_A["plan"]
    alone = copy.deepcopy(held)
    assert alone.weight is not held.weight
    assert raw(alone.weight) == raw(held.weight)
    alone.requires_grad_(False)
    assert not alone.weight.requires_grad
    assert held.weight.requires_grad
    both = copy.deepcopy([held, layers(model)[0]])  # met first outside its layer
    assert set(both[1].lora_A) == set(AGENTS)


@KINDS
def test_sharing_made_in_inference_mode_trains_outside(model: PeftModel, source: str | None) -> None:
    share_lora_A(model, AGENTS, source="plan")
    with torch.inference_mode():
        share_lora_A(model, ["act", "plan", "reflect"], source)
    assert_as_made(model, source)


def test_a_sharded_a_is_left_alone(model: PeftModel) -> None:
    share_lora_A(model, AGENTS)
    holders = layers(model)[0].lora_A
    view = holders["plan"].weight * 1  # as FSDP leaves it: no leaf, whose flag cannot be set
    for name in AGENTS:
        holders[name]._parameters["weight"] = view
    model.set_adapter("act")
    assert [parameter is view for parameter in holders["reflect"].parameters()] == [True]
    assert view.requires_grad


@KINDS
def test_a_second_call_changes_nothing(model: PeftModel, source: str | None) -> None:
    where = share_lora_A(model, AGENTS, source)
    model.set_adapter("act")
    before = everything(model)
    assert share_lora_A(model, AGENTS, source) == where
    assert everything(model) == before


def test_adapters_join_and_leave(model: PeftModel) -> None:
    share_lora_A(model, ["plan", "act"])
    share_lora_A(model, ["act", "reflect"])
    assert_tied(model)
    model = three_adapters()
    share_lora_A(model, ["plan", "act"])
    model.set_adapter("act")
    share_lora_A(model, ["reflect", "act"])
    assert flags(model, "plan") == {False}
    before = values(model, "plan")
    assert_tied(model, ("reflect", "act"))
    assert values(model, "plan") == before
    assert_tied(model, ("plan",))


def test_copied_after_tied(model: PeftModel) -> None:
    share_lora_A(model, AGENTS)
    train(model, ["plan"])
    share_lora_A(model, ["plan", "act"], source="plan")
    before = values(model, "act")
    assert before == values(model, "plan")
    assert_frozen(model, ("act",))
    assert_tied(model, ("plan", "reflect"))  # reflect was not named
    assert values(model, "act") == before
    share_lora_A(model, ["plan", "act"], source="plan")
    assert values(model, "act") == values(model, "plan") != before


@pytest.mark.parametrize("first", AGENTS)
def test_tied_after_copied(model: PeftModel, first: str) -> None:
    share_lora_A(model, AGENTS, source="plan")
    theirs = values(model, "plan")
    model.set_adapter("act")
    share_lora_A(model, [first, *(name for name in AGENTS if name != first)])
    assert flags(model, "plan") == {True}
    assert values(model, "reflect") == theirs
    assert_tied(model)


KINDS_OF_LORA: dict[str, dict[str, Any]] = {
    "DoRA": {"use_dora": True},
    "rsLoRA": {"use_rslora": True},
    "all linear layers": {"target_modules": "all-linear"},
}


@KINDS
@pytest.mark.parametrize("kind", KINDS_OF_LORA)
def test_kinds_of_lora(kind: str, source: str | None) -> None:
    model = three_adapters(**KINDS_OF_LORA[kind])
    share_lora_A(model, AGENTS, source)
    assert_alone(model, LoRASharedCache(model, "base_lr_shared", key_lr=False), IDS)
    assert_as_made(model, source)


def test_several_modules(model: PeftModel) -> None:
    theirs = values(model, "act", part="q_proj")
    where = share_lora_A(model, AGENTS, modules=["self_attn.v_proj", "q_proj"])
    assert [model.get_submodule(name) for name in where if name.endswith("q_proj")] == layers(model, "q_proj")
    assert [model.get_submodule(name) for name in where if name.endswith("v_proj")] == layers(model)
    assert len(where) == 4
    assert values(model, "act", part="q_proj") == values(model, "plan", part="q_proj") != theirs
    assert share_lora_A(model, AGENTS, modules="v_proj") == tuple(name for name in where if name.endswith("v_proj"))


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
@KINDS
def test_adapters_of_transformers_itself(source: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers asks for a newer PEFT than it needs for what is called here
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.18")
    model = base_model(config(**SMALL))
    for name in AGENTS:
        model.add_adapter(LoraConfig(r=5, target_modules=["q_proj", "v_proj"]), adapter_name=name)
    randomise(model)
    where = share_lora_A(model, AGENTS, source)
    assert [model.get_submodule(name) for name in where] == layers(model)
    for name in AGENTS:
        model.set_adapter(name)
        model.save_pretrained(tmp_path / name)
    fresh = PeftModel.from_pretrained(base_model(config(**SMALL)), tmp_path / "plan", adapter_name="plan")
    for name in AGENTS[1:]:
        fresh.load_adapter(tmp_path / name, adapter_name=name)
    assert all(values(fresh, name) == values(model, "plan") for name in AGENTS)
    assert_alone(fresh.eval(), LoRASharedCache(fresh, "base_lr_shared"), IDS)
    model.add_adapter(LoraConfig(r=5, target_modules=["v_proj"]), adapter_name="later")
    model.load_adapter(str(tmp_path / "act"), adapter_name="loaded")
    assert_as_made(model, source)
