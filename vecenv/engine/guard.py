"""One call at a time on an engine, and no answer lost on its way to whoever asked."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from threading import get_ident
from types import FrameType
from typing import Any, Final, ParamSpec, TypeVar

from vecenv.engine.owed import AS_IT_IS
from vecenv.front.guard import say_it_was_closed

__all__ = ["is_within_a_call", "one_call"]

P = ParamSpec("P")
R = TypeVar("R")


def one_call(method: Callable[P, R]) -> Callable[P, R]:
    """One call at a time, and an answer that counts as taken when it is handed over, not before.

    Refuses a second thread, a call within a call (out of a signal handler), a process forked from the one that owns the
    workers, and whoever comes after ``close()``. The method prepares how the table of what
    is owed is to be once its answer has been taken; that is put in place on the same line that returns, so that whatever is
    raised before leaves the answer owed. (The interpreter looks for signals and for other threads after calls and at jumps:
    there is none on that line, nor between looking at ``owed.caller`` and setting it.)
    """

    name = method.__name__

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> R:
        if self._in_halves and name in self._in_halves:
            return self._make_in_halves(name, args, kwargs)  # type: ignore[no-any-return]
        owed = self._owed
        me = get_ident()
        if owed.caller or self._refuses:
            self._require_right(name)
        try:
            if not owed.calm:
                self._pool.resume()
            owed.caller, owed.calm, owed.after, owed.verdict = me, False, AS_IT_IS, None
            answer = method(self, *args, **kwargs)
            owed.caller, owed.calm = 0, True
        except BaseException as error:
            owed.caller = 0
            if self._refuses:
                self._leave()
                say_it_was_closed(self, error)
            if error is not owed.verdict or owed.after is None:
                raise
            owed.verdict = None
            owed.flights, owed.landed, owed.ready, owed.latest, owed.rounds = owed.after; raise  # noqa: E702 - see above
        if self._refuses:
            self._leave()
        if owed.after is None:
            return answer
        owed.flights, owed.landed, owed.ready, owed.latest, owed.rounds = owed.after; return answer  # noqa: E702

    return guarded  # type: ignore[return-value]


def is_within_a_call(envs: object, depth: int = 1) -> bool:
    """Whether a call on a vector environment is on this thread's stack, from so many frames up on.

    ``owed.caller`` alone does not tell: an exception that falls into the very first instruction after a call has failed
    leaves it as it was.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        if frame.f_code is _GUARDED and frame.f_locals["self"] is envs and "me" in frame.f_locals:
            return True
        frame = frame.f_back
    return False


_GUARDED: Final = one_call(is_within_a_call).__code__
