"""``JaxVectorEnv``: functional environments behind Gymnasium's vector interface.

A compiled :class:`vecenv.jax.FunctionalVectorEnv` steps the environments, and :class:`JaxDriver` holds the state that
Gymnasium's interface hides. A request starts a computation on the device; reading its results as NumPy arrays waits for it,
and so does the next reset of all environments. Results are NumPy, JAX or torch arrays. Seeds, masks and infos work as in
Gymnasium. ``envs.state`` is a checkpoint; assign it to go back.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import pickle
import re
import sys
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from vecenv.errors import SnapshotMismatch, StaleStateError, envs_text
from vecenv.front.arguments import ResetOptions
from vecenv.front.capabilities import Capabilities
from vecenv.front.driver import NO_REQUEST, LockstepDriver, Phase, RequestSummary, Stepped
from vecenv.front.guard import exclusive
from vecenv.front.vector_env import VectorEnvBase
from vecenv.jax.env import EnvState
from vecenv.jax.functional import DONATED_MESSAGE, FunctionalVectorEnv
from vecenv.jax.interop import entropy_seeds, from_torch, masked_infos, seed_keys, to_numpy, to_torch
from vecenv.jax.libraries import adapt, make_env
from vecenv.state.describe import describe
from vecenv.state.snapshots import FORMAT, Kind, Snapshot, Snapshots, StateDict, parse_snapshots
from vecenv.system.signals import raise_if_from_handler

_FUNCTIONAL_OPTIONS: Final = frozenset(inspect.signature(FunctionalVectorEnv).parameters) - {"env", "num_envs"}
Mask: TypeAlias = npt.NDArray[np.bool_]
Seeds: TypeAlias = Sequence[int | None]

_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_POLL_SECONDS: Final = 1e-4  # between two checks of the device: JAX has no wait with a timeout
_CAPABILITIES: Final = Capabilities(
    "jax", attributes=False, first_ready=False, reset_options=False, row_options=False, snapshots=True,
    in_this_process=True, runs_jax=True,
)  # fmt: skip


class JaxVectorEnv(VectorEnvBase[Any, Any, Any]):
    """Thousands of JAX-native environments stepped by one compiled call, with Gymnasium's vector interface.

    After ``reset(seed=s)``, environment i has the key ``jax.random.key(s + i)``. Its trajectory is the same for every
    ``num_envs``, up to rounding differences between XLA's programs. It equals that of a loop over single environments bit
    for bit if their steps are compiled for the same number of rows.

    A reset without a seed begins the next episode of each environment's own random sequence. Actions are NumPy, JAX or
    torch arrays, or lists, and are not clipped to bounds. ``step_async`` and ``send`` return immediately, while the device
    works.

    Under DISABLED, an environment with an ended episode keeps its state, with reward 0, until it is reset.

    Args:
        env: A name in Brax or Playground, an environment of any library that :func:`vecenv.jax.adapt` accepts, a
            ``JaxEnv``, or a :class:`~vecenv.jax.FunctionalVectorEnv` (then without other options).
        num_envs: The number of environments.
        to: The kind of arrays: ``"numpy"`` (fresh, writeable, as in Gymnasium), ``"jax"`` (on the device, in JAX's dtypes),
            or ``"torch"`` (on the device, through DLPack).
        library: ``"brax"`` or ``"playground"``, for a name.
        render_mode: ``"rgb_array"`` or ``None``.
        **options: Options of :class:`~vecenv.jax.FunctionalVectorEnv` (``autoreset_mode``, ``max_episode_steps``, ``reset``,
            ``stagger``, ``frame_skip``, ``randomize``, ``discount``, ``pool_size``, ``micro_batch``, ``devices``).
            Other options are passed to the named environment, for example ``backend="spring"``.

    With ``to="jax"`` or ``"torch"``, no step waits for the device, so every step has all info columns with their masks, and
    under SAME_STEP ``infos["final_obs"]`` is a batch, valid where ``infos["_final_obs"]`` is true.

    Raises:
        gymnasium.error.NameNotFound: There is no such environment. Other errors are those of :func:`vecenv.jax.adapt`.
        ValueError, TypeError: Invalid options.
        ImportError: ``to="torch"`` without torch.
    """

    _driver: JaxDriver

    def __init__(
        self, env: Any, num_envs: int = 1, *, to: str = "numpy", library: str | None = None,
        render_mode: str | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.closed = True  # close() does nothing until the driver exists
        if to not in ("numpy", "jax", "torch"):
            raise ValueError(f"to must be 'numpy', 'jax' or 'torch', got {to!r}.")
        if to == "torch" and importlib.util.find_spec("torch") is None:  # checked now, not in the first reset
            raise ImportError("to='torch' needs torch, not installed here: pip install torch")
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode must be None or 'rgb_array', got {render_mode!r}.")
        functional = parse_functional(env, num_envs, library, options)
        self.functional, self.to, self.render_mode = functional, to, render_mode
        for name in ("observation_space", "action_space", "single_observation_space", "single_action_space"):
            setattr(self, name, getattr(functional, name))
        self.num_envs, self.autoreset_mode = functional.num_envs, functional.autoreset_mode
        fps = getattr(functional.single_env, "frames_per_second", 0) or 30
        self.metadata = {"autoreset_mode": self.autoreset_mode, "render_modes": ["rgb_array"], "render_fps": fps}
        self._open(JaxDriver(functional, to))

    @exclusive
    def render(self, indices: Sequence[int] | None = None) -> tuple[Any, ...] | None:
        """Return a frame ``uint8[height, width, 3]`` for each of ``indices`` (default: all), drawn one after the other.

        Without a render mode, return ``None``.

        Raises:
            gymnasium.error.ResetNeeded: Before the first ``reset``.
            ValueError: ``indices`` are not from 0 to ``num_envs - 1``.
            RuntimeError: MuJoCo found no OpenGL; the message names the variable to set.
            NotImplementedError: The library cannot draw this environment.
            gymnasium.error.AlreadyPendingCallError: A call is pending.
        """
        self._driver.require_idle("render")
        if self.render_mode is None:
            return None
        rows = range(self.num_envs) if indices is None else indices
        if any(row not in range(self.num_envs) for row in rows):
            raise ValueError(f"render: indices must be within 0..{self.num_envs - 1}, got {list(rows)}")
        states = self._driver.require_state(rows).inner.env
        single: Any = self.functional.single_env
        return tuple(single.render(jax.tree.map(lambda leaf, row=row: leaf[row], states)) for row in rows)

    @property
    def np_random_seed(self) -> tuple[int | None, ...]:  # type: ignore[override]
        """The latest seed of each environment; ``None`` if unknown, as before the first reset or after assigning a state."""
        return tuple(self._driver.latest.seeds)

    def __repr__(self) -> str:
        if not hasattr(self, "_driver"):
            return f"{type(self).__name__}(closed)"
        name = self.spec.id if self.spec is not None else getattr(self.functional.single_env, "name", "env")
        phase = "before reset" if self._driver.newest is None else "ready"
        if self._driver.pending_request.rows:
            phase = "pending"
        return (
            f"{type(self).__name__}({name}, num_envs={self.num_envs}, to={self.to!r}, "
            f"autoreset_mode={self.autoreset_mode.name}, {'closed' if self.closed else phase})"
        )

    # -- beyond Gymnasium ------------------------------------------------------------------------------------------

    @property
    @exclusive
    def state(self) -> EnvState:
        """A copy of the whole state, as a pytree. Assign it to go back to that state, any number of times.

        Raises:
            gymnasium.error.ResetNeeded: On reading, before the first ``reset``.
            TypeError, ValueError: On assignment of a state of other environments, or of another number of them.
            StaleStateError: On assignment of a state with arrays that have been donated to another computation.
        """
        self._driver.require_idle("state")
        return self._driver.copy_state()

    @state.setter
    @exclusive
    def state(self, state: EnvState) -> None:
        self._driver.require_idle("state")
        self._driver.assign(state)

    @exclusive
    def step_chunk(self, actions: Any) -> Stepped:
        """Take ``T`` steps in one compiled call; on small environments up to four times faster than ``T`` calls.

        Args:
            actions: A pytree with leaves ``[T, num_envs, ...]``. The program is compiled once for each ``T``.

        Returns:
            The results of ``step``, with a leading axis ``T`` everywhere. ``infos`` holds the environments' infos without
            masks, and ``"next_obs"`` (the true successors, in every autoreset mode) and ``"valid"`` (``bool[T, num_envs]``,
            false where no transition happened).
        """
        self._driver.require_idle("step_chunk")
        length, stepped = self._driver.step_chunk(actions)
        self._driver.finish(self._driver.returned, length * self.num_envs, 0)
        return stepped

    @exclusive
    def warmup(self, chunk: int | None = None) -> dict[str, float]:
        """Compile a step and a reset of all environments now, not in their first calls; the environments do not change.

        Args:
            chunk: Also compile ``step_chunk`` for that many steps.

        Returns:
            Seconds by function, mostly for compilation: ``{"reset": ..., "step": ...}``, and ``"step_chunk(<chunk>)"``.
        """
        self._driver.require_idle("warmup")
        return compile_now(self._driver, chunk)


def parse_functional(env: Any, num_envs: int, library: str | None, options: dict[str, Any]) -> FunctionalVectorEnv:
    """Return the functional environment for these arguments of ``JaxVectorEnv``.

    Raises:
        ValueError: ``env`` is a ``FunctionalVectorEnv``, and options are given or it does not have one batch axis; or the
            number of environments is invalid.
        TypeError: Unknown options.
    """
    if isinstance(env, FunctionalVectorEnv):
        if options or library is not None or num_envs not in (1, env.num_envs) or len(env.batch_shape) != 1:
            raise ValueError(
                f"{env!r} already has its options, and must have one batch axis; got batch_shape={env.batch_shape}, "
                f"{num_envs=}, {library=}, {options=}."
            )
        return env
    if not isinstance(num_envs, int | np.integer) or num_envs < 1:
        raise ValueError(f"num_envs must be a positive integer, got {num_envs!r}.")
    given = {name: options[name] for name in options if name in _FUNCTIONAL_OPTIONS}
    for_env = {name: options[name] for name in options if name not in _FUNCTIONAL_OPTIONS}
    if isinstance(env, str):
        env = adapt(make_env(env, library, **for_env))
    elif for_env or library is not None:
        unknown = sorted(for_env) or ["library"]
        raise TypeError(
            f"{unknown} are not options of an existing environment; the options are {sorted(_FUNCTIONAL_OPTIONS)}."
        )
    return FunctionalVectorEnv(env, int(num_envs), **given)


class Latest(NamedTuple):
    """The newest state (``None``: there is none), the latest seed of each environment, and the latest request.

    A seed is ``None`` if it is unknown, as before the first reset or after assigning a state. ``missing`` has the rows that
    were neither reset nor loaded, if other rows were loaded before the first reset.
    """

    state: EnvState | None
    seeds: list[int | None]
    request: RequestSummary | None
    missing: frozenset[int] = frozenset()


class JaxDriver(LockstepDriver):
    """The driver that holds the state. After :meth:`close`, a call in another thread keeps its own reference to the state.

    Args:
        functional: The environments.
        to: ``"numpy"``, ``"jax"`` or ``"torch"``. With the last two, :meth:`read` does not wait for the device, and waits in
            the caller's own code are not counted in ``seconds_waited``.

    Attributes:
        latest: The state, with its seeds and request.
    """

    missing_reasons: ClassVar[Mapping[str, str]] = {
        **LockstepDriver.missing_reasons,
        "attributes": "its environments are rows of one compiled function, without methods or attributes of their own",
    }
    capabilities = _CAPABILITIES

    def __init__(self, functional: FunctionalVectorEnv, to: str) -> None:
        super().__init__(functional.num_envs)
        self.functional = functional
        self.latest = Latest(None, [None] * functional.num_envs, None)
        self._to = to
        self._same_step = functional.autoreset_mode is AutoresetMode.SAME_STEP
        self._jitted_chunk: Any = None

    @property
    def newest(self) -> EnvState | None:
        """The newest state, which the device may still be computing.

        ``None`` before the first reset, after a failure and after :meth:`close`.
        """
        return self.latest.state

    @newest.setter
    def newest(self, state: EnvState | None) -> None:
        self.latest = self.latest._replace(state=state)

    @property
    def latest_request(self) -> RequestSummary | None:
        return self.latest.request

    def require_state(self, rows: Collection[int] = ()) -> EnvState:
        """Return the state.

        Raises:
            gymnasium.error.ResetNeeded: There is none, or one of ``rows`` has none.
        """
        if self.newest is None:
            raise gym.error.ResetNeeded("Call reset first.")
        if missing := self.latest.missing.intersection(rows):
            raise gym.error.ResetNeeded(f"Call reset first: no state was loaded into {envs_text(sorted(missing))}.")
        return self.newest

    # -- starting computations --------------------------------------------------------------------------------------------

    def begin_reset(self, request: RequestSummary, seeds: Seeds, mask: Mask | None, options: ResetOptions = None) -> None:
        """Begin an episode in each environment of ``mask`` (``None``: all).

        An environment without a seed gets an unpredictable one in the first reset; later, it begins the next episode of its
        random sequence.

        Raises:
            gymnasium.error.ResetNeeded: There is no state, and the reset is not of all environments.
            gymnasium.error.Error: A seed is invalid.
        """
        if mask is None or mask.all():  # use the unmasked reset, so that the masked one need not be compiled
            mask = None
            self._drop_failed_state()
        functional, state = self.functional, self.newest
        if state is None:
            if mask is not None:
                raise gym.error.ResetNeeded("The first reset must be of all environments, without reset_mask.")
            drawn = entropy_seeds(functional.num_envs)
            first_seeds = [new if seed is None else seed for seed, new in zip(seeds, drawn, strict=True)]
            self.latest = Latest(functional.begin(seed_keys(first_seeds)), list(first_seeds), request)
            return
        seeded = np.fromiter((seed is not None for seed in seeds), np.bool_, len(seeds))
        if mask is not None:
            seeded &= mask
        keys = seed_keys([0 if seed is None else seed for seed in seeds])  # keys of rows without a seed are not used
        latest_seeds = [
            seed if is_seeded else old
            for seed, is_seeded, old in zip(seeds, seeded.tolist(), self.latest.seeds, strict=True)
        ]
        if mask is None:
            inner: Any = state.inner
            keys = np.where(seeded[:, None], keys, np.asarray(inner.key))
            state = functional.begin(keys, np.where(seeded, 0, np.asarray(inner.episode) + 1).astype(np.int32))
        else:
            if seeded.any():
                state = functional.reset_mask(state, jnp.asarray(seeded), jnp.where(seeded[:, None], keys, state.inner.key))
            if (mask & ~seeded).any():
                state = functional.reset_mask(state, jnp.asarray(mask & ~seeded))
        was_reset = range(functional.num_envs) if mask is None else np.flatnonzero(mask).tolist()
        self.latest = Latest(state, latest_seeds, request, self.latest.missing.difference(was_reset))

    def _drop_failed_state(self) -> None:
        """Wait for the state, and drop it if the device failed to compute it."""
        try:
            jax.block_until_ready(self.newest)  # type: ignore[no-untyped-call]
        except (jax.errors.JaxRuntimeError, ValueError):
            self.newest = None

    def begin_step(self, request: RequestSummary, actions: Any) -> None:
        """Begin one step of all environments."""
        with self._donate_state() as state:
            after = self.functional.step_donating(state, self._copy_actions(actions))
            self.latest = Latest(after, self.latest.seeds, request)

    def _copy_actions(self, actions: Any) -> Any:
        """Return actions with copies of NumPy arrays and CPU tensors, which JAX may read after the call has returned."""
        arrays = from_torch(actions) if "torch" in sys.modules else actions
        return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, arrays)

    def step_chunk(self, actions: Any) -> tuple[int, Stepped]:
        """Take ``T`` steps in one program, and return ``T`` and the results."""
        if self._jitted_chunk is None:
            self._jitted_chunk = jax.jit(self._scan_steps, donate_argnums=0)
        with self._donate_state() as state:
            actions = jax.tree.map(jnp.asarray, self._copy_actions(actions))
            newest, outputs = self._jitted_chunk(state.inner, state.replace(inner=None), actions)
            stepped = self._chunk_results(outputs)
            self.newest = newest  # last: an interruption above loses the results, so it must leave no state
        return outputs.reward.shape[0], stepped

    def _chunk_results(self, outputs: EnvState) -> Stepped:
        infos = {**outputs.info, "next_obs": outputs.next_obs, "valid": outputs.valid}
        stepped: Any = (outputs.obs, outputs.reward, outputs.terminated, outputs.truncated, infos)
        if self._to == "numpy":
            terminated, truncated, infos = jax.tree.map(np.array, stepped[2:])
            convert = partial(to_numpy, self.functional.observation_space)
            infos["next_obs"] = convert(outputs.next_obs)
            return convert(outputs.obs), np.array(outputs.reward, np.float64), terminated, truncated, infos
        return stepped if self._to == "jax" else to_torch(stepped)  # type: ignore[no-any-return]

    def _scan_steps(self, inner: Any, rest: EnvState, actions: Any) -> tuple[EnvState, EnvState]:
        def step(state: EnvState, action: Any) -> tuple[EnvState, EnvState]:
            state = self.functional.step(state, action)
            return state, state.replace(inner=None)

        return jax.lax.scan(step, rest.replace(inner=inner), actions)

    @contextlib.contextmanager
    def _donate_state(self) -> Iterator[EnvState]:
        """Yield the state for donation. After a failure that consumed its arrays, there is no state until the next reset."""
        state = self.require_state(range(self.num_envs))
        try:
            yield state
        except BaseException:
            if self.newest is state and _is_donated(state.inner):
                self.newest = None
            raise

    def copy_state(self) -> EnvState:
        """Return a copy of the state."""
        return jax.tree.map(jnp.copy, self.require_state(range(self.num_envs)))  # type: ignore[no-any-return]

    def assign(self, state: EnvState) -> None:
        """Continue from a copy of ``state``.

        Raises:
            TypeError, ValueError: It is not a state of these environments, or the number of environments differs.
            StaleStateError: Its arrays have been donated to another computation.
        """
        self.functional.check_state(state)
        if _is_donated(state):
            raise StaleStateError(DONATED_MESSAGE)
        own = self.newest
        if own is None:
            own = jax.eval_shape(self.functional.begin, seed_keys([0] * self.num_envs))
        if _leaf_types(state) != _leaf_types(own):
            raise ValueError("The state belongs to other environments: its arrays have other names, shapes or dtypes.")
        copied = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), state)
        self.latest = Latest(copied, [None] * self.num_envs, self.latest_request)

    def close(self, *, terminate: bool = False) -> None:
        """Release the device's memory and the compiled ``step_chunk``."""
        self.newest = self._jitted_chunk = None

    # -- reading ---------------------------------------------------------------------------------------------------------

    def wait(self, deadline: float) -> bool:
        """Wait for the device until ``deadline``; True if it has finished."""
        began, state = time.monotonic(), self.require_state()
        leaves: list[Any] = jax.tree.leaves((state.obs, state.reward))
        try:
            while not all(leaf.is_ready() for leaf in leaves):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_POLL_SECONDS)
            return True
        finally:
            self.seconds_waited += time.monotonic() - began

    def read(self, kind: Phase) -> Stepped:
        """Return the results of a call from the newest state."""
        try:
            return self.step_results(infos=kind is Phase.WAITING_STEP)
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # an error of an environment: no valid state is left
            self.result_error, self.newest = error, None
            raise

    def step_results(self, infos: bool) -> Stepped:
        """Return the state as the results of ``step``. Pass ``infos=False`` for a state from a reset, which has no infos."""
        state = self.require_state()
        if self._to != "numpy":
            infos_by_key = self._infos(state, state.done) if infos else {}
            observations = jax.tree.map(lambda leaf: leaf, state.obs)  # in dicts that belong to the caller
            stepped: Any = (observations, state.reward, state.terminated, state.truncated, infos_by_key)
            return stepped if self._to == "jax" else to_torch(stepped)  # type: ignore[no-any-return]
        began = time.perf_counter()
        terminated = np.array(state.terminated)  # the first access waits for the whole program
        self.seconds_waited += time.perf_counter() - began
        truncated = np.array(state.truncated)
        infos_by_key = self._infos(state, terminated | truncated) if infos else {}
        observations = to_numpy(self.functional.observation_space, state.obs)
        return observations, np.asarray(state.reward).astype(np.float64), terminated, truncated, infos_by_key

    def _infos(self, state: EnvState, ended: Any) -> dict[str, Any]:
        """Return the infos of a step. ``ended`` is a NumPy array if ``to="numpy"``; otherwise its values may not be read."""
        on_host = self._to == "numpy"
        info, valid = jax.tree.map(np.asarray, (state.info, state.valid)) if on_host else (state.info, state.valid)
        if not self._same_step:
            return masked_infos(info, valid)
        final: dict[str, Any] = {}
        if not on_host or ended.any():
            final["final_obs"] = self._final_observations(state, ended) if on_host else state.next_obs
            final["final_info"] = masked_infos(info, ended)
            final["_final_obs"], final["_final_info"] = (ended.copy(), ended.copy()) if on_host else (ended, ended)
        return {**final, **masked_infos(info, ~ended)}

    def _final_observations(self, state: EnvState, ended: Mask) -> npt.NDArray[np.object_]:
        batch, space = jax.tree.map(np.asarray, state.next_obs), self.functional.single_observation_space
        final = np.full(len(ended), None, dtype=object)
        for row in np.flatnonzero(ended).tolist():
            final[row] = to_numpy(space, jax.tree.map(lambda leaf, row=row: leaf[row], batch))
        return final

    # -- saving and loading ----------------------------------------------------------------------------------------------

    def save(self, rows: Sequence[int], verify: bool) -> tuple[Snapshot, ...]:
        """Return snapshots of rows. There is nothing to verify: a functional environment has no other state."""
        state, seeds = self.require_state(rows), self.latest.seeds
        kind, leaves = self._kind(state), [np.asarray(_without_key_type(leaf)) for leaf in jax.tree.leaves(state)]
        return Snapshots(Snapshot.of(kind, pickle.dumps((seeds[row], [leaf[row] for leaf in leaves]))) for row in rows)

    def load(self, snapshots: Any, rows: Sequence[int]) -> Any:
        """Load saved rows and return their observations, in the array type of ``to``."""
        if len(rows) == self.num_envs:
            self._drop_failed_state()
        state, missing = self.newest, self.latest.missing
        if state is None:
            state, missing = self.functional.begin(seed_keys(entropy_seeds(self.num_envs))), frozenset(range(self.num_envs))
        saved = parse_snapshots(snapshots, rows)
        kind = self._kind(state)
        for index, snapshot in enumerate(saved):
            if wrong := snapshot.row.kind.differs_from(kind):
                raise SnapshotMismatch(f"snapshots[{index}] does not fit: {wrong}")

        def unpickle() -> tuple[list[Any], list[Any]]:
            bodies = [pickle.loads(snapshot.body) for snapshot in saved]
            saved_seeds, leaves = zip(*bodies, strict=True)
            return list(saved_seeds), list(zip(*leaves, strict=True))

        try:
            saved_seeds, columns = unpickle()
        except Exception as error:
            raise_if_from_handler(error, unpickle)
            text = f"the bytes of a snapshot are not a state of this environment: {type(error).__name__}: {error}"
            raise SnapshotMismatch(text) from error

        seeds, remaining = list(self.latest.seeds), iter(columns)
        for row, seed in zip(rows, saved_seeds, strict=True):
            seeds[row] = seed

        def load_rows(leaf: Any) -> Any:
            whole = np.array(_without_key_type(leaf))
            whole[list(rows)] = np.stack(next(remaining))
            loaded = jax.random.wrap_key_data(jnp.asarray(whole), impl=jax.random.key_impl(leaf)) if _is_key(leaf) else whole
            return jax.device_put(loaded, leaf.sharding)

        self.latest = Latest(jax.tree.map(load_rows, state), seeds, self.latest_request, missing.difference(rows))
        observations = self.step_results(infos=False)[0]
        return jax.tree.map(lambda leaf: leaf[np.array(rows, np.intp)], observations)

    def state_dict(self, rows: list[int], spaces: Sequence[Any], verify: bool) -> dict[str, Any]:
        """Return the states of environments in one dict."""
        return StateDict(format=FORMAT, num_envs=len(rows), snapshots=self.save(rows, verify))

    def load_state_dict(self, state: Mapping[str, Any], rows: list[int], spaces: Sequence[Any]) -> Any:
        """Load the result of :meth:`state_dict`."""
        own = {"format": FORMAT, "num_envs": len(rows)}.items()
        if not isinstance(state, Mapping) or "snapshots" not in state or any(state.get(key) != value for key, value in own):
            raise SnapshotMismatch(f"this is not a state_dict() of {len(rows)} environments")
        return self.load(state["snapshots"], rows)

    @cached_property
    def _attributes(self) -> tuple[tuple[str, str], ...]:
        """The options and layer attributes by which environments of one class can differ."""
        whole = self.functional
        options = {"max_episode_steps": whole.max_episode_steps, "reset": whole.reset_source, "discount": whole.discount}
        attributes = [(name, describe(value)) for name, value in options.items()]
        single: Any = whole.single_env
        while single is not None:
            layer = {name: value for name, value in vars(single).items() if name != "env"}
            attributes += [(f"{type(single).__name__}.{name}", describe(value)) for name, value in layer.items()]
            single = vars(single).get("env")
        return tuple(attributes)

    def _kind(self, state: EnvState) -> Kind:
        single: Any = self.functional.single_env
        layers = []
        while single is not None:
            layers.append(f"{type(single).__module__}.{type(single).__qualname__}")
            single = vars(single).get("env")
        leaves, shape = jax.tree.flatten(state)
        row_types = [(leaf.shape[1:], str(leaf.dtype)) for leaf in leaves]
        structure = _ADDRESS.sub("", repr((shape, row_types)))  # MJX keeps arrays in objects with their address in the repr
        arguments = ("state", f"{len(leaves)} arrays, {zlib.crc32(structure.encode()):08x}"), *self._attributes
        name = str(getattr(self.functional.single_env, "name", layers[-1]))
        return Kind(name, arguments, tuple(layers), (("jax", jax.__version__),))


def _is_donated(tree: Any) -> bool:
    """True if a computation has consumed any of the arrays."""
    return any(leaf.is_deleted() for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _without_key_type(leaf: Any) -> Any:
    """Return an array that NumPy can hold: random keys become their data."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _leaf_types(state: EnvState) -> dict[str, tuple[Any, Any]]:
    """Return the shape and dtype of each array by its name. Structures are not compared: they may hold objects."""
    named, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): (leaf.shape, leaf.dtype) for path, leaf in named}


def compile_now(driver: JaxDriver, chunk: int | None) -> dict[str, float]:
    """Compile reset and step, and ``chunk`` steps in one program; return seconds by name. The state does not change."""
    zeros = jax.tree.map(lambda leaf: np.zeros_like(np.asarray(leaf)), driver.functional.action_space.sample())
    stages: dict[str, Callable[[], object]] = {
        "reset": partial(driver.begin_reset, NO_REQUEST, list(range(driver.num_envs)), None),  # does not donate the state
        "step": partial(driver.begin_step, NO_REQUEST, zeros),
    }
    if chunk:
        many = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (chunk, *leaf.shape)), zeros)
        stages[f"step_chunk({chunk})"] = partial(driver.step_chunk, many)
    seconds: dict[str, float] = {}
    latest = driver.latest
    try:
        for name, stage in stages.items():
            start = time.perf_counter()
            stage()
            driver.step_results(infos=name != "reset")
            jax.tree.map(lambda leaf: leaf.block_until_ready(), driver.newest)
            seconds[name] = time.perf_counter() - start
    finally:
        driver.latest = latest
    return seconds
