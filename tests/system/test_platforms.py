"""Tests of the package without the standard library's names that exist only on Linux or POSIX, and without pidfds."""

from __future__ import annotations

import functools
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
from programs import run_python

import vecenv
from vecenv.errors import WorkerDied
from vecenv.recording.file import read, read_header
from vecenv.recording.replay import DIFFERENT, Replay
from vecenv.system import cores
from vecenv.system.helper_process import HelperProcess
from vecenv.system.spawning import explain_unsupported_processes
from vecenv.testing import FaultyEnv

HERE = Path(__file__).parent


def run_as_system(system: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``other_system_program.py``. With arguments, it runs the command line of the package."""
    path = os.pathsep.join(filter(None, [str(Path(vecenv.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
    return run_python(HERE / "other_system_program.py", *arguments, IMITATED_SYSTEM=system, PYTHONPATH=path)


def read_report(system: str) -> dict[str, Any]:
    done = run_as_system(system)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.fixture(scope="module")
def windows_report() -> dict[str, Any]:
    return read_report("windows")


@pytest.fixture(scope="module")
def macos_report() -> dict[str, Any]:
    return read_report("macos")


@pytest.fixture(scope="module")
def expected_total() -> float:
    """Return the sum of the observations that Gymnasium's engine returns for the reset and the steps of the program."""
    envs = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 3)
    total = float(np.sum(envs.reset(seed=5)[0]))
    for step in range(10):
        total += float(np.sum(envs.step(np.array([step % 2] * 3))[0]))
    envs.close()
    return total


@pytest.mark.parametrize(
    ("engine", "advice"),
    [
        ("default", "num_workers=None"), ("two workers", "num_workers=2"), ("auto with restarts", "on_failure"),
        ("auto with a timeout", "step_timeout"), ("use_caller", "use_caller=True"), ("dummy_env", "dummy_env=False"),
    ],
)  # fmt: skip
@pytest.mark.long
@pytest.mark.xdist_group("platforms")
def test_windows_error_about_processes_gives_advice(engine: str, advice: str, windows_report: dict[str, Any]) -> None:
    error = windows_report["engines"][engine]
    for text in ("AsyncVectorEnv", advice, "win32", "num_workers=0", "envpool"):
        assert text in error


@pytest.mark.long
@pytest.mark.xdist_group("platforms")
def test_windows_steps_environments_in_the_caller(windows_report: dict[str, Any], expected_total: float) -> None:
    assert windows_report["engines"]["no workers"] == windows_report["engines"]["auto"] == [0, expected_total]
    assert windows_report["make_vec"] == windows_report["serial"] == [0, expected_total]


@pytest.mark.long
@pytest.mark.xdist_group("platforms")
def test_windows_plan_chooses_the_caller(windows_report: dict[str, Any]) -> None:
    assert "num_workers=0, use_caller=False: in this process" in windows_report["plan"]
    assert "use_caller=False" in windows_report["isolated plan"]


@pytest.mark.long
@pytest.mark.xdist_group("platforms")
def test_windows_command_line_runs_in_process_and_refuses_workers() -> None:
    done = run_as_system("windows", "run", "--num-workers", "2", str(HERE / "gymnasium_program.py"))
    assert done.returncode == 1
    assert "\nNotImplementedError: AsyncVectorEnv with num_workers=2: worker processes need poll()" in done.stderr
    done = run_as_system("windows", "bench", "CartPole-v1")
    assert done.returncode == 2
    assert "win32" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    done = run_as_system("windows", "run", str(HERE / "gymnasium_program.py"))
    assert (done.returncode, done.stdout) == (0, "(2, 4)\n"), done.stderr


@pytest.mark.long
@pytest.mark.xdist_group("platforms")
def test_macos_workers_step_and_sleep_without_spinning(macos_report: dict[str, Any], expected_total: float) -> None:
    assert macos_report["engines"]["default"] == [3, expected_total]
    assert macos_report["engines"]["two workers"] == [2, expected_total]
    assert macos_report["engines"]["no workers"] == [0, expected_total]
    assert macos_report["engines"]["auto with restarts"][1] == expected_total
    assert macos_report["spins"] == [0.0, 0.0]


@pytest.mark.long
@pytest.mark.xdist_group("platforms")
def test_macos_has_no_stack_signals(macos_report: dict[str, Any]) -> None:
    assert not macos_report["stack signals"]


def test_this_system_supports_worker_processes() -> None:
    assert explain_unsupported_processes() is None


# -- without pidfds -------------------------------------------------------------------------------------------------------


def die_and_leave_a_child(pipe: Any, signal_number: int) -> None:
    """Kill this process. A forked child with copies of all its pipes continues in another session."""
    if os.fork() == 0:
        os.setsid()
        time.sleep(60)
        os._exit(0)
    os.kill(os.getpid(), signal_number)


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
@pytest.mark.parametrize("ignores_sigchld", [False, True], ids=["reaped-here", "reaped-by-the-kernel"])
def test_death_is_noticed_while_a_child_holds_all_pipes(
    method: str, ignores_sigchld: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a program that ignores SIGCHLD, the kernel reaps processes, and their exit codes are lost."""
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    previous_handler = signal.getsignal(signal.SIGCHLD)
    if ignores_sigchld:
        if method != "fork":
            pytest.skip("spawn and forkserver need SIGCHLD")
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    helper = HelperProcess(
        multiprocessing.get_context(method), die_and_leave_a_child, (signal.SIGKILL,), name="helper", daemon=False
    )
    try:
        helper.start()
        assert helper.has_ended(20)
        assert helper.wait(time.monotonic() + 20)
        assert helper.reap() == (None if ignores_sigchld else -signal.SIGKILL)
    finally:
        helper.end()
        signal.signal(signal.SIGCHLD, previous_handler)


def check_death_is_noticed(envs: vecenv.AsyncVectorEnv, call: Callable[[], Any]) -> None:
    """Kill a worker, and check that ``call``, if repeated, soon raises ``WorkerDied``."""
    pid = envs._pool.processes[1].pid
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    with pytest.raises(WorkerDied, match="SIGKILL"):  # noqa: PT012 - a call may return before the death
        while time.monotonic() < deadline:
            call()
    envs.reset(seed=1)


def test_calls_without_pidfds_raise_worker_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    envs = vecenv.AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 4, num_workers=2, batch_size=2)
    try:
        envs.reset(seed=1)
        check_death_is_noticed(envs, lambda: envs.step(np.zeros(4, int)))
        check_death_is_noticed(envs, lambda: envs.call("spec"))
        check_death_is_noticed(envs, lambda: (envs.send(np.zeros(2, int), [2, 3]), envs.recv(count=2)))
    finally:
        envs.close(timeout=5)


def test_no_process_spins_if_the_time_waited_for_cores_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(cores, "_cgroup_quota", lambda: None)
    monkeypatch.setattr(cores, "seconds_waited", lambda: None)
    assert cores.placements(1) == ([cores.Placement()], 0.0)
    monkeypatch.setattr(cores, "seconds_waited", lambda: 1.0)
    assert cores.placements(1)[1] > 0
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores.placements(1) == ([cores.Placement()], 0.0)


def raise_value_error(result: Any) -> None:
    raise ValueError("an error of the environment")


def test_failures_are_recorded_and_replayed_without_sigkill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "records"
    once = tmp_path / "raised"
    env_fn: Any = functools.partial(FaultyEnv, gymnasium.make("CartPole-v1"), raise_value_error, step=2, once=once)
    envs = vecenv.AsyncVectorEnv([env_fn], num_workers=0, record_failures=folder)
    envs.reset(seed=1)
    envs.step([0])
    monkeypatch.delattr(signal, "SIGKILL")
    with pytest.raises(ValueError, match="an error of the environment") as caught:
        envs.step([0])
    envs.close()
    (path,) = folder.iterdir()
    assert f"recorded: {path}" in caught.value.__notes__
    header, body = read_header(path)
    replay = Replay(header, read(header, body))
    for _ in replay.run():
        pass
    replay.close()
    assert replay.result is not None
    assert replay.result.status == DIFFERENT
