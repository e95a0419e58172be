"""Rollouts and evaluations over anything with ``reset(key)`` and ``step(state, action)`` on :class:`~vecenv.jax.EnvState`.

A bridged vector of processes and a JAX-native one are the same to these functions. So every call of ``env.step`` counts:
none is made to learn a shape, none after the last transition that is wanted, and none is thrown away.

A policy is a function ``policy(params, carry, obs, first, key) -> (carry, action, extras)``. ``carry`` is the memory of a
recurrent policy (``()`` for others), ``first`` (``bool[n]``) marks rows whose episode begins with ``obs``, where that memory
must be reset (:func:`reset_carry`), and ``extras`` is a dict of arrays to keep with the transition, such as
log-probabilities. :func:`stateless` makes one of a simpler function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from vecenv.jax.env import select
from vecenv.jax.state import Array, EnvState, PyTree, _register

__all__ = [
    "EpisodeMetrics",
    "FunctionalEnv",
    "Policy",
    "Trajectory",
    "eval_rollout_episode",
    "fast_eval_rollout_episode",
    "reset_carry",
    "rollout",
    "stateless",
]

Policy = Callable[[PyTree, PyTree, PyTree, Array, Array], tuple[PyTree, PyTree, dict[str, Any]]]


class FunctionalEnv(Protocol):
    """What the rollouts ask of an environment; a ``discount`` attribute is used where there is one."""

    def step(self, state: EnvState, action: PyTree) -> EnvState: ...


@_register
@dataclasses.dataclass(frozen=True)
class Trajectory:
    """Transitions, leaves ``[T, *B, ...]``: row t is what happened between ``obs[t]`` and ``next_obs[t]``.

    Attributes:
        obs, action: What was seen, and done.
        reward, terminated, truncated, next_obs, valid: As in :class:`~vecenv.jax.EnvState`, after the step. Bootstrap from
            ``next_obs`` where not ``terminated``; learn only where ``valid``.
        first: ``obs`` begins an episode.
        policy_extras: What the policy returned beside the action.
        env_extras: The fields of the state that were asked for by name, after the step.
    """

    obs: PyTree
    action: PyTree
    reward: Array
    terminated: Array
    truncated: Array
    next_obs: PyTree
    valid: Array
    first: Array
    policy_extras: dict[str, Any]
    env_extras: dict[str, Any]


@_register
@dataclasses.dataclass(frozen=True)
class EpisodeMetrics:
    """One entry an episode; ``[*B]``, or ``[num_episodes]`` where that was asked for.

    Attributes:
        episode_return, discounted_return: ``float``: sums of rewards, the second with the environment's ``discount``.
        episode_length: ``int32``: steps.
        terminated, truncated: ``bool``: how it ended.
        finished: ``bool``: whether it ended before the evaluation did. The entries of an unfinished episode are of its
            beginning only.
        env_steps: ``int32[]``: how many vector steps were made.
    """

    episode_return: Array
    discounted_return: Array
    episode_length: Array
    terminated: Array
    truncated: Array
    finished: Array
    env_steps: Array


def stateless(function: Callable[[PyTree, PyTree, Array], tuple[PyTree, dict[str, Any]]]) -> Policy:
    """A policy without memory of ``function(params, obs, key) -> (action, extras)``; its carry is ``()``."""

    def policy(params: PyTree, carry: PyTree, obs: PyTree, first: Array, key: Array) -> Any:
        del first
        action, extras = function(params, obs, key)
        return carry, action, extras

    return policy


def rollout(
    env: FunctionalEnv,
    policy: Policy,
    params: PyTree,
    state: EnvState,
    carry: PyTree,
    key: Array,
    length: int,
    extras: Sequence[str] = (),
    *,
    checkpoint: bool = False,
    unroll: int = 1,
) -> tuple[Trajectory, EnvState, PyTree]:
    """``length`` steps of a policy.

    Args:
        env: Anything with ``step(state, action)`` on ``EnvState``.
        policy: See the top of this module.
        params: Passed to the policy.
        state: Where to begin: from ``env.reset(key)`` or an earlier rollout.
        carry: The policy's memory to begin with; ``()`` for none.
        key: For the policy's randomness; step t gets ``fold_in(key, t)``.
        length: Number of steps ``T``.
        extras: Names of ``EnvState`` fields (``"steps"``, ``"last_return"`` ...) or keys of its ``info`` to keep in
            ``env_extras``.
        checkpoint: Recompute each step in the backward pass instead of storing what it needs: memory for time. Only for
            environments that may be stepped twice, so not for bridged processes.
        unroll: As in ``jax.lax.scan``.

    Returns:
        The trajectory, the state after it, and the policy's memory after it.

    Raises:
        ValueError: ``extras`` names something that the state does not have.
    """
    _check_extras(state, extras)

    def act(carried: Any, t: Array) -> Any:
        state, carry = carried
        state, carry, transition = _transition(env, policy, params, state, carry, jax.random.fold_in(key, t), extras)
        return (state, carry), transition

    body = jax.checkpoint(act) if checkpoint else act
    (state, carry), trajectory = jax.lax.scan(body, (state, carry), jnp.arange(length), unroll=unroll)
    return trajectory, state, carry


def eval_rollout_episode(
    env: FunctionalEnv,
    policy: Policy,
    params: PyTree,
    state: EnvState,
    carry: PyTree,
    key: Array,
    max_steps: int,
    *,
    early_stop: bool = True,
) -> tuple[Trajectory, EpisodeMetrics, EnvState]:
    """The first episode of every row, step by step.

    Args:
        env, policy, params, state, carry, key: As for :func:`rollout`; ``state`` fresh from ``reset``.
        max_steps: Steps at most; the trajectory has this length.
        early_stop: Step no further once every first episode has ended. Give False under ``vmap``, where a bridged
            environment cannot be stepped conditionally.

    Returns:
        The trajectory (reward 0 and ``valid`` False after a row's first episode), its metrics, and the last state.
    """
    tally = _Tally.begin(state)

    def act(carried: Any, t: Array) -> Any:
        state, carry, tally = carried
        state, carry, transition = _transition(env, policy, params, state, carry, jax.random.fold_in(key, t), ())
        transition = dataclasses.replace(
            transition,
            reward=jnp.where(tally.active, transition.reward, 0.0),
            valid=transition.valid & tally.active,
        )
        return (state, carry, tally.add(state, _discount(env))), transition

    start = (state, carry, tally)
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(act, start, jnp.int32(0))[1])

    def maybe(carried: Any, t: Array) -> Any:
        return jax.lax.cond(jnp.any(carried[2].active), act, lambda carried, _: (carried, blank), carried, t)

    (state, _, tally), trajectory = jax.lax.scan(maybe if early_stop else act, start, jnp.arange(max_steps))
    return trajectory, tally.metrics(), state


def fast_eval_rollout_episode(
    env: FunctionalEnv,
    policy: Policy,
    params: PyTree,
    state: EnvState,
    carry: PyTree,
    key: Array,
    max_steps: int,
    num_episodes: int | None = None,
) -> tuple[EpisodeMetrics, EnvState]:
    """Metrics of whole episodes and nothing else; stops as soon as the last of them has ended.

    Args:
        env, policy, params, state, carry, key: As for :func:`rollout`; ``state`` fresh from ``reset``.
        max_steps: Steps at most for one episode a row, and so many times more for several.
        num_episodes: Default, one episode a row. Otherwise so many in all, the same share of them from each row decided
            beforehand (taking whichever end first would favour short ones); entry ``r * n + i`` is episode r of row i. More
            than one a row needs an environment that resets itself.

    Returns:
        Metrics, and the last state. Not differentiable in reverse mode (a while loop); under ``vmap`` it steps until the
        last lane is ready.
    """
    n = state.reward.size
    rounds = 1 if num_episodes is None else -(-num_episodes // n)
    quota = jnp.full(n, rounds) if num_episodes is None else (num_episodes - jnp.arange(n) + n - 1) // n
    tally = _Tally.begin(state, rounds, quota.reshape(state.reward.shape))

    def act(carried: Any) -> Any:
        state, carry, tally = carried
        now = jax.random.fold_in(key, tally.env_steps)
        state, carry, _ = _transition(env, policy, params, state, carry, now, ())
        return state, carry, tally.add(state, _discount(env))

    def unfinished(carried: Any) -> Array:
        going: Array = jnp.any(carried[2].active) & (carried[2].env_steps < max_steps * rounds)
        return going

    state, _, tally = jax.lax.while_loop(unfinished, act, (state, carry, tally))
    metrics = tally.metrics()
    if num_episodes is None:
        return metrics, state
    flat = {
        field.name: getattr(metrics, field.name).reshape(-1)[:num_episodes]
        for field in dataclasses.fields(metrics)
        if field.name != "env_steps"
    }
    return dataclasses.replace(metrics, **flat), state


@_register
@dataclasses.dataclass(frozen=True)
class _Tally:
    """Running sums of one or several episodes a row: ``sums`` leaves are ``[rounds, *B]``, ``count`` is ``int32[*B]``."""

    sums: EpisodeMetrics
    count: Array
    quota: Array
    env_steps: Array

    @classmethod
    def begin(cls, state: EnvState, rounds: int = 1, quota: Array | None = None) -> _Tally:
        shape = (rounds, *state.reward.shape)
        zero, none, no = jnp.zeros(shape, state.reward.dtype), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool)
        steps = jnp.zeros((), jnp.int32)
        sums = EpisodeMetrics(zero, zero, none, no, no, no, steps)
        return cls(sums, none[0], none[0] + 1 if quota is None else quota, steps)

    @property
    def active(self) -> Array:
        """``bool[*B]``: rows whose share of episodes has not ended."""
        return self.count < self.quota

    def add(self, state: EnvState, discount: float) -> _Tally:
        """Count the step that led to ``state``."""
        counts = self.active & state.valid
        rounds = jnp.arange(self.sums.finished.shape[0]).reshape((-1,) + (1,) * counts.ndim)
        here = counts & (rounds == self.count)  # [rounds, *B]
        ended = here & (state.terminated | state.truncated)
        sums = self.sums
        weight = jnp.asarray(discount, sums.episode_return.dtype) ** sums.episode_length
        sums = EpisodeMetrics(
            episode_return=sums.episode_return + jnp.where(here, state.reward, 0.0),
            discounted_return=sums.discounted_return + jnp.where(here, weight * state.reward, 0.0),
            episode_length=sums.episode_length + here,
            terminated=sums.terminated | (here & state.terminated),
            truncated=sums.truncated | (here & state.truncated),
            finished=sums.finished | ended,
            env_steps=sums.env_steps,
        )
        return _Tally(sums, self.count + jnp.any(ended, axis=0), self.quota, self.env_steps + 1)

    def metrics(self) -> EpisodeMetrics:
        fields = {field.name: getattr(self.sums, field.name) for field in dataclasses.fields(self.sums)}
        if self.sums.finished.shape[0] == 1:
            fields = {name: value[0] for name, value in fields.items() if name != "env_steps"}
        return EpisodeMetrics(**{**fields, "env_steps": self.env_steps})


def _transition(
    env: FunctionalEnv, policy: Policy, params: PyTree, state: EnvState, carry: PyTree, key: Array, extras: Sequence[str]
) -> tuple[EnvState, PyTree, Trajectory]:
    """Act once."""
    carry, action, policy_extras = policy(params, carry, state.obs, state.first, key)
    after = env.step(state, action)
    transition = Trajectory(
        obs=state.obs,
        action=action,
        reward=after.reward,
        terminated=after.terminated,
        truncated=after.truncated,
        next_obs=after.next_obs,
        valid=after.valid,
        first=state.first,
        policy_extras=policy_extras,
        env_extras={name: _field(after, name) for name in extras},
    )
    return after, carry, transition


_HIDDEN = ("token", "inner", "info")


def _field(state: EnvState, name: str) -> Any:
    return state.info[name] if name in state.info else getattr(state, name)


def _check_extras(state: EnvState, extras: Sequence[str]) -> None:
    known = [field.name for field in dataclasses.fields(state) if field.name not in _HIDDEN]
    for name in extras:
        if name not in known and name not in state.info:
            raise ValueError(f"No field {name!r} in the state; there are {known}, and in its info {sorted(state.info)}.")


def _discount(env: Any) -> float:
    return float(getattr(env, "discount", 1.0))


def reset_carry(first: Array, carry: PyTree, initial: PyTree) -> PyTree:
    """A recurrent policy's memory with the rows that begin an episode set to ``initial`` (leaves ``[*B, ...]``)."""
    return jax.tree.map(lambda start, old: select(first, jnp.broadcast_to(start, old.shape), old), initial, carry)
