"""Agents on one model that is split over processes, a GPU each (or two CPU processes, to try it):

    torchrun --nproc-per-node 8 examples/tensor_parallel.py --model my-model --adapters my-agents

``my-agents`` holds a folder for each adapter, as ``train_agents.py`` leaves them.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from lragent_hf import CACHE_ARG, LoRASharedCache


def main() -> None:
    """Let every agent write a few tokens of one trajectory; print what each process keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder or a hub id")
    parser.add_argument("--adapters", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=16, help="that each agent writes")
    args = parser.parse_args()

    base = AutoModelForCausalLM.from_pretrained(args.model, distributed_config=DistributedConfig(tp_plan="auto"))
    folders = sorted(file.parent for file in args.adapters.glob("*/adapter_config.json"))
    model = PeftModel.from_pretrained(base, folders[0], adapter_name=folders[0].name)
    for folder in folders[1:]:
        model.load_adapter(str(folder), folder.name)
    model.eval()

    cache = LoRASharedCache(model)
    ids = torch.arange(1, 33, device=model.device)[None]
    for agent in [folder.name for folder in folders]:
        model.set_adapter(agent)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": args.tokens, "do_sample": False}
        ids = model.generate(ids, **options, **{CACHE_ARG: cache})
    if dist.get_rank() == 0:
        print(f"{cache}\nof each of {dist.get_world_size()} processes\n{cache.memory_report()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
