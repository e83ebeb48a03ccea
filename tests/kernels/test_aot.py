"""The kernels compiled ahead of time for real architectures, in a subprocess (this one interprets)."""

import os
import subprocess
import sys

import pytest

from lragent_hf.kernels.cost import flops

ARCHES = ["sm_80", "sm_90", "sm_100", "gfx942"]
NVIDIA_AND_AMD = ["sm_90", "gfx942"]
OTHERS = [pytest.param(arch, marks=pytest.mark.slow) for arch in ARCHES if arch not in NVIDIA_AND_AMD]


def compile_all(*arguments, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)  # compile, do not recall
    command = [sys.executable, "-m", "lragent_hf.kernels.aot", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return [line.split() for line in done.stdout.splitlines() if " of " in line]


@pytest.mark.parametrize("arch", NVIDIA_AND_AMD + OTHERS)
def test_every_dtype_at_head_dim_128(arch, tmp_path):
    asked = ("--arch", arch, "--D", 128, "--rank", 8, "--mode", "prefill", "decode")
    assert len(compile_all(*asked, tmp_path=tmp_path)) == 6


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["prefill", "decode", "split"])
@pytest.mark.parametrize("arch", ARCHES)
def test_every_mode_dtype_head_dim_and_rank(arch, mode, tmp_path):
    asked = ("--arch", arch, "--mode", mode, "--D", 64, 128, 256, "--rank", 8, 16, 64)
    assert len(compile_all(*asked, tmp_path=tmp_path)) == 3 * 3 * 3


@pytest.mark.parametrize("arch", NVIDIA_AND_AMD + OTHERS)
def test_keys_and_values_are_read_16_bytes_wide(arch, tmp_path):
    """Without LR every load of the kernel is one of Q, K or V_base."""
    asked = ("--D", 64, 128, "--rank", 0, "--dtype", "bf16", "--mode", "prefill", "decode")
    assert len(compile_all("--arch", arch, *asked, tmp_path=tmp_path)) == 4


def test_tensor_core_instructions_grow_as_the_cost_model_says(tmp_path):
    """Over one tile size, so instructions of the inner loops are to each other as flops a pair of query and key."""
    asked = ("--arch", "sm_80", "--D", 128, "--rank", 0, 8, 64, "--dtype", "fp16", "--mode", "prefill")
    lines = compile_all(*asked, tmp_path=tmp_path)
    assert len({line[6] for line in lines}) == 1  # the tile
    counted = [int(line[-3]) for line in lines]
    for rank, mma in zip((0, 8, 64), counted, strict=True):
        assert mma / counted[0] - 1 == flops(1, 1, 1, 0, 128, rank).overhead


def test_the_compile_command_refuses_to_interpret():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "lragent_hf.kernels.aot", "--arch", "sm_80"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode
    assert "unset it" in done.stderr
