"""What differs between engines that are no worker processes: the seam under :mod:`vecenv.front.vector_env`."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError

from vecenv.front.arguments import ResetOptions, least_of
from vecenv.front.capabilities import Capabilities, unable
from vecenv.front.phases import Phase, still_owed

__all__ = [
    "NOTHING", "After", "Call", "Driver", "Once", "Stepped", "recv_enough", "require_idle", "require_no_step",
]  # fmt: skip

Stepped: TypeAlias = tuple[Any, Any, Any, Any, dict[str, Any]]
"""What ``step`` returns."""

After: TypeAlias = tuple[Any, int, int]
"""How it is to be once an answer was taken: :attr:`Driver.taken`, and how many steps and resets it was."""


class Call(NamedTuple):
    """What is owed: a reset or a step, of how many rows, to be answered by ``recv`` only or not."""

    kind: Phase
    rows: int
    by_row: bool


NOTHING: Final = Call(Phase.DEFAULT, 0, by_row=True)
"""Nothing is owed."""


class Driver(Protocol):
    """What an engine does that is no worker processes.

    An exception may come out of any line, a Ctrl-C or a time limit. So what a call changes in a driver is put in place by
    one store, or by C code in one instruction: before it nothing has happened, afterwards the answer is owed. Reading an
    answer changes nothing: it can be asked for again until the guard puts :attr:`after` in place.

    Attributes:
        capabilities: What it can do.
        batch_size: Rows of :meth:`recv`.
        name: The class of the vector environment, for refusals; set by it.
        owed: What is in flight. Looking at it changes nothing: another thread may do it.
        taken: What has been taken of what was asked: one object, which only the guard and the driver replace.
        after: Of the answer that :meth:`answer` or :meth:`recv` gave last; the guard clears it.
        failure: The exception that is the answer, where one is.
        waited: Seconds spent waiting.
        yields: Another thread may close it in the middle of a call.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def waited(self) -> float: ...

    @property
    def owed(self) -> Call: ...

    batch_size: int
    name: str
    taken: Any
    after: After | None
    failure: BaseException | None
    yields: bool

    def reset(
        self, seeds: list[Any], ids: npt.NDArray[np.intp] | None, options: ResetOptions, *, by_row: bool
    ) -> None:
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
            kind: Which of the two is owed, not by row.
            deadline: Of ``time.monotonic()``.

        Returns:
            ``None`` where it is not there by then.
        """

    def recv(self, count: int | None, deadline: float | None) -> Stepped | None:
        """The next ``count`` rows (``None``: as many as is usual), as :meth:`answer`.

        Raises:
            NoAsyncCallError: Not so many are in flight.
            AlreadyPendingCallError: A step that is not by row is owed.
            NotImplementedError: Only all of them are answered.
        """

    def close(self, *, terminate: bool = False) -> None:
        """Let go of everything. Idempotent."""


def require_idle(owed: Call, method: str) -> None:
    """Refuse a method of all environments while anything is owed of all of them."""
    if owed.rows and owed.by_row:
        raise AlreadyPendingCallError(
            f"Calling `{method}` for envs 0..{owed.rows - 1}, which are still in flight: `recv` them first.", "send"
        )
    if owed.rows:
        raise AlreadyPendingCallError(still_owed(method, owed.kind), owed.kind.value)


def require_no_step(owed: Call) -> None:
    """Refuse ``recv`` while a step is owed that ``step_wait`` fetches."""
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
