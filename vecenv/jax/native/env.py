"""One protocol for JAX-native environments, whatever library they come from.

Brax, MuJoCo Playground, gymnax, jumanji and Gymnasium's ``FuncEnv`` all offer pure functions of a state, a key and an
action, and all disagree on names, on what ``done`` means and on who resets. :class:`JaxEnv` is the smallest common form: a
single environment, no batch, no autoreset, no time limit but its own. Everything else (batching, autoreset, limits,
statistics) is written once, against this protocol, in :mod:`vecenv.jax.native.functional`.

The probe at the end of the file says what can be differentiated, before it fails. JAX notices a missing derivative deep
inside a trace, in words about ``lax.while_loop``, or not at all: an environment that only compares its action with zero has
a gradient that is exactly zero.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol, TypeAlias, runtime_checkable

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

from vecenv.jax.native.state import Array, PyTree

__all__ = ["Adapter", "JaxEnv", "Start", "Stepped", "default_key", "fixed", "probe", "select"]

Start: TypeAlias = tuple[PyTree, PyTree]  # state, obs
Stepped: TypeAlias = tuple[PyTree, PyTree, Array, Array, Array, dict[str, Any]]  # state, obs, reward, two flags, info


@runtime_checkable
class JaxEnv(Protocol):
    """A single environment as pure functions that can be traced.

    Attributes:
        single_observation_space: Space of one observation (Box, Discrete, MultiDiscrete, MultiBinary, Dict, Tuple).
        single_action_space: Space of one action.
        max_episode_steps: Time limit to apply from outside, in steps, or ``None``.
        differentiable: ``"reverse"`` (any gradient), ``"forward"`` (``jax.jvp`` only), or ``"none"``: the gradient of a
            step with respect to the action.
    """

    single_observation_space: gym.Space[Any]
    single_action_space: gym.Space[Any]
    max_episode_steps: int | None

    @property
    def differentiable(self) -> str: ...

    def init(self, key: Array) -> Start:
        """Begin an episode: ``(state, obs)``. The structure, shapes and dtypes of ``state`` never change afterwards."""
        ...

    def step(self, state: PyTree, action: PyTree, key: Array) -> Stepped:
        """One step: ``(state, obs, reward, terminated, truncated, info)``; scalars are 0-d."""
        ...


class Adapter:
    """Base of the adapters: the optional parts of the protocol with their defaults.

    Attributes:
        name: For messages and ``repr``.
        frames_per_second: Steps per second of simulated time, for ``render_fps``; 0 where it is unknown.
    """

    name: str = "env"
    single_observation_space: gym.Space[Any]
    single_action_space: gym.Space[Any]
    max_episode_steps: int | None = None
    frames_per_second: int = 0
    _differentiable: str | None = None

    @property
    def differentiable(self) -> str:
        """``"reverse"``, ``"forward"`` or ``"none"``; found by tracing the derivative of a step once, without running it."""
        if self._differentiable is None:
            self._differentiable = probe(self)
        return self._differentiable

    def gradient_advice(self) -> str:
        """What to do about a missing gradient; one sentence for the error message."""
        return "This environment computes its step in a way that JAX cannot differentiate."

    def init(self, key: Array) -> Start:
        raise NotImplementedError

    def step(self, state: PyTree, action: PyTree, key: Array) -> Stepped:
        raise NotImplementedError

    def render(self, state: PyTree) -> np.ndarray[Any, Any]:
        """One frame ``uint8[height, width, 3]`` of one environment's state.

        Raises:
            NotImplementedError: The library cannot draw this environment.
        """
        raise NotImplementedError(f"{self.name} cannot be rendered.")

    @property
    def model(self) -> PyTree:
        """The physics model that domain randomisation may change.

        Raises:
            ValueError: There is none.
        """
        raise ValueError(f"{self.name} has no physics model to randomise; `randomize` works for Brax and Playground.")

    def using(self, model: PyTree) -> contextlib.AbstractContextManager[None]:
        """Within the block, ``init`` and ``step`` run on ``model`` instead of their own."""
        raise ValueError(f"{self.name} has no physics model to replace.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"


def fixed(x: Any) -> Array:
    """``x`` as an array of a definite dtype (not weakly typed), which is what loops demand."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return jnp.asarray(x, jnp.result_type(x))


def select(mask: Array, yes: Array, no: Array) -> Array:
    """``where`` with a mask over the leading axes of arrays of any further shape."""
    return jnp.where(mask.reshape(mask.shape + (1,) * (yes.ndim - mask.ndim)), yes, no)


def default_key(seed: int) -> Array:
    """A raw key of the default generator, ``uint32[k]``: what all adapters hand to their environments."""
    return jax.random.key_data(jax.random.key(seed))


def probe(env: JaxEnv) -> str:
    """Trace derivatives of one step with respect to the action: ``"reverse"``, ``"forward"`` or ``"none"``.

    This takes about as long as tracing the step, and compiles nothing. ``"none"`` also where the action cannot reach the
    state, the observation or the reward.
    """
    key = default_key(0)
    state, _ = jax.eval_shape(env.init, key)
    sample = env.single_action_space.sample()
    action = jax.tree.map(jnp.asarray, sample)
    if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(action)):
        return "none"

    def outcome(action: PyTree, state: PyTree) -> list[jax.Array]:
        after, obs, reward, *_ = env.step(state, action, key)
        return [
            jnp.asarray(leaf)
            for leaf in jax.tree.leaves((after, obs, reward))
            if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        ]

    def total(action: PyTree, state: PyTree) -> jax.Array:
        return sum((jnp.sum(leaf) for leaf in outcome(action, state)), jnp.zeros(()))

    def tangents(push: PyTree, action: PyTree, state: PyTree) -> list[jax.Array]:
        pushed: list[jax.Array] = jax.jvp(lambda a: outcome(a, state), (action,), (push,))[1]
        return pushed

    try:
        traced = jax.make_jaxpr(tangents)(action, action, state)
    except (NotImplementedError, TypeError, ValueError):
        return "none"
    if not _reaches(traced.jaxpr, len(jax.tree.leaves(action))):
        return "none"
    try:
        jax.eval_shape(jax.grad(total), action, state)
    except (NotImplementedError, TypeError, ValueError):
        return "forward"
    return "reverse"


def _reaches(jaxpr: Any, inputs: int) -> bool:
    """Can any result depend on the first ``inputs`` arguments? Read off the outermost equations."""
    live = set(jaxpr.invars[:inputs])
    for equation in jaxpr.eqns:
        if any(not hasattr(var, "val") and var in live for var in equation.invars):
            live.update(equation.outvars)
    return any(not hasattr(var, "val") and var in live for var in jaxpr.outvars)
