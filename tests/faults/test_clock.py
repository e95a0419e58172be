"""Clocks jump: row 49 of the table in ``FAULTS.md``."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from observe import CHEAP, FAULTS
from vandals import Ledger, crew

import vecenv
from vecenv.errors import StepTimeout

pytestmark = FAULTS

SOURCES = sorted(Path(vecenv.__file__).parent.rglob("*.py"))


SHOWN = {"errors": {"datetime.now"}, "file": {"datetime.now"}}  # to people: when something failed; nothing waits for it
SETTABLE = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow"}


def settable_clocks(tree: ast.Module) -> set[str]:
    """Uses of a clock that somebody can set."""
    used = {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    imported = {
        f"{node.module}.{name.name}" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names
    }
    return SETTABLE & (used | imported)


def test_the_search_finds_what_it_looks_for() -> None:
    """So that the next test means something."""
    assert settable_clocks(ast.parse("import time\ntime.monotonic(); time.time()")) == {"time.time"}
    assert settable_clocks(ast.parse("from time import time_ns")) == {"time.time_ns"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_only_monotonic_clocks(path: Path) -> None:
    """Nothing waits by a clock that can be set."""
    assert settable_clocks(ast.parse(path.read_text())) == SHOWN.get(path.stem, set())


@pytest.mark.long
@CHEAP
def test_a_jump_of_the_clock_changes_no_timeout(launch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour forwards, a day back: neither ends a wait early, nor keeps it for ever."""
    envs = launch(crew(2, delay=0.3))
    ledger = Ledger.of(envs)
    for jump in (3600.0, -86400.0):
        real = time.time  # noqa: TID251 - it is what jumps
        monkeypatch.setattr(time, "time", lambda real=real, jump=jump: real() + jump)
        envs.step_async([1, 1])
        begun = time.monotonic()
        with pytest.raises(StepTimeout):
            envs.step_wait(timeout=0.1)
        assert 0.09 < time.monotonic() - begun < 60
        ledger.step([1, 1], envs.step_wait(timeout=60))
