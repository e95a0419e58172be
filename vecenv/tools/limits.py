"""The limits of this machine on processes and memory, checked before many processes are started."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path
from typing import Final

from vecenv.shm.arena import available_memory, memory_limits

MIB: Final = 2**20
MIN_PROCESS_BYTES: Final = 8 * MIB
"""Private memory of the smallest forked Python process, in bytes."""
_LIMIT_FILES: Final = {
    "/sys/fs/cgroup/pids.max": "the control group's pids.max, `docker run --pids-limit`",
    "/sys/fs/cgroup/pids/pids.max": "the control group's pids.max, `docker run --pids-limit`",
    "/proc/sys/kernel/pid_max": "the kernel's, `sysctl kernel.pid_max`",
}


def shortage(processes: int) -> str | None:
    """Describe why this machine cannot run that many processes at once; ``None`` if no known limit forbids it."""
    limit = _process_limit()
    if limit is not None and processes > limit[0]:
        return f"{processes} processes exceed the limit of {limit[0]} ({limit[1]})"
    known = [number for number in (available_memory(), *(left for _, left, _ in memory_limits())) if number is not None]
    need, free = processes * MIN_PROCESS_BYTES, min(known, default=None)
    if free is not None and need > free:
        return f"{processes} processes need {need // MIB} MiB of memory or more, and {free // MIB} MiB are available"
    return None


def _process_limit() -> tuple[int, str] | None:
    """Return the lowest limit on processes, and where it is set."""
    limits: list[tuple[int, str]] = []
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if soft != resource.RLIM_INFINITY and os.getuid() != 0:  # root has no such limit
        limits.append((soft, "ulimit -u"))
    for file, where in _LIMIT_FILES.items():
        with contextlib.suppress(OSError, ValueError):  # not on this system, or "max"
            limits.append((int(Path(file).read_text()), where))
    return min(limits, default=None)
