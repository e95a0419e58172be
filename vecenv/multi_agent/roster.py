"""The agents of an environment, their spaces and their layout in a batch, and checks of actions against these.

The caller reads a :class:`Roster` once, from one environment. Workers receive it and compare each environment with it.
Both sides derive the same observation space from it: one ``Dict`` of fixed size, so that the engine can treat the
environment as an ordinary one, with the data of all agents in shared memory.

A layout is a list of parts. Each part is an :class:`AgentGroup`: agents with equal spaces. ``"stack"`` has one part,
without a key; ``"agents"`` has one part per agent, without an axis of agents; ``"groups"`` has one part per group.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import batch_space

from vecenv.errors import envs_text
from vecenv.shm import Tree, fixed_tree
from vecenv.shm.layout import Array, Leaf

FLAGS: Final = ("terminations", "truncations", "agent_mask", "transition_mask", "alive")
"""The flags in the rows of ``"signals"`` after the rewards, in this order, as 0 and 1; each column is an agent."""


@dataclass(frozen=True, slots=True)
class AgentGroup:
    """Agents that share one array.

    Attributes:
        key: The key in the batch's dict, ``None`` for the only part of ``"stack"``.
        agents: The indices of the agents.
        has_axis: True if the array has an axis of agents.
        observation_space, action_space: The spaces of one agent.
    """

    key: Any
    agents: tuple[int, ...]
    has_axis: bool
    observation_space: Space[Any]
    action_space: Space[Any]

    def stack_space(self, space: Space[Any]) -> Space[Any]:
        """Return the space of all agents of this part in one environment."""
        return batch_space(space, len(self.agents)) if self.has_axis else space


@dataclass(frozen=True)
class Roster:
    """The agents of every environment of a vector, and their layout.

    Attributes:
        agents: ``possible_agents``; the index of an agent is its position here.
        observation_spaces, action_spaces: One per agent.
        parts: The layout.
        layout: ``"stack"``, ``"agents"`` or ``"groups"``.
        state_space: The space of ``env.state()`` if the state is requested, else ``None``.
        pad_value: The value in observations of missing agents.
        any_end: True if an episode ends as soon as one agent ends (``episode_end="any"``).
        info_masks: True if action masks in the agents' infos are converted to bool arrays.
    """

    agents: tuple[Any, ...]
    observation_spaces: tuple[Space[Any], ...]
    action_spaces: tuple[Space[Any], ...]
    parts: tuple[AgentGroup, ...]
    layout: Literal["stack", "agents", "groups"]
    state_space: Space[Any] | None
    pad_value: float
    any_end: bool
    info_masks: bool

    def observation_space(self) -> Space[Any]:
        """Return the space of one environment's observation: observations, rewards, flags and masks of all agents."""
        count = len(self.agents)
        row: dict[str, Space[Any]] = {
            "obs": self._join([part.stack_space(part.observation_space) for part in self.parts]),
            "signals": spaces.Box(-np.inf, np.inf, (1 + len(FLAGS), count), np.float64),
        }
        if self.state_space is not None:
            row["state"] = self.state_space
        return spaces.Dict(OrderedDict(row))

    def action_space(self) -> Space[Any]:
        """Return the space of one environment's action, with the actions of all agents."""
        return self._join([part.stack_space(part.action_space) for part in self.parts])

    def _join(self, part_spaces: Sequence[Space[Any]]) -> Space[Any]:
        if self.layout == "stack":
            return part_spaces[0]
        return spaces.Dict(OrderedDict((part.key, space) for part, space in zip(self.parts, part_spaces, strict=True)))

    def places(self) -> list[tuple[AgentGroup, int]]:
        """Return (part, position in it) for every agent, in the order of agents."""
        found = {index: (part, place) for part in self.parts for place, index in enumerate(part.agents)}
        return [found[index] for index in sorted(found)]

    def problems(self, env: Any) -> list[str]:
        """Describe the differences between the agents and spaces of ``env`` and those of the roster."""
        try:
            agents = read_agents(env)
        except (TypeError, ValueError) as error:
            return [str(error)]
        if agents != self.agents:
            missing = [agent for agent in self.agents if agent not in agents]
            extra = [agent for agent in agents if agent not in self.agents]
            detail = f" (missing {missing}, unexpected {extra})" if missing or extra else " (in another order)"
            return [f"possible_agents are {list(agents)}{detail}, those of env 0 are {list(self.agents)}"]
        found = []
        for index, agent in enumerate(self.agents):
            for name, expected in (("observation_space", self.observation_spaces), ("action_space", self.action_spaces)):
                space = getattr(env, name)(agent)
                if space != expected[index]:
                    found.append(f"agent {agent!r}: {name} is {space}, that of env 0 is {expected[index]}")
        if self.state_space is not None and getattr(env, "state_space", None) != self.state_space:
            found.append(f"state_space is {getattr(env, 'state_space', None)}, that of env 0 is {self.state_space}")
        return found


def read_agents(env: Any) -> tuple[Any, ...]:
    """Return ``possible_agents`` of a parallel environment.

    Raises:
        TypeError: ``env`` has none, or is turn based.
        ValueError: The list is empty, or names an agent twice.
    """
    agents = getattr(env, "possible_agents", None)
    if agents is None:
        raise TypeError(
            f"{env!r} has no `possible_agents`: MultiAgentVecEnv needs PettingZoo parallel environments (or environments "
            "with `agent_num`, RLlib's or Gymnasium's); convert turn-based ones with vecenv.multi_agent.from_aec"
        )
    if hasattr(type(env), "agent_iter"):  # the class, because adapters forward attributes
        raise TypeError(f"{env!r} is turn based (AEC): write vecenv.multi_agent.from_aec(env), or use its parallel_env()")
    agents = tuple(agents)
    if not agents or len(set(agents)) != len(agents):
        raise ValueError(f"{env!r}: `possible_agents` must name at least one agent and none twice, got {list(agents)}")
    return agents


def read_roster(
    env: Any, layout: Any, *, state: bool, pad_value: float, episode_end: str, action_mask: str | None
) -> Roster:
    """Read the roster of ``env``, in the requested layout.

    Raises:
        TypeError: ``env`` is not a parallel environment, or a space has no fixed size.
        ValueError: ``possible_agents`` is empty or names an agent twice, the layout does not fit the agents or their spaces,
            or another option has an invalid value.
    """
    for name, value, accepted in (
        ("episode_end", episode_end, ("all", "any")),
        ("action_mask", action_mask, ("auto", None)),
    ):
        if value not in accepted:
            raise ValueError(f"`{name}` must be one of {accepted}, got {value!r}")
    agents = read_agents(env)
    observation_spaces = tuple(env.observation_space(agent) for agent in agents)
    action_spaces = tuple(env.action_space(agent) for agent in agents)
    for name, agent_spaces in (("observation", observation_spaces), ("action", action_spaces)):
        for agent, space in zip(agents, agent_spaces, strict=True):
            _check_fixed(space, f"agent {agent!r}: {name} space")
    state_space = None
    if state:
        state_space = getattr(env, "state_space", None)
        if state_space is None:
            raise ValueError(f"state=True, but {env!r} has no `state_space`")
        _check_fixed(state_space, "state space")
    kind, parts = _build_layout(layout, agents, observation_spaces, action_spaces)
    roster = Roster(
        agents, observation_spaces, action_spaces, parts, kind, state_space, pad_value,
        any_end=episode_end == "any", info_masks=action_mask == "auto",
    )  # fmt: skip
    _check_pad_value(roster)
    return roster


def _check_fixed(space: Any, name: str) -> None:
    if fixed_tree(space) is None:
        raise TypeError(f"{name}: {space} has no fixed size; use Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple")


def _check_pad_value(roster: Roster) -> None:
    for agent, space in zip(roster.agents, roster.observation_spaces, strict=True):
        tree = fixed_tree(space)
        for leaf in tree.leaves() if tree is not None else ():
            with np.errstate(all="ignore"):
                cast = np.asarray(roster.pad_value).astype(leaf.dtype)
            if not np.array_equal(cast, np.asarray(roster.pad_value), equal_nan=True) and leaf.dtype.kind != "f":
                raise ValueError(
                    f"pad_value {roster.pad_value} cannot be represented as {leaf.dtype}, the dtype of {leaf.name} of agent "
                    f"{agent!r}"
                )


def _build_layout(
    layout: Any, agents: tuple[Any, ...], observation_spaces: tuple[Space[Any], ...], action_spaces: tuple[Space[Any], ...]
) -> tuple[Literal["stack", "agents", "groups"], tuple[AgentGroup, ...]]:
    pairs = list(zip(observation_spaces, action_spaces, strict=True))

    def build_group(key: Any, indices: tuple[int, ...], name: str) -> AgentGroup:
        """Return a group of these agents; raise ``ValueError`` if their spaces differ."""
        first = indices[0]
        for index in indices:
            for kind, agent_spaces in (("observation", observation_spaces), ("action", action_spaces)):
                if agent_spaces[index] != agent_spaces[first]:
                    raise ValueError(
                        f"{name} needs equal spaces, but the {kind} space of agent {agents[index]!r} is "
                        f"{agent_spaces[index]}, and that of agent {agents[first]!r} is {agent_spaces[first]}"
                    )
        return AgentGroup(key, indices, True, *pairs[first])

    if isinstance(layout, Mapping):
        _require_partition(layout, agents)
        groups = {key: tuple(agents.index(agent) for agent in members) for key, members in layout.items()}
        return "groups", tuple(build_group(key, indices, f"group {key!r}") for key, indices in groups.items())
    if layout not in ("auto", "stack", "agents"):
        raise ValueError(f"`layout` must be 'auto', 'stack', 'agents' or a dict of group -> agents, got {layout!r}")
    if layout == "agents" or (layout == "auto" and any(pair != pairs[0] for pair in pairs)):
        return "agents", tuple(AgentGroup(agent, (i,), False, *pairs[i]) for i, agent in enumerate(agents))
    try:
        return "stack", (build_group(None, tuple(range(len(agents))), "layout='stack'"),)
    except ValueError as error:
        raise ValueError(
            f"{error}. Alternatives: layout='agents' (a dict of agents), groups with equal spaces "
            f"(layout={_group_by_spaces(agents, pairs)}), or environments that pad their spaces"
        ) from None


def _require_partition(layout: Mapping[Any, Any], agents: tuple[Any, ...]) -> None:
    named = [agent for members in layout.values() for agent in members]
    unknown = [agent for agent in named if agent not in agents]
    missing = [agent for agent in agents if agent not in named]
    twice = sorted({str(agent) for agent in named if named.count(agent) > 1})
    if unknown or missing or twice or not all(len(members) for members in layout.values()):
        raise ValueError(
            "a layout of groups must name every agent once and no group may be empty: "
            f"unknown {unknown}, missing {missing}, named twice {twice}; possible_agents are {list(agents)}"
        )


def _group_by_spaces(agents: Sequence[Any], pairs: Sequence[Any]) -> dict[str, list[Any]]:
    """Group agents with equal spaces."""
    groups: list[list[int]] = []
    for index, pair in enumerate(pairs):
        matching = [members for members in groups if pairs[members[0]] == pair]
        if matching:
            matching[0].append(index)
        else:
            groups.append([index])
    return {f"group_{number}": [agents[index] for index in members] for number, members in enumerate(groups)}


def build_tree(space: Space[Any], name: str) -> Tree:
    """Return the tree of a space that is known to have a fixed size."""
    tree = fixed_tree(space, name)
    assert tree is not None
    return tree


def map_space(function: Callable[[Space[Any], Any], Any], space: Space[Any], value: Any) -> Any:
    """Apply ``function(space, part)`` to every leaf of a value of nested Dict and Tuple spaces."""
    if isinstance(space, spaces.Dict):
        return {key: map_space(function, inner, value[key]) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map_space(function, inner, part) for inner, part in zip(space.spaces, value, strict=True))
    return function(space, value)


def zeros(tree: Tree, *axes: int) -> Any:
    """Return zeros in the tree's structure, with ``axes`` in front of the shape of each leaf."""
    return tree.build(iter([np.zeros((*axes, *leaf.shape), leaf.dtype) for leaf in tree.leaves()]))


def env_name(env: Any) -> str:
    """Return ``env.env_name``, else the name in its metadata, the id of its spec, or its class (never an adapter's)."""
    bare = getattr(env, "unwrapped", env)
    name = getattr(env, "env_name", None) or (getattr(env, "metadata", None) or {}).get("name")
    spec = getattr(env, "spec", None) or getattr(bare, "spec", None)
    return str(name or getattr(spec, "id", None) or type(bare).__name__)


_ACCEPTED_KINDS: Final = {"i": "biu", "u": "biu", "b": "biu", "f": "biuf"}
"""The dtype kinds that actions may have, by the dtype kind of their space."""


class AgentActionConverter:
    """A converter that checks batches of actions against a roster and puts them into the engine's format.

    Environments get the caller's actions unchanged, except that integers are cast to the integer type of their space if
    all of them fit, and ``[n, A, 1]`` for ``Discrete`` becomes ``[n, A]``. Actions that a dict omits are zeros.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._parts = [(part, build_tree(part.action_space, "actions")) for part in roster.parts]

    def convert(self, actions: Any, rows: Array, acting: Array) -> Any:
        """Return the actions of environments ``rows`` in the engine's format.

        Args:
            actions: Actions in the layout of the roster.
            rows: Environment indices, in the order of the batch.
            acting: The agents that must act, bool, for all environments and agents of the vector environment.

        Raises:
            ValueError, TypeError: An action is missing, a key is unknown, or a structure, shape or dtype is wrong.
        """
        count, keys = len(rows), [part.key for part, _ in self._parts]
        if self._roster.layout == "stack":
            part, tree = self._parts[0]
            try:
                return map_checked(_make_check(count, len(part.agents)), actions, tree, "actions")
            except ValueError:
                if not _holds_dicts(actions) or tree.leaf is None:
                    raise
                shape = (count, len(part.agents), *tree.leaf.shape)
                raise ValueError(
                    f"actions: got dicts, but layout 'stack' takes an array [env, agent] of shape {shape}, with agents in "
                    "the order of envs.possible_agents; layout='agents' takes a dict; nothing was sent"
                ) from None
        if not isinstance(actions, Mapping):
            raise TypeError(f"actions: got {type(actions).__name__}, expected a dict with {keys}; nothing was sent")
        if unknown := [key for key in actions if key not in keys]:
            raise ValueError(f"actions: unknown keys {unknown}, expected {keys}; nothing was sent")
        missing = [index for part, _ in self._parts if part.key not in actions for index in part.agents]
        envs_by_agent = {self._roster.agents[index]: rows[acting[rows, index]].tolist() for index in missing}
        if texts := [f"agent {agent!r} in {envs_text(envs)}" for agent, envs in envs_by_agent.items() if envs]:
            raise ValueError(f"actions of agents that must act are missing: {'; '.join(texts)}; nothing was sent")
        out = {}
        for part, tree in self._parts:
            axes = (count, len(part.agents)) if part.has_axis else (count,)
            if part.key in actions:
                out[part.key] = map_checked(_make_check(*axes), actions[part.key], tree, f"actions[{part.key!r}]")
            else:
                out[part.key] = zeros(tree, *axes)
        return out


def _holds_dicts(actions: Any) -> bool:
    return isinstance(actions[0] if isinstance(actions, (list, tuple)) and actions else actions, Mapping)


def map_checked(function: Callable[[Any, Leaf, str], Array], value: Any, tree: Tree, name: str) -> Any:
    """Apply ``function(value, leaf, name)`` to every leaf of the caller's value.

    Raises:
        ValueError: The value does not have the tree's structure.
    """
    if tree.leaf is not None:
        return function(value, tree.leaf, name)
    keys = [key for key, _ in tree.children]
    if tree.keyed:
        if not isinstance(value, Mapping) or set(value) != set(keys):
            got = f"a dict with {list(value)}" if isinstance(value, Mapping) else type(value).__name__
            raise ValueError(f"{name}: got {got}, expected a dict with {keys}; nothing was sent")
    elif not isinstance(value, tuple) or len(value) != len(keys):
        raise ValueError(f"{name}: got {type(value).__name__}, expected a tuple of {len(keys)}; nothing was sent")
    parts = {key: map_checked(function, value[key], child, f"{name}[{key!r}]") for key, child in tree.children}
    return parts if tree.keyed else tuple(parts.values())


def _make_check(*axes: int) -> Callable[[Any, Leaf, str], Array]:
    """Return a function that checks and converts one leaf of a batch with these axes in front."""

    def check(value: Any, leaf: Leaf, name: str) -> Array:
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}; nothing was sent") from error
        expected = (*axes, *leaf.shape)
        if not leaf.shape and array.shape == (*axes, 1):
            array = array.reshape(axes)
        if array.shape != expected:
            raise ValueError(f"{name}: got shape {array.shape}, expected {expected}; nothing was sent")
        if array.dtype.kind not in _ACCEPTED_KINDS[leaf.dtype.kind]:
            raise TypeError(f"{name}: got {array.dtype}, expected {leaf.dtype}; nothing was sent")
        if leaf.dtype.kind in "iu" and array.dtype != leaf.dtype:
            cast = array.astype(leaf.dtype)
            return cast if np.array_equal(cast, array) else array
        return array

    return check
