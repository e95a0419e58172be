"""Dtypes on the way: JAX's 32-bit and 64-bit modes, and what becomes of float64 and int64."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bridge_envs import tracks
from gymnasium.vector import SyncVectorEnv
from jax.random import key as new_key

import vecenv.jax as vj


class Wide(gym.Env[Any, Any]):
    """float64 and int64 through and through."""

    observation_space = gym.spaces.Dict(
        {"x": gym.spaces.Box(-np.inf, np.inf, (2,), np.float64), "n": gym.spaces.Box(0, 2**40, (1,), np.int64)}
    )
    action_space = gym.spaces.Box(-1, 1, (2,), np.float64)

    def __init__(self, number: int = 7) -> None:
        self.number = number

    def _observation(self) -> Any:
        return {"x": np.array([1 / 3, np.inf]), "n": np.array([self.number])}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        assert action.dtype == np.float64
        action += 1.0  # environments may write to what they are given
        return self._observation(), 1 / 3, False, False, {"third": 1 / 3}


@pytest.mark.long
@pytest.mark.parametrize("x64", [False, True])
def test_dtypes_follow_jaxs_mode(transport: str, x64: bool) -> None:
    with jax.enable_x64(x64), vj.bridge(SyncVectorEnv([Wide] * 2), {"third": np.float64}, transport=transport) as env:
        program = jax.jit(lambda s, a: jax.lax.scan(lambda s, _: (env.step(s, a), None), s, None, length=3)[0])
        state = program(env.reset(jax.random.key(0)), jnp.zeros((2, 2)))
        number = np.float64 if x64 else np.float32
        assert state.obs["x"].dtype == state.reward.dtype == state.info["third"].dtype == number
        assert state.obs["n"].dtype == (np.int64 if x64 else np.int32)
        assert state.token.dtype == state.steps.dtype == np.int32
        assert state.reward[0] == number(1 / 3)
        assert state.obs["x"][0].tolist() == [float(number(1 / 3)), np.inf]
        assert state.steps.tolist() == [3, 3]


def test_float64_keep_needs_the_64_bit_mode() -> None:
    with vj.bridge(SyncVectorEnv([Wide]), float64="keep") as env:
        with pytest.raises(ValueError, match="jax_enable_x64"):
            env.reset(new_key(0))
        with jax.enable_x64(True):
            assert env.reset(jax.random.key(0)).obs["x"].dtype == np.float64


@pytest.mark.long
def test_an_integer_that_does_not_fit_is_an_error_and_not_another_integer() -> None:
    with vj.bridge(SyncVectorEnv([lambda: Wide(2**40)])) as env:
        with pytest.raises(OverflowError, match="64-bit mode"):
            env.reset(new_key(0))
        with jax.enable_x64(True):
            assert env.reset(jax.random.key(0)).obs["n"][0, 0] == 2**40


@pytest.mark.long
def test_the_programs_own_numbers_are_not_changed_by_the_mode() -> None:
    """Seeds are the same in both modes."""
    observations = []
    for x64 in (False, True):
        with jax.enable_x64(x64), vj.bridge(SyncVectorEnv(tracks(2))) as env:
            observations.append(np.asarray(env.reset(jax.random.key(5)).obs))
    np.testing.assert_array_equal(*observations)
