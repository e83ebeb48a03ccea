"""examples/train_agents.py on a tiny model: it learns, goes on after an interruption, and what it saves is plain PEFT."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_agents import save_tiny_model
from transformers import AutoModelForCausalLM

import train_agents
from agents import AGENTS, load_agents
from lragent_hf import LoRASharedCache
from lragent_hf.errors import LRAgentError


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("base"))


def train(base: str, out: Path, *more: str) -> dict[str, Any]:
    argv = [
        "train_agents.py",
        "--out",
        str(out),
        "--model",
        base,
        "--batch",
        "1",
        "--limit",
        "20",
        "--rank",
        "4",
        *more,
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", argv)
        train_agents.main()
    result: dict[str, Any] = json.loads((out / "training.json").read_text())
    return result


def test_it_learns_and_goes_on_after_an_interruption(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(base, tmp_path / "whole", "--steps", "24", "--rate", "1e-2", "--modules", "all-linear")
    assert all(whole["loss_held_out"][agent] < 5.0 for agent in AGENTS), whole  # log(257), knowing nothing, is 5.55
    step = train_agents.Training.step

    def interrupted(self: Any, batch: Any) -> None:
        if len(self.losses) == 12:
            raise KeyboardInterrupt
        step(self, batch)

    monkeypatch.setattr(train_agents.Training, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(base, tmp_path / "parts", "--steps", "24", "--rate", "1e-2", "--modules", "all-linear")
    assert not (tmp_path / "parts" / "plan").exists()
    monkeypatch.setattr(train_agents.Training, "step", step)
    parts = train(base, tmp_path / "parts", "--steps", "24", "--rate", "1e-2", "--modules", "all-linear")
    assert parts["loss"] == whole["loss"]
    assert parts["loss_held_out"] == whole["loss_held_out"]
    for agent in AGENTS:
        one, other = (
            load_file(tmp_path / name / agent / "adapter_model.safetensors") for name in ("whole", "parts")
        )  # fmt: skip
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) and one[key].dtype == torch.bfloat16 for key in one)
        assert any(weight.abs().max() > 0 for key, weight in one.items() if "lora_B" in key)
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == [
        "act", "loss.png", "plan", "reflect", "training.json"
    ]  # fmt: skip


def test_it_goes_on_only_with_the_same_settings(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "README.md").write_text("a card")
    train(base, tmp_path, "--steps", "2")
    assert (tmp_path / "README.md").read_text() == "a card"
    with pytest.raises(SystemExit, match="Give another --out"):
        train(base, tmp_path, "--steps", "2")
    monkeypatch.setattr(train_agents, "save_adapters", None)  # it breaks off at its end
    with pytest.raises(TypeError):
        train(base, tmp_path / "cut", "--steps", "10")
    with pytest.raises(SystemExit, match=r"other settings \(rate, seed\)"):
        train(base, tmp_path / "cut", "--steps", "10", "--rate", "1e-3", "--seed", "5")


@pytest.mark.parametrize("modules", [["q_proj", "v_proj"], ["all-linear"]])
def test_adapters_trained_with_one_a_are_taken_and_others_refused(
    base: str, tmp_path: Path, modules: list[str]
) -> None:
    for a in ("tied", "separate"):
        train(base, tmp_path / a, "--steps", "2", "--a", a, "--modules", *modules)
        config = json.loads((tmp_path / a / "act" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == base
        model = load_agents(AutoModelForCausalLM.from_pretrained(base), tmp_path / a)
        if a == "tied":
            assert "base_lr_shared" in repr(LoRASharedCache(model, scheme="base_lr_shared"))
        else:
            with pytest.raises(LRAgentError, match="v_proj"):
                LoRASharedCache(model, scheme="base_lr_shared")
    with pytest.raises(FileNotFoundError, match="No adapter 'plan'"):
        load_agents(AutoModelForCausalLM.from_pretrained(base), tmp_path)
