"""Run episodes on a vector environment: each environment by itself where it can, else all in lock-step.

:class:`FirstReadyRunner` is for engines that answer environment by environment: one that is free gets the next episode, and
none is stepped for nothing. :class:`LockstepRunner` is for the others: an environment whose episode is over begins the next
one by a masked reset with a seed of its own, where the engine has that; else all wait for the last one and are seeded
together. What is left without an episode is stepped along there, and its numbers are dropped. One runner for both would
lose the zero waste of the first: lock-step costs the longest episode of each batch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.errors import EnvFailed, SnapshotMismatch, StepTimeout, WorkerDied
from vecenv.evaluating.episodes import Attempt, EpisodeResult, Episodes
from vecenv.evaluating.policies import Acting, join_rows, put_rows, take_rows
from vecenv.front.infos import info_row
from vecenv.system.uninterrupted import by_handler

__all__ = ["FirstReadyRunner", "LockstepRunner"]


class EpisodeRunner:
    """What both share.

    Args:
        envs: The vector environment.
        episodes: The list to be run.
        act: The policy.
        report: Called with each result as it comes.
    """

    def __init__(self, envs: Any, episodes: Episodes, act: Acting, report: Callable[[EpisodeResult], None]) -> None:
        self._envs = envs
        self._episodes = episodes
        self._act = act
        self._report = report
        self._mode = envs.metadata.get("autoreset_mode")
        self._waiting: deque[int] = deque()  # places of episodes
        self._running: dict[int, Attempt] = {}  # by environment

    def _begin_attempts(self, rows: Iterable[int]) -> list[Attempt]:
        """The next episode for each of these environments, as long as there are any."""
        attempts = [self._episodes.begin(self._waiting.popleft(), row) for row in rows if self._waiting]
        self._running.update({attempt.row: attempt for attempt in attempts})
        return attempts

    def _end(self, attempt: Attempt, terminated: Any, truncated: Any, infos: Any, place: int) -> None:
        """An episode is over: its info is in row ``place`` of ``infos``."""
        del self._running[attempt.row]
        info = info_row(infos, place)
        info = info.get("final_info", {}) if self._mode is AutoresetMode.SAME_STEP else info
        self._report(self._episodes.ended(attempt, bool(terminated), bool(truncated), info))


class FirstReadyRunner(EpisodeRunner):
    """Runs episodes on an engine with first-ready batches and a seed for each environment.

    What is in flight before and after an exception tells which environments it is about. An exception of an environment is
    its own. A worker that dies takes all its environments with it, and any of them may have caused it: their episodes are
    run again when all others are done, one at a time in a worker, where a death has one cause. So an episode that kills its
    worker costs the others nothing but time, and results do not depend on which environments shared a worker.

    Snapshots are loaded while nothing is in flight: where an environment waits for that, those that arrive are held back
    until all have.

    Args:
        envs, episodes, act, report: As of :class:`EpisodeRunner`.
        timeout: Seconds that a step, or a reset, of an environment takes at most; ``None``: no limit.
        filmed: Places of the episodes whose frames are kept.
    """

    def __init__(
        self, envs: Any, episodes: Episodes, act: Acting, report: Callable[[EpisodeResult], None],
        timeout: float | None, filmed: frozenset[int],
    ) -> None:  # fmt: skip
        super().__init__(envs, episodes, act, report)
        self._timeout = timeout
        self._filmed = filmed
        self._groups: list[list[int]] = [list(rows) for rows in envs.worker_rows]
        self._group_of = {row: group for group in self._groups for row in group}
        self._suspects: list[int] = []
        self._in_flight: dict[int, float] = {}  # row -> since when
        self._broken: set[int] = set()  # rows that failed and were not reset since
        self._suspect_attempts: set[Attempt] = set()  # that ran beside others in a worker that died
        self._restores = any(episode.snapshot is not None for episode in episodes.episodes)
        self._free: list[int] = []  # rows that get an episode when nothing is in flight
        self._held: list[tuple[list[int], Any, Any, list[int]]] = []  # what `_step` is to be called with then

    def run(self) -> None:
        """Run them all, the filmed ones first, one at a time: frames can be taken while nothing is in flight."""
        for index in sorted(self._filmed):
            self._pass([index], [0])
        count = len(self._episodes.episodes)
        self._pass([index for index in range(count) if index not in self._filmed], range(self._envs.num_envs))
        while self._suspects:
            suspects, self._suspects = sorted(self._suspects), []
            self._pass(suspects, [group[0] for group in self._groups])

    def _pass(self, indices: Sequence[int], rows: Iterable[int]) -> None:
        """Run episodes in some rows."""
        self._waiting.extend(indices)
        self._begin(list(rows))
        self._release()
        while self._running:
            try:
                answer = self._receive()
            except WorkerDied as error:
                self._begin(self._died(error))
            except Exception as error:
                if by_handler(error):  # a time limit, say, which fell into an environment of this process
                    raise
                self._begin(self._raised(error))
            else:
                self._take(*answer)
            self._release()

    def _take(self, observations: Any, rewards: Any, terminations: Any, truncations: Any, infos: dict[Any, Any]) -> None:
        """Take answers that arrived, begin episodes where one is over, and step the other environments."""
        came = infos.pop("env_id").tolist()
        infos.pop("_env_id", None)
        free: list[int] = []
        places: list[int] = []
        for place, row in enumerate(came):
            attempt, over = self._running[row], bool(terminations[place] or truncations[place])
            del self._in_flight[row]
            if "restarted" in infos and infos["_restarted"][place]:  # on_failure="restart": the episode is lost
                free += self._lost_in_restart(row)
                continue
            if not attempt.begins:
                attempt.episode_return += float(rewards[place])
                attempt.length += 1
            if attempt.index in self._filmed and not (over and self._mode is AutoresetMode.SAME_STEP):
                attempt.frames.append(self._frame(row))
            if not over:
                places.append(place)
                continue
            free.append(row)
            self._end(attempt, terminations[place], truncations[place], infos, place)
        self._begin(free)  # before the policy is asked: resets may take long
        if places:
            if len(places) < len(came):
                observations = take_rows(self._envs.single_observation_space, observations, places)
            self._held.append(([came[place] for place in places], observations, infos, places))

    def _release(self) -> None:
        """Step the environments that have answered, unless others have to answer first."""
        self._begin([])
        while self._held and not (self._free and self._in_flight):
            self._step(*self._held.pop(0))

    def _frame(self, row: int) -> Any:
        """The frame of a row. Calls are refused while any worker is dead: then the other rows are reset first."""
        try:
            return self._envs.exec_func(_render, [row])[row]
        except EnvFailed:
            others = np.arange(self._envs.num_envs) != row
            self._envs.reset(options={"reset_mask": others})
            return self._envs.exec_func(_render, [row])[row]

    # -- asking -----------------------------------------------------------------------------------------------------

    def _begin(self, free: list[int]) -> None:
        """Begin the next episodes in rows that are free."""
        free, self._free = self._free + free, []
        while self._waiting and free:
            if self._restores and self._in_flight:
                self._free = free
                return
            rows, free = free[: len(self._waiting)], free[len(self._waiting) :]
            attempts = self._begin_attempts(rows)
            if self._restores:
                free += self._restore([attempt for attempt in attempts if self._episodes.snapshot(attempt) is not None])
                attempts = [attempt for attempt in attempts if self._episodes.snapshot(attempt) is None]
            broken = [attempt for attempt in attempts if attempt.row in self._broken]
            if len(broken) < len(attempts):
                self._reset([attempt for attempt in attempts if attempt.row not in self._broken])
            for attempt in broken:  # their workers are started anew, which may fail
                try:
                    self._reset([attempt])
                except Exception as error:
                    free += self._charge(attempt, error)

    def _restore(self, attempts: Sequence[Attempt]) -> list[int]:
        """Put states in place, and have the policy step on from there. Rows that are free, as that failed."""
        free: list[int] = []
        rows: list[int] = []
        seen: list[Any] = []
        for attempt in attempts:
            try:
                if self._broken:  # states are put in place while all workers run
                    self._envs.reset(options={"reset_mask": np.isin(np.arange(self._envs.num_envs), list(self._broken))})
                    self._broken.clear()
                seen.append(self._envs.load(self._episodes.snapshot(attempt), env_id=[attempt.row]))
            except SnapshotMismatch:
                raise
            except Exception as error:
                self._broken.add(attempt.row)
                free += self._charge(attempt, error)
                continue
            rows.append(attempt.row)
            if attempt.index in self._filmed:
                attempt.frames.append(self._frame(attempt.row))
        if rows:
            self._held.append((rows, join_rows(self._envs.single_observation_space, seen), {}, list(range(len(rows)))))
        return free

    def _reset(self, attempts: Sequence[Attempt]) -> None:
        rows = [attempt.row for attempt in attempts]
        options = [self._episodes.episodes[attempt.index].options for attempt in attempts]
        given = None if options.count(None) == len(options) else [None if each is None else dict(each) for each in options]
        self._envs.reset_async(seed=[self._episodes.seed(each.index) for each in attempts], options=given, env_id=rows)
        self._broken.difference_update(rows)
        self._in_flight.update(dict.fromkeys(rows, time.monotonic()))

    def _step(self, rows: list[int], observations: Any, infos: Any, places: list[int]) -> None:
        """Ask the policy, and step these rows."""
        actions = self._act(observations, [self._running[row] for row in rows], [infos] * len(rows), places)
        try:
            self._send(actions, rows)
        except EnvFailed:  # a worker has died meanwhile: find its rows
            lost: list[int] = []
            for place, row in enumerate(rows):
                try:
                    self._send(take_rows(self._envs.single_action_space, actions, [place]), [row])
                except EnvFailed as error:
                    lost += self._lose(row, error)
            self._begin(lost)

    def _send(self, actions: Any, rows: list[int]) -> None:
        self._envs.send(actions, rows)
        self._in_flight.update(dict.fromkeys(rows, time.monotonic()))

    def _receive(self) -> Any:
        """Answers of environments that are done, at least one; ends workers that hang."""
        if self._timeout is None:
            return self._envs.recv(count=len(self._in_flight), at_least=1)
        while True:
            now = time.monotonic()
            ends = {row: since + self._limit(row) for row, since in self._in_flight.items()}
            late = [row for row, end in ends.items() if end <= now]
            if late:
                self._envs.abandon(late)
            try:
                return self._envs.recv(None if late else min(ends.values()) - now, count=len(self._in_flight), at_least=1)
            except StepTimeout:
                if late:
                    raise

    def _limit(self, row: int) -> float:
        """A worker steps its rows one after the other."""
        assert self._timeout is not None
        return self._timeout * sum(other in self._running for other in self._group_of[row])

    # -- failures ---------------------------------------------------------------------------------------------------

    def _answered(self, error: Exception) -> list[int]:
        """The rows that an exception is the answer to."""
        flying = set(self._envs.in_flight.tolist())
        rows = [row for row in self._in_flight if row not in flying]
        if not rows:  # it is about nothing that was asked
            raise error
        return rows

    def _died(self, error: WorkerDied) -> list[int]:
        """A worker died: rows that are free now."""
        rows = self._answered(error)
        self._suspect(rows)
        return [free for row in rows for free in self._lose(row, error)]

    def _raised(self, error: Exception) -> list[int]:
        """Environments raised: rows that are free now."""
        free: list[int] = []
        for row in self._answered(error):
            del self._in_flight[row]
            self._broken.add(row)
            record = next((each for each in reversed(self._envs.errors) if each.env == row), None)
            own = record.error if record is not None and isinstance(record.error, Exception) else error
            free += self._charge(self._running[row], own)
        return free

    def _lost_in_restart(self, row: int) -> list[int]:
        """The engine has rebuilt an environment by itself."""
        for record in reversed(self._envs.errors):
            error = record.error
            if record.env == row or (isinstance(error, WorkerDied) and row in error.envs):
                if record.env is None:
                    self._suspect([row])
                return self._lose(row, error)
        return self._lose(row, EnvFailed(f"env {row} failed and was rebuilt"))

    def _suspect(self, rows: Sequence[int]) -> None:
        """Mark the attempts that ran in the workers of these rows, where there were several."""
        for group in {id(group): group for group in (self._group_of[row] for row in rows)}.values():
            there = [self._running[row] for row in group if row in self._running]
            if len(there) > 1:
                self._suspect_attempts.update(there)

    def _lose(self, row: int, error: Any) -> list[int]:
        """The attempt in a row is lost; that is its own failure unless another may have caused it."""
        attempt = self._running[row]
        self._in_flight.pop(row, None)
        self._broken.add(row)
        if attempt not in self._suspect_attempts:
            return self._charge(attempt, error)
        self._suspect_attempts.discard(attempt)
        del self._running[row]
        self._suspects.append(attempt.index)
        return [row]

    def _charge(self, attempt: Attempt, error: Exception) -> list[int]:
        """An attempt failed: its row is free, and the episode is begun again or has its result."""
        if by_handler(error):
            raise error
        del self._running[attempt.row]
        result = self._episodes.failed(attempt, error)
        if result is None:
            self._waiting.append(attempt.index)
        else:
            self._report(result)
        return [attempt.row]


class LockstepRunner(EpisodeRunner):
    """Runs episodes on any vector environment.

    Args:
        envs, episodes, act, report: As of :class:`EpisodeRunner`.
        in_waves: Seeds are given to all environments at once or not at all.
    """

    def __init__(
        self, envs: Any, episodes: Episodes, act: Acting, report: Callable[[EpisodeResult], None], *, in_waves: bool
    ) -> None:
        super().__init__(envs, episodes, act, report)
        self._in_waves = in_waves
        self._waiting.extend(range(len(episodes.episodes)))
        self._over: set[int] = set()  # environments whose episode is over and that got no other
        self._infos: list[Any] = [{}] * envs.num_envs  # where the latest info of each environment is

    def run(self) -> None:
        """Run them all."""
        while self._waiting:
            self._over.clear()
            observations = self._begin_all()
            while self._running:
                observations, *numbers, infos = self._step(observations)
                self._infos = [{key: infos[key] for key in infos if key not in ("env_id", "_env_id")}] * self._envs.num_envs
                self._note(*map(np.asarray, numbers))
                free = [row for row in range(self._envs.num_envs) if row not in self._running]
                if self._waiting and free and not self._in_waves:
                    observations = self._begin(observations, free[: len(self._waiting)])
                if self._over and self._running and self._mode is AutoresetMode.DISABLED:
                    observations = self._reset_idle()

    def _begin_all(self) -> Any:
        """Begin the next episodes by a reset of all environments; those that get none are seeded too."""
        rows = [attempt.row for attempt in self._begin_attempts(range(self._envs.num_envs))]
        seeds = [self._episodes.seed(self._running[min(row, rows[-1])].index) for row in range(self._envs.num_envs)]
        options = self._options_of(rows)
        alike = not isinstance(options, list)
        observations, infos = self._envs.reset(seed=seeds, options=dict(options) if alike and options else None)
        self._infos = [infos] * self._envs.num_envs
        return self._restore(observations if alike else self._reset_each(rows), rows)

    def _begin(self, observations: Any, rows: list[int]) -> Any:
        """The next episodes in rows that are free."""
        self._begin_attempts(rows)
        self._over.difference_update(rows)
        anew = [row for row in rows if self._episodes.snapshot(self._running[row]) is None]
        if anew:
            alike = not isinstance(self._options_of(anew), list)
            observations = self._reset(anew) if alike else self._reset_each(anew)
        return self._restore(observations, rows)

    def _restore(self, observations: Any, rows: list[int]) -> Any:
        """Put states in place in those of the rows whose episodes begin with one."""
        snapshots = {row: snapshot for row in rows if (snapshot := self._episodes.snapshot(self._running[row])) is not None}
        if not snapshots:
            return observations
        seen = self._envs.load(list(snapshots.values()), env_id=list(snapshots))
        self._infos = [{} if row in snapshots else info for row, info in enumerate(self._infos)]
        return put_rows(self._envs.single_observation_space, observations, list(snapshots), seen)

    def _options_of(self, rows: list[int]) -> Any:
        """One dict, or ``None``, if the episodes of these rows have the same; else a list."""
        options = [self._episodes.episodes[self._running[row].index].options for row in rows]
        return options[0] if all(each == options[0] for each in options) else options

    def _reset_each(self, rows: list[int]) -> Any:
        """One row after the other: each has options of its own."""
        return [self._reset([row]) for row in rows][-1]

    def _reset(self, rows: list[int]) -> Any:
        count = self._envs.num_envs
        mask = np.isin(np.arange(count), rows)
        seeds = [self._episodes.seed(self._running[row].index) if mask[row] else None for row in range(count)]
        options = {**(self._options_of(rows) or {}), "reset_mask": mask}
        observations, infos = self._envs.reset(seed=seeds, options=options)
        self._infos = [infos if mask[row] else self._infos[row] for row in range(count)]
        return observations

    def _reset_idle(self) -> Any:
        """Reset environments whose episode is over and that get no other: they continue, because all are stepped."""
        mask = np.isin(np.arange(self._envs.num_envs), sorted(self._over))
        self._over.clear()
        return self._envs.reset(options={"reset_mask": mask})[0]

    def _step(self, observations: Any) -> Any:
        """Ask the policy about the rows that have an episode; the others do as the first of those."""
        envs, rows = self._envs, sorted(self._running)
        attempts, infos = [self._running[row] for row in rows], [self._infos[row] for row in rows]
        if len(rows) == envs.num_envs:
            return envs.step(self._act(observations, attempts, infos, rows))
        some = self._act(take_rows(envs.single_observation_space, observations, rows), attempts, infos, rows)
        place = {row: at for at, row in enumerate(rows)}
        return envs.step(take_rows(envs.single_action_space, some, [place.get(row, 0) for row in range(envs.num_envs)]))

    def _note(self, rewards: Any, terminations: Any, truncations: Any) -> None:
        """Add up, and report episodes that are over."""
        ended = terminations | truncations
        for row, attempt in list(self._running.items()):
            attempt.episode_return += float(rewards[row])
            attempt.length += 1
            if ended[row]:
                self._end(attempt, terminations[row], truncations[row], self._infos[row], row)
        self._over.update(np.flatnonzero(ended).tolist())


def _render(env: Any) -> Any:
    return env.render()
