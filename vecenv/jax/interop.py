"""Conversions of spaces, seeds and arrays between Gymnasium, JAX, NumPy and torch.

``space.sample()`` draws from a NumPy generator. Inside ``jax.jit`` that happens only once, during tracing, and silently
compiles a constant into the program. The spaces of :func:`jax_space` draw with JAX in ``sample(key)`` and refuse
``sample()`` while tracing; otherwise they behave like the original ones (they compare equal, and are batched and pickled in
the same way).

Arrays are copied for libraries that can write to them. For NumPy, each array becomes a fresh, writeable copy in the dtype of
its space, because Gymnasium's wrappers write to their inputs. torch can write to a buffer shared through DLPack, so it gets
copies made on the device. JAX arrays cannot be written to and are passed unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from vecenv.jax.env import Array, PyTree


def to_numpy(space: gym.Space[Any], tree: PyTree) -> Any:
    """Convert observations to fresh NumPy arrays (scalars for Discrete) with the dtypes and the key order of ``space``."""
    if isinstance(space, spaces.Dict):
        return {key: to_numpy(sub, tree[key]) for key, sub in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(to_numpy(sub, part) for sub, part in zip(space.spaces, tree, strict=True))
    array = np.array(tree, dtype=space.dtype)
    return array[()] if isinstance(space, spaces.Discrete) else array


def masked_infos(info: dict[str, Any], mask: Any) -> dict[str, Any]:
    """Return infos in Gymnasium's form: each key gets a mask ``_key`` beside its column, at every level.

    Args:
        info: Columns ``[n, ...]``, nested or not.
        mask: ``bool[n]``: the rows that report infos. With a NumPy mask, columns are copied to NumPy, with zeros in other
            rows; if no row reports infos, the dict is empty. With a JAX mask, columns are returned unchanged.
    """
    on_host = isinstance(mask, np.ndarray)
    if on_host and not mask.any():
        return {}
    masked: dict[str, Any] = {}
    for key, column in info.items():
        if isinstance(column, dict):
            masked[key] = masked_infos(column, mask)
        else:
            masked[key] = np.array(column) if on_host else column
            if on_host and not mask.all():
                masked[key][~mask] = 0
        masked[f"_{key}"] = mask.copy() if on_host else mask
    return masked


@jax.jit
def _copy_arrays(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.copy, tree)


def to_torch(tree: PyTree) -> Any:
    """Copy arrays to writeable torch tensors on the same device."""
    import torch

    return jax.tree.map(torch.from_dlpack, _copy_arrays(tree))


def from_torch(tree: Any) -> Any:
    """Convert the torch tensors in a tree: those on a CPU to NumPy arrays that share their memory, others to JAX copies."""
    import torch

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.detach()
        if leaf.device.type == "cpu":
            return leaf.numpy()
        return jnp.copy(jax.dlpack.from_dlpack(leaf.contiguous()))

    return jax.tree.map(convert, tree)


def seed_keys(seeds: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return raw keys ``uint32[len(seeds), k]`` of the default generator: ``jax.random.key(seed)`` for seeds below 2**32.

    Larger seeds also use their bits 32 to 63, as ``jax.random.key`` does only in 64-bit mode.

    Raises:
        gymnasium.error.Error: A seed is not an integer from 0 to 2**64 - 1.
    """
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**64:
            raise gym.error.Error(f"Seed must be an integer from 0 to 2**64 - 1, got {seed!r}.")
    raw = np.asarray([(int(seed) >> 32, int(seed) & 0xFFFFFFFF) for seed in seeds], np.uint32)
    (width,) = jax.random.key_data(jax.random.key(0)).shape  # threefry: 2, the halves of the seed; rbg: 4, the halves twice
    return np.tile(raw, width // 2)


def keys_from(seed: int | None, count: int) -> np.ndarray[Any, Any]:
    """Return raw keys of ``count`` environments for a reset, from the seeds ``seed + i``, or random ones for ``None``."""
    return seed_keys(entropy_seeds(count) if seed is None else [seed + i for i in range(count)])


def entropy_seeds(count: int) -> list[int]:
    """Return unpredictable seeds, for a reset without a seed."""
    return [int(word) for word in np.random.SeedSequence().generate_state(count, np.uint64)]


# -- spaces ------------------------------------------------------------------------------------------------------------


class _JaxSpaceMixin:
    """A mixin that makes ``sample`` and ``contains`` of a Gymnasium space accept JAX keys and arrays."""

    def sample(self, mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return a random element: drawn by JAX if ``mask`` is a JAX key, otherwise by Gymnasium.

        Args:
            mask: A key (``jax.random.key(0)``, or a raw ``uint32[k]``), or Gymnasium's mask.
            *args, **kwargs: Further arguments of Gymnasium's method.

        Returns:
            For a key, JAX arrays in JAX's equivalents of the space's dtypes (``int32`` for ``int64``).

        Raises:
            OverflowError: ``mask`` is a key, and the bounds of the space do not fit JAX's equivalent of its dtype.
            TypeError: ``mask`` is a key, and a part of a Dict or Tuple is a space that JAX cannot sample.
            ValueError: A program is being traced, and ``mask`` is not a key.
        """
        if isinstance(mask, jax.Array) and (jnp.issubdtype(mask.dtype, jax.dtypes.prng_key) or mask.dtype == jnp.uint32):
            return _sample(self, mask)  # Gymnasium's masks are never uint32
        if isinstance(jax.lax.stop_gradient(0.0), jax.core.Tracer):  # a program is being traced
            raise ValueError(f"{self}.sample() inside a compiled program would become a constant; pass a key: sample(key).")
        return super().sample(mask, *args, **kwargs)  # type: ignore[misc]

    def contains(self, x: Any) -> Any:
        """True if ``x`` is in the space; a JAX ``bool[]`` if ``x`` contains JAX arrays."""
        if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x)):
            return _contains(self, x)
        return super().contains(x)  # type: ignore[misc]


_JAX_CLASSES: dict[type[Any], type[Any]] = {
    cls: type(f"Jax{cls.__name__}", (_JaxSpaceMixin, cls), {"__doc__": "See :func:`jax_space`.", "__module__": __name__})
    for cls in (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Dict, spaces.Tuple)
}
globals().update({cls.__name__: cls for cls in _JAX_CLASSES.values()})  # pickle looks up classes in their module


def jax_space(space: gym.Space[Any]) -> Any:
    """Return an equal space with ``sample(key)`` and ``contains(x)`` for compiled programs, where ``sample()`` raises.

    Args:
        space: Any Gymnasium space; it is not changed. Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of these
            are supported. Any other space, including an instance of a subclass, is returned unchanged.

    ``space.sample(key)`` has Gymnasium's distributions: uniform, except for a Box without bounds (normal) or with one bound
    (exponential, starting at the bound). ``space.contains(x)`` is ``bool[]``; shapes and kinds of dtypes are checked while
    the program is traced.
    """
    cls = _JAX_CLASSES.get(type(space))
    if cls is None:
        return space
    converted: Any = object.__new__(cls)
    converted.__dict__.update(copy.deepcopy(space).__dict__)
    if isinstance(converted, spaces.Dict):
        converted.spaces = type(converted.spaces)((key, jax_space(inner)) for key, inner in converted.spaces.items())
    elif isinstance(converted, spaces.Tuple):
        converted.spaces = tuple(jax_space(inner) for inner in converted.spaces)
    return converted


def _sample(space: Any, key: Array) -> PyTree:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        keys = jax.random.split(key, max(len(space.spaces), 1))
        if isinstance(space, spaces.Dict):
            return {name: _sample(inner, subkey) for (name, inner), subkey in zip(space.spaces.items(), keys, strict=False)}
        return tuple(_sample(inner, subkey) for inner, subkey in zip(space.spaces, keys, strict=False))
    dtype = jax.dtypes.canonicalize_dtype(space.dtype)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return _sample_integers(space, key, *_first_and_last(space), dtype)
    if isinstance(space, spaces.MultiBinary):
        return jax.random.bernoulli(key, shape=space.shape).astype(dtype)
    if isinstance(space, spaces.Box):
        return _sample_box(space, key, jnp.dtype(jnp.int8) if dtype == jnp.bool_ else dtype).astype(dtype)
    raise TypeError(f"{space} cannot be sampled in JAX; Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple can.")


def clip_to_dtype(values: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """Convert numbers to an integer dtype, clipped to its range."""
    values, limits = np.asarray(values), np.iinfo(dtype)
    with np.errstate(invalid="ignore"):
        converted = values.astype(dtype)
    least, greatest = np.array([limits.min, limits.max], dtype)
    return np.asarray(np.where(values <= limits.min, least, np.where(values >= limits.max, greatest, converted)))


def _first_and_last(space: Any) -> tuple[Any, Any]:
    """Return the inclusive bounds of a Discrete or MultiDiscrete; ``start + n`` (exclusive) may not fit the dtype."""
    return space.start, space.start + ((space.n if isinstance(space, spaces.Discrete) else space.nvec) - 1)


def _sample_integers(space: Any, key: Array, low: Any, high: Any, dtype: Any) -> Array:
    """Draw integers from ``low`` to ``high``, both included."""
    if any(np.any(clip_to_dtype(bound, dtype) != bound) for bound in (low, high)):
        raise OverflowError(f"{space}.sample(key): the bounds do not fit JAX's {dtype}. Enable JAX's 64-bit mode.")
    unsigned: Any = np.uint64 if dtype.itemsize == 8 else np.uint32
    low, high = (np.asarray(bound).astype(unsigned) for bound in (low, high))
    with np.errstate(over="ignore"):
        count = high - low + unsigned(1)  # 0 if all integers are possible
    offset = jax.random.randint(key, space.shape, 0, count, unsigned)
    if not np.all(count):
        offset = jnp.where(count == 0, jax.random.bits(key, space.shape, unsigned), offset)
    return jnp.asarray(offset + low, dtype)


def _sample_box(space: spaces.Box, key: Array, dtype: Any) -> Array:
    has_low, has_high = np.asarray(space.bounded_below), np.asarray(space.bounded_above)
    low: Any = np.where(has_low, space.low, np.where(has_high, space.high, np.zeros_like(space.low)))
    high: Any = np.where(has_high, space.high, low)
    uniform_key, normal_key, exponential_key = jax.random.split(key, 3)
    is_float = jnp.issubdtype(dtype, jnp.floating)
    if is_float:
        limit = float(np.finfo(dtype).max)
        low, high = (jnp.asarray(np.clip(bound, -limit, limit), dtype) for bound in (low, high))
        fraction = jax.random.uniform(uniform_key, space.shape, dtype)
        uniform = jnp.clip(low * (1 - fraction) + high * fraction, low, high)  # `high - low` may be infinite
    else:
        uniform = _sample_integers(space, uniform_key, low, high, dtype)
    if space.is_bounded():
        return uniform
    float_dtype = dtype if is_float else jnp.result_type(float)
    normal = jax.random.normal(normal_key, space.shape, float_dtype)
    exponential = jax.random.exponential(exponential_key, space.shape, float_dtype)
    if not is_float:
        normal, exponential = jnp.floor(normal).astype(dtype), jnp.floor(exponential).astype(dtype)
    distance = jnp.where(has_low, exponential, jnp.where(has_high, -exponential, normal))
    return jnp.where(has_low & has_high, uniform, jnp.asarray(low, dtype) + distance)


def _contains(space: Any, x: Any) -> Array:
    no, yes = jnp.asarray(False), jnp.asarray(True)
    if isinstance(space, spaces.Dict | spaces.Tuple):
        is_dict, subspaces = isinstance(space, spaces.Dict), space.spaces
        names: Any = list(subspaces) if is_dict else range(len(subspaces))
        same_keys = isinstance(x, dict if is_dict else tuple) and set(x if is_dict else range(len(x))) == set(names)
        contained = [_contains(subspaces[name], x[name]) for name in names] if same_keys else [no]
        return jnp.all(jnp.stack([yes, *contained]))
    x = jnp.asarray(x)
    if x.shape != space.shape or not _dtype_fits(x.dtype, space):
        return no
    if isinstance(space, spaces.MultiBinary):
        return jnp.all((x == 0) | (x == 1))
    low, high = (space.low, space.high) if isinstance(space, spaces.Box) else _first_and_last(space)
    if x.dtype != jnp.bool_ and np.issubdtype(space.dtype, np.integer):  # JAX would wrap bounds that do not fit x.dtype
        limits = np.iinfo(x.dtype)
        if np.any((low > limits.max) | (high < limits.min)):
            return no
        low, high = clip_to_dtype(low, x.dtype), clip_to_dtype(high, x.dtype)
    return jnp.all((x >= low) & (x <= high))


def _dtype_fits(dtype: Any, space: Any) -> bool:
    if isinstance(space, spaces.Box):
        return bool(np.can_cast(dtype, space.dtype, "same_kind"))
    return bool(jnp.issubdtype(dtype, jnp.integer) or (isinstance(space, spaces.MultiBinary) and dtype == jnp.bool_))
