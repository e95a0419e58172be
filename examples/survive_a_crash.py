"""An environment crashes its worker with a segmentation fault, and the program continues.

    python examples/survive_a_crash.py

Sixteen environments run in eight worker processes. Environment 7 has a bug like those of C extensions: its 40th step reads
from address 0. The kernel kills its worker, and the log names the environment and the line of Python. Both environments of
that worker are rebuilt, their episodes count as truncated, and the next step is a normal one.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from vecenv import AsyncVectorEnv

STEPS = 42


class Robot(gym.Env[np.ndarray, np.int64]):
    """An environment with a bug in its simulator."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, index: int) -> None:
        self.index = index

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(3, np.float32), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.index == 7 and self.steps == 40:
            ctypes.string_at(0)  # a segmentation fault
        return np.full(3, self.steps / STEPS, np.float32), 1.0, False, False, {}


def main() -> None:
    """Step the environments, and print the results around the crash."""
    envs = AsyncVectorEnv(
        [partial(Robot, index) for index in range(16)], num_workers=8, on_failure="restart", autoreset_mode="SameStep"
    )
    envs.reset(seed=1)
    for step in range(1, STEPS + 1):
        _, rewards, _, truncations, infos = envs.step(np.zeros(16, np.int64))
        if "restarted" in infos:
            restarted = np.flatnonzero(infos["restarted"]).tolist()
            print(f"step {step}: envs {restarted} restarted, {truncations.sum()} episodes truncated", flush=True)
        elif step in (39, 41):
            print(f"step {step}: 16 environments, mean reward {rewards.mean()}", flush=True)
    envs.close()


if __name__ == "__main__":
    main()
