"""What other systems have and have not, as far as it can be emulated here; see tests/emulation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

import vecenv
from vecenv.system.abilities import why_no_processes

HERE = Path(__file__).parent
TESTS = HERE.parent

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("platforms")]  # each of the other systems is asked once


def run(world: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python in another world."""
    path = [str(TESTS / "emulation"), str(Path(vecenv.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "VECENV_EMULATE": world, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False, timeout=250
    )


def told(world: str) -> dict[str, Any]:
    ended = run(world, str(HERE / "elsewhere_program.py"))
    assert ended.returncode == 0, ended.stderr
    facts: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return facts


@pytest.fixture(scope="module")
def windows() -> dict[str, Any]:
    return told("windows")


@pytest.fixture(scope="module")
def macos() -> dict[str, Any]:
    return told("macos")


@pytest.fixture(scope="module")
def total() -> float:
    """What Gymnasium's engine gives for the steps of the program."""
    import gymnasium

    envs = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 3)
    total = float(np.sum(envs.reset(seed=5)[0]))
    for step in range(10):
        total += float(np.sum(envs.step(np.array([step % 2] * 3))[0]))
    envs.close()
    return total


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ("default", "num_workers=None"), ("two", "num_workers=2"), ("auto with restarts", "on_failure='restart'"),
        ("auto with a timeout", "step_timeout"), ("use_caller", "use_caller=True"), ("dummy_env", "dummy_env=False"),
    ],
)  # fmt: skip
def test_on_windows_processes_are_refused_with_the_way_out(asked: str, named: str, windows: dict[str, Any]) -> None:
    refusal = windows["asked"][asked]
    for words in ("AsyncVectorEnv", named, "win32", "num_workers=0", "envpool"):
        assert words in refusal


def test_on_windows_environments_step_in_the_process(windows: dict[str, Any], total: float) -> None:
    assert windows["asked"]["none"] == windows["asked"]["auto"] == [0, total]
    assert windows["make_vec"] == windows["serial"] == [0, total]


def test_on_windows_plan_and_doctor_say_what_is_so(windows: dict[str, Any]) -> None:
    assert "num_workers=0, use_caller=False: in this process" in windows["plan"]
    assert "isolate=True" in windows["isolated plan"]
    verdict, value, advice = windows["doctor"]["workers"]
    assert (verdict, "win32" in value, "num_workers=0" in advice) == ("bad", True, True)
    assert not {"memfd", "pidfd", "/dev/shm", "open files"} & windows["doctor"].keys()


def test_the_command_line_on_windows_says_it_in_a_line() -> None:
    ended = run("windows", "-m", "vecenv", "run", "--num-workers", "2", str(TESTS / "system" / "asks_gymnasium.py"))
    assert ended.returncode == 1
    assert "\nNotImplementedError: AsyncVectorEnv with num_workers=2: worker processes need poll()" in ended.stderr
    ended = run("windows", "-m", "vecenv", "bench", "CartPole-v1")
    assert (ended.returncode, "win32" in ended.stderr, len(ended.stderr.splitlines())) == (2, True, 1), ended.stderr
    ended = run("windows", "-m", "vecenv", "run", str(TESTS / "system" / "asks_gymnasium.py"))
    assert (ended.returncode, ended.stdout) == (0, "(2, 4)\n"), ended.stderr


def test_on_macos_processes_step_and_spin(macos: dict[str, Any], total: float) -> None:
    assert macos["asked"]["default"] == [3, total]
    assert macos["asked"]["two"] == [2, total]
    assert macos["asked"]["none"] == [0, total]
    assert macos["asked"]["auto with restarts"][1] == total
    assert macos["start method"] == "spawn"
    assert macos["times itself"]
    assert (macos["spins"] > 0) == ((os.cpu_count() or 1) > 1)


def test_on_macos_doctor_says_what_is_missing(macos: dict[str, Any]) -> None:
    assert not macos["stack signals"]
    verdict, _, advice = macos["doctor"]["workers"]
    assert (verdict, "stack" in advice) == ("warn", True)
    assert macos["doctor"]["memfd"][0] == macos["doctor"]["pidfd"][0] == "warn"


def test_here_there_can_be_processes() -> None:
    assert why_no_processes() is None
