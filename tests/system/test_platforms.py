"""What the package does where names are missing that only Linux has, or POSIX; and a run without pidfds."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

import vecenv
from vecenv.errors import WorkerDied
from vecenv.system import cores
from vecenv.system.helper_process import HelperProcess
from vecenv.system.spawning import why_no_processes

HERE = Path(__file__).parent


def run(world: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program, or the package's command line, as on another system."""
    path = os.pathsep.join(filter(None, [str(Path(vecenv.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, str(HERE / "elsewhere_program.py"), *arguments]
    variables = {**os.environ, "WORLD": world, "PYTHONPATH": path}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=250)


def told(world: str) -> dict[str, Any]:
    ended = run(world)
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
def test_on_windows_processes_are_refused_with_the_way_out(asked: str, named: str, windows: dict[str, Any]) -> None:
    refusal = windows["asked"][asked]
    for words in ("AsyncVectorEnv", named, "win32", "num_workers=0", "envpool"):
        assert words in refusal


@pytest.mark.long
@pytest.mark.xdist_group("platforms")
def test_on_windows_environments_step_in_the_process(windows: dict[str, Any], total: float) -> None:
    assert windows["asked"]["none"] == windows["asked"]["auto"] == [0, total]
    assert windows["make_vec"] == windows["serial"] == [0, total]


@pytest.mark.long
@pytest.mark.xdist_group("platforms")
def test_on_windows_plan_and_doctor_say_what_is_so(windows: dict[str, Any]) -> None:
    assert "num_workers=0, use_caller=False: in this process" in windows["plan"]
    assert "isolate=True" in windows["isolated plan"]
    verdict, value, advice = windows["doctor"]["workers"]
    assert (verdict, "win32" in value, "num_workers=0" in advice) == ("bad", True, True)
    assert not {"memfd", "pidfd", "/dev/shm", "open files"} & windows["doctor"].keys()


@pytest.mark.long
@pytest.mark.xdist_group("platforms")
def test_the_command_line_on_windows_says_it_in_a_line() -> None:
    ended = run("windows", "run", "--num-workers", "2", str(HERE / "asks_gymnasium.py"))
    assert ended.returncode == 1
    assert "\nNotImplementedError: AsyncVectorEnv with num_workers=2: worker processes need poll()" in ended.stderr
    ended = run("windows", "bench", "CartPole-v1")
    assert (ended.returncode, "win32" in ended.stderr, len(ended.stderr.splitlines())) == (2, True, 1), ended.stderr
    ended = run("windows", "run", str(HERE / "asks_gymnasium.py"))
    assert (ended.returncode, ended.stdout) == (0, "(2, 4)\n"), ended.stderr


@pytest.mark.long
@pytest.mark.xdist_group("platforms")
def test_on_macos_processes_step_and_sleep(macos: dict[str, Any], total: float) -> None:
    assert macos["asked"]["default"] == [3, total]
    assert macos["asked"]["two"] == [2, total]
    assert macos["asked"]["none"] == [0, total]
    assert macos["asked"]["auto with restarts"][1] == total
    assert macos["spins"] == [0.0, 0.0]


@pytest.mark.long
@pytest.mark.xdist_group("platforms")
def test_on_macos_doctor_says_what_is_missing(macos: dict[str, Any]) -> None:
    assert not macos["stack signals"]
    verdict, _, advice = macos["doctor"]["workers"]
    assert (verdict, "stack" in advice) == ("warn", True)
    assert macos["doctor"]["memfd"][0] == macos["doctor"]["pidfd"][0] == "warn"


def test_here_there_can_be_processes() -> None:
    assert why_no_processes() is None


# -- without pidfds -------------------------------------------------------------------------------------------------------


def leave_a_helper(pipe: Any, number: int) -> None:
    """End while a forked helper, which has a copy of every pipe, lives on in a session of its own."""
    if os.fork() == 0:
        os.setsid()
        time.sleep(60)
        os._exit(0)
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
@pytest.mark.parametrize("ignored", [False, True], ids=["reaped-here", "reaped-by-the-kernel"])
def test_an_end_is_seen_though_a_helper_holds_all_pipes(
    method: str, ignored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its exit code is lost, and nothing but its absence tells."""
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


def dies(envs: vecenv.AsyncVectorEnv, call: Callable[[], Any]) -> None:
    pid = envs._pool.processes[1].pid
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    with pytest.raises(WorkerDied, match="SIGKILL"):  # noqa: PT012 - a call may be over before the death
        while time.monotonic() < deadline:
            call()
    envs.reset(seed=1)


def test_deaths_are_seen_in_all_kinds_of_calls_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    envs = vecenv.AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 4, num_workers=2, batch_size=2)
    try:
        envs.reset(seed=1)
        dies(envs, lambda: envs.step(np.zeros(4, int)))
        dies(envs, lambda: envs.call("spec"))
        dies(envs, lambda: (envs.send(np.zeros(2, int), [2, 3]), envs.recv(count=2)))
    finally:
        envs.close(timeout=5)


def test_no_process_spins_where_the_system_does_not_tell_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(cores, "_cgroup_quota", lambda: None)
    monkeypatch.setattr(cores, "seconds_waited", lambda: None)
    assert cores.placements(1) == ([cores.Placement()], 0.0)
    monkeypatch.setattr(cores, "seconds_waited", lambda: 1.0)
    assert cores.placements(1)[1] > 0
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores.placements(1) == ([cores.Placement()], 0.0)
