"""Tile sizes by architecture, in one place. Chosen by reasoning and from compiled code, not measured: see README.md.

A configuration depends on the architecture, on what the kernel does ("prefill", "decode": up to 16 packed rows, "split":
more rows), on the size of an element and on head_dim; never on the lengths, so a length seen for the first time compiles
nothing. Every row was checked by `python -m lragent_hf.kernels.aot`: registers, spills, shared memory, instructions.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

__all__ = ["ARCHITECTURES", "Config", "architecture", "config_for"]


@dataclass(frozen=True)
class Config:
    """BM rows by BN keys a tile, warps a program, and stages of the loads' pipeline."""

    BM: int
    BN: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Architecture:
    """`shared_memory`: bytes one program may use. `resident`: programs a processor should hold while decoding.

    `key_lr`: the largest tile with key LR, and its warps. It makes [BN, D] of turned float32 keys in registers, and a
    pipeline would hold cos and sin, [BN, D] too, in more shared memory than there is.

    `float32_units`: whether matrix units take full float32. Where not, a product of [BM, R] and [R, D] unrolls into more
    registers than there are, and float32 calls leave the expansion by B to the combine kernel even with one split.
    """

    name: str
    shared_memory: int
    float32_units: bool
    table: dict[tuple[str, int, int, int], Config]  # (mode, bytes an element, largest head_dim, largest padded rank)
    resident: int = 2
    key_lr: Config = Config(64, 32, 8, 1)


def _rows(mode: str, itemsize: int, d64: Config, d128: Config, d256: Config) -> dict[tuple[str, int, int, int], Config]:
    return {(mode, itemsize, 64, 128): d64, (mode, itemsize, 128, 128): d128, (mode, itemsize, 256, 128): d256}


# Full float32 products have no tensor cores on NVIDIA: small tiles. The assembler decides how many registers to aim at
# before it has allocated any, and then spills a few words; which tiles escape that is found by compiling, not by reasoning.
_FLOAT32 = {
    **_rows("prefill", 4, Config(32, 32, 8, 1), Config(32, 32, 8, 1), Config(16, 32, 8, 1)),
    **_rows("decode", 4, Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 32, 8, 1)),
    ("decode", 4, 64, 64): Config(16, 32, 8, 1),
    **_rows("split", 4, Config(32, 32, 8, 1), Config(16, 16, 8, 1), Config(16, 32, 8, 1)),
    **{(mode, 4, 64, 16): Config(16, 32, 4, 1) for mode in ("prefill", "decode", "split")},
    **{(mode, 4, 128, 64): Config(16, 32, 4, 1) for mode in ("decode", "split")},
    ("prefill", 4, 96, 128): Config(32, 32, 8, 2),  # masked columns: loads into registers would cost too many
    **{(mode, 4, 96, 128): Config(16, 32, 8, 2) for mode in ("decode", "split")},
}

ARCHITECTURES = {
    row.name: row
    for row in (
        Architecture(
            "sm_80",
            shared_memory=166912,
            float32_units=False,
            table={
                **_rows("prefill", 2, Config(128, 64, 8, 3), Config(128, 32, 8, 1), Config(64, 32, 8, 1)),
                ("prefill", 2, 128, 16): Config(128, 32, 8, 2),
                **_rows("decode", 2, Config(16, 64, 4, 3), Config(16, 32, 4, 3), Config(16, 32, 4, 3)),
                **_rows("split", 2, Config(64, 64, 4, 3), Config(64, 32, 8, 3), Config(64, 32, 8, 2)),
                **_FLOAT32,
            },
        ),
        Architecture(  # also sm_89 and sm_120: the same instructions with 99 KB of shared memory
            "sm_86",
            shared_memory=101376,
            float32_units=False,
            table={
                **_rows("prefill", 2, Config(128, 64, 8, 2), Config(128, 32, 8, 1), Config(64, 32, 8, 1)),
                ("prefill", 2, 128, 16): Config(128, 32, 8, 2),
                **_rows("decode", 2, Config(16, 64, 4, 3), Config(16, 32, 4, 3), Config(16, 32, 4, 2)),
                **_rows("split", 2, Config(64, 64, 4, 2), Config(64, 32, 8, 2), Config(64, 32, 8, 1)),
                **_FLOAT32,
            },
        ),
        Architecture(
            "sm_90",
            shared_memory=232448,
            float32_units=False,
            table={
                **_rows("prefill", 2, Config(128, 128, 8, 2), Config(128, 64, 8, 3), Config(64, 64, 8, 2)),
                **_rows("decode", 2, Config(16, 64, 4, 3), Config(16, 32, 4, 3), Config(16, 32, 4, 3)),
                **_rows("split", 2, Config(64, 64, 4, 3), Config(64, 32, 4, 3), Config(64, 64, 8, 2)),
                ("split", 2, 128, 16): Config(64, 64, 4, 3),
                **_FLOAT32,
            },
        ),
        Architecture(
            "sm_100",
            shared_memory=232448,
            float32_units=False,
            table={
                **_rows("prefill", 2, Config(128, 128, 8, 2), Config(128, 64, 8, 3), Config(64, 64, 8, 2)),
                **_rows("decode", 2, Config(16, 64, 4, 3), Config(16, 32, 4, 3), Config(16, 32, 4, 3)),
                **_rows("split", 2, Config(64, 64, 4, 3), Config(64, 64, 4, 3), Config(64, 64, 8, 2)),
                **_FLOAT32,
            },
        ),
        Architecture(  # matrix units take float32 whole; 64 lanes a warp, 64 KB of shared memory
            "gfx942",
            shared_memory=65536,
            float32_units=True,
            key_lr=Config(64, 32, 4, 1),
            table={
                **_rows("prefill", 2, Config(128, 64, 4, 1), Config(128, 64, 4, 1), Config(64, 32, 4, 1)),
                **_rows("decode", 2, Config(16, 64, 4, 2), Config(16, 64, 4, 1), Config(16, 32, 4, 1)),
                **_rows("split", 2, Config(64, 64, 4, 1), Config(64, 64, 4, 1), Config(64, 32, 4, 1)),
                **_rows("prefill", 4, Config(64, 32, 4, 1), Config(64, 32, 4, 1), Config(32, 16, 4, 1)),
                **_rows("decode", 4, Config(16, 32, 4, 1), Config(16, 32, 4, 1), Config(16, 16, 4, 1)),
                **_rows("split", 4, Config(64, 32, 4, 1), Config(64, 32, 4, 1), Config(32, 16, 4, 1)),
            },
        ),
        Architecture(
            "interpreter",
            shared_memory=1 << 30,
            float32_units=True,
            table={(mode, 4, 256, 128): Config(32, 32, 1, 1) for mode in ("prefill", "decode", "split")},
        ),
    )
}


def config_for(
    architecture: Architecture, mode: str, itemsize: int, D: int, padded_R: int = 16, key_lr: bool = False
) -> Config:
    """The tightest row for a mode ("prefill", "decode" or "split"), bytes an element, head_dim and padded rank."""
    size = (itemsize, D, padded_R)
    fits = [
        key for key in architecture.table if key[0] == mode and all(a >= b for a, b in zip(key[1:], size, strict=True))
    ]
    config = architecture.table[min(fits, key=lambda key: key[1:])]
    if key_lr:
        most = architecture.key_lr
        config = Config(min(config.BM, most.BM), min(config.BN, most.BN), most.warps, most.stages)
    return config


@functools.cache
def architecture(device: torch.device) -> Architecture:
    """The row of the table for a device: its own, or the nearest older one of its kind."""
    if device.type != "cuda":
        return ARCHITECTURES["interpreter"]
    if torch.version.hip is not None:
        return ARCHITECTURES["gfx942"]
    major, minor = torch.cuda.get_device_capability(device)
    if major == 9:
        return ARCHITECTURES["sm_90"]
    if major in (10, 11):
        return ARCHITECTURES["sm_100"]
    return ARCHITECTURES["sm_80" if (major, minor) in ((8, 0), (8, 7)) else "sm_86"]
