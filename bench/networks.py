"""The network of :mod:`bench.train`: convolutions and a dense layer for images, otherwise two dense layers.

Needs flax and optax.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import optax

__all__ = ["Policy"]


class Categorical(NamedTuple):
    """A distribution over the actions of a Discrete space, numbered from 0."""

    logits: jax.Array

    def sample(self, key: jax.Array) -> jax.Array:
        return jax.random.categorical(key, self.logits)

    def log_prob(self, action: jax.Array) -> jax.Array:
        return -optax.softmax_cross_entropy_with_integer_labels(self.logits, action)

    def entropy(self) -> jax.Array:
        return optax.softmax_cross_entropy(self.logits, jax.nn.softmax(self.logits))


class UnitNormal(NamedTuple):
    """A normal distribution with a standard deviation of 1 over a Box."""

    mean: jax.Array

    def sample(self, key: jax.Array) -> jax.Array:
        return self.mean + jax.random.normal(key, self.mean.shape)

    def log_prob(self, action: jax.Array) -> jax.Array:
        return jax.scipy.stats.norm.logpdf(action, self.mean).sum(-1)

    def entropy(self) -> jax.Array:
        return jnp.full(self.mean.shape[:-1], 0.5 * jnp.log(2 * jnp.pi * jnp.e) * self.mean.shape[-1])


class Policy(nn.Module):
    """A network ``observations [n, ...] -> (distribution of actions, values [n])``."""

    outputs: int
    discrete: bool
    images: bool

    @classmethod
    def for_spaces(cls, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> Policy:
        discrete = isinstance(action_space, gymnasium.spaces.Discrete)
        shape = observation_space.shape or ()
        images = len(shape) == 3 and min(shape[1:]) >= 36  # smaller images would be less than 3 x 3 after the convolutions
        return cls(int(action_space.n) if discrete else action_space.shape[0], discrete, images)

    @nn.compact
    def __call__(self, observations: jax.Array) -> tuple[Categorical | UnitNormal, jax.Array]:
        x = observations.astype(jnp.float32)
        if self.images:  # [n, frames, height, width]
            x = jnp.moveaxis(x, 1, -1) / 255
            for features, size, stride in ((16, 8, 4), (32, 4, 2)):
                x = nn.relu(nn.Conv(features, (size, size), (stride, stride), padding="VALID")(x))
        x = x.reshape(len(x), -1)
        widths, activation = ((256,), nn.relu) if self.images else ((64, 64), nn.tanh)
        for width in widths:
            x = activation(nn.Dense(width)(x))
        out, value = nn.Dense(self.outputs)(x), nn.Dense(1)(x)[..., 0]
        return (Categorical(out) if self.discrete else UnitNormal(out)), value
