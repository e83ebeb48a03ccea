"""Three adapters that are given one A: what the tests of `share_lora_A` train, look at and expect."""

from typing import Any

import pytest
import torch
from peft import PeftModel
from tiny import AGENTS, config, decoder_of, peft_model, raw, tokens
from torch import Tensor, nn

IDS = tokens(24)
SMALL = {"num_hidden_layers": 2}
KINDS = pytest.mark.parametrize("source", [None, "plan"], ids=["tied", "copied"])
EQUAL: dict[str, dict[str, Any]] = {name: {} for name in AGENTS}


def three_adapters(**lora: Any) -> PeftModel:
    """Adapters of rank 5 on q_proj and v_proj, each with an A of its own."""
    return peft_model(config(**SMALL), EQUAL, **lora)


def layers(model: nn.Module, part: str = "v_proj") -> list[Any]:
    """The adapted projections of that name, by layer."""
    return [getattr(layer.self_attn, part) for layer in decoder_of(model).layers]


def weights(model: nn.Module, name: str, which: str = "lora_A", part: str = "v_proj") -> list[Tensor]:
    """An adapter's A (or B), by layer."""
    return [getattr(layer, which)[name].weight for layer in layers(model, part)]


def values(model: nn.Module, name: str, which: str = "lora_A", part: str = "v_proj") -> list[bytes]:
    """The same, as bytes."""
    return [raw(weight) for weight in weights(model, name, which, part)]


def moved(before: list[bytes], after: list[bytes]) -> bool:
    """Whether every layer's weight differs."""
    return all(one != two for one, two in zip(before, after, strict=True))


def flags(model: nn.Module, name: str) -> set[bool]:
    """``requires_grad`` of the adapter's A."""
    return {weight.requires_grad for weight in weights(model, name)}


def loss(model: nn.Module, ids: Tensor = IDS, **options: Any) -> Tensor:
    """What next-token training minimises."""
    return model(input_ids=ids, labels=ids, **options).loss  # type: ignore[no-any-return]


def train(model: nn.Module, agents: list[str], steps: int = 1) -> None:
    """A plain loop: the agents in turn, one AdamW for all that any of them trains."""
    trained: dict[Tensor, None] = {}
    for agent in agents:
        model.set_adapter(agent)
        trained.update(dict.fromkeys(parameter for parameter in model.parameters() if parameter.requires_grad))
    optimizer = torch.optim.AdamW(list(trained), lr=1e-2)
    for step in range(steps):
        model.set_adapter(agents[step % len(agents)])
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()


def assert_tied(model: nn.Module, names: tuple[str, ...] = AGENTS) -> None:
    """They hold one Parameter and nothing else, and each of them trains it."""
    assert not any(list(layer.lora_A[name].buffers()) for layer in layers(model) for name in names)
    for held in zip(*(weights(model, name) for name in names), strict=True):
        assert isinstance(held[0], nn.Parameter)
        assert all(one is held[0] for one in held)
        assert sum(one is held[0] for one in model.parameters()) == 1
    for name in (*names, *reversed(names)):
        before = values(model, name)
        train(model, [name])
        assert all(moved(before, values(model, other)) for other in names), name


def assert_frozen(model: nn.Module, names: tuple[str, ...] = AGENTS[1:]) -> None:
    """Training each of them moves its B and leaves its A, bit for bit."""
    for name in names:
        a, b = values(model, name), values(model, name, "lora_B")
        train(model, [name], steps=2)
        assert values(model, name) == a
        assert moved(b, values(model, name, "lora_B"))


def assert_as_made(model: nn.Module, source: str | None) -> None:
    """What ``share_lora_A(model, AGENTS, source)`` made of the model still holds."""
    if source is None:
        assert_tied(model)
    else:
        assert_frozen(model, tuple(name for name in AGENTS if name != source))


def everything(model: nn.Module) -> dict[str, Any]:
    """Values, who holds which Parameter, flags and classes."""
    state = {name: (raw(tensor), tensor.dtype) for name, tensor in model.state_dict().items() if not tensor.is_meta}
    parameters = {name: (id(p), p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)}
    return {"state": state, "parameters": parameters, "classes": [type(module) for module in model.modules()]}
