"""The places of a pool: which episode has which environment, what each was asked, and what becomes of a place that is lost.

A *place* is a row of the engine: where an environment lives, whichever process that is at the moment. An episode has a place
to itself. What is asked about a place is one :class:`~vecenv.aio.engine.Question`, and a place has one at most: so an answer
has nowhere else to go. A task that is cancelled leaves its question behind; the place is not given to another episode before
that is answered, or its worker has been killed for taking too long.

All of it runs in one event loop, in callbacks that do not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from asyncio import AbstractEventLoop, Future, TimerHandle
from collections import deque
from collections.abc import Callable
from typing import Any

from gymnasium.error import ClosedEnvironmentError

from vecenv.aio.engine import PoolEngine, Question, Reply
from vecenv.aio.workers import Workers
from vecenv.engine.handles import ProcessWorker
from vecenv.engine.pending import Death
from vecenv.engine.recovery import RestartBudget, RestartLog
from vecenv.errors import ErrorRecord, ForkedError, LoopError, RestartsExhausted, StepTimeout
from vecenv.link.messages import Op
from vecenv.worker.stacks import place as line_of

__all__ = ["Place", "Places", "Process"]


class Place:
    """Where one environment lives.

    Attributes:
        row: Its index.
        process: The worker process, which a new one takes the place of when it has died.
        owner: The episode that has it.
        question: What it was asked and has not answered.
        lost: Why the environment cannot go on: only a reset builds it anew; empty: it can.
        untold: How its worker died, until the episode has been told.
        free: It is in the queue of those that episodes are given.
        patience: When its worker is ended, as the question is no longer wanted.
    """

    def __init__(self, row: int, process: Process) -> None:
        self.row = row
        self.process = process
        self.owner: Any = None
        self.question: Question | None = None
        self.lost = ""
        self.free = True
        self.untold: Death | None = None
        self.patience: TimerHandle | None = None


class Process:
    """A worker's place among the others.

    Attributes:
        worker: The process that is there now.
        places: Of its environments.
        changing: It is being killed, or a new process was started that is not ready.
        unwanted: It was killed as a task did not want its answer any more: that costs no restart of the budget.
        given_up: How it ended, if there will be no new one.
    """

    def __init__(self, worker: ProcessWorker) -> None:
        self.worker = worker
        self.places = [Place(row, self) for row in worker.rows]
        self.changing = False
        self.unwanted = False
        self.given_up: Death | None = None


class Places:
    """The places of a pool.

    Args:
        engine: The engine.
        step_timeout, cancel_timeout, start_timeout: Seconds; see :class:`vecenv.aio.Pool`.
        one_by_one: A worker steps its environments one after the other.
        budget: What a worker that died is started anew within, at once; ``None``: it is started with the next reset.
    """

    def __init__(
        self,
        engine: PoolEngine,
        step_timeout: float | None,
        cancel_timeout: float | None,
        start_timeout: float | None,
        budget: RestartBudget | None,
        *,
        one_by_one: bool,
    ) -> None:
        self.engine = engine
        self.step_timeout = step_timeout
        self.cancel_timeout = cancel_timeout
        self.start_timeout = start_timeout
        self.processes = {worker.index: Process(worker) for worker in engine.pool.processes}
        self.closed = False
        self._one_by_one = one_by_one
        self.waiters: deque[tuple[Any, Future[Place]]] = deque()
        self._places = {place.row: place for process in self.processes.values() for place in process.places}
        # the first of every worker, then the second: few episodes are spread over many workers
        in_turn = sorted(self._places.values(), key=lambda place: place.row - place.process.worker.rows[0])
        self.free = deque(in_turn)
        self._budget = budget
        self._log = RestartLog()
        self._loop: AbstractEventLoop | None = None
        self._workers: Workers
        self._settled: dict[Place, Future[None]] = {}  # of places that are waited for: they have answered, or have a worker
        self._tasks: set[Future[Any]] = set()

    def enter(self) -> None:
        """Belong to the event loop that is running."""
        self.require_usable("async with", entered=False)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._workers = Workers(self.engine, self.start_timeout, self._died, self._ready)

    @property
    def busy(self) -> bool:
        """An environment was asked something and has not answered."""
        return any(place.question is not None for place in self._places.values())

    def taken(self) -> int:
        """How many an episode has."""
        return sum(place.owner is not None for place in self._places.values())

    def close(self) -> None:
        """Nothing is watched, asked or waited for any more, and whatever waits is told. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self._loop is not None:
            self._workers.close()
        for place in self._places.values():
            if place.patience is not None:
                place.patience.cancel()
            if (question := place.question) is not None and not question.reply.done():
                question.reply.set_result(Reply(error=self._closed_error()))
        self.engine.requests.clear()
        self._refuse_waiters(self._closed_error)
        for settled in self._settled.values():
            settled.set_result(None)
        self._settled.clear()
        for task in self._tasks:
            task.cancel()

    def _closed_error(self) -> ClosedEnvironmentError:
        return ClosedEnvironmentError("Trying to operate on `Pool`, after a call to `close()`.")

    def require_usable(self, method: str, *, entered: bool = True) -> None:
        """Refuse a call where there is a reason to.

        Raises:
            ForkedError: In a forked child.
            ClosedEnvironmentError: After :meth:`close`.
            LoopError: In another event loop, or outside of ``async with``.
        """
        if self.engine.barred == "forked":
            raise ForkedError(
                f"this Pool belongs to another process (pid {self.engine.owner}); a forked child cannot use "
                f"{self.engine.own_means}: build a new one in the child"
            )
        if self.closed:
            raise self._closed_error()
        if self._loop is None:
            if entered:
                raise LoopError(f"`{method}` on a Pool that belongs to no event loop yet: enter it by `async with pool:`")
        elif self._loop is not asyncio.get_running_loop():
            raise LoopError(f"this Pool belongs to another event loop; `{method}` was refused: build a new one in this loop")

    # -- episodes -----------------------------------------------------------------------------------------------------

    async def acquire(self, episode: object) -> Place:
        """A place for an episode; it waits for its turn."""
        self.require_usable("episode")
        if self.free:
            place = self.free.popleft()
            place.free, place.owner = False, episode
            return place
        if (last := self._all_given_up()) is not None:
            raise last.error()
        waiter: Future[Place] = asyncio.get_running_loop().create_future()
        self.waiters.append((episode, waiter))
        try:
            return await waiter
        except BaseException:
            if not waiter.done() or waiter.cancelled():
                with contextlib.suppress(ValueError):
                    self.waiters.remove((episode, waiter))
            elif waiter.exception() is None:  # the place came at the same time
                self.release(waiter.result())
            raise

    def _all_given_up(self) -> Death | None:
        """How a worker ended, if all were given up: no place will come back then."""
        ends = [process.given_up for process in self.processes.values()]
        return ends[-1] if all(ends) else None

    def _refuse_waiters(self, error: Callable[[], Exception]) -> None:
        for _, waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(error())
        self.waiters.clear()

    def release(self, place: Place) -> None:
        """The episode that had it is over."""
        place.owner = None
        question = place.question
        if question is not None and not question.reply.done():  # another task waits in it
            text = "Trying to operate on `Episode`, outside of its `async with` block."
            question.reply.set_result(Reply(error=ClosedEnvironmentError(text)))
            self.abandon(place, question)
        if (settled := self._settled.pop(place, None)) is not None:  # likewise
            settled.set_result(None)
        self._settle(place)

    def _settle(self, place: Place) -> None:
        """Tell the episode that waits for its place, or give the place to another, if it can be asked again."""
        if self.closed or place.question is not None or place.process.changing or place.process.given_up:
            return
        if place.owner is None and not place.free:
            self._give_back(place)
        elif (settled := self._settled.pop(place, None)) is not None:
            settled.set_result(None)

    def _give_back(self, place: Place) -> None:
        """Give a place to the episode that has waited longest, if there is one."""
        while self.waiters:
            episode, waiter = self.waiters.popleft()
            if not waiter.done():
                place.owner = episode
                waiter.set_result(place)
                return
        place.free = True
        self.free.append(place)

    async def settled(self, place: Place, episode: object) -> None:
        """Wait until a place can be asked: its last question is answered, and its worker is ready.

        Raises:
            WorkerDied: The worker cannot be started anew.
        """
        process, tried = place.process, False
        while True:
            if process.given_up is not None:
                raise process.given_up.error()
            if place.question is None and not process.changing:
                if (death := process.worker.death) is None:
                    return
                if tried:
                    raise death.error()
                tried = True
                self._start_anew(process)
                continue
            future = self._settled[place] = asyncio.get_running_loop().create_future()
            try:
                await future
            finally:
                self._settled.pop(place, None)
            self.require_usable("reset")
            if place.owner is not episode:
                raise ClosedEnvironmentError("Trying to operate on `Episode`, outside of its `async with` block.")

    # -- asking ---------------------------------------------------------------------------------------------------------

    async def ask(self, place: Place, command: str, op: Op, payload: Any) -> Reply:
        """Ask an environment something, and wait for what it says. Where the task is cancelled, nothing is awaited any more.

        Raises:
            Exception: The payload cannot be pickled; nothing was sent.
        """
        engine, worker = self.engine, place.process.worker
        loop = asyncio.get_running_loop()
        question = Question(
            engine.pool.next_seq(), command, place.row, worker, op, payload, loop.create_future(), self._answered
        )  # fmt: skip
        engine.pool.stage(question.part, question.seq)
        engine.batch.requested[place.row] = question.seq
        if command == "reset":
            place.lost, place.untold = "", None
        place.question = question
        self._workers.send(question)
        timer: TimerHandle | None = None
        if self.step_timeout is not None and command in ("step", "reset"):
            timer = loop.call_later(self.step_timeout, self._too_late, place, question)
        try:
            return await question.reply
        except BaseException:  # cancelled, or thrown away with the whole loop
            place.lost = f"its {command} was cancelled"
            self.abandon(place, question)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def abandon(self, place: Place, question: Question) -> None:
        """No task wants the answer any more: wait for it a while, before the worker is killed."""
        assert self._loop is not None
        if place.question is not question or self.closed or self.cancel_timeout is None or self._loop.is_closed():
            return
        place.patience = self._loop.call_later(self.cancel_timeout, self._out_of_patience, place, question)

    def _out_of_patience(self, place: Place, question: Question) -> None:
        place.patience = None
        if place.question is not question:
            return
        if self._one_by_one and self.engine.oldest_of(question.worker) is not question:  # it has not begun
            self.abandon(place, question)
        else:
            place.process.unwanted = True
            late = f"{self.cancel_timeout} seconds after that was cancelled"
            self._kill(place, f"was still in `{question.command}` {late}, and was killed")

    def _answered(self, question: Question, reply: Reply) -> None:
        place = self._places[question.row]
        place.question = None
        if place.patience is not None:
            place.patience.cancel()
            place.patience = None
        if not question.reply.done():
            question.reply.set_result(reply)
        if question.worker.death is None:  # otherwise :meth:`_died` sees to the place
            self._settle(place)

    # -- workers that hang or die -----------------------------------------------------------------------------------------

    def _too_late(self, place: Place, question: Question) -> None:
        task = asyncio.ensure_future(self._end_hanging(place, question))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_hanging(self, place: Place, question: Question) -> None:
        """Find out where a worker hangs, and kill it."""
        worker = question.worker
        stack = "" if worker.death is not None else await self._workers.stack_of(worker)
        if place.question is not question or question.reply.done():
            return
        at = f" at {found}" if (found := line_of(stack)) else ""
        hangs = f"hung for more than {self.step_timeout} seconds and was killed{at}"
        text = f"env {place.row}, {worker.label}, during {question.command}: it {hangs}" + (f"\n{stack}" if stack else "")
        place.lost = hangs
        question.reply.set_result(Reply(error=StepTimeout(text)))
        self._kill(place, hangs + (f"\nits stack:\n{stack}" if stack else ""))

    def _kill(self, place: Place, reason: str) -> None:
        """Kill the worker of a place; until it has ended, none of its places is given to an episode."""
        process = place.process
        if process.worker.death is None:
            process.changing = True
            self._withdraw(process)
            self._workers.kill(process.worker, f"env {place.row} {reason}")

    def _withdraw(self, process: Process) -> None:
        """Take a worker's places out of those that are free."""
        for place in process.places:
            if place.free:
                self.free.remove(place)
                place.free = False

    def _died(self, worker: ProcessWorker) -> None:
        """All that the worker was asked has been answered by its death."""
        death, process = worker.death, self.processes[worker.index]
        assert death is not None
        assert self._loop is not None
        self.engine.ledger.errors.append(
            ErrorRecord(None, worker.index, death.pid or 0, death.command, death.error(), death.text, time.monotonic())
        )
        for place in process.places:
            if place.owner is not None and not place.lost:
                place.lost, place.untold = death.text.partition("\n")[0], death
        if self._budget is not None:
            self._withdraw(process)
            process.changing = True
            self._loop.call_soon(self._start_within_budget, process)
        else:
            process.changing = False
            for place in process.places:
                self._settle(place)

    def _start_within_budget(self, process: Process) -> None:
        if self.closed:
            return
        death, rows = process.worker.death, list(process.worker.rows)
        assert death is not None
        cause = death.text.partition("\n")[0]
        unwanted, process.unwanted = process.unwanted, False
        assert self._budget is not None
        if not unwanted and not self._budget.spend(cause, rows):
            self._give_up(process, death, self._budget.refusal(rows))
            return
        if not unwanted:
            self._log.say(cause)
        try:
            self._start_anew(process)
        except OSError as error:  # there is no room for it just now
            self._log.say(f"{cause}; a new process cannot be started: {error}")
            assert self._loop is not None
            self._loop.call_later(1.0, self._start_within_budget, process)

    def _start_anew(self, process: Process) -> None:
        process.worker = self._workers.start_anew(process.worker)
        process.changing = True
        self.engine.ledger.restarts += 1

    def _ready(self, worker: ProcessWorker) -> None:
        """A new worker is ready: its places can be asked."""
        process = self.processes[worker.index]
        process.changing = False
        for place in process.places:
            self._settle(place)

    def _give_up(self, process: Process, death: Death, why: str) -> None:
        """A worker needs too many restarts: it gets no more, and its places are gone."""
        process.changing = False
        process.given_up = Death(
            why, death.worker, tuple(process.worker.rows), death.pid, death.exitcode, "restart", RestartsExhausted
        )
        for place in process.places:
            if (settled := self._settled.pop(place, None)) is not None:
                settled.set_result(None)
        if self._all_given_up() is not None:
            self._refuse_waiters(process.given_up.error)
