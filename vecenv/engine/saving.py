"""Saves and loads rows: in which order workers are asked, what is checked before, and what the engine adds.

A save without a proof so far makes two requests: one for the states, then one for the proof that they are exact, once for
each kind of environment. A load makes two as well: the first asks whether every snapshot fits, and the second puts them in
place. The second request takes the place of the first in the table of pending requests, by one store. So an interrupted call
is either not made, or its answer is pending, as that of any other call, and ``call_wait`` gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from vecenv.engine.calls import Calls
from vecenv.engine.pending import Result, Worker
from vecenv.errors import NotRestorable, SnapshotMismatch
from vecenv.link.messages import Op
from vecenv.state.codecs import Codec, how_of
from vecenv.state.snapshots import FORMAT, Kind, Row, Snapshot, Snapshots, StateDict, parse_snapshots
from vecenv.system.uninterrupted import succeeds_when_repeated

__all__ = ["load", "load_state_dict", "put_beside", "require_observation", "save", "save_unproved", "state_dict"]


def save(engine: Calls, rows: list[int], verify: bool) -> Any:
    """The states of some rows; see :meth:`vecenv.AsyncVectorEnv.save`."""
    _ask_save(engine, rows, verify, Snapshots)
    return engine.call_answer(None)


def load(engine: Calls, snapshots: Any, rows: list[int]) -> Any:
    """Put saved states in place; see :meth:`vecenv.AsyncVectorEnv.load`."""
    _ask_load(engine, rows, parse_snapshots(snapshots, rows), _nothing)
    return engine.call_answer(None)


def state_dict(engine: Calls, spaces: list[Any], verify: bool) -> Any:
    """The states of all rows, counters, seeds and the generators of ``spaces`` in one dict."""
    _ask_save(engine, list(range(engine.num_envs)), verify, partial(_dict_of, engine, spaces))
    return engine.call_answer(None)


def load_state_dict(engine: Calls, state: Mapping[str, Any], spaces: list[Any]) -> Any:
    """Go on from what :func:`state_dict` gave."""
    for key in ("format", "num_envs", "autoreset_mode", "snapshots", "counters", "seeds", "spaces"):
        if not isinstance(state, Mapping) or key not in state:
            raise SnapshotMismatch(f"this is no state_dict() of a vector environment: it has no {key!r}")
    for key, own in {"format": FORMAT, "num_envs": engine.num_envs, "autoreset_mode": engine.mode.name}.items():
        if state[key] != own:
            raise SnapshotMismatch(f"its {key} is {state[key]!r}, and that of this vector environment is {own!r}")
    rows = list(range(engine.num_envs))
    _ask_load(engine, rows, parse_snapshots(state["snapshots"], rows), _rest_of(engine, state, spaces))
    return engine.call_answer(None)


# -- saving -------------------------------------------------------------------------------------------------------------


def _ask_save(engine: Calls, rows: list[int], verify: bool, dress: Callable[[list[Snapshot]], Any]) -> None:
    engine.ask_call(Op.SAVE, _own_rows(rows), "save", sequel=partial(_saved, engine, rows, verify, dress))


def _saved(
    engine: Calls,
    rows: list[int],
    verify: bool,
    dress: Callable[[list[Snapshot]], Any],
    result: Result,
    deadline: float | None,
    timeout: float | None,
) -> Any:
    """The states came: add what the engine knows, and ask for the proof of kinds that have none."""
    snapshots: list[Snapshot] = []
    kinds: dict[Kind, int] = {}
    for row in rows:
        one: Snapshot = result.results[row]
        known = one.row
        kinds.setdefault(known.kind, row)
        if known.used:
            one = one.having(observation=engine.store.row(row), episodes=engine.episodes_of(row))
        snapshots.append(one)
    new = kinds if verify else {}
    for kind in engine.proved:
        new.pop(kind, None)
    if not new:
        return dress(snapshots)
    then = partial(_proved, engine, frozenset(new), partial(dress, snapshots))
    engine.ask_call(Op.PROVE, _own_rows(sorted(new.values())), "save", sequel=then, alone=True)
    return engine.answer_by(deadline, timeout)


def save_unproved(engine: Calls) -> list[Snapshot]:
    """The states of all rows, between two calls: it is no call, and leaves nothing pending, and nothing on record.

    Raises:
        NotRestorable: An environment cannot be saved, or its worker has died.
    """
    rows = list(range(engine.num_envs))
    taken: list[Snapshot] = []
    _ask_save(engine, rows, False, taken.extend)
    request = engine.call
    assert request is not None
    engine.wait_for(request, None)
    result = engine.settlement_of(request).result
    engine.pending = engine.emptied(0, 0)
    assert result is not None
    if result.failures or result.deaths:
        raise NotRestorable(result.deaths[0].text if result.deaths else result.failures[0][0].text)
    request.sequel(result, None, None)
    return taken


def _proved(engine: Calls, kinds: frozenset[Kind], answer: Callable[[], Any], *_: Any) -> Any:
    engine.proved |= kinds
    return answer()


def _dict_of(engine: Calls, spaces: list[Any], snapshots: list[Snapshot]) -> dict[str, Any]:
    return StateDict(
        format=FORMAT,
        num_envs=engine.num_envs,
        autoreset_mode=engine.mode.name,
        snapshots=Snapshots(snapshots),
        counters=(engine.pending.steps, engine.pending.resets, engine.ledger.restarts),
        seeds=engine.recovery.seeds.state,
        spaces=[_space_codec(space).save(space) for space in spaces],
    )


# -- loading ------------------------------------------------------------------------------------------------------------


def _ask_load(engine: Calls, rows: list[int], each: list[Snapshot], extras: Callable[[], None]) -> None:
    of_row = dict(zip(rows, each, strict=True))
    known = {row: snapshot.row for row, snapshot in of_row.items()}
    for row, one in known.items():
        require_observation(engine, row, one)

    def payload(worker: Worker) -> Any:
        first = worker.rows[0]
        return [(row - first, of_row[row]) for row in worker.rows if row in of_row] or None

    def fits(result: Result, deadline: float | None, timeout: float | None) -> Any:
        """All of them fit: have them put in place."""
        then = partial(_in_place, engine, known, extras)
        engine.ask_call(Op.LOAD, _own_rows(list(of_row)), "load", sequel=then, alone=True)
        return engine.answer_by(deadline, timeout)

    engine.ask_call(Op.CHECK, payload, "load", sequel=fits)


def require_observation(engine: Calls, row: int, one: Row) -> None:
    """Refuse a snapshot whose last observation no row of this engine can have.

    Raises:
        SnapshotMismatch: It cannot.
    """
    if not one.used:
        return
    try:
        engine.store.require(one.observation)
    except Exception as error:
        if succeeds_when_repeated(partial(engine.store.require, one.observation)):
            raise
        text = f"it is of {one.kind.env_id}, and its observation is none of this environment: {error}"
        raise SnapshotMismatch(f"env {row}: the snapshot does not fit: {text}") from error


def _in_place(engine: Calls, known: dict[int, Row], extras: Callable[[], None], *_: Any) -> Any:
    """They are: put the rest beside them. It may be done again."""
    rows = list(known)
    put_beside(engine, known)
    extras()
    return engine.store.take(np.array(rows, np.intp)) if all(one.used for one in known.values()) else None


def put_beside(engine: Calls, known: Mapping[int, Row]) -> None:
    """What an engine itself knows of rows that were loaded. It may be done again."""
    for row, one in known.items():
        if one.used:
            engine.store.put_row(row, one.observation)
        engine.ledger.mark_recovered(row)
    engine.were_loaded(known)
    if engine.policy.restart:
        engine.recovery.remembered.keep(list(known), all_rows=len(known) == engine.num_envs)


def _rest_of(engine: Calls, state: Mapping[str, Any], spaces: list[Any]) -> Callable[[], None]:
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
