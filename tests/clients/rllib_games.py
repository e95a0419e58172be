"""A game with RLlib's interface in which agents take turns, join late, and end in different ways."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from ray.rllib.env.multi_agent_env import MultiAgentEnv


class TurnGame(MultiAgentEnv):  # type: ignore[misc, unused-ignore]
    """A game drawn from the seed of a reset; ``"slow"`` is observed at every second step, ``"late"`` joins later."""

    def __init__(self, alike: bool = False) -> None:
        super().__init__()
        box = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        wide = box if alike else spaces.Box(-np.inf, np.inf, (5,), np.float32)
        push = spaces.Discrete(4) if alike else spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.possible_agents = self.agents = ["quick", "slow", "late"]
        self.observation_spaces = {"quick": box, "slow": wide, "late": box}
        self.action_spaces = {"quick": spaces.Discrete(4), "slow": push, "late": spaces.Discrete(4)}
        self.rng = np.random.default_rng()

    def _seen(self, agent: str) -> Any:
        return self.rng.normal(size=self.observation_spaces[agent].shape).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.time, self.there = 0, ["quick", "slow"]
        return {agent: self._seen(agent) for agent in self.there}, {"quick": {"start": float(self.rng.integers(9))}}

    def step(self, actions: dict[str, Any]) -> Any:
        self.time += 1
        turn = {"quick", "late"} if (self.time - 1) % 2 else {"quick", "slow", "late"}
        assert set(actions) == turn & set(self.there), (set(actions), turn, self.there)
        if self.time == 2:
            self.there = [*self.there, "late"]
        ended = [agent for agent in self.there if self.time > 3 and self.rng.integers(8) == 0]
        how = int(self.rng.integers(2))
        over = bool(len(ended) == len(self.there) or self.rng.integers(12) == 0)
        named = ["__all__"] if over else ended
        flags = [{"__all__": False} | dict.fromkeys(named, which == how) for which in (0, 1)]
        shown = self.there if over or self.time % 2 == 0 else [a for a in self.there if a != "slow" or a in ended]
        rewards = {agent: float(self.rng.normal()) + float(np.sum(actions.get(agent, 0))) for agent in self.there}
        infos = {agent: {"luck": float(self.rng.normal())} for agent in shown}
        seen = {agent: self._seen(agent) for agent in shown}
        self.there = [agent for agent in self.there if agent not in ended]
        return seen, rewards, *flags, infos
