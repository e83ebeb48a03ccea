"""Measurements as rows of a CSV, written one by one, so that a run that was cut short goes on where it stopped."""

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["AGREE", "FIELDS", "TIMES", "Layout", "Record", "Row", "number", "read_rows"]

Row = dict[str, str]
"""Field -> text, "" where it does not apply."""

_VERSIONS = ("torch", "transformers", "peft")


@dataclass(frozen=True)
class Layout:
    """Columns of a CSV.

    Attributes:
        settings: what rows must agree on, with the versions, to be compared.
        cell: which measurement it is: one row each.
        values: what was found.
    """

    settings: tuple[str, ...]
    cell: tuple[str, ...]
    values: tuple[str, ...]

    @property
    def agree(self) -> tuple[str, ...]:
        """What rows must agree on to be compared."""
        return (*self.settings, *_VERSIONS)

    @property
    def fields(self) -> tuple[str, ...]:
        """All columns, in their order."""
        return (*self.settings, *self.cell, *self.values, *_VERSIONS, "date")


SETTINGS = (
    "benchmark", "model", "modules", "rank", "dtype", "device", "device_name", "attn", "threads", "commit",
)  # fmt: skip
_CELL = ("tokens", "overlap", "case", "contender", "repeat")
_VALUES = (
    "status", "tokens_per_second", "seconds", "ttft_s", "prefilled", "in_use_bytes", "reserved_bytes", "peak_bytes",
    "peak_growth_bytes", "ms_p20", "ms_p50", "ms_p80",
)  # fmt: skip
TIMES = Layout(SETTINGS, _CELL, _VALUES)
"""The columns of all benchmarks that measure time or memory, so that one file can hold several.

``ttft_s``: summed over turns. ``peak_growth_bytes``: ``peak_bytes`` beyond what was in use before the pass.
``status``: "ok"; "oom"; "skipped" (ran out of memory at a shorter length); "predicted" (by arithmetic).
"""
AGREE, FIELDS = TIMES.agree, TIMES.fields


class Record:
    """The rows of one benchmark under one set of settings.

    Args:
        path: the CSV, or ``None``: rows stay in memory.
        common: columns that all rows have in common; with those of ``layout.agree`` complete.
        layout: which columns there are.

    Attributes:
        rows: those found in the file (of the same settings, the commit included), then those added.
        found: how many were found.
    """

    def __init__(self, path: Path | None, common: Mapping[str, Any], layout: Layout = TIMES):
        self.path, self.layout = path, layout
        self.common = {key: _text(value) for key, value in common.items()}
        self.rows: list[Row] = []
        others = 0
        for row in read_rows(path, layout) if path is not None and path.exists() else ():
            if all(row[key] == self.common.get(key, "") for key in layout.agree):
                self.rows.append(row)
            else:
                others += 1
        self.found = len(self.rows)
        self._done = {self.place(row) for row in self.rows}
        if self.found or others:
            print(
                f"{path}: {self.found} measurements are there already; {others} of other settings or commits are left alone"
            )

    def has(self, cell: Mapping[str, Any]) -> bool:
        """Whether there is a row for it."""
        return self.place(cell) in self._done

    def add(self, values: Mapping[str, Any]) -> None:
        """Append a row; it is in the file when this returns."""
        row = dict.fromkeys(self.layout.fields, "") | self.common | {key: _text(value) for key, value in values.items()}
        self.rows.append(row)
        self._done.add(self.place(row))
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            lines = io.StringIO(newline="")
            writer = csv.DictWriter(lines, self.layout.fields, lineterminator="\n")
            if not file.tell():
                writer.writeheader()
            elif file.seek(-1, io.SEEK_END) and file.read(1) != b"\n":
                lines.write("\n")  # after the end of a run that was killed
            writer.writerow(row)
            file.write(lines.getvalue().encode())

    def place(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """Which measurement a row, or a cell to measure, is."""
        return tuple(_text(row.get(key)) for key in self.layout.cell)


def read_rows(path: Path, layout: Layout = TIMES) -> Iterator[Row]:
    """The complete rows of a CSV.

    Raises:
        SystemExit: the file has other columns.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != layout.fields and path.stat().st_size:
            raise SystemExit(f"{path} has other columns than these benchmarks write. Give another file.")
        for row in reader:
            if None not in row and None not in row.values():  # else the end of a run that was killed
                yield row


def number(row: Row, field: str) -> float | None:
    """A field as a number, ``None`` where it is empty."""
    return float(row[field]) if row[field] else None


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
