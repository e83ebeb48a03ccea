"""Several agents on one context at once: the rows of a branch in one batch, against forks one after another."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from .._compat import CACHE_ARG
from ..cache import LoRASharedCache
from .contenders import AGENTS
from .environment import set_up
from .models import default_dtype, load_model
from .verify import same_logits

__all__ = ["run"]


def run(
    prefix: int, branches: int, new: int, scheme: str, model: str, modules: list[str], rank: int, dtype: str | None,
    repeats: int, threads: int | None,
) -> dict[str, float]:  # fmt: skip
    """Fill a cache, branch it, let every branch write; print the ratio of tokens/s and the bytes. On the CPU.

    Args:
        prefix, branches, new: tokens in common, rows, and tokens that each writes.
        repeats: of both ways, in turn.

    Returns:
        ``speedup`` (median of the ratios within a repeat), ``bytes`` (of the branch), ``prefix_bytes`` and ``tail_bytes``
        (of the cache it came from, and of what ``branches`` rows of ``new`` tokens take).

    Raises:
        SystemExit: rows of the batch do not give what forks give.
    """
    set_up(threads=threads)
    loaded = load_model(model, modules, rank, getattr(torch, dtype or default_dtype(model)), "cpu", "sdpa")
    agents = [AGENTS[row % len(AGENTS)] for row in range(branches)]
    ids = torch.randint(
        0, loaded.config.vocab_size, (branches, prefix + new), generator=torch.Generator().manual_seed(0)
    )
    ids[:] = torch.cat([ids[:1, :prefix].expand(branches, -1), ids[:, prefix:]], 1)
    cache = LoRASharedCache(loaded, scheme)
    with torch.inference_mode():
        for agent in dict.fromkeys(agents):
            loaded.set_adapter(agent)
            while (past := cache.get_seq_length()) < prefix:
                loaded(ids[:1, past : min(prefix, past + 1024)], logits_to_keep=1, **{CACHE_ARG: cache})
        branch = cache.branch(agents)
        before = cache.memory_report().in_use_bytes
        together = _together(loaded, branch, agents, ids, prefix)
        after = branch.memory_report().in_use_bytes
        apart = _apart(loaded, cache, agents, ids, prefix)
        same_logits("rows of a branch are not what forks give", together, apart)
        seconds: dict[str, list[float]] = {"together": [], "apart": []}
        for _ in range(repeats):
            branch = cache.branch(agents)
            seconds["together"].append(_timed(lambda: _together(loaded, branch, agents, ids, prefix)))  # noqa: B023
            seconds["apart"].append(_timed(lambda: _apart(loaded, cache, agents, ids, prefix)))
    speedup = median(apart / together for together, apart in zip(seconds["together"], seconds["apart"], strict=True))
    tails = before // prefix * new * branches
    print(f"{scheme}, {model}: {branches} branches of {new} tokens over {prefix:,}")
    print(f"tokens/s, of one after another: {speedup:.2f} (median of {repeats})")
    print(
        f"bytes: {after:,} = {(after - tails) / before:.3f} of the {before:,} of the prefix, and {tails:,} of the tails"
    )
    return {"speedup": speedup, "bytes": after, "prefix_bytes": before, "tail_bytes": tails}


def _together(model: Any, cache: LoRASharedCache, agents: Sequence[str], ids: Tensor, prefix: int) -> Tensor:
    """Logits [B, new, V] of all rows, a token at a time."""
    names = {"adapter_names": list(agents)}
    steps = range(prefix, ids.shape[1])
    return torch.cat([model(ids[:, at : at + 1], **names, **{CACHE_ARG: cache}).logits for at in steps], 1)


def _apart(model: Any, cache: LoRASharedCache, agents: Sequence[str], ids: Tensor, prefix: int) -> Tensor:
    """The same by a fork for each row."""
    rows = []
    for row, agent in enumerate(agents):
        fork = cache.fork()
        model.set_adapter(agent)
        steps = range(prefix, ids.shape[1])
        rows.append(torch.cat([model(ids[row : row + 1, at : at + 1], **{CACHE_ARG: fork}).logits for at in steps], 1))
    return torch.cat(rows)


def _timed(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin
