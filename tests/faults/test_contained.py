"""Containers: a program that is process 1, and one that has no ``/proc``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from observe import CHEAP, FAULTS

pytestmark = [*FAULTS, pytest.mark.linux, pytest.mark.long]

PROGRAM = Path(__file__).parent / "contained.py"
needs_namespaces = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("unshare") is None, reason="only root may have namespaces of its own"
)


def printed(*command: object) -> str:
    done = subprocess.run(
        [*map(str, command)], check=False, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL
    )
    assert not done.returncode, done.stderr
    return done.stdout


@needs_namespaces
@CHEAP
def test_process_1_of_a_container_leaves_no_zombies(method: str) -> None:
    """Orphans become its children, and nothing else would reap them."""
    found = printed("unshare", "--kill-child", "--pid", "--fork", "--mount-proc", sys.executable, PROGRAM, method)
    assert found.startswith("pid 1, left: ")
    assert "sleep" not in found, found
    assert "(sh)" not in found, found


@needs_namespaces
def test_without_proc(method: str) -> None:
    """Nothing is lost but what only ``/proc`` tells."""
    hidden = f'mount -t tmpfs none /proc && exec "$0" "$1" {method}'
    assert "left: unknown" in printed("unshare", "--mount", "sh", "-c", hidden, sys.executable, PROGRAM)
