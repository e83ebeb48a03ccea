"""Where a module runs, and its weights where accelerate keeps them elsewhere, or tensor parallelism has split them.

``dispatch_model`` and ``device_map=`` put a hook on each module that moves what it is given to its device, and on offloaded
ones a hook that also loads their weights, and lets go of them after. Between two calls these weights are on device meta.
"""

from itertools import chain
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from torch import Tensor, nn

__all__ = ["device_of", "is_offloaded", "weight_of"]


def device_of(module: nn.Module) -> torch.device:
    """The device that a module with weights of its own computes on: accelerate's, or that of its weights."""
    weight = next(chain(module.parameters(), module.buffers()), None)  # an A frozen by share_lora_A is a buffer
    if weight is None or weight.device.type == "meta":
        hook = next((_hook(part) for part in module.modules() if _hook(part) is not None), None)
        if hook is not None and hook.execution_device is not None:
            return torch.device(hook.execution_device)
    return torch.device("cpu") if weight is None else weight.device


def is_offloaded(module: nn.Module) -> bool:
    """Whether the module's weights are elsewhere until it runs."""
    hook = _hook(module)
    return hook is not None and bool(hook.offload) and hook.weights_map is not None


def weight_of(module: nn.Module, name: str = "weight") -> Tensor | None:
    """A parameter on the device where the module runs; ``None`` if there is none.

    Fetched if it is offloaded; of one that tensor parallelism has split (a DTensor) the part of this process.
    """
    parameter: Tensor | None = getattr(module, name)
    if parameter is None:
        return None
    if type(parameter) is not nn.Parameter and hasattr(parameter, "to_local"):
        local: Tensor = parameter.to_local()
        return local
    if parameter.device.type != "meta" or not is_offloaded(module):
        return parameter
    hook = _hook(module)
    kept: Tensor = hook.weights_map[name]
    return kept if hook.execution_device is None else kept.to(hook.execution_device)


def _hook(module: nn.Module) -> Any:
    """Accelerate's hook that places the module, if it has one."""
    hook = getattr(module, "_hf_hook", None)
    hooks = hook.hooks if isinstance(hook, SequentialHook) else (hook,)
    return next((one for one in hooks if isinstance(one, AlignDevicesHook)), None)
