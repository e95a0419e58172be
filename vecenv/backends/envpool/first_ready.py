"""First-ready batches of environments with one player each; those that are over are reset as autoreset does it."""

from __future__ import annotations

from typing import Any

import numpy as np

from vecenv.backends.envpool.batches import Batches, Latest
from vecenv.backends.envpool.driver import Episodes
from vecenv.backends.envpool.rows import Array, States
from vecenv.front.capabilities import Capabilities
from vecenv.front.driver import Stepped

__all__ = ["FirstReady"]


class FirstReady(Episodes, Batches):
    """See :class:`~vecenv.backends.envpool.batches.Batches`."""

    capabilities = Capabilities(
        "envpool", attributes=False, reset_mask=False, masked_seeds=False, reset_options=False,
        row_options=False, in_this_process=True,
    )

    def _sending(self, ids: Array, actions: list[Array]) -> list[tuple[Any, ...]]:
        if self._checks_ends:
            self._refuse_if_over(ids)
        return super()._sending(ids, actions)

    def _resetting(self, ids: Array, force: bool) -> list[tuple[Any, ...]]:
        natural = np.zeros(len(ids), dtype=np.bool_) if force else self.naturally(ids)
        calls: list[tuple[Any, ...]] = []
        if natural.any():
            calls.append((self._pool_send, self._filler(ids[natural])))
        if not natural.all():
            calls.append((self._pool_reset, ids[~natural]))
        return calls

    def _payload(self, ids: Array, actions: list[Array]) -> list[Array]:
        return [ids, ids, *actions]

    def _filler(self, ids: Array) -> list[Array]:
        return [ids, ids, *self.settings.checker.dummy(len(ids))]

    def _cut_out(self, states: States, first: int, last: int) -> States:
        return [array[first:last].copy() for array in states]

    def _ordered(self, batches: list[States]) -> tuple[Stepped, Latest]:
        joined: States = [np.concatenate(parts) for parts in zip(*batches, strict=True)]
        order = np.argsort(self._reader.env_ids(joined))
        states = [array[order] for array in joined]
        rows = self.everyone.copy()
        return self._stepped(states, rows, self._reader.infos(states, rows)), (self.all_ids, b"")

    def _answer(self, states: States) -> tuple[Stepped, Latest, Latest]:
        reader = self._reader
        ids = reader.env_ids(states)
        rows = ids.astype(np.intp)  # indexing with it is ten times as fast as with int32
        latest = ids, rows.tobytes()
        return self._stepped(states, rows, reader.infos(states, rows)), latest, latest

    def _stepped(self, states: States, rows: Array, infos: dict[str, Any]) -> Stepped:
        reader = self._reader
        terminated, truncated, over = reader.flags(states)
        self.over[rows] = over
        return reader.observations(states), reader.rewards(states), terminated, truncated, infos
