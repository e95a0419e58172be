"""Publishes the statistics of a running vector environment in a file that ``vecenv top`` reads.

The small JSON file lies in a folder that only its user may enter. Readers send no requests to the program, so a program
that hangs is visible too. A file's name contains the id, the start time and the PID namespace of the process that wrote it,
so that the next program or reader can remove the files of processes that have ended. It ignores those of other containers.
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
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from vecenv.engine.observers import Observer, Rows
from vecenv.engine.stats import WorkerStats
from vecenv.system.cores import read_kernel_file
from vecenv.system.signals import suppress_os_errors

_FORMAT: Final = 2
_PERIOD_SECONDS: Final = 0.5  # between two writes
_MAX_FILE_BYTES: Final = 64 << 20  # readers reject larger files; 100,000 workers need less
_file_numbers: Final = itertools.count()


def is_supported() -> bool:
    """True on Linux, where the kernel reports the start time of a process."""
    return process_state(os.getpid()) is not None


def is_wanted() -> bool:
    """True if the environment variable ``VECENV_TOP`` is set, and this system supports these files."""
    return os.environ.get("VECENV_TOP", "0") not in ("", "0") and is_supported()


def process_state(pid: int) -> tuple[str, int] | None:
    """Return the letter for a process's state and its start time, from ``/proc``; ``None`` if it is not listed there."""
    with contextlib.suppress(IndexError, ValueError):
        words = read_kernel_file(f"/proc/{pid}/stat").rpartition(")")[2].split()
        return words[0], int(words[19])
    return None


@dataclass(frozen=True, slots=True)
class PublishedWorker:
    """The statistics of one worker in a file.

    Attributes:
        index: Its index.
        kind: ``"process"``, or ``"caller"`` for the environments that the program steps itself.
        pid, started: The id of the process, and its start time in kernel ticks (-1 if the process has ended).
        first, last: The first and the last of its environments.
        restarts: The number of times its process was replaced since the first write.
        steps, seconds: Steps of its environments, and the seconds spent in them.
        slowest_env, slowest_seconds: The environment that took longest in its latest sampled step, and the duration of that
            step; -1 and 0 before the first sample.
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
    """The contents of a file.

    Attributes:
        format: The version of the format.
        name, pid, num_envs: The name to show, the id of the program's process, and the number of environments.
        began, at: ``time.monotonic()`` when the counts began, and when the file was written. All processes on a machine
            share this clock.
        time_waiting: Seconds for which the program has waited for workers.
        resets, restarts, errors: Counts.
        workers: One entry per worker.
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
        """Read a file that :func:`find_files` yielded.

        Raises:
            OSError: It was removed.
            BadFile: It cannot be parsed, or another version of vecenv wrote it.
        """
        if not stat.S_ISREG(path.lstat().st_mode):  # opening a pipe would wait for a writer
            raise BadFile("it is not a file")
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES)
        try:
            data = json.loads(text)
            if data["format"] != _FORMAT:
                raise BadFile(f"it was written by another version of vecenv: this one reads format {_FORMAT}")
            workers = [_parse(PublishedWorker, entry) for entry in data["workers"]]
            stats: PublishedStats = _parse(cls, {**data, "workers": []}, workers=workers)
            return stats
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise error if isinstance(error, BadFile) else BadFile("it cannot be parsed") from None


class BadFile(ValueError):
    """A file in the folder that this version cannot read."""


def _parse(kind: type[Any], data: dict[str, Any], **parsed: Any) -> Any:
    """Build an object of this class from JSON. Numbers must be finite and at least -1; unknown names are ignored."""
    values = {}
    for field in fields(kind):
        values[field.name] = value = data[field.name]
        accepted = {"int": (int,), "float": (int, float), "str": (str,)}.get(str(field.type), (list,))
        if type(value) not in accepted or (accepted[0] is int and not (-1 <= value < 1 << 63 and math.isfinite(value))):
            raise BadFile(f"its {field.name} is invalid")
    return kind(**values | parsed)


# --- the folder ----------------------------------------------------------------------------------


def _candidate_folders() -> list[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    own = [Path(runtime, "vecenv")] if runtime and os.path.isabs(runtime) else []
    return [*own, Path(tempfile.gettempdir(), f"vecenv-{os.getuid()}")]


def _is_private_folder(folder: Path) -> bool:
    """True for a folder of this user that no other user may enter."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _make_folder() -> Path:
    """Return the folder for the files of this user, and create it if necessary.

    Raises:
        OSError: It cannot be created, or is open to other users.
    """
    for folder in _candidate_folders():
        with suppress_os_errors():
            folder.mkdir(mode=0o700, exist_ok=True)
            if _is_private_folder(folder):
                return folder
    tried = " and ".join(map(str, _candidate_folders()))
    raise OSError(f"publish_stats() found no folder for its file: {tried} cannot be created, "
                  "or are open to other users; set XDG_RUNTIME_DIR")  # fmt: skip


def _pid_namespace() -> str:
    """Return the number of this process's PID namespace: in another container, the same id belongs to another process."""
    with suppress_os_errors():
        return str(os.stat("/proc/self/ns/pid").st_ino)
    return "0"  # a kernel without namespaces


def find_files() -> Iterator[Path]:
    """Yield the files of this user's running programs, and remove those of programs that have ended."""
    for folder in _candidate_folders():
        with suppress_os_errors():
            for path in sorted(folder.iterdir()) if _is_private_folder(folder) else ():
                pid, _, rest = path.name.partition("-")
                is_ours = path.suffix in (".json", ".new") and path.stem.endswith(f"-{_pid_namespace()}")
                if not (pid.isdecimal() and is_ours):
                    continue
                state = process_state(int(pid))
                if state is None or not rest.startswith(f"{state[1]}-"):
                    path.unlink(missing_ok=True)
                elif path.suffix == ".json":
                    yield path


# --- the program's side ---------------------------------------------------------------------------


class StatsFile(Observer):
    """An observer that writes the file of one vector environment when results are returned, until :meth:`close`.

    Args:
        envs: The vector environment. Its ``stats()`` and ``worker_stats()`` are written.

    Raises:
        NotImplementedError: This system is not Linux.
        OSError: There is no folder for the file.
    """

    def __init__(self, envs: Any) -> None:
        if not is_supported():
            raise NotImplementedError("publish_stats() needs Linux; stats() works everywhere")
        list(find_files())  # removes the files of programs that have ended
        self._envs, self._name, self._pid = weakref.proxy(envs), "", os.getpid()
        state = process_state(self._pid)
        self._path = _make_folder() / f"{self._pid}-{state[1] if state else 0}-{next(_file_numbers)}-{_pid_namespace()}.json"
        self._workers: dict[int, PublishedWorker] = {}

    def publish(self, name: str) -> None:
        """Write the file, with the name that ``vecenv top`` shows. If it cannot be written, an earlier one remains."""
        if (folder := _make_folder()) != self._path.parent:  # the environment variable for it has changed
            self.close()
            self._path = folder / self._path.name
        self._write(name, time.monotonic())
        self._name = name

    def on_result(self, rows: Rows | None, result: tuple[Any, ...]) -> None:
        """Write the file if it is due."""
        now = time.monotonic()
        if now >= self._due:
            with suppress_os_errors():  # a full disk is no reason to end a training run
                self._write(self._name, now)

    def on_failure(self, rows: Sequence[int], error: Exception, *, worker_died: bool) -> str | None:
        """Make the file due at the next result, because a process may be replaced."""
        self._due = 0.0
        return None

    def _write(self, name: str, now: float) -> None:
        self._due = now + _PERIOD_SECONDS
        stats = self._envs.stats()
        self._workers = {worker.index: self._describe_worker(worker) for worker in self._envs.worker_stats()}
        published_stats = PublishedStats(
            format=_FORMAT, name=name, pid=self._pid, num_envs=self._envs.num_envs,
            began=now - stats["seconds"], at=now, time_waiting=stats["wait_fraction"] * stats["seconds"],
            resets=int(stats["resets"]), restarts=int(stats["restarts"]), errors=int(stats["errors"]),
            workers=list(self._workers.values()),
        )  # fmt: skip
        new = self._path.with_suffix(".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        try:
            (file,) = map(open, map(os.open, (new,), (flags,), (0o600,)), ("w",))  # no handler runs between the two calls
            with file:
                json.dump(asdict(published_stats), file)
            new.rename(self._path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        if self._envs.closed:  # by a signal handler, meanwhile
            self.close()

    def _describe_worker(self, worker: WorkerStats) -> PublishedWorker:
        before, state = self._workers.get(worker.index), process_state(worker.pid)
        return PublishedWorker(
            worker.index, "caller" if worker.in_this_process else "process", worker.pid, state[1] if state else -1,
            first=worker.envs[0], last=worker.envs[-1],
            restarts=0 if before is None else before.restarts + (before.pid != worker.pid),
            steps=worker.steps, seconds=worker.seconds,
            slowest_env=-1 if worker.slowest_env is None else worker.slowest_env, slowest_seconds=worker.slowest_seconds,
        )  # fmt: skip

    def close(self) -> None:
        """Remove the file, unless this is a forked child. Idempotent."""
        if os.getpid() == self._pid:
            with suppress_os_errors():
                self._path.unlink(missing_ok=True)
