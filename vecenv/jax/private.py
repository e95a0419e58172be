"""The parts of JAX that are not public and that the fast transport of the bridge needs.

JAX may move or change them in any version. So they are named here and nowhere else, and this module fails to import, with
the versions in the message, where one of them is missing or has other arguments. ``bridge(transport="auto")`` then takes
``"io_callback"``, which is public.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

import jax
import jaxlib.version
import numpy as np
from jax.experimental import io_callback

__all__ = ["ORDERED", "TESTED", "callback_sharding", "emit_python_callback", "mlir"]

TESTED: Final = "0.10.2"
"""The version of JAX that vecenv's own tests run with."""

try:
    from jax._src.callback import _callback_op_sharding as callback_sharding
    from jax.interpreters import mlir

    emit_python_callback: Any = mlir.emit_python_callback
    inspect.signature(callback_sharding).bind("axis_context", "sharding", "avals_out")
    inspect.signature(emit_python_callback).bind(
        "ctx", "callback", "token", "operands", "operand_avals", "result_avals", has_side_effect=True, returns_token=True,
        sharding=None,
    )  # fmt: skip
    mlir.TokenSet, mlir.register_lowering  # noqa: B018
except (ImportError, AttributeError, TypeError) as error:
    raise ImportError(
        f"vecenv's fast host calls need parts of JAX that are not public, and jax {jax.__version__} with jaxlib "
        f"{jaxlib.version.__version__} has them no longer, or changed ({error}). They were tested with jax {TESTED}; "
        "transport='io_callback' works with every version."
    ) from error


def _ordered_effect() -> Any:
    """The effect of an ordered ``io_callback``, under which programs order their host calls."""
    struct: Any = jax.ShapeDtypeStruct
    with jax.disable_jit(False):
        traced: Any = jax.make_jaxpr(lambda: io_callback(lambda: np.int32(0), struct((), np.int32), ordered=True))()
    (effect,) = traced.effects
    return effect


ORDERED: Final = _ordered_effect()
