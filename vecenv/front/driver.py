"""What steps environments, whatever it is: the seam under :mod:`vecenv.front.vector_env`.

The vector environment has the interface, a driver has the environments: worker processes or hosts
(:mod:`vecenv.engine.engine`), EnvPool's threads, a device, a library of its own.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from enum import Enum
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError

from vecenv.errors import StepTimeout
from vecenv.front.arguments import ResetOptions, env_ids_of, seconds_of
from vecenv.front.capabilities import Capabilities, figures, unable
from vecenv.system.uninterrupted import Noted, by_handler

# -- which methods may be called ---------------------------------------------------------------------------------------
#
# One table, :data:`NEXT`: method -> the phase it needs and the next. Everything else is an illegal call, raised in one place
# (:func:`advance`) with Gymnasium's classes and texts.

R = TypeVar("R")


class Phase(Enum):
    """What the vector environment is in the middle of; the values are Gymnasium's ``AsyncState`` values."""

    DEFAULT = "default"
    WAITING_RESET = "reset"
    WAITING_STEP = "step"
    WAITING_CALL = "call"
    CLOSED = "closed"


NEXT: Final[dict[str, tuple[Phase, Phase]]] = {
    "reset_async": (Phase.DEFAULT, Phase.WAITING_RESET),
    "step_async": (Phase.DEFAULT, Phase.WAITING_STEP),
    "call_async": (Phase.DEFAULT, Phase.WAITING_CALL),
    "set_attr": (Phase.DEFAULT, Phase.WAITING_CALL),
    "set_next_options": (Phase.DEFAULT, Phase.WAITING_CALL),
    "reset_wait": (Phase.WAITING_RESET, Phase.DEFAULT),
    "step_wait": (Phase.WAITING_STEP, Phase.DEFAULT),
    "call_wait": (Phase.WAITING_CALL, Phase.DEFAULT),
}


def advance(phase: Phase, method: str, owner: object, name: str = "") -> Phase:
    """The phase after ``method``, or Gymnasium's error for a call that is out of order.

    Args:
        phase: The phase now.
        method: One of the names in :data:`NEXT`.
        owner: Whose phase it is; the name of its class stands in the message after ``close()``.
        name: What was called, where that has another name (``save``).

    Raises:
        ClosedEnvironmentError: After ``close()``.
        AlreadyPendingCallError: A new request while a call is pending.
        NoAsyncCallError: Waiting for an answer that was never asked for.
    """
    before, after = NEXT[method]
    if phase is before:
        return after
    if phase is Phase.CLOSED:
        raise ClosedEnvironmentError(f"Trying to operate on `{type(owner).__name__}`, after a call to `close()`.")
    verb, _, kind = method.partition("_")
    if kind == "wait":
        raise NoAsyncCallError(f"Calling `{method}` without any prior call to `{verb}_async`.", verb)
    raise AlreadyPendingCallError(still_pending(name or method, phase), phase.value)


def still_pending(name: str, phase: Phase) -> str:
    """Why a method has to wait; where Gymnasium has it too, in Gymnasium's own words, which differ by a full stop."""
    end = "" if name == "reset_async" else "." if name in NEXT else f": call `{phase.value}_wait()` first."
    return f"Calling `{name}` while waiting for a pending call to `{phase.value}` to complete{end}"


def dropping_pending(envs: Any, begin: Callable[[], R]) -> R:
    """``begin()``, a reset of all environments; the answer to a call that is still pending is fetched and dropped.

    A step that timed out, or was interrupted by Ctrl-C, is still pending. Interfaces of other libraries have no method
    that fetches it, so without this every later reset would be refused.

    Raises:
        StepTimeout: The pending answer is still not there; it stays pending.
        Exception: Of ``begin``.
    """
    try:
        return begin()
    except AlreadyPendingCallError as error:
        kind = error.name
    inner = getattr(envs, "unwrapped", envs)  # vector wrappers have no such methods
    wait = getattr(inner, f"{kind}_wait" if kind in ("reset", "step", "call") else "recv")
    with Noted():
        try:
            wait()
        except StepTimeout:
            raise
        except Exception as error:  # the dropped answer itself; `errors` has it
            if by_handler(error):
                raise
    return begin()


Stepped: TypeAlias = tuple[Any, Any, Any, Any, dict[str, Any]]
"""What ``step`` returns."""


class Call(NamedTuple):
    """What is pending: a reset or a step, of how many rows, to be answered by ``recv`` only or not."""

    kind: Phase
    rows: int
    by_row: bool


NOTHING: Final = Call(Phase.DEFAULT, 0, by_row=True)
"""Nothing is pending."""


left_in_a_fork: weakref.WeakSet[Any] = weakref.WeakSet()
"""Everything whose ``abandon()`` is called in a process that is forked from this one."""


def _abandon_all() -> None:
    for owned in list(left_in_a_fork):
        owned.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)


class Driver:
    """Steps environments under a vector environment, and keeps the state of the call in progress for the guard.

    Until an answer was handed over its call is pending: reading an answer changes nothing, and can be repeated. What a call
    changes it puts in place by one store, or by C code in one instruction: before it nothing has happened, afterwards the
    answer is pending.

    Attributes:
        capabilities: What it can do.
        why_not: Capability -> why there is none.
        num_envs: Number of environments.
        batch_size: Rows that :meth:`recv` gives by default.
        copies: Each answer has observations of its own.
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

    why_not: ClassVar[Mapping[str, str]] = {
        "attributes": "its environments are no Python objects",
        "snapshots": "its environments are a library's own, which does not give their state away",
        "workers": "its environments are stepped by no worker processes",
        "freezing": "its environments are stepped by no worker processes",
        "recording": "what its environments were asked is not recorded",
    }
    name = ""
    own_means = "its threads"
    copies = True
    yields = True
    caller = 0
    barred = ""
    last_call_ended = True
    pending: Any = (None, 0, 0)
    next_pending: Any = None
    pending_error: BaseException | None = None
    num_envs: int
    batch_size: int
    _last_figures: dict[str, float] | None = None

    def open(self, name: str) -> None:
        """From now on this process may call, as the vector environment of this name does."""
        self.name, self.owner, self.began = name, os.getpid(), time.monotonic()
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

    @property
    def capabilities(self) -> Capabilities:
        raise NotImplementedError

    def reason(self, capability: str) -> str:
        """Why there is no such capability."""
        return self.why_not[capability]

    @property
    def waited(self) -> float:
        raise NotImplementedError

    @property
    def outstanding(self) -> Call:
        """What is in flight. Looking at it changes nothing: another thread may do it."""
        raise NotImplementedError

    @property
    def phase(self) -> Phase:
        """What is pending of all environments; rows that :meth:`recv` gives do not count."""
        call = self.outstanding
        return Phase.DEFAULT if call.by_row else call.kind

    @property
    def in_flight(self) -> npt.NDArray[np.intp]:
        """The environments whose rows ``recv`` has still to give, in no order."""
        call = self.outstanding
        if call.by_row and 0 < call.rows < self.num_envs:
            unable(self.name, "`in_flight`", f"its library tells only that {call.rows} are, as stats() does")
        return np.arange(call.rows if call.by_row else 0, dtype=np.intp)

    def require_idle(self, method: str) -> None:
        """Refuse a method of all environments while anything is pending.

        Raises:
            AlreadyPendingCallError: Something is.
        """
        require_idle(self.outstanding, method)

    # -- what a subclass says of an answer, in place of `next_pending` as a whole -------------------------------------

    @property
    def taken(self) -> Any:
        """What was taken last."""
        return self.pending[0]

    @taken.setter
    def taken(self, taken: Any) -> None:
        self.pending = taken, *self.pending[1:]

    def gives(self, taken: Any, steps: int, resets: int) -> None:
        """The answer that is being given is what will be taken last, of that many steps and resets."""
        _, all_steps, all_resets = self.pending
        self.next_pending = taken, all_steps + steps, all_resets + resets

    # -- calls ----------------------------------------------------------------------------------------------------------

    def reset(self, seeds: list[Any], ids: npt.NDArray[np.intp] | None, options: ResetOptions, *, by_row: bool) -> None:
        """Begin to reset these rows (``None``: all); checks first, and raises before anything is asked.

        Args:
            seeds: One or ``None`` for every environment, of which only those of ``ids`` count.
            ids: Distinct and in range.
            options: Others than ``reset_mask``; a list has an entry for every environment.
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
            deadline: Of ``time.monotonic()``; ``None``: as long as it takes, or as the driver's own options say.

        Returns:
            ``None`` where it is not there by then.
        """

    def recv(self, count: int | None, deadline: float | None) -> Stepped | None:
        """The next ``count`` rows (``None``: :attr:`batch_size`), as :meth:`answer`.

        Raises:
            NoAsyncCallError: Not that many are in flight.
            AlreadyPendingCallError: A step that is not by row is pending.
            NotImplementedError: Only all of them are answered.
        """

    def recv_enough(self, count: int | None, deadline: float | None, least: int, moment: float) -> Stepped | None:
        """The next ``count`` rows; or fewer, but ``least`` of them, from a moment of ``time.monotonic()`` on.

        An answer that is read changes nothing, so this asks for ever fewer until there are that many.

        Raises:
            NotImplementedError: Rows are not done one by one here.
        """
        if not self.capabilities.first_ready:
            unable(self.name, f"recv at least {least} environments", "all of them are done at the same time")
        many = max(min(self.batch_size if count is None else count, self.outstanding.rows), least)
        until = moment if deadline is None else min(moment, deadline)
        answer = self._recv_some(many, None if until == math.inf else until)
        for fewer in range(many - 1, least - 1, -1):
            if answer is not None:
                break
            answer = self._recv_some(fewer, until)
        return answer or self.recv(least, deadline)

    def _recv_some(self, count: int, deadline: float | None) -> Stepped | None:
        """That many rows; ``None``, too, where there will never be that many without others being sent to."""
        try:
            return self.recv(count, deadline)
        except NoAsyncCallError:
            return None

    def too_late(self, method: str, timeout: Any) -> StepTimeout:
        """The exception of a call that was not answered in time."""
        seconds = seconds_of(timeout)
        return StepTimeout(
            f"The call to `{method}` has timed out after {seconds} second(s)."
            f"{self._lateness(seconds)}\nThe answer is still pending: call `{method}` again, or `close()`."
        )

    def _lateness(self, seconds: float | None) -> str:
        """What is known of what is late after that many seconds, in lines of its own."""
        return ""

    # -- figures and the end --------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Figures since the start; see :meth:`vecenv.AsyncVectorEnv.stats`. After the end they stay as they were."""
        return self._figures() if self._last_figures is None else dict(self._last_figures)

    def keep_figures(self) -> None:
        """The end is near: from here on the figures stay as they are."""
        self._last_figures = self.stats()

    def _figures(self) -> dict[str, float]:
        elapsed = max(time.monotonic() - self.began, 1e-9)
        _, steps, resets = self.pending
        return figures({
            "steps": float(steps),
            "steps_per_second": steps / elapsed,
            "wait_fraction": self.waited / elapsed,
            "resets": float(resets),
            "restarts": 0.0,
            "errors": 0.0,
            "bytes_pickled": 0.0,
            "in_flight": float(self.outstanding.rows),
        })  # fmt: skip

    def close(self, *, terminate: bool = False) -> None:
        """Let go of everything. Idempotent."""


def require_idle(outstanding: Call, method: str) -> None:
    """Refuse a method of all environments while anything is pending of any of them."""
    if outstanding.rows and outstanding.by_row:
        raise AlreadyPendingCallError(
            f"Calling `{method}` for envs 0..{outstanding.rows - 1}, which are still in flight: `recv` them first.", "send"
        )
    if outstanding.rows:
        raise AlreadyPendingCallError(still_pending(method, outstanding.kind), outstanding.kind.value)


def require_no_step(outstanding: Call) -> None:
    """Refuse ``recv`` while a step is pending that ``step_wait`` fetches."""
    if outstanding.kind is Phase.WAITING_STEP and not outstanding.by_row:
        raise AlreadyPendingCallError(
            "Calling `recv` while waiting for a pending call to `step` to complete: `step_wait` fetches it.", "step"
        )


class LockstepDriver(Driver):
    """Drives environments that step together: each call has one answer, about all of them.

    JAX on a device, a library's own vector environment, the double of :mod:`vecenv.testing`. What is left to a subclass:
    :attr:`capabilities`, ``close``, and the five below.

    Attributes:
        asked: The call that was made last; ``None`` before the first one. It is part of one object with all that the call
            has changed. Another one than ``taken`` is pending.
        why: The reason why a call is about all environments or none.
    """

    def __init__(self, num_envs: int) -> None:
        self.num_envs = self.batch_size = num_envs
        self.why = "they step together"
        self._waited = 0.0

    @property
    @abstractmethod
    def asked(self) -> Call | None: ...

    @abstractmethod
    def begin_reset(self, call: Call, seeds: list[Any], mask: npt.NDArray[np.bool_] | None, options: ResetOptions) -> None:
        """Begin to reset the rows of ``mask`` (``None``: all); checks first, and raises before anything is asked."""

    @abstractmethod
    def begin_step(self, call: Call, actions: Any) -> None:
        """Begin a step; checks first, and raises before anything is asked."""

    @abstractmethod
    def wait(self, deadline: float) -> bool:
        """Wait for the answer until ``deadline`` (monotonic); whether it is there."""

    @abstractmethod
    def read(self, kind: Phase) -> Stepped:
        """The answer to a step, or to a reset, whose rewards are 0 and flags ``False``. It can be called again."""

    @property
    def waited(self) -> float:
        return self._waited

    @property
    def outstanding(self) -> Call:
        asked = self.asked
        return NOTHING if asked is None or asked is self.taken else asked

    def reset(self, seeds: list[Any], ids: npt.NDArray[np.intp] | None, options: ResetOptions, *, by_row: bool) -> None:
        if by_row:
            self._require_all(ids, "reset_async")
            require_idle(self.outstanding, "reset_async")
            ids = None
        rows = self.batch_size if ids is None else len(ids)
        if rows < self.batch_size and not self.capabilities.reset_mask:
            unable(self.name, f"reset {rows} of {self.batch_size} environments", self.why)
        mask = None if ids is None else np.isin(np.arange(self.batch_size), ids)
        self.begin_reset(Call(Phase.WAITING_RESET, rows, by_row), seeds, mask, options)

    def step(self, actions: Any) -> None:
        require_idle(self.outstanding, "step_async")
        self.begin_step(Call(Phase.WAITING_STEP, self.batch_size, by_row=False), actions)

    def send(self, actions: Any, env_id: Any) -> None:
        if env_id is not None:
            self._require_all(env_ids_of(env_id, self.batch_size), "send")
        require_idle(self.outstanding, "send")
        self.begin_step(Call(Phase.WAITING_STEP, self.batch_size, by_row=True), actions)

    def answer(self, kind: Phase, deadline: float | None) -> Stepped | None:
        call = self.outstanding
        if deadline is not None and not self.wait(deadline):
            return None
        steps = call.rows if call.kind is Phase.WAITING_STEP else 0
        self.gives(call, steps, call.rows - steps)
        return self.read(call.kind)

    def recv(self, count: int | None, deadline: float | None) -> Stepped | None:
        total, outstanding = self.batch_size, self.outstanding
        if count not in (None, total):
            unable(self.name, f"recv {count} of {total} environments", "all of them are done at the same time")
        require_no_step(outstanding)
        if outstanding.rows < total:
            raise NoAsyncCallError(
                f"Calling `recv` for {total} environments, but only {outstanding.rows} are in flight and 0 are ready: "
                "send() more first.",
                "recv",
            )
        stepped = self.answer(outstanding.kind, deadline)
        if stepped is not None:
            stepped[4].update(env_id=np.arange(total, dtype=np.intp), _env_id=np.ones(total, np.bool_))
        return stepped

    def _require_all(self, ids: npt.NDArray[np.intp] | None, method: str) -> None:
        if not np.array_equal(ids, np.arange(self.batch_size)):  # type: ignore[arg-type]
            unable(self.name, f"{method} to some environments", f"{self.why}: name all of them, in order, or none")


class RunOnce:
    """Runs a function once, however often it is started, and keeps what it returned or raised.

    So a driver that was interrupted while it started a thread can start it again.

    Attributes:
        future: The answer, of a thread.
        failure: The exception that is the answer.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self.failure: BaseException | None = None
        self._function, self._begun = function, threading.Lock()
        self._returned: Any = None

    def __call__(self) -> None:
        """Run it, in a thread."""
        if self._begun.acquire(blocking=False):
            try:
                self.future.set_result(self._function())
            except BaseException as error:
                self.failure = error
                self.future.set_exception(error)

    def here(self) -> Any:
        """Run it in the caller's own thread. What interrupts is no answer, and it is to be run again."""
        if self._returned is None:
            try:
                self._returned = self._function()
            except Exception as error:
                self.failure = error
                raise
        return self._returned
