"""The drivers of EnvPool's pools, which track the pending call and the ended episodes.

:class:`WholeBatchDriver` returns all rows of a call at once; :class:`FirstReadyDriver` returns those that finish first, and
supports several players per environment. A pool cannot be seeded again, so a reset with seeds builds a new one.

An interrupted wait can continue, because ``replies`` keeps the replies that have arrived: Ctrl-C and timeouts lose nothing.
Python runs signal handlers between bytecode instructions, so one could raise after a C++ function has returned and before
its result is stored. During a wait in C++, Python runs none. Therefore:

* changes that belong together are made by C code in one instruction (:func:`_call_uninterrupted`, or ``list.extend`` over a
  ``starmap``);
* waits with a limit run in a helper thread (:class:`Receiver`), which stores the result where the direct call would.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from itertools import starmap
from operator import call
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode

from vecenv.backends.envpool.rows import Array, Infos, Latest, PoolRows, States
from vecenv.backends.envpool.task import Task, spread_seeds
from vecenv.errors import envs_text
from vecenv.front.arguments import ResetOptions, parse_env_ids
from vecenv.front.capabilities import Capabilities, raise_unsupported
from vecenv.front.driver import (
    NO_REQUEST,
    Driver,
    Phase,
    RequestSummary,
    Stepped,
    require_no_step,
    still_in_flight_error,
    too_few_in_flight_error,
)

_INTP = np.dtype(np.intp)

_NO_ARGS_ONCE: tuple[tuple[()]] = ((),)
"""``list.extend(starmap(f, _NO_ARGS_ONCE))`` calls ``f()`` once and keeps the result, in one instruction."""


def _call_uninterrupted(*calls: tuple[Any, ...]) -> None:
    """Call functions one after the other, without a signal handler in between.

    Each of ``calls`` is a tuple of a function, which must be implemented in C, and its arguments.
    """
    list(starmap(call, calls))


class Receiver:
    """A receiver of one pool's replies, with or without a time limit.

    Without a limit, ``recv`` is called directly. With a limit, a helper thread calls it. If the limit expires first, the
    helper still stores the result later, and the next :meth:`receive` waits for it.

    Args:
        recv: The pool's ``_recv``.
        waited: Seconds that an earlier receiver spent waiting.
    """

    def __init__(self, recv: Callable[[], Any], waited: float) -> None:
        self._recv = recv
        self._receiving: list[None] = []  # has one entry while the helper is in recv()
        self._requests: SimpleQueue[list[Any] | None] = SimpleQueue()
        self._received: SimpleQueue[bool] = SimpleQueue()
        self._thread: Thread | None = None
        self._helper: Thread | None = None  # the latest thread, kept even if close() has left it behind
        self.seconds_waited = waited
        """Seconds spent waiting in :meth:`receive`."""

    def receive(self, replies: list[Any], length: int, deadline: float | None) -> bool:
        """Wait until ``replies`` has ``length`` entries, one more than before this reply.

        Args:
            replies: The list to which replies are appended. Pass the same list until the awaited reply has arrived.
            length: The length to wait for.
            deadline: A time of ``time.monotonic()``; ``None``: no limit.

        Returns:
            True if the list reaches that length before the deadline.
        """
        while True:
            receiving = bool(self._receiving)  # read before `replies`, which the helper extends before it clears this
            if len(replies) >= length:
                return True
            started = time.perf_counter()
            try:
                if not receiving and deadline is None:
                    replies.extend(starmap(self._recv, _NO_ARGS_ONCE))
                    return True
                if not receiving:
                    self._start()
                    _call_uninterrupted((self._receiving.append, None), (self._requests.put, replies))
                # this entry may belong to an earlier reply, so the loop checks the length again
                self._received.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except Empty:
                return len(replies) >= length
            finally:
                self.seconds_waited += time.perf_counter() - started

    def close(self, timeout: float = 5.0) -> None:
        """End the helper thread. If it is stuck in a hanging environment, it is left behind and ends with the process."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._requests.put(None)
            if thread not in _STOPPED:
                thread.join(timeout)

    @property
    def receiving_thread(self) -> Thread | None:
        """The helper thread, while it is in ``recv``."""
        return self._helper if self._receiving else None

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = self._helper = Thread(target=self._receive_on_request, name="vecenv-envpool-recv", daemon=True)
            _RECEIVERS.add(self)
            self._thread.start()

    def _receive_on_request(self) -> None:
        """Serve requests until ``None`` arrives. The helper thread runs this."""
        while (replies := self._requests.get()) is not None:
            replies.extend(starmap(self._recv, _NO_ARGS_ONCE))
            self._receiving.clear()
            self._received.put(True)


# -- threads inside a pool at interpreter shutdown ---------------------------------------------------------------------
#
# Before Python 3.14, a thread that returns from C++ during the interpreter's shutdown is ended at once, and C++ then calls
# `abort`: a program with a timeout in its last step would finish its work, then die of SIGABRT. (From 3.14 on, such a thread
# hangs instead, which is harmless.) So such threads get _EXIT_GRACE_SECONDS to return before Python ends; then a signal
# stops them inside C++ until the process ends.


def _stop_receivers() -> None:
    deadline = time.monotonic() + _EXIT_GRACE_SECONDS
    while (stuck := _receiving_threads()) and time.monotonic() < deadline:
        time.sleep(0.005)
    if stuck and sys.platform != "win32" and sys.version_info < (3, 14):
        _stop_threads(stuck)


def _receiving_threads() -> list[Thread]:
    threads = [receiver.receiving_thread for receiver in list(_RECEIVERS)]
    return [thread for thread in threads if thread is not None and thread.is_alive()]  # in a forked child, none is alive


def _stop_threads(threads: list[Thread]) -> None:
    """Stop threads by a signal with C's ``pause`` as its handler: Python runs its own handlers only in the main thread."""
    number: int = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(number, ctypes.cast(libc.pause, ctypes.c_void_p))
    for thread in threads:
        if thread.ident is not None:
            _STOPPED.append(thread)
            signal.pthread_kill(thread.ident, number)
    time.sleep(0.01)  # wait until the signals have arrived


_EXIT_GRACE_SECONDS: Final = 1.0
_STOPPED: list[Thread] = []
_RECEIVERS: weakref.WeakSet[Receiver] = weakref.WeakSet()
atexit.register(_stop_receivers)


# -- drivers ------------------------------------------------------------------------------------------------------------


class Seeding(NamedTuple):
    """The seeds of a pool, one per environment; the source of random seeds; the number of pools so far.

    ``given`` is an existing pool for the first reset, unless that has seeds: the pool may have been stepped.
    """

    seeds: list[int]
    random: np.random.Generator
    pools: int = 0
    given: Any = None


class _Request(NamedTuple):
    """A request to the pool, sent by ``call(argument)``, for some rows of the driver's current call."""

    call: Callable[[Any], None]
    argument: Any
    rows: Array | None  # None: all of them


class PoolDriver(Driver):
    """The base of the drivers of EnvPool's pools.

    Attributes:
        pool: EnvPool's pool; ``None`` before the first reset, after :meth:`xla` and after :meth:`close`.
        compiled_pool: A pool that compiled code steps, or ``None``.
        seeding: The seeds of the latest pool, or of the first one before it is built.
        replies: The replies of the pool to the pending requests.
        all_ids: The indices of all environments, int32. A call on all of them passes this same array.
        ended: True for environments with an ended episode and no reset since, bool ``(num_envs,)``.
    """

    missing_reasons: ClassVar[Mapping[str, str]] = {
        **Driver.missing_reasons,
        "attributes": "EnvPool's environments are C++ objects without Python attributes",
    }
    capabilities: Capabilities

    def __init__(self, task: Task, batch_size: int, seeding: Seeding, mode: AutoresetMode, rows: PoolRows) -> None:
        super().__init__()
        self.pool: Any = None
        self.task = task
        self.batch_size = batch_size
        self.seeding = seeding
        self.compiled_pool: Any = None
        self._checks_ends = mode is AutoresetMode.DISABLED
        self._same_step = mode is AutoresetMode.SAME_STEP
        self.num_envs = int(task.config["num_envs"])
        self.all_ids = np.arange(self.num_envs, dtype=np.int32)
        self.receiver = Receiver(_no_pool, 0.0)
        self._rows = rows
        self._check = rows.check
        self._reset_state(None)

    @abstractmethod
    def _begin_reset(self, ids: Array, *, force: bool, for_recv: bool) -> None:
        """Begin to reset these environments; ``force`` begins a new game even in those that would continue the same one."""

    def _reset_state(self, pool: Any) -> None:
        """Reset the state of the driver for a new pool, or for none."""
        calls: tuple[Any, Any, Any] = (_no_pool,) * 3 if pool is None else (pool._recv, pool._send, pool._reset)
        recv, self._pool_send, self._pool_reset = calls
        self.receiver = Receiver(recv, self.receiver.seconds_waited)
        self.replies: list[Any] = []
        self.ended = np.zeros(self.num_envs, dtype=np.bool_)

    @property
    def seconds_waited(self) -> float:
        return self.receiver.seconds_waited

    def _compute_stats(self) -> dict[str, float]:
        threads = int(self.task.config["num_threads"]) or min(self.batch_size, os.cpu_count() or 1)
        return {**super()._compute_stats(), "pools": float(self.seeding.pools), "num_threads": float(threads)}

    def submit_reset(self, seeds: list[Any], ids: Array | None, options: ResetOptions, *, for_recv: bool) -> None:
        seeded = any(seed is not None for seed in seeds)
        # without a seed, the first pool gets the constructor's seeds, and a pool after xla() gets random ones
        needs_seeds = seeded or self.compiled_pool is not None
        seeds = spread_seeds(seeds, len(seeds), self.seeding.random) if needs_seeds else self.seeding.seeds
        if ids is not None:
            if seeded:
                reason = "EnvPool seeds its environments when it builds them, all at once"
                raise_unsupported(self.name, "seed some environments only", reason)
            if not for_recv and not self.capabilities.reset_mask:
                reason = (
                    "EnvPool returns whole batches only; use reset_async(env_id=...) and recv() with a batch_size that "
                    "divides the number of these environments"
                )
                raise_unsupported(self.name, "use options['reset_mask'] with this batch_size", reason)
            if self.pool is None:
                raise ResetNeeded("the first reset must be of all environments")
            self._begin_reset(ids.astype(np.int32), force=False, for_recv=for_recv)
        elif seeded or self.pool is None:
            self._replace_pool(seeds, None if needs_seeds else self.seeding.given)
        else:
            self._begin_reset(self.all_ids, force=True, for_recv=False)
        self._interrupted = False

    def _replace_pool(self, seeds: list[int], given: Any) -> None:
        """Replace the pool with the given one or, if it is ``None``, a new one, and begin to reset all environments.

        :attr:`pool` is set after the reset has begun, so that a pool with an interrupted first reset is never stepped.
        """
        self.close()
        pool = self.task.build(seeds) if given is None else given
        self.seeding = Seeding(seeds, self.seeding.random, self.seeding.pools + 1)
        self._reset_state(pool)
        self._begin_reset(self.all_ids, force=True, for_recv=False)
        self.pool = pool

    def _reset_requests(self, ids: Array, force: bool) -> list[_Request]:
        """Return requests that reset finished episodes by an action, and running ones by a command; ``force``: all by it.

        After an action, Atari with ``episodic_life`` and ViZDoom continue the same game; after a command, a new one begins.
        """
        by_action = np.zeros(len(ids), dtype=np.bool_) if force else self.ended[ids]
        finished, running = np.flatnonzero(by_action), np.flatnonzero(~by_action)
        requests = []
        if finished.size:
            requests.append(_Request(self._pool_send, self._rows.filler_payload(ids[finished]), finished))
        if running.size:
            requests.append(_Request(self._pool_reset, ids[running], running))
        return requests

    def _require_running(self, ids: Array) -> None:
        if (ended := self.ended[ids]).any():
            raise ResetNeeded(
                f"the episodes of {envs_text(ids[ended].tolist())} have ended, and autoreset is disabled: reset them with "
                "reset(options={'reset_mask': ...})"
            )

    def xla(self) -> tuple[Any, Any, Any, Any]:
        """Return EnvPool's functions for compiled code, which owns the pool from now on. A pool must exist."""
        pool = self.pool
        functions: tuple[Any, Any, Any, Any] = pool.xla()
        self.close()
        self.compiled_pool = pool
        return functions

    def close(self, *, terminate: bool = False) -> None:
        """Release the pool. Its environments and threads end with the last reference to it, which is usually this one."""
        self.pool = self.compiled_pool = None
        self.receiver.close()
        self._reset_state(None)

    def require_pool(self, method: str) -> None:
        """Raise if there is no pool to step."""
        if self.compiled_pool is not None:
            raise RuntimeError(
                f"since xla(), compiled code steps the pool, so `{method}` cannot be used: reset() builds a new one"
            )
        if self.pool is None:
            raise ResetNeeded(f"Cannot call `{method}` before calling `reset`")


def _no_pool(*_: Any) -> Any:
    raise RuntimeError("the pool is closed")


# -- all environments at once -----------------------------------------------------------------------------------------


class WholeBatchDriver(PoolDriver):
    """A driver that executes one call at a time, for all environments or some, and returns all its rows at once.

    A call may take several round trips: a step, then (same-step mode) the resets of episodes that it ended; or resets by an
    action, then by a command. The plan lists these requests. The length of ``replies`` is the only record of the progress.

    Attributes:
        replies: The progress of the latest call: ``None`` for each request that was sent, followed by the states in its
            reply. With an odd length, a reply is pending; half the length is the number of completed round trips.
        returned: ``(replies, latest)`` of the latest call that has returned its results: its replies, and the environments
            of the rows that it returned.
    """

    capabilities = Capabilities(
        "envpool", attributes=False, first_ready=False, masked_seeds=False, reset_options=False,
        row_options=False, in_this_process=True,
    )  # fmt: skip

    def _reset_state(self, pool: Any) -> None:
        super()._reset_state(pool)
        self.returned = self.replies, self.all_ids
        self._kind, self._for_recv = Phase.DEFAULT, False
        self._ids = self.all_ids
        self._plan: list[_Request] = []
        self._final: tuple[Array, Array, Infos] | None = None  # flags and final infos of a step, before its resets
        self._latest_leaves: list[Array] = []

    @property
    def pending_request(self) -> RequestSummary:
        if self.pool is None or not self.replies or self.returned[0] is self.replies or self.state.changing:
            return NO_REQUEST
        return RequestSummary(self._kind, len(self._ids), self._for_recv)

    # -- sending ------------------------------------------------------------------------------------------------------

    def submit_step(self, actions: Any) -> None:
        self._require_no_call("step_async")
        self._begin_step(actions, self.all_ids, for_recv=False)

    def send(self, actions: Any, env_id: Any) -> None:
        self._require_no_call("send")
        ids = self.returned[1] if env_id is None else parse_env_ids(env_id, self.num_envs).astype(np.int32)
        self._begin_step(actions, ids, for_recv=True)

    def submit_reset(self, seeds: list[Any], ids: Array | None, options: ResetOptions, *, for_recv: bool) -> None:
        if self.pool is not None and not self.state.changing and not (ids is None and self.is_interrupted):
            self._require_no_call("reset_async")
        super().submit_reset(seeds, ids, options, for_recv=for_recv)

    def _require_no_call(self, method: str) -> None:
        """Raise if a call is pending, because there can be only one at a time, or if there is no pool to step."""
        if self.pool is None:
            self.require_pool(method)
        if self.replies and self.returned[0] is not self.replies:
            if not self._for_recv:
                self.require_idle(method)
            raise AlreadyPendingCallError(
                f"Calling `{method}` while {len(self._ids)} environments are in flight would overwrite their rows: `recv` "
                "first, or pass a batch_size smaller than num_envs for first-ready batches.",
                "send",
            )

    def _begin_step(self, actions: Any, ids: Array, *, for_recv: bool) -> None:
        checked = self._check(actions, ids)
        if self._checks_ends:
            self._require_running(ids)
        self._begin(Phase.WAITING_STEP, for_recv, [_Request(self._pool_send, [ids, ids, *checked], None)], ids)

    def _begin_reset(self, ids: Array, *, force: bool, for_recv: bool) -> None:
        if (length := len(self.replies)) & 1:
            self.receiver.receive(self.replies, length + 1, None)  # the reply to an interrupted call, which this reset drops
        self._begin(Phase.WAITING_RESET, for_recv, self._reset_requests(ids, force), ids)

    def _begin(self, kind: Phase, for_recv: bool, plan: list[_Request], ids: Array) -> None:
        self.replies = []  # while it is empty, nothing is pending
        self._kind, self._for_recv, self._plan, self._ids, self._final = kind, for_recv, plan, ids, None
        first = plan[0]
        self.replies.extend(starmap(first.call, ((first.argument,),)))

    # -- receiving ----------------------------------------------------------------------------------------------------

    def wait_for_result(self, deadline: float | None) -> Stepped | None:
        reader, ids = self._rows, self._ids
        if ids is self.all_ids:
            return self._finish(deadline, ids, reader.infos)
        stepped = self._finish(deadline, self.all_ids, partial(reader.scattered_infos, num_rows=self.num_envs))
        return stepped and (reader.build([leaf.copy() for leaf in self._latest_leaves]), *stepped[1:])

    def recv(self, count: int | None, deadline: float | None) -> Stepped | None:
        if self.pool is None:
            self.require_pool("recv")
        in_flight = len(self._ids) if self.replies and self.returned[0] is not self.replies else 0
        if not in_flight or (count is not None and count > in_flight):
            raise too_few_in_flight_error(count or 1, in_flight, 0)
        if not self._for_recv:
            require_no_step(self.phase)
        if count is not None and count < in_flight:
            reason = "with batch_size=num_envs, EnvPool returns all rows of a call at once"
            raise_unsupported(self.name, f"`recv` {count} of {in_flight} environments", reason)
        return self._finish(deadline, self._ids, self._rows.infos)

    def _finish(self, deadline: float | None, latest: Array, read_infos: Callable[[States, Array], Infos]) -> Stepped | None:
        if not self._execute_plan(deadline):
            return None
        states, leaves, terminated, truncated, final = self._read()
        infos, num_rows, reader = read_infos(states, self._ids.astype(np.intp)), len(self._ids), self._rows
        if final:
            infos |= final
        result = reader.build(leaves), reader.rewards(states), terminated, truncated, infos
        steps = num_rows if self._kind is Phase.WAITING_STEP else 0
        self.finish((self.replies, latest), steps, num_rows - steps)
        return result

    def _execute_plan(self, deadline: float | None) -> bool:
        """Execute the plan; return True if it finished before the deadline."""
        replies, plan = self.replies, self._plan
        while True:
            length = len(replies)
            if length & 1 and not self.receiver.receive(replies, length + 1, deadline):
                return False
            round_trips = len(replies) // 2
            if round_trips == len(plan) and not (self._same_step and round_trips == 1 and self._add_resets()):
                return True
            request = plan[round_trips]
            replies.extend(starmap(request.call, ((request.argument,),)))

    def _add_resets(self) -> bool:
        """Append the resets of ended rows to the plan in same-step mode; return True if there are any."""
        if self._kind is Phase.WAITING_RESET:
            return False
        states = self.replies[1]
        terminated, truncated, ended = self._rows.flags(states)
        rows = np.flatnonzero(ended)
        if not rows.size:
            return False
        self._final = terminated, truncated, self._final_infos(states, rows)
        self._plan.append(_Request(self._pool_send, self._rows.filler_payload(self._ids[rows]), rows))
        return True

    def _read(self) -> tuple[States, list[Array], Array, Array, Infos]:
        """Store the latest results; return the pool's arrays, the observation's leaves, both flags, and the final infos."""
        reader, states = self._rows, self.replies[1]
        final: Infos = {}
        if self._final is not None:  # a step, and the resets of the rows that it ended
            terminated, truncated, final = self._final
            ended = np.zeros(len(self._ids), dtype=np.bool_)
            for i in reader.visible:
                states[i][self._plan[1].rows] = self.replies[3][i]
        else:
            if len(self._plan) > 1:
                states = self._merge_replies()
            terminated, truncated, ended = reader.flags(states)
        leaves = reader.leaves(states)
        self._store_latest(ended, leaves)
        return states, leaves, terminated, truncated, final

    def _merge_replies(self) -> States:
        """Merge the replies of several round trips, which have no rows in common."""
        merged = []
        for parts in zip(*self.replies[1::2], strict=True):
            column = np.empty((len(self._ids), *parts[0].shape[1:]), dtype=parts[0].dtype)
            for request, part in zip(self._plan, parts, strict=True):
                column[request.rows] = part
            merged.append(column)
        return merged

    def _final_infos(self, states: States, rows: Array) -> Infos:
        """Return Gymnasium's final infos of ``rows``, the rows with an episode that ended in this step."""
        num_rows, reader = len(self._ids), self._rows
        leaves = reader.leaves(states)
        final_obs = np.full(num_rows, None, dtype=object)
        for row in rows.tolist():
            final_obs[row] = reader.row(leaves, row)
        mask = np.zeros(num_rows, dtype=np.bool_)
        mask[rows] = True
        final_info = reader.scattered_infos([array[rows] for array in states], rows, num_rows)
        return {"final_info": final_info, "_final_info": mask, "final_obs": final_obs, "_final_obs": mask.copy()}

    def _store_latest(self, ended: Array, leaves: list[Array]) -> None:
        """Store the ended episodes, and the latest observations of all environments."""
        ids = self._ids
        if ids is self.all_ids:
            self.ended, self._latest_leaves = ended, leaves
            return
        self.ended, self._latest_leaves = self.ended.copy(), [leaf.copy() for leaf in self._latest_leaves]
        self.ended[ids] = ended
        for latest_leaf, leaf in zip(self._latest_leaves, leaves, strict=True):
            latest_leaf[ids] = leaf


# -- batches of the environments that finish first --------------------------------------------------------------------


class FirstReadyDriver(PoolDriver):
    """A driver that returns the environments that finish first, in batches of any size.

    EnvPool waits forever if fewer environments are in flight than a batch needs, and aborts if an environment receives a
    second request while it is in flight. So every send records, in the same instruction, which environments are in flight.

    An environment is in flight until its row is returned. Then it is *held* until the next call, which is nearly always a
    send to the same environments. If it is not, the held environments move to ``idle``.

    Attributes:
        returned: ``(latest, held, count, offset)``: the environments of the latest rows; a list with the held ones as its
            only entry, or an empty list; the number of batches of this pool that were returned completely; the number of
            rows of the next batch that were returned. ``replies`` has all batches except the first ``_num_dropped``.
    """

    capabilities = Capabilities(
        "envpool", attributes=False, reset_mask=False, masked_seeds=False, reset_options=False,
        row_options=False, in_this_process=True,
    )  # fmt: skip

    def _reset_state(self, pool: Any) -> None:
        super()._reset_state(pool)
        self.idle = set(range(self.num_envs))
        self._all: Latest = self.all_ids, self.all_ids.astype(np.intp).tobytes()
        self.returned: tuple[Latest, list[Any], int, int] = self._all, [], 0, 0
        self._num_dropped = 0
        self._kind = Phase.DEFAULT  # the phase of a call on all environments; DEFAULT after one on some
        self._resets: set[int] = set()  # environments that were reset by their latest call
        self._rows.begin()

    # -- environments in flight ---------------------------------------------------------------------------------------

    @property
    def latest(self) -> Array:
        """The environments of the latest result, int32: the default of ``send``."""
        ids: Array = self.returned[0][0]
        return ids

    @property
    def pending_request(self) -> RequestSummary:
        in_flight = self._count_in_flight()
        if self.pool is None or not in_flight:
            return NO_REQUEST
        on_all = in_flight == self.num_envs and self._kind is not Phase.DEFAULT
        return RequestSummary(self._kind, in_flight, for_recv=not on_all)

    def _count_in_flight(self) -> int:
        return self.num_envs - len(self.idle) - sum(len(held[0]) for held in self.returned[1])

    def _release_held(self) -> None:
        """Mark the held environments as idle."""
        if held := self.returned[1]:
            self._rows.store_held(held[0])
            _call_uninterrupted((self.idle.update, held[0][0].tolist()), (held.clear,))

    def _require_idle(self, ids: Array, name: str) -> None:
        self._release_held()
        if not self.idle.issuperset(ids.tolist()):
            if self.pending_request.phase is Phase.WAITING_STEP:
                self.require_idle(name)
            raise still_in_flight_error(name, [i for i in ids.tolist() if i not in self.idle])

    # -- sending ------------------------------------------------------------------------------------------------------

    def submit_step(self, actions: Any) -> None:
        self.require_pool("step_async")
        ids = self.all_ids
        self._require_idle(ids, "step_async")
        self._begin_step(Phase.WAITING_STEP, self._check(actions, ids), ids)

    def send(self, actions: Any, env_id: Any) -> None:
        if self.pool is None:
            self.require_pool("send")
        (ids, key), held, *_ = self.returned
        if env_id is None or (
            # fast path: the environments of the latest recv, in the same order, need no checks
            type(env_id) is np.ndarray and env_id.dtype is _INTP and env_id.shape == ids.shape and env_id.tobytes() == key
        ):
            if not held or held[0][0] is not ids:
                self._require_idle(ids, "send")
        else:
            ids = parse_env_ids(env_id, self.num_envs).astype(np.int32)
            self._require_idle(ids, "send")
        self._begin_step(Phase.DEFAULT, self._check(actions, ids), ids)

    def _begin_step(self, kind: Phase, actions: list[Array], ids: Array) -> None:
        if self._checks_ends:
            self._require_running(ids)
        if (held := self.returned[1]) and held[0][0] is ids:
            self._rows.store_held(held[0])
            mark_in_flight: tuple[Any, ...] = (held.clear,)
        else:
            self._release_held()
            mark_in_flight = self.idle.difference_update, ids.tolist()
        payload = self._rows.payload(ids, actions)
        calls = [(self._pool_send, payload)]  # `_pool_send` is read last: it raises if a signal handler has closed the pool
        if self._resets:
            calls.append((self._resets.difference_update, ids.tolist()))
        self._kind = kind
        _call_uninterrupted(*calls, mark_in_flight)

    def _begin_reset(self, ids: Array, *, force: bool, for_recv: bool) -> None:
        if not for_recv:
            self._drain()
        self._require_idle(ids, "reset_async")
        calls, envs = [(request.call, request.argument) for request in self._reset_requests(ids, force)], ids.tolist()
        self._kind = Phase.DEFAULT if for_recv else Phase.WAITING_RESET
        _call_uninterrupted(*calls, (self._resets.update, envs), (self.idle.difference_update, envs))

    # -- receiving ----------------------------------------------------------------------------------------------------

    def wait_for_result(self, deadline: float | None) -> Stepped | None:
        self._drop_returned()
        replies = self.replies
        while (received := len(replies)) < self.num_envs // self.batch_size:
            if not self.receiver.receive(replies, received + 1, deadline):
                return None
        stepped, held = self._rows.results_in_order(replies[:], self.all_ids, self.ended)
        counts = (0, self.num_envs) if self._kind is Phase.WAITING_RESET else (self.num_envs, 0)
        self.finish((self._all, [held], self._num_dropped + received, 0), *counts)
        return stepped

    def recv(self, count: int | None, deadline: float | None) -> Stepped | None:
        if self.pool is None:
            self.require_pool("recv")
        _, held, batches, offset = self.returned
        if held:
            self._release_held()
        if self._kind is Phase.WAITING_STEP:
            require_no_step(self.phase)
        replies, size = self.replies, self.batch_size
        if batches != self._num_dropped:
            self._drop_returned()
        if count is None:
            count = size
        while size * (received := len(replies)) - offset < count:  # read once, because a helper thread may add to it
            self._require_enough(count, size * received - offset)
            if not self.receiver.receive(replies, received + 1, deadline):
                return None
        if offset or count != size:
            used, offset, states = self._collect_rows(count, offset)
        else:
            used, states = 1, replies[0]
        stepped, latest, held = self._rows.results(states, self.ended)
        resets = len(self._resets.intersection(latest[0].tolist())) if self._resets else 0
        self.finish((latest, [held], batches + used, offset), count - resets, resets)
        return stepped

    def _drop_returned(self) -> None:
        """Remove the batches that have been returned."""
        batches = self.returned[2]
        del self.replies[: batches - self._num_dropped]; self._num_dropped = batches  # fmt: skip # noqa: E702 - no call between

    def _require_enough(self, count: int, ready: int) -> None:
        """Raise if a wait would never end, since the pool returns whole batches only."""
        in_flight, size = self.num_envs - len(self.idle) - ready, self.batch_size
        if in_flight + ready < count:
            raise too_few_in_flight_error(count, in_flight + ready, ready)
        if in_flight < -(-(count - ready) // size) * size:
            raise NoAsyncCallError(
                f"Calling `recv` for {count} environments, but {in_flight} are in flight and {ready} are ready, and EnvPool "
                f"returns whole batches of {size}: send() more first.",
                "recv",
            )

    def _collect_rows(self, count: int, offset: int) -> tuple[int, int, States]:
        """Return the number of batches used up, the new offset, and the next ``count`` rows, which may span batches."""
        parts, missing, used = [], count, 0
        while missing:
            num_copied = min(missing, self.batch_size - offset)
            parts.append(self._rows.copy_rows(self.replies[used], offset, offset + num_copied))
            missing, offset = missing - num_copied, offset + num_copied
            if offset == self.batch_size:
                used, offset = used + 1, 0
        return used, offset, parts[0] if len(parts) == 1 else [np.concatenate(each) for each in zip(*parts, strict=True)]

    def _drain(self) -> None:
        """Wait for everything in flight and discard it. Actions for idle environments fill the last batch.

        There are enough idle environments, because the batch size divides the number of environments, and the rest of a
        batch that was returned in part is discarded first.
        """
        self._release_held()
        self._drop_returned()
        size = self.batch_size
        latest, held, count, offset = self.returned
        if offset:
            rest = self._rows.copy_rows(self.replies[0], offset, size)
            count += 1
            self.returned = latest, [self._rows.results(rest, self.ended)[2]], count, 0
            self._release_held()
            self._drop_returned()
        missing = -self._count_in_flight() % size
        if missing:
            filler_ids = sorted(self.idle)[:missing]
            payload = self._rows.filler_payload(np.array(filler_ids, dtype=np.int32))
            _call_uninterrupted((self._pool_send, payload), (self.idle.difference_update, filler_ids))
        batches = self._count_in_flight() // size
        while (received := len(self.replies)) < batches:
            self.receiver.receive(self.replies, received + 1, None)
        drained = latest, held, count, 0
        all_envs = range(self.num_envs)
        _call_uninterrupted((self.replies.clear,), (setattr, self, "returned", drained), (self.idle.update, all_envs))
