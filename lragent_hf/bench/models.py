"""The models the benchmarks run: random weights of a named shape, or a model from a folder or the hub; three agents."""

import os
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from .contenders import AGENTS
from .shapes import SHAPES, Shape

__all__ = ["MODULES", "add_agents", "default_dtype", "load_model", "packaged_folder", "random_model"]

MODULES = ("q_proj", "v_proj")
_PACKAGED = "smollm2-135m"
_MAKE_PACKAGED = "python -c \"import sys; sys.path.insert(0, 'examples'); import smollm2; smollm2.load()\""


def default_dtype(name: str) -> str:
    """float32 for the toy shapes, bfloat16 for the rest."""
    return "float32" if name in ("tiny", "small") else "bfloat16"


def load_model(
    name: str, modules: list[str], rank: int, dtype: torch.dtype, device: str, attn: str, *, shared_a: bool = True
) -> Any:
    """The model of that name with the agents' adapters, in eval mode.

    Args:
        name: of a shape (random weights; ``smollm2-135m`` is the real one), else a folder or hub id.
        attn: transformers' ``attn_implementation``.

    Raises:
        SystemExit: the packaged model has not been unpacked; says how.
    """
    torch.manual_seed(0)
    if name in SHAPES and name != _PACKAGED:
        model = random_model(SHAPES[name], dtype, device, attn)
    else:
        source = packaged_folder() if name == _PACKAGED else name
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation=attn).to(device)
    return add_agents(model, modules, rank, shared_a=shared_a)


def random_model(shape: Shape, dtype: torch.dtype, device: str = "cpu", attn: str = "sdpa") -> Any:
    """A Llama with random weights, made where and as it is used: 8B parameters never exist in float32."""
    config = LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        max_position_embeddings=1 << 17,
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn)


def add_agents(model: Any, modules: list[str], rank: int, *, shared_a: bool = True) -> Any:
    """Random adapters with B unlike zero. ``shared_a``: with one A on k_proj and v_proj, which base_lr_shared needs."""
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=modules)
    # In the model's dtype, as adapters are served; PEFT would keep them in float32, which is for training.
    model = get_peft_model(model, lora, adapter_name=AGENTS[0], autocast_adapter_dtype=False)
    for name in AGENTS[1:]:
        model.add_adapter(name, lora, autocast_adapter_dtype=False)
    for name, module in model.named_modules():
        if hasattr(module, "lora_B"):
            for adapter in AGENTS:
                torch.nn.init.normal_(module.lora_B[adapter].weight, std=0.02)
                if shared_a and name.endswith(("k_proj", "v_proj")):
                    module.lora_A[adapter].weight.data.copy_(module.lora_A[AGENTS[0]].weight.data)
    return model.eval()


def packaged_folder() -> Path:
    """Where the packaged SmolLM2 lies as transformers files.

    Raises:
        SystemExit: it has not been unpacked; says how.
    """
    root = Path(os.environ.get("LRAGENT_CACHE", Path.home() / ".cache" / "lragent_hf"))
    folder = root / "SmolLM2-135M-Instruct"
    if not folder.is_dir():
        raise SystemExit(f"{_PACKAGED} is not in {root}. In the repository, once: {_MAKE_PACKAGED}")
    return folder
