"""Which way a call is run: prefill or split-KV, into how many shares, with which tiles. Plain arithmetic, no Triton."""

from __future__ import annotations

from dataclasses import dataclass

from .configs import Architecture, Config, config_for

__all__ = ["MAX_SPLITS", "Plan", "plan", "power_of_two"]

MAX_SPLITS = 128
_MIN_KEYS = 256  # keys a share should have at least: below, writing and merging its part costs more than it saves
_DECODE_ROWS = 16


@dataclass(frozen=True)
class Plan:
    """`pack`: query heads of one kv head in a tile (1 or all of the group). `splits`: shares of the keys, 1 = whole."""

    mode: str
    pack: int
    splits: int
    config: Config


def power_of_two(n: int, least: int = 16) -> int:
    """The smallest power of two that is at least n and at least `least`."""
    return max(least, 1 << (n - 1).bit_length())


def plan(
    batch: int,
    heads: int,
    kv_heads: int,
    Lq: int,
    Lk: int,
    D: int,
    itemsize: int,
    rank: int = 0,
    *,
    processors: int,
    architecture: Architecture,
    window: int | None = None,
    key_lr: bool = False,
) -> Plan:
    """The rule for every Lq, few or many.

    1. The Lq * Hq / Hkv rows of a group fit one tile of "decode" (16 rows) or "split": packed split-KV. It reads each key
       once, prefill would read it once for every query head.
    2. More rows, and the prefill grid gives every processor a tile: prefill. No parts to write and merge.
    3. More rows, but processors would idle, and the keys are long enough to split (256 a share): packed split-KV.
       Otherwise prefill.

    The number of shares fills every processor with `architecture.resident` programs, as far as there are 256 keys a share.
    """
    sizes = itemsize, D, power_of_two(rank)
    group = heads // kv_heads
    rows = Lq * group
    mode = "decode" if rows <= _DECODE_ROWS else "split"
    split = config_for(architecture, mode, *sizes, key_lr)
    prefill = config_for(architecture, "prefill", *sizes, key_lr)

    keys = Lk if window is None else min(Lk, window + Lq)
    programs = max(1, batch * kv_heads * _tiles(rows, split.BM))
    splits = max(1, min(processors * architecture.resident // programs, keys // _MIN_KEYS, MAX_SPLITS))
    if rows <= split.BM:
        return Plan(mode, group, splits, split)
    if batch * heads * _tiles(Lq, prefill.BM) >= processors or splits == 1:
        return Plan("prefill", 1, 1, prefill)
    return Plan(mode, group, splits, split)


def _tiles(n: int, size: int) -> int:
    return -(-n // size)
