"""What is asked of one architecture, and how it ends: one agent alone, a padded batch, a hand-over, or a refusal."""

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from oracle import EXACT, NaiveRun, assert_close_to_oracle
from peft import LoraConfig, get_peft_model
from tiny import SCHEMES, randomise, tokens
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.pytorch_utils import Conv1D

from lragent_hf import CACHE_ARG, LoRASharedCache
from lragent_hf.errors import LRAgentError

from .configs import build

__all__ = ["KINDS", "Verdict", "examine"]

KINDS = {
    "works": "every scheme",
    "keep": "every scheme, through the model's own attention",
    "whole": "`full_shared` and `non_shared` only",
    "refused": "refused by every scheme",
    "not tried": "not tried",
}
PARTS = (30, 4, 1, 1, 4)  # windows and chunks are 8 positions
HANDED = ("plan", "plan", "plan", "act", "act")
ALONE = ("plan",) * len(PARTS)
IDS, PAIR = tokens(sum(PARTS)), tokens(sum(PARTS[:3]), rows=2)
ONES, MASK = torch.ones_like(IDS), torch.ones_like(PAIR)
MASK[0, :5] = 0
TURNS = (("plan", 30), ("plan", 34), ("act", 38), ("act", 39), ("plan", 43))


@dataclass(frozen=True)
class Verdict:
    """How an architecture ended: a kind (see ``KINDS``), why it is not a better one, and whether keys can be split too."""

    kind: str
    reason: str = ""
    keys: str = ""


class NoReferenceError(Exception):
    """The model does not run with the caches of transformers either."""


class Subject:
    """One model with the agents plan and act, and its plain twins: the same in fp32, and in fp64 for the oracle."""

    def __init__(self, model: nn.Module, keys: bool = False):
        self.model = with_agents(model, keys)
        self._stock: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}
        self.plain = copy.deepcopy(self.model)
        self.exact = copy.deepcopy(self.model).double()
        base = self.exact.get_base_model()
        if getattr(base.get_decoder(), "_supports_attention_backend", False):
            base.set_attn_implementation(EXACT)  # eager takes its softmax in fp32
        base.set_experts_implementation("eager")  # the grouped kernels know no fp64
        forward = inspect.signature(self.plain.get_base_model().forward).parameters
        self.takes_positions = "position_ids" in forward

    def stock(self, agents: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Logits of the twins, fp32 and fp64, with the cache that transformers gives them."""
        if agents not in self._stock:
            try:
                want, exact = (
                    feed(twin, _dynamic(twin), IDS, ONES, agents=agents) for twin in (self.plain, self.exact)
                )
            except Exception as error:
                raise NoReferenceError(one_line(error)) from error
            self._stock[agents] = want, exact
        return self._stock[agents]

    def uncached(self, twin: Any) -> Tensor:
        """Logits of a twin in one forward without a cache."""
        twin.set_adapter("plan")
        with torch.no_grad(), constants_like(twin):
            logits: Tensor = twin(input_ids=IDS, attention_mask=ONES, use_cache=False).logits
        return logits

    @cached_property
    def stock_is_wrong(self) -> bool:
        """Whether a ``DynamicCache`` changes what this model computes (by a window that the model does not have).

        Where already the first part differs, it is the forward without a cache that is not causal.
        """
        exact, truth = self.stock(ALONE)[1], self.uncached(self.exact)
        differs = (exact - truth).abs().amax((0, 2)) > 1e-3 * truth.abs().max()
        return bool(differs.any()) and not bool(differs[: PARTS[0]].any())

    @cached_property
    def padded(self) -> Tensor | None:
        """Logits of a padded batch, or ``None`` if the model takes none with a ``DynamicCache`` either."""
        try:
            return feed(self.plain, _dynamic(self.plain), PAIR, MASK, self.takes_positions, parts=PARTS[:3])
        except Exception:
            return None


def _dynamic(model: Any) -> DynamicCache:
    return DynamicCache(config=model.get_base_model().config)


def with_agents(model: nn.Module, keys: bool = False) -> Any:
    """LoRA of rank 4 with random B, on q_proj and v_proj where there are any, else on the first linear map of a layer.

    With ``keys`` on k_proj too.
    """
    linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear | Conv1D)]
    names = [name.rpartition(".")[2] for name in linear if any(part.isdigit() for part in name.split("."))]
    targets = sorted({"q_proj", "v_proj"} & set(names)) if "v_proj" in names else names[:1]
    targets += ["k_proj"] if keys else []
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets)
    peft = get_peft_model(model, config, adapter_name="plan")
    peft.add_adapter("act", copy.copy(config))
    randomise(peft)
    peft.set_adapter("plan")
    return peft.eval()


def examine(model_type: str, attention: str | None = "eager", thorough: bool = True, keys: bool = True) -> Verdict:
    """Ask everything of an architecture.

    Args:
        attention: the model's own attention implementation, ``None`` for its default.
        thorough: ask it of every scheme; else leave out what seldom fails where the rest passes.
        keys: ask whether what adapters add to keys can be kept apart too.

    Raises:
        AssertionError: a wrong number, or a refusal that is none.
        Exception: whatever else the library or the model lets through: a bug too.
    """
    try:
        model = build(model_type, attention)
    except Exception as error:
        return Verdict("not tried", f"not built: {one_line(error)}")
    try:
        subject = Subject(model)
    except (ValueError, TypeError, NotImplementedError) as error:
        try:
            LoRASharedCache(model, "full_shared")
        except LRAgentError as refusal:
            return Verdict("refused", one_line(refusal))
        return Verdict("not tried", f"PEFT adapts no layer of it: {one_line(error)}")
    options: dict[str, Any] = {}
    reason = ""
    try:
        LoRASharedCache(subject.model, "full_shared")
        subject.stock(ALONE)
        alone(subject, "base_lr_stacked")
    except NoReferenceError as error:
        return Verdict("not tried", f"does not run with a DynamicCache: {error}")
    except LRAgentError as error:
        reason = one_line(error)
        if "attention='keep'" not in reason:
            return _unsplit(subject, reason, thorough)
        options = {"attention": "keep"}
        alone(subject, "base_lr_stacked", **options)
    padded(subject, "base_lr_stacked", **options)
    handed_over(subject, "base_lr_stacked", **options)
    if thorough:
        handed_over(subject, "base_shared", **options)
        _whole(subject, thorough)
    binding = LoRASharedCache(subject.model).binding
    apart = _keys(model_type, attention, options) if keys else ""
    if not options and binding.can_switch_attention():
        return Verdict("works", keys=apart)
    return Verdict("keep", reason or _own_attention(binding), apart)


def _keys(model_type: str, attention: str | None, options: dict[str, Any]) -> str:
    """Whether what adapters on k_proj add to the keys is kept apart: "yes", or the refusal; then keys are shared whole."""
    subject = Subject(build(model_type, attention), keys=True)
    try:
        alone(subject, "base_lr_stacked", **options)
    except LRAgentError as error:
        whole = {"key_lr": False, **options}
        alone(subject, "base_lr_stacked", **whole)
        return one_line(error)
    return "yes"


def _unsplit(subject: Subject, reason: str, thorough: bool) -> Verdict:
    """Values cannot be split: are they shared whole?"""
    try:
        _whole(subject, thorough)
    except LRAgentError as error:
        for scheme in SCHEMES:
            refused(subject, scheme)
        return Verdict("refused", one_line(error))
    for scheme in ("base_shared", "base_lr_stacked") if thorough else ():
        refused(subject, scheme)
    return Verdict("whole", reason)


def _whole(subject: Subject, thorough: bool) -> None:
    alone(subject, "full_shared", HANDED)  # full sharing is a stock cache handed from agent to agent
    if thorough:
        padded(subject, "full_shared")
        alone(subject, "non_shared")


def _own_attention(binding: Any) -> str:
    """Why the library leaves a model its own attention function."""
    if not getattr(binding.decoder, "_supports_attention_backend", False):
        return "attention outside transformers' attention interface"
    if any(hasattr(layer.attention, "sinks") for layer in binding.layers.values()):
        return "attention sinks"
    return "attention that reads mask or values itself"


def alone(subject: Subject, scheme: str, agents: tuple[str, ...] = ALONE, **options: Any) -> None:
    """One agent's logits are those of a ``DynamicCache``, or those without a cache where that one is wrong."""
    shared = LoRASharedCache(subject.model, scheme, **options)
    want, exact = subject.stock(ALONE)
    if subject.stock_is_wrong:
        agents, want, exact = ALONE, subject.uncached(subject.plain), subject.uncached(subject.exact)
    elif agents != ALONE:
        want, exact = subject.stock(agents)
    got = feed(subject.model, shared, IDS, ONES, agents=agents)
    assert_close_to_oracle(f"{scheme} alone", got, exact, want)
    assert shared.ledger.total == len(IDS[0])


def padded(subject: Subject, scheme: str, **options: Any) -> None:
    """So are those of a batch of two, one row of it padded on the left.

    What rows that attend to nothing hold is the implementation's affair, and no oracle's; so the two fp32 runs may each
    be as far from the truth as `assert_close_to_oracle` allows on the same tokens without padding.
    """
    if subject.padded is None or subject.stock_is_wrong:  # this model takes no such batch with a DynamicCache either
        return
    shared = LoRASharedCache(subject.model, scheme, **options)
    got = feed(subject.model, shared, PAIR, MASK, subject.takes_positions, parts=PARTS[:3])[MASK.bool()]
    want = subject.padded[MASK.bool()]
    stock, exact = subject.stock(ALONE)
    off = float((stock.double() - exact).abs().max())
    allowed = 3 * off + 8 * torch.finfo(want.dtype).eps * float(want.abs().max())
    worst = float((got - want).abs().max())
    assert worst <= allowed, f"{scheme} padded: largest error {worst:.3g}, allowed {allowed:.3g}"


def handed_over(subject: Subject, scheme: str, **options: Any) -> None:
    """Agents in turn: logits are those of the scheme written out naively, and not those of full sharing."""
    ids = tokens(TURNS[-1][1])
    model = subject.model
    naive = [NaiveRun(twin, scheme, agents=("plan", "act")) for twin in (subject.plain, subject.exact)]
    shared, whole = LoRASharedCache(model, scheme, **options), LoRASharedCache(model, "full_shared")
    for agent, stop in TURNS:
        model.set_adapter(agent)
        got = step(model, shared, ids[:, :stop])
        other = step(model, whole, ids[:, :stop])
        want, exact = (written_out(run, agent, ids[:, :stop]) for run in naive)
        assert_close_to_oracle(f"{scheme}, {agent} up to {stop}", got, exact, want)
        if agent == "act":
            moved = (got[:, -1] - other[:, -1]).abs().max() / got.abs().max()
            assert moved > 1e-3, f"{scheme}: the adapters' values make no difference ({moved:.3g}): nothing was tested"


def refused(subject: Subject, scheme: str) -> None:
    """The scheme raises one of the library's errors, and keeps nothing."""
    shared = None
    try:
        shared = LoRASharedCache(subject.model, scheme)
        feed(subject.model, shared, IDS, ONES)
    except LRAgentError:
        assert shared is None or not shared.agents, f"{scheme} was refused after {shared.agents} had been cached"
    else:
        raise AssertionError(f"{scheme} works, where another scheme is refused")


def feed(
    model: Any,
    shared: Any,
    ids: Tensor,
    mask: Tensor | None = None,
    positions: bool = False,
    parts: Sequence[int] = PARTS,
    agents: Sequence[str] | None = ALONE,
) -> Tensor:
    """The logits of all of ``ids``, run in parts, each by its agent (``None``: the one that is active)."""
    logits, stop = [], 0
    for index, part in enumerate(parts):
        if agents is not None:
            model.set_adapter(agents[index])
        stop += part
        options: dict[str, Any] = {CACHE_ARG: shared}
        if mask is not None:
            options["attention_mask"] = mask[:, :stop]
            if positions:
                options["position_ids"] = (mask[:, :stop].cumsum(1) - 1).clamp(min=0)[:, -part:]
        with torch.no_grad(), constants_like(model):
            logits.append(model(input_ids=ids[:, stop - part : stop], use_cache=True, **options).logits)
    return torch.cat(logits, 1)


@contextmanager
def constants_like(model: nn.Module) -> Iterator[None]:
    """While open, new tensors have the dtype of the model: some models write constants in the default one."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(next(model.parameters()).dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def step(model: Any, shared: LoRASharedCache, ids: Tensor) -> Tensor:
    """Run what of ``ids`` the active agent has not read."""
    past = shared.get_seq_length()
    return feed(model, shared, ids[:, past:], parts=(ids.shape[1] - past,), agents=None)


def written_out(run: NaiveRun, agent: str, ids: Tensor) -> Tensor:
    """The same by the naive definition."""
    run.model.set_adapter(agent)
    with constants_like(run.model):
        return run.forward((agent,), ids[:, run.length((agent,)) :], None)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())
