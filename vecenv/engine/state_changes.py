"""The changes of an engine's state: queued messages, applied replies, and handled failures.

Nothing here writes messages or waits for replies; handling a death may wait for the process to end. All methods, except
``set_deadline`` (a single store), are called inside blocks of state changes (see :mod:`vecenv.engine.exchange`), which end
before the queued messages are written. Expected errors are returned, not raised: an exception that leaves a block counts as
an interruption, so the caller raises them after the block.

docs/architecture.md describes replies and restarts: *The life of a step*, *The life of a failure*.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from gymnasium.error import ResetNeeded

from vecenv.engine.failures import FailureLog, Policy, Rebuilder
from vecenv.engine.requests import Request
from vecenv.engine.worker_pool import WorkerPool
from vecenv.engine.worker_process import Worker, WorkerProcess
from vecenv.errors import WorkerDied
from vecenv.front.driver import Counters
from vecenv.link.channel import ChannelClosed
from vecenv.link.infos import InfoReader
from vecenv.link.messages import (
    Failure,
    Op,
    Outcome,
    Reply,
    decode,
    decode_outcome,
    find_bad_infos,
    is_call,
    name_envs,
    note_once,
    pack_head,
    packed_seq_of,
)
from vecenv.link.observations import Store
from vecenv.shm import SharedArrays
from vecenv.system.reporting import warn
from vecenv.system.signals import deferred_signals

PLAIN_REPLY: Final = int(Reply.PLAIN)  # packing an enum is slower
REBUILD_MARK: Final = 0
"""A mark in the expected reply of a pending rebuild, in place of the code of a reply (see
:data:`~vecenv.engine.worker_process.PendingMessage`). No reply has it, so that every reply to a rebuild is decoded."""
_COLUMNS_REPLY: Final = bytes([Reply.COLUMNS])
_FOR_ALL_ROWS: Final = {int(Op.STEP_SOME): int(Op.STEP), int(Op.RESET_SOME): int(Op.RESET)}


class StateChanges:
    """The changes of state of one engine: queues messages, applies replies, handles failures, keeps the rows for ``recv``.

    The workers hold the pending messages (``Worker.pending``).

    Args:
        pool: The workers.
        policy, failure_log, rebuilder: The handling of failures, their log, and the restarts.
        arrays, store, info_reader: The results, observations and infos that workers write.
        counters: The numbers of steps and resets that were returned.

    Attributes:
        in_flight: Rows that were sent and that ``recv``, or ``Submissions``, has not returned yet. This set and ``ready``
            are never replaced.
        ready: Rows in flight that ``recv`` may return, in the order in which they finished.
        resetting: Rows in flight that were reset, not stepped.
        not_stepped: Rows that are rebuilt instead of stepped, because they failed earlier; this is not counted as a step.
        ready_infos, ready_finals: By row: pickled infos and final observations of ready rows.
        unsettled: Requests for ``recv`` with failures that :meth:`settle_for_recv` has to handle.
        unraised: Exceptions that the next calls of ``recv`` raise, each with the rows that wait for it and stay in flight
            until then. The set of rows may be empty: without restarts, a row that only lacks an info or a final
            observation is ready at once.
        warned: Fields for which a warning was logged.
    """

    def __init__(
        self, pool: WorkerPool, policy: Policy, failure_log: FailureLog, rebuilder: Rebuilder, arrays: SharedArrays,
        store: Store, info_reader: InfoReader, counters: Counters,
    ) -> None:  # fmt: skip
        self.pool, self.policy, self.failure_log, self.rebuilder, self.counters = (
            pool, policy, failure_log, rebuilder, counters
        )  # fmt: skip
        self.arrays, self.store, self.info_reader, self.num_envs = arrays, store, info_reader, len(arrays.rewards)
        self._seq = 0  # the sequence number of the latest message
        self.in_flight: set[int] = set()
        self.ready: list[int] = []
        self.resetting: set[int] = set()
        self.not_stepped: set[int] = set()
        self.ready_infos: dict[int, Any] = {}
        self.ready_finals: dict[int, Any] = {}
        self.unsettled: list[Request] = []
        self.unraised: deque[tuple[Exception, set[int]]] = deque()
        self.warned: set[str] = set()

    # -- queueing ----------------------------------------------------------------------------------------------------

    def next_seq(self) -> int:
        """Return the sequence number of the next message, which is never 0."""
        self._seq = self._seq % 0xFFFFFFFF + 1
        return self._seq

    def add(self, worker: Worker, op: int, rows: Sequence[int], request: Request, payload: Any) -> None:
        """Add a pending message with a new sequence number, and queue it.

        ``STEP_SOME`` or ``RESET_SOME`` for all rows of the worker becomes ``STEP`` or ``RESET``.
        """
        if self.store.must_renew and not is_call(op):
            self.store.renew()
        seq, rebuilds = self.next_seq(), op == Op.REBUILD_SOME
        if len(rows) == len(worker.rows) and not rebuilds:
            op = _FOR_ALL_ROWS.get(op, op)
        else:
            self.arrays.requested[rows] = seq  # marks the rows of this message for the worker
        request.remaining += 1
        worker.pending.append((pack_head(REBUILD_MARK if rebuilds else PLAIN_REPLY, seq), rows, request))
        if rebuilds:
            self.set_deadline(worker)
        self.pool.queue(worker, op, seq, payload)

    def drop_all(self) -> None:
        """Drop all pending messages, and all results not returned yet. Sequence numbers identify late replies."""
        for container in (
            self.in_flight, self.ready, self.resetting, self.not_stepped, self.ready_infos, self.ready_finals,
            self.unsettled, self.unraised,
        ):  # fmt: skip
            container.clear()
        for worker in self.pool.workers:
            if worker.pending:
                worker.dropped.update((packed_seq_of(reply), request.command) for reply, _, request in worker.pending)
                worker.pending.clear()
            # now only a starting worker has a deadline
            self.set_deadline(worker)
        self.pool.drop_outside_channels()

    def record_dropped(self, command: str, failures: Iterable[tuple[Failure, Worker]]) -> None:
        """Record the fatal failures of a request that is about to be dropped, or was dropped before the reply."""
        self.failure_log.record(command, [pair for pair in failures if pair[0].fatal], mark="none")

    def drop_request(self, request: Request) -> None:
        """Drop the messages of one request, which is a call."""
        self.record_dropped(request.command, request.failures)
        for worker in self.pool.workers:
            others = [pending for pending in worker.pending if pending[2] is not request]
            dropped = [packed_seq_of(reply) for reply, _, other in worker.pending if other is request]
            self.pool.drop_held(dropped)
            worker.dropped.update(dict.fromkeys(dropped, request.command))
            worker.pending.clear()
            worker.pending.extend(others)
        if (local := self.pool.local) is not None:
            local.drop_calls()

    # -- rows that recv returns --------------------------------------------------------------------------------------

    def put_reset_in_flight(self, rows: Sequence[int]) -> None:
        """Put the rows of a reset in flight. ``recv`` returns them with reward 0 and both flags False."""
        self.in_flight.update(rows)
        self.resetting.update(rows)

    def convert_for_recv(self, request: Request) -> None:
        """Convert a reset, so that ``recv`` returns its rows as they become ready."""
        assert request.rows is not None  # every reset has rows
        rows = list(request.rows)
        request.for_recv = True
        self.put_reset_in_flight(rows)
        unanswered = {
            row
            for worker in self.pool.workers
            for _, message_rows, other in worker.pending
            if other is request
            for row in message_rows
        }
        self._make_ready(request, [row for row in rows if row not in unanswered])
        self.settle_for_recv()

    def _make_ready(self, request: Request, rows: Sequence[int]) -> None:
        """Make rows with a reply ready for ``recv``, except those that :meth:`settle_for_recv` rebuilds or raises for."""
        if request.failures or request.deaths:
            self._note_unsettled(request)
            unfinished = self._find_unfinished_rows(request)
            rows = [row for row in rows if row not in unfinished]
        if request.infos or request.finals:
            self.ready_infos.update((row, request.infos.pop(row)) for row in rows if row in request.infos)
            self.ready_finals.update((row, request.finals.pop(row)) for row in rows if row in request.finals)
        self.ready += rows

    def _note_unsettled(self, request: Request) -> None:
        if request not in self.unsettled:
            self.unsettled.append(request)

    def settle_for_recv(self) -> None:
        """Settle the failures of requests for ``recv``: the next wait writes the messages that rebuild rows, or raises."""
        while self.unsettled:
            error, unfinished = self.settle(self.unsettled[0])
            del self.unsettled[0]  # not earlier: `settle` may kill a worker, and `handle_death` would note the request again
            if error is not None:
                self.unraised.append((error, unfinished))

    def take_unraised(self) -> Exception:
        """Remove the oldest exception that ``recv`` has to raise, with its rows, and return it."""
        error, rows = self.unraised.popleft()
        self._remove_from_flight(rows)
        return error

    def remove_received(self, rows: list[int]) -> None:
        """Remove the rows that ``recv`` returns, and count them."""
        del self.ready[: len(rows)]
        resets = len(self.resetting.intersection(rows)) if self.resetting else 0
        rebuilds = len(self.not_stepped.intersection(rows)) if self.not_stepped else 0
        self.counters.resets += resets
        self.counters.steps += len(rows) - resets - rebuilds
        self._remove_from_flight(rows)

    def _remove_from_flight(self, rows: Collection[int]) -> None:
        self.in_flight.difference_update(rows)
        if self.resetting or self.not_stepped:
            self.resetting.difference_update(rows)
            self.not_stepped.difference_update(rows)
        if self.ready_infos or self.ready_finals:
            for row in rows:
                self.ready_infos.pop(row, None)
                self.ready_finals.pop(row, None)

    def count_results(self, request: Request, failed: Collection[int] = ()) -> None:
        """Count the steps or the resets of a request that one call returns, except those of rows that failed."""
        if request.command == "step":
            self.counters.steps += self.num_envs - len(self.not_stepped.union(failed))
            self.not_stepped.clear()
        elif request.command == "reset":
            assert request.rows is not None
            self.counters.resets += len(set(request.rows).difference(failed))

    # -- replies -----------------------------------------------------------------------------------------------------

    def apply_next(self, worker: WorkerProcess) -> bool:
        """Apply the next reply of a worker, or its death; ``False`` if no complete reply has arrived."""
        try:
            message = worker.channel.receive()
        except ChannelClosed:
            self.handle_death(worker)
            return True
        if message is None:
            return False
        pending = worker.pending
        if pending and (message == pending[0][0] or message == _with_columns(pending[0][0])):  # nearly always
            _, rows, request = pending.popleft()
            request.remaining -= 1
            if message[0] != PLAIN_REPLY:
                request.may_have_infos = True
            if request.for_recv:
                self.ready += rows
        else:
            self._decode_and_apply(worker, message)
        if worker.restart_deadline:
            self._restart_time_limit(worker)
        return True

    def _decode_and_apply(self, worker: WorkerProcess, message: bytes) -> None:
        code, _, payload = decode(message)
        if code == Reply.READY:  # of a replacement; `WorkerPool.start` reads those of the first processes
            ready = pickle.loads(payload or b"")
            worker.has_started, worker.start_failures = True, ready.failures if ready.ends else []
        else:
            outcome = None if payload is None else decode_outcome(payload)
            self.apply(worker, packed_seq_of(message), outcome, code != PLAIN_REPLY)

    def apply(self, worker: Worker, packed_seq: bytes, outcome: Outcome | None, may_have_infos: bool) -> None:
        """Apply a reply to its request. ``packed_seq`` is its sequence number in bytes, as in the head of a message.

        ``outcome`` is the payload of the reply, if it has one. ``may_have_infos`` is False if the reply is plain.
        """
        if outcome is not None:
            self.info_reader.learn(outcome.schemas)  # even for a dropped request: a worker rarely repeats them
            for field, text in outcome.warnings:
                if field not in self.warned:
                    self.warned.add(field)
                    warn(text)
        pending = worker.pending
        index = 0  # nearly always the right one
        while index < len(pending) and pending[index][0][1:] != packed_seq:
            index += 1
        if index == len(pending):  # the request was dropped
            # no entry if an exception interrupted `drop_request` before it put the other messages back
            command = worker.dropped.pop(packed_seq, "step")
            if outcome is not None:
                self.record_dropped(command, [(failure, worker) for failure in outcome.failures])
            return
        expected_reply, rows, request = pending[index]
        del pending[index]
        request.remaining -= 1
        if may_have_infos:
            request.may_have_infos = True
        if outcome is not None:
            request.create_containers()
            for row, observation in outcome.observations.items():
                self.store.accept(row, observation)
            request.infos.update(outcome.infos)
            request.finals.update(outcome.finals)
            request.results.update(outcome.results)
            request.failures += [(failure, worker) for failure in outcome.failures]
            if self.policy.restart:
                self._refuse_bad_infos(worker, outcome, request)
        if expected_reply[0] == REBUILD_MARK:
            self._finish_rebuilds(request, rows)
        if request.for_recv:
            self._make_ready(request, rows)

    def _finish_rebuilds(self, request: Request, rows: Sequence[int]) -> None:
        """Write the results of rows that were rebuilt. The next ``settle`` rebuilds those that failed again."""
        failed = {failure.env for failure, _ in request.failures}
        rebuilt = [row for row in rows if row not in failed]
        self.failure_log.forget(rebuilt)
        self.failure_log.restart_counted -= failed
        self.rebuilder.write_rebuilt_results(request, rebuilt)

    # -- failures ----------------------------------------------------------------------------------------------------

    def _refuse_bad_infos(self, worker: Worker, outcome: Outcome, request: Request) -> None:
        """Treat infos that are not dicts as failures of their environments, so that these are rebuilt."""
        for failure in find_bad_infos(outcome):
            request.failures.append((failure, worker))
            del request.infos[failure.env]

    def settle(self, request: Request) -> tuple[Exception | None, set[int]]:
        """Record the failures of a request. Then queue rebuilds of the failed rows, or return the exception to raise.

        A step of a finished environment is the caller's error, so it is raised even with restarts. Failed rows then stay
        failed, and their next step rebuilds them.

        Returns:
            The exception or ``None``, and the rows of ``_find_unfinished_rows``.
        """
        runs_episodes = request.command in ("step", "reset")
        refused = any(failure.refused for failure, _ in request.failures)
        rebuilds = self.policy.restart and runs_episodes and not refused and not self._lacks_reset(request)
        unfinished = self._find_unfinished_rows(request)
        self.store.restore_rows(unfinished)  # with lending, their rows of the new batch may be undefined
        raised = self.failure_log.record(request.command, request.failures, mark="all" if rebuilds else "fatal")
        error: Exception | None
        if rebuilds:
            self._end_workers_out_of_memory(request.command, raised)
            unfinished |= self._find_unfinished_rows(request)  # with unanswered rows of the workers just killed
            error = self.queue_rebuilds(request, sorted(unfinished))
            if error is not None and not isinstance(error, WorkerDied):
                name_envs(error, unfinished)
        else:
            error = self.failure_log.combine(request, raised)
            if request.deaths and self.policy.restart:
                note_once(error, "the next step() or reset() rebuilds the environments of dead workers")
            elif request.deaths and runs_episodes:
                note_once(
                    error, "reset() rebuilds the environments of dead workers; on_failure='restart' does so automatically"
                )
            if raised and request.command == "step" and not self.counters.resets and not isinstance(error, ResetNeeded):
                note_once(error, "reset() was never called")
        request.failures.clear()
        request.deaths.clear()
        request.lost.clear()
        return error, unfinished

    def _find_unfinished_rows(self, request: Request) -> set[int]:
        """Return the rows without a valid result: lost with a worker, failed without a result or, with restarts, failed.

        :meth:`settle` rebuilds them, or returns an exception for them; until then, ``recv`` does not return them.
        """
        restart = self.policy.restart
        return {failure.env for failure, _ in request.failures if restart or not failure.has_result} | request.lost

    def _lacks_reset(self, request: Request) -> bool:
        """True if environments raised in a step before any reset, and without an earlier step or load."""
        if request.command != "step" or self.counters.resets or request.deaths or request.rebuilding:
            return False
        return all(self.rebuilder.last_good.copy_row(failure.env) is None for failure, _ in request.failures)

    def _end_workers_out_of_memory(self, command: str, raised: Sequence[tuple[int, Exception]]) -> None:
        """Kill workers with an environment that raised ``MemoryError``: their memory may be full of a library's data."""
        for row, error in raised:
            worker, _ = self.pool.split([row])[0]
            if isinstance(error, MemoryError) and isinstance(worker, WorkerProcess) and worker.death is None:
                worker.noted_activity = command, row
                worker.kill_reason = f"{self.failure_log.failed[row]}, so it was killed"
                worker.watch.signal(signal.SIGKILL)
                self.handle_death(worker)

    def queue_rebuilds(self, request: Request, rows: Sequence[int]) -> Exception | None:
        """Queue messages that rebuild and reset the environments of failed rows; return the error if that is impossible."""
        request.create_containers()
        error: Exception | None = self.rebuilder.count_restarts(rows, self.pool.workers)
        if error is None:
            error = self.replace_dead(rows)
        if error is not None:
            return error
        parts = self.pool.split(rows)
        payloads = self.rebuilder.prepare_rebuilds(request, [worker_rows for _, worker_rows in parts])
        if isinstance(payloads, Exception):
            return payloads
        for (worker, worker_rows), payload in zip(parts, payloads, strict=True):
            self.add(worker, Op.REBUILD_SOME, worker_rows, request, self.pool.pickle_for(worker, payload))
        return None

    def handle_undetected_deaths(self, rows: Collection[int]) -> None:
        """Handle the deaths of these rows' workers that no wait has detected."""
        for worker in self.pool.processes:
            if (worker.kill_reason or worker.has_ended()) and not set(rows).isdisjoint(worker.rows):
                self.handle_death(worker)
        self.settle_for_recv()

    def replace_dead(self, rows: Sequence[int]) -> Exception | None:
        """Replace the dead workers of these rows without waiting for the new ones; return the error if one cannot start."""
        for worker in list(self.pool.processes):
            if worker.death is not None and not set(rows).isdisjoint(worker.rows):
                with deferred_signals():  # so that the exception is not a signal handler's
                    try:
                        self.set_deadline(self.pool.replace(worker))
                    except Exception as error:
                        return error
        return None

    def _restart_time_limit(self, worker: WorkerProcess) -> None:
        """Let the time limit of a worker's next message count from now: the caller's wait or the deadline began earlier."""
        worker.limit_from = time.monotonic()
        self.set_deadline(worker)

    def set_deadline(self, worker: Worker) -> None:
        """Set the deadline of a process that starts or, with ``step_timeout``, has to rebuild; otherwise remove it."""
        start, step = self.policy.start_timeout, self.policy.step_timeout
        rebuilds = step is not None and any(reply[0] == REBUILD_MARK for reply, *_ in worker.pending)
        is_limited = rebuilds or not worker.has_started
        worker.restart_deadline = time.monotonic() + start + (step or 0.0) if is_limited else 0.0

    def handle_death(self, worker: WorkerProcess) -> None:
        """Record the death of a worker, once. Its pending messages are lost.

        A reply of a worker that was killed for a hang is not applied: the signal for its stack may have ended the hang with
        an error that is not the environment's. Messages to a worker that is known to be dead are lost, too: there should be
        none, but a wait for them would never end.
        """
        if worker.death is not None and not worker.pending:
            return
        if worker.hung_for is None and worker.death is None:
            with contextlib.suppress(ChannelClosed):  # after the replies that it wrote before it ended
                while (message := worker.channel.receive()) is not None:
                    self._decode_and_apply(worker, message)
        pending = list(worker.pending)
        with deferred_signals():  # a reset after an interruption could not complete this
            is_new = worker.death is None
            death = worker.reap()
            if is_new:
                self.failure_log.record_death(death)
            self.pool.drop_messages(worker)
        worker.pending.clear()
        for _, rows, request in pending:
            request.create_containers()
            request.remaining -= 1
            request.lost.update(rows)
            in_rebuild = request.rebuilding.keys() & set(rows)
            self.failure_log.restart_counted -= in_rebuild  # a death during their rebuild counts as another restart
            for row in in_rebuild:
                del request.rebuilding[row]
            if death not in request.deaths:
                request.deaths.append(death)
            if worker.start_failures:  # its own report is better than its exit code
                request.failures += [(failure, worker) for failure in worker.start_failures if failure.env in rows]
        for request in dict.fromkeys(request for _, _, request in pending if request.for_recv):
            self._note_unsettled(request)


def _with_columns(expected_reply: bytes) -> bytes:
    """Return an expected plain reply with the code COLUMNS; return the expected reply to a rebuild unchanged."""
    return _COLUMNS_REPLY + expected_reply[1:] if expected_reply[0] == PLAIN_REPLY else expected_reply
