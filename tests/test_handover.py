"""What a hand-over costs: counted at the model's own door, not from our arithmetic."""

from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny import peft_model
from transformers import DynamicCache

from lragent_hf import CACHE_ARG, LoRASharedCache

NEW = 7


class Door:
    """Counts the tokens that enter the first decoder layer."""

    def __init__(self, model: Any):
        self.counts: list[int] = []
        first = model.get_base_model().get_decoder().layers[0]
        self.handle = first.register_forward_pre_hook(
            lambda module, args, kwargs: self.counts.append((args[0] if args else kwargs["hidden_states"]).shape[1]),
            with_kwargs=True,
        )

    def take(self) -> list[int]:
        counts, self.counts = self.counts, []
        return counts


class Talk:
    """A trajectory that agents extend in turn, by an observation of NEW tokens and 4 generated ones."""

    def __init__(self, model: Any, **options: Any):
        self.model, self.cache, self.door = model, LoRASharedCache(model, **options), Door(model)
        self.generator = torch.Generator().manual_seed(3)
        self.ids = self.random(30)

    def random(self, count: int) -> torch.Tensor:
        return torch.randint(1, self.model.config.vocab_size, (1, count), generator=self.generator)

    def turn(self, agent: str, **options: Any) -> list[int]:
        self.model.set_adapter(agent)
        self.ids = torch.cat([self.ids, self.random(NEW)], 1)
        self.ids = self.model.generate(
            self.ids, attention_mask=torch.ones_like(self.ids), max_new_tokens=4, do_sample=False,
            **options, **{CACHE_ARG: self.cache},
        )  # fmt: skip
        return self.door.take()


@pytest.mark.parametrize("scheme", ["full_shared", "base_lr_shared", "base_lr_stacked"])
def test_the_next_agent_runs_only_what_is_new(scheme: str) -> None:
    talk = Talk(peft_model(shared=scheme == "base_lr_shared"), scheme=scheme)
    assert talk.turn("plan") == [30 + NEW, 1, 1, 1]
    for agent in ("act", "reflect", "plan", "plan"):  # and the last token generated, which nobody has run yet
        assert talk.turn(agent) == [1 + NEW, 1, 1, 1]


@pytest.mark.parametrize("scheme", ["base_shared", "non_shared"])
def test_the_next_agent_runs_what_it_has_not_read(scheme: str) -> None:
    talk = Talk(peft_model(), scheme=scheme)
    talk.turn("plan")
    total = talk.ids.shape[1]
    assert talk.turn("act")[0] == total + NEW
    read = talk.ids.shape[1] - 1
    assert talk.turn("reflect")[0] == talk.ids.shape[1] - 4
    assert talk.turn("act")[0] == talk.ids.shape[1] - 4 - read
    if scheme == "base_shared":  # and the base cache is not written twice
        assert talk.cache.ledger.writers[: total - 1] == [("plan",)] * (total - 1)


@pytest.mark.parametrize("scheme", ["full_shared", "base_lr_shared", "base_lr_stacked"])
def test_a_window_is_run_again_at_each_handover_and_only_then(scheme: str) -> None:
    talk = Talk(peft_model(shared=scheme == "base_lr_shared"), scheme=scheme, handover_window=9)
    talk.turn("plan")
    for agent in ("act", "reflect", "plan"):
        assert talk.turn(agent) == [9 + 1 + NEW, 1, 1, 1]
        assert talk.turn(agent) == [1 + NEW, 1, 1, 1]


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("window", [70, 1000])
@pytest.mark.parametrize("scheme", ["full_shared", "base_lr_shared", "base_lr_stacked"])
def test_a_window_as_long_as_the_context_is_exact(scheme: str, window: int, chunk: int | None) -> None:
    model = peft_model(shared=scheme == "base_lr_shared")
    talk = Talk(model, scheme=scheme, handover_window=window)
    for agent in ("plan", "act", "reflect", "plan"):
        before = talk.ids
        talk.turn(agent, prefill_chunk_size=chunk)
        prompt = talk.ids[:, : before.shape[1] + NEW]
        alone = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=4,
            do_sample=False,
            **{CACHE_ARG: DynamicCache()},
        )
        assert torch.equal(alone, talk.ids)
        new = torch.randint(1, 90, (1, 1))
        with torch.no_grad():
            full = torch.cat([talk.ids, new], 1)
            exact = model(full).logits[:, -1]
            ours = model(full[:, talk.cache.get_seq_length() :], **{CACHE_ARG: talk.cache}).logits[:, -1]
        assert (exact - ours).abs().max() < 1e-4
        talk.cache.crop(-2)  # the token above, and the last generated one with it


def test_asking_for_the_length_changes_nothing() -> None:
    talk = Talk(peft_model(), handover_window=9)
    talk.turn("plan")
    talk.model.set_adapter("act")
    length = talk.cache.get_seq_length()
    talk.model.set_adapter("plan")
    assert talk.cache.get_seq_length() == talk.ids.shape[1] - 1
    talk.model.set_adapter("act")
    assert talk.cache.get_seq_length() == length == talk.ids.shape[1] - 1 - 9


def test_another_agents_turn_forgets_how_far_a_window_had_come() -> None:
    talk = Talk(peft_model(), handover_window=9)
    talk.turn("plan")
    model, cache, n = talk.model, talk.cache, talk.cache.get_seq_length()

    def run(agent: str, count: int) -> None:
        model.set_adapter(agent)
        start = cache.get_seq_length()
        with torch.no_grad():
            model(talk.ids[:, start : start + count], **{CACHE_ARG: cache})

    run("act", 4)
    assert cache.get_seq_length() == n - 9 + 4
    run("plan", 1)
    model.set_adapter("act")
    assert cache.get_seq_length() == n + 1 - 9


def test_crop_before_the_window_has_run_cuts_the_trajectory() -> None:
    talk = Talk(peft_model(), handover_window=9)
    talk.turn("plan")
    n = talk.cache.get_seq_length()
    talk.model.set_adapter("act")
    talk.cache.crop(-3)
    assert talk.cache.get_seq_length() == n - 3 - 9
    talk.model.set_adapter("plan")
    assert talk.cache.get_seq_length() == n - 3


def test_the_prefix_is_one_allocation_for_all_agents() -> None:
    talk = Talk(peft_model())
    pointers = set()
    for agent in ("plan", "act", "reflect"):
        talk.turn(agent)
        layer = talk.cache.layers[0]
        assert layer.keys is not None
        assert layer.values is not None
        pointers.add((layer.keys.untyped_storage().data_ptr(), layer.values.untyped_storage().data_ptr()))
    assert len(pointers) == 1
    assert len(talk.cache.layers[0].k) == len(talk.cache.layers[0].v) == len(talk.cache.layers[0].lr) == 1


def test_an_adapter_loaded_later_pays_one_lr_prefill_and_none_if_its_a_is_there() -> None:
    talk = Talk(peft_model())
    talk.turn("plan")
    config = LoraConfig(r=5, target_modules=["q_proj", "v_proj"])
    for name in ("late", "twin"):
        talk.model.add_adapter(name, config)
    for module in talk.model.modules():
        if hasattr(module, "lora_A") and "late" in module.lora_A:
            for name, source in (("late", "late"), ("twin", "plan")):
                module.lora_A[name].weight.data.copy_(module.lora_A[source].weight.data)
                module.lora_B[name].weight.data.normal_(std=0.2)
    assert talk.turn("twin") == [1 + NEW, 1, 1, 1]
    assert talk.turn("late")[0] == talk.ids.shape[1] - 4
    assert talk.turn("plan") == [1 + NEW, 1, 1, 1]
    assert talk.turn("late") == [1 + NEW, 1, 1, 1]  # written by plan once it had caught up
