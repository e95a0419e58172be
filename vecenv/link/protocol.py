"""The words that pass between the caller and its workers.

Everything here is data and pure functions: no I/O, no processes. A message is five bytes, a word and a sequence number; the
high bit of the word says that a pickled payload follows. A step or a reset, and the answer to it, is five bytes and nothing
else: what it is about lies in shared memory. The sequence number makes it impossible to give an answer to another question,
for example to the one asked after a timeout.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

__all__ = ["HEADER", "LENGTH", "PAYLOAD", "Op", "Reply", "encode"]


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
    SET_NEXT = 10  # options and seeds of the episodes that autoreset begins
    SAVE = 11
    PROVE = 12
    CHECK = 13  # snapshots that are to be loaded: read, refused where they do not fit, and nothing touched ...
    LOAD = 14  # ... until all were found to fit
    TAKE = 15  # another row, and an episode to begin ahead of time: not answered, and may be said twice


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
