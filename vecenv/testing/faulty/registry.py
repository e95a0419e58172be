"""The faults by name. A function that is decorated with :func:`fault` is one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

__all__ = ["FAULTS", "Fault", "fault", "find"]

Fault = Callable[[Any], Any]
"""What a fault is: it gets what a call was about to return, and returns something, raises, or never returns."""

_F = TypeVar("_F", bound=Fault)
_faults: dict[str, Fault] = {}

FAULTS: Final[Mapping[str, Fault]] = MappingProxyType(_faults)
"""Every fault by name."""


def fault(function: _F) -> _F:
    """Put a fault among :data:`FAULTS`, under its own name."""
    _faults[function.__name__] = function
    return function


def find(name: str | Fault) -> Fault:
    """The fault of this name; a function is one already."""
    if callable(name):
        return name
    try:
        return FAULTS[name]
    except KeyError:
        raise ValueError(f"there is no fault {name!r}; there are: {', '.join(FAULTS)}") from None
