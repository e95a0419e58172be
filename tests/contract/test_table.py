"""The table in ``docs/generated/calls.md`` names the calls and the backends of the contract."""

from __future__ import annotations

from pathlib import Path

from . import table, test_guards, test_resets, test_steps  # noqa: F401 - importing the tests registers their calls
from .backends import BACKENDS
from .calls import CALLS

PAGE = Path(__file__).parents[2] / "docs" / "generated" / "calls.md"


def test_page_and_contract_have_the_same_calls_and_backends() -> None:
    calls, backends = table.read_headings(PAGE.read_text())
    assert calls == list(CALLS.values())
    assert backends == [backend.name for backend in BACKENDS]


def test_replacing_the_table_by_itself_does_not_change_the_page(tmp_path: Path) -> None:
    page = tmp_path / "calls.md"
    page.write_text(PAGE.read_text())
    table_lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and line.count("|") > 9]
    table.replace_table(page, "\n".join(table_lines))
    assert page.read_text() == PAGE.read_text()
