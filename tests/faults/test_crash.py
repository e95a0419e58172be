"""Tests of environments that raise and workers that die, of the results afterwards, and of the reported stacks."""

from __future__ import annotations

import functools
import multiprocessing.forkserver
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from envs import open_engine
from faulty_envs import ForkAndReturnLater, Pause, RowChecker, faulty_env_fn, make_env_fns, write_pid_then
from gymnasium.vector import AutoresetMode
from observe import (
    FAULT_MARKS,
    METHODS,
    WAIT_SECONDS,
    WITHOUT_SPAWN,
    Launch,
    assert_error_names,
    format_error,
    is_running,
    still_running,
    wait_for_file,
    worker_pids,
)
from sampling import each_once

from vecenv import Restart
from vecenv.engine import worker_process
from vecenv.errors import EnvError, EnvFailed, RemoteTraceback, RestartsExhausted, StepTimeout, WorkerDied
from vecenv.system.supervision import ProcessWatch
from vecenv.testing.faulty import KeywordOnlyError, TwoArgumentsError, UnprintableError, WitnessEnv

pytestmark = FAULT_MARKS


# --- environments that raise and workers that die: rows 1 to 14 (except 5) of ``FAULTS.md`` -----

ENV, WORKER = 3, 1  # the environment that fails, and its worker: there are four environments in two workers
ACTIONS = [1, 2, 3, 4]


@dataclass(frozen=True)
class Case:
    """A fault and the expected error.

    Attributes:
        fault: A key of ``FAULTS``.
        error_class: The class of the exception.
        patterns: Regular expressions that the text of the exception must match, with its notes and causes.
        exitcode: The exit code of the worker; ``None`` if it must continue.
    """

    fault: str
    error_class: type[Exception]
    patterns: tuple[str, ...]
    exitcode: int | None = None


CASES = [
    Case("raises", ValueError, ("ValueError: the environment is out of order", r"faulty\.py.*in raises")),
    Case("two_arguments_error", EnvError, ("TwoArgumentsError", "42: needs two arguments", "in two_arguments_error")),
    Case("keyword_only_error", EnvError, ("KeywordOnlyError", "needs a keyword", "in keyword_only_error")),
    Case("unpicklable_error", EnvError, ("UnpicklableError", "holds a lock", "in unpicklable_error")),
    Case("evil_error", EnvError, ("EvilError", "ends the process that unpickles it")),
    Case("evil_elsewhere_error", EnvError, ("EvilElsewhereError", "ends every other process that unpickles it")),
    Case("unprintable_error", UnprintableError, ("UnprintableError",)),
    Case("keyboard_interrupt", EnvError, ("KeyboardInterrupt", "raised by an environment")),
    Case("sys_exit", EnvError, ("SystemExit", r"\b3\b", "in sys_exit")),
    Case("exit_now", WorkerDied, (r"exit code 0\b",), 0),
    Case("kill", WorkerDied, ("SIGKILL", "(?i)out of memory"), -signal.SIGKILL),
    Case("segfault", WorkerDied, ("SIGSEGV", r"faulty\.py.*in segfault"), -signal.SIGSEGV),
    Case("abort", WorkerDied, ("SIGABRT", r"faulty\.py.*in abort"), -signal.SIGABRT),
    Case("bus_error", WorkerDied, ("SIGBUS", r"faulty\.py.*in bus_error"), -signal.SIGBUS),
    Case("arithmetic_error", WorkerDied, ("SIGFPE", r"faulty\.py.*in arithmetic_error"), -signal.SIGFPE),
]

MOMENTS: dict[str, dict[str, Any]] = {
    "step": {"step": 2},
    "reset": {"reset": 2},
    "autoreset": {"reset": 2},
    "call": {"step": 10**9},  # never: the test calls ``trigger``
}

OTHER_MOMENTS = [
    pytest.param(case, moment, id=f"{case.fault}-{moment}")
    for case in CASES
    if case.fault in ("raises", "unpicklable_error", "sys_exit", "segfault")
    for moment in ("reset", "autoreset", "call")
]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fault)
def test_fault_in_step_raises_one_complete_error(case: Case, launch: Launch, tmp_path: Path) -> None:
    """The error names environment, worker, pid and command. After a reset, everything works again."""
    check_fault(case, "step", launch, tmp_path)


@pytest.mark.sampled(6)
@WITHOUT_SPAWN
@pytest.mark.parametrize(("case", "moment"), OTHER_MOMENTS)
def test_fault_in_another_call_raises_one_complete_error(case: Case, moment: str, launch: Launch, tmp_path: Path) -> None:
    """A few of the faults occur in a reset, an automatic reset and a call."""
    check_fault(case, moment, launch, tmp_path)


def check_fault(case: Case, moment: str, launch: Launch, tmp_path: Path) -> None:
    """Let a fault occur at a moment; check the error, its record, the processes, and the next calls."""
    env_fn = faulty_env_fn(ENV, case.fault, {"length": 2}, once=tmp_path / "once", **MOMENTS[moment])
    envs = launch(make_env_fns(4, {ENV: env_fn}, length=2), num_workers=2)
    checker = RowChecker.start(envs, seed=7, length=2)
    pids = worker_pids(envs)
    checker.check_step(ACTIONS, envs.step(ACTIONS))
    if moment == "autoreset":
        checker.check_step(ACTIONS, envs.step(ACTIONS))  # the last step of the episode
    command = "step" if moment == "autoreset" else moment
    call = {
        "step": lambda: envs.step(ACTIONS),
        "reset": envs.reset,
        "autoreset": lambda: envs.step(ACTIONS),
        "call": lambda: envs.call("trigger", case.fault, only=ENV),
    }[moment]
    started_at = time.monotonic()
    with pytest.raises(case.error_class) as caught:
        call()
    duration = time.monotonic() - started_at

    error = caught.value
    text = format_error(error)
    assert type(error) is case.error_class
    for pattern in case.patterns:
        assert re.search(pattern, text), f"{pattern!r} is not in:\n{text}"
    assert_error_names(error, env=ENV, worker=WORKER, pid=pids[WORKER], command=command)
    if case.exitcode is None:
        assert isinstance(error.__cause__, RemoteTraceback)
        assert any(f"env {ENV}" in note for note in getattr(error, "__notes__", None) or [str(error)])
        assert worker_pids(envs) == pids
        assert all(map(is_running, pids))
    else:
        assert duration < WAIT_SECONDS
        assert (error.worker, error.pid, error.exitcode, error.command) == (WORKER, pids[1], case.exitcode, command)
        assert tuple(error.envs) == (2, 3)
        assert is_running(pids[0])
        assert not is_running(pids[1])
    record = envs.errors[-1]
    assert (record.worker, record.pid, record.command) == (WORKER, pids[WORKER], command)
    assert type(record.error) is case.error_class
    assert 0 <= time.monotonic() - record.time < 20

    if case.exitcode is not None:
        lost = {2, 3}
    else:
        lost = set() if moment == "call" else {ENV}  # a failed call is not a failed environment
    check_recovery(envs, checker, lost)
    check_close(envs)


def step_repeatedly(envs: Any, count: int) -> None:
    for _ in range(count):
        envs.step(ACTIONS[: envs.num_envs])


def check_recovery(envs: Any, checker: RowChecker, lost: set[int]) -> None:
    """Check that a reset after an error rebuilds only the lost environments, and that everything works again."""
    observations, infos = envs.reset(seed=20)
    rows = [WitnessEnv.read(row) for row in observations]
    assert {env for env, row in enumerate(rows) if row["life"] != checker.rows[env]["life"]} == lost
    assert [row["seed"] for row in rows] == list(range(20, 20 + len(rows)))
    assert all(rows[env]["episode"] == 1 and rows[env]["steps"] == 0 for env in lost)
    assert infos["tick"].tolist() == [0] * len(rows)
    next_checker = RowChecker(len(rows), length=checker.length)
    next_checker.rows = rows
    for _ in range(4):
        next_checker.check_step(ACTIONS, envs.step(ACTIONS))


def check_close(envs: Any) -> None:
    started_at = time.monotonic()
    envs.close()
    assert time.monotonic() - started_at < WAIT_SECONDS
    assert envs.closed


def test_all_failing_environments_are_reported(launch: Launch) -> None:
    """One environment of a worker and two of another fail in one step: the error names all, and all are recorded."""
    failing = {0: "raises", 2: "sys_exit", 3: "two_arguments_error"}
    envs = launch(make_env_fns(4, {env: faulty_env_fn(env, fault, step=1) for env, fault in failing.items()}), num_workers=2)
    envs.reset(seed=1)
    with pytest.raises(ValueError, match="out of order") as caught:
        envs.step(ACTIONS)
    text = format_error(caught.value)
    assert all(re.search(rf"\benvs?\b[^\n]*\b{env}\b", text) for env in failing), text
    records = sorted(envs.errors, key=lambda record: record.env)
    assert [record.env for record in records] == [0, 2, 3]
    assert [type(record.error) for record in records] == [ValueError, EnvError, EnvError]
    assert all(f"in {failing[record.env]}" in record.traceback for record in records)


def test_death_while_idle_is_reported_by_the_next_call(launch: Launch) -> None:
    """A worker is killed between two calls, as by the OOM killer."""
    envs = launch(make_env_fns(4), num_workers=2)
    checker = RowChecker.start(envs, seed=7)
    checker.check_step(ACTIONS, envs.step(ACTIONS))
    pids = worker_pids(envs)
    os.kill(pids[WORKER], signal.SIGKILL)
    assert not still_running([pids[WORKER]], WAIT_SECONDS)
    with pytest.raises(WorkerDied) as caught:
        envs.step(ACTIONS)
    error = caught.value
    assert re.search("SIGKILL", str(error))
    assert re.search("(?i)out of memory", str(error))
    assert (error.worker, error.pid, error.exitcode) == (WORKER, pids[WORKER], -signal.SIGKILL)
    assert error.command in ("idle", "step")
    assert tuple(error.envs) == (2, 3)
    assert f"(pid {error.pid}, envs 2-3) died" in str(error)  # names no single environment as the cause
    check_recovery(envs, checker, {2, 3})
    check_close(envs)


def test_death_before_a_request_leaves_no_late_reply(launch: Launch) -> None:
    """A worker dies before or during a step: later calls return no replies of the other worker to that step."""
    envs = launch(make_env_fns(4), num_workers=2)
    checker = RowChecker.start(envs, seed=7)
    for attempt in range(3):
        os.kill(worker_pids(envs)[attempt % 2], signal.SIGKILL)  # the next steps may begin before the worker is dead
        with pytest.raises(WorkerDied, match="SIGKILL"):
            step_repeatedly(envs, 1000)
        observations, _ = envs.reset(seed=attempt)
        checker.rows = [WitnessEnv.read(row) for row in observations]
        checker.done = [False] * 4
        assert {row["tick"] for row in checker.rows} == {0}
        for _ in range(3):
            checker.check_step(ACTIONS, envs.step(ACTIONS))


@pytest.mark.sampled(1)
def test_death_with_inherited_descriptors_is_noticed_at_once(launch: Launch, tmp_path: Path) -> None:
    """A forked helper of the environment still holds the worker's pipe, so the caller reads no end of file."""
    check_death_with_inherited_descriptors(launch, tmp_path)


@pytest.mark.parametrize("method", ["fork"], indirect=True)  # a fork server also reports the exit codes of its children
def test_death_with_inherited_descriptors_is_noticed_without_pidfds(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    check_death_with_inherited_descriptors(launch, tmp_path)


def check_death_with_inherited_descriptors(launch: Launch, tmp_path: Path) -> None:
    env_fn = faulty_env_fn(1, write_pid_then(tmp_path / "died", "fork_helper_and_die"), step=2, once=tmp_path / "once")
    envs = launch(make_env_fns(2, {1: env_fn}))
    envs.reset(seed=1)
    envs.step([0, 0])
    pid = worker_pids(envs)[1]
    started_at = time.monotonic()
    with pytest.raises(WorkerDied, match="SIGKILL") as caught:
        envs.step([0, 0])
    assert time.monotonic() - started_at < WAIT_SECONDS
    assert_error_names(caught.value, env=1, worker=1, pid=pid, command="step")
    check_close(envs)


@pytest.mark.long
@pytest.mark.parametrize("method", ["forkserver"], indirect=True)
def test_death_of_the_fork_server_does_not_affect_workers(launch: Launch) -> None:
    """Workers continue, their deaths are still noticed, and new workers can be started."""
    envs = launch(make_env_fns(4), num_workers=2)
    checker = RowChecker.start(envs, seed=7)
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    os.kill(server, signal.SIGKILL)
    assert not still_running([server], WAIT_SECONDS)
    for _ in range(3):
        checker.check_step(ACTIONS, envs.step(ACTIONS))
    pid = worker_pids(envs)[WORKER]
    os.kill(pid, signal.SIGKILL)
    started_at = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        envs.step(ACTIONS)
    assert time.monotonic() - started_at < WAIT_SECONDS
    assert (caught.value.worker, caught.value.pid) == (WORKER, pid)
    check_recovery(envs, checker, {2, 3})
    check_close(envs)


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "count"),
    [
        # with the other methods, 64 workers take minutes to start
        pytest.param(method, count, marks=pytest.mark.slow if count == 64 and method != "fork" else ())
        for method in METHODS
        for count in (1, 8, 64)
    ],
    indirect=["method"],
)
@pytest.mark.timeout(300, method="signal")
def test_simultaneous_deaths_raise_one_error(launch: Launch, count: int) -> None:
    """Each environment kills its own worker; the error names all environments."""
    envs = launch([faulty_env_fn(env, "kill", step=2) for env in range(count)])
    envs.reset(seed=1)
    envs.step([0] * count)
    started_at = time.monotonic()
    with pytest.raises(WorkerDied, match="SIGKILL") as caught:
        envs.step([0] * count)
    assert time.monotonic() - started_at < WAIT_SECONDS
    assert tuple(caught.value.envs) == tuple(range(count))
    assert all(re.search(rf"\b{env}\b", format_error(caught.value)) for env in (0, count // 2, count - 1))
    check_close(envs)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ending", ["close", "terminate", "death", "hang"])
def test_programs_of_environments_end_with_the_worker(launch: Launch, ending: str, tmp_path: Path) -> None:
    """A program of an environment ends when its worker is closed, terminated or killed, or is stopped and then closed."""
    envs = launch(make_env_fns(2, {1: faulty_env_fn(1, "start_subprocess", step=1)}))
    envs.reset(seed=1)
    *_, infos = envs.step([0, 0])
    helper = int(infos["subprocess"][1])
    assert is_running(helper)
    if ending == "death":
        os.kill(worker_pids(envs)[1], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            envs.step([0, 0])
    elif ending == "hang":
        os.kill(worker_pids(envs)[1], signal.SIGSTOP)
        envs.step_async([0, 0])
        with pytest.warns(UserWarning, match="pending call"):
            envs.close(timeout=0.2)
    if not envs.closed:
        envs.close(terminate=ending == "terminate")
    assert not still_running([helper], WAIT_SECONDS)


@pytest.mark.linux
def test_process_group_of_a_dead_worker_is_ended_before_its_pid_can_be_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    pid_existed: list[bool] = []
    monkeypatch.setattr(worker_process, "end_group", lambda pids: pid_existed.extend(map(psutil.pid_exists, pids)))
    with open_engine(make_env_fns(1, {0: faulty_env_fn(0, "exit_now", step=1)}), num_workers=1, context="fork") as envs:
        envs.reset(seed=1)
        with pytest.raises(WorkerDied):
            envs.step([1])
        assert pid_existed == [True]


def test_worker_that_loses_its_caller_ends_its_helpers(launch: Launch) -> None:
    """A worker that reads the end of file of its pipe ends its helpers before it exits."""
    envs = launch(make_env_fns(2, {1: faulty_env_fn(1, "start_subprocess", step=1)}))
    envs.reset(seed=1)
    *_, infos = envs.step([0, 0])
    helper, pid = int(infos["subprocess"][1]), worker_pids(envs)[1]
    os.close(envs._pool.workers[1].channel.out)
    assert not still_running([pid, helper], WAIT_SECONDS)
    with pytest.raises(WorkerDied):
        envs.step([0, 0])
    check_close(envs)


def test_forked_copy_of_an_environment_never_replies(launch: Launch) -> None:
    """An environment forks, and both processes return from ``step``: only the worker replies."""
    envs = launch(make_env_fns(2, {1: faulty_env_fn(1, "fork_and_return", step=2)}))
    checker = RowChecker.start(envs)
    pids = worker_pids(envs)
    for step in range(8):
        checker.check_step([step, step], envs.step([step, step]))
    assert worker_pids(envs) == pids
    check_close(envs)


@WITHOUT_SPAWN
@pytest.mark.parametrize("exits", [False, True], ids=["returns", "exits"])
@pytest.mark.parametrize("call", ["step", "reset"])
def test_forked_copy_never_writes_into_rows(launch: Launch, call: str, exits: bool, tmp_path: Path) -> None:
    """A forked copy that returns after later steps does not change their rows."""
    moment: Any = {"step": {"step": 2}, "reset": {"reset": 1}}[call]
    envs = launch(make_env_fns(2, {1: faulty_env_fn(1, ForkAndReturnLater(tmp_path, exits), **moment)}))
    checker = RowChecker.start(envs)
    for step in range(5):
        checker.check_step([step, step], envs.step([step, step]))
    arrays = envs._driver.arrays
    before = [array.copy() for array in (envs.observations, arrays.rewards, arrays.terminations, arrays.truncations)]
    (tmp_path / "go").touch()
    assert not still_running([int((tmp_path / "copy").read_text())], 10.0)
    for old, new in zip(before, (envs.observations, arrays.rewards, arrays.terminations, arrays.truncations), strict=True):
        np.testing.assert_array_equal(old, new)
    checker.check_step([5, 5], envs.step([5, 5]))
    check_close(envs)


def test_worker_without_its_pipe_counts_as_dead(launch: Launch, tmp_path: Path) -> None:
    """An environment closes descriptors of its worker. The error does not mention the OOM killer."""
    env_fn = faulty_env_fn(1, "close_descriptors", step=1, once=tmp_path / "once")
    envs = launch(make_env_fns(2, {1: env_fn}))
    envs.reset(seed=1)
    pid = worker_pids(envs)[1]
    with pytest.raises(WorkerDied) as caught:
        step_repeatedly(envs, 2)
    assert_error_names(caught.value, env=1, worker=1, pid=pid, command="step")
    assert "memory" not in str(caught.value)
    assert not is_running(pid)
    check_close(envs)


def test_siblings_of_a_dead_worker_step_exactly_once(launch: Launch, tmp_path: Path) -> None:
    """A worker dies while another one executes the same step: the environment of the other one steps exactly once."""
    slow = faulty_env_fn(0, write_pid_then(tmp_path / "slow", Pause(0.3)), step=1)
    stuck = faulty_env_fn(1, write_pid_then(tmp_path / "stuck", "sleep"), step=1, once=tmp_path / "once")
    envs = launch([slow, stuck])
    checker = RowChecker.start(envs)
    envs.step_async([1, 1])
    wait_for_file(tmp_path / "slow")
    wait_for_file(tmp_path / "stuck")
    os.kill(worker_pids(envs)[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        envs.step_wait()
    envs.reset(options={"reset_mask": np.array([False, True])})
    observations, rewards, *_, infos = envs.step([1, 1])
    rows = [WitnessEnv.read(row) for row in observations]
    assert rows[0]["life"] == checker.rows[0]["life"]
    assert (rows[0]["tick"], rows[1]["tick"]) == (2, 1)
    assert (rewards.tolist(), infos["tick"].tolist()) == ([2 + 2 / 1024, 1 + 1 / 1024], [2, 1])
    checker.rows = rows
    for _ in range(3):
        checker.check_step([1, 1], envs.step([1, 1]))


def test_errors_with_two_arguments_or_a_keyword_cannot_be_unpickled() -> None:
    """No process can unpickle the errors of row 2; otherwise the table would need other examples."""
    for error in (TwoArgumentsError(1, "x"), KeywordOnlyError(reason="x")):
        with pytest.raises(TypeError):
            pickle.loads(pickle.dumps(error))


# --- Results after a failure are current, or repeat the latest ones; they contain no values of a dead worker

GO, DIE, RAISE = 0, 1, 2  # actions
COUNT = 4
RESETS = {  # the kind of reset, the options of the engine, and on_failure
    "whole": ("whole", {}, "raise"),
    "masked": ("masked", {}, "raise"),
    "by env_id": ("by env_id", {}, "raise"),
    "received row by row": ("received row by row", {}, "raise"),
    "whole, caller's share": ("whole", {"use_caller": True}, "raise"),
    "masked, caller's share": ("masked", {"use_caller": True}, "raise"),
    "whole, pickled": ("whole", {"shared_memory": False}, "raise"),
    "whole, restart": ("whole", {}, "restart"),
    "masked, restart": ("masked", {}, "restart"),
}


class StepInfoEnv(gymnasium.Env):
    """An environment with one-step episodes and step infos. Only resets of the last environment have an info."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.observation_space = gymnasium.spaces.Box(0, 10**6, (3,), np.int64)
        self.action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.full(3, seed or 1, np.int64), {"fresh": seed or 1} if self.index == COUNT - 1 else {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.full(3, 77, np.int64), 1.0, True, False, {"stale": 77}


def reset_rows(envs: Any, kind: str) -> tuple[Any, dict[str, Any], list[int]]:
    """Reset rows, each with the seed 10 + its index; return observations, infos and the indices of the rows."""
    if kind == "masked":
        mask = np.array([True, False, False, True])
        observations, infos = envs.reset(seed=10, options={"reset_mask": mask})
        return observations[mask], {key: value[mask] for key, value in infos.items()}, [0, 3]
    if kind == "by env_id":
        envs.reset_async([10, 11, 13], env_id=[0, 1, 3])
    elif kind == "received row by row":
        envs.reset_async(10)
    else:
        return *envs.reset(seed=10), list(range(COUNT))
    observations, *_, infos = envs.recv(count=3 if kind == "by env_id" else COUNT)
    ids = infos.pop("env_id").tolist()
    del infos["_env_id"]
    return observations, infos, ids


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("case", "mode"), each_once(list(RESETS), {mode.name: mode for mode in AutoresetMode}))
def test_reset_has_no_infos_of_a_dead_worker(launch: Launch, case: str, mode: AutoresetMode) -> None:
    """The last environment of a worker kills it after the others have stepped: the next reset has no infos of that step."""
    kind, options, on_failure = RESETS[case]
    env_fns = [functools.partial(StepInfoEnv, index) for index in range(COUNT)]
    envs = launch(env_fns, num_workers=1 if "use_caller" in options else 2, autoreset_mode=mode,
                  on_failure=on_failure, **options)  # fmt: skip
    envs.reset(seed=1)
    lost = envs.worker_rows[-1 if "use_caller" in options else 0]
    actions = [DIE if index == lost[-1] else GO for index in range(COUNT)]
    if on_failure == "raise":
        with pytest.raises(WorkerDied):
            envs.step(actions)
    else:
        _, _, _, truncations, infos = envs.step(actions)
        assert truncations[list(lost)].all()
        assert "stale" not in infos or not infos["_stale"][list(lost)].any()
    observations, infos, ids = reset_rows(envs, kind)
    seeds = [10 + index for index in ids]
    assert observations[:, 0].tolist() == seeds
    assert set(infos) == {"fresh", "_fresh"}
    assert infos["_fresh"].tolist() == [index == COUNT - 1 for index in ids]
    assert infos["fresh"].tolist() == [seed if index == COUNT - 1 else 0 for index, seed in zip(ids, seeds, strict=True)]


def test_no_call_reaches_a_failed_row_of_a_replaced_worker(launch: Launch) -> None:
    """Its new environment has not been reset, and its reset would keep what the call changed."""
    envs = launch([functools.partial(StepInfoEnv, index) for index in range(3)], num_workers=1)
    envs.reset(seed=1)
    with pytest.raises(WorkerDied):
        envs.step([GO, DIE, GO])
    envs.reset(options={"reset_mask": np.array([True, False, True])})
    for call in (
        lambda: envs.set_attr("x", 5),
        lambda: envs.exec_func(lambda env: setattr(env, "x", 5), [0, 1]),
        lambda: envs.call("get_wrapper_attr", "spec"),
        lambda: envs.set_next_options(seed=5),
    ):
        with pytest.raises(EnvFailed, match=r"env 1 failed earlier .*first: .*died"):
            call()
    assert envs.exec_func(lambda env: hasattr(env, "x"), [0, 2]) == (False, None, False)
    envs.reset(options={"reset_mask": np.array([False, True, False])})
    assert envs.exec_func(lambda env: hasattr(env, "x")) == (False, False, False)


class ConnectingEnv(StepInfoEnv):
    """An environment that cannot be built while ``refusal`` exists, which it then removes."""

    def __init__(self, index: int, refusal: Path) -> None:
        super().__init__(index)
        if refusal.exists():
            refusal.unlink()
            raise ConnectionRefusedError("the server is not up yet")


@pytest.mark.parametrize("mask", [None, [True, False]], ids=["all", "some"])
def test_death_is_not_reported_as_an_old_failure_to_build(launch: Launch, tmp_path: Path, mask: list[bool] | None) -> None:
    """The environment of a new worker cannot be built at first, but the reset builds it; later, the worker dies, too."""
    refusal = tmp_path / "refusal"
    envs = launch([functools.partial(ConnectingEnv, index, refusal) for index in range(2)])
    envs.reset(seed=1)
    with pytest.raises(WorkerDied):
        envs.step([DIE, GO])
    refusal.touch()
    envs.reset(options=mask and {"reset_mask": np.array(mask)})
    assert not refusal.exists()
    with pytest.raises(WorkerDied, match="SIGKILL"):
        envs.step([DIE, GO])


class InPlaceEnv(StepInfoEnv):
    """An environment that writes its observation into the batch, and may fail between two writes."""

    def observation_buffer(self, buffer: Any) -> None:
        self.buffer = buffer

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.buffer[...] = seed or 1
        return self.buffer, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.buffer[:1] = 77
        if action == RAISE:
            raise ValueError("between two writes")
        if action == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        self.buffer[1:] = 77
        return self.buffer, 1.0, False, False, {}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("fault", "error"), [(DIE, WorkerDied), (RAISE, ValueError)], ids=["death", "exception"])
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_half_written_observation_is_not_returned(
    launch: Launch, on_failure: str, fault: int, error: type[Exception]
) -> None:
    """Environment 1 fails while it writes. A reset of others returns zeros for it; with restarts, its last observation."""
    envs = launch([functools.partial(InPlaceEnv, index) for index in range(COUNT)], num_workers=2, on_failure=on_failure)
    envs.reset(seed=[5, 6, 7, 8])
    if on_failure == "raise":
        with pytest.raises(error):
            envs.step([GO, fault, GO, GO])
        expected = [0, 0, 0]
    else:
        envs.send([fault, GO], [1, 2])  # the results are never received
        expected = [6, 6, 6]
    observations, _ = envs.reset(seed=20, options={"reset_mask": np.array([False, False, True, True])})
    assert observations[2:].tolist() == [[22] * 3, [23] * 3]
    assert observations[1].tolist() == expected


class ClearingEnv(InPlaceEnv):
    """An environment that clears its buffer when it gets it."""

    def observation_buffer(self, buffer: Any) -> None:
        super().observation_buffer(buffer)
        buffer[...] = 0


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_finished_observation_is_not_cleared_by_a_new_worker(launch: Launch, on_failure: str) -> None:
    """The worker dies in environment 0, before ``recv`` has returned the step of environment 1."""
    envs = launch([functools.partial(ClearingEnv, index) for index in range(2)], num_workers=1, on_failure=on_failure)
    envs.reset(seed=[5, 6])
    envs.send([GO], [1])
    envs.exec_func(id, [0])  # after the step
    envs.send([DIE], [0])
    if on_failure == "raise":
        with pytest.raises(WorkerDied):
            envs.recv(count=2)
        envs.reset_async(env_id=[0], seed=5)
    observations, *_, infos = envs.recv(count=2)
    assert infos["env_id"].tolist() == [1, 0]
    assert observations.tolist() == [[77] * 3, [5] * 3]


class FailingResetEnv(InPlaceEnv):
    """An environment with resets that raise if it is the last one: it writes half an observation, and waits for a file."""

    def __init__(self, index: int, path: Path) -> None:
        super().__init__(index)
        self.path = path

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if self.index == COUNT - 1:
            self.buffer[:1] = 77
            self.path.with_suffix(".half").touch()
            wait_for_file(self.path)
            raise ValueError("between two writes")
        return super().reset(seed=seed, options=options)


@WITHOUT_SPAWN
def test_half_written_first_observation_is_not_kept(launch: Launch, tmp_path: Path) -> None:
    """With restarts, ``recv`` keeps the observations that it returns, but not one that is being written."""
    path = tmp_path / "file"
    envs = launch([functools.partial(FailingResetEnv, index, path) for index in range(COUNT)], on_failure=Restart(0))
    envs.reset_async(seed=[5, 6, 7, 8])
    wait_for_file(path.with_suffix(".half"))
    envs.recv(count=COUNT - 1)
    path.touch()
    with pytest.raises(RestartsExhausted):
        envs.recv(count=1)
    observations, _ = envs.reset(seed=20, options={"reset_mask": np.array([True] * (COUNT - 1) + [False])})
    assert observations.tolist() == [[20 + index] * 3 for index in range(COUNT - 1)] + [[0] * 3]


class UniqueObservationsEnv(StepInfoEnv):
    """An environment with unique observations. A reset deletes the file in its option ``fail``, if it exists, and raises."""

    def observe(self) -> Any:
        return np.frombuffer(os.urandom(24), np.int64) >> 44

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if options and (path := Path(options["fail"])).exists():
            path.unlink()
            raise ValueError("once")
        return self.observe(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        super().step(action)
        if action == RAISE:
            raise ValueError("this action raises")
        return self.observe(), 1.0, False, False, {}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("by_row", "shared_memory", "mode"),
    each_once(
        {"first ready": True, "lock-step": False},
        {"shared": True, "pickled": False},
        {mode.name: mode for mode in AutoresetMode},
    ),
)
def test_lost_row_repeats_its_last_returned_observation(
    launch: Launch, by_row: bool, shared_memory: bool, mode: AutoresetMode, tmp_path: Path
) -> None:
    """Rows fail several times: by a death, by an exception, and in a reset."""
    env_fns = [functools.partial(UniqueObservationsEnv, index) for index in range(2)]
    envs = launch(env_fns, autoreset_mode=mode, on_failure="restart", shared_memory=shared_memory)
    latest = list(envs.reset(seed=1)[0])

    def check_final_observations(result: tuple[Any, ...]) -> None:
        observations, infos = result[0], result[-1]
        ids = infos["env_id"].tolist() if by_row else [0, 1]
        for position, index in enumerate(ids):
            if "final_obs" in infos and infos["_final_obs"][position]:
                assert infos["final_obs"][position].tolist() == latest[index].tolist()
            latest[index] = observations[position]

    def step(actions: list[int]) -> list[tuple[Any, ...]]:
        if not by_row:
            return [envs.step(actions)]
        envs.send(actions, [0, 1])
        return [envs.recv(count=1), envs.recv(count=1)]

    for number, actions in enumerate([[GO, DIE], [GO, DIE], [DIE, GO], [RAISE, RAISE], [RAISE, DIE], [GO, GO], [DIE, GO]]):
        results = step(actions)
        restarted = sum(int(result[-1]["_restarted"].sum()) for result in results if "restarted" in result[-1])
        assert restarted == sum(action != GO for action in actions)
        for result in results:
            check_final_observations(result)
        if number == 2:
            (tmp_path / "fail").touch()
            options = {"fail": str(tmp_path / "fail")}
            if by_row:
                envs.reset_async(options=options, env_id=[0])
                check_final_observations(envs.recv(count=1))
            else:
                check_final_observations(envs.reset(options={**options, "reset_mask": np.array([True, False])}))
            assert not (tmp_path / "fail").exists()
        elif mode is AutoresetMode.NEXT_STEP:
            for result in step([GO, GO]):
                check_final_observations(result)


# --- Workers continue after any number of requests for their stacks, also with several threads ----


class ComputingEnv(gymnasium.Env[Any, Any]):
    """An environment with steps of ``action`` hundredths of a second, which compute in nested frames and sleep."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(100)

    def __init__(self, *, own_thread: bool = False) -> None:
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._compute_until_closed, daemon=True)
        if own_thread:
            self._thread.start()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        deadline = time.monotonic() + int(action) / 100
        while time.monotonic() < deadline:
            self._recurse(20)
            time.sleep(1e-4)
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def _recurse(self, depth: int) -> int:
        return self._recurse(depth - 1) + sum(k for k in (1, 2, 3)) if depth else 0

    def _compute_until_closed(self) -> None:
        while not self._closed.wait(1e-4):
            self._recurse(10)

    def close(self) -> None:
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()


COMPUTING_ENGINES = {
    "env_threads": ([functools.partial(ComputingEnv)] * 4, {"num_workers": 1, "env_threads": 4}),
    "own_threads": ([functools.partial(ComputingEnv, own_thread=True)] * 2, {"num_workers": 1}),
}


def call_during_steps(envs: Any, steps: int, hundredths: int, function: Callable[[], object]) -> None:
    """Step, and call a function repeatedly during each step; every step must complete."""
    for _ in range(steps):
        envs.step_async(np.full(envs.num_envs, hundredths))
        deadline = time.monotonic() + hundredths / 100
        while time.monotonic() < deadline:
            function()
        envs.step_wait(timeout=60)


@pytest.mark.sampled(1)
@pytest.mark.linux
@WITHOUT_SPAWN
@pytest.mark.parametrize(("steps", "hundredths"), [(4, 50), pytest.param(20, 99, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", COMPUTING_ENGINES)
def test_worker_continues_after_requests_for_its_stack(launch: Launch, kind: str, steps: int, hundredths: int) -> None:
    """A signal handler must not read the stacks of running threads: one of some hundred reads would end in SIGSEGV."""
    env_fns, options = COMPUTING_ENGINES[kind]
    envs = launch(env_fns, **options)
    envs.reset(seed=1)
    stacks: list[str] = []
    call_during_steps(envs, steps, hundredths, lambda: stacks.append(envs._pool.workers[0].read_stack()))
    assert any("in step" in stack for stack in stacks), stacks[:3]
    assert len(stacks) > 500 or steps == 4


@pytest.mark.long
@pytest.mark.linux
@WITHOUT_SPAWN
def test_poll_sends_no_signal(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout of less than 10 ms raises ``StepTimeout`` without requesting a stack."""
    sent: list[int] = []
    monkeypatch.setattr(ProcessWatch, "signal", lambda watch, number: sent.append(number))
    env_fns, options = COMPUTING_ENGINES["env_threads"]
    envs = launch(env_fns, **options)
    envs.reset(seed=1)
    polls = 0
    envs.step_async(np.full(4, 99))
    while True:
        try:
            poll_timeout = 0.001 if polls % 2 else 0
            envs.step_wait(timeout=poll_timeout if polls < 2000 else 60)
            break
        except StepTimeout as error:
            assert "envs 0-3," in format_error(error)
            polls += 1
    assert polls > 10
    envs.send(np.full(4, 99), range(4))
    while True:
        try:
            envs.recv(count=4, timeout=0 if polls < 4000 else 60)
            break
        except StepTimeout:
            polls += 1
    assert not sent
    monkeypatch.undo()  # closing the engine may send signals


@pytest.mark.sampled(1)
@pytest.mark.linux
@WITHOUT_SPAWN
@pytest.mark.parametrize("fault", ["sleep", "hold_gil"])
def test_stack_of_an_earlier_timeout_is_not_the_last_stack(launch: Launch, tmp_path: Path, fault: str) -> None:
    """A worker that is killed writes no stack: the error contains none, not even that of an earlier timeout."""
    envs = launch(make_env_fns(2, {1: faulty_env_fn(1, write_pid_then(tmp_path / "stuck", fault), step=1)}))
    envs.reset(seed=1)
    envs.step_async([0, 0])
    wait_for_file(tmp_path / "stuck")
    with pytest.raises(StepTimeout, match=f"in {fault}"):
        envs.step_wait(timeout=0.2)
    os.kill(worker_pids(envs)[1], signal.SIGKILL)
    with pytest.raises(Exception, match="SIGKILL") as caught:
        envs.step_wait()
    assert "last Python stack" not in format_error(caught.value)
