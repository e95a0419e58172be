"""What runs on a host: an ordinary engine over some of the environments, asked in the words a worker is asked in.

A host relays: it hands a request to its own workers, and what they wrote into its shared memory goes back as it lies there,
one contiguous array a leaf. Nothing is raised across the network: failures are part of the answer, as a worker's are, with
the environments counted as the caller counts them.

Ray pickles every array by itself, which takes longer than what a small one holds; a ``bytes`` it hands on as it is. So small
arrays travel joined to one ``bytes`` (:class:`Packing`). Large ones travel as arrays: Ray gives those out where they
arrived, but a ``bytes`` it copies first.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from vecenv.engine.engine import Engine
from vecenv.engine.handles import PoolOptions, envs_text
from vecenv.engine.pending import COMMANDS, Death, Result, Settlement
from vecenv.engine.pool import WorkerPool
from vecenv.engine.vector_env import AsyncVectorEnv
from vecenv.errors import WorkerDied
from vecenv.front.arguments import options_of_rows, reset_mask_of, seeds_of
from vecenv.link.messages import Definition, Failure, Op, Outcome, PackedEnvFns, PackedError, encode_outcome, pack_error
from vecenv.planning.plan import choose
from vecenv.planning.probe import EnvProbe
from vecenv.shm import Arena
from vecenv.shm.layout import Array
from vecenv.state.snapshots import Snapshot
from vecenv.system.descendants import end_descendants
from vecenv.system.spawning import variables_of
from vecenv.worker.envs import WorkerPlan

_LARGE: Final = 16 * 1024  # bytes; copying so many takes a few microseconds, pickling an array tens

Packed = bytes | tuple[Any, ...]
"""The small arrays joined, or those and each of the large ones."""


class Packing:
    """Packs arrays of the shapes and dtypes of ``arrays``, all of them C-contiguous, and unpacks them again."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._forms = [(array.shape, array.dtype, array.nbytes) for array in arrays]
        self._any_large = any(size >= _LARGE for _, _, size in self._forms)

    def pack(self, arrays: Sequence[Any]) -> Packed:
        if not self._any_large:
            return b"".join(arrays)
        return b"".join(a for a in arrays if a.nbytes < _LARGE), *(a for a in arrays if a.nbytes >= _LARGE)

    def unpack(self, packed: Packed) -> list[Array]:
        """The arrays, read-only: views of ``packed``, not copies."""
        joined, *large = packed if isinstance(packed, tuple) else (packed,)
        rest, arrays, at = iter(large), [], 0
        for shape, dtype, size in self._forms:
            if size >= _LARGE:
                arrays.append(next(rest))
            else:
                arrays.append(np.ndarray(shape, dtype, joined, at))
                at += size
        return arrays


@dataclass(slots=True)
class HostPlan:
    """What a host is sent.

    Attributes:
        index: Which host it is.
        rows: Which environments are its own.
        env_fns: What builds them.
        cpus: Cores it may use, where ``workers`` is ``"auto"``.
        workers: As ``num_workers`` of :class:`~vecenv.AsyncVectorEnv`.
        options: Other options of :class:`~vecenv.AsyncVectorEnv`.
        path: Where the caller imports from; what there is of it on the host's node is added, as for a local worker.
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
    """A host's first message: what its environments are, or what went wrong (``error``)."""

    pid: int
    node: str
    num_workers: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    render_mode: str | None = None
    action_space: Any = None
    observation_space: Any = None
    observation_spaces: tuple[Any, ...] = ()  # each environment's, where they may differ
    mismatches: list[tuple[int, str, str]] = field(default_factory=list)
    error: PackedError | None = None


@dataclass(slots=True)
class HostReply:
    """The answer to one request.

    Attributes:
        leaves: Observations of fixed size, a row per environment asked for.
        numbers: Rewards, terminations, truncations.
        columns: There are infos or final observations.
        infos: Schema numbers, records, definitions that are new; see :meth:`vecenv.link.infos.InfoReader.export`.
        outcome: Everything else, sealed (:mod:`vecenv.link.messages`).
        lost: Environments that only a reset brings back, and why.
        error: What the request as a whole failed of.
        files: What the caller is to write about environments that failed; see :mod:`vecenv.recording.recorder`.
    """

    leaves: list[Array] | None = None
    numbers: tuple[Array, Array, Array] | None = None
    columns: bool = False
    infos: tuple[Array, Array, dict[int, Definition]] | None = None
    outcome: bytes | None = None
    lost: dict[int, str] | None = None
    error: PackedError | None = None
    files: list[tuple[int, str, bytes]] | None = None

    def is_plain(self) -> bool:
        """Whether there is nothing in it but numbers and observations of fixed size."""
        more = self.columns or self.lost or self.error or self.files
        return not more and self.infos is None and self.outcome is None


class _SharedNodeEngine(Engine):
    """The engine of a host: it does not spin or pin cores, since Ray's threads and perhaps other hosts run there too."""

    def _open_pool(self, plan: WorkerPlan, arena: Arena, options: PoolOptions, num_workers: int) -> WorkerPool:
        return WorkerPool(plan, arena, self.batch, options, self)


class _HostVectorEnv(AsyncVectorEnv[Any, Any]):
    """Starts the engine of a host."""

    _engine_class = _SharedNodeEngine

    def _check_spaces(self) -> None:
        """The caller does, which knows of all hosts."""


class Host:
    """The body of a host: everything a caller may ask of it.

    Attributes:
        envs: The local vector environment; ``None`` before the start, and where it failed.
    """

    _driver: Engine

    def __init__(self, plan: HostPlan) -> None:
        self._plan = plan
        self._first = plan.rows.start  # index of the first environment, as the caller counts
        self._answered: tuple[int, HostReply | Packed] | None = None  # the latest request's number, and its answer
        self._warned_of_draws = False
        self._known_schemas: set[int] = set()
        self._coming: dict[int, Snapshot] = {}  # what rows are about to be loaded with
        self.envs: _HostVectorEnv | None = None

    def start(self) -> HostReady:
        """Build the environments."""
        ready = HostReady(os.getpid(), platform.node())
        try:
            self.envs = envs = _build(self._plan)
            self._driver = envs._driver
            if self._driver.recorder is not None:
                self._driver.recorder.parcels, self._driver.recorder.first_row = [], self._first
            self.num_envs, batch = envs.num_envs, envs._driver.batch
            self._actions = Packing(batch.actions or [])
            self._answers = Packing([batch.rewards, batch.terminations, batch.truncations, *(batch.observations or [])])
            ready.num_workers = max(envs.num_workers, 1)
            ready.metadata = {key: value for key, value in envs.metadata.items() if key != "autoreset_mode"}
            ready.render_mode = envs.render_mode
            ready.action_space, ready.observation_space = envs.single_action_space, envs.single_observation_space
            ready.mismatches = [(self._first + env, which, space) for env, which, space in envs._driver.mismatches]
            if envs.observation_mode == "different" and not ready.mismatches:
                ready.observation_spaces = envs.get_attr("observation_space")
        except BaseException as error:
            ready.error = pack_error(error)
        return ready

    def serve(self, seq: int, op: int, rows: list[int] | None, payload: Any) -> HostReply | Packed:
        """Carry out a request, once: one that was carried out already is answered as before.

        Args:
            seq: Its number.
            op: A word of :class:`~vecenv.link.messages.Op`.
            rows: Which environments, counted from this host's first; ``None``: all.
            payload: As a worker gets it, pickled; or for a step the leaves of a batch of actions.

        Returns:
            The answer; after a step of all environments packed, if rewards, flags and observations are all of it.
        """
        if self._answered is not None and self._answered[0] == seq:
            return self._answered[1]
        reply: HostReply | Packed
        try:
            reply = self._answer(Op(op), rows, payload)
            if rows is None and reply.leaves is not None and reply.numbers is not None and reply.is_plain():
                reply = self._answers.pack([*reply.numbers, *reply.leaves])
        except BaseException as error:
            self._driver.pending = self._driver.emptied(0, 0)  # it failed as a whole: nothing of it is pending
            reply = HostReply(lost=self._lost(), error=pack_error(error))
        if (recorder := self._driver.recorder) is not None and recorder.parcels and isinstance(reply, HostReply):
            reply.files, recorder.parcels = recorder.parcels, []
        self._answered = seq, reply
        return reply

    def step(self, seq: int, actions: Packed) -> HostReply | Packed:
        """Step all environments, with the leaves of a batch of actions: :meth:`serve`."""
        return self.serve(seq, Op.STEP, None, tuple(self._actions.unpack(actions)))

    def stats(self) -> dict[str, float]:
        """As :meth:`vecenv.AsyncVectorEnv.stats`."""
        return {} if self.envs is None else self._driver.stats()

    def record(self, row: int) -> tuple[int, str, bytes]:
        """A file about an environment, for the caller to write."""
        recorder = self._driver.recorder
        assert recorder is not None
        recorder.record(row, None, None)
        assert recorder.parcels is not None
        return recorder.parcels.pop()

    def close(self, timeout: float) -> list[Failure]:
        """Close all environments and end all workers; what environments raised in their own ``close``."""
        said: list[Failure] = []
        if self.envs is not None:
            self.envs.closed, pool = True, self._driver.pool
            pool.close(timeout, terminate=False)
            said = [self._shipped(failure) for failure, _ in pool.failures_in_close]
            pool.release()
        end_descendants([os.getpid()])  # what environments of the host's own share started
        return said

    # -- requests ---------------------------------------------------------------------------------------------------

    def _answer(self, op: Op, rows: list[int] | None, payload: Any) -> HostReply:
        engine = self._driver
        self._ask(op, rows, pickle.loads(payload) if isinstance(payload, bytes) else payload)
        request = engine.call
        assert request is not None
        engine.wait_for(request, None)
        settlement = engine.settlement_of(request)
        if engine.recorder is not None:
            engine.recorder.answered(request)
        reply = HostReply()
        outcome = Outcome()
        self._resolve(settlement, reply, outcome)
        engine.pending = engine.emptied(request.steps, request.resets)
        result = settlement.result
        assert result is not None
        if op is Op.LOAD:
            engine.put_beside({row: self._coming[row].row for row in result.results if row in self._coming})
        outcome.results = self._moved(result.results)
        if op <= Op.REBUILD_SOME:
            self._page(op, rows, result, reply, outcome)
            if engine.policy.restart:
                engine.remembered.keep(range(self.num_envs) if rows is None else rows, all_rows=rows is None)
        if engine.warned_of_draws and not self._warned_of_draws:
            outcome.warnings.append(("generators", engine.warned_of_draws))
            self._warned_of_draws = True
        if not outcome.is_plain():
            reply.outcome = encode_outcome(outcome)
        return reply

    def _ask(self, op: Op, rows: list[int] | None, payload: Any) -> None:
        engine = self._driver
        if op in (Op.STEP, Op.STEP_SOME):
            if engine.recorder is not None and engine.recorder.due:
                engine.recorder.snapshot(engine.store.row)
            self._send_step(rows, payload)
        elif op in (Op.RESET, Op.RESET_SOME):
            self._ask_reset(rows, *(payload or (None, None)))
        elif op is Op.REBUILD_SOME:
            seeds, options, reset_next = payload
            chosen = list(range(self.num_envs)) if rows is None else rows
            place = {row: position for position, row in enumerate(chosen)}

            def given(mine: list[int]) -> tuple[Any, ...]:
                places = [place[row] for row in mine]
                return [seeds[position] for position in places], options_of_rows(options, places), reset_next

            engine.ask_some("reset", op, chosen, given)
        elif op is Op.CALL:
            engine.begin_call(*payload)
        elif op is Op.SET_ATTR:
            engine.begin_set_attr(*payload)
        elif op is Op.SET_NEXT:
            engine.begin_set_next(range(self.num_envs), payload)
        elif op is Op.EXEC:
            chosen, func, args, kwargs = payload
            engine.begin_exec(func, chosen, args, kwargs)
        elif op is Op.CHECK:
            self._coming = dict(payload)
            coming = self._coming.items()
            engine.ask_call(op, lambda to: [(k - to.rows[0], one) for k, one in coming if k in to.rows] or None, "load")
        else:
            engine.ask_call(op, lambda to: [k - to.rows[0] for k in payload if k in to.rows] or None, COMMANDS[op])

    def _send_step(self, rows: list[int] | None, actions: Any) -> None:
        if isinstance(actions, tuple):  # a batch of the action space, leaf by leaf: where the workers look for it
            assert self._driver.batch.actions is not None
            for leaf, values in zip(self._driver.batch.actions, actions, strict=True):
                leaf[slice(None) if rows is None else rows] = values
            actions = None
        if rows is None:
            self._driver.ask_step(actions)
            return
        place = {row: position for position, row in enumerate(rows)}
        self._driver.ask_some("step", Op.STEP_SOME, rows, lambda mine: actions and [actions[place[row]] for row in mine])

    def _ask_reset(self, rows: list[int] | None, seeds: Sequence[Any] | None, options: Any) -> None:
        given, mask = list(seeds or [None] * self.num_envs), None
        if rows is not None:
            mask = np.zeros(self.num_envs, np.bool_)
            mask[rows] = True
            _, options = reset_mask_of(options, self.num_envs, rows)
            given = seeds_of(seeds, self.num_envs, rows)
        if self._driver.recorder is not None:
            given = self._driver.recorder.seeds(given, None if rows is None else np.array(rows))
        self._driver.ask_reset(given, options, mask)

    # -- answers ----------------------------------------------------------------------------------------------------

    def _page(self, op: Op, rows: list[int] | None, result: Result, reply: HostReply, outcome: Outcome) -> None:
        """The rows that were asked for, as they lie in shared memory, and what belongs to them."""
        engine, batch = self._driver, self._driver.batch
        where: Any = slice(None) if rows is None else np.array(rows)
        answered = range(self.num_envs) if rows is None else rows
        if engine.layout.observations is not None and batch.observations is not None:
            reply.leaves = [leaf[where] for leaf in batch.observations]
        else:
            outcome.observations = {self._first + row: engine.store.row(row) for row in answered if row not in engine.failed}
        if op in (Op.STEP, Op.STEP_SOME):
            reply.numbers = batch.rewards[where], batch.terminations[where], batch.truncations[where]
        reply.columns = result.columns
        if result.columns:
            reply.infos = engine.export_infos(where, self._known_schemas)
            outcome.infos = self._moved(result.infos)
            outcome.finals = self._moved(engine.finals(answered) | result.finals)

    def _resolve(self, settlement: Settlement, reply: HostReply, outcome: Outcome) -> None:
        """Rebuild what failed, or report it."""
        engine, result = self._driver, settlement.result
        assert result is not None
        if not (result.failures or result.deaths or settlement.lost):
            return
        if engine.policy.restart and settlement.command in ("step", "reset"):
            error = engine.resolve(settlement)
            if error is not None:  # more restarts than the budget has
                reply.error = pack_error(error)
        else:
            engine.ledger.record(settlement, result)
            outcome.failures += [self._shipped(failure) for failure, _ in result.failures]
            # rows that were sent before it was known that their worker had died hear of it as well
            dead = [worker.death for worker in engine.pool.workers if not set(settlement.lost).isdisjoint(worker.rows)]
            deaths = {death.worker: death for death in [*dead, *result.deaths] if death is not None}
            for death in deaths.values():
                row = next((row for row in settlement.rows if row in death.envs), death.envs[0])
                outcome.failures.append(Failure(self._first + row, pack_error(self._death(death))))
            engine.ledger.mark_failed(result, settlement.rows, all_of_them=False)
        reply.lost = self._lost()

    def _death(self, death: Death) -> WorkerDied:
        """A worker's death, as the caller is to read it."""
        rows = range(self._first + death.envs[0], self._first + death.envs[-1] + 1)
        reason = death.text.partition(" died ")[2]
        text = f"worker {death.worker} of host {self._plan.index} (pid {death.pid}, {envs_text(rows)}) died {reason}"
        return WorkerDied(
            text, worker=death.worker, envs=list(rows), pid=death.pid, exitcode=death.exitcode, command=death.command
        )

    def _shipped(self, failure: Failure) -> Failure:
        packed = failure.error if isinstance(failure.error, PackedError) else pack_error(failure.error)
        return Failure(self._first + failure.env, packed, failure.fatal)

    def _lost(self) -> dict[int, str]:
        """Environments that only a reset brings back, and why."""
        return self._moved(self._driver.failed)

    def _moved(self, table: dict[int, Any]) -> dict[int, Any]:
        return {self._first + row: value for row, value in table.items()}


def _build(plan: HostPlan) -> _HostVectorEnv:
    """The local vector environment of a host."""
    sys.path += [place for place in plan.path if place not in sys.path and os.path.exists(place)]
    hint = " (what it imports has to be installed on every node)"
    env_fns = plan.env_fns.load(plan.rows[0], "on its host", hint)
    options = dict(plan.options)
    workers: Any = plan.workers
    if workers == "auto":
        variables = options.get("worker_env")
        wanted = options.get("on_failure") == "restart" or options.get("step_timeout") is not None or variables
        context = multiprocessing.get_context(options["context"])
        probe = EnvProbe(
            env_fns, context, options["start_timeout"], daemon=options.get("daemon", True),
            variables=variables_of(variables, 0),
        )  # fmt: skip
        chosen = choose(probe.times(), len(env_fns), plan.cpus, isolate=True if wanted else None)
        workers = chosen.num_workers
        if chosen.use_caller:
            options["use_caller"] = True
    return _HostVectorEnv(env_fns, num_workers=workers, **options)
