"""The guard of a vector environment, which admits one call at a time.

A driver sets ``changing`` while it changes its state. If a signal handler raises meanwhile, ``changing`` stays set, and
every guarded call except a reset of all environments raises ``ResetNeeded``. The guard clears it on the line that returns a
result, where no handler can interrupt: CPython runs signal handlers after calls and at jumps, and that line has neither.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from threading import get_ident
from types import FrameType
from typing import Any, Concatenate, Final, NoReturn, ParamSpec, TypeVar

import gymnasium
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError, ResetNeeded

from vecenv.errors import BusyError, ForkedError, VecEnvError
from vecenv.front.arguments import AssertionTypeError, AssertionValueError

P = ParamSpec("P")
R = TypeVar("R")

_OWN_ERRORS: Final = VecEnvError, gymnasium.error.Error, AlreadyPendingCallError, NoAsyncCallError
_BUILTIN_ERRORS: Final = {AssertionError, AttributeError, IndexError, KeyError, OSError, RuntimeError, TypeError, ValueError}
_OTHER_THREAD_SECONDS: Final = 10.0
_RESET_METHODS: Final = ("reset", "reset_async")
_RESULT_METHODS: Final = ("reset", "reset_wait", "step", "step_wait", "recv", "call_wait", "exec_func_fetch")
"""Methods with a result that stays pending if an exception interrupts the wait for it."""
ARGUMENT_ERRORS: Final = {TypeError, ValueError, AssertionTypeError, AssertionValueError}
"""Exactly these classes report wrong arguments. An exception of a subclass may be an interruption."""


class CallState:
    """The state of the call in progress, shared by the guard and a driver.

    Attributes:
        changing: True while the driver changes its state, and after an interrupted change.
        active_thread: The id of the thread that is inside a call; 0 for none.
        unusable: The reason for refusing calls: ``"closing"``, ``"closed"`` or ``"forked"``; empty if calls are possible.
        owner_pid: The id of the process that may make calls.
    """

    __slots__ = ("active_thread", "changing", "owner_pid", "unusable")

    def __init__(self) -> None:
        self.changing, self.active_thread, self.unusable, self.owner_pid = False, 0, "", 0

    def wait_for_other_thread(self) -> None:
        """Wait up to ten seconds until another thread's call has ended. Kill the workers first, so that it ends."""
        deadline = time.monotonic() + _OTHER_THREAD_SECONDS
        while self.active_thread and time.monotonic() < deadline:
            time.sleep(0.001)


def exclusive(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Decorate a method so that it can be called only while no other call is in progress.

    After an interrupted change of state, only a reset is admitted.

    Raises (the decorated method):
        ForkedError: The process is a forked child of the one that built the vector environment.
        ClosedEnvironmentError: The vector environment is closed.
        BusyError: Another call is in progress, in another thread or further up the stack of this one.
        ResetNeeded: An exception interrupted an earlier call's change of state.
    """
    name = method.__name__

    @functools.wraps(method)
    def guarded(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        state, thread = self._driver.state, get_ident()
        if state.active_thread or state.changing or state.unusable or self._methods_in_halves:
            if name in self._methods_in_halves:
                return self._call_halves(name, args, kwargs)  # type: ignore[no-any-return]
            _check_usable(self, name)
        try:
            state.active_thread = thread
            result = method(self, *args, **kwargs)
            if state.unusable:
                raise_unusable(self)
            state.active_thread = 0
        except BaseException as error:
            state.active_thread = 0
            if state.unusable:
                _replace_error(self, error)
            if error is self._driver.result_error:  # the exception is the result, so the call has ended
                self._driver.result_error, state.changing = None, False
            elif name in _RESULT_METHODS and _may_be_interruption(error):
                self._driver.record_interruption()
            raise
        state.changing = False; return result  # fmt: skip # noqa: E702 - no call and no jump between the two

    return guarded


def convert_result(envs: Any, receive: Callable[[], Any], convert: Callable[..., R]) -> R:
    """Return ``convert(*receive())``. If ``convert`` is interrupted, the result is lost, and a reset is needed.

    ``receive`` is a Python function, not a ``partial``, that returns the result of a decorated method of ``envs``.
    """
    state = envs._driver.state
    result = receive()
    state.changing = True  # no call and no jump since the guard's return, where Ctrl-C could lose the result
    converted = convert(*result)
    state.changing = False; return converted  # fmt: skip # noqa: E702 - likewise


def _may_be_interruption(error: BaseException) -> bool:
    """True for every exception that this package does not raise on purpose.

    That includes exceptions of environments, which do no harm: their request has ended, so there is none to interrupt.
    """
    return not isinstance(error, _OWN_ERRORS) and type(error) not in ARGUMENT_ERRORS


def _replace_error(envs: Any, error: BaseException) -> None:
    """Release the driver, and raise ``ClosedEnvironmentError`` instead of an error that ``close()`` caused during the call.

    Only ``_OWN_ERRORS`` and exact classes of ``_BUILTIN_ERRORS`` are replaced: others may come from a signal handler.
    """
    envs._driver.release()
    if envs._driver.state.unusable != "forked" and (isinstance(error, _OWN_ERRORS) or type(error) in _BUILTIN_ERRORS):
        try:
            raise_unusable(envs)
        except ClosedEnvironmentError as closed:
            raise closed from error


def closed_error(name: str = "a vector environment") -> ClosedEnvironmentError:
    """Return the exception for a call after ``close()``, or during which the vector environment was closed."""
    return ClosedEnvironmentError(f"Trying to operate on {name}, after a call to `close()`.")


def raise_unusable(envs: Any) -> NoReturn:
    """Raise the error for a vector environment that is closed or belongs to another process."""
    name, driver = type(envs).__name__, envs._driver
    if driver.state.unusable == "forked":
        raise ForkedError(
            f"this {name} belongs to another process (pid {driver.state.owner_pid}); a forked child cannot use "
            f"{driver.owned_resource}: build a new one in the child"
        )
    driver.release()
    raise closed_error(f"`{name}`")


def _check_usable(envs: Any, method: str) -> None:
    """Raise if ``method`` cannot be called now."""
    name, state = type(envs).__name__, envs._driver.state
    if state.unusable:
        raise_unusable(envs)
    if state.active_thread:
        if state.active_thread != get_ident():
            raise BusyError(f"another thread is in a call on this {name}; `{method}` was refused")
        if is_inside_call(envs, 3):  # 3: above this function and the refused call
            raise BusyError(f"a call on this {name} is under way in this thread; `{method}` was refused")
    if state.changing and method not in _RESET_METHODS:  # resets check for themselves that they are of all rows
        raise ResetNeeded(f"an exception interrupted an earlier call on this {name}, and its result is lost: call reset()")


def is_inside_call(envs: object, depth: int = 1) -> bool:
    """True if a call on ``envs`` is on this thread's stack, at least ``depth`` frames up.

    ``CallState.active_thread`` does not suffice: an exception at the first instruction after a failed call leaves it set.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:  # a frame without "thread" was interrupted before its call began
        if frame.f_code is _GUARDED_CODE and frame.f_locals["self"] is envs and "thread" in frame.f_locals:
            return True
        frame = frame.f_back
    return False


def is_busy(envs: Any) -> bool:
    """True if a call on ``envs`` is in progress, in another thread or further up the stack of this one."""
    thread = envs._driver.state.active_thread
    return bool(thread) and (thread != get_ident() or is_inside_call(envs))


_GUARDED_CODE: Final = exclusive(is_inside_call).__code__
"""The code object that all decorated methods share."""
