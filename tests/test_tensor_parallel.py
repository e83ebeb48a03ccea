"""A model that is split over two processes gives what a whole one gives, and each keeps half of K and V."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft.tuners.lora.model
import pytest
import torch
from tiny import SCHEMES, base_model, config, peft_model

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    not hasattr(peft.tuners.lora.model, "get_tp_plan_and_mesh")
    or importlib.util.find_spec("transformers.distributed") is None,
    reason="this PEFT does not split LoRA over processes",
)


def on_two_processes(*command: str | Path) -> None:
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *map(str, command)],
        check=True, timeout=600, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two processes found."""
    folder = tmp_path_factory.mktemp("split")
    cfg = config(num_attention_heads=8, num_key_value_heads=2, hidden_size=64)
    base_model(cfg).save_pretrained(folder / "base")
    for kind, options in {
        "qv": {},
        "qkvo": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    }.items():
        peft_model(cfg, shared=True, **options).save_pretrained(folder / kind)
    on_two_processes(HERE / "tensor_parallel_worker.py", str(folder))
    on_two_processes(HERE.parent / "examples/tensor_parallel.py", "--model", str(folder / "base"), "--adapters",
                     str(folder / "qv"), "--tokens", "3")  # fmt: skip
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("rank", range(2))
def test_results_are_those_of_one_process(found: list[dict[str, Any]], rank: int) -> None:
    errors = found[rank]["errors"]
    assert {*SCHEMES, "window", "keep", "branch", "saved", "audit"} <= set(errors)
    worst = max(errors, key=errors.get)
    bound = 200 * torch.finfo(torch.float32).eps
    assert {name: error for name, error in errors.items() if name != "audit" and error > bound} == {}, worst
    assert errors["audit"] < 1e-3  # KL, whose own size is that of the logits' differences


def test_each_process_keeps_its_heads_and_all_of_the_lr(found: list[dict[str, Any]]) -> None:
    for one in found:
        split, whole = one["bytes"]
        assert {part: whole[part] // size for part, size in split.items()} == {"K": 2, "V_base": 2, "LR": 1}
