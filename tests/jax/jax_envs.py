"""Small JAX environments whose every number is known, and stand-ins with the interfaces of other libraries."""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

from vecenv.jax import GymEnv


class Counter:
    """Starts at a random place in [0, 1); adds its action, pays what it stands at, and ends beyond 3.

    The observation is ``{"place": float32[2], "step": int32}``: the place twice, and the number of steps taken. Each step
    adds noise below 0.01 from its key, so that keys show.
    """

    name = "Counter"
    differentiable = "reverse"
    max_episode_steps: int | None = 7
    single_observation_space = gym.spaces.Dict(
        {"place": gym.spaces.Box(-np.inf, np.inf, (2,), np.float32), "step": gym.spaces.Box(0, 1000, (), np.int32)}
    )
    single_action_space = gym.spaces.Box(-1.0, 2.0, (1,), np.float32)

    def init(self, key: Any) -> Any:
        state = {"x": jax.random.uniform(key), "t": 0}
        return state, self._obs(state)

    def step(self, state: Any, action: Any, key: Any) -> Any:
        moved = {"x": state["x"] + action[0] + 0.01 * jax.random.uniform(key), "t": state["t"] + 1}
        info = {"place": moved["x"], "odd": moved["t"] % 2 == 1, "deep": {"step": moved["t"]}}
        return moved, self._obs(moved), moved["x"], moved["x"] > 3, False, info

    def _obs(self, state: Any) -> Any:
        return {"place": jnp.stack([state["x"], state["x"]]), "step": state["t"]}

    def render(self, state: Any) -> Any:
        return np.full((2, 2, 3), int(state["t"]), np.uint8)


class Flat(Counter):
    """A :class:`Counter` that observes an array, as trainers want it, and pays 1 a step."""

    name = "Flat"
    single_observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def step(self, state: Any, action: Any, key: Any) -> Any:
        moved, obs, _, *rest = super().step(state, action, key)
        return moved, obs, 1.0, *rest

    def _obs(self, state: Any) -> Any:
        return jnp.stack([state["x"], state["x"]])


class Switch:
    """Discrete actions and observations: the observation is the last action; action 2 ends the episode."""

    name = "Switch"
    differentiable = "none"
    max_episode_steps: int | None = 5
    single_observation_space = gym.spaces.Discrete(3)
    single_action_space = gym.spaces.Discrete(3)

    def init(self, key: Any) -> Any:
        state = jax.random.randint(key, (), 0, 3)
        return state, state

    def step(self, state: Any, action: Any, key: Any) -> Any:
        return action, action, 1.0, action == 2, False, {}


def sync(env: GymEnv, num_envs: int, **options: Any) -> gym.vector.SyncVectorEnv:
    """Gymnasium's own vector over single environments that share their compiled functions."""
    return gym.vector.SyncVectorEnv([env.twin] * num_envs, **options)


# -- gymnax ------------------------------------------------------------------------------------------------------


class _Params(NamedTuple):
    max_steps_in_episode: int = 6


class Discrete:
    """Named as gymnax's class is; adapters go by the name."""

    def __init__(self, n: int) -> None:
        self.n = n


class Box:
    """As :class:`Discrete`."""

    def __init__(self, low: float, high: float, shape: tuple[int, ...], dtype: Any = jnp.float32) -> None:
        self.low, self.high, self.shape, self.dtype = low, high, shape, dtype


class _GymnaxState(NamedTuple):
    x: Any
    time: Any


class Gymnax:
    """The interface of gymnax: the time limit is asked for separately."""

    name = "Gymnax"
    default_params = _Params()

    def action_space(self, params: Any) -> Any:
        return Discrete(2)

    def observation_space(self, params: Any) -> Any:
        return Box(-10.0, 10.0, (1,))

    def reset_env(self, key: Any, params: Any) -> Any:
        state = _GymnaxState(jax.random.uniform(key), 0)
        return state.x[None], state

    def step_env(self, key: Any, state: Any, action: Any, params: Any) -> Any:
        state = _GymnaxState(state.x + action + 0.1 * jax.random.normal(key), state.time + 1)
        return state.x[None], state, state.x, state.x > 3, {"discount": 1.0}

    def is_truncated(self, state: Any, params: Any) -> Any:
        return state.time >= params.max_steps_in_episode


# -- jumanji -----------------------------------------------------------------------------------------------------


class _Spec:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class _Observation(NamedTuple):
    grid: Any
    action_mask: Any


class _TimeStep(NamedTuple):
    step_type: Any
    reward: Any
    discount: Any
    observation: Any
    extras: Any

    def last(self) -> Any:
        return self.step_type == 2


class Jumanji:
    """The interface of jumanji: named-tuple observations, and a ``last`` that is truncation where the discount is 1."""

    observation_spec = _Spec(
        _specs={
            "grid": _Spec(shape=(2, 2), dtype=np.int32, minimum=0, maximum=9),
            "action_mask": _Spec(shape=(3,), dtype=np.bool_, minimum=False, maximum=True),
        }
    )
    action_spec = _Spec(num_values=3)

    def reset(self, key: Any) -> Any:
        state = {"x": jax.random.randint(key, (), 0, 3), "t": jnp.int32(0)}
        return state, self._timestep(state, jnp.zeros(()), 0, 1.0)

    def step(self, state: Any, action: Any) -> Any:
        state = {"x": state["x"] + action, "t": state["t"] + 1}
        dead, over = state["x"] > 7, state["t"] >= 6
        kind = jnp.where(dead | over, 2, 1)
        return state, self._timestep(state, jnp.float32(action), kind, jnp.where(dead, 0.0, 1.0))

    def _timestep(self, state: Any, reward: Any, kind: Any, discount: Any) -> Any:
        grid = jnp.full((2, 2), state["x"], jnp.int32)
        mask = jnp.arange(3) <= state["x"]
        return _TimeStep(kind, reward, discount, _Observation(grid, mask), {"moves": state["t"]})
