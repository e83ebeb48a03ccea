"""The paper's emulated agent trace (LRAgent, appendix C.6): plan, act and reflect take 17 turns on one trajectory.

Two contenders stand outside the library: three plain ``DynamicCache``s, and one handed from agent to agent. All run the
same tokens through plain forwards; a turn is a prefill of what the agent has yet to run and then one token at a time.
"""

import csv
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM

from .._compat import CACHE_ARG
from ..cache import LoRASharedCache
from ..schemes import SCHEMES
from .stats import percentiles

__all__ = ["CONTENDERS", "MODULES", "NO_COPY", "SHAPES", "run", "turns"]

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    "small": {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2},
}
NO_COPY = "base_lr_shared_no_copy"
"""``base_lr_shared`` with ``key_working_copy=False``: of interest with adapters on k_proj."""
CONTENDERS = ("three_dynamic", "one_dynamic", *SCHEMES)
MODULES = ("q_proj", "v_proj")
_AGENTS = ("plan", "act", "reflect")


def turns(context: int) -> list[tuple[str, int, int]]:
    """(agent, tokens that come in, tokens generated) for each of the 17 turns: 912 + 4 * context tokens in all."""
    loop = [("plan", context, 32), ("plan", 8, 8), ("act", 8, 8)]
    return [("plan", 512, 32), *loop[1:], *loop * 4, ("reflect", 32, 32), ("reflect", 8, 8)]


@dataclass
class Run:
    """One pass over the trace.

    Attributes:
        seconds: end to end; ``prefill_seconds``: the part until each turn's first token.
        prefilled: tokens the model ran in prefills.
        logits: of the last position of each turn, on request.
    """

    seconds: float = 0.0
    prefill_seconds: float = 0.0
    prefilled: int = 0
    logits: list[Tensor] = field(default_factory=list)


def run(
    context: int,
    shape: str,
    only: list[str] | None,
    repeats: int,
    threads: int | None,
    csv: Path | None,
    modules: list[str],
    rank: int,
) -> dict[str, list[Run]]:
    """Verify all contenders, time them in turn, print medians and ratios, and append to a CSV if asked."""
    if threads:
        torch.set_num_threads(threads)
    contenders = only or list(CONTENDERS)
    model = _model(shape, modules, rank)
    tokens = torch.randint(0, model.config.vocab_size, (1, sum(a + b for _, a, b in turns(context))))
    _verify(model, contenders)
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    for repeat in range(repeats):
        order = contenders[repeat % len(contenders) :] + contenders[: repeat % len(contenders)]
        for name in order:
            runs[name].append(_pass(model, _caches(model, name), turns(context), tokens))
            print(f"\r{repeat + 1}/{repeats} {name:20}", end="", flush=True)
    print(
        f"\r{shape}, {tokens.shape[1]} tokens, 17 turns, {torch.get_num_threads()} threads, {repeats} interleaved repeats, "
        f"rank {rank} on {', '.join(modules)}"
    )
    _table(runs, tokens.shape[1])
    if csv is not None:
        _append_csv(csv, runs, f"{shape}, rank {rank} on {' '.join(modules)}", tokens.shape[1])
    return runs


def _model(shape: str, modules: list[str], rank: int) -> Any:
    """A Llama of the named shape with random weights and three agents that share A on k_proj and v_proj."""
    torch.manual_seed(0)
    sizes = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=2048, intermediate_size=sizes["hidden_size"] * 3, max_position_embeddings=1 << 17, **sizes
    )
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=modules)
    model = get_peft_model(LlamaForCausalLM(config), lora, adapter_name=_AGENTS[0])
    for name in _AGENTS[1:]:
        model.add_adapter(name, lora)
    for name, module in model.named_modules():
        if hasattr(module, "lora_B"):
            for adapter in _AGENTS:
                torch.nn.init.normal_(module.lora_B[adapter].weight, std=0.02)
                if name.endswith(("k_proj", "v_proj")):
                    module.lora_A[adapter].weight.data.copy_(module.lora_A[_AGENTS[0]].weight.data)
    return model.eval()


def _caches(model: Any, name: str) -> Callable[[str], Cache]:
    """Which cache an agent uses."""
    if name == "three_dynamic":
        own: dict[str, Cache] = {agent: DynamicCache() for agent in _AGENTS}
        return own.__getitem__
    if name == "one_dynamic":
        shared: Cache = DynamicCache()
    elif name == NO_COPY:
        shared = LoRASharedCache(model, scheme="base_lr_shared", key_working_copy=False)
    else:
        shared = LoRASharedCache(model, scheme=name)
    return lambda agent: shared


@torch.inference_mode()
def _pass(
    model: Any, cache_of: Callable[[str], Cache], trace: list[tuple[str, int, int]], tokens: Tensor, keep: bool = False
) -> Run:
    result = Run()
    stop = 0
    begin = time.perf_counter()
    for agent, incoming, generated in trace:
        model.set_adapter(agent)
        cache = cache_of(agent)
        start, stop = cache.get_seq_length(), stop + incoming
        first = time.perf_counter()
        logits = model(tokens[:, start:stop], logits_to_keep=1, **{CACHE_ARG: cache}).logits
        result.prefill_seconds += time.perf_counter() - first
        result.prefilled += stop - start
        for _ in range(generated - 1):
            logits = model(tokens[:, stop : stop + 1], logits_to_keep=1, **{CACHE_ARG: cache}).logits
            stop += 1
        stop += 1  # the last token generated is run by whoever comes next
        if keep:
            result.logits.append(logits[:, -1].clone())
    result.seconds = time.perf_counter() - begin
    return result


def _verify(model: Any, contenders: list[str]) -> None:
    """Logits of a short trace against the scheme's definition: the reference backend, or plain caches. Or no speed."""
    trace = turns(24)
    tokens = torch.randint(0, model.config.vocab_size, (1, sum(a + b for _, a, b in trace)))
    for name in contenders:
        got = _pass(model, _caches(model, name), trace, tokens, keep=True).logits
        if name in ("three_dynamic", "non_shared"):
            want = _pass(model, _caches(model, "three_dynamic"), trace, tokens, keep=True).logits
        elif name in ("one_dynamic", "full_shared"):
            want = _pass(model, _caches(model, "one_dynamic"), trace, tokens, keep=True).logits
        else:
            scheme = "base_lr_shared" if name == NO_COPY else name
            cache = LoRASharedCache(model, scheme=scheme, backend="reference", key_working_copy=False)
            want = _pass(model, lambda agent, cache=cache: cache, trace, tokens, keep=True).logits  # type: ignore[misc]
        worst = max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True))
        scale = max(float(b.abs().max()) for b in want)
        if not worst < 1e-4 * max(1.0, scale):
            raise SystemExit(
                f"{name} is wrong: its logits are off by {worst:.3g} (of {scale:.3g}). No time is printed."
            )
    print(f"verified on {tokens.shape[1]} tokens: {', '.join(contenders)}")


def _table(runs: dict[str, list[Run]], total: int) -> None:
    rates = {name: [total / run.seconds for run in group] for name, group in runs.items()}
    middle = {name: percentiles(group)[1] for name, group in rates.items()}
    against = [name for name in ("three_dynamic", "one_dynamic", "full_shared") if name in runs]
    print(
        f"{'':23}{'tokens/s p20/p50/p80':>26}{'prefilled':>11}{'TTFT sum':>10}"
        + "".join(f"{'/ ' + n:>17}" for n in against)
    )
    for name, group in runs.items():
        low, mid, high = percentiles(rates[name])
        ttft = percentiles([run.prefill_seconds for run in group])[1]
        ratios = "".join(f"{middle[name] / middle[other]:>17.3f}" for other in against)
        print(f"{name:23}{low:>10.0f}{mid:>8.0f}{high:>8.0f}{group[0].prefilled:>11}{ttft:>9.2f}s{ratios}")


def _append_csv(path: Path, runs: dict[str, list[Run]], shape: str, total: int) -> None:
    rows = list(_rows(runs, shape, total))
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        if new:
            writer.writeheader()
        writer.writerows(rows)


def _rows(runs: dict[str, list[Run]], shape: str, total: int) -> Iterator[dict[str, Any]]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=os.path.dirname(__file__),
        check=False,
    ).stdout.strip()
    for name, group in runs.items():
        for repeat, run in enumerate(group):
            yield {
                "benchmark": "trace", "shape": shape, "tokens": total, "contender": name, "repeat": repeat,
                "tokens_per_second": round(total / run.seconds, 1), "ttft_sum_s": round(run.prefill_seconds, 4),
                "prefilled": run.prefilled, "device": "cpu", "cpu": platform.processor() or platform.machine(),
                "threads": torch.get_num_threads(), "torch": torch.__version__, "transformers": transformers.__version__,
                "peft": peft.__version__, "commit": commit, "date": time.strftime("%Y-%m-%d"),
            }  # fmt: skip
