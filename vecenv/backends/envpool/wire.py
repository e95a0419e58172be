"""Sends to a pool and receives from it so that neither Ctrl-C, a timeout nor a fork loses or breaks anything.

Python runs a signal handler between two of its own instructions, so an answer that a C++ function has returned can be lost
before the next instruction stores it; and while C++ waits, no handler runs at all. Hence two habits:

* what must happen together is done by C code in one instruction (:func:`together`, and ``list.extend`` over a ``starmap``);
* a wait with a time limit is done by one helper thread, which puts the answer where the direct call would have put it.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from itertools import starmap
from operator import call
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final

__all__ = ["ONCE", "Receiver", "never_destroyed_in_a_fork", "together"]

ONCE: tuple[tuple[()]] = ((),)
"""``list.extend(starmap(f, ONCE))`` calls ``f()`` once and keeps the result, in one instruction."""


def together(*calls: tuple[Any, ...]) -> None:
    """Call C functions one after the other, with no chance for a signal handler in between.

    Args:
        *calls: Function and arguments, each a tuple. The functions must be implemented in C.
    """
    list(starmap(call, calls))


class Receiver:
    """Receives answers of one pool, with or without a limit on the wait.

    Without a limit, ``recv`` is called directly. With one, a helper thread calls it; whatever it gets goes where it was to
    go even if it is waited for no more, and until then every later wait is for that same call.

    Args:
        recv: The pool's.
        waited: Seconds that were spent waiting before.
    """

    def __init__(self, recv: Callable[[], Any], waited: float) -> None:
        self._recv = recv
        self._asked: list[None] = []  # one entry while the helper is in recv()
        self._requests: SimpleQueue[list[Any] | None] = SimpleQueue()
        self._answered: SimpleQueue[bool] = SimpleQueue()
        self._thread: Thread | None = None
        self._helper: Thread | None = None  # the latest thread there was; one that was left behind is still of interest
        self.waited = waited
        """Seconds spent waiting in :meth:`receive`."""

    def receive(self, wire: list[Any], length: int, deadline: float | None) -> bool:
        """Wait until ``wire`` has ``length`` entries, one more than it had with nothing received.

        Args:
            wire: Where answers go; the same until the answer that is waited for is there.
            length: The length to wait for.
            deadline: Of ``time.monotonic()``; ``None`` waits as long as it takes.

        Returns:
            Whether it has.
        """
        while True:
            asked = bool(self._asked)  # read before the wire: the helper writes to the wire first
            if len(wire) >= length:
                return True
            if not asked:
                if deadline is None:
                    began = time.perf_counter()
                    wire.extend(starmap(self._recv, ONCE))
                    self.waited += time.perf_counter() - began
                    return True
                self._start()
                together((self._asked.append, None), (self._requests.put, wire))
            began = time.perf_counter()
            try:
                # a token may be that of an earlier answer: look at the wire again in any case
                self._answered.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except Empty:
                return len(wire) >= length
            finally:
                self.waited += time.perf_counter() - began

    def close(self, timeout: float = 5.0) -> None:
        """End the helper thread. One that is stuck in a hanging environment is left behind; it ends with the process."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._requests.put(None)
            if thread not in _STOPPED:
                thread.join(timeout)

    @property
    def thread_inside(self) -> Thread | None:
        """The helper thread, while it is in ``recv``."""
        return self._helper if self._asked else None

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = self._helper = Thread(target=self._help, name="vecenv-envpool-recv", daemon=True)
            _RECEIVERS.add(self)
            self._thread.start()

    def _help(self) -> None:
        while (wire := self._requests.get()) is not None:
            wire.extend(starmap(self._recv, ONCE))
            self._asked.clear()
            self._answered.put(True)


# -- threads inside a pool while the interpreter ends -----------------------------------------------------------------
#
# A thread that comes back from C++ when Python is being taken down is ended on the spot, and C++ answers that with `abort`:
# a program whose last step timed out would end by SIGABRT, after all its work. (From Python 3.14 on such a thread hangs
# instead, and nothing has to be done.) So before Python ends, such threads are waited for, shortly; one that is still inside
# is stopped there for good. It ends with the process.


def _before_python_ends() -> None:
    deadline = time.monotonic() + _PATIENCE
    while (stuck := _inside()) and time.monotonic() < deadline:
        time.sleep(0.005)
    if stuck and sys.platform != "win32" and sys.version_info < (3, 14):
        _stop(stuck)


def _inside() -> list[Thread]:
    threads = [receiver.thread_inside for receiver in list(_RECEIVERS)]
    return [thread for thread in threads if thread is not None and thread.is_alive()]  # none is, in a forked child


def _stop(threads: list[Thread]) -> None:
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


_PATIENCE: Final = 1.0  # seconds
_STOPPED: list[Thread] = []
_RECEIVERS: weakref.WeakSet[Receiver] = weakref.WeakSet()
atexit.register(_before_python_ends)


# -- pools in a forked child ------------------------------------------------------------------------------------------


def never_destroyed_in_a_fork(pool: Any) -> None:
    """See to it that a forked child, which has none of the pool's threads, does not run its destructor."""
    _POOLS.add(pool)


def _after_fork_in_child() -> None:
    for pool in list(_POOLS):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))


_POOLS: weakref.WeakSet[Any] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
