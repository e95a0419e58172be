"""Figures of a running vector environment in a file that ``vecenv top`` reads.

A program that asks for it writes a small JSON file into a folder that only its user may enter, and writes it anew twice a
second while answers come. The program itself is never asked, so one that hangs is shown as well. A file says which process
wrote it, by id and start time; those of processes that have ended are removed by the next program or reader that comes by.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from vecenv.engine.engine import Engine
from vecenv.engine.handles import CallerWorker, ProcessWorker

_FORMAT: Final = 2
_PERIOD: Final = 0.5  # seconds between two writings
_LONGEST: Final = 64 << 20  # bytes that a reader takes in: 100,000 workers have less
_NUMBERS: Final = itertools.count()


def available() -> bool:
    """Whether this system tells when a process started, and of which user it is: Linux."""
    return process_state(os.getpid()) is not None


def has_counters(engine: Engine) -> bool:
    """Whether all workers count their steps in shared memory: they are on this machine."""
    return all(isinstance(worker, (CallerWorker, ProcessWorker)) for worker in engine.pool.workers)


def asked_for(engine: Engine) -> bool:
    """Whether the environment variable ``VECENV_TOP`` asks for a file, and there can be one."""
    return os.environ.get("VECENV_TOP", "0") not in ("", "0") and available() and has_counters(engine)


def process_state(pid: int) -> tuple[str, int] | None:
    """The kernel's letter for the state of a process, and when it started; ``None`` if there is none."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return words[0], int(words[19])
    return None


@dataclass(frozen=True, slots=True)
class PublishedWorker:
    """What a file says of one worker.

    Attributes:
        index: Which.
        kind: ``"process"``, or ``"caller"``: the program's own share.
        pid, started: The process, and when it started, in the kernel's ticks; -1 if it is gone already.
        first, last: Its environments.
        restarts: How often its process was replaced.
        steps, seconds: Steps made, and seconds spent, inside environments.
        slowest_env, slowest_seconds: The environment whose latest sampled step took longest; -1 and 0 before the first.
    """

    index: int
    kind: str
    pid: int
    started: int
    first: int
    last: int
    restarts: int
    steps: float
    seconds: float
    slowest_env: int
    slowest_seconds: float


@dataclass(frozen=True, slots=True)
class PublishedStats:
    """What a file says.

    Attributes:
        format: Of the file.
        name, pid, num_envs: Of the program's vector environment.
        began, at: ``time.monotonic()`` when it began to publish, and of the latest answer that is counted here. It is the
            same clock in all processes of a machine.
        time_waiting: Seconds the program has waited for workers.
        resets, restarts, errors: Counts.
        workers: One for each worker.
    """

    format: int
    name: str
    pid: int
    num_envs: int
    began: float
    at: float
    time_waiting: float
    resets: int
    restarts: int
    errors: int
    workers: list[PublishedWorker]

    @classmethod
    def read(cls, path: Path) -> PublishedStats:
        """Read a file of :func:`published`.

        Raises:
            OSError: It is gone.
            BadFile: It is of another version of vecenv, or no such file at all.
        """
        if not stat.S_ISREG(path.lstat().st_mode):  # opening a pipe would wait for a writer
            raise BadFile("it is no file")
        with path.open("rb") as file:
            text = file.read(_LONGEST)
        try:
            found = json.loads(text)
            if found["format"] != _FORMAT:
                raise BadFile(f"it is of another version of vecenv: this one reads format {_FORMAT}")
            listed = found["workers"]
            workers = [_taken(PublishedWorker, entry) for entry in listed]
            stats: PublishedStats = _taken(cls, {**found, "workers": []}, workers=workers)
            return stats
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise error if isinstance(error, BadFile) else BadFile("it cannot be parsed") from None


class BadFile(ValueError):
    """What lies in the folder is no file that this version can read."""


def _taken(kind: type[Any], found: dict[str, Any], **done: Any) -> Any:
    """An object of this class out of JSON, whose numbers are finite and -1 or more; other names in it do not matter."""
    values = {}
    for field in fields(kind):
        values[field.name] = value = found[field.name]
        wanted = {"int": (int,), "float": (int, float), "str": (str,)}.get(str(field.type), (list,))
        if type(value) not in wanted or (wanted[0] is int and not (-1 <= value < 1 << 63 and math.isfinite(value))):
            raise BadFile(f"its {field.name} is none")
    return kind(**values | done)


# --- where files are ------------------------------------------------------------------------------


def _folders() -> Iterator[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isabs(runtime):
        yield Path(runtime, "vecenv")
    yield Path(tempfile.gettempdir(), f"vecenv-{os.getuid()}")


def _is_ours(folder: Path) -> bool:
    """Whether it is a folder of this user that no other may enter."""
    about = folder.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077


def _folder() -> Path:
    """Where files of this user go; it is made if there is none.

    Raises:
        OSError: There is no such place.
    """
    for folder in _folders():
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            if _is_ours(folder):
                return folder
    raise OSError(f"publish_stats() finds no folder for its file: {' and '.join(map(str, _folders()))} cannot be made, or "
                  "are open to other users; set XDG_RUNTIME_DIR")  # fmt: skip


def published() -> Iterator[Path]:
    """All files of this user's running programs; those of programs that have ended are removed."""
    for folder in _folders():
        with contextlib.suppress(OSError):
            for path in sorted(folder.iterdir()) if _is_ours(folder) else ():
                pid, _, rest = path.name.partition("-")
                if not (pid.isdecimal() and path.suffix in (".json", ".new")):
                    continue
                state = process_state(int(pid))
                if state is None or not rest.startswith(f"{state[1]}-"):
                    path.unlink(missing_ok=True)
                elif path.suffix == ".json":
                    yield path


# --- the program's side ---------------------------------------------------------------------------


class StatsFile:
    """The file of one vector environment, there until :meth:`close`.

    Args:
        name: What ``vecenv top`` calls it.
        engine: The engine whose workers and counters it is about.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(self, name: str, engine: Engine) -> None:
        list(published())  # removes what is left of others
        self._engine, self._name, self._pid = engine, str(name), os.getpid()
        state = process_state(self._pid)
        self._path = _folder() / f"{self._pid}-{state[1] if state else 0}-{next(_NUMBERS)}.json"
        self._workers: dict[int, PublishedWorker] = {}
        self._began = time.monotonic()
        self._replaced = -1
        self._write(self._began)

    def update(self) -> None:
        """Write down what has changed, if that is due; to be called after every answer."""
        now = time.monotonic()
        if now >= self._due or self._engine.pool.replaced != self._replaced:
            with contextlib.suppress(OSError):  # a full disk is no reason to end a training
                self._write(now)

    def _write(self, now: float) -> None:
        engine = self._engine
        self._due, self._replaced = now + _PERIOD, engine.pool.replaced
        self._workers = {worker.index: self._entry(worker) for worker in engine.pool.workers}
        stats = PublishedStats(
            format=_FORMAT, name=self._name, pid=self._pid, num_envs=engine.num_envs, began=self._began, at=now,
            time_waiting=engine.pool.time_waiting, resets=int(engine.pending.resets), restarts=int(engine.restarts),
            errors=len(engine.ledger.errors), workers=list(self._workers.values()),
        )  # fmt: skip
        new = self._path.with_suffix(".new")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
            json.dump(asdict(stats), file)
        new.rename(self._path)

    def _entry(self, worker: Any) -> PublishedWorker:
        index, first, last = worker.index, int(worker.rows[0]), int(worker.rows[-1])
        before, batch = self._workers.get(index), self._engine.batch
        times = batch.step_time[first : last + 1]
        slowest = int(times.argmax())
        state = process_state(worker.pid)
        return PublishedWorker(
            index, "caller" if worker.local else "process", worker.pid, state[1] if state else -1, first, last,
            restarts=0 if before is None else before.restarts + (before.pid != worker.pid),
            steps=float(batch.worker_steps[index]), seconds=float(batch.worker_time[index]),
            slowest_env=first + slowest if times[slowest] else -1, slowest_seconds=float(times[slowest]),
        )  # fmt: skip

    def close(self) -> None:
        """Remove the file; a forked child leaves it to the program."""
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
