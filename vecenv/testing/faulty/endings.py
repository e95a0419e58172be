"""Faults after which nobody answers: the process ends, or the call never does."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import time
from typing import Any, Final, NoReturn

from vecenv.testing.faulty.registry import fault

FOREVER: Final = 3600.0  # seconds; what "hangs" means here, so that a lost process does not stay for good


def _no_core_dump() -> None:
    """Keep a deliberate crash from writing a core file, which would be slow and of no use."""
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _signal_self(name: str) -> NoReturn:
    """Send this process a signal that ends it."""
    _no_core_dump()
    os.kill(os.getpid(), getattr(signal, name))
    time.sleep(FOREVER)  # the signal may need a moment; nothing after it may run
    raise AssertionError(f"{name} did not end the process")


@fault
def segfault(result: Any) -> NoReturn:
    """SIGSEGV, from C: read the byte at address zero."""
    _no_core_dump()
    ctypes.string_at(0)
    raise AssertionError("address zero could be read")


@fault
def abort(result: Any) -> NoReturn:
    """SIGABRT: what a failed C assertion does."""
    _no_core_dump()
    os.abort()


@fault
def bus_error(result: Any) -> NoReturn:
    """SIGBUS: touch a page of a mapping whose file was truncated meanwhile."""
    _no_core_dump()
    if not hasattr(os, "memfd_create"):
        _signal_self("SIGBUS")
    fd = os.memfd_create("bus-error")
    os.ftruncate(fd, mmap.PAGESIZE)
    view = mmap.mmap(fd, mmap.PAGESIZE)
    os.ftruncate(fd, 0)
    view[0] = 1
    raise AssertionError("a page past the end of the file could be written")


@fault
def arithmetic_error(result: Any) -> NoReturn:
    """SIGFPE: what an integer division by zero in C does."""
    _signal_self("SIGFPE")


@fault
def kill(result: Any) -> NoReturn:
    """SIGKILL: what the kernel does to a process when memory runs out."""
    _signal_self("SIGKILL")


@fault
def stop(result: Any) -> Any:
    """SIGSTOP: the process stays, and does nothing until it is continued."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return result


@fault
def exit_now(result: Any) -> NoReturn:
    """``os._exit(0)``: the process is gone without an exception, a signal or a message."""
    os._exit(0)


@fault
def sys_exit(result: Any) -> NoReturn:
    """``sys.exit(3)``: an exception that is not an ``Exception``."""
    sys.exit(3)


@fault
def keyboard_interrupt(result: Any) -> NoReturn:
    """Raise ``KeyboardInterrupt`` inside the environment."""
    raise KeyboardInterrupt("raised by an environment")


# --- the call does not return ---------------------------------------------------------------------


@fault
def sleep(result: Any) -> Any:
    """Hang in ``time.sleep``: other threads of the process still run."""
    time.sleep(FOREVER)
    return result


@fault
def hold_gil(result: Any) -> Any:
    """Hang in C with the interpreter's lock held: no Python code of this process runs any more.

    A mutex is locked twice by one thread. Unlike a sleep, no signal wakes it.
    """
    if sys.platform == "linux":
        libc = ctypes.PyDLL(None)  # unlike CDLL, does not let go of the interpreter's lock around a call
        mutex = ctypes.create_string_buffer(128)  # all zeros: an unlocked pthread mutex of the default kind
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)
    else:
        while True:
            sum(range(10**12))
    return result


@fault
def ignore_sigterm(result: Any) -> Any:
    """Refuse SIGTERM, then hang: only SIGKILL ends this one."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(FOREVER)
    return result
