"""Gymnasium spaces that compiled programs can use: ``sample(key)`` and ``contains(x)`` of JAX arrays.

``space.sample()`` draws from a generator in Python. Inside ``jax.jit`` that happens once, while the program is traced, and
the program then has one constant for ever, with no sign of it. For all other code these are the same spaces (equal, batched
and pickled like any), but ``sample(key)`` draws by JAX, and ``sample()`` within a trace is an error.
"""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from vecenv.jax.state import Array, PyTree

__all__ = ["JaxBox", "JaxDict", "JaxDiscrete", "JaxMultiBinary", "JaxMultiDiscrete", "JaxTuple", "jax_space"]

class _ForJax:
    """``sample`` and ``contains`` for JAX over those of a Gymnasium space."""

    def sample(self, mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        """A random element: by a JAX key, if that is what is given, and otherwise as Gymnasium does.

        Args:
            mask: A key (``jax.random.key(0)``, or a raw ``uint32[k]``), or Gymnasium's mask.
            *args, **kwargs: Gymnasium's own.

        Returns:
            For a key, arrays of JAX in the dtypes that it has for those of the space (``int32`` for ``int64``).

        Raises:
            ValueError: There is no key, and a program is being traced.
        """
        if is_key(mask):
            return _drawn(self, mask)
        if _is_traced():
            raise ValueError(
                f"{self}.sample() inside a compiled program would be one constant for ever: give it a key, sample(key)."
            )
        return super().sample(mask, *args, **kwargs)  # type: ignore[misc]

    def contains(self, x: Any) -> Any:
        """Whether ``x`` is in the space; ``bool[]`` of JAX where ``x`` has arrays of JAX."""
        if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x)):
            return _holds(self, x)
        return super().contains(x)  # type: ignore[misc]


class JaxBox(_ForJax, spaces.Box):
    """See :func:`jax_space`."""


class JaxDiscrete(_ForJax, spaces.Discrete):
    """See :func:`jax_space`."""


class JaxMultiDiscrete(_ForJax, spaces.MultiDiscrete):
    """See :func:`jax_space`."""


class JaxMultiBinary(_ForJax, spaces.MultiBinary):
    """See :func:`jax_space`."""


class JaxDict(_ForJax, spaces.Dict):
    """See :func:`jax_space`."""


class JaxTuple(_ForJax, spaces.Tuple):  # type: ignore[type-arg]
    """See :func:`jax_space`."""


_KINDS: dict[type[Any], type[Any]] = {
    spaces.Box: JaxBox,
    spaces.Discrete: JaxDiscrete,
    spaces.MultiDiscrete: JaxMultiDiscrete,
    spaces.MultiBinary: JaxMultiBinary,
    spaces.Dict: JaxDict,
    spaces.Tuple: JaxTuple,
}


def jax_space(space: gym.Space[Any]) -> Any:
    """The same space with ``sample(key)`` and ``contains(x)`` for compiled programs, and ``sample()`` refused inside them.

    Args:
        space: Any Gymnasium space; it is not changed. Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of those
            are what JAX has arrays for; another one, and a class derived from one of these, is returned as it is.

    ``space.sample(key)`` is uniform where Gymnasium is uniform, and for a Box without bounds what Gymnasium draws there: a
    normal number, or an exponential one from the bound on. ``space.contains(x)`` is ``bool[]``; shapes and kinds of dtypes
    are checked while the program is traced.
    """
    kind = _KINDS.get(type(space))
    if kind is None:
        return space
    found: Any = object.__new__(kind)
    found.__dict__.update(copy.deepcopy(space).__dict__)
    if isinstance(found, spaces.Dict):
        found.spaces = type(found.spaces)((key, jax_space(inner)) for key, inner in found.spaces.items())
    elif isinstance(found, spaces.Tuple):
        found.spaces = tuple(jax_space(inner) for inner in found.spaces)
    return found


def _is_traced() -> bool:
    """Whether a program is being traced: then even what is computed from constants is a part of the program."""
    return isinstance(jax.lax.stop_gradient(0.0), jax.core.Tracer)


def is_key(value: Any) -> bool:
    """Whether ``value`` is a key of JAX: one with a type of its own, or raw numbers (what Gymnasium's masks never are)."""
    if not isinstance(value, jax.Array):
        return False
    return bool(jnp.issubdtype(value.dtype, jax.dtypes.prng_key) or value.dtype == jnp.uint32)


def _drawn(space: Any, key: Array) -> PyTree:
    if isinstance(space, spaces.Dict):
        keys = jax.random.split(key, max(len(space.spaces), 1))
        return {name: _drawn(inner, one) for (name, inner), one in zip(space.spaces.items(), keys, strict=False)}
    if isinstance(space, spaces.Tuple):
        keys = jax.random.split(key, max(len(space.spaces), 1))
        return tuple(_drawn(inner, one) for inner, one in zip(space.spaces, keys, strict=False))
    if isinstance(space, spaces.Box):
        return _box(space, key)
    dtype = jax.dtypes.canonicalize_dtype(space.dtype)
    if isinstance(space, spaces.Discrete):
        return jax.random.randint(key, (), int(space.start), int(space.start + space.n), dtype)
    if isinstance(space, spaces.MultiDiscrete):
        return jax.random.randint(key, space.shape, space.start, space.start + space.nvec, dtype)
    if isinstance(space, spaces.MultiBinary):
        return jax.random.bernoulli(key, shape=space.shape).astype(dtype)
    raise TypeError(f"{space} has no samples in JAX; Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple have.")


def _box(space: spaces.Box, key: Array) -> Array:
    dtype = jax.dtypes.canonicalize_dtype(space.dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        wide = jnp.int32 if dtype.itemsize < 4 or dtype == jnp.bool_ else dtype
        below, above = np.asarray(space.low, wide), np.asarray(space.high, wide)
        above = np.minimum(above, np.iinfo(wide).max - 1) + 1
        drawn = jax.random.randint(key, space.shape, below, above, wide)
        return drawn.astype(dtype)
    low, high = jnp.asarray(space.low, dtype), jnp.asarray(space.high, dtype)
    floor, roof = np.asarray(space.bounded_below), np.asarray(space.bounded_above)
    within, free, tail = jax.random.split(key, 3)
    both = floor & roof
    uniform = jax.random.uniform(within, space.shape, dtype, jnp.where(both, low, 0.0), jnp.where(both, high, 1.0))
    exponential = jax.random.exponential(tail, space.shape, dtype)
    half = jnp.where(floor, low + exponential, high - exponential)
    return jnp.where(both, uniform, jnp.where(floor | roof, half, jax.random.normal(free, space.shape, dtype)))


def _holds(space: Any, x: Any) -> Array:
    no, yes = jnp.asarray(False), jnp.asarray(True)
    if isinstance(space, spaces.Dict):
        if not isinstance(x, dict) or set(x) != set(space.spaces):
            return no
        return _all([_holds(inner, x[name]) for name, inner in space.spaces.items()])
    if isinstance(space, spaces.Tuple):
        if not isinstance(x, tuple) or len(x) != len(space.spaces):
            return no
        return _all([_holds(inner, one) for inner, one in zip(space.spaces, x, strict=True)])
    x = jnp.asarray(x)
    if x.shape != space.shape or not _fits(x.dtype, space):
        return no
    if isinstance(space, spaces.Box):
        return jnp.all((x >= space.low) & (x <= space.high))
    if isinstance(space, spaces.MultiBinary):
        return jnp.all((x == 0) | (x == 1))
    low, count = space.start, space.n if isinstance(space, spaces.Discrete) else space.nvec
    return yes & jnp.all((x >= low) & (x < low + count))


def _fits(dtype: Any, space: Any) -> bool:
    if isinstance(space, spaces.Box):
        return bool(np.can_cast(dtype, space.dtype, "same_kind"))
    return bool(jnp.issubdtype(dtype, jnp.integer) or (isinstance(space, spaces.MultiBinary) and dtype == jnp.bool_))


def _all(each: list[Array]) -> Array:
    return jnp.all(jnp.stack(each)) if each else jnp.asarray(True)
