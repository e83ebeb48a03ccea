"""LRAGENT_AUTOTUNE=1: measure tile sizes on this machine at the first call of a kind, instead of taking the table's.

A kind is (architecture, mode, the table's choice, dtype, padded head_dim, padded rank, length bucket); buckets are powers
of four, so that a growing cache meets a handful of them. Without the variable nothing is ever measured.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable

from torch import Tensor

from .configs import Architecture, Config
from .plan import Plan, power_of_two

__all__ = ["ENABLED", "candidates", "length_bucket", "tuned"]

ENABLED = os.environ.get("LRAGENT_AUTOTUNE", "0") == "1"

_log = logging.getLogger("lragent_hf")
_best: dict[tuple[object, ...], Config] = {}


def length_bucket(Lk: int) -> int:
    """1024, 4096, 16384, ...: the smallest power of four times 1024 that is at least Lk."""
    bucket = 1024
    while bucket < Lk:
        bucket *= 4
    return bucket


def candidates(config: Config) -> list[Config]:
    """The table's choice first, then its neighbours: keys a tile, warps and stages, up and down. BM stays."""
    tries = [config]
    for BN in (config.BN // 2, config.BN, config.BN * 2):
        for warps in (config.warps // 2, config.warps, config.warps * 2):
            for stages in (config.stages - 1, config.stages, config.stages + 1):
                one = dataclasses.replace(config, BN=BN, warps=warps, stages=stages)
                if 16 <= BN <= 256 and 2 <= warps <= 8 and stages >= 1 and one not in tries:
                    tries.append(one)
    return tries


def tuned(way: Plan, arch: Architecture, q: Tensor, rank: int, Lk: int, run: Callable[[Plan], None]) -> Plan:
    """`way` with the fastest configuration for calls of its kind, measured with `run` if this is the first of them."""
    kind = (arch.name, way.mode, way.config, q.dtype, power_of_two(q.shape[3]), power_of_two(rank), length_bucket(Lk))
    if kind not in _best:
        times = {}
        for config in candidates(way.config):
            try:
                times[config] = _measure(lambda config=config: run(dataclasses.replace(way, config=config)))  # type: ignore[misc]
            except Exception as error:  # too much shared memory, too few registers: not a candidate here
                _log.debug("autotune: %s cannot run here: %s", config, error)
        if not times:
            raise RuntimeError(f"LRAGENT_AUTOTUNE: no configuration runs for {kind}; unset it to see the table's fail.")
        _best[kind] = min(times, key=times.__getitem__)
        _log.info("autotune: %s: %s, %.3f ms", kind, _best[kind], times[_best[kind]])
    return dataclasses.replace(way, config=_best[kind])


def _measure(run: Callable[[], None]) -> float:
    from triton.testing import do_bench

    return float(do_bench(run, warmup=5, rep=20, return_mode="median"))
