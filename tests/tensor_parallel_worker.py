"""One process of a model that is split over several: ``torchrun tensor_parallel_worker.py FOLDER`` writes a file there.

The same conversations run on the split model and on a whole one; what is compared is each against the whole one's logits.
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from tiny import AGENTS, SCHEMES, turn, write
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from lragent_hf import AgentTrajectory, LoRASharedCache, audit

TURNS = (("plan", 12), ("act", 20), ("reflect", 24), ("plan", 30), ("plan", 31), (None, 33))


def load(folder: Path, adapters: str, split: bool) -> PeftModel:
    """The base model with the three adapters of one kind; split, or a whole one in each process."""
    options = {"distributed_config": DistributedConfig(tp_plan="auto")} if split else {}
    base = AutoModelForCausalLM.from_pretrained(folder / "base", **options)
    model = PeftModel.from_pretrained(base, folder / adapters / "plan", adapter_name="plan")
    for name in AGENTS[1:]:
        model.load_adapter(str(folder / adapters / name), name)
    return model.eval()


def talk(model: PeftModel, cache: LoRASharedCache, ids: Tensor, mask: Tensor | None = None) -> list[Tensor]:
    return [
        turn(model, cache, agent, ids[:, :stop], mask if mask is None else mask[:, :stop])[:, -1]
        for agent, stop in TURNS
    ]


def conversations(folder: Path, rank: int) -> Iterator[tuple[str, str, Callable[[PeftModel], Any]]]:
    """Name, kind of adapters, and what is run on either model."""
    ids = torch.randint(1, 97, (3, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    for scheme in SCHEMES:
        yield scheme, "qkvo", lambda model, scheme=scheme: talk(model, LoRASharedCache(model, scheme), ids[:1])
        yield (
            f"{scheme}, padded", "qv",
            lambda model, scheme=scheme: talk(model, LoRASharedCache(model, scheme), ids, mask),
        )  # fmt: skip
    yield "window", "qkvo", lambda model: talk(model, LoRASharedCache(model, handover_window=7), ids[:1])
    yield "keep", "qkvo", lambda model: talk(model, LoRASharedCache(model, attention="keep"), ids[:1])
    yield "in place", "qkvo", lambda model: talk(model, LoRASharedCache(model, key_working_copy=False), ids[:1])
    yield (
        "droidspeak", "qv",
        lambda model: talk(model, LoRASharedCache(model, "droidspeak", recompute_layers=[1], hidden_cache=True), ids[:1]),
    )  # fmt: skip

    def branch(model: PeftModel) -> list[Tensor]:
        cache = LoRASharedCache(model)
        turn(model, cache, "plan", ids[:1, :20])
        rows = torch.cat([ids[:1, :20].expand(3, -1), ids[:, 20:30]], 1)
        written = write(model, rows, 6, cache.branch(AGENTS), adapter_names=list(AGENTS))
        return [written.float(), turn(model, cache.fork(), "act", rows[:1])]

    def saved(model: PeftModel) -> list[Tensor]:
        cache = LoRASharedCache(model)
        turn(model, cache, "plan", ids[:1, :20])
        whole = type(model.get_base_model().model.layers[0].self_attn.v_proj.base_layer.weight) is torch.nn.Parameter
        path = folder / f"saved-{'whole' if whole else 'split'}-{rank}"
        cache.save(path)
        return [turn(model, LoRASharedCache.load(model, path), "act", ids[:1])]

    def audited(model: PeftModel) -> list[Tensor]:
        trajectory = AgentTrajectory(ids[0], [(agent, stop) for agent, stop in TURNS[:4] if agent])
        return [torch.tensor([row.kl for row in audit(model, [trajectory], layers=False).rows])]

    yield "branch", "qv", branch
    yield "saved", "qkvo", saved
    yield "audit", "qv", audited


def main() -> None:
    warnings.simplefilter("ignore")
    folder, found = Path(sys.argv[1]), {}
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    models = {kind: [load(folder, kind, split) for split in (True, False)] for kind in ("qv", "qkvo")}
    for name, kind, action in conversations(folder, rank):
        got, want = (action(model) for model in models[kind])
        found[name] = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))
    bytes_of = []
    for model in models["qv"]:
        cache = LoRASharedCache(model)
        talk(model, cache, torch.arange(1, 41)[None])
        bytes_of.append({row.part: row.in_use_bytes for row in cache.memory_report().rows})
    (folder / f"found-{rank}.json").write_text(json.dumps({"errors": found, "bytes": bytes_of}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
