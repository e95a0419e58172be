"""Vector environments that are not stepped by worker processes of ours.

Each needs an optional library, so each loads when it is first touched.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vecenv.errors import how_to_install

if TYPE_CHECKING:
    from vecenv.backends.envpool import EnvPoolVectorEnv
    from vecenv.backends.jax_native import JaxVectorEnv
    from vecenv.backends.native import NativeVectorEnv
    from vecenv.backends.ray import RayVectorEnv

__all__ = ["EnvPoolVectorEnv", "JaxVectorEnv", "NativeVectorEnv", "RayVectorEnv"]

_LAZY: dict[str, str] = {
    # public name -> module that defines it
    "EnvPoolVectorEnv": "vecenv.backends.envpool",
    "JaxVectorEnv": "vecenv.backends.jax_native",
    "NativeVectorEnv": "vecenv.backends.native",
    "RayVectorEnv": "vecenv.backends.ray",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module 'vecenv.backends' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in ("jax", "jaxlib"):
            raise
        raise ImportError(f"{name} needs JAX: {how_to_install('jax')}") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
