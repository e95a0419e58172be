"""A training program, as small as can be: ``python trainer.py scenario method folder``.

It starts an engine, says so on standard output (a line of JSON with everybody's pid), and then is in whatever
situation the scenario's name says, for the test to do something to it.
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
from vandals import Announce, crew, vandal

import vecenv
from vecenv.testing.faulty import NestedEnv

ACTIONS = [1, 1, 1]


def say(**what: Any) -> None:
    print(json.dumps({"trainer": os.getpid(), **what}), flush=True)


def pids(envs: vecenv.AsyncVectorEnv) -> list[int]:
    return [worker.pid for worker in envs._pool.workers]


def start(method: str, folder: Path, fault: str | None = None, **options: Any) -> vecenv.AsyncVectorEnv:
    """Three environments; with a fault, the last one commits it in its first step, after saying so with a file."""
    vandals = {2: vandal(2, Announce(folder / "begun", fault), step=1)} if fault else None
    envs = vecenv.AsyncVectorEnv(crew(3, vandals), context=method, **options)
    envs.reset(seed=1)
    return envs


def waiting(method: str, folder: Path) -> None:
    """Between two calls."""
    envs = start(method, folder)
    say(workers=pids(envs))
    time.sleep(60)


def stepping(method: str, folder: Path, fault: str = "sleep") -> None:
    """In a step that one environment does not finish."""
    envs = start(method, folder, fault)
    say(workers=pids(envs))
    envs.step(ACTIONS)


def gil(method: str, folder: Path) -> None:
    """The same, in C code that keeps the interpreter's lock."""
    stepping(method, folder, "hold_gil")


def family(method: str, folder: Path) -> None:
    """Between two calls, after an environment has started a program."""
    envs = start(method, folder, "start_subprocess")
    *_, infos = envs.step(ACTIONS)
    say(workers=pids(envs), helpers=[int(infos["subprocess"][2])])
    time.sleep(60)


def nested(method: str, folder: Path) -> None:
    """Between two calls, with an engine inside an environment."""
    inner = partial(vecenv.AsyncVectorEnv, crew(2), context=method)
    envs = vecenv.AsyncVectorEnv([partial(NestedEnv, inner)] * 2, context=method, daemon=False)
    envs.reset(seed=1)
    say(workers=pids(envs))
    time.sleep(60)


def interrupted(method: str, folder: Path) -> None:
    """In a step, at a terminal: somebody will press Ctrl-C."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    envs = start(method, folder, "sleep")
    say(workers=pids(envs))
    interrupts = 0
    try:
        envs.step(ACTIONS)
    except KeyboardInterrupt:
        interrupts += 1
    begun = time.monotonic()
    envs.close(timeout=0.2)
    say(interrupts=interrupts, closed=envs.closed, seconds=time.monotonic() - begun)


def interrupted_then_on(method: str, folder: Path) -> None:
    """As above, but the step is only slow, and training goes on: the answer is still pending."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    envs = vecenv.AsyncVectorEnv(crew(3, delay=1.0), context=method)
    envs.reset(seed=1)
    say(workers=pids(envs))
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
    say(interrupts=interrupts, ticks=ticks, closed=envs.closed)


def pending(method: str, folder: Path) -> None:
    """At the end of the program, with a step that will not end, and nobody closes anything."""
    envs = start(method, folder, "sleep")
    envs.step_async(ACTIONS)
    while not (folder / "begun").exists():
        time.sleep(0.01)
    say(workers=pids(envs), ended=time.monotonic())


def raised(method: str, folder: Path) -> None:
    """Ended by an exception of its own, in the middle of a step."""
    envs = start(method, folder, "sleep")
    envs.step_async(ACTIONS)
    say(workers=pids(envs), ended=time.monotonic())
    raise SystemExit(9)


class Big(gym.Env):
    """Four MiB an observation."""

    observation_space = gym.spaces.Box(0, 255, (4 * 2**20,), np.uint8)
    action_space = gym.spaces.Discrete(256)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return np.zeros((4 * 2**20,), np.uint8), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        return np.full((4 * 2**20,), action, np.uint8), 0.0, False, False, {}


def small_shm(method: str, folder: Path) -> None:
    """/dev/shm is smaller than one observation."""
    size = os.statvfs("/dev/shm")
    try:
        envs = vecenv.AsyncVectorEnv([Big, Big], context=method)
    except vecenv.errors.ArenaError as error:
        say(shm=size.f_blocks * size.f_frsize, refused=str(error))
        return
    envs.reset(seed=1)
    observations = envs.step([7, 8])[0]
    right = bool((observations[0] == 7).all() and (observations[1] == 8).all())
    used = size.f_blocks - os.statvfs("/dev/shm").f_bfree
    on_disk = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/tmp/" in line and "rw-s" in line]
    envs.close()
    say(shm=size.f_blocks * size.f_frsize, right=right, used=used * size.f_frsize, on_disk=on_disk)


SCENARIOS: dict[str, Callable[[str, Path], None]] = {
    scenario.__name__: scenario
    for scenario in (
        *(waiting, stepping, gil, family, nested),
        *(interrupted, interrupted_then_on, pending, raised, small_shm),
    )
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
