"""The agents of the repository's ``examples/agents``, which ``accuracy`` and ``fidelity`` let loose on questions."""

import hashlib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .models import packaged_folder

__all__ = ["PACKAGED", "adapter_sets", "import_agents", "key_of", "load_crew"]

PACKAGED = "smollm2-135m"


def import_agents() -> Any:
    """The package ``agents`` out of a clone of the repository.

    Raises:
        SystemExit: it is not there.
    """
    for folder in (Path(__file__).resolve().parents[2] / "examples", Path.cwd() / "examples"):
        if (folder / "agents" / "episode.py").is_file():
            sys.path.insert(0, str(folder))
            try:
                return importlib.import_module("agents")
            finally:
                sys.path.remove(str(folder))
    raise SystemExit("This runs the agents of the repository's examples/agents: start it in a clone of the repository.")


def adapter_sets(given: Sequence[str]) -> dict[str, Path]:
    """``NAME=FOLDER`` (or only a folder, named by its last part) -> name and folder.

    Raises:
        SystemExit: no such folder, or one name twice.
    """
    sets: dict[str, Path] = {}
    for one in given:
        name, given_name, folder = one.rpartition("=")
        path = Path(folder)
        if not path.is_dir():
            raise SystemExit(
                f"No folder {path}. Give --adapters NAME=FOLDER, a folder with plan, act and reflect in it."
            )
        label = name if given_name else path.resolve().name
        if label in sets:
            raise SystemExit(f"Two sets of adapters are named {label!r}: give --adapters NAME=FOLDER.")
        sets[label] = path
    return sets


def load_crew(model: str, folder: Path, dtype: torch.dtype, device: str) -> Any:
    """The agents (``agents.Crew``) with the adapters of that folder; ``crew.model`` is the ``PeftModel``."""
    agents = import_agents()
    source = str(packaged_folder() if model == PACKAGED else model)
    base = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device)
    return agents.Crew(agents.load_agents(base, folder), AutoTokenizer.from_pretrained(source))


def key_of(question: Any) -> str:
    """Names a question in a CSV."""
    return hashlib.sha256(question.question.encode()).hexdigest()[:12]
