"""What differs between engines that are no worker processes: the seam under :mod:`vecenv.front.vector_env`."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError

from vecenv.front.arguments import ResetOptions, least_of
from vecenv.front.capabilities import Capabilities, unable
from vecenv.front.guard import left_in_a_fork
from vecenv.front.phases import Phase, still_owed

__all__ = [
    "NOTHING", "After", "Call", "Driver", "Once", "Stepped", "recv_enough", "require_idle", "require_no_step",
]  # fmt: skip

Stepped: TypeAlias = tuple[Any, Any, Any, Any, dict[str, Any]]
"""What ``step`` returns."""

After: TypeAlias = tuple[Any, int, int]
"""What :attr:`Driver.after` is."""


class Call(NamedTuple):
    """What is pending: a reset or a step, of how many rows, to be answered by ``recv`` only or not."""

    kind: Phase
    rows: int
    by_row: bool


NOTHING: Final = Call(Phase.DEFAULT, 0, by_row=True)
"""Nothing is pending."""


class Driver:
    """What steps environments, under the one front; and the state of the call in progress, for the one guard.

    Until an answer was handed over its call is pending: reading an answer changes nothing, and can be repeated. What a call
    changes it puts in place by one store, or by C code in one instruction: before it nothing has happened, afterwards the
    answer is pending.

    Attributes:
        capabilities: What it can do.
        batch_size: Rows of :meth:`recv`.
        name: The class of the vector environment, for refusals.
        owner: The process that may call.
        own_means: What a forked child lacks.
        yields: Another thread may close it in the middle of a call.
        waited: Seconds spent waiting.
        caller: The thread that is in a call; 0: none.
        barred: Why calls are refused: ``"closing"``, ``"closed"`` or ``"forked"``; empty: they are not.
        last_call_ended: The latest call ended by itself; another one was interrupted.
        pending: What was asked and is not taken: one object, which only the guard and the driver replace. Here it is what
            was taken last, and how many steps and resets were taken.
        next_pending: The same once the answer that is being given is taken; ``None``: nothing changes.
        pending_error: The exception that is the answer being given; any other leaves the answer pending.
    """

    name = ""
    own_means = "its threads"
    yields = True
    caller = 0
    barred = ""
    last_call_ended = True
    pending: Any = (None, 0, 0)
    next_pending: Any = None
    pending_error: BaseException | None = None
    batch_size: int

    def open(self, name: str) -> None:
        """From now on this process may call, as the vector environment of this name does."""
        self.name, self.owner = name, os.getpid()
        # those of the class would make every look at them slow
        self.caller, self.barred, self.last_call_ended, self.pending = 0, "", True, self.pending
        self.next_pending = self.pending_error = None
        left_in_a_fork.add(self)

    def resume(self) -> None:
        """The call before was interrupted: put right what it left in between."""

    def leave(self) -> None:
        """A call has ended in the middle of which this was closed: let go of what it used. Idempotent."""
        self.close()

    def abandon(self) -> None:
        """In a forked child: refuse all calls."""
        self.barred = "forked"

    # What subclasses say of answers, in place of `pending` as a whole.

    @property
    def taken(self) -> Any:
        """What was taken last."""
        return self.pending[0]

    @taken.setter
    def taken(self, taken: Any) -> None:
        self.pending = taken, *self.pending[1:]

    @property
    def after(self) -> Any:
        """Of the answer that :meth:`answer` or :meth:`recv` gives: what is taken then, and how many steps and resets."""
        return self.next_pending

    @after.setter
    def after(self, after: tuple[Any, int, int] | None) -> None:
        if after is not None:
            taken, steps, resets = after
            _, all_steps, all_resets = self.pending
            self.next_pending = taken, all_steps + steps, all_resets + resets

    @property
    def capabilities(self) -> Capabilities:
        raise NotImplementedError

    @property
    def waited(self) -> float:
        raise NotImplementedError

    @property
    def owed(self) -> Call:
        """What is in flight. Looking at it changes nothing: another thread may do it."""
        raise NotImplementedError

    def reset(self, seeds: list[Any], ids: npt.NDArray[np.intp] | None, options: ResetOptions, *, by_row: bool) -> None:
        """Begin to reset these rows (``None``: all); checks first, and raises before anything is asked.

        Args:
            seeds: For each row of ``ids``, where it is asked ``by_row``; else for all, of which only those of ``ids`` count.
            ids: Distinct and in range.
            options: Others than ``reset_mask``.
            by_row: It is answered by :meth:`recv` only.
        """

    def step(self, actions: Any) -> None:
        """Begin a step of all rows; checks first, and raises before anything is asked."""

    def send(self, actions: Any, env_id: Any) -> None:
        """Begin a step of some rows (``None``: those of the latest :meth:`recv`), for :meth:`recv`; checks first."""

    def answer(self, kind: Phase, deadline: float | None) -> Stepped | None:
        """The answer to the step, or to the reset, of which only observations and infos count.

        Args:
            kind: Which of the two is pending, not by row.
            deadline: Of ``time.monotonic()``.

        Returns:
            ``None`` where it is not there by then.
        """

    def recv(self, count: int | None, deadline: float | None) -> Stepped | None:
        """The next ``count`` rows (``None``: as many as is usual), as :meth:`answer`.

        Raises:
            NoAsyncCallError: Not so many are in flight.
            AlreadyPendingCallError: A step that is not by row is pending.
            NotImplementedError: Only all of them are answered.
        """

    def close(self, *, terminate: bool = False) -> None:
        """Let go of everything. Idempotent."""


def require_idle(owed: Call, method: str) -> None:
    """Refuse a method of all environments while anything is pending of all of them."""
    if owed.rows and owed.by_row:
        raise AlreadyPendingCallError(
            f"Calling `{method}` for envs 0..{owed.rows - 1}, which are still in flight: `recv` them first.", "send"
        )
    if owed.rows:
        raise AlreadyPendingCallError(still_owed(method, owed.kind), owed.kind.value)


def require_no_step(owed: Call) -> None:
    """Refuse ``recv`` while a step is pending that ``step_wait`` fetches."""
    if owed.kind is Phase.WAITING_STEP and not owed.by_row:
        raise AlreadyPendingCallError(
            "Calling `recv` while waiting for a pending call to `step` to complete: `step_wait` fetches it.", "step"
        )


def recv_enough(driver: Driver, count: int | None, deadline: float | None, at_least: Any, within: Any) -> Stepped | None:
    """The next ``count`` rows; or fewer, once ``within`` seconds have passed; see :meth:`Driver.recv`.

    An answer that is read changes nothing, so a driver is asked for ever fewer until there are so many.

    Raises:
        NotImplementedError: Rows are not done one by one there.
    """
    owed = driver.owed.rows
    wanted = driver.batch_size if count is None else count
    if not driver.capabilities.first_ready:
        unable(driver.name, f"recv at least {at_least} environments", "all of them are done at the same time")
    least, moment = least_of(at_least, within, wanted)
    many = max(min(wanted, owed), least)
    until = moment if deadline is None else min(moment, deadline)
    answer = _recv_some(driver, many, None if until == math.inf else until)
    for fewer in range(many - 1, least - 1, -1):
        if answer is not None:
            break
        answer = _recv_some(driver, fewer, until)
    return answer or driver.recv(least, deadline)


def _recv_some(driver: Driver, count: int, deadline: float | None) -> Stepped | None:
    """So many rows; ``None``, too, where there will never be so many without others being sent to."""
    try:
        return driver.recv(count, deadline)
    except NoAsyncCallError:
        return None


class Once:
    """What an engine is to do for a call: it is done once, however often somebody is told to begin.

    So a driver that was interrupted while it told a thread can tell it again.

    Attributes:
        future: The answer, of a thread.
        failure: The exception that is the answer.
    """

    def __init__(self, ask: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self.failure: BaseException | None = None
        self._ask, self._begun = ask, threading.Lock()
        self._said: Any = None

    def __call__(self) -> None:
        """Do it, in a thread."""
        if self._begun.acquire(blocking=False):
            try:
                self.future.set_result(self._ask())
            except BaseException as error:
                self.failure = error
                self.future.set_exception(error)

    def here(self) -> Any:
        """Do it in the caller's own thread. What interrupts is no answer, and it is to be done again."""
        if self._said is None:
            try:
                self._said = self._ask()
            except Exception as error:
                self.failure = error
                raise
        return self._said
