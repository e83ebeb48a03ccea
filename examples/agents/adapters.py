"""The agents' adapters: drawn at random, or trained ones from a folder."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel

from .script import AGENTS

__all__ = ["TRAINED", "add_agents", "load_agents", "new_agents"]

TRAINED = Path(__file__).parent.parent / "adapters" / "smollm2-135m"


def new_agents(model: PreTrainedModel, modules: list[str] | str, rank: int = 8) -> PeftModel:
    """Fresh LoRA adapters plan, act and reflect, in fp32 and with B = 0: to be trained."""
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=modules, task_type="CAUSAL_LM")
    with warnings.catch_warnings():  # peft 0.21 asks transformers 5.24 for an attribute by its old name
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        agents = get_peft_model(model, config, adapter_name=AGENTS[0])
    for name in AGENTS[1:]:
        agents.add_adapter(name, config)
    return agents


def load_agents(model: PreTrainedModel, folder: str | Path = TRAINED) -> PeftModel:
    """The trained adapters plan, act and reflect of a folder that has one of each name, in the model's dtype.

    Raises:
        FileNotFoundError: the folder lacks one of them.
    """
    for name in AGENTS:
        if not (Path(folder) / name / "adapter_config.json").is_file():
            raise FileNotFoundError(f"No adapter {name!r} in {folder}: train them with examples/train_agents.py.")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        agents = PeftModel.from_pretrained(model, str(Path(folder) / AGENTS[0]), adapter_name=AGENTS[0])
    for name in AGENTS[1:]:
        agents.load_adapter(str(Path(folder) / name), adapter_name=name)
    return _in_its_dtype(agents, model.dtype).eval()


def add_agents(model: PreTrainedModel, rank: int = 8, strength: float = 0.1, seed: int = 0) -> PeftModel:
    """Give `model` the LoRA adapters plan, act and reflect on q_proj and v_proj, with weights drawn from `seed`.

    They stand in for trained ones. The agents have one A in common on v_proj, so that `base_lr_shared` applies, and
    each its own B; B is scaled so that the norm of an adapter's update is `strength` times that of the frozen weight.
    """
    agents = new_agents(model, ["q_proj", "v_proj"], rank)
    draw = torch.Generator().manual_seed(seed)
    layers: dict[str, Any] = {path: m for path, m in agents.named_modules() if isinstance(m, LoraLayer)}
    for path, layer in layers.items():
        frozen_norm = layer.get_base_layer().weight.detach().float().norm()
        shared_a = torch.randn(layer.lora_A[AGENTS[0]].weight.shape, generator=draw)
        for name in AGENTS:
            a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
            new_a = shared_a if path.endswith("v_proj") else torch.randn(a.shape, generator=draw)
            new_b = torch.randn(b.shape, generator=draw)
            new_b *= strength * frozen_norm.cpu() / (layer.scaling[name] * (new_b @ new_a).norm())
            a.data.copy_(new_a)
            b.data.copy_(new_b)
    return _in_its_dtype(agents, model.dtype).eval()


def _in_its_dtype(agents: PeftModel, dtype: torch.dtype) -> PeftModel:
    """PEFT keeps adapters in float32; in the model's own dtype nothing has to be converted at every layer.

    The adapters alone: `agents.to(dtype)` would round the model's rotary frequencies, too.
    """
    for name, weight in agents.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.to(dtype)
    return agents
