"""What a vector environment is in the middle of, and so which of its methods may be called.

One table, :data:`NEXT`: method -> the phase it needs and the next. Everything else is an illegal call, raised in one place
(:func:`advance`) with Gymnasium's classes and texts.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, Final, TypeVar

from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError

from vecenv.errors import StepTimeout
from vecenv.system.uninterrupted import Noted, by_handler

__all__ = ["NEXT", "Phase", "advance", "dropping_pending", "still_pending"]

R = TypeVar("R")


class Phase(Enum):
    """What the vector environment is in the middle of; the values are Gymnasium's ``AsyncState`` values."""

    DEFAULT = "default"
    WAITING_RESET = "reset"
    WAITING_STEP = "step"
    WAITING_CALL = "call"
    CLOSED = "closed"


NEXT: Final[dict[str, tuple[Phase, Phase]]] = {
    "reset_async": (Phase.DEFAULT, Phase.WAITING_RESET),
    "step_async": (Phase.DEFAULT, Phase.WAITING_STEP),
    "call_async": (Phase.DEFAULT, Phase.WAITING_CALL),
    "set_attr": (Phase.DEFAULT, Phase.WAITING_CALL),
    "set_next_options": (Phase.DEFAULT, Phase.WAITING_CALL),
    "reset_wait": (Phase.WAITING_RESET, Phase.DEFAULT),
    "step_wait": (Phase.WAITING_STEP, Phase.DEFAULT),
    "call_wait": (Phase.WAITING_CALL, Phase.DEFAULT),
}


def advance(phase: Phase, method: str, owner: object, name: str = "") -> Phase:
    """The phase after ``method``, or Gymnasium's error for a call that is out of order.

    Args:
        phase: The phase now.
        method: One of the names in :data:`NEXT`.
        owner: Whose phase it is; the name of its class stands in the message after ``close()``.
        name: What was called, where that has another name (``save``).

    Raises:
        ClosedEnvironmentError: After ``close()``.
        AlreadyPendingCallError: A new request while a call is pending.
        NoAsyncCallError: Waiting for an answer that was never asked for.
    """
    before, after = NEXT[method]
    if phase is before:
        return after
    if phase is Phase.CLOSED:
        raise ClosedEnvironmentError(f"Trying to operate on `{type(owner).__name__}`, after a call to `close()`.")
    verb, _, kind = method.partition("_")
    if kind == "wait":
        raise NoAsyncCallError(f"Calling `{method}` without any prior call to `{verb}_async`.", verb)
    raise AlreadyPendingCallError(still_pending(name or method, phase), phase.value)


def still_pending(name: str, phase: Phase) -> str:
    """Why a method has to wait; where Gymnasium has it too, in Gymnasium's own words, which differ by a full stop."""
    end = "" if name == "reset_async" else "." if name in NEXT else f": call `{phase.value}_wait()` first."
    return f"Calling `{name}` while waiting for a pending call to `{phase.value}` to complete{end}"


def dropping_pending(envs: Any, begin: Callable[[], R]) -> R:
    """``begin()``, a reset of all environments; the answer to a call that is still pending is fetched and dropped.

    A step that timed out, or was interrupted by Ctrl-C, is still pending. Interfaces of other libraries have no method
    that fetches it, so without this every later reset would be refused.

    Raises:
        StepTimeout: The pending answer is still not there; it stays pending.
        Exception: Of ``begin``.
    """
    try:
        return begin()
    except AlreadyPendingCallError as error:
        kind = error.name
    inner = getattr(envs, "unwrapped", envs)  # vector wrappers have no such methods
    wait = getattr(inner, f"{kind}_wait" if kind in ("reset", "step", "call") else "recv")
    with Noted():
        try:
            wait()
        except StepTimeout:
            raise
        except Exception as error:  # the dropped answer itself; `errors` has it
            if by_handler(error):
                raise
    return begin()
