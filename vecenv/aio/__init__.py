"""Environments as coroutines: ``Pool`` lends environments in worker processes to the tasks of an asyncio program."""

from vecenv.aio.episode import EpisodeEnv
from vecenv.aio.pool import Pool

__all__ = ["EpisodeEnv", "Pool"]
