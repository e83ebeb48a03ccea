"""Slots: adapted layers whose A and B are tensors of fixed shape, so that compiled code does not ask who is active.

PEFT looks adapters up by name, and compiled code would be made anew for each name. For one token at a time, an adapted
layer therefore runs through its slot: the base layer, and the A and B of whoever is active, copied into tensors that stay
the same from agent to agent. Nothing of PEFT's changes; the slot stands in for the layer's ``forward`` during that token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from torch.nn import functional

from .adapters import unsplittable
from .agents import Agent
from .placement import weight_of
from .tap import Tap

__all__ = ["Slot", "fixed_zeros", "misfit"]


class Slot:
    """One adapted layer with the adapters of whoever is active.

    Attributes:
        layer: the layer as PEFT left it.
        a, b: A [R, d_in] and B [d_out, R] with the scaling folded in, zeros beyond the active rank; ``None`` where what
            adapters add is kept in an LR cache: then the layer gives X W0 alone.
        stacks: the A's of the banks that this token's LR goes to.
        rows: X A of each of them [B, 1, width], until they are stored.
    """

    def __init__(self, layer: LoraLayer, split: bool):
        self.layer, self.split = layer, split
        self.a: Tensor | None = None
        self.b: Tensor | None = None
        self.stacks: tuple[Tensor, ...] = ()
        self.rows: tuple[Tensor, ...] = ()
        self._bound = self.forward  # one object: compiled code would not know another as the same

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """What the layer gives for the active agent, [B, 1, d_out]."""
        output: Tensor = self.layer.base_layer(x, *args, **kwargs)
        if self.split:
            self.rows = tuple(functional.linear(x.to(stack.dtype), stack) for stack in self.stacks)
        elif self.a is not None and self.b is not None:
            added = functional.linear(functional.linear(x.to(self.a.dtype), self.a), self.b)
            output = (output + added).to(output.dtype)
        return output

    def place(self) -> None:
        """Stand in for the layer's forward."""
        self.layer.__dict__["forward"] = self._bound

    def remove(self) -> None:
        """Give it back."""
        if self.layer.__dict__.get("forward") is self._bound:
            del self.layer.__dict__["forward"]

    def load(self, agent: Agent) -> None:
        """Take A and B over from the adapters of ``agent``."""
        if self.split:
            return
        names = _active(self.layer, agent)
        parts = [(_weight(self.layer.lora_A[name]), _weight(self.layer.lora_B[name])) for name in names]
        rank = sum(a.shape[0] for a, _ in parts)
        if self.a is None or self.b is None or self.a.shape[0] < rank:
            self._make(rank)
        assert self.a is not None
        assert self.b is not None
        self.b[:, rank:].zero_()  # so whatever A has there adds nothing
        first = 0
        for name, (a, b) in zip(names, parts, strict=True):
            stop = first + a.shape[0]
            self.a[first:stop].copy_(a)
            self.b[:, first:stop].copy_(b * self.layer.scaling[name])
            first = stop

    def versions(self, agent: Agent) -> list[Any]:
        """What changes when weights or scales that the slot was loaded with are edited in place or replaced."""
        found: list[Any] = []
        for name in _active(self.layer, agent):
            for weight in (self.layer.lora_A[name].weight, self.layer.lora_B[name].weight):
                found += [weight.data_ptr(), -1 if weight.is_inference() else weight._version]
            found.append(self.layer.scaling[name])
        return found

    def _make(self, rank: int) -> None:
        """Room for every adapter there is by itself, and for ``rank``."""
        some = next(iter(self.layer.lora_A))
        a, b = _weight(self.layer.lora_A[some]), _weight(self.layer.lora_B[some])
        rank = max([rank, *(one.weight.shape[0] for one in self.layer.lora_A.values())])
        dtype = a.dtype
        for one in self.layer.lora_A.values():
            dtype = torch.promote_types(dtype, one.weight.dtype)
        self.a = fixed_zeros((rank, a.shape[1]), dtype, a.device)
        self.b = fixed_zeros((b.shape[0], rank), dtype, a.device)


def misfit(name: str, layer: Any, agent: Agent) -> str | None:
    """Why an adapted layer cannot run this agent through a slot, or ``None``."""
    if type(layer) is not LoraLinear:
        return f"{name} is a {type(layer).__module__}.{type(layer).__name__}"
    if layer.merged:  # also where adapters are disabled: PEFT would unmerge
        return f"an adapter is merged into {name}"
    if why := unsplittable(layer, agent):
        return f"{name}: {why[0]}"
    if "forward" in layer.__dict__ or hasattr(layer.base_layer, "_hf_hook"):
        return f"{name} is placed by accelerate"
    if type(layer.base_layer.weight) is not nn.Parameter and hasattr(layer.base_layer.weight, "to_local"):
        return f"{name} is split by tensor parallelism"
    for adapter in _active(layer, agent):
        variant = layer.lora_variant.get(adapter)
        if isinstance(variant, Tap):
            variant = variant.replaced.get(adapter)
        if variant is not None or layer.lora_B[adapter].bias is not None:
            return f"adapter {adapter!r} on {name} is more than X A B"  # DoRA, lora_bias: the LR cache takes those
    return None


def fixed_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, made known to torch.compile as a tensor whose address stays: CUDA graphs then read it where it is."""
    with torch.inference_mode(False):
        zeros = torch.zeros(shape, dtype=dtype, device=device)
    torch._dynamo.mark_static_address(zeros)
    return zeros


def _active(layer: LoraLayer, agent: Agent) -> Sequence[str]:
    return [name for name in agent if name in layer.lora_A]


def _weight(module: nn.Module) -> Tensor:
    weight = weight_of(module)
    assert weight is not None
    return weight.detach()
