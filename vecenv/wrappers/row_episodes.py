"""The current episodes of an ``EpisodePrefetcher``'s rows, which its snapshots contain."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from vecenv.front.arguments import random_seed
from vecenv.state.snapshots import Snapshot

EpisodeKey: TypeAlias = tuple[int, int, int]
"""An episode: the row, the number of resets and loads by the caller, and the number of episodes since its seed."""
EpisodePhase: TypeAlias = Literal["beginning", "running", "ended", "failed"]
_SNAPSHOT_KEY: Final = "EpisodePrefetcher"


@dataclass(frozen=True, slots=True)
class RowEpisode:
    """The current episode of a row.

    Attributes:
        origin, seed: The row that was reset with a seed, and the seed; a snapshot can move both to another row.
        num_resets: The number of resets and loads by the caller.
        episode: The index of the episode since the seed: 0 for the first one.
        order: A number that is lower for older episodes.
        phase: ``"beginning"`` until its reset has finished; then ``"running"``; ``"ended"`` if the row's next step begins
            another episode; ``"failed"`` if the row needs a reset.
    """

    origin: int
    seed: int | None = None
    num_resets: int = 0
    episode: int = 0
    order: int = 0
    phase: EpisodePhase = "beginning"

    def derive_seed(self, episode: int) -> int:
        """Return the seed of an episode: the caller's for the first one, a derived one for the others."""
        assert self.seed is not None
        if episode == 0:
            return self.seed
        return int(np.random.SeedSequence(self.seed, spawn_key=(self.origin, episode)).generate_state(1)[0] >> 1)

    def add_to(self, snapshot: Snapshot) -> Snapshot:
        """Return a copy of a row's snapshot that contains this episode."""
        beside = {**(snapshot.row.beside or {}), _SNAPSHOT_KEY: (self.origin, self.seed, self.episode)}
        return snapshot.having(beside=beside, pending=self.phase == "ended")

    def continue_from(self, snapshot: Snapshot, row: int, order: int) -> RowEpisode:
        """Return the episode of a snapshot that was loaded into this row; one with a random seed if it contains none."""
        origin, seed, episode = (snapshot.row.beside or {}).get(_SNAPSHOT_KEY) or (row, random_seed(), 0)
        phase: EpisodePhase = "ended" if snapshot.row.pending else "running"
        return RowEpisode(origin, seed, self.num_resets + 1, episode, order, phase)


def without_pending(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Return the snapshots without their pending resets, which the prefetcher begins, not its engine."""
    return [one.having(pending=False) if one.row.pending else one for one in snapshots]


def find_upcoming(episodes: Sequence[RowEpisode], begun: Container[EpisodeKey], count: int) -> list[EpisodeKey]:
    """Return ``count`` episodes that have not begun: the next one of each row, then the ones after these.

    Args:
        episodes: The current episode of each row.
        begun: The episodes that have begun early.
        count: The number of episodes. If no row has a seed, the result is empty.
    """
    rows = [row for row, current in enumerate(episodes) if current.seed is not None]
    rows.sort(key=lambda row: (episodes[row].phase != "ended", episodes[row].order))
    upcoming: list[EpisodeKey] = []
    ahead = 0
    while rows and len(upcoming) < count:
        ahead += 1
        keys = [(row, episodes[row].num_resets, episodes[row].episode + ahead) for row in rows]
        upcoming += [key for key in keys if key not in begun]
    return upcoming[:count]
