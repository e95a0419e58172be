"""Workers and the pool of them: start, post, gather, replace, close.

All mutable state of the pool is the list ``workers``, and of each worker two queues: ``asked`` (messages without an answer
yet) and ``replies`` (answers nobody has fetched yet). A worker that died says so through ``death``; everything it had been
asked is lost and answered by that. The caller's own share of the environments is a worker like the others
(:class:`CallerWorker`): it answers when somebody waits for it.

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
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import cloudpickle
from gymnasium.vector.utils import clear_mpi_env_vars

from vecenv.channel import Channel, ChannelClosed, Message
from vecenv.cores import SPIN_SECONDS, Patience, Seat
from vecenv.errors import EnvError, StartupTimeout, WorkerDied
from vecenv.failure import BlackBox, DeathWatch, Lifeline, describe_exit, end_group, innermost, summary, unpack
from vecenv.protocol import Op, Reply, encode
from vecenv.rows import EnvRows, Failure, Outcome
from vecenv.shm import Arena, Batch
from vecenv.wire import load
from vecenv.worker import Plan, Ready, Start, answer, main

if sys.platform != "win32":
    import resource

__all__ = ["Answer", "AnyWorker", "CallerWorker", "ProcessWorker", "Request", "WorkerPool"]

_CLOSING: Final = 0  # the sequence number of the last message; all others are above 0
_PLAIN: Final = int(Reply.PLAIN)
_TERM_GRACE: Final = 0.25  # between SIGTERM and SIGKILL
_DESCRIPTORS: Final = 6  # a worker costs the caller: two pipes, black box, pidfd, sentinel and, under fork, one more
_SPARE_DESCRIPTORS: Final = 16  # for the length of a start
_LAST_MOMENTS: Final = 0.5  # between the end of a worker's pipe and the end of its process
_REAP: Final = 0.5  # for the exit code of a process that has ended
_COMMANDS: Final = {
    Op.STEP: "step", Op.STEP_SOME: "step", Op.RESET: "reset", Op.RESET_SOME: "reset", Op.REBUILD_SOME: "reset",
    Op.CALL: "call", Op.SET_ATTR: "set_attr", Op.EXEC: "exec_func", Op.CLOSE: "close",
}  # fmt: skip


@dataclass(slots=True)
class Request:
    """A message on its way: which rows it is about, for the worker that gets it."""

    seq: int
    op: Op
    rows: Sequence[int]
    payload: Any = None


@dataclass(slots=True)
class Answer:
    """The answer to one request. ``outcome`` is ``None`` for a plain one; ``death`` says that there will never be one."""

    request: Request
    columns: bool = False
    outcome: Outcome | None = None
    death: WorkerDied | None = None


class _Desk:
    """What both kinds of worker have: their rows, and the two queues."""

    def __init__(self, index: int, rows: range) -> None:
        self.index = index
        self.rows = rows
        self.asked: deque[Request] = deque()
        self.replies: deque[Answer] = deque()
        self.death: WorkerDied | None = None

    @property
    def rung(self) -> bool:
        """Whether all that is asked is one plain step."""
        return False

    @property
    def owes(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self.asked)


class _Interrupted(EnvError):
    """Ctrl-C came while the caller was stepping its own share."""


class CallerWorker(_Desk):
    """The caller's own share: its environments live in this process and step when somebody waits for them."""

    local: Literal[True] = True
    exitcode: int | None = None

    def __init__(self, index: int, rows: range, env_rows: EnvRows) -> None:
        super().__init__(index, rows)
        self._rows = env_rows
        self.pid = os.getpid()
        self.overdue = False

    def __repr__(self) -> str:
        return f"CallerWorker(envs={_span(self.rows)}, asked={len(self.asked)})"

    def post(self, request: Request) -> None:
        if request.op in (Op.STEP, Op.STEP_SOME):  # an environment may keep its action and write into it
            request.payload = deepcopy(request.payload)
        self.asked.append(request)

    def receive(self) -> bool:
        """Carry out the oldest request now."""
        if not self.asked:
            return False
        request = self.asked.popleft()
        try:
            outcome = answer(self._rows, request.op, request.seq, lambda: request.payload)
        except KeyboardInterrupt as error:  # in the middle of somebody's step: nobody knows how far it got
            failures = [Failure(row, _Interrupted(f"interrupted: {error!r}")) for row in request.rows]
            self.replies.append(Answer(request, True, Outcome(failures=failures)))
            raise
        plain = outcome.is_plain()
        self.replies.append(Answer(request, outcome.columns or not plain, None if plain else outcome))
        return True

    def close(self) -> Outcome:
        return self._rows.close()


class ProcessWorker(_Desk):
    """A worker process, seen from the caller."""

    local: Literal[False] = False

    def __init__(
        self,
        index: int,
        rows: range,
        process: Any,
        channel: Channel,
        black_box: BlackBox,
        watch: DeathWatch,
        with_caller: bool = False,
    ) -> None:
        super().__init__(index, rows)
        self.process = process
        self.channel = channel
        self.black_box = black_box
        self.pid: int = process.pid
        self.exitcode: int | None = None
        self.overdue = False  # an answer did not come in time; close() is less patient then
        self.with_caller = with_caller
        self._step = Answer(Request(0, Op.STEP, rows))  # the plain step and its plain answer, used again and again
        self._watch = watch
        self.descriptor = watch.add(self.pid, process.sentinel, self)
        self._poll = select.poll()
        self._poll.register(channel.fd, select.POLLIN)
        self._poll.register(self.descriptor, select.POLLIN)

    def __repr__(self) -> str:
        state = "dead" if self.death else "busy" if self.asked else "idle"
        return f"ProcessWorker({self.index}, envs={_span(self.rows)}, pid={self.pid}, {state})"

    def post(self, request: Request) -> None:
        """Send a request. To a dead worker it is answered at once, by its death."""
        if self.death is None:
            payload = None
            if request.payload is not None:
                try:
                    payload = pickle.dumps(request.payload, pickle.HIGHEST_PROTOCOL)
                except Exception:
                    payload = cloudpickle.dumps(request.payload)
            try:
                self.channel.send(request.op, request.seq, payload)
            except ChannelClosed:
                self.bury()
        request.payload = None
        self.asked.append(request)
        if self.death is not None:
            self._lose_all()

    @property
    def rung(self) -> bool:
        return len(self.asked) == 1 and self.asked[0] is self._step.request

    def take_plain(self, expected: bytes) -> None:
        """Take in the plain answer to :meth:`ring` if it is there; anything else is left to :meth:`receive`."""
        try:
            if self.channel.take(expected):
                self.asked.clear()
                self.replies.append(self._step)
        except ChannelClosed:
            self.bury()

    def ring(self, data: bytes, seq: int) -> None:
        """Ask for a step of all rows with actions in shared memory: nothing but ``data``, the encoded message."""
        if self.death is None:
            self._step.request.seq = seq
            try:
                self.channel.ring(data)
                self.asked.append(self._step.request)
            except ChannelClosed:
                self.bury()
        if self.death is not None:
            self.replies.append(Answer(self._step.request, death=self.death))

    def receive(self) -> bool:
        """Take in one reply if it is there; true if there was one, or if the worker turned out to be dead."""
        if self.death is not None:
            return False
        try:
            message = self.channel.receive()
        except ChannelClosed:
            self.bury()
            return True
        if message is None:
            return False
        self._take(message)
        return True

    def _take(self, message: Message) -> None:
        word, seq, payload = message
        if not self.asked or self.asked[0].seq != seq:
            return  # the answer to a question that was given up; never given to another one
        request = self.asked.popleft()
        if word == _PLAIN and request is self._step.request:
            self.replies.append(self._step)
            return
        outcome = None if payload is None else load(payload)
        self.replies.append(Answer(request, word != Reply.PLAIN, outcome))

    def wait(self, timeout: float | None) -> bool:
        """Sleep until there is something to receive or the worker has ended; false when the time is up."""
        events = self._poll.poll(None if timeout is None else max(timeout, 0.0) * 1000)
        if not events:
            return False
        ended = all(descriptor == self.descriptor for descriptor, _ in events)
        if ended and not self.receive():  # and nothing in the pipe: what it wrote before it ended has been taken in
            self.bury()
        return True

    def bury(self, reason: str = "") -> None:
        """Find out how the worker ended; everything it was asked is lost."""
        if self.death is not None:
            return
        command = _COMMANDS[self.asked[0].op] if self.asked else "idle"
        if not self._watch_says_dead():  # whatever it is that has no pipe any more, it is no worker
            self.signal(signal.SIGKILL)
            reason = reason or "it closed its pipe, and was ended for that"
        self.exitcode = self._reap()
        stack = innermost(self.black_box.read()) if (self.exitcode or 0) < 0 else ""
        where = f"worker {self.index} (pid {self.pid}, {_envs(self.rows)})"
        doing = "while idle" if command == "idle" else f"during {command}"
        text = f"{where} died {doing}: {reason or describe_exit(self.exitcode)}"
        if stack:
            text += f"\nits last Python stack:\n{stack}"
        self.death = WorkerDied(
            text, worker=self.index, envs=list(self.rows), pid=self.pid, exitcode=self.exitcode, command=command
        )
        self._lose_all()
        end_group([self.pid])
        self._watch.remove(self.descriptor)
        self.channel.close()

    def _watch_says_dead(self) -> bool:
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(_LAST_MOMENTS * 1000))

    def _lose_all(self) -> None:
        while self.asked:
            self.replies.append(Answer(self.asked.popleft(), death=self.death))

    def _reap(self) -> int | None:
        """The exit code: never by join(), which a forked helper that holds the sentinel can delay."""
        deadline = time.monotonic() + _REAP
        while time.monotonic() < deadline:
            code: int | None = self.process.exitcode
            if code is not None:
                return code
            time.sleep(0.001)
        return None

    def stack(self) -> str:
        """The Python stack of a worker that is late, from its black box; empty if it cannot be had."""
        before = self.black_box.size()
        self.signal(signal.SIGUSR1)
        deadline = time.monotonic() + 0.05
        while time.monotonic() < deadline and self.black_box.size() == before:
            time.sleep(0.002)
        time.sleep(0.002)
        return innermost(self.black_box.read(before))

    def signal(self, number: int) -> None:
        """Send a signal to the worker process."""
        self._watch.signal(self.descriptor, self.pid, number)

    def is_stopped(self) -> bool:
        """Whether somebody stopped the process (SIGSTOP); only known on Linux."""
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{self.pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in ("T", "t")
        return False

    def release(self) -> None:
        """Close everything the caller holds of an ended worker."""
        if self.death is None:
            self._watch.remove(self.descriptor)
        self.channel.close()
        self.black_box.close()
        if self.exitcode is None:
            self.exitcode = self._reap()
        with contextlib.suppress(ValueError, AttributeError):
            self.process.close()


AnyWorker: TypeAlias = CallerWorker | ProcessWorker


def _envs(rows: range) -> str:
    return f"env {rows[0]}" if len(rows) == 1 else f"envs {_span(rows)}"


def _span(rows: range) -> str:
    return f"{rows[0]}-{rows[-1]}" if len(rows) > 1 else f"{rows[0]}" if len(rows) else "none"


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
        caller_spins: The caller may poll for a moment before it sleeps.
    """

    context: Any
    daemon: bool
    name: str
    start_timeout: float
    max_busy: int | None = None
    caller_spins: bool = False
    seats: list[Seat] = field(default_factory=list)


class WorkerPool:
    """The workers of one vector environment."""

    def __init__(self, plan: Plan, arena: Arena, batch: Batch, options: PoolOptions) -> None:
        self.workers: list[AnyWorker] = []
        self.abandoned = False
        self.failures_in_close: list[tuple[Failure, AnyWorker]] = []
        self.time_waiting = 0.0
        self._plan = plan
        self._arena = arena
        self.batch = batch
        self._options = options
        self._lifeline = Lifeline()
        self._watch = DeathWatch()
        self._env_fns: dict[int, Sequence[Any]] = {}
        self._channels: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._queue: deque[tuple[ProcessWorker, Request]] = deque()
        self._patience = Patience(SPIN_SECONDS if options.caller_spins else 0.0)
        self._seq = 0
        self._any: select.epoll | select.poll | None = None
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
        blobs = env_fns if forks else [_dump_env_fn(row, fn) for row, fn in zip(rows, env_fns, strict=True)]
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
                    f"worker {worker.index} (pid {worker.pid}, {_envs(worker.rows)}) was not ready within "
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
            busy = sum(1 for other in self.workers if not other.local and other.owes)
            if busy >= self._options.max_busy:
                self._queue.append((worker, request))
                return
        worker.post(request)

    def ring(self, seq: int) -> None:
        """Post a step of all rows, with actions in shared memory, to every worker."""
        if self._options.max_busy is not None:
            for worker in self.workers:
                self.post(worker, Request(seq, Op.STEP, worker.rows))
            return
        data = encode(Op.STEP, seq)
        for worker in self.workers:
            if isinstance(worker, ProcessWorker):
                worker.ring(data, seq)
            else:
                worker.post(Request(seq, Op.STEP, worker.rows))

    def _post_queued(self) -> None:
        while self._queue:
            busy = sum(1 for other in self.workers if not other.local and other.owes)
            if busy >= (self._options.max_busy or len(self.workers)):
                return
            worker, request = self._queue.popleft()
            worker.post(request)

    def gather(self, workers: Sequence[AnyWorker], deadline: float | None) -> list[AnyWorker]:
        """Wait until each of ``workers`` has answered; returns those that had not when the time was up."""
        for worker in workers:
            if worker.local:
                while worker.owes:
                    worker.receive()
        began = time.perf_counter()
        try:
            if self._queue:
                return self._gather_in_turns(workers, deadline)
            # whoever shares our core first: it runs when we sleep, and never while we spin
            first = workers[0] if workers else None
            if isinstance(first, ProcessWorker) and first.with_caller and not self._sleep_for(first, deadline):
                return [late for late in workers if late.owes and not late.receive()]
            last = workers[-1] if workers else None
            if isinstance(last, ProcessWorker) and last.asked and not self._options.caller_spins:
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
            owed = sum(len(worker.asked) for worker in workers)
            self._take_in_all()
            progress = sum(len(worker.asked) for worker in workers) < owed
            self._post_queued()
            if not progress and not self._sleep_for_any(None if deadline is None else deadline - time.monotonic()):
                waiting = {id(worker) for worker, _ in self._queue}
                return [late for late in workers if late.owes or id(late) in waiting]
        return []

    def gather_any(self, deadline: float | None) -> bool:
        """Take in whatever has been answered, waiting for at least one answer; false when the time was up."""
        while True:
            self._take_in_all()
            if any(worker.replies for worker in self.workers):
                return True
            local = next((worker for worker in self.workers if worker.local and worker.owes), None)
            if local is not None:
                local.receive()
                return True
            if not any(worker.owes for worker in self.workers):
                return False
            if not self._sleep_for_any(None if deadline is None else deadline - time.monotonic()):
                return False

    def _take_in_all(self) -> None:
        for worker in self.workers:
            while worker.asked and not worker.local and worker.receive():
                pass

    def _sleep_for_any(self, timeout: float | None) -> bool:
        if self._any is None:
            self._any = select.poll()
            for worker in self.workers:
                self._add_to_any(worker)
            for descriptor in self._watch.descriptors():
                self._any.register(descriptor, select.POLLIN)
        began = time.perf_counter()
        events = self._any.poll(None if timeout is None else max(timeout, 0.0) * 1000)
        self.time_waiting += time.perf_counter() - began
        if not events:
            return False
        for worker in self._watch.dead():
            if not worker.receive():
                worker.bury()
        for worker in self.workers:
            if worker.death is not None:
                self._drop_from_any(worker)
        return True

    def _add_to_any(self, worker: AnyWorker) -> None:
        if self._any is not None and isinstance(worker, ProcessWorker) and worker.death is None:
            self._any.register(worker.channel.fd, select.POLLIN)

    def _drop_from_any(self, worker: AnyWorker) -> None:
        if self._any is not None and isinstance(worker, ProcessWorker):
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


def _dump_env_fn(env: int, env_fn: Callable[[], Any]) -> bytes:
    try:
        blob: bytes = cloudpickle.dumps(env_fn)
        return blob
    except Exception as error:
        error.add_note(f"env_fns[{env}] ({env_fn!r}) cannot be pickled, which the start method of its worker needs")
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


def raise_ready(error: Any, note: str) -> Exception:
    """The exception of a failure, whichever way it came, with its note.

    One that is no ``Exception`` (``sys.exit`` in an environment of the caller's own share) gets a stand-in.
    """
    if not isinstance(error, BaseException):
        return unpack(error, note)
    if isinstance(error, Exception):
        error.add_note(note)
        return error
    stand_in = EnvError(f"{note}: {summary(error)}")
    stand_in.__cause__ = error
    return stand_in
