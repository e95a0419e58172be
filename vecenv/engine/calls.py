"""Calls into environments: methods, attributes, functions, snapshots. Each is sequential code: send, wait, return.

If a call is interrupted while it waits, the next call drops it, and late replies to it are ignored. Only ``call_async`` and
``exec_func_send`` stay pending, because another call fetches their results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.engine.exchange import Exchange
from vecenv.engine.failures import FailureLog, Rebuilder
from vecenv.engine.worker_process import Worker
from vecenv.errors import NotRestorable, WorkerDied
from vecenv.front.driver import WorkerDriver
from vecenv.link.messages import Op
from vecenv.link.observations import Store, require_observation
from vecenv.state.snapshots import Snapshot, Snapshots, parse_snapshots
from vecenv.state.vector_state import pack_state, read_state

_INTERRUPTED_LOAD: Final = "the load of its state was interrupted"


class EngineCalls(WorkerDriver):
    """The methods of the process engine that call into environments, except steps and resets.

    Attributes:
        mode: The autoreset mode.
        rebuilder: The data for rebuilding failed rows.
        verified: Rows that were found to continue exactly from a snapshot.
    """

    exchange: Exchange
    failures: FailureLog
    store: Store
    mode: AutoresetMode
    rebuilder: Rebuilder

    def __init__(self) -> None:
        super().__init__()
        self.verified: set[int] = set()

    def begin_call(self, name: str, args: Any, kwargs: Any) -> None:
        """Begin to call a method, or read an attribute, of every environment."""
        payload = (name, args, kwargs)
        self._begin("call", Op.CALL, lambda worker: payload, range(self.num_envs), payload)

    def begin_exec(self, func: Callable[..., Any], rows: Collection[int], args: Any, kwargs: Any) -> None:
        """Begin to call a function with each of some environments."""
        select, arguments = _select_positions(rows), (func, args, kwargs)
        self._begin(
            "exec_func", Op.EXEC, lambda worker: (ks, *arguments) if (ks := select(worker)) else None, list(rows), arguments
        )

    def begin_set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Begin to set an attribute of every environment. Earlier verifications become invalid."""
        self.verified.clear()

        def build_payload(worker: Worker) -> Any:
            return name, [values[row] for row in worker.rows]

        self._begin("set_attr", Op.SET_ATTR, build_payload, range(self.num_envs), (name, values))

    def begin_set_next(self, rows: Collection[int], pairs: Sequence[Any]) -> None:
        """Begin to set the seed and options of the next episode of some environments; ``pairs`` has one per environment."""
        selected = set(rows)

        def build_payload(worker: Worker) -> Any:
            worker_pairs = [pairs[row] if row in selected else None for row in worker.rows]
            return worker_pairs if any(pair is not None for pair in worker_pairs) else None

        self._begin("set_next_options", Op.SET_NEXT, build_payload, list(rows), ([pairs[row] for row in rows],))

    def _begin(
        self, command: str, op: Op, build_payload: Callable[[Worker], Any], rows: Sequence[int], arguments: tuple[Any, ...]
    ) -> None:
        """Begin a call that may change environments, and announce it if it passes all checks."""
        self.exchange.send_call(command, op, build_payload, partial(self.announce_call, rows, command, arguments))

    def announce_call(self, rows: Sequence[int], name: str, arguments: tuple[Any, ...]) -> None:
        """Notify the observers of a call that may change environments."""
        for observer in self.observers:
            observer.on_call(rows, name, arguments)

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def save(self, rows: Sequence[int], verify: bool) -> Snapshots:
        """Return the states of some rows. With ``verify``, also verify those that have not been verified yet."""
        self.failures.require_intact(rows)
        saved = self._call("save", Op.SAVE, _select_positions(rows))
        if verify and (new := sorted(set(rows) - self.verified)):
            try:
                self._call("save", Op.PROVE, _select_positions(new))
            except WorkerDied as error:
                error.add_note("the check before the first save steps copies of an environment; save(verify=False) skips it")
                raise
            self.verified |= set(new)
        return Snapshots(self.with_observation(row, saved[row]) for row in rows)

    def with_observation(self, row: int, snapshot: Snapshot) -> Snapshot:
        """Add the row's latest observation, if it has one, to a worker's snapshot."""
        return snapshot.having(observation=self.store.row(row)) if snapshot.row.used else snapshot

    def snapshots(self) -> list[Snapshot]:
        """Return the states of all rows, even in the middle of another call. Failures are not recorded.

        Raises:
            NotRestorable: An environment cannot be saved, or its worker has died.
        """
        exchange, rows = self.exchange, range(self.num_envs)
        exchange.send_call("save", Op.SAVE, _select_positions(rows))
        request = exchange.request
        assert request is not None
        exchange.wait_for(request, None)
        exchange.request = None
        if request.deaths or request.failures:
            raise NotRestorable(request.deaths[0].text if request.deaths else request.failures[0][0].text)
        return [self.with_observation(row, request.results[row]) for row in rows]

    def load(self, snapshots: Any, rows: list[int]) -> Any:
        """Load states, and return the observations; ``None`` if a row has none. All are checked before any row changes."""
        failed = self.failures.failed
        parsed = parse_snapshots(snapshots, rows)
        snapshot_by_row = dict(zip(rows, parsed, strict=True))
        row_states = {row: snapshot.row for row, snapshot in snapshot_by_row.items()}
        for row, row_state in row_states.items():
            require_observation(self.store, row, row_state)

        def build_payload(worker: Worker) -> Any:
            first = worker.rows[0]
            return [(row - first, snapshot_by_row[row]) for row in worker.rows if row in snapshot_by_row] or None

        self._call("load", Op.CHECK, build_payload)
        self.announce_call(rows, "load", (parsed,))
        for row in rows:  # an interrupted load may have changed any of these environments
            failed[row] = _INTERRUPTED_LOAD
        try:
            self._call("load", Op.LOAD, _select_positions(rows))
        except Exception:
            if self.exchange.request is None:  # it was not interrupted: the other environments are loaded
                self._accept_all(snapshot_by_row)
            raise
        self._accept_all(snapshot_by_row)
        all_used = all(row_state.used for row_state in row_states.values())
        return self.store.take(np.array(rows, np.intp)) if all_used else None

    def _accept_all(self, snapshot_by_row: Mapping[int, Snapshot]) -> None:
        """Accept the rows that were loaded. By now, ``failed`` has another text for rows that failed meanwhile."""
        failed = self.failures.failed
        loaded = [row for row in snapshot_by_row if failed.get(row) == _INTERRUPTED_LOAD]
        for row in loaded:
            self.accept_loaded(row, snapshot_by_row[row])
        if self.restarts_rows:
            self.rebuilder.last_good.keep(loaded)

    def accept_loaded(self, row: int, snapshot: Snapshot) -> None:
        """Store the observation of a loaded row, and forget that it failed."""
        if snapshot.row.used:
            self.store.set_row(row, snapshot.row.observation)
        self.failures.forget([row])

    def _call(self, command: str, op: Op, build_payload: Callable[[Worker], Any]) -> dict[int, Any]:
        self.exchange.send_call(command, op, build_payload)
        return self.exchange.finish_call()

    # -- the whole state -----------------------------------------------------------------------------------------------

    def state_dict(self, spaces: list[Any], verify: bool) -> dict[str, Any]:
        """Return the states of all rows, counters, seeds and the generators of ``spaces`` in one dict."""
        snapshots = self.save(list(range(self.num_envs)), verify)
        counts = self.counters.steps, self.counters.resets, self.failures.restarts
        return pack_state(snapshots, self.mode, counts, self.rebuilder.seeds, spaces)

    def load_state_dict(self, state: Mapping[str, Any], spaces: list[Any]) -> Any:
        """Restore a state from :meth:`state_dict`, and return the observations."""
        saved = read_state(state, self.num_envs, self.mode, spaces)
        observations = self.load(saved.snapshots, list(range(self.num_envs)))
        self.rebuilder.seeds = saved.seeds
        saved.load(self.counters, self.failures)
        return observations


def _select_positions(rows: Collection[int]) -> Callable[[Worker], list[int] | None]:
    """Return a function that maps a worker to the positions of ``rows`` among its own, or to ``None`` if it has none."""
    selected = set(rows)
    return lambda worker: [row - worker.rows[0] for row in worker.rows if row in selected] or None
