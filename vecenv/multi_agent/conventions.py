"""Environments of other conventions, adapted to PettingZoo's parallel interface.

* :func:`from_aec`: turn-based games (PettingZoo's AEC interface);
* :class:`StackedAgents`: environments with ``agent_num`` and arrays with an axis of agents instead of dicts;
* :class:`RLlibGame`: RLlib's ``MultiAgentEnv``;
* :class:`OneAgent`: Gymnasium environments.

So the rest of the package knows one convention. None of them needs PettingZoo or RLlib to be installed; PettingZoo is
imported only to convert a parallelizable AEC game.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces

__all__ = ["ALL", "MASK_KEYS", "Adapted", "OneAgent", "RLlibGame", "StackedAgents", "TurnBased", "as_parallel", "from_aec"]

ALL: Final = "__all__"
"""The key of RLlib's flags that are about all agents."""

Step: TypeAlias = tuple[Any, Any, Any, Any, Any]

MASK_KEYS: Final = ("action_mask", "action_masks")
"""Keys of an info that hold an action mask."""


def as_parallel(env: Any) -> Any:
    """``env`` itself if it is parallel, adapted if it is RLlib's, follows ``agent_num``, or is a Gymnasium environment."""
    inner = getattr(env, "unwrapped", env)
    has_methods = [callable(getattr(inner, name, None)) for name in ("get_observation_space", "observation_space")]
    if has_methods == [True, False]:
        return RLlibGame(env)
    if getattr(env, "possible_agents", None) is not None:
        return env
    if _agent_num(env):
        return StackedAgents(env)
    return OneAgent(env) if isinstance(env, gymnasium.Env) else env


def _agent_num(env: Any) -> int:
    value = getattr(env, "agent_num", 0)
    return max(int(value), 0) if isinstance(value, (int, np.integer)) else 0


def from_aec(env: Any) -> Any:
    """A parallel environment of a PettingZoo AEC environment.

    If ``env.metadata["is_parallelizable"]`` is true it is PettingZoo's own ``aec_to_parallel``; every other game is treated
    as turn based (:class:`TurnBased`).
    """
    if env.metadata.get("is_parallelizable", False):
        from pettingzoo.utils.conversions import aec_to_parallel

        return aec_to_parallel(env)
    return TurnBased(env)


class Adapted:
    """What all adapted environments share: the environment is ``env``, and every agent has its spaces."""

    agents: Any = ()

    def __init__(self, env: Any, possible_agents: Any) -> None:
        self.env = env
        self.possible_agents = list(possible_agents)
        self.metadata = getattr(env, "metadata", None) or {}
        self.render_mode = getattr(env, "render_mode", None)
        self.spec = getattr(env, "spec", None)
        if (space := getattr(env, "state_space", None)) is not None:
            self.state_space = space

    @property
    def unwrapped(self) -> Any:
        """The environment without its wrappers."""
        return getattr(self.env, "unwrapped", self.env)

    def observation_space(self, agent: Any) -> Any:
        """The observation space of one agent."""
        return self._space("observation_space", agent)

    def action_space(self, agent: Any) -> Any:
        """The action space of one agent."""
        return self._space("action_space", agent)

    def _space(self, name: str, agent: Any) -> Any:
        """A space of the environment's: one for all agents, or by a method that RLlib calls ``get_...``."""
        found = getattr(self.unwrapped, f"get_{name}", None) or getattr(self.env, name)
        return found(agent) if callable(found) else found

    def _stepped(self, observations: Any, rewards: Any, terminations: Any, truncations: Any, infos: Any) -> Step:
        """What ``step`` returns; agents whose flags are set leave ``agents``."""
        self.agents = [one for one in self.agents if not (terminations.get(one, False) or truncations.get(one, False))]
        return observations, rewards, terminations, truncations, infos

    def render(self) -> Any:
        """The environment's frame."""
        return self.env.render()

    def state(self) -> Any:
        """The environment's global state."""
        return self.env.state()

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.env})"


class TurnBased(Adapted):
    """A turn-based game: every step is one agent's move.

    ``agents_to_act`` holds the agent whose turn it is; in ``MultiAgentVecEnv`` its row alone is True in ``agent_mask``, and
    after its move in ``transition_mask``. Every step gives observations and rewards for all agents, so the reward of an
    agent that did not move (because it lost by another agent's move, say) stands in a row whose ``transition_mask`` is
    False: it belongs to that agent's last move.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env, env.possible_agents)

    @property
    def agents(self) -> list[Any]:
        """The agents that are still in the game."""
        game = self.env
        return [agent for agent in game.agents if not (game.terminations[agent] or game.truncations[agent])]

    @property
    def agents_to_act(self) -> tuple[Any, ...]:
        """The agent whose turn it is; empty before the first reset."""
        return (self.env.agent_selection,) if getattr(self.env, "agents", None) else ()

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Start a game; returns the observations and infos of all agents."""
        self.env.reset(seed=seed, options=options)
        self._skip_dead_agents()
        return {agent: self.env.observe(agent) for agent in self.agents}, dict(self.env.infos)

    def step(self, actions: Mapping[Any, Any]) -> Step:
        """Make one move; returns what it brought each agent that was in the game."""
        game = self.env
        before, mover = list(game.agents), game.agent_selection
        if mover not in actions:
            raise ValueError(f"it is the turn of agent {mover!r}, and there is no action of it")
        game.step(actions[mover])
        after = [*before, *(agent for agent in game.agents if agent not in before)]
        rewards, terminations, truncations, infos = (
            {agent: values[agent] for agent in after if agent in values}
            for values in (game.rewards, game.terminations, game.truncations, game.infos)
        )
        observations = {agent: game.observe(agent) for agent in after if agent in game.agents}
        self._skip_dead_agents()
        return observations, rewards, terminations, truncations, infos

    def _skip_dead_agents(self) -> None:
        """AEC games expect one more step, with no action, from an agent whose episode has ended."""
        game = self.env
        while game.agents and (game.terminations[game.agent_selection] or game.truncations[game.agent_selection]):
            game.step(None)


class StackedAgents(Adapted):
    """An environment with ``agent_num``: ``A`` agents with one space, arrays with an axis of agents.

    Its ``reset`` returns observations ``[A, *s]``, with or without an info; of ``Dict`` and ``Tuple`` spaces every leaf has
    the axis of agents. Its ``step`` takes actions ``[A, *a]`` and returns four values (observations, rewards ``[A]`` or
    ``[A, 1]``, dones ``[A]``, info) or five. Agents are called ``agent_0`` and so on. An info dict's ``"action_masks"``
    ``[A, k]`` become the agents' masks, other values are common infos; a list of infos has one per agent.

    An environment with a true ``has_auto_reset`` has already begun its next episode when it reports the end of one: its
    ``info["final_observation"]`` is then the last observation, and the next reset without a seed gives the observation that
    it returned. Observations of a ``Discrete`` space may come as one-hot rows.
    """

    def __init__(self, env: Any) -> None:
        self.agent_num = _agent_num(env)
        super().__init__(env, [f"agent_{index}" for index in range(self.agent_num)])
        self.env_name = getattr(env, "env_name", None)
        self._next_episode: Any = None  # what `has_auto_reset` began
        self.values = 4  # that its latest step returned

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Start an episode with all agents."""
        if self._next_episode is not None and seed is None and not options:
            observations, info = self._next_episode
        else:
            given = {"seed": seed, "options": options or None}
            observations, info = self._parse_reset(self.env.reset(**{k: v for k, v in given.items() if v is not None}))
        self._next_episode = None
        self.agents = list(self.possible_agents)
        return self._by_agent(observations), self._infos(info)

    def step(self, actions: Mapping[Any, Any]) -> Step:
        """Step all agents; an agent that is done stays in the environment's arrays, and leaves ``agents``."""
        nothing = np.zeros_like(np.asarray(next(iter(actions.values()))))  # fills the places of agents that are done
        result = self.env.step(np.stack([np.asarray(actions.get(agent, nothing)) for agent in self.possible_agents]))
        self.values = len(result)
        if self.values not in (4, 5):
            raise ValueError(f"step must return four or five values, got {self.values}")
        observations, rewards, *flags, info = result
        ended = [np.broadcast_to(np.asarray(flag, np.bool_).ravel(), self.agent_num) for flag in flags]
        if self.values == 4:
            truncated = ended[0] & self._time_limit_reached(info)
            ended = [ended[0] & ~truncated, truncated]
        done = ended[0] | ended[1]
        if getattr(self.env, "has_auto_reset", False) and done.all():
            self._next_episode = (observations, info)
            last = info.get("final_observation") if isinstance(info, dict) else None
            observations = observations if last is None else last
        rewards, terminated, truncated = (
            dict(zip(self.possible_agents, column.tolist(), strict=True))
            for column in (np.asarray(rewards).reshape(self.agent_num), *ended)
        )
        return self._stepped(self._by_agent(observations), rewards, terminated, truncated, self._infos(info))

    def _time_limit_reached(self, info: Any) -> Any:
        each = info if isinstance(info, (list, tuple)) else [info] * self.agent_num
        return np.array([bool(isinstance(one, dict) and one.get("TimeLimit.truncated", False)) for one in each])

    def _parse_reset(self, result: Any) -> tuple[Any, Any]:
        """Observations and info of what ``reset`` returned, which may lack the info, or be a tuple of one."""
        with_info = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], (dict, list))
        nested = isinstance(self.env.observation_space, spaces.Tuple)
        if with_info and nested:  # observations, too, are a tuple, which may end in a dict
            with_info = isinstance(result[0], tuple)
        observations, info = result if with_info else (result, {})
        single = isinstance(observations, tuple) and len(observations) == 1
        if single and (not nested or (not with_info and isinstance(observations[0], tuple))):
            return observations[0], info
        return observations, info

    def _by_agent(self, observations: Any) -> dict[str, Any]:
        return dict(zip(self.possible_agents, self._split(self.env.observation_space, observations), strict=True))

    def _split(self, space: spaces.Space[Any], observations: Any) -> list[Any]:
        """One observation per agent, of a structure whose leaves have an axis of agents."""
        indices = range(self.agent_num)
        if isinstance(space, spaces.Dict):
            fields = {key: self._split(inner, observations[key]) for key, inner in space.spaces.items()}
            return [{key: field[index] for key, field in fields.items()} for index in indices]
        if isinstance(space, spaces.Tuple):
            parts = [self._split(inner, each) for inner, each in zip(space.spaces, observations, strict=True)]
            return [tuple(part[index] for part in parts) for index in indices]
        if isinstance(space, spaces.Discrete):
            array = np.asarray(observations).reshape(self.agent_num, -1)
            if array.shape[1] == space.n and space.n > 1:
                array = space.start + array.argmax(axis=1)
            observations = array.reshape(self.agent_num)
        return [observations[index] for index in indices]

    def _infos(self, info: Any) -> dict[Any, Any]:
        if isinstance(info, (list, tuple)):
            return dict(zip(self.possible_agents, info, strict=True))
        own = {key: value for key, value in (info or {}).items() if key != "final_observation"}
        masks = own.pop("action_masks", None)
        return _infos(own, {} if masks is None else dict(zip(self.possible_agents, masks, strict=True)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)


class OneAgent(Adapted):
    """A Gymnasium environment, whose one agent is ``agent_0``.

    Its infos are about the environment, except an ``"action_mask"`` or ``"action_masks"``, which is the agent's.
    """

    values = 5

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env, ["agent_0"])

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Start an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        self.agents = ["agent_0"]
        return {"agent_0": observation}, self._infos(info)

    def step(self, actions: Mapping[Any, Any]) -> Step:
        """Step the environment."""
        *values, info = self.env.step(actions["agent_0"])
        observations, rewards, terminations, truncations = ({"agent_0": value} for value in values)
        return self._stepped(observations, rewards, terminations, truncations, self._infos(info))

    def _infos(self, info: Mapping[Any, Any]) -> dict[Any, Any]:
        masks = [info[key] for key in MASK_KEYS if key in info]
        common = {key: value for key, value in info.items() if key not in MASK_KEYS}
        return _infos(common, {"agent_0": masks[-1]} if masks else {})


class RLlibGame(Adapted):
    """RLlib's ``MultiAgentEnv``: agents with an observation act next, ``"__all__"`` ends the episode of all agents.

    Which agents are in the game, and whose turn it is, is read from what a step returns, because RLlib's list of agents may
    say anything. An agent that is in the game and was given no observation waits: it keeps its last one, and does not act.
    ``infos["__common__"]`` are infos of the environment. A reward that is missing is 0.
    """

    def __init__(self, env: Any) -> None:
        inner = getattr(env, "unwrapped", env)
        super().__init__(env, getattr(inner, "possible_agents", None) or inner.observation_spaces or ())
        self.agents_to_act: tuple[Any, ...] = ()
        self._latest: dict[Any, Any] = {}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Start an episode; agents that have an observation are in the game, and act."""
        observations, infos = self.env.reset(seed=seed, options=options)
        self._latest = dict(observations)
        self.agents = list(observations)
        self.agents_to_act = tuple(observations)
        return observations, self._infos(infos)

    def step(self, actions: Mapping[Any, Any]) -> Step:
        """Step the agents that act."""
        observations, rewards, terminations, truncations, infos = self.env.step(dict(actions))
        there = [*self.agents, *(agent for agent in observations if agent not in self.agents)]
        self._latest.update(observations)
        given = {agent: self._latest[agent] for agent in there}
        paid = {agent: rewards.get(agent, 0.0) for agent in there}
        self.agents = [] if terminations.get(ALL, False) or truncations.get(ALL, False) else there
        stepped = self._stepped(given, paid, terminations, truncations, self._infos(infos))
        self.agents_to_act = tuple(agent for agent in self.agents if agent in observations)
        return stepped

    def _infos(self, infos: Mapping[Any, Any] | None) -> dict[Any, Any]:
        own = dict(infos or {})
        return {**own.pop("__common__", {}), **own}


def _infos(common: dict[Any, Any], masks: Mapping[Any, Any]) -> dict[Any, Any]:
    """Infos of an environment as a whole, with the agents' action masks."""
    return {**({"common": common} if common else {}), **{agent: {"action_mask": mask} for agent, mask in masks.items()}}
