"""Sizes of the models that the benchmarks know by name."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..schemes import DROIDSPEAK_LAYERS

__all__ = ["SHAPES", "Shape", "recompute_layers"]


@dataclass(frozen=True)
class Shape:
    """A Llama-like decoder: what decides its cache and its cost."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int


SHAPES: dict[str, Shape] = {
    "tiny": Shape(2, 64, 4, 2, 16, 192, 2048),
    "small": Shape(8, 512, 8, 2, 64, 1536, 2048),
    "smollm2-135m": Shape(30, 576, 9, 3, 64, 1536, 49152),
    "llama-3.1-8b": Shape(32, 4096, 32, 8, 128, 14336, 128256),
    "ministral-8b": Shape(36, 4096, 32, 8, 128, 12288, 131072),
}
"""The last two are the models of the paper (LRAgent, arXiv 2602.01053, section 5)."""


def recompute_layers(name: str, layers: int) -> Sequence[int]:
    """Layers that ``droidspeak`` recomputes: the paper's for its models, else every third, from layer 1 on."""
    return DROIDSPEAK_LAYERS.get(name, range(1, layers, 3))
