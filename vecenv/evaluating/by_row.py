"""Episodes on engines that answer row by row: whoever is free gets the next one, and nobody is stepped for nothing.

Who failed is told by what is in flight before and after an exception. What an environment raises is its own. A worker that
dies takes all its rows along, and nobody knows which of them was to blame: their episodes are run again when all others are
done, one at a time in a worker, where a death has one cause. So an episode that kills its worker costs the others nothing
but time, and results do not depend on who shared a worker with whom.

A state is put in place of an episode's beginning while nothing is in flight: where a row waits for that, those that come are
held back until all have come.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.errors import EnvFailed, SnapshotMismatch, StepTimeout, WorkerDied
from vecenv.evaluating.batches import join_rows, take_rows
from vecenv.evaluating.episodes import Attempt, EpisodeResult, Episodes
from vecenv.evaluating.policies import Acting
from vecenv.front.infos import info_row

__all__ = ["ByRow"]


class ByRow:
    """Runs episodes.

    Args:
        envs: An engine with first-ready rows and a seed for each.
        episodes: What is to be run.
        act: The policy.
        tell: Called with each result as it comes.
        timeout: Seconds that a step, or a reset, of an environment takes at most; ``None``: for ever.
        filmed: Of these the frames are kept.
    """

    def __init__(
        self,
        envs: Any,
        episodes: Episodes,
        act: Acting,
        tell: Callable[[EpisodeResult], None],
        timeout: float | None,
        filmed: frozenset[int],
    ) -> None:
        self._envs = envs
        self._episodes = episodes
        self._act = act
        self._tell = tell
        self._timeout = timeout
        self._filmed = filmed
        self._same_step = envs.metadata.get("autoreset_mode") is AutoresetMode.SAME_STEP
        self._groups: list[list[int]] = [list(rows) for rows in envs.worker_rows]
        self._group_of = {row: group for group in self._groups for row in group}
        self._waiting: deque[int] = deque()
        self._suspects: list[int] = []
        self._running: dict[int, Attempt] = {}  # by row
        self._flying: dict[int, float] = {}  # row -> since when
        self._broken: set[int] = set()  # rows that failed and were not reset since
        self._tainted: set[Attempt] = set()  # that ran beside others in a worker that died
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
                self._begin(self._raised(error))
            else:
                self._go_on(*answer)
            self._release()

    def _go_on(self, observations: Any, rewards: Any, terminations: Any, truncations: Any, infos: dict[Any, Any]) -> None:
        """Rows have come: note them, begin episodes where one is over, and step the others."""
        came = infos.pop("env_id").tolist()
        infos.pop("_env_id", None)
        free: list[int] = []
        places: list[int] = []
        for place, row in enumerate(came):
            attempt, over = self._running[row], bool(terminations[place] or truncations[place])
            del self._flying[row]
            if "restarted" in infos and infos["_restarted"][place]:  # on_failure="restart": the episode is lost
                free += self._lost_in_restart(row)
                continue
            if not attempt.begins:
                attempt.episode_return += float(rewards[place])
                attempt.length += 1
            if attempt.index in self._filmed and not (over and self._same_step):
                attempt.frames.append(self._frame(row))
            if not over:
                places.append(place)
                continue
            info = info_row(infos, place)
            if self._same_step:
                info = info.get("final_info", {})
            del self._running[row]
            free.append(row)
            self._tell(self._episodes.ended(attempt, bool(terminations[place]), bool(truncations[place]), info))
        self._begin(free)  # before the policy is asked: resets may take long
        if places:
            if len(places) < len(came):
                observations = take_rows(self._envs.single_observation_space, observations, places)
            self._held.append(([came[place] for place in places], observations, infos, places))

    def _release(self) -> None:
        """Step the rows that have come, unless others have to come first."""
        self._begin([])
        while self._held and not (self._free and self._flying):
            self._step(*self._held.pop(0))

    def _frame(self, row: int) -> Any:
        """What a row looks like. While any worker is dead, calls are refused: then the other rows are reset first."""
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
            if self._restores and self._flying:
                self._free = free
                return
            rows, free = free[: len(self._waiting)], free[len(self._waiting) :]
            attempts = [self._episodes.begin(self._waiting.popleft(), row) for row in rows]
            self._running.update({attempt.row: attempt for attempt in attempts})
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
        self._flying.update(dict.fromkeys(rows, time.monotonic()))

    def _step(self, rows: list[int], observations: Any, infos: Any, places: list[int]) -> None:
        """Ask the policy, and step these rows."""
        actions = self._act(observations, [self._running[row] for row in rows], [infos] * len(rows), places)
        try:
            self._send(actions, rows)
        except EnvFailed:  # a worker has died meanwhile: find out whose
            lost: list[int] = []
            for place, row in enumerate(rows):
                try:
                    self._send(take_rows(self._envs.single_action_space, actions, [place]), [row])
                except EnvFailed as error:
                    lost += self._lose(row, error)
            self._begin(lost)

    def _send(self, actions: Any, rows: list[int]) -> None:
        self._envs.send(actions, rows)
        self._flying.update(dict.fromkeys(rows, time.monotonic()))

    def _receive(self) -> Any:
        """Whoever is done, one at least; ends workers that hang."""
        if self._timeout is None:
            return self._envs.recv(count=len(self._flying), at_least=1)
        while True:
            now = time.monotonic()
            ends = {row: since + self._patience(row) for row, since in self._flying.items()}
            late = [row for row, end in ends.items() if end <= now]
            if late:
                self._envs.abandon(late)
            try:
                return self._envs.recv(None if late else min(ends.values()) - now, count=len(self._flying), at_least=1)
            except StepTimeout:
                if late:
                    raise

    def _patience(self, row: int) -> float:
        """A worker steps its rows one after the other."""
        assert self._timeout is not None
        return self._timeout * sum(other in self._running for other in self._group_of[row])

    # -- failures ---------------------------------------------------------------------------------------------------

    def _answered(self, error: Exception) -> list[int]:
        """The rows that an exception is the answer to."""
        flying = set(self._envs.in_flight.tolist())
        rows = [row for row in self._flying if row not in flying]
        if not rows:  # it is about nothing that was asked
            raise error
        return rows

    def _died(self, error: WorkerDied) -> list[int]:
        """A worker died: rows that are free now."""
        rows = self._answered(error)
        self._taint(rows)
        return [free for row in rows for free in self._lose(row, error)]

    def _raised(self, error: Exception) -> list[int]:
        """Environments raised: rows that are free now."""
        free: list[int] = []
        for row in self._answered(error):
            del self._flying[row]
            self._broken.add(row)
            record = next((each for each in reversed(self._envs.errors) if each.env == row), None)
            own = record.error if record is not None and isinstance(record.error, Exception) else error
            free += self._charge(self._running[row], own)
        return free

    def _lost_in_restart(self, row: int) -> list[int]:
        """The engine has built an environment anew by itself."""
        for record in reversed(self._envs.errors):
            error = record.error
            if record.env == row or (isinstance(error, WorkerDied) and row in error.envs):
                if record.env is None:
                    self._taint([row])
                return self._lose(row, error)
        return self._lose(row, EnvFailed(f"env {row} failed and was built anew"))

    def _taint(self, rows: Sequence[int]) -> None:
        """All that ran in the workers of these rows, if it was several."""
        for group in {id(group): group for group in (self._group_of[row] for row in rows)}.values():
            there = [self._running[row] for row in group if row in self._running]
            if len(there) > 1:
                self._tainted.update(there)

    def _lose(self, row: int, error: Any) -> list[int]:
        """What ran in a row is lost; it is charged with that unless another may be to blame."""
        attempt = self._running[row]
        self._flying.pop(row, None)
        self._broken.add(row)
        if attempt not in self._tainted:
            return self._charge(attempt, error)
        self._tainted.discard(attempt)
        del self._running[row]
        self._suspects.append(attempt.index)
        return [row]

    def _charge(self, attempt: Attempt, error: Exception) -> list[int]:
        """An attempt failed: its row is free, and the episode is begun again or has its result."""
        del self._running[attempt.row]
        result = self._episodes.failed(attempt, error)
        if result is None:
            self._waiting.append(attempt.index)
        else:
            self._tell(result)
        return [attempt.row]


def _render(env: Any) -> Any:
    return env.render()
