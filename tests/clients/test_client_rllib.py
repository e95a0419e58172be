"""RLlib over a registered vector environment, against RLlib over Gymnasium's ``SyncVectorEnv``: no adapter, no change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

ray = pytest.importorskip("ray", reason="needs Ray: see docs/clients.md")
pytest.importorskip("ray.rllib.algorithms.ppo", reason="needs RLlib's libraries: see docs/clients.md", exc_type=ImportError)

from ray.rllib.algorithms.ppo import PPOConfig  # noqa: E402
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner  # noqa: E402
from ray.tune.registry import register_env  # noqa: E402

import vecenv  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False)
    yield
    ray.shutdown()


def config(env: str, mode: str, num_env_runners: int = 0) -> PPOConfig:
    return (
        PPOConfig()
        .environment(env)
        .env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=4, gym_env_vectorize_mode=mode)
        .training(train_batch_size_per_learner=200, minibatch_size=100, num_epochs=1)
        .debugging(seed=5)
    )


def episodes(env: str, mode: str) -> list[Any]:
    runner = SingleAgentEnvRunner(config=config(env, mode))
    runner.env.action_space.seed(0)
    found = runner.sample(num_timesteps=400, random_actions=True)
    runner.stop()
    return found


def test_episodes_are_the_same_as_over_gymnasiums_own() -> None:
    vecenv.register("CartPole-v1", vector_kwargs={"num_workers": 2, "context": "forkserver"})
    ours, theirs = episodes("vecenv/CartPole-v1", "vector_entry_point"), episodes("CartPole-v1", "sync")
    assert len(ours) == len(theirs) > 10
    for one, other in zip(ours, theirs, strict=True):
        for name in ("observations", "actions", "rewards"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
        assert (one.is_terminated, one.is_truncated) == (other.is_terminated, other.is_truncated)


def test_ppo_trains_with_runners_in_processes_of_their_own() -> None:
    register_env("cartpole-by-vecenv", lambda context: vecenv.make_vec("CartPole-v1", context["num_envs"], "serial"))
    algorithm = config("cartpole-by-vecenv", "vector_entry_point", num_env_runners=1).build_algo()
    result = algorithm.train()
    algorithm.stop()
    assert result["env_runners"]["num_env_steps_sampled"] >= 200
    assert 5 < result["env_runners"]["episode_return_mean"] < 100
    gym.envs.registration.registry.pop("rllib-single-agent-env-v0", None)
