"""Episode returns, lengths and times, also for batches of only some environments."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium.wrappers.vector
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv

from vecenv.errors import BusyError, InfoError, StepTimeout
from vecenv.front.arguments import ResetOptions, parse_env_ids, parse_rows, split_reset_mask
from vecenv.front.guard import ARGUMENT_ERRORS
from vecenv.front.infos import executed_steps
from vecenv.state.snapshots import Row, Snapshot, Snapshots, StateDict, load_and_restore
from vecenv.system.reporting import warn

__all__ = ["RecordEpisodeStatistics"]


class RecordEpisodeStatistics(gymnasium.wrappers.vector.RecordEpisodeStatistics):
    """A recorder of episode statistics: Gymnasium's wrapper of the same name, extended to ``send`` and ``recv``.

    Where an episode ended, ``infos["_episode"]`` is True, and ``infos["episode"]`` has its return ``"r"`` (float64), length
    ``"l"`` (int64) and time ``"t"`` (seconds, float64): arrays with one entry per row of the batch. Statistics cover
    ``step``, ``step_wait`` and ``recv``, every autoreset mode, and resets by a mask or of single environments. An episode
    has none if one of its results was lost, for example because another environment raised or a reset by a mask dropped it.
    The statistics of a running episode are saved and loaded, frozen and thawed with its environment. All other attributes
    are the vector environment's own.

    Args:
        env: A vector environment of any engine that returns NumPy arrays.
        buffer_length: The maximum number of episodes in ``return_queue``, ``length_queue`` and ``time_queue``.
        stats_key: The key in infos.

    Raises:
        TypeError: ``env`` is a ``MultiAgentVecEnv``.
        ValueError: In ``step``, ``step_wait`` and ``recv``: infos already have the key.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], buffer_length: int = 100, stats_key: str = "episode") -> None:
        if hasattr(env, "flatten_agents"):
            raise TypeError(f"an episode of {type(env).__name__} has several returns: wrap envs.flatten_agents()")
        super().__init__(env, buffer_length, stats_key)
        self._key = stats_key
        self._same_step = env.metadata.get("autoreset_mode") is AutoresetMode.SAME_STEP
        self._resetting = np.zeros(self.num_envs, np.bool_)  # rows with a reset that has not been returned
        self._incomplete = np.zeros(self.num_envs, np.bool_)  # rows with an episode of which a result was lost

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.env, name)

    # -- resets -----------------------------------------------------------------------------------------------------

    def reset(self, *, seed: Any = None, options: ResetOptions = None) -> tuple[Any, dict[str, Any]]:  # type: ignore[override]
        """Reset the vector environment; new episodes begin in the environments that were reset."""
        rows, in_flight, begins = self._selected_rows(options), self._rows_in_flight(), True
        try:
            return self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        except BaseException as error:  # a failure in some rows; or the result is still pending, for `reset_wait`
            begins = not _is_refusal(error)
            raise
        finally:
            if begins:
                self._lose_results(in_flight)
                self._begin_episodes(rows)
                self._begin_episodes(np.flatnonzero(self._resetting))  # executed resets with dropped results

    def reset_async(self, seed: Any = None, options: ResetOptions = None, *, env_id: Any = None) -> None:
        """Begin a reset of the vector environment."""
        rows = self._selected_rows(options) if env_id is None else parse_env_ids(env_id, self.num_envs)
        if env_id is None:
            in_flight = self._rows_in_flight()
            self.env.reset_async(seed=seed, options=options)  # type: ignore[attr-defined]
            self._lose_results(in_flight)
            self._begin_episodes(np.flatnonzero(self._resetting))  # executed resets with dropped results
        else:
            self.env.reset_async(seed=seed, options=options, env_id=env_id)  # type: ignore[attr-defined]
        self._resetting[rows] = True

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the reset of the vector environment."""
        begins = True
        try:
            return self.env.reset_wait(timeout)  # type: ignore[attr-defined, no-any-return]
        except BaseException as error:
            begins = not (_is_refusal(error) or isinstance(error, StepTimeout))
            raise
        finally:
            if begins:
                self._begin_episodes(np.flatnonzero(self._resetting))

    def _selected_rows(self, options: ResetOptions) -> npt.NDArray[np.intp]:
        mask, _ = split_reset_mask(options, self.num_envs)
        return np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)

    def _rows_in_flight(self) -> npt.NDArray[np.intp]:
        """Return the rows in flight; none if the vector environment does not know them."""
        try:
            return np.asarray(getattr(self.env, "in_flight", ()), np.intp)
        except NotImplementedError:
            return np.zeros(0, np.intp)

    def _begin_episodes(self, rows: npt.NDArray[np.intp] | list[int]) -> None:
        """Reset the statistics of rows in which new episodes begin."""
        self.episode_start_times[rows] = time.perf_counter()
        self.episode_returns[rows] = 0
        self.episode_lengths[rows] = 0
        self.prev_dones[rows] = False
        self._resetting[rows] = self._incomplete[rows] = False

    # -- saving and loading -----------------------------------------------------------------------------------------

    def save(self, env_id: Any = None, *, verify: bool = True) -> tuple[Snapshot, ...]:
        """Save the vector environment; each snapshot includes the statistics of the running episode."""
        snapshots: tuple[Snapshot, ...] = self.env.save(env_id, verify=verify)  # type: ignore[attr-defined]
        statistics = self._running_statistics(parse_rows(env_id, self.num_envs))
        return Snapshots(
            snapshot.having(beside={**(snapshot.row.beside or {}), self._key: row_statistics})
            for snapshot, row_statistics in zip(snapshots, statistics, strict=True)
        )

    def load(self, snapshots: Any, env_id: Any = None) -> Any:
        """Load snapshots into the vector environment.

        Statistics begin at zero for snapshots saved without this wrapper, which causes a warning if an episode is running.
        """
        rows = parse_rows(env_id, self.num_envs)
        snapshot_by_row = [snapshots] * len(rows) if isinstance(snapshots, Snapshot) else snapshots

        def restore(loaded: Sequence[int]) -> None:
            saved = [snapshot_by_row[index].row for index in loaded]
            statistics = [(saved_row.beside or {}).get(self._key) for saved_row in saved]
            self._restore_statistics([rows[index] for index in loaded], saved, statistics)

        load = self.env.load  # type: ignore[attr-defined]
        return load_and_restore(lambda: load(snapshots, env_id), rows, restore)

    def state_dict(self, env_id: Any = None, *, verify: bool = True) -> dict[str, Any]:
        """Return the state of the vector environment, with all statistics."""
        state: dict[str, Any] = self.env.state_dict(env_id, verify=verify)  # type: ignore[attr-defined]
        running = self._running_statistics(parse_rows(env_id, self.num_envs))
        statistics = running, self.episode_count, [list(queue) for queue in self._queues()]
        return StateDict({**state, f"statistics {self._key}": statistics})

    def load_state_dict(self, state: Mapping[str, Any], env_id: Any = None) -> Any:
        """Load the state of the vector environment. Statistics that it lacks begin at zero, as in :meth:`load`."""
        rows = parse_rows(env_id, self.num_envs)
        found = state.get(f"statistics {self._key}") if isinstance(state, Mapping) else None  # the load refuses other types
        running, count, queues = found or ([None] * len(rows), 0, [[], [], []])

        def restore(loaded: Sequence[int]) -> None:
            saved = [state["snapshots"][index].row for index in loaded]
            self._restore_statistics([rows[index] for index in loaded], saved, [running[index] for index in loaded])

        load = self.env.load_state_dict  # type: ignore[attr-defined]
        observations = load_and_restore(lambda: load(state, env_id), rows, restore)
        self.episode_count = count
        for queue, numbers in zip(self._queues(), queues, strict=True):
            queue.clear()
            queue.extend(numbers)
        return observations

    def freeze(self, env_id: Any = None) -> list[Any]:
        """Copy the processes of environments; each copy includes the statistics of the running episode."""
        copies: list[Any] = self.env.freeze(env_id)  # type: ignore[attr-defined]
        statistics = self._running_statistics(parse_rows(env_id, self.num_envs))
        for frozen, row_statistics in zip(copies, statistics, strict=True):
            frozen.beside = {**(frozen.beside or {}), self._key: row_statistics}
        return copies

    def thaw(self, frozen: Any, into: Any, *, reseed: bool = False) -> tuple[Any, dict[str, Any]]:
        """Continue environments from a frozen one, with its statistics; without any, they begin at zero with a warning."""
        result: tuple[Any, dict[str, Any]] = self.env.thaw(frozen, into, reseed=reseed)  # type: ignore[attr-defined]
        rows = parse_rows(into, self.num_envs)
        self._restore_statistics(rows, [None] * len(rows), [(frozen.beside or {}).get(self._key)] * len(rows))
        return result

    def _queues(self) -> tuple[deque[Any], deque[Any], deque[Any]]:
        return self.return_queue, self.length_queue, self.time_queue

    def _running_statistics(self, rows: list[int]) -> list[Any]:
        """Return, for each row, its return, length, seconds so far, and three flags: ended, resetting, incomplete."""
        seconds = time.perf_counter() - self.episode_start_times[rows]
        columns = self.episode_returns, self.episode_lengths, self.prev_dones, self._resetting, self._incomplete
        episode_returns, lengths, *flags = (np.asarray(column)[rows].tolist() for column in columns)
        return list(zip(episode_returns, lengths, seconds.tolist(), *flags, strict=True))

    def _restore_statistics(self, rows: list[int], saved: Sequence[Row | None], statistics: list[Any]) -> None:
        """Restore statistics from :meth:`_running_statistics`. Rows with ``None`` begin at zero.

        ``saved`` has ``None`` for rows that continue from a frozen copy.
        """
        self._begin_episodes(rows)
        pairs = zip(saved, statistics, strict=True)
        if any(found is None and (row is None or (row.used and not row.pending)) for row, found in pairs):
            warn("RecordEpisodeStatistics counts from here: the state was saved without it. Use save(), state_dict() and "
                 "freeze() of the wrapper, not of the vector environment inside")  # fmt: skip
        for row, saved_row, row_statistics in zip(rows, saved, statistics, strict=True):
            if row_statistics is None:
                self.prev_dones[row] = saved_row is not None and saved_row.pending
            else:
                self.episode_returns[row], self.episode_lengths[row], seconds = row_statistics[:3]
                self.prev_dones[row], self._resetting[row], self._incomplete[row] = row_statistics[3:]
                self.episode_start_times[row] -= seconds

    # -- steps ------------------------------------------------------------------------------------------------------

    def step(self, actions: Any) -> Any:
        """Step the vector environment; add the statistics of ended episodes to ``infos``."""
        return self._count_step(lambda: self.env.step(actions))

    def step_wait(self, timeout: float | None = None) -> Any:
        """Wait for a step of the vector environment; add the statistics of ended episodes to ``infos``."""
        return self._count_step(lambda: self.env.step_wait(timeout))  # type: ignore[attr-defined]

    def _count_step(self, step: Callable[[], Any]) -> Any:
        rows = np.arange(self.num_envs)
        try:
            result = step()
        except Exception as error:
            if isinstance(error, InfoError) or (hasattr(error, "envs") and not isinstance(error, StepTimeout)):
                self._lose_results(rows)
            raise
        return self._count_results(rows, result)

    def recv(self, timeout: float | None = None, **options: Any) -> Any:
        """Receive rows of the vector environment; add the statistics of their ended episodes to ``infos``."""
        try:
            result = self.env.recv(timeout, **options)  # type: ignore[attr-defined]
        except Exception as error:
            rows = getattr(self.env, "last_received", ()) if isinstance(error, InfoError) else getattr(error, "envs", ())
            self._lose_results(np.asarray(rows, np.intp))
            raise
        return self._count_results(result[4]["env_id"], result)

    reset_send = reset_async
    reset_fetch = reset_wait
    step_fetch = step_wait

    def _count_results(self, rows: npt.NDArray[np.intp], result: Any) -> Any:
        """Update the statistics with a result. Add those of ended episodes to its infos, and return it."""
        _, rewards, terminations, truncations, infos = result
        first = self._begin_first(rows)
        self.episode_returns[rows[~first]] += np.asarray(rewards)[~first]
        steps = executed_steps(infos, len(rows))
        self.episode_lengths[rows[~first]] += steps if isinstance(steps, int) else steps[~first]
        self.prev_dones[rows] = over = np.logical_or(terminations, truncations)
        over = over & ~first  # without autoreset, JAX environments repeat the flags of an ended episode
        if over.any():
            self._add_statistics(infos, rows, over)
        return result

    def _begin_first(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Begin the episodes of which this is the first result, and return their mask. A first result has no reward."""
        first: npt.NDArray[np.bool_] = self._resetting[rows]
        if not self._same_step:
            first = first | self.prev_dones[rows]
        self._begin_episodes(rows[first])
        return first

    def _lose_results(self, rows: npt.NDArray[np.intp]) -> None:
        """Record the loss of a result of each row, except for rows still in flight.

        An episode is incomplete unless the result was its first one.
        """
        rows = np.setdiff1d(rows, self._rows_in_flight())
        first = self._begin_first(rows)
        self._incomplete[rows[~first]] = True

    def _add_statistics(self, infos: dict[str, Any], rows: npt.NDArray[np.intp], over: npt.NDArray[np.bool_]) -> None:
        if self._key in infos or f"_{self._key}" in infos:
            raise ValueError(f"infos already have a key {self._key!r}: set another stats_key; got {sorted(map(str, infos))}")
        all_ended, over = rows[over], over & ~self._incomplete[rows]
        ended = rows[over]
        seconds = np.round(time.perf_counter() - self.episode_start_times[rows], 6)
        infos[self._key] = {
            "r": np.where(over, self.episode_returns[rows], 0.0),
            "l": np.where(over, self.episode_lengths[rows], 0),
            "t": np.where(over, seconds, 0.0),
        }
        infos[f"_{self._key}"] = over
        self.episode_count += len(ended)
        self.return_queue.extend(self.episode_returns[ended])
        self.length_queue.extend(self.episode_lengths[ended])
        self.time_queue.extend(seconds[over])
        if self._same_step:
            self._begin_episodes(all_ended)


def _is_refusal(error: BaseException) -> bool:
    """True if a call raised this before it changed anything."""
    if hasattr(error, "envs"):  # it is about environments that failed
        return False
    return type(error) in ARGUMENT_ERRORS or isinstance(error, (gymnasium.error.Error, BusyError, NotImplementedError))
