"""The same task through processes and through EnvPool's threads, one argument apart: the README's row.

``python bench/envpool_row.py`` steps both in turns and prints medians and spreads of steps per second. CartPole is the same
game in both. Pong is the same emulator; Gymnasium's wrappers stand in for the preprocessing that EnvPool does in C++.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import ale_py
import gymnasium as gym
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

import vecenv

gym.register_envs(ale_py)

PONG = [functools.partial(AtariPreprocessing, noop_max=30), functools.partial(FrameStackObservation, stack_size=4)]
ROWS: dict[str, Callable[[str, int], Any]] = {
    "CartPole-v1": lambda backend, n: vecenv.make_vec("CartPole-v1", num_envs=n, backend=backend),
    "Pong-v5": lambda backend, n: (
        vecenv.make_vec("Pong-v5", num_envs=n, backend="envpool")
        if backend == "envpool"
        else vecenv.make_vec("ALE/Pong-v5", num_envs=n, backend=backend, wrappers=PONG, frameskip=1)
    ),
}


def rate(envs: Any, seconds: float) -> float:
    """Environment steps per second, with random actions drawn beforehand."""
    actions = [envs.action_space.sample() for _ in range(32)]
    count, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds:
        envs.step(actions[count % 32])
        count += 1
    return float(count * envs.num_envs / elapsed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    for task, make in ROWS.items():
        engines = {backend: make(backend, options.num_envs) for backend in ("process", "envpool")}
        found: dict[str, list[float]] = {backend: [] for backend in engines}
        for envs in engines.values():
            envs.action_space.seed(0)
            envs.reset(seed=0)
            rate(envs, options.seconds / 4)
        for _ in range(options.repeats):
            for backend, envs in engines.items():
                found[backend].append(rate(envs, options.seconds))
        ratio = statistics.median(b / a for a, b in zip(found["process"], found["envpool"], strict=True))
        for backend, rates in found.items():
            spread = f"{min(rates):,.0f} - {max(rates):,.0f}"
            print(f"{task:<12} {backend:<8} {statistics.median(rates):>10,.0f} steps/s  ({spread})")
            engines[backend].close()
        print(f"{task:<12} envpool over process: {ratio:.1f}x")


if __name__ == "__main__":
    main()
