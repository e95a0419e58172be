"""JAX-native environments for torch, with gradients: as functions of a state, and as a TorchRL environment.

:func:`differentiable` needs JAX and torch. :class:`TensorDictEnv` also needs TorchRL, and is loaded on first access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from vecenv.errors import how_to_install
from vecenv.lazy import lazy

try:
    for _library in ("jax", "torch"):
        importlib.import_module(_library)
except ModuleNotFoundError as error:
    if error.name not in ("jax", "jaxlib", "torch"):
        raise
    missing = f"vecenv.torch needs JAX and torch, but {error.name} is not installed"
    raise ImportError(f"{missing}: {how_to_install('jax', 'torch')}") from error

from vecenv.torch.differentiable import DifferentiableEnv, TorchState, differentiable

if TYPE_CHECKING:
    from vecenv.torch.tensordict_env import TensorDictEnv

__all__ = ["DifferentiableEnv", "TensorDictEnv", "TorchState", "differentiable"]

_NEEDED_BY = "vecenv.torch.{name} needs %s, not installed here: " + how_to_install("clients")
__getattr__, __dir__ = lazy(
    __name__,
    {"tensordict_env": ("TensorDictEnv",)},
    needs={library: _NEEDED_BY % library for library in ("torchrl", "tensordict")},
)
