"""A cache that goes on as a batch: rows read one prefix, write tails of their own, and one of them is adopted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import NaiveRun, activate, exact_twin
from peft import PeftModel
from test_mixed import BASE, mixed_run, row_agent
from tiny import (
    AGENTS,
    SCHEMES,
    WITH_WINDOW,
    assert_close,
    assert_same_state,
    config,
    peft_model,
    raising,
    snapshot,
    tokens,
    turn,
    write,
)
from torch import Tensor

from lragent_hf import LoRASharedCache
from lragent_hf.bench import branches
from lragent_hf.errors import CacheModelMismatchError, TrajectoryMismatchError, UnsupportedAdapterError

ALL = ["q_proj", "k_proj", "v_proj", "o_proj"]
PREFIX = 20
IDS = tokens(PREFIX)
names_strategy = st.lists(st.sampled_from([*AGENTS, BASE]), min_size=2, max_size=4)


@pytest.fixture(scope="module")
def model() -> PeftModel:
    return peft_model(shared=True)


def filled(model: PeftModel, scheme: str, ids: Tensor = IDS, **options: Any) -> LoRASharedCache:
    """A cache over ``ids`` that everybody has read as far as the scheme asks for."""
    cache = LoRASharedCache(model, scheme, **options)
    turn(model, cache, "plan", ids[:, :12])
    turn(model, cache, "act", ids)
    for agent in ("plan", "reflect", None) if scheme in ("non_shared", "base_shared") else ():
        if agent is not None or scheme == "non_shared":
            turn(model, cache, agent, ids)
    return cache


def named(names: list[str]) -> list[str | None]:
    return [None if name == BASE else name for name in names]


def together(rows: int, tail: int, seed: int = 3) -> Tensor:
    """[rows, PREFIX + tail]: one prefix, and tails that differ."""
    return torch.cat([IDS.expand(rows, -1), tokens(tail, rows, seed)], 1)


@pytest.mark.parametrize("modules", [["q_proj", "v_proj"], ALL], ids=["qv", "qkvo"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_row_is_a_batch_of_one_for_its_agent(scheme: str, modules: list[str]) -> None:
    """In fp64 against the plain definition, after a prefix with padding; then the row that is adopted goes on."""
    model = peft_model(shared=True, target_modules=modules).double()
    twin = exact_twin(model)

    @settings(max_examples=12, deadline=None)
    @given(names_strategy, st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 3), st.data())
    def check(names: list[str], counts: list[int], pads: int, data: Any) -> None:
        tail = sum(counts)
        ids = together(len(names), tail + 4)
        mask = torch.ones_like(ids)
        mask[:, :pads] = 0
        cache = LoRASharedCache(model, scheme)
        runs = [NaiveRun(twin, scheme, 0) for _ in names]
        try:
            turns = [("plan", 12), ("act", PREFIX)]
            if scheme in ("non_shared", "base_shared"):
                turns += [("plan", PREFIX), ("reflect", PREFIX)] + ([(None, PREFIX)] if scheme == "non_shared" else [])
            for agent, stop in turns:
                if cache.agents.get(agent or "base model", 0) < stop:
                    turn(model, cache, agent, ids[:1, :stop], mask[:1, :stop])
                    for row, one in enumerate(runs):
                        plain(one, agent, ids[row : row + 1, :stop], mask[row : row + 1, :stop])
            branch, stop = cache.branch(named(names)), PREFIX
            for count in counts:
                stop += count
                got = mixed_run(model, branch, names, ids[:, :stop], mask[:, :stop])
                for row, (one, name) in enumerate(zip(runs, names, strict=True)):
                    agent = None if name == BASE else name
                    same(got[row], plain(one, agent, ids[row : row + 1, :stop], mask[row : row + 1, :stop]))
            row = data.draw(st.integers(0, len(names) - 1))
            branch.adopt(row)
            agent = data.draw(st.sampled_from(AGENTS))
            got = turn(model, branch, agent, ids[row : row + 1], mask[row : row + 1])
            same(got[0], plain(runs[row], agent, ids[row : row + 1], mask[row : row + 1]))
        finally:
            for one in runs:
                one.detach()

    check()


def plain(one: NaiveRun, agent: str | None, ids: Tensor, mask: Tensor) -> Tensor:
    key = row_agent(agent or BASE)
    activate(one.model, key)
    return one.forward(key, ids[:, one.length(key) :], mask)[0]


def same(got: Tensor, want: Tensor) -> None:
    count = min(got.shape[0], want.shape[0])
    assert (got[-count:] - want[-count:]).abs().max() < 1e-9 * (1 + want.abs().max())


def prefixes(cache: LoRASharedCache) -> set[int]:
    """Where K and V of the first positions lie."""
    return {
        rows.data_ptr() + row * rows.stride(0) * rows.element_size()
        for layer in cache.layers
        for buffer in (layer.k[None], layer.v[None])
        for rows in (buffer.pieces(PREFIX)[0],)
        for row in range(rows.shape[0])
    }


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "non_shared"])
def test_the_prefix_is_one_in_memory(model: PeftModel, scheme: str) -> None:
    cache = filled(model, scheme)
    alone = cache.memory_report()
    branch = cache.branch(["act", "plan", "act"])
    ids = together(3, 5)
    mixed_run(model, branch, ["act", "plan", "act"], ids)
    assert prefixes(branch) == prefixes(cache)
    rows = {row.part: row.in_use_bytes for row in branch.memory_report().rows}
    before = {row.part: row.in_use_bytes for row in alone.rows}
    for part in ("K", "V" if scheme == "full_shared" else "V_base"):
        assert rows[part] == before[part] + before[part] // PREFIX * 3 * 5
    ran = [{*cache.agents, name} for name in ("act", "plan", "act")]  # a row: who has run it
    token = alone.unshared_bytes // (PREFIX * len(cache.agents))
    assert branch.memory_report().unshared_bytes == (PREFIX + 5) * token * sum(map(len, ran))
    branch.batch_select_indices(torch.tensor([2, 0, 0]))
    assert prefixes(branch) == prefixes(cache)
    branch.adopt(1)
    assert prefixes(branch) == prefixes(cache)
    assert branch.batch_size == 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_generate_then_adopt(model: PeftModel, scheme: str) -> None:
    """Rows write what forks would; one that ended early is cut to its own end."""
    cache = filled(model, scheme)
    names, ids = ["reflect", "act", "plan"], together(3, 2)
    alone = []
    for row, name in enumerate(names):
        model.set_adapter(name)
        alone.append(write(model, ids[row : row + 1], 6, cache.fork()))
    before = snapshot(cache)
    end = int(alone[1][0, PREFIX + 4])  # row 1 ends with its third token
    branch = cache.branch(names)
    written = write(model, ids, 6, branch, adapter_names=names, eos_token_id=end, pad_token_id=0)
    for row, mine in enumerate(alone):
        stop = (mine[0, PREFIX + 2 :] == end).nonzero()
        count = PREFIX + 2 + (int(stop[0]) + 1 if len(stop) else 6)
        assert torch.equal(written[row, :count], mine[0, :count])
    assert_same_state(snapshot(cache), before)
    branch.adopt(1)
    story = torch.cat([written[1:2, : PREFIX + 5], tokens(3, seed=9)], 1)
    with pytest.raises(TrajectoryMismatchError, match="align"):
        turn(model, branch, "act", story[:, : PREFIX + 3])
    assert branch.align(story) <= PREFIX + 5
    fork = cache.fork()
    turn(model, fork, "act", story[:, : PREFIX + 5])
    assert_close(turn(model, branch, "reflect", story)[:, -1], turn(model, fork, "reflect", story)[:, -1])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_of_one_agent(model: PeftModel, scheme: str) -> None:
    cache = filled(model, scheme)
    branch, ids = cache.branch(["act"] * 3), together(3, 4)
    got = turn(model, branch, "act", ids)
    for row in range(3):
        assert_close(got[row : row + 1], turn(model, cache.fork(), "act", ids[row : row + 1]))


OPTIONS: list[dict[str, Any]] = [{"attention": "keep"}, {"offload": True}, {"value_working_copy": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_where_parts_are_joined(kind: str, options: dict[str, Any]) -> None:
    """With the model's own attention, offloaded, and with windows shorter than the prefix."""
    model = peft_model(config(kind, sliding_window=9) if kind == "mistral" else config(), target_modules=ALL)
    cache = filled(model, "base_lr_stacked", **options)
    names, ids = ["act", "reflect"], together(2, 6)
    branch = cache.branch(named(names))
    for stop in (PREFIX + 5, PREFIX + 6):
        got = mixed_run(model, branch, names, ids[:, :stop])
    for row, name in enumerate(names):
        assert_close(got[row, -1], turn(model, cache.fork(), name, ids[row : row + 1])[0, -1])


@pytest.mark.parametrize("scheme", WITH_WINDOW)
def test_a_hand_over_window_reaches_into_the_prefix(model: PeftModel, scheme: str) -> None:
    cache = filled(model, scheme, handover_window=7)
    before, names, ids = snapshot(cache), ["plan", "reflect"], together(2, 4)
    branch = cache.branch(named(names))
    got = mixed_run(model, branch, names, ids)
    for row, name in enumerate(names):
        assert_close(got[row, -4:], turn(model, cache.fork(), name, ids[row : row + 1])[0, -4:])
    assert_same_state(snapshot(cache), before)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_forward_that_fails_leaves_the_branch_as_it_was(model: PeftModel, scheme: str) -> None:
    cache = filled(model, scheme)
    names, ids = ["plan", "reflect"], together(2, 4)
    branch = cache.branch(named(names))
    mixed_run(model, branch, names, ids[:, :-2])
    before = snapshot(branch), snapshot(cache)
    with raising(model.get_base_model().model.layers[2].mlp, RuntimeError("on purpose")):
        with pytest.raises(RuntimeError, match="on purpose"):
            mixed_run(model, branch, names, ids)
    assert_same_state(snapshot(branch), before[0])
    assert_same_state(snapshot(cache), before[1])
    got = mixed_run(model, branch, names, ids)
    assert_close(got[1, -1], turn(model, cache.fork(), "reflect", ids[1:])[0, -1])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_saved_copied_and_moved(model: PeftModel, scheme: str, tmp_path: Path) -> None:
    cache = filled(model, scheme)
    names, ids = ["plan", "reflect"], together(2, 4)
    branch = cache.branch(named(names))
    mixed_run(model, branch, names, ids[:, :-2])
    branch.save(tmp_path / "branch")
    others = [LoRASharedCache.load(model, tmp_path / "branch"), branch.fork(), cache.branch(named(names))]
    others[2].offload(1)
    want = mixed_run(model, branch, names, ids)
    for other in others:
        assert_close(mixed_run(model, other, names, ids)[:, -1], want[:, -1])


def test_layers_recomputed(model: PeftModel) -> None:
    options: dict[str, Any] = {"recompute_layers": [1], "hidden_cache": True}
    cache = filled(model, "droidspeak", **options)
    turn(model, cache, "plan", torch.cat([IDS, IDS[:, :1]], 1))
    cache.align(IDS)
    names, ids = ["plan", "act"], together(2, 4)
    branch = cache.branch(named(names))
    got = mixed_run(model, branch, names, ids)
    for row, name in enumerate(names):
        assert_close(got[row, -1], turn(model, cache.fork(), name, ids[row : row + 1])[0, -1])


def test_what_is_refused(model: PeftModel) -> None:
    cache = filled(model, "base_lr_stacked")
    before = snapshot(cache)
    for wrong in ("plan", []):
        with pytest.raises(ValueError, match="list of agents"):
            cache.branch(wrong)
    with pytest.raises(ValueError, match=r"'critic' is no adapter.*plan"):
        cache.branch(["plan", "critic"])
    branch = cache.branch(["plan", "act"])
    with pytest.raises(CacheModelMismatchError, match="adopt"):
        branch.branch(["plan", "act"])
    with pytest.raises(IndexError, match="2"):
        branch.adopt(2)
    with pytest.raises(CacheModelMismatchError, match=r"2 row.*brings 3"):
        mixed_run(model, branch, ["plan", "act", "plan"], together(3, 2))
    branch.adopt(-1)
    assert_same_state(snapshot(cache), before)
    lagging = LoRASharedCache(model, "base_shared")
    turn(model, lagging, "plan", IDS)
    with pytest.raises(UnsupportedAdapterError, match="equally far"):
        lagging.branch(["plan", "act"])
    empty = LoRASharedCache(model)
    mixed_run(model, empty.branch(["plan", "act"]), ["plan", "act"], together(2, 4))


def test_the_benchmark_checks_before_it_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {
        "prefix": 24, "branches": 3, "new": 3, "scheme": "base_lr_stacked", "model": "tiny", "rank": 4,
        "modules": ["q_proj", "v_proj"], "dtype": None, "repeats": 1, "threads": None,
    }  # fmt: skip
    found = branches.run(**options)
    assert found["bytes"] == found["prefix_bytes"] + found["tail_bytes"]
    assert "one after another" in capsys.readouterr().out
    apart = branches._apart
    monkeypatch.setattr(branches, "_apart", lambda *args: apart(*args) + 1e-2)
    with pytest.raises(SystemExit, match="not what forks give"):
        branches.run(**options)
    assert "one after another" not in capsys.readouterr().out
