"""The engine: rows of environments that are asked and answer, whatever they look like from outside.

It composes the shared block, the store of observations, the table of requests (:mod:`vecenv.engine.pending`), the pool of
workers, and what is done about failures (:mod:`vecenv.engine.recovery`). Arguments are checked before, in
:mod:`vecenv.front.vector_env`.

A save without a proof so far makes two requests: one for the states, then one for the proof that they are exact, once for
each kind of environment. A load makes two as well: the first asks whether every snapshot fits, and the second puts them in
place. The second request takes the place of the first in the table of pending requests, by one store. So an interrupted call
is either not made, or its answer is pending, as that of any other call, and ``call_wait`` gives it.
"""

from __future__ import annotations

import itertools
import pickle
import sys
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
from gymnasium import logger
from gymnasium.vector import AutoresetMode

from vecenv.engine.frozen import Frozen, FrozenCopy
from vecenv.engine.handles import CallerWorker, PoolOptions, ProcessWorker
from vecenv.engine.pending import ALL, Result, Settlement, Worker, WorkerRequest
from vecenv.engine.pool import WorkerPool
from vecenv.engine.recovery import Ledger, Policy, Remembered, RestartBudget
from vecenv.engine.steps import Steps, wait_name
from vecenv.errors import NotRestorable, SnapshotMismatch, WorkerDied
from vecenv.front.arguments import ResetOptions, deadline_of, options_of_rows
from vecenv.front.capabilities import Capabilities
from vecenv.link.channel import ChannelClosed
from vecenv.link.infos import NO_INFO, InfoReader, add_info
from vecenv.link.messages import Definition, Op, encode
from vecenv.link.observations import Store
from vecenv.shm import Arena, Batch, Layout
from vecenv.shm.layout import Array
from vecenv.state.codecs import Codec, how_of
from vecenv.state.snapshots import FORMAT, Kind, Row, Snapshot, Snapshots, StateDict, parse_snapshots
from vecenv.system.copies import has_copies
from vecenv.system.cores import placements
from vecenv.system.uninterrupted import Uninterrupted, succeeds_when_repeated
from vecenv.worker.envs import WorkerPlan
from vecenv.worker.main import Ready, make_rows


def shares(num_envs: int, parts: int, first: int = 0) -> list[range]:
    """``num_envs`` rows from ``first`` on in ``parts`` contiguous ranges whose lengths differ by one at most."""
    bounds = [first + num_envs * part // parts for part in range(parts + 1)]
    return [range(low, high) for low, high in itertools.pairwise(bounds)]


class Engine(Steps):
    """Environments in workers, and what is known of each row.

    Args:
        env_fns: What builds the environments.
        layout: What lies where.
        make_store: Builds the store of observations from the views of the shared block.
        plan: What every worker is sent.
        options: How to run worker processes.
        policy: What to do about failures.
        num_workers: Worker processes; 0 with ``caller_share=num_envs`` is no process at all.
        caller_share: How many rows, the first ones, the caller steps itself.

    Attributes:
        proved: Kinds of environments whose snapshots were proved to be exact.
        steps_before: Of all steps that were taken, that many came with a state that was loaded.
    """

    backend = "process"
    own_means = "its workers"
    _pool_class: type[WorkerPool] = WorkerPool
    proved: frozenset[Kind] = frozenset()
    steps_before: int = 0

    def __init__(
        self, env_fns: Sequence[Callable[[], Any]], layout: Layout, make_store: Callable[[Batch], Store], plan: WorkerPlan,
        options: PoolOptions, policy: Policy, num_workers: int, caller_share: int,
    ) -> None:  # fmt: skip
        self.num_envs = self.batch_size = len(env_fns)
        self.policy = policy
        self.mode = plan.autoreset_mode
        self.ledger = Ledger()
        self.failed = self.ledger.failed
        self.said = {}
        self.frozen: weakref.WeakSet[Frozen] = weakref.WeakSet()
        super().__init__(self.num_envs)

        arena = self.arena = Arena(layout.size)
        self.batch = layout.view(arena.buffer, spares=False)
        self.store = make_store(self.batch)
        self.layout = layout
        self._infos = InfoReader(self.batch.info_schemas, self.batch.infos, ragged=plan.ragged)
        self.mismatches: list[tuple[int, str, str]] = []
        self.pool = self._open_pool(plan, arena, options, num_workers)
        self.restart_seeds = np.random.SeedSequence()
        self.remembered = Remembered(self.store, layout.observations)
        self.budget = RestartBudget(policy.restart_limit, policy.restart_period, lambda: self.pending.steps / self.num_envs)
        try:
            self._start(env_fns, plan, num_workers, caller_share)
        except BaseException:
            self.pool.close(0.0, terminate=True)
            self.pool.release()
            raise

    def _open_pool(self, plan: WorkerPlan, arena: Arena, options: PoolOptions, num_workers: int) -> WorkerPool:
        if not options.placements:
            options.placements, options.caller_spin = placements(num_workers)
        pool = self._pool_class(plan, arena, self.batch, options, self)
        pool.watchdog.bounded = () if self.policy.step_timeout is None else ("step", "reset")
        return pool

    def _start(self, env_fns: Sequence[Callable[[], Any]], plan: WorkerPlan, num_workers: int, caller_share: int) -> None:
        own: list[CallerWorker] = []
        if caller_share:
            env_rows = make_rows(env_fns[:caller_share], 0, num_workers, plan, self.batch, interrupts=True)
            own = [CallerWorker(num_workers, range(caller_share), env_rows, self)]
        started, readies = self.pool.start(self._parts(env_fns, num_workers, caller_share))
        workers: list[Worker] = [*own, *started]
        self.pool.set_workers(workers)
        if own:
            env_rows.use_generators(plan.generators)
            readies.insert(0, Ready(own[0].pid, *env_rows.build()))
        self.mismatches = [mismatch for ready in readies for mismatch in ready.mismatches]
        failed = [(failure, worker) for worker, ready in zip(workers, readies, strict=True) for failure in ready.failures]
        if (error := self.start_failure(failed)) is not None:
            raise error

    def _parts(
        self, env_fns: Sequence[Callable[[], Any]], num_workers: int, caller_share: int
    ) -> list[tuple[range, Sequence[Callable[[], Any]]]]:
        """The rows of every worker process, and what builds them."""
        rows = shares(self.num_envs - caller_share, num_workers, caller_share) if num_workers else []
        return [(part, env_fns[part.start : part.stop]) for part in rows]

    @property
    def warned_of_draws(self) -> str:
        """The warning that environments draw from generators that they share; empty if there was none."""
        return self.said.get("generators", "")

    @property
    def restarts(self) -> int:
        """How many there were."""
        return self.ledger.restarts

    @property
    def capabilities(self) -> Capabilities:
        plain = not self.layout.spares
        return Capabilities(
            self.backend, first_ready=plain or self.mode is AutoresetMode.NEXT_STEP, restarts=self.policy.restart,
            snapshots=True, spare_workers=not plain, in_this_process=self.pool.own is not None,
            freezing=not self.reason("freezing"), recording=self.recorder is not None,
        )  # fmt: skip

    def reason(self, capability: str) -> str:
        if capability == "recording":
            return "record_failures= was not given"
        return self._why_not_frozen() if capability == "freezing" else super().reason(capability)

    def _why_not_frozen(self) -> str:
        """Why environments cannot be frozen; empty: they can."""
        if not has_copies():
            return f"it needs Linux, pidfds and /proc, and this system is {sys.platform}"
        if self.layout.spares:
            return "spare workers change their rows"
        if not self.pool.processes or len(self.pool.processes) < self.num_envs:
            return "each environment has to have a process of its own: give num_workers=None"
        return ""

    # -- resetting --------------------------------------------------------------------------------------------------

    def reset(self, seeds: list[Any], ids: Array | None, options: ResetOptions, *, by_row: bool, **about: Any) -> None:
        """As of a driver; ``about``: other attributes of the request."""
        if by_row:
            assert ids is not None
            rows = ids.tolist()
            self._require_not_in_flight("reset_async", rows)
        if self.recorder is not None:
            seeds = self.recorder.seeds(seeds, ids)
        if by_row:
            self.ask_reset_rows(rows, seeds, options, **about)
        else:
            self.ask_reset(seeds, options, None if ids is None else np.isin(np.arange(self.num_envs), ids), **about)

    def ask_reset(self, seeds: Sequence[Any], options: ResetOptions, mask: Array | None, **about: Any) -> None:
        """Reset the rows of ``mask`` (``None``: all), rebuilding those that had failed. What was sent by row is dropped.

        ``seeds`` has an entry for every row there is, and so have ``options`` if they are a list. ``about``: other
        attributes of the request.
        """
        chosen = list(range(self.num_envs)) if mask is None else np.flatnonzero(mask).tolist()
        if not self.idle:
            self.drain()
        if mask is None and self.num_envs and isinstance(seeds[0], (int, np.integer)):
            self.restart_seeds = np.random.SeedSequence(abs(int(seeds[0])))
        self.revive(chosen)
        if mask is not None:
            self.batch.info_schemas[~mask] = NO_INFO
            self.batch.final[~mask] = False
            self.show_whole([row for row in self.failed if not mask[row]])
        request = self._request(
            "reset", Op.RESET, Op.RESET_SOME, chosen, _reset_payload(seeds, options), mask=mask, seeds=seeds,
            options=options, **about,
        )  # fmt: skip
        self.pool.ask(request, alone=True)

    def ask_reset_rows(self, rows: Sequence[int], seeds: Sequence[Any], options: ResetOptions, **about: Any) -> None:
        """Reset some rows, to be received one by one; ``seeds``, ``options`` and ``about`` as of :meth:`ask_reset`."""
        self.revive(rows)
        payload_of = _reset_payload(seeds, options)
        request = self._request(
            "reset", Op.RESET_SOME, Op.RESET_SOME, sorted(rows), payload_of, by_row=True, seeds=seeds,
            options=options, **about,
        )  # fmt: skip
        self.pool.ask(request)

    def drain(self) -> None:
        """Wait for all that is underway, before a reset that drops it. What failed is on record.

        Raises:
            StepTimeout: Not within the engine's ``step_timeout``; nothing is lost.
        """
        limit = self.policy.step_timeout
        deadline = deadline_of(limit)
        while self.underway():
            if not self._more(dict(self.pending.arrived), deadline):
                if not any(map(self.is_pending, self.pool.workers)):
                    break
                self._end_all_hanging(limit)
        for (_, index), request in list(self.pending.arrived.items()):
            if index == ALL or (request.seq, index) in self.pending.settlements:
                continue  # it was looked at
            if self.recorder is not None:
                self.recorder.answered(request, index)
            worker = next(worker for worker in request.workers if worker.index == index)
            result = self.read([(worker, request.answers[index])])
            settlement = Settlement(request, request.rows_at(index), ())
            self.ledger.record(settlement, result)
            self.ledger.mark_failed(result, settlement.rows, all_of_them=False)
            settlement.result, settlement.ready = result, ()
            self.note(request, index, settlement)

    # -- calls on the environments themselves: methods, attributes, functions, frames ---------------------------------

    def begin_call(self, name: str, args: Any, kwargs: Any) -> None:
        """Call a method, or read an attribute, of every environment."""
        payload = (name, args, kwargs)
        self._require_picklable(payload)
        self.ask_call(Op.CALL, lambda worker: payload, "call")

    def begin_exec(self, func: Callable[..., Any], rows: Collection[int], args: Any, kwargs: Any) -> None:
        """Call a function with each of some environments."""
        self._require_picklable((func, args, kwargs))
        chosen = set(rows)

        def payload(worker: Worker) -> Any:
            ks = [row - worker.rows[0] for row in worker.rows if row in chosen]
            return (ks, func, args, kwargs) if ks else None

        self.ask_call(Op.EXEC, payload, "exec_func")

    def begin_set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Set an attribute of every environment."""
        self._require_picklable(values)
        self.ask_call(Op.SET_ATTR, lambda worker: (name, [values[row] for row in worker.rows]), "set_attr")

    def begin_set_next(self, rows: Collection[int], given: Sequence[Any]) -> None:
        """Give some environments the seed and the options of their next episode, of which there are some for every row."""
        self._require_picklable(given)
        chosen = set(rows)

        def payload(worker: Worker) -> Any:
            own = [given[row] if row in chosen else None for row in worker.rows]
            return own if any(item is not None for item in own) else None

        self.ask_call(Op.SET_NEXT, payload, "set_next_options")

    def call_answer(self, timeout: float | None) -> Any:
        """The answer to the call that is pending: one result an environment, or what its sequel makes of them.

        Raises:
            StepTimeout: Not within ``timeout`` seconds; the answer is still pending.
            Exception: What the call raised in an environment.
        """
        return self.answer_by(deadline_of(timeout), timeout)

    def answer_by(self, deadline: float | None, timeout: float | None) -> Any:
        """As :meth:`call_answer`, by a moment that was ``timeout`` seconds away when the call was made."""
        call = self.call
        assert call is not None
        sequel, command = call.sequel, call.command
        finished = self.finish(call, deadline)
        del call  # it holds the exception, whose traceback would hold it
        if finished is None:
            raise self.too_late(wait_name(command), timeout)
        result, error = finished
        if error is not None:
            try:
                self.raise_answer(error)
            finally:
                del error, finished
        if sequel is None:
            return tuple(result.results.get(row) for row in range(self.num_envs))
        return sequel(result, deadline, timeout)

    def ask_call(
        self, op: Op, payload_of: Callable[[Worker], Any], command: str, *, sequel: Any = None, alone: bool = False,
        workers: Sequence[Worker] | None = None,
    ) -> None:  # fmt: skip
        """A call that is no step and no reset; workers for which ``payload_of`` gives ``None`` are left out.

        Args:
            op, command: Which.
            payload_of: What goes with it.
            sequel: See :class:`~vecenv.engine.pending.Request`.
            alone: It takes the place of the call whose sequel it is, at once.
            workers: The workers to ask; ``None``: those that have rows.
        """
        asked = [(worker, payload) for worker in workers or self.pool.workers if (payload := payload_of(worker)) is not None]
        if dead := [row for worker, _ in asked if worker.death is not None for row in worker.rows]:
            self.ledger.refuse({row: self.failed.get(row, "its worker died") for row in dead})
        request = self.composed(command, [WorkerRequest(worker, worker.rows, op, payload) for worker, payload in asked])
        request.sequel = sequel
        self.pool.ask(request, alone=alone)

    def _require_picklable(self, payload: Any) -> None:
        """Arguments that cannot travel are the caller's to know, before anything is sent."""
        if not all(worker.local for worker in self.pool.workers):
            cloudpickle.dumps(payload)

    # -- saving -----------------------------------------------------------------------------------------------------

    def episodes_of(self, row: int) -> Any:
        """Where the seeds of a row's episodes come from; ``None``: its environment draws them."""

    def save(self, rows: list[int], verify: bool) -> Any:
        """The states of some rows; see :meth:`vecenv.AsyncVectorEnv.save`."""
        self._ask_save(rows, verify, Snapshots)
        return self.call_answer(None)

    def state_dict(self, spaces: list[Any], verify: bool) -> Any:
        """The states of all rows, counters, seeds and the generators of ``spaces`` in one dict."""
        self._ask_save(list(range(self.num_envs)), verify, partial(self._dict_of, spaces))
        return self.call_answer(None)

    def snapshots(self) -> list[Snapshot]:
        """The states of all rows, between two calls: it is no call, and leaves nothing pending, and nothing on record.

        Raises:
            NotRestorable: An environment cannot be saved, or its worker has died.
        """
        taken: list[Snapshot] = []
        self._ask_save(list(range(self.num_envs)), False, taken.extend)
        request = self.call
        assert request is not None
        self.wait_for(request, None)
        result = self.settlement_of(request).result
        self.pending = self.emptied(0, 0)
        assert result is not None
        if result.failures or result.deaths:
            raise NotRestorable(result.deaths[0].text if result.deaths else result.failures[0][0].text)
        request.sequel(result, None, None)
        return taken

    def _ask_save(self, rows: list[int], verify: bool, dress: Callable[[list[Snapshot]], Any]) -> None:
        self.ask_call(Op.SAVE, _own_rows(rows), "save", sequel=partial(self._saved, rows, verify, dress))

    def _saved(
        self, rows: list[int], verify: bool, dress: Callable[[list[Snapshot]], Any], result: Result, deadline: float | None,
        timeout: float | None,
    ) -> Any:  # fmt: skip
        """The states came: add what the engine knows, and ask for the proof of kinds that have none."""
        snapshots: list[Snapshot] = []
        new: dict[Kind, int] = {}
        for row in rows:
            one: Snapshot = result.results[row]
            known = one.row
            if verify and known.kind not in self.proved:
                new.setdefault(known.kind, row)
            if known.used:
                one = one.having(observation=self.store.row(row), episodes=self.episodes_of(row))
            snapshots.append(one)
        if not new:
            return dress(snapshots)
        then = partial(self._proved, frozenset(new), partial(dress, snapshots))
        self.ask_call(Op.PROVE, _own_rows(sorted(new.values())), "save", sequel=then, alone=True)
        return self.answer_by(deadline, timeout)

    def _proved(self, kinds: frozenset[Kind], answer: Callable[[], Any], *_: Any) -> Any:
        self.proved |= kinds
        return answer()

    def _dict_of(self, spaces: list[Any], snapshots: list[Snapshot]) -> dict[str, Any]:
        return StateDict(
            format=FORMAT, num_envs=self.num_envs, autoreset_mode=self.mode.name, snapshots=Snapshots(snapshots),
            counters=(self.pending.steps, self.pending.resets, self.ledger.restarts), seeds=self.restart_seeds.state,
            spaces=[_space_codec(space).save(space) for space in spaces],
        )  # fmt: skip

    # -- loading ----------------------------------------------------------------------------------------------------

    def were_loaded(self, known: Mapping[int, Row]) -> None:
        """These rows go on from snapshots. It may be done again."""

    def load(self, snapshots: Any, rows: list[int]) -> Any:
        """Put saved states in place; see :meth:`vecenv.AsyncVectorEnv.load`."""
        self._ask_load(rows, parse_snapshots(snapshots, rows), lambda: None)
        return self.call_answer(None)

    def load_state_dict(self, state: Mapping[str, Any], spaces: list[Any]) -> Any:
        """Go on from what :meth:`state_dict` gave."""
        for key in ("format", "num_envs", "autoreset_mode", "snapshots", "counters", "seeds", "spaces"):
            if not isinstance(state, Mapping) or key not in state:
                raise SnapshotMismatch(f"this is no state_dict() of a vector environment: it has no {key!r}")
        for key, own in {"format": FORMAT, "num_envs": self.num_envs, "autoreset_mode": self.mode.name}.items():
            if state[key] != own:
                raise SnapshotMismatch(f"its {key} is {state[key]!r}, and that of this vector environment is {own!r}")
        rows = list(range(self.num_envs))
        self._ask_load(rows, parse_snapshots(state["snapshots"], rows), self._rest_of(state, spaces))
        return self.call_answer(None)

    def _ask_load(self, rows: list[int], each: list[Snapshot], extras: Callable[[], None]) -> None:
        of_row = dict(zip(rows, each, strict=True))
        known = {row: snapshot.row for row, snapshot in of_row.items()}
        for row, one in known.items():
            self.require_observation(row, one)

        def payload(worker: Worker) -> Any:
            first = worker.rows[0]
            return [(row - first, of_row[row]) for row in worker.rows if row in of_row] or None

        def fits(result: Result, deadline: float | None, timeout: float | None) -> Any:
            """All of them fit: have them put in place."""
            then = partial(self._in_place, known, extras)
            self.ask_call(Op.LOAD, _own_rows(list(of_row)), "load", sequel=then, alone=True)
            return self.answer_by(deadline, timeout)

        self.ask_call(Op.CHECK, payload, "load", sequel=fits)

    def require_observation(self, row: int, one: Row) -> None:
        """Refuse a snapshot whose last observation no row of this engine can have.

        Raises:
            SnapshotMismatch: It cannot.
        """
        if not one.used:
            return
        try:
            self.store.require(one.observation)
        except Exception as error:
            if succeeds_when_repeated(partial(self.store.require, one.observation)):
                raise
            text = f"it is of {one.kind.env_id}, and its observation is none of this environment: {error}"
            raise SnapshotMismatch(f"env {row}: the snapshot does not fit: {text}") from error

    def _in_place(self, known: dict[int, Row], extras: Callable[[], None], *_: Any) -> Any:
        """They are: put the rest beside them. It may be done again."""
        self.put_beside(known)
        extras()
        return self.store.take(np.array(list(known), np.intp)) if all(one.used for one in known.values()) else None

    def put_beside(self, known: Mapping[int, Row]) -> None:
        """What an engine itself knows of rows that were loaded. It may be done again."""
        for row, one in known.items():
            if one.used:
                self.store.put_row(row, one.observation)
            self.ledger.mark_recovered(row)
        self.were_loaded(known)
        if self.policy.restart:
            self.remembered.keep(list(known), all_rows=len(known) == self.num_envs)

    def _rest_of(self, state: Mapping[str, Any], spaces: list[Any]) -> Callable[[], None]:
        """What puts all of a ``state_dict()`` in place that no row has; refuses what does not fit."""

        def read() -> tuple[Any, Any, Any]:
            opened = [
                (space, its if its is None else _space_codec(space).open(space, its))
                for space, its in zip(spaces, state["spaces"], strict=True)
            ]
            env_steps, resets, restarts = map(_natural, state["counters"])
            return (env_steps, resets, restarts), np.random.SeedSequence(**state["seeds"]), opened

        try:
            (env_steps, resets, restarts), seeds, opened = read()
        except Exception as error:
            if succeeds_when_repeated(read):
                raise
            raise SnapshotMismatch(f"its counters, seeds or spaces do not fit: {type(error).__name__}: {error}") from error

        def put() -> None:
            now, then = self.pending, self.next_pending
            assert then is not None
            made = now.steps - self.steps_before
            now.steps, now.resets, self.steps_before = env_steps, resets, env_steps - made
            then.steps, then.resets, self.ledger.restarts = env_steps, resets, restarts
            self.restart_seeds = seeds
            for space, its in opened:
                if its is not None:
                    _space_codec(space).load(space, its)

        return put

    # -- freezing -----------------------------------------------------------------------------------------------------

    def freeze(self, rows: list[int]) -> Any:
        """Frozen copies of some rows; see :meth:`vecenv.AsyncVectorEnv.freeze`."""
        with Uninterrupted():
            copies = {row: Frozen(self, row) for row in rows}

        def payload(worker: Worker) -> Any:
            return copies[worker.rows[0]]._copy.plan() if worker.rows[0] in copies else None

        self.ask_call(Op.FREEZE, payload, "freeze", sequel=partial(self._frozen, copies))
        return self.call_answer(None)

    def _frozen(self, copies: dict[int, Frozen], *_: Any) -> list[Frozen]:
        """The workers have made them. It may be done again."""
        try:
            made = [copy.begun() for copy in copies.values()]
        except WorkerDied as error:
            self.raise_answer(error)
        self.frozen.update(made)
        return made

    def thaw(self, frozen: Frozen, rows: list[int], reseed: bool) -> tuple[Any, dict[str, Any]]:
        """Let rows go on from a frozen copy; see :meth:`vecenv.AsyncVectorEnv.thaw`."""
        copy, watch = frozen.for_thaw(self)
        seeds = np.random.SeedSequence().generate_state(len(rows)).tolist() if reseed else [None] * len(rows)
        new: list[FrozenCopy] = []
        with Uninterrupted():
            try:
                for row, seed in zip(rows, seeds, strict=True):
                    new.append(FrozenCopy(self.pool))
                    plan = new[-1].plan(row, self.pool.placement_of(row), seed)
                    copy.channel.write(encode(Op.THAW, 1, pickle.dumps(plan)), [])
                for row, one in zip(rows, new, strict=True):
                    one.await_ready(frozen.method, self.pool.name_of(row), watch)
            except BaseException as error:
                for one in new:
                    one.end()
                if isinstance(error, ChannelClosed):
                    raise WorkerDied(f"{frozen!r} has ended", pid=frozen.pid, envs=[frozen.env], command="thaw") from None
                raise
            self.pool.take_over([
                ProcessWorker(row, range(row, row + 1), one.process, one.channel, one.black_box, one.held, self, one.token)
                for row, one in zip(rows, new, strict=True)
            ])  # fmt: skip
            for row in rows:
                self.store.put_row(row, frozen.observation)
                self.ledger.mark_recovered(row)
            batch = self.batch
            batch.rewards[rows], batch.terminations[rows], batch.truncations[rows] = 0.0, False, False
            batch.info_schemas[rows], batch.final[rows] = NO_INFO, False
            if self.policy.restart:
                self.remembered.keep(rows, all_rows=False)
            if self.recorder is not None:
                self.recorder.lost(rows)
        infos: dict[str, Any] = {}
        for position, row in enumerate(rows):
            add_info(infos, frozen.info, position, len(rows), row)
        return self.store.take(np.array(rows, np.intp)), infos

    # -- infos and figures ------------------------------------------------------------------------------------------

    def export_infos(self, rows: Any, known: set[int]) -> tuple[Array, Array, dict[int, Definition]]:
        """The infos of some rows for a reader elsewhere; see :meth:`vecenv.link.infos.InfoReader.export`."""
        return self._infos.export(rows, known)

    def _figures(self) -> dict[str, float]:
        elapsed = max(time.monotonic() - self.began, 1e-9)
        timed = float(self.batch.worker_steps.sum())
        working = int(np.count_nonzero(self.batch.worker_steps))  # the caller has a row there, whether it has a share or not
        spent = float(self.batch.worker_time.sum())
        per_worker = self.batch.worker_time / np.maximum(self.batch.worker_steps, 1.0)
        times = self.batch.step_time[self.batch.step_time > 0]
        busiest = float(self.batch.worker_time.max())
        return {
            "steps": float(self.pending.steps),
            "steps_per_second": (self.pending.steps - self.steps_before) / elapsed,
            "wait_fraction": self.pool.time_waiting / elapsed,
            "step_time_mean": spent / max(timed, 1.0),
            "step_time_slowest_env": float(times.max()) if len(times) else float(per_worker.max()),
            "straggler_share": 1.0 - spent / (busiest * working) if busiest > 0 and working else 0.0,
            "resets": float(self.pending.resets),
            "restarts": float(self.restarts),
            "errors": float(len(self.ledger.errors)),
            "bytes_pickled": float(sum(w.channel.bytes_pickled for w in self.pool.workers if isinstance(w, ProcessWorker))),
            "in_flight": float(self.outstanding.rows),
            **self._figures_of_frozen(),
        }

    def _figures_of_frozen(self) -> dict[str, float]:
        copies = [copy for copy in self.frozen if not copy.closed]
        return {"frozen": float(len(copies)), "frozen_bytes": float(sum(copy.bytes for copy in copies))} if copies else {}

    def record(self, row: int, path: Any) -> Any:
        """Write a file about a row; see :meth:`vecenv.AsyncVectorEnv.record`."""
        assert self.recorder is not None
        return self.recorder.record(row, path, None)

    # -- the end ----------------------------------------------------------------------------------------------------

    def shut(self, timeout: float, *, terminate: bool) -> None:
        """End the workers; what environments raised in their own ``close`` is said as warnings. It can be called again."""
        for copy in list(self.frozen):
            copy.close()
        self.pool.close(timeout, terminate=terminate)
        said = self.pool.failures_in_close
        while said:
            failure, _ = said.pop(0)
            logger.warn("%s", f"env {failure.env} raised in close(): {failure.text}")

    def resume(self) -> None:
        self.pool.resume()

    def leave(self) -> None:
        """It was closed: free all memory and descriptors, where no call uses them. Idempotent."""
        if self.barred != "closed" or self.pool.released:
            return
        self.keep_figures()
        if self.card is not None:
            self.card.close()
        if self.recorder is not None:
            self.recorder.forget()
            self.recorder = self.ledger.recorder = None
        self.pool.release()
        for name in ("arena", "batch", "store", "_infos", "remembered", "budget", "stage"):
            self.__dict__.pop(name, None)  # memory is unmapped when no array over it is held outside


def _reset_payload(seeds: Sequence[Any], options: ResetOptions) -> Callable[[list[int]], Any]:
    def payload_of(mine: list[int]) -> Any:
        own = [seeds[row] for row in mine]
        return None if options is None and all(seed is None for seed in own) else (own, options_of_rows(options, mine))

    return payload_of


def _own_rows(rows: Sequence[int]) -> Callable[[Worker], Any]:
    """For each worker, which of its own rows are meant, counted from its first."""
    chosen = set(rows)
    return lambda worker: [row - worker.rows[0] for row in worker.rows if row in chosen] or None


def _space_codec(space: Any) -> Codec:
    how = how_of(type(space))
    assert isinstance(how, Codec)
    return how


def _natural(number: Any) -> int:
    """A count as it stands in a ``state_dict()``."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"{number!r} is no count")
    return number
