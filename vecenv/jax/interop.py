"""Spaces, seeds, arrays and a single environment in the forms of Gymnasium, JAX, numpy and torch.

``space.sample()`` draws from a generator in Python. Inside ``jax.jit`` that happens once, while the program is traced, and
the program then has one constant for ever, with no sign of it. :func:`jax_space` gives the same space to all other code
(equal, batched and pickled like any), but ``sample(key)`` draws by JAX, and ``sample()`` within a trace is an error.

What crosses to another library has to be the receiver's own. numpy gets one fresh, writeable copy an array, in the dtype of
its space, because Gymnasium's wrappers write into what they are given. torch may write into what DLPack hands over without
a copy, so it gets buffers that nothing else reads: copies made on the device, next to which the hand-over itself costs
nothing. JAX arrays cannot be written to and are given as they are.
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

from vecenv.jax.env import Array, Fixed, PyTree
from vecenv.jax.libraries import adapt

__all__ = [
    "GymEnv", "entropy_seeds", "from_torch", "jax_space", "keys_from", "masked_infos", "seed_keys", "to_numpy", "to_torch",
]  # fmt: skip


def to_numpy(space: gym.Space[Any], tree: PyTree) -> Any:
    """Observations as ``space`` has them: fresh numpy arrays in its dtypes, in its order of keys."""
    if isinstance(space, spaces.Dict):
        return {key: to_numpy(sub, tree[key]) for key, sub in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(to_numpy(sub, part) for sub, part in zip(space.spaces, tree, strict=True))
    array = np.array(tree, dtype=space.dtype)
    return array[()] if isinstance(space, spaces.Discrete) else array


def masked_infos(info: dict[str, Any], mask: Any) -> dict[str, Any]:
    """Gymnasium's form of infos: a column and its mask ``_key`` for each key, at every level.

    Args:
        info: Columns ``[n, ...]``, numpy or JAX, nested or not.
        mask: ``bool[n]``: the rows that report them. numpy columns are copied, and zero elsewhere; where no row reports
            anything, there are no keys at all. JAX columns are given as they are.
    """
    on_host = isinstance(mask, np.ndarray)
    if on_host and not mask.any():
        return {}
    out: dict[str, Any] = {}
    for key, column in info.items():
        if isinstance(column, dict):
            out[key] = masked_infos(column, mask)
        else:
            out[key] = np.array(column) if on_host else column
            if on_host and not mask.all():
                out[key][~mask] = 0
        out[f"_{key}"] = mask.copy() if on_host else mask
    return out


@jax.jit
def _own(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.copy, tree)


def to_torch(tree: PyTree) -> Any:
    """torch tensors on the same device, which the caller may write to."""
    import torch

    return jax.tree.map(torch.from_dlpack, _own(tree))


def from_torch(tree: Any) -> Any:
    """Actions from torch: any tensors among the leaves become arrays that later writes to the tensors do not reach."""
    import torch

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.detach()
        if leaf.device.type == "cpu":
            return leaf.numpy()  # copied by the call that takes it
        return jnp.copy(jax.dlpack.from_dlpack(leaf.contiguous()))

    return jax.tree.map(convert, tree)


def seed_keys(seeds: Sequence[int]) -> np.ndarray[Any, Any]:
    """Raw keys ``uint32[len(seeds), k]`` of the default generator, equal to ``jax.random.key(seed)`` for seeds below 2**32.

    Larger seeds keep their bits 32 to 63, which ``jax.random.key`` does only in 64-bit mode.

    Raises:
        gymnasium.error.Error: A seed is negative or no integer, as Gymnasium's own environments say.
    """
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**64:
            raise gym.error.Error(f"Seed must be an integer from 0 to 2**64 - 1, got {seed!r}.")
    raw = np.asarray([(int(seed) >> 32, int(seed) & 0xFFFFFFFF) for seed in seeds], np.uint32)
    if jax.random.key_data(jax.random.key(0)).shape == (2,):  # threefry: a key is its seed
        return raw
    make: Any = jax.vmap(lambda high, low: jax.random.key_data(jax.random.fold_in(jax.random.key(low), high)))
    return np.asarray(make(raw[:, 0], raw[:, 1]))


def keys_from(seed: int | None, count: int) -> np.ndarray[Any, Any]:
    """Raw keys of ``count`` environments for a reset: environment i has ``seed + i``; ``None``: an unpredictable one."""
    return seed_keys(entropy_seeds(count) if seed is None else [seed + i for i in range(count)])


def entropy_seeds(count: int) -> list[int]:
    """Unpredictable seeds, for a reset that names none."""
    return [int(word) for word in np.random.SeedSequence().generate_state(count, np.uint64)]


class GymEnv(gym.Env[Any, Any]):
    """A ``gymnasium.Env`` over a JAX-native environment.

    Args:
        env: Anything :func:`~vecenv.jax.adapt` takes.
        max_episode_steps: As for :class:`~vecenv.jax.FunctionalVectorEnv`.
        lanes: Width of the compiled batch, of which this environment is every row. XLA rounds differently in programs of
            different width (ant: 3e-5 after 40 steps against no batch at all); to be equal bit for bit to an n-row vector,
            be n lanes wide.
        render_mode: ``"rgb_array"`` or ``None``.

    Raises:
        Exception: As :func:`~vecenv.jax.adapt`.
    """

    def __init__(
        self, env: Any, max_episode_steps: int | None = None, lanes: int = 1, render_mode: str | None = None
    ) -> None:
        adapted = adapt(env, max_episode_steps=max_episode_steps)
        self.single_env = Fixed(adapted)
        self.max_episode_steps = adapted.max_episode_steps
        self.observation_space = adapted.single_observation_space
        self.action_space = adapted.single_action_space
        self.render_mode = render_mode
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": getattr(adapted, "frames_per_second", 0) or 30}
        self.lanes = lanes
        self._init = jax.jit(jax.vmap(lambda key: self.single_env.init(jax.random.fold_in(key, 0))))
        self._step = jax.jit(jax.vmap(lambda s, a, key, t: self.single_env.step(s, a, jax.random.fold_in(key, t))))
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._key: Any = None
        self._state: Any = None
        self._episode = self._steps = 0

    def twin(self) -> GymEnv:
        """Another environment that shares the compiled functions with this one: ``SyncVectorEnv([env.twin] * n)``."""
        twin = object.__new__(GymEnv)
        twin.__dict__.update(self.__dict__)
        twin._begin_anew()
        return twin

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode: the first of ``seed``, or the next of the stream that is running."""
        super().reset(seed=seed)
        if seed is None and self._key is not None:
            self._episode += 1
        else:
            self._key, self._episode = keys_from(seed, 1)[0], 0
        self._steps = 0
        self._state, obs = self._init(self._wide(self._episode_key()))
        return to_numpy(self.observation_space, _first(obs)), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step.

        Raises:
            gymnasium.error.ResetNeeded: Before the first ``reset``.
        """
        if self._state is None:
            raise gym.error.ResetNeeded("Call reset before step.")
        self._steps += 1
        self._state, *out = self._step(
            self._state, self._wide(action), self._wide(self._episode_key()), self._wide(np.int32(self._steps))
        )
        obs, reward, terminated, truncated, info = _first(out)
        limit = self.max_episode_steps
        cut = bool(truncated) or (limit is not None and self._steps >= limit)
        return to_numpy(self.observation_space, obs), float(reward), bool(terminated), cut, jax.tree.map(np.asarray, info)

    def render(self) -> Any:
        """The current frame, ``uint8[height, width, 3]``, or ``None`` without a ``render_mode``."""
        return None if self.render_mode is None else self.single_env.render(jax.tree.map(lambda leaf: leaf[0], self._state))

    def _episode_key(self) -> Any:
        return jax.random.fold_in(self._key, self._episode)

    def _wide(self, tree: Any) -> Any:
        """``lanes`` rows of the same. Made here, not in the compiled function: XLA would notice, and compute one row."""
        return jax.tree.map(lambda x: np.repeat(np.asarray(x)[None], self.lanes, 0), tree)


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf)[0], tree)


# -- spaces ------------------------------------------------------------------------------------------------------------


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
        if isinstance(mask, jax.Array) and (jnp.issubdtype(mask.dtype, jax.dtypes.prng_key) or mask.dtype == jnp.uint32):
            return _drawn(self, mask)  # (Gymnasium's masks are never of uint32)
        if isinstance(jax.lax.stop_gradient(0.0), jax.core.Tracer):  # a program is being traced
            raise ValueError(
                f"{self}.sample() inside a compiled program would be one constant for ever: give it a key, sample(key)."
            )
        return super().sample(mask, *args, **kwargs)  # type: ignore[misc]

    def contains(self, x: Any) -> Any:
        """Whether ``x`` is in the space; ``bool[]`` of JAX where ``x`` has arrays of JAX."""
        if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x)):
            return _holds(self, x)
        return super().contains(x)  # type: ignore[misc]


_KINDS: dict[type[Any], type[Any]] = {
    kind: type(f"Jax{kind.__name__}", (_ForJax, kind), {"__doc__": "See :func:`jax_space`.", "__module__": __name__})
    for kind in (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Dict, spaces.Tuple)
}
globals().update({kind.__name__: kind for kind in _KINDS.values()})  # where a pickle looks for them


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


def _drawn(space: Any, key: Array) -> PyTree:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        keys = jax.random.split(key, max(len(space.spaces), 1))
        if isinstance(space, spaces.Dict):
            return {name: _drawn(inner, one) for (name, inner), one in zip(space.spaces.items(), keys, strict=False)}
        return tuple(_drawn(inner, one) for inner, one in zip(space.spaces, keys, strict=False))
    dtype = jax.dtypes.canonicalize_dtype(space.dtype)
    if isinstance(space, spaces.Discrete):
        return jax.random.randint(key, (), int(space.start), int(space.start + space.n), dtype)
    if isinstance(space, spaces.MultiDiscrete):
        return jax.random.randint(key, space.shape, space.start, space.start + space.nvec, dtype)
    if isinstance(space, spaces.MultiBinary):
        return jax.random.bernoulli(key, shape=space.shape).astype(dtype)
    if isinstance(space, spaces.Box):
        return _floats(space, key, dtype) if jnp.issubdtype(dtype, jnp.floating) else _integers(space, key, dtype)
    raise TypeError(f"{space} has no samples in JAX; Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple have.")


def _integers(space: spaces.Box, key: Array, dtype: Any) -> Array:
    wide = jnp.int32 if dtype.itemsize < 4 or dtype == jnp.bool_ else dtype
    below, above = np.asarray(space.low, wide), np.asarray(space.high, wide)
    above = np.minimum(above, np.iinfo(wide).max - 1) + 1
    return jax.random.randint(key, space.shape, below, above, wide).astype(dtype)


def _floats(space: spaces.Box, key: Array, dtype: Any) -> Array:
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
    if isinstance(space, spaces.Dict | spaces.Tuple):
        keyed, inner = isinstance(space, spaces.Dict), space.spaces
        names: Any = list(inner) if keyed else range(len(inner))
        same = isinstance(x, dict if keyed else tuple) and set(x if keyed else range(len(x))) == set(names)
        held = [_holds(inner[name], x[name]) for name in names] if same else [no]
        return jnp.all(jnp.stack([yes, *held]))
    x = jnp.asarray(x)
    if x.shape != space.shape or not _fits(x.dtype, space):
        return no
    if isinstance(space, spaces.Box):
        return jnp.all((x >= space.low) & (x <= space.high))
    if isinstance(space, spaces.MultiBinary):
        return jnp.all((x == 0) | (x == 1))
    low, count = space.start, space.n if isinstance(space, spaces.Discrete) else space.nvec
    return jnp.all((x >= low) & (x < low + count))


def _fits(dtype: Any, space: Any) -> bool:
    if isinstance(space, spaces.Box):
        return bool(np.can_cast(dtype, space.dtype, "same_kind"))
    return bool(jnp.issubdtype(dtype, jnp.integer) or (isinstance(space, spaces.MultiBinary) and dtype == jnp.bool_))
