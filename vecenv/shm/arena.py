"""Allocates one block of shared memory that has no name.

A memfd can be reached only by inheritance, is not limited by the size of ``/dev/shm`` (64 MB in a Docker container), and
ends with the last process that holds it, however that process ends. All of it is allocated at once, so that too little
memory is an error at the start and not a SIGBUS hours later. Then it is sealed, so that no worker can truncate it under the
caller. Without memfds an unlinked file does the same without the seals; on systems without worker processes the block is
private memory and has no file.

The kernel may grant an allocation that it cannot keep, and then the OOM killer ends a process instead of an error being
returned. So the size is compared with what the machine and the control group have left, before anything is allocated.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from vecenv.errors import ArenaError
from vecenv.system.descriptors import Descriptor, DescriptorOwner
from vecenv.system.spawning import why_no_processes

if sys.platform != "win32":
    import fcntl

__all__ = ["Arena", "available_memory", "has_memfd", "memory_file", "memory_limits", "seal"]

_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a huge number
_CHUNK = 1 << 20


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def memory_limits() -> Iterator[tuple[str, int, int]]:
    """(group, bytes left, limit) for every control group around this process that has a limit."""
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit_name, usage_name = "/sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit_name, usage_name = "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = Path(path.lstrip("/"))
        for parent in (group, *group.parents):
            limit = _read(str(Path(base) / parent / limit_name)).strip()
            usage = _read(str(Path(base) / parent / usage_name)).strip()
            if limit.isdigit() and usage.isdigit() and int(limit) < _UNLIMITED:
                name = "/" if parent == Path() else f"/{parent}"
                yield name, max(int(limit) - int(usage), 0), int(limit)


def available_memory() -> int | None:
    """Bytes that can be allocated without driving the machine or its cgroup out of memory; ``None`` if unknown."""
    lines = [line.split() for line in _read("/proc/meminfo").splitlines()]
    found = [int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"]
    found += [free for _, free, _ in memory_limits()]
    return min(found) if found else None


def _unlinked_file() -> int:
    descriptor, path = tempfile.mkstemp(prefix="vecenv-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    os.unlink(path)
    return descriptor


def has_memfd() -> bool:
    """Whether the system has files without a name in memory."""
    return hasattr(os, "memfd_create")


def memory_file(
    size: int,
    owner: DescriptorOwner,
    for_what: str,
    advice: str = "",
    *,
    available: Callable[[], int | None] = available_memory,
    memfd: bool,
) -> Descriptor:
    """A file in memory of ``size`` zeros, all allocated; -1 where processes are not started.

    Args:
        size: Bytes.
        owner: Of the descriptor.
        for_what, advice: The beginning and the end of the message of an error.
        available, memfd: As of :class:`Arena`.

    Raises:
        ArenaError: ``size`` is more than the machine or its cgroup has; both numbers are in the message.
    """
    free = available()
    if free is not None and size > free:
        raise ArenaError(
            f"{for_what} {size:,} bytes of shared memory, but only {free:,} bytes are available here (the smaller of "
            f"MemAvailable and what the control group has left){advice}"
        )
    if memfd:
        file = owner.open(os.memfd_create, "vecenv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    elif why_no_processes() is None:
        file = owner.open(_unlinked_file)
    else:
        return Descriptor()
    try:
        os.ftruncate(file.number, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.number, 0, size)
        else:
            _fill(file.number, size)
    except BaseException as error:
        file.close()
        if not isinstance(error, OSError):
            raise
        raise ArenaError(f"could not allocate {size:,} bytes of shared memory: {error}") from error
    return file


def seal(file: Descriptor, *, contents: bool) -> None:
    """From here on a memfd keeps its size; ``contents``: and what is in it."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(file.number, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_WRITE if contents else seals)


def _fill(descriptor: int, size: int) -> None:
    """Write zeros: a file system reserves only the blocks that were written."""
    zeros = bytes(min(size, _CHUNK))
    written = 0
    while written < size:
        written += os.pwrite(descriptor, zeros[: size - written], written)


class Arena:
    """A block of zeroed memory, shared with the processes that get it when they start.

    Args:
        size: Bytes.
        available: Returns how many bytes are available; for tests.
        memfd: Use a memfd. Default: wherever the system has it.

    Raises:
        ArenaError: As of :func:`memory_file`.
    """

    def __init__(
        self, size: int, *, available: Callable[[], int | None] = available_memory, memfd: bool | None = None
    ) -> None:
        self.size = max(size, 1)
        memfd = has_memfd() if memfd is None else memfd
        self._file = memory_file(
            self.size, DescriptorOwner(self), "the environments need", "; use fewer environments or smaller observations",
            available=available, memfd=memfd,
        )  # fmt: skip
        try:
            if memfd:
                seal(self._file, contents=False)
            self.buffer = mmap.mmap(self._file.number, self.size)  # -1: of no file
        except BaseException:
            self._file.close()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self.size, reduction.DupFd(self._file.number))

    def __repr__(self) -> str:
        return f"Arena({self.size:,} bytes)"

    def fileno(self) -> int:
        """The descriptor; -1 once it is closed."""
        return self._file.number

    def close(self) -> None:
        """Close the descriptor. The mapping itself lives as long as a numpy view of it, in any process."""
        self._file.close()


def _attach(size: int, handle: Any) -> Arena:
    arena = Arena.__new__(Arena)
    arena.size = size
    arena._file = DescriptorOwner(arena).open(handle.detach)
    arena.buffer = mmap.mmap(arena.fileno(), size)
    arena.close()
    return arena
