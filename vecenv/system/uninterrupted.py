"""A moment in which no signal handler raises.

A handler of Python's runs between any two bytecodes of the main thread and may raise there: Ctrl-C does, and so do time
limits made of ``SIGALRM``. Between the system call that makes a process or a descriptor and the assignment that says whose
it is, that loses it for good. Blocking signals alone would not help: any other thread may take them, and the handler runs
all the same.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any, TypeVar

_T = TypeVar("_T")
_Error = TypeVar("_Error", bound=BaseException)

_current: list[Uninterrupted] = []


class Uninterrupted:
    """``with Uninterrupted():`` handlers run when the block is done; what they raise comes out of its end.

    For what takes milliseconds. In other threads than the main one there is nothing to do, because no handler runs there.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._replaced: list[int] = []
        self._over = False
        self._came: list[int] = []

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in range(1, signal.NSIG):
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
        try:
            with blocked(self._handlers):
                for number in self._handlers:
                    self._replaced.append(number)
                    signal.signal(number, self._note)
                _current.append(self)
        except BaseException:
            self._leave()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._leave()

    def _leave(self) -> None:
        if self in _current:
            _current.remove(self)
        try:
            self._put_back()
        finally:
            self._make_up_for()

    def _make_up_for(self) -> None:
        """Run what came meanwhile; the first exception is the one that counts."""
        raised: BaseException | None = None
        while self._came:
            number = self._came.pop(0)
            try:
                self._handlers[number](number, None)
            except BaseException as error:
                raised = raised or error
        if raised is not None:
            raise raised

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._over:  # one that was put back before this one has raised in the middle of it
            self._handlers[number](number, frame)
        else:
            self._came.append(number)

    def _put_back(self) -> None:
        raised: BaseException | None = None
        with blocked(self._replaced):
            self._over = True
            while self._replaced:
                number = self._replaced[-1]
                try:
                    signal.signal(number, self._handlers[number])
                    self._replaced.pop()
                except BaseException as error:  # of a handler that is back already; this one is tried again
                    raised = error
        if raised is not None:
            raise raised


class Noted(Uninterrupted):
    """``with Noted():`` handlers run as ever, and :func:`by_handler` tells what they raise from what other code raises."""

    def __init__(self) -> None:
        super().__init__()
        self.raised: deque[BaseException] = deque(maxlen=4)  # those that are on their way

    def _note(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handlers[number](number, frame)
        except BaseException as error:
            self.raised.append(error)
            raise

    def _leave(self) -> None:
        self.raised.clear()
        super()._leave()


def by_handler(error: BaseException | None) -> bool:
    """Whether a signal handler has raised this exception, or one that it was made of, within a :class:`Noted`."""
    raised = {id(one) for noted in _current if isinstance(noted, Noted) for one in noted.raised}
    while error is not None and id(error) not in raised:
        error = error.__cause__ or error.__context__
    return error is not None


def succeeds_when_repeated(function: Callable[[], object]) -> bool:
    """Whether a function ends without an exception.

    To be asked when it just raised: if it succeeds now, the exception came from a signal handler (Ctrl-C, a time limit), and
    is to be passed on.
    """
    try:
        function()
    except BaseException:
        return False
    return True


def contained(function: Callable[[], _T], instead: Callable[[_Error], _T], kind: type[_Error]) -> _T:
    """The result of a function that may be called twice; where it raises such an exception, what ``instead`` makes of that.

    An exception of a signal handler (Ctrl-C, a time limit) is passed on as it is.
    """
    try:
        return function()
    except kind as error:
        if succeeds_when_repeated(function):
            raise
        return instead(error)


@contextlib.contextmanager
def blocked(numbers: Iterable[int]) -> Iterator[None]:
    """None of these reaches this thread: handlers are exchanged one by one, and those there already may raise."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        # may raise for what came before, and has blocked them all the same
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_in() -> None:
    """In a process that was forked in such a moment: the handlers are what they were before."""
    while _current:
        _current.pop()._put_back()
