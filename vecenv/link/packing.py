"""What travels between processes by pickle: a class of the program arrives as that class, not as a copy of it.

A program's own classes are in ``__main__``, and ``except MyError`` or ``isinstance`` around a call of the engine means them.
Pickle sends a class by its name, cloudpickle sends those of ``__main__`` by value, as copies. So what is found by its
name is sent by it; and the copy that a spawned worker has of a class of ``__main__`` is sent by its name as well, with the
copy for the case that the name says nothing there.

An exception travels as an object only if it comes back whole from a pickle, its text in any case.
"""

from __future__ import annotations

import functools
import io
import operator
import pickle
import sys
import traceback
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import cloudpickle

from vecenv.errors import EnvError, RemoteTraceback
from vecenv.system.uninterrupted import works

__all__ = ["PackedError", "dumps", "dumps_by_value", "pack", "summary", "unpack"]


def _of_main(qualname: str, copy: bytes) -> Any:
    """What the main module calls so; else the copy."""
    try:
        return operator.attrgetter(qualname)(sys.modules["__main__"])
    except AttributeError:
        return pickle.loads(copy)


class _ByName:
    """A pickler's rule: what the main module defines, by its name."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, FunctionType)) and value.__module__ in ("__main__", "__mp_main__"):
            try:
                if operator.attrgetter(value.__qualname__)(sys.modules[value.__module__]) is value:
                    return NotImplemented  # pickle sends its name
            except (AttributeError, KeyError):
                pass
            if "<locals>" not in value.__qualname__:
                return _of_main, (value.__qualname__, cloudpickle.dumps(value))
        other: Any = getattr(super(), "reducer_override", None)
        return NotImplemented if other is None else other(value)


class _Pickler(_ByName, pickle.Pickler):
    pass


class _CloudPickler(_ByName, cloudpickle.Pickler):  # type: ignore[misc]
    pass


def dumps(value: Any, *, by_value: bool = False) -> bytes:
    """Pickle for the other side; also instances of the copies of classes that a spawned worker has.

    Args:
        value: What travels.
        by_value: Whatever has no name there, a lambda say, travels too.
    """
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError):  # and no time limit's exception
        buffer = io.BytesIO()
        (_CloudPickler if by_value else _Pickler)(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
        return buffer.getvalue()


def dumps_by_value(value: Any) -> bytes:
    """Pickle for a process that was spawned: it has classes of ``__main__`` as copies, which came with its functions."""
    blob: bytes = dumps(value, by_value=True)
    if b"__main__" in blob:
        blob = cloudpickle.dumps(value)
    return blob


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
            blob = dumps(error, by_value=True)
            if type(pickle.loads(blob)).__qualname__ != type(error).__qualname__:
                blob = None
        except BaseException:  # evil at pickle or at unpickle, SystemExit included: it is tried here, not in the caller
            if works(lambda: pickle.loads(dumps(error, by_value=True))):
                raise
            blob = None
    return PackedError(blob, summary(error), text)


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
