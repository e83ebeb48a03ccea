"""``trace`` and ``overlap``: throughput, time to first token and memory of all contenders on the emulated trace."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .contenders import CONTENDERS, Caches, make_caches, scheme_of
from .environment import environment, set_up
from .measure import PeakMemory, make_clock
from .models import default_dtype, load_model
from .record import Record, Row
from .schedule import Cell, interleaved, measure_cells
from .shapes import recompute_layers
from .tables import print_speed
from .trace import divergence, run_pass, total_tokens, turns
from .verify import verify

__all__ = ["run_overlap", "run_trace"]


def run_trace(context: Sequence[int], only: Sequence[str] | None, **options: Any) -> list[Row]:
    """The trace at several lengths (the paper's tables 4 and 5). See `_run` for the options."""
    return _run("trace", context, [1.0], only or CONTENDERS, **options)


def run_overlap(
    context: Sequence[int], overlap: Sequence[float], only: Sequence[str] | None, **options: Any
) -> list[Row]:
    """The trace with agents that part after a share of it (the paper's table 21)."""
    if not all(0 <= share <= 1 for share in overlap):
        raise SystemExit(f"--overlap takes shares from 0 to 1, not {' '.join(map(str, overlap))}")
    # One cache handed from agent to agent cannot part.
    contenders = [name for name in only or CONTENDERS if name != "one_dynamic"]
    if not contenders:
        raise SystemExit("one_dynamic cannot part. Name other contenders.")
    return _run("overlap", context, overlap, contenders, **options)


def _run(
    benchmark: str,
    contexts: Sequence[int],
    overlaps: Sequence[float],
    contenders: Sequence[str],
    *,
    model: str,
    modules: list[str],
    rank: int,
    dtype: str | None,
    device: str | None,
    attn: str,
    repeats: int,
    threads: int | None,
    csv: Path | None,
    own_a: bool = False,
) -> list[Row]:
    """Verify, measure what the CSV lacks, print the table.

    Args:
        contexts: tokens of each long observation.
        overlaps: shares of the trace's tokens that agents have in common.
        own_a: adapters share no A, so that base_lr_stacked keeps an LR each and base_lr_shared has nothing to offer.
        dtype, device, threads: ``None``: the model's usual one, a GPU if there is one, torch's choice.
        csv: rows are read from and appended to it; ``None``: nothing is kept.

    Returns:
        The rows of what was asked for, those that were there already included.
    """
    device = set_up(device, threads)
    dtype = dtype or default_dtype(model)
    if own_a:
        contenders = [name for name in contenders if scheme_of(name) != "base_lr_shared"]
    placed = " ".join(modules) + (", own A" if own_a else "")
    record = Record(
        csv,
        {
            "benchmark": benchmark, "model": model, "modules": placed, "rank": rank, "dtype": dtype,
            "attn": attn, "threads": torch.get_num_threads(), **environment(device),
        },
    )  # fmt: skip
    traces = {total_tokens(turns(context)): turns(context) for context in contexts}
    cells = [
        Cell(tokens, name, repeat, share)
        for tokens in traces
        for repeat, name in interleaved(contenders, repeats)
        # Three caches never shared anything: they are the same at every overlap.
        for share in (overlaps[:1] if name == "three_dynamic" else overlaps)
    ]
    if not all(record.has(vars(cell)) for cell in cells):
        loaded = load_model(model, modules, rank, getattr(torch, dtype), device, attn, shared_a=not own_a)
        recompute = recompute_layers(model, loaded.config.num_hidden_layers)
        shares = sorted(share for share in overlaps if 0 < share < 1)
        verify(loaded, contenders, recompute, shares[len(shares) // 2 :][:1])
        clock = make_clock(device)

        def measure(cell: Cell) -> dict[str, Any]:
            trace = traces[cell.tokens]
            tokens = _tokens(cell.tokens, loaded.config.vocab_size).to(device)
            with PeakMemory(device) as memory:
                caches: Caches = make_caches(loaded, cell.contender, recompute)
                result = run_pass(loaded, caches, trace, tokens, clock, part_at=divergence(trace, cell.overlap))
            in_use, reserved = caches.nbytes()
            return {
                "tokens_per_second": cell.tokens / result.seconds, "seconds": result.seconds,
                "ttft_s": result.prefill_seconds, "prefilled": result.prefilled, "in_use_bytes": in_use,
                "reserved_bytes": reserved, "peak_bytes": memory.peak, "peak_growth_bytes": memory.growth,
            }  # fmt: skip

        measure_cells(record, cells, measure, device)
    places = {(str(cell.tokens), cell.contender, str(cell.repeat), f"{cell.overlap:g}") for cell in cells}
    rows = [row for row in record.rows if (row["tokens"], row["contender"], row["repeat"], row["overlap"]) in places]
    print_speed(rows, contenders)
    return rows


def _tokens(count: int, vocab: int) -> torch.Tensor:
    return torch.randint(0, vocab, (1, count), generator=torch.Generator().manual_seed(count))
