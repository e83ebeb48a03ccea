"""Trajectories that a program writes, from a question and the facts that its answer rests on: data to train on.

They are right by construction and carry no model's words. Some take a wrong turn first, which an agent reads but does not
learn to take, and reflect on it.
"""

from __future__ import annotations

import random
import re

from .questions import Paragraph, Question
from .script import CUES, Piece, opening
from .tools import LENGTH, Toolbox, plain_title

__all__ = ["write_trajectory"]

_START = (
    "I start with {}.",
    "The question names {}. I read about it first.",
    "First I need to know more about {}.",
    "I should look at the page about {}.",
    "To answer this I first need {}.",
)
_NEXT = (
    "That leads to {}, which I read next.",
    "The text names {}. Now I need that page.",
    "So the next step is {}.",
    "Now I need to know about {}.",
)
_AS_WELL = ("Now the same for {}.", "I also need the page about {}.", "The other one is {}.")
_READ_ON = (
    "The page goes on. I look for {}.",
    "I need the sentence about {}.",
    "There may be more about {} on this page.",
)
_LOST = ("That does not help. I look back.", "This is not what I need. I think again.", "That was the wrong page.")
_CHECK = ("I have both facts. I check them.", "That should be enough. I go over it.", "Now I put the facts together.")
_SAY = ("The answer is clear.", "I can answer now.", "Nothing is missing. I answer.")
_WORDS = 26


def write_trajectory(question: Question, draw: random.Random, wrong_turns: float = 0.25) -> list[Piece] | None:
    """One trajectory from the question to its answer.

    Args:
        question: with its facts.
        draw: chooses words and wrong turns: one question gives many trajectories.
        wrong_turns: how many of the trajectories take a wrong turn.

    Returns:
        The pieces; None where a program cannot tell how one would have found the way: a page whose title stands neither in
        the question nor in what was read, or a fact in none of the paragraphs.
    """
    pages = {paragraph.title: paragraph for paragraph in question.context}
    hops = _in_order(question, pages)
    if hops is None:
        return None
    story = _Story(question, draw)
    wrong = draw.randrange(len(hops)) if draw.random() < wrong_turns else None
    for index, (title, numbers) in enumerate(hops):
        if index == wrong:
            story.go_wrong(hops, title)
        lines = _START if not index else _AS_WELL if _mentions(question.question, title) else _NEXT
        if not story.read(title, draw.choice(lines)):
            return None
        for number in numbers:
            if number >= LENGTH and not story.read_on(pages[title], number):
                return None
    facts = [pages[title].sentences[number] for title, numbers in hops for number in numbers]
    facts = [fact for fact in facts if question.answer in fact or fact in facts[:3]][:4]
    story.think(draw.choice(_CHECK), "Reflect")
    story.reflect(f"{' '.join(_clip(fact, question.answer) for fact in facts)} So the answer is {question.answer}.")
    story.think(draw.choice(_SAY), "Finish")
    story.put(CUES["input"])
    story.write("act", question.answer)
    return story.pieces


class _Story:
    """The pieces so far, and the tools as they stand."""

    def __init__(self, question: Question, draw: random.Random) -> None:
        self.question, self.draw, self.toolbox = question, draw, Toolbox(question)
        self.pieces = [opening(question)]

    def put(self, text: str) -> None:
        self.pieces.append(Piece(text))

    def write(self, agent: str, text: str, good: bool = True) -> None:
        self.pieces.append(Piece(f" {text}\n", agent, good))

    def think(self, thought: str, tool: str, good: bool = True) -> None:
        self.put(CUES["thought"])
        self.write("plan", thought, good)
        self.put(CUES["tool"])
        self.write("plan", tool)

    def call(self, tool: str, argument: str, good: bool = True) -> str:
        self.put(CUES["input"])
        self.write("act", argument, good)
        found = self.toolbox.use(tool, argument)
        self.put(f"Found: {found}\n")
        return found

    def reflect(self, text: str) -> None:
        self.put(CUES["reflection"])
        self.write("reflect", text)

    def read(self, title: str, thought: str) -> bool:
        """Retrieve a page. False where its plain title finds another."""
        name = plain_title(title)
        found = self.toolbox.find(name)
        name = name if found is not None and found.title == title else title
        self.think(thought.format(name), "Retrieve")
        return self.call("Retrieve", name).startswith(f"[{title}]")

    def read_on(self, page: Paragraph, number: int) -> bool:
        """Lookup a sentence by a word that the question has too. False where no word leads there."""
        sentence = page.sentences[number]
        unread = page.sentences[LENGTH:number]
        words = [word for word in re.findall(r"\w{4,}", sentence) if word.lower() in self.question.question.lower()]
        words = [word for word in words if not any(word.lower() in earlier.lower() for earlier in unread)]
        if not words:
            return False
        self.think(self.draw.choice(_READ_ON).format(words[0]), "Lookup")
        return self.call("Lookup", words[0]).endswith(sentence)

    def go_wrong(self, hops: list[tuple[str, list[int]]], title: str) -> None:
        """Open a page that does not help, if there is one, and say so."""
        others = [page.title for page in self.question.context if page.title not in dict(hops)]
        others = [
            other for other in others if (found := self.toolbox.find(plain_title(other))) and found.title == other
        ]
        if not others:
            return
        other = self.draw.choice(others)
        self.think(self.draw.choice(_START).format(plain_title(other)), "Retrieve", good=False)
        self.call("Retrieve", plain_title(other), good=False)
        self.think(self.draw.choice(_LOST), "Reflect")
        self.reflect(f"{plain_title(other)} has nothing to do with it. What is needed is {plain_title(title)}.")


def _in_order(question: Question, pages: dict[str, Paragraph]) -> list[tuple[str, list[int]]] | None:
    """The pages to read, each named by the question or by one before it, with the numbers of their sentences that count."""
    wanted: dict[str, list[int]] = {}
    for title, number in question.facts:
        if title not in pages or number >= len(pages[title].sentences):
            return None
        wanted.setdefault(title, []).append(number)
    text, hops = question.question, []
    while wanted:
        named = [title for title in wanted if _mentions(text, title)]
        if not named:
            return None
        title = named[0]
        hops.append((title, sorted(wanted.pop(title))))
        shown = pages[title].sentences[:LENGTH] + tuple(pages[title].sentences[number] for number in hops[-1][1])
        text += " " + " ".join(shown)
    return hops or None


def _mentions(text: str, title: str) -> bool:
    return plain_title(title).lower() in text.lower()


def _clip(sentence: str, answer: str) -> str:
    """The sentence, or of a long one the part with the answer in it."""
    words = sentence.split()
    if len(words) <= _WORDS:
        return sentence
    before = sentence.lower().partition(answer.lower())[0] if answer.lower() in sentence.lower() else ""
    start = max(0, len(before.split()) + len(answer.split()) + 2 - _WORDS)
    return " ".join(words[start : start + _WORDS])
