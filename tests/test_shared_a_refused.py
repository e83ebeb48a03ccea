"""What cannot have one A is refused by name, with the way out, and the model is bit for bit what it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_a import EQUAL, SMALL, everything, layers, weights
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import AGENTS, base_model, config, peft_model
from torch import nn

from lragent_hf import share_lora_A
from lragent_hf.errors import UnsupportedAdapterError

LAST = r"layers\.1\.self_attn\.v_proj"
LOADED = r"Loaded LoRA adapters: \['plan', 'act', 'reflect'\]"

CALLS: dict[str, tuple[type[Exception], dict[str, Any], str]] = {
    "unknown adapter": (
        UnsupportedAdapterError, {"adapters": ["plan", "acts"]}, rf"adapters names \['acts'\].*{LOADED}"
    ),
    "unknown source": (UnsupportedAdapterError, {"source": "plans"}, rf"source names \['plans'\].*{LOADED}"),
    "a string": (ValueError, {"adapters": "plan"}, "list of names.*'plan'"),
    "one adapter": (ValueError, {"adapters": ["plan"]}, rf"two adapters.*\['plan'\].*{LOADED}"),
    "none": (ValueError, {"adapters": []}, r"two adapters.*got \[\]"),
    "the source alone": (ValueError, {"adapters": ["plan"], "source": "plan"}, "two adapters"),
    "one named twice": (ValueError, {"adapters": ["plan", "act", "act"]}, r"\['act'\] twice"),
    "no module of that name": (ValueError, {"modules": ["v_proj", "k_proj"]}, r"'k_proj'.*\['q_proj', 'v_proj'\]"),
    "part of a name": (ValueError, {"modules": ["proj"]}, r"'proj'.*\['q_proj', 'v_proj'\]"),
    "no modules": (ValueError, {"modules": []}, "modules is empty"),
}  # fmt: skip


def refused(model: nn.Module, error: type[Exception], message: str, **options: Any) -> None:
    before = everything(model)
    with pytest.raises(error, match=message) as caught:
        share_lora_A(model, **{"adapters": AGENTS, **options})
    assert type(caught.value) is error
    assert everything(model) == before


@pytest.mark.parametrize("case", CALLS)
def test_calls(case: str) -> None:
    error, options, message = CALLS[case]
    refused(peft_model(config(**SMALL), EQUAL), error, message, **options)


def as_it_is(model: PeftModel) -> None:
    pass


def narrow(model: PeftModel) -> None:
    weight = weights(model, "act")[1]
    weight.data = weight.data.bfloat16()


def away(model: PeftModel) -> None:
    layers(model)[1].lora_A["act"].to("meta")


class Own(nn.Linear):
    """Not PEFT's, with a forward of its own perhaps."""


def of_another_class(model: PeftModel) -> None:
    layers(model)[1].lora_A["act"].__class__ = Own


PARTLY = {**EQUAL, "act": {"layers_to_transform": 0}}
RANKS = {**EQUAL, "act": {"rank_pattern": {LAST: 3}}}
EMBEDDINGS = {**EQUAL, "plan": {"target_modules": ["embed_tokens"]}, "act": {"target_modules": ["embed_tokens"]}}
PAIR = {"adapters": ["plan", "act"]}

ADAPTERS: dict[str, tuple[dict[str, Any], Callable[[PeftModel], Any], dict[str, Any], str]] = {
    "none there": (PARTLY, as_it_is, {}, rf"{LAST}: adapter 'act' has no LoRA there.*same target_modules and layers"),
    "none there, source": (PARTLY, as_it_is, {"source": "act"}, rf"{LAST}: adapter 'act' has no LoRA there"),
    "ranks": (RANKS, as_it_is, {}, rf"{LAST}: A of 'plan' is \[5, 48\], that of 'act' is \[3, 48\].*same r"),
    "dtypes": (EQUAL, narrow, {}, rf"{LAST}: A of 'plan' is torch.float32, that of 'act' is torch.bfloat16.*one dtype"),
    "dtypes, narrow first": (EQUAL, narrow, {"adapters": ["act", "plan"]}, rf"{LAST}: A of 'act' is torch.bfloat16"),
    "a copy that rounds": (EQUAL, narrow, {"source": "plan"}, rf"{LAST}: A of 'plan' is torch.float32.*one dtype"),
    "not in memory": (EQUAL, away, {}, rf"{LAST}: the weights of adapter 'act' are not in memory.*Load"),
    "another class": (EQUAL, of_another_class, {}, rf"{LAST}: A of adapter 'act' is a Own, not an nn.Linear.*modules"),
    "merged": (EQUAL, lambda model: model.merge_adapter(), {}, r"0.*v_proj: adapter 'plan' is merged.*unmerge_adapter"),
    "embeddings": (
        EMBEDDINGS,
        as_it_is,
        {**PAIR, "modules": ["embed_tokens"]},
        "embed_tokens: A of adapter 'plan' is a",
    ),
}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("case", ADAPTERS)
def test_adapters(case: str) -> None:
    adapters, prepare, options, message = ADAPTERS[case]
    model = peft_model(config(**SMALL), adapters)
    prepare(model)
    refused(model, UnsupportedAdapterError, message, **options)


def test_a_convolution() -> None:
    lora = LoraConfig(r=2, target_modules=["0"])
    model = get_peft_model(nn.Sequential(nn.Conv1d(4, 4, 1)), lora, adapter_name="plan")
    model.add_adapter("act", lora)
    message = r"0: A of adapter 'plan' is a Conv1d, not an nn.Linear"
    refused(model, UnsupportedAdapterError, message, adapters=["plan", "act"], modules=["0"])


class Experts(nn.Module):
    """A weight without a layer of its own, [experts, d_out, d_in]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4, 4))


@pytest.mark.filterwarnings("ignore:Unsupported layer type")
def test_target_parameters() -> None:
    lora = LoraConfig(r=2, target_modules=[], target_parameters=["0.weight"])
    model = get_peft_model(nn.Sequential(Experts(), nn.Linear(4, 4)), lora, adapter_name="plan")
    model.add_adapter("act", LoraConfig(r=2, target_modules=["1"]))
    message = r"0: adapter 'plan' is of target_parameters.*target_modules"
    refused(model, UnsupportedAdapterError, message, adapters=["plan", "act"], modules=["0"])


def test_a_model_without_adapters() -> None:
    refused(base_model(config(**SMALL)), UnsupportedAdapterError, r"not loaded. Loaded LoRA adapters: \[\]")
