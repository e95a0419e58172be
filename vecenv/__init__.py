"""vecenv: a fast, fault-tolerant engine for vectors of Gymnasium environments.

The names below are the public interface. Each is loaded when it is first touched, so that ``import vecenv`` costs next to
nothing, and an interruption while libraries are loaded finds the command line ready for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vecenv._version import __version__

if TYPE_CHECKING:
    from vecenv import adapters as adapters
    from vecenv import aio as aio
    from vecenv import backends as backends
    from vecenv import errors as errors
    from vecenv import state as state
    from vecenv import testing as testing
    from vecenv import wrappers as wrappers
    from vecenv.engine.frozen import Frozen as Frozen
    from vecenv.engine.vector_env import AsyncVectorEnv as AsyncVectorEnv
    from vecenv.evaluating import evaluate as evaluate
    from vecenv.evaluating.episodes import Episode as Episode
    from vecenv.evaluating.episodes import EpisodeResult as EpisodeResult
    from vecenv.make import make_vec as make_vec
    from vecenv.make import register as register
    from vecenv.multi_agent import MultiAgentVecEnv as MultiAgentVecEnv
    from vecenv.patching import install as install
    from vecenv.patching import uninstall as uninstall
    from vecenv.planning.plan import Plan as Plan
    from vecenv.planning.plan import plan as plan
    from vecenv.recording.recorder import FlightRecorder as FlightRecorder
    from vecenv.shm.arena import share as share
    from vecenv.tools.watch import render_grid as render_grid
    from vecenv.tools.watch import write_video as write_video

__all__ = [
    "AsyncVectorEnv", "Episode", "EpisodeResult", "FlightRecorder", "Frozen", "Plan", "__version__", "errors", "evaluate",
    "install", "make_vec", "plan", "register", "render_grid", "share", "uninstall", "write_video",
]  # fmt: skip

_MODULES = ("adapters", "aio", "backends", "errors", "jax", "state", "testing", "torch", "wrappers")
_HOME: dict[str, str] = {
    # public name -> module that holds it
    "AsyncVectorEnv": "engine.vector_env",
    "Episode": "evaluating.episodes",
    "EpisodeResult": "evaluating.episodes",
    "FlightRecorder": "recording.recorder",
    "Frozen": "engine.frozen",
    "MultiAgentVecEnv": "multi_agent",
    "Plan": "planning.plan",
    "evaluate": "evaluating",
    "install": "patching",
    "make_vec": "make",
    "plan": "planning.plan",
    "register": "make",
    "render_grid": "tools.watch",
    "share": "shm.arena",
    "uninstall": "patching",
    "write_video": "tools.watch",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name in _MODULES:
        return importlib.import_module(f"vecenv.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'vecenv' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"vecenv.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, *_HOME, *(name for name in globals() if name.startswith("__"))})
