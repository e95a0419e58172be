"""Slow pools."""

from __future__ import annotations

import time
from typing import Any

from vecenv.backends import EnvPoolVectorEnv


class SlowPool:
    """A pool behind a driver, with results that take ``delay`` seconds longer."""

    def __init__(self, envs: EnvPoolVectorEnv, delay: float) -> None:
        driver = envs._driver
        recv = driver.receiver._recv

        def late() -> Any:
            time.sleep(delay)
            return recv()

        driver.receiver._recv = late
