"""Reads and writes flight records, which are files that describe failed environments.

A file consists of a header and a pickle. A pickle can run code; the header can be read safely. It is a line of JSON: the
environment, the failure, the versions of packages, and the length and checksum of the pickle, which are verified before
anything is unpickled.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pickle
import platform
import re
import secrets
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import cloudpickle
import gymnasium
import numpy as np

from vecenv._version import __version__
from vecenv.errors import VecEnvError
from vecenv.link.envs import WorkerPlan
from vecenv.shm.layout import Array
from vecenv.state.snapshots import Snapshot, package_version
from vecenv.system.signals import suppress_os_errors

SUFFIX: Final = ".vecenv"
LASTING: Final = frozenset({"set_attr", "call", "exec_func", "load"})
"""Calls with an effect that may outlast an episode."""
KILLED: Final = -9
"""The exit code of a process that SIGKILL has ended. On Windows, the module ``signal`` has no ``SIGKILL``."""
_MAGIC: Final = b"vecenv flight record\n"
_FORMAT: Final = 6
_MAX_HEADER_BYTES: Final = 2**20
_MAX_FAILED_CHARACTERS: Final = 10_000  # in the header; the record has the whole text
_RUN_ID: Final = secrets.token_hex(8)
"""Identifies this run of the program in the names of failures. A process id would not: ids repeat, as in containers."""
_RUNNING_ENV: Final = re.compile(r"env (\d+), of envs (\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)")  # see `errors.envs_text`


class UnreadableRecord(VecEnvError, ValueError):
    """A file that is not a valid flight record of this version, or cannot be replayed here. The text gives the reason."""


class Message(NamedTuple):
    """A request to the environment other than a step.

    Attributes:
        place: Index of the step that follows; -1 if steps or messages between the two are no longer recorded.
        name: ``"reset"``, or the ``name`` passed to :meth:`vecenv.Observer.on_call`.
        arguments: Arguments for this environment; ``None`` if they cannot be pickled.
    """

    place: int
    name: str
    arguments: tuple[Any, ...] | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The failure of an environment.

    Attributes:
        how: ``"raised"``, ``"died"`` or ``"hung"``.
        text: The class and text of the exception, or how the process ended.
        exitcode: Exit code of the process, if it has ended; the negative signal number if a signal killed it.
        seconds: The time limit, if it hung.
    """

    how: str
    text: str
    exitcode: int | None = None
    seconds: float | None = None


@dataclass(slots=True)
class Record:
    """The content of a flight record.

    Attributes:
        row: Index of the environment.
        plan: The settings of its worker.
        env_fn: The pickled function that builds the environment, or the reason why it cannot be pickled.
        requests: A pickled pair: the list of :class:`Message`, and a dict from indices of steps to the actions that are not
            in ``columns``.
        columns: Name -> the actions, rewards (nan if the result was not returned) or flags of all steps, in order and in a
            small dtype that holds them exactly.
        failed: The failure; ``None`` if the file was written on request.
        steps_before: The number of a step in the latest episode minus its number in this record (counted from 1).
        snapshot: (index of the next step, index of the next message, state); ``None`` if there is none.
        why_no_snapshot: The reason why no snapshots are taken; empty if they are taken when a replay would take long.
        lacks_calls: True if some calls with a lasting effect are no longer recorded.
        restarted: True if, in next-step mode, the environment replaced a failed one within a step: its first step is then an
            automatic reset.
        spec: The registration of the environment, if it has one.
    """

    row: int
    plan: WorkerPlan
    env_fn: bytes | str
    requests: bytes
    columns: dict[str, Array]
    failed: Failed | None
    steps_before: int
    snapshot: tuple[int, int, Snapshot] | None
    why_no_snapshot: str
    lacks_calls: bool
    restarted: bool
    spec: Any = None

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.columns["rewards"])


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file, which is read without unpickling.

    Attributes:
        env_id, env, episode, step: The environment, and the episode and step of its failure, or the latest if none.
        failed: The text of the failure, at most 10,000 characters.
        failure: The name of the failure, common to all files about it; empty if the file was written on request.
        written: The time of writing, in the time zone of the machine that wrote it.
        versions: Package -> version.
        length, checksum: Length in bytes and SHA-256 checksum of the rest of the file.
        path: ``sys.path`` of the program.
    """

    env_id: str
    env: int
    episode: int
    step: int
    failed: str
    failure: str
    written: str
    versions: dict[str, str]
    length: int
    checksum: str
    path: list[str] = field(default_factory=lambda: [os.path.abspath(entry) for entry in sys.path])
    format: int = _FORMAT

    @property
    def other_running_env(self) -> int | None:
        """The environment that was running when the worker failed; ``None`` if it is unknown, or is the recorded one."""
        found = running_env(self.failed, self.env)
        return None if found is None or found[0] == self.env else found[0]

    def differences(self) -> list[str]:
        """List the packages that have another version here, or are missing."""
        here = {name: platform.python_version() if name == "python" else package_version(name) for name in self.versions}
        versions = self.versions.items()
        return [f"{name} {recorded} (here {here[name] or 'none'})" for name, recorded in versions if recorded != here[name]]


@functools.cache
def _versions(env_id: str) -> dict[str, str]:
    """Return the versions of an environment's packages. Cached, as reading a package's metadata takes milliseconds."""
    versions = {
        "python": platform.python_version(), "vecenv": __version__, "gymnasium": gymnasium.__version__,
        "numpy": np.__version__,
    }  # fmt: skip
    spec = gymnasium.registry.get(env_id)
    if spec is not None and isinstance(spec.entry_point, str):
        module = spec.entry_point.partition(".")[0].partition(":")[0]
        if version := package_version(module):
            versions.setdefault(module, version)
    return versions


def new_failure_name() -> str:
    """Return a unique name for a failure. Names from the same run of the program share a prefix."""
    return f"{_RUN_ID}-{secrets.token_hex(8)}"


def pack(record: Record, env_id: str, episode: int, step: int, failure: str) -> bytes:
    """Return the content of the file for a record. ``failure`` is the name of the failure."""
    record.spec = gymnasium.registry.get(env_id)
    body: bytes = cloudpickle.dumps(record)
    failed = "no failure (written on request)" if record.failed is None else record.failed.text[:_MAX_FAILED_CHARACTERS]
    written = datetime.now().astimezone().isoformat(timespec="seconds")
    checksum = hashlib.sha256(body).hexdigest()
    header = Header(env_id, record.row, episode, step, failed, failure, written, _versions(env_id), len(body), checksum)
    return _MAGIC + json.dumps(asdict(header)).encode() + b"\n" + body


def unused_path(path: Path) -> Path:
    """Return ``path``, or if it exists, the first free path with ``-2``, ``-3``, ... before its suffix."""
    number, candidate = 1, path
    while os.path.lexists(candidate):
        number += 1
        candidate = path.with_name(f"{path.name.removesuffix(SUFFIX)}-{number}{SUFFIX}")
    return candidate


def write(path: Path, content: bytes) -> None:
    """Write a file atomically, readable only by its owner. A link at ``path`` is replaced, not followed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, unfinished = tempfile.mkstemp(prefix=".vecenv-", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):  # a signal handler raised after it had been renamed
            os.unlink(unfinished)
        raise


def remove_old(folder: Path, keep: int, latest: Sequence[Path]) -> int:
    """Remove a folder's oldest files until ``keep`` are left. Files that cannot be removed stay.

    Files about environments that only shared a worker with the failed one are removed first, as they do not fail again.

    Args:
        folder: The folder.
        keep: Maximum number of files, where ``latest`` count as one.
        latest: Files about the latest failure, which stay.

    Returns:
        The number of removed files that another run of the program wrote.
    """
    found: list[tuple[bool, int, str, bool]] = []
    with suppress_os_errors(), os.scandir(folder) as entries:
        for entry in entries:
            with suppress_os_errors():  # another program may have removed it
                if entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False) and Path(entry) not in latest:
                    modified, is_own, is_foreign = entry.stat(follow_symlinks=False).st_mtime_ns, True, False
                    with contextlib.suppress(UnreadableRecord), open(entry.path, "rb") as file:
                        header = _parse_header(file, entry.path)
                        is_own = header.other_running_env is None
                        is_foreign = bool(header.failure) and not header.failure.startswith(_RUN_ID)
                    found.append((is_own, modified, entry.path, is_foreign))
    removed_foreign = 0
    for _, _, path, is_foreign in sorted(found)[: max(len(found) + bool(latest) - keep, 0)]:
        with suppress_os_errors():
            os.unlink(path)
            removed_foreign += is_foreign
    return removed_foreign


def running_env(text: str, env: int) -> tuple[int, list[int]] | None:
    """Return the environment that was running in the worker of ``env``, and all environments of that worker.

    Both are in messages about workers that died or hung; ``None`` if the text names no such worker.

    Args:
        text: The message of a worker's death, or of a hang.
        env: Index of an environment.
    """
    for running, listed in _RUNNING_ENV.findall(text):
        spans = [span.split("-") for span in listed.split(", ")]
        envs = [row for span in spans for row in range(int(span[0]), int(span[-1]) + 1)]
        if env in envs:
            return int(running), envs
    return None


def newest_files(folder: Path) -> list[tuple[Path, Header]]:
    """Return the readable files of a folder with their headers, newest first."""
    found: list[tuple[int, Path, Header]] = []
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError, UnreadableRecord):
            found.append((path.stat().st_mtime_ns, path, read_header(path)[0]))
    return [(path, header) for _, path, header in sorted(found, key=lambda each: each[0], reverse=True)]


def read_header(path: Path) -> tuple[Header, bytes]:
    """Return the header of a file and the rest of its bytes, after verifying their checksum.

    Raises:
        UnreadableRecord: It is not a flight record, has another format, or is damaged.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        header = _parse_header(file, path)
        body = file.read()
    if len(body) != header.length:
        raise UnreadableRecord(f"{path} is truncated: it has {len(body)} of {header.length} bytes")
    if hashlib.sha256(body).hexdigest() != header.checksum:
        raise UnreadableRecord(f"{path} is damaged: its bytes are not those that were written")
    return header, body


def _parse_header(file: BinaryIO, path: str | Path) -> Header:
    """Read the header at the beginning of an open file; ``path`` names it in errors."""
    if file.read(len(_MAGIC)) != _MAGIC:
        raise UnreadableRecord(f"{path} is not a flight record of vecenv")
    try:
        fields = json.loads(file.readline(_MAX_HEADER_BYTES))
        if fields.get("format") != _FORMAT:
            raise UnreadableRecord(f"{path} has format {fields.get('format')!r}, and this version of vecenv reads {_FORMAT}")
        return Header(**fields)
    except UnreadableRecord:
        raise
    except (ValueError, TypeError, AttributeError):
        raise UnreadableRecord(f"{path} is damaged: its header cannot be read") from None


def read(header: Header, body: bytes) -> Record:
    """Unpickle the content of a file, which can run code. Add the recorded ``sys.path`` and registration to this process.

    Raises:
        UnreadableRecord: Unpickling fails, because a module is missing for example.
    """
    sys.path += [entry for entry in header.path if entry not in sys.path and os.path.exists(entry)]
    try:
        record = pickle.loads(body)
        assert isinstance(record, Record)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        need = f"{header.env_id} needs something that cannot be imported here"
        raise UnreadableRecord(f"cannot be replayed, because {need}: {reason}") from error
    if record.spec is not None:
        gymnasium.registry.setdefault(record.spec.id, record.spec)
    return record
