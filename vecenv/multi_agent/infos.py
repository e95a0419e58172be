"""Infos of agents: from the engine's dict of environments to arrays with an axis of agents, and from there to lists.

The adapter of an environment (:mod:`vecenv.multi_agent.adapter`) gives the engine ``{"agents": {index: info}, "common":
{...}}``, which the engine turns into columns ``[n]`` with a mask for every key, at every level. Here the level of agents
becomes an axis: ``infos[key]`` is ``[n, A, ...]`` and ``infos["_" + key]`` says who gave one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from vecenv.front.infos import own_keys
from vecenv.shm.layout import Array

__all__ = ["agents_to_axis", "list_of_dicts", "own_keys", "row_of"]

RESERVED: Final = frozenset(
    {
        "agent_mask",
        "transition_mask",
        "env_done",
        "env_terminated",
        "common",
        "final_obs",
        "final_info",
        "env_id",
        "restarted",
    }
)


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
    """One dict an environment, as list-based libraries want them, of infos that ``MultiAgentVecEnv`` returned.

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
