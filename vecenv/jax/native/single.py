"""One JAX-native environment as an ordinary ``gymnasium.Env``: for debugging, for wrappers, and as the reference.

Its start states and noise come from the same keys as those of row i of a ``JaxVectorEnv`` seeded alike, so a
``SyncVectorEnv`` over these is what a ``JaxVectorEnv`` must equal.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import jax
import numpy as np

from vecenv.jax.native.adapters import adapt
from vecenv.jax.native.handover import info_arrays, to_numpy
from vecenv.jax.native.seeding import entropy_seeds, seed_keys
from vecenv.jax.native.wrap import Fixed

__all__ = ["GymEnv"]


class GymEnv(gym.Env[Any, Any]):
    """A ``gymnasium.Env`` over a JAX-native environment.

    Args:
        env: Anything :func:`~vecenv.jax.adapt` takes.
        max_episode_steps: As for :class:`~vecenv.jax.FunctionalVectorEnv`.
        lanes: Width of the compiled batch, of which this environment is every row. XLA rounds differently in programs of
            different width (ant: 3e-5 after 40 steps against no batch at all); to be equal bit for bit to an n-row vector,
            be n lanes wide.
        render_mode: ``"rgb_array"`` or ``None``.

    Raises:
        Exception: As :func:`~vecenv.jax.adapt`.
    """

    def __init__(
        self, env: Any, max_episode_steps: int | None = None, lanes: int = 1, render_mode: str | None = None
    ) -> None:
        adapted = adapt(env, max_episode_steps=max_episode_steps)
        self.single_env = Fixed(adapted)
        self.max_episode_steps = adapted.max_episode_steps
        self.observation_space = adapted.single_observation_space
        self.action_space = adapted.single_action_space
        self.render_mode = render_mode
        self.metadata = {
            "render_modes": ["rgb_array"],
            "render_fps": getattr(adapted, "frames_per_second", 0) or 30,
        }
        self.lanes = lanes
        self._init = jax.jit(jax.vmap(lambda key: self.single_env.init(jax.random.fold_in(key, 0))))
        self._step = jax.jit(jax.vmap(lambda s, a, key, t: self.single_env.step(s, a, jax.random.fold_in(key, t))))
        self._key: Any = None
        self._episode = 0
        self._steps = 0
        self._state: Any = None

    def twin(self) -> GymEnv:
        """Another environment that shares the compiled functions with this one: ``SyncVectorEnv([env.twin] * n)``."""
        twin = object.__new__(GymEnv)
        twin.__dict__.update(self.__dict__, _key=None, _episode=0, _steps=0, _state=None)
        return twin

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode: the first of ``seed``, or the next of the stream that is running."""
        super().reset(seed=seed)
        if seed is None and self._key is not None:
            self._episode += 1
        else:
            self._key = seed_keys(entropy_seeds(1) if seed is None else [seed])[0]
            self._episode = 0
        self._steps = 0
        self._state, obs = self._init(self._wide(self._episode_key()))
        return to_numpy(self.observation_space, _first(obs)), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step.

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
        return to_numpy(self.observation_space, obs), float(reward), bool(terminated), cut, info_arrays(info)

    def render(self) -> Any:
        """The current frame, ``uint8[height, width, 3]``, or ``None`` without a ``render_mode``."""
        return None if self.render_mode is None else self.single_env.render(jax.tree.map(lambda leaf: leaf[0], self._state))

    def _episode_key(self) -> Any:
        return jax.random.fold_in(self._key, self._episode)

    def _wide(self, tree: Any) -> Any:
        """``lanes`` rows of the same. Made here, not in the compiled function: XLA would notice, and compute one row."""
        return jax.tree.map(lambda x: np.repeat(np.asarray(x)[None], self.lanes, 0), tree)


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf)[0], tree)
