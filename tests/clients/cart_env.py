"""An environment in JAX with one number as its state, so that its gradient is easy to calculate."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np


class PositionEnv:
    """An environment with a position that actions move. The reward is the square of the position. Episodes never end.

    Subclasses override ``move``, ``reward`` and ``is_over``.
    """

    name = "PositionEnv"
    differentiable = "reverse"
    max_episode_steps: int | None = None
    single_observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    single_action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def init(self, key: Any) -> Any:
        position = jax.random.uniform(key)
        return position, jnp.stack([position, position])

    def step(self, position: Any, action: Any, key: Any) -> Any:
        position = self.move(position, action[0])
        return position, jnp.stack([position, position**2]), self.reward(position), self.is_over(position), False, {}

    def move(self, position: Any, push: Any) -> Any:
        return 0.99 * position + 0.1 * push

    def reward(self, position: Any) -> Any:
        return position**2

    def is_over(self, position: Any) -> Any:
        return False
