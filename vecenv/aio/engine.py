"""The engine under a pool: each request is about one environment, and its answer goes to the coroutine that asked.

The table of pending requests stays what it is: an answer finds its request by its number, the death of a worker answers
all that it was asked, and an answer whose request is gone goes nowhere. What differs is that nothing waits: an answer is
read when it is delivered, and handed to a future.
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable
from typing import Any

from vecenv.engine.engine import Engine
from vecenv.engine.handles import ProcessWorker
from vecenv.engine.pending import Answer, Death, Request, Result, Worker, WorkerRequest
from vecenv.engine.pool import PoolOptions, WorkerPool
from vecenv.engine.vector_env import AsyncVectorEnv
from vecenv.link.messages import Op
from vecenv.worker.main import WorkerPlan

__all__ = ["PoolEngine", "PoolEnvs", "RowAnswer", "RowRequest"]


class RowAnswer:
    """What an environment said.

    Attributes:
        result: As it came.
        columns: Its info lies in shared memory.
        error: Why there is no answer.
    """

    __slots__ = ("columns", "error", "result")

    def __init__(self, result: Result | None = None, *, columns: bool = False, error: Exception | None = None) -> None:
        self.result = result
        self.columns = columns
        self.error = error


class RowRequest(Request):
    """A request about one environment.

    Attributes:
        row: Which.
        worker: Its process.
        part: What is sent.
        future: Done once there is an answer, or none is wanted any more.
        on_answer: Called with it and the answer.
    """

    by_row = True  # so that each answer is delivered, and not only put down

    def __init__(
        self, seq: int, command: str, row: int, worker: ProcessWorker, op: Op, payload: Any, future: Future[RowAnswer],
        on_answer: Callable[[RowRequest, RowAnswer], None],
    ) -> None:  # fmt: skip
        super().__init__(seq, command, (worker,))
        self.row = row
        self.worker = worker
        self.part = WorkerRequest(worker, (row,), op, payload)
        self.parts = {worker.index: self.part}
        self.future = future
        self.on_answer = on_answer


class PoolEngine(Engine):
    """An engine whose answers are delivered to those that asked."""

    on_death: Callable[[Worker], None] | None = None

    def __init__(self, env_fns: Any, layout: Any, make_store: Any, plan: WorkerPlan, *how: Any) -> None:
        plan.overlaps = plan.env_threads > 1
        super().__init__(env_fns, layout, make_store, plan, *how)

    def _open_pool(self, plan: WorkerPlan, arena: Any, options: PoolOptions, num_workers: int) -> WorkerPool:
        pool = super()._open_pool(plan, arena, options, num_workers)
        options.placements = []  # the program does other things meanwhile: no process spins, and none is bound to a core
        return pool

    def deliver(self, seq: int, index: int, answer: Answer) -> None:
        request = self.pending.requests.pop(seq, None)
        if not isinstance(request, RowRequest):
            return
        try:
            taken = RowAnswer(self.read([(request.worker, answer)]), columns=answer.columns)
        except Exception as error:  # whatever reading it raises is about this environment alone
            taken = RowAnswer(error=error)
        if taken.error is None and answer.death is None:
            self.pending.steps += request.command == "step"
            self.pending.resets += request.command == "reset"
        request.on_answer(request, taken)

    def info_of(self, row: int, result: Result, columns: bool) -> dict[Any, Any]:
        """The info of one environment, as it gave it."""
        if row in result.infos:
            return result.infos[row]  # type: ignore[no-any-return]
        return self._infos.one(row) if columns else {}

    def mark_lost(self, worker: Worker, death: Death) -> None:
        super().mark_lost(worker, death)
        if self.on_death is not None:
            self.on_death(worker)


class PoolEnvs(AsyncVectorEnv[Any, Any]):
    """The environments of a pool, and the engine that steps them."""

    _driver: PoolEngine
    _engine_class = PoolEngine

    @property
    def engine(self) -> PoolEngine:
        """What steps them."""
        return self._driver
