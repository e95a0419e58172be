"""Helpers that observe processes and error reports, and run a trainer as a separate program."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

import vecenv

Launch = Callable[..., Any]
"""The type of the fixture ``launch`` (``conftest.py``), which starts engines with the start method of the test."""

METHODS = [name for name in ("fork", "spawn", "forkserver") if name in multiprocessing.get_all_start_methods()]
WAIT_SECONDS = 20.0
"""Time limit of waits that normally take a tenth of a second: other programs may occupy the cores."""
WITHOUT_SPAWN = pytest.mark.parametrize("method", [name for name in METHODS if name != "spawn"], indirect=True)
"""Excludes ``spawn``, which takes longest, from tests that do not depend on the start method."""
LINUX = sys.platform == "linux"
TRAINER = Path(__file__).with_name("trainer.py")
IMPORT_ROOT = Path(vecenv.__file__).parents[1]
"""The folder from which programs import ``vecenv``."""
FAULT_MARKS = [
    pytest.mark.timeout(300, method="signal"),
    # Gymnasium's log lines about an environment that raised, and about close() during a pending call
    pytest.mark.filterwarnings("ignore:.*Received the following error"),
    pytest.mark.filterwarnings(r"ignore:[\s\S]*Traceback"),
    pytest.mark.filterwarnings("ignore:.*Raising the last exception"),
    pytest.mark.filterwarnings("ignore:.*while waiting for a pending call"),
]
"""Marks of most tests in this folder: a time limit, and filters for the warnings that they provoke."""


def format_error(error: BaseException) -> str:
    """Return the text that Python prints when this error ends a program, with causes and notes."""
    return "".join(traceback.format_exception(error))


def assert_error_names(error: BaseException, *, env: int, worker: int, pid: int, command: str) -> None:
    """Assert that an error, as printed, names its environment, worker, process and command."""
    text = format_error(error)
    assert re.search(rf"\benvs?\b[^\n]*\b{env}\b", text), f"env {env} is not named in:\n{text}"
    assert re.search(rf"\bworkers?\b[^\n]*\b{worker}\b", text), f"worker {worker} is not named in:\n{text}"
    assert re.search(rf"\bpid\b[^\n]*\b{pid}\b", text), f"pid {pid} is not named in:\n{text}"
    assert re.search(rf"\b{command}\b", text), f"{command} is not named in:\n{text}"


def is_running(pid: int) -> bool:
    """True if the process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def still_running(pids: Iterable[int], within: float) -> list[int]:
    """Wait up to ``within`` seconds for the end of these processes; return the pids of those that still run."""
    deadline = time.monotonic() + within
    remaining = list(pids)
    while (remaining := [pid for pid in remaining if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return remaining


def wait_for_file(path: Path, within: float = 60.0) -> None:
    """Wait until a file exists."""
    deadline = time.monotonic() + within
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear within {within:g} s"
        time.sleep(0.005)


def worker_pids(envs: Any) -> list[int]:
    """Return the pid of each worker process, in order."""
    return [worker.pid for worker in envs._pool.workers]


def make_environ(program: Path) -> dict[str, str]:
    """Return environment variables with which a program can import ``vecenv`` and the modules in its folder."""
    path = [str(IMPORT_ROOT), str(program.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def run_json_program(program: Path, *arguments: object, within: float) -> Any:
    """Run a program and return the JSON in its last line of output; kill its process group after at most ``within`` s."""
    command = [sys.executable, *map(str, (program, *arguments))]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=make_environ(program),
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=within)
    except subprocess.TimeoutExpired:
        output, errors = "", f"it did not end within {within:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == 0, f"{command}\nhung or failed:\n{errors[-4000:]}"
    return json.loads(output.splitlines()[-1])


class Trainer:
    """A process that runs ``trainer.py`` with one of its scenarios, and prints messages as lines of JSON."""

    def __init__(self, scenario: str, method: str, folder: Path, *, prefix: list[str], terminal: int | None) -> None:
        self._stderr = (folder / "stderr").open("w+")
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(TRAINER), scenario, method, str(folder)],
            stdin=subprocess.DEVNULL if terminal is None else terminal,
            stdout=subprocess.PIPE,
            stderr=self._stderr if terminal is None else terminal,
            env=make_environ(TRAINER),
            start_new_session=True,
        )

    def read_message(self, within: float = 60.0) -> dict[str, Any]:
        """Return the next message; fail if there is none within ``within`` seconds."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], within)
        line = self.process.stdout.readline() if ready else b""
        assert line, f"no message from the trainer within {within:g} s; stderr: {self.read_stderr()}"
        return json.loads(line)

    def read_stderr(self) -> str:
        """Return the output on stderr so far, which is empty if the trainer has a terminal."""
        return Path(self._stderr.name).read_text()

    def end(self) -> None:
        """Kill the process group if the program still runs, and close its streams."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._stderr.close()
