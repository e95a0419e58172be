"""Rows that had failed before a call: what is asked of them, counted and recorded."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from observe import FAULTS, Launch, remaining, worker_pids
from vandals import Ledger, crew, vandal

from vecenv.errors import RestartsExhausted, WorkerDied

pytestmark = FAULTS

ACTIONS = [1, 2, 3, 4]


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


def test_a_death_that_two_requests_tell_of_is_recorded_once(launch: Launch, tmp_path: Path) -> None:
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
