"""Architectures beyond what test_zoo.py asks of each: images beside text, merged adapters, trainable copies."""

from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from tiny import VOCAB, base_model, peft_model, randomise, tokens
from transformers.modeling_outputs import BaseModelOutputWithPooling
from zoo.checks import with_agents
from zoo.configs import build

from lragent_hf import CACHE_ARG, LoRASharedCache
from lragent_hf.errors import AdapterChangedError, TrajectoryMismatchError, UnsupportedModelError

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def agent(config: Any) -> Any:
    model = get_peft_model(
        base_model(config), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), adapter_name="plan"
    )
    randomise(model)
    return model.eval()


def test_layers_that_keep_a_state_are_refused() -> None:
    sizes = {**SMALL, "num_hidden_layers": 3, "lru_width": 48, "attention_window_size": 16}
    model = agent(transformers.RecurrentGemmaConfig(**sizes))
    with pytest.raises(UnsupportedModelError, match="keep a state"):
        LoRASharedCache(model, "non_shared")


def test_tokens_of_a_model_made_for_images_too_count_only_where_it_was_given_nothing_else() -> None:
    model = with_agents(build("gemma3"))
    ids = tokens(20)
    for media, known in (
        ({}, True),
        ({"pixel_values": None}, True),
        ({"pixel_values": torch.zeros(1, 3, 16, 16)}, False),
    ):
        cache = LoRASharedCache(model)
        model.set_adapter("plan")
        image = model.get_base_model().model
        image.get_image_features = lambda *args, **kwargs: BaseModelOutputWithPooling(pooler_output=torch.zeros(0, 48))
        with torch.no_grad():
            model(input_ids=ids[:, :12], **{CACHE_ARG: cache}, **media)
            model.set_adapter("act")
            if known:
                model(input_ids=ids[:, 12:], **{CACHE_ARG: cache})
                assert cache.agents == {"plan": 20, "act": 20}
            else:
                with pytest.raises(TrajectoryMismatchError, match="inputs_embeds by agent 'plan'"):
                    model(input_ids=ids[:, 12:], **{CACHE_ARG: cache})


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
