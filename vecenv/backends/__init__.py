"""The vector environments of all backends except ``AsyncVectorEnv``: EnvPool, JAX, a library's own, and Ray.

Each is imported on first use, because most need an optional library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vecenv.errors import how_to_install
from vecenv.lazy import lazy

if TYPE_CHECKING:
    from vecenv.backends.envpool import EnvPoolVectorEnv
    from vecenv.backends.jax_native import JaxVectorEnv
    from vecenv.backends.native import NativeVectorEnv
    from vecenv.backends.ray import RayVectorEnv

__all__ = ["EnvPoolVectorEnv", "JaxVectorEnv", "NativeVectorEnv", "RayVectorEnv"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "envpool": ("EnvPoolVectorEnv",),
        "jax_native": ("JaxVectorEnv",),
        "native": ("NativeVectorEnv",),
        "ray": ("RayVectorEnv",),
    },
    needs=dict.fromkeys(("jax", "jaxlib"), f"{{name}} needs JAX: {how_to_install('jax')}"),
)
