"""Who may call: one thread at a time, in the process that built the vector environment, until it is closed.

The refusals are the same on every backend. The process engine has a guard of its own (:func:`vecenv.engine.guard.one_call`),
which also settles what a call takes out of the table of what is owed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from threading import get_ident
from typing import Any, Concatenate, Final, NoReturn, ParamSpec, TypeVar

import gymnasium
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError

from vecenv.errors import BusyError, ForkedError, VecEnvError

__all__ = ["one_call", "refuse_busy", "refuse_closed", "refuse_forked", "say_it_was_closed"]

P = ParamSpec("P")
R = TypeVar("R")

_OURS: Final = VecEnvError, gymnasium.error.Error, AlreadyPendingCallError, NoAsyncCallError
_BARE: Final = {AssertionError, AttributeError, IndexError, KeyError, OSError, RuntimeError, TypeError, ValueError}


def refuse_closed(envs: object) -> NoReturn:
    """Refuse a call after ``close()``."""
    raise ClosedEnvironmentError(f"Trying to operate on `{type(envs).__name__}`, after a call to `close()`.")


def say_it_was_closed(envs: object, error: BaseException) -> None:
    """What came out of a call in the middle of which somebody closed: say that instead of what followed from it.

    What a signal handler raised is to come out as it is. So only those exceptions count that follow from a thing that is
    gone: our own classes and Gymnasium's, and the bare ones of Python, not what is derived from these.

    Raises:
        ClosedEnvironmentError: From the other one.
    """
    if isinstance(error, _OURS) or type(error) in _BARE:
        try:
            refuse_closed(envs)
        except ClosedEnvironmentError as closed:
            raise closed from error


def refuse_forked(envs: object, owner: int, what: str) -> NoReturn:
    """Refuse a call in a forked child; ``what`` is what it lacks there."""
    raise ForkedError(
        f"this {type(envs).__name__} belongs to another process (pid {owner}); a forked child cannot use {what}: build a "
        "new one in the child"
    )


def refuse_busy(envs: object, method: str) -> NoReturn:
    """Refuse a second thread."""
    raise BusyError(f"another thread is in a call on this {type(envs).__name__}; `{method}` was refused")


def one_call(lacking: str) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[Concatenate[Any, P], R]]:
    """Let one call in at a time; a call within a call is part of it.

    The vector environment has ``closed``, ``_caller``, 0 at first, and ``_owner``, the process id.

    Args:
        lacking: What a forked child has no use of: ``"its threads"``.

    Raises (the decorated method):
        ForkedError: In a child of the process that built it.
        ClosedEnvironmentError: After ``close()``.
        BusyError: Another thread is in a call.
    """

    def decorate(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
        @functools.wraps(method)
        def guarded(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
            me = get_ident()
            if self._caller == me:
                return method(self, *args, **kwargs)
            if os.getpid() != self._owner:
                refuse_forked(self, self._owner, lacking)
            if self.closed:
                refuse_closed(self)
            # between looking and setting there is nothing at which the interpreter lets another thread in
            if self._caller:
                refuse_busy(self, method.__name__)
            try:
                self._caller = me
                return method(self, *args, **kwargs)
            except Exception as error:
                if self.closed:
                    say_it_was_closed(self, error)
                raise
            finally:
                self._caller = 0

        return guarded

    return decorate
