"""95 % intervals for means over questions and ratios over trajectories."""

import random
from collections.abc import Sequence
from math import sqrt

__all__ = ["Interval", "interval", "ratio_interval", "share"]

Interval = tuple[float, float, float]
"""Mean, and the ends of its 95 % interval."""


def interval(values: Sequence[float], draws: int = 2000, seed: int = 0) -> Interval:
    """Mean and percentile bootstrap interval.

    Args:
        values: one a question. For the difference of two schemes give the differences, question by question: what is hard
            for both then does not blur it.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("There is nothing to take a mean of.")
    draw, count = random.Random(seed), len(values)
    means = sorted(sum(draw.choices(values, k=count)) / count for _ in range(draws))
    return sum(values) / count, means[int(0.025 * draws)], means[int(0.975 * draws) - 1]


def share(values: Sequence[float]) -> Interval:
    """Mean of values that are 0 or 1, with Wilson's interval: drawing again finds no spread in 0 of 100."""
    if not values:
        raise ValueError("There is nothing to take a mean of.")
    count, mean, z = len(values), sum(values) / len(values), 1.96
    middle = (mean + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * sqrt(mean * (1 - mean) / count + z * z / (4 * count * count))
    return mean, max(0.0, middle - half), min(1.0, middle + half)


def ratio_interval(
    over: Sequence[tuple[float, int]], under: Sequence[tuple[float, int]], draws: int = 2000, seed: int = 0
) -> Interval:
    """Ratio of two means over tokens, by drawing trajectories again: (sum, tokens) of each of the same trajectories."""
    draw, count = random.Random(seed), len(over)
    ratios = []
    for _ in range(draws):
        chosen = draw.choices(range(count), k=count)
        ratios.append(_ratio([over[i] for i in chosen], [under[i] for i in chosen]))
    ratios.sort()
    return _ratio(over, under), ratios[int(0.025 * draws)], ratios[int(0.975 * draws) - 1]


def _ratio(over: Sequence[tuple[float, int]], under: Sequence[tuple[float, int]]) -> float:
    (above, many), (below, few) = (tuple(map(sum, zip(*side, strict=True))) for side in (over, under))
    return (above / many) / (below / few) if below else float("nan")
