"""Models that accelerate spreads over devices, or offloads: every buffer where its layer runs, results as in one place."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from devices import Devices, There, here, known_to_transformers
from peft import PeftModel
from tiny import SCHEMES, SPLITTING, assert_close, peft_model, run, tokens, turn, write
from torch import Tensor

from lragent_hf import AgentTrajectory, LoRASharedCache, audit, layer_similarity, share_lora_A
from lragent_hf.errors import AdapterChangedError, CacheModelMismatchError, UnsupportedAdapterError

IDS = tokens(40)
TURNS = (("plan", 12), ("act", 20), ("reflect", 24), ("plan", 30), ("plan", 31), (None, 33))
ALL = ["q_proj", "k_proj", "v_proj", "o_proj"]
TREE = "base_model.model."
LAYERS = ("lazy:0", "lazy:1", "lazy:1")


def two_devices(model: PeftModel, folder: Path) -> PeftModel:
    """Layer 0 on one, the others on another."""
    places = {f"model.layers.{index}": device for index, device in enumerate(LAYERS)}
    places |= {
        "model.embed_tokens": "lazy:0",
        "model.rotary_emb": "lazy:0",
        "model.norm": "lazy:1",
        "lm_head": "lazy:1",
    }
    return dispatch_model(model, {TREE + name: device for name, device in places.items()})


def on_disk(model: PeftModel, folder: Path) -> PeftModel:
    disk_offload(model, str(folder / "weights"), execution_device=torch.device("cpu"))
    return model


def in_memory(model: PeftModel, folder: Path) -> PeftModel:
    cpu_offload(model, execution_device=torch.device("cpu"))
    return model


def in_memory_of_another(model: PeftModel, folder: Path) -> PeftModel:
    """Runs on a device, lies in CPU memory: what ``device_map="auto"`` does with what does not fit."""
    cpu_offload(model, execution_device=torch.device("lazy:0"))
    return model


PLACES: dict[str, Callable[[PeftModel, Path], PeftModel]] = {
    "two devices": two_devices,
    "on disk": on_disk,
    "in memory of another": in_memory_of_another,
}


def devices() -> Devices:
    """Devices that are not there, where the installed transformers runs on such."""
    if not known_to_transformers():
        pytest.skip("this transformers asks torch about devices that are not there")
    return Devices()


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[PeftModel], PeftModel]]:
    """Puts a model there. Within it the devices exist."""
    with devices() if "two" in request.param or "another" in request.param else nullcontext():
        yield lambda model: PLACES[request.param](model, tmp_path)


def conversation(model: PeftModel, cache: LoRASharedCache) -> list[Tensor]:
    return [here(turn(model, cache, agent, IDS[:, :stop])) for agent, stop in TURNS]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert_close(mine, theirs)


def made(place: Callable[[PeftModel], PeftModel], **options: Any) -> tuple[PeftModel, PeftModel]:
    """The same model twice: in one place, and there."""
    return peft_model(**options), place(peft_model(**options))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_turns(place: Any, scheme: str) -> None:
    plain, placed = made(place, shared=True, target_modules=ALL)
    cache = LoRASharedCache(placed, scheme)
    assert_same(conversation(placed, cache), conversation(plain, LoRASharedCache(plain, scheme)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_buffer_lies_where_its_layer_runs(scheme: str, tmp_path: Path) -> None:
    with devices():
        model = two_devices(peft_model(shared=True, target_modules=ALL), tmp_path)
        cache = LoRASharedCache(model, scheme)
        conversation(model, cache)
        for layer, device in zip(cache.layers, LAYERS, strict=True):
            found = {rows.device for buffer in layer.buffers() for rows in buffer._all_rows()}
            assert found == {torch.device(device)}
            assert layer.work["k"].buffer.data is None or layer.work["k"].buffer.data.device == torch.device(device)
        if cache.scheme.splits_values:
            assert {device for _, device in cache.rotary.groups} == {torch.device("lazy:0"), torch.device("lazy:1")}
            for bank in cache.roster.banks.values():
                for site, stack in zip(cache.binding.sites(True), bank.stacks, strict=True):
                    assert stack is not None
                    assert stack.device == torch.device(LAYERS[int(site.name.split(".")[1])])


@pytest.mark.parametrize(
    "options",
    [{"attention": "keep"}, {"offload": True}, {"key_working_copy": False}, {"value_working_copy": True}],
    ids=str,
)
def test_options(place: Any, options: dict[str, Any]) -> None:
    plain, placed = made(place, target_modules=ALL)
    cache = LoRASharedCache(placed, **options)
    assert_same(conversation(placed, cache), conversation(plain, LoRASharedCache(plain, **options)))
    if "offload" in options:
        assert {rows.device.type for layer in cache.layers for b in layer.buffers() for rows in b._all_rows()} == {
            "cpu"
        }


@pytest.mark.parametrize("scheme", ["full_shared", "base_lr_stacked"])
def test_a_hand_over_window(place: Any, scheme: str) -> None:
    plain, placed = made(place, shared=True, target_modules=ALL)
    want = conversation(plain, LoRASharedCache(plain, scheme, handover_window=7))
    assert_same(conversation(placed, LoRASharedCache(placed, scheme, handover_window=7)), want)


def test_recomputed_layers_and_hidden_states(place: Any) -> None:
    plain, placed = made(place)
    options: dict[str, Any] = {"recompute_layers": [1], "hidden_cache": True}
    cache = LoRASharedCache(placed, "droidspeak", **options)
    assert_same(conversation(placed, cache), conversation(plain, LoRASharedCache(plain, "droidspeak", **options)))


@pytest.mark.parametrize("scheme", ["base_shared", "base_lr_stacked"])
def test_padded_rows_chosen_cut_and_forked(place: Any, scheme: str) -> None:
    ids, mask = tokens(30, rows=3), torch.ones(3, 30, dtype=torch.long)
    mask[1, :4] = mask[2, :1] = 0
    found = []
    for model in made(place, shared=True, target_modules=ALL):
        cache = LoRASharedCache(model, scheme)
        out = [turn(model, cache, agent, ids[:, :stop], mask[:, :stop]) for agent, stop in (("plan", 9), ("act", 15))]
        cache.batch_select_indices(torch.tensor([2, 0]))
        kept, rows = ids[[2, 0]], mask[[2, 0]]
        out.append(turn(model, cache, "act", kept[:, :17], rows[:, :17]))
        branch = cache.fork()
        for one in (cache, branch):
            model.set_adapter("act")
            one.crop(-3)
            out.append(turn(model, one, "reflect", kept[:, :19], rows[:, :19]))
        cache.batch_select_indices(torch.tensor([1]))
        assert cache.align(kept[1, :10]) == 9
        out.append(turn(model, cache, "plan", kept[1:, :12], rows[1:, :12]))
        found.append([here(one) for one in out])
    assert_same(found[1], found[0])


@pytest.mark.parametrize("scheme", ["base_shared", "base_lr_stacked"])
def test_generate(place: Any, scheme: str) -> None:
    found = []
    for model in made(place, shared=True):
        cache, ids = LoRASharedCache(model, scheme), IDS[:, :9]
        for agent in ("plan", "act", "reflect", "plan"):
            model.set_adapter(agent)
            found.append(here(write(model, ids, 5, cache)))
            ids = torch.cat([found[-1], IDS[:, :2]], dim=1)
    for mine, theirs in zip(found[4:], found[:4], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("scheme", ["base_shared", "base_lr_stacked"])
def test_saved_and_loaded(place: Any, scheme: str, tmp_path: Path) -> None:
    """On one model and read on the other, both ways."""
    models = made(place, shared=True, target_modules=ALL)
    want = None
    for number, (first, second) in enumerate([models[:1] * 2, models, models[::-1]]):
        cache = LoRASharedCache(first, scheme)
        turn(first, cache, "plan", IDS[:, :12])
        turn(first, cache, "act", IDS[:, :20])
        cache.save(tmp_path / str(number))
        loaded = LoRASharedCache.load(second, tmp_path / str(number))
        got = [here(turn(second, loaded, agent, IDS[:, :stop])) for agent, stop in (("act", 22), ("reflect", 30))]
        want = want or got
        assert_same(got, want)


def test_rows_with_adapters_of_their_own(tmp_path: Path) -> None:
    """On the disk: what PEFT does then, devices that are not there cannot."""
    ids, found = tokens(20, rows=2), []
    for model in made(lambda model: on_disk(model, tmp_path), target_modules=ALL):
        cache = LoRASharedCache(model)
        run(model, cache, ids[:, :9])
        found.append([here(run(model, cache, ids[:, :stop], adapter_names=["act", "reflect"])) for stop in (15, 16)])
    assert_same(found[1], found[0])


def test_adapters_that_share_a(place: Any) -> None:
    found = []
    for index in range(2):
        for frozen in (False, True):
            model = peft_model(adapters={"plan": {}, "act": {}, "reflect": {}})
            share_lora_A(model, ["plan", "act", "reflect"], source="plan" if frozen else None)
            model = place(model) if index else model
            found.append(conversation(model, LoRASharedCache(model, "base_lr_shared")))
    for mine, theirs in zip(found[2:], found[:2], strict=True):
        assert_same(mine, theirs)


TRAJECTORY = AgentTrajectory(IDS[0], [(agent, stop) for agent, stop in TURNS[:4] if agent])


def test_audit(place: Any) -> None:
    plain, placed = (audit(model, [TRAJECTORY], windows=[0, 5], layers=False) for model in made(place))
    for mine, theirs in zip(placed.rows, plain.rows, strict=True):
        assert mine.kl == pytest.approx(theirs.kl, rel=1e-3)


def test_layer_similarity(tmp_path: Path) -> None:
    plain, placed = (
        layer_similarity(model, [TRAJECTORY])
        for model in made(lambda model: on_disk(model, tmp_path), target_modules=ALL)
    )
    for mine, theirs in zip(placed.rows, plain.rows, strict=True):
        assert mine.lr_cache == pytest.approx(theirs.lr_cache, abs=1e-5)
        assert mine.adapter_output == pytest.approx(theirs.adapter_output, abs=1e-5)


@pytest.mark.parametrize("scheme", SPLITTING)
def test_dora(scheme: str, tmp_path: Path) -> None:
    """Over two devices as ever; offloaded it is refused, for a gain is a norm over the base weight."""
    options: dict[str, Any] = {"shared": True, "use_dora": True}
    want = conversation(plain := peft_model(**options), LoRASharedCache(plain, scheme))
    with devices():
        model = two_devices(peft_model(**options), tmp_path)
        assert_same(conversation(model, LoRASharedCache(model, scheme)), want)
    model = in_memory(peft_model(**options), tmp_path)
    with pytest.raises(UnsupportedAdapterError, match=r"'plan' is DoRA.*offloaded.*full_shared"):
        LoRASharedCache(model, scheme)


@pytest.mark.parametrize("scheme", SPLITTING)
def test_an_offloaded_a_that_was_edited_is_found(scheme: str, tmp_path: Path) -> None:
    model = in_memory(peft_model(shared=True), tmp_path)
    cache = LoRASharedCache(model, scheme)
    conversation(model, cache)
    v_proj = model.get_base_model().model.layers[1].self_attn.v_proj
    a, base = (part._hf_hook.weights_map["weight"] for part in (v_proj.lora_A["act"], v_proj.base_layer))
    kept = a.clone()
    a.mul_(1.5)
    with pytest.raises(AdapterChangedError, match=r"'act' at layers\.1\.self_attn\.v_proj"):
        turn(model, cache, "act", IDS)
    a.copy_(kept)
    cache.save(tmp_path / "saved")
    base.add_(0.1)
    with pytest.raises(CacheModelMismatchError, match=r"base weights of layers\.1\.self_attn\.v_proj"):
        LoRASharedCache.load(model, tmp_path / "saved")


def test_the_devices_refuse_to_meet() -> None:
    """What these tests rest on."""
    with devices(), ExitStack() as stack:
        one, two = torch.ones(3, device="lazy:0"), torch.ones(3, device="lazy:1")
        assert isinstance(one, There)
        assert here((one + 1).sum()) == 6
        stack.enter_context(pytest.raises(RuntimeError, match="one device"))
        one + two
