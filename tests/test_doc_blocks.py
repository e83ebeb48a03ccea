"""Every Python block of the README and of the documentation runs, in the order in which it is read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser
from tiny import base_model, config, peft_model, randomise, tokens
from tiny_agents import save_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from agents.adapters import new_agents

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md"))
    if "```python" in page.read_text()
)


def names(page: Path, folder: Path) -> dict[str, Any]:
    """What a page takes for granted: a model with its agents, tokens, and for pages about text a tokenizer too."""
    if page.name == "agents.md":
        source = save_tiny_model(folder / "model")
        model = new_agents(AutoModelForCausalLM.from_pretrained(source), ["q_proj", "v_proj"], 4)
        randomise(model)
        model.save_pretrained(folder / "my-agents")
        return {
            "model": AutoModelForCausalLM.from_pretrained(source),
            "tokenizer": AutoTokenizer.from_pretrained(source),
        }
    agents: dict[str, dict[str, Any]] = {"plan": {}, "act": {}, "reflect": {}}
    model = peft_model(adapters=agents)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.mul_(0.1)  # no adapter that was trained moves a model as far as the random ones of other tests
    base_model(config()).save_pretrained(folder / "base-model")
    model.save_pretrained(folder / "adapters")  # a folder for each
    return {"torch": torch, "model": model, "ids": tokens(24), "observation": tokens(5, seed=1)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    document = Sybil([PythonCodeBlockParser()], encoding="utf-8").parse(page)
    document.namespace.update(names(page, tmp_path))
    blocks = list(document.examples())
    assert len(blocks) == page.read_text().count("```python")
    for block in blocks:
        block.evaluate()
