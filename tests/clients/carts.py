"""An environment of one number, written in JAX, whose gradient one can work out by hand."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np


class Cart:
    """Is moved by its action, pays the square of its place, and never ends; subclasses move, pay and end otherwise."""

    name = "Cart"
    differentiable = "reverse"
    max_episode_steps: int | None = None
    single_observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    single_action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def init(self, key: Any) -> Any:
        place = jax.random.uniform(key)
        return place, jnp.stack([place, place])

    def step(self, place: Any, action: Any, key: Any) -> Any:
        place = self.moved(place, action[0])
        return place, jnp.stack([place, place**2]), self.paid(place), self.over(place), False, {}

    def moved(self, place: Any, push: Any) -> Any:
        return 0.99 * place + 0.1 * push

    def paid(self, place: Any) -> Any:
        return place**2

    def over(self, place: Any) -> Any:
        return False
