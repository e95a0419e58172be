"""A pool that answers in batches of whoever finished first.

EnvPool itself waits for ever if fewer environments are under way than a batch has, and aborts if one is sent to twice; so
who is under way is known here exactly, and changes together with what is sent and received.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, TypeAlias

import numpy as np
from gymnasium.error import AlreadyPendingCallError

from vecenv.backends.envpool.driver import PoolDriver, too_few
from vecenv.backends.envpool.rows import Array, States
from vecenv.backends.envpool.wire import together
from vecenv.front.arguments import env_ids_of
from vecenv.front.driver import NOTHING, Call, Stepped, require_idle, require_no_step
from vecenv.front.phases import Phase

__all__ = ["Batches", "Latest"]

Latest: TypeAlias = tuple[Array, bytes]
"""Whose rows were taken last, int32, which is whom ``send`` means by default; and the bytes of the same as intp."""

_INTP = np.dtype(np.intp)


class Batches(PoolDriver):
    """Batches of whoever finished first, handed out in any number of rows.

    An environment is in flight until its row is taken. Those that are not are in ``idle``, except the rows taken last: they
    are in ``held`` until somebody asks, because nearly always the very same environments are sent to next, and then neither
    has to be touched.

    Attributes:
        taken: ``(latest, held, count, offset)``: whose rows were taken last; what is held of them, one entry or none; how
            many batches of this pool were taken, and how many rows of the next one. In ``wire`` are all but the first
            ``_gone`` batches.
    """

    def _adopt(self, pool: Any) -> None:
        super()._adopt(pool)
        self.idle = set(range(self._num_envs))
        self.taken: tuple[Latest, list[Any], int, int] = (self.all_ids, self.everyone.tobytes()), [], 0, 0
        self._gone = 0
        self._call = Phase.DEFAULT  # what all environments were told together, DEFAULT where it was some
        self._resets: set[int] = set()  # the environments whose latest call is a reset

    # -- what kinds of pools do differently --------------------------------------------------------------------

    @abstractmethod
    def _payload(self, ids: Array, actions: list[Array]) -> list[Array]:
        """What the pool's ``_send`` takes."""

    @abstractmethod
    def _filler(self, ids: Array) -> list[Array]:
        """The same with some action for environments that will not look at it."""

    @abstractmethod
    def _cut_out(self, states: States, first: int, last: int) -> States:
        """Copies of the rows of environments from ``first`` to before ``last``."""

    @abstractmethod
    def _ordered(self, batches: list[States]) -> tuple[Stepped, Any]:
        """The answer of all environments, in their order; and what is held once it was taken."""

    @abstractmethod
    def _answer(self, states: States) -> tuple[Stepped, Latest, Any]:
        """The answer that these rows are; whose they are; and what is held once it was taken, which is a tuple whose first
        entry is the first of ``latest``."""

    @property
    def latest(self) -> Array:
        """Whom ``send`` means by default, int32."""
        ids: Array = self.taken[0][0]
        return ids

    # -- what is in flight -------------------------------------------------------------------------------------

    @property
    def owed(self) -> Call:
        flying = self._flying()
        if self.pool is None or not flying:
            return NOTHING
        whole = flying == self._num_envs and self._call is not Phase.DEFAULT
        return Call(self._call, flying, by_row=not whole)

    def _flying(self) -> int:
        return self._num_envs - len(self.idle) - sum(len(held[0]) for held in self.taken[1])

    def _put_away(self) -> None:
        """Make the held environments idle ones like the others."""
        if held := self.taken[1]:
            together((self.idle.update, held[0][0].tolist()), (held.clear,))

    def _require_idle(self, ids: Array, name: str) -> None:
        self._put_away()
        if not self.idle.issuperset(ids.tolist()):
            if (owed := self.owed).kind is Phase.WAITING_STEP:
                require_idle(owed, name)
            flying = [i for i in ids.tolist() if i not in self.idle]
            raise AlreadyPendingCallError(
                f"Calling `{name}` for envs {flying}, which are still in flight: `recv` them first.", "send"
            )

    # -- sending -----------------------------------------------------------------------------------------------

    def step(self, actions: Any) -> None:
        self.require_pool("step_async")
        ids = self.all_ids
        self._require_idle(ids, "step_async")
        self._begin_step(Phase.WAITING_STEP, self._check(actions, ids), ids)

    def send(self, actions: Any, env_id: Any) -> None:
        if self.pool is None:
            self._refuse("send")
        (ids, key), held, *_ = self.taken
        if env_id is None or (
            # by far the commonest: the rows of the latest recv, whose indices are known to be right
            type(env_id) is np.ndarray
            and env_id.dtype is _INTP
            and env_id.shape == ids.shape
            and env_id.tobytes() == key
        ):
            if not held or held[0][0] is not ids:
                self._require_idle(ids, "send")
        else:
            ids = env_ids_of(env_id, self._num_envs).astype(np.int32)
            self._require_idle(ids, "send")
        self._begin_step(Phase.DEFAULT, self._check(actions, ids), ids)

    def _begin_step(self, call: Phase, actions: list[Array], ids: Array) -> None:
        if (held := self.taken[1]) and held[0][0] is ids:
            land: tuple[Any, ...] = (held.clear,)
        else:
            self._put_away()
            land = self.idle.difference_update, ids.tolist()
        calls = self._sending(ids, actions)
        if self._resets:
            calls.append((self._resets.difference_update, ids.tolist()))
        self._call = call
        together(*calls, land)

    def _sending(self, ids: Array, actions: list[Array]) -> list[tuple[Any, ...]]:
        """The calls of the pool that are a step of these environments."""
        return [(self._pool_send, self._payload(ids, actions))]

    def _begin_reset(self, ids: Array, *, force: bool, by_row: bool) -> None:
        if not by_row:
            self._drain()
        self._require_idle(ids, "reset_async")
        calls = self._resetting(ids, force)
        named = ids.tolist()
        self._call = Phase.DEFAULT if by_row else Phase.WAITING_RESET
        together(*calls, (self._resets.update, named), (self.idle.difference_update, named))

    def _resetting(self, ids: Array, force: bool) -> list[tuple[Any, ...]]:
        """The calls of the pool that are a reset of these environments."""
        return [(self._pool_reset, ids)]

    # -- receiving ---------------------------------------------------------------------------------------------

    def answer(self, kind: Phase, deadline: float | None) -> Stepped | None:
        self._trim()
        wire = self.wire
        while (have := len(wire)) < self._num_envs // self.batch_size:
            if not self.receiver.receive(wire, have + 1, deadline):
                return None
        stepped, held = self._ordered(wire[:])
        latest, counts = self.taken[0], (self._num_envs, 0)
        if kind is Phase.WAITING_RESET:
            latest, counts = (self.all_ids, self.everyone.tobytes()), (0, self._num_envs)
        self.after = (latest, [held], self._gone + have, 0), *counts
        return stepped

    def recv(self, count: int | None, deadline: float | None) -> Stepped | None:
        if self.pool is None:
            self._refuse("recv")
        _, held, taken, offset = self.taken
        if held:
            self._put_away()
        if self._call is Phase.WAITING_STEP:
            require_no_step(self.owed)
        wire, size = self.wire, self.batch_size
        if taken != self._gone:
            self._trim()
        if count is None:
            count = size
        while size * (have := len(wire)) - offset < count:  # (looked at once: a helper thread may add to it)
            self._require_enough(count, size * have - offset)
            if not self.receiver.receive(wire, have + 1, deadline):
                return None
        if offset or count != size:
            used, offset, states = self._parts(count, offset)
        else:
            used, states = 1, wire[0]
        stepped, latest, held = self._answer(states)
        resets = len(self._resets.intersection(latest[0].tolist())) if self._resets else 0
        self.after = (latest, [held], taken + used, offset), count - resets, resets
        return stepped

    def _trim(self) -> None:
        """Let go of the batches that were taken."""
        taken = self.taken[2]
        del self.wire[: taken - self._gone]; self._gone = taken  # noqa: E702 - together: no call and no jump on this line

    def _require_enough(self, count: int, ready: int) -> None:
        """Refuse to wait for what will never come: the pool answers in whole batches only."""
        flying, size = self._num_envs - len(self.idle), self.batch_size
        if flying < count:
            raise too_few(count, flying)
        if flying - ready < -(-(count - ready) // size) * size:
            raise too_few(count, flying, f" EnvPool answers in whole batches of {size}, and {ready} rows are ready.")

    def _parts(self, count: int, offset: int) -> tuple[int, int, States]:
        """The next ``count`` rows out of several batches: how many batches that uses up, the offset then, and the rows."""
        parts, missing = [], count
        used = 0
        while missing:
            some = min(missing, self.batch_size - offset)
            parts.append(self._cut_out(self.wire[used], offset, offset + some))
            missing, offset = missing - some, offset + some
            if offset == self.batch_size:
                used, offset = used + 1, 0
        return used, offset, parts[0] if len(parts) == 1 else [np.concatenate(each) for each in zip(*parts, strict=True)]

    def _drain(self) -> None:
        """Let everything in flight finish, and drop it.

        A pool answers in whole batches only, so some action for idle environments fills the last one up: there are enough
        of them, because the batch size divides the number of environments.
        """
        self._put_away()
        self._trim()
        size = self.batch_size
        latest, held, taken, offset = self.taken
        missing = -(self._flying() + offset) % size
        if missing:
            filler = sorted(self.idle)[:missing]
            payload = self._filler(np.array(filler, dtype=np.int32))
            together((self._pool_send, payload), (self.idle.difference_update, filler))
        batches = (self._flying() + offset) // size
        while (have := len(self.wire)) < batches:
            self.receiver.receive(self.wire, have + 1, None)
        drained = latest, held, taken, 0
        together((self.wire.clear,), (setattr, self, "taken", drained), (self.idle.update, range(self._num_envs)))
