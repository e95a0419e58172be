"""What is there before any test: libuv, which uvloop is made of, keeps one pipe from its first loop on."""

from __future__ import annotations

import asyncio
import contextlib

import vecenv.testing  # noqa: F401 - before anything imports what its assertions are rewritten in

with contextlib.suppress(ImportError):
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))
