"""An environment of one number, written in JAX, with a gradient that can be computed by hand."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np


class Cart:
    """An environment that its action moves; the reward is the square of its place, and it never ends. Subclasses differ."""

    name = "Cart"
    differentiable = "reverse"
    max_episode_steps: int | None = None
    single_observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    single_action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def init(self, key: Any) -> Any:
        place = jax.random.uniform(key)
        return place, jnp.stack([place, place])

    def step(self, place: Any, action: Any, key: Any) -> Any:
        place = self.move(place, action[0])
        return place, jnp.stack([place, place**2]), self.reward(place), self.is_over(place), False, {}

    def move(self, place: Any, push: Any) -> Any:
        return 0.99 * place + 0.1 * push

    def reward(self, place: Any) -> Any:
        return place**2

    def is_over(self, place: Any) -> Any:
        return False
