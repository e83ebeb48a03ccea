"""docs/adapters.md: what becomes of every adapter that PEFT has. Written by ``PYTHONPATH=tests python -m zoo.adapters
docs/adapters.md``."""

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import peft
from tiny import assert_alone, tokens
from torch import nn

from lragent_hf import LoRASharedCache
from lragent_hf.errors import LRAgentError

from .tuners import (
    CONFIGS,
    ELSEWHERE,
    LORA_KINDS,
    PROMPTS,
    TUNERS,
    elsewhere,
    lora_of_kind,
    prompted,
    tuned,
    variant_configs,
)

__all__ = ["PAGE", "page"]

PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"
SHARES = ("base_lr_stacked", "base_shared")  # base_lr_shared differs in asking for one A
WHOLE = ("full_shared", "non_shared")
HEAD = """# Adapters

The kinds of adapter of PEFT {version}, tried on a tiny model with weights that do something. "Yes": the cache takes it,
and one agent's logits are those of a `DynamicCache`, to rounding. "No": it is refused by name, and the cache is left as it
was. "Not tried": it needs arguments in every forward. Adapters on layers other than `v_proj` and `k_proj` make no
difference to the cache: any tuner that leaves attention alone may be there. X-LoRA is refused by every scheme.

`base_lr_shared` takes what the other `base_*` schemes take, if all adapters have one A there (`share_lora_A`).
The command that writes this page is in `tests/zoo/adapters.py`; a test compares it.

| adapter | `base_*`, on `v_proj` | `base_*`, on `k_proj` | the same with `key_lr=False` | `full_shared`, `non_shared` |
|---|---|---|---|---|
"""
TASKS = {"POLY"}  # wants the ids of its tasks in every forward, which nothing here passes


def page() -> str:
    """The whole page."""
    return HEAD.format(version=peft.__version__) + "".join(f"{line}\n" for line in rows())


def rows() -> Iterator[str]:
    """A line a kind of adapter: LoRA's kinds, the other tuners, those that are not on a projection, prompt learning."""
    for name in (*LORA_KINDS, *variant_configs([])):
        yield row(name, lambda module, name=name: lora_of_kind(name, module))  # type: ignore[misc]
    for name in sorted(TUNERS):
        yield row(name, lambda module, name=name: tuned(name, target_modules=[module]))  # type: ignore[misc]
    for name in (name for name in sorted(ELSEWHERE) if name in CONFIGS):
        yield everywhere(f"{name} (not on a projection)", elsewhere(name))
    for name in sorted(PROMPTS):
        try:
            model = prompted(name)
        except (ImportError, ValueError) as error:
            yield f"| {name} (prompt learning) | needs `{str(error).split()[0]}` | | | |"
            continue
        yield everywhere(f"{name} (prompt learning)", model)


def everywhere(name: str, model: nn.Module) -> str:
    """For what cannot be put on one projection: the same in both columns."""
    split = answer(model, SHARES)
    return f"| {name} | {split} | {split} | {answer(model, SHARES, key_lr=False)} | {answer(model, WHOLE)} |"


def row(name: str, make: Callable[[str], nn.Module]) -> str:
    try:
        on_v, on_k = make("v_proj"), make("k_proj")
    except ImportError as error:
        return f"| {name} | needs `{error.name or str(error).split()[0]}` | | | |"
    if name in TASKS:
        return f"| {name} | {answer(on_v, SHARES)} | not tried | not tried | not tried |"
    whole = " or ".join(sorted({answer(on_v, WHOLE), answer(on_k, WHOLE)}))
    split = answer(on_v, SHARES), answer(on_k, SHARES), answer(on_k, SHARES, key_lr=False)
    return f"| {name} | {' | '.join(split)} | {whole} |"


def answer(model: nn.Module, schemes: tuple[str, ...], **options: bool) -> str:
    """``yes`` or ``no``, the same for all of these schemes; what is taken must be right."""
    found = set()
    for scheme in schemes:
        try:
            assert_alone(model, LoRASharedCache(model, scheme, **options), tokens(40))  # type: ignore[arg-type]
            found.add("yes")
        except LRAgentError:
            found.add("no")
    return " or ".join(sorted(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    Path(sys.argv[1]).write_text(page())
