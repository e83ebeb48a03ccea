"""Rows of one batch with agents of their own (PEFT's ``adapter_names=``): each row is a batch of one for its agent."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import NaiveRun, activate, exact_twin
from peft import PeftModel
from tiny import (
    AGENTS,
    SCHEMES,
    WITH_WINDOW,
    active,
    assert_close,
    assert_same_state,
    config,
    hook_census,
    peft_model,
    raising,
    run,
    snapshot,
    tokens,
    turn,
)
from torch import Tensor
from transformers import DynamicCache

from lragent_hf import CACHE_ARG, LoRASharedCache
from lragent_hf.errors import AdapterChangedError, UnsupportedAdapterError

PER_AGENT = ("non_shared", "base_shared")
Names = list[str]
BASE = "__base__"


def mixed_run(model: PeftModel, cache: Any, names: Names, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """One forward over what of ``ids`` these rows have yet to read; its logits."""
    mask = torch.ones_like(ids) if mask is None else mask
    with model.base_model._enable_peft_forward_hooks(adapter_names=names):
        past = cache.get_seq_length()
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, past:]
    with torch.no_grad():
        return model(
            input_ids=ids[:, past:],
            attention_mask=mask,
            position_ids=positions,
            adapter_names=names,
            **{CACHE_ARG: cache},
        ).logits


def row_agent(name: str) -> tuple[str, ...]:
    return () if name == BASE else (name,)


class Rows:
    """The plain definition: a `NaiveRun` of one row for each row of the batch."""

    def __init__(self, twin: Any, scheme: str, ids: Tensor, mask: Tensor, window: int = 0):
        self.twin, self.ids, self.mask = twin, ids, mask
        self.runs = [NaiveRun(twin, scheme, window) for _ in ids]

    def forward(self, names: Names, stop: int) -> list[Tensor]:
        """Each row's logits for what its agent had yet to read."""
        found = []
        for row, (one, name) in enumerate(zip(self.runs, names, strict=True)):
            activate(self.twin, row_agent(name))
            start = one.length(row_agent(name))
            found.append(
                one.forward(row_agent(name), self.ids[row : row + 1, start:stop], self.mask[row : row + 1, :stop])[0]
            )
        return found

    def detach(self) -> None:
        for one in self.runs:
            one.detach()


def assert_rows(got: Tensor, want: list[Tensor], mask: Tensor) -> None:
    """Logits of the last positions that both have run, at attended ones."""
    for row, expected in enumerate(want):
        count = min(got.shape[1], expected.shape[0])
        seen = mask[row, -count:].bool()
        error = (got[row, -count:] - expected[-count:])[seen].abs()
        worst = error.max().item() if error.numel() else 0.0
        assert worst < 1e-9 * (1 + expected.abs().max().item()), f"row {row}: error {worst:.3g}"


names_strategy = st.lists(st.sampled_from([*AGENTS, BASE]), min_size=3, max_size=3)
turns_strategy = st.lists(
    st.tuples(st.one_of(names_strategy, st.sampled_from(AGENTS).map(lambda n: [n] * 3)), st.integers(1, 5)),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_turns_of_mixed_and_uniform_batches(scheme: str, shared: bool) -> None:
    """Turns over left-padded rows; where agents keep their own, rows that have read unequally far are refused."""
    if scheme == "base_lr_shared" and not shared:
        pytest.skip("needs a shared A")
    model = peft_model(shared=shared).double()
    twin = exact_twin(model)

    @settings(max_examples=25, deadline=None)
    @given(turns_strategy, st.integers(0, 2**16))
    def check(turns: list[tuple[Names, int]], seed: int) -> None:
        ids = tokens(8 + sum(count for _, count in turns), rows=3, seed=seed)
        mask = torch.ones_like(ids)
        mask[1, :3] = 0
        cache, rows = LoRASharedCache(model, scheme), Rows(twin, scheme, ids, mask)
        read: dict[tuple[str, ...], int] = {}  # by assignment, a uniform one included
        stop = total = 0
        try:
            for names, count in turns:
                start, stop = stop, stop + count + (5 if not stop else 0)
                key = tuple(names)
                if scheme in PER_AGENT and len(set(key)) > 1 and not read.get(key) and start:
                    counted = [name for name in dict.fromkeys(key) if scheme == "non_shared" or name != BASE]
                    if len({read.get((name,) * 3, 0) for name in counted}) > 1:
                        with pytest.raises(UnsupportedAdapterError, match="read equally far"):
                            mixed_run(model, cache, names, ids[:, :stop], mask[:, :stop])
                        stop = total
                        continue
                for end in (stop - 1, stop) if count > 1 else (stop,):
                    got = mixed_run(model, cache, names, ids[:, :end], mask[:, :end])
                    assert_rows(got, rows.forward(names, end), mask[:, :end])
                read[key] = total = stop
        finally:
            rows.detach()

    check()


@pytest.mark.parametrize("scheme", WITH_WINDOW)
def test_a_window_as_long_as_the_context_is_exact(scheme: str) -> None:
    model = peft_model(shared=True).double()
    twin = exact_twin(model)
    ids, names = tokens(30, rows=3), (["plan", "act", BASE], ["act", "act", "plan"], ["reflect", BASE, "plan"])
    mask = torch.ones_like(ids)
    cache, rows = LoRASharedCache(model, scheme, handover_window=64), Rows(twin, "non_shared", ids, mask)
    turn(model, cache, "plan", ids[:, :12])
    for assignment, stop in zip(names, (15, 20, 30), strict=True):
        got = mixed_run(model, cache, assignment, ids[:, :stop])
        assert_rows(got, rows.forward(assignment, stop), mask[:, :stop])
    rows.detach()


def test_an_adapter_that_joins_in_one_row_is_read_by_the_whole_batch() -> None:
    model = peft_model().double()
    ids = tokens(20, rows=2)
    cache = LoRASharedCache(model, "base_lr_stacked", agents=["plan"])
    turn(model, cache, "plan", ids[:, :12])
    got = mixed_run(model, cache, ["plan", "act"], ids)
    assert got.shape[1] == 20  # an LR prefill of act's, from the first token on
    for row, name in enumerate(("plan", "act")):
        alone = LoRASharedCache(model, "base_lr_stacked", agents=["plan"])
        turn(model, alone, "plan", ids[row : row + 1, :12])
        want = turn(model, alone, name, ids[row : row + 1])
        assert_close(got[row, -want.shape[1] :], want[0])


@pytest.mark.parametrize("options", [{"attention": "keep"}, {"backend": "reference"}, {}])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_biases_windows_and_every_way_to_attend(scheme: str, options: dict[str, Any]) -> None:
    model = peft_model(config("mistral", sliding_window=6), shared=True, lora_bias=True).double()
    ids = tokens(24, rows=3)
    mask = torch.ones_like(ids)
    mask[2, :4] = 0
    cache = LoRASharedCache(model, scheme, **options)
    for names, stop in ((["plan", "act", BASE], 14), (["plan", "act", BASE], 15), (["plan", "act", BASE], 24)):
        got = mixed_run(model, cache, names, ids[:, :stop], mask[:, :stop])
        for row, name in enumerate(names):
            want = active(
                model,
                None if name == BASE else name,
                lambda row=row, stop=stop: run(
                    model, DynamicCache(), ids[row : row + 1, :stop], mask[row : row + 1, :stop]
                ),
            )
            assert_rows(got[row : row + 1], list(want), mask[row : row + 1, :stop])


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_generate_from_an_empty_cache_is_stock_generate(scheme: str, beams: int) -> None:
    model = peft_model(shared=True)
    ids, names = tokens(9, rows=3), ["act", BASE, "reflect"]
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "num_beams": beams, "max_new_tokens": 6}
    want = model.generate(input_ids=ids, adapter_names=names, **options)
    cache = LoRASharedCache(model, scheme)
    got = model.generate(input_ids=ids, adapter_names=names, **{CACHE_ARG: cache}, **options)
    assert got.tolist() == want.tolist()
    rows = [name for name in names for _ in range(beams)]
    label = "[" + ", ".join("base model" if name == BASE else name for name in rows) + "]"
    assert cache.agents == {label: 14}


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_generate_after_a_handover_is_each_row_alone(scheme: str, beams: int) -> None:
    """A shared prompt in one row, which the first forward expands; each row then goes on with an agent of its own."""
    model = peft_model(shared=True).double()
    prompt, names = tokens(12), ["act", "reflect"]
    options = {"do_sample": False, "num_beams": beams, "max_new_tokens": 5}
    cache = LoRASharedCache(model, scheme)
    for name in ("plan", *(names if scheme in PER_AGENT else ())):
        turn(model, cache, name, prompt[:, :10])
    many = prompt.expand(2, -1)
    got = model.generate(
        input_ids=many, attention_mask=torch.ones_like(many), adapter_names=names, **{CACHE_ARG: cache}, **options
    )
    for row, name in enumerate(names):
        alone = LoRASharedCache(model, scheme)
        turn(model, alone, "plan", prompt[:, :10])
        model.set_adapter(name)
        want = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **{CACHE_ARG: alone}, **options)
        assert got[row].tolist() == want[0].tolist()


@pytest.mark.parametrize("scheme", PER_AGENT)
def test_a_row_that_is_left_alone_goes_on_as_its_agent(scheme: str) -> None:
    """What row 1 read as part of a batch, its agent has read: no prefill, same logits."""
    model = peft_model().double()
    ids = tokens(20, rows=3)
    cache, plain = LoRASharedCache(model, scheme), LoRASharedCache(model, scheme)
    mixed_run(model, cache, ["plan", "act", "plan"], ids[:, :15])
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.agents == {"act": 15}
    got = turn(model, cache, "act", ids[1:2])
    assert got.shape[1] == 5
    turn(model, plain, "act", ids[1:2, :15])
    assert_close(got, turn(model, plain, "act", ids[1:2]))
    assert_close(turn(model, cache, "plan", ids[1:2]), turn(model, plain, "plan", ids[1:2]))


@pytest.mark.parametrize("scheme", PER_AGENT)
def test_of_two_agents_that_become_one_the_one_that_has_read_more_counts(scheme: str) -> None:
    """Rows left with one agent are that agent, in whatever columns its LR lies; it can lend them to a batch again."""
    model = peft_model().double()
    ids = tokens(24, rows=3)
    cache = LoRASharedCache(model, scheme)
    for name in ("plan", "reflect"):
        turn(model, cache, name, ids[:, :6])
    mixed_run(model, cache, ["plan", "reflect", "reflect"], ids[:, :15])
    cache.batch_select_indices(torch.tensor([2, 1]))
    left = ids[[2, 1]]
    assert cache.agents == {"plan": 6, "reflect": 15}
    assert turn(model, cache, "plan", left[:, :15]).shape[1] == 9
    got = mixed_run(model, cache, ["reflect", "plan"], left)
    assert got.shape[1] == 9
    plain = LoRASharedCache(model, scheme)
    for name in ("plan", "reflect"):
        turn(model, plain, name, left[:, :6])
    for name in ("reflect", "plan"):
        turn(model, plain, name, left[:, :15])
    assert_close(
        got, torch.stack([turn(model, plain.fork(), name, left)[row] for row, name in enumerate(("reflect", "plan"))])
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_row_operations_carry_the_rows_agents_along(scheme: str) -> None:
    model = peft_model(shared=True).double()
    ids = tokens(20, rows=3)
    cache = LoRASharedCache(model, scheme)
    mixed_run(model, cache, ["plan", "act", BASE], ids[:, :14])
    order = torch.tensor([2, 0, 1, 0])
    cache.batch_select_indices(order)
    names = ["plan", "act", BASE]
    got = mixed_run(model, cache, [names[row] for row in order], ids[order])
    assert got.shape[1] == 6
    other = LoRASharedCache(model, scheme)
    mixed_run(model, other, names, ids[:, :14])
    assert_close(got, mixed_run(model, other, names, ids)[order])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_forks_copies_and_saved_caches_know_their_rows(scheme: str, tmp_path: Path) -> None:
    model = peft_model(shared=True).double()
    ids, names = tokens(20, rows=2), ["plan", BASE]
    cache = LoRASharedCache(model, scheme)
    mixed_run(model, cache, names, ids[:, :14])
    cache.save(tmp_path / "saved")
    others = [cache.fork(), copy.deepcopy(cache), LoRASharedCache.load(model, tmp_path / "saved")]
    want = mixed_run(model, cache, names, ids)
    for other in others:
        assert other.agents == {"[plan, base model]": 14}
        assert_close(mixed_run(model, other, names, ids), want)


@pytest.mark.parametrize("stand", ["empty", "after its agents", "again"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_failed_forward_leaves_cache_and_model_as_they_were(scheme: str, stand: str) -> None:
    model = peft_model(shared=True)
    ids, names = tokens(20, rows=2), ["plan", "act"]
    cache, each = LoRASharedCache(model, scheme), names if scheme in PER_AGENT else names[:1]
    if stand != "empty":
        for name in each:
            turn(model, cache, name, ids[:, :8])
    if stand == "again":
        mixed_run(model, cache, names, ids[:, :9])
        for name in each:
            turn(model, cache, name, ids[:, :12])
    before, hooks = snapshot(cache), hook_census(model)
    layer = model.get_base_model().model.layers[1]
    with raising(layer, RuntimeError("torn")), pytest.raises(RuntimeError, match="torn"):
        mixed_run(model, cache, names, ids)
    assert_same_state(snapshot(cache), before)
    assert hook_census(model) == hooks  # PEFT leaves its hooks on a forward that raises
    for row, name in enumerate(names):
        alone = LoRASharedCache(model, scheme)
        if stand != "empty":
            turn(model, alone, "plan", ids[row : row + 1, :8])
        if stand == "again":
            turn(model, alone, name, ids[row : row + 1, :9])
            turn(model, alone, "plan", ids[row : row + 1, :12])
        want = turn(model, alone, name, ids[row : row + 1])
        got = mixed_run(model, cache.fork(), names, ids)
        count = min(got.shape[1], want.shape[1])
        assert_close(got[row, -count:], want[0, -count:])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_cannot_be_is_refused_and_nothing_is_left_behind(scheme: str) -> None:
    model = peft_model(shared=True)
    ids = tokens(12, rows=2)
    cache = LoRASharedCache(model, scheme)
    turn(model, cache, "plan", ids[:, :6])
    before, hooks = snapshot(cache), hook_census(model)

    def two(target: LoRASharedCache, names: Names, **options: Any) -> Any:
        return model.generate(ids, adapter_names=names, max_new_tokens=2, **{CACHE_ARG: target}, **options)

    many = LoRASharedCache(model, scheme)
    cases: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "3 rows and the forward brings 2", lambda: two(cache, ["plan", "act", BASE])),
        (ValueError, "0 rows and the forward brings 2", lambda: two(cache, [])),
        (
            ValueError,
            "num_return_sequences",
            lambda: two(many, ["plan", BASE], num_return_sequences=2, do_sample=True),
        ),
    ]
    if scheme in PER_AGENT:
        message = "plan 6, act 0" if scheme == "base_shared" else "read equally far"
        cases.append((UnsupportedAdapterError, message, lambda: two(cache, ["plan", "act"])))
    for error, message, call in cases:
        with torch.no_grad(), pytest.raises(error, match=message):
            call()
        assert_same_state(snapshot(cache), before)
        assert hook_census(model) == hooks
    stock = DynamicCache()
    turn(model, stock, "plan", ids[:, :6])
    assert_close(turn(model, cache, "plan", ids), turn(model, stock, "plan", ids))


@pytest.mark.parametrize("names", [["act", "reflect"], ["act", "act"]])
@pytest.mark.parametrize("where", ["layer", "head"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("scheme", ["full_shared", "base_shared"])
def test_names_do_not_outlive_the_forward_they_were_given_to(
    scheme: str, error: type[BaseException], where: str, names: Names
) -> None:
    """PEFT leaves its hooks when a forward raises; lm_head, outside the decoder, has some too."""
    modules = ["q_proj", "v_proj", "lm_head"]
    model, same = (peft_model(shared=True, target_modules=modules) for _ in range(2))
    ids = tokens(12, rows=2)
    cache = LoRASharedCache(model, scheme)
    module = model.get_base_model().model.layers[1] if where == "layer" else model.get_base_model().lm_head
    with raising(module, error("torn")), pytest.raises(error, match="torn"):
        mixed_run(model, cache, names, ids)
    if error is RuntimeError:  # torch calls no hook for Ctrl-C: the next forward with one of our caches cleans up
        assert_close(turn(model, DynamicCache(), "plan", ids), turn(same, DynamicCache(), "plan", ids))
    got = mixed_run(model, LoRASharedCache(model, scheme), ["act", "plan"], ids)
    for row, name in enumerate(("act", "plan")):
        assert_close(got[row], turn(same, DynamicCache(), name, ids[row : row + 1])[0])
    got = turn(model, LoRASharedCache(model, scheme), "reflect", ids)
    assert_close(got, turn(same, DynamicCache(), "reflect", ids))


def test_an_adapter_that_changed_since_is_not_taken_over() -> None:
    model = peft_model()
    ids = tokens(12, rows=2)
    cache = LoRASharedCache(model, "base_shared")
    for name in ("plan", "act"):
        turn(model, cache, name, ids[:, :8])
    before = snapshot(cache)
    model.get_base_model().model.layers[2].self_attn.v_proj.lora_A["plan"].weight.data.mul_(-1)
    with pytest.raises(AdapterChangedError, match="'plan'"):
        mixed_run(model, cache, ["plan", "act"], ids)
    assert_same_state(snapshot(cache), before)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_dora_is_refused_because_peft_does_not_run_it_by_rows(scheme: str) -> None:
    model = peft_model(shared=True, use_dora=True)
    with pytest.raises(UnsupportedAdapterError, match=r"DoRA.*adapter_names"):
        mixed_run(model, LoRASharedCache(model, scheme), ["plan", "act"], tokens(6, rows=2))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_with_adapters_on_k_proj(scheme: str) -> None:
    model = peft_model(shared=True, target_modules="all-linear").double()
    ids, names = tokens(20, rows=3), ["act", BASE, "reflect"]
    cache = LoRASharedCache(model, scheme)
    before = ("plan", "act", "reflect", None) if scheme == "non_shared" else ("plan", "act", "reflect")
    for name in before if scheme in PER_AGENT else ("plan",):
        turn(model, cache, name, ids[:, :10])
    got = mixed_run(model, cache, names, ids)
    for row, name in enumerate(names):
        alone = LoRASharedCache(model, scheme)
        turn(model, alone, "plan", ids[row : row + 1, :10])
        want = turn(model, alone, None if name == BASE else name, ids[row : row + 1])
        assert_close(got[row], want[0, -10:])


def test_the_report_names_what_a_mixed_batch_keeps() -> None:
    model = peft_model()
    ids = tokens(12, rows=2)
    cache = LoRASharedCache(model, "base_shared")
    for name in ("plan", "reflect"):
        turn(model, cache, name, ids[:, :6])
    mixed_run(model, cache, ["plan", "reflect"], ids)
    rows = {(row.part, row.owner): row.tokens for row in cache.memory_report().rows}
    assert rows["LR", "plan"] == rows["LR", "reflect"] == 6
    assert rows["LR", "[plan, reflect]"] == 12
    one = LoRASharedCache(model, "non_shared")
    mixed_run(model, one, ["plan", "reflect"], ids)
    assert one.memory_report().unshared_bytes == one.memory_report().in_use_bytes  # each row by one agent alone


def test_a_row_that_is_left_keeps_its_own_columns_only() -> None:
    model = peft_model()
    ids = tokens(12, rows=2)
    cache, alone = LoRASharedCache(model, "base_shared"), LoRASharedCache(model, "base_shared")
    mixed_run(model, cache, ["plan", "reflect"], ids)
    cache.batch_select_indices(torch.tensor([1]))
    turn(model, alone, "reflect", ids[1:])
    assert cache.memory_report().in_use_bytes == alone.memory_report().in_use_bytes
    ids = torch.cat([ids[1:], tokens(4, seed=1)], 1)
    assert_close(turn(model, cache, "reflect", ids), turn(model, alone, "reflect", ids))
