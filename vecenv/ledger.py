"""What failed: the records a user can read, and which rows have to be rebuilt before they can be stepped again."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Sequence
from typing import Final, NoReturn

from gymnasium import logger

from vecenv.errors import EnvFailed, ErrorRecord, WorkerDied
from vecenv.failure import PackedError, summary
from vecenv.rows import Failure
from vecenv.workers import AnyWorker, raise_ready

__all__ = ["Ledger", "Raised"]

_KEPT_ERRORS: Final = 1000

Raised = tuple[int, Failure, AnyWorker, Exception]
"""An environment's index, how it failed, in which worker, and the exception for it."""


class Ledger:
    """The failures of one vector environment.

    Attributes:
        errors: Records, oldest first.
        failed: Row -> what happened, for rows that only a reset brings back.
        latest_death: The worker that died last.
    """

    def __init__(self) -> None:
        self.errors: deque[ErrorRecord] = deque(maxlen=_KEPT_ERRORS)
        self.failed: dict[int, str] = {}
        self.latest_death: WorkerDied | None = None

    def record(self, failure: Failure, worker: AnyWorker, command: str) -> Exception:
        """The exception of a failure, and its entry in ``errors`` and ``failed``."""
        packed = failure.error
        text = packed.text if isinstance(packed, PackedError) else ""
        error = raise_ready(packed, f"env {failure.env}, {worker.who}, during {command}")
        if "daemonic processes are not allowed" in summary(error):
            error.add_note("environments that start processes of their own need AsyncVectorEnv(..., daemon=False)")
        record = ErrorRecord(
            failure.env, -1 if worker.local else worker.index, worker.pid, command, error, text, time.monotonic()
        )
        self.errors.append(record)
        if failure.fatal:
            self.failed[failure.env] = summary(error)
        return error

    def record_death(self, death: WorkerDied) -> None:
        text = str(death)
        self.latest_death = death
        self.errors.append(ErrorRecord(None, death.worker, death.pid or 0, death.command, death, text, time.monotonic()))
        for row in death.envs:
            self.failed[row] = text.partition("\n")[0]

    def refuse(self, failed: dict[int, str]) -> NoReturn:
        """Say which rows need a reset first."""
        rows = sorted(failed)
        raise EnvFailed(
            f"envs {rows} failed earlier and have to be rebuilt by reset() (or a reset_mask that includes them) first: "
            f"env {rows[0]}: {failed[rows[0]]}"
        )

    def raise_all(self, raised: Sequence[Raised], deaths: Sequence[WorkerDied], *, log: bool) -> NoReturn:
        """Raise the failure of the lowest environment, with notes on all the others.

        Args:
            raised: In the order of environments.
            deaths: Workers that died.
            log: Say it through Gymnasium's logger, in its words, too.
        """
        if log and raised:
            self._log(raised)
        if not raised:
            raise _one_death(deaths)
        error = raised[0][-1]
        for env, *_, other in raised[1:]:
            error.add_note(f"also failed: env {env}: {summary(other)}")
        for death in deaths:
            error.add_note(f"also: {death}")
        raise error

    def _log(self, raised: Sequence[Raised]) -> None:
        """Gymnasium's own messages, once an environment and once for all."""
        for env, failure, _, error in raised:
            packed = failure.error
            logger.error(f"Received the following error from Worker-{env} - Shutting it down")
            logger.error("%s", packed.text if isinstance(packed, PackedError) else _traceback(error))
        logger.error("Raising the last exception back to the main process.")


def _one_death(deaths: Sequence[WorkerDied]) -> WorkerDied:
    """One error for all workers that died in one call."""
    if len(deaths) == 1:
        return deaths[0]
    first = deaths[0]
    text = f"{len(deaths)} workers died:\n" + "\n".join(str(death) for death in deaths)
    return type(first)(
        text, worker=first.worker, envs=sorted(row for death in deaths for row in death.envs), pid=first.pid,
        exitcode=first.exitcode, command=first.command,
    )  # fmt: skip


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
