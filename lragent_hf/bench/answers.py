"""Answers of agents as rows and tables (the paper's tables 3, 8, 16, 17 and 18)."""

from collections.abc import Sequence

from ..schemes import SCHEMES
from .bootstrap import Interval, interval, share
from .record import Layout, Row

__all__ = ["ANSWERS", "by_case", "label", "summary"]

ANSWERS = Layout(
    settings=("benchmark", "model", "dtype", "device", "device_name", "threads", "max_turns", "commit"),
    cell=("adapters", "digest", "question", "scheme", "window"),
    values=("level", "kind", "exact_match", "f1", "answered", "turns", "tokens", "new_tokens", "seconds",
            "tokens_per_second", "ttft_s", "prefilled", "in_use_bytes", "answer"),
)  # fmt: skip
"""One row a question, set of adapters, scheme and window. ``ttft_s``, ``prefilled``: summed over turns."""
_ASKED = ("exact_match", "f1", "answered", "turns", "tokens")


def summary(rows: Sequence[Row], costs: bool = True) -> str:
    """Tables in Markdown: a set of adapters and level each, and (``costs``) what the same runs cost."""
    lines: list[str] = []
    for name in dict.fromkeys(row["adapters"] for row in rows):
        mine = [row for row in rows if row["adapters"] == name]
        for level in dict.fromkeys(row["level"] for row in mine):
            part = [row for row in mine if row["level"] == level]
            lines += _answers(f"{name}, {level}" if level else name, part)
        if costs:
            lines += _costs(name, mine)
    return "\n".join(lines)


def _answers(title: str, rows: Sequence[Row]) -> list[str]:
    cases = by_case(rows)
    exact = cases.get(("non_shared", "0"), {})
    count = max(len(found) for found in cases.values())
    lines = [
        f"**{title}: {count} questions** (mean [95 % interval]; less: than non_shared, question by question)", "",
        "| scheme | EM, % | F1, % | EM, less | F1, less | answered, % | turns | tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for (scheme, window), found in cases.items():
        values = {field: [float(row[field]) for row in found.values()] for field in _ASKED}
        both = [key for key in found if key in exact]
        less = [
            _percent(interval([float(found[key][field]) - float(exact[key][field]) for key in both]), sign=True)
            for field in ("exact_match", "f1")
        ]
        cells = [
            label(scheme, window) + (f" ({len(found)} questions)" if len(found) < count else ""),
            _percent(share(values["exact_match"])), _percent(interval(values["f1"])),
            *(less if both and scheme != "non_shared" else ("", "")), _percent(share(values["answered"])),
            *("{:.1f} [{:.1f}, {:.1f}]".format(*interval(values[field])) for field in ("turns", "tokens")),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _costs(title: str, rows: Sequence[Row]) -> list[str]:
    """Sums over the questions that every scheme has: they do not all go the same way, so per token, too."""
    cases = by_case(rows)
    common = set.intersection(*(set(found) for found in cases.values()))
    lines = [
        f"**{title}: what {len(common)} questions cost**", "",
        "| scheme | tokens/s | TTFT, s a turn | tokens prefilled, of those in the trajectories | MiB of cache a question |",
        "|---|--:|--:|--:|--:|",
    ]  # fmt: skip
    for (scheme, window), found in cases.items():
        part = [found[key] for key in common]
        total = {
            field: sum(float(row[field]) for row in part)
            for field in ("tokens", "seconds", "ttft_s", "turns", "prefilled", "in_use_bytes")
        }
        lines.append(
            f"| {label(scheme, window)} | {total['tokens'] / total['seconds']:.0f} | "
            f"{total['ttft_s'] / total['turns']:.2f} | {total['prefilled'] / total['tokens']:.2f} | "
            f"{total['in_use_bytes'] / len(part) / 2**20:.1f} |"
        )
    return [*lines, ""]


def by_case(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    """(scheme, window) -> question -> row, in the order of the schemes."""
    order = list(SCHEMES)
    keys = sorted({(row["scheme"], row["window"]) for row in rows}, key=lambda key: (order.index(key[0]), int(key[1])))
    return {key: {row["question"]: row for row in rows if (row["scheme"], row["window"]) == key} for key in keys}


def label(scheme: str, window: object) -> str:
    """How a scheme with its window is named in tables."""
    return scheme if str(window) == "0" else f"{scheme}, window {window}"


def _percent(found: Interval, sign: bool = False) -> str:
    mean, low, high = (100 * value for value in found)
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]" if sign else f"{mean:.1f} [{low:.1f}, {high:.1f}]"
