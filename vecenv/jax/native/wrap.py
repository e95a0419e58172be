"""Adapters around adapters: each changes one thing about a single environment and forwards the rest."""

from __future__ import annotations

import contextlib
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

from vecenv.jax.native.env import Adapter, JaxEnv, Start, Stepped, default_key, fixed, select
from vecenv.jax.native.state import Array, PyTree

__all__ = ["Fixed", "FrameSkip", "Override", "Rescaled", "Wrapped"]


class Wrapped(Adapter):
    """An adapter around another that changes one thing and forwards the rest."""

    def __init__(self, env: JaxEnv) -> None:
        self.env: Any = env  # a JaxEnv, and whatever optional parts of an Adapter it has
        self.name = getattr(env, "name", type(env).__name__)
        self.single_observation_space = env.single_observation_space
        self.single_action_space = env.single_action_space
        self.max_episode_steps = env.max_episode_steps
        self.frames_per_second = getattr(env, "frames_per_second", 0)

    @property
    def differentiable(self) -> str:
        return str(self.env.differentiable)

    def gradient_advice(self) -> str:
        advice = getattr(self.env, "gradient_advice", super().gradient_advice)
        return str(advice())

    def init(self, key: Array) -> Start:
        start: Start = self.env.init(key)
        return start

    def step(self, state: PyTree, action: PyTree, key: Array) -> Stepped:
        stepped: Stepped = self.env.step(state, action, key)
        return stepped

    def render(self, state: PyTree) -> np.ndarray[Any, Any]:
        frame: np.ndarray[Any, Any] = self.env.render(state)
        return frame

    @property
    def model(self) -> PyTree:
        return self.env.model if hasattr(self.env, "model") else super().model

    def using(self, model: PyTree) -> contextlib.AbstractContextManager[None]:
        context: contextlib.AbstractContextManager[None] = self.env.using(model)
        return context


class Override(Wrapped):
    """Another action space or time limit than the environment's own (-1: no limit)."""

    def __init__(self, env: JaxEnv, action_space: gym.Space[Any] | None, max_episode_steps: int | None) -> None:
        super().__init__(env)
        if action_space is not None:
            self.single_action_space = action_space
        if max_episode_steps is not None:
            self.max_episode_steps = None if max_episode_steps == -1 else max_episode_steps


class FrameSkip(Wrapped):
    """Every action is repeated ``count`` times, but never past the end of an episode; rewards are summed up to there."""

    def __init__(self, env: JaxEnv, count: int) -> None:
        super().__init__(env)
        if count < 1:
            raise ValueError(f"frame_skip must be at least 1, got {count}.")
        self.count = count
        self.frames_per_second //= count

    def step(self, state: PyTree, action: PyTree, key: Array) -> Stepped:
        def frame(out: Any, i: Array) -> tuple[Any, None]:
            state, _, reward, terminated, truncated, _ = out
            done = terminated | truncated
            nxt = self.env.step(state, action, jax.random.fold_in(key, i))
            nxt = (*nxt[:2], reward + nxt[2], *nxt[3:])
            return jax.tree.map(lambda old, new: select(done, old, new), out, nxt), None

        first = self.env.step(state, action, jax.random.fold_in(key, 0))
        out, _ = jax.lax.scan(frame, first, jnp.arange(1, self.count))
        stepped: Stepped = out
        return stepped


class Rescaled(Wrapped):
    """Actions in ``[low, high]`` are mapped linearly onto the bounds of the environment's own Box."""

    def __init__(self, env: JaxEnv, low: Any, high: Any) -> None:
        super().__init__(env)
        own = env.single_action_space
        if not (isinstance(own, gym.spaces.Box) and own.is_bounded()):
            raise ValueError(f"Only a bounded Box of actions can be rescaled; {self.name} has {own}.")
        shape = own.shape
        low, high = (np.broadcast_to(np.asarray(x, own.dtype), shape).copy() for x in (low, high))
        dtype: Any = own.dtype
        self.single_action_space = gym.spaces.Box(low, high, dtype=dtype.type)
        self._scale = (own.high - own.low) / (high - low)
        self._shift = own.low - low * self._scale

    def step(self, state: PyTree, action: PyTree, key: Array) -> Stepped:
        stepped: Stepped = self.env.step(state, action * self._scale + self._shift, key)
        return stepped


class Fixed(Wrapped):
    """States, observations and flags keep the structure, shapes and dtypes that ``init`` gave them.

    Libraries return Python floats, weakly typed arrays, ``float32`` flags and the like; a scan or a while loop refuses
    them, and a silent cast somewhere else is worse. Here is the one place where they are put right or refused.
    """

    def __init__(self, env: JaxEnv) -> None:
        super().__init__(env)
        self._spec: Any = jax.eval_shape(env.init, default_key(0))

    def init(self, key: Array) -> Start:
        start: Start = self._like(self.env.init(key), "init")
        return start

    def step(self, state: PyTree, action: PyTree, key: Array) -> Stepped:
        state, obs, reward, terminated, truncated, info = self.env.step(state, action, key)
        state, obs = self._like((state, obs), "step")
        reward = jnp.asarray(reward, jnp.result_type(float))
        flags = [jnp.asarray(flag, bool) for flag in (terminated, truncated)]
        for what, value in (("reward", reward), ("terminated", flags[0]), ("truncated", flags[1])):
            if value.shape != ():
                raise ValueError(f"{self.name} returned a {what} of shape {value.shape}; one number is wanted.")
        return state, obs, reward, flags[0], flags[1], jax.tree.map(fixed, info)

    def _like(self, value: Any, where: str) -> Any:
        want: Any = jax.tree.structure(self._spec)
        got: Any = jax.tree.structure(value)
        if want != got:
            raise ValueError(
                f"{self.name}: {where} returned a state or observation of another structure than init did.\n"
                f"  init: {want}\n  {where}: {got}"
            )

        def cast(path: Any, spec: Any, leaf: Any) -> Any:
            leaf = fixed(leaf)
            if leaf.shape != spec.shape:
                where_in = jax.tree_util.keystr(path)
                raise ValueError(
                    f"{self.name}: {where} returned {where_in} of shape {leaf.shape}, init of shape {spec.shape}."
                )
            return leaf if leaf.dtype == spec.dtype else leaf.astype(spec.dtype)

        return jax.tree_util.tree_map_with_path(cast, self._spec, value)
