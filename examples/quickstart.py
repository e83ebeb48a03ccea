"""Three LoRA agents take turns on one trajectory, under five cache schemes: `make demo`.

The agents plan, act and reflect answer a question that takes two steps; what act asks for comes back as paragraphs of text.
The `non_shared` run writes the trajectory. The other schemes then replay exactly its tokens, so that at every generated
position their next-token distributions can be compared with those of `non_shared`.
"""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import torch

from agents import AGENTS, Crew, Episode, Turn, add_agents, load_agents, load_questions
from lragent_hf import LoRASharedCache
from smollm2 import load

SCHEMES = ("non_shared", "full_shared", "base_shared", "base_lr_shared", "base_lr_stacked")
QUESTIONS = Path(__file__).with_name("questions.json")


@dataclass
class Run:
    """One scheme's way through the trajectory."""

    scheme: str
    cache: LoRASharedCache
    turns: list[Turn] = field(default_factory=list)


def replay(crew: Crew, scheme: str, recorded: Run) -> Run:
    """Take the recorded turns again, token for token, under another scheme."""
    run = Run(scheme, LoRASharedCache(crew.model, scheme=scheme))
    for then in recorded.turns:
        run.turns.append(crew.take_turn(run.cache, then.agent, then.prompt, forced=then.written))
        assert torch.equal(run.turns[-1].written, then.written)
    return run


def agreement(run: Run, reference: Run) -> tuple[float, float]:
    """Share of generated positions with the same most likely token, and mean KL(reference || run) in nats."""
    same, kl, count = 0.0, 0.0, 0
    for turn, ref in zip(run.turns, reference.turns, strict=True):
        assert turn.logits is not None
        assert ref.logits is not None
        log_p, log_q = ref.logits.log_softmax(-1), turn.logits.log_softmax(-1)
        same += (ref.logits.argmax(-1) == turn.logits.argmax(-1)).sum().item()
        kl += (log_p.exp() * (log_p - log_q)).sum().item()
        count += len(ref.logits)
    return same / count, kl / count


def trajectory(episode: Episode) -> str:
    """What there is to read, a line each: who wrote it, and what the tools found."""
    lines, cue = ["\nWhat the agents wrote:"], ""
    for piece in episode.pieces[1:]:
        if piece.agent:
            lines.append(f"  {piece.agent:<8}{textwrap.shorten(f'{cue}{piece.text}', 100, placeholder=' ...')}")
        elif piece.text.startswith("Found"):
            lines.append(f"  {'':<8}{textwrap.shorten(piece.text, 100, placeholder=' ...')}")
        cue = piece.text
    return "\n".join(lines)


def timings(run: Run) -> str:
    lines = [f"\n{run.scheme}\n  turn  agent    reused  prefilled  first token  tokens/s"]
    for number, turn in enumerate(run.turns, 1):
        decoded, seconds = turn.written.shape[1] - 1, turn.seconds - turn.first_token_s
        timing = f"{turn.first_token_s:>11.3f} s{decoded / seconds if decoded else float('nan'):>10.1f}"
        lines.append(f"  {number:>4}  {turn.agent:<8}{turn.reused:>7}{turn.prefilled:>11}{timing}")
    return "\n".join(lines)


def print_table(runs: list[Run]) -> None:
    print(f"\n{'scheme':<17}{'cache':>10}{'saved':>8}{'prefilled':>11}{'time':>9}{'agreement':>11}{'KL':>9}")
    whole = runs[0].cache.memory_report().in_use_bytes
    for run in runs:
        used = run.cache.memory_report().in_use_bytes
        prefilled = sum(turn.prefilled for turn in run.turns)
        seconds = sum(turn.seconds for turn in run.turns)
        same, kl = agreement(run, runs[0])
        print(
            f"{run.scheme:<17}{used / 2**20:>6.1f} MiB{1 - used / whole:>8.0%}{prefilled:>11}{seconds:>7.1f} s"
            f"{same:>11.1%}{kl:>9.4f}"
        )
    print(
        "\ncache: bytes in use after the last turn; saved: against non_shared. prefilled: tokens that went through the"
        "\nmodel before a turn's first new token, summed. time: all turns together. The schemes replay the tokens that"
        "\nnon_shared wrote; agreement: generated positions where both find the same token most likely; KL: of"
        "\nnon_shared's next-token distribution to the scheme's, mean in nats a token."
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Five cache schemes for three LoRA agents on one trajectory.")
    parser.add_argument("--model", help="hub id or local path (default: the packaged SmolLM2-135M-Instruct)")
    parser.add_argument("--adapters", help="folder with plan, act and reflect (default: those of SmolLM2; else random)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--question", type=int, default=0, help="which of questions.json (default 0)")
    parser.add_argument("--max-turns", type=int, default=18, help="at most so many turns (default 18)")
    parser.add_argument("--new-tokens", type=int, help="at most so many tokens a turn")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    base, tokenizer = load(args.model)
    base.to(args.device)
    trained = args.adapters or not args.model
    model = (load_agents(base, args.adapters) if args.adapters else load_agents(base)) if trained else add_agents(base)
    crew = Crew(model, tokenizer, args.new_tokens, keep_logits=True)
    question = load_questions(str(QUESTIONS))[args.question]
    print(f"Question: {question.question}\nAnswer:   {question.answer}")
    if not trained:
        print(f"The adapters {', '.join(AGENTS)} are drawn at random: what they write makes no sense.")

    with torch.inference_mode():  # the first pass through a model is slower: it is not measured
        model(torch.ones(1, 64, dtype=torch.long, device=args.device))
    runs = [Run("non_shared", LoRASharedCache(model, scheme="non_shared"))]
    episode = crew.answer(question, runs[0].cache, args.max_turns)
    runs[0].turns = episode.turns
    print(
        f"{trajectory(episode)}\n  {'':<8}The answer given: {episode.answer or 'none'}\n{timings(runs[0])}", flush=True
    )
    for scheme in SCHEMES[1:]:
        runs.append(replay(crew, scheme, runs[0]))
        print(timings(runs[-1]), flush=True)
    print_table(runs)
    print(f"\n{runs[-1].cache}")


if __name__ == "__main__":
    main()
