"""What stands in for ``numpy.random``'s and ``random``'s generators, and finds out whose turn it is when they are used."""

from __future__ import annotations

import _random
import random
import sys
from collections.abc import Callable
from typing import Any, ClassVar, Final

import numpy as np

__all__ = ["HIDDEN", "NUMPY", "Brief", "Stand", "Trap", "gauss_of", "put"]

NUMPY: Final[Any] = np.random
HIDDEN: Final[Any] = random._inst  # whose methods the functions of ``random`` are
_WRITTEN_IN_C: Final = {"random": random.random, "getrandbits": random.getrandbits}

# -- numpy ----------------------------------------------------------------------------------------------------------


class Brief(np.random.MT19937):
    """numpy's usual bit generator. While it is brief, its ``RandomState`` can be asked for its own part of the state alone:
    all of it takes 0.1 ms."""

    is_brief = False

    @property
    def state(self) -> Any:
        return {"bit_generator": "MT19937", "state": {}} if Brief.is_brief else np.random.MT19937.state.__get__(self)

    @state.setter
    def state(self, value: Any) -> None:
        if not Brief.is_brief:
            np.random.MT19937.state.__set__(self, value)  # type: ignore[attr-defined]


Brief.__name__ = "MT19937"  # which is looked for in a state


def gauss_of(bit_generator: Any) -> float | None:
    """The number that the global ``RandomState``, whose bit generator this is, has drawn already."""
    Brief.is_brief = isinstance(bit_generator, Brief)
    try:
        said: Any = NUMPY.get_state(legacy=False)
    finally:
        Brief.is_brief = False
    return said["gauss"] if said["has_gauss"] else None


def put(bit_generator: Any, gauss: float | None) -> None:
    """Let the global ``RandomState`` draw from there."""
    NUMPY.set_bit_generator(bit_generator)
    if gauss is not None:
        brief = isinstance(bit_generator, Brief)
        state = {"bit_generator": "MT19937", "state": {}} if brief else bit_generator.state
        Brief.is_brief = brief
        try:
            NUMPY.set_state({**state, "has_gauss": 1, "gauss": gauss})
        finally:
            Brief.is_brief = False


class _TrapLock:
    """What ``RandomState`` takes before it does anything: by then the right bit generator is in place."""

    def __init__(self, touched: Callable[[], Any]) -> None:
        self._touched = touched
        self._held: list[Any] = []
        self.is_being_set = False

    def acquire(self, *_: Any) -> bool:
        if not self.is_being_set:
            lock = self._touched().lock
            lock.acquire()
            self._held.append(lock)
        return True

    def release(self) -> None:
        if not self.is_being_set:
            self._held.pop().release()

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


class Trap(np.random.MT19937):
    """Stands where nothing has been drawn yet. Versions of numpy that take no lock for it ask the other methods.

    Args:
        touched: Puts the right bit generator in place, and returns it.
    """

    def __init__(self, touched: Callable[[], Any]) -> None:
        super().__init__(0)
        self._touched = touched
        self._lock = _TrapLock(touched)

    def set(self) -> None:
        """Put it in place."""
        self._lock.is_being_set = True  # some versions of numpy take its lock for that
        try:
            NUMPY.set_bit_generator(self)
        finally:
            self._lock.is_being_set = False

    @property
    def lock(self) -> Any:  # type: ignore[override]
        return self._lock

    @property
    def state(self) -> Any:
        return self._touched().state

    @state.setter
    def state(self, value: Any) -> None:
        self._touched()
        NUMPY.set_state(value)

    def _legacy_seeding(self, seed: Any) -> None:
        self._touched()._legacy_seeding(seed)


# -- random ---------------------------------------------------------------------------------------------------------


class _Asks(_random.Random):
    """The part that is written in C, asked of whatever is to be drawn from."""

    def random(self) -> float:
        return _random.Random.random(Stand.asked())

    def getrandbits(self, k: int, /) -> int:
        return _random.Random.getrandbits(Stand.asked(), k)

    def seed(self, *a: Any) -> None:
        _random.Random.seed(Stand.asked(), *a)

    def getstate(self) -> Any:
        return _random.Random.getstate(Stand.asked())

    def setstate(self, state: Any, /) -> None:
        _random.Random.setstate(Stand.asked(), state)


class Stand(random.Random, _Asks):  # in this order: what random.Random asks of its base is asked of _Asks
    """The class of the hidden object.

    Attributes:
        asked: Says whose state is to be drawn from.
    """

    asked: ClassVar[Callable[[], random.Random]]
    _replaced: ClassVar[list[tuple[dict[str, Any], str, Any]]] = []

    @classmethod
    def set(cls) -> None:
        """Let the functions of ``random`` ask."""
        HIDDEN.__class__ = cls
        for name in _WRITTEN_IN_C:
            setattr(random, name, getattr(HIDDEN, name))

    @classmethod
    def replace_references(cls) -> None:
        """Modules that have imported a function of ``random`` that is written in C get the one that asks."""
        of = {id(function): getattr(random, name) for name, function in _WRITTEN_IN_C.items()}
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", None)
            if not isinstance(names, dict):
                continue
            for name, value in list(names.items()):
                if id(value) in of:
                    cls._replaced.append((names, name, value))
                    names[name] = of[id(value)]

    @classmethod
    def unset(cls) -> None:
        """Everything is as it was."""
        HIDDEN.__class__ = random.Random
        for name, function in _WRITTEN_IN_C.items():
            setattr(random, name, function)
        while cls._replaced:
            names, name, value = cls._replaced.pop()
            names[name] = value

    @property
    def gauss_next(self) -> Any:
        return vars(Stand.asked())["gauss_next"]

    @gauss_next.setter
    def gauss_next(self, value: Any) -> None:
        vars(Stand.asked())["gauss_next"] = value
