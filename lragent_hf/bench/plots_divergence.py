"""The plot of ``fidelity``: KL against the hand-over window, and against length and hand-overs."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from .answers import label
from .plots import STYLES
from .record import Row

__all__ = ["draw_divergence"]


def draw_divergence(rows: Sequence[Row], out: Path) -> Iterator[Path]:
    """Draw to ``out`` (its ending is replaced by .png and .svg); yields the files.

    A panel for each set of adapters whose questions were run one by one: KL against the window. Below, one for each length:
    KL against the number of hand-overs.
    """
    sets = list(dict.fromkeys(_named(row) for row in rows if row["length"] == "0"))
    lengths = sorted({(int(row["length"]), _named(row)) for row in rows if row["length"] != "0"})
    lines = [line for line in (sets, lengths) if line]
    figure, panels = plt.subplots(
        len(lines), max(map(len, lines)), figsize=(2.9 * max(map(len, lines)) + 0.6, 2.7 * len(lines) + 0.5),
        squeeze=False, sharey="row", layout="constrained",
    )  # fmt: skip
    for axes in panels.flat:
        axes.set_axis_off()
    for axes, name in zip(panels[0], sets, strict=False):
        part = [row for row in rows if row["length"] == "0" and _named(row) == name]
        _panel(axes, part, "window", "handover_window, tokens", by_window=False)
        axes.set_title(name, fontsize=9, loc="left")
    for axes, (length, name) in zip(panels[-1] if lengths else (), lengths, strict=False):
        part = [row for row in rows if row["length"] == str(length) and _named(row) == name]
        _panel(axes, part, "handovers", "hand-overs", by_window=True)
        axes.set_title(f"{name}, {length:,} tokens", fontsize=9, loc="left")
    for line in panels:
        line[0].set_ylabel("KL, nats/token", fontsize=9)
        line[0].set_ylim(0, 1.05 * max(axes.dataLim.y1 for axes in line if axes.has_data()))
    found: dict[str, Any] = {}
    for axes in panels.flat:
        handles, names = axes.get_legend_handles_labels()
        found |= dict(zip(names, handles, strict=True))
    figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    for kind in ("png", "svg"):
        path = out.with_suffix(f".{kind}")
        figure.savefig(path, dpi=200)
        yield path
    plt.close(figure)


def _named(row: Row) -> str:
    return f"{row['adapters']}{', ' if row['options'] else ''}{row['options']}"


def _panel(axes: Any, rows: Sequence[Row], field: str, name: str, by_window: bool) -> None:
    """A line for each scheme (``by_window``: and window) over the values of ``field``."""
    axes.set_axis_on()
    ticks = sorted({int(row[field]) for row in rows})
    for scheme, window in dict.fromkeys((row["scheme"], row["window"] if by_window else "0") for row in rows):
        part = [
            row for row in rows if row["scheme"] == scheme and (not by_window or row["window"] == window)
        ]  # fmt: skip
        points = sorted((ticks.index(int(row[field])), float(row["kl"])) for row in part)
        colour, marker, dash = STYLES[scheme]
        axes.plot(
            *zip(*points, strict=True), color=colour, marker=marker, linestyle=":" if window != "0" else dash,
            markersize=5, linewidth=1.3, markerfacecolor="white" if window != "0" else colour, label=label(scheme, window),
        )  # fmt: skip
    axes.set_xticks(range(len(ticks)), [str(tick) for tick in ticks], fontsize=8)
    axes.set_xlabel(name, fontsize=9)
    axes.tick_params(axis="y", labelsize=8)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
