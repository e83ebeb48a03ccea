"""Everything else that PEFT can put on v_proj, found by its registry: right where values are stored whole, and refused by
name, before anything is written, where they are split."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from oracle import NaiveRun, assert_turns, exact_twin
from peft import LoHaConfig, LoraConfig, PeftModel, TaskType, get_peft_model
from peft.tuners.lora import variants
from peft.tuners.lora.layer import LoraVariant
from peft.tuners.lora.variants import DoraLinearVariant
from tiny import (
    SCHEMES,
    SPLITTING,
    assert_alone,
    assert_same_state,
    base_model,
    config,
    decoder_of,
    hook_census,
    peft_model,
    run,
    snapshot,
    tokens,
    write,
)
from torch import nn
from zoo.adapters import PAGE, page
from zoo.tuners import PROMPTS, TINY, TUNERS, prompted, tuned, variant_configs

from lragent_hf import LoRASharedCache
from lragent_hf.errors import UnsupportedAdapterError, UnsupportedModelError

IDS = tokens(40)
WHOLE = ("non_shared", "full_shared")


def refused(model: nn.Module, scheme: str, *parts: str) -> None:
    """No token gets into a cache of that scheme, and the message has all parts. The model is left as it was."""
    LoRASharedCache(model, "full_shared")  # attached
    before = hook_census(model)

    def first_token() -> None:
        run(model, LoRASharedCache(model, scheme), IDS[:, :10])

    with pytest.raises(UnsupportedAdapterError) as caught:
        first_token()
    for part in parts:
        assert part in str(caught.value)
    assert hook_census(model) == before


def made(make: Callable[[], PeftModel], *errors: type[Exception]) -> PeftModel:
    """What that gives; skips where a package is missing, or with one of these errors."""
    try:
        return make()
    except (ImportError, *errors) as error:
        pytest.skip(str(error))


# --- tuners -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # what PEFT has to say about its own tuners
@pytest.mark.parametrize("name", sorted(TUNERS))
def test_other_tuners_on_v_proj(name: str) -> None:
    model = made(lambda: tuned(name))
    for scheme in SPLITTING:
        refused(model, scheme, "layers.0.self_attn.v_proj", "LoRA", "full_shared", "non_shared")
    for scheme in WHOLE:
        if name != "POLY":  # wants the ids of its tasks in every forward
            assert_alone(model, LoRASharedCache(model, scheme), IDS, parts=(9, 1, 1, 9))


@pytest.mark.parametrize("name", ["LOHA", "LOKR", "IA3", "VERA", "OFT"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_other_tuners_that_leave_v_proj_alone(name: str, scheme: str) -> None:
    model = tuned(name, target_modules=["o_proj"])
    cache = LoRASharedCache(model, scheme)
    assert_alone(model, cache, IDS, parts=(9, 1, 1, 9))
    with model.disable_adapter():
        run(model, cache, IDS)
    assert cache.agents == {"default": 20 if scheme == "non_shared" else 40, "base model": 40}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(PROMPTS))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_prompt_learning_is_refused(name: str, scheme: str) -> None:
    model = made(lambda: prompted(name), ValueError)
    with pytest.raises(UnsupportedAdapterError, match=r"'default' is prompt learning.*LoRA"):
        LoRASharedCache(model, scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_adaption_prompts_attend_beside_the_cache(scheme: str) -> None:
    """They run v_proj a second time, on something else than the tokens."""
    cfg = peft.AdaptionPromptConfig(adapter_layers=1, adapter_len=4, task_type=TaskType.CAUSAL_LM)
    model = get_peft_model(base_model(config(**TINY)), cfg).eval()
    cache = LoRASharedCache(model, scheme)
    if scheme in WHOLE:
        assert_alone(model, cache, IDS)
        return
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.self_attn.*v_proj was given.*full_shared"):
        run(model, cache, IDS)
    assert_same_state(snapshot(cache), snapshot(LoRASharedCache(model, scheme)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_trained_tokens_alone(scheme: str) -> None:
    cfg = peft.TrainableTokensConfig(token_indices=[3, 4, 5, 6, 7, 8, 9, 10], init_weights=True)
    base = base_model(config(**TINY)).requires_grad_(False)  # else older PEFT keeps tokens that cannot be copied
    model = get_peft_model(base, cfg, adapter_name="plan")
    model.add_adapter("act", cfg)
    for name, parameter in model.named_parameters():
        if "trainable_tokens_delta" in name:
            nn.init.normal_(parameter)
    model = model.eval().double()
    turns: list[Any] = [(("plan",), 9), (("act",), 14), ((), 18), (("plan",), 23)]
    naive = NaiveRun(exact_twin(model), scheme, agents=("plan", "act"))
    assert_turns(model, LoRASharedCache(model, scheme), naive, IDS, turns)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_x_lora_is_refused(scheme: str, tmp_path: Path) -> None:
    peft_model(config(**TINY)).save_pretrained(tmp_path)
    adapters = {"0": str(tmp_path / "plan"), "1": str(tmp_path / "act")}
    cfg = peft.XLoraConfig(task_type=TaskType.CAUSAL_LM, hidden_size=48, adapters=adapters)
    model = get_peft_model(base_model(config(**TINY, use_cache=False)), cfg).eval()
    with pytest.raises(UnsupportedAdapterError, match=r"X-LoRA.*twice.*LoRA"):
        LoRASharedCache(model, scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_mixed_model_takes_lora_and_refuses_what_lies_on_top_of_it(scheme: str) -> None:
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(base_model(config(**TINY)), lora, adapter_name="plan", mixed=True).eval()
    assert_alone(model, LoRASharedCache(model, scheme), IDS)
    model.add_adapter("loha", LoHaConfig(target_modules=["v_proj"], init_weights=False))
    model.set_adapter(["plan", "loha"])
    model.eval()
    if scheme in WHOLE:
        assert_alone(model, LoRASharedCache(model, scheme), IDS)
    else:
        refused(model, scheme, "layers.0.self_attn.v_proj", "several kinds", "full_shared")


# --- variants of LoRA -------------------------------------------------------------------------------------------------

VARIANTS = [
    cls for name, cls in sorted(vars(variants).items()) if name.endswith("LinearVariant") and cls is not DoraLinearVariant
]  # fmt: skip


@pytest.mark.parametrize("cls", VARIANTS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("scheme", SPLITTING)
def test_every_variant_but_dora_is_refused(scheme: str, cls: type[LoraVariant]) -> None:
    model = peft_model(config(**TINY), shared=True)
    cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :10])
    before = snapshot(cache)
    decoder_of(model).layers[1].self_attn.v_proj.lora_variant["act"] = cls()
    refused(model, scheme, "layers.1.self_attn.v_proj", "'act'", cls.__name__, "full_shared")
    model.set_adapter("act")
    with pytest.raises(UnsupportedAdapterError, match=cls.__name__):
        run(model, cache, IDS)
    assert_same_state(snapshot(cache), before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["aLoRA", "BD-LoRA", "KaSA", "MiCA"])
def test_variants_as_peft_makes_them(name: str) -> None:
    if name not in variant_configs(["v_proj"]):
        pytest.skip("the installed PEFT has none")
    lora = LoraConfig(r=4, task_type=TaskType.CAUSAL_LM, target_modules=["v_proj"], **variant_configs(["v_proj"])[name])
    model = get_peft_model(base_model(config(**TINY)), lora, adapter_name="plan").eval()
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            nn.init.normal_(parameter, std=0.3)
    for scheme in SPLITTING:
        refused(model, scheme, "layers.0.self_attn.v_proj", "'plan'", "Variant", "full_shared")
    for scheme in WHOLE:
        assert_alone(model, LoRASharedCache(model, scheme), IDS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_alora_that_leaves_v_proj_alone(scheme: str) -> None:
    """Its invocation tokens in the prompt, and in what is new to a cache that has the rest."""
    lora = LoraConfig(
        task_type=TaskType.CAUSAL_LM, target_modules=["q_proj", "o_proj"], alora_invocation_tokens=IDS[0, 13:15].tolist(),
        init_lora_weights=False,
    )  # fmt: skip
    model = get_peft_model(base_model(config(**TINY)), lora, adapter_name="plan").eval()
    cache = LoRASharedCache(model, scheme)
    assert torch.equal(write(model, IDS[:, :20], 5, cache), write(model, IDS[:, :20], 5))
    assert not torch.equal(model(IDS[:, :20]).logits, model.base_model.model(IDS[:, :20]).logits)


# --- LoRA on the parameter itself -------------------------------------------------------------------------------------


def test_target_parameters_on_v_proj() -> None:
    options = {"target_modules": [], "target_parameters": ["v_proj.weight"], "init_lora_weights": False}
    model = get_peft_model(base_model(config(**TINY)), LoraConfig(**options), adapter_name="plan").eval()
    for scheme in SPLITTING:
        refused(
            model, scheme, "layers.0.self_attn.v_proj", "'plan'", "target_parameters", "target_modules", "full_shared"
        )
        with pytest.raises(UnsupportedAdapterError):
            LoRASharedCache(model, scheme)  # before any forward
    for scheme in WHOLE:
        assert_alone(model, LoRASharedCache(model, scheme), IDS)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_target_parameters_elsewhere(scheme: str) -> None:
    options = {"target_modules": ["v_proj"], "target_parameters": ["o_proj.weight"], "init_lora_weights": False}
    model = get_peft_model(base_model(config(**TINY)), LoraConfig(r=4, **options), adapter_name="plan").eval().double()
    naive = NaiveRun(exact_twin(model), scheme, agents=("plan",))
    turns: list[Any] = [(("plan",), 9), ((), 14), (("plan",), 20)]
    assert_turns(model, LoRASharedCache(model, scheme), naive, IDS, turns)


@pytest.mark.filterwarnings("ignore")
def test_the_page_of_adapters_is_what_becomes_of_them() -> None:
    written = PAGE.read_text()
    if f"PEFT {peft.__version__}, " not in written:
        pytest.skip(f"docs/adapters.md is of another PEFT than {peft.__version__}")
    for line, now in zip(written.splitlines(), page().splitlines(), strict=True):
        assert line == now or "needs `" in line + now, "write the page anew: see tests/zoo/adapters.py"
