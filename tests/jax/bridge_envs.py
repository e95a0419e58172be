"""Environments for the tests of the bridge. Worker processes import this, so it must not import JAX."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

SPACES: dict[str, Callable[[], spaces.Space[Any]]] = {
    "box": lambda: spaces.Box(-2.0, 2.0, (3,), np.float32),
    "image": lambda: spaces.Box(0, 255, (4, 4, 2), np.uint8),
    "discrete": lambda: spaces.Discrete(5, start=-2),
    "multidiscrete": lambda: spaces.MultiDiscrete([3, 4, 5]),
    "multibinary": lambda: spaces.MultiBinary(4),
    "dict": lambda: spaces.Dict({"z": spaces.Discrete(3), "a": spaces.Box(-1.0, 1.0, (2,), np.float32)}),
    "tuple": lambda: spaces.Tuple(
        (spaces.MultiBinary(2), spaces.Dict({"deep": spaces.Box(0, 9, (1,), np.int32)}), spaces.Discrete(4))
    ),
}


def flatten(value: Any) -> list[Any]:
    """Return the leaves of a nested observation or action, with dicts in the order of their sorted keys."""
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in flatten(value[key])]
    if isinstance(value, tuple):
        return [leaf for part in value for leaf in flatten(part)]
    return [value]


class RandomEnv(gym.Env[Any, Any]):
    """An environment with random observations of any space, episodes of 3 to 6 steps, and occasional infos.

    Everything depends on the seed, and rewards also on the action. An episode ends with termination, truncation, or both.
    """

    def __init__(self, observation: str = "box", action: str = "discrete") -> None:
        self.observation_space = SPACES[observation]()
        self.action_space = SPACES[action]()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self.left = int(self.np_random.integers(3, 7))
        self.ending = int(self.np_random.integers(1, 4))
        return self.observation_space.sample(), {"start": float(self.np_random.random())}

    def step(self, action: Any) -> Any:
        assert action in self.action_space, action
        self.left -= 1
        reward = float(self.np_random.random()) + sum(float(np.sum(leaf)) for leaf in flatten(action))
        over = self.left == 0
        info: dict[str, Any] = {"left": self.left}
        if self.left % 2 == 0:
            info["score"] = reward * 2
            info["deep"] = {"pair": np.array([self.left, reward])}
        terminated, truncated = over and bool(self.ending & 1), over and bool(self.ending & 2)
        return self.observation_space.sample(), reward, terminated, truncated, info


def make_fns(count: int, observation: str = "box", action: str = "discrete") -> list[Callable[[], RandomEnv]]:
    return [lambda: RandomEnv(observation, action) for _ in range(count)]


class FaultyEnv(RandomEnv):
    """An environment that fails in its third step if ``index`` is 1."""

    def __init__(self, fault: str, index: int) -> None:
        super().__init__()
        self.fault = fault if index == 1 else ""
        self.steps = 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 3:
            FAULTS.get(self.fault, lambda: None)()
        return super().step(action)


def _raise() -> None:
    raise ZeroDivisionError("three")


FAULTS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "pause": lambda: time.sleep(3.0),
    "hang": lambda: time.sleep(600.0),
}


def make_faulty_fns(fault: str, count: int = 2) -> list[Callable[[], FaultyEnv]]:
    return [lambda i=i: FaultyEnv(fault, i) for i in range(count)]


class CallLogVectorEnv(VectorEnv[Any, Any, Any]):
    """A vector environment that logs its calls; observations contain the number of calls.

    Episodes end after ``episode`` steps; with 0 they do not end.
    """

    def __init__(self, num_envs: int = 2, size: int = 1, episode: int = 0) -> None:
        self.num_envs = num_envs
        self.episode = episode
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.single_action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.log: list[str] = []
        self.observations = np.zeros((num_envs, size), np.float32)  # one buffer, returned every time

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.log.append("R")
        self.observations[:] = len(self.log)
        return self.observations, {}

    def step(self, actions: Any) -> Any:
        self.log.append("S")
        self.observations[:] = len(self.log)
        over = np.full(self.num_envs, bool(self.episode) and len(self.log) % (self.episode + 1) == 0)
        return self.observations, np.full(self.num_envs, float(len(self.log))), over, np.zeros_like(over), {}

    @property
    def calls(self) -> str:
        """The calls since construction, for example ``"RSSR"`` for reset, step, step, reset."""
        return "".join(self.log)
