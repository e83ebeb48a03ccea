"""The kernels run in Triton's interpreter here: asked for before anything imports them. Scratch memory is NaN."""

import os
import sys
from pathlib import Path

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "attention"))  # cases, attention_oracle

pytest.importorskip("triton")


@pytest.fixture(autouse=True, scope="module")
def poisoned_scratch():
    torch.use_deterministic_algorithms(True, warn_only=True)  # with it, torch fills uninitialised memory with NaN
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
