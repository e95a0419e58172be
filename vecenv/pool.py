"""The pool of workers: start, post, gather, replace, close.

All mutable state of the pool is the list ``workers`` (:mod:`vecenv.workers`), and the queue of messages held back while
enough workers are busy.

Waiting for everybody begins with the worker that was asked last. By the time it has answered, most of the others have too,
so that the caller wakes up once or twice a step and not once a worker.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pickle
import select
import signal
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import cloudpickle
from gymnasium.vector.utils import clear_mpi_env_vars

from vecenv.channel import Channel, ChannelClosed, Message
from vecenv.cores import Patience, Seat
from vecenv.errors import StartupTimeout, WorkerDied
from vecenv.failure import BlackBox, DeathWatch, Lifeline, end_group
from vecenv.protocol import Op, Reply, encode
from vecenv.rows import Failure
from vecenv.shm import Arena, Batch
from vecenv.wire import load
from vecenv.worker import Plan, Ready, Start, main
from vecenv.workers import AnyWorker, CallerWorker, ProcessWorker, Request, envs_text

if sys.platform != "win32":
    import resource

__all__ = ["PoolOptions", "WorkerPool", "dump_env_fn", "refuse_to_start_while_importing_main"]

_CLOSING: Final = 0  # the sequence number of the last message; all others are above 0
_PLAIN: Final = int(Reply.PLAIN)  # packing an enum takes longer
_STEP: Final = int(Op.STEP)
_TERM_GRACE: Final = 0.25  # between SIGTERM and SIGKILL
_DESCRIPTORS: Final = 6  # a worker costs the caller: two pipes, black box, pidfd, sentinel and, under fork, one more
_SPARE_DESCRIPTORS: Final = 16  # for the length of a start


_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


def _abandon_all() -> None:
    """In a process forked from the caller: let go of every pool without touching its workers."""
    for pool in list(_pools):
        pool.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)


@dataclass(slots=True)
class PoolOptions:
    """How to run workers.

    Attributes:
        context: A ``multiprocessing`` context.
        daemon: ``Process.daemon`` of every worker.
        name: Process names are ``Worker<name>-index``.
        start_timeout: Seconds until a worker must have built its environments.
        max_busy: At most so many workers are busy at a time; ``None``: all of them.
        caller_spin: Seconds for which the caller may poll before it sleeps.
    """

    context: Any
    daemon: bool
    name: str
    start_timeout: float
    max_busy: int | None = None
    caller_spin: float = 0.0
    seats: list[Seat] = field(default_factory=list)


class WorkerPool:
    """The workers of one vector environment."""

    def __init__(self, plan: Plan, arena: Arena, batch: Batch, options: PoolOptions) -> None:
        self.workers: list[AnyWorker] = []
        self.abandoned = False
        self.failures_in_close: list[tuple[Failure, AnyWorker]] = []
        self.time_waiting = 0.0
        self.replaced = 0  # how many workers were
        self._plan = plan
        self._arena = arena
        self.batch = batch
        self._options = options
        self._lifeline = Lifeline()
        self._watch = DeathWatch()
        self._env_fns: dict[int, Sequence[Any]] = {}
        self._channels: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._queue: deque[tuple[ProcessWorker, Request]] = deque()
        shares_core = any(seat.with_caller for seat in options.seats)
        self._patience = Patience(options.caller_spin, batch.resting_until, shares=shares_core)
        self._seq = 0
        self._any: select.poll | None = None
        self._writers: dict[int, ProcessWorker] = {}  # by the descriptors that are polled for any of them
        _pools.add(self)

    # -- starting ---------------------------------------------------------------------------------------------------

    def start(self, shares: Sequence[tuple[range, Sequence[Any]]], first_index: int = 0) -> list[Ready]:
        """Start one process a share, all at once, then wait until every one has built its environments.

        Args:
            shares: (rows, env_fns) of every process.
            first_index: Index of the first of them among the workers.

        Raises:
            StartupTimeout, WorkerDied, OSError: And nothing is left running.
        """
        _require_descriptors(len(shares))
        _preload(self._options.context)
        started: list[ProcessWorker] = []
        deadline = time.monotonic() + self._options.start_timeout
        try:
            with clear_mpi_env_vars():
                for index, (rows, env_fns) in enumerate(shares, first_index):
                    self._env_fns[index] = env_fns
                    started.append(self._launch(index, rows, len(shares)))
            readies = [self._await_ready(worker, deadline) for worker in started]
        except BaseException:
            self._end(started, 0.0, terminate=True)
            raise
        self.workers.extend(started)
        return readies

    def _launch(self, index: int, rows: range, workers: int) -> ProcessWorker:
        context = self._options.context
        forks = context.get_start_method() == "fork"
        env_fns = self._env_fns[index]
        why = "the start method of its worker needs"
        blobs = env_fns if forks else [dump_env_fn(row, fn, why) for row, fn in zip(rows, env_fns, strict=True)]
        seats = self._options.seats
        ours: list[Any] = []  # to be closed if the start fails
        theirs: list[Any] = []  # to be closed here in any case
        try:
            up, their_writer = context.Pipe(duplex=False)
            ours.append(up)
            theirs.append(their_writer)
            their_reader, down = context.Pipe(duplex=False)
            ours.append(down)
            theirs.append(their_reader)
            black_box = BlackBox()
            ours.append(black_box)
            channel = Channel(up, down)
            self._channels.add(channel)
            seat = seats[index] if index < len(seats) else Seat()
            start = Start(
                index, rows[0], blobs, not forks, self._plan, self._arena, their_reader, their_writer, self._lifeline,
                black_box, seat,
            )  # fmt: skip
            process = context.Process(target=main, name=f"Worker<{self._options.name}>-{index}", args=(start,))
            process.daemon = self._options.daemon
            process.start()
            worker = ProcessWorker(index, rows, process, channel, black_box, self._watch, seat.with_caller)
        except BaseException as error:
            for end in ours:
                end.close()
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise _too_few_descriptors(error, workers) from error
            raise
        finally:
            for end in theirs:
                end.close()
        worker.asked.append(Request(0, Op.RESET, rows))
        return worker

    def _await_ready(self, worker: ProcessWorker, deadline: float) -> Ready:
        while True:
            try:
                message = worker.channel.receive()
            except ChannelClosed:
                message = None
                worker.bury()
            if worker.death is not None:
                raise WorkerDied(
                    str(worker.death).replace("during reset", "during its start") + _advice_for_start(self._options.context),
                    worker=worker.index, envs=list(worker.rows), pid=worker.pid,
                    exitcode=worker.exitcode, command="start",
                )  # fmt: skip
            if message is not None:
                ready: Ready = pickle.loads(message[2] or b"")
                worker.asked.clear()
                return ready
            left = deadline - time.monotonic()
            if left <= 0 or not worker.wait(left):
                stack = worker.stack()
                raise StartupTimeout(
                    f"worker {worker.index} (pid {worker.pid}, {envs_text(worker.rows)}) was not ready within "
                    f"{self._options.start_timeout} seconds of its start" + (f"; it is at:\n{stack}" if stack else "")
                    + _advice_for_fork(self._options.context)
                )  # fmt: skip

    def replace(self, worker: ProcessWorker) -> Ready:
        """Start a new process in the place of a dead one: same index, same rows, its environments built anew."""
        self._drop_from_any(worker)
        worker.release()
        rows = worker.rows
        with clear_mpi_env_vars():
            new = self._launch(worker.index, rows, 1)
        try:
            ready = self._await_ready(new, time.monotonic() + self._options.start_timeout)
        except BaseException:
            # the place stays taken by the dead worker: the next reset tries again
            self._end([new], 0.0, terminate=True)
            raise
        self.workers[self.workers.index(worker)] = new
        self.replaced += 1
        self._add_to_any(new)
        return ready

    # -- asking and answering ---------------------------------------------------------------------------------------

    def next_seq(self) -> int:
        """A fresh sequence number, never 0."""
        self._seq = self._seq % 0xFFFFFFFF + 1
        return self._seq

    def post(self, worker: AnyWorker, request: Request) -> None:
        """Ask a worker, now or, when enough workers are busy, as soon as one of them has answered."""
        if isinstance(worker, ProcessWorker) and self._options.max_busy is not None and request.op <= Op.REBUILD_SOME:
            self._queue.append((worker, request))
            self._post_queued()
        else:
            worker.post(request)

    def ring(self, seq: int) -> None:
        """Post a step of all rows, with actions in shared memory, to every worker."""
        if self._options.max_busy is not None:
            for worker in self.workers:
                self.post(worker, Request(seq, Op.STEP, worker.rows))
            return
        data = encode(_STEP, seq)
        for worker in self.workers:
            worker.ring(data, seq)

    def _post_queued(self) -> None:
        while self._queue:
            busy = sum(1 for other in self.workers if not other.local and other.owes)
            if busy >= (self._options.max_busy or len(self.workers)):
                return
            worker, request = self._queue.popleft()
            worker.post(request)

    def gather(self, workers: Sequence[AnyWorker], deadline: float | None) -> list[AnyWorker]:
        """Wait until each of ``workers`` has answered; returns those that had not when the time was up."""
        elsewhere = bool(self._queue)
        for worker in workers:
            if not worker.local:
                elsewhere = True
            while worker.local and worker.asked:
                worker.receive()
        if not elsewhere:
            return []
        began = time.perf_counter()
        try:
            if self._queue:
                return self._gather_in_turns(workers, deadline)
            # whoever shares our core first: it runs when we sleep, and never while we spin
            first = workers[0] if workers else None
            if isinstance(first, ProcessWorker) and first.with_caller and not self._sleep_for(first, deadline):
                return [late for late in workers if late.owes and not late.receive()]
            last = workers[-1] if workers else None
            if isinstance(last, ProcessWorker) and last.asked and not self._options.caller_spin:
                last.wait(None if deadline is None else deadline - time.monotonic())
                expected = encode(_PLAIN, last.asked[-1].seq) if last.asked else b""
                for worker in reversed(workers):
                    if worker.rung and not worker.local:
                        worker.take_plain(expected)
            for worker in reversed(workers):
                while worker.asked and not worker.local:
                    if not self._wait_for(worker, deadline):
                        return [late for late in workers if late.owes and not late.receive()]
        finally:
            self.time_waiting += time.perf_counter() - began
        return []

    def _wait_for(self, worker: ProcessWorker, deadline: float | None) -> bool:
        """One attempt at an answer; false when the time was up."""
        self._patience.spin(worker.channel.poll)
        return worker.receive() or worker.wait(None if deadline is None else deadline - time.monotonic())

    def _sleep_for(self, worker: ProcessWorker, deadline: float | None) -> bool:
        while worker.asked:
            if not worker.wait(None if deadline is None else deadline - time.monotonic()):
                return False
            worker.receive()
        return True

    def _gather_in_turns(self, workers: Sequence[AnyWorker], deadline: float | None) -> list[AnyWorker]:
        """As :meth:`gather`, when some of ``workers`` may be asked only after others have answered."""
        while self._queue or any(worker.owes for worker in workers):
            self._post_queued()
            nobody = not any(worker.owes for worker in self.workers)  # all that were asked have died
            if not nobody and not self._take_in(None if deadline is None else deadline - time.monotonic()):
                waiting = {id(worker) for worker, _ in self._queue}
                return [late for late in workers if late.owes or id(late) in waiting]
        return []

    def gather_any(self, deadline: float | None) -> bool:
        """Take in whatever has been answered, waiting for at least one answer; false when the time was up.

        The caller steps its own share when nobody else has an answer, and in its turn where there always is one.
        """
        while True:
            self._post_queued()
            own = next((worker for worker in self.workers if worker.local and worker.owes), None)
            if own is not None and (self._seq - own.asked[0].seq) % 0xFFFFFFFF > len(self.workers):
                own.receive()
            if any(worker.replies for worker in self.workers):
                return True
            if own is not None:
                if not self._take_in(0.0):
                    own.receive()
                continue
            left = None if deadline is None else deadline - time.monotonic()
            if not any(worker.owes for worker in self.workers) or not self._take_in(left):
                return False

    def _take_in(self, timeout: float | None) -> bool:
        """Take in all there is to read, from whoever wrote it, after waiting for somebody; false when the time was up."""
        if self._any is None:
            self._any = select.poll()
            for worker in self.workers:
                self._add_to_any(worker)
            for descriptor in self._watch.descriptors():
                self._any.register(descriptor, select.POLLIN)
        began = time.perf_counter()
        events = self._any.poll(None if timeout is None else max(timeout, 0.0) * 1000)
        self.time_waiting += time.perf_counter() - began
        died = False
        for descriptor, _ in events:
            writer = self._writers.get(descriptor)
            if writer is None or writer.death is not None:
                died = True
                continue
            while writer.receive() and writer.asked:
                pass
        if died:
            for worker in self._watch.dead():
                if not worker.receive():
                    worker.bury()
            for worker in self.workers:
                if worker.death is not None:
                    self._drop_from_any(worker)
        return bool(events)

    def _add_to_any(self, worker: AnyWorker) -> None:
        if self._any is not None and isinstance(worker, ProcessWorker) and worker.death is None:
            self._any.register(worker.channel.fd, select.POLLIN)
            self._writers[worker.channel.fd] = worker

    def _drop_from_any(self, worker: AnyWorker) -> None:
        if self._any is not None and isinstance(worker, ProcessWorker) and self._writers.get(worker.channel.fd) is worker:
            del self._writers[worker.channel.fd]
            with contextlib.suppress(KeyError, OSError, ValueError):
                self._any.unregister(worker.channel.fd)

    # -- ending -----------------------------------------------------------------------------------------------------

    def close(self, timeout: float, *, terminate: bool) -> None:
        """End all workers within about ``timeout`` seconds: ask, then SIGTERM, then SIGKILL for the whole group."""
        if self.abandoned:
            return
        self._queue.clear()
        processes = [worker for worker in self.workers if isinstance(worker, ProcessWorker)]
        self._end(processes, timeout, terminate)
        for worker in self.workers:
            if isinstance(worker, CallerWorker):
                self.failures_in_close += [(failure, worker) for failure in worker.close().failures]
        self._watch.close()
        self._lifeline.close()
        self._arena.close()
        self._any = None
        self._writers.clear()
        _pools.discard(self)

    def _end(self, workers: Sequence[ProcessWorker], timeout: float, terminate: bool) -> None:
        deadline = time.monotonic() + timeout
        alive = [worker for worker in workers if worker.death is None]
        if terminate:
            for worker in alive:
                worker.signal(signal.SIGTERM)
            deadline = time.monotonic() + _TERM_GRACE
        else:
            for worker in alive:
                with contextlib.suppress(ChannelClosed):
                    worker.channel.send(Op.CLOSE, _CLOSING)  # heard after what it is busy with
        patient = [worker for worker in alive if not worker.is_stopped()]
        self._wait_for_ends(patient, deadline)
        if not terminate:
            late = [worker for worker in alive if not _ended(worker)]
            for worker in late:
                worker.signal(signal.SIGTERM)
            self._wait_for_ends([w for w in late if not w.is_stopped()], time.monotonic() + _TERM_GRACE)
        for worker in alive:
            if not _ended(worker):
                worker.signal(signal.SIGKILL)
        self._wait_for_ends(alive, time.monotonic() + 5.0)
        end_group(worker.pid for worker in alive)
        for worker in workers:
            worker.release()

    def _wait_for_ends(self, workers: Iterable[ProcessWorker], deadline: float) -> None:
        for worker in workers:
            poll = select.poll()
            poll.register(worker.descriptor, select.POLLIN)
            poll.register(worker.channel.fd, select.POLLIN)
            while not _ended(worker) and (left := deadline - time.monotonic()) > 0:
                for descriptor, _ in poll.poll(left * 1000):
                    if descriptor == worker.channel.fd and not self._drain(worker):
                        poll.unregister(worker.channel.fd)
            self._drain(worker)

    def _drain(self, worker: ProcessWorker) -> bool:
        """Take in what a worker that is ending still says: with a large answer in the pipe it could not end."""
        try:
            while (message := worker.channel.receive()) is not None:
                self._hear_of_closing(worker, message)
        except ChannelClosed:
            return False
        return True

    def _hear_of_closing(self, worker: ProcessWorker, message: Message) -> None:
        word, seq, payload = message
        if word == Reply.FULL and seq == _CLOSING and payload is not None:
            self.failures_in_close += [(failure, worker) for failure in load(payload).failures]

    def abandon(self) -> None:
        """In a forked child: close the copies of what is the caller's alone."""
        self.abandoned = True
        for channel in list(self._channels):
            channel.close()
        self._lifeline.let_go()

    def __repr__(self) -> str:
        return f"WorkerPool({self.workers})"


def _ended(worker: ProcessWorker) -> bool:
    poll = select.poll()
    poll.register(worker.descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _preload(context: Any) -> None:
    """Let a fork server that is not running yet import the engine once, and not every worker anew."""
    if context.get_start_method() != "forkserver":
        return
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    with contextlib.suppress(AttributeError):  # private names: without them it only starts more slowly
        if server._forkserver_pid is None and server._preload_modules == ["__main__"]:
            context.set_forkserver_preload(["__main__", "vecenv.worker"])


def dump_env_fn(env: int, env_fn: Callable[[], Any], who_needs_it: str) -> bytes:
    """Pickle what builds an environment; a note on the error says which one could not be."""
    try:
        blob: bytes = cloudpickle.dumps(env_fn)
        return blob
    except Exception as error:
        error.add_note(f"env_fns[{env}] ({env_fn!r}) cannot be pickled, which {who_needs_it}")
        raise


def _require_descriptors(workers: int) -> None:
    """Refuse at once what would fail half-way: CPython itself loses descriptors when it meets the limit in a start."""
    with contextlib.suppress(FileNotFoundError):
        free = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))
        if free < _DESCRIPTORS * workers + _SPARE_DESCRIPTORS:
            raise _too_few_descriptors(OSError(errno.EMFILE, ""), workers)


def _too_few_descriptors(error: OSError, workers: int) -> OSError:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    need = _DESCRIPTORS * workers + _SPARE_DESCRIPTORS
    return OSError(
        error.errno,
        f"{os.strerror(error.errno or 0)}: {workers} workers need {need} more open files, and RLIMIT_NOFILE is {soft}; "
        "raise it (ulimit -n), or use fewer workers (num_workers=)",
    )


def _advice_for_start(context: Any) -> str:
    if context.get_start_method() == "fork" or not getattr(sys.modules.get("__main__"), "__file__", None):
        return ""
    return (
        f"\n(under {context.get_start_method()} the main script is imported again in every worker: its body has to be "
        "guarded by `if __name__ == '__main__':`)"
    )


def refuse_to_start_while_importing_main() -> None:
    """In a worker that is importing an unguarded main script again: one sentence instead of a page of tracebacks."""
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):
        if process.name.endswith("-0"):
            print(
                "vecenv: this script builds environments while a worker imports it again; guard its body with "
                "`if __name__ == '__main__':`",
                file=sys.stderr,
                flush=True,
            )
        os._exit(1)


def _advice_for_fork(context: Any) -> str:
    import threading

    if context.get_start_method() != "fork" or threading.active_count() < 2:
        return ""
    return (
        f"\n({threading.active_count()} threads were running when it was forked; a lock that one of them held is held for "
        "ever in the child: use context='forkserver')"
    )
