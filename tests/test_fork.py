"""Branches of a cache: they share what was there, and nothing else."""

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import PeftModel
from tiny import (
    SCHEMES,
    WITH_WINDOW,
    assert_close,
    assert_same_state,
    config,
    peft_model,
    run,
    snapshot,
    tokens,
    turn,
    write,
)
from torch import Tensor
from transformers import LlamaConfig

from lragent_hf import CACHE_ARG, LoRASharedCache
from lragent_hf.buffer import GrowableBuffer

IDS = tokens(80)


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> Iterator[None]:
    """What the imports left is no garbage: the collector, which these tests call often, need not look through it."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def model() -> PeftModel:
    return peft_model(shared=True)


def storages(*caches: LoRASharedCache) -> int:
    """Bytes of the distinct allocations behind K, V and LR of some caches."""
    tensors = [
        rows
        for cache in caches
        for layer in cache.layers
        for buffer in layer.buffers()
        for rows in (*(piece.rows for piece in buffer.prefix), *([] if buffer.data is None else [buffer.data]))
    ]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("attention", ["auto", "keep"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_branches_go_on_as_copies_would(scheme: str, attention: str, kind: str) -> None:
    """Against independent caches that ran the same turns; with a sliding window shorter than the prefix too."""
    model = peft_model(config(kind, sliding_window=12) if kind == "mistral" else config(), shared=True)
    options = {"scheme": scheme, "attention": attention}
    origin = LoRASharedCache(model, **options)
    turn(model, origin, "plan", IDS[:, :20])
    turn(model, origin, "act", IDS[:, :30])
    left, right = origin.fork(), origin.fork()
    futures = {"origin": tokens(80, seed=1), "left": tokens(80, seed=2), "right": tokens(80, seed=3)}
    branches = {"origin": origin, "left": left, "right": right}
    alone = {}
    for name in branches:
        futures[name][:, :30] = IDS[:, :30]
        alone[name] = LoRASharedCache(model, **options)
        turn(model, alone[name], "plan", IDS[:, :20])
        turn(model, alone[name], "act", IDS[:, :30])
    for agent, stop in (("reflect", 33), ("reflect", 34), ("plan", 45), ("act", 46), ("act", 60), ("plan", 70)):
        for name, cache in branches.items():
            want = turn(model, alone[name], agent, futures[name][:, :stop])
            assert_close(turn(model, cache, agent, futures[name][:, :stop]), want)
    grand = left.fork()
    for agent, stop in (("act", 72), ("plan", 80)):
        for cache in (grand, left):
            copy = alone["left"].fork() if cache is grand else alone["left"]
            assert_close(
                turn(model, cache, agent, futures["left"][:, :stop]),
                turn(model, copy, agent, futures["left"][:, :stop]),
            )


@pytest.mark.parametrize("rows", [1, 3])
def test_branches_of_padded_rows(model: PeftModel, scheme: str, rows: int) -> None:
    ids, mask = tokens(40, rows), torch.ones(rows, 40, dtype=torch.long)
    mask[-1, : 4 if rows > 1 else 0] = 0
    origin, alone = (LoRASharedCache(model, scheme=scheme) for _ in range(2))
    for cache in (origin, alone):
        model.set_adapter("plan")
        run(model, cache, ids[:, :20], mask[:, :20])
    branch = origin.fork()
    for agent, stop in (("act", 27), ("act", 28), ("plan", 40)):
        model.set_adapter(agent)
        want, got = (run(model, cache, ids[:, :stop], mask[:, :stop]) for cache in (alone, branch))
        attended = mask[:, stop - got.shape[1] : stop].bool()
        assert_close(got[attended], want[attended])


def actions(model: PeftModel, scheme: str) -> dict[str, Any]:
    def take_over(cache: LoRASharedCache) -> None:
        turn(model, cache, "reflect", torch.cat([IDS[:, :40], IDS[:, :9]], 1))

    def fail(cache: LoRASharedCache) -> None:
        def hook(*_: Any) -> None:
            raise RuntimeError("on purpose")

        handle = model.get_base_model().model.layers[2].mlp.register_forward_pre_hook(hook)
        try:
            with pytest.raises(RuntimeError, match="on purpose"):
                take_over(cache)
        finally:
            handle.remove()

    def regrow(cache: LoRASharedCache) -> None:
        cache.crop(-15)
        turn(model, cache, "plan", torch.cat([IDS[:, :25], tokens(40, seed=6)], 1))

    return {
        "take over": take_over,
        "fail": fail,
        "grow": lambda cache: turn(model, cache, "plan", torch.cat([IDS[:, :40], tokens(400, seed=7)], 1)),
        "crop and regrow": regrow,
        "align": lambda cache: cache.align(IDS[:, :12]),
        "reset": lambda cache: cache.reset(),
        "rows": lambda cache: cache.batch_repeat_interleave(3),
        "offload": lambda cache: [cache.offload(layer) for layer in range(3)],
    }


@pytest.mark.parametrize(("scheme", "window"), [*((name, 0) for name in SCHEMES), *((name, 6) for name in WITH_WINDOW)])
@pytest.mark.parametrize("name", ["take over", "fail", "grow", "crop and regrow", "align", "reset", "rows", "offload"])
@pytest.mark.parametrize("who", ["origin", "branch"])
def test_what_one_does_the_others_do_not_see(model: PeftModel, scheme: str, who: str, name: str, window: int) -> None:
    origin = LoRASharedCache(model, scheme=scheme, handover_window=window)
    turn(model, origin, "plan", IDS[:, :40])
    branch, other = origin.fork(), origin.fork()
    acts, watched = (origin, [branch, other]) if who == "origin" else (branch, [origin, other])
    before = [snapshot(cache) for cache in watched]
    actions(model, scheme)[name](acts)
    for cache, state in zip(watched, before, strict=True):
        assert_same_state(snapshot(cache), state)


def test_ten_branches_of_a_long_prefix_take_one_prefix(scheme: str) -> None:
    """4,096 tokens and ten tails of 64, a few at a time: under 1.15 of prefix and tails, spare room included."""
    small = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192,
    )  # fmt: skip
    model = peft_model(small, shared=True)
    origin = LoRASharedCache(model, scheme=scheme)
    prefix, tail = 4096, 64
    ids = tokens(prefix + tail)
    model.set_adapter("plan")
    with torch.inference_mode():
        for start in range(0, prefix, 1024):
            model(ids[:, start : start + 1024], logits_to_keep=1, **{CACHE_ARG: origin})
        token = origin.memory_report().in_use_bytes / prefix
        branches = [origin.fork() for _ in range(10)]
        for branch in branches:
            model(ids[:, prefix : prefix + 8], logits_to_keep=1, **{CACHE_ARG: branch})
            for position in range(prefix + 8, prefix + tail, 7):
                model(ids[:, position : position + 7], logits_to_keep=1, **{CACHE_ARG: branch})
    assert storages(origin, *branches) < 1.15 * token * (prefix + 10 * tail)
    report = branches[0].memory_report()
    assert report.in_use_bytes == token * (prefix + tail)
    assert report.shared_bytes == token * prefix == origin.memory_report().shared_bytes


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_closing_does_not_matter(model: PeftModel, scheme: str, seed: int) -> None:
    pick = random.Random(seed)
    origin = LoRASharedCache(model, scheme=scheme)
    want = turn(model, origin, "plan", IDS[:, :40])
    caches = [(origin, IDS[:, :40])]
    del origin
    for number in range(8):
        cache, ids = pick.choice(caches)
        caches.append((cache.fork(), torch.cat([ids, tokens(9, seed=number)], 1)))
        turn(model, caches[-1][0], pick.choice(("plan", "act")), caches[-1][1])
    while len(caches) > 1:
        caches.pop(pick.randrange(len(caches)))
        gc.collect()
        cache = pick.choice(caches)[0].fork()
        assert cache.align(IDS[:, :40]) == 39
        assert_close(turn(model, cache, "plan", IDS[:, :40])[:, -1:], want[:, -1:])


def test_storage_is_given_back_when_the_branches_are_gone(model: PeftModel, scheme: str) -> None:
    """Once nobody shares it, the origin writes in place again: no second piece is made."""
    origin = LoRASharedCache(model, scheme=scheme)
    turn(model, origin, "plan", IDS[:, :40])
    branch = origin.fork()
    assert origin.memory_report().shared_bytes
    del branch
    gc.collect()
    assert not origin.memory_report().shared_bytes
    origin.crop(-10)
    turn(model, origin, "plan", IDS[:, :50])
    assert all(not buffer.prefix for layer in origin.layers for buffer in layer.buffers())


def test_a_long_line_of_branches_stays_in_few_pieces(model: PeftModel, scheme: str) -> None:
    cache, alone = (LoRASharedCache(model, scheme=scheme) for _ in range(2))
    ids = tokens(100, seed=9)
    for step in range(20):
        cache = cache.fork()
        agent = ("plan", "act")[step % 2]
        assert_close(*(turn(model, one, agent, ids[:, : 5 + 4 * step]) for one in (cache, alone)))
    assert max(len(buffer.prefix) for layer in cache.layers for buffer in layer.buffers()) <= 8


def test_branches_generate(model: PeftModel, scheme: str) -> None:
    """Greedy, and by beams that expand the branch's one row."""
    origin = LoRASharedCache(model, scheme=scheme)
    turn(model, origin, "plan", IDS[:, :30])
    alone = origin.fork()
    model.set_adapter("act")
    for options in ({}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        branch = origin.fork()
        plain = LoRASharedCache(model, scheme=scheme)
        turn(model, plain, "plan", IDS[:, :30])
        model.set_adapter("act")
        assert torch.equal(
            write(model, IDS[:, :36], 7, branch, **options), write(model, IDS[:, :36], 7, plain, **options)
        )
    assert_same_state(snapshot(alone), snapshot(origin))


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_buffers_against_plain_tensors(dim: int, seed: int) -> None:
    """Random writes, forks, cuts and drops: every buffer reads as the tensor that was written to it."""
    pick = random.Random(seed)
    shape = [2, 3, 0, 4] if dim == 2 else [2, 0, 4]
    pairs: list[tuple[GrowableBuffer, Tensor]] = [(GrowableBuffer(dim), torch.empty(shape))]
    for step in range(200):
        index = pick.randrange(len(pairs))
        buffer, plain = pairs[index]
        length = plain.shape[dim]
        action = pick.choice(("append", "append", "overwrite", "fork", "cut", "drop"))
        if action in ("append", "overwrite"):
            start = length if action == "append" else pick.randint(0, length)
            size = list(shape)
            size[dim] = pick.choice((1, 2, 40))
            rows = torch.full(size, float(step))
            buffer.write(start, rows)
            rest = plain.narrow(dim, min(length, start + size[dim]), max(0, length - start - size[dim]))
            pairs[index] = buffer, torch.cat([plain.narrow(dim, 0, start), rows, rest], dim)
        elif action == "fork" and length and len(pairs) < 6:
            pairs.append((buffer.fork(length), plain))
        elif action == "cut" and length:
            keep = pick.randint(1, length)
            buffer.truncate(keep)
            pairs[index] = buffer, plain.narrow(dim, 0, keep)
        elif action == "drop" and len(pairs) > 1:
            del pairs[index]
        del buffer, plain
        for buffer, plain in pairs:
            if plain.shape[dim]:
                assert torch.equal(buffer.read(plain.shape[dim]), plain)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_out_of_memory_while_parting_from_a_fork_loses_nothing(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = peft_model(shared=True)
    ids = tokens(16)
    window = 8 if scheme in WITH_WINDOW else 0
    cache = LoRASharedCache(model, scheme, handover_window=window)
    turn(model, cache, "plan", ids[:, :12])
    branch = cache.fork()
    before = snapshot(cache)
    become, calls = GrowableBuffer._become, []

    def failing(self: GrowableBuffer, prefix: Any, start: int, make: Any) -> None:
        calls.append(1)
        if len(calls) == 2 and make is not None:
            make = failing_make
        become(self, prefix, start, make)

    def failing_make() -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(GrowableBuffer, "_become", failing)
    try:
        turn(model, cache, "act", ids[:, :6] if window else ids[:, :14])
    except torch.OutOfMemoryError:
        assert_same_state(snapshot(cache), before)
    monkeypatch.undo()
    alone = LoRASharedCache(model, scheme, handover_window=window)
    turn(model, alone, "plan", ids[:, :12])
    assert_close(turn(model, branch, "plan", ids), turn(model, alone, "plan", ids))


def test_a_cut_gives_back_the_storage_that_a_branch_lent() -> None:
    model = peft_model()
    ids = tokens(600)
    cache = LoRASharedCache(model)
    turn(model, cache, "plan", ids)
    branch = cache.fork()
    cache.crop(-590)
    del branch
    gc.collect()
    held = {
        rows.untyped_storage().data_ptr(): rows.untyped_storage().nbytes()
        for layer in cache.layers
        for buffer in layer.buffers()
        for rows in buffer._all_rows()
    }
    assert sum(held.values()) <= 2 * cache.memory_report().in_use_bytes


@pytest.mark.parametrize("scheme", WITH_WINDOW)
def test_out_of_memory_in_the_record_undoes_the_forward(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = peft_model(shared=True)
    ids = tokens(14)
    cache = LoRASharedCache(model, scheme, handover_window=4)
    turn(model, cache, "plan", ids[:, :12])
    before = snapshot(cache)

    def failing(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(cache.trajectory, "append", failing)
    with pytest.raises(torch.OutOfMemoryError):
        turn(model, cache, "act", ids)
    assert_same_state(snapshot(cache), before)
