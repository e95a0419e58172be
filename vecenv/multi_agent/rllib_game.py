"""RLlib's ``MultiAgentEnv`` as a PettingZoo parallel environment.

There, an agent acts next if it was given an observation, whether its flags came or not, and its list of agents may say
anything. So who is in the game, and whose turn it is, is read from what a step returns. RLlib itself is not needed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["RLlibGame", "is_rllib_game"]

ALL: Final = "__all__"
COMMON: Final = "__common__"


def is_rllib_game(env: Any) -> bool:
    """Whether ``env``, below its wrappers, has RLlib's methods and not PettingZoo's."""
    inner = getattr(env, "unwrapped", env)
    return callable(getattr(inner, "get_observation_space", None)) and not callable(
        getattr(inner, "observation_space", None)
    )


class RLlibGame:
    """A ``MultiAgentEnv``: agents with an observation act next, ``"__all__"`` ends the episode of everybody.

    An agent that is in the game and was given no observation waits: it keeps its last one, and does not act.
    ``infos["__common__"]`` are infos of the environment. A reward that is missing is 0.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        inner = self.unwrapped
        self.possible_agents = list(getattr(inner, "possible_agents", None) or inner.observation_spaces or ())
        self.agents: list[Any] = []
        self.agents_to_act: tuple[Any, ...] = ()
        self.metadata = getattr(env, "metadata", None) or {}
        self.render_mode = getattr(env, "render_mode", None)
        self.spec = getattr(env, "spec", None)
        self._latest: dict[Any, Any] = {}

    @property
    def unwrapped(self) -> Any:
        """The environment without its wrappers."""
        return getattr(self.env, "unwrapped", self.env)

    def observation_space(self, agent: Any) -> Any:
        """Of one agent."""
        return self.unwrapped.get_observation_space(agent)

    def action_space(self, agent: Any) -> Any:
        """Of one agent."""
        return self.unwrapped.get_action_space(agent)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Start an episode; who has an observation is in the game, and acts."""
        observations, infos = self.env.reset(seed=seed, options=options)
        self._latest = dict(observations)
        self.agents = list(observations)
        self.agents_to_act = tuple(observations)
        return observations, _infos(infos)

    def step(self, actions: Mapping[Any, Any]) -> tuple[Any, Any, Any, Any, Any]:
        """Step those who act."""
        observations, rewards, terminations, truncations, infos = self.env.step(dict(actions))
        over = terminations.get(ALL, False) or truncations.get(ALL, False)
        there = [*self.agents, *(agent for agent in observations if agent not in self.agents)]
        self._latest.update(observations)
        self.agents = [] if over else [a for a in there if not (terminations.get(a, False) or truncations.get(a, False))]
        self.agents_to_act = tuple(agent for agent in self.agents if agent in observations)
        given = {agent: self._latest[agent] for agent in there}
        return given, {agent: rewards.get(agent, 0.0) for agent in there}, terminations, truncations, _infos(infos)

    def render(self) -> Any:
        """As the environment."""
        return self.env.render()

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def __repr__(self) -> str:
        return f"RLlibGame({self.env})"


def _infos(infos: Mapping[Any, Any]) -> dict[Any, Any]:
    own = dict(infos or {})
    return {**own.pop(COMMON, {}), **own}
