"""Drives a pool with several players an environment: the same first-ready batches, of rows in order of environments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from vecenv.backends.envpool.batches import Batches, Latest
from vecenv.backends.envpool.driver import Seeding
from vecenv.backends.envpool.players import PlayerRows, PlayerSorter
from vecenv.backends.envpool.rows import Array, States
from vecenv.backends.envpool.task import Task
from vecenv.front.capabilities import Capabilities
from vecenv.front.driver import Stepped
from vecenv.front.phases import Phase

__all__ = ["PlayerDriver"]

_Answer: TypeAlias = tuple[Stepped, PlayerRows, Array]


class PlayerDriver(Batches):
    """See :class:`~vecenv.backends.envpool.batches.Batches`. Which players there are, and act, is told by the rows taken.

    Args:
        task, batch_size, seeding: Of the pools.
        read: Makes the answer of rows, and of who acted before them and who has to act now, bool ``(n, k)``.
    """

    capabilities = Capabilities(
        "envpool", attributes=False, reset_mask=False, masked_seeds=False, reset_options=False,
        row_options=False, in_this_process=True,
    )

    def __init__(
        self, task: Task, batch_size: int, seeding: Seeding, read: Callable[[PlayerRows, Array, Array], Stepped]
    ) -> None:
        self._sorter = PlayerSorter(task.state_keys, task.state_specs, task.max_num_players)
        self._action_dtype = np.dtype(task.action_dtypes[-1])
        self._turns = "info:current_player" in task.state_keys
        self._rows_to_answer = read
        self._check = lambda actions, ids: [np.asarray(actions)]  # the caller has looked at them
        super().__init__(task, batch_size, seeding)

    def _adopt(self, pool: Any) -> None:
        super()._adopt(pool)
        self.present = np.zeros((self._num_envs, self.task.max_num_players), np.bool_)
        self.acting = self.present.copy()

    def _payload(self, ids: Array, actions: list[Array]) -> list[Array]:
        order, (given,) = np.argsort(ids), actions
        ids, given = ids[order], given[order]
        acting = self.acting[ids]
        given = np.where(acting.reshape(acting.shape + (1,) * (given.ndim - 2)), given, 0).astype(self._action_dtype)
        if self._turns:  # EnvPool takes the first player's action for that of whose turn it is
            given[:] = given[np.arange(len(ids)), acting.argmax(axis=1)][:, None]
        return self._sorter.flatten(given, ids, self.present[ids])

    def _filler(self, ids: Array) -> list[Array]:
        mask = self.present[ids]
        return self._sorter.flatten(np.zeros(mask.shape, self._action_dtype), ids, mask)

    def _cut_out(self, states: States, first: int, last: int) -> States:
        return self._sorter.cut_out(states, first, last)

    def _ordered(self, batches: list[States]) -> tuple[Stepped, Any]:
        stepped, rows, acting = self._read([np.concatenate(parts) for parts in zip(*batches, strict=True)])
        return stepped, (self.all_ids, rows.mask, acting)

    def _answer(self, states: States) -> tuple[Stepped, Latest, Any]:
        stepped, rows, acting = self._read(states)
        ids, index = rows.env_ids.copy(), rows.env_ids.astype(np.intp)
        stepped[4].update(env_id=index, _env_id=np.ones(len(ids), np.bool_))
        return stepped, (ids, index.tobytes()), (ids, rows.mask, acting)

    def _begin_step(self, call: Phase, actions: list[Array], ids: Array) -> None:
        self._settle()
        super()._begin_step(call, actions, ids)

    def _put_away(self) -> None:
        self._settle()
        super()._put_away()

    def _settle(self) -> None:
        """See to what is held besides indices. It may happen again."""
        for ids, present, acting in self.taken[1]:
            self.present[ids], self.acting[ids] = present, acting

    def _read(self, states: States) -> _Answer:
        rows = self._sorter(states)
        begins = rows.envs["elapsed_step"] == 0
        done = rows.envs["done"].astype(np.bool_) & ~begins
        acting = rows.mask & ~done[:, None]
        if "info:current_player" in rows.envs:
            acting &= np.arange(rows.mask.shape[1]) == rows.envs["info:current_player"][:, None]
        acted = self.acting[rows.env_ids] & ~begins[:, None]
        return self._rows_to_answer(rows, acted, acting), rows, acting
