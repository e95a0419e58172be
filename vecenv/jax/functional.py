"""``FunctionalVectorEnv``: a batch of JAX-native environments as pure functions, ``reset`` and ``step``.

:class:`FunctionalEpisodes` is the batch logic, as pure functions of ``n`` rows; :class:`FunctionalVectorEnv` compiles them,
reshapes batches, spreads them over devices, and checks arguments (inside a compiled program only while it is traced). Main
decisions:

* Resetting every row at every step costs a reset per row and step; restoring a stored start makes all episodes begin alike.
  So a while loop resets up to ``chunk`` finished rows at a time, and does nothing on steps in which no episode ends.
* JAX cannot differentiate a while loop in reverse mode, but the derivative of this one is simple: zero for rows that
  restart, the identity for the others.
* A row's own key and episode count determine its start states and noise: neither the number of rows nor the order in which
  other rows finish matters.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from jax.dtypes import float0

from vecenv.errors import StaleStateError
from vecenv.front.arguments import parse_autoreset_mode, shape_error
from vecenv.jax.env import (
    Array,
    EnvState,
    FixedSpec,
    FrameSkip,
    JaxEnv,
    NativeState,
    PyTree,
    default_key,
    merge_rows,
    select,
    stop_gradient,
)
from vecenv.jax.interop import jax_space
from vecenv.jax.libraries import adapt

__all__ = ["DONATED_MESSAGE", "FunctionalEpisodes", "FunctionalVectorEnv", "Randomize", "action_spec", "check_action"]

DONATED_MESSAGE = (
    "The arrays of this state were deleted: it was donated to another computation (jit with donate_argnums). A state can be "
    "kept across such a call only as a copy: jax.tree.map(jnp.copy, state), or envs.state of a JaxVectorEnv."
)
_RESETS = ("fresh", "cached", "pool")


class FunctionalVectorEnv:
    """A batch of JAX-native environments as pure functions of an :class:`~vecenv.jax.EnvState`.

    ``reset`` and ``step`` are compiled, and may be used inside ``jit``, ``scan``, ``vmap``, ``grad`` and ``checkpoint``.
    States are ordinary immutable pytrees: keep one to return to it, step one twice with different actions to branch.

    The key, the index of a row and its own count of episodes determine its start states and noise, which do not depend on
    ``num_envs`` or on the other rows.

    Args:
        env: A ``JaxEnv``, or any input of :func:`~vecenv.jax.adapt`: an environment of Brax, Playground, gymnax or
            jumanji, a ``FuncEnv``, or a name.
        num_envs: The number of environments; a tuple for a batch of any shape, ``()`` for a single environment without a
            batch axis.
        autoreset_mode: ``NEXT_STEP``, ``SAME_STEP`` or ``DISABLED`` (``gymnasium.vector.AutoresetMode`` or its value).
        max_episode_steps: Time limit in calls of ``step``, after which ``truncated`` is set; ``None`` uses the
            environment's own, divided by ``frame_skip``; -1 means none. As in ``gymnasium.wrappers.TimeLimit``,
            ``terminated`` may be set as well.
        reset: The source of start states. ``"fresh"``: a new one is computed for every episode.
            ``"cached"``: each row returns to its first one, as in Brax's training wrapper. ``"pool"``: each row draws from
            its own ``pool_size`` states, computed at ``reset``; needs memory for that many states per row.
        stagger: Begin the first episode of each row with a random share of the time limit already used up, so that the rows
            do not all time out together.
        frame_skip: The number of times that every action is repeated, up to the end of the episode; rewards are summed.
        randomize: ``randomize(model, keys) -> (models, in_axes)`` makes a different physics model for every row, as in
            Brax's and Playground's training code (``mujoco_playground.registry.get_domain_randomizer(name)`` works).
            ``keys`` is ``uint32[n, k]``; a row keeps its model until it gets another key.
        discount: Discount factor of ``EnvState.discounted_return``.
        pool_size: Number of start states per row with ``reset="pool"``.
        micro_batch: Number of rows that are stepped at a time, one group after the other. Faster on a CPU if the whole batch
            does not fit into its caches.
        devices: JAX devices over which the rows are spread equally; ``None`` uses only the default device.

    Attributes:
        num_envs: Total number of environments. ``batch_shape``: their arrangement.
        single_observation_space, single_action_space: The spaces of one environment, with ``sample(key)``.
        observation_space, action_space: The spaces of the batch, with one batch axis; see :func:`~vecenv.jax.jax_space`.
        single_env: The adapted environment, after ``frame_skip``.

    Raises:
        ValueError: An option is out of range, or two options contradict each other.
        TypeError: ``num_envs`` is not an integer or a tuple of integers.
        Exception: The errors of :func:`~vecenv.jax.adapt`.
    """

    def __init__(
        self, env: Any, num_envs: int | tuple[int, ...] = 1, autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        max_episode_steps: int | None = None, reset: str = "fresh", stagger: bool = False, frame_skip: int = 1,
        randomize: Randomize | None = None, *, discount: float = 1.0, pool_size: int = 8, micro_batch: int | None = None,
        devices: Sequence[Any] | None = None,
    ) -> None:  # fmt: skip
        self.batch_shape = _parse_shape(num_envs)
        self.num_envs = math.prod(self.batch_shape)
        self.autoreset_mode = parse_autoreset_mode(autoreset_mode)
        self.discount = float(discount)
        self.reset_source = reset
        adapted: JaxEnv = adapt(env) if frame_skip == 1 else FrameSkip(adapt(env), frame_skip)
        self.single_env = adapted
        self.max_episode_steps = _parse_limit(adapted.max_episode_steps if max_episode_steps is None else max_episode_steps)
        self._check_options(reset, stagger, pool_size, micro_batch)
        self.single_observation_space = jax_space(adapted.single_observation_space)
        self.single_action_space = jax_space(adapted.single_action_space)
        self.observation_space = jax_space(batch_space(adapted.single_observation_space, self.num_envs))
        self.action_space = jax_space(batch_space(adapted.single_action_space, self.num_envs))
        self._episodes = FunctionalEpisodes(
            FixedSpec(adapted), self.autoreset_mode, self.max_episode_steps,
            {"fresh": 0, "cached": 1, "pool": pool_size}[reset], stagger, randomize, self.discount, micro_batch,
        )  # fmt: skip
        self._action_spec = action_spec(self.single_action_space)
        shard = self._shard_over(devices)
        self._begin = jax.jit(self._with_batch_shape(shard(self._episodes.begin)))
        self._step = jax.jit(self._with_batch_shape(shard(self._episodes.step)))
        self._restart = jax.jit(self._with_batch_shape(shard(self._episodes.restart)))
        self._step_donating = jax.jit(
            lambda inner, rest, action: self._step(rest.replace(inner=inner), action), donate_argnums=0
        )

    def _check_options(self, reset: str, stagger: bool, pool_size: int, micro_batch: int | None) -> None:
        for wrong, text in (
            (min(self.batch_shape, default=1) < 1, f"num_envs must be positive, got {self.batch_shape}."),
            (reset not in _RESETS, f"reset must be one of {_RESETS}, got {reset!r}."),
            (pool_size < 1, f"pool_size must be at least 1, got {pool_size}."),
            (micro_batch is not None and micro_batch < 1, f"micro_batch must be at least 1, got {micro_batch}."),
            (stagger and self.max_episode_steps is None, "stagger=True needs a time limit: pass max_episode_steps."),
        ):
            if wrong:
                raise ValueError(text)

    # -- the interface ---------------------------------------------------------------------------------------------

    def reset(self, key: Array) -> EnvState:
        """Begin an episode in every row.

        Args:
            key: One key (``jax.random.key(0)`` or a raw one), from which row i gets ``fold_in(key, i)``; or one key per row.

        Returns:
            The state before the first step: ``reward`` 0, ``valid`` False, ``first`` True.

        Raises:
            ValueError: There is neither one key nor one per row.
        """
        return self.begin(self.row_keys(key))

    def begin(self, key: Any, episode: Any = None) -> EnvState:
        """Begin episode number ``episode`` (``int32[*B]``, default 0) in each row; ``key``: raw keys, ``uint32[*B, k]``."""
        if episode is None:
            episode = jnp.zeros(self.batch_shape, jnp.int32)
        return self._begin(key, episode)  # type: ignore[no-any-return]

    def step(self, state: EnvState, action: PyTree) -> EnvState:
        """Step every row once.

        Args:
            state: From ``reset``, ``step`` or ``reset_mask`` of this environment; it stays usable.
            action: Leaves ``[*B, ...]`` as in the action space. Other dtypes are cast as by NumPy's ``"same_kind"``, except
                that in 64-bit mode a float64 JAX array stays float64 for a float32 space.

        Raises:
            ValueError: Wrong shape or structure.
            TypeError: Wrong dtype: floats for a Discrete space, for example; or ``state`` does not come from a JAX-native
                environment.
            StaleStateError: The arrays of ``state`` have been donated to another computation.
        """
        self.check_state(state)
        return self._call(self._step, state, self.check_action(action))

    def step_donating(self, state: EnvState, action: PyTree) -> EnvState:
        """Step every row and reuse the memory of ``state.inner`` for the result.

        Stepping ``state`` again raises ``StaleStateError``. Its other fields stay readable.
        """
        self.check_state(state)
        return self._call(self._step_donating, state.inner, state.replace(inner=None), self.check_action(action))

    @staticmethod
    def _call(function: Callable[..., EnvState], *args: Any) -> EnvState:
        try:
            return function(*args)
        except (RuntimeError, ValueError) as error:
            if "deleted" in str(error) or "donated" in str(error):
                raise StaleStateError(DONATED_MESSAGE) from error
            raise

    def reset_mask(self, state: EnvState, mask: Array, key: Array | None = None) -> EnvState:
        """Begin another episode in some rows, in any autoreset mode, and leave the others unchanged.

        Args:
            state: As for ``step``.
            mask: ``bool[*B]``, the rows to reset.
            key: ``None`` continues with the next episode of each row's own sequence; a key, as for ``reset``, begins a new
                sequence.

        Raises:
            ValueError: ``mask`` is not ``bool[*B]``, or ``state`` or ``key`` has a wrong shape.
            TypeError: ``state`` does not come from a JAX-native environment.
            StaleStateError: The arrays of ``state`` have been donated to another computation.
        """
        self.check_state(state)
        if jnp.shape(mask) != self.batch_shape or not jnp.issubdtype(jnp.result_type(mask), jnp.bool_):
            raise ValueError(
                f"mask must be bool{list(self.batch_shape)}, got {jnp.result_type(mask)}{list(jnp.shape(mask))}."
            )
        return self._call(self._restart, state, jnp.asarray(mask), None if key is None else self.row_keys(key))

    def row_keys(self, key: Array) -> Array:
        """Return one raw key per row, ``uint32[*B, k]``, of the default generator; see :meth:`reset`."""
        key = jnp.asarray(key)
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.key_data(key)
        width = default_key(0).shape
        if key.shape == width:
            rows = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(self.num_envs))
            return rows.reshape(self.batch_shape + width)
        if key.shape != self.batch_shape + width:
            raise ValueError(
                f"key must be one key or one per row, in shape {self.batch_shape}; got raw keys of shape {key.shape}."
            )
        return key

    def __repr__(self) -> str:
        name = getattr(self.single_env, "name", type(self.single_env).__name__)
        return (
            f"{type(self).__name__}({name}, num_envs={self.num_envs}, autoreset_mode={self.autoreset_mode.name}, "
            f"reset={self.reset_source!r}, max_episode_steps={self.max_episode_steps})"
        )

    # -- checks ----------------------------------------------------------------------------------------------------

    def check_action(self, action: PyTree) -> PyTree:
        """Convert ``action`` to the dtypes of the space, or raise like :meth:`step`."""
        return check_action(action, self._action_spec, self.batch_shape, self.single_action_space)

    def check_state(self, state: Any) -> None:
        """Raise like :meth:`step` if ``state`` does not belong to these environments."""
        if not isinstance(state, EnvState) or state.inner is None:
            kind = "a state of a bridged environment" if isinstance(state, EnvState) else type(state).__name__
            raise TypeError(f"step and reset_mask take the EnvState that reset returned, not {kind}.")
        if state.terminated.shape != self.batch_shape:
            raise ValueError(f"The state has batch shape {state.terminated.shape}, expected {self.batch_shape}.")

    # -- batch shapes and devices ----------------------------------------------------------------------------------

    def _with_batch_shape(self, flat: Callable[..., Any]) -> Callable[..., Any]:
        """Adapt ``flat``, a function over one batch axis, to ``batch_shape``."""
        depth = len(self.batch_shape)
        if depth == 1:
            return flat

        def shaped(*args: Any) -> Any:
            rows = jax.tree.map(lambda x: jnp.reshape(x, (self.num_envs, *jnp.shape(x)[depth:])), args)
            return jax.tree.map(lambda x: jnp.reshape(x, (*self.batch_shape, *x.shape[1:])), flat(*rows))

        return shaped

    def _shard_over(self, devices: Sequence[Any] | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that spreads a function of rows over devices, without communication between them."""
        if devices is None:
            return lambda flat: flat
        if not len(devices) or self.num_envs % len(devices):
            raise ValueError(f"{self.num_envs} environments cannot be divided equally among {len(devices)} devices.")
        mesh = jax.sharding.Mesh(np.asarray(devices), ("envs",))
        spec: Any = jax.sharding.PartitionSpec
        rows = spec("envs")
        return lambda flat: jax.shard_map(flat, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)


def _parse_shape(num_envs: Any) -> tuple[int, ...]:
    """Return the shape of a batch of environments."""
    shape = tuple(num_envs) if isinstance(num_envs, tuple | list) else (num_envs,)
    if not all(isinstance(size, int | np.integer) for size in shape):
        raise TypeError(f"num_envs must be an integer or a tuple of integers, got {num_envs!r}.")
    return tuple(map(int, shape))


def _parse_limit(steps: int | None) -> int | None:
    if steps is None or steps == -1:
        return None
    if steps < 1:
        raise ValueError(f"max_episode_steps must be positive, or -1 for none; got {steps}.")
    return int(steps)


def action_spec(space: gym.Space[Any]) -> PyTree:
    """Return the shapes and dtypes of one action in JAX."""
    with jax.ensure_compile_time_eval():  # a `jax_space` refuses sample() while a program is traced
        sample = space.sample()
    struct: Any = jax.ShapeDtypeStruct
    return jax.tree.map(lambda leaf: struct(np.shape(leaf), jnp.result_type(np.asarray(leaf))), sample)


def check_action(action: PyTree, spec: PyTree, batch_shape: tuple[int, ...], space: gym.Space[Any]) -> PyTree:
    """Convert ``action`` to the dtypes of ``spec``, which describes one action of ``space``.

    Raises:
        ValueError: Wrong shape or structure.
        TypeError: Wrong dtype: floats for a Discrete space, for example.
    """

    def check(path: Any, spec: Any, leaf: Any) -> Any:
        where = f"actions{jax.tree_util.keystr(path)}"
        if not isinstance(leaf, np.ndarray | jax.Array):
            leaf = np.asarray(leaf)
        expected = batch_shape + spec.shape
        if leaf.shape != expected:
            raise shape_error(where, leaf.shape, expected)
        keeps_float64 = isinstance(leaf, jax.Array) and leaf.dtype == jnp.float64 and spec.dtype == jnp.float32
        if leaf.dtype == spec.dtype or keeps_float64:  # in 64-bit mode, a JAX action keeps its precision
            return leaf
        if not np.can_cast(leaf.dtype, spec.dtype, "same_kind"):
            raise TypeError(f"{where} has dtype {leaf.dtype}, which cannot be cast to {spec.dtype} as 'same_kind'.")
        return leaf.astype(spec.dtype)

    if isinstance(spec, jax.ShapeDtypeStruct):
        return check((), spec, action)
    try:
        return jax.tree_util.tree_map_with_path(check, spec, _to_dicts(action))
    except (ValueError, TypeError) as error:
        if str(error).startswith("action"):
            raise
        raise ValueError(f"The action must be structured like {space}: {error}") from error


def _to_dicts(action: Any) -> Any:
    """Convert other mappings, such as an ``OrderedDict``, to dicts: to JAX, these are different structures."""
    if isinstance(action, Mapping):
        return {key: _to_dicts(part) for key, part in action.items()}
    return tuple(map(_to_dicts, action)) if type(action) is tuple else action


# randomize(model, keys) -> (models, in_axes), as in Brax's and Playground's training code: ``keys`` is uint32[n, k], and
# the leaves of ``models`` with 0 in ``in_axes`` have a leading axis of n.
Randomize = Callable[[Any, Array], tuple[Any, Any]]

_START = 0  # folded into an episode's key for its start state; step t folds in t >= 1
_POOL, _MODEL, _STAGGER = 2**31 - 1, 2**31 - 2, 2**31 - 3  # folded into a row's key; higher than any episode count


@dataclasses.dataclass(eq=False)
class FunctionalEpisodes:
    """The batch logic over one adapted environment; see :class:`vecenv.jax.FunctionalVectorEnv` for the options."""

    env: FixedSpec
    mode: AutoresetMode
    limit: int | None
    pool_size: int
    stagger: bool
    randomize: Randomize | None
    discount: float
    micro_batch: int | None

    def __post_init__(self) -> None:
        self._varying_indices: list[int] = []  # indices of the model's leaves that differ from row to row
        self._restart_rows = jax.custom_jvp(self._restart_loop)
        self._restart_rows.defjvp(self._restart_derivative)
        if self.randomize is not None:
            jax.eval_shape(self._draw_models, default_key(0)[None])  # sets `_varying_indices`

    # -- the interface to FunctionalVectorEnv ----------------------------------------------------------------------

    def begin(self, key: Array, episode: Array) -> EnvState:
        """Begin an episode in all rows. ``key`` is ``uint32[n, k]``, ``episode`` is ``int32[n]``."""
        n = key.shape[0]
        model = self._draw_models(key)
        pool = self._build_pools(key, model)
        env, obs = jax.vmap(self._start)((key, episode, model, pool))
        elapsed = jnp.zeros(n, jnp.int32)
        if self.stagger:
            limit = self.limit or 1  # FunctionalVectorEnv requires a limit for stagger
            draw: Any = jax.vmap(lambda k: jax.random.randint(jax.random.fold_in(k, _STAGGER), (), 0, limit))
            elapsed = draw(key).astype(jnp.int32)
        inner = NativeState(env, key, episode, elapsed, pool, model)
        info = jax.tree.map(lambda leaf: jnp.zeros((n, *leaf.shape), leaf.dtype), self._info_spec)
        return EnvState.at_start(obs, (n,), info, inner=inner)

    def step(self, state: EnvState, action: PyTree) -> EnvState:
        """Step every row with an unfinished episode once. For finished rows see :meth:`EnvState.advanced`."""
        ended, mode = state.done, self.mode
        # Finished rows are stepped as well, and their results are discarded: in next-step mode, restarting a few rows in
        # place is cheaper than selecting between two whole states.
        idle = None if mode is AutoresetMode.SAME_STEP else ended
        steps = jnp.where(ended, 0, state.steps) if mode is AutoresetMode.NEXT_STEP else state.steps
        stepped = self._advance(stop_gradient(idle, state.inner), steps, stop_gradient(idle, action))
        env, obs, reward, terminated, truncated, info = stepped
        inner = state.inner.replace(env=env, elapsed=state.inner.elapsed + 1)
        if self.limit is not None:
            truncated = truncated | (inner.elapsed >= self.limit)
        next_obs = obs
        if mode is AutoresetMode.DISABLED:
            kept = {"env": state.inner.env, "elapsed": state.inner.elapsed}
            inner = inner.replace(**merge_rows(ended, kept, {"env": env, "elapsed": inner.elapsed}))
        elif mode is AutoresetMode.SAME_STEP:
            inner, obs = self._next_episode(terminated | truncated, inner, obs)
        else:
            inner, obs = self._next_episode(ended, inner, obs)
            next_obs, info = obs, merge_rows(ended, jax.tree.map(jnp.zeros_like, info), info)
        after = state.replace(inner=None).advanced(
            mode, self.discount, obs=obs, next_obs=next_obs, reward=reward, terminated=terminated, truncated=truncated,
            info=info,
        )  # fmt: skip
        return after.replace(inner=inner)

    def restart(self, state: EnvState, mask: Array, key: Array | None) -> EnvState:
        """Begin the next episode of the rows under ``mask``, or their first one with ``key`` (``uint32[n, k]``) if given."""
        inner = state.inner
        if key is None:
            inner, obs = self._next_episode(mask, inner, state.obs)
        else:
            keys = jnp.where(mask[:, None], key, inner.key)
            fresh = self.begin(keys, jnp.where(mask, 0, inner.episode))
            inner, obs = merge_rows(mask, (fresh.inner, fresh.obs), (inner, state.obs))
        return state.replace(inner=None).restarted(mask, obs).replace(inner=inner)

    def _advance(self, inner: NativeState, steps: Array, action: PyTree) -> Any:
        """Step every row once, without limits or resets; return ``(env, obs, reward, terminated, truncated, info)``."""

        def step_row(row: Any) -> Any:
            env, key, episode, step, model, action = row
            step_key = jax.random.fold_in(jax.random.fold_in(key, episode), step + 1)
            *stepped, info = self._with_model(model, lambda: self.env.step(env, action, step_key))
            return (*stepped, jax.tree.map(lambda spec, leaf: leaf.astype(spec.dtype), self._info_spec, info))

        rows = (inner.env, inner.key, inner.episode, steps, inner.model, action)
        if self.micro_batch is None:
            return jax.vmap(step_row)(rows)
        return jax.lax.map(step_row, rows, batch_size=self.micro_batch)

    # -- the start of episodes -------------------------------------------------------------------------------------

    def _start(self, row: Any) -> tuple[PyTree, PyTree]:
        """Return the start state and observation of one row's episode: newly computed, or from its pool."""
        key, episode, model, pool = row
        key = jax.random.fold_in(jax.random.fold_in(key, episode), _START)
        if pool is None:
            return self._with_model(model, lambda: self.env.init(key))  # type: ignore[no-any-return]
        drawn = jax.random.randint(key, (), 0, self.pool_size) if self.pool_size > 1 else 0
        return jax.tree.map(lambda leaf: leaf[drawn], pool)  # type: ignore[no-any-return]

    def _next_episode(self, mask: Array, inner: NativeState, obs: PyTree) -> tuple[NativeState, PyTree]:
        episode = inner.episode + mask.astype(jnp.int32)
        source = (inner.key, episode, inner.model, inner.pool)
        env, obs = self._restart_rows(mask, source, (inner.env, obs))
        return inner.replace(env=env, episode=episode, elapsed=jnp.where(mask, 0, inner.elapsed)), obs

    def _restart_loop(self, mask: Array, source: PyTree, current: PyTree) -> PyTree:
        """Restart the rows of ``current`` under ``mask``, in chunks. ``source`` has the arguments of :meth:`_start`."""
        n = mask.shape[0]
        chunk = min(n, max(8, -(-n // 16)))

        def any_remain(carry: Any) -> Array:
            return jnp.any(carry[0])

        def restart_chunk(carry: Any) -> Any:
            remaining, current = carry
            rows = jnp.nonzero(remaining, size=chunk, fill_value=n)[0]
            row_sources = jax.tree.map(lambda x: x.at[rows].get(mode="clip"), source)
            unchanged = jax.tree.map(lambda x: x.at[rows].get(mode="clip"), current)
            fresh = _call_unfused(jax.vmap(self._start), rows[0] < n, row_sources, unchanged)
            current = jax.tree.map(lambda x, new: x.at[rows].set(new, mode="drop"), current, fresh)
            return remaining.at[rows].set(False, mode="drop"), current

        return jax.lax.while_loop(any_remain, restart_chunk, (mask, current))[1]

    def _restart_derivative(self, primals: Any, tangents: Any) -> Any:
        """Return the restarted rows and their tangents, which are 0 in rows that restart and unchanged in the others."""

        def propagate(tangent: Any) -> Any:
            if tangent.dtype == float0:
                return tangent
            return select(primals[0], jnp.zeros_like(tangent), tangent)

        return self._restart_rows(*primals), jax.tree.map(propagate, tangents[2])

    def _build_pools(self, key: Array, model: PyTree) -> PyTree:
        if not self.pool_size:
            return None

        def build_pool(key: Array, model: PyTree) -> Any:
            keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(key, _POOL), i))(jnp.arange(self.pool_size))
            return self._with_model(model, lambda: jax.vmap(self.env.init)(keys))

        return jax.vmap(build_pool)(key, model)

    # -- domain randomisation --------------------------------------------------------------------------------------

    def _draw_models(self, key: Array) -> list[Array] | None:
        """Draw the leaves of the physics model that differ from row to row, each ``[n, ...]``; store their indices."""
        if self.randomize is None:
            return None
        keys = jax.vmap(lambda k: jax.random.fold_in(k, _MODEL))(key)
        models, in_axes = self.randomize(self.env.model, keys)
        expand_axis: Any = lambda axis, part: jax.tree.map(lambda _: -1 if axis is None else axis, part)  # noqa: E731
        leaf_axes = jax.tree.map(expand_axis, in_axes, models, is_leaf=lambda axis: axis is None)
        axes = jax.tree.leaves(leaf_axes)
        if set(axes) - {-1, 0}:
            raise ValueError(f"randomize must batch leaves along axis 0, or not at all (None), got {sorted(set(axes))}.")
        self._varying_indices = [i for i, axis in enumerate(axes) if axis == 0]
        leaves = jax.tree.leaves(models)
        return [jnp.asarray(leaves[i]) for i in self._varying_indices]

    def _with_model(self, varying_leaves: list[Array] | None, body: Callable[[], Any]) -> Any:
        """Run ``body`` while the environment has the physics model of one row."""
        if varying_leaves is None:
            return body()
        leaves, structure = jax.tree.flatten(self.env.model)
        for i, leaf in zip(self._varying_indices, varying_leaves, strict=True):
            leaves[i] = leaf
        with self.env.using(jax.tree.unflatten(structure, leaves)):
            return body()

    @functools.cached_property
    def _info_spec(self) -> Any:
        """The shapes and dtypes of one environment's info, from a traced step."""
        key = default_key(0)
        state, _ = jax.eval_shape(self.env.init, key)
        action = action_spec(self.env.single_action_space)
        return jax.eval_shape(lambda state, action: self.env.step(state, action, key)[5], state, action)


def _call_unfused(function: Callable[[Any], Any], always_true: Array, argument: Any, unused: Any) -> Any:
    """Return ``function(argument)`` from a conditional that always chooses this branch."""
    # XLA does not fuse across a branch. Fused with the code around it, a start state would be rounded differently in the
    # restart loop and in a reset, and the same key would not reproduce the episode bit by bit.
    return jax.lax.cond(always_true, lambda: function(argument), lambda: unused)
