"""A drop-in: whatever stock generate, PEFT and transformers can be asked to do, a shared cache goes along with."""

import copy
import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache as remember
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from peft.utils import save_and_load
from tiny import (
    AGENTS,
    VOCAB,
    WITH_WINDOW,
    active,
    assert_alone,
    assert_close,
    assert_same_state,
    base_model,
    config,
    decoder_of,
    peft_model,
    raising,
    randomise,
    run,
    snapshot,
    tokens,
    write,
)
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    TextIteratorStreamer,
)

from lragent_hf import CACHE_ARG, LoRASharedCache
from lragent_hf.errors import TrajectoryMismatchError

IDS = tokens(60)
LATER = ("act", "reflect", "plan", "act")


@remember
def agents(shared: bool) -> PeftModel:
    return peft_model(shared=shared)


def agents_for(scheme: str) -> PeftModel:
    """A model whose adapters the scheme takes: of their own A where it can, plan active."""
    model = agents(scheme == "base_lr_shared")
    model.set_adapter("plan")
    return model


def observe(ids: Tensor, count: int, seed: int = 0) -> Tensor:
    """The trajectory with ``count`` tokens from outside appended."""
    return torch.cat([ids, tokens(count, ids.shape[0], seed + 20)], 1)


def take_turns(model: Any, cache: LoRASharedCache, ids: Tensor, **options: Any) -> Tensor:
    """plan reads the prompt and writes; each of the others gets an observation and writes."""
    model.set_adapter("plan")
    ids = write(model, ids, 4, cache, **options)
    for turn, name in enumerate(LATER):
        model.set_adapter(name)
        ids = write(model, observe(ids, 5, turn), 3, cache, **options)
    return ids


# --- generate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="greedy"),
        pytest.param({"do_sample": True, "temperature": 1.3, "top_k": 20}, id="sampling"),
        pytest.param({"do_sample": True, "num_return_sequences": 3}, id="several sequences"),
        pytest.param({"num_beams": 3}, id="beams"),
        pytest.param({"num_beams": 4, "num_return_sequences": 2}, id="several beams"),
        pytest.param({"prefill_chunk_size": 4}, id="chunks"),
        pytest.param({"prefill_chunk_size": 64}, id="chunk longer than the prompt"),
        pytest.param({"prompt_lookup_num_tokens": 2}, id="prompt lookup"),
        pytest.param({"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}, id="processors"),
    ],
)
@pytest.mark.parametrize("name", ["plan", "reflect"])
def test_one_agent_writes_what_it_writes_with_a_plain_cache(scheme: str, name: str, options: dict[str, Any]) -> None:
    model = agents_for(scheme)
    model.set_adapter(name)
    torch.manual_seed(3)
    want = write(
        model, IDS[:, :19], 9, **({CACHE_ARG: DynamicCache()} if "prefill_chunk_size" in options else {}), **options
    )
    torch.manual_seed(3)
    got = write(model, IDS[:, :19], 9, LoRASharedCache(model, scheme), **options)
    assert torch.equal(got, want)


@pytest.mark.parametrize("rows", [1, 2])
def test_turns_of_generate_are_turns_of_plain_forwards(scheme: str, rows: int) -> None:
    model = agents_for(scheme)
    by_generate, by_hand = LoRASharedCache(model, scheme), LoRASharedCache(model, scheme)
    prompt = tokens(11, rows)
    got = take_turns(model, by_generate, prompt)

    def loop(ids: Tensor, count: int) -> Tensor:
        for _ in range(count):
            ids = torch.cat([ids, run(model, by_hand, ids)[:, -1:].argmax(-1)], 1)
        return ids

    model.set_adapter("plan")
    ids = loop(prompt, 4)
    for turn, name in enumerate(LATER):
        model.set_adapter(name)
        ids = loop(observe(ids, 5, turn), 3)
    assert torch.equal(got, ids)
    assert_same_state(snapshot(by_generate), snapshot(by_hand))


@pytest.mark.parametrize("size", [1, 4, 7])
@pytest.mark.parametrize("window", [0, 6])
def test_turns_in_chunks_are_turns_without(scheme: str, window: int, size: int) -> None:
    model = agents_for(scheme)
    if window and scheme not in WITH_WINDOW:
        with pytest.raises(ValueError, match="handover_window"):
            LoRASharedCache(model, scheme, handover_window=window)
        return
    chunked, whole = (LoRASharedCache(model, scheme, handover_window=window) for _ in range(2))
    if "past_length = 0" in inspect.getsource(GenerationMixin._prefill):
        # This transformers starts at zero whatever is cached: right on an empty cache, and refused on any other.
        ids = observe(write(model, IDS[:, :19], 4, chunked, prefill_chunk_size=size), 5)
        before = snapshot(chunked)
        with pytest.raises(TrajectoryMismatchError):
            write(model, ids, 3, chunked, prefill_chunk_size=size)
        assert_same_state(snapshot(chunked), before)
        assert torch.equal(write(model, ids, 3, chunked), write(model, ids, 3))
        return
    got = take_turns(model, chunked, IDS[:, :19], prefill_chunk_size=size)
    assert torch.equal(got, take_turns(model, whole, IDS[:, :19]))
    model.set_adapter("reflect")
    more = observe(got, 8)
    assert chunked.get_seq_length() == whole.get_seq_length()
    assert_close(run(model, chunked, more), run(model, whole, more))


def test_only_the_new_tokens_are_enough_where_nothing_is_read_again(scheme: str) -> None:
    model = agents_for(scheme)
    whole, new = LoRASharedCache(model, scheme), LoRASharedCache(model, scheme)
    for cache in (whole, new):
        model.set_adapter("plan")
        ids = write(model, IDS[:, :9], 3, cache)
    for turn, name in enumerate(("plan", "plan") if scheme in ("non_shared", "base_shared") else LATER):
        model.set_adapter(name)
        past, prompt = new.get_seq_length(), observe(ids, 5, turn)
        assert past == ids.shape[1] - 1
        ids = write(model, prompt, 3, whole)
        mask = torch.ones_like(prompt)
        got = write(model, prompt[:, past:], 3, new, attention_mask=mask)
        assert torch.equal(got, ids[:, past:])
    assert_same_state(snapshot(new), snapshot(whole))


def test_beams_hand_over_to_another_agent(scheme: str) -> None:
    model = agents_for(scheme)
    cache, plain = LoRASharedCache(model, scheme), LoRASharedCache(model, scheme)
    out = write(model, IDS[:, :9], 4, cache, num_beams=3, return_dict_in_generate=True)
    ids = write(model, IDS[:, :9], 4, num_beams=3)
    assert torch.equal(out.sequences, ids)
    length = cache.align(ids)
    assert cache.batch_size == 1
    assert length >= 9
    run(model, plain, ids[:, :length])
    model.set_adapter("act")
    prompt = observe(ids, 5)
    assert_close(run(model, cache, prompt)[:, -5:], run(model, plain, prompt)[:, -5:])


def test_assisted_decoding_with_a_draft_model(scheme: str) -> None:
    """The draft proposes, the agent accepts or crops: the same tokens, and a cache that another agent continues."""
    model = agents_for(scheme)
    draft = base_model(config(num_hidden_layers=1), seed=3)
    cache, plain = LoRASharedCache(model, scheme), LoRASharedCache(model, scheme)
    ids = write(model, IDS[:, :9], 8, cache, assistant_model=draft)
    assert torch.equal(ids, write(model, IDS[:, :9], 8))
    length = cache.align(ids)
    run(model, plain, ids[:, :length])
    model.set_adapter("act")
    more = observe(ids, 5)
    assert_close(run(model, cache, more)[:, -5:], run(model, plain, more)[:, -5:])
    before = snapshot(cache)
    with pytest.raises(TrajectoryMismatchError):  # generate feeds all of it again on the first step
        write(model, observe(more, 2), 4, cache, assistant_model=draft)
    assert_same_state(snapshot(cache), before)


def test_a_trajectory_branches_into_several_rows(scheme: str) -> None:
    model = agents_for(scheme)
    cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :12])
    cache.batch_repeat_interleave(3)
    rows = torch.cat([IDS[:, :12].expand(3, -1), tokens(5, 3)], 1)
    alone = []
    for row in rows:
        one = LoRASharedCache(model, scheme)
        run(model, one, IDS[:, :12])
        model.set_adapter("act")
        alone.append(write(model, row[None], 4, one))
        model.set_adapter("plan")
    model.set_adapter("act")
    assert torch.equal(write(model, rows, 4, cache), torch.cat(alone))


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}], ids=str)
def test_a_cache_of_one_row_expands_for_beams(scheme: str, options: dict[str, Any]) -> None:
    """Another agent searches with beams on what was read, twice; `align` chooses the row that goes on."""
    model = agents_for(scheme)
    cache, plain = LoRASharedCache(model, scheme), LoRASharedCache(model, scheme)
    for one in (cache, plain):
        run(model, one, IDS[:, :14])
    model.set_adapter("act")
    plain.batch_repeat_interleave(options["num_beams"])
    prompt = observe(IDS[:, :14], 3)
    ids = write(model, prompt, 5, cache, **options)
    assert torch.equal(ids, write(model, prompt, 5, plain, **options))
    assert cache.batch_size == options["num_beams"]
    best = ids[:1]
    assert cache.align(best) >= prompt.shape[1]
    assert cache.batch_size == 1
    model.set_adapter("plan")
    more = observe(best, 4)
    one = LoRASharedCache(model, scheme)
    run(model, one, IDS[:, :14])
    model.set_adapter("act")
    run(model, one, best[:, : cache.ledger.total])
    model.set_adapter("plan")
    assert_close(run(model, cache, more)[:, -3:], run(model, one, more)[:, -3:])


def test_an_expansion_that_fails_is_undone(scheme: str) -> None:
    model = agents_for(scheme)
    cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :14])
    before = snapshot(cache)
    model.set_adapter("act")
    rows = torch.cat([IDS[:, :14].expand(3, -1), tokens(4, 3)], 1)
    with raising(decoder_of(model).layers[2], RuntimeError("on purpose")), pytest.raises(RuntimeError, match="purpose"):
        run(model, cache, rows)
    assert_same_state(snapshot(cache), before)
    assert cache.batch_size == 1
    want = [run(model, cache.fork(), row[None]) for row in rows]
    assert_close(run(model, cache, rows), torch.cat(want))


def test_the_returned_cache_is_ours_and_goes_on(scheme: str) -> None:
    model = agents_for(scheme)
    cache = LoRASharedCache(model, scheme)
    out = write(model, IDS[:, :9], 4, cache, return_dict_in_generate=True, output_logits=True)
    assert out[CACHE_ARG] is cache
    stock = write(model, IDS[:, :9], 4, return_dict_in_generate=True, output_logits=True)
    assert_close(torch.stack(out.logits), torch.stack(stock.logits))
    more = observe(out.sequences, 5)
    assert torch.equal(write(model, more, 4, out[CACHE_ARG]), write(model, more, 4))
    with torch.no_grad():
        forward = model(input_ids=IDS[:, :5], **{CACHE_ARG: LoRASharedCache(model, scheme)})
    assert isinstance(forward[CACHE_ARG], LoRASharedCache)


class Letters:
    """As much of a tokenizer as a streamer needs."""

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(f"<{int(i)}> " for i in torch.as_tensor(ids).flatten())


def test_streaming_from_a_thread(scheme: str) -> None:
    model = agents_for(scheme)
    cache = LoRASharedCache(model, scheme)
    ids = write(model, IDS[:, :9], 3, cache)
    model.set_adapter("act")
    prompt = observe(ids, 5)
    expected = write(model, prompt, 6, copy.deepcopy(cache))
    streamer = TextIteratorStreamer(Letters(), skip_prompt=True, timeout=60)  # type: ignore[arg-type]
    thread = threading.Thread(target=write, args=(model, prompt, 6, cache), kwargs={"streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join(60)
    assert text == Letters().decode(expected[0, prompt.shape[1] :])


def test_the_cache_argument_by_its_old_name(scheme: str) -> None:
    model = agents_for(scheme)
    deprecated = pytest.warns(FutureWarning, match="past_key_values") if CACHE_ARG == "cache" else nullcontext()
    with deprecated:
        got = model.generate(
            input_ids=IDS[:, :9], attention_mask=torch.ones(1, 9), max_new_tokens=4, do_sample=False,
            past_key_values=LoRASharedCache(model, scheme),
        )  # fmt: skip
    assert torch.equal(got, write(model, IDS[:, :9], 4))
    cache = LoRASharedCache(model, scheme)
    deprecated = pytest.warns(FutureWarning, match="past_key_values") if CACHE_ARG == "cache" else nullcontext()
    with deprecated, torch.no_grad():
        logits = model(input_ids=IDS[:, :9], past_key_values=cache).logits
    assert_close(logits, model(IDS[:, :9]).logits)
    assert cache.get_seq_length() == 9


@pytest.mark.skipif(CACHE_ARG != "cache", reason="this transformers knows past_key_values only")
def test_the_cache_argument_by_its_new_name(scheme: str) -> None:
    model = agents_for(scheme)
    got = model.generate(input_ids=IDS[:, :9], max_new_tokens=4, do_sample=False, cache=LoRASharedCache(model, scheme))
    assert torch.equal(got, write(model, IDS[:, :9], 4))


def test_a_cache_as_positional_argument_of_the_decoder() -> None:
    model = agents_for("base_lr_stacked")
    cache, decoder = LoRASharedCache(model), decoder_of(model)
    with torch.no_grad():
        want = decoder(IDS[:, :9]).last_hidden_state
        got = decoder(IDS[:, :9], None, None, cache).last_hidden_state
    assert_close(got, want)
    assert cache.get_seq_length() == 9


# --- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 6, 100])
@pytest.mark.parametrize("attention", ["auto", "keep"])
def test_padded_rows_equal_each_row_alone(scheme: str, attention: str, window: int) -> None:
    """Padding on the left of the prompt and in the middle, where rows observe more or less than others."""
    model = agents_for(scheme)
    if window and scheme not in WITH_WINDOW:
        with pytest.raises(ValueError, match="handover_window"):
            LoRASharedCache(model, scheme, handover_window=window)
        return
    options: dict[str, Any] = {"attention": attention, "handover_window": window}
    batch = LoRASharedCache(model, scheme, **options)
    alone = [LoRASharedCache(model, scheme, **options) for _ in range(3)]
    ids, mask = torch.zeros(3, 0, dtype=torch.long), torch.zeros(3, 0, dtype=torch.long)
    rows: list[Tensor] = [tokens(0)] * 3
    for turn, (name, lengths) in enumerate(
        (("plan", (9, 4, 6)), ("plan", (1, 1, 1)), ("act", (5, 5, 5)), ("reflect", (4, 7, 2)), ("plan", (3, 1, 3)))
    ):
        model.set_adapter(name)
        width = max(lengths)
        new, bits = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
        for row, length in enumerate(lengths):
            new[row, width - length :] = tokens(length, seed=10 * turn + row)[0]
            bits[row, width - length :] = 1
            rows[row] = torch.cat([rows[row], new[row : row + 1, width - length :]], 1)
        ids, mask = torch.cat([ids, new], 1), torch.cat([mask, bits], 1)
        if window == 6 and turn > 1:  # six positions of the batch are not six tokens of a row
            assert run(model, batch, ids, mask).isfinite().all()
            continue
        got = run(model, batch, ids, mask)
        for row, length in enumerate(lengths):
            want = run(model, alone[row], rows[row])
            assert_close(got[row : row + 1, got.shape[1] - length :], want[:, want.shape[1] - length :])


def test_generate_on_left_padded_rows_equals_each_row_alone(scheme: str) -> None:
    model = agents_for(scheme)
    lengths = (9, 4, 6)
    ids, mask = torch.zeros(3, 9, dtype=torch.long), torch.zeros(3, 9, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, 9 - length :] = tokens(length, seed=row)[0]
        mask[row, 9 - length :] = 1
    cache = LoRASharedCache(model, scheme)
    alone = [(LoRASharedCache(model, scheme), tokens(length, seed=row)) for row, length in enumerate(lengths)]
    for turn, name in enumerate(("plan", *LATER)):
        model.set_adapter(name)
        if turn:
            ids, mask = observe(ids, 5, turn), torch.cat([mask, torch.ones(3, 5, dtype=torch.long)], 1)
        before = ids
        ids = write(model, ids, 3, cache, attention_mask=mask)
        mask = torch.cat([mask, torch.ones(3, 3, dtype=torch.long)], 1)
        for row, (each, own) in enumerate(alone):
            own = torch.cat([own, before[row : row + 1, before.shape[1] - 5 :]], 1) if turn else own
            own = write(model, own, 3, each)
            alone[row] = (each, own)
            assert torch.equal(own[0, -3:], ids[row, -3:])


# --- which agent runs -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
@pytest.mark.filterwarnings("ignore:Could not find a config file")
def test_transformers_own_adapter_methods(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers asks for a newer PEFT than it needs for what is called here
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.18")
    model = base_model(config())
    lora = LoraConfig(r=5, lora_alpha=10, target_modules=["q_proj", "v_proj"])
    for name in ("plan", "act"):
        model.add_adapter(lora, adapter_name=name)
    randomise(model, shared=scheme == "base_lr_shared")
    model.eval()
    model.set_adapter("plan")
    cache = LoRASharedCache(model, scheme)
    model.save_pretrained(tmp_path)
    assert_alone(model, LoRASharedCache(model, scheme), IDS)
    run(model, cache, IDS[:, :10])
    model.set_adapter("act")
    assert_alone(model, LoRASharedCache(model, scheme), IDS)
    run(model, cache, IDS[:, :20])
    model.disable_adapters()
    assert_alone(model, LoRASharedCache(model, scheme), IDS)
    run(model, cache, IDS[:, :30])
    model.enable_adapters()
    model.set_adapter("plan")
    if hasattr(save_and_load, "_maybe_shard_state_dict_for_tp"):
        model.load_adapter(str(tmp_path), adapter_name="copy")
    else:  # a PEFT too old for transformers' load_adapter
        model.add_adapter(lora, adapter_name="copy")
        randomise(model, seed=4, only="copy", shared=scheme == "base_lr_shared")
    model.eval()
    model.set_adapter("copy")
    assert_alone(model, LoRASharedCache(model, scheme), IDS)
    got = run(model, cache, IDS)
    expected = {"plan": 60, "act": 60, "base model": 60, "copy": 60}
    if scheme == "non_shared":
        expected = {"plan": 10, "act": 20, "base model": 30, "copy": 60}
    if scheme == "base_shared":
        expected = {"plan": 10, "act": 20, "base model": 60, "copy": 60}
    assert cache.agents == expected
    if scheme == "non_shared":
        assert_close(got, model(IDS).logits)


def test_disabled_adapters_are_the_base_model(scheme: str) -> None:
    model = agents_for(scheme)
    with model.disable_adapter():
        assert_alone(model, LoRASharedCache(model, scheme), IDS)
    cache = LoRASharedCache(model, scheme)
    run(model, cache, IDS[:, :10])
    with model.disable_adapter():
        assert cache.get_seq_length() == (0 if scheme == "non_shared" else 10)
        run(model, cache, IDS[:, :20])
    model.set_adapter("act")
    logits = run(model, cache, IDS)
    assert "base model" in cache.agents
    if scheme == "non_shared":
        assert_close(logits, model(IDS).logits)


@pytest.mark.parametrize("names", [["plan", "act"], ["act", "plan"], ["plan", "act", "reflect"]], ids="+".join)
def test_several_adapters_at_once_are_an_agent_of_their_own(scheme: str, names: list[str]) -> None:
    model = agents_for(scheme)
    try:
        model.base_model.set_adapter(names)
        assert_alone(model, LoRASharedCache(model, scheme), IDS)
        assert_alone(model, LoRASharedCache(model, scheme, attention="keep"), IDS)
        assert_alone(model, LoRASharedCache(model, scheme, agents=[]), IDS)
        if scheme in WITH_WINDOW:  # after others: a window over everything is exact
            cache = LoRASharedCache(model, scheme, handover_window=100, agents=["plan"])
            model.set_adapter("plan")
            run(model, cache, IDS[:, :20])
            model.base_model.set_adapter(names)
            assert_close(run(model, cache, IDS), model(IDS).logits)
    finally:
        model.set_adapter("plan")


def test_switching_mid_sequence_with_single_tokens(scheme: str) -> None:
    model = agents_for(scheme)
    cache, chunks = LoRASharedCache(model, scheme), LoRASharedCache(model, scheme)
    for stop in range(1, 25):
        model.set_adapter(AGENTS[stop % 3])
        got = run(model, cache, IDS[:, :stop])
        want = run(model, chunks, IDS[:, :stop])
        assert torch.equal(got, want)
    if scheme == "non_shared":
        assert_close(got, model(IDS[:, :24]).logits[:, -got.shape[1] :])


# --- kinds of adapters ------------------------------------------------------------------------------------------------

LINEAR = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "ranks": ({}, {"plan": {"r": 1}, "act": {"r": 8}, "reflect": {"r": 13}}),
    "rslora": ({}, {"plan": {"use_rslora": True}, "act": {}, "reflect": {"use_rslora": True, "r": 7}}),
    "lora bias on a biased v_proj": ({"attention_bias": True}, {"plan": {"lora_bias": True}, "act": {"lora_bias": True}}),
    "lora bias on plain v_proj": ({}, {"plan": {"lora_bias": True}, "act": {}, "reflect": {"lora_bias": True}}),
    "biased v_proj": ({"attention_bias": True}, {"plan": {}, "act": {}}),
    "q_proj only": ({}, {"plan": {"target_modules": ["q_proj"]}, "act": {}, "reflect": {"target_modules": ["q_proj"]}}),
    "v_proj only": ({}, {"plan": {"target_modules": ["v_proj"]}, "act": {"target_modules": ["v_proj"]}}),
    "no LoRA on v_proj at all": ({}, {"plan": {"target_modules": ["q_proj"]}, "act": {"target_modules": ["o_proj"]}}),
    "all linear layers but k_proj": ({}, {"plan": {"target_modules": LINEAR}, "act": {"target_modules": LINEAR}}),
    "some layers": ({}, {"plan": {"layers_to_transform": [0, 2]}, "act": {"layers_to_transform": [1]}, "reflect": {}}),
    "alpha pattern": ({}, {"plan": {"alpha_pattern": {"v_proj": 3}}, "act": {"rank_pattern": {"v_proj": 9}}}),
}  # fmt: skip


def model_with(kind: str, scheme: str, **more: Any) -> tuple[PeftModel, list[str]]:
    """A model of that kind of adapters, and their names. Where A is to be shared, ranks are equal."""
    options, adapters = KINDS[kind]
    shared = scheme == "base_lr_shared"
    if shared:
        adapters = {
            name: {key: value for key, value in lora.items() if key not in ("r", "rank_pattern")}
            for name, lora in adapters.items()
        }
    return peft_model(config(**options, **more), adapters, shared=shared), list(adapters)


biased = pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed but the targeted layer")


@biased
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_adapters_alone(scheme: str, kind: str) -> None:
    model, names = model_with(kind, scheme)
    for name in names:
        model.set_adapter(name)
        assert_alone(model, LoRASharedCache(model, scheme), IDS, parts=(9, 1, 20, 1))
    with model.disable_adapter():
        assert_alone(model, LoRASharedCache(model, scheme), IDS)


@biased
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", WITH_WINDOW, indirect=True)
def test_kinds_of_adapters_after_others_with_a_window_over_everything(scheme: str, kind: str) -> None:
    model, names = model_with(kind, scheme)
    cache = LoRASharedCache(model, scheme, handover_window=100)
    for turn, name in enumerate([*names, *names, None]):
        ids = IDS[:, : 8 + 5 * turn]
        got, want = active(model, name, lambda ids=ids: (run(model, cache, ids), model(ids).logits))
        assert_close(got, want)


@biased
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "some layers"])
def test_stacked_is_base_shared_without_the_prefill(kind: str) -> None:
    """With one layer, hidden states do not depend on who runs: then what is written along is what a prefill writes."""
    model, names = model_with(kind, "base_lr_stacked", num_hidden_layers=1)
    stacked, prefilled = LoRASharedCache(model, "base_lr_stacked"), LoRASharedCache(model, "base_shared")
    for turn, name in enumerate([*names, *names]):
        model.set_adapter(name)
        ids = IDS[:, : 8 + 5 * turn]
        got = run(model, stacked, ids)
        assert got.shape[1] == (8 if turn == 0 else 5)
        assert_close(got, run(model, prefilled, ids)[:, -got.shape[1] :])


@pytest.mark.filterwarnings("ignore:Could not find a config file")
@pytest.mark.parametrize("had_lora", [True, False], ids=["v_proj had LoRA", "v_proj had none"])
def test_an_adapter_loaded_later_joins(scheme: str, had_lora: bool, tmp_path: Path) -> None:
    targets = ["q_proj", "v_proj"] if had_lora else ["q_proj"]
    shared = scheme == "base_lr_shared"
    first = {"plan": {"target_modules": targets}}
    model = peft_model(adapters=first)
    complete = copy.deepcopy(model)
    complete.add_adapter("late", LoraConfig(r=5, target_modules=["q_proj", "v_proj"]))
    randomise(complete, seed=6, only="late", shared=shared)
    complete.eval().save_pretrained(tmp_path)
    # With LoRA on v_proj in one adapter alone, base_lr_shared is base_lr_stacked.
    cache = LoRASharedCache(model, scheme)
    want = LoRASharedCache(complete, scheme if had_lora or not shared else "base_lr_stacked", agents=["plan"])
    for each, one in ((model, cache), (complete, want)):
        ids = write(each, IDS[:, :10], 3, one)
    model.load_adapter(str(tmp_path / "late"), adapter_name="late")
    model.eval()
    for turn, name in enumerate(("late", "plan", "late", "plan")):
        model.set_adapter(name)
        complete.set_adapter(name)
        ids = observe(ids, 4, turn)
        assert_close(run(model, cache, ids), run(complete, want, ids))
    model.set_adapter("late")
    assert_alone(model, LoRASharedCache(model, scheme), IDS)


@pytest.mark.parametrize("attention", ["auto", "keep"])
def test_fp32_adapters_on_a_bf16_model(scheme: str, attention: str) -> None:
    """As far from the same model in fp32 as a plain cache is."""
    exact = peft_model(shared=scheme == "base_lr_shared")
    model = copy.deepcopy(exact)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    assert decoder_of(model).layers[0].self_attn.v_proj.lora_A["plan"].weight.dtype == torch.float32
    for name in AGENTS:
        model.set_adapter(name)
        exact.set_adapter(name)
        cache, plain = LoRASharedCache(model, scheme, attention=attention), DynamicCache()
        want = exact(IDS).logits
        errors = []
        for each in (cache, plain):
            logits = torch.cat([run(model, each, IDS[:, :stop]) for stop in (30, 31, 60)], 1)
            errors.append((logits.float() - want).square().mean().sqrt())
        assert errors[0] <= 1.5 * errors[1]
        assert cache.layers[0].k[cache.active_stream()].data.dtype == torch.bfloat16


# --- attention implementations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_kept_attention_equals_auto(scheme: str, implementation: str) -> None:
    model = agents_for(scheme)
    kept, auto = LoRASharedCache(model, scheme, attention="keep"), LoRASharedCache(model, scheme)
    try:
        for turn, name in enumerate(("plan", "plan", *LATER)):
            model.set_adapter(name)
            ids = IDS[:, : 9 + 4 * turn + (turn > 0)]
            model.set_attn_implementation(implementation)
            got = run(model, kept, ids)
            model.set_attn_implementation("sdpa")
            assert_close(got, run(model, auto, ids))
    finally:
        model.set_attn_implementation("sdpa")


def test_the_users_eager_attention(scheme: str) -> None:
    model = peft_model(config(attn_implementation="eager"), shared=scheme == "base_lr_shared")
    assert_alone(model, LoRASharedCache(model, scheme), IDS)
    assert model.config._attn_implementation == "eager"


def test_attention_weights_are_given_when_asked_for(scheme: str) -> None:
    model = peft_model(config(attn_implementation="eager"), shared=scheme == "base_lr_shared")
    cache, plain, silent = LoRASharedCache(model, scheme), DynamicCache(), LoRASharedCache(model, scheme)
    for stop in (9, 10, 20):
        past = cache.get_seq_length()
        mask = torch.ones(1, stop)
        with torch.no_grad():
            got, want = (
                model(input_ids=IDS[:, past:stop], attention_mask=mask, output_attentions=True, **{CACHE_ARG: each})
                for each in (cache, plain)
            )
        assert len(got.attentions) == 3
        for mine, theirs in zip(got.attentions, want.attentions, strict=True):
            assert_close(mine, theirs)
        assert_close(got.logits, want.logits)
        run(model, silent, IDS[:, :stop])
    model.set_adapter("act")
    assert_close(run(model, cache, IDS, output_attentions=True), run(model, silent, IDS))
    out = write(
        model, IDS[:, :9], 3, LoRASharedCache(model, scheme), output_attentions=True, return_dict_in_generate=True
    )
    assert out.attentions[0][0].shape == (1, 6, 9, 9)


def model_of(kind: str, shared: bool) -> PeftModel:
    options: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8, "initializer_range": 0.15, "pad_token_id": 0,
        "bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 512,
    }  # fmt: skip
    if kind == "gemma2":  # whose soft cap some versions of transformers drop under sdpa
        options.update(attn_implementation="eager")
    if kind == "gpt_oss":
        options.update(num_local_experts=2, num_experts_per_tok=1)
    return peft_model(AutoConfig.for_model(kind, **options), shared=shared)


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gemma3_text", "cohere2", "gpt_oss"])
def test_sliding_windows_soft_caps_and_sinks(scheme: str, kind: str) -> None:
    model = model_of(kind, scheme == "base_lr_shared")
    assert_alone(model, LoRASharedCache(model, scheme), IDS, parts=(30, 1, 1, 10, 1))
    assert_alone(model, LoRASharedCache(model, scheme, attention="keep"), IDS, parts=(30, 1, 10, 1))
    assert torch.equal(write(model, IDS[:, :30], 4, LoRASharedCache(model, scheme)), write(model, IDS[:, :30], 4))
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :7] = 0
    rows = tokens(40, 2).masked_fill(mask == 0, 0)
    cache, plain = LoRASharedCache(model, scheme), DynamicCache()
    for stop in (30, 31, 40):
        got, want = (run(model, each, rows[:, :stop], mask[:, :stop]) for each in (cache, plain))
        assert_close(got[0], want[0])
        if stop > 30:
            assert_close(got[1], want[1])
    if scheme in WITH_WINDOW:
        cache = LoRASharedCache(model, scheme, handover_window=100)
        for stop, name in ((20, "act"), (30, "plan"), (40, "reflect")):
            model.set_adapter(name)
            assert_close(run(model, cache, IDS[:, :stop]), model(IDS[:, :stop]).logits)


# --- inference mode, copies, cutting ----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["inference first", "inference later", "inference in between"])
@pytest.mark.parametrize("created", [True, False], ids=["created in inference mode", "created outside"])
@pytest.mark.parametrize("spare", [8, 256], ids=["growing", "roomy"])
def test_inference_mode_and_generate_mix(
    scheme: str, spare: int, created: bool, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers are born, written and made larger in either mode."""
    monkeypatch.setattr("lragent_hf.buffer._SPARE", spare)
    model = agents_for(scheme)
    with torch.inference_mode(created):
        cache = LoRASharedCache(model, scheme)
    plain, ids = LoRASharedCache(model, scheme), IDS[:, :9]
    for turn, name in enumerate(("plan", "act", "plan", "reflect")):
        model.set_adapter(name)
        inference = {"inference first": turn < 2, "inference later": turn > 1, "inference in between": turn in (1, 2)}[
            order
        ]
        ids = observe(ids, 20, turn)
        expected = write(model, ids, 3, plain)
        with torch.inference_mode(inference):
            got = write(model, ids, 3, cache)
        assert torch.equal(got, expected)
        with torch.inference_mode(not inference):
            cache.crop(-1)
        plain.crop(-1)
        ids = expected[:, :-2].clone()
    assert_same_state(snapshot(cache), snapshot(plain))


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda cache: cache.reorder_cache(torch.tensor([1, 0])) or cache, id="reorder"),
        pytest.param(lambda cache: cache.batch_select_indices(torch.tensor([0, 1])) or cache, id="select"),
        pytest.param(copy.deepcopy, id="copy"),
    ],
)
def test_what_inference_mode_made_can_be_written_outside(scheme: str, operation: Any) -> None:
    model = agents_for(scheme)
    cache, plain, ids = LoRASharedCache(model, scheme), LoRASharedCache(model, scheme), tokens(20, rows=2)
    for each in (cache, plain):
        run(model, each, ids[:, :9])
    with torch.inference_mode():
        cache = operation(cache)
    plain = operation(plain)
    ids = torch.cat([plain.trajectory.tokens.read(9), ids[:, 9:]], 1)
    assert torch.equal(run(model, cache, ids), run(model, plain, ids))
    assert_same_state(snapshot(cache), snapshot(plain))


def test_forwards_with_gradients_enabled_are_as_without(scheme: str) -> None:
    model = agents_for(scheme)
    cache, plain = LoRASharedCache(model, scheme), LoRASharedCache(model, scheme)
    for stop in (9, 10, 30):
        logits = model(input_ids=IDS[:, cache.get_seq_length() : stop], **{CACHE_ARG: cache}).logits
        assert_close(logits, run(model, plain, IDS[:, :stop]))
    assert not any(buffer.data.requires_grad for buffer in cache.buffers())


def test_a_copy_shares_the_model_and_nothing_else(scheme: str) -> None:
    model = agents_for(scheme)
    cache = LoRASharedCache(model, scheme)
    ids = write(model, IDS[:, :9], 3, cache)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    before = snapshot(cache)
    twin = copy.deepcopy(cache)
    assert [parameter.data_ptr() for parameter in twin.binding.decoder.parameters()] == [
        parameter.data_ptr() for parameter in decoder_of(model).parameters()
    ]
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    owned = {buffer.data.untyped_storage().data_ptr() for buffer in cache.buffers()}
    assert not owned & {buffer.data.untyped_storage().data_ptr() for buffer in twin.buffers()}
    model.set_adapter("act")
    undisturbed = write(model, observe(ids, 5, 1), 3, copy.deepcopy(cache))
    take_turns_of = observe(ids, 5, 2)
    write(model, take_turns_of, 3, twin)
    twin.crop(-2)
    assert_same_state(snapshot(cache), before)
    assert torch.equal(write(model, observe(ids, 5, 1), 3, cache), undisturbed)
    assert twin.layers[0].keys is not None


def test_a_cached_prompt_is_reused_by_copies(scheme: str) -> None:
    model = agents_for(scheme)
    prompt = LoRASharedCache(model, scheme)
    run(model, prompt, IDS[:, :12])
    for seed in range(3):
        ids = observe(IDS[:, :12], 4, seed)
        assert torch.equal(write(model, ids, 4, copy.deepcopy(prompt)), write(model, ids, 4))
    assert prompt.get_seq_length() == 12


CUTS: dict[str, Callable[[LoRASharedCache], Any]] = {
    "crop": lambda cache: cache.crop(-1000),
    "align": lambda cache: cache.align(tokens(30, seed=77)),
    "reset": lambda cache: cache.reset(),
}


@pytest.mark.parametrize("declared", [None, ["plan"], []], ids=["all", "plan declared", "none declared"])
@pytest.mark.parametrize("cut", CUTS)
def test_a_cache_cut_to_nothing_is_like_a_new_one(scheme: str, cut: str, declared: list[str] | None) -> None:
    model = agents_for(scheme)
    cache, new = (LoRASharedCache(model, scheme, agents=declared) for _ in range(2))
    take_turns(model, cache, IDS[:, :9])
    model.set_adapter("act")  # stands at the head under every scheme
    CUTS[cut](cache)
    assert cache.get_seq_length() == 0
    assert cache.memory_report().in_use_bytes == cache.memory_report().reserved_bytes == 0
    assert cache.agents == new.agents == {}
    assert torch.equal(take_turns(model, cache, tokens(30, seed=78)), take_turns(model, new, tokens(30, seed=78)))
    assert_same_state(snapshot(cache), snapshot(new))


def test_agents_far_apart(scheme: str) -> None:
    """One agent reads a few tokens, others run on beyond every buffer's room, and it comes back."""
    model = agents_for(scheme)
    cache, ids = LoRASharedCache(model, scheme), tokens(500)
    model.set_adapter("act")
    run(model, cache, ids[:, :10])
    model.set_adapter("plan")
    run(model, cache, ids[:, :400])
    model.set_adapter("act")
    got = run(model, cache, ids)
    if scheme == "non_shared":
        assert_close(got, model(ids).logits[:, 10:])
    model.set_adapter("reflect")
    assert run(model, cache, observe(ids, 3)).isfinite().all()


def test_two_caches_of_one_model_take_turns(scheme: str) -> None:
    model = agents_for(scheme)
    pair, alone = ([LoRASharedCache(model, scheme) for _ in range(2)] for _ in range(2))
    for cache, seed in zip(alone, (1, 2), strict=True):
        for stop, name in ((10, "plan"), (15, "act"), (20, "plan")):
            model.set_adapter(name)
            run(model, cache, tokens(20, seed=seed)[:, :stop])
    for stop, name in ((10, "plan"), (15, "act"), (20, "plan")):
        model.set_adapter(name)
        for cache, seed in zip(pair, (1, 2), strict=True):
            run(model, cache, tokens(20, seed=seed)[:, :stop])
    for mine, theirs in zip(pair, alone, strict=True):
        assert_same_state(snapshot(mine), snapshot(theirs))


def test_a_generation_config_is_left_alone(scheme: str) -> None:
    model = agents_for(scheme)
    settings = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0)
    before = settings.to_dict()
    mask: Tensor = torch.ones_like(IDS[:, :9])
    got = model.generate(
        input_ids=IDS[:, :9], attention_mask=mask, generation_config=settings,
        **{CACHE_ARG: LoRASharedCache(model, scheme)},
    )  # fmt: skip
    assert torch.equal(got, write(model, IDS[:, :9], 4))
    assert settings.to_dict() == before


def test_models_under_autocast(scheme: str) -> None:
    model = agents_for(scheme)
    context: AbstractContextManager[Any] = torch.autocast("cpu", dtype=torch.bfloat16)
    exact = model(IDS[:, :30]).logits
    cache, plain = LoRASharedCache(model, scheme), DynamicCache()
    with context:
        errors = [
            torch.cat([run(model, each, IDS[:, :stop]) for stop in (20, 30)], 1)
            .float()
            .sub(exact)
            .square()
            .mean()
            .sqrt()
            for each in (cache, plain)
        ]
    assert errors[0] <= 1.5 * errors[1]


def test_the_models_differ_enough_to_notice() -> None:
    """What these tests compare would not be equal by chance: each adapter changes the logits, by way of v_proj too."""
    model = peft_model()
    logits = {name: active(model, name, lambda: model(IDS).logits.detach()) for name in AGENTS}
    for name in ("act", "reflect"):
        assert float((logits["plan"] - logits[name]).abs().max()) > 1.0
    for layer in decoder_of(model).layers:
        nn.init.zeros_(layer.self_attn.v_proj.lora_B["reflect"].weight)
    assert float((model(IDS).logits.detach() - logits["reflect"]).abs().max()) > 1.0
