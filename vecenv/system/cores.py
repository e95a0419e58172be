"""How many cores there are to use, which process sits on which, and when it pays to wait without sleeping.

Sleeping and being woken costs 20 to 40 microseconds on a virtual machine, several environment steps' worth; polling instead
is free exactly as long as the core has nothing better to do. So a process may spin only where a core is left over for it,
and a :class:`SpinPolicy` stops the whole engine from spinning for a while if other programs wanted the core too.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

SPIN_SECONDS: Final = 150e-6
"""Longest spin before a process goes to sleep: a few wake-ups' worth."""

_NICE: Final = 7
"""Of workers that are to let their caller first: the loop of an asyncio program is 4 ms late with it, 10 ms with 5."""
_REVIEW_SECONDS: Final = 0.1  # between two reviews at least: many time slices of the kernel
_TRIAL_SECONDS: Final = 0.03  # from the end of a rest to the first review
_REVIEW_SPINS: Final = 16  # between two reviews at least
_FIRST_REST: Final = 0.25  # seconds without spinning after a bad review, doubled with every further one
_LONGEST_REST: Final = 4.0
_BEARABLE: Final = 0.25  # of the time; 0.04 in 95 of 100 reviews on a quiet machine, about half beside another busy process


def usable_cores() -> int:
    """Cores this process may use: its affinity mask, or what is smaller: its control group's CPU quota, or the number that
    Slurm has given to its task (``SLURM_CPUS_PER_TASK``), which binds nothing on many clusters."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    quota = _cgroup_quota()
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")
    limits = [cores, *([] if quota is None else [int(quota)]), *([int(given)] if given.isdigit() else [])]
    return max(1, min(limits))


def _cgroup_quota() -> float | None:
    quota, *rest = kernel_file("/sys/fs/cgroup/cpu.max").split() or ["max"]
    if quota == "max":
        quota, *rest = [kernel_file(f"/sys/fs/cgroup/cpu/cpu.cfs_{what}_us").strip() for what in ("quota", "period")]
    if not (quota and rest and rest[0]) or float(quota) <= 0:
        return None
    return max(float(quota) / float(rest[0]), 1.0)


def kernel_file(path: str) -> str:
    """What a file of the kernel's says; empty where there is none, or it may not be read."""
    try:
        with FileIO(path) as file:  # a tenth of what `open` takes
            return file.read().decode(errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a worker sits: the cores it is bound to (``None``: any), how long it may spin, and whether the caller is there.

    A worker that shares the caller's core runs when the caller sleeps, and so must be waited for by sleeping. One that is
    ``bound`` stays on its cores from its start to its end; others are bound only while they spin.
    """

    cpus: frozenset[int] | None = None
    spin: float = 0.0
    with_caller: bool = False
    bound: bool = False


def placements(workers: int) -> tuple[list[Placement], float]:
    """A placement for every worker process, and for how many seconds the caller may spin while it waits.

    With fewer workers than cores every process has a core, the caller included, and every process spins. With as many
    workers as cores one worker shares its core with the caller: that one sleeps as soon as it has answered, which hands the
    core over without a wake-up across cores, and the others spin on theirs. With more workers than cores no process spins.
    The caller is never bound to anything: where workers are leaves it one place to be. On a system that cannot bind
    processes, or does not tell how long they wait for a core, no process spins.
    """
    cores = usable_cores()
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if workers > cores or cores < 2 or len(cpus) != cores or seconds_waited() is None:
        return [Placement()] * workers, 0.0
    spinning = [Placement(frozenset({cpu}), SPIN_SECONDS) for cpu in cpus[1:]]
    if workers < cores:
        return spinning[:workers], SPIN_SECONDS
    return [Placement(frozenset({cpus[0]}), with_caller=True), *spinning], SPIN_SECONDS


def bound_placements(affinity: Any, workers: int) -> list[Placement]:
    """The placements of workers that are bound to cores of the user's choice.

    Args:
        affinity: A core, or several, for each worker.
        workers: How many there are.

    Raises:
        NotImplementedError: This system cannot bind processes.
        ValueError: It is no list with cores for each worker, or has cores that this process may not use.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise NotImplementedError(f"`worker_affinity` needs a system that can bind processes to cores, not {sys.platform}")
    if not isinstance(affinity, Sequence) or isinstance(affinity, str) or len(affinity) != workers:
        raise ValueError(f"`worker_affinity` must be a list with the cores of each of {workers} workers, got {affinity!r}.")
    usable = os.sched_getaffinity(0)
    found = []
    for worker, given in enumerate(affinity):
        cores = frozenset([given] if isinstance(given, int) else given if isinstance(given, Iterable) else ())
        if not cores or not cores <= usable:
            raise ValueError(f"`worker_affinity[{worker}]` must be some of the cores {sorted(usable)}, got {given!r}.")
        found.append(Placement(cores, bound=True))
    return found


def let_caller_first(pid: int) -> None:
    """Lower the priority of a worker below this process; an idle core is still its own.

    With 32 busy workers per core, a process that wakes up waits 35 ms for its turn. On Linux a session is scheduled as a
    whole (``sched_autogroup``), and the nice value that counts is the session's.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0) + _NICE)
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(_NICE))


def seconds_waited() -> float | None:
    """How long this thread, ready to run, has waited for a core since it began; ``None``: the kernel does not tell."""
    try:
        ran, waited = kernel_file("/proc/thread-self/schedstat").split()[:2]
        return int(waited) * 1e-9 if int(ran) else None  # a kernel that keeps no such accounts says zero to all
    except ValueError:
        return None


class SpinPolicy:
    """How long to poll before going to sleep, here and now.

    Where another process wants the core too, spinning does harm: a process that never sleeps has used up its share of the
    core and stands in line for whole time slices, while one that sleeps now and then is let in as soon as it wakes; and a
    core on which one process spins is not there for the other that it waits for. So each process looks now and then at how
    long it had to wait for its core. If that was too long, all processes of the engine sleep at once when they wait, bound
    to no core, for a while that doubles as long as the reviews stay bad.

    Args:
        spin: Seconds, when all is well.
        no_spin_until: float64 ``(1,)``, shared by all processes of an engine: none spins before ``time.perf_counter()`` is
            that far (one clock for all processes of a machine, where there are placements to spin on).
        cpus: Cores this process is bound to while it spins.
        shares: By design another process of the engine sits on the same core, so that waiting for the core tells nothing.
    """

    def __init__(
        self, spin: float, no_spin_until: npt.NDArray[np.float64], cpus: frozenset[int] | None = None, shares: bool = False
    ) -> None:
        self.rests = 0  # bad reviews of this process
        self._resting = False
        self._seconds = spin
        self._no_spin_until = no_spin_until.data.cast("B").cast("d")  # four times quicker to look at
        self._cpus = cpus
        self._free = os.sched_getaffinity(0) if cpus else None
        self._shares = shares
        self._rest = _FIRST_REST
        self._bind(cpus)
        self._begin_review(time.perf_counter(), _REVIEW_SECONDS)

    def forget(self) -> None:
        """Drop the shared memory."""
        self._no_spin_until = memoryview(bytes(8)).cast("d")
        self._seconds = 0.0

    def spin(self, poll: Callable[[int], object]) -> bool:
        """Call ``poll(0)`` until it finds something, for as long as it pays; false if it found nothing."""
        if not self._seconds:
            return False
        clock = time.perf_counter
        now = clock()
        if now < self._no_spin_until[0]:
            if not self._resting:
                self._resting = True
                self._bind(self._free)
            return False
        if self._resting:
            self._resting = False
            self._bind(self._cpus)
            self._begin_review(now, _TRIAL_SECONDS)
        elif now > self._review_at and self._spins >= _REVIEW_SPINS and not self._review(now):
            return False
        self._spins += 1
        until = now + self._seconds
        while not poll(0):
            if clock() > until:
                return False
        return True

    def _begin_review(self, now: float, seconds: float) -> None:
        self._began = now
        self._review_at = now + seconds
        self._waited = seconds_waited() or 0.0
        self._spins = 0

    def _review(self, now: float) -> bool:
        """Whether to go on."""
        waited = (seconds_waited() or 0.0) - self._waited
        good = self._shares or waited < _BEARABLE * (now - self._began)
        if good:
            self._rest = _FIRST_REST
            self._begin_review(now, _REVIEW_SECONDS)
        else:
            self.rests += 1
            self._no_spin_until[0] = max(self._no_spin_until[0], now + self._rest)
            self._rest = min(2 * self._rest, _LONGEST_REST)
        return good

    def _bind(self, cpus: Iterable[int] | None) -> None:
        if self._cpus and cpus:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, cpus)
