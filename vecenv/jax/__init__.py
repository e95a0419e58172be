"""Environments in compiled JAX programs: JAX-native ones, with gradients if their steps have them, and bridged ones.

Each name is loaded on first access, so ``import vecenv.jax`` does not import JAX.
"""

from __future__ import annotations

from vecenv.errors import how_to_install
from vecenv.lazy import lazy

_NAMES_BY_MODULE = {
    # module -> the public names that it holds
    "bridging": ("Bridge", "bridge", "run"),
    "env": ("EnvState", "JaxEnv", "NativeState"),
    "functional": ("FunctionalVectorEnv",),
    "interop": ("jax_space",),
    "libraries": ("adapt", "available_envs", "differentiability", "make_env", "require_gradient"),
    "rollouts": (
        "EpisodeMetrics", "Trajectory", "eval_rollout_episode", "fast_eval_rollout_episode", "reset_carry", "rollout",
        "stateless", "truncated_bptt",
    ),
}  # fmt: skip
__all__ = sorted(name for names in _NAMES_BY_MODULE.values() for name in names)  # noqa: PLE0605
__getattr__, __dir__ = lazy(
    __name__, _NAMES_BY_MODULE, needs=dict.fromkeys(("jax", "jaxlib"), f"vecenv.jax needs JAX: {how_to_install('jax')}")
)
