"""Adapters for libraries with interfaces other than Gymnasium's: one module per library.

Libraries that accept a Gymnasium vector environment accept those of vecenv unchanged and need no adapter: single-agent
RLlib, and CleanRL-style programs; see ``docs/clients.md``. The module of a name is imported on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vecenv.errors import how_to_install
from vecenv.lazy import lazy

if TYPE_CHECKING:
    from vecenv.adapters.envpool import as_envpool
    from vecenv.adapters.rllib import MultiAgentVecEnvRunner, as_rllib
    from vecenv.adapters.sb3 import as_sb3, evaluate_sb3
    from vecenv.adapters.tianshou import as_tianshou
    from vecenv.adapters.torchrl import as_torchrl

__all__ = ["MultiAgentVecEnvRunner", "as_envpool", "as_rllib", "as_sb3", "as_tianshou", "as_torchrl", "evaluate_sb3"]

_NEEDED_BY = "vecenv.adapters.{name} needs %s, not installed here: %s"
__getattr__, __dir__ = lazy(
    __name__,
    {
        "envpool": ("as_envpool",),
        "rllib": ("MultiAgentVecEnvRunner", "as_rllib"),
        "sb3": ("as_sb3", "evaluate_sb3"),
        "tianshou": ("as_tianshou",),
        "torchrl": ("as_torchrl",),
    },
    needs={
        "ray": _NEEDED_BY % ("ray", how_to_install("rllib")),
        "stable_baselines3": _NEEDED_BY % ("stable_baselines3", how_to_install("sb3")),
        "tianshou": _NEEDED_BY % ("tianshou", how_to_install("clients")),
        "torch": _NEEDED_BY % ("torch", "pip install torch (CPU build: pytorch.org)"),
        **dict.fromkeys(("torchrl", "tensordict"), _NEEDED_BY % ("torchrl", how_to_install("clients"))),
    },
)
