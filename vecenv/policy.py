"""What a vector environment is to do about failures."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Policy"]


@dataclass(frozen=True, slots=True)
class Policy:
    """What to do about failures.

    Attributes:
        restart: Rebuild what was lost and go on; otherwise raise.
        restart_limit, restart_period: At most so many restarts within so many seconds.
        step_timeout: Seconds until a reset or a step is taken to hang; ``None``: never.
        start_timeout: Seconds a worker has for building its environments; ``None``: as long as it takes.
    """

    restart: bool = False
    restart_limit: int = 5
    restart_period: float = 60.0
    step_timeout: float | None = None
    start_timeout: float | None = 60.0
