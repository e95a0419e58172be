"""What ``jax.vmap`` of a bridge means: every lane has environments of its own, and one host call steps them all.

JAX would map a host call by making one for each lane, with nothing to say whose environments it is about, or not at all. So
the call comes with a rule: the mapped axis becomes one more axis of its arrays. A bridge without lanes gets a rule that says
why it cannot be mapped, and one with lanes cannot be called outside of ``vmap``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive

from vecenv.jax.bridging.host_call import struct
from vecenv.jax.native.state import Array

__all__ = ["call_in_lanes"]

Call: TypeAlias = Callable[[list[Any], Sequence[Array]], list[Array]]  # (results, arrays) -> arrays


def call_in_lanes(call: Call, results: list[Any], args: list[Array], lanes: int | None, num_envs: int) -> list[Array]:
    """``call(results, args)``; mapped over ``lanes``, once, with that axis in front of every result and argument.

    Raises:
        ValueError: It is mapped and ``lanes`` is ``None``; it is mapped over another size, or over two axes. Where it is not
            mapped and should be, the error comes when the program is compiled.
    """

    def alone(*args: Array) -> list[Array]:
        if lanes is None:
            return call(results, args)
        unmapped: list[Array] = _unmapped().bind(*args, lanes=lanes, results=tuple(results))
        return unmapped

    def mapped(size: int, batched: list[bool], *args: Array) -> tuple[list[Array], list[bool]]:
        if lanes is None:
            raise ValueError(
                f"A bridge cannot be called under jax.vmap: there is one of each of its {num_envs} environments. Build "
                f"{size} times as many and bridge(..., lanes={size}) them, or keep the environments out of vmap and map the "
                "policy."
            )
        if size != lanes:
            raise ValueError(f"This bridge has lanes={lanes}; it is called under jax.vmap over {size}.")
        wide = [struct((size, *result.shape), result.dtype) for result in results]
        every = [
            arg if is_batched else jnp.broadcast_to(arg, (size, *arg.shape))
            for arg, is_batched in zip(args, batched, strict=True)
        ]
        return _with_rule(lambda *args: call(wide, args), _refuse_second_axis)(*every), [True] * len(results)

    called: list[Array] = _with_rule(alone, mapped)(*args)
    return called


def _refuse_second_axis(size: int, *_: Any) -> Any:
    raise ValueError(f"The lanes of a bridge are one axis; it is called under another jax.vmap, over {size}, as well.")


def _with_rule(function: Callable[..., list[Array]], rule: Callable[..., Any]) -> Any:
    mapped: Any = custom_vmap(function)
    mapped.def_vmap(rule)
    return mapped


@functools.cache
def _unmapped() -> Any:
    """Stands for a call in one lane. It has shapes and no meaning: every other lane's environments would be missing."""
    from jax.interpreters import mlir

    primitive: Any = Primitive("vecenv_one_lane")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *_, lanes, results: [jax.core.ShapedArray(r.shape, r.dtype) for r in results])

    def refuse(*_: Any, lanes: int, results: Any) -> Any:
        raise ValueError(f"A bridge with lanes={lanes} must be called under jax.vmap over {lanes} lanes.")

    primitive.def_impl(refuse)
    mlir.register_lowering(primitive, refuse)
    return primitive
