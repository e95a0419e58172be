"""JAX-native environments (Brax, MuJoCo Playground and their like) as a ``gymnasium.vector.VectorEnv``.

All the work is done by :class:`vecenv.jax.FunctionalVectorEnv`, compiled; this class holds the state that Gymnasium's
interface hides, hands results over as numpy, JAX or torch, and speaks Gymnasium's language of seeds, masks and infos. The
state is not hidden for good: read ``envs.state`` to keep a checkpoint, assign it to return there.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from vecenv.errors import ForkedError, StaleStateError, StepTimeout
from vecenv.front.deadlines import deadline_of
from vecenv.jax.native.adapters import adapt
from vecenv.jax.native.catalog import available_envs, make_env
from vecenv.jax.native.functional import FunctionalVectorEnv
from vecenv.jax.native.handover import from_torch, info_arrays, masked_infos, require_torch, rows_of, to_numpy, to_torch
from vecenv.jax.native.seeding import entropy_seeds, seed_keys
from vecenv.jax.native.state import EnvState

__all__ = ["JaxVectorEnv", "available_envs", "make_jax_vec"]

_OPTIONS = frozenset(inspect.signature(FunctionalVectorEnv).parameters) - {"env", "num_envs"}


class JaxVectorEnv(VectorEnv[Any, Any, Any]):
    """Thousands of JAX-native environments stepped by one compiled call, with Gymnasium's vector interface.

    Environment i of ``reset(seed=s)`` has the key ``jax.random.key(s + i)``: its trajectory is the same for every
    ``num_envs``, up to the rounding of XLA's programs, and equal bit for bit to ``SyncVectorEnv`` over
    :class:`vecenv.jax.GymEnv` of as many ``lanes``.

    Under DISABLED, an environment that ended stays as it is and pays 0 until it is reset.

    Args:
        env: A name known to Brax or Playground, an environment of any library that :func:`vecenv.jax.adapt` knows, a
            ``JaxEnv``, or a :class:`~vecenv.jax.FunctionalVectorEnv` (then no other option may be given).
        num_envs: How many.
        to: What arrays are: ``"numpy"`` (fresh, writeable, as in Gymnasium), ``"jax"`` (on the device, in JAX's dtypes), or
            ``"torch"`` (on the device, handed over by DLPack).
        library: ``"brax"`` or ``"playground"``, for a name.
        infos: Report the environment's metrics. Without them ``infos`` holds only what autoreset needs.
        render_mode: ``"rgb_array"`` or ``None``.
        **options: Those of :class:`~vecenv.jax.FunctionalVectorEnv` (``autoreset_mode``, ``max_episode_steps``, ``reset``,
            ``stagger``, ``frame_skip``, ``randomize``, ``discount``, ``pool_size``, ``micro_batch``, ``devices``,
            ``reset_chunk``). Others go to the named environment: ``backend="spring"``.

    With ``to="jax"`` and ``"torch"``, nothing waits for the device: every info column is there at every step with its mask,
    and under SAME_STEP ``infos["final_obs"]`` is a batch, valid where ``infos["_final_obs"]``.

    Raises:
        gymnasium.error.NameNotFound: No such environment; and whatever else :func:`vecenv.jax.adapt` raises.
        ValueError, TypeError: Options that make no sense.
        ImportError: ``to="torch"`` without torch.
    """

    def __init__(
        self,
        env: Any,
        num_envs: int = 1,
        *,
        to: str = "numpy",
        library: str | None = None,
        infos: bool = True,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        if to not in ("numpy", "jax", "torch"):
            raise ValueError(f"to must be 'numpy', 'jax' or 'torch', got {to!r}.")
        if to == "torch":
            require_torch()
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode must be None or 'rgb_array', got {render_mode!r}.")
        functional = _functional(env, num_envs, library, options)
        self.functional = functional
        self.to = to
        self.render_mode = render_mode
        self.num_envs = functional.num_envs
        self.single_observation_space = functional.single_observation_space
        self.single_action_space = functional.single_action_space
        self.observation_space = functional.observation_space
        self.action_space = functional.action_space
        self.autoreset_mode = functional.autoreset_mode
        self.metadata = {
            "autoreset_mode": functional.autoreset_mode,
            "render_modes": ["rgb_array"],
            "render_fps": getattr(functional.single_env, "frames_per_second", 0) or 30,
        }
        self.compile_seconds: dict[str, float] = {}
        self._infos = infos
        self._state: EnvState | None = None
        self._pending = False
        self._seeds: list[int | None] = [None] * self.num_envs
        self._chunk: Any = None
        self._pid = os.getpid()

    # -- Gymnasium's interface -------------------------------------------------------------------------------------

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes.

        Args:
            seed: An int s (environment i gets s + i), a list of one int or ``None`` an environment, or ``None``: each goes
                on to the next episode of its own stream (the first time, of an unpredictable one).
            options: ``options["reset_mask"]``, ``bool[num_envs]``, chooses the environments to reset; the others stay as
                they are. It is taken out of the dict, as in Gymnasium. Nothing else is known.

        Returns:
            Observations of all environments, and ``{}``.

        Raises:
            ValueError: A list of seeds or a mask of the wrong length, or a mask without any True.
            TypeError: A mask that is no array of bool.
            gymnasium.error.AlreadyPendingCallError: Between ``send`` and ``recv``.
        """
        self._usable("reset")
        seeds = self._seed_list(seed)
        mask = self._reset_mask(options)
        keys = self._keys(seeds)
        if self._state is None:
            if mask is not None and not mask.all():
                raise gym.error.ResetNeeded("The first reset must be of all environments, without reset_mask.")
            self._state = self.functional.begin(keys)
        else:
            self._state = self._begin_again(keys, np.asarray([s is not None for s in seeds]), mask)
        return self._observations(self._state), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """One step of every environment.

        Args:
            actions: A batch from ``action_space``: numpy, JAX or torch arrays, or lists. Nothing is clipped to bounds.

        Returns:
            ``(observations, rewards, terminations, truncations, infos)``; for numpy ``float64`` rewards and ``bool`` flags.

        Raises:
            gymnasium.error.ResetNeeded: Before the first ``reset``.
            ValueError: Actions of the wrong shape, structure or number. ``TypeError``: of the wrong kind of dtype.
        """
        self._usable("step")
        self._dispatch(actions)
        return self._results()

    def send(self, actions: Any, env_id: Any = None) -> None:
        """Begin a step and return at once; ``recv`` gives its results. The device works meanwhile.

        Args:
            actions: As for ``step``.
            env_id: All environments step together; ``None``, or all indices in order.

        Raises:
            ValueError: ``env_id`` names only some environments.
            gymnasium.error.AlreadyPendingCallError: The results of the last ``send`` have not been received.
        """
        self._usable("send")
        if env_id is not None and not np.array_equal(np.asarray(env_id), np.arange(self.num_envs)):
            raise ValueError("Environments on a device step together: send actions for all, in order, or env_id=None.")
        self._dispatch(actions)
        self._pending = True

    def recv(self, timeout: float | None = None) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """The results of ``send``, of all environments; ``infos["env_id"]`` is ``arange(num_envs)``.

        Args:
            timeout: Seconds to wait at most; afterwards ``recv`` may be called again.

        Raises:
            gymnasium.error.NoAsyncCallError: Nothing was sent.
            vecenv.errors.StepTimeout: The device is not ready.
        """
        self._alive()
        if not self._pending:
            raise gym.error.NoAsyncCallError("Calling `recv` without any prior call to `send`.", "step")
        if timeout is not None:
            self._wait(timeout)
        self._pending = False
        observations, rewards, terminations, truncations, infos = self._results()
        infos["env_id"] = np.arange(self.num_envs)
        return observations, rewards, terminations, truncations, infos

    def render(self, indices: Sequence[int] | None = None) -> tuple[Any, ...] | None:
        """Frames ``uint8[height, width, 3]`` of the chosen environments (default, all), drawn one after the other.

        Raises:
            gymnasium.error.ResetNeeded: Before the first ``reset``.
            RuntimeError: MuJoCo found no OpenGL; says what to set.
            NotImplementedError: The library cannot draw this environment.
        """
        self._alive()
        if self.render_mode is None:
            return None
        inner = self._current().inner.env
        single: Any = self.functional.single_env
        chosen = range(self.num_envs) if indices is None else indices
        return tuple(single.render(jax.tree.map(lambda leaf, i=i: leaf[i], inner)) for i in chosen)

    def close_extras(self, **kwargs: Any) -> None:
        """Let go of the state on the device; the compiled functions go with the last user of ``functional``."""
        del kwargs
        self._state = None
        self._pending = False
        self._chunk = None

    @property
    def np_random_seed(self) -> tuple[int | None, ...]:  # type: ignore[override]
        """The seed each environment was last given; ``None`` where its stream came from a state that was assigned."""
        return tuple(self._seeds)

    def __repr__(self) -> str:
        name = self.spec.id if self.spec is not None else getattr(self.functional.single_env, "name", "env")
        phase = "closed" if self.closed else "pending" if self._pending else "ready" if self._state else "before reset"
        return (
            f"{type(self).__name__}({name}, num_envs={self.num_envs}, to={self.to!r}, "
            f"autoreset_mode={self.autoreset_mode.name}, {phase})"
        )

    # -- beyond Gymnasium ------------------------------------------------------------------------------------------

    @property
    def state(self) -> EnvState:
        """Everything, as a pytree: a copy, which later steps do not touch. Assign it to return there, as often as you like.

        Raises (assigning):
            TypeError, ValueError: No state of such an environment, or of another number of them.
            StaleStateError: Its arrays have been donated to another computation.
        """
        self._usable("state")
        copied: EnvState = jax.tree.map(jnp.copy, self._current())
        return copied

    @state.setter
    def state(self, state: EnvState) -> None:
        self._usable("state")
        self.functional._check_state(state)
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(state)):
            raise StaleStateError(
                "The arrays of this state are gone: it was donated to another computation. Keep a copy instead, which is "
                "what reading envs.state gives."
            )
        self._state = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), state)
        self._seeds = [None] * self.num_envs

    def step_chunk(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """``T`` steps in one compiled call; on small environments up to four times faster than ``T`` calls.

        Args:
            actions: Leaves ``[T, num_envs, ...]``. Every new ``T`` is compiled once.

        Returns:
            As ``step``, with a leading axis ``T`` everywhere. ``infos`` holds the metrics, and ``"next_obs"`` (the true
            successors, in every autoreset mode) and ``"valid"`` (``bool[T, num_envs]``, false on steps that only reset).
        """
        self._usable("step_chunk")
        state = self._current()
        actions = jax.tree.map(jnp.asarray, from_torch(actions) if self.to == "torch" else actions)
        if self._chunk is None:
            self._chunk = jax.jit(self._steps_of, donate_argnums=0)
        self._state, out = self._chunk(state.inner, state.replace(inner=None), actions)
        infos = {**(out.info if self._infos else {}), "next_obs": out.next_obs, "valid": out.valid}
        values: Any = (out.obs, out.reward, out.terminated, out.truncated, infos)
        if self.to == "numpy":
            obs, reward, *others = jax.tree.map(np.array, values)
            values = (obs, reward.astype(np.float64), *others)
        elif self.to == "torch":
            values = to_torch(values)
        results: tuple[Any, Any, Any, Any, dict[str, Any]] = values
        return results

    def _steps_of(self, inner: Any, rest: EnvState, actions: Any) -> tuple[EnvState, EnvState]:
        def one(state: EnvState, action: Any) -> tuple[EnvState, EnvState]:
            state = self.functional.step(state, action)
            return state, state.replace(inner=None)

        return jax.lax.scan(one, rest.replace(inner=inner), actions)

    def warmup(self, chunk: int | None = None, progress: bool | None = None) -> dict[str, float]:
        """Compile everything now, rather than in the first reset and step; the environments are left as they are.

        Args:
            chunk: Also compile ``step_chunk`` of so many steps.
            progress: Show a spinner; default, when stderr is a terminal (needs the package ``rich``).

        Returns:
            Seconds it took, by function: mostly compilation, ``{"reset": ..., "step": ...}``. Also in ``compile_seconds``.
        """
        self._usable("warmup")
        kept, self._state = self._state, None
        kept_seeds = list(self._seeds)
        zeros = jax.tree.map(lambda leaf: np.zeros_like(np.asarray(leaf)), self.action_space.sample())
        stages: dict[str, Any] = {"reset": lambda: self.reset(seed=0), "step": lambda: self.step(zeros)}
        if chunk:
            many = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (chunk, *leaf.shape)), zeros)
            stages[f"step_chunk({chunk})"] = lambda: self.step_chunk(many)
        try:
            with _spinner(progress) as say:
                for name, stage in stages.items():
                    say(f"compiling {name} of {self.num_envs} x {getattr(self.functional.single_env, 'name', 'env')}")
                    start = time.perf_counter()
                    stage()
                    jax.tree.map(lambda leaf: leaf.block_until_ready(), self._state)
                    self.compile_seconds[name] = time.perf_counter() - start
        finally:
            self._state, self._seeds = kept, kept_seeds
        return dict(self.compile_seconds)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _alive(self) -> None:
        if self.closed:
            raise gym.error.ClosedEnvironmentError(
                f"Trying to operate on `{type(self).__name__}`, after a call to `close()`."
            )
        if os.getpid() != self._pid:
            raise ForkedError(
                f"{type(self).__name__} was made in process {self._pid} and used in {os.getpid()}; JAX does not survive "
                "a fork."
            )

    def _usable(self, what: str) -> None:
        self._alive()
        if self._pending:
            raise gym.error.AlreadyPendingCallError(
                f"Calling `{what}` while waiting for a pending call to `step` to complete.", "step"
            )

    def _current(self) -> EnvState:
        if self._state is None:
            raise gym.error.ResetNeeded("Call reset first.")
        return self._state

    def _dispatch(self, actions: Any) -> None:
        actions = from_torch(actions) if self.to == "torch" else actions
        self._state = self.functional.step_donating(self._current(), actions)

    def _wait(self, timeout: float | None) -> None:
        deadline = deadline_of(timeout)
        reward: Any = self._current().reward
        while not reward.is_ready():
            if deadline is not None and time.monotonic() > deadline:
                raise StepTimeout(f"The device did not finish the step within {timeout} seconds.")
            time.sleep(1e-4)

    def _seed_list(self, seed: Any) -> list[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, int | np.integer):
            return [int(seed) + i for i in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ValueError(
                f"If seeds are passed as a list the length must match num_envs={self.num_envs} but got length={len(seed)}."
            )
        return list(seed)

    def _reset_mask(self, options: dict[str, Any] | None) -> np.ndarray[Any, Any] | None:
        if options is None or "reset_mask" not in options:
            return None
        mask = options.pop("reset_mask")
        name = "`options['reset_mask']` must"
        if not isinstance(mask, np.ndarray):
            raise TypeError(f"{name} be a numpy array, got {type(mask)}")
        if mask.shape != (self.num_envs,):
            raise ValueError(f"{name} have shape `({self.num_envs},)`, got {mask.shape}")
        if mask.dtype != np.bool_:
            raise TypeError(f"{name} have `dtype=np.bool_`, got {mask.dtype}")
        if not mask.any():
            raise ValueError(f"{name} contain a boolean array with at least one True value, got reset_mask={mask}")
        return mask

    def _keys(self, seeds: list[int | None]) -> np.ndarray[Any, Any]:
        """Keys for the given seeds; where there is none, of entropy the first time, else zeros that nobody reads."""
        given = [s if s is not None else 0 for s in seeds]
        if self._state is None and None in seeds:
            drawn = entropy_seeds(self.num_envs)
            given = [s if s is not None else new for s, new in zip(seeds, drawn, strict=True)]
        keys = seed_keys(given)
        first = self._state is None
        self._seeds = [g if first or s is not None else old for g, s, old in zip(given, seeds, self._seeds, strict=True)]
        return keys

    def _begin_again(
        self, keys: np.ndarray[Any, Any], seeded: np.ndarray[Any, Any], mask: np.ndarray[Any, Any] | None
    ) -> EnvState:
        state, functional = self._current(), self.functional
        if mask is None or mask.all():  # the compiled reset serves; no need to compile the masked one
            old = state.inner
            keys = np.where(seeded[:, None], keys, np.asarray(old.key))
            episode = np.where(seeded, 0, np.asarray(old.episode) + 1).astype(np.int32)
            return functional.begin(keys, episode)
        if (seeded & mask).any():
            new = seeded & mask
            state = functional.reset_mask(state, new, jnp.where(new[:, None], keys, state.inner.key))
        if (mask & ~seeded).any():
            state = functional.reset_mask(state, mask & ~seeded)
        return state

    def _observations(self, state: EnvState) -> Any:
        if self.to == "numpy":
            return to_numpy(self.observation_space, state.obs)
        return state.obs if self.to == "jax" else to_torch(state.obs)

    def _results(self) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        state = self._current()
        if self.to == "numpy":
            return self._numpy_results(state)
        values: Any = (state.obs, state.reward, state.terminated, state.truncated, self._device_infos(state))
        results: tuple[Any, Any, Any, Any, dict[str, Any]] = values if self.to == "jax" else to_torch(values)
        return results

    def _numpy_results(self, state: EnvState) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        terminated, truncated = np.array(state.terminated), np.array(state.truncated)
        rewards = np.asarray(state.reward).astype(np.float64)
        info = info_arrays(state.info) if self._infos else {}
        infos: dict[str, Any] = {}
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            ended = terminated | truncated
            if ended.any():
                infos["final_obs"] = self._final_observations(state, ended)
                infos["final_info"] = masked_infos(info, ended)
                infos["_final_obs"], infos["_final_info"] = ended.copy(), ended.copy()
            infos.update(masked_infos(info, ~ended))
        else:
            infos.update(masked_infos(info, np.asarray(state.valid)))
        return to_numpy(self.observation_space, state.obs), rewards, terminated, truncated, infos

    def _final_observations(self, state: EnvState, ended: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        host = jax.tree.map(np.asarray, state.next_obs)
        column = np.full(self.num_envs, None, dtype=object)
        for row in np.flatnonzero(ended).tolist():
            column[row] = rows_of(self.single_observation_space, host, row)
        return column

    def _device_infos(self, state: EnvState) -> dict[str, Any]:
        info = state.info if self._infos else {}
        if self.autoreset_mode is not AutoresetMode.SAME_STEP:
            return masked_infos(info, state.valid)
        ended = state.terminated | state.truncated
        final = {"final_obs": state.next_obs, "final_info": masked_infos(info, ended)}
        return {**final, "_final_obs": ended, "_final_info": ended, **masked_infos(info, ~ended)}


def make_jax_vec(
    env_id: str,
    num_envs: int = 1,
    *,
    library: str | None = None,
    vector_kwargs: dict[str, Any] | None = None,
    **env_kwargs: Any,
) -> JaxVectorEnv:
    """What ``vecenv.make_vec(env_id, num_envs, backend="brax")`` and ``backend="playground"`` call.

    Args:
        env_id: Name of the environment, as in :func:`available_envs`.
        num_envs: How many.
        library: ``"brax"`` or ``"playground"``.
        vector_kwargs: Options of :class:`JaxVectorEnv`.
        **env_kwargs: For the environment, such as ``backend="spring"``; options of ``JaxVectorEnv`` are also taken here.

    Raises:
        As :class:`JaxVectorEnv`.
    """
    return JaxVectorEnv(env_id, num_envs, library=library, **{**(vector_kwargs or {}), **env_kwargs})


def _functional(env: Any, num_envs: int, library: str | None, options: dict[str, Any]) -> FunctionalVectorEnv:
    if isinstance(env, FunctionalVectorEnv):
        if options or num_envs not in (1, env.num_envs) or len(env.batch_shape) != 1:
            raise ValueError(f"{env!r} has its options already (and must have one batch axis); got {num_envs=}, {options}.")
        return env
    if not isinstance(num_envs, int | np.integer) or num_envs < 1:
        raise ValueError(f"num_envs must be a positive integer, got {num_envs!r}.")
    given = {name: options[name] for name in options if name in _OPTIONS}
    for_env = {name: options[name] for name in options if name not in _OPTIONS}
    if isinstance(env, str):
        env = adapt(make_env(env, library, **for_env))
    elif for_env or library is not None:
        raise TypeError(
            f"Unknown options {sorted(for_env) or 'library'} for an environment that exists already; JaxVectorEnv knows "
            f"{sorted(_OPTIONS)}."
        )
    return FunctionalVectorEnv(env, int(num_envs), **given)


@contextlib.contextmanager
def _spinner(progress: bool | None) -> Iterator[Any]:
    """A line on stderr that moves while XLA compiles; yields the function that changes its text."""
    try:
        from rich.console import Console
    except ImportError:
        yield lambda text: None
        return
    console = Console(stderr=True)
    if not (console.is_terminal if progress is None else progress):
        yield lambda text: None
        return
    with console.status("compiling") as status:
        yield status.update
