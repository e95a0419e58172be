"""Checks that a closed engine leaves no processes, descriptors or memory behind, even if ``close()`` was interrupted."""

from __future__ import annotations

import gc
import os
import signal
import warnings
from typing import Any

from interrupted_calls import (
    RESTART,
    SETTINGS,
    UNINTERRUPTED,
    Setting,
    Watchdog,
    child_pids,
    kill,
    kill_children,
    list_resources,
    new_resources,
)
from interruption import run_in_generator

CLOSE_SETTINGS = {
    "two workers": Setting({"num_workers": 2}),
    "in process": Setting({"num_workers": 0}, local_envs=(0, 1, 2, 3)),
    "caller's share": Setting({"num_workers": 1, "use_caller": True}, local_envs=(0, 1, 2, 3)),
    "restart, Text observations": Setting({"num_workers": 2, **RESTART}, env_class=SETTINGS["Text observations"].env_class),
    "batch_size": Setting({"num_workers": 2, "batch_size": 2}),
}
CLOSE_STATES = ("idle", "a step pending", "a late step pending", "dead")
"""States of an engine before ``close()``. A worker is stopped if its step is late, and killed if the engine is ``dead``."""


def check_nothing_left(before: dict[str, list[str]], known: set[int]) -> None:
    """Check that one garbage collection releases all new resources; kill and reap processes that remain."""
    gc.collect()
    left = new_resources(before)
    kill_children(known)
    assert not left, f"left behind: {left}"


def check_interrupted_close(setting: Setting, state: str, interruptions: list[Any]) -> None:
    """Bring a new engine into a state, repeat ``close()`` after each interruption, and check that nothing is left behind."""
    known, before = child_pids(), list_resources()
    with Watchdog(known, 30.0) as watchdog, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        envs = setting.open()
        if state != "idle":
            envs.reset(seed=1)
        if state.endswith("pending"):
            envs.step_async(setting.make_actions([1] * setting.count))
        workers = list(child_pids() - known)
        if state == "a late step pending" and workers:
            os.kill(workers[0], signal.SIGSTOP)
        if state == "dead" and workers:
            kill(workers[:1])
        timeout = 1.0 if state == "a late step pending" else None
        for interruption in [*interruptions, UNINTERRUPTED]:
            next(run_in_generator(_close, interruption, envs, timeout))
    assert not watchdog.fired, "close() took longer than 30 s"
    envs.close()
    assert envs.closed
    del envs
    check_nothing_left(before, known)
    for interruption in interruptions:  # if an environment in this process was interrupted, close() only warns
        has_warned = any(interruption.name in str(warning.message) for warning in caught)
        assert not interruption.swallowed or (setting.local_envs and has_warned), "the exception was swallowed"


def _close(interruption: Any, envs: Any, timeout: float | None) -> None:
    with interruption:
        envs.close(timeout=timeout)


def warm_up(setting: Setting) -> None:
    """Open and close engines before resources are listed: the first engine of a process opens some that stay open."""
    for _ in range(2):
        setting.open().close()
    gc.collect()
    gc.freeze()  # the collections after each attempt then traverse only the objects of the engine
