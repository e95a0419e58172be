"""JAX-native environments for torch users, with gradients: as states, and as a TorchRL environment.

:func:`differentiable` needs JAX and torch, :class:`TensorDictEnv` TorchRL as well; it is loaded when it is first touched.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vecenv.errors import how_to_install

try:
    for _library in ("jax", "torch"):
        importlib.import_module(_library)
except ModuleNotFoundError as error:
    if error.name not in ("jax", "jaxlib", "torch"):
        raise
    raise ImportError(f"vecenv.torch needs JAX and torch; no {error.name}: {how_to_install('jax', 'torch')}") from error

from vecenv.torch.differentiable import DifferentiableEnv, TorchState, differentiable

if TYPE_CHECKING:
    from vecenv.torch.tensordict_env import TensorDictEnv

__all__ = ["DifferentiableEnv", "TensorDictEnv", "TorchState", "differentiable"]


def __getattr__(name: str) -> Any:
    """Load what needs TorchRL on first use (PEP 562)."""
    if name != "TensorDictEnv":
        raise AttributeError(f"module 'vecenv.torch' has no attribute {name!r}")
    try:
        from vecenv.torch.tensordict_env import TensorDictEnv
    except ModuleNotFoundError as error:
        if error.name not in ("torchrl", "tensordict"):
            raise
        needs = f"vecenv.torch.{name} needs {error.name}, not installed here: {how_to_install('clients')}"
        raise ImportError(needs) from error
    return TensorDictEnv


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
