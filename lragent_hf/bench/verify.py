"""Before any time is taken: every contender gives the logits that it should, on a short trace."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .contenders import Caches, make_caches, scheme_of
from .measure import make_clock
from .trace import Turn, divergence, run_pass, total_tokens, turns

__all__ = ["same_logits", "verify"]

_GENERATED = 4  # a turn: enough to decode, and few enough for a model of 8B


def verify(model: Any, contenders: Sequence[str], recompute: Sequence[int], shares: Sequence[float] = ()) -> None:
    """Compare each contender's logits, at the end of each turn, with its definition's.

    The definitions: plain ``DynamicCache``s for what they can express; for schemes that split values the reference
    backend, which puts V together and takes the softmax of the whole matrix; for ``droidspeak`` that too, and without
    hidden states the model's own attention. Rounding alone makes two attention implementations of transformers (eager
    and sdpa) differ on plain caches; four times that is allowed.

    Args:
        recompute: layers that ``droidspeak`` recomputes.
        shares: of the tokens, after which agents are made to part as well, each in a run of its own.

    Raises:
        SystemExit: a contender is wrong.
    """
    trace = _short_trace()
    generator = torch.Generator().manual_seed(0)
    vocab = model.config.vocab_size
    tokens = torch.randint(0, vocab, (1, total_tokens(trace)), generator=generator).to(model.device)
    clock = make_clock(str(model.device))

    def logits(caches: Caches, part_at: int | None = None) -> Tensor:
        return torch.cat(run_pass(model, caches, trace, tokens, clock, part_at=part_at, keep=True).logits).float()

    with _attention(model, "sdpa"):
        exact = logits(make_caches(model, "three_dynamic"))
        merged = logits(make_caches(model, "one_dynamic"))
    with _attention(model, "eager"):
        rounding = _distance(logits(make_caches(model, "three_dynamic")), exact)
    allowed = _allowed(rounding, exact, model.dtype)
    worst = 0.0
    for name in contenders:
        for position in (None, *(divergence(trace, share) for share in shares)):
            if name in ("three_dynamic", "non_shared"):
                pairs = [(make_caches(model, name), exact)]
            elif name == "one_dynamic" or (name == "full_shared" and position is None):
                pairs = [(make_caches(model, name), merged)]
            else:
                pairs = [(got, logits(want, position)) for got, want in _with_definitions(model, name, recompute)]
            error = max(_distance(logits(got, position), want) for got, want in pairs)
            if not error <= allowed:  # nor if it is not a number
                raise SystemExit(
                    f"{name} is wrong: its logits are off by {error:.3g}, allowed {allowed:.3g}. No speed is printed."
                )
            worst = max(worst, error)
    lost = _distance(merged, exact)
    print(
        f"verified on {tokens.shape[1]} tokens: {', '.join(contenders)}; off by {worst:.2g} at most, allowed {allowed:.2g} "
        f"(reading another agent's cache as one's own: {lost:.2g})"
    )
    if lost <= allowed:
        print(
            f"In {model.dtype} rounding moves the logits as much as losing the adapters' part would, so that this check "
            "cannot tell. It can with --dtype float32."
        )


def same_logits(what: str, got: Tensor, want: Tensor) -> None:
    """Raise SystemExit unless two ways to the same logits agree to rounding."""
    error = float((got - want).abs().max() / want.abs().max())
    allowed = 200 * torch.finfo(want.dtype).eps
    if not error <= allowed:  # nor if it is not a number
        raise SystemExit(f"{what}: largest relative error {error:.2g}, allowed {allowed:.2g}. No speed is printed.")


def _with_definitions(model: Any, name: str, recompute: Sequence[int]) -> Iterator[tuple[Caches, Caches]]:
    """Caches of a contender, and caches that are slow and plain but should give the same logits."""
    plain = {"backend": "reference", "key_working_copy": False}
    yield make_caches(model, name, recompute), make_caches(model, scheme_of(name), recompute, **plain)
    if name == "droidspeak":  # kept hidden states are another's, so without them the logits are others
        yield (
            make_caches(model, name, recompute, hidden_cache=False),
            make_caches(model, name, recompute, hidden_cache=False, attention="keep"),
        )


def _short_trace() -> list[Turn]:
    return [(agent, incoming, min(generated, _GENERATED)) for agent, incoming, generated in turns(24)]


def _distance(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max())


def _allowed(rounding: float, logits: Tensor, dtype: torch.dtype) -> float:
    scale = float(logits.abs().max())
    least = 1e-4 if dtype == torch.float32 else torch.finfo(dtype).eps
    return max(4 * rounding, least * scale)


@contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    """The model's attention implementation is ``name`` inside."""
    base = model.get_base_model()
    before = base.config._attn_implementation
    base.set_attn_implementation(name)
    try:
        yield
    finally:
        base.set_attn_implementation(before)
