"""``accuracy``: agents answer questions under every scheme (the paper's tables 3, 8, 16, 17 and 18)."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..cache import LoRASharedCache
from .answers import ANSWERS, label, summary
from .crew import adapter_sets, allowed_cases, ask_for, digest_of, import_agents, key_of, load_crew
from .environment import environment, set_up
from .record import Record, Row

__all__ = ["run"]


def run(
    adapters: Sequence[str],
    data: Sequence[str],
    limit: int | None,
    unseen: float,
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
        limit: questions of each level of each, at most.
        unseen: only of the share that ``train_agents.py`` holds out.
        windows: values of ``handover_window``, for the schemes that take one.
        csv: rows are read from and appended to it; what is there is not asked again.
        plot: where to draw exact match and F1.

    Returns:
        The rows of what was asked for.
    """
    device = set_up(device, threads)
    agents, sets = import_agents(), adapter_sets(adapters)
    questions = {key_of(one): one for one in ask_for(data, limit, unseen)}
    record = Record(
        csv,
        {
            "benchmark": "accuracy", "model": model, "dtype": dtype, "threads": torch.get_num_threads(),
            "max_turns": max_turns, **environment(device, agents=True),
        },
        ANSWERS,
    )  # fmt: skip
    wanted = set()
    for name, folder in sets.items():
        crew = load_crew(model, folder, getattr(torch, dtype), device)
        cases = allowed_cases(crew.model, name, schemes, windows)
        cells = [
            {"adapters": name, "digest": digest_of(folder), "question": key, "scheme": scheme, "window": window}
            for number, key in enumerate(questions)
            for scheme, window in cases[number % len(cases) :] + cases[: number % len(cases)]
        ]
        wanted |= {record.place(cell) for cell in cells}
        todo = [cell for cell in cells if not record.has(cell)]
        if todo:
            _ask(crew, questions, todo, record, agents, max_turns)
    rows = [row for row in record.rows if record.place(row) in wanted]
    print(summary(rows))
    if plot is not None:
        from .plots_answers import draw_answers

        for path in draw_answers(rows, plot):
            print(path)
    return rows


def _ask(
    crew: Any, questions: dict[str, Any], cells: Sequence[dict[str, Any]], record: Record, agents: Any, max_turns: int
) -> None:
    """Answer what the record lacks."""
    warm: set[tuple[str, int]] = set()
    begin = time.perf_counter()
    for number, cell in enumerate(cells):
        scheme = cell["scheme"]
        question = questions[cell["question"]]
        if (scheme, cell["window"]) not in warm:  # the first pass compiles kernels and grows buffers
            warm.add((scheme, cell["window"]))
            crew.answer(question, LoRASharedCache(crew.model, scheme, handover_window=cell["window"]), max_turns=4)
        cache = LoRASharedCache(crew.model, scheme, handover_window=cell["window"])
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
                "in_use_bytes": cache.memory_report().in_use_bytes, "answer": " ".join((episode.answer or "").split()),
            }
        )  # fmt: skip
        left = (time.perf_counter() - begin) / (number + 1) * (len(cells) - number - 1)
        said = f"{cell['adapters']}  {label(scheme, cell['window'])}  {left / 60:.0f} min left"
        print(f"{number + 1}/{len(cells)}  {said}", flush=True)
