"""Clients whose interface is not Gymnasium's: one small file a library, no more than its interface needs.

What takes a Gymnasium vector environment takes one of vecenv as it is, and has nothing here: RLlib with one agent, and
programs in the manner of CleanRL; see ``docs/clients.md``. Each name loads its library when it is first touched.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vecenv.errors import how_to_install

if TYPE_CHECKING:
    from vecenv.adapters.envpool import as_envpool
    from vecenv.adapters.rllib import MultiAgentVecEnvRunner, as_rllib
    from vecenv.adapters.sb3 import as_sb3, evaluate_sb3
    from vecenv.adapters.tianshou import as_tianshou
    from vecenv.adapters.torchrl import as_torchrl

__all__ = ["MultiAgentVecEnvRunner", "as_envpool", "as_rllib", "as_sb3", "as_tianshou", "as_torchrl", "evaluate_sb3"]

_LAZY: dict[str, tuple[str, str, str]] = {
    # public name -> module that defines it, the library's module, the extra that brings it
    "as_envpool": ("vecenv.adapters.envpool", "gymnasium", ""),
    "MultiAgentVecEnvRunner": ("vecenv.adapters.rllib", "ray", "rllib"),
    "as_rllib": ("vecenv.adapters.rllib", "ray", "rllib"),
    "as_sb3": ("vecenv.adapters.sb3", "stable_baselines3", "sb3"),
    "evaluate_sb3": ("vecenv.adapters.sb3", "stable_baselines3", "sb3"),
    "as_tianshou": ("vecenv.adapters.tianshou", "tianshou", "clients"),
    "as_torchrl": ("vecenv.adapters.torchrl", "torchrl", "clients"),
}

_BRINGS = {"torchrl": ("torch", "tensordict")}  # what is not there where the library is not


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module 'vecenv.adapters' has no attribute {name!r}")
    module, library, extra = _LAZY[name]
    try:
        value = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name not in (library, *_BRINGS.get(library, ())):
            raise
        raise ImportError(f"vecenv.adapters.{name} needs {library}, not installed here: {how_to_install(extra)}") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
