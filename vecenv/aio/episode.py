"""``EpisodeEnv``: one episode of one environment, as coroutines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from gymnasium.error import ClosedEnvironmentError, ResetNeeded

from vecenv.aio.slots import Slot, Slots
from vecenv.aio.workers import RowAnswer
from vecenv.engine.pending import Result
from vecenv.errors import BusyError, EnvFailed
from vecenv.link.messages import Op, summary
from vecenv.state.snapshots import Snapshot, parse_snapshots

__all__ = ["EpisodeEnv"]

E = TypeVar("E", bound=Exception)


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
            one: list[Any] = [self._k(slot)]
            answer = await self._slots.ask(slot, "call", Op.EXEC, (one, _called, (name, args, kwargs), {}))
            return self._result(slot, "call", answer).results[slot.row]

    async def save(self, *, verify: bool = True) -> Snapshot:
        """The state of the environment; see :meth:`vecenv.AsyncVectorEnv.save`.

        Raises:
            NotRestorable: It cannot be saved, or not exactly; the episode goes on.
        """
        with self._calling("save") as slot:
            engine, row, k = self._slots.engine, slot.row, [self._k(slot)]
            answer = await self._slots.ask(slot, "save", Op.SAVE, k)
            snapshot: Snapshot = self._result(slot, "save", answer).results[row]
            known = snapshot.row
            if known.used:
                snapshot = snapshot.having(observation=engine.store.row(row))
            if verify and known.kind not in engine.proved:
                self._result(slot, "save", await self._slots.ask(slot, "save", Op.PROVE, k))
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
            engine, row, k = self._slots.engine, slot.row, self._k(slot)
            (one,) = parse_snapshots(snapshot, [row])
            known = one.row
            engine.require_observation(row, known)
            self._result(slot, "load", await self._slots.ask(slot, "load", Op.CHECK, [(k, one)]))
            self._result(slot, "load", await self._slots.ask(slot, "load", Op.LOAD, [k]))
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
            raise ClosedEnvironmentError("Trying to operate on `EpisodeEnv`, outside of its `async with` block.")
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
        if answer.error is not None or answer.result is None:
            assert answer.error is not None
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

    @staticmethod
    def _k(slot: Slot) -> int:
        """Which one of its worker's environments it is."""
        return slot.row - slot.group.worker.rows[0]


def _called(env: Any, name: str, args: Any, kwargs: Any) -> Any:
    attribute = env.get_wrapper_attr(name)
    return attribute(*args, **kwargs) if callable(attribute) else attribute


def _check_reset(seed: Any, options: Any) -> None:
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, (int, np.integer))):
        raise TypeError(f"seed must be an integer or None, got {seed!r}")
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options must be a dict or None, got {options!r}")
