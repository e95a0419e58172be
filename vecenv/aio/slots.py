"""Assigns the environments of a pool to episodes, and tracks their requests and failures.

A *slot* is a row of the engine: one environment, in its current process. An episode has a slot to itself. A slot has at most
one pending request, so the destination of a reply is unique. The request of a cancelled task stays pending: no other episode
gets the slot until the reply arrives or the worker is killed for taking too long.

Everything runs in one event loop, without blocking it. The loop watches the descriptor of the engine's
:class:`~vecenv.engine.submissions.Submissions`, which is readable when a worker has replied, died or become ready, or when
its pipe, which was full, accepts messages again.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
from asyncio import AbstractEventLoop, Future, TimerHandle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from gymnasium.error import ClosedEnvironmentError

from vecenv.engine.vector_env import AsyncVectorEnv
from vecenv.errors import EnvFailed, ForkedError, LoopError, RestartsExhausted, StepTimeout, format_seconds
from vecenv.system.cores import lower_priority, usable_cores
from vecenv.system.restart_budget import RestartBudget
from vecenv.system.signals import deferred_signals
from vecenv.system.supervision import innermost_location


@dataclass(eq=False, slots=True)
class Slot:
    """One environment, and the episode and request that occupy it.

    Attributes:
        group: The slots of its worker.
        row: The index of the environment.
        owner: The episode that uses it, or the pool itself.
        request: Its pending request.
        reply: A future with the request's (result, error). A timeout, cancellation or close completes it before the reply.
        lost_reason: The reason why the environment cannot be used before a reset; empty if it can.
        unreported_death: The death of its worker, until it has been raised in the episode.
        ready: The future of an episode that waits until the slot accepts requests.
        cancel_timer: The timer that kills its worker if a cancelled request does not finish in time.
    """

    group: WorkerSlots
    row: int
    owner: Any = None
    request: Any = None
    reply: Future[Any] = field(init=False)
    lost_reason: str = ""
    unreported_death: Any = None
    ready: Future[None] | None = None
    cancel_timer: TimerHandle | None = None

    def finish(self, result: Any, error: Exception | None) -> None:
        """Pass the result or the error to the task that waits for the reply, if any."""
        if not self.reply.done():
            self.reply.set_result((result, error))

    def wake(self) -> None:
        """Resume the episode that waits for the slot, if any, unless it was just cancelled."""
        ready, self.ready = self.ready, None
        if ready is not None and not ready.done():
            ready.set_result(None)


@dataclass(eq=False, slots=True)
class WorkerSlots:
    """A worker, across restarts of its process, and the slots of its environments.

    Attributes:
        index: The index of the worker.
        slots: The slots in the order of rows.
        pending: Its pending requests, oldest first.
        death: How its process ended; ``None`` while it is alive.
        unavailable: True while it is being killed or restarted, until the new process is ready.
        killed_by_cancel: True if it was killed because a task was cancelled, which the restart budget does not count.
        exhausted: The error that its slots raise, if it will not be restarted.
        start_timer: The timer that kills a new process if it is not ready in time.
        search_lock: A lock that is held while a hang is located, so that only one request is blamed.
    """

    index: int
    slots: list[Slot] = field(default_factory=list)
    pending: dict[Any, None] = field(default_factory=dict)
    death: Any = None
    unavailable: bool = False
    killed_by_cancel: bool = False
    exhausted: RestartsExhausted | None = None
    start_timer: TimerHandle | None = None
    search_lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Slots:
    """The slots of a pool.

    Args:
        envs: The vector environment.
        step_timeout, cancel_timeout, start_timeout: Limits in seconds; see :class:`vecenv.aio.Pool`.
        budget: The budget for restarting dead workers immediately; ``None``: the next reset restarts them.
        env_threads: The number of environments that a worker runs at the same time.
    """

    def __init__(
        self, envs: AsyncVectorEnv[Any, Any], step_timeout: float | None, cancel_timeout: float | None,
        start_timeout: float | None, *, budget: RestartBudget | None, env_threads: int,
    ) -> None:  # fmt: skip
        self.step_timeout, self.cancel_timeout, self.start_timeout = step_timeout, cancel_timeout, start_timeout
        self.groups = [WorkerSlots(index) for index in range(len(envs.worker_rows))]
        for group, rows in zip(self.groups, envs.worker_rows, strict=True):
            group.slots += [Slot(group, row) for row in rows]
        self.submissions = envs.submissions()
        self.closed = False
        self.waiters: deque[tuple[Any, Future[Slot]]] = deque()  # episodes that wait for a free slot
        self._slots = [slot for group in self.groups for slot in group.slots]
        # the first slots of all workers, then the second ones, and so on, to spread a few episodes over many workers
        self.free = deque(sorted(self._slots, key=lambda slot: slot.row - slot.group.slots[0].row))
        self._envs, self._budget, self._env_threads = envs, budget, env_threads
        self._pid = os.getpid()
        self._loop: AbstractEventLoop | None = None
        self._poll_timer: TimerHandle | None = None
        self._searches: set[Future[Any]] = set()
        for group in self.groups:
            self._lower_priority(group)

    def enter(self) -> None:
        """Bind the slots to the running event loop."""
        self.require_usable("async with", entered=False)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self.submissions.fileno(), self._collect)
            self._poll()

    def _poll(self) -> None:
        """Collect replies periodically on systems where a worker's exit may not make a descriptor readable."""
        if self.submissions.poll_interval is not None:
            self._collect()
            self._poll_timer = asyncio.get_running_loop().call_later(self.submissions.poll_interval, self._poll)

    @property
    def busy(self) -> bool:
        """True if a request is pending."""
        return any(group.pending for group in self.groups)

    def num_occupied(self) -> int:
        """Return the number of slots with an episode."""
        return sum(slot.owner is not None for slot in self._slots)

    def close(self) -> None:
        """Stop watching workers, and complete all pending requests and waiters with an error. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self._loop is not None:
            self._loop.remove_reader(self.submissions.fileno())
        self.submissions.close()
        timers = [slot.cancel_timer for slot in self._slots] + [group.start_timer for group in self.groups]
        for timer in filter(None, [*timers, self._poll_timer]):
            timer.cancel()
        for slot in self._slots:
            if slot.request is not None:
                slot.finish(None, self._closed_error())
            slot.wake()
        self._refuse_waiters(self._closed_error)
        for search in self._searches:
            search.cancel()

    def kill_all(self) -> None:
        """Kill all workers."""
        for group in self.groups:
            self.submissions.kill(group.slots[0].row, "it was closed")

    def _closed_error(self) -> ClosedEnvironmentError:
        return ClosedEnvironmentError("Trying to operate on `Pool`, after a call to `close()`.")

    def require_usable(self, method: str, *, entered: bool = True) -> None:
        """Raise unless calls are possible in this process and loop.

        Raises:
            ForkedError: In a forked child.
            ClosedEnvironmentError: After :meth:`close`.
            LoopError: In another event loop or, if it must be ``entered``, before :meth:`enter`.
        """
        if os.getpid() != self._pid:
            raise ForkedError(
                f"this Pool belongs to another process (pid {self._pid}); a forked child cannot use its workers: build a "
                "new one in the child"
            )
        if self.closed:
            raise self._closed_error()
        if self._loop is None:
            if entered:
                raise LoopError(f"`{method}` on a Pool that belongs to no event loop yet: enter it with `async with pool:`")
        elif self._loop is not asyncio.get_running_loop():
            raise LoopError(f"this Pool belongs to another event loop; `{method}` was refused: build a new one in this loop")

    # -- episodes -----------------------------------------------------------------------------------------------------

    async def acquire(self, episode: object) -> Slot:
        """Wait for a slot for an episode, first come, first served. Raise ``RestartsExhausted`` if none will become free."""
        self.require_usable("episode")
        if self.free:
            slot = self.free.popleft()
            slot.owner = episode
            return slot
        if (error := self._exhausted_error()) is not None:
            raise error
        waiter: Future[Slot] = asyncio.get_running_loop().create_future()
        self.waiters.append((episode, waiter))
        try:
            return await waiter
        except BaseException:
            if not waiter.done() or waiter.cancelled():
                with contextlib.suppress(ValueError):
                    self.waiters.remove((episode, waiter))
            elif waiter.exception() is None:  # a slot was assigned at the same time
                self.release(waiter.result())
            raise

    def _exhausted_error(self) -> RestartsExhausted | None:
        """Return a new error if all workers have used up their restarts, so that no slot will become free."""
        errors = [group.exhausted for group in self.groups]
        return copy.copy(errors[-1]) if all(errors) else None

    def _refuse_waiters(self, make_error: Callable[[], Exception]) -> None:
        for _, waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(make_error())
        self.waiters.clear()

    def release(self, slot: Slot) -> None:
        """Free the slot of an episode that has ended."""
        slot.owner = None
        if slot.request is not None and not slot.reply.done():  # another task waits for it
            slot.finish(None, outside_of_block_error())
            self.abandon(slot, slot.request)
        slot.wake()  # another task may wait for it
        self._update(slot)

    def _update(self, slot: Slot) -> None:
        """If the slot accepts requests, wake its episode; if it is free, assign it to an episode that waits for one."""
        if self.closed or slot.request is not None or slot.group.unavailable or slot.group.exhausted:
            return
        if slot.owner is not None or slot in self.free:
            slot.wake()
            return
        while self.waiters:
            slot.owner, waiter = self.waiters.popleft()
            if not waiter.done():
                waiter.set_result(slot)
                return
        slot.owner = None
        self.free.append(slot)

    async def _wait_until_ready(self, slot: Slot) -> None:
        """Wait until a slot accepts requests: its last request is complete, and its worker is ready.

        Raises ``RestartsExhausted`` if the worker was abandoned, ``WorkerDied`` if it was restarted and died again.
        """
        group, episode, was_restarted = slot.group, slot.owner, False
        while True:
            if group.exhausted is not None:
                raise copy.copy(group.exhausted)
            if slot.request is None and not group.unavailable:
                if group.death is None:
                    return
                if was_restarted:
                    raise group.death.error()
                was_restarted = True
                self._start(group)
                continue
            ready = slot.ready = asyncio.get_running_loop().create_future()
            try:
                await ready
            finally:
                if slot.ready is ready:
                    slot.ready = None
            self.require_usable("reset")
            if slot.owner is not episode:
                raise outside_of_block_error()

    # -- requests -------------------------------------------------------------------------------------------------------

    async def request(self, slot: Slot, command: str, payload: Any = None) -> Any:
        """Submit a request to an environment, and return its result. Cancellation does not wait for the reply.

        Raises:
            EnvFailed, WorkerDied: The environment failed earlier, or its worker died meanwhile; nothing was sent.
            Exception: The request failed, or its payload cannot be pickled (then nothing was sent).
        """
        if command == "reset":
            await self._wait_until_ready(slot)
        elif slot.unreported_death is not None:
            death, slot.unreported_death = slot.unreported_death, None
            raise death.error()
        elif slot.lost_reason:
            raise EnvFailed(f"env {slot.row} failed earlier and has to be rebuilt by reset() first: {slot.lost_reason}")
        loop = asyncio.get_running_loop()
        request = self.submissions.submit(slot.row, command, payload)
        slot.request, slot.reply = request, loop.create_future()
        slot.group.pending[request] = None
        if command == "reset":
            slot.lost_reason, slot.unreported_death = "", None
        timer: TimerHandle | None = None
        if self.step_timeout is not None and command in ("step", "reset"):
            timer = loop.call_later(self.step_timeout, self._start_search, slot, request)
        try:
            result, error = await slot.reply
        except BaseException:  # the task was cancelled, or its coroutine was closed with the loop
            slot.lost_reason = f"its {request.command} was cancelled"
            self.abandon(slot, request)
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # breaks a cycle: the exception's traceback refers to this frame

    def abandon(self, slot: Slot, request: Any) -> None:
        """Kill the worker if a request that no task awaits does not finish within ``cancel_timeout``."""
        assert self._loop is not None
        if slot.request is not request or self.closed or self.cancel_timeout is None or self._loop.is_closed():
            return
        begun = request in self._running(slot.group)
        slot.cancel_timer = self._loop.call_later(self.cancel_timeout, self._end_cancelled, slot, request, begun)

    def _running(self, group: WorkerSlots) -> list[Any]:
        """Return the requests that a worker is executing: it begins them in order."""
        return list(islice(group.pending, self._env_threads))

    def _end_cancelled(self, slot: Slot, request: Any, begun: bool) -> None:
        """Kill the worker if it spent the whole timeout on this request (``begun``); otherwise, wait again."""
        slot.cancel_timer = None
        if slot.request is not request:
            return
        if not begun:
            self.abandon(slot, request)
        else:
            slot.group.killed_by_cancel = True
            late = f"{format_seconds(self.cancel_timeout)} after its cancellation"
            self._kill(slot, f"was still in `{request.command}` {late}, and was killed")

    def _collect(self) -> None:
        """Process replies, deaths, and new workers that are ready."""
        finished = self.submissions.collect()
        deaths = list(self.submissions.deaths)
        self.submissions.deaths.clear()
        for death in deaths:
            self.groups[death.worker].death = death
        for request, result, error in finished:
            assert request.rows is not None
            slot = self._slots[request.rows[0]]
            if request.command != "start":
                self._finish(slot, request, result, error)
                continue
            if slot.group.start_timer is not None:
                slot.group.start_timer.cancel()
            if error is None:
                self._make_available(slot.group)
        for death in deaths:
            self._handle_death(self.groups[death.worker])

    def _finish(self, slot: Slot, request: Any, result: Any, error: Exception | None) -> None:
        slot.request = None
        del slot.group.pending[request]
        if slot.cancel_timer is not None:
            slot.cancel_timer.cancel()
            slot.cancel_timer = None
        if error is not None and not slot.lost_reason:
            slot.lost_reason = self.submissions.failed.get(slot.row, "")
        slot.finish(result, error)
        if slot.group.death is None:  # otherwise `_handle_death` updates the slot
            self._update(slot)

    # -- workers that hang or die -----------------------------------------------------------------------------------------

    def _start_search(self, slot: Slot, request: Any) -> None:
        search = asyncio.ensure_future(self._kill_hanging(slot, request))
        self._searches.add(search)
        search.add_done_callback(self._searches.discard)

    async def _kill_hanging(self, slot: Slot, request: Any) -> None:
        """Find out where a worker hangs, and kill it."""
        group = slot.group
        async with group.search_lock:
            if group.unavailable or slot.request is not request:
                return
            pid, stack = self._envs.processes[group.index].pid, await self._find_stack(slot)
            if slot.request is not request or slot.reply.done():
                return
            running = self._running(group)
            if request not in running:  # the oldest one hangs; it may be a cancelled one, which has no timer
                request = running[0]
                slot = self._slots[request.rows[0]]
            location = f" at {found}" if (found := innermost_location(stack)) else ""
            slot.lost_reason = f"hung for more than {format_seconds(self.step_timeout)}{location}, and was killed"
            text = f"env {slot.row}, worker {group.index}, pid {pid}, during {request.command}: it {slot.lost_reason}"
            slot.finish(None, StepTimeout(text + (f"\n{stack}" if stack else ""), envs=[slot.row]))
            self._kill(slot, slot.lost_reason + (f"\nits stack:\n{stack}" if stack else ""))

    async def _find_stack(self, slot: Slot) -> str:
        search = self.submissions.find_stack(slot.row)
        while True:
            try:
                await asyncio.sleep(next(search))
            except StopIteration as found:
                return str(found.value)

    def _kill(self, slot: Slot, reason: str) -> None:
        """Kill the worker of a slot, unless it has died."""
        if slot.group.death is None:
            self._make_unavailable(slot.group)
            self.submissions.kill(slot.row, f"env {slot.row} {reason}")

    def _make_unavailable(self, group: WorkerSlots) -> None:
        """Withhold the slots of a worker that has ended, or is being killed, from episodes."""
        group.unavailable = True
        self.free = deque(slot for slot in self.free if slot.group is not group)

    def _handle_death(self, group: WorkerSlots) -> None:
        """Process the death of a worker, after its requests are finished."""
        for slot in group.slots:
            if slot.owner is not None and not slot.lost_reason:
                slot.lost_reason, slot.unreported_death = group.death.first_line, group.death
        if self._budget is not None:
            self._make_unavailable(group)
            asyncio.get_running_loop().call_soon(self._restart, group)
        else:
            self._make_available(group)  # a reset restarts the worker

    def _restart(self, group: WorkerSlots) -> None:
        if self.closed:
            return
        with deferred_signals():  # so that the exception is not a signal handler's
            try:
                self._start(group)
            except RestartsExhausted as error:
                self._give_up(group, error)
            except OSError:  # the system lacks resources at the moment, so try again later
                asyncio.get_running_loop().call_later(1.0, self._restart, group)
            except Exception:  # such as an `env_fn` that cannot be pickled any more; a reset tries again, and raises it
                self._make_available(group)

    def _start(self, group: WorkerSlots) -> None:
        """Start a new process in place of a dead one."""
        row = group.slots[0].row
        self.submissions.start(row, budget=None if group.killed_by_cancel else self._budget)
        group.death, group.unavailable, group.killed_by_cancel = None, True, False
        self._lower_priority(group)
        if (limit := self.start_timeout) is not None:
            reason = f"it was not ready within {format_seconds(limit)} of its start, and was killed"
            group.start_timer = asyncio.get_running_loop().call_later(limit, self.submissions.kill, row, reason)

    def _lower_priority(self, group: WorkerSlots) -> None:
        if len(self.groups) > usable_cores():
            lower_priority(self._envs.processes[group.index].pid)

    def _make_available(self, group: WorkerSlots) -> None:
        """Make the slots of a worker available to episodes."""
        group.unavailable = False
        for slot in group.slots:
            self._update(slot)

    def _give_up(self, group: WorkerSlots, error: RestartsExhausted) -> None:
        """Abandon a worker that has used up its restarts, together with its slots."""
        group.unavailable, group.exhausted = False, error
        for slot in group.slots:
            slot.wake()
        if self._exhausted_error() is not None:
            self._refuse_waiters(partial(copy.copy, error))


def outside_of_block_error() -> ClosedEnvironmentError:
    """Return the error for a call outside the episode's ``async with`` block."""
    return ClosedEnvironmentError("Trying to operate on `EpisodeEnv`, outside of its `async with` block.")
