"""``EnvState``, the state of a batch of environments, and ``JaxEnv``, one environment as pure functions.

Bridged and JAX-native environments share :class:`EnvState`, so the same rollouts serve both. Its fields have the same
meaning in every autoreset mode; in valid rows, ``next_obs`` is the true successor, not the first observation of the next
episode.

Brax, MuJoCo Playground, gymnax, jumanji and ``FuncEnv`` disagree on names, on the meaning of ``done`` and on resets.
:class:`JaxEnv` is the smallest common form: one environment, without a batch, without autoreset, and with no time limit
but its own; :mod:`vecenv.jax.functional` adds the rest for all of them. :func:`probe` finds a missing derivative in
advance. JAX itself reports it deep in a trace, with an error about ``lax.while_loop``, or not at all: a step that only
compares its action with zero has a gradient of zero.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Protocol, TypeAlias, runtime_checkable

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector import AutoresetMode

__all__ = [
    "Adapter", "Array", "EnvState", "FixedSpec", "FrameSkip", "JaxEnv", "Limited", "NativeState", "PyTree", "Rescaled",
    "Start", "Stepped", "default_key", "merge_rows", "probe", "select", "stop_gradient",
]  # fmt: skip

Array: TypeAlias = jax.Array
PyTree: TypeAlias = Any
Start: TypeAlias = tuple[PyTree, PyTree]  # state, obs
Stepped: TypeAlias = tuple[PyTree, PyTree, Array, Array, Array, dict[str, Any]]  # state, obs, reward, two flags, info


def select(mask: Array, yes: Array, no: Array) -> Array:
    """Choose from ``yes`` where ``mask`` is True, and from ``no`` elsewhere. The mask covers the leading axes."""
    return jnp.where(mask.reshape(mask.shape + (1,) * (yes.ndim - mask.ndim)), yes, no)


def merge_rows(mask: Array, yes: Any, no: Any) -> Any:
    """Apply :func:`select` to each pair of leaves of two trees of the same structure."""
    return jax.tree.map(lambda one, other: select(mask, one, other), yes, no)


def stop_gradient(mask: Array | None, tree: PyTree) -> PyTree:
    """Stop the gradient in the rows of ``tree`` under ``mask``, without a select at run time."""
    # The derivative of a step past the end of an episode may be infinite. The step's result is discarded, but zero times
    # infinity is NaN, which would reach the action and all earlier steps.
    return tree if mask is None else merge_rows(mask, jax.lax.stop_gradient(tree), tree)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EnvState:
    """The state of ``num_envs`` environments after a reset or a step. ``B`` is the batch shape, usually ``(num_envs,)``.

    Attributes:
        obs: The observation to act on next. Leaves ``[*B, ...]`` in the dtypes of the observation space.
        reward: ``float[*B]`` of the last step; 0 after a reset, in reset steps of NEXT_STEP, and in finished rows of
            DISABLED.
        terminated: ``bool[*B]``: the episode ended in a terminal state of the task.
        truncated: ``bool[*B]``: the episode was cut off, by a time limit for instance. Both may be true at once.
        next_obs: The observation that followed the action, even where the episode ended. Leaves as in ``obs``.
        valid: ``bool[*B]``: a real transition happened. False after a reset, in reset steps of NEXT_STEP, and in
            finished rows of DISABLED. Learn only from valid transitions.
        first: ``bool[*B]``: ``obs`` is the first of its episode; recurrent policies reset their carry here.
        steps: ``int32[*B]``: steps so far in the episode that ``obs`` belongs to.
        episode_return: ``float[*B]``: sum of rewards of that episode so far.
        discounted_return: ``float[*B]``: the same, discounted by the environment's ``discount``.
        last_return: ``float[*B]``: return of the last episode that ended; 0 before there was one.
        last_length: ``int32[*B]``: its length in steps.
        last_discounted_return: ``float[*B]``: its discounted return.
        info: A dict of arrays ``[*B, ...]`` of fixed structure: the infos of the last call. Meaningful where ``valid``; in
            bridged environments, where the mask ``_name`` is True.
        token: For bridged environments: ``int32[2]``, the token for the next call. Otherwise ``None``.
        inner: For JAX-native environments: a :class:`NativeState`. Otherwise ``None``.
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
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def at_start(cls, obs: PyTree, shape: tuple[int, ...], info: dict[str, Any], **hidden: Any) -> EnvState:
        """Return the state of a batch of ``shape`` environments after a reset; ``hidden`` is ``token`` or ``inner``."""
        zero, zero_steps = jnp.zeros(shape, jnp.result_type(float)), jnp.zeros(shape, jnp.int32)
        false = jnp.zeros(shape, bool)
        return cls(
            obs=obs, reward=zero, terminated=false, truncated=false, next_obs=obs, valid=false, first=~false,
            steps=zero_steps, episode_return=zero, discounted_return=zero, last_return=zero, last_length=zero_steps,
            last_discounted_return=zero, info=info, **hidden,
        )  # fmt: skip

    def restarted(self, mask: Array, obs: PyTree, **changes: Any) -> EnvState:
        """Return a copy in which rows under ``mask`` begin a new episode. The results of their last episode are kept."""
        zero, false = jnp.zeros_like(self.reward), jnp.zeros_like(self.terminated)
        fresh = self.replace(
            obs=obs, next_obs=obs, reward=zero, terminated=false, truncated=false, valid=false, first=~false,
            steps=jnp.zeros_like(self.steps), episode_return=zero, discounted_return=zero, **changes,
        )  # fmt: skip
        return merge_rows(mask, fresh, self)  # type: ignore[no-any-return]

    def advanced(
        self, mode: AutoresetMode, discount: float, *, obs: PyTree, next_obs: PyTree, reward: Array, terminated: Array,
        truncated: Array, info: dict[str, Any],
    ) -> EnvState:  # fmt: skip
        """Return the state after a step. ``mode`` determines the treatment of rows that had ended or end now.

        Args:
            mode: NEXT_STEP: rows that had ended have begun their next episode instead of stepping. SAME_STEP: in rows that
                end, ``obs`` already belongs to the next episode. DISABLED: rows that had ended stay as they are, but not
                ``valid``, and with reward 0.
            discount: For ``discounted_return``.
            obs, next_obs, reward, terminated, truncated, info: The results of the step. In rows that did not step, the
                reward and the flags are ignored; under DISABLED, everything is.
        """
        false = jnp.zeros_like(self.terminated)
        idle = false if mode is AutoresetMode.SAME_STEP else self.done  # rows that did not step
        is_first = idle if mode is AutoresetMode.NEXT_STEP else false
        terminated, truncated = terminated & ~idle, truncated & ~idle
        done = terminated | truncated
        reward = jnp.where(idle, 0.0, reward)
        steps = jnp.where(is_first, 0, self.steps + 1)
        total = jnp.where(is_first, 0.0, self.episode_return + reward)
        discounted = total
        if discount != 1.0:
            weight = jnp.asarray(discount, total.dtype) ** self.steps
            discounted = jnp.where(is_first, 0.0, self.discounted_return + weight * reward)
        last = {
            "last_return": jnp.where(done, total, self.last_return),
            "last_length": jnp.where(done, steps, self.last_length),
            "last_discounted_return": jnp.where(done, discounted, self.last_discounted_return),
        }
        if mode is AutoresetMode.SAME_STEP:
            is_first = done
            steps, total, discounted = (jnp.where(done, jnp.zeros_like(x), x) for x in (steps, total, discounted))
        after = self.replace(
            obs=obs, next_obs=next_obs, reward=reward, terminated=terminated, truncated=truncated, valid=~idle,
            first=is_first, info=info, steps=steps, episode_return=total, discounted_return=discounted, **last,
        )  # fmt: skip
        if mode is AutoresetMode.DISABLED:
            merged: EnvState = merge_rows(idle, self, after)
            # obs and next_obs are equal without autoreset, so one merged array is enough
            return merged.replace(next_obs=merged.obs, reward=reward, valid=~idle, first=false)
        return after


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NativeState:
    """The internal part of a JAX-native environment's state. All leaves ``[*B, ...]``.

    Attributes:
        env: The states of the single environments, stacked.
        key: ``uint32[*B, k]``: each row's own random key; with ``episode`` it determines every start state and all noise.
        episode: ``int32[*B]``: the number of earlier episodes with this key.
        elapsed: ``int32[*B]``: steps counted against the time limit (``steps``, plus the offset of a staggered episode).
        pool: Stored start states ``[*B, pool_size, ...]`` with their observations, for ``reset="cached"`` and ``"pool"``.
        model: The leaves of the physics model that domain randomisation varies from row to row.
    """

    env: PyTree
    key: Array
    episode: Array
    elapsed: Array
    pool: PyTree = None
    model: PyTree = None

    def replace(self, **changes: Any) -> NativeState:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


@runtime_checkable
class JaxEnv(Protocol):
    """A single environment as pure functions that can be traced.

    Attributes:
        single_observation_space: Space of one observation (Box, Discrete, MultiDiscrete, MultiBinary, Dict, Tuple).
        single_action_space: Space of one action.
        max_episode_steps: Time limit in steps for callers to apply, or ``None``.
        differentiable: The derivative of a step with respect to the action: ``"reverse"`` (any gradient), ``"forward"``
            (``jax.jvp`` only), ``"zero"`` (0 for every action) or ``"none"``.
    """

    single_observation_space: gym.Space[Any]
    single_action_space: gym.Space[Any]
    max_episode_steps: int | None

    @property
    def differentiable(self) -> str: ...

    def init(self, key: Array) -> Start:
        """Begin an episode and return ``(state, obs)``. The structure, shapes and dtypes of ``state`` never change."""
        ...

    def step(self, state: PyTree, action: PyTree, key: Array) -> Stepped:
        """Step once and return ``(state, obs, reward, terminated, truncated, info)``; scalars are 0-d."""
        ...


class Adapter(JaxEnv):
    """The base class of the adapters: a :class:`JaxEnv` with defaults for the optional parts.

    Attributes:
        name: For messages and ``repr``.
        frames_per_second: Steps per second of simulated time, for ``render_fps``; 0 if unknown.
    """

    name: str = "env"
    max_episode_steps: int | None = None
    frames_per_second: int = 0
    _differentiable: str | None = None

    @property
    def differentiable(self) -> str:
        """The kind of derivative, as in :class:`JaxEnv`; found on first access, by tracing a step without running it."""
        if self._differentiable is None:
            self._differentiable = probe(self)
        return self._differentiable

    def gradient_advice(self) -> str:
        """Return a sentence of explanation or advice for the error message about a missing gradient."""
        return "This environment computes its step in a way that gives no gradient."

    def render(self, state: PyTree) -> np.ndarray[Any, Any]:
        """Draw one environment's state as ``uint8[height, width, 3]``.

        Raises:
            NotImplementedError: Rendering is not implemented for environments of this library.
            RuntimeError: The renderer failed, for example without OpenGL.
        """
        raise NotImplementedError(f"{self.name} cannot be rendered.")

    @property
    def model(self) -> PyTree:
        """The physics model, which domain randomisation may change.

        Raises:
            ValueError: There is none.
        """
        raise ValueError(f"{self.name} has no physics model to randomise; `randomize` works for Brax and Playground.")

    def using(self, model: PyTree) -> contextlib.AbstractContextManager[None]:
        """Make ``init`` and ``step`` use ``model`` within the block, instead of the environment's own model."""
        raise ValueError(f"{self.name} has no physics model to replace.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"


def strongly_typed(x: Any) -> Array:
    """Return ``x`` as an array of a definite dtype (not weakly typed), because loops require one."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return jnp.asarray(x, jnp.result_type(x))


def default_key(seed: int) -> Array:
    """Return a raw key of the default generator, ``uint32[k]``, the form that all adapters pass to their environments."""
    return jax.random.key_data(jax.random.key(seed))


def probe(env: JaxEnv) -> str:
    """Return the kind of derivative of a step with respect to the action, as in :attr:`JaxEnv.differentiable`.

    It only traces the step, and compiles nothing. ``"zero"`` means that the derivatives of state,
    observation and reward are 0 for every action, for example because only ``action > 0`` is used.
    """
    key = default_key(0)
    state, _ = jax.eval_shape(env.init, key)
    sample = env.single_action_space.sample()
    action = jax.tree.map(jnp.asarray, sample)
    if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(action)):
        return "none"

    def outcome(action: PyTree, state: PyTree) -> list[jax.Array]:
        after, obs, reward, *_ = env.step(state, action, key)
        leaves = jax.tree.leaves((after, obs, reward))
        return [jnp.asarray(leaf) for leaf in leaves if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)]

    def total(action: PyTree, state: PyTree) -> jax.Array:
        return sum((jnp.sum(leaf) for leaf in outcome(action, state)), jnp.zeros(()))

    def tangents(tangent: PyTree, action: PyTree, state: PyTree) -> list[jax.Array]:
        return jax.jvp(lambda a: outcome(a, state), (action,), (tangent,))[1]  # type: ignore[no-any-return]

    try:
        traced = jax.make_jaxpr(tangents)(action, action, state)
    except (NotImplementedError, TypeError, ValueError):
        return "none"
    if not _depends_on_inputs(traced.jaxpr, len(jax.tree.leaves(action))):
        return "zero"
    try:
        jax.eval_shape(jax.grad(total), action, state)
    except (NotImplementedError, TypeError, ValueError):
        return "forward"
    return "reverse"


def _depends_on_inputs(jaxpr: Any, num_inputs: int) -> bool:
    """True if a result may depend on the first ``num_inputs`` arguments. Examines only the outermost equations."""
    live = set(jaxpr.invars[:num_inputs])
    for equation in jaxpr.eqns:
        if any(not hasattr(var, "val") and var in live for var in equation.invars):
            live.update(equation.outvars)
    return any(not hasattr(var, "val") and var in live for var in jaxpr.outvars)


class Wrapper(Adapter):
    """The base class of adapters around another ``JaxEnv`` that change one thing and forward the rest."""

    def __init__(self, env: JaxEnv) -> None:
        self.env = env
        self._untyped_env: Any = env  # untyped: the optional parts of an Adapter are not in the protocol
        self.name = getattr(env, "name", type(env).__name__)
        self.single_observation_space = env.single_observation_space
        self.single_action_space = env.single_action_space
        self.max_episode_steps = env.max_episode_steps
        self.frames_per_second = getattr(env, "frames_per_second", 0)

    @property
    def differentiable(self) -> str:
        return self.env.differentiable

    def gradient_advice(self) -> str:
        return str(getattr(self.env, "gradient_advice", super().gradient_advice)())

    def init(self, key: Array) -> Start:
        return self.env.init(key)

    def step(self, state: PyTree, action: PyTree, key: Array) -> Stepped:
        return self.env.step(state, action, key)

    def render(self, state: PyTree) -> Any:
        return self._untyped_env.render(state)

    @property
    def model(self) -> PyTree:
        return self._untyped_env.model if hasattr(self.env, "model") else super().model

    def using(self, model: PyTree) -> Any:
        return self._untyped_env.using(model)


class Limited(Wrapper):
    """An environment with a different time limit (-1: none)."""

    def __init__(self, env: JaxEnv, max_episode_steps: int) -> None:
        super().__init__(env)
        self.max_episode_steps = None if max_episode_steps == -1 else max_episode_steps


class FrameSkip(Wrapper):
    """An environment that repeats every action ``count`` times, up to the end of the episode, and sums the rewards.

    Its time limit has ``count`` times fewer steps, rounded up.
    """

    def __init__(self, env: JaxEnv, count: int) -> None:
        super().__init__(FixedSpec(env))
        if not isinstance(count, int | np.integer) or count < 1:
            raise ValueError(f"frame_skip must be an integer of at least 1, got {count!r}.")
        self.count = count
        self.frames_per_second //= count
        if self.max_episode_steps is not None:
            self.max_episode_steps = -(-self.max_episode_steps // count)

    def step(self, state: PyTree, action: PyTree, key: Array) -> Stepped:
        def repeat(before: Any, i: Array) -> tuple[Any, None]:
            state, _, reward, terminated, truncated, _ = before
            done = terminated | truncated
            state, masked_action = stop_gradient(done, (state, action))
            after = self.env.step(state, masked_action, jax.random.fold_in(key, i))
            after = (*after[:2], reward + after[2], *after[3:])
            return merge_rows(done, before, after), None

        first = self.env.step(state, action, jax.random.fold_in(key, 0))
        return jax.lax.scan(repeat, first, jnp.arange(1, self.count))[0]


class Rescaled(Wrapper):
    """An environment with actions in ``[low, high]``, which it maps linearly onto the bounds of the inner environment."""

    def __init__(self, env: JaxEnv, low: Any, high: Any) -> None:
        super().__init__(env)
        inner_space = env.single_action_space
        if not (isinstance(inner_space, gym.spaces.Box) and inner_space.is_bounded()):
            raise ValueError(f"Only a bounded Box of actions can be rescaled; {self.name} has {inner_space}.")
        shape = inner_space.shape
        low, high = (np.broadcast_to(np.asarray(x, inner_space.dtype), shape).copy() for x in (low, high))
        dtype: Any = inner_space.dtype
        self.single_action_space = gym.spaces.Box(low, high, dtype=dtype.type)
        self._scale = (inner_space.high - inner_space.low) / (high - low)
        self._shift = inner_space.low - low * self._scale

    def step(self, state: PyTree, action: PyTree, key: Array) -> Stepped:
        return self.env.step(state, action * self._scale + self._shift, key)


class FixedSpec(Wrapper):
    """An environment in which every state and observation has the structure, shapes and dtypes that ``init`` returns.

    Libraries return Python floats, weakly typed arrays, ``float32`` flags and the like, which JAX's scans and while loops
    reject. Dtypes are converted here; a different structure or shape raises ``ValueError``.
    """

    def __init__(self, env: JaxEnv) -> None:
        super().__init__(env)
        self._spec: Any = jax.eval_shape(env.init, default_key(0))

    def init(self, key: Array) -> Start:
        return self._convert_to_spec(self.env.init(key), "init")  # type: ignore[no-any-return]

    def step(self, state: PyTree, action: PyTree, key: Array) -> Stepped:
        result: Any = self.env.step(state, action, key)
        if not isinstance(result, tuple) or len(result) != 6:
            got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
            values = "(state, obs, reward, terminated, truncated, info)"
            raise ValueError(f"{self.name}: step returned {got}; expected {values}.")
        state, obs, reward, terminated, truncated, info = result
        state, obs = self._convert_to_spec((state, obs), "step")
        reward = jnp.asarray(reward, jnp.result_type(float))
        flags = [jnp.asarray(flag, bool) for flag in (terminated, truncated)]
        for name, value in (("reward", reward), ("terminated", flags[0]), ("truncated", flags[1])):
            if value.shape != ():
                raise ValueError(f"{self.name} returned a {name} of shape {value.shape}; expected a scalar.")
        return state, obs, reward, flags[0], flags[1], jax.tree.map(strongly_typed, info)

    def _convert_to_spec(self, value: Any, method: str) -> Any:
        expected: Any = jax.tree.structure(self._spec)
        got: Any = jax.tree.structure(value)
        if expected != got:
            raise ValueError(
                f"{self.name}: {method} returned a state or observation with a different structure from init.\n"
                f"  init: {expected}\n  {method}: {got}"
            )

        def cast(path: Any, spec: Any, leaf: Any) -> Any:
            leaf = strongly_typed(leaf)
            if leaf.shape != spec.shape:
                part = jax.tree_util.keystr(path)
                shapes = f"{leaf.shape}, init of shape {spec.shape}"
                raise ValueError(f"{self.name}: {method} returned {part} of shape {shapes}.")
            return leaf if leaf.dtype == spec.dtype else leaf.astype(spec.dtype)

        return jax.tree_util.tree_map_with_path(cast, self._spec, value)
