"""The loop: plan thinks and chooses a tool, act gives its input, the tool answers, reflect looks back, until Finish."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase

from lragent_hf import CACHE_ARG, AgentTrajectory

from .questions import Question
from .script import CUES, Piece, encode, encode_opening, opening, turn_ends
from .tools import TOOLS, Toolbox, tool_named

__all__ = ["LIMITS", "MAX_TURNS", "Crew", "Episode", "Turn"]

MAX_TURNS = 45  # the paper's (section 5.1)
LIMITS = {"thought": 40, "tool": 5, "input": 32, "reflection": 192}  # new tokens a turn


@dataclass(frozen=True)
class Turn:
    """One agent's turn: what it was given, what it wrote, and what that took.

    Attributes:
        prompt: [1, L], the whole trajectory up to this turn, its cue included.
        written: [1, T], its own tokens; the last ends the turn.
        logits: [T, vocab] in fp32, if they were asked for.
        reused: tokens of the prompt that it found cached.
        prefilled: tokens that went through the model before its first new one.
        first_token_s, seconds: until its first token, and for the turn.
    """

    agent: str
    prompt: torch.Tensor
    written: torch.Tensor
    logits: torch.Tensor | None
    reused: int
    first_token_s: float
    seconds: float

    @property
    def prefilled(self) -> int:
        return int(self.prompt.shape[1]) - self.reused


@dataclass
class Episode:
    """One question on its way to an answer.

    Attributes:
        turns_left: how many more there may be.
        answer: what Finish was given; None where no turn was left for it.
        text: the trajectory, all of it.
        ids: [1, L], its tokens.
    """

    question: Question
    turns_left: int = MAX_TURNS
    turns: list[Turn] = field(default_factory=list)
    answer: str | None = None
    pieces: list[Piece] = field(default_factory=list)
    ids: torch.Tensor = field(default_factory=lambda: torch.empty(1, 0, dtype=torch.long))

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def trajectory(self) -> AgentTrajectory:
        """What happened, for ``lragent_hf.audit``: up to the last token that an agent wrote, and which are theirs."""
        written = torch.zeros(self.ids.shape[1], dtype=torch.bool)
        turns: list[tuple[str | None, int]] = []
        for turn in self.turns:
            start, stop = turn.prompt.shape[1], turn.prompt.shape[1] + turn.written.shape[1]
            turns.append((turn.agent, stop))
            # A model's own end of text is another token by now, and not the agent's.
            written[start:stop] = self.ids[0, start:stop].cpu() == turn.written[0].cpu()
        return AgentTrajectory(self.ids[0].cpu(), turns, written)


class Crew:
    """The agents: a model with the adapters plan, act and reflect, and its tokenizer.

    Args:
        model: a ``PeftModel`` in eval mode.
        new_tokens: no turn writes more, whatever `LIMITS` says.
        keep_logits: keep the logits of every turn in it.
    """

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, new_tokens: int | None = None, keep_logits: bool = False
    ) -> None:
        self.model, self.tokenizer, self.new_tokens, self.keep_logits = model, tokenizer, new_tokens, keep_logits
        eos = model.generation_config.eos_token_id
        self._special = set(eos if isinstance(eos, list) else [eos]) - {None}
        self._ends = turn_ends(tokenizer, sorted(self._special))
        self._stop = encode(tokenizer, "\n")

    def answer(self, question: Question, cache: Any, max_turns: int = MAX_TURNS) -> Episode:
        """Go round until Finish, or until no turn is left. Every turn is `set_adapter` and `generate` on one cache."""
        episode, toolbox = Episode(question, turns_left=max_turns), Toolbox(question)
        self._put(episode, opening(question).text)
        with suppress(_OutOfTurns):
            while episode.answer is None:
                self._write(episode, cache, "plan", "thought")
                tool = tool_named(self._write(episode, cache, "plan", "tool"))
                if tool == "Reflect":
                    self._write(episode, cache, "reflect", "reflection")
                elif tool == "Finish":
                    episode.answer = self._write(episode, cache, "act", "input")
                elif tool:
                    found = toolbox.use(tool, self._write(episode, cache, "act", "input"))
                    self._put(episode, f"Found: {found}\n")
                else:
                    self._put(episode, f"Found: there is no such tool. Tools: {', '.join(TOOLS)}.\n")
        return episode

    def take_turn(
        self, cache: Any, agent: str, prompt: torch.Tensor, limit: int = 64, forced: torch.Tensor | None = None
    ) -> Turn:
        """One agent's turn.

        Args:
            prompt: [1, L], the whole trajectory; the cache knows what of it the agent need not read.
            limit: new tokens at most.
            forced: [1, T], tokens to write whatever the model thinks: a recorded turn again.
        """
        self.model.set_adapter(agent)
        reused = cache.get_seq_length()
        probe = _Probe(forced)
        _wait(prompt.device)
        begin = perf_counter()
        out = self.model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            **{CACHE_ARG: cache},
            logits_processor=LogitsProcessorList([probe]),
            max_new_tokens=min(limit, self.new_tokens or limit) if forced is None else forced.shape[1],
            do_sample=False,
            # The model's own habits of sampling are no part of this: copying a name is not to be punished.
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            temperature=None,
            top_p=None,
            top_k=None,
            eos_token_id=self._ends,
            pad_token_id=self._ends[0],
            output_logits=self.keep_logits,
            return_dict_in_generate=True,
        )
        _wait(prompt.device)
        seconds = perf_counter() - begin
        kept = torch.cat(out.logits).float() if self.keep_logits else None
        written = out.sequences[:, prompt.shape[1] :]
        return Turn(agent, prompt, written, kept, reused, probe.first - begin, seconds)

    def _write(self, episode: Episode, cache: Any, agent: str, what: str) -> str:
        """A cue, and what the agent writes after it: one line."""
        if not episode.turns_left:
            raise _OutOfTurns
        episode.turns_left -= 1
        self._put(episode, CUES[what])
        turn = self.take_turn(cache, agent, episode.ids, LIMITS[what])
        written = turn.written
        if int(written[0, -1]) in self._special:  # the model's own end: a line break in its place, it is not cached yet
            written = torch.cat([written[:, :-1], self._stop.to(written.device)], dim=1)
        text = str(self.tokenizer.decode(written[0]))
        episode.turns.append(turn)
        episode.ids = torch.cat([episode.ids, written], dim=1)
        episode.pieces.append(Piece(text, agent))
        if not text.endswith("\n"):  # it ran to its limit
            self._put(episode, "\n")
        return text.strip()

    def _put(self, episode: Episode, text: str) -> None:
        new = (encode if episode.pieces else encode_opening)(self.tokenizer, text)
        episode.ids = torch.cat([episode.ids.to(self.model.device), new.to(self.model.device)], dim=1)
        episode.pieces.append(Piece(text))


class _OutOfTurns(Exception):
    """There is no turn left."""


class _Probe(LogitsProcessor):
    """Notes when the first token is there, and in a replay makes the recorded token the only choice."""

    def __init__(self, forced: torch.Tensor | None) -> None:
        self.forced, self.step, self.first = forced, 0, float("nan")

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self.step:
            _wait(scores.device)
            self.first = perf_counter()
        if self.forced is not None:
            only = torch.full_like(scores, float("-inf"))
            only[:, self.forced[0, self.step]] = 0.0
            scores = only
        self.step += 1
        return scores


def _wait(device: torch.device) -> None:
    """Until the device has done what it was given: a clock would stop too early."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
