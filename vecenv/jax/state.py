"""``EnvState``: everything a functional environment knows, in one immutable pytree.

Bridged process environments and JAX-native ones share this class, so one set of rollouts serves both. What an algorithm
reads has the same name and the same meaning in every autoreset mode; above all ``next_obs`` is always the true successor
of the observation that was acted on, never the first observation of the episode after it. What only the implementation
needs sits in two fields that are opaque to all other code: ``token`` (the bridge's order of calls) and ``inner`` (the
physics of a JAX-native environment).
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

__all__ = ["Array", "EnvState", "NativeState", "PyTree", "register"]

Array: TypeAlias = jax.Array
PyTree: TypeAlias = Any


def register(cls: Any) -> Any:
    """Make a dataclass a pytree whose children are all its fields, in the order they are written."""
    names = [field.name for field in dataclasses.fields(cls)]
    return jax.tree_util.register_dataclass(cls, data_fields=names, meta_fields=[])


@register
@dataclasses.dataclass(frozen=True)
class EnvState:
    """The state of ``num_envs`` environments after a reset or a step. ``B`` is the batch shape, usually ``(num_envs,)``.

    Attributes:
        obs: What to act on next. Leaves ``[*B, ...]`` in the dtypes of the observation space.
        reward: ``float[*B]`` of the last step; 0 after a reset, on the reset step of NEXT_STEP, and on finished rows of
            DISABLED.
        terminated: ``bool[*B]``: the episode ended in a terminal state of the task.
        truncated: ``bool[*B]``: the episode was cut, by a time limit for instance. Both may be true at once.
        next_obs: The observation that followed the action, also where the episode ended. Leaves as ``obs``.
        valid: ``bool[*B]``: a real transition happened. False after a reset, on NEXT_STEP's reset steps, and on finished
            rows of DISABLED. Learn only from valid transitions.
        first: ``bool[*B]``: ``obs`` is the first of its episode; recurrent policies reset their carry here.
        steps: ``int32[*B]``: steps taken in the episode that ``obs`` belongs to.
        episode_return: ``float[*B]``: sum of rewards of that episode so far.
        discounted_return: ``float[*B]``: the same, discounted by the environment's ``discount``.
        last_return: ``float[*B]``: return of the last episode that ended; 0 before there was one.
        last_length: ``int32[*B]``: its length in steps.
        last_discounted_return: ``float[*B]``: its discounted return.
        info: A dict of arrays ``[*B, ...]`` of fixed structure, reported by the last step; meaningful where ``valid``.
        token: Of bridged environments: ``int32[2]``, a ticket for the next call. ``None`` elsewhere.
        inner: Of JAX-native environments: a :class:`NativeState`. ``None`` elsewhere.
    """

    obs: PyTree
    reward: Array
    terminated: Array
    truncated: Array
    next_obs: PyTree
    valid: Array
    first: Array
    steps: Array
    episode_return: Array
    discounted_return: Array
    last_return: Array
    last_length: Array
    last_discounted_return: Array
    info: dict[str, Any]
    token: Any = None
    inner: Any = None

    @property
    def done(self) -> Array:
        """``bool[*B]``: terminated or truncated."""
        return self.terminated | self.truncated

    def replace(self, **changes: Any) -> EnvState:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def at_start(cls, obs: PyTree, shape: tuple[int, ...], info: dict[str, Any], **hidden: Any) -> EnvState:
        """The state of ``shape`` environments after a reset; ``hidden`` is ``token`` or ``inner``."""
        zero, no, none = jnp.zeros(shape, jnp.result_type(float)), jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32)
        return cls(
            obs=obs, reward=zero, terminated=no, truncated=no, next_obs=obs, valid=no, first=~no, steps=none,
            episode_return=zero, discounted_return=zero, last_return=zero, last_length=none,
            last_discounted_return=zero, info=info, **hidden,
        )  # fmt: skip

    def restarted(self, obs: PyTree, **changes: Any) -> EnvState:
        """All rows at the start of another episode, with what is known of the last one."""
        zero, no = jnp.zeros_like(self.reward), jnp.zeros_like(self.terminated)
        return self.replace(
            obs=obs, next_obs=obs, reward=zero, terminated=no, truncated=no, valid=no, first=~no,
            steps=jnp.zeros_like(self.steps), episode_return=zero, discounted_return=zero, **changes,
        )  # fmt: skip

    def counted_anew(self, begins: Array, **changes: Any) -> EnvState:
        """The same where rows under ``begins`` have an observation of their next episode, whose counts are 0."""
        zero = jnp.zeros_like(self.reward)
        return self.replace(
            first=begins, steps=jnp.where(begins, 0, self.steps),
            episode_return=jnp.where(begins, zero, self.episode_return),
            discounted_return=jnp.where(begins, zero, self.discounted_return), **changes,
        )  # fmt: skip

    def counted(self, begins: Array, discount: float) -> EnvState:
        """The statistics after a step whose ``reward`` and flags are set and whose step is not counted yet.

        Args:
            begins: ``bool[*B]``: rows that took no step but are at the beginning of an episode.
            discount: For ``discounted_return``.
        """
        steps = jnp.where(begins, 0, self.steps + 1)
        total = jnp.where(begins, 0.0, self.episode_return + self.reward)
        discounted = total
        if discount != 1.0:
            weight = jnp.asarray(discount, total.dtype) ** self.steps
            discounted = jnp.where(begins, 0.0, self.discounted_return + weight * self.reward)
        return self.replace(
            steps=steps, episode_return=total, discounted_return=discounted,
            last_return=jnp.where(self.done, total, self.last_return),
            last_length=jnp.where(self.done, steps, self.last_length),
            last_discounted_return=jnp.where(self.done, discounted, self.last_discounted_return),
        )  # fmt: skip


@register
@dataclasses.dataclass(frozen=True)
class NativeState:
    """What a JAX-native environment carries besides what algorithms read. All leaves ``[*B, ...]``.

    Attributes:
        env: The states of the single environments, stacked.
        key: ``uint32[*B, k]``: each row's own random key; with ``episode`` it decides every start state and every noise.
        episode: ``int32[*B]``: how many episodes of this key came before.
        elapsed: ``int32[*B]``: steps counted against the time limit (``steps``, and more in a staggered first episode).
        pool: Stored start states ``[*B, pool_size, ...]`` with their observations, for ``reset="cached"`` and ``"pool"``.
        model: The leaves of the physics model that domain randomisation made different from row to row.
    """

    env: PyTree
    key: Array
    episode: Array
    elapsed: Array
    pool: PyTree = None
    model: PyTree = None

    def replace(self, **changes: Any) -> NativeState:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)
