"""Every architecture that transformers has: right, or refused by name. docs/models.md says which."""

from typing import Any

import pytest
import transformers
from zoo.checks import KINDS, Verdict, examine
from zoo.configs import architectures
from zoo.table import PAGE, page, read, row

VERSION, ROWS = read()
NAMES = architectures()
SAME = transformers.__version__ == VERSION

# Transformers' own modules warn of their own deprecations.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def check(name: str, verdict: Verdict) -> None:
    assert verdict.kind in KINDS
    assert verdict.kind == "works" or verdict.reason
    if SAME and "needs " not in ROWS.get(name, ""):  # a package that may be here or not
        assert ROWS.get(name) == row(name, verdict), "write the table anew: see tests/zoo/table.py"


@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_is_right_or_refused(name: str) -> None:
    check(name, examine(name, thorough=False, keys=SAME))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_so_it_is_under_every_scheme(name: str) -> None:
    check(name, examine(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_so_it_is_with_the_attention_that_the_model_takes_by_default(name: str) -> None:
    verdict = examine(name, attention=None, keys=False)
    if SAME and "needs " not in ROWS[name]:
        assert ROWS[name].split(" | ")[2] == verdict.kind


def test_the_page_is_of_a_version_that_is_tested_or_says_so() -> None:
    if not SAME:
        pytest.skip(f"docs/models.md is of transformers {VERSION}, this is {transformers.__version__}")
    assert list(ROWS) == NAMES
    kinds = {name: Verdict(ROWS[name].split(" | ")[2]) for name in NAMES}
    head: Any = page(kinds).split("| model type")[0]
    assert PAGE.read_text().split("| model type")[0] == head
    count = sum(verdict.kind in ("works", "keep") for verdict in kinds.values())
    keys = sum(line.endswith("| yes |") for line in ROWS.values())
    readme = PAGE.parents[1].joinpath("README.md").read_text()
    assert f"{count} of the {len(NAMES)} architectures" in readme
    assert f"{keys} of the {count} architectures" in readme
