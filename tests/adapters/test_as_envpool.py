"""Tests of ``as_envpool``, which offers EnvPool's asynchronous interface for environments in Python."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from failing import (
    DIES,
    LATE,
    LATE_STEP_SECONDS,
    NUM_ENVS,
    RAISES,
    FaultyEnv,
    actions_with_fault,
    assert_reset_works_after_failure,
    make_engine,
)
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from sampling import each_once
from without_spares import Walk

import vecenv
from vecenv.adapters import as_envpool
from vecenv.errors import WorkerDied


def make_cartpoles(num_envs: int = 5, mode: str = "NextStep", **options: Any) -> Any:
    fns = [lambda: gym.make("CartPole-v1", max_episode_steps=9)] * num_envs
    return vecenv.AsyncVectorEnv(fns, autoreset_mode=mode, **{"num_workers": 0, **options})


def step_directly(seed: int, count: int) -> list[Any]:
    """Return ``count`` results of one environment in EnvPool's form: those of resets have reward 0 and elapsed step 0."""
    env = gym.make("CartPole-v1", max_episode_steps=9)
    results, elapsed = [(env.reset(seed=seed)[0], 0.0, False, False, 0)], 0
    while len(results) < count:
        _, _, terminated, truncated, _ = results[-1]
        if terminated or truncated:
            elapsed = 0
            results.append((env.reset()[0], 0.0, False, False, 0))
        else:
            elapsed += 1
            results.append((*env.step(elapsed % 2)[:4], elapsed))
    return results


@pytest.mark.parametrize("num_workers", [0, 2])
def test_results_equal_those_of_single_environments(num_workers: int) -> None:
    pool = as_envpool(make_cartpoles(batch_size=2, num_workers=num_workers), seed=3)
    assert (len(pool), pool.is_async, pool.config["batch_size"]) == (5, True, 2)
    assert pool.all_env_ids.tolist() == list(range(5))
    assert pool.action_space == gym.spaces.Discrete(2)
    results: list[list[Any]] = [[] for _ in range(5)]
    pool.async_reset()
    while min(map(len, results)) <= 10:
        observations, rewards, terminations, truncations, infos = pool.recv()
        ids = infos["env_id"]
        assert (ids.dtype, rewards.dtype, len(ids)) == (np.int32, np.float32, 2)
        assert infos["players"]["env_id"] is ids
        for index, row in enumerate(ids.tolist()):
            elapsed = int(infos["elapsed_step"][index])
            results[row].append((observations[index], rewards[index], terminations[index], truncations[index], elapsed))
        pool.send((infos["elapsed_step"] + 1) % 2, ids)
    pool.close()
    for row, row_results in enumerate(results):
        for actual, expected in zip(row_results, step_directly(3 + row, len(row_results)), strict=True):
            np.testing.assert_array_equal(actual[0], expected[0])
            assert actual[1:] == expected[1:]


def test_reset_of_some_rows_does_not_affect_the_others(closes: Any) -> None:
    pool = closes(as_envpool(make_cartpoles(3), seed=0))
    observations, infos = pool.reset()
    assert sorted(infos["env_id"].tolist()) == [0, 1, 2]
    new_observations, infos = pool.reset(np.array([2, 1]))
    assert sorted(infos["env_id"].tolist()) == [1, 2]
    assert infos["elapsed_step"].tolist() == [0, 0]
    assert not np.array_equal(new_observations[0], observations[infos["env_id"][0]])
    *_, infos = pool.step(np.zeros(3, int), np.arange(3, dtype=np.int32))
    assert infos["elapsed_step"].tolist() == [1, 1, 1]


def test_unsupported_environments_are_refused() -> None:
    envs = make_cartpoles(2, "SameStep")
    with pytest.raises(ValueError, match="EnvPool's interface needs autoreset_mode='NextStep'"):
        as_envpool(envs)
    envs.close()
    with pytest.raises(TypeError, match="vector environment"):
        as_envpool("CartPole-v1")  # type: ignore[arg-type]
    wrapped = gym.wrappers.vector.TransformReward(make_cartpoles(2), lambda rewards: 100 * rewards)
    with pytest.raises(ValueError, match="steps single rows, which TransformReward cannot do: pass AsyncVectorEnv"):
        as_envpool(wrapped)
    wrapped.close()
    plain = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2)
    for unsupported in (plain, gym.wrappers.vector.TransformReward(plain, lambda rewards: rewards)):
        name = type(unsupported).__name__
        with pytest.raises(ValueError, match=f"which {name} cannot do: pass a vector environment from vecenv.make_vec"):
            as_envpool(unsupported)
    plain.close()


def test_masks_and_floats_are_refused_as_indices(closes: Any) -> None:
    pool = closes(as_envpool(vecenv.AsyncVectorEnv([Walk] * 2, num_workers=0)))
    pool.reset()
    for ids, text in ((np.array([False, True]), "a mask"), ([0.5], r"\[0.5\]")):
        with pytest.raises(ValueError, match=f"env_id must be a sequence of integers, got {text}"):
            pool.send(np.zeros(len(ids), int), ids)
        with pytest.raises(ValueError, match=f"env_id must be a sequence of integers, got {text}"):
            pool.reset(ids)


def test_wrapper_that_accepts_rows_is_not_bypassed() -> None:
    pool = as_envpool(vecenv.wrappers.RecordEpisodeStatistics(make_cartpoles(2)))
    pool.reset()
    episode_ended = False
    while not episode_ended:
        *_, terminations, truncations, infos = pool.step(np.zeros(2, int), np.arange(2, dtype=np.int32))
        episode_ended = bool((terminations | truncations).any())
    assert "episode" in infos
    pool.close()


class EnvPoolClient:
    """A client of EnvPool's interface, which resets with ``reset`` or ``async_reset``."""

    def __init__(self, reset_call: str, envs: Any) -> None:
        self.pool = as_envpool(envs, seed=10)
        self.reset_call = reset_call
        self.close = self.pool.close

    def receive_rows(self, elapsed: int) -> Any:
        """Receive one observation of every row, and check that each row has taken ``elapsed`` steps."""
        all_observations = np.full((NUM_ENVS, 2), np.nan)
        while np.isnan(all_observations).any():
            observations, *_, infos = self.pool.recv()
            assert (infos["elapsed_step"] == elapsed).all()
            all_observations[infos["env_id"]] = observations
        return all_observations

    def reset(self) -> Any:
        if self.reset_call == "async_reset":
            self.pool.async_reset()
            return self.receive_rows(0)
        observations, infos = self.pool.reset()
        return observations[np.argsort(infos["env_id"])]

    def step(self, actions: Any) -> Any:
        self.pool.send(actions, np.arange(NUM_ENVS))
        return self.receive_rows(1)


@pytest.mark.parametrize("batch_size", [4, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("reset_call", "on_failure", "fault"),
    [
        *each_once(["reset", "async_reset"], ["raise", "restart"], [RAISES, DIES]),
        *(pytest.param(reset_call, "raise", LATE, marks=pytest.mark.long) for reset_call in ("reset", "async_reset")),
    ],
)
def test_next_reset_works_after_a_failure(reset_call: str, on_failure: str, fault: int, batch_size: int) -> None:
    step_timeout = LATE_STEP_SECONDS / 2 if fault == LATE else None
    make_client = functools.partial(EnvPoolClient, reset_call)
    assert_reset_works_after_failure(make_client, on_failure, fault, batch_size=batch_size, step_timeout=step_timeout)


def make_faulty_pool(batch_size: int, fns: Any = None) -> Any:
    return as_envpool(make_engine(env_fns=fns, batch_size=batch_size, step_timeout=None), seed=10)


@pytest.mark.parametrize("fault", [RAISES, DIES], ids=["raises", "dies"])
def test_other_rows_continue_until_the_failed_one_is_reset(fault: int, closes: Any) -> None:
    pool = closes(make_faulty_pool(4))
    pool.reset()
    with pytest.raises((ValueError, WorkerDied)):
        pool.step(actions_with_fault(fault), np.arange(4))
    observations, *_, infos = pool.recv()
    assert sorted(infos["env_id"].tolist()) == [0, 2, 3]
    assert (observations[:, 0] == 1).all()
    observations, *_, infos = pool.step(np.zeros(3, np.int64))
    assert (observations[:, 0] == 2).all()
    observations, infos = pool.reset(np.array([1]))
    assert (observations[:, 0].tolist(), infos["env_id"].tolist()) == ([0], [1])
    observations, *_, infos = pool.step(np.zeros(4, np.int64), np.arange(4))
    assert observations[np.argsort(infos["env_id"]), 0].tolist() == [3, 1, 3, 3]


def test_reset_of_a_row_is_refused_until_other_rows_are_received(closes: Any) -> None:
    pool = closes(make_faulty_pool(2))
    pool.reset()
    pool.send(np.zeros(3, np.int64), np.arange(3))
    with pytest.raises(AlreadyPendingCallError, match=r"for env 3 with requests in flight \(3\)"):
        pool.reset(np.array([3]))
    pool.recv()
    pool.recv()
    observations, infos = pool.reset(np.array([3]))
    assert (observations[:, 0].tolist(), infos["env_id"].tolist()) == ([0], [3])
    with pytest.raises(NoAsyncCallError):
        pool.recv()


def test_failed_reset_is_repeated_with_its_seed(tmp_path: Path, closes: Any) -> None:
    fault_file = tmp_path / "stuck"
    fault_file.touch()
    pool = closes(make_faulty_pool(4, fns=[FaultyEnv, lambda: FaultyEnv(str(fault_file)), FaultyEnv, FaultyEnv]))
    with pytest.raises(ValueError, match="stuck"):
        pool.reset()
    fault_file.unlink()
    observations, infos = pool.reset()
    assert observations[np.argsort(infos["env_id"]), 1].tolist() == [10, 11, 12, 13]
    observations, _ = pool.reset()
    assert observations[:, 1].tolist() == [-1] * 4


def test_spare_that_resets_does_not_block_a_reset(closes: Any) -> None:
    env_fn = functools.partial(Walk, 0.3)
    envs = closes(vecenv.make_vec(env_fn, 2, context="fork", spare_workers=1))
    pool = as_envpool(envs)
    pool.reset()
    envs.set_attr("level", 2.0)
    assert envs.envs.in_flight.size == 1  # the spare repeats its reset with the new level
    observations, infos = pool.reset(np.array([1]))
    assert (observations[:, 2].tolist(), infos["env_id"].tolist()) == ([2.0], [1])
