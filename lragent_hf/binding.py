"""Where the library meets a model: hooks on the decoder, who is active, and when a forward begins and ends.

A forward with one of our caches goes: decoder pre-hook (`ModelBinding.before`: who runs, is it allowed, what will be
written) -> per layer: v_proj (tap and hook), `cache.update`, attention -> decoder post-hook (`after`: commit, or undo).
Between forwards, and in forwards with any other cache, nothing is switched and nothing is tapped.
"""

from collections.abc import Callable
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import _compat
from .adapters import check_splittable, lora_adapters, probes, tuner_layers
from .agents import Agent, Mixed, agent_label, is_mixed_batch, mixed_hooks, read_agent, remove_hooks
from .attention import interface
from .decoder import find_decoder
from .dora import check_no_dora, check_order
from .errors import UnsupportedAdapterError, UnsupportedModelError
from .layer import ATTRIBUTE, LayerBinding
from .site import Site

__all__ = ["ModelBinding", "attach", "detach"]

# Architectures that read the mask, or V, themselves before they call the attention function.
_OWN_SCORES = frozenset(("doge", "diffllama"))
# Arguments of a model made for images or sound too that come with text alone.
_TEXT = frozenset(
    ("input_ids", "attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids", "labels", "logits_to_keep")
)


class ModelBinding:
    """All layers of one model, and the forward that now runs, if it has one of our caches.

    Attributes:
        decoder: the module that takes `input_ids` (or what ``outer`` embedded) and the cache.
        layers: by layer index; empty where attention has no separate v_proj (then only whole values can be shared).
        forward: the running forward, an object of the cache's own (`cache.begin`).
    """

    def __init__(self, decoder: PreTrainedModel, outer: PreTrainedModel):
        self.decoder, self.outer = decoder, outer
        self.entered: dict[str, Any] = {}
        self.layers: dict[int, LayerBinding] = {}
        self._twice: str | None = None
        for name, module in decoder.named_modules():
            if (
                hasattr(module, "v_proj")
                and hasattr(module, "k_proj")
                and isinstance(getattr(module, "layer_idx", None), int)
            ):
                if module.layer_idx in self.layers:  # trainable copies, or cross-attention beside self-attention
                    self._twice = self._twice or name
                    continue
                layer = LayerBinding(self, len(self.layers), module.layer_idx, name, module)
                self.layers[layer.index] = layer
                module.__dict__[ATTRIBUTE] = layer
        self.forward: Any = None
        self._probe: tuple[nn.Module, str, nn.Module] | None = None
        self._inside = False  # a call of `outer`
        self._mixed_hooks: list[tuple[nn.Module, int]] = []
        self._switched: list[tuple[Any, str | None]] = []
        self._handles: list[Any] = []
        self._in_python = False
        self._hook(lambda hook: hook)
        decoder.__dict__[ATTRIBUTE] = self
        for layer in self.layers.values():
            layer.k.position += len(self.layers)  # in a bank's lists those on k_proj follow those on v_proj
        self.resolve()

    def leave_to_python(self) -> None:
        """From now on torch.compile does not look into the hooks around a forward."""
        if not self._in_python:
            self._in_python = True
            for handle in self._handles:
                handle.remove()
            self._hook(torch.compiler.disable)

    def _hook(self, wrap: Callable[[Any], Any]) -> None:
        self._handles = [
            self.decoder.register_forward_pre_hook(wrap(self.before), with_kwargs=True, prepend=True),
            self.decoder.register_forward_hook(wrap(self.after), with_kwargs=True, always_call=True),
        ]
        if self.outer is not self.decoder:
            self._handles += [
                self.outer.register_forward_pre_hook(wrap(self.enter), with_kwargs=True),
                self.outer.register_forward_hook(wrap(self.leave), always_call=True),
            ]

    def sites(self, keys: bool) -> list[Site]:
        """The projections whose adapters are split off: v_proj of each layer, in order, then k_proj if ``keys``."""
        layers = list(self.layers.values())
        return [layer.v for layer in layers] + ([layer.k for layer in layers] if keys else [])

    # --- who is active ------------------------------------------------------------------------------------------------

    def agent(self) -> Agent:
        """The agent that would run now, read from the adapted layers themselves."""
        probe = self._prober()
        return () if probe is None else read_agent(probe)

    def _prober(self) -> nn.Module | None:
        """The adapted layer that tells who is active, if there is one."""
        probe = self._probe
        if probe is None or getattr(probe[0], probe[1], None) is not probe[2]:
            self._probe = probe = next(probes(self.decoder), None)
        return None if probe is None else probe[2]

    def adapters(self) -> list[str]:
        """Every LoRA adapter loaded, in order of loading."""
        return lora_adapters(self.decoder)

    @property
    def adapted(self) -> bool:
        """Whether the model has adapters at all, of whatever kind."""
        return next(probes(self.decoder), None) is not None

    def check_regular(self) -> None:
        """Raise unless all adapted layers agree on who is active."""
        self._probe = None
        agent = self.agent()
        for name, _, _, layer in tuner_layers(self.decoder):
            if read_agent(layer) != agent:
                raise UnsupportedAdapterError(
                    f"Adapted layers disagree on who is active: {name} runs {agent_label(read_agent(layer))}, others "
                    f"{agent_label(agent)}. Call set_adapter() on the whole model."
                )
            if isinstance(agent, Mixed):
                check_no_dora(name, layer, agent)
                continue
            check_order(name, layer, agent)

    def check_splittable(self, adapters: list[str] | Agent, scheme: str, keys: bool) -> None:
        """Raise unless values (and keys) of every layer split into base and LR for these adapters."""
        if not self.layers or self._twice is not None:
            reason = "has no attention module with k_proj, v_proj and layer_idx (a fused qkv projection, most likely)"
            if self._twice is not None:
                reason = (
                    f"has two attention modules for one layer ({self._twice}: trainable copies, or cross-attention)"
                )
            raise UnsupportedModelError(
                f"{type(self.decoder).__name__} {reason}, so scheme {scheme!r} cannot split its values. "
                "Use scheme='full_shared' or 'non_shared'."
            )
        for layer in self.layers.values():
            check_splittable(layer.v.name, layer.attention.v_proj, adapters)  # type: ignore[arg-type]
            if keys:
                check_splittable(layer.k.name, layer.attention.k_proj, adapters, key=True)  # type: ignore[arg-type]

    # --- around a forward ----------------------------------------------------------------------------------------------

    def enter(self, outer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pre-hook of the whole model: note its tokens and 2-D mask.

        One made for images or sound too gives its decoder embeddings and ready masks. Tokens say all only where it was
        called with nothing but text.
        """
        self.entered, self._inside = {}, True
        media = [
            name for name, value in kwargs.items() if name not in _TEXT and isinstance(value, Tensor | list | tuple)
        ]
        if not media and len(args) < 2:
            names = ("input_ids", "attention_mask")
            self.entered = {name: _compat.cache_argument(outer, args, kwargs, name) for name in names}

    def leave(self, outer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Post-hook of the whole model, called on failure too (then without output)."""
        self.entered, self._inside = {}, False
        if output is None:
            self._end_mixed_batch()
        self._mixed_hooks = []

    def before(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Decoder pre-hook: begin a forward with one of our caches, or stay out of the way.

        Returns:
            In static mode other arguments for the decoder, else ``None``.
        """
        self.settle()
        cache = _compat.cache_argument(decoder, args, kwargs, "cache")
        if not hasattr(cache, "begin"):
            return None
        inputs = {
            name: _compat.cache_argument(decoder, args, kwargs, name)
            for name in ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
        }
        if isinstance(inputs["inputs_embeds"], Tensor) and inputs["input_ids"] is None:
            ids = self.entered.get("input_ids")
            if ids is not None and ids.shape == inputs["inputs_embeds"].shape[:2]:
                inputs["input_ids"] = ids
                if getattr(inputs["attention_mask"], "ndim", 0) != 2:
                    inputs["attention_mask"] = self.entered["attention_mask"]
        keep = bool(kwargs.get("output_attentions") or getattr(decoder.config, "output_attentions", False))
        states = kwargs.get("output_hidden_states")
        states = getattr(decoder.config, "output_hidden_states", None) if states is None else states
        self._end_mixed_batch()  # of a call that was interrupted after the decoder: none other leaves any
        probe = self._prober()
        self._mixed_hooks = mixed_hooks(self.outer) if probe is not None and is_mixed_batch(probe) else []
        try:
            self.forward = cache.begin(
                self, keep_attention=keep, hidden_states=states is not None and states is not False, **inputs
            )
        except Exception:
            self._end_mixed_batch()
            raise
        if self.forward.static is not None:
            if not self.forward.keep_attention:
                self._switch_attention()
            return self.forward.static.enter(self.forward, args, kwargs)
        self.forward.open()
        if self.forward.splits:
            for layer in self.layers.values():
                if self.forward.keys is not None:
                    layer.split_keys()
                for site in layer.sites if self.forward.keys is not None else (layer.v,):
                    site.tap.place(site.hooked, self.forward.plan.agent)
        if not self.forward.keep_attention:
            self._switch_attention()
        return None if cache.static is None else cache.static.enter_other(self.forward, args, kwargs)

    def after(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Decoder post-hook, called on failure too (then without output): commit or undo."""
        forward, self.forward = self.forward, None
        if forward is None:
            return
        forward.close()
        if forward.cache.static is not None:
            forward.cache.static.leave(forward.cache)
        for config, name in self._switched:
            _compat.set_attn_implementation(config, name)
        self._switched.clear()
        unread = next((layer.name for layer in self.layers.values() if layer.reading is not None), None)
        for layer in self.layers.values():
            for site in layer.sites:
                site.tap.remove()
            layer.forget()
        if output is None:
            forward.undo()
            self._end_mixed_batch()
            return
        if unread is not None:
            forward.undo()
            self._end_mixed_batch()
            raise UnsupportedModelError(
                f"{unread} did not call the attention function it was given, so its adapters' values were not added. "
                "Make the cache with attention='keep'."
            )
        if not self._inside:
            self._mixed_hooks = []
        forward.commit()

    def _end_mixed_batch(self) -> None:
        """The forward failed: take off what PEFT would leave, or the next one would run these adapters again."""
        remove_hooks(self._mixed_hooks)
        self._mixed_hooks = []

    def settle(self) -> None:
        """Undo a forward that was interrupted by something torch calls no hook for (Ctrl-C)."""
        if self.forward is not None:
            self.after(self.decoder, (), {}, None)

    def resolve(self) -> bool:
        """Renew the hooks on projections that were replaced. Returns whether any was."""
        changed = [layer.resolve() for layer in self.layers.values()]
        if any(changed):
            self._probe = None
        return any(changed)

    def project(self, site: Site, x: Tensor, output: Tensor) -> Tensor | None:
        """Forward hook of a projection."""
        forward = self.forward
        return None if forward is None or forward.static is not None else forward.project(site, x, output)

    def can_switch_attention(self) -> bool:
        """Whether attention goes through transformers' registry and nothing in it needs the model's own function.

        Without a v_proj there is no LR to add, so there is nothing to switch for.
        """
        registry = bool(getattr(self.decoder, "_supports_attention_backend", False))
        if not self.layers or getattr(self.decoder.config, "model_type", None) in _OWN_SCORES:
            return False
        return registry and not any(hasattr(layer.attention, "sinks") for layer in self.layers.values())

    def _switch_attention(self) -> None:
        interface.register()
        configs = [self.decoder.config, *(getattr(layer.attention, "config", None) for layer in self.layers.values())]
        for config in {id(config): config for config in configs if config is not None}.values():
            self._switched.append((config, _compat.attn_implementation(config)))
            _compat.set_attn_implementation(config, interface.NAME)

    def detach(self) -> None:
        """Remove every hook, tap and mark."""
        self.settle()
        for handle in self._handles:
            handle.remove()
        for layer in self.layers.values():
            layer.detach()
        self.decoder.__dict__.pop(ATTRIBUTE, None)


def attach(model: nn.Module) -> ModelBinding:
    """Put the library's hooks on a model; again is a no-op. ``LoRASharedCache(model)`` does it by itself.

    Args:
        model: a ``PeftModel``, or a transformers decoder-only model with adapters (or none yet).

    Raises:
        UnsupportedModelError: no decoder is found, or the model is an encoder-decoder.
        UnsupportedAdapterError: prompt learning or X-LoRA, which change what a position is.
    """
    decoder = find_decoder(model)
    binding = decoder.__dict__.get(ATTRIBUTE)
    if binding is not None:
        return binding
    outer = model.get_base_model() if isinstance(model, PeftModel) else model
    return ModelBinding(decoder, outer)


def detach(model: nn.Module) -> None:
    """Take the library off a model: no hook and no variant is left. Caches made for it raise from then on."""
    binding = find_decoder(model).__dict__.get(ATTRIBUTE)
    if binding is not None:
        binding.detach()
