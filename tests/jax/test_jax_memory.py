"""JAX arrays over the memory of observations keep their values while environments step on."""

from __future__ import annotations

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
from envs import SpaceEnv
from gymnasium.spaces import Box

import vecenv

IMAGE = Box(0, 255, (160, 120), np.uint8)


def test_jax_arrays_over_lent_observations_keep_their_values() -> None:
    envs = vecenv.AsyncVectorEnv([functools.partial(SpaceEnv, IMAGE)] * 4, num_workers=2, context="forkserver")
    envs.reset(seed=1)
    held: list[tuple[jax.Array, np.ndarray]] = []
    for step in range(60):
        observations = envs.step(envs.action_space.sample())[0]
        array = jnp.asarray(observations)  # JAX decides whether it copies
        held = [*held[-(step % 5) :], (array, observations.copy())]
        del observations, array
        gc.collect()
        for lent, expected in held:
            np.testing.assert_array_equal(lent, expected)
    envs.close()
