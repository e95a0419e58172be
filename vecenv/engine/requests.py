"""Requests to workers, and the replies collected for each request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from vecenv.errors import WorkerDied
from vecenv.front.driver import PHASES, Phase
from vecenv.link.messages import Failure

_NOTHING: Final[Mapping[Any, Any]] = {}


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a worker process. It is not an exception, because a raised exception keeps the program's frames alive.

    Attributes:
        text: A description for error messages.
        worker, pid, exitcode: The worker's index, process id and exit code (as in ``multiprocessing``; ``None``: unknown).
        envs: The rows of the worker.
        command: The name of the request that it was executing, ``"start"`` or ``"idle"``.
        timeout: Seconds after which it was killed because it hung; ``None`` if it did not hang.
        running: The environment that was being called, if that is known.
        where: See :attr:`~vecenv.errors.WorkerDied.where`.
    """

    text: str
    worker: int
    envs: tuple[int, ...]
    pid: int | None
    exitcode: int | None
    command: str
    timeout: float | None = None
    running: int | None = None
    where: Mapping[int, str] = field(default_factory=dict)

    @property
    def first_line(self) -> str:
        """The text without the stack."""
        return self.text.partition("\n")[0]

    def error(self, text: str = "") -> WorkerDied:
        """Return a new exception for this death, with ``text`` if it is not empty."""
        return WorkerDied(
            text or self.text, worker=self.worker, envs=self.envs, pid=self.pid, exitcode=self.exitcode,
            command=self.command, timeout=self.timeout, where=self.where,
        )  # fmt: skip


class Request:
    """A request that is pending until its result has been returned.

    A plain step sets only three attributes. The others have defaults in the class; before anything is added to the
    containers, :meth:`create_containers` replaces them.

    Attributes:
        command: ``"step"``, ``"reset"`` or the name of a call.
        remaining: The number of messages without a reply.
        for_recv: True if ``recv`` returns the rows, which become ready message by message. Then only its pending messages
            and ``StateChanges.unsettled`` refer to it, not ``Exchange.request``. False if one method returns all rows, or
            ``Submissions`` returns the result.
        rows: The rows of a reset or of a request of ``Submissions``; ``None`` for other steps and calls.
        seeds, options: The arguments of a reset, for all environments and not only for ``rows``.
        droppable: True for a call that the next method may drop: one that a single method submits and waits for, or one that
            was interrupted in the caller's own share.
        interrupted: True if an exception interrupted the wait for its result, or may do so now, in an observer; a reset may
            then drop it.
        convert_result: A function that converts the result of a call to its method's return value; ``None``: no conversion.
        may_have_infos: False if all replies were plain, so that there are no infos and final observations.
        infos, finals: By row: infos and final observations that are not in shared memory: pickled ones, and those of rebuilt
            rows.
        results: By row: the results of a call.
        failures: Exceptions of environments, each with the worker that reported it.
        deaths: The deaths of workers with a pending message of this request.
        lost: The rows of the messages that got no reply because of these deaths.
        rebuilding: Row that is being rebuilt -> its last good observation if the request is a step, otherwise ``None``.
        repeated: Rows for which the reset was repeated, with the same seed if it had one.
    """

    rows: Sequence[int] | None = None
    seeds: Sequence[Any] | None = None
    options: Any = None
    droppable = interrupted = False
    convert_result: Any = None
    may_have_infos = False
    infos: dict[int, Any] = _NOTHING  # type: ignore[assignment]
    finals: dict[int, Any] = _NOTHING  # type: ignore[assignment]
    results: dict[int, Any] = _NOTHING  # type: ignore[assignment]
    failures: list[tuple[Failure, Any]] = []  # noqa: RUF012
    deaths: list[Death] = []  # noqa: RUF012
    lost: set[int] = set()  # noqa: RUF012
    rebuilding: dict[int, Any] = _NOTHING  # type: ignore[assignment]
    repeated: set[int] = set()  # noqa: RUF012

    def __init__(self, command: str, for_recv: bool = False, remaining: int = 0) -> None:
        self.command, self.for_recv, self.remaining = command, for_recv, remaining

    def create_containers(self) -> None:
        """Give this request containers of its own, in place of the shared empty ones of the class."""
        if self.infos is _NOTHING:
            self.infos, self.finals, self.results, self.rebuilding = {}, {}, {}, {}
            self.failures, self.deaths, self.lost, self.repeated = [], [], set(), set()

    @property
    def phase(self) -> Phase:
        """The phase of the vector environment while this request is pending."""
        return PHASES.get(self.command, Phase.WAITING_CALL)
