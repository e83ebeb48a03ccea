"""Rows of CSVs, sorted out for tables and plots."""

from collections.abc import Iterable, Sequence

from .contenders import CONTENDERS
from .record import SETTINGS, Row, number
from .stats import percentiles

__all__ = ["Group", "contenders_of", "group_rows", "length_labels", "lengths_of", "median_of", "select_rows"]

Group = tuple[dict[str, str], list[Row]]
"""What rows agree on (``SETTINGS``), and the rows: only these are compared with each other."""


def group_rows(rows: Iterable[Row]) -> list[Group]:
    """Rows by what they must agree on to be compared."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[field] for field in SETTINGS), []).append(row)
    return [(dict(zip(SETTINGS, key, strict=True)), group) for key, group in groups.items()]


def contenders_of(rows: Sequence[Row]) -> list[str]:
    """Those that have rows, in the order of ``CONTENDERS``, then others."""
    there = dict.fromkeys(row["contender"] for row in rows)
    return [*(name for name in CONTENDERS if name in there), *(name for name in there if name not in CONTENDERS)]


def lengths_of(rows: Sequence[Row]) -> list[int]:
    """Total tokens, ascending."""
    return sorted({int(row["tokens"]) for row in rows})


def length_labels(lengths: Sequence[int]) -> list[str]:
    """1936 -> "1.9k", as the paper has it; in full where that would not tell lengths apart."""
    short = [f"{tokens / 1000:.1f}k" for tokens in lengths]
    return short if len(set(short)) == len(short) else [f"{tokens:,}" for tokens in lengths]


def select_rows(rows: Sequence[Row], contender: str, tokens: int, overlap: float | None = None) -> list[Row]:
    """Those of one contender at one length, and at one overlap if given."""
    found = [row for row in rows if row["contender"] == contender and int(row["tokens"]) == tokens]
    # Three caches of their own are measured once: they are the same at every overlap.
    if overlap is None or contender == "three_dynamic":
        return found
    return [row for row in found if float(row["overlap"]) == overlap]


def median_of(
    rows: Sequence[Row], contender: str, tokens: int, field: str, overlap: float | None = None
) -> float | None:
    """Median over repeats, ``None`` if there is nothing (not measured, or out of memory)."""
    found = select_rows(rows, contender, tokens, overlap)
    values = [value for row in found if (value := number(row, field)) is not None]
    return percentiles(values)[1] if values else None
