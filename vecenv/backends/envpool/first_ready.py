"""A pool with batches smaller than all its environments: whoever finished first.

EnvPool itself waits for ever if fewer environments are under way than a batch has, and aborts if one is sent to twice; so
who is under way is known here exactly, and changes together with what is sent and received.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError

from vecenv.backends.envpool.driver import PHASES, Driver, Kit, Rows, too_late
from vecenv.backends.envpool.options import env_ids
from vecenv.backends.envpool.rows import Array, States
from vecenv.backends.envpool.wire import together
from vecenv.errors import StepTimeout
from vecenv.front.phases import Phase

__all__ = ["FirstReady"]

_INT32 = np.dtype(np.int32)


class FirstReady(Driver):
    """Batches of whoever finished first.

    ``wire`` holds batches that were received and not yet taken; an environment is in flight until its row is taken. Those
    that are not are in ``idle``, except the latest batch: it is in ``_held`` until somebody asks, because nearly always the
    very same environments are sent to next, and then neither set has to be touched.
    """

    def __init__(self, pool: Any, kit: Kit) -> None:
        super().__init__(pool, kit)
        self.idle = set(range(kit.num_envs))
        self._held: list[Array] = []
        self._latest_bytes = self.latest.tobytes()
        self._settled: list[States] = []  # what was in the wire
        self._before_taken = ("", self.latest, b"")

    @property
    def phase(self) -> Phase:
        return PHASES[self.call] if self.call in ("step", "reset") and not self.idle else Phase.DEFAULT

    def flying(self) -> int:
        self._put_away()
        return self._num_envs - len(self.idle)

    @property
    def owed(self) -> int:
        """How many rows the pool still has to give."""
        return self.flying() - self._batch_size * len(self.wire)

    def choose(self, env_id: Any) -> Array:
        latest = self.latest
        if env_id is None or (
            # by far the commonest: the rows of the latest recv, whose indices are known to be right
            type(env_id) is np.ndarray
            and env_id.dtype is _INT32
            and env_id.shape == latest.shape
            and env_id.tobytes() == self._latest_bytes
        ):
            if self._held:
                return latest
            ids = latest
        else:
            ids = env_ids(env_id, self._num_envs)
        self._require_idle(ids, "send")
        return ids

    def begin_step(self, call: str, actions: list[Array], ids: Array) -> None:
        if self._wary:
            self._refuse_if_over(ids)
        if ids is self.all_ids:
            self._require_idle(ids, "step_async")
        land: tuple[Any, ...]
        if self._held and ids is self.latest:
            land = (self._held.clear,)
        else:
            self._put_away()
            land = (self.idle.difference_update, ids.tolist())
        self.call = call
        if self._wary and (cut := self.cut[ids]).any():
            together(*self._step_and_resets(actions, ids, cut), land)
        else:
            together((self._pool_send, [ids, ids, *actions]), land)

    def _step_and_resets(self, actions: list[Array], ids: Array, cut: Array) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = [(self.pool._reset, ids[cut])]
        if not cut.all():
            kept = ids[~cut]
            calls.append((self._pool_send, [kept, kept, *(array[~cut] for array in actions)]))
        return calls

    def begin_reset(self, ids: Array, *, force: bool) -> None:
        if ids is self.all_ids:
            self._drain()
        self._require_idle(ids, "reset_async")
        natural = np.zeros(len(ids), dtype=np.bool_) if force else self.naturally(ids)
        calls: list[tuple[Any, ...]] = []
        if natural.any():
            soft = ids[natural]
            calls.append((self._pool_send, [soft, soft, *self.kit.checker.dummy(len(soft))]))
        if not natural.all():
            calls.append((self.pool._reset, ids[~natural]))
        self.begun = True
        if ids is self.all_ids:
            self.call, self.latest, self._latest_bytes = "reset", ids, ids.tobytes()
        else:
            self.call = "send"
        together(*calls, (self.idle.difference_update, ids.tolist()))

    def finish(self, deadline: float | None) -> Rows:
        batches = self._num_envs // self._batch_size
        while len(self.wire) < batches:
            if not self.receiver.receive(len(self.wire) + 1, deadline):
                raise StepTimeout(too_late(self.call))
        reader = self._reader
        states: States = [np.concatenate(parts) for parts in zip(*self.wire, strict=True)]
        order = np.argsort(reader.env_ids(states))
        return self._rows([array[order] for array in states], self.all_ids)

    def settle(self) -> None:
        self._settled = self.wire[:]
        together((self.wire.clear,), (self.idle.update, range(self._num_envs)))

    def recv(self, deadline: float | None) -> Rows:
        if self._held:
            self._put_away()
        if not self.wire:
            if self._num_envs - len(self.idle) < self._batch_size:
                raise NoAsyncCallError(
                    f"Calling `recv` with {self.owed} environments in flight, while a batch has {self._batch_size}: "
                    "`send` or `reset_async` more.",
                    "recv",
                )
            if not self.receiver.receive(1, deadline):
                raise StepTimeout(too_late("recv"))
        return self._rows(self.wire[0], self._reader.env_ids(self.wire[0]))

    def taken(self) -> None:
        batch = self.wire[0]
        self._settled, self._before_taken = [batch], (self.call, self.latest, self._latest_bytes)
        latest = self._reader.env_ids(batch).copy()
        together((self.wire.pop, 0), (self._held.append, latest))
        self.call, self.latest, self._latest_bytes = "send", latest, latest.tobytes()

    def give_back(self) -> None:
        if self._held:  # taken: nothing else is held by then
            self.call, self.latest, self._latest_bytes = self._before_taken
            together((self._held.clear,), (self.wire.insert, 0, self._settled[0]))
        elif not self.wire:  # settled
            together((self.wire.extend, self._settled), (self.idle.clear,))

    def _put_away(self) -> None:
        """Make the held environments idle ones like the others."""
        if self._held:
            together((self.idle.update, self._held[0].tolist()), (self._held.clear,))

    def _rows(self, states: States, ids: Array) -> Rows:
        reader = self._reader
        terminated, truncated, over = reader.flags(states)
        rows = ids.astype(np.intp)  # indexing with it is ten times as fast as with int32
        self.over[rows] = over
        if self._wary:
            self.cut[rows] = over > terminated
        return ids, states, reader.leaves(states), terminated, truncated, None

    def _drain(self) -> None:
        """Let everything in flight finish, and drop it.

        A pool answers in whole batches only, so some action for idle environments fills the last one up: there are enough
        of them, because the batch size divides the number of environments.
        """
        missing = -self.owed % self._batch_size
        if missing:
            filler = sorted(self.idle)[:missing]
            ids = np.array(filler, dtype=np.int32)
            payload = [ids, ids, *self.kit.checker.dummy(missing)]
            together((self._pool_send, payload), (self.idle.difference_update, filler))
        while self.owed:
            self.receiver.receive(len(self.wire) + 1, None)
        together((self.wire.clear,), (self.idle.update, range(self._num_envs)))

    def _require_idle(self, ids: Array, name: str) -> None:
        self._put_away()
        if not self.idle.issuperset(ids.tolist()):
            flying = [i for i in ids.tolist() if i not in self.idle]
            raise AlreadyPendingCallError(
                f"Calling `{name}` for envs {flying}, which are in flight: `recv` their rows first.", name
            )
