"""Threads that wait inside a pool while the interpreter ends.

A thread that comes back from C++ when Python is being taken down is ended on the spot, and C++ answers that with ``abort``:
a program whose last step timed out would end by SIGABRT, after everything it had to say. (From Python 3.14 on such a thread
hangs instead, and nothing has to be done.) So before Python goes down, whoever waits is waited for, shortly; and one that is
still inside is stopped there for good. It ends with the process.
"""

from __future__ import annotations

import atexit
import ctypes
import signal
import sys
import threading
import time
import weakref
from typing import Any, Final, Protocol

__all__ = ["Waiting", "join", "watch"]

_PATIENCE: Final = 1.0  # seconds


class Waiting(Protocol):
    """Something with a thread that calls a pool."""

    @property
    def thread_inside(self) -> threading.Thread | None:
        """The thread, while it may be inside the pool."""


def watch(helper: Waiting) -> None:
    """See to it that the thread of ``helper`` does not outlive Python."""
    _HELPERS.add(helper)


def join(thread: threading.Thread, timeout: float) -> None:
    """Wait for a helper's thread to end, unless it never will any more."""
    if thread not in _STOPPED:
        thread.join(timeout)


def _inside() -> list[threading.Thread]:
    threads = [helper.thread_inside for helper in list(_HELPERS)]
    return [thread for thread in threads if thread is not None and thread.is_alive()]  # none is, in a forked child


def _before_python_ends() -> None:
    deadline = time.monotonic() + _PATIENCE
    while (stuck := _inside()) and time.monotonic() < deadline:
        time.sleep(0.005)
    if stuck and sys.platform != "win32" and sys.version_info < (3, 14):
        _stop(stuck)


def _stop(threads: list[threading.Thread]) -> None:
    """Send them a signal whose handler is C's ``pause``: Python's own handlers run in the main thread only."""
    number: int = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(number, ctypes.cast(libc.pause, ctypes.c_void_p))
    for thread in threads:
        if thread.ident is not None:
            _STOPPED.append(thread)
            signal.pthread_kill(thread.ident, number)
    time.sleep(0.01)  # until they have it


_STOPPED: list[threading.Thread] = []
_HELPERS: weakref.WeakSet[Any] = weakref.WeakSet()
atexit.register(_before_python_ends)
