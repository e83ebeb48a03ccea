"""``fidelity``: how far each scheme is from ``non_shared`` on agents' own trajectories, and what a window buys and costs.

Agents answer questions, each with a cache of its own; the schemes then run the same tokens. Longer trajectories are several
questions one after the other. With h hand-overs, the agent that had the turn before the first of the last h reads all that
comes before.
"""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._compat import CACHE_ARG
from ..audit import audit
from ..cache import LoRASharedCache
from ..fidelity import Audit, Fidelity
from ..similarity import layer_similarity
from ..turns import AgentTrajectory, Unchanged, activate
from .bootstrap import ratio_interval
from .crew import adapter_sets, allowed_cases, ask_for, digest_of, load_crew
from .divergence import DIVERGENCE, table
from .environment import environment, set_up
from .measure import make_clock
from .record import Record, Row

__all__ = ["cut", "joined", "run"]

_TIMED = 3  # trajectories whose prefills are timed: the schemes are run once more for it, with the clock


@dataclass(frozen=True)
class _Shape:
    """What is run of the episodes: see ``DIVERGENCE``."""

    length: int
    handovers: int
    trajectories: int
    options: str = ""


def _cell(same: dict[str, str], shape: _Shape, scheme: str, window: int) -> dict[str, Any]:
    return {**same, **asdict(shape), "scheme": scheme, "window": window}


def run(
    adapters: Sequence[str],
    data: Sequence[str],
    questions: int,
    unseen: float,
    lengths: Sequence[int],
    handovers: Sequence[int],
    trajectories: int,
    schemes: Sequence[str],
    windows: Sequence[int],
    whole_keys: bool,
    model: str,
    dtype: str,
    device: str | None,
    max_turns: int,
    threads: int | None,
    csv: Path | None,
    layers: Path | None,
    plot: Path | None = None,
) -> list[Row]:
    """Let agents answer, audit the schemes on what they wrote, time each scheme's prefills, and print a table.

    Args:
        adapters: ``NAME=FOLDER``, one set of adapters each.
        data: what ``agents.load_questions`` takes.
        questions: so many of each level of each are answered.
        unseen: only of the share that ``train_agents.py`` holds out.
        lengths, handovers: see ``DIVERGENCE``; every pair is run, but a length of 0 with 0 only.
        trajectories: so many at most of each length.
        whole_keys: with adapters on k_proj, also keep keys whole (``key_lr=False``).
        csv: rows are read from and appended to it. What the agents wrote is kept beside it.
        layers: folder for the cosines, layer by layer, of each set of adapters: a plot and a table.
        plot: where to draw KL against windows, lengths and hand-overs.

    Returns:
        The rows of what was asked for.
    """
    device = set_up(device, threads)
    sets = adapter_sets(adapters)
    settings = {
        "benchmark": "fidelity", "model": model, "dtype": dtype, "threads": torch.get_num_threads(),
        "data": " ".join(Path(one).name for one in data), "questions": questions, "max_turns": max_turns,
        **environment(device, agents=True),
    }  # fmt: skip
    record = Record(csv, settings, DIVERGENCE)
    shapes = [
        _Shape(length, count, trajectories, said)
        for length in lengths
        for count in handovers
        if length or not count
        for said in ("", "key_lr=False")[: 1 + whole_keys]
    ]
    wanted: list[Row] = []
    for name, folder in sets.items():
        same = {"adapters": name, "digest": digest_of(folder)}
        crew = load_crew(model, folder, getattr(torch, dtype), device)
        cases = allowed_cases(crew.model, name, schemes, windows)
        todo = [
            shape
            for shape in shapes
            if not all(record.has(_cell(same, shape, scheme, window)) for scheme, window in cases)
        ]
        if todo or layers is not None:
            asked = ask_for(data, questions, unseen)
            beside = csv.with_suffix(f".{name}.pt") if csv is not None else None
            episodes = _episodes(crew, asked, max_turns, beside, repr((same, sorted(settings.items()), len(asked))))
            for shape in todo:
                _measure(crew.model, episodes, shape, record, same, schemes, windows)
            if layers is not None:
                _write_layers(crew.model, _trajectories(episodes, shapes[0]), layers, name)
        places = {record.place(_cell(same, shape, *case)) for shape in shapes for case in cases}
        wanted += [row for row in record.rows if record.place(row) in places]
    print(table(wanted))
    if plot is not None:
        from .plots_divergence import draw_divergence

        for path in draw_divergence(wanted, plot):
            print(path)
    return wanted


def joined(episodes: Sequence[AgentTrajectory], length: int, first: int = 0) -> AgentTrajectory:
    """Episodes one after the other, from number ``first`` on and round again, until there are ``length`` tokens.

    It ends with the turn of ``reflect``, the longest, that comes nearest, so that there is something to compare.
    """
    ids, written, turns = [], [], []
    total = 0
    for number in itertools.count(first):
        episode = episodes[number % len(episodes)]
        ids.append(episode.input_ids)
        assert episode.written is not None
        written.append(episode.written)
        turns += [(agent, total + stop) for agent, stop in episode.turns]
        total += len(episode.input_ids)
        if total >= length:
            break
    ends = [index for index, (agent, _) in enumerate(turns) if agent == "reflect"] or [len(turns) - 1]
    end = min(ends, key=lambda index: abs(turns[index][1] - length)) if length else len(turns) - 1
    stop = turns[end][1]
    return AgentTrajectory(torch.cat(ids)[:stop], _merged(turns[: end + 1]), torch.cat(written)[:stop])


def cut(trajectory: AgentTrajectory, handovers: int) -> AgentTrajectory:
    """The same tokens with the last ``handovers`` only: one agent reads all that comes before. 0: as it is."""
    turns = list(trajectory.turns)
    return AgentTrajectory(trajectory.input_ids, turns[-handovers - 1 :] if handovers else turns, trajectory.written)


def _merged(turns: Sequence[tuple[str | None, int]]) -> list[tuple[str | None, int]]:
    """Turns of one agent in a row are one."""
    return [turn for turn, after in zip(turns, [*turns[1:], None], strict=True) if after is None or after[0] != turn[0]]


def _trajectories(episodes: Sequence[AgentTrajectory], shape: _Shape) -> list[AgentTrajectory]:
    """As many as there are distinct ones; of long ones, those that begin with different episodes."""
    count = min(shape.trajectories, len(episodes))
    if not shape.length:
        return [joined([episode], 0) for episode in episodes[:count]]
    stride = len(episodes) // count
    long = [joined(episodes, shape.length, first) for first in range(0, stride * count, stride)]
    return [cut(one, shape.handovers) for one in long if len(one.turns) > shape.handovers]


def _episodes(
    crew: Any, questions: Sequence[Any], max_turns: int, path: Path | None, key: str
) -> list[AgentTrajectory]:
    """What the agents write with caches of their own; kept in a file, whose content counts while ``key`` is the same."""
    if path is not None and path.is_file():
        kept = torch.load(path, weights_only=True)
        if kept["key"] == key:
            return [AgentTrajectory(*one) for one in kept["episodes"]]
    episodes: list[AgentTrajectory] = []
    for number, question in enumerate(questions):
        episode = crew.answer(question, LoRASharedCache(crew.model, scheme="non_shared"), max_turns)
        episodes.append(episode.trajectory)
        said = "answered" if episode.answer is not None else "out of turns"
        print(
            f"{number + 1}/{len(questions)} {said}: {len(episode.turns)} turns, {episode.ids.shape[1]} tokens",
            flush=True,
        )
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [(one.input_ids, list(one.turns), one.written) for one in episodes]
        torch.save({"key": key, "episodes": kept}, path)
    return episodes


def _measure(
    model: Any,
    episodes: Sequence[AgentTrajectory],
    shape: _Shape,
    record: Record,
    same: dict[str, str],
    schemes: Sequence[str],
    windows: Sequence[int],
) -> None:
    options: dict[str, Any] = {"key_lr": False} if shape.options else {}
    some = _trajectories(episodes, shape)
    if not some:
        print(f"No trajectory of {shape.length} tokens has {shape.handovers} hand-overs.")
        return
    found: Audit = audit(model, some, schemes, windows, layers=False, **options)
    print(f"{same['adapters']}, {shape}\n{found}", flush=True)
    seconds = _prefill_seconds(model, some[:_TIMED], found.rows, options)
    full = next((row for row in found.rows if (row.scheme, row.handover_window) == ("full_shared", 0)), None)
    for row in found.rows:
        cell = _cell(same, shape, row.scheme, row.handover_window)
        if record.has(cell):
            continue
        ratio = ratio_interval(row.by_trajectory, full.by_trajectory) if full is not None else (None, None, None)
        record.add(
            {
                **cell, "distinct": len(some), "tokens": row.tokens, "kl": row.kl, "of_full_shared": ratio[0],
                "low": ratio[1], "high": ratio[2], "last_turn_kl": row.by_turn[-1] if shape.handovers else None,
                "agreement": row.agreement, "nll": row.nll, "reference_nll": row.reference_nll, "prefilled": row.prefilled,
                "ttft_s": seconds[row.scheme, row.handover_window], "in_use_bytes": row.cache_bytes,
                "by_turn": " ".join(f"{kl:.4f}" for kl in row.by_turn),
            }
        )  # fmt: skip


def _write_layers(model: Any, trajectories: Sequence[AgentTrajectory], folder: Path, name: str) -> None:
    """Cosines of what agents cache, layer by layer: a plot and a table."""
    try:
        found = layer_similarity(model, trajectories)
    except (ValueError, TypeError, RuntimeError) as error:  # adapters that cannot be rows of one batch
        print(f"{name}: layers were not compared: {' '.join(str(error).split())}")
        return
    print(found)
    folder.mkdir(parents=True, exist_ok=True)
    found.plot(folder / f"layers_{name}.png")
    (folder / f"layers_{name}.md").write_text(found.table(per_layer=True) + "\n", encoding="utf-8")


def _prefill_seconds(
    model: Any, trajectories: Sequence[AgentTrajectory], rows: Sequence[Fidelity], options: dict[str, Any]
) -> dict[tuple[str, int], float]:
    """Scheme and window -> seconds of prefill a hand-over: what an agent runs before the first token it writes."""
    clock = make_clock(str(model.device))
    total = dict.fromkeys(((row.scheme, row.handover_window) for row in rows), 0.0)
    count = sum(len(trajectory.turns) - 1 for trajectory in trajectories)
    for trajectory in trajectories:
        ids = trajectory.input_ids.to(model.device)[None]
        caches = {
            case: LoRASharedCache(model, case[0], handover_window=case[1], **options) for case in total
        }  # fmt: skip
        with Unchanged(model), torch.inference_mode():
            start = 0
            for number, (agent, stop) in enumerate(trajectory.turns):
                activate(model, agent)
                for case, cache in caches.items():
                    took = _turn(model, cache, ids, _first_written(trajectory, start, stop), stop, clock)
                    total[case] += took if number else 0.0
                start = stop
    return {case: seconds / count for case, seconds in total.items()}


def _turn(model: Any, cache: LoRASharedCache, ids: Tensor, first: int, stop: int, clock: Any) -> float:
    """Prefill up to the first token that the agent writes, timed, then the rest of its turn."""
    begin = clock()
    model(input_ids=ids[:, cache.get_seq_length() : first], logits_to_keep=1, **{CACHE_ARG: cache})
    took: float = clock() - begin
    if first < stop:
        model(input_ids=ids[:, first:stop], logits_to_keep=1, **{CACHE_ARG: cache})
    return took


def _first_written(trajectory: AgentTrajectory, start: int, stop: int) -> int:
    written = [] if trajectory.written is None else trajectory.written[start + 1 : stop].nonzero().flatten().tolist()
    return start + 1 + written[0] if written else stop
