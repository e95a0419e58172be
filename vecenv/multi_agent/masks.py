"""Action masks: whichever way an environment gives them, ``infos["action_mask"]`` in one form."""

from __future__ import annotations

from typing import Any

import numpy as np

from vecenv.multi_agent.roster import Roster
from vecenv.shm.layout import Array

__all__ = ["ActionMasks"]


class ActionMasks:
    """Adds ``action_mask`` to infos: bool ``[n, A, k]``, or a dict of agents ``[n, k]`` where k differs.

    Masks stand in the observations (``obs["action_mask"]``) or come with the agents' infos; observations are not changed.
    Rows of agents that do not act are all True: a row of False makes a softmax NaN. From the first mask in infos on,
    there is one at every step.
    """

    def __init__(self, roster: Roster, wanted: bool, num_envs: int) -> None:
        self._roster = roster
        self._num_envs = num_envs
        self._latest: dict[int, Array] = {}
        self._wanted = wanted
        observed = roster.has_observed_mask()
        self._observed = wanted and any(observed)
        self._sizes: dict[int, int] = {}
        for index, has in enumerate(observed):
            if has and self._observed:
                space: Any = roster.observation_spaces[index]
                self._sizes[index] = int(space.spaces["action_mask"].shape[-1])

    def add(self, infos: dict[Any, Any], obs: Any, acting: Array, rows: Array, silent: Array | None = None) -> None:
        """Put the masks of a batch into ``infos``.

        Args:
            infos: Of a batch, with the masks that environments gave under ``"action_mask"``; changed in place.
            obs: Its observations.
            acting: Its ``agent_mask``.
            rows: Which environments they are.
            silent: bool, which of these environments had nothing to say (a reset of others): their masks stay.
        """
        if not self._wanted:
            return
        given, given_mask = infos.pop("action_mask", None), infos.pop("_action_mask", None)
        if given is not None:
            self._learn(given, given_mask)
        if not self._sizes:
            return
        if self._observed and self._roster.layout == "stack":
            infos["action_mask"] = (obs["action_mask"] != 0) | ~acting[..., None]
            return
        each = {index: self._one(index, obs, given, given_mask, acting) for index in sorted(self._sizes)}
        for index, mask in each.items():
            latest = self._latest.setdefault(index, np.ones((self._num_envs, self._sizes[index]), np.bool_))
            if silent is not None:
                mask[silent] = latest[rows[silent]]
            latest[rows] = mask
        sizes = set(self._sizes.values())
        if len(sizes) > 1:
            infos["action_mask"] = {self._roster.agents[index]: mask for index, mask in each.items()}
            return
        infos["action_mask"] = np.ones((*acting.shape, sizes.pop()), np.bool_)
        for index, mask in each.items():
            infos["action_mask"][:, index] = mask

    def _learn(self, given: Any, given_mask: Array) -> None:
        """Sizes of masks that came with infos."""
        for index in np.flatnonzero(given_mask.any(axis=0)).tolist():
            if index not in self._sizes:
                column = given[:, index]
                first = column if column.dtype != object else column[given_mask[:, index]][0]
                self._sizes[index] = first.shape[-1]

    def of(self, row: int) -> dict[int, Array]:
        """The latest masks of an environment, by agent."""
        return {index: masks[row].copy() for index, masks in self._latest.items()}

    def put(self, row: int, masks: dict[int, Array]) -> None:
        """They are these."""
        for index, mask in masks.items():
            self._latest.setdefault(index, np.ones((self._num_envs, len(mask)), np.bool_))[row] = mask

    def _one(self, index: int, obs: Any, given: Any, given_mask: Any, acting: Array) -> Array:
        """One agent's masks, bool ``[n, k]``."""
        mask = np.ones((len(acting), self._sizes[index]), np.bool_)
        if self._observed and self._roster.has_observed_mask()[index]:
            mask[:] = self._observation(index, obs)["action_mask"] != 0
        elif given is not None:
            for row in np.flatnonzero(given_mask[:, index]):
                mask[row] = given[row, index]
        mask[~acting[:, index]] = True
        return mask

    def _observation(self, index: int, obs: Any) -> dict[str, Array]:
        """One agent's observations out of the batch's, however it is laid out."""
        for part in self._roster.parts:
            if index in part.agents:
                held = obs if part.key is None else obs[part.key]
                if part.axis:
                    place = part.agents.index(index)
                    return {"action_mask": held["action_mask"][:, place]}
                return {"action_mask": held["action_mask"]}
        raise AssertionError(index)
