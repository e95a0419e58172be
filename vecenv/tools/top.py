"""``vecenv top``: the workers of running programs, as a live table or as one snapshot.

Two states of the file that a program writes (:mod:`vecenv.engine.published`) give the rates of the time between them; what
the kernel says of a worker's process gives its state. The programs themselves are not asked anything, and so a program that
hangs is shown as well as one that runs.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vecenv.engine.published import BadFile, PublishedStats, PublishedWorker, process_state, published

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "HEADINGS", "HOW_TO_PUBLISH", "ProgramRow", "Watcher", "WorkerRow", "cells", "print_table", "summary", "table",
    "to_dict",
]  # fmt: skip

HOW_TO_PUBLISH: Final = "a program shows its workers here after envs.publish_stats(), or when run with VECENV_TOP=1"
_WIDTH: Final = 110  # of a table that does not go to a terminal
_LONGEST_NAME: Final = 80
_LATE: Final = 1.5  # seconds without an answer that are worth a word, and after which old rates hold no more
_WAITS: Final = 0.95  # share of the time outside environments above which a worker that steps is said to wait
HEADINGS: Final = ("worker", "pid", "state", "envs", "steps/s", "waiting", "slowest env", "restarts")
_COLOURS: Final = {"stepping": "green", "busy": "yellow", "stopped": "red", "dead": "red"}


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker between two readings.

    Attributes:
        index, pid: Which; the caller's own share has the program's pid.
        kind: ``"process"`` or ``"caller"``.
        state: ``"stepping"``: it has made steps; ``"waiting"``: it has, in under a twentieth
            of the time; ``"busy"``: it computes, and made none; ``"idle"``; ``"stopped"`` (by
            SIGSTOP); ``"dead"``.
        envs: (first, last) of its environments.
        steps_per_second: Of its environments together.
        waiting: Share of the time that it was not inside an environment, 0 to 1.
        slowest_env: The environment whose latest sampled step took longest, ``None`` before the first sample.
        slowest_env_seconds: How long that step took.
        restarts: How often its process was replaced since the program began to publish.
    """

    index: int
    pid: int
    kind: str
    state: str
    envs: tuple[int, int]
    steps_per_second: float
    waiting: float
    slowest_env: int | None
    slowest_env_seconds: float | None
    restarts: int


@dataclass(frozen=True, slots=True)
class ProgramRow:
    """One vector environment of a running program.

    Attributes:
        name, pid, num_envs: Which.
        steps_per_second: Of all workers.
        waiting: Share of the time that the program waited for its workers, 0 to 1.
        since_answer: Seconds since the program took in an answer, up to half a second too many.
        resets, restarts, errors: Counts, as in ``envs.stats()``.
        workers: A row each.
    """

    name: str
    pid: int
    num_envs: int
    steps_per_second: float
    waiting: float
    since_answer: float
    resets: int
    restarts: int
    errors: int
    workers: list[WorkerRow]


def to_dict(rows: list[ProgramRow]) -> dict[str, Any]:
    """Plain values for JSON."""
    return {"programs": [asdict(row) for row in rows]}


class Watcher:
    """Reads all programs again and again; each :meth:`read` covers the time since the one before.

    Args:
        pid: Only this program.

    Attributes:
        left_out: A word on each file that cannot be read.
    """

    def __init__(self, pid: int | None = None) -> None:
        self.left_out: list[str] = []
        self._pid = pid
        self._latest: dict[Path, tuple[PublishedStats | None, PublishedStats]] = {}  # the state before, and this one

    def read(self) -> list[ProgramRow]:
        """The programs that there are, in the order of their ids and ages.

        One that was not there at the last reading is shown over the time since it began to publish.
        """
        now: dict[Path, tuple[PublishedStats | None, PublishedStats]] = {}
        self.left_out = []
        for path in published():
            pid = int(path.name.partition("-")[0])
            if self._pid not in (None, pid):
                continue
            with contextlib.suppress(OSError):  # gone
                try:
                    stats = PublishedStats.read(path)
                except BadFile as error:
                    self.left_out.append(f"a file of pid {pid}: {error}")
                    continue
                before, latest = self._latest.get(path, (None, None))
                now[path] = (before if latest is not None and latest.at == stats.at else latest), stats
        self._latest = now
        rows = [(stats.pid, stats.began, _program(before, stats)) for before, stats in now.values()]
        return [row for *_, row in sorted(rows, key=lambda entry: entry[:2])]


def _program(before: PublishedStats | None, now: PublishedStats) -> ProgramRow:
    if before is not None and (before.began != now.began or len(before.workers) != len(now.workers)):
        before = None
    since_answer = max(time.monotonic() - now.at, 0.0)
    if since_answer > _LATE:  # nothing has happened since
        before = now
    seconds = max(now.at - (before.at if before else now.began), 1e-9)
    earlier = {worker.index: worker for worker in before.workers} if before else {}
    workers = [_worker(worker, earlier.get(worker.index), seconds) for worker in now.workers]
    return ProgramRow(
        name=now.name,
        pid=now.pid,
        num_envs=now.num_envs,
        steps_per_second=sum(worker.steps_per_second for worker in workers),
        waiting=_share(now.time_waiting - (before.time_waiting if before else 0.0), seconds),
        since_answer=since_answer,
        resets=now.resets,
        restarts=now.restarts,
        errors=now.errors,
        workers=workers,
    )


def _worker(worker: PublishedWorker, before: PublishedWorker | None, seconds: float) -> WorkerRow:
    steps = worker.steps - (before.steps if before else 0.0)
    waiting = 1.0 - _share(worker.seconds - (before.seconds if before else 0.0), seconds)
    known = worker.slowest_env >= 0
    return WorkerRow(
        index=worker.index,
        pid=worker.pid,
        kind=worker.kind,
        state=_state(worker, stepped=steps > 0, waiting=waiting),
        envs=(worker.first, worker.last),
        steps_per_second=max(steps, 0.0) / seconds,
        waiting=waiting,
        slowest_env=worker.slowest_env if known else None,
        slowest_env_seconds=worker.slowest_seconds if known else None,
        restarts=worker.restarts,
    )


def _share(part: float, whole: float) -> float:
    return min(max(part / whole, 0.0), 1.0)


def _state(worker: PublishedWorker, *, stepped: bool, waiting: float) -> str:
    state = process_state(worker.pid)
    if state is None or state[0] in "ZX" or state[1] != worker.started:
        return "dead"
    if state[0] in "Tt":
        return "stopped"
    if stepped:
        return "stepping" if waiting < _WAITS else "waiting"
    return "busy" if state[0] == "R" and worker.kind == "process" else "idle"


# --- for people -----------------------------------------------------------------------------------


def table(rows: list[ProgramRow], left_out: Sequence[str] = ()) -> RenderableType:
    """All programs, a table each, and what was left out."""
    from rich.console import Group
    from rich.text import Text

    shown: list[RenderableType] = [_table(row) for row in rows] or [Text(f"Nothing to show: {HOW_TO_PUBLISH}.")]
    return Group(*shown, *(Text(f"Left out: {word}.", style="dim") for word in left_out))


def _plain(name: str) -> str:
    """A name that does nothing to a terminal."""
    short = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "..."
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in short)


def summary(program: ProgramRow) -> tuple[str, str]:
    """What there is to say of a program as a whole, in two lines of a narrow terminal."""
    late = f", no answer for {program.since_answer:.1f} s" if program.since_answer > _LATE else ""
    return (
        f"{_plain(program.name)}: {program.num_envs} environments, pid {program.pid}",
        f"{program.steps_per_second:,.0f} steps/s, waits for envs {program.waiting:.0%}{late}; {program.resets:,} resets, "
        f"{program.restarts:,} restarts, {program.errors:,} errors",
    )


def cells(worker: WorkerRow) -> tuple[RenderableType, ...]:
    """A worker's line of the table."""
    from rich.text import Text

    first, last = worker.envs
    slowest = worker.slowest_env
    return (
        "caller" if worker.kind == "caller" else str(worker.index),
        str(worker.pid),
        Text(worker.state, style=_COLOURS.get(worker.state, "dim")),
        f"{first}" if first == last else f"{first}-{last}",
        f"{worker.steps_per_second:,.0f}",
        f"{worker.waiting:.0%}",
        "-" if slowest is None else f"{slowest}: {_duration(worker.slowest_env_seconds or 0.0)}",
        str(worker.restarts),
    )


def _table(program: ProgramRow) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    title = Text("\n".join(summary(program)), style="table.title")  # and no markup: the name is the program's
    found = Table(title=title, title_justify="left")
    for heading in HEADINGS:
        found.add_column(heading, justify="left" if heading in ("state", "envs") else "right")
    for worker in program.workers:
        found.add_row(*cells(worker))
    return found


def _duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:,.1f} s"


def print_table(rows: list[ProgramRow]) -> None:
    """The table as it is now, on stdout."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False).print(table(rows))
