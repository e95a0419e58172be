"""A program for EnvPool's asynchronous interface, over environments in Python."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError

import vecenv
from vecenv.adapters import as_envpool
from vecenv.errors import StepTimeout, WorkerDied


def make(num_envs: int = 5, mode: str = "NextStep", **options: Any) -> Any:
    fns = [lambda: gym.make("CartPole-v1", max_episode_steps=9)] * num_envs
    return vecenv.AsyncVectorEnv(fns, autoreset_mode=mode, **{"num_workers": 0, **options})


def alone(seed: int, steps: int) -> list[Any]:
    """What one environment says, in the rows of EnvPool: first observations have reward 0 and elapsed step 0."""
    env = gym.make("CartPole-v1", max_episode_steps=9)
    rows, elapsed = [(env.reset(seed=seed)[0], 0.0, False, False, 0)], 0
    while len(rows) < steps:
        if rows[-1][2] or rows[-1][3]:
            elapsed = 0
            rows.append((env.reset()[0], 0.0, False, False, 0))
            continue
        elapsed += 1
        rows.append((*env.step(elapsed % 2)[:4], elapsed))
    return rows


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_environment_is_stepped_as_if_it_were_alone(num_workers: int) -> None:
    pool = as_envpool(make(batch_size=2, num_workers=num_workers), seed=3)
    assert (len(pool), pool.is_async, pool.config["batch_size"]) == (5, True, 2)
    assert pool.all_env_ids.tolist() == list(range(5))
    assert pool.action_space == gym.spaces.Discrete(2)
    found: list[list[Any]] = [[] for _ in range(5)]
    pool.async_reset()
    while min(map(len, found)) <= 10:
        observations, rewards, terminations, truncations, infos = pool.recv()
        ids = infos["env_id"]
        assert (ids.dtype, rewards.dtype, len(ids)) == (np.int32, np.float32, 2)
        assert infos["players"]["env_id"] is ids
        for row, i in enumerate(ids.tolist()):
            elapsed = int(infos["elapsed_step"][row])
            found[i].append((observations[row], rewards[row], terminations[row], truncations[row], elapsed))
        pool.send((infos["elapsed_step"] + 1) % 2, ids)
    pool.close()
    for i, rows in enumerate(found):
        for got, wanted in zip(rows, alone(3 + i, len(rows)), strict=True):
            np.testing.assert_array_equal(got[0], wanted[0])
            assert got[1:] == wanted[1:]


def test_some_are_reset_while_others_wait() -> None:
    pool = as_envpool(make(3), seed=0)
    observations, infos = pool.reset()
    assert sorted(infos["env_id"].tolist()) == [0, 1, 2]
    again, infos = pool.reset(np.array([2, 1]))
    assert sorted(infos["env_id"].tolist()) == [1, 2]
    assert infos["elapsed_step"].tolist() == [0, 0]
    assert not np.array_equal(again[0], observations[infos["env_id"][0]])
    *_, infos = pool.step(np.zeros(3, int), np.arange(3, dtype=np.int32))
    assert infos["elapsed_step"].tolist() == [1, 1, 1]
    pool.close()


def test_what_is_not_envpools_is_refused() -> None:
    envs = make(2, "SameStep")
    with pytest.raises(ValueError, match="EnvPool's interface needs autoreset_mode='NextStep'"):
        as_envpool(envs)
    envs.close()
    with pytest.raises(TypeError, match="vector environment"):
        as_envpool("CartPole-v1")  # type: ignore[arg-type]


FINE, RAISES, DIES, LATE = range(4)
SECONDS = 3.0
"""How late an environment is: later than ``step_timeout``, and there before two more calls have timed out."""


class Faulty(gym.Env[Any, Any]):
    """Counts its steps, says with which seed it began, and fails as its action says."""

    observation_space = gym.spaces.Box(-1, 1e6, (2,))
    action_space = gym.spaces.Discrete(4)
    seed = -1

    def __init__(self, resets_that_fail: str = "") -> None:
        self.resets_that_fail = resets_that_fail  # a file; while it is there, resets raise

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if self.resets_that_fail and os.path.exists(self.resets_that_fail):
            raise ValueError("the lid is stuck")
        self.steps, self.seed = 0, -1 if seed is None else seed
        return np.array([0, self.seed], np.float32), {}

    def step(self, action: Any) -> Any:
        if action == RAISES:
            raise ValueError("the lid is stuck")
        if action == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == LATE:
            time.sleep(SECONDS)
        self.steps += 1
        return np.array([self.steps, self.seed], np.float32), 1.0, False, False, {}


def faulty_pool(batch_size: int, on_failure: str = "raise", fns: Any = None, step_timeout: float | None = None) -> Any:
    envs = vecenv.AsyncVectorEnv(
        fns or [Faulty] * 4, autoreset_mode="NextStep", num_workers=4, batch_size=batch_size, on_failure=on_failure,
        step_timeout=step_timeout,
    )  # fmt: skip
    return as_envpool(envs, seed=10)


def begin_again(pool: Any, begin: Any) -> None:
    """Every environment begins an episode, takes a step, and no row of before comes between."""
    for patience in (2, 1, 0):  # a reset waits for an environment that is late, and may say again that it is
        try:
            begin(pool)
            break
        except StepTimeout:
            assert patience
    pool.send(np.zeros(4, np.int64), np.arange(4))
    found: list[int] = []
    while len(found) < 4:
        observations, *_, infos = pool.recv()
        assert (observations[:, 0] == 1).all()
        assert (infos["elapsed_step"] == 1).all()
        found += infos["env_id"].tolist()
    assert sorted(found) == [0, 1, 2, 3]


def by_reset(pool: Any) -> None:
    observations, infos = pool.reset()
    assert (observations[:, 0] == 0).all()
    assert (infos["elapsed_step"] == 0).all()
    assert sorted(infos["env_id"].tolist()) == [0, 1, 2, 3]


def by_async_reset(pool: Any) -> None:
    pool.async_reset()
    found: list[int] = []
    while len(found) < 4:
        observations, *_, infos = pool.recv()
        assert (observations[:, 0] == 0).all()
        found += infos["env_id"].tolist()
    assert sorted(found) == [0, 1, 2, 3]


@pytest.mark.parametrize("begin", [by_reset, by_async_reset])
@pytest.mark.parametrize("fault", [RAISES, DIES, pytest.param(LATE, marks=pytest.mark.long)], ids=["raises", "dies", "late"])
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
@pytest.mark.parametrize("batch_size", [4, 2])
def test_the_next_reset_goes_on_after_a_failure(batch_size: int, on_failure: str, fault: int, begin: Any) -> None:
    pool = faulty_pool(batch_size, on_failure, step_timeout=SECONDS / 2 if fault == LATE else None)
    pool.reset()
    wanted = {RAISES: ValueError, DIES: WorkerDied, LATE: StepTimeout}[fault]
    pool.send(np.array([FINE, fault, FINE, FINE]), np.arange(4))
    batches = 4 // batch_size
    if on_failure == "restart":
        rows = [pool.recv() for _ in range(batches)]
        cut = [row for _, _, _, truncations, infos in rows for row in infos["env_id"][truncations].tolist()]
        assert cut == [1]
    else:
        with pytest.raises(wanted):
            all(pool.recv() for _ in range(batches))
    begin_again(pool, begin)
    pool.close()


@pytest.mark.parametrize("fault", [RAISES, DIES], ids=["raises", "dies"])
def test_survivors_go_on_without_the_one_that_failed_until_it_is_reset(fault: int) -> None:
    pool = faulty_pool(4)
    pool.reset()
    with pytest.raises((ValueError, WorkerDied)):
        pool.step(np.array([FINE, fault, FINE, FINE]), np.arange(4))
    observations, *_, infos = pool.recv()
    assert sorted(infos["env_id"].tolist()) == [0, 2, 3]
    assert (observations[:, 0] == 1).all()
    observations, *_, infos = pool.step(np.zeros(3, np.int64))
    assert (observations[:, 0] == 2).all()
    observations, infos = pool.reset(np.array([1]))
    assert (observations[:, 0].tolist(), infos["env_id"].tolist()) == ([0], [1])
    observations, *_, infos = pool.step(np.zeros(4, np.int64), np.arange(4))
    assert observations[np.argsort(infos["env_id"]), 0].tolist() == [3, 1, 3, 3]
    pool.close()


def test_a_reset_of_some_does_not_hand_out_steps_of_others() -> None:
    pool = faulty_pool(2)
    pool.reset()
    pool.send(np.zeros(3, np.int64), np.arange(3))
    with pytest.raises(AlreadyPendingCallError, match=r"for envs \[3\] while 3 are in flight"):
        pool.reset(np.array([3]))
    pool.recv()
    pool.recv()
    observations, infos = pool.reset(np.array([3]))
    assert (observations[:, 0].tolist(), infos["env_id"].tolist()) == ([0], [3])
    with pytest.raises(NoAsyncCallError):
        pool.recv()
    pool.close()


def test_a_reset_that_failed_is_asked_for_again_with_its_seed(tmp_path: Path) -> None:
    mark = tmp_path / "stuck"
    mark.touch()
    pool = faulty_pool(4, fns=[Faulty, lambda: Faulty(str(mark)), Faulty, Faulty])
    with pytest.raises(ValueError, match="stuck"):
        pool.reset()
    mark.unlink()
    observations, infos = pool.reset()
    assert observations[np.argsort(infos["env_id"]), 1].tolist() == [10, 11, 12, 13]
    observations, _ = pool.reset()
    assert observations[:, 1].tolist() == [-1] * 4
    pool.close()
