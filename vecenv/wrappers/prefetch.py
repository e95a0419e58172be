"""A wrapper that resets environments ahead of time, built on the public interface of ``AsyncVectorEnv``.

The wrapped vector environment has ``num_envs + spares`` environments, called *places* here, with one process each and
without autoreset. Each of the ``num_envs`` rows occupies one place. A place without a row is a spare: it begins an episode
that a row will need. When the episode of a row ends, the row moves to the spare that began its next episode, and its old
place becomes a spare.

The seed of an episode depends only on the row, on the seed of its last seeded reset, and on the number of episodes since
then. Timing decides the place of an episode, but does not affect its results.

A signal handler may raise at any time. If it interrupts a wait, the call stays pending, and a repeated wait returns its
result. If it interrupts a change of this class's state, calls raise ``ResetNeeded`` until ``reset()`` has reset all rows.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from vecenv.engine.vector_env import AsyncVectorEnv
from vecenv.errors import BusyError, EnvFailed, ErrorRecord, InfoError, StepTimeout
from vecenv.front.arguments import (
    ResetOptions,
    parse_at_least,
    parse_autoreset_mode,
    parse_count,
    parse_env_ids,
    parse_rows,
    parse_seeds,
    parse_timeout,
    parse_within,
    random_seed,
    select_options,
    split_reset_mask,
)
from vecenv.front.by_row import infos_by_row
from vecenv.front.capabilities import Capabilities, raise_unsupported
from vecenv.front.driver import still_in_flight_error
from vecenv.front.guard import is_busy
from vecenv.front.infos import InfoMerger
from vecenv.link.actions import check_batch
from vecenv.link.envs import call_env
from vecenv.planning.options import check_option, choice_check, int_check, parse_spares
from vecenv.state.snapshots import Snapshot, Snapshots, load_and_restore, parse_snapshots
from vecenv.state.vector_state import pack_state, read_state
from vecenv.system.reporting import warn
from vecenv.wrappers.equal_envs import EqualEnvBuilder, keep_attribute, require_equal
from vecenv.wrappers.places import PlaceNotes, name_rows, name_rows_in_records, naming_rows, select_rows, spaces_of
from vecenv.wrappers.row_episodes import EpisodeKey, EpisodePhase, RowEpisode, find_upcoming, without_pending

__all__ = ["EpisodePrefetcher"]

Array = npt.NDArray[Any]
_REFUSALS: Final[tuple[type[Exception], ...]] = (
    AlreadyPendingCallError, ClosedEnvironmentError, ValueError, TypeError, EnvFailed, InfoError,
)  # fmt: skip
"""Errors of calls that were refused before anything was sent, and of complete calls with infos that cannot be merged."""


class EpisodePrefetcher(VectorEnv[Any, Any, Any]):
    """A vector environment with spare environments, in which the next episodes begin ahead of time.

    It is for slow resets; see ``docs/workers.md``. All environments must be equal. Each episode has its own seed, derived
    from the seed of its row and the number of the episode. Other attributes come from ``envs``.

    Args:
        envs: An ``AsyncVectorEnv`` with ``num_envs + spares`` equal environments, one process each, and
            ``autoreset_mode="Disabled"``.
        spares: The number of spare environments.
        autoreset_mode: ``"NextStep"`` or ``"SameStep"``.

    Attributes:
        envs: The wrapped vector environment.
        spares: The number of spare environments.
        places: For each row, the index of its environment in ``envs``.
        counts: The number of episodes that were ``ready`` when a row needed them, ``late`` (a spare was still resetting) or
            ``missed`` (no spare had begun them, or its reset failed); and ``seconds``, the time during which calls waited
            only for resets.

    Raises:
        ValueError: ``envs``, ``spares`` and ``autoreset_mode`` do not fit together; the message names the reason.
    """

    def __init__(self, envs: Any, spares: int, autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP) -> None:
        mode = AutoresetMode(autoreset_mode)
        if isinstance(spares, bool) or not isinstance(spares, (int, np.integer)) or not 0 < spares < envs.num_envs:
            raise ValueError(f"`spares` must be an int within 1..{envs.num_envs - 1}, got {spares!r}")
        if mode is AutoresetMode.DISABLED:
            raise ValueError(
                "`autoreset_mode` must be NextStep or SameStep: spares begin only the episodes that follow by autoreset"
            )
        if envs.metadata["autoreset_mode"] is not AutoresetMode.DISABLED or envs.num_workers != envs.num_envs:
            raise ValueError(
                "EpisodePrefetcher(envs, ...) needs AsyncVectorEnv(env_fns, num_workers=None, autoreset_mode='Disabled')"
            )
        self.envs, self.spares, self.num_envs = envs, int(spares), envs.num_envs - int(spares)
        self.metadata = {**envs.metadata, "autoreset_mode": mode}
        self.autoreset_mode = mode
        self.spec, self.render_mode, self.closed = envs.spec, envs.render_mode, False
        self.single_observation_space, self.single_action_space = envs.single_observation_space, envs.single_action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.batch_size = self.num_envs
        self.counts = {"ready": 0, "late": 0, "missed": 0, "seconds": 0.0}
        self.places = list(range(self.num_envs))
        self._same_step = mode is AutoresetMode.SAME_STEP
        self._by_row, self._merger = infos_by_row(envs), InfoMerger()
        self._builder: EqualEnvBuilder | None = None  # builds environments with the attributes that set_attr has set
        self._order = itertools.count(1)
        self._rows = [RowEpisode(row, phase="running") for row in range(self.num_envs)]
        self._last_received = list(range(self.num_envs))
        self._prefetched: dict[EpisodeKey, int | None] = {}  # episodes begun early -> their places; None: the reset failed
        self._ready: dict[int | None, tuple[Any, dict[Any, Any]]] = {}  # place -> first observation and info
        self._waiting: dict[int, int] = {}  # place -> row, for rows that wait for the result of a step or of a reset
        self._final_results: dict[int, tuple[Any, ...]] = {}  # SameStep: row -> reward, flags, final infos of its last step
        self._results: dict[int, tuple[Any, ...]] = {}  # row -> result not yet returned to the caller
        self._full_batch: tuple[Any, ...] | None = None  # the result of `step`, if all rows were received together
        self._call = ""  # the pending call: "step" or "reset"; "" if there is none
        self._failure: BaseException | None = None  # the latest failure of a row that no call has raised yet
        self._changing = False  # True during a change of this object's state, and after an interrupted one
        self._interrupted = False  # a wait was interrupted: reset() may drop the pending call
        envs.add_observer(PlaceNotes(self))

    @classmethod
    def from_env_fns(
        cls, env_fns: Sequence[Callable[[], Any]], spares: int, *, autoreset_mode: str | AutoresetMode = "NextStep",
        batch_size: int | None = None, **options: Any,
    ) -> EpisodePrefetcher:  # fmt: skip
        """Build one environment per row, and ``spares`` more.

        Args:
            env_fns: Functions that all build the same environment, one per row.
            spares, autoreset_mode: See :class:`EpisodePrefetcher`.
            batch_size: The number of rows that ``recv`` returns by default; ``None``: all.
            **options: Other options of ``AsyncVectorEnv``.

        Raises:
            ValueError: Functions differ, or options do not fit.
        """
        n = len(env_fns)
        sizes = choice_check(None, or_=int_check(1, n)), f"None or an int within 1..{n} with spare workers"
        check_option("batch_size", batch_size, sizes)
        require_equal(env_fns)
        defaults = {"num_workers": None, "use_caller": False, "max_concurrency": None, "env_threads": 1}
        mode = parse_autoreset_mode(autoreset_mode)
        spares = parse_spares(spares, n, mode, **{name: options.get(name, defaults[name]) for name in defaults})
        builder = EqualEnvBuilder(env_fns[0])
        envs = AsyncVectorEnv([builder] * (n + spares), autoreset_mode="Disabled", **options)
        try:
            self = cls(envs, spares, mode)
            self._builder = builder
            self.batch_size = self.num_envs if batch_size is None else int(batch_size)
        except BaseException:
            envs.close(terminate=True)
            raise
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "envs":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.envs, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_envs={self.num_envs}, spares={self.spares}, {self.envs!r})"

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of ``envs``, with spare workers and without freezing."""
        capabilities: Capabilities = self.envs.capabilities
        return replace(capabilities, spare_workers=True, freezing=False)

    @property
    def num_workers(self) -> int:
        """The number of processes with a row."""
        return self.num_envs

    @property
    def worker_rows(self) -> list[range]:
        """The rows of each worker."""
        return [range(row, row + 1) for row in range(self.num_envs)]

    @property
    def in_flight(self) -> Array:
        """The rows with a step or reset that has begun and has not been returned."""
        batch_rows = self._full_batch[0] if self._full_batch else ()
        return np.array(sorted({*self._waiting.values(), *self._results, *batch_rows}), np.intp)

    @property
    def last_received(self) -> Array:
        """The rows that :meth:`send` steps by default: those of the latest :meth:`recv`, or all after a step or reset."""
        return np.array(self._last_received, np.intp)

    @property
    def observations(self) -> Any:
        """The latest observations of all rows."""
        return select_rows(self.single_observation_space, self.envs.observations, self.places)

    @property
    def errors(self) -> deque[ErrorRecord]:
        """The failures of ``envs``, with their rows as ``env``, or ``None`` for a spare without an episode."""
        return name_rows_in_records(self.envs.errors)

    error_queue = errors

    # -- reset and step -----------------------------------------------------------------------------------------------------

    def reset(self, *, seed: Any = None, options: ResetOptions = None) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes in all rows, or in those of ``options["reset_mask"]``."""
        self.reset_async(seed, options)
        return self.reset_wait()

    def reset_async(self, seed: Any = None, options: ResetOptions = None, *, env_id: Any = None) -> None:
        """Begin a reset; arguments and errors are those of ``AsyncVectorEnv.reset_async``.

        Results in flight are received first and dropped; with ``env_id``, other rows keep theirs. If a reset of all rows is
        refused after that, because its options cannot be sent, calls raise ``ResetNeeded`` until the next such reset.

        Raises:
            TypeError: A seed is not an integer.
            ValueError: A seed is negative.
        """
        ids = None if env_id is None else parse_env_ids(env_id, self.num_envs).tolist()
        seeds = parse_seeds(seed, self.num_envs, ids)
        mask, others = split_reset_mask(options, self.num_envs, ids)
        if ids is not None and mask is not None:
            raise ValueError("env_id and options['reset_mask'] both select the environments to reset: pass one of them")
        rows = ids if ids is not None else list(range(self.num_envs)) if mask is None else np.flatnonzero(mask).tolist()
        for row in rows:
            if not isinstance(seeds[row], int | None):
                raise TypeError(f"env {row}: its seed must be an integer or None, got {seeds[row]!r}")
            if seeds[row] is not None and seeds[row] < 0:
                raise ValueError(f"seeds must not be negative, got {seeds[row]}")
        self._require_usable()
        all_rows = len(rows) == self.num_envs and ids is None
        if self._call and not (all_rows and (self._interrupted or self._changing)):
            raise AlreadyPendingCallError(f"Calling `reset_async` while waiting for `{self._call}_wait`.", self._call)
        if not all_rows:
            self._require_consistent()
        if ids is not None:
            self._require_not_in_flight("reset_async", ids)
        elif all_rows:
            with self._changing_state(force=True):
                self._drop_all()
        else:
            while self._waiting:
                self._receive(1, None)
        with self._changing_state(force=all_rows):
            episodes = {row: self._episode_after_reset(row, seeds[row]) for row in rows}
            places = [self.places[row] for row in rows]
            arguments = [each.derive_seed(each.episode) for each in episodes.values()], select_options(others, rows)
            try:
                self.envs.reset_async(*arguments, env_id=places)
            except ResetNeeded:  # a change of the state of `envs` was interrupted: only a reset of all places ends that
                if not all_rows:
                    raise
                self.envs.reset_async()
                self._drop_all()
                self.envs.reset_async(*arguments, env_id=places)
            if ids is None:
                self._full_batch, self._results, self._final_results = None, {}, {}
                self._call, self._interrupted, self._failure = "reset", False, None
            for row, episode in episodes.items():
                self._rows[row] = episode
            self._waiting.update(zip(places, rows, strict=True))
            self._drop_outdated()
            self._prefetch()

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the observations and infos of :meth:`reset_async`."""
        observations, *_, infos = self._wait_for_call("reset", timeout)
        return observations, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step every row; wait for a reset only if no spare has finished it."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Begin a step of every row."""
        self._send(actions, list(range(self.num_envs)), "step")

    def step_wait(self, timeout: float | None = None) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Wait for the results of :meth:`step_async`."""
        return self._wait_for_call("step", timeout)

    reset_send, reset_fetch, step_send, step_fetch = reset_async, reset_wait, step_async, step_wait

    def _wait_for_call(self, call: str, timeout: float | None) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Return the result of the pending call. Rows that a reset does not select have their latest observations."""
        self._require_consistent()
        if self._call != call:
            raise NoAsyncCallError(f"Calling `{call}_wait` without any prior call to `{call}_async`.", call)
        self._collect(self.num_envs, timeout)
        with self._changing_state():
            self._call, self._interrupted, self._last_received = "", False, list(range(self.num_envs))
            if call == "reset" and len(self._results) < self.num_envs:
                latest = list(iterate(self.envs.observation_space, self.envs.observations))
                for row in set(range(self.num_envs)) - self._results.keys():
                    self._results[row] = latest[self.places[row]], 0.0, False, False, {}
            observations, rewards, terminations, truncations, infos = self._combine(range(self.num_envs))
        return observations, rewards, terminations, truncations, infos

    def send(self, actions: Any, env_id: Any = None) -> None:
        """Step some rows without waiting; arguments and errors are those of ``AsyncVectorEnv.send``."""
        rows = self._last_received if env_id is None else parse_env_ids(env_id, self.num_envs).tolist()
        self._send(actions, rows, "")

    def _send(self, actions: Any, rows: list[int], call: str) -> None:
        self._require_consistent()
        self._require_not_in_flight(f"{call}_async" if call else "send", rows)
        episodes = self._rows
        ended = [row for row in rows if episodes[row].phase != "running"]
        self._require_not_failed(ended)
        stepped = [row for row in rows if episodes[row].phase == "running"] if ended else rows
        if ended:
            check_batch(self.single_action_space, self.single_action_space, actions, len(rows), "actions")
            actions = select_rows(self.single_action_space, actions, [rows.index(row) for row in stepped])
        with self._changing_state():
            if stepped:
                places = [self.places[row] for row in stepped]
                self.envs.send(actions, places)
                self._waiting.update(zip(places, stepped, strict=True))
            self._call, self._interrupted = call, False
            if call:
                self._failure = None  # the failed row has been reset since
            for row in ended:
                self._begin_next(row)
            self._prefetch()

    def recv(
        self, timeout: float | None = None, *, count: int | None = None, at_least: int | None = None,
        within: float | None = None,
    ) -> tuple[Any, Any, Any, Any, dict[str, Any]]:  # fmt: skip
        """Return the next rows that are ready; arguments, result and errors are those of ``AsyncVectorEnv.recv``."""
        self._require_consistent()
        if self._call == "step":
            raise AlreadyPendingCallError("Calling `recv` while waiting for `step_wait`.", "step")
        timeout, count = parse_timeout(timeout), self.batch_size if count is None else parse_count(count, self.num_envs)
        enough, enough_from = count, None
        if not (at_least is within is None):
            enough, enough_from = parse_at_least(at_least, count), parse_within(within)
        in_flight = len(self.in_flight)
        if self._failure is None and (in_flight < enough or (in_flight < count and enough_from is None)):
            raise NoAsyncCallError(f"Calling `recv` for {enough} environments: only {in_flight} are in flight.", "recv")
        self._call = ""  # from now on, `recv` returns the rows of a pending reset
        self._collect(min(count, in_flight), timeout, enough, enough_from)
        with self._changing_state():
            rows = self._last_received = list(self._results)[:count]
            *results, infos = self._combine(rows)
        return (*results, {**infos, "env_id": np.array(rows), "_env_id": np.ones(len(rows), np.bool_)})

    def abandon(self, env_id: Any) -> None:
        """Stop waiting for some rows; see ``AsyncVectorEnv.abandon``."""
        self.envs.abandon([self.places[row] for row in parse_env_ids(env_id, self.num_envs)])

    def close(self, **kwargs: Any) -> None:
        """Close all environments."""
        self.envs.close(**kwargs)
        self.closed = True

    # -- the state of this object -------------------------------------------------------------------------------------------

    @contextmanager
    def _changing_state(self, *, force: bool = False) -> Iterator[None]:
        """Mark a change of state: if it is interrupted, a reset is needed.

        ``force`` is True for a reset of all rows. If that is refused, another one is needed.
        """
        if not force:
            self._require_consistent()
        self._changing = True
        try:
            yield
        except Exception as error:
            if isinstance(error, _REFUSALS) or hasattr(error, "envs"):
                self._changing = force and not self.closed
                name_rows(error, self.places)
            raise
        self._changing = False

    def _require_usable(self) -> None:
        """Raise if this object is closed, or inside a call."""
        if self.closed:
            raise ClosedEnvironmentError("Trying to operate on `EpisodePrefetcher`, after a call to `close()`.")
        if is_busy(self.envs):
            raise BusyError("a call on this EpisodePrefetcher is under way, in another thread or around this function")

    def _require_consistent(self) -> None:
        """Raise if this object is closed, inside a call, or a change of its state was interrupted."""
        self._require_usable()
        if self._changing:
            reason = "A call was interrupted while it changed the state of the rows, or a reset of all of them was refused"
            raise ResetNeeded(f"{reason}: call reset() for all rows")

    def _require_not_in_flight(self, method: str, rows: Sequence[int]) -> None:
        if self._call:
            raise AlreadyPendingCallError(f"Calling `{method}` while waiting for `{self._call}_wait`.", self._call)
        is_idle = not (self._full_batch or self._results or self._waiting)
        if not is_idle and (in_flight := set(self.in_flight.tolist()) & set(rows)):
            raise still_in_flight_error(method, sorted(in_flight))

    def _require_not_failed(self, rows: Sequence[int]) -> None:
        if failed := [row for row in rows if self._rows[row].phase == "failed"]:
            raise EnvFailed(f"env {min(failed)} failed earlier; reset() rebuilds it")

    # -- episodes -----------------------------------------------------------------------------------------------------------

    def _episode_after_reset(self, row: int, seed: int | None) -> RowEpisode:
        """Return the first episode of a row after a reset by the caller."""
        current, order = self._rows[row], next(self._order)
        if seed is None and current.seed is not None:
            return RowEpisode(current.origin, current.seed, current.num_resets + 1, current.episode + 1, order)
        return RowEpisode(row, random_seed() if seed is None else seed, current.num_resets + 1, order=order)

    def _begin_next(self, row: int) -> None:
        """Begin the next episode of a row: move it to the spare that began the episode, or reset it at its place."""
        current = self._rows[row]
        if current.seed is None:  # it has never been reset by the caller
            current = replace(current, seed=random_seed())
        current = replace(current, episode=current.episode + 1, order=next(self._order), phase="beginning")
        self._rows[row] = current
        place = self._prefetched.pop((row, current.num_resets, current.episode), None)
        self.counts["missed" if place is None else "ready" if place in self._ready else "late"] += 1
        if place is None:
            self.envs.reset_async([current.derive_seed(current.episode)], env_id=[self.places[row]])
        else:
            self.places[row] = place
        if place in self._ready:
            self._finish_reset(row, *self._ready.pop(place))
        else:
            self._waiting[self.places[row]] = row

    def _prefetch(self) -> None:
        """Begin an upcoming episode in each free spare: first for rows with an ended episode, then for the oldest others."""
        in_use = {place for place in self._prefetched.values() if place is not None}
        if len(in_use) == self.envs.num_envs - self.num_envs:  # nearly always
            return
        free = set(range(self.envs.num_envs)).difference(self.places, in_use)
        free.difference_update(self.envs.in_flight.tolist())  # spares that are resetting for outdated episodes
        if upcoming := dict(zip(find_upcoming(self._rows, self._prefetched, len(free)), free, strict=False)):
            seeds = [self._rows[row].derive_seed(episode) for row, _, episode in upcoming]
            self.envs.reset_async(seeds, env_id=list(upcoming.values()))
            self._prefetched.update(upcoming)

    def _drop_all(self) -> None:
        """Receive and drop everything in flight. The state is consistent afterwards, even if a call was interrupted."""
        while waiting := int(self.envs.stats()["in_flight"]):
            try:
                self._by_row.recv(count=waiting)
            except Exception as error:
                if isinstance(error, StepTimeout) and self._abandon_spares(error):
                    continue
                if isinstance(error, StepTimeout) or not hasattr(error, "envs"):  # the call failed, not an environment
                    raise
        self.places = list(range(self.num_envs))
        self._prefetched, self._ready, self._waiting = {}, {}, {}
        self._full_batch, self._results, self._final_results, self._call, self._failure = None, {}, {}, "", None

    def _drop_outdated(self) -> None:
        """Drop the early episodes that no row will need."""
        for key in [key for key in self._prefetched if key[1] != self._rows[key[0]].num_resets]:
            self._ready.pop(self._prefetched.pop(key), None)

    # -- results ------------------------------------------------------------------------------------------------------------

    def _collect(self, count: int, timeout: Any, enough: int = 0, enough_from: float | None = None) -> None:
        """Receive until ``count`` rows are ready, or ``enough`` at or after the time ``enough_from``.

        Raise the failure of a row: for ``recv`` at once, otherwise the last one, after all rows have finished.
        """
        seconds = parse_timeout(timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        while (waiting := len(self._waiting)) and len(self._results) < count and not self._full_batch:
            if self._failure is not None and not self._call:
                break
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            if enough_from is not None and len(self._results) >= enough:
                until_enough = max(enough_from - time.monotonic(), 0.0)
                try:
                    self._receive(1, until_enough if left is None else min(until_enough, left))
                except StepTimeout:
                    break
                continue
            only_resets, started = "running" not in self._waiting_phases(), time.monotonic()
            needed = 1 if enough_from is not None else min(count - len(self._results), waiting)
            self._receive(needed, left)
            self.counts["seconds"] += only_resets * (time.monotonic() - started)
        if (failure := self._failure) is not None:
            with self._changing_state():
                if self._call:
                    self._call, self._full_batch, self._results = "", None, {}
                self._failure = None
            raise failure

    def _receive(self, count: int, timeout: float | None) -> None:
        """Receive ``count`` results of rows or spares; store the failure of a row, if any. A failed spare becomes free."""
        before = self.envs.in_flight
        self._changing = True
        try:
            observations, *columns, infos, env_ids = self._by_row.recv(timeout, count=count)
        except StepTimeout as error:
            abandoned = self._abandon_spares(error)
            self._changing = False
            if abandoned:
                return
            name_rows(error, self.places)
            raise
        except BaseException as error:
            places = set(before.tolist()) - set(self.envs.in_flight.tolist())
            if not (places and hasattr(error, "envs")):  # a signal handler raised it
                self._changing, self._interrupted = bool(places), True
                raise
            self._record_failures(places, error)
            self._changing = False
            return
        self._apply_results(env_ids.tolist(), observations, columns, infos)
        self._changing = False

    def _abandon_spares(self, error: StepTimeout) -> bool:
        """Kill spares that exceeded ``step_timeout``; ``recv`` then raises their failure. Return False if a row is late."""
        if error.timeout != self.envs.step_timeout or not error.envs or not self._waiting.keys().isdisjoint(error.envs):
            return False
        self.envs.abandon(error.envs)
        return True

    def row_of_place(self, place: int) -> int | None:
        """Return the row of the episode at a place, which may have begun ahead of time; ``None`` if there is no episode."""
        if place in self.places:
            return self.places.index(place)
        return next((row for (row, *_), spare in self._prefetched.items() if spare == place), None)

    def _record_failures(self, places: set[int], error: BaseException) -> None:
        """Record failures of rows and of spares; store ``error`` if a row failed."""
        for key in [key for key, place in self._prefetched.items() if place in places]:
            self._prefetched[key] = None
        rows = [self._waiting.pop(place) for place in places & self._waiting.keys()]
        for row in rows:
            self._set_phase(row, "failed")
            self._final_results.pop(row, None)
        name_rows(error, self.places)
        if rows:
            self._failure = error

    def _apply_results(self, places: list[int], observations: Any, columns: list[Any], infos: list[Any]) -> None:
        """Apply received results to the rows and spares that wait for them."""
        ended = columns[1] | columns[2]
        is_whole_step = self._call == "step" and len(places) == self.num_envs and self._waiting.keys() == set(places)
        if is_whole_step and "beginning" not in self._waiting_phases() and not (self._same_step and ended.any()):
            rows = [self._waiting.pop(place) for place in places]
            for row in itertools.compress(rows, ended):
                self._set_phase(row, "ended")
            self._full_batch = rows, observations, columns, infos
            return
        split = iterate(batch_space(self.single_observation_space, len(places)), observations)
        for place, observation, info, reward, terminated, truncated in zip(places, split, infos, *columns, strict=True):
            if place in self._waiting:
                self._finish(self._waiting.pop(place), observation, reward, terminated, truncated, info)
            elif place in self._prefetched.values():  # otherwise the episode is outdated
                self._ready[place] = observation, info
        self._prefetch()

    def _finish(self, row: int, observation: Any, reward: float, terminated: bool, truncated: bool, info: Any) -> None:
        """Store the result of a reset or a step. In same-step mode, a step that ends an episode is followed by a reset."""
        if self._rows[row].phase == "beginning":
            self._finish_reset(row, observation, info)
            return
        if self._same_step and (terminated or truncated):
            restarted = isinstance(info, dict) and "restarted" in info
            final = info if restarted else {"final_obs": observation, "final_info": info}
            self._final_results[row] = reward, terminated, truncated, final
            self._begin_next(row)
            return
        self._results[row] = observation, reward, terminated, truncated, info
        if terminated or truncated:
            self._set_phase(row, "ended")

    def _finish_reset(self, row: int, observation: Any, info: Any) -> None:
        self._set_phase(row, "running")
        if isinstance(info, dict) and "restarted" in info and self._call != "reset":
            # a truncated step, as in every engine; in next-step mode, the new episode ends at its beginning
            *_, final = self._final_results.pop(row, ({},))
            final_obs = final.get("final_obs", observation)
            self._results[row] = observation, 0.0, False, True, {**info, "final_obs": final_obs}
            if not self._same_step:
                self._set_phase(row, "ended")
            return
        reward, terminated, truncated, final = self._final_results.pop(row, (0.0, False, False, {}))
        if final and not isinstance(info, Mapping):
            text = f"env {row}: reset() returned an info that is not a dict but a {type(info).__name__}"
            warn(f"{text}; with same-step autoreset it is dropped")
            info = {}
        self._results[row] = observation, reward, terminated, truncated, {**final, **info} if final else info

    def _set_phase(self, row: int, phase: EpisodePhase) -> None:
        self._rows[row] = replace(self._rows[row], phase=phase)

    def _waiting_phases(self) -> list[EpisodePhase]:
        episodes = self._rows
        return [episodes[row].phase for row in self._waiting.values()]

    def _combine(self, rows: Sequence[int]) -> tuple[Any, ...]:
        """Remove the results of rows and return them as one batch."""
        space = self.single_observation_space
        if self._full_batch is not None:
            (received, observations, columns, infos), self._full_batch = self._full_batch, None
            if received != (rows := list(rows)):
                order = [received.index(row) for row in rows]
                observations = select_rows(space, observations, order)
                columns, infos = [column[order] for column in columns], [infos[position] for position in order]
            return self._merge(infos, rows, observations, *columns)
        results = [self._results.pop(row) for row in rows]
        observations, rewards, terminations, truncations, infos = zip(*results, strict=True)
        empty: Any = create_empty_array(space, len(rows))
        batch = concatenate(space, observations, empty)
        flags = np.array(terminations, np.bool_), np.array(truncations, np.bool_)
        return self._merge(infos, rows, batch, np.array(rewards, np.float64), *flags)

    def _merge(self, infos: Sequence[Any], rows: Sequence[int], *results: Any) -> tuple[Any, ...]:
        """Return the results of rows with their merged infos."""
        if set(map(type, infos)) == {dict} and not any(infos):
            return (*results, {})
        try:
            return (*results, self._merger.merge(infos, rows))
        except InfoError as error:
            error.result = (*results, list(infos))
            raise

    # -- calls, attributes and snapshots, which wait until no spare is resetting -------------------------------------------

    def exec_func(self, func: Callable[..., Any], indices: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call ``func(env, *args, **kwargs)`` for rows, with the arguments and result of ``AsyncVectorEnv.exec_func``."""
        env_ids = [indices] if isinstance(indices, (int, np.integer)) else indices
        rows = parse_rows(env_ids if env_ids is None else list(env_ids), self.num_envs)
        self._wait_until_idle("exec_func")
        self._require_not_failed(rows)
        with naming_rows(self):
            results = self.envs.exec_func(func, [self.places[row] for row in rows], *args, **kwargs)
        return tuple(results[self.places[row]] if row in rows else None for row in range(self.num_envs))

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of the environment of each row, or return an attribute."""
        if name in ("reset", "step", "close"):
            raise ValueError(f"Trying to call function `{name}` with `call`, use `{name}` directly instead.")
        return self.exec_func(call_env, None, name, args, kwargs)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of the environment of each row."""
        return self.call(name)

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of each row's environment: that of its current episode."""
        return self.call("np_random_seed")

    @property  # type: ignore[misc]  # Gymnasium's property has a setter
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """Copies of the generators of the rows' environments."""
        return self.call("np_random")

    def render(self) -> tuple[Any, ...]:
        """Return one frame per row."""
        return self.call("render")

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of all environments to one value; spares begin their episodes anew."""
        if isinstance(values, (list, tuple)):
            raise_unsupported(self, "set one value per row", "any environment may run the episodes of any row")
        self._wait_until_idle("set_attr")
        try:
            with naming_rows(self):
                self.envs.set_attr(name, [values] * self.envs.num_envs)
        except Exception as error:
            if hasattr(error, "envs"):  # the others have the value; spares that have died are rebuilt
                with self._changing_state():
                    self._prefetched, self._ready = {}, {}
                    self._prefetch()
            raise
        with self._changing_state():
            self._prefetched, self._ready = {}, {}
            if self._builder is not None:
                self._builder.keep(name, values)
                self.envs.exec_func(keep_attribute, None, self._builder.token, name, values)
            self._prefetch()

    def set_next_options(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ``NotImplementedError``, because the next episodes have already begun."""
        reason = "the next episodes have begun already: pass the options to reset(), with a reset_mask"
        raise_unsupported(self, "`set_next_options`", reason)

    def freeze(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ``NotImplementedError``: a frozen copy would replace the environment at one place, but rows move."""
        raise_unsupported(self, "`freeze` or `thaw`", "rows move between processes: use save() and load()")

    thaw = freeze

    def call_async(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ``NotImplementedError``, because calls wait until no spare is resetting."""
        raise_unsupported(self, "begin calls without waiting", "they wait until no spare resets: use call() or exec_func()")

    call_wait = call_send = call_fetch = exec_func_send = exec_func_fetch = call_async

    def record(self, env_id: int, path: Any = None) -> Any:
        """Write a file for ``vecenv replay`` about the environment of a row; see ``AsyncVectorEnv.record``."""
        (row,) = parse_env_ids([env_id], self.num_envs).tolist()
        return self.envs.record(self.places[row], path)

    def save(self, env_id: Any = None, *, verify: bool = True) -> tuple[Snapshot, ...]:
        """Return the state of all rows, or of some; see ``AsyncVectorEnv.save``."""
        rows = self._begin_save("save", env_id)
        with naming_rows(self):
            snapshots = self.envs.save([self.places[row] for row in rows], verify=verify)
        return self._add_episodes(snapshots, rows)

    def state_dict(self, env_id: Any = None, *, verify: bool = True) -> dict[str, Any]:
        """Return the whole state in one dict; see ``AsyncVectorEnv.state_dict``."""
        rows = self._begin_save("state_dict", env_id)
        with naming_rows(self):
            state = self.envs.state_dict([self.places[row] for row in rows], verify=verify)
        saved = read_state(state, len(rows), AutoresetMode.DISABLED, spaces_of(self.envs))
        snapshots = self._add_episodes(saved.snapshots, rows)
        return pack_state(snapshots, self.autoreset_mode, saved.counts, saved.seeds, spaces_of(self))

    def _begin_save(self, method: str, env_id: Any) -> list[int]:
        rows = parse_rows(env_id, self.num_envs)
        self._wait_until_idle(method)
        self._require_not_failed(rows)
        return rows

    def _add_episodes(self, snapshots: Sequence[Snapshot], rows: list[int]) -> Snapshots:
        return Snapshots(self._rows[row].add_to(snapshot) for snapshot, row in zip(snapshots, rows, strict=True))

    def load(self, snapshots: Any, env_id: Any = None) -> Any:
        """Continue rows from saved states and return their observations; see ``AsyncVectorEnv.load``.

        A snapshot of another vector environment has no seed for later episodes: they get random ones.
        """
        rows = parse_rows(env_id, self.num_envs)
        return self._load("load", rows, parse_snapshots(snapshots, rows), self.envs.load)

    def load_state_dict(self, state: Mapping[str, Any], env_id: Any = None) -> Any:
        """Continue from the result of :meth:`state_dict`, and return the observations."""
        rows, envs = parse_rows(env_id, self.num_envs), self.envs
        saved = read_state(state, len(rows), self.autoreset_mode, spaces_of(self))

        def load(snapshots: list[Snapshot], places: list[int]) -> Any:
            others = saved.counts, saved.seeds, spaces_of(envs)
            return envs.load_state_dict(pack_state(snapshots, AutoresetMode.DISABLED, *others), places)

        observations = self._load("load_state_dict", rows, saved.snapshots, load)
        saved.load_generators()
        return observations

    def _load(
        self, method: str, rows: list[int], snapshots: list[Snapshot], load: Callable[[list[Snapshot], list[int]], Any]
    ) -> Any:
        """Call ``load`` for the places of rows, and set the episodes of the rows."""
        self._wait_until_idle(method)
        places = [self.places[row] for row in rows]
        with self._changing_state():
            return load_and_restore(
                lambda: load(without_pending(snapshots), places), places,
                lambda loaded: self._set_episodes(rows, snapshots, loaded),
            )  # fmt: skip

    def _set_episodes(self, rows: list[int], snapshots: list[Snapshot], loaded: Sequence[int]) -> None:
        """End a load: set the episodes of rows with an index in ``loaded`` to those of the snapshots. The others failed."""
        for index, (row, snapshot) in enumerate(zip(rows, snapshots, strict=True)):
            if index in loaded:
                self._rows[row] = self._rows[row].continue_from(snapshot, row, next(self._order))
            else:  # with restarts, the next step rebuilds its environment
                self._set_phase(row, "running" if self.envs.capabilities.restarts else "failed")
        self._drop_outdated()
        self._prefetch()

    def _wait_until_idle(self, method: str) -> None:
        """Wait until no spare is resetting. ``method`` is the method that requires it, for errors.

        Raises:
            AlreadyPendingCallError: Rows are in flight.
        """
        self._require_consistent()
        self._require_not_in_flight(method, range(self.num_envs))
        while in_flight := self.envs.in_flight.size:
            self._receive(in_flight, None)
