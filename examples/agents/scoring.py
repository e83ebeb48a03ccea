"""Exact match and F1 as HotpotQA scores them: lower case, no punctuation, no articles."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from .questions import Question

__all__ = ["exact_match", "f1", "normalise", "score"]


def normalise(answer: str) -> str:
    """The words that count."""
    bare = answer.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def exact_match(answer: str, truth: str) -> float:
    """1 or 0."""
    return float(normalise(answer) == normalise(truth))


def f1(answer: str, truth: str) -> float:
    """Harmonic mean of precision and recall over words. Yes, no and "noanswer" are right or wrong as a whole."""
    ours, theirs = normalise(answer), normalise(truth)
    if {ours, theirs} & {"yes", "no", "noanswer"}:
        return float(ours == theirs)
    mine, right = ours.split(), theirs.split()
    common = sum((Counter(mine) & Counter(right)).values())
    return 2 * common / (len(mine) + len(right)) if common else 0.0


def score(answer: str | None, question: Question) -> tuple[float, float]:
    """(exact match, F1). No answer scores 0; of a question with choices the letter counts."""
    if answer is None:
        return 0.0, 0.0
    if question.choices:
        right = float(_letter(answer, question.choices) == question.answer)
        return right, right
    return exact_match(answer, question.answer), f1(answer, question.answer)


def _letter(answer: str, choices: Sequence[str]) -> str | None:
    """Which choice an answer means: by its letter in brackets, by its letter alone, or by its words."""
    letters = [chr(65 + number) for number in range(len(choices))]
    for pattern in (rf"\(([{letters[0]}-{letters[-1]}])\)", rf"^\W*([{letters[0]}-{letters[-1]}])\b(?!\s+\w)"):
        if found := re.search(pattern, answer):
            return found[1]
    said = [letter for letter, choice in zip(letters, choices, strict=True) if normalise(choice) == normalise(answer)]
    return said[0] if len(said) == 1 else None
