"""One pool, its outstanding calls and what is known of its episodes: what two ways of driving it have in common.

:class:`~vecenv.backends.envpool.lockstep.Lockstep` drives a pool whose batch is all its environments,
:class:`~vecenv.backends.envpool.first_ready.FirstReady` one with smaller batches. Both keep their mutable state so that an
exception raised anywhere (a Ctrl-C, a timeout) leaves it true: what a call has got so far is in ``wire``, and finishing the
call again goes on from there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode

from vecenv.backends.envpool.actions import ActionChecker
from vecenv.backends.envpool.rows import Array, Infos, RowReader, States
from vecenv.backends.envpool.wire import Receiver
from vecenv.front.phases import Phase

PHASES = {"step": Phase.WAITING_STEP, "send": Phase.WAITING_STEP, "reset": Phase.WAITING_RESET}

__all__ = ["PHASES", "Driver", "Kit", "Rows", "too_late"]


class Kit(NamedTuple):
    """What all pools of one vector environment have in common."""

    reader: RowReader
    checker: ActionChecker
    mode: AutoresetMode
    num_envs: int
    batch_size: int
    limited_here: bool


Rows: TypeAlias = tuple[Array, States, list[Array], Array, Array, Infos | None]
"""The answer to a call, before it is dressed as Gymnasium's: ``(ids, states, leaves, terminated, truncated, final)``.

``ids``, int32 ``(b,)``: environment of each row. ``states``: the pool's arrays. ``leaves``: the arrays of the observation.
``terminated`` and ``truncated``: bool ``(b,)``. ``final``: ``final_obs``, ``final_info`` and their masks where a step in
same-step mode ended episodes. (A plain tuple: building a named one costs as much as two numpy calls.)
"""


class Driver(ABC):
    """What both ways of driving share: who is over, what may be reset how, and the end of it."""

    def __init__(self, pool: Any, kit: Kit) -> None:
        self.pool = pool
        self.kit = kit
        self._reader, self._num_envs, self._batch_size = kit.reader, kit.num_envs, kit.batch_size
        self.wire: list[Any] = []
        self._pool_send = pool._send
        # what a step has to look at before it may send: otherwise it can go straight ahead
        self._wary = kit.limited_here or kit.mode is AutoresetMode.DISABLED
        self.receiver = Receiver(pool._recv, self.wire)
        self.all_ids = np.arange(kit.num_envs, dtype=np.int32)
        self.call = ""
        self.begun = False
        self.latest = self.all_ids  # whose rows were taken last; whom send() means by default
        # an episode is over until its environment is reset; it is cut if only vecenv's own time limit ended it, so that the
        # pool does not know and will not reset it by itself
        self.over = np.zeros(kit.num_envs, dtype=np.bool_)
        self.cut = np.zeros(kit.num_envs, dtype=np.bool_)

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
    def begin_reset(self, ids: Array, *, force: bool) -> None:
        """Reset these; with ``force`` even those that would go on with the same game."""

    @abstractmethod
    def finish(self, deadline: float | None) -> Rows:
        """Wait for the answer of all that :attr:`call` is about. It stays the answer, to be had again, until
        :meth:`settle`.

        Raises:
            StepTimeout: Not within the deadline (of ``time.monotonic()``); it is still owed.
        """

    @abstractmethod
    def settle(self) -> None:
        """What :meth:`finish` gave has been taken."""

    @abstractmethod
    def give_back(self) -> None:
        """What :meth:`settle` or :meth:`taken` was just called for has not been taken after all: it is owed again.

        Right also where that call was interrupted, or did not even begin.
        """

    @abstractmethod
    def recv(self, deadline: float | None) -> Rows:
        """The next rows, as :meth:`finish`, until :meth:`taken`.

        Raises:
            NoAsyncCallError: Not enough environments are in flight.
        """

    @abstractmethod
    def taken(self) -> None:
        """What :meth:`recv` gave has been taken."""

    def close(self) -> None:
        """End the helper thread and let go of the pool, whose destructor ends its threads."""
        self.receiver.close()
        self.pool = None
        self._pool_send = _no_pool
        self.receiver = Receiver(_no_pool, self.wire)

    def naturally(self, ids: Array) -> Array:
        """Which of these environments the pool resets by itself at the next action, whatever that is.

        Atari with ``episodic_life`` and ViZDoom go on with the same game in such a reset, and start a new one when told to
        reset; so episodes that are over are to be reset in this way, and only what runs by a command.
        """
        return self.over[ids] & ~self.cut[ids]

    def _refuse_if_over(self, ids: Array) -> None:
        if self.kit.mode is AutoresetMode.DISABLED and (over := self.over[ids]).any():
            raise ResetNeeded(
                f"envs {ids[over].tolist()} have ended their episodes, and autoreset is disabled: reset them with "
                "reset(options={'reset_mask': ...})"
            )


def _no_pool(*_: Any) -> None:
    raise RuntimeError("the pool is closed")


def too_late(call: str) -> str:
    """What a timeout says."""
    return f"the {call} has not finished within the timeout. It is still owed: wait for it again, or close()."
