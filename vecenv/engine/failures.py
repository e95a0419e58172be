"""Records of failures, and the data for rebuilding failed rows. ``vecenv.engine.state_changes`` handles failures.

A failed row cannot be used until its environment has been rebuilt. A reset rebuilds it, and so does a load, unless its
worker died. With ``on_failure="restart"``, the call in which it failed or its next step does.

If a step rebuilds a row, its episode ends with reward 0 and truncation; its info has ``restarted``, and ``final_obs`` is its
last good observation. Then the row continues as the autoreset mode requires.
"""

from __future__ import annotations

import itertools
import math
import time
import traceback
from collections import deque
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.engine.observers import Observer, notify_failure
from vecenv.engine.requests import Death, Request
from vecenv.engine.worker_process import Worker, WorkerProcess
from vecenv.errors import EnvError, ErrorRecord, RestartsExhausted, StepTimeout, name_row
from vecenv.front.arguments import parse_timeout, select_options
from vecenv.front.driver import Counters
from vecenv.link.infos import NO_INFO, InfoReader
from vecenv.link.messages import (
    Failure,
    PackedError,
    name_envs,
    note_once,
    notes_about_others,
    pack_error,
    summary,
    unpack_error,
)
from vecenv.link.observations import SharedStore, Store, flatten
from vecenv.planning.options import OnFailure, Restart
from vecenv.shm import SharedArrays
from vecenv.shm.layout import Tree
from vecenv.system.reporting import RestartLog, log_error
from vecenv.system.restart_budget import RestartBudget
from vecenv.system.signals import deferred_signals
from vecenv.system.supervision import location_in_traceback

_MAX_ERRORS: Final = 1000


class FailureLog:
    """The log of one engine's failures.

    Attributes:
        errors: The latest 1,000 records, oldest first.
        num_errors: The number of all records so far.
        failed: Row -> description of the failure, for rows that have to be rebuilt.
        deaths: Row -> the death of its worker, for failed rows of dead workers, even after the worker was replaced.
        restart_counted: Failed rows with a restart that the budget has counted. Another attempt, because no process could
            be started or an observer raised, is not counted again. A failure during the rebuild counts as another restart.
        restarts: The number of restarts.
        restart_log: Writes the log lines about restarts.
        notes: Row -> the observers' notes about its latest failure.
        observers: The observers of the engine.
    """

    def __init__(self, observers: Sequence[Observer], *, logs_like_gymnasium: bool) -> None:
        self.errors: deque[ErrorRecord] = deque(maxlen=_MAX_ERRORS)
        self.num_errors = 0
        self.failed: dict[int, str] = {}
        self.deaths: dict[int, Death] = {}
        self.restart_counted: set[int] = set()
        self.restarts = 0
        self.restart_log = RestartLog()
        self.notes: dict[int, list[str]] = {}
        self.observers = observers
        self._logs_like_gymnasium = logs_like_gymnasium

    def _append(self, record: ErrorRecord) -> None:
        self.errors.append(record)
        self.num_errors += 1

    def record_death(self, death: Death) -> None:
        """Record a death. All rows of the worker fail, including idle ones."""
        self.failed.update(dict.fromkeys(death.envs, death.first_line))
        self.deaths.update(dict.fromkeys(death.envs, death))
        pid, error, now = death.pid or 0, death.error(), time.monotonic()
        envs = sorted(death.envs, key=lambda row: row != death.running)  # the running one comes first
        self._notify(envs, (error,), worker_died=True)
        self._append(ErrorRecord(None, death.worker, pid, death.command, error, death.text, now))

    def record(
        self, command: str, failures: Iterable[tuple[Failure, Worker]], *, mark: str = "fatal"
    ) -> list[tuple[int, Exception]]:
        """Record exceptions of environments, and return (env, exception) for each, ordered by environment.

        Args:
            command: The name of the request.
            failures: The failures, each with the worker that reported it.
            mark: The rows to mark as failed: ``"fatal"`` (the environment is gone), ``"all"`` (also those with a result that
                cannot be pickled), or ``"none"``.
        """
        raised: list[tuple[int, Exception]] = []
        for failure, worker in sorted(failures, key=lambda pair: pair[0].env):
            row = failure.env
            note = f"env {row}, {worker.label}, during {command}"
            error = to_exception(failure.error, note)
            packed = failure.error if isinstance(failure.error, PackedError) else pack_error(error)
            is_marked = mark == "all" or (failure.fatal and mark == "fatal")
            if is_marked:
                place = location_in_traceback(packed.text)
                self.failed[row] = f"{failure.text}, at {place}" if place else failure.text
                self.deaths.pop(row, None)
            failure.error = packed  # breaks a cycle: the exception's frames hold the failure
            # a copy for the record, because a raised exception keeps the program's frames and their objects alive
            recorded = unpack_error(packed, note)
            if is_marked or (command == "step" and mark != "none"):
                self._notify((row,) if is_marked else (), (error, recorded), worker_died=False)
            raised.append((row, error))
            index = worker.index if isinstance(worker, WorkerProcess) else -1
            self._append(ErrorRecord(row, index, worker.pid, command, recorded, packed.text, time.monotonic()))
        return raised

    def _notify(self, rows: Sequence[int], errors: Sequence[Exception], *, worker_died: bool) -> None:
        """Notify the observers, and add their notes to the errors."""
        if not self.observers:
            return
        with deferred_signals():
            notes = notify_failure(self.observers, rows, errors[0], worker_died=worker_died)
        self.notes.update(dict.fromkeys(rows, notes))
        for error, note in itertools.product(errors, notes):
            note_once(error, note)

    def record_late(self, error: StepTimeout, workers: Sequence[WorkerProcess]) -> None:
        """Record each worker that exceeded ``step_timeout`` and is not killed.

        The observers are notified of all rows at once, running ones first. Their notes are about the first row, and are
        added to ``error`` and to the record of that row's worker.
        """
        pairs = [(worker.noted_activity[1], row) for worker in workers for row in worker.rows]
        ordered = [row for running, row in sorted(pairs, key=lambda pair: pair[0] != pair[1])]
        notes: Sequence[str] = ()
        if self.observers:
            with deferred_signals():
                notes = notify_failure(self.observers, ordered, error, worker_died=False)
            for note in notes:
                note_once(error, note)
        for worker in workers:
            recorded = error.copy()
            for note in notes if ordered[0] in worker.rows else ():
                note_once(recorded, note)
            (command, row), now = worker.noted_activity, time.monotonic()
            self._append(ErrorRecord(row, worker.index, worker.pid, command, recorded, str(error), now))

    def combine(self, request: Request, raised: Sequence[tuple[int, Exception]]) -> Exception:
        """Return one exception for all failures of a request: that of the first environment, with notes about the others."""
        deaths = request.deaths
        if raised:
            error = raised[0][1]
            for note in notes_about_others(raised):
                note_once(error, note)
            for death in deaths:
                note_once(error, f"also: {death.text}")
            name_envs(error, [row for row, _ in raised] + [row for death in deaths for row in death.envs])
        else:
            error = _combine_deaths(deaths)
        for death in deaths:
            for note in self.notes.get(death.envs[0], ()):
                note_once(error, note)
        if raised and self._logs_like_gymnasium and request.command in ("step", "reset"):
            _log_like_gymnasium(request.failures)
        return error

    def forget(self, rows: Iterable[int]) -> None:
        """Forget that rows failed, because they are being rebuilt or have been."""
        for row in rows:
            self.failed.pop(row, None)
            self.deaths.pop(row, None)
            self.restart_counted.discard(row)


def _combine_deaths(deaths: Sequence[Death]) -> Exception:
    """Return one exception for all workers that died in one call."""
    first = deaths[0]
    if len(deaths) == 1:
        return first.error()
    text = f"{len(deaths)} workers died:\n" + "\n".join(death.text for death in deaths)
    envs = tuple(sorted(row for death in deaths for row in death.envs))
    where = {row: place for death in deaths for row, place in death.where.items()}
    return Death(
        text, first.worker, envs, first.pid, first.exitcode, first.command, first.timeout, where=where
    ).error()  # fmt: skip


def _log_like_gymnasium(failures: Iterable[tuple[Failure, Worker]]) -> None:
    """Log Gymnasium's messages: two per failure and one at the end. Programs written for its class count them."""
    for failure, _ in sorted(failures, key=lambda pair: pair[0].env):
        packed = failure.error
        log_error(f"Received the following error from Worker-{failure.env} - Shutting it down")
        log_error(packed.text if isinstance(packed, PackedError) else "".join(traceback.format_exception(packed)))
    log_error("Raising the last exception back to the main process.")


def to_exception(error: Any, note: str) -> Exception:
    """Return the exception of a failure, with ``note`` added.

    An error that is not an ``Exception`` (such as ``SystemExit`` from an environment that the caller steps itself) is
    replaced by an ``EnvError``.
    """
    if not isinstance(error, BaseException):
        return unpack_error(error, note)
    if isinstance(error, Exception):
        note_once(error, note)
        return error
    replacement = EnvError(f"{note}: {summary(error)}", original=summary(error))
    replacement.__cause__ = error
    return replacement


@dataclass(frozen=True, slots=True)
class Policy:
    """The options for handling failures.

    Attributes:
        restart: Rebuild environments that failed, and continue; otherwise raise.
        restart_limit, restart_period: See :class:`~vecenv.system.restart_budget.RestartBudget`.
        step_timeout: Seconds after which a reset or a step counts as hanging; ``None`` for no limit.
        start_timeout: Seconds that a worker has for building its environments; infinite for no limit.
        logs_like_gymnasium: Log exceptions of environments as Gymnasium's class does, before they are raised: programs
            written for that class, and its own tests, count these lines. One of them reports that a worker is shut down,
            which does not happen here.
    """

    restart: bool = False
    restart_limit: float | None = None
    restart_period: float = 60.0
    step_timeout: float | None = None
    start_timeout: float = 60.0
    logs_like_gymnasium: bool = False

    @classmethod
    def from_options(
        cls, on_failure: OnFailure, step_timeout: Any, start_timeout: Any, *, logs_like_gymnasium: bool = False
    ) -> Policy:
        """Return the policy of a vector environment with these options."""
        budget = Restart.of(on_failure)
        return cls(
            on_failure != "raise", budget.limit, budget.period, parse_timeout(step_timeout, "step_timeout"),
            math.inf if (start := parse_timeout(start_timeout, "start_timeout")) is None else start, logs_like_gymnasium,
        )  # fmt: skip


class LastGoodObservations:
    """The last good observation of every environment, which only restarts need.

    Args:
        store: The current observations.
        tree: The structure of an observation; ``None`` if it has no fixed size.
        num_envs: The number of environments.
    """

    def __init__(self, store: Store, tree: Tree | None, num_envs: int) -> None:
        self._store, self._tree, self._num_envs = store, tree, num_envs
        self._batch: Any = None  # if observations have a fixed size: a batch, which may be that of the store
        self._is_pinned = False
        self._rows: dict[int, Any] = {}  # if they are pickled: row -> observation

    def keep(self, rows: Sequence[int], *, pin: bool) -> None:
        """Keep the current observations of these rows, with ``pin`` by using another batch from now on, if possible."""
        if self._tree is None:
            for row in rows:
                self._rows[row] = self._store.row(row)
        elif len(rows) == self._num_envs:
            self._batch = self._store.pin() if pin else None
            self._is_pinned = self._batch is not None
            if not self._is_pinned:
                self._batch = self._store.copy()
        elif rows:
            if self._is_pinned:
                self._batch, self._is_pinned = self._tree.map(np.copy, self._batch), False
            if self._batch is None:  # workers may be writing the observations of the other rows
                self._batch = self._tree.map(np.zeros_like, self._store.copy())
            new_leaves = flatten(self._tree, self._store.take(np.array(rows)))
            for leaf, new_leaf in zip(flatten(self._tree, self._batch), new_leaves, strict=True):
                leaf[list(rows)] = new_leaf

    def copy_row(self, row: int) -> Any:
        """Return a copy of the last good observation of an environment, or ``None``."""
        if self._tree is None:
            return deepcopy(self._rows.get(row))
        if self._batch is None:
            return None
        return self._tree.map(lambda leaf: leaf[row].copy(), self._batch)

    def restore(self, rows: Iterable[int]) -> None:
        """Restore the kept observations: failing environments may have overwritten parts of the current ones.

        A row without one becomes zeros in a shared store, and stays as it is in others.
        """
        for row in rows:
            if (last := self.copy_row(row)) is not None:
                self._store.set_row(row, last)
            elif isinstance(self._store, SharedStore):
                self._store.clear_row(row)


class Rebuilder:
    """The data for rebuilding failed rows: budget, seeds and last good observations; writes the results of rebuilt rows.

    Args:
        policy: The options for handling failures.
        failure_log: The log of failures.
        arrays, store, infos: The results, observations and infos of the rows.
        tree: The structure of an observation; ``None`` if it has no fixed size.
        mode: The autoreset mode.
        counters: The numbers of steps and resets.

    Attributes:
        seeds: The source of seeds for environments that are rebuilt.
        last_good: The last good observation of every row.
    """

    def __init__(
        self, policy: Policy, failure_log: FailureLog, arrays: SharedArrays, store: Store, infos: InfoReader,
        tree: Tree | None, mode: AutoresetMode, counters: Counters,
    ) -> None:  # fmt: skip
        num_envs = len(arrays.rewards)
        self.budget = RestartBudget(policy.restart_limit, policy.restart_period, lambda: counters.own_steps / num_envs)
        self.last_good = LastGoodObservations(store, tree, num_envs)
        self.seeds = np.random.SeedSequence()
        self._failure_log, self._arrays, self._store, self._infos, self._mode = failure_log, arrays, store, infos, mode

    def count_restarts(
        self, rows: Iterable[int], workers: Sequence[Worker], budget: RestartBudget | None = None
    ) -> RestartsExhausted | None:
        """Count the restarts of these rows; return the error if they exceed the budget.

        A dead worker counts as one restart, regardless of the number of its rows.
        """
        log, uncounted, budget = self._failure_log, set(rows) - self._failure_log.restart_counted, budget or self.budget
        causes: list[tuple[str, Sequence[int]]] = []
        # each death once, whichever of its rows are rebuilt
        deaths = {id(log.deaths[row]): log.deaths[row] for row in sorted(uncounted & log.deaths.keys())}
        for death in deaths.values():
            causes.append((death.first_line, list(death.envs)))
            uncounted -= set(death.envs)
        causes += [(name_row(row, log.failed[row]), [row]) for row in sorted(uncounted)]
        for position, (cause, cause_rows) in enumerate(causes):
            if notes := log.notes.get(cause_rows[0]):
                cause += f" ({'; '.join(notes)})".replace("\n", " ")
                causes[position] = cause, cause_rows
            if not budget.spend(cause, cause_rows):
                budget.refund(position)  # the rows of earlier causes are not restarted either
                return self._exhausted_error(cause, cause_rows, workers, budget)
        for cause, cause_rows in causes:
            log.restarts += 1
            log.restart_counted |= log.failed.keys() & set(cause_rows)
            log.restart_log.log(cause)
        return None

    def _exhausted_error(
        self, cause: str, rows: Sequence[int], workers: Sequence[Worker], budget: RestartBudget
    ) -> RestartsExhausted:
        """Return the error for ``rows`` that exceed the budget; it names all failed rows of ``workers``."""
        failed = sorted(row for worker in workers for row in worker.rows if row in self._failure_log.failed)
        worker = next(worker for worker in workers if rows[0] in worker.rows)
        deaths = self._failure_log.deaths
        death = deaths.get(rows[0])
        where = {row: deaths[row].where[row] for row in failed if row in deaths}
        return RestartsExhausted(
            budget.explain_exhaustion(cause, rows),
            worker=worker.index if isinstance(worker, WorkerProcess) else -1,
            pid=death.pid if death else worker.pid,
            exitcode=death.exitcode if death else None,
            envs=failed, command="restart", where=where,
        )  # fmt: skip

    def prepare_rebuilds(
        self, request: Request, parts: Iterable[Sequence[int]]
    ) -> list[tuple[list[Any], Any, bool]] | Exception:
        """Prepare a rebuild message for each part of the rows. Return the payloads, or the exception of an observer."""
        with deferred_signals():  # so that the exception is not a signal handler's
            try:
                return [self._prepare_rebuild(request, rows) for rows in parts]
            except Exception as error:
                return error

    def _prepare_rebuild(self, request: Request, rows: Sequence[int]) -> tuple[list[Any], Any, bool]:
        """Mark rows as being rebuilt for a request; return the payload: seeds, options, True if the next step resets.

        In next-step mode, the result is a truncated step, so the next step resets the row again, as after any truncation.
        The observation of the first reset is not shown.

        A row that fails in a reset is rebuilt with the options of that reset. Its seed in that reset, if it has one, is used
        for the first rebuild only; all other seeds are fresh.
        """
        stepping = request.command == "step"
        for row in rows:
            request.rebuilding[row] = self.last_good.copy_row(row) if stepping else None
            request.infos.pop(row, None)  # of the failed environment
        seeds: list[Any] = [int(child.generate_state(1)[0]) for child in self.seeds.spawn(len(rows))]
        if request.seeds is not None:
            assert request.rows is not None  # every reset has rows
            reseeded = set(request.rows) - request.repeated
            given = [request.seeds[row] if row in reseeded else None for row in rows]
            seeds = [fresh if seed is None else seed for seed, fresh in zip(given, seeds, strict=True)]
            request.repeated.update(rows)
        for observer in self._failure_log.observers:
            observer.on_reset(rows, seeds, select_options(request.options, rows))
        return seeds, select_options(request.options, rows), stepping and self._mode is AutoresetMode.NEXT_STEP

    def write_rebuilt_results(self, request: Request, rows: Sequence[int]) -> None:
        """Write the results of rebuilt rows. Those of a step are truncated steps, as docs/failures.md describes."""
        arrays, stepping = self._arrays, request.command == "step"
        same_step = self._mode is AutoresetMode.SAME_STEP
        request.may_have_infos = True
        for row in rows:
            last = request.rebuilding.pop(row)
            info: dict[Any, Any] = {"restarted": True}
            if not stepping or same_step:  # the result shows the new episode, so it keeps the info of its reset
                info = {**(request.infos.get(row) or self._infos.row_info(row)), **info}
            request.infos[row] = info
            request.finals.pop(row, None)
            arrays.info_schemas[row], arrays.final[row] = NO_INFO, False
            if stepping:
                arrays.rewards[row], arrays.terminations[row], arrays.truncations[row] = 0.0, False, True
                if last is not None:
                    request.finals[row] = last
                    if not same_step:  # the result shows the old episode
                        self._store.set_row(row, deepcopy(last))
