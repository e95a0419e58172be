"""Wrappers of vector environments and of single environments, and an environment that switches between several others.

``RecordEpisodeStatistics`` and ``EpisodePrefetcher`` wrap a vector environment. ``ActionChunks`` wraps a single environment,
and ``EnvChoice`` builds one: they work in every engine that steps Python environments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vecenv.lazy import lazy

if TYPE_CHECKING:
    from vecenv.wrappers.action_chunks import ActionChunks as ActionChunks
    from vecenv.wrappers.env_choice import EnvChoice as EnvChoice
    from vecenv.wrappers.episode_statistics import RecordEpisodeStatistics as RecordEpisodeStatistics
    from vecenv.wrappers.prefetch import EpisodePrefetcher as EpisodePrefetcher

__all__ = ["ActionChunks", "EnvChoice", "EpisodePrefetcher", "RecordEpisodeStatistics"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "action_chunks": ("ActionChunks",),
        "env_choice": ("EnvChoice",),
        "episode_statistics": ("RecordEpisodeStatistics",),
        "prefetch": ("EpisodePrefetcher",),
    },
)
