"""The agents of the repository's ``examples/agents``, which ``accuracy`` and ``fidelity`` let loose on questions."""

import hashlib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..cache import LoRASharedCache
from ..errors import LRAgentError
from ..schemes import SCHEMES
from .models import packaged_folder

__all__ = [
    "PACKAGED", "adapter_sets", "allowed_cases", "ask_for", "digest_of", "import_agents", "key_of", "load_crew",
]  # fmt: skip

PACKAGED = "smollm2-135m"
_INVENTED, _SEED = 1000, 1
"""Questions to ask of those without end, and their seed: other ones than ``train_agents.py`` trains on."""


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
        name, separator, folder = one.partition("=")
        path = Path(folder if separator else one)
        if not path.is_dir():
            raise SystemExit(
                f"No folder {path}. Give --adapters NAME=FOLDER, a folder with plan, act and reflect in it."
            )
        label = name if separator else path.resolve().name
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


def allowed_cases(model: Any, name: str, schemes: Sequence[str], windows: Sequence[int]) -> list[tuple[str, int]]:
    """Scheme and window, those left out (and said) that these adapters do not allow."""
    cases: list[tuple[str, int]] = []
    for scheme in schemes:
        try:
            LoRASharedCache(model, scheme)
        except LRAgentError as error:
            print(f"{name}: {scheme} refuses: {' '.join(str(error).split())}")
            continue
        cases += [(scheme, window) for window in (windows if SCHEMES[scheme].takes_window else (0,))]
    return cases


def key_of(question: Any) -> str:
    """Names a question in a CSV. ScienceQA asks in the same words about different pictures."""
    return hashlib.sha256(repr((question.question, question.answer, question.context)).encode()).hexdigest()[:12]


def digest_of(folder: Path) -> str:
    """Names the weights of a set of adapters."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*/adapter_*")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def ask_for(sources: Sequence[str], limit: int | None, unseen: float) -> list[Any]:
    """Questions of several sources.

    Args:
        limit: of each level of each source, at most.
        unseen: the share that ``train_agents.py`` holds out: only those are asked. 1: all.
    """
    agents, asked = import_agents(), []
    for source in sources:
        levels: dict[str, int] = {}
        for question in agents.load_questions(source, limit=_INVENTED if source == "worlds" else None, seed=_SEED):
            levels[question.level] = levels.get(question.level, 0) + agents.held_out(question, unseen)
            if agents.held_out(question, unseen) and (limit is None or levels[question.level] <= limit):
                asked.append(question)
    return asked
