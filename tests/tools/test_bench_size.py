"""``python -m bench size``: what counts as a line of code, and the table of the whole package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import size

SOURCE = '''"""A docstring
of two lines."""

# a comment
TEXT = """two lines
of code"""


class Odd:
    """What it is."""

    value = 1  # code, and a comment

    def method(self):
        """What it does."""

        return [

            self.value,
        ]
'''


def test_docstrings_comments_and_blanks_are_no_code() -> None:
    assert size.code_lines(SOURCE) == len(["TEXT", "of code", "class", "value", "def", "return", "self.value", "]"])


def test_everything_is_counted(tmp_path: Path) -> None:
    for folder in ("vecenv", "tests", "docs", "bench"):
        (tmp_path / folder).mkdir()
    (tmp_path / "vecenv" / "one.py").write_text("class A: ...\nclass Flight: ...\n# nobody asks\n" + "x = 1\n" * 800)
    (tmp_path / "vecenv" / "two.py").write_text("class A: ...\ndef long():\n" + "    x = 1\n" * 60)
    (tmp_path / "tests" / "test_a.py").write_text("a = 1\n\n")
    (tmp_path / "docs" / "a.md").write_text("three words here\n")
    assert list(size.measure(tmp_path).values()) == [2 + 800 + 1 + 61, 2, 1, 1, 1, 3, 1, 1, 1, 0]


@pytest.mark.parametrize("as_json", [False, True])
def test_the_table_has_a_line_for_each(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    size.show(as_json=as_json)
    out = capsys.readouterr().out
    names = list(json.loads(out)) if as_json else [line[:38].rstrip() for line in out.splitlines()]
    assert "code lines in vecenv/" in names
    assert len(names) == 10
