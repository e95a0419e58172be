"""Tianshou's asynchronous mode: some environments are reset while others step, and no rows are lost or mixed up."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from client_envs import FullEnv

import vecenv
from vecenv.adapters import as_tianshou


def make_venv(num_workers: int, mode: str, count: int = 4, nested: bool = False) -> Any:
    env_fns = [lambda: FullEnv(nested=nested)] * count
    envs: Any = vecenv.AsyncVectorEnv(env_fns, num_workers=num_workers, context="forkserver", autoreset_mode=mode)
    return as_tianshou(envs, wait_num=2)


def get_position(observation: Any) -> Any:
    return observation["position"] if isinstance(observation, dict) else observation


@pytest.mark.parametrize(("num_workers", "mode", "nested"), [(0, "Disabled", True), (2, "NextStep", False)])
def test_rows_equal_single_environments(num_workers: int, mode: str, nested: bool) -> None:
    venv = make_venv(num_workers, mode, nested=nested)
    assert venv.is_async
    observations, infos = venv.reset(seed=[5, 6, 7, 8])
    single_envs = [FullEnv(nested=nested) for _ in range(4)]
    for i, env in enumerate(single_envs):
        observation, info = env.reset(seed=5 + i)
        np.testing.assert_array_equal(get_position(observations[i]), get_position(observation))
        assert infos[i] == info
    ready, steps = np.arange(4), 0
    while steps < 80:
        actions = ready % 3
        observations, rewards, terminations, truncations, infos = venv.step(actions, ready)
        ready = np.array([info["env_id"] for info in infos])
        for row, i in enumerate(ready):
            observation, reward, terminated, truncated, info = single_envs[i].step(i % 3)
            np.testing.assert_array_equal(get_position(observations[row]), get_position(observation))
            assert (rewards[row], terminations[row], truncations[row]) == (reward, terminated, truncated)
            assert infos[row].keys() == {*info, "env_id"}
            assert all(infos[row][key] == value for key, value in info.items() if key != "inner")
        over = ready[terminations | truncations]
        if len(over):
            observations, infos = venv.reset(over)
            for row, i in enumerate(over):
                expected, _ = single_envs[i].reset()
                np.testing.assert_array_equal(get_position(observations[row]), get_position(expected))
                assert "env_id" not in infos[row]
        steps += len(ready)
    while venv.waiting_id:
        venv.step(None, venv.waiting_id)
    assert sorted(venv.ready_id) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="no environment is stepping"):
        venv.step(None)
    venv.close()


def test_wait_num_out_of_range_or_with_a_vector_wrapper_is_refused() -> None:
    envs = vecenv.make_vec("CartPole-v1", num_envs=3, backend="serial")
    with pytest.raises(ValueError, match=r"wait_num must be within 1\.\.3, got 4"):
        as_tianshou(envs, wait_num=4)
    with pytest.raises(ValueError, match="which RecordEpisodeStatistics cannot do: pass AsyncVectorEnv"):
        as_tianshou(gym.wrappers.vector.RecordEpisodeStatistics(envs), wait_num=2)
    assert not as_tianshou(envs, wait_num=3).is_async
    envs.close()


def test_partial_steps_of_gymnasiums_engine_are_refused(closes: Any) -> None:
    envs = closes(gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2, autoreset_mode="Disabled"))
    with pytest.raises(ValueError, match=r"wait_num .* which SyncVectorEnv cannot do: pass .* from vecenv\.make_vec"):
        as_tianshou(envs, wait_num=1)
    venv = as_tianshou(envs)
    venv.reset()
    with pytest.raises(ValueError, match="steps only env 1, which SyncVectorEnv cannot do: pass"):
        venv.step(np.array([0]), [1])
    assert venv.step(np.array([0, 1]))[1].tolist() == [1.0, 1.0]
