"""How often ``on_failure="restart"`` restarts, what it says about it, and what a person can read of it afterwards."""

from __future__ import annotations

import logging
import threading
import time
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from envs import started
from gymnasium.spaces import Box, Discrete

import vecenv
from vecenv.engine.recovery import RestartBudget, RestartLog
from vecenv.errors import ErrorRecord, RestartsExhausted, WorkerDied
from vecenv.system.supervision import place


class Flaky(gym.Env[Any, Any]):
    """Raises at step ``fails_at`` of its life."""

    observation_space = Box(-1.0, 1.0, (2,), np.float32)
    action_space = Discrete(2)

    def __init__(self, fails_at: int) -> None:
        self._left = fails_at

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        if self._left <= 0:
            raise ConnectionError("simulator lost its connection")
        return np.zeros(2, np.float32), 0.0, False, False, {}


def _step_until_it_gives_up(fails_at: list[int], steps: int, **options: Any) -> tuple[int, Exception | None]:
    envs = vecenv.AsyncVectorEnv([partial(Flaky, at) for at in fails_at], num_workers=1, on_failure="restart", **options)
    try:
        envs.reset(seed=1)
        for _ in range(steps):
            envs.step(np.zeros(len(fails_at), np.int64))
    except RestartsExhausted as error:
        return int(envs.stats()["restarts"]), error
    else:
        return int(envs.stats()["restarts"]), None
    finally:
        envs.close()


def test_many_environments_that_fail_now_and_then_go_on() -> None:
    """A budget for each, not five a minute for all of them."""
    restarts, error = _step_until_it_gives_up([60 + 5 * index for index in range(8)], 200)
    assert error is None
    assert restarts == sum(200 // (60 + 5 * index) for index in range(8)) > 5


def test_one_that_cannot_work_is_given_up_soon_however_many_there_are() -> None:
    restarts, error = _step_until_it_gives_up([10**9] * 7 + [1], 100)
    assert restarts == 5
    text = str(error)
    assert "env 7 needed more than 5 restarts within 60 seconds" in text
    assert "restart_limit=N" in text
    assert text.count("env 7: ConnectionError: simulator lost its connection") == 5
    assert isinstance(error, RestartsExhausted)
    assert error.envs == (7,)


def test_a_limit_of_ones_own_is_for_all_together_and_named_in_the_error() -> None:
    restarts, error = _step_until_it_gives_up([3] * 4, 100, restart_limit=6, restart_period=30.0)
    assert restarts == 6
    said = "more than 6 restarts within 30 seconds, which is the budget that restart_limit and restart_period set"
    assert said in str(error)


def test_steps_earn_restarts() -> None:
    """Five, and one more for every 1,000 steps that these environments made since the oldest one in the period."""
    now, steps = 0.0, 0
    budget = RestartBudget(None, 60.0, lambda: steps, lambda: now)
    assert [budget.spend("it", [3]) for _ in range(6)] == [True] * 5 + [False]
    assert budget.spend("another", [4])
    steps = 999
    assert not budget.spend("it", [3])
    steps = 1000
    assert [budget.spend("it", [3]) for _ in range(2)] == [True, False]
    assert [budget.spend("worker", range(8, 16)) for _ in range(6)] == [True] * 5 + [False]
    steps = 1250  # 8 environments made 2,000 steps
    assert [budget.spend("worker", range(8, 16)) for _ in range(3)] == [True, True, False]
    assert "envs 8-15 needed more than 7 restarts" in budget.refusal(range(8, 16))
    now = 60.1
    assert budget.spend("it", [3])


def test_each_restart_is_said_once_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vecenv"):
        assert _step_until_it_gives_up([10**9, 4], 9)[0] == 2
    said = [record.getMessage() for record in caplog.records if record.name == "vecenv"]
    assert said == ["vecenv restarts what failed: env 1: ConnectionError: simulator lost its connection"] * 2


def test_restarts_by_the_hundred_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = RestartLog(clock=lambda: now)
    for index in range(1000):
        log.say(f"env {index}")
    now = 10.0
    log.say("env 1000")
    said = [record.getMessage() for record in caplog.records]
    assert said[:5] == [f"vecenv restarts what failed: env {index}" for index in range(5)]
    assert said[5:] == ["vecenv restarts what failed: env 1000 (and 995 restarts more since the last of these lines)"]


def test_a_record_can_be_read() -> None:
    record = ErrorRecord(3, 1, 77, "step", ConnectionError("gone\nfar"), "", time.monotonic() - 3600)
    assert abs(datetime.now().astimezone() - timedelta(hours=1) - record.when) < timedelta(seconds=5)
    assert str(record) == f"{record.when:%Y-%m-%d %H:%M:%S} env 3 (worker 1, pid 77), step: ConnectionError: gone"
    whole = ErrorRecord(None, 1, 77, "step", ConnectionError("gone"), "", time.monotonic())
    assert " worker 1, pid 77, step: " in str(whole)
    death = WorkerDied("worker 1 (pid 77, envs 2-3) died during step: it hung\nits stack", worker=1, pid=77)
    record = ErrorRecord(None, 1, 77, "step", death, "", time.monotonic())
    said = "WorkerDied: worker 1 (pid 77, envs 2-3) died during step: it hung"
    assert str(record) == f"{record.when:%Y-%m-%d %H:%M:%S} {said}"  # each thing once
    assert " env 0 (in the calling process), reset: " in str(ErrorRecord(0, -1, 5, "reset", ValueError(), "", 0.0))


class Stuck(Flaky):
    """Hangs where the other one raises."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        if self._left <= 0:
            threading.Event().wait(250)
        return np.zeros(2, np.float32), 0.0, False, False, {}


@pytest.mark.linux
def test_the_first_line_about_a_hang_says_where(caplog: pytest.LogCaptureFixture) -> None:
    """The log and ``print(record)`` show no more than that line; the stack stands below."""
    kind = {"on_failure": "restart", "restart_limit": 0, "step_timeout": 0.3}
    with started([partial(Stuck, 1)] * 2, num_workers=1, **kind) as envs:
        with pytest.raises(RestartsExhausted) as caught:
            envs.step([0, 0])
        (record,) = envs.errors
    line = Stuck.step.__code__.co_firstlineno + 3
    where = f"it hung for more than 0.3 seconds and was killed at test_restart_budget.py:{line} in step"
    assert str(record).endswith(where)
    assert where in str(caught.value)
    assert "threading.py" in record.traceback.partition("its stack:")[2]


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([(threading.__file__, 327, "wait"), ("/a/my env.py", 22, "step"), ("/a/b.py", 9, "step")], "my env.py:22 in step"),
        ([("/usr/site-packages/gymnasium/core.py", 7, "step")], "core.py:7 in step"),
        ([(threading.__file__, 327, "wait")], "threading.py:327 in wait"),
        ([], ""),
    ],
)
def test_the_place_of_a_stack(frames: list[tuple[str, int, str]], said: str) -> None:
    lines = [f'  File "{file}", line {line} in {function}' for file, line, function in frames]
    assert place("\n".join(["Current thread 0x00007f37 (most recent call first):", *lines])) == said
