"""``vecenv bench`` leaves no process when it is killed or interrupted, and rejects sizes beyond the machine's limits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from observe import WAIT_SECONDS, still_running

import vecenv
from vecenv.tools import benchmark, cli, limits

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sessions and signals of POSIX")

SLOW_ENV = """
import os, subprocess, time
from pathlib import Path

import gymnasium
import numpy as np

class Slow(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        helper = subprocess.Popen(["sleep", "120"])
        Path(f"{os.getpid()}-{helper.pid}.pids").touch()
        if len(list(Path().glob("*.pids"))) > 3:  # the first three belong to SyncVectorEnv, the others to engines
            time.sleep(float(os.environ["SLOW"]))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {}
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Yield a function that starts a command of vecenv in its own process group."""
    running: list[subprocess.Popen[str]] = []
    (tmp_path / "slowly.py").write_text(SLOW_ENV)

    def launch(*arguments: str, slow: float = 60.0) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(Path(vecenv.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        running.append(
            subprocess.Popen(
                [sys.executable, "-m", "vecenv", *arguments],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": path, "SLOW": str(slow)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return running[-1]

    yield launch
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_for_environments(folder: Path, count: int, seconds: float = 120.0) -> list[int]:
    """Wait until ``count`` environments are being built. Return the pids of their processes and helpers."""
    deadline = time.monotonic() + seconds
    while len(pids := environment_pids(folder)) < 2 * count:
        assert time.monotonic() < deadline, f"only {len(pids) // 2} of {count} environments are being built"
        time.sleep(0.02)
    return pids


def environment_pids(folder: Path) -> list[int]:
    """Return the pids of the process and of the helper of each environment, from the names of their files."""
    return [int(pid) for file in folder.glob("*.pids") for pid in file.stem.split("-")]


def descendant_pids(process: subprocess.Popen[str]) -> list[int]:
    return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]


BENCH = ["bench", "slowly:Slow", "--num-envs", "3", "--engines", "workers,per-env,gym-sync,gym-async,bare-pipes,bare-loop"]


@pytest.mark.long
def test_killed_bench_leaves_no_processes_of_engines_that_are_starting(start: Start, tmp_path: Path) -> None:
    bench = start(*BENCH)
    pids = {*wait_for_environments(tmp_path, 11), *descendant_pids(bench)}
    bench.kill()
    bench.wait()
    assert not still_running([*pids, *environment_pids(tmp_path)], WAIT_SECONDS)


@pytest.mark.long
def test_ctrl_c_ends_a_bench_that_is_building_engines(start: Start, tmp_path: Path) -> None:
    bench = start(*BENCH)
    pids = {*wait_for_environments(tmp_path, 11), *descendant_pids(bench)}
    os.killpg(bench.pid, signal.SIGINT)  # like Ctrl-C in a terminal
    started_at = time.monotonic()
    _, errors = bench.communicate(timeout=100)
    assert time.monotonic() - started_at < WAIT_SECONDS
    assert bench.returncode == 130, errors
    assert errors.strip() == "vecenv: interrupted"
    assert not still_running(list(pids), WAIT_SECONDS)


@pytest.mark.long
@pytest.mark.parametrize("moment", [0.0, 0.5, 2.0])
def test_ctrl_c_ends_a_bench_at_any_moment(start: Start, moment: float) -> None:
    bench = start("bench", "CartPole-v1", "--num-envs", "2", "--engines", "workers,bare-loop", "--seconds", "5")
    deadline = time.monotonic() + 60
    while not descendant_pids(bench):  # imports are slow on a busy machine
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(moment)
    pids = descendant_pids(bench)
    os.killpg(bench.pid, signal.SIGINT)
    _, errors = bench.communicate(timeout=100)
    assert bench.returncode == 130, errors
    # on a fast machine, the first round may have begun
    assert errors.strip().removeprefix("2 environments, round 1 of 7\n") == "vecenv: interrupted"
    assert not still_running(pids, WAIT_SECONDS)


@pytest.mark.parametrize("arguments", [[], ["--scale"]])
def test_too_many_processes_are_rejected_before_any_start(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "compare", lambda *_, **__: pytest.fail("processes were started"))
    monkeypatch.setattr(limits, "_process_limit", lambda: (32768, "a test"))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "--num-envs", "100000", *arguments]) == 2
    message = capsys.readouterr().err
    assert "exceed the limit of 32768 (a test)" in message
    assert "use fewer environments or workers, or only some --engines" in message
    assert not list(tmp_path.iterdir())


def test_shortage_reports_too_many_processes_and_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_process_limit", lambda: (1000, "a test"))
    monkeypatch.setattr(limits, "available_memory", lambda: 800 * limits.MIB)
    monkeypatch.setattr(limits, "memory_limits", lambda: iter(()))
    assert limits.shortage(1) is None
    assert "1001 processes exceed the limit of 1000" in (limits.shortage(1001) or "")
    assert "200 processes need 1600 MiB of memory or more, and 800 MiB are available" in (limits.shortage(200) or "")
