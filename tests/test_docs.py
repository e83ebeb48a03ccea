"""The documentation names all that is public, report.md is what the committed CSVs say, and links lead to what is there."""

import ast
import itertools
import json
import re
from pathlib import Path

import pytest

import lragent_hf
from lragent_hf import errors
from lragent_hf.bench.answers import ANSWERS, summary
from lragent_hf.bench.divergence import DIVERGENCE, prefill_table, table
from lragent_hf.bench.groups import group_rows
from lragent_hf.bench.record import read_rows
from lragent_hf.bench.report import as_markdown

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *DOCS.rglob("*.md"),
    *DOCS.rglob("*.ipynb"),
    *(ROOT / "examples").rglob("README.md"),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("module", [lragent_hf, errors])
def test_the_api_page_has_every_public_name_with_a_docstring(module: object) -> None:
    """Its two directives show a module's `__all__`; what has no docstring would be left out by mkdocstrings."""
    page = (DOCS / "api.md").read_text()
    assert f"::: {module.__name__}\n" in page + "\n"  # type: ignore[attr-defined]
    public = {name for name in vars(module) if not name.startswith("_")}
    listed = set(module.__all__)  # type: ignore[attr-defined]
    imported = {name for name in public if type(getattr(module, name)).__name__ == "module"}
    assert public - imported == listed
    for name in listed:
        thing = getattr(module, name)
        if isinstance(thing, type) or callable(thing):
            assert thing.__doc__, f"{name} has no docstring"


def test_constants_of_the_package_have_docstrings() -> None:
    """A string after the assignment, which is what mkdocstrings shows."""
    for name in lragent_hf.__all__:
        if name.isupper():
            assert any(_documented(path, name) for path in Path(lragent_hf.__file__).parent.glob("*.py")), name


def _documented(path: Path, name: str) -> bool:
    body = ast.parse(path.read_text()).body
    for node, after in itertools.pairwise(body):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    return False


def test_the_page_of_all_measurements_is_what_the_csvs_say() -> None:
    rows = [row for path in sorted((DOCS / "results").glob("*_cpu.csv")) for row in read_rows(path)]
    assert (DOCS / "results" / "report.md").read_text() == as_markdown(group_rows(rows)), (
        "python -m lragent_hf.bench report docs/results/*_cpu.csv --out docs/results"
    )


def test_the_page_of_fidelity_is_what_its_csvs_say() -> None:
    results = DOCS / "results"
    page = (results / "fidelity.md").read_text()
    rows = list(read_rows(results / "fidelity.csv", DIVERGENCE))
    parts = [[row for row in rows if (row["length"] == "0") == short] for short in (True, False)]
    tables = [*map(table, parts), prefill_table(list(read_rows(results / "fidelity_ttft.csv", DIVERGENCE)))]
    for one in tables:
        assert one in page, "write the tables anew: lragent_hf.bench.divergence"


def test_the_page_of_accuracy_is_what_its_csv_says() -> None:
    rows = list(read_rows(DOCS / "results" / "accuracy.csv", ANSWERS))
    assert summary(rows, costs=False) in (DOCS / "results" / "accuracy.md").read_text(), (
        "lragent_hf.bench.answers.summary"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    if page.suffix == ".ipynb":
        text = "\n".join(
            "".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"
        )
    for link in LINK.findall(text):
        if not link.startswith(("http://", "https://", "#")):
            assert (page.parent / link.partition("#")[0]).exists(), f"{page.name}: {link}"
