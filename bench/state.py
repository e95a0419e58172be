"""Measures how long saving and loading take, and the size of snapshots.

    python bench/state.py             # 64 CartPoles; 4 HalfCheetahs, Humanoids and Pongs, if MuJoCo and ALE are installed

The engine steps in this process, and with two workers. The table shows the shortest of several calls, without the
verification of the first snapshot.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
from collections.abc import Callable
from contextlib import closing
from typing import Any

import gymnasium

import vecenv
from bench import seconds_per_unit

CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "CartPole": ("CartPole-v1", 64, ()),
    "HalfCheetah": ("HalfCheetah-v5", 4, ("mujoco",)),
    "Humanoid": ("Humanoid-v5", 4, ("mujoco",)),
    "Pong": ("ALE/Pong-v5", 4, ("ale_py",)),
}


def fastest_ms(call: Callable[[], Any], tries: int) -> float:
    """Call a function several times, and return the milliseconds of the fastest call."""
    return min(seconds_per_unit(1, call) for _ in range(tries)) * 1e3


def measure(env_id: str, num_envs: int, num_workers: int, tries: int) -> tuple[float, float, float, int]:
    """Return the milliseconds to step, save and load all environments, and the bytes of one snapshot."""
    env_fns = [functools.partial(gymnasium.make, env_id)] * num_envs
    with closing(vecenv.AsyncVectorEnv(env_fns, num_workers=num_workers)) as envs:
        envs.reset(seed=0)
        for _ in range(5):
            envs.step(envs.action_space.sample())
        snapshots = envs.save()
        action = envs.action_space.sample()
        step_ms = fastest_ms(lambda: envs.step(action), tries)
        return step_ms, fastest_ms(envs.save, tries), fastest_ms(lambda: envs.load(snapshots), tries), snapshots[0].nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--tries", type=int, default=30, help="number of calls, of which the fastest counts")
    parser.add_argument("--only", choices=CASES, help="measure only this environment")
    options = parser.parse_args()
    times_header = "".join(f"{name:>10}" for name in ("step ms", "save ms", "load ms"))
    print(f"{'environment':14}{'rows':>5}{'workers':>9}{times_header}{'save + load ms/row':>20}{'bytes/row':>13}")
    for name, (env_id, rows, modules) in CASES.items():
        if options.only not in (None, name) or not all(importlib.util.find_spec(module) for module in modules):
            continue
        if "ale_py" in modules:
            import ale_py

            gymnasium.register_envs(ale_py)
        for workers in (0, 2):
            step_ms, save_ms, load_ms, size = measure(env_id, rows, workers, options.tries)
            per_row = f"{save_ms / rows:.3f} + {load_ms / rows:.3f}"
            print(f"{name:14}{rows:5}{workers:9}{step_ms:10.2f}{save_ms:10.2f}{load_ms:10.2f}{per_row:>20}{size:13,}")


if __name__ == "__main__":
    main()
