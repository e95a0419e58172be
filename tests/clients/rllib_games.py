"""A game with RLlib's interface and agents that take turns, join late, and end in different ways."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from ray.rllib.env.multi_agent_env import MultiAgentEnv


class TurnGame(MultiAgentEnv):  # type: ignore[misc, unused-ignore]
    """A random game. Agent ``"slow"`` acts only in every second step, and ``"late"`` joins after two steps.

    Args:
        same_spaces: All agents have the same spaces.
    """

    def __init__(self, same_spaces: bool = False) -> None:
        super().__init__()
        box = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        slow_box = box if same_spaces else spaces.Box(-np.inf, np.inf, (5,), np.float32)
        slow_actions = spaces.Discrete(4) if same_spaces else spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.possible_agents = self.agents = ["quick", "slow", "late"]
        self.observation_spaces = {"quick": box, "slow": slow_box, "late": box}
        self.action_spaces = {"quick": spaces.Discrete(4), "slow": slow_actions, "late": spaces.Discrete(4)}
        self.rng = np.random.default_rng()

    def _observe(self, agent: str) -> Any:
        return self.rng.normal(size=self.observation_spaces[agent].shape).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.time, self.present = 0, ["quick", "slow"]
        return {agent: self._observe(agent) for agent in self.present}, {"quick": {"start": float(self.rng.integers(9))}}

    def step(self, actions: dict[str, Any]) -> Any:
        self.time += 1
        acting = {"quick", "late"} if (self.time - 1) % 2 else {"quick", "slow", "late"}
        assert set(actions) == acting & set(self.present), (set(actions), acting, self.present)
        if self.time == 2:
            self.present = [*self.present, "late"]
        ended = [agent for agent in self.present if self.time > 3 and self.rng.integers(8) == 0]
        truncates = bool(self.rng.integers(2))
        over = bool(len(ended) == len(self.present) or self.rng.integers(12) == 0)
        keys = ["__all__"] if over else ended
        terminations = {"__all__": False} | dict.fromkeys(keys, not truncates)
        truncations = {"__all__": False} | dict.fromkeys(keys, truncates)
        observed = self.present if over or self.time % 2 == 0 else [a for a in self.present if a != "slow" or a in ended]
        rewards = {agent: float(self.rng.normal()) + float(np.sum(actions.get(agent, 0))) for agent in self.present}
        infos = {agent: {"luck": float(self.rng.normal())} for agent in observed}
        observations = {agent: self._observe(agent) for agent in observed}
        self.present = [agent for agent in self.present if agent not in ended]
        return observations, rewards, terminations, truncations, infos
