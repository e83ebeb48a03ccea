"""The parts of the quickstart that have nothing to do with caching: three LoRA agents, and the tool they call."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel

__all__ = ["AGENTS", "Library", "add_agents", "load_question"]

AGENTS = ("plan", "act", "reflect")


def add_agents(model: PreTrainedModel, rank: int = 8, strength: float = 0.1, seed: int = 0) -> PeftModel:
    """Give `model` the LoRA adapters plan, act and reflect on q_proj and v_proj, with weights drawn from `seed`.

    They stand in for trained ones. The agents have one A in common on v_proj, so that `base_lr_shared` applies, and
    each its own B; B is scaled so that the norm of an adapter's update is `strength` times that of the frozen weight.
    """
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with warnings.catch_warnings():  # peft 0.21 asks transformers 5.24 for an attribute by its old name
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        agents = get_peft_model(model, config, adapter_name=AGENTS[0])
    for name in AGENTS[1:]:
        agents.add_adapter(name, config)
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
    # PEFT keeps adapters in float32; in the model's own dtype nothing has to be converted at every layer.
    return agents.to(model.dtype).eval()


def load_question(index: int = 0) -> dict[str, Any]:
    """Question `index` of questions.json: question, answer, type, context, supporting_facts."""
    questions = json.loads(Path(__file__).with_name("questions.json").read_text(encoding="utf-8"))
    question: dict[str, Any] = questions[index]
    return question


class Library:
    """The tool: finds the paragraphs that share most words with a query, each paragraph once."""

    def __init__(self, context: list[tuple[str, list[str]]]) -> None:
        self.unread = {title: " ".join(sentences) for title, sentences in context}

    def search(self, query: str, count: int = 3) -> str:
        wanted = _words(query)

        def score(title: str) -> float:
            words = _words(title + " " + self.unread[title])
            return 2 * len(wanted & _words(title)) + len(wanted & words) / len(words) ** 0.5

        best = sorted(self.unread, key=score, reverse=True)[:count]
        return "\n".join(f"[{title}] {self.unread.pop(title)}" for title in best) or "Nothing more was found."


def _words(text: str) -> set[str]:
    return {word for word in re.findall(r"\w+", text.lower()) if len(word) > 2}
