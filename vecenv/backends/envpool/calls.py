"""One call at a time on a pool, and no answer lost on its way to whoever asked.

An answer counts as taken when the method that fetched it returns. A Ctrl-C may strike after the driver was told so and
before the method has returned; then the answer is given back to the driver, which owes it again. What is left is the
caller's own code: an answer that was returned is the caller's to keep.

(A Ctrl-C between taking the lock and the ``try`` below leaves it taken by this thread. The lock is re-entrant, so the
thread is not shut out.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

__all__ = ["answering", "one_at_a_time"]

P = ParamSpec("P")
R = TypeVar("R")


def one_at_a_time(
    method: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Any, P], R]:
    """Refuse a second thread: two calls at once on a pool overwrite each other's rows."""

    @functools.wraps(method)
    def guarded(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self._lock.acquire(blocking=False):
            self._refuse_second_thread(method.__name__)
        try:
            return method(self, *args, **kwargs)
        finally:
            self._lock.release()

    return guarded


def answering(
    method: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Any, P], R]:
    """The same for a method that returns the answer to a call for all environments, as ``driver.finish`` gave it."""

    @functools.wraps(method)
    def guarded(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        taking = False
        if not self._lock.acquire(blocking=False):
            self._refuse_second_thread(method.__name__)
        try:
            try:
                result = method(self, *args, **kwargs)
                taking = True
                self._pools.current.settle()
            finally:
                self._lock.release()
            return result
        except BaseException:
            if taking:
                self._pools.current.give_back()
            raise

    return guarded
