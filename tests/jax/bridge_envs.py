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
    """Return the leaves of a nested observation or action. The keys of dicts are sorted."""
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in flatten(value[key])]
    if isinstance(value, tuple):
        return [leaf for part in value for leaf in flatten(part)]
    return [value]


class RandomEnv(gym.Env[Any, Any]):
    """An environment of random observations from any space, with episodes of 3 to 6 steps and some infos.

    All results depend on the seed, and rewards and scores also on the action. An episode ends with one flag or both.
    """

    def __init__(self, observation: str = "box", action: str = "discrete") -> None:
        self.observation_space = SPACES[observation]()
        self.action_space = SPACES[action]()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self.steps_left = int(self.np_random.integers(3, 7))
        self.end_bits = int(self.np_random.integers(1, 4))  # 1: termination, 2: truncation, 3: both
        return self.observation_space.sample(), {"start": float(self.np_random.random())}

    def step(self, action: Any) -> Any:
        assert action in self.action_space, action
        self.steps_left -= 1
        reward = float(self.np_random.random()) + sum(float(np.sum(leaf)) for leaf in flatten(action))
        done = self.steps_left == 0
        info: dict[str, Any] = {"left": self.steps_left}
        if self.steps_left % 2 == 0:
            info["score"] = reward * 2
            info["deep"] = {"pair": np.array([self.steps_left, reward])}
        terminated, truncated = done and bool(self.end_bits & 1), done and bool(self.end_bits & 2)
        return self.observation_space.sample(), reward, terminated, truncated, info


def make_fns(count: int, observation: str = "box", action: str = "discrete") -> list[Callable[[], RandomEnv]]:
    return [lambda: RandomEnv(observation, action) for _ in range(count)]


class FaultyEnv(RandomEnv):
    """An environment with a fault of :data:`FAULTS`, which occurs in the third step of the environment with index 1."""

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
    raise ZeroDivisionError("in step 3")


FAULTS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "pause": lambda: time.sleep(3.0),
    "hang": lambda: time.sleep(600.0),
}


def make_faulty_fns(fault: str, count: int = 2) -> list[Callable[[], FaultyEnv]]:
    return [lambda i=i: FaultyEnv(fault, i) for i in range(count)]


class CallLogVectorEnv(VectorEnv[Any, Any, Any]):
    """A vector environment that logs its calls. Observations and rewards equal the number of calls so far.

    Episodes end after ``episode_length`` steps, or never if it is 0.
    """

    def __init__(self, num_envs: int = 2, episode_length: int = 0) -> None:
        self.num_envs = num_envs
        self.episode_length = episode_length
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.single_action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.log: list[str] = []
        self.observations = np.zeros((num_envs, 1), np.float32)  # all calls return this array

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.log.append("R")
        self.observations[:] = len(self.log)
        return self.observations, {}

    def step(self, actions: Any) -> Any:
        self.log.append("S")
        self.observations[:] = len(self.log)
        is_last = bool(self.episode_length) and len(self.log) % (self.episode_length + 1) == 0
        terminated = np.full(self.num_envs, is_last)
        return self.observations, np.full(self.num_envs, float(len(self.log))), terminated, np.zeros_like(terminated), {}

    @property
    def calls(self) -> str:
        """The calls so far: ``"RSSR"`` means reset, step, step, reset."""
        return "".join(self.log)
