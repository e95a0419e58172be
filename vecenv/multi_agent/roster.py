"""Who plays and what it looks like: the agents of an environment, their spaces, and how they are laid out in a batch.

A :class:`Roster` is read once, from one environment, by the caller. It travels to every worker, where each environment is
held against it, and both sides derive the same row from it: one ``Dict`` space of fixed size, so that the engine sees an
ordinary environment and everything of all agents lies in shared memory.

The three layouts are one: a layout is a list of :class:`Part`, each some agents with equal spaces. ``"stack"`` is one part
without a key; ``"agents"`` a part an agent, without an axis; groups a part a group.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import batch_space

from vecenv.shm import Tree, fixed_tree

__all__ = ["FLAGS", "Part", "Roster", "env_name", "read_roster"]

FLAGS: Final = ("terminations", "truncations", "agent_mask", "transition_mask")
"""What follows the rewards in the lines of ``"signals"``, as 0 and 1; a column is an agent."""


@dataclass(frozen=True, slots=True)
class Part:
    """Agents that share one array.

    Attributes:
        key: Name in the batch's dict, ``None`` for the only part of ``"stack"``.
        agents: Their indices.
        axis: Whether the array has an axis of agents.
        observation_space, action_space: Of one agent.
    """

    key: Any
    agents: tuple[int, ...]
    axis: bool
    observation_space: Space[Any]
    action_space: Space[Any]

    def widened(self, space: Space[Any]) -> Space[Any]:
        """The space of all agents of this part in one environment."""
        return batch_space(space, len(self.agents)) if self.axis else space


@dataclass(frozen=True)
class Roster:
    """The agents of every environment of one vector, and their layout.

    Attributes:
        agents: ``possible_agents``; the index of an agent is its place here.
        observation_spaces, action_spaces: One an agent.
        parts: The layout.
        layout: ``"stack"``, ``"agents"`` or ``"groups"``.
        state_space: Space of ``env.state()`` where the state is wanted, else ``None``.
        pad_value: Fills the observations of agents that are not there.
        any_end: The episode ends with the first agent (``episode_end="any"``).
        info_masks: Action masks are taken out of the agents' infos.
    """

    agents: tuple[Any, ...]
    observation_spaces: tuple[Space[Any], ...]
    action_spaces: tuple[Space[Any], ...]
    parts: tuple[Part, ...]
    layout: Literal["stack", "agents", "groups"]
    state_space: Space[Any] | None
    pad_value: float
    any_end: bool
    info_masks: bool

    def observation_space(self) -> Space[Any]:
        """One environment's observation: what the agents see, and what became of them."""
        count = len(self.agents)
        row: dict[str, Space[Any]] = {
            "obs": self._joined([part.widened(part.observation_space) for part in self.parts]),
            "signals": spaces.Box(-np.inf, np.inf, (1 + len(FLAGS), count), np.float64),
        }
        if self.state_space is not None:
            row["state"] = self.state_space
        return spaces.Dict(OrderedDict(row))

    def action_space(self) -> Space[Any]:
        """One environment's action: those of all agents."""
        return self._joined([part.widened(part.action_space) for part in self.parts])

    def _joined(self, each: Sequence[Space[Any]]) -> Space[Any]:
        if self.layout == "stack":
            return each[0]
        return spaces.Dict(OrderedDict((part.key, space) for part, space in zip(self.parts, each, strict=True)))

    def places(self) -> list[tuple[Part, int]]:
        """(part, place in it) of every agent, in the order of agents."""
        found = {index: (part, place) for part in self.parts for place, index in enumerate(part.agents)}
        return [found[index] for index in sorted(found)]

    def has_observed_mask(self) -> list[bool]:
        """Which agents have an ``"action_mask"`` in their observations."""
        return [isinstance(space, spaces.Dict) and "action_mask" in space.spaces for space in self.observation_spaces]

    def problems(self, env: Any) -> list[str]:
        """How the agents and spaces of ``env`` differ from these."""
        try:
            agents = agents_of(env)
        except (TypeError, ValueError) as error:
            return [str(error)]
        if agents != self.agents:
            missing = [agent for agent in self.agents if agent not in agents]
            extra = [agent for agent in agents if agent not in self.agents]
            detail = f" (without {missing}, and with {extra})" if missing or extra else " (in another order)"
            return [f"possible_agents are {list(agents)}{detail}, those of env 0 are {list(self.agents)}"]
        found = []
        for index, agent in enumerate(self.agents):
            for name, mine in (("observation_space", self.observation_spaces), ("action_space", self.action_spaces)):
                space = getattr(env, name)(agent)
                if space != mine[index]:
                    found.append(f"agent {agent!r}: {name} is {space}, that of env 0 is {mine[index]}")
        if self.state_space is not None and getattr(env, "state_space", None) != self.state_space:
            found.append(f"state_space is {getattr(env, 'state_space', None)}, that of env 0 is {self.state_space}")
        return found


def agents_of(env: Any) -> tuple[Any, ...]:
    """``possible_agents`` of a parallel environment.

    Raises:
        TypeError: It has none.
        ValueError: It is empty, or names an agent twice.
    """
    agents = getattr(env, "possible_agents", None)
    if agents is None:
        raise TypeError(
            f"{env!r} has no `possible_agents`: MultiAgentVecEnv needs PettingZoo parallel environments (or environments "
            "with `agent_num`, or Gymnasium's); turn-based ones go through vecenv.multi_agent.from_aec"
        )
    agents = tuple(agents)
    if not agents or len(set(agents)) != len(agents):
        raise ValueError(f"{env!r}: `possible_agents` must name at least one agent and none twice, got {list(agents)}")
    return agents


def read_roster(
    env: Any, layout: Any, *, state: bool, pad_value: float, episode_end: str, action_mask: str | None
) -> Roster:
    """The roster of ``env``, laid out as asked.

    Raises:
        TypeError: It is no parallel environment, or a space has no fixed size.
        ValueError: The layout does not fit the agents or their spaces; or another option has no meaning.
    """
    for name, value, accepted in (
        ("episode_end", episode_end, ("all", "any")),
        ("action_mask", action_mask, ("auto", None)),
    ):
        if value not in accepted:
            raise ValueError(f"`{name}` must be one of {accepted}, got {value!r}")
    agents = agents_of(env)
    observed = tuple(env.observation_space(agent) for agent in agents)
    acted = tuple(env.action_space(agent) for agent in agents)
    for name, each in (("observation", observed), ("action", acted)):
        for agent, space in zip(agents, each, strict=True):
            _check_fixed(space, f"agent {agent!r}: {name} space")
    state_space = None
    if state:
        state_space = getattr(env, "state_space", None)
        if state_space is None:
            raise ValueError(f"state=True, but {env!r} has no `state_space`")
        _check_fixed(state_space, "state space")
    kind, parts = _layout(layout, agents, observed, acted)
    roster = Roster(
        agents, observed, acted, parts, kind, state_space, pad_value, episode_end == "any", action_mask == "auto"
    )
    _check_pad(roster)
    return roster


def _check_fixed(space: Any, what: str) -> None:
    if fixed_tree(space) is None:
        raise TypeError(f"{what}: {space} has no fixed size; use Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple")


def _check_pad(roster: Roster) -> None:
    for agent, space in zip(roster.agents, roster.observation_spaces, strict=True):
        tree = fixed_tree(space)
        for leaf in tree.leaves() if tree is not None else ():
            with np.errstate(all="ignore"):
                cast = np.asarray(roster.pad_value).astype(leaf.dtype)
            if not np.array_equal(cast, np.asarray(roster.pad_value), equal_nan=True) and leaf.dtype.kind != "f":
                raise ValueError(
                    f"pad_value {roster.pad_value} is no {leaf.dtype}: {leaf.name} of agent {agent!r} needs one"
                )


def _layout(
    layout: Any, agents: tuple[Any, ...], observed: tuple[Space[Any], ...], acted: tuple[Space[Any], ...]
) -> tuple[Literal["stack", "agents", "groups"], tuple[Part, ...]]:
    everyone = tuple(range(len(agents)))
    odd = _first_unequal(everyone, observed, acted)
    if isinstance(layout, Mapping):
        return "groups", _groups(layout, agents, observed, acted)
    if layout not in ("auto", "stack", "agents"):
        raise ValueError(f"`layout` must be 'auto', 'stack', 'agents' or a dict of group -> agents, got {layout!r}")
    if layout == "stack" and odd is not None:
        raise ValueError(
            f"layout='stack' needs equal spaces, and {_difference(odd, 0, agents, observed, acted)}. What fits: "
            f"layout='agents' (a dict of agents), groups with equal spaces (layout={_advice(agents, observed, acted)}), or "
            "environments that pad their spaces"
        )
    if layout == "stack" or (layout == "auto" and odd is None):
        return "stack", (Part(None, everyone, True, observed[0], acted[0]),)
    return "agents", tuple(Part(agents[i], (i,), False, observed[i], acted[i]) for i in everyone)


def _groups(
    layout: Mapping[Any, Any], agents: tuple[Any, ...], observed: tuple[Space[Any], ...], acted: tuple[Space[Any], ...]
) -> tuple[Part, ...]:
    named = [agent for members in layout.values() for agent in members]
    unknown = [agent for agent in named if agent not in agents]
    missing = [agent for agent in agents if agent not in named]
    twice = sorted({str(agent) for agent in named if named.count(agent) > 1})
    if unknown or missing or twice or not all(len(members) for members in layout.values()):
        raise ValueError(
            "a layout of groups must name every agent once and no group may be empty: "
            f"unknown {unknown}, missing {missing}, named twice {twice}; possible_agents are {list(agents)}"
        )
    parts = []
    for key, members in layout.items():
        indices = tuple(agents.index(agent) for agent in members)
        odd = _first_unequal(indices, observed, acted)
        if odd is not None:
            raise ValueError(
                f"group {key!r} needs equal spaces, and {_difference(odd, indices[0], agents, observed, acted)}"
            )
        parts.append(Part(key, indices, True, observed[indices[0]], acted[indices[0]]))
    return tuple(parts)


def _first_unequal(indices: Sequence[int], observed: Sequence[Space[Any]], acted: Sequence[Space[Any]]) -> int | None:
    first = indices[0]
    for index in indices:
        if observed[index] != observed[first] or acted[index] != acted[first]:
            return index
    return None


def _difference(
    index: int, first: int, agents: Sequence[Any], observed: Sequence[Space[Any]], acted: Sequence[Space[Any]]
) -> str:
    name, each = ("observation", observed) if observed[index] != observed[first] else ("action", acted)
    return f"the {name} space of agent {agents[index]!r} is {each[index]}, that of agent {agents[first]!r} is {each[first]}"


def _advice(agents: Sequence[Any], observed: Sequence[Space[Any]], acted: Sequence[Space[Any]]) -> str:
    """Groups with equal spaces, as text for an error."""
    groups: list[list[int]] = []
    for index in range(len(agents)):
        for members in groups:
            if observed[members[0]] == observed[index] and acted[members[0]] == acted[index]:
                members.append(index)
                break
        else:
            groups.append([index])
    return str({f"group_{number}": [agents[index] for index in members] for number, members in enumerate(groups)})


def tree_of(space: Space[Any], name: str) -> Tree:
    """The tree of a space that is known to have a fixed size."""
    tree = fixed_tree(space, name)
    assert tree is not None
    return tree


def env_name(env: Any) -> str:
    """``env.env_name``, else the name in its metadata, else the id of its spec, else its class (never an adapter's)."""
    bare = getattr(env, "unwrapped", env)
    name = getattr(env, "env_name", None) or (getattr(env, "metadata", None) or {}).get("name")
    spec = getattr(env, "spec", None) or getattr(bare, "spec", None)
    return str(name or getattr(spec, "id", None) or type(bare).__name__)
