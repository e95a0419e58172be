"""Detects how a worker process ended, and which code it was running when it crashed or hung.

There are two mechanisms, which work even after the worker has ended:

* :class:`ProcessWatch` reports the end of a process. The worker's pipe is no reliable sign of it: a helper that an
  environment forked may still hold the pipe open.
* :class:`StackFile` is an unnamed file, one per worker. ``faulthandler`` writes the Python stack into it on a fatal signal,
  and on request (:data:`STACK_SIGNALS`) when a reply is late.

Requesting a stack
------------------

No single signal works both while the main thread runs Python code and while it is in C code, so there are two:

* ``SIGRTMAX`` runs a Python signal handler in the main thread, between two bytecodes, while no frame changes. It does not
  run while the main thread is in C code.
* ``SIGRTMAX - 1`` is sent if the first had no effect because the main thread is in C code. Its C-level handler writes the
  stack of the main thread only, which cannot change meanwhile.

Why not ``SIGUSR1``: programs use it themselves, while libraries and environments leave the last real-time signals alone.
Without a handler these signals kill, so they are only sent to a process that still catches them (:func:`catches_signal`).

What does not work
------------------

* Walking the stacks of running threads from a C-level handler: it follows pointers to freed frames and crashes the worker.
* Sending the C-level signal first: ``faulthandler`` does not restore ``errno``. If it interrupts a thread that is acquiring
  a lock, the lock appears to be held, and a thread pool fails with ``TimeoutError``. A thread that sleeps in the kernel is
  not affected.
* Interrupting system calls: many libraries report ``EINTR`` as an error, so interrupted calls are restarted
  (``SA_RESTART``). The only exception is the first signal where environments run in other threads: the main thread then
  sleeps in CPython's own wait, which resumes by itself.
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

from vecenv.system.cores import read_kernel_file
from vecenv.system.descriptors import Descriptor, DescriptorOwner, open_unnamed_file
from vecenv.system.signals import deferred_signals, suppress_os_errors

if sys.platform != "win32":
    import fcntl

_LINUX: Final = sys.platform.startswith("linux")
_HAS_PROC: Final = os.path.exists("/proc/self")
EXIT_POLL_INTERVAL_MS: Final = 50.0
"""The interval between checks for the end of a process, where no pidfd reports it."""

EXIT_CODE_UNKNOWN: Final = 256
"""The exit code of a process that has ended, if only another process can learn the real one."""

_REAP_TIMEOUT_SECONDS: Final = 0.5
_CODE_SECONDS: Final = 0.02  # between waitpid() in another thread, and its store of the exit code
_MAX_STACK_BYTES: Final = 1024 * 1024


class ProcessWatch:
    """Watches one ``multiprocessing`` process: reports its end and sends it signals.

    A pidfd becomes readable at the exit, no matter which process holds which pipe, and never refers to a later process with
    the same pid. Without pidfds (macOS, some sandboxes) there is only the sentinel of ``multiprocessing``, a pipe that a
    forked helper may hold open, so :meth:`poll` also checks the pid every :data:`EXIT_POLL_INTERVAL_MS`.

    Args:
        process: A process that has been started.
        owner: Owner of the pidfd.

    Attributes:
        descriptor: The pidfd or sentinel; -1 after :meth:`close`.
        must_poll_for_exit: True if there is no pidfd, so that ``descriptor`` may never become readable.
    """

    def __init__(self, process: Any, owner: DescriptorOwner) -> None:
        self._process, self._pid = process, process.pid
        self._pidfd = Descriptor()
        with suppress_os_errors(AttributeError):
            self._pidfd = owner.open(os.pidfd_open, process.pid)
        self.must_poll_for_exit = not self._pidfd
        self.descriptor: int = process.sentinel if self.must_poll_for_exit else self._pidfd.number

    def poll(self, poller: select.poll, timeout_ms: float | None) -> list[tuple[int, int]]:
        """Call ``poller.poll(timeout_ms)``, and also report :attr:`descriptor` if the process has ended.

        :attr:`descriptor` must be registered with ``poller``.
        """
        if not self.must_poll_for_exit:
            return poller.poll(timeout_ms)
        left = math.inf if timeout_ms is None else timeout_ms
        while True:
            events = poller.poll(min(left, EXIT_POLL_INTERVAL_MS))
            if not events and (self.exit_code(0.0) is not None or was_reaped(self._pid)):
                return [(self.descriptor, select.POLLIN)]
            if events or left <= EXIT_POLL_INTERVAL_MS:
                return events
            left -= EXIT_POLL_INTERVAL_MS

    def has_ended(self, seconds: float = 0.0) -> bool:
        """True if the process has ended, or ends within ``seconds``."""
        if (descriptor := self.descriptor) < 0:
            return True
        poller = select.poll()  # not shared, because two threads may close an engine at once
        poller.register(descriptor, select.POLLIN)
        return bool(self.poll(poller, seconds * 1000))

    def exit_code(self, seconds: float = _REAP_TIMEOUT_SECONDS) -> int | None:
        """Return the exit code, or ``None`` if it is not known within ``seconds``."""
        # polled, because join() waits for the sentinel, which a forked helper may hold open
        deadline = time.monotonic() + seconds
        with contextlib.suppress(ValueError, AttributeError):  # the process object is closed
            while (code := self._process.exitcode) is None and time.monotonic() < deadline:
                if was_reaped(self._pid) and self._process._popen.method != "forkserver":  # its fork server sends the code
                    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
                        return None  # the kernel reaped it and discarded the code
                    time.sleep(_CODE_SECONDS)  # the program reaped it, or another thread is about to store the code
                    code = self._process.exitcode
                    break
                time.sleep(0.001)
            return None if code is None or code == EXIT_CODE_UNKNOWN else int(code)
        return None

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with suppress_os_errors():  # it ended, or another thread closed this watch
            if self._pidfd:
                signal.pidfd_send_signal(self._pidfd.number, number)
            elif self.descriptor >= 0:
                os.kill(self._pid, number)

    def close(self) -> None:
        """Close the pidfd of a process that has ended."""
        self.descriptor = -1
        self._pidfd.close()


class StackFile:
    """The file that receives a worker's Python stack and outlives the worker.

    The caller creates it and passes it to the worker. The file is also a flag: the handler of the first signal writes only
    if the file is not empty, so it writes nothing if it runs after :meth:`clear`.

    Args:
        owner: Owner of the descriptor.
    """

    def __init__(self, owner: DescriptorOwner) -> None:
        if hasattr(os, "memfd_create"):
            self._file = owner.open(os.memfd_create, "vecenv-stack", os.MFD_CLOEXEC)
        else:
            self._file = owner.open(open_unnamed_file)
        if _LINUX:  # with O_APPEND, the next stack starts at offset 0 after the caller has truncated the file
            fcntl.fcntl(self._file.number, fcntl.F_SETFL, fcntl.fcntl(self._file.number, fcntl.F_GETFL) | os.O_APPEND)

    @classmethod
    def from_descriptor(cls, descriptor: Descriptor) -> StackFile:
        """Wrap a file that another process created."""
        stack_file = cls.__new__(cls)
        stack_file._file = descriptor
        return stack_file

    @property
    def fd(self) -> int:
        """The file descriptor."""
        return self._file.number

    def install_handlers(self, *, env_threads: bool) -> None:
        """Make this process write its stack here on fatal signals and on :data:`STACK_SIGNALS`.

        Args:
            env_threads: True if environments run in threads other than the main one.
        """
        fd = self.fd
        faulthandler.enable(fd)
        if not STACK_SIGNALS:
            return
        python_signal, c_signal = STACK_SIGNALS

        def dump(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(Exception):
                if os.fstat(fd).st_size:
                    # without the GIL, other threads run while their stacks are walked
                    faulthandler.dump_traceback(fd, all_threads=getattr(sys, "_is_gil_enabled", lambda: True)())

        dump.never_deferred = True  # type: ignore[attr-defined]  # it raises nothing
        signal.signal(python_signal, dump)
        signal.siginterrupt(python_signal, env_threads)
        faulthandler.register(c_signal, fd, all_threads=False)

    def allow_dump(self) -> None:
        """Empty the file, except for the flag that lets the handler of the first signal write."""
        self.clear()
        with suppress_os_errors():
            os.pwrite(self.fd, b"\0", 0)

    def clear(self) -> None:
        """Empty the file, so that the handler of the first signal writes nothing if it runs later."""
        with suppress_os_errors():
            os.ftruncate(self.fd, 0)

    def read_fatal(self) -> str:
        """Return the stack that a fatal signal wrote; not the rest of another dump, which may arrive after :meth:`clear`."""
        return self.read().partition("Fatal Python error: ")[2]

    def read(self) -> str:
        """Return everything in the file, or its last MiB if there is more."""
        with suppress_os_errors():
            size = os.fstat(self.fd).st_size
            start = max(size - _MAX_STACK_BYTES, 0)
            return os.pread(self.fd, size - start, start).lstrip(b"\0").decode(errors="replace")
        return ""


STACK_SIGNALS: Final[tuple[int, ...]] = (
    (signal.SIGRTMAX, signal.SIGRTMAX - 1) if hasattr(faulthandler, "register") and hasattr(signal, "SIGRTMAX") else ()
)
"""The signals that request a stack, in the order to try them; empty on systems without them."""


def catches_signal(pid: int, number: int) -> bool:
    """True if ``/proc`` shows that the process has a handler for the signal."""
    caught = read_kernel_file(f"/proc/{pid}/status").partition("SigCgt:")[2].split(maxsplit=1)
    return bool(caught) and bool(int(caught[0], 16) >> (number - 1) & 1)


# -- the environment's frames in the stack of a worker ---------------------------------------------------------------------
#
# faulthandler writes the innermost frame first: this module (the handler), the environment, vecenv/link/ (which builds
# environments and wraps them), vecenv/worker/, Python.

_WORKER_FOLDER: Final = os.path.join(os.path.dirname(os.path.dirname(__file__)), "worker", "")
_LINK_FOLDER: Final = os.path.join(os.path.dirname(os.path.dirname(__file__)), "link", "")
_WORKER_MAIN: Final = f'"{_WORKER_FOLDER}main.py"'
_THIS_FILE: Final = f'"{__file__}"'
_STDLIB_FOLDER: Final = os.path.dirname(os.__file__) + os.sep
_FRAME_PATTERN: Final = re.compile(r'^  File "(.*)", line (\d+),? in (.*)$', re.MULTILINE)  # of a dump or a traceback
_PACKAGE_FOLDER: Final = os.path.dirname(os.path.dirname(_WORKER_FOLDER)) + os.sep


def has_all_env_frames(stack: str) -> bool:
    """True if a dump that may be incomplete already contains every frame of the environment."""
    return stack.endswith("\n") and _WORKER_MAIN in stack


def env_frames(stack: str) -> str:
    """Return the frames of the environment's own code from a dump, at most 12 lines."""
    threads = stack.split("\n\n")
    worker_threads = [thread for thread in threads if _WORKER_FOLDER in thread]
    # the main thread is last in a dump, and does nothing but wait if other threads step environments
    stepping = worker_threads[:-1] or worker_threads or threads
    return "\n".join([line for thread in stepping for line in _frames_above_worker(thread)][:12])


def _frames_above_worker(thread: str) -> list[str]:
    """Return the lines of one thread between the signal handler and the worker's own code."""
    frames: list[str] = []
    for line in thread.splitlines():
        if _WORKER_FOLDER not in line and _LINK_FOLDER not in line:
            frames += [line] if _THIS_FILE not in line else []
        elif frames:
            break
    return frames


def innermost_location(stack: str) -> str:
    """Return ``file:line in function`` of the innermost frame, if possible of the user's own code; empty without frames."""
    return _choose_location(_FRAME_PATTERN.findall(stack))


def location_in_traceback(traceback: str) -> str:
    """Return the location of the innermost frame, as :func:`innermost_location` does; empty if it is in this package."""
    frames = _FRAME_PATTERN.findall(traceback)[::-1]
    return "" if not frames or frames[0][0].startswith(_PACKAGE_FOLDER) else _choose_location(frames)


def _choose_location(frames: list[tuple[str, str, str]]) -> str:
    if not frames:
        return ""
    outside = [frame for frame in frames if not frame[0].startswith(_STDLIB_FOLDER) or f"-packages{os.sep}" in frame[0]]
    # compiled modules and frozen ones have no absolute path
    own = [frame for frame in outside if os.path.isabs(frame[0]) and not _is_installed(frame[0])]
    file, line, function = (own or outside or frames)[0]
    return f"{os.path.basename(file)}:{line} in {function}"


def _is_installed(file: str) -> bool:
    return f"-packages{os.sep}" in file or file.startswith(_PACKAGE_FOLDER)


# -- the end of a process --------------------------------------------------------------------------------------------------


def close_process(process: Any) -> None:
    """Close the descriptors that ``multiprocessing`` holds for a process that has ended."""
    # an exception inside its finalizer would leak two descriptors
    with deferred_signals(), contextlib.suppress(ValueError, AttributeError, AssertionError):
        if process.exitcode is None and was_reaped(process.pid):
            # close() requires an exit code, which is lost if SIGCHLD is ignored or an exception followed waitpid()
            process._popen.returncode = 255
        process.close()


def was_reaped(pid: int | None) -> bool:
    """True if the process has ended and was reaped, or never started (``None``)."""
    if pid is None:
        return True
    try:
        if _HAS_PROC:
            os.stat(f"/proc/{pid}")  # `os.path.exists` would suppress the TimeoutError of a signal handler
        else:
            os.kill(pid, 0)
    except TimeoutError:
        raise
    except OSError:  # no such process, or the pid now belongs to another user
        return True
    return False


def flush_output() -> None:
    """Flush standard output and error, unless they are missing, closed or broken."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()


def describe_exit(exitcode: int | None) -> str:
    """Describe an exit code in words, for example ``killed by SIGSEGV``."""
    if exitcode is None:
        return "ended with an unknown exit code"
    if exitcode >= 0:
        return f"exited with exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    hint = " (out of memory? The kernel's OOM killer sends SIGKILL)" if -exitcode == signal.SIGKILL else ""
    return f"killed by {name}{hint}"
