"""Figures of a running vector environment that other processes of the same user may read, as ``vecenv top`` does.

A program that asks for it holds a *card*: a memfd of a known name, with a description of the workers in JSON and a few
numbers that change with every answer. The counters of the workers are in the engine's own shared block all along, and the
card says where. A reader finds cards by looking through ``/proc/*/fd``, and reads both. So nothing listens, no thread runs,
no file is written, and nothing can be left behind by whatever end the program meets; an answer costs the program half a
microsecond more.

A card is whatever another process wrote, of another version or for a joke: nothing in it is taken for granted.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import stat
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from vecenv.engine.engine import Engine
from vecenv.engine.handles import CallerWorker, ProcessWorker
from vecenv.engine.owed import Worker
from vecenv.shm.layout import Array

__all__ = [
    "BadCard", "Live", "PublishedStats", "PublishedWorker", "StatsCard", "asked_for", "available", "has_counters",
    "process_state", "published",
]  # fmt: skip

_NAME: Final = "vecenv-top"
_LINK: Final = f"/memfd:{_NAME}"
_FORMAT: Final = 1
_LIVE: Final = struct.Struct("=5d")
_COUNTERS: Final = ("worker_time", "worker_steps", "step_time")

# What a reader believes at most.
_LONGEST: Final = 16 << 20  # bytes of a card: 100,000 workers
_MOST: Final = 1 << 20  # environments or workers
_HIGHEST: Final = 1e15  # of any count, and seconds
_LARGEST_PID: Final = 1 << 22


def available() -> bool:
    """Whether this system has what cards are made of: Linux."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def has_counters(engine: Engine) -> bool:
    """Whether all workers count their steps in shared memory: they are on this machine."""
    return all(isinstance(worker, (CallerWorker, ProcessWorker)) for worker in engine.pool.workers)


def asked_for(engine: Engine) -> bool:
    """Whether the environment variable ``VECENV_TOP`` asks for a card, and there can be one."""
    return os.environ.get("VECENV_TOP", "0") not in ("", "0") and available() and has_counters(engine)


@dataclass(frozen=True, slots=True)
class Live:
    """Numbers that change with every answer.

    Attributes:
        answered: ``time.monotonic()`` of the latest answer, which is the same clock in all processes of a machine.
        time_waiting: Seconds the program has waited for workers.
        resets, restarts, errors: Counts.
    """

    answered: float
    time_waiting: float
    resets: float
    restarts: float
    errors: float


@dataclass(frozen=True, slots=True)
class PublishedWorker:
    """What is known of one worker.

    Attributes:
        index: Its row among the counters.
        kind: ``"process"``, or ``"caller"``: the program's own share.
        pid, started: The process, and when it started, in the kernel's ticks; -1 if it is gone already.
        first, last: Its environments.
        restarts: How often its process was replaced.
    """

    index: int
    kind: str
    pid: int
    started: int
    first: int
    last: int
    restarts: int


def process_state(pid: int) -> tuple[str, int] | None:
    """The kernel's letter for the state of a process, and when it started; ``None`` if there is none."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return words[0], int(words[19])
    return None


# --- the program's side ---------------------------------------------------------------------------


class StatsCard:
    """The card of one vector environment, there until :meth:`close`.

    Args:
        name: What ``vecenv top`` calls it.
        engine: Whose workers and counters it is about.
    """

    def __init__(self, name: str, engine: Engine) -> None:
        fields = engine.layout.fields
        self._about = {
            "format": _FORMAT, "name": str(name), "pid": os.getpid(), "num_envs": engine.num_envs, "began": time.monotonic(),
            "arena": engine.arena.fileno(),
            "fields": {key: (fields[key].offset, len(getattr(engine.batch, key))) for key in _COUNTERS},
        }  # fmt: skip
        self._engine = engine
        self._workers: dict[int, PublishedWorker] = {}
        self._block: mmap.mmap | None = None
        self._replaced = -1
        self.update()

    def update(self) -> None:
        """Write down what has changed; to be called after every answer."""
        engine, block = self._engine, self._block
        if block is None or engine.pool.replaced != self._replaced:
            block = self._describe()
        counts = engine.resets, engine.restarts, len(engine.ledger.errors)
        _LIVE.pack_into(block, 0, time.monotonic(), engine.pool.time_waiting, *counts)

    def _describe(self) -> mmap.mmap:
        """A card that says who the workers are now."""
        self._replaced = self._engine.pool.replaced
        before = self._workers
        self._workers = {worker.index: _entry(worker, before.get(worker.index)) for worker in self._engine.pool.workers}
        text = json.dumps({**self._about, "workers": [asdict(worker) for worker in self._workers.values()]}).encode()
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.truncate(descriptor, _LIVE.size + len(text))
            block = mmap.mmap(descriptor, _LIVE.size + len(text))  # keeps a descriptor of its own
        finally:
            os.close(descriptor)
        block[_LIVE.size :] = text
        self.close()
        self._block = block
        return block

    def close(self) -> None:
        """Take the card away."""
        if self._block is not None:
            self._block.close()
            self._block = None


def _entry(worker: Worker, before: PublishedWorker | None) -> PublishedWorker:
    kind = "caller" if worker.local else "process"
    state = process_state(worker.pid)
    started = state[1] if state else -1
    restarts = 0 if before is None else before.restarts + (before.pid != worker.pid)
    return PublishedWorker(worker.index, kind, worker.pid, started, worker.rows[0], worker.rows[-1], restarts)


# --- the reader's side ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PublishedStats:
    """What a card and its counters said at one time.

    Attributes:
        name, pid, num_envs: Of the program's vector environment.
        began, at: ``time.monotonic()`` when it began to publish, and when this was read.
        workers: Who its workers are.
        live: Its other numbers.
        worker_time, worker_steps: float64, seconds and steps spent inside environments, by the worker's index.
        step_time: float64 ``(num_envs,)``: seconds of each environment's latest sampled step.
    """

    name: str
    pid: int
    num_envs: int
    began: float
    at: float
    workers: list[PublishedWorker]
    live: Live
    worker_time: Array
    worker_steps: Array
    step_time: Array

    @classmethod
    def read(cls, path: Path) -> PublishedStats:
        """Read a card of :func:`published`.

        Raises:
            OSError: It is gone, or somebody else's.
            BadCard: It is being written, of another version of vecenv, or no card at all.
        """
        card = _contents(path, _LONGEST)
        about = _parsed(card)
        if about.get("format") != _FORMAT:
            raise BadCard(f"it is of another version of vecenv: this one reads format {_FORMAT}")
        num_envs = _integer(about, "num_envs", 1, _MOST)
        fields, listed = about.get("fields"), about.get("workers")
        if not isinstance(fields, dict) or not isinstance(listed, list):
            raise BadCard("its workers or their counters are missing")
        counters = _counters(path, about, fields, num_envs)
        return cls(
            name=_text(about, "name"),
            pid=_integer(about, "pid", 1, _LARGEST_PID),
            num_envs=num_envs,
            began=_number("began", about.get("began")),
            at=time.monotonic(),
            workers=[_worker(entry, len(counters["worker_time"]), num_envs) for entry in listed],
            live=Live(*(_number("live", value) for value in _LIVE.unpack_from(card))),
            **counters,
        )


class BadCard(ValueError):
    """What a descriptor with the name of a card holds is none that this version can read."""


def _contents(path: Path, most: int) -> bytes:
    size = _size(path, "it is no memory")
    if not _LIVE.size < size <= most:
        raise BadCard(f"it has {size:,} bytes")
    with path.open("rb") as file:
        return file.read(most)


def _size(path: Path, complaint: str) -> int:
    """Of a descriptor that is to be opened: opening a pipe would wait for a writer."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise BadCard(complaint)
    return about.st_size


def _parsed(card: bytes) -> dict[str, Any]:
    try:
        about = json.loads(card[_LIVE.size :])
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict):
        raise BadCard("it cannot be parsed")
    return about


def _integer(about: dict[str, Any], key: str, low: int, high: int) -> int:
    value = about.get(key)
    if type(value) is not int or not low <= value <= high:
        raise BadCard(f"its {key} is none")
    return value


def _number(key: str, value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 <= value <= _HIGHEST:
        raise BadCard(f"its {key} is none")
    return float(value)


def _text(about: dict[str, Any], key: str) -> str:
    value = about.get(key)
    if not isinstance(value, str):
        raise BadCard(f"its {key} is none")
    return value


def _worker(entry: Any, count: int, num_envs: int) -> PublishedWorker:
    if not isinstance(entry, dict):
        raise BadCard("one of its workers is none")
    first = _integer(entry, "first", 0, num_envs - 1)
    return PublishedWorker(
        index=_integer(entry, "index", 0, count - 1),
        kind=_text(entry, "kind"),
        pid=_integer(entry, "pid", -1, _LARGEST_PID),
        started=_integer(entry, "started", -1, 1 << 63),
        first=first,
        last=_integer(entry, "last", first, num_envs - 1),
        restarts=_integer(entry, "restarts", 0, 1 << 63),
    )


def _counters(path: Path, about: dict[str, Any], fields: dict[str, Any], num_envs: int) -> dict[str, Array]:
    """The counters, out of a descriptor of the program that is the card's own word: it is looked at before it is opened."""
    where = path.with_name(str(_integer(about, "arena", 0, 1 << 30)))
    try:
        _size(where, "its counters are no memory")
        with where.open("rb") as arena:
            found = {name: _counter(arena.fileno(), fields.get(name)) for name in _COUNTERS}
    except OSError as error:
        raise BadCard("its counters are gone") from error
    if len(found["step_time"]) != num_envs or len(found["worker_time"]) != len(found["worker_steps"]):
        raise BadCard("its counters are of others")
    return found


def _counter(arena: int, place: Any) -> Array:
    if not isinstance(place, list) or len(place) != 2:
        raise BadCard("its counters are nowhere")
    given = {"offset": place[0], "count": place[1]}
    offset, count = _integer(given, "offset", 0, 1 << 62), _integer(given, "count", 1, _MOST)
    values = np.frombuffer(os.pread(arena, 8 * count, offset)[: 8 * count], np.uint8)
    if len(values) != 8 * count:
        raise BadCard("its counters end too early")
    numbers = values.view(np.float64)
    if not (np.isfinite(numbers) & (numbers >= 0) & (numbers <= _HIGHEST)).all():
        raise BadCard("its counters are no numbers")
    return numbers


def published() -> Iterator[tuple[tuple[int, int], Path]]:
    """All cards of this user's processes: (pid, inode), which stays the same as long as the card does, and where it is."""
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # somebody else's, or gone
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor).removesuffix(" (deleted)") == _LINK:
                        yield (int(process.name), descriptor.stat().st_ino), descriptor
