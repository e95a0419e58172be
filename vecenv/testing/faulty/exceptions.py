"""Faults that raise: exceptions that pickle badly, print badly, or end whoever takes them in."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, NoReturn

from vecenv.testing.faulty.registry import fault

__all__ = [
    "EvilElsewhereError",
    "EvilError",
    "KeywordOnlyError",
    "TwoArgumentsError",
    "UnpicklableError",
    "UnprintableError",
]


class TwoArgumentsError(Exception):
    """Needs two arguments, hands one to its base class: pickling works, unpickling raises ``TypeError``."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class KeywordOnlyError(Exception):
    """Cannot be built from positional arguments, as unpickling would."""

    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class UnpicklableError(Exception):
    """Holds a lock, which no pickle can carry."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class EvilError(Exception):
    """Ends the process that unpickles it, with ``sys.exit``."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (7,)


def _exit_elsewhere(home: int) -> EvilElsewhereError:
    if os.getpid() != home:
        sys.exit(7)
    return EvilElsewhereError("harmless at home")


class EvilElsewhereError(Exception):
    """Unpickles well in the process that raised it and calls ``sys.exit`` in every other: a trial run misses it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _exit_elsewhere, (os.getpid(),)


class UnprintableError(Exception):
    """Raises again when it is asked for its text."""

    def __str__(self) -> str:
        raise RuntimeError("this exception has no text")

    __repr__ = __str__


@fault
def raises(result: Any) -> NoReturn:
    """An ordinary ``ValueError``."""
    raise ValueError("the environment is out of order")


@fault
def two_arguments_error(result: Any) -> NoReturn:
    """Raise :class:`TwoArgumentsError`."""
    raise TwoArgumentsError(42, "needs two arguments")


@fault
def keyword_only_error(result: Any) -> NoReturn:
    """Raise :class:`KeywordOnlyError`."""
    raise KeywordOnlyError(reason="needs a keyword")


@fault
def unpicklable_error(result: Any) -> NoReturn:
    """Raise :class:`UnpicklableError`."""
    raise UnpicklableError("holds a lock")


@fault
def evil_error(result: Any) -> NoReturn:
    """Raise :class:`EvilError`."""
    raise EvilError("exits whoever unpickles it")


@fault
def evil_elsewhere_error(result: Any) -> NoReturn:
    """Raise :class:`EvilElsewhereError`."""
    raise EvilElsewhereError("exits whoever else unpickles it")


@fault
def unprintable_error(result: Any) -> NoReturn:
    """Raise :class:`UnprintableError`."""
    raise UnprintableError("nobody will read this")
