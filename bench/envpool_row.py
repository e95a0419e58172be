"""The same task through processes and through EnvPool's threads, one argument apart: the README's row.

``python bench/envpool_row.py`` steps both in turns and prints medians and spreads of steps per second. CartPole is the same
game in both. Pong is the same emulator; Gymnasium's wrappers stand in for the preprocessing that EnvPool does in C++.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import ale_py
import gymnasium as gym
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

import vecenv
from vecenv.tools.benchmark import Summary, take_turns
from vecenv.tools.runners import run_for

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


def stepping(envs: Any) -> Callable[[], int]:
    """A step of all environments, with random actions drawn beforehand; returns how many there are."""
    envs.action_space.seed(0)
    envs.reset(seed=0)
    actions = itertools.cycle([envs.action_space.sample() for _ in range(32)])
    return lambda: len(envs.step(next(actions))[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    for task, make in ROWS.items():
        engines = {backend: make(backend, options.num_envs) for backend in ("process", "envpool")}
        steps = {backend: stepping(envs) for backend, envs in engines.items()}
        for step in steps.values():
            run_for(step, options.seconds / 4)
        turns = {backend: functools.partial(run_for, step, options.seconds) for backend, step in steps.items()}
        found = take_turns(turns, options.repeats)
        for backend, rates in found.items():
            spread = f"{min(rates):,.0f} - {max(rates):,.0f}"
            print(f"{task:<12} {backend:<8} {statistics.median(rates):>10,.0f} steps/s  ({spread})")
            engines[backend].close()
        ratio = Summary.of_ratios(found["envpool"], found["process"])
        print(f"{task:<12} envpool over process: {ratio.median if ratio else 0:.1f}x")


if __name__ == "__main__":
    main()
