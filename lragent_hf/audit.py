"""What sharing changes, measured on the user's own adapters and trajectories.

Every scheme runs the same tokens with the same turns; what its agents predict is compared with what they predict when each
has read everything itself (``non_shared``, exact). The paper's numbers are of its adapters; these are of yours.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftMixedModel, PeftModel
from torch import Tensor, nn

from ._compat import CACHE_ARG
from .adapters import tuner_layers
from .binding import attach
from .cache import LoRASharedCache
from .errors import LRAgentError
from .fidelity import Audit, Fidelity
from .schemes import SCHEMES, Scheme, resolve_scheme

__all__ = ["AgentTrajectory", "audit"]


@dataclass(frozen=True)
class AgentTrajectory:
    """Tokens, and who runs them.

    Attributes:
        input_ids: [L], integers.
        turns: (agent, stop) in order: that adapter runs the tokens from where the last turn stopped up to ``stop``.
            ``None`` is the base model. What it predicts is compared at every one of these tokens.
    """

    input_ids: Tensor
    turns: Sequence[tuple[str | None, int]]


def audit(
    model: nn.Module,
    trajectories: Iterable[AgentTrajectory],
    schemes: Sequence[str | Scheme] = ("full_shared", "base_shared", "base_lr_shared", "base_lr_stacked"),
    windows: Sequence[int] = (0,),
    **options: Any,
) -> Audit:
    """Compare schemes with ``non_shared`` on these trajectories.

    All of them run in step, a turn at a time, so their caches are in memory together; logits are kept for one turn.

    Args:
        model: a ``PeftModel`` with the adapters that the turns name.
        trajectories: a few are enough to choose by; the more like real ones the better.
        schemes: names, or ``Scheme`` objects.
        windows: values of ``handover_window``, for the schemes that take one (0 for the others).
        options: of ``LoRASharedCache``, for every scheme: ``key_lr=False``, say.

    Returns:
        An ``Audit``. A scheme that refuses these adapters (``base_lr_shared`` without a shared A) is in ``refused``.

    Raises:
        ValueError: turns that do not fit their tokens, an unknown adapter, or not one token after a hand-over; a model in
            training mode, or with merged adapters.
    """
    binding = attach(model)
    if any(module.training for module in binding.decoder.modules()):
        raise ValueError("The model is in training mode, and dropout is noise to what is compared. Call model.eval().")
    if any(getattr(layer, "merged", False) for _, _, _, layer in tuner_layers(binding.decoder)):
        raise ValueError("An adapter is merged, and switching agents would unmerge it. Call unmerge_adapter() first.")
    wanted = [resolve_scheme(scheme) for scheme in schemes]
    cases: list[tuple[Scheme, int]] = []
    refused: dict[str, str] = {}
    for scheme in wanted:
        for window in dict.fromkeys(windows) if scheme.takes_window else (0,):
            try:
                LoRASharedCache(model, scheme, handover_window=window, **options)
                cases.append((scheme, window))
            except LRAgentError as error:
                refused[scheme.name] = " ".join(str(error).split())
    sums = [_Sums() for _ in cases]
    known = binding.adapters()
    for number, trajectory in enumerate(trajectories):
        _check(trajectory, number, known)
        reference = LoRASharedCache(model, SCHEMES["non_shared"])
        caches = [LoRASharedCache(model, scheme, handover_window=window, **options) for scheme, window in cases]
        with _Unchanged(model):
            _run(model, trajectory, reference, caches, sums)
        for one, cache in zip(sums, caches, strict=True):
            one.cache_bytes.append(cache.memory_report().in_use_bytes)
    if cases and not sums[0].tokens:
        raise ValueError("No trajectory has a turn after the first: there is no hand-over to audit.")
    rows = tuple(one.row(scheme.name, window) for (scheme, window), one in zip(cases, sums, strict=True))
    return Audit(rows, refused)


@dataclass
class _Sums:
    tokens: int = 0
    kl: float = 0.0
    same: int = 0
    targets: int = 0
    nll: float = 0.0
    reference_nll: float = 0.0
    prefilled: int = 0
    cache_bytes: list[int] = field(default_factory=list)
    by_turn: list[list[float]] = field(default_factory=list)

    def add(self, turn: int, want: Tensor, got: Tensor, following: Tensor) -> None:
        """``want`` and ``got``: logits [n, V]; ``following``: the tokens after them, one less at the very end."""
        p, q = (logits.float().log_softmax(-1) for logits in (want, got))
        kl = float((p.exp() * (p - q)).sum(-1).clamp(min=0).sum())
        self.kl += kl
        self.tokens += len(got)
        self.same += int((p.argmax(-1) == q.argmax(-1)).sum())
        count = len(following)
        self.targets += count
        self.nll -= float(q[:count].gather(1, following[:, None]).sum())
        self.reference_nll -= float(p[:count].gather(1, following[:, None]).sum())
        while len(self.by_turn) <= turn:
            self.by_turn.append([0.0, 0.0])
        self.by_turn[turn][0] += kl
        self.by_turn[turn][1] += len(got)

    def row(self, scheme: str, window: int) -> Fidelity:
        targets = max(1, self.targets)
        return Fidelity(
            scheme, window, self.tokens, self.kl / self.tokens, self.same / self.tokens, self.nll / targets,
            self.reference_nll / targets, self.prefilled, sum(self.cache_bytes) / len(self.cache_bytes),
            tuple(total / count for total, count in self.by_turn),
        )  # fmt: skip


def _check(trajectory: AgentTrajectory, number: int, known: Sequence[str]) -> None:
    length, stop = len(trajectory.input_ids), 0
    if trajectory.input_ids.ndim != 1 or trajectory.input_ids.is_floating_point():
        shape = list(trajectory.input_ids.shape)
        raise ValueError(f"Trajectory {number}: input_ids are integers [L], got {trajectory.input_ids.dtype} {shape}.")
    for agent, end in trajectory.turns:
        if not stop < end <= length:
            raise ValueError(
                f"Trajectory {number}: a turn ends at {end}, after one that ends at {stop}, and there are {length} tokens: "
                "turns are (agent, stop) with growing stops."
            )
        if agent is not None and agent not in known:
            raise ValueError(f"Trajectory {number}: {agent!r} is no adapter of the model. Loaded: {list(known)}.")
        stop = end


@torch.inference_mode()
def _run(
    model: Any,
    trajectory: AgentTrajectory,
    reference: LoRASharedCache,
    caches: list[LoRASharedCache],
    sums: list[_Sums],
) -> None:
    ids = trajectory.input_ids.to(attach(model).decoder.device)[None]
    start = 0
    for turn, (agent, stop) in enumerate(trajectory.turns):
        _activate(model, agent)
        count = stop - start
        want, _ = _turn(model, reference, ids[:, :stop], count if turn else 1)
        following = ids[0, start + 1 : stop + 1]
        for one, cache in zip(sums, caches, strict=True):
            got, ran = _turn(model, cache, ids[:, :stop], count if turn else 1)
            one.prefilled += ran
            if turn:
                one.add(turn - 1, want, got, following)
        start = stop


def _turn(model: Any, cache: LoRASharedCache, ids: Tensor, keep: int) -> tuple[Tensor, int]:
    """Run what the active agent has yet to read; logits [keep, V] of its last tokens, and how many it ran."""
    past = cache.get_seq_length()
    logits: Tensor = model(input_ids=ids[:, past:], logits_to_keep=keep, **{CACHE_ARG: cache}).logits
    return logits[0, -keep:], ids.shape[1] - past


class _Unchanged:
    """Leaves who is active, what is disabled and what is trainable as it was."""

    def __init__(self, model: Any):
        self.model, self.decoder = model, attach(model).decoder

    def __enter__(self) -> None:
        self.active = self.model.base_model.active_adapters if _is_peft(self.model) else None
        layers = [layer for _, _, _, layer in tuner_layers(self.decoder)]
        self.layers = [(layer, list(layer.active_adapters), layer.disable_adapters) for layer in layers]
        self.trained = [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]

    def __exit__(self, *error: Any) -> None:
        if self.active:
            self.model.base_model.set_adapter(self.active)
        for layer, names, disabled in self.layers:
            layer.set_adapter(names)
            layer.enable_adapters(not disabled)
        for parameter, trained in self.trained:
            parameter.requires_grad_(trained)


def _is_peft(model: Any) -> bool:
    return isinstance(model, PeftModel | PeftMixedModel)


def _activate(model: Any, agent: Any) -> None:
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
