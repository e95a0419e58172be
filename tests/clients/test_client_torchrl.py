"""TorchRL's ``GymWrapper`` returns the same results over vecenv, without an adapter, as over ``SyncVectorEnv``."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from client_envs import make_cartpole, make_full_env_fns

pytest.importorskip("torchrl", reason="needs TorchRL: pip install 'vecenv[clients]'")

import torch
from torchrl.collectors import Collector
from torchrl.envs import GymWrapper

import vecenv


@pytest.fixture(scope="module", autouse=True)
def wrap_gymnasiums_engine_first() -> None:
    """Wrap one of Gymnasium's vector environments first, because TorchRL keeps the first wrapped one forever."""
    env = GymWrapper(make_gymnasium([make_cartpole] * 2, "Disabled"))
    env.rollout(3)
    env.close()


def make_vecenv(env_fns: list[Any], mode: str) -> Any:
    return vecenv.AsyncVectorEnv(env_fns, num_workers=2, context="forkserver", autoreset_mode=mode)


def make_gymnasium(env_fns: list[Any], mode: str) -> Any:
    return gym.vector.SyncVectorEnv(env_fns, autoreset_mode=mode)


def assert_same_data(actual: Any, expected: Any) -> None:
    assert actual.batch_size == expected.batch_size
    keys = set(actual.keys(include_nested=True, leaves_only=True))
    assert keys == set(expected.keys(include_nested=True, leaves_only=True))
    assert ("next", "observation") in keys or ("next", "position") in keys
    for key in keys:
        assert torch.equal(actual[key].nan_to_num(-7.0), expected[key].nan_to_num(-7.0)), key


# TorchRL does not read Dict observations in same-step mode, not even those of SyncVectorEnv
@pytest.mark.parametrize(("mode", "nested"), [("Disabled", False), ("Disabled", True), ("SameStep", False)])
def test_rollout_equals_sync_vector_env(mode: str, nested: bool) -> None:
    def rollout(make: Any) -> Any:
        env_fns = make_full_env_fns(4) if nested else [functools.partial(make_cartpole, 17)] * 4
        env = GymWrapper(make(env_fns, mode))
        env.set_seed(3)
        torch.manual_seed(0)
        env.action_spec.seed = 0
        data = env.rollout(60, break_when_any_done=False)
        env.close()
        return data

    actual, expected = rollout(make_vecenv), rollout(make_gymnasium)
    assert_same_data(actual, expected)
    assert expected["next", "truncated"].sum() > 4
    assert expected["next", "terminated"].sum() > 4


def test_collector_batches_equal_sync_vector_env() -> None:
    def collect_batches(make: Any) -> list[Any]:
        env = GymWrapper(make([make_cartpole] * 4, "Disabled"))
        env.set_seed(3)
        torch.manual_seed(0)
        collector = Collector(env, None, frames_per_batch=80, total_frames=240)
        batches = [batch.clone() for batch in collector]
        collector.shutdown()
        return batches

    for actual, expected in zip(collect_batches(make_vecenv), collect_batches(make_gymnasium), strict=True):
        for key in ("observation", "action", ("next", "observation"), ("next", "reward"), ("next", "done")):
            assert torch.equal(actual[key], expected[key]), key


def test_torchrl_refuses_next_step_autoreset() -> None:
    envs = vecenv.make_vec("CartPole-v1", 2, "serial")
    with pytest.raises(RuntimeError, match="SAME_STEP or DISABLED"):
        GymWrapper(envs)
    envs.close()


def test_transitions_over_envpool_stay_within_an_episode() -> None:
    pytest.importorskip("envpool", reason="needs EnvPool: pip install 'vecenv[envpool]'")
    env = GymWrapper(vecenv.make_vec("CartPole-v1", 4, "envpool", vector_kwargs={"autoreset_mode": "Disabled"}))
    torch.manual_seed(0)
    data = env.rollout(60, break_when_any_done=False)
    env.close()
    before, after = data["observation"].numpy(), data["next", "observation"].numpy()
    done = data["next", "done"].numpy()[..., 0]
    assert done.sum() > 4
    assert np.abs(after - before).max() < 2.0  # no transition leads into the next episode
    assert np.abs(before[:, 1:][done[:, :-1]]).max() <= 0.05  # the next observation is an initial one
