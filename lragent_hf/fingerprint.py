"""What a saved cache must fit: digests of the base's v_proj and of each adapter's A, and the check against a model."""

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .adapters import lora_a
from .errors import CacheModelMismatchError
from .placement import weight_of

if TYPE_CHECKING:
    from .cache import LoRASharedCache

__all__ = ["adapter_digests", "base_layer", "check_fits", "model_facts"]


def model_facts(cache: "LoRASharedCache") -> dict[str, Any]:
    """What a model must be to read a cache: class, dtype, number of layers, and digests of the base's v_proj."""
    decoder = cache.binding.decoder
    sites = cache.binding.sites(cache.roster.keys)
    weights = {site.name: _base_weight(site.module) for site in sites}
    if not weights:  # no separate v_proj: the embedding stands for the model
        weights = {"the input embedding": _base_weight(decoder.get_input_embeddings())}
    return {
        "class": type(decoder).__name__,
        "dtype": str(decoder.dtype),
        "rotary": json.loads(json.dumps(getattr(decoder.config, "rope_parameters", None), default=str)),
        "layers": len(cache.layers),
        "weights": {name: _digest(weight) for name, weight in weights.items()},
    }


def base_layer(module: Any) -> nn.Module:
    """A projection below whatever adapters wrap it."""
    while hasattr(module, "base_layer"):
        module = module.base_layer
    found: nn.Module = module
    return found


def _base_weight(module: nn.Module) -> Tensor:
    weight = weight_of(base_layer(module))
    assert weight is not None
    return weight


def adapter_digests(cache: "LoRASharedCache") -> dict[str, dict[str, str]]:
    """A of each adapter that has taken a turn or has columns in the LR cache, on every projection that is split."""
    names = [*(name for agent in cache.ledger.turns for name in agent), *cache.roster.bank_of]
    names += [name for bank in cache.roster.banks.values() for name in bank.adapters]
    return {name: _a_digests(cache, name) for name in dict.fromkeys(names)}


def _a_digests(cache: "LoRASharedCache", adapter: str) -> dict[str, str]:
    found = ((site.name, lora_a(site.module, adapter)) for site in cache.binding.sites(cache.roster.keys))
    return {name: _digest(a) for name, a in found if a is not None}


def check_fits(cache: "LoRASharedCache", manifest: dict[str, Any]) -> None:
    """Raise unless model and adapters are those the cache was written with."""
    there, here = manifest["model"], model_facts(cache)
    for fact in ("class", "layers", "dtype", "rotary"):
        if there[fact] != here[fact]:
            raise CacheModelMismatchError(
                f"The cache was saved from a model with {fact} {there[fact]}, this one has {here[fact]}. Load it with "
                "the model it was made on."
            )
    for name in {**there["weights"], **here["weights"]}:
        if there["weights"].get(name) != here["weights"].get(name):
            raise CacheModelMismatchError(
                f"The base weights of {name} are not those the cache was saved with. Load it with the model it was "
                "made on."
            )
    loaded = cache.binding.adapters()
    for adapter, digests in manifest["adapters"].items():
        if adapter not in loaded:
            raise CacheModelMismatchError(
                f"Adapter {adapter!r}, which the saved cache serves, is not loaded. Loaded: {loaded}. Load it first."
            )
        mine = _a_digests(cache, adapter)
        for name in {**digests, **mine}:
            if digests.get(name) != mine.get(name):
                raise CacheModelMismatchError(
                    f"A of adapter {adapter!r} at {name} is not the one the cache was saved with. Load the adapter "
                    "it was made with, or run the prompt again."
                )


def _digest(tensor: Tensor) -> str:
    """sha256 of a tensor's type, shape and bytes; of a wrapper (quantised weights) of what it wraps."""
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if hasattr(tensor, "__tensor_flatten__") and type(tensor) not in (Tensor, nn.Parameter):
        for name in tensor.__tensor_flatten__()[0]:
            found.update(_digest(getattr(tensor, name)).encode())
    else:
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        found.update(data.numpy().data)
    return found.hexdigest()
