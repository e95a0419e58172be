"""How many cores there are to use, which process sits on which, and when it pays to wait without sleeping.

Sleeping and being woken costs 20 to 40 microseconds on a virtual machine, several environment steps' worth; polling instead
is free exactly as long as the core has nothing better to do. So a process may spin only where a core is left over for it,
and a :class:`Patience` stops spinning as soon as the kernel takes the core away from it more than now and then, which is how
a busy machine shows itself, and tries again later.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

if sys.platform != "win32":
    import resource

__all__ = ["SPIN_SECONDS", "Patience", "Seat", "seats", "usable_cores"]

SPIN_SECONDS: Final = 150e-6
"""Longest spin before a process goes to sleep: a few wake-ups' worth."""

_REVIEW_EVERY: Final = 64
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
    """Where a worker sits: the cores it is bound to (``None``: any) and whether it may spin there."""

    cpus: frozenset[int] | None = None
    spin: float = 0.0


def seats(workers: int) -> tuple[list[Seat], bool]:
    """A seat for every worker process, and whether the caller may spin while it waits.

    With fewer workers than cores everybody has a core, the caller included, and everybody spins. With as many workers as
    cores one worker shares its core with the caller: that one sleeps as soon as it has answered, which hands the core over
    without a wake-up across cores, and the others spin on theirs. With more workers than cores nobody spins. The caller is
    never bound to anything: the workers' seats leave it one place to be.
    """
    cores = usable_cores()
    try:
        cpus = sorted(os.sched_getaffinity(0))
    except AttributeError:
        return [Seat()] * workers, False
    if workers > cores or cores < 2 or len(cpus) > cores:
        return [Seat()] * workers, False
    spinning = [Seat(frozenset({cpu}), SPIN_SECONDS) for cpu in cpus[1:]]
    if workers < cores:
        return spinning[:workers], True
    return [Seat(), *spinning], True


class Patience:
    """How long to spin now. Ask :meth:`budget` before a wait.

    Args:
        spin: Seconds, when all is well.
        cpus: Cores this process is bound to while it spins; let go of while it does not.
    """

    def __init__(self, spin: float, cpus: frozenset[int] | None = None) -> None:
        self.spin = spin
        self.rests = 0
        self._cpus = cpus
        self._free = os.sched_getaffinity(0) if cpus else None
        self._count = 0
        self._preempted = _preemptions()
        self._resting_until = 0.0
        if cpus and spin:
            self._bind(True)

    def budget(self) -> float:
        """Seconds to spin in the wait that is about to begin."""
        if not self.spin:
            return 0.0
        self._count += 1
        if self._count % _REVIEW_EVERY == 0:
            self._review()
        return 0.0 if self._resting_until else self.spin

    def _review(self) -> None:
        now = time.monotonic()
        if self._resting_until:
            if now < self._resting_until:
                return
            self._resting_until = 0.0
            self._bind(True)
            self._preempted = _preemptions()
            return
        preempted = _preemptions()
        taken, self._preempted = preempted - self._preempted, preempted
        if taken * 8 > _REVIEW_EVERY:
            self._resting_until = now + _REST
            self.rests += 1
            self._bind(False)

    def _bind(self, bound: bool) -> None:
        if self._cpus and self._free:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self._cpus if bound else self._free)


def _preemptions() -> int:
    """How often the kernel took the core away from this thread."""
    if sys.platform == "win32":
        return 0
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nivcsw
