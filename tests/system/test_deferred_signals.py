"""``deferred_signals`` delays signal handlers, and ``raised_by_handler`` recognizes their exceptions."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from forks import run_in_fork
from signals import Alarm, signal_handler

from vecenv.system.signals import deferred_signals, raised_by_handler, watched_handlers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


SOURCE = sys.modules[deferred_signals.__module__].__file__


def raise_sigusr2() -> None:
    signal.raise_signal(signal.SIGUSR2)


def installed_handlers() -> list[object]:
    return [signal.getsignal(number) for number in range(1, signal.NSIG)]


@pytest.mark.parametrize("nested", [False, True])
def test_handler_runs_at_the_end_of_the_outermost_block(nested: bool) -> None:
    done = []

    def change() -> None:
        with deferred_signals():
            raise_sigusr2()
            if nested:
                with deferred_signals():
                    raise_sigusr2()
                done.append("inner")
            done.append("outer")

    with signal_handler(signal.SIGUSR2, Alarm):
        before = installed_handlers()
        with pytest.raises(Alarm):
            change()
        assert installed_handlers() == before
    assert done == (["inner", "outer"] if nested else ["outer"])


def test_all_handlers_run_and_the_first_exception_is_raised() -> None:
    ran: list[int] = []

    def note(number: int, frame: Any) -> None:
        ran.append(number)
        raise Alarm(number)

    def change() -> None:
        with deferred_signals():
            signal.raise_signal(signal.SIGUSR1)
            raise_sigusr2()
            raise_sigusr2()

    with signal_handler(signal.SIGUSR1, note), signal_handler(signal.SIGUSR2, note), pytest.raises(Alarm) as raised:
        change()
    assert ran == [signal.SIGUSR1, signal.SIGUSR2]
    assert raised.value.args == (signal.SIGUSR1,)


def test_exception_of_the_block_is_raised_and_handlers_are_restored() -> None:
    with signal_handler(signal.SIGUSR2, Alarm):
        before = installed_handlers()
        with pytest.raises(ZeroDivisionError), deferred_signals():
            raise ZeroDivisionError
        assert installed_handlers() == before


def test_child_forked_in_the_block_runs_handlers_at_once() -> None:
    def check() -> None:
        with pytest.raises(Alarm):
            raise_sigusr2()

    with signal_handler(signal.SIGUSR2, Alarm), deferred_signals(), deferred_signals():
        assert run_in_fork(check) == 0


def test_other_threads_change_no_handlers() -> None:
    found: list[object] = []

    def body() -> None:
        with deferred_signals():
            found.append(installed_handlers())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [installed_handlers()]


def raise_signal_at_bytecode(event: int, function: Callable[[], None]) -> bool:
    """Call ``function``, and raise a signal at the ``event``-th bytecode; return True if it has that many."""
    count, fired = 0, False

    def trace(frame: Any, kind: str, _: Any) -> Any:
        nonlocal count, fired
        if frame.f_code.co_filename not in (contextlib.__file__, SOURCE):
            return None
        frame.f_trace_opcodes = True
        count += kind == "opcode"
        if count == event:
            fired = True
            sys.settrace(None)
            raise_sigusr2()
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces bytecodes only if this is set before settrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return fired


def test_signal_at_any_bytecode_leaves_the_block_atomic() -> None:
    event, fired = 0, True
    while fired and event < 3000:
        event += 1
        state: list[int] = []

        def change(state: list[int] = state) -> None:
            with deferred_signals():
                state.append(1)
                state.append(2)

        with signal_handler(signal.SIGUSR2, Alarm):
            before, raised = installed_handlers(), False
            try:
                fired = raise_signal_at_bytecode(event, change)
            except Alarm:
                raised = fired = True
            assert len(state) in (0, 2), f"event {event}"
            assert raised == fired, f"event {event}: the signal was lost"
            assert installed_handlers() == before, f"event {event}"
    assert 100 < event < 3000


def test_exceptions_of_handlers_are_recognized_also_as_a_cause() -> None:
    def wrap() -> None:
        try:
            raise_sigusr2()
        except Alarm as error:
            raise RuntimeError from error

    with signal_handler(signal.SIGUSR2, Alarm):
        before = installed_handlers()
        with watched_handlers():
            for call in (raise_sigusr2, wrap):
                with pytest.raises((Alarm, RuntimeError)) as raised:
                    call()
                assert raised_by_handler(raised.value)
            assert not raised_by_handler(Alarm())
        assert not raised_by_handler(raised.value)
        assert installed_handlers() == before


def test_watched_handlers_are_deferred_only_by_an_inner_block() -> None:
    done = []

    def change() -> None:
        with deferred_signals():
            raise_sigusr2()
            done.append(True)

    with signal_handler(signal.SIGUSR2, Alarm), watched_handlers():
        for call in (change, raise_sigusr2):
            with pytest.raises(Alarm):
                call()
    assert done
