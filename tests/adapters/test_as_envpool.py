"""A program for EnvPool's asynchronous interface, over environments in Python."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import vecenv
from vecenv.adapters import as_envpool


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
