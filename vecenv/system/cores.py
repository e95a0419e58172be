"""The number of usable cores, the placement of processes on cores, and spinning: polling for a while before sleeping.

Sleeping and waking up costs 20 to 40 microseconds on a virtual machine, as much as several environment steps. Polling is
free only while the core has no other work. So a process spins only if it has a spare core, and a :class:`SpinPolicy` stops
all processes of an engine from spinning for a while when other programs need the cores.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vecenv.system.signals import suppress_os_errors

SPIN_SECONDS: Final = 150e-6
"""The longest spin before a process goes to sleep: about the cost of a few wake-ups."""

_NICE_INCREMENT: Final = 7
"""The nice increment of workers that yield to their caller: an asyncio event loop is 4 ms late with 7, 10 ms with 5."""
_REVIEW_SECONDS: Final = 0.1  # minimum time between two reviews; many time slices of the kernel
_TRIAL_SECONDS: Final = 0.03  # from the end of a pause to the first review
_MIN_SPINS_PER_REVIEW: Final = 16
_FIRST_PAUSE_SECONDS: Final = 0.25  # pause in spinning after a bad review, doubled by each further one in succession
_MAX_PAUSE_SECONDS: Final = 4.0
_MAX_WAIT_SHARE: Final = 0.25  # measured: up to 0.04 in 95% of reviews on a quiet machine, about 0.5 next to a busy process


def usable_cores() -> int:
    """Return the number of cores that this process may use: the smallest of three limits.

    They are its affinity mask (the number of all cores on systems without one), the CPU quota of its control groups, and
    ``SLURM_CPUS_PER_TASK``, because Slurm does not bind processes on many clusters.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    quota = _cgroup_quota()
    slurm_cpus = os.environ.get("SLURM_CPUS_PER_TASK", "")
    limits = [cores, *([] if quota is None else [int(quota)]), *([int(slurm_cpus)] if slurm_cpus.isdigit() else [])]
    return max(1, min(limits))


def _cgroup_quota() -> float | None:
    """Return the lowest CPU quota of the control groups of this process, in cores; ``None`` if there is none."""
    quotas = []
    for folder, _, version in control_groups("cpu"):
        files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = " ".join(read_kernel_file(f"{folder}/{file}") for file in files).split()
        if len(words) == 2 and words[0].isdigit():  # otherwise it is "max", or -1
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def control_groups(controller: str) -> Iterator[tuple[str, str, int]]:
    """Yield (folder, name, cgroup version) for every control group that may limit this process, innermost first."""
    for line in (read_kernel_file("/proc/self/cgroup") or "0::/").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, version = "/sys/fs/cgroup", 2
        elif controller in controllers.split(","):
            base, version = f"/sys/fs/cgroup/{controller}", 1
        else:
            continue
        group = PurePosixPath("/", path)
        for parent in (group, *group.parents):
            yield f"{base}{parent}".rstrip("/"), str(parent), version


def read_kernel_file(path: str) -> str:
    """Return the content of a kernel file, or an empty string if it cannot be read."""
    with suppress_os_errors(), FileIO(path) as file:  # twice as fast as `open`
        return file.read().decode(errors="replace")
    return ""


@dataclass(frozen=True, slots=True)
class Placement:
    """The cores of a worker (``None``: any), its longest spin in seconds, and two flags.

    With ``shares_core``, the worker shares the caller's core and runs only while the caller sleeps, so the caller must not
    spin while it waits for this worker. With ``bound_at_start``, the worker is bound to its cores from the start. Otherwise
    it is bound once it has built its environments and, if it spins, unbound during pauses in spinning.
    """

    cpus: frozenset[int] | None = None
    spin: float = 0.0
    shares_core: bool = False
    bound_at_start: bool = False


def placements(workers: int) -> tuple[list[Placement], float]:
    """Return a placement for every worker process, and the seconds that the caller may spin while it waits.

    With fewer workers than cores, every process, including the caller, has a core of its own and spins. With one worker per
    core, one of them shares its core with the caller: it sleeps as soon as it has replied, which frees the core without a
    wake-up across cores. The others spin on their cores. The caller is never bound, because the workers leave it one core.

    No process spins if there are more workers than cores, if there is only one core, if a limit other than the affinity mask
    applies, or if the system cannot bind processes or does not report how long they wait for a core.
    """
    cores = usable_cores()
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if workers > cores or cores < 2 or len(cpus) != cores or seconds_waited() is None:
        return [Placement()] * workers, 0.0
    spinning = [Placement(frozenset({cpu}), SPIN_SECONDS) for cpu in cpus[1:]]
    if workers < cores:
        return spinning[:workers], SPIN_SECONDS
    return [Placement(frozenset({cpus[0]}), shares_core=True), *spinning], SPIN_SECONDS


def bound_placements(affinity: Any, workers: int) -> list[Placement]:
    """Return the placements of workers that are bound to cores of the user's choice.

    Args:
        affinity: For each worker, one core or several.
        workers: The number of workers.

    Raises:
        NotImplementedError: This system cannot bind processes.
        ValueError: ``affinity`` is not a list with cores for each worker, or contains cores that this process may not use.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise NotImplementedError(f"WorkerOptions(cores): this system ({sys.platform}) cannot bind processes to cores")
    affinity = affinity.tolist() if isinstance(affinity, np.ndarray) else affinity
    if not isinstance(affinity, Sequence) or isinstance(affinity, str) or len(affinity) != workers:
        raise ValueError(f"WorkerOptions(cores) must be a list with the cores of {workers} workers, got {affinity!r}.")
    usable = os.sched_getaffinity(0)
    found = []
    for worker, entry in enumerate(affinity):
        cores = list(entry) if isinstance(entry, Iterable) else [entry]
        if not cores or not all(isinstance(core, (int, np.integer)) and core in usable for core in cores):
            raise ValueError(f"WorkerOptions(cores)[{worker}] must be some of the cores {sorted(usable)}, got {entry!r}.")
        found.append(Placement(frozenset(map(int, cores)), bound_at_start=True))
    return found


def lower_priority(pid: int) -> None:
    """Lower the priority of a worker below that of this process. It can still use an idle core.

    At equal priority, with 32 busy workers per core, a process that wakes up waits 35 ms for its core. With
    ``sched_autogroup``, Linux schedules each session as a whole, by the session's own nice value, so that is set as well.
    """
    with suppress_os_errors():
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0) + _NICE_INCREMENT)
    with suppress_os_errors():
        Path(f"/proc/{pid}/autogroup").write_text(str(_NICE_INCREMENT))


def seconds_waited() -> float | None:
    """Return the seconds that this thread has waited for a core since it began; ``None``: not reported by the kernel."""
    try:
        ran, waited = read_kernel_file("/proc/thread-self/schedstat").split()[:2]
        return int(waited) * 1e-9 if int(ran) else None  # a kernel without these statistics reports zero for all
    except ValueError:
        return None


class SpinPolicy:
    """A policy for polling before a process goes to sleep.

    Spinning is harmful if another process needs the core. A process that never sleeps uses up its share of the core and then
    waits for whole time slices, while one that sleeps now and then runs as soon as it wakes up. Besides, the process that it
    waits for may be the one that needs the core. So each spinning process regularly reviews how long it has waited for its
    core. After a bad review, no process of the engine spins for a while, and those that spun are unbound from their cores.
    Each further bad review in succession doubles this pause, up to four seconds.

    Args:
        spin: Seconds to spin while the reviews are good.
        no_spin_until: float64 ``(1,)``, shared by all processes of an engine: none spins before ``time.perf_counter()``
            reaches it (all processes of a machine share this clock on the systems where they spin).
        cpus: The cores to which this process is bound, except during pauses if it spins; ``None``: it is not bound.
        shares_core: True if another process of the engine uses the same core by design, so that waits for it are normal.
    """

    def __init__(
        self, spin: float, no_spin_until: npt.NDArray[np.float64], cpus: frozenset[int] | None = None,
        shares_core: bool = False,
    ) -> None:  # fmt: skip
        self._paused = False
        self._spin_seconds = spin
        self._no_spin_until = no_spin_until.data.cast("B").cast("d")  # four times faster to read than an array
        self._cpus = cpus
        self._unbound_cpus = os.sched_getaffinity(0) if cpus else None
        self._shares_core = shares_core
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._bind(cpus)
        self._begin_review(time.perf_counter(), _REVIEW_SECONDS)

    def release(self) -> None:
        """Release the shared memory."""
        self._no_spin_until = memoryview(bytes(8)).cast("d")
        self._spin_seconds = 0.0

    def spin(self, poll: Callable[[int], object]) -> bool:
        """Call ``poll(0)`` until it returns a true value, while spinning is allowed; return True if it returned one."""
        if not self._spin_seconds:
            return False
        clock = time.perf_counter
        now = clock()
        if now < self._no_spin_until[0]:
            if not self._paused:
                self._paused = True
                self._bind(self._unbound_cpus)
            return False
        if self._paused:
            self._paused = False
            self._bind(self._cpus)
            self._begin_review(now, _TRIAL_SECONDS)
        elif now > self._review_at and self._spins >= _MIN_SPINS_PER_REVIEW and not self._review(now):
            return False
        self._spins += 1
        until = now + self._spin_seconds
        while not poll(0):
            if clock() > until:
                return False
        return True

    def _begin_review(self, now: float, seconds: float) -> None:
        self._review_began = now
        self._review_at = now + seconds
        self._waited_before = seconds_waited() or 0.0
        self._spins = 0

    def _review(self, now: float) -> bool:
        """Review the waits for the core; return True if spinning may continue."""
        waited = (seconds_waited() or 0.0) - self._waited_before
        good = self._shares_core or waited < _MAX_WAIT_SHARE * (now - self._review_began)
        if good:
            self._pause_seconds = _FIRST_PAUSE_SECONDS
            self._begin_review(now, _REVIEW_SECONDS)
        else:
            self._no_spin_until[0] = max(self._no_spin_until[0], now + self._pause_seconds)
            self._pause_seconds = min(2 * self._pause_seconds, _MAX_PAUSE_SECONDS)
        return good

    def _bind(self, cpus: Iterable[int] | None) -> None:
        if self._cpus and cpus:
            with suppress_os_errors():
                os.sched_setaffinity(0, cpus)
