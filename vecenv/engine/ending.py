"""Ending worker processes: asked first, then told, then killed, with all that their environments started."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Sequence
from typing import Any, Final

from gymnasium import logger

from vecenv.engine.handles import ProcessWorker
from vecenv.link.channel import ChannelClosed
from vecenv.link.messages import Failure, Op, Reply, decode_outcome, encode
from vecenv.system.descendants import end_group, end_marked
from vecenv.system.spawning import Lifeline
from vecenv.system.supervision import close_process

__all__ = ["CLOSING", "end", "end_unclosed"]

CLOSING: Final = 0
"""The sequence number of the last message; all others are above 0."""

_TERM_GRACE: Final = 0.25  # between SIGTERM and SIGKILL
_KILLED: Final = 5.0  # for the kernel to end what was killed


def end(
    workers: Sequence[ProcessWorker], timeout: float, terminate: bool, failures: list[tuple[Failure, Any]] | None = None
) -> None:
    """End processes within about ``timeout`` seconds, and what their environments started. It can be called again.

    Args:
        workers: Whom.
        timeout: Seconds for their environments' own ``close``.
        terminate: Without asking them first.
        failures: Where to note what environments raised in their ``close``, and by whom.
    """
    deadline = time.monotonic() + timeout
    alive = [worker for worker in workers if worker.death is None and not worker.watch.has_ended()]
    if terminate:
        for worker in alive:
            worker.signal(signal.SIGTERM)
        deadline = time.monotonic() + _TERM_GRACE
    else:
        for worker in alive:
            _ask(worker)
    patient = [worker for worker in alive if not worker.is_stopped()]
    _wait_for_ends(patient, deadline, failures)
    if not terminate:
        late = [worker for worker in alive if not worker.watch.has_ended()]
        for worker in late:
            worker.signal(signal.SIGTERM)
        _wait_for_ends([w for w in late if not w.is_stopped()], time.monotonic() + _TERM_GRACE, failures)
    for worker in alive:
        if not worker.watch.has_ended():
            worker.signal(signal.SIGKILL)
    _wait_for_ends(alive, time.monotonic() + _KILLED, failures)
    end_group(worker.pid for worker in alive)
    for worker in workers:
        worker.watch.exit_code()
    end_marked([worker.token for worker in workers])


def end_unclosed(lifeline: Lifeline, processes: list[Any], owner: int) -> None:
    """The pool was collected, or the program ends, and nobody closed it: end what was started."""
    if os.getpid() != owner or not processes:
        return
    lifeline.close()  # the kernel kills whoever holds the other end
    started = []
    for process in processes:
        with contextlib.suppress(ValueError):  # it is closed
            if process.pid is not None:
                started.append(process)
    for process in started:
        with contextlib.suppress(ValueError, OSError, AttributeError, AssertionError):
            if process.exitcode is None:  # not reaped, so that its number is still its own
                end_group([process.pid])
                os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 1.0
    for process in started:
        with contextlib.suppress(ValueError, OSError, AttributeError, AssertionError):
            while process.exitcode is None and time.monotonic() < deadline and _may_be_there(process.pid):
                time.sleep(0.001)
        close_process(process)
    processes.clear()


def _may_be_there(pid: int) -> bool:
    """Whether its exit code may still come: not where the kernel has reaped it, if that can be seen."""
    return os.path.exists(f"/proc/{pid}") or not os.path.exists("/proc/self")


def _ask(worker: ProcessWorker) -> None:
    """Ask a worker to close its environments; heard after what it is busy with. Once, whatever interrupts it."""
    if worker.asked_to_close or worker.channel.closed:
        return
    # a message that was written in part would swallow this one; such a worker is not asked
    worker.asked_to_close = True
    with contextlib.suppress(ChannelClosed):
        if not worker.half_told():
            worker.channel.write(encode(Op.CLOSE, CLOSING), [])


def _wait_for_ends(workers: Sequence[ProcessWorker], deadline: float, failures: list[tuple[Failure, Any]] | None) -> None:
    for worker in workers:
        if (descriptor := worker.watch.descriptor) < 0:
            continue
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        open_end = worker.channel.fd
        if open_end >= 0:
            poll.register(open_end, select.POLLIN)
        while not worker.watch.has_ended() and (left := deadline - time.monotonic()) > 0:
            for descriptor, _ in worker.watch.sleep(poll, left * 1000):
                if descriptor == open_end and not _drain(worker, failures):
                    poll.unregister(open_end)
                    open_end = -1
        _drain(worker, failures)


def _drain(worker: ProcessWorker, failures: list[tuple[Failure, Any]] | None) -> bool:
    """Take in what a worker that is ending still says: with a large answer in the pipe it could not end."""
    try:
        while (message := worker.channel.read()) is not None:
            word, seq, payload = message
            if word == Reply.FULL and seq == CLOSING and payload is not None and failures is not None:
                said = decode_outcome(payload)
                failures += [(failure, worker) for failure in said.failures]
                for _, text in said.warnings:
                    logger.warn("%s", f"worker {worker.index} (pid {worker.pid}): {text}")
            worker.channel.drop()
    except ChannelClosed:
        return False
    return True
