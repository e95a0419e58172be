"""Episodes on engines whose environments step together: JAX's, EnvPool's, libraries' own, Gymnasium's.

A row whose episode is over begins the next one by a masked reset with a seed of its own, where the engine has that; else all
rows wait for the last one and are seeded together. What has nothing to do any more is stepped along, which cannot be helped
there, and its numbers are nobody's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.evaluating.batches import put_rows, take_rows
from vecenv.evaluating.episodes import Attempt, EpisodeResult, Episodes
from vecenv.evaluating.policies import Acting
from vecenv.front.infos import info_row

__all__ = ["Together"]


class Together:
    """Runs episodes.

    Args:
        envs: Any vector environment.
        episodes: What is to be run.
        act: The policy.
        tell: Called with each result as it comes.
        in_waves: Seeds are given to all rows at once or not at all.
    """

    def __init__(
        self, envs: Any, episodes: Episodes, act: Acting, tell: Callable[[EpisodeResult], None], *, in_waves: bool
    ) -> None:
        self._envs = envs
        self._episodes = episodes
        self._act = act
        self._tell = tell
        self._in_waves = in_waves
        self._mode = envs.metadata.get("autoreset_mode")
        self._waiting = deque(range(len(episodes.episodes)))
        self._running: dict[int, Attempt] = {}
        self._over: set[int] = set()  # rows whose episode is over and that got no other
        self._said: list[Any] = [{}] * envs.num_envs  # where the latest info of each row is

    def run(self) -> None:
        """Run them all."""
        while self._waiting:
            self._over.clear()
            observations = self._begin_all()
            while self._running:
                observations, *numbers, infos = self._step(observations)
                self._said = [{key: infos[key] for key in infos if key not in ("env_id", "_env_id")}] * self._envs.num_envs
                self._note(*map(np.asarray, numbers))
                free = [row for row in range(self._envs.num_envs) if row not in self._running]
                if self._waiting and free and not self._in_waves:
                    observations = self._begin(observations, free[: len(self._waiting)])
                if self._over and self._running and self._mode is AutoresetMode.DISABLED:
                    observations = self._reset_idle()

    def _begin_all(self) -> Any:
        """The next episodes, from a reset of all rows; those that get none are seeded too."""
        seeds = []
        for row in range(self._envs.num_envs):
            if self._waiting:
                attempt = self._running[row] = self._episodes.begin(self._waiting.popleft(), row)
            seeds.append(self._episodes.seed(attempt.index))
        rows = list(self._running)
        options = self._options_of(rows)
        alike = not isinstance(options, list)
        observations, infos = self._envs.reset(seed=seeds, options=dict(options) if alike and options else None)
        self._said = [infos] * self._envs.num_envs
        return self._restore(observations if alike else self._reset_each(rows), rows)

    def _begin(self, observations: Any, rows: list[int]) -> Any:
        """The next episodes in rows that are free."""
        for row in rows:
            self._running[row] = self._episodes.begin(self._waiting.popleft(), row)
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
        self._said = [{} if row in snapshots else said for row, said in enumerate(self._said)]
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
        self._said = [infos if mask[row] else self._said[row] for row in range(count)]
        return observations

    def _reset_idle(self) -> Any:
        """Rows whose episode is over and that get no other: they have to go on, since all are stepped."""
        mask = np.isin(np.arange(self._envs.num_envs), sorted(self._over))
        self._over.clear()
        return self._envs.reset(options={"reset_mask": mask})[0]

    def _step(self, observations: Any) -> Any:
        """Ask the policy about the rows that have an episode; the others do as the first of those."""
        envs, rows = self._envs, sorted(self._running)
        attempts, infos = [self._running[row] for row in rows], [self._said[row] for row in rows]
        if len(rows) == envs.num_envs:
            return envs.step(self._act(observations, attempts, infos, rows))
        some = self._act(take_rows(envs.single_observation_space, observations, rows), attempts, infos, rows)
        place = {row: at for at, row in enumerate(rows)}
        return envs.step(take_rows(envs.single_action_space, some, [place.get(row, 0) for row in range(envs.num_envs)]))

    def _note(self, rewards: Any, terminations: Any, truncations: Any) -> None:
        """Add up, and tell of episodes that are over."""
        ended = terminations | truncations
        for row, attempt in list(self._running.items()):
            attempt.episode_return += float(rewards[row])
            attempt.length += 1
            if ended[row]:
                del self._running[row]
                info = info_row(self._said[row], row)
                info = info.get("final_info", {}) if self._mode is AutoresetMode.SAME_STEP else info
                self._tell(self._episodes.ended(attempt, bool(terminations[row]), bool(truncations[row]), info))
        self._over.update(np.flatnonzero(ended).tolist())
