"""What the cache says about its memory is true to the byte, and sharing is sharing."""

import gc
import weakref
from typing import Any

import pytest
import torch
from peft import PeftModel
from tiny import AGENTS, SCHEMES, SPLITTING, active, assert_same_state, config, peft_model, run, snapshot, tokens, write
from torch import Tensor
from transformers import DynamicCache

from lragent_hf import LoRASharedCache
from lragent_hf.buffer import _SPARE, GrowableBuffer

IDS = tokens(60)
LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 8
TOKEN = KV_HEADS * HEAD_DIM * LAYERS  # elements of K, or of V, that a token takes
TURNS = (("plan", 10), ("act", 15), ("plan", 21), ("reflect", 30), ("act", 34))


def trajectory(model: PeftModel, cache: LoRASharedCache, rows: int = 1) -> None:
    ids = tokens(40, rows)
    for name, stop in TURNS:
        model.set_adapter(name)
        run(model, cache, ids[:, :stop])


def up(rank: int, itemsize: int) -> int:
    """LR columns start at multiples of 16 bytes."""
    align = 16 // itemsize
    return -(-rank // align) * align


def expected(scheme: str, ranks: dict[str, int], itemsize: int) -> tuple[dict[str, int], int]:
    """Bytes by part, and unshared, of a row after TURNS."""
    total = TURNS[-1][1]
    read = dict.fromkeys(ranks, 0)
    for name, stop in TURNS:
        read[name] = stop
    unshared = 2 * TOKEN * itemsize * total * len(ranks)
    if scheme == "non_shared":
        whole = sum(read.values()) * TOKEN * itemsize
        return {"K": whole, "V": whole}, unshared
    parts = {"K": total * TOKEN * itemsize, "V" if scheme == "full_shared" else "V_base": total * TOKEN * itemsize}
    if scheme == "base_shared":
        parts["LR"] = sum(read[name] * up(rank, itemsize) for name, rank in ranks.items()) * LAYERS * itemsize
    elif scheme == "base_lr_shared":
        parts["LR"] = total * up(max(ranks.values()), itemsize) * LAYERS * itemsize
    elif scheme == "base_lr_stacked":
        parts["LR"] = total * sum(up(rank, itemsize) for rank in ranks.values()) * LAYERS * itemsize
    return parts, unshared


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_in_use_are_exact(scheme: str, dtype: torch.dtype, rows: int) -> None:
    shared = scheme == "base_lr_shared"
    ranks = {"plan": 5, "act": 8, "reflect": 3} if not shared else dict.fromkeys(AGENTS, 5)
    model = peft_model(adapters={name: {"r": rank} for name, rank in ranks.items()}, shared=shared).to(dtype)
    cache = LoRASharedCache(model, scheme)
    trajectory(model, cache, rows)
    parts, unshared = expected(scheme, ranks, dtype.itemsize)
    report = cache.memory_report()
    got: dict[str, int] = {}
    for row in report.rows:
        got[row.part] = got.get(row.part, 0) + row.in_use_bytes
    assert got == {part: rows * count for part, count in parts.items()}
    assert report.in_use_bytes == rows * sum(parts.values())
    assert report.unshared_bytes == rows * unshared
    assert report.record_bytes == rows * 34 * (8 + 1)
    assert report.scheme == scheme
    held = sum(buffer.data.nbytes for layer in cache.layers for buffer in layer.buffers())
    assert report.reserved_bytes == held >= report.in_use_bytes


@pytest.mark.parametrize("scheme", ["full_shared", "non_shared", "base_shared"])
def test_what_a_plain_cache_would_drop_from_sliding_windows_is_counted(scheme: str) -> None:
    """Layers 0 and 2 slide; what is beyond their window is all that a stock cache of each agent does not hold."""
    options = {"sliding_window": 8, "use_sliding_window": True}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model = peft_model(config("qwen2", layer_types=kinds, **options), target_modules=["q_proj"])
    cache, stock = LoRASharedCache(model, scheme), DynamicCache(config=model.config)
    assert cache.memory_report().beyond_window_bytes == 0
    run(model, cache, IDS[:, :7])
    assert cache.memory_report().beyond_window_bytes == 0
    for ids in (IDS[:, :20], IDS[:, :21]):
        run(model, cache, ids)
    run(model, stock, IDS[:, :21])
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in stock.layers)
    report = cache.memory_report()
    assert report.in_use_bytes - report.beyond_window_bytes == held
    assert "beyond sliding windows" in str(report)
    assert "beyond sliding windows" in report._repr_html_()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_follow_cuts_and_rows(scheme: str) -> None:
    model = peft_model(shared=True)
    cache = LoRASharedCache(model, scheme)
    assert cache.memory_report().in_use_bytes == cache.memory_report().reserved_bytes == 0
    run(model, cache, IDS[:, :20])
    of_twenty = cache.memory_report().in_use_bytes
    assert of_twenty > 0
    cache.crop(-10)
    assert cache.memory_report().in_use_bytes == of_twenty // 2
    cache.batch_repeat_interleave(4)
    assert cache.memory_report().in_use_bytes == 2 * of_twenty
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.memory_report().in_use_bytes == of_twenty // 2
    cache.crop(-10)
    assert cache.memory_report().in_use_bytes == cache.memory_report().reserved_bytes == 0
    run(model, cache, IDS[:, :20])
    cache.reset()
    assert cache.memory_report().reserved_bytes == 0
    assert not list(cache.layers[0].buffers())


def test_asking_for_the_report_changes_nothing() -> None:
    model = peft_model()
    for scheme in ("base_shared", "base_lr_stacked", "non_shared"):
        cache = LoRASharedCache(model, scheme)
        trajectory(model, cache)
        before = snapshot(cache)
        assert str(cache.memory_report()) == str(cache.memory_report())
        assert repr(cache) == repr(cache)
        assert_same_state(snapshot(cache), before)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_repr_names_scheme_agents_tokens_and_bytes(scheme: str) -> None:
    model = peft_model(shared=True)
    cache = LoRASharedCache(model, scheme)
    for text in (repr(cache), cache._repr_html_()):
        assert scheme in text
        assert "none yet" in text
    trajectory(model, cache)
    with model.disable_adapter():
        run(model, cache, IDS[:, :30] if scheme == "non_shared" else torch.cat([tokens(40)[:, :34], IDS[:, :3]], 1))
    report = cache.memory_report()
    for text in (repr(cache), cache._repr_html_()):
        assert scheme in text
        for name, read in cache.agents.items():
            assert f"{name} ({read})" in text
        assert f"{cache.ledger.total}" in text
        assert f"{report.in_use_bytes:,}" in text
        assert f"{report.reserved_bytes:,}" in text
        assert f"{report.unshared_bytes:,}" in text
    assert "base model" in repr(cache)


def test_the_report_prints_every_row_and_escapes_html() -> None:
    model = peft_model(adapters={"a<b>&c": {}, "act": {}})
    cache = LoRASharedCache(model)
    run(model, cache, IDS[:, :20])
    report = cache.memory_report()
    for row in report.rows:
        assert row.part in str(report)
        assert f"{row.in_use_bytes:,}" in str(report)
    html = cache._repr_html_() + report._repr_html_()
    assert "a<b" not in html
    assert "b>&c" not in html
    assert "a&lt;b&gt;&amp;c" in html


def test_the_window_shows_in_the_repr() -> None:
    assert "handover_window=7" in repr(LoRASharedCache(peft_model(), handover_window=7))


def test_three_agents_at_the_size_of_llama_8b() -> None:
    """32 layers, 8 kv heads of 128, rank 8, bf16: one base and one LR cache take about a third of three caches."""
    cfg = config(
        num_hidden_layers=32,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        hidden_size=16,
        intermediate_size=8,
    )
    model = peft_model(cfg, {name: {"r": 8} for name in AGENTS}, shared=True).to(torch.bfloat16)
    reports: dict[str, Any] = {}
    for scheme in ("base_lr_shared", "base_lr_stacked", "non_shared"):
        cache = LoRASharedCache(model, scheme)
        for stop, name in ((20, "plan"), (21, "act"), (22, "reflect"), (22, "plan"), (22, "act")):
            model.set_adapter(name)
            if cache.get_seq_length() < stop:
                run(model, cache, IDS[:, :stop])
        assert cache.agents == dict.fromkeys(AGENTS, 22)  # everybody has read everything
        reports[scheme] = cache.memory_report()
    shared, apart = reports["base_lr_shared"].in_use_bytes, reports["non_shared"].in_use_bytes
    assert shared <= 0.336 * apart
    assert shared == 22 * 32 * 2 * (2 * 8 * 128 + 8)
    assert reports["base_lr_stacked"].in_use_bytes == shared  # with one A, it is the same
    assert reports["base_lr_shared"].unshared_bytes == apart == 3 * 22 * 32 * 2 * (2 * 8 * 128)


# --- sharing is physical ----------------------------------------------------------------------------------------------


def storages(model: PeftModel, cache: LoRASharedCache) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for name in AGENTS:
        model.set_adapter(name)
        views: list[Tensor] = [getattr(layer, part) for layer in cache.layers for part in ("keys", "values")]
        found[name] = [(view.untyped_storage().data_ptr(), view.data_ptr()) for view in views]
    return found


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_shared_prefix_is_one_allocation(scheme: str, window: int) -> None:
    if window and scheme in ("non_shared", "base_shared"):
        window = 0  # these take none
    model = peft_model(shared=True)
    cache = LoRASharedCache(model, scheme, handover_window=window)
    trajectory(model, cache)
    model.set_adapter("reflect")
    ids = torch.cat([tokens(40)[:, :34], IDS[:, :4]], 1)
    run(model, cache, ids)
    if scheme in ("non_shared", "base_shared"):
        for name in ("plan", "act"):
            active(model, name, lambda: run(model, cache, ids))
    found = storages(model, cache)
    if scheme == "non_shared":
        assert not {pointer for pointer, _ in found["plan"]} & {pointer for pointer, _ in found["act"]}
    else:
        assert found["plan"] == found["act"] == found["reflect"]
    assert len({pointer for pointer, _ in found["plan"]}) == 2 * LAYERS


def test_equal_a_is_stored_once() -> None:
    widths = {}
    for shared in (True, False):
        model = peft_model(adapters={name: {"r": 4} for name in AGENTS}, shared=shared)
        cache = LoRASharedCache(model)
        trajectory(model, cache)
        widths[shared] = {layer.lr[0].data.shape[-1] for layer in cache.layers}
    assert widths == {True: {4}, False: {12}}


@pytest.mark.parametrize("scheme", SPLITTING)
def test_what_attention_gets_are_views_of_the_buffers(scheme: str) -> None:
    """No copy of K or V per step: the model is handed the buffers themselves."""
    model = peft_model(shared=True)
    cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :20])
    seen: list[tuple[int, int]] = []
    update = cache.update

    def watch(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        key, value = update(*args, **kwargs)
        seen.append((key.untyped_storage().data_ptr(), value.untyped_storage().data_ptr()))
        return key, value

    cache.update = watch  # type: ignore[method-assign]
    run(model, cache, IDS[:, :21])
    assert seen == [
        (layer.k[None].data.untyped_storage().data_ptr(), layer.v[None].data.untyped_storage().data_ptr())
        for layer in cache.layers
    ]


# --- growth -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 2])
def test_appending_seldom_reallocates(dim: int) -> None:
    buffer = GrowableBuffer(dim)
    shape = (1, 2, 1, 4) if dim == 2 else (1, 1, 4)
    allocations, kept, copied = set(), [], 0
    spare = _SPARE
    for index in range(2000):
        before = buffer.data
        buffer.write(index, torch.full(shape, float(index)))
        if buffer.data is not before:
            copied += index
            kept.append(buffer.data)  # so that no address is used twice
        allocations.add(buffer.data.data_ptr())
        assert buffer.capacity <= index + 1 + max(spare, (index + 1) / 8)
    assert len(allocations) <= 16
    assert copied <= 8 * 2000
    values = buffer.read(2000).movedim(dim, 0).flatten(1)[:, 0]
    assert torch.equal(values, torch.arange(2000.0))


def test_writing_may_overwrite_and_truncate() -> None:
    buffer = GrowableBuffer(1)
    buffer.write(0, torch.arange(10.0).view(1, 10, 1))
    buffer.write(4, torch.full((1, 300, 1), -1.0))
    assert buffer.read(304).flatten().tolist() == [0.0, 1.0, 2.0, 3.0] + [-1.0] * 300
    assert buffer.read(6, 3).flatten().tolist() == [3.0, -1.0, -1.0]
    twin = buffer.copy()
    twin.write(0, torch.full((1, 1, 1), 9.0))
    assert float(buffer.read(1)) == 0.0
    assert GrowableBuffer(1).nbytes(5) == 0
    with pytest.raises(IndexError):
        GrowableBuffer(1).read(1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_decode_step_reallocates_nothing(scheme: str) -> None:
    model = peft_model(shared=True)
    cache = LoRASharedCache(model, scheme)
    ids = write(model, IDS[:, :10], 3, cache)
    before = [buffer.data.data_ptr() for buffer in cache.buffers()]
    write(model, torch.cat([ids, IDS[:, :5]], 1), 8, cache)
    assert [buffer.data.data_ptr() for buffer in cache.buffers()] == before


@pytest.mark.parametrize("scheme", SCHEMES)
def test_reserved_room_is_made_at_the_first_write_and_kept(scheme: str) -> None:
    model = peft_model(shared=True)
    cache = LoRASharedCache(model, scheme, reserve=500)
    assert cache.memory_report().reserved_bytes == 0
    ids = tokens(520)
    run(model, cache, ids[:, :10])
    before = [buffer.data.data_ptr() for layer in cache.layers for buffer in layer.buffers()]
    assert all(buffer.capacity == 500 for layer in cache.layers for buffer in layer.buffers())
    for stop in (11, 300, 301, 500):
        run(model, cache, ids[:, :stop])
    assert [buffer.data.data_ptr() for layer in cache.layers for buffer in layer.buffers()] == before
    got = run(model, cache, ids)  # beyond it, it grows
    assert all(buffer.capacity >= 520 for layer in cache.layers for buffer in layer.buffers())
    undisturbed = LoRASharedCache(model, scheme)
    run(model, undisturbed, ids[:, :500])
    assert torch.allclose(got, run(model, undisturbed, ids), atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_storage_dies_with_the_cache(scheme: str) -> None:
    model = peft_model(shared=True)
    cache = LoRASharedCache(model, scheme)
    trajectory(model, cache)
    buffers = [weakref.ref(buffer.data) for buffer in cache.buffers()]
    gc.disable()
    try:
        del cache
        assert not [buffer for buffer in buffers if buffer() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("scheme", SPLITTING)
def test_after_a_forward_the_model_holds_nothing_of_the_cache(scheme: str) -> None:
    model = peft_model(shared=True)
    cache = LoRASharedCache(model, scheme)
    trajectory(model, cache)
    binding = cache.binding
    assert binding.forward is None
    for layer in binding.layers.values():
        assert layer.reading is None
        assert layer.angles is None
        for site in layer.sites:
            assert site.output is None
            assert not site.rows
