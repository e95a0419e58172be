"""Tests of programs without standard descriptors, in containers, with unclosed engines, or with classes in main files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import programs
import pytest
from observe import FAULT_MARKS, WITHOUT_SPAWN, run_json_program

pytestmark = FAULT_MARKS


# --- programs that are started without standard input, output or error --------------------------

CLOSED_OUTPUT = Path(__file__).parent / "closed_output.py"


@pytest.mark.linux
@pytest.mark.long
@pytest.mark.parametrize("redirections", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_program_without_standard_descriptors_works(method: str, redirections: str, tmp_path: Path) -> None:
    """The exit code of workers is 0, and printed text corrupts neither messages nor shared memory."""
    log = tmp_path / "log"
    command = f'exec "$0" "$1" {method} "$2" {redirections}'
    shell = ["sh", "-c", command, sys.executable, CLOSED_OUTPUT, log]
    done = subprocess.run(shell, check=False, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
    assert "Traceback" not in done.stderr
    assert set(log.read_text()) <= set("[0, ]"), log.read_text()  # lists of exit codes


# --- containers: a program that is process 1, and one that has no ``/proc`` ---------------------

CONTAINED = Path(__file__).parent / "contained.py"
needs_namespaces = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("unshare") is None, reason="only root may create namespaces"
)


def run_and_read_output(*command: object) -> str:
    done = subprocess.run(
        [*map(str, command)], check=False, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL
    )
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.mark.linux
@pytest.mark.long
@needs_namespaces
@WITHOUT_SPAWN
def test_process_1_of_a_container_leaves_no_zombies(method: str) -> None:
    """Orphans become children of process 1, so the engine there must reap them."""
    new_namespace = ("unshare", "--kill-child", "--pid", "--fork", "--mount-proc")
    output = run_and_read_output(*new_namespace, sys.executable, CONTAINED, method)
    assert output.startswith("pid 1, left: ")
    assert "sleep" not in output, output
    assert "(sh)" not in output, output


@pytest.mark.linux
@pytest.mark.long
@needs_namespaces
def test_engine_works_without_proc(method: str) -> None:
    command = f'mount -t tmpfs none /proc && exec "$0" "$1" {method}'  # hides /proc
    assert "left: unknown" in run_and_read_output("unshare", "--mount", "sh", "-c", command, sys.executable, CONTAINED)


# --- garbage collection of unclosed engines ------------------------------------------------------

COLLECTED = Path(__file__).with_name("collected.py")


@pytest.mark.long
@pytest.mark.timeout(1300, method="signal")
@pytest.mark.parametrize(("count", "limit"), [(60, 90.0), pytest.param(1000, 1200.0, marks=pytest.mark.slow)])
def test_collected_engines_do_not_touch_descriptors_of_others(count: int, limit: float) -> None:
    """The garbage collector ends engines while another thread opens and closes descriptors."""
    result = run_json_program(COLLECTED, count, within=limit)
    print(result)
    assert result["rounds"] >= count
    assert not result["conflicts"], result
    assert not result["unraisable"], result
    assert not result["thread hangs"], result
    assert result["processes"] == 0, result
    assert result["descriptors"] <= 0, result


# --- instances of the main file's classes arrive as instances of these classes, not of copies ----

OWN_CLASSES = Path(__file__).parent / "own_classes.py"


def run_own_classes(method: str, engine: str) -> dict[str, str]:
    """Run ``own_classes.py``, and return its results by the name of the value."""
    return dict(line.split(": ", 1) for line in programs.python_output(OWN_CLASSES, method, engine).splitlines())


@pytest.mark.long
def test_classes_of_the_program_are_preserved(method: str) -> None:
    """``except MyError`` catches the error of an environment, and all other values are of the program's classes."""
    results = run_own_classes(method, "vecenv")
    assert len(results) == 14, results  # every line of the program
    assert set(results.values()) == {"True"}, results


def test_classes_under_fork_match_gymnasium() -> None:
    """Only ``fork`` can be compared: with other start methods, Gymnasium's engine hangs or raises."""
    expected, results = run_own_classes("fork", "gymnasium"), run_own_classes("fork", "vecenv")
    assert set(expected.values()) == {"True"}, expected
    assert {name: results[name] for name in expected} == expected
