"""``EnvPoolVectorEnv``: a pool behind Gymnasium's vector interface.

This file is what the class takes, and what EnvPool alone can do. Calls are those of
:class:`~vecenv.front.vector_env.VectorEnvBase`; how a pool answers them is in :mod:`vecenv.backends.envpool.drivers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from vecenv.backends.envpool.drivers import FirstReadyDriver, PoolDriver, Seeding, WholeBatchDriver
from vecenv.backends.envpool.rows import PoolRows
from vecenv.backends.envpool.task import Seed, Task, check_options, seeds_within, spread, task_ids
from vecenv.front.arguments import mode_of
from vecenv.front.vector_env import VectorEnvBase, exclusive


class PoolVectorEnv(VectorEnvBase[Any, Any, Any]):
    """What vector environments over pools can tell, whether their environments have one player or several."""

    _driver: PoolDriver

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seeds of the pool, one for each environment: ``reset(seed=...)`` with them repeats what it did."""
        return tuple(self._driver.seeding.seeds)

    def __repr__(self) -> str:
        if not hasattr(self, "_driver"):
            return f"{type(self).__name__}(closed)"
        name = self.spec.id if self.spec is not None else self._driver.task.id
        batch = f", batch_size={self.batch_size}" if self.batch_size < self.num_envs else ""
        return f"{type(self).__name__}({name}, num_envs={self.num_envs}{batch}, phase={self._phase.name})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} owns threads and cannot be copied or pickled: build one where it is to be used"
        )


class EnvPoolVectorEnv(PoolVectorEnv):
    """Environments in EnvPool's C++ threads, behind Gymnasium's vector interface.

    No environment is built until the first ``reset``, so that ``reset(seed=...)`` right after construction costs nothing.

    Args:
        task_id: EnvPool's, as ``"Pong-v5"``; see :meth:`task_ids`.
        num_envs: Number of environments.
        batch_size: Rows that :meth:`recv` returns, of those that finish first; must divide ``num_envs``. ``None``: all.
        num_threads: Threads that step; ``None``: as many as the machine has, at most ``batch_size``.
        seed: Of the first reset, see :meth:`reset`. ``None``: random (EnvPool's own default is 42 for all).
        autoreset_mode: ``AutoresetMode`` or its value. Same-step resets need ``batch_size=None``.
        max_episode_steps: The time limit; ``None``: the task's own.
        render_mode: ``"rgb_array"`` or ``None``.
        **env_config: Options of the task, as ``frame_skip=4`` or ``episodic_life=True``.

    Raises:
        ImportError: EnvPool is not installed.
        UnregisteredEnv: No such task; names close ones.
        TypeError: An unknown option; lists the right ones.
        ValueError: An option has no meaning; several players per environment.

    Attributes:
        observation_space: ``single_observation_space`` batched, with infinite bounds where EnvPool says the extremes of
            the floating-point type.
        task: Everything that is known of the task; see :class:`vecenv.backends.envpool.task.Task`.
        batch_size: Rows that :meth:`recv` returns.

    A seed given to ``reset`` builds a new pool, because EnvPool seeds only then: about a millisecond for classic control,
    50 ms an environment for Atari. ``None`` in a list of seeds is a random one; seeds of 2**31 and more are hashed into
    EnvPool's range. ``options["reset_mask"]`` wants ``batch_size=None``: episodes that are over are reset as autoreset
    would do it (Atari with ``episodic_life`` goes on with the same game), running ones by force. With a smaller batch, a
    reset of all waits for everything in flight and drops it, and ``recv`` keeps for the next call what the pool gave
    beyond ``count``; EnvPool hands out whole batches, so ``NoAsyncCallError`` is also what cannot fill one. With
    ``batch_size=None`` there is one outstanding call at a time, of any environments, which ``recv`` answers as a whole, in
    its order.

    ``step`` returns ``(observations, rewards, terminations, truncations, infos)``: an array or nested dicts of arrays of
    ``observation_space``; rewards float64, flags bool, all of shape ``(num_envs,)``; infos a dict of arrays with a mask
    ``_key`` for every key, always with ``env_id`` and ``elapsed_step``. All arrays are fresh and the caller's own, except
    that a later masked reset returns the rows of environments that it did not reset as the latest observations then are.
    """

    def __init__(
        self, task_id: str, num_envs: int = 1, *, batch_size: int | None = None, num_threads: int | None = None,
        seed: Seed = None, autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        max_episode_steps: int | None = None, render_mode: str | None = None, **env_config: Any,
    ) -> None:  # fmt: skip
        self.closed = True  # until there is something to close
        mode = mode_of(autoreset_mode)
        num_envs, batch_size = check_options(num_envs, batch_size, num_threads, max_episode_steps, render_mode, mode)
        task = Task.of(
            task_id, env_config, num_envs=num_envs, batch_size=batch_size, num_threads=num_threads or 0,
            max_episode_steps=max_episode_steps, render_mode=render_mode,
        )  # fmt: skip
        self._around(task, mode, spread(seed, num_envs, self.np_random), render_mode)

    @classmethod
    def over(cls, pool: Any, *, autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP) -> EnvPoolVectorEnv:
        """Around a pool that ``envpool.make`` built, of any ``env_type``; nothing of it may be in flight.

        The first reset without a seed is of that very pool; a seed builds another of the same configuration. From then on
        the pool belongs to the vector environment.

        Raises:
            TypeError: No pool.
            ValueError: Options that have no meaning, as for the class; several players per environment.
        """
        envs = cls.__new__(cls)
        envs.closed = True
        task, mode = Task.of_pool(pool), mode_of(autoreset_mode)
        config = task.config
        check_options(config["num_envs"], config["batch_size"] or None, None, None, None, mode)
        envs._around(task, mode, seeds_within(config), None)
        return envs

    def _around(self, task: Task, mode: AutoresetMode, seeds: list[int], render_mode: str | None) -> None:
        """Gymnasium's attributes, and the driver."""
        self.task = task
        num_envs = int(task.config["num_envs"])
        batch_size = int(task.config["batch_size"]) or num_envs
        if task.max_num_players > 1:
            raise ValueError(
                f"{task.id!r} has up to {task.max_num_players} players an environment, and a Gymnasium vector "
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
        drive = WholeBatchDriver if batch_size == num_envs else FirstReadyDriver
        self._open(drive(task, batch_size, Seeding(seeds, self.np_random), mode, PoolRows(task)))

    task_ids = staticmethod(task_ids)

    # -- pictures and compiled code --------------------------------------------------------------------------

    @exclusive
    def render(self) -> tuple[npt.NDArray[np.uint8], ...] | None:
        """One frame an environment, uint8 of shape ``(height, width, 3)``; ``None`` without a render mode.

        Raises:
            RuntimeError: Environments are in flight; this task cannot be drawn on this machine.
            ResetNeeded: Before the first reset.
        """
        driver = self._driver
        driver.require_pool("render")
        if self.render_mode is None:
            return None
        if flying := driver.outstanding.rows:
            raise RuntimeError(f"{flying} environments are in flight: recv() or *_wait() before render()")
        self.task.require_drawable()
        try:
            return tuple(driver.pool.render(env_ids=driver.all_ids))
        except RuntimeError as error:
            raise RuntimeError(f"EnvPool cannot draw {self.task.id!r}: {error}") from error

    @exclusive
    def xla(self) -> tuple[Any, Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
        """EnvPool's ``(handle, recv, send, step)`` for use inside ``jax.jit``.

        What these functions take and return is EnvPool's own: float32 rewards, no masks, and *no checks of actions*. From
        here on the pool is stepped by compiled code behind this object's back, so ``step``, ``send`` and ``recv`` refuse;
        ``reset()`` takes leave of that pool and builds a new one.

        Raises:
            ResetNeeded: Before the first reset (``reset_async`` with first-ready batches).
            RuntimeError: JAX is missing, or EnvPool does not offer this on the platform.
        """
        self._driver.require_pool("xla")
        try:
            return self._driver.lend()
        except Exception as error:
            raise RuntimeError(f"EnvPool cannot compile {self.task.id!r} into JAX programs: {error}") from error

    @property
    def config(self) -> dict[str, Any]:
        """The task's whole configuration, as EnvPool completed it (with the time limit asked for)."""
        return dict(self.task.config)
