"""``fidelity``: how far each scheme is from ``non_shared`` on agents' own trajectories, and what a window buys and costs.

Agents answer questions, each with a cache of its own; the schemes then run the same tokens. Longer trajectories are several
questions one after the other. With h hand-overs, the agent that had the turn before the first of the last h reads all that
comes before.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._compat import CACHE_ARG
from ..audit import audit
from ..cache import LoRASharedCache
from ..fidelity import Audit, Fidelity
from ..schemes import SCHEMES
from ..turns import AgentTrajectory, Unchanged, activate
from .accuracy import label
from .crew import adapter_sets, import_agents, load_crew
from .environment import environment
from .measure import make_clock
from .record import Layout, Record, Row

__all__ = ["DIVERGENCE", "cut", "joined", "run"]

DIVERGENCE = Layout(
    settings=("benchmark", "model", "dtype", "device", "device_name", "threads", "data", "questions", "commit"),
    cell=("adapters", "options", "length", "handovers", "scheme", "window"),
    values=("trajectories", "tokens", "kl", "agreement", "nll", "reference_nll", "prefilled", "ttft_s", "in_use_bytes",
            "by_turn"),
)  # fmt: skip
"""``length``: about as many tokens a trajectory; 0: one question. ``handovers``: 0: all there are. ``tokens``: predictions
compared. ``ttft_s``: seconds of prefill a hand-over, mean. ``by_turn``: KL of the first, second, ... turn after the
first."""


def run(
    adapters: Sequence[str],
    data: Sequence[str],
    questions: int,
    lengths: Sequence[int],
    handovers: Sequence[int],
    trajectories: int,
    schemes: Sequence[str],
    windows: Sequence[int],
    whole_keys: bool,
    model: str,
    dtype: str,
    device: str | None,
    threads: int | None,
    csv: Path | None,
    layers: Path | None,
) -> list[Row]:
    """Let agents answer, audit the schemes on what they wrote, time each scheme's prefills, and print tables.

    Args:
        adapters: ``NAME=FOLDER``, one set of adapters each.
        data: what ``agents.load_questions`` takes.
        questions: so many of each are answered.
        lengths, handovers: see ``DIVERGENCE``; every pair is run, but 0 with 0 only.
        trajectories: so many at most of each length.
        whole_keys: with adapters on k_proj, also keep keys whole (``key_lr=False``).
        layers: folder for a plot of the cosines, layer by layer, of each set of adapters.

    Returns:
        The rows.
    """
    if threads:
        torch.set_num_threads(threads)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    agents, sets = import_agents(), adapter_sets(adapters)
    record = Record(
        csv,
        {
            "benchmark": "fidelity", "model": model, "dtype": dtype, "threads": torch.get_num_threads(),
            "data": " ".join(Path(one).name for one in data),
            "questions": questions, **environment(device),
        },
        DIVERGENCE,
    )  # fmt: skip
    asked = [one for source in data for one in agents.load_questions(source, limit=questions)]
    for name, folder in sets.items():
        crew = load_crew(model, folder, getattr(torch, dtype), device)
        episodes = list(_episodes(crew, asked))
        kinds: dict[str, dict[str, Any]] = {"": {}}
        if whole_keys:
            kinds["key_lr=False"] = {"key_lr": False}
        for length, count in ((length, count) for length in lengths for count in handovers if length or not count):
            some = _trajectories(episodes, length, count, trajectories)
            for said, options in kinds.items():
                first = length == lengths[0] and count == handovers[0] and not said
                _measure(
                    crew, some, record, name, said, options, length, count, schemes, windows, layers if first else None
                )
    print(_table(record.rows))
    return record.rows


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


def _trajectories(episodes: Sequence[AgentTrajectory], length: int, handovers: int, most: int) -> list[AgentTrajectory]:
    if not length:
        return [joined([episode], 0) for episode in episodes[:most]]
    stride = max(1, len(episodes) // most)
    return [cut(joined(episodes, length, first), handovers) for first in range(0, stride * most, stride)]


def _episodes(crew: Any, questions: Sequence[Any]) -> Iterator[AgentTrajectory]:
    """What the agents write with caches of their own."""
    for number, question in enumerate(questions):
        episode = crew.answer(question, LoRASharedCache(crew.model, scheme="non_shared"))
        trajectory: AgentTrajectory = episode.trajectory
        tokens, turns = len(trajectory.input_ids), len(trajectory.turns)
        print(f"{number + 1}/{len(questions)} answered, {tokens} tokens, {turns} turns", flush=True)
        yield trajectory


def _measure(
    crew: Any,
    trajectories: Sequence[AgentTrajectory],
    record: Record,
    name: str,
    said: str,
    options: dict[str, Any],
    length: int,
    handovers: int,
    schemes: Sequence[str],
    windows: Sequence[int],
    layers: Path | None,
) -> None:
    cell = {"adapters": name, "options": said, "length": length, "handovers": handovers}
    cases = [(scheme, window) for scheme in schemes for window in (windows if SCHEMES[scheme].takes_window else (0,))]
    if all(record.has({**cell, "scheme": scheme, "window": window}) for scheme, window in cases):
        return
    found: Audit = audit(crew.model, trajectories, schemes, windows, layers=layers is not None, **options)
    print(
        f"{name} {said} length {length} hand-overs {handovers}: {len(trajectories)} trajectories\n{found}", flush=True
    )
    if found.layers is not None and layers is not None:
        layers.mkdir(parents=True, exist_ok=True)
        found.layers.plot(layers / f"layers_{name}.png")
    seconds = _prefill_seconds(crew.model, trajectories, found.rows, options)
    for row in found.rows:
        here = {**cell, "scheme": row.scheme, "window": row.handover_window}
        if not record.has(here):
            record.add(
                {
                    **here, "trajectories": len(trajectories), "tokens": row.tokens, "kl": row.kl,
                    "agreement": row.agreement, "nll": row.nll, "reference_nll": row.reference_nll,
                    "prefilled": row.prefilled, "ttft_s": seconds[row.scheme, row.handover_window],
                    "in_use_bytes": row.cache_bytes, "by_turn": " ".join(f"{kl:.4f}" for kl in row.by_turn),
                }
            )  # fmt: skip


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


def _table(rows: Sequence[Row]) -> str:
    """All rows in Markdown."""
    lines = [
        "| adapters | length | hand-overs | scheme | KL, nats/token | top-1 agreement | TTFT, s a hand-over | tokens |",
        "|---|--:|--:|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        named = f"{row['adapters']}{', ' if row['options'] else ''}{row['options']}"
        lines.append(
            f"| {named} | {row['length']} | {row['handovers']} | {label(row['scheme'], row['window'])} | "
            f"{float(row['kl']):.4f} | {float(row['agreement']):.1%} | {float(row['ttft_s']):.2f} | {row['tokens']} |"
        )
    return "\n".join(lines)
