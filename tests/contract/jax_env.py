"""A JAX environment that can be slow. Only modules that need JAX import this."""

from __future__ import annotations

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np


class Walk:
    """A random position, which actions move.

    Args:
        work: The number of additional matrix products per step.
    """

    name = "Walk"
    differentiable = "none"
    max_episode_steps: int | None = 100
    single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    single_action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, work: int = 0) -> None:
        self.work = work

    def init(self, key: Any) -> Any:
        place = jax.random.uniform(key, (2,))
        return place, place

    def step(self, state: Any, action: Any, key: Any) -> Any:
        place = state + action[0]
        if self.work:
            matrix = jnp.ones((300, 300)) * place[0]
            place += 0 * jax.lax.fori_loop(0, self.work, lambda _, m: jnp.tanh(m @ m), matrix)[0, :2]
        return place, place, place[0], False, False, {"place": place[0]}
