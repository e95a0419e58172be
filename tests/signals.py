"""Helpers that install a signal handler temporarily or raise a signal at a chosen moment."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class Alarm(TimeoutError):
    """An exception that a signal handler raises at a time limit. Like the error of a broken pipe, it is an ``OSError``."""


@contextmanager
def signal_handler(number: int, handler: type[BaseException] | Callable[..., Any] | signal.Handlers) -> Iterator[None]:
    """Handle a signal with ``handler`` in the block, or raise it if it is an exception class. Stop the timer at the end."""

    def raise_exception(*_: object) -> None:
        raise handler

    before = signal.signal(number, raise_exception if isinstance(handler, type) else handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(number, before)


def default_sigint_handler() -> AbstractContextManager[None]:
    """Install Python's own handler for SIGINT inside the block, because a shell's background jobs ignore the signal."""
    return signal_handler(signal.SIGINT, signal.default_int_handler)


def interrupt_at(event: int, function: Callable[[], Any], *files: str) -> tuple[bool, Any]:
    """Call ``function``, and raise SIGUSR2 at the ``event``-th call or return of a function in ``files``.

    Returns of C functions to functions in ``files`` count too.
    The caller has installed a handler of SIGUSR2 that raises :class:`Alarm`.

    Returns:
        True if there were that many events, and the result of ``function``, or ``None`` if it was interrupted.
    """
    count, fired, result = 0, False, None

    def profile(frame: Any, kind: str, _: Any) -> None:
        nonlocal count, fired
        if kind == "c_call" or frame.f_code.co_filename not in files:
            return
        count += 1
        if count == event:
            fired = True
            sys.setprofile(None)
            signal.raise_signal(signal.SIGUSR2)

    sys.setprofile(profile)
    try:
        result = function()
    except Alarm:
        pass
    finally:
        sys.setprofile(None)
    return fired, result
