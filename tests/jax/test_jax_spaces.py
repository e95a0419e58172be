"""Spaces inside compiled programs: drawn by a key, asked for arrays of JAX, and never one constant for ever."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from jax_envs import Counter

from vecenv.jax import FunctionalVectorEnv, bridge, jax_space

SPACES: list[spaces.Space[Any]] = [
    spaces.Box(-2.0, 3.0, (2,), np.float32),
    spaces.Box(np.array([-np.inf, 0.0, -np.inf]), np.array([np.inf, np.inf, 4.0]), dtype=np.float32),
    spaces.Box(0, 255, (3,), np.uint8),
    spaces.Box(-5, 5, (2,), np.int64),
    spaces.Discrete(4, start=-1),
    spaces.MultiDiscrete([2, 5]),
    spaces.MultiBinary(6),
]
SPACES.append(spaces.Dict({"a": spaces.Tuple(SPACES[:2]), "b": spaces.Discrete(3)}))


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_samples_of_a_key_are_elements_of_all_the_space(space: Any) -> None:
    known = jax_space(space)
    drawn = jax.jit(jax.vmap(known.sample))(jax.random.split(jax.random.key(1), 300))
    rows = [jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], drawn) for i in range(300)]
    assert all(jax.jit(known.contains)(row) for row in rows[:3])
    # (JAX has no int64 without its 64-bit mode)
    fitting = isinstance(space, spaces.Box) and space.dtype == np.int64
    assert all(fitting or space.contains(_like(space, row)) for row in rows)
    if isinstance(space, spaces.Box) and space.dtype.kind in "iu":
        assert np.asarray(drawn).max() >= space.high.max() - 5
        assert np.asarray(drawn).min() <= space.low.min() + 5
    if isinstance(space, spaces.Discrete):
        assert set(np.asarray(drawn).tolist()) == {-1, 0, 1, 2}


def _like(space: Any, row: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _like(inner, row[key]) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_like(inner, one) for inner, one in zip(space.spaces, row, strict=True))
    return np.int64(row) if isinstance(space, spaces.Discrete) else np.asarray(row, space.dtype)


def test_what_is_outside_is_not_contained() -> None:
    box, choice = jax_space(SPACES[0]), jax_space(SPACES[4])
    inside = jax.jit(box.contains)
    assert inside(jnp.array([0.0, 3.0]))
    assert not inside(jnp.array([0.0, 3.1]))
    assert not inside(jnp.zeros(3))
    assert not jax_space(SPACES[3]).contains(jnp.zeros(2))  # floats are no integers
    assert [bool(choice.contains(jnp.asarray(i))) for i in range(-2, 4)] == [False, True, True, True, True, False]
    both = jax_space(SPACES[-1])
    assert not both.contains({"b": jnp.asarray(0)})
    assert not jax_space(SPACES[6]).contains(jnp.full(6, 2))


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_it_is_the_same_space_to_all_other_code(space: Any) -> None:
    known = jax_space(space)
    assert known == space == pickle.loads(pickle.dumps(known)) == copy.deepcopy(known)
    known.seed(3)
    space = copy.deepcopy(space)
    space.seed(3)
    ours, theirs = known.sample(), space.sample()
    assert jax.tree.all(jax.tree.map(np.array_equal, ours, theirs))
    assert known.contains(ours)


def test_a_sample_without_a_key_inside_a_program_is_refused() -> None:
    env = FunctionalVectorEnv(Counter(), 3)
    for space in (env.single_action_space, env.action_space, env.single_observation_space["place"]):
        with pytest.raises(ValueError, match="one constant for ever"):
            jax.jit(lambda key, space=space: space.sample())(jax.random.key(0))
    draw: Any = jax.jit(env.action_space.sample)
    assert not np.array_equal(draw(jax.random.key(0)), draw(jax.random.PRNGKey(1)))
    assert draw(jax.random.key(0)).shape == (3, 1)


def test_a_bridge_has_them_too() -> None:
    env = bridge(gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2))
    drawn = jax.jit(env.action_space.sample)(jax.random.key(0))
    env.step(env.reset(jax.random.key(0)), drawn)
    with pytest.raises(ValueError, match="give it a key"):
        jax.jit(env.single_action_space.sample)()
    env.close()


def test_a_space_of_ones_own_is_left_alone() -> None:
    class Own(spaces.Box):
        pass

    own = Own(0, 1, (1,))
    assert jax_space(own) is own
