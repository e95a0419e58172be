"""The package works without the names that only Linux or POSIX has, and without pidfds."""

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
from vecenv.system.spawning import explain_missing_processes
from vecenv.testing import FaultyEnv

HERE = Path(__file__).parent


def run(system: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``other_system_program.py``; with arguments, it runs the command line of the package."""
    path = os.pathsep.join(filter(None, [str(Path(vecenv.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
    return run_python(HERE / "other_system_program.py", *arguments, IMITATED_SYSTEM=system, PYTHONPATH=path)


def load_report(system: str) -> dict[str, Any]:
    done = run(system)
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


@pytest.fixture(scope="module")
def windows() -> dict[str, Any]:
    return load_report("windows")


@pytest.fixture(scope="module")
def macos() -> dict[str, Any]:
    return load_report("macos")


@pytest.fixture(scope="module")
def expected_total() -> float:
    """Return the sum of Gymnasium's observations for the steps of the program."""
    envs = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 3)
    expected_total = float(np.sum(envs.reset(seed=5)[0]))
    for step in range(10):
        expected_total += float(np.sum(envs.step(np.array([step % 2] * 3))[0]))
    envs.close()
    return expected_total


@pytest.mark.parametrize(
    ("engine", "advice"),
    [
        ("default", "num_workers=None"), ("two", "num_workers=2"), ("auto with restarts", "on_failure='restart'"),
        ("auto with a timeout", "step_timeout"), ("use_caller", "use_caller=True"), ("dummy_env", "dummy_env=False"),
    ],
)  # fmt: skip
@pytest.mark.long
@pytest.mark.xdist_group("platforms")
def test_windows_refuses_processes_with_advice(engine: str, advice: str, windows: dict[str, Any]) -> None:
    refusal = windows["engines"][engine]
    for text in ("AsyncVectorEnv", advice, "win32", "num_workers=0", "envpool"):
        assert text in refusal


@pytest.mark.long
@pytest.mark.xdist_group("platforms")
def test_windows_steps_environments_in_the_caller(windows: dict[str, Any], expected_total: float) -> None:
    assert windows["engines"]["none"] == windows["engines"]["auto"] == [0, expected_total]
    assert windows["make_vec"] == windows["serial"] == [0, expected_total]


@pytest.mark.long
@pytest.mark.xdist_group("platforms")
def test_windows_plan_chooses_the_caller(windows: dict[str, Any]) -> None:
    assert "num_workers=0, use_caller=False: in this process" in windows["plan"]
    assert "use_caller=False" in windows["isolated plan"]


@pytest.mark.long
@pytest.mark.xdist_group("platforms")
def test_windows_command_line_error_is_one_line() -> None:
    done = run("windows", "run", "--num-workers", "2", str(HERE / "gymnasium_program.py"))
    assert done.returncode == 1
    assert "\nNotImplementedError: AsyncVectorEnv with num_workers=2: worker processes need poll()" in done.stderr
    done = run("windows", "bench", "CartPole-v1")
    assert (done.returncode, "win32" in done.stderr, len(done.stderr.splitlines())) == (2, True, 1), done.stderr
    done = run("windows", "run", str(HERE / "gymnasium_program.py"))
    assert (done.returncode, done.stdout) == (0, "(2, 4)\n"), done.stderr


@pytest.mark.long
@pytest.mark.xdist_group("platforms")
def test_macos_processes_step_and_sleep(macos: dict[str, Any], expected_total: float) -> None:
    assert macos["engines"]["default"] == [3, expected_total]
    assert macos["engines"]["two"] == [2, expected_total]
    assert macos["engines"]["none"] == [0, expected_total]
    assert macos["engines"]["auto with restarts"][1] == expected_total
    assert macos["spins"] == [0.0, 0.0]


@pytest.mark.long
@pytest.mark.xdist_group("platforms")
def test_macos_has_no_stack_signals(macos: dict[str, Any]) -> None:
    assert not macos["stack signals"]


def test_this_system_supports_worker_processes() -> None:
    assert explain_missing_processes() is None


# -- without pidfds -------------------------------------------------------------------------------------------------------


def die_with_a_running_helper(pipe: Any, number: int) -> None:
    """Kill this process while a forked helper, which has copies of all its pipes, keeps running in its own session."""
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
    """The test includes processes that the kernel reaps, so that their exit codes are lost."""
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    before = signal.getsignal(signal.SIGCHLD)
    if ignored:
        if method != "fork":
            pytest.skip("spawn and forkserver need SIGCHLD")
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    helper = HelperProcess(
        multiprocessing.get_context(method), die_with_a_running_helper, (signal.SIGKILL,), name="helper", daemon=False
    )
    try:
        helper.start()
        assert helper.has_ended(20)
        assert helper.wait(time.monotonic() + 20)
        assert helper.exit_code() == (None if ignored else -signal.SIGKILL)
    finally:
        helper.end()
        signal.signal(signal.SIGCHLD, before)


def require_worker_died(envs: vecenv.AsyncVectorEnv, call: Callable[[], Any]) -> None:
    """Kill a worker, and check that repeated calls raise."""
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
        require_worker_died(envs, lambda: envs.step(np.zeros(4, int)))
        require_worker_died(envs, lambda: envs.call("spec"))
        require_worker_died(envs, lambda: (envs.send(np.zeros(2, int), [2, 3]), envs.recv(count=2)))
    finally:
        envs.close(timeout=5)


def test_no_process_spins_if_waiting_times_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
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
