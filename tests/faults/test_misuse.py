"""Tests of wrong results of environments, calls in the wrong phase, and wrong calls."""

from __future__ import annotations

import copy
import functools
import gc
import multiprocessing
import pickle
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from envs import open_engine
from faulty_envs import RowChecker, faulty_env_fn, make_env_fns, write_pid_then
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from gymnasium.vector import AsyncVectorEnv as GymnasiumAsyncVectorEnv
from observe import FAULT_MARKS, WAIT_SECONDS, WITHOUT_SPAWN, Launch, format_error, still_running, wait_for_file, worker_pids
from sampling import each_pair

import vecenv
from vecenv.errors import BusyError, EnvError
from vecenv.testing.faulty import HUGE_INFO_BYTES, WitnessEnv

pytestmark = FAULT_MARKS


# --- Wrong results of environments and wrong calls of programs: rows 25 to 29 and 39 to 46 of ``FAULTS.md``


class FloatEnv(gym.Env):
    """An environment with a dict of float32 observations; with ``large`` its values overflow float32."""

    observation_space = gym.spaces.Dict({"camera": gym.spaces.Box(-1, 1, (4,), np.float32)})
    action_space = gym.spaces.Discrete(2)

    def __init__(self, large: bool = False) -> None:
        self.value = np.full(4, 1e300) if large else np.ones(4, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        return {"camera": np.zeros(4, np.float32)}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        return {"camera": self.value}, 0.0, False, False, {}


# --- wrong results ------------------------------------------------------------------------------


@pytest.mark.long
def test_float32_overflow_warns_once_with_environment_and_field(launch: Launch) -> None:
    envs = launch([FloatEnv, FloatEnv, FloatEnv, functools.partial(FloatEnv, True)], num_workers=2)
    envs.reset(seed=1)
    text = r"env 3: .*camera.*float64 values became infinite .*float32"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            envs.step([0] * 4)
    (warning,) = caught
    assert re.search(text, str(warning.message)), warning.message


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("fault", "key"), [("unpicklable_info", "lock"), ("evil_info", "evil")])
def test_info_that_cannot_be_pickled_is_named_by_environment_and_key(launch: Launch, fault: str, key: str) -> None:
    """An info that ends the process that unpickles it never reaches the caller."""
    envs = launch(make_env_fns(4, {3: faulty_env_fn(3, fault, step=1)}), num_workers=2)
    envs.reset(seed=1)
    pids = worker_pids(envs)
    with pytest.raises(Exception, match=r".") as caught:
        envs.step([0] * 4)
    text = format_error(caught.value)
    assert re.search(r"\benv 3\b", text), text
    assert re.search(rf"\b{key}\b", text), text
    assert worker_pids(envs) == pids
    envs.reset(seed=2)


@pytest.mark.long
def test_huge_infos_of_several_workers_arrive(launch: Launch) -> None:
    """Each of three environments returns 100 MiB in one step; no process waits for another to read first."""
    envs = launch([faulty_env_fn(index, "huge_info", step=1) for index in range(3)])
    checker = RowChecker.start(envs)
    result = envs.step([1, 2, 3])
    checker.check_step([1, 2, 3], result)
    assert [len(blob) for blob in result[-1]["blob"]] == [HUGE_INFO_BYTES] * 3
    del result
    checker.check_step([1, 2, 3], envs.step([1, 2, 3]))


@pytest.mark.long
def test_call_with_huge_argument_and_result_returns(launch: Launch) -> None:
    """Both exceed the capacity of a pipe."""
    envs = launch(make_env_fns(4), num_workers=2)
    envs.reset(seed=1)
    blob = bytes(range(256)) * (2**16)  # 16 MiB
    assert all(each == blob for each in envs.call("echo", blob))
    assert envs.call("echo", 1) == (1,) * 4


def test_input_and_output_of_environments_do_not_affect_messages(
    launch: Launch, method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Output of an environment is printed, and its standard input is empty."""
    envs = launch([faulty_env_fn(index, "stdio", step={1, 2}) for index in range(2)])
    checker = RowChecker.start(envs)
    for step in range(4):
        result = envs.step([step, step])
        checker.check_step([step, step], result)
        if step < 2:
            assert result[-1]["stdin"].tolist() == ["", ""]
    envs.close()
    shown = capfd.readouterr()
    if method == "forkserver":
        return  # its standard output is that of the test that started the fork server
    assert shown.out.count("an environment writes") == 4
    assert shown.out.count("an environment prints") == 4
    assert shown.err.count("an environment complains") == 4


# --- wrong calls --------------------------------------------------------------------------------


def _fail() -> None:
    raise ZeroDivisionError("in a function")


def test_failed_call_keeps_all_environments(launch: Launch) -> None:
    envs = launch(make_env_fns(4), num_workers=2)
    checker = RowChecker.start(envs)
    checker.check_step([1, 2, 3, 4], envs.step([1, 2, 3, 4]))
    pids = worker_pids(envs)
    wrong: list[tuple[Any, Callable[[], Any]]] = [
        (AttributeError, lambda: envs.call("nosuch")),
        (AttributeError, lambda: envs.get_attr("nosuch")),
        (TypeError, lambda: envs.call("echo")),
        (ValueError, lambda: envs.call("trigger", "raises", only=2)),
        (EnvError, lambda: envs.call("trigger", "sys_exit", only=2)),
        (ValueError, lambda: envs.call("reset")),
        (ValueError, lambda: envs.set_attr("secret", [1])),
        (ZeroDivisionError, lambda: envs.exec_func(lambda env: 1 / 0)),
        (Exception, lambda: envs.call("echo", threading.Lock())),  # cannot be pickled here
        (Exception, lambda: envs.call("trigger", "unpicklable_info")),  # cannot be pickled in the worker
        (Exception, lambda: envs.call("trigger", "evil_info")),  # must not be unpickled here
    ]
    for expected, call in wrong:
        with pytest.raises(expected):
            call()
        assert worker_pids(envs) == pids
        assert envs.get_attr("witness_id") == (0, 1, 2, 3)
    checker.check_step([1, 2, 3, 4], envs.step([1, 2, 3, 4]))


@WITHOUT_SPAWN
def test_failed_set_attr_keeps_all_environments(launch: Launch) -> None:
    envs = launch(make_env_fns(4), num_workers=2)
    checker = RowChecker.start(envs)
    with pytest.raises(AttributeError):
        envs.set_attr("unwrapped", 3)
    with pytest.raises(Exception, match=r"."):
        envs.set_attr("secret", threading.Lock())
    envs.set_attr("secret", [5, 6, 7, 8])
    assert envs.get_attr("secret") == (5, 6, 7, 8)
    checker.check_step([1, 2, 3, 4], envs.step([1, 2, 3, 4]))


# --- close, threads, forks ----------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("when", ["twice", "thread", "pending", "during_step", "both_at_once"])
def test_close_is_allowed_at_any_time(launch: Launch, when: str, tmp_path: Path) -> None:
    """A second ``close()``, one in another thread, and one during a step end the workers."""
    slow = {1: faulty_env_fn(1, write_pid_then(tmp_path / "begun", "sleep"), step=1)}
    envs = launch(make_env_fns(2, slow))
    envs.reset(seed=1)
    pids = worker_pids(envs)
    outcomes: list[BaseException | None] = []

    def attempt(call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            outcomes.append(error)
        else:
            outcomes.append(None)

    if when == "twice":
        envs.close()
        envs.close()
        envs.close(terminate=True)
    elif when == "thread":
        other = threading.Thread(target=attempt, args=(envs.close,))
        other.start()
        other.join(10)
        assert outcomes == [None]
    elif when == "pending":
        envs.step_async([0, 0])
        envs.close(timeout=0.2)
    elif when == "during_step":
        other = threading.Thread(target=attempt, args=(lambda: envs.step([0, 0]),))
        other.start()
        wait_for_file(tmp_path / "begun")
        envs.close(timeout=0.2)
        other.join(5)
        assert not other.is_alive(), "a step must return when another thread calls close()"
        assert len(outcomes) == 1
        assert outcomes[0] is not None
    else:
        others = [threading.Thread(target=attempt, args=(envs.close,)) for _ in range(4)]
        for other in others:
            other.start()
        for other in others:
            other.join(10)
        assert outcomes == [None] * 4
    assert envs.closed
    assert not still_running(pids, WAIT_SECONDS)
    for call in (lambda: envs.step([0, 0]), envs.reset, lambda: envs.call("echo", 1)):
        with pytest.raises(ClosedEnvironmentError):
            call()
    envs.close()


@WITHOUT_SPAWN
def test_step_of_racing_threads_runs_once_or_raises(launch: Launch) -> None:
    """Of four threads that step at the same time, each call steps all environments once, or none."""
    envs = launch(make_env_fns(2, length=10**9))
    envs.reset(seed=1)
    ticks: list[list[int]] = []
    refused: list[Exception] = []

    def step_repeatedly() -> None:
        for _ in range(50):
            try:
                observations, rewards, *_ = envs.step([1, 1])
            except (BusyError, AlreadyPendingCallError) as error:
                refused.append(error)
            else:
                rows = [WitnessEnv.read(row) for row in observations]
                assert rewards.tolist() == [row["tick"] * (1 + 1 / 1024) for row in rows]
                ticks.append([row["tick"] for row in rows])

    threads = [threading.Thread(target=step_repeatedly) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    assert len(ticks) + len(refused) == 200
    assert sorted(ticks) == [[tick, tick] for tick in range(1, len(ticks) + 1)]


@pytest.mark.parametrize("method", ["fork"], indirect=True)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_copy_and_pickle_raise(launch: Launch, num_workers: int) -> None:
    """The attempt leaves no thread."""
    envs = launch(make_env_fns(2), num_workers=num_workers)
    threads = threading.active_count()
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"this AsyncVectorEnv .* cannot be copied or pickled"):
            duplicate(envs)
    assert threading.active_count() == threads
    envs.reset(seed=1)


def test_forked_children_do_not_end_workers(launch: Launch) -> None:
    """A process that ``multiprocessing`` forks from the caller does not run the exit handlers of the engine."""
    envs = launch(make_env_fns(2))
    checker = RowChecker.start(envs)
    process = multiprocessing.get_context("fork").Process(target=gc.collect)
    process.start()
    process.join(10)
    process.close()
    for step in range(3):
        checker.check_step([step, 1], envs.step([step, 1]))


# --- memory that outlives the engine ------------------------------------------------------------


def test_view_changes_with_each_step_and_is_valid_after_close(launch: Launch) -> None:
    """With ``copy=False``, each call returns the same writeable array."""
    envs = launch(make_env_fns(2, length=10**9), copy=False)
    first, _ = envs.reset(seed=1)
    second = envs.step([1, 1])[0]
    third = envs.step([1, 1])[0]
    assert first is second
    assert second is third
    assert third.flags.writeable
    assert WitnessEnv.read(first[1])["tick"] == 2, "the array must change with each step"
    kept = third[1]
    copied = third.copy()
    envs.close()
    del envs
    gc.collect()
    assert np.array_equal(third, copied)
    kept[:] = 7
    assert third[1, 0] == 7


# --- Calls out of order: row 28 of the table in ``FAULTS.md`` -----------------------------------
# The 35 expected errors are those of the installed Gymnasium.

PHASES = ("default", "reset", "step", "call", "closed")
ACTIONS = np.array([1, 2])
CALLS: dict[str, Callable[[Any], Any]] = {
    "reset_async": lambda envs: envs.reset_async(),
    "reset_wait": lambda envs: envs.reset_wait(),
    "step_async": lambda envs: envs.step_async(ACTIONS),
    "step_wait": lambda envs: envs.step_wait(),
    "call_async": lambda envs: envs.call_async("echo", 1),
    "call_wait": lambda envs: envs.call_wait(),
    "set_attr": lambda envs: envs.set_attr("secret", 1),
}
LEGAL_CALLS = {
    "default": {"reset_async", "step_async", "call_async", "set_attr"},
    "reset": {"reset_wait"},
    "step": {"step_wait"},
    "call": {"call_wait"},
    "closed": set(),
}


def check_call_result(envs: Any, checker: RowChecker) -> None:
    assert envs.call_wait() == (1, 1)


CHECK_PENDING: dict[str, Callable[[Any, RowChecker], None]] = {
    "reset": lambda envs, checker: checker.check_reset(envs.reset_wait()),
    "step": lambda envs, checker: checker.check_step(ACTIONS, envs.step_wait()),
    "call": check_call_result,
}
"""Functions that receive the pending result and check it."""


def enter(envs: Any, phase: str) -> Any:
    """Bring a fresh engine into a phase; return the result of its first reset."""
    first = envs.reset(seed=1)
    if phase == "closed":
        envs.close()
    elif phase != "default":
        CALLS[f"{phase}_async"](envs)
    return first


def call_error(envs: Any, call: str) -> tuple[type[Exception], str, str | None] | None:
    """Return class, text and name of the error of a call, or ``None``."""
    try:
        CALLS[call](envs)
    except Exception as error:
        return type(error), str(error), getattr(error, "name", None)
    return None


@pytest.fixture(scope="module")
def gymnasium_errors() -> dict[tuple[str, str], Any]:
    """Return the 35 errors of Gymnasium, by phase and call."""
    errors = {}
    for phase in PHASES:
        for call in CALLS:
            envs = GymnasiumAsyncVectorEnv(make_env_fns(2), context="fork")
            enter(envs, phase)
            errors[phase, call] = call_error(envs, call)
            envs.close(terminate=True)
    return errors


@pytest.mark.xdist_group("phases")  # Gymnasium's errors are collected once
@pytest.mark.parametrize(("phase", "call", "workers"), each_pair(PHASES, list(CALLS), [0, 1, None]))
def test_call_in_each_phase_raises_like_gymnasium(
    phase: str, call: str, workers: int | None, gymnasium_errors: dict[tuple[str, str], Any]
) -> None:
    """The errors have the same class, text and name, and a call that raises changes nothing."""
    with open_engine(make_env_fns(2), context="fork", num_workers=workers) as envs:
        checker = RowChecker(2, length=10)
        checker.check_reset(enter(envs, phase))
        error = call_error(envs, call)
        assert error == gymnasium_errors[phase, call]
        assert (error is None) == (call in LEGAL_CALLS[phase])
        assert envs.closed == (phase == "closed")
        if phase == "closed":
            return
        if error is not None and phase != "default":
            CHECK_PENDING[phase](envs, checker)
        elif error is None and call.endswith("_async"):
            CHECK_PENDING[call.removesuffix("_async")](envs, checker)
        elif error is None and call.endswith("_wait"):  # call_error() received its result
            for env, row in enumerate(envs.observations):
                checker.accept_row(env, row)
        checker.check_step(ACTIONS, envs.step(ACTIONS))


@pytest.mark.xdist_group("phases")  # Gymnasium's errors are collected once
@pytest.mark.parametrize("alias", ["reset_send", "reset_fetch", "step_send", "step_fetch", "call_send", "call_fetch"])
def test_alias_is_the_same_method(alias: str) -> None:
    verb, kind = alias.split("_")
    same = getattr(vecenv.AsyncVectorEnv, f"{verb}_{'async' if kind == 'send' else 'wait'}")
    assert getattr(vecenv.AsyncVectorEnv, alias) is same

