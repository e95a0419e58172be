"""The package without the names that only Linux or POSIX has, and a run without pidfds."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from programs import python

import vecenv
from vecenv.errors import WorkerDied
from vecenv.system import cores
from vecenv.system.helper_process import HelperProcess
from vecenv.system.spawning import explain_missing_processes

HERE = Path(__file__).parent


def run(world: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program, or the package's command line, as on another system."""
    path = os.pathsep.join(filter(None, [str(Path(vecenv.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
    return python(HERE / "other_system_program.py", *arguments, WORLD=world, PYTHONPATH=path)


def report_of(world: str) -> dict[str, Any]:
    ended = run(world)
    assert ended.returncode == 0, ended.stderr
    facts: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return facts


@pytest.fixture(scope="module")
def windows() -> dict[str, Any]:
    return report_of("windows")


@pytest.fixture(scope="module")
def macos() -> dict[str, Any]:
    return report_of("macos")


@pytest.fixture(scope="module")
def total() -> float:
    """Return the result of Gymnasium's engine for the steps of the program."""
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
@pytest.mark.long
@pytest.mark.xdist_group("platforms")
def test_windows_refuses_processes_with_advice(asked: str, named: str, windows: dict[str, Any]) -> None:
    refusal = windows["asked"][asked]
    for words in ("AsyncVectorEnv", named, "win32", "num_workers=0", "envpool"):
        assert words in refusal


@pytest.mark.long
@pytest.mark.xdist_group("platforms")
def test_windows_steps_environments_in_the_caller(windows: dict[str, Any], total: float) -> None:
    assert windows["asked"]["none"] == windows["asked"]["auto"] == [0, total]
    assert windows["make_vec"] == windows["serial"] == [0, total]


@pytest.mark.long
@pytest.mark.xdist_group("platforms")
def test_windows_plan_chooses_the_caller(windows: dict[str, Any]) -> None:
    assert "num_workers=0, use_caller=False: in this process" in windows["plan"]
    assert "use_caller=False" in windows["isolated plan"]


@pytest.mark.long
@pytest.mark.xdist_group("platforms")
def test_windows_command_line_error_is_one_line() -> None:
    ended = run("windows", "run", "--num-workers", "2", str(HERE / "gymnasium_program.py"))
    assert ended.returncode == 1
    assert "\nNotImplementedError: AsyncVectorEnv with num_workers=2: worker processes need poll()" in ended.stderr
    ended = run("windows", "bench", "CartPole-v1")
    assert (ended.returncode, "win32" in ended.stderr, len(ended.stderr.splitlines())) == (2, True, 1), ended.stderr
    ended = run("windows", "run", str(HERE / "gymnasium_program.py"))
    assert (ended.returncode, ended.stdout) == (0, "(2, 4)\n"), ended.stderr


@pytest.mark.long
@pytest.mark.xdist_group("platforms")
def test_macos_processes_step_and_sleep(macos: dict[str, Any], total: float) -> None:
    assert macos["asked"]["default"] == [3, total]
    assert macos["asked"]["two"] == [2, total]
    assert macos["asked"]["none"] == [0, total]
    assert macos["asked"]["auto with restarts"][1] == total
    assert macos["spins"] == [0.0, 0.0]


@pytest.mark.long
@pytest.mark.xdist_group("platforms")
def test_macos_has_no_stack_signals(macos: dict[str, Any]) -> None:
    assert not macos["stack signals"]


def test_this_system_can_have_processes() -> None:
    assert explain_missing_processes() is None


# -- without pidfds -------------------------------------------------------------------------------------------------------


def leave_a_helper(pipe: Any, number: int) -> None:
    """End while a forked helper, which has a copy of every pipe, lives on in its own session."""
    if os.fork() == 0:
        os.setsid()
        time.sleep(60)
        os._exit(0)
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
@pytest.mark.parametrize("ignored", [False, True], ids=["reaped-here", "reaped-by-the-kernel"])
def test_death_is_noticed_while_a_helper_holds_all_pipes(
    method: str, ignored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds too if its exit code is lost, so that only its absence is known."""
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    before = signal.getsignal(signal.SIGCHLD)
    if ignored:
        if method != "fork":
            pytest.skip("a new interpreter's start, and a fork server, need the signal")
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    helper = HelperProcess(
        multiprocessing.get_context(method), leave_a_helper, (signal.SIGKILL,), name="helper", daemon=False
    )
    try:
        helper.start()
        assert helper.has_ended(20)
        assert helper.wait(time.monotonic() + 20)
        assert helper.exit_code() == (None if ignored else -signal.SIGKILL)
    finally:
        helper.end()
        signal.signal(signal.SIGCHLD, before)


def fails_with_death(envs: vecenv.AsyncVectorEnv, call: Callable[[], Any]) -> None:
    pid = envs._pool.processes[1].pid
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    with pytest.raises(WorkerDied, match="SIGKILL"):  # noqa: PT012 - a call may be over before the death
        while time.monotonic() < deadline:
            call()
    envs.reset(seed=1)


def test_deaths_are_noticed_in_all_calls_and_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    envs = vecenv.AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 4, num_workers=2, batch_size=2)
    try:
        envs.reset(seed=1)
        fails_with_death(envs, lambda: envs.step(np.zeros(4, int)))
        fails_with_death(envs, lambda: envs.call("spec"))
        fails_with_death(envs, lambda: (envs.send(np.zeros(2, int), [2, 3]), envs.recv(count=2)))
    finally:
        envs.close(timeout=5)


def test_no_process_spins_without_waiting_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(cores, "_cgroup_quota", lambda: None)
    monkeypatch.setattr(cores, "seconds_waited", lambda: None)
    assert cores.placements(1) == ([cores.Placement()], 0.0)
    monkeypatch.setattr(cores, "seconds_waited", lambda: 1.0)
    assert cores.placements(1)[1] > 0
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores.placements(1) == ([cores.Placement()], 0.0)
