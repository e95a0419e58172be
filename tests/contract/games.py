"""Environments for the contract tests: a slow CartPole, and a small two-player game with reset options."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv

PAUSE = 0.06


class SlowCartPole(CartPoleEnv):
    """A CartPole with steps of at least :data:`PAUSE` seconds."""

    def step(self, action: Any) -> Any:
        time.sleep(PAUSE)
        return super().step(action)


class TwoPlayerGame:
    """An endless two-player game. The options of a reset set the bounds of its first observations, which are random.

    Args:
        pause: The minimum duration of a step in seconds.
    """

    possible_agents = ("a", "b")
    render_mode = None

    def __init__(self, pause: float = 0.0) -> None:
        self.metadata = {"name": "contract_game_v0"}
        self.agents: list[str] = []
        self.pause = pause
        self.rng = np.random.default_rng()

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-10, 10, (3,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(4)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        bounds = {"low": -1.0, "high": 1.0, **(options or {})}
        return {agent: self.rng.uniform(**bounds, size=3).astype(np.float32) for agent in self.agents}, {}

    def step(self, actions: dict[str, Any]) -> Any:
        time.sleep(self.pause)
        observations = {agent: self.rng.uniform(-1, 1, 3).astype(np.float32) for agent in self.agents}
        rewards = {agent: float(actions[agent]) for agent in self.agents}
        over = dict.fromkeys(self.agents, False)
        return observations, rewards, over, dict(over), {agent: {"mine": 1} for agent in self.agents}

    def close(self) -> None:
        pass
