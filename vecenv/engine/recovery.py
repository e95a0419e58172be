"""What to do about failures and deaths: record them, raise them, or rebuild what was lost and go on.

Once for steps, for rows that are received one by one, and for hosts of other machines. Rebuilding takes long and cannot be
done twice, so how far it has got stands in the :class:`~vecenv.engine.pending.Settlement`: after an interruption the next
wait goes on there.

Under ``on_failure="restart"`` a row that was lost comes back in the same step: truncated, reward 0, ``restarted`` in its
info, its last good observation as ``final_obs``, and then what the autoreset mode has to say.
"""

from __future__ import annotations

import collections
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Final, NoReturn

import numpy as np
from gymnasium import logger
from gymnasium.vector import AutoresetMode

from vecenv.engine.handles import envs_text, raise_ready
from vecenv.engine.pending import (
    COLUMNS,
    NOTHING,
    Answer,
    Death,
    PendingRequests,
    Request,
    Result,
    Settlement,
    Worker,
    WorkerRequest,
)
from vecenv.engine.pool import WorkerPool
from vecenv.errors import ClusterError, EnvFailed, ErrorRecord, RestartsExhausted, StartupTimeout, StepTimeout, WorkerDied
from vecenv.front.arguments import deadline_of, options_of_rows, seconds_of
from vecenv.link.infos import NO_INFO, InfoReader
from vecenv.link.messages import Failure, Op, PackedError, pack_error, summary, unpack_error
from vecenv.link.observations import SharedStore, Store, flat_of
from vecenv.recording.file import Failed
from vecenv.recording.recorder import Recorder
from vecenv.shm import Batch
from vecenv.shm.layout import Tree

_KEPT_ERRORS: Final = 1000


class Ledger:
    """The failures of one vector environment.

    Attributes:
        errors: Records, oldest first.
        failed: Row -> what happened, for rows that only a reset or a restart brings back.
        restarts: How many there were.
        restart_log: Says each.
        paid: Those of them whose restart is in the budget already.
        latest_death: Of the worker that died last.
        recorder: Writes a file about what fails; ``None``: there is none.
        recordings: Row -> the file about its latest failure.
    """

    def __init__(self) -> None:
        self.errors: deque[ErrorRecord] = deque(maxlen=_KEPT_ERRORS)
        self.failed: dict[int, str] = {}
        self.paid: set[int] = set()
        self.restarts = 0
        self.restart_log = RestartLog()
        self.latest_death: Death | None = None
        self.recorder: Recorder | None = None
        self.recordings: dict[int, str] = {}
        self._deaths: set[tuple[int, int | None]] = set()  # (worker, pid) of those that are on record

    def record(self, settlement: Settlement, result: Result) -> None:
        """Make the exceptions of what failed, once, and put them on record, once.

        A record keeps an exception of its own: one that was raised keeps the program's frames, and all that is in them.
        """
        if settlement.raised is None:
            self.make(settlement, result)
            settlement.records += [record for _, record in result.errors]
        self.write(settlement)

    def make(self, settlement: Settlement, result: Result) -> None:
        """Make the exceptions of what failed, and their records. A death that several rounds tell of is recorded once."""
        raised, records, now = [], [], time.monotonic()
        distinct = {death.worker: death for death in result.deaths}.values()
        new = [death for death in distinct if (death.worker, death.pid) not in self._deaths]
        if self.recorder is not None:
            self._write_files(settlement, result.failures, new)
        for death in distinct:
            if death in new:
                pid, error = death.pid or 0, death.error()
                where = self.files(death.envs)
                records.append(ErrorRecord(None, death.worker, pid, death.command, error, death.text, now, where))
            self.latest_death = death
        for failure, worker in sorted(result.failures, key=lambda pair: pair[0].env):
            made, record = self.exception(failure, worker, settlement.command)
            raised.append((failure.env, made))
            records.append(record)
        settlement.records, settlement.raised = records, raised

    def write(self, settlement: Settlement) -> None:
        """Move a round's records into the ledger, each in one call of C, so that none is there twice or not at all."""
        waiting = settlement.records
        self.errors.extend(map(list.pop, repeat(waiting, len(waiting)), repeat(0)))

    def exception(self, failure: Failure, worker: Worker, command: str) -> tuple[Exception, ErrorRecord]:
        """The exception of a failure, and the record of it."""
        note = f"env {failure.env}, {worker.label}, during {command}"
        error = raise_ready(failure.error, note)
        packed = failure.error if isinstance(failure.error, PackedError) else pack_error(error)
        failure.error = packed  # what raised it holds the failure: a cycle, with the program's frames in it
        if "daemonic processes are not allowed" in summary(error):
            note_once(error, "environments that start processes of their own need AsyncVectorEnv(..., daemon=False)")
        index = -1 if worker.local else worker.index
        rows = error.envs if isinstance(error, WorkerDied) else [failure.env]  # a host's worker has several
        kept, where = unpack_error(packed, note), self.files(rows)
        if where:
            note_once(error, f"recorded: {where}")
            note_once(kept, f"recorded: {where}")
        return error, ErrorRecord(failure.env, index, worker.pid, command, kept, packed.text, time.monotonic(), where)

    def _write_files(
        self, settlement: Settlement, failures: Sequence[tuple[Failure, Worker]], deaths: Sequence[Death]
    ) -> None:
        """Have what failed recorded, once."""
        assert self.recorder is not None
        failed: dict[int, Failed] = {}
        for death in deaths:
            seconds = self.recorder.limits.pop(death.pid or 0, None)
            how, text = "died" if seconds is None else "hung", death.text.partition("\n")[0]
            failed.update(dict.fromkeys(death.envs, Failed(how, text, death.command, death.exitcode, seconds)))
        for failure, _ in failures:
            if failure.fatal:
                failed[failure.env] = Failed("raised", failure.text, settlement.command)
        if failed:
            self.recordings.update(self.recorder.failures(failed))

    def files(self, rows: Sequence[int]) -> str:
        """The files about rows that failed together, in words; empty: there are none."""
        found = [self.recordings[row] for row in rows if row in self.recordings]
        return f"{found[0]} and {len(found) - 1} more" if len(found) > 1 else "".join(found)

    def record_late(self, error: StepTimeout, late: Sequence[Worker], limit: float | None, requests: Any) -> None:
        """Workers hang, and are left alone: have what they were asked recorded, and name the files in the exception."""
        if self.recorder is None:
            return
        for request in requests:
            if request.awaits(late[0]):
                self.recorder.answered(request, late[0].index if request.by_row else None)
                text = f"it hung for more than {limit} seconds"
                rows = [row for worker in late for row in worker.rows]
                self.recordings.update(
                    self.recorder.failures(dict.fromkeys(rows, Failed("hung", text, request.command, None, limit)))
                )
                note_once(error, f"recorded: {self.files(rows)}")
                return

    def mark_failed(self, result: Result, rows: Sequence[int], *, all_of_them: bool) -> None:
        """Note which rows have to be rebuilt.

        A death takes all rows of its worker, those too that nothing was asked of, when it is first told of. Later, when the
        place has been taken by a new worker, it takes those of ``rows`` that the dead one was asked about.

        Args:
            result: What environments raised, and which workers died.
            rows: Which environments these answers are about.
            all_of_them: Also where the environment itself is well.
        """
        for death in result.deaths:
            known = (death.worker, death.pid) in self._deaths
            for row in set(rows) & set(death.envs) if known else death.envs:
                self.failed.setdefault(row, death.text.partition("\n")[0])
            self._deaths.add((death.worker, death.pid))
        for failure, _ in result.failures:
            if failure.fatal or all_of_them:
                self.failed.setdefault(failure.env, failure.text)

    def mark_recovered(self, row: int) -> None:
        """A row is well again."""
        self.failed.pop(row, None)
        self.paid.discard(row)

    def refuse(self, failed: dict[int, str]) -> NoReturn:
        """Say which rows need a reset first."""
        rows = sorted(failed)
        raise EnvFailed(
            f"envs {rows} failed earlier and have to be rebuilt by reset() (or a reset_mask that includes them) first: "
            f"env {rows[0]}: {failed[rows[0]]}"
        )

    def combined_error(self, settlement: Settlement, result: Result) -> Exception:
        """The failure of the lowest environment, with notes on all the others."""
        raised, others = settlement.raised, [error for error, _ in result.errors]
        distinct = list({death.worker: death for death in result.deaths}.values())
        if where := self.files([row for death in distinct for row in death.envs]):
            distinct = [replace(death, text=f"{death.text}\nrecorded: {where}") for death in distinct]
        if others:
            for other in others[1:]:
                note_once(others[0], f"also: {other}")
            return others[0]
        if not raised:
            return _one_death(distinct)
        error = raised[0][1]
        for env, other in raised[1:]:
            note_once(error, f"also failed: env {env}: {summary(other)}")
        for death in distinct:
            note_once(error, f"also: {death.text}")
        return error

    def log(self, failures: Sequence[tuple[Failure, Any]]) -> None:
        """Gymnasium's own messages, word for word: two per failure and one at the end."""
        for failure, _ in sorted(failures, key=lambda pair: pair[0].env):
            packed = failure.error
            logger.error(f"Received the following error from Worker-{failure.env} - Shutting it down")
            text = packed.text if isinstance(packed, PackedError) else "".join(traceback.format_exception(packed))
            logger.error("%s", text)
        logger.error("Raising the last exception back to the main process.")


def note_once(error: BaseException, note: str) -> None:
    """Add a note, unless it is there."""
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _one_death(deaths: Sequence[Death]) -> Exception:
    """One error for all workers that died in one call."""
    if len(deaths) == 1:
        return deaths[0].error()
    first = deaths[0]
    text = f"{len(deaths)} workers died:\n" + "\n".join(death.text for death in deaths)
    envs = tuple(sorted(row for death in deaths for row in death.envs))
    return Death(text, first.worker, envs, first.pid, first.exitcode, first.command, first.kind).error()


FREE_RESTARTS: Final = 5
"""Restarts that an environment, or a worker process, has in a period however few steps it makes."""
STEPS_PER_RESTART: Final = 1000
"""Steps of these environments that allow one restart more."""

_log = logging.getLogger("vecenv")


@dataclass(frozen=True, slots=True)
class Policy:
    """What to do about failures.

    Attributes:
        restart: Rebuild what was lost and go on; otherwise raise.
        restart_limit, restart_period: See :class:`RestartBudget`.
        step_timeout: Seconds until a reset or a step is taken to hang; ``None``: never.
        start_timeout: Seconds a worker has for building its environments; ``None``: as long as it takes.
        gymnasiums_words: Log what environments raise as Gymnasium's class does, before it is raised. Programs that were
            written for that class, and its own tests, count these lines, though no worker is shut down here.
    """

    restart: bool = False
    restart_limit: int | None = None
    restart_period: float = 60.0
    step_timeout: float | None = None
    start_timeout: float | None = 60.0
    gymnasiums_words: bool = False

    @classmethod
    def of(
        cls, on_failure: str, restart_limit: int | None, restart_period: float, step_timeout: Any, start_timeout: Any,
        *, gymnasiums_words: bool = False,
    ) -> Policy:  # fmt: skip
        """From the options of a vector environment."""
        return cls(
            on_failure == "restart", restart_limit, restart_period, seconds_of(step_timeout, "step_timeout"),
            seconds_of(start_timeout, "start_timeout"), gymnasiums_words,
        )  # fmt: skip


class RestartBudget:
    """How many restarts there may be within some seconds (Erlang's intensity and period).

    Without a limit each environment, and each worker process that dies, has a budget of its own: five restarts, and one more
    for every 1,000 steps that its environments made since the oldest of its restarts in the period. One that cannot work is
    given up soon, whatever the number of the others; one that fails now and then goes on, however fast it is.

    Args:
        limit: Restarts of all environments together within ``period``; ``None``: as above.
        period: Seconds.
        steps: How many steps each environment has made.
        clock: For tests.
    """

    def __init__(
        self, limit: int | None, period: float, steps: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.limit = limit
        self.period = period
        self.causes: collections.deque[str] = collections.deque(maxlen=5)
        self._steps = steps
        self._clock = clock
        self._spent: collections.deque[tuple[float, tuple[int, ...], float]] = collections.deque()  # when, rows, their steps

    def spend(self, cause: str = "", rows: Sequence[int] = ()) -> bool:
        """Take one restart of these rows; ``False`` if the budget is used up."""
        now, whose = self._clock(), tuple(rows)
        while self._spent and now - self._spent[0][0] > self.period:
            self._spent.popleft()
        if cause:
            self.causes.append(cause)
        count, allowed = self._balance(whose)
        if count >= allowed:
            return False
        self._spent.append((now, whose, self._steps()))
        return True

    def _balance(self, whose: tuple[int, ...]) -> tuple[int, float]:
        """How many restarts these rows had in the period, and how many they may have."""
        if self.limit is not None:
            return len(self._spent), self.limit
        steps = [made for _, rows, made in self._spent if rows == whose]
        made = (self._steps() - steps[0]) * len(whose) if steps else 0.0
        return len(steps), FREE_RESTARTS + made // STEPS_PER_RESTART

    def refusal(self, rows: Sequence[int]) -> str:
        """Why there is no further restart of these rows, and what can be done about it."""
        causes = "\n".join(f"- {cause}" for cause in self.causes)
        if self.limit is not None:
            return (
                f"more than {self.limit} restarts within {self.period:g} seconds, which is the budget that restart_limit "
                f"and restart_period set; the last causes:\n{causes}"
            )
        _, allowed = self._balance(tuple(rows))
        return (
            f"{envs_text(rows)} needed more than {allowed:.0f} restarts within {self.period:g} seconds. By default an "
            f"environment, or a worker process, has {FREE_RESTARTS}, and one more for every {STEPS_PER_RESTART:,} steps; "
            f"restart_limit=N allows N restarts of all environments together instead. The last causes:\n{causes}"
        )


class RestartLog:
    """Says each restart and its cause by :mod:`logging`, as the logger ``vecenv``, until there are too many to read.

    Python's warnings would be the wrong way: a program may have made exceptions of them, in the middle of a restart.

    Args:
        most: Lines within ``period``. Those that come after are counted, and the next line gives the count.
        period: Seconds.
        clock: For tests.
    """

    def __init__(self, most: int = 5, period: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._period = period
        self._clock = clock
        self._began = -float("inf")
        self._said = 0
        self._unsaid = 0

    def say(self, cause: str) -> None:
        """One restart, before it is made."""
        now = self._clock()
        if now - self._began >= self._period:
            self._began, self._said = now, 0
        if self._said >= self._most:
            self._unsaid += 1
            return
        unsaid, self._unsaid, self._said = self._unsaid, 0, self._said + 1
        more = f" (and {unsaid} restarts more since the last of these lines)" if unsaid else ""
        _log.warning("vecenv restarts what failed: %s%s", cause, more)


class Remembered:
    """The last good observation of every environment.

    Args:
        store: Where observations are.
        tree: Structure of one, where they are of fixed size.
    """

    def __init__(self, store: Store, tree: Tree | None) -> None:
        self._store = store
        self._tree = tree
        self._batch: Any = None  # the batch as it was when all was well, where observations are of fixed size ...
        self._rows: dict[int, Any] = {}  # ... and row by row where they travel by pickle

    def keep(self, rows: Sequence[int], *, all_rows: bool) -> None:
        """Keep the observations of these rows; ``all_rows``: they are all there are."""
        if self._tree is None:
            for row in rows:
                self._rows[row] = self._store.row(row)
        elif self._batch is None or all_rows:
            self._batch = self._store.batch(copy=True)
        elif rows:
            fresh = flat_of(self._tree, self._store.take(np.array(rows)))
            for kept, leaf in zip(flat_of(self._tree, self._batch), fresh, strict=True):
                kept[list(rows)] = leaf

    def of(self, row: int) -> Any:
        """The observation that was kept of an environment, as an object of its own; ``None`` if there is none."""
        if self._tree is None:
            return deepcopy(self._rows.get(row))
        if self._batch is None:
            return None
        return self._tree.map(lambda leaf: leaf[row].copy(), self._batch)


class Recovery(PendingRequests):
    """What an engine does about failures.

    Attributes:
        ledger: Where failures are written down.
        failed: Of that, the rows that only a reset or a restart brings back, and what happened.
        remembered: The last good observation of every row.
        restart_seeds: Of environments that are built anew.
        budget: How many restarts there may be.
    """

    num_envs: int
    mode: AutoresetMode
    policy: Policy
    pool: WorkerPool
    batch: Batch
    store: Store
    ledger: Ledger
    failed: dict[int, str]
    remembered: Remembered
    restart_seeds: np.random.SeedSequence
    budget: RestartBudget
    _infos: InfoReader

    def composed(self, command: str, parts: Sequence[WorkerRequest]) -> Request:
        """A request of these parts, made ready to be sent."""
        request = Request(self.pool.next_seq(), command, tuple([part.worker for part in parts]))
        stage, seq = self.pool.stage, request.seq
        request.parts = {part.worker.index: stage(part, seq) for part in parts}
        return request

    def read(self, answers: Iterable[tuple[Worker, Answer]]) -> Result:
        """All answers together."""
        raise NotImplementedError

    def end_late(self, late: Sequence[Worker], limit: float | None) -> None:
        """Kill workers that hang."""

    def show_whole(self, rows: Sequence[int]) -> None:
        """These rows failed and stay so: what they were writing then may be there in part. Show the last whole observation
        instead, or zeros where none is kept."""
        for row in rows:
            if (last := self.remembered.of(row)) is not None:
                self.store.put_row(row, last)
            elif isinstance(self.store, SharedStore):
                self.store.blank(row)

    # -- workers that died before anything is asked -----------------------------------------------------------------

    def revive(self, rows: Sequence[int]) -> None:
        """Start anew every dead worker that one of these rows belongs to."""
        wanted = set(rows)
        for worker in list(self.pool.workers):
            if worker.death is not None and not wanted.isdisjoint(worker.rows):
                failed = self._replace(worker)
                if failed is not None:
                    raise failed

    def _replace(self, worker: Any) -> Exception | None:
        """Start a new worker in the place of a dead one; what its environments raised while they were built."""
        for row in worker.rows:
            self.ledger.failed.setdefault(row, "its worker died")
        ready = self.pool.replace(worker)
        self.ledger.paid.update(worker.rows)
        if ready.failures:
            new = next(other for other in self.pool.workers if other.index == worker.index)
            return self.start_failure([(failure, new) for failure in ready.failures])
        return None

    def start_failure(self, failures: list[tuple[Failure, Worker]]) -> Exception | None:
        """The exception for what environments raised while they were built."""
        if not failures:
            return None
        settlement, result = Settlement(Request(0, "start", ()), (), ()), Result(failures=failures)
        self.ledger.record(settlement, result)
        self.ledger.mark_failed(result, (), all_of_them=False)
        return self.ledger.combined_error(settlement, result)

    # -- answers ----------------------------------------------------------------------------------------------------

    def resolve(self, settlement: Settlement) -> Exception | None:
        """See to what failed in a round whose answers were read.

        Returns:
            The exception that is the answer; ``None`` where all is well or rebuilt. To be called until it returns: an
            exception that comes out of it is an interruption.
        """
        result = settlement.result
        assert result is not None
        if settlement.settled or settlement.error is not None:
            return settlement.error
        if result.failures or result.deaths or result.errors or settlement.lost:
            rebuilds = self.policy.restart and settlement.command in ("step", "reset")
            self.ledger.record(settlement, result)
            if settlement.todo is None:
                self.ledger.mark_failed(result, settlement.rows, all_of_them=rebuilds)
            if result.errors or not rebuilds:
                if result.failures and self.policy.gymnasiums_words and settlement.command in ("step", "reset"):
                    self.ledger.log(result.failures)
                settlement.error = self.ledger.combined_error(settlement, result)
                return settlement.error
            if settlement.todo is None:
                settlement.todo = {row for row in settlement.rows if row in self.ledger.failed}
            if (gave_up := self._rebuild(settlement)) is not None:
                settlement.error = gave_up
                return gave_up
            self._write_rebuilt(settlement)
        settlement.settled = True
        return None

    def _rebuild(self, settlement: Settlement) -> Exception | None:
        """New environments for the rows that are to be rebuilt, within the budget; the exception if it is used up."""
        ledger = self.ledger
        while settlement.todo:
            if settlement.rebuild is None:
                if (gave_up := self._replace_dead(settlement)) is not None:
                    return gave_up
                if any(self._worker_of(row).death is not None for row in settlement.todo):
                    continue
                settlement.rebuild = self._rebuild_request(sorted(settlement.todo), settlement)
            if settlement.rebuild.seq not in self.requests:
                self.pool.ask(settlement.rebuild)
            limit = (self.policy.start_timeout or 0.0) + (self.policy.step_timeout or 0.0)
            limit_or_never = None if self.policy.start_timeout is None else limit
            if late := self.pool.gather(settlement.rebuild, deadline_of(limit_or_never)):
                self.end_late(late, limit)
            if ledger.recorder is not None:
                ledger.recorder.answered(settlement.rebuild)
            self._take_rebuilt(settlement, settlement.rebuild)
        self.ledger.write(settlement)
        for row in settlement.rebuilt:
            self.ledger.mark_recovered(row)
        return None

    def _worker_of(self, row: int) -> Any:
        return next(worker for worker in self.pool.workers if row in worker.rows)

    def _replace_dead(self, settlement: Settlement) -> Exception | None:
        """Pay for what is to be rebuilt, and start dead workers anew."""
        assert settlement.todo is not None
        ledger = self.ledger
        dead = {worker.index: worker for worker in map(self._worker_of, settlement.todo) if worker.death is not None}
        causes = [(worker.death.text.partition("\n")[0], list(worker.rows)) for worker in dead.values() if not worker.paid]
        covered = {row for worker in dead.values() for row in worker.rows}
        causes += [
            (f"env {row}: {ledger.failed.get(row, 'it failed again')}", [row])
            for row in sorted(settlement.todo - covered)
            if row not in ledger.paid
        ]
        for cause, rows in causes:
            # noted first, by stores alone: an interruption here costs one restart for nothing, and none is counted twice
            worker, paid = self._worker_of(rows[0]), ledger.paid | set(rows)
            cause += f" (recorded: {where})" if (where := ledger.files(rows)) else ""
            ledger.restarts, ledger.paid, worker.paid = ledger.restarts + 1, paid, worker.death is not None
            if not self.budget.spend(cause, rows):
                ledger.restarts -= 1
                return self._give_up(settlement, rows)
            self.ledger.restart_log.say(cause)
        for worker in dead.values():
            if not settlement.request.by_row:  # all its rows belong to this call
                settlement.todo |= set(worker.rows) & set(settlement.rows)
            try:
                if (failed := self._replace(worker)) is not None:
                    return failed
            except (WorkerDied, StartupTimeout) as error:
                ledger.failed.update(dict.fromkeys(worker.rows, str(error).partition("\n")[0]))
                worker.paid = False
            except (ClusterError, OSError) as error:
                if isinstance(error, TimeoutError):  # a time limit's, which interrupts
                    raise
                return error  # there is no room for it; to be tried again in the next call
        return None

    def _rebuild_request(self, rows: list[int], cause: Settlement) -> Request:
        """A request for new environments.

        Those that failed in a reset get the seed and the options of that reset again, all others a fresh seed.
        """
        reset_next, asked = cause.command == "step" and self.mode is AutoresetMode.NEXT_STEP, cause.request
        parts: list[WorkerRequest] = []
        for worker in {id(worker): worker for worker in map(self._worker_of, rows)}.values():
            mine = [row for row in rows if row in worker.rows]
            seeds: list[Any] = [int(child.generate_state(1)[0]) for child in self.restart_seeds.spawn(len(mine))]
            if asked.seeds is not None:
                again = [asked.mask is None or bool(asked.mask[row]) for row in mine]
                seeds = [asked.seeds[row] if was else fresh for row, was, fresh in zip(mine, again, seeds, strict=True)]
            payload = seeds, options_of_rows(asked.options, mine), reset_next
            parts.append(WorkerRequest(worker, mine, Op.REBUILD_SOME, payload))
        request = self.composed("rebuild", parts)
        self.batch.requested[rows] = request.seq
        return request

    def _take_rebuilt(self, settlement: Settlement, rebuild: Request) -> None:
        """Read what came of a request for new environments: those that failed again are to be rebuilt once more."""
        assert settlement.result is not None
        assert settlement.todo is not None
        again = self.read([(worker, rebuild.answers[worker.index]) for worker in rebuild.workers])
        rows = [row for part in (rebuild.parts or {}).values() for row in part.rows]
        attempt = Settlement(Request(rebuild.seq, "reset", ()), rows, ())
        failed: set[int] = set()
        if again.failures or again.deaths:
            self.ledger.make(attempt, again)
            self.ledger.mark_failed(again, rows, all_of_them=True)
            failed = {row for death in again.deaths for row in death.envs} | {failure.env for failure, _ in again.failures}
            self.ledger.paid -= failed
        settlement.result = writeable(settlement.result)
        settlement.result.infos.update(again.infos)
        settlement.rebuilt |= settlement.todo - failed
        records, todo = settlement.records + attempt.records, settlement.todo & failed
        settlement.records, settlement.todo, settlement.rebuild = records, todo, None

    def _give_up(self, settlement: Settlement, whose: Sequence[int]) -> RestartsExhausted:
        self.ledger.write(settlement)
        last = self.ledger.latest_death
        rows = sorted(self.ledger.failed)
        worker = self._worker_of(rows[0])
        return RestartsExhausted(
            self.budget.refusal(whose),
            worker=last.worker if last else worker.index,
            pid=last.pid if last else worker.pid,
            exitcode=last.exitcode if last else None,
            envs=rows, command="restart",
        )  # fmt: skip

    def _write_rebuilt(self, settlement: Settlement) -> None:
        """Write what the caller is to see of the rows that were rebuilt."""
        assert settlement.result is not None
        result = settlement.result = writeable(settlement.result)
        stepping = settlement.command == "step"
        result.columns = True
        for row in sorted(settlement.rebuilt):
            info: dict[Any, Any] = {"restarted": True}
            if not stepping or self.mode is AutoresetMode.SAME_STEP:
                info = {**(result.infos.get(row) or self._infos.one(row)), **info}
            result.infos[row] = info
            result.finals.pop(row, None)
            self.batch.info_schemas[row] = NO_INFO
            self.batch.final[row] = False
            if stepping:
                self.batch.rewards[row] = 0.0
                self.batch.terminations[row] = False
                self.batch.truncations[row] = True
                if (last := self.remembered.of(row)) is not None:
                    result.finals[row] = last
                    if self.mode is not AutoresetMode.SAME_STEP:
                        self.store.put_row(row, self.remembered.of(row))


def writeable(result: Result) -> Result:
    """A result of this round's own."""
    return Result(columns=result.columns) if result is NOTHING or result is COLUMNS else result
