"""The plot of ``accuracy``: exact match and F1 of every scheme with their intervals, a column of panels a level."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from .answers import by_case, label
from .bootstrap import interval, share
from .record import Row

__all__ = ["draw_answers"]

_MEASURES = (("exact_match", "exact match, %", "o", "#000000"), ("f1", "F1, %", "D", "#0072B2"))


def draw_answers(rows: Sequence[Row], out: Path) -> Iterator[Path]:
    """Draw to ``out`` (its ending is replaced by .png and .svg); yields the files."""
    sets = list(dict.fromkeys(row["adapters"] for row in rows))
    levels = list(dict.fromkeys(row["level"] for row in rows))
    cases = list(by_case(rows))
    figure, panels = plt.subplots(
        len(sets), len(levels), figsize=(3.1 * len(levels) + 1.6, 0.34 * len(cases) * len(sets) + 1.4), squeeze=False,
        sharex=True, sharey=True, layout="constrained",
    )  # fmt: skip
    for line, name in zip(panels, sets, strict=True):
        for axes, level in zip(line, levels, strict=True):
            part = [row for row in rows if row["adapters"] == name and row["level"] == level]
            _panel(axes, part, cases)
            count = len({row["question"] for row in part})
            axes.set_title(f"{name}, {level or 'all'} ({count} questions)", fontsize=9, loc="left")
    for axes in panels[-1]:
        axes.set_xlabel("%, with 95 % interval", fontsize=9)
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper right", ncols=2, frameon=False, fontsize=9)
    out.parent.mkdir(parents=True, exist_ok=True)
    for kind in ("png", "svg"):
        path = out.with_suffix(f".{kind}")
        figure.savefig(path, dpi=200)
        yield path
    plt.close(figure)


def _panel(axes: Any, rows: Sequence[Row], cases: Sequence[tuple[str, str]]) -> None:
    for shift, (field, name, marker, colour) in zip((-0.13, 0.13), _MEASURES, strict=True):
        for place, (scheme, window) in enumerate(cases):
            values = [float(row[field]) for row in rows if (row["scheme"], row["window"]) == (scheme, window)]
            if values:
                mean, low, high = (100 * value for value in (share if field == "exact_match" else interval)(values))
                axes.errorbar(
                    mean, place + shift, xerr=[[mean - low], [high - mean]], fmt=marker, color=colour, markersize=4.5,
                    capsize=2, linewidth=1.2, label=name if not place else None,
                )  # fmt: skip
    axes.set_yticks(range(len(cases)), [label(*case) for case in cases], fontsize=8)
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
