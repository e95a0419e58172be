"""Environments with rewards that depend on all earlier calls, so that an incomplete replay returns other rewards."""

from __future__ import annotations

import os
import threading
import zlib
from typing import Any

import gymnasium as gym
import numpy as np


class HistoryEnv(gym.Env[Any, Any]):
    """An environment with rewards that depend on its generator, seed, options, actions, ``gain`` and calls of ``add``.

    Args:
        fails_at: The number of the step that raises, counted over all episodes, or 0 for none.
    """

    observation_space = gym.spaces.Box(-1e9, 1e9, (3,), np.float32)
    action_space: gym.Space[Any] = gym.spaces.Discrete(5)
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, fails_at: int = 0, render_mode: str | None = None) -> None:
        self.fails_at, self.render_mode = fails_at, render_mode
        self.gain, self.total, self.step_count = 1.0, 0.0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.total = float((options or {}).get("start", 0.0)) + self.np_random.random()
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.step_count += 1
        if self.step_count == self.fails_at:
            raise ValueError(f"the environment broke after {self.step_count} steps at {self.total:.6f}")
        draw = self.np_random.random()
        self.total += self.gain * (draw + float(np.sum(action)))
        return self._observation(), self.total, bool(draw < 0.06), bool(draw > 0.97), {}

    def add(self, amount: float) -> float:
        self.total += amount
        return self.total

    def render(self) -> Any:
        return np.full((8, 8, 3), int(self.total) % 256, np.uint8)

    def _observation(self) -> Any:
        return np.array([self.total, self.total % 1, self.gain], np.float32)


class GlobalRandomEnv(HistoryEnv):
    """A history environment that also draws from ``numpy.random`` and ``random``."""

    def step(self, action: Any) -> Any:
        import random

        self.total += np.random.random() + random.random()
        return super().step(action)


class BoxActionEnv(HistoryEnv):
    """A history environment with arrays as actions."""

    action_space = gym.spaces.Box(-1, 1, (2, 2), np.float32)


class TextActionEnv(HistoryEnv):
    """A history environment with strings as actions, which are not passed in shared memory."""

    action_space = gym.spaces.Text(6)

    def step(self, action: Any) -> Any:
        return super().step(len(action))


class ChecksumEnv(gym.Env[Any, Any]):
    """An environment with rewards, ends and errors that depend on a checksum of everything that it received.

    Args:
        reset_on_seed: Resets with a seed clear the checksum.
    """

    observation_space = gym.spaces.Box(-1e9, 1e9, (1,), np.float32)
    action_space = gym.spaces.Discrete(10)
    UNPICKLABLE, DIES, RAISES = 7, 8, 9
    """Actions with which ``step`` returns an info that cannot be pickled, ends the process, or raises."""

    def __init__(self, reset_on_seed: bool = False) -> None:
        self.reset_on_seed, self.knob, self.checksum = reset_on_seed, 0, 0

    def update_checksum(self, *received: Any) -> int:
        self.checksum = zlib.crc32(repr((self.checksum, *received)).encode())
        return self.checksum

    def update_and_raise(self, number: int) -> None:
        raise KeyError(self.update_checksum("update_and_raise", number))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        if self.reset_on_seed and seed is not None:
            self.checksum = 0
        self.update_checksum("reset", sorted((options or {}).items()), self.np_random.random())
        if options and "breaks" in options:
            raise ValueError(f"the reset broke at {self.checksum}")
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.update_checksum("step", int(action), self.knob, self.np_random.random())
        if action == self.RAISES:
            raise ValueError(f"the step broke at {self.checksum}")
        if action == self.DIES:
            os._exit(3)
        info = {"lock": threading.Lock()} if action == self.UNPICKLABLE else {}
        return self._observation(), self.checksum % 1000, self.checksum % 9 == 0, self.checksum % 11 == 0, info

    def _observation(self) -> Any:
        return np.array([self.checksum % 997], np.float32)
