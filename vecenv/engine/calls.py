"""Calls on the environments themselves: methods, attributes, functions, frames; saving and loading.

A save without a proof so far makes two requests: one for the states, then one for the proof that they are exact, once for
each kind of environment. A load makes two as well: the first asks whether every snapshot fits, and the second puts them in
place. The second request takes the place of the first in the table of pending requests, by one store. So an interrupted call
is either not made, or its answer is pending, as that of any other call, and ``call_wait`` gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import cloudpickle
import numpy as np

from vecenv.engine.answers import Answers, wait_name
from vecenv.engine.pending import Result, Worker
from vecenv.errors import NotRestorable, SnapshotMismatch
from vecenv.front.arguments import deadline_of
from vecenv.link.messages import Op
from vecenv.state.codecs import Codec, how_of
from vecenv.state.snapshots import FORMAT, Kind, Row, Snapshot, Snapshots, StateDict, parse_snapshots
from vecenv.system.uninterrupted import succeeds_when_repeated

__all__ = ["Calls"]


class Calls(Answers):
    """What an engine does for calls that are no step and no reset. Arguments were checked, and nothing is pending.

    Attributes:
        proved: Kinds of environments whose snapshots were proved to be exact.
        steps_before: Of all steps that were taken, that many came with a state that was loaded.
    """

    proved: frozenset[Kind] = frozenset()
    steps_before: int = 0

    def begin_call(self, name: str, args: Any, kwargs: Any) -> None:
        """Call a method, or read an attribute, of every environment."""
        payload = (name, args, kwargs)
        self._require_picklable(payload)
        self.ask_call(Op.CALL, lambda worker: payload, "call")

    def begin_exec(self, func: Callable[..., Any], rows: Collection[int], args: Any, kwargs: Any) -> None:
        """Call a function with each of some environments."""
        self._require_picklable((func, args, kwargs))
        chosen = set(rows)

        def payload(worker: Worker) -> Any:
            ks = [row - worker.rows[0] for row in worker.rows if row in chosen]
            return (ks, func, args, kwargs) if ks else None

        self.ask_call(Op.EXEC, payload, "exec_func")

    def begin_set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Set an attribute of every environment."""
        self._require_picklable(values)
        self.ask_call(Op.SET_ATTR, lambda worker: (name, [values[row] for row in worker.rows]), "set_attr")

    def begin_set_next(self, rows: Collection[int], given: Sequence[Any]) -> None:
        """Give some environments the seed and the options of their next episode, of which there are some for every row."""
        self._require_picklable(given)
        chosen = set(rows)

        def payload(worker: Worker) -> Any:
            own = [given[row] if row in chosen else None for row in worker.rows]
            return own if any(item is not None for item in own) else None

        self.ask_call(Op.SET_NEXT, payload, "set_next_options")

    def call_answer(self, timeout: float | None) -> Any:
        """The answer to the call that is pending: one result an environment, or what its sequel makes of them.

        Raises:
            StepTimeout: Not within ``timeout`` seconds; the answer is still pending.
            Exception: What the call raised in an environment.
        """
        return self.answer_by(deadline_of(timeout), timeout)

    def answer_by(self, deadline: float | None, timeout: float | None) -> Any:
        """As :meth:`call_answer`, by a moment that was ``timeout`` seconds away when the call was made."""
        call = self.call
        assert call is not None
        sequel, command = call.sequel, call.command
        finished = self.finish(call, deadline)
        del call  # it holds the exception, whose traceback would hold it
        if finished is None:
            raise self.too_late(wait_name(command), timeout)
        result, error = finished
        if error is not None:
            try:
                self.raise_answer(error)
            finally:
                del error, finished
        if sequel is None:
            return tuple(result.results.get(row) for row in range(self.num_envs))
        return sequel(result, deadline, timeout)

    def ask_call(
        self, op: Op, payload_of: Callable[[Worker], Any], command: str, *, sequel: Any = None, alone: bool = False,
        workers: Sequence[Worker] | None = None,
    ) -> None:  # fmt: skip
        """A call that is no step and no reset; workers for which ``payload_of`` gives ``None`` are left out.

        Args:
            op, command: Which.
            payload_of: What goes with it.
            sequel: See :class:`~vecenv.engine.pending.Request`.
            alone: It takes the place of the call whose sequel it is, at once.
            workers: The workers to ask; ``None``: those that have rows.
        """
        asked = [(worker, payload) for worker in workers or self.pool.workers if (payload := payload_of(worker)) is not None]
        if dead := [row for worker, _ in asked if worker.death is not None for row in worker.rows]:
            self.ledger.refuse({row: self.failed.get(row, "its worker died") for row in dead})
        request = self.composed(command, [(worker, worker.rows, op, payload) for worker, payload in asked])
        request.sequel = sequel
        self.pool.ask(request, alone=alone)

    def _require_picklable(self, payload: Any) -> None:
        """Arguments that cannot travel are the caller's to know, before anything is sent."""
        if not all(worker.local for worker in self.pool.workers):
            cloudpickle.dumps(payload)

    # -- saving -----------------------------------------------------------------------------------------------------

    def episodes_of(self, row: int) -> Any:
        """Where the seeds of a row's episodes come from; ``None``: its environment draws them."""

    def save(self, rows: list[int], verify: bool) -> Any:
        """The states of some rows; see :meth:`vecenv.AsyncVectorEnv.save`."""
        self._ask_save(rows, verify, Snapshots)
        return self.call_answer(None)

    def state_dict(self, spaces: list[Any], verify: bool) -> Any:
        """The states of all rows, counters, seeds and the generators of ``spaces`` in one dict."""
        self._ask_save(list(range(self.num_envs)), verify, partial(self._dict_of, spaces))
        return self.call_answer(None)

    def snapshots(self) -> list[Snapshot]:
        """The states of all rows, between two calls: it is no call, and leaves nothing pending, and nothing on record.

        Raises:
            NotRestorable: An environment cannot be saved, or its worker has died.
        """
        taken: list[Snapshot] = []
        self._ask_save(list(range(self.num_envs)), False, taken.extend)
        request = self.call
        assert request is not None
        self.wait_for(request, None)
        result = self.settlement_of(request).result
        self.pending = self.emptied(0, 0)
        assert result is not None
        if result.failures or result.deaths:
            raise NotRestorable(result.deaths[0].text if result.deaths else result.failures[0][0].text)
        request.sequel(result, None, None)
        return taken

    def _ask_save(self, rows: list[int], verify: bool, dress: Callable[[list[Snapshot]], Any]) -> None:
        self.ask_call(Op.SAVE, _own_rows(rows), "save", sequel=partial(self._saved, rows, verify, dress))

    def _saved(
        self, rows: list[int], verify: bool, dress: Callable[[list[Snapshot]], Any], result: Result, deadline: float | None,
        timeout: float | None,
    ) -> Any:  # fmt: skip
        """The states came: add what the engine knows, and ask for the proof of kinds that have none."""
        snapshots: list[Snapshot] = []
        new: dict[Kind, int] = {}
        for row in rows:
            one: Snapshot = result.results[row]
            known = one.row
            if verify and known.kind not in self.proved:
                new.setdefault(known.kind, row)
            if known.used:
                one = one.having(observation=self.store.row(row), episodes=self.episodes_of(row))
            snapshots.append(one)
        if not new:
            return dress(snapshots)
        then = partial(self._proved, frozenset(new), partial(dress, snapshots))
        self.ask_call(Op.PROVE, _own_rows(sorted(new.values())), "save", sequel=then, alone=True)
        return self.answer_by(deadline, timeout)

    def _proved(self, kinds: frozenset[Kind], answer: Callable[[], Any], *_: Any) -> Any:
        self.proved |= kinds
        return answer()

    def _dict_of(self, spaces: list[Any], snapshots: list[Snapshot]) -> dict[str, Any]:
        return StateDict(
            format=FORMAT, num_envs=self.num_envs, autoreset_mode=self.mode.name, snapshots=Snapshots(snapshots),
            counters=(self.pending.steps, self.pending.resets, self.ledger.restarts), seeds=self.restart_seeds.state,
            spaces=[_space_codec(space).save(space) for space in spaces],
        )  # fmt: skip

    # -- loading ----------------------------------------------------------------------------------------------------

    def were_loaded(self, known: Mapping[int, Row]) -> None:
        """These rows go on from snapshots. It may be done again."""

    def load(self, snapshots: Any, rows: list[int]) -> Any:
        """Put saved states in place; see :meth:`vecenv.AsyncVectorEnv.load`."""
        self._ask_load(rows, parse_snapshots(snapshots, rows), lambda: None)
        return self.call_answer(None)

    def load_state_dict(self, state: Mapping[str, Any], spaces: list[Any]) -> Any:
        """Go on from what :meth:`state_dict` gave."""
        for key in ("format", "num_envs", "autoreset_mode", "snapshots", "counters", "seeds", "spaces"):
            if not isinstance(state, Mapping) or key not in state:
                raise SnapshotMismatch(f"this is no state_dict() of a vector environment: it has no {key!r}")
        for key, own in {"format": FORMAT, "num_envs": self.num_envs, "autoreset_mode": self.mode.name}.items():
            if state[key] != own:
                raise SnapshotMismatch(f"its {key} is {state[key]!r}, and that of this vector environment is {own!r}")
        rows = list(range(self.num_envs))
        self._ask_load(rows, parse_snapshots(state["snapshots"], rows), self._rest_of(state, spaces))
        return self.call_answer(None)

    def _ask_load(self, rows: list[int], each: list[Snapshot], extras: Callable[[], None]) -> None:
        of_row = dict(zip(rows, each, strict=True))
        known = {row: snapshot.row for row, snapshot in of_row.items()}
        for row, one in known.items():
            self.require_observation(row, one)

        def payload(worker: Worker) -> Any:
            first = worker.rows[0]
            return [(row - first, of_row[row]) for row in worker.rows if row in of_row] or None

        def fits(result: Result, deadline: float | None, timeout: float | None) -> Any:
            """All of them fit: have them put in place."""
            then = partial(self._in_place, known, extras)
            self.ask_call(Op.LOAD, _own_rows(list(of_row)), "load", sequel=then, alone=True)
            return self.answer_by(deadline, timeout)

        self.ask_call(Op.CHECK, payload, "load", sequel=fits)

    def require_observation(self, row: int, one: Row) -> None:
        """Refuse a snapshot whose last observation no row of this engine can have.

        Raises:
            SnapshotMismatch: It cannot.
        """
        if not one.used:
            return
        try:
            self.store.require(one.observation)
        except Exception as error:
            if succeeds_when_repeated(partial(self.store.require, one.observation)):
                raise
            text = f"it is of {one.kind.env_id}, and its observation is none of this environment: {error}"
            raise SnapshotMismatch(f"env {row}: the snapshot does not fit: {text}") from error

    def _in_place(self, known: dict[int, Row], extras: Callable[[], None], *_: Any) -> Any:
        """They are: put the rest beside them. It may be done again."""
        self.put_beside(known)
        extras()
        return self.store.take(np.array(list(known), np.intp)) if all(one.used for one in known.values()) else None

    def put_beside(self, known: Mapping[int, Row]) -> None:
        """What an engine itself knows of rows that were loaded. It may be done again."""
        for row, one in known.items():
            if one.used:
                self.store.put_row(row, one.observation)
            self.ledger.mark_recovered(row)
        self.were_loaded(known)
        if self.policy.restart:
            self.remembered.keep(list(known), all_rows=len(known) == self.num_envs)

    def _rest_of(self, state: Mapping[str, Any], spaces: list[Any]) -> Callable[[], None]:
        """What puts all of a ``state_dict()`` in place that no row has; refuses what does not fit."""

        def read() -> tuple[Any, Any, Any]:
            opened = [
                (space, its if its is None else _space_codec(space).open(space, its))
                for space, its in zip(spaces, state["spaces"], strict=True)
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
            now, then = self.pending, self.next_pending
            assert then is not None
            made = now.steps - self.steps_before
            now.steps, now.resets, self.steps_before = env_steps, resets, env_steps - made
            then.steps, then.resets, self.ledger.restarts = env_steps, resets, restarts
            self.restart_seeds = seeds
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
