"""One forward with a shared cache: what v_proj's hook computes, what `update` stores, and how it ends."""

from collections.abc import Callable, Hashable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from .adapters import fold_b
from .agents import Mixed, agent_label
from .attention.interface import forbid_backward
from .attention.parts import Part
from .banks import LRBank
from .buffer import GrowableBuffer
from .errors import AdapterChangedError, OutsideForwardError, UnsupportedAdapterError, UnsupportedModelError
from .layer import LayerBinding, Place, Reading
from .ledger import Plan
from .mixed import take_over
from .storage import SharedLayer
from .trajectory import Step

if TYPE_CHECKING:
    from .cache import LoRASharedCache

__all__ = ["Forward"]


class Forward:
    """The forward now running on a cache. It writes beyond the committed lengths only, or keeps what it overwrites.

    Attributes:
        cache, plan, step: whose, what it reads and writes, what it brought.
        splits: whether v_proj gives X W0 alone and the adapter's part comes from the LR cache.
        keep_attention: the model's own attention function runs, on V put together in `update`.
        backend: of `flash_lora_attention`.
        start: positions that a batch of rows with agents of their own takes over from these.
        fresh: adapters are looked at again, whatever torch says of their being the same.
    """

    def __init__(
        self,
        cache: "LoRASharedCache",
        plan: Plan,
        step: Step,
        conventions: frozenset[str],
        own: list[tuple[str, Hashable]],
        start: int,
        keep_attention: bool,
    ):
        self.cache, self.plan, self.step, self.conventions, self.own = cache, plan, step, conventions, own
        self.start = start
        self.splits = cache.scheme.splits_values
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

    def project(self, layer: LayerBinding, x: Tensor, output: Tensor) -> Tensor | None:
        """v_proj ran on ``x`` [B, q, d_in]: compute X A of every bank that this forward writes.

        Returns:
            What v_proj is to give instead of ``output``: a copy that counts its in-place edits, where ``output`` does not.
        """
        if x.ndim != 3 or x.shape[:2] != (self.step.rows, self.step.count):
            raise UnsupportedModelError(
                f"{layer.name}.v_proj was given {tuple(x.shape)}, expected [{self.step.rows}, {self.step.count}, d_in]: "
                "its rows are not the tokens of the batch, so they cannot be cached as LR. Use scheme='full_shared'."
            )
        counted = None
        if output.is_inference() and (self.step.count > 1 or not self.cache.ledger.total):
            with torch.inference_mode(False):
                counted = torch.empty(output.shape, dtype=output.dtype, device=output.device)
            output = counted.copy_(output)
        layer.v_out, layer.v_version = output, _version(output)
        for key, bank, first in self._banks:
            stack = bank.stacks[layer.position]
            if stack is not None:
                rows = x if first == self.plan.past else x[:, first - self.plan.past :]
                layer.lr_rows[key] = (first, functional.linear(rows.to(stack.dtype), stack))
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
        skip = plan.kv_from - plan.past
        if skip < key.shape[2]:
            if stream is None:  # an agent's own stream is only ever appended to
                for group in (store.k, store.v):
                    self._keep(group.get(stream), plan.kv_from, self.cache.ledger.total)
            store.write_kv(
                stream, plan.kv_from, *((key, value) if not skip else (key[:, :, skip:], value[:, :, skip:]))
            )
        if layer is not None:
            for bank, (first, rows) in layer.lr_rows.items():
                self._keep(store.lr.get(bank), first, self.cache.ledger.lr[bank])
                store.write_lr(bank, first, rows.to(value.dtype))
        self._updated.add(index)
        trained = next((states for states in (key, value) if states.requires_grad), None)
        b, constant, gain = self._fold(layer, value) if layer is not None and self.splits else (None, None, None)
        parts = self._parts(store, stream, layer)
        if parts:
            key, value, v_lr = parts[-1][0], parts[-1][1], None
        else:
            key, value = store.read("k", stream, plan.stop), store.read("v", stream, plan.stop)
            v_lr = self._read_lr(layer, 0, plan.stop) if layer is not None else None
        if trained is not None:
            key = forbid_backward(key, trained)
        if layer is None or not (self.splits or parts):
            return key, value
        reading = Reading(value, v_lr, b, constant, gain, parts)
        if self.keep_attention:
            return key, _reconstruct(value, reading)
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
        self.cache.ledger.commit(self.plan)

    def undo(self) -> None:
        """Leave the cache as the last whole forward left it."""
        if self._give_back is not None:
            self._give_back()
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
        out, tapped = layer.v_out, list(layer.tap.replaced)
        if layer.tap.passed != len(tapped):
            raise UnsupportedAdapterError(
                f"{layer.name}.v_proj ({type(layer.v_proj).__name__}) did not hand adapters "
                f"{agent_label(self.plan.agent)!r} to their LoRA variant, so base and LR cannot be told apart. "
                "Use scheme='full_shared' or 'non_shared'."
            )
        if len(tapped) != sum(
            adapter in self.cache.roster.banks[key].columns[layer.position] for adapter, key in self.own
        ):
            raise AdapterChangedError(
                f"Adapters {tapped} have LoRA on {layer.name}.v_proj now, and had not when their LR was cached. Call "
                "cache.reset() and run the prompt again, or load the adapter under another name."
            )
        same = out is not None and out.numel() == value.numel() and layer.v_version == _version(out)
        if same and out.data_ptr() != value.data_ptr():  # type: ignore[union-attr]
            rows, heads, count, dim = value.shape
            same = torch.equal(out.view(rows, count, heads, dim).transpose(1, 2), value)  # type: ignore[union-attr]
        if not same:
            raise UnsupportedModelError(
                f"{layer.name} changes values between v_proj and the cache (a norm, a clip, a rotation), so base and LR "
                "do not add up there. Use scheme='full_shared' or 'non_shared'."
            )

    def _fold(self, layer: LayerBinding, value: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The agent's B, constant and gain, from the adapters as they are now; ``layer.places`` says where its LR lies."""
        bs: dict[Place, Tensor] = {}
        constant: Tensor | None = None
        gain = layer.gains.read(layer.name, layer.v_proj, layer.tap.replaced, value.shape[1], self.fresh)
        for adapter, key in self.own:
            columns = self.cache.roster.banks[key].columns[layer.position].get(adapter)
            if columns is None:
                continue
            b, bias = fold_b(layer.v_proj, adapter, value.shape[1], value.dtype)
            if gain is not None:
                b, bias = gain.undo(adapter, b), None if bias is None else gain.undo(adapter, bias)
            if isinstance(self.plan.agent, Mixed):
                rows = self.plan.agent.rows_of(adapter)
                b = _on_rows(b, rows, self.step.rows)
                bias = None if bias is None else _on_rows(bias, rows, self.step.rows)
            place = key, columns
            bs[place] = bs[place] + b if place in bs else b
            if bias is not None:
                constant = bias if constant is None else constant + bias
        layer.places = list(bs)
        whole = None if not bs else next(iter(bs.values())) if len(bs) == 1 else torch.cat(list(bs.values()), -2)
        if gain is None:
            return whole, constant, None
        return whole, gain.constant(constant), gain.total

    def _read_lr(self, layer: LayerBinding, start: int, stop: int) -> Tensor | None:
        store = self.cache.layers[layer.index]
        slices = [store.read("lr", key, stop, start)[..., first : first + rank] for key, (first, rank) in layer.places]
        return None if not slices else slices[0] if len(slices) == 1 else torch.cat(slices, -1)

    def _parts(self, store: SharedLayer, stream: Hashable, layer: LayerBinding | None) -> list[Part]:
        """K, V and LR of a fork as they lie, if the layer's attention can take them apart; else nothing."""
        if layer is None or self.keep_attention:
            return []
        cuts = sorted({*store.k[stream].ends(), *(end for key, _ in layer.places for end in store.lr[key].ends())})
        if not cuts or cuts[-1] > self.plan.past:
            return []
        bounds = [0, *cuts, self.plan.stop]
        return [
            (
                store.read("k", stream, stop, start),
                store.read("v", stream, stop, start),
                self._read_lr(layer, start, stop),
            )
            for start, stop in pairwise(bounds)
            if start < stop
        ]


def _reconstruct(value: Tensor, reading: Reading) -> Tensor:
    """V = V_base + V_lr B (paper, section 3; DoRA: times its gain), for attention functions that know only K and V."""
    dtype = value.dtype
    if reading.v_lr is not None and reading.b is not None:
        value = value + reading.v_lr.unsqueeze(1) @ reading.b
    if reading.gain is not None:
        value = value * reading.gain
    if reading.bias is not None:
        value = value + reading.bias
    return value.to(dtype)


def _on_rows(part: Tensor, rows: list[int], count: int) -> Tensor:
    """``part`` on these of ``count`` batch rows, zeros on the others: a new first dimension."""
    whole = part.new_zeros((count, *part.shape))
    whole[rows] = part
    return whole


def _version(tensor: Tensor) -> int:
    """Counts in-place edits; inference tensors keep no count."""
    return -1 if tensor.is_inference() else tensor._version
