"""The tap: PEFT's own extension point, used to keep an adapter's part out of a projection's output."""

from typing import Any

from peft.tuners.lora.layer import LoraLayer, LoraVariant
from torch import Tensor, nn

from .agents import Agent, is_mixed_batch

__all__ = ["Tap"]


class Tap(LoraVariant):
    """Stands in for the variant of each adapter that one projection is about to run. In place only while a forward splits.

    Attributes:
        replaced: adapter -> the variant whose place the tap took (DoRA's), ``None`` for plain LoRA.
        passed: how many adapters were kept out of it in this forward.
    """

    def __init__(self) -> None:
        self.replaced: dict[str, LoraVariant | None] = {}
        self.passed = 0
        self._layer: LoraLayer | None = None

    def place(self, projection: nn.Module, agent: Agent) -> None:
        """Tap the adapters that ``projection`` is about to run as part of ``agent``."""
        if isinstance(projection, LoraLayer) and not projection.disable_adapters:
            self._layer = projection
            for adapter in agent if is_mixed_batch(projection) else projection.active_adapters:
                if adapter in projection.lora_A:
                    self.replaced[adapter] = projection.lora_variant.get(adapter)
                    projection.lora_variant[adapter] = self

    def remove(self) -> None:
        """Put every variant back, unless the adapter was deleted or replaced by now."""
        for adapter, variant in self.replaced.items():
            variants = self._layer.lora_variant if self._layer is not None else {}
            if variants.get(adapter) is not self:
                continue
            if variant is None:
                del variants[adapter]
            else:
                variants[adapter] = variant
        self.replaced.clear()
        self._layer = None

    def forward(self, module: LoraLayer, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
        self.passed += 1
        return result

    # A forward that was interrupted (Ctrl-C) leaves its taps until the next one; merging means what it meant without.

    @staticmethod
    def init(module: LoraLayer, adapter_name: str, **kwargs: Any) -> None:
        pass

    def merge_safe(self, module: LoraLayer, active_adapter: str, orig_weight: Tensor) -> Tensor:
        variant = self.replaced.get(active_adapter)
        if variant is not None:
            return variant.merge_safe(module, active_adapter, orig_weight)
        return orig_weight + module.get_delta_weight(active_adapter).to(orig_weight.dtype)

    def merge_unsafe(self, module: LoraLayer, active_adapter: str, orig_weight: Tensor) -> None:
        variant = self.replaced.get(active_adapter)
        if variant is not None:
            variant.merge_unsafe(module, active_adapter, orig_weight)
        else:
            orig_weight.data += module.get_delta_weight(active_adapter)

    def unmerge(self, module: LoraLayer, active_adapter: str, orig_weight: Tensor) -> Tensor:
        variant = self.replaced.get(active_adapter)
        if variant is not None:
            return variant.unmerge(module, active_adapter, orig_weight)
        return orig_weight - module.get_delta_weight(active_adapter).to(orig_weight.dtype)
