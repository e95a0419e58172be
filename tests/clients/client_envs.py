"""Environments with the features that client libraries read. Workers can import this module."""

from __future__ import annotations

import functools
import os
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


def assert_equal(ours: Any, theirs: Any, *, types: bool = True) -> None:
    """Assert that structure, values, dtypes of arrays and, by default, types of plain numbers are equal."""
    if isinstance(theirs, dict):
        assert isinstance(ours, dict)
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_equal(ours[key], theirs[key], types=types)
    elif isinstance(theirs, np.ndarray) and theirs.dtype != object:
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    elif isinstance(theirs, np.ndarray | list | tuple):
        assert len(ours) == len(theirs)
        for our_part, their_part in zip(ours, theirs, strict=True):
            assert_equal(our_part, their_part, types=types)
    else:
        assert ours == theirs
        assert not types or isinstance(ours, type(theirs)) or isinstance(theirs, np.generic)


class FullEnv(gym.Env[Any, Any]):
    """An environment with random episode lengths, every combination of flags, and infos with values of many kinds.

    Args:
        nested: If true, observations are dicts, else arrays.
        render_mode: ``"rgb_array"`` or None.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012

    def __init__(self, nested: bool = True, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        box = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.observation_space = spaces.Dict({"position": box, "code": spaces.Discrete(1000)}) if nested else box
        self.action_space = spaces.Discrete(4)
        self.nested = nested
        self.level = 0
        self.steps = 0
        self.episodes = 0

    def _observation(self) -> Any:
        position = self.np_random.normal(size=3).astype(np.float32)
        return {"position": position, "code": int(self.np_random.integers(1000))} if self.nested else position

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        self.episodes += 1
        return self._observation(), {"episode_number": self.episodes, "start": (options or {}).get("start", 0)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        number = self.np_random.integers(12)
        info: dict[str, Any] = {"steps": self.steps, "won": bool(number == 3), "distance": float(number) / 7}
        if number % 2:
            info["note"] = f"step {self.steps}"
            info["inner"] = {"velocity": np.full(2, number, np.float32)}
        if number == 4:
            info = {}
        terminated, truncated = number in (0, 2), number in (1, 2)
        return self._observation(), float(action) + self.level, bool(terminated), bool(truncated), info

    def render(self) -> Any:
        return np.full((4, 6, 3), self.steps % 256, np.uint8)

    def add(self, number: int, *, twice: bool = False) -> int:
        """Return the sum of the level and a number, or twice the number. Tests call this method in workers."""
        return self.level + number * (2 if twice else 1)

    def fail(self) -> None:
        raise ValueError("intended failure")


class NoOpWrapper(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper that changes nothing."""


def make_full_env_fns(
    count: int, *, nested: bool = True, wrapped: bool = False, render_mode: str | None = None
) -> list[Any]:
    """Return ``count`` functions that build a :class:`FullEnv`."""
    make = functools.partial(make_full_env, nested, wrapped, render_mode)
    return [make] * count


def make_full_env(nested: bool, wrapped: bool, render_mode: str | None) -> gym.Env[Any, Any]:
    env: gym.Env[Any, Any] = FullEnv(nested, render_mode)
    return NoOpWrapper(env) if wrapped else env


def make_cartpole(limit: int = 500) -> gym.Env[Any, Any]:
    """Build a CartPole with a time limit."""
    return gym.make("CartPole-v1", max_episode_steps=limit)


class TargetGame:
    """A game of ten steps with two agents, which rewards actions equal to the observed side. ``pid`` is its process's id."""

    possible_agents = ("left", "right")
    metadata: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.agents: list[str] = []
        self.pid = os.getpid()
        self.rng = np.random.default_rng()

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return spaces.Box(-1, 1, (1,), np.float32)

    def action_space(self, agent: str) -> gym.Space[Any]:
        return spaces.Discrete(2)

    def _observe(self) -> Any:
        self.side = {agent: int(self.rng.integers(2)) for agent in self.possible_agents}
        return {agent: np.array([2 * side - 1], np.float32) for agent, side in self.side.items()}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents, self.time = list(self.possible_agents), 0
        return self._observe(), {}

    def step(self, actions: dict[str, Any]) -> Any:
        self.time += 1
        rewards = {agent: float(actions[agent] == side) for agent, side in self.side.items()}
        over = self.time == 10
        self.agents = [] if over else self.agents
        terminations = dict.fromkeys(self.possible_agents, False)
        truncations = dict.fromkeys(self.possible_agents, over)
        return self._observe(), rewards, terminations, truncations, {}

    def close(self) -> None:
        pass
