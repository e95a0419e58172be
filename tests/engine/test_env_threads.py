"""``env_threads``: environments of one worker that wait at the same time. Rows are what they are without, bit for bit."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import counters, opened, raises_logged, started
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import vecenv
from vecenv.errors import StepTimeout, WorkerDied
from vecenv.testing import assert_identical

MEETING = threading.Barrier(4)  # of one worker, where this module is forked or imported once


class Meets(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Nobody gets through a step or a reset alone: four have to be inside."""

    def __init__(self, index: int, length: int = 3) -> None:
        super().__init__(counters(8, lengths=(length,))[index]())

    def reset(self, **how: Any) -> Any:
        MEETING.wait(60)
        return super().reset(**how)

    def step(self, action: Any) -> Any:
        MEETING.wait(60)
        return super().step(action)


class Acts(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Does what the action says: 1 raises, 2 kills its process, 3 hangs, once."""

    def step(self, action: Any) -> Any:
        if action == 1:
            raise ArithmeticError("it slipped")
        if action == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == 3:
            time.sleep(600)
        return super().step(action)


def actors(count: int) -> list[Any]:
    return [functools.partial(_actor, index) for index in range(count)]


def _actor(index: int) -> Any:
    return Acts(counters(8, lengths=(3 + index % 2,))[index]())


def test_the_environments_of_a_worker_are_inside_at_the_same_time() -> None:
    with started([functools.partial(Meets, index) for index in range(8)], num_workers=2, env_threads=4) as envs:
        for _ in range(8):  # through two autoresets
            envs.step(np.zeros(8, np.int64))
        envs.send(np.zeros(4, np.int64), range(4))
        assert sorted(envs.recv(count=4)[4]["env_id"].tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("threads", [2, 16])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_every_number_is_that_of_a_sync_vector_env(mode: AutoresetMode, threads: int) -> None:
    same = SyncVectorEnv(actors(5), autoreset_mode=mode)
    with opened(actors(5), num_workers=2, env_threads=threads, autoreset_mode=mode) as envs:
        assert_identical(envs.reset(seed=3), same.reset(seed=3))
        for tick in range(12):
            actions = np.full(5, 4) + np.arange(5)
            answer = envs.step(actions)
            assert_identical(answer, same.step(actions))
            over = answer[2] | answer[3]
            if over.any() and mode is AutoresetMode.DISABLED:
                for both in (envs, same):
                    reset = both.reset(seed=[tick] * 5, options={"reset_mask": over.copy()})
                    assert_identical(reset[0][over], envs.observations[over])
        assert envs.stats()["step_time_slowest_env"] > 0
    same.close()


def test_what_raises_costs_the_others_nothing() -> None:
    with started(actors(4), num_workers=1, env_threads=4) as envs:
        with raises_logged(ArithmeticError):
            envs.step(np.array([0, 1, 0, 0]))
        assert envs.observations[[0, 2, 3], 1].tolist() == [1, 1, 1]
        envs.reset(options={"reset_mask": np.array([False, True, False, False])})
        assert envs.step(np.zeros(4, np.int64))[0][:, 1].tolist() == [2, 1, 2, 2]


def test_a_worker_that_dies_takes_its_own_along() -> None:
    with started(actors(4), num_workers=2, env_threads=2) as envs:
        with pytest.raises(WorkerDied) as info:
            envs.step(np.array([0, 0, 2, 0]))
        assert info.value.envs == (2, 3)
        envs.reset(seed=1)
        assert envs.step(np.zeros(4, np.int64))[0][:, 1].tolist() == [1, 1, 1, 1]


def test_what_hangs_is_told_and_ended() -> None:
    with started(actors(4), num_workers=1, env_threads=4) as envs:
        envs.step_async(np.array([0, 3, 0, 0]))
        with pytest.raises(StepTimeout) as info:
            envs.step_wait(timeout=0.5)
        assert f'{__file__}", line' in str(info.value), "it says where"
        envs.close(terminate=True)
    with started(actors(2), num_workers=1, env_threads=2, on_failure="restart", step_timeout=1.0) as envs:
        *_, truncations, infos = envs.step(np.array([0, 3]))
        assert truncations.tolist() == infos["restarted"].tolist() == [True, True]


def test_options_that_have_no_meaning_are_refused() -> None:
    for options, says in (
        ({"env_threads": 0, "num_workers": 1}, "`env_threads` must be an int from 1 on, got 0"),
        ({"env_threads": 2, "num_workers": 0}, "`env_threads` needs worker processes"),
        ({"env_threads": 2, "use_caller": True}, "`env_threads` needs worker processes"),
        ({"env_threads": 2, "num_workers": "auto"}, "`num_workers` must be None or an int from 1 on, beside env_threads"),
    ):
        with pytest.raises(ValueError, match=says):
            vecenv.AsyncVectorEnv(actors(2), **options)  # type: ignore[arg-type]
