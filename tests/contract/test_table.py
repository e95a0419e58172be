"""The table in ``docs/architecture.md`` names the calls and the backends that there are."""

from __future__ import annotations

from pathlib import Path

from . import table, test_guards, test_resets, test_state, test_steps  # noqa: F401 - the calls are listed as they are imported
from .backends import BACKENDS
from .calls import CALLS

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def test_the_page_and_the_contract_name_the_same_calls_and_backends() -> None:
    calls, backends = table.read(PAGE.read_text())
    assert calls == list(CALLS.values())
    assert backends == [backend.name for backend in BACKENDS]
