"""The main loop of a worker process, which receives messages, executes them and replies.

:func:`execute` executes one message on :class:`~vecenv.worker.snapshot_rows.SnapshotRows`. The caller uses it too, for its
own share of the environments. For plain steps, both call ``EnvRows.step`` directly. :func:`main` is the entry point of a
worker process. It installs the signal handlers of :mod:`vecenv.system.supervision` before it builds environments, so that
even a crash in a constructor is reported.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from vecenv.errors import EnvError
from vecenv.link.channel import ChannelClosed, Ends, WorkerEnd
from vecenv.link.envs import WorkerPlan
from vecenv.link.messages import (
    COLUMNS_OUTCOME,
    OVERLAPS,
    PLAIN_OUTCOME,
    EnvFnsToStart,
    Failure,
    Op,
    Outcome,
    PackedEnvFns,
    Reply,
    copy_if_possible,
    encode_outcome,
    is_call,
    pack_error,
    summary,
)
from vecenv.shm import Arena, SharedArrays
from vecenv.system.cores import Placement, SpinPolicy
from vecenv.system.descendants import end_own_descendants
from vecenv.system.descriptors import list_open_resources
from vecenv.system.generators import begin_worker
from vecenv.system.supervision import StackFile, flush_output
from vecenv.worker.snapshot_rows import SnapshotRows
from vecenv.worker.threaded_rows import ThreadedRows

_THREADS_GRACE_SECONDS: Final = 0.2  # in which threads that environments started may still end
_SNAPSHOT_OPS: Final = (Op.SAVE, Op.PROVE, Op.CHECK, Op.LOAD)
_UNCHANGEABLE: Final = (int, float, str, np.generic, type(None))
_CONTAINERS: Final = (dict, tuple, list)
_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(slots=True)
class Start:
    """The arguments of a worker process. They are pickled while the process is being started, unless it is forked.

    Attributes:
        index: Index of the worker.
        first: Index of its first environment.
        fingerprint, generation: For :func:`~vecenv.system.generators.begin_worker`: the caller's fingerprint, and the number
            of processes started before at this index.
    """

    index: int
    first: int
    env_fns: Sequence[Callable[[], Any]] | EnvFnsToStart | PackedEnvFns
    plan: WorkerPlan
    arena: Arena
    ends: Ends
    stack_file: StackFile
    placement: Placement
    fingerprint: bytes
    generation: int


@dataclass(slots=True)
class WorkerState:
    """The state of a worker process. Functions run by :attr:`Op.RUN` may replace any part of it.

    Attributes:
        start: The arguments of the process.
        channel: The connection to the caller.
        rows: Its environments; ``None`` until they are built, or if that failed.
        inherited: The result of :func:`~vecenv.system.descriptors.list_open_resources` before ``rows`` were built; in a
            copy, when it took over its row.
        cpus: The cores that it may use when it does not spin.
        exit: A function that ends the process with an exit code.
    """

    start: Start
    channel: WorkerEnd
    rows: SnapshotRows | None = None
    inherited: frozenset[tuple[str, str]] = frozenset()
    cpus: Collection[int] = ()
    exit: Callable[[int], object] = sys.exit


@dataclass(slots=True)
class Ready:
    """A worker's first message: its process id, and the failures and mismatches from building its environments.

    With ``ends``, the process ends now, because it could not even begin to build them.
    """

    pid: int
    failures: list[Failure]
    mismatches: list[tuple[int, str, str]]
    ends: bool = False


def make_rows(
    env_fns: Sequence[Callable[[], Any]], first: int, worker: int, plan: WorkerPlan, arrays: SharedArrays,
    in_caller: bool = False,
) -> SnapshotRows:  # fmt: skip
    """Create the rows of one worker, of the class that the plan requires; see :class:`~vecenv.worker.rows.EnvRows`."""
    kind = ThreadedRows if plan.env_threads > 1 and not in_caller else SnapshotRows
    return kind(env_fns, first, worker, plan, arrays, in_caller=in_caller)


def execute(rows: SnapshotRows, op: int, seq: int, payload: Any) -> Outcome:
    """Execute one message on ``rows``.

    Without a payload, a step reads its actions from shared memory, and a reset has no seeds or options.
    """
    if op == Op.STEP or op == Op.STEP_SOME:
        requested = None if op == Op.STEP else rows.requested_ks(seq)
        actions = rows.read_actions(requested) if payload is None else payload
        return rows.step(None if requested is None else requested.tolist(), actions)
    if op == Op.RESET or op == Op.RESET_SOME:
        ks = None if op == Op.RESET else rows.requested_ks(seq).tolist()
        seeds, options = payload or ([None] * (rows.count if ks is None else len(ks)), None)
        return rows.reset(ks, seeds, options)
    if op == Op.REBUILD_SOME:
        seeds, options, reset_due = payload
        return rows.rebuild(rows.requested_ks(seq).tolist(), seeds, options, reset_due=reset_due)
    arguments = payload if op in (Op.CALL, Op.SET_ATTR, Op.EXEC) else (payload,)
    outcome: Outcome = getattr(rows, Op(op).name.lower())(*arguments)  # the other methods are named after their operations
    return outcome


def serve(process: WorkerState) -> bool:
    """Execute messages and reply, until :attr:`Op.CLOSE` arrives. Return ``True`` if every environment closed cleanly.

    Raises:
        ChannelClosed: The caller is gone.
    """
    while True:
        rows, channel, placement = process.rows, process.channel, process.start.placement
        assert rows is not None
        arrays = process.start.plan.layout.view(process.start.arena.buffer)
        clean = _serve_channel(process, rows, channel, SpinPolicy(placement.spin, arrays.no_spin_until, placement.cpus))
        if clean is not None:
            return clean


def _serve_channel(process: WorkerState, rows: SnapshotRows, channel: WorkerEnd, policy: SpinPolicy) -> bool | None:
    """Serve as :func:`serve` does, but return ``None`` if this process is now a copy of the worker, with another channel."""
    pid = os.getpid()
    wait, send, step, read_actions = channel.wait, channel.send, rows.step, rows.read_actions
    plain_step = int(Op.STEP), None
    plain, columns = int(Reply.PLAIN), int(Reply.COLUMNS)
    while True:
        op, seq, payload = wait(policy)
        if (op, payload) == plain_step:  # the usual message: all rows, with actions in shared memory
            outcome = step(None, read_actions(None))
            if (outcome is PLAIN_OUTCOME or outcome is COLUMNS_OUTCOME) and os.getpid() == pid:
                send(plain if outcome is PLAIN_OUTCOME else columns, seq)
                continue
        elif op == Op.CLOSE:
            return close_rows(channel, rows, seq)
        elif op & OVERLAPS and isinstance(rows, ThreadedRows):
            rows.submit(execute_in_thread, channel, rows, op, seq, payload)
            continue
        elif op == Op.RUN:
            function, argument = pickle.loads(payload or b"")
            outcome = function(process, argument)
            if process.channel is not channel:
                return None
        else:
            rows.note_running(-1)  # if unpickling the payload kills this worker, no environment is to blame
            arguments, error_outcome = _unpickle(rows, op, seq, payload)
            outcome = error_outcome or execute(rows, op & ~OVERLAPS, seq, arguments)
        if os.getpid() != pid:  # this is a child that an environment forked, not the worker
            os._exit(0)
        reply(channel, seq, outcome)


def _unpickle(rows: SnapshotRows, op: int, seq: int, payload: bytes | None) -> tuple[Any, Outcome | None]:
    """Return the unpickled payload and ``None``; or ``None`` and an outcome in which all rows of the message have failed."""
    try:
        arguments = None if payload is None else pickle.loads(payload)
        return _separate(arguments) if op in (Op.STEP, Op.STEP_SOME) and arguments else arguments, None
    except Exception as error:
        is_about_some_rows = op & OVERLAPS or op in (Op.STEP_SOME, Op.RESET_SOME, Op.REBUILD_SOME)
        text = f"the request cannot be unpickled in the worker: {summary(error)}"
        envs = rows.first + (rows.requested_ks(seq) if is_about_some_rows else np.arange(rows.count))
        fatal = not is_call(op)
        return None, Outcome(failures=[Failure(env, EnvError(f"env {env}: {text}"), fatal) for env in envs.tolist()])


def _separate(actions: list[Any]) -> list[Any]:
    """Return the actions of a message, copied if several share an object: environments may write into it."""
    is_shared = len(actions) > 1 and _contains_one_twice(actions, set())
    return [copy_if_possible(action) for action in actions] if is_shared else actions


def _contains_one_twice(values: Iterable[Any], seen: set[int]) -> bool:
    """True if an object that can be changed occurs twice in values, or in dicts, tuples and lists in them.

    ``seen`` receives the ids of the objects.
    """
    for value in values:
        if isinstance(value, _CONTAINERS):
            if _contains_one_twice(value.values() if isinstance(value, dict) else value, seen):
                return True
        elif id(value) in seen:
            if not isinstance(value, _UNCHANGEABLE):
                return True
        else:
            seen.add(id(value))
    return False


def execute_in_thread(channel: WorkerEnd, rows: ThreadedRows, op: int, seq: int, payload: bytes | None) -> None:
    """Execute an overlapping message in a thread, while other environments may be running, and reply."""
    try:
        arguments, outcome = _unpickle(rows, op, seq, payload)
        op &= ~OVERLAPS
        if outcome is None:
            rows.run(op, seq, arguments)
            if op in _SNAPSHOT_OPS:  # these may take long, and must not delay the replies of other environments
                with rows.snapshot_lock:
                    outcome = execute(rows, op, seq, arguments)
        with rows.message_lock:
            reply(channel, seq, outcome or execute(rows, op, seq, arguments))
    except ChannelClosed:  # the main thread receives this exception too
        pass
    except BaseException:  # without a reply the caller would wait forever
        traceback.print_exc()
        flush_output()
        os._exit(1)


def reply(channel: WorkerEnd, seq: int, outcome: Outcome) -> None:
    """Reply to a message."""
    if not outcome.has_payload():
        channel.send(Reply.COLUMNS if outcome.columns else Reply.PLAIN, seq)
    else:
        channel.send(Reply.FULL, seq, encode_outcome(outcome))


def close_rows(channel: WorkerEnd, rows: SnapshotRows, seq: int) -> bool:
    """Close the environments and reply. Return ``True`` if all closed cleanly."""
    outcome = rows.close()
    if leftovers := describe_leftovers():
        outcome.warnings.append(("leftovers", f"{rows.span} left something running after close(): {leftovers}"))
    with contextlib.suppress(ChannelClosed):
        channel.send(Reply.FULL, seq, encode_outcome(outcome))
    return not outcome.failures


def describe_leftovers() -> str:
    """Return a description of the threads and processes that keep this process from exiting, or an empty string."""
    threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]
    deadline = time.monotonic() + _THREADS_GRACE_SECONDS
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    names = [f"thread {thread.name!r}" for thread in threads if thread.is_alive()]
    names += [f"process {process.pid}" for process in multiprocessing.active_children() if not process.daemon]
    return ", ".join(names)


def main(start: Start) -> None:
    """Run a worker process."""
    if start.placement.bound_at_start and start.placement.cpus is not None:
        os.sched_setaffinity(0, start.placement.cpus)
    start.stack_file.install_handlers(env_threads=start.plan.env_threads > 1)
    gc.freeze()  # the collector will not write to inherited objects, so they stay shared with the caller after a fork
    _limit_threads(start.plan.threads)
    process = WorkerState(start, WorkerEnd(start.ends, blocks=not start.placement.spin))
    try:
        seed_torch = begin_worker(start.fingerprint, (start.index, start.generation))
        env_fns = start.env_fns
        assert not isinstance(env_fns, EnvFnsToStart)  # these are pickled as PackedEnvFns
        if isinstance(env_fns, PackedEnvFns):
            env_fns = start.env_fns = env_fns.load(start.first, "in its worker")  # frees the pickled functions
        arrays = start.plan.layout.view(start.arena.buffer)
        if hasattr(os, "sched_getaffinity"):
            process.cpus = os.sched_getaffinity(0)
        process.inherited = list_open_resources()
        rows = make_rows(env_fns, start.first, start.index, start.plan, arrays)
        os.register_at_fork(after_in_child=partial(rows.forked.append, True))
        rows.guard_settings()
        failures, mismatches = rows.build()
        seed_torch()
        rows.exit_if_forked()
        process.rows = rows
    except BaseException as error:
        failures, mismatches = [Failure(getattr(error, "env", start.first), error)], []
    for failure in failures:
        failure.error = pack_error(failure.error)
    code = _serve_until_exit(process, Ready(os.getpid(), failures, mismatches, ends=process.rows is None))
    if code or process.exit is not sys.exit:
        process.exit(code)


def _serve_until_exit(process: WorkerState, ready: Ready) -> int:
    """Send ``ready``, run :func:`serve`, and return the exit code.

    If the caller is gone, end the processes that environments started.
    """
    clean = caller_is_gone = False
    try:
        process.channel.send(Reply.READY, 0, pickle.dumps(ready))
        if process.rows is not None:
            clean = serve(process)
    except ChannelClosed:  # the caller closed the pipe or died, so there is no process to report to
        clean = caller_is_gone = True
        if process.rows is not None:
            process.rows.close()
    except BaseException:
        traceback.print_exc()
    flush_output()
    if caller_is_gone:  # no other process ends the helpers that environments started
        end_own_descendants()
    if describe_leftovers():  # a normal exit would wait for them
        os._exit(0 if clean else 1)
    return 0 if clean else 1


def _limit_threads(threads: int | None) -> None:
    """Limit the threads of numerical libraries; those that are imported later read environment variables."""
    if threads is None:
        return
    for variable in _THREAD_VARIABLES:
        os.environ.setdefault(variable, str(threads))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
    with contextlib.suppress(ImportError):
        import threadpoolctl

        threadpoolctl.threadpool_limits(threads)
