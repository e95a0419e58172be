"""Copies of a process by ``fork``: what one needs to stand on its own, and why a process cannot be copied.

A copy has the memory of the original, and shares its open files: that of a log, a socket, a pipe to a helper. Its threads
are gone, with the locks that they held. So both are looked for before (:class:`Uncopied`).

A copy is made by two forks, the first of which ends at once. So it is no child of the process that it was made in, where
``os.wait()`` of an environment would meet it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Final

from vecenv.system.cores import kernel_file
from vecenv.system.descriptors import Descriptor, DescriptorOwner
from vecenv.system.spawning import adopt

_DEVICES: Final = ("/dev/nvidia", "/dev/dri", "/dev/kfd")
_SHOWN: Final = 5


def has_copies() -> bool:
    """Whether processes can be copied on this system."""
    return sys.platform.startswith("linux") and hasattr(os, "pidfd_open") and os.path.exists("/proc/self/fd")


class Uncopied:
    """Looks for what copies of this process would share, of all that was opened since it was made.

    Attributes:
        cpus: The cores of this process then, before it was bound to fewer.
    """

    def __init__(self) -> None:
        self.cpus = os.sched_getaffinity(0)
        self._known = set(_open_files().items())

    def why_not(self) -> str:
        """Why this process cannot be copied; empty: it can."""
        if _threads() > 1:
            _fork_in_vain()
        if (threads := _threads()) > 1:
            return f"it has {threads} threads, and a copy has one"
        shared = []
        for number, what in _open_files().items():
            if (number, what) in self._known:
                continue
            if what.startswith(_DEVICES):
                return f"it uses a GPU ({what}), whose state is not in its memory"
            if what.startswith("/memfd:") and not _is_shared(what):  # a library that was loaded from there
                continue
            if what.startswith(("socket:", "pipe:")) or (what.startswith("/") and _is_written(number)):
                shared.append(what.removesuffix(" (deleted)"))
        if not shared:
            return ""
        more = f" and {len(shared) - _SHOWN} more" if len(shared) > _SHOWN else ""
        return f"copies would share what it has open for writing: {', '.join(shared[:_SHOWN])}{more}"


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _fork_in_vain() -> None:
    """Libraries that can be forked, as OpenBLAS, end their threads before a fork, and begin new ones when they need them."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


def _open_files() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _is_written(number: int) -> bool:
    flags = kernel_file(f"/proc/self/fdinfo/{number}").partition("flags:")[2].split()
    return bool(flags) and int(flags[0], 8) & os.O_ACCMODE != os.O_RDONLY


def _is_shared(file: str) -> bool:
    """Whether a file is memory that this process shares with what else has it open."""
    maps = kernel_file("/proc/self/maps").splitlines()
    return not maps or any(line.split()[1].endswith("s") and line.endswith(file) for line in maps)


def open_of(pid: int, number: int, flags: int) -> int:
    """Open a file that another process of this user has open, for oneself."""
    return os.open(f"/proc/{pid}/fd/{number}", flags | os.O_CLOEXEC)


def fork_twice(token: int) -> bool:
    """Copy this process. True in the copy, which has a session of its own and ends with the caller.

    Args:
        token: What the copy is marked with, see :mod:`vecenv.system.descendants`.
    """
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return False
    try:
        if os.fork():
            os._exit(0)
        adopt(token)
    except BaseException:  # it must not go on as the one that it is a copy of
        os._exit(1)
    return True


LOST: Final = 256
"""The exit code of a process that has ended, where it is not known."""


class _CopyPopen:
    """What ``multiprocessing`` asks for a process that it has not started itself."""

    def __init__(self, pid: int, method: str, pidfd: Descriptor) -> None:
        self.pid, self.method, self._pidfd = pid, method, pidfd
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int | None:
        if self.returncode is None and (not self._pidfd or connection.wait([self._pidfd.number], timeout)):
            code = LOST
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                code = os.waitstatus_to_exitcode(status) if pid else code
            self.returncode = code
        return self.returncode

    def poll(self) -> int | None:
        return self.wait(0.0)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            if self._pidfd:
                signal.pidfd_send_signal(self._pidfd.number, number)

    def close(self) -> None:
        self._pidfd.close()


class CopiedProcess(BaseProcess):
    """A process that was forked by another one, as one of ``multiprocessing``.

    Its exit code is known only where this process adopts orphans, as the first one of a container does; else it is
    :data:`LOST`.

    Args:
        pid: It.
        method: How the one was started that it is a copy of.
        name: What it is called.
        owner: Of its pidfd.
    """

    def __init__(self, pid: int, method: str, name: str, owner: DescriptorOwner) -> None:
        super().__init__(name=name, daemon=True)
        pidfd = owner.open(os.pidfd_open, pid)
        self._popen = _CopyPopen(pid, method, pidfd)
        self._sentinel = pidfd.number

    def close(self) -> None:
        """Give the pidfd back. Its exit code is known as before."""
        self._popen.close()
