"""``Episode``: one episode of one environment, as coroutines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from gymnasium.error import ClosedEnvironmentError, ResetNeeded

from vecenv.aio.engine import Reply
from vecenv.aio.places import Place, Places
from vecenv.engine import saving
from vecenv.engine.pending import Result
from vecenv.errors import BusyError, EnvFailed
from vecenv.link.messages import Op, summary
from vecenv.state.snapshots import Snapshot, parse_snapshots

__all__ = ["Episode"]

E = TypeVar("E", bound=Exception)


class Episode:
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

    def __init__(self, places: Places, seed: int | None, options: Mapping[str, Any] | None) -> None:
        _check_reset(seed, options)
        self.env_id = -1
        self.observation: Any = None
        self.info: dict[Any, Any] = {}
        self.terminated = False
        self.truncated = False
        self.failure: Exception | None = None
        self._places = places
        self._begins_with = seed, options
        self._place: Place | None = None
        self._entered = False
        self._call = ""

    @property
    def over(self) -> bool:
        """It has ended."""
        return self.terminated or self.truncated

    def __repr__(self) -> str:
        state = "over" if self.over else self._call or "idle"
        return f"Episode(env {self.env_id}, {state if self._place is not None else 'not entered, or left'})"

    async def __aenter__(self) -> Episode:
        if self._entered:
            raise ClosedEnvironmentError("Trying to enter an `Episode` a second time: `pool.episode()` makes a new one.")
        self._entered = True
        self._place = await self._places.acquire(self)
        self.env_id = self._place.row
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
        place, self._place = self._place, None
        if place is not None:
            self._places.release(place)

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
        with self._calling("step") as place:
            if self.over:
                raise ResetNeeded(f"the episode of env {place.row} is over: reset() begins a new one")
            reply = await self._places.ask(place, "step", Op.STEP_SOME, [action])
            result = self._result(place, "step", reply)
            engine, row = self._places.engine, place.row
            self.observation, self.info = engine.store.row(row), engine.info_of(row, result, reply.columns)
            batch = engine.batch
            self.terminated, self.truncated = bool(batch.terminations[row]), bool(batch.truncations[row])
            return self.observation, float(batch.rewards[row]), self.terminated, self.truncated, self.info

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[Any, Any]]:
        """Begin a new episode in the same place, whatever became of the one before.

        Raises:
            EnvFailed, WorkerDied, StepTimeout, BusyError, ClosedEnvironmentError: As :meth:`step`.
            RestartsExhausted: Its worker has died too often, and was given up.
        """
        _check_reset(seed, options)
        engine = self._places.engine
        with self._calling("reset", revives=True) as place:
            try:
                await self._places.settled(place, self)
            except Exception as error:
                raise self._failed(error)  # noqa: B904 - it is the same
            payload = None if seed is None and options is None else ([seed], [options])
            reply = await self._places.ask(place, "reset", Op.RESET_SOME, payload)
            result = self._result(place, "reset", reply)
            self._at_beginning(engine.store.row(place.row), engine.info_of(place.row, result, reply.columns))
            return self.observation, self.info

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """``env.get_wrapper_attr(name)``, called with the arguments if it can be called.

        Raises:
            Exception: What it raised, as itself; the episode goes on.
        """
        with self._calling("call") as place:
            one: list[Any] = [self._k(place)]
            reply = await self._places.ask(place, "call", Op.EXEC, (one, _called, (name, args, kwargs), {}))
            return self._result(place, "call", reply).results[place.row]

    async def save(self, *, verify: bool = True) -> Snapshot:
        """The state of the environment; see :meth:`vecenv.AsyncVectorEnv.save`.

        Raises:
            NotRestorable: It cannot be saved, or not exactly; the episode goes on.
        """
        with self._calling("save") as place:
            engine, row, k = self._places.engine, place.row, [self._k(place)]
            reply = await self._places.ask(place, "save", Op.SAVE, k)
            snapshot: Snapshot = self._result(place, "save", reply).results[row]
            known = snapshot.row
            if known.used:
                snapshot = snapshot.having(observation=engine.store.row(row))
            if verify and known.kind not in engine.proved:
                self._result(place, "save", await self._places.ask(place, "save", Op.PROVE, k))
                engine.proved |= {known.kind}
            return snapshot

    async def load(self, snapshot: Snapshot) -> Any:
        """Go on from a saved state, of this environment or of another; see :meth:`vecenv.AsyncVectorEnv.load`.

        Returns:
            The observation.

        Raises:
            SnapshotMismatch: It does not fit; nothing was touched.
        """
        with self._calling("load") as place:
            engine, row, k = self._places.engine, place.row, self._k(place)
            (one,) = parse_snapshots(snapshot, [row])
            known = one.row
            saving.require_observation(engine, row, known)
            self._result(place, "load", await self._places.ask(place, "load", Op.CHECK, [(k, one)]))
            self._result(place, "load", await self._places.ask(place, "load", Op.LOAD, [k]))
            saving.put_beside(engine, {row: known})
            self._at_beginning(engine.store.row(row), {})
            return self.observation

    # -- inside -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def _calling(self, method: str, *, revives: bool = False) -> Iterator[Place]:
        """One call at a time, on an environment that can go on. ``revives``: or one that cannot."""
        self._places.require_usable(method)
        place = self._place
        if place is None:
            raise ClosedEnvironmentError("Trying to operate on `Episode`, outside of its `async with` block.")
        if self._call:
            raise BusyError(f"another task is in `{self._call}` of this Episode (env {place.row}); `{method}` was refused")
        if not revives and place.untold is not None:
            death, place.untold = place.untold, None
            raise self._failed(death.error())
        if not revives and place.lost:
            raise EnvFailed(f"env {place.row} failed earlier and has to be rebuilt by reset() first: {place.lost}")
        self._call = method
        try:
            yield place
        finally:
            self._call = ""

    def _result(self, place: Place, command: str, reply: Reply) -> Result:
        """What the environment said.

        Raises:
            Exception: It failed. In a step or a reset that is the end of the episode.
        """
        if reply.error is not None or reply.result is None:
            assert reply.error is not None
            raise self._failed(reply.error)
        result = reply.result
        for death in result.deaths:
            place.lost, place.untold = place.lost or death.text.partition("\n")[0], None
            raise self._failed(death.error())
        for failure, worker in result.failures:
            ledger = self._places.engine.ledger
            error, record = ledger.exception(failure, worker, command)
            ledger.errors.append(record)
            if failure.fatal:
                place.lost = summary(error)
            if command in ("step", "reset"):
                text = f"env {place.row}, {worker.label}, during {command}: {summary(error)}"
                raise self._failed(EnvFailed(text)) from error
            raise error
        return result

    def _failed(self, error: E) -> E:
        self.failure = error
        return error

    def _at_beginning(self, observation: Any, info: dict[Any, Any]) -> None:
        self.observation, self.info, self.terminated, self.truncated = observation, info, False, False

    @staticmethod
    def _k(place: Place) -> int:
        """Which one of its worker's environments it is."""
        return place.row - place.process.worker.rows[0]


def _called(env: Any, name: str, args: Any, kwargs: Any) -> Any:
    attribute = env.get_wrapper_attr(name)
    return attribute(*args, **kwargs) if callable(attribute) else attribute


def _check_reset(seed: Any, options: Any) -> None:
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, (int, np.integer))):
        raise TypeError(f"seed must be an integer or None, got {seed!r}")
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options must be a dict or None, got {options!r}")
