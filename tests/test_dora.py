"""DoRA on v_proj is exact: a gain per feature on attention's output, computed once and never stale."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import NaiveRun, activate, assert_turns, exact_twin
from peft import PeftModel
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.variants import DoraLinearVariant
from tiny import (
    SCHEMES,
    SPLITTING,
    WITH_WINDOW,
    assert_alone,
    assert_close,
    assert_same_state,
    config,
    decoder_of,
    hook_census,
    peft_model,
    raising,
    randomise,
    run,
    snapshot,
    tokens,
    write,
)
from torch import Tensor, nn
from transformers import DynamicCache

from lragent_hf import LoRASharedCache, attach, detach
from lragent_hf.errors import UnsupportedAdapterError

IDS = tokens(60)
STACKED = ("base_shared", "base_lr_stacked")
LINEAR = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
DORA = {"use_dora": True}
KINDS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "all DoRA": ({}, {"plan": DORA, "act": DORA, "reflect": {**DORA, "r": 3}}),
    "DoRA, LoRA, DoRA": ({}, {"plan": DORA, "act": {}, "reflect": {**DORA, "r": 3}}),
    "biased v_proj": ({"attention_bias": True}, {"plan": DORA, "act": {}, "reflect": DORA}),
    "all linear layers but k_proj": ({}, {name: {**DORA, "target_modules": LINEAR} for name in ("plan", "act", "reflect")}),
    "some layers": ({}, {"plan": {**DORA, "layers_to_transform": [1]}, "act": {"layers_to_transform": 0}, "reflect": DORA}),
    "not on v_proj": ({}, {"plan": {**DORA, "target_modules": ["q_proj", "o_proj", "up_proj"]}, "act": {}, "reflect": {}}),
    "rslora and alpha": ({}, {"plan": {**DORA, "use_rslora": True}, "act": {**DORA, "lora_alpha": 3}, "reflect": DORA}),
}  # fmt: skip
TURNS = [
    (("plan",), 9), (("act",), 14), (("reflect",), 19), (("act", "plan"), 24), ((), 28),
    (("act", "plan", "reflect"), 33), (("plan",), 37),
]  # fmt: skip


def dora_model(kind: str = "biased v_proj", scheme: str = "", **more: Any) -> PeftModel:
    """A model of that kind; a biased v_proj has a bias that is not small. Where A is to be shared, ranks are equal."""
    options, adapters = KINDS[kind]
    if scheme == "base_lr_shared":
        adapters = {name: {k: v for k, v in lora.items() if k != "r"} for name, lora in adapters.items()}
    model = peft_model(
        config(**{"num_hidden_layers": 2, **options, **more}), adapters, shared=scheme == "base_lr_shared"
    )
    for name, parameter in model.named_parameters():
        if name.endswith("v_proj.base_layer.bias"):
            nn.init.normal_(parameter, std=0.5)
    return model


def v_proj(model: nn.Module, index: int = 1) -> Any:
    return decoder_of(model).layers[index].self_attn.v_proj


# --- exact ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "kind", "attention"),
    [(scheme, kind, "auto") for scheme in STACKED for kind in KINDS]
    + [
        (scheme, "biased v_proj", attention)
        for scheme in SCHEMES
        for attention in ("keep", "auto")[: 1 + (scheme not in STACKED)]
    ]
    + [("base_lr_shared", "all DoRA", "auto")],
)
def test_any_turns_equal_the_plain_definition(scheme: str, kind: str, attention: str) -> None:
    model = dora_model(kind, scheme).double()
    naive = NaiveRun(exact_twin(model), scheme)
    assert_turns(model, LoRASharedCache(model, scheme, attention=attention), naive, IDS, TURNS)


@pytest.mark.parametrize("window", [4, 100])
@pytest.mark.parametrize("scheme", WITH_WINDOW)
def test_windows_equal_the_plain_definition(scheme: str, window: int) -> None:
    model = dora_model(scheme=scheme).double()
    naive = NaiveRun(exact_twin(model), scheme, window)
    assert_turns(model, LoRASharedCache(model, scheme, handover_window=window), naive, IDS, TURNS)


@pytest.mark.parametrize("sliding_window", [None, 5])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_padded_rows_equal_the_plain_definition(scheme: str, sliding_window: int | None) -> None:
    if sliding_window is None:
        model = dora_model(scheme=scheme).double()
    else:
        cfg = config("mistral", sliding_window=sliding_window, num_hidden_layers=2)
        adapters = {"plan": DORA, "act": {}, "reflect": DORA}
        model = peft_model(cfg, adapters, shared=scheme == "base_lr_shared").double()
    naive = NaiveRun(exact_twin(model), scheme)
    rows, mask = tokens(40, rows=3), torch.ones(3, 40, dtype=torch.long)
    mask[1, :2], mask[2, :6] = 0, 0
    assert_turns(model, LoRASharedCache(model, scheme), naive, rows, TURNS[:5], mask)


@pytest.mark.parametrize("kind", ["all DoRA", "biased v_proj"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_alone_a_dora_agent_is_as_with_a_plain_cache(scheme: str, kind: str) -> None:
    model = dora_model(kind, scheme)
    for agent in (("plan",), ("reflect",), ("plan", "reflect"), ("act", "plan")):
        activate(model, agent)
        assert_alone(model, LoRASharedCache(model, scheme), IDS, parts=(9, 1, 20, 1))
    model.set_adapter("plan")
    assert torch.equal(write(model, IDS[:, :9], 6, LoRASharedCache(model, scheme)), write(model, IDS[:, :9], 6))


@pytest.mark.parametrize("attention", ["auto", "keep"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_fp32_dora_on_a_bf16_model(scheme: str, attention: str) -> None:
    """As far from the same model in fp32 as a plain cache is."""
    exact = dora_model(scheme=scheme)
    model = copy.deepcopy(exact)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    want = exact(IDS).logits
    cache, errors = LoRASharedCache(model, scheme, attention=attention), []
    for each in (cache, DynamicCache()):
        logits = torch.cat([run(model, each, IDS[:, :stop]) for stop in (30, 31, 60)], 1)
        assert logits.dtype == torch.bfloat16
        errors.append((logits.float() - want).square().mean().sqrt())
    assert errors[0] <= 1.5 * errors[1]


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed but the targeted layer")
@pytest.mark.parametrize("sliding_window", [None, 3])
@pytest.mark.parametrize("options", [DORA, {"lora_bias": True}], ids=["DoRA on a biased v_proj", "lora_bias"])
@pytest.mark.parametrize("scheme", SPLITTING)
def test_a_constant_is_not_given_to_positions_that_attend_to_nothing(
    scheme: str, options: dict[str, Any], sliding_window: int | None
) -> None:
    cfg = config("mistral", sliding_window=sliding_window, attention_bias=True)
    if options is DORA:
        cfg = config("qwen2", use_sliding_window=sliding_window is not None, sliding_window=3, max_window_layers=0)
    model = peft_model(cfg, {"plan": options})
    for name, parameter in model.named_parameters():
        if name.endswith("v_proj.base_layer.bias"):
            nn.init.normal_(parameter, std=0.5)
    rows, mask = tokens(12, rows=2), torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    if sliding_window is not None:
        mask[0, 4:8] = 0  # longer than the window: the last two of them attend to nothing
    seen: list[Tensor] = []
    o_proj = decoder_of(model).layers[0].self_attn.o_proj
    o_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    cache = LoRASharedCache(model, scheme)
    run(model, cache, rows[:, :10], mask[:, :10])
    nothing = [[] if sliding_window is None else [6, 7], [0, 1, 2, 3, 4]]
    assert [(~row.any(-1)).nonzero().flatten().tolist() for row in seen[0]] == nothing
    run(model, cache, rows, mask)
    assert seen[1].any(-1).all()


# --- the gain: once, and never stale ----------------------------------------------------------------------------------


def test_the_gain_is_computed_once_for_a_run_of_single_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dora_model()
    calls: list[int] = []
    original = DoraLinearLayer.get_weight_norm

    def counted(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(DoraLinearLayer, "get_weight_norm", counted)
    cache = LoRASharedCache(model)
    run(model, cache, IDS[:, :10])
    assert calls.count(1) == 4  # q_proj's in two layers are PEFT's own, v_proj's ours
    for stop in range(11, 16):
        run(model, cache, IDS[:, :stop])
    assert calls.count(1) == 4 + 5 * 2
    model.set_adapter("reflect")
    run(model, cache, IDS[:, :16])
    assert calls.count(1) == 4 + 5 * 2 + 4


def _b(model: PeftModel) -> None:
    with torch.no_grad():
        v_proj(model).lora_B["plan"].weight.mul_(2.0)


def _magnitude(model: PeftModel) -> None:
    with torch.no_grad():
        v_proj(model).lora_magnitude_vector["plan"].weight.mul_(torch.linspace(0.3, 3, 16))


def _scale(model: PeftModel) -> None:
    v_proj(model).scaling["plan"] *= 3.0


def _new_magnitude(model: PeftModel) -> None:
    layer = v_proj(model).lora_magnitude_vector["plan"]
    layer.weight = nn.Parameter(layer.weight.data.flip(0))


def _replaced_data(model: PeftModel) -> None:
    b = v_proj(model).lora_B["plan"].weight
    b.data = b.data * 2.0


def _loaded(model: PeftModel) -> None:
    model.load_state_dict(
        {k: v * 1.5 if "lora_B" in k or "magnitude" in k else v for k, v in model.state_dict().items()}
    )


def _data(model: PeftModel) -> None:
    v_proj(model).lora_B["plan"].weight.data[3] += 1.0


def _magnitude_data(model: PeftModel) -> None:
    v_proj(model).lora_magnitude_vector["plan"].weight.data.mul_(torch.linspace(0.3, 3, 16))


COUNTED = [_b, _magnitude, _scale, _new_magnitude, _replaced_data, _loaded]
UNCOUNTED = [_data, _magnitude_data]


@pytest.mark.parametrize(
    ("edit", "moment"),
    [(edit, moment) for edit in COUNTED for moment in ("decode", "prefill", "hand-over")]
    + [(edit, moment) for edit in UNCOUNTED for moment in ("prefill", "hand-over")],
)
def test_edits_count_from_the_next_forward(edit: Callable[[PeftModel], None], moment: str) -> None:
    """Edits through ``.data`` leave no trace: they count from the next prefill or hand-over."""
    model = dora_model().double()
    twin = exact_twin(model)
    naive, cache = NaiveRun(twin, "base_lr_stacked"), LoRASharedCache(model)
    assert_turns(model, cache, naive, IDS, [(("plan",), 10)])
    stop = 11 if moment == "decode" else 20
    if moment == "hand-over":
        assert_turns(model, cache, naive, IDS, [(("act",), 12)])
        stop = 13
    edit(model)
    edit(twin)
    assert_turns(model, cache, naive, IDS, [(("plan",), stop), (("reflect",), 25)])


def test_a_dora_adapter_replaced_under_its_name_has_a_new_gain() -> None:
    model = dora_model("all DoRA")
    cache = LoRASharedCache(model, "base_shared")
    run(model, cache, IDS[:, :10])
    lora = model.peft_config["plan"]
    model.set_adapter("act")
    model.delete_adapter("plan")
    model.add_adapter("plan", lora)
    randomise(model, seed=9, only="plan")
    model.eval().set_adapter("plan")
    cache.reset()
    assert_alone(model, cache, IDS)


# --- the variant is back when the forward ends ------------------------------------------------------------------------


def variants(model: nn.Module) -> list[dict[str, Any]]:
    return [dict(v_proj(model, index).lora_variant) for index in range(2)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_variant_is_put_back(scheme: str) -> None:
    model = dora_model(scheme=scheme)
    attach(model)
    attached, before = hook_census(model), variants(model)
    assert type(before[0]["plan"]) is DoraLinearVariant
    want = model(IDS).logits
    cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :10])
    assert variants(model) == before
    state = snapshot(cache)
    for error in (ValueError("inside"), KeyboardInterrupt()):
        with raising(decoder_of(model).layers[1].mlp, error), pytest.raises(type(error)):
            run(model, cache, IDS[:, :20])
        assert torch.equal(model(IDS).logits, want)  # ends the interrupted forward
        assert variants(model) == before
        assert_same_state(snapshot(cache), state)
    assert hook_census(model) == attached
    with raising(decoder_of(model).layers[1].mlp, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        run(model, cache, IDS[:, :20])
    detach(model)
    assert variants(model) == before
    assert torch.equal(model(IDS).logits, want)


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("broken_off", [False, True], ids=["whole", "after ctrl-c"])
@pytest.mark.parametrize("names", [["plan"], ["act", "plan"]], ids="+".join)
@pytest.mark.parametrize("scheme", ["full_shared", "base_lr_stacked"])
def test_merging_and_unmerging_equal_an_unattached_model(
    scheme: str, names: list[str], broken_off: bool, safe: bool
) -> None:
    model = dora_model()
    model.base_model.set_adapter(names)
    plain = copy.deepcopy(model)
    cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :10])
    if broken_off:
        with raising(decoder_of(model).layers[1].mlp, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            run(model, cache, IDS[:, :20])
    for each in (model, plain):
        each.merge_adapter(safe_merge=safe)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, plain(IDS).logits)
    for each in (model, plain):
        each.unmerge_adapter()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


# --- what stays refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_order_of_adapters_that_is_not_the_alphabets_is_refused(scheme: str) -> None:
    """PEFT applies them one after another, and an agent is a set of adapters."""
    model = dora_model(scheme=scheme)
    cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :10])
    state = snapshot(cache)
    model.base_model.set_adapter(["plan", "act"])
    with pytest.raises(UnsupportedAdapterError, match=r"'plan' is DoRA.*alphabetical.*\['act', 'plan'\]"):
        run(model, cache, IDS)
    assert_same_state(snapshot(cache), state)
    model.base_model.set_adapter(["act", "plan"])
    run(model, cache, IDS)


@pytest.mark.parametrize("scheme", SPLITTING)
def test_a_gain_of_zero_before_another_adapter_is_refused(scheme: str) -> None:
    model = dora_model(scheme=scheme)
    v_proj(model).lora_magnitude_vector["plan"].weight.data[3] = 0.0
    assert_alone(model, LoRASharedCache(model, scheme), IDS)
    activate(model, ("plan", "reflect"))
    with pytest.raises(UnsupportedAdapterError, match=r"layers\.1\.self_attn\.v_proj is zero.*'reflect'.*full_shared"):
        run(model, LoRASharedCache(model, scheme), IDS[:, :10])


def test_a_copy_of_an_attached_model_has_gains_of_its_own() -> None:
    model = dora_model()
    cache = LoRASharedCache(model)
    run(model, cache, IDS[:, :10])
    twin = copy.deepcopy(model)
    with torch.no_grad():
        v_proj(twin).lora_magnitude_vector["plan"].weight.mul_(2.0)
    got = LoRASharedCache(twin)
    assert_alone(twin, got, IDS)
    assert_close(run(model, cache, IDS[:, :11]), model(IDS[:, :11]).logits[:, 10:])
