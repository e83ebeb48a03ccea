"""Shared by all tests: memory that nobody has written is NaN."""

import os
from typing import Any

import pytest
import torch

# Before anything imports triton: without a GPU, kernels run in its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")

from tiny import SCHEMES


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    """Every scheme in turn."""
    return str(request.param)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever reads a buffer beyond what was written gets NaN, and shows it."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        if tensor.is_floating_point() and tensor.device.type == "cpu":
            tensor.fill_(float("nan"))
        return tensor

    monkeypatch.setattr(torch, "empty", poisoned)
