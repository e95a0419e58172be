"""Failures that an engine survives: restarts, and faults between send and recv."""

from __future__ import annotations

import functools
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import started
from gymnasium.vector import AutoresetMode
from observe import CHEAP, FAULTS, PATIENCE, Launch, alive, names, remaining, report, worker_pids
from vandals import Chain, Ledger, Obedient, Pause, crew, vandal, witness

from vecenv.engine.recovery import RestartBudget
from vecenv.errors import EnvFailed, RestartsExhausted, StepTimeout, WorkerDied
from vecenv.testing import assert_identical
from vecenv.testing.faulty import FaultyConstructor, FaultyEnv, WitnessEnv

pytestmark = FAULTS


# --- ``on_failure="restart"``: what is lost, what comes instead, and when it is enough ----------
# Rows 47 and 48 of the table in ``FAULTS.md``.

ACTIONS = [1, 2, 3, 4]
MODES = list(AutoresetMode)


LOST = {  # fault -> the environments that come back new: a raise costs one, a death all of the worker
    "raises": {3},
    "evil_elsewhere_error": {3},
    "sys_exit": {3},
    "segfault": {2, 3},
    "kill": {2, 3},
    "exit_now": {2, 3},
    "sleep": {2, 3},
}


def step(envs: Any, count: int) -> None:
    for _ in range(count):
        envs.step([1] * envs.num_envs)


@pytest.mark.long
@pytest.mark.parametrize("fault", LOST)
def test_a_lost_step_is_a_truncated_episode(launch: Launch, fault: str, tmp_path: Path) -> None:
    """Rows that are lost come back truncated, new and marked; everybody else's are what they should be."""
    faulty = vandal(3, fault, step=3, once=tmp_path / "once")
    timeout = {"step_timeout": 1.0} if fault == "sleep" else {}
    envs = launch(crew(4, {3: faulty}), num_workers=2, on_failure="restart", **timeout)
    ledger = Ledger.of(envs, seed=7)
    for _ in range(2):
        ledger.step(ACTIONS, envs.step(ACTIONS))
    pids = worker_pids(envs)
    answer = envs.step(ACTIONS)
    assert set(np.flatnonzero(answer[-1]["_restarted"])) == LOST[fault]
    ledger.step(ACTIONS, answer)
    assert (worker_pids(envs)[1] != pids[1]) == (LOST[fault] == {2, 3})
    assert worker_pids(envs)[0] == pids[0]
    for _ in range(25):
        answer = envs.step(ACTIONS)
        assert "restarted" not in answer[-1]
        ledger.step(ACTIONS, answer)
    assert len(envs.errors) >= 1
    assert envs.errors[-1].worker == 1
    ledger.reset(envs.reset(seed=50), seeds=[50, 51, 52, 53])
    envs.close()
    assert not any(map(alive, pids))


@pytest.mark.long
@CHEAP
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "pickled"])
@pytest.mark.parametrize("fault", ["raises", "kill"])
def test_restart_in_all_autoreset_modes(
    launch: Launch, fault: str, shared_memory: bool, mode: AutoresetMode, tmp_path: Path
) -> None:
    """A restart in the middle of an episode, at its end, and during the automatic reset."""
    faulty = {
        0: vandal(0, fault, {"length": 4}, step=2, once=tmp_path / "middle"),
        1: vandal(1, fault, {"length": 4}, step=4, once=tmp_path / "end"),
        2: vandal(2, fault, {"length": 4}, reset=2, once=tmp_path / "reset"),
    }
    envs = launch(crew(4, faulty, length=4), on_failure="restart", autoreset_mode=mode, shared_memory=shared_memory)
    ledger = Ledger.of(envs, seed=7, length=4, mode=mode)
    restarts = np.zeros(4, dtype=int)
    for _ in range(14):
        answer = envs.step(ACTIONS)
        ledger.step(ACTIONS, answer)
        restarts += answer[-1].get("_restarted", np.zeros(4, dtype=bool))
        ended = np.logical_or(answer[2], answer[3])
        if mode is AutoresetMode.DISABLED and ended.any():
            # a restarted row is new already; resetting it once more is what a program in this mode will do
            answer = envs.reset(options={"reset_mask": ended})
            ledger.reset(answer, mask=ended)
            restarts += answer[-1].get("_restarted", np.zeros(4, dtype=bool))
    assert restarts.tolist() == [1, 1, 1, 0]


def test_restart_during_reset(launch: Launch, tmp_path: Path) -> None:
    """A worker that dies in ``reset`` is replaced, and the reset's answer is that of the new one, with its seed."""
    faulty = vandal(1, "kill", reset=2, once=tmp_path / "once")
    envs = launch(crew(2, {1: faulty}), on_failure="restart")
    ledger = Ledger.of(envs)
    answer = envs.reset(seed=5)
    assert answer[-1]["_restarted"].tolist() == [False, True]
    ledger.reset(answer, seeds=[5, 6], rebuilt={1})
    ledger.step([1, 1], envs.step([1, 1]))


@CHEAP
def test_restart_during_reset_keeps_seeds_and_options(launch: Launch, tmp_path: Path) -> None:
    """What the caller asked of the reset is asked of the new environments, siblings of the culprit included."""
    faulty = vandal(3, "kill", reset=2, once=tmp_path / "once")
    envs = launch(crew(4, {3: faulty}), num_workers=2, on_failure="restart")
    ledger = Ledger.of(envs)
    answer = envs.reset(seed=[50, 60, 70, 80], options={"level": 7})
    assert set(np.flatnonzero(answer[-1]["_restarted"])) == {2, 3}
    ledger.reset(answer, seeds=[50, 60, 70, 80], rebuilt={2, 3})
    assert envs.get_attr("options") == ({"level": 7},) * 4


@CHEAP
def test_restart_during_reset_keeps_each_rows_own_options(launch: Launch, tmp_path: Path) -> None:
    """The new environments get the dict that was theirs, not their neighbour's."""
    faulty = vandal(3, "kill", reset=2, once=tmp_path / "once")
    envs = launch(crew(4, {3: faulty}), num_workers=2, on_failure="restart")
    envs.reset(seed=1)
    options = [{"level": row} for row in range(4)]
    assert set(np.flatnonzero(envs.reset(options=options)[-1]["_restarted"])) == {2, 3}
    assert envs.get_attr("options") == tuple(options)


def test_killed_while_idle_is_restarted(launch: Launch) -> None:
    """The OOM killer came between two steps."""
    envs = launch(crew(4), num_workers=2, on_failure="restart")
    ledger = Ledger.of(envs)
    ledger.step(ACTIONS, envs.step(ACTIONS))
    for victim in (1, 0, 1):
        os.kill(worker_pids(envs)[victim], signal.SIGKILL)
        restarted: set[int] = set()
        for _ in range(3):
            answer = envs.step(ACTIONS)
            ledger.step(ACTIONS, answer)
            restarted |= set(np.flatnonzero(answer[-1].get("_restarted", [])).tolist())
        assert restarted == {2 * victim, 2 * victim + 1}


def test_restart_budget(launch: Launch) -> None:
    """A worker that dies again and again: so many restarts and no more; the causes are listed."""
    envs = launch(crew(2, {1: vandal(1, "segfault", step=range(2, 10**6))}), on_failure="restart", restart_limit=3)
    ledger = Ledger.of(envs)
    restarts: list[bool] = []

    def go_on() -> None:
        while len(restarts) < 50:
            answer = envs.step([1, 1])
            ledger.step([1, 1], answer)
            restarts.append(bool(answer[-1].get("_restarted", np.zeros(2))[1]))

    with pytest.raises(WorkerDied) as caught:
        go_on()
    assert sum(restarts) == 3
    text = report(caught.value)
    assert text.count("SIGSEGV") >= 3, text
    assert re.search(r"\b3\b", str(caught.value))
    assert re.search(r"\b60(\.0)? ?s", str(caught.value)), "the period belongs in the message"
    assert (caught.value.worker, tuple(caught.value.envs)) == (1, (1,))
    envs.close()


@CHEAP
def test_restart_limit_of_zero(launch: Launch) -> None:
    """No restart at all is a budget too."""
    envs = launch(crew(2, {1: vandal(1, "kill", step=1)}), on_failure="restart", restart_limit=0)
    envs.reset(seed=1)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        envs.step([1, 1])


def test_the_budget_is_intensity_and_period() -> None:
    """So many in so many seconds, by a clock that only goes forward."""
    now = 100.0
    budget = RestartBudget(limit=3, period=10.0, clock=lambda: now)
    assert [budget.spend(f"cause {index}") for index in range(4)] == [True, True, True, False]
    now = 109.0
    assert not budget.spend("cause 4")
    now = 110.1
    assert [budget.spend(f"cause {index}") for index in range(5, 9)] == [True, True, True, False]
    assert list(budget.causes) == [f"cause {index}" for index in range(4, 9)]


@pytest.mark.long
@CHEAP
def test_a_constructor_that_fails_at_the_restart(launch: Launch, tmp_path: Path) -> None:
    """The environment cannot be built again: that, too, is an end with a cause, and not an endless loop."""
    env_fn = functools.partial(_only_once, os.fspath(tmp_path / "built"))
    envs = launch(crew(2, {1: env_fn}), on_failure="restart", restart_limit=2)
    envs.reset(seed=1)
    with pytest.raises(Exception, match=r".") as caught:
        step(envs, 10)
    assert "out of order" in report(caught.value)
    envs.close()


def _only_once(path: str) -> gymnasium.Env:
    if os.path.exists(path):
        return FaultyConstructor(witness(1), "raises")()
    Path(path).touch()
    return FaultyEnv(Obedient(1), "kill", step=2)


@CHEAP
def test_a_timeout_given_to_wait_restarts_nothing(launch: Launch, tmp_path: Path) -> None:
    """``step_timeout`` is the engine's limit; a ``timeout`` in a call is the caller's patience; the answer stays pending."""
    faulty = vandal(1, Chain("raises"), step=10**9)
    envs = launch(crew(2, {1: faulty}, delay=0.3), on_failure="restart")
    ledger = Ledger.of(envs)
    pids = worker_pids(envs)
    envs.step_async([1, 1])
    with pytest.raises(StepTimeout):
        envs.step_wait(timeout=0.05)
    ledger.step([1, 1], envs.step_wait())
    assert worker_pids(envs) == pids


# --- determinism --------------------------------------------------------------------------------


def test_determinism_of_restarts(launch: Launch, tmp_path: Path) -> None:
    """A restart takes its seed from the engine's own sequence: the same run, faults included, twice gives the same twice."""
    actions = np.random.default_rng(0).integers(0, 2, (40, 4))
    runs = []
    for run in range(2):
        env_fns: list[Any] = [functools.partial(gymnasium.make, "CartPole-v1")] * 4
        env_fns[2] = functools.partial(_crashing_cart_pole, os.fspath(tmp_path / f"once-{run}"))
        envs = launch(env_fns, num_workers=2, on_failure="restart")
        runs.append([envs.reset(seed=[3, 1, 4, 1]), *map(envs.step, actions)])
        assert len(envs.errors) == 1
        envs.close()
    assert_identical(*runs)


def _crashing_cart_pole(once: str) -> gymnasium.Env:
    return FaultyEnv(gymnasium.make("CartPole-v1"), "kill", step=7, once=once)


@CHEAP
def test_fresh_seeds_are_fresh(launch: Launch) -> None:
    """Every restart has a seed of its own, and no environment shares one."""
    crashing = {index: vandal(index, "raises", step=2) for index in range(3)}
    envs = launch(crew(3, crashing), on_failure="restart", restart_limit=100)
    envs.reset(seed=1)
    seeds = {1, 2, 3}
    for count in range(1, 5):
        envs.step([0] * 3)
        *_, infos = envs.step([0] * 3)
        assert infos["_restarted"].all()
        observations = envs.step([0] * 3)[0]  # the automatic reset
        seeds |= {WitnessEnv.read(row)["seed"] for row in observations}
        assert len(seeds) == 3 + 3 * count


# --- Faults between ``send`` and ``recv``: what holds for ``step`` holds for batches of whoever was first


class Counts:
    """What each environment must say next, by index: rows come in any order, and each environment counts for itself."""

    def __init__(self, envs: Any, batch: int) -> None:
        self.envs = envs
        self.batch = batch
        self.last: dict[int, dict[str, int]] = {}
        self.restarted: list[int] = []
        envs.reset_async(seed=1)
        for _ in range(envs.num_envs // batch):
            for env, row, reward, *_ in self.receive():
                assert (row["tick"], row["seed"], reward) == (0, 1 + env, 0.0)
                self.last[env] = row

    def receive(self, timeout: float | None = None) -> list[tuple[int, dict[str, int], float, bool, bool]]:
        observations, rewards, terminations, truncations, infos = self.envs.recv(timeout)
        ids = infos["env_id"].tolist()
        assert len(set(ids)) == self.batch
        rows = [WitnessEnv.read(row) for row in observations]
        assert [row["witness_id"] for row in rows] == ids
        self.restarted = [env for env, new in zip(ids, infos.get("_restarted", [False] * self.batch), strict=True) if new]
        return list(zip(ids, rows, rewards.tolist(), terminations.tolist(), truncations.tolist(), strict=True))

    def check(self, received: list[tuple[int, dict[str, int], float, bool, bool]]) -> list[int]:
        """Every row is the successor of that environment's last; which environments they were."""
        for env, row, reward, terminated, truncated in received:
            last = self.last[env]
            if env in self.restarted:
                assert (reward, terminated, truncated) == (0.0, False, True)
                assert row == last
                self.last[env] = {"reborn": last["life"]}
                continue
            if "reborn" in last:
                assert row["life"] != last["reborn"]
                assert (row["tick"], row["steps"]) == (0, 0)
            else:
                assert row["life"] == last["life"]
                assert (row["tick"], row["steps"]) == (last["tick"] + 1, last["steps"] + 1), f"env {env}"
                assert reward == row["tick"] + row["actions"] / 1024
            self.last[env] = row
        return [env for env, *_ in received]

    def go_on(self, rounds: int, ids: list[int] | None = None) -> None:
        for _ in range(rounds):
            self.envs.send([1] * self.batch, ids)
            ids = self.check(self.receive())


@CHEAP
@pytest.mark.parametrize("fault", ["raises", "kill"])
def test_a_failure_is_told_and_the_others_are_kept(launch: Launch, fault: str, tmp_path: Path) -> None:
    """``recv`` raises what the environment raised; the rows of the others are not lost with it."""
    faulty = vandal(3, fault, {"length": 10**6}, step=2, once=tmp_path / "once")
    counts = Counts(launch(crew(4, {3: faulty}, length=10**6), batch_size=1), batch=1)
    pid = worker_pids(counts.envs)[3]
    counts.envs.send([1] * 4, [0, 1, 2, 3])
    for _ in range(4):
        counts.check(counts.receive())
    counts.envs.send([1] * 4, [0, 1, 2, 3])
    seen: list[int] = []

    def receive_until(enough: int) -> None:
        while len(seen) < enough:
            seen.extend(counts.check(counts.receive()))

    with pytest.raises((ValueError, WorkerDied)) as caught:
        receive_until(4)
    names(caught.value, env=3, worker=3, pid=pid, command="step")
    receive_until(3)
    assert sorted(seen) == [0, 1, 2]
    with pytest.raises(EnvFailed, match=r"\b3\b"):
        counts.envs.send([1], [3])
    counts.go_on(5, [1])
    beginnings = [WitnessEnv.read(row) for row in counts.envs.reset(seed=5)[0]]
    assert [(row["witness_id"], row["seed"], row["tick"]) for row in beginnings] == [(env, 5 + env, 0) for env in range(4)]


@CHEAP
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_the_last_one_in_flight_dies(launch: Launch, on_failure: str, tmp_path: Path) -> None:
    """Nobody else owes anything: the death is the answer, and no timeout."""
    faulty = vandal(3, Chain(Pause(0.1), "kill"), {"length": 10**6}, step=1, once=tmp_path / "once")
    counts = Counts(launch(crew(4, {3: faulty}, length=10**6), batch_size=1, on_failure=on_failure), batch=1)
    counts.envs.send([1], [3])
    if on_failure == "restart":
        assert counts.check(counts.receive()) == [3]
        assert counts.restarted == [3]
    else:
        with pytest.raises(WorkerDied, match="SIGKILL"):
            counts.receive()
    counts.go_on(3, [1])


@pytest.mark.long
@CHEAP
@pytest.mark.parametrize("fault", ["raises", "segfault", "sleep"])
def test_restarts(launch: Launch, fault: str, tmp_path: Path) -> None:
    """The lost row comes like any other, marked; a hang counts as lost when ``step_timeout`` is over."""
    faulty = vandal(3, fault, {"length": 10**6}, step=3, once=tmp_path / "once")
    timeout = {"step_timeout": 1.0} if fault == "sleep" else {}
    envs = launch(crew(4, {3: faulty}, length=10**6), batch_size=4, on_failure="restart", **timeout)
    counts = Counts(envs, batch=4)
    lost = []
    ids = [0, 1, 2, 3]
    for _ in range(8):
        envs.send([1] * 4, ids)
        ids = counts.check(counts.receive())
        lost += counts.restarted
    assert lost == [3]
    assert len(envs.errors) == 1
    if fault == "sleep":
        assert "in sleep" in report(envs.errors[0].error)


@pytest.mark.long
@CHEAP
def test_timeout_names_who_is_late(launch: Launch) -> None:
    """As for ``step``: where it hangs, and nothing is lost."""
    envs = launch(crew(2, {1: vandal(1, "sleep", step=1)}), batch_size=2)
    counts = Counts(envs, batch=2)
    envs.send([1, 1], [0, 1])
    begun = time.monotonic()
    with pytest.raises(StepTimeout) as caught:
        counts.receive(timeout=0.3)
    assert time.monotonic() - begun < PATIENCE
    names(caught.value, env=1, worker=1, pid=worker_pids(envs)[1], command="recv|step")
    assert re.search("in sleep", report(caught.value))
    begun = time.monotonic()
    envs.close(timeout=0.3)
    assert time.monotonic() - begun < PATIENCE


@CHEAP
def test_two_workers_of_two_batches(launch: Launch) -> None:
    """Sending and receiving halves in turns, a hundred times: each half is stepped once a round."""
    counts = Counts(launch(crew(4, length=10**6), num_workers=2, batch_size=2), batch=2)
    halves = [[0, 1], [2, 3]]
    for half in halves:
        counts.envs.send([1, 1], half)
    for _ in range(100):
        ids = counts.check(counts.receive())
        assert sorted(ids) in halves
        counts.envs.send([1, 1], ids)
    for _ in halves:
        counts.check(counts.receive())
    steps = {env: row["steps"] for env, row in counts.last.items()}
    assert sum(steps.values()) == 2 * 102
    assert steps[0] == steps[1]
    assert steps[2] == steps[3]
    assert np.min(list(steps.values())) > 0


class Brittle(gymnasium.Env[Any, Any]):
    """Raises at action 1."""

    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        return 0, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        if action == 1:
            raise ValueError("not this one")
        return 0, 0.0, False, False, {}


@pytest.mark.filterwarnings("ignore:.*ERROR.*:UserWarning")
@pytest.mark.parametrize("options", [{"num_workers": 1}, {"num_workers": 0}], ids=["one worker", "in process"])
def test_a_failure_is_told_once_and_later_answers_have_nothing_of_it(options: dict[str, int]) -> None:
    """A worker uses its outcome again as long as there is nothing in it: what was said once is not said with each answer."""
    with started([Brittle] * 4, batch_size=1, **options) as envs:
        envs.send([1], [0])
        with pytest.raises(ValueError, match="not this one"):
            envs.recv()
        for row in (1, 2, 3, 1):
            envs.send([0], [row])
            assert envs.recv()[4]["env_id"].tolist() == [row]
        assert len(envs.errors) == 1


def test_an_answer_to_a_call_does_not_travel_again_with_every_step() -> None:
    with started([Brittle] * 4, num_workers=1) as envs:
        assert len(envs.call("__class__")) == 4
        sent = envs.stats()["bytes_pickled"]
        for _ in range(3):
            envs.step([0] * 4)
        assert envs.stats()["bytes_pickled"] == sent


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("noticed", ["by the reset", "by the way"])
def test_a_row_that_died_with_its_neighbour_waits_for_a_reset_of_its_own(noticed: str) -> None:
    """The neighbour's reset starts their worker anew: both environments are new then, and one of them has no episode."""
    with started([Brittle] * 4, num_workers=2, batch_size=1) as envs:
        os.kill(envs.processes[0].pid, signal.SIGKILL)
        envs.processes[0].join()
        if noticed == "by the way":
            while envs._pool.workers[0].death is None:
                envs.send([0], [2])
                envs.recv()
        else:
            envs.reset_async(env_id=[0])
            with pytest.raises(WorkerDied):
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


# --- rows that had failed before a call: what is asked of them, counted and recorded -----------

@pytest.mark.parametrize("by_row", [False, True], ids=["step", "send and recv"])
def test_a_row_that_had_failed_before_is_rebuilt_and_not_asked(launch: Launch, by_row: bool) -> None:
    """A row that was given up fails no second time: the next call rebuilds it, and counts the steps of the others."""
    faulty = vandal(3, "raises", step=2)
    envs = launch(crew(4, {3: faulty}), num_workers=2, on_failure="restart", restart_limit=0, restart_period=0.2)
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
        envs.recv(count=3)  # the rows of the others are kept
    envs._driver.budget.limit = 1
    counted, records = envs.stats()["steps"], len(envs.errors)
    assert step()["_restarted"].tolist() == [False, False, False, True]
    assert envs.stats()["steps"] == counted + 3
    assert len(envs.errors) == records == 1


@pytest.mark.parametrize("num_workers", [1, 2])
def test_rows_whose_worker_died_in_a_call_come_back_with_the_next_step(launch: Launch, num_workers: int) -> None:
    """A call rebuilds nothing. The step after it has nothing to ask of these rows, and must not take that for an answer."""
    envs = launch(crew(4), num_workers=num_workers, on_failure="restart")
    ledger = Ledger.of(envs, seed=7)
    with pytest.raises(WorkerDied):
        envs.call("do", "kill", only=3)
    answer = envs.step(ACTIONS)
    lost = [0, 1, 2, 3] if num_workers == 1 else [2, 3]
    assert np.flatnonzero(answer[-1]["_restarted"]).tolist() == lost
    ledger.step(ACTIONS, answer)
    ledger.step(ACTIONS, envs.step(ACTIONS))
    assert len(envs.errors) == 1


def test_a_death_that_two_requests_tell_of_is_recorded_once(launch: Launch) -> None:
    """A worker dies with two messages to answer: each ``recv`` says so, and the record is one."""
    envs = launch(crew(2), num_workers=1, batch_size=1)
    envs.reset(seed=7)
    (pid,) = worker_pids(envs)
    os.kill(pid, signal.SIGSTOP)
    for row in (0, 1):
        envs.send([1], [row])
    os.kill(pid, signal.SIGKILL)
    assert not remaining([pid], 5.0)
    for _ in range(2):
        with pytest.raises(WorkerDied):
            envs.recv()
    assert len(envs.errors) == 1
