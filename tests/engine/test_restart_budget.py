"""Tests of restart budgets (``on_failure="restart"``), of log lines about restarts, and of records of failures."""

from __future__ import annotations

import ctypes
import inspect
import logging
import math
import os
import re
import signal
import threading
import time
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from envs import ReturningEnv, ready_engine
from gymnasium.spaces import Box, Discrete
from signals import signal_handler

import vecenv
from vecenv import Restart
from vecenv.errors import ErrorRecord, RestartsExhausted, StepTimeout, WorkerDied
from vecenv.system.reporting import RestartLog
from vecenv.system.restart_budget import RestartBudget
from vecenv.system.supervision import StackFile, innermost_location


class RaisingEnv(gym.Env[Any, Any]):
    """An environment that raises in its step number ``failing_step`` and in all later ones."""

    observation_space = Box(-1.0, 1.0, (2,), np.float32)
    action_space = Discrete(2)

    def __init__(self, failing_step: int) -> None:
        self._steps_left = failing_step

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps_left -= 1
        if self._steps_left <= 0:
            raise ConnectionError("simulator lost its connection")
        return np.zeros(2, np.float32), 0.0, False, False, {}


def step_until_exhausted(failing_steps: list[int], steps: int, **options: Any) -> tuple[int, Exception | None]:
    """Step until the budget is exhausted, at most ``steps`` times. Return the number of restarts, and the error or ``None``.

    Each environment fails in its step with the number in ``failing_steps``, counted since it was built.
    """
    fns = [partial(RaisingEnv, failing_step) for failing_step in failing_steps]
    envs = vecenv.AsyncVectorEnv(fns, num_workers=1, on_failure=Restart(**options))
    try:
        envs.reset(seed=1)
        for _ in range(steps):
            envs.step(np.zeros(len(fns), np.int64))
    except RestartsExhausted as error:
        return int(envs.stats()["restarts"]), error
    else:
        return int(envs.stats()["restarts"]), None
    finally:
        envs.close()


def test_many_occasionally_failing_environments_continue() -> None:
    """Each environment has its own budget, so there is no common limit of five restarts per minute."""
    failing_steps = [60 + 5 * index for index in range(8)]
    restarts, error = step_until_exhausted(failing_steps, 200)
    assert error is None
    assert restarts == sum(200 // failing_step for failing_step in failing_steps) > 5


def test_always_failing_environment_exhausts_its_budget_after_five_restarts() -> None:
    restarts, error = step_until_exhausted([10**9] * 7 + [1], 100)
    assert restarts == 5
    text = str(error)
    assert "env 7 needed more than 5 restarts within 60 seconds" in text
    assert "Restart(limit=N)" in text
    assert text.count("env 7: ConnectionError: simulator lost its connection") == 5
    assert isinstance(error, RestartsExhausted)
    assert error.envs == (7,)


def test_explicit_limit_is_shared_by_all_environments_and_named_in_the_error() -> None:
    restarts, error = step_until_exhausted([3] * 2, 100, limit=6, period=30.0)
    assert restarts == 6
    text = "more than 6 restarts within 30 seconds were needed, which on_failure=Restart(limit=, period=) does not allow"
    assert text in str(error)


def test_restarts_that_exceed_the_budget_together_are_neither_counted_nor_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Four environments fail together twice. The second time, only two restarts are left, so none is restarted."""
    with caplog.at_level(logging.WARNING, "vecenv"):
        restarts, error = step_until_exhausted([3] * 4, 100, limit=6)
    assert isinstance(error, RestartsExhausted)
    assert restarts == len(caplog.records) == 4


class RaisingForActionEnv(RaisingEnv):
    """An environment that raises for action 1."""

    def __init__(self) -> None:
        super().__init__(10**9)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == 1:
            raise ConnectionError("simulator lost its connection")
        return super().step(action)


def test_restarts_that_exceed_the_budget_together_leave_it_unchanged() -> None:
    with ready_engine([RaisingForActionEnv] * 2, num_workers=1, on_failure=Restart(1)) as envs:
        with pytest.raises(RestartsExhausted):
            envs.step([1, 1])
        envs.reset(seed=1)
        assert envs.step([0, 1])[3].tolist() == [False, True]
        envs.step([0, 0])
        with pytest.raises(RestartsExhausted):
            envs.step([0, 1])


def test_infinite_limit_never_exhausts_the_budget() -> None:
    restarts, error = step_until_exhausted([1], 20, limit=math.inf)
    assert (restarts, error) == (10, None)


def test_refunded_restart_can_be_spent_again() -> None:
    budget = RestartBudget(2, 60.0, lambda: 0.0)
    assert [budget.spend(f"cause {index}") for index in range(3)] == [True, True, False]
    budget.refund(1)
    assert [budget.spend(f"cause {index}") for index in range(2)] == [True, False]


def test_budget_grows_with_the_steps_of_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget is five restarts, plus one per 1,000 steps of these environments since the oldest restart in the period."""
    now, steps = 0.0, 0
    monkeypatch.setattr("vecenv.system.restart_budget.time", SimpleNamespace(monotonic=lambda: now))
    budget = RestartBudget(None, 60.0, lambda: steps)
    assert [budget.spend("env 3", [3]) for _ in range(6)] == [True] * 5 + [False]
    assert budget.spend("env 4", [4])
    steps = 999
    assert not budget.spend("env 3", [3])
    steps = 1000
    assert [budget.spend("env 3", [3]) for _ in range(2)] == [True, False]
    assert [budget.spend("worker", range(8, 16)) for _ in range(6)] == [True] * 5 + [False]
    steps = 1250  # 250 more steps of 8 environments: 2,000 steps in total
    assert [budget.spend("worker", range(8, 16)) for _ in range(3)] == [True, True, False]
    assert "envs 8-15 needed more than 7 restarts" in budget.explain_exhaustion("worker", range(8, 16))
    now = 60.1
    assert budget.spend("env 3", [3])


def test_budget_does_not_depend_on_the_steps_of_loaded_states() -> None:
    with ready_engine([RaisingForActionEnv], num_workers=1, on_failure="restart") as envs:
        early = envs.state_dict(verify=False)
        late = {**early, "counters": (10**6, 1, 0)}
        envs.load_state_dict(late)
        envs.step([1])
        for _ in range(4):
            envs.load_state_dict(early)
            assert envs.step([1])[3].tolist() == [True]
        envs.load_state_dict(late)
        with pytest.raises(RestartsExhausted, match="more than 5 restarts"):
            envs.step([1])


def test_exhausted_budget_lists_only_the_causes_of_one_environment() -> None:
    budget = RestartBudget(None, 60.0, lambda: 0.0)
    for index in range(5):
        assert budget.spend(f"env 1: {index}", [1])
        assert budget.spend(f"env 2: {index}", [2])
    assert not budget.spend("env 1: 5", [1])
    causes = [f"- env 1: {index}" for index in range(1, 6)]
    assert budget.explain_exhaustion("env 1: 5", [1]).splitlines()[1:] == causes


def test_each_restart_is_logged_once_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vecenv"):
        assert step_until_exhausted([10**9, 4], 9)[0] == 2
    messages = [record.getMessage() for record in caplog.records if record.name == "vecenv"]
    line = inspect.getsourcelines(RaisingEnv.step)[1] + 3
    location = f"{Path(__file__).name}:{line} in step"
    cause = f"env 1: ConnectionError: simulator lost its connection, at {location}"
    assert messages == [f"vecenv restarts after a failure: {cause}"] * 2


def test_restart_log_is_rate_limited(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("vecenv.system.reporting.time", SimpleNamespace(monotonic=lambda: now))
    log = RestartLog()
    for index in range(1000):
        log.log(f"env {index}")
    now = 10.0
    log.log("env 1000")
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:5] == [f"vecenv restarts after a failure: env {index}" for index in range(5)]
    assert lines[5:] == ["vecenv restarts after a failure: env 1000 (and 995 more restarts since the last such line)"]


@pytest.mark.parametrize(("restarts", "last_line"), [(5, None), (6, "another failure"), (8, "3 more failures")])
def test_closing_the_log_reports_unlogged_restarts(
    caplog: pytest.LogCaptureFixture, restarts: int, last_line: str | None
) -> None:
    log = RestartLog()
    for index in range(restarts):
        log.log(f"env {index}")
    log.close()
    log.close()  # logs nothing
    lines = [record.getMessage() for record in caplog.records][5:]
    latest = f" since the last such line; the latest: env {restarts - 1}"
    assert lines == ([] if last_line is None else [f"vecenv restarts after {last_line}{latest}"])


def test_closing_the_engine_reports_unlogged_restarts(caplog: pytest.LogCaptureFixture) -> None:
    with ready_engine([lambda: RaisingEnv(1)] * 6, num_workers=0, on_failure=Restart(100)) as envs:
        envs.step(np.zeros(6, int))
        assert len(caplog.records) == 5
        envs.close()
    assert "after another failure since the last such line; the latest: env 5: " in caplog.records[-1].getMessage()


def test_str_of_an_error_record_names_time_place_and_error() -> None:
    record = ErrorRecord(3, 1, 77, "step", ConnectionError("gone\nfar"), "", time.monotonic() - 3600)
    assert abs(datetime.now().astimezone() - timedelta(hours=1) - record.when) < timedelta(seconds=5)
    assert str(record) == f"{record.when:%Y-%m-%d %H:%M:%S} env 3 (worker 1, pid 77), step: ConnectionError: gone"
    worker_record = ErrorRecord(None, 1, 77, "step", ConnectionError("gone"), "", time.monotonic())
    assert " worker 1, pid 77, step: " in str(worker_record)
    death = WorkerDied("worker 1 (pid 77, envs 2-3) died during step: it hung\nits stack", worker=1, pid=77)
    record = ErrorRecord(None, 1, 77, "step", death, "", time.monotonic())
    text = "WorkerDied: worker 1 (pid 77, envs 2-3) died during step: it hung"
    assert str(record) == f"{record.when:%Y-%m-%d %H:%M:%S} {text}"  # worker, pid and command are not repeated
    assert " env 0 (in the calling process), reset: " in str(ErrorRecord(0, -1, 5, "reset", ValueError(), "", 0.0))
    row_record = ErrorRecord(0, -1, 5, "step", ValueError("env 0: observation: got None"), "", 0.0)
    assert str(row_record).endswith(" env 0 (in the calling process), step: ValueError: observation: got None")


def test_log_line_of_a_restart_names_the_environment_once(caplog: pytest.LogCaptureFixture) -> None:
    reset_result, wrong_step_result = (np.zeros(4, np.float32), {}), (np.zeros(9, np.float32), 0.0, False, False, {})
    with ready_engine([lambda: ReturningEnv([reset_result], [wrong_step_result])], on_failure="restart") as envs:
        envs.step([0])
    assert [record.getMessage().count("env 0") for record in caplog.records if record.name == "vecenv"] == [1]


class HangingEnv(RaisingEnv):
    """An environment that hangs where :class:`RaisingEnv` raises."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps_left -= 1
        if self._steps_left <= 0:
            threading.Event().wait(250)
        return np.zeros(2, np.float32), 0.0, False, False, {}


@pytest.mark.linux
def test_first_line_about_a_hang_contains_the_location(caplog: pytest.LogCaptureFixture) -> None:
    """The log and ``print(record)`` show only the first line; the stack is in the following lines."""
    options = {"on_failure": Restart(0), "step_timeout": 0.3}
    with ready_engine([partial(HangingEnv, 1)] * 2, num_workers=1, **options) as envs:
        with pytest.raises(RestartsExhausted) as caught:
            envs.step([0, 0])
        (record,) = envs.errors
    line = HangingEnv.step.__code__.co_firstlineno + 3
    reason = f"it hung for more than 0.3 seconds at test_restart_budget.py:{line} in step, and was killed"
    assert str(record).endswith(reason)
    assert "env 0, of envs 0-1) died during step: " in str(record)
    assert reason in str(caught.value)
    location = rf"env 0, of envs 0-1, worker 0, pid \d+, during step, at test_restart_budget.py:{line} in step"
    assert [bool(re.fullmatch(location, text)) for text in caught.value.where.values()] == [True, True]
    assert "threading.py" in record.traceback.partition("its stack:")[2]


@pytest.mark.linux
def test_rest_of_a_stack_that_arrives_late_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is killed when its environment's frames have been read; it may still be writing its own frames."""

    def clear_then_write_the_rest(stack_file: StackFile) -> None:
        has_stack = bool(stack_file.read())
        clear(stack_file)
        if has_stack:
            os.write(stack_file.fd, b'  File "<frozen runpy>", line 88 in _run_code\n')

    clear = StackFile.clear
    monkeypatch.setattr(StackFile, "clear", clear_then_write_the_rest)
    options = {"on_failure": Restart(0), "step_timeout": 0.3}
    with ready_engine([partial(HangingEnv, 1)], num_workers=1, **options) as envs:
        with pytest.raises(RestartsExhausted) as caught:
            envs.step([0])
        (record,) = envs.errors
    assert caught.value.where[0].endswith(f"at test_restart_budget.py:{HangingEnv.step.__code__.co_firstlineno + 3} in step")
    assert "runpy" not in record.traceback


class SleepingEnv(gym.Env[Any, Any]):
    """An environment that raises on action 1 and sleeps on action 2; it takes long to build again."""

    observation_space, action_space = Box(-1, 1, (2,), np.float32), Discrete(3)

    def __init__(self, file: Path) -> None:
        time.sleep(0.75 * file.exists())
        file.touch()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == 1:
            raise RuntimeError("broken")
        time.sleep(0.4 * (action == 2))
        return np.zeros(2, np.float32), 0.0, False, False, {}


@pytest.mark.long
def test_step_that_waits_behind_a_slow_rebuild_has_its_full_time(tmp_path: Path) -> None:
    env_fns = [partial(SleepingEnv, tmp_path / str(row)) for row in range(2)]
    with ready_engine(env_fns, num_workers=1, on_failure="restart", step_timeout=0.5) as envs:
        envs.send([1], [0])
        with pytest.raises(StepTimeout):
            envs.recv(0.2, count=1)  # finds the failure, and rebuilds the environment
        envs.send([2], [1])
        assert sorted(envs.recv(count=2)[4]["env_id"].tolist()) == [0, 1]
        assert len(envs.errors) == envs.stats()["restarts"] == 1


@pytest.mark.long
def test_time_limit_of_a_rebuild_excludes_the_messages_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock jumps twice while other rows are stepped. The jumps together, but not each, exceed the time limit."""
    env_fns, monotonic = [partial(SleepingEnv, tmp_path / str(row)) for row in range(3)], time.monotonic
    options = {"step_timeout": 100.0, "worker_options": vecenv.WorkerOptions(start_timeout=100.0)}
    with ready_engine(env_fns, num_workers=1, on_failure="restart", **options) as envs:
        for row, action in enumerate([1, 2, 2]):
            envs.send([action], [row])
        restarted = {}
        for received in range(3):
            monkeypatch.setattr(time, "monotonic", lambda jump=150.0 * received: monotonic() + jump)
            *_, truncations, infos = envs.recv(count=1)
            restarted[int(infos["env_id"][0])] = bool(truncations[0])
        monkeypatch.undo()
        assert restarted == {1: False, 2: False, 0: True}
        assert [str(record.error) for record in envs.errors] == ["broken"]


class BrokenResetEnv(RaisingEnv):
    """An environment that raises in its first step, and in each reset while a file exists."""

    def __init__(self, file: Path) -> None:
        super().__init__(1)
        self._file = file

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if self._file.exists():
            raise ConnectionError("simulator does not reply")
        return super().reset(seed=seed)


@pytest.mark.parametrize(
    ("num_workers", "method", "count"), [(4, "recv", 2), (4, "recv", 4), (1, "recv", 4), (1, "step_wait", 4)]
)
def test_timeout_ends_a_wait_in_which_rebuilds_keep_failing(
    num_workers: int, method: str, count: int, tmp_path: Path
) -> None:
    """An old version looked at the clock only when no worker had replied."""
    env_fns, options = [partial(BrokenResetEnv, tmp_path / "broken")] * 4, {"on_failure": Restart(limit=math.inf)}
    with signal_handler(signal.SIGALRM, TimeoutError), ready_engine(env_fns, num_workers=num_workers, **options) as envs:
        envs._driver.pool._spin = lambda poll: poll(1000.0)  # as if each rebuild failed within the spin time
        (tmp_path / "broken").touch()
        if method == "recv":
            envs.send([0] * 4, range(4))
            wait = partial(envs.recv, count=count)
        else:
            envs.step_async([0] * 4)
            wait = envs.step_wait
        signal.setitimer(signal.ITIMER_REAL, 20.0)  # ends the wait if the timeout does not
        with pytest.raises(StepTimeout):
            wait(timeout=0.2)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        (tmp_path / "broken").unlink()
        *_, truncations, infos = wait()
        assert truncations.tolist() == infos["restarted"].tolist() == [True] * count


class SlowEnv(SleepingEnv):
    """An environment with slow steps, which hangs on action 3."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(3600 if action == 3 else 0.05)
        return super().step(action)


@pytest.mark.long
def test_step_timeout_ends_a_hang_after_a_rebuild_although_rows_were_always_in_flight(tmp_path: Path) -> None:
    env_fns = [partial(SlowEnv, tmp_path / str(row)) for row in range(2)]
    with ready_engine(env_fns, num_workers=1, on_failure="restart", step_timeout=1.0) as envs:
        envs.send([1], [0])
        envs.send([0], [1])
        for action in (0, 0, 0, 0, 3):
            envs.send([action], envs.recv(count=1)[4]["env_id"])
        began = time.monotonic()
        envs.recv(count=2)
        assert time.monotonic() - began < 20.0, "the time limit was that of a rebuild"
        assert envs.errors[-1].error.timeout == 1.0


class CrashingEnv(RaisingEnv):
    """An environment that crashes its process on a nonzero action, on reset options, or when ``crash`` is called."""

    def __init__(self) -> None:
        super().__init__(10**9)

    def crash(self) -> None:
        ctypes.string_at(0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if options:
            self.crash()
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action:
            self.crash()
        return super().step(action)


def crash_one_row(env: Any, row: int) -> None:
    if env.index == row:
        env.crash()


def crash_in_send(envs: Any, row: int) -> None:
    envs.send(np.array([0, 1]), [3, row])
    envs.recv(count=2)


@pytest.mark.sampled(4)
@pytest.mark.linux
@pytest.mark.parametrize("crashing_row", [4, 5, 6])
@pytest.mark.parametrize(
    ("command", "crash"),
    [
        ("step", lambda envs, row: envs.step(np.eye(7, dtype=int)[row])),
        ("step", crash_in_send),
        ("reset", lambda envs, row: envs.reset(options=[{"crash": True} if env == row else None for env in range(7)])),
        ("exec_func", lambda envs, row: envs.exec_func(crash_one_row, None, row)),
    ],
    ids=["step", "send", "reset", "exec_func"],
)
def test_first_line_about_a_crash_contains_the_environment_and_the_location(
    command: str, crash: Any, crashing_row: int
) -> None:
    with ready_engine([CrashingEnv] * 7, num_workers=2) as envs:
        envs.set_attr("index", list(range(7)))
        rows = next(rows for rows in envs.worker_rows if crashing_row in rows)
        with pytest.raises(WorkerDied) as caught:
            crash(envs, crashing_row)
        envs.close(terminate=True)
    line = CrashingEnv.crash.__code__.co_firstlineno + 1
    reason = f"env {crashing_row}, of envs {rows[0]}-{rows[-1]}) died during {command}: killed by SIGSEGV"
    assert f"{reason}, at test_restart_budget.py:{line} in crash" in str(caught.value)
    location = f"during {command}, at test_restart_budget.py:{line} in crash"
    assert list(caught.value.where) == list(rows)
    texts = caught.value.where.values()
    assert all(text.startswith(f"env {crashing_row}, of") and text.endswith(location) for text in texts)


@pytest.mark.parametrize(
    ("frames", "location"),
    [
        ([(threading.__file__, 327, "wait"), ("/a/my env.py", 22, "step"), ("/a/b.py", 9, "step")], "my env.py:22 in step"),
        ([("/usr/site-packages/gymnasium/core.py", 7, "step")], "core.py:7 in step"),
        ([("/usr/site-packages/numpy/numeric.py", 2, "ones"), ("/a/b.py", 9, "step")], "b.py:9 in step"),
        ([("numpy/random/mtrand.pyx", 2, "choice"), (vecenv.__file__, 4, "_"), ("/a/b.py", 9, "step")], "b.py:9 in step"),
        ([("numpy/random/mtrand.pyx", 2, "choice"), (vecenv.__file__, 4, "step")], "mtrand.pyx:2 in choice"),
        ([(threading.__file__, 327, "wait")], "threading.py:327 in wait"),
        ([], ""),
    ],
)
def test_innermost_location_is_outside_of_libraries_if_possible(frames: list[tuple[str, int, str]], location: str) -> None:
    lines = [f'  File "{file}", line {line} in {function}' for file, line, function in frames]
    assert innermost_location("\n".join(["Current thread 0x00007f37 (most recent call first):", *lines])) == location


class ActionEnv(RaisingEnv):
    """An environment that raises for action 1, and ends its process for action 2."""

    action_space = Discrete(3)

    def __init__(self) -> None:
        super().__init__(10**6)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == 2:
            os._exit(7)
        self._steps_left = 0 if action == 1 else 2
        return super().step(action)


@pytest.mark.parametrize("use_caller", [False, True])
def test_exhausted_budget_names_the_worker_of_the_environment_that_raised(use_caller: bool) -> None:
    options = {"num_workers": 2, "use_caller": use_caller, "on_failure": Restart(1)}
    with ready_engine([ActionEnv] * 4, **options) as envs:
        pid = os.getpid() if use_caller else envs.processes[0].pid
        envs.step([0, 0, 0, 2])
        with pytest.raises(RestartsExhausted) as caught:
            envs.step([1, 0, 0, 0])
    error = caught.value
    assert (error.worker, error.pid, error.exitcode, error.envs) == (-1 if use_caller else 0, pid, None, (0,))


class StepCountingEnv(RaisingEnv):
    """An environment that counts its steps over all episodes."""

    steps = 0

    def __init__(self) -> None:
        super().__init__(10**6)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return super().step(action)


@pytest.mark.parametrize("use_caller", [False, True])
def test_reset_after_an_interrupted_write_has_every_environment_execute_the_step(
    use_caller: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ready_engine([StepCountingEnv] * 4, num_workers=2, use_caller=use_caller) as envs:

        def interrupt() -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(envs._driver.pool, "write_to_all", interrupt)
            with pytest.raises(KeyboardInterrupt):
                envs.step(np.zeros(4, np.int64))
        envs.reset()
        assert envs.get_attr("steps") == (1, 1, 1, 1)
