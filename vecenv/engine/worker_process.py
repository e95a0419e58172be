"""Handles for the workers: processes, and the caller's own share of the environments."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import time
from collections import deque
from collections.abc import Generator, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from vecenv.engine.requests import Death, Request
from vecenv.errors import envs_text
from vecenv.link.channel import Channel, ChannelClosed
from vecenv.link.messages import Failure, Op, Outcome, Reply, copy_if_possible, decode, decode_outcome, encode, is_call
from vecenv.system.cores import read_kernel_file
from vecenv.system.descendants import end_group, end_marked
from vecenv.system.descriptors import DescriptorOwner
from vecenv.system.reporting import warn
from vecenv.system.signals import deferred_signals, watched_handlers
from vecenv.system.supervision import (
    STACK_SIGNALS,
    ProcessWatch,
    StackFile,
    catches_signal,
    close_process,
    describe_exit,
    env_frames,
    has_all_env_frames,
    innermost_location,
)
from vecenv.worker.main import execute
from vecenv.worker.snapshot_rows import SnapshotRows

PendingMessage: TypeAlias = tuple[bytes, Sequence[int], Request]
"""A message without a reply so far: the expected reply, its rows, and its request.

``StateChanges.apply_next`` handles two replies without decoding them: the expected one, and the same with the code
COLUMNS. The expected reply to a rebuild has the code ``REBUILD_MARK``, which no reply has, so even a plain one is decoded,
and ``StateChanges.apply`` writes the results of the rebuilt rows."""

_log = logging.getLogger("vecenv")
_STEP: Final = int(Op.STEP)
_EXIT_GRACE_SECONDS: Final = 0.5  # between the end of a worker's pipe and the end of its process
_STACK_START_SECONDS: Final = 0.05  # until a late worker begins to write its stack, if it can
_STACK_END_SECONDS: Final = 0.3  # until the stack is complete, if the worker has begun or waits for a core
_STACK_CPU_SECONDS: Final = 0.02  # of CPU time within which a worker begins to write, if it can
_TERM_GRACE_SECONDS: Final = 0.25  # between SIGTERM and SIGKILL
_KILL_SECONDS: Final = 5.0  # for the kernel to end a killed process
REPORT_CLOSE_SECONDS: Final = 5.0
"""Seconds after which ``close()`` logs the environment that it is waiting for."""
CLOSING: Final = 0
"""The sequence number of the last message; all others are above 0."""


class LocalWorker:
    """The caller's own share of the environments, which the caller steps while it waits.

    It has the attributes of :class:`WorkerProcess` that the engine uses.

    Attributes:
        unexecuted: Messages that have not been executed: (operation, sequence number, payload).
    """

    death, has_started = None, True
    restart_deadline = 0.0

    def __init__(self, index: int, rows: range, env_rows: SnapshotRows) -> None:
        self.index, self.rows, self.env_rows = index, rows, env_rows
        self.pid, self.label = os.getpid(), f"stepped by the caller, pid {os.getpid()}"
        self.pending: deque[PendingMessage] = deque()
        self.dropped: dict[bytes, str] = {}
        self.unexecuted: deque[tuple[int, int, Any]] = deque()

    def queue(self, op: int, seq: int, payload: Any) -> None:
        """Queue a message; environments may write into their actions, so those of a step are copied."""
        if payload is not None and op <= Op.STEP_SOME:
            payload = [copy_if_possible(action) for action in payload]
        self.unexecuted.append((op, seq, payload))

    def has_step(self) -> bool:
        """True if the next message is a step or a reset."""
        return bool(self.unexecuted) and not is_call(self.unexecuted[0][0])

    def execute_next(self) -> Outcome:
        """Execute the oldest message. It is not executed again if a signal handler raises in the middle of it."""
        op, seq, payload = self.unexecuted.popleft()
        if op == _STEP and payload is None:  # nearly always
            rows = self.env_rows
            return rows.step(None, rows.read_actions(None))
        if not is_call(op):
            return execute(self.env_rows, op, seq, payload)
        with watched_handlers():
            return execute(self.env_rows, op, seq, payload)

    def drop_calls(self) -> None:
        """Drop calls that have not been executed."""
        self.unexecuted = deque(message for message in self.unexecuted if not is_call(message[0]))

    def close(self) -> list[Failure]:
        """Close the environments; return their failures. Idempotent."""
        return self.env_rows.close().failures

    def release(self) -> None:
        """Drop the closed environments and the shared memory."""
        self.env_rows.release()


class WorkerProcess:
    """A process that steps ``rows``. It replies to messages in order, except with ``env_threads``.

    Attributes:
        channel: The pipes to it. ``channel.poll(milliseconds)`` returns events of the one with its replies.
        poll: ``poll(milliseconds)`` returns events of that pipe and of its exit.
        watch: Reports its end, and sends it signals.
        pending: Messages without a reply, oldest first.
        dropped: Dropped messages: the sequence number in bytes -> the command of the request. The reply to a message, if
            there is one, removes its entry.
        has_started: True once it has built its environments, or has tried to.
        start_failures: The failures that a replacement reported if it ended at its start.
        death: How it ended; ``None`` while it is alive.
        was_late: True if a reply was late; ``close()`` then waits less for this worker.
        limit_from: The time from which ``step_timeout`` counts, if it is later than the beginning of the caller's wait;
            minus infinity at first. Set when a held message is released, and after each reply while there is
            a ``restart_deadline``.
        restart_deadline: The ``time.monotonic()`` after which waits kill a replacement that has not started or, with
            ``step_timeout``, a process with a pending rebuild that has not replied to its oldest message; 0.0: none. Set by
            ``StateChanges.set_deadline``: at a start, for a rebuild, after each reply, and when these were dropped.
        forked: True if it was forked, and so has the caller's own classes.
        shares_core: True if it is bound to the caller's core, and so runs only while the caller sleeps.
        token: The token that marks all processes that its environments start.
        hung_for: The seconds after which it was killed for a hang; ``None`` if it was not.
        kill_reason: The reason for killing it; empty if it was not killed.
        noted_activity: Its command and running environment when :meth:`note_activity` was last called.
    """

    limit_from = -math.inf
    hung_for: float | None = None
    kill_reason = ""
    noted_activity: tuple[str, int | None] = "idle", None

    def __init__(
        self, index: int, rows: range, process: Any, channel: Channel, stack_file: StackFile, descriptors: DescriptorOwner,
        token: int, running: Any, shares_core: bool,
    ) -> None:  # fmt: skip
        self._running = running  # the worker's cell of `SharedArrays.running`
        self.index, self.rows, self.process, self.channel, self.token = index, rows, process, channel, token
        self.pid, self.label = process.pid, f"worker {index}, pid {process.pid}"
        self.stack_file, self.descriptors = stack_file, descriptors
        self.shares_core = shares_core
        self.forked = process._popen.method == "fork"
        self.pending: deque[PendingMessage] = deque()
        self.dropped: dict[bytes, str] = {}
        self.has_started = self.was_late = self._close_requested = False
        self.start_failures: list[Failure] = []
        self.death: Death | None = None
        self.exitcode: int | None = None
        self.restart_deadline = self._drained_at = 0.0
        self._drained = 0  # replies that `drain` has read, the latest at `_drained_at`
        self.watch = ProcessWatch(process, descriptors)
        poll = select.poll()
        poll.register(channel.fd, select.POLLIN)
        poll.register(self.watch.descriptor, select.POLLIN)
        self.poll: Any = partial(self.watch.poll, poll) if self.watch.must_poll_for_exit else poll.poll

    def has_ended(self) -> bool:
        """True if the process is known to be dead, or has just ended."""
        return self.death is not None or self.watch.has_ended()

    @property
    def command(self) -> str:
        """The command that it is executing; ``"start"`` before it is ready, and ``"idle"`` if no message is pending."""
        return "start" if not self.has_started else self.pending[0][2].command if self.pending else "idle"

    @property
    def running_row(self) -> int | None:
        """The environment that it is calling, or in which it died; ``None`` if that is not known."""
        rows = self.pending[0][1] if self.pending else self.rows
        if len(rows) == 1:
            return rows[0]
        position = int(self._running[0])
        row = self.rows[position] if 0 <= position < len(self.rows) else None
        return row if row in rows else None

    def note_activity(self) -> None:
        """Note its command and running environment. Call this before its stack is requested.

        The signal for the stack may end the system call in which an environment hangs (``EINTR``), and so the whole request.
        """
        self.noted_activity = self.command, self.running_row

    def reap(self) -> Death:
        """Determine how the process ended, and kill the rest of its process group. Kill it if it does not end soon.

        Its exit code can be read only once, so signal handlers are deferred.
        """
        with deferred_signals():
            self.death = self.death or self._reap()
            self.watch.close()
            self.channel.close()
        return self.death

    def _reap(self) -> Death:
        reason = self.kill_reason
        if not self.watch.has_ended(_EXIT_GRACE_SECONDS):
            self.watch.signal(signal.SIGKILL)
            reason = reason or "it closed its pipe, so it was killed"
        end_group([self.pid])  # before `exit_code` reaps it
        self.exitcode = self.watch.exit_code()
        command, running = self.noted_activity if self.kill_reason else (self.command, self.running_row)
        running = None if command == "idle" else running
        stack = env_frames(self.stack_file.read_fatal()) if (self.exitcode or 0) < 0 else ""
        envs = envs_text(self.rows, running)
        activity = {"idle": "while idle", "start": "during its start"}.get(command, f"during {command}")
        if self.has_started and self.pending:
            _, rows, request = self.pending[0]
            activity += ", in a restart" if rows[0] in request.rebuilding else ""
        text = f"worker {self.index} (pid {self.pid}, {envs}) died {activity}: {reason or describe_exit(self.exitcode)}"
        if location := innermost_location(stack):
            text += f", at {location}"
        if stack:
            text += f"\nits last Python stack:\n{stack}"
        location = innermost_location(reason or "") or location  # `reason` may have a stack, too
        where = dict.fromkeys(self.rows, f"{envs}, {self.label}, {activity}" + (f", at {location}" if location else ""))
        return Death(text, self.index, tuple(self.rows), self.pid, self.exitcode, command, self.hung_for, running, where)

    # -- the stack ----------------------------------------------------------------------------------------------------

    def read_stack(self) -> str:
        """Return the Python stack of a worker that is late, or ``""`` if it is not available. The worker continues."""
        search = self.look_for_stack()
        while True:
            try:
                time.sleep(next(search))
            except StopIteration as finished:
                return finished.value  # type: ignore[no-any-return]

    def look_for_stack(self) -> Generator[float, None, str]:
        """Read the stack as :meth:`read_stack` does, but yield the seconds to sleep instead of sleeping."""
        stack = ""
        for number in STACK_SIGNALS:
            if not stack and not self.is_stopped() and catches_signal(self.pid, number):
                stack = yield from self._request_stack(number)
        self.stack_file.clear()
        return env_frames(stack)

    def _request_stack(self, number: int) -> Generator[float, None, str]:
        """Send a signal, and return the stack that the worker writes in response, or ``""`` if it does not begin in time."""
        self.stack_file.allow_dump()
        stack, began, cpu_before = "", time.monotonic(), self._cpu_seconds()
        self.watch.signal(number)
        while (waited := time.monotonic() - began) < _STACK_END_SECONDS and not has_all_env_frames(stack):
            yield 0.002
            stack = self.stack_file.read()
            if stack or waited <= _STACK_START_SECONDS:
                continue
            if self._state() != "R" or self._cpu_seconds() - cpu_before > _STACK_CPU_SECONDS:
                break
        return stack

    def _cpu_seconds(self) -> float:
        """Return the CPU seconds of its main thread; 0 if the kernel does not report them."""
        with contextlib.suppress(IndexError, ValueError):
            return int(read_kernel_file(f"/proc/{self.pid}/schedstat").split()[0]) * 1e-9
        return 0.0

    def is_stopped(self) -> bool:
        """True if the process is stopped (SIGSTOP); known on Linux only."""
        return self._state() in ("T", "t")

    def _state(self) -> str:
        """Return the kernel's letter for the state of the process, or ``""``."""
        return "".join(read_kernel_file(f"/proc/{self.pid}/stat").rpartition(")")[2].split()[:1])

    # -- the end -------------------------------------------------------------------------------------------------------

    def request_close(self) -> None:
        """Send the request to close its environments, which it executes after its pending messages.

        Only the first call sends anything, even if it is interrupted.
        """
        if not self._close_requested and not self.channel.closed:
            self._close_requested, self._drained_at = True, time.monotonic()
            self.channel.queue(encode(Op.CLOSE, CLOSING))
            self.flush_while_closing()

    def flush_while_closing(self) -> bool:
        """Write queued bytes; return ``False`` if the pipe is full, else ``True``, even if it is closed."""
        try:
            return self.channel.closed or self.channel.flush()
        except ChannelClosed:
            return True

    def drain(self, failures: list[Failure] | None) -> bool:
        """Read the messages that an ending worker still writes: a full pipe would keep it from ending.

        Args:
            failures: A list to which failures of its environments in ``close`` are added.

        Returns:
            ``False`` at the end of the pipe.
        """
        try:
            while (message := self.channel.receive()) is not None:
                kind, seq, payload = decode(message)
                if seq != CLOSING:
                    self._drained, self._drained_at = self._drained + 1, time.monotonic()
                elif kind == Reply.FULL and payload is not None and failures is not None:
                    outcome = decode_outcome(payload)
                    failures += outcome.failures
                    for _, text in outcome.warnings:
                        warn(f"worker {self.index} (pid {self.pid}): {text}")
        except ChannelClosed:
            return False
        return True

    def closing_deadline(self, deadline: float, step_timeout: float | None) -> float:
        """Return the time until which to wait for its exit: ``deadline``, or an earlier limit of a pending step or reset."""
        unanswered = [request for _, _, request in self.pending][self._drained :]
        if step_timeout is None or not unanswered or unanswered[0].command not in ("step", "reset"):
            return deadline
        return min(deadline, max(self._drained_at + step_timeout, self.restart_deadline))

    def release(self) -> None:
        """Close every descriptor of an ended process. Idempotent."""
        self.watch.close()
        self.channel.close()
        self.descriptors.close()
        self._running = (-1,)  # the shared memory may be unmapped
        close_process(self.process)


Worker: TypeAlias = WorkerProcess | LocalWorker


def end_workers(
    workers: Sequence[WorkerProcess], timeout: float | None, failures: list[Failure] | None = None,
    step_timeout: float | None = None,
) -> None:  # fmt: skip
    """End workers, and all processes that their environments started, within about ``timeout`` seconds.

    Args:
        workers: The workers.
        timeout: Seconds for pending messages and for their environments' own ``close``; ``None``: send SIGTERM at once,
            without a request to close.
        failures: A list to which failures of environments in ``close`` are added.
        step_timeout: Seconds, within ``timeout``, for each pending step or reset.
    """
    began = time.monotonic()
    alive = [worker for worker in workers if not worker.has_ended()]
    if timeout is not None:
        for worker in alive:
            worker.request_close()
        running = [worker for worker in alive if not worker.is_stopped()]
        _wait_for_exit(running, began + timeout, failures, step_timeout, began + REPORT_CLOSE_SECONDS)
    late = [worker for worker in alive if not worker.watch.has_ended()]
    for worker in late:
        worker.watch.signal(signal.SIGTERM)
    _wait_for_exit([worker for worker in late if not worker.is_stopped()], time.monotonic() + _TERM_GRACE_SECONDS, failures)
    for worker in alive:
        if not worker.watch.has_ended():
            worker.watch.signal(signal.SIGKILL)
    _wait_for_exit(alive, time.monotonic() + _KILL_SECONDS, failures)
    end_group(worker.pid for worker in alive)
    for worker in workers:
        if worker.exitcode is None:
            worker.exitcode = worker.watch.exit_code()
    end_marked([worker.token for worker in workers])


def _wait_for_exit(
    workers: Sequence[WorkerProcess], deadline: float, failures: list[Failure] | None,
    step_timeout: float | None = None, report_at: float = math.inf,
) -> None:  # fmt: skip
    """Wait until all workers end or ``deadline`` passes; log one line if any is still running at ``report_at``.

    Pipes are read and written for all workers at once: one that is blocked in writing a reply cannot close its environments.
    """
    if not workers:
        return  # Windows has no `poll`
    poll, worker_by_fd = select.poll(), {}
    for worker in workers:
        reply_fd, out = worker.channel.fd, worker.channel.out
        if worker.drain(failures) and reply_fd >= 0:
            worker_by_fd[reply_fd] = worker
            poll.register(reply_fd, select.POLLIN)
            if not worker.flush_while_closing():
                worker_by_fd[out] = worker
                poll.register(out, select.POLLOUT)
    for worker in workers:
        if (exit_fd := worker.watch.descriptor) < 0:
            continue
        poll.register(exit_fd, select.POLLIN)
        while not worker.watch.has_ended():
            now = time.monotonic()
            if (left := worker.closing_deadline(deadline, step_timeout) - now) <= 0:
                break
            if now >= report_at:
                report_at = math.inf
                _report_closing([worker for worker in workers if not worker.watch.has_ended()])
            for fd, _ in worker.watch.poll(poll, min(left, report_at - now) * 1000):
                if fd == exit_fd:
                    continue
                other = worker_by_fd[fd]
                is_done = other.flush_while_closing() if fd == other.channel.out else not other.drain(failures)
                if is_done:
                    poll.unregister(fd)
        poll.unregister(exit_fd)
        worker.drain(failures)


def _report_closing(workers: Sequence[WorkerProcess]) -> None:
    """Log the environment that ``close()`` is waiting for, and the number of other workers that have not ended."""
    for worker in workers[:1]:
        envs = envs_text(worker.rows, worker.running_row)  # before the signal for the stack
        location = innermost_location(worker.read_stack())
        where = f", at {location}" if location else ""
        others = f" and {len(workers) - 1} more worker{'s' * (len(workers) > 2)}" if len(workers) > 1 else ""
        _log.warning(
            "close() is waiting for %s%s (%s)%s; close(timeout=) limits the wait", envs, where, worker.label, others
        )
