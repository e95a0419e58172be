"""The suites that need a process of their own; see ``APART`` in conftest.py. Each can also be run alone, by its folder."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.timeout(900)
def test_the_suites_apart_pass(suites_apart: Callable[[], tuple[int, str]], request: pytest.FixtureRequest) -> None:
    """They have run in the background since the session began; this waits for their end."""
    code, output = suites_apart()
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\napart:", output.strip().rpartition("\n")[2])
    assert code == 0, output[-10_000:]
