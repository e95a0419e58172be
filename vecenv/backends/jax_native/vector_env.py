"""``JaxVectorEnv``: functional environments behind Gymnasium's vector interface.

All the work is done by :class:`vecenv.jax.FunctionalVectorEnv`, compiled; this class holds the state that Gymnasium's
interface hides, hands results over as numpy, JAX or torch, and speaks Gymnasium's language of seeds, masks and infos. The
state is not hidden for good: read ``envs.state`` to keep a checkpoint, assign it to return there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from gymnasium.vector import VectorEnv

from vecenv.backends.jax_native.building import functional_of
from vecenv.backends.jax_native.driver import Driver
from vecenv.backends.jax_native.owed import Owed
from vecenv.backends.jax_native.resets import mask_of
from vecenv.backends.jax_native.results import Stepped
from vecenv.backends.jax_native.warmup import compile_now
from vecenv.errors import StepTimeout
from vecenv.front.arguments import count_of, env_ids_of, seeds_of
from vecenv.front.attributes import NoAttributes
from vecenv.front.capabilities import Capabilities, figures, unable
from vecenv.front.deadlines import deadline_of
from vecenv.front.guard import one_call, refuse_closed
from vecenv.front.phases import Phase
from vecenv.jax.native.handover import require_torch
from vecenv.jax.native.state import EnvState

__all__ = ["JaxVectorEnv"]

_CAPABILITIES = Capabilities(
    "jax", attributes=False, first_ready=False, reset_options=False, in_this_process=True, runs_jax=True
)

R = TypeVar("R")

_one_call = one_call("JAX")


class JaxVectorEnv(NoAttributes, VectorEnv[Any, Any, Any]):
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

    _why_no_attributes = "its environments are rows of one compiled function, without methods or attributes of their own"

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
        self.closed = True  # until there is something to close
        if to not in ("numpy", "jax", "torch"):
            raise ValueError(f"to must be 'numpy', 'jax' or 'torch', got {to!r}.")
        if to == "torch":
            require_torch()
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode must be None or 'rgb_array', got {render_mode!r}.")
        functional = functional_of(env, num_envs, library, options)
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
        self._driver = Driver(functional, to, infos)
        self._owed = Owed(self, self.num_envs)
        self._steps = self._resets = 0
        self._began = time.monotonic()
        self._figures: dict[str, float] | None = None  # the last, after close()
        self._owner, self._caller = os.getpid(), 0
        self.closed = False

    # -- reset -----------------------------------------------------------------------------------------------------

    @_one_call
    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes; what was sent and not received is dropped.

        Args:
            seed: An int s (environment i gets s + i), a list of one int or ``None`` an environment, or ``None``: each goes
                on to the next episode of its own stream (the first time, of an unpredictable one).
            options: ``options["reset_mask"]``, ``bool[num_envs]``, chooses the environments to reset; the others stay as
                they are. The dict is not changed.

        Returns:
            Observations of all environments, and ``{}``.

        Raises:
            ValueError: A list of seeds or a mask of the wrong length, a mask without any True, any other option.
            TypeError: Seeds that are none; a mask that is no array of bool.
            gymnasium.error.ResetNeeded: The first reset is not of all environments.
            gymnasium.error.AlreadyPendingCallError: The answer to ``step_async`` or ``reset_async`` is owed.
        """
        self.reset_async(seed, options)
        return self.reset_wait()

    @_one_call
    def reset_async(self, seed: Any = None, options: dict[str, Any] | None = None, *, env_id: Any = None) -> None:
        """Begin a reset, answered by :meth:`reset_wait`, or by :meth:`recv`.

        Args:
            seed, options: As for :meth:`reset`.
            env_id: ``None``, or all indices in order: then it is answered by :meth:`recv` only.

        Raises:
            NotImplementedError: ``env_id`` names only some environments.
        """
        if env_id is not None:
            self._require_everybody(env_id, "reset_async")
        seeds = seeds_of(seed, self.num_envs)
        owed, driver = self._owed, self._driver
        owed.require_phase("reset_async")
        mask = mask_of(options, self.num_envs)
        if env_id is not None:
            if mask is not None:
                raise ValueError("env_id and options['reset_mask'] both say which environments are to be reset: give one")
            owed.require_idle("reset_async")
        rows = self.num_envs if mask is None else int(np.count_nonzero(mask))
        before = driver.state
        try:
            driver.reset(seeds, mask)
        finally:
            if driver.state is not before:
                owed.enter(Phase.WAITING_RESET, rows, by_row=env_id is not None)
                self._resets += rows

    @_one_call
    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Fetch the answer to :meth:`reset_async`; as :meth:`reset`.

        Raises:
            gymnasium.error.NoAsyncCallError: There is none.
            vecenv.errors.StepTimeout: The device is not ready within ``timeout`` seconds; the answer is still owed.
        """
        self._owed.require_phase("reset_wait")
        return self._read("reset_wait", timeout, self._driver.reader.observations), {}

    # -- step ------------------------------------------------------------------------------------------------------

    @_one_call
    def step(self, actions: Any) -> Stepped:
        """One step of every environment.

        Args:
            actions: A batch from ``action_space``: numpy, JAX or torch arrays, or lists. Nothing is clipped to bounds.

        Returns:
            ``(observations, rewards, terminations, truncations, infos)``; for numpy ``float64`` rewards and ``bool`` flags.

        Raises:
            gymnasium.error.ResetNeeded: Before the first ``reset``.
            ValueError: Actions of the wrong shape, structure or number. ``TypeError``: of the wrong kind of dtype.
            gymnasium.error.AlreadyPendingCallError: An answer is owed.
        """
        self.step_async(actions)
        return self.step_wait()

    @_one_call
    def step_async(self, actions: Any) -> None:
        """Begin a step and return at once; see :meth:`step` and :meth:`step_wait`. The device works meanwhile."""
        self._owed.require_phase("step_async")
        self._owed.require_idle("step_async")
        self._ask_step(actions, by_row=False)

    @_one_call
    def step_wait(self, timeout: float | None = None) -> Stepped:
        """Fetch the answer to :meth:`step_async`; as :meth:`step`.

        Raises:
            gymnasium.error.NoAsyncCallError: There is none.
            vecenv.errors.StepTimeout: The device is not ready within ``timeout`` seconds; the answer is still owed.
        """
        self._owed.require_phase("step_wait")
        return self._read("step_wait", timeout, self._driver.reader.stepped)

    # -- send and recv ---------------------------------------------------------------------------------------------

    @_one_call
    def send(self, actions: Any, env_id: Any = None) -> None:
        """Begin a step and return at once; :meth:`recv` gives its results.

        Args:
            actions: As for :meth:`step`.
            env_id: All environments step together: ``None``, or all indices in order.

        Raises:
            ValueError: ``env_id`` is no sequence of distinct indices.
            NotImplementedError: It names only some environments.
            gymnasium.error.AlreadyPendingCallError: What was sent before has not been received.
        """
        if env_id is not None:
            self._require_everybody(env_id, "send")
        self._owed.require_phase("step_async")
        self._owed.require_idle("send")
        self._ask_step(actions, by_row=True)

    @_one_call
    def recv(self, timeout: float | None = None, *, count: int | None = None) -> Stepped:
        """The results of :meth:`send` or :meth:`reset_async`, of all environments.

        Args:
            timeout: Seconds to wait at most; afterwards ``recv`` may be called again.
            count: ``None`` or ``num_envs``.

        Returns:
            As :meth:`step`. ``infos["env_id"]`` is ``arange(num_envs)``. After a reset, rewards are 0 and flags False.

        Raises:
            gymnasium.error.NoAsyncCallError: Not all environments are in flight.
            NotImplementedError: Another ``count``.
            vecenv.errors.StepTimeout: The device is not ready.
        """
        number = count_of(count, self.num_envs, self.num_envs)
        if number != self.num_envs:
            unable(self, f"recv {number} of {self.num_envs} environments", "all of them are done at the same time")
        self._owed.require_in_flight()
        return self._read("recv", timeout, self._received)

    def _received(self, state: EnvState) -> Stepped:
        stepped = self._driver.reader.stepped(state, infos=self._owed.kind is Phase.WAITING_STEP)
        infos = stepped[4]
        infos["env_id"], infos["_env_id"] = np.arange(self.num_envs, dtype=np.intp), np.ones(self.num_envs, np.bool_)
        return stepped

    # the second set of names
    reset_send = reset_async
    reset_fetch = reset_wait
    step_send = step_async
    step_fetch = step_wait

    @_one_call
    def render(self, indices: Sequence[int] | None = None) -> tuple[Any, ...] | None:
        """Frames ``uint8[height, width, 3]`` of the chosen environments (default, all), drawn one after the other.

        Raises:
            gymnasium.error.ResetNeeded: Before the first ``reset``.
            RuntimeError: MuJoCo found no OpenGL; says what to set.
            NotImplementedError: The library cannot draw this environment.
            gymnasium.error.AlreadyPendingCallError: An answer is owed.
        """
        self._owed.require_idle("render")
        if self.render_mode is None:
            return None
        inner = self._driver.current().inner.env
        single: Any = self.functional.single_env
        chosen = range(self.num_envs) if indices is None else indices
        return tuple(single.render(jax.tree.map(lambda leaf, i=i: leaf[i], inner)) for i in chosen)

    @property
    def np_random_seed(self) -> tuple[int | None, ...]:  # type: ignore[override]
        """The seed each environment was last given; ``None`` where its stream came from a state that was assigned."""
        return tuple(self._driver.seeds)

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do."""
        return _CAPABILITIES

    @property
    def batch_size(self) -> int:
        """Rows that :meth:`recv` returns: all."""
        return self.num_envs

    def stats(self) -> dict[str, float]:
        """Figures since construction, with the keys of :meth:`vecenv.AsyncVectorEnv.stats`; nan where there is none.

        ``steps`` of environments, those of :meth:`step_chunk` included; ``steps_per_second``; ``wait_fraction`` (of the
        time, spent waiting for the device; what ``to="jax"`` and ``"torch"`` leave to the caller is not in it); ``resets``
        asked for; ``in_flight``. After :meth:`close` they stay as they were.
        """
        if self._figures is not None:
            return dict(self._figures)
        elapsed = max(time.monotonic() - self._began, 1e-9)
        return figures(
            {
                "steps": float(self._steps),
                "steps_per_second": self._steps / elapsed,
                "wait_fraction": self._driver.reader.waited / elapsed,
                "resets": float(self._resets),
                "restarts": 0.0,
                "errors": 0.0,
                "bytes_pickled": 0.0,
                "in_flight": float(self._owed.rows),
            }
        )

    def __repr__(self) -> str:
        if not hasattr(self, "_owner"):
            return f"{type(self).__name__}(closed)"
        name = self.spec.id if self.spec is not None else getattr(self.functional.single_env, "name", "env")
        phase = "pending" if self._owed.rows else "before reset" if self._driver.state is None else "ready"
        return (
            f"{type(self).__name__}({name}, num_envs={self.num_envs}, to={self.to!r}, "
            f"autoreset_mode={self.autoreset_mode.name}, {'closed' if self.closed else phase})"
        )

    # -- beyond Gymnasium ------------------------------------------------------------------------------------------

    @property
    @_one_call
    def state(self) -> EnvState:
        """Everything, as a pytree: a copy, which later steps do not touch. Assign it to return there, as often as you like.

        Raises (assigning):
            TypeError, ValueError: No state of such an environment, or of another number of them.
            StaleStateError: Its arrays have been donated to another computation.
        """
        self._owed.require_idle("state")
        return self._driver.copied()

    @state.setter
    @_one_call
    def state(self, state: EnvState) -> None:
        self._owed.require_idle("state")
        self._driver.assign(state)

    @_one_call
    def step_chunk(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """``T`` steps in one compiled call; on small environments up to four times faster than ``T`` calls.

        Args:
            actions: Leaves ``[T, num_envs, ...]``. Every new ``T`` is compiled once.

        Returns:
            As ``step``, with a leading axis ``T`` everywhere. ``infos`` holds the metrics, and ``"next_obs"`` (the true
            successors, in every autoreset mode) and ``"valid"`` (``bool[T, num_envs]``, false on steps that only reset).
        """
        self._owed.require_idle("step_chunk")
        length, stepped = self._driver.chunk(actions)
        self._steps += length * self.num_envs
        return stepped

    @_one_call
    def warmup(self, chunk: int | None = None, progress: bool | None = None) -> dict[str, float]:
        """Compile everything now, rather than in the first reset and step; the environments are left as they are.

        Args:
            chunk: Also compile ``step_chunk`` of so many steps.
            progress: Show a spinner; default, when stderr is a terminal (needs the package ``rich``).

        Returns:
            Seconds it took, by function: mostly compilation, ``{"reset": ..., "step": ...}``. Also in ``compile_seconds``.
        """
        self._owed.require_idle("warmup")
        self.compile_seconds |= compile_now(self._driver, chunk, progress)
        return dict(self.compile_seconds)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close_extras(self, **kwargs: Any) -> None:
        """Let go of the state on the device; the compiled functions go with the last user of ``functional``.

        Args:
            **kwargs: ``timeout`` and ``terminate`` of other vector environments; without meaning here.
        """
        self._figures = self.stats()
        self.closed = True  # before anything is missing: a call in the middle of which this comes says so
        if os.getpid() == self._owner:  # elsewhere, the device's memory is not ours to free
            self._driver.forget()
            self._owed.settle()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _require_everybody(self, env_id: Any, method: str) -> None:
        if not np.array_equal(env_ids_of(env_id, self.num_envs), np.arange(self.num_envs)):
            unable(self, f"{method} to some environments", "they step together: name all of them, in order, or none")

    def _ask_step(self, actions: Any, by_row: bool) -> None:
        owed, driver = self._owed, self._driver
        before = driver.state
        try:
            driver.step(actions)
        finally:
            if driver.state is not before and driver.state is not None:
                owed.enter(Phase.WAITING_STEP, self.num_envs, by_row)
                self._steps += self.num_envs

    def _read(self, method: str, timeout: float | None, read: Callable[[EnvState], R]) -> R:
        """The answer that is owed; once it has been read it is owed no more."""
        driver, owed = self._driver, self._owed
        if self.closed:
            refuse_closed(self)
        state = driver.current()
        if timeout is not None:
            self._wait(state, method, timeout)
        try:
            answer = read(state)
        except (jax.errors.JaxRuntimeError, ValueError):  # an environment's own: the answer, and no state to go on from
            driver.state = None
            owed.settle()
            raise
        if self.closed:  # meanwhile, by another thread or a signal handler
            refuse_closed(self)
        owed.settle()
        return answer

    def _wait(self, state: EnvState, method: str, timeout: float) -> None:
        deadline = deadline_of(timeout)
        if deadline is not None and not self._driver.reader.wait(state, deadline):
            raise StepTimeout(
                f"The call to `{method}` has timed out after {timeout} second(s).\n"
                "The answer is still owed: wait again, or close()."
            )
