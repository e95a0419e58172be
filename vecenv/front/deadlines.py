"""Timeouts, read in one place: what may be one, and how long it is."""

from __future__ import annotations

import math
import time
from typing import Any, Final

import numpy as np

__all__ = ["LONGEST", "deadline_of", "milliseconds", "seconds_of"]

LONGEST: Final = 1e6
"""Seconds (eleven days); a longer wait never ends, since the kernel counts milliseconds in 31 bits."""


def seconds_of(timeout: Any, name: str = "timeout") -> float | None:
    """A timeout in seconds: ``None`` for one that never ends, 0 for a negative one.

    Raises:
        TypeError: It is no number.
        ValueError: It is not a number (nan).
    """
    if timeout is None:
        return None
    if isinstance(timeout, (bool, np.bool_)) or not isinstance(timeout, (int, float, np.integer, np.floating)):
        raise TypeError(f"`{name}` must be a number of seconds or None, got {timeout!r}")
    seconds = float(min(timeout, 2 * LONGEST))  # an int may be too large for a float
    if math.isnan(seconds):
        raise ValueError(f"`{name}` must be a number of seconds or None, got {timeout!r}")
    return None if seconds >= LONGEST else max(seconds, 0.0)


def deadline_of(timeout: Any, name: str = "timeout") -> float | None:
    """The moment of ``time.monotonic()`` at which a timeout is over; ``None``: never. Raises as :func:`seconds_of`."""
    seconds = seconds_of(timeout, name)
    return None if seconds is None else time.monotonic() + seconds


def milliseconds(deadline: float | None) -> float | None:
    """What is left until ``deadline``, as ``poll`` wants it."""
    return None if deadline is None else max(deadline - time.monotonic(), 0.0) * 1000
