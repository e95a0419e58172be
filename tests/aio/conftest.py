"""Runs tests that are coroutine functions in an event loop.

libuv, on which uvloop is built, keeps one pipe from its first loop on.
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
    """Run a test that is a coroutine function, with a time limit; it must leave no task pending.

    Its parameter ``loop``, if it has one, selects the kind of loop.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    from text_envs import run

    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    run(pyfuncitem.obj(**given), given.get("loop", "asyncio"))
    return True
