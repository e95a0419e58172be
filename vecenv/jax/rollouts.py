"""Rollouts over anything with ``reset(key)`` and ``step(state, action)`` on :class:`~vecenv.jax.EnvState`.

A bridged vector of processes and a JAX-native one are the same to these functions. Every call of ``env.step`` counts: there
is none to learn a shape, none after the last transition that is wanted, and none whose result is thrown away.

A policy is a function ``policy(params, carry, obs, first, key) -> (carry, action, extras)``. ``carry`` is the memory of a
recurrent policy (``()`` for others), ``first`` (``bool[n]``) marks rows whose episode begins with ``obs``, where that memory
must be reset (:func:`reset_carry`), and ``extras`` is a dict of arrays to keep with the transition, such as
log-probabilities. :func:`stateless` makes one of a simpler function.

With ``overlap=True`` there are two environments, and while the processes of one step, the policy acts for the other. The
order of the calls is what makes them overlap: host calls of a program run one after the other, as they are written, and
the policy of one half stands between the ``send`` of the other half and its ``recv``.

Evaluations count whole episodes, each exactly once: the first of every row, or its first few. What the environment does
afterwards, while slower rows finish, is masked, and the loop stops when the last episode that is wanted has ended.

:func:`truncated_bptt` differentiates a rollout in pieces. The gradient of a long rollout of a physical system grows
exponentially with its length, and the memory that it needs grows linearly. Cutting it every ``horizon`` steps bounds both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from gymnasium.vector import AutoresetMode
from jax.custom_batching import custom_vmap

from vecenv.jax.env import Array, EnvState, PyTree, select
from vecenv.jax.libraries import require_gradient

__all__ = [
    "EpisodeMetrics", "FunctionalEnv", "Policy", "SplitEnv", "StepFunction", "Trajectory", "eval_rollout_episode",
    "fast_eval_rollout_episode", "reset_carry", "rollout", "stateless", "truncated_bptt",
]  # fmt: skip

StepFunction = Callable[[EnvState, PyTree], EnvState]
Policy = Callable[[PyTree, PyTree, PyTree, Array, Array], tuple[PyTree, PyTree, dict[str, Any]]]


class FunctionalEnv(Protocol):
    """What the rollouts ask of an environment; a ``discount`` attribute is used where there is one."""

    def step(self, state: EnvState, action: PyTree) -> EnvState: ...


class SplitEnv(FunctionalEnv, Protocol):
    """What ``overlap=True`` asks of each half: a step in two parts. The pending state between them keeps ``obs`` and
    ``first`` as they were."""

    def send(self, state: EnvState, action: PyTree) -> EnvState: ...

    def recv(self, state: EnvState) -> EnvState: ...


@jax.tree_util.register_dataclass
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

    @property
    def done(self) -> Array:
        """``bool[T, *B]``: terminated or truncated."""
        return self.terminated | self.truncated

    def keeping(self, names: Sequence[str]) -> Trajectory:
        """With these fields only, and ``None`` in the others; ``"done"`` is both flags. What is left out is not computed.

        Raises:
            ValueError: There is no such field.
        """
        fields = [field.name for field in dataclasses.fields(self)]
        kept = {part for name in names for part in (("terminated", "truncated") if name == "done" else (name,))}
        if unknown := sorted(kept - set(fields)):
            raise ValueError(f"A trajectory has no fields {unknown}; there are {[*fields, 'done']}.")
        without: dict[str, Any] = {name: None for name in fields if name not in kept}
        return dataclasses.replace(self, **without)


def stateless(function: Callable[[PyTree, PyTree, Array], tuple[PyTree, dict[str, Any]]]) -> Policy:
    """A policy without memory of ``function(params, obs, key) -> (action, extras)``; its carry is ``()``."""

    def policy(params: PyTree, carry: PyTree, obs: PyTree, first: Array, key: Array) -> Any:
        del first
        action, extras = function(params, obs, key)
        return carry, action, extras

    return policy


def rollout(
    env: FunctionalEnv | StepFunction | tuple[SplitEnv, SplitEnv], policy: Policy, params: PyTree,
    state: EnvState | tuple[EnvState, EnvState], carry: PyTree, key: Array, length: int, extras: Sequence[str] = (), *,
    overlap: bool = False, checkpoint: bool = False,
) -> tuple[Trajectory, Any, PyTree]:  # fmt: skip
    """``length`` steps of a policy.

    Args:
        env: Anything with ``step(state, action)`` on ``EnvState``, or such a function itself; with ``overlap``, a pair of
            bridged environments.
        policy: See the top of this module.
        params: Passed to the policy.
        state: Where to begin: from ``env.reset(key)`` or an earlier rollout. With ``overlap``, a pair.
        carry: The policy's memory to begin with; ``()`` for none. With ``overlap``, a pair.
        key: For the policy's randomness; step t gets ``fold_in(key, t)``.
        length: Number of steps ``T``.
        extras: Names of ``EnvState`` fields (``"steps"``, ``"last_return"``, ``"done"`` ...) or keys of its ``info`` to keep
            in ``env_extras``.
        overlap: Double-buffered stepping: while one half of the environments steps in its processes, the policy acts for the
            other half. Everything is exactly as in two rollouts without it, of half i with ``fold_in(key, i)``; the
            trajectory has the rows of the first half, then those of the second.
        checkpoint: Recompute each step in the backward pass instead of storing what it needs: memory for time. Only for
            environments that may be stepped twice, so not for bridged processes.

    Returns:
        The trajectory, the state after it (``EnvState``; with ``overlap``, a pair), and the policy's memory after it.

    Raises:
        ValueError: ``extras`` names something that the state does not have; or ``overlap`` without pairs, pairs without
            ``overlap``, and ``overlap`` with ``checkpoint`` or a policy whose extras have no axis of rows.
        TypeError: ``overlap`` with an environment that has no ``send`` and ``recv``.
    """
    pairs = [name for name, value in (("env", env), ("state", state)) if isinstance(value, tuple)]
    for each in state if isinstance(state, tuple) else (state,):
        _check_extras(each, extras)
    if overlap:
        if checkpoint:
            raise ValueError("overlap=True steps processes, which cannot be stepped again: leave checkpoint=False.")
        _check_halves(env, state, carry, length)
        return _overlapped(env, policy, params, state, carry, key, length, extras)
    if pairs:
        raise ValueError(f"{' and '.join(pairs)}: a pair is for overlap=True; without it, roll out each half alone.")

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
    """Act once: ``(state, carry, transition)``, the last with leaves ``[*B, ...]``; ``extras`` as for :func:`rollout`."""
    carry, action, policy_extras = policy(params, carry, state.obs, state.first, key)
    after = getattr(env, "step", env)(state, action)
    return after, carry, _transition(state, action, policy_extras, after, extras)


def reset_carry(first: Array, carry: PyTree, initial: PyTree) -> PyTree:
    """A recurrent policy's memory with the rows that begin an episode set to ``initial`` (leaves ``[*B, ...]``)."""
    return jax.tree.map(lambda start, old: select(first, jnp.broadcast_to(start, old.shape), old), initial, carry)


# -- transitions ---------------------------------------------------------------------------------------------------------

_HIDDEN = ("token", "inner", "info")


def _transition(
    before: EnvState, action: PyTree, policy_extras: dict[str, Any], after: EnvState, extras: Sequence[str]
) -> Trajectory:
    env_extras = {name: after.info[name] if name in after.info else getattr(after, name) for name in extras}
    return Trajectory(
        before.obs, action, after.reward, after.terminated, after.truncated, after.next_obs, after.valid, before.first,
        policy_extras, env_extras,
    )  # fmt: skip


def _check_extras(state: EnvState, extras: Sequence[str]) -> None:
    known = [field.name for field in dataclasses.fields(state) if field.name not in _HIDDEN] + ["done"]
    for name in extras:
        if name not in known and name not in state.info:
            raise ValueError(f"No field {name!r} in the state; there are {known}, and in its info {sorted(state.info)}.")


# -- two halves ----------------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _RolloutRequest:
    """One half between its ``send`` and its ``recv``."""

    pending: EnvState
    carry: PyTree
    action: PyTree
    policy_extras: dict[str, Any]


def _overlapped(
    envs: Any, policy: Policy, params: PyTree, states: Any, carries: Any, key: Array, length: int, extras: Sequence[str],
) -> tuple[Trajectory, tuple[EnvState, ...], tuple[PyTree, ...]]:
    keys = [jax.random.fold_in(key, half) for half in (0, 1)]
    rows = states[0].reward.shape[0]

    def send(half: int, state: EnvState, carry: PyTree, t: Any) -> _RolloutRequest:
        now = jax.random.fold_in(keys[half], t)
        carry, action, policy_extras = policy(params, carry, state.obs, state.first, now)
        return _RolloutRequest(envs[half].send(state, action), carry, action, policy_extras)

    def recv(half: int, request: _RolloutRequest) -> tuple[EnvState, Trajectory]:
        after = envs[half].recv(request.pending)
        return after, _transition(request.pending, request.action, request.policy_extras, after, extras)

    def received(half: int, request: _RolloutRequest, trajectory: Trajectory, t: Any) -> tuple[EnvState, Trajectory]:
        """The state after the step that is pending, and ``trajectory`` with its row t."""
        state, transition = recv(half, request)

        def put(whole: Array, part: Array) -> Array:
            return jax.lax.dynamic_update_slice(whole, part[None], (t, half * rows) + (0,) * (part.ndim - 1))

        return state, jax.tree.map(put, trajectory, transition)

    def turn(t: Array, carried: Any) -> Any:
        requests, trajectory = list(carried[0]), carried[1]
        for half in (0, 1):
            state, trajectory = received(half, requests[half], trajectory, t - 1)
            requests[half] = send(half, state, requests[half].carry, t)
        return tuple(requests), trajectory

    requests = tuple(send(half, states[half], carries[half], 0) for half in (0, 1))
    trajectory = _blank([jax.eval_shape(functools.partial(recv, half), requests[half])[1] for half in (0, 1)], length)
    # Rows are written into the trajectory as they come, because the last one comes after the loop: appending it would copy
    # all the others.
    requests, trajectory = jax.lax.fori_loop(1, length, turn, (requests, trajectory))
    first, trajectory = received(0, requests[0], trajectory, length - 1)
    second, trajectory = received(1, requests[1], trajectory, length - 1)
    return trajectory, (first, second), tuple(request.carry for request in requests)


def _blank(transitions: list[Trajectory], length: int) -> Trajectory:
    """Room for ``length`` transitions of both halves, whose shapes are given."""

    def zeros(path: Any, first: Any, second: Any) -> Array:
        if not (first.ndim and second.ndim):
            where = jax.tree_util.keystr(path)
            raise ValueError(f"overlap=True joins the rows of both halves; the policy's {where} has no axis of rows.")
        return jnp.zeros((length, first.shape[0] + second.shape[0], *first.shape[1:]), first.dtype)

    return jax.tree_util.tree_map_with_path(zeros, *transitions)  # type: ignore[no-any-return]


def _check_halves(env: Any, state: Any, carry: Any, length: int) -> None:
    for name, value in (("env", env), ("state", state), ("carry", carry)):
        if not isinstance(value, tuple) or len(value) != 2:
            found = f"{len(value)} of them" if isinstance(value, tuple) else type(value).__name__
            raise ValueError(f"overlap=True takes a pair as {name}, one for each half of the environments; got {found}.")
    for half in env:
        if not (hasattr(half, "send") and hasattr(half, "recv")):
            raise TypeError(f"overlap=True needs send and recv, as bridges have them; {type(half).__name__} has none.")
    if env[0] is env[1]:
        raise ValueError("overlap=True needs two environments, and got one twice.")
    if length < 1:
        raise ValueError(f"overlap=True needs a length of at least 1, got {length}.")


@jax.tree_util.register_dataclass
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
    max_steps: int, *, keep: Sequence[str] | None = None,
) -> tuple[Trajectory, EpisodeMetrics, EnvState]:  # fmt: skip
    """The first episode of every row, step by step, until the last of them has ended.

    Args:
        env, policy, params, state, carry, key: As for :func:`~vecenv.jax.rollout`; ``state`` fresh from ``reset``.
        max_steps: Steps at most; the trajectory has this length.
        keep: The fields of the trajectory that are wanted, as ``("reward", "done")``; the others are ``None``, and cost
            neither time nor memory. Default, all.

    Raises:
        ValueError: ``keep`` names no field of a trajectory.

    Returns:
        The trajectory, its metrics, and the last state. After a row's first episode ``reward`` is 0, ``valid`` is False,
        and ``terminated``, ``truncated`` and ``done`` stay as the episode ended: the length of the episode is the number of
        rows up to the first ``done``. The other fields mean nothing there. Lanes of a bridge stop together.
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

    def maybe(carried: _Carried, _: None) -> tuple[_Carried, Trajectory]:
        going = _in_any_lane(state, jnp.any(carried[2].active))
        return jax.lax.cond(going, act, skip, carried)  # type: ignore[no-any-return]

    (state, _, tally), trajectory = jax.lax.scan(maybe, start, length=max_steps)
    return trajectory, tally.metrics(), state


def fast_eval_rollout_episode(
    env: FunctionalEnv | StepFunction, policy: Policy, params: PyTree, state: EnvState, carry: PyTree, key: Array,
    max_steps: int, num_episodes: int | None = None,
) -> tuple[EpisodeMetrics, EnvState]:  # fmt: skip
    """Metrics of whole episodes and nothing else; stops as soon as the last of them has ended.

    Args:
        env, policy, params, state, carry, key: As for :func:`~vecenv.jax.rollout`; ``state`` fresh from ``reset``.
        max_steps: Steps at most for one episode per row, and as many times more for several.
        num_episodes: Default, one episode per row. Otherwise the number of all of them, the same share for each row, decided
            beforehand (taking whichever end first would favour short ones); entry ``r * n + i`` is episode r of row i. Rows
            that do not reset themselves (DISABLED) are reset, by ``env.reset_mask``, while they have episodes left.

    Returns:
        Metrics, and the last state. It is a while loop, so it is not differentiable in reverse mode, and under ``vmap`` a
        JAX-native environment is stepped until the last lane is ready.

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
    resets: Any = env if rounds > 1 and getattr(env, "autoreset_mode", None) is AutoresetMode.DISABLED else None

    def going(carried: _Carried) -> Array:
        return _in_any_lane(state, jnp.any(carried[2].active) & (carried[2].sums.env_steps < limit))

    def advance(carried: _Carried) -> _Carried:
        state, carry, tally = act(carried)[0]
        if resets is not None:
            again, now = state.done & tally.active, jax.random.fold_in(jax.random.fold_in(key, 0), tally.sums.env_steps)
            some = _in_any_lane(state, jnp.any(again))
            state = jax.lax.cond(some, lambda state: resets.reset_mask(state, again, now), lambda state: state, state)
        return state, carry, tally

    state, _, tally = jax.lax.while_loop(going, advance, start)
    if num_episodes is None:
        return tally.metrics(), state
    return jax.tree.map(lambda x: x.reshape(-1)[:num_episodes] if x.ndim else x, tally.sums), state


def _in_any_lane(state: EnvState, going: Array) -> Array:
    """Whether ``going`` holds in any lane: those of a bridged environment can only be stepped together."""
    if state.token is None:
        return going
    return _anywhere(going)  # type: ignore[no-any-return]


@custom_vmap
def _anywhere(going: Array) -> Array:
    return going


@_anywhere.def_vmap
def _(size: int, batched: Any, going: Array) -> tuple[Array, bool]:
    del size
    return _anywhere(jnp.any(going, axis=0) if batched[0] else going), False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Tally:
    """Running sums of one or several episodes a row.

    Attributes:
        sums: Leaves ``[rounds, *B]``, and ``env_steps``.
        count, quota: ``int32[*B]``: how many episodes ended, and how many are wanted.
    """

    sums: EpisodeMetrics
    count: Array
    quota: Array

    @classmethod
    def begin(cls, state: EnvState, rounds: int = 1, quota: Array | None = None) -> _Tally:
        shape = (rounds, *state.reward.shape)
        zero, none, no = jnp.zeros(shape, state.reward.dtype), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool)
        sums = EpisodeMetrics(zero, zero, none, no, no, no, jnp.zeros((), jnp.int32))
        return cls(sums, none[0], none[0] + 1 if quota is None else quota)

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
        sums = dataclasses.replace(
            sums,
            episode_return=sums.episode_return + jnp.where(here, state.reward, 0.0),
            discounted_return=sums.discounted_return + jnp.where(here, weight * state.reward, 0.0),
            episode_length=sums.episode_length + here,
            terminated=sums.terminated | (here & state.terminated),
            truncated=sums.truncated | (here & state.truncated),
            finished=sums.finished | ended,
            env_steps=sums.env_steps + 1,
        )
        return _Tally(sums, self.count + jnp.any(ended, axis=0), self.quota)

    def last_flags(self) -> dict[str, Any]:
        """``terminated`` and ``truncated`` (``bool[*B]``) as the latest episode of each row that has ended left them."""
        latest = jnp.maximum(self.count - 1, 0)[None]
        names = ("terminated", "truncated")
        return {name: jnp.take_along_axis(getattr(self.sums, name), latest, axis=0)[0] for name in names}

    def metrics(self) -> EpisodeMetrics:
        """Of the first episode of every row."""
        return jax.tree.map(lambda x: x[0] if x.ndim else x, self.sums)  # type: ignore[no-any-return]


_Carried: TypeAlias = tuple[EnvState, PyTree, _Tally]


def _counted_step(
    env: FunctionalEnv | StepFunction, policy: Policy, params: PyTree, key: Array
) -> Callable[[_Carried], tuple[_Carried, Trajectory]]:
    """One step of an evaluation; what it adds to a row that has had its episodes is blank."""
    discount = float(getattr(env, "discount", 1.0))

    def act(carried: _Carried) -> tuple[_Carried, Trajectory]:
        state, carry, tally = carried
        now = jax.random.fold_in(key, tally.sums.env_steps)
        state, carry, transition = take_step(env, policy, params, state, carry, now)
        active = tally.active
        flags = tally.last_flags()
        ended: Any = {name: jnp.where(active, getattr(transition, name), flag) for name, flag in flags.items()}
        reward, valid = jnp.where(active, transition.reward, 0.0), transition.valid & active
        transition = dataclasses.replace(transition, reward=reward, valid=valid, **ended)
        return (state, carry, tally.add(state, discount)), transition

    return act


def truncated_bptt(
    env: FunctionalEnv, policy: Policy, horizon: int, loss: Callable[[Trajectory], Array]
) -> Callable[[PyTree, EnvState, PyTree, Array, int], tuple[Array, PyTree, EnvState, PyTree]]:
    """A function that rolls out and differentiates in pieces of ``horizon`` steps.

    Args:
        env: A differentiable :class:`~vecenv.jax.FunctionalVectorEnv`.
        policy: As for :func:`~vecenv.jax.rollout`.
        horizon: Steps that a gradient reaches back.
        loss: Scalar of the trajectory of one piece (leaves ``[horizon, *B, ...]``).

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
        trajectory, state, carry = rollout(env, policy, params, state, carry, key, horizon)
        return loss(trajectory), (state, carry)

    def gradients(params: PyTree, state: EnvState, carry: PyTree, key: Array, pieces: int) -> Any:
        def piece(carried: Any, number: Array) -> Any:
            state, carry, total, sums = carried
            now = jax.random.fold_in(key, number)
            (value, (state, carry)), grads = jax.value_and_grad(piece_loss, has_aux=True)(params, state, carry, now)
            return (state, carry, total + value / pieces, jax.tree.map(lambda s, g: s + g / pieces, sums, grads)), None

        start = (state, carry, jnp.zeros((), jnp.result_type(float)), jax.tree.map(jnp.zeros_like, params))
        (state, carry, value, grads), _ = jax.lax.scan(piece, start, jnp.arange(pieces))
        return value, grads, state, carry

    return gradients
