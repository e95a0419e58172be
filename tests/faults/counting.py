"""Environments that count their calls. They have a separate file because tests also interrupt the code in this file if the
environments live in the calling process.
"""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import gymnasium as gym
import numpy as np

RAISE, DIE, HANG = 6, 7, 8
"""Actions that are faults. They are outside the action space, so samples never contain them."""


class CountingEnv(gym.Env):
    """An environment that counts its calls. Rewards are ``index + total / 1000``. Infos hold numbers and strings; only the
    info of every third step has the key ``occasional``.

    Args:
        index: Its index.
        length: Steps per episode; 0: the episode never ends.
    """

    def __init__(self, index: int, length: int = 0) -> None:
        self.index, self.length = index, length
        self.observation_space = gym.spaces.Box(-1, 2**60, (6,), np.int64)
        self.action_space: gym.Space = gym.spaces.Discrete(RAISE)
        self.clear_counts(-1)
        self.steps = 0

    def clear_counts(self, seed: int) -> None:
        self.first_seed = seed
        self.resets = self.total = self.digest = self.calls = self.marks = 0
        self._mark = "none"

    @property
    def mark(self) -> str:
        return self._mark

    @mark.setter
    def mark(self, value: str) -> None:
        self._mark = value
        self.marks += 1

    def counts(self) -> list[int]:
        return [self.index, self.first_seed, self.resets, self.steps, self.total, self.digest]

    def observe(self) -> Any:
        return np.array(self.counts(), np.int64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.clear_counts(seed)
        self.resets += 1
        self.steps = 0
        return self.observe(), {"resets": self.resets, "tag": f"{self.index} reset {self.first_seed}.{self.resets}"}

    def parse_action(self, action: Any) -> int:
        return int(action)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        number = self.parse_action(action)
        if number == RAISE:
            raise ValueError("this action raises")
        if number == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == HANG:
            time.sleep(3600)
        self.steps += 1
        self.total += 1
        self.digest = (self.digest * 31 + number + 1) % 1_000_003
        info: dict[str, Any] = {"total": self.total, "tag": f"{self.index} {self.first_seed}.{self.total} {self._mark}"}
        if self.total % 3 == self.index % 3:
            info["occasional"] = self.total / 7
        return self.observe(), self.index + self.total / 1000, self.steps == self.length, False, info

    def echo(self, text: str) -> tuple[int, int, int, str]:
        """Count the call, and return the counts and the text."""
        self.calls += 1
        return self.index, self.calls, self.total, text


class DrawingEnv(CountingEnv):
    """An environment that draws from global generators in every call or, after :meth:`begin_episode`, from its own."""

    own_generators: tuple[Any, Any] | None = None

    def begin_episode(self, seed: int | None) -> None:
        """Seed the generators as ``generators="own"`` does: without a seed, from the last seed and a count of episodes."""
        if seed is None:
            self.episode += 1
        else:
            self.seed, self.episode = seed, 0
        numpy_seed, python_seed = (np.random.SeedSequence(self.seed, spawn_key=(self.episode, key)) for key in range(2))
        self.own_generators = (
            np.random.RandomState(np.random.MT19937(numpy_seed)),
            random.Random(int.from_bytes(python_seed.generate_state(4).tobytes(), "little")),
        )

    def draw(self) -> None:
        numpy_random, python_random = self.own_generators or (np.random, random)
        number = numpy_random.normal() + python_random.random()
        self.digest = (self.digest * 31 + int(number * 1000)) % 1_000_003

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        _, info = super().reset(seed=seed, options=options)
        self.draw()
        return self.observe(), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        _, *others = super().step(action)
        self.draw()
        return self.observe(), *others

    def echo(self, text: str) -> tuple[int, int, int, str]:
        self.draw()
        return super().echo(text)


class LargeObservationEnv(CountingEnv):
    """An environment with observations that repeat the counts. Four of them are large enough to be lent to the program."""

    def __init__(self, index: int, length: int = 0) -> None:
        super().__init__(index, length)
        self.observation_space = gym.spaces.Box(-1, 2**60, (2100,), np.int64)

    def observe(self) -> Any:
        return np.resize(super().observe(), 2100)


class TextObservationEnv(CountingEnv):
    """An environment with observations of varying length, which are pickled."""

    def __init__(self, index: int, length: int = 0) -> None:
        super().__init__(index, length)
        self.observation_space = gym.spaces.Text(120, charset="0123456789-/")  # type: ignore[assignment]

    def observe(self) -> Any:
        return "/".join(map(str, self.counts()))


class TextActionEnv(CountingEnv):
    """An environment with text actions, which are pickled."""

    def __init__(self, index: int, length: int = 0) -> None:
        super().__init__(index, length)
        self.action_space = gym.spaces.Text(8, charset="abcdef")

    def parse_action(self, action: Any) -> int:
        assert type(action) is str
        return "abcdefgh".index(action[0]) if action else 0  # "g" is RAISE, "h" is DIE


def echo(env: Any, text: str) -> Any:
    """Call ``echo`` of an environment; a function for ``exec_func``."""
    return env.unwrapped.echo(text)
