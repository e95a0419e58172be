"""Waits for the answers to requests and makes something of them: of a call as a whole, or row by row.

How far that has got stands in the table of pending requests, so that an interrupted wait goes on where it stopped.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, NoReturn, TypeAlias

import numpy as np
from gymnasium import logger
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector import AutoresetMode

from vecenv.engine.pending import (
    ABSENT,
    ALL,
    COLUMNS,
    NOTHING,
    ONLY_COLUMNS,
    PLAIN,
    Answer,
    Pending,
    PendingRequests,
    ReadyRow,
    Request,
    Result,
    Settlement,
    Worker,
)
from vecenv.engine.pool import WorkerPool
from vecenv.engine.recovery import Ledger, Policy, Recovery
from vecenv.front.arguments import deadline_of
from vecenv.front.driver import Phase, still_pending
from vecenv.link.infos import NO_INFO, InfoReader
from vecenv.link.messages import decode_outcome
from vecenv.link.observations import Store
from vecenv.recording.recorder import Recorder
from vecenv.shm import Batch
from vecenv.shm.layout import Array
from vecenv.state.snapshots import Kind
from vecenv.system.supervision import place

__all__ = ["Answers", "Received", "wait_name"]

Received: TypeAlias = tuple[Array, dict[int, Any], dict[int, Any]]
"""Rows, and by row the infos and the last observations that came with them by pickle."""
_Seen: TypeAlias = dict[tuple[int, int], Request]
"""Answers that were looked at, as in :attr:`~vecenv.engine.pending.Pending.arrived`."""


class Answers(PendingRequests):
    """What an engine does with answers.

    Attributes:
        said: Warnings of environments by name, each of which is given once.
        proved: Kinds of environments whose snapshots were proved to be exact.
        steps_before: Of all steps that were taken, that many came with a state that was loaded.
        recorder: Notes what is answered, for files about what fails; ``None``: there is none.
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
    recorder: Recorder | None = None
    frozen: weakref.WeakSet[Any]
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
                    self.recovery.remembered.keep(range(self.num_envs), all_rows=True)
                if self.recorder is not None:
                    if request.parts is None:  # as `answered` does, one call less of every step
                        self.recorder.stepped(request.seq)
                    else:
                        self.recorder.answered(request)
                now, then = self.pending, Pending()  # as `emptied` does
                then.requests, then.latest, then.steps, then.resets = {}, now.latest, now.steps + request.steps, now.resets
                self.next_pending = then
                return result, None
        settlement = self.settlement_of(request)
        if self.recorder is not None:
            self.recorder.answered(request)
        error = self.recovery.resolve(settlement)
        if error is None and self.policy.restart and request.command in ("step", "reset"):
            self.recovery.remembered.keep(range(self.num_envs), all_rows=True)
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
            error = self.too_late(method, limit)
            self.ledger.record_late(error, late, limit, self.pending.requests.values())
            raise error
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
            if self.recorder is not None and limit is not None:
                self.recorder.limits[worker.pid] = limit
            stack = worker.stack()
            at = f" at {found}" if (found := place(stack)) else ""
            worker.signal(9)
            worker.mark_dead(
                ("its answer was no longer wanted" if limit is None else f"it hung for more than {limit} seconds")
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
                text += f"\nenvs {list(busy.rows_of(worker))}, {worker.label}, during {busy.command}: no answer yet.{state}"
                text += f"\n{stack}" if stack else ""
        return text

    # -- row by row: those that were sent, in the order in which they were answered ---------------------------------

    def launch(self, request: Request) -> None:
        """Let the answers to a call as a whole be received row by row, as they come."""
        pending = self.pending
        if pending.arrived is Pending.arrived:
            pending.arrived = {}
        for index in request.answers:
            pending.arrived.setdefault((request.seq, index), request)
        request.by_row = True

    def receive(
        self, count: int, deadline: float | None, least: tuple[int, float] | None = None
    ) -> tuple[Received, Exception | None] | None:
        """The next ``count`` rows, in the order in which they became ready; or the exception that is to be raised instead.

        ``next_pending`` is the table without them, for the guard.

        Args:
            count: How many.
            deadline: Of ``time.monotonic()``.
            least: That many are enough from this moment of ``time.monotonic()`` on, or if no more are in flight.

        Returns:
            ``None`` where they are not there by the deadline; nothing is lost.

        Raises:
            NoAsyncCallError: There are not that many.
            StepTimeout: There is no deadline, and they did not come within the engine's own ``step_timeout``.
        """
        pending = self.pending
        limit = self.policy.step_timeout if deadline is None else None
        if limit is not None:
            deadline = deadline_of(limit)
        ready, seen = list(pending.ready), _Seen()
        while True:
            error = self._look(ready, seen)
            if error is not None:
                try:
                    return (pending.latest, {}, {}), error
                finally:
                    del error  # in this process the exception's frames hold this one
            if len(ready) >= count:
                break
            underway = len(self.underway())
            enough = count if least is None else least[0]
            if len(ready) + underway < enough:
                raise NoAsyncCallError(
                    f"Calling `recv` for {enough} environments, but only {underway} are in flight and "
                    f"{len(ready)} are ready: send() more first.",
                    "recv",
                )
            if least is not None and len(ready) >= enough:
                if not underway or self._looked_until(least[1], seen, deadline):
                    break
            elif not self._more(seen, deadline):
                if limit is None:
                    return None
                self._end_all_hanging(limit)
        taken = ready[:count]
        rows = np.array([row for row, _ in taken], np.intp)
        came = [(row, said) for row, said in taken if said is not None]
        self._set_next(seen, ready[count:], rows)
        if not came:
            return (rows, {}, {}), None
        infos = {row: info for row, (info, _) in came if info is not ABSENT}
        return (rows, infos, {row: final for row, (_, final) in came if final is not ABSENT}), None

    def _end_all_hanging(self, limit: float | None) -> None:
        self.end_hanging([worker for worker in self.pool.workers if self.is_pending(worker)], "recv", limit)

    def _looked_until(self, moment: float, seen: _Seen, deadline: float | None) -> bool:
        """Wait for more than is enough; whether it is time to go, with what there is."""
        until = moment if deadline is None else min(moment, deadline)
        return not self._more(seen, None if until == math.inf else until) or time.monotonic() >= until

    def _more(self, seen: _Seen, deadline: float | None) -> bool:
        """Wait until an answer has arrived that was not ``seen``; false when the time was up."""
        while len(self.pending.arrived) == len(seen):
            if not self.pool.wait_any(deadline, len(seen)):
                return False
        return True

    def _look(self, ready: list[ReadyRow], seen: _Seen) -> Exception | None:
        """Add to ``ready`` the rows of all answers that were not ``seen``; the exception that one of them is to raise."""
        pending = self.pending
        if self.policy.restart:
            for request in list(pending.requests.values()):
                if request.by_row and request.lost and ALL not in request.answers:
                    self.deliver(request.seq, ALL, PLAIN)
        while len(pending.arrived) > len(seen):  # answers arrive behind those that are there; rebuilding may let some in
            for key, request in list(pending.arrived.items())[len(seen) :]:
                seen[key] = request
                if self.recorder is not None and key[1] != ALL:
                    self.recorder.answered(request, key[1])
                rows = self._plain(request, key[1])
                if rows is not None:
                    ready += zip(rows, repeat(None))
                    continue
                settlement = self._absorb(request, key[1])
                ready += settlement.entries or ()
                if settlement.error is not None:
                    self._set_next(seen, ready, pending.latest)
                    return settlement.error
        return None

    def _set_next(self, seen: _Seen, ready: list[ReadyRow], latest: Array) -> None:
        """The table without the answers that were ``seen``."""
        now, then = self.pending, Pending()
        arrived, requests = now.arrived, now.requests.copy()
        if len(arrived) > len(seen):
            then.arrived = {key: request for key, request in arrived.items() if key not in seen}
        else:
            then.arrived = {}
        waiting = {seq for seq, _ in then.arrived}
        for request in now.requests.values() if self.policy.restart else seen.values():  # rebuilding has requests of its own
            if request.seq not in waiting and (request.answered or not request.by_row):
                requests.pop(request.seq, None)
        if now.settlements:
            then.settlements = {key: one for key, one in now.settlements.items() if key not in seen and key[0] in requests}
        steps = resets = 0
        for (_, index), request in seen.items():
            if index != ALL:
                count = len(request.rows_at(index))
                steps, resets = steps + count * (request.command == "step"), resets + count * (request.command == "reset")
        then.requests, then.ready, then.latest = requests, ready, latest
        then.steps, then.resets = now.steps + steps, now.resets + resets
        self.next_pending = then

    def _plain(self, request: Request, index: int) -> Sequence[int] | None:
        """The rows of a worker that has stepped them and has nothing else to say, which is nearly always. Idempotent."""
        if request.command != "step" or index == ALL or request.parts is None or self.policy.restart:
            return None
        answer, part = request.answers[index], request.parts[index]
        if answer is PLAIN:
            self.batch.info_schemas[part.rows] = NO_INFO
        elif answer is not ONLY_COLUMNS:
            return None
        return part.rows

    def _absorb(self, request: Request, index: int) -> Settlement:
        """Read one worker's answer, see to what failed, and make its rows ready. It can be called again."""
        lost = request.rows_at(index) if index == ALL else ()
        settlement = self.settlement(request, index, lambda: request.rows_at(index), lost)
        if settlement.entries is not None:
            return settlement
        rows, answer = list(settlement.rows), request.answers[index]
        if settlement.result is None:
            settlement.result = self._read(request, index, rows)
        error = self.recovery.resolve(settlement)
        good = rows
        if error is not None:
            bad = set(rows)
            if answer.death is None and index != ALL:
                bad = {failure.env for failure, _ in settlement.result.failures if failure.fatal or self.policy.restart}
                bad.update(answer.lost)  # a host's, with a worker of its own that died
            good = [row for row in rows if row not in bad]
        if self.policy.restart:
            self.recovery.remembered.keep(good, all_rows=False)
        settlement.entries = _entries(good, settlement.result)
        return settlement

    def _read(self, request: Request, index: int, rows: list[int]) -> Result:
        """What one worker's answer says. Idempotent."""
        answer = request.answers[index]
        if request.command == "reset":
            self.batch.rewards[rows] = 0.0
            self.batch.terminations[rows] = False
            self.batch.truncations[rows] = False
            for row in rows:
                self.ledger.mark_recovered(row)
        if not answer.columns:
            self.batch.info_schemas[rows] = NO_INFO
        worker = next((worker for worker in request.workers if worker.index == index), None)
        return self.read([] if worker is None else [(worker, answer)])

    def drain(self) -> None:
        """Wait for all that is underway, before a reset that drops it. What failed is on record.

        Raises:
            StepTimeout: Not within the engine's ``step_timeout``; nothing is lost.
        """
        limit = self.policy.step_timeout
        deadline = deadline_of(limit)
        while self.underway():
            if not self._more(dict(self.pending.arrived), deadline):
                if not any(map(self.is_pending, self.pool.workers)):
                    break
                self._end_all_hanging(limit)
        for (_, index), request in list(self.pending.arrived.items()):
            if index == ALL or (request.seq, index) in self.pending.settlements:
                continue  # it was looked at
            if self.recorder is not None:
                self.recorder.answered(request, index)
            worker = next(worker for worker in request.workers if worker.index == index)
            result = self.read([(worker, request.answers[index])])
            settlement = Settlement(request, request.rows_at(index), ())
            self.ledger.record(settlement, result.failures, result.deaths)
            self.ledger.mark_failed(result.failures, result.deaths, settlement.rows, all_of_them=False)
            settlement.result, settlement.entries = result, []
            self.note(request, index, settlement)

    def require_idle(self, method: str) -> None:
        """Refuse a call as a whole while another is pending, or rows are in flight or ready.

        Raises:
            AlreadyPendingCallError: One is, or some are.
        """
        if (phase := self.phase) is not Phase.DEFAULT:
            raise AlreadyPendingCallError(still_pending(method, phase), phase.value)
        if not self.idle:
            underway = len(self.underway())
            raise AlreadyPendingCallError(
                f"Calling `{method}` while {underway} environments are in flight by `send` and "
                f"{len(self.waiting()) - underway} are ready for `recv`.",
                "send",
            )


def _entries(rows: Sequence[int], result: Result) -> list[ReadyRow]:
    """Rows that are ready, with what came with them by pickle."""
    infos, finals = result.infos, result.finals
    if not (infos or finals):
        return list(zip(rows, repeat(None)))
    return [
        (row, (infos.get(row, ABSENT), finals.get(row, ABSENT)) if row in infos or row in finals else None) for row in rows
    ]


def wait_name(command: str) -> str:
    """The method that fetches the answer to a call, by the call's command."""
    names = {"exec_func": "exec_func_fetch", **dict.fromkeys(("set_attr", "set_next_options", "recv"))}
    return (names[command] or command) if command in names else f"{command}_wait"
