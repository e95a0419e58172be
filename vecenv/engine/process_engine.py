"""The process engine: a driver of environments in worker processes and in the caller's process.

It checks and submits calls, and builds their results. :mod:`vecenv.engine.exchange` explains interruptions, and
docs/architecture.md the life of a step and of a failure.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from vecenv import freezing
from vecenv.engine.exchange import Exchange
from vecenv.engine.failures import FailureLog, Policy, Rebuilder
from vecenv.engine.observers import Observer
from vecenv.engine.requests import Request
from vecenv.engine.state_changes import StateChanges
from vecenv.engine.stats import measure_workers
from vecenv.engine.worker_pool import PoolOptions, WorkerPool
from vecenv.engine.worker_process import LocalWorker, Worker
from vecenv.errors import NotRestorable, StepTimeout, WorkerDied, failed_earlier_error
from vecenv.front.arguments import ResetOptions
from vecenv.front.capabilities import Capabilities
from vecenv.front.driver import Stepped, WorkerDriver, closed_in_child
from vecenv.front.infos import RowInfos
from vecenv.link.actions import ActionStage
from vecenv.link.envs import WorkerPlan
from vecenv.link.infos import NO_INFO, InfoReader, WorkerInfos
from vecenv.link.messages import Op, name_envs
from vecenv.link.observations import Store, require_fitting_observation
from vecenv.shm import Arena, Layout, SharedArrays
from vecenv.shm.layout import Array
from vecenv.state.snapshots import Snapshot, Snapshots, parse_snapshots
from vecenv.state.vector_state import pack_state, read_state
from vecenv.system.cores import placements
from vecenv.system.signals import raise_if_from_handler
from vecenv.worker.main import Ready, make_rows

_INTERRUPTED_LOAD: Final = "the load of its state was interrupted"


class Engine(WorkerDriver):
    """The driver of ``AsyncVectorEnv``, with environments in worker processes and in the caller's process.

    Args:
        env_fns: Functions that build the environments.
        layout: The layout of the shared memory.
        make_store: A function that builds the store of observations from the shared memory and views of it.
        plan: The settings of every worker.
        options: The options of the worker pool.
        policy: The policy for failures.
        num_workers: The number of worker processes; 0 requires ``caller_share=num_envs``.
        caller_share: The number of rows, counted from the first, that the caller steps itself.

    Attributes:
        exchange: The exchange of messages, which holds the pending request.
        mismatches: (env, kind, repr) of each space that does not match; see :meth:`vecenv.link.envs.Expected.find_mismatch`.
        mode: The autoreset mode.
        rebuilder: The data for rebuilding failed rows.
        verified: Rows that were found to continue exactly from a snapshot.
    """

    backend: ClassVar[str] = "process"
    owned_resource = "its workers"
    exchange: Exchange
    failure_log: FailureLog
    store: Store
    stage: ActionStage

    def __init__(
        self, env_fns: Sequence[Callable[[], Any]], layout: Layout, make_store: Callable[[Arena, SharedArrays], Store],
        plan: WorkerPlan, options: PoolOptions, policy: Policy, num_workers: int, caller_share: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_envs = self.batch_size = len(env_fns)
        # all drivers with workers have an attribute `restarts_rows`
        self.layout, self.policy, self.restarts_rows, self.mode = layout, policy, policy.restart, plan.autoreset_mode
        self._all_rows = self.last_received = np.arange(self.num_envs)
        self._all_row_list = self._all_rows.tolist()
        self.observers: list[Observer] = []
        self.verified: set[int] = set()
        self.arena = Arena(layout.size)
        arrays = self.arrays = layout.view(self.arena.buffer)
        self.store = make_store(self.arena, arrays)
        self.info_reader = InfoReader(arrays.info_schemas, arrays.infos)
        self._no_infos = WorkerInfos(self.info_reader, None, self.num_envs, {}, {})
        self.failure_log = FailureLog(self.observers, logs_like_gymnasium=policy.logs_like_gymnasium)
        self.rebuilder = Rebuilder(
            policy, self.failure_log, arrays, self.store, self.info_reader, layout.observations, self.mode, self.counters
        )
        if not options.placements:
            options.placements, options.caller_spin = placements(num_workers)
        self.pool = WorkerPool(plan, self.arena, arrays, options, policy)
        changes = StateChanges(
            self.pool, policy, self.failure_log, self.rebuilder, arrays, self.store, self.info_reader, self.counters
        )
        self.exchange = Exchange(self.state, changes)
        try:
            self.mismatches = self._start(env_fns, plan, num_workers, caller_share)
        except BaseException:
            self.pool.close(None)
            self.pool.release()
            raise

    def _start(
        self, env_fns: Sequence[Callable[[], Any]], plan: WorkerPlan, num_workers: int, caller_share: int
    ) -> list[tuple[int, str, str]]:
        local = None
        if caller_share:
            env_rows = make_rows(env_fns[:caller_share], 0, num_workers, plan, self.arrays, in_caller=True)
            local = LocalWorker(num_workers, range(caller_share), env_rows)
        shares = split_evenly(caller_share, self.num_envs, num_workers) if num_workers else []
        ready_messages = self.pool.start([(rows, env_fns[rows.start : rows.stop]) for rows in shares], local)
        if local is not None:
            ready_messages.insert(0, Ready(local.pid, *local.env_rows.build()))
        workers = zip(self.pool.workers, ready_messages, strict=True)
        if failures := [(failure, worker) for worker, ready in workers for failure in ready.failures]:
            raise self.failure_log.combine(Request("start"), self.failure_log.record("start", failures))
        return [mismatch for ready in ready_messages for mismatch in ready.mismatches]

    # -- all rows at once ----------------------------------------------------------------------------------------------

    def submit_step(self, actions: Any) -> None:
        """Submit a step of all rows. Errors are raised before anything is sent."""
        exchange = self.exchange
        if exchange.request is not None or exchange.in_flight:
            self.require_idle("step_async")
        failed = self.failure_log.failed
        if failed and not self.restarts_rows:
            raise failed_earlier_error(failed)
        action_list = self.stage.put(actions)
        for observer in self.observers:
            observer.on_step(None, actions if action_list is None else action_list)
        exchange.send_step(self._all_row_list, action_list, for_recv=False)

    def submit_reset(self, seeds: list[Any], ids: Array | None, options: ResetOptions, *, for_recv: bool) -> None:
        """Replace dead workers and submit a reset. Unless ``for_recv``, drop all results that have not been returned yet.

        Args:
            seeds: A seed or ``None`` for every environment.
            ids: The rows; ``None``: all.
            options: A dict for all, or a list with an entry for every environment.
            for_recv: True if ``recv`` returns the rows as they become ready; others may be in flight meanwhile.
        """
        rows = list(range(self.num_envs)) if ids is None else sorted(ids.tolist())
        if for_recv:
            self.exchange.drop_if_droppable()
            self.require_not_in_flight("reset_async", rows)
        elif not self.state.changing:  # otherwise a change was interrupted, and `send_reset` drops everything
            # Some workers may already be executing the message that will be dropped. Let every row execute it: the timing
            # must not decide which environments do, and `on_dropped` reports that all do.
            if ids is not None or self.pool.max_concurrency is not None:
                self.exchange.wait_until_idle()
            else:
                self.exchange.flush()
                self.exchange.execute_local_messages()
            self.store.require_received(set(self._all_row_list).difference(rows))
        if self.observers and options is not None:
            self.exchange.pickle_reset(rows, seeds, options)  # if it cannot be pickled, raise before announcing it
        seeds = self.announce_reset(rows, seeds, options, drops=not for_recv)
        if ids is None and isinstance(seeds[0], (int, np.integer)):
            restart_seeds = np.random.SeedSequence(abs(int(seeds[0])))
        else:
            restart_seeds = self.rebuilder.seeds
        self.exchange.send_reset(rows, seeds, options, restart_seeds, for_recv=for_recv)

    def wait_for_result(self, deadline: float | None) -> Stepped | None:
        """Return the result of the pending step or reset. At the deadline, return ``None``; the request stays pending.

        Raises:
            StepTimeout: There was no result within ``step_timeout``; the request stays pending.
            Exception: The exception of an environment, or the death of a worker.
        """
        exchange = self.exchange
        request = exchange.request
        assert request is not None
        while True:
            if not exchange.wait_for(request, deadline):
                return None
            if not (request.failures or request.deaths):
                break
            exchange.settle_request(request)
            exchange.flush()  # write the messages that rebuild the failed rows, then wait for the replies
            if deadline is not None and time.monotonic() >= deadline:  # rebuilds that fail at once may do so forever
                return None
        arrays = self.arrays
        infos: RowInfos | dict[Any, Any] = self._read_infos(request) if request.may_have_infos else {}
        try:
            observations = self.store.batch(self.copies)
        except Exception as error:  # workers check each observation, but those of a custom space may not fit together
            raise_if_from_handler(error, lambda: self.store.batch(self.copies))
            name_envs(error, self._all_row_list)
            self.state.changing = True
            exchange.request = None
            exchange.changes.count_results(request)
            self.state.changing = False
            raise
        result = observations, arrays.rewards.copy(), arrays.terminations.copy(), arrays.truncations.copy(), infos
        if self.observers:
            row_infos = infos or self._no_infos
            is_step = request.command == "step"
            observed = (observations, result[1], result[2], result[3], row_infos) if is_step else (observations, row_infos)
            # an observer may raise a `TypeError` or `ValueError`, which the guard would mistake for a wrong argument
            request.interrupted = True
            for observer in self.observers:
                observer.on_result(None, observed)
        self.state.changing = True  # until the guard has returned the result
        exchange.request, self.last_received = None, self._all_rows
        if request.command == "step" and not exchange.changes.not_stepped:  # `count_results`, inlined
            self.counters.steps += self.num_envs
        else:
            exchange.changes.count_results(request)
        if self.restarts_rows:
            self.rebuilder.last_good.keep(range(self.num_envs), pin=self.copies)
        return result

    def _read_infos(self, request: Request) -> RowInfos:
        finals: Mapping[int, Any] = request.finals
        if self.arrays.final_observations is not None:
            ended = self.arrays.final
            if b"\1" in ended.tobytes():  # 10x faster than `any()`
                finals = self._shared_finals(np.flatnonzero(ended).tolist()) | request.finals
        return WorkerInfos(self.info_reader, None, self.num_envs, request.infos, finals)

    def _shared_finals(self, rows: Iterable[int]) -> dict[int, Any]:
        """Return the final observations that lie in shared memory, by row."""
        tree, leaves, flags = self.layout.observations, self.arrays.final_observations, self.arrays.final
        if tree is None or leaves is None:
            return {}
        return {row: tree.build(iter([leaf[row].copy() for leaf in leaves])) for row in rows if flags[row]}

    # -- row by row ----------------------------------------------------------------------------------------------------

    def send_rows(self, rows: list[int], action_list: list[Any] | None) -> None:
        """Send a step of rows for ``recv``. ``action_list``: their actions; ``None`` if the actions lie in shared memory."""
        self.exchange.send_step(rows, action_list, for_recv=True)

    def recv(
        self, count: int | None, deadline: float | None, enough: int | None = None, enough_from: float = math.inf
    ) -> Stepped | None:
        """Return the next ``count`` rows to finish. If fewer finish by the deadline, return ``None``; they stay ready.

        Args:
            count: The number of rows; ``None``: the batch size.
            deadline: The ``time.monotonic()`` at which to stop waiting.
            enough: The number that suffices from ``enough_from`` on, or if no others are in flight; ``None``: ``count``.
            enough_from: The ``time.monotonic()`` from which ``enough`` rows suffice.

        Raises:
            NoAsyncCallError: Too few rows are in flight.
            AlreadyPendingCallError: A step or a call is pending, and only another method can fetch its result.
            StepTimeout: The rows did not finish within ``step_timeout``.
            Exception: The exception of an environment, or the death of a worker; rows that did not fail stay ready.
        """
        exchange, changes = self.exchange, self.exchange.changes
        if count is None:
            count = self.batch_size
        if exchange.request is not None and not exchange.drop_if_droppable():
            exchange.convert_for_recv(exchange.request, count if enough is None else enough)
        if not exchange.wait_for_rows(count, deadline, enough, enough_from):
            return None
        row_list = exchange.ready[:count]
        in_order = row_list == self._all_row_list  # copying whole arrays is faster
        rows = self._all_rows if in_order else np.array(row_list, np.intp)
        arrays = self.arrays

        def take_observations() -> Any:
            if not in_order:
                return self.store.take(rows)
            # `batch(copy=True)` may lend the batch: later steps then write into another one. With `copy=False`, the arrays
            # that `step` returns have to stay the same.
            return self.store.batch(copy=True) if self.copies else self.store.copy()

        try:
            observations = take_observations()
        except Exception as error:
            raise_if_from_handler(error, take_observations)
            name_envs(error, row_list)
            self.state.changing = True
            changes.remove_received(row_list)
            self.state.changing = False
            raise
        infos = self._read_row_infos(row_list, rows)
        columns = [
            each.copy() if in_order else each[rows] for each in (arrays.rewards, arrays.terminations, arrays.truncations)
        ]
        if changes.resetting:
            is_reset = np.isin(rows, list(changes.resetting))
            for column in columns:
                column[is_reset] = 0  # a reset writes none of them, and a dropped step before it may have
        result = observations, *columns, infos
        for observer in self.observers:
            observer.on_result(rows, result)
        self.state.changing = True  # until the guard has returned the result
        changes.remove_received(row_list)
        self.last_received = rows
        if self.restarts_rows:
            self.rebuilder.last_good.keep(row_list, pin=self.copies)
        return result

    recv_enough = recv  # `recv` accepts the arguments of both methods

    def _read_row_infos(self, row_list: list[int], rows: Array) -> RowInfos:
        changes = self.exchange.changes
        finals: dict[int, Any] = {} if self.arrays.final_observations is None else self._shared_finals(row_list)
        infos: dict[int, Any] = {}
        if changes.ready_infos or changes.ready_finals:
            infos = {row: changes.ready_infos[row] for row in row_list if row in changes.ready_infos}
            finals |= {row: changes.ready_finals[row] for row in row_list if row in changes.ready_finals}
        return WorkerInfos(self.info_reader, rows, len(rows), infos, finals)

    def freeze(self, rows: list[int]) -> list[freezing.Frozen]:
        """Return frozen copies of some rows."""
        return freezing.freeze(self, rows)

    def thaw(self, frozen: freezing.Frozen, rows: list[int], reseed: bool) -> tuple[Any, dict[str, Any]]:
        """Continue rows from a frozen copy; return their observations and infos."""
        return freezing.thaw(self, frozen, rows, reseed)

    # -- calls into environments ---------------------------------------------------------------------------------------
    #
    # Sequential code: send, wait, return. If a method is interrupted while it waits, the next method of the vector
    # environment drops its request. Those of `call_async` and `exec_func_send` stay pending: other methods fetch them.

    def begin_call(self, name: str, args: Any, kwargs: Any) -> None:
        """Begin to call a method, or read an attribute, of every environment."""
        payload = (name, args, kwargs)
        self._begin("call", Op.CALL, lambda worker: payload, range(self.num_envs), payload)

    def begin_exec(self, func: Callable[..., Any], rows: Collection[int], args: Any, kwargs: Any) -> None:
        """Begin to call a function with each of some environments."""
        select, arguments = _select_positions(rows), (func, args, kwargs)

        def build_payload(worker: Worker) -> Any:
            positions = select(worker)
            return None if positions is None else (positions, *arguments)

        self._begin("exec_func", Op.EXEC, build_payload, list(rows), arguments)

    def begin_set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Begin to set an attribute of every environment. Earlier verifications become invalid."""
        self.verified.clear()

        def build_payload(worker: Worker) -> Any:
            return name, [values[row] for row in worker.rows]

        self._begin("set_attr", Op.SET_ATTR, build_payload, range(self.num_envs), (name, values))

    def begin_set_next(self, rows: Collection[int], pairs: Sequence[Any]) -> None:
        """Begin to set seeds and options for the next episodes of ``rows``; ``pairs`` has an entry for every environment."""
        selected = set(rows)

        def build_payload(worker: Worker) -> Any:
            worker_pairs = [pairs[row] if row in selected else None for row in worker.rows]
            return worker_pairs if any(pair is not None for pair in worker_pairs) else None

        self._begin("set_next_options", Op.SET_NEXT, build_payload, list(rows), ([pairs[row] for row in rows],))

    def _begin(
        self, command: str, op: Op, build_payload: Callable[[Worker], Any], rows: Sequence[int], arguments: tuple[Any, ...]
    ) -> None:
        """Begin a call that may change environments, and announce it if it passes all checks."""

        def announce() -> None:
            if not self.restarts_rows:  # a new worker has built the environments of these rows already
                self.require_intact(self.failure_log.deaths.keys() & rows)
            self.announce_call(rows, command, arguments)

        self.exchange.send_call(command, op, build_payload, announce)

    def announce_call(self, rows: Sequence[int], name: str, arguments: tuple[Any, ...]) -> None:
        """Notify the observers of a call that may change environments."""
        for observer in self.observers:
            observer.on_call(rows, name, arguments)

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def save(self, rows: Sequence[int], verify: bool) -> Snapshots:
        """Return the states of some rows. With ``verify``, also verify those that have not been verified yet."""
        self.require_intact(rows)
        saved = self._call("save", Op.SAVE, _select_positions(rows))
        if verify and (new := sorted(set(rows) - self.verified)):
            try:
                self._call("save", Op.PROVE, _select_positions(new))
            except WorkerDied as error:
                error.add_note("the check before the first save steps copies of an environment; save(verify=False) skips it")
                raise
            self.verified |= set(new)
        return Snapshots(self.with_observation(row, saved[row]) for row in rows)

    def with_observation(self, row: int, snapshot: Snapshot) -> Snapshot:
        """Add the row's latest observation, if it has one, to a worker's snapshot."""
        return snapshot.having(observation=self.store.row(row)) if snapshot.row.used else snapshot

    def snapshots(self) -> list[Snapshot]:
        """Return the states of all rows. Failures are not recorded. An observer may call this in ``on_step``.

        Raises:
            NotRestorable: An environment cannot be saved, or its worker died meanwhile.
            EnvFailed: The death of a worker was already known.
            StepTimeout: Workers did not finish earlier steps for ``recv`` within ``step_timeout``.
        """
        exchange, rows = self.exchange, range(self.num_envs)
        exchange.send_call("save", Op.SAVE, _select_positions(rows))
        request = exchange.request
        assert request is not None
        exchange.wait_for(request, None)
        exchange.request = None
        if request.deaths or request.failures:
            raise NotRestorable(request.deaths[0].text if request.deaths else request.failures[0][0].text)
        return [self.with_observation(row, request.results[row]) for row in rows]

    def load(self, snapshots: Any, rows: list[int]) -> Any:
        """Load states into rows, after a check of all states. Return the observations; ``None`` if a row has none."""
        parsed = parse_snapshots(snapshots, rows)
        snapshot_by_row = dict(zip(rows, parsed, strict=True))
        row_states = {row: snapshot.row for row, snapshot in snapshot_by_row.items()}
        for row, row_state in row_states.items():
            require_fitting_observation(self.store, row, row_state)

        def build_payload(worker: Worker) -> Any:
            first = worker.rows[0]
            return [(row - first, snapshot_by_row[row]) for row in worker.rows if row in snapshot_by_row] or None

        self._call("load", Op.CHECK, build_payload)

        def announce() -> None:
            self.announce_call(rows, "load", (parsed,))
            # an interrupted load may have changed any of these environments
            self.failure_log.failed.update(dict.fromkeys(rows, _INTERRUPTED_LOAD))

        # outside of `try`: if it raises, nothing is loaded, or the load is still pending
        self.exchange.send_call("load", Op.LOAD, _select_positions(rows), announce)
        try:
            self.exchange.finish_call()
        except Exception as error:
            if self.exchange.request is None:  # the load has ended: the environments that did not fail are loaded
                name_envs(error, self._accept_all(snapshot_by_row), "loaded_rows")
            raise
        loaded = self._accept_all(snapshot_by_row)
        if len(loaded) < len(rows):  # a worker died just after its reply
            raise self._lost_error(set(rows).difference(loaded), loaded)
        all_used = all(row_state.used for row_state in row_states.values())
        return self.store.take(np.array(rows, np.intp)) if all_used else None

    def _accept_all(self, snapshot_by_row: Mapping[int, Snapshot]) -> list[int]:
        """Accept and return the rows that were loaded. By now, ``failed`` has another text for rows that failed."""
        failed = self.failure_log.failed
        loaded = [row for row in snapshot_by_row if failed.get(row) == _INTERRUPTED_LOAD]
        for row in loaded:
            self.accept_loaded(row, snapshot_by_row[row])
        if self.restarts_rows:
            self.rebuilder.last_good.keep(loaded, pin=self.copies)
        return loaded

    def _lost_error(self, lost: Collection[int], loaded: Collection[int]) -> Exception:
        """Return the exception for rows that failed after they were loaded."""
        error = failed_earlier_error({row: self.failure_log.failed[row] for row in lost})
        name_envs(error, lost)
        name_envs(error, loaded, "loaded_rows")
        return error

    def accept_loaded(self, row: int, snapshot: Snapshot) -> None:
        """Store the observation of a loaded row, which has no info, and forget that it failed."""
        if snapshot.row.used:
            self.store.set_row(row, snapshot.row.observation)
        self.arrays.info_schemas[row] = NO_INFO
        self.failure_log.forget([row])

    def _call(self, command: str, op: Op, build_payload: Callable[[Worker], Any]) -> dict[int, Any]:
        self.exchange.send_call(command, op, build_payload)
        return self.exchange.finish_call()

    # -- the whole state -----------------------------------------------------------------------------------------------

    def state_dict(self, rows: list[int], spaces: list[Any], verify: bool) -> dict[str, Any]:
        """Return the states of rows, counters, seeds and the generators of ``spaces`` in one dict."""
        snapshots = self.save(rows, verify)
        counts = self.counters.steps, self.counters.resets, self.failure_log.restarts
        return pack_state(snapshots, self.mode, counts, self.rebuilder.seeds, spaces)

    def load_state_dict(self, state: Mapping[str, Any], rows: list[int], spaces: list[Any]) -> Any:
        """Restore a state from :meth:`state_dict`, and return the observations."""
        saved = read_state(state, len(rows), self.mode, spaces)
        observations = self.load(saved.snapshots, rows)
        self.rebuilder.seeds = saved.seeds
        saved.load(self.counters, self.failure_log)
        return observations

    # -- hanging workers, capabilities and statistics ------------------------------------------------------------------

    def kill_pending(self, rows: Collection[int]) -> None:
        """Kill those workers of these rows that have a message without a reply, apart from held messages."""
        self.exchange.kill_pending(rows)

    def timeout_error(self, method: str, timeout: Any) -> StepTimeout:
        """Return the exception for a call that has timed out."""
        return self.pool.timeout_error(method, timeout)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            self.backend, restarts=self.policy.restart, snapshots=True, freezing=not self.reason("freezing"),
            in_this_process=self.pool.local is not None,
        )  # fmt: skip

    def reason(self, capability: str) -> str:
        """Return the reason why a capability is missing."""
        return freezing.explain_unfreezable(self) if capability == "freezing" else super().reason(capability)

    @property
    def seconds_waited(self) -> float:
        return self.pool.seconds_waited

    def _compute_stats(self) -> dict[str, float]:
        return {
            **super()._compute_stats(),
            **measure_workers(self.arrays),
            "restarts": float(self.failure_log.restarts),
            "errors": float(self.failure_log.num_errors),
            "bytes_pickled": float(sum(worker.channel.bytes_pickled for worker in self.pool.processes)),
            **freezing.frozen_stats(self),
        }

    # -- the end -------------------------------------------------------------------------------------------------------

    def shut_down(self, timeout: float | None, step_timeout: float | None) -> None:
        """End the workers; see :meth:`WorkerPool.close`. Log errors from the environments' ``close()``. Safe to repeat."""
        self.pool.close(timeout, step_timeout)
        self.pool.log_failures_in_close()
        self.failure_log.restart_log.close()

    def release(self) -> None:
        """Free all memory and descriptors after ``close()``. No call may be using them. Idempotent."""
        if self.state.unusable != "closed" or self.pool.released:
            return
        with contextlib.suppress(AttributeError):  # another thread may be releasing this driver, too
            self.freeze_stats()
        self.pool.release()
        self.exchange.request = None
        self.observers.clear()
        closed_in_child.discard(self)
        for owner in (self, self.exchange.changes):  # memory is unmapped once the program holds no array that refers to it
            for name in ("arena", "arrays", "store", "info_reader", "_no_infos", "rebuilder", "stage"):
                owner.__dict__.pop(name, None)


def split_evenly(first: int, stop: int, parts: int) -> list[range]:
    """Split rows into contiguous ranges of lengths that differ by at most one."""
    bounds = [first + (stop - first) * part // parts for part in range(parts + 1)]
    return [range(low, high) for low, high in itertools.pairwise(bounds)]


def _select_positions(rows: Collection[int]) -> Callable[[Worker], list[int] | None]:
    """Return a function that maps a worker to the positions of ``rows`` among its own, or to ``None`` if it has none."""
    selected = set(rows)
    return lambda worker: [row - worker.rows[0] for row in worker.rows if row in selected] or None
