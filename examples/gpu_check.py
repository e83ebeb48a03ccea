"""Check the Triton kernels on a GPU, then time them. One command, under 8 minutes:

    python examples/gpu_check.py [--out docs/results] [--minutes 8] [--quick] [--dry-run]

1. Correctness over a grid, in bf16, fp16 and fp32 against float64: largest error next to that of plain PyTorch attention
   in the same dtype. A wrong result ends the run with exit code 1, and no speed is printed.
2. This machine's limits: bandwidth of a large copy, rate of a large bf16 matrix product.
3. Prefill and decode, Llama-3.1-8B shapes (32 query heads, 8 kv heads, head_dim 128, bf16), against SDPA's flash kernel
   and FlexAttention with V materialised beforehand (that cost is not counted against them), and the same kernel without
   LR. p20 / p50 / p80 of the time, and the fraction of both limits. A CSV, and a table at the end.

What is not installed or does not run is reported as such, and the script goes on. --dry-run goes through all of it on a
CPU, in Triton's interpreter (TRITON_INTERPRET=1) and with tiny shapes: its numbers mean nothing, and it says so.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lragent_hf.attention import flash_lora_attention
from lragent_hf.attention.reference import reference_attention


@dataclass(frozen=True)
class Sizes:
    """What is checked and timed: Llama-3.1-8B's heads on a GPU."""

    device: str = "cuda"
    heads: int = 32
    kv_heads: int = 8
    D: int = 128
    lengths: tuple[int, ...] = (1024, 4096, 16384, 65536)
    batches: tuple[int, ...] = (1, 8)
    dtype: torch.dtype = torch.bfloat16  # of what is timed
    checked: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    head_dims: tuple[int, ...] = (64, 80, 128, 256)
    ranks: tuple[int, ...] = (8, 40, 128)
    shapes: tuple[tuple[int, int], ...] = ((1, 1000), (5, 333), (64, 4096), (200, 200), (300, 1500))  # Lq, Lk
    copied: int = 1 << 30  # bytes
    multiplied: int = 8192
    flushed: int = 256 << 20  # more than any L2 cache


GPU = Sizes()
DRY = Sizes(
    device="cpu", heads=2, kv_heads=1, D=32, lengths=(32, 96), batches=(1, 2), dtype=torch.float16,
    checked=(torch.float16, torch.float32), head_dims=(32,), ranks=(8,), shapes=((1, 70), (5, 33), (40, 40)),
    copied=1 << 20, multiplied=64, flushed=1 << 10,
)  # fmt: skip


def tensors(
    batch: int, heads: int, kv_heads: int, Lq: int, Lk: int, D: int, R: int, dtype: torch.dtype, device: str
) -> list[Tensor]:
    """q, k, v_base, v_lr, b as a cache hands them out: views of longer buffers."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype)

    q = random(batch, Lq, heads, D).transpose(1, 2)
    k, v_base = (random(batch, kv_heads, Lk + 64, D)[:, :, :Lk] for _ in range(2))
    return [q, k, v_base, random(batch, Lk + 64, R)[:, :Lk], (random(kv_heads, R, D) / R**0.5).to(dtype)]


def eager(
    q: Tensor, k: Tensor, v_base: Tensor, v_lr: Tensor, b: Tensor, *, window: int | None, mask: Tensor | None
) -> Tensor:
    """Plain attention in the inputs' dtype, softmax in float32."""
    group = q.shape[1] // k.shape[1]
    v = (v_base + v_lr[:, None] @ b).repeat_interleave(group, 1)
    scores = (q @ k.repeat_interleave(group, 1).mT * q.shape[3] ** -0.5).float()
    Lq, Lk = q.shape[2], k.shape[2]
    distance = torch.arange(Lk - Lq, Lk, device=q.device)[:, None] - torch.arange(Lk, device=q.device)
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    hidden = hidden[None, None]
    if mask is not None:
        hidden = hidden | ~mask[:, None, None]
    return scores.masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num(0.0).to(q.dtype) @ v


def check(sizes: Sizes, deadline: float) -> tuple[int, int]:
    """Number of cases that passed, and that failed."""
    passed = failed = 0
    kinds = ("plain", "window", "padded")
    grid = itertools.product(sizes.checked, sizes.head_dims, sizes.ranks, sizes.shapes, kinds)
    for dtype, head_dim, rank, (Lq, Lk), kind in grid:
        if time.monotonic() > deadline:
            print("correctness: out of time, the rest of the grid is left out")
            break
        torch.manual_seed(passed)
        args = tensors(2, 8, 2, Lq, Lk, head_dim, rank, dtype, sizes.device)
        window = min(100, Lk // 2) if kind == "window" else None
        mask = None
        if kind == "padded":
            mask = torch.arange(Lk, device=sizes.device) >= torch.tensor([[0], [Lk // 3]], device=sizes.device)
        name = f"{str(dtype)[6:]} D {head_dim} r {rank} Lq {Lq} Lk {Lk} {kind}"
        try:
            got = flash_lora_attention(*args, window=window, key_padding_mask=mask, backend="triton")
            assert isinstance(got, Tensor)
            exact = reference_attention(*(t.double() for t in args), window=window, key_padding_mask=mask)
            assert isinstance(exact, Tensor)
            error = float((got.double() - exact).abs().max())
            allowed = 2 * float((eager(*args, window=window, mask=mask).double() - exact).abs().max())
            allowed += torch.finfo(dtype).eps * float(exact.abs().max())
        except Exception as problem:
            failed += 1
            print(f"  FAILED to run: {name}: {type(problem).__name__}: {str(problem)[:300]}")
            continue
        if error <= allowed:
            passed += 1
        else:
            failed += 1
            print(f"  WRONG: {name}: error {error:.3g}, allowed {allowed:.3g}")
    return passed, failed


def percentiles(sizes: Sizes, run: Callable[[], Any], budget_s: float = 0.4) -> tuple[float, float, float]:
    """p20, p50 and p80 of the time of a call in ms, with the L2 cache flushed before each."""
    flush = torch.empty(sizes.flushed, dtype=torch.uint8, device=sizes.device)
    for _ in range(3):
        run()
    times: list[float] = []
    end = time.monotonic() + budget_s
    while len(times) < 5 or (time.monotonic() < end and len(times) < 100):
        flush.zero_()
        if sizes.device == "cuda":
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            run()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            begin = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - begin))
    p20, p50, p80 = torch.tensor(times).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
    return p20, p50, p80


def limits(sizes: Sizes) -> tuple[float, float]:
    """Bytes a second of a large copy (read and write), and flops a second of a large matrix product."""
    source = torch.empty(sizes.copied, dtype=torch.uint8, device=sizes.device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / (percentiles(sizes, lambda: target.copy_(source))[1] / 1e3)
    n = sizes.multiplied
    a, b = (torch.randn(n, n, device=sizes.device).to(sizes.dtype) for _ in range(2))
    return bandwidth, 2 * n**3 / (percentiles(sizes, lambda: a @ b)[1] / 1e3)


def contenders(args: list[Tensor]) -> dict[str, Callable[[], Any]]:
    """What is timed. The others get V materialised beforehand."""
    q, k, v_base, v_lr, b = args
    v = v_base + v_lr[:, None] @ b
    Lq, Lk = q.shape[2], k.shape[2]

    def sdpa() -> Any:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=Lq == Lk, enable_gqa=True)

    def flex() -> Callable[[], Any]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def seen(batch: Any, head: Any, i: Any, j: Any) -> Any:
            return i + (Lk - Lq) >= j

        block_mask = create_block_mask(seen, None, None, Lq, Lk, device=q.device.type)
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda: compiled(q, k, v, block_mask=block_mask, enable_gqa=True)

    flex_run: list[Callable[[], Any]] = []

    def run_flex() -> Any:
        if not flex_run:
            flex_run.append(flex())
        return flex_run[0]()

    return {
        "triton": lambda: flash_lora_attention(q, k, v_base, v_lr, b, backend="triton"),
        "triton without LR": lambda: flash_lora_attention(q, k, v_base, backend="triton"),
        "sdpa flash": sdpa,
        "flex": run_flex,
    }


def cost(sizes: Sizes, batch: int, Lq: int, Lk: int, R: int) -> tuple[float, float]:
    """Unique bytes, and flops needed (causal pairs; the low-rank part included)."""
    D, heads, kv_heads = sizes.D, sizes.heads, sizes.kv_heads
    pairs = Lq * (Lk - Lq) + Lq * (Lq + 1) / 2
    flops = batch * heads * (pairs * (4 * D + 2 * R) + Lq * 2 * R * D)
    moved = 2.0 * (2 * batch * heads * Lq * D + 2 * batch * kv_heads * Lk * D + batch * Lk * R + kv_heads * R * D)
    return moved, flops


def speed(
    sizes: Sizes, deadline: float, bandwidth: float, rate: float, machine: dict[str, str], quick: bool
) -> list[dict[str, Any]]:
    """One row a measurement. Decode first; prefill of 64k rows at batch 8 is left out (minutes a call for some)."""
    rows: list[dict[str, Any]] = []
    lengths = sizes.lengths[:2] if quick else sizes.lengths
    for phase, batch, Lk, rank in itertools.product(("decode", "prefill"), sizes.batches, lengths, (8, 16, 64)):
        Lq = 1 if phase == "decode" else Lk
        if batch * Lq > 65536 or (Lq == 65536 and rank != 8):
            continue
        if time.monotonic() > deadline:
            print(f"speed: out of time before {phase} batch {batch} length {Lk} rank {rank} and what follows")
            break
        try:
            args = tensors(batch, sizes.heads, sizes.kv_heads, Lq, Lk, sizes.D, rank, sizes.dtype, sizes.device)
            runs = contenders(args)
        except torch.cuda.OutOfMemoryError:
            print(f"  {phase} batch {batch} length {Lk}: does not fit in memory")
            continue
        for name, run in runs.items():
            if rank != 8 and name != "triton":
                continue  # does not depend on the rank
            try:
                p20, p50, p80 = percentiles(sizes, run, 0.25)
            except Exception as problem:
                print(
                    f"  {name}: {phase} batch {batch} length {Lk}: not run ({type(problem).__name__}: {str(problem)[:120]})"
                )
                continue
            moved, flops = cost(sizes, batch, Lq, Lk, rank if name == "triton" else 0)
            of_bandwidth, of_rate = moved / p50 * 1e3 / bandwidth, flops / p50 * 1e3 / rate
            rows.append(
                machine
                | {
                    "phase": phase,
                    "batch": batch,
                    "length": Lk,
                    "rank": rank if name == "triton" else 0,
                    "kernel": name,
                }
                | {"p20_ms": f"{p20:.4f}", "p50_ms": f"{p50:.4f}", "p80_ms": f"{p80:.4f}"}
                | {"of_bandwidth": f"{of_bandwidth:.3f}", "of_matrix_rate": f"{of_rate:.3f}"}
            )
            print(f"  {phase} batch {batch} length {Lk} rank {rank} {name}: {p50:.3f} ms", flush=True)
        del args, runs
    return rows


def versions() -> dict[str, str]:
    """Device, versions and commit, for every row."""
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = "not installed"
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"device": device, "torch": torch.__version__, "triton": version, "commit": commit}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of the CSV")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for all of it")
    parser.add_argument("--quick", action="store_true", help="lengths up to 4k only")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, interpreted, tiny: to see that it runs")
    asked = parser.parse_args()
    sizes = DRY if asked.dry_run else GPU
    start = time.monotonic()
    machine = versions()
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    if asked.dry_run:
        print("dry run on a CPU: no number below means anything")
    elif not torch.cuda.is_available():
        print("No GPU: nothing to check or time. The kernels' tests run without one: pytest tests/kernels")
        return 0
    passed, failed = check(sizes, start + 0.4 * 60 * asked.minutes)
    print(f"correctness: {passed} passed, {failed} failed, {time.monotonic() - start:.0f} s")
    if failed or not passed:
        print("No speed for kernels that are wrong or do not run.")
        return 1
    bandwidth, rate = limits(sizes)
    print(f"limits measured here: {bandwidth / 1e12:.2f} TB/s, {rate / 1e12:.0f} TFLOP/s in {str(sizes.dtype)[6:]}")
    rows = speed(sizes, start + 0.92 * 60 * asked.minutes, bandwidth, rate, machine, asked.quick)
    if not rows:
        print("Nothing could be timed.")
        return 1
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / ("dry_run.csv" if asked.dry_run else "kernels_gpu.csv")
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    columns = [name for name in rows[0] if name not in machine]
    print(f"\n{path}, {len(rows)} rows, {time.monotonic() - start:.0f} s\n")
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for row in rows:
        print("| " + " | ".join(str(row[name]) for name in columns) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
