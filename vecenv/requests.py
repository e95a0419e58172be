"""A request to many workers, and what a round of their answers amounts to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from vecenv.errors import WorkerDied
from vecenv.rows import Failure
from vecenv.shm.layout import Array
from vecenv.workers import AnyWorker

__all__ = ["COLUMNS", "PLAIN", "Pending", "Result"]


@dataclass(slots=True)
class Pending:
    """A request to (nearly) everybody whose answers are owed."""

    command: str
    workers: list[AnyWorker]
    mask: Array | None = None
    lost: Sequence[int] = ()
    seeds: Sequence[Any] | None = None
    options: dict[str, Any] | None = None


@dataclass(slots=True)
class Result:
    """What a round of answers amounts to, apart from what lies in shared memory."""

    columns: bool = False
    infos: dict[int, Any] = field(default_factory=dict)
    finals: dict[int, Any] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    failures: list[tuple[Failure, AnyWorker]] = field(default_factory=list)
    deaths: list[WorkerDied] = field(default_factory=list)


PLAIN: Final = Result()
"""The result of a round in which nobody had anything to say, the same one every time: nobody writes into it."""
COLUMNS: Final = Result(columns=True)
"""Likewise of a round in which all that was said lies in shared memory."""
