"""One call at a time on a vector environment: one thread, in the process that built it, until it is closed.

The guard also hands answers over. An answer counts as taken when the caller has it, and not before: a method prepares what
is pending afterwards (:attr:`vecenv.front.driver.Driver.next_pending`), and the guard puts that in place on the line that
returns. Whatever a signal handler raises before leaves the answer pending. CPython looks for signals and for other threads
after calls and at jumps: there is none on that line, nor between the look at ``caller`` and the store into it.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from types import FrameType
from typing import Any, Concatenate, Final, NoReturn, ParamSpec, TypeVar

import gymnasium
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError

from vecenv.errors import BusyError, ForkedError, VecEnvError

__all__ = ["exclusive", "is_within_a_call", "left_in_a_fork"]

P = ParamSpec("P")
R = TypeVar("R")

_OURS: Final = VecEnvError, gymnasium.error.Error, AlreadyPendingCallError, NoAsyncCallError
_BARE: Final = {AssertionError, AttributeError, IndexError, KeyError, OSError, RuntimeError, TypeError, ValueError}

left_in_a_fork: weakref.WeakSet[Any] = weakref.WeakSet()
"""Everything whose ``abandon()`` is called in a process that is forked from this one."""


def _abandon_all() -> None:
    for owned in list(left_in_a_fork):
        owned.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)


def exclusive(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Let one call in at a time, and lose no answer on its way out.

    Raises (the decorated method):
        ForkedError: In a child of the process that built the vector environment.
        ClosedEnvironmentError: After ``close()``.
        BusyError: Another call is under way, in another thread or around this one.
    """

    name = method.__name__

    @functools.wraps(method)
    def guarded(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        driver, me = self._driver, get_ident()
        if driver.caller or driver.barred or self._in_halves:
            if name in self._in_halves:
                return self._make_in_halves(name, args, kwargs)  # type: ignore[no-any-return]
            if driver.caller or driver.barred:
                _require_right(self, driver, name)
        try:
            ended = driver.last_call_ended
            driver.caller = me
            driver.last_call_ended = False
            driver.next_pending = driver.pending_error = None
            if not ended:
                driver.resume()
            answer = method(self, *args, **kwargs)
            if driver.barred:
                _raise_barred(self, driver)
            next_pending = driver.next_pending
            driver.caller, driver.last_call_ended = 0, True
        except BaseException as error:
            driver.caller = 0
            if not _is_answer(self, driver, error):
                raise
            driver.pending_error = None
            driver.pending = driver.next_pending; raise  # noqa: E702 - no call and no jump between the two
        if next_pending is None:
            return answer
        driver.pending = next_pending; return answer  # noqa: E702 - likewise

    return guarded


def _is_answer(envs: Any, driver: Any, error: BaseException) -> bool:
    """Whether the exception that a call ends by is its answer."""
    if driver.barred:
        driver.leave()
        # What a signal handler raised comes out as it is. So only exceptions count that may follow from a thing that is
        # gone: our own classes and Gymnasium's, and the bare ones of Python, not what is derived from these.
        if driver.barred != "forked" and (isinstance(error, _OURS) or type(error) in _BARE):
            try:
                _raise_barred(envs, driver)
            except ClosedEnvironmentError as closed:
                raise closed from error
    return error is driver.pending_error and driver.next_pending is not None


def _raise_barred(envs: Any, driver: Any) -> NoReturn:
    """Say that the vector environment was closed, or that this is another process. Lets go of what a call still used."""
    kind = type(envs).__name__
    if driver.barred == "forked":
        raise ForkedError(
            f"this {kind} belongs to another process (pid {driver.owner}); a forked child cannot use {driver.own_means}: "
            "build a new one in the child"
        )
    driver.leave()
    raise ClosedEnvironmentError(f"Trying to operate on `{kind}`, after a call to `close()`.")


def _require_right(envs: Any, driver: Any, method: str) -> None:
    """Refuse a call where there is a reason to."""
    kind = type(envs).__name__
    if driver.barred:
        _raise_barred(envs, driver)
    if driver.caller != get_ident():
        raise BusyError(f"another thread is in a call on this {kind}; `{method}` was refused")
    if is_within_a_call(envs, 3):  # around the one that asks
        raise BusyError(f"a call on this {kind} is under way in this thread; `{method}` was refused")


def is_within_a_call(envs: object, depth: int = 1) -> bool:
    """Whether a call on a vector environment is on this thread's stack, from that many frames up on.

    ``caller`` alone does not tell: an exception that falls into the very first instruction after a call has failed leaves it
    as it was.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        if frame.f_code is _GUARDED and frame.f_locals["self"] is envs and "ended" in frame.f_locals:
            return True
        frame = frame.f_back
    return False


_GUARDED: Final = exclusive(is_within_a_call).__code__
