"""Temporary signal handlers."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def handled(number: int, how: type[BaseException] | Callable[..., Any] | signal.Handlers) -> Iterator[None]:
    """Handle a signal this way inside the block; an exception class is raised. Afterwards no timer runs."""

    def ring(*_: object) -> None:
        raise how

    before = signal.signal(number, ring if isinstance(how, type) else how)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(number, before)
