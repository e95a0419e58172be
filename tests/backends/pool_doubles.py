"""A helper that makes EnvPool slower."""

from __future__ import annotations

import time
from typing import Any

from vecenv.backends import EnvPoolVectorEnv


def slow_down(envs: EnvPoolVectorEnv, seconds: float) -> None:
    """Delay every batch of results that ``envs`` receives."""
    receiver = envs._driver.receiver
    recv = receiver._recv

    def delayed_recv() -> Any:
        time.sleep(seconds)
        return recv()

    receiver._recv = delayed_recv
