"""Seeing a child's end where there is no pidfd: not by a pipe that its own children hold too."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vecenv.system.watching import Patrol

METHODS = [name for name in ("fork", "forkserver", "spawn") if name in multiprocessing.get_all_start_methods()]


def leave_a_helper(number: int, helper: int) -> None:
    """End by a signal while a forked helper, which has a copy of every pipe, lives on for a while."""
    if os.fork() == 0:
        os.read(helper, 1)
        os._exit(0)
    os.kill(os.getpid(), number)


def is_rung(descriptor: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "vecenv-watch"]


@pytest.fixture
def patrol() -> Iterator[Patrol]:
    one = Patrol()
    yield one
    one.close()
    assert not watchers()


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    started = []

    def begin(method: str, target: Any, *args: Any) -> Any:
        process = multiprocessing.get_context(method).Process(target=target, args=args, daemon=True)
        process.start()
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.join(20)
        process.close()


@pytest.mark.parametrize("method", METHODS)
def test_an_ordinary_end_is_seen(method: str, patrol: Patrol, start: Callable[..., Any]) -> None:
    process = start(method, time.sleep, 60)
    bell = patrol.watch(process, process.sentinel)
    assert not is_rung(bell, 0.2)
    process.kill()
    assert is_rung(bell, 20)
    process.join(20)  # a pipe of it is closed before it can be reaped
    assert process.exitcode == -signal.SIGKILL
    patrol.forget(bell)


def test_an_end_is_seen_though_a_helper_holds_all_pipes(patrol: Patrol, start: Callable[..., Any]) -> None:
    held, hold = os.pipe()
    try:
        os.set_inheritable(held, True)
        process = start("fork", leave_a_helper, signal.SIGKILL, held)
        bell = patrol.watch(process, process.sentinel)
        assert is_rung(bell, 20)
        assert not is_rung(process.sentinel, 0), "multiprocessing itself does not see it"
    finally:
        os.write(hold, b".")
        os.close(hold)
        os.close(held)


def test_an_end_that_somebody_else_reaped_is_seen(patrol: Patrol, start: Callable[..., Any]) -> None:
    held, hold = os.pipe()
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        process = start("fork", leave_a_helper, signal.SIGKILL, held)
        assert is_rung(patrol.watch(process, process.sentinel), 20)
    finally:
        signal.signal(signal.SIGCHLD, before)
        os.write(hold, b".")
        os.close(hold)
        os.close(held)
        process._popen.returncode = 255  # which nobody knows


def test_the_thread_ends_with_the_last_who_is_watched_and_begins_again(patrol: Patrol, start: Callable[..., Any]) -> None:
    first, second = start("fork", time.sleep, 60), start("fork", time.sleep, 60)
    bells = [patrol.watch(process, process.sentinel) for process in (first, second)]
    assert len(watchers()) == 1
    for process, bell in zip((first, second), bells, strict=True):
        process.kill()
        assert is_rung(bell, 20)
    for thread in watchers():
        thread.join(20)
    third = start("fork", time.sleep, 60)
    again = patrol.watch(third, third.sentinel)
    assert len(watchers()) == 1
    assert not is_rung(again, 0.2)
    third.kill()
    assert is_rung(again, 20)


def test_who_is_forgotten_is_asked_no_more(patrol: Patrol, start: Callable[..., Any]) -> None:
    process = start("fork", time.sleep, 60)
    bell = patrol.watch(process, process.sentinel)
    patrol.forget(bell)
    patrol.forget(bell)
    for thread in watchers():
        thread.join(20)
    assert not watchers()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(bell)
