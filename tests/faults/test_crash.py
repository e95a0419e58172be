"""Environments that raise and workers that die; what is handed out after that; and the stack that is told."""

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
import pytest
from gymnasium.vector import AutoresetMode
from observe import CHEAP, FAULTS, METHODS, PATIENCE, Launch, alive, names, remaining, report, wait_for, worker_pids
from vandals import Announce, ForkAndLinger, Ledger, Pause, crew, vandal

from vecenv.engine.handles import ProcessWorker
from vecenv.errors import EnvError, RemoteTraceback, StepTimeout, WorkerDied
from vecenv.testing.faulty import KeywordOnlyError, TwoArgumentsError, UnprintableError, WitnessEnv

pytestmark = FAULTS


# --- Environments that raise and workers that die: rows 1 to 14 of the table in ``FAULTS.md`` ---

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


# --- What is handed out after a failure is of what there is now, or was handed out last: nothing that a dead worker wrote

GO, DIE, RAISE = 0, 1, 2
COUNT = 4
ENGINES = {
    "whole": ({}, "raise"),
    "masked": ({}, "raise"),
    "by name": ({}, "raise"),
    "received row by row": ({}, "raise"),
    "whole, caller's share": ({"use_caller": True}, "raise"),
    "masked, caller's share": ({"use_caller": True}, "raise"),
    "whole, pickled": ({"shared_memory": False}, "raise"),
    "whole, restart": ({}, "restart"),
    "masked, restart": ({}, "restart"),
}


class Talkative(gymnasium.Env):
    """Each step ends the episode and has an info; only the last environment's resets have one, so that there are columns."""

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


def reset(envs: Any, how: str) -> tuple[Any, dict[str, Any], list[int]]:
    """Reset with seeds 10, 11, ...: observations, infos, and the environments they are of."""
    if how == "masked":
        mask = np.array([True, False, False, True])
        observations, infos = envs.reset(seed=10, options={"reset_mask": mask})
        return observations[mask], {key: value[mask] for key, value in infos.items()}, [0, 3]
    if how == "by name":
        envs.reset_async([10, 11, 13], env_id=[0, 1, 3])
    elif how == "received row by row":
        envs.reset_async(10)
    else:
        return *envs.reset(seed=10), list(range(COUNT))
    observations, *_, infos = envs.recv(count=3 if how == "by name" else COUNT)
    ids = infos.pop("env_id").tolist()
    del infos["_env_id"]
    return observations, infos, ids


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_reset_has_no_infos_of_the_worker_that_died(launch: Launch, engine: str, mode: AutoresetMode) -> None:
    """Environment 0 has stepped, and its sibling kills their worker: the next reset knows of no step."""
    options, on_failure = ENGINES[engine]
    how = engine.partition(",")[0]
    env_fns = [functools.partial(Talkative, index) for index in range(COUNT)]
    envs = launch(env_fns, num_workers=1 if "use_caller" in options else 2, autoreset_mode=mode,
                  on_failure=on_failure, **options)  # fmt: skip
    envs.reset(seed=1)
    victim = envs.worker_rows[-1 if "use_caller" in options else 0]
    actions = [DIE if index == victim[-1] else GO for index in range(COUNT)]
    if on_failure == "raise":
        with pytest.raises(WorkerDied):
            envs.step(actions)
    else:
        _, _, _, truncations, infos = envs.step(actions)
        assert truncations[list(victim)].all()
        assert "stale" not in infos or not infos["_stale"][list(victim)].any()
    observations, infos, ids = reset(envs, how)
    seeds = [10 + index for index in ids]
    assert observations[:, 0].tolist() == seeds
    assert set(infos) == {"fresh", "_fresh"}
    assert infos["_fresh"].tolist() == [index == COUNT - 1 for index in ids]
    assert infos["fresh"].tolist() == [seed if index == COUNT - 1 else 0 for index, seed in zip(ids, seeds, strict=True)]


class InPlace(Talkative):
    """Writes its observation into the batch itself, and may end in the middle of that."""

    def observation_buffer(self, buffer: Any) -> None:
        self.buffer = buffer

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.buffer[...] = seed or 1
        return self.buffer, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.buffer[:1] = 77
        if action == RAISE:
            raise ValueError("half-way")
        if action == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        self.buffer[1:] = 77
        return self.buffer, 1.0, False, False, {}


@pytest.mark.parametrize(("fault", "error"), [(DIE, WorkerDied), (RAISE, ValueError)], ids=["death", "exception"])
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_a_half_written_observation_is_not_handed_out(
    launch: Launch, on_failure: str, fault: int, error: type[Exception]
) -> None:
    """A reset of others leaves the environment out that failed while it wrote: its last whole observation, or zeros."""
    envs = launch([functools.partial(InPlace, index) for index in range(COUNT)], num_workers=2, on_failure=on_failure)
    envs.reset(seed=[5, 6, 7, 8])
    if on_failure == "raise":
        with pytest.raises(error):
            envs.step([GO, fault, GO, GO])
        whole = [0, 0, 0]
    else:
        envs.send([fault, GO], [1, 2])  # and nobody receives it
        whole = [6, 6, 6]
    observations, _ = envs.reset(seed=20, options={"reset_mask": np.array([False, False, True, True])})
    assert observations[2:].tolist() == [[22] * 3, [23] * 3]
    assert observations[1].tolist() == whole


class Unlike(Talkative):
    """No two observations are alike. A reset fails, once, where there is a file of the name that its options give."""

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
            raise ValueError("it was told to")
        return self.observe(), 1.0, False, False, {}


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "pickled"])
@pytest.mark.parametrize("by_row", [True, False], ids=["first ready", "lock-step"])
def test_the_last_observation_of_a_row_that_is_lost_is_the_one_that_was_handed_out_last(
    launch: Launch, by_row: bool, shared_memory: bool, mode: AutoresetMode, tmp_path: Path
) -> None:
    """Rows fail again and again, by death, by an exception, and in a reset."""
    envs = launch([functools.partial(Unlike, index) for index in range(2)], autoreset_mode=mode, on_failure="restart",
                  shared_memory=shared_memory)  # fmt: skip
    latest = list(envs.reset(seed=1)[0])

    def take(answer: tuple[Any, ...]) -> None:
        observations, infos = answer[0], answer[-1]
        ids = infos["env_id"].tolist() if by_row else [0, 1]
        for at, index in enumerate(ids):
            if "final_obs" in infos and infos["_final_obs"][at]:
                assert infos["final_obs"][at].tolist() == latest[index].tolist()
            latest[index] = observations[at]

    def step(actions: list[int]) -> list[tuple[Any, ...]]:
        if not by_row:
            return [envs.step(actions)]
        envs.send(actions, [0, 1])
        return [envs.recv(count=1), envs.recv(count=1)]

    for number, actions in enumerate([[GO, DIE], [GO, DIE], [DIE, GO], [RAISE, RAISE], [RAISE, DIE], [GO, GO], [DIE, GO]]):
        answers = step(actions)
        restarted = sum(int(answer[-1]["_restarted"].sum()) for answer in answers if "restarted" in answer[-1])
        assert restarted == sum(action != GO for action in actions)
        for answer in answers:
            take(answer)
        if number == 2:
            (tmp_path / "fail").touch()
            options = {"fail": str(tmp_path / "fail")}
            if by_row:
                envs.reset_async(options=options, env_id=[0])
                take(envs.recv(count=1))
            else:
                take(envs.reset(options={**options, "reset_mask": np.array([True, False])}))
            assert not (tmp_path / "fail").exists()
        elif mode is AutoresetMode.NEXT_STEP:
            for answer in step([GO, GO]):
                take(answer)


# --- Asking workers what they are doing does them no harm, however often, whatever their threads are doing meanwhile


class Works(gymnasium.Env[Any, Any]):
    """Steps that compute in Python, in several frames, and sleep, for as long as the action says."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(100)

    def __init__(self, *, own_thread: bool = False) -> None:
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work_on, daemon=True)
        if own_thread:
            self._thread.start()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        until = time.monotonic() + int(action) / 100
        while time.monotonic() < until:
            self._deep(20)
            time.sleep(1e-4)
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def _deep(self, depth: int) -> int:
        return self._deep(depth - 1) + sum(k for k in (1, 2, 3)) if depth else 0

    def _work_on(self) -> None:
        while not self._closed.wait(1e-4):
            self._deep(10)

    def close(self) -> None:
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()


WORKS = {
    "env_threads": ([functools.partial(Works)] * 4, {"num_workers": 1, "env_threads": 4}),
    "own_threads": ([functools.partial(Works, own_thread=True)] * 2, {"num_workers": 1}),
}


def ask(envs: Any, steps: int, hundredths: int, look: Callable[[], object]) -> None:
    """Call ``look`` over and over while the environments step; every step is answered."""
    for _ in range(steps):
        envs.step_async(np.full(envs.num_envs, hundredths))
        until = time.monotonic() + hundredths / 100
        while time.monotonic() < until:
            look()
        envs.step_wait(timeout=60)


@pytest.mark.linux
@CHEAP
@pytest.mark.parametrize(("steps", "hundredths"), [(4, 50), pytest.param(20, 99, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", WORKS)
def test_a_worker_that_is_asked_for_its_stack_goes_on(launch: Launch, kind: str, steps: int, hundredths: int) -> None:
    """Walking the stacks of threads that run, from within a signal, ends workers by SIGSEGV, once in some hundred times."""
    env_fns, how = WORKS[kind]
    envs = launch(env_fns, **how)
    envs.reset(seed=1)
    stacks: list[str] = []
    ask(envs, steps, hundredths, lambda: stacks.append(envs._pool.workers[0].stack()))
    assert any("in step" in stack for stack in stacks), stacks[:3]
    assert len(stacks) > 500 or steps == 4


@pytest.mark.linux
@CHEAP
def test_a_poll_asks_a_worker_for_nothing(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """``timeout=0`` says how far it is, and sends no signal."""
    sent: list[int] = []
    monkeypatch.setattr(ProcessWorker, "signal", lambda worker, number: sent.append(number))
    env_fns, how = WORKS["env_threads"]
    envs = launch(env_fns, **how)
    envs.reset(seed=1)
    polls = 0
    envs.step_async(np.full(4, 99))
    while True:
        try:
            envs.step_wait(timeout=0 if polls < 2000 else 60)
            break
        except StepTimeout as error:
            assert "envs [0, 1, 2, 3]" in report(error)
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
    monkeypatch.undo()


@pytest.mark.linux
@CHEAP
@pytest.mark.parametrize("fault", ["sleep", "hold_gil"])
def test_the_stack_of_an_old_question_is_no_last_stack(launch: Launch, tmp_path: Path, fault: str) -> None:
    """A worker that is killed later has left no stack, and none is shown."""
    envs = launch(crew(2, {1: vandal(1, Announce(tmp_path / "stuck", fault), step=1)}))
    envs.reset(seed=1)
    envs.step_async([0, 0])
    wait_for(tmp_path / "stuck")
    with pytest.raises(StepTimeout, match=f"in {fault}"):
        envs.step_wait(timeout=0.2)
    os.kill(worker_pids(envs)[1], 9)
    with pytest.raises(Exception, match="SIGKILL") as caught:
        envs.step_wait()
    assert "last Python stack" not in report(caught.value)

