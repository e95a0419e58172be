"""First-ready batches: rows that are sent, underway, and ready in the order in which they were answered."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from itertools import repeat
from typing import Any

import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError

from vecenv.engine.answering import Answering
from vecenv.engine.owed import ABSENT, ALL, ONLY_COLUMNS, PLAIN, Flight, ReadyRow, Result, Round
from vecenv.front.deadlines import deadline_of
from vecenv.link.schemas import NO_INFO
from vecenv.shm.layout import Array

__all__ = ["FirstReady", "Received"]

Received = tuple[Array, dict[int, Any], dict[int, Any]]
"""Rows, and by row the infos and the last observations that came with them by pickle."""


class FirstReady:
    """Takes rows out of the table of what is owed, whoever was first."""

    def __init__(self, engine: Answering) -> None:
        self._engine = engine
        self._owed = engine.owed

    def launch(self, flight: Flight) -> None:
        """Let the answers to a call to everybody be received row by row, as they come."""
        for index in flight.answers:
            self._owed.landed.setdefault((flight.seq, index), flight)
        flight.by_row = True

    def receive(
        self, count: int, timeout: float | None, least: tuple[int, float] | None = None
    ) -> tuple[Received, Exception | None]:
        """The next ``count`` rows, in the order in which they became ready; or the exception that is to be raised instead.

        When that has been handed over, ``owed.after`` is how the table is to be.

        Args:
            count: How many.
            timeout: Seconds to wait at most.
            least: So many are enough from this moment of ``time.monotonic()`` on, or if no more are in flight.

        Raises:
            NoAsyncCallError: There are not so many.
            StepTimeout: Not in time; nothing is lost.
        """
        engine, owed = self._engine, self._owed
        limit = engine.policy.step_timeout if timeout is None else timeout
        deadline = deadline_of(limit)
        ready, seen = owed.ready.copy(), dict[tuple[int, int], Flight]()
        while True:
            error = self._look(ready, seen)
            if error is not None:
                try:
                    return (owed.latest, {}, {}), error
                finally:
                    del error  # in this process the exception's frames hold this one
            if len(ready) >= count:
                break
            underway = len(owed.underway())
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
                late = [worker for worker in engine.pool.workers if owed.is_owed(worker)]
                if timeout is not None or not engine.policy.restart:
                    raise engine.timeout_error(late, "recv", limit)
                engine.end_late(late, limit)
        taken = ready[:count]
        rows = np.array([row for row, _ in taken], np.intp)
        came = [(row, said) for row, said in taken if said is not None]
        self._set_after(seen, ready[count:], rows)
        if not came:
            return (rows, {}, {}), None
        infos = {row: info for row, (info, _) in came if info is not ABSENT}
        return (rows, infos, {row: final for row, (_, final) in came if final is not ABSENT}), None

    def _looked_until(self, moment: float, seen: dict[tuple[int, int], Flight], deadline: float | None) -> bool:
        """Wait for more than is enough; whether it is time to go, with what there is."""
        until = moment if deadline is None else min(moment, deadline)
        return not self._more(seen, None if until == math.inf else until) or time.monotonic() >= until

    def _more(self, seen: dict[tuple[int, int], Flight], deadline: float | None) -> bool:
        """Wait until something has landed that was not ``seen``; false when the time was up."""
        owed, pool = self._owed, self._engine.pool
        while len(owed.landed) == len(seen):
            if not pool.gather_any(deadline, len(seen)):
                return False
        return True

    def _look(self, ready: list[ReadyRow], seen: dict[tuple[int, int], Flight]) -> Exception | None:
        """Add to ``ready`` the rows of all answers that were not ``seen``; the exception that one of them is to raise."""
        owed = self._owed
        if self._engine.policy.restart:
            for flight in list(owed.flights.values()):
                if flight.by_row and flight.lost and ALL not in flight.answers:
                    owed.land(flight.seq, ALL, PLAIN)
        while len(owed.landed) > len(seen):  # answers land behind those that are there; rebuilding may let some land
            for key, flight in list(owed.landed.items())[len(seen) :]:
                seen[key] = flight
                rows = self._plain(flight, key[1])
                if rows is not None:
                    ready += zip(rows, repeat(None))
                    continue
                round_ = self._absorb(flight, key[1])
                ready += round_.entries or ()
                if round_.verdict is not None:
                    self._set_after(seen, ready, owed.latest)
                    return round_.verdict
        return None

    def _set_after(self, seen: dict[tuple[int, int], Flight], ready: list[ReadyRow], latest: Array) -> None:
        """What the table is to be when the answers that were ``seen`` have been taken out of it."""
        owed = self._owed
        landed: dict[tuple[int, int], Flight] = {}
        waiting: Collection[int] = ()
        if len(owed.landed) > len(seen):
            landed = {key: flight for key, flight in owed.landed.items() if key not in seen}
            waiting = {seq for seq, _ in landed}
        flights = owed.flights.copy()
        for flight in seen.values() if not owed.rounds else owed.flights.values():  # rebuilding has flights of its own
            if flight.seq not in waiting and (flight.answered or not flight.by_row):
                flights.pop(flight.seq, None)
        rounds = {key: round_ for key, round_ in owed.rounds.items() if key not in seen} if owed.rounds else {}
        owed.after = flights, landed, ready, latest, rounds

    def _plain(self, flight: Flight, index: int) -> Sequence[int] | None:
        """The rows of a worker that has stepped them and has nothing else to say, which is nearly always. Idempotent."""
        if flight.command != "step" or index == ALL or flight.parts is None or self._engine.policy.restart:
            return None
        answer, part = flight.answers[index], flight.parts[index]
        if answer is PLAIN:
            self._engine.batch.info_schemas[part.rows] = NO_INFO
        elif answer is not ONLY_COLUMNS:
            return None
        self._engine.count_rows(part)
        return part.rows

    def _absorb(self, flight: Flight, index: int) -> Round:
        """Read one worker's answer, see to what failed, and make its rows ready. It can be called again."""
        engine, key = self._engine, (flight.seq, index)
        round_ = self._owed.rounds.get(key)
        if round_ is None:
            rows = flight.rows_at(index)
            round_ = self._owed.rounds[key] = Round(flight, rows, rows if index == ALL else ())
        if round_.entries is not None:
            return round_
        rows, answer = list(round_.rows), flight.answers[index]
        if round_.result is None:
            round_.result = self._read(flight, index, rows)
        verdict = engine.recovery.settle(round_)
        good = rows
        if verdict is not None:
            bad = set(rows)
            if answer.death is None and index != ALL:
                bad = {failure.env for failure, _ in round_.result.failures if failure.fatal or engine.policy.restart}
                bad.update(answer.lost)  # a host's, with a worker of its own that died
            good = [row for row in rows if row not in bad]
        if engine.policy.restart:
            engine.recovery.remembered.keep(good, everyone=False)
        if index != ALL:
            assert flight.parts is not None
            engine.count_rows(flight.parts[index])
        engine.count(flight)
        round_.entries = _entries(good, round_.result)
        return round_

    def _read(self, flight: Flight, index: int, rows: list[int]) -> Result:
        """What one worker's answer says. Idempotent."""
        engine, answer = self._engine, flight.answers[index]
        if flight.command == "reset":
            engine.batch.rewards[rows] = 0.0
            engine.batch.terminations[rows] = False
            engine.batch.truncations[rows] = False
            for row in rows:
                engine.ledger.found(row)
        if not answer.columns:
            engine.batch.info_schemas[rows] = NO_INFO
        worker = next((worker for worker in flight.workers if worker.index == index), None)
        return engine.read([] if worker is None else [(worker, answer)])

    def drain(self) -> None:
        """Wait for all that is underway, before a reset that forgets it. What failed is on record.

        Raises:
            StepTimeout: Not within the engine's ``step_timeout``; nothing is lost.
        """
        engine, owed = self._engine, self._owed
        limit = engine.policy.step_timeout
        deadline = deadline_of(limit)
        while owed.underway():
            if not self._more(dict(owed.landed), deadline):
                late = [worker for worker in engine.pool.workers if owed.is_owed(worker)]
                if not late:
                    break
                if not engine.policy.restart:
                    raise engine.timeout_error(late, "recv", limit)
                engine.end_late(late, limit)
        for key, flight in list(owed.landed.items()):
            index = key[1]
            if index == ALL or key in owed.rounds:
                continue  # it was looked at
            worker = next(worker for worker in flight.workers if worker.index == index)
            result = engine.read([(worker, flight.answers[index])])
            round_ = Round(flight, flight.rows_at(index), ())
            engine.ledger.record(round_, result.failures, result.deaths)
            engine.ledger.lose(result.failures, result.deaths, round_.rows, all_of_them=False)
            assert flight.parts is not None
            engine.count_rows(flight.parts[index])
            round_.result, round_.entries = result, []
            owed.rounds[key] = round_

    def require_nothing(self, method: str) -> None:
        """First-ready batches and calls to everybody do not mix."""
        if not self._owed.idle:
            underway = len(self._owed.underway())
            raise AlreadyPendingCallError(
                f"Calling `{method}` while {underway} environments are in flight by `send` and "
                f"{len(self._owed.waiting()) - underway} are ready for `recv`.",
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
