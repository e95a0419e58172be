"""Helper processes, which run environments without being workers.

A helper tries out an environment, replays a recording, or acts as a training program in a benchmark. Helpers start like
workers (:func:`vecenv.system.spawning.spawn`), and are always ended, even if the caller is interrupted.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, Pipe
from typing import Any, Final

from vecenv.system.descendants import end_group, end_marked, end_own_descendants, new_token
from vecenv.system.descriptors import DescriptorOwner
from vecenv.system.signals import deferred_signals
from vecenv.system.spawning import Lifeline, Variables, spawn
from vecenv.system.supervision import ProcessWatch, close_process, flush_output

_MAX_POLL_SECONDS: Final = 1e6  # poll() takes milliseconds as a C int
_REAP_SECONDS: Final = 5.0  # for a killed process to end; an uninterruptible system call may take longer


class HelperProcess:
    """A process with a pipe to it. ``try: helper.start() ... finally: helper.end()`` leaves nothing behind.

    Args:
        context: A ``multiprocessing`` context.
        target: The function to run, called with the other end of the pipe and ``args``.
        args: Further arguments of ``target``.
        name: Name of the process.
        daemon: True if it may *not* have ``multiprocessing`` children.
        abrupt: True if it exits without waiting for threads and children that the environments left behind.
        variables: Its environment variables.
    """

    def __init__(
        self,
        context: Any,
        target: Callable[..., None],
        args: tuple[Any, ...],
        *,
        name: str,
        daemon: bool,
        abrupt: bool = False,
        variables: Variables | None = None,
    ) -> None:
        self.pipe: Any = None
        self._processes: list[Any] = []
        self._token = new_token()
        self._arguments = abrupt, target, args
        self._spawn = partial(
            spawn, context, _serve, name=name, daemon=daemon, token=self._token, variables=variables,
            processes=self._processes,
        )  # fmt: skip
        self._descriptors = DescriptorOwner(self)
        self._watch: ProcessWatch | None = None
        self._owner_pid = os.getpid()

    def start(self) -> None:
        """Start the process."""
        with deferred_signals():
            lifeline = Lifeline(self._descriptors)
            self.pipe, child_end = Pipe()
            try:
                process = self._spawn(args=(child_end, *self._arguments), lifeline=lifeline)
                self._watch = ProcessWatch(process, self._descriptors)
                self._poll = select.poll()
                for descriptor in (self.pipe.fileno(), self._watch.descriptor):
                    self._poll.register(descriptor, select.POLLIN)
            finally:
                child_end.close()

    @property
    def pid(self) -> int | None:
        """The process id, from :meth:`start` to :meth:`end`; ``None`` before and after."""
        return self._processes[0].pid if self._processes else None

    def wait(self, deadline: float) -> bool:
        """Wait for a message or the end of the process; return False if neither came by ``deadline`` (monotonic)."""
        assert self._watch is not None
        remaining = min(max(deadline - time.monotonic(), 0.0), _MAX_POLL_SECONDS)
        return bool(self._watch.poll(self._poll, remaining * 1000))

    def receive(self) -> bytes:
        """Return the next message; empty if there is none yet, or if the pipe was closed, even in the middle of a message.

        An exception from a signal handler, such as a ``TimeoutError``, is raised and not mistaken for a closed pipe.
        """
        try:
            return self.pipe.recv_bytes() if self.pipe.poll(0) else b""
        except (ConnectionError, EOFError):
            return b""
        except OSError as error:
            if type(error) is OSError and error.errno is None:
                return b""
            raise

    def has_ended(self, seconds: float = 0.0) -> bool:
        """True if the process has ended, or ends within ``seconds``; a zombie process has ended."""
        return self._watch is not None and self._watch.has_ended(min(max(seconds, 0.0), _MAX_POLL_SECONDS))

    def reap(self) -> int | None:
        """Kill the process, if it still runs, and the rest of its group.

        Return the exit code; ``None`` if it does not become known within 5 seconds, or if no process was started.
        """
        if self._watch is None:
            return None
        (process,) = self._processes
        if process._popen.returncode is None:  # not reaped yet, so no other process can have its pid
            end_group([process.pid])
        return self._watch.exit_code(_REAP_SECONDS)

    def end(self) -> None:
        """End the process and all that it started, and release its resources. Idempotent.

        An exception from a signal handler is raised afterwards.
        """
        try:
            with deferred_signals():
                self._end()
        finally:
            if self._processes or self.pipe is not None:  # interrupted before the cleanup began
                self.end()

    def __del__(self) -> None:
        """End the process if :meth:`end` was not called, or was interrupted before its cleanup began."""
        if (self._processes or self.pipe is not None) and os.getpid() == self._owner_pid:
            with contextlib.suppress(BaseException):
                self.end()

    def _end(self) -> None:
        if self._watch is not None:
            self._watch.signal(signal.SIGKILL)
            self._watch.has_ended(_REAP_SECONDS)
            self.reap()
            end_marked([self._token])
            close_process(*self._processes)
            self._watch = None
        self._processes.clear()
        self._descriptors.close()
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None


def _serve(pipe: Connection[Any, Any], abrupt: bool, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    pid = os.getpid()
    try:
        target(pipe, *args)
    finally:
        if os.getpid() != pid:  # a child that an environment forked has returned here, and must not clean up
            os._exit(0)
        pipe.close()
        end_own_descendants()
        if abrupt:
            flush_output()
            os._exit(0)
