"""Banks: the A matrices whose X A is cached together, stacked so that one product writes them all."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .adapters import lora_a

__all__ = ["LRBank", "Place"]

Place = tuple[Hashable, tuple[int, int]]
"""Where an adapter's LR lies: bank, and (first column, rank)."""


@dataclass
class LRBank:
    """The distinct A's of some adapters, projection by projection, and the columns of the LR cache that each one writes.

    Equal A's are stored once, so with a shared A a bank is as wide as one rank. The A's are copied: the LR cache stays
    what it says even if an adapter is edited or deleted, and comparing with the copy is the check that it was not.

    Attributes:
        stacks: per projection, the A's stacked [width, d_in] (zeros between blocks), or ``None`` without LoRA there.
        columns: per projection, adapter -> (first column, rank).
    """

    align: int
    stacks: list[Tensor | None] = field(default_factory=list)
    columns: list[dict[str, tuple[int, int]]] = field(default_factory=list)

    @classmethod
    def build(cls, projections: Sequence[nn.Module], adapters: Sequence[str], align: int) -> "LRBank":
        """Stack the A's of ``adapters`` on each of ``projections``; blocks start at multiples of ``align`` columns."""
        bank = cls(align)
        for projection in projections:
            blocks: list[Tensor] = []
            columns: dict[str, tuple[int, int]] = {}
            width = 0
            for adapter in adapters:
                a = lora_a(projection, adapter)
                if a is None:
                    continue
                offset = 0
                for block in blocks:
                    if _same(block[: a.shape[0]], a) and block.shape[0] == _up(a.shape[0], align):
                        break
                    offset += block.shape[0]
                else:
                    blocks.append(nn.functional.pad(a, (0, 0, 0, -a.shape[0] % align)))
                    width += blocks[-1].shape[0]
                columns[adapter] = (offset, a.shape[0])
            dtype = blocks[0].dtype if blocks else torch.float32
            for block in blocks[1:]:
                dtype = torch.promote_types(dtype, block.dtype)
            with torch.inference_mode(False), torch.no_grad():
                bank.stacks.append(torch.cat([block.to(dtype) for block in blocks]) if blocks else None)
            bank.columns.append(columns)
        return bank

    def __contains__(self, adapter: str) -> bool:
        return any(adapter in columns for columns in self.columns)

    @property
    def adapters(self) -> list[str]:
        """Adapters with columns here, in order of joining."""
        return list(dict.fromkeys(adapter for columns in self.columns for adapter in columns))

    def unshared(self) -> tuple[int, str, str] | None:
        """Index of the first projection where two adapters' A differ, and those two; ``None`` where none do."""
        for index, columns in enumerate(self.columns):
            names = list(columns)
            for name in names[1:]:
                if columns[name] != columns[names[0]]:
                    return index, names[0], name
        return None

    def changed(self, projections: Sequence[nn.Module], adapter: str) -> int | None:
        """Index of the first projection where the adapter's A is no longer the one stacked here, or ``None``."""
        for index, projection in enumerate(projections):
            a, place = lora_a(projection, adapter), self.columns[index].get(adapter)
            if (a is None) != (place is None):
                return index
            if a is not None and place is not None and not self._holds(index, place, a):
                return index
        return None

    def alias(
        self, projections: Sequence[nn.Module], adapter: str
    ) -> tuple[list[dict[str, tuple[int, int]]], int | None]:
        """Columns that already hold this adapter's A, per projection, and the first one where none do (``None``: all do).

        Changes nothing; ``join`` takes the columns over.
        """
        found: list[dict[str, tuple[int, int]]] = []
        for index, projection in enumerate(projections):
            a = lora_a(projection, adapter)
            if a is None:
                found.append({})
                continue
            place = next((p for p in self.columns[index].values() if self._holds(index, p, a)), None)
            if place is None:
                return found, index
            found.append({adapter: place})
        return found, None

    def join(self, columns: list[dict[str, tuple[int, int]]]) -> None:
        """Let an adapter use columns found by ``alias``."""
        for mine, more in zip(self.columns, columns, strict=True):
            mine.update(more)

    def only(self, agent: Sequence[str]) -> "LRBank":
        """A bank with the columns of an agent of one adapter."""
        new = LRBank(self.align)
        for stack, columns in zip(self.stacks, self.columns, strict=True):
            place = next((columns[adapter] for adapter in agent if adapter in columns), None)
            new.columns.append({} if place is None else dict.fromkeys(agent, (0, place[1])))
            low, rank = place or (0, 0)
            new.stacks.append(None if stack is None or place is None else stack[low : low + _up(rank, self.align)])
        return new

    def copy(self) -> "LRBank":
        """A bank that can be joined on its own; the stacked A's, which never change, are shared."""
        return LRBank(self.align, list(self.stacks), [dict(columns) for columns in self.columns])

    def _holds(self, index: int, place: tuple[int, int], a: Tensor) -> bool:
        offset, rank = place
        stack = self.stacks[index]
        return stack is not None and rank == a.shape[0] and _same(stack[offset : offset + rank], a)


def _same(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape:
        return False
    dtype = torch.promote_types(left.dtype, right.dtype)
    return torch.equal(left.to(dtype), right.to(device=left.device, dtype=dtype))


def _up(rank: int, align: int) -> int:
    return -(-rank // align) * align
