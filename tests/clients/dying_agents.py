"""A parallel game with agents that die at different times, and a vector environment with one row per agent."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from vecenv.multi_agent import FlattenAgents, MultiAgentVecEnv


class DyingAgents:
    """A game of three agents that observe ``(agent, time)``. The seed determines when and by which flag each agent ends."""

    possible_agents = (1, 2, 3)

    def __init__(self) -> None:
        self.rng = np.random.default_rng()
        self.agents: list[int] = []

    def observation_space(self, agent: int) -> spaces.Space[Any]:
        return spaces.Box(0, 99, (2,), np.float32)

    def action_space(self, agent: int) -> spaces.Space[Any]:
        return spaces.Discrete(4)

    def _observe(self, agents: list[int]) -> Any:
        return {agent: np.array([agent, self.time], np.float32) for agent in agents}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.time, self.agents = 0, list(self.possible_agents)
        self.lives, self.terminates = self.rng.integers(1, 7, 4), self.rng.random(4) < 0.5
        return self._observe(self.agents), {agent: {"life": int(self.lives[agent])} for agent in self.agents}

    def step(self, actions: dict[int, Any]) -> Any:
        self.time += 1
        before, ended = self.agents, [agent for agent in self.agents if self.lives[agent] <= self.time]
        self.agents = [agent for agent in before if agent not in ended]
        return (
            self._observe(before), {agent: float(agent * self.time) for agent in before},
            {agent: agent in ended and bool(self.terminates[agent]) for agent in before},
            {agent: agent in ended and not self.terminates[agent] for agent in before},
            {agent: {"life": int(self.lives[agent])} for agent in before},
        )  # fmt: skip

    def close(self) -> None:
        pass


def make_agent_rows(mode: str, **options: Any) -> FlattenAgents:
    """Build a vector environment with nine rows: the agents of three games."""
    return MultiAgentVecEnv([DyingAgents] * 3, num_workers=0, autoreset_mode=mode).flatten_agents(**options)
