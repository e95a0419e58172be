"""Small JAX environments with known results, and fakes with the interfaces of other libraries."""

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
    """An environment with a position that starts in [0, 1). The reward is the position; beyond 3, the episode ends.

    Each step adds the action to the position, and noise below 0.01, so that results also depend on the key. The observation
    is ``{"position": float32[2], "step": int32}``: the position twice, and the number of steps.
    """

    name = "Counter"
    differentiable = "reverse"
    max_episode_steps: int | None = 7
    single_observation_space = gym.spaces.Dict(
        {"position": gym.spaces.Box(-np.inf, np.inf, (2,), np.float32), "step": gym.spaces.Box(0, 1000, (), np.int32)}
    )
    single_action_space = gym.spaces.Box(-1.0, 2.0, (1,), np.float32)

    def init(self, key: Any) -> Any:
        state = {"x": jax.random.uniform(key), "t": 0}
        return state, self._obs(state)

    def step(self, state: Any, action: Any, key: Any) -> Any:
        new_state = {"x": state["x"] + action[0] + 0.01 * jax.random.uniform(key), "t": state["t"] + 1}
        info = {"position": new_state["x"], "odd": new_state["t"] % 2 == 1, "deep": {"step": new_state["t"]}}
        return new_state, self._obs(new_state), new_state["x"], new_state["x"] > 3, False, info

    def _obs(self, state: Any) -> Any:
        return {"position": jnp.stack([state["x"], state["x"]]), "step": state["t"]}

    def render(self, state: Any) -> Any:
        return np.full((2, 2, 3), int(state["t"]), np.uint8)


class FlatCounter(Counter):
    """A :class:`Counter` with arrays as observations, which trainers need, and a reward of 1 per step."""

    name = "FlatCounter"
    single_observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def step(self, state: Any, action: Any, key: Any) -> Any:
        new_state, obs, _, *rest = super().step(state, action, key)
        return new_state, obs, 1.0, *rest

    def _obs(self, state: Any) -> Any:
        return jnp.stack([state["x"], state["x"]])


class Switch:
    """An environment with discrete actions; the observation is the last action, and action 2 ends the episode."""

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
        env: An argument of :func:`~vecenv.jax.adapt`.
        max_episode_steps: As for :class:`~vecenv.jax.FunctionalVectorEnv`.
        lanes: The number of rows of the compiled batch. All rows are this environment. XLA rounds differently for
            different numbers of rows: after 40 steps of ant, results with and without a batch differ by 3e-5. Use n lanes
            for results that equal those of a vector of n rows bit for bit.
        render_mode: ``"rgb_array"`` or ``None``.
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
        self._clear()

    def _clear(self) -> None:
        self._key: Any = None
        self._state: Any = None
        self._episode = self._steps = 0

    def clone(self) -> GymEnv:
        """Return a new environment with the same compiled functions, as in ``SyncVectorEnv([env.clone] * n)``."""
        clone = object.__new__(GymEnv)
        clone.__dict__.update(self.__dict__)
        clone._clear()
        return clone

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start the first episode of ``seed``, or without a seed the next episode of the previous seed."""
        super().reset(seed=seed)
        if seed is None and self._key is not None:
            self._episode += 1
        else:
            self._key, self._episode = keys_from(seed, 1)[0], 0
        self._steps = 0
        self._state, obs = self._init(self._repeat(self._episode_key()))
        return to_numpy(self.observation_space, _first_row(obs)), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the environment.

        Raises:
            gymnasium.error.ResetNeeded: Before the first ``reset``.
        """
        if self._state is None:
            raise gym.error.ResetNeeded("Call reset before step.")
        self._steps += 1
        self._state, *out = self._step(
            self._state, self._repeat(action), self._repeat(self._episode_key()), self._repeat(np.int32(self._steps))
        )
        obs, reward, terminated, truncated, info = _first_row(out)
        limit = self.max_episode_steps
        truncated = bool(truncated) or (limit is not None and self._steps >= limit)
        obs, info = to_numpy(self.observation_space, obs), jax.tree.map(np.asarray, info)
        return obs, float(reward), bool(terminated), truncated, info

    def render(self) -> Any:
        """Return the current frame, ``uint8[height, width, 3]``, or ``None`` without a ``render_mode``."""
        return None if self.render_mode is None else self.single_env.render(jax.tree.map(lambda leaf: leaf[0], self._state))

    def _episode_key(self) -> Any:
        return jax.random.fold_in(self._key, self._episode)

    def _repeat(self, tree: Any) -> Any:
        """Stack ``lanes`` copies of a tree. This is not compiled, because XLA would then compute only one of the rows."""
        return jax.tree.map(lambda x: np.repeat(np.asarray(x)[None], self.lanes, 0), tree)


def _first_row(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf)[0], tree)


def make_sync(env: GymEnv, num_envs: int, **options: Any) -> gym.vector.SyncVectorEnv:
    """Return a ``SyncVectorEnv`` of environments that share their compiled functions."""
    return gym.vector.SyncVectorEnv([env.clone] * num_envs, **options)


# -- gymnax ------------------------------------------------------------------------------------------------------


class _Params(NamedTuple):
    max_steps_in_episode: int = 6


class Discrete:
    """A fake of gymnax's ``Discrete``. Adapters recognize the class by its name."""

    def __init__(self, n: int) -> None:
        self.n = n


class Box:
    """A fake of gymnax's ``Box``. Adapters recognize the class by its name."""

    def __init__(self, low: float, high: float, shape: tuple[int, ...], dtype: Any = jnp.float32) -> None:
        self.low, self.high, self.shape, self.dtype = low, high, shape, dtype


class _GymnaxState(NamedTuple):
    x: Any
    time: Any


class FakeGymnaxEnv:
    """A fake gymnax environment, with the time limit in a separate method."""

    name = "FakeGymnaxEnv"
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


class FakeJumanjiEnv:
    """A fake jumanji environment: observations are named tuples, and an episode is truncated if its last discount is 1."""

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
        terminated, truncated = state["x"] > 7, state["t"] >= 6
        step_type = jnp.where(terminated | truncated, 2, 1)
        return state, self._timestep(state, jnp.float32(action), step_type, jnp.where(terminated, 0.0, 1.0))

    def _timestep(self, state: Any, reward: Any, step_type: Any, discount: Any) -> Any:
        grid = jnp.full((2, 2), state["x"], jnp.int32)
        mask = jnp.arange(3) <= state["x"]
        return _TimeStep(step_type, reward, discount, _Observation(grid, mask), {"moves": state["t"]})
