"""Defines every exception class of vecenv.

The class says what is at fault. Where the standard library or Gymnasium has a class that callers catch for the same reason,
ours is a subclass of it: a timeout is a ``multiprocessing.TimeoutError`` as in Gymnasium *and* the builtin one, a dead
worker is a ``RuntimeError``. Protocol errors (a call out of order, a call after ``close``) are Gymnasium's own classes, from
``gymnasium.error``. An exception of an environment is raised again as itself, with the worker's traceback as its cause and a
note that names the environment; :class:`EnvError` replaces one that cannot be sent between processes.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

__all__ = [
    "ArenaError", "BusyError", "ClusterError", "EnvError", "EnvFailed", "ErrorRecord", "ForkedError", "HostDied",
    "LoopError", "NotRestorable", "ObservationError", "RemoteTraceback", "RestartsExhausted", "SnapshotMismatch",
    "StaleStateError", "StartupTimeout", "StepTimeout", "VecEnvError", "WorkerDied",
]  # fmt: skip


def how_to_install(extra: str, *besides: str) -> str:
    """The command that installs an extra, and packages besides, for messages."""
    more = "".join(f" {package}" for package in besides)
    return f"pip install -e '.[{extra}]'{more} in a checkout (where there is a release: pip install 'vecenv[{extra}]'{more})"


class VecEnvError(Exception):
    """The base of every exception class that vecenv defines."""


class EnvError(VecEnvError, RuntimeError):
    """An environment raised something that cannot be pickled both ways, or that is not an ``Exception`` (``sys.exit``).

    The message carries the original type, its text and where it happened; ``__cause__`` is the :class:`RemoteTraceback`.
    """


class EnvFailed(VecEnvError, RuntimeError):
    """An environment that failed earlier was stepped again before a ``reset()`` rebuilt it."""


class ObservationError(VecEnvError, ValueError):
    """An environment returned an observation, reward or flag that does not fit its space; names env, field, got, wanted."""


class WorkerDied(VecEnvError, RuntimeError):
    """A worker process ended while it was needed.

    Attributes:
        worker: Index of the (first) dead worker.
        envs: Indices of the environments that lived in the dead workers.
        pid: Process id of the (first) dead worker.
        exitcode: As ``multiprocessing.Process.exitcode``: negative for a signal. ``None`` where it is unknown.
        command: What the worker was doing: ``"step"``, ``"reset"``, ``"call"``, ``"start"`` or ``"idle"``.
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
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.envs = tuple(envs)
        self.pid = pid
        self.exitcode = exitcode
        self.command = command


class HostDied(WorkerDied):
    """A host actor of a cluster backend ended while it was needed."""


class RestartsExhausted(WorkerDied):
    """``on_failure="restart"`` gave up: the budget of restarts is used up.

    The message says which budget, what the last causes were and which option increases it. It is a :class:`WorkerDied`,
    although the cause may be an exception of an environment whose worker is alive: for a program it means the same, that a
    ``reset()`` has to rebuild what was lost. ``envs`` are the environments that wait for that.
    """


class ClusterError(VecEnvError, RuntimeError):
    """A cluster does not have the resources that were asked for; says what is missing. Nothing is left running."""


class StepTimeout(VecEnvError, multiprocessing.TimeoutError, TimeoutError):
    """A reply did not come within the timeout. It is still pending: call the same ``*_wait`` again, or ``close()``."""


class StartupTimeout(VecEnvError, multiprocessing.TimeoutError, TimeoutError):
    """A worker was not ready within ``start_timeout`` seconds. Everything that was started has been ended."""


class ArenaError(VecEnvError, MemoryError):
    """The shared memory that is needed is more than the machine or its cgroup has. Nothing was started."""


class BusyError(VecEnvError, RuntimeError):
    """Two threads called the same vector environment at once."""


class ForkedError(VecEnvError, RuntimeError):
    """A vector environment was used in a process forked from the one that owns its workers."""


class LoopError(VecEnvError, RuntimeError):
    """A :class:`vecenv.aio.Pool` was used in another event loop than that which entered it, or before it was entered."""


class StaleStateError(VecEnvError, RuntimeError):
    """A functional state was stepped twice, or belongs to another environment (``vecenv.jax``)."""


class NotRestorable(VecEnvError, RuntimeError):
    """An environment cannot be saved, or would not continue exactly as it did: says which, what differs, and where."""


class SnapshotMismatch(VecEnvError, ValueError):
    """A snapshot does not fit: of another environment, wrapper stack or version, damaged, or none. Nothing was touched."""


class RemoteTraceback(VecEnvError):
    """The text of a traceback from another process; set as the ``__cause__`` of the exception it belongs to."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """One entry of ``envs.errors``: what failed, where and when.

    Attributes:
        env: Index of the environment, or ``None`` when a whole worker is meant.
        worker: Index of its worker; ``-1`` for environments stepped by the caller itself.
        pid: Process id of that worker.
        command: ``"step"``, ``"reset"``, ``"call"``, ``"start"`` ...
        error: The exception as it was (or would have been) raised.
        traceback: The traceback text from the worker, or the stack from its black box.
        time: ``time.monotonic()`` of the moment when the caller learnt of it.
        recorded: With ``record_failures=``, the file that ``vecenv replay`` takes; empty: there is none.

    ``str(record)`` is one line, which begins with the date and time of day.
    """

    env: int | None
    worker: int
    pid: int
    command: str
    error: BaseException
    traceback: str
    time: float
    recorded: str = ""

    @property
    def when(self) -> datetime:
        """The moment as a date and time of day, in the local time zone."""
        return datetime.now().astimezone() - timedelta(seconds=time.monotonic() - self.time)

    def __str__(self) -> str:
        try:
            first = (str(self.error).strip().splitlines() or [""])[0]
        except Exception:  # of the environment's own class
            first = "it could not be printed"
        where = f"worker {self.worker}, pid {self.pid}" if self.worker >= 0 else "in the calling process"
        source = where if self.env is None else f"env {self.env} ({where})"
        said = self.env is None and first.startswith(f"worker {self.worker} (pid {self.pid},")  # the source and the command
        doing = "" if said else f"{source}, {self.command}: "
        recorded = f" (recorded: {self.recorded})" if self.recorded else ""
        return f"{self.when:%Y-%m-%d %H:%M:%S} {doing}{type(self.error).__name__}: {first}{recorded}"
