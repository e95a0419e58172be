"""Environments inside JAX: pure functions, compiled whole, differentiable where the physics is.

The names are loaded when they are first touched; ``import vecenv.jax`` does not import JAX.
"""

from __future__ import annotations

import importlib
from typing import Any

from vecenv.errors import how_to_install

__all__ = [
    "Bridge",
    "EnvState",
    "EpisodeMetrics",
    "FunctionalVectorEnv",
    "GymEnv",
    "JaxEnv",
    "NativeState",
    "Trajectory",
    "adapt",
    "available_envs",
    "bridge",
    "differentiability",
    "eval_rollout_episode",
    "fast_eval_rollout_episode",
    "jax_space",
    "make_env",
    "require_gradient",
    "reset_carry",
    "rollout",
    "run",
    "stateless",
    "truncated_bptt",
]

# Public name -> module that holds it. No module here may be called as a public function is: importing a submodule binds its
# name in the package, and would hide the function.
_LAZY: dict[str, str] = {
    "Bridge": "bridging",
    "EnvState": "state",
    "EpisodeMetrics": "rollouts",
    "FunctionalVectorEnv": "functional",
    "GymEnv": "interop",
    "JaxEnv": "env",
    "NativeState": "state",
    "Trajectory": "rollouts",
    "adapt": "libraries",
    "available_envs": "libraries",
    "bridge": "bridging",
    "differentiability": "libraries",
    "eval_rollout_episode": "rollouts",
    "fast_eval_rollout_episode": "rollouts",
    "jax_space": "spaces",
    "make_env": "libraries",
    "require_gradient": "libraries",
    "reset_carry": "rollouts",
    "rollout": "rollouts",
    "run": "host_call",
    "stateless": "rollouts",
    "truncated_bptt": "rollouts",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module 'vecenv.jax' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"vecenv.jax.{_LAZY[name]}")
    except ModuleNotFoundError as error:
        if error.name not in ("jax", "jaxlib"):
            raise
        raise ImportError(f"vecenv.jax needs JAX: {how_to_install('jax')}") from error
    globals()[name] = getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
