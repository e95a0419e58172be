"""vecenv: a fast, fault-tolerant engine for vectors of Gymnasium environments.

The names below are the public interface. Each is loaded on first use, so that ``import vecenv`` takes almost no time, and
the command line can handle Ctrl-C while it loads libraries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vecenv._version import __version__
from vecenv.lazy import lazy

if TYPE_CHECKING:
    from vecenv import adapters as adapters
    from vecenv import aio as aio
    from vecenv import backends as backends
    from vecenv import errors as errors
    from vecenv import state as state
    from vecenv import testing as testing
    from vecenv import wrappers as wrappers
    from vecenv.engine.vector_env import AsyncVectorEnv as AsyncVectorEnv
    from vecenv.engine.vector_env import Observer as Observer
    from vecenv.evaluating import evaluate as evaluate
    from vecenv.evaluating.episodes import Episode as Episode
    from vecenv.evaluating.episodes import EpisodeResult as EpisodeResult
    from vecenv.freezing import Frozen as Frozen
    from vecenv.front.by_row import infos_by_row as infos_by_row
    from vecenv.make import make_vec as make_vec
    from vecenv.make import register as register
    from vecenv.multi_agent import MultiAgentVecEnv as MultiAgentVecEnv
    from vecenv.patching import install as install
    from vecenv.patching import uninstall as uninstall
    from vecenv.planning.options import Restart as Restart
    from vecenv.planning.options import WorkerOptions as WorkerOptions
    from vecenv.planning.plan import Plan as Plan
    from vecenv.planning.plan import plan as plan
    from vecenv.recording.recorder import FlightRecorder as FlightRecorder
    from vecenv.shm.arena import share as share
    from vecenv.tools.video import render_grid as render_grid
    from vecenv.tools.video import write_video as write_video
    from vecenv.wrappers.env_choice import EnvChoice as EnvChoice
    from vecenv.wrappers.prefetch import EpisodePrefetcher as EpisodePrefetcher

__all__ = [
    "AsyncVectorEnv", "EnvChoice", "Episode", "EpisodePrefetcher", "EpisodeResult", "FlightRecorder", "Frozen",
    "Observer", "Plan", "Restart", "WorkerOptions", "__version__", "errors", "evaluate", "infos_by_row", "install",
    "make_vec", "plan", "register", "render_grid", "share", "uninstall", "write_video",
]  # fmt: skip

_MODULES = ("adapters", "aio", "backends", "errors", "jax", "state", "testing", "torch", "wrappers")
_NAMES_BY_MODULE = {
    "freezing": ("Frozen",),
    "engine.vector_env": ("AsyncVectorEnv", "Observer"),
    "evaluating": ("evaluate",),
    "evaluating.episodes": ("Episode", "EpisodeResult"),
    "front.by_row": ("infos_by_row",),
    "make": ("make_vec", "register"),
    "multi_agent": ("MultiAgentVecEnv",),
    "patching": ("install", "uninstall"),
    "planning.options": ("Restart", "WorkerOptions"),
    "planning.plan": ("Plan", "plan"),
    "recording.recorder": ("FlightRecorder",),
    "shm.arena": ("share",),
    "tools.video": ("render_grid", "write_video"),
    "wrappers.env_choice": ("EnvChoice",),
    "wrappers.prefetch": ("EpisodePrefetcher",),
}
__getattr__, __dir__ = lazy(__name__, _NAMES_BY_MODULE, _MODULES)
