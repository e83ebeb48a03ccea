"""Other architectures: right, or refused by name. One agent against a plain cache, prompts beyond windows and chunks."""

from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from tiny import VOCAB, base_model, peft_model, randomise, tokens
from transformers import DynamicCache

from lragent_hf import CACHE_ARG, LoRASharedCache
from lragent_hf.errors import AdapterChangedError, UnsupportedModelError

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
WINDOW = {"head_dim": 8, "sliding_window": 8}
RIGHT: dict[str, dict[str, Any]] = {
    "Gemma2Config": {**WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": None},
    "Gemma3TextConfig": {**WINDOW, "query_pre_attn_scalar": 8},
    "GptOssConfig": {**WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},  # attention sinks
    "MinistralConfig": WINDOW,  # mixed layer types
    "Llama4TextConfig": {"head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 8, "intermediate_size_mlp": 64},
    "Starcoder2Config": {"sliding_window": 8},
    "PhiConfig": {},  # partial rotary
    "DiffLlamaConfig": {},  # attends twice a layer
    "DogeConfig": {"head_dim": 8, "keep_window_size": 64},  # makes its own bias from mask and values
    "MixtralConfig": {"num_local_experts": 2},
}


def agent(config: Any) -> Any:
    model = get_peft_model(
        base_model(config), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), adapter_name="plan"
    )
    randomise(model)
    return model.eval()


@pytest.mark.parametrize("scheme", ["full_shared", "base_lr_stacked"])
@pytest.mark.parametrize("name", RIGHT)
def test_logits_are_those_of_a_dynamic_cache(name: str, scheme: str) -> None:
    if not hasattr(transformers, name):
        pytest.fail(f"this transformers has no {name}: take it off the list for this version")
    model = agent(getattr(transformers, name)(**{**SMALL, **RIGHT[name]}))
    ids = tokens(40)
    stock, ours = DynamicCache(config=model.get_base_model().config), LoRASharedCache(model, scheme)
    with torch.no_grad():
        for start, stop in ((0, 30), (30, 34), (34, 35), (35, 36), (36, 40)):
            want, got = (model(ids[:, start:stop], **{CACHE_ARG: cache}).logits for cache in (stock, ours))
            assert (want - got).abs().max() < 1e-4 * want.abs().max(), (start, stop)


def test_layers_that_keep_a_state_are_refused() -> None:
    sizes = {**SMALL, "num_hidden_layers": 3, "lru_width": 48, "attention_window_size": 16}
    model = agent(transformers.RecurrentGemmaConfig(**sizes))
    with pytest.raises(UnsupportedModelError, match="keep a state"):
        LoRASharedCache(model, "non_shared")


def test_backward_through_the_cache_raises() -> None:
    model = peft_model()
    loss = model(tokens(9), **{CACHE_ARG: LoRASharedCache(model)}).logits.sum()
    with pytest.raises(RuntimeError, match="Train with a forward without the cache"):
        loss.backward()


def test_adapters_merged_into_the_base_and_gone_are_noticed() -> None:
    model = peft_model()
    cache = LoRASharedCache(model)
    with torch.no_grad():
        model(tokens(9), **{CACHE_ARG: cache})
        merged = model.merge_and_unload()
        with pytest.raises(AdapterChangedError, match="merge_and_unload"):
            merged(tokens(3), **{CACHE_ARG: cache})
        cache.reset()
        merged(tokens(9), **{CACHE_ARG: cache})
    assert cache.agents == {"base model": 9}


def test_trainable_copies_of_attention_are_refused_and_tell_agents_apart() -> None:
    model = peft_model(adapters={"plan": {}, "act": {}}, target_modules=["lm_head"], modules_to_save=["mlp"])
    cache = LoRASharedCache(model, "non_shared")
    with torch.no_grad():
        model(tokens(9), **{CACHE_ARG: cache})
    model.set_adapter("act")
    assert cache.get_seq_length() == 0
    copies = peft_model(adapters={"plan": {}}, target_modules=["q_proj", "down_proj"], modules_to_save=["self_attn"])
    with pytest.raises(UnsupportedModelError, match="two attention modules"):
        LoRASharedCache(copies)
