"""Pools that are slow, or not all there."""

from __future__ import annotations

import time
from typing import Any

import pytest

from vecenv.backends import EnvPoolVectorEnv
from vecenv.backends.envpool.task import Task


class SlowPool:
    """Stands between a driver and its pool: every answer takes ``delay`` seconds longer."""

    def __init__(self, envs: EnvPoolVectorEnv, delay: float) -> None:
        driver = envs._pools.current
        recv = driver.receiver._recv

        def late() -> Any:
            time.sleep(delay)
            return recv()

        driver.receiver._recv = late


class HiddenPool:
    """A pool without its private functions, as a later EnvPool might have it."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        if name in ("_send", "_recv", "_reset"):
            raise AttributeError(name)
        return getattr(self._pool, name)


def hide_private_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pools from here on lack their private functions."""
    build = Task.build
    monkeypatch.setattr(Task, "build", lambda task, seeds: HiddenPool(build(task, seeds)))
