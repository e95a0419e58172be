"""Sees how processes end, and what they were doing: two small mechanisms that need no word from a process that is gone.

* A :class:`ProcessWatch` tells that a process has ended. End-of-file on a worker's pipe is no proof of that, because a
  helper that its environment forked may still hold the pipe.
* A :class:`BlackBox` is an unnamed file for each worker, into which ``faulthandler`` writes the Python stack on a fatal
  signal, and on request (:data:`STACK_SIGNALS`) when an answer is overdue.

There are two such signals, the gentle one and the other one:

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
caught any more (:func:`catches`) is not sent: it would kill.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import re
import select
import signal
import sys
import time
from types import FrameType
from typing import Any, Final

from vecenv.system.copies import LOST
from vecenv.system.cores import kernel_file
from vecenv.system.descriptors import Descriptor, DescriptorOwner, unnamed_file
from vecenv.system.uninterrupted import Uninterrupted

if sys.platform != "win32":
    import fcntl

_LINUX: Final = sys.platform.startswith("linux")
SLICE_MS: Final = 50.0
"""Between two questions whether a process has ended, where nothing else tells."""

_REAP: Final = 0.5  # seconds for the exit code of a process that has ended


class ProcessWatch:
    """Tells when a process of ``multiprocessing``'s has ended and how, and sends it signals.

    A pidfd tells, independent of which process holds which pipe, and never means another process of the same number. Without
    pidfds (macOS, some sandboxes) the pipe tells by which ``multiprocessing`` itself notices an end; because a forked helper
    may hold that open, every sleep is cut into slices with a question to the system between them.

    Args:
        process: It, started.
        owner: Of the pidfd.

    Attributes:
        descriptor: Readable once the process has ended, if a pidfd tells; -1 once it was seen to its end (:meth:`close`).
        asks: There is no pidfd.
    """

    def __init__(self, process: Any, owner: DescriptorOwner) -> None:
        self._process, self._pid = process, process.pid
        self._pidfd = Descriptor()
        with contextlib.suppress(OSError, AttributeError):
            self._pidfd = owner.open(os.pidfd_open, process.pid)
        self.asks = not self._pidfd
        self.descriptor: int = process.sentinel if self.asks else self._pidfd.number

    def sleep(self, poll: select.poll, timeout_ms: float | None) -> list[tuple[int, int]]:
        """``poll.poll(timeout_ms)``, where ``poll`` has our descriptor among others, that notices the end in any case."""
        if not self.asks:
            return poll.poll(timeout_ms)
        left = math.inf if timeout_ms is None else timeout_ms
        while True:
            events = poll.poll(min(left, SLICE_MS))
            if not events and (self.exit_code(0.0) is not None or _is_gone(self._pid)):
                return [(self.descriptor, select.POLLIN)]
            if events or left <= SLICE_MS:
                return events
            left -= SLICE_MS

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Whether it has, after waiting for that at most so long."""
        if (descriptor := self.descriptor) < 0:
            return True
        poll = select.poll()  # a new one, because two threads may close an engine at once
        poll.register(descriptor, select.POLLIN)
        return bool(self.sleep(poll, seconds * 1000))

    def exit_code(self, seconds: float = _REAP) -> int | None:
        """How it ended, once it has; ``None``: not known. Never by ``join``, which a helper with its pipe delays."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(ValueError):  # its object is closed
            while (code := self._process.exitcode) is None and time.monotonic() < deadline:
                if _is_gone(self._pid) and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
                    return None  # the kernel has reaped it, and the code is lost
                time.sleep(0.001)
            return None if code is None or code == LOST else int(code)
        return None

    def signal(self, number: int) -> None:
        """Send a signal, unless it was seen to its end."""
        with contextlib.suppress(OSError):  # it has ended, or another thread closed this meanwhile
            if self._pidfd:
                signal.pidfd_send_signal(self._pidfd.number, number)
            elif self.descriptor >= 0:
                os.kill(self._pid, number)

    def close(self) -> None:
        """It was seen to its end: give the pidfd back. Idempotent."""
        self.descriptor = -1
        self._pidfd.close()


class BlackBox:
    """An unnamed file that outlives a crash: the worker's last Python stack. It goes to the worker as an argument.

    Args:
        owner: Of the descriptor.
    """

    def __init__(self, owner: DescriptorOwner) -> None:
        if hasattr(os, "memfd_create"):
            self._file = owner.open(os.memfd_create, "vecenv-black-box", os.MFD_CLOEXEC)
        else:
            self._file = owner.open(unnamed_file)
        if _LINUX:  # so that what was read can be cut off, and the next stack begins at the beginning
            fcntl.fcntl(self._file.number, fcntl.F_SETFL, fcntl.fcntl(self._file.number, fcntl.F_GETFL) | os.O_APPEND)

    @property
    def number(self) -> int:
        """Its descriptor."""
        return self._file.number

    @classmethod
    def opened(cls, file: Descriptor) -> BlackBox:
        """That of a process which another one has made a file for."""
        box = cls.__new__(cls)
        box._file = file
        return box

    def arm(self, *, threads: bool) -> None:
        """In a worker: write stacks here on a fatal signal and on :data:`STACK_SIGNALS`.

        Args:
            threads: Its environments are run in other threads than the main one.
        """
        descriptor = self._file.number
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

    def expect(self) -> None:
        """Forget what was written so far, and let the worker write its stack. It is asked by :data:`STACK_SIGNALS`."""
        self.clear()
        with contextlib.suppress(OSError):
            os.pwrite(self._file.number, b"\0", 0)

    def clear(self) -> None:
        """Forget what was written so far. A worker that was asked for its stack and comes too late writes none."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._file.number, 0)

    def read(self) -> str:
        """What was written, at most the last 64 KiB."""
        with contextlib.suppress(OSError):
            size = os.fstat(self._file.number).st_size
            start = max(size - (1 << 16), 0)
            return os.pread(self._file.number, size - start, start).lstrip(b"\0").decode(errors="replace")
        return ""


STACK_SIGNALS: Final[tuple[int, ...]] = (
    (signal.SIGRTMAX, signal.SIGRTMAX - 1) if hasattr(faulthandler, "register") and hasattr(signal, "SIGRTMAX") else ()
)
"""What asks a worker for its stack; empty where there is no such signal."""


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, as the kernel tells."""
    caught = kernel_file(f"/proc/{pid}/status").partition("SigCgt:")[2].split(maxsplit=1)
    return bool(caught) and bool(int(caught[0], 16) >> (number - 1) & 1)


# -- where an environment's own code is on the stack of a worker ----------------------------------------------------------

_WORKER: Final = os.path.join(os.path.dirname(os.path.dirname(__file__)), "worker", "")  # the frames below an environment's
_MAIN: Final = f'"{_WORKER}main.py"'
_ASKED: Final = f'"{__file__}"'  # the frames above
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_STANDARD: Final = os.path.dirname(os.__file__) + os.sep


def reaches_down(stack: str) -> bool:
    """Whether a ``faulthandler`` dump that is being written has got beyond the environment's own code in the main thread."""
    return stack.endswith("\n") and _MAIN in stack


def innermost(stack: str, lines: int = 12) -> str:
    """The part of a ``faulthandler`` dump that names the environment's own code: vecenv's frames cut off on both sides.

    Of several threads those count in which vecenv is: the main one; or, where others step environments, these, while the
    main one, which comes last, waits for them.
    """
    threads = stack.split("\n\n")
    ours = [thread for thread in threads if _WORKER in thread]
    kept: list[str] = []
    for thread in ours[:-1] or ours or threads:
        above: list[str] = []
        for line in thread.splitlines():
            if _WORKER not in line:
                above += [line] if _ASKED not in line else []
            elif above:
                break
        kept += above
    return "\n".join(kept[:lines])


def place(stack: str) -> str:
    """The innermost frame of a stack that is not in Python's standard library, in a few words; empty if there is none."""
    frames = _FRAME.findall(stack)
    others = [frame for frame in frames if not frame[0].startswith(_STANDARD) or f"-packages{os.sep}" in frame[0]]
    if not frames:
        return ""
    file, line, function = (others or frames)[0]
    return f"{os.path.basename(file)}:{line} in {function}"


# -- how a process ended --------------------------------------------------------------------------------------------------


def close_process(process: Any) -> None:
    """Give back the descriptors that ``multiprocessing`` holds of a process that has ended. Idempotent.

    Where its exit code is lost (SIGCHLD is ignored, or an interruption fell right behind the system call that told it),
    ``multiprocessing`` would take it for alive for ever.
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
    except OSError:  # no such process, or another user's by now
        return True
    return False


def flush_output() -> None:
    """Write out what is left of standard output and error, as far as they are there and can be written."""
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
