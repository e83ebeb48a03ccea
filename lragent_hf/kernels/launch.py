"""From tensors to kernel launches."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
from torch import Tensor

from . import tune
from .attend import attend_kernel
from .combine import combine_kernel, live_tiles_kernel
from .configs import Architecture, Config, architecture
from .plan import MAX_SPLITS, Plan, plan, power_of_two

__all__ = ["INTERPRETED", "attend", "constants"]

INTERPRETED = not isinstance(attend_kernel, triton.runtime.JITFunction)
"""Whether the kernels run in Triton's interpreter (TRITON_INTERPRET=1 when this package was first imported)."""

OPTIONS = {"enable_fp_fusion": True}
"""Said outright: the default changes with Triton 3.10."""

_LOG2E = math.log2(math.e)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr: Tensor | None,
    b: Tensor | None,
    klr: Tensor | None,
    bk: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    interleaved: bool,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Fill out [B, Hq, Lq, D] and lse [B, Hq, Lq] (float32, contiguous). Arguments as for `flash_lora_attention`."""
    batch, heads, Lq, D = q.shape
    if q.numel() == 0:
        return
    arch = architecture(q.device)
    rank = 0 if lr is None else lr.shape[2]
    way = plan(
        batch, heads, k.shape[1], Lq, k.shape[2], D, q.element_size(), rank,
        processors=_processors(q.device), architecture=arch, window=window, key_lr=klr is not None,
    )  # fmt: skip
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    lr, b, klr, bk, cos, sin, mask = (_unit(t) for t in (lr, b, klr, bk, cos, sin, mask))
    if cos is not None and sin is not None and cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    arguments = (q, k, v, lr, b, klr, bk, cos, sin, mask, scale, causal, window, softcap, interleaved, out, lse)
    if tune.ENABLED and not INTERPRETED:
        way = tune.tuned(way, arch, q, rank, k.shape[2], lambda candidate: _run(candidate, *arguments))
    _run(way, *arguments)


def _run(
    way: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr: Tensor | None,
    b: Tensor | None,
    klr: Tensor | None,
    bk: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    interleaved: bool,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    batch, heads, Lq, D = q.shape
    Lk, config = k.shape[2], way.config
    tiles = before = None
    if mask is not None:
        mask = mask.view(torch.uint8)
        tiles, before = _live_tiles(mask, config.BN)
    rows = batch * heads * Lq
    R = 0 if lr is None else lr.shape[2]
    split = leaves_parts(way, architecture(q.device), q.element_size(), R)
    part = part_lr = part_lse = None
    if split:
        part = q.new_empty(way.splits, rows, D, dtype=torch.float32)
        part_lr = q.new_empty(way.splits, rows, R, dtype=torch.float32)
        part_lse = q.new_empty(way.splits, rows, dtype=torch.float32)

    statics = constants(
        config, D=D, R=R, RK=0 if klr is None else klr.shape[2], group=heads // k.shape[1], pack=way.pack, split=split,
        rotary=0 if cos is None else 2 * cos.shape[-1], interleaved=interleaved, causal=causal, window=window is not None,
        padded=mask is not None, capped=softcap is not None, lse=lse is not None,
        lr_align=_align(lr), klr_align=_align(klr),
    )  # fmt: skip
    grid = batch * heads // way.pack * -(-Lq * way.pack // config.BM) * way.splits
    attend_kernel[(grid,)](
        q, k, v, lr, b, klr, bk, cos, sin, mask, tiles, before,
        part if split else out, part_lr if R else None, part_lse if split else lse,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *_row_strides(lr), *_b_strides(b),
        *_row_strides(klr), *_b_strides(bk), *_angle_strides(cos, batch),
        0 if mask is None else mask.stride(0), 0 if tiles is None else tiles.stride(0), *out.stride()[:3],
        Lq, Lk, heads // way.pack, way.splits, window or 0,
        scale * _LOG2E if softcap is None else scale / softcap, (softcap or 0.0) * _LOG2E,
        **statics, num_warps=config.warps, num_stages=config.stages, **OPTIONS,
    )  # fmt: skip
    if split:
        BD, BR = power_of_two(D), power_of_two(R)
        combine_kernel[(rows,)](
            part, part_lr, part_lse, b, out, lse, *_b_strides(b), *out.stride()[:3], Lq, heads, way.splits, rows,
            GROUP=heads // k.shape[1], D=D, R=R, LSE=lse is not None, BS=MAX_SPLITS, BD=BD, BR=BR,
            CH=min(32, 4096 // max(BD, BR)), CR=min(BR, 4096 // BD), num_warps=4, **OPTIONS,
        )  # fmt: skip


def constants(
    config: Config,
    *,
    D: int,
    R: int,
    RK: int,
    group: int,
    pack: int,
    split: bool,
    rotary: int = 0,
    interleaved: bool = False,
    causal: bool = True,
    window: bool = False,
    padded: bool = False,
    capped: bool = False,
    lse: bool = False,
    lr_align: int = 8,
    klr_align: int = 8,
) -> dict[str, Any]:
    """The compile-time arguments of `attend_kernel`."""
    return {
        "GROUP": group, "PACK": pack, "SPLIT": split, "D": D, "R": R, "RK": RK, "ROTARY": rotary,
        "INTERLEAVED": interleaved, "CAUSAL": causal, "WINDOW": window, "PADDED": padded, "CAPPED": capped, "LSE": lse,
        "BM": config.BM, "BN": config.BN, "BD": power_of_two(D), "BR": power_of_two(R), "BRK": power_of_two(RK),
        "LR_ALIGN": lr_align, "KLR_ALIGN": klr_align,
    }  # fmt: skip


def leaves_parts(way: Plan, arch: Architecture, itemsize: int, R: int) -> bool:
    """Whether the attention kernel leaves its parts in rank space to the combine kernel."""
    return way.splits > 1 or (itemsize == 4 and R > 0 and not arch.float32_units)


def _live_tiles(mask: Tensor, BN: int) -> tuple[Tensor, Tensor]:
    """For each row of the mask [B, Lk] uint8 the numbers of its tiles with a key to see, and counts before each tile."""
    batch, Lk = mask.shape
    count = -(-Lk // BN)
    both = torch.empty(2, batch, count + 1, dtype=torch.int32, device=mask.device)
    CH = min(power_of_two(count), 4096 // BN)
    live_tiles_kernel[(batch,)](
        mask, both[0], both[1], mask.stride(0), both.stride(1), Lk, count, BN=BN, CH=CH, num_warps=4
    )
    return both[0], both[1]


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count


def _unit(t: Tensor | None) -> Tensor | None:
    """t with unit last stride. Only small tensors should need the copy: the cache's buffers have it."""
    return t if t is None or t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _align(t: Tensor | None) -> int:
    """The largest power of two, up to 16, that divides the distance between rows: how wide they may be read."""
    return 1 if t is None else math.gcd(t.stride(1), 16) or 16


def _row_strides(t: Tensor | None) -> tuple[int, int]:
    return (0, 0) if t is None else (t.stride(0), t.stride(1) // _align(t))


def _b_strides(b: Tensor | None) -> tuple[int, int, int]:
    if b is None:
        return (0, 0, 0)
    return (b.stride(0), b.stride(1), b.stride(2)) if b.dim() == 4 else (0, b.stride(0), b.stride(1))


def _angle_strides(cos: Tensor | None, batch: int) -> tuple[int, int]:
    if cos is None:
        return (0, 0)
    return (0 if cos.dim() == 2 or cos.shape[0] == 1 else cos.stride(0), cos.stride(-2))
