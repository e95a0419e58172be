"""Tests of environments that return wrong results, and of wrong calls (``FAULTS.md``, "Wrong results, wrong calls")."""

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
from programs import run_python
from sampling import each_pair

import vecenv
from vecenv.errors import BusyError, EnvError
from vecenv.testing.faulty import HUGE_INFO_BYTES, WitnessEnv

pytestmark = FAULT_MARKS


class FloatEnv(gym.Env):
    """An environment with a dict of float32 observations. With ``large``, steps return values that overflow float32."""

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
    pattern = r"env 3: .*camera.*float64 values became infinite .*float32"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            envs.step([0] * 4)
    (warning,) = caught
    assert re.search(pattern, str(warning.message)), warning.message


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("fault", "key"), [("unpicklable_info", "lock"), ("evil_info", "evil")])
def test_info_that_cannot_be_pickled_is_named_by_environment_and_key(launch: Launch, fault: str, key: str) -> None:
    """The info ``evil`` would end the process that unpickles it, so it must not reach the caller."""
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


def test_restart_log_names_the_info_that_cannot_be_pickled(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    env_fns = make_env_fns(2, {1: faulty_env_fn(1, "unpicklable_info", step=1)})
    envs = launch(env_fns, num_workers=1, on_failure="restart")
    envs.reset(seed=1)
    envs.step([0, 0])
    assert "env 1: its info key 'lock' cannot be pickled: TypeError: cannot pickle" in caplog.text


@pytest.mark.long
def test_huge_infos_of_several_workers_arrive(launch: Launch) -> None:
    """Three workers reply with 100 MiB each to one step. No process waits for another one to read first."""
    envs = launch([faulty_env_fn(index, "huge_info", step=1) for index in range(3)])
    checker = RowChecker.start(envs)
    result = envs.step([1, 2, 3])
    checker.check_step([1, 2, 3], result)
    assert [len(blob) for blob in result[-1]["blob"]] == [HUGE_INFO_BYTES] * 3
    del result  # 300 MiB
    checker.check_step([1, 2, 3], envs.step([1, 2, 3]))


@pytest.mark.long
def test_call_with_huge_argument_and_result_returns(launch: Launch) -> None:
    """Argument and result exceed the capacity of a pipe."""
    envs = launch(make_env_fns(4), num_workers=2)
    envs.reset(seed=1)
    blob = bytes(range(256)) * (2**16)  # 16 MiB
    assert all(result == blob for result in envs.call("echo", blob))
    assert envs.call("echo", 1) == (1,) * 4


def test_input_and_output_of_environments_do_not_affect_messages(
    launch: Launch, method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The output of an environment is printed. Its standard input is empty."""
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
        return  # workers inherit the output of the fork server, which an earlier test may have started
    assert shown.out.count("an environment writes") == 4
    assert shown.out.count("an environment prints") == 4
    assert shown.err.count("an environment complains") == 4


# --- wrong calls --------------------------------------------------------------------------------


def test_failed_call_keeps_all_environments(launch: Launch) -> None:
    envs = launch(make_env_fns(4), num_workers=2)
    checker = RowChecker.start(envs)
    checker.check_step([1, 2, 3, 4], envs.step([1, 2, 3, 4]))
    pids = worker_pids(envs)
    failing_calls: list[tuple[Any, Callable[[], Any]]] = [
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
    for error_class, call in failing_calls:
        with pytest.raises(error_class):
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
    """Afterwards, the workers have ended, and other calls raise."""
    hanging = {1: faulty_env_fn(1, write_pid_then(tmp_path / "begun", "sleep"), step=1)}
    envs = launch(make_env_fns(2, hanging))
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
        thread = threading.Thread(target=attempt, args=(envs.close,))
        thread.start()
        thread.join(10)
        assert outcomes == [None]
    elif when == "pending":
        envs.step_async([0, 0])
        envs.close(timeout=0.2)
    elif when == "during_step":
        thread = threading.Thread(target=attempt, args=(lambda: envs.step([0, 0]),))
        thread.start()
        wait_for_file(tmp_path / "begun")
        envs.close(timeout=0.2)
        thread.join(5)
        assert not thread.is_alive(), "a step must return when another thread calls close()"
        assert len(outcomes) == 1
        assert outcomes[0] is not None
    else:
        threads = [threading.Thread(target=attempt, args=(envs.close,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert outcomes == [None] * 4
    assert envs.closed
    assert not still_running(pids, WAIT_SECONDS)
    for call in (lambda: envs.step([0, 0]), envs.reset, lambda: envs.call("echo", 1)):
        with pytest.raises(ClosedEnvironmentError):
            call()
    envs.close()


@WITHOUT_SPAWN
def test_step_of_racing_threads_runs_once_or_raises(launch: Launch) -> None:
    """Four threads call ``step`` at the same time. Each call steps all environments once, or raises and steps none."""
    envs = launch(make_env_fns(2, length=10**9))
    envs.reset(seed=1)
    ticks: list[list[int]] = []
    errors: list[Exception] = []

    def step_repeatedly() -> None:
        for _ in range(50):
            try:
                observations, rewards, *_ = envs.step([1, 1])
            except (BusyError, AlreadyPendingCallError) as error:
                errors.append(error)
            else:
                rows = [WitnessEnv.read(row) for row in observations]
                assert rewards.tolist() == [row["tick"] * (1 + 1 / 1024) for row in rows]
                ticks.append([row["tick"] for row in rows])

    threads = [threading.Thread(target=step_repeatedly) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    assert len(ticks) + len(errors) == 200
    assert sorted(ticks) == [[tick, tick] for tick in range(1, len(ticks) + 1)]


@pytest.mark.parametrize("method", ["fork"], indirect=True)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_copying_or_pickling_an_engine_raises(launch: Launch, num_workers: int) -> None:
    """The attempt starts no thread, and the engine can still be used."""
    envs = launch(make_env_fns(2), num_workers=num_workers)
    threads = threading.active_count()
    for make_copy in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"this AsyncVectorEnv .* cannot be copied or pickled"):
            make_copy(envs)
    assert threading.active_count() == threads
    envs.reset(seed=1)


def test_forked_children_do_not_end_workers(launch: Launch) -> None:
    """A child that ``multiprocessing`` forks from the caller does not run the engine's exit handlers."""
    envs = launch(make_env_fns(2))
    checker = RowChecker.start(envs)
    process = multiprocessing.get_context("fork").Process(target=gc.collect)
    process.start()
    process.join(10)
    process.close()
    for step in range(3):
        checker.check_step([step, 1], envs.step([step, 1]))


FORKING_PROGRAM = """
import os
import gymnasium
from vecenv import AsyncVectorEnv

envs = AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2, context="fork", daemon={daemon})
envs.reset(seed=1)
if child := os.fork():
    os.waitpid(child, 0)
    envs.step([0, 1])
    envs.close()
    print("stepped")
"""


@pytest.mark.parametrize("daemon", [True, False])
def test_exit_of_a_forked_child_does_not_end_workers(daemon: bool) -> None:
    """A child of ``os.fork`` runs the exit handler of ``multiprocessing``, which terminates or joins known processes."""
    result = run_python("-c", FORKING_PROGRAM.format(daemon=daemon))
    assert (result.stdout, result.stderr) == ("stepped\n", "")


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
    row_view = third[1]
    copy_before_close = third.copy()
    envs.close()
    del envs
    gc.collect()
    assert np.array_equal(third, copy_before_close)
    row_view[:] = 7
    assert third[1, 0] == 7


# --- calls out of order: row 28 of the table in ``FAULTS.md`` -----------------------------------
# The installed Gymnasium provides the 35 expected outcomes: 28 errors, and 7 calls that succeed.

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


def check_pending_call(envs: Any, checker: RowChecker) -> None:
    assert envs.call_wait() == (1, 1)


PENDING_RESULT_CHECKS: dict[str, Callable[[Any, RowChecker], None]] = {
    "reset": lambda envs, checker: checker.check_reset(envs.reset_wait()),
    "step": lambda envs, checker: checker.check_step(ACTIONS, envs.step_wait()),
    "call": check_pending_call,
}
"""Functions that receive the pending result and check it."""


def enter_phase(envs: Any, phase: str) -> Any:
    """Bring a new engine into a phase; return the result of its first reset."""
    first = envs.reset(seed=1)
    if phase == "closed":
        envs.close()
    elif phase != "default":
        CALLS[f"{phase}_async"](envs)
    return first


def call_and_return_error(envs: Any, call: str) -> tuple[type[Exception], str, str | None] | None:
    """Make a call. Return the class, the text and the ``name`` of its error, or ``None`` if it succeeds."""
    try:
        CALLS[call](envs)
    except Exception as error:
        return type(error), str(error), getattr(error, "name", None)
    return None


@pytest.fixture(scope="module")
def gymnasium_errors() -> dict[tuple[str, str], Any]:
    """Return the error of Gymnasium, or ``None``, for each phase and call."""
    errors = {}
    for phase in PHASES:
        for call in CALLS:
            envs = GymnasiumAsyncVectorEnv(make_env_fns(2), context="fork")
            enter_phase(envs, phase)
            errors[phase, call] = call_and_return_error(envs, call)
            envs.close(terminate=True)
    return errors


@pytest.mark.xdist_group("phases")  # Gymnasium's errors are collected once
@pytest.mark.parametrize(("phase", "call", "workers"), each_pair(PHASES, list(CALLS), [0, 1, None]))
def test_call_in_each_phase_raises_like_gymnasium(
    phase: str, call: str, workers: int | None, gymnasium_errors: dict[tuple[str, str], Any]
) -> None:
    """The errors have the same class, text and ``name``, and a call that raises changes nothing."""
    with open_engine(make_env_fns(2), context="fork", num_workers=workers) as envs:
        checker = RowChecker(2, length=10)
        checker.check_reset(enter_phase(envs, phase))
        error = call_and_return_error(envs, call)
        assert error == gymnasium_errors[phase, call]
        assert (error is None) == (call in LEGAL_CALLS[phase])
        assert envs.closed == (phase == "closed")
        if phase == "closed":
            return
        if error is not None and phase != "default":
            PENDING_RESULT_CHECKS[phase](envs, checker)
        elif error is None and call.endswith("_async"):
            PENDING_RESULT_CHECKS[call.removesuffix("_async")](envs, checker)
        elif error is None and call.endswith("_wait"):  # call_and_return_error() received its result
            for env, row in enumerate(envs.observations):
                checker.accept_row(env, row)
        checker.check_step(ACTIONS, envs.step(ACTIONS))


@pytest.mark.parametrize("alias", ["reset_send", "reset_fetch", "step_send", "step_fetch", "call_send", "call_fetch"])
def test_alias_is_the_same_method(alias: str) -> None:
    call, suffix = alias.split("_")
    original = f"{call}_async" if suffix == "send" else f"{call}_wait"
    assert getattr(vecenv.AsyncVectorEnv, alias) is getattr(vecenv.AsyncVectorEnv, original)
