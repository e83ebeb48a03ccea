"""The paper's emulated agent trace (LRAgent, appendix C.6): plan, act and reflect take 17 turns on one trajectory.

All contenders run the same tokens through plain forwards; a turn is a prefill of what the agent has yet to run and then
one token at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .._compat import CACHE_ARG
from .contenders import Caches

__all__ = ["Pass", "Turn", "divergence", "final_lengths", "run_pass", "total_tokens", "turns"]

Turn = tuple[str, int, int]
"""Agent, tokens that come in, tokens generated."""


def turns(context: int) -> list[Turn]:
    """The 17 turns with observations of ``context`` tokens: 912 + 4 * context tokens in all."""
    loop = [("plan", context, 32), ("plan", 8, 8), ("act", 8, 8)]
    return [("plan", 512, 32), *loop[1:], *loop * 4, ("reflect", 32, 32), ("reflect", 8, 8)]


def total_tokens(trace: Sequence[Turn]) -> int:
    """Tokens of the trajectory at the end."""
    return sum(incoming + generated for _, incoming, generated in trace)


def final_lengths(trace: Sequence[Turn]) -> dict[str, int]:
    """Agent -> positions it has run at the end. The last token of a turn is run by whoever comes next."""
    stops = accumulate(incoming + generated for _, incoming, generated in trace)
    return {agent: stop - 1 for (agent, _, _), stop in zip(trace, stops, strict=True)}


def divergence(trace: Sequence[Turn], share: float) -> int | None:
    """The position at which agents part when ``share`` of the tokens are common to them; ``None``: they never do."""
    return None if share >= 1 else round(share * total_tokens(trace))


@dataclass
class Pass:
    """One pass over the trace.

    Attributes:
        seconds: end to end.
        prefill_seconds: the part until each turn's first token (the paper's TTFT: summed over turns).
        prefilled: tokens the model ran in prefills.
        logits: of the last position of each turn [B, V], on request.
    """

    seconds: float = 0.0
    prefill_seconds: float = 0.0
    prefilled: int = 0
    logits: list[Tensor] = field(default_factory=list)


@torch.inference_mode()
def run_pass(
    model: Any,
    caches: Caches,
    trace: Sequence[Turn],
    tokens: Tensor,
    clock: Callable[[], float],
    *,
    part_at: int | None = None,
    keep: bool = False,
) -> Pass:
    """Let the agents take their turns.

    Args:
        tokens: [1, total_tokens(trace)], what comes in and what is "generated", on the model's device.
        clock: seconds; once all work handed to the device is done.
        part_at: the position from which each agent goes on in a fork of its own. None: they share to the end.
        keep: whether to keep the logits of each turn.
    """
    result = Pass()
    stop = 0

    def run(agent: str, start: int, stop: int) -> Tensor:
        """Positions ``start`` to ``stop``, in two forwards where agents part in between."""
        nonlocal part_at
        if part_at is not None and part_at < stop:
            if start < part_at:
                model(tokens[:, start:part_at], logits_to_keep=1, **{CACHE_ARG: caches.of[agent]})
                start = part_at
            caches.part()
            part_at = None
        logits: Tensor = model(tokens[:, start:stop], logits_to_keep=1, **{CACHE_ARG: caches.of[agent]}).logits
        return logits

    begin = clock()
    for agent, incoming, generated in trace:
        model.set_adapter(agent)
        start, stop = caches.of[agent].get_seq_length(), stop + incoming
        first = clock()
        logits = run(agent, start, stop)
        result.prefill_seconds += clock() - first
        result.prefilled += stop - start
        for _ in range(generated - 1):
            logits = run(agent, stop, stop + 1)
            stop += 1
        stop += 1
        if keep:
            result.logits.append(logits[:, -1].clone())
    result.seconds = clock() - begin
    return result
