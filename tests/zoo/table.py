"""docs/models.md: how every architecture ends. Written by ``PYTHONPATH=tests python -m zoo.table docs/models.md``."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import transformers

from .checks import KINDS, Verdict, examine
from .configs import architectures, model_class

__all__ = ["PAGE", "page", "read", "row"]

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
SHORT = [
    (r"has no attention module with k_proj, v_proj", "no separate `k_proj` and `v_proj`"),
    (r"two attention modules for one layer", "two attention modules to a layer"),
    (r"layers that keep a state \((.*?)\)", r"layers that keep a state (\1)"),
    (r"changes values between v_proj and the cache", "values changed after `v_proj`"),
    (r"does more to its keys than turn them", "keys are normalised, or turned otherwise"),
    (r"adapters sit inside", "`v_proj` wraps the layer that is adapted"),
    (r"has no v_proj to take its LR from", "layers run more than once a token"),
    (r"without storing anything for layer", "a layer that stores no K and V of the text"),
    (r"the model did not use the cache", "does not use the cache"),
    (r"caches something besides K and V", "caches something besides K and V"),
    (r"takes no cache", "takes no cache of keys and values"),
    (r"names no decoder", "names no decoder"),
    (r"has keys .* and values", "values of another head_dim than keys"),
    (r"PEFT adapts no layer", "PEFT adapts no layer of it"),
    (r"does not run with a DynamicCache", "does not run with a `DynamicCache`"),
    (r"not built: .*requires the (\w+) library", r"needs \1"),
    (r"not built", "cannot be built from its config class alone"),
]
HEAD = """# Models

Every architecture that `AutoModelForCausalLM` knows in transformers {version}, built tiny with random weights and
asked: are the logits those of a `DynamicCache`, for one agent alone and in a batch padded on the left, with prompts
longer than windows and chunks; and after a hand-over, are they those of the scheme written out plainly? {count} of
{total} serve every scheme.

| means | | architectures |
|---|---|---|
{means}

"Not tried" is what cannot be compared: see the reason. A model made for images or sound too is tried with text alone.
The command that writes this page is in `tests/zoo/table.py`; a test compares every row.

The last column: whether what LoRA on `k_proj` adds to the keys can be kept apart too (`key_lr`, the default); else
adapters with LoRA there need `key_lr=False`, which shares keys whole.

| model type | class | | why | `k_proj` |
|---|---|---|---|---|
"""


def page(verdicts: Mapping[str, Verdict]) -> str:
    """The whole page."""
    counts = {kind: sum(verdict.kind == kind for verdict in verdicts.values()) for kind in KINDS}
    means = "\n".join(f"| {kind} | {meaning} | {counts[kind]} |" for kind, meaning in KINDS.items())
    head = HEAD.format(
        version=transformers.__version__, count=counts["works"] + counts["keep"], total=len(verdicts), means=means
    )
    return head + "".join(f"{row(name, verdict)}\n" for name, verdict in verdicts.items())


def row(model_type: str, verdict: Verdict) -> str:
    """One line of the table."""
    cells = (model_type, model_class(model_type), verdict.kind, short(verdict.reason), short(verdict.keys))
    return f"| {' | '.join(cells)} |"


def short(reason: str) -> str:
    """The reason in a few words."""
    for pattern, words in SHORT:
        match = re.search(pattern, reason)
        if match:
            return match.expand(words)
    return reason.split(". ")[0].replace("|", "/")


def read() -> tuple[str, dict[str, str]]:
    """The transformers version of the page in docs/, and its rows by model type."""
    text = PAGE.read_text() if PAGE.exists() else ""
    version = re.search(r"in transformers ([\d.]+\d)", text)
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.count(" | ") == 4}
    return (version[1] if version else ""), rows


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    Path(sys.argv[1]).write_text(page({name: examine(name) for name in architectures()}))
