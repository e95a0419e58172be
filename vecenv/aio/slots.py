"""The slots of a pool and its workers: which episode has which environment, what each was asked, what becomes of lost ones.

A *slot* is a row of the engine: where an environment lives, whichever process that is at the moment. An episode has a
slot to itself. What is asked about a slot is one :class:`RowRequest`, and a slot has one at most: so an answer has nowhere
else to go. A task that is cancelled leaves its request behind; the slot is not given to another episode before that is
answered, or its worker has been killed for taking too long.

All of it runs in one event loop, in callbacks that do not wait. A worker is sent to by a write that takes what the pipe
takes; what is left goes out when there is room. It is heard when there is something to read, and its end is a readable
descriptor, too. A worker that died is started anew while the loop goes on, and says itself when it is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from asyncio import AbstractEventLoop, Future, TimerHandle
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from gymnasium.error import ClosedEnvironmentError

from vecenv.engine.engine import Engine
from vecenv.engine.handles import PoolOptions, ProcessWorker
from vecenv.engine.pending import NOTHING, Answer, Death, Request, Result, Worker, WorkerRequest
from vecenv.engine.pool import WorkerPool
from vecenv.engine.recovery import RestartBudget, RestartLog
from vecenv.engine.vector_env import AsyncVectorEnv
from vecenv.errors import ErrorRecord, ForkedError, LoopError, RestartsExhausted, StepTimeout
from vecenv.link.channel import ChannelClosed
from vecenv.link.messages import Op
from vecenv.system.cores import let_caller_first, usable_cores
from vecenv.system.supervision import place as line_of
from vecenv.worker.envs import WorkerPlan

__all__ = ["PoolEnvs", "RowAnswer", "RowRequest", "Slot", "Slots", "WorkerSlots", "outside_of_block"]


# -- the engine under a pool -------------------------------------------------------------------------------------------
#
# The table of pending requests stays what it is: an answer finds its request by its number, the death of a worker answers
# all that it was asked, and an answer whose request is gone goes nowhere. What differs is that nothing waits: an answer is
# read when it is delivered, and handed to a future.


class RowAnswer(NamedTuple):
    """What an environment said: as it came, whether its info lies in shared memory, and why there is no answer."""

    result: Result = NOTHING
    columns: bool = False
    error: Exception | None = None


class RowRequest(Request):
    """A request about one environment.

    Attributes:
        row: Which.
        worker: Its process.
        part: What is sent.
        future: Done once there is an answer, or none is wanted any more.
    """

    by_row = True  # so that each answer is delivered, and not only put down

    def __init__(
        self, seq: int, command: str, row: int, worker: ProcessWorker, op: Op, payload: Any, future: Future[RowAnswer]
    ) -> None:
        super().__init__(seq, command, (worker,))
        self.row = row
        self.worker = worker
        self.part = WorkerRequest(worker, (row,), op, payload)
        self.parts = {worker.index: self.part}
        self.future = future


class PoolEngine(Engine):
    """An engine whose answers are delivered to those that asked."""

    on_answer: Callable[[RowRequest, RowAnswer], None]
    on_death: Callable[[Worker, Death], None] | None = None

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
            taken = RowAnswer(self.read([(request.worker, answer)]), answer.columns)
        except Exception as error:  # whatever reading it raises is about this environment alone
            taken = RowAnswer(error=error)
        if taken.error is None and answer.death is None:
            self.pending.steps += request.command == "step"
            self.pending.resets += request.command == "reset"
        self.on_answer(request, taken)

    def info_of(self, row: int, result: Result, columns: bool) -> dict[Any, Any]:
        """The info of one environment, as it gave it."""
        if row in result.infos:
            return result.infos[row]  # type: ignore[no-any-return]
        return self._infos.one(row) if columns else {}

    def mark_lost(self, worker: Worker, death: Death) -> None:
        super().mark_lost(worker, death)
        if self.on_death is not None:
            self.on_death(worker, death)


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
        on_death: Callable[[ProcessWorker, Death], None],
        on_ready: Callable[[ProcessWorker], None],
    ) -> None:
        self._engine = engine
        self._start_timeout = start_timeout
        self._on_death = on_death
        self._on_ready = on_ready
        self._loop: AbstractEventLoop = asyncio.get_running_loop()
        self._watched: dict[ProcessWorker, tuple[int, int]] = {}
        self._late: dict[ProcessWorker, TimerHandle] = {}  # when a new one that is not ready is killed
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
        if (timer := self._late.pop(worker, None)) is not None:
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
        if worker.starting:
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

    def _died(self, worker: Worker, death: Death) -> None:
        if isinstance(worker, ProcessWorker) and worker in self._watched:
            self._unwatch(worker)
            self._on_death(worker, death)

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
        if (limit := self._start_timeout) is not None:
            late = f"it was not ready within {limit} seconds of its start, and was killed"
            self._late[new] = self._loop.call_later(limit, self.kill, new, late)
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
            if (timer := self._late.pop(worker, None)) is not None:
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


# -- slots -------------------------------------------------------------------------------------------------------------


class Slot:
    """Where one environment lives.

    Attributes:
        group: Its worker, with all slots of that.
        k: Which one of its worker's environments it is.
        row: Its index among all.
        owner: The episode that has it.
        request: What it was asked and has not answered.
        lost: Why the environment cannot go on: only a reset builds it anew; empty: it can.
        unreported: How its worker died, until the episode has been told.
        patience: When its worker is ended, as the request is no longer wanted.
    """

    def __init__(self, group: WorkerSlots, k: int, row: int) -> None:
        self.group, self.k, self.row = group, k, row
        self.owner: Any = None
        self.request: RowRequest | None = None
        self.lost = ""
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
        self.slots = [Slot(self, k, row) for k, row in enumerate(worker.rows)]
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
        self.free = deque(sorted(self._slots.values(), key=lambda slot: slot.k))
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
            self.engine.on_answer = self._answered
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
        for slot in list(self._waited_for):
            self._wake(slot)
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
            slot.owner = episode
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
            request.future.set_result(RowAnswer(error=outside_of_block()))
            self.abandon(slot, request)
        self._wake(slot)  # likewise
        self._update(slot)

    def _update(self, slot: Slot) -> None:
        """Tell the episode that waits for its slot, or give the slot to another, if it can be asked again."""
        if self.closed or slot.request is not None or slot.group.changing or slot.group.given_up:
            return
        if slot.owner is None and slot not in self.free:
            self._give_back(slot)
        else:
            self._wake(slot)

    def _wake(self, slot: Slot) -> None:
        """Let the task go on that waits for a slot, if there is one, and it was not cancelled just now."""
        ready = self._waited_for.pop(slot, None)
        if ready is not None and not ready.done():
            ready.set_result(None)

    def _give_back(self, slot: Slot) -> None:
        """Give a slot to the episode that has waited longest, if there is one."""
        while self.waiters:
            episode, waiter = self.waiters.popleft()
            if not waiter.done():
                slot.owner = episode
                waiter.set_result(slot)
                return
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
                raise outside_of_block()

    # -- asking ---------------------------------------------------------------------------------------------------------

    async def ask(self, slot: Slot, command: str, op: Op, payload: Any) -> RowAnswer:
        """Ask an environment something, and wait for what it says. Where the task is cancelled, nothing is awaited any more.

        Raises:
            Exception: The payload cannot be pickled; nothing was sent.
        """
        engine, worker = self.engine, slot.group.worker
        loop = asyncio.get_running_loop()
        request = RowRequest(engine.pool.next_seq(), command, slot.row, worker, op, payload, loop.create_future())
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
            self._withdraw(group)
            self._workers.kill(group.worker, f"env {slot.row} {reason}")

    def _withdraw(self, group: WorkerSlots) -> None:
        """A worker has ended, or will: no episode is given a slot of its until it is ready again."""
        group.changing = True
        self.free = deque(slot for slot in self.free if slot.group is not group)

    def _died(self, worker: ProcessWorker, death: Death) -> None:
        """All that the worker was asked has been answered by its death."""
        group = self.groups[worker.index]
        self.engine.ledger.errors.append(
            ErrorRecord(None, worker.index, death.pid or 0, death.command, death.error(), death.text, time.monotonic())
        )
        for slot in group.slots:
            if slot.owner is not None and not slot.lost:
                slot.lost, slot.unreported = death.text.partition("\n")[0], death
        if self._budget is not None:
            self._withdraw(group)
            asyncio.get_running_loop().call_soon(self._start_within_budget, group, death, self._budget)
        else:
            self._changed(group)

    def _start_within_budget(self, group: WorkerSlots, death: Death, budget: RestartBudget) -> None:
        if self.closed:
            return
        cause, rows = death.text.partition("\n")[0], list(group.worker.rows)
        by_cancel, group.killed_by_cancel = group.killed_by_cancel, False
        if not by_cancel and not budget.spend(cause, rows):
            self._give_up(group, death, budget.refusal(rows))
            return
        if not by_cancel:
            self._log.say(cause)
        self._start_when_possible(group, cause)

    def _start_when_possible(self, group: WorkerSlots, cause: str) -> None:
        if self.closed:
            return
        try:
            self._start_anew(group)
        except OSError as error:  # there is no room for it just now
            self._log.say(f"{cause}; a new process cannot be started: {error}")
            asyncio.get_running_loop().call_later(1.0, self._start_when_possible, group, cause)

    def _start_anew(self, group: WorkerSlots) -> None:
        group.worker = self._workers.start_anew(group.worker)
        group.changing = True
        self.engine.ledger.restarts += 1

    def _ready(self, worker: ProcessWorker) -> None:
        """A new worker is ready: its slots can be asked."""
        self._changed(self.groups[worker.index])

    def _changed(self, group: WorkerSlots) -> None:
        """Episodes can be told, or given slots: a reset starts a worker that is not there."""
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
            self._wake(slot)
        if self._all_given_up() is not None:
            self._refuse_waiters(group.given_up.error)


def outside_of_block() -> ClosedEnvironmentError:
    """What a call raises whose episode is over, or has not begun."""
    return ClosedEnvironmentError("Trying to operate on `EpisodeEnv`, outside of its `async with` block.")
