"""An environment for tests of spare workers, and a reference without spare workers that uses the same seeds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import SyncVectorEnv


def derive_seed(seed: int, row: int, episode: int) -> int:
    """Return the seed of an episode as documented in ``docs/workers.md``."""
    return int(np.random.SeedSequence(seed, spawn_key=(row, episode)).generate_state(1)[0] >> 1)


class EpisodeSeeds(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that seeds each episode like an engine with spare workers."""

    def __init__(self, env: gymnasium.Env[Any, Any], row: int) -> None:
        super().__init__(env)
        self._row, self._seed, self._episode = row, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is None:
            self._episode += 1
            seed = derive_seed(self._seed, self._row, self._episode)
        else:
            self._seed, self._episode = seed, 0
        return self.env.reset(seed=seed, options=options)


def make_reference(env_fns: Sequence[Callable[[], Any]], first: int = 0, **options: Any) -> SyncVectorEnv:
    """Build the reference for an engine that has ``env_fns[0]`` as row ``first``."""
    seeded = [lambda row=row, env_fn=env_fn: EpisodeSeeds(env_fn(), row) for row, env_fn in enumerate(env_fns, first)]
    return SyncVectorEnv(seeded, **options)


class Walk(gymnasium.Env[np.ndarray, np.int64]):
    """A random walk with episodes of different lengths.

    Args:
        reset: The duration of a reset in seconds.
        step: The duration of a step in seconds.
        lengths: The range of episode lengths; its end is excluded.
        uneven: True if the duration of a reset is random, and at most ``reset``.
        dies: A reset with this seed ends the process.
        raises: A reset with this seed raises.
    """

    def __init__(
        self, reset: float = 0.0, step: float = 0.0, lengths: tuple[int, int] = (2, 9), *, uneven: bool = False,
        dies: int = -1, raises: int = -1,
    ) -> None:  # fmt: skip
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.action_space = gymnasium.spaces.Discrete(3)
        self._reset, self._step, self._lengths, self._uneven = reset, step, lengths, uneven
        self._dies, self._raises = dies, raises
        self.level = 1.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        if seed == self._dies:
            os._exit(3)
        if seed == self._raises:
            raise ValueError("no such level")
        # the duration comes from a separate generator, so it does not change the walk
        time.sleep(self._reset * (np.random.default_rng().random() if self._uneven else 1))
        self.position = np.array([0.0, self.np_random.normal(), self.level * (options or {}).get("scale", 1.0)])
        self.steps_left = int(self.np_random.integers(*self._lengths))
        return self.position, {"length": self.steps_left, "name": f"walk {seed}"}

    def step(self, action: np.int64) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        time.sleep(self._step)
        self.steps_left -= 1
        self.position += [int(action), self.np_random.normal(), 0.0]  # in place, so observations must be copied
        return self.position, self.position[1], self.steps_left == 0, False, {"steps_left": self.steps_left}
