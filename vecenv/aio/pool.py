"""``Pool``: environments in worker processes, lent to the tasks of an asyncio program, one to an episode."""

from __future__ import annotations

import asyncio
import signal
from asyncio import Future
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

from gymnasium import Env, Space
from gymnasium.vector import AutoresetMode

from vecenv.aio.episode import EpisodeEnv
from vecenv.aio.slots import Slots
from vecenv.aio.workers import PoolEnvs
from vecenv.engine.recovery import RestartBudget
from vecenv.errors import ErrorRecord, VecEnvError
from vecenv.evaluating.episodes import Attempt, EpisodeResult, EpisodeResults, Episodes, Listed, listed
from vecenv.front.arguments import seconds_of
from vecenv.planning.options import OnFailure, StartMethod
from vecenv.system.generators import GeneratorsOption
from vecenv.system.spawning import WorkerEnv

__all__ = ["Pool"]

_LITTLE_PATIENCE: Final = 1.0  # seconds that a close() waits for environments that are busy


class Pool:
    """Environments for the episodes of an asyncio program.

    Its workers start when it is made, which takes a while: before the event loop runs, or in it. It belongs to the loop that
    enters it first, ``async with pool:``, and is closed at the end of that block.

    Args:
        make_env: Builds an environment; called in workers.
        size: How many environments there are: that many episodes are under way at the same time, and others wait.
        num_workers: Processes, over which environments are spread; ``None``: one for each environment.
        env_threads: Up to that many environments of a worker run at the same time, each in a thread: for those that wait and
            compute little.
        step_timeout: Seconds until a step or a reset is taken to hang: its worker is killed. Where a worker has several
            environments, the time that one waits for the others counts.
        cancel_timeout: Seconds that a call whose task was cancelled may still take; then its worker is killed.
        on_failure: ``"raise"``: a worker that died is started anew with the next episode in one of its slots;
            ``"restart"``: at once, within a budget.
        restart_limit: At most this many restarts of all workers within ``restart_period`` seconds. ``None``: each has 5 in
            that time, and one more for every 1,000 steps. A worker that needs more is given up, with its slots.
        restart_period: Seconds.
        start_timeout: Seconds that a worker has to build its environments.
        context, daemon, threads_per_worker, worker_env, generators, dummy_env, shared_memory: As of
            :class:`vecenv.AsyncVectorEnv`. Without ``dummy_env=True`` no environment is built in this process.

    Raises:
        TypeError, ValueError: An option has no meaning.
        StartupTimeout, WorkerDied: A worker did not get ready. Nothing is left running.
        Exception: Whatever ``make_env`` raised.
    """

    def __init__(
        self,
        make_env: Callable[[], Env[Any, Any]],
        size: int,
        num_workers: int | None = None,
        *,
        env_threads: int = 1,
        step_timeout: float | None = None,
        cancel_timeout: float = 5.0,
        on_failure: OnFailure = "raise",
        restart_limit: int | None = None,
        restart_period: float = 60.0,
        start_timeout: float = 60.0,
        context: StartMethod | None = None,
        daemon: bool = True,
        threads_per_worker: int | None = None,
        worker_env: WorkerEnv | None = None,
        generators: GeneratorsOption = "shared",
        dummy_env: bool = False,
        shared_memory: bool = True,
    ) -> None:
        if type(size) is not int or size < 1:
            raise ValueError(f"size must be how many environments there are, from 1 on, got {size!r}")
        if num_workers is not None and (type(num_workers) is not int or num_workers < 1):
            raise ValueError(f"num_workers must be None or an int from 1 on, got {num_workers!r}")
        if on_failure not in ("raise", "restart"):
            raise ValueError(f"on_failure must be 'raise' or 'restart', got {on_failure!r}")
        limits = seconds_of(step_timeout, "step_timeout"), seconds_of(cancel_timeout, "cancel_timeout")
        self._envs = PoolEnvs(
            [make_env] * size, shared_memory, context=context, daemon=daemon, autoreset_mode=AutoresetMode.DISABLED,
            num_workers=None if num_workers is None else min(num_workers, size), restart_limit=restart_limit,
            restart_period=restart_period, start_timeout=start_timeout, threads_per_worker=threads_per_worker,
            worker_env=worker_env, generators=generators, dummy_env=dummy_env, env_threads=env_threads, isolate=True,
        )  # fmt: skip
        self.size = size
        self.observation_space: Space[Any] = self._envs.single_observation_space
        self.action_space: Space[Any] = self._envs.single_action_space
        engine = self._engine = self._envs.engine
        budget = RestartBudget(restart_limit, restart_period, lambda: engine.pending.steps / size)
        restarts = budget if on_failure == "restart" else None
        self._slots = Slots(engine, *limits, engine.policy.start_timeout, restarts, one_by_one=env_threads == 1)
        self._closing: Future[None] | None = None

    # -- what can be looked at ----------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """It was closed, or is being closed."""
        return self._slots.closed

    @property
    def errors(self) -> deque[ErrorRecord]:
        """What failed so far, oldest first, at most 1,000 records."""
        return self._envs.errors

    def stats(self) -> dict[str, float]:
        """Figures; see :meth:`vecenv.AsyncVectorEnv.stats`. ``in_flight``: environments that were asked something."""
        return self._envs.stats()

    def __repr__(self) -> str:
        slots = self._slots
        if slots.closed:
            return f"Pool(size={self.size}, closed)"
        restarts = f", restarted={self._engine.restarts}" if self._engine.restarts else ""
        lost = sum(len(group.slots) for group in slots.groups.values() if group.given_up is not None)
        return (
            f"Pool(size={self.size}, workers={len(slots.groups)}, episodes={slots.taken()}, free={len(slots.free)}, "
            f"waiting={len(slots.waiters)}{restarts}{f', given_up={lost}' if lost else ''})"
        )

    # -- beginning and end ----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Pool:
        self._slots.enter()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, timeout: float | None = None) -> None:
        """End all episodes by :class:`~gymnasium.error.ClosedEnvironmentError`, and all workers. Idempotent.

        The event loop goes on meanwhile. Where the task is cancelled, workers are killed at once, and the cancellation
        comes out when they are gone.

        Args:
            timeout: Seconds for the environments' own ``close()``. Default: a minute, or a second where an environment is
                busy.

        Raises:
            ForkedError, LoopError: In a forked child, or in another event loop than its own.
        """
        seconds, slots = seconds_of(timeout), self._slots
        if not slots.closed:
            slots.require_usable("close", entered=False)
            seconds = _LITTLE_PATIENCE if slots.busy and seconds is None else seconds
            slots.close()
            end = partial(self._envs.close, timeout=seconds)
            try:
                self._closing = asyncio.get_running_loop().run_in_executor(None, end)
            except RuntimeError:  # the program ends: there are no threads any more
                end()
        cancelled: asyncio.CancelledError | None = None
        while self._closing is not None and not self._closing.done():
            try:
                await asyncio.shield(self._closing)
            except asyncio.CancelledError as error:
                cancelled = error
                for group in slots.groups.values():
                    group.worker.signal(signal.SIGKILL)
        if cancelled is not None:
            raise cancelled

    # -- episodes -------------------------------------------------------------------------------------------------------

    def episode(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> EpisodeEnv:
        """An episode, to be entered: ``async with pool.episode(seed=7) as env``.

        Entering waits for a slot, in the order in which it was asked for one, and resets the environment. Leaving gives the
        slot back, whatever happened.

        Args:
            seed, options: Of the reset.

        Raises:
            EnvFailed, WorkerDied, StepTimeout: On entering: the reset failed.
            RestartsExhausted: On entering: all workers were given up.
            ClosedEnvironmentError, LoopError, ForkedError: The pool cannot be used here.
        """
        self._slots.require_usable("episode")
        return EpisodeEnv(self._slots, seed, options)

    async def evaluate(
        self,
        policy: Callable[[Any], Awaitable[Any]],
        episodes: Listed,
        *,
        seed: int | None = None,
        retries: int = 1,
        on_episode: Callable[[EpisodeResult], object] | None = None,
    ) -> EpisodeResults:
        """Run each episode of a list exactly once, as many at a time as there are slots.

        Args:
            policy: ``await policy(observation)`` gives an action.
            episodes, seed, retries, on_episode: As of :func:`vecenv.evaluate`; results are the same as there.

        Returns:
            Results in the order of the list.

        Raises:
            Exception: What the policy or ``on_episode`` raises; the other episodes are cancelled.
        """
        self._slots.require_usable("evaluate")
        wanted, base = listed(episodes, seed)
        todo = Episodes(wanted, base, retries)
        left = iter(range(len(wanted)))

        async def run_some() -> None:
            for index in left:
                while (result := await self._attempt(todo, index, policy)) is None:
                    pass
                if on_episode is not None:
                    on_episode(result)

        tasks = [asyncio.create_task(run_some()) for _ in range(min(self.size, len(wanted)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return EpisodeResults(todo.results[index] for index in range(len(wanted)))

    async def _attempt(self, todo: Episodes, index: int, policy: Callable[[Any], Awaitable[Any]]) -> EpisodeResult | None:
        """Run an episode; ``None``: it failed, and is to be begun again."""
        episode = todo.episodes[index]
        env = self.episode(seed=episode.seed, options=episode.options)
        attempt: Attempt = todo.begin(index, -1)
        try:
            async with env:
                if episode.snapshot is not None:
                    await env.load(episode.snapshot)
                while not env.over:
                    _, reward, *_ = await env.step(await policy(env.observation))
                    attempt.episode_return += reward
                    attempt.length += 1
                return todo.ended(attempt, env.terminated, env.truncated, env.info)
        except VecEnvError as error:
            if env.failure is not error:  # it is the policy's
                raise
            return todo.failed(attempt, error)
