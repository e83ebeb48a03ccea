"""What sharing changes, measured on the user's own adapters and trajectories.

Every scheme runs the same tokens with the same turns; what its agents predict is compared with what they predict when each
has read everything itself (``non_shared``, exact). What each would cache then is compared too, layer by layer
(``similarity``). The paper's numbers are of its adapters; these are of yours.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ._compat import CACHE_ARG
from .binding import attach
from .cache import LoRASharedCache
from .errors import LRAgentError
from .fidelity import Audit, Fidelity
from .placement import device_of
from .schemes import Scheme, resolve_scheme
from .similarity import layer_similarity
from .similarity_report import SimilarityReport
from .turns import AgentTrajectory, Unchanged, activate, check_model, check_trajectory

__all__ = ["audit"]


def audit(
    model: nn.Module,
    trajectories: Iterable[AgentTrajectory],
    schemes: Sequence[str | Scheme] = ("full_shared", "base_shared", "base_lr_shared", "base_lr_stacked"),
    windows: Sequence[int] = (0,),
    *,
    reference: str | Scheme = "non_shared",
    layers: bool = True,
    **options: Any,
) -> Audit:
    """Compare schemes with a reference, and what agents would cache, on these trajectories.

    All schemes run in step, a turn at a time, so their caches are in memory together; logits are kept for one turn.

    Args:
        model: a ``PeftModel`` with the adapters that the turns name.
        trajectories: a few are enough to choose by; the more like real ones the better.
        schemes: names, or ``Scheme`` objects.
        windows: values of ``handover_window``, for the schemes that take one (0 for the others).
        reference: the scheme that the others are compared with, without a window.
        layers: also compare what the agents cache of each layer (``layer_similarity``): one more forward a trajectory,
            with all agents in one batch.
        options: of ``LoRASharedCache``, for every scheme, the reference included: ``key_lr=False``, say.

    Returns:
        An ``Audit``. A scheme that refuses these adapters (``base_lr_shared`` without a shared A) is in ``refused``; why
        layers were not compared is in ``layers_refused``.

    Raises:
        ValueError: turns that do not fit their tokens, an unknown adapter, or not one token after a hand-over; a model in
            training mode, or with merged adapters.
        LRAgentError: the reference refuses these adapters.
    """
    binding = attach(model)
    check_model(binding.decoder)
    wanted = [resolve_scheme(scheme) for scheme in schemes]
    reference = resolve_scheme(reference)
    own = {name: value for name, value in options.items() if name != "hidden_cache" or reference.recompute_layers}
    LoRASharedCache(model, reference, **own)  # to fail now rather than at the first trajectory
    cases: list[tuple[Scheme, int]] = []
    refused: dict[str, str] = {}
    for scheme in wanted:
        for window in dict.fromkeys(windows) if scheme.takes_window else (0,):
            try:
                LoRASharedCache(model, scheme, handover_window=window, **options)
                cases.append((scheme, window))
            except LRAgentError as error:
                refused[scheme.name] = _line(error)
    sums = [_Sums() for _ in cases]
    known = binding.adapters()
    trajectories = list(trajectories)
    for number, trajectory in enumerate(trajectories):
        check_trajectory(trajectory, number, known)
        reference_cache = LoRASharedCache(model, reference, **own)
        caches = [LoRASharedCache(model, scheme, handover_window=window, **options) for scheme, window in cases]
        with Unchanged(model):
            _run(model, trajectory, reference_cache, caches, sums)
        for one, cache in zip(sums, caches, strict=True):
            one.end_trajectory(cache.memory_report().in_use_bytes)
    if cases and not sums[0].tokens:
        raise ValueError(
            "No trajectory has a turn after the first with tokens to compare: there is no hand-over to audit."
        )
    rows = tuple(one.row(scheme.name, window) for (scheme, window), one in zip(cases, sums, strict=True))
    similarity, why = _layers(model, trajectories) if layers else (None, None)
    return Audit(rows, refused, reference.name, similarity, why)


def _layers(model: nn.Module, trajectories: Sequence[AgentTrajectory]) -> tuple[SimilarityReport | None, str | None]:
    """The comparison of layers, or why there is none: what schemes cost is known by now, and not to be lost with it."""
    try:
        return layer_similarity(model, trajectories), None
    except (ValueError, TypeError, RuntimeError) as error:  # ours, PEFT's on adapters it does not mix, out of memory
        return None, _line(error)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


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
    by_trajectory: list[tuple[float, int]] = field(default_factory=list)

    def end_trajectory(self, in_use_bytes: int) -> None:
        """What was added since the last call is one trajectory's."""
        kl, tokens = (
            (sum(values) for values in zip(*self.by_trajectory, strict=True)) if self.by_trajectory else (0.0, 0)
        )
        self.by_trajectory.append((self.kl - kl, int(self.tokens - tokens)))
        self.cache_bytes.append(in_use_bytes)

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
            tuple(total / count if count else float("nan") for total, count in self.by_turn),
            tuple(self.by_trajectory),
        )  # fmt: skip


@torch.no_grad()  # in inference mode accelerate would leave offloaded parameters that nothing can train
def _run(
    model: Any,
    trajectory: AgentTrajectory,
    reference: LoRASharedCache,
    caches: list[LoRASharedCache],
    sums: list[_Sums],
) -> None:
    ids = trajectory.input_ids.to(device_of(attach(model).decoder))[None]
    start = 0
    for turn, (agent, stop) in enumerate(trajectory.turns):
        activate(model, agent)
        count = stop - start
        want, _ = _turn(model, reference, ids[:, :stop], count if turn else 1)
        following = ids[0, start + 1 : stop + 1]
        chosen = None
        if trajectory.written is not None:  # the first token of a turn was predicted by whoever had the turn before
            chosen = trajectory.written[start + 1 : stop].to(ids.device)
            following = following[: count - 1][chosen]
        for one, cache in zip(sums, caches, strict=True):
            got, ran = _turn(model, cache, ids[:, :stop], count if turn else 1)
            one.prefilled += ran
            if turn:
                sides = (want, got) if chosen is None else (want[:-1][chosen], got[:-1][chosen])
                one.add(turn - 1, *sides, following)
        start = stop


def _turn(model: Any, cache: LoRASharedCache, ids: Tensor, keep: int) -> tuple[Tensor, int]:
    """Run what the active agent has yet to read; logits [keep, V] of its last tokens, and how many it ran."""
    past = cache.get_seq_length()
    logits: Tensor = model(input_ids=ids[:, past:], logits_to_keep=keep, **{CACHE_ARG: cache}).logits
    return logits[0, -keep:], ids.shape[1] - past
