"""Trajectories as what each agent learns from them: all tokens up to its last turn, and which of them are its own."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from .oracle import write_trajectory
from .questions import Question
from .script import AGENTS, Piece, encode, encode_opening

__all__ = ["Lesson", "lessons_of", "trajectories_of"]


@dataclass(frozen=True)
class Lesson:
    """What one agent sees of one trajectory.

    Attributes:
        ids: [1, L], up to its last token.
        at: [n], the positions whose next token is its own: what it is to predict.
    """

    ids: torch.Tensor
    at: torch.Tensor


def lessons_of(pieces: Sequence[Piece], tokenizer: PreTrainedTokenizerBase) -> dict[str, Lesson]:
    """A lesson for each agent that wrote something good in the trajectory."""
    ids: list[int] = []
    own: dict[str, list[int]] = {agent: [] for agent in AGENTS}
    for piece in pieces:
        new = (encode if ids else encode_opening)(tokenizer, piece.text)[0].tolist()
        if piece.agent and piece.good:
            own[piece.agent] += range(len(ids) - 1, len(ids) + len(new) - 1)
        ids += new
    whole = torch.tensor([ids])
    return {agent: Lesson(whole[:, : at[-1] + 2], torch.tensor(at)) for agent, at in own.items() if at}


def trajectories_of(questions: Sequence[Question], seed: int = 0) -> Iterator[list[Piece]]:
    """Trajectories without end: the questions in a new order each time round, each told anew.

    Raises:
        ValueError: a program finds its way through none of them.
    """
    draw = random.Random(seed)
    order = list(questions)
    while True:
        draw.shuffle(order)
        told = 0
        for question in order:
            pieces = write_trajectory(question, draw)
            if pieces is not None:
                told += 1
                yield pieces
        if not told:
            raise ValueError("None of these questions has facts from which a program can tell how to find the answer.")
