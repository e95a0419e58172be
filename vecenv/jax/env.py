"""One protocol for JAX-native environments, whatever library they come from.

Brax, MuJoCo Playground, gymnax, jumanji and Gymnasium's ``FuncEnv`` all offer pure functions of a state, a key and an
action, and all disagree on names, on what ``done`` means and on what resets. :class:`JaxEnv` is the smallest common form: a
single environment, no batch, no autoreset, no time limit but its own. Everything else (batching, autoreset, limits,
statistics) is written once, against this protocol, in :mod:`vecenv.jax.functional`.

Each subclass of :class:`Wrapped` changes one thing about an environment. :func:`probe` says what can be differentiated,
before it fails: JAX notices a missing derivative deep inside a trace, in words about ``lax.while_loop``, or not at all. An
environment that only compares its action with zero has a gradient that is exactly zero.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol, TypeAlias, runtime_checkable

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

from vecenv.jax.state import Array, PyTree

__all__ = [
    "Adapter", "Fixed", "FrameSkip", "JaxEnv", "Override", "Rescaled", "Start", "Stepped", "default_key", "merge_rows",
    "probe", "select",
]  # fmt: skip

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


def merge_rows(mask: Array, yes: Any, no: Any) -> Any:
    """Row by row ``yes`` where ``mask`` holds, else ``no``, over two trees of the same structure."""
    return jax.tree.map(lambda one, other: select(mask, one, other), yes, no)


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


class Wrapped(Adapter):
    """An adapter around another that changes one thing and forwards the rest."""

    def __init__(self, env: JaxEnv) -> None:
        self.env: Any = env  # a JaxEnv, and whatever optional parts of an Adapter it has
        self.name = getattr(env, "name", type(env).__name__)
        self.single_observation_space = env.single_observation_space
        self.single_action_space = env.single_action_space
        self.max_episode_steps = env.max_episode_steps
        self.frames_per_second = getattr(env, "frames_per_second", 0)

    @property
    def differentiable(self) -> str:
        return str(self.env.differentiable)

    def gradient_advice(self) -> str:
        advice = getattr(self.env, "gradient_advice", super().gradient_advice)
        return str(advice())

    def init(self, key: Array) -> Start:
        start: Start = self.env.init(key)
        return start

    def step(self, state: PyTree, action: PyTree, key: Array) -> Stepped:
        stepped: Stepped = self.env.step(state, action, key)
        return stepped

    def render(self, state: PyTree) -> np.ndarray[Any, Any]:
        frame: np.ndarray[Any, Any] = self.env.render(state)
        return frame

    @property
    def model(self) -> PyTree:
        return self.env.model if hasattr(self.env, "model") else super().model

    def using(self, model: PyTree) -> contextlib.AbstractContextManager[None]:
        context: contextlib.AbstractContextManager[None] = self.env.using(model)
        return context


class Override(Wrapped):
    """Another action space or time limit than the environment's own (-1: no limit)."""

    def __init__(self, env: JaxEnv, action_space: gym.Space[Any] | None, max_episode_steps: int | None) -> None:
        super().__init__(env)
        if action_space is not None:
            self.single_action_space = action_space
        if max_episode_steps is not None:
            self.max_episode_steps = None if max_episode_steps == -1 else max_episode_steps


class FrameSkip(Wrapped):
    """Every action is repeated ``count`` times, but never past the end of an episode; rewards are summed up to there."""

    def __init__(self, env: JaxEnv, count: int) -> None:
        super().__init__(env)
        if count < 1:
            raise ValueError(f"frame_skip must be at least 1, got {count}.")
        self.count = count
        self.frames_per_second //= count

    def step(self, state: PyTree, action: PyTree, key: Array) -> Stepped:
        def frame(out: Any, i: Array) -> tuple[Any, None]:
            state, _, reward, terminated, truncated, _ = out
            done = terminated | truncated
            nxt = self.env.step(state, action, jax.random.fold_in(key, i))
            nxt = (*nxt[:2], reward + nxt[2], *nxt[3:])
            return jax.tree.map(lambda old, new: select(done, old, new), out, nxt), None

        first = self.env.step(state, action, jax.random.fold_in(key, 0))
        out, _ = jax.lax.scan(frame, first, jnp.arange(1, self.count))
        stepped: Stepped = out
        return stepped


class Rescaled(Wrapped):
    """Actions in ``[low, high]`` are mapped linearly onto the bounds of the environment's own Box."""

    def __init__(self, env: JaxEnv, low: Any, high: Any) -> None:
        super().__init__(env)
        own = env.single_action_space
        if not (isinstance(own, gym.spaces.Box) and own.is_bounded()):
            raise ValueError(f"Only a bounded Box of actions can be rescaled; {self.name} has {own}.")
        shape = own.shape
        low, high = (np.broadcast_to(np.asarray(x, own.dtype), shape).copy() for x in (low, high))
        dtype: Any = own.dtype
        self.single_action_space = gym.spaces.Box(low, high, dtype=dtype.type)
        self._scale = (own.high - own.low) / (high - low)
        self._shift = own.low - low * self._scale

    def step(self, state: PyTree, action: PyTree, key: Array) -> Stepped:
        stepped: Stepped = self.env.step(state, action * self._scale + self._shift, key)
        return stepped


class Fixed(Wrapped):
    """States, observations and flags keep the structure, shapes and dtypes that ``init`` gave them.

    Libraries return Python floats, weakly typed arrays, ``float32`` flags and the like; a scan or a while loop refuses
    them, and a silent cast somewhere else is worse. Here is the one place where they are put right or refused.
    """

    def __init__(self, env: JaxEnv) -> None:
        super().__init__(env)
        self._spec: Any = jax.eval_shape(env.init, default_key(0))

    def init(self, key: Array) -> Start:
        start: Start = self._like(self.env.init(key), "init")
        return start

    def step(self, state: PyTree, action: PyTree, key: Array) -> Stepped:
        state, obs, reward, terminated, truncated, info = self.env.step(state, action, key)
        state, obs = self._like((state, obs), "step")
        reward = jnp.asarray(reward, jnp.result_type(float))
        flags = [jnp.asarray(flag, bool) for flag in (terminated, truncated)]
        for what, value in (("reward", reward), ("terminated", flags[0]), ("truncated", flags[1])):
            if value.shape != ():
                raise ValueError(f"{self.name} returned a {what} of shape {value.shape}; one number is wanted.")
        return state, obs, reward, flags[0], flags[1], jax.tree.map(fixed, info)

    def _like(self, value: Any, where: str) -> Any:
        want: Any = jax.tree.structure(self._spec)
        got: Any = jax.tree.structure(value)
        if want != got:
            raise ValueError(
                f"{self.name}: {where} returned a state or observation of another structure than init did.\n"
                f"  init: {want}\n  {where}: {got}"
            )

        def cast(path: Any, spec: Any, leaf: Any) -> Any:
            leaf = fixed(leaf)
            if leaf.shape != spec.shape:
                where_in = jax.tree_util.keystr(path)
                raise ValueError(
                    f"{self.name}: {where} returned {where_in} of shape {leaf.shape}, init of shape {spec.shape}."
                )
            return leaf if leaf.dtype == spec.dtype else leaf.astype(spec.dtype)

        return jax.tree_util.tree_map_with_path(cast, self._spec, value)
