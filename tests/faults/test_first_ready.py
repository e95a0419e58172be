"""Faults between ``send`` and ``recv``: what holds for ``step`` holds for batches of whoever was first."""

from __future__ import annotations

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
from observe import CHEAP, FAULTS, PATIENCE, Launch, names, report, worker_pids
from vandals import Chain, Pause, crew, vandal

from vecenv.errors import EnvFailed, StepTimeout, WorkerDied
from vecenv.testing.faulty import WitnessEnv

pytestmark = FAULTS


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
