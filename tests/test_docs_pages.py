"""Pages that name what the library says or has: every exception, every quoted message, every scheme."""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lragent_hf import SCHEMES, errors

ROOT = Path(__file__).parents[1]
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = re.compile(r"^- \*\*`(.+?)`\*\*", re.MULTILINE)
HOLE = "\0"  # what an f-string puts in, `{}` of str.format, `%s` of a logger; `...` on the page


def texts(node: ast.expr) -> Iterator[str]:
    """What a string expression can read, holes as they are; both ways where `a if condition else b` chooses a word."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield re.sub(r"\.\.\.|\{\}|%[sd]|%\.\d+f", HOLE, node.value)
    elif isinstance(node, ast.IfExp) and {type(node.body), type(node.orelse)} == {ast.Constant}:
        yield from (text for part in (node.body, node.orelse) for text in texts(part))
    elif isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.FormattedValue) else part for part in node.values)
        yield from map("".join, itertools.product(*(list(texts(part)) for part in parts)))
    else:
        yield HOLE


class Strings(ast.NodeVisitor):
    """Collects every string of a module, f-strings in one piece, without the hole that it begins with."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def visit_Constant(self, node: ast.Constant | ast.JoinedStr) -> None:
        self.found.update(text.lstrip(HOLE + " ") for text in texts(node))

    visit_JoinedStr = visit_Constant  # and not its parts, which begin in the middle of a message


def messages() -> set[str]:
    """Every string of the library."""
    strings = Strings()
    for path in (ROOT / "lragent_hf").rglob("*.py"):
        strings.visit(ast.parse(path.read_text()))
    return strings.found


def raised(folder: Path) -> Iterator[str]:
    """What the library raises, as far as it begins with words; benchmarks apart, which are commands."""
    for path in (path for path in folder.rglob("*.py") if "bench" not in path.parts):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Raise)
                and isinstance(node.exc, ast.Call)
                and ast.unparse(node.exc.func)[0].isupper()
            ):
                choice = node.exc.args[0]
                for said in (choice.body, choice.orelse) if isinstance(choice, ast.IfExp) else (choice,):
                    yield from (text for one in texts(said) if (text := one.lstrip(HOLE + " ")) and text[0].isalpha())


MESSAGES = messages()


def test_every_exception_has_a_heading() -> None:
    headings = re.findall(r"^## `(\w+)`", TROUBLESHOOTING, re.MULTILINE)
    assert set(errors.__all__) <= set(headings)


@pytest.mark.parametrize("quoted", sorted(set(QUOTED.findall(TROUBLESHOOTING))))
def test_a_quoted_message_is_in_the_library(quoted: str) -> None:
    beginning = quoted.replace("...", HOLE)
    beginning = beginning.lstrip(HOLE + " ").rstrip(HOLE + " ")
    assert beginning, quoted
    assert any(message.startswith(beginning) for message in MESSAGES), (
        f"No message of the library begins with {quoted!r}: it was changed, or is quoted wrongly, in troubleshooting.md."
    )


RAISED = list(raised(ROOT / "lragent_hf"))


def test_every_message_is_quoted() -> None:
    """But those that begin with what a variable holds (the reasons, each quoted by itself), and what no user can meet."""
    beginnings = [
        quoted.replace("...", HOLE).lstrip(HOLE + " ").rstrip(HOLE + " ") for quoted in QUOTED.findall(TROUBLESHOOTING)
    ]
    missing = [message for message in RAISED if not any(message.startswith(beginning) for beginning in beginnings)]
    assert missing == [f"positions {HOLE} to {HOLE} were asked of a buffer that holds none"]
    assert len(RAISED) > 100


def test_a_changed_message_would_be_noticed() -> None:
    assert len(QUOTED.findall(TROUBLESHOOTING)) > 100
    source = """f"{where} has {len(x)} rows" " and ..."; f"{'Keys' if key else 'Values'} of {x}" """
    strings = Strings()
    strings.visit(ast.parse(source))
    assert strings.found == {f"has {HOLE} rows and {HOLE}", f"Keys of {HOLE}", f"Values of {HOLE}"}


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_has_a_section(name: str) -> None:
    page = (ROOT / "docs" / "schemes.md").read_text()
    assert re.search(rf"^#+ `{name}`", page, re.MULTILINE)
