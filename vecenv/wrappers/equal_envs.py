"""A check that environments are equal, and a builder that keeps them equal after ``set_attr``."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any, Final

import cloudpickle


def require_equal(env_fns: Sequence[Callable[[], Any]]) -> None:
    """Raise unless all functions are equal: with spare workers, any environment may run an episode of any row."""
    first = env_fns[0]
    blob: bytes | None = None
    for row, env_fn in enumerate(env_fns):
        if env_fn is first:
            continue
        if blob is None:
            blob = cloudpickle.dumps(first)
        if cloudpickle.dumps(env_fn) != blob:
            raise ValueError(
                f"env_fns[{row}] differs from env_fns[0]: with spare workers, any environment may run the episodes of any "
                "row, so all must be built in the same way. Vary their seeds instead, or use no spare workers"
            )


class EqualEnvBuilder:
    """A function that builds an environment and sets the attributes that ``set_attr`` has set in all others.

    Args:
        env_fn: A function that builds the environment.
    """

    def __init__(self, env_fn: Callable[[], Any]) -> None:
        self.env_fn = env_fn
        self._attributes: dict[str, bytes] = {}  # name -> pickled value, in the order of the calls
        self.token = secrets.token_hex(8)  # of this builder and of its copies in the workers

    def __call__(self) -> Any:
        _BUILDERS[self.token] = self
        env = self.env_fn()
        for name, value in self._attributes.items():
            env.set_wrapper_attr(name, cloudpickle.loads(value))
        return env

    def __getstate__(self) -> dict[str, Any]:
        # a flight record gets no attributes, because it begins before they were set and contains the calls that set them
        starts_process = get_spawning_popen() is not None
        return vars(self) if starts_process else {**vars(self), "_attributes": {}}

    def __repr__(self) -> str:
        return repr(self.env_fn)

    def keep(self, name: str, value: Any) -> None:
        """Store an attribute to set in all environments that are built from now on."""
        blob = cloudpickle.dumps(value)
        self._attributes.pop(name, None)
        self._attributes[name] = blob


_BUILDERS: Final[weakref.WeakValueDictionary[str, EqualEnvBuilder]] = weakref.WeakValueDictionary()
"""The builders of this process, by token."""


def keep_attribute(env: Any, token: str, name: str, value: Any) -> None:
    """Store an attribute for the environments that replace ``env`` after a failure. ``exec_func`` calls this in workers."""
    _BUILDERS[token].keep(name, value)
