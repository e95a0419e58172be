"""Dying and telling.

A process can end in ways that leave no time to speak. Three small mechanisms make sure that the caller hears of it at once,
that it can say what happened, and that nothing outlives the program:

* the *lifeline*: a pipe whose writing end only the caller holds. The kernel kills the worker's whole process group the
  moment that end closes, whatever the worker is doing, also inside C code that holds the GIL;
* the *death watch*: one epoll over a pidfd a worker. End-of-file on the worker's socket is no proof of death, because a
  helper that the environment forked may still hold it;
* the *black box*: an unnamed file a worker, into which ``faulthandler`` writes the Python stack on a fatal signal, and on
  request (:data:`STACK_SIGNALS`) when an answer is overdue.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import sys
import tempfile
from collections.abc import Iterable
from multiprocessing import reduction
from types import FrameType
from typing import Any, Final

from vecenv.system.holdings import Descriptor, Holdings
from vecenv.system.uninterrupted import Uninterrupted
from vecenv.system.watching import Patrol

if sys.platform != "win32":
    import fcntl

__all__ = [
    "STACK_SIGNALS", "BlackBox", "DeathWatch", "Lifeline", "catches", "close_process", "describe_exit", "end_group",
    "flush_output",
]  # fmt: skip

_LINUX: Final = sys.platform.startswith("linux")


class Lifeline:
    """The caller holds the writing end for as long as its workers may live; see :meth:`arm`.

    Args:
        holdings: Who holds the descriptors; default: the lifeline itself.
    """

    def __init__(self, holdings: Holdings | None = None) -> None:
        self._ends = (Holdings(self) if holdings is None else holdings).pipe()

    @property
    def reader(self) -> int:
        """The end that workers hold; -1 when it is closed."""
        return self._ends[0].number

    @property
    def writer(self) -> int:
        """The end that only the caller holds; -1 when it is closed."""
        return self._ends[1].number

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach_lifeline, (reduction.DupFd(self.reader),)

    def arm(self) -> None:
        """In a worker: end this process, and its group, when the caller's end closes."""
        self.let_go()
        arm(self.reader)

    def let_go(self) -> None:
        """In a fork of the caller: drop the copy of the writing end, which is the caller's alone to hold."""
        self._ends[1].close()

    def close(self) -> None:
        """Close both ends in the caller."""
        for end in self._ends:
            end.close()


def arm(reader: int) -> None:
    """End this process, and its group, when the other end of this pipe closes."""
    if not _LINUX:
        _watch_in_a_thread(reader)
        return
    try:
        # an open file of its own: the signal's owner is a property of the open file, and siblings share ours
        own = os.open(f"/proc/self/fd/{reader}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # a sandbox without /proc
        _watch_in_a_thread(reader)
        return
    fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpgrp() if os.getpgrp() == os.getpid() else os.getpid())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(own, 0)
    if poll.poll(0):  # the caller was gone before we armed
        os._exit(1)


class _WorkersLifeline:
    """The lifeline in a worker that was spawned: its end of it."""

    def __init__(self, reader: int) -> None:
        self._reader = reader

    def arm(self) -> None:
        arm(self._reader)


def _attach_lifeline(handle: Any) -> _WorkersLifeline:
    return _WorkersLifeline(handle.detach())


def _watch_in_a_thread(descriptor: int) -> None:
    import threading

    def watch() -> None:
        while os.read(descriptor, 1):
            pass
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="vecenv-lifeline", daemon=True).start()


class BlackBox:
    """An unnamed file that outlives a crash: the worker's last Python stack.

    Args:
        holdings: Who holds the descriptor; default: the black box itself.
    """

    def __init__(self, holdings: Holdings | None = None) -> None:
        holdings = Holdings(self) if holdings is None else holdings
        if hasattr(os, "memfd_create"):
            self._file = holdings.open(os.memfd_create, "vecenv-black-box", os.MFD_CLOEXEC)
        else:
            self._file = holdings.open(_unnamed_file)
        if _LINUX:  # so that what was read can be cut off, and the next stack begins at the beginning
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, fcntl.fcntl(self._descriptor, fcntl.F_GETFL) | os.O_APPEND)

    @property
    def _descriptor(self) -> int:
        return self._file.number

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach_black_box, (reduction.DupFd(self._descriptor),)

    def arm(self, *, threads: bool) -> None:
        """In a worker: write stacks here on a fatal signal and on :data:`STACK_SIGNALS`.

        Args:
            threads: Its environments are run in other threads than the main one.
        """
        _write_stacks_to(self._descriptor, threads)

    def expect(self) -> None:
        """Forget what was written so far, and let the worker write its stack. It is asked by :data:`STACK_SIGNALS`."""
        self.clear()
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, b"\0", 0)

    def clear(self) -> None:
        """Forget what was written so far. A worker that was asked for its stack and comes too late writes none."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)

    def read(self) -> str:
        """What was written, at most the last 64 KiB."""
        with contextlib.suppress(OSError):
            size = os.fstat(self._descriptor).st_size
            start = max(size - (1 << 16), 0)
            return os.pread(self._descriptor, size - start, start).lstrip(b"\0").decode(errors="replace")
        return ""

    def close(self) -> None:
        """Drop the descriptor. Idempotent."""
        self._file.close()


def _write_stacks_to(descriptor: int, threads: bool) -> None:
    faulthandler.enable(descriptor)
    if not STACK_SIGNALS:
        return
    asked, forced = STACK_SIGNALS

    def write(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(Exception):
            if os.fstat(descriptor).st_size:
                # threads are walked only by the thread that holds the interpreter's lock
                faulthandler.dump_traceback(descriptor, all_threads=getattr(sys, "_is_gil_enabled", lambda: True)())

    signal.signal(asked, write)
    signal.siginterrupt(asked, threads)
    faulthandler.register(forced, descriptor, all_threads=False)


class _WorkersBlackBox:
    """The black box in a worker that was spawned."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def arm(self, *, threads: bool) -> None:
        _write_stacks_to(self._descriptor, threads)


def _unnamed_file() -> int:
    descriptor, path = tempfile.mkstemp(prefix="vecenv-")
    os.unlink(path)
    return descriptor


def _attach_black_box(handle: Any) -> _WorkersBlackBox:
    return _WorkersBlackBox(handle.detach())


STACK_SIGNALS: Final[tuple[int, ...]] = (
    (signal.SIGRTMAX, signal.SIGRTMAX - 1) if hasattr(faulthandler, "register") and hasattr(signal, "SIGRTMAX") else ()
)
"""What asks a worker for its stack, the gentle way and the other one; empty where there is no such signal.

* The first runs a handler of Python's, in the main thread, between two instructions: no frame changes while it looks. It is
  not run while the main thread is in C code.
* The second is for a main thread that is in C code, and so did not answer the first: its own stack stands still then, and
  only that is written.

Two things would kill healthy workers. Walking the stacks of threads that run, from within a signal, follows pointers to
frames that are gone. And ``faulthandler`` leaves another ``errno`` behind: a lock that a thread tried to take in that moment
seems to be taken, and a thread pool ends with a ``TimeoutError``. A thread that sleeps in the kernel is past that.

System calls that can be restarted are restarted, because many a library takes an interrupted one for an error. The first
signal interrupts them where environments are run in other threads: then the main thread sleeps in Python's own waiting,
which goes on by itself.

No library and no environment has a use for the last real-time signals; SIGUSR1 belongs to programs. A signal that is not
caught any more (:func:`catches`) is not sent: it would kill."""


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, as the kernel tells."""
    with contextlib.suppress(OSError, NameError, ValueError), open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


class DeathWatch:
    """Tells which of some processes have ended, through one descriptor that can be polled with others.

    Where there are pidfds, the descriptor is an epoll over them, independent of who still holds which pipe. Elsewhere a
    :class:`~vecenv.system.watching.Patrol` looks at the processes. A pidfd is one of its worker's descriptors, so it is
    closed with them at the latest, wherever an interruption fell.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._watched: dict[int, Any] = {}
        self._own: dict[int, Descriptor] = {}
        self._patrol: Patrol | None = None

    def add(self, pid: int, sentinel: int, worker: Any) -> int:
        """Watch a process; returns the descriptor it is watched by."""
        try:
            pidfd: Descriptor = worker.held.open(os.pidfd_open, pid)
            descriptor = pidfd.number
            self._own[descriptor] = pidfd
        except (AttributeError, OSError):
            descriptor = self._patrolled(sentinel, worker)
        self._watched[descriptor] = worker
        if self._epoll is not None:
            self._epoll.register(descriptor, select.EPOLLIN)
        return descriptor

    def _patrolled(self, sentinel: int, worker: Any) -> int:
        if self._patrol is None:
            self._patrol = Patrol()
        with contextlib.suppress(OSError):
            return self._patrol.watch(worker.process, sentinel)
        return sentinel

    def watches(self, descriptor: int, worker: Any) -> bool:
        """Whether a worker is still watched by this descriptor."""
        return self._watched.get(descriptor) is worker

    def remove(self, descriptor: int, worker: Any) -> None:
        """Stop watching; closes the pidfd. Idempotent."""
        if self._watched.get(descriptor) is not worker:
            return
        if self._epoll is not None:
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(descriptor)
        self._watched.pop(descriptor, None)
        if (pidfd := self._own.pop(descriptor, None)) is not None:
            pidfd.close()
        if self._patrol is not None:
            self._patrol.forget(descriptor)

    def forget(self, held: Holdings) -> None:
        """Stop watching the process whose descriptors these are: its start was cut short."""
        for descriptor, worker in list(self._watched.items()):
            if worker.held is held:
                self.remove(descriptor, worker)

    def signal(self, descriptor: int, worker: Any, number: int) -> None:
        """Send a signal to a watched process: through its pidfd, so that it never meets a reused process id."""
        if not self.watches(descriptor, worker):
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if descriptor in self._own:
                signal.pidfd_send_signal(descriptor, number)
            else:
                os.kill(worker.pid, number)

    def descriptors(self) -> list[int]:
        """What to poll for: one epoll descriptor, or every sentinel."""
        return [self._epoll.fileno()] if self._epoll is not None else list(self._watched)

    def dead(self, timeout: float = 0.0) -> list[Any]:
        """The watched workers whose processes have ended."""
        poll = select.poll()
        for descriptor in self._watched:
            poll.register(descriptor, select.POLLIN)
        return [self._watched[fd] for fd, _ in poll.poll(timeout * 1000)] if self._watched else []

    def close(self) -> None:
        """Let go of everything."""
        for descriptor, worker in list(self._watched.items()):
            self.remove(descriptor, worker)
        if self._epoll is not None:
            self._epoll.close()
        if self._patrol is not None:
            self._patrol.close()


def close_process(process: Any) -> None:
    """Let go of a process that has ended, and of the descriptors that `multiprocessing` holds of it. Idempotent.

    Where nobody knows its exit code any more (SIGCHLD is ignored, or an interruption fell right behind the system call that
    told it), `multiprocessing` would take it for alive for ever.
    """
    # an exception in the middle of its finalizer would leave it no finalizer and two descriptors
    with Uninterrupted(), contextlib.suppress(ValueError, AttributeError, AssertionError):
        if process.exitcode is None and _is_gone(process.pid):
            process._popen.returncode = 255
        process.close()


def _is_gone(pid: int) -> bool:
    if os.path.exists("/proc/self"):
        return not os.path.exists(f"/proc/{pid}")
    try:
        os.kill(pid, 0)
    except OSError:  # no such process, or one of somebody else's by now
        return True
    return False


def flush_output() -> None:
    """Write out what is left of standard output and error, as far as there are any and somebody reads them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()


def describe_exit(exitcode: int | None) -> str:
    """``killed by SIGKILL (out of memory?)``, ``exited with code 3`` ..."""
    if exitcode is None:
        return "ended (its exit code is not known here)"
    if exitcode >= 0:
        return f"exited with exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    hint = " (out of memory? SIGKILL is what the kernel's OOM killer sends)" if -exitcode == signal.SIGKILL else ""
    return f"killed by {name}{hint}"


def end_group(pids: Iterable[int]) -> None:
    """Kill what is left in the process groups that (ended) workers led: the helpers their environments started."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
