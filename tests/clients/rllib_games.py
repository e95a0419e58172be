"""A game with RLlib's interface in which agents take turns, join late, and end in different ways."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from ray.rllib.env.multi_agent_env import MultiAgentEnv


class TurnGame(MultiAgentEnv):  # type: ignore[misc, unused-ignore]
    """A random game in which agent ``"slow"`` acts in every second step, and ``"late"`` joins later.

    Args:
        same_spaces: All agents have the same spaces.
    """

    def __init__(self, same_spaces: bool = False) -> None:
        super().__init__()
        box = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        wide = box if same_spaces else spaces.Box(-np.inf, np.inf, (5,), np.float32)
        push = spaces.Discrete(4) if same_spaces else spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.possible_agents = self.agents = ["quick", "slow", "late"]
        self.observation_spaces = {"quick": box, "slow": wide, "late": box}
        self.action_spaces = {"quick": spaces.Discrete(4), "slow": push, "late": spaces.Discrete(4)}
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
        kind = int(self.rng.integers(2))  # 0: terminated, 1: truncated
        over = bool(len(ended) == len(self.present) or self.rng.integers(12) == 0)
        flagged = ["__all__"] if over else ended
        flags = [{"__all__": False} | dict.fromkeys(flagged, index == kind) for index in (0, 1)]
        observed = self.present if over or self.time % 2 == 0 else [a for a in self.present if a != "slow" or a in ended]
        rewards = {agent: float(self.rng.normal()) + float(np.sum(actions.get(agent, 0))) for agent in self.present}
        infos = {agent: {"luck": float(self.rng.normal())} for agent in observed}
        observations = {agent: self._observe(agent) for agent in observed}
        self.present = [agent for agent in self.present if agent not in ended]
        return observations, rewards, *flags, infos
