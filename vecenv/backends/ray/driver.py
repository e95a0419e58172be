"""The driver of ``RayVectorEnv``: splits calls over hosts, and builds their results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import cloudpickle
import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode

from vecenv.backends.ray.exchange import HostExchange, HostRequest, RequestPart, reset_arguments, to_array_index
from vecenv.backends.ray.host import record_type
from vecenv.backends.ray.hosts import HostPool
from vecenv.errors import NotRestorable, VecEnvError, envs_text, failed_earlier_error
from vecenv.front.arguments import ResetOptions
from vecenv.front.capabilities import Capabilities
from vecenv.front.driver import LateReplies, Stepped, WorkerDriver, closed_in_child
from vecenv.link.actions import ActionStage
from vecenv.link.infos import NO_INFO, InfoReader, WorkerInfos
from vecenv.link.messages import name_envs
from vecenv.link.observations import SharedStore, require_fitting_observation
from vecenv.shm import INFO_BYTES, fixed_tree
from vecenv.shm.layout import Array
from vecenv.state.snapshots import Row, Snapshot, Snapshots, parse_snapshots
from vecenv.state.vector_state import pack_state, read_state
from vecenv.system.reporting import warn
from vecenv.system.signals import deferred_signals, raise_if_from_handler

_LATE_HOSTS_NAMED: Final = 4
_SNAPSHOT_KEY: Final = "RayVectorEnv"


class HeldEpisode(NamedTuple):
    """The addition to the snapshot of a row for which a reset is held: its next step returns the result of this reset.

    Attributes:
        last_observation: The observation in the row's latest result. That in the snapshot is the reset's.
        info: The info of the reset.
    """

    last_observation: Any
    info: Any


class HostsDriver(WorkerDriver):
    """The driver of environments on hosts.

    Args:
        pool: Hosts that are ready.
        observation_space, action_space: The spaces of one environment.
        action_spaces: The batched action space.
        mode: The autoreset mode.
        **policy: The policy for failures; see :class:`HostExchange`.

    Attributes:
        exchange: The pending requests and the latest results.
        was_late: True after a call has timed out.
    """

    exchange: HostExchange
    owned_resource = "its hosts"
    missing_reasons: ClassVar[Mapping[str, str]] = {
        **WorkerDriver.missing_reasons, "freezing": "its environments are stepped by hosts",
        "workers": "its workers are on other machines; stats() works everywhere",
    }  # fmt: skip
    was_late = False

    def __init__(
        self, pool: HostPool, observation_space: Space[Any], action_space: Space[Any], action_spaces: Space[Any],
        mode: AutoresetMode, **policy: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.pool, self.mode, self.restarts_rows = pool, mode, policy["restart"]
        self.exchange = HostExchange(self.state, self.counters, self.timeout_error, pool, observation_space, mode, **policy)
        self.num_envs = self.batch_size = n = self.exchange.num_envs
        self.store, self.failure_log = self.exchange.store, self.exchange.failure_log
        self.observers = self.failure_log.observers
        self._action_space, tree = action_space, fixed_tree(action_space, "action")
        self._actions = np.zeros(n, record_type(tree))
        leaves = [self._actions[name] for name in self._actions.dtype.names or ()]
        self.stage = ActionStage(action_space, action_spaces, n, tree, leaves)
        self._reader = InfoReader(np.full(n, NO_INFO, np.uint64), np.zeros((n, INFO_BYTES), np.uint8))
        self.last_received = np.arange(n)

    # -- steps and resets -------------------------------------------------------------------------------------------------

    def submit_step(self, actions: Any) -> None:
        self.require_idle("step_async")
        self.require_not_failed(range(self.num_envs))
        action_list = self.stage.put(actions)
        for observer in self.observers:
            observer.on_step(None, actions if action_list is None else action_list)
        self._send_step(range(self.num_envs), action_list, for_recv=False)

    def send_rows(self, rows: list[int], action_list: list[Any] | None) -> None:
        self._send_step(rows, action_list, for_recv=True)

    def _send_step(self, rows: Sequence[int], action_list: list[Any] | None, *, for_recv: bool) -> None:
        """Send a step of rows. ``action_list``: their actions; ``None`` if the actions are staged in arrays."""
        exchange = self.exchange
        action_by_row = None if action_list is None else dict(zip(rows, action_list, strict=True))
        request = HostRequest("step", rows if isinstance(rows, range) else sorted(rows))
        rows_to_step, held, seeds = request.rows, list[int](), dict[int, Any]()
        if exchange.failure_log.rows_to_rebuild or exchange.held:
            to_rebuild = exchange.failure_log.rows_to_rebuild.intersection(rows)
            held = sorted((exchange.held.keys() & set(rows)) - to_rebuild)
            exchange.replace_hosts(to_rebuild, count=True)
            rows_to_step = [row for row in rows_to_step if row not in to_rebuild and row not in held]
            seeds = exchange.announce_rebuild(request, sorted(to_rebuild))
        parts = exchange.split(request, rows_to_step)
        calls = [(part, *self._host_call(part, action_by_row, for_recv)) for part in parts]
        with exchange.changing():
            for call in calls:
                exchange.submit(*call)
            if seeds:
                exchange.rebuild(request, seeds)
            exchange.return_held(held)
            exchange.request = None if for_recv else request

    def _host_call(self, part: RequestPart, action_by_row: dict[int, Any] | None, for_recv: bool) -> tuple[Any, ...]:
        """Return the arguments of :meth:`HostExchange.submit`, after the part itself, for a step of its rows."""
        if action_by_row is not None:  # a pickled batch
            return "send", cloudpickle.dumps(_regroup(self._action_space, [action_by_row[row] for row in part.rows])), True
        method = "send" if for_recv or part.rows is not part.host.rows else "step"
        return method, self._actions[to_array_index(part.rows)].tobytes()

    def submit_reset(self, seeds: list[Any], ids: Array | None, options: ResetOptions, *, for_recv: bool) -> None:
        """Replace dead hosts, and submit a reset. Unless ``for_recv`` is set, drop everything that is pending."""
        exchange = self.exchange
        rows = list(range(self.num_envs)) if ids is None else sorted(ids.tolist())
        if ids is not None:
            exchange.drop_if_droppable()
        if for_recv:
            self.require_not_in_flight("reset_async", rows)
        elif ids is not None:
            exchange.wait_until_idle()  # so that other rows in flight are returned with the observations of their replies
            exchange.store.require_received(set(range(self.num_envs)).difference(rows))
        seeds = self.announce_reset(rows, seeds, options, drops=not for_recv)
        exchange.replace_hosts(rows, count=False)
        request = HostRequest("reset", rows, seeds, options)
        parts = [(part, reset_arguments(part, seeds)) for part in exchange.split(request, rows)]
        with exchange.changing():
            if not for_recv:
                exchange.drop_pending()
                exchange.request = request
            # with restarts, the last observation stays, because it becomes the `final_obs` of the row
            if isinstance(exchange.store, SharedStore) and not exchange.restart:
                for row in exchange.failure_log.failed.keys() - set(rows):
                    exchange.store.clear_row(row)
            exchange.forget(rows)
            for part, arguments in parts:
                exchange.submit(part, "reset", arguments)
            if ids is None and isinstance(seeds[0], (int, np.integer)):
                exchange.seeds = np.random.SeedSequence(abs(int(seeds[0])))
        if ids is None:
            self.state.changing = False

    def wait_for_result(self, deadline: float | None) -> Stepped | None:
        """Return the result of the pending step or reset. At the deadline, return ``None``; the call stays pending.

        Raises:
            StepTimeout: There was no result within ``step_timeout``; the call stays pending.
            Exception: An environment raised, or a worker or host died.
        """
        exchange, request = self.exchange, self.exchange.request
        assert request is not None
        if not exchange.wait_for_all(request, deadline, f"{request.command}_wait"):
            return None
        observations = _read(lambda: exchange.store.batch(self.copies), exchange.drop_pending)
        infos = WorkerInfos(self._reader, None, self.num_envs, exchange.infos, {})
        flags = exchange.rewards.copy(), exchange.terminations.copy(), exchange.truncations.copy()
        # in case an observer raises: after a `TypeError` or `ValueError`, the guard records no interruption
        request.interrupted = True
        for observer in self.observers:
            observer.on_result(None, (observations, *flags, infos) if request.command == "step" else (observations, infos))
        result: Stepped = (observations, *flags, infos if exchange.infos else {})
        self.state.changing = True  # until the guard has returned the result
        exchange.end(request)
        self.last_received = np.arange(self.num_envs)
        return result

    def recv(
        self, count: int | None, deadline: float | None, enough: int | None = None, enough_from: float = np.inf
    ) -> Stepped | None:
        """Return the next ``count`` rows to finish (``None``: :attr:`batch_size`), or ``None`` at the deadline.

        If ``enough`` is given, that many rows suffice from the time ``enough_from`` on, and rows that are not in flight are
        not awaited.

        Raises:
            NoAsyncCallError: Too few rows are in flight.
            AlreadyPendingCallError: A step or a call is pending that ``recv`` cannot fetch.
            StepTimeout: They did not finish within ``step_timeout``.
            Exception: An environment raised, or a worker or host died; rows with results stay ready.
        """
        exchange = self.exchange
        count, until = self.batch_size if count is None else count, deadline
        exchange.convert_for_recv(count if enough is None else enough)
        if enough is not None:
            count = max(min(count, len(exchange.in_flight)), enough)
            until = min(enough_from, np.inf if deadline is None else deadline)
        has_rows = exchange.wait_for_rows(count, None if until == np.inf else until)
        if not has_rows and (enough is None or not exchange.wait_for_rows(enough, deadline)):
            return None
        ready = list(exchange.ready)[:count]
        rows = np.array(ready, np.intp)
        observations = _read(lambda: exchange.store.take(rows), lambda: exchange.remove_received(ready))
        row_infos = {row: exchange.infos[row] for row in ready if row in exchange.infos}
        infos = WorkerInfos(self._reader, rows, len(rows), row_infos, {})
        result = observations, exchange.rewards[rows], exchange.terminations[rows], exchange.truncations[rows], infos
        for observer in self.observers:
            observer.on_result(rows, result)
        self.state.changing = True  # until the guard has returned the result
        exchange.remove_received(ready)
        self.last_received = rows
        return result

    recv_enough = recv  # `recv` accepts the arguments of both methods

    # -- calls into environments ------------------------------------------------------------------------------------------

    def begin_call(self, name: str, args: Any, kwargs: Any) -> None:
        """Begin to call a method, or read an attribute, of every environment."""
        self._begin_call("call", range(self.num_envs), lambda part: ((name, *args), kwargs), (name, args, kwargs))

    def begin_exec(self, func: Callable[..., Any], rows: Sequence[int], args: Any, kwargs: Any) -> None:
        """Begin to call a function with each environment of ``rows``."""
        announced = func, args, kwargs
        self._begin_call("exec_func", rows, lambda part: ((func, part.local, *args), kwargs), announced)

    def begin_set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Begin to set an attribute of every environment."""
        announced = name, values
        self._begin_call(
            "set_attr", range(self.num_envs), lambda part: ((name, [values[row] for row in part.rows]), {}), announced
        )

    def begin_set_next(self, rows: Sequence[int], given: Sequence[Any]) -> None:
        """Begin to set seeds and options for the next episodes of ``rows``. ``given`` has a pair for every environment."""

        def arguments_for(part: RequestPart) -> Any:
            seeds, options = zip(*(given[row] for row in part.rows), strict=True)
            return (list(options),), {"seed": list(seeds), "env_id": part.local}

        self._begin_call("set_next_options", rows, arguments_for, ([given[row] for row in rows],))

    def _begin_call(
        self, command: str, rows: Sequence[int], arguments_for: Callable[[RequestPart], Any], announced: Any = None,
        method: str | None = None,
    ) -> HostRequest:  # fmt: skip
        """Submit a call to the hosts of ``rows``; ``arguments_for`` returns the arguments and keyword arguments of a part.

        Observers are notified of ``announced``, unless it is ``None``. Hosts call ``method``; default: ``command``.

        Raises:
            EnvFailed: The host of one of the rows is dead.
        """
        exchange, request = self.exchange, HostRequest(command, sorted(rows), droppable=True)
        name = method or command
        parts = [(part, cloudpickle.dumps((name, *arguments_for(part)))) for part in exchange.split(request, request.rows)]
        if dead_rows := [row for part, _ in parts if part.host.death for row in part.rows]:
            raise failed_earlier_error({row: exchange.failure_log.failed.get(row, "its host died") for row in dead_rows})
        if announced is not None:
            for observer in self.observers:
                observer.on_call(list(rows), command, announced)
        with exchange.changing():
            for part, pickled_call in parts:
                exchange.submit(part, "call", pickled_call)
            exchange.request = request
        return request

    def save(self, rows: list[int], verify: bool) -> Snapshots:
        """Return the states of some rows."""
        self.require_intact(rows)
        self._begin_call("save", rows, lambda part: ((), {"env_id": part.local, "verify": verify}))
        saved, held = self.exchange.finish_call(), self.exchange.held
        for row in held.keys() & set(rows):
            beside = {_SNAPSHOT_KEY: HeldEpisode(self.exchange.store.row(row), held[row][1])}
            saved[row] = saved[row].having(beside=beside)
        return Snapshots([saved[row] for row in rows])

    def snapshots(self) -> Sequence[Snapshot]:
        """Return the states of all rows without verification, for a recorder.

        Raises:
            NotRestorable: An environment has failed or cannot be saved, or its worker or host is dead.
        """
        failures = self.exchange.failure_log
        earlier_errors, num_errors = list(failures.errors), failures.num_errors
        try:
            return self.save(list(range(self.num_envs)), verify=False)
        except VecEnvError as error:
            if isinstance(error, NotRestorable):  # no environment has failed, so drop the records of this error
                failures.errors.clear()
                failures.errors.extend(earlier_errors)
                failures.num_errors = num_errors
            raise NotRestorable(str(error)) from error

    def load(self, snapshots: Any, rows: list[int]) -> Any:
        """Load states into rows, after all hosts have checked theirs.

        Return the observations, or ``None`` if one of the states has none, because it was saved before the first reset.
        """
        parsed = parse_snapshots(snapshots, rows)
        snapshots_by_row = dict(zip(rows, parsed, strict=True))
        row_states = {row: snapshot.row for row, snapshot in snapshots_by_row.items()}
        for row, row_state in row_states.items():
            require_fitting_observation(self.store, row, row_state)

        def arguments_for(part: RequestPart) -> Any:
            return ([snapshots_by_row[row] for row in part.rows], part.local), {}

        self._begin_call("load", rows, arguments_for, method="require_fit")
        self.exchange.finish_call()
        with deferred_signals():
            request = self._begin_call("load", rows, arguments_for, (parsed,))
            # an interrupted load may have changed any of these environments
            self.exchange.failure_log.mark_for_rebuild(rows, "the load of its state was interrupted")
        try:
            self.exchange.finish_call()
        except Exception as error:
            if self.exchange.request is None:  # the load has ended
                name_envs(error, request.results, "loaded_rows")
                self._accept_loaded({row: row_states[row] for row in request.results})
            raise
        self._accept_loaded(row_states)
        have_observations = all(row_state.used for row_state in row_states.values())
        return self.exchange.store.take(np.array(rows, np.intp)) if have_observations else None

    def _accept_loaded(self, row_states: Mapping[int, Row]) -> None:
        """Store the observations and held resets of rows that were loaded, and forget that they failed."""
        exchange = self.exchange
        with exchange.changing():
            exchange.forget(row_states)
            for row, row_state in row_states.items():
                observation = row_state.observation
                if (held := (row_state.beside or {}).get(_SNAPSHOT_KEY)) is not None:
                    exchange.held[row], observation = (observation, held.info), held.last_observation
                if row_state.used:
                    exchange.store.set_row(row, observation)

    def state_dict(self, rows: list[int], spaces: list[Any], verify: bool) -> dict[str, Any]:
        """Return the states of rows, counters, seeds and the generators of ``spaces`` in one dict."""
        counts = self.counters.steps, self.counters.resets, self.exchange.failure_log.restarts
        return pack_state(self.save(rows, verify), self.mode, counts, self.exchange.seeds, spaces)

    def load_state_dict(self, state: Mapping[str, Any], rows: list[int], spaces: list[Any]) -> Any:
        """Continue from the result of :meth:`state_dict`."""
        vector_state = read_state(state, len(rows), self.mode, spaces)
        observations = self.load(vector_state.snapshots, rows)
        self.exchange.seeds = vector_state.seeds
        vector_state.load(self.counters, self.failure_log)
        return observations

    # -- pending requests -------------------------------------------------------------------------------------------------

    def require_idle(self, method: str, rows: Collection[int] | None = None) -> None:
        super().require_idle(method)  # without `rows`: calls are refused while any environment is in flight

    def kill_pending(self, rows: Collection[int]) -> None:
        """Kill the hosts with pending requests for any of these rows."""
        busy = [part.host for part in self.exchange.parts.values() if not set(part.rows).isdisjoint(rows)]
        with self.exchange.changing():
            for host in busy:
                self.exchange.kill_host(host, "it was abandoned")

    def _describe_late(self, seconds: float | None) -> LateReplies:
        self.was_late = True
        parts, text, where = self.exchange.parts.values(), "", {}
        late = {part.host.index: part for part in reversed(parts)}  # of a host with several parts, the earliest
        for _, part in sorted(late.items())[:_LATE_HOSTS_NAMED]:
            request_text = f"{envs_text(part.rows)}, {part.host.label}, during {part.request.command}"
            text += f"\n{request_text}: no reply yet."
            where.update(dict.fromkeys(part.rows, request_text))
        return LateReplies(text, sorted({row for part in parts for row in part.rows}), where)

    @property
    def seconds_waited(self) -> float:
        return self.exchange.seconds_waited

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("ray", restarts=self.exchange.restart, snapshots=True)

    # -- statistics and shutdown ------------------------------------------------------------------------------------------

    def _compute_stats(self) -> dict[str, float]:
        stats, failures = super()._compute_stats(), self.exchange.failure_log
        host_stats = list(self.pool.call_all("stats").values())  # of hosts that reply in time
        stats["errors"] = float(failures.num_errors)
        stats["restarts"] = float(failures.restarts)
        stats["bytes_pickled"] = float(sum(each["bytes_pickled"] for each in host_stats))
        if host_stats:
            stats["step_time_mean"] = float(np.mean([each["step_time_mean"] for each in host_stats]))
            for key in ("step_time_slowest_env", "straggler_share"):
                stats[key] = max(each[key] for each in host_stats)
        return stats

    def shut_down(self, timeout: float, *, terminate: bool) -> None:
        """End the hosts, and warn about environments that raised in ``close``. Safe to repeat."""
        for index, texts in self.pool.close(timeout, terminate=terminate).items():
            rows = self.pool.hosts[index].rows
            for text in texts:
                warn(f"host {index} (its env 0 is env {rows.start} here): {text}")
        self.exchange.failure_log.restart_log.close()

    def release(self) -> None:
        """Release pending requests and observers after ``close()``. Idempotent."""
        if self.state.unusable == "closed":
            self.exchange.drop_pending()
            self.exchange.dropped.clear()
            self.observers.clear()
            closed_in_child.discard(self)


def _read(read: Callable[[], Any], forget: Callable[[], None]) -> Any:
    """Return the result of ``read``. If ``read`` itself raises, not a signal handler, call ``forget`` to drop the result."""
    try:
        return read()
    except Exception as error:
        raise_if_from_handler(error, read)
        forget()
        raise


def _regroup(space: Space[Any], items: list[Any]) -> Any:
    """Return a batch of actions from which ``gymnasium.vector.utils.iterate`` yields each action unchanged."""
    if isinstance(space, spaces.Dict):
        return {key: _regroup(inner, [item[key] for item in items]) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_regroup(inner, [item[index] for item in items]) for index, inner in enumerate(space.spaces))
    return items
