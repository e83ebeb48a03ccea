"""``python -m lragent_hf.env``: what a bug report needs to know, as Markdown to paste into it. Sends nothing anywhere."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from lragent_hf import CACHE_ARG, __version__, flash_lora_attention
from lragent_hf.bench.environment import commit, device_name
from lragent_hf.errors import BackendUnavailableError

__all__ = ["report"]

_PACKAGES = ("torch", "transformers", "peft", "triton", "accelerate", "safetensors", "numpy")
_SOME_DIGITS = 1e-4  # of the seven of float32: an error of rounding is far below, a mistake above
_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "TRITON_INTERPRET", "LRAGENT_AUTOTUNE", "CUDA_VISIBLE_DEVICES")


def report() -> str:
    """Versions, devices, attention backends and the environment variables that matter here: a Markdown table."""
    rows = [
        ("lragent_hf", f"{__version__} ({commit()})"),
        ("Python", f"{platform.python_version()}, {sys.platform} {platform.machine()}"),
        *((name, _version(name)) for name in _PACKAGES),
        ("cache argument", f"`{CACHE_ARG}`"),
        ("CPU", f"{device_name('cpu')}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads"),
        ("instructions", torch.backends.cpu.get_cpu_capability()),
        *_gpus(),
        *((f"backend `{name}`", _backend(name)) for name in ("blockwise", "triton")),
        *((f"`{name}`", os.environ[name]) for name in _VARIABLES if name in os.environ),
    ]
    cells = ((name, value.replace("|", "\\|")) for name, value in rows)
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _gpus() -> list[tuple[str, str]]:
    try:
        return _seen_gpus()
    except Exception as error:  # a driver that fails is what is to be reported
        return [("GPU", f"**fails**: {_first_line(error)}")]


def _seen_gpus() -> list[tuple[str, str]]:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        return [("GPU", f"none that torch sees (built {f'for {built}' if built else 'for the CPU only'})")]
    kind = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}"
    return [
        (f"GPU {index}", f"{card.name}, {card.total_memory / 2**30:.0f} GiB, {kind}")
        for index, card in ((i, torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count()))
    ]


def _backend(name: str) -> str:
    """Whether it runs, and agrees with the plain definition, on the device that generation would take."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 3, 32), (1, 2, 40, 32), (1, 2, 40, 32), (1, 40, 8), (2, 8, 32))
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    want: Any = flash_lora_attention(*(x.double() for x in inputs), backend="reference")
    try:
        got: Any = flash_lora_attention(*(x.to(device) for x in inputs), backend=name)
        off = ((got.cpu() - want).abs().max() / want.abs().max()).item()
    except BackendUnavailableError as error:
        return f"no: {str(error).removeprefix(f'backend {name!r}: ')}"
    except Exception as error:
        return f"**fails** on {device}: {_first_line(error)}"
    verdict = "runs" if off < _SOME_DIGITS else "**wrong**"  # NaN is wrong, too
    return f"{verdict} on {device}, error {off:.0e} of the largest output"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


if __name__ == "__main__":
    print(report())
