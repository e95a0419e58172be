"""The workers of a pool, as the event loop sees them: their descriptors are watched, and nothing here ever waits.

A worker is sent to by a write that takes what the pipe takes; what is left goes out when there is room. It is heard when
there is something to read, and its end is a readable descriptor, too. A worker that died is started anew while the loop goes
on, and says itself when it is ready.
"""

from __future__ import annotations

import asyncio
import signal
from asyncio import AbstractEventLoop, Future, TimerHandle
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from vecenv.engine.engine import Engine
from vecenv.engine.handles import ProcessWorker
from vecenv.engine.pending import Answer, Death, Request, Result, Worker, WorkerRequest
from vecenv.engine.pool import PoolOptions, WorkerPool
from vecenv.engine.vector_env import AsyncVectorEnv
from vecenv.link.channel import ChannelClosed
from vecenv.link.messages import Op
from vecenv.system.cores import let_caller_first, usable_cores
from vecenv.worker.main import WorkerPlan

__all__ = ["PoolEngine", "PoolEnvs", "RowAnswer", "RowRequest", "WorkerWatch"]


# -- the engine under a pool -------------------------------------------------------------------------------------------
#
# The table of pending requests stays what it is: an answer finds its request by its number, the death of a worker answers
# all that it was asked, and an answer whose request is gone goes nowhere. What differs is that nothing waits: an answer is
# read when it is delivered, and handed to a future.

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


_LOOKS_EVERY: Final = 0.5  # seconds between two looks whether a worker has ended, on systems that do not tell


class WorkerWatch:
    """Watches, kills and starts worker processes.

    Args:
        engine: Their engine.
        start_timeout: Seconds that a new one has to get ready.
        on_death: Called when one has died, after all it was asked has been answered by that.
        on_ready: Called when a new one is ready.
    """

    def __init__(
        self,
        engine: PoolEngine,
        start_timeout: float | None,
        on_death: Callable[[ProcessWorker], None],
        on_ready: Callable[[ProcessWorker], None],
    ) -> None:
        self._engine = engine
        self._start_timeout = start_timeout
        self._on_death = on_death
        self._on_ready = on_ready
        self._loop: AbstractEventLoop = asyncio.get_running_loop()
        self._watched: dict[ProcessWorker, tuple[int, int]] = {}
        self._starting: dict[ProcessWorker, TimerHandle | None] = {}
        self._crowded: dict[ProcessWorker, int] = {}  # whose pipe was full -> the descriptor
        self._looking: TimerHandle | None = None
        engine.on_death = self._died
        for worker in engine.pool.processes:
            self._watch(worker)
        if any(worker.watch.asks for worker in engine.pool.processes):
            self._look()

    # -- watching ---------------------------------------------------------------------------------------------------

    def _watch(self, worker: ProcessWorker) -> None:
        heard, ended = self._watched[worker] = worker.channel.fd, worker.watch.descriptor
        if len(self._engine.pool.processes) > usable_cores():
            let_caller_first(worker.pid)
        self._loop.add_reader(heard, self._heard, worker)
        self._loop.add_reader(ended, self._ended, worker)

    def _unwatch(self, worker: ProcessWorker) -> None:
        for descriptor in self._watched.pop(worker, ()):
            self._loop.remove_reader(descriptor)
        if worker in self._crowded:
            self._loop.remove_writer(self._crowded.pop(worker))
        if (timer := self._starting.pop(worker, None)) is not None:
            timer.cancel()

    def close(self) -> None:
        """Watch nothing any more. Idempotent."""
        self._engine.on_death = None
        for worker in list(self._watched):
            self._unwatch(worker)
        if self._looking is not None:
            self._looking.cancel()

    def _heard(self, worker: ProcessWorker) -> None:
        """There is something to read, or the other end is closed."""
        if worker in self._starting:
            self._heard_first(worker)
            return
        several = len(worker.rows) > 1
        while worker.receive() and several and worker.death is None:
            pass

    def _ended(self, worker: ProcessWorker) -> None:
        """Its process has ended."""
        while worker.receive() and worker.death is None:  # what it wrote before
            pass
        worker.mark_dead()

    def _died(self, worker: Worker) -> None:
        if isinstance(worker, ProcessWorker) and worker in self._watched:
            self._unwatch(worker)
            self._on_death(worker)

    def _look(self) -> None:
        """Where no descriptor tells that a process has ended, because a helper of its own may hold that open."""
        for worker in list(self._watched):
            if worker.watch.has_ended():
                self._ended(worker)
        self._looking = self._loop.call_later(_LOOKS_EVERY, self._look)

    # -- asking -----------------------------------------------------------------------------------------------------

    def send(self, request: RowRequest) -> None:
        """Ask. From here on the request is in the table, and will be answered."""
        pool = self._engine.pool
        self._engine.enter(request)
        if pool.behind or not request.worker.send(request.part):
            pool.behind = True
            self._pump()

    def _pump(self) -> None:
        """Send what is left, as far as pipes take it, and watch those that are full."""
        self._engine.pool.pump()
        full = {
            request.worker: request.worker.channel.out
            for request in self._engine.requests.values()
            if isinstance(request, RowRequest) and not request.part.sent and request.worker.death is None
        }
        for worker in self._crowded.keys() - full.keys():
            self._loop.remove_writer(self._crowded.pop(worker))
        for worker in full.keys() - self._crowded.keys():
            self._loop.add_writer(full[worker], self._pump)
        self._crowded = full

    # -- killing and starting anew ------------------------------------------------------------------------------------

    def kill(self, worker: ProcessWorker, reason: str) -> None:
        """Kill a worker; its end is told as that of any other."""
        if worker.death is None:
            worker.ended_for = worker.ended_for or reason
            worker.signal(signal.SIGKILL)

    def start_anew(self, dead: ProcessWorker) -> ProcessWorker:
        """A new process in the place of a dead one, which says itself when it is ready.

        Raises:
            OSError: There is no room for it.
        """
        pool = self._engine.pool
        started: list[ProcessWorker] = []
        pool.launch_again(dead, started)
        (new,) = started
        pool.set_workers([new if worker is dead else worker for worker in pool.all_workers()])
        pool.replaced += 1
        late = partial(self.kill, new, f"it was not ready within {self._start_timeout} seconds of its start, and was killed")
        limit = self._start_timeout
        self._starting[new] = None if limit is None else self._loop.call_later(limit, late)
        self._watch(new)
        return new

    def _heard_first(self, worker: ProcessWorker) -> None:
        """Its first message: it is ready. What failed to be built is tried again with its next reset."""
        try:
            message = worker.channel.read()
        except ChannelClosed:
            worker.mark_dead()
            return
        if message is not None:
            worker.channel.drop()
            worker.starting = False
            if (timer := self._starting.pop(worker)) is not None:
                timer.cancel()
            self._on_ready(worker)

    async def stack_of(self, worker: ProcessWorker) -> str:
        """Where a worker is that does not answer."""
        looking = worker.looking_for_stack()
        while True:
            try:
                seconds = next(looking)
            except StopIteration as found:
                return str(found.value)
            await asyncio.sleep(seconds)
