"""Outcomes on their way from a worker: what environments made is never pickled together with what the engine says.

Every info value, result and observation is sealed by itself. So one that cannot be pickled, or that does harm when it is
unpickled, is reported with its environment and key, and everything beside it arrives.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from vecenv.errors import EnvError
from vecenv.link.infos import shown
from vecenv.link.outcomes import Failure, Outcome
from vecenv.link.packing import PackedError, dumps, pack, summary
from vecenv.system.uninterrupted import works

__all__ = ["dump", "load"]


def dump(outcome: Outcome) -> bytes:
    """Seal and pickle an outcome. Never raises for what environments made: that becomes a failure of theirs."""
    for failure in outcome.failures:
        if not isinstance(failure.error, PackedError):
            failure.error = pack(failure.error)
    for row, info in list(outcome.infos.items()):
        items = _items_of(outcome, row, info)
        sealed = [_seal(outcome, row, f"info key {shown(key)}", (key, value)) for key, value in items]
        outcome.infos[row] = (isinstance(info, Mapping), [blob for blob in sealed if blob is not None])
    for table, what in ((outcome.results, "result"), (outcome.observations, "observation"), (outcome.finals, "observation")):
        for row, value in list(table.items()):
            table[row] = _seal(outcome, row, what, value)
    return pickle.dumps(outcome, pickle.HIGHEST_PROTOCOL)


def _items_of(outcome: Outcome, row: int, info: Any) -> list[tuple[Any, Any]]:
    """The items of an info; one whose own code fails is a failure of its environment."""
    if not isinstance(info, Mapping):
        return [(None, info)]
    try:
        return [(key, value) for key, value in info.items()]
    except BaseException as error:  # it is the environment's; the worker goes on
        error.add_note(f"env {row}: its info, a {type(info).__name__}, cannot be read")
        outcome.failures.append(Failure(row, pack(error), fatal=False))
        return []


def _seal(outcome: Outcome, row: int, what: str, value: Any) -> bytes | None:
    try:
        return dumps(value)
    except Exception as error:
        error.add_note(f"env {row}: its {what} cannot be pickled")
        outcome.failures.append(Failure(row, pack(error), fatal=False))
        return None


def load(payload: bytes) -> Outcome:
    """The outcome again; whatever does not open is a failure of its environment."""
    outcome: Outcome = pickle.loads(payload)
    for row, (is_dict, blobs) in list(outcome.infos.items()):
        parts = [pair for blob in blobs if (pair := _open(outcome, row, "info", blob)) is not None]
        outcome.infos[row] = dict(parts) if is_dict else parts[0][1] if parts else {}
    for table, what in ((outcome.results, "result"), (outcome.observations, "observation"), (outcome.finals, "observation")):
        for row, blob in list(table.items()):
            table[row] = None if blob is None else _open(outcome, row, what, blob)
    return outcome


def _open(outcome: Outcome, row: int, what: str, blob: bytes) -> Any:
    try:
        return pickle.loads(blob)
    except BaseException as error:  # SystemExit included: an environment must not end its caller
        if works(lambda: pickle.loads(blob)):  # not the blob's doing; the answer is read again later
            raise
        where = f"env {row}: its {what}{_key_in(blob)} cannot be unpickled: {summary(error)}"
        stand_in = EnvError(where)
        stand_in.__cause__ = error if isinstance(error, Exception) else None
        outcome.failures.append(Failure(row, stand_in, fatal=False))
        return None


def _key_in(blob: bytes) -> str:
    """The key of a sealed info value that does not open: the first string in it."""
    import pickletools

    for opcode, argument, _ in pickletools.genops(blob):
        if opcode.name in ("SHORT_BINUNICODE", "BINUNICODE", "BININT1", "BININT"):
            return f" key {argument!r}"
        if opcode.name not in ("PROTO", "FRAME", "MARK", "MEMOIZE"):
            break
    return ""
