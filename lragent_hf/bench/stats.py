"""Percentiles of a few measurements."""

from statistics import quantiles

__all__ = ["percentiles"]


def percentiles(values: list[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    cuts = quantiles(values, n=10, method="inclusive")
    return cuts[1], cuts[4], cuts[7]
