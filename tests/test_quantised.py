"""Quantised bases, as far as their packages run on a CPU: the split needs v_proj's output only, never its weight."""

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from one_a import assert_frozen, assert_tied
from oracle import EXACT, NaiveRun, activate
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import SCHEMES, SPLITTING, base_model, config, decoder_of, randomise, run, tokens, write
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, DynamicCache, TorchAoConfig

from lragent_hf import LoRASharedCache, share_lora_A

IDS = tokens(40)
SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}

pytestmark = pytest.mark.filterwarnings("ignore")  # what the packages say on being imported and run


def need(package: str) -> Any:
    """The package, or the test is skipped with the reason why it does not import."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(package)
    except Exception as error:
        pytest.skip(f"{package} does not import: {type(error).__name__}: {error}")


def loaded(folder: Path, quantization: Any) -> nn.Module:
    base_model(config(**SIZES)).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map="cpu", quantization_config=quantization
    )


def torchao(name: str, **options: Any) -> Callable[[Path], nn.Module]:
    return lambda folder: loaded(folder, TorchAoConfig(getattr(need("torchao.quantization"), name)(**options)))


def bitsandbytes(**options: Any) -> Callable[[Path], nn.Module]:
    def build(folder: Path) -> nn.Module:
        need("bitsandbytes")
        return loaded(folder, BitsAndBytesConfig(**options, bnb_4bit_compute_dtype=torch.float32))

    return build


def quanto(weights: str) -> Callable[[Path], nn.Module]:
    def build(folder: Path) -> nn.Module:
        package = need("optimum.quanto")
        model = base_model(config(**SIZES))
        package.quantize(model, weights=getattr(package, weights), exclude=["lm_head"])
        package.freeze(model)
        return model

    return build


def hqq(folder: Path) -> nn.Module:
    package = need("hqq.core.quantize")
    model = base_model(config(**SIZES))
    how = package.BaseQuantizeConfig(nbits=4, group_size=64)
    for parent in [module for layer in decoder_of(model).layers for module in (layer.self_attn, layer.mlp)]:
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, package.HQQLinear(child, how, compute_dtype=torch.float32, device="cpu"))
    return model


BASES: dict[str, Callable[[Path], nn.Module]] = {
    "torchao int8": torchao("Int8WeightOnlyConfig"),
    "torchao int4": torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4),
    "bitsandbytes int8": bitsandbytes(load_in_8bit=True),
    "bitsandbytes nf4": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bitsandbytes fp4": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "quanto int8": quanto("qint8"),
    "quanto int4": quanto("qint4"),
    "hqq 4 bit": hqq,
}
DYNAMIC = torchao("Int8DynamicActivationInt8WeightConfig")


def agents_on(base: nn.Module, dora: bool = False) -> PeftModel:
    """Plan and act with one A on a quantised model."""
    lora = {"r": 5, "lora_alpha": 10, "target_modules": ["q_proj", "v_proj"]}
    model = get_peft_model(base, LoraConfig(**lora, use_dora=dora), adapter_name="plan")
    model.add_adapter("act", LoraConfig(**lora))
    randomise(model, shared=True)
    model.set_adapter("plan")
    v_proj = decoder_of(model).layers[0].self_attn.v_proj
    plain = (
        type(getattr(v_proj.base_layer, "weight", None)) is nn.Parameter
        and v_proj.base_layer.weight.is_floating_point()
    )
    assert not plain, "not quantised"
    return model.eval()


@pytest.fixture(scope="module", params=BASES)
def quantised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same model twice: for the cache, and for what it is compared with (8-bit weights cannot be copied)."""
    models = (agents_on(BASES[request.param](tmp_path_factory.mktemp("model"))) for _ in range(2))
    return request.param, *models


def assert_near(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for the order of sums. On a CPU, products inside bitsandbytes are in 16 bits."""
    error = (got - want).abs().max() / want.abs().max()
    assert error <= (2e-2 if name.startswith("bitsandbytes") else 1e-4), f"error {error:.3g}"


@pytest.mark.parametrize(
    ("scheme", "attention"), [*((scheme, "auto") for scheme in SCHEMES), ("base_lr_stacked", "keep")]
)
def test_one_agent_equals_a_plain_cache(quantised: Any, scheme: str, attention: str) -> None:
    kind, model, stock = quantised
    for name in ("act", "plan"):
        model.set_adapter(name)
        stock.set_adapter(name)
        cache, plain = LoRASharedCache(model, scheme, attention=attention), DynamicCache()
        for stop in (12, 13, 30, 31):
            assert_near(kind, run(model, cache, IDS[:, :stop]), run(stock, plain, IDS[:, :stop]))
    assert torch.equal(write(model, IDS[:, :20], 4, LoRASharedCache(model, scheme)), write(stock, IDS[:, :20], 4))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_turns_equal_the_plain_definition(quantised: Any, scheme: str) -> None:
    kind, model, stock = quantised
    old = stock.config._attn_implementation
    stock.base_model.model.set_attn_implementation(EXACT)
    naive = NaiveRun(stock, scheme, agents=("plan", "act"))
    caches = [LoRASharedCache(model, scheme, attention=attention) for attention in ("auto", "keep")]
    try:
        for agent, stop in (
            (("plan",), 12),
            (("act",), 20),
            ((), 23),
            (("act", "plan"), 28),
            (("plan",), 29),
            (("act",), 36),
        ):
            activate(model, agent)
            activate(stock, agent)
            start = caches[0].get_seq_length()
            want = naive.forward(agent, IDS[:, start:stop], None)
            for cache in caches:
                assert_near(kind, run(model, cache, IDS[:, :stop]), want)
    finally:
        naive.detach()
        stock.base_model.model.set_attn_implementation(old)
        for each in (model, stock):
            each.base_model.enable_adapter_layers()


@pytest.mark.parametrize("name", [name for name in BASES if name != "bitsandbytes int8"])  # PEFT's DoRA loses its state
def test_dora_on_a_quantised_v_proj(name: str, tmp_path: Path) -> None:
    model = agents_on(BASES[name](tmp_path), dora=True)
    for scheme in SPLITTING:
        for attention in ("auto", "keep"):
            cache, plain = LoRASharedCache(model, scheme, attention=attention), DynamicCache()
            for stop in (12, 13, 30, 31):
                assert_near(name, run(model, cache, IDS[:, :stop]), run(model, plain, IDS[:, :stop]))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_activations_quantised_on_the_way_are_as_close_as_another_attention_is(scheme: str, tmp_path: Path) -> None:
    """Rounding to int8 makes jumps of the smallest differences: ours against sdpa, as eager against sdpa."""
    model = agents_on(DYNAMIC(tmp_path))
    logits = []
    for implementation in ("sdpa", "eager", None):
        cache: Any = DynamicCache()
        if implementation is None:
            cache = LoRASharedCache(model, scheme)
        else:
            model.base_model.model.set_attn_implementation(implementation)
        logits.append(torch.cat([run(model, cache, IDS[:, :stop]) for stop in (30, 31, 32, 40)], 1))
    sdpa, eager, ours = logits
    assert (ours - sdpa).square().mean().sqrt() <= 2 * (eager - sdpa).square().mean().sqrt() + 1e-3 * sdpa.abs().max()


@pytest.mark.parametrize("source", [None, "plan"], ids=["tied", "copied"])
@pytest.mark.parametrize("kind", BASES)
def test_one_a_trains_on_a_quantised_base(kind: str, source: str | None, tmp_path: Path) -> None:
    model = agents_on(BASES[kind](tmp_path))
    share_lora_A(model, ["plan", "act"], source)
    assert_tied(model, ("plan", "act")) if source is None else assert_frozen(model, ("act",))
