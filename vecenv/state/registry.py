"""Codecs by class: how objects that a copy of attributes cannot do justice to are taken and put back.

Libraries that an environment may use are named by strings: nothing is imported that the environment has not imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from vecenv.system.uninterrupted import succeeds_when_repeated

__all__ = ["CACHES", "STAYS", "Codec", "How", "Refused", "how_of", "made", "name_of", "register"]


@dataclass(frozen=True, slots=True)
class Codec:
    """How the content of an object is taken, and put into another one, which stays the object it is.

    Attributes:
        save: Object -> a state that can be pickled; ``None``: there is nothing to take.
        load: (object, state): put it back. It may be called again.
        open: (object, state) -> state as ``load`` gets it; refuses what does not fit, and touches nothing.
        make: State -> a new object, where there is none to be filled; raises what it likes for another kind's state.
    """

    save: Callable[[Any], Any]
    load: Callable[[Any, Any], None]
    open: Callable[[Any, Any], Any] = lambda thing, state: state
    make: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """What cannot be taken, and why."""

    why: str


@dataclass(frozen=True, slots=True)
class _Stays:
    """Shared, or the same whatever happened: it stays where it is."""


STAYS: Final = _Stays()

How = Codec | Refused | _Stays

_BY_NAME: dict[str, How] = {}
_FOUND: dict[type, How | None] = {}
CACHES: Final[list[dict[type, Any]]] = [_FOUND]
"""What is known of classes, and no more true once another codec was registered."""


def name_of(kind: type) -> str:
    """As codecs are registered: module and qualified name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def register(
    cls: type | str,
    save: Callable[[Any], Any],
    load: Callable[[Any, Any], None],
) -> None:
    """Say how objects of a class, and of classes derived from it, are saved and loaded.

    It has to be said in every process that has such environments: in the module that makes them, or in ``env_fn``.

    Args:
        cls: A class, or its ``"module.QualifiedName"``. An environment's, a wrapper's, or that of anything they hold.
        save: Object -> a state that can be pickled.
        load: (object, state): puts the state back into an object of that class. It may be called twice with the same state.
    """
    put(cls if isinstance(cls, str) else name_of(cls), Codec(save, load))


def put(name: str, how: How) -> None:
    """What is to be done with a class."""
    _BY_NAME[name] = how
    for known in CACHES:
        known.clear()


def how_of(kind: type) -> How | None:
    """What is to be done with objects of a class; ``None``: as with any other."""
    try:
        return _FOUND[kind]
    except KeyError:
        pass
    how: How | None = None
    if callable(getattr(kind, "take_snapshot", None)) and callable(getattr(kind, "restore_snapshot", None)):
        how = Codec(lambda thing: thing.take_snapshot(), lambda thing, state: thing.restore_snapshot(state))
    else:
        for base in kind.__mro__:
            if (found := _BY_NAME.get(name_of(base))) is not None:
                how = found
                break
    _FOUND[kind] = how
    return how


def made(state: Any) -> Any:
    """A new object of a state, where there is none to be filled; ``None``: of no kind that can be made."""
    for how in _BY_NAME.values():
        if isinstance(how, Codec) and how.make is not None:
            try:
                return how.make(state)
            except Exception:  # another kind's state
                if succeeds_when_repeated(partial(how.make, state)):  # it was interrupted
                    raise
    return None
