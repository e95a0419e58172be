"""A pool that is slower than EnvPool."""

from __future__ import annotations

import time
from typing import Any

from vecenv.backends import EnvPoolVectorEnv


def slow_down(envs: EnvPoolVectorEnv, delay: float) -> None:
    """Make the results of a pool take ``delay`` seconds longer."""
    receiver = envs._driver.receiver
    recv = receiver._recv

    def delayed_recv() -> Any:
        time.sleep(delay)
        return recv()

    receiver._recv = delayed_recv
