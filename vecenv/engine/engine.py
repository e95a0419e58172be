"""The engine: rows of environments that are asked and answer, whatever they look like from outside.

It composes the shared block, the store of observations, the table of requests (:mod:`vecenv.engine.pending`), the pool of
workers, and what is done about failures (:mod:`vecenv.engine.recovery`). Arguments are checked before, in
:mod:`vecenv.front.vector_env`.

A call is made in one step and taken in another. *Asking* writes what it is about, and then puts a request into the table;
before that nothing has happened. *Answering* computes, from what lies in the table, what the caller gets and what the table
is to be afterwards (``next_pending``); the guard puts that in place when it hands the answer over.
"""

from __future__ import annotations

import itertools
import sys
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any, Final

import numpy as np
from gymnasium import Space, logger, spaces
from gymnasium.error import AlreadyPendingCallError, CustomSpaceError
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, iterate

from vecenv.engine import frozen
from vecenv.engine.calls import Calls
from vecenv.engine.handles import CallerWorker, ProcessWorker
from vecenv.engine.pending import Request, Result, Worker
from vecenv.engine.pool import PoolOptions, WorkerPool
from vecenv.engine.recovery import Ledger, Policy, Remembered, RestartBudget, RestartLog
from vecenv.front.arguments import ResetOptions, env_ids_of, options_of_rows, wrong_shape
from vecenv.front.capabilities import Capabilities
from vecenv.front.driver import Phase, Stepped, advance
from vecenv.link.infos import NO_INFO, InfoReader
from vecenv.link.messages import Definition, Op
from vecenv.link.observations import Store
from vecenv.shm import Arena, Batch, Layout, Tree
from vecenv.shm.layout import Array
from vecenv.system.copies import has_copies
from vecenv.system.cores import placements
from vecenv.worker.main import Ready, WorkerPlan, make_rows

__all__ = ["ActionStage", "Engine", "Policy", "shares"]


# -- actions on their way in -------------------------------------------------------------------------------------------
#
# An environment gets what ``gymnasium.vector.utils.iterate`` would give it: type, dtype and shape as the caller passed.
# Only a batch whose containers, dtypes and shapes are the action space's to the letter can take the fast way without
# changing that; lists, generators, other dtypes, ``Text`` and the like go by pickle. Either way everything is checked before
# anything is sent.

class ActionStage:
    """Puts batches of actions where the workers find them.

    Args:
        single_space: Action space of one environment.
        space: Its batch.
        num_envs: Number of environments.
        tree: Structure of one action of fixed size, else ``None``.
        leaves: The shared arrays, a row per environment.
    """

    def __init__(
        self, single_space: Space[Any], space: Space[Any], num_envs: int, tree: Tree | None, leaves: list[Array] | None
    ) -> None:
        self._single_space = single_space
        self._spaces = {num_envs: space}
        self._num_envs = num_envs
        self._tree = tree
        self._leaves = leaves or []
        self._warned = False
        leaf = tree.leaf if tree is not None else None  # an action space of one array: the common case
        self._dtype = leaf.dtype if leaf is not None else None
        self._shape = (num_envs, *leaf.shape) if leaf is not None else None

    def put(self, actions: Any) -> list[Any] | None:
        """Stage one action for every environment; ``None`` if they are in shared memory, else the actions themselves.

        Raises:
            TypeError, ValueError: The structure is wrong, or there are too few or too many. Nothing was written.
        """
        if actions.__class__ is np.ndarray and actions.shape == self._shape:
            dtype = actions.dtype
            if dtype is self._dtype or dtype == self._dtype:  # `==` is three times the price, and samples of a space need it
                self._leaves[0][...] = actions
                return None
        return self.put_some(actions, ..., self._num_envs)

    def put_some(self, actions: Any, rows: Any, count: int) -> list[Any] | None:
        """Stage one action for each of ``rows``, in their order, which are so many; results as of :meth:`put`."""
        if self._tree is not None:
            exact = self._tree.exact(actions, count)
            if exact is not None:
                for leaf, values in zip(self._leaves, exact, strict=True):
                    leaf[rows] = values
                return None
        return self._split(actions, count)

    def _split(self, actions: Any, count: int) -> list[Any]:
        space = self._spaces.get(count)
        if space is None:
            space = self._spaces[count] = batch_space(self._single_space, count)
        _check_counts(self._single_space, space, actions, count, "actions")
        if not self._warned and hasattr(actions, "__array__") and not isinstance(actions, np.ndarray):
            self._warned = True
            logger.warn(
                f"actions are a {type(actions).__module__.partition('.')[0]} {type(actions).__name__}, and so is what each "
                "environment gets, as in Gymnasium; many take NumPy's values only. Pass numpy.asarray(actions): faster, too"
            )
        try:
            items = list(iterate(space, actions))
        except CustomSpaceError as error:  # Gymnasium makes one of whatever is raised, a signal handler's exception as well
            if error.__cause__ is None or isinstance(error.__cause__, TypeError):
                raise
            raise error.__cause__  # noqa: B904 - it is the one that was raised
        if len(items) != count:
            raise ValueError(f"got {len(items)} actions for {count} environments; nothing was sent")
        return items


def _check_counts(single: Space[Any], space: Space[Any], actions: Any, count: int, name: str) -> None:
    """Every leaf of a structured batch has a row per environment; ``zip`` would silently drop what one leaf has too many.

    What holds the parts may be anything that has them by their keys, as for ``iterate``: a list is as good as a tuple.
    """
    if isinstance(space, spaces.Dict) and isinstance(single, spaces.Dict):
        parts = [_part(actions, key) for key in space.spaces]
        if any(part is _MISSING for part in parts):
            got = f"a dict with {list(actions)}" if isinstance(actions, dict) else type(actions).__name__
            raise ValueError(f"{name}: got {got}, wanted a dict with {list(space.spaces)}; nothing was sent")
        for key, part in zip(space.spaces, parts, strict=True):
            _check_counts(single.spaces[key], space.spaces[key], part, count, f"{name}[{key!r}]")
    elif isinstance(space, spaces.Tuple) and isinstance(single, spaces.Tuple):  # of others, a batch is a tuple as well
        size = len(space.spaces)
        parts = [_part(actions, index) for index in range(size)]
        if any(part is _MISSING for part in parts) or (isinstance(actions, Sized) and len(actions) != size):
            length = f" of {len(actions)}" if isinstance(actions, Sized) else ""
            raise ValueError(f"{name}: got a {type(actions).__name__}{length}, wanted a tuple of {size}; nothing was sent")
        for index, part in enumerate(parts):
            _check_counts(single.spaces[index], space.spaces[index], part, count, f"{name}[{index}]")
    elif not _can_iterate(actions) or getattr(actions, "shape", None) == ():
        got = "a scalar" if getattr(actions, "shape", None) == () else f"{type(actions).__name__} {actions!r}"
        raise TypeError(f"{name}: got {got}, wanted {count}, one per environment; nothing was sent")
    elif isinstance(actions, Sized) and len(actions) != count:
        raise ValueError(f"{name}: got {len(actions)}, wanted {count}, one per environment; nothing was sent")
    elif type(single) in _ARRAYS and (shape := _shape_of(actions)) not in (None, wanted := (count, *(single.shape or ()))):
        raise wrong_shape(name, shape, wanted)


_ARRAYS: Final = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_MISSING: Final = object()


def _can_iterate(actions: Any) -> bool:
    """Whether ``iter`` takes it: also what has no ``__iter__``, but items by their index."""
    return isinstance(actions, Iterable) or hasattr(type(actions), "__getitem__")


def _shape_of(actions: Any) -> tuple[int, ...] | None:
    """The shape of an array; ``None``: it is none. What is in a list goes to the environments as it is, as in Gymnasium."""
    shape = getattr(actions, "shape", None)
    return tuple(shape) if isinstance(shape, tuple) and getattr(actions, "dtype", None) != np.dtype(object) else None


def _part(actions: Any, key: Any) -> Any:
    try:
        return actions[key]
    except (KeyError, IndexError, TypeError, ValueError):  # ValueError: an array without such a field
        return _MISSING


def shares(num_envs: int, parts: int, first: int = 0) -> list[range]:
    """``num_envs`` rows from ``first`` on in ``parts`` contiguous ranges whose lengths differ by one at most."""
    bounds = [first + num_envs * part // parts for part in range(parts + 1)]
    return [range(low, high) for low, high in itertools.pairwise(bounds)]


class Engine(Calls):
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
    """

    backend = "process"
    own_means = "its workers"
    _pool_class: type[WorkerPool] = WorkerPool
    rows_at_once: int | None = None
    """At most so many rows of one worker in one message of a ``send``; ``None``: all it is about."""

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
        self.frozen: weakref.WeakSet[frozen.Frozen] = weakref.WeakSet()
        self.card: Any = None  # the file that `vecenv top` reads, where there is one
        self.stage: ActionStage
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
        self._restart_log = RestartLog()
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

    # -- asking -----------------------------------------------------------------------------------------------------

    def step(self, actions: Any) -> None:
        pending = self.pending
        if pending.requests or pending.ready:
            self.require_idle("step_async")
        if self.recorder is not None and self.recorder.due:
            self.recorder.snapshot(self.store.row)
        if self.failed and not self.policy.restart:
            self.ledger.refuse(self.failed)
        self.ask_step(self.stage.put(actions))

    def ask_step(self, actions: list[Any] | None) -> None:
        """Step every row. ``actions``: one per row, or ``None`` if they are in shared memory."""
        failed = self.failed
        if actions is None and not failed:
            self.pool.ask_plain_step()
            return
        if failed and not self.policy.restart:
            self.ledger.refuse(failed)
        rows = range(self.num_envs)
        request = self._request(
            "step", Op.STEP, Op.STEP_SOME, rows, lambda mine: actions and [actions[row] for row in mine]
        )  # fmt: skip
        self.pool.ask(request)

    def send(self, actions: Any, env_id: Any) -> None:
        if self.call is not None:
            advance(self.phase, "step_async", self)
        rows = self.pending.latest if env_id is None else env_ids_of(env_id, self.num_envs)
        listed = rows.tolist()
        self._require_not_in_flight("send", listed)
        if self.failed and not self.policy.restart and (failed := self.failed.keys() & set(listed)):
            self.ledger.refuse({row: self.failed[row] for row in failed})
        self.ask_rows(listed, self.stage.put_some(actions, rows, len(listed)))

    def _require_not_in_flight(self, method: str, rows: Sequence[int]) -> None:
        if self.pending.requests or self.pending.ready:
            in_flight = set(self.waiting())
            if waiting := [row for row in rows if row in in_flight]:
                raise AlreadyPendingCallError(
                    f"Calling `{method}` for envs {waiting}, which are still in flight: `recv` them first.", "send"
                )

    def ask_rows(self, rows: Sequence[int], actions: list[Any] | None) -> None:
        """Step some rows, to be received one by one. ``actions`` in their order; ``None``: they are in shared memory."""
        of_row = {} if actions is None else dict(zip(rows, actions, strict=True))

        def payload_of(mine: list[int]) -> Any:
            return [of_row[row] for row in mine] if of_row else None

        some, ordered = Op.STEP_SOME, sorted(rows)
        if self.rows_at_once is None:
            self.pool.ask(self._request("step", some, some, ordered, payload_of, by_row=True))
            return
        messages = self._in_messages(ordered, self.rows_at_once)
        first, *others = [self._request("step", some, some, mine, payload_of, by_row=True) for mine in messages]
        self.pool.ask(first, others)

    def _in_messages(self, rows: list[int], most: int) -> list[list[int]]:
        """Rows in order, parted so that each part has ``most`` of one worker: it goes on while the caller reads."""
        parts: list[list[int]] = []
        began = 0
        for worker in self.pool.workers:
            ended = bisect_left(rows, worker.rows.stop, began)
            for number, first in enumerate(range(began, ended, most)):
                if number == len(parts):
                    parts.append([])
                parts[number] += rows[first : min(first + most, ended)]
            began = ended
        return parts

    def ask_some(self, command: str, op: Op, rows: Sequence[int], payload_of: Callable[[list[int]], Any]) -> None:
        """Ask about some rows, in words of one's own."""
        self.pool.ask(self._request(command, op, op, rows, payload_of), alone=command == "reset")

    def _request(
        self, command: str, whole: Op, some: Op, rows: Sequence[int], payload_of: Callable[[list[int]], Any], *,
        by_row: bool = False, **about: Any,
    ) -> Request:  # fmt: skip
        """What the workers of some rows are to be asked, each about its own; those that have failed are left out of a step.

        Args:
            command: What it is called.
            whole, some: The message about all rows of a worker, and that about some.
            rows: Which, in order.
            payload_of: What goes with the message about some of them.
            by_row: They are received one by one.
            about: Other attributes of the request.
        """
        left = list(rows)
        if lost := [row for row in left if row in self.failed] if self.failed and command == "step" else []:
            left = [row for row in left if row not in self.failed]
        parts: list[tuple[Worker, Sequence[int], Op, Any]] = []
        began = 0
        for worker in self.pool.workers:  # in the order of their rows
            ended = bisect_left(left, worker.rows.stop, began)
            if ended > began:
                mine = left[began:ended]
                parts.append((worker, mine, some if len(mine) < len(worker.rows) else whole, payload_of(mine)))
                began = ended
        request = self.composed(command, parts)
        request.by_row, request.lost = by_row, lost
        self.batch.requested[left] = request.seq
        if command == "step":
            request.steps = len(left)
        elif command == "reset":
            request.resets = len(left)
        for name, value in about.items():
            setattr(request, name, value)
        return request

    def reset(self, seeds: list[Any], ids: Array | None, options: ResetOptions, *, by_row: bool) -> None:
        if by_row:
            assert ids is not None
            rows = ids.tolist()
            self._require_not_in_flight("reset_async", rows)
        if self.recorder is not None:
            seeds = self.recorder.seeds(seeds, ids)
        if by_row:
            self.ask_reset_rows(rows, seeds, options)
        else:
            self.ask_reset(seeds, options, None if ids is None else np.isin(np.arange(self.num_envs), ids))

    def ask_reset(self, seeds: Sequence[Any], options: ResetOptions, mask: Array | None) -> None:
        """Reset the rows of ``mask`` (``None``: all), rebuilding those that had failed. What was sent by row is dropped.

        ``seeds`` has an entry for every row there is, and so have ``options`` if they are a list.
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
            "reset", Op.RESET, Op.RESET_SOME, chosen, _reset_payload(seeds, options), mask=mask, seeds=seeds, options=options
        )  # fmt: skip
        self.pool.ask(request, alone=True)

    def ask_reset_rows(self, rows: Sequence[int], seeds: Sequence[Any], options: ResetOptions) -> None:
        """Reset some rows, to be received one by one; ``seeds`` and ``options`` as of :meth:`ask_reset`."""
        self.revive(rows)
        payload_of = _reset_payload(seeds, options)
        request = self._request(
            "reset", Op.RESET_SOME, Op.RESET_SOME, sorted(rows), payload_of, by_row=True, seeds=seeds, options=options
        )  # fmt: skip
        self.pool.ask(request)

    # -- what the caller gets ---------------------------------------------------------------------------------------

    def answer(self, kind: Phase, deadline: float | None) -> Stepped | None:
        request = next(iter(self.pending.requests.values()))
        finished = self.finish(request, deadline)
        if finished is None:
            return None
        result, error = finished
        if error is not None:
            try:
                self.raise_answer(error)
            finally:
                del error, finished, request  # they hold the exception, whose traceback would hold them
        if self.card is not None:
            self.card.update()
        batch = self.batch
        try:
            infos = self.infos(result) if result.columns else {}
            observations = self.store.batch(self.copies)
        except Exception as wrong:
            self._confirm(wrong, lambda: (self.store.batch(self.copies), self.infos(result)))
            raise
        if kind is Phase.WAITING_RESET:
            return observations, None, None, None, infos
        return observations, batch.rewards.copy(), batch.terminations.copy(), batch.truncations.copy(), infos

    def recv(self, count: int | None, deadline: float | None, least: tuple[int, float] | None = None) -> Stepped | None:
        if (call := self.call) is not None:
            if call.phase is not Phase.WAITING_RESET:
                advance(call.phase, "reset_async", self)
            self.launch(call)
        received = self.receive(self.batch_size if count is None else count, deadline, least)
        if received is None:
            return None
        (rows, infos, finals), error = received
        if error is not None:
            try:
                self.raise_answer(error)
            finally:
                del error, received, call
        if self.card is not None:
            self.card.update()
        batch = self.batch
        try:
            columns = self.infos_of(rows, infos, finals)
            observations = self.store.take(rows)
        except Exception as wrong:
            self._confirm(wrong, lambda: (self.infos_of(rows, infos, finals), self.store.take(rows)))
            raise
        columns["env_id"], columns["_env_id"] = rows.copy(), rows >= 0
        return observations, batch.rewards[rows], batch.terminations[rows], batch.truncations[rows], columns

    def recv_enough(self, count: int | None, deadline: float | None, least: int, moment: float) -> Stepped | None:
        return self.recv(count, deadline, (least, moment))

    def _confirm(self, error: Exception, again: Callable[[], object]) -> None:
        """What environments said does not go together, unless it does at the second look: then this was interrupted."""
        try:
            again()
        except Exception as same:
            if type(same) is type(error):
                self.pending_error = error

    def infos(self, result: Result) -> dict[Any, Any]:
        """The infos of all rows as one dict of arrays."""
        if not result.columns:
            return {}
        ended = self.batch.final
        finals = result.finals
        if b"\1" in ended.tobytes():  # a tenth of what `any` takes
            finals = self.finals(np.flatnonzero(ended).tolist()) | finals
        return self._infos.read(None, self.num_envs, result.infos, finals)

    def export_infos(self, rows: Any, known: set[int]) -> tuple[Array, Array, dict[int, Definition]]:
        """The infos of some rows for a reader elsewhere; see :meth:`vecenv.link.infos.InfoReader.export`."""
        return self._infos.export(rows, known)

    def finals(self, rows: Sequence[int]) -> dict[int, Any]:
        """Row -> last observation of its episode, for those of ``rows`` that have one in shared memory."""
        tree, leaves = self.layout.observations, self.batch.final_observations
        if leaves is None or tree is None:
            return {}
        flags = self.batch.final
        return {row: tree.build(iter([leaf[row].copy() for leaf in leaves])) for row in rows if flags[row]}

    def infos_of(self, rows: Array, infos: dict[int, Any], finals: dict[int, Any]) -> dict[Any, Any]:
        """The infos of some rows, compact; ``infos`` and ``finals`` came by pickle, by row."""
        if not (infos or finals) and self.batch.final_observations is None:
            return self._infos.read(rows, len(rows), infos, finals)
        listed = rows.tolist()
        finals = self.finals(listed) | finals
        positions = {row: position for position, row in enumerate(listed)}
        return self._infos.read(
            rows,
            len(listed),
            {positions[row]: info for row, info in infos.items()},
            {positions[row]: observation for row, observation in finals.items()},
        )

    # -- figures --------------------------------------------------------------------------------------------

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

    freeze, thaw = frozen.freeze, frozen.thaw

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
