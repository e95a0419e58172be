"""Environments with random infos of mixed types, which do not fit into arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from envs import describe
from gymnasium import spaces

KEYS: tuple[Any, ...] = ("a", "_a", "lap", "score", "_score", (1, 2), 3, "3", "words", "env_id")
ACTIONS = 3


def draw_value(rng: np.random.Generator, depth: int = 0) -> Any:
    """Return a value of a random kind; nested dicts are at most three levels deep."""
    size = int(rng.integers(4))
    factories: list[Callable[[], Any]] = [  # functions, so that only the chosen one draws from `rng`
        lambda: None, lambda: bool(size % 2), lambda: size, lambda: size + 0.5, lambda: 2**62 + size, lambda: 2**70,
        lambda: np.float32(size), lambda: np.int8(size), lambda: np.bool_(size % 2), lambda: float("inf"),
        lambda: "x" * size, lambda: b"x" * size, lambda: np.array(["x" * (size + 1)]), lambda: [size, None], lambda: (size,),
        lambda: np.arange(size), lambda: np.ones((size, 2), np.float32), lambda: rng.random(2),
        lambda: np.zeros(2, np.uint8), dict, lambda: draw_info(rng, depth + 1, KEYS) if depth < 2 else {"end": size},
    ]  # fmt: skip
    return factories[int(rng.integers(len(factories)))]()


def draw_info(rng: np.random.Generator, depth: int, keys: tuple[Any, ...]) -> dict[Any, Any]:
    """Return an info with a random part of these keys."""
    return {key: draw_value(rng, depth) for key in keys if rng.random() < 0.4}


class MixedInfosEnv(gymnasium.Env[Any, Any]):
    """An environment with episodes of 1 to 5 steps. Infos and rewards depend on the seed, and rewards on the actions.

    Args:
        mixture: The seed that chooses the keys that infos may have.
        none: Steps may return ``None`` instead of an info.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(ACTIONS)

    def __init__(self, mixture: int, none: bool = False) -> None:
        rng = np.random.default_rng(mixture)
        self._keys = tuple(key for key in KEYS if rng.random() < 0.6)
        self._none = none
        self._remaining_steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self._remaining_steps = int(self.np_random.integers(1, 6))
        return self.np_random.random(2), draw_info(self.np_random, 0, self._keys)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Any]:
        self._remaining_steps -= 1
        info = None if self._none and self.np_random.random() < 0.3 else draw_info(self.np_random, 0, self._keys)
        truncates = bool(self.np_random.random() < 0.5)
        over = self._remaining_steps <= 0
        observation = self.np_random.random(2)
        reward = float(action) + self.np_random.random()
        return observation, reward, over and not truncates, over and truncates, info


def choose_action(observation: Any, info: Any = None) -> int:
    """Return an action that depends on every bit of the observation and of the info."""
    return sum(describe((observation.tolist(), info)).encode()) % ACTIONS


def play_episode(env: gymnasium.Env[Any, Any], seed: int, use_infos: bool) -> tuple[Any, ...]:
    """Run an episode in a loop over ``step``. Return the episode's return, length, flags and last info."""
    observation, info = env.reset(seed=seed)
    episode_return, length = 0.0, 0
    while True:
        action = choose_action(observation, info) if use_infos else choose_action(observation)
        observation, reward, terminated, truncated, info = env.step(action)
        episode_return, length = episode_return + float(reward), length + 1
        if terminated or truncated:
            return episode_return, length, terminated, truncated, describe(info)


def summarize_results(results: Any) -> list[tuple[Any, ...]]:
    """Convert each result of ``evaluate`` to the values of :func:`play_episode`. No episode may have failed."""
    assert all(each.error is None and each.attempts == 1 for each in results)
    return [(each.episode_return, each.length, each.terminated, each.truncated, describe(each.info)) for each in results]
