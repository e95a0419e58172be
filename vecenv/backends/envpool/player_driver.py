"""Drives a pool with several players an environment: the same first-ready batches, of rows in order of environments."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from vecenv.backends.envpool.batches import Batches
from vecenv.backends.envpool.driver import Latest
from vecenv.backends.envpool.players import PlayerRows, PlayerSorter
from vecenv.backends.envpool.rows import Array, States
from vecenv.backends.envpool.task import Task

__all__ = ["PlayerAnswer", "PlayerDriver"]

PlayerAnswer: TypeAlias = tuple[PlayerRows, Array, Array]
"""Rows; of each environment, bool ``(n, k)``, who acted before them and who has to act now."""


class PlayerDriver(Batches[PlayerAnswer]):
    """See :class:`~vecenv.backends.envpool.batches.Batches`. Which players there are, and act, is told by the rows taken."""

    def __init__(self, pool: Any, task: Task, batch_size: int) -> None:
        num_envs, players = int(task.config["num_envs"]), task.max_num_players
        super().__init__(pool, num_envs, batch_size)
        self._sorter = PlayerSorter(task.state_keys, task.state_specs, players)
        self._action_dtype = np.dtype(task.action_dtypes[-1])
        self._turns = "info:current_player" in task.state_keys
        self.present = np.zeros((num_envs, players), np.bool_)
        self.acting = np.zeros((num_envs, players), np.bool_)

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

    def _ordered(self, batches: list[States]) -> tuple[PlayerAnswer, Any]:
        answer = self._read([np.concatenate(parts) for parts in zip(*batches, strict=True)])
        return answer, (self.all_ids, answer[0].mask, answer[2])

    def _answer(self, states: States) -> tuple[PlayerAnswer, Latest, Any]:
        answer = self._read(states)
        ids = answer[0].env_ids.copy()
        return answer, (ids, ids.astype(np.intp).tobytes()), (ids, answer[0].mask, answer[2])

    def _settle(self, held: Any) -> None:
        ids, present, acting = held
        self.present[ids], self.acting[ids] = present, acting

    def _read(self, states: States) -> PlayerAnswer:
        rows = self._sorter(states)
        begins = rows.envs["elapsed_step"] == 0
        done = rows.envs["done"].astype(np.bool_) & ~begins
        acting = rows.mask & ~done[:, None]
        if "info:current_player" in rows.envs:
            acting &= np.arange(rows.mask.shape[1]) == rows.envs["info:current_player"][:, None]
        return rows, self.acting[rows.env_ids] & ~begins[:, None], acting
