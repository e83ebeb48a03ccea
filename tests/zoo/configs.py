"""Find the causal language models of the installed transformers, and build each one tiny: config fields set by name."""

import dataclasses
import re
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

__all__ = ["VOCAB", "architectures", "build", "model_class", "tiny_config"]

VOCAB = 97
LAYERS = 4

# The first pattern that matches the whole name of a field gives its value. 6 query and 2 kv heads of 8; windows and
# chunks of 8 positions; weights large enough for attention to matter in the logits.
_RULES: list[tuple[str, Any]] = [
    (r"(unpadded_)?vocab_size(_per_layer_input)?|text_vocab_size", VOCAB),
    (r"(hidden|embedding|input_embedding|output_embedding)_size|n_embd|d_model|dim|emb_dim|word_embed_proj_dim", 48),
    (r"(num_hidden|n|num|num_decoder|decoder|num_encoder|encoder)_layers?", LAYERS),
    (r"(.*_)?num_key_value_heads|num_kv_heads|multi_query_num_heads|index_n_heads", 2),
    (r"(.*_)?(num_attention_heads|attention_heads)|n_heads?|num_heads", 6),
    (r"(.*_)?head_dim|dim_head|kv_channels|attention_head_size|rotary_dim", 8),
    (r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|feed_forward_size|intermediate_size_mlp)", 64),
    (r"n_inner|dim_ff|d_inner|dff|inner_dim|router_hidden_size", 64),
    (r"(.*_)?rank", 8),
    (r"(moe_)?(num|n)_(local_|routed_)?experts|moe_num_experts", 4),
    (r"num_experts_per_tok|moe_k|moe_topk|top_k_experts", 2),
    (r"n_group|topk_group|num_expert_groups?", 1),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_target_positions|context_length", 256),
    (r"sliding_window|sliding_window_size|attention_chunk_size|local_attention|window_size", 8),
    (r"keep_window_size|query_pre_attn_scalar|index_topk|(num|n)_ngram_layers", 8),
    (r"use_sliding_window|is_decoder", True),
    (r"max_window_layers|first_k_dense_replace|num_dense_layers", 2),
    (r"initializer_range|init_std", 0.15),
    (r"pad_token_id", 0),
    (r"(bos|eos|sep)_token_id", None),
    (r"(.*_)?(dropout|drop|pdrop|layerdrop)", 0.0),
    (r"image_size", 16),
    (r"nemo_conv_channels|(shape|pronunciation)_embed_dim|ext_pw_out_channel", 16),
    (r"(shape|pronunciation)_vocab_size", VOCAB),
    (r"patch_size", 8),
]  # fmt: skip

# What the rules cannot know. Keys are model types, a sub-config's after a dot.
_MAMBA = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
_QSA = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8}
_QSA |= {"indexer_compress_ratio": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_NO_PER_LAYER_INPUT = {
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": LAYERS,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_DOTS3 = {"num_attention_heads": 6, "num_key_value_heads": 6, "q_lora_rank": 8, "kv_lora_rank": 8, "head_dim": 16}
_DOTS3 = {f"swa_{key}": value for key, value in (_DOTS3 | {"qk_nope_head_dim": 8, "v_head_dim": 8}).items()}
_EXTRA: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA,
    "blt": {"encoder_hash_byte_group_vocab": 97},
    "codegen": {"n_head": 4},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)},
    "dbrx.attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note.text_config": _DOTS3,
    "dots3_note_text": _DOTS3,
    "dots3_note.vision_config": {"adapter_in_dim": 48, "adapter_out_dim": 48},
    "dots3_note.audio_config": {"adapter_input_size": 48, "adapter_output_size": 48},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "gemma3n_text": {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8},
    "gemma4_assistant": {"backbone_hidden_size": 48},
    "gemma4_assistant.text_config": _NO_PER_LAYER_INPUT,
    "gemma4_text": {"global_head_dim": 16, "hidden_size_per_layer_input": 8},
    "gemma4.text_config": {"global_head_dim": 16, "hidden_size_per_layer_input": 8},
    "gemma4_unified_text": {"global_head_dim": 16},
    "gemma4_unified.text_config": {"global_head_dim": 16},
    "gemma4_unified_assistant": {"backbone_hidden_size": 48},
    "gemma4_unified_assistant.text_config": _NO_PER_LAYER_INPUT,
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "granitemoehybrid": _MAMBA,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"zero_expert_num": 2, "qk_head_dim": 16},
    "mamba2": {"num_heads": 12, "n_groups": 1},
    "mimo_v2_flash": {"num_key_value_heads": 3},
    "qwen4_exp.text_config": _QSA,
    "qwen4_exp_text": _QSA,
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "mamba_ngroups": 1, "n_mamba_heads": 6},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}


def architectures() -> list[str]:
    """Model types that ``AutoModelForCausalLM`` knows, in alphabetical order."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def model_class(model_type: str) -> str:
    """Name of the class that ``AutoModelForCausalLM`` makes for a model type."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return names if isinstance(names, str) else names[0]


def tiny_config(model_type: str) -> PretrainedConfig:
    """The smallest config of that type which still has one layer of every kind."""
    return _shrink(CONFIG_MAPPING[model_type], model_type)


def build(model_type: str, attention: str | None = "eager", seed: int = 0) -> Any:
    """A model of that type in fp32 and eval mode, every parameter of it random.

    Args:
        attention: the attention implementation, ``None`` for the model's default.
    """
    config = tiny_config(model_type)
    options = {} if attention is None else {"attn_implementation": attention}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():  # norms at 1 and biases at 0 would hide what they do
        noise = torch.randn(parameter.shape, generator=generator)
        start = parameter.data.nan_to_num() if parameter.ndim < 2 else 0.0
        parameter.data.copy_(start + noise * 0.15)
    return model


def _shrink(cls: type[PretrainedConfig], name: str) -> PretrainedConfig:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values = {key: value for key, field in fields.items() for value in _rule(field)}
    extra = _EXTRA.get(name, {})
    if "kv_lora_rank" in fields:  # latent attention: every query head has keys of its own
        values["num_key_value_heads"] = 6
    if cls.sub_configs:
        default = cls()
        parts = {key: getattr(default, key, None) for key in cls.sub_configs}
        values |= {key: _shrink(type(part), f"{name}.{key}") for key, part in parts.items() if part is not None}
    for key in ("layer_types", "mlp_layer_types"):
        if key in fields:
            windows = {field: value for field, value in values.items() if "window" in field or "chunk" in field}
            kinds = list(dict.fromkeys(getattr(cls(**windows), key, None) or ()))
            if kinds:
                values[key] = [kinds[index % len(kinds)] for index in range(LAYERS)]
    return cls(**values | extra)


def _rule(field: dataclasses.Field) -> list[Any]:
    """The value of the first rule that fits, or none; in the type that the field asks for."""
    value = next(([value] for pattern, value in _RULES if re.fullmatch(pattern, field.name)), [])
    if value == [None] and "None" not in str(field.type):
        return [1]
    return [int(value[0])] if field.type is int and value else value
