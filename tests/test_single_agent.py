"""One agent alone: whatever the scheme, the cache is a DynamicCache."""

from typing import Any

import pytest
import torch
from tiny import config, peft_model
from transformers import DynamicCache

from lragent_hf import CACHE_ARG, LoRASharedCache

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
SCHEMES = ("non_shared", "full_shared", "base_shared", "base_lr_shared", "base_lr_stacked")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_output_and_logits_are_those_of_a_dynamic_cache(architecture: str, scheme: str) -> None:
    model: Any = peft_model(config(architecture), shared=scheme == "base_lr_shared")
    ids = torch.randint(1, model.config.vocab_size, (2, 19), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    for agent in ("plan", "reflect"):
        model.set_adapter(agent)
        stock, ours = (
            model.generate(ids, attention_mask=torch.ones_like(ids), **options, **{CACHE_ARG: cache})
            for cache in (DynamicCache(), LoRASharedCache(model, scheme=scheme))
        )
        assert torch.equal(stock.sequences, ours.sequences)
        for step, (theirs, mine) in enumerate(zip(stock.logits, ours.logits, strict=True)):
            assert (theirs - mine).abs().max() < 1e-4, f"step {step}"
