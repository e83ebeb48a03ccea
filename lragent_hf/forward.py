"""One forward with a shared cache: what v_proj's hook computes, what `update` stores, and how it ends."""

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from .agents import Mixed
from .attention.interface import forbid_backward
from .banks import LRBank
from .buffer import GrowableBuffer
from .errors import OutsideForwardError, UnsupportedModelError
from .hidden import HiddenStates
from .key_split import KeySplit
from .layer import LayerBinding, Reading
from .ledger import Plan
from .mixed import take_over
from .site import Site, check_input
from .source import Source, reconstruct
from .trajectory import Step

if TYPE_CHECKING:
    from .cache import LoRASharedCache

__all__ = ["Forward"]


class Forward:
    """The forward now running on a cache. It writes beyond the committed lengths only, or keeps what it overwrites.

    Attributes:
        cache, plan, step: whose, what it reads and writes, what it brought.
        splits: whether v_proj gives X W0 alone and the adapter's part comes from the LR cache.
        keys: the same for k_proj, or ``None``: keys are stored whole.
        keep_attention: the model's own attention function runs, on V put together in `update`.
        backend: of `flash_lora_attention`.
        before: roster and LR lengths as they were, for `undo`.
        start: positions that a batch of rows with agents of their own takes over from these.
        fresh: what was found out of model and adapters is found out again. Not for one more token of the same agent through
            the same modules.
        rewritten: layers whose K and V are written from ``plan.rewrite_from`` on.
        hidden: the hidden-state cache at work, if there is one.
        static: the cache's static mode, if this is one token that it takes.
    """

    def __init__(
        self,
        cache: "LoRASharedCache",
        plan: Plan,
        before: tuple[Any, Any],
        step: Step,
        conventions: frozenset[str],
        own: list[tuple[str, Hashable]],
        start: int,
        keep_attention: bool,
        fresh: bool,
    ):
        self.cache, self.plan, self.step, self.conventions, self.own = cache, plan, step, conventions, own
        self.before, self.start = before, start
        self.splits = cache.scheme.splits_values
        self.keys = KeySplit(cache, plan, own, self._keep) if self.splits and cache.roster.splits_keys else None
        self.keep_attention = keep_attention
        self.backend = cache.backend
        self.fresh = fresh
        self.rewritten = frozenset(cache.scheme.recompute_layers or ())
        self.hidden: HiddenStates | None = None
        self.static = cache.static if cache.static is not None and cache.static.takes(self) else None
        self._banks: list[tuple[Hashable, LRBank, int]] = [
            (key, cache.roster.banks[key], first) for key, first in plan.lr_from.items()
        ]
        self._overwritten: list[tuple[GrowableBuffer, int, Tensor]] = []
        self._updated: set[int] = set()
        self._narrow: list[tuple[GrowableBuffer, Any]] = []
        self._give_back: Callable[[], None] | None = None

    def open(self) -> None:
        """Give a cache of one row as many as the forward brings (beam search expands its inputs, not the cache).

        Rows with agents of their own then take over what these have cached.
        """
        record = self.cache.trajectory
        if self.cache.hidden_cache:
            self.hidden = HiddenStates(self.cache, self.plan, min(self.rewritten))
        if record.rows is not None and self.step.rows != record.rows:
            self._narrow = [(buffer, buffer.state()) for buffer in self.cache.buffers()]
            for buffer, _ in self._narrow:
                buffer.select(torch.zeros(self.step.rows, dtype=torch.long))
            record.rows = self.step.rows
            for layer in self.cache.layers:
                layer.drop_work()
        if self.start and isinstance(self.plan.agent, Mixed):
            self._give_back = take_over(self.cache, self.plan.agent, self.start)

    def close(self) -> None:
        """The decoder is done, well or badly."""
        if self.hidden is not None:
            self.hidden.close()

    def project(self, site: Site, x: Tensor, output: Tensor) -> Tensor | None:
        """A projection ran on ``x`` [B, q, d_in]: compute X A of every bank that this forward writes.

        Returns:
            What it is to give instead of ``output``: a copy that counts its in-place edits, where ``output`` does not.
        """
        if not self.splits or (site.child == "k_proj" and self.keys is None):
            return None
        check_input(site, x, self.step.rows, self.step.count)
        counted = None
        if output.is_inference() and (self.step.count > 1 or not self.cache.ledger.total):
            with torch.inference_mode(False):
                counted = torch.empty(output.shape, dtype=output.dtype, device=output.device)
            output = counted.copy_(output)
        site.note(output)
        for key, bank, first in self._banks:
            stack = bank.stacks[site.position]
            if stack is not None:
                rows = x if first == self.plan.past else x[:, first - self.plan.past :]
                if rows.dtype != stack.dtype or rows.device != stack.device:  # moved once more on its way in
                    rows = rows.to(stack)
                site.rows[key] = (first, functional.linear(rows, stack))
        return counted

    def update(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store what is new of layer ``index``; return K and V_base (or V) [B, Hkv, past + q, D] as views."""
        plan, store = self.plan, self.cache.layers[index]
        layer = self.cache.binding.layers.get(index)
        stream = self.cache.stream_of(plan.agent)
        count = self.step.count if self.hidden is None or index >= self.hidden.first else self.hidden.run
        if key.shape[2] != count:
            raise UnsupportedModelError(
                f"Layer {index} stores {key.shape[2]} positions for {count} token(s), so what is cached cannot "
                "be told apart by token. Use a model that stores one position a token."
            )
        if self.splits:
            if layer is None:
                raise UnsupportedModelError(
                    f"Layer {index} has no v_proj to take its LR from. Use scheme='full_shared'."
                )
            self._check_value(layer, value)
            if self.keys is not None:
                self.keys.check(layer, key)
        first = plan.rewrite_from if index in self.rewritten else plan.kv_from
        skip = first - (plan.stop - count)
        if skip < count:
            if stream is None:  # an agent's own stream is only ever appended to
                for group in (store.k, store.v):
                    self._keep(group.get(stream), first, self.cache.ledger.total)
            store.write_kv(stream, first, *((key, value) if not skip else (key[:, :, skip:], value[:, :, skip:])))
        if layer is not None:
            for group, site, like in (("lr", layer.v, value), ("k_lr", layer.k, key)):
                for bank, (first, rows) in site.rows.items():
                    self._keep(store.group(group).get(bank), first, self.cache.ledger.lr[bank])
                    store.write_lr(group, bank, first, rows if rows.dtype == like.dtype else rows.to(like.dtype))
        self._updated.add(index)
        trained = next((states for states in (key, value) if states.requires_grad), None)
        b, constant, gain = self._fold(layer, value) if layer is not None and self.splits else (None, None, None)
        b_k = self.keys.fold(layer, key) if layer is not None and self.keys is not None else None
        source = Source(store, stream, layer, self.keys, b, b_k)
        parts = [] if self.keep_attention else source.parts(plan.past, plan.stop)
        whole = (
            parts[-1] if parts else source.whole(self.cache.key_working_copy, self.cache.value_working_copy, plan.stop)
        )
        key, value = whole.k, whole.v
        if trained is not None:
            key = forbid_backward(key, trained)
        if layer is None or not (self.splits or parts):
            return key, value
        known = key if parts or whole.key is not None else None
        reading = Reading(value, whole.v_lr, None if whole.v_lr is None else b, constant, gain, whole.key, parts, known)
        if self.keep_attention:
            return reconstruct(key, value, reading)
        layer.reading = reading
        return key, value

    def commit(self) -> None:
        """The decoder ran to its end: what was written becomes part of the cache."""
        if self.static is not None:  # compiled code keeps no count; the forward that this one continues had all layers
            self._updated.update(self.cache.binding.layers or (0,))
        missing = set(self.cache.binding.layers) - self._updated if self.splits or not self._updated else None
        if missing or not self._updated:
            self.undo()
            raise OutsideForwardError(
                f"The forward ended without storing anything for layer(s) {sorted(missing or ()) or 'all'}: the model did "
                "not use the cache it was given. Nothing was kept."
            )
        if idle := self.rewritten - self._updated:
            self.undo()
            raise UnsupportedModelError(
                f"recompute_layers {sorted(idle)} store no K and V of their own in this model. Name others."
            )
        try:
            self.cache.trajectory.append(self.step, self.conventions)
        except BaseException:  # out of memory
            self.undo()
            raise
        self.cache.ledger.commit(
            self.plan, angles=self.keys is not None and self.keys.writes and bool(self.keys.angles)
        )

    def undo(self) -> None:
        """Leave the cache as the last whole forward left it."""
        if self._give_back is not None:
            self._give_back()
        self.cache.roster, self.cache.ledger.lr = self.before
        for layer in self.cache.layers:
            layer.cut_work(self.plan.past)
            if self._narrow:
                layer.drop_work()
        if self._narrow:
            for buffer, state in self._narrow:
                buffer.restore(state)
            self.cache.trajectory.rows = 1
        else:
            for buffer, start, rows in reversed(self._overwritten):
                buffer.write(start, rows)
        self.cache.drop_unused()

    def _keep(self, buffer: GrowableBuffer | None, start: int, valid: int) -> None:
        stop = min(self.plan.stop, valid)
        if buffer is not None and start < stop:
            self._overwritten.append((buffer, start, buffer.read(stop, start).clone()))

    def _check_value(self, layer: LayerBinding, value: Tensor) -> None:
        """V must be v_proj's output and nothing else, and every active adapter must have been kept out of it."""
        layer.v.check(self.plan.agent, self.own, self.cache.roster.banks)
        if layer.v.gave(value):
            return
        states = layer.v.states(value)
        if states is None or not torch.equal(states, value):
            raise UnsupportedModelError(
                f"{layer.name} changes values between v_proj and the cache (a norm, a clip, a rotation), so base and LR "
                "do not add up there. Use scheme='full_shared' or 'non_shared'."
            )

    def _fold(self, layer: LayerBinding, value: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The agent's B, constant and gain on V, from the adapters as they are now."""
        site = layer.v
        gain = layer.gains.read(layer.name, site.hooked, site.tap.replaced, value.shape[1], self.fresh)
        undo = None if gain is None else gain.undo
        b, constant = site.fold(self.plan.agent, self.own, self.cache.roster.banks, value, undo)
        return (b, constant, None) if gain is None else (b, gain.constant(constant), gain.total)
