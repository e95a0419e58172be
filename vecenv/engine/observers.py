"""The interface of recorders, loggers and monitors, which observe the calls, results and failures of a vector environment.

``envs.add_observer(observer)`` registers an :class:`Observer`. Without observers, a call only checks for an empty list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vecenv.link.messages import summary

Rows = Sequence[int] | npt.NDArray[np.intp]
"""Indices of environments, in the order of the values that are passed with them."""


class Observer(Protocol):
    """The base class of observers. Every method does nothing by default.

    Arguments belong to the caller of the vector environment: copy what you keep, and change nothing except ``seeds``.
    Methods run in the thread that makes the call, and must not call the vector environment.

    An exception from a method that runs before a request is submitted propagates to the caller, and nothing is sent. One
    from :meth:`on_result` propagates too, and the result stays pending. One from :meth:`on_failure` never replaces the
    error of the failure, but is added to it as a note.
    """

    def on_reset(self, rows: Rows, seeds: list[int | None], options: Any) -> None:
        """Observe a reset of these rows before it is submitted.

        With ``on_failure="restart"`` this includes the first reset of environments that replace failed ones. An exception
        then ends the step or reset in which they failed, and the next one rebuilds them.

        Args:
            rows: Indices of the environments. Those that failed are rebuilt.
            seeds: A seed or ``None`` for each of ``rows``. An observer may replace a ``None`` with a seed.
            options: A dict or ``None`` for all of them, or a list with one for each.
        """
        return

    def on_dropped(self, rows: Rows, *, submitted: Rows) -> None:
        """Observe that unfinished steps will have no result, before the ``on_reset`` of each reset that the program calls.

        Args:
            rows: Indices of the environments in which any unfinished step will have no result: all if the reset drops
                pending results, otherwise those that are not in flight.
            submitted: Those of ``rows`` with a pending request: they execute it, but its result is dropped. If another row
                has an announced step without a result, that step was refused, or interrupted before it was submitted.
        """
        return

    def on_step(self, rows: Rows | None, actions: Any) -> None:
        """Observe a step of these rows before it is submitted.

        Args:
            rows: Indices of the environments; ``None``: all.
            actions: One action for each of them: a batch if its dtypes and shapes match the action space, otherwise a list.
        """
        return

    def on_call(self, rows: Rows, name: str, arguments: tuple[Any, ...]) -> None:
        """Observe a call that may change environments, before it is submitted; a load only if all snapshots fit.

        Args:
            rows: Indices of the environments.
            name: ``"call"``, ``"set_attr"``, ``"exec_func"``, ``"set_next_options"``, ``"load"`` or ``"thaw"``.
            arguments: For ``"call"`` ``(method, args, kwargs)``, for ``"set_attr"`` ``(attribute, values)``, for
                ``"exec_func"`` ``(func, args, kwargs)``, for ``"set_next_options"`` ``(pairs of seed and options,)``, for
                ``"load"`` ``(snapshots,)``, for ``"thaw"`` ``(frozen,)``. Values, pairs and snapshots have one entry for
                each of ``rows``.
        """
        return

    def on_result(self, rows: Rows | None, result: tuple[Any, ...]) -> None:
        """Observe a result before it is returned.

        After an interruption or an observer's exception, the same result may be reported again.

        Args:
            rows: Indices of the environments, from ``recv``; ``None``: all, from ``step`` or ``reset``.
            result: ``(observations, rewards, terminations, truncations, infos)``, or ``(observations, infos)`` from
                ``reset``; as it is returned, except ``infos``: ``infos.rows()`` is a list with the info of each row.
                From ``recv``, a row that was reset has reward 0.
        """
        return

    def on_failure(self, rows: Sequence[int], error: Exception, *, worker_died: bool) -> str | None:
        """Observe that environments failed; their next reset rebuilds them. A returned text is added to the error as a note.

        If a worker's environment raises in a request that was dropped, only ``envs.errors`` reports it.

        Args:
            rows: Indices of the environments: one that raised, or all of a worker that died or of workers that are late,
                running ones first. Empty if a step raised but its environment can continue, as after an unpicklable info.
            error: The exception. A :class:`~vecenv.errors.StepTimeout` means that they exceeded ``step_timeout``, and
                may still reply.
            worker_died: True if ``error`` is a :class:`~vecenv.errors.WorkerDied`.
        """
        return None


def notify_failure(observers: Sequence[Observer], rows: Sequence[int], error: Exception, *, worker_died: bool) -> list[str]:
    """Call ``on_failure`` of all observers and return the notes for the error.

    An observer's exception becomes a note. So would an exception from a signal handler: call this only while signal handlers
    are deferred.
    """
    notes: list[str] = []
    for observer in observers:
        try:
            note: Any = observer.on_failure(rows, error, worker_died=worker_died) or ""
            if not isinstance(note, str):  # it may be a path, for example
                note = str(note)
        except (Exception, SystemExit) as raised:
            note = f"{type(observer).__name__}.on_failure raised {summary(raised)}"
        if note:
            notes.append(note)
    return notes
