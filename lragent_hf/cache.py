"""LoRASharedCache: the cache that several LoRA agents share, as transformers sees it."""

import logging
import operator
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from .agents import Agent, Mixed, agent_label
from .attention import BACKENDS
from .binding import ModelBinding, attach
from .buffer import GrowableBuffer
from .checkpoint import read_cache, read_manifest, write_cache
from .describe import as_html, as_text
from .errors import (
    AdapterChangedError,
    CacheFullError,
    CacheModelMismatchError,
    OutsideForwardError,
    TrajectoryMismatchError,
    UnsupportedModelError,
)
from .forward import Forward
from .hidden import block_of
from .ledger import Ledger
from .memory import MemoryReport, memory_report
from .mixed import branch_off, follow_rows, prefix_to_take
from .placement import device_of
from .roster import Roster
from .rotary import RotaryStore
from .schemes import Scheme, resolve_scheme
from .static import StaticMode
from .storage import SharedLayer
from .trajectory import Step, Trajectory

__all__ = ["LoRASharedCache"]

logger = logging.getLogger("lragent_hf")


class LoRASharedCache(Cache):
    """A KV cache for LoRA agents that take turns on one trajectory over one frozen backbone.

    Pass it to ``generate`` or to a forward like any other cache, and switch agents with PEFT's ``set_adapter``. Keys and
    base values are stored once; what an adapter adds to the values is stored in rank r (paper: LRAgent, arXiv 2602.01053,
    section 3). ``get_seq_length()`` answers for the agent that is active, so ``generate`` feeds each agent exactly the
    tokens it has yet to run.

    Args:
        model: a ``PeftModel``, or a transformers model with LoRA adapters. It is attached (hooks; undone by ``detach``).
        scheme: ``"base_lr_stacked"`` (default), ``"base_lr_shared"``, ``"base_shared"``, ``"full_shared"`` or
            ``"non_shared"``, or for comparison ``"droidspeak"``; see ``lragent_hf.schemes``.
        handover_window: tokens at the end of the trajectory that an agent runs again when it takes over, rewriting
            them for all agents. 0: none. As long as the context: exact. For ``full_shared``, ``base_lr_shared`` and
            ``base_lr_stacked``; the caller passes the whole prompt.
        agents: names of the adapters whose LR is kept from the first token on. Default: all LoRA adapters loaded when the
            first token is cached. An adapter that becomes active later joins, at the cost of one LR prefill.
        key_lr: whether what adapters on k_proj add to the keys is kept apart in rank r, as for values (the paper's appendix
            D.1). False: keys are shared whole, as the agent that ran a token first made them (the paper's main setting).
        key_working_copy: keep the active agent's keys materialised, in one buffer for all agents: made anew at a hand-over,
            extended as tokens come. Decoding then costs what it costs without LoRA on k_proj. Default: on a CPU.
        value_working_copy: the same for values: attention over them is then the fused one of ``full_shared``, and the cache
            takes half as much again. For decoding on a CPU in half precision; in float32 it gains nothing.
        recompute_layers: for ``"droidspeak"``: indices of the layers whose K and V an agent rewrites as it runs what it has
            not read. ``droidspeak_layers`` finds them.
        hidden_cache: for ``"droidspeak"``: also cache the input of the first recomputed layer, so that an agent taking over
            skips the layers below it (LRAgent, appendix C.5). hidden_size more values a token.
        attention: ``"auto"``: attention runs in ``flash_lora_attention`` during forwards with this cache. ``"keep"``: in
            the model's own implementation, on values put together layer by layer (slower).
        backend: of ``flash_lora_attention``.
        reserve: positions to make room for at the first write; buffers grow by an eighth beyond that.
        max_cache_len: positions to make room for, once and for all: buffers keep their shape, and ``generate`` compiles
            decoding as it does for transformers' ``StaticCache`` (on GPUs; elsewhere if its ``compile_config`` says so).
            Attention of a decoded token then reads the whole buffers, whatever their use.
        offload: keep the buffers in CPU memory; each layer's part is copied to where the layer runs while it runs. For
            contexts that do not fit on a GPU; copies are not overlapped with compute.

    Raises:
        ValueError: an unknown scheme or option, or one that the scheme has no use for.
        UnsupportedModelError, UnsupportedAdapterError: model or adapters cannot be split exactly; says what to do.
        SharedAMismatchError: ``base_lr_shared`` and adapters with different A on v_proj (or k_proj, with ``key_lr``).
    """

    def __init__(
        self,
        model: nn.Module,
        scheme: str | Scheme = "base_lr_stacked",
        *,
        handover_window: int = 0,
        agents: Sequence[str] | None = None,
        key_lr: bool = True,
        key_working_copy: bool | None = None,
        value_working_copy: bool = False,
        recompute_layers: Sequence[int] | None = None,
        hidden_cache: bool = False,
        attention: str = "auto",
        backend: str = "auto",
        reserve: int = 0,
        max_cache_len: int | None = None,
        offload: bool = False,
    ):
        self.scheme = resolve_scheme(scheme, recompute_layers)
        if attention not in ("auto", "keep"):
            raise ValueError(f"attention must be 'auto' or 'keep', not {attention!r}.")
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {BACKENDS}, not {backend!r}.")
        handover_window = operator.index(handover_window)
        if isinstance(agents, str):
            raise ValueError(f"agents is a list of names: agents=[{agents!r}].")
        if reserve < 0:
            raise ValueError(f"reserve counts positions, it cannot be {reserve}.")
        if max_cache_len is not None and max_cache_len < 1:
            raise ValueError(f"max_cache_len counts positions, it cannot be {max_cache_len}.")
        if handover_window < 0:
            raise ValueError(f"handover_window counts tokens, it cannot be {handover_window}.")
        if handover_window and not self.scheme.takes_window:
            raise ValueError(
                f"handover_window={handover_window} means nothing under {self.scheme.name!r}: an agent there reads nothing "
                "that the window would make its own. Leave it 0, or use full_shared, base_lr_shared or base_lr_stacked."
            )
        if hidden_cache and self.scheme.recompute_layers is None:
            raise ValueError(f"hidden_cache means nothing under {self.scheme.name!r}: it is for 'droidspeak'.")
        self.binding: ModelBinding = attach(model)
        self.attention, self.backend = attention, backend
        self.ledger = Ledger(self.scheme, handover_window)
        self.trajectory = Trajectory()
        self._said_keep = False
        align = max(1, 16 // self.binding.decoder.dtype.itemsize)  # column blocks start at multiples of 16 bytes
        self.roster = Roster(self.scheme, align, key_lr, list(agents) if agents is not None else None)
        self.rotary = RotaryStore()
        on_cpu = device_of(self.binding.decoder).type == "cpu"
        self.key_working_copy = on_cpu if key_working_copy is None else key_working_copy
        self.value_working_copy = value_working_copy
        stated = getattr(self.binding.decoder.config, "num_hidden_layers", 0)
        count = max([stated, *(index + 1 for index in self.binding.layers)])
        place = torch.device("cpu") if offload else None
        if self.scheme.recompute_layers is not None:
            self._check_recompute(count, hidden_cache)
        self.hidden = GrowableBuffer(1, reserve, place)
        # With layer 0 recomputed there is no layer below to skip.
        self.hidden_cache = hidden_cache and min(self.scheme.recompute_layers or (0,)) > 0
        super().__init__(layers=[SharedLayer(self, reserve, place, max_cache_len) for _ in range(count)])
        self.static = None if max_cache_len is None else StaticMode(self, max_cache_len)
        self.roster.check_declared(self.binding)
        if self.scheme.splits_values:
            self.binding.check_splittable(self.roster.starting(self.binding, ()), self.scheme.name, key_lr)
            self.roster.plan(self.binding, (), empty=True)  # to fail now rather than at the first token

    # --- a forward: called by the binding, and by the model in between -------------------------------------------------

    def begin(
        self,
        binding: ModelBinding,
        *,
        keep_attention: bool,
        hidden_states: bool,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Any,
        position_ids: Tensor | None,
    ) -> Forward:
        """Check everything that can be checked before the first layer, and plan the forward. Writes nothing on error."""
        if binding.decoder is not self.binding.decoder:
            raise CacheModelMismatchError(
                "This cache was made for another model. Make one with LoRASharedCache(model) for the model that runs."
            )
        self.binding = binding
        if binding.decoder.training and torch.is_grad_enabled():
            raise CacheModelMismatchError(
                "The model is in training mode: gradients do not flow through a cache. Call model.eval(), or run under "
                "torch.no_grad()."
            )
        inputs = input_ids if input_ids is not None else inputs_embeds
        if inputs is None:
            raise ValueError("The forward has neither input_ids nor inputs_embeds.")
        if input_ids is not None and (input_ids.ndim != 2 or input_ids.is_floating_point() or not input_ids.numel()):
            if input_ids.ndim == 2 and not input_ids.shape[1] and self.ledger.total:
                raise TrajectoryMismatchError(
                    f"The forward brings no tokens. {self.get_seq_length()} position(s) are cached for the active agent, "
                    "and generate runs what comes after them: pass the whole trajectory. If that is it, "
                    "cache.align(input_ids) cuts the cache to what is common and leaves a token to run."
                )
            raise ValueError(
                f"input_ids must be integers [B, q] with at least one token, got {input_ids.dtype} {list(input_ids.shape)}."
            )
        rows, count = inputs.shape[:2]
        replaced = binding.resolve()
        agent = binding.agent()
        if isinstance(agent, Mixed) and len(agent.rows) != rows:
            raise ValueError(
                f"adapter_names gives adapters to {len(agent.rows)} rows and the forward brings {rows}. PEFT repeats names "
                "for num_beams alone: for num_return_sequences repeat prompts and names yourself."
            )
        fresh = replaced or count > 1 or agent != self.ledger.last
        if fresh:
            self._check_agent(agent)
        roster = self.roster.plan(binding, agent, not self.ledger.total)
        own = roster.own(agent)
        keys = [key for _, key in own]
        mask = attention_mask if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2 else None
        start = prefix_to_take(self, agent, check=True)
        past = max(start, self.ledger.length(agent, keys))
        if self.static is not None:
            if past + count > self.static.length:
                raise CacheFullError(
                    f"{past} position(s) are cached for agent {agent_label(agent)!r} and the forward brings {count}: more "
                    f"than max_cache_len={self.static.length}. Make the cache with a larger max_cache_len (prompt and all "
                    "that will be written), or without, so that it grows."
                )
            if fresh:
                self.static.forget_verdict()
            mask = self.static.padding(self, attention_mask, past, count) if mask is None else mask
        step = Step(agent, past, count, rows, inputs.device, input_ids, mask, position_ids)
        conventions = self.trajectory.check(step)
        keep = self._keeps_attention(keep_attention)
        if self.hidden_cache and (keep or hidden_states):
            raise UnsupportedModelError(
                f"{type(binding.decoder).__name__} gives out hidden states or attentions here, or its attention function "
                "cannot be exchanged: not with rows that skip layers. Make the cache with hidden_cache=False."
            )
        before = self.roster, self.ledger.lr
        if roster is not self.roster:
            self.roster = roster
            self.ledger.lr = {key: self.ledger.lr.get(key, 0) for key in roster.banks}
        return Forward(
            self, self.ledger.plan(agent, keys, past, count), before, step, conventions, own, start, keep, fresh,
        )  # fmt: skip

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new K and V [B, Hkv, q, D]; return all of them as views.

        Under the ``base_*`` schemes V is V_base; the adapter's part reaches the attention function by way of the binding
        (or, with ``attention="keep"``, is added here).

        Raises:
            OutsideForwardError: no forward with this cache is running on the model it was made for.
        """
        step = self.layers[layer_idx].step
        if step is not None:
            return step.update(key_states, value_states)
        forward = self.binding.forward
        if forward is None or forward.cache is not self:
            raise OutsideForwardError(
                "LoRASharedCache.update was called outside a forward of its model's decoder. If the model was detached, "
                "call lragent_hf.attach(model); do not call decoder layers by hand."
            )
        return forward.update(layer_idx, key_states, value_states)

    def update_indexer(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, as are the two below: what is neither K nor V has no place here."""
        raise UnsupportedModelError(
            f"{type(self.binding.decoder).__name__} caches something besides K and V (an indexer's keys, a state), which "
            "agents cannot share by position. Use a model whose layers cache K and V only."
        )

    update_conv_state = update_recurrent_state = update_indexer

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that the agent now active has in the cache. Constant during a forward; asking changes nothing.

        0 for a layer that stored nothing: cross-attention that has seen no image asks that way.
        """
        if 0 < layer_idx < len(self.layers) and not self.layers[layer_idx].is_initialized:
            return 0
        agent = self.binding.agent()
        return max(self.ledger.length(agent, self.own_keys(agent)), prefix_to_take(self, agent))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(key positions, offset of the first) for a mask over ``query_length`` more tokens."""
        read = self.get_seq_length()
        return (read + query_length if self.static is None else self.static.mask_length(self, query_length, read)), 0

    @property
    def is_compileable(self) -> bool:
        """Whether ``generate`` may compile decoding: with ``max_cache_len``, unless something stands in the way."""
        return self.static is not None and self.static.obstacle(self) is None

    # --- whole-cache operations ----------------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Undo the active agent's last ``-tokens_to_remove`` tokens.

        If the agent stands at the head of the trajectory, it is cut for everybody; if it lags, only its own part is. After
        a ``generate(adapter_names=...)`` has returned the active agent is the one of ``set_adapter`` again: to cut for
        everybody whoever is active, use ``align``.

        Raises:
            ValueError: a positive number (transformers dropped that meaning).
        """
        tokens_to_remove = operator.index(tokens_to_remove)
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass a negative number, the tokens to remove from the end.")
        self.binding.settle()
        if tokens_to_remove == 0 or not self.ledger.total:
            return
        agent = self.binding.agent()
        self.ledger.crop(agent, self.own_keys(agent), -tokens_to_remove)
        self._after_cut()

    def align(self, input_ids: Tensor) -> int:
        """Cut the trajectory to what it shares with ``input_ids``, leaving at least one token of these to run.

        Args:
            input_ids: [L], or [1, L] (of several rows the one with the longest common prefix is kept), or [B, L] with a
                row for each row of the cache (all are cut to the shortest common prefix).

        Returns:
            Tokens of ``input_ids`` that are cached now.

        Raises:
            CacheModelMismatchError: neither one row nor as many as the cache holds.
        """
        self.binding.settle()
        input_ids = torch.as_tensor(input_ids)
        if not input_ids.numel() or input_ids.ndim > 2:
            raise ValueError(f"align() takes tokens [L] or [B, L], at least one, not {input_ids!r:.60}.")
        input_ids = input_ids if input_ids.ndim == 2 else input_ids[None]
        if self.trajectory.rows is not None and input_ids.shape[0] not in (1, self.trajectory.rows):
            raise CacheModelMismatchError(
                f"align() was given {input_ids.shape[0]} rows and the cache holds {self.trajectory.rows}."
            )
        row, length = self.trajectory.common_prefix(input_ids)
        length = max(0, min(length, input_ids.shape[1] - 1))
        if row >= 0:
            self.batch_select_indices(torch.tensor([row]))
        self.ledger.truncate(length)
        self._after_cut()
        return length

    def reset(self) -> None:
        """Empty the cache: tokens, buffers, and who had read what. The scheme and its options stay."""
        self.binding.settle()
        self.ledger.clear()
        self.trajectory.clear()
        self.roster.clear()
        self.rotary.clear()
        self.hidden.clear()
        for layer in self.layers:
            layer.clear()
        if self.static is not None:
            self.static.drop_buffers()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder batch rows, as beam search does: row i becomes what row ``beam_idx[i]`` was.

        This, and the two below, empty the cache if they are interrupted or run out of memory midway.
        """
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep batch rows ``indices`` only (an index or a bool mask [B])."""
        indices = torch.as_tensor(indices)
        if indices.dtype == torch.bool:
            if indices.shape != (self.trajectory.rows or indices.numel(),):
                raise ValueError(f"A mask of {list(indices.shape)} rows was given to a cache with {self.batch_size}.")
            indices = indices.nonzero().flatten()
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row ``repeats`` times."""
        if repeats < 1:
            raise ValueError(f"batch_repeat_interleave({repeats}): each row is kept at least once.")
        if self.trajectory.rows is not None:
            self._select(torch.arange(self.trajectory.rows).repeat_interleave(repeats))

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Move a layer's buffers to CPU memory until ``prefetch``; forwards go on, and copy what they read."""
        self.binding.settle()
        self.layers[layer_idx].offload()

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Move a layer's buffers back to where the layer runs."""
        self.binding.settle()
        self.layers[layer_idx % len(self.layers)].prefetch()

    def buffers(self) -> Iterator[GrowableBuffer]:
        """Every buffer of the cache, the token record's included."""
        for layer in self.layers:
            yield from layer.buffers()
        yield from self.rotary.buffers()
        if self.hidden.capacity:
            yield self.hidden
        yield from self.trajectory.buffers()

    def fork(self) -> "LoRASharedCache":
        """A branch: a cache with the same contents that goes its own way.

        It reads what is here from this cache's storage; what either writes from now on is its own. So ten branches take
        one prefix and ten tails. Which of them is dropped first does not matter. Attention over prefix and tail is merged
        by log-sum-exp; where that cannot be (``attention="keep"``, sliding windows), they are joined, a layer at a time.
        """
        return self._clone(
            lambda layer, new: layer.fork(new, self.ledger.valid), lambda buffer, length: buffer.fork(length)
        )

    def branch(self, agents: Sequence[str | None]) -> "LoRASharedCache":
        """A fork of one row that goes on as a batch: row i is for ``agents[i]`` (debate, voting, sampling in parallel).

        All rows read what is here from one place in memory; each writes a tail of its own. Run the whole batch with PEFT's
        ``adapter_names=agents``, and go on from one of the rows with ``adopt``. Under ``non_shared`` and ``base_shared``
        each row takes a copy of what its agent keeps for itself.

        Args:
            agents: names of adapters, or ``None`` for the base model; the same one may come several times.

        Raises:
            ValueError: no agent, or an unknown one.
            CacheModelMismatchError: this cache is a batch already.
            UnsupportedAdapterError: under ``non_shared`` and ``base_shared``: the agents have not read equally far.
        """
        return branch_off(self, agents)

    def adopt(self, row: int) -> None:
        """Go on from batch row ``row`` alone, as any agent. What branches read of their origin stays where it lies.

        If ``generate`` went on with pads after that row had ended, ``align`` cuts them off.
        """
        self._select(torch.tensor([operator.index(row)]))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache to the folder ``path``: safetensors and a JSON manifest, all of it or nothing.

        An older saved cache there is replaced once the new one is on the disk; anything else there is left alone.

        Raises:
            FileExistsError: something else is there.
        """
        self.binding.settle()
        write_cache(self, path)

    @classmethod
    def load(
        cls,
        model: nn.Module,
        path: str | os.PathLike[str],
        *,
        key_working_copy: bool | None = None,
        value_working_copy: bool = False,
        attention: str = "auto",
        backend: str = "auto",
        reserve: int = 0,
        max_cache_len: int | None = None,
        offload: bool = False,
    ) -> "LoRASharedCache":
        """The cache that ``save`` wrote to ``path``, on a model with the same base weights and adapters.

        Args:
            model: as for the constructor, with every adapter loaded that the saved cache serves.
            path: the folder.
            key_working_copy, value_working_copy, attention, backend, reserve, max_cache_len, offload: as for the
                constructor; the rest is the saved cache's.

        Raises:
            CacheFileError: nothing is saved there, or it is torn, truncated or changed.
            CacheModelMismatchError: other base weights, another dtype or another A; says where.
        """
        manifest = read_manifest(path)
        if max_cache_len is not None and manifest["ledger"]["total"] > max_cache_len:
            raise CacheFullError(
                f"{manifest['ledger']['total']} positions are saved in {path}, more than max_cache_len={max_cache_len}. "
                "Load with a larger one, or without."
            )
        cache = cls(
            model, Scheme(**manifest["scheme"]), handover_window=manifest["handover_window"], agents=manifest["agents"],
            key_lr=manifest["key_lr"], key_working_copy=key_working_copy, value_working_copy=value_working_copy,
            hidden_cache=manifest.get("hidden_cache", False), attention=attention, backend=backend, reserve=reserve,
            max_cache_len=max_cache_len, offload=offload,
        )  # fmt: skip
        read_cache(cache, manifest, path)
        return cache

    def __deepcopy__(self, memo: dict[int, Any]) -> "LoRASharedCache":
        """An independent cache on the same model: buffers and record are copied, the model is not."""
        new = self._clone(SharedLayer.copy, lambda buffer, length: buffer.copy())
        if self.static is not None:
            new.static = StaticMode(new, self.static.length)
        memo[id(self)] = new
        return new

    def _clone(
        self,
        layer: Callable[[SharedLayer, "LoRASharedCache"], SharedLayer],
        other: Callable[[GrowableBuffer, int], GrowableBuffer],
    ) -> "LoRASharedCache":
        self.binding.settle()
        new: LoRASharedCache = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.ledger, new.trajectory = self.ledger.copy(), self.trajectory.copy()
        new.roster, new.rotary = self.roster.copy(), self.rotary.clone(lambda one: other(one, self.ledger.rotary))
        new.static = None
        new.hidden = other(self.hidden, self.ledger.total if self.hidden.capacity else 0)
        new.layers = [layer(mine, new) for mine in self.layers]
        return new

    # --- what people look at -------------------------------------------------------------------------------------------

    @property
    def agents(self) -> dict[str, int]:
        """Tokens in the cache for each agent that has taken a turn, in order of first appearance."""
        return {agent_label(agent): self.ledger.length(agent, self.own_keys(agent)) for agent in self.ledger.turns}

    @property
    def batch_size(self) -> int:
        """Batch rows, or -1 while the cache is empty."""
        return self.trajectory.rows if self.trajectory.rows is not None else -1

    @property
    def handover_window(self) -> int:
        """Tokens that an agent runs again when it takes over."""
        return self.ledger.window

    def memory_report(self) -> MemoryReport:
        """Bytes in use and reserved by K, V and LR, per agent, and what the same tokens would take unshared."""
        return memory_report(self)

    def __repr__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    # --- who keeps what where ------------------------------------------------------------------------------------------

    def stream_of(self, agent: Agent) -> Agent | None:
        """Key of the K and V buffers an agent reads."""
        return agent if self.scheme.kv == "per_agent" else None

    def active_stream(self) -> Agent | None:
        """Key of the K and V buffers of the agent now active."""
        return self.stream_of(self.binding.agent())

    def drop_unused(self) -> None:
        """Let go of buffers of which nothing is in use."""
        if not self.ledger.rotary:
            self.rotary.clear()
        if not self.ledger.total:
            self.hidden.clear()
        for layer in self.layers:
            if not self.ledger.total:
                layer.clear()
            for group, lengths in (
                (layer.lr, self.ledger.lr),
                (layer.k_lr, self.ledger.lr),
                (layer.k, self.ledger.streams),
                (layer.v, self.ledger.streams),
            ):
                for key in [key for key in group if key is not None and not lengths.get(key, 0)]:
                    del group[key]

    def own_keys(self, agent: Agent) -> list[Hashable]:
        """The banks in which an agent's LR lies."""
        if not self.ledger.total or not self.scheme.splits_values:
            return []
        return [key for _, key in self.roster.plan(self.binding, agent, empty=False).own(agent)]

    def _check_recompute(self, count: int, hidden_cache: bool) -> None:
        chosen = self.scheme.recompute_layers or ()
        if chosen[0] < 0 or chosen[-1] >= count:
            raise ValueError(f"recompute_layers are indices of the model's {count} layers, from 0; got {list(chosen)}.")
        if hidden_cache and chosen[0]:
            if self.attention == "keep":
                raise ValueError("hidden_cache=True needs the library's attention function: leave attention='auto'.")
            for index in range(chosen[0] + 1):
                block_of(self.binding.decoder, index)

    def _check_agent(self, agent: Agent) -> None:
        self.binding.check_regular()
        if not self.binding.adapted and any(self.ledger.turns):
            raise AdapterChangedError(
                "The model has no adapters any more (merge_and_unload, unload), and tokens of "
                f"{', '.join(self.agents)} are cached. Call cache.reset(); to run without adapters use disable_adapter()."
            )
        if not self.scheme.splits_values:
            return
        self.binding.check_splittable(agent, self.scheme.name, self.roster.keys)
        if self.ledger.total:
            self.roster.check_unchanged(self.binding, agent, self.ledger)

    def _keeps_attention(self, asked: bool) -> bool:
        """Whether this forward runs the model's own attention function."""
        keep = asked or self.attention == "keep" or not self.binding.can_switch_attention()
        if keep and self.scheme.splits_values and not self._said_keep:
            self._said_keep = True
            logger.info(
                "The model's own attention runs on values put together from base and LR, layer by layer: correct, slower "
                "than flash_lora_attention."
            )
        return keep

    def _after_cut(self) -> None:
        if self.static is not None:
            self.static.drop_buffers()
        self.trajectory.truncate(self.ledger.total)
        self.drop_unused()
        for layer in self.layers:
            layer.truncate(self.ledger.valid)
        for buffer in self.rotary.buffers():
            buffer.truncate(self.ledger.rotary)
        self.hidden.truncate(self.ledger.total)

    def _select(self, rows: Tensor) -> None:
        self.binding.settle()
        if self.trajectory.rows is None:
            return
        if rows.ndim != 1 or not rows.numel() or rows.is_floating_point() or rows.dtype == torch.bool:
            raise ValueError(f"Rows are chosen by an index or a bool mask that keeps at least one, not by {rows}.")
        if int(rows.min()) < -self.trajectory.rows or int(rows.max()) >= self.trajectory.rows:
            raise IndexError(f"rows {rows.tolist()} were asked of a cache with {self.trajectory.rows}")
        rows = rows.long() % self.trajectory.rows
        try:
            for buffer in self.buffers():
                buffer.select(rows)
        except BaseException:  # out of memory, Ctrl-C. Keeping all rows to go back to would take the memory twice
            self.reset()
            raise
        follow_rows(self, rows)
        for layer in self.layers:
            layer.drop_work()
        if self.static is not None and rows.numel() != self.trajectory.rows:
            self.static.drop_buffers()
        self.trajectory.rows = rows.numel()
