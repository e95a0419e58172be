"""The file about an environment that failed: a header that can be read safely, and behind it a pickle.

The header is a line of JSON: which environment, what happened, with which versions, and the length and checksum of the rest.
Nothing is unpickled before it was read and found right, because a pickle runs what its bytes say.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import pickle
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import cloudpickle
import gymnasium
import numpy as np

from vecenv._version import __version__
from vecenv.errors import VecEnvError
from vecenv.link.messages import Op
from vecenv.shm.layout import Array, Tree

__all__ = [
    "LASTING", "RESETS", "Failed", "Header", "Message", "Record", "Unreadable", "digest", "own_part", "packed", "read",
    "read_header", "write",
]  # fmt: skip

_MAGIC: Final = b"vecenv flight record\n"
_FORMAT: Final = 1
_MOST_HEADER: Final = 2**20
RESETS: Final = (Op.RESET, Op.RESET_SOME, Op.REBUILD_SOME)
"""What begins an episode."""
LASTING: Final = (Op.SET_ATTR, Op.CALL, Op.EXEC, Op.CHECK, Op.LOAD)
"""What may change an environment for longer than an episode."""


class Unreadable(VecEnvError, ValueError):
    """A file is no flight record, is damaged or of another version, or cannot be replayed here; says why."""


class Message(NamedTuple):
    """What an environment's worker was asked, put as to a worker of this one alone.

    Attributes:
        place: Before which of its steps.
        op: What.
        payload: With what, pickled; ``None``: with nothing.
    """

    place: int
    op: Op
    payload: bytes | None


@dataclass(frozen=True, slots=True)
class Failed:
    """What happened.

    Attributes:
        how: ``"raised"``, ``"died"`` or ``"hung"``.
        text: The exception, or the end of the process, in a line.
        exitcode: Of the process, where it died; negative: the signal.
        seconds: What it was given, where it hung.
    """

    how: str
    text: str
    command: str
    exitcode: int | None = None
    seconds: float | None = None


@dataclass(slots=True)
class Record:
    """What a file holds.

    Attributes:
        row: Which environment.
        how: What its worker was given (:class:`vecenv.worker.main.WorkerPlan`).
        env_fn: What builds it, pickled; or why it cannot be.
        messages: In order.
        columns: By the name of a field of shared memory: actions, rewards and flags of each step, the latest last.
        actions: By the place of a step: its action, pickled, where it did not lie in shared memory.
        failed: ``None``: nothing, the file was asked for.
        steps_before: To be added to the place of a step for its number in the latest episode, which counts from 1.
        marks: How its observation looked before some of the steps.
        snapshot: Before which step and message it was saved, and its state; ``None``: there is none.
        why_no_snapshot: Why there is none, where there is a reason.
        path: Where the program imported from.
        spec: The registration of the environment, if it has one.
    """

    row: int
    how: Any
    env_fn: bytes | str
    messages: list[Message]
    columns: dict[str, Array]
    actions: dict[int, bytes]
    failed: Failed | None
    steps_before: int
    marks: list[tuple[int, bytes]]
    snapshot: tuple[int, int, Any] | None
    why_no_snapshot: str
    path: list[str] = field(default_factory=lambda: [os.path.abspath(entry) for entry in sys.path])
    spec: Any = None

    @property
    def steps(self) -> int:
        """How many there are."""
        return len(self.columns.get("rewards", ()))


@dataclass(frozen=True, slots=True)
class Header:
    """What is said of a file before it is opened.

    Attributes:
        env_id, env, episode, step: Of which environment it is, and when it failed.
        failed: What happened, in a line.
        written: When, in the local time of the machine that wrote it.
        versions: Package -> version.
        length, checksum: Of the rest.
    """

    env_id: str
    env: int
    episode: int
    step: int
    failed: str
    written: str
    versions: dict[str, str]
    length: int
    checksum: str
    format: int = _FORMAT

    def differences(self) -> list[str]:
        """Packages of which other versions are installed here, in words."""
        here = _versions(self.env_id)
        return [
            f"{name} {was} (here {here.get(name) or _version_of(name) or 'none'})"
            for name, was in self.versions.items()
            if was != (here.get(name) or _version_of(name))
        ]


def _version_of(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _versions(env_id: str) -> dict[str, str]:
    found = {
        "python": platform.python_version(), "vecenv": __version__, "gymnasium": gymnasium.__version__,
        "numpy": np.__version__,
    }  # fmt: skip
    spec = gymnasium.registry.get(env_id)
    if spec is not None and isinstance(spec.entry_point, str):
        module = spec.entry_point.partition(".")[0].partition(":")[0]
        for package in importlib.metadata.packages_distributions().get(module, ()):
            found.setdefault(package, importlib.metadata.version(package))
    return found


def packed(record: Record, env_id: str, row: int, episode: int, step: int) -> bytes:
    """The bytes of a file."""
    if record.how.registered is not None:  # memory of this process
        record.how = replace(record.how, registered=None)
    record.spec = gymnasium.registry.get(env_id)
    body: bytes = cloudpickle.dumps(record)
    failed = "nothing: it was asked for" if record.failed is None else record.failed.text
    written = datetime.now().astimezone().isoformat(timespec="seconds")
    header = {
        "format": _FORMAT, "env_id": env_id, "env": row, "episode": episode, "step": step, "failed": failed,
        "written": written, "versions": _versions(env_id), "length": len(body), "checksum": hashlib.sha256(body).hexdigest(),
    }  # fmt: skip
    return _MAGIC + json.dumps(header).encode() + b"\n" + body


def write(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_header(path: Path) -> tuple[Header, bytes]:
    """The header of a file, and the rest, which is whole.

    Raises:
        Unreadable: It is no flight record, of another format, or damaged.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise Unreadable(f"{path} is no flight record of vecenv")
        line = file.readline(_MOST_HEADER)
        body = file.read()
    try:
        known = json.loads(line)
        if known.get("format") != _FORMAT:
            raise Unreadable(f"{path} has format {known.get('format')!r}, and this version of vecenv reads {_FORMAT}")
        header = Header(**known)
    except (ValueError, TypeError, AttributeError) as error:
        if isinstance(error, Unreadable):
            raise
        raise Unreadable(f"{path} is damaged: its header cannot be read") from None
    if len(body) != header.length:
        raise Unreadable(f"{path} is cut short: {len(body)} of {header.length} bytes are there")
    if hashlib.sha256(body).hexdigest() != header.checksum:
        raise Unreadable(f"{path} is damaged: its bytes are not those that were written")
    return header, body


def read(header: Header, body: bytes) -> Record:
    """What a file holds. This runs what its bytes say.

    Raises:
        Unreadable: It needs something that cannot be imported here.
    """
    try:
        record = pickle.loads(body)
        assert isinstance(record, Record)
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise Unreadable(f"cannot be replayed, because {header.env_id} needs what is not here: {why}") from error
    if record.spec is not None:
        gymnasium.registry.setdefault(record.spec.id, record.spec)
    sys.path += [entry for entry in record.path if entry not in sys.path and os.path.exists(entry)]
    return record


def digest(observation: Any, tree: Tree | None) -> bytes:
    """Some bytes that tell observations apart; empty where they have no fixed size."""
    if tree is None:
        return b""
    found = hashlib.blake2b(digest_size=16)

    def add(leaf: Array) -> Array:
        found.update(np.ascontiguousarray(leaf).tobytes())
        return leaf

    tree.map(add, observation)
    return found.digest()


def own_part(op: Op, payload: bytes | None, rows: Sequence[int], row: int, first: int) -> tuple[Op, bytes | None] | None:
    """What a message to a worker says to one of its environments; ``None``: nothing.

    Args:
        op, payload: The message.
        rows: Which environments it is about.
        row: The one.
        first: The first of the worker's.
    """
    if payload is None or op in (Op.THAW, Op.TAKE):
        return op, payload
    if not payload:  # it could not be pickled
        return op, b""
    said, own = pickle.loads(payload), row - first
    if op in (Op.RESET, Op.RESET_SOME, Op.REBUILD_SOME):
        place = list(rows).index(row)
        seeds, options, *rest = said
        said = ([seeds[place]], options[place : place + 1] if isinstance(options, list) else options, *rest)
    elif op is Op.SET_ATTR:
        said = said[0], [said[1][own]]
    elif op is Op.SET_NEXT:
        if said[own] is None:
            return None
        said = [said[own]]
    elif op is Op.EXEC:
        if own not in said[0]:
            return None
        said = ([0], *said[1:])
    elif op is Op.CHECK:
        if not (fitting := [snapshot for k, snapshot in said if k == own]):
            return None
        said = [(0, fitting[0])]
    elif op is Op.LOAD:
        if own not in said:
            return None
        said = [0]
    return op, cloudpickle.dumps(said)
