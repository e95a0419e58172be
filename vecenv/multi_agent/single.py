"""A Gymnasium environment as a parallel one with a single agent, so that programs for several agents run it as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium

__all__ = ["OneAgent"]

AGENT = "agent_0"


class OneAgent:
    """A Gymnasium environment whose one agent is ``agent_0``; what its infos say is about the environment, but for a mask.

    Args:
        env: The environment. An info's ``"action_mask"`` or ``"action_masks"`` is the agent's.
    """

    values = 5

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.env = env
        self.possible_agents = [AGENT]
        self.agents: list[str] = []

    @property
    def metadata(self) -> dict[str, Any]:
        """The environment's."""
        return self.env.metadata

    @property
    def render_mode(self) -> str | None:
        """The environment's."""
        return self.env.render_mode

    @property
    def spec(self) -> Any:
        """The environment's."""
        return self.env.spec

    @property
    def unwrapped(self) -> Any:
        """The environment without its wrappers."""
        return self.env.unwrapped

    def observation_space(self, agent: Any) -> Any:
        """The environment's."""
        return self.env.observation_space

    def action_space(self, agent: Any) -> Any:
        """The environment's."""
        return self.env.action_space

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Start an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        self.agents = [AGENT]
        return {AGENT: observation}, _parted(info)

    def step(self, actions: Mapping[Any, Any]) -> tuple[Any, Any, Any, Any, Any]:
        """Step the environment."""
        observation, reward, terminated, truncated, info = self.env.step(actions[AGENT])
        if terminated or truncated:
            self.agents = []
        return {AGENT: observation}, {AGENT: reward}, {AGENT: terminated}, {AGENT: truncated}, _parted(info)

    def render(self) -> Any:
        """As the environment."""
        return self.env.render()

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def __repr__(self) -> str:
        return f"OneAgent({self.env})"


def _parted(info: Mapping[Any, Any]) -> dict[Any, Any]:
    """The environment's own infos, and the agent's mask."""
    own = dict(info)
    mask: dict[str, Any] = {}
    for key in ("action_mask", "action_masks"):
        if key in own:
            mask["action_mask"] = own.pop(key)
    return {**({"common": own} if own else {}), **({AGENT: mask} if mask else {})}
