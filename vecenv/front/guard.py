"""Who may call: one thread at a time, in the process that built the vector environment, until it is closed.

The refusals are the same on every backend. The process engine has a guard of its own (:func:`vecenv.engine.guard.one_call`),
over the table of what its workers owe.
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

__all__ = [
    "GUARDED", "guarded", "is_answer", "own", "refuse_busy", "refuse_closed", "refuse_forked", "refuse_nested",
    "refuse_shut", "require_right", "say_it_was_closed",
]  # fmt: skip

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


def refuse_nested(envs: object, method: str) -> NoReturn:
    """Refuse a call within a call of the same thread."""
    raise BusyError(f"a call on this {type(envs).__name__} is under way in this thread; `{method}` was refused")


_LIVE: weakref.WeakSet[Any] = weakref.WeakSet()


def own(envs: Any) -> None:
    """Make a vector environment this process's own, and ready for :func:`guarded` calls.

    It gets ``_caller``, the thread that is in a call; ``_barred``, whether nobody may call any more, in a forked child or
    after ``close()``; and ``_owner``, the process id. It has ``closed``, ``_driver``, ``_steps`` and ``_resets``.
    """
    envs._caller, envs._barred, envs._owner = 0, False, os.getpid()
    _LIVE.add(envs)


def _bar_all() -> None:
    for envs in list(_LIVE):
        envs._barred = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_bar_all)


def guarded(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Let one call in at a time; and no answer is lost on its way out.

    A driver prepares how it is to be once its answer was taken (:attr:`vecenv.front.driver.Driver.after`), and that is put
    in place on the line that returns the answer: whatever is raised before leaves it owed, and what comes after that is the
    caller's own. (The interpreter looks for signals and for other threads after calls and at jumps: there is none on that
    line, nor between looking at ``_caller`` and setting it.) Where an exception is the answer, it is taken in the same way.

    Raises (the decorated method):
        ForkedError: In a child of the process that built it.
        ClosedEnvironmentError: After ``close()``.
        BusyError: Another call is under way.
    """

    name = method.__name__

    @functools.wraps(method)
    def outermost(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        me = get_ident()
        if self._caller or self._barred or self._in_halves:
            if name in self._in_halves:
                return self._make_in_halves(name, args, kwargs)  # type: ignore[no-any-return]
            if self._caller or self._barred:
                require_right(self, name)
        driver = self._driver
        try:
            self._caller, driver.after = me, None  # no call since the look at it
            answer = method(self, *args, **kwargs)
            if self._barred:
                refuse_shut(self)
            after = driver.after
            self._caller = 0
        except BaseException as error:
            if not is_answer(self, error):
                raise
            driver.taken, driver.failure = driver.after[0], None; raise  # noqa: E702 - see above
        if after is None:
            return answer
        driver.taken, steps, resets = after; self._steps += steps; self._resets += resets; return answer  # noqa: E702

    return outermost


def require_right(envs: Any, method: str) -> None:
    """Refuse a call where there is a reason to."""
    if os.getpid() != envs._owner:
        refuse_forked(envs, envs._owner, "its threads")
    if envs._barred:
        refuse_closed(envs)
    if envs._caller != get_ident():
        refuse_busy(envs, method)
    if _is_within(envs):
        refuse_nested(envs, method)


def refuse_shut(envs: Any) -> NoReturn:
    """Say of a call that it was closed meanwhile, by another thread or a signal handler."""
    envs._driver.close()
    refuse_closed(envs)


def is_answer(envs: Any, error: BaseException) -> bool:
    """A call ends by an exception; whether that is its answer."""
    envs._caller = 0
    if envs.closed:
        say_it_was_closed(envs, error)
    return error is envs._driver.failure and envs._driver.after is not None


def _is_within(envs: object) -> bool:
    """Whether a call on a vector environment is on this thread's stack, around the one that asks.

    ``_caller`` alone does not tell: an exception that falls into the very first instruction after a call has failed leaves
    it as it was.
    """
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        if frame.f_code in GUARDED and frame.f_locals["self"] is envs and _has_begun(frame.f_locals):
            return True
        frame = frame.f_back
    return False


def _has_begun(within: Any) -> bool:
    """Whether it is the guard of a call that is made as a whole, not in halves."""
    return "name" not in within or "driver" in within


GUARDED: Final = {guarded(_is_within).__code__}
"""The code of all functions that let one call in at a time."""
