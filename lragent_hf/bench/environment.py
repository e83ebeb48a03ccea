"""Where a measurement was made: columns that go with every row."""

import hashlib
import platform
import subprocess
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

__all__ = ["commit", "device_name", "environment", "set_up"]

_PACKAGE = Path(__file__).resolve().parents[1]
_AGENTS = _PACKAGE.parent / "examples" / "agents"


def environment(device: str, *, agents: bool = False) -> dict[str, str]:
    """Device, versions, commit, date. ``agents``: the commit is that of examples/agents, too."""
    return {
        "device": device,
        "device_name": device_name(device),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "peft": version("peft"),
        "commit": commit(*([_AGENTS] if agents and _AGENTS.is_dir() else [])),
        "date": time.strftime("%Y-%m-%d"),
    }


def set_up(device: str | None = None, threads: int | None = None) -> str:
    """Set torch's threads, if asked to; returns the device: a GPU if there is one, unless another is named."""
    if threads:
        torch.set_num_threads(threads)
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def device_name(device: str) -> str:
    """What the maker calls it."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit(*more: Path) -> str:
    """Names the code that ran, this package and ``more`` folders: the commit's short hash; with a digest of the sources if
    they are not those committed.

    ``1a2b3c4``, ``1a2b3c4+dirty.5d6e7f``, or outside a repository ``0.1.0+src.5d6e7f``.
    """
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:  # no git, or a repository of something else
        with suppress(PackageNotFoundError):
            return f"{version('lragent_hf')}+src.{_digest(*more)}"
        return f"src.{_digest(*more)}"
    head = _git("rev-parse", "--short", "HEAD") or "unknown"
    return f"{head}+dirty.{_digest(*more)}" if _git("status", "--porcelain", "--", ".", *map(str, more)) else head


def _git(*arguments: str) -> str | None:
    try:
        run = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=_PACKAGE, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


def _digest(*more: Path) -> str:
    digest = hashlib.sha256()
    for folder in (_PACKAGE, *more):
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:6]
