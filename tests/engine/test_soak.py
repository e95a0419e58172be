"""Slow leaks, row 45 of the table in ``FAULTS.md``. ``pytest -m soak`` runs the tests; short versions are ``long``."""

from __future__ import annotations

import functools
import gc
import os
import random
import threading
import tracemalloc
import weakref
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
from envs import ready_engine

import vecenv

pytestmark = pytest.mark.timeout(1800, method="signal")
soak = pytest.mark.soak

CYCLES = 1_000
STEPS = 1_000_000
MIB = 2**20


def resource_counts() -> dict[str, int]:
    """Return the counts of resources that must not grow."""
    gc.collect()
    process = psutil.Process()
    return {
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "python threads": threading.active_count(),
        "processes": len(process.children(recursive=True)),
        "/dev/shm entries": len(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else 0,
        "mappings": len(process.memory_maps(grouped=False)),
    }


def resident_mib() -> float:
    """Return the resident memory of this process in MiB."""
    return psutil.Process().memory_info().rss / MIB


def is_flat(samples: list[float], allowed: float) -> bool:
    """True if the median of the second half of a series exceeds that of the first by at most ``allowed``."""
    middle = len(samples) // 2
    return float(np.median(samples[middle:]) - np.median(samples[:middle])) <= allowed


class CheapEnv(gym.Env):
    """An environment that does almost nothing. Episodes have 100 steps, and every tenth step has an info."""

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
    envs = vecenv.AsyncVectorEnv([CheapEnv] * 2, context=context)
    envs.reset(seed=1)
    envs.step([0, 1])
    envs.close()


@soak
@pytest.mark.parametrize(("context", "cycles"), [("fork", CYCLES), ("forkserver", CYCLES), ("spawn", 20)])
def test_soak(context: str, cycles: int) -> None:
    """A thousand engines are opened, stepped and closed. Afterwards no resource count has grown."""
    for _ in range(5):
        open_and_close(context)
    before = resource_counts()
    memory = []
    for cycle in range(cycles):
        open_and_close(context)
        if cycle % max(1, cycles // 50) == 0:
            memory.append(resident_mib())
    after = resource_counts()
    growth = {name: after[name] - before[name] for name in before if after[name] > before[name]}
    # the allocator may add arenas, and other programs may add files to /dev/shm
    for name, tolerated in (("mappings", 4), ("/dev/shm entries", cycles // 10)):
        if growth.get(name, 0) <= tolerated:
            growth.pop(name, None)
    assert not growth, f"after {cycles} cycles: {growth}"
    assert is_flat(memory, allowed=4), f"resident memory over time, MiB: {[round(size) for size in memory]}"


@soak
def test_soak_in_a_failing_constructor() -> None:
    """Engines leave no resource if their constructor raises."""

    def fail() -> gym.Env:
        raise LookupError("no such environment")

    def attempt() -> None:
        with pytest.raises(LookupError):
            vecenv.AsyncVectorEnv([CheapEnv, fail], context="fork")

    for _ in range(5):
        attempt()
    before = resource_counts()
    for _ in range(CYCLES // 5):
        attempt()
    after = resource_counts()
    assert {name: after[name] for name in after if name != "mappings"} == {
        name: before[name] for name in before if name != "mappings"
    }


@soak
@pytest.mark.parametrize("workers", [0, 2])
def test_soak_steps(workers: int) -> None:
    """Over a million steps, the memory of the caller and of every worker stays flat."""
    with ready_engine([CheapEnv] * 8, num_workers=workers, context="fork") as envs:
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
            assert is_flat(samples[5:], allowed=2), f"pid {pid}: {[round(size, 1) for size in samples]}"


@soak
def test_soak_restarts(tmp_path: Any) -> None:
    """Hundreds of restarts in one engine leave no descriptor, process or thread."""
    from vecenv.testing.faulty import FaultyEnv

    def crashing() -> gym.Env:
        return FaultyEnv(CheapEnv(), "kill", step=2)

    with ready_engine([CheapEnv, crashing], context="fork", on_failure=vecenv.Restart(10**6, 1e6)) as envs:
        step(envs, 20)
        before = resource_counts()
        step(envs, 400)
        assert resource_counts()["descriptors"] <= before["descriptors"]
        assert resource_counts()["processes"] <= before["processes"]
        assert resource_counts()["threads"] <= before["threads"]


def step(envs: Any, count: int) -> None:
    for _ in range(count):
        envs.step([0, 0])


# --- memory that must be freed ------------------------------------------------------------------


class RandomInfoKeys(CheapEnv):
    """An environment with a random subset of five keys in its infos. The sets of keys in a batch hardly ever repeat."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.rng = random.Random(index)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.count += 1
        bits = self.rng.getrandbits(5)
        info = {f"key {bit}": self.count + bit for bit in range(5) if bits >> bit & 1}
        return self.row, 1.0, self.count % 100 == 0, False, info


class RaisingEnv(CheapEnv):
    """An environment that raises for action 1."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        if action:
            raise ValueError("this action raises")
        return super().step(action)


@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "steps"), [pytest.param(0, STEPS, marks=soak), pytest.param(2, STEPS, marks=soak), (0, 12_000)]
)
def test_memory_is_flat_with_changing_info_keys(workers: int, steps: int) -> None:
    """There are thousands of combinations of keys, so none may be cached for long.

    A short run measures the Python objects of the caller, a long run the resident memory of every process.
    """
    envs = vecenv.AsyncVectorEnv(
        [functools.partial(RandomInfoKeys, index) for index in range(8)], num_workers=workers, context="fork"
    )
    short = steps < STEPS
    if short:
        tracemalloc.start()
    try:
        envs.reset(seed=1)
        pids = [os.getpid(), *(process.pid for process in envs.processes)]
        series: dict[int, list[float]] = {pid: [] for pid in (pids[:1] if short else pids)}
        actions = np.zeros(8, np.int64)
        rounds = steps // 8
        every = 1 if short else rounds // 40  # a short run compares the peaks, because caches are emptied at times
        for step in range(rounds):
            envs.step(actions)
            if step % every == 0:
                for pid, samples in series.items():
                    size = tracemalloc.get_traced_memory()[0] if short else psutil.Process(pid).memory_info().rss
                    samples.append(size / MIB)
        for pid, samples in series.items():
            later_samples = samples[len(samples) * 2 // 5 :]
            if short:
                half = len(later_samples) // 2
                later_samples = [max(later_samples[:half]), max(later_samples[half:])]
            assert is_flat(later_samples, 0.1 if short else 4.0), f"pid {pid}: {[round(size, 2) for size in later_samples]}"
    finally:
        tracemalloc.stop()
        envs.close()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("failures", [pytest.param(10_000, marks=soak), 150])
def test_stored_errors_do_not_keep_local_variables_alive(workers: int, failures: int, closes: Any) -> None:
    """The traceback of a stored error must not keep the frames of the program and their variables."""
    envs = closes(vecenv.AsyncVectorEnv([RaisingEnv, RaisingEnv], num_workers=workers, context="fork"))

    def fail() -> None:
        large = np.ones(MIB)  # 8 MiB
        try:
            envs.step(np.array([0, 1]))
        except ValueError:
            envs.reset(seed=int(large[0]))
            return
        raise AssertionError("the step did not fail")

    envs.reset(seed=1)
    for _ in range(5):
        fail()
    gc.collect()
    before = resident_mib()
    highest = 0.0
    for count in range(failures):
        fail()
        if count % 50 == 49:
            gc.collect()
            highest = max(highest, resident_mib() - before)
            assert highest < 100, f"{highest:.0f} MiB more after {count + 1} failures with 8 MiB each"
    assert len(envs.errors) <= 1000


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("cycles", [pytest.param(2_000, marks=soak), 25])
def test_closed_engine_is_freed_without_garbage_collection(workers: int, cycles: int) -> None:
    """With the cyclic collector off, as in some trainers, memory, descriptors and mappings stay flat."""

    def run_engine() -> Any:
        envs = vecenv.AsyncVectorEnv([CheapEnv] * 2, num_workers=workers, context="fork")
        envs.reset(seed=1)
        envs.step(np.zeros(2, np.int64))
        envs.close()
        return weakref.ref(envs._driver)

    def mappings() -> int:
        with open("/proc/self/maps") as file:
            return sum("memfd:" in line or "/dev/shm" in line for line in file)

    for _ in range(3):
        run_engine()
    gc.collect()
    gc.disable()
    try:
        process = psutil.Process()
        descriptors, mapped, memory = process.num_fds(), mappings(), []
        for cycle in range(cycles):
            assert run_engine()() is None, "the engine has a reference cycle"
            assert (process.num_fds() - descriptors, mappings() - mapped) == (0, 0), f"more after engine {cycle + 1}"
            memory.append(resident_mib())
        middle = memory[cycles // 3 :]
        assert is_flat(middle, allowed=4), f"MiB: {[round(size, 1) for size in memory[:: max(1, cycles // 40)]]}"
    finally:
        gc.enable()
