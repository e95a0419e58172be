"""All environments of a pool at once, one call at a time.

A call may take several round trips: a step, then the resets of what it ended; or the natural resets, then the forced ones.
They are a plan, a list of stages, and how far it has got is told by the length of ``wire`` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import AutoresetMode

from vecenv.backends.envpool.driver import Episodes, too_few
from vecenv.backends.envpool.rows import Array, Infos, States
from vecenv.front.arguments import ResetOptions, env_ids_of
from vecenv.front.capabilities import Capabilities, unable
from vecenv.front.driver import NOTHING, Call, Stepped, require_idle, require_no_step
from vecenv.front.phases import Phase

__all__ = ["Lockstep"]

_Rows: TypeAlias = tuple[States, list[Array], Array, Array, Infos]
"""``(states, leaves, terminated, truncated, final)``: the pool's arrays; those of the observation; flags, bool ``(b,)``;
``final_obs``, ``final_info`` and their masks where a step in same-step mode ended episodes."""


class _Stage(NamedTuple):
    """One round trip: ``call(argument)`` sends, and the answer is for these environments and rows of the result."""

    call: Callable[[Any], None]
    argument: Any
    ids: Array
    rows: Array | None  # None: all rows, in order


class _Ended(NamedTuple):
    """What the step itself said, before the rows that ended are overwritten by their resets."""

    terminated: Array
    truncated: Array
    final: Infos


class Lockstep(Episodes):
    """All environments at once, one call at a time.

    Attributes:
        wire: What the latest call has got so far. It alternates: ``None`` for a request that was sent, the states for its
            answer. An odd length means that the pool owes an answer, and length two that there was one round trip.
        taken: ``(wire, latest)``: that of the call whose answer was taken, and whose rows were taken last.
    """

    capabilities = Capabilities(
        "envpool", attributes=False, first_ready=False, masked_seeds=False, reset_options=False,
        row_options=False, in_this_process=True,
    )

    def _adopt(self, pool: Any) -> None:
        super()._adopt(pool)
        self._same_step = self.settings.mode is AutoresetMode.SAME_STEP
        self.taken = self.wire, self.all_ids
        self._kind, self._by_row = Phase.DEFAULT, False
        self._ids, self._rows = self.all_ids, self.everyone  # the same as intp
        self._plan: list[_Stage] = []
        self._steps = 0  # how many stages of the plan are the step (or reset) that was asked for
        self._ended: _Ended | None = None
        self._last: list[Array] = []

    @property
    def owed(self) -> Call:
        if self.pool is None or not self.wire or self.taken[0] is self.wire:
            return NOTHING
        return Call(self._kind, len(self._ids), self._by_row)

    def step(self, actions: Any) -> None:
        if self.pool is None:
            self._refuse("step_async")
        if self.wire and self.taken[0] is not self.wire:
            self._refuse_two("step_async")
        self._begin_step(actions, self.all_ids, by_row=False)

    def send(self, actions: Any, env_id: Any) -> None:
        if self.pool is None:
            self._refuse("send")
        if self.wire and self.taken[0] is not self.wire:
            self._refuse_two("send")
        ids = self.taken[1] if env_id is None else env_ids_of(env_id, self._num_envs).astype(np.int32)
        self._begin_step(actions, ids, by_row=True)

    def reset(self, seeds: list[Any], ids: Array | None, options: ResetOptions, *, by_row: bool) -> None:
        if self.owed.rows:
            self._refuse_two("reset_async")
        super().reset(seeds, ids, options, by_row=by_row)

    def _refuse_two(self, method: str) -> NoReturn:
        """Say that there can be only one call at a time."""
        if not self._by_row:
            require_idle(self.owed, method)
        raise AlreadyPendingCallError(
            f"Calling `{method}` while {len(self._ids)} environments are in flight, whose rows a second call would "
            "overwrite: `recv` first, or give a batch_size smaller than num_envs for first-ready batches.",
            "send",
        )

    def _begin_step(self, actions: Any, ids: Array, *, by_row: bool) -> None:
        checked = self._check(actions, ids)
        plan = [_Stage(self._pool_send, [ids, ids, *checked], ids, None)]
        if self._checks_ends:
            self._refuse_if_over(ids)
        self._begin(Phase.WAITING_STEP, by_row, plan, ids)

    def _begin_reset(self, ids: Array, *, force: bool, by_row: bool) -> None:
        natural = np.zeros(len(ids), dtype=np.bool_) if force else self.naturally(ids)
        if not natural.any():
            plan = [_Stage(self._pool_reset, ids, ids, None)]
        elif natural.all():
            plan = [self._natural_stage(ids, None)]
        else:
            soft, hard = np.flatnonzero(natural), np.flatnonzero(~natural)
            plan = [
                self._natural_stage(ids[soft], soft),
                _Stage(self._pool_reset, ids[hard], ids[hard], hard),
            ]
        self._begin(Phase.WAITING_RESET, by_row, plan, ids)

    def answer(self, kind: Phase, deadline: float | None) -> Stepped | None:
        reader, ids = self._reader, self._ids
        if ids is self.all_ids:
            return self._finish(deadline, ids, reader.infos)
        some = self._finish(deadline, self.taken[1], partial(reader.scattered_infos, num_rows=self._num_envs))
        return some and (reader.build(self._whole()), *some[1:])

    def recv(self, count: int | None, deadline: float | None) -> Stepped | None:
        if self.pool is None:
            self._refuse("recv")
        flying = len(self._ids) if self.wire and self.taken[0] is not self.wire else 0
        if not flying or (count is not None and count > flying):
            raise too_few(1 if count is None else count, flying)
        if not self._by_row:
            require_no_step(self.owed)
        if count is not None and count < flying:
            why = "with batch_size=num_envs EnvPool answers a call as a whole"
            unable(self.name, f"`recv` {count} of {flying} environments", why)
        return self._finish(deadline, self._ids, self._reader.infos)

    def _finish(
        self, deadline: float | None, latest: Array, infos_of: Callable[[States, Array], Infos]
    ) -> Stepped | None:
        if not self._gather(deadline):
            return None
        states, leaves, terminated, truncated, final = self._read()
        infos, rows, reader = infos_of(states, self._rows.copy()), len(self._ids), self._reader
        if final:
            infos |= final
        taken = self.wire, latest
        self.after = (taken, rows, 0) if self._kind is Phase.WAITING_STEP else (taken, 0, rows)
        return reader.build(leaves), reader.rewards(states), terminated, truncated, infos

    def _read(self) -> _Rows:
        """The answer that is there."""
        reader = self._reader
        if len(self.wire) == 2:
            states: States = self.wire[1]
        elif len(self._plan) == self._steps:
            states = self._joined()
        else:
            return self._with_resets()
        terminated, truncated, over = reader.flags(states)
        leaves = reader.leaves(states)
        self._remember(over, leaves)
        return states, leaves, terminated, truncated, {}

    def _whole(self) -> list[Array]:
        """The latest observations of all environments, as leaves of shape ``(num_envs, ...)``; the caller's own."""
        return [leaf.copy() for leaf in self._last]

    def _begin(self, kind: Phase, by_row: bool, plan: list[_Stage], ids: Array) -> None:
        self._kind, self._by_row, self._plan, self._ids = kind, by_row, plan, ids
        self._rows = self.everyone if ids is self.all_ids else ids.astype(np.intp)
        self._steps, self._ended = len(plan), None
        self.wire = []  # nothing is owed before there is something in it
        first = plan[0]
        self.wire.extend(starmap(first[0], (first[1:2],)))

    def _send(self, stage: _Stage) -> None:
        self.wire.extend(starmap(stage[0], (stage[1:2],)))

    def _natural_stage(self, ids: Array, rows: Array | None) -> _Stage:
        return _Stage(self._pool_send, [ids, ids, *self.settings.checker.dummy(len(ids))], ids, rows)

    def _gather(self, deadline: float | None) -> bool:
        """Go through with the plan; whether that was done by the deadline."""
        wire, plan = self.wire, self._plan
        while True:
            have = len(wire)
            if have & 1 and not self.receiver.receive(wire, have + 1, deadline):
                return False
            trips = len(wire) // 2
            if trips == len(plan) and not (self._same_step and self._add_resets(trips)):
                return True
            self._send(plan[trips])

    def _add_resets(self, trips: int) -> bool:
        """In same-step mode, put the resets of what has just ended into the plan; whether there are any."""
        if self._kind is Phase.WAITING_RESET or trips != self._steps:
            return False
        over = self._reader.flags(self.wire[1])[2]
        if not over.any():
            return False
        rows = np.flatnonzero(over)
        ids = self._ids[rows]
        self._plan.append(self._natural_stage(ids, rows))
        return True

    def _joined(self) -> States:
        """The answers of several round trips over disjoint rows, as one."""
        answers = self.wire[1::2]
        joined = []
        for parts in zip(*answers, strict=True):
            whole = np.empty((len(self._ids), *parts[0].shape[1:]), dtype=parts[0].dtype)
            for stage, part in zip(self._plan, parts, strict=True):
                whole[stage.rows] = part
            joined.append(whole)
        return joined

    def _with_resets(self) -> _Rows:
        """A step and the resets of the rows it ended: those rows' observations and infos are of the new episodes."""
        states, resets, rows = self.wire[1], self.wire[3], self._plan[1].rows
        assert rows is not None
        reader = self._reader
        if self._ended is None:  # once: below, the rows are overwritten in place
            terminated, truncated, _ = reader.flags(states)
            self._ended = _Ended(terminated, truncated, self._final(states, rows))
        for i in reader.visible:
            states[i][rows] = resets[i]
        leaves = reader.leaves(states)
        self._remember(np.zeros(len(self._ids), dtype=np.bool_), leaves)
        return states, leaves, *self._ended

    def _final(self, states: States, rows: Array) -> Infos:
        """What Gymnasium reports of episodes that ended in a step that also began the next ones."""
        n = len(self._ids)
        reader = self._reader
        leaves = reader.leaves(states)
        final_obs = np.full(n, None, dtype=object)
        for row in rows.tolist():
            final_obs[row] = reader.row(leaves, row)
        mask = np.zeros(n, dtype=np.bool_)
        mask[rows] = True
        final_info = reader.scattered_infos([array[rows] for array in states], rows, n)
        return {
            "final_info": final_info,
            "_final_info": mask,
            "final_obs": final_obs,
            "_final_obs": mask.copy(),
        }

    def _remember(self, over: Array, leaves: list[Array]) -> None:
        ids = self._ids
        if ids is self.all_ids:
            self.over, self._last = over, leaves
            return
        self.over = self.over.copy()
        self.over[ids] = over
        last = self._whole()
        for whole, leaf in zip(last, leaves, strict=True):
            whole[ids] = leaf
        self._last = last
