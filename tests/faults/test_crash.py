"""Environments that raise and workers that die: rows 1 to 14 of the table in ``FAULTS.md``."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import pickle
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from observe import CHEAP, FAULTS, METHODS, PATIENCE, Launch, alive, names, remaining, report, wait_for, worker_pids
from vandals import Announce, ForkAndLinger, Ledger, Pause, crew, vandal

from vecenv.errors import EnvError, RemoteTraceback, WorkerDied
from vecenv.testing.faulty import KeywordOnlyError, TwoArgumentsError, UnprintableError, WitnessEnv

pytestmark = FAULTS


ENV, WORKER = 3, 1  # where it happens: four environments, two workers
ACTIONS = [1, 2, 3, 4]


@dataclass(frozen=True)
class Case:
    """One fault, and what must be said about it.

    ``text``: patterns that the whole report (message, notes, causes) must contain. ``exitcode``: of a worker
    that dies; ``None`` if it must go on living.
    """

    fault: str
    expected: type[Exception]
    text: tuple[str, ...]
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
    "call": {"step": 10**9},  # never: the test calls for it
}

MORE = [  # at other moments; not with new interpreters once more, it makes no difference to these
    pytest.param(case, moment, id=f"{case.fault}-{moment}")
    for case in CASES
    if case.fault in ("raises", "unpicklable_error", "sys_exit", "segfault")
    for moment in ("reset", "autoreset", "call")
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fault)
def test_crash_cases(case: Case, launch: Launch, tmp_path: Path) -> None:
    """In a step: one exception that says everything; then everything works again."""
    check_crash(case, "step", launch, tmp_path)


@CHEAP
@pytest.mark.parametrize(("case", "moment"), MORE)
def test_crash_cases_elsewhere(case: Case, moment: str, launch: Launch, tmp_path: Path) -> None:
    """The same in a reset, in an automatic reset, and in a call."""
    check_crash(case, moment, launch, tmp_path)


def check_crash(case: Case, moment: str, launch: Launch, tmp_path: Path) -> None:
    once = tmp_path / "once"
    fault = vandal(ENV, case.fault, {"length": 2}, once=once, **MOMENTS[moment])
    envs = launch(crew(4, {ENV: fault}, length=2), num_workers=2)
    ledger = Ledger.of(envs, seed=7, length=2)
    pids = worker_pids(envs)
    ledger.step(ACTIONS, envs.step(ACTIONS))
    if moment == "autoreset":
        ledger.step(ACTIONS, envs.step(ACTIONS))  # the last step of the episode
    command = "step" if moment == "autoreset" else moment
    call = {
        "step": lambda: envs.step(ACTIONS),
        "reset": envs.reset,
        "autoreset": lambda: envs.step(ACTIONS),
        "call": lambda: envs.call("do", case.fault, only=ENV),
    }[moment]
    begun = time.monotonic()
    with pytest.raises(case.expected) as caught:
        call()
    took = time.monotonic() - begun

    error = caught.value
    text = report(error)
    assert type(error) is case.expected
    for pattern in case.text:
        assert re.search(pattern, text), f"{pattern!r} is not in:\n{text}"
    names(error, env=ENV, worker=WORKER, pid=pids[WORKER], command=command)
    if case.exitcode is None:
        assert isinstance(error.__cause__, RemoteTraceback)
        assert any(f"env {ENV}" in note for note in error.__notes__)
        assert worker_pids(envs) == pids
        assert all(map(alive, pids))
    else:
        assert took < PATIENCE
        assert (error.worker, error.pid, error.exitcode, error.command) == (WORKER, pids[1], case.exitcode, command)
        assert tuple(error.envs) == (2, 3)
        assert alive(pids[0])
        assert not alive(pids[1])
    record = envs.errors[-1]
    assert (record.worker, record.pid, record.command) == (WORKER, pids[WORKER], command)
    assert type(record.error) is case.expected
    assert 0 <= time.monotonic() - record.time < 20

    lost = {ENV} if case.exitcode is None else {2, 3}
    if moment == "call" and case.exitcode is None:
        lost = set()  # a failed call is not a failed environment
    goes_on(envs, ledger, lost)
    closes(envs)


def steps(envs: Any, count: int) -> None:
    for _ in range(count):
        envs.step(ACTIONS[: envs.num_envs])


def goes_on(envs: Any, ledger: Ledger, lost: set[int]) -> None:
    """After an error: a reset builds anew what was lost, and only that, and then everything is right again."""
    observations, infos = envs.reset(seed=20)
    rows = [WitnessEnv.read(row) for row in observations]
    assert {env for env, row in enumerate(rows) if row["life"] != ledger.rows[env]["life"]} == lost
    assert [row["seed"] for row in rows] == list(range(20, 20 + len(rows)))
    assert all(rows[env]["episode"] == 1 and rows[env]["steps"] == 0 for env in lost)
    assert infos["tick"].tolist() == [0] * len(rows)
    after = Ledger(len(rows), length=ledger.length)
    after.rows = rows
    for _ in range(4):
        after.step(ACTIONS, envs.step(ACTIONS))


def closes(envs: Any) -> None:
    begun = time.monotonic()
    envs.close()
    assert time.monotonic() - begun < PATIENCE
    assert envs.closed


def test_all_failing_environments_are_told(launch: Launch) -> None:
    """Two environments of two workers and one of the caller's choice fail in one step: all are recorded."""
    failing = {0: "raises", 2: "sys_exit", 3: "two_arguments_error"}
    envs = launch(crew(4, {env: vandal(env, fault, step=1) for env, fault in failing.items()}), num_workers=2)
    envs.reset(seed=1)
    with pytest.raises(ValueError, match="out of order") as caught:
        envs.step(ACTIONS)
    text = report(caught.value)
    assert all(re.search(rf"\benvs?\b[^\n]*\b{env}\b", text) for env in failing), text
    assert sorted(record.env for record in envs.errors) == [0, 2, 3]
    assert [type(r.error) for r in sorted(envs.errors, key=lambda r: r.env)] == [ValueError, EnvError, EnvError]
    assert all(f"in {failing[record.env]}" in record.traceback for record in envs.errors)


def test_death_while_idle(launch: Launch) -> None:
    """Killed between two calls, as by the OOM killer: the next call says so."""
    envs = launch(crew(4), num_workers=2)
    ledger = Ledger.of(envs, seed=7)
    pids = worker_pids(envs)
    os.kill(pids[WORKER], signal.SIGKILL)
    assert not remaining([pids[WORKER]], PATIENCE)
    with pytest.raises(WorkerDied) as caught:
        envs.step(ACTIONS)
    error = caught.value
    assert re.search("SIGKILL", str(error))
    assert re.search("(?i)out of memory", str(error))
    assert (error.worker, error.pid, error.exitcode) == (WORKER, pids[WORKER], -signal.SIGKILL)
    assert error.command in ("idle", "step")
    assert tuple(error.envs) == (2, 3)
    goes_on(envs, ledger, {2, 3})
    closes(envs)


def test_death_before_a_worker_is_asked_leaves_no_answer_behind(launch: Launch) -> None:
    """However a death and a call race each other, the answers that survive are never given to a later call."""
    envs = launch(crew(4), num_workers=2)
    ledger = Ledger.of(envs, seed=7)
    for attempt in range(3):
        victim = attempt % 2
        os.kill(worker_pids(envs)[victim], signal.SIGKILL)  # and step at once, dead or not
        with pytest.raises(WorkerDied, match="SIGKILL"):
            steps(envs, 1000)
        observations, _ = envs.reset(seed=attempt)
        ledger.rows = [WitnessEnv.read(row) for row in observations]
        ledger.done = [False] * 4
        assert {row["tick"] for row in ledger.rows} == {0}
        for _ in range(3):
            ledger.step(ACTIONS, envs.step(ACTIONS))


def test_death_with_inherited_descriptors(launch: Launch, tmp_path: Path) -> None:
    """A helper that the environment forked still holds the worker's pipe: there is no end of file, and no waiting for it."""
    check_death_with_inherited_descriptors(launch, tmp_path)


@pytest.mark.parametrize("method", ["fork"], indirect=True)  # a fork server tells of its children by itself
def test_death_with_inherited_descriptors_where_there_are_no_pidfds(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    check_death_with_inherited_descriptors(launch, tmp_path)


def check_death_with_inherited_descriptors(launch: Launch, tmp_path: Path) -> None:
    fault = vandal(1, Announce(tmp_path / "died", "fork_helper_and_die"), step=2, once=tmp_path / "once")
    envs = launch(crew(2, {1: fault}))
    envs.reset(seed=1)
    envs.step([0, 0])
    pid = worker_pids(envs)[1]
    begun = time.monotonic()
    with pytest.raises(WorkerDied, match="SIGKILL") as caught:
        envs.step([0, 0])
    assert time.monotonic() - begun < PATIENCE
    names(caught.value, env=1, worker=1, pid=pid, command="step")
    closes(envs)


@pytest.mark.long
@pytest.mark.parametrize("method", ["forkserver"], indirect=True)
def test_forkserver_killed(launch: Launch) -> None:
    """Workers do not need the process that forked them; their deaths are still seen, and others can be started."""
    envs = launch(crew(4), num_workers=2)
    ledger = Ledger.of(envs, seed=7)
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    os.kill(server, signal.SIGKILL)
    assert not remaining([server], PATIENCE)
    for _ in range(3):
        ledger.step(ACTIONS, envs.step(ACTIONS))
    pid = worker_pids(envs)[WORKER]
    os.kill(pid, signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        envs.step(ACTIONS)
    assert time.monotonic() - begun < PATIENCE
    assert (caught.value.worker, caught.value.pid) == (WORKER, pid)
    goes_on(envs, ledger, {2, 3})
    closes(envs)


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "count"),
    [
        pytest.param(method, count, marks=pytest.mark.slow if count == 64 and method != "fork" else ())
        for method in METHODS
        for count in (1, 8, 64)
    ],
    indirect=["method"],
)
@pytest.mark.timeout(300, method="signal")
def test_all_die_at_once(launch: Launch, count: int) -> None:
    """One error names them all. (Starting 64 interpreters takes longer than the default run allows: marked slow.)"""
    envs = launch([vandal(env, "kill", step=2) for env in range(count)])
    envs.reset(seed=1)
    envs.step([0] * count)
    begun = time.monotonic()
    with pytest.raises(WorkerDied, match="SIGKILL") as caught:
        envs.step([0] * count)
    assert time.monotonic() - begun < PATIENCE
    assert tuple(caught.value.envs) == tuple(range(count))
    assert all(re.search(rf"\b{env}\b", report(caught.value)) for env in (0, count // 2, count - 1))
    closes(envs)


@pytest.mark.parametrize("ending", ["close", "terminate", "death", "hang"])
def test_grandchildren_are_gone(launch: Launch, ending: str, tmp_path: Path) -> None:
    """A program that an environment started does not outlive it, however it ends."""
    fault = vandal(1, "start_subprocess", step=1)
    envs = launch(crew(2, {1: fault}))
    envs.reset(seed=1)
    *_, infos = envs.step([0, 0])
    helper = int(infos["subprocess"][1])
    assert alive(helper)
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
    assert not remaining([helper], PATIENCE)


def test_a_worker_that_loses_its_caller_takes_its_helpers_along(launch: Launch) -> None:
    """A worker may learn of its caller's end from the pipe first; that must not let its helpers slip away."""
    envs = launch(crew(2, {1: vandal(1, "start_subprocess", step=1)}))
    envs.reset(seed=1)
    *_, infos = envs.step([0, 0])
    helper, pid = int(infos["subprocess"][1]), worker_pids(envs)[1]
    os.close(envs._pool.workers[1].channel.out)
    assert not remaining([pid, helper], PATIENCE)
    with pytest.raises(WorkerDied):
        envs.step([0, 0])
    closes(envs)


def test_a_forked_copy_of_an_environment_never_answers(launch: Launch, tmp_path: Path) -> None:
    """An environment forks, and both processes return from ``step``: only the worker's own answer counts."""
    fault = vandal(1, "fork_and_return", step=2)
    envs = launch(crew(2, {1: fault}))
    ledger = Ledger.of(envs)
    pids = worker_pids(envs)
    for step in range(8):
        ledger.step([step, step], envs.step([step, step]))
    assert worker_pids(envs) == pids
    closes(envs)


@CHEAP
@pytest.mark.parametrize("raises", [False, True], ids=["returns", "exits"])
@pytest.mark.parametrize("when", ["step", "reset"])
def test_a_forked_copy_never_writes_into_the_rows(launch: Launch, when: str, raises: bool, tmp_path: Path) -> None:
    """However late it comes back: the row it has in mind was given out long ago."""
    place: Any = {"step": {"step": 2}, "reset": {"reset": 1}}[when]
    envs = launch(crew(2, {1: vandal(1, ForkAndLinger(tmp_path, raises), **place)}))
    ledger = Ledger.of(envs)
    for step in range(5):
        ledger.step([step, step], envs.step([step, step]))
    batch = envs._driver.batch
    before = [array.copy() for array in (envs.observations, batch.rewards, batch.terminations, batch.truncations)]
    (tmp_path / "go").touch()
    assert not remaining([int((tmp_path / "copy").read_text())], 10.0)
    for old, new in zip(before, (envs.observations, batch.rewards, batch.terminations, batch.truncations), strict=True):
        np.testing.assert_array_equal(old, new)
    ledger.step([5, 5], envs.step([5, 5]))
    closes(envs)


def test_a_worker_without_its_pipe_is_dead(launch: Launch, tmp_path: Path) -> None:
    """An environment closes descriptors that are not its own. That is no death by SIGKILL, and no lack of memory."""
    fault = vandal(1, "close_descriptors", step=1, once=tmp_path / "once")
    envs = launch(crew(2, {1: fault}))
    envs.reset(seed=1)
    pid = worker_pids(envs)[1]
    with pytest.raises(WorkerDied) as caught:
        steps(envs, 2)
    names(caught.value, env=1, worker=1, pid=pid, command="step")
    assert "memory" not in str(caught.value)
    assert not alive(pid)
    closes(envs)


def test_death_does_not_lose_count_of_the_siblings(launch: Launch, tmp_path: Path) -> None:
    """A worker dies while a sibling is still in the same step: the sibling has stepped once, not never and not twice."""
    slow = vandal(0, Announce(tmp_path / "slow", Pause(0.3)), step=1)
    stuck = vandal(1, Announce(tmp_path / "stuck", "sleep"), step=1, once=tmp_path / "once")
    envs = launch([slow, stuck])
    ledger = Ledger.of(envs)
    envs.step_async([1, 1])
    wait_for(tmp_path / "slow")
    wait_for(tmp_path / "stuck")
    os.kill(worker_pids(envs)[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        envs.step_wait()
    envs.reset(options={"reset_mask": np.array([False, True])})
    observations, rewards, *_, infos = envs.step([1, 1])
    rows = [WitnessEnv.read(row) for row in observations]
    assert rows[0]["life"] == ledger.rows[0]["life"]
    assert (rows[0]["tick"], rows[1]["tick"]) == (2, 1)
    assert (rewards.tolist(), infos["tick"].tolist()) == ([2 + 2 / 1024, 1 + 1 / 1024], [2, 1])
    ledger.rows = rows
    for _ in range(3):
        ledger.step([1, 1], envs.step([1, 1]))


def test_the_unpicklable_classes_are_what_they_say() -> None:
    """Two classes of the table can be unpickled by nobody; if that changes, so must the table."""
    for error in (TwoArgumentsError(1, "x"), KeywordOnlyError(reason="x")):
        with pytest.raises(TypeError):
            pickle.loads(pickle.dumps(error))
