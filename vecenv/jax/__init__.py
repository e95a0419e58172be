"""Environments inside JAX: pure functions, compiled whole, differentiable where the physics is.

The names are loaded when they are first touched; ``import vecenv.jax`` does not import JAX.
"""

from __future__ import annotations

import importlib
from typing import Any

from vecenv.errors import how_to_install

# No module here may be called as a public function is: importing a submodule binds its name in the package, and would hide
# the function.
_NAMES: dict[str, tuple[str, ...]] = {
    # module -> the public names that it holds
    "bridging": ("Bridge", "bridge", "run"),
    "env": ("EnvState", "JaxEnv", "NativeState"),
    "functional": ("FunctionalVectorEnv",),
    "interop": ("GymEnv", "jax_space"),
    "libraries": ("adapt", "available_envs", "differentiability", "make_env", "require_gradient"),
    "rollouts": (
        "EpisodeMetrics", "Trajectory", "eval_rollout_episode", "fast_eval_rollout_episode", "reset_carry", "rollout",
        "stateless", "truncated_bptt",
    ),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'vecenv.jax' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"vecenv.jax.{_MODULE_OF[name]}")
    except ModuleNotFoundError as error:
        if error.name not in ("jax", "jaxlib"):
            raise
        raise ImportError(f"vecenv.jax needs JAX: {how_to_install('jax')}") from error
    globals()[name] = getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
