"""Triton kernels for attention over a decomposed cache. Importing this package imports triton; the library does not."""

from .ops import flash_lora_attention, unsupported

__all__ = ["flash_lora_attention", "unsupported"]
