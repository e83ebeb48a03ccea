"""Which layers DroidSpeak should recompute for a user's own adapters."""

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from .audit import audit
from .binding import attach
from .cache import LoRASharedCache
from .schemes import SCHEMES
from .turns import AgentTrajectory

__all__ = ["droidspeak_layers"]

_AT_ONCE = 4  # caches in memory together


def droidspeak_layers(
    model: nn.Module, trajectories: Iterable[AgentTrajectory], fraction: float = 1 / 3
) -> tuple[int, ...]:
    """The layers that suffer most if an agent reuses another's K and V there and recomputes those of all others.

    That is how DroidSpeak chooses (Liu et al., NSDI 2026), and a third of the layers how many LRAgent takes (its appendix
    C.5); suffering is counted in KL to ``non_shared`` here, not in answers of a benchmark. Runs the trajectories 5/4 times
    a layer.

    Args:
        model: a ``PeftModel`` in eval mode with the adapters that the turns name.
        trajectories: as for ``audit``.
        fraction: of the layers, rounded; at least one.

    Returns:
        Layer indices, ascending, for ``LoRASharedCache(scheme="droidspeak", recompute_layers=...)``.

    Raises:
        ValueError: a fraction outside 0 to 1, a model of one layer, or what ``audit`` raises.
    """
    count = len(LoRASharedCache(model, "full_shared").layers)
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is a share of the model's layers, above 0 and up to 1, not {fraction}.")
    if count < 2:
        raise ValueError(f"{type(attach(model).decoder).__name__} has one layer, so there is nothing to choose.")
    trajectories = list(trajectories)
    loss: dict[int, float] = {}
    for first in range(0, count, _AT_ONCE):
        group = range(first, min(first + _AT_ONCE, count))
        schemes = [
            replace(SCHEMES["droidspeak"], recompute_layers=tuple(other for other in range(count) if other != layer))
            for layer in group
        ]
        rows = audit(model, trajectories, schemes, layers=False).rows
        loss.update(zip(group, (row.kl for row in rows), strict=True))
    worst = sorted(loss, key=lambda layer: loss[layer], reverse=True)
    return tuple(sorted(worst[: max(1, round(fraction * count))]))
