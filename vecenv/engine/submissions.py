"""Non-blocking requests about single rows: the process engine's interface for event loops.

An event loop watches :meth:`Submissions.fileno` and calls :meth:`Submissions.collect` when it is readable. Only
:meth:`Submissions.start` replaces a worker that has died.

The methods are not guarded (:mod:`vecenv.front.guard`). If a signal handler raises in one of them, a submitted request may
never be returned, and the workers have to be closed. Handlers of ``loop.add_signal_handler`` run between the callbacks of
the event loop, and that of ``asyncio.run`` raises only for the second Ctrl-C, which ends the loop.
"""

from __future__ import annotations

import os
import selectors
import signal
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Final

from vecenv.engine.process_engine import Engine
from vecenv.engine.requests import Death, Request
from vecenv.engine.worker_process import WorkerProcess
from vecenv.errors import EnvFailed, failed_earlier_error
from vecenv.front.infos import count_steps
from vecenv.link.envs import call_env
from vecenv.link.messages import OVERLAPS, Op, summary
from vecenv.link.observations import require_fitting_observation
from vecenv.state.snapshots import Snapshot
from vecenv.system.descriptors import Descriptor, DescriptorOwner
from vecenv.system.restart_budget import RestartBudget
from vecenv.system.supervision import EXIT_POLL_INTERVAL_MS

_COMMANDS: Final[dict[str, tuple[Op, str, Callable[[int, Any], Any]]]] = {
    "step": (Op.STEP_SOME, "step", lambda k, action: [action]),
    "reset": (Op.RESET_SOME, "reset", lambda k, args: None if args is None else ([args[0]], [args[1]])),
    "call": (Op.EXEC, "call", lambda k, call: ([k], call_env, call, {})),
    "save": (Op.SAVE, "save", lambda k, _: [k]),
    "verify": (Op.PROVE, "save", lambda k, _: [k]),
    "check": (Op.CHECK, "load", lambda k, snapshot: [(k, snapshot)]),
    "load": (Op.LOAD, "load", lambda k, _: [k]),
}
"""Command -> its operation, its name in errors, and a function that packs (position in the worker, payload)."""


class Submissions:
    """Requests to the worker processes of one engine, each about one row.

    Args:
        engine: An engine without rows in the calling process.

    Attributes:
        failed: Row -> what happened, for rows that need a reset.
        verified: Rows that were found to continue exactly from a snapshot.
        deaths: The deaths of workers. :meth:`collect` appends to this queue, and the owner empties it.
        poll_interval: Seconds after which to call :meth:`collect` even if nothing is readable, on systems where the end of
            a process may not make its descriptor readable; ``None`` elsewhere.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._state, self._changes = engine, engine.state, engine.exchange.changes
        self.failed, self.verified = engine.failure_log.failed, engine.verified
        self.deaths: deque[Death] = deque()
        workers = self._changes.pool.processes
        self._worker_index = {row: worker.index for worker in workers for row in worker.rows}
        self._selector = selectors.DefaultSelector()
        self._descriptors = DescriptorOwner(self)
        self._watched: dict[WorkerProcess, tuple[int, Descriptor]] = {}
        self._full_pipes: dict[WorkerProcess, int] = {}  # worker with a full pipe -> the descriptor
        self._starting: dict[WorkerProcess, Request] = {}
        for worker in workers:
            self._watch(worker)
        must_poll = any(worker.watch.must_poll_for_exit for worker in workers)
        self.poll_interval = EXIT_POLL_INTERVAL_MS / 1000 if must_poll else None

    def fileno(self) -> int:
        """Return a descriptor that is readable when :meth:`collect` has something to do. It never changes."""
        return self._selector.fileno()

    # -- requests --------------------------------------------------------------------------------------------------------

    def submit(self, row: int, command: str, payload: Any = None) -> Request:
        """Submit a request about a row. Requests about several rows of one worker may overlap, with ``env_threads``.

        Args:
            row: The environment.
            command: ``"step"`` with an action as payload, ``"reset"`` with ``None`` or ``(seed, options)``, ``"call"`` with
                ``(name, args, kwargs)``, ``"save"``, ``"verify"`` (check that the saved state continues exactly), or
                ``"check"`` and then ``"load"`` with the same snapshot.
            payload: See ``command``.

        Raises:
            EnvFailed: The row has failed, and this is not a reset; or its worker is dead.
            SnapshotMismatch: The observation of the snapshot does not fit.
            Exception: The payload cannot be pickled.
        """
        changes, worker = self._changes, self._find_worker(row)
        if worker.death is not None or (command != "reset" and row in self.failed):
            raise failed_earlier_error({row: self.failed[row]})
        if command == "check":
            require_fitting_observation(changes.store, row, payload.row)
        op, name, pack = _COMMANDS[command]
        packed = changes.pool.pickle_for(worker, pack(row - worker.rows[0], payload))
        request = Request(name)
        request.rows = [row]
        if command == "save":
            request.convert_result = partial(self._engine.with_observation, row)
        elif command == "verify":
            request.convert_result = lambda _: self.verified.add(row)
        elif command == "load":
            request.convert_result = partial(self._accept_loaded, row, payload)
        elif command == "reset":
            changes.failure_log.forget([row])
        self._state.changing = True
        changes.add(worker, op | OVERLAPS if len(worker.rows) > 1 else op, [row], request, packed)
        changes.in_flight.add(row)
        self._state.changing = False
        self._flush()
        return request

    def collect(self) -> list[tuple[Request, Any, Exception | None]]:
        """Apply the replies that have arrived, and return the finished requests, each with its result or its error.

        Returns:
            ``(request, result, error)``. A result is ``(observation, reward, terminated, truncated, info)`` for a step,
            ``(observation, info)`` for a reset, the value of a call, a snapshot, the loaded observation, or ``None``. An
            error is ``WorkerDied``, ``EnvFailed`` with the environment's exception as ``__cause__`` (for a step or reset),
            or the environment's exception itself.
        """
        ended_by_worker: dict[WorkerProcess, bool] = {}
        for key, _ in self._selector.select(0):
            worker, is_exit = key.data
            # The event may be about a pipe that is closed here: it stays registered under its number, which may be that of
            # a new descriptor by now, while a process that was just forked still has a copy.
            has_ended = is_exit and worker.watch.has_ended()
            ended_by_worker[worker] = has_ended or ended_by_worker.get(worker, False)
        if self.poll_interval is not None:
            ended_by_worker |= {worker: True for worker in self._watched if worker.watch.has_ended()}
        finished: list[Request] = []
        for worker, has_ended in ended_by_worker.items():
            self._state.changing = True
            finished += self._receive(worker, has_ended)
            self._state.changing = False
        if self._full_pipes or self._changes.pool.held:
            self._flush()
        return [(request, *self._take_result(request)) for request in finished]

    def _receive(self, worker: WorkerProcess, ended: bool) -> list[Request]:
        """Apply the replies of a worker or its death, and return the requests that are now finished."""
        changes, submitted = self._changes, list(worker.pending)
        if ended:
            changes.handle_death(worker)
        else:
            while changes.apply_next(worker) and worker.pending:
                pass
        finished = [request for _, _, request in submitted if not request.remaining]
        if worker.death is not None and worker in self._watched:
            self._unwatch(worker)
            self.deaths.append(worker.death)
        if worker in self._starting and (worker.has_started or worker.death is not None):
            start = self._starting.pop(worker)
            if worker.death is not None:
                start.create_containers()
                start.deaths.append(worker.death)
            finished.insert(0, start)
        return finished

    def _take_result(self, request: Request) -> tuple[Any, Exception | None]:
        """Return the result of a finished request, or its error."""
        changes, command = self._changes, request.command
        assert request.rows is not None
        row = request.rows[0]
        if command != "start":
            changes.in_flight.discard(row)
        if request.deaths:
            return None, request.deaths[0].error()
        try:
            if not request.failures:
                return self._read(request, row), None
            ((_, worker), *_) = request.failures
            loses_episode = command in ("step", "reset")  # even if only a part of the result cannot be sent
            mark = "all" if loses_episode else "fatal"
            ((_, error), *_) = changes.failure_log.record(command, request.failures, mark=mark)
            if not loses_episode:
                return None, error
            failure = EnvFailed(f"env {row}, {worker.label}, during {command}: {summary(error)}")
            failure.__cause__ = error
            return None, failure
        except Exception as error:  # it concerns only this environment
            return None, error

    def _read(self, request: Request, row: int) -> Any:
        changes, arrays = self._changes, self._changes.arrays
        if request.command not in ("step", "reset"):
            result = request.results.get(row)
            return result if request.convert_result is None else request.convert_result(result)
        if row in request.infos:
            info = request.infos[row]
        else:
            info = changes.info_reader.row_info(row) if request.may_have_infos else {}
        observation = changes.store.row(row)
        if request.command == "reset":
            changes.counters.resets += 1
            return observation, info
        changes.counters.steps += count_steps(info)
        flags = bool(arrays.terminations[row]), bool(arrays.truncations[row])
        return observation, float(arrays.rewards[row]), *flags, info

    def _accept_loaded(self, row: int, snapshot: Snapshot, _: Any) -> Any:
        if (death := self._find_worker(row).death) is not None:  # right after the reply: the row remains failed
            raise death.error()
        self._engine.accept_loaded(row, snapshot)
        return self._changes.store.row(row) if snapshot.row.used else None

    # -- workers ---------------------------------------------------------------------------------------------------------

    def kill(self, row: int, reason: str) -> None:
        """Kill the worker of a row. Its pending requests finish with ``WorkerDied`` when it has ended."""
        worker = self._find_worker(row)
        worker.note_activity()
        worker.kill_reason = worker.kill_reason or reason
        worker.watch.signal(signal.SIGKILL)

    def start(self, row: int, *, budget: RestartBudget | None = None) -> Request:
        """Start a new process in place of the dead worker of a row, without waiting. Its rows need a reset.

        Args:
            row: A row of the worker.
            budget: Count the restart against this budget, and log it.

        Returns:
            A request that is finished when the process is ready, or has died.

        Raises:
            ValueError: The worker is alive.
            RestartsExhausted: The budget is exhausted.
            OSError: The system lacks resources at the moment. Further attempts are not counted again.
        """
        changes, worker = self._changes, self._find_worker(row)
        if (death := worker.death) is None:
            raise ValueError(f"{worker.label}, is alive")
        if budget is not None and (error := changes.rebuilder.count_restarts(worker.rows, [worker], budget)) is not None:
            raise error
        try:
            new = changes.pool.replace(worker)
        except OSError as error:
            if budget is not None:
                cause = f"{death.first_line}; a new process cannot be started: {error}"
                changes.failure_log.restart_log.log(cause)
            raise
        if budget is None:
            changes.failure_log.restarts += 1
        changes.failure_log.forget(worker.rows)
        request = self._starting[new] = Request("start")
        request.rows = list(new.rows)
        self._watch(new)
        return request

    def find_stack(self, row: int) -> Generator[float, None, str]:
        """Find the Python stack of a row's worker: yield seconds to sleep, and finally return the stack, or ``""``."""
        worker = self._find_worker(row)
        search = worker.look_for_stack()
        while worker.death is None:
            try:
                seconds = next(search)
            except StopIteration as found:
                return str(found.value)
            yield seconds
        return ""

    def close(self) -> None:
        """Stop watching the workers. Idempotent."""
        for worker in list(self._watched):
            self._unwatch(worker)
        self._selector.close()

    def _find_worker(self, row: int) -> WorkerProcess:
        return self._changes.pool.processes[self._worker_index[row]]

    def _watch(self, worker: WorkerProcess) -> None:
        # A duplicate, because the original is closed before `_unwatch` can unregister it, and a copy of it in a forked child
        # would keep it registered.
        exit_descriptor = self._descriptors.open(os.dup, worker.watch.descriptor)
        self._selector.register(worker.channel.fd, selectors.EVENT_READ, (worker, False))
        self._selector.register(exit_descriptor.number, selectors.EVENT_READ, (worker, True))
        self._watched[worker] = worker.channel.fd, exit_descriptor

    def _unwatch(self, worker: WorkerProcess) -> None:
        reply_fd, exit_descriptor = self._watched.pop(worker)
        self._selector.unregister(reply_fd)
        self._selector.unregister(exit_descriptor.number)
        exit_descriptor.close()
        if worker in self._full_pipes:
            self._selector.unregister(self._full_pipes.pop(worker))

    def _flush(self) -> None:
        """Write queued messages as far as pipes accept them, and watch full pipes."""
        pool = self._changes.pool
        if pool.held:
            self._state.changing = True
            pool.release_held()
            self._state.changing = False
        pool.flush()  # collect() detects workers that have closed their pipes
        if not pool.unflushed and not self._full_pipes:  # nearly always
            return
        for worker in self._full_pipes.keys() - pool.unflushed:
            self._selector.unregister(self._full_pipes.pop(worker))
        for worker in pool.unflushed - self._full_pipes.keys():
            self._full_pipes[worker] = worker.channel.out
            self._selector.register(worker.channel.out, selectors.EVENT_WRITE, (worker, False))
