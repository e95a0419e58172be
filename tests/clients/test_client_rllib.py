"""RLlib over registered vector environments, compared with RLlib over ``SyncVectorEnv`` and ``MultiAgentEnv``."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from client_envs import TargetGame
from failing import reset_until_ready

ray = pytest.importorskip("ray", reason="needs Ray: see docs/clients.md")
pytest.importorskip("ray.rllib.algorithms.ppo", reason="needs RLlib's libraries: see docs/clients.md", exc_type=ImportError)

from ray.rllib.algorithms.ppo import PPOConfig  # noqa: E402
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner  # noqa: E402
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner  # noqa: E402
from ray.tune.registry import register_env  # noqa: E402
from rllib_games import TurnGame  # noqa: E402

import vecenv  # noqa: E402
from vecenv.adapters import MultiAgentVecEnvRunner, as_rllib  # noqa: E402
from vecenv.errors import StepTimeout  # noqa: E402


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False)
    yield
    ray.shutdown()


def make_config(env: str, mode: str, num_env_runners: int = 0) -> PPOConfig:
    return (
        PPOConfig()
        .environment(env)
        .env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=4, gym_env_vectorize_mode=mode)
        .training(train_batch_size_per_learner=200, minibatch_size=100, num_epochs=1)
        .debugging(seed=5)
    )


def sample_episodes(env: str, mode: str) -> list[Any]:
    runner = SingleAgentEnvRunner(config=make_config(env, mode))
    runner.env.action_space.seed(0)
    sampled = runner.sample(num_timesteps=400, random_actions=True)
    runner.stop()
    return sampled


def test_episodes_equal_those_over_sync_vector_env() -> None:
    vecenv.register("CartPole-v1", vector_kwargs={"num_workers": 2, "context": "forkserver"})
    ours, theirs = sample_episodes("vecenv/CartPole-v1", "vector_entry_point"), sample_episodes("CartPole-v1", "sync")
    assert len(ours) == len(theirs) > 10
    for actual, expected in zip(ours, theirs, strict=True):
        for name in ("observations", "actions", "rewards"):
            np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name), err_msg=name)
        assert (actual.is_terminated, actual.is_truncated) == (expected.is_terminated, expected.is_truncated)


@pytest.mark.usefixtures("cluster")
def test_ppo_trains_with_a_runner_in_another_process() -> None:
    register_env("cartpole-by-vecenv", lambda context: vecenv.make_vec("CartPole-v1", context["num_envs"], "serial"))
    algorithm = make_config("cartpole-by-vecenv", "vector_entry_point", num_env_runners=1).build_algo()
    result = algorithm.train()
    algorithm.stop()
    assert result["env_runners"]["num_env_steps_sampled"] >= 200
    assert 5 < result["env_runners"]["episode_return_mean"] < 100
    gym.envs.registration.registry.pop("rllib-single-agent-env-v0", None)


def make_multi_agent_config(env: str, runner: Any, count: int = 4) -> PPOConfig:
    """Return a configuration with one policy per agent, because a shared policy would need equal spaces."""
    return (
        PPOConfig()
        .environment(env, disable_env_checking=True)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=count, env_runner_cls=runner)
        .multi_agent(policies={"quick", "slow", "late"}, policy_mapping_fn=lambda agent, episode, **_: agent)
        .debugging(seed=5)
    )


def sample_multi_agent_episodes(same_spaces: bool, runner: Any, env: str) -> list[Any]:
    env_runner = runner(config=make_multi_agent_config(env, runner))
    for i, game in enumerate(env_runner.env.envs):
        for j, agent in enumerate(game.unwrapped.possible_agents):
            game.unwrapped.get_action_space(agent).seed(10 * i + j)
    sampled: list[Any] = env_runner.sample(num_timesteps=300, random_actions=True)
    env_runner.stop()
    return sampled


@pytest.mark.parametrize("same_spaces", [False, True], ids=["agents", "stack"])
def test_multi_agent_episodes_equal_those_over_rllibs_vector_env(same_spaces: bool) -> None:
    make = functools.partial(TurnGame, same_spaces)
    register_env("theirs", lambda context: make())
    register_env("ours", lambda context: vecenv.MultiAgentVecEnv([make] * context["num_envs"], num_workers=0))
    theirs = sample_multi_agent_episodes(same_spaces, MultiAgentEnvRunner, "theirs")
    ours = sample_multi_agent_episodes(same_spaces, MultiAgentVecEnvRunner, "ours")
    assert len(ours) == len(theirs) > 10
    assert any(episode.is_truncated for episode in theirs)
    for our_episode, their_episode in zip(ours, theirs, strict=True):
        assert set(our_episode.agent_episodes) == set(their_episode.agent_episodes)
        assert our_episode.is_terminated == their_episode.is_terminated
        assert our_episode.is_truncated == their_episode.is_truncated
        for agent, expected in their_episode.agent_episodes.items():
            actual = our_episode.agent_episodes[agent]
            for name in ("observations", "actions", "rewards", "infos"):
                assert is_equal(list(getattr(actual, name)), list(getattr(expected, name))), (agent, name)
            assert (actual.is_terminated, actual.is_truncated) == (expected.is_terminated, expected.is_truncated), agent


def is_equal(first: Any, second: Any) -> bool:
    """True if two nested dicts and lists have equal arrays or values."""
    if isinstance(first, dict | list):
        keys = range(len(first)) if isinstance(first, list) else first
        return len(first) == len(second) and all(is_equal(first[key], second[key]) for key in keys)
    return bool(np.array_equal(first, second))


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_ppo_learns_a_multi_agent_game_in_worker_processes() -> None:
    register_env(
        "targets",
        lambda context: vecenv.MultiAgentVecEnv([TargetGame] * context["num_envs"], num_workers=2, context="forkserver"),
    )
    pids: set[int] = set()
    algorithm = (
        make_multi_agent_config("targets", MultiAgentVecEnvRunner, 8)
        .callbacks(on_environment_created=lambda env, **_: pids.update(env.get_attr("pid")))
        .multi_agent(policies={"both"}, policy_mapping_fn=lambda agent, episode, **_: "both")
        .training(train_batch_size_per_learner=800, minibatch_size=200, num_epochs=8, lr=5e-3)
        .build_algo()
    )
    returns = [algorithm.train()["env_runners"]["episode_return_mean"] for _ in range(4)]
    algorithm.stop()
    assert len(pids - {os.getpid()}) == 2
    # random actions have a mean return of 10, the best actions 20
    assert returns[0] < 12.5, returns
    assert returns[-1] > 14.5, returns


def test_unsupported_configurations_are_rejected() -> None:
    def assert_rejected(make_envs: Any, error: type[Exception], text: str) -> None:
        register_env("rejected", make_envs)
        with pytest.raises(error, match=text):
            MultiAgentVecEnvRunner(config=make_multi_agent_config("rejected", MultiAgentVecEnvRunner))

    assert_rejected(lambda context: TurnGame(), TypeError, "needs a vecenv.MultiAgentVecEnv")
    wrong_count = "is 4, but 'rejected' built 3"
    assert_rejected(lambda context: vecenv.MultiAgentVecEnv([TurnGame] * 3, num_workers=0), ValueError, wrong_count)
    with pytest.raises(ValueError, match="register_env"):
        MultiAgentVecEnvRunner(config=make_multi_agent_config("never registered", MultiAgentVecEnvRunner))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"autoreset_mode": "SameStep"}, "autoreset_mode='NextStep'"),
        ({"copy": False}, "copy=True"),
        ({"layout": {"team": ["quick", "late"], "other": ["slow"]}}, "policy_mapping_fn"),
    ]
    for options, text in cases:
        envs = vecenv.MultiAgentVecEnv([TurnGame], num_workers=0, **options)
        with pytest.raises(ValueError, match=text):
            as_rllib(envs)
        envs.close()


def test_as_rllib_returns_masks_and_common_infos_and_rejects_missing_actions() -> None:
    envs = as_rllib(vecenv.MultiAgentVecEnv([MaskedGame] * 2, num_workers=0))
    _, infos = envs.reset(seed=0)
    assert infos[1]["__common__"] == {"round": 0}
    assert infos[1]["a"]["action_mask"].tolist() == [True, False]
    with pytest.raises(ValueError, match="'b' in env 1"):
        envs.step([{"a": 0, "b": 0}, {"a": 0}])
    _, rewards, *_, infos = envs.step([{"a": 0, "b": 1}, {"a": 1, "b": 1}])
    assert rewards == [{"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 1.0}]
    assert infos[0]["__common__"] == {"round": 1}
    observations, _, terminated, truncated, _ = envs.step([{"a": 0, "b": 0}, {"a": 0, "b": 1}])
    # in env 1, "a" is terminated and "b" truncated; with a flag for each, RLlib would treat both as terminated
    assert terminated == [{"a": False, "b": False, "__all__": False}, {"a": True, "b": False, "__all__": False}]
    assert truncated == [{"a": False, "b": False, "__all__": False}, {"a": False, "b": False, "__all__": True}]
    assert observations[1] == {"a": 1, "b": 1}
    restarted = envs.step([{"a": 0, "b": 0}, {}])
    assert [part[1] for part in restarted[:4]] == [{"a": 0, "b": 0}, {}, {"__all__": False}, {"__all__": False}]
    envs.close()


class MaskedGame:
    """A game with PettingZoo's interface, action masks, and an info for all agents."""

    possible_agents = ("a", "b")
    metadata: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return gym.spaces.Discrete(3)

    def action_space(self, agent: str) -> gym.Space[Any]:
        return gym.spaces.Discrete(2)

    def _infos(self) -> dict[str, Any]:
        return {agent: {"action_mask": np.array([1, 0])} for agent in self.agents} | {"round": self.round}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.round = list(self.possible_agents), 0
        return dict.fromkeys(self.agents, 0), self._infos()

    def step(self, actions: dict[str, Any]) -> Any:
        self.round += 1
        rewards = {agent: float(action) for agent, action in actions.items()}
        over = self.round == 2 and actions["b"] == 1
        flags = {"a": over, "b": False}, {"a": False, "b": over}
        infos = self._infos()
        self.agents = [] if over else self.agents
        return dict.fromkeys(self.possible_agents, 1), rewards, *flags, infos

    def close(self) -> None:
        pass


class SlowTurnGame(TurnGame):
    """A game with steps of one second."""

    def step(self, actions: dict[str, Any]) -> Any:
        time.sleep(1.0)
        return super().step(actions)


def test_timed_out_step_is_dropped_by_the_next_reset() -> None:
    envs = as_rllib(vecenv.MultiAgentVecEnv([functools.partial(SlowTurnGame, True)], num_workers=1, step_timeout=0.5))
    first, _ = envs.reset(seed=3)
    with pytest.raises(StepTimeout):
        envs.step([dict.fromkeys(first[0], 0)])
    second, _ = reset_until_ready(lambda: envs.reset(seed=3))
    assert first[0].keys() == second[0].keys()
    assert all((second[0][agent] == value).all() for agent, value in first[0].items())
    envs.close()
