"""Questions with their paragraphs: HotpotQA and ScienceQA, from the hub, from a JSONL file, or invented (worlds.py)."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Paragraph", "Question", "held_out", "load_questions", "question_from"]

HUB = {
    "hotpotqa": ("hotpotqa/hotpot_qa", "distractor", "validation"),
    "scienceqa": ("derek-thomas/ScienceQA", None, "test"),
}
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class Paragraph:
    """A title and the sentences under it."""

    title: str
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """One question, its answer, and all that the tools may find.

    Attributes:
        level: HotpotQA's easy, medium, hard; of ScienceQA grades 1-4, 5-8, 9-12.
        kind: bridge or comparison; ScienceQA's topic.
        facts: (title, number of the sentence) of what the answer rests on; empty where nobody has said.
        choices: ScienceQA's options; the answer is one of their letters then.
    """

    question: str
    answer: str
    context: tuple[Paragraph, ...]
    facts: tuple[tuple[str, int], ...] = ()
    level: str = ""
    kind: str = ""
    choices: tuple[str, ...] = ()


def load_questions(source: str, *, limit: int | None = None, seed: int = 0) -> list[Question]:
    """Read questions.

    Args:
        source: ``hotpotqa`` or ``scienceqa`` (downloaded through `datasets`; HotpotQA's validation, which is all hard, and
            ScienceQA's test split, unless another is named: ``hotpotqa:train``), ``worlds`` (invented), or the path of a
            JSONL or JSON file with HotpotQA's or ScienceQA's fields.
        limit: this many at most, drawn with `seed` (all of them, in order, without it).

    Raises:
        FileNotFoundError: no such file.
        ValueError: a record without the fields of either data set; says which.
    """
    if source == "worlds":
        from .worlds import invent

        return list(invent(limit or 1000, seed))
    name, _, split = source.partition(":")
    questions = list(_from_hub(name, split) if name in HUB else _from_file(Path(source)))
    if limit is not None and limit < len(questions):
        questions = random.Random(seed).sample(questions, limit)
    return questions


def held_out(question: Question, share: float = 0.2) -> bool:
    """Whether this question is for testing. By a hash of its words: the same on every machine and in every order."""
    words = " ".join(re.findall(r"\w+", question.question.lower()))
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big") < share * 2**64


def question_from(record: dict[str, Any]) -> Question:
    """A record with the fields of HotpotQA (hub or original file) or of ScienceQA (hub, or AutoAct's test files).

    Raises:
        ValueError: neither; says what is missing.
    """
    if "supporting_facts" in record or "context" in record:
        return _hotpotqa(record)
    if "choices" in record:
        return _scienceqa(record)
    raise ValueError(
        "A record has neither HotpotQA's fields (question, answer, context, supporting_facts) nor ScienceQA's (question, "
        f"choices, answer): it has {sorted(record)}."
    )


def _hotpotqa(record: dict[str, Any]) -> Question:
    missing = [name for name in ("question", "answer", "context") if name not in record]
    if missing:
        raise ValueError(f"A HotpotQA record lacks {missing}; it has {sorted(record)}.")
    context, facts = record["context"], record.get("supporting_facts", [])
    if isinstance(context, dict):  # the hub stores columns where the original file stores pairs
        context = zip(context["title"], context["sentences"], strict=True)
        facts = zip(facts["title"], facts["sent_id"], strict=True)
    return Question(
        question=str(record["question"]).strip(),
        answer=str(record["answer"]).strip(),
        context=tuple(Paragraph(title, tuple(s.strip() for s in sentences)) for title, sentences in context),
        facts=tuple((title, int(number)) for title, number in facts),
        level=str(record.get("level", "")),
        kind=str(record.get("type", "")),
    )


def _scienceqa(record: dict[str, Any]) -> Question:
    choices = tuple(str(choice) for choice in record["choices"])
    options = " ".join(f"({chr(65 + i)}) {choice}" for i, choice in enumerate(choices))
    metadata = record.get("metadata", record)
    if "Question" in record:  # AutoAct's files: the options are in the question, the answer is a letter
        question, answer = str(record["Question"]).partition("\nOptions:")[0], str(record["Answer"])
    else:
        question, answer = str(record["question"]), chr(65 + int(record["answer"]))
    found = {"Hint": record.get("hint"), "Lecture": record.get("lecture"), "Picture": record.get("caption")}
    return Question(
        question=f"{question.strip()} {options}",
        answer=answer,
        context=tuple(
            Paragraph(title, tuple(_SENTENCE.split(" ".join(str(text).split()))))
            for title, text in found.items()
            if text and text != "no img"
        ),
        level=_band(metadata.get("grade", "")),
        kind=str(metadata.get("topic", "")),
        choices=choices,
    )


def _band(grade: object) -> str:
    """The paper's levels: grades 1-4, 5-8 and 9-12."""
    digits = re.sub(r"\D", "", str(grade))
    return "" if not digits else "1-4" if int(digits) <= 4 else "5-8" if int(digits) <= 8 else "9-12"


def _from_hub(name: str, split: str) -> Iterator[Question]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(f"{name} comes through `datasets`: pip install '.[agents]', or give a JSONL file.") from error
    path, config, usual = HUB[name]
    for record in load_dataset(path, config, split=split or usual):
        if record.get("image") is None:  # what ScienceQA asks about a picture cannot be answered without it
            yield question_from(record)


def _from_file(path: Path) -> Iterator[Question]:
    if not path.is_file():
        raise FileNotFoundError(
            f"No questions at {path}: give {', '.join(HUB)}, worlds, or a JSONL file of either's fields."
        )
    with path.open(encoding="utf-8") as file:
        if file.read(1) == "[":
            file.seek(0)
            yield from map(question_from, json.load(file))
            return
        file.seek(0)
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield question_from(json.loads(line))
                except ValueError as error:  # JSONDecodeError is one
                    raise ValueError(f"{path}, line {number}: {error}") from error
