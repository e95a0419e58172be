"""All environments of a pool at once, one call at a time.

A call may take several round trips: a step, then the resets of what it ended; or the natural resets, then the forced ones.
They are a plan, a list of stages, and how far it has got is told by the length of ``wire`` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import starmap
from typing import Any, NamedTuple

import numpy as np
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import AutoresetMode

from vecenv.backends.envpool.driver import PHASES, Driver, Episodes, Rows, Settings, too_few
from vecenv.backends.envpool.rows import Array, Infos, States
from vecenv.front.arguments import env_ids_of
from vecenv.front.phases import Phase

__all__ = ["Lockstep"]


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


class Lockstep(Episodes, Driver[Rows]):
    """All environments at once, one call at a time.

    ``wire`` alternates: ``None`` for a request that was sent, the states for its answer. An odd length means that the pool
    owes an answer, and length two that there was one round trip.
    """

    def __init__(self, pool: Any, settings: Settings) -> None:
        Driver.__init__(self, pool, settings.num_envs, settings.batch_size)
        Episodes.__init__(self, settings)
        self._ids = self.all_ids
        self._rows = self.everyone  # the same as intp
        self._plan: list[_Stage] = []
        self._steps = 0  # how many stages of the plan are the step (or reset) that was asked for
        self._ended: _Ended | None = None
        self._last: list[Array] = []
        self._same_step = settings.mode is AutoresetMode.SAME_STEP

    @property
    def phase(self) -> Phase:
        return PHASES[self.call] if self.wire else Phase.DEFAULT

    def flying(self) -> int:
        return len(self._ids) if self.wire else 0

    def choose(self, env_id: Any) -> Array:
        if self.wire:
            raise AlreadyPendingCallError(
                f"Calling `send` while {len(self._ids)} environments are in flight, whose rows a second call would "
                "overwrite: `recv` first, or give a batch_size smaller than num_envs for first-ready batches.",
                "send",
            )
        return self.latest[0] if env_id is None else env_ids_of(env_id, self._num_envs).astype(np.int32)

    def begin_step(self, call: str, actions: list[Array], ids: Array) -> None:
        plan = [_Stage(self._pool_send, [ids, ids, *actions], ids, None)]
        if self._wary:
            self._refuse_if_over(ids)
            if (cut := self.cut[ids]).any():
                plan = self._step_and_resets(actions, ids, cut)
        self._begin(call, plan, ids)

    def _step_and_resets(self, actions: list[Array], ids: Array, cut: Array) -> list[_Stage]:
        rows = np.flatnonzero(cut)
        plan = [_Stage(self.pool._reset, ids[rows], ids[rows], rows)]
        rows = np.flatnonzero(~cut)
        if rows.size:
            payload = [ids[rows], ids[rows], *(array[rows] for array in actions)]
            plan.insert(0, _Stage(self._pool_send, payload, ids[rows], rows))
        return plan

    def begin_reset(self, ids: Array, *, force: bool, by_row: bool = False) -> None:
        natural = np.zeros(len(ids), dtype=np.bool_) if force else self.naturally(ids)
        if not natural.any():
            plan = [_Stage(self.pool._reset, ids, ids, None)]
        elif natural.all():
            plan = [self._natural_stage(ids, None)]
        else:
            soft, hard = np.flatnonzero(natural), np.flatnonzero(~natural)
            plan = [
                self._natural_stage(ids[soft], soft),
                _Stage(self.pool._reset, ids[hard], ids[hard], hard),
            ]
        self._begin("send" if by_row else "reset", plan, ids)

    def finish(self, deadline: float | None) -> Rows:
        self._gather(deadline)
        self.after = len(self.wire), (self.call, self.latest, 0, self.held)
        reader = self._reader
        if len(self.wire) == 2:
            states: States = self.wire[1]
        elif len(self._plan) == self._steps:
            states = self._joined()
        else:
            return self._with_resets()
        terminated, truncated, over = reader.flags(states)
        leaves = reader.leaves(states)
        self._remember(over, terminated, leaves)
        return self._rows, states, leaves, terminated, truncated, None

    def recv(self, count: int | None, deadline: float | None) -> Rows:
        flying = self.flying()
        if not flying or (count is not None and count > flying):
            raise too_few(1 if count is None else count, flying)
        self._refuse_if_a_step_is_owed()
        rows = self.finish(deadline)
        self.after = len(self.wire), ("send", (self._ids, b""), 0, self.held)
        return rows[0].copy(), *rows[1:]

    def whole(self) -> list[Array]:
        """The latest observations of all environments, as leaves of shape ``(num_envs, ...)``; the caller's own."""
        return [leaf.copy() for leaf in self._last]

    def _begin(self, call: str, plan: list[_Stage], ids: Array) -> None:
        self.call, self._plan, self._ids, self.begun = call, plan, ids, True
        if ids is self.all_ids:
            self._rows, self.latest = self.everyone, self._all
        else:
            self._rows = ids.astype(np.intp)
        self._steps, self._ended = len(plan), None
        self._send(plan[0])

    def _send(self, stage: _Stage) -> None:
        self.wire.extend(starmap(stage[0], (stage[1:2],)))

    def _natural_stage(self, ids: Array, rows: Array | None) -> _Stage:
        return _Stage(self._pool_send, [ids, ids, *self.settings.checker.dummy(len(ids))], ids, rows)

    def _gather(self, deadline: float | None) -> None:
        wire, plan = self.wire, self._plan
        while True:
            have = len(wire)
            if have & 1:
                self._receive(have + 1, deadline, self.call)
            trips = len(wire) // 2
            if trips == len(plan) and not (self._same_step and self._add_resets(trips)):
                return
            self._send(plan[trips])

    def _add_resets(self, trips: int) -> bool:
        """In same-step mode, put the resets of what has just ended into the plan; whether there are any."""
        if self.call == "reset" or trips != self._steps:
            return False
        over = self._reader.flags(self.wire[1])[2]
        if not over.any():
            return False
        rows = np.flatnonzero(over)
        ids = self._ids[rows]
        if self.settings.limited_here:  # in the families where the limit may be kept here, both kinds of reset are the same
            self._plan.append(_Stage(self.pool._reset, ids, ids, rows))
        else:
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

    def _with_resets(self) -> Rows:
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
        nothing_over = np.zeros(len(self._ids), dtype=np.bool_)
        self._remember(nothing_over, nothing_over, leaves)
        return self._rows, states, leaves, *self._ended

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

    def _remember(self, over: Array, terminated: Array, leaves: list[Array]) -> None:
        ids = self._ids
        if ids is self.all_ids:
            self.over, self._last = over, leaves
            if self.settings.limited_here:
                self.cut = over > terminated
            return
        self.over = self.over.copy()
        self.over[ids] = over
        if self.settings.limited_here:
            self.cut[ids] = over > terminated
        last = self.whole()
        for whole, leaf in zip(last, leaves, strict=True):
            whole[ids] = leaf
        self._last = last
