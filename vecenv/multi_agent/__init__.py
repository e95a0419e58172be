"""Vector environments of PettingZoo parallel environments, with an axis of agents. See ``docs/multi_agent.md``."""

from __future__ import annotations

from vecenv.multi_agent.adapter import StackedAgents, TurnBased, from_aec
from vecenv.multi_agent.vector_env import MultiAgentVecEnv, make_openrl
from vecenv.multi_agent.views import FlattenAgents, OpenRLView, list_of_dicts

__all__ = [
    "FlattenAgents", "MultiAgentVecEnv", "OpenRLView", "StackedAgents", "TurnBased", "from_aec", "list_of_dicts",
    "make_openrl",
]  # fmt: skip
