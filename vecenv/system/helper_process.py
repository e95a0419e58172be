"""Helper processes: not workers, but they run environments too, and so leave nothing behind either.

The process that tries an environment and those that play training programs in a benchmark are helpers. They start as workers
do (:func:`vecenv.system.spawning.spawn`), and end in every case, however the caller is interrupted.
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

from vecenv.system.descendants import end_group, end_marked, end_own, new_token
from vecenv.system.descriptors import DescriptorOwner
from vecenv.system.spawning import Lifeline, Variables, spawn
from vecenv.system.supervision import ProcessWatch, close_process, flush_output
from vecenv.system.uninterrupted import Uninterrupted

_LONGEST_POLL: Final = 1e6  # seconds; poll() counts milliseconds in an int
_REAP_SECONDS: Final = 5.0  # for the kernel to end what was killed: in vain in a call that cannot be interrupted


class HelperProcess:
    """A process with a pipe to it. ``try: helper.start() ... finally: helper.end()`` leaves nothing behind.

    Args:
        context: A ``multiprocessing`` context.
        target: What it does: called with the other end of the pipe and ``args``.
        args: More arguments.
        name: Of the process.
        daemon: Whether it may *not* have ``multiprocessing`` children.
        abrupt: It exits without waiting for threads, children and whatever else its environments left.
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
        self.method = str(context.get_start_method())
        self._started: list[Any] = []
        self._token = new_token()
        self._arguments = abrupt, target, args
        how: dict[str, Any] = {"name": name, "daemon": daemon, "variables": variables}
        self._spawn = partial(spawn, context, _serve, token=self._token, into=self._started, **how)
        self._owned = DescriptorOwner(self)
        self._watch: ProcessWatch | None = None
        self._owner = os.getpid()

    def start(self) -> None:
        """Start it."""
        with Uninterrupted():
            lifeline = Lifeline(self._owned)
            self.pipe, theirs = Pipe()
            try:
                process = self._spawn(args=(theirs, *self._arguments), lifeline=lifeline)
                self._watch = ProcessWatch(process, self._owned)
                self._poll = select.poll()
                for descriptor in (self.pipe.fileno(), self._watch.descriptor):
                    self._poll.register(descriptor, select.POLLIN)
            finally:
                theirs.close()

    @property
    def pid(self) -> int | None:
        """Its process id, once it has been started."""
        return self._started[0].pid if self._started else None

    def wait(self, deadline: float) -> bool:
        """Wait until it has sent something or has ended; false if neither happened until ``deadline`` (monotonic)."""
        assert self._watch is not None
        left = min(max(deadline - time.monotonic(), 0.0), _LONGEST_POLL)
        return bool(self._watch.sleep(self._poll, left * 1000))

    def receive(self) -> bytes:
        """The next message; empty if there is none yet, or it closed its end, maybe in the middle of a message.

        What a signal handler raises, a ``TimeoutError`` say, is not mistaken for that.
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
        """Whether it ends by itself within that many seconds; that it can be seen in ``/proc`` still means nothing."""
        return self._watch is not None and self._watch.has_ended(min(max(seconds, 0.0), _LONGEST_POLL))

    def exit_code(self) -> int | None:
        """How it ended; waits for that a moment."""
        if self._watch is None:
            return None
        (process,) = self._started
        if process._popen.returncode is None:  # not reaped, so that its number is still its own
            end_group([process.pid])
        return self._watch.exit_code(_REAP_SECONDS)

    def end(self) -> None:
        """End it, and all that it started; give everything back. Idempotent.

        An exception of a signal handler comes out of here when all of that is done.
        """
        try:
            with Uninterrupted():
                self._end()
        finally:
            if self._started or self.pipe is not None:  # interrupted before it began
                self.end()

    def __del__(self) -> None:
        """The last resort, for a second exception in the very moment in which :meth:`end` begins."""
        if (self._started or self.pipe is not None) and os.getpid() == self._owner:
            with contextlib.suppress(BaseException):
                self.end()

    def _end(self) -> None:
        if self._watch is not None:
            self._watch.signal(signal.SIGKILL)
            self._watch.has_ended(_REAP_SECONDS)
            self.exit_code()
            end_marked([self._token])
            close_process(*self._started)
            self._watch = None
        self._started.clear()
        self._owned.close()
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None


def _serve(pipe: Connection[Any, Any], abrupt: bool, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    pid = os.getpid()
    try:
        target(pipe, *args)
    finally:
        if os.getpid() != pid:  # a child that an environment forked has come back: all this is not its business
            os._exit(0)
        pipe.close()
        end_own()
        if abrupt:
            flush_output()
            os._exit(0)
