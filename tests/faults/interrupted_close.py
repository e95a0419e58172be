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


def check_nothing_left(before: dict[str, list[str]], known: set[int]) -> None:
    """Check after one garbage collection that no resource is new, and kill and reap new processes."""
    gc.collect()
    left = new_resources(before)
    kill_children(known)
    assert not left, f"left behind: {left}"


def check_interrupted_close(setting: Setting, state: str, interruptions: list[Any]) -> None:
    """Open an engine, bring it into a state, repeat ``close()`` after each interruption, and check that nothing is left."""
    known, before = child_pids(), list_resources()
    with Watchdog(known, 30.0) as watchdog, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        envs = setting.open()
        if state != "idle":
            envs.reset(seed=1)
        if state.endswith("pending"):
            envs.step_async(setting.actions([1] * setting.count))
        workers = list(child_pids() - known)
        if state == "a late step pending" and workers:
            os.kill(workers[0], signal.SIGSTOP)
        if state == "dead" and workers:
            kill(workers[:1])
        attempts = [*interruptions, UNINTERRUPTED]
        while attempts:
            next(run_in_generator(_close, attempts.pop(0), envs, 1.0 if state == "a late step pending" else None))
    assert not watchdog.fired, "close() took longer than 30 s"
    envs.close()
    assert envs.closed
    del envs
    check_nothing_left(before, known)
    for interruption in interruptions:  # close() warns if an environment in this process was interrupted
        reported = any(interruption.name in str(warning.message) for warning in caught)
        assert not interruption.swallowed or (setting.local_envs and reported), "the exception was swallowed"


def _close(interruption: Any, envs: Any, timeout: float | None) -> None:
    with interruption:
        envs.close(timeout=timeout)


def warm_up(setting: Setting) -> None:
    """Open and close engines before resources are listed: the first engine of a process opens some that stay open."""
    for _ in range(2):
        setting.open().close()
    gc.collect()
    gc.freeze()
