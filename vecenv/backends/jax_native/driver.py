"""The state of environments on the device: begun, stepped, read, copied, assigned, compiled ahead.

:class:`Driver` is a :class:`vecenv.front.together.Together` with what JAX alone can do beside it. :class:`Reader` turns a
state into what the caller asked for: numpy, JAX or torch, in Gymnasium's form."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from vecenv.errors import StaleStateError
from vecenv.front.arguments import ResetOptions
from vecenv.front.capabilities import Capabilities
from vecenv.front.driver import Call, Stepped
from vecenv.front.phases import Phase
from vecenv.front.together import Together
from vecenv.jax.functional import FunctionalVectorEnv
from vecenv.jax.interop import entropy_seeds, from_torch, info_arrays, masked_infos, rows_of, seed_keys, to_numpy, to_torch
from vecenv.jax.state import EnvState

__all__ = ["Driver", "Latest", "compile_now"]

Mask: TypeAlias = npt.NDArray[np.bool_]
Seeds: TypeAlias = Sequence[int | None]

_CAPABILITIES: Final = Capabilities(
    "jax", attributes=False, first_ready=False, reset_options=False, row_options=False, snapshots=True,
    in_this_process=True, runs_jax=True,
)  # fmt: skip


class Latest(NamedTuple):
    """The newest state, ``None`` where there is none; what seed each environment was last given, ``None`` where its stream
    came from a state that was assigned; and the call that was made last."""

    state: EnvState | None
    seeds: list[int | None]
    asked: Call | None


class Driver(Together):
    """Holds the state. It asks the device and returns; only reading waits. What a call in another thread still needs of the
    state when it is closed, that call holds.

    Args:
        functional: The environments.
        to: ``"numpy"``, ``"jax"`` or ``"torch"``.
        infos: Report the environments' metrics.

    Attributes:
        latest: The state and what it is of.
        reader: Makes results of states.
    """

    def __init__(self, functional: FunctionalVectorEnv, to: str, infos: bool) -> None:
        super().__init__(functional.num_envs)
        self.functional = functional
        self.reader = Reader(functional, to, infos)
        self.latest = Latest(None, [None] * functional.num_envs, None)
        self._torch = to == "torch"
        self._chunk: Any = None

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    @property
    def state(self) -> EnvState | None:
        """The newest, which the device may still be computing; ``None`` before the first reset."""
        return self.latest.state

    @state.setter
    def state(self, state: EnvState | None) -> None:
        self.latest = self.latest._replace(state=state)

    @property
    def asked(self) -> Call | None:
        return self.latest.asked

    @property
    def waited(self) -> float:
        """Seconds spent waiting for the device; what ``to="jax"`` and ``"torch"`` leave to the caller is not in it."""
        return self.reader.waited

    def current(self) -> EnvState:
        """The state.

        Raises:
            gymnasium.error.ResetNeeded: There is none.
        """
        if self.state is None:
            raise gym.error.ResetNeeded("Call reset first.")
        return self.state

    def begin_reset(
        self, call: Call, seeds: Seeds, mask: Mask | None, options: ResetOptions = None
    ) -> None:
        """Begin episodes; raises as :func:`begin_episodes`."""
        self.latest = Latest(*begin_episodes(self.functional, self.state, seeds, mask, self.latest.seeds), call)

    def begin_step(self, call: Call, actions: Any) -> None:
        """One step of every environment."""
        state = self.current()
        if self._torch:
            actions = from_torch(actions)
        try:
            self.latest = Latest(self.functional.step_donating(state, actions), self.latest.seeds, call)
        except BaseException:
            self._drop_given_up(state)
            raise

    def chunk(self, actions: Any) -> tuple[int, Stepped]:
        """``T`` steps in one program: ``T``, and their results."""
        state = self.current()
        actions = jax.tree.map(jnp.asarray, from_torch(actions) if self._torch else actions)
        if self._chunk is None:
            self._chunk = jax.jit(self._steps_of, donate_argnums=0)
        try:
            self.state, out = self._chunk(state.inner, state.replace(inner=None), actions)
        except BaseException:
            self._drop_given_up(state)
            raise
        return out.reward.shape[0], self.reader.chunk(out)

    def copied(self) -> EnvState:
        """The state, in arrays of its own."""
        copied: EnvState = jax.tree.map(jnp.copy, self.current())
        return copied

    def assign(self, state: EnvState) -> None:
        """Go on from a copy of ``state``.

        Raises:
            TypeError, ValueError: No state of such an environment, or of another number of them.
            StaleStateError: Its arrays have been donated to another computation.
        """
        self.functional._check_state(state)
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(state)):
            raise StaleStateError(
                "The arrays of this state are gone: it was donated to another computation. Keep a copy instead, which is "
                "what reading envs.state gives."
            )
        copied = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), state)
        self.latest = self.latest._replace(state=copied, seeds=[None] * self.functional.num_envs)

    def wait(self, deadline: float) -> bool:
        """Wait for the device."""
        return self.reader.wait(self.current(), deadline)

    def read(self, kind: Phase) -> Stepped:
        """The state, read."""
        try:
            return self.reader.stepped(self.current(), infos=kind is Phase.WAITING_STEP)
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # an environment's own: there is no state to go on from
            self.failure, self.state = error, None
            raise

    def close(self, *, terminate: bool = False) -> None:
        """Let go of the device's memory, and of what was compiled here."""
        self.state = self._chunk = None

    def _steps_of(self, inner: Any, rest: EnvState, actions: Any) -> tuple[EnvState, EnvState]:
        def one(state: EnvState, action: Any) -> tuple[EnvState, EnvState]:
            state = self.functional.step(state, action)
            return state, state.replace(inner=None)

        return jax.lax.scan(one, rest.replace(inner=inner), actions)

    def _drop_given_up(self, state: EnvState) -> None:
        """If a state was donated and nothing came of it, there is none until the next reset."""
        inner: Any = state.inner
        if self.state is state and any(leaf.is_deleted() for leaf in jax.tree.leaves(inner) if isinstance(leaf, jax.Array)):
            self.state = None


def begin_episodes(
    functional: FunctionalVectorEnv, state: EnvState | None, seeds: Seeds, mask: Mask | None, before: Seeds
) -> tuple[EnvState, list[int | None]]:
    """Begin episodes in the environments of ``mask``, each by its seed or as the next one of its own stream.

    Args:
        functional: The environments.
        state: Theirs; ``None`` before the first reset, which draws unpredictable seeds where there are none.
        seeds: One or ``None`` for each environment; those outside of ``mask`` are not used.
        mask: Which environments; ``None``: all.
        before: The seeds each was last given.

    Returns:
        The new state, and the seeds each was last given.

    Raises:
        gymnasium.error.ResetNeeded: The first reset is not of all environments.
        gymnasium.error.Error: What a key cannot be made of.
    """
    if state is None:
        if mask is not None and not mask.all():
            raise gym.error.ResetNeeded("The first reset must be of all environments, without reset_mask.")
        drawn = entropy_seeds(functional.num_envs)
        given = [new if seed is None else seed for seed, new in zip(seeds, drawn, strict=True)]
        return functional.begin(seed_keys(given)), list(given)
    seeded = np.fromiter((seed is not None for seed in seeds), np.bool_, len(seeds))
    if mask is not None:
        seeded &= mask
    keys = seed_keys([0 if seed is None else seed for seed in seeds])  # keys of those without are not read
    latest = [seed if new else old for seed, new, old in zip(seeds, seeded.tolist(), before, strict=True)]
    return _begin_again(functional, state, keys, seeded, mask), latest


def _begin_again(
    functional: FunctionalVectorEnv, state: EnvState, keys: npt.NDArray[Any], seeded: Mask, mask: Mask | None
) -> EnvState:
    if mask is None or mask.all():  # the compiled reset serves; no need to compile the masked one
        old: Any = state.inner
        keys = np.where(seeded[:, None], keys, np.asarray(old.key))
        episode = np.where(seeded, 0, np.asarray(old.episode) + 1).astype(np.int32)
        return functional.begin(keys, episode)
    if seeded.any():
        state = functional.reset_mask(state, jnp.asarray(seeded), jnp.where(seeded[:, None], keys, state.inner.key))
    if (mask & ~seeded).any():
        state = functional.reset_mask(state, jnp.asarray(mask & ~seeded))
    return state


_PAUSE = 1e-4  # between two looks at whether the device is done: JAX has no wait with an end


class Reader:
    """Reads states.

    Args:
        functional: The environments.
        to: ``"numpy"``, ``"jax"`` or ``"torch"``.
        infos: Report the environments' metrics.

    Attributes:
        waited: Seconds spent waiting for the device. With ``"jax"`` and ``"torch"`` only :meth:`wait` waits.
    """

    def __init__(self, functional: FunctionalVectorEnv, to: str, infos: bool) -> None:
        self.waited = 0.0
        self._to = to
        self._infos = infos
        self._num_envs = functional.num_envs
        self._space = functional.observation_space
        self._single_space = functional.single_observation_space
        self._same_step = functional.autoreset_mode is AutoresetMode.SAME_STEP

    def wait(self, state: EnvState, deadline: float) -> bool:
        """Wait for the device until ``deadline``; whether it is done."""
        began = time.monotonic()
        leaves: list[Any] = jax.tree.leaves((state.obs, state.reward))
        try:
            while not all(leaf.is_ready() for leaf in leaves):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_PAUSE)
            return True
        finally:
            self.waited += time.monotonic() - began

    def stepped(self, state: EnvState, infos: bool = True) -> Stepped:
        """What ``step`` returns; without ``infos`` of a state that a reset returned, whose environments report none."""
        if self._to != "numpy":
            said = self._device_infos(state) if infos else {}
            values: Any = (state.obs, state.reward, state.terminated, state.truncated, said)
            stepped: Stepped = values if self._to == "jax" else to_torch(values)
            return stepped
        began = time.perf_counter()
        terminated = np.array(state.terminated)  # whatever is asked for first waits for the whole program
        self.waited += time.perf_counter() - began
        truncated = np.array(state.truncated)
        rewards = np.asarray(state.reward).astype(np.float64)
        said = self._host_infos(state, terminated, truncated) if infos else {}
        return to_numpy(self._space, state.obs), rewards, terminated, truncated, said

    def chunk(self, out: EnvState) -> Stepped:
        """What ``step_chunk`` returns, of states stacked along a leading axis."""
        infos = {**(out.info if self._infos else {}), "next_obs": out.next_obs, "valid": out.valid}
        values: Any = (out.obs, out.reward, out.terminated, out.truncated, infos)
        if self._to == "numpy":
            observations, rewards, *others = jax.tree.map(np.array, values)
            values = (observations, rewards.astype(np.float64), *others)
        elif self._to == "torch":
            values = to_torch(values)
        stepped: Stepped = values
        return stepped

    def _host_infos(
        self, state: EnvState, terminated: npt.NDArray[np.bool_], truncated: npt.NDArray[np.bool_]
    ) -> dict[str, Any]:
        info = info_arrays(state.info) if self._infos else {}
        if not self._same_step:
            return masked_infos(info, np.asarray(state.valid))
        ended = terminated | truncated
        infos: dict[str, Any] = {}
        if ended.any():
            infos["final_obs"] = self._final_observations(state, ended)
            infos["final_info"] = masked_infos(info, ended)
            infos["_final_obs"], infos["_final_info"] = ended.copy(), ended.copy()
        infos.update(masked_infos(info, ~ended))
        return infos

    def _final_observations(self, state: EnvState, ended: npt.NDArray[np.bool_]) -> npt.NDArray[np.object_]:
        host = jax.tree.map(np.asarray, state.next_obs)
        column = np.full(self._num_envs, None, dtype=object)
        for row in np.flatnonzero(ended).tolist():
            column[row] = rows_of(self._single_space, host, row)
        return column

    def _device_infos(self, state: EnvState) -> dict[str, Any]:
        info = state.info if self._infos else {}
        if not self._same_step:
            return masked_infos(info, state.valid)
        ended = state.terminated | state.truncated
        final = {"final_obs": state.next_obs, "final_info": masked_infos(info, ended)}
        return {**final, "_final_obs": ended, "_final_info": ended, **masked_infos(info, ~ended)}


def compile_now(driver: Driver, chunk: int | None) -> dict[str, float]:
    """Compile reset and step, and ``chunk`` steps in one program; seconds by name. The state is left as it is."""
    functional = driver.functional
    zeros = jax.tree.map(lambda leaf: np.zeros_like(np.asarray(leaf)), functional.action_space.sample())

    def reset() -> None:
        driver.state = None
        seeds = list(range(functional.num_envs))
        driver.begin_reset(Call(Phase.WAITING_RESET, functional.num_envs, by_row=False), seeds, None)
        driver.read(Phase.WAITING_RESET)

    def step() -> None:
        driver.begin_step(Call(Phase.WAITING_STEP, functional.num_envs, by_row=False), zeros)
        driver.read(Phase.WAITING_STEP)

    stages: dict[str, Callable[[], object]] = {"reset": reset, "step": step}
    if chunk:
        many = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (chunk, *leaf.shape)), zeros)
        stages[f"step_chunk({chunk})"] = lambda: driver.chunk(many)
    seconds: dict[str, float] = {}
    kept = driver.latest
    try:
        for name, stage in stages.items():
            start = time.perf_counter()
            stage()
            jax.tree.map(lambda leaf: leaf.block_until_ready(), driver.state)
            seconds[name] = time.perf_counter() - start
    finally:
        driver.latest = kept
    return seconds
