"""Small JAX environments with known numbers, and stand-ins with the interfaces of other libraries."""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

from vecenv.jax import adapt
from vecenv.jax.env import FixedSpec
from vecenv.jax.interop import keys_from, to_numpy


class Counter:
    """An environment that starts in [0, 1) and adds its action; the reward is its place, and it ends beyond 3.

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
    """A :class:`Counter` with array observations, as trainers need them, and reward 1 per step."""

    name = "Flat"
    single_observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def step(self, state: Any, action: Any, key: Any) -> Any:
        moved, obs, _, *rest = super().step(state, action, key)
        return moved, obs, 1.0, *rest

    def _obs(self, state: Any) -> Any:
        return jnp.stack([state["x"], state["x"]])


class Switch:
    """An environment with discrete actions and observations: the last action is observed; action 2 ends the episode."""

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


class GymEnv(gym.Env[Any, Any]):
    """A ``gymnasium.Env`` over a JAX-native environment: the reference for ``JaxVectorEnv``.

    Args:
        env: Anything :func:`~vecenv.jax.adapt` takes.
        max_episode_steps: As for :class:`~vecenv.jax.FunctionalVectorEnv`.
        lanes: Width of the compiled batch, of which this environment is every row. XLA rounds differently in programs of
            different width (ant: 3e-5 after 40 steps against no batch at all); for results equal bit for bit to an n-row
            vector, use n lanes.
        render_mode: ``"rgb_array"`` or ``None``.

    Raises:
        Exception: As :func:`~vecenv.jax.adapt`.
    """

    def __init__(
        self, env: Any, max_episode_steps: int | None = None, lanes: int = 1, render_mode: str | None = None
    ) -> None:
        adapted = adapt(env, max_episode_steps=max_episode_steps)
        self.single_env = FixedSpec(adapted)
        self.max_episode_steps = adapted.max_episode_steps
        self.observation_space = adapted.single_observation_space
        self.action_space = adapted.single_action_space
        self.render_mode = render_mode
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": getattr(adapted, "frames_per_second", 0) or 30}
        self.lanes = lanes
        self._init = jax.jit(jax.vmap(lambda key: self.single_env.init(jax.random.fold_in(key, 0))))
        self._step = jax.jit(jax.vmap(lambda s, a, key, t: self.single_env.step(s, a, jax.random.fold_in(key, t))))
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._key: Any = None
        self._state: Any = None
        self._episode = self._steps = 0

    def twin(self) -> GymEnv:
        """Return another environment that shares the compiled functions with this one: ``SyncVectorEnv([env.twin] * n)``."""
        twin = object.__new__(GymEnv)
        twin.__dict__.update(self.__dict__)
        twin._begin_anew()
        return twin

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode: the first of ``seed``, or the next of the current stream."""
        super().reset(seed=seed)
        if seed is None and self._key is not None:
            self._episode += 1
        else:
            self._key, self._episode = keys_from(seed, 1)[0], 0
        self._steps = 0
        self._state, obs = self._init(self._wide(self._episode_key()))
        return to_numpy(self.observation_space, _first(obs)), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the environment.

        Raises:
            gymnasium.error.ResetNeeded: Before the first ``reset``.
        """
        if self._state is None:
            raise gym.error.ResetNeeded("Call reset before step.")
        self._steps += 1
        self._state, *out = self._step(
            self._state, self._wide(action), self._wide(self._episode_key()), self._wide(np.int32(self._steps))
        )
        obs, reward, terminated, truncated, info = _first(out)
        limit = self.max_episode_steps
        cut = bool(truncated) or (limit is not None and self._steps >= limit)
        return to_numpy(self.observation_space, obs), float(reward), bool(terminated), cut, jax.tree.map(np.asarray, info)

    def render(self) -> Any:
        """Return the current frame, ``uint8[height, width, 3]``, or ``None`` without a ``render_mode``."""
        return None if self.render_mode is None else self.single_env.render(jax.tree.map(lambda leaf: leaf[0], self._state))

    def _episode_key(self) -> Any:
        return jax.random.fold_in(self._key, self._episode)

    def _wide(self, tree: Any) -> Any:
        """Repeat a tree in ``lanes`` rows. Outside of the compiled function, because XLA would compute one row only."""
        return jax.tree.map(lambda x: np.repeat(np.asarray(x)[None], self.lanes, 0), tree)


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf)[0], tree)


def sync(env: GymEnv, num_envs: int, **options: Any) -> gym.vector.SyncVectorEnv:
    """Build Gymnasium's own vector over single environments that share their compiled functions."""
    return gym.vector.SyncVectorEnv([env.twin] * num_envs, **options)


# -- gymnax ------------------------------------------------------------------------------------------------------


class _Params(NamedTuple):
    max_steps_in_episode: int = 6


class Discrete:
    """A space with the name of gymnax's class, by which adapters recognize it."""

    def __init__(self, n: int) -> None:
        self.n = n


class Box:
    """A space with the name of gymnax's class, like :class:`Discrete`."""

    def __init__(self, low: float, high: float, shape: tuple[int, ...], dtype: Any = jnp.float32) -> None:
        self.low, self.high, self.shape, self.dtype = low, high, shape, dtype


class _GymnaxState(NamedTuple):
    x: Any
    time: Any


class Gymnax:
    """A stand-in with the interface of gymnax: the time limit is a separate method."""

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
    """A stand-in with the interface of jumanji: named-tuple observations, and a ``last`` that is truncation if the discount
    is 1.
    """

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
