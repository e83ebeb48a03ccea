"""Reading PEFT: the adapted layers, an adapter's A, B and scale, and which adapters cannot be split exactly."""

from collections.abc import Iterator, Sequence

import torch
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from .dora import is_dora
from .errors import UnsupportedAdapterError
from .tap import Tap

__all__ = [
    "check_splittable",
    "fold_b",
    "lora_a",
    "probes",
    "tuner_layers",
]


def tuner_layers(root: nn.Module) -> Iterator[tuple[str, nn.Module, str, BaseTunerLayer]]:
    """Every adapted layer below ``root``: (full name, parent, name in parent, layer).

    Not those inside another one, nor the trained tokens of `trainable_token_indices`: these are active for the adapters
    that have some, and do not tell who runs.
    """
    for prefix, parent in root.named_modules():
        for child, layer in parent.named_children():
            if isinstance(layer, BaseTunerLayer) and not isinstance(parent, BaseTunerLayer | AuxiliaryTrainingWrapper):
                yield f"{prefix}.{child}".lstrip("."), parent, child, layer


def probes(root: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Modules that tell who is active, best first: adapted layers, and after them trainable copies (modules_to_save)."""
    yield from ((parent, child, layer) for _, parent, child, layer in tuner_layers(root))
    for parent in root.modules():
        for child, module in parent.named_children():
            if isinstance(module, AuxiliaryTrainingWrapper):
                yield parent, child, module


def lora_a(layer: nn.Module, adapter: str) -> Tensor | None:
    """The adapter's A [rank, d_in] on this layer, or ``None`` if it leaves the layer alone."""
    if isinstance(layer, LoraLayer) and adapter in layer.lora_A:
        weight: Tensor = layer.lora_A[adapter].weight
        return weight.detach()
    return None


def fold_b(layer: LoraLayer, adapter: str, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The adapter's B with the scale folded in, read anew each time: an edited B or scale counts from the next token.

    Returns:
        B as [heads, rank, head_dim] (a transposed view) and the constant a ``lora_bias`` adds, [heads, 1, head_dim],
        or ``None``. Softmax rows sum to one, so a constant on V is the same constant on the output.
    """
    b, scale = layer.lora_B[adapter], layer.scaling[adapter]
    weight = (b.weight.detach() * scale).to(dtype)
    folded = weight.view(heads, -1, weight.shape[1]).transpose(1, 2)
    bias = None if b.bias is None else (b.bias.detach() * scale).to(dtype).view(heads, 1, -1)
    return folded, bias


def check_splittable(name: str, v_proj: nn.Module, k_proj: nn.Module | None, adapters: Sequence[str]) -> None:
    """Refuse, by name, what V = X W0 + (X A) B does not describe on this attention layer.

    Args:
        name: of the attention module, for the message.
        v_proj, k_proj: its projections as PEFT left them.
        adapters: the adapters asked about.

    Raises:
        UnsupportedAdapterError: with the adapter, the layer, the reason and the way out.
    """
    for child, module in (("v_proj", v_proj), ("k_proj", k_proj)):
        where = f"{name}.{child}"
        if isinstance(module, AuxiliaryTrainingWrapper):
            raise _refused(where, "it has trainable copies of its own (modules_to_save)", "train it with LoRA")
        if not isinstance(module, BaseTunerLayer):
            if any(isinstance(part, BaseTunerLayer) for part in (() if module is None else module.modules())):
                raise _refused(where, f"adapters sit inside {type(module).__name__}, not on it", None)
            continue
        if isinstance(getattr(module, "base_layer", None), BaseTunerLayer):
            raise _refused(where, "adapters of several kinds are stacked on it", "use LoRA adapters alone")
        if not isinstance(module, LoraLayer):
            if any(adapter in module._get_available_adapters() for adapter in adapters):
                kind = f"{type(module).__module__}.{type(module).__name__}"
                raise _refused(where, f"its adapter is a {kind}, not LoRA", "use LoRA adapters")
            continue
        if module.merged and not module.disable_adapters:
            names = ", ".join(module.merged_adapters)
            raise _refused(where, f"adapter {names} is merged into the base weight", "call unmerge_adapter() first")
        for adapter in adapters:
            if adapter not in module.lora_A:
                continue
            if child == "k_proj":
                raise _refused(where, f"adapter {adapter!r} has LoRA on k_proj, and keys are stored whole", None)
            _check_lora(where, module, adapter)


def _check_lora(where: str, layer: LoraLayer, adapter: str) -> None:
    """Refuse an adapter that is not X A B, or not now."""
    variant = layer.lora_variant.get(adapter)
    if variant is not None and not isinstance(variant, Tap) and not is_dora(variant):
        kind = type(variant).__name__
        raise _refused(where, f"adapter {adapter!r} is a variant of LoRA ({kind}), not X A B", None)
    if isinstance(layer, ParamWrapper):
        raise _refused(where, f"adapter {adapter!r} is of target_parameters, not X A B", "use target_modules")
    if not isinstance(layer.lora_A[adapter], nn.Linear) or not isinstance(layer.lora_B[adapter], nn.Linear):
        raise _refused(where, f"adapter {adapter!r} is {type(layer).__name__}, not X A B", "use LoRA adapters")
    dropout = layer.lora_dropout[adapter]
    if dropout.training and getattr(dropout, "p", 0.0) > 0.0:
        raise _refused(where, f"LoRA dropout of adapter {adapter!r} is active", "call model.eval() first")
    device = layer.lora_A[adapter].weight.device
    base = next((weight.device for weight in layer.get_base_layer().parameters()), device)
    if device.type == "meta":
        raise _refused(where, f"the weights of adapter {adapter!r} are not in memory (device meta)", "load them")
    if device != base:
        raise _refused(where, f"adapter {adapter!r} is on {device} and v_proj on {base}", "move one to the other")


def _refused(where: str, reason: str, way_out: str | None) -> UnsupportedAdapterError:
    way_out = f"{way_out}, or use" if way_out else "use"
    return UnsupportedAdapterError(
        f"Values cannot be split into base and LR at {where}: {reason}. "
        f"To go on, {way_out} scheme='full_shared' (approximate) or 'non_shared' (exact), which store values whole."
    )
