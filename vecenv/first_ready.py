"""First-ready batches: rows that are sent, in flight, and ready in the order in which they were answered."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError

from vecenv.infos import NO_INFO
from vecenv.protocol import Op
from vecenv.requests import Pending, Result
from vecenv.shm.layout import Array
from vecenv.workers import Answer, AnyWorker, Request

if TYPE_CHECKING:
    from vecenv.engine import Engine

__all__ = ["FirstReady"]


class FirstReady:
    """Which rows of an engine are on their way.

    Attributes:
        in_flight: bool ``(num_envs,)``: sent, and not answered yet.
        underway: How many those are.
        ready: Rows that were answered and not received yet, the earliest first.
    """

    def __init__(self, engine: Engine) -> None:
        self.in_flight = np.zeros(engine.num_envs, np.bool_)
        self.underway = 0
        self.ready: deque[int] = deque()
        self._engine = engine
        self._results = Result()  # what came with the rows that are ready, by row

    @property
    def idle(self) -> bool:
        """Nothing is in flight, nothing is ready."""
        return not (self.underway or self.ready)

    def send(self, rows: Array, actions: list[Any] | None) -> None:
        """Step some idle rows; ``actions`` in the order of ``rows``, or ``None`` if they are in shared memory."""
        listed = rows.tolist()
        seq = self._engine.pool.next_seq()
        self._engine.batch.requested[rows] = seq
        self.in_flight[rows] = True
        self.underway += len(rows)
        by_worker: dict[int, tuple[AnyWorker, list[int]]] = {}
        for position in sorted(range(len(listed)), key=listed.__getitem__):
            worker = self._engine.worker_of[listed[position]]
            by_worker.setdefault(id(worker), (worker, []))[1].append(position)
        for worker, positions in by_worker.values():
            mine = [listed[position] for position in positions]
            payload = None if actions is None else [actions[position] for position in positions]
            self._engine.pool.post(worker, Request(seq, Op.STEP_SOME, mine, payload))

    def launch(self, pending: Pending) -> None:
        """Turn a request to everybody into rows in flight, to be received as they come."""
        rows = np.arange(self._engine.num_envs) if pending.mask is None else np.flatnonzero(pending.mask)
        self.in_flight[rows] = True
        self.underway += len(rows)

    def receive(self, count: int, timeout: float | None) -> tuple[Array, Result]:
        """The next ``count`` rows, in the order in which they became ready, and what came with them."""
        limit = self._engine.policy.step_timeout if timeout is None else timeout
        deadline = None if limit is None else time.monotonic() + limit
        while len(self.ready) < count:
            if len(self.ready) + self.underway < count:
                raise NoAsyncCallError(
                    f"Calling `recv` for {count} environments, but only {self.underway} are in flight and "
                    f"{len(self.ready)} are ready: send() more first.",
                    "recv",
                )
            if not self._engine.pool.gather_any(deadline):
                late = [worker for worker in self._engine.pool.workers if worker.owes]
                if timeout is not None or not self._engine.policy.restart:
                    raise self._engine.timeout_error(late, "recv", limit)
                self._engine.end_hanging(late, limit)
            self._collect()
        rows = np.array([self.ready.popleft() for _ in range(count)], np.intp)
        kept = self._results
        mine = Result(columns=True)
        for row in rows.tolist():
            if row in kept.infos:
                mine.infos[row] = kept.infos.pop(row)
            if row in kept.finals:
                mine.finals[row] = kept.finals.pop(row)
        return rows, mine

    def _collect(self) -> None:
        """Move every answer that has come from the workers' queues to the queue of ready rows."""
        for worker in self._engine.pool.workers:
            while worker.replies:
                self._collect_one(worker, worker.replies.popleft())

    def _collect_one(self, worker: AnyWorker, answer: Answer) -> None:
        rows = list(answer.request.rows)
        self._landed(rows)
        result = self._engine.absorb([(worker, answer)])
        command = "reset" if answer.request.op in (Op.RESET, Op.RESET_SOME) else "step"
        if command == "step":
            self._engine.env_steps += len(rows)
        else:
            self._engine.batch.rewards[rows] = 0.0
            self._engine.batch.terminations[rows] = False
            self._engine.batch.truncations[rows] = False
        if not answer.columns:
            self._engine.batch.info_schemas[rows] = NO_INFO
        bad = {failure.env for failure, _ in result.failures if failure.fatal} | (set(rows) if answer.death else set())
        if self._engine.policy.restart:
            self._engine.remember([row for row in rows if row not in bad])
        self.ready.extend(row for row in rows if row not in bad or self._engine.policy.restart)
        self._results.infos.update(result.infos)
        self._results.finals.update(result.finals)
        if result.failures or result.deaths:
            try:
                self._engine.settle(result, Pending(command, [worker], lost=sorted(bad)))
            finally:
                self._results.infos.update(result.infos)
                self._results.finals.update(result.finals)

    def _landed(self, rows: list[int]) -> None:
        self.in_flight[rows] = False
        self.underway -= len(rows)

    def drain(self, timeout: float | None) -> None:
        """Wait for everything in flight and forget it, before a reset of everybody."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.underway:
            if not self._engine.pool.gather_any(deadline):
                raise self._engine.timeout_error(
                    [worker for worker in self._engine.pool.workers if worker.owes], "recv", timeout
                )
            for worker in self._engine.pool.workers:
                while worker.replies:
                    answer = worker.replies.popleft()
                    self._landed(list(answer.request.rows))
                    result = self._engine.absorb([(worker, answer)])
                    for death in result.deaths:
                        self._engine.ledger.record_death(death)
                    for failure, _ in result.failures:
                        self._engine.ledger.record(failure, worker, "step")
        self.ready.clear()
        self._results = Result()

    def require_nothing(self, method: str) -> None:
        """First-ready batches and calls to everybody do not mix."""
        if self.underway or self.ready:
            raise AlreadyPendingCallError(
                f"Calling `{method}` while {self.underway} environments are in flight by `send` and "
                f"{len(self.ready)} are ready for `recv`.",
                "send",
            )
