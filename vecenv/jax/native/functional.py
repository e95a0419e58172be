"""``FunctionalVectorEnv``: a batch of JAX-native environments as pure functions, ``reset`` and ``step``.

The batch logic is in :mod:`vecenv.jax.native.episodes`. Here it is compiled whole, given any batch shape, laid over several
devices, and guarded: everything that can be checked while tracing is checked there, so that compiled steps cost nothing
for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from vecenv.errors import StaleStateError
from vecenv.front.arguments import mode_of
from vecenv.jax.native.actions import action_spec, check_action
from vecenv.jax.native.adapters import adapt
from vecenv.jax.native.env import JaxEnv, default_key
from vecenv.jax.native.episodes import Episodes, Randomize
from vecenv.jax.native.spaces import jax_space
from vecenv.jax.native.state import Array, EnvState, PyTree
from vecenv.jax.native.wrap import Fixed, FrameSkip

__all__ = ["FunctionalVectorEnv"]

_RESETS = ("fresh", "cached", "pool")


class FunctionalVectorEnv:
    """A batch of JAX-native environments as pure functions of an :class:`~vecenv.jax.EnvState`.

    ``reset`` and ``step`` are compiled, and may be used inside ``jit``, ``scan``, ``vmap``, ``grad`` and ``checkpoint``.
    States are ordinary immutable pytrees: keep one to return to it, step one twice with different actions to branch.

    Row i's stream of start states and noise is decided by the key, by i and by its own count of episodes. It does not
    depend on ``num_envs`` or on the other rows.

    Args:
        env: A ``JaxEnv``, or anything :func:`~vecenv.jax.adapt` takes: an environment of Brax, Playground, gymnax, jumanji,
            a ``FuncEnv``, or a name.
        num_envs: How many; a tuple for a batch of any shape, ``()`` for a single environment without a batch axis.
        autoreset_mode: ``NEXT_STEP``, ``SAME_STEP`` or ``DISABLED`` (``gymnasium.vector.AutoresetMode`` or its value).
        max_episode_steps: Time limit in steps of this class, after which ``truncated`` is set; ``None`` takes the
            environment's own, -1 means none. As in ``gymnasium.wrappers.TimeLimit``, ``terminated`` may be set as well.
        reset: Where the start states of later episodes come from. ``"fresh"``: computed, every one different. ``"cached"``:
            each row returns to its first one, as Brax's training wrapper does. ``"pool"``: each row draws from
            ``pool_size`` of its own, computed at ``reset``; needs memory for that many states a row.
        stagger: Rows begin their first episode with a random share of the time limit already used up, so that they do not
            all time out together.
        frame_skip: How often every action is repeated, up to the end of the episode; rewards are summed.
        randomize: ``randomize(model, keys) -> (models, in_axes)`` makes a different physics model for every row, as in
            Brax's and Playground's training code (``mujoco_playground.registry.get_domain_randomizer(name)`` fits). Called
            at ``reset`` with ``keys`` ``uint32[n, k]``; a row keeps its model until it is given another key.
        discount: For ``EnvState.discounted_return``.
        pool_size: For ``reset="pool"``.
        micro_batch: Rows that are stepped at a time, one group after the other. Faster on a CPU once a whole batch no longer
            fits its caches.
        devices: JAX devices to spread the rows over, an equal share each; default, the default device alone.
        reset_chunk: How many rows are restarted at once; default a sixteenth of them, and at least 8.

    Attributes:
        num_envs: Total number of environments. ``batch_shape``: how they are arranged.
        single_observation_space, single_action_space: Of one environment, with ``sample(key)``.
        observation_space, action_space: Of the batch, for one batch axis; see :func:`~vecenv.jax.jax_space`.
        single_env: The adapted environment, after ``frame_skip``.

    Raises:
        ValueError: An option out of range, or two that contradict each other.
    """

    def __init__(
        self,
        env: Any,
        num_envs: int | tuple[int, ...] = 1,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        max_episode_steps: int | None = None,
        reset: str = "fresh",
        stagger: bool = False,
        frame_skip: int = 1,
        randomize: Randomize | None = None,
        *,
        discount: float = 1.0,
        pool_size: int = 8,
        micro_batch: int | None = None,
        devices: Sequence[Any] | None = None,
        reset_chunk: int | None = None,
    ) -> None:
        self.batch_shape = (int(num_envs),) if isinstance(num_envs, int | np.integer) else tuple(num_envs)
        self.num_envs = math.prod(self.batch_shape)
        self.autoreset_mode = mode_of(autoreset_mode)
        self.discount = float(discount)
        self.reset_source = reset
        adapted: JaxEnv = adapt(env)
        if frame_skip != 1:
            adapted = FrameSkip(adapted, frame_skip)
        self.single_env = adapted
        self.max_episode_steps = _limit(adapted.max_episode_steps if max_episode_steps is None else max_episode_steps)
        self._check_options(reset, stagger, pool_size, micro_batch)
        self.single_observation_space = jax_space(adapted.single_observation_space)
        self.single_action_space = jax_space(adapted.single_action_space)
        self.observation_space = jax_space(batch_space(adapted.single_observation_space, self.num_envs))
        self.action_space = jax_space(batch_space(adapted.single_action_space, self.num_envs))
        self._episodes = Episodes(
            Fixed(adapted),
            self.autoreset_mode,
            self.max_episode_steps,
            pool_size={"fresh": 0, "cached": 1, "pool": pool_size}[reset],
            stagger=stagger,
            randomize=randomize,
            discount=self.discount,
            micro_batch=micro_batch,
            reset_chunk=reset_chunk,
        )
        self._action_spec = action_spec(self.single_action_space)
        spread = self._spread_over(devices)
        self._begin = jax.jit(self._shaped(spread(self._episodes.begin)))
        self._step = jax.jit(self._shaped(spread(self._episodes.step)))
        self._restart = jax.jit(self._shaped(spread(self._episodes.restart)))
        self._step_donating = jax.jit(
            lambda inner, rest, action: self._step(rest.replace(inner=inner), action), donate_argnums=0
        )

    def _check_options(self, reset: str, stagger: bool, pool_size: int, micro_batch: int | None) -> None:
        if self.num_envs < 1:
            raise ValueError(f"num_envs must be positive, got {self.batch_shape}.")
        if reset not in _RESETS:
            raise ValueError(f"reset must be one of {_RESETS}, got {reset!r}.")
        if pool_size < 1:
            raise ValueError(f"pool_size must be at least 1, got {pool_size}.")
        if micro_batch is not None and micro_batch < 1:
            raise ValueError(f"micro_batch must be at least 1, got {micro_batch}.")
        if stagger and self.max_episode_steps is None:
            raise ValueError("stagger=True needs a time limit: give max_episode_steps.")

    # -- the interface ---------------------------------------------------------------------------------------------

    def reset(self, key: Array) -> EnvState:
        """Begin an episode in every row.

        Args:
            key: One key (``jax.random.key(0)`` or a raw one), from which row i gets ``fold_in(key, i)``; or one key a row.

        Returns:
            The state before the first step: ``reward`` 0, ``valid`` False, ``first`` True.
        """
        return self.begin(self.row_keys(key))

    def begin(self, key: Any, episode: Any = None) -> EnvState:
        """Begin episode number ``episode`` (``int32[*B]``, default 0) of each row's own raw key ``uint32[*B, k]``."""
        if episode is None:
            episode = jnp.zeros(self.batch_shape, jnp.int32)
        state: EnvState = self._begin(key, episode)
        return state

    def step(self, state: EnvState, action: PyTree) -> EnvState:
        """One step of every row.

        Args:
            state: From ``reset``, ``step`` or ``reset_mask`` of this environment; it stays usable.
            action: Leaves ``[*B, ...]`` as in the action space, of its dtype or one that casts to it within the kind. JAX's
                own float64, in 64-bit mode, is kept where the space says float32.

        Raises:
            ValueError: Wrong shape or structure.
            TypeError: Wrong dtype: floats for a Discrete space, say; or ``state`` is no state of a native environment.
            StaleStateError: The arrays of ``state`` have been donated to another computation.
        """
        self._check_state(state)
        action = self.check_action(action)
        try:
            after: EnvState = self._step(state, action)
        except (RuntimeError, ValueError) as error:
            raise self._explained(error) from error
        return after

    def step_donating(self, state: EnvState, action: PyTree) -> EnvState:
        """As :meth:`step`, but ``state.inner`` is given up: its memory is used for the result, and stepping ``state`` again
        raises ``StaleStateError``. Everything else in ``state`` stays readable."""
        self._check_state(state)
        action = self.check_action(action)
        try:
            after: EnvState = self._step_donating(state.inner, state.replace(inner=None), action)
        except (RuntimeError, ValueError) as error:
            raise self._explained(error) from error
        return after

    def reset_mask(self, state: EnvState, mask: Array, key: Array | None = None) -> EnvState:
        """Begin another episode in some rows, in any autoreset mode; the others stay exactly as they are.

        Args:
            state: As for ``step``.
            mask: ``bool[*B]``, the rows to reset.
            key: ``None`` goes on to the next episode of each row's own stream; a key, as for ``reset``, begins a new one.

        Raises:
            ValueError: ``mask`` is not ``bool[*B]``.
        """
        self._check_state(state)
        if jnp.shape(mask) != self.batch_shape or not jnp.issubdtype(jnp.result_type(mask), jnp.bool_):
            raise ValueError(
                f"mask must be bool{list(self.batch_shape)}, got {jnp.result_type(mask)}{list(jnp.shape(mask))}."
            )
        after: EnvState = self._restart(state, jnp.asarray(mask), None if key is None else self.row_keys(key))
        return after

    def row_keys(self, key: Array) -> Array:
        """One raw key a row, ``uint32[*B, k]``, of the default generator; see :meth:`reset`."""
        key = jnp.asarray(key)
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            if str(key.dtype) != str(jax.random.key(0).dtype):  # another generator's: draw a key of the default one
                draw = jax.random.bits if key.ndim == 0 else jax.vmap(jax.random.bits)
                key = jax.vmap(jax.random.key)(jnp.atleast_1d(draw(key))).reshape(key.shape)
            key = jax.random.key_data(key)
        width = default_key(0).shape
        if key.shape == width:
            rows = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(self.num_envs))
            return rows.reshape(self.batch_shape + width)
        if key.shape != self.batch_shape + width:
            raise ValueError(f"key must be one key or {self.batch_shape} of them; got an array of shape {key.shape}.")
        return key

    def __repr__(self) -> str:
        name = getattr(self.single_env, "name", type(self.single_env).__name__)
        return (
            f"{type(self).__name__}({name}, num_envs={self.num_envs}, autoreset_mode={self.autoreset_mode.name}, "
            f"reset={self.reset_source!r}, max_episode_steps={self.max_episode_steps})"
        )

    # -- guards ----------------------------------------------------------------------------------------------------

    def check_action(self, action: PyTree) -> PyTree:
        """``action`` in the dtypes of the space; raises as :meth:`step` does."""
        return check_action(action, self._action_spec, self.batch_shape, self.single_action_space)

    def _check_state(self, state: Any) -> None:
        if not isinstance(state, EnvState) or state.inner is None:
            kind = "a state of a bridged environment" if isinstance(state, EnvState) else type(state).__name__
            raise TypeError(f"step and reset_mask take the EnvState that reset returned, not {kind}.")
        if state.terminated.shape != self.batch_shape:
            raise ValueError(f"The state is of {state.terminated.shape} environments, this vector is of {self.batch_shape}.")

    @staticmethod
    def _explained(error: Exception) -> Exception:
        if "deleted" not in str(error) and "donated" not in str(error):
            return error
        return StaleStateError(
            "The arrays of this state are gone: it was donated to another computation (jit with donate_argnums). A state "
            "can be kept across such a call only as a copy: jax.tree.map(jnp.copy, state)."
        )

    # -- batch shapes and devices ----------------------------------------------------------------------------------

    def _shaped(self, flat: Callable[..., Any]) -> Callable[..., Any]:
        """``flat`` works on one batch axis; the result works on ``batch_shape``."""
        depth = len(self.batch_shape)
        if depth == 1:
            return flat

        def shaped(*args: Any) -> Any:
            rows = jax.tree.map(lambda x: jnp.reshape(x, (self.num_envs, *jnp.shape(x)[depth:])), args)
            return jax.tree.map(lambda x: jnp.reshape(x, (*self.batch_shape, *x.shape[1:])), flat(*rows))

        return shaped

    def _spread_over(self, devices: Sequence[Any] | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """How to lay a function of rows over devices: each steps and restarts its own share, nothing is exchanged."""
        if devices is None:
            return lambda flat: flat
        if self.num_envs % len(devices):
            raise ValueError(f"{self.num_envs} environments cannot be shared equally by {len(devices)} devices.")
        mesh = jax.sharding.Mesh(np.asarray(devices), ("envs",))
        spec: Any = jax.sharding.PartitionSpec
        rows = spec("envs")
        return lambda flat: jax.shard_map(flat, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)


def _limit(steps: int | None) -> int | None:
    if steps is None or steps == -1:
        return None
    if steps < 1:
        raise ValueError(f"max_episode_steps must be positive, or -1 for none; got {steps}.")
    return int(steps)
