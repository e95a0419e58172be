"""Tests that are coroutines run in a loop; and what is there before any test.

libuv, which uvloop is made of, keeps one pipe from its first loop on.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect

import pytest

from vecenv.testing import assert_identical  # noqa: F401 - before anything else imports where its assertions are

with contextlib.suppress(ImportError):
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine function runs as a program: bounded, and nothing that it leaves may be pending.

    Where it has the parameter ``loop``, that says which kind of loop.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    from worlds import run

    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    run(pyfuncitem.obj(**given), given.get("loop", "asyncio"))
    return True
