"""The exchange of messages with workers: submits requests, waits, applies replies, and handles failures.

A signal handler can raise between any two bytecodes. So state changes only in short blocks between ``state.changing = True``
and ``state.changing = False``, and no block waits for a reply. An exception during a *wait* loses nothing, and the wait can
be repeated. An exception in a *block* may lose a request or a result: ``changing`` stays set, every call but ``reset()``
raises ``ResetNeeded``, and ``reset()`` drops all pending requests. Blocks only queue messages, which are written afterwards,
because a write can wake a worker that then takes the caller's core for a whole step. The caller's own environments are
stepped inside a block.

docs/architecture.md describes replies and restarts: *The life of a step*, *The life of a failure*.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import numpy as np

from vecenv.engine.failures import FailureLog, Policy, Rebuilder
from vecenv.engine.requests import Request, reset_payload
from vecenv.engine.worker_pool import WorkerPool
from vecenv.engine.worker_process import LAST_STEP_OP, LocalWorker, Worker, WorkerProcess
from vecenv.errors import failed_earlier_error
from vecenv.front.arguments import ResetOptions, deadline_after, earlier_deadline
from vecenv.front.driver import (
    Counters,
    RequestSummary,
    require_no_step,
    require_order,
    too_few_in_flight_error,
    wait_method,
)
from vecenv.front.guard import CallState
from vecenv.link.channel import ChannelClosed
from vecenv.link.infos import NO_INFO, InfoReader
from vecenv.link.messages import HEAD, PLAIN_OUTCOME, Op, Outcome, Reply, decode, decode_outcome, pack_head
from vecenv.link.observations import Store
from vecenv.shm import Batch
from vecenv.system.reporting import warn
from vecenv.system.supervision import innermost_location

_STEP, _STEP_SOME, _PLAIN = int(Op.STEP), int(Op.STEP_SOME), int(Reply.PLAIN)  # packing an enum is slower
_FOR_ALL_ROWS: Final = {_STEP_SOME: _STEP, int(Op.RESET_SOME): int(Op.RESET)}
_NEVER_PLAIN: Final = 0
"""The code of a pending message if its reply ends a rebuild's time limit. No reply has it, so ``_apply`` handles that."""


class Exchange:
    """The exchange of messages between one engine and its workers.

    Args:
        state: The state of the current call, shared with the guard.
        pool: The workers.
        policy, failures, rebuilder: The handling of failures, their log, and the restarts.
        batch, store, infos: The results, observations and infos that workers write.
        counters: The numbers of steps and resets that were returned.

    Attributes:
        request: The pending request, if one method returns all its results together; otherwise ``None``.
        in_flight: Rows that were sent and that ``recv`` has not returned yet.
        ready: Rows in flight that ``recv`` may return, in the order in which they finished.
        resetting: Rows in flight that were reset, not stepped.
        not_counted: Rows that are rebuilt instead of stepped, because they failed earlier; this is not counted as a step.
        ready_infos, ready_finals: By row: pickled infos and final observations of ready rows.
        unsettled: Requests for ``recv`` with failures that :meth:`settle_received` has to handle.
        unraised: Exceptions that the next calls of ``recv`` raise, each with its rows, which are in flight until then.
        warned: Fields for which a warning was logged.
        rows_at_once: The maximum number of rows in one message of ``send``; ``None`` for no limit.
    """

    def __init__(
        self, state: CallState, pool: WorkerPool, policy: Policy, failures: FailureLog, rebuilder: Rebuilder, batch: Batch,
        store: Store, infos: InfoReader, counters: Counters,
    ) -> None:  # fmt: skip
        self.state, self.pool, self.policy = state, pool, policy
        self.failures, self.rebuilder, self.counters = failures, rebuilder, counters
        self.batch, self.store, self.infos = batch, store, infos
        self.num_envs = len(batch.rewards)
        self.request: Request | None = None
        self.in_flight: set[int] = set()
        self.ready: list[int] = []
        self.resetting: set[int] = set()
        self.not_counted: set[int] = set()
        self.ready_infos: dict[int, Any] = {}
        self.ready_finals: dict[int, Any] = {}
        self.unsettled: list[Request] = []
        self.unraised: deque[tuple[Exception, set[int]]] = deque()
        self.warned: set[str] = set()
        self.rows_at_once: int | None = None
        self._own_share_deferred = False  # the last wait deferred the caller's own share, because a worker had a reply
        self._seq = 0

    # -- sending -----------------------------------------------------------------------------------------------------

    def send_plain_step(self, *, for_recv: bool) -> None:
        """Send a step of all rows, with the actions in shared memory."""
        pool = self.pool
        if pool.max_concurrency is not None:
            self.send_step(range(self.num_envs), None, for_recv=for_recv)
            return
        workers = pool.workers
        self.state.changing = True
        self._seq = seq = self._seq % 0xFFFFFFFF + 1
        request = Request("step", len(workers), for_recv)
        expected = pack_head(_PLAIN, seq)
        for worker in workers:
            worker.pending.append((expected, worker.rows, request))
        if for_recv:
            self.in_flight.update(range(self.num_envs))
        else:
            self.request = request
        pool.queue_for_all(_STEP, seq)
        self.state.changing = False
        if pool.processes:
            pool.write_to_all()

    def send_step(self, rows: Sequence[int], actions: list[Any] | None, *, for_recv: bool) -> None:
        """Send a step of some rows. ``actions`` are in the order of ``rows``, or ``None`` if they lie in shared memory."""
        action_by_row = None if actions is None else dict(zip(rows, actions, strict=True))
        failed = self._find_failed(rows)
        good = sorted(set(rows).difference(failed) if failed else rows)
        size = self.rows_at_once if for_recv else None
        pickled, messages = self.pool.pickled, list(self.pool.split_into_rounds(good, size))
        payloads = [
            pickled(worker, action_by_row and [action_by_row[row] for row in mine])  # may raise
            for _, worker, mine in messages
        ]
        self.state.changing = True
        request = Request("step", 0, for_recv)
        if failed:
            if not self.policy.restart:  # they failed after the engine's check, during an observer's call
                self.state.changing = False
                raise failed_earlier_error({row: self.failures.failed[row] for row in failed})
            if (error := self._queue_rebuilds(request, failed)) is not None:
                self.state.changing = False
                raise error
            self.not_counted.update(failed)
        latest_round = -1
        for (send_round, worker, mine), payload in zip(messages, payloads, strict=True):
            if send_round != latest_round:
                latest_round = send_round
                self.next_number()
            self.queue(worker, _STEP_SOME, mine, request, payload)
        if for_recv:
            self.in_flight.update(rows)
        else:
            self.request = request
        self.state.changing = False
        self.flush()

    def _find_failed(self, rows: Sequence[int]) -> list[int]:
        """Return the rows that have to be rebuilt, including those of a worker that has died since one of them failed."""
        failed = self.failures.failed
        if not failed:
            return []
        self.state.changing = True
        self.find_deaths(failed.keys() & set(rows))
        self.state.changing = False
        return sorted(failed.keys() & set(rows))

    def send_reset(self, rows: Sequence[int], seeds: list[Any], options: ResetOptions, *, for_recv: bool) -> None:
        """Send a reset of some rows and replace their dead workers. Unless ``for_recv``, first drop all pending requests."""
        payloads = self.pickled_reset(rows, seeds, options)  # may raise
        self.state.changing = True
        if not for_recv:
            self.drop_pending()
        if not for_recv and len(rows) < self.num_envs:
            others = np.isin(np.arange(self.num_envs), rows, invert=True)
            self.batch.info_schemas[others], self.batch.final[others] = NO_INFO, False
            self.rebuilder.restore_observations(self.failures.failed.keys() - set(rows))
        self.find_deaths(rows)
        if (error := self.replace_dead(rows)) is not None:
            self.state.changing = False
            raise error
        self.failures.forget(rows)
        request = Request("reset", 0, for_recv)
        request.seeds, request.options, request.rows = seeds, options, rows
        self.next_number()
        for (worker, mine), payload in zip(self.pool.split(rows), payloads, strict=True):
            self.queue(worker, Op.RESET_SOME, mine, request, payload)
        if for_recv:
            self.put_reset_in_flight(rows)
        else:
            self.request = request
        self.state.changing = False
        self.flush()

    def pickled_reset(self, rows: Sequence[int], seeds: list[Any], options: ResetOptions) -> list[Any]:
        """Return the payload of a reset for each worker of these rows."""
        return [self.pool.pickled(worker, reset_payload(mine, seeds, options)) for worker, mine in self.pool.split(rows)]

    def next_number(self) -> None:
        """Advance the sequence number, which is never 0, for the messages that are queued next."""
        self._seq = self._seq % 0xFFFFFFFF + 1

    def queue(self, worker: Worker, op: int, rows: Sequence[int], request: Request, payload: Any) -> None:
        """Queue a message with the latest number. ``STEP_SOME`` for all rows of a worker becomes ``STEP``; resets too."""
        seq = self._seq
        if len(rows) == len(worker.rows):
            op = _FOR_ALL_ROWS.get(op, op)
        else:
            self.batch.requested[rows] = seq  # marks the rows of this message for the worker
        request.remaining += 1
        expected = _NEVER_PLAIN if worker.rebuild_deadline else _PLAIN  # `_apply` ends the deadline
        worker.pending.append((pack_head(expected, seq), rows, request))
        self.pool.queue(worker, op, seq, payload)

    def drop_pending(self) -> None:
        """Drop all pending requests and all results not returned yet. Sequence numbers identify late replies."""
        self.request = None
        for container in (
            self.in_flight, self.ready, self.resetting, self.not_counted, self.ready_infos, self.ready_finals,
            self.unsettled, self.unraised,
        ):  # fmt: skip
            container.clear()
        for worker in self.pool.workers:
            worker.pending.clear()
            if isinstance(worker, WorkerProcess) and worker.rebuild_deadline:
                self._limit_rebuild(worker)  # it is still starting, or executing a dropped message
        self.pool.drop_unsent()

    def drop_if_droppable(self) -> bool:
        """Drop a pending call that an interrupted method left behind; return ``True`` if no request is pending now."""
        if self.request is None:
            return True
        if not self.request.droppable:
            return False
        request = self.request
        self.state.changing = True
        for worker in self.pool.workers:
            others = [pending for pending in worker.pending if pending[2] is not request]
            worker.pending.clear()
            worker.pending.extend(others)
        if (local := self.pool.local) is not None:
            local.drop_calls()
        self.request = None
        self.state.changing = False
        return True

    def begin_call(
        self, command: str, op: Op, build_payload: Callable[[Worker], Any], announce: Callable[[], None] | None = None
    ) -> None:
        """Submit a request to each worker for which ``build_payload`` returns a payload, and ``announce`` it before."""
        parts = [(worker, payload) for worker in self.pool.workers if (payload := build_payload(worker)) is not None]
        payloads = [self.pool.pickled(worker, payload) for worker, payload in parts]  # may raise
        if dead := [row for worker, _ in parts if worker.death is not None for row in worker.rows]:
            raise failed_earlier_error({row: self.failures.failed.get(row, "its worker died") for row in dead})
        if announce is not None:
            announce()
        self.state.changing = True
        request = Request(command, 0, for_recv=False)
        request.droppable = True
        self.next_number()
        for (worker, _), payload in zip(parts, payloads, strict=True):
            self.queue(worker, op, worker.rows, request, payload)
        self.request = request
        self.state.changing = False
        self.flush()

    def finish_call(self, timeout: float | None = None) -> dict[int, Any]:
        """Return the results of the pending call, by row.

        Args:
            timeout: Seconds to wait.

        Raises:
            StepTimeout: Replies are late; the call stays pending.
            Exception: What the call raised in an environment.
        """
        request = self.request
        assert request is not None
        if request.remaining and not self.wait_for(request, deadline_after(timeout)):
            raise self.pool.timeout_error(wait_method(request.command), timeout)
        if request.has_failed and (error := self.settle(request)) is not None:
            try:
                raise error
            finally:
                del error, request
        self.state.changing = not request.droppable  # until the guard has returned the results
        self.request = None
        return request.results

    def count_results(self, request: Request) -> None:
        if request.command == "step":
            self.counters.steps += self.num_envs - len(self.not_counted)
            self.not_counted.clear()
        elif request.command == "reset":
            self.counters.resets += self.num_envs if request.rows is None else len(request.rows)

    # -- rows that recv returns --------------------------------------------------------------------------------------

    def put_reset_in_flight(self, rows: Sequence[int]) -> None:
        """Put the rows of a reset in flight, so that ``recv`` returns them."""
        batch = self.batch
        batch.rewards[rows], batch.terminations[rows], batch.truncations[rows] = 0.0, False, False
        self.in_flight.update(rows)
        self.resetting.update(rows)

    def drain(self) -> None:
        """Wait for all replies before a reset that drops all results: of some rows, or of all while messages are held.

        A worker reads a message's rows from shared memory when it starts on it; a reset before that would overwrite them.
        ``StepTimeout`` names ``recv``, not the reset that called this.
        """
        limit = self.policy.step_timeout
        deadline = deadline_after(limit)
        while any(worker.pending for worker in self.pool.workers):
            if not self._wait_for_any(deadline):
                deadline = self._kill_hanging("recv", limit)

    def convert_for_recv(self, request: Request) -> None:
        """Convert the pending reset into one with rows that ``recv`` returns as they become ready.

        Raises:
            AlreadyPendingCallError: The pending request is not a reset.
        """
        if request.command != "reset":
            require_no_step(RequestSummary(request.phase, self.num_envs, for_recv=False))
            require_order(request.phase, "reset_async", self, name="recv")
        rows = list(range(self.num_envs)) if request.rows is None else list(request.rows)
        self.state.changing = True
        self.request, request.for_recv = None, True
        self.put_reset_in_flight(rows)
        waiting = {
            row for worker in self.pool.workers for _, mine, other in worker.pending if other is request for row in mine
        }
        self._make_ready(request, [row for row in rows if row not in waiting])
        self.settle_received()
        self.state.changing = False
        self.flush()

    def _make_ready(self, request: Request, rows: Sequence[int]) -> None:
        """Make rows with a reply ready for ``recv``, except for those that failed, which are settled later."""
        if request.has_failed:
            if request not in self.unsettled:
                self.unsettled.append(request)
            failed = self._find_rows_to_settle(request)
            rows = [row for row in rows if row not in failed]
        if request.infos or request.finals:
            self.ready_infos.update((row, request.infos.pop(row)) for row in rows if row in request.infos)
            self.ready_finals.update((row, request.finals.pop(row)) for row in rows if row in request.finals)
        self.ready += rows

    def _find_rows_to_settle(self, request: Request) -> set[int]:
        """Return the rows that ``settle`` rebuilds or raises for, so that they do not become ready now."""
        restart = self.policy.restart
        return {failure.env for failure, _ in request.failures if restart or not failure.has_result} | request.lost

    def settle_received(self) -> None:
        """Settle the failures of requests for ``recv``: the next wait writes the messages that rebuild rows, or raises."""
        while self.unsettled:
            request = self.unsettled.pop(0)
            failed = self._find_rows_to_settle(request)
            if (error := self.settle(request, failed)) is not None:
                self.unraised.append((error, failed))

    def wait_for_rows(self, count: int, deadline: float | None, least: tuple[int, float] | None) -> bool:
        """Wait until ``count`` rows are ready; ``False`` if the deadline passes first. Raises the first of ``unraised``.

        With ``least`` (number, time), that number is enough from that time on, or if no more rows are in flight.
        """
        limit = self.policy.step_timeout if deadline is None else None
        deadline = deadline_after(limit) if deadline is None else deadline
        enough, enough_from = (count, math.inf) if least is None else least
        are_all = least is None and count == self.num_envs
        while True:
            if self.unraised:
                self._raise_next()
            ready = len(self.ready)
            if ready >= count:
                return True
            num_unready = len(self.in_flight) - ready
            if ready + num_unready < enough:
                raise too_few_in_flight_error(enough, num_unready, ready)
            if least is not None and ready >= enough:
                until = enough_from if deadline is None else min(enough_from, deadline)
                if not num_unready or not self._wait_for_any(None if until == math.inf else until):
                    return True
                if time.monotonic() >= until:
                    return True
            elif not (self._wait_for_all if are_all and len(self.in_flight) == count else self._wait_for_any)(deadline):
                self._apply_arrived_replies()
                if self.unraised or len(self.ready) >= count:
                    continue
                if limit is None:
                    return False
                deadline = self._kill_hanging("recv", limit)

    def _raise_next(self) -> None:
        self.state.changing = True
        error, rows = self.unraised.popleft()
        self.in_flight -= rows
        self.resetting -= rows
        self.not_counted -= rows
        self.state.changing = False
        try:
            raise error
        finally:
            del error

    def remove_received(self, listed: list[int]) -> None:
        """Remove the rows that ``recv`` returns, and count them."""
        del self.ready[: len(listed)]
        self.in_flight.difference_update(listed)
        steps = len(listed)
        if self.resetting:
            resets = len(self.resetting.intersection(listed))
            self.resetting.difference_update(listed)
            self.counters.resets += resets
            steps -= resets
        if self.not_counted:
            steps -= len(self.not_counted.intersection(listed))
            self.not_counted.difference_update(listed)
        self.counters.steps += steps
        if self.ready_infos or self.ready_finals:
            for row in listed:
                self.ready_infos.pop(row, None)
                self.ready_finals.pop(row, None)

    # -- writing and waiting -----------------------------------------------------------------------------------------

    def release(self) -> None:
        """Drop the pending request and all references to shared memory, on closing."""
        self.request = None
        for name in ("batch", "store", "infos", "rebuilder"):
            self.__dict__.pop(name, None)

    def flush(self) -> None:
        """Write queued messages, as far as the pipes and ``max_concurrency`` allow. An interrupted flush can be repeated."""
        pool = self.pool
        if len(pool.written) < len(pool.processes) or pool.held:
            self.state.changing = True
            if len(pool.written) < len(pool.processes):
                pool.queue_rest()
            pool.release_held()
            self.state.changing = False
        for worker in pool.flush():
            self.state.changing = True
            self.handle_death(worker)
            self.settle_received()
            self.state.changing = False

    def wait_for(self, request: Request, deadline: float | None) -> bool:
        """Wait for all replies to a request; ``False`` if the deadline passes first.

        Raises:
            StepTimeout: There is no deadline, replies are missing after ``step_timeout``, and failures are not restarted.
        """
        beside = bool(self.in_flight)  # a call beside rows of `send`; their steps come first and may hang
        limit = self.policy.step_timeout if deadline is None and (beside or request.command in ("step", "reset")) else None
        if limit is not None:
            deadline = time.monotonic() + limit
        wait = self._wait_for_any if beside else self._wait_for_all
        while request.remaining:
            if wait(deadline):
                continue
            self._apply_arrived_replies()
            if limit is None:
                return not request.remaining
            method = request.command if request.droppable else wait_method(request.command)
            deadline = self._kill_hanging(method, limit, request if beside else None)
        return True

    def _wait_for_all(self, deadline: float | None) -> bool:
        """Wait until no worker has a pending message or ``recv`` has to raise; ``False`` if the deadline passes first.

        Waits for one worker after another: most reply during the first wait, so the caller wakes up once or twice per step.
        """
        pool, workers = self.pool, self.pool.processes
        self.execute_own_messages()
        for position, index in enumerate(pool.wait_order):
            may_have_replied = position > 0
            while (worker := workers[index]).pending:  # a dead worker may be replaced meanwhile
                ended: bool | None = False
                if not may_have_replied:
                    if pool.unsent or pool.held or len(pool.written) < len(workers):
                        if not self._wait_for_any(deadline):
                            return False
                        continue
                    due = earlier_deadline(deadline, worker.rebuild_deadline)
                    ended = pool.wait_for_one(worker, due)
                    if ended is None:
                        if due == deadline:
                            return False
                        self._kill_late_rebuild(worker)
                        continue
                self.state.changing = True
                received = may_have_replied = self.receive(worker)
                if ended and not received:
                    self.handle_death(worker)
                if self.unsettled:
                    self.settle_received()
                self.state.changing = False
                if self.unraised:
                    return True
        return True

    def _wait_for_any(self, deadline: float | None) -> bool:
        """Wait for replies and apply those that have arrived; ``False`` if the deadline passes first."""
        self.flush()
        pool = self.pool
        local = pool.local
        if local is not None and local.messages:
            if self._own_share_deferred or not (pool.processes and pool.has_reply()):
                self._own_share_deferred = False
                self._step_own_share(local)
                return True
            self._own_share_deferred = True  # workers that always have a reply would starve the caller's own share
        if not pool.processes:
            return True
        rebuilding = [worker for worker in pool.processes if worker.rebuild_deadline and worker.death is None]
        first = min(rebuilding, key=lambda worker: worker.rebuild_deadline, default=None)
        due = deadline if first is None else earlier_deadline(deadline, first.rebuild_deadline)
        events = pool.wait(due)
        if events is None:
            if due == deadline or first is None:
                return False
            self._kill_late_rebuild(first)
            return True
        self.state.changing = True
        for worker, ended in events:
            if worker.death is None and not self.receive(worker) and ended:
                self.handle_death(worker)
        self.settle_received()
        self.state.changing = False
        if pool.unsent:  # rebuild messages, which have a time limit
            self.flush()
        return True

    # -- replies -----------------------------------------------------------------------------------------------------

    def _apply_arrived_replies(self) -> None:
        """Apply all replies that have arrived, including those of workers that were not waited for."""
        for worker in self.pool.processes:
            self.state.changing = True
            while worker.pending and worker.death is None and self.receive(worker):
                pass
            self.settle_received()
            self.state.changing = False

    def receive(self, worker: WorkerProcess) -> bool:
        """Apply the next reply of a worker, or its death; ``False`` if no complete reply has arrived."""
        try:
            message = worker.channel.receive()
        except ChannelClosed:
            self.handle_death(worker)
            return True
        if message is None:
            return False
        pending = worker.pending
        if pending and message == pending[0][0]:  # nearly always
            _, rows, request = pending.popleft()
            request.remaining -= 1
            if request.for_recv:
                self.ready += rows
        else:
            self._apply_message(worker, message)
        return True

    def _apply_message(self, worker: WorkerProcess, message: bytes) -> None:
        code, _, payload = decode(message)
        if code == Reply.READY:
            worker.set_ready(payload)
            if self.policy.step_timeout is None:
                worker.rebuild_deadline = 0.0
        else:
            worker.start_failures = []  # it has built its environments by now
            outcome = None if payload is None else decode_outcome(payload)
            self._apply(worker, message[1:HEAD], outcome, code != _PLAIN)

    def execute_own_messages(self) -> None:
        """Execute all messages to the caller's own share."""
        local = self.pool.local
        if local is not None:
            while local.messages:
                self._step_own_share(local)

    def _step_own_share(self, local: LocalWorker) -> None:
        """Execute the next message to the caller's own share. An interrupted step leaves it in an undefined state."""
        op, seq, _ = local.messages[0]
        is_call = op > LAST_STEP_OP  # an interrupted call leaves the environments usable
        self.state.changing = not is_call
        try:
            outcome = local.execute_next()
        except BaseException:
            if is_call:  # there will be no reply, so the next call drops the request
                local.pending[0][2].droppable = True
            raise
        self.state.changing = True
        if op == _STEP and outcome is PLAIN_OUTCOME:  # nearly always, and as in `receive`
            _, rows, request = local.pending.popleft()
            request.remaining -= 1
            if request.for_recv:
                self.ready += rows
        else:
            has_payload = outcome.has_payload()
            number = pack_head(_NEVER_PLAIN, seq)[1:]
            self._apply(local, number, outcome if has_payload else None, outcome.columns or has_payload)
            self.settle_received()
        self.state.changing = False

    def _apply(self, worker: Worker, number: bytes, outcome: Outcome | None, has_infos: bool) -> None:
        """Apply a reply to its request, which ``number`` identifies: a sequence number, as in the head of a message.

        ``has_infos``: infos or final observations lie in shared memory, or in ``outcome``, the pickled part of the reply.
        """
        if outcome is not None:
            self.infos.learn(outcome.schemas)  # even for a dropped request: a worker rarely repeats them
            for field, text in outcome.warnings:
                if field not in self.warned:
                    self.warned.add(field)
                    warn(text)
        pending = worker.pending
        index = 0  # nearly always the right one
        while index < len(pending) and pending[index][0][1:] != number:
            index += 1
        if index == len(pending):  # the request was dropped
            if not pending:
                worker.rebuild_deadline = 0.0
            if outcome is not None:
                failures = [(failure, worker) for failure in outcome.failures if failure.fatal]
                self.failures.record("step", failures, mark="none")
            return
        expected, rows, request = pending[index]
        del pending[index]
        if expected[0] == _NEVER_PLAIN:
            self._end_rebuild_limit(worker)
        request.remaining -= 1
        if has_infos:
            request.has_infos = True
        if outcome is not None:
            request.collect()
            for row, observation in outcome.observations.items():
                self.store.accept(row, observation)
            request.infos.update(outcome.infos)
            request.finals.update(outcome.finals)
            request.results.update(outcome.results)
            request.failures += [(failure, worker) for failure in outcome.failures]
        if request.rebuilding:
            self._apply_rebuilt(request, rows)
        if request.for_recv:
            self._make_ready(request, rows)

    def _apply_rebuilt(self, request: Request, rows: Sequence[int]) -> None:
        """End the episodes of rows that were rebuilt. The next ``settle`` rebuilds those that failed again."""
        failed = {failure.env for failure, _ in request.failures}
        rebuilt = [row for row in rows if row in request.rebuilding and row not in failed]
        self.failures.forget(rebuilt)
        self.failures.counted -= failed
        self.rebuilder.end_episodes(request, rebuilt)

    # -- failures ----------------------------------------------------------------------------------------------------

    def settle(self, request: Request, rows_to_rebuild: Collection[int] = ()) -> Exception | None:
        """Record the failures of a request. Return the exception to raise, or queue messages that rebuild the rows.

        Args:
            request: The request. An error finishes it, unless it is for ``recv``.
            rows_to_rebuild: The rows to rebuild if the request is for ``recv``; otherwise all rows that failed are rebuilt.
        """
        within_block, self.state.changing = self.state.changing, True
        rebuilds = self.policy.restart and request.command in ("step", "reset")
        raised = self.failures.record(request.command, request.failures, mark="all" if rebuilds else "fatal")
        error: Exception | None
        if rebuilds:
            failed = {failure.env for failure, _ in request.failures} | request.lost
            error = self._queue_rebuilds(request, sorted(rows_to_rebuild if request.for_recv else failed))
        else:
            error = self.failures.combine(request, raised)
        request.failures.clear()
        request.deaths.clear()
        request.lost.clear()
        if error is not None and not request.for_recv:
            self.request = None
            self.count_results(request)
        self.state.changing = within_block
        return error

    def _queue_rebuilds(self, request: Request, rows: Sequence[int]) -> Exception | None:
        """Queue messages that rebuild and reset the environments of failed rows; return the error if that is impossible."""
        request.collect()
        error: Exception | None = self.rebuilder.count_restarts(rows, self.pool.workers)
        if error is None:
            error = self.replace_dead(rows)
        if error is None:
            for worker, mine in self.pool.split(rows):
                self._queue_rebuild(worker, mine, request)
        return error

    def find_deaths(self, rows: Collection[int]) -> None:
        """Handle the deaths of workers of these rows that no wait has noticed."""
        for worker in self.pool.processes:
            if (worker.kill_reason or worker.has_ended()) and not set(rows).isdisjoint(worker.rows):
                self.handle_death(worker)
        self.settle_received()

    def replace_dead(self, rows: Sequence[int]) -> Exception | None:
        """Replace the dead workers of these rows without waiting for the new ones; return the error if one cannot start."""
        for worker in list(self.pool.processes):
            if worker.death is not None and not set(rows).isdisjoint(worker.rows):
                try:
                    self._limit_rebuild(self.pool.replace(worker))
                except OSError as error:
                    if isinstance(error, TimeoutError):  # of a signal handler with a time limit, not of the start
                        raise
                    return error
        return None

    def _limit_rebuild(self, worker: WorkerProcess) -> None:
        """Limit the time of a worker to start, and with ``step_timeout`` also that to rebuild and reset environments."""
        start, step = self.policy.start_timeout, self.policy.step_timeout
        if step is not None or not worker.ready:
            worker.rebuild_deadline = time.monotonic() + start + (step or 0.0)

    def _end_rebuild_limit(self, worker: Worker) -> None:
        """End the time limit of a rebuild that the worker has replied to, and begin that of its next pending rebuild."""
        worker.rebuild_deadline = 0.0
        if isinstance(worker, WorkerProcess) and any(expected[0] == _NEVER_PLAIN for expected, *_ in worker.pending):
            self._limit_rebuild(worker)

    def _queue_rebuild(self, worker: Worker, rows: Sequence[int], request: Request) -> None:
        """Queue a message that rebuilds environments and resets them, in place of a step or a reset."""
        payload = self.pool.pickled(worker, self.rebuilder.prepare(request, rows))
        self.next_number()
        seq = self._seq
        self.batch.requested[rows] = seq
        request.remaining += 1
        worker.pending.append((pack_head(_NEVER_PLAIN, seq), rows, request))
        self.pool.queue(worker, Op.REBUILD_SOME, seq, payload)
        if isinstance(worker, WorkerProcess):
            self._limit_rebuild(worker)

    def handle_death(self, worker: WorkerProcess) -> None:
        """Record the death of a worker, once. Its pending messages are lost."""
        if worker.death is not None:
            return
        for message in worker.channel.receive_rest():  # replies that it wrote before it ended
            self._apply_message(worker, message)
        pending = list(worker.pending)
        death = worker.record_death()
        self.pool.drop_messages(worker)
        worker.pending.clear()
        self.failures.record_death(death)
        for _, rows, request in pending:
            request.collect()
            request.remaining -= 1
            request.lost.update(rows)
            rebuilt = request.rebuilding.keys() & set(rows)
            self.failures.counted -= rebuilt  # a death during their rebuild counts as another restart
            for row in rebuilt:
                del request.rebuilding[row]
            if death not in request.deaths:
                request.deaths.append(death)
            if worker.start_failures:  # its own report is better than its exit code
                request.failures += [(failure, worker) for failure in worker.start_failures if failure.env in rows]
        for request in {id(request): request for _, _, request in pending if request.for_recv}.values():
            self._make_ready(request, [])

    # -- late replies ------------------------------------------------------------------------------------------------

    def _kill_hanging(self, method: str, limit: float | None, call: Request | None = None) -> float:
        """Kill workers that exceeded ``step_timeout`` (without restarts: raise); return the time of the next check."""
        late = self.pool.find_late(limit)
        if call is not None:  # only the workers that have to finish a step before this call
            late = [worker for worker in late if call in [part[2] for part in worker.pending][1:]]
        if late and not self.policy.restart:
            error = self.pool.timeout_error(method, limit, late)
            self.failures.record_late(error, late)
            raise error
        hanging = [worker for worker in late if not worker.rebuild_deadline]
        self._kill(hanging, f"it hung for more than {limit} seconds", limit)
        return self.pool.next_check(limit)

    def _kill_late_rebuild(self, worker: WorkerProcess) -> None:
        """Kill a worker that took too long to rebuild environments."""
        seconds = self.policy.start_timeout + (self.policy.step_timeout or 0.0)
        if worker.ready and worker.pending and worker not in self.pool.find_late(seconds):  # its message was held
            return self._limit_rebuild(worker)
        return self._kill([worker], f"it hung for more than {seconds} seconds", seconds)

    def _kill(self, workers: Sequence[WorkerProcess], reason: str, timeout: float | None = None) -> None:
        for worker in workers:
            worker.timeout = timeout
            stack = worker.read_stack()
            where = f" at {location}" if (location := innermost_location(stack)) else ""
            worker.kill_reason = f"{reason} and was killed{where}" + (f"\nits stack:\n{stack}" if stack else "")
            self.state.changing = True  # a reset after an interruption replaces workers with a `kill_reason`
            worker.signal(9)
            self.handle_death(worker)
            self.settle_received()
            self.state.changing = False

    def kill_pending(self, rows: Collection[int]) -> None:
        """Kill the workers that have some of these rows, and a message without a reply."""
        late = [worker for worker in self.pool.find_late() if not set(rows).isdisjoint(worker.rows)]
        self._kill(late, "it was abandoned")
