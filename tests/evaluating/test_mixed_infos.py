"""Evaluations return the results of plain loops even if the infos of a step do not fit into one array."""

from __future__ import annotations

import asyncio
import functools
import warnings
from typing import Any

import numpy as np
import pytest
from envs import open_engine
from mixed_infos import MixedInfosEnv, choose_action, play_episode, summarize_results

import vecenv
from vecenv.aio import Pool

EPISODES = 12
SEED = 40
SLOW = [pytest.mark.slow, pytest.mark.timeout(3600)]
WORKERS = (0, 1, 2, 4, 8)


def choose_actions_with_infos(observations: Any, infos: Any) -> Any:
    return np.array([choose_action(observation, info) for observation, info in zip(observations, infos, strict=True)])


async def choose_without_info(observation: Any) -> int:
    return choose_action(observation)


async def evaluate_with_pool(env_fn: Any, size: int, num_workers: int) -> Any:
    async with Pool(env_fn, size, num_workers=num_workers) as pool:
        return await pool.evaluate(choose_without_info, EPISODES, seed=SEED)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mixtures", "workers"),
    [(range(4), (0, 2)), ([4], (1, 4, 8)), pytest.param(range(5, 205), WORKERS, marks=SLOW)],
    ids=str,
)
def test_evaluate_equals_plain_loops(mixtures: Any, workers: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # evaluate must not warn about infos that do not fit into one array
        for mixture in mixtures:
            mode = ("NextStep", "SameStep", "Disabled")[mixture % 3]
            env_fn = functools.partial(MixedInfosEnv, mixture, none=True)
            expected = [play_episode(env_fn(), SEED + index, True) for index in range(EPISODES)]
            for num_workers in workers:
                with open_engine([env_fn] * max(3, num_workers), num_workers=num_workers, autoreset_mode=mode) as envs:
                    results = vecenv.evaluate(envs, choose_actions_with_infos, EPISODES, seed=SEED)
                assert summarize_results(results) == expected, f"mixture {mixture}, {num_workers} workers, {mode}"


@pytest.mark.parametrize(
    ("mixtures", "workers"), [(range(2), (1, 2)), pytest.param(range(2, 202), WORKERS[1:], marks=SLOW)], ids=str
)
def test_pool_evaluate_equals_plain_loops(mixtures: Any, workers: Any) -> None:
    for mixture in mixtures:
        env_fn = functools.partial(MixedInfosEnv, mixture, none=True)
        expected = [play_episode(env_fn(), SEED + index, False) for index in range(EPISODES)]
        for num_workers in workers:
            results = asyncio.run(evaluate_with_pool(env_fn, max(3, num_workers), num_workers))
            assert summarize_results(results) == expected, f"mixture {mixture}, {num_workers} workers"
