"""The actor on a host, which runs an :class:`~vecenv.AsyncVectorEnv` with some of the environments.

No exception is raised across the network: failures are part of a :class:`HostReply`, with the caller's indices.

Ray pickles every array separately, which takes longer than copying a small one, but passes ``bytes`` on unchanged. So
actions of fixed size, and results with nothing else to report, are sent as the ``bytes`` of an array with a record per row
(:func:`record_type`). Large observations are sent as arrays, which Ray returns without a copy.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import platform
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from gymnasium.vector.utils import batch_space, iterate

from vecenv.engine.vector_env import AsyncVectorEnv, Observer
from vecenv.errors import SnapshotMismatch, StepTimeout, VecEnvError, WorkerDied
from vecenv.front.by_row import infos_by_row
from vecenv.link.envs import find_env_id
from vecenv.link.messages import Outcome, PackedEnvFns, PackedError, encode_outcome, name_envs, pack_error, summary
from vecenv.link.observations import flatten
from vecenv.planning.options import WorkerOptions, options_for_processes
from vecenv.planning.plan import choose
from vecenv.planning.probe import EnvProbe
from vecenv.shm import Tree, fixed_tree
from vecenv.shm.layout import Array
from vecenv.state.capture import find_layers, prepare_restore
from vecenv.state.snapshots import Snapshot, describe_kind
from vecenv.system.cores import usable_cores
from vecenv.system.descendants import end_descendants
from vecenv.system.spawning import resolve_variables

_MAX_RECORD_BYTES: Final = 64 * 1024  # copying this many takes about as long as pickling four arrays
_NOTE_BY_ENGINE: Final = re.compile(r"env \d+, (worker \d+|stepped by the caller), pid \d+, during ")
_NOTE_WITH_ROWS: Final = re.compile(r"also(:| failed)|env \d+: its ")
_DIFFERENT_SPACES: Final = "AsyncVectorEnv(..., observation_mode=", "Some environments have an action space different from"
NUMBERS: Final = np.dtype([("reward", np.float64), ("termination", np.bool_), ("truncation", np.bool_)])
"""The record of a row's result without its observation."""


@dataclass(slots=True)
class HostPlan:
    """The settings of a host.

    Attributes:
        index: The index of the host.
        rows: The environments of the host.
        env_fns: The functions that build them.
        cpus: The number of cores reserved for it, which it may use if ``workers`` is ``"auto"``.
        workers: ``num_workers`` of :class:`~vecenv.AsyncVectorEnv`.
        options: Other options of :class:`~vecenv.AsyncVectorEnv`.
        path: The caller's import path; entries that exist on the host's node are added, as for a local worker.
    """

    index: int
    rows: range
    env_fns: PackedEnvFns
    cpus: int
    workers: int | str | None
    options: dict[str, Any]
    path: list[str]


@dataclass(slots=True)
class HostReady:
    """A host's first message: a description of its environments, or an ``error``."""

    pid: int
    node: str
    num_workers: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    render_mode: str | None = None
    env_id: str = "env"
    action_space: Any = None
    observation_space: Any = None
    observation_spaces: tuple[Any, ...] = ()  # of each environment, if they may differ
    error: PackedError | None = None


@dataclass(slots=True)
class RemoteFailure:
    """A failure on a host.

    Attributes:
        rows: The environment that raised, or all environments of a worker that died.
        error: The exception.
        worker_died: True if ``error`` is a :class:`~vecenv.errors.WorkerDied`.
        fatal: True if the environments have to be rebuilt, or have been.
    """

    rows: list[int]
    error: PackedError
    worker_died: bool = False
    fatal: bool = True


@dataclass(slots=True)
class Rebuilt:
    """A reset of environments that the host has rebuilt."""

    rows: list[int]
    seeds: list[int | None]
    options: Any


@dataclass(slots=True)
class HostReply:
    """A reply to one request, with the caller's indices of environments.

    Attributes:
        rows: The environments with a result, in ascending order.
        arrays: Rewards, terminations, truncations and the leaves of observations of fixed size, a row for each of ``rows``.
        outcome: Infos, other observations and results of calls, encoded by :func:`~vecenv.link.messages.encode_outcome`.
        events: Failures and rebuilt environments, in the order in which they occurred.
        raises: True if the failures in ``events`` are to be raised, because the request did not repair them.
        failed: Environments that have to be rebuilt, with the reasons.
        restarts: The number of restarts since the previous such reply.
        error: The error of the request as a whole.
    """

    rows: Sequence[int]
    arrays: list[Array]
    outcome: bytes | None = None
    events: Sequence[RemoteFailure | Rebuilt] = ()
    raises: bool = False
    failed: dict[int, str] = field(default_factory=dict)
    restarts: int = 0
    error: PackedError | None = None


Packed = bytes | tuple[bytes, list[Array]]
"""A reply with results for all environments and nothing else to report: records, or :data:`NUMBERS` and large arrays."""


class Lost(Exception):
    """A substitute for the reply of a host that ended or lost its connection."""


class _EventCollector(Observer):
    """An observer that collects the failures and the rebuilt environments of one request.

    Attributes:
        events: Failures and rebuilt environments, in the order in which they occurred.
        failed: The caller's index -> reason, for environments that have to be rebuilt.
    """

    def __init__(self, plan: HostPlan) -> None:
        self._host, self._first_row = plan.index, plan.rows.start
        self.events: list[RemoteFailure | Rebuilt] = []
        self.failed: dict[int, str] = {}

    def on_reset(self, rows: Any, seeds: list[int | None], options: Any) -> None:
        self.forget(rows)
        self.events.append(Rebuilt(self.callers_rows(rows), list(seeds), options))

    def on_failure(self, rows: Sequence[int], error: Exception, *, worker_died: bool) -> None:
        if rows and not isinstance(error, StepTimeout):  # failures without rows come from the records of errors
            named = self.with_callers_indices(error)
            reason = str(named).partition("\n")[0] if worker_died else summary(named)
            self.failed.update(dict.fromkeys(self.callers_rows(rows), reason))
            self.events.append(RemoteFailure(self.callers_rows(rows), self.pack(error), worker_died))

    def forget(self, rows: Sequence[int]) -> None:
        for row in self.callers_rows(rows):
            self.failed.pop(row, None)

    def callers_rows(self, rows: Sequence[int]) -> list[int]:
        """Return the caller's indices of rows."""
        return (self._first_row + np.asarray(rows, np.intp)).tolist()  # type: ignore[no-any-return]

    def pack(self, error: BaseException) -> PackedError:
        """Pack an error with the caller's indices. Remove the engine's note about the row: the caller adds its own."""
        if notes := getattr(error, "__notes__", None):
            notes[:] = [
                self.renumber(note) if _NOTE_WITH_ROWS.match(note) else note
                for note in notes if not _NOTE_BY_ENGINE.match(note)
            ]  # fmt: skip
        return pack_error(self.with_callers_indices(error))

    def with_callers_indices(self, error: BaseException) -> BaseException:
        """Return a copy of an exception of vecenv with the caller's indices, and any other exception unchanged."""
        if not isinstance(error, VecEnvError):
            return error
        original = getattr(error, "original", "")  # the environment's own text
        renumbered, text = copy(error), self.renumber(str(error).removesuffix(original)) + original
        if hasattr(renumbered, "envs"):
            name_envs(renumbered, self.callers_rows(renumbered.envs))
        if isinstance(renumbered, WorkerDied):
            renumbered.where = {self._first_row + row: self.renumber(place) for row, place in renumbered.where.items()}
            worker = f"worker {renumbered.worker}"
            text = text.replace(f"{worker} (", f"{worker} of host {self._host} (", 1)
        renumbered.args, renumbered.__cause__ = (text,), error.__cause__
        return renumbered

    def renumber(self, text: str) -> str:
        """Replace the host's indices of environments in a text by vecenv with the caller's."""

        def add_offset(found: re.Match[str]) -> str:
            return found[1] + re.sub(r"\d+", lambda digits: str(self._first_row + int(digits[0])), found[2])

        return re.sub(r"\b([Ee]nvs? )(\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*|\[[\d, ]+\])", add_offset, text)

    def renumber_log(self, record: logging.LogRecord) -> bool:
        """Replace the host's indices in a log record of vecenv, and keep the record, as a filter of a logger."""
        # the environment's own text, which may have indices too, follows a colon or a parenthesis
        text = re.sub(r"\benvs? [^:(]+", lambda found: self.renumber(found[0]), record.getMessage(), count=1)
        record.msg, record.args = text, ()
        return True


class Host:
    """The implementation of a host. Its public methods execute the caller's requests.

    ``rows`` are the host's own indices; ``None``: all. Each argument costs Ray 50 to 100 us, so most requests have only one.

    Attributes:
        envs: The local vector environment; ``None`` until it is built.
    """

    def __init__(self, plan: HostPlan) -> None:
        self._plan, self._first_row = plan, plan.rows.start
        self._rows: Any = np.arange(len(plan.rows))
        self._collector = _EventCollector(plan)
        self._reported_restarts = 0
        self.envs: Any = None

    def start(self) -> HostReady:
        """Build the environments, and return their description or an error."""
        ready = HostReady(os.getpid(), platform.node())
        try:
            self.envs = envs = _build(self._plan)
            envs.add_observer(self._collector)
            self._view, self._tree = infos_by_row(envs), fixed_tree(envs.single_observation_space)
            self._shared_tree = self._tree if envs.shared_memory else None
            self._action_tree = fixed_tree(envs.single_action_space, "action")
            self._records, self._actions = record_type(self._tree, results=True), record_type(self._action_tree)
            if self._records.itemsize * envs.num_envs > _MAX_RECORD_BYTES:
                self._records = NUMBERS
            ready.env_id, *_ = envs.exec_func(find_env_id, [0])
            ready.num_workers = max(envs.num_workers, 1)
            ready.metadata = {key: value for key, value in envs.metadata.items() if key != "autoreset_mode"}
            ready.render_mode = envs.render_mode
            ready.action_space, ready.observation_space = envs.single_action_space, envs.single_observation_space
            if envs.observation_mode == "different":
                ready.observation_spaces = envs.get_attr("observation_space")
        except BaseException as error:
            if type(error) is RuntimeError and str(error).startswith(_DIFFERENT_SPACES):
                error.args = (self._collector.renumber(str(error)),)
            ready.error = pack_error(error)
        return ready

    def step(self, actions: bytes) -> HostReply | Packed:
        """Step all environments, with one record of ``actions`` for each. If one fails, the others have only observations.

        :meth:`send` would also return their rewards, flags and infos, but takes longer, because ``recv`` copies its result.
        """
        if (tree := self._shared_tree) is None:
            return self.send(actions)
        envs, collector = self.envs, self._collector
        collector.events = []
        errors: list[Exception] = []
        rows: Sequence[int] = []
        outcome = Outcome()
        try:
            envs.step_async(self._unpack(actions, envs.num_envs))
            rows = self._plan.rows
            rows, arrays = self._split_result(outcome, *self._view.results("step_wait"))
        except Exception as error:  # of the other environments, only the observations are needed, as their latest ones
            errors.append(error)
            rows = [row for row in rows if row not in collector.failed]
            local = np.array(rows, np.intp) - self._first_row
            arrays = [*np.zeros((3, len(rows))), *(leaf[local] for leaf in flatten(tree, envs.observations))]
        return self._reply(rows, arrays, outcome, errors, rebuilds=envs.capabilities.restarts)

    def send(self, actions: bytes, rows: Sequence[int] | None = None, pickled: bool = False) -> HostReply | Packed:
        """Step some environments. ``actions``: a batch in their order, pickled or as one record per environment."""
        local = self._rows if rows is None else rows
        return self._collect(len(local), lambda: self.envs.send(self._unpack(actions, len(local), pickled), local))

    def _unpack(self, actions: bytes, count: int, pickled: bool = False) -> Any:
        """Return the batch of ``count`` actions."""
        if pickled:
            return pickle.loads(actions)
        return self._action_tree.build(iter(fields(actions, self._actions, count)))  # type: ignore[union-attr]

    def reset(self, arguments: bytes, rows: Sequence[int] | None = None) -> HostReply | Packed:
        """Reset some environments. ``arguments``: a seed for each, and options for each or for all, pickled."""
        local = self._rows if rows is None else rows

        def begin() -> None:
            seeds, options = pickle.loads(arguments)
            self.envs.reset_async(seeds, options, env_id=rows)  # with None, the first seed also seeds restarts
            self._collector.forget(local)
            del self._collector.events[:1]  # the event of this reset itself

        return self._collect(len(local), begin)

    def call(self, request: bytes, rows: Sequence[int] | None = None) -> HostReply | Packed:
        """Call a method of the vector environment, and return the results by row; of a load, ``None`` for each loaded row.

        The name, arguments and keyword arguments are pickled in ``request``. ``require_fit`` is a method of the host itself;
        all other names are public methods of the vector environment.
        """
        rows = self._rows if rows is None else rows
        outcome, errors = Outcome(), []
        self._collector.events = []
        try:
            name, args, kwargs = pickle.loads(request)
            results = getattr(self if name == "require_fit" else self.envs, name)(*args, **kwargs)
            if name in ("call", "exec_func"):
                results = [results[row] for row in rows]
            if name in ("call", "exec_func", "save"):
                outcome.results = dict(zip(self._collector.callers_rows(rows), results, strict=True))
            loaded = rows if name == "load" else ()
        except Exception as error:
            errors.append(error)
            loaded = getattr(error, "loaded_rows", ())
        self._collector.forget(loaded)
        outcome.results.update(dict.fromkeys(self._collector.callers_rows(loaded)))
        return self._reply([], [], outcome, errors)

    def require_fit(self, snapshots: Sequence[Snapshot], rows: Sequence[int]) -> None:
        """Raise for snapshots that do not fit their rows, except failed rows: the load itself rebuilds and checks those."""
        for row, snapshot in zip(rows, snapshots, strict=True):
            if self._first_row + row not in self._collector.failed:
                self.envs.exec_func(_require_fit, [row], snapshot, own_generators=self.envs.generators == "own")

    def stats(self) -> dict[str, float]:
        """Return statistics like :meth:`vecenv.AsyncVectorEnv.stats`."""
        return self.envs.stats()  # type: ignore[no-any-return]

    def close(self, timeout: float) -> list[str]:
        """Close all environments and end all workers; return the warnings about environments that raised."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.envs.close(timeout=timeout)
        end_descendants([os.getpid()])  # processes that environments in the host's own share have started
        return [str(each.message) for each in caught if issubclass(each.category, UserWarning)]

    # -- replies ----------------------------------------------------------------------------------------------------

    def _collect(self, count: int, begin: Callable[[], None]) -> HostReply | Packed:
        """Begin a step or a reset of ``count`` rows, and return the results of all that do not fail."""
        self._collector.events = []
        errors: list[Exception] = []
        rows: Sequence[int] = []
        arrays: list[Array] = []
        outcome = Outcome()
        try:
            begin()
        except Exception as error:
            errors.append(error)
            count = 0
        while count:
            try:
                rows, arrays = self._split_result(outcome, *self._view.results("recv", count=count))
                break
            except Exception as error:
                errors.append(error)
                count = len(self.envs.in_flight)  # unchanged if only an info cannot be sent: its row has a result
        return self._reply(rows, arrays, outcome, errors, rebuilds=self.envs.capabilities.restarts)

    def _split_result(
        self, outcome: Outcome, observations: Any, *numbers_and_infos: Any
    ) -> tuple[Sequence[int], list[Array]]:
        """Return the sorted rows of a result and their arrays; put everything else into ``outcome``."""
        *arrays, infos = numbers_and_infos
        rows: Sequence[int] = self._plan.rows if infos.env_ids is None else self._collector.callers_rows(infos.env_ids)
        named_infos = zip(rows, infos.rows(), strict=True)
        outcome.infos.update({row: info for row, info in named_infos if info or type(info) is not dict})
        if self._tree is not None:
            arrays += flatten(self._tree, observations)
        else:
            space = batch_space(self.envs.single_observation_space, len(rows))
            outcome.observations.update(zip(rows, iterate(space, observations), strict=True))
        if isinstance(rows, list) and rows != sorted(rows):
            order = np.argsort(rows)
            rows, arrays = sorted(rows), [array[order] for array in arrays]
        return rows, arrays

    def _reply(
        self, rows: Sequence[int], arrays: list[Array], outcome: Outcome, errors: list[Exception], *, rebuilds: bool = False
    ) -> HostReply | Packed:
        """Return the reply to a request that raised ``errors``. With ``rebuilds``, failed environments have been rebuilt."""
        collector, records = self._collector, self.envs.errors
        reported = {event.rows[0] for event in collector.events if isinstance(event, RemoteFailure)}
        for record in records:
            if record.env is not None and self._first_row + record.env not in reported:
                failure = RemoteFailure(collector.callers_rows([record.env]), collector.pack(record.error), fatal=False)
                collector.events.append(failure)
        records.clear()  # the caller keeps them
        has_only_arrays = not (outcome.has_payload() or collector.events or collector.failed or errors)
        if has_only_arrays and len(rows) == self.envs.num_envs:
            batch, names = np.empty(len(rows), self._records), self._records.names or ()
            for name, array in zip(names, arrays, strict=False):
                batch[name] = array
            return (batch.tobytes(), arrays[len(names) :]) if len(names) < len(arrays) else batch.tobytes()
        # failures without an exception were repaired, such as the death of an idle worker before a reset
        raises = bool(errors) and not rebuilds and any(isinstance(event, RemoteFailure) for event in collector.events)
        error = collector.pack(errors[0]) if errors and not raises else None
        encoded = encode_outcome(outcome) if outcome.has_payload() else None
        before = self._reported_restarts
        if collector.events:
            self._reported_restarts = int(self.envs.stats()["restarts"])
        restarts = self._reported_restarts - before
        return HostReply(rows, arrays, encoded, collector.events, raises, collector.failed, restarts, error)


def record_type(tree: Tree | None, *, results: bool = False) -> np.dtype[Any]:
    """Return the dtype of a record with the leaves of a space; with ``results``, the reward and the flags come first."""
    leaves = () if tree is None else tree.leaves()
    named: list[Any] = [(str(index), leaf.dtype, leaf.shape) for index, leaf in enumerate(leaves)]
    return np.dtype(NUMBERS.descr + named if results else named)


def fields(data: bytes, records: np.dtype[Any], count: int) -> list[Array]:
    """Return the fields of ``count`` records as read-only arrays."""
    batch = np.ndarray(count, records, data)
    return [batch[name] for name in records.names or ()]


def _require_fit(env: Any, snapshot: Snapshot, *, own_generators: bool) -> None:
    """Raise ``SnapshotMismatch`` if a snapshot does not fit, without changing anything.

    With ``own_generators``, ``env`` lacks the outermost wrapper of the snapshot.
    """
    try:
        layers, saved_kind = find_layers(env), snapshot.row.kind
        own_kind = describe_kind(layers)
        if own_generators:
            saved_kind = replace(saved_kind, layers=saved_kind.layers[1:], versions=own_kind.versions)
        if difference := saved_kind.differs_from(own_kind):
            raise SnapshotMismatch(difference)
        if not own_generators:
            prepare_restore(env, snapshot.body, layers)
    except SnapshotMismatch as error:
        raise SnapshotMismatch(f"the snapshot does not fit: {error}") from error


def _build(plan: HostPlan) -> AsyncVectorEnv[Any, Any]:
    """Build the local vector environment of a host."""
    sys.path += [entry for entry in plan.path if entry not in sys.path and os.path.exists(entry)]
    hint = " (the modules that it imports have to be installed on every node)"
    env_fns = plan.env_fns.load(plan.rows[0], "on its host", hint)
    options = {**plan.options, "copy": False}
    own = options.get("worker_options") or WorkerOptions()
    workers: Any = plan.workers
    if workers == "auto":
        cause = options_for_processes(options.get("on_failure"), options.get("step_timeout"), own.env)
        probe = EnvProbe(
            env_fns, multiprocessing.get_context(options["context"]), own.start_timeout, daemon=options["daemon"],
            own_generators=options["generators"] == "own", variables=resolve_variables(own.env, 0),
        )  # fmt: skip
        times, found = probe.measure()
        chosen = choose(
            times, len(env_fns), plan.cpus, use_caller=False if cause else None, independence=found, cause=cause
        )  # fmt: skip
        workers, options["use_caller"] = chosen.num_workers, chosen.use_caller or options.get("use_caller")
    caller = bool(options.get("use_caller"))
    if workers is None and caller:
        workers = max(usable_cores() - 1, 1)
    processes = min(len(env_fns) if workers is None else workers, len(env_fns) - caller)
    if processes and own.cores is None and hasattr(os, "sched_getaffinity"):
        # workers neither spin nor are bound to single cores: Ray's threads and perhaps other hosts run there too
        options["worker_options"] = replace(own, cores=[sorted(os.sched_getaffinity(0))] * processes)
    return AsyncVectorEnv(env_fns, num_workers=workers, **options)
