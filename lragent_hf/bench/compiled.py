"""Decoding that ``generate`` compiles, on fixed shapes, against decoding as it is."""

import time
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig

from .._compat import CACHE_ARG
from ..cache import LoRASharedCache
from .contenders import AGENTS
from .environment import set_up
from .models import default_dtype, load_model
from .verify import same_logits

__all__ = ["run"]

_READ = 4  # tokens that an agent reads at the start of its turn


def run(
    context: int, turns: int, new: int, scheme: str, model: str, modules: list[str], rank: int, dtype: str | None,
    repeats: int, device: str | None, threads: int | None,
) -> dict[str, float]:  # fmt: skip
    """Agents take turns behind a context; print what compiling gains and how often it was done.

    Args:
        context, turns, new: tokens before the first turn, turns (agents by rotation), and tokens that each writes.
        repeats: of each way, in turn.

    Returns:
        ``speedup`` (tokens/s, compiled over as it is; median of the ratios within a repeat), ``fixed`` (the same of fixed
        shapes alone), ``graphs`` (compiled in the first turn) and ``recompiled`` (graphs compiled in all later ones).

    Raises:
        SystemExit: logits are not those of decoding as it is.
    """
    device = set_up(device, threads)
    loaded = load_model(model, modules, rank, getattr(torch, dtype or default_dtype(model)), device, "sdpa")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, loaded.config.vocab_size, (1, context + turns * _READ), generator=generator).to(device)
    length = context + turns * (_READ + new)
    how: CompileConfig = CompileConfig()
    how._compile_all_devices = True
    ways: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "as it is": ({}, {"disable_compile": True}),
        "fixed": ({"max_cache_len": length}, {"disable_compile": True}),
        "compiled": ({"max_cache_len": length}, {"compile_config": how}),
    }
    torch._dynamo.reset()
    told: dict[str, tuple[Tensor, float, list[int]]] = {}
    for name, (options, more) in ways.items():  # also what warms up, and compiles
        told[name] = _talk(loaded, LoRASharedCache(loaded, scheme, **options), ids, context, turns, new, **more)
        same_logits(f"{name}: logits are not those of decoding as it is", told[name][0], told["as it is"][0])
    graphs = told["compiled"][2]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, (options, more) in ways.items():
            cache = LoRASharedCache(loaded, scheme, **options)
            seconds[name].append(_talk(loaded, cache, ids, context, turns, new, **more)[1])
    gain = {
        name: median(slow / fast for slow, fast in zip(seconds["as it is"], seconds[name], strict=True))
        for name in ways
    }
    print(f"{scheme}, {model}: {turns} turns of {new} tokens, {len(AGENTS)} agents, after a context of {context:,}")
    print(f"tokens/s, of decoding as it is: fixed shapes {gain['fixed']:.2f}, compiled {gain['compiled']:.2f}")
    print(f"graphs compiled: {graphs[0]} in the first turn, {graphs[-1] - graphs[0]} in the {turns - 1} after it")
    return {
        "speedup": gain["compiled"], "fixed": gain["fixed"], "graphs": graphs[0], "recompiled": graphs[-1] - graphs[0]
    }  # fmt: skip


def _talk(
    model: Any, cache: LoRASharedCache, ids: Tensor, context: int, turns: int, new: int, **options: Any
) -> tuple[Tensor, float, list[int]]:
    """Logits of what was written, seconds of all turns, and graphs compiled so far after each."""
    story, given = ids[:, :context], ids[:, context:].split(_READ, 1)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    logits, graphs = [], []
    with torch.no_grad():
        for agent in AGENTS:  # the context, which is not timed
            model.set_adapter(agent)
            if (past := cache.get_seq_length()) < context:
                model(ids[:, past:context], logits_to_keep=1, **{CACHE_ARG: cache})
    begin = time.perf_counter()
    for turn in range(turns):
        model.set_adapter(AGENTS[turn % len(AGENTS)])
        story = torch.cat([story, given[turn]], 1)
        found = model.generate(
            input_ids=story, attention_mask=torch.ones_like(story), max_new_tokens=new, min_new_tokens=new,
            do_sample=False, return_dict_in_generate=True, output_logits=True, **{CACHE_ARG: cache}, **options,
        )  # fmt: skip
        story = found.sequences
        logits += found.logits
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
    return torch.stack(logits, 1), time.perf_counter() - begin, graphs
