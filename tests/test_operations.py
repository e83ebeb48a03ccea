"""Every operation of a cache x every scheme x who stands where: against the plain definition, which does the same."""

import copy
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import NaiveRun
from peft import PeftModel
from tiny import SCHEMES, assert_close, assert_same_state, config, decoder_of, peft_model, run, snapshot, tokens
from torch import Tensor
from transformers import DynamicCache

from lragent_hf import CACHE_ARG, LoRASharedCache
from lragent_hf.buffer import GrowableBuffer
from lragent_hf.errors import CacheModelMismatchError, LRAgentError, TrajectoryMismatchError

IDS = tokens(60, rows=2, seed=4)


@pytest.fixture(scope="module")
def models() -> tuple[PeftModel, PeftModel]:
    """Ours, and one for the plain definition."""
    cfg = config(attn_implementation="eager")
    return peft_model(cfg, shared=True), peft_model(copy.deepcopy(cfg), shared=True)


def saved_and_loaded(cache: LoRASharedCache) -> LoRASharedCache:
    with tempfile.TemporaryDirectory() as folder:
        cache.save(Path(folder) / "cache")
        return LoRASharedCache.load(cache.binding.decoder, Path(folder) / "cache")


def in_place(action: Callable[[LoRASharedCache], Any]) -> Callable[[LoRASharedCache], LoRASharedCache]:
    def act(cache: LoRASharedCache) -> LoRASharedCache:
        action(cache)
        return cache

    return act


def early(cache: LoRASharedCache) -> None:
    heads, dim = cache.layers[0].keys.shape[1::2]  # type: ignore[union-attr]
    cache.early_initialization(2, heads, dim, torch.float32, torch.device("cpu"))
    cache.activate_past_recording()


# name -> (on the cache, on the plain run, on the tokens)
Operation = tuple[Callable[[LoRASharedCache], LoRASharedCache], Callable[[NaiveRun], None], Callable[[Tensor], Tensor]]


def nothing(run: NaiveRun) -> None: ...


def same(ids: Tensor) -> Tensor:
    return ids


def rows(*index: int) -> tuple[Callable[[NaiveRun], None], Callable[[Tensor], Tensor]]:
    return lambda run: run.select(torch.tensor(index)), lambda ids: ids[list(index)]


def crop(count: int) -> Operation:
    def plain(run: NaiveRun) -> None:
        if count:
            run.crop(run.agent, count)

    return in_place(lambda cache: cache.crop(-count)), plain, same


OPERATIONS: dict[str, Operation] = {
    "crop 0": crop(0),
    "crop 1": crop(1),
    "crop 5": crop(5),
    "crop beyond the start": crop(1000),
    "reorder": (in_place(lambda cache: cache.reorder_cache(torch.tensor([1, 0]))), *rows(1, 0)),
    "reorder to one": (in_place(lambda cache: cache.reorder_cache(torch.tensor([1, 1]))), *rows(1, 1)),
    "select": (in_place(lambda cache: cache.batch_select_indices(torch.tensor([1]))), *rows(1)),
    "select from the end": (in_place(lambda cache: cache.batch_select_indices(torch.tensor([-1, 0]))), *rows(1, 0)),
    "select by mask": (in_place(lambda cache: cache.batch_select_indices(torch.tensor([True, False]))), *rows(0)),
    "repeat": (in_place(lambda cache: cache.batch_repeat_interleave(2)), *rows(0, 0, 1, 1)),
    "reset": (in_place(lambda cache: cache.reset()), lambda run: run.reset(), same),
    "align": (in_place(lambda cache: cache.align(IDS[:, :12])), lambda run: run.truncate(11), same),
    "fork": (lambda cache: cache.fork(), nothing, same),
    "deepcopy": (copy.deepcopy, nothing, same),
    "save and load": (saved_and_loaded, nothing, same),
    "offload": (in_place(lambda cache: [cache.offload(i) for i in range(3)]), nothing, same),
    "prefetch": (in_place(lambda cache: [cache.prefetch(i) for i in range(3)]), nothing, same),
    "early initialization": (in_place(early), nothing, same),
}


@pytest.mark.parametrize("state", ["single agent", "after a hand-over", "lagging agent"])
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_operations(models: tuple[PeftModel, PeftModel], scheme: str, name: str, state: str) -> None:
    ours, other = models
    cache, plain = LoRASharedCache(ours, scheme), NaiveRun(other, scheme)
    ids = IDS.clone()

    def turn(agent: str, stop: int, count: int | None = None) -> None:
        for model in models:
            model.set_adapter(agent)
        past = plain.length((agent,))
        assert cache.get_seq_length() == past
        stop = stop if count is None else min(stop, past + count)
        if past < stop:
            want = plain.forward((agent,), ids[:, past:stop], None)
            assert_close(run(ours, cache, ids[:, :stop]), want)

    turn("plan", 20)
    if state == "after a hand-over":
        turn("act", 26)
    elif state == "lagging agent":
        turn("act", 24, count=7)  # part of its LR prefill, where there is one
    on_cache, on_plain, on_ids = OPERATIONS[name]
    cache = on_cache(cache)
    on_plain(plain)
    ids = on_ids(ids)
    for agent, stop in (("act", 30), ("act", 31), ("plan", 40), ("reflect", 44), ("plan", 45)):
        turn(agent, stop)
    for handle in [layer.self_attn.v_proj for layer in decoder_of(other).layers]:
        handle._forward_pre_hooks.clear()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_a_cache_says_of_itself(models: tuple[PeftModel, PeftModel], scheme: str) -> None:
    model = models[0]
    cache = LoRASharedCache(model, scheme)
    assert (cache.batch_size, len(cache), cache.get_seq_length()) == (-1, 3, 0)
    assert not cache.is_initialized
    run(model, cache, IDS[:, :9])
    assert cache.is_initialized
    assert (cache.batch_size, len(cache), cache.get_seq_length(), cache.get_seq_length(2)) == (2, 3, 9, 9)
    assert cache.get_max_length() == cache.get_max_length(1) == -1
    assert cache.get_mask_sizes(4, 0) == (13, 0)
    assert cache.is_croppable
    assert not cache.is_compileable
    assert cache.is_sliding == cache.is_linear == [False] * 3
    for layer in cache.layers:
        assert layer.get_seq_length() == 9
        assert layer.batch_size == layer.max_batch_size == 2
        assert layer.keys.shape == layer.values.shape == (2, 2, 9, 8)
        for method, argument in (("crop", -1), ("batch_repeat_interleave", 2), ("reorder_cache", torch.tensor([0]))):
            with pytest.raises(NotImplementedError, match="Call the cache's"):
                getattr(layer, method)(argument)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_offloaded_cache_is_the_same_cache(models: tuple[PeftModel, PeftModel], scheme: str) -> None:
    model = models[0]
    cache, plain = LoRASharedCache(model, scheme, offload=True), LoRASharedCache(model, scheme)
    for agent, stop in (("plan", 20), ("act", 26), ("act", 27), ("plan", 40)):
        model.set_adapter(agent)
        assert_close(run(model, cache, IDS[:, :stop]), run(model, plain, IDS[:, :stop]))
    assert all(buffer.data.device.type == "cpu" for layer in cache.layers for buffer in layer.buffers())  # type: ignore[union-attr]
    assert_same_state(snapshot(cache.fork()), snapshot(plain))


# --- a thousand malformed inputs ---------------------------------------------------------------------------------------


def forward(model: PeftModel, cache: Any, ids: Tensor, **options: Any) -> None:
    with torch.no_grad():
        model(input_ids=ids, **options, **{CACHE_ARG: cache})


def malformed(
    pick: random.Random, model: PeftModel, cache: LoRASharedCache, ids: Tensor
) -> tuple[str, Callable[[], Any]]:
    """One thing no caller should do, chosen at random."""
    total, past = ids.shape[1], cache.get_seq_length()
    new = torch.cat([ids, tokens(pick.randint(1, 6), 2, seed=pick.randrange(99))], 1)
    mask = torch.ones_like(new)
    rest = new[:, past:]
    batch = pick.randint(3, 8)
    shift = pick.choice([n for n in range(-5, 6) if n])
    wrong = new.clone()
    place = pick.randrange(total)
    wrong[pick.randrange(2), place] = (wrong[0, place] + wrong[1, place]) % 90 + 1
    index = pick.choice((pick.randint(2, 99), -pick.randint(3, 99)))
    kinds: dict[str, Callable[[], Any]] = {
        "batch": lambda: forward(model, cache, rest[:1].expand(batch, -1), attention_mask=mask[:1].expand(batch, -1)),
        "mask too wide": lambda: forward(model, cache, rest, attention_mask=torch.ones(2, new.shape[1] + abs(shift))),
        "mask too narrow": lambda: forward(model, cache, rest, attention_mask=mask[:, : -min(total, abs(shift))]),
        "positions": lambda: forward(
            model, cache, rest, attention_mask=mask, position_ids=torch.arange(past, new.shape[1])[None] + shift
        ),
        "float tokens": lambda: forward(model, cache, rest.float(), attention_mask=mask),
        "tokens out of the vocabulary": lambda: forward(model, cache, rest + 1000, attention_mask=mask),
        "another device": lambda: forward(model, cache, rest.to("meta")),
        "one dimension": lambda: forward(model, cache, rest[0]),
        "no tokens": lambda: forward(model, cache, rest[:, :0]),
        "nothing": lambda: forward(model, cache, None),  # type: ignore[arg-type]
        "positive crop": lambda: cache.crop(pick.randint(1, 1000)),
        "crop by a float": lambda: cache.crop(-1.5),  # type: ignore[arg-type]
        "row that is not there": lambda: cache.batch_select_indices(torch.tensor([0, index])),
        "no row": lambda: cache.batch_select_indices(torch.tensor([], dtype=torch.long)),
        "rows as floats": lambda: cache.reorder_cache(torch.tensor([0.0, 1.0])),
        "mask of rows too long": lambda: cache.batch_select_indices(torch.ones(batch, dtype=torch.bool)),
        "repeat by nothing": lambda: cache.batch_repeat_interleave(-pick.randint(0, 5)),
        "align of other rows": lambda: cache.align(tokens(9, batch)),
        "unknown adapter": lambda: model.set_adapter(f"agent {pick.randrange(99)}"),
        "outside a forward": lambda: cache.update(torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 8), pick.randrange(3)),
        "unknown scheme": lambda: LoRASharedCache(model, f"scheme {pick.randrange(9)}"),
        "negative window": lambda: LoRASharedCache(model, handover_window=-pick.randint(1, 9)),
        "nowhere to load from": lambda: LoRASharedCache.load(model, f"/nonexistent/{pick.randrange(99)}"),
    }
    again = cache.scheme.name in ("non_shared", "base_shared") and past < place < total
    if again:
        kinds["other tokens"] = lambda: forward(model, cache, wrong[:, past:], attention_mask=mask)
    if past:
        kinds["all tokens again"] = lambda: forward(
            model, cache, new, attention_mask=torch.ones(2, new.shape[1]), position_ids=torch.arange(new.shape[1])[None]
        )
    name = pick.choice(list(kinds))
    return name, kinds[name]


@pytest.mark.parametrize("seed", range(40))
def test_malformed_inputs_change_nothing(models: tuple[PeftModel, PeftModel], seed: int) -> None:
    """25 a seed: each a clear error, the cache byte for byte what it was, and the next turn as if nothing had been."""
    pick = random.Random(seed)
    model, scheme = models[0], SCHEMES[seed % len(SCHEMES)]
    cache, plain = LoRASharedCache(model, scheme), LoRASharedCache(model, scheme)
    for agent, stop in (("plan", 20), ("act", 26)):
        model.set_adapter(agent)
        for one in (cache, plain):
            run(model, one, IDS[:, :stop])
    for _ in range(25):
        agent = pick.choice(("plan", "act", "reflect"))
        model.set_adapter(agent)
        before = snapshot(cache)
        name, action = malformed(pick, model, cache, IDS[:, :26])
        with pytest.raises((LRAgentError, ValueError, IndexError, TypeError, NotImplementedError)) as caught:
            action()
        assert len(str(caught.value)) > 20, f"{name}: {caught.value!r} says nothing"
        assert_same_state(snapshot(cache), before)
        assert cache.binding.forward is None
    model.set_adapter("plan")
    assert_close(run(model, cache, IDS[:, :40]), run(model, plain, IDS[:, :40]))


def test_kinds_of_errors(models: tuple[PeftModel, PeftModel]) -> None:
    """The ones of the library are of the kind that their documentation says."""
    model = models[0]
    cache = LoRASharedCache(model, "base_shared")
    model.set_adapter("plan")
    run(model, cache, IDS[:, :20])
    with pytest.raises(TrajectoryMismatchError):
        forward(model, cache, IDS[:, 20:25], attention_mask=torch.ones(2, 20))
    with pytest.raises(CacheModelMismatchError):
        forward(model, cache, IDS[:1, 20:25].expand(3, -1))


@pytest.mark.parametrize("operation", ["reorder", "select", "repeat"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_chosen_halfway_are_never_read(scheme: str, operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory in the third buffer: the cache is empty then, not half in one order and half in another."""
    model = peft_model(shared=True)
    ids = tokens(14, rows=3)
    cache = LoRASharedCache(model, scheme)
    run(model, cache, ids[:, :10])
    select, calls = GrowableBuffer.select, []

    def failing(self: GrowableBuffer, rows: torch.Tensor) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no memory")
        select(self, rows)

    monkeypatch.setattr(GrowableBuffer, "select", failing)
    rows = torch.tensor([2, 0, 1])
    with pytest.raises(torch.OutOfMemoryError):
        {
            "reorder": lambda: cache.reorder_cache(rows),
            "select": lambda: cache.batch_select_indices(rows),
            "repeat": lambda: cache.batch_repeat_interleave(2),
        }[operation]()
    assert cache.get_seq_length() == 0
    assert_close(run(model, cache, ids), run(model, DynamicCache(), ids))


@pytest.mark.parametrize(
    "rows", [torch.tensor([2, 0, 1], dtype=torch.int16), torch.tensor([[0, 1]]), torch.tensor([True] * 3)]
)
def test_rows_are_an_index_of_any_integer_type(rows: torch.Tensor) -> None:
    model = peft_model()
    ids = tokens(14, rows=3)
    cache = LoRASharedCache(model)
    run(model, cache, ids[:, :10])
    before = snapshot(cache)
    if rows.dtype == torch.int16:
        cache.reorder_cache(rows)
        assert_close(run(model, cache, ids[rows.long()]), run(model, DynamicCache(), ids[rows.long()])[:, 10:])
    else:
        with pytest.raises(ValueError, match="Rows are chosen"):
            cache.reorder_cache(rows)
        assert_same_state(snapshot(cache), before)
