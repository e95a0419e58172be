"""Environments of other conventions, as PettingZoo parallel environments.

* :func:`from_aec`: turn-based games (PettingZoo's AEC interface);
* :class:`StackedAgents`: environments with ``agent_num`` and arrays with an axis of agents instead of dicts;
* :class:`~vecenv.multi_agent.rllib_game.RLlibGame`: RLlib's ``MultiAgentEnv``;
* :class:`~vecenv.multi_agent.single.OneAgent`: Gymnasium environments.

PettingZoo itself is not needed for any, and not imported before it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from vecenv.multi_agent.rllib_game import RLlibGame, is_rllib_game
from vecenv.multi_agent.single import OneAgent

__all__ = ["StackedAgents", "TurnBased", "as_parallel", "from_aec"]


def as_parallel(env: Any) -> Any:
    """``env`` itself if it is parallel, adapted if it is RLlib's, follows ``agent_num``, or is a Gymnasium environment."""
    if is_rllib_game(env):
        return RLlibGame(env)
    if getattr(env, "possible_agents", None) is not None:
        return env
    if _number(env) is not None:
        return StackedAgents(env)
    return OneAgent(env) if isinstance(env, gymnasium.Env) else env


def _number(env: Any) -> int | None:
    value = getattr(env, "agent_num", None)
    return int(value) if isinstance(value, (int, np.integer)) and value > 0 else None


def from_aec(env: Any) -> Any:
    """A parallel environment of a PettingZoo AEC environment.

    If ``env.metadata["is_parallelizable"]`` is true it is PettingZoo's own ``aec_to_parallel``; every other game is taken to
    be turn based (:class:`TurnBased`).
    """
    if env.metadata.get("is_parallelizable", False):
        from pettingzoo.utils.conversions import aec_to_parallel

        return aec_to_parallel(env)
    return TurnBased(env)


class TurnBased:
    """A turn-based game: every step is one agent's move.

    ``agents_to_act`` holds the one whose turn it is; in ``MultiAgentVecEnv`` its row alone is True in ``agent_mask``, and
    after its move in ``transition_mask``. Observations and rewards are given for everybody at every step, so the reward
    of an agent that did not move (the one who lost by the other's move, say) stands in a row whose ``transition_mask`` is
    False: it belongs to that agent's last move.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.metadata = env.metadata
        self.possible_agents = list(env.possible_agents)
        self.render_mode = getattr(env, "render_mode", None)
        if (space := getattr(env, "state_space", None)) is not None:
            self.state_space = space

    @property
    def agents(self) -> list[Any]:
        """Those who are still in the game."""
        game = self.env
        return [agent for agent in game.agents if not (game.terminations[agent] or game.truncations[agent])]

    @property
    def agents_to_act(self) -> tuple[Any, ...]:
        """Whose turn it is; nobody's before the first reset."""
        return (self.env.agent_selection,) if getattr(self.env, "agents", None) else ()

    @property
    def unwrapped(self) -> Any:
        """The game itself."""
        return self.env.unwrapped

    def observation_space(self, agent: Any) -> Any:
        """Of one agent."""
        return self.env.observation_space(agent)

    def action_space(self, agent: Any) -> Any:
        """Of one agent."""
        return self.env.action_space(agent)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Start a game; observations and infos of everybody."""
        self.env.reset(seed=seed, options=options)
        self._skip_the_dead()
        return {agent: self.env.observe(agent) for agent in self.agents}, dict(self.env.infos)

    def step(self, actions: Mapping[Any, Any]) -> tuple[Any, Any, Any, Any, Any]:
        """One move, and what it brought everybody who was in the game."""
        game = self.env
        before = list(game.agents)
        mover = game.agent_selection
        if mover not in actions:
            raise ValueError(f"it is the turn of agent {mover!r}, and there is no action of it")
        game.step(actions[mover])
        after = [*before, *(agent for agent in game.agents if agent not in before)]
        rewards, terminations, truncations, infos = (
            {agent: values[agent] for agent in after if agent in values}
            for values in (game.rewards, game.terminations, game.truncations, game.infos)
        )
        observations = {agent: game.observe(agent) for agent in after if agent in game.agents}
        self._skip_the_dead()
        return observations, rewards, terminations, truncations, infos

    def _skip_the_dead(self) -> None:
        """An agent whose game is over has to take a turn once more, with no action."""
        game = self.env
        while game.agents and (game.terminations[game.agent_selection] or game.truncations[game.agent_selection]):
            game.step(None)

    def render(self) -> Any:
        """As the game."""
        return self.env.render()

    def state(self) -> Any:
        """As the game."""
        return self.env.state()

    def close(self) -> None:
        """Close the game."""
        self.env.close()

    def __repr__(self) -> str:
        return f"TurnBased({self.env})"


class StackedAgents:
    """An environment with ``agent_num``: ``A`` agents with one space, arrays with an axis of agents.

    Its ``reset`` returns observations ``[A, *s]``, with or without an info; of ``Dict`` and ``Tuple`` spaces every leaf has
    the axis of agents. Its ``step`` takes actions ``[A, *a]`` and returns four values (observations, rewards ``[A]`` or
    ``[A, 1]``, dones ``[A]``, info) or five. Agents are called ``agent_0`` and so on. An info dict's ``"action_masks"``
    ``[A, k]`` become the agents' masks, other values are common infos; a list of infos is one an agent.

    An environment with a true ``has_auto_reset`` has already begun its next episode when it says that one ended: its
    ``info["final_observation"]`` is then the last observation, and the next reset without a seed gives the observation that
    it returned. Observations of a ``Discrete`` space may come as one-hot rows.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        number = _number(env)
        assert number is not None
        self.agent_num = number
        self.possible_agents = [f"agent_{index}" for index in range(number)]
        self.agents: list[str] = []
        self.metadata = getattr(env, "metadata", None) or {}
        self.render_mode = getattr(env, "render_mode", None)
        self.env_name = getattr(env, "env_name", None)
        self.spec = getattr(env, "spec", None)
        if (space := getattr(env, "state_space", None)) is not None:
            self.state_space = space
        self._fresh: Any = None
        self.values = 4  # of its latest step

    @property
    def unwrapped(self) -> Any:
        """The environment itself."""
        return getattr(self.env, "unwrapped", self.env)

    def observation_space(self, agent: Any) -> Any:
        """The same for every agent."""
        return self.env.observation_space

    def action_space(self, agent: Any) -> Any:
        """The same for every agent."""
        return self.env.action_space

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Start an episode with everybody."""
        if self._fresh is not None and seed is None and not options:
            observations, info = self._fresh
        else:
            wanted = {"seed": seed, "options": options or None}
            result = self.env.reset(**{key: value for key, value in wanted.items() if value is not None})
            observations, info = self._parted(result)
        self._fresh = None
        self.agents = list(self.possible_agents)
        return self._by_agent(observations), self._infos(info)

    def step(self, actions: Mapping[Any, Any]) -> tuple[Any, Any, Any, Any, Any]:
        """Step everybody; an agent that is done stays in the environment's arrays, and is left out here."""
        result = self.env.step(np.stack([np.asarray(self._action(actions, agent)) for agent in self.possible_agents]))
        self.values = len(result)
        if self.values == 4:
            observations, rewards, dones, info = result
            ended = np.asarray(dones, np.bool_).reshape(self.agent_num)
            cut = ended & self._time_is_up(info)
            terminated, truncated = ended & ~cut, cut
        else:
            observations, rewards, terminations, truncations, info = result
            terminated, truncated = (np.broadcast_to(np.asarray(x, np.bool_).ravel(), self.agent_num).copy()
                                     for x in (terminations, truncations))  # fmt: skip
        names = self.possible_agents
        if getattr(self.env, "has_auto_reset", False) and (terminated | truncated).all():
            self._fresh = (observations, info)
            last = info.get("final_observation") if isinstance(info, dict) else None
            observations = observations if last is None else last
        paid = np.asarray(rewards).reshape(self.agent_num).tolist()
        before = set(self.agents)
        self.agents = [
            a for a, one, two in zip(names, terminated, truncated, strict=True) if a in before and not (one or two)
        ]
        return (
            self._by_agent(observations), dict(zip(names, paid, strict=True)),
            dict(zip(names, terminated.tolist(), strict=True)), dict(zip(names, truncated.tolist(), strict=True)),
            self._infos(info),
        )  # fmt: skip

    def _action(self, actions: Mapping[Any, Any], agent: str) -> Any:
        """A dead agent has no action, and its place in the array must hold something."""
        if agent in actions:
            return actions[agent]
        return np.zeros_like(np.asarray(next(iter(actions.values()))))

    def _time_is_up(self, info: Any) -> Any:
        each = info if isinstance(info, (list, tuple)) else [info] * self.agent_num
        return np.array([bool(isinstance(one, dict) and one.get("TimeLimit.truncated", False)) for one in each])

    def _parted(self, result: Any) -> tuple[Any, Any]:
        """Observations and info of what ``reset`` returned, which may lack the info, or be a tuple of one."""
        with_info = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], (dict, list))
        if not isinstance(self.env.observation_space, spaces.Tuple):
            observations, info = result if with_info else (result, {})
            return (observations[0] if isinstance(observations, tuple) and len(observations) == 1 else observations), info
        if with_info and isinstance(result[0], tuple):
            return result[0], result[1]
        return (result[0] if len(result) == 1 and isinstance(result[0], tuple) else result), {}

    def _by_agent(self, observations: Any) -> dict[str, Any]:
        return dict(zip(self.possible_agents, self._split(self.env.observation_space, observations), strict=True))

    def _split(self, space: spaces.Space[Any], observations: Any) -> list[Any]:
        """One observation an agent, of a structure whose leaves have an axis of agents."""
        everyone = range(self.agent_num)
        if isinstance(space, spaces.Dict):
            fields = {key: self._split(inner, observations[key]) for key, inner in space.spaces.items()}
            return [{key: field[index] for key, field in fields.items()} for index in everyone]
        if isinstance(space, spaces.Tuple):
            parts = [self._split(inner, each) for inner, each in zip(space.spaces, observations, strict=True)]
            return [tuple(part[index] for part in parts) for index in everyone]
        if isinstance(space, spaces.Discrete):
            array = np.asarray(observations).reshape(self.agent_num, -1)
            if array.shape[1] == space.n and space.n > 1:
                array = space.start + array.argmax(axis=1)
            observations = array.reshape(self.agent_num)
        return [observations[index] for index in everyone]

    def _infos(self, info: Any) -> dict[Any, Any]:
        if isinstance(info, (list, tuple)):
            return dict(zip(self.possible_agents, info, strict=True))
        own = dict(info or {})
        own.pop("final_observation", None)
        masks = own.pop("action_masks", None)
        common: dict[Any, Any] = {"common": own} if own else {}
        if masks is not None:
            common.update({agent: {"action_mask": mask} for agent, mask in zip(self.possible_agents, masks, strict=True)})
        return common

    def render(self) -> Any:
        """As the environment."""
        return self.env.render()

    def state(self) -> Any:
        """As the environment."""
        return self.env.state()

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    def __repr__(self) -> str:
        return f"StackedAgents({self.env})"
