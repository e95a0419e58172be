"""The file about an environment that failed, and its replay: the environment is asked again what the file says it was asked.

The file is a header that can be read safely, and behind it a pickle. The header is a line of JSON: which environment, what
happened, with which versions, and the length and checksum of the rest. Nothing is unpickled before it was read and found
right, because a pickle runs what its bytes say.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import os
import pickle
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import cloudpickle
import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv._version import __version__
from vecenv.errors import VecEnvError
from vecenv.link.messages import Failure, Op
from vecenv.shm.layout import Array, Layout, Tree
from vecenv.state.snapshots import version_of
from vecenv.worker.main import answer, make_rows

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
        known = _versions(self.env_id)
        here = {name: known.get(name) or version_of(name) for name in self.versions}
        return [f"{name} {was} (here {here[name] or 'none'})" for name, was in self.versions.items() if was != here[name]]


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
    checksum = hashlib.sha256(body).hexdigest()
    header = Header(env_id, row, episode, step, failed, written, _versions(env_id), len(body), checksum)
    return _MAGIC + json.dumps(asdict(header)).encode() + b"\n" + body


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
    except Unreadable:
        raise
    except (ValueError, TypeError, AttributeError):
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
    if op in RESETS:
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


# -- replay -------------------------------------------------------------------------------------------------------------

AGAIN, DIFFERENT, CANNOT = "happened again", "did not happen again", "cannot be replayed"


class ReplayResult(NamedTuple):
    """What came of a replay: one of three things, and the sentence that says it."""

    which: str
    text: str

    @classmethod
    def of(cls, recorded: Failed | None, where: str, what: str, *, same: bool, more: str = "") -> ReplayResult:
        """Of a replay that ended in a failure; ``same``: it is the one that was recorded."""
        if same:
            return cls(AGAIN, f"happened again {where}: {what}{more}")
        was = "nothing had failed" if recorded is None else f"recorded was: {recorded.text}"
        return cls(DIFFERENT, f"did not happen again: another failure {where}: {what} ({was}){more}")


class Replay:
    """Replays a record in this process.

    Args:
        header, record: What a file holds.
        begin: With the ``"latest"`` reset that has a seed, with the ``"first"`` one, or with the ``"snapshot"``.
        change: What is made of the environment before anything is asked of it.

    Attributes:
        place: How many steps of the record are made, or were before its beginning.
        at: The number of the step that is being made, in the latest episode; negative: in an earlier one.
        env: The environment.
        failure: The exception that it raised.
        result: What came of it, at the end of :meth:`run`.

    Raises:
        Unreadable: It cannot be replayed; says why.
    """

    def __init__(
        self, header: Header, record: Record, *, begin: str = "latest", change: Callable[[Any], Any] | None = None
    ) -> None:
        self.header, self.record = header, record
        self.failure: BaseException | None = None
        made = self._env_fn()
        self._make = made if change is None else lambda: change(made())
        self.result: ReplayResult | None = None
        self._snapshot: Any = None
        self._marks = dict(record.marks)
        self._before, self._messages, self.place = self._start(begin)
        self._different = ""
        self._seqs = itertools.count(1)
        self._build()

    def _env_fn(self) -> Callable[[], Any]:
        blob = self.record.env_fn
        if isinstance(blob, str):
            raise Unreadable(f"cannot be replayed, because {blob}")
        try:
            made: Callable[[], Any] = pickle.loads(blob)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise Unreadable(f"cannot be replayed, because what builds {self.header.env_id} is not here: {text}") from error
        return made

    def _start(self, begin: str) -> tuple[list[Message], list[Message], int]:
        """What is to be said before, what follows, and the first step."""
        record, messages = self.record, self.record.messages
        if begin == "snapshot":
            if record.snapshot is None:
                why = record.why_no_snapshot or "a replay from the reset takes less than five seconds"
                raise Unreadable(f"cannot be replayed from a snapshot, because there is none: {why}")
            place, said, self._snapshot = record.snapshot
            self._marks = {at: mark for at, mark in record.marks if at > place}
            return [], messages[said:], place
        starts = [start for number in range(len(messages)) if (start := self._start_at(number)) is not None]
        if not starts and record.snapshot is not None:
            return self._start("snapshot")
        if not starts:
            why = f", and no snapshot ({record.why_no_snapshot})" if record.why_no_snapshot else ""
            raise Unreadable(f"cannot be replayed, because the record holds no reset with a seed any more{why}")
        return starts[0 if begin == "first" else -1]

    def _start_at(self, number: int) -> tuple[list[Message], list[Message], int] | None:
        """How to begin with a message: what is to be said before, what follows, and the first step; ``None``: not at all."""
        messages = self.record.messages
        message = messages[number]
        if any(later.op is Op.THAW for later in messages[number:]):
            return None
        before = [one for one in messages[:number] if one.op in LASTING or self._waits(one, message.place)]
        if message.op is Op.TAKE:  # a spare worker's episode, which begins in the next step
            begin = Message(message.place, Op.RESET, pickle.dumps(([pickle.loads(message.payload or b"")], None)))
            return [*before, begin], messages[number + 1 :], message.place + 1
        if message.op not in RESETS or not message.payload or pickle.loads(message.payload)[0][0] is None:
            return None
        return [] if message.op is Op.REBUILD_SOME else before, messages[number:], message.place

    def _waits(self, message: Message, until: int) -> bool:
        """Whether a message is about an automatic reset that has not come before step ``until``."""
        if message.op is not Op.SET_NEXT:
            return False
        record, late = self.record, int(self.record.how.autoreset_mode is AutoresetMode.NEXT_STEP)
        none = np.zeros(0, np.bool_)
        over = record.columns.get("terminations", none) | record.columns.get("truncations", none)
        by_caller = {one.place for one in record.messages if one.op in RESETS}
        return not any(over[at] and at + late not in by_caller for at in range(max(message.place - late, 0), until - late))

    def _build(self) -> None:
        record, plan = self.record, self.record.how
        row, known = record.row, plan.layout
        layout = Layout.of(known.observations, known.actions, row + 1, 1, final=known.final, spares=int(plan.ahead))
        self._plan = replace(plan, layout=layout, registered=None, env_threads=1, overlaps=False)
        self._batch = layout.view(bytearray(layout.size))
        self._rows = make_rows([self._make], row, 0, self._plan, self._batch)
        self._rows.use_generators(plan.generators)

    @property
    def env(self) -> Any:
        return self._rows.envs[0]

    @property
    def at(self) -> int:
        return self.place + 1 + self.record.steps_before

    @property
    def action(self) -> Any:
        """What the next step is given."""
        sent = self.record.actions.get(self.place)
        if sent is not None:
            return pickle.loads(sent)
        assert self._batch.actions is not None
        for index, leaf in enumerate(self._batch.actions):
            leaf[self.record.row] = self.record.columns[f"actions/{index}"][self.place]
        return self._rows.actions(None)[0]

    @property
    def fails_in_step(self) -> bool:
        """What happened came in the last step, and not in a reset or another call."""
        failed = self.record.failed
        return failed is not None and failed.command in ("step", "recv")

    def run(self, until: int | None = None) -> Iterator[int]:
        """Replay; yields the number of each step before it is made, and 0 before each message. Ends with :attr:`result`.

        Args:
            until: The number of the step in the latest episode to stop before.
        """
        record = self.record
        failures, _ = self._rows.build()
        if failures:
            if isinstance(failures[0].error, Unreadable):
                raise failures[0].error
            self._failed(failures, "while it was built")
            return
        if self._snapshot is not None:
            yield 0
            self._load(self._snapshot)
        for message in self._before:
            yield 0
            self._say(message)
        messages = list(self._messages)
        while self.result is None:
            while messages and messages[0].place <= self.place:
                yield 0
                last = len(messages) == 1 and self.place == record.steps
                failures = self._say(messages.pop(0))
                if failures and (last or any(failure.fatal for failure in failures)):
                    self._failed(failures, "in the last call" if last else f"before step {self.at}")
                    return
            if self.place in self._marks:
                self._compare(self._marks[self.place])
            if self.place == record.steps or (until is not None and 0 < until <= self.at):
                break
            yield self.at
            failures = self._step()
            if failures:
                self._failed(failures, f"at step {self.at}")
                return
            self.place += 1
        self._ended(until)

    def _load(self, snapshot: Any) -> None:
        for op, payload in ((Op.CHECK, [(0, snapshot)]), (Op.LOAD, [0])):
            if failures := answer(self._rows, op, next(self._seqs), payload).failures:
                text = failures[0].text
                raise Unreadable(f"cannot be replayed from its snapshot, because that does not fit here: {text}")

    def _say(self, message: Message) -> list[Failure]:
        if message.payload == b"":
            raise Unreadable(f"cannot be replayed, because what a {message.op.name.lower()} was given cannot be pickled")
        given = None if message.payload is None else pickle.loads(message.payload)
        if message.op is Op.TAKE:
            return self._rows.set_next(next(self._seqs), [(given, None)]).failures
        self._batch.requested[self.record.row] = seq = next(self._seqs)
        return answer(self._rows, message.op, seq, given).failures

    def _step(self) -> list[Failure]:
        record, row, place = self.record, self.record.row, self.place
        out = self._rows.step(next(self._seqs), None, [self.action])
        if out.failures or (place == record.steps - 1 and self.fails_in_step):
            return out.failures
        batch = self._batch
        for name in ("rewards", "terminations", "truncations"):
            came, wanted = getattr(batch, name), record.columns[name][place]
            if came[row].tobytes() != wanted.tobytes() and not self._different:
                self._different = f"step {self.at}: {name[:-1]} {came[row]!s}, recorded was {wanted!s}"
        return []

    def _compare(self, wanted: bytes) -> None:
        tree, leaves = self._plan.layout.observations, self._batch.observations
        if tree is None or leaves is None or self._different or not wanted:
            return
        if digest(tree.build(iter([leaf[self.record.row] for leaf in leaves])), tree) != wanted:
            self._different = f"step {self.at}: the observation before it is another"

    def _failed(self, failures: list[Failure], where: str) -> None:
        """The environment raised."""
        failed, text = self.record.failed, failures[0].text
        error = failures[0].error
        self.failure = error if isinstance(error, BaseException) else None
        first = f"; first difference from the record at {self._different}" if self._different else ""
        same = failed is not None and failed.how == "raised" and text == failed.text
        self.result = ReplayResult.of(failed, where, text, same=same, more=first)

    def _ended(self, until: int | None) -> None:
        """The end was reached, or the step to stop before."""
        record, different = self.record, f"first difference from the record at {self._different}"
        which = DIFFERENT if self._different or record.failed is not None else AGAIN
        steps = f"all {record.steps} steps" if record.steps != 1 else "its one step"
        if until is not None and self.place < record.steps:
            which = DIFFERENT if self._different else AGAIN
            text = f"stopped before step {self.at}: {different if self._different else 'all as recorded'}"
        elif self._different:
            text = f"did not happen again; {different}"
        elif record.failed is None:
            text = f"nothing had failed, and {steps} gave what was recorded"
        else:
            text = f"did not happen again, though {steps} gave what was recorded"
        self.result = ReplayResult(which, text)

    def close(self) -> None:
        """Close the environment."""
        self._rows.close()
