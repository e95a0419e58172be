"""What became of a message: what a worker says beside what it writes into shared memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from vecenv.link.schemas import Definition

__all__ = ["NOTHING_SAID", "Failure", "Outcome"]


@dataclass(slots=True)
class Failure:
    """One environment's exception. ``error`` is the exception itself here, and its packed form on the wire."""

    env: int
    error: Any
    fatal: bool = True


@dataclass(slots=True)
class Outcome:
    """What a message brought about, apart from what lies in shared memory. All keys are environment indices.

    Attributes:
        infos: Infos that could not be written as columns.
        observations: Observations of spaces without a fixed size.
        finals: Last observations of ended episodes, where they are not in shared memory.
        failures: Environments that raised.
        results: Results of ``call`` and functions.
        schemas: Definitions of info columns used for the first time.
        warnings: (field, text) to be said once in the caller.
        columns: Some infos or final observations lie in shared memory.
    """

    infos: dict[int, Any] = field(default_factory=dict)
    observations: dict[int, Any] = field(default_factory=dict)
    finals: dict[int, Any] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    results: dict[int, Any] = field(default_factory=dict)
    schemas: dict[int, Definition] = field(default_factory=dict)
    warnings: list[tuple[str, str]] = field(default_factory=list)
    columns: bool = False

    def is_plain(self) -> bool:
        """Nothing here that would have to travel."""
        return not (
            self.infos or self.observations or self.finals or self.failures or self.results or self.schemas or self.warnings
        )


NOTHING_SAID: Final = Outcome()
"""The outcome of a step or a reset that says nothing, the same one every time: nobody writes into it."""
