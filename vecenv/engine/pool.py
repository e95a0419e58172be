"""The pool of workers: it sends requests to them and waits for their answers.

A call is made by putting a request into the table (:mod:`vecenv.engine.pending`). The table records how many bytes of each
message each write took. So a wait sends what is not sent yet: after an interruption, or where a pipe was full or enough
workers were busy, the next wait goes on where sending stopped.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import deepcopy
from itertools import repeat
from os import write
from typing import Any, Final

from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector.utils import clear_mpi_env_vars

from vecenv.engine.handles import (
    CallerWorker,
    PoolOptions,
    ProcessWorker,
    await_ready,
    command_of,
    end,
    end_unclosed,
    preload,
    require_descriptors,
    too_few_descriptors,
)
from vecenv.engine.pending import COMMANDS, PendingRequests, Request, Worker, WorkerRequest
from vecenv.front.arguments import deadline_of, milliseconds
from vecenv.front.driver import left_in_a_fork
from vecenv.link.channel import CallerEnd
from vecenv.link.messages import Failure, Op, PackedEnvFns, Reply, dumps, dumps_by_value, encode, pack_head
from vecenv.shm import Arena, Batch
from vecenv.system.cores import Placement, SpinPolicy
from vecenv.system.descendants import end_marked, new_token
from vecenv.system.descriptors import DescriptorOwner
from vecenv.system.generators import stream_of_caller
from vecenv.system.spawning import Lifeline, spawn
from vecenv.system.supervision import SLICE_MS, BlackBox, close_process, place
from vecenv.system.uninterrupted import Uninterrupted
from vecenv.worker.envs import WorkerPlan
from vecenv.worker.main import Ready, Start, main

_SEEN_OFF_TOGETHER: Final = 16  # to look for what environments started takes as long for one worker as for many

HEAD_START: Final = 20.0
"""Milliseconds without progress in which a worker may take in a message longer than its pipe."""


def _split(request: Request) -> None:
    """Give a request that was sent to some workers only a part for each: the rest is sent one by one."""
    parts: dict[int, WorkerRequest] = {}
    sent = iter(request.sent)
    for worker in request.workers:
        part = parts[worker.index] = WorkerRequest(worker, worker.rows, Op.STEP)
        if not worker.local:
            part.data = request.data
            with contextlib.suppress(StopIteration):
                part.written.append(next(sent))
    request.parts = parts


_REPORT_AFTER: Final = [60.0, 600.0]
"""Seconds after which a request is told of, once each."""
_LOOK_EVERY: Final = [5.0]
"""Seconds between two looks at the workers."""

_log = logging.getLogger("vecenv")
_DOING: Final = {"step": "stepping", "reset": "resetting"}


class Watchdog:
    """Reports by :mod:`logging`, as the logger ``vecenv``, that a worker has been at one request for long.

    Without a timeout a wait may never end. There is no thread for this: the process that waits looks now and then at what
    each worker is busy with, and reports what it finds twice. So a step costs nothing, and a program that waits for nothing
    gets no report.

    Attributes:
        bounded: Commands that have a timeout of their own, ``step_timeout``, and are not told of.
        next_look: By ``time.perf_counter()``.
        longest: Milliseconds to sleep at most before the next look.
    """

    def __init__(self) -> None:
        self.bounded: Iterable[str] = ()
        self.next_look = 0.0
        self.longest = _LOOK_EVERY[0] * 1000
        self._seen: dict[tuple[int, int], tuple[float, int]] = {}  # (worker, request) -> when it was first seen, times told

    def milliseconds(self, deadline: float) -> float:
        """How long to sleep at most before the next look, and not beyond ``deadline`` (``time.monotonic()``)."""
        return min(self.longest, max(deadline - time.monotonic(), 0.0) * 1000)

    def look(self, table: PendingRequests, processes: Sequence[ProcessWorker]) -> None:
        """Look at what each worker is busy with, once its pipe is empty; tell what has taken too long."""
        now = time.perf_counter()
        self.next_look = now + _LOOK_EVERY[0]
        seen, self._seen = self._seen, {}
        for worker in processes:
            while worker.death is None and worker.receive():
                pass
            request = table.oldest_of(worker)
            if worker.death is not None or request is None:
                continue
            if request.parts is not None and not request.parts[worker.index].sent:  # it waits for its turn
                continue
            began, reported = seen.get((worker.index, request.seq), (now, 0))
            late = reported < len(_REPORT_AFTER) and now - began >= _REPORT_AFTER[reported]
            self._seen[worker.index, request.seq] = began, reported + late
            command = command_of(request, worker)
            if late and command not in self.bounded:
                self._report(worker, list(request.rows_of(worker)), command, now - began)

    def _report(self, worker: ProcessWorker, rows: list[int], command: str, seconds: float) -> None:
        several = ", ".join(map(str, rows[:8])) + ", ..." * (len(rows) > 8)
        envs = f"env {rows[0]} has" if len(rows) == 1 else f"envs {several} have"
        where = f", at {found}" if (found := place(worker.stack())) else ", stopped by SIGSTOP" * worker.is_stopped()
        way_out = f"; {way}" if (way := _way_out(command)) else ""
        doing = _DOING.get(command, f"busy with {command}")
        _log.warning("%s been %s for %.0f s%s (%s)%s", envs, doing, seconds, where, worker.label, way_out)


def _way_out(command: str) -> Any:
    if command in _DOING:
        return "step_timeout= ends it"
    return "call_wait(timeout=) stops waiting" if command == "call" else ""


_STEP: Final = int(Op.STEP)  # packing an enum takes longer
_PLAIN: Final = int(Reply.PLAIN)


class WorkerPool:
    """The workers of one vector environment.

    Args:
        plan: What every worker is told alike.
        arena: The shared block.
        batch: Views of it.
        options: How to run workers.
        table: The table of pending requests.

    Attributes:
        behind: Something in the table may not have been sent yet.
        holdings: Owns all descriptors.
        channels: Those of all workers and copies, to be closed in a forked child.
        started: Every process that was started and not seen to its end: they are ended with the pool.
    """

    _worker_class: type[ProcessWorker] = ProcessWorker
    # Here, and not in `__init__`: CPython looks attributes up faster in objects that have at most 30 of their own.
    abandoned = closing = released = False
    replaced = 0  # how many workers were

    def __init__(self, plan: WorkerPlan, arena: Arena, batch: Batch, options: PoolOptions, table: PendingRequests) -> None:
        self.workers: tuple[Worker, ...] = ()
        self.failures_in_close: list[tuple[Failure, Worker]] = []
        self.time_waiting = 0.0
        self._leaving: list[ProcessWorker] = []  # their places are taken, and they are about to end
        self.batch = batch
        self._num_rows = len(batch.rewards)
        self.table = table
        self._options = options
        self._plan = plan
        self._arena: Arena | None = arena
        self.holdings = DescriptorOwner(self)
        self._lifeline = Lifeline(self.holdings)
        self.started: list[Any] = []
        self._lives: Counter[int] = Counter()  # how many processes were started for each index
        self.channels: weakref.WeakSet[CallerEnd] = weakref.WeakSet()
        self._finalizer = weakref.finalize(self, end_unclosed, self._lifeline, self.started, os.getpid())
        self._env_fns: dict[int, Sequence[Any]] = {}
        shares_core = any(placement.with_caller for placement in options.placements)
        self._spin = SpinPolicy(options.caller_spin, batch.no_spin_until, shares=shares_core)
        self._seq = 0
        self._prepared = Request(0, "step", ())  # the next step, unless something else is asked first
        self.behind = False
        self._max_busy = options.max_busy
        self._outs: tuple[int, ...] = ()
        self.watchdog = Watchdog()
        self._any: select.poll | None = None
        self._writers: dict[int, ProcessWorker] = {}  # by the descriptors that are polled for any of them
        self.set_workers([])
        left_in_a_fork.add(self)

    def set_workers(self, workers: Sequence[Worker]) -> None:
        """These are the workers now. The last store says it: before it, :meth:`all_workers` are those that were."""
        self.processes = tuple(worker for worker in workers if isinstance(worker, ProcessWorker))
        self.own = next((worker for worker in workers if isinstance(worker, CallerWorker)), None)
        self._asks = any(worker.watch.asks for worker in self.processes)  # whether they have ended, while it waits
        self._outs = tuple(worker.channel.out for worker in self.processes)
        self._forget_any()
        self.workers = tuple(workers)

    def all_workers(self) -> Sequence[Worker]:
        """Every worker, also one that has no row."""
        return self.workers

    def _all_processes(self) -> list[ProcessWorker]:
        return [worker for worker in self.all_workers() if isinstance(worker, ProcessWorker)]

    # -- starting ---------------------------------------------------------------------------------------------------

    def start(self, shares: Sequence[tuple[range, Sequence[Any]]]) -> tuple[list[ProcessWorker], list[Ready]]:
        """Start one process a share, all at once, then wait until every one has built its environments.

        Args:
            shares: (rows, env_fns) of every process.

        Raises:
            StartupTimeout, WorkerDied, OSError: And nothing is left running.
        """
        require_descriptors(len(shares))
        preload(self._options.context)
        started: list[ProcessWorker] = []
        deadline = deadline_of(self._options.start_timeout)
        try:
            with clear_mpi_env_vars():
                for index, (rows, env_fns) in enumerate(shares):
                    self._env_fns[index] = env_fns
                    self._launch(index, rows, env_fns, len(shares), started)
            readies = [await_ready(worker, deadline, self._options) for worker in started]
        except BaseException:
            self._see_off(started, 0.0, terminate=True)
            raise
        return started, readies

    def replace(self, worker: ProcessWorker) -> Ready:
        """Start a new process in the place of a dead one: same index, same rows, its environments built anew.

        Until the new one is there the dead one keeps its place, so that the next call tries again.
        """
        started: list[ProcessWorker] = []
        try:
            self.launch_again(worker, started)
            ready = await_ready(started[0], deadline_of(self._options.start_timeout), self._options)
            self.set_workers([started[0] if other is worker else other for other in self.all_workers()])
        except BaseException:
            if not started or started[0] not in self.all_workers():
                self._see_off(started, 0.0, terminate=True)
                self.set_workers(self.all_workers())
            raise
        self.replaced += 1
        return ready

    def launch_again(self, worker: ProcessWorker, into: list[ProcessWorker]) -> None:
        """Start a new process for the rows of a dead one, and add it to ``into``, without waiting for it."""
        worker.release()
        self._forget_process(worker.process)
        end_marked([worker.token])
        with clear_mpi_env_vars():
            self._launch(worker.index, worker.rows, self._env_fns[worker.index], 1, into)

    def _launch(self, index: int, rows: range, env_fns: Sequence[Any], workers: int, into: list[ProcessWorker]) -> None:
        """Start the process of one worker, and add it to ``into``.

        Raises:
            OSError: No process or too few descriptors.
            Exception: An ``env_fn`` cannot be pickled.
        """
        options = self._options
        forks = options.context.get_start_method() == "fork"
        why = "the start method of its worker needs"
        functions = env_fns if forks else PackedEnvFns.of(rows, env_fns, why)
        placement = self.placement_of(index)
        variables = options.variables[index] if options.variables else {}
        life = self._lives[index]
        self._lives[index] += 1
        held = self.holdings.child()
        known = len(self.started)
        try:
            channel = CallerEnd(held)
            self.channels.add(channel)
            black_box = BlackBox(held)
            token = new_token()
            assert self._arena is not None
            start = Start(
                index, rows[0], functions, self._plan, self._arena, channel.theirs, black_box, placement,
                stream_of_caller(), life,
            )  # fmt: skip
            with Uninterrupted():  # half-way it belongs to no one place
                process = spawn(
                    options.context, main, (start,), name=self.name_of(index), daemon=options.daemon,
                    lifeline=self._lifeline, token=token, variables=variables, into=self.started,
                )  # fmt: skip
                worker = self._worker_class(
                    index, rows, process, channel, black_box, held, self.table, token, placement.with_caller
                )  # fmt: skip
                into.append(worker)
            channel.started()
        except BaseException as error:
            if not any(worker.held is held for worker in into):
                held.close()
                for stray in self.started[known:]:
                    self._end_stray(stray)
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise too_few_descriptors(error, workers) from error
            raise

    def _forget_process(self, process: Any) -> None:
        """One was seen to its end."""
        with contextlib.suppress(ValueError):  # by the call before this one, which was interrupted
            self.started.remove(process)

    def _end_stray(self, process: Any) -> None:
        """End a process whose start was cut short, and which is no worker's therefore."""
        with contextlib.suppress(ValueError, AttributeError, AssertionError):  # it was not started
            process.kill()
            process.join()
        close_process(process)
        self._forget_process(process)

    # -- copies of workers (:mod:`vecenv.engine.frozen`) ------------------------------------------------------------

    def placement_of(self, index: int) -> Placement:
        """Where a worker sits."""
        placements = self._options.placements
        return placements[index] if index < len(placements) else Placement()

    def name_of(self, index: int) -> str:
        """What the process of a worker is called."""
        return f"Worker<{self._options.name}>-{index}"

    def take_over(self, new: Sequence[ProcessWorker]) -> None:
        """Put workers that run in the places of those with the same rows, which close their environments meanwhile."""
        of_index = {worker.index: worker for worker in new}
        old = [worker for worker in self.processes if worker.index in of_index]
        for worker in new:
            worker.starting = False
            self.started.append(worker.process)
        self._leaving += old
        self.set_workers([of_index.get(worker.index, worker) for worker in self.workers])
        for worker in old:
            worker.ask_to_close()
        ended = [worker for worker in self._leaving if worker.watch.has_ended()]
        if len(ended) >= _SEEN_OFF_TOGETHER or len(self._leaving) >= 4 * _SEEN_OFF_TOGETHER:
            leaving, self._leaving = self._leaving, []
            self._see_off(leaving, 0.0, terminate=False)

    def _see_off(self, workers: Sequence[ProcessWorker], timeout: float, *, terminate: bool) -> None:
        """End workers that have no place any more, or never had one, and what their environments started."""
        end(workers, timeout, terminate)
        for worker in workers:
            worker.release()
            self._forget_process(worker.process)

    # -- asking -----------------------------------------------------------------------------------------------------

    def next_seq(self) -> int:
        """A fresh sequence number, never 0."""
        self._seq = self._seq % 0xFFFFFFFF + 1
        return self._seq

    def ask_plain_step(self) -> Request:
        """Ask all workers for a step of all rows, with actions in shared memory."""
        self._seq = seq = self._seq % 0xFFFFFFFF + 1
        if not self.processes:
            request = Request(seq, "step", self.workers)
            request.steps = self._num_rows
            self.table.pending.requests[seq] = request
            return request
        request = self._prepared
        if request.seq != seq or request.workers is not self.workers:
            request = self._plain_step(seq)
        self.behind = True
        self.table.pending.requests[seq] = request
        if self._max_busy is None:
            try:
                request.sent.extend(map(write, self._outs, repeat(request.data)))  # as `write_once` does
                self.behind = False
            except OSError:  # a worker is gone: found out below
                pass
        if self.behind:
            self.pump(HEAD_START)
        self._prepared = self._plain_step(seq % 0xFFFFFFFF + 1)  # while the workers are busy
        return request

    def _plain_step(self, seq: int) -> Request:
        request = Request(seq, "step", self.workers)
        request.steps = self._num_rows
        request.data = pack_head(_STEP, seq)
        request.sent = []
        return request

    def stage(self, part: WorkerRequest, seq: int) -> WorkerRequest:
        """A part made ready to be sent: encoded for a process, and for the caller's own share a copy of its own.

        Raises:
            Exception: The payload cannot be pickled; nothing was sent.
        """
        if part.worker.local:
            if part.payload is not None and COMMANDS[part.op] == "step":  # environments may write into their actions
                part.payload = deepcopy(part.payload)
            return part
        payload = None
        if part.payload is not None:
            forked = isinstance(part.worker, ProcessWorker) and part.worker.forked
            payload = dumps(part.payload, by_value=True) if forked else dumps_by_value(part.payload)
        part.data = encode(part.op, seq, payload)
        part.payload = None
        return part

    def ask(self, request: Request, others: Sequence[Request] = (), *, alone: bool = False) -> None:
        """Make a call: what it is about has been written. When the request is in the table the call was made.

        Args:
            request: What to ask.
            others: The rest of the same call, in further messages.
            alone: Nothing else is pending from then on.
        """
        behind, self.behind = self.behind, True
        self.table.enter(request, others, alone=alone)
        if not behind and self._max_busy is None and self._send_all(request) and all(map(self._send_all, others)):
            self.behind = False
        else:
            self.pump(HEAD_START)

    def _send_all(self, request: Request) -> bool:
        """Send a request, where nothing else has still to be sent; false if a pipe was full."""
        for part in (request.parts or {}).values():
            worker = part.worker
            if isinstance(worker, ProcessWorker) and not worker.send(part):
                return False
        return True

    def pump(self, patience_ms: float = 0.0) -> None:
        """Send what has still to be sent, in order, as far as pipes take it and workers may be busy.

        Args:
            patience_ms: How long to wait where a worker that is reading has not made room.
        """
        while full := self._send():
            poll = select.poll()
            for worker in full:
                poll.register(worker.channel.out, select.POLLOUT)
                poll.register(worker.channel.fd, select.POLLIN)
            if not poll.poll(patience_ms):
                return
            for worker in full:
                while worker.receive() and worker.death is None:
                    pass

    def _send(self) -> list[ProcessWorker]:
        """Send once; returns the workers that read and have not made room for all of their messages."""
        full: list[ProcessWorker] = []
        behind = False
        stuck: set[int] = set()
        room = self._room()
        for request in list(self.table.requests.values()):
            if request.parts is None:
                if len(request.sent) == len(self._outs) or not self.processes:
                    continue
                _split(request)
            assert request.parts is not None
            for index, part in request.parts.items():
                worker = part.worker
                if not isinstance(worker, ProcessWorker) or index in request.answers or part.sent:
                    continue
                if index in stuck or (room <= 0 and part.op <= Op.REBUILD_SOME and not part.written):
                    stuck.add(index)
                    behind = True
                    continue
                if worker.send(part):
                    room -= part.op <= Op.REBUILD_SOME and index not in request.answers
                    continue
                stuck.add(index)
                behind = True
                if self.table.oldest_of(worker) is request:
                    full.append(worker)
        self.behind = behind
        return full

    def _room(self) -> int:
        """How many more workers may become busy."""
        if self._max_busy is None:
            return len(self.processes) + 1
        busy = sum(
            1
            for request in self.table.requests.values()
            for index, part in (request.parts or {}).items()
            if part.written and index not in request.answers and part.op <= Op.REBUILD_SOME
        )
        return self._max_busy - busy

    # -- waiting ----------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """The call before was interrupted: bring the table and the pipes into agreement."""
        self.table.repair()
        self.behind = True
        for worker in self._all_processes():
            while worker.channel.raw and worker.receive() and worker.death is None:
                pass

    def gather(self, request: Request, deadline: float | None) -> list[Worker]:
        """Wait until all workers have answered ``request``; returns those that had not when the time was up."""
        own = self.own
        if own is not None:
            if request.parts is None:  # it is all there is
                if own.index not in request.answers:
                    own.perform(request)
            else:
                self._perform_until(request)
        if not self.processes:
            return []
        began = time.perf_counter()
        try:
            if self.behind:
                self.pump(HEAD_START)
            if not self.behind:
                return self._gather_each(request, deadline)
            while request.missing() and self.read_ready(milliseconds(deadline)):
                pass
            return request.missing()
        finally:
            self.time_waiting += time.perf_counter() - began

    def _perform_until(self, last: Request) -> None:
        """Carry out what the caller's own share is asked, up to ``last``."""
        own = self.own
        assert own is not None
        for request in list(self.table.requests.values()):
            if own.index not in request.answers and (request.parts is None or own.index in request.parts):
                own.perform(request)
            if request is last:
                return

    def _gather_each(self, request: Request, deadline: float | None) -> list[Worker]:
        """As :meth:`gather`, where all messages were sent.

        Waiting begins with the worker that was asked last. By the time it has answered, most of the others have too, so
        that the caller wakes up once or twice a step and not once a worker.
        """
        answers = request.answers
        asked: Sequence[Any] = self.processes
        if request.parts is not None:
            asked = [worker for worker in request.workers if not worker.local]
            if not asked:
                return []
        expected = pack_head(_PLAIN, request.seq)
        # the one on our own core first: it runs when we sleep, and never while we spin
        first, last = asked[0], asked[-1]
        if first.with_caller:
            while first.index not in answers:
                if not self._sleep(first, deadline):
                    return self._late(request)
                if self.closing:
                    self._check()
                first.receive()
        elif not self._options.caller_spin and last.index not in answers and last.death is None:
            self._sleep(last, deadline)
            self._check()
            for worker in reversed(asked):
                if worker.index not in answers and worker.death is None:
                    worker.take_plain(request, expected)
        spin = self._spin.spin
        for worker in reversed(asked):
            index = worker.index
            while index not in answers:
                spin(worker.channel.poll)
                worker.take_plain(request, expected)
                if index in answers or worker.receive():
                    continue
                if not self._sleep(worker, deadline):
                    return self._late(request)
                if self.closing:
                    self._check()
        return []

    def _sleep(self, worker: ProcessWorker, deadline: float | None) -> bool:
        """Wait until a worker has said something or has ended, or for a while; false when the time is up."""
        if worker.wait(self.watchdog.longest if deadline is None else self.watchdog.milliseconds(deadline)):
            return True
        self.watchdog.look(self.table, self._all_processes())
        return deadline is None or time.monotonic() < deadline

    def _late(self, request: Request) -> list[Worker]:
        """The workers that have not answered, after one more look at each."""
        for worker in request.missing():
            while isinstance(worker, ProcessWorker) and worker.receive() and worker.death is None:
                pass
        return request.missing()

    def wait_any(self, deadline: float | None, seen: int = 0) -> bool:
        """Take in whatever has been answered, until more than ``seen`` answers by row are there; false when the time was up.

        The caller steps its own share when no other worker has an answer, and in its turn where there always is one.
        """
        while True:
            if self.behind:
                self.pump(HEAD_START)
            own = self.own
            mine = None if own is None else self.table.oldest_of(own)
            if mine is not None and own is not None:
                in_turn = (self._seq - mine.seq) % 0xFFFFFFFF > len(self.workers)
                if in_turn or (len(self.table.pending.arrived) <= seen and not (self.processes and self.read_ready(0.0))):
                    own.perform(mine)
            if len(self.table.pending.arrived) > seen:
                return True
            if mine is not None:
                continue
            if not any(request.missing() for request in self.table.requests.values()):
                return False
            if not self.read_ready(milliseconds(deadline)):
                return False

    def read_ready(self, timeout_ms: float | None) -> bool:
        """Read all answers that are there, after waiting for one; false when the time was up.

        It may also have waited for a while only.
        """
        if self.behind:
            self.pump()
        poll = self._poll_for_any()
        longest = self.watchdog.longest
        if self._asks:
            longest = min(longest, SLICE_MS)
        began = time.perf_counter()
        events = poll.poll(longest if timeout_ms is None else min(timeout_ms, longest))
        now = time.perf_counter()
        self.time_waiting += now - began
        self._check()
        if now > self.watchdog.next_look:
            self.watchdog.look(self.table, self._all_processes())
        died = self._asks and not events
        for descriptor, _ in events:
            writer = self._writers.get(descriptor)
            if writer is None:
                died = died or descriptor not in self._outs
                continue
            if writer.death is not None:
                died = True
                continue
            writer.receive()  # if there is more, the next poll tells
        if died:
            self._mark_the_dead()
        return bool(events) or timeout_ms is None or timeout_ms > longest

    def _poll_for_any(self) -> select.poll:
        """Polls for answers and ends of all workers and, where a pipe was full, for room in it."""
        if self._any is not None and not self.behind:
            return self._any
        writers = {worker.channel.fd: worker for worker in self._all_processes() if worker.death is None}
        poll = select.poll()
        for descriptor in (*writers, *(worker.watch.descriptor for worker in writers.values())):
            poll.register(descriptor, select.POLLIN)
        if self.behind:
            for request in self.table.requests.values():
                for part in (request.parts or {}).values():
                    worker = part.worker
                    if isinstance(worker, ProcessWorker) and part.written and not part.sent and worker.death is None:
                        poll.register(worker.channel.out, select.POLLOUT)
        self._writers, self._any = writers, None if self.behind else poll
        return poll

    def _mark_the_dead(self) -> None:
        for worker in self._all_processes():
            if worker.death is None and worker.watch.has_ended() and not worker.receive():
                worker.mark_dead()
        for worker in self._all_processes():
            if worker.death is not None:
                self.table.mark_lost(worker, worker.death)
        self._forget_any()

    def _forget_any(self) -> None:
        self._any = None

    def _check(self) -> None:
        """After every sleep: a signal handler or another thread may have closed the pool meanwhile."""
        if self.closing:
            raise ClosedEnvironmentError("Trying to operate on a vector environment, after a call to `close()`.")

    # -- ending -----------------------------------------------------------------------------------------------------

    def close(self, timeout: float, *, terminate: bool) -> None:
        """End all workers within about ``timeout`` seconds: ask, then SIGTERM, then SIGKILL for the whole group.

        It can be interrupted anywhere and called again. What it holds is let go of by :meth:`release`.
        """
        if self.abandoned:
            return
        self.closing = True
        end(self._all_processes(), timeout, terminate, self.failures_in_close)
        leaving, self._leaving = self._leaving, []
        self._see_off(leaving, timeout, terminate=terminate)
        if self.own is not None:
            self.failures_in_close += [(failure, self.own) for failure in self.own.close().failures]

    def release(self) -> None:
        """Close every descriptor. Idempotent."""
        if self.abandoned:
            return
        for worker in self._all_processes():
            worker.release()
        self._lifeline.close()
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        self.holdings.close()
        if self.own is not None:
            self.own.forget()
        end_unclosed(self._lifeline, self.started, os.getpid())
        self._forget_any()
        self._writers = {}
        self.__dict__.pop("batch", None)
        self._spin.forget()
        nothing = PendingRequests(0)
        for holder in (*self._all_processes(), self.own):
            if holder is not None:
                holder._table = nothing
        self.table = nothing  # with these the last cycle goes: all is freed without the collector
        self.released = True
        left_in_a_fork.discard(self)

    def end_unclosed(self) -> None:
        """It was collected without having been closed: kill the workers, and close what is the caller's own."""
        self._finalizer()
        if self.own is not None:
            self.own.close()
        self.holdings.close()

    def abandon(self) -> None:
        """In a forked child: close the copies of what is the caller's alone."""
        self.abandoned = True
        self.table.abandon()
        for channel in list(self.channels):
            channel.forget()
        self._finalizer.detach()

    def __repr__(self) -> str:
        return f"WorkerPool({self.workers})"
