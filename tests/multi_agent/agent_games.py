"""Small parallel environments with agents that join and leave, or that have different spaces or action masks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from gymnasium import spaces

from vecenv.multi_agent import MultiAgentVecEnv


@contextmanager
def open_games(games: Any, **options: Any) -> Iterator[MultiAgentVecEnv]:
    """Yield a vector environment of these games, after a reset with seed 0."""
    with MultiAgentVecEnv(games, **options) as envs:
        envs.reset(seed=0)
        yield envs


class RandomGame:
    """A game with random births, deaths, observations and rewards, which depend only on the seed and the actions.

    Args:
        count: The number of agents.
        births: Agents other than the first may join in one of the first two steps instead of at the reset.
        end_together: All agents end at the same time.
        different_spaces: Every second agent has spaces that differ from those of the first.
        masks: Agents have action masks, in the observation (``"obs"``) or the info (``"info"``); a forbidden action raises.
        infos: Agents and the environment have infos.
        length: Each agent lives for fewer steps than this if there are no births.
        strict: ``step`` raises unless exactly the live agents have actions.
    """

    def __init__(
        self,
        count: int = 3,
        *,
        births: bool = False,
        end_together: bool = False,
        different_spaces: bool = False,
        masks: str | None = None,
        infos: bool = False,
        length: int = 6,
        strict: bool = True,
    ) -> None:
        self.metadata = {"name": "random_game_v0", "render_modes": ["rgb_array"]}
        self.render_mode = "rgb_array"
        self.possible_agents = [f"agent_{index}" for index in range(count)]
        self.agents: list[str] = []
        self.births, self.end_together, self.masks = births, end_together, masks
        self.infos, self.length, self.strict = infos, length, strict
        self.closed = False
        self.rng = np.random.default_rng()
        self._observation_spaces = {
            agent: self._make_observation_space(index, different_spaces) for index, agent in enumerate(self.possible_agents)
        }
        self._action_spaces = {
            agent: spaces.Box(-1, 1, (2,), np.float32) if different_spaces and index % 2 else spaces.Discrete(4)
            for index, agent in enumerate(self.possible_agents)
        }
        self.state_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def _make_observation_space(self, index: int, different_spaces: bool) -> spaces.Space[Any]:
        space: spaces.Space[Any] = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        if different_spaces and index % 2:
            space = spaces.Dict({"picture": spaces.Box(0, 255, (2, 2), np.uint8), "place": spaces.Discrete(9)})
        if self.masks == "obs":
            return spaces.Dict({"observation": space, "action_mask": spaces.Box(0, 1, (4,), np.int8)})
        return space

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self._observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self._action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        count = len(self.possible_agents)
        self.time = 0
        self.birth_times = np.zeros(count, int)
        if self.births:
            self.birth_times[1:] = self.rng.integers(0, 3, count - 1)
        self.death_times = self.birth_times + self.rng.integers(1, self.length, count)
        if self.end_together:
            self.death_times[:] = self.death_times.max()
        if self.births:  # the first agent lives until all others are born, because an episode without agents ends
            self.death_times[0] = max(self.death_times[0], self.birth_times.max() + 1)
        self.end_kinds = self.rng.integers(0, 3, count)  # 0: termination, 1: truncation, 2: both
        self.agents = [agent for index, agent in enumerate(self.possible_agents) if self.birth_times[index] == 0]
        self.options = options
        return self._observe(self.agents), self._infos(self.agents)

    def step(self, actions: dict[str, Any]) -> Any:
        if self.strict and set(actions) != set(self.agents):
            raise ValueError(f"got actions of {sorted(actions)}, but the live agents are {sorted(self.agents)}")
        self._check_masks(actions)
        self.time += 1
        acting = list(self.agents)
        get_index = self.possible_agents.index
        ended = [agent for agent in acting if self.death_times[get_index(agent)] <= self.time]
        newborn = [agent for index, agent in enumerate(self.possible_agents) if self.birth_times[index] == self.time]
        reported = acting + newborn
        rewards = {agent: float(self.rng.normal()) + float(np.sum(actions.get(agent, 0))) for agent in reported}
        terminations = {agent: agent in ended and self.end_kinds[get_index(agent)] != 1 for agent in reported}
        truncations = {agent: agent in ended and self.end_kinds[get_index(agent)] != 0 for agent in reported}
        self.agents = [agent for agent in reported if agent not in ended]
        return self._observe(reported), rewards, terminations, truncations, self._infos(reported)

    def _check_masks(self, actions: dict[str, Any]) -> None:
        for agent, action in actions.items():
            if self.masks and not self.allowed[agent][int(action)]:
                raise ValueError(f"{agent}: action {action} is masked")

    def _observe(self, agents: list[str]) -> dict[str, Any]:
        self.allowed = {}
        observations = {}
        for agent in agents:
            space = self._observation_spaces[agent]
            inner = space["observation"] if self.masks == "obs" else space
            if isinstance(inner, spaces.Dict):
                value: Any = {
                    "picture": self.rng.integers(0, 256, (2, 2), dtype=np.uint8), "place": np.int64(self.rng.integers(9)),
                }  # fmt: skip
            else:
                value = self.rng.normal(size=3).astype(np.float32)
            if self.masks:
                self.allowed[agent] = self.rng.random(4) < 0.5
                self.allowed[agent][self.rng.integers(4)] = True
            if self.masks == "obs":
                value = {"observation": value, "action_mask": self.allowed[agent].astype(np.int8)}
            observations[agent] = value
        return observations

    def _infos(self, agents: list[str]) -> dict[str, Any]:
        infos: dict[str, Any] = {agent: {} for agent in agents}
        if self.masks == "info":
            for agent in agents:
                infos[agent]["action_mask"] = self.allowed[agent].astype(np.int8)
        if self.infos:
            for agent in agents:
                infos[agent]["time"] = self.time
                infos[agent]["vector"] = np.full(2, float(self.time))
                if agent == "agent_1":
                    infos[agent]["word"] = f"t{self.time}"
            infos["common"] = {"score": self.time * 0.5}
            infos["weather"] = self.time % 2
        return infos

    def state(self) -> Any:
        return np.array([self.time, len(self.agents)], np.float64)

    def render(self) -> Any:
        return np.full((4, 6, 3), self.time, np.uint8)

    def close(self) -> None:
        self.closed = True


class ScriptedGame:
    """A game with fixed births and deaths. Observations are 100 plus the time, and rewards are 1.

    Args:
        lives: Agent -> (time of birth, time of death).
        truncated: Agents that are truncated instead of terminated.
        without_last_observation: Agents that have no observation in their last step.
        observation_size: The length of an observation.
    """

    def __init__(
        self,
        lives: dict[Any, tuple[int, int]] | None = None,
        truncated: tuple[Any, ...] = (),
        without_last_observation: tuple[Any, ...] = (),
        observation_size: int = 2,
    ) -> None:
        self.lives = lives or {"a": (0, 2), "b": (0, 4), "c": (0, 6)}
        self.truncated, self.without_last_observation = truncated, without_last_observation
        self.observation_size = observation_size
        self.possible_agents = list(self.lives)
        self.agents: list[Any] = []
        self.metadata = {"name": "scripted_v0"}
        self.render_mode = None
        self.seeds: list[Any] = []
        self.actions: list[Any] = []
        self.speed = 1.0

    def observation_space(self, agent: Any) -> spaces.Space[Any]:
        return spaces.Box(-1000, 1000, (self.observation_size,), np.float32)

    def action_space(self, agent: Any) -> spaces.Space[Any]:
        return spaces.Discrete(5)

    def _observe(self, agents: list[Any]) -> dict[Any, Any]:
        return {agent: np.full(self.observation_size, 100 + self.time, np.float32) for agent in agents}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.seeds.append(seed)
        self.time = 0
        self.agents = [agent for agent, (born, _) in self.lives.items() if born == 0]
        return self._observe(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions: dict[Any, Any]) -> Any:
        self.actions.append(dict(actions))
        self.time += 1
        newborn = [agent for agent, (born, _) in self.lives.items() if born == self.time]
        reported = [*self.agents, *newborn]
        ends = {agent: self.lives[agent][1] == self.time for agent in reported}
        self.agents = [agent for agent in reported if not ends[agent]]
        return (
            self._observe([agent for agent in reported if not (ends[agent] and agent in self.without_last_observation)]),
            dict.fromkeys(reported, 1.0),
            {agent: ends[agent] and agent not in self.truncated for agent in reported},
            {agent: ends[agent] and agent in self.truncated for agent in reported},
            {agent: {} for agent in reported},
        )

    def close(self) -> None:
        pass


class FaultyGame(ScriptedGame):
    """A game with the given fault in its third step, or in its fourth (``"revival"``)."""

    def __init__(self, fault: str) -> None:
        super().__init__({"a": (0, 9), "b": (0, 9)})
        self.fault = fault

    def step(self, actions: dict[Any, Any]) -> Any:
        observations, rewards, terminations, truncations, infos = super().step(actions)
        if self.time == 3:
            match self.fault:
                case "unknown agent":
                    self.agents = [*self.agents, "stranger"]
                case "unknown reward":
                    rewards["stranger"] = 1.0
                case "wrong shape":
                    observations["b"] = np.zeros(7, np.float32)
                case "no observation":
                    del observations["b"]
                case "no reward" | "no reward at its end":
                    del rewards["b"]
                    terminations["b"] = self.fault == "no reward at its end"
                    self.agents = ["a"] if terminations["b"] else self.agents
                case "text as reward":
                    rewards["b"] = "a lot"
                case "raises":
                    raise ValueError("out of luck")
                case "four values":
                    return observations, rewards, terminations, infos
                case "revival":
                    terminations["a"] = True
                    self.agents = ["b"]
        if self.time == 4 and self.fault == "revival":
            observations["a"] = np.zeros(2, np.float32)
            self.agents = ["a", "b"]
        return observations, rewards, terminations, truncations, infos


class AllFlagGame(ScriptedGame):
    """A game that ends in its third step by setting ``"__all__"``, after agent ``a`` has died and before ``d`` is born.

    Args:
        flags: The dicts in the third step with a true ``"__all__"``: ``"terminations"``, ``"truncations"`` or both.
        last_values: The third step has observations and rewards.
        removes_agents: ``agents`` is empty after the third step.
    """

    def __init__(self, flags: tuple[str, ...], last_values: bool = True, removes_agents: bool = True) -> None:
        super().__init__({"a": (0, 1), "b": (0, 9), "c": (0, 9), "d": (8, 9)})
        self.flags, self.last_values, self.removes_agents = flags, last_values, removes_agents

    def step(self, actions: dict[Any, Any]) -> Any:
        observations, rewards, terminations, truncations, infos = super().step(actions)
        is_last = self.time == 3
        terminations["__all__"] = is_last and "terminations" in self.flags
        truncations["__all__"] = is_last and "truncations" in self.flags
        if is_last and self.removes_agents:
            self.agents = []
        if is_last and not self.last_values:
            observations, rewards = {}, {}
        return observations, rewards, terminations, truncations, infos
