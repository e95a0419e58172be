"""``EnvPoolVectorEnv``: an EnvPool pool behind Gymnasium's vector interface.

This module has the constructors, rendering and what only EnvPool offers. The other methods are those of
:class:`~vecenv.front.vector_env.VectorEnvBase`; :mod:`vecenv.backends.envpool.drivers` executes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from vecenv.backends.envpool.drivers import FirstReadyDriver, PoolDriver, Seeding, WholeBatchDriver
from vecenv.backends.envpool.rows import PoolRows
from vecenv.backends.envpool.task import Seed, Task, check_options, config_seeds, spread_seeds, task_ids
from vecenv.front.arguments import parse_autoreset_mode
from vecenv.front.guard import exclusive
from vecenv.front.vector_env import VectorEnvBase
from vecenv.system.signals import raise_if_from_handler


class PoolVectorEnv(VectorEnvBase[Any, Any, Any]):
    """The base class of vector environments over pools, for one or several players per environment."""

    _driver: PoolDriver

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seeds of the pool, one per environment. ``reset(seed=...)`` with these repeats its trajectories."""
        return tuple(self._driver.seeding.seeds)

    def __repr__(self) -> str:
        if not hasattr(self, "_driver"):
            return f"{type(self).__name__}(closed)"
        name = self.spec.id if self.spec is not None else self._driver.task.id
        batch = f", batch_size={self.batch_size}" if self.batch_size < self.num_envs else ""
        return f"{type(self).__name__}({name}, num_envs={self.num_envs}{batch}, phase={self._phase.name})"


class EnvPoolVectorEnv(PoolVectorEnv):
    """Environments in EnvPool's C++ threads, behind Gymnasium's vector interface.

    No environment is built until the first ``reset``, so ``reset(seed=...)`` right after construction costs nothing extra.

    Args:
        task_id: EnvPool's id of the task, such as ``"Pong-v5"``; see :meth:`task_ids`.
        num_envs: Number of environments.
        batch_size: The number of rows that :meth:`recv` returns, the first ones to finish. It must divide ``num_envs``.
            ``None``: all.
        num_threads: The number of threads that step environments. ``None``: the number of cores, at most ``batch_size``.
        seed: The seed of the first reset, see :meth:`reset`. ``None``: random (EnvPool's own default is 42).
        autoreset_mode: ``AutoresetMode`` or its value. Same-step resets need ``batch_size=None``.
        max_episode_steps: The time limit; ``None``: the task's own.
        render_mode: ``"rgb_array"`` or ``None``.
        **env_config: Options of the task, such as ``frame_skip=4`` or ``episodic_life=True``.

    Raises:
        ImportError: EnvPool is not installed.
        UnregisteredEnv: There is no such task; the message names similar ones.
        TypeError: An option has a value of the wrong type, or is unknown; then the message lists the valid ones.
        ValueError: An option has an invalid value, or the task has several players per environment.
        NotImplementedError: EnvPool's task ignores ``max_episode_steps``.

    Attributes:
        observation_space: The batch of ``single_observation_space``. Bounds are infinite where EnvPool has the extremes of
            the floating-point type.
        task: The description of the task, a :class:`vecenv.backends.envpool.task.Task`.
        batch_size: The number of rows that :meth:`recv` returns.

    A reset with a seed builds a new pool, because EnvPool seeds its environments only during construction. This takes about
    a millisecond for classic control, and 50 ms per environment for Atari. ``None`` in a list of seeds stands for a random
    seed; seeds of 2**31 and more are hashed into EnvPool's range.

    With ``batch_size=None``, one call at a time can be pending, for all or some rows, and ``recv`` returns all its rows in
    the order of the call. Only then is ``options["reset_mask"]`` possible: it resets finished episodes like autoreset (Atari
    with ``episodic_life`` continues the same game), and begins a new game in running ones.

    With a smaller batch, a reset of all environments discards everything in flight (without seeds, after waiting for it),
    and ``recv`` keeps rows beyond ``count`` for the next call. EnvPool returns whole batches only, so ``recv`` also raises
    ``NoAsyncCallError`` if the environments in flight cannot fill one.

    ``step`` returns ``(observations, rewards, terminations, truncations, infos)``. Observations are an array or nested dicts
    of arrays, in ``observation_space``; rewards (float64) and flags (bool) have the shape ``(num_envs,)``; infos is a
    (nested) dict of arrays with a mask ``_key`` for every key, and always contains ``env_id`` and ``elapsed_step``. All
    arrays are new and belong to the caller. A masked reset returns the other rows from the latest observations, which may
    include changes that the caller has made to them.
    """

    def __init__(
        self, task_id: str, num_envs: int = 1, *, batch_size: int | None = None, num_threads: int | None = None,
        seed: Seed = None, autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        max_episode_steps: int | None = None, render_mode: str | None = None, **env_config: Any,
    ) -> None:  # fmt: skip
        self.closed = True  # close() does nothing until the driver exists
        mode = parse_autoreset_mode(autoreset_mode)
        num_envs, batch_size = check_options(num_envs, batch_size, num_threads, max_episode_steps, render_mode, mode)
        task = Task.from_id(
            task_id, env_config, num_envs=num_envs, batch_size=batch_size, num_threads=num_threads or 0,
            max_episode_steps=max_episode_steps, render_mode=render_mode,
        )  # fmt: skip
        self._init_from_task(task, mode, spread_seeds(seed, num_envs, self.np_random), render_mode)

    @classmethod
    def over(cls, pool: Any, *, autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP) -> EnvPoolVectorEnv:
        """Build a vector environment around a pool from ``envpool.make``, of any ``env_type``, that has nothing in flight.

        The vector environment owns the pool from now on. Its first reset uses this pool or, with seeds, builds another one
        with the same configuration.

        Raises:
            TypeError: ``pool`` is not a pool.
            ValueError: An option has an invalid value, or the task has several players per environment.
        """
        envs = cls.__new__(cls)
        envs.closed = True
        task, mode = Task.from_pool(pool), parse_autoreset_mode(autoreset_mode)
        config = task.config
        check_options(config["num_envs"], config["batch_size"] or None, None, None, None, mode)
        envs._init_from_task(task, mode, config_seeds(config), None, pool)
        return envs

    def _init_from_task(
        self, task: Task, mode: AutoresetMode, seeds: list[int], render_mode: str | None, given: Any = None
    ) -> None:
        """Set Gymnasium's attributes, and build the driver. ``given``: a pool for the first reset."""
        self.task = task
        num_envs = int(task.config["num_envs"])
        batch_size = int(task.config["batch_size"]) or num_envs
        if task.max_num_players > 1:
            raise ValueError(
                f"{task.id!r} has up to {task.max_num_players} players per environment, but a Gymnasium vector "
                "environment has one: use vecenv.MultiAgentVecEnv"
            )
        self.num_envs = num_envs
        self.autoreset_mode = mode
        self.render_mode = render_mode
        self.metadata = {"autoreset_mode": mode, "render_modes": ["rgb_array"]}
        self.spec = task.env_spec
        self.single_observation_space = task.observation_space
        self.single_action_space = task.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        driver_type = WholeBatchDriver if batch_size == num_envs else FirstReadyDriver
        self._open(driver_type(task, batch_size, Seeding(seeds, self.np_random, given=given), mode, PoolRows(task)))

    task_ids = staticmethod(task_ids)

    # -- rendering and compiled code -------------------------------------------------------------------------

    @exclusive
    def render(self) -> tuple[npt.NDArray[np.uint8], ...] | None:
        """Return one frame per environment, uint8 of shape ``(height, width, 3)``; ``None`` without a render mode.

        Raises:
            RuntimeError: Environments are in flight, compiled code steps the pool, or the task cannot be rendered here.
            ResetNeeded: Before the first reset.
        """
        driver = self._driver
        driver.require_pool("render")
        if self.render_mode is None:
            return None
        if in_flight := driver.pending_request.rows:
            raise RuntimeError(f"{in_flight} environments are in flight: recv() or *_wait() before render()")
        self.task.require_drawable()
        try:
            return tuple(driver.pool.render(env_ids=driver.all_ids))
        except RuntimeError as error:
            raise RuntimeError(f"EnvPool cannot render {self.task.id!r}: {error}") from error

    @exclusive
    def xla(self) -> tuple[Any, Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
        """Return EnvPool's ``(handle, recv, send, step)`` for use inside ``jax.jit``.

        The functions are EnvPool's own: float32 rewards, no masks, and *no checks of actions*. From then on, compiled code
        steps the pool and bypasses this object, so ``step``, ``send`` and ``recv`` raise; ``reset()`` abandons the pool and
        builds a new one.

        Raises:
            ResetNeeded: Before the first reset.
            AlreadyPendingCallError: A call is pending, or environments are in flight.
            RuntimeError: JAX is missing, EnvPool does not offer this on the platform, or compiled code steps the pool.
        """
        self._driver.require_pool("xla")
        self._driver.require_idle("xla")
        try:
            return self._driver.xla()
        except Exception as error:
            raise_if_from_handler(error, self._driver.pool.xla)
            raise RuntimeError(f"EnvPool cannot compile {self.task.id!r} into JAX programs: {error}") from error

    @property
    def config(self) -> dict[str, Any]:
        """The task's whole configuration: the given options, and EnvPool's defaults for the others."""
        return dict(self.task.config)
