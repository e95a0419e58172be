"""A custom ``worker`` function speaks Gymnasium's own pipe protocol, so Gymnasium's own class has to be there to hear it.

``vecenv.AsyncVectorEnv(..., worker=f)`` is therefore an object of both classes, in which Gymnasium's methods come first: it
behaves exactly as ``gymnasium.vector.AsyncVectorEnv(..., worker=f)``, and options that only our engine has are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium.vector.async_vector_env as gymnasium_async

from vecenv.vector_env import AsyncVectorEnv

__all__ = ["with_custom_worker"]

_OURS = (
    "num_workers", "use_caller", "batch_size", "on_failure", "restart_limit", "restart_period", "step_timeout",
    "start_timeout", "threads_per_worker",
)  # fmt: skip


class _WithCustomWorker(gymnasium_async.AsyncVectorEnv, AsyncVectorEnv):  # type: ignore[type-arg, misc]
    """Gymnasium's class, which is also ours for ``isinstance``."""

    observations = None  # type: ignore[assignment]  # plain attributes there, properties in ours
    processes = None  # type: ignore[assignment]
    parent_pipes = None  # type: ignore[assignment]
    error_queue = None  # type: ignore[assignment]
    _state = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return gymnasium_async.AsyncVectorEnv.__repr__(self)


_WithCustomWorker.__name__ = _WithCustomWorker.__qualname__ = "AsyncVectorEnv"


def with_custom_worker(cls: type[Any], options: Mapping[str, Any]) -> Any:
    """A new object for ``AsyncVectorEnv.__new__`` to return; Python then calls its ``__init__`` with Gymnasium's arguments."""
    refused = [name for name in _OURS if name in options]
    if refused:
        raise ValueError(
            f"{', '.join(f'`{name}`' for name in refused)} cannot be combined with a custom `worker`, which is run by "
            "gymnasium.vector.AsyncVectorEnv; leave one of them out"
        )
    kind = _WithCustomWorker if cls is AsyncVectorEnv else type(cls.__name__, (_WithCustomWorker, cls), {})
    return object.__new__(kind)
