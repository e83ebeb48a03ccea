"""Plots of measurements. Every contender has a colour, a marker and a dash of its own: print without colour works too."""

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from .groups import Group, contenders_of, length_labels, lengths_of
from .record import Row, number
from .stats import percentiles

__all__ = ["STYLES", "draw"]

# Okabe and Ito's colours, which colour-blind readers tell apart.
STYLES: dict[str, tuple[str, str, Any]] = {
    "three_dynamic": ("#000000", "o", "-"),
    "one_dynamic": ("#7f7f7f", "X", (0, (1, 1))),
    "non_shared": ("#D55E00", "s", "--"),
    "full_shared": ("#E69F00", "^", (0, (5, 1, 1, 1))),
    "droidspeak": ("#CC79A7", "P", (0, (3, 1, 1, 1, 1, 1))),
    "base_shared": ("#56B4E9", "D", (0, (4, 2))),
    "base_lr_shared": ("#009E73", "v", "-."),
    "base_lr_stacked": ("#0072B2", "*", "-"),
    "base_lr_shared_value_copy": ("#8C564B", "h", (0, (6, 2, 1, 2))),
}
_OTHER = ("#5B5B9E", "p", ":")
_LOOK: Any = {
    "font.size": 10, "axes.labelsize": 10, "xtick.labelsize": 9, "ytick.labelsize": 9, "legend.fontsize": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#dddddd",
    "grid.linewidth": 0.6, "svg.fonttype": "none", "figure.dpi": 200,
}  # fmt: skip

Point = tuple[float, float, float, float]
"""x, and p20, p50 and p80 of y."""


def draw(groups: Sequence[Group], out: Path) -> Iterator[Path]:
    """Draw what each group has to show; yields the files written, PNG and SVG."""
    taken: dict[str, int] = {}
    for same, rows in groups:
        for name, figure in _figures(same, rows):
            stem = f"{same['benchmark']}_{same['model'].strip('/').rpartition('/')[2]}_{name}"
            taken[stem] = taken.get(stem, 0) + 1
            stem += f"_{taken[stem]}" if taken[stem] > 1 else ""
            for kind in ("png", "svg"):
                path = out / f"{stem}.{kind}"
                figure.savefig(path, bbox_inches="tight")
                yield path
            plt.close(figure)


def _figures(same: dict[str, str], rows: Sequence[Row]) -> Iterator[tuple[str, Any]]:
    title = f"{same['model']}, {same['dtype']}, {same['device_name']}"
    with mpl.rc_context(_LOOK):
        if same["benchmark"] == "trace":
            for field, label, unit in (
                ("tokens_per_second", "tokens/s, end to end", 1.0),
                ("ttft_s", "prefill, s (sum over 17 turns)", 1.0),
                ("in_use_bytes", "cache in use, GiB", 1 << 30),
            ):
                lines = _lines(rows, field, unit, lambda row: float(row["tokens"]))
                if lines:
                    yield field, _by_length(lines, label, title, log_y=field != "tokens_per_second")
        elif same["benchmark"] == "overlap":
            for tokens in lengths_of(rows):
                at = [row for row in rows if int(row["tokens"]) == tokens]
                lines = _lines(at, "tokens_per_second", 1.0, lambda row: 100 * float(row["overlap"]))
                if lines:
                    yield f"speed_{tokens}", _by_overlap(lines, f"{title}, {tokens:,} tokens")
        elif same["benchmark"] == "memory":
            yield "cache", _memory(rows, f"{same['model']}, {same['dtype']}, rank {same['rank']}")


def _lines(rows: Sequence[Row], field: str, unit: float, x_of: Callable[[Row], float]) -> dict[str, list[Point]]:
    values: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        value = number(row, field)
        if value is not None:
            values.setdefault(row["contender"], {}).setdefault(x_of(row), []).append(value / unit)
    return {
        name: sorted((x, *percentiles(group)) for x, group in values[name].items())
        for name in contenders_of(rows)
        if name in values
    }


def _by_length(lines: dict[str, list[Point]], label: str, title: str, *, log_y: bool) -> Any:
    figure, axes = plt.subplots(figsize=(5.6, 3.6))
    _draw_lines(axes, lines)
    if log_y:
        _log_y(axes)
    else:
        axes.set_ylim(bottom=0)
    _lengths_on_x(axes, lines)
    axes.set_ylabel(label)
    axes.set_title(title, fontsize=10, loc="left")
    _legend(axes)
    return figure


def _by_overlap(lines: dict[str, list[Point]], title: str) -> Any:
    figure, axes = plt.subplots(figsize=(5.6, 3.6))
    shares = sorted({point[0] for points in lines.values() for point in points})
    own = lines.get("three_dynamic", [])
    if len(own) == 1:  # the same at every overlap, so measured at one
        lines["three_dynamic"] = [(share, *own[0][1:]) for share in shares]
    _draw_lines(axes, lines)
    axes.set(xlabel="context in common, %", ylabel="tokens/s, end to end", xticks=shares)
    axes.set_ylim(bottom=0)
    axes.invert_xaxis()
    axes.set_title(title, fontsize=10, loc="left")
    _legend(axes)
    return figure


def _memory(rows: Sequence[Row], title: str) -> Any:
    """Left: the cache. Right: what it takes beyond full_shared's, where most lines on the left coincide."""
    lines = _lines(rows, "in_use_bytes", 1 << 30, lambda row: float(row["tokens"]))
    predicted = {(row["contender"], float(row["tokens"])) for row in rows if row["status"] == "predicted"}
    full = {x: middle for x, _, middle, _ in lines.get("full_shared", [])}
    more = {
        name: [(x, *_beyond(full[x], *ys)) for x, *ys in points if x in full]
        for name, points in lines.items()
        if name != "full_shared"
    }
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.6), gridspec_kw={"wspace": 0.28})
    for axes, here in ((left, lines), (right, {name: points for name, points in more.items() if points})):
        if here:
            _draw_lines(axes, here, predicted)
            _log_y(axes)
            _lengths_on_x(axes, here)
    left.set_ylabel("cache, GiB")
    right.set_ylabel("beyond full_shared, %")
    left.set_title(title, fontsize=10, loc="left")
    if predicted:
        right.set_title("hollow: predicted", fontsize=10, loc="right")
    handles, names = left.get_legend_handles_labels()
    right.legend(handles, names, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, handlelength=3.5)
    return figure


def _beyond(full: float, low: float, middle: float, high: float) -> tuple[float, float, float]:
    """Percent more than ``full``."""
    return 100 * (low / full - 1), 100 * (middle / full - 1), 100 * (high / full - 1)


def _draw_lines(axes: Axes, lines: dict[str, list[Point]], hollow: Collection[tuple[str, float]] = frozenset()) -> None:
    """Medians as lines, p20 to p80 as bands. Each line is thinner than the one below it: those that coincide show."""
    for place, (name, points) in enumerate(lines.items()):
        colour, marker, dash = STYLES.get(name, _OTHER)
        top = place / max(1, len(lines) - 1)
        size = 10 - 5 * top + (3 if marker == "*" else 0)
        xs, lows, middles, highs = zip(*points, strict=True)
        look: Any = {"color": colour, "marker": marker, "markersize": size, "markeredgewidth": 1.2}
        axes.plot(xs, middles, linestyle=dash, linewidth=3.4 - 2 * top, label=name, **look)
        axes.fill_between(xs, lows, highs, color=colour, alpha=0.15, linewidth=0)
        empty = [(x, y) for x, y in zip(xs, middles, strict=True) if (name, x) in hollow]
        for x, y in empty:
            axes.plot(x, y, linestyle="none", markerfacecolor="white", **look)


def _log_y(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _lengths_on_x(axes: Axes, lines: dict[str, list[Point]]) -> None:
    lengths = sorted({int(point[0]) for points in lines.values() for point in points})
    axes.set_xscale("log")
    axes.set_xticks(lengths, length_labels(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("total tokens")


def _legend(axes: Axes) -> None:
    """Outside the data; in the order in which the lines end."""
    handles, names = axes.get_legend_handles_labels()
    ends = sorted(range(len(names)), key=lambda i: -float(handles[i].get_ydata()[-1]))  # type: ignore[attr-defined]
    axes.legend(
        [handles[i] for i in ends], [names[i] for i in ends], loc="center left", bbox_to_anchor=(1.02, 0.5),
        frameon=False, handlelength=3.5,
    )  # fmt: skip
