"""Section 1.15: at most ``max_concurrency`` environments are inside ``reset`` or ``step`` at once."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from envs import CounterEnv, Options, OverlapEnv, SleepingEnv, assert_as_sync, counters, opened, started
from gymnasium import spaces
from gymnasium.vector import AutoresetMode


@pytest.mark.parametrize("limit", [1, 2])
def test_no_more_than_the_limit_are_inside_at_once(every_engine: Options, limit: int, tmp_path: Path) -> None:
    fns = [functools.partial(OverlapEnv, tmp_path, index) for index in range(4)]
    with opened(fns, max_concurrency=limit, **every_engine) as envs:
        _, infos = envs.reset(seed=1)
        assert infos["inside"].max() <= limit
        for _ in range(2):
            infos = envs.step(np.zeros(4))[4]
            assert infos["inside"].max() <= limit


@pytest.mark.parametrize("limit", [1, 2])
def test_first_ready_batches_keep_to_the_limit_too(every_engine: Options, limit: int, tmp_path: Path) -> None:
    fns = [functools.partial(OverlapEnv, tmp_path, index) for index in range(4)]
    with opened(fns, max_concurrency=limit, batch_size=1, **every_engine) as envs:
        envs.reset_async(seed=1)
        turns = []
        for _ in range(12):
            infos = envs.recv(timeout=20)[4]
            assert infos["inside"] <= limit
            turns += infos["env_id"].tolist()
            envs.send(np.zeros(1), infos["env_id"])
    assert set(turns) == {0, 1, 2, 3}


def test_without_a_limit_environments_do_overlap(tmp_path: Path) -> None:
    fns = [functools.partial(OverlapEnv, tmp_path, index) for index in range(3)]
    with started(fns) as envs:
        assert max(envs.step(np.zeros(3))[4]["inside"].max() for _ in range(5)) > 1


@pytest.mark.long
def test_calls_are_not_limited() -> None:
    with started([SleepingEnv] * 3, max_concurrency=1) as envs:
        begin = time.monotonic()
        envs.call("sleep", 2.0)
        assert time.monotonic() - begin < 5


@pytest.mark.parametrize("mode", AutoresetMode)
def test_the_limit_changes_nothing_about_the_answers(every_engine: Options, mode: AutoresetMode) -> None:
    assert_as_sync(counters(4, lengths=(2, 3)), autoreset_mode=mode, max_concurrency=1, **every_engine)


def test_an_error_inside_the_limit_lets_the_others_in() -> None:
    from envs import RaisingEnv, raises_logged

    fns = [functools.partial(RaisingEnv, 0, ValueError("x"), "step", 1), *counters(3)[1:]]
    with started(fns, max_concurrency=1) as envs:
        with raises_logged(ValueError):
            envs.step([0, 0, 0])
        envs.reset(seed=1)
        assert envs.call("steps") == (0, 0, 0)


class WaitsForAnother(OverlapEnv):
    """Stays in ``step`` until a second environment is inside as well, or for half a second; tells how
    many there were.
    """

    def step(self, action: Any) -> Any:
        with self._inside():
            deadline = time.monotonic() + 0.5
            most = 0
            while most < 2 and time.monotonic() < deadline:
                time.sleep(0.001)
                most = max(most, len(list(self.folder.iterdir())))
            time.sleep(0.01)
            observation, reward, terminated, truncated, info = CounterEnv.step(self, action)
        return observation, reward, terminated, truncated, info | {"most": most}


def test_as_many_as_the_limit_are_let_in_at_once(tmp_path: Path) -> None:
    fns = [functools.partial(WaitsForAnother, tmp_path, index) for index in range(4)]
    with started(fns, max_concurrency=2) as envs:
        assert envs.step(np.zeros(4))[4]["most"].max() == 2


@pytest.mark.parametrize("limit", [4, 100])
def test_a_limit_above_the_number_of_environments_is_no_limit(limit: int) -> None:
    assert_as_sync(counters(2), max_concurrency=limit)


def test_a_large_answer_by_pickle_does_not_hold_the_others_up() -> None:
    """A worker that waits until its answer is read must have let the next one in before."""

    class Large(CounterEnv):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = spaces.Box(0, 255, (256, 256, 3), np.uint8)

        def _observe(self) -> np.ndarray:
            return np.full((256, 256, 3), self.steps, np.uint8)

    with opened([Large] * 4, max_concurrency=1, shared_memory=False) as envs:
        envs.reset_async(seed=1)
        assert envs.reset_wait(timeout=20)[0].shape == (4, 256, 256, 3)
        assert (envs.step([0] * 4)[0] == 1).all()
