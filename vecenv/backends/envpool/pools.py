"""The pools of one vector environment, one after the other: built, seeded, lent to compiled code, let go of.

A pool cannot be seeded again, so ``reset(seed=...)`` builds a new one; everything that belongs to one pool is in its driver,
and replaced with it. Here is also what a fork does to pools: their threads do not exist in the child, so no pool may be
called there, nor destroyed.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from typing import Any

from vecenv.backends.envpool import rendering
from vecenv.backends.envpool.driver import Driver
from vecenv.backends.envpool.task import Task

__all__ = ["Pools"]


class Pools:
    """Which pool there is now, and how to have another.

    Args:
        task: What the pools are of.
        drive: Gives a pool its driver.
        seeds: For the first one.

    Attributes:
        driver: Of the pool there is now; ``None`` before the first reset, after :meth:`lend` and after :meth:`drop`.
        lent: A pool that compiled code steps, or ``None``.
        seeds: Of the latest pool, one for each environment.
        built: How many there have been.
    """

    def __init__(self, task: Task, drive: Callable[[Any], Driver[Any]], seeds: list[int]) -> None:
        self.driver: Driver[Any] | None = None
        self.lent: Any = None
        self.seeds = seeds
        self.built = 0
        self._waited = 0.0  # for pools there were
        self._task, self._drive = task, drive
        _LIVE.add(self)

    @property
    def current(self) -> Driver[Any]:
        """The driver, where it is known that there is one."""
        assert self.driver is not None
        return self.driver

    def renew(self, seeds: list[int]) -> Driver[Any]:
        """Replace the pool by a new one, with all environments being reset.

        It is not :attr:`driver` before its reset is under way, so that one which was interrupted here is never stepped.

        Args:
            seeds: One for each environment, within int32.
        """
        if self._task.pool_config.get("from_pixels"):
            rendering.require(self._task)
        self.drop()
        pool = self._task.build(seeds)
        _REAL.add(pool)
        self.seeds, self.built = seeds, self.built + 1
        driver = self._drive(pool)
        driver.begin_reset(driver.all_ids, force=True)
        self.driver = driver
        return driver

    def lend(self) -> tuple[Any, Any, Any, Any]:
        """EnvPool's functions for compiled code, which has the pool to itself from now on."""
        driver = self.current
        pool = driver.pool
        functions: tuple[Any, Any, Any, Any] = pool.xla()
        self._waited += driver.receiver.waited
        driver.close()
        self.driver, self.lent = None, pool
        return functions

    def drop(self) -> None:
        """Let go of the pool: its environments and threads are gone when this returns."""
        driver, self.driver, self.lent = self.driver, None, None
        if driver is not None:
            self._waited += driver.receiver.waited
            driver.close()

    @property
    def waited(self) -> float:
        """Seconds spent waiting for pools."""
        return self._waited + (0.0 if self.driver is None else self.driver.receiver.waited)


_LIVE: weakref.WeakSet[Pools] = weakref.WeakSet()
_REAL: weakref.WeakSet[Any] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """The threads of all pools do not exist here: nothing may call a pool, and no pool's destructor may ever run."""
    for pool in list(_REAL):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
    for pools in list(_LIVE):
        pools.driver, pools.lent = None, None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
