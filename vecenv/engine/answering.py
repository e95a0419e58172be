"""Waiting for answers and taking them in, for calls to everybody; :mod:`vecenv.engine.first_ready` does it row by row.

How far that has got stands in the table of what is owed, so that an interrupted wait goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vecenv.engine.ledger import Ledger
from vecenv.engine.owed import ALL, COLUMNS, NOTHING, ONLY_COLUMNS, PLAIN, Answer, Flight, Owed, Part, Result, Round, Worker
from vecenv.engine.policy import Policy
from vecenv.engine.pool import WorkerPool
from vecenv.engine.reading import Reading
from vecenv.engine.recovery import Recovery
from vecenv.errors import StepTimeout
from vecenv.front.deadlines import deadline_of
from vecenv.shm import Batch
from vecenv.worker.stacks import place

__all__ = ["Answering"]


class Answering:
    """What an engine does with answers."""

    num_envs: int
    policy: Policy
    pool: WorkerPool
    owed: Owed
    ledger: Ledger
    recovery: Recovery
    batch: Batch
    env_steps = 0
    resets = 0
    _reading: Reading

    def finish(self, flight: Flight, timeout: float | None) -> tuple[Result, Exception | None]:
        """Wait for the answers to ``flight`` and take them in: what they come to, and the exception that is to be raised.

        When that has been handed over, ``owed.after`` is how the table is to be.

        Raises:
            StepTimeout: They are still owed.
        """
        owed = self.owed
        if len(flight.answers) < len(flight.workers):
            self.wait_for(flight, timeout)
        result = NOTHING
        for answer in flight.answers.values():
            if answer is not PLAIN:
                result = COLUMNS
                if answer is not ONLY_COLUMNS:
                    break
        else:
            if not flight.lost and flight.command == "step":
                if self.policy.restart:
                    self.recovery.remembered.keep(range(self.num_envs), everyone=True)
                self.count(flight)
                owed.after = {}, owed.landed, owed.ready, owed.latest, owed.rounds
                return result, None
        round_ = self.round_of(flight)
        error = self.recovery.settle(round_)
        self.count(flight)
        if error is None and self.policy.restart and flight.command in ("step", "reset"):
            self.recovery.remembered.keep(range(self.num_envs), everyone=True)
        owed.after = {}, {}, [], owed.latest, {}
        assert round_.result is not None
        try:
            return round_.result, error
        finally:
            del round_, error  # in this process the exception's frames hold this one

    def wait_for(self, flight: Flight, timeout: float | None) -> None:
        """Wait for all answers to ``flight``.

        Raises:
            StepTimeout: They are still owed.
        """
        hang = timeout is None and flight.command in ("step", "reset")
        limit = self.policy.step_timeout if hang else timeout
        late = self.pool.gather(flight, None if limit is None else deadline_of(limit))
        if late:
            if not (hang and self.policy.restart):
                raise self.timeout_error(late, flight.command, limit)
            self.end_late(late, limit)

    def round_of(self, flight: Flight) -> Round:
        """The answers of a flight, read."""
        key = flight.seq, ALL
        if key not in self.owed.rounds:
            rows = [row for worker in flight.workers for row in flight.rows_of(worker)]
            self.owed.rounds[key] = Round(flight, [*rows, *flight.lost], flight.lost)
        round_ = self.owed.rounds[key]
        if round_.result is None:
            if flight.command == "reset":
                for row in round_.rows:
                    self.ledger.found(row)
            round_.result = self.read((worker, flight.answers[worker.index]) for worker in flight.workers)
        return round_

    def count_rows(self, part: Part) -> None:
        """Count the steps of rows that are received one by one, once."""
        self.env_steps, part.uncounted = self.env_steps + part.uncounted, 0

    def count(self, flight: Flight) -> None:
        """Count the steps, or resets, of a flight, once."""
        if flight.uncounted:
            self.env_steps, flight.uncounted = self.env_steps + flight.uncounted, 0
        elif flight.unreset:
            self.resets, flight.unreset = self.resets + flight.unreset, 0

    def read(self, answers: Iterable[tuple[Worker, Answer]]) -> Result:
        """What workers said."""
        return self._reading.read(answers)

    def end_late(self, late: Sequence[Worker], limit: float | None) -> None:
        """Kill workers that hang."""
        for worker in late:
            stack = worker.stack()
            at = f" at {found}" if (found := place(stack)) else ""
            worker.signal(9)
            worker.mark_dead(
                ("nobody waited for it any longer" if limit is None else f"it hung for more than {limit} seconds")
                + f" and was killed{at}"
                + (f"\nits stack:\n{stack}" if stack else "")
            )

    def timeout_error(self, late: Sequence[Worker], command: str, limit: float | None) -> StepTimeout:
        text = f"The call to `{_wait_name(command)}` has timed out after {limit} second(s)."
        for worker in late[:4]:
            worker.overdue = True
            if not worker.local:
                stack = worker.stack() if limit else ""  # a poll asks nothing of a worker
                busy = self.owed.oldest_of(worker)
                rows = [] if busy is None else list(busy.rows_of(worker))
                state = " It is stopped (SIGSTOP)." if worker.is_stopped() else ""
                text += f"\nenvs {rows}, {worker.who}, during {command}: no answer yet.{state}"
                text += f"\n{stack}" if stack else ""
        return StepTimeout(f"{text}\nThe answer is still owed: call `{_wait_name(command)}` again, or `close()`.")


def _wait_name(command: str) -> str:
    names = {"exec_func": "exec_func_fetch", **dict.fromkeys(("set_attr", "set_next_options", "recv"))}
    return (names[command] or command) if command in names else f"{command}_wait"
