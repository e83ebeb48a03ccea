"""``accuracy``: agents answer questions under every scheme (the paper's tables 3, 8, 16, 17 and 18)."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..cache import LoRASharedCache
from ..errors import LRAgentError
from ..schemes import SCHEMES
from .bootstrap import Interval, interval
from .crew import adapter_sets, import_agents, key_of, load_crew
from .environment import environment
from .record import Layout, Record, Row

__all__ = ["ANSWERS", "label", "run", "summary"]

ANSWERS = Layout(
    settings=("benchmark", "model", "dtype", "device", "device_name", "threads", "max_turns", "commit"),
    cell=("adapters", "question", "scheme", "window"),
    values=("level", "kind", "exact_match", "f1", "answered", "turns", "tokens", "new_tokens", "seconds",
            "tokens_per_second", "ttft_s", "prefilled", "in_use_bytes", "answer"),
)  # fmt: skip
"""One row a question, set of adapters, scheme and window. ``ttft_s``, ``prefilled``: summed over turns."""


def run(
    adapters: Sequence[str],
    data: Sequence[str],
    limit: int | None,
    schemes: Sequence[str],
    windows: Sequence[int],
    model: str,
    dtype: str,
    device: str | None,
    max_turns: int,
    threads: int | None,
    csv: Path | None,
    plot: Path | None,
) -> list[Row]:
    """Ask every question under every scheme, the schemes in turn, and print tables.

    Args:
        adapters: ``NAME=FOLDER``, one set of adapters each.
        data: what ``agents.load_questions`` takes.
        limit: questions of each, at most.
        windows: values of ``handover_window``, for the schemes that take one.
        csv: rows are read from and appended to it; what is there is not asked again.
        plot: where to draw exact match and F1.

    Returns:
        The rows of what was asked for.
    """
    if threads:
        torch.set_num_threads(threads)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    agents, sets = import_agents(), adapter_sets(adapters)
    questions = {key_of(one): one for source in data for one in agents.load_questions(source, limit=limit)}
    record = Record(
        csv,
        {
            "benchmark": "accuracy", "model": model, "dtype": dtype, "threads": torch.get_num_threads(),
            "max_turns": max_turns, **environment(device),
        },
        ANSWERS,
    )  # fmt: skip
    cases = [(name, window) for name in schemes for window in (windows if SCHEMES[name].takes_window else (0,))]
    wanted = set()
    for name, folder in sets.items():
        cells = [
            {"adapters": name, "question": key, "scheme": scheme, "window": window}
            for number, key in enumerate(questions)
            for scheme, window in cases[number % len(cases) :] + cases[: number % len(cases)]
        ]
        wanted |= {_place(cell) for cell in cells}
        todo = [cell for cell in cells if not record.has(cell)]
        if todo:
            _ask(load_crew(model, folder, getattr(torch, dtype), device), questions, todo, record, agents, max_turns)
    rows = [row for row in record.rows if _place(row) in wanted]
    print(summary(rows))
    if plot is not None:
        from .plots_accuracy import draw_accuracy

        for path in draw_accuracy(rows, plot):
            print(path)
    return rows


def _ask(
    crew: Any, questions: dict[str, Any], cells: Sequence[dict[str, Any]], record: Record, agents: Any, max_turns: int
) -> None:
    """Answer what the record lacks; a scheme that these adapters do not allow is said once and left out."""
    refused: set[str] = set()
    begin = time.perf_counter()
    for number, cell in enumerate(cells):
        scheme = cell["scheme"]
        if scheme in refused:
            continue
        try:
            cache = LoRASharedCache(crew.model, scheme=scheme, handover_window=cell["window"])
        except LRAgentError as error:
            refused.add(scheme)
            print(f"{cell['adapters']}: {scheme} refuses: {' '.join(str(error).split())}")
            continue
        question = questions[cell["question"]]
        start = time.perf_counter()
        episode = crew.answer(question, cache, max_turns=max_turns)
        seconds = time.perf_counter() - start
        exact, f1 = agents.score(episode.answer, question)
        tokens = int(episode.ids.shape[1])
        record.add(
            {
                **cell, "level": question.level, "kind": question.kind, "exact_match": exact, "f1": f1,
                "answered": int(episode.answer is not None), "turns": len(episode.turns), "tokens": tokens,
                "new_tokens": sum(int(turn.written.shape[1]) for turn in episode.turns), "seconds": seconds,
                "tokens_per_second": tokens / seconds, "ttft_s": sum(turn.first_token_s for turn in episode.turns),
                "prefilled": sum(turn.prefilled for turn in episode.turns),
                "in_use_bytes": cache.memory_report().in_use_bytes, "answer": episode.answer or "",
            }
        )  # fmt: skip
        left = (time.perf_counter() - begin) / (number + 1) * (len(cells) - number - 1)
        said = f"{cell['adapters']}  {label(scheme, cell['window'])}  {left / 60:.0f} min left"
        print(f"{number + 1}/{len(cells)}  {said}", flush=True)


def summary(rows: Sequence[Row]) -> str:
    """Tables in Markdown: a set of adapters and level each, and what the same runs cost."""
    lines: list[str] = []
    for name in dict.fromkeys(row["adapters"] for row in rows):
        mine = [row for row in rows if row["adapters"] == name]
        for level in dict.fromkeys(row["level"] for row in mine):
            part = [row for row in mine if row["level"] == level]
            lines += _answers(f"{name}, {level}" if level else name, part)
        lines += _costs(name, mine)
    return "\n".join(lines)


def _answers(title: str, rows: Sequence[Row]) -> list[str]:
    cases = _by_case(rows)
    exact = cases.get(("non_shared", "0"), {})
    count = max(len(found) for found in cases.values())
    lines = [
        f"**{title}: {count} questions** (mean, 95 % interval)", "",
        "| scheme | EM, % | F1, % | F1 less non_shared's | answered | turns | tokens |", "|---|---|---|---|--:|--:|--:|",
    ]  # fmt: skip
    for (scheme, window), found in cases.items():
        both = [key for key in found if key in exact]
        less = [float(found[key]["f1"]) - float(exact[key]["f1"]) for key in both]
        means = [_mean(list(found.values()), field) for field in ("answered", "turns", "tokens")]
        cells = [
            label(scheme, window),
            *(_percent(interval([float(row[field]) for row in found.values()])) for field in ("exact_match", "f1")),
            _percent(interval(less), sign=True) if less and scheme != "non_shared" else "",
            f"{means[0]:.0%}", f"{means[1]:.1f}", f"{means[2]:.0f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _costs(title: str, rows: Sequence[Row]) -> list[str]:
    """Sums over the questions that every scheme has: they do not all go the same way, so per token, too."""
    cases = _by_case(rows)
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


def _by_case(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    """(scheme, window) -> question -> row, in the order of the schemes."""
    order = list(SCHEMES)
    keys = sorted({(row["scheme"], row["window"]) for row in rows}, key=lambda key: (order.index(key[0]), int(key[1])))
    return {key: {row["question"]: row for row in rows if (row["scheme"], row["window"]) == key} for key in keys}


def label(scheme: str, window: object) -> str:
    """How a scheme with its window is named in tables."""
    return scheme if str(window) == "0" else f"{scheme}, window {window}"


def _place(cell: Any) -> tuple[str, ...]:
    return tuple(str(cell[key]) for key in ANSWERS.cell)


def _mean(rows: Sequence[Row], field: str) -> float:
    return sum(float(row[field]) for row in rows) / len(rows)


def _percent(found: Interval, sign: bool = False) -> str:
    mean, low, high = (100 * value for value in found)
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]" if sign else f"{mean:.1f} [{low:.1f}, {high:.1f}]"
