"""One worker's whole life: what it is given at its start, and ``serve``: hear a message, answer it.

:func:`answer` turns a message into calls on :class:`~vecenv.worker.keeping.SnapshotRows` and knows nothing of processes; the
caller's own share of the environments is served by it too. :func:`main` is what runs in a worker process: it arms the
mechanisms of :mod:`vecenv.system.supervision` first, so that a crash in the very constructor of an environment is already
reported.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn

import numpy as np

from vecenv.errors import NotRestorable
from vecenv.link.channel import ChannelClosed, Ends, WorkerEnd
from vecenv.link.messages import PLAIN_OUTCOME, Failure, Op, Outcome, PackedEnvFns, Reply, encode_outcome, pack_error
from vecenv.shm import Arena, Batch
from vecenv.system.copies import Uncopied, fork_twice, has_copies, open_of
from vecenv.system.cores import Placement, SpinPolicy
from vecenv.system.descendants import end_own
from vecenv.system.descriptors import DescriptorOwner
from vecenv.system.generators import begin_worker, look_at_torch
from vecenv.system.supervision import BlackBox, flush_output
from vecenv.worker.envs import WorkerPlan
from vecenv.worker.keeping import SnapshotRows
from vecenv.worker.variants import SpareRows, ThreadedRows

_THREADS_GRACE: Final = 0.2  # seconds for threads of environments that end by themselves
_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(slots=True)
class Start:
    """What one worker process is given. Everything in it can be pickled while a process is being spawned."""

    index: int
    first: int
    env_fns: Sequence[Callable[[], Any]] | PackedEnvFns
    plan: WorkerPlan
    arena: Arena
    ends: Ends
    black_box: BlackBox
    placement: Placement
    stream: bytes
    life: int


@dataclass(slots=True)
class Ready:
    """A worker's first message: itself, and what went wrong while its environments were built."""

    pid: int
    failures: list[Failure]
    mismatches: list[tuple[int, str, str]]


def make_rows(
    env_fns: Sequence[Callable[[], Any]], first: int, worker: int, plan: WorkerPlan, batch: Batch, interrupts: bool = False
) -> SnapshotRows:
    """The rows of one worker, of the kind that fits the plan; see :class:`~vecenv.worker.rows.EnvRows`."""
    kind = SnapshotRows
    if plan.ahead:
        kind = SpareRows
    elif plan.env_threads > 1 and not interrupts:
        kind = ThreadedRows
    return kind(env_fns, first, worker, plan, batch, interrupts=interrupts)


def answer(rows: SnapshotRows, op: int, seq: int, payload: Any) -> Outcome:
    """Carry out one message on ``rows``. Its payload may be ``None``."""
    if op == Op.STEP or op == Op.STEP_SOME:
        where = None if op == Op.STEP else rows.chosen(seq)
        actions = rows.actions(where) if payload is None else payload
        return rows.step(seq, None if where is None else where.tolist(), actions)
    if op == Op.RESET or op == Op.RESET_SOME:
        ks = None if op == Op.RESET else rows.chosen(seq).tolist()
        seeds, options = payload or ([None] * (rows.count if ks is None else len(ks)), None)
        return rows.reset(seq, ks, seeds, options)
    if op == Op.REBUILD_SOME:
        seeds, options, pending = payload
        return rows.rebuild(seq, rows.chosen(seq).tolist(), seeds, options, pending=pending)
    arguments = payload if op in (Op.CALL, Op.SET_ATTR, Op.EXEC) else (payload,)
    outcome: Outcome = getattr(rows, Op(op).name.lower())(seq, *arguments)  # all others have the names of their words
    return outcome


@dataclass(slots=True)
class CopyPlan:
    """What a copy of a worker is given. Its files are those of the caller, which it opens for itself.

    Attributes:
        caller: The caller's pid.
        reader, writer, box: Descriptors there: those of the worker's ends of its channel, and its black box.
        token: What it is marked with.
        row: Which row it has; ``None``: it waits.
        placement: Where it sits.
        seed: What its generators begin with anew; ``None``: they go on.
    """

    caller: int
    reader: int
    writer: int
    box: int
    token: int
    row: int | None = None
    placement: Placement | None = None
    seed: int | None = None


class _Copied(BaseException):
    """Raised in a copy: it leaves the frames of the worker, or copies of copies would run out of stack.

    Args:
        rows: The environments, as they were in the worker.
        plan: What the copy is given.
    """

    def __init__(self, rows: SnapshotRows, plan: CopyPlan) -> None:
        super().__init__()
        self.rows, self.plan = rows, plan


def freeze(channel: WorkerEnd, uncopied: Uncopied | None, rows: SnapshotRows, plan: CopyPlan) -> Outcome:
    """Copy this worker: the copy waits until it is copied in its turn, each time for a row that goes on from here."""
    assert uncopied is not None
    why = uncopied.why_not()
    flush_output()  # what is written later is not to be written by each copy
    if not why and fork_twice(plan.token):
        try:
            os.sched_setaffinity(0, uncopied.cpus)
            channel.close()
        except BaseException:  # it must not go on as the one that it is a copy of
            traceback.print_exc()
            os._exit(1)
        raise _Copied(rows, plan)
    failures = [Failure(rows.first, NotRestorable(f"it cannot be frozen: {why}"), fatal=False)] if why else []
    return Outcome(failures=failures)


def _live_as_copy(start: Start, rows: SnapshotRows, plan: CopyPlan) -> NoReturn:
    """A copy's whole life: it waits, and each copy of it that is given a row serves, and may be copied in its turn."""
    code = 1
    try:
        while (there := _wait_frozen(rows, start, plan)) is not None:
            channel, rows = _thawed(rows, start, there)
            try:
                code = _live(start, channel, rows, Ready(os.getpid(), [], []), Uncopied())
                break
            except _Copied as copied:
                rows, plan = copied.rows, copied.plan
        else:
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _wait_frozen(rows: SnapshotRows, start: Start, plan: CopyPlan) -> CopyPlan | None:
    """Wait to be copied. In a copy: what it is given; in the one that waited, at its end: ``None``."""
    channel = _opened(rows, start, plan)
    channel.send(Reply.READY, 0, pickle.dumps(Ready(os.getpid(), [], [])))
    patience = SpinPolicy(0.0, np.zeros(1))
    with contextlib.suppress(ChannelClosed):
        while (message := channel.wait(patience))[0] != Op.CLOSE:
            there: CopyPlan = pickle.loads(message[2] or b"")
            if fork_twice(there.token):
                channel.close()
                return there
    return None


def _opened(rows: SnapshotRows, start: Start, plan: CopyPlan) -> WorkerEnd:
    """In a copy: its own channel and black box."""
    rows.forked.clear()
    files = (plan.reader, os.O_RDONLY), (plan.writer, os.O_WRONLY), (plan.box, os.O_RDWR | os.O_APPEND)
    owner = DescriptorOwner(None)  # they are open until the process ends
    reader, writer, box = (owner.open(open_of, plan.caller, *file) for file in files)
    start.black_box = BlackBox.opened(box)
    start.black_box.arm(threads=False)
    return WorkerEnd((reader, writer), blocks=plan.placement is None or not plan.placement.spin)


def _thawed(before: SnapshotRows, start: Start, plan: CopyPlan) -> tuple[WorkerEnd, SnapshotRows]:
    """In a copy that is given a row: its channel and its environment."""
    assert plan.row is not None
    assert plan.placement is not None
    start.placement = plan.placement
    if plan.placement.bound and plan.placement.cpus is not None:
        os.sched_setaffinity(0, plan.placement.cpus)
    channel = _opened(before, start, plan)
    batch = start.plan.layout.view(start.arena.buffer)
    rows = make_rows(before.env_fns, plan.row, plan.row, start.plan, batch)
    rows.follow(before)
    if plan.seed is not None:
        rows.reseed(plan.seed)
    return channel, rows


def serve(channel: WorkerEnd, rows: SnapshotRows, patience: SpinPolicy, batch: Batch, uncopied: Uncopied | None) -> bool:
    """Answer messages until one says to close; true if every environment closed cleanly.

    Args:
        channel: Where they come from.
        rows: The environments.
        patience: How long to poll for the next one.
        batch: Where environments are, that move from row to row.
        uncopied: Says why this process cannot be copied; ``None``: no process of this system can.

    Raises:
        ChannelClosed: The caller is gone.
    """
    pid = os.getpid()
    wait, send, step, actions = channel.wait, channel.send, rows.step, rows.actions
    plain_step = int(Op.STEP), None
    plain = int(Reply.PLAIN)
    while True:
        op, seq, payload = wait(patience)
        if (op, payload) == plain_step:  # all rows, actions in shared memory: nearly always
            outcome = step(seq, None, actions(None))
            if outcome is PLAIN_OUTCOME and os.getpid() == pid:
                send(plain, seq)
                continue
        elif op == Op.CLOSE:
            return close_rows(channel, rows, seq)
        elif op == Op.TAKE:
            assert isinstance(rows, SpareRows)
            rows = rows.at_place(batch, *pickle.loads(payload or b""))
            step, actions = rows.step, rows.actions
            continue
        elif rows.plan.overlaps:
            assert isinstance(rows, ThreadedRows)
            rows.submit(carry_out, channel, rows, op, seq, _loaded(payload))
            continue
        elif op == Op.FREEZE:
            outcome = freeze(channel, uncopied, rows, pickle.loads(payload or b""))
        else:
            outcome = answer(rows, op, seq, _loaded(payload))
        if os.getpid() != pid:  # a child that an environment forked has come back from step(): it is not the worker
            os._exit(0)
        say(channel, seq, outcome)


def carry_out(channel: WorkerEnd, rows: ThreadedRows, op: int, seq: int, payload: Any) -> None:
    """In a thread: answer a message when its own environment is done, while others are in work."""
    try:
        rows.run(op, seq, payload)
        with rows.turn:
            say(channel, seq, answer(rows, op, seq, payload))
    except ChannelClosed:  # the main thread sees that too
        pass
    except BaseException:  # without an answer the caller would wait for ever
        traceback.print_exc()
        flush_output()
        os._exit(1)


def say(channel: WorkerEnd, seq: int, outcome: Outcome) -> None:
    """Answer a message."""
    if outcome.is_plain():
        channel.send(Reply.COLUMNS if outcome.columns else Reply.PLAIN, seq)
    else:
        channel.send(Reply.FULL, seq, encode_outcome(outcome))


def close_rows(channel: WorkerEnd, rows: SnapshotRows, seq: int) -> bool:
    """Close the environments, and say so; true if each closed cleanly."""
    outcome = rows.close()
    if left := left_behind():
        outcome.warnings.append(("left", f"after close() environments {rows.span} left running: {left}"))
    with contextlib.suppress(ChannelClosed):
        channel.send(Reply.FULL, seq, encode_outcome(outcome))
    return not outcome.failures


def left_behind() -> str:
    """What would keep this process from ending: threads and processes that environments started and did not end."""
    threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]
    deadline = time.monotonic() + _THREADS_GRACE
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    names = [f"thread {thread.name!r}" for thread in threads if thread.is_alive()]
    names += [f"process {process.pid}" for process in multiprocessing.active_children() if not process.daemon]
    return ", ".join(names)


def _loaded(payload: bytes | None) -> Any:
    return None if payload is None else pickle.loads(payload)


def main(start: Start) -> None:
    """The body of a worker process."""
    uncopied = None
    if start.placement.bound and start.placement.cpus is not None:
        os.sched_setaffinity(0, start.placement.cpus)
    start.black_box.arm(threads=start.plan.env_threads > 1)
    gc.freeze()  # what came with the fork stays shared with the caller instead of being copied by the collector
    _limit_threads(start.plan.threads)
    channel = WorkerEnd(start.ends, blocks=not start.placement.spin)
    try:
        seed_torch = begin_worker(start.stream, (start.index, start.life))
        env_fns = start.env_fns
        if isinstance(env_fns, PackedEnvFns):
            env_fns = start.env_fns = env_fns.load(start.first, "in its worker")  # their pickles are let go of
        batch = start.plan.layout.view(start.arena.buffer)
        uncopied = Uncopied() if has_copies() else None
        rows = make_rows(env_fns, start.first, start.index, start.plan, batch)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=partial(rows.forked.append, True))
        rows.use_generators(start.plan.generators)
        failures, mismatches = rows.build()
        seed_torch()
        look_at_torch()
        rows.leave_if_forked()
    except BaseException as error:
        rows, failures, mismatches = None, [Failure(getattr(error, "env", start.first), error)], []
    for failure in failures:
        failure.error = pack_error(failure.error)
    try:
        code = _live(start, channel, rows, Ready(os.getpid(), failures, mismatches), uncopied)
    except _Copied as copied:
        _live_as_copy(start, copied.rows, copied.plan)
    if code:
        raise SystemExit(code)


def _live(start: Start, channel: WorkerEnd, rows: SnapshotRows | None, ready: Ready, uncopied: Uncopied | None) -> int:
    """Serve until the end, and leave nothing behind; returns the exit code. No ``rows``: they could not be built."""
    clean = abandoned = False
    try:
        channel.send(Reply.READY, 0, pickle.dumps(ready))
        if rows is not None:
            batch = start.plan.layout.view(start.arena.buffer)
            patience = SpinPolicy(start.placement.spin, batch.no_spin_until, start.placement.cpus)
            clean = serve(channel, rows, patience, batch, uncopied)
    except ChannelClosed:  # the caller closed or died; no process is left to report to
        clean = abandoned = True
        if rows is not None:
            rows.close()
    except _Copied:
        raise
    except BaseException:
        traceback.print_exc()
    flush_output()
    if abandoned:  # no other process ends the helpers that environments started
        end_own()
    if left_behind():  # an ordinary exit would wait for them
        os._exit(0 if clean else 1)
    return 0 if clean else 1


def _limit_threads(threads: int | None) -> None:
    """Keep W workers from starting W times T threads. Libraries loaded later read the variables; loaded ones are told."""
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
