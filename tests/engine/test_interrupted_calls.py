"""Tests of calls interrupted by an exception from a signal handler, and of restarts of rows received one by one."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ResetNeeded
from gymnasium.vector import SyncVectorEnv
from signals import Alarm, interrupt_at, signal_handler

import vecenv
from vecenv.engine import exchange, process_engine, worker_pool
from vecenv.engine.state_changes import StateChanges
from vecenv.engine.worker_process import WorkerProcess
from vecenv.errors import EnvFailed, WorkerDied
from vecenv.front import arguments
from vecenv.link import channel
from vecenv.link.channel import Channel
from vecenv.link.messages import encode
from vecenv.system.descriptors import DescriptorOwner
from vecenv.testing import FaultyEnv, assert_identical

KILL = 9  # the action that kills the process of a CountingEnv


class CountingEnv(gymnasium.Env[Any, Any]):
    """An environment with observations (row, steps, total), where ``total`` is the seed plus the sum of the actions."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(10)
    mark = 0

    def __init__(self, row: int) -> None:
        self.row = row

    def observe(self) -> Any:
        return np.array([self.row, self.steps, self.total], np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps, self.total = 0, seed or 0
        return self.observe(), {"began": self.total}

    def step(self, action: Any) -> Any:
        if action == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps, self.total = self.steps + 1, self.total + int(action)
        return self.observe(), float(self.total), False, False, {"total": self.total}

    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.row

    @property
    def slow_mark(self) -> int:
        """The value of ``mark``. Setting it takes 0.3 seconds."""
        return self.mark

    @slow_mark.setter
    def slow_mark(self, mark: int) -> None:
        time.sleep(0.3)
        self.mark = mark


class SlowPickleEnv(CountingEnv):
    """An environment that takes 0.2 seconds to be pickled, and 0.2 seconds to be unpickled."""

    def __getstate__(self) -> Any:
        time.sleep(0.2)
        return vars(self)

    def __setstate__(self, state: Any) -> None:
        time.sleep(0.2)
        vars(self).update(state)


ENV_FNS = [partial(CountingEnv, row) for row in range(4)]
ACTIONS = np.array([1, 2, 3, 4])


@pytest.fixture(autouse=True)
def raise_timeout_error_on_alarm() -> Iterator[None]:
    with signal_handler(signal.SIGALRM, TimeoutError):
        yield


def open_engine(env_fns: Any = ENV_FNS, **options: Any) -> Any:
    return closing(vecenv.AsyncVectorEnv(env_fns, **{"num_workers": 2, "context": "fork", **options}))


def assert_equal_after_reset(envs: Any) -> None:
    """Check that a seeded reset and the following steps equal those of a new ``SyncVectorEnv``."""
    with closing(SyncVectorEnv(ENV_FNS)) as reference:
        assert_identical(envs.reset(seed=5), reference.reset(seed=5), "reset")
        for actions in (ACTIONS, ACTIONS[::-1]):
            assert_identical(envs.step(actions), reference.step(actions), "step")


# --- exceptions during a change of state ----------------------------------------------------------

# name -> the method of the worker pool after which an exception is raised, and the call
INTERRUPTED_CALLS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "step": ("set_message_to_all", lambda envs: envs.step(ACTIONS)),
    "send": ("queue", lambda envs: envs.send(ACTIONS[:1], [0])),
    "masked reset": ("queue", lambda envs: envs.reset(options={"reset_mask": np.array([True, False, False, False])})),
    "call": ("queue", lambda envs: envs.get_attr("steps")),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("options", [{}, {"num_workers": 0}, {"num_workers": 1, "use_caller": True}], ids=str)
@pytest.mark.parametrize("call", INTERRUPTED_CALLS)
def test_interrupted_change_of_state_needs_a_reset(
    call: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    method, make_call = INTERRUPTED_CALLS[call]
    with open_engine(**options) as envs:
        envs.reset(seed=1)
        envs.step(ACTIONS)
        original = getattr(envs._pool, method)

        def call_and_interrupt(*arguments: Any) -> None:
            original(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(envs._pool, method, call_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            make_call(envs)
        monkeypatch.undo()
        assert "phase=RESET_NEEDED" in repr(envs)
        calls = [make_call for _, make_call in INTERRUPTED_CALLS.values()]
        for later_call in (*calls, lambda envs: envs.recv(), lambda envs: envs.save()):
            with pytest.raises(ResetNeeded, match="reset"):
                later_call(envs)
        assert_equal_after_reset(envs)


def test_reset_is_still_needed_after_one_that_could_not_start_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_start(*_: Any) -> Any:
        raise OSError("no more processes")

    with open_engine(on_failure="restart") as envs:
        envs.reset(seed=1)
        raise_alarm_after(monkeypatch, envs._pool, "set_message_to_all")
        with pytest.raises(TimeoutError):
            envs.step(ACTIONS)
        monkeypatch.undo()
        process = envs.processes[0]
        process.kill()
        process.join()
        monkeypatch.setattr(envs._pool, "replace", refuse_start)
        with pytest.raises(OSError, match="no more processes"):
            envs.reset(seed=2)
        monkeypatch.undo()
        for call in (envs.step, envs.send):
            with pytest.raises(ResetNeeded):
                call(ACTIONS)
        assert_equal_after_reset(envs)


def test_stats_and_in_flight_agree_after_an_interrupted_change(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine() as envs:
        envs.reset(seed=1)
        envs.send(ACTIONS[:1], [0])
        raise_alarm_after(monkeypatch, envs._pool, "queue")
        with pytest.raises(TimeoutError):
            envs.send(ACTIONS[:1], [2])
        monkeypatch.undo()
        assert (envs.in_flight.tolist(), envs.stats()["in_flight"]) == ([], 0)
        assert_equal_after_reset(envs)


def raise_alarm_after(monkeypatch: pytest.MonkeyPatch, owner: Any, method: str) -> None:
    """Raise SIGALRM after every call of ``method``."""
    original = getattr(owner, method)

    def call_and_raise(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        signal.raise_signal(signal.SIGALRM)
        return result

    monkeypatch.setattr(owner, method, call_and_raise)


def test_worker_death_is_recorded_if_its_handling_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine() as envs:
        envs.reset(seed=1)
        raise_alarm_after(monkeypatch, WorkerProcess, "_reap")
        with pytest.raises(TimeoutError):
            envs.step(np.array([1, KILL, 3, 4]))
        monkeypatch.undo()
        assert [record.error.envs for record in envs.errors] == [(0, 1)]
        assert_equal_after_reset(envs)
        assert len(envs.errors) == 1


class EnvFnThatMayHang:
    """A function that builds a :class:`CountingEnv`, but hangs if a file exists."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self) -> CountingEnv:
        if self.path.exists():
            time.sleep(60)
        return CountingEnv(0)


@pytest.mark.long
def test_interrupted_worker_start_keeps_its_time_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = vecenv.WorkerOptions(start_timeout=2.0)
    with open_engine([EnvFnThatMayHang(tmp_path / "hang")], num_workers=1, worker_options=options) as envs:
        envs.reset(seed=1)
        with pytest.raises(WorkerDied):
            envs.step([KILL])
        (tmp_path / "hang").touch()
        raise_alarm_after(monkeypatch, envs._pool, "_start")
        with pytest.raises(TimeoutError):
            envs.reset()
        monkeypatch.undo()
        with pytest.raises(WorkerDied, match=r"it hung for more than 2 seconds"):
            envs.reset()


# --- exceptions during a wait ---------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1])
def test_infos_are_complete_after_a_lost_reply_and_a_reset(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker describes the columns of its infos only once, but repeats the description after a reset."""

    def raise_timeout_error(*_: Any) -> Any:
        raise TimeoutError

    with open_engine(num_workers=num_workers) as envs:
        envs.reset(seed=0)
        monkeypatch.setattr(StateChanges, "apply", raise_timeout_error)
        with pytest.raises(TimeoutError):
            envs.step(ACTIONS)
        monkeypatch.undo()
        with pytest.raises(ResetNeeded):
            envs.step(ACTIONS)
        assert envs.reset(seed=0)[1]["began"].tolist() == [0, 1, 2, 3]
        assert envs.step(ACTIONS)[4]["total"].tolist() == [1, 3, 5, 7]


def test_interrupted_wait_for_a_step_can_be_repeated() -> None:
    with open_engine() as envs, closing(SyncVectorEnv(ENV_FNS)) as reference:
        envs.reset(seed=1)
        reference.reset(seed=1)
        pid = envs.processes[1].pid
        os.kill(pid, signal.SIGSTOP)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(TimeoutError):
            envs.step(ACTIONS)
        os.kill(pid, signal.SIGCONT)
        assert_identical(envs.step_wait(), reference.step(ACTIONS), "the interrupted step")
        assert_identical(envs.step(ACTIONS), reference.step(ACTIONS), "the next step")


@pytest.mark.parametrize(("module", "function"), [(channel, "read"), (channel, "write"), (worker_pool, "write")])
def test_time_limit_during_a_pipe_access_is_raised_and_not_taken_for_a_death(
    module: Any, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ``TimeoutError`` is an ``OSError``, as the error of a broken pipe is."""
    called = False

    def time_out(*args: Any) -> Any:
        nonlocal called
        if not called:
            called = True
            raise TimeoutError("time limit")
        return getattr(os, function)(*args)

    with closing(vecenv.AsyncVectorEnv(ENV_FNS[:2], num_workers=2)) as envs:
        expected = envs.reset(seed=0)
        pids = [process.pid for process in envs.processes]
        monkeypatch.setattr(module, function, time_out)
        with pytest.raises(TimeoutError, match="time limit"):
            envs.step([0, 0]) if module is channel else envs.step(np.zeros(2, np.int64))
        monkeypatch.undo()
        assert called
        assert not envs.errors
        assert_identical(envs.reset(seed=0), expected)
        assert [process.pid for process in envs.processes] == pids


def test_wrong_argument_raised_as_in_older_gymnasium_is_no_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Gymnasium 1.4, wrong arguments raised ``AssertionError``, and there vecenv raises a subclass of it."""
    monkeypatch.setattr(arguments, "CompatValueError", arguments.AssertionValueError)
    with closing(vecenv.AsyncVectorEnv(ENV_FNS[:1])) as envs:
        envs.reset()
        envs.step_async([0])  # a sampled action may be `KILL`
        with pytest.raises(ValueError, match="seed"):
            envs.reset(seed=[1, 2])
        with pytest.raises(AlreadyPendingCallError):
            envs.reset()
        envs.step_wait()


@pytest.mark.parametrize("interrupted", [False, True])
def test_interrupted_reset_keeps_the_seeds_of_restarts(interrupted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine(on_failure="restart", autoreset_mode="SameStep") as envs:
        if interrupted:
            raise_alarm_after(monkeypatch, Channel, "flush")
            with pytest.raises(TimeoutError):
                envs.reset(seed=1)
            monkeypatch.undo()
            envs.reset_wait()
        else:
            envs.reset(seed=1)
        observations, *_, truncations, _ = envs.step(np.array([1, KILL, 3, 4]))
        assert truncations.tolist() == [True, True, False, False]
        expected = [int(child.generate_state(1)[0]) for child in np.random.SeedSequence(1).spawn(2)]
        assert observations[:2, 2].tolist() == expected


class Delay:
    """A fault for :class:`FaultyEnv`: it delays the result of a call."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, result: Any) -> Any:
        time.sleep(self.seconds)
        return result


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "use_caller": True}], ids=str)
def test_failure_in_a_dropped_step_is_recorded(options: dict[str, Any]) -> None:
    """One environment raises, then a signal interrupts the wait for the others."""
    raising_fn = partial(FaultyEnv, ENV_FNS[0](), "raises", step=1)
    slow_fn = partial(FaultyEnv, ENV_FNS[3](), Delay(0.3), step=1)
    fns = [raising_fn, *ENV_FNS[1:3], slow_fn]
    with open_engine(fns, **options) as envs:
        envs.reset(seed=1)
        signal.setitimer(signal.ITIMER_REAL, 0.15)
        with pytest.raises(TimeoutError):
            envs.step(ACTIONS)
        assert not envs.errors
        assert envs.reset(seed=5)[0][:, 2].tolist() == [5, 6, 7, 8]
        assert [(record.env, record.command, type(record.error)) for record in envs.errors] == [(0, "step", ValueError)]


def test_failure_in_a_dropped_reset_is_recorded_as_a_reset_failure() -> None:
    slow_env = FaultyEnv(FaultyEnv(ENV_FNS[0](), Delay(0.3), reset=2), "raises", reset=2)
    with open_engine([lambda: slow_env], num_workers=1) as envs:
        envs.reset(seed=1)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(TimeoutError):
            envs.reset(seed=2)
        assert envs.reset(seed=5)[0][:, 2].tolist() == [5]
        assert [(record.env, record.command, type(record.error)) for record in envs.errors] == [(0, "reset", ValueError)]
        assert not envs._pool.processes[0].dropped


def set_and_get_mark(envs: Any) -> Any:
    envs.set_attr("slow_mark", 7)
    return envs.get_attr("mark")


# name -> seconds until the interruption, the call, and its result
REPEATED_CALLS: dict[str, tuple[float, Callable[[Any], Any], Any]] = {
    "call": (0.1, lambda envs: envs.call("sleep", 0.15), (0, 1, 2, 3)),
    "exec_func": (0.1, lambda envs: envs.exec_func(CountingEnv.sleep, None, 0.15), (0, 1, 2, 3)),
    "set_attr": (0.1, set_and_get_mark, (7, 7, 7, 7)),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("call", REPEATED_CALLS)
def test_interrupted_call_can_be_repeated(call: str) -> None:
    """Late replies to the interrupted call affect neither the next call nor the next step."""
    seconds, make_call, expected = REPEATED_CALLS[call]
    with open_engine() as envs:
        envs.reset(seed=1)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        with pytest.raises(TimeoutError):
            make_call(envs)
        observations, *_ = envs.step(ACTIONS)
        assert observations[:, 1].tolist() == [1, 1, 1, 1]
        assert make_call(envs) == expected
        assert_equal_after_reset(envs)


@pytest.mark.parametrize("call", ["save", "load"])
def test_interrupted_save_or_load_leaves_envs_usable(call: str) -> None:
    with open_engine([partial(SlowPickleEnv, row) for row in range(4)]) as envs:
        envs.reset(seed=1)
        snapshots = envs.save(verify=False)
        expected = envs.step(ACTIONS)
        make_call = partial(envs.save, verify=False) if call == "save" else partial(envs.load, snapshots)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with contextlib.suppress(TimeoutError):
            make_call()
        signal.setitimer(signal.ITIMER_REAL, 0)
        make_call()
        envs.load(snapshots)
        assert_identical(envs.step(ACTIONS), expected, "the step after the load")


def test_interrupted_load_leaves_rows_loaded_unchanged_or_failed() -> None:
    """The observation that ``save`` returns for a row matches its state, unless the row counts as failed."""
    files = [module.__file__ for module in (exchange, process_engine)]
    with open_engine() as envs, signal_handler(signal.SIGUSR2, Alarm):
        envs.reset(seed=1)
        snapshots = envs.save(verify=False)
        event, fired = 0, True
        while fired:
            event += 1
            envs.reset(seed=1)
            envs.step(ACTIONS)
            fired, _ = interrupt_at(event, partial(envs.load, snapshots), *files)
            with contextlib.suppress(EnvFailed, ResetNeeded):
                observations = [snapshot.row.observation for snapshot in envs.save(verify=False)]
                assert_identical(observations, list(envs.call("observe")), f"observations after event {event}")
        assert event > 20


# --- restarts of rows that are received one by one ------------------------------------------------


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_worker_that_dies_with_rows_in_flight_is_restarted(mode: str) -> None:
    with open_engine(on_failure="restart", autoreset_mode=mode) as envs:
        envs.reset(seed=1)
        last = envs.step(ACTIONS)[0]
        envs.send(np.array([1, KILL, 3, 4]), range(4))
        parts = [envs.recv(count=1) for _ in range(4)]
        rows = {int(part[4]["env_id"][0]): part for part in parts}
        assert sorted(rows) == [0, 1, 2, 3]
        for row in (0, 1):  # the rows of the worker that died
            observation, reward, terminated, truncated, infos = rows[row]
            assert (reward[0], terminated[0], truncated[0], infos["restarted"][0]) == (0.0, False, True, True)
            assert infos["final_obs"][0].tolist() == last[row].tolist()
            assert observation[0][:2].tolist() == ([row, 0] if mode == "SameStep" else last[row][:2].tolist())
        for row in (2, 3):
            seed, action = 1 + row, ACTIONS[row]
            assert rows[row][0][0].tolist() == [row, 2, seed + 2 * action]
            assert "restarted" not in rows[row][4]
        assert envs.stats()["restarts"] == 1
        assert_equal_after_reset(envs)


def test_recv_raises_a_worker_death_once_and_returns_the_other_rows() -> None:
    with open_engine() as envs:
        envs.reset(seed=1)
        envs.send(np.array([1, KILL, 3, 4]), range(4))
        received: list[int] = []
        errors = []
        for _ in range(3):
            try:
                received += envs.recv(count=1)[4]["env_id"].tolist()
            except WorkerDied as error:
                errors.append(error)
        assert sorted(received) == [2, 3]
        (error,) = errors
        assert error.envs == (0, 1)
        assert len(envs.in_flight) == 0
        envs.reset(seed=2, options={"reset_mask": np.array([True, True, False, False])})
        assert envs.step(ACTIONS)[0][:, 1].tolist() == [1, 1, 2, 2]


class InterruptedRead(Exception):
    pass


def receive_and_interrupt(channel: Channel, instruction: int) -> bytes | None:
    """Call ``channel.receive``, and raise before the given instruction, counted over ``receive`` and all that it calls."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == instruction:
                raise InterruptedRead
        return trace

    previous_trace = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces instructions only if this is set before settrace()
    sys.settrace(trace)
    try:
        return channel.receive()
    finally:
        sys.settrace(previous_trace)


def test_interrupted_read_affects_no_later_message() -> None:
    first, later = encode(1, 1, b"first" * 9), encode(1, 2, b"later")
    interruptions = 0
    for instruction in range(1, 1000):
        owner = DescriptorOwner(None)
        channel = Channel(owner)
        writer = channel.worker_ends[1].number
        os.write(writer, first)
        received = None
        try:
            received = receive_and_interrupt(channel, instruction)
        except InterruptedRead:
            interruptions += 1
            received = channel.receive()
        os.write(writer, later)
        assert received in (first, None)
        assert channel.receive() == later, f"instruction {instruction}"
        owner.close()
        if interruptions < instruction:  # the read ended before this instruction
            break
    assert interruptions > 100
