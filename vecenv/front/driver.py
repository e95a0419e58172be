"""The interface between a vector environment (:mod:`vecenv.front.vector_env`) and a backend.

The vector environment has Gymnasium's methods. A driver runs the environments: in worker processes
(:mod:`vecenv.engine.process_engine`), on Ray's hosts, in EnvPool's threads, on a device, or in a library's own vector
environment.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError

from vecenv.errors import StepTimeout, envs_text, failed_earlier_error
from vecenv.front.arguments import ResetOptions, parse_env_ids, parse_timeout, select_options
from vecenv.front.capabilities import Capabilities, complete_stats, raise_unsupported
from vecenv.front.guard import CallState, closed_error
from vecenv.front.infos import RowInfos
from vecenv.system.signals import raised_by_handler, watched_handlers

# -- the order of calls ------------------------------------------------------------------------------------------------
#
# :data:`REQUIRED_PHASES` has the phase that each method requires. In any other phase, :func:`require_order` raises
# Gymnasium's error with Gymnasium's text.

R = TypeVar("R")


class Phase(Enum):
    """The pending operation of a vector environment, with the values of Gymnasium's ``AsyncState``, or ``CLOSED``."""

    DEFAULT = "default"
    WAITING_RESET = "reset"
    WAITING_STEP = "step"
    WAITING_CALL = "call"
    CLOSED = "closed"


REQUIRED_PHASES: Final[dict[str, Phase]] = {
    "reset_async": Phase.DEFAULT,
    "step_async": Phase.DEFAULT,
    "call_async": Phase.DEFAULT,
    "set_attr": Phase.DEFAULT,
    "set_next_options": Phase.DEFAULT,
    "reset_wait": Phase.WAITING_RESET,
    "step_wait": Phase.WAITING_STEP,
    "call_wait": Phase.WAITING_CALL,
}
"""Method -> the phase that it requires."""

PHASES: Final = {"step": Phase.WAITING_STEP, "reset": Phase.WAITING_RESET}
"""Command of a request -> the phase while it is pending. For all other commands, it is ``WAITING_CALL``."""

_FETCH_METHODS: Final = {"exec_func": "exec_func_fetch", "set_attr": "set_attr", "set_next_options": "set_next_options"}


def wait_method(command: str) -> str:
    """Return the name of the method that fetches the result of a request."""
    return _FETCH_METHODS.get(command, f"{command}_wait")


def require_order(phase: Phase, method: str, owner: object) -> None:
    """Raise Gymnasium's error for a call that is out of order.

    Args:
        phase: The current phase.
        method: One of the names in :data:`REQUIRED_PHASES`.
        owner: The vector environment. The message after ``close()`` names its class.

    Raises:
        ClosedEnvironmentError: After ``close()``.
        AlreadyPendingCallError: A new request while a call is pending.
        NoAsyncCallError: A wait for the result of a call that is not pending.
    """
    if phase is REQUIRED_PHASES[method]:
        return
    if phase is Phase.CLOSED:
        raise closed_error(f"`{type(owner).__name__}`")
    verb, _, kind = method.partition("_")
    if kind == "wait":
        raise NoAsyncCallError(f"Calling `{method}` without any prior call to `{verb}_async`.", verb)
    raise pending_call_error(method, phase)


def pending_call_error(name: str, phase: Phase) -> AlreadyPendingCallError:
    """Return the exception for a method called during a pending call.

    Gymnasium's methods have Gymnasium's texts; the text of ``reset_async`` ends without a full stop.
    """
    advice = f"call `{phase.value}_wait()` first."
    end = "" if name == "reset_async" else "." if name in REQUIRED_PHASES else f": {advice}"
    text = f"Calling `{name}` while waiting for a pending call to `{phase.value}` to complete{end}"
    error = AlreadyPendingCallError(text, phase.value)
    if name in REQUIRED_PHASES:
        error.add_note(advice)
    return error


def drop_pending_and_retry(envs: Any, begin: Callable[[], R]) -> R:
    """Call ``begin``, a reset of all environments. If a call is pending, fetch and drop its result, then try again.

    A step that timed out is still pending, and so is one that was interrupted before the wait for its result. Other
    libraries' interfaces have no method that fetches its result, so every later reset would otherwise raise.

    Raises:
        StepTimeout: The pending result has still not arrived; it stays pending.
        Exception: An error raised by ``begin``.
    """
    try:
        return begin()
    except AlreadyPendingCallError as error:
        kind = error.name
    inner = getattr(envs, "unwrapped", envs)  # wrappers have no `step_wait` or `recv`
    wait = getattr(inner, f"{kind}_wait" if kind in ("reset", "step", "call") else "recv")
    with watched_handlers():
        try:
            wait()
        except StepTimeout:
            raise
        except Exception as error:  # the result is an error, which is dropped too
            if raised_by_handler(error):
                raise
    return begin()


Stepped: TypeAlias = tuple[Any, Any, Any, Any, RowInfos | dict[Any, Any]]
"""A driver's result: the five values of ``step``. The infos are not merged yet, or are a library's own dict of arrays."""


class RequestSummary(NamedTuple):
    """A pending reset or step: its phase, its number of rows, and True if only ``recv`` can fetch its results."""

    phase: Phase
    rows: int
    for_recv: bool


NO_REQUEST: Final = RequestSummary(Phase.DEFAULT, 0, for_recv=True)
"""The absence of a pending request."""


closed_in_child: weakref.WeakSet[Any] = weakref.WeakSet()
"""The objects on which every forked child of this process calls ``close_in_child()``."""


def _close_all_in_child() -> None:
    for item in list(closed_in_child):
        item.close_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all_in_child)


@dataclass(slots=True)
class Counters:
    """Counts of environment steps and resets, increased when their results are returned.

    Attributes:
        steps, resets: The counts.
        steps_loaded: The part of ``steps`` that comes from loaded states.
    """

    steps: int = 0
    resets: int = 0
    steps_loaded: int = 0

    @property
    def own_steps(self) -> int:
        """The steps that were made here, without those of loaded states."""
        return self.steps - self.steps_loaded

    def load(self, steps: int, resets: int) -> None:
        """Continue from the counts of a loaded state."""
        self.steps_loaded += steps - self.steps
        self.steps, self.resets = steps, resets


class Driver:
    """The interface of backends.

    A request is pending until its result has been returned. A driver changes its state by a single store, or by several
    while ``state.changing`` is set. Meanwhile it never waits for a reply, but it may step environments of this process. For
    the change that returns a result, drivers without workers set ``changing`` by :meth:`finish`, others set it themselves;
    the guard clears it. See :mod:`vecenv.front.guard`.

    If a call raises, its result stays pending, except in two cases. The call has ended if it raises ``result_error`` or, in
    drivers with workers, an environment's error. An interruption of the change that returns the result loses it, and then
    a reset is needed.

    Attributes:
        capabilities: The backend's capabilities.
        missing_reasons: Capability -> reason why it is missing.
        num_envs: Number of environments.
        batch_size: Default number of rows that :meth:`recv` returns.
        copies: True if each result has its own observations.
        name: The class name of the vector environment, for error texts.
        owned_resource: The resources that a forked child lacks, for error texts.
        can_be_closed_during_call: True if another thread may close the driver in the middle of a call.
        seconds_waited: Seconds spent waiting.
        began: ``time.monotonic()`` when the driver began to admit calls.
        state: The state shared with the guard, which decides whether a call can begin.
        counters: The numbers of steps and resets that were returned.
        result_error: The exception that is the result of the current call, such as an ``InfoError``. The guard treats it
            like a returned result.
        is_interrupted: True if an exception interrupted the wait for the pending request; a reset of all environments may
            drop it.
    """

    missing_reasons: ClassVar[Mapping[str, str]] = {
        "attributes": "its environments are not Python objects",
        "snapshots": "its environments are a library's own, which does not expose their state",
        "workers": "it has no worker processes",
        "freezing": "it has no worker processes",
        "recording": "calls of its environments are not recorded",
    }
    name = ""
    owned_resource = "its threads"
    copies = True
    can_be_closed_during_call = True
    began = 0.0
    result_error: BaseException | None = None
    num_envs: int
    batch_size: int
    _frozen_stats: dict[str, float] | None = None
    _interrupted = False

    def __init__(self) -> None:
        self.state, self.counters = CallState(), Counters()

    def open(self, name: str) -> None:
        """Admit calls from this process. ``name`` is the class name of the vector environment."""
        self.name, self.state.owner_pid, self.began = name, os.getpid(), time.monotonic()
        closed_in_child.add(self)

    def release(self) -> None:
        """Release the resources that a call was still using when the driver was closed. Idempotent."""
        self.close()

    def close_in_child(self) -> None:
        """Refuse all calls, in a forked child."""
        self.state.unusable = "forked"

    def record_interruption(self) -> None:
        """Record that an exception has interrupted the wait for the pending request, if there is one."""
        self._interrupted = self.pending_request.rows > 0

    @property
    def is_interrupted(self) -> bool:
        return self._interrupted

    def finish(self, returned: Any, steps: int, resets: int) -> None:
        """Mark the request as returned, and count its steps and resets. The guard ends this change of state."""
        self.state.changing = True
        self.returned = returned
        self._interrupted = False
        self.counters.steps += steps
        self.counters.resets += resets

    @property
    def capabilities(self) -> Capabilities:
        raise NotImplementedError

    def reason(self, capability: str) -> str:
        """Return the reason why a capability is missing."""
        return self.missing_reasons[capability]

    @property
    def seconds_waited(self) -> float:
        raise NotImplementedError

    @property
    def pending_request(self) -> RequestSummary:
        """The pending request. Reading it changes nothing, so other threads may read it."""
        raise NotImplementedError

    @property
    def phase(self) -> Phase:
        """The pending operation, not counting a request with results for :meth:`recv`."""
        request = self.pending_request
        return Phase.DEFAULT if request.for_recv or self.state.changing else request.phase

    @property
    def in_flight(self) -> npt.NDArray[np.intp]:
        """The rows that ``recv`` has yet to return, in no particular order."""
        request = self.pending_request
        if request.for_recv and 0 < request.rows < self.num_envs:
            raise_unsupported(self.name, "`in_flight`", f"its library reports only their number, {request.rows}")
        return np.arange(request.rows if request.for_recv else 0, dtype=np.intp)

    def require_idle(self, method: str, rows: Collection[int] | None = None) -> None:
        """Raise if a pending call forbids a method for ``rows`` (``None``: all). By default, every pending call does.

        Raises:
            AlreadyPendingCallError: There is such a call.
        """
        request = self.pending_request
        if request.rows and request.for_recv:
            raise AlreadyPendingCallError(
                f"Calling `{method}` while {request.rows} environments are in flight: call `recv` first.", "send"
            )
        if request.rows:
            raise pending_call_error(method, request.phase)

    # -- calls ----------------------------------------------------------------------------------------------------------

    def submit_reset(
        self, seeds: list[Any], ids: npt.NDArray[np.intp] | None, options: ResetOptions, *, for_recv: bool
    ) -> None:
        """Begin to reset the rows ``ids`` (``None``: all). Invalid arguments raise before any request is submitted.

        Args:
            seeds: A seed or ``None`` for every environment; only those of ``ids`` are used.
            ids: Distinct indices in range.
            options: Options other than ``reset_mask``; a list has an entry for every environment.
            for_recv: True if only :meth:`recv` can fetch the results.
        """

    def submit_step(self, actions: Any) -> None:
        """Begin a step of all rows. Invalid actions raise before any request is submitted."""

    def send(self, actions: Any, env_id: Any) -> None:
        """Begin a step of some rows (``None``: those of the latest :meth:`recv`), to be fetched with :meth:`recv`."""

    def wait_for_result(self, deadline: float | None) -> Stepped | None:
        """Wait for the result of the pending step or reset. For a reset, only observations and infos are valid.

        Args:
            deadline: A ``time.monotonic()`` value; ``None``: no limit except those set by the driver's options.

        Returns:
            The result, or ``None`` if it has not arrived by the deadline.
        """

    def recv(self, count: int | None, deadline: float | None) -> Stepped | None:
        """Wait for the next ``count`` rows (``None``: :attr:`batch_size`) until ``deadline``, like :meth:`wait_for_result`.

        Raises:
            NoAsyncCallError: Fewer rows are in flight.
            AlreadyPendingCallError: A step or a call is pending, and only another method can fetch its result.
            NotImplementedError: The backend can only return all rows together.
        """

    def recv_enough(self, count: int | None, deadline: float | None, enough: int, enough_from: float) -> Stepped | None:
        """Wait for the next ``count`` rows; from ``enough_from`` (``time.monotonic()``) on, ``enough`` of them suffice.

        A wait that times out changes nothing, so decreasing numbers are tried until that many rows are ready. The process
        engine and Ray's driver override this.

        Raises:
            NotImplementedError: The backend does not finish rows one by one.
        """
        if not self.capabilities.first_ready:
            raise_unsupported(self.name, f"recv at least {enough} environments", "all of them finish at the same time")
        wanted = max(min(self.batch_size if count is None else count, self.pending_request.rows), enough)
        until = enough_from if deadline is None else min(enough_from, deadline)
        for number in range(wanted, enough - 1, -1):
            stepped = self._recv_some(number, None if until == math.inf else until)
            if stepped is not None:
                return stepped
        return self.recv(enough, deadline)

    def _recv_some(self, count: int, deadline: float | None) -> Stepped | None:
        """Return ``count`` rows, or ``None`` if they are not ready by the deadline or fewer are in flight."""
        try:
            return self.recv(count, deadline)
        except NoAsyncCallError:
            return None

    def timeout_error(self, method: str, timeout: Any) -> StepTimeout:
        """Return the exception for a call that has timed out, with a description of the late replies."""
        seconds = parse_timeout(timeout)
        return step_timeout_error(method, seconds, self._describe_late(seconds))

    def _describe_late(self, seconds: float | None) -> LateReplies:
        """Describe the replies that are late after this many seconds."""
        return LateReplies("", [], {})

    # -- statistics and shutdown ----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Return statistics since the start; see :meth:`vecenv.AsyncVectorEnv.stats`. After closing they stay unchanged."""
        return self._compute_stats() if self._frozen_stats is None else dict(self._frozen_stats)

    def freeze_stats(self) -> None:
        """Keep the current statistics for use after closing."""
        self._frozen_stats = self.stats()

    def _compute_stats(self) -> dict[str, float]:
        elapsed = max(time.monotonic() - self.began, 1e-9)
        steps = self.counters.steps
        return complete_stats({
            "steps": float(steps),
            "steps_per_second": self.counters.own_steps / elapsed,
            "seconds": elapsed,
            "wait_fraction": self.seconds_waited / elapsed,
            "resets": float(self.counters.resets),
            "restarts": 0.0,
            "errors": 0.0,
            "bytes_pickled": 0.0,
            "in_flight": float(self.pending_request.rows),
        })  # fmt: skip

    def close(self, *, terminate: bool = False) -> None:
        """Release all resources. Idempotent."""


class LateReplies(NamedTuple):
    """The replies for which a call waited too long: a text about them, their rows, and :attr:`StepTimeout.where`."""

    text: str
    rows: list[int]
    where: Mapping[int, str]


def step_timeout_error(method: str, seconds: float | None, late: LateReplies) -> StepTimeout:
    """Return the exception for a call that has timed out."""
    abandon = "`abandon(error.envs)`, " if late.rows else ""
    return StepTimeout(
        f"The call to `{method}` has timed out after {seconds} second(s)."  # Gymnasium's text
        f"{late.text}\nThe result is still pending: call `{method}` again, {abandon}or `close()`.",
        timeout=seconds,
        envs=late.rows,
        where=late.where,
    )


def too_few_in_flight_error(count: int, in_flight: int, ready: int) -> NoAsyncCallError:
    """Return the exception for a ``recv`` that would wait forever: of the rows in flight, ``ready`` have finished."""
    return NoAsyncCallError(
        f"Calling `recv` for {count} environments, but only {in_flight - ready} are in flight and {ready} are ready: "
        f"{'send() more' if in_flight else 'reset_async() or send()'} first.",
        "recv",
    )


def still_in_flight_error(method: str, rows: Sequence[int]) -> AlreadyPendingCallError:
    """Return the exception for a method called for rows of which ``rows`` are still in flight."""
    return AlreadyPendingCallError(f"Calling `{method}` for {envs_text(rows)}, still in flight: call `recv` first.", "send")


def require_pending_reset(request: Any, count: int) -> None:
    """Raise for ``recv`` if a request other than a reset is pending, or a reset of fewer than ``count`` rows."""
    if request.command != "reset":
        require_no_step(request.phase)
        raise pending_call_error("recv", request.phase)
    if len(request.rows) < count:
        raise too_few_in_flight_error(count, len(request.rows), 0)


def require_no_step(phase: Phase) -> None:
    """Raise for ``recv`` while a step is pending that only ``step_wait`` can fetch."""
    if phase is Phase.WAITING_STEP:
        raise AlreadyPendingCallError(
            "Calling `recv` while waiting for a pending call to `step` to complete: `step_wait` fetches it.", "step"
        )


class WorkerDriver(Driver):
    """A driver that exchanges requests and replies with workers, on this machine or on others.

    Attributes:
        exchange: The exchange of messages. Its ``request`` is the pending request that returns all its rows together, or
            ``None``. Its ``in_flight`` has the rows that ``recv`` has yet to return.
        failure_log: The log of failures, with ``errors``, ``failed`` and ``restarts``.
        store: The latest observations.
        observers: The observers to notify of calls, results and failures.
        last_received: The rows of the latest result, in its order: those that ``send`` steps by default.
        stage: The staging area for actions.
        restarts_rows: True if the next step rebuilds failed environments; otherwise it raises.
    """

    missing_reasons: ClassVar[Mapping[str, str]] = {**Driver.missing_reasons, "recording": "record_failures= was not given"}
    exchange: Any
    failure_log: Any
    store: Any
    observers: list[Any]
    last_received: npt.NDArray[np.intp]
    stage: Any
    restarts_rows: bool

    @property
    def phase(self) -> Phase:
        """The pending operation, not counting calls that may be dropped and rows that ``recv`` returns."""
        request = self.exchange.request
        # `changing` even during a call: the `reset()` that ends an interrupted change reads the phase itself
        return Phase.DEFAULT if request is None or request.droppable or self.state.changing else request.phase

    @property
    def pending_request(self) -> RequestSummary:
        if self.state.changing and not self.state.active_thread:
            return NO_REQUEST  # an exception interrupted a change: the reset that is needed drops everything
        request = self.exchange.request
        if request is not None and request.command in PHASES:
            rows = self.num_envs if request.rows is None else len(request.rows)
            return RequestSummary(request.phase, rows, for_recv=False)
        return RequestSummary(Phase.DEFAULT, len(self.exchange.in_flight), for_recv=True)

    @property
    def in_flight(self) -> npt.NDArray[np.intp]:
        """The rows that ``recv`` has yet to return, in order; empty if a reset is needed, which drops them."""
        is_dropped = self.state.changing and not self.state.active_thread
        return np.array([] if is_dropped else sorted(self.exchange.in_flight), np.intp)

    @property
    def is_interrupted(self) -> bool:
        return self.exchange.request is not None and self.exchange.request.interrupted

    def record_interruption(self) -> None:
        if self.exchange.request is not None:
            self.exchange.request.interrupted = True

    def require_idle(self, method: str, rows: Collection[int] | None = None) -> None:
        """Drop a call that an interrupted method left behind; then raise if a request is pending.

        Also raise if one of ``rows`` (``None``: all) is in flight.
        """
        exchange = self.exchange
        if exchange.request is not None and not exchange.drop_if_droppable():
            raise pending_call_error(method, exchange.request.phase)
        if rows is not None and len(rows) < self.num_envs:
            self.require_not_in_flight(method, list(rows))
        elif in_flight := len(exchange.in_flight):
            ready = len(exchange.ready)
            raise AlreadyPendingCallError(
                f"Calling `{method}` while {in_flight - ready} environments are in flight by `send` and {ready} are ready "
                "for `recv`.",
                "send",
            )

    def require_not_in_flight(self, method: str, rows: Sequence[int]) -> None:
        """Raise for rows that ``recv`` has to return first."""
        in_flight = self.exchange.in_flight
        if in_flight and not in_flight.isdisjoint(rows):
            raise still_in_flight_error(method, [row for row in rows if row in in_flight])

    def require_not_failed(self, rows: Collection[int]) -> None:
        """Raise for failed rows, unless the next step rebuilds them."""
        if self.failure_log.failed and not self.restarts_rows:
            self.require_intact(rows)

    def require_intact(self, rows: Collection[int]) -> None:
        """Raise ``EnvFailed`` if some of these rows have to be rebuilt."""
        failed = self.failure_log.failed
        if affected := failed.keys() & set(rows):
            raise failed_earlier_error({row: failed[row] for row in affected})

    def send(self, actions: Any, env_id: Any) -> None:
        """Submit a step of some rows, for ``recv``. Errors are raised before anything is sent."""
        exchange = self.exchange
        if exchange.request is not None and not exchange.drop_if_droppable():
            raise pending_call_error("send", exchange.request.phase)
        rows = self.last_received if env_id is None else parse_env_ids(env_id, self.num_envs)
        listed: list[int] = rows.tolist()
        self.require_not_in_flight("send", listed)
        self.require_not_failed(listed)
        action_list = self.stage.put_some(actions, rows, len(listed))
        for observer in self.observers:
            observer.on_step(listed, actions if action_list is None else action_list)
        self.send_rows(listed, action_list)

    def send_rows(self, rows: list[int], action_list: list[Any] | None) -> None:
        """Send a step of rows for ``recv``. ``action_list``: their actions; ``None`` if the actions are staged in arrays."""
        raise NotImplementedError

    def announce_reset(self, rows: Sequence[int], seeds: list[Any], options: ResetOptions, *, drops: bool) -> list[Any]:
        """Notify the observers of a reset. Return all seeds, including those that observers filled in.

        ``drops`` is True if the reset drops all pending results.
        """
        if not self.observers:
            return seeds
        exchange, request, all_rows = self.exchange, self.exchange.request, list(range(self.num_envs))
        if not drops:
            without_result, submitted = sorted(set(all_rows) - exchange.in_flight), []
        elif request is None or request.command not in PHASES:
            without_result, submitted = all_rows, sorted(exchange.in_flight)
        else:
            without_result, submitted = all_rows, all_rows if request.rows is None else list(request.rows)
        row_seeds = [seeds[row] for row in rows]
        for observer in self.observers:
            observer.on_dropped(without_result, submitted=submitted)
            observer.on_reset(rows, row_seeds, select_options(options, rows))
        seed_by_row = dict(zip(rows, row_seeds, strict=True))
        return [seed_by_row.get(row, seed) for row, seed in enumerate(seeds)]

    def keep_call(self) -> None:
        """Keep the pending call until the program fetches its result."""
        assert self.exchange.request is not None
        self.exchange.request.droppable = False

    def wait_for_call(self, timeout: float | None) -> tuple[Any, ...]:
        """Return the results of the pending call, one per environment.

        Raises:
            StepTimeout: The results are late; the call stays pending.
            Exception: The exception of an environment, or the death of a worker.
        """
        results = self.exchange.finish_call(timeout)
        return tuple(results.get(row) for row in range(self.num_envs))


class LockstepDriver(Driver):
    """A driver of environments that step together: each call has one result for all of them.

    It is the base for JAX on a device, a library's own vector environment, and the fake of the tests. A subclass implements
    :attr:`capabilities`, ``close``, and the five abstract members. ``latest_request`` is ``None`` before the first call.
    After that, the latest request is pending unless it is ``returned``.

    Attributes:
        all_or_none_reason: The reason why a call must be about all environments.
        returned: The latest request for which a result has been returned.
    """

    seconds_waited = 0.0

    def __init__(self, num_envs: int) -> None:
        super().__init__()
        self.returned: RequestSummary | None = None
        self.num_envs = self.batch_size = num_envs
        self.all_or_none_reason = "they step together"

    @property
    @abstractmethod
    def latest_request(self) -> RequestSummary | None: ...

    @abstractmethod
    def begin_reset(
        self, request: RequestSummary, seeds: list[Any], mask: npt.NDArray[np.bool_] | None, options: ResetOptions
    ) -> None:
        """Begin to reset the rows of ``mask`` (``None``: all). Invalid arguments raise before any request is submitted."""

    @abstractmethod
    def begin_step(self, request: RequestSummary, actions: Any) -> None:
        """Begin a step. Invalid actions raise before any request is submitted."""

    @abstractmethod
    def wait(self, deadline: float) -> bool:
        """Wait for the result until ``deadline`` (monotonic), and return ``True`` if it has arrived."""

    @abstractmethod
    def read(self, kind: Phase) -> Stepped:
        """Return the result of a step, or of a reset (rewards 0, flags ``False``). Can be repeated."""

    @property
    def pending_request(self) -> RequestSummary:
        request = self.latest_request
        return NO_REQUEST if request is None or request is self.returned or self.state.changing else request

    def submit_reset(
        self, seeds: list[Any], ids: npt.NDArray[np.intp] | None, options: ResetOptions, *, for_recv: bool
    ) -> None:
        if for_recv:
            self._require_all(ids, "reset_async")
            self.require_idle("reset_async")
            ids = None
        rows = self.batch_size if ids is None else len(ids)
        if rows < self.batch_size and not self.capabilities.reset_mask:
            raise_unsupported(self.name, f"reset {rows} of {self.batch_size} environments", self.all_or_none_reason)
        mask = None if ids is None else np.isin(np.arange(self.batch_size), ids)
        self.begin_reset(RequestSummary(Phase.WAITING_RESET, rows, for_recv), seeds, mask, options)
        self.state.changing = self._interrupted = False  # this reset replaces an interrupted call

    def submit_step(self, actions: Any) -> None:
        self.require_idle("step_async")
        self.begin_step(RequestSummary(Phase.WAITING_STEP, self.batch_size, for_recv=False), actions)

    def send(self, actions: Any, env_id: Any) -> None:
        if env_id is not None:
            self._require_all(parse_env_ids(env_id, self.batch_size), "send")
        self.require_idle("send")
        self.begin_step(RequestSummary(Phase.WAITING_STEP, self.batch_size, for_recv=True), actions)

    def wait_for_result(self, deadline: float | None) -> Stepped | None:
        request = self.pending_request
        if deadline is not None and not self.wait(deadline):
            return None
        try:
            stepped = self.read(request.phase)
        except BaseException as error:
            if error is self.result_error:
                self.finish(request, 0, 0)
            raise
        steps = request.rows if request.phase is Phase.WAITING_STEP else 0
        self.finish(request, steps, request.rows - steps)
        return stepped

    def recv(self, count: int | None, deadline: float | None) -> Stepped | None:
        total, request = self.batch_size, self.pending_request
        if count not in (None, total):
            raise_unsupported(self.name, f"recv {count} of {total} environments", "all of them finish at the same time")
        require_no_step(self.phase)
        if request.rows < total:
            raise too_few_in_flight_error(total, request.rows, 0)
        stepped = self.wait_for_result(deadline)
        if stepped is not None:
            assert isinstance(stepped[4], dict)
            stepped[4].update(env_id=np.arange(total, dtype=np.intp), _env_id=np.ones(total, np.bool_))
        return stepped

    def _require_all(self, ids: npt.NDArray[np.intp] | None, method: str) -> None:
        if not np.array_equal(ids, np.arange(self.batch_size)):  # type: ignore[arg-type]
            reason = f"{self.all_or_none_reason}: pass all of them in order, or none"
            raise_unsupported(self.name, f"{method} to some environments", reason)
