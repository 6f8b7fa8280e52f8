"""The table of cases names tests that exist, and names all that are here."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
NAMED = re.findall(r"`((?:\w+/)?test_\w+\.py)::(test_\w+)`", (HERE / "README.md").read_text())


def test_the_table_names_tests_that_exist() -> None:
    for file, name in NAMED:
        path = HERE.parent / file if "/" in file else HERE / file
        assert f"def {name}(" in path.read_text(), f"{file}::{name}"


def test_every_case_is_in_the_table() -> None:
    here = {
        name
        for path in HERE.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    here -= set(re.findall(r"^def (test_\w+)", Path(__file__).read_text(), re.M))
    assert here <= {name for _, name in NAMED}
