"""Gradients through JAX-native environments for torch users.

A step is one torch autograd function of the state and the action. All floating-point leaves of the state, however deeply
nested, are packed into one tensor ``[num_envs, D]``, so no part of the physics can lose its gradient. Observations, rewards
and metrics are slices of that tensor, and torch differentiates through them as through any slice. All other leaves (keys,
counters, flags) are packed into a tensor of integers. The forward and backward passes are compiled; the values that the
forward pass saves for the backward pass are a pytree of JAX arrays, never torch tensors. Tensors are exchanged through
DLPack.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from vecenv.backends.jax_native import JaxVectorEnv, parse_functional
from vecenv.jax.env import EnvState
from vecenv.jax.functional import FunctionalVectorEnv
from vecenv.jax.interop import keys_from
from vecenv.jax.libraries import require_gradient

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DifferentiableEnv", "TorchState", "differentiable"]


@dataclasses.dataclass(frozen=True)
class _Slot:
    """The place of a leaf in its packed tensor: columns ``start:stop``, reshaped to ``shape``."""

    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: Any
    floating: bool
    key_impl: Any  # the name of a typed random key's generator; None for other leaves
    tensor_dtype: torch.dtype


class TorchState:
    """The state of a differentiable environment: the fields of :class:`vecenv.jax.EnvState` as torch tensors.

    ``obs``, ``reward``, ``next_obs``, ``episode_return``, ``info``, ``inner`` and the other floating-point fields are
    differentiable with respect to all actions before them; flags and counters have no gradient. Do not write to any of
    these tensors. A state can be pickled and copied, but the copy has no gradient history.

    Attributes:
        packed: All floating-point leaves, ``[num_envs, D]``.
        integers: All other leaves, ``[num_envs, M]``. ``env.state(packed, integers)`` rebuilds the state from both.
    """

    def __init__(self, env: DifferentiableEnv, packed: Tensor, integers: Tensor) -> None:
        self.packed = packed
        self.integers = integers
        self._env = env

    @property
    def done(self) -> Tensor:
        """``bool[num_envs]``: terminated or truncated."""
        return self.terminated | self.truncated

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "token" or name not in EnvState.__dataclass_fields__:
            raise AttributeError(f"TorchState has no field {name!r}")
        return self._env._field(self, name)

    def detach(self) -> TorchState:
        """Return the same state without its gradient history."""
        return TorchState(self._env, self.packed.detach(), self.integers)

    def __reduce__(self) -> Any:
        return TorchState, (self._env, self.packed.detach(), self.integers)

    def __deepcopy__(self, memo: Any) -> TorchState:
        return TorchState(self._env, self.packed.detach().clone(), self.integers.clone())


class DifferentiableEnv:
    """``reset`` and ``step`` on torch tensors, with gradients; built by :func:`differentiable`."""

    def __init__(self, functional: FunctionalVectorEnv, recipe: tuple[Any, ...], gradients: bool = True) -> None:
        self.functional = functional
        self.num_envs = functional.num_envs
        self._recipe = recipe
        self._gradients = gradients
        self._jitted_step = jax.jit(self._packed_step)
        self._jitted_forward = jax.jit(self._forward_pass)
        self._jitted_backward = jax.jit(lambda pullback, cotangent: pullback(cotangent))
        self._jitted_pack = jax.jit(self._pack)
        key_impls: list[str | None] = []

        def begin(keys: Any) -> EnvState:
            state = functional.begin(keys)
            key_impls.extend(_key_impl(leaf) for leaf in jax.tree.leaves(state))
            return state

        self._assign_columns(jax.eval_shape(begin, jnp.asarray(keys_from(0, self.num_envs))), key_impls)

    def __reduce__(self) -> Any:
        return self._recipe

    @functools.cached_property
    def device(self) -> Any:
        """The device of JAX's arrays, as a torch device."""
        return torch.from_dlpack(jnp.zeros(1)).device

    def reset(self, seed: int | None = None) -> TorchState:
        """Begin an episode in every environment.

        Environment i has the key ``jax.random.key(seed + i)``; without a seed, keys are random.
        """
        return self.wrap(self.functional.begin(jnp.asarray(keys_from(seed, self.num_envs))))

    def wrap(self, state: EnvState) -> TorchState:
        """Convert a JAX state to a torch state, without gradient history."""
        packed, integers = self._jitted_pack(state)
        return TorchState(self, torch.from_dlpack(packed), torch.from_dlpack(integers))

    def unwrap(self, state: TorchState) -> EnvState:
        """Convert a torch state to a JAX state."""
        return self._unpack(_borrow(state.packed), _borrow(state.integers))

    def state(self, packed: Tensor, integers: Tensor) -> TorchState:
        """Rebuild a state from its two tensors; see :class:`TorchState`."""
        for tensor, width in ((packed, self.widths[0]), (integers, self.widths[1])):
            if tensor.shape != (self.num_envs, width):
                raise ValueError(f"expected a tensor of shape {[self.num_envs, width]}, got {list(tensor.shape)}")
        return TorchState(self, packed, integers)

    def step(self, state: TorchState, action: Tensor) -> TorchState:
        """Step every environment once.

        Args:
            state: A state from ``reset`` or ``step``. The same state may be stepped several times, to create branches.
            action: One element of the action space per environment, ``[num_envs, ...]``.

        Raises:
            ValueError: The action has the wrong shape.
            TypeError: The action has the wrong kind of dtype.
        """
        if action.dtype is torch.bfloat16:  # NumPy has none
            action = action.float()
        self.functional.check_action(action.detach().cpu().numpy() if action.device.type == "cpu" else _borrow(action))
        packed, integers = _Step.apply(self, state.packed, state.integers, action)
        return TorchState(self, packed, integers)

    # -- packing ---------------------------------------------------------------------------------------------------

    def _assign_columns(self, state: EnvState, key_impls: list[str | None]) -> None:
        """Assign columns of the packed tensors to the leaves."""
        leaves, self._structure = jax.tree.flatten(state)
        self._slots: list[_Slot] = []
        ends = {True: 0, False: 0}
        dtypes: dict[bool, list[Any]] = {True: [], False: []}
        for leaf, key_impl in zip(leaves, key_impls, strict=True):
            if key_impl is not None:
                leaf = jax.eval_shape(jax.random.key_data, leaf)
            floating = bool(jnp.issubdtype(leaf.dtype, jnp.floating))
            start = ends[floating]
            ends[floating] += int(np.prod(leaf.shape[1:], dtype=np.int64))
            dtypes[floating].append(leaf.dtype)
            tensor_dtype = torch_dtype(leaf.dtype)
            self._slots.append(_Slot(start, ends[floating], leaf.shape, leaf.dtype, floating, key_impl, tensor_dtype))
        self._float_dtype = jnp.result_type(*dtypes[True])
        self._integer_dtype = jnp.int64 if any(dtype.itemsize == 8 for dtype in dtypes[False]) else jnp.int32
        self.widths = ends[True], ends[False]
        self.dtypes = tuple(torch_dtype(dtype) for dtype in (self._float_dtype, self._integer_dtype))
        self._fields = vars(jax.tree.unflatten(self._structure, self._slots))

    def _pack(self, state: EnvState) -> tuple[Any, Any]:
        parts: dict[bool, list[Any]] = {True: [], False: []}
        for leaf, slot in zip(jax.tree.leaves(state), self._slots, strict=True):
            leaf = leaf if slot.key_impl is None else jax.random.key_data(leaf)
            leaf = leaf.reshape(self.num_envs, -1)
            leaf = leaf.astype(self._float_dtype) if slot.floating else _recast(leaf, self._integer_dtype)
            parts[slot.floating].append(leaf)
        return jnp.concatenate(parts[True], axis=1), jnp.concatenate(parts[False], axis=1)

    def _unpack(self, packed: Any, integers: Any) -> EnvState:
        leaves = []
        for slot in self._slots:
            leaf = (packed if slot.floating else integers)[:, slot.start : slot.stop].reshape(slot.shape)
            leaf = leaf.astype(slot.dtype) if slot.floating else _recast(leaf, slot.dtype)
            leaves.append(leaf if slot.key_impl is None else jax.random.wrap_key_data(leaf, impl=slot.key_impl))
        return jax.tree.unflatten(self._structure, leaves)  # type: ignore[no-any-return]

    def _field(self, state: TorchState, name: str) -> Any:
        """Return one field of ``state`` as slices of the packed tensors."""

        def tensor(slot: _Slot) -> Tensor:
            if slot.floating:
                return state.packed[:, slot.start : slot.stop].reshape(slot.shape)
            leaf = state.integers[:, slot.start : slot.stop].reshape(slot.shape)
            unsigned = np.dtype(slot.dtype).kind == "u" and slot.dtype.itemsize == leaf.dtype.itemsize
            return leaf.contiguous().view(slot.tensor_dtype) if unsigned else leaf.to(slot.tensor_dtype)

        slots = self._fields[name]
        return tensor(slots) if isinstance(slots, _Slot) else jax.tree.map(tensor, slots)

    # -- the compiled passes ---------------------------------------------------------------------------------------

    def _packed_step(self, packed: Any, integers: Any, action: Any) -> tuple[Any, Any]:
        return self._pack(self.functional.step(self._unpack(packed, integers), action))

    def _forward_pass(self, packed: Any, integers: Any, action: Any) -> Any:
        packed_after, pullback, integers_after = jax.vjp(
            lambda p, a: self._packed_step(p, integers, a), packed, action, has_aux=True
        )
        return packed_after, integers_after, pullback


def _key_impl(leaf: Any) -> str | None:
    """Return the name of the generator of a typed random key; ``None`` for any other array."""
    return str(jax.random.key_impl(leaf)) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else None


def _recast(leaf: Any, dtype: Any) -> Any:
    """Convert integers and flags to another dtype. Keep the bits if the sizes are equal and either dtype is unsigned."""
    if leaf.dtype.itemsize == jnp.dtype(dtype).itemsize and "u" in (np.dtype(leaf.dtype).kind, np.dtype(dtype).kind):
        return jax.lax.bitcast_convert_type(leaf, dtype)
    return leaf.astype(dtype)


_autograd: Any = torch.autograd  # untyped, because its annotations differ between versions of torch


class _Step(_autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, env: DifferentiableEnv, packed: Tensor, integers: Tensor, action: Tensor) -> Any:
        ctx.env = env
        if env._gradients and (ctx.needs_input_grad[1] or ctx.needs_input_grad[3]):
            # copies, because the caller may write to the tensors before the backward pass reads them again
            copies = map(_copy_to_jax, (packed, integers, action))
            packed_after, integers_after, ctx.pullback = env._jitted_forward(*copies)
        else:
            packed_after, integers_after = env._jitted_step(_borrow(packed), _borrow(integers), _copy_to_jax(action))
            ctx.pullback = None
        integers = torch.from_dlpack(integers_after)
        ctx.mark_non_differentiable(integers)
        return torch.from_dlpack(packed_after), integers

    @staticmethod
    @_autograd.function.once_differentiable  # type: ignore[misc, untyped-decorator, unused-ignore]
    def backward(ctx: Any, cotangent: Tensor, _: Any) -> Any:
        if ctx.pullback is None:
            return None, None, None, None
        state, action = ctx.env._jitted_backward(ctx.pullback, _borrow(cotangent))
        return None, torch.from_dlpack(state), None, torch.from_dlpack(action)


def differentiable(env: Any, num_envs: int = 1, **options: Any) -> DifferentiableEnv:
    """Build an environment that torch can differentiate through, over any number of steps.

    Args:
        env: A :class:`~vecenv.jax.FunctionalVectorEnv` with one batch axis, or a ``JaxVectorEnv`` (then without options);
            or an environment of a supported library, or a name, as for ``FunctionalVectorEnv``.
        num_envs: The number of environments.
        **options: Options of ``FunctionalVectorEnv``; others, such as ``backend="spring"``, go to the named environment.

    Returns:
        An environment with ``reset(seed) -> state`` and ``step(state, action) -> state``; see :class:`TorchState`. No
        gradient flows from one episode into the previous one.

    Raises:
        ValueError: The environment has no reverse-mode derivative, or it is 0 for every action; the message names the remedy
            if there is one. Or an option is invalid, or given with an environment that already has its options.
        TypeError: The kind of ``env`` is not supported, or an option is unknown.

    Example::

        env = vecenv.torch.differentiable("ant", num_envs=16, backend="spring")
        state = env.reset(seed=0)
        for _ in range(8):
            state = env.step(state, policy(state.obs))
        (-state.episode_return.mean()).backward()
    """
    if isinstance(env, JaxVectorEnv):
        env = env.functional
    args = env, num_envs
    functional = parse_functional(env, num_envs, None, options)
    require_gradient(functional)
    rebuild = functools.partial(differentiable, **options)
    return DifferentiableEnv(functional, (rebuild, args))


def torch_dtype(dtype: Any) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _borrow(tensor: Tensor) -> Any:
    """Return a tensor as a JAX array: shared, or copied if it is not contiguous and aligned to 64 bytes, as XLA requires."""
    tensor = tensor.detach().contiguous()
    return jax.dlpack.from_dlpack(tensor if tensor.data_ptr() % 64 == 0 else tensor.clone())


def _copy_to_jax(tensor: Tensor) -> Any:
    """Copy a tensor to a JAX array, so that later writes to the tensor do not change it."""
    return _borrow(tensor.detach().clone(memory_format=torch.contiguous_format))
