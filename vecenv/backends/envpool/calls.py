"""One call at a time on a pool, and an answer that counts as taken when it is handed over, not before.

A driver prepares how it is to be once its answer was taken (``driver.after``), and that is put in place on the line that
returns the answer. A Ctrl-C before that line leaves the answer owed; one after it is the caller's own. (The interpreter
looks for signals and for other threads after calls and at jumps: there is none on that line.)
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from threading import get_ident
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

from vecenv.front.guard import one_call, refuse_busy, refuse_closed, refuse_forked, say_it_was_closed

__all__ = ["answering", "leave", "one_at_a_time", "refuse"]

P = ParamSpec("P")
R = TypeVar("R")

_LACKING = "its threads"

one_at_a_time = one_call(_LACKING)
"""Refuses a second thread, a forked child, and calls after ``close()``."""


def refuse(envs: Any, method: str) -> NoReturn:
    """Say why nobody may call ``method`` now."""
    if os.getpid() != envs._owner:
        refuse_forked(envs, envs._owner, _LACKING)
    if envs.closed:
        refuse_closed(envs)
    refuse_busy(envs, method)


def leave(envs: Any, outer: int, error: BaseException) -> None:
    """An exception comes out of a call."""
    envs._caller = outer
    if envs.closed:
        say_it_was_closed(envs, error)


def answering(
    method: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Any, P], R]:
    """The same for a method that returns an answer of the driver's, which is then taken."""

    @functools.wraps(method)
    def guarded(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        me, outer = get_ident(), self._caller
        if self.closed or (outer and outer != me):
            refuse(self, method.__name__)
        try:
            self._caller = me
            answer = method(self, *args, **kwargs)
            driver = self._pools.current
            count, after = driver.after
            self._caller = outer
        except BaseException as error:
            leave(self, outer, error)
            raise
        # one line: see above
        del driver.wire[:count]; driver.call, driver.latest, driver.offset, driver.held = after; return answer  # noqa: E702

    return guarded
