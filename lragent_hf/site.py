"""One projection whose adapters' part is kept out of it and cached in rank r: v_proj, and k_proj under key LR."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .adapters import fold_b
from .agents import Agent, Mixed, agent_label
from .errors import AdapterChangedError, UnsupportedAdapterError, UnsupportedModelError
from .tap import Tap

if TYPE_CHECKING:
    from .banks import LRBank, Place

__all__ = ["Project", "Site", "check_input"]

Project = Callable[["Site", Tensor, Tensor], Tensor | None]
"""Takes a projection, its input and its output; returns what it is to give instead, or ``None``."""


class Site:
    """A projection of one attention layer, and during a forward what passes between it, storage and attention.

    Attributes:
        name, child: its full name, and its name in the attention module.
        hooked: the projection, as of when the forward began.
        position: its place in the lists of a bank.
        tap: what stands in for its adapters' variants.
        output: what it gave in this forward, to see what becomes of it on the way into the cache.
        rows: bank -> (first position, LR rows) that its hook computed and `update` stores.
        places: where the LR of the agent's adapters lies.
    """

    def __init__(self, attention: nn.Module, name: str, child: str, position: int, project: Project):
        self.attention, self.name, self.child, self.position = attention, f"{name}.{child}", child, position
        self._project = project
        self.tap = Tap()
        self.hooked: Any = None
        self._handle: Any = None
        self.forget()

    @property
    def module(self) -> nn.Module:
        """The projection as it is now."""
        module: nn.Module = getattr(self.attention, self.child)
        return module

    def forget(self) -> None:
        """Drop what belongs to one forward."""
        self.output: Tensor | None = None
        self._version = -1
        self.rows: dict[Hashable, tuple[int, Tensor]] = {}
        self.places: list[Place] = []
        self.tap.passed = 0

    def resolve(self) -> bool:
        """Hook the projection as it is now (loading an adapter can replace it). Returns whether it had changed."""
        module = self.module
        if module is self.hooked:
            return False
        if self._handle is not None:
            self._handle.remove()
        self.hooked = module
        self._handle = module.register_forward_hook(self._ran)
        return True

    def _ran(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        return self._project(self, args[0], output)

    def detach(self) -> None:
        """Remove hook and tap."""
        self.tap.remove()
        if self._handle is not None:
            self._handle.remove()

    def note(self, output: Tensor) -> None:
        """The projection gave ``output``."""
        self.output, self._version = output, _version(output)

    def gave(self, value: Tensor) -> bool:
        """Whether ``value`` is the output as it lies in memory, unedited."""
        out = self.output
        if out is None or out.data_ptr() != value.data_ptr() or out.numel() != value.numel():
            return False
        return self._version == _version(out)

    def states(self, like: Tensor) -> Tensor | None:
        """The output seen as ``like`` [B, H, q, D], or ``None`` if it is none of that size, or was edited since."""
        out = self.output
        if out is None or out.numel() != like.numel() or self._version != _version(out):
            return None
        return out.view(*out.shape[:2], like.shape[1], -1).transpose(1, 2)

    def check(self, agent: Agent, own: Sequence[tuple[str, Hashable]], banks: Mapping[Hashable, "LRBank"]) -> None:
        """Every adapter the projection ran must have been kept out of it, and have its LR where it is looked for.

        Raises:
            UnsupportedAdapterError, AdapterChangedError: one has not.
        """
        tapped = list(self.tap.replaced)
        if self.tap.passed != len(tapped):
            raise UnsupportedAdapterError(
                f"{self.name} ({type(self.module).__name__}) did not hand adapters {agent_label(agent)!r} to their LoRA "
                "variant, so base and LR cannot be told apart. Use scheme='full_shared' or 'non_shared'."
            )
        if len(tapped) != sum(adapter in banks[key].columns[self.position] for adapter, key in own):
            raise AdapterChangedError(
                f"Adapters {tapped} have LoRA on {self.name} now, and had not when their LR was cached. Call "
                "cache.reset() and run the prompt again, or load the adapter under another name."
            )

    def fold(
        self,
        agent: Agent,
        own: Sequence[tuple[str, Hashable]],
        banks: Mapping[Hashable, "LRBank"],
        like: Tensor,
        undo: Callable[[str, Tensor], Tensor] | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The agent's B and constant, from the adapters as they are now; ``places`` says where its LR lies from here on.

        Args:
            agent, own, banks: who runs, its adapters and their banks, and all banks.
            like: K or V [B, H, q, D] of the projection.
            undo: applied to each adapter's part (DoRA: the gains of the adapters before it).

        Returns:
            B [H, R, D] and the constant [H, 1, D], with the batch in front where rows have agents of their own; ``None``
            where there is none.
        """
        bs: dict[Place, Tensor] = {}
        constant: Tensor | None = None
        for adapter, key in own:
            columns = banks[key].columns[self.position].get(adapter)
            if columns is None:
                continue
            b, bias = fold_b(self.hooked, adapter, like.shape[1], like.dtype)
            if undo is not None:
                b, bias = undo(adapter, b), None if bias is None else undo(adapter, bias)
            if isinstance(agent, Mixed):
                rows = agent.rows_of(adapter)
                b = _on_rows(b, rows, like.shape[0])
                bias = None if bias is None else _on_rows(bias, rows, like.shape[0])
            place = key, columns
            bs[place] = bs[place] + b if place in bs else b
            if bias is not None:
                constant = bias if constant is None else constant + bias
        self.places = list(bs)
        whole = None if not bs else next(iter(bs.values())) if len(bs) == 1 else torch.cat(list(bs.values()), -2)
        return whole, constant


def check_input(site: Site, x: Tensor, rows: int, count: int) -> None:
    """Raise unless a projection ran on the tokens of the batch, one row each."""
    if x.ndim != 3 or x.shape[:2] != (rows, count):
        raise UnsupportedModelError(
            f"{site.name} was given {tuple(x.shape)}, expected [{rows}, {count}, d_in]: its rows are not the tokens of the "
            "batch, so they cannot be cached as LR. Use scheme='full_shared'."
        )


def _on_rows(part: Tensor, rows: list[int], count: int) -> Tensor:
    """``part`` on these of ``count`` batch rows, zeros on the others: a new first dimension."""
    whole = part.new_zeros((count, *part.shape))
    for row in rows:  # an index list would be a copy to the device
        whole[row] = part
    return whole


def _version(tensor: Tensor) -> int:
    """Counts in-place edits; inference tensors keep no count."""
    return -1 if tensor.is_inference() else tensor._version
