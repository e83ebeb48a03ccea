"""The report for a bug: what is installed, and which attention backends run here."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

from lragent_hf import env
from lragent_hf.errors import BackendUnavailableError


def rows(text: str) -> dict[str, str]:
    table = {}
    for line in text.splitlines()[2:]:
        name, value = line.strip("| ").split(" | ")
        table[name] = value
    return table


def test_it_names_versions_and_tries_the_backends() -> None:
    run = [sys.executable, "-m", "lragent_hf.env"]
    out = subprocess.run(run, capture_output=True, text=True, check=True, env={**os.environ, "TRITON_INTERPRET": "0"})
    table = rows(out.stdout)
    assert table["transformers"] == version("transformers")
    assert table["torch"] == version("torch")
    assert table["backend `blockwise`"].startswith("runs on ")
    assert float(table["backend `blockwise`"].split("error ")[1].split()[0]) < 1e-5
    if not torch.cuda.is_available():
        assert table["backend `triton`"] == "no: the Triton kernels run on CUDA and ROCm, not on cpu."
    assert table["`TRITON_INTERPRET`"] == "0"


def test_what_is_missing_or_broken_is_a_line_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = env.flash_lora_attention

    def broken(*inputs: torch.Tensor, backend: str) -> object:
        if backend == "blockwise":
            raise RuntimeError("out | of luck\nand a long trace")
        if backend == "triton":
            raise BackendUnavailableError("backend 'triton': it is not there.")
        return honest(*inputs, backend=backend)

    monkeypatch.setattr(env, "flash_lora_attention", broken)
    monkeypatch.setattr(env, "_PACKAGES", ("no-such-package",))
    table = rows(env.report())
    assert table["no-such-package"] == "not installed"
    assert table["backend `blockwise`"].endswith(r": RuntimeError: out \| of luck")
    assert table["backend `blockwise`"].startswith("**fails** on ")
    assert table["backend `triton`"] == "no: it is not there."


@pytest.mark.parametrize("factor", [2.0, float("nan")])
def test_wrong_numbers_show(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    honest = env.flash_lora_attention
    monkeypatch.setattr(
        env,
        "flash_lora_attention",
        lambda *x, backend: honest(*x, backend="reference") * (factor if backend == "blockwise" else 1),
    )
    assert rows(env.report())["backend `blockwise`"].startswith("**wrong** on ")


def test_a_driver_that_fails_is_a_line_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> int:
        raise RuntimeError("no answer")

    monkeypatch.setattr(env, "_backend", lambda name: "not tried")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", fails)
    assert rows(env.report())["GPU"] == "**fails**: RuntimeError: no answer"
