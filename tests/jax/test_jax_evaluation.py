"""``vecenv.evaluate`` over environments that are JAX functions, and of policies that are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from contract.jax_env import Walk

import vecenv
from vecenv.backends import JaxVectorEnv
from vecenv.jax import FunctionalVectorEnv


@jax.jit
def tired(observations: Any) -> Any:
    return jnp.tanh(observations[:, :1]) * 0.5


@pytest.mark.parametrize("to", ["numpy", "jax"])
def test_results_are_the_same_for_every_number_of_rows(to: str) -> None:
    found = []
    for num_envs in (1, 3):
        envs = JaxVectorEnv(FunctionalVectorEnv(Walk(0), num_envs), to=to)
        results = vecenv.evaluate(envs, tired, 5, seed=3, batch="padded", arrays="jax")
        found.append([(each.index, each.seed, each.episode_return, each.length) for each in results])
        envs.close()
    assert found[0] == found[1]
    assert all(each[3] > 1 for each in found[0])
