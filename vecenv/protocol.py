"""The words that pass between the caller and its workers, and when they may be said.

Everything here is data and pure functions: no I/O, no processes. A message is five bytes, a word and a sequence number; the
high bit of the word says that a pickled payload follows. A step or a reset, and the answer to it, is five bytes and nothing
else: what it is about lies in shared memory. The sequence number makes it impossible to give an answer to another question,
for example to the one asked after a timeout.

When a method may be called is one table, :data:`NEXT`: method -> the phase it needs and the next. Everything else is an
illegal call, raised in one place (:func:`advance`) with Gymnasium's classes and texts.
"""

from __future__ import annotations

import struct
from enum import Enum, IntEnum
from typing import Final

from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError

__all__ = ["HEADER", "LENGTH", "NEXT", "PAYLOAD", "Op", "Phase", "Reply", "advance", "encode"]


class Op(IntEnum):
    """What the caller asks of a worker. ``*_SOME`` means the rows whose ``requested`` number equals the message's own."""

    STEP = 1
    STEP_SOME = 2
    RESET = 3
    RESET_SOME = 4
    REBUILD_SOME = 5
    CALL = 6
    SET_ATTR = 7
    EXEC = 8
    CLOSE = 9


class Reply(IntEnum):
    """What a worker answers."""

    READY = 17  # start-up is over; the payload holds what went wrong, per environment
    PLAIN = 18  # done, every info is empty
    COLUMNS = 19  # done, infos lie in shared memory
    FULL = 20  # done, the payload (an Outcome) holds what shared memory could not


HEADER: Final = struct.Struct("<BI")
LENGTH: Final = struct.Struct("<Q")
PAYLOAD: Final = 0x80


def encode(word: int, seq: int, payload: bytes | None = None) -> bytes:
    """The bytes of one message; ``payload`` is an already pickled object or nothing."""
    if payload is None:
        return HEADER.pack(word, seq)
    return HEADER.pack(word | PAYLOAD, seq) + LENGTH.pack(len(payload)) + payload


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
    "reset_wait": (Phase.WAITING_RESET, Phase.DEFAULT),
    "step_wait": (Phase.WAITING_STEP, Phase.DEFAULT),
    "call_wait": (Phase.WAITING_CALL, Phase.DEFAULT),
}


def advance(phase: Phase, method: str, owner: object) -> Phase:
    """The phase after ``method``, or Gymnasium's error for a call that is out of order.

    Args:
        phase: The phase now.
        method: One of the seven names in :data:`NEXT`.
        owner: Whose phase it is; the name of its class stands in the message after ``close()``.

    Raises:
        ClosedEnvironmentError: After ``close()``.
        AlreadyPendingCallError: A new request while an answer is owed.
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
    stop = "" if method == "reset_async" else "."  # Gymnasium's own texts differ by this full stop
    raise AlreadyPendingCallError(
        f"Calling `{method}` while waiting for a pending call to `{phase.value}` to complete{stop}", phase.value
    )
