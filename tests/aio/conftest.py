"""libuv, which uvloop is made of, keeps one pipe from its first loop on: it is there before any test."""

from __future__ import annotations

import asyncio
import contextlib

with contextlib.suppress(ImportError):
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))
