"""The flight recorder: an observer that keeps the latest requests and results, and writes a file about each failure.

A *tick* is a step of all or some environments. Its actions are copied into a ring of arrays when the engine announces the
step (:meth:`Recorder.on_step`), and its rewards and flags when the result is returned. A *message* is any other request,
such as a reset or a call that may change environments; it is pickled when it is announced. Positions in the recording are
tick numbers.

A step of all environments is *open* from its announcement to its result. An announced step may be refused, or a signal
handler may raise before it is submitted; the next announcement then replaces it. An open step keeps its tick if it is known
to have been submitted: a failure in it is recorded, it is pending when a reset is announced, or :meth:`Recorder.on_dropped`
lists it as submitted. Steps of rows in flight that were not submitted are withdrawn in the same way.

The *history* of a row begins after the tick in which its previous environment failed, or at a thaw. Calls do not reach a
failed row.

The *log* is the fast path: a list of bytes objects that stores steps of all environments, with actions of the space's own
dtype, in very few instructions. Any other event first moves the log into the ring.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import cloudpickle
import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.errors import NotRestorable, StepTimeout, VecEnvError, WorkerDied, format_seconds
from vecenv.front.arguments import random_seed
from vecenv.link.envs import Expected, WorkerPlan
from vecenv.link.messages import dumps_with_code, original_summary
from vecenv.link.own_generators import with_own_generators
from vecenv.recording.file import (
    KILLED,
    LASTING,
    SUFFIX,
    Failed,
    Message,
    Record,
    new_failure_name,
    pack,
    remove_old,
    running_env,
    unused_path,
    write,
)  # fmt: skip
from vecenv.shm import Layout, fixed_tree
from vecenv.shm.layout import Array
from vecenv.state.snapshots import Snapshot
from vecenv.system.signals import call_with_fallback, deferred_signals

_log = logging.getLogger("vecenv")
_RING_BYTES: Final = 128 * 2**20
"""The maximum size of the ring, unless two blocks are larger."""
_BLOCK_TICKS: Final = 512
"""The number of ticks in a block. The ring has a whole number of blocks, and drops old ticks block by block."""
_PICKLED_ACTION_BYTES: Final = 100
"""An estimate per row, for actions without a fixed size."""
_MAX_MESSAGES: Final = 10_000
_RESULT_COLUMNS: Final = "rewards", "terminations", "truncations"
_ARRAY: Final = np.ndarray  # looked up in every step, where an attribute of `np` would cost more
_SNAPSHOT_TIME_SHARE: Final = 0.002
_LONG_REPLAY_SECONDS: Final = 5.0
"""Unless steps will soon be dropped, snapshots are taken only if the replay of one environment would take longer. The first
snapshot has a lasting cost: up to Python 3.12, attribute lookups on an object are slower once its ``__dict__`` has been read
(64 CartPoles step 5% slower)."""


@dataclass(frozen=True, slots=True)
class FlightRecorder:
    """The options of the flight recorder, for ``record_failures=``; see ``docs/recording.md``.

    Args:
        folder: Folder of the files, created if it does not exist.
        snapshot_every: Minimum number of steps between two snapshots, for environments that can be saved. They are taken
            only if a replay would otherwise take more than five seconds, or its steps or calls would soon be dropped, and
            never with ``send`` and ``recv``. They take at most 0.2% of the time. ``None``: never.
        keep: Maximum number of files in the folder, where those of the latest failure count as one. Files about environments
            that only shared a worker with the failed one are removed first, then the oldest, those of earlier runs too.

    Raises:
        ValueError: An argument is invalid.
    """

    folder: str | os.PathLike[str]
    snapshot_every: int | None = 1000
    keep: int = 20

    def __post_init__(self) -> None:
        every = 1 if self.snapshot_every is None else self.snapshot_every
        for name, value in (("snapshot_every", every), ("keep", self.keep)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise ValueError(f"`{name}` must be a positive int, got {value!r}")
        if not isinstance(self.folder, (str, os.PathLike)):
            raise ValueError(f"`folder` must be a path, got {self.folder!r}")
        if not os.fspath(self.folder):
            raise ValueError("the folder of `record_failures` is an empty path: use '.' for the current folder")
        if os.path.exists(self.folder) and not os.path.isdir(self.folder):
            raise ValueError(f"the folder of `record_failures` is a file: {os.fspath(self.folder)!r}")

    @classmethod
    def from_option(cls, option: Any) -> FlightRecorder | None:
        """Return the options for ``record_failures=option``: a folder, a ``FlightRecorder``, or ``None``."""
        if option is None or isinstance(option, cls):
            return option
        if isinstance(option, (str, os.PathLike)):
            return cls(option)
        raise ValueError(f"`record_failures` must be None, a folder or a vecenv.FlightRecorder, got {option!r}.")


class _RecordedMessage(NamedTuple):
    """A message: its number, the tick that follows, its rows and name, and a pickled dict from rows to arguments.

    ``arguments`` is empty if they cannot be pickled. ``restarts`` lists the rows that a reset rebuilds within a step.
    """

    number: int
    tick: int
    rows: list[int]
    name: str
    arguments: bytes
    restarts: Sequence[int] = ()


class _SavedSnapshots(NamedTuple):
    """Snapshots of all environments, and the tick and message that follow."""

    tick: int
    message: int
    snapshots: Sequence[Snapshot]


class _CopiedRows(NamedTuple):
    """A copy of the records of some rows.

    Attributes:
        rows: Indices of the environments.
        ticks: Ticks in the ring.
        columns: Name -> ``(rows, ticks, ...)``.
        stepped: bool ``(rows, ticks)``, true for ticks that step the row.
        messages: Messages with their arguments.
    """

    rows: list[int]
    ticks: Array
    columns: dict[str, Array]
    stepped: Array
    messages: list[tuple[_RecordedMessage, Any]]


class Recorder:
    """An observer that records one vector environment (:class:`vecenv.engine.observers.Observer`).

    Args:
        options: The value of ``record_failures=``, parsed.
        env_fns: The functions that build the environments.
        env_id: The name of the environments.
        plan: The settings of their workers.
        save: A weak reference to the method that takes snapshots of all environments between two calls.
        stats: A weak reference to ``envs.stats``.
    """

    def __init__(
        self, options: FlightRecorder, env_fns: Sequence[Callable[[], Any]], env_id: str, plan: WorkerPlan,
        save: weakref.WeakMethod[Callable[[], list[Snapshot]]], stats: weakref.WeakMethod[Callable[[], dict[str, float]]],
    ) -> None:  # fmt: skip
        self._options, self._env_fns, self._env_id, self._save, self._stats = options, env_fns, env_id, save, stats
        self._plan = replace(plan, registered=None)  # `registered` refers to memory of this process
        self._folder = Path(options.folder).absolute()
        n = self._num_envs = len(env_fns)
        self._make_ring()
        self._next, self._open, self._open_is_submitted = 0, False, False
        self._first = 0  # the oldest tick in the ring
        self._dropped = np.zeros((2, n), np.int64)  # per row: episodes before the ring, and steps of the latest
        self._pickled: dict[int, tuple[Sequence[int], bytes]] = {}  # by tick, actions that are not in the ring
        self._messages: list[_RecordedMessage] = []
        self._next_message = 0  # number of the next message
        self._complete_from = 0  # the number from which on no message was dropped
        self._lasting_complete_from = 0  # the same, for messages with a lasting effect
        # the arrays have one entry per row
        self._in_flight = np.full(n, -1)  # the tick of its step without a result, from `send`; -1: none
        self._has_sent_steps = False  # True if any were sent since the latest step of all environments
        self._history_start = np.full(n, -1)  # the last tick before its history
        self._first_message = np.zeros(n, np.int64)  # number of the first message of its history
        self._restart_message = np.full(n, -1)  # number of the reset within a step with which its history begins; -1: none
        self._seeded = np.full((2, n), -1)  # tick and message of the latest reset with a seed or loaded state
        self._failed: set[int] = set()  # rows to be rebuilt by their next reset
        self._saved: _SavedSnapshots | None = None
        self._no_snapshot_reason = "" if options.snapshot_every else "snapshot_every is None"
        self._save_at = options.snapshot_every or 1 << 62
        self._next_snapshot_time = 0.0
        self._latest_files: tuple[int, list[Path]] = (-1, [])  # the tick of the latest failure, and its files
        self._timeouts: dict[int, tuple[tuple[int, int], Path]] = {}  # by row: a request that timed out, and its file
        self._failed_files: dict[int, tuple[str, Path]] = {}  # by row: the name of its latest failure, and its file
        self._has_warned = False  # about removed files of earlier runs

    def _make_ring(self) -> None:
        n, tree = self._num_envs, self._plan.layout.actions
        leaves = [] if tree is None else list(tree.leaves())
        fields: list[Any] = [(f"actions/{index}", leaf.dtype, (n, *leaf.shape)) for index, leaf in enumerate(leaves)]
        actions = np.dtype(fields)
        tick = np.dtype([*fields, ("rewards", np.float64, n), ("terminations", np.bool_, n), ("truncations", np.bool_, n)])
        self._tree, self._has_one_action_array = tree, len(leaves) == 1
        self._actions_size, self._size = actions.itemsize, tick.itemsize
        size = tick.itemsize + (0 if leaves else n * _PICKLED_ACTION_BYTES)
        self._capacity = capacity = max(2, _RING_BYTES // (_BLOCK_TICKS * size)) * _BLOCK_TICKS
        memory = np.zeros(capacity * tick.itemsize, np.uint8)
        self._bytes, ring = memory.data, memory.view(tick)
        self._actions = [ring[name] for name in actions.names or ()]
        self._rewards, self._terminations, self._truncations = (ring[name] for name in _RESULT_COLUMNS)
        self._stepped: Array | None = None  # bool (capacity, rows), the rows that each tick steps; None: all
        self._log: list[bytes] = [b""] * _BLOCK_TICKS  # complete ticks that follow those in the ring
        self._num_logged = 0
        self._last_log_index = -1  # the last index in the log that may be filled
        self._is_logging = False  # True if the next step goes into the log
        self._staged: bytes | None = None  # the actions of the next tick in the log

    # -- requests -------------------------------------------------------------------------------------------------------

    def on_step(self, rows: Any, actions: Any) -> None:
        """Record the actions of a step."""
        if rows is None:
            if self._is_logging and actions.__class__ is _ARRAY:
                self._staged = actions.tobytes()
                return
            self._move_log()
            tick = self._begin_step_of_all()
            index: Any = tick % self._capacity
        else:
            self._move_log()
            tick = self._begin_step_of_some(rows)
            index = tick % self._capacity, rows
        if isinstance(actions, list):
            self._pickled[tick] = range(self._num_envs) if rows is None else list(rows), _pickle(actions)
        elif self._tree is not None:
            exact = self._tree.match(actions, self._num_envs if rows is None else len(rows))
            for leaf, values in zip(self._actions, exact or (), strict=True):
                leaf[index] = values
        if rows is None:
            self._open = True

    def _move_log(self) -> None:
        """Move the log into the ring, so that the next steps go there directly."""
        offset, count = self._next % self._capacity * self._size, self._num_logged
        if count:
            self._bytes[offset : offset + count * self._size] = b"".join(self._log[:count])
            self._next, self._num_logged = self._next + count, 0
        self._is_logging = False
        if self._staged is not None:
            offset = self._next % self._capacity * self._size
            self._bytes[offset : offset + self._actions_size] = self._staged
            self._open, self._staged = True, None

    def _begin_step_of_all(self) -> int:
        """Begin a step of all environments, and return its tick."""
        self._close_step()
        if self._next >= self._save_at:
            self._take_snapshot()
        tick = self._next
        if tick % _BLOCK_TICKS == 0:
            self._drop_old(tick)
        if self._stepped is not None:
            self._stepped[tick % self._capacity] = True
        if self._pickled:
            self._pickled.pop(tick, None)
        if self._has_sent_steps:
            self._withdraw(range(self._num_envs))
            self._has_sent_steps = False
        return tick

    def _begin_step_of_some(self, rows: Sequence[int]) -> int:
        """Begin a step of some environments, which are in flight from now on, and return its tick."""
        self._close_step()
        tick, slot = self._next, self._next % self._capacity
        if tick % _BLOCK_TICKS == 0:
            self._drop_old(tick)
        self._pickled.pop(tick, None)
        if self._stepped is None:
            self._stepped = np.ones((self._capacity, self._num_envs), np.bool_)
        self._withdraw(rows)
        self._stepped[slot] = False
        self._stepped[slot, rows] = True
        self._rewards[slot], self._terminations[slot], self._truncations[slot] = np.nan, False, False
        self._in_flight[rows] = tick
        self._has_sent_steps = True
        self._next, self._open = tick + 1, False
        return tick

    def on_dropped(self, rows: Any, *, submitted: Any) -> None:
        """Keep submitted steps, without results, and forget the others, which never reached the environments."""
        self._move_log()
        if submitted:
            self._mark_submitted()
        self._close_step()
        if self._has_sent_steps:
            self._withdraw(set(rows).difference(submitted))
            self._in_flight[submitted] = -1

    def _withdraw(self, rows: Iterable[int]) -> None:
        """Forget the steps of rows that were announced for ``recv``, but not submitted."""
        assert self._stepped is not None
        for row in rows:
            tick = self._in_flight[row]
            if tick >= self._first and tick > self._history_start[row]:
                self._stepped[tick % self._capacity, row] = False
            self._in_flight[row] = -1

    def _close_step(self) -> None:
        """End the open step, which keeps its tick if it was submitted."""
        self._next += self._open_is_submitted
        self._open = self._open_is_submitted = False

    def _mark_submitted(self) -> None:
        """Mark the open step as submitted, although it has no result."""
        if self._open and not self._open_is_submitted:
            slot = self._next % self._capacity
            self._rewards[slot], self._terminations[slot], self._truncations[slot] = np.nan, False, False
            self._open_is_submitted = True

    def on_reset(self, rows: Any, seeds: list[Any], options: Any) -> None:
        """Record a reset. Add to ``seeds`` one for each row without one in its history, so that episodes can be repeated."""
        self._move_log()
        self._mark_submitted()
        rows, restarts = list(rows), []
        for index, row in enumerate(rows):
            if seeds[index] is None and self._seeded[0, row] < 0:
                seeds[index] = random_seed()
            if seeds[index] is not None:
                self._seeded[:, row] = self._position, self._next_message
            tick = self._next if self._open else self._in_flight[row]
            if row in self._failed and tick >= 0:  # it is rebuilt within this step
                self._history_start[row] = tick
                self._restart_message[row] = self._next_message
                restarts.append(row)
        self._failed.difference_update(rows)
        row_options = options if isinstance(options, list) else [options] * len(rows)
        self._add_message("reset", dict(zip(rows, zip(seeds, row_options, strict=True), strict=True)), restarts)

    def on_call(self, rows: Any, name: str, arguments: tuple[Any, ...]) -> None:
        """Record a call. A thaw begins new histories, because the state from which its rows continue is not recorded."""
        self._move_log()
        self._close_step()
        rows = list(rows)
        if name in ("thaw", "load"):
            self._failed.difference_update(rows)
        if name == "thaw":
            self._begin_history(rows)
            return
        if name == "load":
            for row, snapshot in zip(rows, arguments[0], strict=True):
                if snapshot.row.used:
                    self._seeded[:, row] = self._position, self._next_message
        per_row: Sequence[Any] = [arguments] * len(rows)
        if name == "set_attr":
            per_row = [(arguments[0], value) for value in arguments[1]]
        elif name == "load":
            per_row = [(snapshot,) for snapshot in arguments[0]]
        elif name == "set_next_options":
            per_row = arguments[0]
        self._add_message(name, {row: each for row, each in zip(rows, per_row, strict=True) if row not in self._failed})

    @property
    def _position(self) -> int:
        """The tick that follows the message being submitted."""
        return self._next + self._open_is_submitted

    def _add_message(self, name: str, arguments: dict[int, tuple[Any, ...]], restarts: Sequence[int] = ()) -> None:
        rows, blob = list(arguments), _pickle(arguments)
        message = _RecordedMessage(self._next_message, self._position, rows, name, blob, restarts)
        self._messages.append(message)
        self._next_message += 1
        if len(self._messages) > _MAX_MESSAGES:
            self._drop_messages()

    def _drop_messages(self) -> None:
        """Drop the older half of the messages, but keep those with a lasting effect unless they are most of it."""
        old, new = self._messages[: _MAX_MESSAGES // 2], self._messages[_MAX_MESSAGES // 2 :]
        lasting = [message for message in old if message.name in LASTING]
        self._complete_from = new[0].number
        if len(lasting) > len(old) // 2:
            self._lasting_complete_from, lasting = self._complete_from, []
        self._messages = lasting + new

    # -- results and failures -------------------------------------------------------------------------------------------

    def on_result(self, rows: Any, result: tuple[Any, ...]) -> None:
        """Record rewards and flags. After an interruption, the same result may arrive twice."""
        staged = self._staged
        if rows is None and staged is not None and len(result) == 5:
            number = self._num_logged
            self._log[number] = b"".join((staged, result[1], result[2], result[3]))  # slicing `result` costs as much as this
            self._num_logged, self._staged = number + 1, None  # no call or jump between these stores, so no signal handler
            if number == self._last_log_index:
                self._is_logging = False
        elif rows is None:
            if self._open and len(result) == 5:
                tick = self._next
                offset = tick % self._capacity * self._size
                self._bytes[offset + self._actions_size : offset + self._size] = b"".join(result[1:4])
                self._next, self._open, self._open_is_submitted = tick + 1, False, False
                self._last_log_index = min(tick - tick % _BLOCK_TICKS + _BLOCK_TICKS, self._save_at) - tick - 2
                can_log = self._has_one_action_array and self._stepped is None and not self._pickled
                self._is_logging = can_log and self._last_log_index >= 0
        else:
            ticks = self._in_flight[rows]
            known = np.flatnonzero(ticks >= self._first)
            index = ticks[known] % self._capacity, np.asarray(rows)[known]
            for column, values in zip((self._rewards, self._terminations, self._truncations), result[1:4], strict=True):
                column[index] = values[known]
            self._in_flight[rows] = -1

    def on_failure(self, rows: Sequence[int], error: Exception, *, worker_died: bool) -> str:
        """Write a file about each row, and return a note about them. Without rows, only mark the step as submitted."""
        self._move_log()
        self._mark_submitted()
        if not rows:
            return ""
        seconds = error.timeout if isinstance(error, (StepTimeout, WorkerDied)) else None
        hung, text = isinstance(error, StepTimeout) or seconds is not None, original_summary(error)
        if worker_died:
            text = str(error).partition("\n")[0]
        how = "hung" if hung else "died" if worker_died else "raised"
        failed = Failed(how, text, getattr(error, "exitcode", None), seconds)
        try:
            # An abandoned worker that timed out is killed: the files about the timeout already describe that failure.
            if isinstance(error, StepTimeout) or failed.exitcode == KILLED:
                known = [self._timeouts[row] for row in rows if row in self._timeouts]
                if [request for request, _ in known] == [self._request_id(row) for row in rows]:
                    return self._make_note([path for _, path in known])
            # an environment that had failed before its worker died has no history: its file describes the earlier failure
            earlier = {row: self._failed_files[row] for row in self._failed.intersection(rows, self._failed_files)}
            return self._write_files(rows, failed, error if isinstance(error, StepTimeout) else None, earlier)
        finally:
            if not isinstance(error, StepTimeout):  # after a timeout, the environments may continue
                self._begin_history(rows)
                self._failed.update(rows)

    def _request_id(self, row: int) -> tuple[int, int]:
        """Return a pair that identifies the pending request of a row."""
        tick = int(self._in_flight[row])
        return self._position if tick < 0 else tick, self._next_message

    def _begin_history(self, rows: Sequence[int]) -> None:
        """Begin a new history for some rows, which excludes their earlier steps and messages."""
        for row in rows:
            self._history_start[row] = max(self._next - (not self._open), int(self._in_flight[row]))
            self._first_message[row] = self._next_message
            self._seeded[:, row] = -1

    # -- snapshots ------------------------------------------------------------------------------------------------------

    def _take_snapshot(self) -> None:
        """Save all environments if a replay would take long, or if some of its steps or messages will soon be dropped."""
        began, every = time.monotonic(), self._options.snapshot_every
        assert every is not None
        self._save_at = self._next + every
        if began < self._next_snapshot_time or self._failed or not self._needs_snapshot():
            return
        save = self._save()
        assert save is not None
        try:
            with deferred_signals():
                self._saved = _SavedSnapshots(self._next, self._next_message, save())
        except NotRestorable as error:
            self._no_snapshot_reason, self._save_at = str(error), 1 << 62
        except VecEnvError:  # a worker has died: the step reports it
            return
        now = time.monotonic()
        self._next_snapshot_time = now + (now - began) / _SNAPSHOT_TIME_SHARE

    def _needs_snapshot(self) -> bool:
        tick, message = np.maximum(self._seeded.min(axis=1), 0 if self._saved is None else self._saved[:2]).tolist()
        stats = self._stats()
        assert stats is not None
        seconds = (self._next - tick) * stats()["step_time_mean"]
        will_be_dropped = self._next - tick > self._capacity // 2 or self._next_message - message > _MAX_MESSAGES // 4
        return bool(seconds > _LONG_REPLAY_SECONDS or will_be_dropped)

    # -- numbers of episodes and steps ----------------------------------------------------------------------------------

    def _drop_old(self, tick: int) -> None:
        """Drop the oldest block if the ring is full, but count its episodes and steps first."""
        first = self._first
        if first != tick - self._capacity:
            return
        slots = slice(first % self._capacity, first % self._capacity + _BLOCK_TICKS)
        ends = self._terminations[slots] | self._truncations[slots]
        stepped = np.ones_like(ends) if self._stepped is None else self._stepped[slots]
        dropped = self._count(self._dropped, first, first + _BLOCK_TICKS, range(self._num_envs), ends, stepped)
        self._dropped, self._first = dropped, first + _BLOCK_TICKS
        self._messages = [message for message in self._messages if message.tick >= self._first or message.name in LASTING]
        for old in [old for old in self._pickled if old < self._first]:
            del self._pickled[old]

    def _count(self, before: Array, first: int, end: int, rows: Sequence[int], ends: Array, stepped: Array) -> Array:
        """Return the numbers of episodes, and of steps in the latest episode, before ``end``: int ``(2, rows)``.

        ``before`` has the same numbers before ``first``. ``ends`` and ``stepped``, bool ``(ticks, rows)``, mark the ticks in
        which an episode ends or a row steps. A reset counts if its tick is below ``end``.
        """
        ends = ends & stepped & (self._plan.autoreset_mode is not AutoresetMode.DISABLED)
        first_step = -1 if self._plan.autoreset_mode is AutoresetMode.NEXT_STEP else 0
        episodes, steps = before
        wanted = set(rows)
        resets = [
            (message.tick - first, message.rows, message.restarts)
            for message in self._messages
            if message.name == "reset" and first <= message.tick < end and not wanted.isdisjoint(message.rows)
        ]
        start = 0
        for stop, reset_rows, restarted in [*resets, (len(ends), (), ())]:
            index = np.arange(start, stop)[:, None]
            last_end = np.where(ends[start:stop], index, -1).max(axis=0, initial=-1)
            steps_since = (stepped[start:stop] & (index > last_end)).sum(axis=0)
            steps = steps_since + np.where(last_end >= 0, first_step, steps)
            episodes = episodes + ends[start:stop].sum(axis=0)
            was_reset = np.isin(rows, reset_rows)
            episodes = episodes + (was_reset & ((steps > 0) | (episodes == 0)))
            steps = np.where(was_reset, np.where(np.isin(rows, restarted), first_step, 0), steps)
            start = max(start, stop)
        return np.stack([episodes, steps])

    # -- files ----------------------------------------------------------------------------------------------------------

    def record(self, row: int, path: str | os.PathLike[str] | None) -> Path:
        """Write a file about a row on request, and return its path.

        Args:
            row: Index of the environment.
            path: Path of the file; ``None``: a new name in the folder.
        """
        self._move_log()
        return self._write_file(self._copy_rows([row]), row, path, None, "")

    def _write_files(
        self, rows: Sequence[int], failed: Failed, timeout: StepTimeout | None, earlier: dict[int, tuple[str, Path]]
    ) -> str:
        """Write the files about rows that failed together, and return a note about them.

        ``timeout`` is the error if they hang and may still reply. ``earlier`` has the files that already describe some rows.
        """
        failure_name, written, problems = new_failure_name(), [], []
        if rows[0] in earlier and (running := running_env(failed.text, rows[0])) and running[0] == rows[0]:
            failure_name, path = earlier[rows[0]]  # its exception, such as MemoryError, is why its worker was killed
            written.append(path)
        copied = self._copy_rows(rows)
        for row in rows:
            if row in earlier:
                continue
            self._failed_files.pop(row, None)
            try:
                row_failure = failed if timeout is None else replace(failed, text=_describe_hang(timeout, row))
                written.append(self._write_file(copied, row, None, row_failure, failure_name))
                if timeout is None:
                    self._failed_files[row] = failure_name, written[-1]
                else:
                    self._timeouts[row] = self._request_id(row), written[-1]
            except Exception as error:
                problems.append(f"not recorded: {original_summary(error)}")
        tick, latest = self._latest_files
        self._latest_files = self._position, written + (latest if tick == self._position else [])
        keep = self._options.keep
        removed = remove_old(self._folder, keep, self._latest_files[1])
        if removed and not self._has_warned:
            self._has_warned = True
            text = "the flight recorder removed files of an earlier run from %s, to keep at most %d (FlightRecorder(keep=))"
            _log.warning(text, self._folder, keep)
        return "\n".join(filter(None, [self._make_note(written), *problems[:1]]))

    def _make_note(self, written: Sequence[Path]) -> str:
        """Return a note with the first file about a failure and the number of others; empty if there are none."""
        others = f"\nand {len(written) - 1} more in {self._folder}" if len(written) > 1 else ""
        return f"recorded: {written[0]}{others}" if written else ""

    def _copy_rows(self, rows: Sequence[int]) -> _CopiedRows:
        first, last, wanted_rows = self._first, self._position, list(rows)

        def column(values: Array) -> Array:
            copied = np.empty((len(wanted_rows), last - first, *values.shape[2:]), values.dtype)
            for tick in range(first, last, _BLOCK_TICKS):  # in pieces that fit into a processor cache
                slot, count = tick % self._capacity, min(_BLOCK_TICKS, last - tick)
                piece = values[slot : slot + count][:, wanted_rows]
                copied[:, tick - first : tick - first + count] = np.moveaxis(piece, 0, 1)
            return copied

        fields = dict(zip(_RESULT_COLUMNS, (self._rewards, self._terminations, self._truncations), strict=True))
        fields |= {f"actions/{index}": leaf for index, leaf in enumerate(self._actions)}
        columns = {name: column(values) for name, values in fields.items()}
        stepped = np.ones_like(columns["terminations"]) if self._stepped is None else column(self._stepped)
        oldest, wanted = int(self._first_message[wanted_rows].min()), set(wanted_rows)
        messages = [
            (message, _unpickle(message.arguments))
            for message in self._messages
            if message.number >= oldest and not wanted.isdisjoint(message.rows)
        ]
        return _CopiedRows(wanted_rows, np.arange(first, last), columns, stepped, messages)

    def _write_file(
        self, copied: _CopiedRows, row: int, path: str | os.PathLike[str] | None, failed: Failed | None, failure_name: str
    ) -> Path:
        """Write the file about a row, and return its path. ``path=None``: a new name in the folder."""
        index, first = copied.rows.index(row), self._first
        ends = copied.columns["terminations"][index] | copied.columns["truncations"][index]
        stepped = copied.stepped[index][:, None]
        counted = self._count(self._dropped[:, row : row + 1], first, first + len(ends) + 1, [row], ends[:, None], stepped)
        episode, step = (int(number[0]) for number in counted)
        record = self._build_record(copied, row, failed, step)
        episode, step = max(episode, 0), max(step, 0)
        if path is None:
            env_id = re.sub(r"[^\w.-]+", "_", self._env_id).strip("_")
            path = unused_path(self._folder / f"{env_id}-env{row}-episode{episode}-step{step}{SUFFIX}")
        write(Path(path), pack(record, self._env_id, episode, step, failure_name))
        return Path(path)

    def _build_record(self, copied: _CopiedRows, row: int, failed: Failed | None, step: int) -> Record:
        """Return the record of a row. ``step`` is the number of the latest step in its episode; -1 if its reset is next."""
        index = copied.rows.index(row)
        history = copied.stepped[index] & (copied.ticks > self._history_start[row])
        if failed is None and (in_flight := self._in_flight[row]) >= 0:
            history &= copied.ticks != in_flight
        ticks = copied.ticks[history]
        columns = {name: _compact(values[index][history]) for name, values in copied.columns.items()}
        own_messages = [
            (each.number, Message(self._place(ticks, each), each.name, arguments and arguments[row]))
            for each, arguments in copied.messages
            if each.number >= self._first_message[row] and row in each.rows
        ]
        actions: dict[int, Any] = {}
        for tick, (rows, blob) in self._pickled.items():
            place = int(np.searchsorted(ticks, tick))
            if place < len(ticks) and ticks[place] == tick:
                actions[place] = None if (listed := _unpickle(blob)) is None else listed[rows.index(row)]
        saved, snapshot = self._saved, None
        if (
            saved is not None
            and saved.message >= max(self._first_message[row], self._complete_from)
            and saved.tick >= max(self._history_start[row] + 1, self._first)
        ):
            place = int(np.searchsorted(ticks, saved.tick))
            snapshot = place, sum(number < saved.message for number, _ in own_messages), saved.snapshots[row]
        return Record(
            row=row, plan=self._plan, env_fn=_dump_env_fn(self._env_fns[row]),
            requests=cloudpickle.dumps(([message for _, message in own_messages], actions)), columns=columns, failed=failed,
            steps_before=step - len(ticks), snapshot=snapshot, why_no_snapshot=self._no_snapshot_reason,
            restarted=self._plan.autoreset_mode is AutoresetMode.NEXT_STEP
            and [self._restart_message[row]] == [number for number, _ in own_messages[:1]],
            lacks_calls=bool(self._first_message[row] < self._lasting_complete_from),
        )  # fmt: skip

    def _place(self, ticks: Array, message: _RecordedMessage) -> int:
        """Return the index of the step after a message; -1 if steps or messages after it were dropped."""
        is_complete = message.tick >= self._first and message.number >= self._complete_from
        return int(np.searchsorted(ticks, message.tick)) if is_complete else -1


def recorder_for_hosts(
    envs: Any, options: FlightRecorder, env_id: str,
    save: weakref.WeakMethod[Callable[[], list[Snapshot]]], stats: weakref.WeakMethod[Callable[[], dict[str, float]]],
) -> Recorder:  # fmt: skip
    """Return a recorder for a vector environment with workers on other machines. Its files are replayed on this machine."""
    observations, actions = fixed_tree(envs.single_observation_space), fixed_tree(envs.single_action_space, "action")
    layout = Layout.for_spaces(observations, actions, envs.num_envs, 1, final=False)
    expected = Expected(envs.observation_mode, envs.single_observation_space, envs.single_action_space)
    env_fns = envs.env_fns if envs.generators == "shared" else with_own_generators(envs.env_fns)
    return Recorder(options, env_fns, env_id, WorkerPlan(layout, envs.autoreset_mode, expected), save, stats)


def _describe_hang(error: StepTimeout, row: int) -> str:
    """Return a line about the hang of a row's worker, with the environment and line of Python if the error names them."""
    text = "it hung" if error.timeout is None else f"it hung for more than {format_seconds(error.timeout)}"
    return f"{text}: {error.where[row]}" if row in error.where else text


def _compact(values: Array) -> Array:
    """Return the values in a smaller dtype if it holds them exactly, because training waits while files are written."""
    if values.dtype.kind in "iu" and values.size:
        small = np.result_type(np.min_scalar_type(values.min()), np.min_scalar_type(values.max()))
        return values.astype(small) if small.kind in "iu" else values
    if values.dtype == np.float64:
        with np.errstate(over="ignore"):
            single = values.astype(np.float32)
        return single if np.array_equal(single, values, equal_nan=True) else values
    return values


def _pickle(value: Any) -> bytes:
    """Pickle a value, or return empty bytes if it cannot be pickled."""

    def pickle_by_value(_: Exception) -> bytes:
        dumps: Callable[[], bytes] = partial(cloudpickle.dumps, value)
        return call_with_fallback(dumps, lambda _: b"", Exception)

    return call_with_fallback(partial(pickle.dumps, value), pickle_by_value, Exception)


def _unpickle(blob: bytes) -> Any:
    """Unpickle a value, or return ``None`` if that is not possible."""
    with contextlib.suppress(Exception):
        return pickle.loads(blob)
    return None


def _dump_env_fn(env_fn: Callable[[], Any]) -> bytes | str:
    """Pickle a function that builds an environment, or return the reason why it cannot be pickled."""
    try:
        return dumps_with_code(env_fn)
    except Exception as error:
        return f"its env_fn cannot be pickled: {type(error).__name__}: {error}"
