"""The suites that need a process of their own; see ``APART`` in conftest.py. Each can also be run alone, by its folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.timeout(900)
@pytest.mark.parametrize("suite", ["backends", "jax"])
def test_a_suite_passes_in_a_process_of_its_own(suite: str, request: pytest.FixtureRequest) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / suite)]
    run = subprocess.run(
        command, cwd=HERE.parent, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=880, check=False
    )
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{suite}: {run.stdout.strip().splitlines()[-1] if run.stdout.strip() else run.stderr[-500:]}")
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
