"""Bytes of the cache at the end of the trace, scheme by scheme (LRAgent, table 22 and figure 5).

Measured by filling caches as long as they fit, predicted by arithmetic beyond.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..schemes import SCHEMES
from .contenders import make_caches
from .environment import environment, set_up
from .measure import make_clock
from .models import MODULES, add_agents, random_model
from .paper import paper_beyond
from .record import Record, Row, number
from .shapes import SHAPES, Shape, recompute_layers
from .trace import final_lengths, run_pass, total_tokens, turns

__all__ = ["OWN_A", "cache_bytes", "fill", "run"]

OWN_A = "base_lr_stacked_own_a"
"""``base_lr_stacked`` with adapters that share no A; the other rows have one A, as base_lr_shared needs."""
_GIB = 1 << 30


def cache_bytes(
    shape: Shape,
    scheme: str,
    lengths: Mapping[str, int],
    *,
    rank: int = 8,
    dtype_bytes: int = 2,
    recompute: Sequence[int] = (),
) -> int:
    """Bytes in use by a cache for LoRA on q_proj and v_proj.

    Args:
        scheme: its name, or ``OWN_A``.
        lengths: agent -> positions it has read; who lags holds fewer rows of what is its own.
        recompute: layers that ``droidspeak`` recomputes. It keeps the hidden states that enter the first of them, which
            for layer 0 are the embeddings and need no keeping.
    """
    total = max(lengths.values())
    kv = 2 * shape.layers * shape.kv_heads * shape.head_dim * dtype_bytes  # of a position
    align = max(1, 16 // dtype_bytes)
    lr = shape.layers * -(-rank // align) * align * dtype_bytes  # LR blocks start at multiples of 16 bytes
    match scheme:
        case "non_shared":
            return kv * sum(lengths.values())
        case "full_shared":
            return kv * total
        case "base_shared":
            return kv * total + lr * sum(lengths.values())
        case "base_lr_shared" | "base_lr_stacked":
            return (kv + lr) * total
        case "base_lr_stacked_own_a":
            return (kv + lr * len(lengths)) * total
        case "droidspeak":
            return (kv + (shape.hidden * dtype_bytes if recompute and min(recompute) > 0 else 0)) * total
    raise ValueError(f"no formula for {scheme!r}")


def fill(shape: Shape, scheme: str, context: int, *, rank: int, dtype: torch.dtype, recompute: Sequence[int]) -> int:
    """Bytes in use after a pass over the trace, by a cache of this shape on a model that is as small as it may be."""
    hidden = shape.hidden if scheme == "droidspeak" else 16  # droidspeak keeps hidden states
    small = replace(shape, hidden=hidden, heads=shape.kv_heads, intermediate=16, vocab=64)
    model = add_agents(random_model(small, dtype), list(MODULES), rank, shared_a=scheme != OWN_A)
    caches = make_caches(model, "base_lr_stacked" if scheme == OWN_A else scheme, recompute)
    trace = turns(context)
    run_pass(model, caches, trace, torch.randint(0, 64, (1, total_tokens(trace))), make_clock("cpu"))
    return caches.nbytes()[0]


def run(
    shape: str, context: Sequence[int], rank: int, dtype: str, limit: float, threads: int | None, csv: Path | None
) -> list[Row]:
    """Measure or predict each scheme's bytes at each length; print them beside the paper's.

    Args:
        limit: GiB that a cache which is filled may take.
    """
    set_up(threads=threads)
    record = Record(
        csv,
        {
            "benchmark": "memory", "model": shape, "modules": " ".join(MODULES), "rank": rank, "dtype": dtype,
            "threads": torch.get_num_threads(), **environment("cpu"),
        },
    )  # fmt: skip
    sizes, kind = SHAPES[shape], getattr(torch, dtype)
    recompute = recompute_layers(shape, sizes.layers)
    schemes = [*SCHEMES, OWN_A]
    for length in sorted(context):
        trace = turns(length)
        for scheme in schemes:
            cell: dict[str, Any] = {"tokens": total_tokens(trace), "contender": scheme}
            found = cache_bytes(
                sizes, scheme, final_lengths(trace), rank=rank, dtype_bytes=kind.itemsize, recompute=recompute
            )
            fits = found <= limit * _GIB
            if record.has({**cell, "case": "measured"}) or (not fits and record.has({**cell, "case": "predicted"})):
                continue
            if fits:
                found = fill(sizes, scheme, length, rank=rank, dtype=kind, recompute=recompute)
            status = "ok" if fits else "predicted"
            record.add({**cell, "case": "measured" if fits else "predicted", "status": status, "in_use_bytes": found})
    asked = {str(total_tokens(turns(length))) for length in context}
    rows = [row for row in record.rows if row["tokens"] in asked]
    _print(shape, rows, schemes)
    return rows


def _print(shape: str, rows: Sequence[Row], schemes: Sequence[str]) -> None:
    lengths = sorted({int(row["tokens"]) for row in rows})
    by_case = sorted(rows, key=lambda row: row["case"], reverse=True)  # what is measured last, so that it counts
    found = {(row["contender"], int(row["tokens"])): row for row in by_case}

    def gibibytes(scheme: str, tokens: int) -> float:
        return (number(found[scheme, tokens], "in_use_bytes") or 0.0) / _GIB

    theirs = (
        " (the paper's)" if any(paper_beyond(shape, "non_shared", tokens) is not None for tokens in lengths) else ""
    )
    print(f"\n{shape}: GiB of cache; beyond full_shared{theirs}. ~: predicted")
    print(f"{'':24}" + "".join(f"{tokens:>28,}" for tokens in lengths))
    for scheme in schemes:
        cells = []
        for tokens in lengths:
            mark = "~" if found[scheme, tokens]["status"] == "predicted" else ""
            size = gibibytes(scheme, tokens)
            beyond = size - gibibytes("full_shared", tokens)
            paper = paper_beyond(shape, scheme, tokens)
            said = "" if paper is None else f" ({paper:.2f})"
            cells.append(f"{f'{mark}{size:.3f}  +{beyond:.3f}{said}':>28}")
        print(f"{scheme:24}" + "".join(cells))
