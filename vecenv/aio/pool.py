"""``Pool``: environments in worker processes, each used by one asyncio task at a time, for an episode.

:class:`EpisodeEnv` is one episode of one environment, with coroutines as methods.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from asyncio import Future
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from gymnasium import Env, Space
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode

from vecenv.aio.slots import Slot, Slots, outside_of_block_error
from vecenv.engine.vector_env import AsyncVectorEnv
from vecenv.errors import BusyError, EnvFailed, ErrorRecord, StepTimeout, VecEnvError, WorkerDied
from vecenv.evaluating.episodes import Attempt, EpisodeList, EpisodeResult, EpisodeResults, Episodes, parse_episodes
from vecenv.evaluating.tasks import any_named, require_offered
from vecenv.front.arguments import check_option_names, parse_close_timeout, parse_timeout
from vecenv.front.infos import count_steps
from vecenv.link.messages import copy_if_possible
from vecenv.planning.options import OnFailure, Restart, StartMethod, WorkerOptions, check_option
from vecenv.state.snapshots import Snapshot, parse_snapshots
from vecenv.system.generators import GeneratorsOption
from vecenv.system.restart_budget import RestartBudget
from vecenv.system.signals import deferred_signals

__all__ = ["EpisodeEnv", "Pool"]

_BUSY_CLOSE_SECONDS: Final = 1.0  # the default timeout of close() while environments are busy


class Pool:
    """Environments for the episodes of an asyncio program.

    Creating a pool starts its workers and blocks until they are ready. A pool may be created before the event loop runs, or
    inside it. It belongs to the loop in which it is first entered, with ``async with pool:``, and is closed at the end of
    that block.

    Args:
        make_env: A function that builds an environment; called in the workers.
        size: The number of environments, and the maximum number of simultaneous episodes; further episodes wait.
        num_workers: The number of processes over which environments are spread; ``None``: one per environment.
        env_threads: The number of environments that a worker runs at the same time, each in its own thread: for
            environments that mostly wait.
        step_timeout: The time limit of a step or a reset, in seconds; a worker that exceeds it is killed. If a worker has
            several environments, the limit includes the time that one environment waits for the others.
        cancel_timeout: Seconds that a cancelled call may still take before its worker is killed.
        on_failure: ``"raise"``: a worker that died is restarted by the next reset of one of its environments.
            ``"restart"``, or a :class:`vecenv.Restart`: it is restarted immediately, within a budget. A worker that dies
            when the budget is used up is abandoned together with its environments.
        context, daemon, generators, shared_memory, worker_options: See :class:`vecenv.AsyncVectorEnv`. An environment is
            built in this process only with ``WorkerOptions(dummy_env=True)``.

    Raises:
        TypeError, ValueError: An option has an invalid value.
        StartupTimeout, WorkerDied: A worker did not become ready. All processes have been ended.
        Exception: Raised by ``make_env``.
    """

    def __new__(cls, *args: Any, **options: Any) -> Pool:
        check_option_names(options, cls.__signature__.parameters, cls.__name__)
        return super().__new__(cls)

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
        context: StartMethod | None = None,
        daemon: bool = True,
        generators: GeneratorsOption = "shared",
        shared_memory: bool = True,
        worker_options: WorkerOptions | None = None,
    ) -> None:
        if not callable(make_env):
            raise TypeError(
                "Pool takes a function that builds one environment: Pool(lambda: gymnasium.make(id), 8); got "
                f"{'the id ' * isinstance(make_env, str)}{make_env!r}"
            )
        if type(size) is not int or size < 1:
            raise ValueError(f"size must be the number of environments, an int of at least 1, got {size!r}")
        if num_workers is not None and (type(num_workers) is not int or num_workers < 1):
            raise ValueError(f"num_workers must be None or an int of at least 1, got {num_workers!r}")
        check_option("on_failure", on_failure)
        check_option("worker_options", worker_options)
        limits = parse_timeout(step_timeout, "step_timeout"), parse_timeout(cancel_timeout, "cancel_timeout")
        workers = size if num_workers is None else min(num_workers, size)
        # the program does other work at the same time, so workers neither spin nor are pinned to single cores
        cores = [sorted(os.sched_getaffinity(0))] * workers if hasattr(os, "sched_getaffinity") else None
        options = worker_options or WorkerOptions()
        dummy_env = False if options.dummy_env is None else options.dummy_env
        options = replace(options, cores=options.cores or cores, dummy_env=dummy_env)
        self._envs: AsyncVectorEnv[Any, Any] = AsyncVectorEnv(
            [make_env] * size, shared_memory, context=context, daemon=daemon, autoreset_mode=AutoresetMode.DISABLED,
            num_workers=workers, env_threads=env_threads, generators=generators, worker_options=options,
        )  # fmt: skip
        self.size = size
        self.observation_space: Space[Any] = self._envs.single_observation_space
        self.action_space: Space[Any] = self._envs.single_action_space
        self._slots = Slots(
            self._envs, *limits, options.start_timeout, budget=self._restart_budget(on_failure), env_threads=env_threads
        )
        self._closing: Future[None] | None = None

    def _restart_budget(self, on_failure: OnFailure) -> RestartBudget | None:
        if on_failure == "raise":
            return None
        restart = Restart.of(on_failure)
        return RestartBudget(restart.limit, restart.period, lambda: self.stats()["steps"] / self.size)

    # otherwise, `inspect.signature` would return the signature of `__new__`
    __signature__ = inspect.Signature(list(inspect.signature(__init__).parameters.values())[1:])

    # -- properties -----------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True if the pool has been closed, or is being closed."""
        return self._slots.closed

    @property
    def errors(self) -> deque[ErrorRecord]:
        """The last 1,000 failures, oldest first."""
        return self._envs.errors

    def stats(self) -> dict[str, float]:
        """Return statistics; see :meth:`vecenv.AsyncVectorEnv.stats`. ``in_flight``: environments with a pending request."""
        return self._envs.stats()

    def __repr__(self) -> str:
        slots = self._slots
        if slots.closed:
            return f"Pool(size={self.size}, closed)"
        count = int(self.stats()["restarts"])
        restarts = f", restarted={count}" if count else ""
        abandoned = sum(len(group.slots) for group in slots.groups if group.exhausted is not None)
        return (
            f"Pool(size={self.size}, workers={len(slots.groups)}, episodes={slots.num_occupied()}, free={len(slots.free)}, "
            f"waiting={len(slots.waiters)}{restarts}{f', abandoned={abandoned}' if abandoned else ''})"
        )

    # -- beginning and end ----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Pool:
        self._slots.enter()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, timeout: float | None = None) -> None:
        """End all episodes with :class:`~gymnasium.error.ClosedEnvironmentError`, and stop all workers. Idempotent.

        Does not block the event loop. If the calling task is cancelled, the workers are killed immediately, and the
        cancellation is raised when they have ended.

        Args:
            timeout: Seconds for the environments' own ``close()``. Default: a minute, or a second if an environment is busy.

        Raises:
            ForkedError, LoopError: Called in a forked child, or in an event loop other than the pool's.
        """
        seconds, slots = parse_close_timeout(timeout), self._slots
        if not slots.closed:
            slots.require_usable("close", entered=False)
            seconds = _BUSY_CLOSE_SECONDS if slots.busy and seconds is None else seconds
            close_envs = partial(self._envs.close, timeout=seconds)
            with deferred_signals():  # after an interruption in here, the next close() would return at once
                slots.close()
                try:
                    self._closing = asyncio.get_running_loop().run_in_executor(None, close_envs)
                except RuntimeError:  # at interpreter shutdown, no thread can be started
                    close_envs()
        cancelled: asyncio.CancelledError | None = None
        while self._closing is not None and not self._closing.done():
            try:
                await asyncio.shield(self._closing)
            except asyncio.CancelledError as error:
                cancelled = error
                slots.kill_all()
        if cancelled is not None:
            raise cancelled

    # -- episodes -------------------------------------------------------------------------------------------------------

    def episode(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> EpisodeEnv:
        """Return an episode, to be entered with ``async with pool.episode(seed=7) as env``.

        Entering waits for a slot, first come, first served, and resets the environment. Leaving always frees the slot.

        Args:
            seed, options: The arguments of the reset.

        Raises:
            TypeError: ``seed`` or ``options`` has the wrong type.
            EnvFailed, WorkerDied, StepTimeout: On entering: the reset failed.
            RestartsExhausted: On entering: all workers were abandoned, or the environment's worker during the reset.
            ClosedEnvironmentError, LoopError, ForkedError: The pool cannot be used here.
        """
        self._slots.require_usable("episode")
        return EpisodeEnv(self._slots, seed, options)

    async def evaluate(
        self,
        policy: Callable[[Any], Awaitable[Any]],
        episodes: EpisodeList,
        *,
        seed: int | None = None,
        retries: int = 1,
        on_episode: Callable[[EpisodeResult], object] | None = None,
    ) -> EpisodeResults:
        """Run each episode of a list exactly once, as many at a time as there are slots.

        If workers have several environments and one dies or hangs, any of its episodes may be the cause. They are repeated
        one at a time after all others, and a death or a hang counts as a failure of the episode only then.

        Args:
            policy: ``await policy(observation)`` returns an action.
            episodes, seed, retries, on_episode: See :func:`vecenv.evaluate`; the results are the same.

        Returns:
            Results in the order of the list.

        Raises:
            TypeError, ValueError: An argument is invalid, or an episode names an environment that is not offered, or none
                although several are offered; no episode was run.
            TypeError: ``policy`` does not return an awaitable; the other episodes are cancelled.
            Exception: Raised by the policy or ``on_episode``; the other episodes are cancelled.
        """
        self._slots.require_usable("evaluate")
        listed_episodes, base = parse_episodes(episodes, seed)
        todo = Episodes(listed_episodes, base, retries)
        await self._require_offered(todo)
        remaining = iter(range(len(listed_episodes)))
        count = min(self.size, len(listed_episodes))
        shared_workers = count > 1 and len(self._slots.groups) < self.size
        suspects: set[int] | None = set() if shared_workers else None  # indices of the episodes to repeat one at a time

        async def run_episodes(indices: Iterator[int], suspects: set[int] | None) -> None:
            for index in indices:
                result = None
                while result is None and (suspects is None or index not in suspects):
                    result = await self._attempt(todo, index, policy, suspects)
                if result is not None and on_episode is not None:
                    on_episode(result)

        tasks = [asyncio.create_task(run_episodes(remaining, suspects)) for _ in range(count)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await run_episodes(iter(sorted(suspects or ())), None)
        return EpisodeResults(todo.results[index] for index in range(len(listed_episodes)))

    async def _require_offered(self, todo: Episodes) -> None:
        """Raise for episodes with :func:`require_offered`. One slot is checked, since all share ``make_env``."""
        slot = await self._slots.acquire(self)

        async def find_names() -> tuple[str, ...]:
            if not await self._slots.request(slot, "call", ("has_wrapper_attr", ("env_choices",), {})):
                return ()
            return tuple(await self._slots.request(slot, "call", ("env_choices", (), {})))

        try:
            try:
                names = await find_names()
            except (EnvFailed, WorkerDied):  # calls are refused until a reset, which may need the options of an episode
                if not any_named(todo.episodes):
                    return
                await self._slots.request(slot, "reset")
                names = await find_names()
        except AttributeError:  # an environment that is not a gymnasium.Env
            names = ()
        finally:
            self._slots.release(slot)
        require_offered(names, type(self).__name__, todo.episodes)

    async def _attempt(
        self, todo: Episodes, index: int, policy: Callable[[Any], Awaitable[Any]], suspects: set[int] | None
    ) -> EpisodeResult | None:
        """Run an episode once. Return its result, or ``None`` if it failed and has to be repeated.

        If its worker died or hung, its index is added to ``suspects``, unless that is ``None``.
        """
        episode = todo.episodes[index]
        env = self.episode(seed=episode.seed, options=episode.reset_options)
        attempt: Attempt = todo.begin(index, -1)
        try:
            async with env:
                if episode.snapshot is not None:
                    await env.load(episode.snapshot)
                while not env.over:
                    if not inspect.isawaitable(action := policy(env.observation)):
                        raise TypeError(f"policy must be an `async def` function of one observation; it returned {action!r}")
                    _, reward, *_, info = await env.step(await action)
                    attempt.episode_return += reward
                    attempt.length += count_steps(info)
                return todo.record_end(attempt, env.terminated, env.truncated, env.info)
        except VecEnvError as error:
            if env.failure is not error:  # the environment did not fail: for example, the policy raised it
                raise
            if suspects is not None and isinstance(error, WorkerDied | StepTimeout):
                suspects.add(index)
                return None
            return todo.record_failure(attempt, error)


class EpisodeEnv:
    """A context manager for one episode in one of a pool's environments; :meth:`vecenv.aio.Pool.episode` creates it.

    Only one task at a time may call its methods. Cancelling a call, directly or by a timeout, leaves the environment in an
    unknown state: as after a failure, every later call raises ``EnvFailed`` until :meth:`reset` begins a new episode.

    Attributes:
        env_id: The index of its environment; -1 before the episode is entered.
        observation: The latest observation, which later steps do not overwrite.
        info: The latest info, as the environment returned it; empty after :meth:`load`.
        terminated, truncated: How the episode ended; both false until then. One that had ended when it was saved is
            truncated after :meth:`load`.
        failure: The latest exception that ended the episode.
    """

    def __init__(self, slots: Slots, seed: int | None, options: Mapping[str, Any] | None) -> None:
        self.env_id = -1
        self.observation: Any = None
        self.info: dict[Any, Any] = {}
        self.terminated = False
        self.truncated = False
        self.failure: Exception | None = None
        self._slots = slots
        self._reset_arguments = _parse_reset(seed, options)
        self._slot: Slot | None = None
        self._entered = False
        self._pending_method = ""

    @property
    def over(self) -> bool:
        """True if the episode has ended."""
        return self.terminated or self.truncated

    def __repr__(self) -> str:
        state = "over" if self.over else self._pending_method or "idle"
        return f"EpisodeEnv(env {self.env_id}, {state if self._slot is not None else 'not entered, or left'})"

    async def __aenter__(self) -> EpisodeEnv:
        if self._entered:
            raise ClosedEnvironmentError("Trying to enter an `EpisodeEnv` a second time: `pool.episode()` makes a new one.")
        self._entered = True
        self._slot = await self._slots.acquire(self)
        self.env_id = self._slot.row
        try:
            seed, options = self._reset_arguments
            await self.reset(seed=seed, options=options)
        except BaseException:
            self._release_slot()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._release_slot()

    def _release_slot(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self._slots.release(slot)

    # -- calls ----------------------------------------------------------------------------------------------------------

    async def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[Any, Any]]:
        """Step the environment, which receives the action unchanged.

        Returns:
            ``(observation, reward, terminated, truncated, info)``.

        Raises:
            EnvFailed: The environment raised an exception (the ``__cause__``), or failed earlier.
            WorkerDied: Its worker died.
            StepTimeout: The step took longer than ``step_timeout``; its worker was killed.
            gymnasium.error.ResetNeeded: The episode has ended.
            BusyError: Another task's call is pending.
            gymnasium.error.ClosedEnvironmentError: Called outside of the ``async with`` block, or the pool is closed.
            LoopError, ForkedError: Called in another event loop, or in a forked child.
        """
        with self._calling("step") as slot:
            if self.over and not slot.lost_reason:
                raise ResetNeeded(f"the episode of env {slot.row} is over: reset() begins a new one")
            self.observation, reward, self.terminated, self.truncated, self.info = await self._request(slot, "step", action)
            return self.observation, reward, self.terminated, self.truncated, self.info

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[Any, Any]]:
        """Begin a new episode in the same slot, regardless of how the last one ended.

        Raises:
            TypeError: ``seed`` or ``options`` has the wrong type.
            EnvFailed, WorkerDied, StepTimeout, BusyError, ClosedEnvironmentError: See :meth:`step`.
            RestartsExhausted: Its worker died too often, and was abandoned.
            Exception: No process can replace its dead worker: ``env_fn`` cannot be pickled any more, for example.
        """
        arguments = _parse_reset(seed, options)
        with self._calling("reset") as slot:
            payload = None if arguments == (None, None) else arguments
            self._begin_episode(*await self._request(slot, "reset", payload))
            return self.observation, self.info

    async def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Return ``env.get_wrapper_attr(name)``, or the result of calling it with the arguments if it is callable.

        Raises:
            Exception: The environment's own exception; the episode continues.
        """
        with self._calling("call") as slot:
            return await self._request(slot, "call", (name, args, kwargs))

    async def save(self, *, verify: bool = True) -> Snapshot:
        """Save the state of the environment; see :meth:`vecenv.AsyncVectorEnv.save`.

        Raises:
            NotRestorable: It cannot be saved, or not exactly; the episode continues.
        """
        with self._calling("save") as slot:
            snapshot: Snapshot = await self._request(slot, "save")
            if verify and slot.row not in self._slots.submissions.verified:
                await self._request(slot, "verify")
            return snapshot

    async def load(self, snapshot: Snapshot) -> Any:
        """Continue from a saved state, of this environment or of another; see :meth:`vecenv.AsyncVectorEnv.load`.

        Returns:
            The observation; ``None`` if it was saved before the environment's first reset.

        Raises:
            SnapshotMismatch: The snapshot does not fit; nothing was changed.
        """
        with self._calling("load") as slot:
            (parsed,) = parse_snapshots(snapshot, [slot.row])
            await self._request(slot, "check", parsed)
            self._begin_episode(await self._request(slot, "load", parsed), {})
            self.truncated = parsed.row.pending
            return self.observation

    # -- helpers --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _calling(self, method: str) -> Iterator[Slot]:
        """Admit one call at a time."""
        self._slots.require_usable(method)
        slot = self._slot
        if slot is None:
            raise outside_of_block_error()
        if self._pending_method:
            raise BusyError(
                f"another task is in `{self._pending_method}` of this EpisodeEnv (env {slot.row}); `{method}` was refused"
            )
        self._pending_method = method
        try:
            yield slot
        finally:
            self._pending_method = ""

    async def _request(self, slot: Slot, command: str, payload: Any = None) -> Any:
        """Submit a request to the environment, and return its result. Keep an error that ends the episode as `failure`."""
        try:
            return await self._slots.request(slot, command, payload)
        except (EnvFailed, StepTimeout, WorkerDied, ClosedEnvironmentError) as error:
            self.failure = error
            raise

    def _begin_episode(self, observation: Any, info: dict[Any, Any]) -> None:
        self.observation, self.info, self.terminated, self.truncated = observation, info, False, False


def _parse_reset(seed: Any, options: Any) -> tuple[int | None, dict[str, Any] | None]:
    """Check the arguments of a reset, and return a seed that Gymnasium accepts and a copy of the options."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, (int, np.integer))):
        raise TypeError(f"seed must be an integer or None, got {seed!r}")
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options must be a dict or None, got {options!r}")
    return None if seed is None else int(seed), None if options is None else copy_if_possible(dict(options))
