"""The table in ``docs/generated/capabilities.md`` is up to date and lists all capabilities."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from programs import import_program

from vecenv.front.capabilities import Capabilities

SCRIPT = Path(__file__).parents[1] / "docs" / "capabilities_table.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="an installed package has no docs folder")


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    pytest.importorskip("jaxlib", reason="the JAX column needs jaxlib")
    with import_program(SCRIPT) as module:
        yield module


def test_page_shows_the_capabilities_of_the_backends(script: Any) -> None:
    _, table, _ = script.in_page(script.PAGE.read_text())
    assert table == script.table(), "run python docs/capabilities_table.py"


def test_every_capability_has_a_row(script: Any) -> None:
    documented = {field.name for field in fields(Capabilities)} - {"backend", "runs_jax"}
    assert documented == set(script.CALLS.values()) - {None}
