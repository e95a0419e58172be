"""The episodes of an evaluation: their seeds and generators, the attempts to run them, and the results.

An episode depends only on its entry and its index in the list and on the seed of the evaluation, not on the environment that
runs it, so results do not depend on the number of environments.
"""

from __future__ import annotations

import operator
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vecenv.errors import SnapshotMismatch
from vecenv.evaluating.tables import make_table
from vecenv.front.capabilities import wrappers_around
from vecenv.link.messages import copy_if_possible
from vecenv.state.snapshots import Kind, Snapshot

__all__ = [
    "Attempt", "Episode", "EpisodeList", "EpisodeResult", "EpisodeResults", "Episodes", "episode_statistics_keys",
    "first_snapshot_per_kind", "parse_episodes", "parse_frames", "shared_options",
]  # fmt: skip

_RANDOM_SEED_LIMIT: Final = 2**30  # leaves room for indices: seed + index has to be valid for every engine


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode to run.

    Args:
        seed: The seed of its reset; ``None``: the seed of the evaluation plus its index in the list.
        options: The options of its reset.
        snapshot: The state to begin with, instead of a reset; ``seed``, ``options`` and ``env`` must then be ``None``.
        env: The name of an environment that :class:`vecenv.EnvChoice` offers.
    """

    seed: int | None = None
    options: Mapping[str, Any] | None = None
    snapshot: Snapshot | None = None
    env: str | None = None

    @property
    def reset_options(self) -> dict[str, Any] | None:
        """The options of its reset, including the name of the environment."""
        named = {} if self.env is None else {"env": self.env}
        return None if self.options is None and not named else {**(self.options or {}), **named}


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """The result of one episode.

    Attributes:
        index: Its index in the list.
        seed: The seed of its reset; ``None``: it began with a snapshot.
        options: The options of its reset.
        episode_return: The sum of its rewards, added in their order as float64; nan if it failed.
        length: The number of steps; with :class:`vecenv.wrappers.ActionChunks`, the number of executed actions.
        terminated, truncated: How it ended; both ``False`` if it failed.
        info: The last info; empty if it failed.
        error: The exception that ended the last attempt; ``None`` if it did not fail.
        seconds: The duration of the last attempt, including its reset or the loading of its snapshot.
        attempts: The number of attempts, including those that ended because a shared worker died.
        frames: The frames after its reset and after each step, uint8 ``(height, width, 3)``, if they were requested. With
            same-step autoreset, the frame of the last step is missing.
        env: The name of its environment, if :class:`Episode` has one.
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
    env: str | None = None


class EpisodeResults(list[EpisodeResult]):
    """A list of results in the order of the episodes, with statistics.

    Attributes:
        returns: float64 ``(episodes,)``; nan for failed episodes.
        lengths: int64 ``(episodes,)``.
        mean, std: The mean and standard deviation of the returns of episodes that did not fail; nan if all failed.
    """

    @property
    def returns(self) -> NDArray[np.float64]:
        return np.array([each.episode_return for each in self], np.float64)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([each.length for each in self], np.int64)

    @property
    def mean(self) -> float:
        return self._apply_to_completed(np.mean)

    @property
    def std(self) -> float:
        return self._apply_to_completed(np.std)

    def group(self, by: str = "env") -> dict[Any, EpisodeResults]:
        """Group the results by an attribute of :class:`EpisodeResult`, such as ``"env"`` or ``"terminated"``.

        Raises:
            ValueError: There is no such attribute, or its values are neither numbers nor strings.
        """
        names = [each.name for each in fields(EpisodeResult) if each.name not in ("options", "info", "error", "frames")]
        if by not in names:
            raise ValueError(f"by must be one of {', '.join(names)}; got {by!r}")
        groups: dict[Any, EpisodeResults] = {}
        for result in self:
            groups.setdefault(getattr(result, by), EpisodeResults()).append(result)
        return groups

    def table(self, by: str = "env") -> Any:
        """Build a ``rich.table.Table`` with one row per group; see :meth:`group`.

        Several groups are followed by a row for all episodes. The columns are the number of episodes, the mean return with
        its 95% confidence interval (Student's t), the mean length, and the number of failures. The means are over episodes
        that did not fail. ``rich.print(results.table())`` prints the table.

        Raises:
            ValueError: See :meth:`group`.
            ImportError: rich is not installed.
        """
        return make_table(by, self.group(by))

    def _apply_to_completed(self, statistic: Callable[..., Any]) -> float:
        returns = [each.episode_return for each in self if each.error is None]
        return float(statistic(returns)) if returns else float("nan")

    def __repr__(self) -> str:
        failed = sum(each.error is not None for each in self)
        return (
            f"EpisodeResults({len(self)} episodes{f', {failed} failed' if failed else ''}, mean={self.mean:.6g}, "
            f"std={self.std:.6g}, steps={self.lengths.sum()})"
        )


EpisodeList: TypeAlias = int | Sequence[Episode | Snapshot]
"""A number of episodes, or a list of them. A snapshot stands for the episode that begins with it."""


@dataclass(slots=True, eq=False)
class Attempt:
    """An attempt to run an episode.

    Attributes:
        episode: The episode.
        index: Its index in the list.
        row: The environment that runs it.
        rng: The policy's generator for this episode, seeded the same way in every attempt.
        begins: True until the policy has received its first observation.
        suspect: True if it may have caused the death of a worker that it shared with other attempts.
        episode_return, length: The totals so far.
        frames: The frames so far, if they were requested.
        start_time: ``time.perf_counter()`` at its beginning.
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
    start_time: float = field(default_factory=time.perf_counter)


@dataclass(slots=True)
class Episodes:
    """The list of episodes, with the results so far.

    Attributes:
        episodes: The episodes, all with a seed.
        entropy: The seed of the generators.
        retries: The maximum number of times that a failed episode is repeated.
        results: The results by index.
        failures: The number of failures by index.
        attempts: The number of attempts by index.
    """

    episodes: list[Episode]
    entropy: int
    retries: int
    results: dict[int, EpisodeResult] = field(default_factory=dict)
    failures: Counter[int] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        retries = self.retries
        if isinstance(retries, bool) or not isinstance(retries, (int, np.integer)) or retries < 0:
            raise ValueError(f"retries must be a non-negative integer, got {retries!r}")

    def begin(self, index: int, row: int) -> Attempt:
        """Begin an attempt at an episode in environment ``row``."""
        self.attempts[index] += 1
        rng = np.random.default_rng(np.random.SeedSequence(self.entropy, spawn_key=(index,)))
        return Attempt(self.episodes[index], index, row, rng)

    def record_failure(self, attempt: Attempt, error: Exception) -> EpisodeResult | None:
        """Record a failed attempt; return the result, or ``None`` if the episode is to be repeated."""
        self.failures[attempt.index] += 1
        repeat = self.failures[attempt.index] <= self.retries
        return None if repeat else self.record_end(attempt, False, False, {}, error)

    def record_end(
        self, attempt: Attempt, terminated: bool, truncated: bool, info: Any, error: Exception | None = None
    ) -> EpisodeResult:
        """Store and return the result of an episode that has ended."""
        index, episode = attempt.index, attempt.episode
        episode_return = attempt.episode_return if error is None else float("nan")
        seed = episode.seed if episode.snapshot is None else None
        # an environment of this process may change the objects in its info during later episodes
        info = copy_if_possible(info)
        result = self.results[index] = EpisodeResult(
            index, seed, episode.options, episode_return, attempt.length, terminated, truncated, info, error,
            time.perf_counter() - attempt.start_time, self.attempts[index], tuple(attempt.frames), episode.env,
        )  # fmt: skip
        return result


def parse_episodes(episodes: Any, seed: Any) -> tuple[list[Episode], int]:
    """Parse a list of episodes; return the episodes, each with a seed, and the seed of the evaluation.

    Raises:
        TypeError: ``episodes`` is neither a number nor a list of episodes, ``seed`` or a field of an episode has a wrong
            type, or an episode names its environment twice.
        ValueError: There are no episodes, a number is negative, options have a reset mask, or a snapshot is unsuitable.
        SnapshotMismatch: The bytes of a snapshot are damaged.
    """
    base = secrets.randbelow(_RANDOM_SEED_LIMIT) if seed is None else _parse_non_negative(seed, "seed")
    if isinstance(episodes, str | bytes | Mapping | Episode | Snapshot):
        raise TypeError(f"episodes must be a number, or a list of vecenv.Episode or snapshots, got {episodes!r}")
    is_list = isinstance(episodes, Sequence)
    parsed: list[Any] = list(episodes) if is_list else [Episode()] * _parse_non_negative(episodes, "episodes")
    if not parsed:
        raise ValueError(f"there are no episodes to run: got episodes={episodes!r}")
    for index, episode in enumerate(parsed):
        if isinstance(episode, Snapshot):
            episode = Episode(snapshot=episode)
        if not isinstance(episode, Episode):
            raise TypeError(f"episodes[{index}] must be a vecenv.Episode, got {episode!r}")
        if episode.options is not None and not isinstance(episode.options, Mapping):
            raise TypeError(f"episodes[{index}].options must be a dict or None, got {episode.options!r}")
        if episode.options is not None and "reset_mask" in episode.options:
            raise ValueError(f"episodes[{index}].options has 'reset_mask', which applies to several environments")
        if episode.snapshot is not None:
            _require_valid_start(index, episode)
        if episode.env is not None and (not isinstance(episode.env, str) or "env" in (episode.options or {})):
            found = f"{episode.env!r}" + " and options with 'env'" * ("env" in (episode.options or {}))
            raise TypeError(f"episodes[{index}].env must be a name, got {found}")
        episode_seed = base + index if episode.seed is None else _parse_non_negative(episode.seed, f"episodes[{index}].seed")
        parsed[index] = Episode(episode_seed, episode.options, episode.snapshot, episode.env)
    return parsed, base


def parse_frames(frames: Iterable[int], count: int) -> frozenset[int]:
    """Parse the indices of episodes with frames, of ``count`` episodes."""
    if not isinstance(frames, Iterable):
        raise TypeError(f"frames must be indices of episodes, such as range(3); got {frames!r}")
    indices = frozenset(frames)
    if invalid := [index for index in indices if not isinstance(index, (int, np.integer)) or not 0 <= index < count]:
        raise ValueError(f"frames must be indices of episodes, from 0 to {count - 1}; got {invalid}")
    return frozenset(int(index) for index in indices)


def shared_options(episodes: Sequence[Episode]) -> dict[str, Any] | None:
    """Return the options of these episodes; ``None`` if they differ, or cannot be compared."""
    first, *others = [episode.reset_options or {} for episode in episodes]
    try:
        return first if all(each == first for each in others) else None
    except (ValueError, RuntimeError):  # for arrays and tensors, `==` returns no bool
        return None


def first_snapshot_per_kind(episodes: Sequence[Episode]) -> dict[int, Snapshot]:
    """Return the first snapshot for each kind of environment, by the index of its episode."""
    found: dict[Kind, tuple[int, Snapshot]] = {}
    for index, episode in enumerate(episodes):
        if episode.snapshot is not None:
            found.setdefault(episode.snapshot.row.kind, (index, episode.snapshot))
    return dict(found.values())


def episode_statistics_keys(envs: Any) -> list[str]:
    """Return the keys under which vector wrappers add episode statistics to infos."""
    return [wrapper._stats_key for wrapper in wrappers_around(envs) if isinstance(getattr(wrapper, "_stats_key", None), str)]


def _require_valid_start(index: int, episode: Episode) -> None:
    """Raise if an episode cannot begin with its snapshot."""
    snapshot, name = episode.snapshot, f"episodes[{index}].snapshot"
    if not isinstance(snapshot, Snapshot):
        raise TypeError(f"{name} must be a snapshot from envs.save(), got {snapshot!r}")
    if episode.seed is not None or episode.options is not None or episode.env is not None:
        raise ValueError(f"episodes[{index}] begins with a snapshot, not with a reset: it must have no seed, options or env")
    try:
        snapshot.require_whole()
    except SnapshotMismatch as error:
        raise SnapshotMismatch(f"{name}: {error}") from None
    row = snapshot.row
    if not row.used or row.pending:
        when = "before the first reset" if not row.used else "when its episode was over"
        raise ValueError(f"{name} was taken {when}")


def _parse_non_negative(number: Any, name: str) -> int:
    if isinstance(number, bool | np.bool_):
        raise TypeError(f"{name} must be an integer, got {number!r}")
    try:
        value = operator.index(number)
    except TypeError:
        expected = "a number, or a list of vecenv.Episode" if name == "episodes" else "an integer"
        raise TypeError(f"{name} must be {expected}, got {number!r}") from None
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")
    return value
