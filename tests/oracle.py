"""The schemes as the paper defines them, written out plainly: lists that are concatenated, values that are materialised.

Nothing here uses the library's code. Attention is an explicit softmax over K and V = V_base + V_lr B: transformers' own
eager function for the error budget, and `exact_attention` for the oracle (eager takes its softmax in fp32 whatever the
inputs are).
"""

import copy
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lragent_hf import CACHE_ARG

Agent = tuple[str, ...]
EXACT = "tests_exact"


def exact_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Softmax attention in the inputs' own dtype; rows that attend to nothing give zeros.

    Args:
        attention_mask: bool [B, 1 or Hq, Lq, L] (True = attend) or additive.
        s_aux: attention sinks [Hq]: a score that takes its share of the softmax and has no value.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        scores = scores + attention_mask
    elif attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, float("-inf"))
    sinks = scores.new_full((scores.shape[1],), float("-inf")) if s_aux is None else s_aux.to(scores.dtype)
    sinks = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1].nan_to_num()
    return (weights @ value).transpose(1, 2).contiguous(), None


def exact_mask(*args: Any, **kwargs: Any) -> Tensor:
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


AttentionInterface.register(EXACT, exact_attention)
AttentionMaskInterface.register(EXACT, exact_mask)


class NaiveCache(Cache):
    """What one model's forward sees of a `NaiveRun`."""

    def __init__(self, run: "NaiveRun", past: int):
        super().__init__(layers=[])
        self.run, self.past = run, past

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.past

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.past + query_length, 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.run.store(layer_idx, key, value)


class NaiveRun:
    """Agents taking turns on one trajectory under one scheme.

    Args:
        model: a PEFT model with eager attention, in the dtype to compute in.
        scheme, window: as in the library.
        agents: adapters whose LR is written from the first token on (stacked).
    """

    def __init__(
        self,
        model: Any,
        scheme: str,
        window: int = 0,
        agents: tuple[str, ...] = ("plan", "act", "reflect"),
        key_lr: bool = True,
        recompute: tuple[int, ...] = (),
        hidden: bool = False,
    ):
        self.model, self.scheme, self.window, self.agents = model, scheme, window, agents
        self.recompute = recompute
        self.split = scheme.startswith("base")
        self.known: list[str] = []
        decoder: PreTrainedModel = model.get_base_model().get_decoder()
        found = {
            part.layer_idx: part for part in decoder.modules() if hasattr(part, "v_proj") and hasattr(part, "layer_idx")
        }
        self.attention = [found[index] for index in range(len(found))]
        self.inputs: list[Tensor] = [torch.empty(0)] * len(self.attention)
        self.angles: list[Any] = [None] * len(self.attention)
        self.keys = self.split and key_lr and any(getattr(part.k_proj, "lora_A", None) for part in self.attention)
        self.handles = [
            handle
            for index, attention in enumerate(self.attention)
            for handle in (
                attention.v_proj.register_forward_pre_hook(self._remember(index)),
                attention.register_forward_pre_hook(self._hear(index), with_kwargs=True),
                attention.k_proj.register_forward_hook(self._base_only),
            )
        ]
        if hidden:
            self.handles.append(decoder.layers[min(recompute)].register_forward_pre_hook(self._hand_on))
        self.tokens: Tensor | None = None
        self.reset()

    def detach(self) -> None:
        """Take the hooks off the model."""
        for handle in self.handles:
            handle.remove()

    def _remember(self, index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self.inputs[index] = args[0].detach()

        return hook

    def _hear(self, index: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self.angles[index] = kwargs.get("position_embeddings")

        return hook

    def _hand_on(self, module: nn.Module, args: tuple[Tensor, ...]) -> Any:
        """Input of the first recomputed layer: of cached positions what it was when they were cached."""
        cached = max(0, min(self.n, self.stop) - self.past)
        old = args[0][:, :0] if self.hidden is None else self.hidden[:, self.past : self.past + cached]
        whole = torch.cat([old, args[0][:, cached:]], 1)
        self.hidden = _put(self.hidden, self.past, self.past, whole, 1)
        return (whole, *args[1:])

    def _base_only(self, module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return module.base_layer(args[0]) if self.keys and hasattr(module, "base_layer") else output

    def reset(self) -> None:
        count = len(self.attention)
        self.n = 0
        self.k: list[dict[Any, Tensor]] = [{} for _ in range(count)]
        self.v: list[dict[Any, Tensor]] = [{} for _ in range(count)]
        self.lr: list[dict[Any, Tensor]] = [{} for _ in range(count)]
        self.k_lr: list[dict[Any, Tensor]] = [{} for _ in range(count)]
        self.cos: list[dict[Any, Tensor]] = [{} for _ in range(count)]
        self.sin: list[dict[Any, Tensor]] = [{} for _ in range(count)]
        self.hidden: Tensor | None = None
        self.lr_length: dict[Any, int] = {}
        self.read: dict[Agent, int] = {}
        self.writer: list[Agent] = []
        self.progress: tuple[Agent, int] | None = None

    # --- lengths --------------------------------------------------------------------------------------------------------

    def _lr_key(self, agent: Agent, adapter: str) -> Any:
        """Whose LR rows an adapter reads: its own, or those of one that joined before it with the same A."""
        if self.scheme == "base_shared":
            return (agent, adapter)
        known = self.known if self.n else list(dict.fromkeys((*self.agents, *agent)))
        return next((name for name in known if self._same_a(name, adapter)), adapter)

    def _same_a(self, first: str, second: str) -> bool:
        def a(module: Any, name: str) -> Any:
            return module.lora_A[name].weight if name in getattr(module, "lora_A", {}) else None

        pairs = [(a(site, first), a(site, second)) for site in self._sites()]
        known = [(x, y) for x, y in pairs if x is not None or y is not None]
        return first == second or all(y is None or (x is not None and torch.equal(x, y)) for x, y in known)

    def _sites(self) -> list[Any]:
        return [part.v_proj for part in self.attention] + [part.k_proj for part in self.attention if self.keys]

    def _has_lr(self, adapter: str) -> bool:
        return any(adapter in getattr(site, "lora_A", {}) for site in self._sites())

    def length(self, agent: Agent) -> int:
        if self.scheme in ("non_shared", "droidspeak"):
            return self.read.get(agent, 0)
        length = self.n
        if self.scheme.startswith("base"):
            for adapter in agent:
                if self._has_lr(adapter):
                    length = min(length, self.lr_length.get(self._lr_key(agent, adapter), 0))
        if self.window and self.n and self.writer[-1] != agent:
            if self.progress is not None and self.progress[0] == agent:
                return min(length, self.progress[1])
            length = min(length, max(0, self.n - self.window))
        return length

    # --- one forward ----------------------------------------------------------------------------------------------------

    def forward(self, agent: Agent, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Run ``ids`` [B, q], which start where the agent stands. Returns logits [B, q, vocab]."""
        self.agent, self.past = agent, self.length(agent)
        self.known = list(dict.fromkeys((*(self.known if self.n else self.agents), *agent)))
        self.stop = self.past + ids.shape[1]
        self.kv_from = self.n
        if self.window and self.n and self.writer[-1] != agent:
            started = self.progress is not None and self.progress[0] == agent
            self.kv_from = self.past if started else max(self.past, self.n - self.window)
        positions = None
        if mask is not None:
            positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, self.past : self.stop]
        with torch.no_grad():
            out = self.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True,
                **{CACHE_ARG: NaiveCache(self, self.past)},
            )  # fmt: skip
        if self.scheme in ("non_shared", "droidspeak"):
            self.read[agent] = self.stop
        for key in self.written:
            self.lr_length[key] = max(self.lr_length.get(key, 0), self.stop)
        if self.kv_from < self.stop:
            self.writer[self.kv_from : self.stop] = [agent] * (self.stop - self.kv_from)
        self.n = max(self.n, self.stop)
        self.progress = (agent, self.stop) if self.window and self.kv_from < self.stop < self.n else None
        return out.logits

    def store(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """V = X W0 + s (X A) B, split as the scheme says, put together again for this agent."""
        v_proj, x = self.attention[index].v_proj, self.inputs[index]
        agent, past, stop = self.agent, self.past, self.stop
        self.written: list[Any] = []
        stream = agent if self.scheme == "non_shared" else None
        first = past if self.scheme == "non_shared" or index in self.recompute else self.kv_from
        split = self.split
        base = getattr(v_proj, "base_layer", v_proj)(x).view(*x.shape[:2], -1, value.shape[-1]).transpose(1, 2)
        self.k[index][stream] = _put(self.k[index].get(stream), first, past, key, 2)
        self.v[index][stream] = _put(self.v[index].get(stream), first, past, base if split else value, 2)
        k, v = self.k[index][stream][:, :, :stop], self.v[index][stream][:, :, :stop]
        if not split:
            return k, v
        k_proj = self.attention[index].k_proj
        if self.keys and self.angles[index] is not None:  # kept as a prefix, like the base keys that they turned
            for store, rows in zip((self.cos, self.sin), self.angles[index], strict=True):
                old = store[index].get(0)
                known = 0 if old is None else min(old.shape[1], self.n)
                first = max(past, min(known, self.kv_from))
                if past <= known and first < stop:
                    store[index][0] = _put(old, first, past, rows.expand(x.shape[0], -1, -1), 1)
        adapters = agent if self.scheme == "base_shared" else tuple(self.known)
        for adapter in adapters:
            name = self._lr_key(agent, adapter)
            length = self.lr_length.get(name, 0)
            own = name in [self._lr_key(agent, mine) for mine in agent]
            if not self._has_lr(adapter) or name in self.written or (not own and length < self.n):
                continue
            start = max(past, min(length, self.kv_from))
            if start < stop:
                self.written.append(name)
                if adapter in getattr(v_proj, "lora_A", {}):
                    rows = x @ v_proj.lora_A[adapter].weight.T
                    self.lr[index][name] = _put(self.lr[index].get(name), start, past, rows, 1)
                if self.keys and adapter in getattr(k_proj, "lora_A", {}):
                    rows = x @ k_proj.lora_A[adapter].weight.T
                    self.k_lr[index][name] = _put(self.k_lr[index].get(name), start, past, rows, 1)
        for adapter in agent:
            if self.keys and adapter in getattr(k_proj, "lora_A", {}):
                b = k_proj.lora_B[adapter].weight * k_proj.scaling[adapter]
                part = self.k_lr[index][self._lr_key(agent, adapter)][:, :stop] @ b.T
                part = part.view(*part.shape[:2], -1, key.shape[-1]).transpose(1, 2)
                k = k + self._turn(index, part, stop)
            if adapter in getattr(v_proj, "lora_A", {}):
                b = v_proj.lora_B[adapter].weight * v_proj.scaling[adapter]
                part = self.lr[index][self._lr_key(agent, adapter)][:, :stop] @ b.T
                v = v + part.view(*part.shape[:2], -1, value.shape[-1]).transpose(1, 2)
                if v_proj.lora_B[adapter].bias is not None:
                    constant = v_proj.lora_B[adapter].bias * v_proj.scaling[adapter]
                    v = v + constant.view(1, -1, 1, value.shape[-1])
                if adapter in v_proj.lora_magnitude_vector:
                    v = _dora(
                        v, v_proj.base_layer, v_proj.lora_A[adapter].weight, b, v_proj.lora_magnitude_vector[adapter]
                    )
        return k, v

    def _turn(self, index: int, states: Tensor, stop: int) -> Tensor:
        """``states`` [B, H, L, D] under the model's own rotary embedding."""
        attention = self.attention[index]
        module = sys.modules[type(attention).__module__]
        if not getattr(attention, "use_rope", True) or not self.cos[index]:
            return states
        cos, sin = self.cos[index][0][:, :stop], self.sin[index][0][:, :stop]
        if getattr(attention, "rotary_ndims", None):  # these turn the first columns only, apart from the others
            some, rest = states[..., : attention.rotary_ndims], states[..., attention.rotary_ndims :]
            return torch.cat((module.apply_rotary_pos_emb(some, some, cos, sin)[1], rest), -1)
        turned: Tensor = module.apply_rotary_pos_emb(states, states, cos, sin)[1]
        return turned

    # --- undoing --------------------------------------------------------------------------------------------------------

    def crop(self, agent: Agent, count: int) -> None:
        if self.progress is not None and self.progress[0] == agent:
            self.progress = (agent, max(0, self.progress[1] - count))
            return
        window, self.window = self.window, 0
        length = self.length(agent)
        self.window = window
        if length == self.n:
            self.n = max(0, self.n - count)
            del self.writer[self.n :]
            self.progress = None
            self.lr_length = {name: min(length, self.n) for name, length in self.lr_length.items()}
            self.read = {name: min(length, self.n) for name, length in self.read.items()}
        elif self.scheme in ("non_shared", "droidspeak"):
            self.read[agent] = max(0, length - count)
        else:
            for adapter in agent:
                name = self._lr_key(agent, adapter)
                if self.lr_length.get(name, 0) < self.n:
                    self.lr_length[name] = min(self.lr_length.get(name, 0), max(0, length - count))

    def truncate(self, total: int) -> None:
        """Cut the trajectory for everybody."""
        self.n = min(self.n, total)
        del self.writer[self.n :]
        self.progress = None
        self.lr_length = {name: min(length, self.n) for name, length in self.lr_length.items()}
        self.read = {name: min(length, self.n) for name, length in self.read.items()}

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows."""
        for store in (self.k, self.v, self.lr, self.k_lr, self.cos, self.sin):
            for layer in store:
                layer.update({name: tensor[rows] for name, tensor in layer.items()})
        self.hidden = None if self.hidden is None else self.hidden[rows]

    def state(self) -> dict[str, Any]:
        """All that distinguishes this run; tensors are never written in place, so they need no copies."""
        copies: dict[str, Any] = {
            name: [dict(layer) for layer in getattr(self, name)] for name in ("k", "v", "lr", "k_lr", "cos", "sin")
        }
        copies |= {name: dict(getattr(self, name)) for name in ("lr_length", "read")}
        copies |= {name: list(getattr(self, name)) for name in ("writer", "known")}
        return copies | {"n": self.n, "progress": self.progress, "hidden": self.hidden}

    def resume(self, state: dict[str, Any]) -> None:
        """Become the run that had this state."""
        self.__dict__.update(state)


def _dora(v: Tensor, base: nn.Linear, a: Tensor, b: Tensor, magnitude: Any) -> Tensor:
    """What DoRA makes of V = X W0 + X A B + bias: all but the bias times m / ||W0 + A B||, feature by feature."""
    gain = magnitude.weight / (base.weight + b @ a).norm(dim=1)
    gain = gain.view(1, -1, 1, v.shape[-1])
    if base.bias is None:
        return gain * v
    bias = base.bias.view(1, -1, 1, v.shape[-1])
    return gain * (v - bias) + bias


def _put(old: Tensor | None, first: int, past: int, rows: Tensor, dim: int) -> Tensor:
    """``old`` up to ``first``, then ``rows`` (which start at ``past``) from there on, then what of ``old`` lies behind."""
    if old is None:
        return rows
    rows = rows.narrow(dim, min(first - past, rows.shape[dim]), max(0, rows.shape[dim] - (first - past)))
    end = first + rows.shape[dim]
    tail = [old.narrow(dim, end, old.shape[dim] - end)] if old.shape[dim] > end else []
    return torch.cat([old.narrow(dim, 0, first), rows, *tail], dim)


def assert_close_to_oracle(name: str, got: Tensor, oracle: Tensor, eager: Tensor) -> None:
    """``got`` may be twice as far from the fp64 oracle as eager in the same dtype is, by maximum and by RMS."""
    scale = oracle.abs().max().item()
    ours, theirs = (got.double() - oracle).abs(), (eager.double() - oracle).abs()
    tiny = 8 * torch.finfo(got.dtype).eps * scale
    report = (
        f"{name}: max error {ours.max():.3g} against {theirs.max():.3g} of eager, "
        f"RMS ratio {(ours.square().mean() / theirs.square().mean().clamp(min=1e-300)).sqrt():.3g}, scale {scale:.3g}"
    )
    assert not got.isnan().any(), report
    assert ours.max() <= 2 * theirs.max() + tiny, report
    assert ours.square().mean().sqrt() <= 2 * theirs.square().mean().sqrt() + tiny, report


def exact_twin(model: Any) -> Any:
    """A copy of a model in fp64 with explicit softmax attention, for a `NaiveRun`. Made before the model is attached."""
    twin = copy.deepcopy(model).double()
    twin.base_model.model.set_attn_implementation(EXACT)
    return twin


def activate(model: Any, agent: Agent) -> None:
    """Switch to the agent; ``()`` is the base model."""
    if agent:
        model.base_model.enable_adapter_layers()
        model.base_model.set_adapter(list(agent))
    else:
        model.base_model.disable_adapter_layers()


def assert_turns(
    model: Any,
    cache: Cache,
    naive: NaiveRun,
    ids: Tensor,
    turns: Iterable[tuple[Agent, int]],
    mask: Tensor | None = None,
    allowed: float = 1e-9,
) -> None:
    """Agents bring the trajectory to those lengths, the first part of a turn in one forward, the last two one by one.

    ``model`` is in fp64, as ``naive`` is: logits are equal to rounding, at every attended position.
    """
    mask = torch.ones_like(ids) if mask is None else mask
    for agent, stop in turns:
        activate(model, agent)
        activate(naive.model, agent)
        start = cache.get_seq_length()
        assert start == naive.length(agent), f"{agent} stands at {start}, not {naive.length(agent)}"
        for end in (stop - 2, stop - 1, stop):
            if end <= start:
                continue
            positions = (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, start:]
            with torch.no_grad():
                got = model(
                    input_ids=ids[:, start:end],
                    attention_mask=mask[:, :end],
                    position_ids=positions,
                    **{CACHE_ARG: cache},
                ).logits
            want = naive.forward(agent, ids[:, start:end], mask[:, :end])
            attended = mask[:, start:end].bool()
            error = (got - want)[attended].abs().max().item() if attended.any() else 0.0
            assert error < allowed * (1 + want.abs().max().item()), f"{agent} {start}:{end}: error {error:.3g}"
            start = end
