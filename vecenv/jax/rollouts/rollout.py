"""Rollouts over anything with ``reset(key)`` and ``step(state, action)`` on :class:`~vecenv.jax.EnvState`.

A bridged vector of processes and a JAX-native one are the same to these functions. So every call of ``env.step`` counts:
none is made to learn a shape, none after the last transition that is wanted, and none is thrown away.

A policy is a function ``policy(params, carry, obs, first, key) -> (carry, action, extras)``. ``carry`` is the memory of a
recurrent policy (``()`` for others), ``first`` (``bool[n]``) marks rows whose episode begins with ``obs``, where that memory
must be reset (:func:`reset_carry`), and ``extras`` is a dict of arrays to keep with the transition, such as
log-probabilities. :func:`stateless` makes one of a simpler function.

With ``overlap=True`` there are two environments, and while the processes of one step, the policy acts for the other. The
order of the calls is what makes them overlap: host calls of a program run one after the other, as they are written, and
the policy of one half stands between the ``send`` of the other half and its ``recv``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from vecenv.jax.native.env import select
from vecenv.jax.native.state import Array, EnvState, PyTree, _register

__all__ = [
    "FunctionalEnv", "Policy", "SplitEnv", "StepFunction", "Trajectory", "reset_carry", "rollout", "stateless", "take_step",
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
    env: FunctionalEnv | StepFunction | tuple[SplitEnv, SplitEnv],
    policy: Policy,
    params: PyTree,
    state: EnvState | tuple[EnvState, EnvState],
    carry: PyTree,
    key: Array,
    length: int,
    extras: Sequence[str] = (),
    *,
    overlap: bool = False,
    checkpoint: bool = False,
    unroll: int = 1,
) -> tuple[Trajectory, Any, PyTree]:
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
        unroll: As in ``jax.lax.scan``.

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
        return _overlapped(env, policy, params, state, carry, key, length, extras, unroll)
    if pairs:
        raise ValueError(f"{' and '.join(pairs)}: a pair is for overlap=True; without it, roll out each half alone.")

    def act(carried: Any, t: Array) -> Any:
        state, carry = carried
        state, carry, transition = take_step(env, policy, params, state, carry, jax.random.fold_in(key, t), extras)
        return (state, carry), transition

    body = jax.checkpoint(act) if checkpoint else act
    (state, carry), trajectory = jax.lax.scan(body, (state, carry), jnp.arange(length), unroll=unroll)
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
    return Trajectory(
        obs=before.obs,
        action=action,
        reward=after.reward,
        terminated=after.terminated,
        truncated=after.truncated,
        next_obs=after.next_obs,
        valid=after.valid,
        first=before.first,
        policy_extras=policy_extras,
        env_extras={name: _field(after, name) for name in extras},
    )


def _field(state: EnvState, name: str) -> Any:
    return state.info[name] if name in state.info else getattr(state, name)


def _check_extras(state: EnvState, extras: Sequence[str]) -> None:
    known = [field.name for field in dataclasses.fields(state) if field.name not in _HIDDEN] + ["done"]
    for name in extras:
        if name not in known and name not in state.info:
            raise ValueError(f"No field {name!r} in the state; there are {known}, and in its info {sorted(state.info)}.")


# -- two halves ----------------------------------------------------------------------------------------------------------


@_register
@dataclasses.dataclass(frozen=True)
class _Flight:
    """One half between its ``send`` and its ``recv``."""

    pending: EnvState
    carry: PyTree
    action: PyTree
    policy_extras: dict[str, Any]


def _overlapped(
    envs: Any, policy: Policy, params: PyTree, states: Any, carries: Any, key: Array, length: int, extras: Sequence[str],
    unroll: int,
) -> tuple[Trajectory, tuple[EnvState, ...], tuple[PyTree, ...]]:
    keys = [jax.random.fold_in(key, half) for half in (0, 1)]
    rows = states[0].reward.shape[0]

    def launch(half: int, state: EnvState, carry: PyTree, t: Any) -> _Flight:
        now = jax.random.fold_in(keys[half], t)
        carry, action, policy_extras = policy(params, carry, state.obs, state.first, now)
        return _Flight(envs[half].send(state, action), carry, action, policy_extras)

    def land(half: int, flight: _Flight) -> tuple[EnvState, Trajectory]:
        after = envs[half].recv(flight.pending)
        return after, _transition(flight.pending, flight.action, flight.policy_extras, after, extras)

    def write(book: Trajectory, half: int, t: Any, transition: Trajectory) -> Trajectory:
        def put(whole: Array, part: Array) -> Array:
            return jax.lax.dynamic_update_slice(whole, part[None], (t, half * rows) + (0,) * (part.ndim - 1))

        written: Trajectory = jax.tree.map(put, book, transition)
        return written

    def turn(t: Array, carried: Any) -> Any:
        flights, book = list(carried[0]), carried[1]
        for half in (0, 1):
            state, transition = land(half, flights[half])
            book = write(book, half, t - 1, transition)
            flights[half] = launch(half, state, flights[half].carry, t)
        return tuple(flights), book

    flights = tuple(launch(half, states[half], carries[half], 0) for half in (0, 1))
    book = _blank([jax.eval_shape(functools.partial(land, half), flights[half])[1] for half in (0, 1)], length)
    # Rows are written into the trajectory as they come, because the last one comes after the loop: appending it would copy
    # all the others.
    flights, book = jax.lax.fori_loop(1, length, turn, (flights, book), unroll=unroll)
    after = []
    for half in (0, 1):
        state, transition = land(half, flights[half])
        book = write(book, half, length - 1, transition)
        after.append(state)
    return book, tuple(after), tuple(flight.carry for flight in flights)


def _blank(transitions: list[Trajectory], length: int) -> Trajectory:
    """Room for ``length`` transitions of both halves, whose shapes are given."""

    def zeros(path: Any, first: Any, second: Any) -> Array:
        if not (first.ndim and second.ndim):
            where = jax.tree_util.keystr(path)
            raise ValueError(f"overlap=True joins the rows of both halves; the policy's {where} has no axis of rows.")
        return jnp.zeros((length, first.shape[0] + second.shape[0], *first.shape[1:]), first.dtype)

    book: Trajectory = jax.tree_util.tree_map_with_path(zeros, *transitions)
    return book


def _check_halves(env: Any, state: Any, carry: Any, length: int) -> None:
    for name, value in (("env", env), ("state", state), ("carry", carry)):
        if not isinstance(value, tuple) or len(value) != 2:
            found = f"{len(value)} of them" if isinstance(value, tuple) else type(value).__name__
            raise ValueError(f"overlap=True takes a pair as {name}, one for each half of the environments; got {found}.")
    for half in env:
        if not (hasattr(half, "send") and hasattr(half, "recv")):
            raise TypeError(
                f"overlap=True needs environments that step elsewhere, with send and recv, as vecenv.jax.bridge makes; "
                f"{type(half).__name__} has none."
            )
    if env[0] is env[1]:
        raise ValueError("overlap=True needs two environments, and got one twice.")
    if length < 1:
        raise ValueError(f"overlap=True needs a length of at least 1, got {length}.")
