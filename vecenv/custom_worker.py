"""A custom ``worker`` function speaks Gymnasium's own pipe protocol, so Gymnasium's own class has to be there to hear it.

``vecenv.AsyncVectorEnv(..., worker=f)`` is therefore an object of both classes, in which Gymnasium's methods come first: it
behaves exactly as ``gymnasium.vector.AsyncVectorEnv(..., worker=f)``, and options that only our engine has are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium.vector.async_vector_env as gymnasium_async
from gymnasium.vector import VectorEnv

from vecenv.vector_env import AsyncVectorEnv

__all__ = ["with_custom_worker"]

_OURS = (
    "num_workers", "use_caller", "batch_size", "on_failure", "restart_limit", "restart_period", "step_timeout",
    "start_timeout", "threads_per_worker", "strict",
)  # fmt: skip


class _Attribute:
    """A plain attribute again, where our class has a property of that name."""

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        try:
            return instance.__dict__[self._name]
        except KeyError:
            raise AttributeError(self._name) from None

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self._name] = value


class _WithCustomWorker(gymnasium_async.AsyncVectorEnv, AsyncVectorEnv):  # type: ignore[misc]
    """Gymnasium's class, which is also ours for ``isinstance``."""

    observations = _Attribute()
    processes = _Attribute()
    parent_pipes = _Attribute()
    error_queue = _Attribute()
    _state = _Attribute()
    close = VectorEnv.close

    def __repr__(self) -> str:
        return gymnasium_async.AsyncVectorEnv.__repr__(self)


_WithCustomWorker.__name__ = _WithCustomWorker.__qualname__ = "AsyncVectorEnv"


def with_custom_worker(cls: type[Any], options: Mapping[str, Any]) -> Any:
    """A new object for ``AsyncVectorEnv.__new__`` to return; Python then calls its ``__init__``, which is Gymnasium's."""
    refused = [name for name in _OURS if name in options]
    if refused:
        raise ValueError(
            f"{', '.join(f'`{name}`' for name in refused)} cannot be combined with a custom `worker`, which is run by "
            "gymnasium.vector.AsyncVectorEnv; leave one of them out"
        )
    kind = _WithCustomWorker if cls is AsyncVectorEnv else type(cls.__name__, (_WithCustomWorker, cls), {})
    return object.__new__(kind)
