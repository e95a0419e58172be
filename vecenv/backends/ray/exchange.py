"""Exchanges requests and replies with hosts, and replaces lost hosts.

A request has one part per host, and the host's actor executes parts in the order of their submission. A reply is identified
by its reference, so a late reply to a dropped request is never applied to another one. ``step`` and ``reset`` differ from
``send`` and ``recv`` in that they wait for all replies, and return the results together.

Requests are submitted, and replies applied, within :meth:`HostExchange.changing`, which defers signal handlers. A reply
without failures and infos is applied without it, because deferring would take longer; ``state.changing`` is set meanwhile,
as it is while the rows of a result are removed. If a handler interrupts a wait, nothing is lost, and the same wait can be
repeated.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from vecenv.backends.ray.failures import Errors, Failures, combine
from vecenv.backends.ray.host import NUMBERS, HostReply, Lost, Packed, RemoteFailure, fields, record_type
from vecenv.backends.ray.hosts import HostPool, RemoteHost
from vecenv.errors import StepTimeout, envs_text, format_seconds
from vecenv.front.arguments import ResetOptions, deadline_after, select_options
from vecenv.front.driver import PHASES, Counters, Phase, require_pending_reset, too_few_in_flight_error, wait_method
from vecenv.front.guard import CallState, closed_error
from vecenv.link.messages import PackedError, decode_outcome, name_envs, pack_error, unpack_error
from vecenv.link.observations import PickledStore, SharedStore
from vecenv.shm import fixed_tree
from vecenv.system.signals import deferred_signals, raised_by_handler, watched_handlers


@dataclass(eq=False)
class HostRequest:
    """A request to some hosts.

    Attributes:
        command: ``"step"``, ``"reset"`` or the name of a call.
        rows: The environments, in ascending order.
        seeds, options: The arguments of a reset, for all environments.
        results: The results of a call, by row.
        droppable: True if one method submits and awaits the request. If its wait is interrupted, the next call drops it.
        interrupted: True if an exception interrupted the wait. A reset of all environments may then drop the request.
    """

    command: str
    rows: Sequence[int]
    seeds: Sequence[Any] | None = None
    options: ResetOptions = None
    results: dict[int, Any] = field(default_factory=dict)
    droppable: bool = False
    interrupted: bool = False

    @property
    def phase(self) -> Phase:
        """The phase of the vector environment while this request is pending."""
        return PHASES.get(self.command, Phase.WAITING_CALL)


class RequestPart(NamedTuple):
    """The part of a request for one host.

    If ``rebuilds``, the host resets the rows' environments, which are new, instead of executing the request.
    """

    request: HostRequest
    host: RemoteHost
    rows: Sequence[int]
    rebuilds: bool = False

    @property
    def local(self) -> Sequence[int]:
        """The rows as indices on the host."""
        first = self.host.rows.start
        return range(len(self.rows)) if self.rows is self.host.rows else [row - first for row in self.rows]


class HostExchange:
    """The pending requests of one driver, and the latest results.

    Args:
        state, counters, timeout_error: The driver's call state, counters, and function that builds a ``StepTimeout``.
        pool: The started hosts.
        observation_space: The observation space of one environment.
        mode: The autoreset mode.
        restart: Replace lost hosts and continue, instead of raising.
        budget: The limit and the period of host restarts.
        step_timeout: Seconds until a reset or a step is considered to hang; ``None``: never.

    Attributes:
        failure_log: The log of failures.
        request: The pending request, if one call returns all of its results.
        parts: Reference of a reply -> its part of a pending request.
        dropped: The same for requests that were dropped; of their replies, only fatal failures and restarts are read.
        lost: The parts that were pending on hosts that died and will be replaced.
        ready: Row with a result that has not been returned -> its command, in the order in which the rows finished.
        infos: The infos of these rows.
        unraised: The exceptions still to be raised: the errors of each reply, and the rows that they left without a result.
        held: Row -> observation and info of a reset that its next step returns.
        store, rewards, terminations, truncations: The latest results.
        seeds: The source of seeds for rebuilt environments.
    """

    def __init__(
        self, state: CallState, counters: Counters, timeout_error: Callable[[str, Any], StepTimeout], pool: HostPool,
        observation_space: Space[Any], mode: AutoresetMode, *, restart: bool, budget: tuple[float | None, float],
        step_timeout: float | None,
    ) -> None:  # fmt: skip
        self.state, self.counters, self._timeout_error, self.pool, self.mode = state, counters, timeout_error, pool, mode
        self.restart, self.step_timeout = restart, step_timeout
        self.num_envs = n = sum(len(host.rows) for host in pool.hosts)
        self.failure_log = Failures(budget, lambda: counters.own_steps / n)
        self.rewards, self.terminations, self.truncations = np.zeros(n), np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        tree = fixed_tree(observation_space)
        self._records = record_type(tree, results=True)
        leaves = [] if tree is None else [np.zeros((n, *leaf.shape), leaf.dtype) for leaf in tree.leaves()]
        self._arrays = [self.rewards, self.terminations, self.truncations, *leaves]
        self.store: Any = PickledStore(observation_space, n) if tree is None else SharedStore(tree, leaves)
        self.request: HostRequest | None = None
        self.parts: dict[Any, RequestPart] = {}
        self.dropped: dict[Any, RequestPart] = {}
        self.lost: list[RequestPart] = []
        self.ready: dict[int, str] = {}
        self.infos: dict[int, Any] = {}
        self.unraised: deque[tuple[Errors, Collection[int]]] = deque()
        self.held: dict[int, tuple[Any, Any]] = {}
        self.seeds = np.random.SeedSequence()
        self.seconds_waited = 0.0

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Defer signal handlers while the body changes the state. An exception in the body leaves ``state.changing`` set."""
        with deferred_signals():
            before, self.state.changing = self.state.changing, True
            yield
            self.state.changing = before

    @property
    def in_flight(self) -> set[int]:
        """The rows of steps and resets that ``recv`` has not returned."""
        if self.request is not None or not (self.parts or self.ready or self.unraised or self.lost):
            return set()
        waiting = [part.rows for part in (*self.parts.values(), *self.lost) if part.request.command in PHASES]
        return set(self.ready).union(*waiting, *(rows for _, rows in self.unraised))

    # -- sending ----------------------------------------------------------------------------------------------------------

    def split(self, request: HostRequest, rows: Sequence[int], *, rebuilds: bool = False) -> list[RequestPart]:
        """Split the request for ``rows``, in ascending order, into one part per host."""
        if len(rows) == self.num_envs:
            return [RequestPart(request, host, host.rows, rebuilds) for host in self.pool.hosts]
        shares = ((host, [row for row in rows if row in host.rows]) for host in self.pool.hosts)
        return [RequestPart(request, host, host_rows, rebuilds) for host, host_rows in shares if host_rows]

    def submit(self, part: RequestPart, method: str, data: bytes, *options: Any) -> None:
        """Call ``method`` of the part's host with ``data``, the part's rows and ``options``."""
        # without options, all rows are left out: they are the default, and every argument takes time
        args = [part.local, *options] if options or len(part.rows) < len(part.host.rows) else []
        self.parts[self.pool.cluster.submit(part.host.index, method, data, *args)] = part

    def announce_rebuild(self, request: HostRequest, rows: Sequence[int], *, again: bool = False) -> dict[int, Any]:
        """Notify the observers of a rebuild of these rows, and return its seeds.

        The seeds of a reset are used for the first rebuild only; all other seeds are fresh.
        """
        new_seeds: list[Any] = [int(child.generate_state(1)[0]) for child in self.seeds.spawn(len(rows))]
        if request.seeds is not None and not again:
            given = [request.seeds[row] for row in rows]
            new_seeds = [fresh if seed is None else seed for seed, fresh in zip(given, new_seeds, strict=True)]
        if rows and self.failure_log.observers:
            with deferred_signals():
                for observer in self.failure_log.observers:
                    observer.on_reset(rows, new_seeds, select_options(request.options, rows))
        return dict(zip(rows, new_seeds, strict=True))

    def rebuild(self, request: HostRequest, seeds: dict[int, Any]) -> None:
        """Have hosts reset new environments for the rows of ``seeds``, with the options of the request if it is a reset."""
        self.forget(seeds)
        for part in self.split(request, list(seeds), rebuilds=True):
            self.submit(part, "reset", reset_arguments(part, seeds))

    def return_held(self, rows: Collection[int]) -> None:
        """Complete a step of these rows with the results of resets that are held for them."""
        for row in rows:
            observation, self.infos[row] = self.held.pop(row)
            self.store.set_row(row, observation)
            self.rewards[row], self.terminations[row], self.truncations[row] = 0.0, False, False
            self.ready[row] = "step"

    def forget(self, rows: Collection[int]) -> None:
        """Forget the failures and held results of rows that are reset or loaded."""
        self.failure_log.forget(rows)
        for row in rows:
            self.held.pop(row, None)

    def end(self, request: HostRequest) -> None:
        """End the pending call, and count the steps or resets that have results."""
        self.counters.steps += len(self.ready) if request.command == "step" else 0
        self.counters.resets += len(self.ready) if request.command == "reset" else 0
        self.drop_pending()

    def remove_received(self, rows: Sequence[int]) -> None:
        """Remove the rows that ``recv`` returns, and count their steps and resets."""
        commands = [self.ready.pop(row) for row in rows]
        self.counters.resets += commands.count("reset")
        self.counters.steps += commands.count("step")
        for row in rows:
            self.infos.pop(row, None)

    def drop_if_droppable(self) -> bool:
        """Drop the pending call if it is droppable, and return ``True`` if no call is pending any more."""
        if self.request is not None and self.request.droppable:
            with self.changing():
                self.drop_pending()
        return self.request is None

    def drop_pending(self) -> None:
        """Drop all pending requests."""
        self.dropped.update(self.parts)
        self.request, self.parts, self.lost, self.ready, self.infos = None, {}, [], {}, {}
        self.unraised.clear()

    # -- waiting ----------------------------------------------------------------------------------------------------------

    def wait_for_all(self, request: HostRequest, deadline: float | None, method: str) -> bool:
        """Wait for all replies to the pending call and raise its errors; return ``False`` if the deadline passes first."""
        if not self._wait(lambda: not self.parts and not self.lost, deadline, method, every=True):
            return False
        if self.unraised:
            error = combine([pair for errors, _ in self.unraised for pair in errors])
            with self.changing():
                self.end(request)
            raise error
        return True

    def wait_until_idle(self) -> None:
        """Wait for all replies that are pending, except from hosts that die meanwhile."""
        self._wait(lambda: not self.parts, None, "recv", every=True)

    def finish_call(self, timeout: float | None = None) -> dict[int, Any]:
        """Return the results of the pending call, by row.

        Raises:
            StepTimeout: The results are late; the call stays pending.
            Exception: An environment failed, or a worker or host died.
        """
        request = self.request
        assert request is not None
        name = wait_method(request.command)
        if not self.wait_for_all(request, deadline_after(timeout), name):
            raise self._timeout_error(name, timeout)
        self.state.changing = not request.droppable  # until the guard has returned the results
        self.request = None
        return request.results

    def convert_for_recv(self, count: int) -> None:
        """Let ``recv`` return the rows of a pending ``reset``, at least ``count``. Drop a droppable call; else raise."""
        if self.request is not None and not self.drop_if_droppable():
            require_pending_reset(self.request, count)
            self.request = None

    def wait_for_rows(self, count: int, deadline: float | None) -> bool:
        """Wait until ``count`` rows are ready; return ``False`` if the deadline passes first.

        Raises:
            NoAsyncCallError: Fewer rows are in flight.
            Exception: The errors of one reply; other errors are raised by later calls.
        """

        def is_enough() -> bool:
            if self.lost:
                return False
            if self.unraised:
                raise combine(self.unraised.popleft()[0])
            if len(self.ready) < count and len(in_flight := self.in_flight) < count:
                raise too_few_in_flight_error(count, len(in_flight), len(self.ready))
            return len(self.ready) >= count

        return self._wait(is_enough, deadline, "recv")

    def _wait(self, is_enough: Callable[[], bool], deadline: float | None, method: str, *, every: bool = False) -> bool:
        """Wait for replies until there are enough; return ``False`` if the deadline passes first.

        Without a deadline, :meth:`_kill_late_hosts` is called whenever a step or reset exceeds ``step_timeout``.
        """
        limit = self.step_timeout if deadline is None and (self.request is None or self.request.command in PHASES) else None
        until = deadline_after(limit) if deadline is None else deadline
        while not is_enough():
            if self.lost:
                self._rebuild_lost()  # waits for new hosts, which may take longer than the limit
                until = until if limit is None else deadline_after(limit)
            elif not self._receive(until, every):
                if limit is None:
                    return False
                self._kill_late_hosts(method, limit)
                until = deadline_after(limit)
        return True

    def _receive(self, deadline: float | None, every: bool) -> bool:
        """Wait for replies and apply them; return ``False`` if the deadline passes first."""
        began = time.perf_counter()
        try:
            replies = self.pool.cluster.collect(list(self.parts), deadline, every=every)
        finally:
            self.seconds_waited += time.perf_counter() - began
        if self.state.unusable:
            raise closed_error()
        # hosts reply in order, so replies to dropped requests came first
        dropped = self.pool.cluster.collect(list(self.dropped), time.monotonic()) if self.dropped and replies else ()
        for reference, reply in dropped:
            with self.changing():
                self._apply_dropped(self.dropped.pop(reference), reply)
        for reference, reply in replies:
            if reference in self.parts:  # otherwise an earlier reply reported the death of its host
                self._apply(reference, reply)
        return bool(replies)

    def _kill_late_hosts(self, method: str, limit: float) -> None:
        """Kill hosts that exceed ``step_timeout``, so that they are replaced; without ``restart``, raise ``StepTimeout``."""
        late = {part.host.index: (part.host, part.request.command) for part in reversed(self.parts.values())}
        if not self.restart:
            error = self._timeout_error(method, limit)
            self.failure_log.record_late(error, list(late.values()))
            raise error
        with self.changing():
            for host, _ in late.values():
                self.kill_host(host, f"it hung for more than {format_seconds(limit)} and was killed")

    # -- replies ----------------------------------------------------------------------------------------------------------

    def _apply(self, reference: Any, reply: HostReply | Packed | Lost) -> None:
        """Apply one reply to its request."""
        request, host, rows, rebuilds = self.parts[reference]
        if not isinstance(reply, (HostReply, Lost)):  # results of all rows, and nothing else: the usual case
            records, leaves = (reply, []) if isinstance(reply, bytes) else reply
            reply = HostReply(rows, fields(records, NUMBERS if leaves else self._records, len(rows)) + leaves)
            if not rebuilds and not self.failure_log.failed:
                self._write(reply)  # can be repeated after an interruption
                self.state.changing = True
                del self.parts[reference]
                self.ready.update(dict.fromkeys(rows, request.command))
                self.state.changing = False
                return
        with self.changing():
            if isinstance(reply, Lost):
                self.kill_host(host, str(reply))
                return
            del self.parts[reference]
            previous = {row: self.store.row(row) for row in reply.rows} if rebuilds else {}
            self._write(reply)
            if errors := self._apply_events(request, host, reply):
                self.unraised.append((errors, set(rows).difference(reply.rows) if request.command in PHASES else ()))
            self.failure_log.set_failed(host, reply.failed)
            self.failure_log.restarts += reply.restarts
            for row, last in previous.items():
                self._write_rebuilt_row(request.command == "step", row, last)
            self.ready.update(dict.fromkeys(reply.rows, request.command))

    def _write(self, reply: HostReply) -> None:
        where = to_array_index(reply.rows)
        for column, values in zip(self._arrays, reply.arrays, strict=False):
            column[where] = values

    def _apply_dropped(self, part: RequestPart, reply: HostReply | Packed | Lost) -> None:
        """Record the fatal failures in a request that was dropped, and count the restarts."""
        if not isinstance(reply, HostReply):
            return
        self.failure_log.restarts += reply.restarts
        for event in reply.events:
            if isinstance(event, RemoteFailure) and event.fatal:
                self.failure_log.record(part.host, part.request.command, event, dropped=not event.worker_died)

    def _apply_events(self, request: HostRequest, host: RemoteHost, reply: HostReply) -> Errors:
        """Apply the reply's outcome, events and error, and return the errors to raise."""
        errors: Errors = []
        if reply.outcome is not None:
            outcome = decode_outcome(reply.outcome)
            for row, observation in outcome.observations.items():
                self.store.accept(row, observation)
            if unsent := {failure.env for failure in outcome.failures if failure.is_unsent}:
                reply.rows = [row for row in reply.rows if row not in unsent]
            self.infos.update(outcome.infos)
            request.results.update(outcome.results)
            for failure in outcome.failures:
                error = failure.error if isinstance(failure.error, PackedError) else pack_error(failure.error)
                errors += self.failure_log.record(host, request.command, RemoteFailure([failure.env], error, fatal=False))
        for event in reply.events:
            if not isinstance(event, RemoteFailure):
                for observer in self.failure_log.observers:
                    try:
                        observer.on_reset(event.rows, event.seeds, event.options)
                    except Exception as error:
                        errors.append((None, error))
                continue
            recorded = self.failure_log.record(host, request.command, event)
            if reply.raises:
                errors += recorded
        if reply.error is not None:
            note = f"{host.label}, {envs_text(host.rows)}, during {request.command}"
            errors.append((None, unpack_error(reply.error, note)))
        return errors

    def _write_rebuilt_row(self, stepping: bool, row: int, last: Any) -> None:
        """Write the result of a rebuilt row; ``last`` is its observation before the rebuild."""
        first, same_step = self.infos.pop(row, {}), self.mode is AutoresetMode.SAME_STEP
        info = {"restarted": True} if stepping and not same_step else {**first, "restarted": True}
        if stepping:
            self.rewards[row], self.terminations[row], self.truncations[row] = 0.0, False, True
            if self.mode is AutoresetMode.NEXT_STEP:
                self.held[row] = self.store.row(row), first
            info["final_obs"] = last
            if not same_step:
                self.store.set_row(row, deepcopy(last))
        self.infos[row] = info

    # -- lost hosts -------------------------------------------------------------------------------------------------------

    def kill_host(self, host: RemoteHost, reason: str) -> None:
        """Kill a host. All parts that were pending there are lost."""
        if host.death:
            return
        lost = {reference: part for reference, part in self.parts.items() if part.host is host}
        host.command = next(iter(lost.values())).request.command if lost else "idle"
        when = "while idle" if not lost else f"during {host.command}"
        host.death = f"{host.label}, {envs_text(host.rows)}, died {when}: {reason}"
        self.pool.cluster.kill(host.index)
        self.failure_log.record_death(host)
        for reference, part in lost.items():
            del self.parts[reference]
            if self.restart and part.request.command in PHASES:
                self.lost.append(part)
            else:
                self.unraised.append(([(None, host.death_error())], part.rows))

    def replace_hosts(self, rows: Collection[int], *, count: bool) -> None:
        """Replace the dead hosts of these rows; with ``count``, count each new host against the restart budget.

        Raises:
            RestartsExhausted: The budget is exhausted.
            Exception: A new host cannot be started, see :meth:`HostPool.replace`.
        """
        for host in list(self.pool.hosts):
            if host.death and not set(host.rows).isdisjoint(rows):
                if count:
                    self.failure_log.count_restart(host)
                self.pool.replace(host)

    def _rebuild_lost(self) -> None:
        """Replace the hosts of lost parts, and reset the rows of these parts on the new hosts."""
        rows, errors = [row for part in self.lost for row in part.rows], Errors()
        rebuilds: list[tuple[HostRequest, dict[int, Any]]] = []
        with watched_handlers():
            try:
                self.replace_hosts(rows, count=True)
            except Exception as error:
                if raised_by_handler(error):
                    raise
                errors.append((None, error))
        with self.changing():
            try:
                rebuilds += [
                    (part.request, self.announce_rebuild(part.request, part.rows, again=part.rebuilds))
                    for part in ([] if errors else self.lost)
                ]
            except Exception as error:
                errors.append((None, error))
            for _, raised in errors:  # then there are no `rebuilds`
                name_envs(raised, rows)
            if errors:
                self.unraised.append((errors, rows))
            for request, seeds in rebuilds:
                self.rebuild(request, seeds)
            self.lost.clear()


def to_array_index(rows: Sequence[int]) -> slice | list[int]:
    """Return ascending rows as an array index: a slice, which is faster, if they are contiguous."""
    return slice(rows[0], rows[-1] + 1) if rows and rows[-1] - rows[0] == len(rows) - 1 else list(rows)


def reset_arguments(part: RequestPart, seeds: Any) -> bytes:
    """Pickle the seeds and options of a part's rows for a reset; ``seeds[row]`` is the seed of a row."""
    arguments = [seeds[row] for row in part.rows], select_options(part.request.options, part.rows)
    return cloudpickle.dumps(arguments)  # type: ignore[no-any-return]
