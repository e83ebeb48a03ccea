"""What a trajectory looks like: pieces of text, each written by an agent or put there by the loop or a tool.

Whoever writes a piece ends it with a line break. Pieces are turned into tokens one by one, so that a trajectory that is
generated and one that is trained on are cut into the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from .questions import Question

__all__ = ["AGENTS", "CUES", "Piece", "encode", "encode_opening", "opening", "turn_ends"]

AGENTS = ("plan", "act", "reflect")
CUES = {"thought": "Thought:", "tool": "Tool:", "input": "Input:", "reflection": "Reflection:"}
_HEAD = "Three agents answer a question: plan, act, reflect. Tools: Retrieve, Lookup, Reflect, Finish.\n"


@dataclass(frozen=True)
class Piece:
    """A part of a trajectory.

    Attributes:
        text: as it stands in the trajectory, line break included.
        agent: who wrote it; None for the question, a cue, or what a tool found.
        good: whether one should learn to write it. A wrong turn is read, not imitated.
    """

    text: str
    agent: str | None = None
    good: bool = True


def opening(question: Question) -> Piece:
    """What stands before the first turn."""
    asked = " Answer with a letter." if question.choices else ""
    return Piece(f"{_HEAD}Question: {question.question}{asked}\n")


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """Tokens [1, L] of one piece, nothing added."""
    ids: torch.Tensor = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return ids.long()


def encode_opening(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """Tokens [1, L] of the first piece: with the token that begins a text, where this tokenizer puts one."""
    begins = [token for token in tokenizer("")["input_ids"] if token == tokenizer.bos_token_id]
    return torch.cat([torch.tensor([begins], dtype=torch.long), encode(tokenizer, text)], dim=1)


def turn_ends(tokenizer: PreTrainedTokenizerBase, special: Sequence[int] = ()) -> list[int]:
    """All tokens that hold a line break, and `special`: an agent's turn is over with any of them."""
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    return sorted({token for token, text in enumerate(texts) if "\n" in text} | set(special))
