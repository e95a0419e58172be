"""Errors about the environments of an ``EpisodePrefetcher``, with the rows that its caller knows.

The engine and its environments name *places*. Their texts stay as they are, with a note about the row; numbers that programs
read, such as ``error.envs``, become rows.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from vecenv.engine.vector_env import Observer
from vecenv.errors import EnvFailed, ErrorRecord, WorkerDied


class _PlaceNote(str):
    """A note about failed places. Its ``row`` is that of the first one, or ``None`` if it ran no episode."""

    __slots__ = ("row",)
    row: int | None


class PlaceNotes(Observer):
    """An observer that adds a note about the row to each failure.

    Args:
        envs: The ``EpisodePrefetcher``.
    """

    def __init__(self, envs: Any) -> None:
        self._envs = weakref.proxy(envs)  # the engine holds its observers

    def on_failure(self, rows: Sequence[int], error: Exception, *, worker_died: bool) -> str:
        """Return the note, and name the rows in the error that ``envs.errors`` keeps."""
        name_rows(error, self._envs.places)
        note = _PlaceNote("; ".join(map(self._note, rows)))
        note.row = self._envs.row_of_place(rows[0]) if rows else None
        return note

    def _note(self, place: int) -> str:
        row = self._envs.row_of_place(place)
        episode = "no episode" if row is None else f"an episode of env {row}"
        return f"'env {place}' is place {place} of {self._envs.envs.num_envs}, which ran {episode}"


def name_rows(error: Exception, places: Sequence[int]) -> None:
    """Replace the places in ``error.envs`` by their rows (spares have none); note the places of rows in other errors."""
    if isinstance(error, WorkerDied):
        error.envs = tuple(row for row, place in enumerate(places) if place in error.envs)
    elif isinstance(error, EnvFailed):
        error.add_note(f"these are places; the envs are at the places {list(places)}")


@contextmanager
def naming_rows(places: Sequence[int]) -> Iterator[None]:
    """Name the rows in the error of a call; ``places`` are those of the rows, in order."""
    try:
        yield
    except (WorkerDied, EnvFailed) as error:
        name_rows(error, places)
        raise


def records_of_rows(records: Iterable[ErrorRecord]) -> deque[ErrorRecord]:
    """Return records with the rows in their notes as ``env``, or ``None``."""
    return deque(replace(record, env=_noted_row(record.error)) for record in records)


def _noted_row(error: BaseException) -> int | None:
    return next((note.row for note in getattr(error, "__notes__", ()) if isinstance(note, _PlaceNote)), None)
