"""Failures of environments and hosts: their log, the budget of host restarts, and the rows that need a reset."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from vecenv.backends.ray.host import RemoteFailure
from vecenv.backends.ray.hosts import RemoteHost
from vecenv.engine.observers import Observer, notify_failure
from vecenv.errors import ErrorRecord, RestartsExhausted, StepTimeout, envs_text
from vecenv.link.messages import name_envs, note_once, notes_about_others, unpack_error
from vecenv.system.reporting import RestartLog
from vecenv.system.restart_budget import RestartBudget

Errors = list[tuple[int | None, Exception]]
"""Exceptions to raise, each with its environment; ``None`` if it is not about a single one."""


class Failures:
    """The failures of one driver.

    Args:
        budget: The limit and the period of host restarts.
        steps: A function that returns the number of steps per environment.

    Attributes:
        errors: The latest records of failures, oldest first.
        num_errors: The number of all records.
        observers: The observers to notify of failures.
        failed: Row -> reason, for rows that have to be rebuilt.
        rows_to_rebuild: The failed rows that no host rebuilds itself: those of lost hosts and of interrupted loads.
        restarts: The number of restarts, by hosts and of hosts, without those of hosts at the beginning of a reset.
        restart_log: The log of the restarts of hosts.
    """

    def __init__(self, budget: tuple[float | None, float], steps: Callable[[], float]) -> None:
        self.errors: deque[ErrorRecord] = deque(maxlen=1000)
        self.num_errors = 0
        self.observers: list[Observer] = []
        self.failed: dict[int, str] = {}
        self.rows_to_rebuild: set[int] = set()
        self.restarts, self.restart_log, self._budget = 0, RestartLog(), RestartBudget(*budget, steps)

    def record(self, host: RemoteHost, command: str, event: RemoteFailure, *, dropped: bool = False) -> Errors:
        """Record a failure, and return the exception to raise.

        Unless it was ``dropped`` with its request, notify the observers if it is fatal or occurred in a step.
        """
        env: int | None = event.rows[0]
        note = f"env {env}, {host.label}, during {command}"
        if event.worker_died:  # perhaps before this request: the error has the command
            env, note = None, f"{envs_text(sorted(event.rows))}, {host.label}"
        # the record gets its own exception: a raised one would keep the program's frames alive
        recorded, raised = (unpack_error(event.error, note) for _ in range(2))
        recorded_command = getattr(recorded, "command", command) if event.worker_died else command
        self._append(env, host, recorded_command, recorded, event.error.text)
        if not dropped and (event.fatal or command == "step"):
            self.notify(event.rows if event.fatal else [], recorded, raised, worker_died=event.worker_died)
        return [(env, raised)]

    def record_death(self, host: RemoteHost) -> None:
        """Record the end of a host, and notify the observers."""
        error = host.death_error()
        self._append(None, host, host.command, error, host.death)
        self.notify(host.rows, error, worker_died=True)
        host.notes = getattr(error, "__notes__", ())
        self.mark_for_rebuild(host.rows, host.death.partition("\n")[0])

    def mark_for_rebuild(self, rows: Collection[int], reason: str) -> None:
        """Mark rows as failed that no host rebuilds itself."""
        self.rows_to_rebuild.update(rows)
        self.failed.update(dict.fromkeys(rows, reason))

    def record_late(self, error: StepTimeout, late: Sequence[tuple[RemoteHost, str]]) -> None:
        """Record the hosts that took longer than ``step_timeout`` and are not killed, and notify the observers."""
        self.notify([row for host, _ in late for row in host.rows], error, worker_died=False)
        for number, (host, command) in enumerate(late):
            recorded = error.copy()
            for note in () if number else getattr(error, "__notes__", ()):  # the notes are about the first row
                recorded.add_note(note)
            self._append(None, host, command, recorded, str(error))

    def _append(self, env: int | None, host: RemoteHost, command: str, error: Exception, text: str) -> None:
        self.errors.append(ErrorRecord(env, host.index, host.pid, command, error, text, time.monotonic()))
        self.num_errors += 1

    def notify(self, rows: Sequence[int], *errors: Exception, worker_died: bool) -> None:
        """Notify the observers of a failure, and add their notes to the errors."""
        for note in notify_failure(self.observers, list(rows), errors[0], worker_died=worker_died):
            for error in errors:
                note_once(error, note)

    def set_failed(self, host: RemoteHost, failed: dict[int, str]) -> None:
        """Replace the failed rows of a host with ``failed``, which it rebuilds; other :attr:`rows_to_rebuild` stay."""
        if self.failed or failed:
            for row in set(host.rows) - self.rows_to_rebuild:
                self.failed.pop(row, None)
            self.failed.update(failed)
            self.rows_to_rebuild.difference_update(failed)

    def forget(self, rows: Collection[int]) -> None:
        """Forget the failures of rows that are reset or loaded."""
        for row in rows:
            self.failed.pop(row, None)
        self.rows_to_rebuild.difference_update(rows)

    def count_restart(self, host: RemoteHost) -> None:
        """Count the restart of a dead host once. Raise ``RestartsExhausted`` if the budget is exhausted."""
        if host.restart_counted:
            return
        cause = host.death.partition("\n")[0]
        if not self._budget.spend(cause, host.rows):
            text, envs = self._budget.explain_exhaustion(cause, host.rows), list(host.rows)
            raise RestartsExhausted(text, worker=host.index, pid=host.pid, envs=envs, command="restart")
        host.restart_counted = True
        self.restarts += 1
        self.restart_log.log(cause)


def combine(errors: Errors) -> Exception:
    """Return one exception for all failures of a request, with notes about the others.

    It is that of the environment with the lowest index, or the first one if none is about a single environment.
    """
    ordered = sorted(errors, key=lambda pair: math.inf if pair[0] is None else pair[0])
    first = ordered[0][1]
    raised = [(env, error) for env, error in ordered if env is not None]
    for note in notes_about_others(raised) if raised else ():
        note_once(first, note)
    for env, other in ordered[1:]:
        if env is None:
            note_once(first, f"also: {other}")
    rows: list[int] = []
    for env, error in errors:
        rows += getattr(error, "envs", ()) if env is None else [env]
    if rows:
        name_envs(first, rows)
    return first
