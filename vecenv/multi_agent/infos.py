"""Turns the engine's infos of environments into arrays with an axis of agents, action masks, and lists of dicts.

The adapter of an environment (:mod:`vecenv.multi_agent.adapter`) gives the engine ``{"agents": {index: info}, "common":
{...}}``, which the engine turns into columns ``[n]`` with a mask for every key, at every level. Here the level of agents
becomes an axis: ``infos[key]`` is ``[n, A, ...]`` and ``infos["_" + key]`` says which agents gave one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from gymnasium import spaces

from vecenv.front.infos import own_keys
from vecenv.multi_agent.roster import AgentGroup, Roster
from vecenv.shm.layout import Array

__all__ = ["RESERVED", "ActionMasks", "agents_to_axis", "list_of_dicts", "own_keys", "row_of"]

RESERVED: Final = frozenset(
    ("agent_mask", "transition_mask", "env_done", "env_terminated", "common", "final_obs", "final_info", "env_id",
     "restarted")
)
"""Keys of infos that vecenv itself needs."""


def agents_to_axis(infos: Mapping[Any, Any], num_agents: int, count: int) -> dict[Any, Any]:
    """The engine's infos of ``count`` environments, with the agents' own keys as arrays ``[count, num_agents, ...]``.

    A key that an environment uses and vecenv needs itself (:data:`RESERVED`) gets a trailing underscore. Numeric values of
    agents have the dtype that holds all of them; values that are no numbers, or whose shapes differ, stand in an object
    array.
    """
    out: dict[Any, Any] = {}
    for key in own_keys(infos):
        if key == "agents":
            for name, value in _transposed(infos[key], num_agents, count).items():
                bare = name[1:] if isinstance(name, str) and name.startswith("_") else name
                out[f"{name}_" if bare in RESERVED else name] = value
    for key in own_keys(infos):
        if key == "final_info":
            out[key] = agents_to_axis(infos[key], num_agents, count)
            out["_final_info"] = infos["_final_info"]
        elif key == "common":
            out[key] = infos[key]
        elif key != "agents":
            out[key], out[f"_{key}"] = infos[key], infos[f"_{key}"]
    return out


def _transposed(agents: Mapping[Any, Any], num_agents: int, count: int) -> dict[Any, Any]:
    """``{agent: {key: [count], "_key": [count]}}`` to ``{key: [count, num_agents], "_key": ...}``."""
    columns: dict[Any, dict[int, tuple[Any, Array]]] = {}
    for agent in range(num_agents):
        own = agents.get(agent)
        if own is not None:
            for key in own_keys(own):
                columns.setdefault(key, {})[agent] = (own[key], own[f"_{key}"])
    out: dict[Any, Any] = {}
    for key, column in columns.items():
        mask = np.zeros((count, num_agents), np.bool_)
        for agent, (_, given) in column.items():
            mask[:, agent] = given
        values = {agent: value for agent, (value, _) in column.items()}
        if all(isinstance(value, dict) for value in values.values()):
            out[key] = _transposed(values, num_agents, count)
        else:
            out[key] = _joined(values, mask, num_agents, count)
        out[f"_{key}"] = mask
    return out


def _joined(values: Mapping[int, Any], mask: Array, num_agents: int, count: int) -> Array:
    arrays = list(values.values())
    alike = all(isinstance(v, np.ndarray) and v.dtype.kind in "biuf" and v.shape == arrays[0].shape for v in arrays)
    if alike:
        joined = np.zeros((count, num_agents, *arrays[0].shape[1:]), np.result_type(*arrays))
        for agent, value in values.items():
            joined[:, agent] = value
        return joined
    objects = np.full((count, num_agents), None, dtype=object)
    for agent, value in values.items():
        for row in np.flatnonzero(mask[:, agent]).tolist():
            objects[row, agent] = row_of(value, row)
    return objects


def row_of(value: Any, row: Any) -> Any:
    """One environment's part of a column, or of a nested dict of columns; with ``(environment, agent)`` one agent's."""
    if not isinstance(value, dict):
        return value[row]
    return {key: row_of(value[key], row) for key in own_keys(value) if value[f"_{key}"][row]}


def list_of_dicts(infos: Mapping[Any, Any], count: int | None = None) -> list[dict[Any, Any]]:
    """One dict per environment, as list-based libraries want them, of infos that ``MultiAgentVecEnv`` returned.

    Args:
        infos: Of ``reset``, ``step`` or ``recv``.
        count: Number of environments; default: that of ``infos["agent_mask"]``.

    Returns:
        ``[{key: row}, ...]``: keys of environments have their value, keys of agents a row ``[A, ...]`` with its mask under
        ``"_key"``. A key stands in the dicts of those environments only that have it.
    """
    rows = len(infos["agent_mask"]) if count is None else count
    out: list[dict[Any, Any]] = [{} for _ in range(rows)]
    for key in own_keys(infos):
        value, mask = infos[key], infos.get(f"_{key}")
        nested = list_of_dicts(value, rows) if isinstance(value, dict) and key in ("common", "final_info") else None
        for row in range(rows):
            if mask is not None and not np.any(mask[row]):
                continue
            if nested is not None:
                if nested[row]:
                    out[row][key] = nested[row]
                continue
            out[row][key] = _at(value, row)
            if mask is not None and mask.ndim == 2:
                out[row][f"_{key}"] = mask[row]
    return out


def _at(value: Any, row: int) -> Any:
    return {key: _at(inner, row) for key, inner in value.items()} if isinstance(value, dict) else value[row]


class ActionMasks:
    """Adds ``action_mask`` to infos: bool ``[n, A, k]``, or a dict of agents ``[n, k]`` where k differs.

    Masks stand in the observations (``obs["action_mask"]``) or come with the agents' infos; observations are not changed.
    Rows of agents that do not act are all True, because a row of False makes a softmax NaN. From the first mask in infos on,
    there is one at every step.
    """

    def __init__(self, roster: Roster, wanted: bool, num_envs: int) -> None:
        self._agents = roster.agents
        self._wanted = wanted
        self._num_envs = num_envs
        self._latest: dict[int, Array] = {}  # agent -> bool [num_envs, k]
        self._observed: dict[int, tuple[AgentGroup, int]] = {}  # agents with a mask in their observation
        for index, (part, place) in enumerate(roster.places() if wanted else ()):
            space = part.observation_space
            if isinstance(space, spaces.Dict) and "action_mask" in space.spaces:
                self._observed[index] = part, place
                self._make(index, (space.spaces["action_mask"].shape or (0,))[-1])
        self._stacked = bool(self._observed) and roster.layout == "stack"

    def _make(self, index: int, size: int) -> Array:
        return self._latest.setdefault(index, np.ones((self._num_envs, size), np.bool_))

    def add(self, infos: dict[Any, Any], obs: Any, acting: Array, rows: Array, untouched: Array | None = None) -> None:
        """Put the masks of a batch into ``infos``.

        Args:
            infos: Of a batch, with the masks that environments gave under ``"action_mask"``; changed in place.
            obs: Its observations.
            acting: Its ``agent_mask``.
            rows: Which environments they are.
            untouched: bool, which of these environments a reset of others left alone: their masks stay.
        """
        if not self._wanted:
            return
        given, given_mask = infos.pop("action_mask", None), infos.pop("_action_mask", None)
        if given is None and not self._latest:
            return
        for index in () if given is None else np.flatnonzero(given_mask.any(axis=0)).tolist():
            self._make(index, given[given_mask[:, index], index][0].shape[-1])
        if self._stacked:
            infos["action_mask"] = (obs["action_mask"] != 0) | ~acting[..., None]
            return
        each: dict[int, Array] = {}
        for index, latest in sorted(self._latest.items()):
            mask = each[index] = np.ones((len(rows), latest.shape[1]), np.bool_)
            if index in self._observed:
                part, place = self._observed[index]
                seen = (obs if part.key is None else obs[part.key])["action_mask"]
                mask[:] = (seen[:, place] if part.axis else seen) != 0
            elif given is not None:
                for row in np.flatnonzero(given_mask[:, index]):
                    mask[row] = given[row, index]
            mask[~acting[:, index]] = True
            if untouched is not None:
                mask[untouched] = latest[rows[untouched]]
            latest[rows] = mask
        sizes = {mask.shape[1] for mask in each.values()}
        if len(sizes) > 1:
            infos["action_mask"] = {self._agents[index]: mask for index, mask in each.items()}
        elif sizes:
            infos["action_mask"] = np.ones((*acting.shape, *sizes), np.bool_)
            for index, mask in each.items():
                infos["action_mask"][:, index] = mask

    def of_env(self, row: int) -> dict[int, Array]:
        """The latest masks of an environment, by agent; a part of its snapshot."""
        return {index: masks[row].copy() for index, masks in self._latest.items()}

    def set_env(self, row: int, masks: dict[int, Array]) -> None:
        """Put the masks of a snapshot in place."""
        for index, mask in masks.items():
            self._make(index, len(mask))[row] = mask
