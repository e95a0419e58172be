"""A pool that answers in batches of whoever finished first.

EnvPool itself waits for ever if fewer environments are under way than a batch has, and aborts if one is sent to twice; so
who is under way is known here exactly, and changes together with what is sent and received.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, TypeVar

import numpy as np
from gymnasium.error import AlreadyPendingCallError

from vecenv.backends.envpool.driver import PHASES, Driver, Latest, too_few
from vecenv.backends.envpool.rows import Array, States
from vecenv.backends.envpool.wire import together
from vecenv.front.arguments import env_ids_of
from vecenv.front.phases import Phase

__all__ = ["Batches"]

A = TypeVar("A")
_INTP = np.dtype(np.intp)


class Batches(Driver[A]):
    """Batches of whoever finished first, handed out in any number of rows.

    ``wire`` holds batches that were received and not yet taken, of the first all but ``offset`` rows; an environment is in
    flight until its row is taken. Those that are not are in ``idle``, except the rows taken last: they are in ``held`` until
    somebody asks, because nearly always the very same environments are sent to next, and then neither has to be touched.
    """

    def __init__(self, pool: Any, num_envs: int, batch_size: int) -> None:
        super().__init__(pool, num_envs, batch_size)
        self.idle = set(range(num_envs))

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
    def _ordered(self, batches: list[States]) -> tuple[A, Any]:
        """The answer of all environments, in their order; and what is in ``held`` once it was taken."""

    @abstractmethod
    def _answer(self, states: States) -> tuple[A, Latest, Any]:
        """The answer that these rows are; whose they are; and what is in ``held`` once it was taken, which is a tuple whose
        first entry is the first of ``latest``."""

    def _settle(self, held: Any) -> None:
        """See to whatever there is in ``held`` besides indices. May happen again."""

    # -- what is in flight -------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return PHASES[self.call] if self.call in ("step", "reset") and not self.idle and not self.held else Phase.DEFAULT

    def flying(self) -> int:  # changes nothing: another thread may ask
        return self._num_envs - len(self.idle) - sum(len(held[0]) for held in self.held)

    def choose(self, env_id: Any) -> Array:
        latest, key = self.latest
        ids: Array = latest
        if env_id is None or (
            # by far the commonest: the rows of the latest recv, whose indices are known to be right
            type(env_id) is np.ndarray
            and env_id.dtype is _INTP
            and env_id.shape == latest.shape
            and env_id.tobytes() == key
        ):
            if self.held and self.held[0][0] is latest:
                return ids
        else:
            ids = env_ids_of(env_id, self._num_envs).astype(np.int32)
        self._require_idle(ids, "send")
        return ids

    def _put_away(self) -> None:
        """Make the held environments idle ones like the others."""
        if self.held:
            self._settle(self.held[0])
            together((self.idle.update, self.held[0][0].tolist()), (self.held.clear,))

    def _require_idle(self, ids: Array, name: str) -> None:
        self._put_away()
        if not self.idle.issuperset(ids.tolist()):
            flying = [i for i in ids.tolist() if i not in self.idle]
            raise AlreadyPendingCallError(
                f"Calling `{name}` for envs {flying}, which are still in flight: `recv` them first.", "send"
            )

    # -- sending -----------------------------------------------------------------------------------------------

    def begin_step(self, call: str, actions: list[Array], ids: Array) -> None:
        if ids is self.all_ids:
            self._require_idle(ids, "step_async")
        land = self._landing(ids)
        calls = self._sending(ids, actions)
        self.call = call
        together(*calls, land)

    def _landing(self, ids: Array) -> tuple[Any, ...]:
        """The call that makes idle environments ones in flight."""
        if self.held:
            self._settle(self.held[0])
            if self.held[0][0] is ids:
                return (self.held.clear,)
            self._put_away()
        return self.idle.difference_update, ids.tolist()

    def _sending(self, ids: Array, actions: list[Array]) -> list[tuple[Any, ...]]:
        """The calls of the pool that are a step of these environments."""
        return [(self._pool_send, self._payload(ids, actions))]

    def begin_reset(self, ids: Array, *, force: bool, by_row: bool = False) -> None:
        if ids is self.all_ids:
            self._drain()
        self._require_idle(ids, "reset_async")
        calls = self._resetting(ids, force)
        self.begun = True
        if ids is self.all_ids:
            self.call, self.latest = "reset", self._all
        else:
            self.call = "send"
        together(*calls, (self.idle.difference_update, ids.tolist()))

    def _resetting(self, ids: Array, force: bool) -> list[tuple[Any, ...]]:
        """The calls of the pool that are a reset of these environments."""
        return [(self.pool._reset, ids)]

    # -- receiving ---------------------------------------------------------------------------------------------

    def finish(self, deadline: float | None) -> A:
        wire = self.wire
        while (have := len(wire)) < self._num_envs // self._batch_size:
            self._receive(have + 1, deadline, self.call)
        answer, held = self._ordered(wire[:])
        self.after = have, (self.call, self.latest, 0, [held])
        return answer

    def recv(self, count: int | None, deadline: float | None) -> A:
        if self.held:
            self._put_away()
        if self.call == "step":
            self._refuse_if_a_step_is_owed()
        wire, size = self.wire, self._batch_size
        if count is None:
            count = size
        while size * (have := len(wire)) - self.offset < count:  # (looked at once: a helper thread may add to it)
            self._require_enough(count, size * have - self.offset)
            self._receive(have + 1, deadline, "recv")
        if self.offset or count != size:
            taken, offset, states = self._parts(count)
        else:
            taken, offset, states = 1, 0, wire[0]
        answer, latest, held = self._answer(states)
        self.after = taken, ("send", latest, offset, [held])
        return answer

    def _require_enough(self, count: int, ready: int) -> None:
        """Refuse to wait for what will never come: the pool answers in whole batches only."""
        flying, size = self._num_envs - len(self.idle), self._batch_size
        if flying < count:
            raise too_few(count, flying)
        if flying - ready < -(-(count - ready) // size) * size:
            raise too_few(count, flying, f" EnvPool answers in whole batches of {size}, and {ready} rows are ready.")

    def _parts(self, count: int) -> tuple[int, int, States]:
        """The next ``count`` rows out of several batches: how many batches that uses up, the offset then, and the rows."""
        parts, missing, offset = [], count, self.offset
        used = 0
        while missing:
            some = min(missing, self._batch_size - offset)
            parts.append(self._cut_out(self.wire[used], offset, offset + some))
            missing, offset = missing - some, offset + some
            if offset == self._batch_size:
                used, offset = used + 1, 0
        return used, offset, parts[0] if len(parts) == 1 else [np.concatenate(each) for each in zip(*parts, strict=True)]

    def _drain(self) -> None:
        """Let everything in flight finish, and drop it.

        A pool answers in whole batches only, so some action for idle environments fills the last one up: there are enough
        of them, because the batch size divides the number of environments.
        """
        self._put_away()
        size = self._batch_size
        missing = -(self.flying() + self.offset) % size
        if missing:
            filler = sorted(self.idle)[:missing]
            payload = self._filler(np.array(filler, dtype=np.int32))
            together((self._pool_send, payload), (self.idle.difference_update, filler))
        batches = (self.flying() + self.offset) // size
        while (have := len(self.wire)) < batches:
            self.receiver.receive(have + 1, None)
        together((self.wire.clear,), (setattr, self, "offset", 0), (self.idle.update, range(self._num_envs)))
