"""Environments that hang: reports, delays, ``abandon``, and clocks that jump."""

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
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import killable_engine, open_engine, ready_engine
from faulty_envs import Pause, RowChecker, WritePid, faulty_env_fn, healthy_env_fn, make_env_fns, write_pid_then
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from observe import CHEAP, FAULTS, PACKAGE, PATIENCE, Launch, alive, names, report, still_running, wait_for, worker_pids

import vecenv
from vecenv.engine.worker_process import WorkerProcess
from vecenv.errors import StepTimeout, WorkerDied
from vecenv.system.supervision import StackFile

pytestmark = FAULTS


# --- Environments that do not reply: rows 15 to 20 of the table in ``FAULTS.md`` ----------------

GRACE = 0.3  # the tests' timeout of close()


def check_close(envs: Any, timeout: float = GRACE) -> None:
    """Check that ``close(timeout)`` is a bound, whatever the workers do."""
    pids = worker_pids(envs)
    begun = time.monotonic()
    envs.close(timeout=timeout)
    assert time.monotonic() - begun < timeout + PATIENCE
    assert envs.closed
    assert not still_running(pids, PATIENCE)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sleep", "gil"])
def test_hang(launch: Launch, kind: str, tmp_path: Path) -> None:
    """The timeout names the line of the environment's own code where it hangs; waiting again and closing both work."""
    fault = {"sleep": "sleep", "gil": "hold_gil"}[kind]
    envs = launch(make_env_fns(4, {3: faulty_env_fn(3, write_pid_then(tmp_path / "stuck", fault), step=1)}), num_workers=2)
    envs.reset(seed=1)
    pid = worker_pids(envs)[1]
    envs.step_async([0] * 4)
    wait_for(tmp_path / "stuck")
    for _ in range(2):
        begun = time.monotonic()
        with pytest.raises(StepTimeout) as caught:
            envs.step_wait(timeout=0.2)
        assert 0.19 < time.monotonic() - begun < 0.2 + PATIENCE
        assert isinstance(caught.value, multiprocessing.TimeoutError)
        assert isinstance(caught.value, TimeoutError)
        assert (caught.value.timeout, caught.value.envs) == (0.2, (2, 3))
        assert "call `step_wait` again, `abandon(error.envs)`, or `close()`." in str(caught.value)
        assert re.search(rf"faulty\.py.*in {fault}", report(caught.value)), report(caught.value)
        place = rf"env 3, of envs 2-3, worker 1, pid {pid}, during step, at .+ in \w+"
        assert re.fullmatch(place, caught.value.where[3]), caught.value.where
        names(caught.value, env=3, worker=1, pid=pid, command="step")
    with pytest.raises(AlreadyPendingCallError):
        envs.step_async([0] * 4)
    check_close(envs)


@pytest.mark.linux
@CHEAP
@pytest.mark.parametrize("how", ["slowly", "late"])
def test_hang_with_a_slowly_written_stack(launch: Launch, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may lose its core in the middle of a line, or wait for one before it begins: the caller waits for it."""
    written, reads = StackFile.read, itertools.count(1)

    def slowly(box: StackFile) -> str:
        text = written(box)
        return text[: max(len(text) * next(reads) // 10, 1)] if text else text

    first: list[float] = []

    def late(box: StackFile) -> str:
        first.append(time.monotonic())
        return written(box) if first[-1] - first[0] > 0.15 else ""

    if how == "late":
        monkeypatch.setattr(WorkerProcess, "_state", lambda worker: "R")
    monkeypatch.setattr(StackFile, "read", slowly if how == "slowly" else late)
    envs = launch(make_env_fns(2, {1: faulty_env_fn(1, write_pid_then(tmp_path / "stuck", "sleep"), reset=2)}))
    envs.reset(seed=1)
    envs.reset_async()
    wait_for(tmp_path / "stuck")
    with pytest.raises(StepTimeout) as caught:
        envs.reset_wait(timeout=0.3)
    assert "in sleep" in report(caught.value)


@pytest.mark.long
@CHEAP
@pytest.mark.parametrize("call", ["reset", "call"])
def test_hang_in_other_calls(launch: Launch, call: str, tmp_path: Path) -> None:
    """A reset and a call have timeouts as well."""
    stuck = faulty_env_fn(1, write_pid_then(tmp_path / "stuck", "sleep"), reset=2)
    envs = launch(make_env_fns(2, {1: stuck}))
    envs.reset(seed=1)
    if call == "reset":
        envs.reset_async()
        wait_for(tmp_path / "stuck")
    else:
        envs.call_async("trigger", "sleep", only=1)
    with pytest.raises(StepTimeout) as caught:
        getattr(envs, f"{call}_wait")(timeout=0.3)
    assert "in sleep" in report(caught.value)
    check_close(envs)


def test_step_timeout_is_recorded_and_the_timeout_of_a_call_is_not(launch: Launch, tmp_path: Path) -> None:
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
    where = f"env 1 (worker {worker}, pid {record.pid}), step"
    assert f"{where}: StepTimeout: The call to `step_wait` has timed out" in str(record)
    assert re.search(r"second\(s\), at \w+\.py:\d+ in sleep$", str(record))
    assert envs.stats()["errors"] == 1
    check_close(envs)
    assert list(envs.errors) == [record]


@pytest.mark.long
def test_step_timeout_option(launch: Launch) -> None:
    """``step_timeout`` bounds plain ``step()``."""
    envs = launch(make_env_fns(2, {1: faulty_env_fn(1, "sleep", step=2)}), step_timeout=0.5)
    envs.reset(seed=1)
    envs.step([0, 0])
    begun = time.monotonic()
    with pytest.raises(StepTimeout, match="env"):
        envs.step([0, 0])
    assert 0.45 < time.monotonic() - begun < 0.5 + PATIENCE
    check_close(envs)


@pytest.mark.long
def test_results_never_shift(launch: Launch) -> None:
    """A late reply belongs to the step that requested it, also when other calls come in between."""
    slow = {index: faulty_env_fn(index, Pause(0.25), step={2, 4, 5}) for index in (1, 3)}
    envs = launch(make_env_fns(4, slow), num_workers=2)
    checker = RowChecker.start(envs)
    late = 0
    for step in range(1, 8):
        actions = [step, step + 1, step + 2, step + 3]
        envs.step_async(actions)
        while True:
            try:
                answer = envs.step_wait(timeout=0.05)
                break
            except StepTimeout:
                late += 1
                with pytest.raises(AlreadyPendingCallError):
                    envs.call_async("echo", step)
        checker.check_step(actions, answer)
        assert envs.call("echo", step) == (step,) * 4
        assert envs.get_attr("tick") == tuple(row["tick"] for row in checker.rows)
    assert late >= 3
    checker.check_reset(envs.reset())
    checker.check_step([0] * 4, envs.step([0] * 4))


def test_stopped(launch: Launch) -> None:
    """A worker under SIGSTOP: after a timeout it is continued and replies, or close kills it."""
    envs = launch(make_env_fns(2))
    checker = RowChecker.start(envs)
    pid = worker_pids(envs)[1]
    for ending in ("continued", "closed"):
        os.kill(pid, signal.SIGSTOP)
        envs.step_async([1, 1])
        with pytest.raises(StepTimeout) as caught:
            envs.step_wait(timeout=0.2)
        names(caught.value, env=1, worker=1, pid=pid, command="step")
        assert alive(pid)
        if ending == "continued":
            os.kill(pid, signal.SIGCONT)
            checker.check_step([1, 1], envs.step_wait(timeout=60))
    check_close(envs)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["sleep", "hold_gil", "ignore_sigterm", "stop"])
def test_close_hangs(launch: Launch, fault: str, tmp_path: Path) -> None:
    """An environment with a ``close`` that never returns is ended in time; its sibling is closed properly."""
    closers = {  # not the first: that one is also built and closed in this process, for its spaces
        1: faulty_env_fn(1, write_pid_then(tmp_path / "closing", fault), close=True),
        2: faulty_env_fn(2, WritePid(tmp_path / "closed"), close=True),
    }
    envs = launch(make_env_fns(3, closers))
    envs.reset(seed=1)
    check_close(envs, timeout=0.5)
    assert (tmp_path / "closed").exists()
    assert (tmp_path / "closing").exists()


@pytest.mark.parametrize("fault", ["raises", "sys_exit", "evil_error", "unpicklable_error"])
def test_close_raises(launch: Launch, fault: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All others are closed, in the same worker too; there is one warning and no traceback on the terminal."""
    closers = {index: faulty_env_fn(index, WritePid(tmp_path / f"closed-{index}"), close=True) for index in range(4)}
    closers[2] = faulty_env_fn(2, fault, close=True)
    envs = launch(make_env_fns(4, closers), num_workers=2)
    envs.reset(seed=1)
    for path in tmp_path.glob("closed-*"):
        path.unlink()  # the first environment was also built and closed in this process, for its spaces
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_close(envs, timeout=5)
    assert sorted(path.name for path in tmp_path.glob("closed-*")) == ["closed-0", "closed-1", "closed-3"]
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 1, texts
    assert re.search(r"\benv 2\b", texts[0])
    wanted = {"raises": "out of order", "sys_exit": "SystemExit", "evil_error": "EvilError"}
    assert wanted.get(fault, "UnpicklableError") in texts[0]
    assert "Traceback" not in capfd.readouterr().err


@CHEAP
def test_death_in_close(launch: Launch, tmp_path: Path) -> None:
    """A worker that dies in ``close`` does not prevent the others from closing."""
    closers = {
        1: faulty_env_fn(1, "segfault", close=True),
        2: faulty_env_fn(2, WritePid(tmp_path / "closed"), close=True),
    }
    envs = launch(make_env_fns(3, closers))
    envs.reset(seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_close(envs, timeout=5)
    assert (tmp_path / "closed").exists()


# --- Delays until it is noticed and over, when no other program interferes: the best of several attempts

ATTEMPTS = 8


def best(attempt: Callable[[], float], enough: float) -> float:
    """Return the shortest of a few durations; stop when one is short enough."""
    least = float("inf")
    for _ in range(ATTEMPTS):
        least = min(least, attempt())
        if least < enough:
            break
    return least


class Sleeps(gymnasium.Env[Any, Any]):
    """An environment with steps of a minute."""

    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return 0, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(60)
        return 0, 0.0, False, False, {}


@pytest.mark.parametrize("num_workers", [1, 4])
def test_death_is_noticed_within_a_tenth_of_a_second(num_workers: int) -> None:
    """The caller waits for the step in which the worker dies."""

    def attempt() -> float:
        with killable_engine([Sleeps] * 4, num_workers=num_workers) as envs:
            envs.reset()
            envs.step_async(np.zeros(4, np.int64))
            for process in envs.processes:
                os.kill(process.pid, signal.SIGKILL)
            started_at = time.monotonic()
            with pytest.raises(vecenv.errors.WorkerDied):
                envs.step_wait()
            return time.monotonic() - started_at

    assert best(attempt, 0.1) < 0.1


@pytest.mark.parametrize("dead", [False, True])
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

    assert best(attempt, 1.0) < 1.0


PROGRAM = """
import time, numpy, vecenv
from test_hang import Sleeps
envs = vecenv.AsyncVectorEnv([Sleeps] * 2, num_workers=2)
envs.reset()
envs.step_async(numpy.zeros(2, numpy.int64))
print(time.monotonic(), flush=True)
"""


@pytest.mark.long
def test_a_program_with_a_step_pending_ends_within_two_seconds() -> None:
    """Programs report the time of their last line by the system clock, which all processes share."""

    def attempt() -> float:
        here = os.path.dirname(__file__)
        path = os.pathsep.join([str(PACKAGE), here, os.path.dirname(here)])
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PROGRAM],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
            timeout=100,
            check=True,
        )
        return time.monotonic() - float(done.stdout)

    assert best(attempt, 2.0) < 2.0


# --- ``abandon``: stop waiting for some environments; rows in flight, and their locations ---------

HANGS = functools.partial(faulty_env_fn, fault="sleep", step=1)


def test_abandon_ends_the_rows_of_a_hanging_worker() -> None:
    with open_engine([healthy_env_fn(0), healthy_env_fn(1), HANGS(2), healthy_env_fn(3)], num_workers=2) as envs:
        assert [list(rows) for rows in envs.worker_rows] == [[0, 1], [2, 3]]
        envs.reset(seed=1)
        assert envs.in_flight.tolist() == []
        envs.send(np.ones(4, np.int64), range(4))
        assert sorted(envs.in_flight.tolist()) == [0, 1, 2, 3]
        assert sorted(envs.recv(count=2)[4]["env_id"].tolist()) == [0, 1]
        started_at = time.monotonic()
        envs.abandon([2])
        with pytest.raises(WorkerDied, match="it was abandoned and was killed") as info:
            envs.recv(count=1)
        assert time.monotonic() - started_at < 60
        assert info.value.envs == (2, 3)
        assert envs.in_flight.tolist() == []
        envs.reset_async(env_id=[2, 3], seed=[5, 6])
        assert sorted(envs.recv(count=2)[4]["env_id"].tolist()) == [2, 3]


def test_abandon_ignores_workers_without_pending_requests() -> None:
    with open_engine([healthy_env_fn(0), healthy_env_fn(1)], num_workers=1, use_caller=True) as envs:
        assert [list(rows) for rows in envs.worker_rows] == [[0], [1]]
        envs.reset(seed=1)
        pids = [process.pid for process in envs.processes]
        envs.abandon([0, 1])
        envs.send(np.ones(1, np.int64), [0])
        envs.abandon([0])
        assert envs.recv(count=1)[4]["env_id"].tolist() == [0]
        with pytest.raises(NoAsyncCallError):
            envs.recv(count=1)
        envs.step(np.ones(2, np.int64))
        assert [process.pid for process in envs.processes] == pids
        for wrong in ([2], [-1], [0, 0], []):
            with pytest.raises(ValueError, match="env_id"):
                envs.abandon(wrong)


def test_abandon_with_restarts_returns_rows_of_new_environments() -> None:
    envs_of: list[Any] = [HANGS(0), healthy_env_fn(1)]
    with ready_engine(envs_of, num_workers=2, on_failure="restart") as envs:
        envs.send(np.ones(2, np.int64), [0, 1])
        assert envs.recv(count=1)[4]["env_id"].tolist() == [1]
        envs.abandon([0])
        *_, truncations, infos = envs.recv(count=1)
        assert (infos["env_id"].tolist(), truncations.tolist(), infos["restarted"].tolist()) == ([0], [True], [True])


def test_a_death_after_an_interrupted_timeout_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes while the stack of a late worker is read, and then the worker dies for another reason."""

    def interrupt(_: WorkerProcess) -> str:
        raise KeyboardInterrupt

    with ready_engine([HANGS(0)], num_workers=1, on_failure="restart", step_timeout=0.2) as envs:
        monkeypatch.setattr(WorkerProcess, "read_stack", interrupt)
        with pytest.raises(KeyboardInterrupt):
            envs.step([1])
        monkeypatch.undo()
        os.kill(worker_pids(envs)[0], signal.SIGKILL)
        assert envs.step_wait()[-1]["restarted"].tolist() == [True]
        assert [record.error.timeout for record in envs.errors] == [None]


# --- A call beside a step of `send` that hangs in the same worker ---------------------------------


@pytest.mark.parametrize("call", ["exec_func", "save"])
def test_call_behind_a_hanging_step_ends_at_step_timeout(call: str) -> None:
    with killable_engine([HANGS(0), healthy_env_fn(1)], num_workers=1, step_timeout=0.5) as envs:
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


def test_call_behind_a_hanging_step_ends_with_its_worker_if_it_is_restarted() -> None:
    with killable_engine([HANGS(0), healthy_env_fn(1)], num_workers=1, step_timeout=0.5, on_failure="restart") as envs:
        envs.reset(seed=1)
        envs.send([1], [0])
        with pytest.raises(WorkerDied, match="during step: it hung for more than"):
            envs.exec_func(id, [1])
        *_, truncations, infos = envs.recv(count=1)
        assert (infos["env_id"].tolist(), truncations.tolist()) == ([0], [True])


def poll_for_long(result: Any) -> Any:
    """Hang in a C call that a signal interrupts, and continue after it."""
    ctypes.CDLL(None).poll(None, 0, 10_000)
    return result


@pytest.mark.linux
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_hang_that_ends_at_the_signal_for_its_stack_is_blamed_on_its_environment(on_failure: Any, tmp_path: Path) -> None:
    fns = make_env_fns(3, {1: faulty_env_fn(1, poll_for_long, step=2)})
    options: Any = {"num_workers": 1, "step_timeout": 0.3, "on_failure": on_failure, "record_failures": tmp_path}
    with killable_engine(fns, **options) as envs:
        envs.reset(seed=1)
        envs.step([0] * 3)
        if on_failure == "raise":
            with pytest.raises(StepTimeout, match=r"(?s)env 1, of envs .* in poll_for_long") as caught:
                envs.step([0] * 3)
            assert caught.value.where == envs.errors[0].error.where
        else:
            envs.step([0] * 3)
        (record,) = envs.errors
        assert record.command == "step"
        assert "-env1-" in record.recorded
        assert re.fullmatch(
            r"env 1, of envs 0-2, worker 0, pid \d+, during step, at .* in poll_for_long", record.error.where[2]
        )  # fmt: skip
        if on_failure == "raise":
            assert record.env == 1
        else:
            assert re.search(r"env 1, of envs 0-2\) died during step: .* in poll_for_long", str(record.error)), record


def test_step_timeout_limits_no_call_and_no_step_of_another_worker_beside_it() -> None:
    with killable_engine([HANGS(0), healthy_env_fn(1)], step_timeout=0.3) as envs:
        envs.reset(seed=1)
        envs.send([1], [0])
        assert envs.exec_func(lambda env: time.sleep(0.7), [1]) == (None, None)
        assert not envs.errors
        with pytest.raises(StepTimeout):
            envs.recv(count=1)


# --- Clocks jump: row 49 of the table in ``FAULTS.md`` ------------------------------------------

SOURCES = sorted(Path(vecenv.__file__).parent.rglob("*.py"))


SHOWN = {"errors": {"datetime.now"}, "file": {"datetime.now"}}  # for the log: when something failed; no wait uses it
SETTABLE = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow"}


def settable_clocks(tree: ast.Module) -> set[str]:
    """Return the uses of a clock that can be set."""
    used = {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    imported = {
        f"{node.module}.{name.name}" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names
    }
    return SETTABLE & (used | imported)


def test_search_finds_settable_clocks() -> None:
    """Otherwise the next test could not fail."""
    assert settable_clocks(ast.parse("import time\ntime.monotonic(); time.time()")) == {"time.time"}
    assert settable_clocks(ast.parse("from time import time_ns")) == {"time.time_ns"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_only_monotonic_clocks(path: Path) -> None:
    """No wait uses a clock that can be set."""
    assert settable_clocks(ast.parse(path.read_text())) == SHOWN.get(path.stem, set())


@pytest.mark.long
@CHEAP
def test_clock_jump_changes_no_timeout(launch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour forwards, a day back: neither ends a wait early, nor extends it."""
    envs = launch(make_env_fns(2, delay=0.3))
    checker = RowChecker.start(envs)
    for jump in (3600.0, -86400.0):
        real = time.time  # noqa: TID251 - it is what jumps
        monkeypatch.setattr(time, "time", lambda real=real, jump=jump: real() + jump)
        envs.step_async([1, 1])
        begun = time.monotonic()
        with pytest.raises(StepTimeout):
            envs.step_wait(timeout=0.1)
        assert 0.09 < time.monotonic() - begun < 60
        checker.check_step([1, 1], envs.step_wait(timeout=60))

