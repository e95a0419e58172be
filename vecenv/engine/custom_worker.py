"""A custom ``worker`` function speaks Gymnasium's own pipe protocol, so Gymnasium's own class has to be there to hear it.

``vecenv.AsyncVectorEnv(..., worker=f)`` is therefore an object of both classes, in which Gymnasium's methods come first: it
behaves exactly as ``gymnasium.vector.AsyncVectorEnv(..., worker=f)``, and options that only our engine has are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from gymnasium.vector import VectorEnv

from vecenv.front.arguments import HAS_MAX_CONCURRENCY, GymnasiumAsync

__all__ = ["with_custom_worker"]

_OURS = (
    "num_workers", "use_caller", "batch_size", "on_failure", "restart_limit", "restart_period",
    "step_timeout", "start_timeout", "threads_per_worker", "strict", "dummy_env", "worker_env", "worker_affinity", "preload",
    "ragged_infos", "isolate", "env_threads", "spare_workers", "generators",
    *(() if HAS_MAX_CONCURRENCY else ("max_concurrency",)),
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


class _GymnasiumsOwn(GymnasiumAsync):
    """Gymnasium's methods, before ours in the order of methods, where the class that they are from comes after ours."""

    locals().update({name: value for name, value in vars(GymnasiumAsync).items() if not name.startswith("__")})
    __init__ = GymnasiumAsync.__init__
    __del__ = GymnasiumAsync.__del__
    observations = _Attribute()
    processes = _Attribute()
    parent_pipes = _Attribute()
    error_queue = _Attribute()
    copy = _Attribute()
    _state = _Attribute()
    close = VectorEnv.close

    def __repr__(self) -> str:
        return GymnasiumAsync.__repr__(self)


@functools.cache
def _of_both(cls: type[Any]) -> type[Any]:
    return type(cls.__name__, (_GymnasiumsOwn, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def with_custom_worker(cls: type[Any], options: Mapping[str, Any]) -> Any:
    """A new object for ``AsyncVectorEnv.__new__`` to return; Python then calls its ``__init__``, which is Gymnasium's."""
    refused = [name for name in _OURS if name in options]
    if refused:
        raise ValueError(
            f"{', '.join(f'`{name}`' for name in refused)} cannot be combined with a custom `worker`, which is run by "
            "gymnasium.vector.AsyncVectorEnv; leave one of them out"
        )
    return object.__new__(_of_both(cls))  # type: ignore[arg-type]
