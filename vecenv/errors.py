"""The exception classes of vecenv.

Each class stands for one kind of failure. If programs already catch a class of the standard library or of Gymnasium in the
same situation, the class here is derived from it: a timeout is both a ``multiprocessing.TimeoutError``, as in Gymnasium, and
the builtin ``TimeoutError``; a dead worker is a ``RuntimeError``. Protocol errors (a call out of order, a call after
``close``) are Gymnasium's own classes, from ``gymnasium.error``. An environment's exception is raised again unchanged, with
a note that names the environment and, from a worker process, the remote traceback as its cause; :class:`EnvError` replaces
one that cannot be sent between processes.

If environments fail in a call of a vector environment, the exception, whatever its class, has the attribute ``envs``: their
indices. An :class:`EnvFailed` that refuses the whole call, because of an earlier failure, does not have it.
"""

from __future__ import annotations

import difflib
import multiprocessing
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from gymnasium.error import ResetNeeded

__all__ = [
    "ArenaError", "BusyError", "ClusterError", "EnvError", "EnvFailed", "EpisodeOver", "ErrorRecord", "ForkedError",
    "HostDied", "InfoError", "LoopError", "NotRestorable", "ObservationError", "RemoteTraceback", "RestartsExhausted",
    "SnapshotMismatch", "StaleStateError", "StartupTimeout", "StepTimeout", "VecEnvError", "WorkerDied",
]  # fmt: skip


def how_to_install(extra: str, *packages: str) -> str:
    """Return the commands that install an extra and ``packages``, for an error message."""
    others = "".join(f" {package}" for package in packages)
    return f"pip install -e '.[{extra}]'{others} in a checkout, or pip install 'vecenv[{extra}]'{others} from a release"


def suggest_names(name: object, names: Sequence[str]) -> str:
    """Return the end of a message about an unknown name: similar names, or else the first ones."""
    if close := difflib.get_close_matches(str(name), names, n=3):
        return f"; did you mean {' or '.join(map(repr, close))}?"
    if len(names) == 1:
        return f"; the only one is {names[0]!r}"
    return f"; there are {len(names)}: {', '.join(map(repr, names[:5]))}{', ...' if len(names) > 5 else ''}"


def envs_text(rows: Sequence[int], running: int | None = None) -> str:
    """Return ``env 3``, ``envs 4-7`` or ``env 5, of envs 4-5, 9``: rows as text, with the running one if known."""
    if len(rows) == 1:
        return f"env {rows[0]}"
    return f"envs {span_text(rows)}" if running is None else f"env {running}, of envs {span_text(rows)}"


def span_text(rows: Iterable[int]) -> str:
    """Return ``4-7`` or ``4-5, 9``: rows as text, in ascending order; ``none`` without rows."""
    spans: list[list[int]] = []
    for row in sorted(rows):
        if spans and row == spans[-1][-1] + 1:
            spans[-1][1:] = [row]
        else:
            spans.append([row])
    return ", ".join("-".join(map(str, span)) for span in spans) or "none"


def format_seconds(seconds: float | None) -> str:
    """Format a duration, such as ``1 second`` or ``2.5 seconds``; ``None`` counts as 0."""
    return f"{seconds or 0.0:g} second{'s' * (seconds != 1)}"


def name_row(row: int, reason: str) -> str:
    """Return the reason for a failure, prefixed with its environment unless the text already names it."""
    is_named = f"env {row}: " in reason or f"env {row}, " in reason
    return reason if is_named else f"env {row}: {reason}"


def failed_earlier_error(reasons: Mapping[int, str]) -> EnvFailed:
    """Return the exception for rows that failed earlier and must be reset first. ``reasons``: row -> its failure."""
    rows = sorted(reasons)
    them = "them" if len(rows) > 1 else "it"
    return EnvFailed(
        f"{envs_text(rows)} failed earlier and must be rebuilt by reset() (or a reset_mask that includes {them}) first: "
        f"{name_row(rows[0], reasons[rows[0]])}"
    )


class VecEnvError(Exception):
    """The base of the exception classes in this module."""


class EnvError(VecEnvError, RuntimeError):
    """A replacement for an environment's exception that cannot be sent between processes, or is not an ``Exception``.

    ``SystemExit`` from ``sys.exit()`` is not an ``Exception``. The message contains the environment and the original type
    and text; ``__cause__`` is a :class:`RemoteTraceback`, or the original exception if no worker process was involved. Data
    that its receiver cannot unpickle raises this class too.

    Attributes:
        original: The type and the text of the original exception, as ``"Type: text"``; empty if there was none.
    """

    def __init__(self, *args: object, original: str = "") -> None:
        super().__init__(*args)
        self.original = original


class EnvFailed(VecEnvError, RuntimeError):
    """An environment that failed earlier was used before it was rebuilt.

    A :class:`vecenv.aio.Pool` also raises it for an exception (the ``__cause__``) of an environment's step or reset.
    """


class ObservationError(VecEnvError, ValueError):
    """An observation, reward or flag is missing, or has a wrong structure, shape, type or value; the message names it."""


class InfoError(VecEnvError, AttributeError):
    """The infos of a step, a reset or a ``recv`` cannot be merged, because one is not a dict or cannot be read.

    The environments are intact and the call is complete: continue with the next call. :func:`vecenv.infos_by_row` does not
    merge infos. With ``on_failure="restart"``, an environment with an info that is not a dict is rebuilt instead.

    Attributes:
        result: The results of the call, with a list of one info per row in place of the dict.
    """

    result: tuple[Any, ...] = ()


class EpisodeOver(VecEnvError, ResetNeeded, AssertionError):
    """An environment was stepped after the end of its episode, with ``autoreset_mode="Disabled"`` and ``num_workers=0``.

    It is an ``AssertionError`` because ``gymnasium.vector.SyncVectorEnv`` raises one. In place of that class
    (:func:`vecenv.install`), any number of workers raises it.
    """


class WorkerDied(VecEnvError, RuntimeError):
    """A worker process ended while it was needed.

    Attributes:
        worker: Index of the (first) dead worker.
        envs: Indices of the environments of the dead workers.
        pid: Process id of the (first) dead worker.
        exitcode: The value of ``multiprocessing.Process.exitcode``: negative for a signal. ``None`` if it is unknown.
        command: The worker's task: ``"step"``, ``"reset"``, ``"call"``, ``"start"``, ``"idle"`` and others.
        timeout: The timeout in seconds after which it was killed because it hung; ``None`` if it did not hang.
        where: Environment -> its worker, request and last line of Python, as :attr:`StepTimeout.where`; empty if unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        worker: int = -1,
        envs: Sequence[int] = (),
        pid: int | None = None,
        exitcode: int | None = None,
        command: str = "",
        timeout: float | None = None,
        where: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.envs = tuple(envs)
        self.pid = pid
        self.exitcode = exitcode
        self.command = command
        self.timeout = timeout
        self.where = dict(where or {})


class HostDied(WorkerDied):
    """A host actor of a cluster backend ended while it was needed."""


class RestartsExhausted(WorkerDied):
    """The budget of restarts under ``on_failure="restart"`` is used up.

    The message names the budget, the last causes and the option that increases it. This is a :class:`WorkerDied` even if the
    cause is an exception of an environment in a live worker, because ``reset()`` has to rebuild the lost environments in
    both cases. ``envs`` contains their indices.
    """


class ClusterError(VecEnvError, RuntimeError):
    """A cluster lacks the requested resources, or cannot be used. If a start fails, nothing is left running."""


class StepTimeout(VecEnvError, multiprocessing.TimeoutError, TimeoutError):
    """A reply did not arrive in time. The request is still pending: call the same ``*_wait`` again, or ``close()``.

    After ``recv``, call ``recv`` again. ``abandon(error.envs)`` kills the late worker processes, so that the call ends and
    ``reset()`` works. A :class:`vecenv.aio.Pool` has already killed them.

    Attributes:
        timeout: The timeout in seconds; ``None`` if it is not recorded.
        envs: Indices of the environments without a reply; empty if the backend does not know them.
        where: Environment -> a text with its worker, request and line of Python, for environments of the first few workers.
    """

    def __init__(
        self, *args: object, timeout: float | None = None, envs: Sequence[int] = (), where: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(*args)
        self.timeout, self.envs, self.where = timeout, tuple(envs), dict(where or {})

    def copy(self) -> StepTimeout:
        """Return a copy without the traceback, because a traceback keeps the program's frames alive."""
        return StepTimeout(*self.args, timeout=self.timeout, envs=self.envs, where=self.where)


class StartupTimeout(VecEnvError, multiprocessing.TimeoutError, TimeoutError):
    """A worker, a host, or a process that tries an environment was not ready in time. All that were starting were ended."""


class ArenaError(VecEnvError, MemoryError):
    """The required shared memory exceeds the free memory of the machine or its cgroup, or could not be allocated."""


class BusyError(VecEnvError, RuntimeError):
    """A call began during another one, in another thread or task, a signal handler or an observer."""


class ForkedError(VecEnvError, RuntimeError):
    """A vector environment or a pool was used in a process forked from the one that owns it."""


class LoopError(VecEnvError, RuntimeError):
    """A :class:`vecenv.aio.Pool` was used outside of the event loop that entered it, or before it was entered."""


class StaleStateError(VecEnvError, RuntimeError):
    """A state of ``vecenv.jax`` cannot be used: it is not its bridge's newest, a call failed, or its arrays were donated."""


class NotRestorable(VecEnvError, RuntimeError):
    """An environment cannot be saved or frozen, or would continue differently; the message gives the reason."""


class SnapshotMismatch(VecEnvError, ValueError):
    """A snapshot is damaged, or belongs to another environment, wrapper stack, version or type. Nothing was changed."""


class RemoteTraceback(VecEnvError):
    """The text of a traceback from another process; set as the ``__cause__`` of its exception."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


_RECORDED = "recorded: "
"""The start of the note that the flight recorder adds to an exception."""


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """One entry of ``envs.errors``: the failure, its place and time.

    ``str(record)`` is one line, which begins with the date and time of day.

    Attributes:
        env: Index of the environment; ``None`` if it is unknown, or if a whole worker died.
        worker: Index of its worker; ``-1`` for environments stepped by the caller itself.
        pid: Process id of that worker.
        command: The failed request: ``"step"``, ``"reset"``, ``"call"``, ``"start"`` and others.
        error: The exception that was (or would have been) raised.
        traceback: The text of the environment's traceback; for a death or a hang, a description with the last known stack.
        time: ``time.monotonic()`` when the caller detected it.
    """

    env: int | None
    worker: int
    pid: int
    command: str
    error: BaseException
    traceback: str
    time: float

    @property
    def recorded(self) -> str:
        """With ``record_failures=``, the path of the file for ``vecenv replay``; empty if there is none.

        If a worker with several environments died, this is the file of the running environment, if it is known.
        """
        notes = getattr(self.error, "__notes__", ())
        found = (note.removeprefix(_RECORDED).partition("\n")[0] for note in notes if note.startswith(_RECORDED))
        return next(found, "")

    @property
    def when(self) -> datetime:
        """The time of the failure as a date and time of day, in the local time zone."""
        return datetime.now().astimezone() - timedelta(seconds=time.monotonic() - self.time)

    def __str__(self) -> str:
        try:
            first_line = (str(self.error).strip().splitlines() or [""])[0]
        except Exception:  # raised by `__str__` of the environment's own exception class
            first_line = "it could not be printed"
        text = f": {first_line.removeprefix(f'env {self.env}: ')}" if first_line else ""
        if isinstance(self.error, StepTimeout) and self.env is not None:
            text = text.removesuffix(".") + "".join(self.error.where.get(self.env, "").partition(", at ")[1:])
        where = f"worker {self.worker}, pid {self.pid}" if self.worker >= 0 else "in the calling process"
        source = where if self.env is None else f"env {self.env} ({where})"
        is_named = self.env is None and first_line.startswith(f"worker {self.worker} (pid {self.pid},")
        prefix = "" if is_named else f"{source}, {self.command}: "
        recorded = f" (recorded: {self.recorded})" if self.recorded else ""
        return f"{self.when:%Y-%m-%d %H:%M:%S} {prefix}{type(self.error).__name__}{text}{recorded}"
