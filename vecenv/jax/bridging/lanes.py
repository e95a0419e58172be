"""What ``jax.vmap`` of a bridge means: every lane has environments of its own, and one host call steps them all.

JAX would map a host call by making one for each lane, with nothing to say whose environments it is about, or not at all. So
the call comes with a rule: the mapped axis becomes one more axis of its arrays. A bridge without lanes gets a rule that says
why it cannot be mapped, and one with lanes cannot be called outside of ``vmap``.
"""

from __future__ import annotations

import functools
import math
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
    """``call(results, args)``; mapped over ``lanes``, once, with those axes in front of every result and argument.

    ``jax.vmap`` may be nested: the lanes are then the product of its axes.

    Raises:
        ValueError: It is mapped and ``lanes`` is ``None``; it is mapped over axes whose product cannot be ``lanes``. Where
            it is not mapped, or not over enough, the error comes when the program is compiled.
    """

    def under(sizes: tuple[int, ...]) -> Any:
        """The call under maps over ``sizes``, the outermost first."""
        left = (lanes or 1) // math.prod(sizes)
        wide = [struct((*sizes, *result.shape), result.dtype) for result in results]

        def alone(*args: Array) -> list[Array]:
            if lanes is None or (sizes and left == 1):
                return call(wide, args)
            unmapped: list[Array] = _unmapped().bind(
                *args, lanes=lanes, sizes=sizes, num_envs=num_envs, results=tuple(wide)
            )
            return unmapped

        def mapped(size: int, batched: list[bool], *args: Array) -> tuple[list[Array], list[bool]]:
            if lanes is None:
                raise ValueError(
                    f"A bridge cannot be called under jax.vmap: there is one of each of its {num_envs} environments. Build "
                    f"{size} times as many and bridge(..., lanes={size}) them, or keep the environments out of vmap and map "
                    "the policy."
                )
            if left % size:
                called = f"it is called under jax.vmap over {_over((size, *sizes))}"
                raise ValueError(f"This bridge has lanes={lanes}; {called}. {_advice((size, *sizes), num_envs)}")
            every = [
                arg if is_batched else jnp.broadcast_to(arg, (size, *arg.shape))
                for arg, is_batched in zip(args, batched, strict=True)
            ]
            return under((size, *sizes))(*every), [True] * len(results)

        return _with_rule(alone, mapped)

    called: list[Array] = under(())(*args)
    return called


def _over(sizes: tuple[int, ...]) -> str:
    return " times ".join(map(str, sizes))


def _advice(sizes: tuple[int, ...], num_envs: int) -> str:
    """What to do to have so many lanes; a bridge cannot get more, because each lane's environments are made before."""
    wanted = math.prod(sizes)
    return f"For {wanted} lanes of {num_envs}, make {wanted * num_envs} environments and bridge(..., lanes={wanted}) them."


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
    primitive.def_abstract_eval(lambda *_, results, **__: [jax.core.ShapedArray(r.shape, r.dtype) for r in results])

    def refuse(*_: Any, lanes: int, sizes: tuple[int, ...], num_envs: int, results: Any) -> Any:
        short = f"; it is called under jax.vmap over {_over(sizes)}. {_advice(sizes, num_envs)}" if sizes else "."
        raise ValueError(f"A bridge with lanes={lanes} must be called under jax.vmap over {lanes} lanes{short}")

    primitive.def_impl(refuse)
    mlir.register_lowering(primitive, refuse)
    return primitive
