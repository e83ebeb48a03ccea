"""docs/adapters.md: what becomes of every adapter that PEFT has. Written by ``PYTHONPATH=tests python -m zoo.adapters
docs/adapters.md``."""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import peft
from tiny import assert_alone, tokens
from torch import nn

from lragent_hf import LoRASharedCache
from lragent_hf.errors import LRAgentError

from .tuners import LORA_KINDS, PROMPTS, TUNERS, lora_of_kind, prompted, tuned, variant_configs

__all__ = ["PAGE", "page"]

PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"
SHARES = ("base_lr_stacked", "base_shared")  # base_lr_shared differs in asking for one A
WHOLE = ("full_shared", "non_shared")
HEAD = """# Adapters

Every kind of adapter that PEFT {version} has, put on `v_proj` or on `k_proj` of a tiny model, with weights that do
something. "Yes": the cache takes it, and one agent's logits are those of a `DynamicCache`, to rounding. "No": it is
refused by name, before anything is written. Adapters on other layers than these two are no matter to the cache: any tuner
may be there.

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
    """A line a kind of adapter: LoRA's kinds, then the other tuners, then prompt learning."""
    for name in (*LORA_KINDS, *variant_configs([])):
        yield row(name, lambda module, name=name: lora_of_kind(name, module))  # type: ignore[misc]
    for name in sorted(TUNERS):
        yield row(name, lambda module, name=name: tuned(name, target_modules=[module]))  # type: ignore[misc]
    yield f"| prompt learning: {', '.join(sorted(PROMPTS))} | {' | '.join([refused_everywhere()] * 4)} |"


def row(name: str, make: Callable[[str], nn.Module]) -> str:
    try:
        on_v, on_k = make("v_proj"), make("k_proj")
    except ImportError as error:
        return f"| {name} | needs `{error.name or str(error).split()[0]}` | | | |"
    if name in TASKS:
        return f"| {name} | {answer(on_v, SHARES)} | not tried | not tried | not tried |"
    cells = (
        answer(on_v, SHARES),
        answer(on_k, SHARES),
        answer(on_k, SHARES, key_lr=False),
        answer(on_v, WHOLE) if answer(on_v, WHOLE) == answer(on_k, WHOLE) else "by projection",
    )
    return f"| {name} | {' | '.join(cells)} |"


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


def refused_everywhere() -> str:
    """``no``, if no scheme takes any of these."""
    found = set()
    for name in PROMPTS:
        with contextlib.suppress(ImportError, ValueError):
            model = prompted(name)
            found |= {answer(model, (*SHARES, *WHOLE))}
    return " or ".join(sorted(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    Path(sys.argv[1]).write_text(page())
