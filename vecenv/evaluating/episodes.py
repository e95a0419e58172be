"""Episodes to be run, their seeds and generators, attempts at them, and results.

Everything about an episode follows from its place in the list and from the seed of the evaluation, and never from the
environment that runs it: so results are the same for every number of environments.
"""

from __future__ import annotations

import operator
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vecenv.errors import SnapshotMismatch
from vecenv.state.snapshots import Snapshot

__all__ = ["Attempt", "Episode", "EpisodeResult", "EpisodeResults", "Episodes", "Listed", "listed"]

_BASES: Final = 2**30  # seeds are drawn from below this: with the number of episodes they are within what every engine takes


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode to be run.

    Args:
        seed: Of its reset; ``None``: the seed of the evaluation plus the place in the list.
        options: Of its reset; ``None``: none.
        snapshot: It begins with this state in place of a reset; ``seed`` and ``options`` are ``None`` then.
    """

    seed: int | None = None
    options: Mapping[str, Any] | None = None
    snapshot: Snapshot | None = None


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """The result of one episode.

    Attributes:
        index: Its place in the list.
        seed: Its reset was given this one; ``None``: it began with a snapshot.
        options: And these.
        episode_return: Sum of its rewards, added up in their order as float64; nan if it failed.
        length: Steps that were answered.
        terminated, truncated: How it ended; both ``False`` if it failed.
        info: The last one.
        error: Why it failed, in the last attempt; ``None`` if it did not.
        seconds: From asking for its reset to its end, of the last attempt.
        attempts: How often it was begun.
        frames: uint8 ``(height, width, 3)`` each, where they were asked for: after its reset and after each step.
    """

    index: int
    seed: int | None
    options: Mapping[str, Any] | None
    episode_return: float
    length: int
    terminated: bool
    truncated: bool
    info: dict[Any, Any]
    error: Exception | None
    seconds: float
    attempts: int = 1
    frames: tuple[NDArray[np.uint8], ...] = ()


class EpisodeResults(list[EpisodeResult]):
    """A list of results in the order of the episodes, with figures over them.

    Attributes:
        returns: float64 ``(episodes,)``; nan where an episode failed.
        lengths: int64 ``(episodes,)``.
        mean, std: Of the returns of all episodes that did not fail, as float; nan if all failed.
    """

    @property
    def returns(self) -> NDArray[np.float64]:
        return np.array([each.episode_return for each in self], np.float64)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([each.length for each in self], np.int64)

    @property
    def mean(self) -> float:
        return self._of_ended(np.mean)

    @property
    def std(self) -> float:
        return self._of_ended(np.std)

    def _of_ended(self, figure: Callable[..., Any]) -> float:
        returns = [each.episode_return for each in self if each.error is None]
        return float(figure(returns)) if returns else float("nan")

    def __repr__(self) -> str:
        failed = sum(each.error is not None for each in self)
        return (
            f"EpisodeResults({len(self)} episodes{f', {failed} failed' if failed else ''}, mean={self.mean:.6g}, "
            f"std={self.std:.6g}, steps={self.lengths.sum()})"
        )


Listed: TypeAlias = int | Sequence[Episode | Snapshot]
"""How many episodes, or which; a snapshot stands for the episode that begins with it."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One time that an episode is run.

    Attributes:
        episode: What is run.
        index: Its place in the list.
        row: The environment that runs it.
        rng: The policy's own, for this episode: the same at every attempt.
        begins: Its first observation has not been shown to the policy.
        suspect: It ran beside others in a worker that died, and may have caused that.
        episode_return, length: So far.
        frames: As far as they were asked for.
        began: ``time.perf_counter()`` at its beginning.
    """

    episode: Episode
    index: int
    row: int
    rng: np.random.Generator
    begins: bool = True
    suspect: bool = False
    episode_return: float = 0.0
    length: int = 0
    frames: list[Any] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)


@dataclass(slots=True)
class Episodes:
    """The list, and the results as they come.

    Attributes:
        episodes: With a seed each.
        entropy: Of the generators.
        retries: How often an episode that failed is begun again.
        results: By index.
        failures: By index, how often it failed.
        begun: By index, how often it was begun.
    """

    episodes: list[Episode]
    entropy: int
    retries: int
    results: dict[int, EpisodeResult] = field(default_factory=dict)
    failures: Counter[int] = field(default_factory=Counter)
    begun: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        retries = self.retries
        if isinstance(retries, bool) or not isinstance(retries, (int, np.integer)) or retries < 0:
            raise ValueError(f"retries must be an integer from 0 on, got {retries!r}")

    def begin(self, index: int, row: int) -> Attempt:
        """An attempt at an episode, in a row."""
        self.begun[index] += 1
        rng = np.random.default_rng(np.random.SeedSequence(self.entropy, spawn_key=(index,)))
        return Attempt(self.episodes[index], index, row, rng)

    def failed(self, attempt: Attempt, error: Exception) -> EpisodeResult | None:
        """An attempt failed: the result, or ``None`` if the episode is to be begun again."""
        self.failures[attempt.index] += 1
        again = self.failures[attempt.index] <= self.retries
        return None if again else self.ended(attempt, False, False, {}, error)

    def ended(
        self, attempt: Attempt, terminated: bool, truncated: bool, info: Any, error: Exception | None = None
    ) -> EpisodeResult:
        """An episode is over: its result."""
        index, episode = attempt.index, attempt.episode
        episode_return = attempt.episode_return if error is None else float("nan")
        seed = episode.seed if episode.snapshot is None else None
        result = self.results[index] = EpisodeResult(
            index, seed, episode.options, episode_return, attempt.length, terminated, truncated, info, error,
            time.perf_counter() - attempt.began, self.begun[index], tuple(attempt.frames),
        )  # fmt: skip
        return result


def listed(episodes: Any, seed: Any) -> tuple[list[Episode], int]:
    """The episodes with a seed each, and the seed they come from.

    Raises:
        TypeError: Neither a number nor a list of episodes; a seed that is no integer, options that are no dict.
        ValueError: There are none; a seed below 0; a snapshot of an episode that is over.
        SnapshotMismatch: The bytes of a snapshot are damaged.
    """
    base = secrets.randbelow(_BASES) if seed is None else _natural(seed, "seed")
    if isinstance(episodes, str | bytes | Mapping | Episode | Snapshot):
        raise TypeError(f"episodes must be how many, or a list of vecenv.Episode or snapshots, got {episodes!r}")
    is_list = isinstance(episodes, Sequence)
    wanted: list[Any] = list(episodes) if is_list else [Episode()] * _natural(episodes, "episodes")
    if not wanted:
        raise ValueError(f"there is no episode to run: got episodes={episodes!r}")
    for index, episode in enumerate(wanted):
        if isinstance(episode, Snapshot):
            episode = Episode(snapshot=episode)
        if not isinstance(episode, Episode):
            raise TypeError(f"episodes[{index}] must be a vecenv.Episode, got {episode!r}")
        if episode.options is not None and not isinstance(episode.options, Mapping):
            raise TypeError(f"episodes[{index}].options must be a dict or None, got {episode.options!r}")
        if episode.options is not None and "reset_mask" in episode.options:
            raise ValueError(f"episodes[{index}].options has 'reset_mask', which is about many environments")
        if episode.snapshot is not None:
            _require_beginning(index, episode)
        own = base + index if episode.seed is None else _natural(episode.seed, f"episodes[{index}].seed")
        wanted[index] = Episode(own, episode.options, episode.snapshot)
    return wanted, base


def _require_beginning(index: int, episode: Episode) -> None:
    """Refuse a snapshot that no episode can begin with."""
    snapshot, name = episode.snapshot, f"episodes[{index}].snapshot"
    if not isinstance(snapshot, Snapshot):
        raise TypeError(f"{name} must be one of those that envs.save() gives, got {snapshot!r}")
    if episode.seed is not None or episode.options is not None:
        raise ValueError(f"episodes[{index}] has a snapshot, so there is no reset that could be given its seed or options")
    try:
        snapshot.require_whole()
    except SnapshotMismatch as error:
        raise SnapshotMismatch(f"{name}: {error}") from None
    known = snapshot.row
    if not known.used or known.pending:
        when = "before the first reset" if not known.used else "when its episode was over: the next step resets it"
        raise ValueError(f"{name} was taken {when}")


def _natural(number: Any, name: str) -> int:
    if isinstance(number, bool | np.bool_):
        raise TypeError(f"{name} must be an integer, got {number!r}")
    try:
        value = operator.index(number)
    except TypeError:
        wanted = "how many, or a list of vecenv.Episode" if name == "episodes" else "an integer"
        raise TypeError(f"{name} must be {wanted}, got {number!r}") from None
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")
    return value
