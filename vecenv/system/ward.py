"""A process of ours that is no worker: it ends with us, and what it started ends with it.

The process that tries an environment and those that play training programs in a benchmark run somebody's environments too.
They get what workers have, in one place: a session of their own, the lifeline, the marks of
:mod:`vecenv.system.descendants`, and an end that happens in every case, however the caller is interrupted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import weakref
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, Final

from vecenv.system.descendants import Descendants, adopt, end_marked, end_own, new_token, reap_group, snapshot
from vecenv.system.holdings import Descriptor, Holdings
from vecenv.system.main_module import start_process
from vecenv.system.supervision import Lifeline, close_process, flush_output
from vecenv.system.uninterrupted import Uninterrupted, blocked, let_in
from vecenv.system.variables import Variables, named, set_variables
from vecenv.system.watching import Patrol

__all__ = ["Ward"]

_LONGEST_POLL: Final = 1e6  # seconds; poll() counts milliseconds in an int
_REAP_SECONDS: Final = 5.0
_ATTEMPTS: Final = 100  # at an end, while one handler after the other raises

_lifelines: weakref.WeakSet[Lifeline] = weakref.WeakSet()


def _let_go_of_all() -> None:
    for lifeline in list(_lifelines):
        lifeline.let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_of_all)


class Ward:
    """A process with a pipe to it. ``try: ward.start() ... finally: ward.end()`` leaves nothing behind.

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
        self.process: Any = None
        self.pipe: Any = None
        self._context, self._target, self._args = context, target, args
        self._variables = variables or {}
        self._name, self._daemon, self._abrupt = named(name, self._variables), daemon, abrupt
        self._token = new_token()
        self._lifeline: Lifeline | None = None
        self._holdings = Holdings(self)
        self._pidfd = Descriptor()
        self._patrol: Patrol | None = None  # where there is no pidfd
        self._bell = -1
        self._group_ended = False
        self._owner = os.getpid()

    def start(self) -> Any:
        """Start it; returns our end of the pipe."""
        with Uninterrupted():
            self._lifeline = Lifeline()
            _lifelines.add(self._lifeline)
            ours, theirs = self._context.Pipe()
            self.pipe = ours
            try:
                args = (self._lifeline, self._token, self._variables, self._abrupt, self._target, theirs, self._args)
                self.process = self._context.Process(target=_main, args=args, daemon=self._daemon, name=self._name)
                with _ctrl_c_blocked(self.method):
                    start_process(self.process, self.method)
                try:
                    self._pidfd = self._holdings.open(os.pidfd_open, self.process.pid)
                except (OSError, AttributeError):
                    self._patrol = Patrol()
                    with contextlib.suppress(OSError):
                        self._bell = self._patrol.watch(self.process, self.process.sentinel)
            finally:
                theirs.close()
        return ours

    @property
    def method(self) -> str:
        """How it is started."""
        return str(self._context.get_start_method())

    @property
    def pid(self) -> int | None:
        """Its process id, once it has been started."""
        try:
            return self.process.pid if self.process is not None else None
        except ValueError:  # it is closed
            return None

    def wait(self, deadline: float) -> bool:
        """Wait until it has said something or has ended; false if neither happened until ``deadline`` (monotonic)."""
        while (left := deadline - time.monotonic()) > 0:
            if connection.wait([self.pipe, self._death()], min(left, _LONGEST_POLL)):
                return True
        return bool(connection.wait([self.pipe, self._death()], 0))

    def receive(self) -> bytes:
        """The next message; empty if there is none yet.

        Raises:
            EOFError: It closed its end, maybe in the middle of a message. What a signal handler raises, a ``TimeoutError``
                say, is not mistaken for that.
        """
        try:
            return self.pipe.recv_bytes() if self.pipe.poll(0) else b""
        except ConnectionError:
            raise EOFError from None
        except OSError as error:
            if type(error) is OSError and error.errno is None:
                raise EOFError from None
            raise

    def has_ended(self) -> bool:
        """Whether it has; that it can be seen in ``/proc`` still means nothing."""
        return bool(connection.wait([self._death()], 0))

    def wait_for_end(self, seconds: float) -> bool:
        """Whether it ends by itself within so many seconds."""
        return bool(connection.wait([self._death()], min(max(seconds, 0.0), _LONGEST_POLL)))

    def exit_code(self) -> int | None:
        """How it ended; waits for that a moment."""
        self._kill_group()
        self.process.join(_REAP_SECONDS)
        code: int | None = self.process.exitcode
        return code

    def _death(self) -> int:
        number = self._pidfd.number
        if number < 0:
            number = self._bell
        return number if number >= 0 else int(self.process.sentinel)

    def end(self) -> None:
        """End it, its group, and what it started in whatever session; give everything back. Idempotent.

        An exception of a signal handler comes out of here when all of that is done.
        """
        raised: BaseException | None = None
        for _ in range(_ATTEMPTS):
            try:
                with Uninterrupted():
                    self._end()
                break
            except BaseException as error:
                raised = error
                if self._lifeline is None and self.pipe is None and self.process is None:
                    break
        if raised is not None:
            raise raised

    def __del__(self) -> None:
        """The last resort, for a second exception in the very moment in which :meth:`end` begins."""
        if (self.process is not None or self.pipe is not None) and os.getpid() == self._owner:
            with contextlib.suppress(BaseException):
                self.end()

    def _end(self) -> None:
        held, pid = Descendants(), self.pid
        if pid is not None:
            if not self.has_ended():
                held = snapshot([pid])
                self.process.kill()
            self._kill_group()
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None
        if pid is not None:
            self.process.join(_REAP_SECONDS)  # in vain where the kernel is in a call that cannot be interrupted
            held.end()
            end_marked([self._token])
            close_process(self.process)
            reap_group(pid)
        self.process = None
        self._pidfd.close()
        if self._patrol is not None:
            self._patrol.close()
            self._bell = -1
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None

    def _kill_group(self) -> None:
        """Before it is reaped: until then nobody else can have its process id, nor a group of that number."""
        if not self._group_ended and hasattr(os, "killpg"):
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self._group_ended = True


def _ctrl_c_blocked(method: str) -> contextlib.AbstractContextManager[None]:
    """Until it is in its own session it would die of the terminal's Ctrl-C, with a traceback."""
    if method == "forkserver":  # a new server would keep the mask for all it forks
        return contextlib.nullcontext()
    if method == "spawn":
        from multiprocessing import resource_tracker

        resource_tracker.ensure_running()  # which would let Ctrl-C in again if it was started with the process
    return blocked((signal.SIGINT,))


def _main(
    lifeline: Lifeline,
    token: str,
    variables: Variables,
    abrupt: bool,
    target: Callable[..., None],
    pipe: Connection[Any, Any],
    args: tuple[Any, ...],
) -> None:
    let_in()
    set_variables(variables)
    with contextlib.suppress(OSError, AttributeError):
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    lifeline.arm()
    adopt(token, orphans=True)
    pid = os.getpid()
    try:
        target(pipe, *args)
    finally:
        if os.getpid() != pid:  # a child that an environment forked has come back: all this is not its business
            os._exit(0)
        pipe.close()
        end_own(token)
        if abrupt:
            flush_output()
            os._exit(0)
