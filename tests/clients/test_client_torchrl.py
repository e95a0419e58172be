"""TorchRL's ``GymWrapper`` over vecenv, against the same over Gymnasium's ``SyncVectorEnv``: equal without an adapter."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from client_envs import full_env_fns, make_cartpole

pytest.importorskip("torchrl", reason="needs TorchRL: pip install 'vecenv[clients]'")

import torch
from torchrl.collectors import Collector
from torchrl.envs import GymWrapper

import vecenv


@pytest.fixture(scope="module", autouse=True)
def first_wrapper() -> None:
    """Wrap a Gymnasium environment first: TorchRL keeps the first environment that it wraps forever."""
    env = GymWrapper(theirs([make_cartpole] * 2, "Disabled"))
    env.rollout(3)
    env.close()


def ours(env_fns: list[Any], mode: str) -> Any:
    return vecenv.AsyncVectorEnv(env_fns, num_workers=2, context="forkserver", autoreset_mode=mode)


def theirs(env_fns: list[Any], mode: str) -> Any:
    return gym.vector.SyncVectorEnv(env_fns, autoreset_mode=mode)


def assert_same_data(one: Any, other: Any) -> None:
    assert one.batch_size == other.batch_size
    keys = set(one.keys(include_nested=True, leaves_only=True))
    assert keys == set(other.keys(include_nested=True, leaves_only=True))
    assert ("next", "observation") in keys or ("next", "position") in keys
    for key in keys:
        assert torch.equal(one[key].nan_to_num(-7.0), other[key].nan_to_num(-7.0)), key


# (TorchRL does not read Dict observations in same-step mode, not even Gymnasium's own.)
@pytest.mark.parametrize(("mode", "nested"), [("Disabled", False), ("Disabled", True), ("SameStep", False)])
def test_a_rollout_is_the_same(mode: str, nested: bool) -> None:
    def rollout(make: Any) -> Any:
        env_fns = full_env_fns(4) if nested else [functools.partial(make_cartpole, 17)] * 4
        env = GymWrapper(make(env_fns, mode))
        env.set_seed(3)
        torch.manual_seed(0)
        env.action_spec.seed = 0
        data = env.rollout(60, break_when_any_done=False)
        env.close()
        return data

    found, wanted = rollout(ours), rollout(theirs)
    assert_same_data(found, wanted)
    assert wanted["next", "truncated"].sum() > 4
    assert wanted["next", "terminated"].sum() > 4


def test_a_collector_collects_the_same() -> None:
    def collected(make: Any) -> list[Any]:
        env = GymWrapper(make([make_cartpole] * 4, "Disabled"))
        env.set_seed(3)
        torch.manual_seed(0)
        collector = Collector(env, None, frames_per_batch=80, total_frames=240)
        batches = [batch.clone() for batch in collector]
        collector.shutdown()
        return batches

    for found, wanted in zip(collected(ours), collected(theirs), strict=True):
        for key in ("observation", "action", ("next", "observation"), ("next", "reward"), ("next", "done")):
            assert torch.equal(found[key], wanted[key]), key


def test_next_step_autoreset_is_refused_by_torchrl_itself() -> None:
    envs = vecenv.make_vec("CartPole-v1", 2, "serial")
    with pytest.raises(RuntimeError, match="SAME_STEP or DISABLED"):
        GymWrapper(envs)
    envs.close()


def test_envpool_can_be_wrapped() -> None:
    pytest.importorskip("envpool", reason="needs EnvPool: pip install 'vecenv[envpool]'")
    env = GymWrapper(vecenv.make_vec("CartPole-v1", 4, "envpool", vector_kwargs={"autoreset_mode": "Disabled"}))
    torch.manual_seed(0)
    data = env.rollout(60, break_when_any_done=False)
    env.close()
    before, after = data["observation"].numpy(), data["next", "observation"].numpy()
    done = data["next", "done"].numpy()[..., 0]
    assert done.sum() > 4
    assert np.abs(after - before).max() < 2.0  # no transition leads into the next episode
    assert np.abs(before[:, 1:][done[:, :-1]]).max() <= 0.05  # and the next one begins where episodes begin
