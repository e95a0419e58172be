"""The exchange of messages with workers: submits requests, writes their messages, and waits for replies.

A signal handler can raise after any call and at any jump (see :mod:`vecenv.front.guard`). So the state is changed by a
single store, or in a block between ``state.changing = True`` and ``state.changing = False``, which never waits for a
reply. An exception during a *wait* loses nothing, and the wait can be repeated. An exception in a *block* may lose a request
or a result: ``changing`` stays set, and every guarded call raises ``ResetNeeded``, except a reset of all rows, which drops
all pending requests. A block is not a ``with`` statement, because that takes 0.15 us (1 us with a generator function), and
because the last block of a method ends in the guard.

Blocks queue messages, which are written afterwards: a write can wake a worker that then takes the caller's core for a whole
step, and Ctrl-C in that time must not require a reset. Those that handle a failure also reap and start processes, and call
observers. The caller's own environments are stepped inside a block.

This module has most of the blocks. They mainly call methods of :class:`~vecenv.engine.state_changes.StateChanges`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Any, NoReturn

import numpy as np

from vecenv.engine.requests import Request
from vecenv.engine.state_changes import PLAIN_REPLY, StateChanges
from vecenv.engine.worker_process import LocalWorker, Worker, WorkerProcess
from vecenv.errors import failed_earlier_error, format_seconds
from vecenv.front.arguments import ResetOptions, deadline_after, select_options
from vecenv.front.driver import require_pending_reset, too_few_in_flight_error, wait_method
from vecenv.front.guard import CallState
from vecenv.link.infos import NO_INFO
from vecenv.link.messages import COLUMNS_OUTCOME, LAST_STEP_OP, PLAIN_OUTCOME, Op, copy_if_possible, pack_head, pack_seq
from vecenv.system.supervision import innermost_location

_STEP, _STEP_SOME = int(Op.STEP), int(Op.STEP_SOME)  # packing an enum is slower


class Exchange:
    """The exchange of messages between one engine and its workers.

    Args:
        state: The state of the current call, shared with the guard.
        changes: The changes of state, with the workers, the results and the handling of failures.

    Attributes:
        request: The pending request, if one method returns all its results together; otherwise ``None``.
        in_flight, ready: Those of ``changes``: the rows that ``recv`` has not returned yet, and those that it may return.
        rows_at_once: The maximum number of rows in one message of ``send``; ``None`` for no limit.
    """

    def __init__(self, state: CallState, changes: StateChanges) -> None:
        self.state, self.changes, self.num_envs = state, changes, changes.num_envs
        self.in_flight, self.ready = changes.in_flight, changes.ready
        self.pool, self.policy, self.failure_log = changes.pool, changes.policy, changes.failure_log
        self.request: Request | None = None
        self.rows_at_once: int | None = None
        self._local_deferred = False  # the last wait deferred the caller's own share, because a worker had a reply

    # -- sending -----------------------------------------------------------------------------------------------------

    def send_step(self, rows: Sequence[int], actions: list[Any] | None, *, for_recv: bool) -> None:
        """Send a step of some rows. ``actions`` are in the order of ``rows``, or ``None`` if they lie in shared memory."""
        pool, changes = self.pool, self.changes
        if (
            actions is not None or len(rows) < self.num_envs or self.failure_log.failed or pool.max_concurrency is not None
            or (for_recv and self.rows_at_once is not None)
        ):  # fmt: skip
            self._send_parts(rows, actions, for_recv)
            return
        # a plain step: the same message, without payload, to all workers
        workers = pool.workers
        self.state.changing = True
        if changes.store.must_renew:
            # The program may hold the previous batch, so workers write into another. A step of all rows overwrites all
            # of it, and `restore_rows` takes rows that fail from the previous one. For `recv`, later sends write into the
            # new batch, too, so it must be complete: `keep` copies the previous batch into it.
            changes.store.renew(keep=for_recv)
        seq = changes.next_seq()
        request = Request("step", for_recv, len(workers))
        expected_reply = pack_head(PLAIN_REPLY, seq)
        for worker in workers:
            worker.pending.append((expected_reply, worker.rows, request))
        if for_recv:
            self.in_flight.update(rows)
        else:
            self.request = request
        pool.set_message_to_all(_STEP, seq)
        self.state.changing = False
        if pool.processes:
            pool.write_to_all()

    def _send_parts(self, rows: Sequence[int], actions: list[Any] | None, for_recv: bool) -> None:
        """Send a step that is not plain: a message per worker and, with ``rows_at_once``, per part of its rows."""
        action_by_row = None if actions is None else dict(zip(rows, actions, strict=True))
        failed = self._find_failed(rows)
        if failed and not self.policy.restart:
            # the driver has checked this, but then an observer's `on_step` may call `Engine.snapshots`, which detects deaths
            raise failed_earlier_error({row: self.failure_log.failed[row] for row in failed})
        healthy = sorted(set(rows).difference(failed) if failed else rows)
        parts = list(self.pool.split_into_rounds(healthy, self.rows_at_once if for_recv else None))
        payloads = [  # may raise
            self.pool.pickle_for(worker, None if action_by_row is None else [action_by_row[row] for row in worker_rows])
            for worker, worker_rows in parts
        ]
        self.state.changing = True
        changes, request = self.changes, Request("step", for_recv)
        if failed:
            if (error := changes.queue_rebuilds(request, failed)) is not None:
                self.state.changing = False
                raise error
            changes.not_stepped.update(failed)
        for (worker, worker_rows), payload in zip(parts, payloads, strict=True):
            changes.add(worker, _STEP_SOME, worker_rows, request, payload)
        if for_recv:
            self.in_flight.update(rows)
        else:
            self.request = request
        self.state.changing = False
        self.flush()

    def _find_failed(self, rows: Sequence[int]) -> list[int]:
        """Return those of ``rows`` that failed, after handling undetected deaths of the failed rows' workers.

        Deaths come first: a rebuild must not be sent to a dead process, and all other rows of that process failed, too.
        """
        failed = self.failure_log.failed
        if not failed:
            return []
        self.state.changing = True
        self.changes.handle_undetected_deaths(failed.keys() & set(rows))
        self.state.changing = False
        return sorted(failed.keys() & set(rows))

    def send_reset(
        self, rows: Sequence[int], seeds: list[Any], options: ResetOptions, restart_seeds: np.random.SeedSequence, *,
        for_recv: bool,
    ) -> None:  # fmt: skip
        """Send a reset of some rows and replace their dead workers. Unless ``for_recv``, first drop all pending requests.

        ``restart_seeds`` is the source of seeds for later rebuilds.
        """
        changes, payloads = self.changes, self.pickle_reset(rows, seeds, options)  # may raise
        was_changing = self.state.changing  # True after an interrupted change
        self.state.changing = True
        if not for_recv:
            # after an interrupted change, `settle` may have recorded the failures of the request, but not cleared them
            if self.request is not None and not was_changing:
                changes.record_dropped(self.request.command, self.request.failures)
            self.request = None
            changes.drop_all()
            if len(rows) < self.num_envs:
                # the result shows the other rows, too: without infos, and without what failing steps wrote
                others = np.isin(np.arange(self.num_envs), rows, invert=True)
                changes.arrays.info_schemas[others], changes.arrays.final[others] = NO_INFO, False
                changes.rebuilder.last_good.restore(self.failure_log.failed.keys() - set(rows))
        changes.handle_undetected_deaths(rows)
        if (error := changes.replace_dead(rows)) is not None:
            self.state.changing = was_changing  # without this reset, an interrupted change still needs one
            raise error
        self.failure_log.forget(rows)
        changes.rebuilder.seeds = restart_seeds
        request = Request("reset", for_recv)
        request.seeds, request.options, request.rows = seeds, options, rows
        for (worker, worker_rows), payload in zip(self.pool.split(rows), payloads, strict=True):
            changes.add(worker, Op.RESET_SOME, worker_rows, request, payload)  # `RESET` if these are all rows of the worker
        if for_recv:
            changes.put_reset_in_flight(rows)
        else:
            self.request = request
        self.state.changing = False
        self.flush()

    def pickle_reset(self, rows: Sequence[int], seeds: list[Any], options: ResetOptions) -> list[Any]:
        """Return the pickled seeds and options of a reset for each worker of these rows; ``None`` if it has neither."""
        payloads = []
        for worker, worker_rows in self.pool.split(rows):
            worker_seeds = [seeds[row] for row in worker_rows]
            is_plain = options is None and worker_seeds.count(None) == len(worker_seeds)
            payload = None if is_plain else (worker_seeds, select_options(options, worker_rows))
            if isinstance(worker, LocalWorker):  # it resets later, and the program may change its options meanwhile
                payload = copy_if_possible(payload)
            payloads.append(self.pool.pickle_for(worker, payload))
        return payloads

    def drop_if_droppable(self) -> bool:
        """Drop the pending request and return ``True`` if it is a call that an interrupted method left behind."""
        if self.request is None or not self.request.droppable:
            return False
        self.state.changing = True
        self.changes.drop_request(self.request)
        self.request = None
        self.state.changing = False
        return True

    def send_call(
        self, command: str, op: Op, build_payload: Callable[[Worker], Any], announce: Callable[[], None] | None = None
    ) -> None:
        """Send a call to each worker unless ``build_payload`` returns ``None`` for it; run ``announce`` after checks."""
        parts = [(worker, payload) for worker in self.pool.workers if (payload := build_payload(worker)) is not None]
        payloads = [self.pool.pickle_for(worker, payload) for worker, payload in parts]  # may raise
        if dead := [row for worker, _ in parts if worker.death is not None for row in worker.rows]:
            raise failed_earlier_error({row: self.failure_log.failed.get(row, "its worker died") for row in dead})
        if announce is not None:
            announce()
        self.state.changing = True
        request = Request(command)
        request.droppable = True
        for (worker, _), payload in zip(parts, payloads, strict=True):
            self.changes.add(worker, op, worker.rows, request, payload)
        self.request = request
        self.state.changing = False
        self.flush()

    def finish_call(self, timeout: float | None = None) -> dict[int, Any]:
        """Return the results of the pending call, by row.

        Args:
            timeout: Seconds to wait.

        Raises:
            StepTimeout: Replies are late; the call stays pending.
            Exception: The exception that the call raised in an environment, or the death of a worker.
        """
        request = self.request
        assert request is not None
        if not self.wait_for(request, deadline_after(timeout)):
            raise self.pool.timeout_error(wait_method(request.command), timeout)
        if request.failures or request.deaths:
            self.settle_request(request)
        if not request.droppable:  # `call_wait`: a lost result requires a reset; `call` can be repeated
            self.state.changing = True  # until the guard has returned the result
        self.request = None
        return request.results

    def settle_request(self, request: Request) -> None:
        """Settle the failures of the pending request: raise the exception that ends it, or queue rebuild messages."""
        self.state.changing = True
        error, failed = self.changes.settle(request)
        if error is not None:
            self.request = None
            self.changes.count_results(request, failed)
        self.state.changing = False
        if error is not None:
            try:
                raise error
            finally:
                del error  # break a reference cycle: the exception's traceback refers to this frame

    def wait_until_idle(self) -> None:
        """Drop an interrupted call, and wait for all other replies.

        A reset of some rows overwrites their marks in ``SharedArrays.requested``. Workers read the marks when they execute
        a message, so an earlier one would miss these rows.

        With ``max_concurrency``, a reset of all rows would drop held messages, so only some rows would execute the request.
        It would also run beside dropped steps, which the limit does not count.

        Raises:
            StepTimeout: Replies are late. It names the method that fetches the pending results: nothing was reset.
        """
        self.drop_if_droppable()
        deadline = deadline_after(self.policy.step_timeout)
        while any(worker.pending for worker in self.pool.workers):
            if not self._wait_for_next_replies(deadline):
                method = "recv" if self.request is None else wait_method(self.request.command)
                deadline = self._kill_hanging(method)

    def convert_for_recv(self, request: Request, count: int) -> None:
        """Convert the pending reset, so that ``recv`` returns its rows as they become ready.

        Raises:
            AlreadyPendingCallError: The pending request is not a reset.
            NoAsyncCallError: The reset has fewer than ``count`` rows.
        """
        require_pending_reset(request, count)
        self.state.changing = True
        self.request = None
        self.changes.convert_for_recv(request)
        self.state.changing = False
        self.flush()

    def wait_for_rows(self, count: int, deadline: float | None, enough: int | None, enough_from: float) -> bool:
        """Wait until ``count`` rows are ready; return ``False`` if the deadline passes first.

        From ``enough_from`` on, at the deadline, or if all rows in flight are ready, ``enough`` rows suffice (``None``:
        ``count``).

        Raises:
            NoAsyncCallError: Fewer than ``enough`` rows are in flight.
            StepTimeout: There is no deadline, rows are missing after ``step_timeout``, and workers are not restarted.
            Exception: The oldest exception in ``unraised``.
        """
        limit = self.policy.step_timeout if deadline is None else None
        deadline = deadline_after(limit) if deadline is None else deadline
        wants_all = enough is None and count == self.num_envs
        wait = self._wait_worker_by_worker if wants_all else self._wait_for_next_replies
        enough = count if enough is None else enough
        while True:
            if self.changes.unraised:
                self._raise_unraised()
            ready, in_flight = len(self.ready), len(self.in_flight)
            if ready >= count:
                return True
            if limit is not None and self.pool.watchdog.late:  # each `recv` has a new deadline; others reply before
                busy = self.pool.find_busy_workers(limit)
                self._end_late_steps("recv", [worker for worker in self.pool.watchdog.take_late() if worker in busy])
            if in_flight < enough:
                raise too_few_in_flight_error(enough, in_flight, ready)
            if ready >= enough:  # wait for more, but only until `enough_from`
                until = enough_from if deadline is None else min(enough_from, deadline)
                if ready == in_flight or not wait(None if until == math.inf else until):
                    return True
                # a reply may have arrived, but it is too late for another wait; a new exception is raised first
                if time.monotonic() >= until and not self.changes.unraised:
                    return True
            elif not wait(deadline):
                self._apply_arrived_replies()
                if self.changes.unraised or len(self.ready) >= enough:
                    continue
                if limit is None:
                    return False
                deadline = self._kill_hanging("recv")

    def _raise_unraised(self) -> NoReturn:
        """Raise the oldest exception in ``unraised``, and remove its rows."""
        self.state.changing = True
        error = self.changes.take_unraised()
        self.state.changing = False
        try:
            raise error
        finally:
            del error  # break the same cycle as in `settle_request`

    # -- writing and waiting -----------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write queued messages, as far as the pipes and ``max_concurrency`` allow.

        The next flush continues one that was interrupted outside of its blocks.
        """
        pool = self.pool
        if pool.held or len(pool.written_to_all) < len(pool.processes):  # a message is in no channel yet
            self.state.changing = True
            for worker in pool.queue_rest():
                self.changes.handle_death(worker)  # there should be none (see `handle_death`)
            self.changes.settle_for_recv()
            pool.release_held()
            self.state.changing = False
        for worker in pool.flush():
            self.state.changing = True
            self.changes.handle_death(worker)
            self.changes.settle_for_recv()
            self.state.changing = False

    def wait_for(self, request: Request, deadline: float | None) -> bool:
        """Wait for all replies to a request; return ``False`` if the deadline passes first.

        Raises:
            StepTimeout: There is no deadline, replies are missing after ``step_timeout``, and workers are not restarted.
        """
        # With rows in flight, the request is a call: no step or reset is submitted then. Workers finish those rows first,
        # which may take forever, so `step_timeout` applies.
        rows_in_flight = bool(self.in_flight)
        has_limit = deadline is None and (rows_in_flight or request.command in ("step", "reset"))
        limit = self.policy.step_timeout if has_limit else None
        if limit is not None:
            deadline = time.monotonic() + limit
        wait = self._wait_for_next_replies if rows_in_flight else self._wait_worker_by_worker
        while request.remaining:
            if wait(deadline):
                continue
            self._apply_arrived_replies()
            if limit is None:
                return not request.remaining
            method = request.command if request.droppable else wait_method(request.command)
            deadline = self._kill_hanging(method, request if rows_in_flight else None)
        return True

    def _wait_worker_by_worker(self, deadline: float | None) -> bool:
        """Wait until no message is pending, or until ``recv`` has to raise; return ``False`` if the deadline passes first.

        Waits for one worker after another: most reply during the first wait, so the caller wakes up once or twice per step.
        """
        pool, changes, processes = self.pool, self.changes, self.pool.processes
        if pool.local is not None:
            self.execute_local_messages()
        for position, index in enumerate(pool.wait_order):
            must_wait = position == 0  # most of the others have replied by then, so try to read first
            while (worker := processes[index]).pending:  # a dead worker may be replaced meanwhile
                # With rows in flight, this wait is that of `recv`, which raises. Otherwise it is for another request: an
                # exception without rows (see `StateChanges.unraised`) must not end it, and is left for the next `recv`.
                if changes.unraised and self.in_flight:
                    self.flush()  # rebuild messages, before the program handles the exception
                    return True
                if must_wait:
                    if pool.unflushed or pool.held or len(pool.written_to_all) < len(processes):  # unwritten messages
                        if not self._wait_for_next_replies(deadline):
                            return False
                        continue
                    until = _earlier_deadline(deadline, worker.restart_deadline) if worker.restart_deadline else deadline
                    if not pool.wait_for_one(worker, until):
                        if until == deadline:
                            return False
                        self._kill_if_overdue(worker)
                        continue
                self.state.changing = True
                received = changes.apply_next(worker)
                if not received and must_wait and worker.has_ended():  # a helper of an environment may hold the pipe open
                    changes.handle_death(worker)
                must_wait = not received  # after a reply, the next one may have arrived, too
                if changes.unsettled:
                    changes.settle_for_recv()
                self.state.changing = False
        if pool.local is not None and pool.local.unexecuted:
            self.execute_local_messages()  # those that `max_concurrency` delayed
        return True

    def _wait_for_next_replies(self, deadline: float | None) -> bool:
        """Write what is queued, wait, and apply one reply of each worker that has replied; ``False`` after the deadline.

        Alternates between the caller's own share and the replies of worker processes.
        """
        self.flush()
        pool, changes = self.pool, self.changes
        local = pool.local
        if local is not None and local.unexecuted and pool.can_execute_local(local):
            if self._local_deferred or not (pool.processes and pool.has_event()):
                self._local_deferred = False
                self._execute_local_message(local)
                return True
            self._local_deferred = True  # only once: workers that always have a reply would starve it
        if not pool.processes:
            return True
        limited = [worker for worker in pool.processes if worker.restart_deadline and worker.death is None]
        first_due = min(limited, key=lambda worker: worker.restart_deadline, default=None)
        until = deadline if first_due is None else _earlier_deadline(deadline, first_due.restart_deadline)
        events = pool.wait(until)
        if events is None and (until == deadline or first_due is None):
            return False
        self.state.changing = True
        for worker, ended in events or ():
            if worker.death is None and not changes.apply_next(worker) and ended:
                changes.handle_death(worker)
        changes.settle_for_recv()
        self.state.changing = False
        if first_due is not None and 0.0 < first_due.restart_deadline <= time.monotonic():  # also if others have replied
            self._kill_if_overdue(first_due)
        if pool.unflushed:  # rebuild messages, which have a time limit
            self.flush()
            return deadline is None or time.monotonic() < deadline  # rebuilds may fail at once, again and again
        return True

    # -- replies -----------------------------------------------------------------------------------------------------

    def _apply_arrived_replies(self) -> None:
        """Apply all replies that have arrived, including those of workers that were not waited for."""
        for worker in self.pool.processes:
            self.state.changing = True
            while worker.pending and self.changes.apply_next(worker):
                pass
            self.changes.settle_for_recv()
            self.state.changing = False
        self.flush()  # rebuild messages: their time limit runs, and the next wait may begin much later

    def execute_local_messages(self) -> None:
        """Execute all messages to the caller's own share, as far as ``max_concurrency`` allows."""
        pool, local = self.pool, self.pool.local
        # `max_concurrency is None` first, because a call would slow down the usual step
        while local is not None and local.unexecuted and (pool.max_concurrency is None or pool.can_execute_local(local)):
            self._execute_local_message(local)

    def _execute_local_message(self, local: LocalWorker) -> None:
        """Execute the next message to the caller's own share. An interrupted step leaves it in an undefined state."""
        op, seq, _ = local.unexecuted[0]
        runs_call = op > LAST_STEP_OP  # as `is_call`, but faster; an interrupted call leaves the environments usable
        if not runs_call:
            self.state.changing = True
        try:
            outcome = local.execute_next()
        except BaseException:
            if runs_call:  # there will be no reply, so the next method drops the request
                _, _, request = local.pending[0]
                request.droppable = True
            raise
        self.state.changing = True  # the block of a call begins here
        if op == _STEP and (outcome is PLAIN_OUTCOME or outcome is COLUMNS_OUTCOME):  # the shortcut of `apply_next`
            _, rows, request = local.pending.popleft()
            request.remaining -= 1
            if outcome.columns:
                request.may_have_infos = True
            if request.for_recv:
                self.ready += rows
        else:
            has_payload = outcome.has_payload()
            self.changes.apply(local, pack_seq(seq), outcome if has_payload else None, outcome.columns or has_payload)
            self.changes.settle_for_recv()
        self.state.changing = False

    # -- late replies ------------------------------------------------------------------------------------------------

    def _kill_hanging(self, method: str, call: Request | None = None) -> float:
        """Kill workers that exceeded ``step_timeout``, or raise if restarts are off; return the time of the next check."""
        limit = self.policy.step_timeout
        assert limit is not None  # it is the deadline that has passed
        late = self.pool.find_busy_workers(limit)
        if call is not None:  # only the workers that have to finish a step before this call
            late = [worker for worker in late if any(request is call for _, _, request in islice(worker.pending, 1, None))]
        self._end_late_steps(method, late)
        return self.pool.next_check(limit)

    def _end_late_steps(self, method: str, late: Sequence[WorkerProcess]) -> None:
        """Kill workers with a step or reset that exceeded ``step_timeout``, or raise if restarts are off.

        Raise also if all late workers execute a call: it has no time limit, only the reset that waits for it has one.
        """
        limit = self.policy.step_timeout
        assert limit is not None
        late = [worker for worker in late if worker.has_started]  # `_kill_if_overdue` is for the others
        steps = [worker for worker in late if worker.pending[0][2].command in ("step", "reset")]
        if late and not (self.policy.restart and steps):
            error = self.pool.timeout_error(method, limit, late)
            self.failure_log.record_late(error, late)
            raise error
        hanging = [worker for worker in steps if not worker.restart_deadline]  # others: `_kill_if_overdue`
        self._kill(hanging, f"it hung for more than {format_seconds(limit)}", limit)

    def _kill_if_overdue(self, worker: WorkerProcess) -> None:
        """Kill a worker that starts or rebuilds for too long. If its rebuild was held back, set a new deadline instead."""
        if worker.death is not None or worker.channel.poll(0):
            return
        seconds = self.policy.start_timeout + (self.policy.step_timeout or 0.0)
        is_starting = not worker.has_started
        if is_starting or worker in self.pool.find_busy_workers(seconds):
            self._kill([worker], f"it hung for more than {format_seconds(seconds)}", seconds)
        else:  # its rebuild was held back, so the deadline came too early
            self.changes.set_deadline(worker)

    def _kill(self, workers: Sequence[WorkerProcess], reason: str, timeout: float | None = None) -> None:
        """Kill workers, and write the messages that rebuild their environments: the time limit of these runs from now on."""
        for worker in workers:
            worker.note_activity()
            stack = worker.read_stack()
            where = f" at {location}" if (location := innermost_location(stack)) else ""
            text = f"{reason}{where}, and was killed" + (f"\nits stack:\n{stack}" if stack else "")
            # `changing` first: if a handler raises before `handle_death`, `kill_reason` remains, and the next reset takes
            # the worker for dead (`handle_undetected_deaths`). Until then, the program must not use the worker.
            self.state.changing = True
            worker.kill_reason, worker.hung_for = text, timeout
            worker.watch.signal(9)
            self.changes.handle_death(worker)
            self.changes.settle_for_recv()
            self.state.changing = False
        self.flush()

    def kill_pending(self, rows: Collection[int]) -> None:
        """Kill those workers of these rows that have a message without a reply, apart from held messages."""
        busy = [worker for worker in self.pool.find_busy_workers() if not set(rows).isdisjoint(worker.rows)]
        self._kill(busy, "it was abandoned")


def _earlier_deadline(deadline: float | None, other: float) -> float:
    return other if deadline is None else min(deadline, other)
