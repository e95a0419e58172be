"""Environments as coroutines: ``Pool`` lends environments in worker processes to the tasks of an asyncio program."""

from vecenv.aio.pool import EpisodeEnv, Pool

__all__ = ["EpisodeEnv", "Pool"]
