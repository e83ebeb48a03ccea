"""One decode step: how much of it is matrix products and attention, and what the cache's own code takes of the rest.

Time is counted where it is spent: a function's, less that of counted functions which it calls. Counting takes about a
microsecond a call, which is in the numbers.

    products    every linear layer, and attention itself
    cache       hooks, checks, appends, folding B: all that this library does besides
    model       the rest: norms, rotary embedding, residuals, Python in between
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .._compat import CACHE_ARG
from ..attention import interface
from ..binding import ModelBinding
from ..forward import Forward
from ..tap import Tap
from .contenders import AGENTS, make_caches
from .environment import environment, set_up
from .models import default_dtype, load_model
from .record import Record, Row, number
from .shapes import recompute_layers
from .stats import percentiles
from .verify import verify

__all__ = ["run"]

CONTENDERS = ("one_dynamic", "full_shared", "base_lr_shared", "base_lr_stacked")
_COUNTED: list[tuple[Any, str, str]] = [
    (torch.nn.functional, "linear", "products"),
    (torch.nn.functional, "scaled_dot_product_attention", "products"),
    (interface, "run_backend", "products"),
    (interface, "attention", "cache"),
    (ModelBinding, "before", "cache"),
    (ModelBinding, "after", "cache"),
    (Forward, "project", "cache"),
    (Forward, "update", "cache"),
    (Tap, "forward", "cache"),
]
_PARTS = ("step", "products", "cache")


def run(
    length: Sequence[int],
    only: Sequence[str] | None,
    model: str,
    modules: list[str],
    rank: int,
    dtype: str | None,
    steps: int,
    threads: int | None,
    csv: Path | None,
) -> list[Row]:
    """Fill caches to each length in three turns, then time single steps of the last agent, interleaved. On the CPU.

    Args:
        steps: timed at each length, after as many that are not.

    Returns:
        Rows with p20, p50 and p80 in milliseconds of the whole step, its products, and the cache's own code.
    """
    set_up(threads=threads)
    dtype = dtype or default_dtype(model)
    contenders = list(only or CONTENDERS)
    record = Record(
        csv,
        {
            "benchmark": "step", "model": model, "modules": " ".join(modules), "rank": rank, "dtype": dtype,
            "attn": "sdpa", "threads": torch.get_num_threads(), **environment("cpu"),
        },
    )  # fmt: skip
    loaded = load_model(model, modules, rank, getattr(torch, dtype), "cpu", "sdpa")
    layers = loaded.config.num_hidden_layers
    verify(loaded, contenders, recompute_layers(model, layers))
    for tokens in sorted(length):
        if all(record.has({"tokens": tokens, "contender": name, "case": "step"}) for name in contenders):
            continue
        for name, meter in _steps(loaded, model, contenders, tokens, steps).items():
            for part in _PARTS:
                low, mid, high = (seconds * 1e3 for seconds in percentiles(meter.seconds[part]))
                values = {"status": "ok", "ms_p20": low, "ms_p50": mid, "ms_p80": high}
                record.add({"tokens": tokens, "contender": name, "case": part, **values})
    rows = [row for row in record.rows if int(row["tokens"]) in length]
    _print(rows, contenders, layers)
    return rows


class _Meter:
    """Exclusive time by part, of one step and of all."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {part: [] for part in _PARTS}
        self._now: dict[str, float] = {}
        self._inner = [0.0]

    def counted(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """``function``, its time put down to ``part``."""

        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            self._inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - begin
                self._now[part] = self._now.get(part, 0.0) + took - self._inner.pop()
                self._inner[-1] += took

        return run

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step: what is counted inside belongs to it."""
        self._now = dict.fromkeys(_PARTS, 0.0)
        plain = [getattr(owner, name) for owner, name, _ in _COUNTED]
        for (owner, name, part), function in zip(_COUNTED, plain, strict=True):
            setattr(owner, name, self.counted(function, part))
        try:
            begin = time.perf_counter()
            yield
            self._now["step"] = time.perf_counter() - begin
        finally:
            for (owner, name, _), function in zip(_COUNTED, plain, strict=True):
                setattr(owner, name, function)
        for part, seconds in self._now.items():
            self.seconds[part].append(seconds)


@torch.inference_mode()
def _steps(model: Any, name: str, contenders: Sequence[str], tokens: int, steps: int) -> dict[str, _Meter]:
    ids = torch.randint(0, model.config.vocab_size, (1, tokens + 2 * steps), generator=torch.Generator().manual_seed(0))
    caches = {}
    for contender in contenders:
        caches[contender] = make_caches(model, contender, recompute_layers(name, model.config.num_hidden_layers))
        for index, agent in enumerate(AGENTS):
            model.set_adapter(agent)
            cache = caches[contender].of[agent]
            stop = tokens * (index + 1) // len(AGENTS)
            while (past := cache.get_seq_length()) < stop:
                model(ids[:, past : min(stop, past + 1024)], logits_to_keep=1, **{CACHE_ARG: cache})
    meters = {contender: _Meter() for contender in contenders}
    for position in range(tokens, tokens + 2 * steps):
        for contender in contenders:
            cache = caches[contender].of[AGENTS[-1]]
            with meters[contender].step():
                model(ids[:, position : position + 1], logits_to_keep=1, **{CACHE_ARG: cache})
    for meter in meters.values():
        for times in meter.seconds.values():
            del times[:steps]
    return meters


def _print(rows: Sequence[Row], contenders: Sequence[str], layers: int) -> None:
    found = {(row["contender"], int(row["tokens"]), row["case"]): number(row, "ms_p50") or 0.0 for row in rows}
    for tokens in sorted({key[1] for key in found}):
        print(f"\none token at {tokens:,}: medians{'':5}step, ms   outside products   the cache's own code, us a layer")
        for name in contenders:
            step, products, own = (found[name, tokens, part] for part in _PARTS)
            print(f"{name:24}{step:18.2f}{1 - products / step:19.1%}{own * 1e3 / layers:35.0f}")
