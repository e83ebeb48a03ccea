"""Measuring many cells in turn: rotated, resumable, and running out of memory is a result."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .measure import free_memory, ran_out_of_memory
from .record import Record

__all__ = ["Cell", "interleaved", "measure_cells"]


@dataclass(frozen=True)
class Cell:
    """One measurement to make."""

    tokens: int
    contender: str
    repeat: int
    overlap: float = 1.0

    @property
    def series(self) -> tuple[str, float]:
        """What it shares with the same contender's cells of other lengths."""
        return self.contender, self.overlap


def interleaved(contenders: Sequence[str], repeats: int) -> Iterator[tuple[int, str]]:
    """(repeat, contender): all of them in each repeat, another one first each time, so that none has the quiet machine."""
    for repeat in range(repeats):
        first = repeat % len(contenders)
        yield from ((repeat, name) for name in (*contenders[first:], *contenders[:first]))


def measure_cells(
    record: Record, cells: Sequence[Cell], measure: Callable[[Cell], Mapping[str, Any]], device: str
) -> None:
    """Measure what the record lacks, shortest first, and write each result down at once.

    Out of memory is a row with the status "oom". At that length or a longer one the same contender is not tried again:
    further lengths get "skipped".
    """
    todo = sorted((cell for cell in cells if not record.has(asdict(cell))), key=lambda cell: cell.tokens)
    progress = _Progress(todo)
    for cell in todo:
        limit = _limits(record).get(cell.series)
        if limit is not None and limit <= cell.tokens:
            record.add({**asdict(cell), "status": "skipped"})
            progress.step(cell, None)
            continue
        begin = time.perf_counter()
        status: str = "ok"
        values: Mapping[str, Any] = {}
        try:
            values = measure(cell)
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            if not ran_out_of_memory(error):
                raise
            status = "oom"
        if status == "oom":
            free_memory(device)
        record.add({**asdict(cell), "status": status, **values})
        progress.step(cell, time.perf_counter() - begin if status == "ok" else None)
    progress.close()


def _limits(record: Record) -> dict[tuple[str, float], int]:
    """Contender and overlap -> the shortest length at which it ran out of memory."""
    limits: dict[tuple[str, float], int] = {}
    for row in record.rows:
        if row["status"] == "oom":
            series, tokens = (row["contender"], float(row["overlap"])), int(row["tokens"])
            limits[series] = min(tokens, limits.get(series, tokens))
    return limits


class _Progress:
    """One line that says what was measured and how long the rest will take. Without a terminal, a line a measurement."""

    def __init__(self, cells: Sequence[Cell]):
        self._left = list(cells)
        self._all = len(cells)
        self._seconds: dict[tuple[str, float, int], list[float]] = {}

    def step(self, cell: Cell, seconds: float | None) -> None:
        """``cell`` took ``seconds``; ``None``: it was not measured."""
        self._left.remove(cell)
        if seconds is not None:
            self._seconds.setdefault((*cell.series, cell.tokens), []).append(seconds)
        text = f"{self._all - len(self._left)}/{self._all}  {cell.tokens} tokens  {cell.contender}  {self._rest()}"
        if sys.stdout.isatty():
            print(f"\r\x1b[K{text}", end="", flush=True)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """Clear the line."""
        if self._all and sys.stdout.isatty():
            print("\r\x1b[K", end="", flush=True)

    def _rest(self) -> str:
        measured = [(key[-1], seconds) for key, group in self._seconds.items() for seconds in group]
        if not measured or not self._left:
            return ""
        rate = sum(seconds for _, seconds in measured) / sum(tokens for tokens, _ in measured)
        left = 0.0
        for cell in self._left:
            same = self._seconds.get((*cell.series, cell.tokens))
            left += sum(same) / len(same) if same else rate * cell.tokens
        return f"about {left / 60:.0f} min left" if left >= 90 else f"about {left:.0f} s left"
