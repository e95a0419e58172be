"""A minimal training program: ``python trainer.py scenario method folder``.

It starts an engine, prints a line of JSON with the pids of its workers, and runs the scenario. A test then kills or
interrupts it, or waits for its end.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import termios
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from faulty_envs import faulty_env_fn, make_env_fns, write_pid_then

import vecenv
from vecenv.testing.faulty import NestedEnv

ACTIONS = [1, 1, 1]


def report_json(**fields: Any) -> None:
    print(json.dumps({"trainer": os.getpid(), **fields}), flush=True)


def list_worker_pids(envs: vecenv.AsyncVectorEnv) -> list[int]:
    return [worker.pid for worker in envs._pool.workers]


def start_engine(method: str, folder: Path, fault: str | None = None, **options: Any) -> vecenv.AsyncVectorEnv:
    """Start three environments. With a ``fault``, the last one creates the file ``begun`` in its first step, then fails."""
    replacements = {2: faulty_env_fn(2, write_pid_then(folder / "begun", fault), step=1)} if fault else None
    envs = vecenv.AsyncVectorEnv(make_env_fns(3, replacements), context=method, **options)
    envs.reset(seed=1)
    return envs


def wait_between_calls(method: str, folder: Path) -> None:
    """Wait between two calls."""
    envs = start_engine(method, folder)
    report_json(workers=list_worker_pids(envs))
    time.sleep(60)


def hang_in_step(method: str, folder: Path, fault: str = "sleep") -> None:
    """Take a step that hangs in one environment."""
    envs = start_engine(method, folder, fault)
    report_json(workers=list_worker_pids(envs))
    envs.step(ACTIONS)


def hang_in_c_code(method: str, folder: Path) -> None:
    """Take a step that hangs in C code of one environment, which holds the GIL."""
    hang_in_step(method, folder, "hold_gil")


def wait_with_helper(method: str, folder: Path) -> None:
    """Wait between two calls, while a program that an environment started is running."""
    envs = start_engine(method, folder, "start_subprocess")
    *_, infos = envs.step(ACTIONS)
    report_json(workers=list_worker_pids(envs), helpers=[int(infos["subprocess"][2])])
    time.sleep(60)


def wait_with_nested_engine(method: str, folder: Path) -> None:
    """Wait between two calls, with an engine inside an environment."""
    make_inner_engine = partial(vecenv.AsyncVectorEnv, make_env_fns(2), context=method)
    envs = vecenv.AsyncVectorEnv([partial(NestedEnv, make_inner_engine)] * 2, context=method, daemon=False)
    envs.reset(seed=1)
    report_json(workers=list_worker_pids(envs))
    time.sleep(60)


def close_after_ctrl_c(method: str, folder: Path) -> None:
    """Wait in a step for Ctrl-C, then close the engine."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C at the terminal now sends SIGINT to this program and its workers
    envs = start_engine(method, folder, "sleep")
    report_json(workers=list_worker_pids(envs))
    interrupts = 0
    try:
        envs.step(ACTIONS)
    except KeyboardInterrupt:
        interrupts += 1
    started_at = time.monotonic()
    envs.close(timeout=0.2)
    report_json(interrupts=interrupts, closed=envs.closed, seconds=time.monotonic() - started_at)


def continue_after_ctrl_c(method: str, folder: Path) -> None:
    """Wait in a slow step for Ctrl-C, then wait again for its result."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    envs = vecenv.AsyncVectorEnv(make_env_fns(3, delay=1.0), context=method)
    envs.reset(seed=1)
    report_json(workers=list_worker_pids(envs))
    interrupts = 0
    try:
        (folder / "begun").touch()
        envs.step_async(ACTIONS)
        envs.step_wait()
    except KeyboardInterrupt:
        interrupts += 1
        observations = envs.step_wait()[0]
    envs.close()
    ticks = [vecenv.testing.faulty.WitnessEnv.read(row)["tick"] for row in observations]
    report_json(interrupts=interrupts, ticks=ticks, closed=envs.closed)


def exit_during_step(method: str, folder: Path) -> None:
    """End without ``close()`` while a step hangs."""
    envs = start_engine(method, folder, "sleep")
    envs.step_async(ACTIONS)
    while not (folder / "begun").exists():
        time.sleep(0.01)
    report_json(workers=list_worker_pids(envs), ended=time.monotonic())


def raise_during_step(method: str, folder: Path) -> None:
    """End with ``SystemExit`` while a step hangs."""
    envs = start_engine(method, folder, "sleep")
    envs.step_async(ACTIONS)
    report_json(workers=list_worker_pids(envs), ended=time.monotonic())
    raise SystemExit(9)


class LargeObservationEnv(gym.Env):
    """An environment with observations of 4 MiB."""

    observation_space = gym.spaces.Box(0, 255, (4 * 2**20,), np.uint8)
    action_space = gym.spaces.Discrete(256)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return np.zeros((4 * 2**20,), np.uint8), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        return np.full((4 * 2**20,), action, np.uint8), 0.0, False, False, {}


def use_small_shm(method: str, folder: Path) -> None:
    """Take a step with a /dev/shm that is smaller than one observation, and report how much of it is used."""
    file_system = os.statvfs("/dev/shm")
    size = file_system.f_blocks * file_system.f_frsize
    try:
        envs = vecenv.AsyncVectorEnv([LargeObservationEnv] * 2, context=method)
    except vecenv.errors.ArenaError as error:
        report_json(shm=size, refused=str(error))
        return
    envs.reset(seed=1)
    observations = envs.step([7, 8])[0]
    correct = bool((observations[0] == 7).all() and (observations[1] == 8).all())
    used = size - os.statvfs("/dev/shm").f_bfree * file_system.f_frsize
    on_disk = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/tmp/" in line and "rw-s" in line]
    envs.close()
    report_json(shm=size, correct=correct, used=used, on_disk=on_disk)


SCENARIOS: dict[str, Callable[[str, Path], None]] = {
    scenario.__name__: scenario
    for scenario in (
        wait_between_calls, hang_in_step, hang_in_c_code, wait_with_helper, wait_with_nested_engine, close_after_ctrl_c,
        continue_after_ctrl_c, exit_during_step, raise_during_step, use_small_shm,
    )
}  # fmt: skip

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
