"""Exceptions between processes: one travels as an object only if it comes back whole from a pickle, its text in any case."""

from __future__ import annotations

import functools
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import cloudpickle

from vecenv.errors import EnvError, RemoteTraceback

__all__ = ["PackedError", "pack", "summary", "unpack", "works"]


@dataclass(frozen=True, slots=True)
class PackedError:
    """An exception on its way between processes.

    Attributes:
        blob: The pickled object, ``None`` if it would not come back whole.
        summary: ``Type: text``, always.
        text: The traceback as the worker would have printed it.
    """

    blob: bytes | None
    summary: str
    text: str


def summary(error: BaseException) -> str:
    """``Type: text``, also of an exception whose own ``__str__`` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:
        if works(lambda: str(error)):
            raise
        return f"{type(error).__name__} (it could not be printed)"


def pack(error: BaseException) -> PackedError:
    """Make an exception ready to travel. Runs where it was raised; nothing that the error does raises here."""
    try:
        text = "".join(traceback.format_exception(error))
    except BaseException:
        if works(lambda: traceback.format_exception(error)):
            raise
        text = f"{type(error).__name__} (its traceback could not be formatted)\n"
    blob: bytes | None = None
    if isinstance(error, Exception):
        try:
            blob = cloudpickle.dumps(error)
            if type(pickle.loads(blob)) is not type(error):
                blob = None
        except BaseException:  # evil at pickle or at unpickle, SystemExit included: it is tried here, not in the caller
            if works(lambda: pickle.loads(cloudpickle.dumps(error))):
                raise
            blob = None
    return PackedError(blob, summary(error), text)


def works(foreign: Callable[[], object]) -> bool:
    """Whether code that is not ours (a ``__str__``, a ``__reduce__``) ends without an exception.

    Asked when it just raised: what works now was interrupted (Ctrl-C, a time limit), and the interruption goes on its way.
    """
    try:
        foreign()
    except BaseException:
        return False
    return True


def unpack(packed: PackedError, note: str) -> Exception:
    """The exception again, with the remote traceback as its cause and ``note`` attached.

    What did not survive pickling, and whatever is no ``Exception`` (an environment's ``sys.exit`` must not end the
    caller), becomes an :class:`~vecenv.errors.EnvError`.
    """
    error: Exception | None = None
    if packed.blob is not None:
        try:
            loaded = pickle.loads(packed.blob)
            error = loaded if isinstance(loaded, Exception) else None
        except BaseException:
            if works(functools.partial(pickle.loads, packed.blob)):
                raise
    if error is None:
        error = EnvError(f"{note}: {packed.summary}")
    error.__cause__ = RemoteTraceback(packed.text)
    try:
        error.add_note(note)
    except Exception:
        if works(functools.partial(error.add_note, note)):
            raise
    return error
