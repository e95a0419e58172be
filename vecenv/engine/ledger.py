"""What failed: the records a user can read, and which rows have to be rebuilt before they can be stepped again."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Sequence
from itertools import repeat
from typing import Any, Final, NoReturn

from gymnasium import logger

from vecenv.engine.handles import raise_ready
from vecenv.engine.pending import Death, Settlement, Worker
from vecenv.errors import EnvFailed, ErrorRecord
from vecenv.link.messages import Failure, PackedError, pack_error, summary, unpack_error

__all__ = ["Ledger", "note_once"]

_KEPT_ERRORS: Final = 1000


class Ledger:
    """The failures of one vector environment.

    Attributes:
        errors: Records, oldest first.
        failed: Row -> what happened, for rows that only a reset or a restart brings back.
        restarts: How many there were.
        paid: Those of them whose restart is in the budget already.
        latest_death: Of the worker that died last.
    """

    def __init__(self) -> None:
        self.errors: deque[ErrorRecord] = deque(maxlen=_KEPT_ERRORS)
        self.failed: dict[int, str] = {}
        self.paid: set[int] = set()
        self.restarts = 0
        self.latest_death: Death | None = None
        self._deaths: set[tuple[int, int | None]] = set()  # (worker, pid) of those that are on record

    def record(
        self,
        settlement: Settlement,
        failures: Sequence[tuple[Failure, Worker]],
        deaths: Sequence[Death],
        others: Sequence[tuple[Exception, ErrorRecord]] = (),
    ) -> None:
        """Make the exceptions of what failed, once, and put them on record, once.

        A record keeps an exception of its own: one that was raised keeps the program's frames, and all that is in them.
        """
        if settlement.raised is None:
            self.make(settlement, failures, deaths)
            settlement.records += [record for _, record in others]
        self.write(settlement)

    def make(self, settlement: Settlement, failures: Sequence[tuple[Failure, Worker]], deaths: Sequence[Death]) -> None:
        """Make the exceptions of what failed, and their records. A death that several rounds tell of is recorded once."""
        raised, records, now = [], [], time.monotonic()
        for death in {death.worker: death for death in deaths}.values():
            if (death.worker, death.pid) not in self._deaths:
                pid, error = death.pid or 0, death.error()
                records.append(ErrorRecord(None, death.worker, pid, death.command, error, death.text, now))
            self.latest_death = death
        for failure, worker in sorted(failures, key=lambda pair: pair[0].env):
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
        note = f"env {failure.env}, {worker.who}, during {command}"
        error = raise_ready(failure.error, note)
        packed = failure.error if isinstance(failure.error, PackedError) else pack_error(error)
        failure.error = packed  # what raised it holds the failure: a cycle, with the program's frames in it
        if "daemonic processes are not allowed" in summary(error):
            note_once(error, "environments that start processes of their own need AsyncVectorEnv(..., daemon=False)")
        index = -1 if worker.local else worker.index
        kept = unpack_error(packed, note)
        return error, ErrorRecord(failure.env, index, worker.pid, command, kept, packed.text, time.monotonic())

    def mark_failed(
        self, failures: Sequence[tuple[Failure, Any]], deaths: Sequence[Death], rows: Sequence[int], *, all_of_them: bool
    ) -> None:
        """Note which rows have to be rebuilt.

        A death takes all rows of its worker, those too that nothing was asked of, when it is first told of. Later, when the
        place has been taken by a new worker, it takes those of ``rows`` that the dead one was asked about.

        Args:
            failures: What environments raised.
            deaths: Which workers died.
            rows: Which environments these answers are about.
            all_of_them: Also where the environment itself is well.
        """
        for death in deaths:
            known = (death.worker, death.pid) in self._deaths
            for row in set(rows) & set(death.envs) if known else death.envs:
                self.failed.setdefault(row, death.text.partition("\n")[0])
            self._deaths.add((death.worker, death.pid))
        for failure, _ in failures:
            if failure.fatal or all_of_them:
                packed = failure.error
                text = packed.summary if isinstance(packed, PackedError) else summary(packed)
                self.failed.setdefault(failure.env, text)

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

    def verdict(
        self, raised: Sequence[tuple[int, Exception]], deaths: Sequence[Death], others: Sequence[Exception]
    ) -> Exception:
        """The failure of the lowest environment, with notes on all the others."""
        distinct = list({death.worker: death for death in deaths}.values())
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
            logger.error("%s", packed.text if isinstance(packed, PackedError) else _traceback(packed))
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


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
