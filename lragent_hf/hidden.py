"""DroidSpeak's hidden-state cache: a hand-over skips the layers below the first that is recomputed.

Those layers' K and V are reused as they are, so all that an agent would run them for is the input of the first recomputed
layer. That is cached as the token is first run, and handed on (Liu et al., NSDI 2026; LRAgent, appendix C.5): the layers
below see the new tokens only.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .errors import UnsupportedModelError
from .ledger import Plan

if TYPE_CHECKING:
    from .cache import LoRASharedCache

__all__ = ["HiddenStates", "block_of"]

# Arguments of a decoder layer that have a row a token elsewhere than [B, q, d] has it. A 2-D mask is over keys.
_ROWS = {"position_embeddings": -2, "position_ids": -1}


class HiddenStates:
    """One forward's use of the hidden-state cache: hooks on the decoder layers from the first to the one that it feeds.

    Attributes:
        first: index of the first recomputed layer.
        run: rows that the layers below it run, the last ones of the forward: those that are new, or one (no layer takes
            none), whose K and V are there already.
    """

    def __init__(self, cache: "LoRASharedCache", plan: Plan, first: int):
        self.cache, self.plan, self.first = cache, plan, first
        self.count = plan.stop - plan.past
        self.run = min(self.count, max(1, plan.stop - cache.ledger.total))
        decoder = cache.binding.decoder
        self._handles = [block_of(decoder, first).register_forward_pre_hook(self._feed, with_kwargs=True)]
        for index in range(first if self.run < self.count else 0):
            self._handles.append(block_of(decoder, index).register_forward_pre_hook(self._cut, with_kwargs=True))

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _cut(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A layer below: keep the last rows of everything that has a row a token."""
        cut = {
            name: self._last(value, _ROWS[name]) if name in _ROWS else self._rows(value)
            for name, value in kwargs.items()
        }
        return tuple(map(self._rows, args)), cut

    def _rows(self, value: Any) -> Any:
        """Hidden states, per-layer inputs [B, q, d], and dense masks [B, 1 or H, q, L]."""
        dim = {3: 1, 4: 2}.get(value.ndim) if isinstance(value, Tensor) else None
        return value if dim is None else self._last(value, dim)

    def _last(self, value: Any, dim: int) -> Any:
        if isinstance(value, tuple):
            return tuple(self._last(one, dim) for one in value)
        if not isinstance(value, Tensor) or value.ndim < abs(dim) or value.shape[dim] != self.count:
            return value  # absent, or cut by a layer before
        return value.narrow(dim, self.count - self.run, self.run)

    def _feed(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first recomputed layer: cache the input of new tokens, put that of cached ones in front of it."""
        new = args[0] if args else kwargs["hidden_states"]
        past, stop = self.plan.past, self.plan.stop
        if new.ndim != 3 or new.shape[1] != self.run:
            raise UnsupportedModelError(
                f"{type(block).__name__} was given {tuple(new.shape)}, expected [B, {self.run}, hidden_size], so its input "
                "cannot be cached. Make the cache with hidden_cache=False."
            )
        buffer = self.cache.hidden
        if stop > self.cache.ledger.total:  # then what the layers below ran is what is new
            buffer.write(stop - self.run, new)
            if self.run == self.count:
                return None
        whole = buffer.read(stop, past).to(new.device)
        return ((whole, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": whole})


def block_of(decoder: nn.Module, index: int) -> nn.Module:
    """The decoder layer of that index, which takes and gives hidden states [B, q, hidden_size].

    Raises:
        UnsupportedModelError: the decoder keeps its layers in no list.
    """
    layers = getattr(decoder, "layers", None)
    if layers is None:
        layers = getattr(decoder, "h", None)
    if not isinstance(layers, nn.ModuleList) or not 0 <= index < len(layers):
        raise UnsupportedModelError(
            f"{type(decoder).__name__} has no list of layers to skip in. Make the cache with hidden_cache=False."
        )
    return layers[index]
