"""One forward with a shared cache: what v_proj's hook computes, what `update` stores, and how it ends."""

from collections.abc import Callable, Hashable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from .agents import Mixed
from .attention.interface import forbid_backward
from .attention.parts import KeyLR, Part
from .banks import LRBank
from .buffer import GrowableBuffer
from .errors import OutsideForwardError, UnsupportedModelError
from .layer import LayerBinding, Reading
from .ledger import Plan
from .mixed import take_over
from .rotary import Angles, Rotation, find_rotation, matches
from .site import Site, check_input
from .storage import SharedLayer
from .trajectory import Step

if TYPE_CHECKING:
    from .cache import LoRASharedCache

__all__ = ["Forward"]


class Forward:
    """The forward now running on a cache. It writes beyond the committed lengths only, or keeps what it overwrites.

    Attributes:
        cache, plan, step: whose, what it reads and writes, what it brought.
        splits, splits_keys: whether v_proj (k_proj) gives X W0 alone and the adapter's part comes from the LR cache.
        keep_attention: the model's own attention function runs, on V put together in `update`.
        backend: of `flash_lora_attention`.
        before: roster and LR lengths as they were, for `undo`.
        start: positions that a batch of rows with agents of their own takes over from these.
        rotations: how layers turn their keys, as far as this forward tells.
        fresh: adapters are looked at again, whatever torch says of their being the same.
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
    ):
        self.cache, self.plan, self.step, self.conventions, self.own = cache, plan, step, conventions, own
        self.before, self.start = before, start
        self.splits = cache.scheme.splits_values
        self.splits_keys = self.splits and cache.roster.splits_keys
        self.keep_attention = keep_attention
        self.backend = cache.backend
        self.fresh = step.count > 1 or plan.agent != cache.ledger.last
        self._banks: list[tuple[Hashable, LRBank, int]] = [
            (key, cache.roster.banks[key], first) for key, first in plan.lr_from.items()
        ]
        self._overwritten: list[tuple[GrowableBuffer, int, Tensor]] = []
        self._updated: set[int] = set()
        self._narrow: list[tuple[GrowableBuffer, Any]] = []
        self._give_back: Callable[[], None] | None = None
        self.rotations: dict[int, Rotation | None] = {}
        self._angles: dict[tuple[str, torch.device], Angles] = {}

    def open(self) -> None:
        """Give a cache of one row as many as the forward brings (beam search expands its inputs, not the cache).

        Rows with agents of their own then take over what these have cached.
        """
        record = self.cache.trajectory
        if record.rows is not None and self.step.rows != record.rows:
            self._narrow = [(buffer, buffer.state()) for buffer in self.cache.buffers()]
            for buffer, _ in self._narrow:
                buffer.select(torch.zeros(self.step.rows, dtype=torch.long))
            record.rows = self.step.rows
        if self.start and isinstance(self.plan.agent, Mixed):
            self._give_back = take_over(self.cache, self.plan.agent, self.start)

    def project(self, site: Site, x: Tensor, output: Tensor) -> Tensor | None:
        """A projection ran on ``x`` [B, q, d_in]: compute X A of every bank that this forward writes.

        Returns:
            What it is to give instead of ``output``: a copy that counts its in-place edits, where ``output`` does not.
        """
        if not self.splits or (site.child == "k_proj" and not self.splits_keys):
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
                site.rows[key] = (first, functional.linear(rows.to(stack.dtype), stack))
        return counted

    def update(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store what is new of layer ``index``; return K and V_base (or V) [B, Hkv, past + q, D] as views."""
        plan, store = self.plan, self.cache.layers[index]
        layer = self.cache.binding.layers.get(index)
        stream = self.cache.stream_of(plan.agent)
        if key.shape[2] != self.step.count:
            raise UnsupportedModelError(
                f"Layer {index} stores {key.shape[2]} positions for {self.step.count} token(s), so what is cached cannot "
                "be told apart by token. Use a model that stores one position a token."
            )
        if self.splits:
            if layer is None:
                raise UnsupportedModelError(
                    f"Layer {index} has no v_proj to take its LR from. Use scheme='full_shared'."
                )
            self._check_value(layer, value)
            if self.splits_keys:
                self._check_key(layer, key)
        skip = plan.kv_from - plan.past
        if skip < key.shape[2]:
            if stream is None:  # an agent's own stream is only ever appended to
                for group in (store.k, store.v):
                    self._keep(group.get(stream), plan.kv_from, self.cache.ledger.total)
            store.write_kv(
                stream, plan.kv_from, *((key, value) if not skip else (key[:, :, skip:], value[:, :, skip:]))
            )
        if layer is not None:
            for group, site, like in (("lr", layer.v, value), ("k_lr", layer.k, key)):
                for bank, (first, rows) in site.rows.items():
                    self._keep(store.group(group).get(bank), first, self.cache.ledger.lr[bank])
                    store.write_lr(group, bank, first, rows.to(like.dtype))
        self._updated.add(index)
        trained = next((states for states in (key, value) if states.requires_grad), None)
        b, constant, gain = self._fold(layer, value) if layer is not None and self.splits else (None, None, None)
        b_k = self._fold_key(layer, key) if layer is not None and self.splits_keys else None
        parts = self._parts(store, stream, layer, b_k)
        if parts:
            whole = parts[-1]
        elif layer is not None and b_k is not None and self._works_on_copy(store, stream):
            whole = self._on_working_copy(store, stream, layer, b_k)
        else:
            whole = self._part(store, stream, layer, b_k, 0, plan.stop)
        key, value = whole.k, whole.v
        if trained is not None:
            key = forbid_backward(key, trained)
        if layer is None or not (self.splits or parts):
            return key, value
        reading = Reading(value, whole.v_lr, b, constant, gain, whole.key, parts)
        if self.keep_attention:
            return _reconstruct(key, value, reading)
        layer.reading = reading
        return key, value

    def commit(self) -> None:
        """The decoder ran to its end: what was written becomes part of the cache."""
        missing = set(self.cache.binding.layers) - self._updated if self.splits or not self._updated else None
        if missing or not self._updated:
            self.undo()
            raise OutsideForwardError(
                f"The forward ended without storing anything for layer(s) {sorted(missing or ()) or 'all'}: the model did "
                "not use the cache it was given. Nothing was kept."
            )
        self.cache.trajectory.append(self.step, self.conventions)  # may run out of memory: first
        self.cache.ledger.commit(self.plan, angles=bool(self._angles))

    def undo(self) -> None:
        """Leave the cache as the last whole forward left it."""
        if self._give_back is not None:
            self._give_back()
        self.cache.roster, self.cache.ledger.lr = self.before
        for layer in self.cache.layers:
            layer.work.cut(self.plan.past)
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
        states = layer.v.states(value.shape[1]) if _fits(layer.v, value) else None
        if states is None or not (states.data_ptr() == value.data_ptr() or torch.equal(states, value)):
            raise UnsupportedModelError(
                f"{layer.name} changes values between v_proj and the cache (a norm, a clip, a rotation), so base and LR "
                "do not add up there. Use scheme='full_shared' or 'non_shared'."
            )

    def _check_key(self, layer: LayerBinding, key: Tensor) -> None:
        """K must be k_proj's output under the rotary embedding and nothing else; finds out how it turns."""
        layer.k.check(self.plan.agent, self.own, self.cache.roster.banks)
        states = layer.k.states(key.shape[1]) if _fits(layer.k, key) else None
        fits = False
        if states is not None and layer.rotation is not None:
            fits = self.step.count == 1 or matches(layer.rotation, states, key, layer.angles)
        elif states is not None:
            self.rotations[layer.index], certain = find_rotation(states, key, layer.angles)
            fits = self.rotations[layer.index] is not None
            if certain:
                layer.rotation = self.rotations[layer.index]
        if not fits:
            raise UnsupportedModelError(
                f"{layer.name} does more to its keys than turn them by the position_embeddings it is given (a norm, a "
                "clip, angles of its own), so what adapters add to them on k_proj cannot be kept apart. Use key_lr=False, "
                "which shares keys whole, or scheme='full_shared' or 'non_shared'."
            )

    def _fold(self, layer: LayerBinding, value: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The agent's B, constant and gain on V, from the adapters as they are now."""
        site = layer.v
        gain = layer.gains.read(layer.name, site.module, site.tap.replaced, value.shape[1], self.fresh)
        undo = None if gain is None else gain.undo
        b, constant = site.fold(self.plan.agent, self.own, self.cache.roster.banks, value, undo)
        return (b, constant, None) if gain is None else (b, gain.constant(constant), gain.total)

    def _fold_key(self, layer: LayerBinding, key: Tensor) -> Tensor | None:
        """The agent's B on K; stores the angles of the positions that are new, once per kind of layer."""
        rotation, given = layer.rotation or self.rotations.get(layer.index), layer.angles
        if rotation is not None and rotation.form != "none" and given is not None:
            known = self._angles.get((layer.kind, given[0].device))
            if known is None or known[0] is not given[0]:
                self._write_angles(layer, given, rotation.angles(given))
        b, _ = layer.k.fold(self.plan.agent, self.own, self.cache.roster.banks, key)
        return b

    def _write_angles(self, layer: LayerBinding, given: Angles, angles: Angles) -> None:
        group = layer.kind, angles[0].device
        known = self._angles.get(group)
        if known is not None:
            if not all(map(torch.equal, known, given)):
                raise UnsupportedModelError(
                    f"{layer.name} turns its keys by other angles than the layers of its kind before it. Use key_lr=False."
                )
            return
        self._angles[group] = given
        first = self.plan.rotary_from
        rows = tuple(part[:, first - self.plan.past :].expand(self.step.rows, -1, -1) for part in angles)
        for buffer in self.cache.rotary.group(*group, self.cache.ledger.rotary):
            self._keep(buffer, first, self.cache.ledger.rotary)
        if first < self.plan.stop:
            self.cache.rotary.write(layer.kind, first, rows)  # type: ignore[arg-type]

    def _read_lr(self, group: str, site: Site, store: SharedLayer, start: int, stop: int) -> Tensor | None:
        slices = [store.read(group, key, stop, start)[..., first : first + rank] for key, (first, rank) in site.places]
        return None if not slices else slices[0] if len(slices) == 1 else torch.cat(slices, -1)

    def _part(
        self,
        store: SharedLayer,
        stream: Hashable,
        layer: LayerBinding | None,
        b_k: Tensor | None,
        start: int,
        stop: int,
    ) -> Part:
        """Positions ``start`` to ``stop`` of what the agent reads in this layer."""
        k, v = store.read("k", stream, stop, start), store.read("v", stream, stop, start)
        if layer is None:
            return Part(k, v)
        key = None if b_k is None else self._key_lr(store, layer, b_k, start, stop)
        return Part(k, v, self._read_lr("lr", layer.v, store, start, stop), key)

    def _key_lr(self, store: SharedLayer, layer: LayerBinding, b_k: Tensor, start: int, stop: int) -> KeyLR | None:
        """What the agent's adapters add to the keys of positions ``start`` to ``stop``."""
        k_lr = self._read_lr("k_lr", layer.k, store, start, stop)
        if k_lr is None:
            return None
        rotation = layer.rotation or self.rotations[layer.index]
        if rotation is None or rotation.form == "none" or layer.angles is None:
            return KeyLR(k_lr, b_k)
        cos, sin = self.cache.rotary.read(layer.kind, layer.angles[0].device, stop, start)
        return KeyLR(k_lr, b_k, cos, sin, rotation.interleaved)

    def _works_on_copy(self, store: SharedLayer, stream: Hashable) -> bool:
        """Whether keys are materialised. Not for a fork, which would copy what it shares, nor for offloaded buffers."""
        return self.cache.key_working_copy and store.device is None and not store.k[stream].prefix

    def _on_working_copy(self, store: SharedLayer, stream: Hashable, layer: LayerBinding, b_k: Tensor) -> Part:
        """All that the agent reads in this layer, with its own keys in place of K_base."""

        def make(start: int, stop: int) -> Tensor:
            extra = self._key_lr(store, layer, b_k, start, stop)
            base = store.read("k", stream, stop, start)
            return base if extra is None else extra.added().add_(base)

        k = store.work.read(layer.k.places, b_k, self.plan.stop, make)
        v_lr = self._read_lr("lr", layer.v, store, 0, self.plan.stop)
        return Part(k, store.read("v", stream, self.plan.stop), v_lr)

    def _parts(
        self, store: SharedLayer, stream: Hashable, layer: LayerBinding | None, b_k: Tensor | None
    ) -> list[Part]:
        """The cache of a fork as it lies, if the layer's attention can take it apart; else nothing."""
        if layer is None or self.keep_attention:
            return []
        read = [store.k[stream], *(store.lr[key] for key, _ in layer.v.places)]
        read += [store.k_lr[key] for key, _ in layer.k.places]
        cuts = sorted({end for buffer in read for end in buffer.ends()})
        if not cuts or cuts[-1] > self.plan.past:
            return []
        bounds = [0, *cuts, self.plan.stop]
        return [self._part(store, stream, layer, b_k, start, stop) for start, stop in pairwise(bounds) if start < stop]


def _fits(site: Site, states: Tensor) -> bool:
    return site.output is not None and site.output.numel() == states.numel()


def _reconstruct(key: Tensor, value: Tensor, reading: Reading) -> tuple[Tensor, Tensor]:
    """K and V = V_base + V_lr B (paper, section 3; DoRA: times its gain), for attention that knows only K and V."""
    dtype = value.dtype
    if reading.key is not None:
        key = key + reading.key.added()
    if reading.v_lr is not None and reading.b is not None:
        value = value + reading.v_lr.unsqueeze(1) @ reading.b
    if reading.gain is not None:
        value = value * reading.gain
    if reading.bias is not None:
        value = value + reading.bias
    return key, value.to(dtype)
