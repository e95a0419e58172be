"""Helpers of ``EpisodePrefetcher``: errors in terms of the rows that its caller uses, and the selection of rows.

The engine has one environment per *place*, and a row may move to another place for its next episode. Errors from the engine
number the environments by place. Their texts are kept, and a note names the row; in ``error.envs``, rows replace places.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Dict, Tuple
from gymnasium.vector import VectorEnv

from vecenv.engine.vector_env import Observer
from vecenv.errors import EnvFailed, ErrorRecord, StepTimeout, WorkerDied
from vecenv.front.vector_env import SPACES
from vecenv.link.messages import name_envs, note_once


class _PlaceNote(str):
    """A note about failed places. Its ``row`` is the one at the first place; ``None`` if no episode ran there."""

    __slots__ = ("row",)
    row: int | None


class PlaceNotes(Observer):
    """An observer that adds a note about the row to each failure.

    Args:
        envs: The ``EpisodePrefetcher``.
    """

    def __init__(self, envs: Any) -> None:
        self._envs = weakref.proxy(envs)  # weak, because the engine holds its observers

    def on_failure(self, rows: Sequence[int], error: Exception, *, worker_died: bool) -> str:
        """Return the note. If a worker died, also name the rows in the error, which ``envs.errors`` keeps."""
        if worker_died:
            name_rows(error, self._envs.places)
        return _make_note(self._envs, rows)


def _make_note(envs: Any, places: Sequence[int]) -> _PlaceNote:
    """Return the note about failed places of an ``EpisodePrefetcher``."""
    rows = [envs.row_of_place(place) for place in places]
    episodes = ["no episode" if row is None else f"an episode of env {row}" for row in rows]
    note = _PlaceNote("; ".join(
        f"'env {place}' is place {place} of {envs.envs.num_envs}, which ran {episode}"
        for place, episode in zip(places, episodes, strict=True)
    ))  # fmt: skip
    note.row = rows[0] if rows else None
    return note


def name_rows(error: BaseException, places: Sequence[int]) -> None:
    """Replace the places in ``envs`` and ``where`` of an error by rows. An ``EnvFailed`` has neither and gets a note.

    ``places`` has the place of each row. Places without a row are left out.
    """
    if isinstance(error, EnvFailed):
        error.add_note(f"the numbers above are places; envs 0 to {len(places) - 1} are at the places {list(places)}")
    elif hasattr(error, "envs"):
        rows = [row for row, place in enumerate(places) if place in error.envs]
        if isinstance(error, (StepTimeout, WorkerDied)):
            error.where = {row: error.where[places[row]] for row in rows if places[row] in error.where}
        if isinstance(error, StepTimeout):
            error.add_note(f"the numbers above are places; the envs without a reply are {rows}")
        name_envs(error, rows)
        if hasattr(error, "loaded_rows"):
            name_envs(error, [row for row, place in enumerate(places) if place in error.loaded_rows], "loaded_rows")


@contextmanager
def naming_rows(envs: Any) -> Iterator[None]:
    """Name rows instead of places in errors from the ``with`` block, a call during which no row moves.

    Observers are not notified if a call raises in environments that do not fail, so the notes are added here.

    Args:
        envs: The ``EpisodePrefetcher``.
    """
    began = time.monotonic()
    try:
        yield
    except Exception as error:
        name_rows(error, envs.places)
        for record in envs.envs.errors:
            if record.time >= began and record.env is not None and _find_note(record.error) is None:
                note = _make_note(envs, [record.env])
                note_once(record.error, note)
                note_once(error, note)
        raise


def name_rows_in_records(records: Iterable[ErrorRecord]) -> deque[ErrorRecord]:
    """Return copies of records with the row from the note of a failure as ``env``; ``None`` if it names no row."""
    return deque(replace(record, env=getattr(_find_note(record.error), "row", None)) for record in records)


def _find_note(error: BaseException) -> _PlaceNote | None:
    return next((note for note in getattr(error, "__notes__", ()) if isinstance(note, _PlaceNote)), None)


def select_rows(space: Space[Any], batch: Any, order: list[int]) -> Any:
    """Select the rows ``order`` from a batch."""
    if isinstance(space, Dict):
        return {key: select_rows(part, batch[key], order) for key, part in space.items()}
    if isinstance(space, Tuple):
        return tuple(select_rows(part, batch[index], order) for index, part in enumerate(space))
    if isinstance(batch, np.ndarray):
        return batch[order]
    listed = list(batch)  # it may be an iterator
    return tuple(listed[row] for row in order)


def spaces_of(envs: VectorEnv[Any, Any, Any]) -> list[Space[Any]]:
    """Return the spaces with generators that belong to the state of a vector environment."""
    return [getattr(envs, name) for name in SPACES]
