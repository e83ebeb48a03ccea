"""Attention alone: Flash-LoRA-Attention against sdpa, and against putting V together first (LRAgent, figure 4).

The contenders, on the same tensors (K, V_base and LR are views of longer buffers, as the cache hands them out):

    sdpa            V put together beforehand, not timed: attention over a plain cache, as transformers calls it
    reconstructed   V = V_base + V_lr B at every call, then sdpa
    flash_lora      flash_lora_attention, LR included: reordered, P V_base + (P V_lr) B
    without_lr      flash_lora_attention over V_base alone
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..attention import flash_lora_attention
from ..attention.reference import reference_attention
from .environment import environment, set_up
from .measure import make_clock
from .record import Record, Row, number
from .shapes import SHAPES, Shape
from .stats import percentiles

__all__ = ["run"]

_CASES = {"prefill": 1024, "decode": 1}
_NAMES = ("sdpa", "reconstructed", "flash_lora", "without_lr")


def run(
    shape: str,
    length: Sequence[int],
    rank: int,
    dtypes: Sequence[str],
    device: str | None,
    repeats: int,
    threads: int | None,
    csv: Path | None,
) -> list[Row]:
    """Verify, then time prefill (1024 queries) and decode (one) on each number of keys, interleaved; print ratios to sdpa.

    Returns:
        A row for each length, dtype, case and contender, with p20, p50 and p80 in milliseconds; ``repeat`` is their number.
    """
    device = set_up(device, threads)
    print(
        f"{shape}, rank {rank}, {device}, {torch.get_num_threads()} threads, {repeats} interleaved repeats"
        f" ({repeats * 20} of decode)"
    )
    here, rows = environment(device), []
    for dtype in dtypes:
        record = Record(
            csv,
            {
                "benchmark": "kernel", "model": shape, "rank": rank, "dtype": dtype, "threads": torch.get_num_threads(),
                **here,
            },
        )  # fmt: skip
        for keys in sorted(length):
            for case, queries in _CASES.items():
                count = repeats if case == "prefill" else repeats * 20
                place = {"tokens": keys, "case": case, "repeat": count}
                missing = [name for name in _NAMES if not record.has({**place, "contender": name})]
                if missing:
                    contenders = _contenders(
                        SHAPES[shape], min(queries, keys), keys, rank, getattr(torch, dtype), device
                    )
                    times = _interleaved(contenders, count, make_clock(device))
                    for name in missing:
                        low, mid, high = (seconds * 1e3 for seconds in percentiles(times[name]))
                        values = {"status": "ok", "ms_p20": low, "ms_p50": mid, "ms_p80": high}
                        record.add({**place, "contender": name, **values})
                asked = str(keys), case, str(count)
                group = [row for row in record.rows if (row["tokens"], row["case"], row["repeat"]) == asked]
                _print(f"{case}, {keys} keys, {dtype}", group)
                rows += group
    return rows


def _print(title: str, group: Sequence[Row]) -> None:
    print(title)
    base = next(number(row, "ms_p50") or 0.0 for row in group if row["contender"] == "sdpa")
    for row in group:
        low, mid, high = (number(row, field) or 0.0 for field in ("ms_p20", "ms_p50", "ms_p80"))
        times = f"{low:9.3f} {mid:9.3f} {high:9.3f} ms p20/p50/p80"
        print(f"  {row['contender']:14}{times}{mid / base:8.2f} of sdpa")


@torch.inference_mode()
def _contenders(
    shape: Shape, rows: int, length: int, rank: int, dtype: torch.dtype, device: str
) -> dict[str, Callable[[], Tensor]]:
    """What is timed, verified against the definition in float64."""
    torch.manual_seed(0)
    kv_heads, D = shape.kv_heads, shape.head_dim
    q = torch.randn(1, rows, shape.heads, D).to(device, dtype).transpose(1, 2)
    k, v_base = (torch.randn(1, kv_heads, length + length // 8, D).to(device, dtype)[:, :, :length] for _ in range(2))
    v_lr = torch.randn(1, length + length // 8, rank).to(device, dtype)[:, :length]
    b = (torch.randn(kv_heads, rank, D) / rank**0.5).to(device, dtype)
    v = v_base + v_lr[:, None] @ b
    mask = None
    if rows > 1:
        mask = torch.ones(rows, length, dtype=torch.bool, device=device).tril_(length - rows)[None, None]
    backend = "triton" if device.startswith("cuda") else "blockwise"

    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = shape.heads // kv_heads, True  # type: ignore[assignment]

    def sdpa(values: Tensor) -> Tensor:
        return sdpa_attention_forward(module, q, k, values, mask)[0].transpose(1, 2)

    contenders: dict[str, Callable[[], Any]] = {
        "sdpa": lambda: sdpa(v),
        "reconstructed": lambda: sdpa(v_base + v_lr[:, None] @ b),
        "flash_lora": lambda: flash_lora_attention(q, k, v_base, v_lr, b, backend=backend),
        "without_lr": lambda: flash_lora_attention(q, k, v_base, backend=backend),
    }
    exact, bare = _definition(q, k, v_base, v_lr, b), _definition(q, k, v_base)
    errors = {
        name: float((run().double() - (bare if name == "without_lr" else exact)).abs().max())
        for name, run in contenders.items()
    }
    allowed = 2 * errors["reconstructed"] + 4 * torch.finfo(dtype).eps
    for name in ("sdpa", "flash_lora", "without_lr"):
        if not errors[name] <= allowed:
            raise SystemExit(f"{name} is wrong: off by {errors[name]:.3g}, allowed {allowed:.3g}. No time is printed.")
    return contenders


def _definition(q: Tensor, k: Tensor, v_base: Tensor, *lr: Tensor) -> Tensor:
    """The reference in float64, 64 queries at a time: its matrix of weights would be gigabytes."""
    parts = []
    for first in range(0, q.shape[2], 64):
        block = q[:, :, first : first + 64]
        seen = (
            k.shape[2] - q.shape[2] + first + block.shape[2]
        )  # the block's last query sees its own key and no later one
        tensors = [block, k[:, :, :seen], v_base[:, :, :seen]]
        if lr:
            tensors += [lr[0][:, :seen], lr[1]]
        out = reference_attention(*(tensor.double() for tensor in tensors))
        assert isinstance(out, Tensor)
        parts.append(out)
    return torch.cat(parts, 2)


@torch.inference_mode()
def _interleaved(
    contenders: dict[str, Callable[[], Tensor]], repeats: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    for _ in range(repeats):
        for name, run in contenders.items():
            begin = clock()
            run()
            times[name].append(clock() - begin)
    return times
