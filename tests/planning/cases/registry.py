"""The table of cases: name, expected verdict, and a function that returns the functions that build the environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

SHARES, CLEAN, CHANGES, UNKNOWN = "shares state", "independent", "independent, with changes", "cannot tell"
SAME_OBJECT = "the same object"

EnvFns = Sequence[Callable[[], Any]]
CASES: dict[str, tuple[Any, Callable[[], EnvFns]]] = {}


def case(expected: Any) -> Callable[[Callable[[], EnvFns]], Callable[[], EnvFns]]:
    """Register the decorated function, by its name, as a case with this expected verdict."""

    def register(function: Callable[[], EnvFns]) -> Callable[[], EnvFns]:
        CASES[function.__name__] = expected, function
        return function

    return register


class BaseEnv(gym.Env):
    """An environment that returns the number of steps in the episode as observation."""

    observation_space = gym.spaces.Box(-1e9, 1e9, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)
    episode_length = 10**9

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(self.observation_space.shape, self.observation_space.dtype), {}

    def step(self, action):
        self.t += 1
        return self.observe(), 1.0, self.t >= self.episode_length, False, {}

    def observe(self):
        return np.array([float(self.t)])


class BulletBallEnv(BaseEnv):
    """An environment with a falling ball, which the PyBullet client ``p`` simulates."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        p = self.p
        p.resetSimulation()
        p.setGravity(0, 0, -10)
        self.ball = p.createMultiBody(1.0, p.createCollisionShape(p.GEOM_SPHERE, radius=0.1), basePosition=[0, 0, 10])
        return np.array([10.0]), {}

    def observe(self):
        self.p.stepSimulation()
        return np.array([self.p.getBasePositionAndOrientation(self.ball)[0][2]])
