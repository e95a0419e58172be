"""Engines that nobody closed are collected without touching what belongs to others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from observe import PACKAGE

PROGRAM = Path(__file__).with_name("collected.py")


@pytest.mark.long
@pytest.mark.timeout(1300, method="signal")
@pytest.mark.parametrize(("count", "limit"), [(60, 90.0), pytest.param(1000, 1200.0, marks=pytest.mark.slow)])
def test_collected_engines_touch_nothing_of_others(count: int, limit: float) -> None:
    """Many unclosed engines, each part of a reference cycle, beside a thread that opens and closes all the time."""
    program = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(count)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
        start_new_session=True,
    )
    try:
        output, errors = program.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        pytest.fail(f"it did not end within {limit:g} s")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.communicate()
    assert program.returncode == 0, f"it hung, or failed:\n{errors[-3000:]}"
    found = json.loads(output.splitlines()[-1])
    print(found)
    assert found["rounds"] >= count
    assert not found["troubles"], found
    assert not found["complaints"], found
    assert not found["thread hangs"], found
    assert found["processes"] == 0, found
    assert found["descriptors"] <= 0, found
