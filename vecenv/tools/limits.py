"""The limits of this machine on processes, open files and memory, checked before many processes are started."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from vecenv.shm.arena import available_memory, memory_limits
from vecenv.system.descriptors import DESCRIPTORS_PER_WORKER, SPARE_DESCRIPTORS

if sys.platform != "win32":
    import resource

MIB: Final = 2**20
GIB: Final = 2**30
MIN_PROCESS_BYTES: Final = 8 * MIB
"""Private memory of the smallest forked Python process, in bytes."""


def shortage(processes: int, workers: int = 0) -> str | None:
    """Describe why this machine cannot run that many processes at once; ``None`` if no known limit forbids it.

    Args:
        processes: Number of processes in all.
        workers: Largest number of workers of one program, which needs open files for each worker.
    """
    limit = _process_limit()
    if limit is not None and processes > limit[0]:
        return f"{processes} processes exceed the limit of {limit[0]} ({limit[1]})"
    if sys.platform != "win32":
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        need = _count_open_files(workers)
        if soft != resource.RLIM_INFINITY and need > soft:
            return f"{workers} workers of one program need {need} open files, and the limit is {soft} (ulimit -n)"
    free = _free_memory()
    if free is not None and processes * MIN_PROCESS_BYTES > free:
        need_text = f"{processes} processes need {_bytes(processes * MIN_PROCESS_BYTES)} of memory or more"
        return f"{need_text}, and {_bytes(free)} are available"
    return None


def _process_limit() -> tuple[int, str] | None:
    """Return the lowest limit on processes, and where it is set."""
    limits: list[tuple[int, str]] = []
    if sys.platform != "win32":
        soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        if soft != resource.RLIM_INFINITY and os.getuid() != 0:  # root has no such limit
            limits.append((soft, "ulimit -u"))
    group = _read("/sys/fs/cgroup/pids.max").strip() or _read("/sys/fs/cgroup/pids/pids.max").strip()
    kernel = _read("/proc/sys/kernel/pid_max").strip()
    for number, where in (
        (group, "the control group's pids.max, `docker run --pids-limit`"),
        (kernel, "the kernel's, `sysctl kernel.pid_max`"),
    ):
        if number.isdigit():
            limits.append((int(number), where))
    return min(limits, default=None)


def _free_memory() -> int | None:
    """Return the free memory within the limits of the system and all control groups; ``None`` if unknown."""
    known = [number for number in (available_memory(), *(limit[1] for limit in memory_limits())) if number is not None]
    return min(known, default=None)


def _count_open_files(workers: int) -> int:
    """Return the number of open files this process needs with that many workers, including those open now."""
    return len(os.listdir("/dev/fd")) - 1 + workers * DESCRIPTORS_PER_WORKER + SPARE_DESCRIPTORS


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _bytes(number: int) -> str:
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / MIB:.0f} MiB"
