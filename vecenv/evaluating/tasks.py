"""Scheduling of episodes so that few environments are built, and checks of the environments that episodes name."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from vecenv.errors import EnvFailed, WorkerDied, suggest_names
from vecenv.evaluating.episodes import Episode
from vecenv.front.capabilities import capabilities_of


class WaitingEpisodes:
    """The waiting episodes, grouped by the name of their environment.

    A row gets the episodes of its current environment first, then those of an environment that no row uses. A busy worker
    with more than its share of the waiting episodes leaves an unused environment to a worker with fewer. If all environments
    are in use, a row of an idle worker gets episodes of the environment with the most waiting ones. Episodes without an
    environment name run in the order of the list.

    Args:
        episodes: All episodes.
        workers: The rows of each worker; empty if workers are unknown.
    """

    def __init__(self, episodes: Sequence[Episode], workers: Sequence[Collection[int]] = ()) -> None:
        self._episodes, self._workers = episodes, workers
        self._by_env: dict[str | None, deque[int]] = {}
        self._env_by_row: dict[int, str | None] = {}

    def add(self, indices: Iterable[int]) -> None:
        """Add episodes by index, each after the waiting ones of the same environment."""
        for index in indices:
            self._by_env.setdefault(self._episodes[index].env, deque()).append(index)

    def __bool__(self) -> bool:
        return bool(self._by_env)

    def pop_for(self, row: int, *, worker_is_idle: bool) -> int | None:
        """Remove a row's next episode and return its index; ``None`` if the episodes are better left to other rows."""
        env = self._env_by_row.get(row)
        if row not in self._env_by_row or env not in self._by_env:
            in_use = set(self._env_by_row.values()) - {None}
            unused = [name for name in self._by_env if name not in in_use]
            if not worker_is_idle and (not unused or self._should_wait(row, unused[0])):
                return None
            env = unused[0] if unused else max(self._by_env, key=lambda name: len(self._by_env[name]))
        queue = self._by_env[env]
        index = queue.popleft()
        if not queue:
            del self._by_env[env]
        if self._episodes[index].snapshot is None:
            self._env_by_row[row] = env
        else:
            self._env_by_row.pop(row, None)  # the snapshot determines the row's environment
        return index

    def _should_wait(self, row: int, env: str | None) -> bool:
        """True if ``env`` should be left to a worker with fewer waiting episodes than the row's worker."""
        if env is None or not self._workers:
            return False
        loads = [self._count_waiting(rows) for rows in self._workers]
        own_load = self._count_waiting(next(rows for rows in self._workers if row in rows))
        share = sum(map(len, self._by_env.values())) / len(self._workers)
        return own_load > min(loads) and own_load + len(self._by_env[env]) / 2 > share

    def _count_waiting(self, rows: Collection[int]) -> int:
        """Return the number of waiting episodes for the current environments of these rows."""
        return sum(len(self._by_env.get(env, ())) for env in {self._env_by_row.get(row) for row in rows} - {None})


def require_offered(offered: Sequence[str], owner: str, episodes: Sequence[Episode]) -> None:
    """Check that the environments that episodes name are offered.

    Args:
        offered: The names of the offered environments; empty if there is no choice.
        owner: The class that offers them, for error texts.
        episodes: The episodes.

    Raises:
        ValueError: An episode names an environment that is not offered, or names none although several are offered.
    """
    for index, episode in enumerate(episodes):
        name = episode.env
        if name is None:
            if len(offered) > 1 and episode.snapshot is None and "env" not in (episode.options or {}):
                raise ValueError(
                    f"episodes[{index}] names no environment: set Episode(env=...) to one of {len(offered)}: "
                    f"{', '.join(map(repr, offered[:5]))}{', ...' if len(offered) > 5 else ''}"
                )
        elif not offered:
            raise ValueError(
                f"episodes[{index}] names the environment {name!r}, but {owner} has none to choose from: "
                "build it from vecenv.EnvChoice"
            )
        elif name not in offered:
            raise ValueError(f"episodes[{index}]: there is no environment {name!r}{suggest_names(name, offered)}")


def any_named(episodes: Sequence[Episode]) -> bool:
    """True if any of the episodes names its environment."""
    return any(episode.env is not None for episode in episodes)


def find_offered(base: Any, episodes: Sequence[Episode]) -> tuple[str, ...]:
    """Return the names that all rows offer through :class:`vecenv.EnvChoice`; empty if there is no choice.

    They are also empty if they cannot be read before the first episode, and no episode names its environment.

    Args:
        base: The vector environment without its wrappers, which may have no calls.
        episodes: The episodes.
    """
    call, capabilities = getattr(base, "call", None), capabilities_of(base)
    if call is None or (capabilities is not None and not capabilities.attributes):
        return ()

    def common_names() -> tuple[str, ...]:
        if not all(call("has_wrapper_attr", "env_choices")):
            return ()
        first, *others = call("env_choices")
        return tuple(name for name in first if all(name in other for other in others))

    try:
        return common_names()
    except (EnvFailed, WorkerDied):  # calls are refused until a reset, which may need the options of an episode
        if not any_named(episodes):
            return ()
        base.reset()
        return common_names()
    except AttributeError:  # an environment that is not a gymnasium.Env
        return ()
