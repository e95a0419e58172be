"""Tests that ``deferred_signals`` delays signal handlers, and that exceptions of handlers are recognized."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from envs import CounterEnv, ready_engine
from forks import run_in_fork
from signals import Alarm, signal_handler

from vecenv.system.signals import call_with_fallback, deferred_signals, raised_by_handler, watched_handlers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


SIGNALS_FILE = sys.modules[deferred_signals.__module__].__file__


def raise_sigusr2() -> None:
    signal.raise_signal(signal.SIGUSR2)


def list_handlers() -> list[object]:
    return [signal.getsignal(number) for number in range(1, signal.NSIG)]


@pytest.mark.parametrize("nested", [False, True])
def test_handler_runs_at_the_end_of_the_outermost_block(nested: bool) -> None:
    finished_blocks = []

    def run_blocks() -> None:
        with deferred_signals():
            raise_sigusr2()
            if nested:
                with deferred_signals():
                    raise_sigusr2()
                finished_blocks.append("inner")
            finished_blocks.append("outer")

    with signal_handler(signal.SIGUSR2, Alarm):
        before = list_handlers()
        with pytest.raises(Alarm):
            run_blocks()
        assert list_handlers() == before
    assert finished_blocks == (["inner", "outer"] if nested else ["outer"])


def test_all_handlers_run_and_the_first_exception_is_raised() -> None:
    handled: list[int] = []

    def handle(number: int, frame: Any) -> None:
        handled.append(number)
        raise Alarm(number)

    def raise_signals() -> None:
        with deferred_signals():
            signal.raise_signal(signal.SIGUSR1)
            raise_sigusr2()
            raise_sigusr2()

    with signal_handler(signal.SIGUSR1, handle), signal_handler(signal.SIGUSR2, handle), pytest.raises(Alarm) as raised:
        raise_signals()
    assert handled == [signal.SIGUSR1, signal.SIGUSR2]
    assert raised.value.args == (signal.SIGUSR1,)


def test_exception_of_the_block_is_raised_and_handlers_are_restored() -> None:
    with signal_handler(signal.SIGUSR2, Alarm):
        before = list_handlers()
        with pytest.raises(ZeroDivisionError), deferred_signals():
            raise ZeroDivisionError
        assert list_handlers() == before


def test_child_forked_in_the_block_runs_handlers_at_once() -> None:
    def check() -> None:
        with pytest.raises(Alarm):
            raise_sigusr2()

    with signal_handler(signal.SIGUSR2, Alarm), deferred_signals(), deferred_signals():
        assert run_in_fork(check) == 0


def test_block_in_another_thread_changes_no_handlers() -> None:
    handlers_in_block: list[object] = []

    def run_block() -> None:
        with deferred_signals():
            handlers_in_block.append(list_handlers())

    thread = threading.Thread(target=run_block)
    thread.start()
    thread.join()
    assert handlers_in_block == [list_handlers()]


def raise_signal_at_bytecode(number: int, function: Callable[[], None]) -> bool:
    """Call ``function``, and raise a signal at the bytecode with this number. Return False if there are fewer bytecodes.

    Only bytecodes in the files of ``deferred_signals`` and ``contextlib`` count.
    """
    count, fired = 0, False

    def trace(frame: Any, kind: str, _: Any) -> Any:
        nonlocal count, fired
        if frame.f_code.co_filename not in (contextlib.__file__, SIGNALS_FILE):
            return None
        frame.f_trace_opcodes = True
        count += kind == "opcode"
        if count == number:
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
    number, fired = 0, True
    while fired and number < 3000:
        number += 1
        state: list[int] = []

        def run_block(state: list[int] = state) -> None:
            with deferred_signals():
                state.append(1)
                state.append(2)

        with signal_handler(signal.SIGUSR2, Alarm):
            before, raised = list_handlers(), False
            try:
                fired = raise_signal_at_bytecode(number, run_block)
            except Alarm:
                raised = fired = True
            assert len(state) in (0, 2), f"bytecode {number}"
            assert raised == fired, f"bytecode {number}: the signal was lost"
            assert list_handlers() == before, f"bytecode {number}"
    assert 100 < number < 3000  # all bytecodes were tried


def test_exception_of_a_handler_is_recognized_even_as_a_cause() -> None:
    def raise_with_alarm_as_cause() -> None:
        try:
            raise_sigusr2()
        except Alarm as error:
            raise RuntimeError from error

    with signal_handler(signal.SIGUSR2, Alarm):
        before = list_handlers()
        with watched_handlers():
            for call in (raise_sigusr2, raise_with_alarm_as_cause):
                with pytest.raises((Alarm, RuntimeError)) as raised:
                    call()
                assert raised_by_handler(raised.value)
            assert not raised_by_handler(Alarm())
        assert not raised_by_handler(raised.value)
        assert list_handlers() == before


def test_deferred_handler_receives_a_frame() -> None:
    """A statistical profiler reads it."""
    functions: list[str] = []

    def note_caller(number: int, frame: Any) -> None:
        while frame is not None:
            functions.append(frame.f_code.co_name)
            frame = frame.f_back

    with signal_handler(signal.SIGUSR2, note_caller), deferred_signals():
        raise_sigusr2()
        assert not functions
    assert "test_deferred_handler_receives_a_frame" in functions


def test_search_for_the_exception_of_a_handler_ends_if_an_exception_is_its_own_cause() -> None:
    own_cause, first, second = ValueError(), ValueError(), OSError()
    own_cause.__cause__ = own_cause  # by `raise error from error`
    first.__cause__, second.__context__ = second, first  # by `raise first from second`, while first is being handled
    for error in (own_cause, first, second):
        assert not raised_by_handler(error)


def test_watched_handlers_are_deferred_only_by_an_inner_block() -> None:
    block_finished = False

    def run_block() -> None:
        nonlocal block_finished
        with deferred_signals():
            raise_sigusr2()
            block_finished = True

    with signal_handler(signal.SIGUSR2, Alarm), watched_handlers():
        for call in (run_block, raise_sigusr2):
            with pytest.raises(Alarm):
                call()
    assert block_finished


@pytest.mark.parametrize("number_of_blocks", [1, 2])
@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None], ids=["ignored", "function"])
def test_handler_that_a_watched_block_installs_stays_installed(handler: Any, number_of_blocks: int) -> None:
    with signal_handler(signal.SIGUSR1, Alarm), signal_handler(signal.SIGUSR2, Alarm):
        before = list_handlers()
        with contextlib.ExitStack() as stack:
            for _ in range(number_of_blocks):
                stack.enter_context(watched_handlers())
            signal.signal(signal.SIGUSR2, handler)
        before[signal.SIGUSR2 - 1] = handler
        assert list_handlers() == before


def test_handler_found_in_an_ended_watched_block_is_replaced_by_the_original() -> None:
    """A program may restore, in a later block, the handler that it found in an earlier one."""
    with signal_handler(signal.SIGUSR2, Alarm):
        original = signal.getsignal(signal.SIGUSR2)
        with watched_handlers():
            found = signal.signal(signal.SIGUSR2, raise_zero_division_error)
        with watched_handlers():
            signal.signal(signal.SIGUSR2, found)
        assert signal.getsignal(signal.SIGUSR2) is original


class InstallingEnv(CounterEnv):
    """An environment with a method that installs a signal handler."""

    def install(self) -> None:
        signal.signal(signal.SIGUSR2, raise_zero_division_error)


def raise_zero_division_error(number: int, frame: Any) -> None:
    raise ZeroDivisionError


def test_handler_that_a_method_installs_in_the_caller_stays_installed() -> None:
    with signal_handler(signal.SIGUSR2, Alarm), ready_engine([InstallingEnv], num_workers=0) as envs:
        envs.call("install")
        assert signal.getsignal(signal.SIGUSR2) is raise_zero_division_error
        envs.call("env_id")
        assert signal.getsignal(signal.SIGUSR2) is raise_zero_division_error


@pytest.mark.parametrize("error", [Alarm, KeyboardInterrupt])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("interrupted_call", [1, 2])
def test_exception_of_a_handler_is_raised_although_the_function_also_fails(
    interrupted_call: int, fails: bool, error: type[BaseException]
) -> None:
    calls = 0

    def function() -> str:
        nonlocal calls
        calls += 1
        if calls == interrupted_call:
            raise_sigusr2()
        if fails:
            raise ValueError("cannot be copied")
        return "result"

    for kind in (Exception, BaseException):
        calls = 0
        is_interrupted = fails or interrupted_call == 1  # otherwise there is no second call
        expected = pytest.raises(error) if is_interrupted else contextlib.nullcontext()
        with signal_handler(signal.SIGUSR2, error), expected:
            assert call_with_fallback(function, str, kind) == "result"
        calls = interrupted_call
        assert call_with_fallback(function, str, kind) == ("cannot be copied" if fails else "result")
