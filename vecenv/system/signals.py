"""Defers Python's signal handlers during changes of state that must not be interrupted.

A handler can run in the main thread after any call and at any jump (see :mod:`vecenv.front.guard`), and can raise there:
Ctrl-C does, and so do time limits with ``SIGALRM``. Blocking signals does not help: the kernel then delivers them to another
thread, if there is one, and Python runs the handler in the main thread anyway. So the handlers themselves are replaced
during a block; this costs 7 us per block.

One C call, ``deque(map(...), 0)``, replaces all handlers, and a similar one restores them. A handler that has been restored
may raise before that call ends; the call is then repeated.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the signal module converts to enums, which takes 15 to 30 times as long
import contextlib
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any, Final, TypeVar

_Result = TypeVar("_Result")
_Error = TypeVar("_Error", bound=BaseException)
_NUMBERS: Final = range(1, signal.NSIG)
_cache: list[Any] = [[], {}]  # all handlers of the latest block, and the callable ones; saves 2 us per block
_replaced: list[dict[int, Any]] = []  # the handlers before each open block of the main thread, outermost first
_watched: list[deque[BaseException]] = []  # the latest exceptions of handlers, for each open block of watched_handlers()


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Defer signal handlers to the end of the block, and raise the first of their exceptions there.

    Each handler then runs once, however often its signal arrived. If a handler raises while the block is being entered, the
    block does not run. Handlers run only in the main thread, so nothing is deferred in other threads. Blocks may be nested.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = _current_handlers()
    arrived: list[int] = []

    def defer(number: int, frame: Any) -> None:
        arrived.append(number)

    try:
        deque(map(_signal.signal, handlers, repeat(defer)), 0)
        _replaced.append(handlers)
        yield
    finally:
        if _replaced and _replaced[-1] is handlers:
            _replaced.pop()
        raised: BaseException | None = None
        try:
            raised = _restore_handlers(handlers)
        finally:
            for number in dict.fromkeys(arrived):
                try:
                    handlers[number](number, sys._getframe())
                except BaseException as error:
                    raised = raised or error
        if raised is not None:
            raise raised


@contextlib.contextmanager
def watched_handlers() -> Iterator[None]:
    """Run signal handlers as usual, and let :func:`raised_by_handler` recognize their exceptions within the block.

    Handlers that the block installs stay installed after it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = _current_handlers()
    latest: deque[BaseException] = deque(maxlen=4)  # those that may still be propagating

    def watch(number: int, frame: Any) -> None:
        try:
            handlers[number](number, frame)
        except BaseException as error:
            latest.append(error)
            raise

    watch.replaced = handlers  # type: ignore[attr-defined]
    try:
        deque(map(_signal.signal, handlers, repeat(watch)), 0)
        _replaced.append(handlers)
        _watched.append(latest)
        yield
    finally:
        if _watched and _watched[-1] is latest:
            _watched.pop()
        latest.clear()
        if _replaced and _replaced[-1] is handlers:
            _replaced.pop()
        if raised := _end_watch(watch):
            raise raised


def raised_by_handler(error: BaseException | None) -> bool:
    """True if a signal handler raised this exception, or a cause or context of it, within :func:`watched_handlers`."""
    raised_ids = {id(exception) for latest in _watched for exception in latest}
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # after `raise error from error`, the chain is a cycle
        if id(error) in raised_ids:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def raise_if_from_handler(error: BaseException, function: Callable[[], object]) -> None:
    """Repeat a call that ended with ``error``. If either exception is from a signal handler (as for Ctrl-C), raise that one.

    Args:
        error: The exception of the first call. It is the function's own if the second call raises the same type.
        function: A repeatable function.
    """
    try:
        repeated = _catch_exception(function)
        if repeated is not None and type(repeated) is not type(error):  # one of the two is from a handler
            raise repeated if type(_catch_exception(function)) is type(error) else error
        if repeated is None:
            raise error
    finally:
        del error  # break a reference cycle: its traceback refers to this frame
        repeated = None


def _catch_exception(function: Callable[[], object]) -> BaseException | None:
    """Call a function, and return its exception, or ``None`` if it raises none."""
    try:
        function()
    except BaseException as error:
        return error
    return None


class suppress_os_errors(contextlib.suppress):  # noqa: N801 - like `contextlib.suppress`
    """A context manager that suppresses ``OSError`` and ``others``, except ``TimeoutError``: handlers may raise it."""

    def __init__(self, *others: type[Exception]) -> None:
        super().__init__(OSError, *others)

    def __exit__(self, kind: type[BaseException] | None, *args: Any) -> bool:
        return kind is not None and not issubclass(kind, TimeoutError) and super().__exit__(kind, *args)


def call_with_fallback(
    function: Callable[[], _Result], fallback: Callable[[_Error], _Result], kind: type[_Error]
) -> _Result:
    """Call a repeatable function and return its result; if it raises ``kind``, return ``fallback(error)``.

    An exception of a signal handler (Ctrl-C, a time limit) is raised unchanged.
    """
    try:
        return function()
    except kind as error:
        raise_if_from_handler(error, function)
        return fallback(error)


def _current_handlers() -> dict[int, Any]:
    """Return the callable handlers, which excludes ``SIG_DFL`` and ``SIG_IGN``, by signal number.

    A handler with the attribute ``never_deferred`` is left alone: replacing it would make its signal interrupt system calls.
    """
    found = list(map(_signal.getsignal, _NUMBERS))
    if found != _cache[0]:
        _cache[:] = (
            found,
            {
                number: handler
                for number, handler in zip(_NUMBERS, found, strict=True)
                if callable(handler) and getattr(handler, "never_deferred", None) is not True
            },
        )
    handlers: dict[int, Any] = _cache[1]
    return handlers


def _restore_handlers(handlers: dict[int, Any]) -> BaseException | None:
    """Restore all handlers, and return the first exception of a handler that ran meanwhile, if any."""
    raised: BaseException | None = None
    while True:
        try:
            deque(map(_signal.signal, handlers, handlers.values()), 0)
            return raised
        except BaseException as error:
            raised = raised or error


def _end_watch(watch: Any) -> BaseException | None:
    """Restore the handlers that ``watch`` replaces; return the first exception of a handler that ran meanwhile, if any.

    Other handlers stay: the block has installed them. But it may have installed the ``watch`` of an ended block, if it
    restored a handler that it had found there.
    """
    raised: BaseException | None = None
    while True:
        try:
            watch.is_over = True
            for number in watch.replaced:
                current = handler = _signal.getsignal(number)
                while getattr(handler, "is_over", False) and number in handler.replaced:
                    handler = handler.replaced[number]
                if handler is not current:
                    _signal.signal(number, handler)
            return raised
        except BaseException as error:
            raised = raised or error


def _restore_in_child() -> None:
    """Restore the handlers in a child that was forked inside a block, because it may never reach the end of the block."""
    while _replaced:
        _restore_handlers(_replaced.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore_in_child)
