"""``vecenv.evaluate`` over environments that are JAX functions, and of policies that are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.jax_env import Walk
from gymnasium.vector import AutoresetMode

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


@pytest.mark.long
@pytest.mark.parametrize(
    ("to", "mode"), [("numpy", AutoresetMode.NEXT_STEP), ("jax", AutoresetMode.SAME_STEP), ("jax", AutoresetMode.DISABLED)]
)
def test_an_episode_goes_on_from_a_snapshot(to: str, mode: AutoresetMode) -> None:
    """Two steps of each episode are made before; the rest is what is missing of the whole."""
    source = JaxVectorEnv(FunctionalVectorEnv(Walk(0), 5, autoreset_mode=mode), to=to)
    whole = vecenv.evaluate(source, tired, 5, seed=3, batch="padded", arrays="jax")
    observations, _ = source.reset(seed=3)
    before = np.zeros(5)
    for _ in range(2):
        observations, rewards, *over, _ = source.step(np.asarray(tired(observations)))
        before += np.asarray(rewards)
        assert not np.any(over), "the walks are too short for this"
    snapshots = source.save()
    source.close()
    for num_envs in (1, 3):
        envs = JaxVectorEnv(FunctionalVectorEnv(Walk(0), num_envs, autoreset_mode=mode), to=to)
        episodes = [*snapshots, vecenv.Episode(seed=whole[1].seed)]
        *rest, again = vecenv.evaluate(envs, tired, episodes, seed=3, batch="padded", arrays="jax")
        assert [each.length + 2 for each in rest] == [each.length for each in whole]
        assert [each.seed for each in rest] == [None] * 5
        assert np.allclose([each.episode_return for each in rest] + before, [each.episode_return for each in whole])
        assert (again.episode_return, again.length) == (whole[1].episode_return, whole[1].length)
        envs.close()
