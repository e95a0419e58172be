"""vecenv: a fast, fault-tolerant engine for vectors of Gymnasium environments.

The names below are the public interface. Everything that needs an optional library is loaded when it is first touched, so
that ``import vecenv`` costs no more than ``import gymnasium``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vecenv import errors
from vecenv._version import __version__
from vecenv.engine.vector_env import AsyncVectorEnv
from vecenv.planning.plan import Plan, plan

if TYPE_CHECKING:
    from vecenv import adapters as adapters
    from vecenv import backends as backends
    from vecenv import state as state
    from vecenv import testing as testing
    from vecenv import wrappers as wrappers
    from vecenv.instead import install as install
    from vecenv.instead import uninstall as uninstall
    from vecenv.make import make_vec as make_vec
    from vecenv.make import register as register
    from vecenv.multi_agent import MultiAgentVecEnv as MultiAgentVecEnv
    from vecenv.tools.pictures import render_grid as render_grid

__all__ = [
    "AsyncVectorEnv", "Plan", "__version__", "errors", "install", "make_vec", "plan", "register", "render_grid", "uninstall",
]  # fmt: skip

_LAZY: dict[str, str] = {
    # public name -> module that holds it ("" after the colon: the module itself)
    "MultiAgentVecEnv": "vecenv.multi_agent:MultiAgentVecEnv",
    "adapters": "vecenv.adapters:",
    "install": "vecenv.instead:install",
    "jax": "vecenv.jax:",
    "make_vec": "vecenv.make:make_vec",
    "register": "vecenv.make:register",
    "render_grid": "vecenv.tools.pictures:render_grid",
    "state": "vecenv.state:",
    "testing": "vecenv.testing:",
    "torch": "vecenv.torch:",
    "uninstall": "vecenv.instead:uninstall",
    "wrappers": "vecenv.wrappers:",
    "backends": "vecenv.backends:",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    try:
        module, _, attribute = _LAZY[name].partition(":")
    except KeyError:
        raise AttributeError(f"module 'vecenv' has no attribute {name!r}") from None
    loaded = importlib.import_module(module)
    value = getattr(loaded, attribute) if attribute else loaded
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_LAZY, *(name for name in globals() if name.startswith("__"))})
