"""Gymnasium's spaces as TorchRL's specs, and batches of them as tensors, to and fro.

The forms are those of TorchRL's ``GymWrapper``, so that a program that was written for it finds the same keys: entries of a
Dict space have keys of their own, anything else is ``"observation"`` or ``"action"``. Beyond it, Tuple spaces are dicts of
``"0"``, ``"1"``, ...; Discrete spaces may start anywhere; actions may be Dicts and Tuples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torchrl.data.tensor_specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Unbounded,
)

from vecenv.adapters.single import mapped

__all__ = ["Codec", "Tensors", "codec_of", "moved", "put", "rows_of", "tensor_of"]

Tensors: TypeAlias = Any
"""A tensor ``[n, ...]``, or nested dicts of them."""


@dataclass(frozen=True)
class _Leaf:
    """A space that is one tensor; see :data:`Codec`."""

    spec: Any
    encode: Callable[[Any], Tensors]
    decode: Callable[[Any], Any]


class _Branch:
    """A Dict or a Tuple."""

    def __init__(self, children: dict[str, Any], keys: tuple[Any, ...] | None, n: int) -> None:
        self.children = children
        self._keys = keys  # a Dict's, None for a Tuple
        self.spec = Composite({name: child.spec for name, child in children.items()}, shape=(n,))

    def encode(self, batch: Any) -> Tensors:
        keys = range(len(self.children)) if self._keys is None else self._keys
        return {name: child.encode(batch[key]) for key, (name, child) in zip(keys, self.children.items(), strict=True)}

    def decode(self, tensors: Any) -> Any:
        values = [child.decode(tensors[name]) for name, child in self.children.items()]
        return tuple(values) if self._keys is None else dict(zip(self._keys, values, strict=True))


Codec: TypeAlias = _Leaf | _Branch
"""What a space is in TorchRL: the ``spec`` of a batch; ``encode``, a batch of any number of rows as tensors, which shares
memory where it can; ``decode``, tensors as a batch for Gymnasium's vector environments."""


def codec_of(space: gym.Space[Any], n: int, onehot: bool, names: Callable[[str], str] = str) -> Codec:
    """What a space of single environments is in TorchRL.

    Args:
        space: Of one environment.
        n: How many environments.
        onehot: Discrete values are one-hot vectors, as is TorchRL's default.
        names: What the entries of the outermost Dict are to be called.

    Raises:
        NotImplementedError: TorchRL has nothing for the space.
    """
    if isinstance(space, spaces.Dict):
        children = {names(str(key)): codec_of(inner, n, onehot) for key, inner in space.spaces.items()}
        return _Branch(children, tuple(space.spaces), n)
    if isinstance(space, spaces.Tuple):
        return _Branch({str(i): codec_of(inner, n, onehot) for i, inner in enumerate(space.spaces)}, None, n)
    for kind, leaf in _LEAVES.items():
        if isinstance(space, kind):
            return leaf(space, n, onehot)
    raise NotImplementedError(
        f"TorchRL has no tensors for {space}: only Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of these"
    )


def _box(space: Any, n: int, onehot: bool) -> _Leaf:
    dtype = _dtype(space.dtype)
    if dtype is torch.bool:
        return _binary(space, n, onehot)
    low, high = torch.as_tensor(space.low), torch.as_tensor(space.high)
    if dtype.is_floating_point and bool(low.isinf().all()) and bool(high.isinf().all()):
        spec: Any = Unbounded(shape=space.shape, dtype=dtype)
    else:
        if dtype.is_floating_point:
            limits = torch.finfo(dtype)
            low, high = low.clamp(limits.min, limits.max), high.clamp(limits.min, limits.max)
        spec = Bounded(low, high, shape=space.shape, dtype=dtype)
    return _Leaf(spec.expand(n, *space.shape), tensor_of, _array)


def _discrete(space: Any, n: int, onehot: bool) -> _Leaf:
    count, start = int(space.n), int(space.start)

    def encode(batch: Any) -> Any:
        values = tensor_of(batch).long()
        values = values - start if start else values
        return torch.nn.functional.one_hot(values, count) if onehot else values

    def decode(tensor: Any) -> Any:
        # as TorchRL has it, a one-hot vector may be any vector: what is largest is meant
        values = _array(tensor.to(torch.float32).argmax(-1) if onehot else tensor.long())
        return values + start if start else values

    kind = OneHot if onehot else Categorical
    spec = kind(count, dtype=torch.long)
    return _Leaf(spec.expand(n, *spec.shape), encode, decode)


def _multi_discrete(space: Any, n: int, onehot: bool) -> _Leaf:
    counts = [int(count) for count in space.nvec.reshape(-1)]
    start = torch.as_tensor(np.asarray(space.start)).long().reshape(-1)

    def encode(batch: Any) -> Any:
        values = tensor_of(batch).long().reshape(-1, len(counts)) - start
        if not onehot:
            return values
        hot = [torch.nn.functional.one_hot(values[:, i], count) for i, count in enumerate(counts)]
        return torch.cat(hot, -1)

    def decode(tensor: Any) -> Any:
        if onehot:
            parts = tensor.to(torch.float32).split(counts, -1)
            tensor = torch.stack([part.argmax(-1) for part in parts], -1)
        values = _array(tensor.long()) + start.numpy()
        return values.reshape(-1, *space.nvec.shape).astype(space.dtype)

    spec = (MultiOneHot if onehot else MultiCategorical)(counts, dtype=torch.long)
    return _Leaf(spec.expand(n, *spec.shape), encode, decode)


def _binary(space: Any, n: int, onehot: bool) -> _Leaf:
    return _Leaf(Binary(shape=(n, *space.shape), dtype=_dtype(space.dtype)), tensor_of, _array)


_LEAVES: dict[type[Any], Callable[[Any, int, bool], _Leaf]] = {
    spaces.Box: _box,
    spaces.Discrete: _discrete,
    spaces.MultiDiscrete: _multi_discrete,
    spaces.MultiBinary: _binary,
}


def _dtype(dtype: Any) -> torch.dtype:
    found: torch.dtype = torch.from_numpy(np.empty(0, dtype)).dtype
    return found


def tensor_of(values: Any) -> torch.Tensor:
    """An array of any library as a tensor that may be written to, on the device where it lies."""
    if isinstance(values, torch.Tensor):
        return values
    if isinstance(values, np.ndarray):
        return torch.from_numpy(values if values.flags.writeable else values.copy())
    if hasattr(values, "__dlpack__"):
        return torch.from_dlpack(values).clone()  # JAX arrays never change
    return torch.as_tensor(values)


def _array(tensor: Any) -> Any:
    return tensor.detach().cpu().numpy()


def moved(tensors: Tensors, device: Any) -> Tensors:
    """The same on a device."""
    return mapped(lambda one: one if device is None or one.device == device else one.to(device), tensors)


def rows_of(tensors: Tensors, rows: Any) -> Tensors:
    """A copy of some rows; ``rows`` is anything that indexes a tensor."""
    return mapped(lambda one: one[rows].clone(), tensors)


def put(tensors: Tensors, rows: Any, values: Tensors) -> None:
    """Write ``values`` into some rows of ``tensors``, in place."""
    if isinstance(tensors, Mapping):
        for key, value in tensors.items():
            put(value, rows, values[key])
    else:
        tensors[rows] = values
