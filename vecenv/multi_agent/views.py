"""Infos and action masks of agents, and two views of a ``MultiAgentVecEnv``.

The views reshape the environments' results, and forward some other methods and attributes. :class:`FlattenAgents` makes
every agent a row, ``env * A + agent``, of an ordinary Gymnasium vector environment, without copying. A trainer that ignores
masks gets the episodes of each agent unchanged, and rows of padding after its death. By default, padding ends with the
environment's episode, so no value of the next episode is bootstrapped into it. :class:`OpenRLView` has the shapes of the
``agent_num`` convention, for OpenRL and similar on-policy trainers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from vecenv.engine.vector_env import AsyncVectorEnv
from vecenv.errors import StepTimeout, envs_text
from vecenv.front.arguments import NoCloseOnCollect, split_reset_mask
from vecenv.front.driver import drop_pending_and_retry
from vecenv.front.infos import InfoMerger, info_rows, object_column, own_keys
from vecenv.multi_agent.adapter import MASK_KEYS, AgentsEnv, class_name, has_wrapper
from vecenv.multi_agent.roster import AgentGroup, Roster, build_tree, map_checked, map_space
from vecenv.shm.layout import Array, Leaf

__all__ = [
    "RESERVED", "ActionMasks", "ErrorQueue", "FlattenAgents", "OpenRLView", "agents_to_axis", "forwarding",
    "list_of_dicts", "select_row",
]  # fmt: skip


# -- infos of agents ---------------------------------------------------------------------------------------------------
#
# The adapter of an environment (:mod:`vecenv.multi_agent.adapter`) returns ``{"agents": {index: info}, "common": {...}}``
# to the engine, which makes columns ``[n]`` with a mask for every key, at every level. Here the level of agents becomes an
# axis: ``infos[key]`` is ``[n, A, ...]``, and ``infos["_" + key]`` is True for the agents that have the key.

RESERVED: Final = frozenset(
    ("agent_mask", "transition_mask", "env_done", "env_terminated", "common", "final_obs", "final_info", "env_id",
     "restarted", "state", "final_state")
)  # fmt: skip
"""Keys of infos that vecenv itself uses."""


def agents_to_axis(infos: Mapping[Any, Any], num_agents: int, count: int) -> dict[Any, Any]:
    """Convert the engine's infos of ``count`` environments: keys of agents become arrays ``[count, num_agents, ...]``.

    A key of an agent's info that vecenv itself uses (:data:`RESERVED`) gets a trailing underscore. Numeric values of agents
    get a dtype that fits all of them. Values that are not numeric, or that differ in shape, become an object array.
    """
    out: dict[Any, Any] = {}
    for name, value in _transpose(infos.get("agents", {}), num_agents, count).items():
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


def _transpose(agents: Mapping[Any, Any], num_agents: int, count: int) -> dict[Any, Any]:
    """Convert ``{agent: {key: [count], "_key": [count]}}`` to ``{key: [count, num_agents], "_key": ...}``."""
    agent_infos = {agent: agents[agent] for agent in range(num_agents) if agents.get(agent) is not None}
    keys = {agent: own_keys(infos) for agent, infos in agent_infos.items()}
    out: dict[Any, Any] = {}
    for key in dict.fromkeys(chain.from_iterable(keys.values())):
        values = {agent: infos[key] for agent, infos in agent_infos.items() if key in keys[agent]}
        mask = np.zeros((count, num_agents), np.bool_)
        for agent in values:
            mask[:, agent] = agent_infos[agent][f"_{key}"]
        nested = all(isinstance(value, dict) for value in values.values())
        out[key] = _transpose(values, num_agents, count) if nested else _join_columns(values, mask)
        out[f"_{key}"] = mask
    return out


def _join_columns(values: Mapping[int, Any], mask: Array) -> Array:
    arrays = list(values.values())
    if all(isinstance(v, np.ndarray) and v.dtype.kind in "biuf" and v.shape == arrays[0].shape for v in arrays):
        joined = np.zeros((*mask.shape, *arrays[0].shape[1:]), np.result_type(*arrays))
        for agent, value in values.items():
            joined[:, agent] = value
        return joined
    objects = np.full(mask.shape, None, dtype=object)
    for agent, value in values.items():
        for row in np.flatnonzero(mask[:, agent]).tolist():
            objects[row, agent] = select_row(value, row)
    return objects


def select_row(value: Any, row: Any) -> Any:
    """Return the value of one environment, or of one ``(environment, agent)``, in a column or a nested dict of columns."""
    if not isinstance(value, dict):
        return value[row]
    return {key: select_row(value[key], row) for key in own_keys(value) if value[f"_{key}"][row]}


def list_of_dicts(infos: Mapping[Any, Any], count: int | None = None) -> list[dict[Any, Any]]:
    """Convert infos of ``MultiAgentVecEnv`` to one dict per environment, for list-based libraries.

    Args:
        infos: The infos of ``reset``, ``step`` or ``recv``.
        count: The number of environments; default: the length of ``infos["agent_mask"]``.

    Returns:
        One dict per environment, with only the keys that this environment has. A key of agents maps to an array
        ``[A, ...]``, with a mask under ``"_key"``.
    """
    rows = len(infos["agent_mask"]) if count is None else count
    out: list[dict[Any, Any]] = [{} for _ in range(rows)]
    for key in own_keys(infos):
        value, mask = infos[key], infos.get(f"_{key}")
        if isinstance(value, dict):
            value = list_of_dicts(value, rows)
            mask = np.array(list(map(bool, value))) if mask is None or key == "final_info" else mask
        for row in range(rows):
            if mask is not None and not np.any(mask[row]):
                continue
            out[row][key] = _take_row(value, row)
            if mask is not None and mask.ndim == 2:
                out[row][f"_{key}"] = mask[row]
    return out


def _take_row(value: Any, row: int) -> Any:
    if isinstance(value, tuple):  # an observation of a Tuple space
        return tuple(_take_row(part, row) for part in value)
    return {key: _take_row(inner, row) for key, inner in value.items()} if isinstance(value, dict) else value[row]


class ActionMasks:
    """The action masks in infos: bool ``[n, A, k]``, or a dict of agents ``[n, k]`` if k differs.

    Masks come from the observations (``obs["action_mask"]``) or from the agents' infos; observations are not changed. Rows
    of agents that do not act are all True, because an all-False row makes softmax NaN. After the first mask in infos, every
    step has one.
    """

    def __init__(self, roster: Roster, enabled: bool, num_envs: int) -> None:
        self._agents = roster.agents
        self._enabled = enabled
        self._num_envs = num_envs
        self._latest: dict[int, Array] = {}  # agent -> bool [num_envs, k]
        self._observed: dict[int, tuple[AgentGroup, int]] = {}  # agents with a mask in their observation
        for index, (part, place) in enumerate(roster.places() if enabled else ()):
            space = part.observation_space
            shape = getattr(space.spaces.get("action_mask"), "shape", None) if isinstance(space, spaces.Dict) else None
            if shape is not None and len(shape) == 1:  # masks of other shapes stay in the observations only
                self._observed[index] = part, place
                self._ensure_masks(index, shape[0])
        self._stacked = bool(self._observed) and roster.layout == "stack"

    def _ensure_masks(self, index: int, size: int) -> Array:
        return self._latest.setdefault(index, np.ones((self._num_envs, size), np.bool_))

    def add(self, infos: dict[Any, Any], obs: Any, acting: Array, rows: Array, untouched: Array | None = None) -> None:
        """Add the masks of a batch to ``infos``.

        Args:
            infos: The infos of a batch, with the environments' own masks under ``"action_mask"``; changed in place.
            obs: The observations of the batch.
            acting: The ``agent_mask`` of the batch.
            rows: The indices of the environments.
            untouched: bool, environments that a masked reset left out; their masks do not change.
        """
        if not self._enabled:
            return
        info_masks, has_info_mask = infos.pop("action_mask", None), infos.pop("_action_mask", None)
        if info_masks is None and not self._latest:
            return
        for index in () if info_masks is None else np.flatnonzero(has_info_mask.any(axis=0)).tolist():
            self._ensure_masks(index, info_masks[has_info_mask[:, index], index][0].shape[-1])
        if self._stacked:
            infos["action_mask"] = (obs["action_mask"] != 0) | ~acting[..., None]
            return
        masks: dict[int, Array] = {}
        for index, latest in sorted(self._latest.items()):
            mask = masks[index] = np.ones((len(rows), latest.shape[1]), np.bool_)
            if index in self._observed:
                part, place = self._observed[index]
                observed = (obs if part.key is None else obs[part.key])["action_mask"]
                mask[:] = (observed[:, place] if part.has_axis else observed) != 0
            elif info_masks is not None:
                for row in np.flatnonzero(has_info_mask[:, index]):
                    if len(own := info_masks[row, index]) != latest.shape[1]:
                        raise ValueError(
                            f"env {rows[row]}, agent {self._agents[index]!r}: action_mask has length {len(own)}, but the "
                            f"agent's first one has length {latest.shape[1]}"
                        )
                    mask[row] = own
            if untouched is not None and index not in self._observed:
                mask[untouched] = latest[rows[untouched]]
            mask[~acting[:, index]] = True
            latest[rows] = mask
        sizes = {mask.shape[1] for mask in masks.values()}
        if len(sizes) > 1:
            infos["action_mask"] = {self._agents[index]: mask for index, mask in masks.items()}
        elif sizes:
            infos["action_mask"] = np.ones((*acting.shape, *sizes), np.bool_)
            for index, mask in masks.items():
                infos["action_mask"][:, index] = mask

    def extract_masks(self, info: Mapping[str, Any]) -> dict[int, Any]:
        """Return the masks in one environment's info: ``{agent: {"action_mask": mask}}``."""
        agents = info.get("agents", {}) if self._enabled else {}
        return {index: {"action_mask": own["action_mask"]} for index, own in agents.items() if "action_mask" in own}

    def copy_masks(self, row: int) -> dict[int, Array]:
        """Return the latest masks of an environment, by agent, for its snapshot."""
        return {index: masks[row].copy() for index, masks in self._latest.items()}

    def restore_masks(self, row: int, masks: dict[int, Array]) -> None:
        """Restore an environment's masks from a snapshot."""
        for index, mask in masks.items():
            self._ensure_masks(index, len(mask))[row] = mask


Bools = npt.NDArray[np.bool_]
C = TypeVar("C")


def forwarding(inner: str, *names: str, **renamed: str) -> Callable[[type[C]], type[C]]:
    """Return a class decorator that forwards methods and attributes to ``self.<inner>``.

    Args:
        inner: The name of the attribute that holds the target.
        *names: Names in :class:`~vecenv.AsyncVectorEnv`; methods get its signatures and documentation.
        **renamed: New name -> name in the target.
    """

    def decorate(kind: type[C]) -> type[C]:
        for name, target in {**dict(zip(names, names, strict=True)), **renamed}.items():
            setattr(kind, name, _make_forwarder(inner, target))
        return kind

    return decorate


def _make_forwarder(inner: str, name: str) -> Any:
    method = inspect.getattr_static(AsyncVectorEnv, name, None)
    if not inspect.isfunction(method):
        return property(attrgetter(f"{inner}.{name}"), doc=f"See ``AsyncVectorEnv.{name}``.")

    @functools.wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(getattr(self, inner), name)(*args, **kwargs)

    return call


@forwarding("envs", "metadata", "render", "render_mode", "single_action_space", "single_observation_space", "stats")
class FlattenAgents(NoCloseOnCollect, VectorEnv[Any, Any, Any]):
    """The agents of a :class:`~vecenv.MultiAgentVecEnv` with stacked layout as rows of one vector environment.

    Infos of environments are repeated for their agents; every key has a mask ``_key``, bool ``(num_envs,)``.
    ``final_obs`` is an object array of single observations as in Gymnasium; under same-step autoreset an agent that dies
    before the others has one too.

    Args:
        envs: The vector environment to flatten, which ``close`` closes too.
        padding_done: On the last step of an environment's episode, rows of missing agents (dead, or not yet present) get
            ``terminated=True``. Padding is then visible as episodes of return 0 in rows with a False
            ``infos["transition_mask"]``. With ``False`` the flags are the agents' own, and programs that split episodes at
            the flags count the padding as part of the next episode.

    Raises:
        ValueError: The layout is not ``"stack"``.
    """

    def __init__(self, envs: Any, *, padding_done: bool = True) -> None:
        if envs.layout != "stack":
            raise ValueError(f"flatten_agents() needs layout='stack', not {envs.layout!r}: rows must have equal spaces")
        self.envs = envs
        self.padding_done = padding_done
        self.num_agents = envs.num_agents
        self.num_envs = envs.num_envs * envs.num_agents
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._tree = build_tree(self.single_observation_space, "observation")
        self._action_tree = build_tree(self.single_action_space, "actions")
        self._same_step = envs.autoreset_mode is AutoresetMode.SAME_STEP
        self._merger = InfoMerger()

    # -- reset and step ---------------------------------------------------------------------------------------------

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environments, and drop the pending result of a step that timed out or was interrupted.

        Args:
            seed: An int seeds environment i with ``seed + i * seed_stride``. From a sequence of length ``num_envs``, each
                environment gets the seed of its first row.
            options: Passed to every environment; ``"reset_mask"``, bool ``(num_envs,)``, must choose whole environments.

        Raises:
            ValueError, TypeError: Wrong length, type or shape, or a mask that splits an environment.
        """
        seeds = seed
        if seed is not None and not isinstance(seed, (int, np.integer)):
            if len(seed) != self.num_envs:
                raise ValueError(f"got {len(seed)} seeds for {self.num_envs} rows")
            seeds = list(seed)[:: self.num_agents]
        chosen = np.ones(self.num_envs, np.bool_)
        if isinstance(options, Mapping) and (mask := split_reset_mask(options, self.num_envs)[0]) is not None:
            chosen = self._require_whole_envs(mask)
            options = {**options, "reset_mask": chosen[:: self.num_agents].copy()}
        obs, infos = drop_pending_and_retry(self.envs, lambda: self.envs.reset(seed=seeds, options=options))
        return self._to_rows(obs), self._row_infos(infos, chosen)

    def _require_whole_envs(self, mask: Bools) -> Bools:
        split = mask.reshape(-1, self.num_agents)
        split_envs = np.flatnonzero(split.any(axis=1) & ~split.all(axis=1)).tolist()
        if split_envs:
            raise ValueError(
                f"`options['reset_mask']` chooses some rows of {envs_text(split_envs)} and not others: all agents of an "
                "environment are reset together (infos['env_done'] marks the ended ones)"
            )
        return mask

    def step(self, actions: Any) -> tuple[Any, Array, Bools, Bools, dict[str, Any]]:
        """Step all environments with actions of ``action_space``; actions in rows of padding are ignored."""
        split = map_checked(self._split_by_env, actions, self._action_tree, "actions")
        obs, rewards, terminations, truncations, infos = self.envs.step(split)
        if self.padding_done:
            terminations |= infos["env_done"][:, None] & ~truncations
        row_infos = self._row_infos(infos, np.ones(self.num_envs, np.bool_), obs, terminations | truncations)
        return self._to_rows(obs), rewards.reshape(-1), terminations.reshape(-1), truncations.reshape(-1), row_infos

    def _split_by_env(self, actions: Any, leaf: Leaf, name: str) -> Array:
        """Reshape ``(n * A, ...)`` to ``(n, A, ...)``."""
        array = np.asarray(actions)
        if array.ndim == 0 or len(array) != self.num_envs:
            raise ValueError(f"{name}: got shape {array.shape}, expected {self.num_envs} rows")
        return array.reshape(self.envs.num_envs, self.num_agents, *array.shape[1:])

    def _to_rows(self, obs: Any) -> Any:
        return self._tree.map(lambda leaf: leaf.reshape(self.num_envs, *leaf.shape[2:]), obs)

    # -- infos ------------------------------------------------------------------------------------------------------

    def _row_infos(self, infos: dict[str, Any], rows: Bools, obs: Any = None, ended: Bools | None = None) -> dict[str, Any]:
        """Return the infos of ``rows``; ``obs`` and ``ended`` are passed only after a step."""
        last, last_mask = infos.pop("final_obs", None), infos.pop("_final_obs", None)
        final_info, _ = infos.pop("final_info", None), infos.pop("_final_info", None)
        out = self._flatten_infos(infos, rows)
        no_rows = np.zeros(self.num_envs, np.bool_)
        row_ended = no_rows if ended is None else ended.reshape(-1)
        if not (self._same_step and row_ended.any()) and last is None:
            return out
        env_ended = no_rows if last_mask is None else np.repeat(last_mask, self.num_agents)
        final = row_ended if self._same_step else env_ended
        values = np.full(self.num_envs, None, dtype=object)
        for row in np.flatnonzero(final):
            source = self._to_rows(last if env_ended[row] else obs)
            values[row] = self._tree.map(lambda leaf, row=row: leaf[row].copy(), source)  # type: ignore[misc]
        if self._same_step:
            ended_infos = {} if final_info is None else self._flatten_infos(final_info, rows)
            out["final_info"], out["_final_info"] = self._final_infos(out, ended_infos, final, env_ended), final.copy()
        out["final_obs"], out["_final_obs"] = values, final.copy()
        return out

    def _final_infos(self, infos: dict[str, Any], last: dict[str, Any], final: Bools, env_ended: Bools) -> dict[str, Any]:
        """Return the last infos of rows ``final``.

        Where ``env_ended``, they come from ``last``, because ``infos`` are of the next episode there.
        """
        found: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        now, ended = info_rows(infos, self.num_envs), info_rows(last, self.num_envs)
        for row in np.flatnonzero(final).tolist():
            found[row] = now[row]
            if env_ended[row]:
                flags = {key: now[row][key] for key in ("transition_mask", "env_done", "env_terminated")}
                found[row] = {**ended[row], "agent_mask": False, **flags}
        return self._merger.merge(found, range(self.num_envs))

    def _flatten_infos(self, infos: Mapping[Any, Any], rows: Bools) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key in own_keys(infos):
            value, mask = infos[key], infos.get(f"_{key}")
            if key == "common" and mask is None:  # otherwise it is a key of the environment's own infos
                out[key] = self._flatten_infos(value, rows)
                out[f"_{key}"] = np.logical_or.reduce([out[key][f"_{name}"] for name in own_keys(out[key])])
            elif mask is not None:
                out[key], out[f"_{key}"] = (self._to_agent_rows(each, mask.ndim == 2) for each in (value, mask))
            elif key != "action_mask" or not isinstance(value, dict):  # a dict: masks of different sizes, which fit no array
                per_agent = key in ("agent_mask", "transition_mask", "action_mask")
                out[key], out[f"_{key}"] = self._to_agent_rows(value, per_agent), rows.copy()
        return out

    def _to_agent_rows(self, value: Any, per_agent: bool) -> Any:
        if isinstance(value, dict):
            return {key: self._to_agent_rows(inner, per_agent) for key, inner in value.items()}
        if isinstance(value, tuple):  # a state of a Tuple space
            rows = range(self.num_envs)
            return object_column(rows, [_take_row(value, row // self.num_agents) for row in rows], self.num_envs)
        if per_agent:
            return value.reshape(self.num_envs, *value.shape[2:])
        return np.repeat(value, self.num_agents, axis=0)

    # -- other methods ----------------------------------------------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment; repeat each result for every agent."""
        return tuple(result for result in self.envs.call(name, *args, **kwargs) for _ in range(self.num_agents))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of every environment, each value repeated for every agent."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment; from a list of ``num_envs``, each gets the value of its first row."""
        if isinstance(values, (list, tuple)):
            if len(values) != self.num_envs:
                raise ValueError(f"got {len(values)} values for {self.num_envs} rows")
            values = list(values)[:: self.num_agents]
        self.envs.set_attr(name, values)

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environments."""
        self.envs.close(**kwargs)

    def __repr__(self) -> str:
        name = f"{self.spec.id}, " if self.spec is not None else ""
        return f"FlattenAgents({name}num_envs={self.num_envs}, {self.envs!r})"


SEED_STRIDE: Final = 10086  # OpenRL's distance between the seeds of two environments
RENDER_MODES: Final = tuple(f"{kind}{mode}" for kind in ("", "group_", "single_") for mode in ("human", "rgb_array"))


@forwarding(
    "envs", "agent_num", "call", "close", "closed", "copy", "env_fns", "env_name", "get_attr", "metadata", "parent_pipes",
    "processes", "set_attr", "shared_memory", action_space="single_action_space", env_num="num_envs",
    observation_space="single_observation_space", parallel_env_num="num_envs", _env_name="env_name",
)  # fmt: skip
class OpenRLView:
    """A view in the shapes of the ``agent_num`` convention: rewards ``[n, A, 1]``, dones ``[n, A]``, and n info dicts.

    ``step`` returns four values, or five (separate terminations and truncations) if all environments do.

    ``infos[i]`` has the infos of environment i (``infos[i]["key"]``), and also ``active_masks`` float32 ``[A, 1]`` (1 for
    agents that act next, and for all after the environment's episode ended), ``action_masks`` bool ``[A, k]`` if there are
    masks, and after the end, with same-step autoreset, ``final_observation`` and ``final_info``. A dead agent stays done
    until its environment's episode ends, and then all are done. Observations of a ``Discrete`` space are one-hot
    ``[n, A, k]``. Environment i is seeded with ``seed + i * 10086``.

    Args:
        envs: Environments with ``layout="stack"`` and same-step autoreset (or disabled autoreset, the convention's
            ``auto_reset=False``).
        render_mode: The mode of the view, one of ``RENDER_MODES``; default: that of the environments.

    Raises:
        ValueError: ``envs`` has another layout or autoreset mode.

    Attributes:
        envs: The wrapped vector environment.
        observation_space, action_space: The spaces of one agent.
        parallel_env_num, env_num, agent_num: The number of environments (under both names), and of agents in each.
        error_queue: The failures, see :class:`ErrorQueue`.
    """

    def __init__(self, envs: Any, render_mode: str | None = None) -> None:
        if envs.layout != "stack":
            raise ValueError(f"to_openrl() needs layout='stack', not {envs.layout!r}")
        if envs.autoreset_mode is AutoresetMode.NEXT_STEP:
            raise ValueError(
                "to_openrl() needs autoreset_mode=SAME_STEP (or DISABLED): this convention resets in the same step"
            )
        self.envs = envs
        self.render_mode = envs.render_mode if render_mode is None else render_mode
        self.auto_reset = envs.autoreset_mode is AutoresetMode.SAME_STEP
        self.error_queue = ErrorQueue(envs)
        self._merger = InfoMerger()
        self._latest: Any = None
        self._num_step_values: int | None = None  # the number of values that a step returns; None before the first step
        self._ended = np.zeros((2, envs.num_envs, envs.num_agents), np.bool_)  # terminated, truncated
        self._random = np.random.default_rng()

    # -- reset and step ---------------------------------------------------------------------------------------------

    def reset(
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Reset the environments and return ``(observations [n, A, ...], infos)``."""
        self.reset_send(seed, options)
        return self.reset_fetch()

    def reset_send(self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None) -> None:
        """Begin a :meth:`reset`."""
        seeds: Any = seed
        if isinstance(seed, (int, np.integer)):
            seeds = [int(seed) + index * SEED_STRIDE for index in range(self.env_num)]
            self._random = np.random.default_rng(int(seed))
            self.action_space.seed(int(seed))
        with _openrl_method_names():
            self.envs.reset_async(seed=seeds, options=options)

    def reset_fetch(self, timeout: float | None = None) -> tuple[Any, list[dict[str, Any]]]:
        """Return the result of :meth:`reset_send`. Errors are those of ``AsyncVectorEnv.reset_wait``."""
        with _openrl_method_names():
            (obs, infos), env_infos = self.envs.results_by_row("reset_wait", timeout)
        mask = self.envs._reset_mask
        self._ended[:, slice(None) if mask is None else mask] = False
        self._latest = self._encode_observations(obs)
        return self._latest, self._list_infos(infos, env_infos, np.zeros(self.env_num, np.bool_))

    def step(self, actions: Any, extra_data: Any = None) -> tuple[Any, ...]:
        """Step all environments; ``extra_data`` is ignored.

        Returns:
            ``(observations [n, A, ...], rewards [n, A, 1], dones bool [n, A], infos)``; with five values, terminations and
            truncations, both ``[n, A]``, in place of ``dones``.
        """
        self.step_send(actions)
        return self.step_fetch()

    def step_send(self, actions: Any) -> None:
        """Begin a :meth:`step`."""
        with _openrl_method_names():
            self.envs.step_async(actions)

    def step_fetch(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Return the result of :meth:`step_send`. Errors are those of ``AsyncVectorEnv.step_wait``."""
        with _openrl_method_names():
            (obs, rewards, terminations, truncations, infos), env_infos = self.envs.results_by_row("step_wait", timeout)
        done = infos["env_done"]
        ended = self._ended | np.stack([terminations, truncations])
        ended &= done[:, None] | ~infos["agent_mask"]  # a lost step may have ended the episode in which these agents died
        self._ended = ended & ~done[:, None]
        self._latest = self._encode_observations(obs)
        listed = self._list_infos(infos, env_infos, done)
        if self._num_step_values is None:  # five values if all environments return five; a restarted one has returned none
            counts = self.envs._rows.exec_func(_num_step_values) if self.envs.capabilities.attributes else ()
            self._num_step_values = min(filter(None, counts), default=4)
        if self._num_step_values == 5:
            return self._latest, rewards[..., None], ended[0], ended[1], listed
        return self._latest, rewards[..., None], ended.any(axis=0) | done[:, None], listed

    def _encode_observations(self, obs: Any) -> Any:
        return map_space(_one_hot, self.observation_space, obs)

    def _list_infos(self, infos: dict[str, Any], env_infos: Sequence[dict[str, Any]], done: Array) -> list[dict[str, Any]]:
        """Return one info per environment, from vecenv's ``infos`` and the environments' own ``env_infos``."""
        active = (infos["agent_mask"] | done[:, None]).astype(np.float32)[..., None]
        masks = infos.pop("action_mask", None)
        if "final_obs" in infos:
            infos["final_observation"] = self._encode_observations(infos.pop("final_obs"))
            infos["_final_observation"] = infos.pop("_final_obs")
        listed = list_of_dicts(infos)
        for index, (info, env_info) in enumerate(zip(listed, env_infos, strict=True)):
            self._add_env_infos(info, env_info, index)
            if "final_info" in env_info:
                info["final_info"] = {}
                self._add_env_infos(info["final_info"], env_info["final_info"], index)
            info["active_masks"] = active[index]
            if masks is not None:
                info["action_masks"] = masks[index]
        return listed

    def _add_env_infos(self, info: dict[str, Any], env_info: dict[str, Any], index: int) -> None:
        """Add an environment's infos: its common values unchanged, the values of agents in arrays ``[A, ...]``."""
        agents = [env_info.get("agents", {}).get(agent, {}) for agent in range(self.agent_num)]
        common = env_info.get("common", {})
        if any(agents):
            columns = self._merger.merge(agents, [index] * len(agents))
            if not common.keys().isdisjoint(MASK_KEYS):  # the masks stay in the environment's own format
                columns = {key: value for key, value in columns.items() if key not in ("action_mask", "_action_mask")}
            info.update({key: value for key, value in columns.items() if key not in info})
        info.update({key: value for key, value in common.items() if key not in info})

    def random_action(self, infos: Sequence[dict[str, Any]] | None = None) -> Array:
        """Draw random actions ``[n, A, ...]``. For ``Discrete``, ``[n, A, 1]``; with ``infos``, only allowed ones."""
        space = self.action_space
        shape = (self.env_num, self.agent_num)
        if not isinstance(space, spaces.Discrete):
            return np.stack([[space.sample() for _ in range(shape[1])] for _ in range(shape[0])])
        actions = np.empty((*shape, 1), np.int64)
        for row, agent in np.ndindex(shape):
            allowed = None if infos is None or "action_masks" not in infos[row] else infos[row]["action_masks"][agent]
            choices = np.arange(int(space.n)) if allowed is None else np.flatnonzero(allowed)
            actions[row, agent, 0] = int(space.start) + self._random.choice(choices)
        return actions

    # -- rendering --------------------------------------------------------------------------------------------------

    def render(self, mode: str | None = None) -> Any:
        """Render the environments in their own ``render_mode``, and return one image or ``None``.

        Args:
            mode: ``"rgb_array"``, ``"group_rgb_array"``: one tiled image of all environments; ``"single_rgb_array"``: the
                image of environment 0; ``"human"``, ``"group_human"``, ``"single_human"``: nothing is returned, because
                environments built with ``render_mode="human"`` draw themselves; ``None``: the view's ``render_mode``, or
                ``"rgb_array"``.
        """
        if mode is None:
            mode = self.render_mode if self.render_mode in RENDER_MODES else "rgb_array"
        if mode not in RENDER_MODES:
            raise ValueError(f"render mode must be one of {RENDER_MODES} or None, got {mode!r}")
        frames = self.envs.render()
        if mode.endswith("human") or frames is None or frames[0] is None:
            return None
        return frames[0] if mode.startswith("single") else _tile([np.asarray(frame) for frame in frames])

    # -- the environments -------------------------------------------------------------------------------------------

    def call_send(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begin a :meth:`call`."""
        with _openrl_method_names():
            self.envs.call_async(name, *args, **kwargs)

    def call_fetch(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Return the results of :meth:`call_send`. Errors are those of ``AsyncVectorEnv.call_wait``."""
        with _openrl_method_names():
            results: tuple[Any, ...] = self.envs.call_wait(timeout)
        return results

    def exec_func(
        self, func: Callable[..., Any], indices: int | Sequence[int] | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Call ``func(env, *args, **kwargs)`` with the environments ``indices``; ``None``: all, ``[]``: none.

        Returns:
            A result for each chosen environment, and ``None`` for the others.
        """
        self.exec_func_send(func, indices, *args, **kwargs)
        return self.exec_func_fetch()

    def exec_func_send(
        self, func: Callable[..., Any], indices: int | Sequence[int] | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Begin an :meth:`exec_func`."""
        with _openrl_method_names("exec_func"):
            if indices is not None and np.size(indices) == 0:
                self.envs.exec_func_send(_do_nothing)
            else:
                self.envs.exec_func_send(func, indices, *args, **kwargs)

    def exec_func_fetch(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Return the results of :meth:`exec_func_send`."""
        with _openrl_method_names("exec_func"):
            results: tuple[Any, ...] = self.envs.exec_func_fetch(timeout)
        return results

    def env_is_wrapped(self, wrapper_class: type[Any], indices: int | Sequence[int] | None = None) -> list[bool]:
        """Return one bool per chosen environment: True if it has a wrapper of this class or a subclass."""
        chosen = [indices] if isinstance(indices, (int, np.integer)) else indices
        results = self.envs.exec_func(has_wrapper, chosen, class_name(wrapper_class))
        return [results[index] for index in (range(self.env_num) if chosen is None else chosen)]

    def seed(self, seed: int | None = None) -> None:
        """Do nothing, as in OpenRL: seeds are arguments of :meth:`reset`."""

    # -- attributes and close() -------------------------------------------------------------------------------------

    if TYPE_CHECKING:  # for the forwarded attributes

        def __getattr__(self, name: str) -> Any: ...

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the environments, like ``close``."""
        self.envs.close(timeout=timeout, terminate=terminate)

    @property
    def unwrapped(self) -> OpenRLView:
        """The view itself."""
        return self

    @property
    def observations(self) -> Any:
        """The latest batch; ``None`` before the first reset."""
        return self._latest

    def __repr__(self) -> str:
        return f"OpenRLView({self.envs!r})"


class ErrorQueue:
    """A queue of failures like OpenRL's: it returns each failure once, oldest first."""

    def __init__(self, envs: Any) -> None:
        self._envs = envs
        self._last: Any = None

    def _unread_records(self) -> list[Any]:
        records = list(self._envs.errors)
        known = [index for index, record in enumerate(records) if record is self._last]
        return records[known[0] + 1 :] if known else records

    def get(self, block: bool = False, timeout: float | None = None) -> tuple[int | None, type[Any], BaseException]:
        """Return ``(index of the environment, class, exception)`` of the next failure.

        Raises:
            queue.Empty: There is none; this never waits, regardless of the arguments.
        """
        unread = self._unread_records()
        if not unread:
            raise queue.Empty
        self._last = record = unread[0]
        return record.env, type(record.error), record.error

    get_nowait = get

    def empty(self) -> bool:
        """True if all failures have been returned."""
        return not self._unread_records()

    def qsize(self) -> int:
        """Return the number of failures that have not been returned."""
        return len(self._unread_records())


@contextlib.contextmanager
def _openrl_method_names(kind: str = "call") -> Iterator[None]:
    """Make errors name OpenRL's methods: ``step_fetch`` for ``step_wait``; ``kind`` replaces ``call``."""
    try:
        yield
    except (AlreadyPendingCallError, NoAsyncCallError, StepTimeout) as error:
        text = str(error.args[0])
        for ours, theirs in (("reset", "reset"), ("step", "step"), ("call", kind)):
            text = text.replace(f"`{ours}_async`", f"`{theirs}_send`").replace(f"`{ours}_wait`", f"`{theirs}_fetch`")
            text = text.replace(f"`{ours}_wait()`", f"`{theirs}_fetch()`")
        error.args = (text, *error.args[1:])
        raise


def _do_nothing(env: Any) -> None:
    """Do nothing: the function for ``exec_func(indices=[])``."""


def _num_step_values(env: AgentsEnv) -> int:
    return int(getattr(env.env, "num_step_values", 4))


def _one_hot(space: spaces.Space[Any], obs: Any) -> Any:
    if isinstance(space, spaces.Discrete):  # padding outside the space becomes a row of zeros
        return (np.arange(space.start, space.start + space.n) == np.asarray(obs)[..., None]).astype(space.dtype)
    return obs


def _tile(frames: Sequence[Array]) -> Array:
    """Tile frames of equal shape ``[h, w, c]`` into a grid as square as possible; empty cells are black."""
    rows = math.ceil(math.sqrt(len(frames)))
    columns = math.ceil(len(frames) / rows)
    height, width, *channels = frames[0].shape
    grid = np.zeros((rows * columns, height, width, *channels), frames[0].dtype)
    grid[: len(frames)] = frames
    return grid.reshape(rows, columns, height, width, *channels).swapaxes(1, 2).reshape(rows * height, -1, *channels)
