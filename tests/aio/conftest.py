"""Runs tests that are coroutine functions in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import inspect

import pytest

from vecenv.testing import assert_identical  # noqa: F401 - before other imports, to register its assertions for rewriting

with contextlib.suppress(ImportError):
    import uvloop

    # libuv never closes a pipe that its first loop opens, so this loop opens it before a test counts descriptors
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test with a time limit, and fail it if it leaves a task pending.

    The parameter ``loop`` of the test, if it has one, selects the kind of loop.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    from text_envs import run

    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    run(pyfuncitem.obj(**arguments), arguments.get("loop", "asyncio"))
    return True
