"""Saving and loading rows: in which order workers are asked, what is checked before, and what the engine adds.

A save without a proof so far makes two requests: one for the states, then one for the proof that they are exact, once for
each kind of environment. A load makes two as well: the first asks whether every snapshot fits, and the second puts them in
place. The second request takes the place of the first in the table of pending requests, by one store. So an interrupted call
is either not made, or its answer is pending, as that of any other call, and ``call_wait`` gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from vecenv.engine.attributes import Attributes
from vecenv.engine.pending import Result, Worker
from vecenv.errors import SnapshotMismatch
from vecenv.front.arguments import rows_of
from vecenv.front.guard import exclusive
from vecenv.link.messages import Op
from vecenv.state.codecs import Codec, how_of
from vecenv.state.snapshots import FORMAT, Kind, Row, Snapshot, Snapshots, StateDict, parse_snapshots
from vecenv.system.uninterrupted import succeeds_when_repeated

__all__ = ["Keeping"]

_SPACES: Final = "single_action_space", "action_space", "single_observation_space", "observation_space"


class Keeping(Attributes):
    """The part of a vector environment that saves and loads rows."""

    single_action_space: Any
    single_observation_space: Any
    action_space: Any
    observation_space: Any
    autoreset_mode: Any
    _proved: frozenset[Kind] = frozenset()

    @exclusive
    def save(self, env_id: Any = None, *, verify: bool = True) -> tuple[Snapshot, ...]:
        """The state of every environment, or of some: all that decides how it goes on, bit for bit.

        The first time that a kind of environment is saved, environments of its own are built, by the same ``env_fn`` and in
        the same place, to prove that their state can be taken and put back exactly; see ``docs/state.md``. Environments
        are not touched. If it is interrupted while the call is pending, :meth:`call_wait` gives that.

        Args:
            env_id: Which environments, distinct indices; ``None``: all.
            verify: ``False`` leaves the proof out.

        Returns:
            One :class:`~vecenv.state.snapshots.Snapshot` an environment, in the order of ``env_id``. They can be pickled.

        Raises:
            NotRestorable: An environment cannot be saved, or not exactly; says which, what and where.
            AlreadyPendingCallError: A call is pending, or environments are in flight.
            EnvFailed: One of them failed and was not reset since.
        """
        rows = rows_of(env_id, self.num_envs)
        self._require_nothing_owed("call_async", "save")
        self._ask_save(rows, verify, Snapshots)
        return self._call_answer(None)  # type: ignore[no-any-return]

    @exclusive
    def load(self, snapshots: Any, env_id: Any = None) -> Any:
        """Let environments go on from saved states, exactly as those that were saved would have gone on.

        They may come from other rows, engines, processes and machines; what they must agree in is the environment, what it
        was made with, its wrappers and their versions. Environments that raised are built anew.

        Args:
            snapshots: As many as there are environments in ``env_id``, in its order; or one, for all of them. Loading runs
                what their bytes say, as unpickling does: load only what you have kept yourself.
            env_id: Which environments, distinct indices; ``None``: all.

        Returns:
            Their observations, as they were when they were saved: fresh arrays, as :meth:`recv` gives.

        Raises:
            SnapshotMismatch: The number is wrong, or one does not fit: says which and what differs. Nothing was touched.
            EnvFailed: The worker of one of them is dead; a reset of its rows comes first.
            AlreadyPendingCallError: A call is pending, or environments are in flight.
        """
        rows = rows_of(env_id, self.num_envs)
        self._require_nothing_owed("call_async", "load")
        self._ask_load(rows, parse_snapshots(snapshots, rows), _nothing)
        return self._call_answer(None)

    @exclusive
    def state_dict(self, *, verify: bool = True) -> dict[str, Any]:
        """All of it in one dict that can be pickled: snapshots of all environments, counters, seeds of restarts, and the
        generators of the vector environment's own spaces. Errors as of :meth:`save`."""
        self._require_nothing_owed("call_async", "state_dict")
        self._ask_save(list(range(self.num_envs)), verify, self._dict_of)
        return self._call_answer(None)  # type: ignore[no-any-return]

    @exclusive
    def load_state_dict(self, state: Mapping[str, Any]) -> Any:
        """Go on from what :meth:`state_dict` gave, here or elsewhere; returns and raises as :meth:`load`."""
        for key in ("format", "num_envs", "autoreset_mode", "snapshots", "counters", "seeds", "spaces"):
            if not isinstance(state, Mapping) or key not in state:
                raise SnapshotMismatch(f"this is no state_dict() of a vector environment: it has no {key!r}")
        mine = {"format": FORMAT, "num_envs": self.num_envs, "autoreset_mode": self.autoreset_mode.name}
        for key, own in mine.items():
            if state[key] != own:
                raise SnapshotMismatch(f"its {key} is {state[key]!r}, and that of this vector environment is {own!r}")
        rows = list(range(self.num_envs))
        self._require_nothing_owed("call_async", "load_state_dict")
        self._ask_load(rows, parse_snapshots(state["snapshots"], rows), self._rest_of(state))
        return self._call_answer(None)

    # -- saving -----------------------------------------------------------------------------------------------------

    def _ask_save(self, rows: list[int], verify: bool, dress: Callable[[list[Snapshot]], Any]) -> None:
        self._driver.ask_call(Op.SAVE, _own_rows(rows), "save", sequel=partial(self._saved, rows, verify, dress))

    def _saved(
        self, rows: list[int], verify: bool, dress: Callable[[list[Snapshot]], Any], result: Result, timeout: float | None
    ) -> Any:
        """The states came: add what the engine knows, and ask for the proof of kinds that have none."""
        store = self._driver.store
        snapshots: list[Snapshot] = []
        kinds: dict[Kind, int] = {}
        for row in rows:
            one: Snapshot = result.results[row]
            known = one.row
            kinds.setdefault(known.kind, row)
            snapshots.append(one.having(observation=store.row(row)) if known.used else one)
        new = kinds if verify else {}
        for kind in self._proved:
            new.pop(kind, None)
        if not new:
            return dress(snapshots)
        then = partial(self._said_proved, frozenset(new), partial(dress, snapshots))
        self._driver.ask_call(Op.PROVE, _own_rows(sorted(new.values())), "save", sequel=then, alone=True)
        return self._call_answer(timeout)

    def _said_proved(self, kinds: frozenset[Kind], answer: Callable[[], Any], result: Result, timeout: float | None) -> Any:
        self._proved |= kinds
        return answer()

    def _dict_of(self, snapshots: list[Snapshot]) -> dict[str, Any]:
        engine = self._driver
        return StateDict(
            format=FORMAT,
            num_envs=self.num_envs,
            autoreset_mode=self.autoreset_mode.name,
            snapshots=Snapshots(snapshots),
            counters=(engine.pending.steps, engine.pending.resets, engine.ledger.restarts),
            seeds=engine.recovery.seeds.state,
            spaces=[_space_codec(space).save(space) for space in self._spaces()],
        )

    def _spaces(self) -> list[Any]:
        return [getattr(self, name) for name in _SPACES]

    # -- loading ----------------------------------------------------------------------------------------------------

    def _ask_load(self, rows: list[int], each: list[Snapshot], extras: Callable[[], None]) -> None:
        of_row = dict(zip(rows, each, strict=True))
        known = {row: snapshot.row for row, snapshot in of_row.items()}
        for row, one in known.items():
            if one.used:
                try:
                    self._driver.store.require(one.observation)
                except Exception as error:
                    if succeeds_when_repeated(partial(self._driver.store.require, one.observation)):
                        raise
                    text = f"it is of {one.kind.env_id}, and its observation is none of this environment: {error}"
                    raise SnapshotMismatch(f"env {row}: the snapshot does not fit: {text}") from error

        def payload(worker: Worker) -> Any:
            first = worker.rows[0]
            return [(row - first, of_row[row]) for row in worker.rows if row in of_row] or None

        self._driver.ask_call(Op.CHECK, payload, "load", sequel=partial(self._fits, of_row, known, extras))

    def _fits(
        self,
        of_row: dict[int, Snapshot],
        known: dict[int, Row],
        extras: Callable[[], None],
        result: Result,
        timeout: float | None,
    ) -> Any:
        """All of them fit: have them put in place."""
        then = partial(self._in_place, of_row, known, extras)
        self._driver.ask_call(Op.LOAD, _own_rows(list(of_row)), "load", sequel=then, alone=True)
        return self._call_answer(timeout)

    def _in_place(
        self,
        of_row: dict[int, Snapshot],
        known: dict[int, Row],
        extras: Callable[[], None],
        result: Result,
        timeout: float | None,
    ) -> Any:
        """They are: put the rest beside them. It may be done again."""
        engine = self._driver
        rows = list(of_row)
        for row, one in known.items():
            if one.used:
                engine.store.put_row(row, one.observation)
            engine.ledger.mark_recovered(row)
        if engine.policy.restart:
            engine.recovery.remembered.keep(rows, everyone=len(rows) == self.num_envs)
        extras()
        return engine.store.take(np.array(rows, np.intp)) if all(one.used for one in known.values()) else None

    def _rest_of(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """What puts all of a ``state_dict()`` in place that no row has; refuses what does not fit."""
        engine = self._driver

        def read() -> tuple[Any, Any, Any]:
            opened = [
                (space, its if its is None else _space_codec(space).open(space, its))
                for space, its in zip(self._spaces(), state["spaces"], strict=True)
            ]
            env_steps, resets, restarts = map(_natural, state["counters"])
            return (env_steps, resets, restarts), np.random.SeedSequence(**state["seeds"]), opened

        try:
            (env_steps, resets, restarts), seeds, opened = read()
        except Exception as error:
            if succeeds_when_repeated(read):
                raise
            raise SnapshotMismatch(f"its counters, seeds or spaces do not fit: {type(error).__name__}: {error}") from error

        def put() -> None:
            now, then = engine.pending, engine.next_pending
            assert then is not None
            made = now.steps - engine.steps_before
            now.steps, now.resets, engine.steps_before = env_steps, resets, env_steps - made
            then.steps, then.resets, engine.ledger.restarts = env_steps, resets, restarts
            engine.recovery.seeds = seeds
            for space, its in opened:
                if its is not None:
                    _space_codec(space).load(space, its)

        return put


def _own_rows(rows: Sequence[int]) -> Callable[[Worker], Any]:
    """For each worker, which of its own rows are meant, counted from its first."""
    chosen = set(rows)
    return lambda worker: [row - worker.rows[0] for row in worker.rows if row in chosen] or None


def _space_codec(space: Any) -> Codec:
    how = how_of(type(space))
    assert isinstance(how, Codec)
    return how


def _natural(number: Any) -> int:
    """A count as it stands in a ``state_dict()``."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"{number!r} is no count")
    return number


def _nothing() -> None:
    """Nothing else is to be put in place."""
