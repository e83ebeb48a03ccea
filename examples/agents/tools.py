"""The tools the agents call. They work offline, on the paragraphs that come with a question."""

from __future__ import annotations

import re
from difflib import SequenceMatcher, get_close_matches

from .questions import Paragraph, Question

__all__ = ["TOOLS", "Toolbox", "plain_title", "tool_named"]

TOOLS = ("Retrieve", "Lookup", "Reflect", "Finish")
LENGTH = 3  # sentences that Retrieve shows


def tool_named(text: str) -> str | None:
    """The tool that a text names first, in any case; None if it names none."""
    found = re.search("|".join(TOOLS), text, re.IGNORECASE)
    return found[0].capitalize() if found else None


def plain_title(title: str) -> str:
    """A title as one would say it: without what stands in brackets after it."""
    return re.sub(r"\s*\([^)]*\)$", "", title).strip() or title


class Toolbox:
    """Retrieve and Lookup over one question's paragraphs.

    The page that Retrieve found last stays open, and Lookup reads on in it.
    """

    def __init__(self, question: Question) -> None:
        self.pages = {paragraph.title: paragraph for paragraph in question.context}
        self._names = {plain_title(title).lower(): title for title in reversed(self.pages)}
        self._names |= {title.lower(): title for title in self.pages}  # a title itself names no other page
        self._open: Paragraph | None = None
        self._read = 0

    def use(self, tool: str, argument: str) -> str:
        """What the tool `Retrieve` or `Lookup` answers."""
        return self.retrieve(argument) if tool == "Retrieve" else self.lookup(argument)

    def retrieve(self, title: str) -> str:
        """The first sentences under the title that is closest, or the titles that are a little like it."""
        page = self.find(title)
        if page is None:
            like = sorted(self.pages, key=lambda known: -_likeness(title, known))[:3]
            return (
                f"There is nothing about {title!r}. Titles there are: {'; '.join(like)}."
                if like
                else "There is nothing."
            )
        self._open, self._read = page, min(LENGTH, len(page.sentences))
        return f"[{page.title}] {' '.join(filter(None, page.sentences[: self._read]))}"

    def lookup(self, keyword: str) -> str:
        """The next sentence with the keyword in the page that is open."""
        if self._open is None:
            return "No page is open: Retrieve one first."
        for number in range(self._read, len(self._open.sentences)):
            if keyword.lower() in self._open.sentences[number].lower():
                self._read = number + 1
                return f"[{self._open.title}] {self._open.sentences[number]}"
        return f"Nothing more about {keyword!r} in {self._open.title}."

    def find(self, title: str) -> Paragraph | None:
        """The paragraph of that title: exactly, without the brackets, else the closest that is close."""
        wanted = title.strip().strip("\"'.").lower()
        if not wanted:
            return None
        if wanted not in self._names:
            close = get_close_matches(wanted, self._names, n=1, cutoff=0.75)
            part = [name for name in self._names if wanted in name.split() or (wanted in name and len(wanted) > 4)]
            if not close and not part:
                return None
            wanted = close[0] if close else min(part, key=len)
        return self.pages[self._names[wanted]]


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one.lower(), other.lower()).ratio()
