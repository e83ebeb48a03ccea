"""Devices that are not there: tensors that say they are on one, compute on the CPU, and refuse to meet those of another.

Within ``Devices()``, ``lazy:0``, ``lazy:1`` and so on are devices like any other: ``model.to("lazy:0")``,
``torch.zeros(3, device="lazy:1")``, accelerate's ``dispatch_model``. What is computed is what a CPU computes.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers.utils.generic import maybe_autocast

__all__ = ["Devices", "There", "here", "known_to_transformers"]

NAME = "lazy"  # a name that torch knows and asks no library about
_MOVES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


def known_to_transformers() -> bool:
    """Whether it asks torch nothing about the name that torch does not know (older ones ask whether autocast is on)."""
    try:
        with maybe_autocast(device_type=NAME, enabled=False):
            return True
    except RuntimeError:
        return False


class There(Tensor):
    """A tensor on such a device; ``inner`` has the numbers. To torch's own code, which has no such device, it is on meta.

    Without a device it is a parameter: accelerate makes parameters anew by the class they have.
    """

    inner: Tensor
    place: torch.device

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device | None = None, requires_grad: bool = False) -> "There":
        if device is None:
            return inner if isinstance(inner, There) else nn.Parameter(inner, requires_grad)  # type: ignore[return-value]
        made: There = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            inner.stride(),
            inner.storage_offset(),
            dtype=inner.dtype,
            device="meta",
            dispatch_device=True,
        )
        made.inner, made.place = inner, device
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})

    def as_subclass(self, cls: Any) -> Any:
        """Of that class too: torch lets a tensor have one."""
        made = There(self.inner, self.place)
        if cls is not Tensor:
            made.__class__ = type(cls.__name__, (cls, There), {})
        return made

    def __repr__(self, **_: Any) -> str:
        return f"There({self.inner}, device={self.device})"


class Devices(TorchDispatchMode):
    """See the module."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


def here(tensor: Tensor) -> Tensor:
    """The numbers, as a tensor on the CPU."""
    return tensor.inner if isinstance(tensor, There) else tensor


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func is torch.ops.prim.device.default:
        return args[0].place
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    devices = {tensor.device for tensor in tensors if tensor.ndim or tensor.device.type != "cpu"}
    if len(devices) > 1 and func not in _MOVES:
        raise RuntimeError(f"{func}: expected all tensors on one device, found {sorted(map(str, devices))}")
    named = [argument.name for argument in func._schema.arguments]
    if "device" in named[: len(args)]:  # given by position
        kwargs = {**dict(zip(named, args, strict=False)), **kwargs}
        args = ()
    asked = kwargs.get("device")
    target = torch.device(asked) if asked is not None else tensors[0].device if tensors else torch.device("cpu")
    if devices and asked is None and func not in _MOVES:
        target = next(iter(devices))
    if target.type == NAME and asked is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    outer = {id(here(tensor)): tensor for tensor in tensors}
    found = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))

    def placed(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        return outer.get(id(one)) if id(one) in outer else There(one, target) if target.type == NAME else one

    return tree_map(placed, found)


def _inner(one: Any) -> Any:
    return here(one) if isinstance(one, Tensor) else one
