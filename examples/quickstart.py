"""Three LoRA agents take turns on one trajectory, under five cache schemes: `make demo`.

The agents plan, act and reflect answer a multi-hop question; what act searches for comes back as paragraphs of text.
The `non_shared` run writes the trajectory. The other schemes then replay exactly its tokens, so that at every
generated position their next-token distributions can be compared with those of `non_shared`.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from peft import PeftModel
from tqdm import tqdm
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase

from agents import AGENTS, Library, add_agents, load_question
from lragent_hf import CACHE_ARG, LoRASharedCache
from smollm2 import load

SCHEMES = ("non_shared", "full_shared", "base_shared", "base_lr_shared", "base_lr_stacked")
CUES = {
    "plan": "Plan: what do we have to find out next? One sentence.",
    "act": "Act: name what to search for. A few words.",
    "reflect": "Reflect: what do we know so far, and what is the answer? One sentence.",
}


@dataclass
class Turn:
    """One agent's turn: what it was given, what it wrote, and what that took."""

    agent: str
    prompt: torch.Tensor  # [1, L]: the whole trajectory up to this turn
    written: torch.Tensor  # [1, T]
    logits: torch.Tensor  # [T, vocab], float32, before any processing
    reused: int
    prefilled: int
    first_token_s: float
    tokens_per_s: float
    seconds: float


@dataclass
class Run:
    """One scheme's way through the trajectory."""

    scheme: str
    cache: LoRASharedCache
    turns: list[Turn] = field(default_factory=list)


class Probe(LogitsProcessor):
    """Sees the logits of every step. Notes the time, and in a replay makes the recorded token the only choice."""

    def __init__(
        self, tokens: torch.Tensor | None, received: Callable[[], int], on_token: Callable[[], object]
    ) -> None:
        self.tokens, self.received, self.on_token = tokens, received, on_token
        self.times: list[float] = []
        self.prefilled = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self.times:
            self.prefilled = self.received()
        step = len(self.times)
        self.times.append(perf_counter())
        self.on_token()
        if self.tokens is None:
            return scores
        only = torch.full_like(scores, float("-inf"))
        only[:, self.tokens[0, step]] = 0.0
        return only


class Demo:
    """The agents and a counter of the tokens that their model really reads."""

    def __init__(self, model: PeftModel, tokenizer: PreTrainedTokenizerBase, new_tokens: int, progress: Any) -> None:
        self.model, self.tokenizer, self.new_tokens, self.progress = model, tokenizer, new_tokens, progress
        self.received = 0
        model.get_input_embeddings().register_forward_pre_hook(self._count)

    def _count(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self.received += args[0].numel()

    def encode(self, text: str) -> torch.Tensor:
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        return ids.to(self.model.device)

    def decode(self, ids: torch.Tensor) -> str:
        return str(self.tokenizer.decode(ids[0], skip_special_tokens=True))

    def take_turn(
        self, cache: LoRASharedCache, agent: str, prompt: torch.Tensor, replay: torch.Tensor | None = None
    ) -> Turn:
        self.model.set_adapter(agent)
        reused, before = cache.get_seq_length(), self.received
        probe = Probe(replay, lambda: self.received - before, self.progress.update)
        start = perf_counter()
        out = self.model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            **{CACHE_ARG: cache},
            logits_processor=LogitsProcessorList([probe]),
            max_new_tokens=self.new_tokens,
            do_sample=False,
            repetition_penalty=1.1,
            output_logits=True,
            return_dict_in_generate=True,
        )
        seconds = perf_counter() - start
        self.progress.update(self.new_tokens - len(probe.times))  # the turn may have ended early
        decoding = probe.times[-1] - probe.times[0]
        return Turn(
            agent=agent,
            prompt=prompt,
            written=out.sequences[:, prompt.shape[1] :],
            logits=torch.cat(out.logits).float(),
            reused=reused,
            prefilled=probe.prefilled,
            first_token_s=probe.times[0] - start,
            tokens_per_s=(len(probe.times) - 1) / decoding if decoding else float("nan"),
            seconds=seconds,
        )

    def write(self, question: dict[str, Any], rounds: int) -> Run:
        """Let the agents work on `question` with a cache of their own each: the trajectory to compare with."""
        run = Run("non_shared", LoRASharedCache(self.model, scheme="non_shared"))
        library = Library(question["context"])
        news = f"Three agents answer a question together: plan, act and reflect.\nQuestion: {question['question']}"
        ids = self.encode("")
        for agent in AGENTS * rounds:
            message = user_message(self.tokenizer, f"{news}\n{CUES[agent]}".strip(), first=not run.turns)
            ids = torch.cat([ids, self.encode(message)], dim=1)
            turn = self.take_turn(run.cache, agent, ids)
            run.turns.append(turn)
            ended = turn.written[0, -1] == self.tokenizer.eos_token_id  # the next message brings this token too
            ids = torch.cat([ids, turn.written[:, :-1] if ended else turn.written], dim=1)
            news = ""
            if agent == "act":
                query = f"{self.decode(turn.written)} {question['question']}"
                news = f"Found:\n{library.search(query)}"
        return run

    def replay(self, scheme: str, recorded: Run) -> Run:
        """Take the recorded turns again, token for token, under another scheme."""
        run = Run(scheme, LoRASharedCache(self.model, scheme=scheme))
        for then in recorded.turns:
            turn = self.take_turn(run.cache, then.agent, then.prompt, replay=then.written)
            assert torch.equal(turn.written, then.written)
            run.turns.append(turn)
        return run


def user_message(tokenizer: PreTrainedTokenizerBase, text: str, first: bool) -> str:
    """`text` as the user's next message, with what the chat format puts around it up to the model's answer."""
    if tokenizer.chat_template is None:
        return f"\n\n{text}\n\n"
    earlier, mark = [], "ANSWER-SO-FAR"
    if not first:
        earlier = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]
    chat = [*earlier, {"role": "user", "content": text}]
    whole = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    return whole if first else whole.partition(mark)[2]


def agreement(run: Run, reference: Run) -> tuple[float, float]:
    """Share of generated positions with the same most likely token, and mean KL(reference || run) in nats."""
    same, kl, count = 0.0, 0.0, 0
    for turn, ref in zip(run.turns, reference.turns, strict=True):
        log_p, log_q = ref.logits.log_softmax(-1), turn.logits.log_softmax(-1)
        same += (ref.logits.argmax(-1) == turn.logits.argmax(-1)).sum().item()
        kl += (log_p.exp() * (log_p - log_q)).sum().item()
        count += len(ref.logits)
    return same / count, kl / count


def texts(run: Run, decode: Callable[[torch.Tensor], str]) -> str:
    lines = ["\nWhat the agents wrote (a very small model, adapters drawn at random: fluent, seldom right):"]
    lines += [f"  {t.agent:<8}{textwrap.shorten(decode(t.written), 96, placeholder=' ...')}" for t in run.turns]
    return "\n".join(lines)


def timings(run: Run) -> str:
    lines = [f"\n{run.scheme}\n  turn  agent    reused  prefilled  first token  tokens/s"]
    for number, t in enumerate(run.turns, 1):
        timing = f"{t.first_token_s:>11.3f} s{t.tokens_per_s:>10.1f}"
        lines.append(f"  {number:>4}  {t.agent:<8}{t.reused:>7}{t.prefilled:>11}{timing}")
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
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--question", type=int, default=0, help="which of questions.json (default 0)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of plan, act, reflect (default 3: nine turns)")
    parser.add_argument("--new-tokens", type=int, default=24, help="at most so many tokens a turn (default 24)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    base, tokenizer = load(args.model)
    model = add_agents(base.to(args.device))
    question = load_question(args.question)
    print(f"Question: {question['question']}\nAnswer:   {question['answer']}")

    total = len(SCHEMES) * args.rounds * len(AGENTS) * args.new_tokens
    runs: list[Run] = []
    with tqdm(total=total, unit=" tokens", leave=False, disable=None) as progress:
        demo = Demo(model, tokenizer, args.new_tokens, progress)
        with torch.inference_mode():
            model(demo.encode("The first pass through a model is slower; this one is not measured. " * 8))
        for scheme in SCHEMES:
            progress.set_description(scheme)
            runs.append(demo.replay(scheme, runs[0]) if runs else demo.write(question, args.rounds))
            if len(runs) == 1:
                progress.write(texts(runs[0], demo.decode))
            progress.write(timings(runs[-1]))
    print_table(runs)
    print(f"\n{runs[-1].cache}")


if __name__ == "__main__":
    main()
