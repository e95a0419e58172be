"""What differs between engines whose environments step together: the seam under :mod:`vecenv.front.together`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from vecenv.front.arguments import ResetOptions
from vecenv.front.capabilities import Capabilities
from vecenv.front.phases import Phase

__all__ = ["NOTHING", "Call", "Driver", "Once", "Stepped"]

Stepped: TypeAlias = tuple[Any, Any, Any, Any, dict[str, Any]]
"""What ``step`` returns."""


class Call(NamedTuple):
    """What was asked: a reset or a step, of how many rows, to be answered by ``recv`` only or not."""

    kind: Phase
    rows: int
    by_row: bool


NOTHING: Final = Call(Phase.DEFAULT, 0, by_row=False)
"""Nothing is owed."""


class Driver(Protocol):
    """What an engine does whose environments are stepped together.

    An exception may come out of any line, a Ctrl-C or a time limit. So a driver says itself what was asked
    (:attr:`asked`) and whether an exception is the answer (:attr:`failure`); every other one leaves the answer owed.

    Attributes:
        capabilities: What it can do.
        asked: The call that was made last; ``None`` before the first one. It is part of one object with all that the call
            has changed, and that is put in place by one store: before it nothing has happened.
        failure: The exception that is the answer, where one is.
        waited: Seconds spent waiting.
        yields: Another thread may close it in the middle of a call.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def waited(self) -> float: ...

    @property
    def asked(self) -> Call | None: ...

    failure: BaseException | None
    yields: bool

    def reset(
        self, call: Call, seeds: list[Any], mask: npt.NDArray[np.bool_] | None, options: ResetOptions
    ) -> None:
        """Begin to reset the rows of ``mask`` (``None``: all); checks first, and raises before anything is asked."""

    def step(self, call: Call, actions: Any) -> None:
        """Begin a step; checks first, and raises before anything is asked."""

    def wait(self, deadline: float) -> bool:
        """Wait for the answer until ``deadline`` (monotonic); whether it is there."""

    def answer(self, kind: Phase) -> Stepped:
        """The answer to a step, or to a reset, whose rewards are 0 and flags ``False``. It can be called again."""

    def close(self, *, terminate: bool) -> None:
        """Let go of everything. Idempotent."""


class Once:
    """What an engine is to do for a call: it is done once, however often somebody is told to begin.

    So a driver that was interrupted while it told a thread can tell it again.

    Attributes:
        future: The answer, of a thread.
        failure: The exception that is the answer.
    """

    def __init__(self, ask: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self.failure: BaseException | None = None
        self._ask, self._begun = ask, threading.Lock()
        self._said: Any = None

    def __call__(self) -> None:
        """Do it, in a thread."""
        if self._begun.acquire(blocking=False):
            try:
                self.future.set_result(self._ask())
            except BaseException as error:
                self.failure = error
                self.future.set_exception(error)

    def here(self) -> Any:
        """Do it in the caller's own thread. What interrupts is no answer, and it is to be done again."""
        if self._said is None:
            try:
                self._said = self._ask()
            except Exception as error:
                self.failure = error
                raise
        return self._said
