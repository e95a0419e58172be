"""Gradients through time, in pieces.

The gradient of a long rollout of a physical system grows exponentially with its length, and storing what it needs grows
linearly. Cutting it every ``horizon`` steps bounds both: one piece is rolled out, differentiated and forgotten before the
next begins, so a rollout of any length needs the memory of one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from vecenv.jax.native.adapters import require_gradient
from vecenv.jax.native.state import Array, EnvState, PyTree
from vecenv.jax.rollouts.rollout import FunctionalEnv, Policy, Trajectory, rollout

__all__ = ["mean_negative_reward", "truncated_bptt"]

Loss = Callable[[Trajectory], Array]


def mean_negative_reward(trajectory: Trajectory) -> Array:
    """Minus the mean reward over valid transitions: the loss whose descent is ascent in reward."""
    return -jnp.sum(trajectory.reward * trajectory.valid) / jnp.maximum(1, jnp.sum(trajectory.valid))


def truncated_bptt(
    env: FunctionalEnv,
    policy: Policy,
    horizon: int,
    loss: Loss = mean_negative_reward,
    *,
    checkpoint: bool = False,
    max_norm: float | None = None,
) -> Callable[[PyTree, EnvState, PyTree, Array, int], tuple[Array, PyTree, EnvState, PyTree]]:
    """A function that rolls out and differentiates in pieces of ``horizon`` steps.

    Args:
        env: A differentiable :class:`~vecenv.jax.FunctionalVectorEnv`.
        policy: As for :func:`~vecenv.jax.rollout`.
        horizon: Steps that a gradient reaches back.
        loss: Scalar of the trajectory of one piece (leaves ``[horizon, *B, ...]``).
        checkpoint: As for :func:`~vecenv.jax.rollout`.
        max_norm: Scale the gradient of a piece down to this global norm where it is larger; a piece whose gradient is not
            finite then counts as zero.

    Returns:
        ``gradients(params, state, carry, key, pieces) -> (loss, grads, state, carry)``: means over ``pieces`` pieces, and
        where the rollout ended. ``pieces`` is static under ``jit``.

    Raises:
        ValueError: ``horizon`` is not positive, or the environment has no reverse-mode derivative; says the cure.
    """
    if horizon < 1:
        raise ValueError(f"horizon must be positive, got {horizon}.")
    require_gradient(env)

    def piece_loss(params: PyTree, state: EnvState, carry: PyTree, key: Array) -> Any:
        trajectory, state, carry = rollout(env, policy, params, state, carry, key, horizon, checkpoint=checkpoint)
        return loss(trajectory), (state, carry)

    def gradients(params: PyTree, state: EnvState, carry: PyTree, key: Array, pieces: int) -> Any:
        def piece(carried: Any, number: Array) -> Any:
            state, carry, total, sums = carried
            now = jax.random.fold_in(key, number)
            (value, (state, carry)), grads = jax.value_and_grad(piece_loss, has_aux=True)(params, state, carry, now)
            if max_norm is not None:
                grads = _clipped(grads, max_norm)
            return (state, carry, total + value / pieces, jax.tree.map(lambda s, g: s + g / pieces, sums, grads)), None

        start = (state, carry, jnp.zeros((), jnp.result_type(float)), jax.tree.map(jnp.zeros_like, params))
        (state, carry, value, grads), _ = jax.lax.scan(piece, start, jnp.arange(pieces))
        return value, grads, state, carry

    return gradients


def _clipped(grads: PyTree, max_norm: float) -> PyTree:
    norm = jnp.sqrt(sum((jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)), jnp.zeros(())))
    scale = jnp.where(jnp.isfinite(norm), jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-12)), 0.0)
    return jax.tree.map(lambda g: jnp.where(jnp.isfinite(g), g * scale, 0.0), grads)
