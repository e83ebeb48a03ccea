"""Every adapter that PEFT can put on an attention projection of a tiny model, with weights that do something."""

from typing import Any

import peft
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from tiny import base_model, config, tokens

__all__ = [
    "CONFIGS", "ELSEWHERE", "LORA_KINDS", "PROMPTS", "TINY", "TUNERS", "elsewhere", "lora_of_kind", "prompted", "tuned",
    "variant_configs",
]  # fmt: skip

TINY = {"num_hidden_layers": 2}
# What a config needs for a v_proj of 48 x 16 (others take target_modules alone).
OPTIONS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10},
    "C3A": {"block_size": 16},
    "FOURIERFT": {"n_frequency": 20},
    "IA3": {"feedforward_modules": []},
    "MISS": {"r": 16},
    "PSOFT": {"r": 4},
    "ROAD": {"group_size": 16},
    "SHIRA": {"r": 4},
    "VBLORA": {"vector_length": 8, "num_vectors": 16},
    "WAVEFT": {"n_frequency": 20},
}
# Kinds that are no adapter of one projection, with what they need.
ELSEWHERE: dict[str, dict[str, Any]] = {
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 2},
    "SHADOW": {},
    "TRAINABLE_TOKENS": {"token_indices": [1, 2, 3]},
}
CONFIGS = {kind.value: cls for kind, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
PROMPTS = [name for name, cls in CONFIGS.items() if issubclass(cls, peft.PromptLearningConfig)]
TUNERS = [name for name in CONFIGS if name not in (*ELSEWHERE, *PROMPTS, "LORA", "XLORA")]


def tuned(name: str, **options: Any) -> PeftModel:
    """A model with that tuner on v_proj.

    Raises:
        ImportError: the tuner needs a package that is not here.
    """
    options = {"target_modules": ["v_proj"], **OPTIONS.get(name, {}), **options}
    cfg = CONFIGS[name](task_type=TaskType.CAUSAL_LM, **options)
    return _moved(get_peft_model(base_model(config(**TINY)), cfg))


def elsewhere(name: str) -> PeftModel:
    """A model with that kind of ``ELSEWHERE``."""
    cfg = CONFIGS[name](task_type=TaskType.CAUSAL_LM, **ELSEWHERE[name])
    return _moved(get_peft_model(base_model(config(**TINY)), cfg))


def prompted(name: str) -> PeftModel:
    """A model with that kind of prompt learning. Raises ImportError or ValueError where PEFT cannot make it here."""
    return get_peft_model(
        base_model(config(**TINY)), CONFIGS[name](num_virtual_tokens=4, task_type=TaskType.CAUSAL_LM)
    ).eval()


def variant_configs(modules: list[str]) -> dict[str, dict[str, Any]]:
    """Options of ``LoraConfig`` that make PEFT take another forward than X W + X A B."""
    configs: dict[str, dict[str, Any]] = {"aLoRA": {"alora_invocation_tokens": tokens(40)[0, 3:5].tolist()}}
    configs["BD-LoRA"] = {"use_bdlora": peft.tuners.lora.config.BdLoraConfig(target_modules_bd_b=modules, nblocks=2)}
    if hasattr(peft.tuners.lora.config, "KasaConfig"):
        configs["KaSA"] = {"kasa_config": peft.tuners.lora.config.KasaConfig()}
        configs["MiCA"] = {"init_lora_weights": "mica"}
    return configs


LORA_KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "rsLoRA": {"use_rslora": True},
    "PiSSA": {"init_lora_weights": "pissa"},
    "OLoRA": {"init_lora_weights": "olora"},
    "LoRA with `lora_bias`": {"lora_bias": True},
    "DoRA": {"use_dora": True},
    "LoRA of `target_parameters`": {"target_parameters": True},
}


def lora_of_kind(name: str, module: str) -> PeftModel:
    """A model with LoRA of that kind (``LORA_KINDS`` or ``variant_configs``) on one projection."""
    options = dict({**LORA_KINDS, **variant_configs([module])}[name])
    targets: dict[str, Any] = {"target_modules": [module]}
    if options.pop("target_parameters", False):
        targets = {"target_modules": [], "target_parameters": [f"{module}.weight"]}
    lora = LoraConfig(r=4, task_type=TaskType.CAUSAL_LM, **targets, **options)
    return _moved(get_peft_model(base_model(config(**TINY)), lora))


def _moved(model: PeftModel) -> PeftModel:
    """Its weights moved away from where they do nothing."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval()
