"""Reading PEFT: the adapted layers, an adapter's A, B and scale, and which adapters cannot be split exactly."""

from collections.abc import Iterator, Sequence

import torch
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from .dora import is_dora
from .errors import UnsupportedAdapterError
from .placement import device_of, is_offloaded, weight_of
from .tap import Tap

__all__ = [
    "check_splittable",
    "fold_b",
    "lora_a",
    "lora_adapters",
    "probes",
    "tuner_layers",
    "unsplittable",
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


def lora_adapters(root: nn.Module) -> list[str]:
    """Every LoRA adapter loaded below ``root``, in order of loading."""
    names: dict[str, None] = {}
    for _, _, _, layer in tuner_layers(root):
        if isinstance(layer, LoraLayer):
            names.update(dict.fromkeys([*layer.lora_A, *layer.lora_embedding_A]))
    return list(names)


def lora_a(layer: nn.Module, adapter: str) -> Tensor | None:
    """The adapter's A [rank, d_in] on this layer, or ``None`` if it leaves the layer alone."""
    if isinstance(layer, LoraLayer) and adapter in layer.lora_A:
        weight = weight_of(layer.lora_A[adapter])
        assert weight is not None
        return weight.detach()
    return None


def fold_b(layer: LoraLayer, adapter: str, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The adapter's B with the scale folded in, read anew each time: an edited B or scale counts from the next token.

    Returns:
        B as [heads, rank, head_dim] (a transposed view) and the constant a ``lora_bias`` adds, [heads, 1, head_dim],
        or ``None``. Softmax rows sum to one, so a constant on V is the same constant on the output.
    """
    b, scale = layer.lora_B[adapter], layer.scaling[adapter]
    weight, bias = weight_of(b), weight_of(b, "bias")
    assert weight is not None
    weight = (weight.detach() if torch.is_grad_enabled() else weight) * scale
    if weight.dtype != dtype:
        weight = weight.to(dtype)
    folded = weight.view(heads, -1, weight.shape[1]).transpose(1, 2)
    return folded, None if bias is None else (bias.detach() * scale).to(dtype).view(heads, 1, -1)


def unsplittable(module: nn.Module | None, adapters: Sequence[str], key: bool = False) -> tuple[str, str | None] | None:
    """Why X W0 + (X A) B does not describe what these adapters do to a projection, and the way out; ``None`` if it does.

    Args:
        module: v_proj or k_proj as PEFT left it.
        adapters: the adapters asked about.
        key: it is k_proj: what adapters add to keys is turned by the rotary embedding, so it must be X A B and no more.
    """
    if isinstance(module, AuxiliaryTrainingWrapper):
        return "it has trainable copies of its own (modules_to_save)", "train it with LoRA"
    if not isinstance(module, BaseTunerLayer):
        if any(isinstance(part, BaseTunerLayer) for part in (() if module is None else module.modules())):
            return f"adapters sit inside {type(module).__name__}, not on it", None
        return None
    if isinstance(getattr(module, "base_layer", None), BaseTunerLayer):
        return "adapters of several kinds are stacked on it", "use LoRA adapters alone"
    if not isinstance(module, LoraLayer):
        if any(adapter in module._get_available_adapters() for adapter in adapters):
            return f"its adapter is a {type(module).__module__}.{type(module).__name__}, not LoRA", "use LoRA adapters"
        return None
    if module.merged and not module.disable_adapters:
        names = ", ".join(module.merged_adapters)
        return f"adapter {names} is merged into the base weight", "call unmerge_adapter() first"
    whys = (_not_plain(module, adapter, key) for adapter in adapters if adapter in module.lora_A)
    return next((why for why in whys if why is not None), None)


def check_splittable(where: str, module: nn.Module | None, adapters: Sequence[str], key: bool = False) -> None:
    """Refuse, by name, what X W0 + (X A) B does not describe on this projection.

    Args:
        where: its full name, for the message.
        module, adapters, key: as for ``unsplittable``.

    Raises:
        UnsupportedAdapterError: with the adapter, the layer, the reason and the way out.
    """
    if why := unsplittable(module, adapters, key):
        raise _refused(where, *why, key)


def _not_plain(layer: LoraLayer, adapter: str, key: bool) -> tuple[str, str | None] | None:
    """Why an adapter is not X A B, or not now, and the way out."""
    variant = layer.lora_variant.get(adapter)
    if variant is not None and not isinstance(variant, Tap) and not is_dora(variant):
        kind = type(variant).__name__
        return f"adapter {adapter!r} is a variant of LoRA ({kind}), not X A B", None
    if key and is_dora(variant):
        return f"adapter {adapter!r} is DoRA, whose gain does not commute with the rotary embedding", None
    if isinstance(layer, ParamWrapper):
        return f"adapter {adapter!r} is of target_parameters, not X A B", "use target_modules"
    if not isinstance(layer.lora_A[adapter], nn.Linear) or not isinstance(layer.lora_B[adapter], nn.Linear):
        return f"adapter {adapter!r} is {type(layer).__name__}, not X A B", "use LoRA adapters"
    if key and layer.lora_B[adapter].bias is not None:
        return f"adapter {adapter!r} has a lora_bias, which would turn with the position", None
    dropout = layer.lora_dropout[adapter]
    if dropout.training and getattr(dropout, "p", 0.0) > 0.0:
        return f"LoRA dropout of adapter {adapter!r} is active", "call model.eval() first"
    a = layer.lora_A[adapter]
    if a.weight.device.type == "meta" and not is_offloaded(a):
        return f"the weights of adapter {adapter!r} are not in memory (device meta)", "load them"
    if is_dora(variant) and (is_offloaded(a) or is_offloaded(layer.get_base_layer())):
        return f"adapter {adapter!r} is DoRA, whose weights are offloaded between forwards", "keep them in memory"
    device = device_of(a)
    base = device_of(layer.get_base_layer()) if next(layer.get_base_layer().parameters(), None) is not None else device
    if device != base:
        return f"adapter {adapter!r} is on {device} and the projection on {base}", "move one to the other"
    return None


def _refused(where: str, reason: str, way_out: str | None, key: bool) -> UnsupportedAdapterError:
    way_out = f"{way_out}, or use" if way_out else "use"
    whole = "key_lr=False, which shares keys whole, or " if key else ""
    return UnsupportedAdapterError(
        f"{'Keys' if key else 'Values'} cannot be split into base and LR at {where}: {reason}. To go on, {way_out} {whole}"
        "scheme='full_shared' (approximate) or 'non_shared' (exact), which store values whole."
    )
