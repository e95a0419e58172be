"""Building pools, and what a fork does to them: the child has none of their threads, so no pool may be destroyed there."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

from vecenv.backends.envpool import rendering
from vecenv.backends.envpool.task import Task

__all__ = ["build"]


def build(task: Task, seeds: list[int]) -> Any:
    """A pool of ``task``; ``seeds``, one for each environment, within int32."""
    if task.pool_config.get("from_pixels"):
        rendering.require(task)
    pool = task.build(seeds)
    _REAL.add(pool)
    return pool


_REAL: weakref.WeakSet[Any] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """No pool's destructor may ever run here."""
    for pool in list(_REAL):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
