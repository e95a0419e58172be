"""A program that prints, even if it was started without standard descriptors: ``closed_output.py METHOD LOG``.

It appends the exit codes of its workers to the file ``LOG``.
"""

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
    """An environment that prints in each step: from Python, from C, and to each open standard descriptor."""

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
        with contextlib.suppress(OSError):  # the descriptor may be closed, or the reading end of a pipe
            os.write(descriptor, b"!")


def main(method: str, log: str) -> None:
    exit_codes = []
    for options in ({}, {"num_workers": "auto"}):
        envs = vecenv.AsyncVectorEnv([PrintingEnv, PrintingEnv], context=method, **options)
        workers = list(envs._pool.processes)
        envs.reset(seed=1)
        for _ in range(3):
            write_to_all_outputs()
            observations, rewards, *_ = envs.step(np.zeros(2, np.int64))
            assert observations.tolist() == [[0.5], [0.5]], observations
            assert rewards.tolist() == [1, 1], rewards
        envs.close()
        exit_codes += [worker.exitcode for worker in workers]
    with open(log, "a") as file:
        file.write(repr(exit_codes))


if __name__ == "__main__":
    main(*sys.argv[1:])
