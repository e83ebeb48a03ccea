"""The kernels run in Triton's interpreter here: asked for before anything imports them. Scratch memory is NaN."""

import os
import sys
from pathlib import Path

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "attention"))  # cases, attention_oracle

pytest.importorskip("triton")

from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch_lang_tensor_and_index(tensor, scope):
    """Triton 3.6 makes int() of arrays of one element, which numpy forbids since; later ones do what this does."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_lang_tensor_and_index


@pytest.fixture(autouse=True, scope="module")
def poisoned_scratch():
    torch.use_deterministic_algorithms(True, warn_only=True)  # with it, torch fills uninitialised memory with NaN
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
