"""Separate programs: without standard descriptors, in containers, with collected engines, with their own classes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import programs
import pytest
from observe import CHEAP, FAULTS, last_line

pytestmark = FAULTS


# --- Programs that are started without standard input, output or error --------------------------

CLOSED_OUTPUT = Path(__file__).parent / "closed_output.py"


@pytest.mark.linux
@pytest.mark.long
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_a_program_without_standard_descriptors(method: str, closed: str, tmp_path: Path) -> None:
    """Workers end cleanly, and printed output gets neither into a message nor into shared memory."""
    log = tmp_path / "log"
    command = f'exec "$0" "$1" {method} "$2" {closed}'
    shell = ["sh", "-c", command, sys.executable, CLOSED_OUTPUT, log]
    done = subprocess.run(shell, check=False, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
    assert "Traceback" not in done.stderr
    assert set(log.read_text()) <= set("[0, ]"), log.read_text()


# --- Containers: a program that is process 1, and one that has no ``/proc`` ---------------------

CONTAINED = Path(__file__).parent / "contained.py"
needs_namespaces = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("unshare") is None, reason="only root may have namespaces of its own"
)


def printed(*command: object) -> str:
    done = subprocess.run(
        [*map(str, command)], check=False, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL
    )
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.mark.linux
@pytest.mark.long
@needs_namespaces
@CHEAP
def test_process_1_of_a_container_leaves_no_zombies(method: str) -> None:
    """Orphans become its children, and no other process would reap them."""
    found = printed("unshare", "--kill-child", "--pid", "--fork", "--mount-proc", sys.executable, CONTAINED, method)
    assert found.startswith("pid 1, left: ")
    assert "sleep" not in found, found
    assert "(sh)" not in found, found


@pytest.mark.linux
@pytest.mark.long
@needs_namespaces
def test_without_proc(method: str) -> None:
    """Only information from ``/proc`` is lost."""
    hidden = f'mount -t tmpfs none /proc && exec "$0" "$1" {method}'
    assert "left: unknown" in printed("unshare", "--mount", "sh", "-c", hidden, sys.executable, CONTAINED)


# --- Unclosed engines are collected without touching resources of others -------------------------

COLLECTED = Path(__file__).with_name("collected.py")


@pytest.mark.long
@pytest.mark.timeout(1300, method="signal")
@pytest.mark.parametrize(("count", "limit"), [(60, 90.0), pytest.param(1000, 1200.0, marks=pytest.mark.slow)])
def test_collected_engines_touch_no_foreign_resources(count: int, limit: float) -> None:
    """Many unclosed engines, each part of a reference cycle, beside a thread that opens and closes all the time."""
    found = last_line(COLLECTED, count, within=limit)
    print(found)
    assert found["rounds"] >= count
    assert not found["troubles"], found
    assert not found["complaints"], found
    assert not found["thread hangs"], found
    assert found["processes"] == 0, found
    assert found["descriptors"] <= 0, found


# --- Classes of the main file come back from environments as themselves, not as copies -----------

OWN_CLASSES = Path(__file__).parent / "own_classes.py"


def findings(method: str, engine: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in programs.printed(OWN_CLASSES, method, engine).splitlines())


@pytest.mark.long
def test_classes_of_the_program_are_preserved(method: str) -> None:
    """``except MyError`` around a call catches the error of an environment; the same holds for every other value."""
    found = findings(method, "vecenv")
    assert len(found) == 14, found  # every line of the program
    assert set(found.values()) == {"True"}, found


def test_classes_under_fork_are_as_with_gymnasiums_engine() -> None:
    """Under other start methods Gymnasium's engine hangs, or refuses them."""
    theirs, ours = findings("fork", "gymnasium"), findings("fork", "vecenv")
    assert set(theirs.values()) == {"True"}, theirs
    assert {name: ours[name] for name in theirs} == theirs

