"""The token record of a trajectory, and the check that what comes next continues it."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .agents import Agent, agent_label
from .buffer import GrowableBuffer
from .errors import CacheModelMismatchError, TrajectoryMismatchError

__all__ = ["Step", "Trajectory"]

_UNKNOWN = -1  # the token of a position that was fed as an embedding


@dataclass
class Step:
    """What one forward brings.

    Attributes:
        agent: who runs it.
        past: the first position it runs, ``count`` of them.
        tokens: [B, count], or ``None`` for ``inputs_embeds``.
        mask: 2-D attention mask [B, past + count], or ``None`` (everything is attended).
        position_ids: [B or 1, count], or ``None`` (the model counts on from ``past``).
        rows: batch size.
    """

    agent: Agent
    past: int
    count: int
    rows: int
    device: torch.device
    tokens: Tensor | None = None
    mask: Tensor | None = None
    position_ids: Tensor | None = None

    @property
    def stop(self) -> int:
        return self.past + self.count


class Trajectory:
    """Tokens and mask bits [B, L] that were cached, one row a batch row.

    Two conventions for positions under padding are in use: the index on the trajectory, and the number of attended
    tokens before (``generate``). Both are right, a mixture is not: the record keeps which are still possible.
    """

    def __init__(self) -> None:
        self.tokens = GrowableBuffer(1)
        self.mask = GrowableBuffer(1)
        self.clear()

    def clear(self) -> None:
        """Forget all tokens."""
        self.tokens.clear()
        self.mask.clear()
        self.total = 0
        self.rows: int | None = None
        self.has_pads = False
        self.conventions = frozenset(("index", "count"))
        self.unknown_by: Agent | None = None
        self.unknown_from = 0

    def buffers(self) -> tuple[GrowableBuffer, GrowableBuffer]:
        """The record's buffers, for whole-cache operations."""
        return self.tokens, self.mask

    def copy(self) -> "Trajectory":
        """An independent record."""
        new = Trajectory()
        new.__dict__.update(self.__dict__, tokens=self.tokens.copy(), mask=self.mask.copy())
        return new

    def rename(self, name: Callable[[Hashable], Any]) -> None:
        """Call each agent ``name(agent)`` from now on."""
        self.unknown_by = None if self.unknown_by is None else name(self.unknown_by)

    def truncate(self, total: int) -> None:
        """Cut the record to ``total`` positions."""
        self.total = min(self.total, total)
        if self.total == 0:
            self.clear()
        elif self.total <= self.unknown_from:
            self.unknown_by = None

    def append(self, step: Step, conventions: frozenset[str]) -> None:
        """Record the positions of ``step`` that are new; ``conventions`` is what ``check`` returned for it."""
        new = step.stop - self.total
        if new <= 0:
            self.conventions, self.rows = conventions, step.rows
            return
        if step.tokens is None:
            tokens = torch.full((step.rows, new), _UNKNOWN, dtype=torch.int64, device=step.device)
        else:
            tokens = step.tokens[:, -new:]
        has_pads = self.has_pads
        if step.mask is None:
            bits = torch.ones((step.rows, new), dtype=torch.bool, device=step.device)
        else:
            bits = step.mask[:, -new:].bool()
            has_pads = has_pads or not bool(bits.all())
        self.tokens.write(self.total, tokens.to(torch.int64))
        self.mask.write(self.total, bits)
        # Only now: what is above can run out of memory.
        if step.tokens is None and self.unknown_by is None:
            self.unknown_by, self.unknown_from = step.agent, self.total
        self.conventions, self.rows, self.has_pads, self.total = conventions, step.rows, has_pads, step.stop

    def check(self, step: Step) -> frozenset[str]:
        """Raise unless ``step`` continues the record.

        Returns:
            The conventions of counting positions that are still possible, for ``append``.

        Raises:
            CacheModelMismatchError: another batch size than the cache holds.
            TrajectoryMismatchError: other tokens than those cached, a mask or positions of another width or place, or
                attention to a position that was padding when it was cached.
        """
        if self.rows not in (None, 1, step.rows) and self.total:  # one row is expanded to as many as there are
            raise CacheModelMismatchError(
                f"The cache holds {self.rows} row(s) and the forward brings {step.rows}. Use a cache per batch, or "
                "batch_repeat_interleave / batch_select_indices to give the cache as many rows."
            )
        if self.unknown_by not in (None, step.agent):
            raise TrajectoryMismatchError(
                f"Part of the trajectory was fed as inputs_embeds by agent {agent_label(self.unknown_by)!r}, so it cannot "
                f"be checked that agent {agent_label(step.agent)!r} continues it. Feed input_ids, or use a new cache."
            )
        self._check_width(step)
        self._check_tokens(step)
        self._check_pads(step)
        return self._check_positions(step)

    def common_prefix(self, input_ids: Tensor) -> tuple[int, int]:
        """(row, length) of the longest prefix that ``input_ids`` [1 or B, L] shares with the record.

        With as many rows as the record holds, the shortest of the row by row prefixes; ``row`` is then -1.
        """
        length = min(self.total, input_ids.shape[1])
        if not length or self.rows is None:
            return -1, 0
        same = (self.tokens.read(length) == input_ids[:, :length].to(self.tokens.read(0).device)) | ~self.mask.read(
            length
        )
        lengths = same.long().cumprod(1).sum(1)
        if input_ids.shape[0] == self.rows:
            return -1, int(lengths.min())
        row = int(lengths.argmax())
        return row, int(lengths[row])

    def _check_width(self, step: Step) -> None:
        for name, tensor, width in (
            ("attention_mask", step.mask, step.stop),
            ("position_ids", step.position_ids, step.count),
        ):
            if tensor is not None and tensor.shape[-1] != width:
                raise TrajectoryMismatchError(
                    f"{name} covers {tensor.shape[-1]} position(s), but {step.past} are cached for agent "
                    f"{agent_label(step.agent)!r} and the forward brings {step.count}: expected {width}. {_WAYS_OUT}",
                    position=min(tensor.shape[-1], step.stop),
                )

    def _check_tokens(self, step: Step) -> None:
        again = min(self.total, step.stop) - step.past
        if again <= 0:
            return
        if step.tokens is None:
            if self.unknown_by is None:
                raise TrajectoryMismatchError(
                    f"Positions {step.past} to {step.past + again} are cached as tokens and came again as inputs_embeds. "
                    "Feed input_ids.",
                    position=step.past,
                )
            return
        known = self.tokens.read(step.past + again, step.past)
        given = step.tokens[:, :again].to(known.device)
        # An embedding matches whatever its own agent feeds in its place; a pad matches anything.
        differs = (given != known) & self.mask.read(step.past + again, step.past) & (known != _UNKNOWN)
        if bool(differs.any()):
            row, column = (int(i) for i in differs.nonzero()[0])
            raise TrajectoryMismatchError(
                f"Token {step.past + column} of row {row} is {int(given[row, column])}, but {int(known[row, column])} is "
                f"cached there. {_WAYS_OUT}",
                position=step.past + column,
                row=row,
            )

    def _check_pads(self, step: Step) -> None:
        seen = min(self.total, step.stop)
        if not self.has_pads or not seen:
            return
        wrong = ~self.mask.read(seen)
        if step.mask is not None:
            wrong = wrong & step.mask[:, :seen].bool().to(wrong.device)
        if bool(wrong.any()):
            row, column = (int(i) for i in wrong.nonzero()[0])
            raise TrajectoryMismatchError(
                f"Position {column} of row {row} was padding when it was cached, and the attention_mask "
                f"{'attends to it' if step.mask is not None else 'is missing'}. Pass the mask of the whole trajectory, "
                "with 0 there.",
                position=column,
                row=row,
            )

    def _check_positions(self, step: Step) -> frozenset[str]:
        """Positions continue the index, or the count of attended tokens; which of the two must not change."""
        ids = step.position_ids
        if ids is None and step.mask is None:
            return self.conventions
        index = torch.arange(step.past, step.stop, device=step.device)
        ids = index[None] if ids is None else ids.to(step.device)
        if ids.ndim != 2:  # several position axes (multimodal rotary) follow rules of their model's own
            return self.conventions
        wrong = {"index": ids != index}
        if step.mask is None:
            wrong["count"] = wrong["index"]
        else:
            bits = step.mask[:, step.past :].bool()
            if not self.has_pads and bool((bits & ~wrong["index"]).all()):
                return self.conventions  # no padding yet: the two are the same
            read = min(self.total, step.past)
            before = self.mask.read(read).sum(1, keepdim=True) if read else 0
            wrong = {"index": wrong["index"] & bits, "count": (ids != before + bits.cumsum(1) - 1) & bits}
        left = frozenset(name for name in self.conventions if not bool(wrong[name].any()))
        if not left:
            row, column = (int(i) for i in wrong[min(self.conventions)].nonzero()[0])
            raise TrajectoryMismatchError(
                f"position_ids give {int(ids[min(row, len(ids) - 1), column])} to position {step.past + column} of row "
                f"{row}, which does not continue the {step.past} position(s) that are cached. {_WAYS_OUT}",
                position=step.past + column,
                row=row,
            )
        return left


_WAYS_OUT = (
    "Pass the whole trajectory's input_ids and attention_mask (generate() then runs what this agent has not read); if "
    "the cache already holds all of them, call cache.align(input_ids) first. Assisted decoding and prompt lookup feed the "
    "prompt twice: they need an empty cache, cache.reset()."
)
