"""The droidspeak scheme, against its plain definition; the state machine drives it through everything else."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import NaiveRun, activate, assert_close_to_oracle, assert_turns, exact_twin
from tiny import active, assert_alone, assert_close, config, decoder_of, peft_model, run, tokens, turn, write
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig

from lragent_hf import (
    CACHE_ARG,
    DROIDSPEAK_LAYERS,
    SCHEMES,
    AgentTrajectory,
    LoRASharedCache,
    Scheme,
    audit,
    droidspeak_layers,
)
from lragent_hf.errors import UnsupportedModelError

IDS = tokens(40)
TURNS = [
    (("plan",), 12),
    (("act",), 15),
    (("plan",), 22),
    (("reflect",), 31),
    (("act",), 33),
    ((), 36),
    (("plan",), 40),
]


def five_layers() -> PretrainedConfig:
    return config(num_hidden_layers=5)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("layers", [(1, 3), (2,), (0, 4), (3, 4)])
def test_it_is_its_plain_definition(kind: str, hidden: bool, layers: tuple[int, ...]) -> None:
    model = peft_model(config(kind, num_hidden_layers=5), target_modules=["q_proj", "k_proj", "v_proj", "up_proj"])
    model = model.double()
    naive = NaiveRun(exact_twin(model), "droidspeak", recompute=layers, hidden=hidden and layers[0] > 0)
    cache = LoRASharedCache(model, "droidspeak", recompute_layers=layers, hidden_cache=hidden)
    assert_turns(model, cache, naive, IDS, TURNS)
    naive.detach()


def test_padded_rows_and_sliding_windows() -> None:
    cfg = config("mistral", num_hidden_layers=4, sliding_window=7)
    model = peft_model(cfg).double()
    ids, mask = tokens(40, rows=2), torch.ones(2, 40, dtype=torch.long)
    mask[1, :5] = 0
    for hidden in (False, True):
        naive = NaiveRun(exact_twin(model), "droidspeak", recompute=(1, 2), hidden=hidden)
        cache = LoRASharedCache(model, "droidspeak", recompute_layers=(1, 2), hidden_cache=hidden)
        assert_turns(model, cache, naive, ids, TURNS, mask)
        naive.detach()


@pytest.mark.parametrize("hidden", [False, True])
def test_one_agent_alone_is_exact(hidden: bool) -> None:
    model = peft_model()
    assert_alone(model, LoRASharedCache(model, "droidspeak", recompute_layers=[1], hidden_cache=hidden), IDS)


def test_every_layer_recomputed_makes_the_first_hand_over_exact() -> None:
    model = peft_model()
    cache = LoRASharedCache(model, "droidspeak", recompute_layers=range(3))
    turn(model, cache, "plan", IDS[:, :20])
    assert_close(turn(model, cache, "act", IDS), active(model, "act", lambda: run(model, DynamicCache(), IDS)))


def test_layers_below_run_new_tokens_only() -> None:
    """Counted at the layers themselves; a chunk without a new token takes one row through them."""
    model = peft_model(five_layers())
    cache = LoRASharedCache(model, "droidspeak", recompute_layers=[2, 3], hidden_cache=True)
    ran: list[list[int]] = [[] for _ in range(5)]
    for index, layer in enumerate(decoder_of(model).layers):
        layer.mlp.register_forward_pre_hook(lambda _, args, index=index: ran[index].append(args[0].shape[1]))
    turn(model, cache, "plan", IDS[:, :20])
    turn(model, cache, "act", IDS[:, :26])
    turn(model, cache, "plan", IDS[:, :27])
    turn(model, cache, "reflect", IDS[:, :9])
    assert ran[0] == ran[1] == [20, 6, 1, 1]
    assert ran[2] == ran[3] == ran[4] == [20, 26, 7, 9]


def test_bytes_and_repr() -> None:
    model = peft_model(five_layers())
    plain, hidden = (
        LoRASharedCache(model, "droidspeak", recompute_layers=[3, 1], hidden_cache=on) for on in (False, True)
    )
    for cache in (plain, hidden):
        turn(model, cache, "plan", IDS[:, :20])
        turn(model, cache, "act", IDS)
    kv = 2 * 5 * 2 * 8 * 40 * 4  # K and V, layers, kv heads, head_dim, tokens, bytes
    assert plain.memory_report().in_use_bytes == kv
    assert hidden.memory_report().in_use_bytes == kv + 48 * 40 * 4
    assert "recompute_layers=[1, 3], with hidden states" in repr(hidden)
    assert hidden.agents == {"plan": 20, "act": 40}
    hidden.crop(-40)
    assert not hidden.hidden.capacity


def test_a_dense_mask_is_cut_with_the_rows() -> None:
    model = peft_model(five_layers())
    for site in (decoder_of(model).layers[0].self_attn.q_proj, decoder_of(model).layers[0].self_attn.v_proj):
        for b in site.lora_B.values():  # so that handing hidden states on changes nothing
            b.weight.data.zero_()
    dense = torch.ones(40, 40, dtype=torch.bool).tril()
    dense[30:, 3] = False
    logits = []
    for hidden in (False, True):
        cache = LoRASharedCache(model, "droidspeak", recompute_layers=[1], hidden_cache=hidden)
        turn(model, cache, "plan", IDS[:, :20])
        mask = {"attention_mask": dense[None, None]}
        with torch.no_grad():
            logits.append(active(model, "act", lambda: model(IDS, **mask, **{CACHE_ARG: cache}).logits))  # noqa: B023
    assert_close(logits[1], logits[0])


def test_a_cut_lets_go_of_what_was_lent() -> None:
    model = peft_model()
    cache = LoRASharedCache(model, "droidspeak", recompute_layers=[1], hidden_cache=True)
    turn(model, cache, "plan", IDS)
    branch = cache.fork()
    assert branch.hidden.frozen == 40
    assert branch.memory_report().shared_bytes == branch.memory_report().in_use_bytes
    branch.crop(-35)
    assert branch.hidden.frozen == 5


def test_layer_zero_recomputed_leaves_nothing_to_skip() -> None:
    model = peft_model()
    cache = LoRASharedCache(model, "droidspeak", recompute_layers=[0, 2], hidden_cache=True)
    turn(model, cache, "plan", IDS)
    assert not cache.hidden_cache
    assert not cache.hidden.capacity


def test_generate_goes_on_where_the_agent_stands() -> None:
    """``generate`` in turns equals forwards in turns over the tokens it chose."""
    model = peft_model()
    cache, again = (LoRASharedCache(model, "droidspeak", recompute_layers=[1], hidden_cache=True) for _ in range(2))
    model.set_adapter("plan")
    ids = write(model, IDS[:, :9], 6, cache)
    model.set_adapter("act")
    ids = write(model, ids, 5, cache)
    turn(model, again, "plan", ids[:, :14])
    logits = turn(model, again, "act", ids[:, :19])
    assert torch.equal(logits[0, 14:].argmax(-1), ids[0, 15:20])


def test_a_failed_hand_over_leaves_the_rewritten_rows_as_they_were() -> None:
    model = peft_model()
    cache = LoRASharedCache(model, "droidspeak", recompute_layers=[1], hidden_cache=True)
    turn(model, cache, "plan", IDS[:, :20])
    before: list[Tensor] = [layer.keys.clone() for layer in cache.layers]
    handle = decoder_of(model).layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        turn(model, cache, "act", IDS)
    handle.remove()
    model.set_adapter("plan")
    assert all(torch.equal(layer.keys, rows) for layer, rows in zip(cache.layers, before, strict=True))
    assert not any(layer._forward_pre_hooks for layer in decoder_of(model).layers)


@pytest.mark.parametrize("hidden", [False, True])
def test_rows_with_agents_of_their_own_start_where_these_stand(hidden: bool) -> None:
    """Each row of the batch is what a batch of that row alone is, as long as the rows' agents have read equally far."""
    model = peft_model(five_layers()).double()
    ids = tokens(40, rows=2)
    cache = LoRASharedCache(model, "droidspeak", recompute_layers=[1, 2], hidden_cache=hidden)
    twins = [exact_twin(model) for _ in range(2)]
    rows = [NaiveRun(twin, "droidspeak", recompute=(1, 2), hidden=hidden) for twin in twins]
    for agent, stop in (("plan", 12), ("act", 20), ("plan", 20)):
        turn(model, cache, agent, ids[:, :stop])
        for row, one in enumerate(rows):
            activate(one.model, (agent,))
            one.forward((agent,), ids[row : row + 1, one.length((agent,)) : stop], None)
    for start, stop in ((20, 26), (26, 27)):
        with torch.no_grad():
            got = model(input_ids=ids[:, start:stop], adapter_names=["plan", "act"], **{CACHE_ARG: cache}).logits
        for row, (agent, one) in enumerate(zip(("plan", "act"), rows, strict=True)):
            activate(one.model, (agent,))
            assert one.length((agent,)) == start
            want = one.forward((agent,), ids[row : row + 1, start:stop], None)
            assert (got[row] - want[0]).abs().max() < 1e-9 * (1 + want.abs().max())
    for one in rows:
        one.detach()


@pytest.mark.parametrize("hidden", [False, True])
def test_one_row_expands_for_beams(hidden: bool) -> None:
    model = peft_model(five_layers())
    caches = [LoRASharedCache(model, "droidspeak", recompute_layers=[2], hidden_cache=hidden) for _ in range(2)]
    for cache in caches:
        turn(model, cache, "plan", IDS[:, :14])
    caches[1].batch_repeat_interleave(3)
    model.set_adapter("act")
    found = [write(model, IDS[:, :17], 5, cache, num_beams=3) for cache in caches]
    assert torch.equal(*found)
    assert not hidden or caches[0].hidden.read(21).shape == (3, 21, 48)


@pytest.mark.parametrize("options", [{"offload": True}, {"reserve": 64}, {"backend": "reference"}], ids=str)
def test_hidden_states_lie_where_the_rest_does(options: dict[str, Any]) -> None:
    model = peft_model(five_layers())
    caches = [LoRASharedCache(model, "droidspeak", recompute_layers=[2], hidden_cache=True, **o) for o in ({}, options)]
    for agent, stop in (("plan", 20), ("act", 26), ("plan", 40)):
        got = []
        for cache in caches:
            with torch.inference_mode(stop == 26):  # a buffer written in one mode is read in the other
                got.append(turn(model, cache, agent, IDS[:, :stop]))
        assert_close(got[1], got[0])


def test_it_runs_in_half_precision() -> None:
    model = peft_model(five_layers())
    twin = exact_twin(model)
    model = model.bfloat16()
    cache = LoRASharedCache(model, "droidspeak", recompute_layers=[2], hidden_cache=True)
    naive = NaiveRun(twin, "droidspeak", recompute=(2,), hidden=True)
    eager = NaiveRun(model_in(torch.bfloat16), "droidspeak", recompute=(2,), hidden=True)
    for agent, stop in (("plan", 20), ("act", 30)):
        got = turn(model, cache, agent, IDS[:, :stop])
        for one in (naive, eager):
            activate(one.model, (agent,))
        exact, rough = (one.forward((agent,), IDS[:, one.length((agent,)) : stop], None) for one in (naive, eager))
        assert_close_to_oracle(agent, got, exact, rough)
    naive.detach()
    eager.detach()


def model_in(dtype: torch.dtype) -> Any:
    """The same model again, with transformers' eager attention."""
    model = peft_model(five_layers()).to(dtype)
    model.base_model.model.set_attn_implementation("eager")
    return model


def test_a_recomputed_layer_that_stores_nothing_is_named() -> None:
    model = peft_model()
    decoder_of(model).layers[2].forward = lambda states, **_: states
    cache = LoRASharedCache(model, "droidspeak", recompute_layers=[1, 2])
    with pytest.raises(UnsupportedModelError, match=r"\[2\] store no K and V"):
        turn(model, cache, "plan", IDS)
    assert cache.get_seq_length() == 0


def test_arguments_with_a_row_a_token_are_cut_whatever_they_are_called() -> None:
    """As Gemma 3n hands each layer inputs of its own, by position."""
    model = peft_model(five_layers())
    layers = decoder_of(model).layers
    seen: list[tuple[int, int]] = []
    for layer in layers[:2]:
        plain = layer.forward

        def forward(states: Tensor, own: Tensor, *, plain: Any = plain, **kwargs: Any) -> Any:
            seen.append((states.shape[1], own.shape[1]))
            return plain(states + own, **kwargs)

        layer.forward = forward
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: ((*args, torch.zeros_like(args[0])), kwargs) if len(args) == 1 else None,
            with_kwargs=True, prepend=True,
        )  # fmt: skip
    cache = LoRASharedCache(model, "droidspeak", recompute_layers=[2], hidden_cache=True)
    turn(model, cache, "plan", IDS[:, :20])
    turn(model, cache, "act", IDS[:, :26])
    assert seen == [(20, 20), (20, 20), (6, 6), (6, 6)]


def test_refusals() -> None:
    model = peft_model()
    with pytest.raises(ValueError, match="droidspeak_layers"):
        LoRASharedCache(model, "droidspeak")
    with pytest.raises(ValueError, match="droidspeak_layers"):
        LoRASharedCache(model, "droidspeak", recompute_layers=[])
    with pytest.raises(ValueError, match="3 layers"):
        LoRASharedCache(model, "droidspeak", recompute_layers=[3])
    with pytest.raises(ValueError, match="3 layers"):
        LoRASharedCache(model, "droidspeak", recompute_layers=[-1, 2])
    with pytest.raises(ValueError, match="recompute_layers means nothing"):
        LoRASharedCache(model, "base_shared", recompute_layers=[1])
    with pytest.raises(ValueError, match="hidden_cache means nothing"):
        LoRASharedCache(model, hidden_cache=True)
    with pytest.raises(ValueError, match="handover_window"):
        LoRASharedCache(model, "droidspeak", recompute_layers=[1], handover_window=4)
    with pytest.raises(ValueError, match="attention='auto'"):
        LoRASharedCache(model, "droidspeak", recompute_layers=[1], hidden_cache=True, attention="keep")
    with pytest.raises(ValueError, match="kept whole"):
        Scheme("odd", "shared", "stacked", "", recompute_layers=(1,))
    cache = LoRASharedCache(model, "droidspeak", recompute_layers=[1], hidden_cache=True)
    for option in ("output_attentions", "output_hidden_states"):
        with pytest.raises(UnsupportedModelError, match="hidden_cache=False"):
            model(input_ids=IDS, **{option: True, CACHE_ARG: cache})
    plain = LoRASharedCache(model, "droidspeak", recompute_layers=[1])
    assert len(model(input_ids=IDS, output_hidden_states=True, **{CACHE_ARG: plain}).hidden_states) == 4
    assert cache.get_seq_length() == 0


def test_the_layer_whose_adapters_differ_is_found() -> None:
    model = peft_model(five_layers(), target_modules=["k_proj", "v_proj"])
    for index, layer in enumerate(decoder_of(model).layers):
        for site in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            for b in site.lora_B.values():
                b.weight.data.mul_(1.0 if index in (1, 4) else 0.02)
    trajectory = AgentTrajectory(IDS[0], [("plan", 20), ("act", 30), ("reflect", 40)])
    assert droidspeak_layers(model, [trajectory], fraction=0.4) == (1, 4)
    assert len(droidspeak_layers(model, [trajectory])) == 2  # a third of 5
    schemes = [replace(SCHEMES["droidspeak"], recompute_layers=layers) for layers in ((1, 4), (0, 2))]
    chosen, others = audit(model, [trajectory], schemes).rows
    assert chosen.kl < 0.5 * others.kl
    with pytest.raises(ValueError, match="fraction"):
        droidspeak_layers(model, [trajectory], fraction=0)


def test_the_papers_layers_are_a_third() -> None:
    assert {name: len(layers) for name, layers in DROIDSPEAK_LAYERS.items()} == {"llama-3.1-8b": 11, "ministral-8b": 12}
