"""Which answer is owed, and so which calls are in order. There is one at most, and it is everybody's."""

from __future__ import annotations

from typing import NoReturn

from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError

from vecenv.front.phases import Phase, advance

__all__ = ["Owed"]


class Owed:
    """What was asked and not answered.

    Args:
        owner: The vector environment, for error texts.
        num_envs: How many environments it has.

    Attributes:
        kind: ``DEFAULT``: nothing is owed; ``WAITING_RESET``, ``WAITING_STEP``.
        by_row: It was asked by ``send`` or with ``env_id``, and only ``recv`` answers it.
        rows: How many environments are in flight.
    """

    def __init__(self, owner: object, num_envs: int) -> None:
        self._owner = owner
        self._num_envs = num_envs
        self.settle()

    @property
    def phase(self) -> Phase:
        """What the vector environment is in the middle of, as far as ``*_async`` and ``*_wait`` go."""
        return Phase.DEFAULT if self.by_row else self.kind

    def enter(self, kind: Phase, rows: int, by_row: bool = False) -> None:
        """From here on this is owed, and whatever was before is not."""
        self.kind, self.rows, self.by_row = kind, rows, by_row

    def settle(self) -> None:
        """Nothing is owed."""
        self.kind, self.rows, self.by_row = Phase.DEFAULT, 0, False

    def require_phase(self, method: str) -> None:
        """Refuse one of the methods of :data:`vecenv.front.phases.NEXT` that is out of order."""
        advance(self.phase, method, self._owner)

    def require_idle(self, method: str) -> None:
        """Refuse a method while anything is owed."""
        if self.by_row:
            self.refuse_in_flight(method)
        if self.kind is not Phase.DEFAULT:
            raise AlreadyPendingCallError(
                f"Calling `{method}` while waiting for a pending call to `{self.kind.value}` to complete.", self.kind.value
            )

    def require_in_flight(self) -> None:
        """Refuse a ``recv`` of more environments than there are on their way."""
        if self.kind is Phase.WAITING_STEP and not self.by_row:
            advance(self.kind, "reset_async", self._owner)
        if self.rows < self._num_envs:
            raise NoAsyncCallError(
                f"Calling `recv` for {self._num_envs} environments, but only {self.rows} are in flight and 0 are ready: "
                "send() more first.",
                "recv",
            )

    def refuse_in_flight(self, method: str) -> NoReturn:
        """Refuse a method because of what was sent."""
        raise AlreadyPendingCallError(
            f"Calling `{method}` for envs 0..{self._num_envs - 1}, which are still in flight: `recv` them first.", "send"
        )
