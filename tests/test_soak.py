"""Slow leaks: row 45 of the table in ``docs/faults.md``. Run with ``pytest -m soak``."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest

import vecenv

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800, method="signal")]

CYCLES = 1_000
STEPS = 1_000_000
MIB = 2**20


def belongings() -> dict[str, int]:
    """Numbers that must not grow."""
    gc.collect()
    own = psutil.Process()
    return {
        "descriptors": own.num_fds(),
        "threads": own.num_threads(),
        "python threads": threading.active_count(),
        "processes": len(own.children(recursive=True)),
        "/dev/shm entries": len(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else 0,
        "mappings": len(own.memory_maps(grouped=False)),
    }


def resident() -> float:
    """MiB of this process."""
    return psutil.Process().memory_info().rss / MIB


def flat(samples: list[float], allowed: float) -> bool:
    """Whether the second half of a series is not above the first by more than ``allowed``: growth, not noise."""
    middle = len(samples) // 2
    return float(np.median(samples[middle:]) - np.median(samples[:middle])) <= allowed


class Small(gym.Env):
    """Costs nothing; one episode is 100 steps; every tenth step has an info."""

    observation_space = gym.spaces.Box(-1, 1, (8,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.count = 0
        self.row = np.zeros(8, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        return self.row, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.count += 1
        return self.row, 1.0, self.count % 100 == 0, False, {"count": self.count} if self.count % 10 == 0 else {}


def open_and_close(context: str) -> None:
    envs = vecenv.AsyncVectorEnv([Small] * 2, context=context)
    envs.reset(seed=1)
    envs.step([0, 1])
    envs.close()


@pytest.mark.parametrize(("context", "cycles"), [("fork", CYCLES), ("forkserver", CYCLES), ("spawn", 20)])
def test_soak(context: str, cycles: int) -> None:
    """Open, step, close, a thousand times: everything that can be counted is the same after as before."""
    for _ in range(5):
        open_and_close(context)
    before = belongings()
    memory = []
    for cycle in range(cycles):
        open_and_close(context)
        if cycle % max(1, cycles // 50) == 0:
            memory.append(resident())
    after = belongings()
    growth = {name: after[name] - before[name] for name in before if after[name] > before[name]}
    growth.pop("mappings", None) if growth.get("mappings", 0) <= 4 else None  # the allocator's own arenas
    assert not growth, f"after {cycles} cycles: {growth}"
    assert flat(memory, allowed=4), f"resident memory over time, MiB: {[round(size) for size in memory]}"


def test_soak_in_a_failing_constructor() -> None:
    """Engines that never came to be leave nothing either."""

    def fail() -> gym.Env:
        raise LookupError("no such environment")

    def attempt() -> None:
        with pytest.raises(LookupError):
            vecenv.AsyncVectorEnv([Small, fail], context="fork")

    for _ in range(5):
        attempt()
    before = belongings()
    for _ in range(CYCLES // 5):
        attempt()
    after = belongings()
    assert {name: after[name] for name in after if name != "mappings"} == {
        name: before[name] for name in before if name != "mappings"
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_soak_steps(workers: int) -> None:
    """A million steps: the trainer's memory is flat, and so is every worker's."""
    envs = vecenv.AsyncVectorEnv([Small] * 8, num_workers=workers, context="fork")
    try:
        envs.reset(seed=1)
        pids = [pid for worker in envs._pool.workers if (pid := worker.pid) != os.getpid()] if workers else []
        actions = np.zeros(8, np.int64)
        series: dict[int, list[float]] = {pid: [] for pid in (os.getpid(), *pids)}
        steps = STEPS // 8
        for step in range(steps):
            envs.step(actions)
            if step % (steps // 50) == 0:
                for pid, samples in series.items():
                    samples.append(psutil.Process(pid).memory_info().rss / MIB)
        assert [worker.pid for worker in envs._pool.workers if worker.pid != os.getpid()] == pids or not workers
        for pid, samples in series.items():
            assert flat(samples[5:], allowed=2), f"pid {pid}: {[round(size, 1) for size in samples]}"
    finally:
        envs.close()


def test_soak_restarts(tmp_path: Any) -> None:
    """Hundreds of restarts in one engine: nothing of the dead stays."""
    from vecenv.testing.faulty import FaultyEnv

    def crashing() -> gym.Env:
        return FaultyEnv(Small(), "kill", step=2)

    envs = vecenv.AsyncVectorEnv(
        [Small, crashing], context="fork", on_failure="restart", restart_limit=10**6, restart_period=1e6
    )
    try:
        envs.reset(seed=1)
        step(envs, 20)
        before = belongings()
        step(envs, 400)
        assert belongings()["descriptors"] <= before["descriptors"]
        assert belongings()["processes"] <= before["processes"]
        assert belongings()["threads"] <= before["threads"]
    finally:
        envs.close()


def step(envs: Any, count: int) -> None:
    for _ in range(count):
        envs.step([0, 0])
