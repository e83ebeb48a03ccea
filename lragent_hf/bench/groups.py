"""Rows of CSVs, sorted out for tables and plots."""

from collections.abc import Iterable, Sequence

from .contenders import CONTENDERS
from .record import AGREE, Row, number
from .stats import percentiles

__all__ = [
    "Group", "contenders_of", "group_rows", "length_labels", "lengths_of", "median_of", "ratio_of", "select_rows",
]  # fmt: skip

Group = tuple[dict[str, str], list[Row]]
"""What rows agree on (``AGREE``), and the rows: only these are compared with each other."""


def group_rows(rows: Iterable[Row]) -> list[Group]:
    """Rows by what they must agree on to be compared."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[field] for field in AGREE), []).append(row)
    return [(dict(zip(AGREE, key, strict=True)), group) for key, group in groups.items()]


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


def ratio_of(over: Sequence[Row], under: Sequence[Row], field: str) -> float | None:
    """Median of the ratios within each repeat, whose two sides met the same machine; ``None`` if there are none.

    A side that was measured once stands for all repeats of the other.
    """
    sides = [{row["repeat"]: value for row in rows if (value := number(row, field))} for rows in (over, under)]
    if not all(sides):
        return None
    left, right = ({key: side.get(key) for key in (*sides[0], *sides[1])} for side in sides)
    lone = [next(iter(side.values())) if len(side) == 1 else None for side in sides]
    pairs = [(left[key] or lone[0], right[key] or lone[1]) for key in left]
    ratios = [a / b for a, b in pairs if a and b]
    return percentiles(ratios)[1] if ratios else None
