"""The mask function that goes with our attention function."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import causal_mask_function, sdpa_mask

from .._compat import sliding_window_of

__all__ = ["WindowMask", "attends", "mask"]

_MOVES = frozenset((Tensor.to, Tensor.cuda, Tensor.cpu, Tensor.contiguous, Tensor.clone))


class WindowMask(Tensor):
    """A 2-D mask with its sliding window (or ``None``), which it keeps where layers on other devices get a copy of it.

    Whatever else is done to one gives a plain tensor: nothing says that the window is still right for that.
    """

    window: int | None

    @staticmethod
    def of(bits: Tensor, window: int | None) -> "WindowMask":
        """``bits`` with that window; shares their memory."""
        made = bits.as_subclass(WindowMask)
        made.window = window
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            return WindowMask.of(found, args[0].window) if func in _MOVES and found is not args[0] else found


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Mask for ``attention``.

    Returns:
        ``None`` for plain causal attention without padding; a bool ``WindowMask`` [B, kv_length] for causal attention with
        padding or a window; a dense mask [B, 1, q_length, kv_length] for anything else.
    """
    window = sliding_window_of(mask_function)
    if window is False:
        kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, device=device, **kwargs
        )
    if window is not None and kv_offset + kv_length <= window:
        window = None  # nothing has left the window yet
    if attention_mask is not None:
        attention_mask = attention_mask[:, kv_offset : kv_offset + kv_length]
        if window is None and bool(attention_mask.all()):
            return None
    elif window is None:
        return None
    else:
        attention_mask = torch.ones((batch_size, kv_length), dtype=torch.bool, device=device)
    return WindowMask.of(attention_mask, window)


def attends(mask: Tensor, window: int | None, count: int) -> Tensor:
    """Which of the last ``count`` positions attend to anything [B or 1, count, 1 or Hq, 1]."""
    if mask.ndim != 2:
        return mask.any(-1).transpose(1, 2).unsqueeze(-1) if mask.dtype == torch.bool else mask.new_ones(())
    seen = mask.long().cumsum(1)
    if window is not None:
        seen = seen - nn.functional.pad(seen, (window, 0))[:, : seen.shape[1]]
    return seen[:, -count:, None, None] > 0
