"""The real model of the demo, end to end: SmolLM2-135M-Instruct in fp32."""

import pytest
import torch
from transformers import DynamicCache

from agents import add_agents
from lragent_hf import CACHE_ARG, SCHEMES, LoRASharedCache
from smollm2 import load


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
