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
LONGEST = 30  # highest number of steps of the walks that begin with a snapshot
ENGINES: dict[str, dict[str, Any]] = {
    "in-process": {"num_workers": 0},
    "two-workers": {"num_workers": 2},
    "process-per-env": {"num_workers": None},
    "worker-and-caller": {"num_workers": 1, "use_caller": True},
}


class Walk(gymnasium.Env[Any, Any]):
    """A random walk of 1 to ``longest`` steps; the seed determines how many. If it is divisible by 5, the walk is truncated.

    Args:
        longest: The highest number of steps.
        faults: Seed -> fault in the middle: ``"raise"``, ``"die"`` or ``"hang"``. With the suffix ``" once"``, as in
            ``"raise once"``, it occurs only the first time.
        folder: A folder with an empty file per ``once`` fault that has occurred, and a file ``steps`` with a byte per step.
        pause: Seconds per step.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Discrete(7)
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as Gymnasium's

    def __init__(
        self, longest: int = 12, faults: dict[int, str] | None = None, folder: str = "", pause: float = 0.0,
        render_mode: str | None = None,
    ) -> None:  # fmt: skip
        self.longest, self.faults, self.folder, self.pause = longest, faults or {}, folder, pause
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seed, self.t, self.sum = seed, 0, float((options or {}).get("start", 0.0))
        self.length = int(self.np_random.integers(1, self.longest + 1))
        return self._observe(), {"reset": True}

    def _observe(self) -> Any:
        return np.array([self.sum, self.t, self.np_random.normal()])

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.folder:
            with open(Path(self.folder) / "steps", "ab") as file:
                file.write(b".")
        if self.pause:
            time.sleep(self.pause)
        if self.t == self.length // 2:
            self._cause_fault()
        self.t += 1
        self.sum += float(action) * self.np_random.normal()
        done, is_cut_off = self.t >= self.length, self.seed is not None and self.seed % 5 == 0
        info = {"t": self.t, "name": f"walk {self.seed}"}
        return self._observe(), self.sum, done and not is_cut_off, done and is_cut_off, info

    def _cause_fault(self) -> None:
        fault, _, once = self.faults.get(self.seed or 0, "").partition(" ")
        occurred = Path(self.folder) / f"{self.seed}"
        if not fault or (once and occurred.exists()):
            return
        if once:
            occurred.touch()
        if fault == "raise":
            raise ArithmeticError(f"walk {self.seed} failed")
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    def render(self) -> Any:
        return np.full((2, 3, 3), self.t, np.uint8)


def make_walk_fns(count: int, **kwargs: Any) -> list[Any]:
    return [functools.partial(Walk, **kwargs)] * count


def choose_actions(observations: Any, rngs: list[np.random.Generator]) -> Any:
    """Return actions that depend on the observations and on random numbers."""
    pairs = zip(observations, rngs, strict=True)
    return np.array([(int(abs(observation[2]) * 3) + int(rng.integers(4))) % 7 for observation, rng in pairs])


def expected_results(count: int, seed: int = SEED, **kwargs: Any) -> list[Any]:
    """Return the results of a plain loop over one environment."""
    env = Walk(**kwargs)
    return [finish_walk(env, env.reset(seed=seed + index)[0], index, seed, seed + index) for index in range(count)]


def finish_walk(env: Walk, observation: Any, index: int, seed: int, episode_seed: int | None) -> Any:
    """Run a walk from its current state to its end, and return the result of the episode."""
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(index,)))
    total, length, ends = 0.0, 0, (False, False)
    while not any(ends):
        observation, reward, *ends, info = env.step(choose_actions([observation], [rng])[0])  # type: ignore[assignment]
        total, length = total + reward, length + 1
    return index, episode_seed, total, length, *ends, info, None


def summarize(results: Any) -> list[Any]:
    """Return the fields of each result that do not depend on time, in the order of :func:`finish_walk`."""
    return [
        (
            result.index, result.seed, result.episode_return, result.length, result.terminated, result.truncated,
            result.info, result.error,
        )
        for result in results
    ]  # fmt: skip


def save_midway(count: int, **kwargs: Any) -> tuple[list[Any], list[tuple[int, int]]]:
    """Return snapshots that were taken in the middle of walks, and the seed and the number of steps that lead to each."""
    snapshots, starts = [], []
    fns = make_walk_fns(1, longest=LONGEST, **kwargs)
    with open_engine(fns, num_workers=0, autoreset_mode=AutoresetMode.DISABLED) as envs:
        for seed in range(SEED, SEED + 3 * count):
            envs.reset(seed=seed)
            steps = (seed - SEED) % 5
            ended = False
            for _ in range(steps):
                if not ended:
                    ended = np.any(envs.step([1])[2:4])
            if not ended and len(starts) < count:
                snapshots += envs.save(verify=False)
                starts.append((seed, steps))
    assert len(starts) == count
    return snapshots, starts


def expected_results_from(starts: list[tuple[int, int]], seed: int = SEED) -> list[Any]:
    """Return the results of a plain loop over one environment. The steps that lead to a start are not part of the result."""
    env, results = Walk(longest=LONGEST), []
    for index, (episode_seed, steps) in enumerate(starts):
        observation = env.reset(seed=episode_seed)[0]
        for _ in range(steps):
            observation = env.step(1)[0]
        results.append(finish_walk(env, observation, index, seed, None))
    return results
