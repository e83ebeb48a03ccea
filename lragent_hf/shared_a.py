"""Adapters with one A, as `base_lr_shared` needs them: tied and trained together, or copied from one and frozen.

PEFT's ``set_adapter`` goes through the adapters of a layer and sets ``requires_grad`` of each one's parameters. On a
Parameter that two of them hold the last one decides, so A would not train while an earlier one is active; and a frozen
copy would train as soon as its adapter is active. Neither raises. So what holds A gets another class here.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch import Tensor, nn

from .adapters import lora_adapters, tuner_layers
from .errors import UnsupportedAdapterError

__all__ = ["FrozenA", "TiedA", "share_lora_A"]


class FrozenA(nn.Linear):
    """An adapter's A [rank, d_in] as a buffer: what goes through parameters passes it by, so it does not train.

    In state dicts and files it has the name of the Parameter it replaces.
    """


class TiedA(nn.Linear):
    """An adapter's A [rank, d_in] whose Parameter other adapters of the layer hold too.

    Attributes:
        wanted: whether this adapter is to be trained, as PEFT last said. The Parameter is trained if any that holds it is.
        siblings: the ``lora_A`` of the layer. Those in it that hold the same Parameter are tied to this one.
    """

    wanted: bool
    siblings: nn.ModuleDict

    def group(self) -> set["TiedA"]:
        """All that hold this one's Parameter."""
        weight = self._parameters.get("weight")
        tied = (other for other in self.siblings.values() if isinstance(other, TiedA))
        return {self, *(other for other in tied if weight is not None and other._parameters.get("weight") is weight)}

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """As ever, but a ``requires_grad`` set on what this yields, as PEFT does, is this adapter's and not the others'."""
        for parameter in super().parameters(recurse):
            if not parameter.is_leaf:  # sharded: PEFT leaves the flag alone there too
                yield parameter
                continue
            group = self.group()
            if parameter.requires_grad != any(one.wanted for one in group):
                for one in group:  # set on the Parameter itself, which says nothing of who: it is everyone's
                    one.wanted = parameter.requires_grad
            parameter.requires_grad_(self.wanted)
            try:
                yield parameter
            finally:
                self.wanted = parameter.requires_grad
                parameter.requires_grad_(any(one.wanted for one in group))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """A new Parameter (PEFT's change of dtype, ``load_state_dict(assign=True)``) is everyone's."""
        group = self.group()
        super().register_parameter(name, param)
        for one in group if name == "weight" else ():
            one._parameters[name] = param

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        group = self.group()
        super()._apply(fn, recurse)
        for one in group:  # `to` makes a new Parameter where it cannot change the old one (device meta)
            one._parameters["weight"] = self._parameters["weight"]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "TiedA":
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        state = dict(self.__dict__)
        if id(self.siblings) not in memo:  # it is copied alone, not with its layer
            state["siblings"] = nn.ModuleDict()
        new.__dict__.update(copy.deepcopy(state, memo))
        return new


def share_lora_A(
    model: nn.Module, adapters: Sequence[str], source: str | None = None, modules: Sequence[str] = ("v_proj",)
) -> tuple[str, ...]:
    """Give adapters one LoRA A on some modules, so that they can be trained for ``scheme="base_lr_shared"``.

    Call it once the adapters are on the model, before those that get another A are trained and before the optimizer is
    made. Then train, save and load as ever: each adapter's file is complete and plain PEFT. Loaded again, the A's are
    equal but separate; call it again to go on training.

    Tied, A is one Parameter (the first adapter's), once in ``model.parameters()``. Whichever of the adapters is active
    trains it: it has ``requires_grad`` if PEFT gave it to any of them. A flag that is set on the Parameter itself (``for p
    in model.parameters()``, ``model.requires_grad_()``) is for all of them, until the next ``set_adapter``.

    Copied, A is a buffer in all adapters but the source: ``set_adapter``, ``requires_grad_`` and optimizers do not reach
    it, nor does anything that goes through parameters. What writes into it does: an edit, or other weights loaded under
    that adapter's name. The source's own A is not frozen: train it first, or call again to copy it anew.

    A later call replaces what an earlier one did to the adapters it names; others keep their A.

    Args:
        model: a ``PeftModel``, or a transformers model with adapters of its own (``add_adapter``).
        adapters: names of loaded LoRA adapters. Their A's, ``[rank, d_in]`` and of equal rank, are replaced, so that an
            adapter trained with another A computes something else afterwards.
        source: ``None`` ties them. A name copies that adapter's A to the others and freezes it there, which is how the
            paper trains its agents (LRAgent, arXiv 2602.01053). It need not be among ``adapters``.
        modules: where, by the end of the module's name, as in PEFT's ``target_modules``. Adapters on k_proj need
            ``("v_proj", "k_proj")``, unless the cache is made with ``key_lr=False``.

    Returns:
        Names (in ``model``) of the modules on which they have one A now.

    Raises:
        UnsupportedAdapterError: an adapter is not loaded, is merged, has no A or none that is an ``nn.Linear`` on one of
            the modules, or its A differs from the first one's in shape, dtype or device (copied: in a dtype that would
            round it). Nothing was changed.
        ValueError: fewer than two adapters, one named twice, or no module of that name. Nothing was changed.
    """
    names = _check_names(model, adapters, source)
    sites = _find(model, names, (modules,) if isinstance(modules, str) else tuple(modules))
    for where, layer in sites:
        _check_layer(where, layer, names, source is None)
    with torch.inference_mode(False), torch.no_grad():
        for _, layer in sites:
            if source is None:
                _tie(layer, names)
            else:
                _copy(layer, source, names[1:])
            _ask_again(layer)
    return tuple(where for where, _ in sites)


def _tie(layer: LoraLayer, names: Sequence[str]) -> None:
    """One Parameter in all of them, the first one's."""
    held = layer.lora_A[names[0]].weight
    weight = held if isinstance(held, nn.Parameter) else nn.Parameter(held.clone())
    for name in names:
        a = layer.lora_A[name]
        a._buffers.pop("weight", None)
        a._parameters["weight"] = weight
        a.__class__ = TiedA  # not a new module: hooks on it stay
        a.__dict__["siblings"] = layer.lora_A  # past nn.Module, which would make it a child


def _copy(layer: LoraLayer, source: str, names: Sequence[str]) -> None:
    """The source's A in all of them, as a buffer."""
    for name in names:
        a = layer.lora_A[name]
        weight = layer.lora_A[source].weight.detach().to(a.weight.device, a.weight.dtype, copy=True)
        a._parameters.pop("weight", None)
        a._buffers["weight"] = weight
        a.__class__ = FrozenA
        a.__dict__.pop("siblings", None)


def _ask_again(layer: LoraLayer) -> None:
    """Who wants to train: what PEFT last said of each adapter's B, since an A that changed hands no longer tells."""
    tied = {name: a for name, a in layer.lora_A.items() if isinstance(a, TiedA)}
    for name, a in tied.items():
        a.wanted = layer.lora_B[name].weight.requires_grad
    for a in tied.values():
        a.weight.requires_grad_(any(one.wanted for one in a.group()))


def _check_names(model: nn.Module, adapters: Sequence[str], source: str | None) -> list[str]:
    """The adapters, the source first."""
    if isinstance(adapters, str):
        raise ValueError(f"adapters is a list of names, got the string {adapters!r}.")
    names, loaded = list(adapters), lora_adapters(model)
    for argument, given in (("adapters", names), ("source", [] if source is None else [source])):
        unknown = [name for name in given if name not in loaded]
        if unknown:
            raise UnsupportedAdapterError(
                f"{argument} names {unknown}, which are not loaded. Loaded LoRA adapters: {loaded}."
            )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"adapters names {twice} twice.")
    if source is not None:
        names = [source, *(name for name in names if name != source)]
    if len(names) < 2:
        raise ValueError(f"It takes two adapters to share an A, got {names}. Loaded LoRA adapters: {loaded}.")
    return names


def _find(model: nn.Module, names: Sequence[str], modules: Sequence[str]) -> list[tuple[str, LoraLayer]]:
    """(name, layer) of every module asked for that any of the adapters adapts."""
    adapted = [
        (where, layer)
        for where, _, _, layer in tuner_layers(model)
        if isinstance(layer, LoraLayer) and any(name in [*layer.lora_A, *layer.lora_embedding_A] for name in names)
    ]
    if not modules:
        raise ValueError("modules is empty. Name the modules on which A is to be one, as in ('v_proj',).")
    for module in modules:
        if not any(_ends(where, module) for where, _ in adapted):
            have = sorted({where.rpartition(".")[2] for where, _ in adapted})
            raise ValueError(f"None of {list(names)} has LoRA on a module named {module!r}. They have it on {have}.")
    return [(where, layer) for where, layer in adapted if any(_ends(where, module) for module in modules)]


def _ends(where: str, module: str) -> bool:
    return f".{where}".endswith(f".{module}")


def _check_layer(where: str, layer: LoraLayer, names: Sequence[str], tied: bool) -> None:
    """Refuse, by name, adapters that cannot have one A here."""
    for name in names:
        if why := _no_matrix(layer, name):
            raise _refused(names, where, *why)
    for name in names[1:]:
        if why := _unlike(layer, names[0], name, tied):
            raise _refused(names, where, *why)


def _unlike(layer: LoraLayer, first: str, other: str, tied: bool) -> tuple[str, str] | None:
    """Why the other one cannot have the first one's A, and the way out."""
    one, two = layer.lora_A[first].weight, layer.lora_A[other].weight
    if one.shape != two.shape:
        return _apart(first, list(one.shape), other, list(two.shape)), "Give them the same r there (see rank_pattern)"
    if one.dtype != two.dtype and (tied or torch.promote_types(one.dtype, two.dtype) != two.dtype):
        return _apart(
            first, one.dtype, other, two.dtype
        ), "Bring them to one dtype first"  # a rounded copy is another A
    if tied and one.device != two.device:
        return _apart(first, one.device, other, two.device), "Move one to the other"
    return None


def _apart(first: str, one: Any, other: str, two: Any) -> str:
    return f"A of {first!r} is {one}, that of {other!r} is {two}"


def _no_matrix(layer: LoraLayer, name: str) -> tuple[str, str] | None:
    """Why an adapter has no A here that can be replaced, and the way out."""
    if name in layer.merged_adapters:
        return f"adapter {name!r} is merged into the base weight", "Call unmerge_adapter() first"
    if isinstance(layer, ParamWrapper):
        return f"adapter {name!r} is of target_parameters", "Use target_modules"
    if name not in layer.lora_A and name not in layer.lora_embedding_A:
        return f"adapter {name!r} has no LoRA there", "Give all of them the same target_modules and layers"
    a = layer.lora_A[name] if name in layer.lora_A else layer.lora_embedding_A[name]
    if type(a) not in (nn.Linear, TiedA, FrozenA):
        return f"A of adapter {name!r} is a {type(a).__name__}, not an nn.Linear", "Leave this module out of modules"
    if a.weight.device.type == "meta":
        return f"the weights of adapter {name!r} are not in memory (device meta)", "Load them first"
    return None


def _refused(names: Sequence[str], where: str, reason: str, way_out: str) -> UnsupportedAdapterError:
    return UnsupportedAdapterError(f"{list(names)} cannot share an A at {where}: {reason}. {way_out}.")
