"""What takes too long: environments that hang, how soon it is known, giving up on some, and clocks that jump."""

from __future__ import annotations

import ast
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
from envs import ended, opened, started
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from observe import CHEAP, FAULTS, PACKAGE, PATIENCE, Launch, alive, names, remaining, report, wait_for, worker_pids
from vandals import Announce, Ledger, Pause, Touch, crew, vandal, witness

import vecenv
from vecenv.engine.handles import ProcessWorker
from vecenv.errors import StepTimeout, WorkerDied
from vecenv.system.supervision import BlackBox

pytestmark = FAULTS


# --- Environments that do not answer: rows 15 to 20 of the table in ``FAULTS.md`` ---------------

GRACE = 0.3  # what the tests give close()


def closes(envs: Any, timeout: float = GRACE) -> None:
    """``close(timeout)`` is a bound, whatever the workers do."""
    pids = worker_pids(envs)
    begun = time.monotonic()
    envs.close(timeout=timeout)
    assert time.monotonic() - begun < timeout + PATIENCE
    assert envs.closed
    assert not remaining(pids, PATIENCE)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sleep", "gil"])
def test_hang(launch: Launch, kind: str, tmp_path: Path) -> None:
    """The timeout says where in the environment's own code it hangs; waiting again and closing both work."""
    fault = {"sleep": "sleep", "gil": "hold_gil"}[kind]
    envs = launch(crew(4, {3: vandal(3, Announce(tmp_path / "stuck", fault), step=1)}), num_workers=2)
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
        assert re.search(rf"faulty\.py.*in {fault}", report(caught.value)), report(caught.value)
        names(caught.value, env=3, worker=1, pid=pid, command="step")
    with pytest.raises(AlreadyPendingCallError):
        envs.step_async([0] * 4)
    closes(envs)


@pytest.mark.linux
@CHEAP
@pytest.mark.parametrize("how", ["slowly", "late"])
def test_hang_whose_stack_is_written(launch: Launch, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may lose its core in the middle of a line, or wait for one before it begins: it is given the time."""
    written, reads = BlackBox.read, itertools.count(1)

    def slowly(box: BlackBox) -> str:
        text = written(box)
        return text[: max(len(text) * next(reads) // 10, 1)] if text else text

    first: list[float] = []

    def late(box: BlackBox) -> str:
        first.append(time.monotonic())
        return written(box) if first[-1] - first[0] > 0.15 else ""

    if how == "late":
        monkeypatch.setattr(ProcessWorker, "_state", lambda worker: "R")
    monkeypatch.setattr(BlackBox, "read", slowly if how == "slowly" else late)
    envs = launch(crew(2, {1: vandal(1, Announce(tmp_path / "stuck", "sleep"), reset=2)}))
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
    """A reset and a call have timeouts just as well."""
    stuck = vandal(1, Announce(tmp_path / "stuck", "sleep"), reset=2)
    envs = launch(crew(2, {1: stuck}))
    envs.reset(seed=1)
    if call == "reset":
        envs.reset_async()
        wait_for(tmp_path / "stuck")
    else:
        envs.call_async("do", "sleep", only=1)
    with pytest.raises(StepTimeout) as caught:
        getattr(envs, f"{call}_wait")(timeout=0.3)
    assert "in sleep" in report(caught.value)
    closes(envs)


@pytest.mark.long
def test_step_timeout_option(launch: Launch) -> None:
    """``step_timeout`` bounds plain ``step()``."""
    envs = launch(crew(2, {1: vandal(1, "sleep", step=2)}), step_timeout=0.5)
    envs.reset(seed=1)
    envs.step([0, 0])
    begun = time.monotonic()
    with pytest.raises(StepTimeout, match="env"):
        envs.step([0, 0])
    assert 0.45 < time.monotonic() - begun < 0.5 + PATIENCE
    closes(envs)


@pytest.mark.long
def test_results_never_shift(launch: Launch) -> None:
    """A late answer belongs to the step that asked for it, also when other calls come in between."""
    slow = {index: vandal(index, Pause(0.25), step={2, 4, 5}) for index in (1, 3)}
    envs = launch(crew(4, slow), num_workers=2)
    ledger = Ledger.of(envs)
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
        ledger.step(actions, answer)
        assert envs.call("echo", step) == (step,) * 4
        assert envs.get_attr("tick") == tuple(row["tick"] for row in ledger.rows)
    assert late >= 3
    ledger.reset(envs.reset())
    ledger.step([0] * 4, envs.step([0] * 4))


def test_stopped(launch: Launch) -> None:
    """A worker under SIGSTOP: a timeout, then either it is continued and answers, or close kills it."""
    envs = launch(crew(2))
    ledger = Ledger.of(envs)
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
            ledger.step([1, 1], envs.step_wait(timeout=60))
    closes(envs)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["sleep", "hold_gil", "ignore_sigterm", "stop"])
def test_close_hangs(launch: Launch, fault: str, tmp_path: Path) -> None:
    """An environment whose ``close`` never returns is ended in time; its sibling was closed properly."""
    closers = {  # not the first: that one is also built and closed in this process, to learn the spaces
        1: vandal(1, Announce(tmp_path / "closing", fault), close=True),
        2: vandal(2, Touch(tmp_path / "closed"), close=True),
    }
    envs = launch(crew(3, closers))
    envs.reset(seed=1)
    closes(envs, timeout=0.5)
    assert (tmp_path / "closed").exists()
    assert (tmp_path / "closing").exists()


@pytest.mark.parametrize("fault", ["raises", "sys_exit", "evil_error", "unpicklable_error"])
def test_close_raises(launch: Launch, fault: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All others are closed, in the same worker too; there is one warning and no traceback on the terminal."""
    closers = {index: vandal(index, Touch(tmp_path / f"closed-{index}"), close=True) for index in range(4)}
    closers[2] = vandal(2, fault, close=True)
    envs = launch(crew(4, closers), num_workers=2)
    envs.reset(seed=1)
    for path in tmp_path.glob("closed-*"):
        path.unlink()  # the first environment was also built and closed in this process, to learn the spaces
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        closes(envs, timeout=5)
    assert sorted(path.name for path in tmp_path.glob("closed-*")) == ["closed-0", "closed-1", "closed-3"]
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 1, texts
    assert re.search(r"\benv 2\b", texts[0])
    wanted = {"raises": "out of order", "sys_exit": "SystemExit", "evil_error": "EvilError"}
    assert wanted.get(fault, "UnpicklableError") in texts[0]
    assert "Traceback" not in capfd.readouterr().err


@CHEAP
def test_close_dead(launch: Launch, tmp_path: Path) -> None:
    """A worker that dies in ``close`` does not keep the others from closing."""
    closers = {
        1: vandal(1, "segfault", close=True),
        2: vandal(2, Touch(tmp_path / "closed"), close=True),
    }
    envs = launch(crew(3, closers))
    envs.reset(seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        closes(envs, timeout=5)
    assert (tmp_path / "closed").exists()


# --- How soon it is noticed and over, when no other program is in the way: the best of several attempts

ATTEMPTS = 8


def best(attempt: Callable[[], float], enough: float) -> float:
    """The least of a few durations; no more attempts than it takes."""
    least = float("inf")
    for _ in range(ATTEMPTS):
        least = min(least, attempt())
        if least < enough:
            break
    return least


class Sleeps(gymnasium.Env[Any, Any]):
    """A step takes a minute."""

    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return 0, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(60)
        return 0, 0.0, False, False, {}


@pytest.mark.parametrize("num_workers", [1, 4])
def test_a_death_is_known_within_a_tenth_of_a_second(num_workers: int) -> None:
    """While the caller waits for the step in which it happens."""

    def attempt() -> float:
        with ended([Sleeps] * 4, num_workers=num_workers) as envs:
            envs.reset()
            envs.step_async(np.zeros(4, np.int64))
            for process in envs.processes:
                os.kill(process.pid, signal.SIGKILL)
            began = time.monotonic()
            with pytest.raises(vecenv.errors.WorkerDied):
                envs.step_wait()
            return time.monotonic() - began

    assert best(attempt, 0.1) < 0.1


@pytest.mark.parametrize("dead", [False, True])
def test_close_takes_less_than_a_second(dead: bool) -> None:
    def attempt() -> float:
        envs = vecenv.AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 4, num_workers=4)
        envs.reset()
        if dead:
            for process in envs.processes:
                os.kill(process.pid, signal.SIGKILL)
        began = time.monotonic()
        envs.close()
        return time.monotonic() - began

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
    """The clock is the machine's, so a program can say when its last line was over."""

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


# --- ``abandon``: nobody waits any longer for some environments; and who is in flight, and where

HANGS = functools.partial(vandal, fault="sleep", step=1)


def test_the_rows_of_a_worker_that_hangs_are_answered_by_its_end() -> None:
    with opened([witness(0), witness(1), HANGS(2), witness(3)], num_workers=2) as envs:
        assert [list(rows) for rows in envs.worker_rows] == [[0, 1], [2, 3]]
        envs.reset(seed=1)
        assert envs.in_flight.tolist() == []
        envs.send(np.ones(4, np.int64), range(4))
        assert sorted(envs.in_flight.tolist()) == [0, 1, 2, 3]
        assert sorted(envs.recv(count=2)[4]["env_id"].tolist()) == [0, 1]
        began = time.monotonic()
        envs.abandon([2])
        with pytest.raises(WorkerDied, match="its answer was no longer wanted and was killed") as info:
            envs.recv(count=1)
        assert time.monotonic() - began < 60
        assert info.value.envs == (2, 3)
        assert envs.in_flight.tolist() == []
        envs.reset_async(env_id=[2, 3], seed=[5, 6])
        assert sorted(envs.recv(count=2)[4]["env_id"].tolist()) == [2, 3]


def test_who_owes_nothing_is_left_alone() -> None:
    with opened([witness(0), witness(1)], num_workers=1, use_caller=True) as envs:
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


def test_with_restarts_its_rows_come_from_new_environments() -> None:
    envs_of: list[Any] = [HANGS(0), witness(1)]
    with started(envs_of, num_workers=2, on_failure="restart") as envs:
        envs.send(np.ones(2, np.int64), [0, 1])
        assert envs.recv(count=1)[4]["env_id"].tolist() == [1]
        envs.abandon([0])
        *_, truncations, infos = envs.recv(count=1)
        assert (infos["env_id"].tolist(), truncations.tolist(), infos["restarted"].tolist()) == ([0], [True], [True])


# --- Clocks jump: row 49 of the table in ``FAULTS.md`` ------------------------------------------

SOURCES = sorted(Path(vecenv.__file__).parent.rglob("*.py"))


SHOWN = {"errors": {"datetime.now"}, "file": {"datetime.now"}}  # to people: when something failed; nothing waits for it
SETTABLE = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow"}


def settable_clocks(tree: ast.Module) -> set[str]:
    """Uses of a clock that somebody can set."""
    used = {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    imported = {
        f"{node.module}.{name.name}" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names
    }
    return SETTABLE & (used | imported)


def test_the_search_finds_what_it_looks_for() -> None:
    """So that the next test means something."""
    assert settable_clocks(ast.parse("import time\ntime.monotonic(); time.time()")) == {"time.time"}
    assert settable_clocks(ast.parse("from time import time_ns")) == {"time.time_ns"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_only_monotonic_clocks(path: Path) -> None:
    """Nothing waits by a clock that can be set."""
    assert settable_clocks(ast.parse(path.read_text())) == SHOWN.get(path.stem, set())


@pytest.mark.long
@CHEAP
def test_a_jump_of_the_clock_changes_no_timeout(launch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour forwards, a day back: neither ends a wait early, nor keeps it for ever."""
    envs = launch(crew(2, delay=0.3))
    ledger = Ledger.of(envs)
    for jump in (3600.0, -86400.0):
        real = time.time  # noqa: TID251 - it is what jumps
        monkeypatch.setattr(time, "time", lambda real=real, jump=jump: real() + jump)
        envs.step_async([1, 1])
        begun = time.monotonic()
        with pytest.raises(StepTimeout):
            envs.step_wait(timeout=0.1)
        assert 0.09 < time.monotonic() - begun < 60
        ledger.step([1, 1], envs.step_wait(timeout=60))

