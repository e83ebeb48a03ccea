"""The only place that asks what the installed transformers looks like."""

import inspect
from functools import lru_cache
from typing import Any, cast

from torch import Tensor, nn
from transformers import DynamicCache, LlamaModel
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    create_masks_for_generate,
    sliding_window_causal_mask_function,
)

__all__ = [
    "CACHE_ARG",
    "attn_implementation",
    "cache_argument",
    "moving_angles",
    "set_attn_implementation",
    "sliding_window_of",
    "sliding_windows",
    "static_masks",
    "takes_cache",
]

CACHE_ARG: str = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"
"""Name of the cache argument of ``forward`` and ``generate`` that the installed transformers takes without a warning."""

_CACHE_NAMES = ("cache", "past_key_values")


def cache_argument(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Value of argument ``name`` (``"cache"`` stands for all of its names) in a call of ``module``, or ``None``."""
    names = _CACHE_NAMES if name == "cache" else (name,)
    for key in names:
        if kwargs.get(key) is not None:
            return kwargs[key]
    if args:  # positional: rare, only when a user calls the decoder by hand
        for key, value in zip(_parameters(cast(Any, type(module))), args, strict=False):
            if key in names:
                return value
    return None


@lru_cache
def _parameters(kind: Any) -> tuple[str, ...]:
    """Names of the arguments of ``forward``, without self."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def takes_cache(module: nn.Module) -> bool:
    """Whether the module's forward names a cache among its arguments."""
    return not set(_CACHE_NAMES).isdisjoint(inspect.signature(module.forward).parameters)


def attn_implementation(config: Any) -> str | None:
    """Name of the attention implementation a config selects."""
    return config._attn_implementation_internal


def set_attn_implementation(config: Any, name: str | None) -> None:
    """Select an attention implementation for this config only (the public setter also descends into sub-configs)."""
    config._attn_implementation_internal = name


def sliding_window_of(mask_function: Any) -> int | bool | None:
    """What a mask function of transformers means to a kernel.

    Returns:
        ``None`` for plain causal, the window for causal with a sliding window, ``False`` for anything else (chunked,
        overlays, packed sequences, bidirectional), which only a dense mask can express.
    """
    if mask_function is causal_mask_function:
        return None
    parts = _closure(mask_function).get("mask_functions")
    if getattr(mask_function, "__code__", None) is not _AND_CODE or parts is None or len(parts) != 2:
        return False
    overlay, base = parts
    if base is not causal_mask_function or getattr(overlay, "__code__", None) is not _WINDOW_CODE:
        return False
    return int(_closure(overlay)["sliding_window"])


def sliding_windows(config: Any) -> list[int | None]:
    """The sliding (or chunk) window of each layer's stock cache, ``None`` where it keeps everything."""
    return [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]


def static_masks(model: nn.Module, config: Any, inputs: Tensor, mask: Tensor | None, cache: Any, ids: Tensor) -> Any:
    """Dense bool masks over a static cache, one or by kind of layer, as ``generate`` makes them.

    Args:
        model, config: the whole model, which may have rules of its own, and its decoder's config.
        inputs: [B, q, 0], only for its shape, dtype and device.
        mask: [B, cached + q] or ``None``.
        cache: says how many positions the masks cover.
        ids: position_ids.
    """
    make = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    before = attn_implementation(config)
    set_attn_implementation(config, "sdpa")
    try:
        return make(config=config, inputs_embeds=inputs, attention_mask=mask, position_ids=ids, **{CACHE_ARG: cache})
    finally:
        set_attn_implementation(config, before)


def moving_angles(config: Any) -> bool:
    """Whether the rotary angles of a position change as the context grows (dynamic and longrope scaling)."""
    found = [getattr(config, "rope_parameters", None) or {}]
    while found:
        one = found.pop()
        if one.get("rope_type") in ("dynamic", "longrope"):
            return True
        found += [value for value in one.values() if isinstance(value, dict)]
    return False


def _closure(function: Any) -> dict[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    return (
        {}
        if code is None or cells is None
        else dict(zip(code.co_freevars, (c.cell_contents for c in cells), strict=True))
    )


_AND_CODE = and_masks(causal_mask_function).__code__
_WINDOW_CODE = _closure(sliding_window_causal_mask_function(1))["mask_functions"][0].__code__
