"""Episodes that depend only on seed, options and actions, with optional faults in the middle."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from envs import open_engine
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

SEED = 300
LONGEST = 30  # steps of a walk that begins with a snapshot
ENGINES: dict[str, dict[str, Any]] = {
    "in-process": {"num_workers": 0},
    "two-workers": {"num_workers": 2},
    "process-per-env": {"num_workers": None},
    "callers-share": {"num_workers": 1, "use_caller": True},
}


class Walk(gymnasium.Env[Any, Any]):
    """A random walk. Its seed determines the length, from 1 to ``longest``; every fifth walk is truncated.

    Args:
        longest: The highest number of steps.
        faults: Seed -> fault in the middle: ``"raise"``, ``"die"`` or ``"hang"``; with ``" once"`` only the first time.
        marks: A folder for marks of faults that happened once, and for a file ``steps``, to which each step appends a byte.
        pause: Seconds per step.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Discrete(7)
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as Gymnasium's

    def __init__(
        self, longest: int = 12, faults: dict[int, str] | None = None, marks: str = "", pause: float = 0.0,
        render_mode: str | None = None,
    ) -> None:  # fmt: skip
        self.longest, self.faults, self.marks, self.pause = longest, faults or {}, marks, pause
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seed, self.t, self.sum = seed, 0, float((options or {}).get("start", 0.0))
        self.length = int(self.np_random.integers(1, self.longest + 1))
        return self._observe(), {"reset": True}

    def _observe(self) -> Any:
        return np.array([self.sum, self.t, self.np_random.normal()])

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.marks:
            with open(Path(self.marks) / "steps", "ab") as file:
                file.write(b".")
        if self.pause:
            time.sleep(self.pause)
        if self.t == self.length // 2:
            self._cause_fault()
        self.t += 1
        self.sum += float(action) * self.np_random.normal()
        over, cut = self.t >= self.length, self.seed is not None and self.seed % 5 == 0
        return self._observe(), self.sum, over and not cut, over and cut, {"t": self.t, "name": f"walk {self.seed}"}

    def _cause_fault(self) -> None:
        fault, _, once = self.faults.get(self.seed or 0, "").partition(" ")
        mark = Path(self.marks) / f"{self.seed}"
        if not fault or (once and mark.exists()):
            return
        if once:
            mark.touch()
        if fault == "raise":
            raise ArithmeticError(f"walk {self.seed} failed")
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    def render(self) -> Any:
        return np.full((2, 3, 3), self.t, np.uint8)


def walks(count: int, **kwargs: Any) -> list[Any]:
    """Return ``count`` functions that build walks."""
    return [functools.partial(Walk, **kwargs)] * count


def choose(observations: Any, rngs: list[np.random.Generator]) -> Any:
    """Return an action from the observation and a random number."""
    pairs = zip(observations, rngs, strict=True)
    return np.array([(int(abs(observation[2]) * 3) + int(rng.integers(4))) % 7 for observation, rng in pairs])


def expected_results(count: int, seed: int = SEED, **kwargs: Any) -> list[Any]:
    """Return the expected results, from a plain loop over one environment."""
    env = Walk(**kwargs)
    return [finish_walk(env, env.reset(seed=seed + index)[0], index, seed, seed + index) for index in range(count)]


def finish_walk(env: Walk, observation: Any, index: int, seed: int, episode_seed: int | None) -> Any:
    """Return the result of a walk, with the remaining steps from its current state."""
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(index,)))
    total, length, over = 0.0, 0, (False, False)
    while not any(over):
        observation, reward, *over, info = env.step(choose([observation], [rng])[0])  # type: ignore[assignment]
        total, length = total + reward, length + 1
    return index, episode_seed, total, length, *over, info, None


def numbers(results: Any) -> list[Any]:
    """Return the fields of results that do not depend on time."""
    return [
        (each.index, each.seed, each.episode_return, each.length, each.terminated, each.truncated, each.info, each.error)
        for each in results
    ]


def snapshots_midway(count: int, **kwargs: Any) -> tuple[list[Any], list[tuple[int, int]]]:
    """Return snapshots in the middle of walks, and for each the seed and the number of steps before the snapshot."""
    snapshots, starts = [], []
    with open_engine(walks(1, longest=LONGEST, **kwargs), num_workers=0, autoreset_mode=AutoresetMode.DISABLED) as envs:
        for seed in range(SEED, SEED + 3 * count):
            envs.reset(seed=seed)
            steps = (seed - SEED) % 5
            if not any(np.any(envs.step([1])[2:4]) for _ in range(steps)) and len(starts) < count:
                snapshots += envs.save(verify=False)
                starts.append((seed, steps))
    assert len(starts) == count
    return snapshots, starts


def expected_from(starts: list[tuple[int, int]], seed: int = SEED) -> list[Any]:
    """Return the expected results, from a plain loop over one environment that steps to each start."""
    env, results = Walk(longest=LONGEST), []
    for index, (episode_seed, steps) in enumerate(starts):
        observation = env.reset(seed=episode_seed)[0]
        for _ in range(steps):
            observation = env.step(1)[0]
        results.append(finish_walk(env, observation, index, seed, None))
    return results
