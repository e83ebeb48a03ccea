"""Intervals for means over questions, by drawing questions again and again."""

import random
from collections.abc import Sequence

__all__ = ["Interval", "interval"]

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
