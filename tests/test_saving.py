"""A cache on disk: it comes back as it was, or not at all."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import (
    SCHEMES,
    WITH_WINDOW,
    assert_close,
    assert_same_state,
    base_model,
    config,
    peft_model,
    randomise,
    run,
    snapshot,
    tokens,
    turn,
)
from transformers import Phi3Config

from lragent_hf import CACHE_ARG, LoRASharedCache, attach, checkpoint
from lragent_hf.errors import CacheFileError, CacheModelMismatchError, LRAgentError, SharedAMismatchError

IDS = tokens(60)


@pytest.fixture(scope="module")
def model() -> PeftModel:
    return peft_model(shared=True)


def saved(model: PeftModel, scheme: str, path: Path, **options: Any) -> LoRASharedCache:
    cache = LoRASharedCache(model, scheme=scheme, **options)
    turn(model, cache, "plan", IDS[:, :20])
    turn(model, cache, "act", IDS[:, :30])
    cache.save(path)
    return cache


@pytest.mark.parametrize(
    "state", ["two agents", "window half run", "padded rows", "base agent", "empty", "fork", "late"]
)
def test_what_is_loaded_is_what_was_saved(model: PeftModel, scheme: str, state: str, tmp_path: Path) -> None:
    window = 6 if state == "window half run" and scheme in WITH_WINDOW else 0
    agents = ["plan"] if state == "late" else None
    cache = LoRASharedCache(model, scheme=scheme, handover_window=window, agents=agents)
    mask = torch.ones(1, 60, dtype=torch.long)
    ids = IDS
    if state == "padded rows":
        ids, mask = tokens(60, 3), torch.ones(3, 60, dtype=torch.long)
        mask[1, :4] = 0
    if state != "empty":
        turn(model, cache, "plan", ids[:, :20], mask[:, :20])
        turn(model, cache, None if state == "base agent" else "act", ids[:, :30], mask[:, :30])
    if state == "window half run":
        model.set_adapter("plan")
        with torch.no_grad():
            past = cache.get_seq_length()
            model(ids[:, past : past + 2], **{CACHE_ARG: cache})
    if state == "fork":
        cache = cache.fork()
        turn(model, cache, "plan", ids[:, :33])
    cache.save(tmp_path / "cache")
    loaded = LoRASharedCache.load(model, tmp_path / "cache")
    assert_same_state(snapshot(loaded), snapshot(cache))
    assert loaded.agents == cache.agents
    assert loaded.scheme == cache.scheme
    assert loaded.handover_window == window
    for agent, stop in (("reflect", 40), ("act", 44), ("act", 45), ("plan", 60)):
        got, want = (turn(model, one, agent, ids[:, :stop], mask[:, :stop]) for one in (loaded, cache))
        attended = mask[:, stop - want.shape[1] : stop].bool()
        assert_close(got[attended], want[attended])
    assert_same_sizes(loaded, cache)


def assert_same_sizes(left: LoRASharedCache, right: LoRASharedCache) -> None:
    assert left.memory_report().in_use_bytes == right.memory_report().in_use_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_back_bit_by_bit(scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = peft_model(shared=True).to(dtype)
    cache = saved(model, scheme, tmp_path / "cache")
    assert_same_state(snapshot(LoRASharedCache.load(model, tmp_path / "cache")), snapshot(cache))


def test_a_model_made_again_from_the_same_weights_fits(scheme: str, tmp_path: Path) -> None:
    """Another process, so to speak: the same base and adapters, loaded anew."""
    first = peft_model(shared=True)
    cache = saved(first, scheme, tmp_path / "cache")
    again = peft_model(shared=True)
    assert_same_state(snapshot(LoRASharedCache.load(again, tmp_path / "cache")), snapshot(cache))


def other_base(model: PeftModel) -> PeftModel:
    model.get_base_model().model.layers[1].self_attn.v_proj.base_layer.weight.data[3, 4] += 1e-3
    return model


def other_a(model: PeftModel) -> PeftModel:
    model.get_base_model().model.layers[2].self_attn.v_proj.lora_A["act"].weight.data[0, 0] += 1e-3
    return model


def without_act(model: PeftModel) -> PeftModel:
    model.delete_adapter("act")
    return model


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_base, ["layers.1.self_attn.v_proj", "base weights"]),
        (other_a, ["'act'", "layers.2.self_attn.v_proj"]),
        (without_act, ["'act'", "not loaded"]),
        (lambda model: model.to(torch.bfloat16), ["dtype", "bfloat16"]),
        (lambda model: peft_model(config(num_hidden_layers=2), shared=True), ["layers", "2"]),
        (lambda model: peft_model(config("qwen2"), shared=True), ["class", "Qwen2"]),
    ],
    ids=["base", "A", "missing", "dtype", "layers", "class"],
)
def test_what_does_not_fit_is_refused_by_name(scheme: str, change: Any, words: list[str], tmp_path: Path) -> None:
    saved(peft_model(shared=True), scheme, tmp_path / "cache")
    kinds = (CacheModelMismatchError, SharedAMismatchError)  # the latter of the scheme, where it needs one A
    with pytest.raises(kinds) as caught:
        LoRASharedCache.load(change(peft_model(shared=True)), tmp_path / "cache")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("seed", range(12))
def test_damaged_files_are_refused(model: PeftModel, tmp_path: Path, seed: int) -> None:
    """Bits flipped, bytes cut or added, in either file: never a wrong cache, never a raw error."""
    pick = random.Random(seed)
    saved(model, SCHEMES[seed % len(SCHEMES)], tmp_path / "cache")
    for name in ("manifest.json", "cache.safetensors"):
        path = tmp_path / "cache" / name
        whole = path.read_bytes()
        for _ in range(20):
            data = bytearray(whole)
            kind = pick.choice(("flip", "cut", "add", "zero", "empty"))
            place = pick.randrange(len(data))
            if kind == "flip":
                data[place] ^= 1 << pick.randrange(8)
            elif kind == "cut":
                del data[place:]
            elif kind == "add":
                data += bytes(pick.randrange(1, 9))
            elif kind == "zero":
                data[place : place + 64] = bytes(len(data[place : place + 64]))
            else:
                data = bytearray()
            if bytes(data) == whole or data.strip() == whole.strip():
                continue
            path.write_bytes(data)
            with pytest.raises(CacheFileError, match=r"damaged|holds no saved cache"):
                LoRASharedCache.load(model, tmp_path / "cache")
        path.write_bytes(whole)
    LoRASharedCache.load(model, tmp_path / "cache")


def test_a_missing_file_or_folder_is_refused(model: PeftModel, tmp_path: Path) -> None:
    with pytest.raises(CacheFileError, match="holds no saved cache"):
        LoRASharedCache.load(model, tmp_path / "nowhere")
    saved(model, "base_shared", tmp_path / "cache")
    (tmp_path / "cache" / "cache.safetensors").unlink()
    with pytest.raises(CacheFileError, match="cannot be read"):
        LoRASharedCache.load(model, tmp_path / "cache")


def test_a_crash_between_the_renames_loses_nothing(model: PeftModel, tmp_path: Path) -> None:
    cache = saved(model, "base_lr_stacked", tmp_path / "cache")
    os.rename(tmp_path / "cache", tmp_path / ".cache.old.x")
    with pytest.raises(CacheFileError, match=r"interrupted; rename one of .*\.cache\.old\.x"):
        LoRASharedCache.load(model, tmp_path / "cache")
    os.rename(tmp_path / ".cache.old.x", tmp_path / "cache")
    assert_same_state(snapshot(LoRASharedCache.load(model, tmp_path / "cache")), snapshot(cache))


@pytest.mark.parametrize("broken", [1, 2], ids=["the old one away", "the new one in"])
def test_a_rename_that_fails_leaves_the_old_cache(
    model: PeftModel, broken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = saved(model, "base_lr_stacked", tmp_path / "cache")
    before, rename, calls = snapshot(cache), os.rename, []

    def sometimes(source: Any, target: Any) -> None:
        calls.append(source)
        if len(calls) == broken:
            raise OSError("no permission")
        rename(source, target)

    turn(model, cache, "plan", IDS[:, :50])
    monkeypatch.setattr(os, "rename", sometimes)
    with pytest.raises(OSError, match="no permission"):
        cache.save(tmp_path / "cache")
    assert os.listdir(tmp_path) == ["cache"]
    assert_same_state(snapshot(LoRASharedCache.load(model, tmp_path / "cache")), before)


def test_another_format_is_refused(model: PeftModel, tmp_path: Path) -> None:
    saved(model, "base_shared", tmp_path / "cache")
    path = tmp_path / "cache" / "manifest.json"
    manifest = json.loads(path.read_text())["manifest"] | {"version": 2}
    path.write_text(json.dumps({"sha256": checkpoint._json_digest(manifest), "manifest": manifest}))
    with pytest.raises(CacheFileError, match="version 2"):
        LoRASharedCache.load(model, tmp_path / "cache")


def test_saving_again_replaces_and_leaves_nothing_behind(model: PeftModel, scheme: str, tmp_path: Path) -> None:
    cache = saved(model, scheme, tmp_path / "cache")
    turn(model, cache, "plan", IDS[:, :50])
    cache.save(tmp_path / "cache")
    assert os.listdir(tmp_path) == ["cache"]
    assert_same_state(snapshot(LoRASharedCache.load(model, tmp_path / "cache")), snapshot(cache))


@pytest.mark.parametrize("step", ["save_file", "_flush", "_exchange"])
def test_saving_that_breaks_off_leaves_the_old_cache(
    model: PeftModel, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = saved(model, "base_lr_stacked", tmp_path / "cache")
    before = snapshot(cache)

    def fail(*_: Any) -> None:
        raise OSError("no space left on device")

    turn(model, cache, "plan", IDS[:, :50])
    monkeypatch.setattr(checkpoint, step, fail)
    with pytest.raises(OSError, match="no space left"):
        cache.save(tmp_path / "cache")
    assert os.listdir(tmp_path) == ["cache"]
    assert_same_state(snapshot(LoRASharedCache.load(model, tmp_path / "cache")), before)


def test_a_folder_that_is_something_else_is_left_alone(model: PeftModel, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    cache = LoRASharedCache(model)
    turn(model, cache, "plan", IDS[:, :9])
    for path in (tmp_path / "thesis", tmp_path / "thesis" / "chapter1.tex"):
        with pytest.raises(FileExistsError, match="not a saved cache"):
            cache.save(path)
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    cache.save(tmp_path / "empty")
    assert_same_state(snapshot(LoRASharedCache.load(model, tmp_path / "empty")), snapshot(cache))


def test_a_loaded_cache_checks_what_it_is_continued_with(model: PeftModel, scheme: str, tmp_path: Path) -> None:
    saved(model, scheme, tmp_path / "cache")
    loaded = LoRASharedCache.load(model, tmp_path / "cache")
    before = snapshot(loaded)
    model.set_adapter("reflect")
    wrong = IDS[:, :40].clone()
    wrong[0, 0] = wrong[0, 0] % 90 + 1
    if scheme in ("non_shared", "base_shared"):  # where the next agent runs the first token again
        with pytest.raises(LRAgentError):
            run(model, loaded, wrong)
    other = base_model(config())
    attach(other)
    with pytest.raises(LRAgentError):
        run(other, loaded, IDS[:, :40])
    assert_same_state(snapshot(loaded), before)


def test_a_model_with_fused_projections(tmp_path: Path) -> None:
    """No v_proj to take a digest of: the embedding stands for the model."""
    small = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
    base = base_model(Phi3Config(**small, num_attention_heads=6, num_key_value_heads=2, bos_token_id=None))
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["qkv_proj"]), adapter_name="plan").eval()
    randomise(model, seed=0)
    cache = LoRASharedCache(model, scheme="full_shared")
    run(model, cache, IDS[:, :20])
    cache.save(tmp_path / "cache")
    loaded = LoRASharedCache.load(model, tmp_path / "cache")
    assert_close(run(model, loaded, IDS[:, :30]), run(model, cache, IDS[:, :30]))
    base.get_input_embeddings().weight.data[0, 0] += 1
    with pytest.raises(CacheModelMismatchError, match="input embedding"):
        LoRASharedCache.load(model, tmp_path / "cache")


def test_what_is_not_all_ours_is_left_alone(tmp_path: Path) -> None:
    """A manifest.json of somebody else's, and files beside a saved cache."""
    model = peft_model()
    cache = LoRASharedCache(model)
    run(model, cache, IDS[:, :10])
    cache.save(tmp_path / "saved")
    (tmp_path / "saved" / "notes.txt").write_text("mine")
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "manifest.json").write_text('{"name": "an app"}')
    for name in ("saved", "app"):
        before = {one: one.read_bytes() for one in (tmp_path / name).iterdir()}
        with pytest.raises(FileExistsError, match="not a saved cache"):
            cache.save(tmp_path / name)
        assert {one: one.read_bytes() for one in (tmp_path / name).iterdir()} == before


def test_a_link_to_a_saved_cache_is_followed(tmp_path: Path) -> None:
    model = peft_model()
    cache = LoRASharedCache(model)
    run(model, cache, IDS[:, :10])
    cache.save(tmp_path / "saved")
    (tmp_path / "link").symlink_to(tmp_path / "saved")
    run(model, cache, IDS[:, :12])
    cache.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert LoRASharedCache.load(model, tmp_path / "saved").get_seq_length() == 12
