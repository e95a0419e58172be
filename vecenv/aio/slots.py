"""The slots of a pool: which episode has which environment, what each was asked, and what becomes of a slot that is lost.

A *slot* is a row of the engine: where an environment lives, whichever process that is at the moment. An episode has a
slot to itself. What is asked about a slot is one :class:`~vecenv.aio.workers.RowRequest`, and a slot has one at most: so
an answer has nowhere else to go. A task that is cancelled leaves its request behind; the slot is not given to another
episode before that is answered, or its worker has been killed for taking too long.

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

from vecenv.aio.workers import PoolEngine, RowAnswer, RowRequest, WorkerWatch
from vecenv.engine.handles import ProcessWorker
from vecenv.engine.pending import Death
from vecenv.engine.recovery import RestartBudget, RestartLog
from vecenv.errors import ErrorRecord, ForkedError, LoopError, RestartsExhausted, StepTimeout
from vecenv.link.messages import Op
from vecenv.system.supervision import place as line_of

__all__ = ["Slot", "Slots", "WorkerSlots"]


class Slot:
    """Where one environment lives.

    Attributes:
        row: Its index.
        group: Its worker, with all slots of that.
        owner: The episode that has it.
        request: What it was asked and has not answered.
        lost: Why the environment cannot go on: only a reset builds it anew; empty: it can.
        unreported: How its worker died, until the episode has been told.
        free: It is in the queue of those that episodes are given.
        patience: When its worker is ended, as the request is no longer wanted.
    """

    def __init__(self, row: int, group: WorkerSlots) -> None:
        self.row = row
        self.group = group
        self.owner: Any = None
        self.request: RowRequest | None = None
        self.lost = ""
        self.free = True
        self.unreported: Death | None = None
        self.patience: TimerHandle | None = None


class WorkerSlots:
    """A worker, whichever process that is at the moment, and the slots of its environments.

    Attributes:
        worker: The process.
        slots: In the order of rows.
        changing: It is being killed, or a new process was started that is not ready.
        killed_by_cancel: It was killed as a task did not want its answer any more: that costs no restart of the budget.
        given_up: How it ended, if there will be no new one.
        looking: Held while it is found out where it hangs: the request that was too late first is the one that is blamed.
    """

    def __init__(self, worker: ProcessWorker) -> None:
        self.worker = worker
        self.slots = [Slot(row, self) for row in worker.rows]
        self.changing = False
        self.killed_by_cancel = False
        self.given_up: Death | None = None
        self.looking = asyncio.Lock()


class Slots:
    """The slots of a pool.

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
        self.groups = {worker.index: WorkerSlots(worker) for worker in engine.pool.processes}
        self.closed = False
        self._one_by_one = one_by_one
        self.waiters: deque[tuple[Any, Future[Slot]]] = deque()
        self._slots = {slot.row: slot for group in self.groups.values() for slot in group.slots}
        # the first of every worker, then the second: few episodes are spread over many workers
        in_turn = sorted(self._slots.values(), key=lambda slot: slot.row - slot.group.worker.rows[0])
        self.free = deque(in_turn)
        self._budget = budget
        self._log = RestartLog()
        self._loop: AbstractEventLoop | None = None
        self._workers: WorkerWatch
        self._waited_for: dict[Slot, Future[None]] = {}  # of slots that are waited for: they have answered, or have a worker
        self._tasks: set[Future[Any]] = set()

    def enter(self) -> None:
        """Belong to the event loop that is running."""
        self.require_usable("async with", entered=False)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._workers = WorkerWatch(self.engine, self.start_timeout, self._died, self._ready)

    @property
    def busy(self) -> bool:
        """An environment was asked something and has not answered."""
        return any(slot.request is not None for slot in self._slots.values())

    def taken(self) -> int:
        """How many an episode has."""
        return sum(slot.owner is not None for slot in self._slots.values())

    def close(self) -> None:
        """Nothing is watched, asked or waited for any more, and whatever waits is told. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self._loop is not None:
            self._workers.close()
        for slot in self._slots.values():
            if slot.patience is not None:
                slot.patience.cancel()
            if (request := slot.request) is not None and not request.future.done():
                request.future.set_result(RowAnswer(error=self._closed_error()))
        self.engine.requests.clear()
        self._refuse_waiters(self._closed_error)
        for ready in self._waited_for.values():
            ready.set_result(None)
        self._waited_for.clear()
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

    async def acquire(self, episode: object) -> Slot:
        """A slot for an episode; it waits for its turn."""
        self.require_usable("episode")
        if self.free:
            slot = self.free.popleft()
            slot.free, slot.owner = False, episode
            return slot
        if (last := self._all_given_up()) is not None:
            raise last.error()
        waiter: Future[Slot] = asyncio.get_running_loop().create_future()
        self.waiters.append((episode, waiter))
        try:
            return await waiter
        except BaseException:
            if not waiter.done() or waiter.cancelled():
                with contextlib.suppress(ValueError):
                    self.waiters.remove((episode, waiter))
            elif waiter.exception() is None:  # the slot came at the same time
                self.release(waiter.result())
            raise

    def _all_given_up(self) -> Death | None:
        """How a worker ended, if all were given up: no slot will come back then."""
        ends = [group.given_up for group in self.groups.values()]
        return ends[-1] if all(ends) else None

    def _refuse_waiters(self, error: Callable[[], Exception]) -> None:
        for _, waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(error())
        self.waiters.clear()

    def release(self, slot: Slot) -> None:
        """The episode that had it is over."""
        slot.owner = None
        request = slot.request
        if request is not None and not request.future.done():  # another task waits in it
            text = "Trying to operate on `EpisodeEnv`, outside of its `async with` block."
            request.future.set_result(RowAnswer(error=ClosedEnvironmentError(text)))
            self.abandon(slot, request)
        if (ready := self._waited_for.pop(slot, None)) is not None:  # likewise
            ready.set_result(None)
        self._update(slot)

    def _update(self, slot: Slot) -> None:
        """Tell the episode that waits for its slot, or give the slot to another, if it can be asked again."""
        if self.closed or slot.request is not None or slot.group.changing or slot.group.given_up:
            return
        if slot.owner is None and not slot.free:
            self._give_back(slot)
        elif (ready := self._waited_for.pop(slot, None)) is not None:
            ready.set_result(None)

    def _give_back(self, slot: Slot) -> None:
        """Give a slot to the episode that has waited longest, if there is one."""
        while self.waiters:
            episode, waiter = self.waiters.popleft()
            if not waiter.done():
                slot.owner = episode
                waiter.set_result(slot)
                return
        slot.free = True
        self.free.append(slot)

    async def until_ready(self, slot: Slot, episode: object) -> None:
        """Wait until a slot can be asked: its last request is answered, and its worker is ready.

        Raises:
            WorkerDied: The worker cannot be started anew.
        """
        group, tried = slot.group, False
        while True:
            if group.given_up is not None:
                raise group.given_up.error()
            if slot.request is None and not group.changing:
                if (death := group.worker.death) is None:
                    return
                if tried:
                    raise death.error()
                tried = True
                self._start_anew(group)
                continue
            future = self._waited_for[slot] = asyncio.get_running_loop().create_future()
            try:
                await future
            finally:
                self._waited_for.pop(slot, None)
            self.require_usable("reset")
            if slot.owner is not episode:
                raise ClosedEnvironmentError("Trying to operate on `EpisodeEnv`, outside of its `async with` block.")

    # -- asking ---------------------------------------------------------------------------------------------------------

    async def ask(self, slot: Slot, command: str, op: Op, payload: Any) -> RowAnswer:
        """Ask an environment something, and wait for what it says. Where the task is cancelled, nothing is awaited any more.

        Raises:
            Exception: The payload cannot be pickled; nothing was sent.
        """
        engine, worker = self.engine, slot.group.worker
        loop = asyncio.get_running_loop()
        request = RowRequest(
            engine.pool.next_seq(), command, slot.row, worker, op, payload, loop.create_future(), self._answered
        )  # fmt: skip
        engine.pool.stage(request.part, request.seq)
        engine.batch.requested[slot.row] = request.seq
        if command == "reset":
            slot.lost, slot.unreported = "", None
        slot.request = request
        self._workers.send(request)
        timer: TimerHandle | None = None
        if self.step_timeout is not None and command in ("step", "reset"):
            timer = loop.call_later(self.step_timeout, self._too_late, slot, request)
        try:
            return await request.future
        except BaseException:  # cancelled, or thrown away with the whole loop
            slot.lost = f"its {command} was cancelled"
            self.abandon(slot, request)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def abandon(self, slot: Slot, request: RowRequest) -> None:
        """No task wants the answer any more: wait for it a while, before the worker is killed."""
        assert self._loop is not None
        if slot.request is not request or self.closed or self.cancel_timeout is None or self._loop.is_closed():
            return
        begun = not self._one_by_one or self.engine.oldest_of(request.worker) is request
        slot.patience = self._loop.call_later(self.cancel_timeout, self._out_of_patience, slot, request, begun)

    def _out_of_patience(self, slot: Slot, request: RowRequest, begun: bool) -> None:
        """``begun``: the worker was busy with this, and not with others before it, all that time."""
        slot.patience = None
        if slot.request is not request:
            return
        if not begun:
            self.abandon(slot, request)
        else:
            slot.group.killed_by_cancel = True
            late = f"{self.cancel_timeout} seconds after that was cancelled"
            self._kill(slot, f"was still in `{request.command}` {late}, and was killed")

    def _answered(self, request: RowRequest, answer: RowAnswer) -> None:
        slot = self._slots[request.row]
        slot.request = None
        if slot.patience is not None:
            slot.patience.cancel()
            slot.patience = None
        if not request.future.done():
            request.future.set_result(answer)
        if request.worker.death is None:  # otherwise :meth:`_died` sees to the slot
            self._update(slot)

    # -- workers that hang or die -----------------------------------------------------------------------------------------

    def _too_late(self, slot: Slot, request: RowRequest) -> None:
        task = asyncio.ensure_future(self._end_hanging(slot, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_hanging(self, slot: Slot, request: RowRequest) -> None:
        """Find out where a worker hangs, and kill it."""
        worker = request.worker
        async with slot.group.looking:
            if worker.ended_for:
                return
            stack = "" if worker.death is not None else await self._workers.stack_of(worker)
            if slot.request is not request or request.future.done():
                return
            at = f" at {found}" if (found := line_of(stack)) else ""
            hangs = f"hung for more than {self.step_timeout} seconds and was killed{at}"
            text = f"env {slot.row}, {worker.label}, during {request.command}: it {hangs}" + (f"\n{stack}" if stack else "")
            slot.lost = hangs
            request.future.set_result(RowAnswer(error=StepTimeout(text)))
            self._kill(slot, hangs + (f"\nits stack:\n{stack}" if stack else ""))

    def _kill(self, slot: Slot, reason: str) -> None:
        """Kill the worker of a slot; until it has ended, none of its slots is given to an episode."""
        group = slot.group
        if group.worker.death is None:
            group.changing = True
            self._withdraw(group)
            self._workers.kill(group.worker, f"env {slot.row} {reason}")

    def _withdraw(self, group: WorkerSlots) -> None:
        """Take a worker's slots out of those that are free."""
        for slot in group.slots:
            if slot.free:
                self.free.remove(slot)
                slot.free = False

    def _died(self, worker: ProcessWorker) -> None:
        """All that the worker was asked has been answered by its death."""
        death, group = worker.death, self.groups[worker.index]
        assert death is not None
        assert self._loop is not None
        self.engine.ledger.errors.append(
            ErrorRecord(None, worker.index, death.pid or 0, death.command, death.error(), death.text, time.monotonic())
        )
        for slot in group.slots:
            if slot.owner is not None and not slot.lost:
                slot.lost, slot.unreported = death.text.partition("\n")[0], death
        if self._budget is not None:
            self._withdraw(group)
            group.changing = True
            self._loop.call_soon(self._start_within_budget, group)
        else:
            group.changing = False
            for slot in group.slots:
                self._update(slot)

    def _start_within_budget(self, group: WorkerSlots) -> None:
        if self.closed:
            return
        death, rows = group.worker.death, list(group.worker.rows)
        assert death is not None
        cause = death.text.partition("\n")[0]
        by_cancel, group.killed_by_cancel = group.killed_by_cancel, False
        assert self._budget is not None
        if not by_cancel and not self._budget.spend(cause, rows):
            self._give_up(group, death, self._budget.refusal(rows))
            return
        if not by_cancel:
            self._log.say(cause)
        try:
            self._start_anew(group)
        except OSError as error:  # there is no room for it just now
            self._log.say(f"{cause}; a new process cannot be started: {error}")
            assert self._loop is not None
            self._loop.call_later(1.0, self._start_within_budget, group)

    def _start_anew(self, group: WorkerSlots) -> None:
        group.worker = self._workers.start_anew(group.worker)
        group.changing = True
        self.engine.ledger.restarts += 1

    def _ready(self, worker: ProcessWorker) -> None:
        """A new worker is ready: its slots can be asked."""
        group = self.groups[worker.index]
        group.changing = False
        for slot in group.slots:
            self._update(slot)

    def _give_up(self, group: WorkerSlots, death: Death, why: str) -> None:
        """A worker needs too many restarts: it gets no more, and its slots are gone."""
        group.changing = False
        group.given_up = Death(
            why, death.worker, tuple(group.worker.rows), death.pid, death.exitcode, "restart", RestartsExhausted
        )
        for slot in group.slots:
            if (ready := self._waited_for.pop(slot, None)) is not None:
                ready.set_result(None)
        if self._all_given_up() is not None:
            self._refuse_waiters(group.given_up.error)
