"""Rows of pools with several players an environment, for the multi-agent class.

Such a pool returns two kinds of arrays: of environments, and of players, of all environments together, with
``players.env_id`` to tell whose they are. And it returns environments in the order in which they finished, even when a
batch is all of them. Here both are put into the order of environments, and players into an axis of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vecenv.backends.envpool.rows import Array, States

__all__ = ["PlayerRows", "PlayerSorter"]


@dataclass(frozen=True, slots=True)
class PlayerRows:
    """One answer of a pool, in order of environments; n rows, k players at most.

    Attributes:
        env_ids: int32, shape ``(n,)``, ascending.
        mask: Which players there are, bool, shape ``(n, k)``.
        envs: The pool's arrays of environments by state key, shape ``(n, ...)``.
        players: Its arrays of players (``reward``, ``obs``, ...), shape ``(n, k, ...)``; zero where there is no player. A
            view of the pool's array where it came in order and complete.
    """

    env_ids: Array
    mask: Array
    envs: dict[str, Array]
    players: dict[str, Array]


class PlayerSorter:
    """Sorts the answers of one pool.

    Args:
        state_keys: Names of the arrays in an answer.
        state_specs: The pool's ``spec.state_array_spec``: an array whose shape begins with -1 is of players.
        max_num_players: k.
    """

    def __init__(self, state_keys: Sequence[str], state_specs: Mapping[str, Any], max_num_players: int) -> None:
        self._keys = list(state_keys)
        self._of_players = [tuple(state_specs[key].shape[:1]) == (-1,) for key in self._keys]
        self._env_id = self._keys.index("info:env_id")
        self._players_env_id = self._keys.index("info:players.env_id")
        self._player_id = self._keys.index("info:players.id") if "info:players.id" in self._keys else None
        self._k = max_num_players

    def __call__(self, states: States) -> PlayerRows:
        """Sort an answer.

        Raises:
            ValueError: It has more players of one environment than there may be, or players of an environment that is not
                in it.
        """
        env_order, env_ids = _sorted(states[self._env_id])
        player_order, owners = _sorted(states[self._players_env_id])
        n, k = len(env_ids), self._k
        row = np.searchsorted(env_ids, owners)
        if (row == n).any() or (env_ids[np.minimum(row, n - 1)] != owners).any():
            raise ValueError(f"players of environments {np.setdiff1d(owners, env_ids).tolist()}, which are not in the batch")
        slot = self._slots(states, player_order, row, n)
        complete = len(owners) == n * k and np.array_equal(row * k + slot, np.arange(n * k))
        mask = np.zeros((n, k), dtype=np.bool_)
        mask[row, slot] = True
        envs, players = {}, {}
        for key, array, of_players in zip(self._keys, states, self._of_players, strict=True):
            if not of_players:
                envs[key] = array if env_order is None else array[env_order]
                continue
            array = array if player_order is None else array[player_order]
            if complete:
                players[key] = array.reshape(n, k, *array.shape[1:])
            else:
                players[key] = np.zeros((n, k, *array.shape[1:]), dtype=array.dtype)
                players[key][row, slot] = array
        return PlayerRows(env_ids, mask, envs, players)

    def flatten(self, actions: Array, env_ids: Array, mask: Array) -> list[Array]:
        """What the pool's ``_send`` takes.

        Args:
            actions: Shape ``(n, k, ...)``, in the pool's dtype; entries without a player are left out.
            env_ids: int32, shape ``(n,)``.
            mask: Which players act, bool, shape ``(n, k)``.

        Returns:
            ``[env_id, players.env_id, actions]`` of lengths n, p and p, where p players act.
        """
        if actions.shape[:2] != mask.shape or mask.shape != (len(env_ids), self._k):
            raise ValueError(
                f"actions and mask must have shape {(len(env_ids), self._k)} in front, got {actions.shape} and {mask.shape}"
            )
        owners = np.repeat(env_ids, mask.sum(axis=1)).astype(np.int32)
        return [env_ids.astype(np.int32), owners, np.ascontiguousarray(actions[mask])]

    def cut_out(self, states: States, first: int, last: int) -> States:
        """Copies of the rows of some environments, in the order of the answer, and of their players.

        Args:
            states: An answer.
            first, last: Environments from the ``first`` to before the ``last``.
        """
        chosen = states[self._env_id][first:last]
        theirs = np.isin(states[self._players_env_id], chosen)
        return [
            array[theirs] if of_players else array[first:last].copy()
            for array, of_players in zip(states, self._of_players, strict=True)
        ]

    def _slots(self, states: States, player_order: Array | None, row: Array, n: int) -> Array:
        """Which of its environment's players each row is: its number where the pool says so, else its place."""
        counts = np.bincount(row, minlength=n)
        if counts.max(initial=0) > self._k:
            raise ValueError(f"{counts.max()} players in one environment; there may be {self._k}")
        if self._player_id is not None:
            numbers = states[self._player_id]
            return numbers if player_order is None else numbers[player_order]
        starts = np.cumsum(counts) - counts
        return np.arange(len(row)) - starts[row]


def _sorted(ids: Array) -> tuple[Array | None, Array]:
    """The stable order that sorts ``ids`` (``None`` if it is sorted already), and the result."""
    if (ids[1:] >= ids[:-1]).all():
        return None, ids
    order = np.argsort(ids, kind="stable")
    return order, ids[order]
