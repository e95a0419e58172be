"""Evaluations: whole episodes of a policy, counted exactly once each, over anything that :func:`~vecenv.jax.rollout` steps.

The first episode of a row is what counts, or its first few; what the environment does afterwards, while slower rows finish,
is masked. The loops stop when the last episode that is wanted has ended. No step is made to learn a shape: the blank rows
after that are zeros of the shapes that tracing finds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from gymnasium.vector import AutoresetMode
from jax.custom_batching import custom_vmap

from vecenv.jax.native.state import Array, EnvState, PyTree, _register
from vecenv.jax.rollouts.rollout import FunctionalEnv, Policy, StepFunction, Trajectory, take_step

__all__ = ["EpisodeMetrics", "eval_rollout_episode", "fast_eval_rollout_episode"]


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


def eval_rollout_episode(
    env: FunctionalEnv | StepFunction, policy: Policy, params: PyTree, state: EnvState, carry: PyTree, key: Array,
    max_steps: int, *, early_stop: bool = True, keep: Sequence[str] | None = None,
) -> tuple[Trajectory, EpisodeMetrics, EnvState]:
    """The first episode of every row, step by step.

    Args:
        env, policy, params, state, carry, key: As for :func:`~vecenv.jax.rollout`; ``state`` fresh from ``reset``.
        max_steps: Steps at most; the trajectory has this length.
        early_stop: Step no further once every first episode has ended; of a bridged environment with lanes, in all of them,
            because they can only be stepped together. With False, ``max_steps`` steps are made.
        keep: The fields of the trajectory that are wanted, as ``("reward", "done")``; the others are ``None``, and cost
            neither time nor memory. Default, all.

    Raises:
        ValueError: ``keep`` names no field of a trajectory.

    Returns:
        The trajectory, its metrics, and the last state. After a row's first episode ``reward`` is 0, ``valid`` is False,
        and ``terminated``, ``truncated`` and ``done`` stay as the episode ended, whatever ``early_stop`` is: the length of
        the episode is the number of rows up to the first ``done``. The other fields mean nothing there.
    """
    whole = _counted_step(env, policy, params, key)

    def act(carried: _Carried) -> tuple[_Carried, Trajectory]:
        carried, transition = whole(carried)
        return carried, transition if keep is None else transition.keeping(keep)

    start = (state, carry, _Tally.begin(state))
    blank: Trajectory = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(act, start)[1])

    def skip(carried: _Carried) -> tuple[_Carried, Trajectory]:
        flags = {name: flag for name, flag in carried[2].last_flags().items() if getattr(blank, name) is not None}
        return carried, dataclasses.replace(blank, **flags)

    def maybe(carried: _Carried) -> tuple[_Carried, Trajectory]:
        result: tuple[_Carried, Trajectory] = jax.lax.cond(
            _in_any_lane(state, jnp.any(carried[2].active)), act, skip, carried
        )
        return result

    body = maybe if early_stop else act
    (state, _, tally), trajectory = jax.lax.scan(lambda carried, _: body(carried), start, length=max_steps)
    return trajectory, tally.metrics(), state


def fast_eval_rollout_episode(
    env: FunctionalEnv | StepFunction, policy: Policy, params: PyTree, state: EnvState, carry: PyTree, key: Array,
    max_steps: int, num_episodes: int | None = None, *, early_stop: bool = True,
) -> tuple[EpisodeMetrics, EnvState]:
    """Metrics of whole episodes and nothing else; stops as soon as the last of them has ended.

    Args:
        env, policy, params, state, carry, key: As for :func:`~vecenv.jax.rollout`; ``state`` fresh from ``reset``.
        max_steps: Steps at most for one episode per row, and as many times more for several.
        num_episodes: Default, one episode per row. Otherwise the number of all of them, the same share for each row, decided
            beforehand (taking whichever end first would favour short ones); entry ``r * n + i`` is episode r of row i. Rows
            that do not reset themselves (DISABLED) are reset, by ``env.reset_mask``, when all have had an episode.
        early_stop: As for :func:`eval_rollout_episode`.

    Returns:
        Metrics, and the last state. With ``early_stop`` a while loop: not differentiable in reverse mode, and under ``vmap``
        a JAX-native environment is stepped until the last lane is ready.

    Raises:
        ValueError: ``num_episodes`` is not positive.
    """
    n = state.reward.size
    rounds = 1 if num_episodes is None else -(-num_episodes // n)
    if rounds < 1:
        raise ValueError(f"num_episodes must be positive, got {num_episodes}.")
    if rounds > 1 and getattr(env, "autoreset_mode", None) is AutoresetMode.DISABLED:
        return _reset_between(env, policy, params, state, carry, key, max_steps, rounds, num_episodes, early_stop)
    quota = jnp.full(n, rounds) if num_episodes is None else (num_episodes - jnp.arange(n) + n - 1) // n
    start = (state, carry, _Tally.begin(state, rounds, quota.reshape(state.reward.shape)))
    act, limit = _counted_step(env, policy, params, key), max_steps * rounds

    def unfinished(carried: _Carried) -> Array:
        return _in_any_lane(state, jnp.any(carried[2].active) & (carried[2].env_steps < limit))

    if early_stop:
        state, _, tally = jax.lax.while_loop(unfinished, lambda carried: act(carried)[0], start)
    else:
        state, _, tally = jax.lax.fori_loop(0, limit, lambda _, carried: act(carried)[0], start)
    metrics = tally.metrics()
    if num_episodes is None:
        return metrics, state
    return _flat(metrics, num_episodes), state


def _flat(metrics: EpisodeMetrics, num_episodes: int) -> EpisodeMetrics:
    """The first ``num_episodes`` of ``[rounds, *B]``."""
    names = [field.name for field in dataclasses.fields(metrics) if field.name != "env_steps"]
    return dataclasses.replace(metrics, **{name: getattr(metrics, name).reshape(-1)[:num_episodes] for name in names})


def _reset_between(
    env: Any, policy: Policy, params: PyTree, state: EnvState, carry: PyTree, key: Array, max_steps: int, rounds: int,
    num_episodes: Any, early_stop: bool,
) -> tuple[EpisodeMetrics, EnvState]:
    """Rounds of one episode a row, with a reset of all rows between them."""

    def episode(state: EnvState, key: Array) -> tuple[EpisodeMetrics, EnvState]:
        return fast_eval_rollout_episode(env, policy, params, state, carry, key, max_steps, early_stop=early_stop)

    def again(state: EnvState, now: Array) -> tuple[EnvState, EpisodeMetrics]:
        begin, act = jax.random.split(jax.random.fold_in(key, now))
        metrics, state = episode(env.reset_mask(state, jnp.ones(state.reward.shape, bool), begin), act)
        return state, metrics

    first, state = episode(state, key)
    state, others = jax.lax.scan(again, state, jnp.arange(1, rounds))
    joined: EpisodeMetrics = jax.tree.map(lambda one, rest: jnp.concatenate([one[None], rest]), first, others)
    metrics = _flat(joined, num_episodes)
    return dataclasses.replace(metrics, env_steps=jnp.sum(joined.env_steps)), state


def _in_any_lane(state: EnvState, going: Array) -> Array:
    """Whether ``going`` holds in any lane: those of a bridged environment can only be stepped together."""
    if state.token is None:
        return going
    anywhere: Array = _anywhere(going)
    return anywhere


@custom_vmap
def _anywhere(going: Array) -> Array:
    return going


@_anywhere.def_vmap
def _(size: int, batched: Any, going: Array) -> tuple[Array, bool]:
    del size
    return _anywhere(jnp.any(going, axis=0) if batched[0] else going), False


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

    def last_flags(self) -> dict[str, Any]:
        """``terminated`` and ``truncated`` (``bool[*B]``) as the latest episode of each row that has ended left them."""
        latest = jnp.maximum(self.count - 1, 0)[None]
        names = ("terminated", "truncated")
        return {name: jnp.take_along_axis(getattr(self.sums, name), latest, axis=0)[0] for name in names}

    def metrics(self) -> EpisodeMetrics:
        fields = {field.name: getattr(self.sums, field.name) for field in dataclasses.fields(self.sums)}
        if self.sums.finished.shape[0] == 1:
            fields = {name: value[0] for name, value in fields.items() if name != "env_steps"}
        return EpisodeMetrics(**{**fields, "env_steps": self.env_steps})


_Carried: TypeAlias = tuple[EnvState, PyTree, _Tally]


def _counted_step(
    env: FunctionalEnv | StepFunction, policy: Policy, params: PyTree, key: Array
) -> Callable[[_Carried], tuple[_Carried, Trajectory]]:
    """One step of an evaluation; what it adds to a row that has had its episodes is blank."""
    discount = float(getattr(env, "discount", 1.0))

    def act(carried: _Carried) -> tuple[_Carried, Trajectory]:
        state, carry, tally = carried
        now = jax.random.fold_in(key, tally.env_steps)
        state, carry, transition = take_step(env, policy, params, state, carry, now)
        ended: dict[str, Any] = {
            name: jnp.where(tally.active, getattr(transition, name), flag) for name, flag in tally.last_flags().items()
        }
        transition = dataclasses.replace(
            transition,
            reward=jnp.where(tally.active, transition.reward, 0.0),
            valid=transition.valid & tally.active,
            **ended,
        )
        return (state, carry, tally.add(state, discount)), transition

    return act
