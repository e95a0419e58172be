"""Checks that closed engines leave nothing behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import warnings
from typing import Any

from interrupted_calls import (
    RESTART,
    SETTINGS,
    UNDISTURBED,
    Setting,
    Watchdog,
    children,
    kill,
    list_resources,
    new_resources,
)
from interruption import apart

ENDS = {
    "two workers": Setting({"num_workers": 2}),
    "in process": Setting({"num_workers": 0}, local=(0, 1, 2, 3)),
    "caller's share": Setting({"num_workers": 1, "use_caller": True}, local=(0, 1, 2, 3)),
    "restart, Text observations": Setting({"num_workers": 2, **RESTART}, kind=SETTINGS["Text observations"].kind),
    "batch_size": Setting({"num_workers": 2, "batch_size": 2}),
}
STATES = ("idle", "a step pending", "a late step pending", "dead")


def check_nothing_left(before: dict[str, list[str]], known: set[int], patience: float = 3.0) -> None:
    """Compare with an earlier state, after one garbage collection, and kill the processes that are left."""
    gc.collect()
    left = new_resources(before)
    if left:
        kill(children() - known)
    for pid in children() - known:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    assert not left, f"left behind: {left}"


def interrupted_close(setting: Setting, state: str, interruptions: list[Any]) -> None:
    known, before = children(), list_resources()
    with Watchdog(known, 30.0) as watchdog, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        envs = setting.open()
        if state != "idle":
            envs.reset(seed=1)
        if state.endswith("pending"):
            envs.step_async(setting.actions([1] * setting.count))
        workers = list(children() - known)
        if state == "a late step pending" and workers:
            os.kill(workers[0], signal.SIGSTOP)
        if state == "dead" and workers:
            kill(workers[:1])
        waiting = [*interruptions, UNDISTURBED]
        while waiting:
            next(apart(_close, waiting.pop(0), envs, 1.0 if state == "a late step pending" else None))
    assert not watchdog.bit, "close() took longer than 30 s"
    envs.close()
    assert envs.closed
    del envs
    check_nothing_left(before, known)
    for interruption in interruptions:  # one that hits an environment of this process is that environment's error
        reported = any(interruption.name in str(warning.message) for warning in caught)
        assert not interruption.swallowed or (setting.local and reported), "the exception was swallowed"


def _close(interruption: Any, envs: Any, timeout: float | None) -> None:
    with interruption:
        envs.close(timeout=timeout)


def warm_up(setting: Setting) -> None:
    """Open an engine once, because what the first one of a process opens permanently is not a leak of later ones."""
    for _ in range(2):
        setting.open().close()
    gc.collect()
    gc.freeze()
