"""Seeds, arrays and a single environment in the forms of Gymnasium, numpy and torch.

What crosses to another library has to be the receiver's own. numpy gets one fresh, writeable copy an array, in the dtype of
its space, because Gymnasium's wrappers write into what they are given. torch may write into what DLPack hands over without
a copy, so it gets buffers that nothing else reads: copies made on the device, next to which the hand-over itself costs
nothing. JAX arrays cannot be written to and are given as they are.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from vecenv.jax.env import Fixed
from vecenv.jax.libraries import adapt
from vecenv.jax.state import PyTree

__all__ = [
    "GymEnv", "entropy_seeds", "from_torch", "info_arrays", "masked_infos", "require_torch", "rows_of", "seed_keys",
    "to_numpy", "to_torch",
]  # fmt: skip

def to_numpy(space: gym.Space[Any], tree: PyTree) -> Any:
    """Observations as ``space`` has them: fresh numpy arrays in its dtypes, in its order of keys."""
    if isinstance(space, spaces.Dict):
        return {key: to_numpy(sub, tree[key]) for key, sub in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(to_numpy(sub, part) for sub, part in zip(space.spaces, tree, strict=True))
    array = np.array(tree, dtype=space.dtype)
    return array[()] if isinstance(space, spaces.Discrete) else array


def rows_of(space: gym.Space[Any], tree: PyTree, row: int) -> Any:
    """Row ``row`` of a batch of observations (numpy leaves), as one observation of the single ``space``."""
    return to_numpy(space, jax.tree.map(lambda leaf: leaf[row], tree))


def info_arrays(info: PyTree) -> dict[str, Any]:
    """An info dict with numpy arrays for leaves."""
    return {k: info_arrays(v) if isinstance(v, dict) else np.asarray(v) for k, v in info.items()}


def masked_infos(info: dict[str, Any], mask: Any) -> dict[str, Any]:
    """Gymnasium's form of infos: a column and its mask ``_key`` for each key, at every level.

    Args:
        info: Columns ``[n, ...]``, numpy or JAX, nested or not.
        mask: ``bool[n]``: the rows that report them. numpy columns are copied, and zero elsewhere; where no row reports
            anything, there are no keys at all. JAX columns are given as they are.
    """
    out: dict[str, Any] = {}
    on_host = isinstance(mask, np.ndarray)
    if on_host and not mask.any():
        return out
    every = on_host and bool(mask.all())
    for key, column in info.items():
        if isinstance(column, dict):
            out[key] = masked_infos(column, mask)
        elif not on_host:
            out[key] = column
        else:
            out[key] = np.array(column)
            if not every:
                out[key][~mask] = 0
        out[f"_{key}"] = mask.copy() if on_host else mask
    return out


@jax.jit
def _own(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.copy, tree)


def require_torch() -> None:
    """Raise ``ImportError`` now, not in the first reset, where torch is not installed."""
    try:
        importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError("to='torch' needs torch, not installed here: pip install torch") from error


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
    words = []
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**64:
            raise gym.error.Error(f"Seed must be an integer from 0 to 2**64 - 1, got {seed!r}.")
        words.append((int(seed) >> 32, int(seed) & 0xFFFFFFFF))
    raw = np.asarray(words, np.uint32)
    if jax.random.key_data(jax.random.key(0)).shape == (2,):  # threefry: a key is its seed
        return raw
    make: Any = jax.vmap(lambda high, low: jax.random.key_data(jax.random.fold_in(jax.random.key(low), high)))
    return np.asarray(make(raw[:, 0], raw[:, 1]))


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
        self.metadata = {
            "render_modes": ["rgb_array"],
            "render_fps": getattr(adapted, "frames_per_second", 0) or 30,
        }
        self.lanes = lanes
        self._init = jax.jit(jax.vmap(lambda key: self.single_env.init(jax.random.fold_in(key, 0))))
        self._step = jax.jit(jax.vmap(lambda s, a, key, t: self.single_env.step(s, a, jax.random.fold_in(key, t))))
        self._key: Any = None
        self._episode = 0
        self._steps = 0
        self._state: Any = None

    def twin(self) -> GymEnv:
        """Another environment that shares the compiled functions with this one: ``SyncVectorEnv([env.twin] * n)``."""
        twin = object.__new__(GymEnv)
        twin.__dict__.update(self.__dict__, _key=None, _episode=0, _steps=0, _state=None)
        return twin

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode: the first of ``seed``, or the next of the stream that is running."""
        super().reset(seed=seed)
        if seed is None and self._key is not None:
            self._episode += 1
        else:
            self._key = seed_keys(entropy_seeds(1) if seed is None else [seed])[0]
            self._episode = 0
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
        return to_numpy(self.observation_space, obs), float(reward), bool(terminated), cut, info_arrays(info)

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
