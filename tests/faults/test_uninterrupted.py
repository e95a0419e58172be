"""A moment in which no signal handler raises."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
from observe import FAULTS

from vecenv.system.uninterrupted import Noted, Uninterrupted, by_handler, let_in

pytestmark = FAULTS


class Rung(Exception):
    """What the handler raises."""


@pytest.fixture
def bell() -> Iterator[list[int]]:
    """A handler of SIGUSR2 that raises; the signals it has heard."""
    heard: list[int] = []

    def ring(number: int, frame: object) -> None:
        heard.append(number)
        raise Rung

    before = signal.signal(signal.SIGUSR2, ring)
    yield heard
    signal.signal(signal.SIGUSR2, before)


def test_what_comes_in_the_block_is_raised_at_its_end(bell: list[int]) -> None:
    done = []

    def block() -> None:
        with Uninterrupted():
            os.kill(os.getpid(), signal.SIGUSR2)
            os.kill(os.getpid(), signal.SIGUSR2)
            done.append(True)

    with pytest.raises(Rung):
        block()
    assert done
    assert bell == [signal.SIGUSR2] * 2


def test_what_a_handler_raises_is_told_from_what_other_code_raises(bell: list[int]) -> None:
    def ring() -> None:
        os.kill(os.getpid(), signal.SIGUSR2)

    def wrap() -> None:
        try:
            ring()
        except Rung as error:
            raise RuntimeError from error

    with Noted():
        for call in (ring, wrap):
            with pytest.raises((Rung, RuntimeError)) as raised:
                call()
            assert by_handler(raised.value)
        assert not by_handler(Rung())
    assert not by_handler(raised.value)
    assert bell == [signal.SIGUSR2] * 2


def test_handlers_are_the_same_before_and_after(bell: list[int]) -> None:
    def handlers() -> list[object]:
        return [signal.getsignal(number) for number in range(1, signal.NSIG)]

    before, mask = handlers(), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with Uninterrupted():
        assert handlers() != before
        with Uninterrupted():
            pass
    assert handlers() == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    with pytest.raises(Rung):
        os.kill(os.getpid(), signal.SIGUSR2)


def test_an_exception_of_the_block_comes_out_of_it(bell: list[int]) -> None:
    with pytest.raises(ZeroDivisionError), Uninterrupted():
        raise ZeroDivisionError


def test_a_child_forked_in_the_block_has_the_handlers_back(bell: list[int]) -> None:
    with Uninterrupted():
        pid = os.fork()
        if pid == 0:
            let_in()
            try:
                os.kill(os.getpid(), signal.SIGUSR2)
                signal.getsignal(signal.SIGUSR2)
            except Rung:
                os._exit(7)
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_in_another_thread_nothing_is_to_be_done(bell: list[int]) -> None:
    found: list[object] = []

    def body() -> None:
        with Uninterrupted():
            found.append(signal.getsignal(signal.SIGUSR2))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGUSR2)]
