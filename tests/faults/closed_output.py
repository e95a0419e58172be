"""A program that prints although it may have been started without standard descriptors: ``METHOD LOG``."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from typing import Any

import gymnasium
import numpy as np

import vecenv


class PrintingEnv(gymnasium.Env[Any, Any]):
    """An environment with steps that print from Python, from C, and to each standard descriptor that is open."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        write_to_all_outputs()
        return np.full(1, 0.5, np.float32), 1.0, False, False, {}


def write_to_all_outputs() -> None:
    print("Python prints", flush=True)
    libc = ctypes.CDLL(None)
    libc.puts(b"C prints")
    libc.fflush(None)
    for descriptor in range(3):
        with contextlib.suppress(OSError):  # it is closed, or the reading end of a pipe
            os.write(descriptor, b"!")


def main(method: str, log: str) -> None:
    codes = []
    for kwargs in ({}, {"num_workers": "auto"}):
        envs = vecenv.AsyncVectorEnv([PrintingEnv, PrintingEnv], context=method, **kwargs)
        workers = list(envs._pool.processes)
        envs.reset(seed=1)
        for _ in range(3):
            write_to_all_outputs()
            observations, rewards, *_ = envs.step(np.zeros(2, np.int64))
            assert observations.tolist() == [[0.5], [0.5]], observations
            assert rewards.tolist() == [1, 1], rewards
        envs.close()
        codes += [worker.exitcode for worker in workers]
    with open(log, "a") as file:
        file.write(repr(codes))


if __name__ == "__main__":
    main(*sys.argv[1:])
