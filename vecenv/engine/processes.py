"""Starts worker processes, so that no interruption leaves anything behind, and ends them with all that they started."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import select
import signal
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gymnasium import logger

from vecenv.engine.handles import ProcessWorker, envs_text
from vecenv.engine.pending import PendingRequests
from vecenv.errors import StartupTimeout
from vecenv.front.arguments import milliseconds
from vecenv.link.channel import CallerEnd, ChannelClosed
from vecenv.link.messages import Failure, Op, PackedEnvFns, Reply, decode_outcome, encode
from vecenv.shm import Arena
from vecenv.system.cores import Placement
from vecenv.system.descendants import end_group, end_marked, new_token
from vecenv.system.descriptors import DescriptorOwner
from vecenv.system.generators import stream_of_caller
from vecenv.system.spawning import NO_GUARD, Lifeline, Variables, missing_guard, spawn
from vecenv.system.supervision import BlackBox, close_process
from vecenv.system.uninterrupted import Uninterrupted
from vecenv.worker.main import Ready, Start, WorkerPlan, main

if sys.platform != "win32":
    import resource

__all__ = [
    "CLOSING", "DESCRIPTORS", "SPARE_DESCRIPTORS", "PoolOptions", "PoolResources", "ask_to_close", "await_ready", "end",
    "end_unclosed", "launch", "preload", "require_descriptors",
]  # fmt: skip

DESCRIPTORS: Final = 6
"""What a worker costs the caller: two pipes, black box, pidfd, sentinel and, under fork, one more."""
SPARE_DESCRIPTORS: Final = 16
"""For the length of a start."""


@dataclass(slots=True)
class PoolOptions:
    """How to run workers.

    Attributes:
        context: A ``multiprocessing`` context.
        daemon: ``Process.daemon`` of every worker.
        name: Process names are ``Worker<name>-index``.
        start_timeout: Seconds until a worker must have built its environments; ``None``: never.
        max_busy: At most that many workers are busy at a time; ``None``: all of them.
        caller_spin: Seconds for which the caller may poll before it sleeps.
        placements: Where each worker sits.
        variables: Environment variables of each worker.
    """

    context: Any
    daemon: bool
    name: str
    start_timeout: float | None
    max_busy: int | None = None
    caller_spin: float = 0.0
    placements: list[Placement] = field(default_factory=list)
    variables: list[Variables] = field(default_factory=list)


class PoolResources:
    """What all workers of a pool have in common.

    Attributes:
        lives: How many processes were started for each index.
        processes: Every process that was started and not seen to its end: they are ended with the pool.
    """

    def __init__(
        self, plan: WorkerPlan, arena: Arena, options: PoolOptions, table: PendingRequests, holdings: DescriptorOwner
    ) -> None:
        self.plan = plan
        self.arena: Arena | None = arena
        self.options = options
        self.table = table
        self.holdings = holdings
        self.lifeline = Lifeline(holdings)
        self.processes: list[Any] = []
        self.lives: Counter[int] = Counter()
        self.channels: weakref.WeakSet[CallerEnd] = weakref.WeakSet()

    def forget_process(self, process: Any) -> None:
        """One was seen to its end."""
        with contextlib.suppress(ValueError):  # by the call before this one, which was interrupted
            self.processes.remove(process)

    def end_stray(self, process: Any) -> None:
        """End a process whose start was cut short, and which is no worker's therefore."""
        with contextlib.suppress(ValueError, AttributeError, AssertionError):  # it was not started
            process.kill()
            process.join()
        close_process(process)
        self.forget_process(process)

    def forget(self) -> None:
        """Let go of the shared memory, and of every descriptor that is left."""
        if self.arena is not None:
            self.arena.close()
            self.arena = None
        self.holdings.close()


def launch(
    place: PoolResources, index: int, rows: range, env_fns: Sequence[Any], workers: int, into: list[ProcessWorker]
) -> None:
    """Start the process of one worker, and add it to ``into``.

    Raises:
        OSError: No process or too few descriptors.
        Exception: An ``env_fn`` cannot be pickled.
    """
    options = place.options
    forks = options.context.get_start_method() == "fork"
    why = "the start method of its worker needs"
    functions = env_fns if forks else PackedEnvFns.of(rows, env_fns, why)
    placement = options.placements[index] if index < len(options.placements) else Placement()
    variables = options.variables[index] if options.variables else {}
    life = place.lives[index]
    place.lives[index] += 1
    held = place.holdings.child()
    known = len(place.processes)
    try:
        channel = CallerEnd(held)
        place.channels.add(channel)
        black_box = BlackBox(held)
        token = new_token()
        assert place.arena is not None
        start = Start(
            index, rows[0], functions, place.plan, place.arena, channel.theirs, black_box, placement,
            stream_of_caller(), life,
        )  # fmt: skip
        with Uninterrupted():  # half-way it belongs to no one place
            name = f"Worker<{options.name}>-{index}"
            process = spawn(
                options.context, main, (start,), name=name, daemon=options.daemon, lifeline=place.lifeline, token=token,
                variables=variables, into=place.processes,
            )  # fmt: skip
            worker = ProcessWorker(
                index, rows, process, channel, black_box, held, place.table, token, placement.with_caller
            )  # fmt: skip
            into.append(worker)
        channel.started()
    except BaseException as error:
        if not any(worker.held is held for worker in into):
            held.close()
            for stray in place.processes[known:]:
                place.end_stray(stray)
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise _too_few_descriptors(error, workers) from error
        raise


def await_ready(worker: ProcessWorker, deadline: float | None, options: PoolOptions) -> Ready:
    """A worker's first message.

    Raises:
        WorkerDied: It ended before.
        StartupTimeout: It did not come in time.
    """
    while True:
        try:
            message = worker.channel.read()
        except ChannelClosed:
            message = None
            worker.mark_dead()
        if worker.death is not None:
            unguarded = worker.death.exitcode == NO_GUARD
            raise worker.death.error(missing_guard(options.context.get_start_method()) if unguarded else worker.death.text)
        if message is not None:
            ready: Ready = pickle.loads(message[2] or b"")
            worker.starting = False
            worker.channel.drop()
            return ready
        left = milliseconds(deadline)
        if left == 0 or not worker.wait(left):
            stack = worker.stack()
            raise StartupTimeout(
                f"worker {worker.index} (pid {worker.pid}, {envs_text(worker.rows)}) was not ready within "
                f"{options.start_timeout} seconds of its start" + (f"; it is at:\n{stack}" if stack else "")
                + _advice_for_fork(options.context)
            )  # fmt: skip


def preload(context: Any) -> None:
    """Let a fork server that is not running yet import the engine once, and not every worker anew."""
    if context.get_start_method() != "forkserver":
        return
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    with contextlib.suppress(AttributeError):  # private names: without them it only starts more slowly
        if server._forkserver_pid is None and server._preload_modules == ["__main__"]:
            context.set_forkserver_preload(["__main__", "vecenv.worker.main"])


def require_descriptors(workers: int) -> None:
    """Refuse at once what would fail half-way: CPython itself loses descriptors when it meets the limit in a start."""
    if sys.platform == "win32":
        return
    with contextlib.suppress(FileNotFoundError):
        free = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))
        if free < DESCRIPTORS * workers + SPARE_DESCRIPTORS:
            raise _too_few_descriptors(OSError(errno.EMFILE, ""), workers)


def _too_few_descriptors(error: OSError, workers: int) -> OSError:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    need = DESCRIPTORS * workers + SPARE_DESCRIPTORS
    return OSError(
        error.errno,
        f"{os.strerror(error.errno or 0)}: {workers} workers need {need} more open files, and RLIMIT_NOFILE is {soft}; "
        "raise it (ulimit -n), or use fewer workers (num_workers=)",
    )


def _advice_for_fork(context: Any) -> str:
    if context.get_start_method() != "fork" or threading.active_count() < 2:
        return ""
    return (
        f"\n({threading.active_count()} threads were running when it was forked; a lock that one of them held is held for "
        "ever in the child: use context='forkserver')"
    )


CLOSING: Final = 0
"""The sequence number of the last message; all others are above 0."""

_TERM_GRACE: Final = 0.25  # between SIGTERM and SIGKILL
_KILLED: Final = 5.0  # for the kernel to end what was killed


def end(
    workers: Sequence[ProcessWorker], timeout: float, terminate: bool, failures: list[tuple[Failure, Any]] | None = None
) -> None:
    """End processes within about ``timeout`` seconds, and what their environments started. It can be called again.

    Args:
        workers: The workers.
        timeout: Seconds for their environments' own ``close``.
        terminate: Without asking them first.
        failures: Where to note what environments raised in their ``close``, and in which worker.
    """
    deadline = time.monotonic() + timeout
    alive = [worker for worker in workers if worker.death is None and not worker.watch.has_ended()]
    if terminate:
        for worker in alive:
            worker.signal(signal.SIGTERM)
        deadline = time.monotonic() + _TERM_GRACE
    else:
        for worker in alive:
            ask_to_close(worker)
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
    """The pool was collected, or the program ends, without ``close()``: end what was started."""
    if os.getpid() != owner or not processes:
        return
    lifeline.close()  # the kernel kills the process at the other end
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


def ask_to_close(worker: ProcessWorker) -> None:
    """Ask a worker to close its environments; heard after what it is busy with. Once, whatever interrupts it."""
    if worker.asked_to_close or worker.channel.closed:
        return
    # a message that was written in part would swallow this one; such a worker is not asked
    worker.asked_to_close = True
    with contextlib.suppress(ChannelClosed):
        if not worker.partly_sent():
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
