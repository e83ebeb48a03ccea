"""Tiny random models with LoRA agents, and what the tests ask of a cache from outside."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from lragent_hf import CACHE_ARG, LoRASharedCache

VOCAB = 97
AGENTS = ("plan", "act", "reflect")
SCHEMES = ("non_shared", "full_shared", "base_shared", "base_lr_shared", "base_lr_stacked")
SPLITTING = ("base_shared", "base_lr_shared", "base_lr_stacked")
WITH_WINDOW = ("full_shared", "base_lr_shared", "base_lr_stacked")

_CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,  # large enough for attention to matter in the logits
    "bos_token_id": None,
    "eos_token_id": None,  # generate stops at max_new_tokens only
    "pad_token_id": 0,
}


def config(kind: str = "llama", **options: Any) -> PretrainedConfig:
    """A config of 6 query and 2 kv heads, 3 layers, fp32."""
    if kind == "qwen3":
        options = {"head_dim": 8, **options}
    if kind == "mistral":
        options = {"sliding_window": None, **options}
    return _CONFIGS[kind](**{**_SMALL, **options})


def base_model(cfg: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """The model of that config with seeded random weights, in eval mode."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(cfg).eval()


def peft_model(
    cfg: PretrainedConfig | None = None,
    adapters: dict[str, dict[str, Any]] | None = None,
    *,
    shared: bool = False,
    seed: int = 0,
    **lora: Any,
) -> PeftModel:
    """A tiny model with the agents plan (active), act and reflect on q_proj and v_proj, ranks 5, 5 and 3.

    Args:
        adapters: name -> options of its ``LoraConfig``; ``lora`` are options of all.
        shared: every adapter gets the first one's A (of the highest rank asked for), else each its own.
    """
    model = base_model(config() if cfg is None else cfg, seed)
    if adapters is None:
        adapters = {"plan": {}, "act": {}, "reflect": {} if shared else {"r": 3}}
    peft: PeftModel | None = None
    for name, options in adapters.items():
        chosen = LoraConfig(**{"r": 5, "lora_alpha": 10, "target_modules": ["q_proj", "v_proj"], **lora, **options})
        if peft is None:
            peft = get_peft_model(model, chosen, adapter_name=name)
        else:
            peft.add_adapter(name, chosen)
    assert peft is not None
    randomise(peft, seed=seed, shared=shared)
    peft.set_adapter(next(iter(adapters)))
    return peft.eval()


def randomise(model: nn.Module, seed: int = 0, shared: bool = False, only: str | None = None) -> None:
    """Give adapters random A and non-zero B (PEFT starts B at zero, and then every test passes)."""
    generator = torch.Generator().manual_seed(seed + 1)
    for module in model.modules():
        if not hasattr(module, "lora_A"):
            continue
        for name in module.lora_A:
            if only is not None and name != only:
                continue
            a, b = module.lora_A[name], module.lora_B[name]
            a.weight.data.copy_(torch.randn(a.weight.shape, generator=generator) / math.sqrt(a.weight.shape[1]))
            b.weight.data.copy_(torch.randn(b.weight.shape, generator=generator) * 0.3)
            if b.bias is not None:
                b.bias.data.copy_(torch.randn(b.bias.shape, generator=generator) * 0.3)
            if (
                name in module.lora_magnitude_vector
            ):  # DoRA: gains of about 0.5 to 1.5, and not those of an untrained one
                m = module.lora_magnitude_vector[name].weight
                m.data.mul_(0.5 + torch.rand(m.shape, generator=generator))
        if shared and module.lora_A:
            first = next(iter(module.lora_A))
            for name in module.lora_A:
                module.lora_A[name].weight.data.copy_(module.lora_A[first].weight.data)


def tokens(count: int, rows: int = 1, seed: int = 0) -> Tensor:
    """Random token ids [rows, count], none of them the pad token."""
    return torch.randint(1, VOCAB, (rows, count), generator=torch.Generator().manual_seed(seed))


def decoder_of(model: nn.Module) -> PreTrainedModel:
    """The module that takes ``input_ids`` and the cache."""
    return (model.get_base_model() if isinstance(model, PeftModel) else model).get_decoder()


def run(model: nn.Module, cache: Any, ids: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
    """One forward over what of ``ids`` (the whole trajectory) the active agent has yet to read; its logits."""
    past = cache.get_seq_length()
    mask = torch.ones_like(ids) if mask is None else mask
    if mask.min() == 0:
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, past:]
        kwargs.setdefault("position_ids", positions)
    with torch.no_grad():
        return model(input_ids=ids[:, past:], attention_mask=mask, **{CACHE_ARG: cache}, **kwargs).logits


def turn(model: PeftModel, cache: Any, agent: str | None, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """`run` as that agent (``None``: adapters off)."""
    return active(model, agent, lambda: run(model, cache, ids, mask))  # type: ignore[no-any-return]


def write(model: nn.Module, ids: Tensor, count: int, cache: Any = None, **options: Any) -> Tensor:
    """``generate`` without surprises: greedy, ``count`` tokens, with the cache if there is one."""
    if cache is not None:
        options[CACHE_ARG] = cache
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, **options}
    return model.generate(input_ids=ids, max_new_tokens=count, **options)


def assert_alone(model: nn.Module, cache: LoRASharedCache, ids: Tensor, parts: Iterable[int] = (9, 1, 1)) -> None:
    """The active agent alone on an empty cache: logits of every forward are ``DynamicCache``'s, to rounding."""
    stock, start, stops = DynamicCache(), 0, []
    for part in parts:
        start += part
        stops.append(start)
    assert stops[-1] <= ids.shape[1]
    for stop in stops:
        assert_close(run(model, cache, ids[:, :stop]), run(model, stock, ids[:, :stop]))


def assert_close(got: Tensor, want: Tensor, factor: float = 1.0) -> None:
    """Equal to rounding: the largest error in units of the dtype's epsilon at the largest value wanted."""
    got, want = got.detach(), want.detach()
    assert got.shape == want.shape
    assert got.isfinite().all()
    allowed = factor * 200 * torch.finfo(want.dtype).eps * (1.0 + float(want.abs().max()))
    worst = float((got - want).abs().max())
    assert worst <= allowed, f"largest error {worst:.3g}, allowed {allowed:.3g}"


def snapshot(cache: LoRASharedCache) -> dict[str, Any]:
    """Everything that counts in a cache, byte for byte: valid rows of all buffers, lengths, the token record."""
    ledger, record = cache.ledger, cache.trajectory
    rows: dict[Any, bytes] = {}
    for index, layer in enumerate(cache.layers):
        for part, group in (("k", layer.k), ("v", layer.v)):
            for stream, buffer in group.items():
                length = ledger.total if stream is None else ledger.streams.get(stream, 0)
                if length:
                    rows[index, part, stream] = raw(buffer.read(length))
        for part, group in (("lr", layer.lr), ("k_lr", layer.k_lr)):
            for bank, buffer in group.items():
                if ledger.lr.get(bank, 0):
                    rows[index, part, bank] = raw(buffer.read(ledger.lr[bank]))
    for (kind, _), angles in cache.rotary.groups.items():
        for part, buffer in zip(("cos", "sin"), angles, strict=True):
            if ledger.rotary:
                rows[kind, part, None] = raw(buffer.read(ledger.rotary))
    if cache.hidden.capacity:
        rows["hidden"] = raw(cache.hidden.read(ledger.total))
    return {
        "rows": rows,
        "total": ledger.total,
        "streams": {key: length for key, length in ledger.streams.items() if length},
        "lr": {key: length for key, length in ledger.lr.items() if length},
        "writers": list(ledger.writers),
        "progress": ledger.progress,
        "rotary": ledger.rotary,
        "banks": list(cache.roster.banks),
        "turns": list(ledger.turns),
        "last": ledger.last,
        "record": [raw(buffer.read(record.total)) for buffer in record.buffers() if record.total],
        "record facts": (record.total, record.rows, record.has_pads, record.conventions, record.unknown_by),
    }


def assert_same_state(left: dict[str, Any], right: dict[str, Any]) -> None:
    """Two snapshots are equal; names what differs (pytest's own diff of so many bytes takes minutes)."""
    same = left == right
    differing = [f"{key}: {_short(left[key])} != {_short(right[key])}" for key in left if left[key] != right[key]]
    assert same, "; ".join(differing)


def _short(value: Any) -> str:
    if isinstance(value, dict) and any(isinstance(item, bytes) for item in value.values()):
        return str({key: hash(item) % 1000 for key, item in value.items()})
    return f"{len(value)} tensors" if isinstance(value, list) and value and isinstance(value[0], bytes) else str(value)


def raw(tensor: Tensor) -> bytes:
    """The tensor's values as bytes."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def hook_census(model: nn.Module) -> dict[str, Any]:
    """Hooks, attributes and LoRA variants of every module: what attaching may add and detaching must take away."""
    census: dict[str, Any] = {}
    for name, module in model.named_modules():
        hooks = {key: len(value) for key, value in vars(module).items() if "hooks" in key and value}
        variants = dict(getattr(module, "lora_variant", {}))
        census[name] = (hooks, set(vars(module)), variants)
    return census


@contextmanager
def raising(module: nn.Module, error: BaseException) -> Iterator[list[int]]:
    """While open, entering ``module`` raises ``error``; yields a list that gets an item each time."""
    calls: list[int] = []

    def hook(*_: Any) -> None:
        calls.append(1)
        raise error

    handle = module.register_forward_pre_hook(hook)
    try:
        yield calls
    finally:
        handle.remove()


def active(model: PeftModel, name: str | None, action: Callable[[], Any]) -> Any:
    """Run ``action`` with that agent active (``None``: adapters off)."""
    if name is None:
        with model.disable_adapter():
            return action()
    model.set_adapter(name)
    return action()
