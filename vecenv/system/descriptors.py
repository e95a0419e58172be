"""File descriptors with exactly one owner each.

The kernel reuses the number of a closed descriptor for the next opened file. If two objects treat a number as their own,
one eventually closes or reads the wrong file, most likely in finalizers, which run in any order when the collector finds a
cycle. Here a :class:`Descriptor` owns its number. It stores the number on opening and drops it on closing, each in a single
C call that neither a signal handler nor another thread can interrupt. A :class:`DescriptorOwner` closes its descriptors when
the object that holds them is collected or the program ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Callable
from itertools import chain, starmap
from multiprocessing import reduction
from typing import Any, Final, TypeVar

from vecenv.system.signals import suppress_os_errors

if sys.platform != "win32":
    import resource


class Descriptor:
    """A file descriptor, open until :meth:`close`. Pickling it while a process is started gives that process a duplicate."""

    __slots__ = ("_cell",)

    def __init__(self) -> None:
        self._cell: list[int] = []

    @property
    def number(self) -> int:
        """The number; -1 after :meth:`close`."""
        return self._cell[0] if self._cell else -1

    def __bool__(self) -> bool:
        return bool(self._cell)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_descriptor, (reduction.DupFd(self.number),)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        while self._cell:  # an interrupted pipe() leaves both ends in one cell
            with suppress_os_errors(IndexError):
                deque(map(os.close, map(self._cell.pop, (-1,))), maxlen=0)


def _rebuild_descriptor(handle: Any) -> Descriptor:
    descriptor = Descriptor()
    descriptor._cell.append(handle.detach())
    return descriptor


def occupy_standard_descriptors() -> None:
    """Open ``/dev/null`` as any of the descriptors 0, 1 and 2 that are closed, for this process and those that it starts.

    Otherwise the next opened file, such as a pipe to a worker or the shared memory, would get one of these numbers, and
    libraries would write their output into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except TimeoutError:  # from a signal handler
            raise
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened > 2:  # another thread has opened the number first
                os.close(opened)
            else:
                os.set_inheritable(opened, True)


def open_unnamed_file(folder: str | None = None) -> int:
    """Open a new file without a name, for systems without ``memfd_create``."""
    descriptor, path = tempfile.mkstemp(prefix="vecenv-", dir=folder)
    os.unlink(path)
    return descriptor


def list_open_resources() -> frozenset[tuple[str, str]]:
    """Return (number, file) of each open descriptor, and (address range, file) of each writable shared mapping.

    The result is empty on systems without ``/proc``.
    """
    found = []
    with contextlib.suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the descriptor of listdir() itself, closed by now
                found.append((number, os.readlink(f"/proc/self/fd/{number}")))
        with open("/proc/self/maps", errors="surrogateescape") as lines:
            for line in lines:
                addresses, permissions, _, _, _, *file = line.split(maxsplit=5)
                if permissions[1] == "w" and permissions[3] == "s":
                    found.append((addresses, "".join(file).strip()))
    return frozenset(found)


Member = TypeVar("Member", "Descriptor", "DescriptorOwner")


class DescriptorOwner:
    """A group of descriptors that are closed, at the latest, when ``holder`` is collected or the program ends.

    Args:
        holder: The object that holds them; ``None``: they are closed by :meth:`close` of this or an enclosing group, unless
            :meth:`close_with` is called.
    """

    def __init__(self, holder: object | None) -> None:
        self._members: list[Descriptor | DescriptorOwner] = []
        if holder is not None:
            self.close_with(holder)

    def close_with(self, holder: object) -> None:
        """Close the descriptors when ``holder`` is collected or the program ends."""
        occupy_standard_descriptors()
        weakref.finalize(holder, _close_all, self._members, os.getpid())

    def child(self) -> DescriptorOwner:
        """Return a new subgroup, which can be closed before the rest."""
        return self._register(DescriptorOwner(None))

    def open(self, function: Callable[..., int], *args: Any) -> Descriptor:
        """Return the descriptor that ``function(*args)`` opens."""
        descriptor = self._register(Descriptor())
        descriptor._cell.extend(starmap(function, (args,)))
        return descriptor

    def pipe(self) -> tuple[Descriptor, Descriptor]:
        """Return the reading and the writing end of a new pipe."""
        reader, writer = self._register(Descriptor()), self._register(Descriptor())
        reader._cell.extend(chain.from_iterable(starmap(os.pipe, ((),))))
        writer._cell.extend(map(reader._cell.pop, (-1,)))
        return reader, writer

    def _register(self, member: Member) -> Member:
        if len(self._members) > 64:
            self._members[:] = filter(None, self._members)
        self._members.append(member)
        return member

    def close(self) -> None:
        """Close all open descriptors. Idempotent."""
        _close_all(self._members, os.getpid())

    def __len__(self) -> int:
        return sum(len(member) if isinstance(member, DescriptorOwner) else bool(member) for member in self._members)


def _close_all(members: list[Descriptor | DescriptorOwner], owner_pid: int) -> None:
    if os.getpid() != owner_pid:  # in a forked child, which has copies of the descriptors
        return
    for member in members:
        member.close()


# -- the limit on open files ------------------------------------------------------------------------------------------

DESCRIPTORS_PER_WORKER: Final = 6
"""Open files of the caller per worker: ends of two pipes, a stack file, a pidfd, and two that ``multiprocessing`` holds."""
SPARE_DESCRIPTORS: Final = 16
"""Further files that are open while workers start."""


def require_descriptors(workers: int) -> None:
    """Raise if this many workers would exceed the limit on open files. Without ``/proc``, the limit is not checked.

    Call this before starting them, because CPython leaks descriptors if the start of a process fails at the limit.

    Raises:
        OSError: The message gives the number of files needed and the limit.
    """
    if sys.platform == "win32":
        return
    with contextlib.suppress(FileNotFoundError):
        free = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))
        if free < DESCRIPTORS_PER_WORKER * workers + SPARE_DESCRIPTORS:
            raise too_few_descriptors_error(OSError(errno.EMFILE, ""), workers)


def too_few_descriptors_error(error: OSError, workers: int) -> OSError:
    """Return an ``OSError`` like ``error`` that names the number of files needed, the limit and remedies."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    need = DESCRIPTORS_PER_WORKER * workers + SPARE_DESCRIPTORS
    return OSError(
        error.errno,
        f"{os.strerror(error.errno or 0)}: {workers} workers need {need} more open files, and RLIMIT_NOFILE is {soft}; "
        "raise it (ulimit -n), or use fewer workers (num_workers=)",
    )
