"""Train the adapters plan, act and reflect on trajectories that a program writes.

    python examples/train_agents.py --out my-adapters                  # SmolLM2-135M, invented questions, shared A
    python examples/train_agents.py --out mine --data hotpotqa --a separate --modules all-linear --model <hub id>

One step: every agent reads the same trajectories, each with its own adapter, and learns to write what is its own in them.
What is interrupted goes on when the same command is given again. Needs the extras `examples` and `plot`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from matplotlib.figure import Figure
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from tqdm import tqdm

from agents import AGENTS, held_out, load_questions
from agents.adapters import new_agents
from agents.lessons import Lesson, lessons_of, trajectories_of
from lragent_hf import share_lora_A
from smollm2 import HUB_ID, load

QV = ["q_proj", "v_proj"]


class Training:
    """The adapters as they are being trained, and how far that is."""

    def __init__(self, model: Any, accelerator: Any, steps: int, rate: float) -> None:
        self.accelerator, self.steps = accelerator, steps
        self.weights = [weight for name, weight in model.named_parameters() if "lora_" in name]
        optimizer = torch.optim.AdamW(self.weights, lr=rate, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        self.model, self.optimizer, self.schedule = accelerator.prepare(model, optimizer, schedule)
        self.losses: list[dict[str, float]] = []
        self.seconds = 0.0

    def _rate(self, step: int) -> float:
        """Up in a twentieth of the way, then down half a cosine to a tenth."""
        warm = max(1, self.steps // 20)
        return min(1.0, (step + 1) / warm) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / self.steps)))

    def step(self, batch: list[dict[str, Lesson]]) -> None:
        """One update of all adapters."""
        begin = time.time()
        losses = {}
        for agent in AGENTS:
            mine = [lessons[agent] for lessons in batch if agent in lessons]
            self.choose(agent)
            total = 0.0
            for lesson in mine:
                loss = self.loss(lesson) / len(mine)
                self.accelerator.backward(loss)
                total += loss.item()
            losses[agent] = total
        for weight in self.weights:  # choosing one agent freezes the others' weights, their gradients stay
            weight.requires_grad_(True)
        self.accelerator.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.losses.append(losses)
        self.seconds += time.time() - begin

    def choose(self, agent: str) -> None:
        self.accelerator.unwrap_model(self.model).set_adapter(agent)

    def loss(self, lesson: Lesson) -> torch.Tensor:
        """Mean cross-entropy of the agent's own tokens, nats. Logits are made for these alone."""
        ids, at = (tensor.to(self.accelerator.device) for tensor in (lesson.ids, lesson.at))
        logits = self.model(input_ids=ids, logits_to_keep=at, use_cache=False).logits[0].float()
        return F.cross_entropy(logits, ids[0, at + 1])

    @torch.inference_mode()
    def test(self, batch: list[dict[str, Lesson]]) -> dict[str, float]:
        """Loss on trajectories that are not trained on."""
        self.model.eval()
        found = {}
        for agent in AGENTS:
            self.choose(agent)
            losses = [self.loss(lessons[agent]).item() for lessons in batch if agent in lessons]
            found[agent] = sum(losses) / max(1, len(losses))
        self.model.train()
        return found

    def save(self, folder: Path, settings: dict[str, Any]) -> None:
        """All that is needed to go on, written aside and renamed: an interruption leaves the last one whole."""
        state = {
            "settings": settings,
            "seconds": self.seconds,
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "weights": [weight.detach().cpu() for weight in self.weights],
            "losses": self.losses,
        }
        aside = folder / "checkpoint.new"
        torch.save(state, aside)
        aside.replace(folder / "checkpoint.pt")

    def resume(self, folder: Path, settings: dict[str, Any]) -> None:
        """Go on from a checkpoint, if there is one.

        Raises:
            SystemExit: it is of other settings.
        """
        path = folder / "checkpoint.pt"
        if not path.is_file():
            return
        state = torch.load(path, map_location="cpu")
        other = sorted(name for name in settings if settings[name] != state["settings"].get(name))
        if other:
            raise SystemExit(
                f"{path} was begun with other settings ({', '.join(other)}): give these, or another --out."
            )
        self.seconds = state["seconds"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        for weight, saved in zip(self.weights, state["weights"], strict=True):
            weight.data.copy_(saved)
        self.losses = state["losses"]


def save_adapters(model: Any, folder: Path, base_name: str) -> None:
    """Plain PEFT folders plan, act, reflect, in bf16 and naming the base model as others know it."""
    for agent in AGENTS:
        model.peft_config[agent].base_model_name_or_path = base_name
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else None
    model.save_pretrained(str(folder))
    card.unlink(missing_ok=True)  # PEFT's template, or what it made of a card that was there
    if text is not None:
        card.write_text(text, encoding="utf-8")
    for agent in AGENTS:
        path = folder / agent / "adapter_model.safetensors"
        save_file(
            {name: weight.bfloat16() for name, weight in load_file(path).items()}, path, metadata={"format": "pt"}
        )


def plot(losses: list[dict[str, float]], path: Path) -> None:
    """The loss of each agent against the step, smoothed over ten steps."""
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for agent in AGENTS:
        values = [step[agent] for step in losses]
        smooth = [sum(values[max(0, i - 9) : i + 1]) / len(values[max(0, i - 9) : i + 1]) for i in range(len(values))]
        axes.plot(range(1, len(smooth) + 1), smooth, label=agent)
    axes.set(xlabel="step", ylabel="loss, nats a token", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=150)


def _is_done(folder: Path, settings: dict[str, Any]) -> bool:
    path = folder / "training.json"
    return path.is_file() and json.loads(path.read_text(encoding="utf-8"))["settings"] == settings


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the adapters plan, act and reflect.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the adapters; to go on, the same again")
    parser.add_argument("--model", help="hub id or local path (default: the packaged SmolLM2-135M-Instruct)")
    parser.add_argument("--data", default="worlds", help="worlds (invented), hotpotqa:train (hub), or a JSONL file")
    parser.add_argument("--limit", type=int, default=4000, help="questions at most")
    parser.add_argument("--hold-out", type=float, default=0.2, help="share of a data set's questions never trained on")
    parser.add_argument("--modules", nargs="+", default=QV, help="q_proj v_proj (default), or all-linear")
    parser.add_argument(
        "--a", choices=("tied", "separate"), default="tied", help="A of v_proj (and k_proj): one, or three"
    )
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch", type=int, default=2, help="trajectories a step")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the base model")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    if _is_done(args.out, settings):
        raise SystemExit(f"{args.out} holds adapters trained with these settings. Give another --out to train again.")
    torch.manual_seed(args.seed)
    accelerator = Accelerator()
    if accelerator.num_processes > 1:
        raise SystemExit("The agents take turns on one model: start one process (accelerate places it on its device).")
    base, tokenizer = load(args.model, dtype=getattr(torch, args.dtype))
    modules = "all-linear" if args.modules == ["all-linear"] else args.modules
    model = new_agents(base, modules, args.rank)
    shared = [name for name in ("v_proj", "k_proj") if modules == "all-linear" or name in modules]
    if args.a == "tied":
        share_lora_A(model, AGENTS, modules=shared)
    training = Training(model.train(), accelerator, args.steps, args.rate)
    args.out.mkdir(parents=True, exist_ok=True)
    training.resume(args.out, settings)

    questions = load_questions(args.data, limit=args.limit, seed=args.seed)
    unseen = [question for question in questions if held_out(question, args.hold_out)]
    questions = [question for question in questions if not held_out(question, args.hold_out)]
    learnt = len(training.losses) * args.batch  # before an interruption
    told = itertools.islice(trajectories_of(questions, args.seed), learnt, None)
    with tqdm(total=args.steps, initial=len(training.losses), unit="step", disable=None) as progress:
        while len(training.losses) < args.steps:
            training.step([lessons_of(pieces, tokenizer) for pieces in itertools.islice(told, args.batch)])
            progress.update()
            progress.set_postfix({agent: f"{loss:.2f}" for agent, loss in training.losses[-1].items()})
            if len(training.losses) % 10 == 0:
                training.save(args.out, settings)
                if progress.disable:  # no terminal: a line now and then
                    print(f"step {len(training.losses)}/{args.steps}: {training.losses[-1]}", flush=True)
    if args.data == "worlds" or not unseen:
        unseen = load_questions("worlds", limit=40, seed=args.seed + 1)
    lessons = [lessons_of(pieces, tokenizer) for pieces in itertools.islice(trajectories_of(unseen), 20)]
    last = training.losses[-20:]
    result = {
        "steps": args.steps, "trajectories": args.steps * args.batch, "seconds": round(training.seconds),
        "loss": {agent: sum(step[agent] for step in last) / len(last) for agent in AGENTS},
        "loss_held_out": training.test(lessons),
        "settings": settings,
    }  # fmt: skip
    save_adapters(accelerator.unwrap_model(training.model), args.out, args.model or HUB_ID)
    (args.out / "training.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    plot(training.losses, args.out / "loss.png")
    (args.out / "checkpoint.pt").unlink(missing_ok=True)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
