"""Two views of a ``MultiAgentVecEnv``: rows for single-agent trainers, and the shapes of the ``agent_num`` convention.

Both reshape what the environments gave and pass everything else on. :class:`FlattenAgents` makes every agent a row of an
ordinary Gymnasium vector environment, ``env * A + agent``, without copying. Trainers that know no masks see an agent's
episodes as they are, and rows of padding after its death; those end with the environment's episode, so that nothing is
bootstrapped from padding into the next episode and episode statistics are right. :class:`OpenRLView` is what OpenRL and
on-policy trainers like it expect.
"""

from __future__ import annotations

import functools
import inspect
import math
import queue
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from vecenv.engine.vector_env import AsyncVectorEnv
from vecenv.front.arguments import NotClosedUnasked, reset_mask_of
from vecenv.front.driver import dropping_pending
from vecenv.front.infos import own_keys
from vecenv.multi_agent.adapter import AgentsEnv, class_name, has_wrapper
from vecenv.multi_agent.roster import AgentGroup, Roster, map_checked, map_space, tree_of
from vecenv.shm.layout import Array, Leaf

__all__ = [
    "RESERVED", "ActionMasks", "ErrorQueue", "FlattenAgents", "OpenRLView", "agents_to_axis", "forwarding",
    "list_of_dicts", "row_of",
]  # fmt: skip


# -- infos of agents ---------------------------------------------------------------------------------------------------
#
# The adapter of an environment (:mod:`vecenv.multi_agent.adapter`) gives the engine ``{"agents": {index: info}, "common":
# {...}}``, which the engine turns into columns ``[n]`` with a mask for every key, at every level. Here the level of agents
# becomes an axis: ``infos[key]`` is ``[n, A, ...]`` and ``infos["_" + key]`` says which agents gave one.

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
    for name, value in _transposed(infos.get("agents", {}), num_agents, count).items():
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
    own = {agent: agents[agent] for agent in range(num_agents) if agents.get(agent) is not None}
    keys = {agent: own_keys(infos) for agent, infos in own.items()}
    out: dict[Any, Any] = {}
    for key in dict.fromkeys(chain.from_iterable(keys.values())):
        values = {agent: infos[key] for agent, infos in own.items() if key in keys[agent]}
        mask = np.zeros((count, num_agents), np.bool_)
        for agent in values:
            mask[:, agent] = own[agent][f"_{key}"]
        nested = all(isinstance(value, dict) for value in values.values())
        out[key] = _transposed(values, num_agents, count) if nested else _joined(values, mask)
        out[f"_{key}"] = mask
    return out


def _joined(values: Mapping[int, Any], mask: Array) -> Array:
    arrays = list(values.values())
    alike = all(isinstance(v, np.ndarray) and v.dtype.kind in "biuf" and v.shape == arrays[0].shape for v in arrays)
    if alike:
        joined = np.zeros((*mask.shape, *arrays[0].shape[1:]), np.result_type(*arrays))
        for agent, value in values.items():
            joined[:, agent] = value
        return joined
    objects = np.full(mask.shape, None, dtype=object)
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


Bools = npt.NDArray[np.bool_]
C = TypeVar("C")


def forwarding(inner: str, *names: str, **renamed: str) -> Callable[[type[C]], type[C]]:
    """A class decorator: these methods and attributes are those of ``self.<inner>``.

    Args:
        inner: Name of the attribute that holds it.
        *names: Of :class:`~vecenv.AsyncVectorEnv`, whose signatures and documentation methods have.
        **renamed: Name here -> name there.
    """

    def decorate(kind: type[C]) -> type[C]:
        for here, there in {**dict(zip(names, names, strict=True)), **renamed}.items():
            setattr(kind, here, _forwarded(inner, there))
        return kind

    return decorate


def _forwarded(inner: str, name: str) -> Any:
    method = inspect.getattr_static(AsyncVectorEnv, name, None)
    if not inspect.isfunction(method):
        return property(attrgetter(f"{inner}.{name}"), doc=f"As of ``AsyncVectorEnv.{name}``.")

    @functools.wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(getattr(self, inner), name)(*args, **kwargs)

    return call


@forwarding("envs", "metadata", "render", "render_mode", "single_action_space", "single_observation_space", "stats")
class FlattenAgents(NotClosedUnasked, VectorEnv[Any, Any, Any]):
    """The agents of a :class:`~vecenv.MultiAgentVecEnv` with stacked layout as rows of one vector environment.

    Args:
        envs: What to flatten; closing this closes it.
        padding_done: On the last step of an environment, rows of agents that are not there (dead, or not born) get
            ``terminated=True``. Padding then shows up as episodes of return 0 whose rows have a False
            ``infos["transition_mask"]``. With ``False`` the flags are the agents' own, and programs that count from flag to
            flag count the padding into the next episode.

    Raises:
        ValueError: The layout is not ``"stack"``.

    Infos of environments are repeated for their agents; every key has a mask ``_key``, bool ``(num_envs,)``.
    ``final_obs`` is an object array of single observations as in Gymnasium; under same-step autoreset an agent that dies
    before the others has one too.
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
        self._tree = tree_of(self.single_observation_space, "observation")
        self._action_tree = tree_of(self.single_action_space, "actions")
        self._same_step = envs.autoreset_mode is AutoresetMode.SAME_STEP

    # -- reset and step ---------------------------------------------------------------------------------------------

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environments; the pending answer to a step that timed out or was interrupted is dropped.

        Args:
            seed: An int seeds environment i with ``seed + i * seed_stride``; of a sequence of ``num_envs`` each environment
                gets that of its first row.
            options: Handed to every environment; ``"reset_mask"``, bool ``(num_envs,)``, must choose whole environments.

        Raises:
            ValueError, TypeError: Wrong length, type or shape, or a mask that splits an environment.
        """
        seeds = seed
        if seed is not None and not isinstance(seed, (int, np.integer)):
            if len(seed) != self.num_envs:
                raise ValueError(f"got {len(seed)} seeds for {self.num_envs} rows")
            seeds = list(seed)[:: self.num_agents]
        chosen = np.ones(self.num_envs, np.bool_)
        if isinstance(options, Mapping) and (mask := reset_mask_of(options, self.num_envs)[0]) is not None:
            chosen = self._whole_envs(mask)
            options = {**options, "reset_mask": chosen[:: self.num_agents].copy()}
        obs, infos = dropping_pending(self.envs, lambda: self.envs.reset(seed=seeds, options=options))
        return self._rows(obs), self._infos(infos, chosen)

    def _whole_envs(self, mask: Bools) -> Bools:
        split = mask.reshape(-1, self.num_agents)
        torn = np.flatnonzero(split.any(axis=1) & ~split.all(axis=1)).tolist()
        if torn:
            raise ValueError(
                f"`options['reset_mask']` chooses some rows of envs {torn} and not others: all agents of an environment are "
                "reset together (infos['env_done'] tells when)"
            )
        return mask

    def step(self, actions: Any) -> tuple[Any, Array, Bools, Bools, dict[str, Any]]:
        """Step all environments: actions of ``action_space``; rows of padding may hold anything."""
        split = map_checked(self._split, actions, self._action_tree, "actions")
        obs, rewards, terminations, truncations, infos = self.envs.step(split)
        if self.padding_done:
            terminations |= infos["env_done"][:, None] & ~truncations
        rows = self._infos(infos, np.ones(self.num_envs, np.bool_), obs, terminations | truncations)
        return self._rows(obs), rewards.reshape(-1), terminations.reshape(-1), truncations.reshape(-1), rows

    def _split(self, actions: Any, leaf: Leaf, name: str) -> Array:
        """``(n * A, ...)`` to ``(n, A, ...)``."""
        array = np.asarray(actions)
        if array.ndim == 0 or len(array) != self.num_envs:
            raise ValueError(f"{name}: got shape {array.shape}, wanted {self.num_envs} rows")
        return array.reshape(self.envs.num_envs, self.num_agents, *array.shape[1:])

    def _rows(self, obs: Any) -> Any:
        return self._tree.map(lambda leaf: leaf.reshape(self.num_envs, *leaf.shape[2:]), obs)

    # -- infos ------------------------------------------------------------------------------------------------------

    def _infos(self, infos: dict[str, Any], rows: Bools, obs: Any = None, ended: Bools | None = None) -> dict[str, Any]:
        """Infos of ``rows``, with ``obs`` and ``ended`` of a step."""
        last, last_mask = infos.pop("final_obs", None), infos.pop("_final_obs", None)
        final_info, _ = infos.pop("final_info", None), infos.pop("_final_info", None)
        out = self._flat(infos, rows)
        none = np.zeros(self.num_envs, np.bool_)
        ends = none if ended is None else ended.reshape(-1)
        if not (self._same_step and ends.any()) and last is None:
            return out
        whole = none if last_mask is None else np.repeat(last_mask, self.num_agents)
        final = ends if self._same_step else whole
        values = np.full(self.num_envs, None, dtype=object)
        for row in np.flatnonzero(final):
            source = self._rows(last if whole[row] else obs)
            values[row] = self._tree.map(lambda leaf, row=row: leaf[row].copy(), source)  # type: ignore[misc]
        out["final_obs"], out["_final_obs"] = values, final.copy()
        if self._same_step:
            out["final_info"] = {} if final_info is None else self._flat(final_info, rows)
            out["_final_info"] = final.copy()
        return out

    def _flat(self, infos: Mapping[Any, Any], rows: Bools) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key in own_keys(infos):
            value, mask = infos[key], infos.get(f"_{key}")
            if key == "common":
                out[key] = self._flat(value, rows)
                out[f"_{key}"] = np.logical_or.reduce([out[key][f"_{name}"] for name in own_keys(out[key])])
            elif mask is not None:
                out[key], out[f"_{key}"] = (self._spread(each, mask.ndim == 2) for each in (value, mask))
            elif not isinstance(value, dict):  # action masks of different sizes are no array of rows
                of_agents = key in ("agent_mask", "transition_mask", "action_mask")
                out[key], out[f"_{key}"] = self._spread(value, of_agents), rows.copy()
        return out

    def _spread(self, value: Any, of_agents: bool) -> Any:
        if isinstance(value, dict):
            return {key: self._spread(inner, of_agents) for key, inner in value.items()}
        if of_agents:
            return value.reshape(self.num_envs, *value.shape[2:])
        return np.repeat(value, self.num_agents, axis=0)

    # -- the rest ---------------------------------------------------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The environments' results, each once for every agent."""
        return tuple(result for result in self.envs.call(name, *args, **kwargs) for _ in range(self.num_agents))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """The environments' values, each once for every agent."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment; of a list of ``num_envs`` each gets that of its first row."""
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


SEED_STRIDE: Final = 10086
RENDER_MODES: Final = tuple(f"{kind}{mode}" for kind in ("", "group_", "single_") for mode in ("human", "rgb_array"))


@forwarding(
    "envs", "agent_num", "call", "close", "closed", "env_fns", "env_name", "exec_func", "exec_func_fetch", "exec_func_send",
    "get_attr", "metadata", "parent_pipes", "processes", "set_attr", action_space="single_action_space",
    call_send="call_async", call_fetch="call_wait", env_num="num_envs", observation_space="single_observation_space",
    parallel_env_num="num_envs", _env_name="env_name",
)  # fmt: skip
class OpenRLView:
    """A view with that convention's shapes: rewards ``[n, A, 1]``, dones ``[n, A]``, infos a list of n dicts.

    ``step`` gives four values, or five (terminations and truncations apart) where the environments do.

    ``infos[i]`` is what environment i gave (``infos[i]["key"]``), and beside that ``active_masks`` float32 ``[A, 1]`` (1 for
    agents that are alive, and for all after the environment's episode ended), ``action_masks`` bool ``[A, k]`` where there
    are masks, and after the end ``final_observation`` and ``final_info``. A dead agent stays done until its environment's
    episode ends, and then all are. Observations of a ``Discrete`` space are one-hot ``[n, A, k]``. Environment i is seeded
    with ``seed + i * 10086``.

    Args:
        envs: With ``layout="stack"`` and same-step autoreset (or none, the convention's ``auto_reset=False``).
        render_mode: Of the view, one of ``RENDER_MODES``; default, that of the environments.

    Raises:
        ValueError: It has another layout or autoreset mode.

    Attributes:
        envs: The vector environment beneath.
        observation_space, action_space: Of one agent.
        parallel_env_num, env_num, agent_num: Numbers of environments, the same, and of agents in each.
        error_queue: What failed, see :class:`ErrorQueue`.
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
        self._latest: Any = None
        self._values: int | None = None  # of a step, known after the first
        self._ended = np.zeros((2, envs.num_envs, envs.num_agents), np.bool_)  # terminated, truncated
        self._mask: Any = None  # of the latest reset
        self._random = np.random.default_rng()

    # -- reset and step ---------------------------------------------------------------------------------------------

    def reset(
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, list[dict[str, Any]]]:
        """``(observations [n, A, ...], infos)``."""
        self.reset_send(seed, options)
        return self.reset_fetch()

    def reset_send(self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None) -> None:
        """Begin a :meth:`reset`."""
        seeds: Any = seed
        if isinstance(seed, (int, np.integer)):
            seeds = [int(seed) + index * SEED_STRIDE for index in range(self.env_num)]
            self._random = np.random.default_rng(int(seed))
            self.action_space.seed(int(seed))
        self.envs.reset_async(seed=seeds, options=options)
        self._mask = None if options is None else options.get("reset_mask")

    def reset_fetch(self, timeout: float | None = None) -> tuple[Any, list[dict[str, Any]]]:
        """What :meth:`reset` returns, of :meth:`reset_send`; errors as of ``AsyncVectorEnv.reset_wait``."""
        obs, infos = self.envs.reset_wait(timeout)
        self._ended[:, slice(None) if self._mask is None else self._mask] = False
        self._latest = self._shown(obs)
        return self._latest, self._listed(infos, np.zeros(self.env_num, np.bool_))

    def step(self, actions: Any, extra_data: Any = None) -> tuple[Any, ...]:
        """One step of all environments; ``extra_data`` is not looked at.

        Returns:
            ``(observations [n, A, ...], rewards [n, A, 1], dones bool [n, A], infos)``, or with terminations and truncations
            ``[n, A]`` each in the place of ``dones``.
        """
        self.step_send(actions)
        return self.step_fetch()

    def step_send(self, actions: Any) -> None:
        """Begin a :meth:`step`."""
        self.envs.step_async(actions)

    def step_fetch(self, timeout: float | None = None) -> tuple[Any, ...]:
        """What :meth:`step` returns, of :meth:`step_send`; errors as of ``AsyncVectorEnv.step_wait``."""
        obs, rewards, terminations, truncations, infos = self.envs.step_wait(timeout)
        done = infos["env_done"]
        ended = self._ended | np.stack([terminations, truncations])
        self._ended = ended & ~done[:, None]
        self._latest = self._shown(obs)
        listed = self._listed(infos, done)
        if self._values is None:  # five, where all environments give that many
            self._values = min(self.envs._rows.exec_func(_values)) if self.envs.capabilities.attributes else 4
        if self._values == 5:
            return self._latest, rewards[..., None], ended[0], ended[1], listed
        return self._latest, rewards[..., None], ended.any(axis=0) | done[:, None], listed

    def _shown(self, obs: Any) -> Any:
        return map_space(_one_hot, self.observation_space, obs)

    def _listed(self, infos: dict[str, Any], done: Array) -> list[dict[str, Any]]:
        active = (infos["agent_mask"] | done[:, None]).astype(np.float32)[..., None]
        masks = infos.pop("action_mask", None)
        if "final_obs" in infos:
            infos["final_observation"] = self._shown(infos.pop("final_obs"))
            infos["_final_observation"] = infos.pop("_final_obs")
        listed = list_of_dicts(infos)
        for index, info in enumerate(listed):
            _unfold(info)
            if "final_info" in info:
                _unfold(info["final_info"])
            info["active_masks"] = active[index]
            if masks is not None:
                info["action_masks"] = masks[index]
        return listed

    def random_action(self, infos: Sequence[dict[str, Any]] | None = None) -> Array:
        """Random actions ``[n, A, ...]`` (``[n, A, 1]`` for ``Discrete``); of those that ``infos`` allow, if given."""
        space = self.action_space
        shape = (self.env_num, self.agent_num)
        if not isinstance(space, spaces.Discrete):
            return np.stack([[space.sample() for _ in range(shape[1])] for _ in range(shape[0])])
        actions = np.empty((*shape, 1), np.int64)
        for row, agent in np.ndindex(shape):
            allowed = None if infos is None or "action_masks" not in infos[row] else infos[row]["action_masks"][agent]
            options = np.arange(int(space.n)) if allowed is None else np.flatnonzero(allowed)
            actions[row, agent, 0] = int(space.start) + self._random.choice(options)
        return actions

    # -- pictures ---------------------------------------------------------------------------------------------------

    def render(self, mode: str | None = None) -> Any:
        """Frames of the environments, each as its own ``render_mode`` says.

        Args:
            mode: ``"rgb_array"``, ``"group_rgb_array"``: one image of all, tiled; ``"single_rgb_array"``: that of
                environment 0; ``"human"``, ``"group_human"``, ``"single_human"``: nothing is returned, environments made
                with ``render_mode="human"`` draw themselves; ``None``: as the view's ``render_mode``, or tiled.
        """
        if mode is None:
            mode = self.render_mode if self.render_mode in RENDER_MODES else "rgb_array"
        if mode not in RENDER_MODES:
            raise ValueError(f"render mode must be one of {RENDER_MODES} or None, got {mode!r}")
        frames = self.envs.render()
        if mode.endswith("human") or frames is None or frames[0] is None:
            return None
        return frames[0] if mode.startswith("single") else _tiled([np.asarray(frame) for frame in frames])

    # -- the environments -------------------------------------------------------------------------------------------

    def env_is_wrapped(self, wrapper_class: type[Any], indices: int | Sequence[int] | None = None) -> list[bool]:
        """Whether each environment has a wrapper of this class, or of one derived from it."""
        chosen = [indices] if isinstance(indices, (int, np.integer)) else indices
        answers = self.envs.exec_func(has_wrapper, chosen, class_name(wrapper_class))
        return [answers[index] for index in (range(self.env_num) if chosen is None else chosen)]

    def seed(self, seed: int | None = None) -> None:
        """Nothing, as in OpenRL: seeds are given to :meth:`reset`."""

    # -- what can be looked at, and the end -------------------------------------------------------------------------

    if TYPE_CHECKING:  # what is forwarded

        def __getattr__(self, name: str) -> Any: ...

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
    """What failed, as OpenRL's queue gives it: oldest first, each once."""

    def __init__(self, envs: Any) -> None:
        self._envs = envs
        self._last: Any = None

    def _new(self) -> list[Any]:
        records = list(self._envs.errors)
        known = [index for index, record in enumerate(records) if record is self._last]
        return records[known[0] + 1 :] if known else records

    def get(self, block: bool = False, timeout: float | None = None) -> tuple[int | None, type[Any], BaseException]:
        """``(index of the environment, class, exception)`` of the next failure.

        Raises:
            queue.Empty: There is none; this never waits, whatever the arguments.
        """
        new = self._new()
        if not new:
            raise queue.Empty
        self._last = new[0]
        return new[0].env, type(new[0].error), new[0].error

    get_nowait = get

    def empty(self) -> bool:
        """Whether every failure was given already."""
        return not self._new()

    def qsize(self) -> int:
        """How many failures were not given yet."""
        return len(self._new())


def _values(env: AgentsEnv) -> int:
    return int(getattr(env.env, "values", 4))


def _one_hot(space: spaces.Space[Any], obs: Any) -> Any:
    if isinstance(space, spaces.Discrete):  # (padding need not lie in the space)
        return (np.arange(space.start, space.start + space.n) == np.asarray(obs)[..., None]).astype(space.dtype)
    return obs


def _unfold(info: dict[str, Any]) -> None:
    """Put infos of the environment beside the others, with Python's numbers as such."""
    for key, value in info.pop("common", {}).items():
        plain = isinstance(value, np.generic) and value.dtype.char in "?ld"
        info.setdefault(key, value.item() if plain else value)


def _tiled(frames: Sequence[Array]) -> Array:
    """Frames of one shape ``[h, w, c]`` in a grid that is as square as can be, black where there is none."""
    rows = math.ceil(math.sqrt(len(frames)))
    columns = math.ceil(len(frames) / rows)
    height, width, *channels = frames[0].shape
    grid = np.zeros((rows * columns, height, width, *channels), frames[0].dtype)
    grid[: len(frames)] = frames
    return grid.reshape(rows, columns, height, width, *channels).swapaxes(1, 2).reshape(rows * height, -1, *channels)
