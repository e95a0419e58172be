"""Tests of the watchdog, which logs requests that take very long."""

from __future__ import annotations

import functools
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from observe import FAULT_MARKS, WITHOUT_SPAWN, Launch, worker_pids

from vecenv.engine import watchdog
from vecenv.errors import StepTimeout

pytestmark = [*FAULT_MARKS, pytest.mark.linux]


class NappingEnv(gymnasium.Env[Any, Any]):
    """An environment that sleeps in steps, resets and calls of ``nap``. All durations are in hundredths of a second."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.nap((options or {}).get("nap", 0))
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.nap(int(action))
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def nap(self, hundredths: int) -> None:
        time.sleep(hundredths / 100)


@pytest.fixture(autouse=True)
def short_delays() -> Iterator[None]:
    """Shorten the delays of the watchdog: a minute to 1.5 seconds, and ten minutes to 3 seconds."""
    original_delays = list(watchdog.REPORT_AFTER_SECONDS), list(watchdog.CHECK_INTERVAL_SECONDS)
    watchdog.REPORT_AFTER_SECONDS[:], watchdog.CHECK_INTERVAL_SECONDS[:] = [1.5, 3.0], [0.1]
    yield
    watchdog.REPORT_AFTER_SECONDS[:], watchdog.CHECK_INTERVAL_SECONDS[:] = original_delays


def list_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings that the package logged."""
    records = [record for record in caplog.records if record.name == "vecenv" and record.levelno == logging.WARNING]
    return [record.getMessage() for record in records]


def open_engine(launch: Launch, count: int = 4, **kwargs: Any) -> Any:
    envs = launch([functools.partial(NappingEnv) for _ in range(count)], **kwargs)
    envs.reset(seed=1)
    return envs


PLACE_PATTERN = r"at test_watchdog\.py:\d+ in nap"


@pytest.mark.long
def test_long_step_is_logged_twice(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    """The log has environment, worker, line and the option that would end the step. Many short steps are not logged."""
    envs = open_engine(launch)
    envs.step([0, 0, 600, 0])
    first, second = list_warnings(caplog)
    pid = worker_pids(envs)[2]
    pattern = rf"env 2 has been stepping for {{}} s, {PLACE_PATTERN} \(worker 2, pid {pid}\); step_timeout= ends it"
    assert re.fullmatch(pattern.format(r"\d"), first), first
    assert re.fullmatch(pattern.format(r"\d"), second), second
    caplog.clear()
    for _ in range(20):
        envs.step([20, 0, 0, 0])
    assert not list_warnings(caplog)


@pytest.mark.long
@WITHOUT_SPAWN
def test_all_environments_of_a_late_worker_are_named(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    envs = open_engine(launch, num_workers=2)
    envs.step([0, 0, 250, 0])
    (line,) = list_warnings(caplog)
    assert re.match(rf"env 2, of envs 2-3, has been stepping for \d s, {PLACE_PATTERN}", line), line


@pytest.mark.long
@WITHOUT_SPAWN
def test_hang_among_first_ready_batches_is_logged(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    """Other rows arrive all the time, so no single wait of the caller is long."""
    envs = open_engine(launch)
    envs.send([400, 1, 1, 1], range(4))
    ready: set[int] = set()
    deadline = time.monotonic() + 2.5
    while time.monotonic() < deadline:
        rows = envs.recv(count=1)[4]["env_id"]
        ready |= set(rows.tolist())
        if time.monotonic() < deadline:
            envs.send(np.full(len(rows), 1), rows)
    assert 0 not in ready
    (line,) = list_warnings(caplog)
    assert line.startswith("env 0 has been stepping"), line


@pytest.mark.long
@WITHOUT_SPAWN
def test_finished_requests_are_not_logged(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    """The time between the end of a step and the call that receives its result does not count."""
    envs = open_engine(launch)
    envs.send([30, 1, 1, 1], range(4))
    envs.recv(count=1)
    time.sleep(2.5)
    envs.recv(count=3)
    envs.step_async([0, 0, 0, 0])
    time.sleep(2.5)
    envs.step_wait()
    assert not list_warnings(caplog)
    envs.step([0, 0, 0, 250])
    (line,) = list_warnings(caplog)
    assert line.startswith("env 3 has"), line


@pytest.mark.long
@WITHOUT_SPAWN
@pytest.mark.parametrize("command", ["reset", "call", "save", "exec_func"])
def test_other_long_requests_are_logged(launch: Launch, command: str, caplog: pytest.LogCaptureFixture) -> None:
    envs = open_engine(launch, 2)
    if command == "reset":
        envs.reset(options={"nap": 200})
    elif command == "call":
        envs.call("nap", 200)
    elif command == "exec_func":
        envs.exec_func(_sleep_two_seconds)
    else:
        os.kill(worker_pids(envs)[1], signal.SIGSTOP)
        threading.Timer(2.5, os.kill, (worker_pids(envs)[1], signal.SIGCONT)).start()
        envs.save()
    lines = list_warnings(caplog)
    activity = "resetting" if command == "reset" else f"busy with {command}"
    assert lines
    assert all(f" has been {activity} for " in line for line in lines), lines
    assert ("stopped by SIGSTOP" in lines[0]) == (command == "save"), lines
    assert ("step_timeout=" in lines[0]) == (command == "reset"), lines


def _sleep_two_seconds(env: Any) -> None:
    time.sleep(2)


@pytest.mark.long
@WITHOUT_SPAWN
def test_step_timeout_replaces_the_log_line(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    envs = open_engine(launch, 2, step_timeout=2.5)
    with pytest.raises(StepTimeout, match="in nap"):
        envs.step([600, 0])
    assert not list_warnings(caplog)


@pytest.mark.long
@WITHOUT_SPAWN
def test_polled_long_step_is_logged_once(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    envs = open_engine(launch, 2)
    envs.step_async([250, 0])
    for _ in range(1000):
        try:
            envs.step_wait(timeout=0)
        except StepTimeout:
            time.sleep(0.01)
        else:
            break
    (line,) = list_warnings(caplog)
    assert line.startswith("env 0 has been stepping f"), line
