"""Which episodes there are: seeds and numbers of those that rows are in, and which will be wanted next.

An episode is known by its row and its number since the row's latest seeded reset, and its seed follows from these. So it
does not matter which environment runs it, nor when that began with it. Nothing here does anything: this is data, and each
change is another object, which takes the place of the one before in one store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from vecenv.front.arguments import any_seed
from vecenv.shm.layout import Array

__all__ = ["EpisodeId", "EpisodeTable", "NextEpisode", "derived_seed"]


class EpisodeId(NamedTuple):
    """An episode: the row, how often that was reset by its caller, and the number since the latest seed."""

    row: int
    life: int
    episode: int


@dataclass(frozen=True, slots=True)
class NextEpisode:
    """What an environment is to begin ahead of time.

    Attributes:
        key: Which episode.
        seed: Its seed.
        number: A later one has a higher one.
    """

    key: EpisodeId
    seed: int
    number: int


def derived_seed(seed: int, row: int, episode: int) -> int:
    """The seed of a row's ``episode``-th episode after the one that was reset with ``seed``, which is number 0."""
    return int(np.random.SeedSequence(seed, spawn_key=(row, episode)).generate_state(1)[0] >> 1)


@dataclass(frozen=True, slots=True)
class EpisodeTable:
    """The episodes that rows are in.

    Attributes:
        answered: The number of the latest step whose answer is in here.
        steps: How many there were.
        seeds: What each row was reset with by the caller, or what stands for it; ``None``: it never was.
        origins: The rows in which these seeds were given: a snapshot takes both along.
        lives: How often each was reset by the caller.
        episodes: The number of its episode since its seed.
        began: The step with which that began.
        ended: Rows whose episode is over, and whose next begins with the next step.
    """

    seeds: tuple[int | None, ...]
    origins: tuple[int, ...]
    lives: tuple[int, ...]
    episodes: tuple[int, ...]
    began: tuple[int, ...]
    ended: tuple[int, ...] = ()
    answered: int = 0
    steps: int = 0

    @classmethod
    def blank(cls, num_envs: int) -> EpisodeTable:
        """Before the first reset."""
        zeros = (0,) * num_envs
        return cls((None,) * num_envs, tuple(range(num_envs)), zeros, zeros, zeros)

    def next_key(self, row: int) -> EpisodeId:
        """The episode that follows the one that a row is in, or was in."""
        return EpisodeId(row, self.lives[row], self.episodes[row] + 1)

    def seed_of(self, key: EpisodeId) -> int:
        """The seed of an episode that begins by itself."""
        seed = self.seeds[key.row]
        assert seed is not None
        return derived_seed(seed, self.origins[key.row], key.episode)

    def is_to_come(self, key: EpisodeId) -> bool:
        """Whether no step has asked for an episode yet, and one may."""
        return key.life == self.lives[key.row] and key.episode > self.episodes[key.row]

    def coming(self, count: int, held: set[EpisodeId]) -> list[EpisodeId]:
        """The next ``count`` episodes that are not ``held``: each row's next, of the oldest one first; and on."""
        rows = [row for row, seed in enumerate(self.seeds) if seed is not None]
        rows.sort(key=lambda row: (row not in self.ended, self.began[row], row))
        found: list[EpisodeId] = []
        ahead = 0
        while rows and len(found) < count:
            ahead += 1
            for row in rows:
                key = EpisodeId(row, self.lives[row], self.episodes[row] + ahead)
                if key not in held and len(found) < count:
                    found.append(key)
        return found

    def reset(self, rows: Sequence[int], seeds: Sequence[Any]) -> tuple[EpisodeTable, list[int | None]]:
        """As it will be when rows were reset by the caller, and the seeds for that.

        A row that is given a seed begins to count anew; one that is not goes on to its next episode; one that never had any
        gets one of no row's.
        """
        own, lives, episodes, began = list(self.seeds), list(self.lives), list(self.episodes), list(self.began)
        origins = list(self.origins)
        given: list[int | None] = list(seeds)
        for row in rows:
            seed = seeds[row]
            lives[row] += 1
            began[row] = self.steps
            if seed is None and own[row] is not None:
                episodes[row] += 1
                given[row] = self.seed_of(EpisodeId(row, 0, episodes[row]))
                continue
            episodes[row], origins[row] = 0, row
            given[row] = own[row] = any_seed() if seed is None else int(seed)
        ended = tuple(row for row in self.ended if row not in set(rows))
        return replace(
            self, seeds=tuple(own), origins=tuple(origins), lives=tuple(lives), episodes=tuple(episodes), began=tuple(began),
            ended=ended,
        ), given  # fmt: skip

    def source(self, row: int) -> tuple[int | None, int, int]:
        """Of a row's episodes: the seed, the row that it was given to, and the number of the present one."""
        return self.seeds[row], self.origins[row], self.episodes[row]

    def loaded(self, sources: Mapping[int, tuple[int | None, int, int] | None], pending: Sequence[int]) -> EpisodeTable:
        """Once rows go on from other states; it may be done again.

        Args:
            sources: By row, as :meth:`source` gives them; ``None``: it is not known.
            pending: Those whose next step begins an episode.
        """
        seeds, origins, episodes, lives = list(self.seeds), list(self.origins), list(self.episodes), list(self.lives)
        for row, source in sources.items():
            seeds[row], origins[row], episodes[row] = source or (any_seed(), row, 0)
            lives[row] += 1
        ended = tuple({*pending} | {row for row in self.ended if row not in sources})
        return replace(
            self, seeds=tuple(seeds), origins=tuple(origins), episodes=tuple(episodes), lives=tuple(lives), ended=ended
        )  # fmt: skip

    def stepped(self, answered: int, over: Array, *, at_once: bool) -> EpisodeTable:
        """After a step of all rows.

        Args:
            answered: Its number.
            over: bool ``(n,)``: whose episode is over.
            at_once: The next one has begun in the same step.
        """
        if answered == self.answered:
            return self
        ended = tuple(np.flatnonzero(over).tolist())
        rows = ended if at_once else self.ended
        after = self.begun(rows) if rows else replace(self, steps=self.steps + 1)  # its columns stay the same objects
        return replace(after, ended=() if at_once else ended, answered=answered)

    def begun(self, rows: Sequence[int]) -> EpisodeTable:
        """Once steps were asked for that begin the next episodes of rows."""
        episodes, began = list(self.episodes), list(self.began)
        for row in rows:
            episodes[row] += 1
            began[row] = self.steps
        ended = tuple(row for row in self.ended if row not in rows)
        return replace(self, episodes=tuple(episodes), began=tuple(began), ended=ended, steps=self.steps + 1)

    def received(self, rows: Array, over: Array) -> EpisodeTable:
        """After the answers of some rows; ``over``: bool ``(n,)``, whose episode is over. It may be done again."""
        ended = tuple(rows[over[rows]].tolist())
        return replace(self, ended=tuple({*self.ended, *ended})) if ended else self
