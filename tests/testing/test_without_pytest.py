"""Tests of ``vecenv.testing`` without pytest, which only the mixin needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import run_python

WITHOUT_LIBRARY_PROGRAM = Path(__file__).parents[1] / "without.py"
ASSERTIONS_PROGRAM = """
from vecenv.testing import assert_identical, assert_isolated, assert_restorable, assert_same_trajectory
import sys
assert "pytest" not in sys.modules
assert_identical(1, 2)
"""


@pytest.mark.parametrize(
    ("program", "last_line"),
    [
        (ASSERTIONS_PROGRAM, "AssertionError: value: 1, expected 2"),
        (
            "from vecenv.testing import VectorEnvContract",
            "ImportError: vecenv.testing.VectorEnvContract needs pytest, not installed here: pip install pytest",
        ),
    ],
)
def test_import_without_pytest_works_or_names_the_install_command(program: str, last_line: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(program)
    done = run_python(WITHOUT_LIBRARY_PROGRAM, "pytest", script)
    assert done.stderr.splitlines()[-1] == last_line
