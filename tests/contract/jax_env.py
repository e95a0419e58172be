"""A JAX environment that can be slow. This module imports JAX, so only functions that need JAX import it."""

from __future__ import annotations

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np


class Walk:
    """An environment with a position that actions move.

    Args:
        work: The number of matrix products that make a step slow.
    """

    name = "Walk"
    differentiable = "none"
    max_episode_steps: int | None = 100
    single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    single_action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, work: int = 0) -> None:
        self.work = work

    def init(self, key: Any) -> Any:
        position = jax.random.uniform(key, (2,))
        return position, position

    def step(self, state: Any, action: Any, key: Any) -> Any:
        position = state + action[0]
        if self.work:
            matrix = jnp.ones((300, 300)) * position[0]
            position += 0 * jax.lax.fori_loop(0, self.work, lambda _, m: jnp.tanh(m @ m), matrix)[0, :2]
        return position, position, position[0], False, False, {"position": position[0]}
