"""Drivers of one vector environment's pools, which track the pending call and the ended episodes.

The batch of :class:`WholeBatchDriver` is all environments; that of :class:`FirstReadyDriver` is smaller, or has several
players per environment. ``wire`` keeps the results of a call so far, so an interrupted wait can continue. Pools cannot be
seeded again: a reset with seeds builds a new one. Ctrl-C and timeouts lose nothing. Python runs signal handlers between two
instructions, where the result of a C++ function could be lost before it is stored, and runs none during a wait in C++. So:

* changes that belong together are made by C code in one instruction (:func:`_together`, ``list.extend`` over a ``starmap``);
* a helper thread (:class:`Receiver`) does waits with a limit, and stores the result where the direct call would.
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
from vecenv.backends.envpool.task import Task, spread
from vecenv.front.arguments import ResetOptions, parse_env_ids
from vecenv.front.capabilities import Capabilities, unable
from vecenv.front.driver import NOTHING, Call, Driver, Phase, Stepped, require_idle, require_no_step

_INTP = np.dtype(np.intp)

_ONCE: tuple[tuple[()]] = ((),)
"""``list.extend(starmap(f, _ONCE))`` calls ``f()`` once and keeps the result, in one instruction."""


def _together(*calls: tuple[Any, ...]) -> None:
    """Call C functions one after the other, without a signal handler in between.

    Args:
        *calls: Function and arguments, each a tuple. The functions must be implemented in C.
    """
    list(starmap(call, calls))


class Receiver:
    """A receiver of one pool's replies, with or without a time limit.

    Without a limit, ``recv`` is called directly. With a limit, a helper thread calls it; its result is stored even if the
    wait has ended, and until then every later wait is for the same call.

    Args:
        recv: The pool's ``_recv``.
        waited: Seconds that were spent waiting before.
    """

    def __init__(self, recv: Callable[[], Any], waited: float) -> None:
        self._recv = recv
        self._receiving: list[None] = []  # has one entry while the helper is in recv()
        self._requests: SimpleQueue[list[Any] | None] = SimpleQueue()
        self._received: SimpleQueue[bool] = SimpleQueue()
        self._thread: Thread | None = None
        self._helper: Thread | None = None  # the latest thread, kept even after close() has left it behind
        self.waited = waited
        """Seconds spent waiting in :meth:`receive`."""

    def receive(self, wire: list[Any], length: int, deadline: float | None) -> bool:
        """Wait until ``wire`` has ``length`` entries, one more than before this reply.

        Args:
            wire: The list that replies are appended to; the same list until the awaited reply has arrived.
            length: The length to wait for.
            deadline: Of ``time.monotonic()``; ``None`` waits for ever.

        Returns:
            True if it has that length.
        """
        while True:
            receiving = bool(self._receiving)  # read before the wire: the helper writes to the wire first
            if len(wire) >= length:
                return True
            began = time.perf_counter()
            try:
                if not receiving and deadline is None:
                    wire.extend(starmap(self._recv, _ONCE))
                    return True
                if not receiving:
                    self._start()
                    _together((self._receiving.append, None), (self._requests.put, wire))
                # the token may belong to an earlier reply, so the loop checks the wire again
                self._received.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except Empty:
                return len(wire) >= length
            finally:
                self.waited += time.perf_counter() - began

    def close(self, timeout: float = 5.0) -> None:
        """End the helper thread. One that is stuck in a hanging environment is left behind; it ends with the process."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._requests.put(None)
            if thread not in _STOPPED:
                thread.join(timeout)

    @property
    def thread_inside(self) -> Thread | None:
        """The helper thread, while it is in ``recv``."""
        return self._helper if self._receiving else None

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = self._helper = Thread(target=self._help, name="vecenv-envpool-recv", daemon=True)
            _RECEIVERS.add(self)
            self._thread.start()

    def _help(self) -> None:
        while (wire := self._requests.get()) is not None:
            wire.extend(starmap(self._recv, _ONCE))
            self._receiving.clear()
            self._received.put(True)


# -- threads inside a pool while the interpreter ends -----------------------------------------------------------------
#
# Before Python 3.14, a thread that returns from C++ during the interpreter's shutdown is ended at once, and C++ then calls
# `abort`: a program with a timeout in its last step would end by SIGABRT, after all its work. (From 3.14 on such a thread
# hangs instead, which is harmless.) So before Python ends, such threads get _PATIENCE seconds to return; then a signal stops
# them inside C++ until the process ends.


def _before_python_ends() -> None:
    deadline = time.monotonic() + _PATIENCE
    while (stuck := _inside()) and time.monotonic() < deadline:
        time.sleep(0.005)
    if stuck and sys.platform != "win32" and sys.version_info < (3, 14):
        _stop(stuck)


def _inside() -> list[Thread]:
    threads = [receiver.thread_inside for receiver in list(_RECEIVERS)]
    return [thread for thread in threads if thread is not None and thread.is_alive()]  # none is alive in a forked child


def _stop(threads: list[Thread]) -> None:
    """Stop threads by a signal with C's ``pause`` as handler: Python's own handlers run in the main thread only."""
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


_PATIENCE: Final = 1.0  # seconds
_STOPPED: list[Thread] = []
_RECEIVERS: weakref.WeakSet[Receiver] = weakref.WeakSet()
atexit.register(_before_python_ends)


# -- drivers ------------------------------------------------------------------------------------------------------------


class Seeding(NamedTuple):
    """The seeds of a pool, one per environment; the source of random seeds; the number of pools so far."""

    seeds: list[int]
    random: np.random.Generator
    pools: int = 0


class _Request(NamedTuple):
    """A request to the pool, sent by ``call(argument)``, about these rows of the driver's call."""

    call: Callable[[Any], None]
    argument: Any
    rows: Array | None  # None: all of them


class PoolDriver(Driver):
    """The base of the drivers of EnvPool's pools.

    Attributes:
        pool: ``None`` before the first reset, after :meth:`xla` and after :meth:`close`.
        compiled_pool: A pool that compiled code steps, or ``None``.
        seeding: Of the latest pool; of the first one before there is one.
        wire: The pool's replies.
        all_ids: The indices of all environments, int32. A call of all is recognized by identity.
        ended: The environments with an ended episode and no reset since.
    """

    why_not: ClassVar[Mapping[str, str]] = {
        **Driver.why_not, "attributes": "EnvPool's environments are C++ objects without Python attributes"
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
        self._adopt(None)

    @abstractmethod
    def _begin_reset(self, ids: Array, *, force: bool, by_row: bool) -> None:
        """Reset these environments; with ``force`` even those that would continue the same game."""

    def _adopt(self, pool: Any) -> None:
        """Reset the driver's state for a new pool; ``None``: to the state before the first one."""
        calls: tuple[Any, Any, Any] = (_no_pool,) * 3 if pool is None else (pool._recv, pool._send, pool._reset)
        recv, self._pool_send, self._pool_reset = calls
        self.receiver = Receiver(recv, self.receiver.waited)
        self.wire: list[Any] = []
        self.ended = np.zeros(self.num_envs, dtype=np.bool_)

    @property
    def waited(self) -> float:
        return self.receiver.waited

    def _figures(self) -> dict[str, float]:
        threads = int(self.task.config["num_threads"]) or min(self.batch_size, os.cpu_count() or 1)
        return {**super()._figures(), "pools": float(self.seeding.pools), "num_threads": float(threads)}

    def reset(self, seeds: list[Any], ids: Array | None, options: ResetOptions, *, by_row: bool) -> None:
        given = bool([seed for seed in seeds if seed is not None])
        # without a seed, the first pool gets the constructor's seeds, and a pool after xla() gets random ones
        fresh = given or self.compiled_pool is not None
        seeds = spread(seeds, len(seeds), self.seeding.random) if fresh else self.seeding.seeds
        if ids is not None:
            if given:
                why = "EnvPool seeds its environments when it builds them, all at once"
                unable(self.name, "seed some environments only", why)
            if not by_row and not self.capabilities.reset_mask:
                why = "EnvPool answers in whole batches; use reset_async(env_id=...) and recv()"
                unable(self.name, "take options['reset_mask'] in this pool", why)
            if self.pool is None:
                raise ResetNeeded("the first reset must be of all environments")
            self._begin_reset(ids.astype(np.int32), force=False, by_row=by_row)
        elif given or self.pool is None:
            self._renew(seeds)
        else:
            self._begin_reset(self.all_ids, force=True, by_row=False)

    def _renew(self, seeds: list[int]) -> None:
        """Replace the pool by a new one, and begin a reset of all environments.

        :attr:`pool` is set after the reset has begun, so that a pool interrupted before that is never stepped.
        """
        self.close()
        pool = self.task.build(seeds)
        self.seeding = Seeding(seeds, self.seeding.random, self.seeding.pools + 1)
        self._adopt(pool)
        self._begin_reset(self.all_ids, force=True, by_row=False)
        self.pool = pool

    def _reset_requests(self, ids: Array, force: bool) -> list[_Request]:
        """Return the requests that reset these environments.

        Atari with ``episodic_life`` and ViZDoom continue the same game after a reset by an action, but start a new one after
        a reset command. So finished episodes are reset by an action, and only running ones by a command.
        """
        natural = np.zeros(len(ids), dtype=np.bool_) if force else self.ended[ids]
        soft, hard = np.flatnonzero(natural), np.flatnonzero(~natural)
        requests = []
        if soft.size:
            requests.append(_Request(self._pool_send, self._rows.filler(ids[soft]), soft))
        if hard.size:
            requests.append(_Request(self._pool_reset, ids[hard], hard))
        return requests

    def _require_running(self, ids: Array) -> None:
        if (ended := self.ended[ids]).any():
            raise ResetNeeded(
                f"envs {ids[ended].tolist()} have ended their episodes, and autoreset is disabled: reset them with "
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
        """Release the pool: its environments and threads are gone when this returns."""
        self.pool = self.compiled_pool = None
        self.receiver.close()
        self._adopt(None)

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


def _too_few(count: int, flying: int, why: str = "") -> NoAsyncCallError:
    """Return the error for a wait for rows that are not in flight."""
    return NoAsyncCallError(
        f"Calling `recv` for {count} environments with {flying} environments in flight: `send` or `reset_async` more.{why}",
        "recv",
    )


# -- all environments at once -----------------------------------------------------------------------------------------


class WholeBatchDriver(PoolDriver):
    """A driver that steps all environments at once, one call at a time.

    A call may take several round trips: a step, then the resets of rows that it ended; or natural resets, then forced ones.
    A plan lists these requests, and the length of ``wire`` alone is the progress through it.

    Attributes:
        wire: The progress of the latest call, alternately ``None`` for a request that was sent, and the states of its reply.
            An odd length means that the pool's reply is pending, and length two that there was one round trip.
        taken: ``(wire, latest)``: that of the latest call with returned results, and the environments of the latest rows.
    """

    capabilities = Capabilities(
        "envpool", attributes=False, first_ready=False, masked_seeds=False, reset_options=False,
        row_options=False, in_this_process=True,
    )
    def _adopt(self, pool: Any) -> None:
        super()._adopt(pool)
        self.taken = self.wire, self.all_ids
        self._kind, self._by_row = Phase.DEFAULT, False
        self._ids = self.all_ids
        self._plan: list[_Request] = []
        self._final: tuple[Array, Array, Infos] | None = None  # flags and last rows of a step, before resets overwrite them
        self._last: list[Array] = []

    @property
    def outstanding(self) -> Call:
        if self.pool is None or not self.wire or self.taken[0] is self.wire or self.state.changing:
            return NOTHING
        return Call(self._kind, len(self._ids), self._by_row)

    # -- sending ------------------------------------------------------------------------------------------------------

    def step(self, actions: Any) -> None:
        self._require_free("step_async")
        self._begin_step(actions, self.all_ids, by_row=False)

    def send(self, actions: Any, env_id: Any) -> None:
        self._require_free("send")
        ids = self.taken[1] if env_id is None else parse_env_ids(env_id, self.num_envs).astype(np.int32)
        self._begin_step(actions, ids, by_row=True)

    def reset(self, seeds: list[Any], ids: Array | None, options: ResetOptions, *, by_row: bool) -> None:
        if self.pool is not None and not self.state.changing:
            self._require_free("reset_async")
        super().reset(seeds, ids, options, by_row=by_row)

    def _require_free(self, method: str) -> None:
        """Raise if a call is pending: there can be only one at a time."""
        if self.pool is None:
            self.require_pool(method)
        if self.wire and self.taken[0] is not self.wire:
            if not self._by_row:
                require_idle(self.outstanding, method)
            raise AlreadyPendingCallError(
                f"Calling `{method}` while {len(self._ids)} environments are in flight, and a second call would overwrite "
                "their rows: `recv` first, or pass a batch_size smaller than num_envs for first-ready batches.",
                "send",
            )

    def _begin_step(self, actions: Any, ids: Array, *, by_row: bool) -> None:
        checked = self._check(actions, ids)
        if self._checks_ends:
            self._require_running(ids)
        self._begin(Phase.WAITING_STEP, by_row, [_Request(self._pool_send, [ids, ids, *checked], None)], ids)

    def _begin_reset(self, ids: Array, *, force: bool, by_row: bool) -> None:
        self._begin(Phase.WAITING_RESET, by_row, self._reset_requests(ids, force), ids)

    def _begin(self, kind: Phase, by_row: bool, plan: list[_Request], ids: Array) -> None:
        self._kind, self._by_row, self._plan, self._ids, self._final = kind, by_row, plan, ids, None
        self.wire = []  # an empty wire means that nothing is pending
        first = plan[0]
        self.wire.extend(starmap(first[0], (first[1:2],)))

    # -- receiving ----------------------------------------------------------------------------------------------------

    def answer(self, kind: Phase, deadline: float | None) -> Stepped | None:
        reader, ids = self._rows, self._ids
        if ids is self.all_ids:
            return self._finish(deadline, ids, reader.infos)
        some = self._finish(deadline, self.taken[1], partial(reader.scattered_infos, num_rows=self.num_envs))
        return some and (reader.build([leaf.copy() for leaf in self._last]), *some[1:])

    def recv(self, count: int | None, deadline: float | None) -> Stepped | None:
        if self.pool is None:
            self.require_pool("recv")
        flying = len(self._ids) if self.wire and self.taken[0] is not self.wire else 0
        if not flying or (count is not None and count > flying):
            raise _too_few(1 if count is None else count, flying)
        if not self._by_row:
            require_no_step(self.outstanding)
        if count is not None and count < flying:
            why = "with batch_size=num_envs EnvPool answers a call as a whole"
            unable(self.name, f"`recv` {count} of {flying} environments", why)
        return self._finish(deadline, self._ids, self._rows.infos)

    def _finish(
        self, deadline: float | None, latest: Array, infos_of: Callable[[States, Array], Infos]
    ) -> Stepped | None:
        if not self._gather(deadline):
            return None
        states, leaves, terminated, truncated, final = self._read()
        infos, rows, reader = infos_of(states, self._ids.astype(np.intp)), len(self._ids), self._rows
        if final:
            infos |= final
        result = reader.build(leaves), reader.rewards(states), terminated, truncated, infos
        steps = rows if self._kind is Phase.WAITING_STEP else 0
        self.finish((self.wire, latest), steps, rows - steps)
        return result

    def _gather(self, deadline: float | None) -> bool:
        """Carry out the plan; True if that finished before the deadline."""
        wire, plan = self.wire, self._plan
        while True:
            have = len(wire)
            if have & 1 and not self.receiver.receive(wire, have + 1, deadline):
                return False
            trips = len(wire) // 2
            if trips == len(plan) and not (self._same_step and trips == 1 and self._add_resets()):
                return True
            request = plan[trips]
            wire.extend(starmap(request[0], (request[1:2],)))

    def _add_resets(self) -> bool:
        """Append the resets of ended rows to the plan in same-step mode; return True if there are any."""
        if self._kind is Phase.WAITING_RESET:
            return False
        states = self.wire[1]
        terminated, truncated, ended = self._rows.flags(states)
        rows = np.flatnonzero(ended)
        if not rows.size:
            return False
        self._final = terminated, truncated, self._final_infos(states, rows)
        self._plan.append(_Request(self._pool_send, self._rows.filler(self._ids[rows]), rows))
        return True

    def _read(self) -> tuple[States, list[Array], Array, Array, Infos]:
        """Return the received arrays: the pool's, the observation's, both flags, and final infos."""
        reader, states = self._rows, self.wire[1]
        final: Infos = {}
        if self._final is not None:  # a step, and the resets of the rows that it ended
            terminated, truncated, final = self._final
            ended = np.zeros(len(self._ids), dtype=np.bool_)
            for i in reader.visible:
                states[i][self._plan[1].rows] = self.wire[3][i]
        else:
            if len(self._plan) > 1:
                states = self._joined()
            terminated, truncated, ended = reader.flags(states)
        leaves = reader.leaves(states)
        self._remember(ended, leaves)
        return states, leaves, terminated, truncated, final

    def _joined(self) -> States:
        """Merge the results of several round trips over disjoint rows."""
        joined = []
        for parts in zip(*self.wire[1::2], strict=True):
            whole = np.empty((len(self._ids), *parts[0].shape[1:]), dtype=parts[0].dtype)
            for request, part in zip(self._plan, parts, strict=True):
                whole[request.rows] = part
            joined.append(whole)
        return joined

    def _final_infos(self, states: States, rows: Array) -> Infos:
        """Return Gymnasium's final infos of ``rows``, which ended in a step that also begins their next episodes."""
        n, reader = len(self._ids), self._rows
        leaves = reader.leaves(states)
        final_obs = np.full(n, None, dtype=object)
        for row in rows.tolist():
            final_obs[row] = reader.row(leaves, row)
        mask = np.zeros(n, dtype=np.bool_)
        mask[rows] = True
        final_info = reader.scattered_infos([array[rows] for array in states], rows, n)
        return {"final_info": final_info, "_final_info": mask, "final_obs": final_obs, "_final_obs": mask.copy()}

    def _remember(self, ended: Array, leaves: list[Array]) -> None:
        """Store the ended episodes, and the latest observations of all environments."""
        ids = self._ids
        if ids is self.all_ids:
            self.ended, self._last = ended, leaves
            return
        self.ended, self._last = self.ended.copy(), [leaf.copy() for leaf in self._last]
        self.ended[ids] = ended
        for whole, leaf in zip(self._last, leaves, strict=True):
            whole[ids] = leaf


# -- batches of the environments that finish first --------------------------------------------------------------------


class FirstReadyDriver(PoolDriver):
    """A driver that returns the environments that finish first, in any number of rows.

    EnvPool waits for ever if fewer environments are in flight than a batch has, and aborts if one gets two requests. So the
    environments in flight are tracked exactly, together with each send and receive.

    An environment is in flight until its row is returned, and then in ``idle``. The rows returned last are ``held`` instead
    until they are needed: the next send nearly always has the same environments, and then neither set changes.

    Attributes:
        taken: ``(latest, held, count, offset)``: the environments of the latest rows; the held ones, one entry or none; the
            number of batches of this pool that were returned, and of rows of the next one. ``wire`` has all but the first
            ``_gone`` batches.
    """

    capabilities = Capabilities(
        "envpool", attributes=False, reset_mask=False, masked_seeds=False, reset_options=False,
        row_options=False, in_this_process=True,
    )

    def _adopt(self, pool: Any) -> None:
        super()._adopt(pool)
        self.idle = set(range(self.num_envs))
        self._all: Latest = self.all_ids, self.all_ids.astype(np.intp).tobytes()
        self.taken: tuple[Latest, list[Any], int, int] = self._all, [], 0, 0
        self._gone = 0
        self._call = Phase.DEFAULT  # the phase of a call on all environments, DEFAULT if it was on some
        self._resets: set[int] = set()  # the environments with a reset as latest call
        self._rows.begin()

    # -- what is in flight --------------------------------------------------------------------------------------------

    @property
    def latest(self) -> Array:
        """The default environments of ``send``, int32."""
        ids: Array = self.taken[0][0]
        return ids

    @property
    def outstanding(self) -> Call:
        flying = self._flying()
        if self.pool is None or not flying:
            return NOTHING
        whole = flying == self.num_envs and self._call is not Phase.DEFAULT
        return Call(self._call, flying, by_row=not whole)

    def _flying(self) -> int:
        return self.num_envs - len(self.idle) - sum(len(held[0]) for held in self.taken[1])

    def _put_away(self) -> None:
        """Mark the held environments as idle."""
        if held := self.taken[1]:
            self._rows.keep(held[0])
            _together((self.idle.update, held[0][0].tolist()), (held.clear,))

    def _require_idle(self, ids: Array, name: str) -> None:
        self._put_away()
        if not self.idle.issuperset(ids.tolist()):
            if (outstanding := self.outstanding).kind is Phase.WAITING_STEP:
                require_idle(outstanding, name)
            flying = [i for i in ids.tolist() if i not in self.idle]
            raise AlreadyPendingCallError(
                f"Calling `{name}` for envs {flying}, which are still in flight: `recv` them first.", "send"
            )

    # -- sending ------------------------------------------------------------------------------------------------------

    def step(self, actions: Any) -> None:
        self.require_pool("step_async")
        ids = self.all_ids
        self._require_idle(ids, "step_async")
        self._begin_step(Phase.WAITING_STEP, self._check(actions, ids), ids)

    def send(self, actions: Any, env_id: Any) -> None:
        if self.pool is None:
            self.require_pool("send")
        (ids, key), held, *_ = self.taken
        if env_id is None or (
            # the fast path: the rows of the latest recv, in the same order, need no checks
            type(env_id) is np.ndarray
            and env_id.dtype is _INTP
            and env_id.shape == ids.shape
            and env_id.tobytes() == key
        ):
            if not held or held[0][0] is not ids:
                self._require_idle(ids, "send")
        else:
            ids = parse_env_ids(env_id, self.num_envs).astype(np.int32)
            self._require_idle(ids, "send")
        self._begin_step(Phase.DEFAULT, self._check(actions, ids), ids)

    def _begin_step(self, call: Phase, actions: list[Array], ids: Array) -> None:
        if self._checks_ends:
            self._require_running(ids)
        if (held := self.taken[1]) and held[0][0] is ids:
            self._rows.keep(held[0])
            depart: tuple[Any, ...] = (held.clear,)
        else:
            self._put_away()
            depart = self.idle.difference_update, ids.tolist()
        payload = self._rows.payload(ids, actions)
        calls = [(self._pool_send, payload)]  # read here: after a close() meanwhile it raises, and nothing is stepped
        if self._resets:
            calls.append((self._resets.difference_update, ids.tolist()))
        self._call = call
        _together(*calls, depart)

    def _begin_reset(self, ids: Array, *, force: bool, by_row: bool) -> None:
        if not by_row:
            self._drain()
        self._require_idle(ids, "reset_async")
        calls, named = [request[:2] for request in self._reset_requests(ids, force)], ids.tolist()
        self._call = Phase.DEFAULT if by_row else Phase.WAITING_RESET
        _together(*calls, (self._resets.update, named), (self.idle.difference_update, named))

    # -- receiving ----------------------------------------------------------------------------------------------------

    def answer(self, kind: Phase, deadline: float | None) -> Stepped | None:
        self._trim()
        wire = self.wire
        while (have := len(wire)) < self.num_envs // self.batch_size:
            if not self.receiver.receive(wire, have + 1, deadline):
                return None
        stepped, held = self._rows.ordered(wire[:], self.all_ids, self.ended)
        latest, counts = self.taken[0], (self.num_envs, 0)
        if kind is Phase.WAITING_RESET:
            latest, counts = self._all, (0, self.num_envs)
        self.finish((latest, [held], self._gone + have, 0), *counts)
        return stepped

    def recv(self, count: int | None, deadline: float | None) -> Stepped | None:
        if self.pool is None:
            self.require_pool("recv")
        _, held, taken, offset = self.taken
        if held:
            self._put_away()
        if self._call is Phase.WAITING_STEP:
            require_no_step(self.outstanding)
        wire, size = self.wire, self.batch_size
        if taken != self._gone:
            self._trim()
        if count is None:
            count = size
        while size * (have := len(wire)) - offset < count:  # read once, because a helper thread may add to it
            self._require_enough(count, size * have - offset)
            if not self.receiver.receive(wire, have + 1, deadline):
                return None
        if offset or count != size:
            used, offset, states = self._parts(count, offset)
        else:
            used, states = 1, wire[0]
        stepped, latest, held = self._rows.answer(states, self.ended)
        resets = len(self._resets.intersection(latest[0].tolist())) if self._resets else 0
        self.finish((latest, [held], taken + used, offset), count - resets, resets)
        return stepped

    def _trim(self) -> None:
        """Remove the batches that have been returned."""
        taken = self.taken[2]
        del self.wire[: taken - self._gone]; self._gone = taken  # noqa: E702 - together: no call and no jump on this line

    def _require_enough(self, count: int, ready: int) -> None:
        """Raise instead of waiting for ever: the pool returns whole batches only."""
        flying, size = self.num_envs - len(self.idle), self.batch_size
        if flying < count:
            raise _too_few(count, flying)
        if flying - ready < -(-(count - ready) // size) * size:
            raise _too_few(count, flying, f" EnvPool answers in whole batches of {size}, and {ready} rows are ready.")

    def _parts(self, count: int, offset: int) -> tuple[int, int, States]:
        """Collect the next ``count`` rows from several batches; return used batches, new offset, and rows."""
        parts, missing, used = [], count, 0
        while missing:
            some = min(missing, self.batch_size - offset)
            parts.append(self._rows.cut_out(self.wire[used], offset, offset + some))
            missing, offset = missing - some, offset + some
            if offset == self.batch_size:
                used, offset = used + 1, 0
        return used, offset, parts[0] if len(parts) == 1 else [np.concatenate(each) for each in zip(*parts, strict=True)]

    def _drain(self) -> None:
        """Wait for everything in flight and discard it.

        A pool returns whole batches only, so actions for idle environments fill the last one: there are enough of them,
        because the batch size divides the number of environments.
        """
        self._put_away()
        self._trim()
        size = self.batch_size
        latest, held, taken, offset = self.taken
        missing = -(self._flying() + offset) % size
        if missing:
            filler = sorted(self.idle)[:missing]
            payload = self._rows.filler(np.array(filler, dtype=np.int32))
            _together((self._pool_send, payload), (self.idle.difference_update, filler))
        batches = (self._flying() + offset) // size
        while (have := len(self.wire)) < batches:
            self.receiver.receive(self.wire, have + 1, None)
        drained = latest, held, taken, 0
        _together((self.wire.clear,), (setattr, self, "taken", drained), (self.idle.update, range(self.num_envs)))
