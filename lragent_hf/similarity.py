"""How much alike what agents cache of the same tokens is, layer by layer: LRAgent's tables 1, 2, 6 and 7 for your adapters.

Every agent runs all tokens itself, from the start, with nothing shared. They are rows of one batch, as PEFT's
``adapter_names=`` has it, and are compared while a layer's projections run: nothing of a layer outlives it.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, combinations
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from .adapters import tuner_layers, unsplittable
from .binding import ModelBinding, attach, detach
from .decoder import find_decoder
from .dora import check_no_dora
from .errors import UnsupportedAdapterError, UnsupportedModelError
from .layer import ATTRIBUTE
from .placement import device_of, weight_of
from .similarity_report import QUANTITIES, SimilarityReport, SimilarityRow
from .turns import AgentTrajectory, Unchanged, activate, check_model, check_trajectory

__all__ = ["layer_similarity"]

_AT_ONCE = 1024  # tokens compared in one step: what that takes (fp32, every agent's) does not grow with the trajectory


def layer_similarity(
    model: nn.Module, trajectories: Iterable[AgentTrajectory], agents: Sequence[str | None] | None = None
) -> SimilarityReport:
    """Compare what agents compute of the same tokens, layer by layer (paper, tables 1, 2, 6 and 7).

    Takes a forward a trajectory over a batch with a row an agent, without cache. Beyond that forward's own memory it needs
    that of 1,024 tokens of one layer.

    Args:
        model: with LoRA adapters, of a ``PeftModel`` or of transformers' own ``add_adapter``. In eval mode.
        trajectories: their tokens, up to where the last turn stops; all of them if there are no turns.
        agents: who is compared; ``None`` among them is the base model. Default: those that take turns.

    Returns:
        A ``SimilarityReport``. The model is left as it was.

    Raises:
        ValueError: fewer than two agents, no tokens, turns that do not fit theirs, an unknown adapter; a model in training
            mode, or with merged adapters.
        UnsupportedAdapterError: adapters that PEFT does not run as rows of one batch (DoRA, other kinds than LoRA), or that
            are not X A B on v_proj.
        UnsupportedModelError: no layer has a v_proj and a k_proj of its own.
        TypeError: PEFT's, for trainable copies of modules that it does not run row by row.
    """
    attached = ATTRIBUTE in find_decoder(model).__dict__
    binding = attach(model)
    try:
        trajectories = list(trajectories)
        check_model(binding.decoder)
        known = binding.adapters()
        for number, trajectory in enumerate(trajectories):
            check_trajectory(trajectory, number, known)
        if agents is None:
            agents = [agent for trajectory in trajectories for agent, _ in trajectory.turns]
        agents = list(dict.fromkeys(agents))
        if unknown := [agent for agent in agents if agent is not None and agent not in known]:
            raise ValueError(f"{unknown[0]!r} is no adapter of the model. Loaded: {known}.")
        if len(agents) < 2:
            raise ValueError(f"There are no two agents to compare, only {agents}.")
        _check_adapters(model, binding, [agent for agent in agents if agent is not None])
        return _compare(model, binding, trajectories, agents)
    finally:
        if not attached:
            detach(model)


@torch.no_grad()
def _compare(
    model: Any, binding: ModelBinding, trajectories: Sequence[AgentTrajectory], agents: Sequence[str | None]
) -> SimilarityReport:
    comparison, tokens = _Comparison(agents), 0
    with Unchanged(model), ExitStack() as hooks:
        activate(model, next(agent for agent in agents if agent is not None))  # nothing is disabled from here on
        for handle in chain(_mix(model, agents), comparison.watch(binding)):
            hooks.callback(handle.remove)
        for trajectory in trajectories:
            stop = trajectory.turns[-1][1] if trajectory.turns else len(trajectory.input_ids)
            ids = trajectory.input_ids[None, :stop].to(device_of(binding.decoder))
            if stop:
                model(input_ids=ids.expand(len(agents), -1), use_cache=False, logits_to_keep=1)
            tokens += stop
    if not tokens:
        raise ValueError("The trajectories have no tokens to compare agents on.")
    return SimilarityReport(tuple(comparison.rows()), tokens)


class _Comparison:
    """Cosines of all pairs of rows, summed over tokens, as the projections of each layer run."""

    def __init__(self, agents: Sequence[str | None]):
        self.agents = agents
        self.sums: dict[int, dict[tuple[int, int, str], list[float]]] = {}

    def watch(self, binding: ModelBinding) -> Iterator[Any]:
        """Hook v_proj, what is below its adapters, and k_proj of every layer; yields the handles."""
        for index, layer in binding.layers.items():
            self.sums[index] = {}
            v_proj: Any = layer.v.module
            base = v_proj.base_layer if isinstance(v_proj, LoraLayer) else v_proj
            # PEFT adds to what the base layer gave in place: it is compared while it is still that.
            yield base.register_forward_hook(partial(self._whole, index, layer.v.name, "base_cache"))
            yield v_proj.register_forward_hook(partial(self._whole, index, layer.v.name, "full_cache"))
            if isinstance(v_proj, LoraLayer):
                yield v_proj.register_forward_hook(partial(self._added, index))
            yield layer.k.module.register_forward_hook(partial(self._whole, index, layer.k.name, "keys"))

    def _whole(self, index: int, where: str, name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        if output.ndim != 3 or len(output) != len(self.agents):
            raise UnsupportedModelError(
                f"{where} gave {list(output.shape)} and not [{len(self.agents)}, tokens, features], a row an agent: what "
                "they cache cannot be compared here."
            )
        for part in output.split(_AT_ONCE, dim=1):
            self._add(index, name, list(part))

    def _added(self, index: int, v_proj: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        """What the adapters do: X A, and s (X A) B."""
        for part in args[0].split(_AT_ONCE, dim=1):
            found = [_parts(v_proj, agent, x) for agent, x in zip(self.agents, part, strict=True)]
            self._add(index, "lr_cache", [lr for lr, _ in found])
            self._add(index, "adapter_output", [output for _, output in found])

    def _add(self, index: int, name: str, rows: Sequence[Tensor | None]) -> None:
        """Count the cosines of these tokens; ``rows``: [tokens, features] of each agent that has some."""
        directions = [None if row is None else _direction(row) for row in rows]
        for i, j in combinations(range(len(rows)), 2):
            left, right = directions[i], directions[j]
            if left is None or right is None or left.shape != right.shape:
                continue
            both = left.any(-1) & right.any(-1)
            cosine = (left * right).sum(-1).clamp(-1, 1)
            sums = self.sums[index].setdefault((i, j, name), [0.0, 0.0])
            sums[0] += float(cosine.sum())
            sums[1] += int(both.sum())

    def rows(self) -> Iterator[SimilarityRow]:
        """The means, of the layers that ran (some models have layers that read K and V of another)."""
        for index in sorted(index for index, sums in self.sums.items() if sums):
            sums = self.sums[index]
            for i, j in combinations(range(len(self.agents)), 2):
                found = {name: sums.get((i, j, name), (0.0, 0.0)) for name in QUANTITIES}
                means = {name: total / count if count else None for name, (total, count) in found.items()}
                yield SimilarityRow(index, (self.agents[i], self.agents[j]), **means)


def _parts(v_proj: Any, agent: str | None, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """X A [tokens, rank] and s (X A) B [tokens, features] as PEFT computes them, if the agent has LoRA there."""
    if agent is None or agent not in v_proj.lora_A:
        return None, None
    a, b = v_proj.lora_A[agent], v_proj.lora_B[agent]
    down, up = weight_of(a), weight_of(b)
    assert down is not None
    assert up is not None
    lr = F.linear(x.to(down), down)
    return lr, F.linear(lr, up, weight_of(b, "bias")) * v_proj.scaling[agent]


def _direction(row: Tensor) -> Tensor:
    """Each token's vector at length one, in fp32 or better; a zero vector stays one."""
    row = row.to(torch.promote_types(row.dtype, torch.float32))
    norm = torch.linalg.vector_norm(row, dim=-1, keepdim=True)
    return row / torch.where(norm > 0, norm, torch.ones_like(norm))


def _mix(model: nn.Module, agents: Sequence[str | None]) -> Iterator[Any]:
    """Let each row of the batch run with its agent's adapter, as PEFT's ``adapter_names=`` does; yields the handles.

    The names go to the adapted layers themselves, which adapters of transformers' own ``add_adapter`` have too.
    """
    names = ["__base__" if agent is None else agent for agent in agents]
    for module in model.modules():
        if isinstance(module, LoraLayer | AuxiliaryTrainingWrapper):
            yield module.register_forward_pre_hook(partial(_hand, adapter_names=names), with_kwargs=True)


def _hand(module: nn.Module, args: Any, kwargs: dict[str, Any], adapter_names: list[str]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs | {"adapter_names": adapter_names}


def _check_adapters(model: nn.Module, binding: ModelBinding, adapters: Sequence[str]) -> None:
    """Raise unless rows of one batch can run these adapters, and v_proj of every layer is X W0 + s (X A) B."""
    if not binding.layers:
        raise UnsupportedModelError(
            f"{type(binding.decoder).__name__} has no attention module with k_proj, v_proj and layer_idx (a fused qkv "
            "projection, most likely), so there are no values of adapters to compare."
        )
    for name, _, _, layer in tuner_layers(model):
        if any(isinstance(part, BaseTunerLayer) and not isinstance(part, LoraLayer) for part in layer.modules()):
            raise UnsupportedAdapterError(
                f"{name} has adapters of another kind than LoRA, which PEFT does not run row by row in one batch."
            )
        check_no_dora(name, layer, tuple(adapters))
    for name, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            lacking = [adapter for adapter in adapters if adapter not in module._get_available_adapters()]
            if lacking:
                raise UnsupportedAdapterError(
                    f"{name} is trained for some adapters and not for {lacking[0]!r}, which PEFT does not run in one batch."
                )
    for layer in binding.layers.values():
        if why := unsplittable(layer.v.module, adapters):
            raise UnsupportedAdapterError(f"Agents cannot be compared at {layer.v.name}: {why[0]}.")
