"""Measures the time of saving and loading, and the size of snapshots.

    python bench/state.py             # 64 CartPoles; 4 HalfCheetahs, Humanoids and Pongs, where MuJoCo and ALE are installed

The table shows the best of several tries; the verification of the first snapshot is not included. The engine runs in this
process, and with two workers.
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
from bench import seconds_per

CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "CartPole": ("CartPole-v1", 64, ()),
    "HalfCheetah": ("HalfCheetah-v5", 4, ("mujoco",)),
    "Humanoid": ("Humanoid-v5", 4, ("mujoco",)),
    "Pong": ("ALE/Pong-v5", 4, ("ale_py",)),
}


def best_ms(call: Callable[[], Any], tries: int) -> float:
    """Return the milliseconds of the fastest call."""
    return min(seconds_per(1, call) for _ in range(tries)) * 1e3


def measure(env_id: str, num_envs: int, num_workers: int, tries: int) -> tuple[float, float, float, int]:
    """Return the milliseconds for stepping, saving and loading all environments, and the bytes of one snapshot."""
    env_fns = [functools.partial(gymnasium.make, env_id)] * num_envs
    with closing(vecenv.AsyncVectorEnv(env_fns, num_workers=num_workers)) as envs:
        envs.reset(seed=0)
        for _ in range(5):
            envs.step(envs.action_space.sample())
        snapshots = envs.save()
        action = envs.action_space.sample()
        stepping = best_ms(lambda: envs.step(action), tries)
        return stepping, best_ms(envs.save, tries), best_ms(lambda: envs.load(snapshots), tries), snapshots[0].nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--tries", type=int, default=30, help="attempts; the best one counts")
    parser.add_argument("--only", choices=CASES, help="one of the environments")
    options = parser.parse_args()
    head = "".join(f"{name:>10}" for name in ("step ms", "save ms", "load ms"))
    print(f"{'environment':14}{'rows':>5}{'workers':>9}{head}{'save + load ms/row':>20}{'bytes/row':>13}")
    for name, (env_id, rows, needs) in CASES.items():
        if options.only not in (None, name) or not all(importlib.util.find_spec(need) for need in needs):
            continue
        if "ale_py" in needs:
            import ale_py

            gymnasium.register_envs(ale_py)
        for workers in (0, 2):
            stepping, saving, loading, size = measure(env_id, rows, workers, options.tries)
            per_row = f"{saving / rows:.3f} + {loading / rows:.3f}"
            print(f"{name:14}{rows:5}{workers:9}{stepping:10.2f}{saving:10.2f}{loading:10.2f}{per_row:>20}{size:13,}")


if __name__ == "__main__":
    main()
