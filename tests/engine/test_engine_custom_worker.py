"""Section 1.14: a custom ``worker`` speaks Gymnasium's pipe protocol, so it gets Gymnasium's class."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import counters, opened
from gymnasium.vector import VectorEnv
from gymnasium.vector.async_vector_env import _async_worker

import vecenv
from vecenv.front.arguments import HAS_MAX_CONCURRENCY


def counting_worker(index: int, env_fn: Any, *rest: Any) -> None:
    """Gymnasium's own worker over an environment that pays a hundred times as much."""

    def build() -> gymnasium.Env:
        return gymnasium.wrappers.TransformReward(env_fn(), lambda reward: reward * 100)

    _async_worker(index, build, *rest)


def test_a_custom_worker_runs_and_decides(shared_memory: bool) -> None:
    with opened(counters(2), shared_memory=shared_memory, worker=counting_worker) as envs:
        assert isinstance(envs, VectorEnv)
        assert isinstance(envs, gymnasium.vector.AsyncVectorEnv)
        assert envs.worker is counting_worker
        observations, _ = envs.reset(seed=4)
        assert observations[:, 3].tolist() == [4, 5]
        np.testing.assert_allclose(envs.step([0, 0])[1], [0.1, 100.1])
        assert envs.call("env_id") == (0, 1)


def test_a_custom_worker_may_be_given_by_position() -> None:
    envs: Any = vecenv.AsyncVectorEnv(counters(2), True, True, None, True, counting_worker)
    envs.reset(seed=1)
    envs.close()


@pytest.mark.parametrize("option", [{"num_workers": 1}, {"use_caller": True}, {"on_failure": "restart"}])
def test_what_only_our_own_workers_can_do_is_refused_beside_a_custom_one(option: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        vecenv.AsyncVectorEnv(counters(2), worker=counting_worker, **option)


def test_max_concurrency_beside_a_custom_worker_is_for_gymnasiums_own_class_to_heed() -> None:
    """Where that does not have it, it is refused, and not dropped."""
    if not HAS_MAX_CONCURRENCY:
        with pytest.raises(ValueError, match=r"`max_concurrency` cannot be combined with a custom `worker`"):
            vecenv.AsyncVectorEnv(counters(2), worker=counting_worker, max_concurrency=1)
        return
    with opened(counters(2), worker=counting_worker, max_concurrency=1) as envs:
        assert envs.max_concurrency == 1
        np.testing.assert_allclose((envs.reset(seed=4), envs.step([0, 0]))[1][1], [0.1, 100.1])
