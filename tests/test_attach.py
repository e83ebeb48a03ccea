"""Attaching is invisible to everything but our cache, detaching leaves nothing, and a forward that breaks off leaves the
cache at its last whole state."""

import copy
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import PeftModel
from tiny import (
    AGENTS,
    SCHEMES,
    SPLITTING,
    WITH_WINDOW,
    assert_same_state,
    config,
    decoder_of,
    hook_census,
    peft_model,
    raising,
    run,
    snapshot,
    tokens,
    write,
)
from torch import Tensor, nn
from transformers import DynamicCache

from lragent_hf import LoRASharedCache, attach, detach

IDS = tokens(48)
PLACES = ("v_proj", "o_proj", "mlp")  # before values are stored, after attention, after the layer's attention
LAYERS = range(3)


class Broken(Exception):
    """Raised by the tests inside a model's forward."""


@pytest.fixture(scope="module")
def shared_a() -> PeftModel:
    return peft_model(shared=True)


@pytest.fixture
def model(shared_a: PeftModel) -> Iterator[PeftModel]:
    """Agents with one A, so that every scheme takes them."""
    shared_a.set_adapter("plan")
    yield shared_a
    detach(shared_a)
    shared_a.set_attn_implementation("sdpa")  # whatever a failure left


def place(model: nn.Module, index: int, name: str) -> nn.Module:
    layer = decoder_of(model).layers[index]
    return layer.mlp if name == "mlp" else getattr(layer.self_attn, name)


def stock_logits(model: PeftModel) -> list[Tensor]:
    """Every agent's forward without a cache, and prefill and decode with a plain one. Leaves plan active."""
    logits = []
    for name in ("act", "reflect", "plan"):
        model.set_adapter(name)
        plain = DynamicCache()
        with torch.no_grad():
            logits.append(model(IDS).logits)
        logits += [run(model, plain, IDS[:, :20]), run(model, plain, IDS[:, :21]), run(model, plain, IDS[:, :30])]
    with model.disable_adapter(), torch.no_grad():
        logits.append(model(IDS).logits)
    return logits


def all_equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# --- invisible to others ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_other_forwards_are_bit_equal_before_while_and_after(
    model: PeftModel, scheme: str, implementation: str, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: model.set_attn_implementation("sdpa"))
    model.set_attn_implementation(implementation)
    before = stock_logits(model)
    cache = LoRASharedCache(model, scheme)
    assert all_equal(stock_logits(model), before)
    for stop, name in ((10, "plan"), (11, "plan"), (20, "act"), (30, "reflect")):
        model.set_adapter(name)
        run(model, cache, IDS[:, :stop])
        assert all_equal(stock_logits(model), before)
        assert model.config._attn_implementation == implementation
    with raising(place(model, 1, "o_proj"), Broken()), pytest.raises(Broken):
        run(model, cache, IDS)
    assert all_equal(stock_logits(model), before)
    assert model.config._attn_implementation == implementation
    detach(model)
    assert all_equal(stock_logits(model), before)
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_is_tapped_or_switched_between_forwards(model: PeftModel, scheme: str) -> None:
    attach(model)
    attached = hook_census(model)
    cache = LoRASharedCache(model, scheme)
    for name in AGENTS:
        model.set_adapter(name)
        write(model, IDS[:, :9], 3, LoRASharedCache(model, scheme))
        run(model, cache, IDS[:, : 10 * (AGENTS.index(name) + 1)])
        assert hook_census(model) == attached
        assert decoder_of(model).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_detach_leaves_no_hook_no_variant_no_attribute(scheme: str, implementation: str) -> None:
    model = peft_model(config(attn_implementation=implementation), shared=True)
    before, settings = hook_census(model), model.config.to_dict()
    cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :10])
    model.set_adapter("act")
    run(model, cache, IDS[:, :20])
    assert hook_census(model) != before
    detach(model)
    assert hook_census(model) == before
    assert model.config.to_dict() == settings
    assert model.config._attn_implementation == implementation
    detach(model)  # once more is a no-op


def test_detach_after_an_adapter_replaced_v_proj_leaves_nothing() -> None:
    model = peft_model(adapters={"plan": {"target_modules": ["q_proj"]}})
    cache = LoRASharedCache(model)
    run(model, cache, IDS[:, :10])
    model.add_adapter("act", copy.deepcopy(peft_model(adapters={"act": {}}).peft_config["act"]))
    model.set_adapter("act")
    run(model.eval(), cache, IDS[:, :20])
    detach(model)
    for hooks, attributes, variants in hook_census(model).values():
        assert not hooks
        assert not variants
        assert not [name for name in attributes if "lragent" in name]


def test_attaching_twice_is_attaching_once(model: PeftModel) -> None:
    binding = attach(model)
    once = hook_census(model)
    assert attach(model) is binding
    assert attach(model.get_base_model()) is binding
    LoRASharedCache(model)
    LoRASharedCache(model, "non_shared")
    assert hook_census(model) == once


def test_caches_go_on_after_detach_and_attach(model: PeftModel) -> None:
    cache, undisturbed = LoRASharedCache(model), LoRASharedCache(model)
    for each in (cache, undisturbed):
        run(model, each, IDS[:, :10])
    detach(model)
    attach(model)
    model.set_adapter("act")
    got = run(model, cache, IDS)
    detach(model)
    attach(model)
    assert torch.equal(got, run(model, undisturbed, IDS))


def test_a_copy_of_an_attached_model_has_hooks_of_its_own(model: PeftModel) -> None:
    cache = LoRASharedCache(model)
    run(model, cache, IDS[:, :10])
    before = snapshot(cache)
    twin = copy.deepcopy(model)
    other = LoRASharedCache(twin)
    expected = run(model, LoRASharedCache(model), IDS)
    assert torch.equal(run(twin, other, IDS), expected)
    assert_same_state(snapshot(cache), before)
    detach(twin)
    assert torch.equal(run(model, LoRASharedCache(model), IDS), expected)


# --- importing --------------------------------------------------------------------------------------------------------


def python(code: str) -> None:
    """Run ``code`` in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_importing_registers_and_patches_nothing() -> None:
    python(
        """
        import torch, transformers, peft
        from transformers import AttentionInterface
        from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
        from transformers.masking_utils import AttentionMaskInterface
        from peft.tuners.lora import layer
        watched = [torch.nn.Module, torch.Tensor, transformers.PreTrainedModel, transformers.GenerationMixin, Cache,
                   CacheLayerMixin, DynamicCache, peft.PeftModel, layer.LoraLayer, layer.Linear, layer.LoraVariant]
        names = lambda: (sorted(AttentionInterface().valid_keys()), sorted(AttentionMaskInterface().valid_keys()))
        before = [dict(vars(cls)) for cls in watched], names()
        import lragent_hf
        assert ([dict(vars(cls)) for cls in watched], names()) == before
        assert "lragent" not in names()[0] and "lragent" not in names()[1]
        """
    )


def test_importing_needs_no_triton() -> None:
    python(
        """
        import sys

        class NoTriton:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "triton":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, NoTriton())
        import lragent_hf
        assert "triton" not in sys.modules
        import torch
        from lragent_hf.errors import BackendUnavailableError
        q = torch.randn(1, 2, 3, 8)
        lragent_hf.flash_lora_attention(q, q, q)
        try:
            lragent_hf.flash_lora_attention(q, q, q, backend="triton")
        except BackendUnavailableError:
            pass
        else:
            raise AssertionError("backend='triton' ran without triton")
        """
    )


# --- forwards that break off ------------------------------------------------------------------------------------------


def turns(model: PeftModel, cache: LoRASharedCache, moment: str) -> tuple[str, Tensor]:
    """Bring the cache to the moment before the forward that will break off: who runs it, and the whole prompt."""
    if moment == "first":
        return "plan", IDS[:, :12]
    run(model, cache, IDS[:, :12])
    run(model, cache, IDS[:, :13])
    if moment == "decode":
        return "plan", IDS[:, :14]
    if moment == "prefill":
        return "plan", IDS[:, :30]
    if moment == "grow":  # beyond the capacity of the buffers that are there
        return "plan", torch.cat([IDS[:, :13], tokens(400, seed=3)], 1)
    return "act", IDS[:, :30]  # "handover": LR prefill, or a window that is overwritten


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("index", LAYERS)
@pytest.mark.parametrize("moment", ["first", "decode", "prefill", "grow", "handover"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_exception_leaves_the_last_whole_state(
    model: PeftModel, scheme: str, moment: str, index: int, name: str
) -> None:
    check_broken_forward(model, index, name, moment, scheme=scheme)


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("index", LAYERS)
@pytest.mark.parametrize("window", [5, 100])
@pytest.mark.parametrize("scheme", WITH_WINDOW)
def test_an_exception_while_a_window_is_overwritten_leaves_the_last_whole_state(
    model: PeftModel, scheme: str, window: int, index: int, name: str
) -> None:
    check_broken_forward(model, index, name, "handover", scheme=scheme, handover_window=window)


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_exception_with_kept_attention_leaves_the_last_whole_state(model: PeftModel, scheme: str, name: str) -> None:
    check_broken_forward(model, 1, name, "handover", scheme=scheme, attention="keep")


def check_broken_forward(model: PeftModel, index: int, name: str, moment: str, **options: Any) -> None:
    cache, undisturbed = LoRASharedCache(model, **options), LoRASharedCache(model, **options)
    agent, prompt = turns(model, cache, moment)
    turns(model, undisturbed, moment)
    model.set_adapter(agent)
    before, length = snapshot(cache), cache.get_seq_length()
    for _ in range(2):
        with raising(place(model, index, name), Broken("inside")) as calls, pytest.raises(Broken, match="inside"):
            run(model, cache, prompt)
        assert calls == [1]
        assert_same_state(snapshot(cache), before)
        assert cache.get_seq_length() == length
        if moment == "first":
            assert cache.memory_report().reserved_bytes == 0
    assert torch.equal(run(model, cache, prompt), run(model, undisturbed, prompt))
    more = prompt
    for other in AGENTS:
        model.set_adapter(other)
        more = torch.cat([more, tokens(2, seed=5)], 1)
        assert torch.equal(run(model, cache, more), run(model, undisturbed, more))
    assert_same_state(snapshot(cache), snapshot(undisturbed))


@pytest.mark.parametrize("scheme", SPLITTING)
def test_an_exception_while_a_late_adapter_joins_leaves_the_last_whole_state(scheme: str) -> None:
    model = peft_model(shared=True)
    cache, undisturbed = (LoRASharedCache(model, scheme, agents=["plan"]) for _ in range(2))
    for each in (cache, undisturbed):
        run(model, each, IDS[:, :12])
    model.set_adapter("act")
    before = snapshot(cache)
    with raising(place(model, 2, "mlp"), Broken()), pytest.raises(Broken):
        run(model, cache, IDS[:, :30])
    assert_same_state(snapshot(cache), before)
    assert torch.equal(run(model, cache, IDS[:, :30]), run(model, undisturbed, IDS[:, :30]))
    assert_same_state(snapshot(cache), snapshot(undisturbed))


# --- Ctrl-C: torch calls no hook for it -------------------------------------------------------------------------------


def interrupt(model: PeftModel, cache: LoRASharedCache, prompt: Tensor, index: int = 1, name: str = "mlp") -> None:
    with raising(place(model, index, name), KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        run(model, cache, prompt)


@pytest.fixture(params=[(scheme, 0) for scheme in SCHEMES] + [(scheme, 6) for scheme in WITH_WINDOW], ids=str)
def interrupted(request: pytest.FixtureRequest, model: PeftModel) -> tuple[LoRASharedCache, LoRASharedCache]:
    """A cache whose hand-over to act was interrupted, and one where act did not begin."""
    scheme, window = request.param
    cache, undisturbed = (LoRASharedCache(model, scheme, handover_window=window) for _ in range(2))
    for each in (cache, undisturbed):
        model.set_adapter("plan")
        run(model, each, IDS[:, :20])
    model.set_adapter("act")
    interrupt(model, cache, IDS[:, :30])
    return cache, undisturbed


def check_same(model: PeftModel, cache: LoRASharedCache, undisturbed: LoRASharedCache) -> None:
    assert_same_state(snapshot(cache), snapshot(undisturbed))
    for stop, name in ((30, "act"), (31, "act"), (36, "reflect"), (40, "plan")):
        model.set_adapter(name)
        assert torch.equal(run(model, cache, IDS[:, :stop]), run(model, undisturbed, IDS[:, :stop]))
    assert_same_state(snapshot(cache), snapshot(undisturbed))


Interrupted = tuple[LoRASharedCache, LoRASharedCache]


def test_after_ctrl_c_the_same_forward_runs(model: PeftModel, interrupted: Interrupted) -> None:
    cache, undisturbed = interrupted
    assert torch.equal(run(model, cache, IDS[:, :30]), run(model, undisturbed, IDS[:, :30]))
    model.set_adapter("reflect")
    assert torch.equal(run(model, cache, IDS[:, :35]), run(model, undisturbed, IDS[:, :35]))
    assert_same_state(snapshot(cache), snapshot(undisturbed))


@pytest.mark.parametrize("agent", AGENTS)
def test_after_ctrl_c_any_agent_generates(model: PeftModel, interrupted: Interrupted, agent: str) -> None:
    cache, undisturbed = interrupted
    model.set_adapter(agent)
    assert cache.get_seq_length() == undisturbed.get_seq_length()
    got = write(model, IDS[:, :30], 4, cache)
    assert torch.equal(got, write(model, IDS[:, :30], 4, undisturbed))
    assert_same_state(snapshot(cache), snapshot(undisturbed))


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda cache: cache.crop(-2), id="crop"),
        pytest.param(lambda cache: cache.align(IDS[:, :15]), id="align"),
        pytest.param(lambda cache: cache.reset(), id="reset"),
        pytest.param(lambda cache: cache.batch_repeat_interleave(1), id="repeat"),
        pytest.param(lambda cache: cache.reorder_cache(torch.tensor([0])), id="reorder"),
        pytest.param(
            lambda cache: (cache.agents, cache.memory_report().in_use_bytes, cache.get_seq_length()), id="look"
        ),
    ],
)
def test_after_ctrl_c_whole_cache_operations_are_right(
    model: PeftModel, interrupted: Interrupted, operation: Any
) -> None:
    cache, undisturbed = interrupted
    assert operation(cache) == operation(undisturbed)
    write(model, IDS[:, :3], 1)  # anything that ends the interrupted forward, should the operation not have
    check_same(model, cache, undisturbed)


def test_after_ctrl_c_a_copy_is_right(model: PeftModel, interrupted: Interrupted) -> None:
    cache, undisturbed = interrupted
    check_same(model, copy.deepcopy(cache), undisturbed)


def test_after_ctrl_c_the_lengths_are_those_before(model: PeftModel, interrupted: Interrupted) -> None:
    cache, undisturbed = interrupted
    for name in AGENTS:
        model.set_adapter(name)
        assert cache.get_seq_length() == undisturbed.get_seq_length()
        keys, expected = cache.layers[0].keys, undisturbed.layers[0].keys
        assert (keys is None) == (expected is None)
        assert keys is None or torch.equal(keys, expected)


@pytest.mark.parametrize("index", LAYERS)
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_after_ctrl_c_other_forwards_are_bit_equal(model: PeftModel, scheme: str, name: str, index: int) -> None:
    before = stock_logits(model)
    cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :20])
    interrupt(model, cache, IDS, index, name)
    assert all_equal(stock_logits(model), before)
    assert model.config._attn_implementation == "sdpa"
    interrupt(model, cache, IDS, index, name)
    assert torch.equal(write(model, IDS[:, :9], 3), write(copy.deepcopy(model), IDS[:, :9], 3))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_after_ctrl_c_another_cache_of_the_model_works(model: PeftModel, scheme: str) -> None:
    cache, other = LoRASharedCache(model, scheme), LoRASharedCache(model, scheme)
    run(model, other, IDS[:, :10])
    expected = run(model, LoRASharedCache(model, scheme), IDS)
    interrupt(model, cache, IDS)
    other.crop(-3)
    run(model, other, IDS[:, :9])
    interrupt(model, cache, IDS)
    other.crop(-9)
    assert torch.equal(run(model, other, IDS), expected)
    assert torch.equal(run(model, cache, IDS), expected)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_after_ctrl_c_detach_leaves_nothing(model: PeftModel, scheme: str) -> None:
    before, logits = hook_census(model), stock_logits(model)
    cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :20])
    interrupt(model, cache, IDS)
    detach(model)
    assert hook_census(model) == before
    assert model.config._attn_implementation == "sdpa"
    assert all_equal(stock_logits(model), logits)


# --- merging and training on an attached model ------------------------------------------------------------------------


def weights(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("broken_off", [False, True], ids=["whole", "after ctrl-c"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_merging_and_unmerging_equal_an_unattached_model(scheme: str, broken_off: bool, safe: bool) -> None:
    model = peft_model(shared=True)
    plain = copy.deepcopy(model)
    cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :20])
    if broken_off:
        interrupt(model, cache, IDS)
    for each in (model, plain):
        each.merge_adapter(safe_merge=safe)
    assert all_equal(weights(model), weights(plain))
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, plain(IDS).logits)
    for each in (model, plain):
        each.unmerge_adapter()
    assert all_equal(weights(model), weights(plain))
    got, want = model.merge_and_unload(safe_merge=safe), plain.merge_and_unload(safe_merge=safe)
    assert all_equal(weights(got), weights(want))


@pytest.mark.parametrize("when", ["attached", "between turns", "after ctrl-c"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_training_steps_equal_those_of_an_unattached_model(scheme: str, when: str) -> None:
    model = peft_model(shared=True, lora_dropout=0.1)
    plain = copy.deepcopy(model)
    cache = LoRASharedCache(model, scheme)
    if when != "attached":
        run(model, cache, IDS[:, :20])
    if when == "after ctrl-c":
        interrupt(model, cache, IDS)
    for each in (model, plain):
        each.train()
        torch.manual_seed(7)
        optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
        for seed in range(2):
            batch = tokens(16, rows=2, seed=seed)
            each(input_ids=batch, labels=batch, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        each.eval()
    assert all_equal(weights(model), weights(plain))
    assert not all_equal(weights(model), weights(peft_model(shared=True, lora_dropout=0.1)))
