"""What is there before any test: libuv, which uvloop is made of, keeps one pipe from its first loop on."""

from __future__ import annotations

import asyncio
import contextlib

from vecenv.testing import assert_identical  # noqa: F401 - before anything else imports where its assertions are

with contextlib.suppress(ImportError):
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))
