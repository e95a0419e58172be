"""Figures of a running vector environment that other processes of the same user may read, as ``vecenv top`` does.

A program that asks for it holds a *card*: a memfd of a known name, with a description of the workers in JSON and a few
numbers that change with every answer. The counters of the workers are in the engine's own shared block all along, and the
card says where. A reader finds cards by looking through ``/proc/*/fd``, and reads both. So nothing listens, no thread runs,
no file is written, and nothing can be left behind by whatever end the program meets; an answer costs the program half a
microsecond more.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from vecenv.engine import Engine
from vecenv.shm.layout import Array
from vecenv.workers import AnyWorker, CallerWorker, ProcessWorker

__all__ = [
    "Live", "PublishedStats", "PublishedWorker", "StatsCard", "asked_for", "available", "has_counters", "process_state",
    "published",
]  # fmt: skip

_NAME: Final = "vecenv-top"
_LINK: Final = f"/memfd:{_NAME}"
_FORMAT: Final = 1
_LIVE: Final = struct.Struct("=5d")
_COUNTERS: Final = ("worker_time", "worker_steps", "step_time")


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
            "format": _FORMAT, "name": name, "pid": os.getpid(), "num_envs": engine.num_envs, "began": time.monotonic(),
            "arena": engine.arena.fileno(), "fields": {key: (fields[key].offset, fields[key].shape[0]) for key in _COUNTERS},
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


def _entry(worker: AnyWorker, before: PublishedWorker | None) -> PublishedWorker:
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
            OSError, ValueError, KeyError: It is gone, or being written, or of another version of vecenv.
        """
        card = path.read_bytes()
        about = json.loads(card[_LIVE.size :])
        if about["format"] != _FORMAT:
            raise ValueError(f"the card has format {about['format']}, this version reads {_FORMAT}")
        with path.with_name(str(about["arena"])).open("rb") as arena:
            counters = {name: _counter(arena.fileno(), *place) for name, place in about["fields"].items()}
        return cls(
            name=about["name"],
            pid=about["pid"],
            num_envs=about["num_envs"],
            began=about["began"],
            at=time.monotonic(),
            workers=[PublishedWorker(**worker) for worker in about["workers"]],
            live=Live(*_LIVE.unpack_from(card)),
            **counters,
        )


def _counter(arena: int, offset: int, count: int) -> Array:
    return np.frombuffer(os.pread(arena, 8 * count, offset), np.float64)


def published() -> Iterator[tuple[tuple[int, int], Path]]:
    """All cards of this user's processes: (pid, inode), which stays the same as long as the card does, and where it is."""
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # somebody else's, or gone
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor).startswith(_LINK):
                        yield (int(process.name), descriptor.stat().st_ino), descriptor
