"""Rollouts over any environment with ``reset(key)`` and ``step(state, action)`` on :class:`~vecenv.jax.EnvState`.

``env.step`` is executed once per transition: never to determine a shape, and never after the last transition.

A policy is ``policy(params, carry, obs, first, key) -> (carry, action, extras)``. ``carry`` is the memory of a recurrent
policy (``()`` for others), which the policy resets (:func:`reset_carry`) in rows where ``first`` (``bool[*B]``) is True:
there ``obs`` begins an episode. ``extras`` is a dict of arrays to keep with the transition. :func:`stateless` wraps a
simpler function.

Evaluations count whole episodes, each once; they mask the later steps of a row. The gradient through a rollout of a physical
system can grow exponentially with its length, and the memory for it grows linearly, so :func:`truncated_bptt` cuts rollouts
into pieces of ``horizon`` steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from gymnasium.vector import AutoresetMode
from jax.custom_batching import custom_vmap

from vecenv.jax.env import Array, EnvState, PyTree, select
from vecenv.jax.libraries import require_gradient

__all__ = [
    "EpisodeMetrics", "FunctionalEnv", "Policy", "StepFunction", "Trajectory", "eval_rollout_episode",
    "fast_eval_rollout_episode", "reset_carry", "rollout", "stateless", "truncated_bptt",
]  # fmt: skip

StepFunction = Callable[[EnvState, PyTree], EnvState]
Policy = Callable[[PyTree, PyTree, PyTree, Array, Array], tuple[PyTree, PyTree, dict[str, Any]]]


class FunctionalEnv(Protocol):
    """The interface of an environment for rollouts.

    Evaluations also use ``discount``, ``autoreset_mode`` and, for several episodes per row, ``reset_mask`` if they exist.
    """

    def step(self, state: EnvState, action: PyTree) -> EnvState: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Trajectory:
    """Transitions with leaves ``[T, *B, ...]``: row t describes the step from ``obs[t]`` to ``next_obs[t]``.

    Attributes:
        obs, action: The observation acted on, and the action.
        reward, terminated, truncated, next_obs, valid: As in :class:`~vecenv.jax.EnvState`, after the step. Bootstrap from
            ``next_obs`` where not ``terminated``; learn only where ``valid``.
        first: True where ``obs`` begins an episode.
        policy_extras: The policy's ``extras``.
        env_extras: The fields of the state, or of its ``info``, that the argument ``extras`` names, after the step.
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

    @property
    def done(self) -> Array:
        """``bool[T, *B]``: terminated or truncated."""
        return self.terminated | self.truncated

    def keeping(self, names: Sequence[str]) -> Trajectory:
        """Return a copy with only these fields; the others are ``None``, so compiled programs do not compute them.

        ``"done"`` stands for both flags.

        Raises:
            ValueError: A trajectory has no field with one of these names.
        """
        fields = [field.name for field in dataclasses.fields(self)]
        kept = {part for name in names for part in (("terminated", "truncated") if name == "done" else (name,))}
        if unknown := sorted(kept - set(fields)):
            raise ValueError(f"A trajectory has no fields {unknown}; there are {[*fields, 'done']}.")
        without: dict[str, Any] = {name: None for name in fields if name not in kept}
        return dataclasses.replace(self, **without)


def stateless(function: Callable[[PyTree, PyTree, Array], tuple[PyTree, dict[str, Any]]]) -> Policy:
    """Turn ``function(params, obs, key) -> (action, extras)`` into a policy without memory; its carry is ``()``."""

    def policy(params: PyTree, carry: PyTree, obs: PyTree, first: Array, key: Array) -> Any:
        del first
        action, extras = function(params, obs, key)
        return carry, action, extras

    return policy


def rollout(
    env: FunctionalEnv | StepFunction, policy: Policy, params: PyTree, state: EnvState, carry: PyTree, key: Array,
    length: int, extras: Sequence[str] = (), *, checkpoint: bool = False,
) -> tuple[Trajectory, EnvState, PyTree]:  # fmt: skip
    """Run a policy for ``length`` steps.

    Args:
        env: Anything with ``step(state, action)`` on ``EnvState``, or the step function itself.
        policy: ``policy(params, carry, obs, first, key) -> (carry, action, extras)``.
        params: Passed to the policy.
        state: The initial state, from ``env.reset(key)`` or an earlier rollout.
        carry: The policy's initial memory; ``()`` for none.
        key: For the policy's randomness; step t gets ``fold_in(key, t)``.
        length: Number of steps ``T``.
        extras: Names of ``EnvState`` fields (``"steps"``, ``"last_return"``, ``"done"`` ...) or keys of its ``info`` to keep
            in ``env_extras``.
        checkpoint: Recompute each step in the backward pass instead of storing its intermediate values, which saves memory
            and costs time. Only for environments that can step a state twice, so not for a bridge.

    Returns:
        The trajectory, the state after it, and the policy's memory after it.

    Raises:
        ValueError: ``extras`` names a field that the state does not have.
    """
    _check_extras(state, extras)

    def act(carried: Any, t: Array) -> Any:
        state, carry = carried
        state, carry, transition = take_step(env, policy, params, state, carry, jax.random.fold_in(key, t), extras)
        return (state, carry), transition

    body = jax.checkpoint(act) if checkpoint else act
    (state, carry), trajectory = jax.lax.scan(body, (state, carry), jnp.arange(length))
    return trajectory, state, carry


def take_step(
    env: Any, policy: Policy, params: PyTree, state: EnvState, carry: PyTree, key: Array, extras: Sequence[str] = ()
) -> tuple[EnvState, PyTree, Trajectory]:
    """Take one step of a policy and return ``(state, carry, transition)``.

    The transition has leaves ``[*B, ...]``; ``extras`` as for :func:`rollout`.
    """
    carry, action, policy_extras = policy(params, carry, state.obs, state.first, key)
    after = getattr(env, "step", env)(state, action)
    return after, carry, _transition(state, action, policy_extras, after, extras)


def reset_carry(first: Array, carry: PyTree, initial: PyTree) -> PyTree:
    """Set a recurrent policy's memory to ``initial``, which is broadcast to it, in the rows that begin an episode."""
    return jax.tree.map(lambda start, old: select(first, jnp.broadcast_to(start, old.shape), old), initial, carry)


# -- transitions ---------------------------------------------------------------------------------------------------------

_INTERNAL_FIELDS = ("token", "inner", "info")


def _transition(
    before: EnvState, action: PyTree, policy_extras: dict[str, Any], after: EnvState, extras: Sequence[str]
) -> Trajectory:
    env_extras = {name: after.info[name] if name in after.info else getattr(after, name) for name in extras}
    return Trajectory(
        before.obs, action, after.reward, after.terminated, after.truncated, after.next_obs, after.valid, before.first,
        policy_extras, env_extras,
    )  # fmt: skip


def _check_extras(state: EnvState, extras: Sequence[str]) -> None:
    names = [field.name for field in dataclasses.fields(state) if field.name not in _INTERNAL_FIELDS] + ["done"]
    for name in extras:
        if name not in names and name not in state.info:
            raise ValueError(f"The state has no field {name!r}; it has {names}, and in its info {sorted(state.info)}.")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EpisodeMetrics:
    """The results of an evaluation, one entry per episode: ``[*B]``, or ``[num_episodes]`` if that was given.

    Attributes:
        episode_return, discounted_return: ``float``: sums of rewards; the second applies the environment's ``discount``.
        episode_length: ``int32``: steps.
        terminated, truncated: ``bool``: the flags at the episode's end.
        finished: ``bool``: the episode ended within the evaluation. The entries of an unfinished episode cover only its
            beginning.
        env_steps: ``int32[]``: the number of vector steps.
    """

    episode_return: Array
    discounted_return: Array
    episode_length: Array
    terminated: Array
    truncated: Array
    finished: Array
    env_steps: Array


def eval_rollout_episode(
    env: FunctionalEnv | StepFunction, policy: Policy, params: PyTree, state: EnvState, carry: PyTree, key: Array,
    max_steps: int, *, keep: Sequence[str] | None = None,
) -> tuple[Trajectory, EpisodeMetrics, EnvState]:  # fmt: skip
    """Evaluate the first episode of every row until all have ended, and return the trajectory too.

    Args:
        env, policy, params, state, carry, key: As for :func:`~vecenv.jax.rollout`; ``state`` comes directly from ``reset``.
        max_steps: Maximum number of steps, and the length of the trajectory.
        keep: The fields of the trajectory to keep, such as ``("reward", "done")``; the others are ``None``, and cost
            neither time nor memory. Default: all.

    Returns:
        The trajectory, its metrics, and the last state. After a row's first episode ``reward`` is 0, ``valid`` is False,
        and ``terminated``, ``truncated`` and ``done`` keep their values from the end of that episode: its length is the
        number of steps up to and including the first ``done``. The other fields have no meaning there. Lanes of a ``vmap``
        over a bridged environment stop together.

    Raises:
        ValueError: ``keep`` names a field that a trajectory does not have.
    """
    counted_step = _counted_step(env, policy, params, key)

    def act(carried: _EvalCarry) -> tuple[_EvalCarry, Trajectory]:
        carried, transition = counted_step(carried)
        return carried, transition if keep is None else transition.keeping(keep)

    start = (state, carry, _Tally.begin(state))
    blank: Trajectory = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(act, start)[1])

    def skip(carried: _EvalCarry) -> tuple[_EvalCarry, Trajectory]:
        flags = {name: flag for name, flag in carried[2].last_flags().items() if getattr(blank, name) is not None}
        return carried, dataclasses.replace(blank, **flags)

    def act_or_skip(carried: _EvalCarry, _: None) -> tuple[_EvalCarry, Trajectory]:
        is_running = _in_any_lane(state, jnp.any(carried[2].active))
        return jax.lax.cond(is_running, act, skip, carried)  # type: ignore[no-any-return]

    (state, _, tally), trajectory = jax.lax.scan(act_or_skip, start, length=max_steps)
    return trajectory, tally.metrics(), state


def fast_eval_rollout_episode(
    env: FunctionalEnv | StepFunction, policy: Policy, params: PyTree, state: EnvState, carry: PyTree, key: Array,
    max_steps: int, num_episodes: int | None = None,
) -> tuple[EpisodeMetrics, EnvState]:  # fmt: skip
    """Evaluate whole episodes until all have ended, and return only their metrics.

    Args:
        env, policy, params, state, carry, key: As for :func:`~vecenv.jax.rollout`; ``state`` comes directly from ``reset``.
        max_steps: Maximum number of steps per episode, on average: ``k`` episodes of a row may take ``k * max_steps`` steps.
        num_episodes: The total number of episodes; default: one per row. Each row gets an equal share in advance: the first
            ``num_episodes`` to end would be biased towards short episodes. Entry ``r * n + i`` is episode r of row i.
            Without autoreset (DISABLED), ``env.reset_mask`` resets rows that have episodes left.

    Returns:
        Metrics, and the last state. The while loop has no reverse-mode derivative, and under ``vmap`` it runs until the last
        lane has finished.

    Raises:
        ValueError: ``num_episodes`` is not positive.
    """
    n = state.reward.size
    rounds = 1 if num_episodes is None else -(-num_episodes // n)
    if rounds < 1:
        raise ValueError(f"num_episodes must be positive, got {num_episodes}.")
    quota = jnp.full(n, rounds) if num_episodes is None else (num_episodes - jnp.arange(n) + n - 1) // n
    start = (state, carry, _Tally.begin(state, rounds, quota.reshape(state.reward.shape)))
    act, limit = _counted_step(env, policy, params, key), max_steps * rounds
    if getattr(env, "autoreset_mode", None) is AutoresetMode.NEXT_STEP:
        limit += rounds - 1  # between two episodes of a row, a step resets it
    resetting_env: Any = env if rounds > 1 and getattr(env, "autoreset_mode", None) is AutoresetMode.DISABLED else None

    def is_running(carried: _EvalCarry) -> Array:
        return _in_any_lane(state, jnp.any(carried[2].active) & (carried[2].sums.env_steps < limit))

    def advance(carried: _EvalCarry) -> _EvalCarry:
        state, carry, tally = act(carried)[0]
        if resetting_env is not None:
            to_reset = state.done & tally.active
            reset_key = jax.random.fold_in(jax.random.fold_in(key, 0), tally.sums.env_steps)
            any_to_reset = _in_any_lane(state, jnp.any(to_reset))
            state = jax.lax.cond(
                any_to_reset, lambda state: resetting_env.reset_mask(state, to_reset, reset_key), lambda state: state, state
            )
        return state, carry, tally

    state, _, tally = jax.lax.while_loop(is_running, advance, start)
    if num_episodes is None:
        return tally.metrics(), state
    return jax.tree.map(lambda x: x.reshape(-1)[:num_episodes] if x.ndim else x, tally.sums), state


def _in_any_lane(state: EnvState, condition: Array) -> Array:
    """Return ``condition``; for a bridged environment, True if it holds in any lane of a ``vmap``."""
    if state.token is None:
        return condition
    return _any_over_lanes(condition)  # type: ignore[no-any-return]


@custom_vmap
def _any_over_lanes(condition: Array) -> Array:
    return condition


@_any_over_lanes.def_vmap
def _(size: int, batched: Any, condition: Array) -> tuple[Array, bool]:
    del size
    return _any_over_lanes(jnp.any(condition, axis=0) if batched[0] else condition), False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Tally:
    """Running sums of one or several episodes per row.

    Attributes:
        sums: Leaves ``[rounds, *B]``, and ``env_steps``.
        count, quota: ``int32[*B]``: the number of episodes that have ended, and the number to evaluate.
    """

    sums: EpisodeMetrics
    count: Array
    quota: Array

    @classmethod
    def begin(cls, state: EnvState, rounds: int = 1, quota: Array | None = None) -> _Tally:
        shape = (rounds, *state.reward.shape)
        zero, zero_steps, false = jnp.zeros(shape, state.reward.dtype), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool)
        sums = EpisodeMetrics(zero, zero, zero_steps, false, false, false, jnp.zeros((), jnp.int32))
        return cls(sums, zero_steps[0], zero_steps[0] + 1 if quota is None else quota)

    @property
    def active(self) -> Array:
        """``bool[*B]``: the rows with episodes left."""
        return self.count < self.quota

    def add(self, state: EnvState, discount: float) -> _Tally:
        """Return a tally that includes the step that led to ``state``."""
        counted = self.active & state.valid
        rounds = jnp.arange(self.sums.finished.shape[0]).reshape((-1,) + (1,) * counted.ndim)
        in_round = counted & (rounds == self.count)  # [rounds, *B]
        ended = in_round & (state.terminated | state.truncated)
        sums = self.sums
        weight = jnp.asarray(discount, sums.episode_return.dtype) ** sums.episode_length
        sums = dataclasses.replace(
            sums,
            episode_return=sums.episode_return + jnp.where(in_round, state.reward, 0.0),
            discounted_return=sums.discounted_return + jnp.where(in_round, weight * state.reward, 0.0),
            episode_length=sums.episode_length + in_round,
            terminated=sums.terminated | (in_round & state.terminated),
            truncated=sums.truncated | (in_round & state.truncated),
            finished=sums.finished | ended,
            env_steps=sums.env_steps + 1,
        )
        return _Tally(sums, self.count + jnp.any(ended, axis=0), self.quota)

    def last_flags(self) -> dict[str, Any]:
        """Return ``terminated`` and ``truncated`` (``bool[*B]``) at the end of each row's latest finished episode."""
        latest = jnp.maximum(self.count - 1, 0)[None]
        names = ("terminated", "truncated")
        return {name: jnp.take_along_axis(getattr(self.sums, name), latest, axis=0)[0] for name in names}

    def metrics(self) -> EpisodeMetrics:
        """Return the metrics of the first episode of every row."""
        return jax.tree.map(lambda x: x[0] if x.ndim else x, self.sums)  # type: ignore[no-any-return]


_EvalCarry: TypeAlias = tuple[EnvState, PyTree, _Tally]


def _counted_step(
    env: FunctionalEnv | StepFunction, policy: Policy, params: PyTree, key: Array
) -> Callable[[_EvalCarry], tuple[_EvalCarry, Trajectory]]:
    """Return a function that takes one step of an evaluation and masks the rows without episodes left."""
    discount = float(getattr(env, "discount", 1.0))

    def act(carried: _EvalCarry) -> tuple[_EvalCarry, Trajectory]:
        state, carry, tally = carried
        step_key = jax.random.fold_in(key, tally.sums.env_steps)
        state, carry, transition = take_step(env, policy, params, state, carry, step_key)
        active = tally.active
        last_flags = tally.last_flags()
        flags: Any = {name: jnp.where(active, getattr(transition, name), flag) for name, flag in last_flags.items()}
        reward, valid = jnp.where(active, transition.reward, 0.0), transition.valid & active
        transition = dataclasses.replace(transition, reward=reward, valid=valid, **flags)
        return (state, carry, tally.add(state, discount)), transition

    return act


def truncated_bptt(
    env: FunctionalEnv, policy: Policy, horizon: int, loss: Callable[[Trajectory], Array]
) -> Callable[[PyTree, EnvState, PyTree, Array, int], tuple[Array, PyTree, EnvState, PyTree]]:
    """Return a function that computes gradients through a rollout in pieces of ``horizon`` steps.

    Args:
        env: A differentiable :class:`~vecenv.jax.FunctionalVectorEnv`.
        policy: As for :func:`~vecenv.jax.rollout`.
        horizon: The number of steps that a gradient reaches back.
        loss: Returns a scalar for the trajectory of one piece (leaves ``[horizon, *B, ...]``).

    Returns:
        ``gradients(params, state, carry, key, pieces) -> (loss, grads, state, carry)``: ``loss`` and ``grads`` are means
        over ``pieces`` pieces, ``state`` and ``carry`` those after the last piece. ``pieces`` is static under ``jit``.

    Raises:
        ValueError: ``horizon`` is not positive, or the environment has no reverse-mode derivative; the message names the
            remedy if there is one.
        TypeError: ``env`` is a bridge, or an object that :func:`~vecenv.jax.adapt` refuses.
    """
    if horizon < 1:
        raise ValueError(f"horizon must be positive, got {horizon}.")
    require_gradient(env)

    def piece_loss(params: PyTree, state: EnvState, carry: PyTree, key: Array) -> Any:
        trajectory, state, carry = rollout(env, policy, params, state, carry, key, horizon)
        return loss(trajectory), (state, carry)

    def gradients(params: PyTree, state: EnvState, carry: PyTree, key: Array, pieces: int) -> Any:
        def piece(carried: Any, number: Array) -> Any:
            state, carry, total, sums = carried
            piece_key = jax.random.fold_in(key, number)
            (value, (state, carry)), grads = jax.value_and_grad(piece_loss, has_aux=True)(params, state, carry, piece_key)
            return (state, carry, total + value / pieces, jax.tree.map(lambda s, g: s + g / pieces, sums, grads)), None

        start = (state, carry, jnp.zeros((), jnp.result_type(float)), jax.tree.map(jnp.zeros_like, params))
        (state, carry, value, grads), _ = jax.lax.scan(piece, start, jnp.arange(pieces))
        return value, grads, state, carry

    return gradients
