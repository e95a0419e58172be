"""Gradients through JAX-native environments for torch users.

One step is one autograd function of two tensors, the action and the state. All floating-point leaves of the state, however
deeply nested, travel packed in a single tensor ``[num_envs, D]``, so no part of the physics can lose its gradient, and
observations, rewards and metrics are slices of that tensor, so torch differentiates through them as through any slice. The
integer leaves (keys, counters) stay in JAX. The forward and the backward pass are compiled; what the forward pass keeps for
the backward pass leaves JAX as a pytree and never passes through torch. Tensors cross by DLPack without a copy.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

try:
    import jax
    import jax.numpy as jnp
    import torch
except ModuleNotFoundError as error:
    if error.name not in ("jax", "jaxlib", "torch"):
        raise
    raise ImportError(f"vecenv.torch needs JAX and torch; no {error.name}: pip install 'vecenv[jax]' torch") from error

from vecenv.backends.jax_native import JaxVectorEnv
from vecenv.jax.native.adapters import require_gradient
from vecenv.jax.native.functional import FunctionalVectorEnv
from vecenv.jax.native.seeding import entropy_seeds, seed_keys
from vecenv.jax.native.state import EnvState

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DifferentiableEnv", "TorchState", "differentiable"]


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Where a floating-point leaf sits in the packed tensor: columns ``start:stop``, then reshaped to ``shape``."""

    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: Any


class TorchState:
    """The state of a differentiable environment: the fields of :class:`vecenv.jax.EnvState` as torch tensors.

    ``obs``, ``reward``, ``next_obs``, ``episode_return``, ``info`` and the other floating-point fields are differentiable
    with respect to all actions before them; flags and counters are plain tensors. Do not write into them.

    Attributes:
        packed: All floating-point leaves, ``[num_envs, D]``.
    """

    def __init__(self, env: DifferentiableEnv, packed: Tensor, rest: tuple[Any, ...]) -> None:
        self.packed = packed
        self._env = env
        self._rest = rest

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("inner", "token") or name not in EnvState.__dataclass_fields__:
            raise AttributeError(f"TorchState has no field {name!r}")
        return self._env._field(self, name)

    def detach(self) -> TorchState:
        """The same state, cut off from the actions that led to it."""
        return TorchState(self._env, self.packed.detach(), self._rest)


class DifferentiableEnv:
    """``reset`` and ``step`` on torch tensors, with gradients; made by :func:`differentiable`."""

    def __init__(self, functional: FunctionalVectorEnv) -> None:
        self.functional = functional
        self.num_envs = functional.num_envs
        self._structure: Any = None
        self._slots: list[_Slot | None] = []
        self._wide: Any = None
        self._plain = jax.jit(self._packed_step)
        self._forward = jax.jit(self._forward_pass)
        self._backward = jax.jit(lambda pull, cotangent: pull(cotangent))

    def reset(self, seed: int | None = None) -> TorchState:
        """Begin an episode in every environment; environment i has the key ``jax.random.key(seed + i)``."""
        n = self.num_envs
        seeds = entropy_seeds(n) if seed is None else [seed + i for i in range(n)]
        return self.wrap(self.functional.begin(jnp.asarray(seed_keys(seeds))))

    def wrap(self, state: EnvState) -> TorchState:
        """A JAX state as a torch state, without gradient history."""
        if self._structure is None:
            self._learn(state)
        packed, rest = self._pack(state)
        return TorchState(self, torch.from_dlpack(packed), rest)

    def unwrap(self, state: TorchState) -> EnvState:
        """A torch state as a JAX state."""
        return self._unpack(_borrow(state.packed), state._rest)

    def step(self, state: TorchState, action: Tensor) -> TorchState:
        """One step of every environment.

        Args:
            state: From ``reset`` or ``step``; stepping it twice gives two branches.
            action: ``[num_envs, ...]`` of the action space.

        Raises:
            ValueError: An action of the wrong shape. ``TypeError``: of the wrong kind of dtype.
        """
        self.functional.check_action(action.detach().cpu().numpy() if action.device.type == "cpu" else _borrow(action))
        packed, rest = _Step.apply(self, state._rest, state.packed, action)
        return TorchState(self, packed, rest.value)

    # -- packing ---------------------------------------------------------------------------------------------------

    def _learn(self, state: EnvState) -> None:
        """Decide which column of the packed tensor belongs to which leaf."""
        leaves, self._structure = jax.tree.flatten(state)
        floats = [leaf.dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
        self._wide = jnp.result_type(*floats)
        start = 0
        for leaf in leaves:
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                self._slots.append(None)
                continue
            size = int(np.prod(leaf.shape[1:], dtype=np.int64))
            self._slots.append(_Slot(start, start + size, leaf.shape, leaf.dtype))
            start += size

    def _pack(self, state: EnvState) -> tuple[Any, tuple[Any, ...]]:
        leaves = jax.tree.leaves(state)
        n = self.num_envs
        parts = [x.reshape(n, -1).astype(self._wide) for x, s in zip(leaves, self._slots, strict=True) if s is not None]
        rest = tuple(x for x, slot in zip(leaves, self._slots, strict=True) if slot is None)
        return jnp.concatenate(parts, axis=1), rest

    def _unpack(self, packed: Any, rest: tuple[Any, ...]) -> EnvState:
        others = iter(rest)
        leaves = [
            next(others) if s is None else packed[:, s.start : s.stop].reshape(s.shape).astype(s.dtype) for s in self._slots
        ]
        state: EnvState = jax.tree.unflatten(self._structure, leaves)
        return state

    def _field(self, state: TorchState, name: str) -> Any:
        """One field of ``state``: slices of the packed tensor for floats, tensors over JAX's memory for the rest."""
        others = iter(state._rest)
        where = [next(others) if slot is None else slot for slot in self._slots]
        picked = getattr(jax.tree.unflatten(self._structure, where), name)

        def tensor(leaf: Any) -> Tensor:
            if isinstance(leaf, _Slot):
                return state.packed[:, leaf.start : leaf.stop].reshape(leaf.shape)
            return torch.from_dlpack(jnp.copy(leaf))

        return jax.tree.map(tensor, picked)

    # -- the compiled passes ---------------------------------------------------------------------------------------

    def _packed_step(self, packed: Any, action: Any, rest: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        return self._pack(self.functional.step(self._unpack(packed, rest), action))

    def _forward_pass(self, packed: Any, action: Any, rest: tuple[Any, ...]) -> Any:
        after, pull, others = jax.vjp(lambda p, a: self._packed_step(p, a, rest), packed, action, has_aux=True)
        return after, others, pull


@dataclasses.dataclass
class _Opaque:
    """Carries JAX arrays through ``autograd.Function.apply``, which looks into tuples."""

    value: tuple[Any, ...]


def _step_forward(ctx: Any, env: DifferentiableEnv, rest: tuple[Any, ...], packed: Tensor, action: Tensor) -> Any:
    given = (_borrow(packed), _owned(action), rest)
    ctx.env = env
    if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
        after, others, ctx.pull = env._forward(*given)
    else:
        after, others = env._plain(*given)
    return torch.from_dlpack(after), _Opaque(others)


def _step_backward(ctx: Any, cotangent: Tensor, _: Any) -> Any:
    state, action = ctx.env._backward(ctx.pull, _borrow(cotangent))
    return None, None, torch.from_dlpack(state), torch.from_dlpack(action)


_autograd: Any = torch.autograd
_Step: Any = type(
    "_Step",
    (_autograd.Function,),
    {
        "forward": staticmethod(_step_forward),
        "backward": staticmethod(_autograd.function.once_differentiable(_step_backward)),
    },
)


def differentiable(env: Any, num_envs: int = 1, **options: Any) -> DifferentiableEnv:
    """An environment that torch can differentiate through, over any number of steps.

    Args:
        env: A :class:`~vecenv.jax.FunctionalVectorEnv` or ``JaxVectorEnv`` (then nothing else may be given), or what
            ``FunctionalVectorEnv`` takes: an environment of a known library, or a name.
        num_envs: How many environments.
        **options: Of ``FunctionalVectorEnv``.

    Returns:
        ``reset(seed) -> state`` and ``step(state, action) -> state``; see :class:`TorchState`. Restarts of episodes cut the
        gradient, as they must.

    Raises:
        ValueError: The environment has no reverse-mode derivative; the message names the cure.

    Example::

        env = vecenv.torch.differentiable(vecenv.jax.adapt("ant", backend="spring"), num_envs=16)
        state = env.reset(seed=0)
        for _ in range(8):
            state = env.step(state, policy(state.obs))
        (-state.episode_return.mean()).backward()
    """
    if isinstance(env, JaxVectorEnv):
        env = env.functional
    if not isinstance(env, FunctionalVectorEnv):
        env = FunctionalVectorEnv(env, num_envs, **options)
    elif options or num_envs not in (1, env.num_envs):
        raise ValueError(f"{env!r} has its options already; got {num_envs=}, {options}.")
    if len(env.batch_shape) != 1:
        raise ValueError(f"One batch axis is wanted, got batch shape {env.batch_shape}.")
    require_gradient(env)
    return DifferentiableEnv(env)


def _borrow(tensor: Tensor) -> Any:
    """A tensor's memory as a JAX array, not copied."""
    return jax.dlpack.from_dlpack(tensor.detach().contiguous())


def _owned(tensor: Tensor) -> Any:
    """A copy: the backward pass reads it again, and the caller may have written to the tensor by then."""
    return jnp.copy(_borrow(tensor))
