"""DoRA on v_proj: a gain per output feature, which commutes with attention.

    V = g * (X W0 + s X A B) + bias        g = m / ||W0 + s B A||, one number per feature of V; bias is W0's own
    O = g * (P V_base + (P V_lr) B) + (1 - g) * bias        V_base = X W0 + bias; the rows of P sum to one

So base and LR cache are those of plain LoRA, and g meets attention's output only (DoRA: arXiv 2402.09353, section 4).
"""

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import LoraLayer, LoraVariant
from peft.tuners.lora.variants import DoraLinearVariant
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn

from .errors import UnsupportedAdapterError

__all__ = ["Gain", "GainStore", "check_no_dora", "check_order", "is_dora"]


def is_dora(variant: LoraVariant | None) -> bool:
    """Whether a LoRA variant is DoRA of a linear layer, as PEFT has it."""
    return type(variant) is DoraLinearVariant


def check_no_dora(name: str, layer: Any, agent: tuple[str, ...]) -> None:
    """PEFT runs no DoRA adapter in a batch whose rows have adapters of their own.

    Raises:
        UnsupportedAdapterError: one of the agent's is.
    """
    first = next((a for a in agent if is_dora(getattr(layer, "lora_variant", {}).get(a))), None)
    if first is not None:
        raise UnsupportedAdapterError(
            f"Adapter {first!r} is DoRA at {name}, which PEFT does not run under adapter_names=. Run a batch per adapter."
        )


def check_order(name: str, layer: Any, agent: tuple[str, ...]) -> None:
    """An agent is a set of adapters; DoRA applied after another adapter is not DoRA before it, so one order is fixed.

    Raises:
        UnsupportedAdapterError: several adapters, one of them DoRA, in another than alphabetical order.
    """
    if len(agent) < 2 or not isinstance(layer, LoraLayer):
        return
    order = layer.merged_adapters if layer.merged else layer.active_adapters
    if list(order) == list(agent):
        return
    first = next((adapter for adapter in agent if is_dora(layer.lora_variant.get(adapter))), None)
    if first is not None:
        raise UnsupportedAdapterError(
            f"Adapters {list(order)} run one after another at {name}, and {first!r} is DoRA, which scales what those "
            f"before it added: the order counts. Activate them in alphabetical order: set_adapter({list(agent)})."
        )


class Gain(NamedTuple):
    """What the DoRA adapters of one layer do besides adding X A B.

    Several adapters run one after another, and a DoRA one scales what those before it added. With ``total`` on the
    output, an adapter's B is divided by the gains that came before its turn.

    Attributes:
        total: product of the gains [heads, 1, head_dim].
        before: adapter -> product of the gains of the adapters before it, where there are any.
        bias: of the base layer, which no gain scales, [heads, 1, head_dim], or ``None``.
    """

    total: Tensor
    before: dict[str, Tensor]
    bias: Tensor | None

    def undo(self, adapter: str, part: Tensor) -> Tensor:
        """``part`` [heads, any, head_dim] of that adapter without the gains that came before its turn."""
        before = self.before.get(adapter)
        return part if before is None else (part / before).to(part.dtype)

    def constant(self, added: Tensor | None) -> Tensor | None:
        """The constant on the output: ``added`` under the gain, and what of the base layer's bias it must not scale."""
        constant = None if added is None else self.total * added
        if self.bias is None:
            return constant
        kept = (1 - self.total) * self.bias
        return kept if constant is None else constant + kept


class GainStore:
    """The gains of one v_proj, computed when something they depend on has changed, or when told to look again."""

    def __init__(self) -> None:
        self._gains: dict[str, tuple[Hashable, Tensor]] = {}

    def read(
        self, name: str, v_proj: Any, replaced: Mapping[str, LoraVariant | None], heads: int, fresh: bool
    ) -> Gain | None:
        """The gain of the adapters that v_proj runs now, or ``None`` if none of them is DoRA.

        Args:
            name: of the attention module, for the message.
            replaced: adapter -> variant, in the order in which PEFT applies them.
            fresh: compute anew: an edit through ``.data`` leaves no trace.

        Raises:
            UnsupportedAdapterError: a gain of zero with more adapters after it.
        """
        if not any(map(is_dora, replaced.values())):
            return None
        total: Tensor | None = None
        before: dict[str, Tensor] = {}
        for adapter, variant in replaced.items():
            if total is not None:
                before[adapter] = total
            if is_dora(variant):
                gain = self._gain(v_proj, adapter, fresh).view(heads, 1, -1)
                total = gain if total is None else total * gain
        assert total is not None
        for adapter, gains in before.items():
            if not bool(gains.all()):
                raise UnsupportedAdapterError(
                    f"A DoRA magnitude at {name}.v_proj is zero, and adapter {adapter!r} runs after it: their parts cannot "
                    "be told apart. Activate one adapter at a time, or use scheme='full_shared' or 'non_shared'."
                )
        bias = getattr(v_proj.get_base_layer(), "bias", None)
        return Gain(total, before, None if bias is None else bias.detach().view(heads, 1, -1))

    def _gain(self, v_proj: Any, adapter: str, fresh: bool) -> Tensor:
        """g [d_out], by PEFT's own weight norm and in the dtype that PEFT computes it in."""
        known = self._gains.get(adapter)
        if known is not None and not fresh and known[0] == _state(v_proj, adapter):
            return known[1]
        a, b = v_proj.lora_A[adapter], v_proj.lora_B[adapter]
        layer = v_proj.lora_magnitude_vector[adapter]
        with torch.inference_mode(False), torch.no_grad():
            weight = dequantize_module_weight(v_proj.get_base_layer()).to(a.weight.dtype)
            added = layer.get_lora_weight(lora_A=a, lora_B=b, adapter_name=adapter).to(weight.dtype)
            norm = layer.get_weight_norm(weight, added, v_proj.scaling[adapter], adapter_name=adapter)
            gain: Tensor = (layer.weight / norm).detach()
        self._gains[adapter] = (_state(v_proj, adapter), gain)  # after: dequantising may move the weight
        return gain


def _state(v_proj: Any, adapter: str) -> Hashable:
    """Changes whenever a weight that the gain depends on is replaced, or edited in a way that torch counts."""
    modules: list[nn.Module] = [
        v_proj.lora_A[adapter], v_proj.lora_B[adapter], v_proj.lora_magnitude_vector[adapter], v_proj.get_base_layer(),
    ]  # fmt: skip
    scale = v_proj.scaling[adapter]
    weights: list[Tensor] = [weight for module in modules for weight in module.parameters()]
    if isinstance(scale, Tensor):
        weights.append(scale)
        scale = None
    return scale, *((id(w), w.data_ptr(), -1 if w.is_inference() else w._version) for w in weights)
