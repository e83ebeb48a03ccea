"""The real model of the demo, end to end: SmolLM2-135M-Instruct in fp32."""

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from agents import AGENTS, Crew, add_agents, load_agents, load_questions
from lragent_hf import CACHE_ARG, SCHEMES, LoRASharedCache, audit
from smollm2 import load

QUESTIONS = Path(__file__).parent.parent / "examples" / "questions.json"


@pytest.mark.slow
def test_three_agents_on_smollm2() -> None:
    base, tokenizer = load(dtype=torch.float32)
    model = add_agents(base)
    prompt = tokenizer("Where was the inventor of the telephone born?", return_tensors="pt")["input_ids"]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    for scheme in SCHEMES:
        layers = {"recompute_layers": range(5, 30, 3), "hidden_cache": True} if scheme == "droidspeak" else {}
        cache = LoRASharedCache(model, scheme=scheme, **layers)
        model.set_adapter("plan")
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options, **{CACHE_ARG: DynamicCache()})
        ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options, **{CACHE_ARG: cache})
        assert torch.equal(alone, ids), scheme
        model.set_adapter("act")
        read = 0 if scheme in ("non_shared", "base_shared", "droidspeak") else ids.shape[1] - 1
        assert cache.get_seq_length() == read
        after = model.generate(ids, attention_mask=torch.ones_like(ids), **options, **{CACHE_ARG: cache})
        if scheme == "non_shared":
            again = model.generate(ids, attention_mask=torch.ones_like(ids), **options, **{CACHE_ARG: DynamicCache()})
            assert torch.equal(after, again)
        assert cache.get_seq_length() == after.shape[1] - 1


@pytest.mark.slow
def test_the_trained_adapters_answer_and_keep_more_with_their_lr() -> None:
    """As their card says: they share one A and go round to an answer; with an LR they are nearer to themselves."""
    base, tokenizer = load(dtype=torch.float32)
    model = load_agents(base)
    LoRASharedCache(model, scheme="base_lr_shared")  # is not refused
    question = load_questions(str(QUESTIONS))[0]
    episode = Crew(model, tokenizer).answer(question, LoRASharedCache(model, scheme="non_shared"), max_turns=18)
    assert episode.answer is not None
    assert "Found: [Charles Darwin]" in episode.text
    assert {turn.agent for turn in episode.turns} == set(AGENTS)
    found = {row.scheme: row for row in audit(model, [episode.trajectory], layers=False).rows}
    assert found["base_lr_shared"].kl == pytest.approx(found["base_lr_stacked"].kl, rel=1e-3)  # one A: the same thing
    assert found["base_shared"].kl < 0.8 * found["full_shared"].kl
    assert found["base_lr_shared"].kl < 0.8 * found["full_shared"].kl
