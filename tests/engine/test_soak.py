"""Tests for slow leaks (row 45 of ``FAULTS.md``). Run them with ``pytest -m soak``; short versions are marked ``long``."""

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
from vecenv.testing import FaultyEnv

pytestmark = pytest.mark.timeout(1800, method="signal")
soak = pytest.mark.soak

CYCLES = 1_000
STEPS = 1_000_000
MIB = 2**20


def count_resources() -> dict[str, int]:
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


def is_flat(samples: list[float], max_growth: float) -> bool:
    """True if the median of the second half of a series exceeds that of the first by at most ``max_growth``."""
    middle = len(samples) // 2
    return float(np.median(samples[middle:]) - np.median(samples[:middle])) <= max_growth


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


def use_an_engine(context: str) -> None:
    envs = vecenv.AsyncVectorEnv([CheapEnv] * 2, context=context)
    envs.reset(seed=1)
    envs.step([0, 1])
    envs.close()


@soak
@pytest.mark.parametrize(("context", "cycles"), [("fork", CYCLES), ("forkserver", CYCLES), ("spawn", 20)])
def test_many_engines_leak_no_resources(context: str, cycles: int) -> None:
    """Up to a thousand engines are opened, stepped and closed, one after the other."""
    for _ in range(5):
        use_an_engine(context)
    before = count_resources()
    memory = []
    for cycle in range(cycles):
        use_an_engine(context)
        if cycle % max(1, cycles // 50) == 0:
            memory.append(resident_mib())
    after = count_resources()
    growth = {name: after[name] - before[name] for name in before if after[name] > before[name]}
    # the allocator may add arenas, and other programs may add files to /dev/shm
    for name, tolerated in (("mappings", 4), ("/dev/shm entries", cycles // 10)):
        if growth.get(name, 0) <= tolerated:
            growth.pop(name, None)
    assert not growth, f"after {cycles} cycles: {growth}"
    assert is_flat(memory, max_growth=4), f"resident memory over time, MiB: {[round(size) for size in memory]}"


@soak
def test_constructors_that_raise_leak_no_resources() -> None:
    def raise_lookup_error() -> gym.Env:
        raise LookupError("no such environment")

    def fail_to_construct() -> None:
        with pytest.raises(LookupError):
            vecenv.AsyncVectorEnv([CheapEnv, raise_lookup_error], context="fork")

    for _ in range(5):
        fail_to_construct()
    before = count_resources()
    for _ in range(CYCLES // 5):
        fail_to_construct()
    after = count_resources()
    assert {name: after[name] for name in after if name != "mappings"} == {
        name: before[name] for name in before if name != "mappings"
    }


@soak
@pytest.mark.parametrize("workers", [0, 2])
def test_memory_is_flat_over_a_million_steps(workers: int) -> None:
    with ready_engine([CheapEnv] * 8, num_workers=workers, context="fork") as envs:
        pids = [process.pid for process in envs.processes]
        actions = np.zeros(8, np.int64)
        series: dict[int, list[float]] = {pid: [] for pid in (os.getpid(), *pids)}
        steps = STEPS // 8
        for step in range(steps):
            envs.step(actions)
            if step % (steps // 50) == 0:
                for pid, samples in series.items():
                    samples.append(psutil.Process(pid).memory_info().rss / MIB)
        assert [process.pid for process in envs.processes] == pids
        for pid, samples in series.items():
            assert is_flat(samples[5:], max_growth=2), f"pid {pid}: {[round(size, 1) for size in samples]}"


@soak
def test_hundreds_of_restarts_leak_no_resources() -> None:
    def make_crashing_env() -> gym.Env:
        return FaultyEnv(CheapEnv(), "kill", step=2)

    with ready_engine([CheapEnv, make_crashing_env], context="fork", on_failure=vecenv.Restart(10**6, 1e6)) as envs:
        take_steps(envs, 20)
        before = count_resources()
        take_steps(envs, 400)
        assert count_resources()["descriptors"] <= before["descriptors"]
        assert count_resources()["processes"] <= before["processes"]
        assert count_resources()["threads"] <= before["threads"]


def take_steps(envs: Any, count: int) -> None:
    for _ in range(count):
        envs.step([0, 0])


# --- memory that must be freed ------------------------------------------------------------------


class RandomInfoKeys(CheapEnv):
    """An environment with a random subset of five keys in each info, so that batches hardly ever have the same keys."""

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
    """Nearly every batch has a new combination of keys, so caches of combinations must not grow.

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
        batches = steps // 8
        batches_per_sample = 1 if short else batches // 40
        for batch in range(batches):
            envs.step(actions)
            if batch % batches_per_sample == 0:
                for pid, samples in series.items():
                    size = tracemalloc.get_traced_memory()[0] if short else psutil.Process(pid).memory_info().rss
                    samples.append(size / MIB)
        for pid, samples in series.items():
            later_samples = samples[len(samples) * 2 // 5 :]
            if short:  # the peaks are compared, because caches are emptied at times
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
    """The traceback of a stored error must not refer to frames of the program, which hold its local variables."""
    envs = closes(vecenv.AsyncVectorEnv([RaisingEnv, RaisingEnv], num_workers=workers, context="fork"))

    def cause_failure() -> None:
        large = np.ones(MIB)  # 8 MiB
        try:
            envs.step(np.array([0, 1]))
        except ValueError:
            envs.reset(seed=int(large[0]))
            return
        raise AssertionError("the step did not fail")

    envs.reset(seed=1)
    for _ in range(5):
        cause_failure()
    gc.collect()
    memory_before = resident_mib()
    for count in range(1, failures + 1):
        cause_failure()
        if count % 50 == 0:
            gc.collect()
            growth = resident_mib() - memory_before
            assert growth < 100, f"{growth:.0f} MiB more after {count} failures with 8 MiB each"
    assert len(envs.errors) <= 1000


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("cycles", [pytest.param(2_000, marks=soak), 25])
def test_closed_engine_is_freed_without_garbage_collection(workers: int, cycles: int) -> None:
    """Some training programs disable the cyclic collector."""

    def run_engine() -> Any:
        envs = vecenv.AsyncVectorEnv([CheapEnv] * 2, num_workers=workers, context="fork")
        envs.reset(seed=1)
        envs.step(np.zeros(2, np.int64))
        envs.close()
        return weakref.ref(envs._driver)

    def count_mappings() -> int:
        with open("/proc/self/maps") as file:
            return sum("memfd:" in line or "/dev/shm" in line for line in file)

    for _ in range(3):
        run_engine()
    gc.collect()
    gc.disable()
    try:
        process = psutil.Process()
        descriptors, mappings, memory = process.num_fds(), count_mappings(), []
        for cycle in range(cycles):
            assert run_engine()() is None, "the engine has a reference cycle"
            assert process.num_fds() == descriptors, f"engine {cycle + 1} changed the number of descriptors"
            assert count_mappings() == mappings, f"engine {cycle + 1} changed the number of mappings"
            memory.append(resident_mib())
        later_memory = memory[cycles // 3 :]
        assert is_flat(later_memory, max_growth=4), f"MiB: {[round(size, 1) for size in memory[:: max(1, cycles // 40)]]}"
    finally:
        gc.enable()
