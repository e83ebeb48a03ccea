"""Which part of a model takes the tokens and the cache, and which models have none that agents could share."""

from peft import PeftMixedModel, PeftModel, PeftType
from torch import nn
from transformers import PreTrainedModel

from . import _compat
from .errors import UnsupportedAdapterError, UnsupportedModelError

__all__ = ["find_decoder"]

# Layers that keep something else than K and V: state that neither an agent nor a crop could be told apart in.
_STATEFUL = ("linear", "conv", "mamba", "recurrent", "hybrid")


def find_decoder(model: nn.Module) -> PreTrainedModel:
    """The module that takes ``input_ids`` (or what was embedded) and the cache.

    Raises:
        UnsupportedModelError: there is none, or one whose layers keep a state, or an encoder-decoder.
        UnsupportedAdapterError: prompt learning or X-LoRA, which change what a position is.
    """
    if isinstance(model, PeftModel | PeftMixedModel):
        for name, config in model.peft_config.items():
            if config.is_prompt_learning or config.peft_type == PeftType.XLORA:
                raise UnsupportedAdapterError(
                    f"Adapter {name!r} is X-LoRA, which runs every forward twice and so would cache every token twice. Use "
                    "LoRA adapters."
                    if config.peft_type == PeftType.XLORA
                    else f"Adapter {name!r} is prompt learning ({config.peft_type}), which puts virtual tokens into the "
                    "cache. Use LoRA adapters."
                )
        model = model.base_model.model
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"Expected a transformers model or a PeftModel, got {type(model).__name__}.")
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{type(model).__name__} is an encoder-decoder model; only decoders are supported.")
    decoder = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel):
        raise UnsupportedModelError(f"{type(model).__name__} names no decoder of its own.")
    if not _compat.takes_cache(decoder):
        raise UnsupportedModelError(
            f"{type(decoder).__name__} takes no cache of keys and values, so there is none to share."
        )
    kinds = {str(kind) for kind in getattr(decoder.config, "layer_types", None) or ()}
    stateful = sorted(kind for kind in kinds if any(word in kind for word in _STATEFUL))
    if stateful or getattr(decoder, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{type(decoder).__name__} has layers that keep a state ({', '.join(stateful) or 'recurrent'}), which agents "
            "cannot share by position. Use a model with attention layers only."
        )
    return decoder
