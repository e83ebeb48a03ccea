"""Static mode: one token at a time on tensors of fixed shape, which torch.compile compiles once for all agents.

Before such a token, `StaticMode.enter` puts everything that differs from token to token and from agent to agent (the
position, the mask, the active A and B) into tensors. What lies between the decoder's hooks then asks no question whose
answer changes: it stores at the position that a tensor names, and attends to whole buffers under a mask. Who runs, whether
it may, and what is committed stays in the hooks, which torch.compile leaves to Python. All other forwards (prefill, LR
prefill, a hand-over window) run as they do without static mode, on the same buffers; `generate` does not compile them.
"""

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import _compat
from .adapters import lora_a, tuner_layers
from .agents import Agent, Mixed
from .attention.static import StaticLayer
from .dense_masks import padding_of, without_squares
from .layer import LayerBinding
from .slots import Slot, fixed_zeros, misfit

if TYPE_CHECKING:
    from .cache import LoRASharedCache
    from .forward import Forward

__all__ = ["StaticMode"]

logger = logging.getLogger("lragent_hf")


class StaticMode:
    """Static mode of one cache.

    Attributes:
        length: positions there is room for.
    """

    def __init__(self, cache: "LoRASharedCache", length: int):
        self.length = length
        self._layers: dict[int, StaticLayer] = {}
        self._positions: dict[torch.device, Tensor] = {}
        self._slots: dict[nn.Module, Slot] = {}
        self._loaded: Any = None
        self._said: set[str] = set()
        self._merged = self._looked = False
        self._verdict: tuple[Agent, str | None] | None = None
        cache.binding.leave_to_python()

    # --- whether -------------------------------------------------------------------------------------------------------

    def obstacle(self, cache: "LoRASharedCache") -> str | None:
        """Why the active agent's tokens do not run on fixed shapes, or ``None``. Found out once for each agent."""
        agent = cache.binding.agent()
        if self._verdict is None or self._verdict[0] != agent:
            self._verdict = agent, self._find(cache, agent)
        return self._verdict[1]

    def forget_verdict(self) -> None:
        """Adapters or modules may have changed: find out again."""
        self._verdict, self._looked = None, False

    def takes(self, forward: "Forward") -> bool:
        """Whether this forward is one token that only appends, to buffers in one piece."""
        cache, plan = forward.cache, forward.plan
        if forward.step.count != 1 or forward.step.rows != cache.trajectory.rows or forward.start:
            return False
        merged = any(slot.layer.merged for slot in self._slots.values())
        if merged != self._merged:  # under the same agent's name
            self._merged = merged
            self.forget_verdict()
        if (why := self.obstacle(cache)) is not None:
            if why not in self._said:
                self._said.add(why)
                logger.info("max_cache_len: decoding runs on growing shapes, and is not compiled: %s.", why)
            return False
        if forward.keep_attention or forward.hidden is not None or torch.is_grad_enabled():
            return False
        stream = cache.stream_of(plan.agent)
        appends = plan.kv_from == plan.past and (stream is not None or plan.past == cache.ledger.total)
        own = {key for _, key in forward.own}
        if not appends or len(own) > 1 or not own <= set(plan.lr_from):
            return False
        if any(first != plan.past for first in plan.lr_from.values()):
            return False
        for layer in cache.layers:
            if layer.k:
                used = [layer.k.get(stream), layer.v.get(stream)]
                used += [layer.lr[key] for key in plan.lr_from if key in layer.lr]
                if any(buffer is None or buffer.prefix or buffer.data is None for buffer in used):
                    return False
                if layer.k[stream].data.dtype != layer.v[stream].data.dtype:
                    return False  # autocast, which turns keys in float32
        return True

    def mask_length(self, cache: "LoRASharedCache", query: int, read: int) -> int:
        """Positions that a mask over ``query`` more tokens of an agent that has ``read`` some covers."""
        running = cache.binding.forward
        if running is not None and running.cache is cache:
            fixed = running.static is not None
        else:
            fixed = self.obstacle(cache) is None
        return self.length if query == 1 and fixed else read + query

    def _find(self, cache: "LoRASharedCache", agent: Agent) -> str | None:
        binding = cache.binding
        if isinstance(agent, Mixed):
            return "rows run adapters of their own"
        if cache.scheme.recompute_layers is not None:
            return f"scheme {cache.scheme.name!r} rewrites layers"
        if cache.attention == "keep" or not binding.can_switch_attention():
            return "the model's own attention function runs"
        if any(layer.device is not None for layer in cache.layers):
            return "buffers are offloaded"
        if cache.scheme.splits_values and cache.roster.keys:
            names = cache.roster.starting(binding, agent)
            if any(lora_a(layer.k.module, name) is not None for layer in binding.layers.values() for name in names):
                return "what adapters add to keys is kept apart (key_lr=False shares keys whole)"
        whys = (misfit(name, layer, agent) for name, _, _, layer in tuner_layers(binding.decoder))
        return next((why for why in whys if why is not None), None)

    # --- a forward -----------------------------------------------------------------------------------------------------

    def padding(self, cache: "LoRASharedCache", mask: Any, past: int, count: int) -> Tensor | None:
        """The 2-D mask [B, past + count] that ``generate`` made dense masks from, or ``None`` without any."""
        return padding_of(mask, past, count, cache.trajectory.mask, cache.trajectory.total, self._window(cache))

    def enter(self, forward: "Forward", args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Set position, mask and adapters for one token, and put the slots in place. Returns the decoder's arguments."""
        cache, past, device = forward.cache, forward.plan.past, forward.step.device
        self._load(forward)
        for position in self._positions.values():
            position.fill_(past)
        kwargs = dict(kwargs)
        if kwargs.get("position_ids") is None:
            kwargs["position_ids"] = torch.full((1, 1), past, device=device)
        kwargs["attention_mask"] = self._masks(forward, kwargs.get("attention_mask"), kwargs["position_ids"])
        for slot in self._slots.values():
            slot.place()
        for index, step in self._layers.items():
            cache.layers[index].step = step
            if index in cache.binding.layers:
                cache.binding.layers[index].step = step
        return args, kwargs

    def enter_other(
        self, forward: "Forward", args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Any other forward: give the decoder the masks that it would get without static mode."""
        given = kwargs.get("attention_mask")
        bits = self.padding(forward.cache, given, forward.plan.past, forward.step.count)
        masks = without_squares(given, bits, forward.plan.stop, self._window(forward.cache), forward.keep_attention)
        return None if masks is given else (args, {**kwargs, "attention_mask": masks})

    def leave(self, cache: "LoRASharedCache") -> None:
        """The forward is over: take everything off again."""
        for slot in self._slots.values():
            slot.remove()
        for layer in (*cache.layers, *cache.binding.layers.values()):
            layer.step = None

    def drop_buffers(self) -> None:
        """The cache's buffers are others now, or gone."""
        self._loaded = None
        self._layers.clear()

    def _window(self, cache: "LoRASharedCache") -> int | None:
        window: int | None = getattr(cache.binding.decoder.config, "sliding_window", None)
        return window

    def _masks(self, forward: "Forward", given: Any, position_ids: Tensor) -> Any:
        """Masks [B, 1, 1, max_cache_len] (one, or by kind of layer), as `generate` makes them for static caches."""
        masks = given.values() if isinstance(given, dict) else (given,)
        if all(isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[-1] == self.length for mask in masks):
            return given
        binding, step = forward.cache.binding, forward.step
        inputs = torch.empty((step.rows, 1, 0), dtype=binding.decoder.dtype, device=step.device)
        return _compat.static_masks(
            binding.outer, binding.decoder.config, inputs, step.mask, forward.cache, position_ids
        )

    # --- what the tensors hold -----------------------------------------------------------------------------------------

    def _load(self, forward: "Forward") -> None:
        """Have the buffers, and the active A and B, in the tensors that compiled code reads, unless they are there."""
        cache, plan = forward.cache, forward.plan
        stream = cache.stream_of(plan.agent)
        slots = self._slots
        if not self._looked:  # looking for adapted layers takes longer than all of the rest
            self._looked = True
            split = {layer.v.hooked for layer in cache.binding.layers.values()} if forward.splits else set()
            modules: list[Any] = [layer for _, _, _, layer in tuner_layers(cache.binding.decoder)]
            slots = {module: slots.get(module) or Slot(module, module in split) for module in modules}
        buffers = [
            buffer.data for layer in cache.layers if layer.k
            for buffer in (layer.k[stream], layer.v[stream], *(layer.lr[key] for key in plan.lr_from if key in layer.lr))
        ]  # fmt: skip
        # The layers keep the buffers alive, so no id can have passed to another one.
        state = (
            plan.agent,
            list(plan.lr_from),
            [*map(id, buffers)],
            [slot.versions(plan.agent) for slot in slots.values()],
        )
        if state == self._loaded:
            return
        self._loaded, self._slots = None, slots
        for slot in slots.values():
            slot.load(plan.agent)
        for buffer in buffers:
            torch._dynamo.mark_static_address(buffer)
        for index, layer in enumerate(cache.layers):
            if layer.k:
                self._load_layer(forward, index)
        self._loaded = state

    def _load_layer(self, forward: "Forward", index: int) -> None:
        cache, plan = forward.cache, forward.plan
        store, stream = cache.layers[index], cache.stream_of(plan.agent)
        k, v = store.k[stream].data, store.v[stream].data
        assert k is not None
        assert v is not None
        if k.device not in self._positions:
            self._positions[k.device] = fixed_zeros((1,), torch.int64, k.device)
        step = self._layers.setdefault(index, StaticLayer(self._positions[k.device], cache.backend))
        step.k, step.v = k, v
        bound = cache.binding.layers.get(index)
        if forward.splits and bound is not None and bound.v.hooked in self._slots:
            position, all_banks = bound.v.position, cache.roster.banks
            stacks = {key: a for key in plan.lr_from if (a := all_banks[key].stacks[position]) is not None}
            step.source = self._slots[bound.v.hooked]
            step.source.stacks = tuple(stacks.values())
            banks: dict[Any, Any] = {key: store.lr[key].data for key in stacks}
            step.banks = tuple(banks.values())
            step.v_lr = None
            if banks:
                self._load_b(forward, bound, step, banks)

    def _load_b(self, forward: "Forward", bound: LayerBinding, step: StaticLayer, banks: dict[Any, Any]) -> None:
        """The LR buffer that is read, and the agent's B at its columns."""
        b, _ = bound.v.fold(forward.plan.agent, forward.own, forward.cache.roster.banks, step.v[:, :, :1])
        places = bound.v.places
        step.v_lr = banks[places[0][0] if places else next(iter(banks))]
        shape = step.v.shape[1], step.v_lr.shape[2], step.v.shape[3]
        if step.b is None or step.b.shape != shape:
            step.b = fixed_zeros(shape, step.v.dtype, step.v.device)
        step.b.zero_()
        first = 0
        for _, (column, rank) in places:
            assert b is not None
            step.b[:, column : column + rank] += b[:, first : first + rank]
            first += rank
