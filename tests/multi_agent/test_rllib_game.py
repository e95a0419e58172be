"""A game with the interface of RLlib's environments works in ``MultiAgentVecEnv``, without RLlib."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from vecenv import MultiAgentVecEnv


class TurnsGame(gym.Env[Any, Any]):
    """A game of four steps. ``"slow"`` has an observation in every second step, and ``"late"`` joins in the second."""

    observation_space = None  # type: ignore[assignment]
    possible_agents = ("quick", "slow", "late")

    def get_observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-9, 9, (1,), np.float32)

    def get_action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.time, self.acted = 0, []  # type: ignore[var-annotated]
        return {"quick": np.zeros(1, np.float32), "slow": np.zeros(1, np.float32)}, {"__common__": {"round": 0}}

    def step(self, actions: Any) -> Any:
        self.time += 1
        self.acted.append(sorted(actions))
        observed = ["quick"] + (["slow"] if self.time % 2 == 0 else []) + (["late"] if self.time >= 2 else [])
        obs = {agent: np.full(1, self.time, np.float32) for agent in observed}
        infos = {"quick": {"time": self.time}, "__common__": {"round": self.time}}
        return obs, {"quick": 1.0}, {"__all__": False}, {"__all__": self.time == 4}, infos


def test_only_agents_with_an_observation_act(closes: Any) -> None:
    envs = closes(MultiAgentVecEnv([TurnsGame] * 2, num_workers=0))
    obs, infos = envs.reset(seed=0)
    assert infos["agent_mask"][0].tolist() == [True, True, False]
    masks, acted, observations = [], [], []
    for _ in range(4):
        obs, rewards, terminations, truncations, infos = envs.step(np.ones((2, 3), np.int64))
        masks.append(infos["agent_mask"][1].tolist())
        acted.append(infos["transition_mask"][1].tolist())
        observations.append(obs[1, :, 0].tolist())
    assert masks == [[True, False, False], [True, True, True], [True, False, True], [False] * 3]
    assert acted == [[True, True, False], [True, False, False], [True, True, True], [True, False, True]]
    assert observations == [[1, 0, 0], [2, 2, 2], [3, 2, 3], [4, 4, 4]]
    assert rewards[0].tolist() == [1, 0, 0]
    assert truncations.all()
    assert not terminations.any()
    assert infos["env_done"].all()
    assert infos["common"]["round"].tolist() == [4, 4]
    assert infos["time"][:, 0].tolist() == [4, 4]
    assert envs.get_attr("acted")[0] == [["quick", "slow"], ["quick"], ["late", "quick", "slow"], ["late", "quick"]]
    _, _, _, _, infos = envs.step(np.ones((2, 3), np.int64))
    assert infos["agent_mask"][0].tolist() == [True, True, False]


class OneArrayGame(TurnsGame):
    """A game that writes all observations into one array."""

    array = np.zeros(1, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.array[:] = 0
        observations, infos = super().reset(seed=seed, options=options)
        return dict.fromkeys(observations, self.array), infos

    def step(self, actions: Any) -> Any:
        observations, *results = super().step(actions)
        self.array[:] = self.time
        return dict.fromkeys(observations, self.array), *results


def test_agent_that_waits_keeps_its_last_observation(closes: Any) -> None:
    envs = closes(MultiAgentVecEnv([OneArrayGame], num_workers=0))
    envs.reset(seed=0)
    observations = [envs.step(np.ones((1, 3), np.int64))[0][0, :, 0].tolist() for _ in range(3)]
    assert observations == [[1, 0, 0], [2, 2, 2], [3, 2, 3]]


class GymnasiumGame(gym.Env[Any, Any]):
    """An environment of Gymnasium with methods for its spaces, which take no agent."""

    action_space = spaces.Discrete(3)

    def __init__(self) -> None:
        self.observation_space = self.get_observation_space()

    def get_observation_space(self) -> spaces.Space[Any]:
        return spaces.Box(-9, 9, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}


class StackedGame(GymnasiumGame):
    """The same with ``agent_num``."""

    agent_num = 2

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros((2, 1), np.float32), {}


@pytest.mark.parametrize(("game", "count"), [(GymnasiumGame, 1), (StackedGame, 2)])
def test_environment_with_a_method_of_that_name_is_no_game_of_rllib(game: Any, count: int, closes: Any) -> None:
    envs = closes(MultiAgentVecEnv([game], num_workers=0))
    assert envs.reset(seed=0)[0].shape == (1, count, 1)
