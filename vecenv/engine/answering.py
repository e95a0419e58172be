"""Waiting for the answers to a call as a whole, and making something of them.

:mod:`vecenv.engine.first_ready` does it row by row. How far that has got stands in the table of pending requests, so that an
interrupted wait goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

from gymnasium import logger
from gymnasium.vector import AutoresetMode

from vecenv.engine.ledger import Ledger
from vecenv.engine.pending import (
    ALL,
    COLUMNS,
    NOTHING,
    ONLY_COLUMNS,
    PLAIN,
    Answer,
    Pending,
    PendingRequests,
    Request,
    Result,
    Settlement,
    Worker,
)
from vecenv.engine.policy import Policy
from vecenv.engine.pool import WorkerPool
from vecenv.engine.recovery import Recovery
from vecenv.front.deadlines import deadline_of
from vecenv.link.infos import InfoReader
from vecenv.link.messages import decode_outcome
from vecenv.link.observations import Store
from vecenv.shm import Batch
from vecenv.state.snapshots import Kind
from vecenv.worker.stacks import place

__all__ = ["Answering"]


class Answering(PendingRequests):
    """What an engine does with answers.

    Attributes:
        said: Warnings of environments by name, each of which is given once.
        proved: Kinds of environments whose snapshots were proved to be exact.
        steps_before: Of all steps that were taken, so many came with a state that was loaded.
    """

    num_envs: int
    policy: Policy
    pool: WorkerPool
    ledger: Ledger
    recovery: Recovery
    batch: Batch
    store: Store
    said: dict[str, str]
    failed: dict[int, str]
    mode: AutoresetMode
    proved: frozenset[Kind] = frozenset()
    steps_before: int = 0
    _infos: InfoReader

    def finish(self, request: Request, deadline: float | None) -> tuple[Result, Exception | None] | None:
        """Wait for the answers to a call: what they come to, and the exception that is to be raised.

        ``next_pending`` is the table without the call, for the guard.

        Args:
            request: The call.
            deadline: Of ``time.monotonic()``.

        Returns:
            ``None`` where the answers are not there by then; the call is still pending.

        Raises:
            StepTimeout: Not within the engine's own ``step_timeout``; the call is still pending.
        """
        if len(request.answers) < len(request.workers) and not self.wait_for(request, deadline):
            return None
        result = NOTHING
        for answer in request.answers.values():
            if answer is not PLAIN:
                result = COLUMNS
                if answer is not ONLY_COLUMNS:
                    break
        else:
            if not request.lost and request.command == "step":
                if self.policy.restart:
                    self.recovery.remembered.keep(range(self.num_envs), everyone=True)
                now, then = self.pending, Pending()  # as `emptied` does
                then.requests, then.latest, then.steps, then.resets = {}, now.latest, now.steps + request.steps, now.resets
                self.next_pending = then
                return result, None
        settlement = self.settlement_of(request)
        error = self.recovery.settle(settlement)
        if error is None and self.policy.restart and request.command in ("step", "reset"):
            self.recovery.remembered.keep(range(self.num_envs), everyone=True)
        self.next_pending = self.emptied(request.steps, request.resets)
        assert settlement.result is not None
        try:
            return settlement.result, error
        finally:
            del settlement, error  # in this process the exception's frames hold this one

    def wait_for(self, request: Request, deadline: float | None) -> bool:
        """Wait for all answers to a call; whether they are there by the deadline.

        Raises:
            StepTimeout: There is no deadline, and they did not come within the engine's own ``step_timeout``.
        """
        limit = self.policy.step_timeout if deadline is None and request.command in ("step", "reset") else None
        if limit is not None:
            deadline = deadline_of(limit)
        late = self.pool.gather(request, deadline)
        if late and limit is None:
            return False
        if late:
            self.end_hanging(late, wait_name(request.command), limit)
        return True

    def raise_answer(self, error: Exception) -> NoReturn:
        """Raise the exception that is the answer to a call, where no frame keeps it."""
        self.pending_error = error
        try:
            raise error
        finally:
            del error

    def end_hanging(self, late: Sequence[Worker], method: str, limit: float | None) -> None:
        """The engine's ``step_timeout`` is over: end the workers that hang, if they are to be started anew.

        Raises:
            StepTimeout: They are not.
        """
        if not self.policy.restart:
            raise self.too_late(method, limit)
        self.end_late(late, limit)

    def settlement_of(self, request: Request) -> Settlement:
        """The answers to a call, read."""
        settlement = self.settlement(
            request,
            ALL,
            lambda: [*(row for worker in request.workers for row in request.rows_of(worker)), *request.lost],
            request.lost,
        )
        if settlement.result is None:
            if request.command == "reset":
                for row in settlement.rows:
                    self.ledger.mark_recovered(row)
            settlement.result = self.read((worker, request.answers[worker.index]) for worker in request.workers)
        return settlement

    def read(self, answers: Iterable[tuple[Worker, Answer]]) -> Result:
        """All answers together. It may be done again: to read an answer twice does no harm.

        A result with nothing of its own in it is a shared one, and not to be written to.
        """
        result = NOTHING
        for worker, answer in answers:
            if answer is PLAIN or (answer is ONLY_COLUMNS and result.columns):
                continue
            if answer is ONLY_COLUMNS and result is NOTHING:
                result = COLUMNS
                continue
            if result is NOTHING or result is COLUMNS:
                result = Result(columns=result.columns)
            self._add(result, worker, answer)
        return result

    def _add(self, result: Result, worker: Worker, answer: Answer) -> None:
        if answer.columns:
            result.columns = True
        if answer.death is not None:
            result.deaths.append(answer.death)
        out = answer.outcome if answer.sealed is None else decode_outcome(answer.sealed)
        if out is None:
            return
        self._infos.learn(out.schemas)
        result.infos.update(out.infos)
        result.finals.update(out.finals)
        result.results.update(out.results)
        for row, observation in out.observations.items():
            self.store.accept(row, observation)
        result.failures.extend((failure, worker) for failure in out.failures)
        for name, text in out.warnings:
            if name not in self.said:
                self.said[name] = text
                logger.warn("%s", text)

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

    def _lateness(self, seconds: float | None) -> str:
        text = ""
        for worker in [worker for worker in self.pool.workers if self.is_pending(worker)][:4]:
            worker.overdue = True
            if not worker.local:
                stack = worker.stack() if seconds else ""  # a poll asks nothing of a worker
                busy = self.oldest_of(worker)
                if busy is None:  # it has answered meanwhile
                    continue
                state = " It is stopped (SIGSTOP)." if worker.is_stopped() else ""
                text += f"\nenvs {list(busy.rows_of(worker))}, {worker.who}, during {busy.command}: no answer yet.{state}"
                text += f"\n{stack}" if stack else ""
        return text


def wait_name(command: str) -> str:
    """The method that fetches the answer to a call, by the call's command."""
    names = {"exec_func": "exec_func_fetch", **dict.fromkeys(("set_attr", "set_next_options", "recv"))}
    return (names[command] or command) if command in names else f"{command}_wait"
