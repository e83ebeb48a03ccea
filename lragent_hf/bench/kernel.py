"""Attention alone: Flash-LoRA-Attention against sdpa, and against putting V together first (LRAgent, figure 4).

The contenders, on the same tensors (K, V_base and LR are views of longer buffers, as the cache hands them out):

    sdpa            V put together beforehand, not timed: attention over a plain cache, as transformers calls it
    reconstructed   V = V_base + V_lr B at every call, then sdpa
    blockwise       flash_lora_attention, LR included
    without LR      flash_lora_attention over V_base alone
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..attention import flash_lora_attention
from ..attention.reference import reference_attention
from .stats import percentiles

__all__ = ["SHAPES", "run"]

SHAPES: dict[str, tuple[int, int, int]] = {
    "small": (8, 2, 64),
    "smollm2-135m": (9, 3, 64),
    "llama-3.1-8b": (32, 8, 128),
}
"""Query heads, kv heads, head_dim."""
_CASES = {"prefill": 1024, "decode": 1}


def run(shape: str, length: int, rank: int, dtypes: list[str], repeats: int, threads: int | None) -> dict[str, float]:
    """Verify, then time prefill (1024 on ``length``) and decode (1 on ``length``), interleaved; print ratios to sdpa.

    Returns:
        "case dtype" -> median time of flash_lora_attention with LR over sdpa's.
    """
    if threads:
        torch.set_num_threads(threads)
    heads, kv_heads, D = SHAPES[shape]
    print(
        f"{shape}: {heads} query and {kv_heads} kv heads, head_dim {D}, rank {rank}, {length} keys, "
        f"{torch.get_num_threads()} threads, {repeats} interleaved repeats"
    )
    ratios: dict[str, float] = {}
    for name in dtypes:
        for case, rows in _CASES.items():
            contenders = _contenders(heads, kv_heads, rows, length, D, rank, getattr(torch, name))
            times = _interleaved(contenders, repeats if case == "prefill" else repeats * 20)
            base = median(times["sdpa"])
            print(f"{case}, {name}")
            for contender, group in times.items():
                low, mid, high = percentiles(group)
                print(
                    f"  {contender:14}{low * 1e3:9.3f} {mid * 1e3:9.3f} {high * 1e3:9.3f} ms p20/p50/p80"
                    f"{mid / base:8.2f} of sdpa"
                )
            ratios[f"{case} {name}"] = median(times["blockwise"]) / base
    return ratios


@torch.inference_mode()
def _contenders(
    heads: int, kv_heads: int, rows: int, length: int, D: int, rank: int, dtype: torch.dtype
) -> dict[str, Callable[[], Tensor]]:
    """What is timed, verified against the definition in float64."""
    torch.manual_seed(0)
    q = torch.randn(1, rows, heads, D).to(dtype).transpose(1, 2)
    k, v_base = (torch.randn(1, kv_heads, length + length // 8, D).to(dtype)[:, :, :length] for _ in range(2))
    v_lr = torch.randn(1, length + length // 8, rank).to(dtype)[:, :length]
    b = (torch.randn(kv_heads, rank, D) / rank**0.5).to(dtype)
    v = v_base + v_lr[:, None] @ b
    mask = torch.ones(rows, length, dtype=torch.bool).tril_(length - rows)[None, None] if rows > 1 else None

    def sdpa(values: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, values, attn_mask=mask, enable_gqa=True)

    contenders: dict[str, Callable[[], Any]] = {
        "sdpa": lambda: sdpa(v),
        "reconstructed": lambda: sdpa(v_base + v_lr[:, None] @ b),
        "blockwise": lambda: flash_lora_attention(q, k, v_base, v_lr, b, backend="blockwise"),
        "without LR": lambda: flash_lora_attention(q, k, v_base, backend="blockwise"),
    }
    exact = reference_attention(*(t.double() for t in (q, k, v_base, v_lr, b)))
    errors = {name: float((run().double() - exact).abs().max()) for name, run in contenders.items()}
    allowed = 2 * errors["reconstructed"] + 4 * torch.finfo(dtype).eps
    for name in ("sdpa", "blockwise"):
        if not errors[name] <= allowed:
            raise SystemExit(f"{name} is wrong: off by {errors[name]:.3g}, allowed {allowed:.3g}. No time is printed.")
    return contenders


@torch.inference_mode()
def _interleaved(contenders: dict[str, Callable[[], Tensor]], repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    for _ in range(repeats):
        for name, run in contenders.items():
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)
    return times
