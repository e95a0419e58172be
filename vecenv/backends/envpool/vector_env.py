"""``EnvPoolVectorEnv``: what a program written for Gymnasium's vector environments sees of a pool.

This file is the outside: arguments, phases and their errors, seeds and masks, and the order in which things are said. What
belongs to one pool is in its driver; which pool there is, in ``pools``; that no answer is lost on its way out, in ``calls``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from threading import get_ident
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from gymnasium.error import NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from vecenv.backends.envpool import rendering
from vecenv.backends.envpool.actions import ActionChecker, with_dtype
from vecenv.backends.envpool.calls import answering, leave, one_at_a_time, refuse
from vecenv.backends.envpool.driver import Driver, Rows, Settings
from vecenv.backends.envpool.first_ready import FirstReady
from vecenv.backends.envpool.lockstep import Lockstep
from vecenv.backends.envpool.options import check_options
from vecenv.backends.envpool.over_pools import OverPools
from vecenv.backends.envpool.pools import Pools
from vecenv.backends.envpool.rows import Array, Infos, RowReader
from vecenv.backends.envpool.seeds import Seed, spread
from vecenv.backends.envpool.task import Task, task_ids
from vecenv.front.arguments import count_of
from vecenv.front.capabilities import Capabilities, unable
from vecenv.front.deadlines import deadline_of
from vecenv.front.gymnasiums import NotClosedUnasked
from vecenv.front.phases import Phase, advance

__all__ = ["EnvPoolVectorEnv"]

StepResult = tuple[Any, Array, npt.NDArray[np.bool_], npt.NDArray[np.bool_], Infos]


class EnvPoolVectorEnv(NotClosedUnasked, OverPools, VectorEnv[Any, Any, npt.NDArray[Any]]):
    """Environments in EnvPool's C++ threads, behind Gymnasium's vector interface.

    No environment is built until the first ``reset``, so that ``reset(seed=...)`` right after construction costs nothing.

    Args:
        task_id: EnvPool's, as ``"Pong-v5"``; see :meth:`task_ids`.
        num_envs: Number of environments.
        batch_size: Rows that :meth:`recv` returns, of whoever finished first; must divide ``num_envs``. ``None``: all.
        num_threads: Threads that step; ``None``: as many as the machine has, at most ``batch_size``.
        thread_affinity_offset: Pin the threads to cores from this one on (Linux). -1: do not.
        seed: Of the first reset, see :meth:`reset`. ``None``: random (EnvPool's own default is 42 for everybody).
        autoreset_mode: ``AutoresetMode`` or its value. Same-step resets need ``batch_size=None``.
        max_episode_steps: The time limit; ``None``: the task's own.
        exact_time_limit: Keep the time limit here instead of in the pool, so that an episode that ends on its last allowed
            step is reported as terminated *and* truncated. EnvPool says truncated only. Costs one more round trip in
            steps that begin a truncated environment's next episode; only for families whose dynamics and rewards do not
            depend on the limit (classic control, toy text, Box2D, MuJoCo of Gymnasium and Gymnasium-Robotics).
        reward_dtype: float64 is Gymnasium's; ``None`` leaves EnvPool's float32.
        action_dtype: A floating-point dtype for ``action_space``, where EnvPool's float64 is not wanted. Actions of any
            such dtype are accepted in any case.
        validate: ``"safe"`` checks shape, dtype and integer range of actions; ``"full"`` also that floats are finite and
            within the bounds of the space.
        info_keys: Infos to return, for instance without Atari's ``ram``; ``None``: all.
        render_mode: ``"rgb_array"`` or ``None``.
        **env_config: Options of the task, as ``frame_skip=4`` or ``episodic_life=True``.

    Raises:
        ImportError: EnvPool is not installed.
        UnregisteredEnv: No such task; names close ones.
        TypeError: An unknown option; lists the right ones.
        ValueError: An option has no meaning; several players an environment.

    Attributes:
        observation_space: ``single_observation_space`` batched, with infinite bounds where EnvPool says the extremes of
            the floating-point type.
        task: Everything that is known of the task; see :class:`vecenv.backends.envpool.task.Task`.
        batch_size: Rows that :meth:`recv` returns.

    ``step`` returns ``(observations, rewards, terminations, truncations, infos)``: an array or nested dicts of arrays of
    ``observation_space``; rewards float64, flags bool, all of shape ``(num_envs,)``; infos a dict of arrays with a mask
    ``_key`` for every key, always with ``env_id`` and ``elapsed_step``. All arrays are fresh and the caller's own, except
    that a later masked reset returns the rows of environments that it did not reset as the latest observations then are.
    """

    def __init__(
        self,
        task_id: str,
        num_envs: int = 1,
        *,
        batch_size: int | None = None,
        num_threads: int | None = None,
        thread_affinity_offset: int = -1,
        seed: Seed = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        max_episode_steps: int | None = None,
        exact_time_limit: bool = False,
        reward_dtype: npt.DTypeLike | None = np.float64,
        action_dtype: npt.DTypeLike | None = None,
        validate: str = "safe",
        info_keys: Collection[str] | None = None,
        render_mode: str | None = None,
        **env_config: Any,
    ) -> None:
        self.closed = True  # until there is something to close
        mode = AutoresetMode(autoreset_mode)
        num_envs, batch_size = check_options(
            num_envs, batch_size, num_threads, max_episode_steps, validate, render_mode, mode
        )
        self.task = Task.of(
            task_id, num_envs=num_envs, batch_size=batch_size, num_threads=num_threads or 0,
            thread_affinity_offset=thread_affinity_offset,
            max_episode_steps=max_episode_steps,
            exact_time_limit=exact_time_limit,
            render_mode=render_mode,
            env_config=env_config,
        )  # fmt: skip
        if self.task.max_num_players > 1:
            raise ValueError(
                f"{task_id!r} has up to {self.task.max_num_players} players an environment, and a Gymnasium vector "
                "environment has one: use vecenv.MultiAgentVecEnv"
            )
        self.num_envs = num_envs
        self.batch_size = batch_size
        self.autoreset_mode = mode
        self.render_mode = render_mode
        self.metadata = {"autoreset_mode": mode, "render_modes": ["rgb_array"]}
        self.spec = self.task.env_spec
        self.single_observation_space = self.task.observation_space
        self.single_action_space = with_dtype(self.task.action_space, action_dtype)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._reader = RowReader(
            self.task.state_keys, self.single_observation_space, info_keys=info_keys, reward_dtype=reward_dtype,
            limit=self.task.limit,
        )  # fmt: skip
        keys, dtypes = self.task.action_keys[2:], self.task.action_dtypes[2:]
        self._checker = ActionChecker(self.task.action_space, keys, dtypes, full=validate == "full")
        limited_here = self.task.limit is not None
        settings = Settings(self._reader, self._checker, mode, num_envs, batch_size, limited_here)
        drive = Lockstep if batch_size == num_envs else FirstReady
        self._open(Pools(self.task, lambda pool: drive(pool, settings), spread(seed, num_envs, self.np_random)))

    task_ids = staticmethod(task_ids)

    # -- reset -----------------------------------------------------------------------------------------------

    @answering
    def reset(self, *, seed: Seed = None, options: dict[str, Any] | None = None) -> tuple[Any, Infos]:
        """Reset all environments, or those of ``options["reset_mask"]``.

        With ``batch_size`` smaller than ``num_envs``, everything in flight is waited for and dropped first.

        Args:
            seed: An integer gives environment i ``seed + i``; a sequence of ``num_envs`` gives each its own, where
                ``None`` means a random one. Building a new pool is how EnvPool is seeded: about a millisecond for classic
                control, 50 ms an environment for Atari. Seeds of 2**31 and more are hashed into EnvPool's range.
                ``None`` goes on with the random numbers there are.
            options: ``{"reset_mask": mask}``, a bool array of shape ``(num_envs,)``, not changed: only these
                environments are reset. Episodes that are over are reset as autoreset would do it (Atari with
                ``episodic_life`` goes on with the same game), running ones by force.

        Returns:
            Observations of all environments; infos, whose masks are False for environments that were not reset.

        Raises:
            AlreadyPendingCallError: The answer to ``step_async`` or ``reset_async`` is owed.
            TypeError, ValueError: Seeds, mask or options of the wrong kind; nothing was sent.
            NotImplementedError: Seed and mask together; a mask with first-ready batches.
            ResetNeeded: The first reset must be of all environments.
        """
        return self._reset_result(self._begin_reset(seed, options, None), None)

    @one_at_a_time
    def reset_async(self, seed: Seed = None, options: dict[str, Any] | None = None, *, env_id: Any = None) -> None:
        """Begin a reset; :meth:`reset_wait` fetches it for everybody, :meth:`recv` as it comes.

        Args:
            seed, options: As for :meth:`reset`.
            env_id: Only these environments, which must not be in flight; as with a mask. :meth:`recv` fetches the answers.
        """
        self._begin_reset(seed, options, env_id)

    @answering
    def reset_wait(self, timeout: float | None = None) -> tuple[Any, Infos]:
        """Fetch the answer to :meth:`reset_async`; as :meth:`reset`.

        Raises:
            StepTimeout: Not within ``timeout`` seconds; the answer is still owed, call again.
        """
        driver = self._pool_driver("reset_wait")
        advance(driver.phase, "reset_wait", self)
        return self._reset_result(driver, timeout)

    def _reset_result(self, driver: Driver[Rows], timeout: float | None) -> tuple[Any, Infos]:
        rows, states, leaves, *_ = driver.finish(deadline_of(timeout))
        reader = self._reader
        if rows is driver.everyone:
            return reader.build(leaves), reader.infos(states, rows.copy())
        assert isinstance(driver, Lockstep)
        return reader.build(driver.whole()), reader.scattered_infos(states, rows, self.num_envs)

    # -- step ------------------------------------------------------------------------------------------------

    @answering
    def step(self, actions: Any) -> StepResult:
        """Step all environments.

        Args:
            actions: A batch of ``action_space``. For Box any number dtype (cast), and ``(num_envs,)`` where each action is
                one number; for Discrete any integer dtype.

        Returns:
            ``(observations, rewards, terminations, truncations, infos)``, see the class. In same-step mode,
            ``infos["final_obs"]``, an object array with the last observations of the episodes that ended (copies), and
            ``infos["final_info"]``, each with its mask.

        Raises:
            ValueError, TypeError: Actions of the wrong shape, dtype or range; nothing was sent.
            ResetNeeded: Before the first reset; without autoreset, where an episode is over.
            AlreadyPendingCallError: An answer is owed, or an environment is in flight.
        """
        driver = self._pools.driver
        if driver is None or driver.wire:
            driver = self._pool_driver("step_async")
        driver.begin_step("step", self._checker(actions, driver.all_ids), driver.all_ids)
        self._steps += self.num_envs
        return self._step_result(driver, None)

    @one_at_a_time
    def step_async(self, actions: Any) -> None:
        """Begin a step; see :meth:`step` and :meth:`step_wait`."""
        driver = self._pool_driver("step_async")
        driver.begin_step("step", self._checker(actions, driver.all_ids), driver.all_ids)
        self._steps += self.num_envs

    @answering
    def step_wait(self, timeout: float | None = None) -> StepResult:
        """Fetch the answer to :meth:`step_async`; as :meth:`step`.

        Raises:
            StepTimeout: Not within ``timeout`` seconds; the answer is still owed, call again.
        """
        driver = self._pool_driver("step_wait")
        advance(driver.phase, "step_wait", self)
        if driver.call != "step":
            raise NoAsyncCallError("Calling `step_wait` after `send`: `recv` its rows.", "step")
        return self._step_result(driver, timeout)

    def _step_result(self, driver: Driver[Rows], timeout: float | None) -> StepResult:
        rows = driver.finish(deadline_of(timeout))
        return self._dressed(rows, self._reader.infos(rows[1], rows[0].copy()))

    def _dressed(self, rows: Rows, infos: Infos) -> StepResult:
        _, states, leaves, terminated, truncated, final = rows
        if final is not None:
            infos |= final
        return self._reader.build(leaves), self._reader.rewards(states), terminated, truncated, infos

    # -- first-ready batches ---------------------------------------------------------------------------------
    # (The guard is in place here: in small batches even the decorator counts.)

    def send(self, actions: Any, env_id: Any = None) -> None:
        """Step some environments that are not in flight, without waiting.

        Args:
            actions: As many as there are in ``env_id``, in its order; copied.
            env_id: Distinct indices; ``None``: those of the latest :meth:`recv`, or all after a reset.

        Raises:
            ValueError, TypeError: Actions, or indices, that are wrong; nothing was sent.
            AlreadyPendingCallError: One of them is in flight. With ``batch_size=num_envs`` there can be only one
                outstanding call, of any environments.
            ResetNeeded: Before the first reset; without autoreset, where an episode is over.
        """
        me, outer = get_ident(), self._caller
        if outer and outer != me:
            refuse(self, "send")
        try:
            self._caller = me
            driver = self._pools.driver or self._pool_driver("send")
            ids = driver.choose(env_id)
            driver.begin_step("send", self._checker(actions, ids), ids)
            self._steps += len(ids)
            self._caller = outer
        except BaseException as error:
            leave(self, outer, error)
            raise

    def recv(self, timeout: float | None = None, *, count: int | None = None) -> StepResult:
        """The next ``count`` environments that are done, whoever was first.

        Args:
            timeout: Seconds to wait at most.
            count: How many, 1 to ``num_envs``; ``None``: ``batch_size``. EnvPool hands out whole batches of ``batch_size``;
                what is more than ``count`` is kept for the next call. With ``batch_size=num_envs`` it is always all the
                environments of the outstanding call, in its order, and ``count`` can only be their number.

        Returns:
            As :meth:`step`, with so many rows. ``infos["env_id"]``, int ``(count,)``, tells which environments they are.
            Rows of a reset have reward 0 and both flags False.

        Raises:
            NoAsyncCallError: Fewer than ``count`` environments are in flight; or EnvPool cannot fill a batch with them.
            AlreadyPendingCallError: The answer to :meth:`step_async` is owed.
            NotImplementedError: With ``batch_size=num_envs``, fewer than the outstanding call has.
            StepTimeout: Not within ``timeout`` seconds; nothing is lost, call again.
        """
        me, outer = get_ident(), self._caller
        if outer and outer != me:
            refuse(self, "recv")
        try:
            self._caller = me
            driver = self._pools.driver or self._pool_driver("recv")
            if count is not None:
                count = self._count(driver, count)
            rows = driver.recv(count, None if timeout is None else deadline_of(timeout))
            answer = self._dressed(rows, self._reader.infos_of_rows(rows[1], rows[0]))
            taken, after = driver.after
            self._caller = outer
        except BaseException as error:
            leave(self, outer, error)
            raise
        # one line: see calls
        del driver.wire[:taken]; driver.call, driver.latest, driver.offset, driver.held = after; return answer  # noqa: E702

    def _count(self, driver: Driver[Rows], count: Any) -> int:
        number = count_of(count, self.batch_size, self.num_envs)
        if self.batch_size == self.num_envs and number < (flying := driver.flying()):
            why = "with batch_size=num_envs EnvPool answers a call as a whole"
            unable(self, f"`recv` {number} of {flying} environments", why)
        return number

    reset_send = reset_async
    reset_fetch = reset_wait
    step_send = step_async
    step_fetch = step_wait

    # -- pictures and compiled code --------------------------------------------------------------------------

    @one_at_a_time
    def render(self) -> tuple[npt.NDArray[np.uint8], ...] | None:
        """One frame an environment, uint8 of shape ``(height, width, 3)``; ``None`` without a render mode.

        Raises:
            RuntimeError: Environments are in flight; this task cannot be drawn on this machine.
            ResetNeeded: Before the first reset.
        """
        driver = self._pool_driver("render")
        if self.render_mode is None:
            return None
        if driver.flying():
            raise RuntimeError(f"{driver.flying()} environments are in flight: recv() or *_wait() before render()")
        rendering.require(self.task)
        return tuple(rendering.frames(driver.pool, driver.all_ids, self.task))

    @one_at_a_time
    def xla(self) -> tuple[Any, Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
        """EnvPool's ``(handle, recv, send, step)`` for use inside ``jax.jit``.

        What these functions take and return is EnvPool's own: float32 rewards, no masks, and *no checks of actions*. From
        here on the pool is stepped by compiled code behind this object's back, so ``step``, ``send`` and ``recv`` refuse;
        ``reset()`` takes leave of that pool and builds a new one.

        Raises:
            ResetNeeded: Before the first reset (``reset_async`` with first-ready batches).
            RuntimeError: JAX is missing, or EnvPool does not offer this on the platform.
        """
        self._pool_driver("xla")
        try:
            return self._pools.lend()
        except Exception as error:
            raise RuntimeError(f"EnvPool cannot compile {self.task.id!r} into JAX programs: {error}") from error

    def _random(self) -> np.random.Generator:
        return self.np_random

    # -- what can be looked at -------------------------------------------------------------------------------

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seeds of the pool, one for each environment: ``reset(seed=...)`` with them repeats what it did."""
        return tuple(self._pools.seeds)

    @property
    def config(self) -> dict[str, Any]:
        """The task's whole configuration, as EnvPool completed it (with the time limit asked for)."""
        return dict(self.task.config)

    @property
    def capabilities(self) -> Capabilities:
        """What EnvPool can do. (Rows can be sent and received with ``batch_size=num_envs`` too, one call at a time.)"""
        whole = self.batch_size == self.num_envs
        return Capabilities(
            "envpool", attributes=False, first_ready=not whole, reset_mask=whole, masked_seeds=False, reset_options=False,
            row_options=False, in_this_process=True,
        )  # fmt: skip

    def __repr__(self) -> str:
        if not hasattr(self, "_pools"):
            return f"{type(self).__name__}(closed)"
        name = self.spec.id if self.spec is not None else self.task.id
        batch = f", batch_size={self.batch_size}" if self.batch_size < self.num_envs else ""
        if self.closed:
            phase = Phase.CLOSED
        else:
            phase = Phase.DEFAULT if self._pools.driver is None else self._pools.driver.phase
        return f"{type(self).__name__}({name}, num_envs={self.num_envs}{batch}, phase={phase.name})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} owns threads and cannot be copied or pickled: build one where it is to be used"
        )

    # -- the end ---------------------------------------------------------------------------------------------

    def close_extras(self, **kwargs: Any) -> None:
        """Let go of the pool: its environments and threads are gone when this returns.

        Args:
            **kwargs: ``timeout`` and ``terminate`` of other vector environments; without meaning here.
        """
        self._let_go(**kwargs)
