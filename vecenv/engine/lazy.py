"""Vector environments that start when they are used first (``lazy=True``).

Until then an object is of a class made for that (:func:`wait_for_use`), in which whatever only a started one has is an
attribute that starts it, and the description of an environment (spaces, metadata) one that looks. Then it gets its own class
back, so that nothing of this costs a running engine anything.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from vecenv.errors import ErrorRecord
from vecenv.front.capabilities import FIGURES
from vecenv.front.guard import refuse_closed

__all__ = ["wait_for_use"]


class _Later:
    """An attribute that is there once something has been done. What the object has got since comes first."""

    def __init__(self, do: Callable[[Any], None]) -> None:
        self._do = do

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        if instance is None:
            return self
        self._do(instance)
        return getattr(instance, self._name)


def _look(envs: Any) -> None:
    with envs._starting:
        if envs.closed:
            refuse_closed(envs)
        if "plan" not in vars(envs):
            envs._look(*envs._to_look)


def _start(envs: Any) -> None:
    with envs._starting:
        if "_owed" not in vars(envs):
            _look(envs)
            envs._open(*envs._to_open)
        _settle(envs)


def _settle(envs: Any) -> None:
    """It runs: from now on it is what it was built as."""
    if isinstance(envs, _NotStarted):
        envs.__class__ = type(envs).__mro__[2]
    for name in ("_starting", "_to_look", "_to_open"):
        vars(envs).pop(name, None)


class _NotStarted:
    """In front of the class of a vector environment that has not started."""

    def close(self, **kwargs: Any) -> None:
        """End it before it began; one that an interruption has left between both is closed."""
        if "_owed" in vars(self):
            _settle(self)
            self.close(**kwargs)
        else:
            self.closed = True

    def stats(self) -> dict[str, float]:
        """Nothing happened yet."""
        return dict.fromkeys(FIGURES, 0.0)

    @property
    def errors(self) -> deque[ErrorRecord]:
        """Nothing failed yet."""
        return deque()

    error_queue = errors

    def __repr__(self) -> str:
        state = "closed" if self.closed else "not started"
        return f"{type(self).__name__}(num_envs={self.num_envs}, {state})"  # type: ignore[attr-defined]

    def __del__(self) -> None:
        if "_owed" in vars(self) and not self.closed:
            _settle(self)
            self.__del__()


_DESCRIBED: Final = (
    "metadata", "render_mode", "single_observation_space", "observation_space", "single_action_space", "action_space",
    "num_workers", "plan",
)  # fmt: skip
_STARTED: Final = (
    "batch_size", "_card", "_engine", "_figures", "_owed", "_owner", "_pool", "_refuses", "_stage",
)  # fmt: skip


@functools.cache
def _not_started(cls: type[Any]) -> type[Any]:
    body: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    body |= {name: _Later(_look) for name in _DESCRIBED} | {name: _Later(_start) for name in _STARTED}
    return type(cls.__name__, (_NotStarted, cls), body)


def wait_for_use(envs: Any, to_look: tuple[Any, ...], to_open: tuple[Any, ...]) -> None:
    """Let an object whose arguments were checked start later.

    Args:
        envs: It has ``_look``, which sets the description and the plan, and ``_open``, which starts it.
        to_look, to_open: The arguments of these.
    """
    envs._to_look, envs._to_open = to_look, to_open
    envs._starting = threading.RLock()
    envs.closed = False
    kind: Any = type(envs)
    envs.__class__ = _not_started(kind)
