"""``docs/generated/capabilities.md`` shows what the backends say; ``python docs/capabilities_table.py`` writes it anew."""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from vecenv.front.capabilities import Capabilities

SCRIPT = Path(__file__).parents[1] / "docs" / "capabilities_table.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="an installed package has no docs folder")


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("capabilities_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    pytest.importorskip("jaxlib", reason="the column of JAX needs it")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_what_the_backends_say(script: Any) -> None:
    _, shown, _ = script.in_page(script.PAGE.read_text())
    assert shown == script.table(), "run python docs/capabilities_table.py"


def test_every_capability_has_its_row(script: Any) -> None:
    told = {field.name for field in fields(Capabilities)} - {"backend", "runs_jax"}
    assert told == set(script.CALLS.values()) - {None}
