"""Starts, replaces and ends worker processes, writes to them and waits for them.

Messages are queued inside a block of state changes and written after it; :mod:`vecenv.engine.exchange` explains why.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import select
import time
import weakref
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from os import write
from typing import Any, Final

from gymnasium.vector.utils import clear_mpi_env_vars

from vecenv.engine.failures import Policy
from vecenv.engine.watchdog import Watchdog
from vecenv.engine.worker_process import LocalWorker, Worker, WorkerProcess, end_workers
from vecenv.errors import StartupTimeout, StepTimeout, envs_text, format_seconds
from vecenv.front.arguments import deadline_after, milliseconds_until, parse_timeout
from vecenv.front.driver import LateReplies, closed_in_child, step_timeout_error
from vecenv.front.guard import closed_error
from vecenv.link.channel import Channel, ChannelClosed
from vecenv.link.envs import WorkerPlan
from vecenv.link.messages import (
    EnvFnsToStart,
    Failure,
    decode,
    dumps_by_value,
    dumps_for_fork,
    encode,
    find_main_definitions,
    is_call,
    pack_head,
    packed_seq_of,
)
from vecenv.shm import Arena, SharedArrays
from vecenv.system.cores import Placement, SpinPolicy
from vecenv.system.descendants import end_marked, new_token
from vecenv.system.descriptors import DescriptorOwner, require_descriptors, too_few_descriptors_error
from vecenv.system.reporting import warn
from vecenv.system.shared_generators import fingerprint
from vecenv.system.signals import deferred_signals
from vecenv.system.spawning import (
    NO_GUARD,
    Lifeline,
    Variables,
    advice_for_fork,
    end_unclosed,
    explain_missing_guard,
    spawn,
)
from vecenv.system.supervision import EXIT_POLL_INTERVAL_MS, StackFile, close_process, innermost_location
from vecenv.worker.main import Ready, Start, main

_MAX_LATE_WORKERS_NAMED: Final = 4
_MIN_SECONDS_FOR_STACKS: Final = 0.01  # shorter timeouts serve for polling, and reading a stack may take longer


@dataclass(slots=True)
class PoolOptions:
    """The options of worker processes.

    Attributes:
        context: A ``multiprocessing`` context.
        daemon: ``Process.daemon`` of every worker.
        name: Process names are ``Worker<name>-index``.
        max_concurrency: Steps and resets are sent only while fewer messages than this have no reply; ``None``: no limit.
        caller_spin: Seconds for which the caller may poll before it sleeps.
        placements: The cores of each worker.
        variables: Environment variables of each worker.
    """

    context: Any
    daemon: bool
    name: str
    max_concurrency: int | None = None
    caller_spin: float = 0.0
    placements: list[Placement] = field(default_factory=list)
    variables: list[Variables] = field(default_factory=list)


class WorkerPool:
    """The workers of one engine.

    Args:
        plan: The settings that all workers share.
        arena: The shared memory.
        arrays: Views of the shared memory.
        options: The options of the worker processes.
        policy: The policy for failures, with the time limits.

    Attributes:
        processes: The worker processes, in the order of their rows.
        local: The caller's own share, if there is one.
        workers: ``local`` and ``processes`` together, in the order of their rows.
        wait_order: Indices of ``processes``, in the order in which to wait for their replies.
        unflushed: Workers with bytes in their channels that :meth:`flush` has yet to write.
        written_to_all: The results of the writes of the latest message to all. Only their number matters: that many
            processes, from the first, have it in their pipe or channel. ``list.extend`` keeps those before an exception.
        held: Messages that wait until fewer than ``max_concurrency`` sent ones have no reply: (worker, bytes,
            ``makes_busy``), where the last is False for a call, which waits only for held messages before it.
        seconds_waited: The total time of all waits for replies.
        started: Every process that was started and has not been joined.
        closing: True once ``close()`` has begun.
        is_child_copy: True in a forked child, which has no workers.
    """

    # class attributes, because objects with more than 30 attributes of their own are slower
    is_child_copy = closing = released = False

    def __init__(self, plan: WorkerPlan, arena: Arena, arrays: SharedArrays, options: PoolOptions, policy: Policy) -> None:
        self._plan, self._options, self._start_timeout = plan, options, policy.start_timeout
        self._arena: Arena | None = arena
        self._running: Any = arrays.running
        self._running[:] = -1
        self.descriptors = DescriptorOwner(self)
        self._lifeline = Lifeline(self.descriptors)
        self.started: list[Any] = []
        self._starts: Counter[int] = Counter()  # worker index -> number of processes started
        self.channels: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._finalizer = weakref.finalize(self, end_unclosed, self._lifeline, self.started, os.getpid())
        self._env_fns: dict[int, Sequence[Any]] = {}
        self._main: dict[str, Any] = {}
        self.processes: list[WorkerProcess] = []
        self.local: LocalWorker | None = None
        self.workers: list[Worker] = []
        self.wait_order: list[int] = []
        self.unflushed: set[WorkerProcess] = set()
        self.written_to_all: list[int] = []
        self.max_concurrency = options.max_concurrency
        self.held: deque[tuple[WorkerProcess, bytes, bool]] = deque()
        self.failures_in_close: list[Failure] = []
        self._retired: list[WorkerProcess] = []
        self._message_to_all = b""
        self._write_fds: list[int] = []
        shares_core = any(placement.shares_core for placement in options.placements)
        self._spin_policy = SpinPolicy(options.caller_spin, arrays.no_spin_until, shares_core=shares_core)
        self._spin = self._spin_policy.spin
        self.seconds_waited = 0.0
        self.watchdog = Watchdog(policy.step_timeout)
        self._poll: tuple[select.poll, dict[int, WorkerProcess]] | None = None
        closed_in_child.add(self)  # before any worker is forked

    # -- starting ------------------------------------------------------------------------------------------------------

    def start(self, shares: Sequence[tuple[range, Sequence[Any]]], local: LocalWorker | None) -> list[Ready]:
        """Start one process per share, all at once, and wait until each has built its environments.

        Args:
            shares: (rows, env_fns) of each process.
            local: The caller's own share; its rows are the first.

        Raises:
            StartupTimeout, WorkerDied, OSError: A worker did not start; the others were ended.
            Exception: An ``env_fn`` cannot be pickled; the workers were ended.
        """
        require_descriptors(len(shares))
        self._main = find_main_definitions()
        started: list[WorkerProcess] = []
        deadline = deadline_after(self._start_timeout)
        try:
            with clear_mpi_env_vars():
                for index, (rows, env_fns) in enumerate(shares):
                    self._env_fns[index] = env_fns
                    self._start(index, rows, len(shares), started)
            ready_messages = [self._wait_for_start(worker, deadline) for worker in started]
        except BaseException:
            self.end(started, None)
            raise
        self.processes, self.local = started, local
        # A worker on the caller's core runs only while the caller sleeps, so it comes first. The others follow in reverse:
        # once the worker that got its message last has replied, most have, so the caller wakes up once or twice per step.
        self.wait_order = sorted(range(len(started)), key=lambda index: (not started[index].shares_core, -index))
        self.refresh_workers()
        self._mark_message_to_all_written()
        return ready_messages

    def replace(self, worker: WorkerProcess, new: WorkerProcess | None = None) -> WorkerProcess:
        """Replace a worker with a new process, which builds its environments while the caller continues.

        Args:
            worker: A dead worker, or an idle one, which then closes its environments.
            new: A ready worker from :meth:`wrap_process`; ``None``: start one that builds the environments again.

        Raises:
            OSError: No process could be started; the worker keeps its place.
            Exception: An ``env_fn`` cannot be pickled any more, or the main file is gone; the worker keeps its place, too.
        """
        with deferred_signals():
            self.queue_rest()  # a message to all that was not written yet must not reach the new process
            if worker.death is not None:
                worker.release()
                self._forget_process(worker.process)
                end_marked([worker.token])
            if new is not None:
                self.started.append(new.process)
            else:
                started: list[WorkerProcess] = []
                with clear_mpi_env_vars():
                    self._start(worker.index, worker.rows, 1, started)
                new = started[0]
            new.channel.bytes_pickled += worker.channel.bytes_pickled  # `stats()` counts both
            self.processes[worker.index] = new
            if worker.death is None:
                worker.request_close()
                self._retire(worker)
            self.refresh_workers()
        return new

    def wrap_process(
        self, index: int, rows: range, process: Any, channel: Channel, stack_file: StackFile, descriptors: DescriptorOwner,
        token: int,
    ) -> WorkerProcess:  # fmt: skip
        """Return a worker for ``process``. If that was started elsewhere, the worker is for :meth:`replace`."""
        running, shares_core = self._running[index : index + 1], self.get_placement(index).shares_core
        return WorkerProcess(index, rows, process, channel, stack_file, descriptors, token, running, shares_core)

    def refresh_workers(self) -> None:
        """Update the lists that depend on ``processes``."""
        self.workers = [*([] if self.local is None else [self.local]), *self.processes]
        self._write_fds = [worker.channel.out for worker in self.processes]
        self._poll = None

    def get_placement(self, index: int) -> Placement:
        """Return the placement of a worker."""
        return self._options.placements[index]

    def process_name(self, index: int) -> str:
        """Return the name of a worker's process."""
        return f"Worker<{self._options.name}>-{index}"

    def _start(self, index: int, rows: range, count: int, workers: list[WorkerProcess]) -> None:
        """Start the process of one worker and append the worker to ``workers``.

        Raises ``OSError``, or an error from pickling an ``env_fn``. ``count`` (workers being started) is for the error text.
        """
        options, env_fns = self._options, self._env_fns[index]
        is_fork = options.context.get_start_method() == "fork"
        functions = env_fns if is_fork else EnvFnsToStart(rows, env_fns, "the start method of its worker needs")
        placement = self.get_placement(index)
        variables = options.variables[index] if options.variables else {}
        generation = self._starts[index]
        self._starts[index] += 1
        self._running[index] = -1
        descriptors = self.descriptors.child()
        num_started = len(self.started)
        try:
            channel = Channel(descriptors)
            self.channels.add(channel)
            stack_file = StackFile(descriptors)
            token = new_token()
            assert self._arena is not None
            start = Start(
                index, rows[0], functions, self._plan, self._arena, channel.worker_ends, stack_file, placement,
                fingerprint(), generation,
            )  # fmt: skip
            with deferred_signals():  # an exception between spawn() and append() would leak the process
                process = spawn(
                    options.context, main, (start,), name=self.process_name(index), daemon=options.daemon,
                    lifeline=self._lifeline, token=token, variables=variables, processes=self.started,
                )  # fmt: skip
                workers.append(self.wrap_process(index, rows, process, channel, stack_file, descriptors, token))
            channel.close_worker_ends()
        except BaseException as error:
            if not any(worker.descriptors is descriptors for worker in workers):
                descriptors.close()
                for process in self.started[num_started:]:
                    self._end_process(process)
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise too_few_descriptors_error(error, count) from error
            raise

    def _end_process(self, process: Any) -> None:
        """End a process that belongs to no worker, because its start was interrupted."""
        with contextlib.suppress(ValueError, AttributeError, AssertionError):  # it was not started
            process.kill()
            process.join()
        close_process(process)
        self._forget_process(process)

    def _forget_process(self, process: Any) -> None:
        with contextlib.suppress(ValueError):  # an interrupted call may have removed it
            self.started.remove(process)

    def _wait_for_start(self, worker: WorkerProcess, deadline: float | None) -> Ready:
        """Return a worker's first message; raise ``WorkerDied`` if it ended first, ``StartupTimeout`` if it was late."""
        context = self._options.context
        while True:
            try:
                message = worker.channel.receive()
            except ChannelClosed:
                message = None
                worker.reap()
            if worker.death is not None:
                unguarded = worker.death.exitcode == NO_GUARD
                raise worker.death.error(explain_missing_guard(context.get_start_method()) if unguarded else "")
            if message is not None:
                ready: Ready = pickle.loads(decode(message)[2] or b"")
                worker.has_started = True
                return ready
            left = milliseconds_until(deadline)
            events = () if left == 0 else worker.poll(left)
            if not events:
                envs = envs_text(worker.rows, worker.running_row)  # before the signal for the stack
                stack = worker.read_stack()
                raise StartupTimeout(
                    f"worker {worker.index} (pid {worker.pid}, {envs}) was not ready within "
                    f"{format_seconds(self._start_timeout)} of its start" + (f"; it is at:\n{stack}" if stack else "")
                    + advice_for_fork(context)
                )  # fmt: skip
            if worker.channel.fd not in dict(events):
                worker.reap()

    # -- the rows of each worker ---------------------------------------------------------------------------------------

    def split(self, rows: Sequence[int]) -> list[tuple[Worker, Sequence[int]]]:
        """Return each worker that has some of ``rows`` (sorted), with these rows."""
        ends = [bisect_left(rows, worker.rows.stop) for worker in self.workers]
        parts = zip(self.workers, [0, *ends], ends, strict=False)
        return [(worker, rows[first:end]) for worker, first, end in parts if first < end]

    def split_into_rounds(self, rows: Sequence[int], size: int | None) -> Iterator[tuple[Worker, Sequence[int]]]:
        """Yield (worker, rows) in rounds, each with a message of up to ``size`` rows (``None``: all) per worker."""
        parts = self.split(rows)
        longest = max((len(worker_rows) for _, worker_rows in parts), default=0)
        size = size or longest or 1
        for first in range(0, longest, size):
            for worker, worker_rows in parts:
                if message_rows := worker_rows[first : first + size]:
                    yield worker, message_rows

    # -- writing -------------------------------------------------------------------------------------------------------

    def pickle_for(self, worker: Worker, payload: Any) -> Any:
        """Pickle a payload for :meth:`queue`. One for the caller's own share is returned unchanged.

        Raises:
            Exception: The payload cannot be pickled.
        """
        if payload is None or isinstance(worker, LocalWorker):
            return payload
        return dumps_for_fork(payload, self._main) if worker.forked else dumps_by_value(payload)

    def queue(self, worker: Worker, op: int, seq: int, payload: Any) -> None:
        """Put a message into a worker's channel, for :meth:`flush` to write, or hold it back (``max_concurrency``)."""
        if isinstance(worker, LocalWorker):
            worker.queue(op, seq, payload)
            return
        data, makes_busy = encode(op, seq, payload), not is_call(op)
        if self.max_concurrency is not None and (makes_busy or any(other is worker for other, *_ in self.held)):
            self.held.append((worker, data, makes_busy))
        else:
            worker.channel.queue(data)
            self.unflushed.add(worker)

    def release_held(self) -> None:
        """Queue held messages while fewer than ``max_concurrency`` sent ones, including calls, have no reply.

        A step or reset of the caller's own share that was not executed yet takes one place.
        """
        busy = self._count_sent().total() + (self.local is not None and self.local.has_step())
        while self.held and (not self.held[0][2] or busy < (self.max_concurrency or 0)):
            worker, data, makes_busy = self.held.popleft()
            busy += makes_busy
            worker.limit_from = time.monotonic()
            worker.channel.queue(data)
            self.unflushed.add(worker)

    def can_execute_local(self, local: LocalWorker) -> bool:
        """True if ``max_concurrency`` allows the next message to the caller's own share."""
        limit = self.max_concurrency
        return limit is None or not local.has_step() or self._count_sent().total() < limit

    def _count_sent(self) -> Counter[WorkerProcess]:
        """Return the number of messages to each process that are not held and have no reply."""
        sent = Counter({worker: len(worker.pending) for worker in self.processes})
        sent.subtract(worker for worker, *_ in self.held)
        return sent

    def drop_held(self, numbers: Container[bytes]) -> None:
        """Drop the held messages with these sequence numbers (in bytes)."""
        self.held = deque(message for message in self.held if packed_seq_of(message[1]) not in numbers)

    def set_message_to_all(self, op: int, seq: int) -> None:
        """Set the message to all workers, without payload. :meth:`write_to_all` writes it without the channels."""
        if self.local is not None:
            self.local.unexecuted.append((op, seq, None))
        if self.processes:
            self._message_to_all, self.written_to_all = pack_head(op, seq), []

    def write_to_all(self) -> None:
        """Write the message to all in one call into C. A pipe accepts such a short message whole or not at all."""
        if self.unflushed:
            return  # other bytes go first: the next `Exchange.flush` queues this message behind them
        try:
            self.written_to_all.extend(map(write, self._write_fds, repeat(self._message_to_all)))
        except TimeoutError:  # from a signal handler
            raise
        except OSError:  # a pipe is full, or a worker has ended: the next `Exchange.flush` queues the rest
            pass

    def queue_rest(self) -> list[WorkerProcess]:
        """Queue the message to all for the workers to which it was not written; return those of them that are dead."""
        rest = self.processes[len(self.written_to_all) :]
        for worker in rest:
            if worker.death is None:
                worker.channel.queue(self._message_to_all)
                self.unflushed.add(worker)
        self._mark_message_to_all_written()
        return [worker for worker in rest if worker.death is not None]

    def _mark_message_to_all_written(self) -> None:
        self.written_to_all = [0] * len(self.processes)

    def drop_outside_channels(self) -> None:
        """Drop messages that are in no channel yet. Bytes queued in a channel stay, and precede its next message."""
        self.held.clear()
        self._mark_message_to_all_written()
        if self.local is not None:
            self.local.unexecuted.clear()

    def flush(self) -> list[WorkerProcess]:
        """Write queued messages, as far as the pipes accept them; return the workers that have closed their pipes."""
        closed = []
        for worker in list(self.unflushed):
            try:
                if worker.channel.flush():
                    self.unflushed.discard(worker)
            except ChannelClosed:
                closed.append(worker)
        return closed

    # -- waiting -------------------------------------------------------------------------------------------------------

    def wait_for_one(self, worker: WorkerProcess, deadline: float | None) -> bool:
        """Wait for a worker to write or end; return ``False`` if the deadline passes first.

        Spin before sleeping, if the spin policy allows that. A check by the watchdog may end the wait early.
        """
        began = time.perf_counter()
        spun = not worker.shares_core and self._spin(worker.channel.poll)
        events = () if spun else worker.poll(self._milliseconds(deadline))
        now = time.perf_counter()
        self.seconds_waited += now - began
        if self.closing:
            raise closed_error()
        if spun or events:
            return True
        self.watchdog.check(self.find_busy_workers())
        return deadline is None or time.monotonic() < deadline

    def wait(self, deadline: float | None) -> list[tuple[WorkerProcess, bool]] | None:
        """Wait for workers to write, to end, or to accept queued bytes; return ``None`` after the deadline.

        Returns:
            (worker, True if it has ended) for each event. So a worker may occur twice, and may have written nothing. The
            list is empty if the wait was cut short for the watchdog or to look for processes that have ended.
        """
        poll, worker_by_fd = self._make_poll() if self.unflushed or self._poll is None else self._poll
        began = time.perf_counter()
        first = self.processes[self.wait_order[0]]  # the only one that may share the caller's core
        if not (first.shares_core and first.pending):  # otherwise spinning would keep it from running
            self._spin(poll.poll)  # the poll below returns the events that end the spin
        # if a signal handler has just closed the vector environment, no event would end a longer sleep
        milliseconds = 0.0 if self.closing else self._milliseconds(deadline)
        must_poll = any(worker.watch.must_poll_for_exit for worker in self.processes)
        events = poll.poll(min(milliseconds, EXIT_POLL_INTERVAL_MS) if must_poll else milliseconds)
        now = time.perf_counter()
        self.seconds_waited += now - began
        if self.closing:
            raise closed_error()
        if now > self.watchdog.next_check:
            self.watchdog.check(self.find_busy_workers())
        if not events:
            alive = [worker for worker in self.processes if worker.death is None]
            if must_poll and (ended := [(worker, True) for worker in alive if worker.has_ended()]):
                return ended
            return None if deadline is not None and time.monotonic() >= deadline else []
        return [(worker_by_fd[fd], fd == worker_by_fd[fd].watch.descriptor) for fd, _ in events]

    def _milliseconds(self, deadline: float | None) -> float:
        longest = self.watchdog.interval_ms
        return longest if deadline is None else min(max(deadline - time.monotonic(), 0.0) * 1000, longest)

    def has_event(self) -> bool:
        """True if a worker has written or has ended. May also be True if one accepts queued bytes."""
        poll, _ = self._poll or self._make_poll()
        return bool(poll.poll(0))

    def _make_poll(self) -> tuple[select.poll, dict[int, WorkerProcess]]:
        poll, worker_by_fd = select.poll(), {}
        for worker in self.processes:
            if worker.death is None:
                for fd in (worker.channel.fd, worker.watch.descriptor):
                    worker_by_fd[fd] = worker
                    poll.register(fd, select.POLLIN)
        for worker in self.unflushed:
            if worker.death is None:
                worker_by_fd[worker.channel.out] = worker
                poll.register(worker.channel.out, select.POLLOUT)
        self._poll = None if self.unflushed else (poll, worker_by_fd)
        return poll, worker_by_fd

    def drop_messages(self, worker: WorkerProcess) -> None:
        """Drop the messages that are queued for a dead worker."""
        self.unflushed.discard(worker)
        self.held = deque(message for message in self.held if message[0] is not worker)
        self.refresh_workers()  # its descriptors are closed: other files may get their numbers

    def find_busy_workers(self, limit: float = 0.0) -> list[WorkerProcess]:
        """Return the workers with a message that is not held and has no reply.

        With ``limit``, only those with a ``limit_from`` at least that many seconds ago.
        """
        sent, latest = self._count_sent(), time.monotonic() - limit
        return [worker for worker in self.processes if sent[worker] and worker.limit_from <= latest]

    def next_check(self, seconds: float) -> float:
        """Return the time at which :meth:`find_busy_workers` may find another worker."""
        now = time.monotonic()
        began = [worker.limit_from for worker in self.processes if worker.limit_from + seconds > now]
        return min(began, default=now) + seconds

    def timeout_error(self, method: str, timeout: Any, late: Sequence[WorkerProcess] = ()) -> StepTimeout:
        """Return the exception for a call without a reply in time. ``late``: the workers to name (default: all busy)."""
        seconds = parse_timeout(timeout)
        return step_timeout_error(method, seconds, self._describe_late(seconds, late or self.find_busy_workers()))

    def _describe_late(self, seconds: float | None, late: Sequence[WorkerProcess]) -> LateReplies:
        """Describe workers that have not replied within ``seconds``. The texts are about the first few of them."""
        text, where, with_stacks = "", {}, (seconds or 0) >= _MIN_SECONDS_FOR_STACKS
        for worker in late:
            worker.note_activity()
        for worker in late[:_MAX_LATE_WORKERS_NAMED]:
            worker.was_late = True
            _, rows, request = worker.pending[0]
            stack = worker.read_stack() if with_stacks else ""
            state = " It is stopped (SIGSTOP)." if worker.is_stopped() else ""
            request_text = f"{envs_text(rows, worker.noted_activity[1])}, {worker.label}, during {request.command}"
            text += f"\n{request_text}: no reply yet.{state}" + (f"\n{stack}" if stack else "")
            location = f", at {found}" if (found := innermost_location(stack)) else ""
            where.update(dict.fromkeys(rows, request_text + location))
        return LateReplies(text, sorted({row for worker in late for _, rows, _ in worker.pending for row in rows}), where)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _retire(self, worker: WorkerProcess) -> None:
        """Keep a replaced worker until it has ended; release them in batches, because each call of ``end`` searches /proc.

        Workers that still close their environments are killed only if there are many more of them than processes.
        """
        self.unflushed.discard(worker)  # from now on, only `end` writes to it
        self._retired.append(worker)
        if len(self._retired) % 16 == 0:
            ended = [retired for retired in self._retired if retired.watch.has_ended()]
            closing = [retired for retired in self._retired if retired not in ended]
            late = closing[: -len(self.processes) - 64]
            self._retired = closing[len(late) :]
            self.end(ended + late, 0.0)
            self.log_failures_in_close()

    def end(self, workers: Sequence[WorkerProcess], timeout: float | None) -> None:
        """End workers that are not part of the pool, and the programs that their environments started."""
        end_workers(workers, timeout, self.failures_in_close)
        self._release(workers)

    def log_failures_in_close(self) -> None:
        """Log the exceptions that environments raised in ``close()``, each once."""
        while self.failures_in_close:
            failure = self.failures_in_close.pop(0)
            warn(f"env {failure.env} raised in close(): {failure.text}")

    def _release(self, workers: Sequence[WorkerProcess]) -> None:
        """Read the failures in ``close`` that ended workers have reported, and release the workers."""
        for worker in workers:
            worker.drain(self.failures_in_close)
            worker.release()
            self._forget_process(worker.process)

    def close(self, timeout: float | None, step_timeout: float | None = None) -> None:
        """End all workers within about ``timeout`` seconds: by a request, then SIGTERM, then SIGKILL for the whole group.

        Each pending step or reset may take ``step_timeout`` seconds of that time. If ``timeout`` is ``None``, there is no
        request. After an interruption, call it again. :meth:`release` frees the resources of the pool.
        """
        if self.is_child_copy:
            return
        self.closing = True
        end_workers([*self.processes, *self._retired], timeout, self.failures_in_close, step_timeout)
        retired, self._retired = self._retired, []
        self._release(retired)
        if self.local is not None:
            self.failures_in_close += self.local.close()

    def release(self) -> None:
        """Free all descriptors and the shared memory. Idempotent."""
        if self.is_child_copy:
            return
        for worker in self.workers:
            worker.release()
            worker.pending.clear()
        self._lifeline.close()
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        self.descriptors.close()
        end_unclosed(self._lifeline, self.started, os.getpid())
        self._poll = self._running = None
        self._spin_policy.release()
        closed_in_child.discard(self)
        self.released = True

    def end_unclosed(self) -> None:
        """End the workers of an engine that was garbage-collected without being closed."""
        self._finalizer()
        if self.local is not None:
            self.local.close()
        self.descriptors.close()

    def close_in_child(self) -> None:
        """In a forked child, close the copies of resources that belong to the caller alone."""
        self.is_child_copy = True
        for channel in list(self.channels):
            channel.close_own_ends()
        self._finalizer.detach()
