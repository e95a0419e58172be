"""Small parallel environments in which agents come, go, differ and mask, all from the seed of a reset."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from gymnasium import spaces

from vecenv.multi_agent import MultiAgentVecEnv


@contextmanager
def playing(games: Any, **options: Any) -> Iterator[MultiAgentVecEnv]:
    """A vector environment of these games that was reset with seed 0."""
    with MultiAgentVecEnv(games, **options) as envs:
        envs.reset(seed=0)
        yield envs


class RandomGame:
    """Agents whose births, deaths, observations, rewards and infos are drawn from the seed.

    Args:
        count: Number of agents.
        births: The others of the first are born within the first steps, instead of all being there at once.
        together: Everybody ends at the same time.
        differ: Every second agent has other spaces.
        masks: ``"obs"`` or ``"info"``: there are action masks; an agent that takes a forbidden action raises.
        infos: Agents have infos, and so has the environment.
        length: Nobody lives longer.
        strict: Actions of agents that are not there raise.
    """

    def __init__(
        self,
        count: int = 3,
        *,
        births: bool = False,
        together: bool = False,
        differ: bool = False,
        masks: str | None = None,
        infos: bool = False,
        length: int = 6,
        strict: bool = True,
    ) -> None:
        self.metadata = {"name": "random_game_v0", "render_modes": ["rgb_array"]}
        self.render_mode = "rgb_array"
        self.possible_agents = [f"agent_{index}" for index in range(count)]
        self.agents: list[str] = []
        self.births, self.together, self.masks = births, together, masks
        self.infos, self.length, self.strict = infos, length, strict
        self.closed = False
        self.seen: list[Any] = []
        self.rng = np.random.default_rng()
        self._observed = {agent: self._space(index, differ) for index, agent in enumerate(self.possible_agents)}
        self._acted = {
            agent: spaces.Box(-1, 1, (2,), np.float32) if differ and index % 2 else spaces.Discrete(4)
            for index, agent in enumerate(self.possible_agents)
        }
        self.state_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def _space(self, index: int, differ: bool) -> spaces.Space[Any]:
        space: spaces.Space[Any] = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        if differ and index % 2:
            space = spaces.Dict({"picture": spaces.Box(0, 255, (2, 2), np.uint8), "place": spaces.Discrete(9)})
        if self.masks == "obs":
            return spaces.Dict({"observation": space, "action_mask": spaces.Box(0, 1, (4,), np.int8)})
        return space

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self._observed[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self._acted[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        count = len(self.possible_agents)
        self.time = 0
        self.born = np.zeros(count, int)
        if self.births:
            self.born[1:] = self.rng.integers(0, 3, count - 1)
        self.dies = self.born + self.rng.integers(1, self.length, count)
        if self.together:
            self.dies[:] = self.dies.max()
        if self.births:  # somebody is there all the time
            self.dies[0] = max(self.dies[0], self.born.max() + 1)
        self.how = self.rng.integers(0, 3, count)
        self.agents = [agent for index, agent in enumerate(self.possible_agents) if self.born[index] == 0]
        self.options = options
        return self._look(self.agents), self._notes(self.agents)

    def step(self, actions: dict[str, Any]) -> Any:
        if self.strict and set(actions) != set(self.agents):
            raise ValueError(f"actions of {sorted(actions)}, and there are {sorted(self.agents)}")
        self._check_masks(actions)
        self.time += 1
        before = list(self.agents)
        index_of = self.possible_agents.index
        ends = [agent for agent in before if self.dies[index_of(agent)] <= self.time]
        newborn = [agent for index, agent in enumerate(self.possible_agents) if self.born[index] == self.time]
        told = before + newborn
        rewards = {a: float(self.rng.normal()) + float(np.sum(actions.get(a, 0))) for a in told}
        terminations = {agent: agent in ends and self.how[index_of(agent)] != 1 for agent in told}
        truncations = {agent: agent in ends and self.how[index_of(agent)] != 0 for agent in told}
        self.agents = [agent for agent in told if agent not in ends]
        return self._look(told), rewards, terminations, truncations, self._notes(told)

    def _check_masks(self, actions: dict[str, Any]) -> None:
        for agent, action in actions.items():
            if self.masks and not self.allowed[agent][int(action)]:
                raise ValueError(f"{agent} may not do {action}")

    def _look(self, agents: list[str]) -> dict[str, Any]:
        self.allowed = {}
        seen = {}
        for agent in agents:
            space = self._observed[agent]
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
            seen[agent] = value
        return seen

    def _notes(self, agents: list[str]) -> dict[str, Any]:
        notes: dict[str, Any] = {agent: {} for agent in agents}
        if self.masks == "info":
            for agent in agents:
                notes[agent]["action_mask"] = self.allowed[agent].astype(np.int8)
        if self.infos:
            for agent in agents:
                notes[agent]["time"] = self.time
                notes[agent]["vector"] = np.full(2, float(self.time))
                if agent == "agent_1":
                    notes[agent]["word"] = f"t{self.time}"
            notes["common"] = {"score": self.time * 0.5}
            notes["weather"] = self.time % 2
        return notes

    def state(self) -> Any:
        return np.array([self.time, len(self.agents)], np.float64)

    def render(self) -> Any:
        return np.full((4, 6, 3), self.time, np.uint8)

    def close(self) -> None:
        self.closed = True


class Scripted:
    """One agent's observation is the time; lives and births are given; episodes are all alike.

    Args:
        lives: Agent -> (born at, dies at); reward is 1 a step.
        truncated: Who is truncated instead of terminated.
        silent: Whose last observation is left out.
    """

    def __init__(
        self,
        lives: dict[Any, tuple[int, int]] | None = None,
        truncated: tuple[Any, ...] = (),
        silent: tuple[Any, ...] = (),
        size: int = 2,
    ) -> None:
        self.lives = lives or {"a": (0, 2), "b": (0, 4), "c": (0, 6)}
        self.truncated, self.silent, self.size = truncated, silent, size
        self.possible_agents = list(self.lives)
        self.agents: list[Any] = []
        self.metadata = {"name": "scripted_v0"}
        self.render_mode = None
        self.seeds: list[Any] = []
        self.actions: list[Any] = []
        self.speed = 1.0

    def observation_space(self, agent: Any) -> spaces.Space[Any]:
        return spaces.Box(-1000, 1000, (self.size,), np.float32)

    def action_space(self, agent: Any) -> spaces.Space[Any]:
        return spaces.Discrete(5)

    def _look(self, agents: list[Any]) -> dict[Any, Any]:
        return {agent: np.full(self.size, 100 + self.time, np.float32) for agent in agents}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.seeds.append(seed)
        self.time = 0
        self.agents = [agent for agent, (born, _) in self.lives.items() if born == 0]
        return self._look(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions: dict[Any, Any]) -> Any:
        self.actions.append(dict(actions))
        self.time += 1
        newborn = [agent for agent, (born, _) in self.lives.items() if born == self.time]
        told = [*self.agents, *newborn]
        ends = {agent: self.lives[agent][1] == self.time for agent in told}
        self.agents = [agent for agent in told if not ends[agent]]
        return (
            self._look([agent for agent in told if not (ends[agent] and agent in self.silent)]),
            dict.fromkeys(told, 1.0),
            {agent: ends[agent] and agent not in self.truncated for agent in told},
            {agent: ends[agent] and agent in self.truncated for agent in told},
            {agent: {} for agent in told},
        )

    def close(self) -> None:
        pass


class Broken(Scripted):
    """Does something wrong at its third step, where ``fault`` says what."""

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
                case "blind":
                    del observations["b"]
                case "unpaid" | "unpaid at its end":
                    del rewards["b"]
                    terminations["b"] = self.fault == "unpaid at its end"
                    self.agents = ["a"] if terminations["b"] else self.agents
                case "reward":
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


class ForAll(Scripted):
    """Says in its third step that it is over for ``"__all__"``, by the flags that ``which`` names, and nothing else of it.

    Agent ``a`` dies in the first step, ``d`` is never born in time; ``last`` says whether the last step has observations and
    rewards, and ``leaves`` whether nobody is in ``agents`` afterwards.
    """

    def __init__(self, which: tuple[str, ...], last: bool = True, leaves: bool = True) -> None:
        super().__init__({"a": (0, 1), "b": (0, 9), "c": (0, 9), "d": (8, 9)})
        self.which, self.last, self.leaves = which, last, leaves

    def step(self, actions: dict[Any, Any]) -> Any:
        observations, rewards, terminations, truncations, infos = super().step(actions)
        over = self.time == 3
        terminations["__all__"] = over and "terminations" in self.which
        truncations["__all__"] = over and "truncations" in self.which
        if over and self.leaves:
            self.agents = []
        if over and not self.last:
            observations, rewards = {}, {}
        return observations, rewards, terminations, truncations, infos
