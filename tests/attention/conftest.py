"""Scratch memory is poisoned: what torch.empty hands out reads as NaN, so a value used before it is written shows."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def poisoned_scratch():
    torch.use_deterministic_algorithms(True, warn_only=True)  # with it, torch fills uninitialised memory with NaN
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
