"""The rules of ``.ci/prose.py`` find the phrases that they describe, and ignore code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import import_program

SCRIPT = Path(__file__).parents[1] / ".ci" / "prose.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="an installed package has no .ci folder")


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    pytest.importorskip("proselint", reason="needs proselint: pip install 'vecenv[lint]'")
    with import_program(SCRIPT) as module:
        yield module


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("It starts one process an environment.\n", "rate"),
        ("Workers have a core each.\n", "each"),
        ("Nobody else can speak.\n", "persons"),
        ("It starts so many processes.\n", "quantity"),
        ("All else takes longer.\n", "else"),
        ("A crash takes the program along.\n", "along"),
        ("Do this:\n\n```sh\nls\n```\n\nlists the files.\n", "start"),
        ("It starts one process per environment, and that many workers.\n", None),
        ("Do this:\n\n```sh\nnobody a core each\n```\n\nThat lists `so many` files.\n", None),
    ],
)
def test_text_violates_only_the_given_rule(text: str, rule: str | None, script: Any) -> None:
    prose = script.prose(text)
    violated = [name for name, (pattern, _) in script.STYLE.items() if re.search(pattern, prose, re.IGNORECASE)]
    assert violated == ([] if rule is None else [rule])


def test_main_prints_findings_with_their_lines_and_returns_whether_there_are_any(
    tmp_path: Path, script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.md").write_text("# Title\n\nAll is well.\n\nNobody knows.\n")
    assert script.main([str(tmp_path / "page.md")]) == 1
    assert "page.md:5: vecenv.persons:" in capsys.readouterr().out
    (tmp_path / "page.md").write_text("# Title\n\nAll is well.\n")
    assert script.main([str(tmp_path / "page.md")]) == 0
