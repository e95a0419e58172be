"""One pool, its outstanding calls and what is known of its episodes: what all ways of driving it have in common.

:class:`~vecenv.backends.envpool.lockstep.Lockstep` drives a pool whose batch is all its environments,
:class:`~vecenv.backends.envpool.batches.Batches` one with smaller batches, or with several players an environment. All keep
their mutable state so that an exception raised anywhere (a Ctrl-C, a timeout) leaves it true: what a call has got so far is
in ``wire``, and finishing the call again goes on from there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode

from vecenv.backends.envpool.actions import ActionChecker
from vecenv.backends.envpool.rows import Array, Infos, RowReader, States
from vecenv.backends.envpool.wire import Receiver
from vecenv.errors import StepTimeout
from vecenv.front.phases import Phase

PHASES = {"step": Phase.WAITING_STEP, "send": Phase.WAITING_STEP, "reset": Phase.WAITING_RESET}

__all__ = ["PHASES", "After", "Driver", "Episodes", "Latest", "Rows", "Settings", "too_few", "too_late"]

A = TypeVar("A")


class Settings(NamedTuple):
    """What all pools of one vector environment have in common."""

    reader: RowReader
    checker: ActionChecker
    mode: AutoresetMode
    num_envs: int
    batch_size: int
    limited_here: bool


Rows: TypeAlias = tuple[Array, States, list[Array], Array, Array, Infos | None]
"""The answer to a call, before it is dressed as Gymnasium's: ``(ids, states, leaves, terminated, truncated, final)``.

``ids``, intp ``(b,)``: environment of each row. ``states``: the pool's arrays. ``leaves``: the arrays of the observation.
``terminated`` and ``truncated``: bool ``(b,)``. ``final``: ``final_obs``, ``final_info`` and their masks where a step in
same-step mode ended episodes. (A plain tuple: building a named one costs as much as two numpy calls.)
"""

Latest: TypeAlias = tuple[Array, bytes]
"""Whose rows were taken last, int32, which is whom ``send`` means by default; and the bytes of the same as intp."""

After: TypeAlias = tuple[int, tuple[str, Latest, int, list[Any]]]
"""How the driver is to be once its answer was taken: so many entries of ``wire`` are gone, and ``(call, latest, offset,
held)`` are these."""


class Driver(ABC, Generic[A]):
    """What all ways of driving share.

    Attributes:
        wire: What the pool answered and nobody took.
        call: The latest one: ``"step"`` or ``"reset"`` of all environments, ``"send"`` of some.
        latest: Whose rows were taken last.
        offset: How many rows of the first batch in ``wire`` were taken.
        held: What was taken last, as long as it is not put away.
        after: How ``wire``, ``call``, ``latest``, ``offset`` and ``held`` are to be once the answer was taken.
        begun: Whether it was ever reset.
        all_ids, everyone: The indices of all environments, as int32 and as intp. What is of all is told by identity.
    """

    after: After

    def __init__(self, pool: Any, num_envs: int, batch_size: int) -> None:
        self.pool = pool
        self._num_envs, self._batch_size = num_envs, batch_size
        self.wire: list[Any] = []
        self._pool_send = pool._send
        self.receiver = Receiver(pool._recv, self.wire)
        self.all_ids = np.arange(num_envs, dtype=np.int32)
        self.call = ""
        self.begun = False
        self.everyone = np.arange(num_envs)  # the same as intp, which is what numpy indexes with fastest
        self._all: Latest = self.all_ids, self.everyone.tobytes()
        self.latest = self._all
        self.offset = 0
        self.held: list[Any] = []

    @property
    @abstractmethod
    def phase(self) -> Phase:
        """``WAITING_STEP`` or ``WAITING_RESET`` while the answer to a call for all environments is owed."""

    @abstractmethod
    def flying(self) -> int:
        """How many environments have been sent an action or a reset, and their rows were not taken yet."""

    @abstractmethod
    def choose(self, env_id: Any) -> Array:
        """Indices for :meth:`begin_step` as an int32 array that nobody else has; ``None`` means :attr:`latest`.

        Raises:
            ValueError: Not distinct integers in range.
            AlreadyPendingCallError: Some are in flight.
        """

    @abstractmethod
    def begin_step(self, call: str, actions: list[Array], ids: Array) -> None:
        """Send checked actions.

        Args:
            call: ``"step"`` for all environments, ``"send"`` for some.
            actions: Arrays as the pool wants them.
            ids: Which environments; from :meth:`choose`, or :attr:`all_ids`.

        Raises:
            AlreadyPendingCallError: Some are in flight.
            ResetNeeded: Autoreset is disabled, and some have ended.
        """

    @abstractmethod
    def begin_reset(self, ids: Array, *, force: bool, by_row: bool = False) -> None:
        """Reset these; with ``force`` even those that would go on with the same game; ``by_row``: for :meth:`recv` only."""

    @abstractmethod
    def finish(self, deadline: float | None) -> A:
        """Wait for the answer of all that :attr:`call` is about, and prepare :attr:`after`.

        Raises:
            StepTimeout: Not within the deadline (of ``time.monotonic()``); it is still owed.
        """

    @abstractmethod
    def recv(self, count: int | None, deadline: float | None) -> A:
        """The next ``count`` rows (``None``: as many as is usual), as :meth:`finish`.

        Raises:
            NoAsyncCallError: Not enough environments are in flight.
            AlreadyPendingCallError: The answer to a step of all environments is owed.
        """

    def close(self) -> None:
        """End the helper thread and let go of the pool, whose destructor ends its threads."""
        self.receiver.close()
        self.pool = None
        self._pool_send = _no_pool
        self.receiver = Receiver(_no_pool, self.wire)

    def _receive(self, length: int, deadline: float | None, what: str) -> None:
        """Wait until ``wire`` has ``length`` entries, one more than now or none."""
        if not self.receiver.receive(length, deadline):
            raise StepTimeout(too_late(what))

    def _refuse_if_a_step_is_owed(self) -> None:
        if self.call == "step" and self.phase is Phase.WAITING_STEP:
            raise AlreadyPendingCallError(
                "Calling `recv` while waiting for a pending call to `step` to complete: `step_wait` fetches it.", "step"
            )


class Episodes:
    """Which episodes are over and which may be reset how, for drivers of environments with one player.

    An episode is over until its environment is reset; it is cut if only vecenv's own time limit ended it, so that the pool
    does not know and will not reset it by itself.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._reader = settings.reader
        # what a step has to look at before it may send: otherwise it can go straight ahead
        self._wary = settings.limited_here or settings.mode is AutoresetMode.DISABLED
        self.over = np.zeros(settings.num_envs, dtype=np.bool_)
        self.cut = np.zeros(settings.num_envs, dtype=np.bool_)

    def naturally(self, ids: Array) -> Array:
        """Which of these environments the pool resets by itself at the next action, whatever that is.

        Atari with ``episodic_life`` and ViZDoom go on with the same game in such a reset, and start a new one when told to
        reset; so episodes that are over are to be reset in this way, and only what runs by a command.
        """
        return self.over[ids] & ~self.cut[ids]

    def _refuse_if_over(self, ids: Array) -> None:
        if self.settings.mode is AutoresetMode.DISABLED and (over := self.over[ids]).any():
            raise ResetNeeded(
                f"envs {ids[over].tolist()} have ended their episodes, and autoreset is disabled: reset them with "
                "reset(options={'reset_mask': ...})"
            )


def _no_pool(*_: Any) -> None:
    raise RuntimeError("the pool is closed")


def too_late(call: str) -> str:
    """What a timeout says."""
    return f"the {call} has not finished within the timeout. It is still owed: wait for it again, or close()."


def too_few(count: int, flying: int, why: str = "") -> NoAsyncCallError:
    """What is raised instead of waiting for rows that nobody sent for."""
    return NoAsyncCallError(
        f"Calling `recv` for {count} environments with {flying} environments in flight: `send` or `reset_async` more.{why}",
        "recv",
    )
