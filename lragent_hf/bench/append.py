"""What appending one token costs, at a short and at a long cache: it should be the same."""

import time
from statistics import median

import torch

from ..storage import SharedLayer

__all__ = ["run"]

_SHAPE = (1, 8, 1, 128)  # one token of Llama-3.1-8B's K or V
_APPENDS = 400


def run(lengths: tuple[int, int], repeats: int) -> None:
    """Time appends of K and V to one layer at each of ``lengths``, interleaved; print medians and their ratio."""
    token = torch.randn(_SHAPE)
    layers = {length: _filled(length) for length in lengths}
    for length, layer in layers.items():  # verify before timing
        layer.write_kv(None, length, token, token)
        if not torch.equal(layer.k[None].read(length + 1, length), token):
            raise SystemExit("append wrote something else than it was given")
    single: dict[int, list[float]] = {length: [] for length in lengths}
    for repeat in range(repeats):
        for length, layer in layers.items():
            start = length + 1 + repeat * _APPENDS
            for position in range(start, start + _APPENDS):
                begin = time.perf_counter()
                layer.write_kv(None, position, token, token)
                single[length].append(time.perf_counter() - begin)
    for length, times in single.items():
        mean = sum(times) / len(times)
        print(
            f"{length:>7} tokens: {median(times) * 1e6:7.2f} us an append (median), {mean * 1e6:7.2f} us with growth (mean)"
        )
    short, long = (median(single[length]) for length in lengths)
    print(f"ratio of medians, {lengths[1]} to {lengths[0]} tokens: {long / short:.2f}")


def _filled(length: int) -> SharedLayer:
    layer = SharedLayer()
    rows = torch.randn(1, 8, length, 128)
    layer.write_kv(None, 0, rows, rows)
    return layer
