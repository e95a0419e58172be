"""``abandon``: nobody waits any longer for some environments; and who is in flight, and where."""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np
import pytest
from envs import opened
from gymnasium.error import NoAsyncCallError
from vandals import vandal, witness

from vecenv.errors import WorkerDied

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
    with opened(envs_of, num_workers=2, on_failure="restart") as envs:
        envs.reset(seed=1)
        envs.send(np.ones(2, np.int64), [0, 1])
        assert envs.recv(count=1)[4]["env_id"].tolist() == [1]
        envs.abandon([0])
        *_, truncations, infos = envs.recv(count=1)
        assert (infos["env_id"].tolist(), truncations.tolist(), infos["restarted"].tolist()) == ([0], [True], [True])
