"""First-ready batches of environments with one player each; those that are over are reset as autoreset does it."""

from __future__ import annotations

from typing import Any

import numpy as np

from vecenv.backends.envpool.batches import Batches
from vecenv.backends.envpool.driver import Episodes, Latest, Rows, Settings
from vecenv.backends.envpool.rows import Array, States

__all__ = ["FirstReady"]


class FirstReady(Episodes, Batches[Rows]):
    """See :class:`~vecenv.backends.envpool.batches.Batches`."""

    def __init__(self, pool: Any, settings: Settings) -> None:
        Batches.__init__(self, pool, settings.num_envs, settings.batch_size)
        Episodes.__init__(self, settings)

    def _sending(self, ids: Array, actions: list[Array]) -> list[tuple[Any, ...]]:
        if self._wary:
            self._refuse_if_over(ids)
        if not self._wary or not (cut := self.cut[ids]).any():
            return [(self._pool_send, [ids, ids, *actions])]
        calls: list[tuple[Any, ...]] = [(self.pool._reset, ids[cut])]
        if not cut.all():
            kept = ids[~cut]
            calls.append((self._pool_send, self._payload(kept, [array[~cut] for array in actions])))
        return calls

    def _resetting(self, ids: Array, force: bool) -> list[tuple[Any, ...]]:
        natural = np.zeros(len(ids), dtype=np.bool_) if force else self.naturally(ids)
        calls: list[tuple[Any, ...]] = []
        if natural.any():
            calls.append((self._pool_send, self._filler(ids[natural])))
        if not natural.all():
            calls.append((self.pool._reset, ids[~natural]))
        return calls

    def _payload(self, ids: Array, actions: list[Array]) -> list[Array]:
        return [ids, ids, *actions]

    def _filler(self, ids: Array) -> list[Array]:
        return [ids, ids, *self.settings.checker.dummy(len(ids))]

    def _cut_out(self, states: States, first: int, last: int) -> States:
        return [array[first:last].copy() for array in states]

    def _ordered(self, batches: list[States]) -> tuple[Rows, Latest]:
        states: States = [np.concatenate(parts) for parts in zip(*batches, strict=True)]
        order = np.argsort(self._reader.env_ids(states))
        return self._rows([array[order] for array in states], self.everyone), self._all

    def _answer(self, states: States) -> tuple[Rows, Latest, Latest]:
        ids = self._reader.env_ids(states)
        rows = ids.astype(np.intp)  # indexing with it is ten times as fast as with int32
        latest = ids, rows.tobytes()
        return self._rows(states, rows), latest, latest

    def _rows(self, states: States, rows: Array) -> Rows:
        reader = self._reader
        terminated, truncated, over = reader.flags(states)
        self.over[rows] = over
        if self._wary:
            self.cut[rows] = over > terminated
        return rows, states, reader.leaves(states), terminated, truncated, None
