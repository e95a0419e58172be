"""Tests of the watchdog: without a timeout, a request that takes very long is logged."""

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
    """An environment that sleeps in steps, resets and ``nap``: for ``action`` hundredths of a second, or as given."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)  # samples are short naps

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
    """Shorten the delays of the watchdog: a minute becomes 1.5 seconds, and ten minutes 3."""
    before = list(watchdog.REPORT_AFTER_SECONDS), list(watchdog.CHECK_INTERVAL_SECONDS)
    watchdog.REPORT_AFTER_SECONDS[:], watchdog.CHECK_INTERVAL_SECONDS[:] = [1.5, 3.0], [0.1]
    yield
    watchdog.REPORT_AFTER_SECONDS[:], watchdog.CHECK_INTERVAL_SECONDS[:] = before


def log_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = [record for record in caplog.records if record.name == "vecenv" and record.levelno == logging.WARNING]
    return [record.getMessage() for record in ours]


def open_engine(launch: Launch, count: int = 4, **kwargs: Any) -> Any:
    envs = launch([functools.partial(NappingEnv) for _ in range(count)], **kwargs)
    envs.reset(seed=1)
    return envs


PLACE = r"at test_watchdog\.py:\d+ in nap"


@pytest.mark.long
def test_long_step_is_logged_twice(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    """The log lines name environment, worker, line and the option that would end the step."""
    envs = open_engine(launch)
    envs.step([0, 0, 600, 0])
    first, second = log_lines(caplog)
    pid = worker_pids(envs)[2]
    form = rf"env 2 has been stepping for {{}} s, {PLACE} \(worker 2, pid {pid}\); step_timeout= ends it"
    assert re.fullmatch(form.format(r"\d"), first), first
    assert re.fullmatch(form.format(r"\d"), second), second
    caplog.clear()
    for _ in range(20):  # many short steps are not logged
        envs.step([20, 0, 0, 0])
    assert not log_lines(caplog)


@pytest.mark.long
@WITHOUT_SPAWN
def test_all_environments_of_a_late_worker_are_named(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    envs = open_engine(launch, num_workers=2)
    envs.step([0, 0, 250, 0])
    (line,) = log_lines(caplog)
    assert re.match(rf"env 2, of envs 2-3, has been stepping for \d s, {PLACE}", line), line


@pytest.mark.long
@WITHOUT_SPAWN
def test_hang_among_first_ready_batches_is_logged(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    """Other rows arrive all the time, so no single wait is long."""
    envs = open_engine(launch)
    envs.send([400, 1, 1, 1], range(4))
    ready: set[int] = set()
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        rows = envs.recv(count=1)[4]["env_id"]
        ready |= set(rows.tolist())
        if time.monotonic() < until:
            envs.send(np.full(len(rows), 1), rows)
    assert 0 not in ready
    (line,) = log_lines(caplog)
    assert line.startswith("env 0 has been stepping"), line


@pytest.mark.long
@WITHOUT_SPAWN
def test_finished_requests_are_not_logged(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    """The time that the program spends between calls does not count."""
    envs = open_engine(launch)
    envs.send([30, 1, 1, 1], range(4))
    envs.recv(count=1)
    time.sleep(2.5)
    envs.recv(count=3)
    envs.step_async([0, 0, 0, 0])
    time.sleep(2.5)
    envs.step_wait()
    assert not log_lines(caplog)
    envs.step([0, 0, 0, 250])
    assert [line[:9] for line in log_lines(caplog)] == ["env 3 has"]


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
    lines = log_lines(caplog)
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
    assert not log_lines(caplog)


@pytest.mark.long
@WITHOUT_SPAWN
def test_polls_of_a_long_step_log_it_once(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    envs = open_engine(launch, 2)
    envs.step_async([250, 0])
    for _ in range(1000):
        try:
            envs.step_wait(timeout=0)
        except StepTimeout:
            time.sleep(0.01)
        else:
            break
    assert [line[:25] for line in log_lines(caplog)] == ["env 0 has been stepping f"]
