"""When it pays to spin, where the system does not say how long a process waited for a core: each times its own spins."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import gymnasium
import numpy as np
import pytest

import vecenv
from vecenv.system import cores


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel does not tell."""
    monkeypatch.setattr(cores, "seconds_waited", lambda: None)


@pytest.fixture
def unbound(untold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor can anybody be bound to a core; there are four."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(cores, "_cgroup_quota", lambda: None)


@pytest.mark.parametrize(
    ("workers", "sleeping", "spinning", "caller"), [(1, 0, 1, True), (3, 0, 3, True), (4, 1, 3, True), (5, 5, 0, False)]
)
def test_as_many_spin_as_there_are_cores_to_spare(
    workers: int, sleeping: int, spinning: int, caller: bool, unbound: None
) -> None:
    placements, caller_spin = cores.placements(workers)
    assert [placement.spin for placement in placements] == [0.0] * sleeping + [cores.SPIN_SECONDS] * spinning
    assert [placement.with_caller for placement in placements] == [sleeping == 1] * sleeping + [False] * spinning
    assert all(placement.cpus is None for placement in placements)
    assert caller_spin == (cores.SPIN_SECONDS if caller else 0.0)


def test_nobody_spins_on_the_only_core(unbound: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert cores.placements(1) == ([cores.Placement()], 0.0)


class Machine:
    """A clock of which every look costs a microsecond, and a core that others have for a share ``lost``, in slices."""

    SLICE = 3.3e-3

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1.0
        self.lost = self._debt = 0.0
        monkeypatch.setattr(cores.time, "perf_counter", lambda: self.work(1e-6))

    def work(self, seconds: float) -> float:
        self.now += seconds
        self._debt += seconds * self.lost / (1 - self.lost)
        if self._debt > self.SLICE:
            self.now += self.SLICE
            self._debt -= self.SLICE
        return self.now

    def run(self, patience: cores.Patience, seconds: float, lost: float, spin: float = 5e-4) -> int:
        """Spin, and step for half a millisecond, in turns; how often did it spin?"""
        self.lost = lost
        spins = 0
        until = self.now + seconds
        while self.now < until:
            found = self.now + spin

            def poll(timeout: int, found: float = found) -> bool:
                return self.work(5e-5 if spin > 5e-5 else spin) >= found

            spins += patience.spin(poll)
            self.work(5e-4)
        return spins


@pytest.mark.parametrize("lost", [0.0, 0.1, 0.15])
def test_a_little_that_others_take_is_borne(lost: float, untold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, patience = Machine(monkeypatch), cores.Patience(1e-2, np.zeros(1))
    machine.run(patience, 5.0, lost=lost)
    assert patience.rests <= 5  # of some fifty reviews
    assert lost or not patience.rests


def test_a_core_that_is_taken_away_in_the_middle_of_spins_is_left(untold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, resting_until = Machine(monkeypatch), np.zeros(1)
    patience, other = cores.Patience(1e-2, resting_until), cores.Patience(1e-2, resting_until)
    machine.run(patience, 1.0, lost=0.0)
    assert patience.rests == 0
    machine.run(patience, 0.25, lost=0.5)
    assert patience.rests == 1
    assert not other.spin(lambda timeout: pytest.fail("nor may another process of the same engine"))
    machine.run(patience, 60.0, lost=0.5)
    assert machine.run(patience, 60.0, lost=0.5) < 0.1 * 60_000, "on a machine that stays busy it is tried seldom"
    machine.run(patience, cores._LONGEST_REST, lost=0.0)
    rests = patience.rests
    assert machine.run(patience, 1.0, lost=0.0) > 900
    assert patience.rests == rests


def test_one_slice_that_somebody_else_had_is_no_reason_to_rest(untold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With so few spins it was half the time that was spent on them."""
    machine, patience = Machine(monkeypatch), cores.Patience(1e-2, np.zeros(1))
    machine.run(patience, 0.2, lost=0.0, spin=1e-5)
    patience.spin(lambda timeout: bool(machine.work(4e-3)))
    machine.run(patience, 1.0, lost=0.0, spin=1e-5)
    assert patience.rests == 0


def test_a_caller_that_shares_its_core_by_design_goes_on(untold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, patience = Machine(monkeypatch), cores.Patience(1e-2, np.zeros(1), shares=True)
    machine.run(patience, 2.0, lost=0.5)
    assert patience.rests == 0


def test_who_may_not_spin_looks_at_no_clock(untold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    patience = cores.Patience(0.0, np.zeros(1))
    monkeypatch.setattr(cores.time, "perf_counter", lambda: pytest.fail("what is it to it what time it is?"))
    assert not patience.spin(lambda timeout: pytest.fail("it must not look at all"))


def test_where_the_kernel_tells_it_is_believed() -> None:
    assert (type(cores.Patience(1e-4, np.zeros(1))) is cores.Patience) == (cores.seconds_waited() is not None)


@pytest.fixture
def rivals() -> Iterator[Callable[[int], None]]:
    """Start so many processes that want a core each."""
    started: list[subprocess.Popen[bytes]] = []

    def start(count: int) -> None:
        started.extend(subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count))

    yield start
    for one in started:
        one.kill()
        one.wait()


@pytest.mark.long
def test_an_engine_rests_while_others_want_all_cores(untold: None, rivals: Callable[[int], None]) -> None:
    envs = vecenv.AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2, num_workers=1, use_caller=True, context="fork")
    try:
        envs.reset(seed=0)
        rivals(2 * cores.usable_cores())
        deadline = time.monotonic() + 60
        while envs._driver.batch.resting_until[0] < time.perf_counter():
            assert time.monotonic() < deadline, "it never rested"
            envs.step([0, 0])
    finally:
        envs.close()
