"""``Pool``: environments in worker processes, lent to the tasks of an asyncio program, one to an episode.

:class:`EpisodeEnv` is one episode of one of them, as coroutines.
"""

from __future__ import annotations

import asyncio
import signal
from asyncio import Future
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
from gymnasium import Env, Space
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode

from vecenv.aio.slots import PoolEnvs, RowAnswer, Slot, Slots, outside_of_block
from vecenv.engine.pending import Result
from vecenv.engine.recovery import RestartBudget
from vecenv.errors import BusyError, EnvFailed, ErrorRecord, VecEnvError
from vecenv.evaluating.episodes import Attempt, EpisodeResult, EpisodeResults, Episodes, Listed, listed
from vecenv.front.arguments import seconds_of
from vecenv.link.messages import Op, summary
from vecenv.planning.options import OnFailure, StartMethod
from vecenv.state.snapshots import Snapshot, parse_snapshots
from vecenv.system.generators import GeneratorsOption
from vecenv.system.spawning import WorkerEnv
from vecenv.worker.envs import called

__all__ = ["EpisodeEnv", "Pool"]

E = TypeVar("E", bound=Exception)

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


class EpisodeEnv:
    """An episode in one of a pool's environments, from entering it to leaving it; :meth:`vecenv.aio.Pool.episode` makes it.

    One task at a time calls it. A call that is cancelled, from outside or by a timeout, gives its environment up: what it
    does meanwhile is not known. So every call after that, and after a failure, raises ``EnvFailed`` until :meth:`reset` has
    begun a new episode.

    Attributes:
        env_id: Which environment it has, from 0 on; -1 before it is entered.
        observation: The latest; an object of its own.
        info: The latest, as the environment gave it.
        terminated, truncated: How the episode ended; both false while it has not.
        failure: The latest exception by which it was lost.
    """

    def __init__(self, slots: Slots, seed: int | None, options: Mapping[str, Any] | None) -> None:
        _check_reset(seed, options)
        self.env_id = -1
        self.observation: Any = None
        self.info: dict[Any, Any] = {}
        self.terminated = False
        self.truncated = False
        self.failure: Exception | None = None
        self._slots = slots
        self._begins_with = seed, options
        self._slot: Slot | None = None
        self._entered = False
        self._call = ""

    @property
    def over(self) -> bool:
        """It has ended."""
        return self.terminated or self.truncated

    def __repr__(self) -> str:
        state = "over" if self.over else self._call or "idle"
        return f"EpisodeEnv(env {self.env_id}, {state if self._slot is not None else 'not entered, or left'})"

    async def __aenter__(self) -> EpisodeEnv:
        if self._entered:
            raise ClosedEnvironmentError("Trying to enter an `EpisodeEnv` a second time: `pool.episode()` makes a new one.")
        self._entered = True
        self._slot = await self._slots.acquire(self)
        self.env_id = self._slot.row
        try:
            seed, options = self._begins_with
            await self.reset(seed=seed, options=options)
        except BaseException:
            self._leave()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self._slots.release(slot)

    # -- calls ----------------------------------------------------------------------------------------------------------

    async def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[Any, Any]]:
        """One step; the environment gets the action as it is.

        Returns:
            ``(observation, reward, terminated, truncated, info)``.

        Raises:
            EnvFailed: The environment raised; ``__cause__`` is what. Or it failed before.
            WorkerDied: Its worker died.
            StepTimeout: It took longer than ``step_timeout``; its worker was killed.
            gymnasium.error.ResetNeeded: The episode is over.
            BusyError: Another task is in a call.
            gymnasium.error.ClosedEnvironmentError: After the end of its block, or of the pool.
        """
        with self._calling("step") as slot:
            if self.over:
                raise ResetNeeded(f"the episode of env {slot.row} is over: reset() begins a new one")
            answer = await self._slots.ask(slot, "step", Op.STEP_SOME, [action])
            result = self._result(slot, "step", answer)
            engine, row = self._slots.engine, slot.row
            self.observation, self.info = engine.store.row(row), engine.info_of(row, result, answer.columns)
            batch = engine.batch
            self.terminated, self.truncated = bool(batch.terminations[row]), bool(batch.truncations[row])
            return self.observation, float(batch.rewards[row]), self.terminated, self.truncated, self.info

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[Any, Any]]:
        """Begin a new episode in the same slot, whatever became of the one before.

        Raises:
            EnvFailed, WorkerDied, StepTimeout, BusyError, ClosedEnvironmentError: As :meth:`step`.
            RestartsExhausted: Its worker has died too often, and was given up.
        """
        _check_reset(seed, options)
        engine = self._slots.engine
        with self._calling("reset", revives=True) as slot:
            try:
                await self._slots.until_ready(slot, self)
            except Exception as error:
                raise self._failed(error)  # noqa: B904 - it is the same
            payload = None if seed is None and options is None else ([seed], [options])
            answer = await self._slots.ask(slot, "reset", Op.RESET_SOME, payload)
            result = self._result(slot, "reset", answer)
            self._at_beginning(engine.store.row(slot.row), engine.info_of(slot.row, result, answer.columns))
            return self.observation, self.info

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """``env.get_wrapper_attr(name)``, called with the arguments if it can be called.

        Raises:
            Exception: What it raised, as itself; the episode goes on.
        """
        with self._calling("call") as slot:
            answer = await self._slots.ask(slot, "call", Op.EXEC, ([slot.k], called, (name, args, kwargs), {}))
            return self._result(slot, "call", answer).results[slot.row]

    async def save(self, *, verify: bool = True) -> Snapshot:
        """The state of the environment; see :meth:`vecenv.AsyncVectorEnv.save`.

        Raises:
            NotRestorable: It cannot be saved, or not exactly; the episode goes on.
        """
        with self._calling("save") as slot:
            engine, row = self._slots.engine, slot.row
            answer = await self._slots.ask(slot, "save", Op.SAVE, [slot.k])
            snapshot: Snapshot = self._result(slot, "save", answer).results[row]
            known = snapshot.row
            if known.used:
                snapshot = snapshot.having(observation=engine.store.row(row))
            if verify and known.kind not in engine.proved:
                self._result(slot, "save", await self._slots.ask(slot, "save", Op.PROVE, [slot.k]))
                engine.proved |= {known.kind}
            return snapshot

    async def load(self, snapshot: Snapshot) -> Any:
        """Go on from a saved state, of this environment or of another; see :meth:`vecenv.AsyncVectorEnv.load`.

        Returns:
            The observation.

        Raises:
            SnapshotMismatch: It does not fit; nothing was touched.
        """
        with self._calling("load") as slot:
            engine, row = self._slots.engine, slot.row
            (one,) = parse_snapshots(snapshot, [row])
            known = one.row
            engine.require_observation(row, known)
            self._result(slot, "load", await self._slots.ask(slot, "load", Op.CHECK, [(slot.k, one)]))
            self._result(slot, "load", await self._slots.ask(slot, "load", Op.LOAD, [slot.k]))
            engine.put_beside({row: known})
            self._at_beginning(engine.store.row(row), {})
            return self.observation

    # -- inside -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def _calling(self, method: str, *, revives: bool = False) -> Iterator[Slot]:
        """One call at a time, on an environment that can go on. ``revives``: or one that cannot."""
        self._slots.require_usable(method)
        slot = self._slot
        if slot is None:
            raise outside_of_block()
        if self._call:
            raise BusyError(f"another task is in `{self._call}` of this EpisodeEnv (env {slot.row}); `{method}` was refused")
        if not revives and slot.unreported is not None:
            death, slot.unreported = slot.unreported, None
            raise self._failed(death.error())
        if not revives and slot.lost:
            raise EnvFailed(f"env {slot.row} failed earlier and has to be rebuilt by reset() first: {slot.lost}")
        self._call = method
        try:
            yield slot
        finally:
            self._call = ""

    def _result(self, slot: Slot, command: str, answer: RowAnswer) -> Result:
        """What the environment said.

        Raises:
            Exception: It failed. In a step or a reset that is the end of the episode.
        """
        if answer.error is not None:
            raise self._failed(answer.error)
        result = answer.result
        for death in result.deaths:
            slot.lost, slot.unreported = slot.lost or death.text.partition("\n")[0], None
            raise self._failed(death.error())
        for failure, worker in result.failures:
            ledger = self._slots.engine.ledger
            error, record = ledger.exception(failure, worker, command)
            ledger.errors.append(record)
            if failure.fatal:
                slot.lost = summary(error)
            if command in ("step", "reset"):
                text = f"env {slot.row}, {worker.label}, during {command}: {summary(error)}"
                raise self._failed(EnvFailed(text)) from error
            raise error
        return result

    def _failed(self, error: E) -> E:
        self.failure = error
        return error

    def _at_beginning(self, observation: Any, info: dict[Any, Any]) -> None:
        self.observation, self.info, self.terminated, self.truncated = observation, info, False, False


def _check_reset(seed: Any, options: Any) -> None:
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, (int, np.integer))):
        raise TypeError(f"seed must be an integer or None, got {seed!r}")
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options must be a dict or None, got {options!r}")
