"""Environments of the process engine with observations that are arrays of JAX."""

from __future__ import annotations

from typing import Any

import gymnasium
import jax.numpy as jnp
import numpy as np
import pytest
from envs import open_engine


class BFloat16Env(gymnasium.Env[Any, Any]):
    """An environment that returns arrays of JAX in a dtype that their buffers cannot export."""

    observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.steps = 0
        return jnp.array([0, 0.5], jnp.bfloat16), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return jnp.array([self.steps, 0.5], jnp.bfloat16), 1.0, False, False, {}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_arrays_that_cannot_export_their_buffer_are_converted(num_workers: int) -> None:
    with open_engine([BFloat16Env] * 2, num_workers=num_workers, context="spawn") as envs:
        observations = [envs.reset()[0], *(envs.step([0, 0])[0] for _ in range(2))]
    assert [each.tolist() for each in observations] == [[[step, 0.5]] * 2 for step in range(3)]
