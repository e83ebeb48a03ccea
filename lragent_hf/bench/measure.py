"""Clock and memory of one pass."""

import ctypes
import gc
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

__all__ = ["PeakMemory", "free_memory", "make_clock", "ran_out_of_memory"]

_PROC = Path("/proc/self")


def make_clock(device: str) -> Callable[[], float]:
    """Seconds, asked once the device has done what it was given."""
    if not device.startswith("cuda"):
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


class PeakMemory:
    """The most memory in use inside the ``with``: allocated on the GPU, or resident on the CPU (Linux).

    Attributes:
        peak: bytes, weights included; ``None`` where it cannot be told.
        growth: bytes beyond what was in use before.
    """

    def __init__(self, device: str):
        self.device = device
        self.peak: int | None = None
        self.growth: int | None = None

    def __enter__(self) -> "PeakMemory":
        free_memory(self.device)
        if self.device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before: int | None = torch.cuda.memory_allocated(self.device)
        else:
            self._before = _resident("VmRSS") if _reset_resident_peak() else None
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is None:
            return
        cuda = self.device.startswith("cuda")
        self.peak = torch.cuda.max_memory_allocated(self.device) if cuda else _resident("VmHWM")
        if self.peak is not None:
            self.growth = max(0, self.peak - self._before)


def free_memory(device: str) -> None:
    """Give back what nobody holds, so that the next pass starts from the same place."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether that is what went wrong. Torch's CPU allocator says so in words only."""
    said = str(error).lower()
    words = ("out of memory", "not enough memory", "can't allocate", "cannot allocate", "unable to allocate")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(word in said for word in words)
    )


def _reset_resident_peak() -> bool:
    try:
        (_PROC / "clear_refs").write_text("5")  # VmHWM := VmRSS (proc_pid_clear_refs(5))
    except OSError:
        return False
    return True


def _resident(field: str) -> int | None:
    """A line of /proc/self/status, in bytes (the kernel counts in kB of 1024)."""
    with suppress(OSError):
        for line in (_PROC / "status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None
