"""Tokens, who runs them, and switching agents on a model that is to be left as it was."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftMixedModel, PeftModel
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from .adapters import tuner_layers

__all__ = ["AgentTrajectory", "Unchanged", "activate", "check_model", "check_trajectory"]


@dataclass(frozen=True)
class AgentTrajectory:
    """Tokens, and who runs them.

    Attributes:
        input_ids: [L], integers.
        turns: (agent, stop) in order: that adapter runs the tokens from where the last turn stopped up to ``stop``.
            ``None`` is the base model.
        written: [L], bool: tokens that the agent of their turn wrote. What it predicted for these is compared, in place of
            what it predicts after every token of its turn (``None``), whoever wrote the next one.
    """

    input_ids: Tensor
    turns: Sequence[tuple[str | None, int]]
    written: Tensor | None = None


def check_model(decoder: nn.Module) -> None:
    """Raise ValueError if what a model computes is random, or would change by switching agents."""
    if any(module.training for module in decoder.modules()):
        raise ValueError("The model is in training mode, and dropout is noise to what is compared. Call model.eval().")
    if any(getattr(layer, "merged", False) for _, _, _, layer in tuner_layers(decoder)):
        raise ValueError("An adapter is merged, and switching agents would unmerge it. Call unmerge_adapter() first.")


def check_trajectory(trajectory: AgentTrajectory, number: int, known: Sequence[str]) -> None:
    """Raise ValueError if its turns do not fit its tokens, or name an adapter that is not ``known``."""
    length, stop = len(trajectory.input_ids), 0
    if trajectory.input_ids.ndim != 1 or trajectory.input_ids.is_floating_point():
        shape = list(trajectory.input_ids.shape)
        raise ValueError(f"Trajectory {number}: input_ids are integers [L], got {trajectory.input_ids.dtype} {shape}.")
    written = trajectory.written
    if written is not None and (written.shape != trajectory.input_ids.shape or written.dtype != torch.bool):
        raise ValueError(
            f"Trajectory {number}: written is bool [{length}], as long as input_ids, "
            f"got {written.dtype} {list(written.shape)}."
        )
    for agent, end in trajectory.turns:
        if not stop < end <= length:
            raise ValueError(
                f"Trajectory {number}: a turn ends at {end}, after one that ends at {stop}, and there are {length} tokens: "
                "turns are (agent, stop) with growing stops."
            )
        if agent is not None and agent not in known:
            raise ValueError(f"Trajectory {number}: {agent!r} is no adapter of the model. Loaded: {list(known)}.")
        stop = end


def activate(model: Any, agent: Any) -> None:
    """Switch to an adapter, several, or (``None``) the base model."""
    if _is_peft(model):
        if agent is None:
            model.base_model.disable_adapter_layers()
            return
        model.base_model.enable_adapter_layers()
        model.base_model.set_adapter(agent)
    elif agent is None:
        model.disable_adapters()
    else:
        model.enable_adapters()
        model.set_adapter(agent)


class Unchanged:
    """Leaves who is active, what is disabled and what is trainable as it was."""

    def __init__(self, model: Any):
        self.model = model

    def __enter__(self) -> None:
        self.active = self.model.base_model.active_adapters if _is_peft(self.model) else None
        wrappers = [module for module in self.model.modules() if isinstance(module, AuxiliaryTrainingWrapper)]
        layers: list[Any] = [layer for _, _, _, layer in tuner_layers(self.model)] + wrappers
        self.layers = [(layer, list(layer.active_adapters), layer.disable_adapters) for layer in layers]
        # By name: offloaded parameters are made anew in every forward.
        self.trained = {name: parameter.requires_grad for name, parameter in self.model.named_parameters()}

    def __exit__(self, *error: Any) -> None:
        if self.active:
            self.model.base_model.set_adapter(self.active)
        for layer, names, disabled in self.layers:
            layer.set_adapter(names)
            layer.enable_adapters(not disabled)
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad != self.trained[name]:
                parameter.requires_grad_(self.trained[name])


def _is_peft(model: Any) -> bool:
    return isinstance(model, PeftModel | PeftMixedModel)
