"""Keeps what environments were asked, and writes a file about each that fails.

A *tick* is the answer to a step: one copy of the piece of shared memory that holds actions, rewards and flags of all
environments. Ticks lie in blocks, of which the oldest is used again where all take too much memory.
A *message* is anything else that a worker was asked (reset, set_attr, a call, a load), as it was pickled for the worker.

What is recorded is noted when an answer is looked at. That may happen again after an interruption: the same answer is then
written to the same place.
"""

from __future__ import annotations

import os
import pickle
import re
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import cloudpickle
import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.errors import NotRestorable, VecEnvError
from vecenv.front.arguments import any_seed
from vecenv.link.messages import Op, decode
from vecenv.recording.file import LASTING, RESETS, Failed, Message, Record, digest, own_part, packed, write
from vecenv.shm.layout import Array
from vecenv.system.uninterrupted import Uninterrupted

_MEMORY: Final = 128 * 2**20
"""Bytes that ticks may take."""
_AT_ONCE: Final = 32 * 2**20
"""Of these, the ones that are taken before the first step."""
_BLOCK: Final = 512
_MOST_MESSAGES: Final = 10_000
_SHARE: Final = 0.002
"""Of the time, for snapshots."""
_LONG_REPLAY: Final = 5.0
"""Seconds of one environment: there are snapshots where a replay would take longer. The first one has a price that stays:
Python up to 3.12 finds attributes of an object more slowly once its ``__dict__`` was read; 64 CartPoles step 5 % slower."""
_REPEATED: Final = {*RESETS, *LASTING, Op.SET_NEXT}


@dataclass(frozen=True, slots=True)
class FlightRecorder:
    """Where failures are recorded, for ``record_failures=``; see ``docs/recording.md``.

    Args:
        folder: Is made where there is none.
        snapshot_every: Environments that can be saved are, after that many steps at the earliest: where a replay from the
            reset would take more than five seconds, or its steps would be dropped; and in at most 0.2 % of the time.
            ``None``: never.
        keep: At most that many files; the oldest go first, and never those of the latest failure.

    Raises:
        ValueError: An argument has no meaning.
    """

    folder: str | os.PathLike[str]
    snapshot_every: int | None = 1000
    keep: int = 20

    def __post_init__(self) -> None:
        every = 1 if self.snapshot_every is None else self.snapshot_every
        for name, value in (("snapshot_every", every), ("keep", self.keep)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise ValueError(f"`{name}` must be an int from 1 on, got {value!r}")
        if not isinstance(self.folder, (str, os.PathLike)):
            raise ValueError(f"`folder` must be a path, got {self.folder!r}")

    @classmethod
    def of(cls, option: Any) -> FlightRecorder | None:
        """From what ``record_failures=`` may be: a folder, one of these, or ``None``."""
        if option is None or isinstance(option, cls):
            return option
        if isinstance(option, (str, os.PathLike)):
            return cls(option)
        raise ValueError(f"`record_failures` must be None, a folder or a vecenv.FlightRecorder, got {option!r}.")


class _Block:
    """Some ticks.

    Attributes:
        first: The number of the first.
        bytes: A piece of shared memory a tick.
        ticks: The same, by the names of its fields: ``(ticks, n, ...)``.
        stepped: bool ``(ticks, n)``: which environments each is about; ``None``: all of them.
        actions: By tick, counted from the first: what workers were sent about rows, where actions do not lie in memory.
    """

    def __init__(self, first: int, memory: memoryview, tick: np.dtype[Any]) -> None:
        self.first, self.bytes, self.ticks = first, memory, np.frombuffer(memory, tick)
        self.stepped: Array | None = None
        self.actions: dict[int, list[tuple[Sequence[int], bytes]]] = {}

    def about(self, at: int, rows: Sequence[int], num_envs: int) -> None:
        """Tick ``at`` is about these environments only."""
        if self.stepped is None:
            self.stepped = np.ones((_BLOCK, num_envs), np.bool_)
        self.stepped[at] = False
        self.stepped[at, rows] = True


class _Point(NamedTuple):
    """How far it had got: ticks, and seconds in environments."""

    tick: int
    seconds: float


class _Heard(NamedTuple):
    """A message: before which tick it came, what it was, about which environments, and the first of the worker's.

    :attr:`Op.SAVE` stands for snapshots of all environments that were taken there; its payload is a digest of each
    observation.
    """

    tick: int
    key: Any
    op: Op
    rows: Sequence[int]
    first: int
    payload: Any


class _Saved(NamedTuple):
    """The latest snapshots of all environments."""

    point: _Point
    heard: _Heard  # what stands for them among the messages
    snapshots: Sequence[Any]


class Recorder:
    """Records one vector environment.

    Args:
        options: What the program asked for.
        env_fns: What builds the environments.
        env_id: What they are called.
        layout, buffer: The shared memory.
        how: What a worker is given, for the replay: the same for all environments.
        save: A weak reference to what takes snapshots of all environments.
        seconds: How long was spent in environments so far, of all workers.
    """

    def __init__(
        self,
        options: FlightRecorder,
        env_fns: Sequence[Callable[[], Any]],
        env_id: str,
        layout: Any,
        buffer: Any,
        how: Any,
        save: weakref.WeakMethod[Callable[[], list[Any]]],
        seconds: Callable[[], float],
    ) -> None:
        self.due = False
        """A snapshot is to be taken before the next step."""
        self.limits: dict[int, float] = {}
        """By pid, of workers that were ended because they hung: after how many seconds."""
        self.parcels: list[tuple[int, str, bytes]] | None = None
        """On a host, in place of files: environment, path and content, for the caller to write."""
        self.first_row = 0
        """On a host: what the caller calls the first environment."""
        self._options, self._env_fns, self._env_id = options, env_fns, env_id
        self._folder = Path(options.folder).absolute()
        self._how, self._save, self._seconds, self._layout = how, save, seconds, layout
        self._num_envs = layout.num_envs
        self._size = layout.recorded
        fields = {name: field for name, field in layout.fields.items() if field.offset < layout.recorded}
        self._tick = np.dtype({
            "names": list(fields), "formats": [(field.dtype, field.shape) for field in fields.values()],
            "offsets": [field.offset for field in fields.values()], "itemsize": layout.recorded,
        })  # fmt: skip
        self._region = memoryview(buffer).cast("B")[: self._size]
        self._last: tuple[Any, int] = (None, -1)  # the latest tick: of which answer, and its number
        self._ticked: set[Any] = set()  # answers by row that have a tick
        self._blocks: list[_Block] = []
        self._heard: list[_Heard] = []
        self._seeded: dict[int, _Point] = {}  # when rows had their latest seed
        self._saved: _Saved | None = None
        self._why_not_saved = "" if options.snapshot_every else "snapshot_every is None"
        self._most = max(2, _MEMORY // (_BLOCK * self._size))  # blocks
        self._unused = self._touched(max(1, _AT_ONCE // (_BLOCK * self._size)))
        self._save_at = options.snapshot_every or 1 << 62
        self._not_before = 0.0
        self._before = np.zeros((2, self._num_envs), np.int64)  # episodes and steps of the latest, when all that was dropped

    def forget(self) -> None:
        """Let go of the shared memory."""
        self._region.release()
        self._seconds = float

    # -- what was asked ---------------------------------------------------------------------------------------------------

    def stepped(self, key: Any) -> None:
        """A step of all environments was answered, and their actions lie in shared memory."""
        last, at = self._last
        if key != last:
            at += 1
            if at % _BLOCK == 0:
                self._begin_block(at)
            if at >= self._save_at:
                self.due = True
            self._last = key, at
        began = at % _BLOCK * self._size
        self._blocks[-1].bytes[began : began + self._size] = self._region

    def answered(self, request: Any, index: int | None = None) -> None:
        """Workers have answered a request.

        Args:
            request: See :class:`vecenv.engine.pending.Request`.
            index: Only that worker; its answers are looked at one by one.
        """
        if request.parts is None:  # a step of all environments
            self.stepped(request.seq)
            return
        parts = list(request.parts.values()) if index is None else [request.parts[index]]
        key = request.seq, index
        stepped = [part for part in parts if part.op in (Op.STEP, Op.STEP_SOME)]
        if stepped and key not in self._ticked:
            self.stepped(key)
            block, at = self._blocks[-1], self._last[1] % _BLOCK
            block.about(at, [row for part in stepped for row in part.rows], self._num_envs)
            if actions := [(part.rows, sent) for part in stepped if (sent := _pickled(part)) is not None]:
                block.actions[at] = actions
            if index is not None:
                self._ticked.add(key)
        if index is not None and len(self._ticked) > _MOST_MESSAGES:
            self._ticked = {(seq, at) for seq, at in self._ticked if seq > request.seq - _MOST_MESSAGES // 2}
        for part in parts:
            if part.op in _REPEATED:
                self.heard((key, part.worker.index), part.op, part.rows, part.worker.rows[0], _pickled(part))

    def heard(self, key: Any, op: Op, rows: Sequence[int], first: int, payload: bytes | None) -> None:
        """A worker was told something that is no step."""
        if any(one.key == key for one in self._heard[-2 * self._num_envs :]):
            return
        self._heard.append(_Heard(self._last[1] + 1, key, op, rows, first, payload))
        if len(self._heard) > _MOST_MESSAGES:
            self._drop_messages(self._heard[_MOST_MESSAGES // 2].tick)

    def lost(self, rows: Sequence[int]) -> None:
        """These environments go on from a state that is not recorded, until they are reset with a seed."""
        self.heard(object(), Op.THAW, rows, rows[0], None)
        for row in rows:
            self._seeded.pop(row, None)

    def seeds(self, seeds: list[Any], ids: Array | None) -> list[Any]:
        """Seeds for a reset: an environment that never had one gets one, so that its episodes can be repeated."""
        given, now = list(seeds), self._point()
        for row in range(self._num_envs) if ids is None else ids.tolist():
            if given[row] is None and row not in self._seeded:
                given[row] = any_seed()
            if given[row] is not None:
                self._seeded[row] = now
        return given

    def _point(self) -> _Point:
        return _Point(self._last[1] + 1, self._seconds())

    def _needs_snapshot(self) -> bool:
        """A replay would take long, or some of its steps will soon be dropped."""
        now, since = self._point(), min(self._seeded.values(), default=_Point(0, 0.0))
        if self._saved is not None:
            since = max(since, self._saved.point)
        took = (now.seconds - since.seconds) / self._num_envs
        return bool(took > _LONG_REPLAY or now.tick - since.tick > self._most * _BLOCK // 2)

    def snapshot(self, observation: Callable[[int], Any]) -> None:
        """Save all environments, if it is time to; ``observation``: that of a row."""
        self.due = False
        began = time.monotonic()
        every = self._options.snapshot_every
        assert every is not None
        self._save_at = self._last[1] + every
        if began < self._not_before or self._why_not_saved or not self._needs_snapshot():
            return
        try:
            with Uninterrupted():
                save = self._save()
                assert save is not None
                snapshots = save()
                digests = [digest(observation(row), self._layout.observations) for row in range(self._num_envs)]
                heard = _Heard(self._last[1] + 1, object(), Op.SAVE, (), 0, digests)
                self._heard.append(heard)
                self._saved = _Saved(self._point(), heard, snapshots)
        except NotRestorable as error:
            self._why_not_saved, self._save_at = str(error), 1 << 62
        except VecEnvError:  # a worker has died: the step says so
            return
        now = time.monotonic()
        self._not_before = now + (now - began) / _SHARE

    def _begin_block(self, first: int) -> None:
        if self._blocks and self._blocks[-1].first == first:
            return
        while len(self._blocks) >= self._most:
            block = self._blocks[0]
            before = self._progress(self._before, block, _BLOCK, slice(None))
            self._unused.append(block.bytes)
            self._blocks.pop(0)
            self._before = before
            self._drop_messages(first=block.first + _BLOCK)
        if not self._unused:
            self._unused += self._touched(1)
        self._blocks.append(_Block(first, self._unused.pop(), self._tick))

    def _touched(self, count: int) -> list[memoryview]:
        """Memory of some blocks, all of it written to: the first write to a page takes several microseconds."""
        size = _BLOCK * self._size
        whole = memoryview(bytearray(b"\0") * (count * size))
        return [whole[at : at + size] for at in range(0, count * size, size)]

    def _drop_messages(self, first: int) -> None:
        """Forget messages from before a tick, but for those whose effect may last, as long as there are not too many."""
        lasting = LASTING if len(self._heard) < _MOST_MESSAGES else ()
        self._heard = [one for one in self._heard if one.tick >= first or one.op in lasting]

    def _progress(self, before: Array, block: _Block, count: int, which: slice) -> Array:
        """int ``(2, rows)``: the numbers of episodes and of steps in the latest, after a block.

        Args:
            before: The same, before it.
            block: Some ticks.
            count: How many of them there are.
            which: Of which rows.
        """
        ends = (block.ticks["terminations"] | block.ticks["truncations"])[:count, which]
        stepped = np.ones_like(ends) if block.stepped is None else block.stepped[:count, which]
        ends = ends & stepped & (self._how.autoreset_mode is not AutoresetMode.DISABLED)
        first_step = -1 if self._how.autoreset_mode is AutoresetMode.NEXT_STEP else 0
        episodes, steps = before
        begins = [one for one in self._heard if one.op in RESETS and block.first <= one.tick < block.first + _BLOCK]
        at = 0
        for until, rows in [*((one.tick - block.first, one.rows) for one in begins), (count, ())]:
            number = np.arange(at, until)[:, None]
            last = np.where(ends[at:until], number, -1).max(axis=0, initial=-1)
            after = (stepped[at:until] & (number > last)).sum(axis=0)
            steps = after + np.where(last >= 0, first_step, steps)
            episodes = episodes + ends[at:until].sum(axis=0)
            mine = np.isin(np.arange(self._num_envs)[which], rows)
            episodes = episodes + (mine & ((steps > 0) | (episodes == 0)))
            steps = np.where(mine, 0, steps)
            at = max(at, until)
        return np.stack([episodes, steps])

    # -- files ------------------------------------------------------------------------------------------------------------

    def failures(self, failed: dict[int, Failed]) -> dict[int, str]:
        """Write a file about each of some environments; by row, which.

        A file that cannot be written is said in the place of its name: the failure itself counts for more.
        """
        said: dict[int, str] = {}
        written: list[Path] = []
        for row, how in failed.items():
            try:
                path = self.record(row, None, how)
                written.append(path)
                said[row] = str(path)
            except Exception as error:
                said[row] = f"not recorded: {type(error).__name__}: {error}"
        if self.parcels is None:
            forget_old(self._options, written)
        return said

    def record(self, row: int, path: Any, how: Failed | None) -> Path:
        """Write a file about a row; ``path``: where, in place of a name in the folder. Returns where."""
        record, episode, step = self._record(row, how)
        env = self.first_row + row
        if path is None:
            env_id = re.sub(r"[^\w.-]+", "_", self._env_id).strip("_")
            path = self._folder / f"{env_id}-env{env}-episode{episode}-step{step}.vecenv"
        content = packed(record, self._env_id, env, episode, step)
        if self.parcels is None:
            write(Path(path), content)
        else:
            self.parcels.append((env, str(path), content))
        return Path(path)

    def _record(self, row: int, how: Failed | None) -> tuple[Record, int, int]:
        """What is known of a row, the number of its episode, and that of the step in it."""
        ticks, columns, actions = self._column(row)
        alone = slice(row, row + 1)
        episode_and_step = self._before[:, alone]
        for block in self._blocks:
            episode_and_step = self._progress(episode_and_step, block, min(self._last[1] + 1 - block.first, _BLOCK), alone)
        episode, step = (max(int(number[0]), 0) for number in episode_and_step)

        def place(tick: int) -> int:
            return int(np.searchsorted(ticks, tick))

        messages: list[Message] = []
        marks: list[tuple[int, bytes]] = []
        snapshot = None
        for one in self._heard:
            if one.op is Op.SAVE:
                marks.append((place(one.tick), one.payload[row]))
                if self._saved is not None and one is self._saved.heard:
                    snapshot = place(one.tick), len(messages), self._saved.snapshots[row]
            elif row in one.rows and (part := own_part(one.op, one.payload, one.rows, row, one.first)) is not None:
                messages.append(Message(place(one.tick), *part))
                if one.op is Op.THAW:  # it goes on from a state that is not recorded
                    snapshot = None
        record = Record(
            row=row, how=self._how, env_fn=_dumped(self._env_fns[row]), messages=messages, columns=columns, actions=actions,
            failed=how, steps_before=step - len(ticks), marks=marks, snapshot=snapshot, why_no_snapshot=self._why_not_saved,
        )  # fmt: skip
        return record, episode, step

    def _column(self, row: int) -> tuple[Array, dict[str, Array], dict[int, bytes]]:
        """The ticks of a row; actions, rewards and flags; by their place, actions that were pickled."""
        ticks: list[int] = []
        actions: dict[int, bytes] = {}
        pieces: dict[str, list[Array]] = {}
        for block in self._blocks:
            count = min(self._last[1] + 1 - block.first, _BLOCK)
            mine = np.arange(count) if block.stepped is None else np.flatnonzero(block.stepped[:count, row])
            for name in self._tick.names or ():
                pieces.setdefault(name, []).append(block.ticks[name][mine, row])
            for at in mine.tolist():
                for rows, sent in block.actions.get(at, ()):
                    if row in rows:
                        actions[len(ticks)] = cloudpickle.dumps(pickle.loads(sent)[list(rows).index(row)])
                ticks.append(block.first + at)
        columns = {name: np.concatenate(arrays) for name, arrays in pieces.items()}
        return np.array(ticks, np.int64), columns, actions


def keep_parcels(options: FlightRecorder, parcels: Sequence[tuple[int, str, bytes]]) -> dict[int, str]:
    """Write the files of a host here; by environment, where they are, or why they are not."""
    said: dict[int, str] = {}
    for env, path, content in parcels:
        try:
            write(Path(path), content)
            said[env] = path
        except OSError as error:
            said[env] = f"not recorded: {error}"
    forget_old(options, [Path(path) for _, path, _ in parcels])
    return said


def forget_old(options: FlightRecorder, latest: Sequence[Path]) -> None:
    """Remove the oldest files of a folder; those of the latest failure stay."""
    folder = Path(options.folder).absolute()
    found = sorted(folder.glob("*.vecenv"), key=lambda file: (file in latest, file.stat().st_mtime_ns))
    for path in found[: max(len(found) - max(options.keep, len(latest)), 0)]:
        path.unlink(missing_ok=True)


def _pickled(part: Any) -> bytes | None:
    """What was sent with a message; empty: it cannot be pickled."""
    if part.data is not None:
        return decode(part.data)[2]
    try:
        return None if part.payload is None else cloudpickle.dumps(part.payload)
    except Exception:
        return b""


def _dumped(env_fn: Callable[[], Any]) -> bytes | str:
    """A pickled function, or why it cannot be."""
    try:
        blob: bytes = cloudpickle.dumps(env_fn)
        return blob
    except Exception as error:
        return f"its env_fn cannot be pickled: {type(error).__name__}: {error}"
