"""Tests of ``on_failure="restart"``, and of failures between ``send`` and ``recv``."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import select
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import ready_engine
from faulty_envs import Chain, EchoEnv, Pause, RowChecker, faulty_env_fn, healthy_env_fn, make_env_fns
from gymnasium.vector import AutoresetMode
from observe import (
    FAULT_MARKS,
    WAIT_SECONDS,
    WITHOUT_SPAWN,
    Launch,
    assert_error_names,
    format_error,
    is_running,
    still_running,
    worker_pids,
)
from signals import Alarm, signal_handler

import vecenv
from vecenv import Restart, WorkerOptions
from vecenv.errors import EnvFailed, RestartsExhausted, StepTimeout, WorkerDied
from vecenv.system.restart_budget import RestartBudget
from vecenv.testing import assert_identical
from vecenv.testing.faulty import FaultyConstructor, FaultyEnv, WitnessEnv

pytestmark = FAULT_MARKS


# --- step and reset with on_failure="restart": rows 47 and 48 of FAULTS.md ----------------------

ACTIONS = [1, 2, 3, 4]
MODES = list(AutoresetMode)
LOST_ENVS = {  # fault of env 3 -> environments to rebuild: only env 3, or all environments of its worker
    "raises": {3},
    "evil_elsewhere_error": {3},
    "sys_exit": {3},
    "segfault": {2, 3},
    "kill": {2, 3},
    "exit_now": {2, 3},
    "sleep": {2, 3},
}


@pytest.mark.long
@pytest.mark.parametrize("fault", LOST_ENVS)
def test_failed_step_ends_episode_as_truncated(launch: Launch, fault: str, tmp_path: Path) -> None:
    """The rows of lost environments are truncated and marked as restarted. The other rows are unaffected."""
    faulty = faulty_env_fn(3, fault, step=3, once=tmp_path / "once")
    timeout = {"step_timeout": 1.0} if fault == "sleep" else {}
    envs = launch(make_env_fns(4, {3: faulty}), num_workers=2, on_failure="restart", **timeout)
    checker = RowChecker.start(envs, seed=7)
    for _ in range(2):
        checker.check_step(ACTIONS, envs.step(ACTIONS))
    pids = worker_pids(envs)
    result = envs.step(ACTIONS)
    assert set(np.flatnonzero(result[-1]["_restarted"])) == LOST_ENVS[fault]
    checker.check_step(ACTIONS, result)
    assert (worker_pids(envs)[1] != pids[1]) == (LOST_ENVS[fault] == {2, 3})
    assert worker_pids(envs)[0] == pids[0]
    for _ in range(25):
        result = envs.step(ACTIONS)
        assert "restarted" not in result[-1]
        checker.check_step(ACTIONS, result)
    assert len(envs.errors) >= 1
    assert envs.errors[-1].worker == 1
    checker.check_reset(envs.reset(seed=50), seeds=[50, 51, 52, 53])
    envs.close()
    assert not any(map(is_running, pids))


@pytest.mark.long
@WITHOUT_SPAWN
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "pickled"])
@pytest.mark.parametrize("fault", ["raises", "kill"])
def test_restart_in_all_autoreset_modes(
    launch: Launch, fault: str, shared_memory: bool, mode: AutoresetMode, tmp_path: Path
) -> None:
    """One environment fails in the middle of an episode, one at its end, one in the automatic reset."""
    faulty = {
        0: faulty_env_fn(0, fault, {"length": 4}, step=2, once=tmp_path / "middle"),
        1: faulty_env_fn(1, fault, {"length": 4}, step=4, once=tmp_path / "end"),
        2: faulty_env_fn(2, fault, {"length": 4}, reset=2, once=tmp_path / "reset"),
    }
    env_fns = make_env_fns(4, faulty, length=4)
    envs = launch(env_fns, on_failure="restart", autoreset_mode=mode, shared_memory=shared_memory)
    checker = RowChecker.start(envs, seed=7, length=4, mode=mode)
    restarts = np.zeros(4, dtype=int)
    for _ in range(14):
        result = envs.step(ACTIONS)
        checker.check_step(ACTIONS, result)
        restarts += result[-1].get("_restarted", np.zeros(4, dtype=bool))
        ended = np.logical_or(result[2], result[3])
        if mode is AutoresetMode.DISABLED and ended.any():
            # programs in this mode reset all rows that ended, including those that a restart has just reset
            result = envs.reset(options={"reset_mask": ended})
            checker.check_reset(result, mask=ended)
            restarts += result[-1].get("_restarted", np.zeros(4, dtype=bool))
    assert restarts.tolist() == [1, 1, 1, 0]


def test_worker_killed_in_reset_is_replaced(launch: Launch, tmp_path: Path) -> None:
    """The environment of the new worker is reset with the seed of the call."""
    faulty = faulty_env_fn(1, "kill", reset=2, once=tmp_path / "once")
    envs = launch(make_env_fns(2, {1: faulty}), on_failure="restart")
    checker = RowChecker.start(envs)
    result = envs.reset(seed=5)
    assert result[-1]["_restarted"].tolist() == [False, True]
    checker.check_reset(result, seeds=[5, 6], rebuilt={1})
    checker.check_step([1, 1], envs.step([1, 1]))


@WITHOUT_SPAWN
def test_restart_during_reset_keeps_seeds_and_options(launch: Launch, tmp_path: Path) -> None:
    """All rebuilt environments get their seeds and options, including the one that shared a worker with the faulty one."""
    faulty = faulty_env_fn(3, "kill", reset=2, once=tmp_path / "once")
    envs = launch(make_env_fns(4, {3: faulty}), num_workers=2, on_failure="restart")
    checker = RowChecker.start(envs)
    result = envs.reset(seed=[50, 60, 70, 80], options={"level": 7})
    assert set(np.flatnonzero(result[-1]["_restarted"])) == {2, 3}
    checker.check_reset(result, seeds=[50, 60, 70, 80], rebuilt={2, 3})
    assert envs.get_attr("options") == ({"level": 7},) * 4


@WITHOUT_SPAWN
def test_restart_during_reset_without_seeds_has_a_reproducible_seed(launch: Launch) -> None:
    """The seed comes from a sequence of the engine that begins at the latest seeded reset."""
    seeds = []
    for _ in range(2):
        envs = launch(make_env_fns(2, {1: faulty_env_fn(1, "raises", reset=2)}), num_workers=1, on_failure="restart")
        envs.reset(seed=3)
        observations, infos = envs.reset()
        assert infos["_restarted"].tolist() == [False, True]
        seeds.append([WitnessEnv.read(row)["seed"] for row in observations])
    assert seeds[0] == seeds[1]
    assert seeds[0][1] > 3


@WITHOUT_SPAWN
def test_restart_during_reset_keeps_options_per_row(launch: Launch, tmp_path: Path) -> None:
    faulty = faulty_env_fn(3, "kill", reset=2, once=tmp_path / "once")
    envs = launch(make_env_fns(4, {3: faulty}), num_workers=2, on_failure="restart")
    envs.reset(seed=1)
    options = [{"level": row} for row in range(4)]
    assert set(np.flatnonzero(envs.reset(options=options)[-1]["_restarted"])) == {2, 3}
    assert envs.get_attr("options") == tuple(options)


def test_worker_killed_while_idle_is_restarted(launch: Launch) -> None:
    """The OOM killer may end a worker between two steps."""
    envs = launch(make_env_fns(4), num_workers=2, on_failure="restart")
    checker = RowChecker.start(envs)
    checker.check_step(ACTIONS, envs.step(ACTIONS))
    for worker in (1, 0, 1):
        os.kill(worker_pids(envs)[worker], signal.SIGKILL)
        restarted: set[int] = set()
        for _ in range(3):
            result = envs.step(ACTIONS)
            checker.check_step(ACTIONS, result)
            restarted |= set(np.flatnonzero(result[-1].get("_restarted", [])).tolist())
        assert restarted == {2 * worker, 2 * worker + 1}


def test_save_after_a_death_while_idle_names_the_calls_that_rebuild(launch: Launch) -> None:
    """A training loop saves a checkpoint after the OOM killer ended a worker between two steps."""
    envs = launch(make_env_fns(4), num_workers=2, on_failure="restart")
    envs.reset(seed=1)
    os.kill(worker_pids(envs)[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="during save") as caught:
        envs.state_dict(verify=False)
    assert "the next step() or reset() rebuilds the environments of dead workers" in caught.value.__notes__
    assert envs.step(ACTIONS)[-1]["_restarted"].tolist() == [False, False, True, True]
    envs.state_dict(verify=False)


@WITHOUT_SPAWN
def test_record_of_a_death_in_a_restart_mentions_the_restart(launch: Launch, tmp_path: Path) -> None:
    """An environment raises in a step, and the first reset of its replacement kills the worker."""
    faulty = faulty_env_fn(1, "raises", step=1, once=tmp_path / "raised")
    envs = launch([healthy_env_fn(0), functools.partial(DyingResetWrapper, faulty, tmp_path)], on_failure="restart")
    envs.reset(seed=1)
    assert envs.step([1, 1])[-1]["_restarted"].tolist() == [False, True]
    raised, died = envs.errors
    assert (raised.command, died.command) == ("step", "step")
    assert re.search(r"env 1\) died during step, in a restart: killed by SIGKILL", str(died))


class DyingResetWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that kills the process in the first reset after the file ``raised`` was created."""

    def __init__(self, env_fn: Any, folder: Path) -> None:
        super().__init__(env_fn())
        self.folder = folder

    def reset(self, **kwargs: Any) -> Any:
        if (self.folder / "raised").exists() and not (self.folder / "died").exists():
            (self.folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reset(**kwargs)


# --- the limit of restarts ----------------------------------------------------------------------


def test_worker_that_keeps_dying_exhausts_restart_limit(launch: Launch) -> None:
    """The exception names the limit, the period and the cause of each death."""
    faulty = faulty_env_fn(1, "segfault", step=range(2, 10**6))
    envs = launch(make_env_fns(2, {1: faulty}), on_failure=Restart(3))
    checker = RowChecker.start(envs)
    restarts: list[bool] = []

    def step_until_error() -> None:
        while len(restarts) < 50:
            result = envs.step([1, 1])
            checker.check_step([1, 1], result)
            restarts.append(bool(result[-1].get("_restarted", np.zeros(2))[1]))

    with pytest.raises(WorkerDied) as caught:
        step_until_error()
    assert sum(restarts) == 3
    text = format_error(caught.value)
    assert text.count("SIGSEGV") >= 3, text
    assert re.search(r"\b3\b", str(caught.value))
    assert re.search(r"\b60(\.0)? ?s", str(caught.value)), "the message must contain the period"
    assert (caught.value.worker, tuple(caught.value.envs)) == (1, (1,))
    envs.close()


@WITHOUT_SPAWN
def test_restart_limit_zero_raises_the_first_failure(launch: Launch) -> None:
    envs = launch(make_env_fns(2, {1: faulty_env_fn(1, "kill", step=1)}), on_failure=Restart(0))
    envs.reset(seed=1)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        envs.step([1, 1])


def test_restart_budget_allows_limit_per_period(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("vecenv.system.restart_budget.time", SimpleNamespace(monotonic=lambda: now))
    budget = RestartBudget(3, 10.0, lambda: 0.0)
    assert [budget.spend(f"cause {index}") for index in range(4)] == [True, True, True, False]
    now = 109.0
    assert not budget.spend("cause 4")
    now = 110.1
    assert [budget.spend(f"cause {index}") for index in range(5, 9)] == [True, True, True, False]
    assert budget.explain_exhaustion("cause 8", ()).endswith("the last causes:\n- cause 5\n- cause 6\n- cause 7\n- cause 8")


@pytest.mark.long
@WITHOUT_SPAWN
def test_constructor_that_fails_on_restart_raises(launch: Launch, tmp_path: Path) -> None:
    """The engine does not rebuild the environment endlessly, and the error contains the cause."""
    env_fn = functools.partial(_build_once_then_raise, os.fspath(tmp_path / "built"))
    envs = launch(make_env_fns(2, {1: env_fn}), on_failure=Restart(2))
    envs.reset(seed=1)
    with pytest.raises(Exception, match=r".") as caught:
        _make_steps(envs, 10)
    assert "out of order" in format_error(caught.value)
    envs.close()


def _build_once_then_raise(path: str) -> gymnasium.Env:
    if os.path.exists(path):
        return FaultyConstructor(healthy_env_fn(1), "raises")()
    Path(path).touch()
    return FaultyEnv(EchoEnv(1), "kill", step=2)


def _make_steps(envs: Any, count: int) -> None:
    for _ in range(count):
        envs.step([1] * envs.num_envs)


@WITHOUT_SPAWN
def test_step_wait_timeout_does_not_restart(launch: Launch) -> None:
    """Only ``step_timeout`` restarts workers. After a timeout of ``step_wait``, the result of the step is still pending."""
    envs = launch(make_env_fns(2, delay=0.3), on_failure="restart")
    checker = RowChecker.start(envs)
    pids = worker_pids(envs)
    envs.step_async([1, 1])
    with pytest.raises(StepTimeout):
        envs.step_wait(timeout=0.05)
    checker.check_step([1, 1], envs.step_wait())
    assert worker_pids(envs) == pids


# --- determinism --------------------------------------------------------------------------------


def test_same_seeds_and_faults_give_the_same_results(launch: Launch, tmp_path: Path) -> None:
    """The seeds of restarts come from a sequence of the engine."""
    actions = np.random.default_rng(0).integers(0, 2, (40, 4))
    runs = []
    for run in range(2):
        env_fns: list[Any] = [functools.partial(gymnasium.make, "CartPole-v1")] * 4
        env_fns[2] = functools.partial(_make_crashing_cart_pole, os.fspath(tmp_path / f"once-{run}"))
        envs = launch(env_fns, num_workers=2, on_failure="restart")
        runs.append([envs.reset(seed=[3, 1, 4, 1]), *map(envs.step, actions)])
        assert len(envs.errors) == 1
        envs.close()
    assert_identical(*runs)


def _make_crashing_cart_pole(once: str) -> gymnasium.Env:
    return FaultyEnv(gymnasium.make("CartPole-v1"), "kill", step=7, once=once)


@WITHOUT_SPAWN
def test_every_restart_gets_a_new_seed(launch: Launch) -> None:
    faulty = {index: faulty_env_fn(index, "raises", step=2) for index in range(3)}
    envs = launch(make_env_fns(3, faulty), on_failure=Restart(100))
    envs.reset(seed=1)
    seeds = {1, 2, 3}
    for count in range(1, 5):
        envs.step([0] * 3)
        *_, infos = envs.step([0] * 3)
        assert infos["_restarted"].all()
        observations = envs.step([0] * 3)[0]  # the automatic reset
        seeds |= {WitnessEnv.read(row)["seed"] for row in observations}
        assert len(seeds) == 3 + 3 * count


# --- failures between send and recv -------------------------------------------------------------


class RecvChecker:
    """A checker like ``RowChecker``, for batches with rows in any order."""

    def __init__(self, envs: Any, batch_size: int) -> None:
        self.envs = envs
        self.batch_size = batch_size
        self.last_rows: dict[int, dict[str, int]] = {}
        self.restarted: list[int] = []
        envs.reset_async(seed=1)
        for _ in range(envs.num_envs // batch_size):
            for env, row, reward, *_ in self.receive():
                assert (row["tick"], row["seed"], reward) == (0, 1 + env, 0.0)
                self.last_rows[env] = row

    def receive(self, timeout: float | None = None) -> list[tuple[int, dict[str, int], float, bool, bool]]:
        """Receive a batch. Return a tuple (env, observation, reward, terminated, truncated) for each row."""
        observations, rewards, terminations, truncations, infos = self.envs.recv(timeout)
        ids = infos["env_id"].tolist()
        assert len(set(ids)) == self.batch_size
        rows = [WitnessEnv.read(row) for row in observations]
        assert [row["witness_id"] for row in rows] == ids
        flags = infos.get("_restarted", [False] * self.batch_size)
        self.restarted = [env for env, restarted in zip(ids, flags, strict=True) if restarted]
        return list(zip(ids, rows, rewards.tolist(), terminations.tolist(), truncations.tolist(), strict=True))

    def check(self, received: list[tuple[int, dict[str, int], float, bool, bool]]) -> list[int]:
        """Check that each row follows the last one of its environment. Return the indices of the environments."""
        for env, row, reward, terminated, truncated in received:
            last = self.last_rows[env]
            if env in self.restarted:
                assert (reward, terminated, truncated) == (0.0, False, True)
                assert row == last
                self.last_rows[env] = {"replaced_life": last["life"]}
                continue
            if "replaced_life" in last:
                assert row["life"] != last["replaced_life"]
                assert (row["tick"], row["steps"]) == (0, 0)
            else:
                assert row["life"] == last["life"]
                assert (row["tick"], row["steps"]) == (last["tick"] + 1, last["steps"] + 1), f"env {env}"
                assert reward == row["tick"] + row["actions"] / 1024
            self.last_rows[env] = row
        return [env for env, *_ in received]

    def step(self, times: int, ids: list[int] | None = None) -> None:
        """Make and check ``times`` steps, each with the environments of the batch that was received last."""
        for _ in range(times):
            self.envs.send([1] * self.batch_size, ids)
            ids = self.check(self.receive())


@WITHOUT_SPAWN
@pytest.mark.parametrize("fault", ["raises", "kill"])
def test_recv_raises_a_failure_and_keeps_the_other_rows(launch: Launch, fault: str, tmp_path: Path) -> None:
    faulty = faulty_env_fn(3, fault, {"length": 10**6}, step=2, once=tmp_path / "once")
    checker = RecvChecker(launch(make_env_fns(4, {3: faulty}, length=10**6), batch_size=1), batch_size=1)
    pid = worker_pids(checker.envs)[3]
    checker.envs.send([1] * 4, [0, 1, 2, 3])
    for _ in range(4):
        checker.check(checker.receive())
    checker.envs.send([1] * 4, [0, 1, 2, 3])
    received: list[int] = []

    def receive_until(count: int) -> None:
        while len(received) < count:
            received.extend(checker.check(checker.receive()))

    with pytest.raises((ValueError, WorkerDied)) as caught:
        receive_until(4)
    assert_error_names(caught.value, env=3, worker=3, pid=pid, command="step")
    receive_until(3)
    assert sorted(received) == [0, 1, 2]
    with pytest.raises(EnvFailed, match=r"\b3\b"):
        checker.envs.send([1], [3])
    checker.step(5, [1])
    first_rows = [WitnessEnv.read(row) for row in checker.envs.reset(seed=5)[0]]
    assert [(row["witness_id"], row["seed"], row["tick"]) for row in first_rows] == [(env, 5 + env, 0) for env in range(4)]


@WITHOUT_SPAWN
def test_env_with_a_result_before_the_death_of_its_worker_stays_in_flight(launch: Launch) -> None:
    """The error's ``envs`` contains it, too, because it has to be reset."""
    faulty = faulty_env_fn(0, "kill", step=1)
    envs = launch([faulty, healthy_env_fn(1)], num_workers=1)
    envs.reset(seed=1)
    envs.send([1], [1])
    envs.send([1], [0])
    with pytest.raises(WorkerDied) as caught:
        envs.recv(count=2)
    assert (caught.value.envs, envs.in_flight.tolist()) == ((0, 1), [1])
    envs.reset_async(env_id=[0])
    assert [envs.recv(count=1)[-1]["env_id"].tolist() for _ in range(2)] == [[1], [0]]
    envs.reset_async(env_id=[1])
    assert envs.recv(count=1)[-1]["env_id"].tolist() == [1]


class SlowRebuild(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment that raises in each step. Then it creates the file ``failed``; while that exists, resets wait."""

    def __init__(self, failed: Path) -> None:
        super().__init__(healthy_env_fn(0)())
        self.failed = failed

    def reset(self, **arguments: Any) -> Any:
        while self.failed.exists():
            time.sleep(0.01)
        return super().reset(**arguments)

    def step(self, action: Any) -> Any:
        self.failed.touch()
        raise ValueError("this environment raises")


@WITHOUT_SPAWN
def test_env_that_is_being_rebuilt_when_another_exhausts_the_budget_stays_in_flight(launch: Launch, tmp_path: Path) -> None:
    env_fns = [functools.partial(SlowRebuild, tmp_path / "failed"), faulty_env_fn(1, "raises", step=1), healthy_env_fn(2)]
    envs = launch(env_fns, num_workers=3, on_failure=Restart(limit=1))
    envs.reset(seed=1)
    envs.send([1], [0])
    while not envs.errors:
        with pytest.raises(StepTimeout):
            envs.recv(count=1, timeout=0.01)
    envs.send([1], [1])
    with pytest.raises(RestartsExhausted) as caught:
        envs.recv(count=2)
    assert (caught.value.envs, envs.in_flight.tolist()) == ((0, 1), [0])
    (tmp_path / "failed").unlink()
    *_, infos = envs.recv(count=1)
    assert (infos["env_id"].tolist(), infos["restarted"].tolist()) == ([0], [True])


@WITHOUT_SPAWN
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_recv_reports_the_death_of_the_only_env_in_flight(launch: Launch, on_failure: str, tmp_path: Path) -> None:
    """``recv`` must not wait for the reply of a dead worker."""
    faulty = faulty_env_fn(3, Chain(Pause(0.1), "kill"), {"length": 10**6}, step=1, once=tmp_path / "once")
    envs = launch(make_env_fns(4, {3: faulty}, length=10**6), batch_size=1, on_failure=on_failure)
    checker = RecvChecker(envs, batch_size=1)
    checker.envs.send([1], [3])
    if on_failure == "restart":
        assert checker.check(checker.receive()) == [3]
        assert checker.restarted == [3]
    else:
        with pytest.raises(WorkerDied, match="SIGKILL"):
            checker.receive()
    checker.step(3, [1])


@pytest.mark.long
@WITHOUT_SPAWN
@pytest.mark.parametrize("fault", ["raises", "segfault", "sleep"])
def test_recv_returns_a_restarted_row(launch: Launch, fault: str, tmp_path: Path) -> None:
    """A failed row arrives like any other, but is marked as restarted. A hanging row fails after ``step_timeout``."""
    faulty = faulty_env_fn(3, fault, {"length": 10**6}, step=3, once=tmp_path / "once")
    timeout = {"step_timeout": 1.0} if fault == "sleep" else {}
    envs = launch(make_env_fns(4, {3: faulty}, length=10**6), batch_size=4, on_failure="restart", **timeout)
    checker = RecvChecker(envs, batch_size=4)
    restarted = []
    ids = [0, 1, 2, 3]
    for _ in range(8):
        envs.send([1] * 4, ids)
        ids = checker.check(checker.receive())
        restarted += checker.restarted
    assert restarted == [3]
    assert len(envs.errors) == 1
    if fault == "sleep":
        assert "in sleep" in format_error(envs.errors[0].error)


@pytest.mark.long
@WITHOUT_SPAWN
def test_recv_timeout_names_the_late_worker(launch: Launch) -> None:
    """The error names the environment, the worker and the function that hangs."""
    envs = launch(make_env_fns(2, {1: faulty_env_fn(1, "sleep", step=1)}), batch_size=2)
    checker = RecvChecker(envs, batch_size=2)
    envs.send([1, 1], [0, 1])
    started_at = time.monotonic()
    with pytest.raises(StepTimeout) as caught:
        checker.receive(timeout=0.3)
    assert time.monotonic() - started_at < WAIT_SECONDS
    assert_error_names(caught.value, env=1, worker=1, pid=worker_pids(envs)[1], command="recv|step")
    assert re.search("in sleep", format_error(caught.value))
    started_at = time.monotonic()
    envs.close(timeout=0.3)
    assert time.monotonic() - started_at < WAIT_SECONDS


@WITHOUT_SPAWN
def test_two_batches_in_flight_both_progress(launch: Launch) -> None:
    """Each worker steps one batch. Both environments of a batch make the same number of steps."""
    checker = RecvChecker(launch(make_env_fns(4, length=10**6), num_workers=2, batch_size=2), batch_size=2)
    batches = [[0, 1], [2, 3]]
    for batch in batches:
        checker.envs.send([1, 1], batch)
    for _ in range(100):
        ids = checker.check(checker.receive())
        assert sorted(ids) in batches
        checker.envs.send([1, 1], ids)
    for _ in batches:
        checker.check(checker.receive())
    steps = {env: row["steps"] for env, row in checker.last_rows.items()}
    assert sum(steps.values()) == 2 * 102
    assert steps[0] == steps[1]
    assert steps[2] == steps[3]
    assert np.min(list(steps.values())) > 0


class RaisingEnv(gymnasium.Env[Any, Any]):
    """An environment that raises for action 1."""

    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        return 0, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        if action == 1:
            raise ValueError("action 1")
        return 0, 0.0, False, False, {}


@pytest.mark.filterwarnings("ignore:.*ERROR.*:UserWarning")
@pytest.mark.parametrize("options", [{"num_workers": 1}, {"num_workers": 0}], ids=["one worker", "in process"])
def test_failure_is_not_repeated_in_later_replies(options: dict[str, int]) -> None:
    """A worker reuses the object that holds its reply, so it must remove a reported failure from it."""
    with ready_engine([RaisingEnv] * 4, batch_size=1, **options) as envs:
        envs.send([1], [0])
        with pytest.raises(ValueError, match="action 1"):
            envs.recv()
        for row in (1, 2, 3, 1):
            envs.send([0], [row])
            assert envs.recv()[4]["env_id"].tolist() == [row]
        assert len(envs.errors) == 1


def test_result_of_a_call_is_not_repeated_in_later_replies() -> None:
    with ready_engine([RaisingEnv] * 4, num_workers=1) as envs:
        assert len(envs.call("__class__")) == 4
        bytes_before = envs.stats()["bytes_pickled"]
        for _ in range(3):
            envs.step([0] * 4)
        assert envs.stats()["bytes_pickled"] == bytes_before


def test_bytes_pickled_include_those_of_a_replaced_worker() -> None:
    with ready_engine([RaisingEnv] * 4, num_workers=1, on_failure="restart") as envs:
        envs.exec_func(lambda env: bytes(10_000))
        bytes_before = envs.stats()["bytes_pickled"]
        assert bytes_before > 40_000
        os.kill(envs.processes[0].pid, signal.SIGKILL)
        envs.step([0] * 4)
        assert envs.stats()["bytes_pickled"] >= bytes_before


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("detected_by", ["reset", "another row"])
def test_each_row_of_a_dead_worker_needs_its_own_reset(detected_by: str) -> None:
    """A reset of one row restarts the worker, but starts no episode in the other row."""
    with ready_engine([RaisingEnv] * 4, num_workers=2, batch_size=1) as envs:
        os.kill(envs.processes[0].pid, signal.SIGKILL)
        envs.processes[0].join()
        if detected_by == "another row":
            while envs._pool.workers[0].death is None:
                envs.send([0], [2])
                envs.recv()
        else:
            envs.reset_async(env_id=[0])
            with contextlib.suppress(WorkerDied):  # raised unless reset_async() has noticed the death
                envs.recv()
        envs.reset_async(env_id=[0])
        assert envs.recv()[4]["env_id"].tolist() == [0]
        with pytest.raises(EnvFailed, match=r"\b1\b"):
            envs.send([0], [1])
        envs.send([0, 0], [0, 2])
        assert sorted(int(envs.recv()[4]["env_id"][0]) for _ in range(2)) == [0, 2]
        envs.reset_async(env_id=[1])
        envs.recv()
        envs.send([0], [1])
        assert envs.recv()[4]["env_id"].tolist() == [1]


# --- rows that failed before the call -----------------------------------------------------------


@pytest.mark.parametrize("by_row", [False, True], ids=["step", "send and recv"])
def test_failed_row_is_rebuilt_by_the_next_step(launch: Launch, by_row: bool) -> None:
    """The row is marked as restarted. It is not stepped, and does not count as a second failure."""
    faulty = faulty_env_fn(3, "raises", step=2)
    envs = launch(make_env_fns(4, {3: faulty}), num_workers=2, on_failure=Restart(0, 0.2))
    envs.reset(seed=7)

    def step() -> dict[str, np.ndarray]:
        if not by_row:
            return envs.step(ACTIONS)[-1]
        envs.send(ACTIONS, range(4))
        infos = envs.recv(count=4)[-1]
        return {"_restarted": infos.get("_restarted", np.zeros(4, bool))[np.argsort(infos["env_id"])]}

    step()
    with pytest.raises(RestartsExhausted):
        step()
    if by_row:
        envs.recv(count=3)  # the results of the other rows are still ready
    driver = envs._driver
    getattr(driver, "rebuilder", driver).budget.limit = 1
    steps_before, errors_before = envs.stats()["steps"], len(envs.errors)
    assert step()["_restarted"].tolist() == [False, False, False, True]
    assert envs.stats()["steps"] == steps_before + 3
    assert len(envs.errors) == errors_before == 1


@pytest.mark.parametrize("num_workers", [1, 2])
def test_rows_lost_in_a_call_are_rebuilt_by_the_next_step(launch: Launch, num_workers: int) -> None:
    """``call`` rebuilds nothing. The next step sends no message about these rows, and must not report them as stepped."""
    envs = launch(make_env_fns(4), num_workers=num_workers, on_failure="restart")
    checker = RowChecker.start(envs, seed=7)
    with pytest.raises(WorkerDied):
        envs.call("trigger", "kill", only=3)
    result = envs.step(ACTIONS)
    lost = [0, 1, 2, 3] if num_workers == 1 else [2, 3]
    assert np.flatnonzero(result[-1]["_restarted"]).tolist() == lost
    checker.check_step(ACTIONS, result)
    checker.check_step(ACTIONS, envs.step(ACTIONS))
    assert len(envs.errors) == 1


def test_death_during_two_requests_is_recorded_once(launch: Launch) -> None:
    """Both calls of ``recv`` raise, but there is only one record."""
    envs = launch(make_env_fns(2), num_workers=1, batch_size=1)
    envs.reset(seed=7)
    (pid,) = worker_pids(envs)
    os.kill(pid, signal.SIGSTOP)
    for row in (0, 1):
        envs.send([1], [row])
    os.kill(pid, signal.SIGKILL)
    assert not still_running([pid], 5.0)
    for _ in range(2):
        with pytest.raises(WorkerDied):
            envs.recv()
    assert len(envs.errors) == 1


class FailingResetEnv(EchoEnv):
    """An environment with resets that end its process, or raise, for one seed or for all."""

    def __init__(self, index: int, kind: str, seed: int | None) -> None:
        super().__init__(index)
        self._kind, self._seed = kind, seed

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self._seed in (None, seed):
            if self._kind == "dies":
                os._exit(3)
            raise ValueError("no such level")
        return super().reset(seed=seed, options=options)


@WITHOUT_SPAWN
@pytest.mark.parametrize("kind", ["dies", "raises"])
def test_reset_that_always_fails_exhausts_the_restart_limit(launch: Launch, kind: str) -> None:
    envs = launch([functools.partial(FailingResetEnv, 0, kind, None), healthy_env_fn(1)], on_failure=Restart(3))
    with pytest.raises(RestartsExhausted, match="more than 3 restarts"):
        envs.reset(seed=1)
    assert envs.stats()["restarts"] == 3


@pytest.mark.sampled(1)
@WITHOUT_SPAWN
@pytest.mark.parametrize("kind", ["dies", "raises"])
def test_failed_reset_is_repeated_once_with_its_seed_and_then_with_another(launch: Launch, kind: str) -> None:
    envs = launch([functools.partial(FailingResetEnv, 0, kind, 5), healthy_env_fn(1)], on_failure="restart")
    envs.reset(seed=[5, 6])
    assert envs.stats()["restarts"] == 2


class SlowRebuildEnv(EchoEnv):
    """An environment that raises in its first step if it is row 0, and then takes a second to be built again."""

    def __init__(self, index: int, file: Path) -> None:
        time.sleep(1.0 if file.exists() else 0.0)
        super().__init__(index)
        self._file = file

    def step(self, action: Any) -> Any:
        if self.witness_id == 0 and not self._file.exists():
            self._file.touch()
            raise ValueError("it raises once")
        time.sleep(0.1)
        return super().step(action)


def interrupt_caller_and_sleep(_: Any) -> None:
    """Send the caller a signal, shortly after the reply to the rebuild that precedes this call."""
    time.sleep(0.3)
    os.kill(os.getppid(), signal.SIGALRM)
    time.sleep(0.5)


@pytest.mark.long
@pytest.mark.linux
@pytest.mark.parametrize("method", ["fork"], indirect=True)
def test_time_limit_of_a_rebuild_does_not_outlive_an_interrupted_call(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler interrupts a call that waits behind a rebuild.

    An old version kept the time limit of the rebuild: a minute later, a step killed the healthy worker as hanging.
    """
    env_fns = [functools.partial(SlowRebuildEnv, index, tmp_path / "raised") for index in range(2)]
    envs = launch(env_fns, num_workers=1, on_failure="restart", step_timeout=30.0)
    envs.reset(seed=1)
    envs.send([1], [0])
    with pytest.raises(StepTimeout):
        envs.recv(count=1, timeout=0.5)  # it is being rebuilt
    with signal_handler(signal.SIGALRM, Alarm), pytest.raises(Alarm):
        envs.exec_func(interrupt_caller_and_sleep, [1])
    *_, truncations, _ = envs.recv(count=1)
    assert truncations.tolist() == [True]
    envs.step(np.array(ACTIONS[:2]))
    pids, monotonic = worker_pids(envs), time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 10_000)  # after each deadline
    *_, truncations, _ = envs.step(np.array(ACTIONS[:2]))
    assert worker_pids(envs) == pids
    assert not truncations.any()


@pytest.mark.long
@pytest.mark.linux
@pytest.mark.parametrize("method", ["fork"], indirect=True)
def test_hang_of_a_step_behind_a_rebuild_is_detected_after_step_timeout(launch: Launch, tmp_path: Path) -> None:
    """An old version gave this step the time limit of the rebuild, which includes ``start_timeout``."""
    hanging = faulty_env_fn(1, "sleep", step=1, once=tmp_path / "hung")
    env_fns = [functools.partial(SlowRebuildEnv, 0, tmp_path / "raised"), hanging]
    options = {"step_timeout": 0.5, "worker_options": WorkerOptions(start_timeout=20.0)}
    envs = launch(env_fns, num_workers=1, on_failure="restart", **options)
    envs.reset(seed=1)
    envs.send([1], [0])
    with pytest.raises(StepTimeout):
        envs.recv(count=1, timeout=0.2)  # it is being rebuilt
    envs.send([1], [1])
    began = time.monotonic()
    *_, truncations, _ = envs.recv(count=2)
    assert truncations.all()
    assert time.monotonic() - began < 15.0


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_start_timeout_does_not_limit_steps_of_a_replacement_worker(
    launch: Launch, on_failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reset has replaced a worker, the clock advances by more than ``start_timeout`` before the next step."""
    slow = [faulty_env_fn(index, Pause(0.2), step=1) for index in range(2)]
    envs = launch(slow, num_workers=2, on_failure=on_failure)
    envs.reset(seed=1)
    killed = worker_pids(envs)[0]
    os.kill(killed, signal.SIGKILL)
    while is_running(killed):
        time.sleep(0.01)
    envs.reset(seed=2)
    pids, monotonic = worker_pids(envs), time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 10_000)  # after each deadline of the start
    *_, truncations, _ = envs.step(ACTIONS[:2])
    assert worker_pids(envs) == pids
    assert not truncations.any()


def wait_for_worker_end(envs: Any, index: int) -> None:
    """Wait until all threads of a worker have ended. Its first thread may be a zombie while others hold the pipes open."""
    pid = worker_pids(envs)[index]
    if not hasattr(os, "pidfd_open"):
        assert not still_running([pid], 20.0)
        return
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:  # it has been reaped
        return
    try:
        assert select.select([descriptor], [], [], 20.0)[0]
    finally:
        os.close(descriptor)


def kill_worker(envs: Any, index: int) -> None:
    os.kill(worker_pids(envs)[index], signal.SIGKILL)
    wait_for_worker_end(envs, index)


class HangingResetEnv(EchoEnv):
    """An environment that hangs in a reset if a file exists, after it has removed the file."""

    def __init__(self, index: int, file: Path) -> None:
        super().__init__(index)
        self._file = file

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        with contextlib.suppress(FileNotFoundError):
            self._file.unlink()
            time.sleep(3600)
        return super().reset(seed=seed, options=options)


class SlowConstructorEnv(EchoEnv):
    """An environment that takes more than a second to build if a file exists."""

    def __init__(self, file: Path) -> None:
        time.sleep(1.2 if file.exists() else 0.0)
        super().__init__(0)


@pytest.mark.parametrize("by_recv", [False, True])
def test_infinite_start_timeout_means_no_limit(launch: Launch, by_recv: bool, tmp_path: Path) -> None:
    """``step_timeout`` does not limit the start of a worker either."""
    options = {"step_timeout": 0.5, "worker_options": WorkerOptions(start_timeout=math.inf)}
    envs = launch([functools.partial(SlowConstructorEnv, tmp_path / "slow")], batch_size=1, on_failure="restart", **options)
    assert envs.start_timeout == math.inf
    envs.reset(seed=7)
    (tmp_path / "slow").touch()
    kill_worker(envs, 0)
    if by_recv:
        envs.send([1], [0])
    *_, truncations, _ = envs.recv() if by_recv else envs.step([1])
    assert truncations.all()
    assert envs.stats()["restarts"] == 1


@pytest.mark.parametrize("by_recv", [False, True])
def test_step_timeout_of_a_reset_excludes_the_start_of_a_replacement_without_restarts(
    launch: Launch, by_recv: bool, tmp_path: Path
) -> None:
    envs = launch([functools.partial(SlowConstructorEnv, tmp_path / "slow")], step_timeout=0.5)
    envs.reset(seed=7)
    (tmp_path / "slow").touch()
    kill_worker(envs, 0)
    if by_recv:
        envs.reset_async(seed=8, env_id=[0])
        envs.recv()
    else:
        envs.reset(seed=8)
    assert [type(record.error) for record in envs.errors] == [WorkerDied]


def test_step_timeout_ends_the_wait_for_a_hanging_reset_of_a_replacement_without_restarts(
    launch: Launch, tmp_path: Path
) -> None:
    envs = launch([functools.partial(HangingResetEnv, 0, tmp_path / "hang")], step_timeout=0.5)
    envs.reset(seed=7)
    (tmp_path / "hang").touch()
    kill_worker(envs, 0)
    with pytest.raises(StepTimeout, match="during reset"):
        envs.reset(seed=8)
    envs.abandon([0])
    with pytest.raises(WorkerDied):
        envs.reset_wait()
    envs.reset(seed=9)


@pytest.mark.linux
@pytest.mark.long
@pytest.mark.parametrize("hanging", [0, 1])
def test_each_of_two_rebuild_messages_of_a_worker_has_a_time_limit(launch: Launch, hanging: int, tmp_path: Path) -> None:
    """A worker dies with messages of two requests, so its replacement gets two rebuild messages, of which one hangs."""
    env_fns = [functools.partial(HangingResetEnv, index, tmp_path / f"{index}") for index in range(2)]
    options = {"step_timeout": 1.0, "worker_options": WorkerOptions(start_timeout=5.0)}
    envs = launch(env_fns, num_workers=1, batch_size=1, on_failure="restart", **options)
    envs.reset(seed=7)
    (tmp_path / f"{hanging}").touch()
    (pid,) = worker_pids(envs)
    os.kill(pid, signal.SIGSTOP)
    for row in (0, 1):
        envs.send([1], [row])
    os.kill(pid, signal.SIGKILL)
    received = [envs.recv(timeout=60) for _ in range(2)]
    assert sorted(infos["env_id"].item() for *_, infos in received) == [0, 1]
    assert all(truncations.all() and infos["restarted"].all() for *_, truncations, infos in received)
    assert [str(record.error) for record in envs.errors if "it hung for more than 6 seconds" in str(record.error)]


def test_abandon_of_a_dead_worker_loses_no_message_to_others(launch: Launch) -> None:
    """The first worker is dead, so the writing of messages stops there. ``abandon`` then replaces it."""
    envs = launch([healthy_env_fn(index) for index in range(3)], num_workers=3, on_failure="restart")
    envs.reset(seed=7)
    kill_worker(envs, 0)
    envs.send(ACTIONS[:3])
    envs.abandon([0])
    *_, truncations, infos = envs.recv(count=3, timeout=30)
    assert dict(zip(infos["env_id"].tolist(), truncations.tolist(), strict=True)) == {0: True, 1: False, 2: False}


@pytest.mark.parametrize("case", ["reset, recv both", "reset, recv one by one", "raise, recv both"])
def test_death_noticed_by_a_reset_or_a_failure_is_handled_once(launch: Launch, case: str) -> None:
    """Another request notices that a worker died with a row in flight. An old version replaced the worker twice."""
    raises = case.startswith("raise")
    first_env_fn = faulty_env_fn(0, "raises", step=1) if raises else healthy_env_fn(0)
    envs = launch([first_env_fn, faulty_env_fn(1, "kill", step=1)], num_workers=1, on_failure="restart")
    envs.reset(seed=1)
    (pid,) = worker_pids(envs)
    if raises:
        os.kill(pid, signal.SIGSTOP)
        envs.send([1], [0])
        envs.send([1], [1])
        os.kill(pid, signal.SIGCONT)
    else:
        envs.send([1], [1])
    wait_for_worker_end(envs, 0)
    if not raises:
        envs.reset_async(env_id=[0])
    counts = [1, 1] if case.endswith("one by one") else [2]
    batches = [envs.recv(timeout=60, count=count) for count in counts]
    truncated = {
        int(env): bool(flag) for *_, flags, infos in batches for env, flag in zip(infos["env_id"], flags, strict=True)
    }
    assert truncated == {0: raises, 1: True}
    (process,) = envs.processes
    assert len(worker_pids(envs)) == 1
    assert process.is_alive()
    assert len([record for record in envs.errors if isinstance(record.error, WorkerDied)]) == 1
    assert not envs.step(ACTIONS[:2])[3].any()


@pytest.mark.parametrize("by_recv", [False, True])
def test_all_rows_of_a_worker_that_died_while_idle_are_restarted_by_the_next_step(launch: Launch, by_recv: bool) -> None:
    """One row failed earlier. An old version returned the others as if they had been stepped."""
    envs = launch([healthy_env_fn(0), faulty_env_fn(1, "kill", step=1)], num_workers=1, on_failure="restart")
    envs.reset(seed=1)
    envs.send([1], [1])
    envs.recv(timeout=60, count=1)
    kill_worker(envs, 0)
    if by_recv:
        envs.send(ACTIONS[:2], [0, 1])
        *_, truncations, infos = envs.recv(timeout=60, count=2)
    else:
        *_, truncations, infos = envs.step(ACTIONS[:2])
    assert truncations.all()
    assert infos["restarted"].all()


@pytest.mark.long
def test_masked_reset_that_waits_for_a_hanging_row_uses_no_cpu_time(launch: Launch) -> None:
    slow_env = SlowResetEnv(0, 0.8)
    envs = launch(
        [functools.partial(FaultyEnv, slow_env, "sleep", step=1), healthy_env_fn(1)],
        num_workers=2, on_failure="restart", step_timeout=1.0,
    )  # fmt: skip
    envs.reset(seed=1)
    envs.send(ACTIONS[:2], [0, 1])
    started_at = time.process_time()
    envs.reset(options={"reset_mask": np.array([False, True])})
    assert time.process_time() - started_at < 0.4


class SlowResetEnv(EchoEnv):
    """An environment with resets that take ``seconds``."""

    def __init__(self, index: int, seconds: float) -> None:
        super().__init__(index)
        self._seconds = seconds

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        time.sleep(self._seconds)
        return super().reset(seed=seed, options=options)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["kill", "raises"])
def test_reset_in_a_rebuild_may_take_longer_than_start_timeout(launch: Launch, fault: str) -> None:
    """Without ``step_timeout``, no reset has a time limit."""
    env_fns = [functools.partial(SlowResetEnv, index, 4.0) for index in range(2)]
    env_fns[1] = functools.partial(FaultyEnv, SlowResetEnv(1, 4.0), fault, step=1)
    envs = launch(env_fns, num_workers=2, on_failure=Restart(1), worker_options=WorkerOptions(start_timeout=3.0))
    envs.reset(seed=1)
    *_, truncations, _ = envs.step(ACTIONS[:2])
    assert truncations.tolist() == [False, True]


def test_death_handled_by_a_masked_reset_and_a_step_counts_as_one_restart(launch: Launch) -> None:
    envs = launch(make_env_fns(4), num_workers=1, on_failure=Restart(1))
    envs.reset(seed=1)
    kill_worker(envs, 0)
    envs.reset(options={"reset_mask": np.array([True, False, False, False])})
    *_, truncations, _ = envs.step(ACTIONS[:4])
    assert truncations.tolist() == [False, True, True, True]
    assert envs.stats()["restarts"] == 1


class DyingLoadEnv(EchoEnv):
    """An environment with a method that makes its worker exit when it next loads a state."""

    def exit_in_next_load(self) -> None:
        from vecenv.worker.snapshot_rows import SnapshotRows

        SnapshotRows.load = lambda *args: os._exit(3)  # type: ignore[method-assign]


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_rows_of_a_worker_that_dies_in_load_fail(launch: Launch, on_failure: str) -> None:
    envs = launch([functools.partial(DyingLoadEnv, index) for index in range(2)], num_workers=1, on_failure=on_failure)
    envs.reset(seed=1)
    state = envs.state_dict(verify=False)
    envs.call("exit_in_next_load")
    with pytest.raises(WorkerDied, match="during load"):
        envs.load_state_dict(state)
    if on_failure == "raise":
        with pytest.raises(EnvFailed, match="died during load"):
            envs.step(ACTIONS[:2])
        envs.reset(seed=1)
        assert not envs.step(ACTIONS[:2])[3].any()
    else:
        assert envs.step(ACTIONS[:2])[3].all()


def test_recv_at_least_does_not_wait_for_a_hanging_environment(launch: Launch) -> None:
    envs = launch([healthy_env_fn(0), faulty_env_fn(1, "sleep", step=1)], num_workers=2)
    envs.reset(seed=1)
    envs.send(ACTIONS[:2], [0, 1])
    *_, infos = envs.recv(timeout=60, count=2, at_least=1)
    assert infos["env_id"].tolist() == [0]


def test_failed_row_of_a_replaced_worker_cannot_be_saved(launch: Launch) -> None:
    envs = launch(make_env_fns(2), num_workers=1)
    envs.reset(seed=1)
    kill_worker(envs, 0)
    envs.reset(options={"reset_mask": np.array([True, False])})
    with pytest.raises(EnvFailed, match="env 1: worker 0"):
        envs.save([1], verify=False)
    assert len(envs.save([0], verify=False)) == 1


def test_rows_loaded_while_another_worker_dies_keep_their_state(launch: Launch) -> None:
    envs = launch([functools.partial(DyingLoadEnv, index) for index in range(2)], num_workers=2)
    first, _ = envs.reset(seed=1)
    snapshots = envs.save(verify=False)
    envs.step(ACTIONS[:2])
    envs.exec_func(lambda env: env.unwrapped.exit_in_next_load(), [1])
    with pytest.raises(WorkerDied, match="during load"):
        envs.load(snapshots)
    observations, _ = envs.reset(options={"reset_mask": np.array([False, True])})
    np.testing.assert_array_equal(observations[0], first[0])


def kill_other_worker_in_next_check(_: Any, pid: int) -> None:
    """Make this worker's next check of snapshots kill another worker, which has finished its own check by then."""
    from vecenv.worker.snapshot_rows import SnapshotRows

    check = SnapshotRows.check

    def kill_and_check(*args: Any) -> Any:
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)  # the caller notices it
        return check(*args)

    SnapshotRows.check = kill_and_check  # type: ignore[method-assign]


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_rows_of_a_worker_that_dies_before_a_load_is_sent_are_not_loaded(launch: Launch, on_failure: str) -> None:
    """The row of ``send`` makes the caller wait for all workers at once, so that it notices the death during the check."""
    envs = launch(make_env_fns(3), num_workers=3, on_failure=on_failure)
    envs.reset(seed=1)
    snapshots = envs.save(verify=False)
    envs.send([1], [2])
    envs.exec_func(kill_other_worker_in_next_check, [1], worker_pids(envs)[0])
    with pytest.raises((EnvFailed, WorkerDied), match=r"env 0.* died"):
        envs.load(snapshots[:2], [0, 1])
    envs.recv(count=1)
    actions = np.array(ACTIONS[:3])
    if on_failure == "restart":
        assert envs.step(actions)[3].tolist() == [True, False, False]
        return
    with pytest.raises(EnvFailed, match="died"):
        envs.step(actions)
    envs.reset(options={"reset_mask": np.array([True, False, False])})
    assert not envs.step(actions)[3].any()


class PickledOnRequest:
    """An ``env_fn`` that can be pickled only while ``allowed`` is true."""

    allowed = True

    def __reduce__(self) -> Any:
        if not self.allowed:
            raise LookupError("the file of levels is gone")
        return PickledOnRequest, ()

    def __call__(self) -> EchoEnv:
        return EchoEnv(1)


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_env_fn_that_cannot_be_pickled_for_a_replacement_raises_until_it_can(
    on_failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fns, actions = [functools.partial(EchoEnv, 0), PickledOnRequest()], np.array(ACTIONS[:2])
    options: Any = {"num_workers": 2, "context": "forkserver", "on_failure": on_failure}
    with contextlib.closing(vecenv.AsyncVectorEnv(fns, **options)) as envs:
        envs.reset(seed=1)
        kill_worker(envs, 1)
        monkeypatch.setattr(PickledOnRequest, "allowed", False)
        call = functools.partial(envs.step, actions) if on_failure == "restart" else envs.reset
        if on_failure == "raise":
            with pytest.raises(WorkerDied):
                envs.step(actions)
        for _ in range(2):
            with pytest.raises(LookupError, match="the file of levels is gone"):
                call()
        monkeypatch.setattr(PickledOnRequest, "allowed", True)
        call()
        assert not envs.step(actions)[3].any()


def test_step_sent_to_a_dead_worker_raises(launch: Launch) -> None:
    """The test makes the engine count the row of a dead worker as healthy: even then, a step must raise, and not hang."""
    envs = launch(make_env_fns(2), num_workers=2)
    envs.reset(seed=1)
    kill_worker(envs, 0)
    with pytest.raises(WorkerDied):
        envs.step(ACTIONS[:2])
    envs._driver.failure_log.forget([0])
    with pytest.raises(WorkerDied, match="env 0"):
        envs.step(np.array(ACTIONS[:2]))


@pytest.mark.long
def test_reset_of_some_rows_drops_an_interrupted_call(launch: Launch) -> None:
    envs = launch(make_env_fns(2))
    envs.reset(seed=1)

    def raise_keyboard_interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    previous_handler = signal.signal(signal.SIGALRM, raise_keyboard_interrupt)
    try:
        for arguments in ({"env_id": [0]}, {"options": {"reset_mask": np.array([True, False])}}):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                envs.exec_func(lambda env: time.sleep(1))
            envs.reset_async(**arguments)
            if "env_id" in arguments:
                envs.recv(timeout=60, count=1)
            else:
                envs.reset_wait(timeout=60)
    finally:
        signal.signal(signal.SIGALRM, previous_handler)


def test_new_failure_of_a_rebuilt_row_counts_as_a_restart(launch: Launch) -> None:
    env_fns = [faulty_env_fn(0, "raises", step=2), *make_env_fns(2)[1:]]
    envs = launch(env_fns, num_workers=1, on_failure=Restart(1))
    envs.reset(seed=1)
    kill_worker(envs, 0)
    envs.reset(options={"reset_mask": np.array([True, False])})
    envs.step(ACTIONS[:2])
    assert envs.stats()["restarts"] == 1
    with pytest.raises(RestartsExhausted):
        envs.step(ACTIONS[:2])


class FailingConstructorEnv(EchoEnv):
    """An environment that cannot be built if a file exists. The constructor removes the file and raises."""

    def __init__(self, index: int, file: Path) -> None:
        if file.exists():
            file.unlink()
            raise OSError("address in use")
        super().__init__(index)


def test_death_is_not_explained_by_an_earlier_failed_start(launch: Launch, tmp_path: Path) -> None:
    envs = launch([functools.partial(FailingConstructorEnv, index, tmp_path / "busy") for index in range(2)], num_workers=2)
    envs.reset(seed=1)
    kill_worker(envs, 0)
    (tmp_path / "busy").touch()
    with pytest.raises(WorkerDied):
        envs.step(ACTIONS[:2])
    envs.reset(seed=1)
    envs.step(ACTIONS[:2])
    kill_worker(envs, 0)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        envs.step(ACTIONS[:2])


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_log_of_a_restart_names_the_line_that_raised(launch: Launch, context: str, caplog: pytest.LogCaptureFixture) -> None:
    """The fault is a function of the main program. Workers receive its code, and not only its name."""
    source = "def fail(result):\n    raise KeyError('stone')\n"
    main_module: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "/somewhere/training.py", "exec"), main_module)
    env_fns = [faulty_env_fn(0, main_module["fail"], step=1), healthy_env_fn(1)]
    envs = launch(env_fns, num_workers=1, on_failure="restart", context=context)
    envs.reset(seed=1)
    envs.step(ACTIONS[:2])
    assert "env 0: KeyError: 'stone', at training.py:2 in fail" in caplog.text
