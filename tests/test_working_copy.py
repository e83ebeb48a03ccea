"""Values materialised for the active agent: the same numbers, other bytes. (For keys: test_key_lr.py.)"""

import pytest
import torch
from oracle import NaiveRun, assert_turns, exact_twin
from tiny import assert_close, config, peft_model, tokens, turn

from lragent_hf import LoRASharedCache

IDS = tokens(40, rows=2)
SPLITTING = ["base_shared", "base_lr_shared", "base_lr_stacked"]
TURNS = [(("plan",), 12), (("act",), 15), (("plan",), 22), (("reflect",), 31), ((), 33), (("act", "plan"), 40)]


@pytest.mark.parametrize("scheme", SPLITTING)
@pytest.mark.parametrize("window", [0, 5])
def test_it_changes_no_number(scheme: str, window: int) -> None:
    window = 0 if scheme == "base_shared" else window
    model = peft_model(shared=scheme == "base_lr_shared", target_modules=["q_proj", "k_proj", "v_proj"]).double()
    naive = NaiveRun(exact_twin(model), scheme, window)
    cache = LoRASharedCache(model, scheme, handover_window=window, value_working_copy=True)
    assert_turns(model, cache, naive, IDS, TURNS)
    naive.detach()
    assert all(layer.work["v"].valid == 40 for layer in cache.layers)


def test_dora_and_a_bias_of_lora_come_on_top() -> None:
    adapters = {"plan": {"use_dora": True}, "act": {"lora_bias": True}}
    model = peft_model(config("qwen2"), adapters).double()
    plain, copied = (LoRASharedCache(model, value_working_copy=on) for on in (False, True))
    for agent, stop in (("plan", 20), ("act", 21), ("act", 22), ("plan", 23), ("plan", 40)):
        assert_close(turn(model, copied, agent, IDS[:, :stop]), turn(model, plain, agent, IDS[:, :stop]))


def test_an_edited_b_counts_from_the_next_token_for_every_value() -> None:
    model = peft_model().double()
    plain, copied = (LoRASharedCache(model, value_working_copy=on) for on in (False, True))
    before = [turn(model, cache, "plan", IDS[:, :20]) for cache in (plain, copied)]
    assert_close(*before)
    model.get_base_model().model.layers[1].self_attn.v_proj.lora_B["plan"].weight.data.mul_(-2)
    after = [turn(model, cache, "plan", IDS[:, :21]) for cache in (plain, copied)]
    assert_close(*after)
    fresh = turn(model, LoRASharedCache(model), "plan", IDS[:, :21])[:, -1:]
    assert (after[0] - fresh).abs().max() > 1e-3  # what the layers above have cached was made with the old one


def test_half_precision_is_no_further_off_than_values_stored_whole() -> None:
    model = peft_model(config(num_hidden_layers=2), shared=True)
    exact = NaiveRun(exact_twin(model), "base_lr_shared")
    model = model.bfloat16()
    cache = LoRASharedCache(model, "base_lr_shared", value_working_copy=True)
    whole = LoRASharedCache(model, "non_shared")
    for stop in (30, 31, 32):
        got, stock = (turn(model, one, "plan", IDS[:, :stop]).double() for one in (cache, whole))
        want = exact.forward(("plan",), IDS[:, exact.length(("plan",)) : stop], None)
        assert (got - want).square().mean() <= 4 * (stock - want).square().mean()
    exact.detach()


def test_bytes_are_counted_and_given_back() -> None:
    model = peft_model(shared=True)
    cache = LoRASharedCache(model, "base_lr_shared", value_working_copy=True)
    turn(model, cache, "plan", IDS)

    def parts() -> dict[str, int]:
        return {row.part: row.in_use_bytes for row in cache.memory_report().rows}

    assert parts()["V working copy"] == parts()["V_base"] == parts()["K"]
    cache.crop(-10)
    assert all(layer.work["v"].valid == 30 for layer in cache.layers)
    cache.batch_select_indices(torch.tensor([1]))
    assert "V working copy" not in parts()
    branch = cache.fork()
    turn(model, branch, "act", IDS[1:, :35])
    assert not any(layer.work["v"].valid for layer in branch.layers)
    turn(model, cache, "act", IDS[1:, :35])  # what the branch shares is still written in place here
    assert parts()["V working copy"] == parts()["V_base"]
    cache.offload(0)
    turn(model, cache, "act", IDS[1:, :36])
    assert [layer.work["v"].valid for layer in cache.layers][1:] == [36, 36]


def test_they_are_given_back_once_the_cache_lies_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork lent, the origin grows out of its room: from then on it reads pieces."""
    monkeypatch.setattr("lragent_hf.buffer._SPARE", 2)
    model = peft_model(shared=True, target_modules=["k_proj", "v_proj"])
    cache = LoRASharedCache(model, "base_lr_shared", value_working_copy=True)
    turn(model, cache, "plan", IDS[:, :20])
    branch = cache.fork()
    turn(model, cache, "plan", IDS)
    turn(model, branch, "plan", IDS[:, :30])
    assert cache.layers[0].k[None].prefix
    assert not any("copy" in row.part for one in (cache, branch) for row in one.memory_report().rows)


@pytest.mark.parametrize("scheme", ["full_shared", "non_shared"])
def test_where_values_are_whole_there_is_nothing_to_copy(scheme: str) -> None:
    model = peft_model()
    cache = LoRASharedCache(model, scheme, value_working_copy=True)
    turn(model, cache, "plan", IDS)
    assert {row.part for row in cache.memory_report().rows} == {"K", "V"}
