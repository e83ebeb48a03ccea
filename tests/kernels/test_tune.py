"""Autotuning: off unless asked for, and then a handful of measurements, not one for each length."""

import dataclasses

import pytest
import torch

from lragent_hf.attention import flash_lora_attention
from lragent_hf.kernels import launch, tune
from lragent_hf.kernels.configs import ARCHITECTURES, config_for
from lragent_hf.kernels.plan import Plan, plan

ARCH = ARCHITECTURES["sm_90"]


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(tune, "_best", {})


def way(Lk):
    return plan(1, 32, 8, 1, Lk, 128, 2, 8, processors=132, architecture=ARCH)


def test_a_growing_cache_is_measured_a_handful_of_times(monkeypatch):
    measured = []
    monkeypatch.setattr(tune, "_measure", lambda run: measured.append(run) or float(len(measured)))
    q = torch.empty(1, 32, 1, 128, dtype=torch.float16)
    for Lk in range(1, 65536, 97):
        assert (
            tune.tuned(way(Lk), ARCH, q, 8, Lk, lambda way: None).config == way(Lk).config
        )  # the first is fastest here
    assert len(measured) == 4 * len(tune.candidates(way(1).config))  # buckets 1k, 4k, 16k, 64k


def test_the_fastest_that_runs_is_taken(monkeypatch):
    q = torch.empty(1, 32, 1, 128, dtype=torch.float16)
    monkeypatch.setattr(tune, "_measure", lambda run: run())

    def run(way: Plan) -> float:
        if way.config.stages > 2:
            raise RuntimeError("out of shared memory")
        return abs(way.config.BN - 128) + way.config.warps + way.config.stages

    best = tune.tuned(way(5000), ARCH, q, 8, 5000, run)
    assert best == dataclasses.replace(way(5000), config=best.config)
    assert (best.config.BN, best.config.warps, best.config.stages) == (
        64,
        2,
        2,
    )  # of BN 16 to 64, warps 2 to 8, stages 2 to 4


def test_nothing_is_measured_unless_asked_for(monkeypatch):
    assert not tune.ENABLED
    monkeypatch.setattr(tune, "_measure", lambda run: pytest.fail("measured"))
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr("lragent_hf.kernels.ops.unsupported", lambda *args, **kwargs: None)
    monkeypatch.setattr("lragent_hf.kernels.unsupported", lambda *args, **kwargs: None)
    q = torch.randn(1, 2, 1, 32)
    assert flash_lora_attention(q, q, q, backend="triton").shape == q.shape


@pytest.mark.parametrize(
    "arch", [arch for arch in ARCHITECTURES.values() if arch.name != "interpreter"], ids=lambda a: a.name
)
def test_the_table_has_a_row_for_everything(arch):
    for mode in ("prefill", "decode", "split"):
        for itemsize in (2, 4):
            for D in (32, 64, 128, 256):
                for R in (16, 64, 128):
                    config = config_for(arch, mode, itemsize, D, R)
                    assert config.BM >= 16
                    assert config.BN >= 16
                    assert mode != "decode" or config.BM == 16
