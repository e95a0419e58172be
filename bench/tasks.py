"""Compares many tasks in one pool of workers with one vector environment per task: ``python -m bench.tasks``.

``vecenv.evaluate`` runs 10 episodes of each of 40 tasks, alternately in one vector environment with ``vecenv.EnvChoice`` and
in one vector environment per task. A task takes 0.3 s to build, and an episode has 60 to 300 steps of 1 ms. The work is the
time that the steps take inside the environments, plus one build per task. The table shows the wall time divided by
(work / workers), which is 1 if no worker ever waits or builds a task twice.

    python -m bench.tasks --num-envs 16 --workers 2 --rounds 3
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from rich.console import Console
from rich.table import Table

import vecenv
from bench import run_interleaved


class Task(gymnasium.Env[Any, Any]):
    """A task that takes ``build`` seconds to build and ``step`` seconds per step. The seed determines the episode length."""

    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, build: float, step: float, shortest: int, longest: int) -> None:
        start = time.perf_counter()
        time.sleep(build)
        self._build_seconds = time.perf_counter() - start  # the actual duration
        self._step_seconds, self._length_range = step, (shortest, longest + 1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._spent_seconds = 0.0
        self._remaining = int(self.np_random.integers(*self._length_range))
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        start = time.perf_counter()
        time.sleep(self._step_seconds)
        self._remaining -= 1
        self._spent_seconds += time.perf_counter() - start
        is_over = self._remaining == 0
        info = {"spent": self._spent_seconds, "build": self._build_seconds} if is_over else {}
        return np.zeros(4, np.float32), 1.0, is_over, False, info


def _zero_policy(observations: Any) -> Any:
    return np.zeros(len(observations), np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--episodes", type=int, default=10, help="per task")
    parser.add_argument("--build", type=float, default=0.3, help="seconds per build")
    parser.add_argument("--step", type=float, default=0.001, help="seconds per step")
    parser.add_argument("--lengths", type=int, nargs=2, default=[60, 300], help="shortest and longest episode, in steps")
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    env_fn = partial(Task, options.build, options.step, *options.lengths)
    tasks = {f"task-{number}": env_fn for number in range(options.tasks)}
    seeds = range(options.episodes)

    def run_in_pool() -> Any:
        vector_kwargs = {"num_workers": options.workers, "batch_size": "auto"}  # workers step while the policy acts
        envs = vecenv.make_vec(vecenv.EnvChoice(tasks), options.num_envs, vector_kwargs=vector_kwargs)
        try:
            return vecenv.evaluate(
                envs, _zero_policy, [vecenv.Episode(env=name, seed=seed) for name in tasks for seed in seeds]
            )
        finally:
            envs.close()

    def run_task_by_task() -> Any:
        results = []
        for env_fn in tasks.values():
            envs = vecenv.make_vec(env_fn, options.num_envs, vector_kwargs={"num_workers": options.workers})
            try:
                results += vecenv.evaluate(envs, _zero_policy, [vecenv.Episode(seed=seed) for seed in seeds])
            finally:
                envs.close()
        return results

    def measure(run: Callable[[], Any]) -> tuple[float, float]:
        """Return the wall time of a run in seconds, and its ratio to (work / workers)."""
        start = time.perf_counter()
        results = run()
        seconds = time.perf_counter() - start
        build_seconds = statistics.mean(result.info["build"] for result in results)
        work = options.tasks * build_seconds + sum(result.info["spent"] for result in results)
        return seconds, seconds * options.workers / work

    results = run_interleaved(
        {"EnvChoice": partial(measure, run_in_pool), "one per task": partial(measure, run_task_by_task)}, options.rounds
    )
    table = Table("", "wall time / (work / workers)", "seconds")
    for name, rounds in results.items():
        seconds = statistics.median(seconds for seconds, _ in rounds)
        ratios = [ratio for _, ratio in rounds]
        table.add_row(name, f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})", f"{seconds:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
