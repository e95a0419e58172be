"""How many cores there are to use, which process sits on which, and when it pays to wait without sleeping.

Sleeping and being woken costs 20 to 40 microseconds on a virtual machine, several environment steps' worth; polling instead
is free exactly as long as the core has nothing better to do. So a process may spin only where a core is left over for it,
and a :class:`Patience` stops spinning as soon as the kernel takes the core away from it more than now and then, which is how
a busy machine shows itself, and tries again later.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["SPIN_SECONDS", "Patience", "Seat", "seats", "usable_cores"]

SPIN_SECONDS: Final = 150e-6
"""Longest spin before a process goes to sleep: a few wake-ups' worth."""

_REVIEW_EVERY: Final = 64
_TAKEN: Final = 40e-6  # two looks at the clock that are so far apart had somebody else in between
_REST: Final = 0.25  # seconds without spinning after the core was taken away


def usable_cores() -> int:
    """Cores this process may use: its affinity mask, or its control group's CPU quota where that is smaller."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, cores if quota is None else min(cores, int(quota)))


def _cgroup_quota() -> float | None:
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else max(float(quota) / float(period), 1.0)
    with contextlib.suppress(OSError, ValueError):
        base = Path("/sys/fs/cgroup/cpu")
        micro = float((base / "cpu.cfs_quota_us").read_text())
        return None if micro <= 0 else max(micro / float((base / "cpu.cfs_period_us").read_text()), 1.0)
    return None


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a worker sits: the cores it is bound to (``None``: any), how long it may spin, and whether the caller is there.

    A worker that shares the caller's core runs when the caller sleeps, and so must be waited for by sleeping.
    """

    cpus: frozenset[int] | None = None
    spin: float = 0.0
    with_caller: bool = False


def seats(workers: int) -> tuple[list[Seat], float]:
    """A seat for every worker process, and for how many seconds the caller may spin while it waits.

    With fewer workers than cores everybody has a core, the caller included, and everybody spins. With as many workers as
    cores one worker shares its core with the caller: that one sleeps as soon as it has answered, which hands the core over
    without a wake-up across cores, and the others spin on theirs. With more workers than cores nobody spins. The caller is
    never bound to anything: the workers' seats leave it one place to be.
    """
    cores = usable_cores()
    try:
        cpus = sorted(os.sched_getaffinity(0))
    except AttributeError:
        return [Seat()] * workers, 0.0
    if workers > cores or cores < 2 or len(cpus) > cores:
        return [Seat()] * workers, 0.0
    spinning = [Seat(frozenset({cpu}), SPIN_SECONDS) for cpu in cpus[1:]]
    if workers < cores:
        return spinning[:workers], SPIN_SECONDS
    return [Seat(frozenset({cpus[0]}), with_caller=True), *spinning], SPIN_SECONDS


class Patience:
    """How long to poll before going to sleep, here and now.

    Args:
        spin: Seconds, when all is well.
        cpus: Cores this process is bound to; let go of while it does not spin because the machine is busy.
    """

    def __init__(self, spin: float, cpus: frozenset[int] | None = None) -> None:
        self.rests = 0
        self._seconds = spin
        self._cpus = cpus
        self._free = os.sched_getaffinity(0) if cpus else None
        self._spins = 0
        self._taken = 0  # how often, in this review, the core was taken away in the middle of a spin
        self._resting_until = 0.0
        self._bind(True)

    def spin(self, poll: Callable[[int], object]) -> bool:
        """Call ``poll(0)`` until it finds something, for as long as it pays; false if it found nothing."""
        if not self._seconds:
            return False
        clock = time.perf_counter
        last = clock()
        if self._resting_until:
            if last < self._resting_until:
                return False
            self._resting_until = 0.0
            self._bind(True)
        until = last + self._seconds
        found = True
        while not poll(0):
            now = clock()
            if now - last > _TAKEN:
                self._taken += 1
            if now > until:
                found = False
                break
            last = now
        self._spins += 1
        if self._spins == _REVIEW_EVERY:
            self._review()
        return found

    def _review(self) -> None:
        if self._taken * 8 > self._spins:
            self._resting_until = time.perf_counter() + _REST
            self.rests += 1
            self._bind(False)
        self._spins = self._taken = 0

    def _bind(self, bound: bool) -> None:
        if self._cpus and self._free:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self._cpus if bound else self._free)
