"""Who draws from the generators that all code of a process shares? Told once, at no cost for those that do not draw."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vecenv.system.generators import PROCESS

__all__ = ["look_at_torch", "unwatch", "unwatched", "watch", "watch_by"]


def watch(seen: Callable[[str], None]) -> None:
    """Call ``seen`` with the name of the first generator that is used, outside of all turns; once, and not for torch's."""
    if PROCESS.seen is None:
        PROCESS.acquire()
        PROCESS.leave()
    PROCESS.seen = seen


def watch_by(seen: Callable[[str], None]) -> None:
    """Have another function called by the watch, if there is one."""
    if PROCESS.seen is not None:
        PROCESS.seen = seen


def look_at_torch() -> None:
    """While there is a watch, in a worker: has torch's generator been drawn from since the last look?"""
    if PROCESS.seen is not None and PROCESS.alone and (torch := sys.modules.get("torch")) is not None:
        before, now = PROCESS.outside.torch, getattr(torch, "default_generator", None)
        if now is not None:
            PROCESS.outside.torch = now.get_state()
            if before is not None and not torch.equal(before, PROCESS.outside.torch):
                PROCESS.saw("torch")


def unwatch() -> None:
    """End a :func:`watch`, if there is one."""
    if PROCESS.seen is not None:
        PROCESS.seen = None
        PROCESS.release()


@contextmanager
def unwatched() -> Iterator[None]:
    """While the engine itself looks at generators, that is seen by no :func:`watch`."""
    seen = PROCESS.seen
    unwatch()
    try:
        yield
    finally:
        if seen is not None:
            watch(seen)
