"""Tests of environments that hang: reports, delays, ``abandon``, and clocks that jump."""

from __future__ import annotations

import ast
import ctypes
import functools
import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import killable_engine, open_engine, ready_engine
from faulty_envs import EchoEnv, Pause, RowChecker, WritePid, faulty_env_fn, healthy_env_fn, make_env_fns, write_pid_then
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from observe import (
    FAULT_MARKS,
    IMPORT_ROOT,
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

import vecenv
from vecenv.engine.worker_process import WorkerProcess
from vecenv.errors import StepTimeout, WorkerDied
from vecenv.system.supervision import StackFile
from vecenv.testing import FaultyEnv

pytestmark = FAULT_MARKS


# --- Environments that do not reply: rows 15 to 20 of the table in ``FAULTS.md`` ----------------


def check_close(envs: Any, timeout: float = 0.3) -> None:
    """Check that ``close(timeout)`` returns in time and ends all workers."""
    pids = worker_pids(envs)
    started_at = time.monotonic()
    envs.close(timeout=timeout)
    assert time.monotonic() - started_at < timeout + WAIT_SECONDS
    assert envs.closed
    assert not still_running(pids, WAIT_SECONDS)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["sleep", "hold_gil"], ids=["sleep", "gil"])
def test_step_timeout_names_the_hanging_line(launch: Launch, fault: str, tmp_path: Path) -> None:
    """The error names the line at which the environment hangs. Afterwards, another wait and ``close()`` work."""
    envs = launch(make_env_fns(4, {3: faulty_env_fn(3, write_pid_then(tmp_path / "stuck", fault), step=1)}), num_workers=2)
    envs.reset(seed=1)
    pid = worker_pids(envs)[1]
    envs.step_async([0] * 4)
    wait_for_file(tmp_path / "stuck")
    for _ in range(2):
        started_at = time.monotonic()
        with pytest.raises(StepTimeout) as caught:
            envs.step_wait(timeout=0.2)
        assert 0.19 < time.monotonic() - started_at < 0.2 + WAIT_SECONDS
        assert isinstance(caught.value, multiprocessing.TimeoutError)
        assert isinstance(caught.value, TimeoutError)
        assert (caught.value.timeout, caught.value.envs) == (0.2, (2, 3))
        assert "call `step_wait` again, `abandon(error.envs)`, or `close()`." in str(caught.value)
        assert re.search(rf"faulty\.py.*in {fault}", format_error(caught.value)), format_error(caught.value)
        place = rf"env 3, of envs 2-3, worker 1, pid {pid}, during step, at .+ in \w+"
        assert re.fullmatch(place, caught.value.where[3]), caught.value.where
        assert_error_names(caught.value, env=3, worker=1, pid=pid, command="step")
    with pytest.raises(AlreadyPendingCallError):
        envs.step_async([0] * 4)
    check_close(envs)


@pytest.mark.linux
@WITHOUT_SPAWN
@pytest.mark.parametrize("stack", ["slow", "late"])
def test_timeout_error_has_the_whole_stack_if_it_is_written_slowly_or_late(
    launch: Launch, stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may lose its core while it writes its stack, or get one only later: the caller waits for the whole stack."""
    read = StackFile.read
    tenths = itertools.count(1)
    times: list[float] = []

    def read_more_each_time(stack_file: StackFile) -> str:
        text = read(stack_file)
        return text[: max(len(text) * next(tenths) // 10, 1)] if text else text

    def read_late(stack_file: StackFile) -> str:
        times.append(time.monotonic())
        return read(stack_file) if times[-1] - times[0] > 0.15 else ""

    if stack == "late":
        monkeypatch.setattr(WorkerProcess, "_state", lambda worker: "R")  # runnable: it may be waiting for a core
    monkeypatch.setattr(StackFile, "read", read_more_each_time if stack == "slow" else read_late)
    envs = launch(make_env_fns(2, {1: faulty_env_fn(1, write_pid_then(tmp_path / "stuck", "sleep"), reset=2)}))
    envs.reset(seed=1)
    envs.reset_async()
    wait_for_file(tmp_path / "stuck")
    with pytest.raises(StepTimeout) as caught:
        envs.reset_wait(timeout=0.3)
    assert "in sleep" in format_error(caught.value)


@pytest.mark.long
@WITHOUT_SPAWN
@pytest.mark.parametrize("call", ["reset", "call"])
def test_timeout_of_a_reset_or_a_call_names_the_hanging_line(launch: Launch, call: str, tmp_path: Path) -> None:
    env_fn = faulty_env_fn(1, write_pid_then(tmp_path / "stuck", "sleep"), reset=2)
    envs = launch(make_env_fns(2, {1: env_fn}))
    envs.reset(seed=1)
    if call == "reset":
        envs.reset_async()
        wait_for_file(tmp_path / "stuck")
    else:
        envs.call_async("trigger", "sleep", only=1)
    with pytest.raises(StepTimeout) as caught:
        getattr(envs, f"{call}_wait")(timeout=0.3)
    assert "in sleep" in format_error(caught.value)
    check_close(envs)


class SlowReadEnv(EchoEnv):
    """An environment that draws a random number in each step, and then reads from a pipe in C until a thread writes."""

    def step(self, action: Any) -> Any:
        np.random.random()
        reader, writer = os.pipe()
        threading.Timer(0.8, os.write, (writer, b"x")).start()
        if ctypes.CDLL(None, use_errno=True).read(reader, ctypes.create_string_buffer(1), 1) < 0:
            raise OSError(ctypes.get_errno(), "the system call was interrupted")
        return super().step(action)


@pytest.mark.linux
def test_request_for_a_stack_interrupts_no_system_call_after_signals_were_deferred(launch: Launch) -> None:
    """With generators of their own, workers defer signals while numpy's are swapped."""
    envs = launch([functools.partial(SlowReadEnv, 0)], generators="own")
    envs.reset(seed=1)
    envs.step_async([0])
    with pytest.raises(StepTimeout, match="in step"):
        envs.step_wait(timeout=0.3)
    assert len(envs.step_wait()[1]) == 1


def test_step_timeout_is_recorded_and_the_timeout_of_a_wait_is_not(launch: Launch) -> None:
    envs = launch(make_env_fns(3, {1: faulty_env_fn(1, "sleep", step=2)}), num_workers=2, step_timeout=0.5)
    envs.reset(seed=1)
    envs.step([0, 0, 0])
    envs.step_async([0, 0, 0])
    with pytest.raises(StepTimeout):
        envs.step_wait(timeout=0.01)
    assert not envs.errors
    with pytest.raises(StepTimeout) as caught:
        envs.step_wait()
    (record,) = envs.errors
    worker = next(index for index, rows in enumerate(envs.worker_rows) if 1 in rows)
    assert (record.env, record.worker, record.command) == (1, worker, "step")
    assert record.pid == worker_pids(envs)[worker]
    assert isinstance(record.error, StepTimeout)
    assert record.error is not caught.value, "its traceback would keep the program's frames"
    assert str(record.error) == str(caught.value)
    assert record.error.envs == caught.value.envs == tuple(envs.worker_rows[worker])
    assert "in sleep" in record.traceback
    prefix = f"env 1 (worker {worker}, pid {record.pid}), step"
    assert f"{prefix}: StepTimeout: The call to `step_wait` has timed out" in str(record)
    assert re.search(r"second\(s\), at \w+\.py:\d+ in sleep$", str(record))
    assert envs.stats()["errors"] == 1
    check_close(envs)
    assert list(envs.errors) == [record]


@pytest.mark.long
def test_step_timeout_limits_step(launch: Launch) -> None:
    envs = launch(make_env_fns(2, {1: faulty_env_fn(1, "sleep", step=2)}), step_timeout=0.5)
    envs.reset(seed=1)
    envs.step([0, 0])
    started_at = time.monotonic()
    with pytest.raises(StepTimeout, match="env"):
        envs.step([0, 0])
    assert 0.45 < time.monotonic() - started_at < 0.5 + WAIT_SECONDS
    check_close(envs)


@pytest.mark.long
def test_late_result_belongs_to_its_own_step(launch: Launch) -> None:
    """A reply that arrives after timeouts and other calls is returned as the result of its own step."""
    slow = {index: faulty_env_fn(index, Pause(0.25), step={2, 4, 5}) for index in (1, 3)}
    envs = launch(make_env_fns(4, slow), num_workers=2)
    checker = RowChecker.start(envs)
    timeouts = 0
    for step in range(1, 8):
        actions = [step, step + 1, step + 2, step + 3]
        envs.step_async(actions)
        while True:
            try:
                result = envs.step_wait(timeout=0.05)
                break
            except StepTimeout:
                timeouts += 1
                with pytest.raises(AlreadyPendingCallError):
                    envs.call_async("echo", step)
        checker.check_step(actions, result)
        assert envs.call("echo", step) == (step,) * 4
        assert envs.get_attr("tick") == tuple(row["tick"] for row in checker.rows)
    assert timeouts >= 3
    checker.check_reset(envs.reset())
    checker.check_step([0] * 4, envs.step([0] * 4))


def test_stopped_worker_times_out_and_can_be_continued_or_closed(launch: Launch) -> None:
    """After SIGSTOP and a timeout, a worker is continued and replies, or ``close()`` kills it."""
    envs = launch(make_env_fns(2))
    checker = RowChecker.start(envs)
    pid = worker_pids(envs)[1]
    for ending in ("continued", "closed"):
        os.kill(pid, signal.SIGSTOP)
        envs.step_async([1, 1])
        with pytest.raises(StepTimeout) as caught:
            envs.step_wait(timeout=0.2)
        assert_error_names(caught.value, env=1, worker=1, pid=pid, command="step")
        assert is_running(pid)
        if ending == "continued":
            os.kill(pid, signal.SIGCONT)
            checker.check_step([1, 1], envs.step_wait(timeout=60))
    check_close(envs)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["sleep", "hold_gil", "ignore_sigterm", "stop"])
def test_hanging_close_of_an_environment_is_ended_within_the_timeout(launch: Launch, fault: str, tmp_path: Path) -> None:
    """The other environments are closed properly."""
    replacements = {  # not the first environment, which is also built and closed in this process, for its spaces
        1: faulty_env_fn(1, write_pid_then(tmp_path / "closing", fault), close=True),
        2: faulty_env_fn(2, WritePid(tmp_path / "closed"), close=True),
    }
    envs = launch(make_env_fns(3, replacements))
    envs.reset(seed=1)
    check_close(envs, timeout=0.5)
    assert (tmp_path / "closed").exists()
    assert (tmp_path / "closing").exists()


@pytest.mark.parametrize("fault", ["raises", "sys_exit", "evil_error", "unpicklable_error"])
def test_exception_in_close_of_an_environment_becomes_one_warning(
    launch: Launch, fault: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """All other environments are closed, including the one in the same worker, and no traceback is printed."""
    replacements = {index: faulty_env_fn(index, WritePid(tmp_path / f"closed-{index}"), close=True) for index in range(4)}
    replacements[2] = faulty_env_fn(2, fault, close=True)
    envs = launch(make_env_fns(4, replacements), num_workers=2)
    envs.reset(seed=1)
    for path in tmp_path.glob("closed-*"):  # the first environment was also closed in this process, which reads its spaces
        path.unlink()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_close(envs, timeout=5)
    assert sorted(path.name for path in tmp_path.glob("closed-*")) == ["closed-0", "closed-1", "closed-3"]
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 1, texts
    assert re.search(r"\benv 2\b", texts[0])
    patterns = {"raises": "out of order", "sys_exit": "SystemExit", "evil_error": "EvilError"}
    assert patterns.get(fault, "UnpicklableError") in texts[0]
    assert "Traceback" not in capfd.readouterr().err


@WITHOUT_SPAWN
def test_worker_that_dies_in_close_does_not_prevent_other_closes(launch: Launch, tmp_path: Path) -> None:
    replacements = {
        1: faulty_env_fn(1, "segfault", close=True),
        2: faulty_env_fn(2, WritePid(tmp_path / "closed"), close=True),
    }
    envs = launch(make_env_fns(3, replacements))
    envs.reset(seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_close(envs, timeout=5)
    assert (tmp_path / "closed").exists()


# --- The time until a death is noticed, or until close() returns: the shortest of several attempts

ATTEMPTS = 8


def measure_shortest(attempt: Callable[[], float], enough: float) -> float:
    """Return the shortest duration of several attempts; stop after one that is shorter than ``enough``."""
    shortest = float("inf")
    for _ in range(ATTEMPTS):
        shortest = min(shortest, attempt())
        if shortest < enough:
            break
    return shortest


class SleepingEnv(gymnasium.Env[Any, Any]):
    """An environment with steps that sleep for a minute."""

    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return 0, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(60)
        return 0, 0.0, False, False, {}


@pytest.mark.parametrize("num_workers", [1, 4])
def test_death_is_noticed_within_a_tenth_of_a_second(num_workers: int) -> None:
    """All workers are killed during a step, just before the caller waits for it."""

    def attempt() -> float:
        with killable_engine([SleepingEnv] * 4, num_workers=num_workers) as envs:
            envs.reset()
            envs.step_async(np.zeros(4, np.int64))
            for process in envs.processes:
                os.kill(process.pid, signal.SIGKILL)
            started_at = time.monotonic()
            with pytest.raises(WorkerDied):
                envs.step_wait()
            return time.monotonic() - started_at

    assert measure_shortest(attempt, 0.1) < 0.1


@pytest.mark.parametrize("dead", [False, True], ids=["running", "dead"])
def test_close_takes_less_than_a_second(dead: bool) -> None:
    def attempt() -> float:
        envs = vecenv.AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 4, num_workers=4)
        envs.reset()
        if dead:
            for process in envs.processes:
                os.kill(process.pid, signal.SIGKILL)
        started_at = time.monotonic()
        envs.close()
        return time.monotonic() - started_at

    assert measure_shortest(attempt, 1.0) < 1.0


PROGRAM = """
import time, numpy, vecenv
from test_hang import SleepingEnv
envs = vecenv.AsyncVectorEnv([SleepingEnv] * 2, num_workers=2)
envs.reset()
envs.step_async(numpy.zeros(2, numpy.int64))
print(time.monotonic(), flush=True)
"""


@pytest.mark.long
def test_program_with_a_pending_step_exits_within_two_seconds() -> None:
    """In its last line, the program prints the time of the monotonic clock, which all processes share."""

    def attempt() -> float:
        folder = Path(__file__).parent
        import_path = os.pathsep.join(map(str, (IMPORT_ROOT, folder, folder.parent)))
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PROGRAM],
            env={**os.environ, "PYTHONPATH": import_path},
            stdout=subprocess.PIPE,
            text=True,
            timeout=100,
            check=True,
        )
        return time.monotonic() - float(done.stdout)

    assert measure_shortest(attempt, 2.0) < 2.0


# --- ``abandon`` ----------------------------------------------------------------------------------

hanging_env_fn = functools.partial(faulty_env_fn, fault="sleep", step=1)


def receive_ids(envs: Any, count: int) -> list[int]:
    """Receive rows; return their sorted indices."""
    return sorted(envs.recv(count=count)[-1]["env_id"].tolist())


def test_abandon_ends_the_rows_of_a_hanging_worker() -> None:
    with open_engine([healthy_env_fn(0), healthy_env_fn(1), hanging_env_fn(2), healthy_env_fn(3)], num_workers=2) as envs:
        assert [list(rows) for rows in envs.worker_rows] == [[0, 1], [2, 3]]
        envs.reset(seed=1)
        assert envs.in_flight.tolist() == []
        envs.send(np.ones(4, np.int64), range(4))
        assert sorted(envs.in_flight.tolist()) == [0, 1, 2, 3]
        assert receive_ids(envs, 2) == [0, 1]
        started_at = time.monotonic()
        envs.abandon([2])
        with pytest.raises(WorkerDied, match=r"it was abandoned.*, and was killed") as caught:
            envs.recv(count=1)
        assert time.monotonic() - started_at < 60
        assert caught.value.envs == (2, 3)
        assert envs.in_flight.tolist() == []
        envs.reset_async(env_id=[2, 3], seed=[5, 6])
        assert receive_ids(envs, 2) == [2, 3]


def test_abandon_ignores_workers_without_pending_requests() -> None:
    with open_engine([healthy_env_fn(0), healthy_env_fn(1)], num_workers=1, use_caller=True) as envs:
        assert [list(rows) for rows in envs.worker_rows] == [[0], [1]]
        envs.reset(seed=1)
        pids = [process.pid for process in envs.processes]
        envs.abandon([0, 1])
        envs.send(np.ones(1, np.int64), [0])
        envs.abandon([0])
        assert receive_ids(envs, 1) == [0]
        with pytest.raises(NoAsyncCallError):
            envs.recv(count=1)
        envs.step(np.ones(2, np.int64))
        assert [process.pid for process in envs.processes] == pids
        for wrong_ids in ([2], [-1], [0, 0], []):
            with pytest.raises(ValueError, match="env_id"):
                envs.abandon(wrong_ids)


def test_abandon_with_restarts_returns_rows_of_new_environments() -> None:
    env_fns: list[Any] = [hanging_env_fn(0), healthy_env_fn(1)]
    with ready_engine(env_fns, num_workers=2, on_failure="restart") as envs:
        envs.send(np.ones(2, np.int64), [0, 1])
        assert receive_ids(envs, 1) == [1]
        envs.abandon([0])
        *_, truncations, infos = envs.recv(count=1)
        assert (infos["env_id"].tolist(), truncations.tolist(), infos["restarted"].tolist()) == ([0], [True], [True])


def test_abandon_with_restarts_rebuilds_the_environment_before_the_next_recv(tmp_path: Path) -> None:
    """The rebuild begins at once, and so does its time limit: a program that trains before ``recv`` must not exceed it."""
    resets = tmp_path / "resets"

    class RecordingEnv(EchoEnv):
        def reset(self, **kwargs: Any) -> Any:
            with resets.open("a") as file:
                file.write("reset\n")
            return super().reset(**kwargs)

    env_fn = functools.partial(FaultyEnv, RecordingEnv(0), "sleep", step=1)
    with ready_engine([env_fn], num_workers=1, context="fork", on_failure="restart", step_timeout=60.0) as envs:
        envs.send([1], [0])
        envs.abandon([0])
        deadline = time.monotonic() + WAIT_SECONDS
        while resets.read_text().count("reset") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert resets.read_text().count("reset") == 2
        assert envs.recv(count=1)[-1]["restarted"].tolist() == [True]


def test_death_after_an_interrupted_timeout_is_not_recorded_as_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives while the stack of a late worker is read, and then the worker is killed."""

    def interrupt(_: WorkerProcess) -> str:
        raise KeyboardInterrupt

    with ready_engine([hanging_env_fn(0)], num_workers=1, on_failure="restart", step_timeout=0.2) as envs:
        monkeypatch.setattr(WorkerProcess, "read_stack", interrupt)
        with pytest.raises(KeyboardInterrupt):
            envs.step([1])
        monkeypatch.undo()
        os.kill(worker_pids(envs)[0], signal.SIGKILL)
        assert envs.step_wait()[-1]["restarted"].tolist() == [True]
        assert [record.error.timeout for record in envs.errors] == [None]


# --- A call while a step of `send` hangs in the same worker ---------------------------------------


@pytest.mark.parametrize("call", ["exec_func", "save"])
def test_call_after_a_hanging_step_of_its_worker_times_out(call: str) -> None:
    with killable_engine([hanging_env_fn(0), healthy_env_fn(1)], num_workers=1, step_timeout=0.5) as envs:
        envs.reset(seed=1)
        envs.send([1], [0])
        with pytest.raises(StepTimeout, match=rf"(?s)The call to `{call}` has timed out.*env 0, worker 0") as caught:
            envs.exec_func(id, [1]) if call == "exec_func" else envs.save([1])
        assert caught.value.envs == (0, 1)
        assert [record.env for record in envs.errors] == [0]
        assert envs.in_flight.tolist() == [0]
        envs.abandon([0])
        with pytest.raises(WorkerDied):
            envs.recv(count=1)


def test_call_after_a_hanging_step_of_its_worker_raises_when_the_worker_is_restarted() -> None:
    env_fns = [hanging_env_fn(0), healthy_env_fn(1)]
    with killable_engine(env_fns, num_workers=1, step_timeout=0.5, on_failure="restart") as envs:
        envs.reset(seed=1)
        envs.send([1], [0])
        with pytest.raises(WorkerDied, match="during step: it hung for more than"):
            envs.exec_func(id, [1])
        *_, truncations, infos = envs.recv(count=1)
        assert (infos["env_id"].tolist(), truncations.tolist()) == ([0], [True])


def poll_for_long(result: Any) -> Any:
    """Sleep for ten seconds in a C call, which a signal ends early, and return the result."""
    ctypes.CDLL(None).poll(None, 0, 10_000)
    return result


@pytest.mark.linux
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_hang_that_the_stack_signal_ends_is_attributed_to_its_environment(on_failure: Any, tmp_path: Path) -> None:
    env_fns = make_env_fns(3, {1: faulty_env_fn(1, poll_for_long, step=2)})
    options: Any = {"num_workers": 1, "step_timeout": 0.3, "on_failure": on_failure, "record_failures": tmp_path}
    with killable_engine(env_fns, **options) as envs:
        envs.reset(seed=1)
        envs.step([0] * 3)
        if on_failure == "raise":
            with pytest.raises(StepTimeout, match=r"(?s)env 1, of envs .* in poll_for_long") as caught:
                envs.step([0] * 3)
            assert caught.value.where == envs.errors[0].error.where
        else:  # the worker is killed, so its late result is lost
            *_, truncations, infos = envs.step([0] * 3)
            assert truncations.all()
            assert infos["restarted"].all()
        (record,) = envs.errors
        assert record.command == "step"
        assert "-env1-" in record.recorded
        where = r"env 1, of envs 0-2, worker 0, pid \d+, during step, at .* in poll_for_long"
        assert re.fullmatch(where, record.error.where[2]), record
        if on_failure == "raise":
            assert record.env == 1
        else:
            assert re.search(r"env 1, of envs 0-2\) died during step: .* in poll_for_long", str(record.error)), record


def test_step_timeout_does_not_limit_a_call_of_another_worker() -> None:
    with killable_engine([hanging_env_fn(0), healthy_env_fn(1)], step_timeout=0.3) as envs:
        envs.reset(seed=1)
        envs.send([1], [0])
        assert envs.exec_func(lambda env: time.sleep(0.7), [1]) == (None, None)
        assert not envs.errors
        with pytest.raises(StepTimeout):
            envs.recv(count=1)


# --- Clocks jump: row 49 of the table in ``FAULTS.md`` ------------------------------------------

SOURCES = sorted(Path(vecenv.__file__).parent.rglob("*.py"))
# the date of a failure in a log or a file, which limits no wait
ALLOWED_CLOCKS = {"errors": {"datetime.now"}, "file": {"datetime.now"}}
SETTABLE_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow"}


def find_settable_clocks(tree: ast.Module) -> set[str]:
    """Return the clocks in a module's code that can be set."""
    used = {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    imported = {
        f"{node.module}.{name.name}" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names
    }
    return SETTABLE_CLOCKS & (used | imported)


def test_search_finds_settable_clocks() -> None:
    assert find_settable_clocks(ast.parse("import time\ntime.monotonic(); time.time()")) == {"time.time"}
    assert find_settable_clocks(ast.parse("from time import time_ns")) == {"time.time_ns"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_module_uses_only_monotonic_clocks(path: Path) -> None:
    assert find_settable_clocks(ast.parse(path.read_text())) == ALLOWED_CLOCKS.get(path.stem, set())


@pytest.mark.long
@WITHOUT_SPAWN
def test_clock_jump_changes_no_timeout(launch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is set an hour forward or a day back neither shortens nor extends a timeout."""
    envs = launch(make_env_fns(2, delay=0.3))
    checker = RowChecker.start(envs)
    for jump in (3600.0, -86400.0):
        clock = time.time  # noqa: TID251 - the clock that jumps
        monkeypatch.setattr(time, "time", lambda clock=clock, jump=jump: clock() + jump)
        envs.step_async([1, 1])
        started_at = time.monotonic()
        with pytest.raises(StepTimeout):
            envs.step_wait(timeout=0.1)
        assert 0.09 < time.monotonic() - started_at < 60
        checker.check_step([1, 1], envs.step_wait(timeout=60))
