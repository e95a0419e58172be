"""The engine: rows of environments that are asked and answer, whatever they look like from outside.

It owns the shared block, the store of observations, the reader of infos, the pool of workers, the ledger of failures
(:mod:`vecenv.ledger`) and the table of rows that are on their way (:mod:`vecenv.first_ready`). Which calls are legal, what
an action space is and what a caller sees is the business of the classes on top (:mod:`vecenv.vector_env`).

Under ``on_failure="restart"`` a row that was lost comes back in the same step: truncated, reward 0, ``restarted`` in its
info, its last good observation as ``final_obs``, and then what the autoreset mode has to say.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import logger
from gymnasium.vector import AutoresetMode

from vecenv.cores import seats
from vecenv.errors import StepTimeout, WorkerDied
from vecenv.failure import PackedError, RestartBudget, summary
from vecenv.first_ready import FirstReady
from vecenv.infos import NO_INFO, Definition, InfoReader
from vecenv.ledger import Ledger
from vecenv.observations import Store
from vecenv.pool import PoolOptions, WorkerPool
from vecenv.protocol import Op
from vecenv.requests import COLUMNS, PLAIN, Pending, Result
from vecenv.rows import Failure
from vecenv.shm import Arena, Batch, Layout
from vecenv.shm.layout import Array, Tree
from vecenv.worker import Plan, Ready, make_rows
from vecenv.workers import Answer, AnyWorker, CallerWorker, ProcessWorker, Request

__all__ = ["Engine", "Policy", "shares"]


@dataclass(frozen=True, slots=True)
class Policy:
    """What to do about failures.

    Attributes:
        restart: Rebuild what was lost and go on; otherwise raise.
        step_timeout: Seconds until a reset or a step is taken to hang; ``None``: never.
        start_timeout: Seconds a worker has for building its environments.
    """

    restart: bool = False
    restart_limit: int = 5
    restart_period: float = 60.0
    step_timeout: float | None = None
    start_timeout: float = 60.0


def shares(num_envs: int, parts: int, first: int = 0) -> list[range]:
    """``num_envs`` rows from ``first`` on in ``parts`` contiguous ranges whose lengths differ by one at most."""
    bounds = [first + num_envs * part // parts for part in range(parts + 1)]
    return [range(low, high) for low, high in itertools.pairwise(bounds)]


class Engine:
    """Environments in workers, and what is known of each row.

    Args:
        env_fns: What builds the environments.
        layout: What lies where.
        make_store: Builds the store of observations from the views of the shared block.
        plan: What every worker is told.
        options: How to run worker processes.
        policy: What to do about failures.
        num_workers: Worker processes; 0 with ``caller_share=num_envs`` is no process at all.
        caller_share: How many rows, the first ones, the caller steps itself.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        layout: Layout,
        make_store: Callable[[Batch], Store],
        plan: Plan,
        options: PoolOptions,
        policy: Policy,
        num_workers: int,
        caller_share: int,
    ) -> None:
        self.num_envs = len(env_fns)
        self.policy = policy
        self.mode = plan.autoreset_mode
        self.ledger = Ledger()
        self.failed = self.ledger.failed
        self.restarts = 0
        self.resets = 0
        self.env_steps = 0
        self.began = time.monotonic()
        self._said: set[str] = set()
        self._budget = RestartBudget(policy.restart_limit, policy.restart_period)
        self._seeds = np.random.SeedSequence()
        self._last_good: Any = None  # the batch as it was when all was well, where observations are of fixed size ...
        self._last_rows: dict[int, Any] = {}  # ... and row by row where they travel by pickle

        self.arena = arena = Arena(layout.size)
        self.batch = layout.view(arena.buffer)
        self.store = make_store(self.batch)
        self.layout = layout
        self._reader = InfoReader(self.batch.info_schemas, self.batch.infos)
        self.pool = self._open_pool(plan, arena, options, num_workers)
        try:
            self._start(env_fns, plan, num_workers, caller_share)
        except BaseException:
            self.pool.close(0.0, terminate=True)
            raise
        self.worker_of: list[AnyWorker] = []
        self._index_workers()
        self.first_ready = FirstReady(self)

    def _open_pool(self, plan: Plan, arena: Arena, options: PoolOptions, num_workers: int) -> WorkerPool:
        options.seats, options.caller_spin = seats(num_workers)
        return WorkerPool(plan, arena, self.batch, options)

    def _start(self, env_fns: Sequence[Callable[[], Any]], plan: Plan, num_workers: int, caller_share: int) -> None:
        rows = shares(self.num_envs - caller_share, num_workers, caller_share) if num_workers else []
        self.mismatches: list[tuple[int, str, str]] = []
        workers: list[AnyWorker] = []
        if caller_share:
            own = make_rows(env_fns[:caller_share], 0, num_workers, plan, self.batch, interrupts=True)
            caller = CallerWorker(num_workers, range(caller_share), own)
            workers.append(caller)
        readies = self.pool.start([(part, env_fns[part.start : part.stop]) for part in rows])
        workers.extend(self.pool.workers)
        self.pool.workers[:] = workers
        failed: list[tuple[Failure, AnyWorker]] = []
        if caller_share:
            failures, mismatches = own.build()
            failed += [(failure, caller) for failure in failures]
            self.mismatches.extend(mismatches)
        for worker, ready in zip([w for w in workers if not w.local], readies, strict=True):
            failed += [(failure, worker) for failure in ready.failures]
            self.mismatches.extend(ready.mismatches)
        self._raise_start(failed)

    def _raise_start(self, failed: Sequence[tuple[Failure, AnyWorker]]) -> None:
        if failed:
            raised = [(fail.env, fail, worker, self.ledger.record(fail, worker, "start")) for fail, worker in failed]
            self.ledger.raise_all(raised, [], log=False)

    def _index_workers(self) -> None:
        table: list[Any] = [None] * self.num_envs
        for worker in self.pool.workers:
            for row in worker.rows:
                table[row] = worker
        self.worker_of = table

    # -- asking -----------------------------------------------------------------------------------------------------

    def ask_step(self, actions: list[Any] | None) -> Pending:
        """Step every row. ``actions``: one a row, or ``None`` if they are in shared memory."""
        if self.failed and not self.policy.restart:
            self.ledger.refuse(self.failed)
        seq = self.pool.next_seq()
        if actions is None and not self.failed:
            self.pool.ring(seq)
            return Pending("step", self.pool.workers)
        pending = Pending("step", [])
        left_out: list[int] = []
        for worker in self.pool.workers:
            rows = worker.rows
            op = Op.STEP
            if self.failed and (lost := [row for row in rows if row in self.failed]):
                left_out += lost
                rows, op = [row for row in rows if row not in self.failed], Op.STEP_SOME  # type: ignore[assignment]
                if not rows:
                    continue
                self.batch.requested[rows] = seq
            pending.workers.append(worker)
            self.pool.post(worker, Request(seq, op, rows, None if actions is None else [actions[row] for row in rows]))
        pending.lost = left_out
        return pending

    def ask_reset(self, seeds: Sequence[Any], options: dict[str, Any] | None, mask: Array | None) -> Pending:
        """Reset the rows of ``mask`` (``None``: all), rebuilding those that had failed."""
        chosen = range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist()
        if mask is None and self.num_envs and isinstance(seeds[0], (int, np.integer)):
            self._seeds = np.random.SeedSequence(abs(int(seeds[0])))
        self._revive({id(self.worker_of[row]): self.worker_of[row] for row in chosen}.values())
        for row in chosen:
            self.failed.pop(row, None)
        if mask is not None:
            self.batch.info_schemas[~mask] = NO_INFO
            self.batch.final[~mask] = False
        self.resets += len(chosen)
        seq = self.pool.next_seq()
        pending = Pending("reset", [], mask, seeds=seeds, options=options)
        for worker in self.pool.workers:
            rows = worker.rows if mask is None else [row for row in worker.rows if mask[row]]
            if not rows:
                continue
            whole = len(rows) == len(worker.rows)
            if not whole:
                self.batch.requested[rows] = seq
            mine = [seeds[row] for row in rows]
            payload = None if options is None and all(seed is None for seed in mine) else (mine, options)
            pending.workers.append(worker)
            self.pool.post(worker, Request(seq, Op.RESET if whole else Op.RESET_SOME, rows, payload))
        return pending

    def ask_call(self, op: Op, payload_of: Callable[[AnyWorker], Any], command: str) -> Pending:
        """``CALL``, ``SET_ATTR`` or ``EXEC``; workers for which ``payload_of`` gives ``None`` are left out."""
        dead = [row for row, worker in enumerate(self.worker_of) if worker.death is not None]
        if dead:
            self.ledger.refuse({row: self.failed.get(row, "its worker died") for row in dead})
        payloads = [(worker, payload_of(worker)) for worker in self.pool.workers]
        seq = self.pool.next_seq()
        pending = Pending(command, [worker for worker, payload in payloads if payload is not None])
        for worker, payload in payloads:
            if payload is not None:
                self.pool.post(worker, Request(seq, op, worker.rows, payload))
        return pending

    def _revive(self, workers: Iterable[AnyWorker]) -> None:
        for worker in list(workers):
            if not worker.local and worker.death is not None:
                self._replace(worker)

    def _replace(self, worker: ProcessWorker) -> None:
        ready: Ready = self.pool.replace(worker)
        self._index_workers()
        new = self.worker_of[worker.rows[0]]
        for row in worker.rows:
            self.failed.setdefault(row, "its worker died")
        self._raise_start([(failure, new) for failure in ready.failures])

    # -- answering --------------------------------------------------------------------------------------------------

    def finish(self, pending: Pending, timeout: float | None) -> Result:
        """Wait for the answers to ``pending`` and take them in.

        Raises:
            StepTimeout: They are still owed.
            Exception: What an environment raised, or :class:`~vecenv.errors.WorkerDied`.
        """
        result = self.collect(pending, timeout)
        if result.failures or result.deaths or pending.lost:
            self.settle(result, pending)
        if self.policy.restart and pending.command in ("step", "reset"):
            self.remember(None)
        return result

    def collect(self, pending: Pending, timeout: float | None) -> Result:
        """Wait for the answers to ``pending``, whatever they say.

        Raises:
            StepTimeout: They are still owed.
        """
        stepping = pending.command == "step"
        hang = timeout is None and (stepping or pending.command == "reset")
        limit = self.policy.step_timeout if hang else timeout
        late = self.pool.gather(pending.workers, None if limit is None else time.monotonic() + limit)
        if late:
            if not (hang and self.policy.restart):
                raise self.timeout_error(late, pending.command, limit)
            self.end_hanging(late, limit)
        answers = [(worker, worker.replies.popleft()) for worker in pending.workers]
        result = self.absorb(answers)
        if stepping:
            self.env_steps += self.num_envs
        if pending.lost:
            if stepping:
                self.env_steps -= len(pending.lost)
            if result is PLAIN or result is COLUMNS:  # what became of lost rows is written into it
                return Result(columns=result.columns)
        return result

    def end_hanging(self, late: Sequence[AnyWorker], limit: float | None) -> None:
        for worker in late:
            if not worker.local:
                stack = worker.stack()
                worker.signal(9)
                worker.bury(
                    f"it hung for more than {limit} seconds and was killed" + (f"; it was at:\n{stack}" if stack else "")
                )

    def timeout_error(self, late: Sequence[AnyWorker], command: str, limit: float | None) -> StepTimeout:
        text = f"The call to `{_wait_name(command)}` has timed out after {limit} second(s)."
        for worker in late[:4]:
            worker.overdue = True
            if not worker.local:
                stack = worker.stack()
                rows = [row for request in list(worker.asked)[:1] for row in request.rows]
                state = " It is stopped (SIGSTOP)." if worker.is_stopped() else ""
                text += f"\nenvs {rows}, {worker.who}, during {command}: no answer yet.{state}"
                text += f"\n{stack}" if stack else ""
        return StepTimeout(text + "\nThe answer is still owed: wait again, or close().")

    def absorb(self, answers: Iterable[tuple[AnyWorker, Answer]]) -> Result:
        result = PLAIN
        for worker, answer in answers:
            if answer.outcome is None and answer.death is None and (result.columns or not answer.columns):
                continue  # nothing new
            if answer.outcome is None and answer.death is None and result is PLAIN:
                result = COLUMNS
                continue
            if result is PLAIN or result is COLUMNS:
                result = Result(columns=result.columns)
            if answer.columns:
                result.columns = True
            if answer.outcome is not None:
                out = answer.outcome
                self._reader.learn(out.schemas)
                result.infos.update(out.infos)
                result.finals.update(out.finals)
                result.results.update(out.results)
                for row, observation in out.observations.items():
                    self.store.accept(row, observation)
                result.failures.extend((failure, worker) for failure in out.failures)
                for name, text in out.warnings:
                    if name not in self._said:
                        self._said.add(name)
                        logger.warn("%s", text)
            if answer.death is not None:
                result.deaths.append(answer.death)
        return result

    # -- failures ---------------------------------------------------------------------------------------------------

    def settle(self, result: Result, pending: Pending) -> None:
        """Raise what went wrong, or rebuild it."""
        command = pending.command
        deaths = {death.worker: death for death in result.deaths}
        for death in deaths.values():
            self.ledger.record_death(death)
        raised = sorted(
            [
                (failure.env, failure, worker, self.ledger.record(failure, worker, command))
                for failure, worker in result.failures
            ],
            key=lambda entry: entry[0],
        )
        if self.policy.restart and command in ("step", "reset"):
            lost = sorted(set(pending.lost) | set(self.failed))
            self._restart(lost, result, pending)
            return
        self.ledger.raise_all(raised, list(deaths.values()), log=command in ("step", "reset"))

    def _restart(self, lost: list[int], result: Result, pending: Pending) -> None:
        """Rebuild the rows in ``lost``, and write what the caller is to see of them."""
        command = pending.command
        lost = self._rebuild(lost, pending, result)
        result.columns = True
        rebuilt = result.infos
        for row in lost:
            info: dict[Any, Any] = {"restarted": True}
            if command == "reset" or self.mode is AutoresetMode.SAME_STEP:
                info = {**(rebuilt.get(row) or self._reader.one(row)), **info}
            self.batch.info_schemas[row] = NO_INFO
            self.batch.final[row] = False
            result.finals.pop(row, None)
            rebuilt[row] = info
            if command == "step":
                self.batch.rewards[row] = 0.0
                self.batch.terminations[row] = False
                self.batch.truncations[row] = True
                if (last := self._last_of(row)) is not None:
                    result.finals[row] = last
                    if self.mode is not AutoresetMode.SAME_STEP:
                        self.store.put_row(row, self._last_of(row))

    def _rebuild(self, lost: list[int], pending: Pending, result: Result) -> list[int]:
        """New environments for the rows in ``lost``, within the budget; returns the rows that were rebuilt."""
        rebuilt: set[int] = set()
        todo = set(lost)
        while todo:
            dead = {id(w): w for w in (self.worker_of[row] for row in todo) if w.death is not None}
            causes = [str(worker.death).partition("\n")[0] for worker in dead.values()]
            causes += [f"env {row}: {self.failed[row]}" for row in sorted(todo) if self.worker_of[row].death is None]
            for cause in causes:
                if not self._budget.spend(cause):
                    self._give_up()
                self.restarts += 1
            for worker in dead.values():
                todo |= set(worker.rows)
                try:
                    self._replace(worker)  # type: ignore[arg-type]
                except (WorkerDied, TimeoutError) as error:
                    self.failed.update(dict.fromkeys(worker.rows, str(error).partition("\n")[0]))
            if any(self.worker_of[row].death is not None for row in todo):
                continue
            failed = self._ask_rebuild(sorted(todo), pending, result)
            rebuilt |= todo
            todo = failed
        for row in rebuilt:
            self.failed.pop(row, None)
        return sorted(rebuilt)

    def _ask_rebuild(self, rows: list[int], pending: Pending, result: Result) -> set[int]:
        """Ask for new environments; returns the rows that failed again.

        Those that failed in a reset get the seed and the options of that reset again, all others a fresh seed.
        """
        reset_next = pending.command == "step" and self.mode is AutoresetMode.NEXT_STEP
        seq = self.pool.next_seq()
        self.batch.requested[rows] = seq
        asked: list[AnyWorker] = []
        for worker in {id(self.worker_of[row]): self.worker_of[row] for row in rows}.values():
            mine = [row for row in rows if self.worker_of[row] is worker]
            seeds: list[Any] = [int(child.generate_state(1)[0]) for child in self._seeds.spawn(len(mine))]
            if pending.seeds is not None:
                asked_for = [row for row in mine if pending.mask is None or pending.mask[row]]
                seeds = [pending.seeds[row] if row in asked_for else fresh for row, fresh in zip(mine, seeds, strict=True)]
            self.pool.post(worker, Request(seq, Op.REBUILD_SOME, mine, (seeds, pending.options, reset_next)))
            asked.append(worker)
        # other answers of these workers (first-ready batches) come before this one, and stay in their queues
        limit = self.policy.start_timeout + (self.policy.step_timeout or 0.0)
        late = self.pool.gather(asked, time.monotonic() + limit)
        if late:
            self.end_hanging(late, limit)
        answers = []
        for worker in asked:
            own = next(reply for reply in worker.replies if reply.request.seq == seq)
            worker.replies.remove(own)
            answers.append((worker, own))
        again = self.absorb(answers)
        for death in again.deaths:
            self.ledger.record_death(death)
        for failure, worker in again.failures:
            self.ledger.record(failure, worker, "reset")
        result.infos.update(again.infos)
        lost = {row for death in again.deaths for row in death.envs} | {failure.env for failure, _ in again.failures}
        return lost

    def _give_up(self) -> None:
        causes = "\n".join(f"- {cause}" for cause in self._budget.causes)
        last = self.ledger.latest_death
        raise WorkerDied(
            f"more than {self._budget.limit} restarts within {self._budget.period} seconds; the last causes:\n{causes}",
            worker=last.worker if last else self.worker_of[min(self.failed)].index,
            pid=last.pid if last else self.worker_of[min(self.failed)].pid,
            exitcode=last.exitcode if last else None,
            envs=sorted(self.failed), command="restart",
        )  # fmt: skip

    def remember(self, rows: list[int] | None) -> None:
        """Keep the observations of some rows (``None``: all) as their last good ones."""
        if self.layout.observations is None:
            for row in range(self.num_envs) if rows is None else rows:
                self._last_rows[row] = self.store.row(row)
        elif self._last_good is None or rows is None:
            self._last_good = self.store.batch(copy=True)
        else:
            _copy_rows(self._last_good, self.store, rows, self.layout.observations)

    def _last_of(self, row: int) -> Any:
        """The observation that was remembered of an environment, as an object of its own; ``None`` if there is none."""
        if self.layout.observations is None:
            return deepcopy(self._last_rows.get(row))
        if self._last_good is None:
            return None
        return self.layout.observations.map(lambda leaf: leaf[row].copy(), self._last_good)

    # -- what the caller gets ---------------------------------------------------------------------------------------

    def infos(self, result: Result) -> dict[Any, Any]:
        """The infos of all rows as one dict of arrays."""
        if not result.columns:
            return {}
        ended = self.batch.final
        finals = result.finals
        if b"\1" in ended.tobytes():  # a tenth of what `any` takes
            finals = self.finals(np.flatnonzero(ended).tolist()) | finals
        return self._reader.read(None, self.num_envs, result.infos, finals)

    def export_infos(self, rows: Any, told: set[int]) -> tuple[Array, Array, dict[int, Definition]]:
        """The infos of some rows for a reader elsewhere; see :meth:`vecenv.infos.InfoReader.export`."""
        return self._reader.export(rows, told)

    def finals(self, rows: Sequence[int]) -> dict[int, Any]:
        """Row -> last observation of its episode, for those of ``rows`` that have one in shared memory."""
        tree, leaves = self.layout.observations, self.batch.final_observations
        if leaves is None or tree is None:
            return {}
        flags = self.batch.final
        return {row: tree.build(iter([leaf[row].copy() for leaf in leaves])) for row in rows if flags[row]}

    def infos_of(self, rows: Array, result: Result) -> dict[Any, Any]:
        """The infos of some rows, compact."""
        listed = rows.tolist()
        finals = self.finals(listed) | result.finals
        positions = {row: position for position, row in enumerate(listed)}
        return self._reader.read(
            rows,
            len(listed),
            {positions[row]: info for row, info in result.infos.items()},
            {positions[row]: observation for row, observation in finals.items()},
        )

    # -- figures and end --------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Figures since the start; see :meth:`vecenv.AsyncVectorEnv.stats`."""
        elapsed = max(time.monotonic() - self.began, 1e-9)
        timed = float(self.batch.worker_steps.sum())
        working = int(np.count_nonzero(self.batch.worker_steps))  # the caller has a row there, whether it has a share or not
        spent = float(self.batch.worker_time.sum())
        per_worker = self.batch.worker_time / np.maximum(self.batch.worker_steps, 1.0)
        times = self.batch.step_time[self.batch.step_time > 0]
        busiest = float(self.batch.worker_time.max())
        return {
            "steps": float(self.env_steps),
            "steps_per_second": self.env_steps / elapsed,
            "wait_fraction": self.pool.time_waiting / elapsed,
            "step_time_mean": spent / max(timed, 1.0),
            "step_time_slowest_env": float(times.max()) if len(times) else float(per_worker.max()),
            "straggler_share": 1.0 - spent / (busiest * working) if busiest > 0 else 0.0,
            "resets": float(self.resets),
            "restarts": float(self.restarts),
            "errors": float(len(self.ledger.errors)),
            "bytes_pickled": float(sum(w.channel.bytes_pickled for w in self.pool.workers if isinstance(w, ProcessWorker))),
        }

    def close(self, timeout: float, *, terminate: bool) -> None:
        """End the workers; what environments raised in their own ``close`` is said as warnings."""
        self.pool.close(timeout, terminate=terminate)
        for failure, _ in self.pool.failures_in_close:
            packed = failure.error
            said = packed.summary if isinstance(packed, PackedError) else summary(packed)
            logger.warn("%s", f"env {failure.env} raised in close(): {said}")


def _wait_name(command: str) -> str:
    return {"set_attr": "set_attr", "exec_func": "exec_func_fetch", "recv": "recv"}.get(command, f"{command}_wait")


def _copy_rows(batch: Any, store: Store, rows: Sequence[int], tree: Tree) -> None:
    if not rows:
        return
    fresh: list[Array] = []
    tree.map(lambda leaf: fresh.append(leaf) or leaf, store.take(np.array(rows)))  # type: ignore[func-returns-value]
    parts = iter(fresh)

    def copy(leaf: Array) -> Array:
        leaf[rows] = next(parts)
        return leaf

    tree.map(copy, batch)
