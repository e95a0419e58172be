"""A test of ``FAULTS.md``: each row names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE / "FAULTS.md"
ROW = re.compile(r"^\| (\d+)? ?\|(.*)\|(.*)\|(.*)\|(.*)\|$", re.MULTILINE)


def find_tests() -> set[str]:
    """Return the names of the test functions in all folders."""
    return {
        name
        for path in HERE.parent.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }


def test_every_row_names_existing_tests() -> None:
    """All 49 rows have the behaviour of Gymnasium and of vecenv, and the names of existing tests."""
    rows = ROW.findall(PAGE.read_text())
    assert sorted(int(number) for number, *_ in rows if number) == list(range(1, 50))
    tests = find_tests()
    for number, *cells in rows:
        assert all(cell.strip() for cell in cells), f"row {number} has an empty cell"
        names = re.findall(r"`(test_\w+)", cells[-1])
        assert names, f"row {number} names no test"
        assert set(names) <= tests, f"row {number} names tests that do not exist: {set(names) - tests}"
