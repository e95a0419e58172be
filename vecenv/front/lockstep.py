"""Drives environments that step together: each call has one answer, about all of them.

JAX on a device, a library's own vector environment, the double of :mod:`vecenv.testing`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.error import NoAsyncCallError

from vecenv.front.arguments import ResetOptions, env_ids_of
from vecenv.front.capabilities import unable
from vecenv.front.driver import NOTHING, Call, Driver, Phase, Stepped, require_idle, require_no_step

__all__ = ["LockstepDriver"]


class LockstepDriver(Driver):
    """What is left to a subclass: :attr:`capabilities`, ``close``, and the five below.

    Attributes:
        asked: The call that was made last; ``None`` before the first one. It is part of one object with all that the call
            has changed. Another one than ``taken`` is pending.
        why: The reason why a call is about all environments or none.
    """

    def __init__(self, num_envs: int) -> None:
        self.num_envs = self.batch_size = num_envs
        self.why = "they step together"
        self._waited = 0.0

    @property
    @abstractmethod
    def asked(self) -> Call | None: ...

    @abstractmethod
    def begin_reset(self, call: Call, seeds: list[Any], mask: npt.NDArray[np.bool_] | None, options: ResetOptions) -> None:
        """Begin to reset the rows of ``mask`` (``None``: all); checks first, and raises before anything is asked."""

    @abstractmethod
    def begin_step(self, call: Call, actions: Any) -> None:
        """Begin a step; checks first, and raises before anything is asked."""

    @abstractmethod
    def wait(self, deadline: float) -> bool:
        """Wait for the answer until ``deadline`` (monotonic); whether it is there."""

    @abstractmethod
    def read(self, kind: Phase) -> Stepped:
        """The answer to a step, or to a reset, whose rewards are 0 and flags ``False``. It can be called again."""

    @property
    def waited(self) -> float:
        return self._waited

    @property
    def outstanding(self) -> Call:
        asked = self.asked
        return NOTHING if asked is None or asked is self.taken else asked

    def reset(self, seeds: list[Any], ids: npt.NDArray[np.intp] | None, options: ResetOptions, *, by_row: bool) -> None:
        if by_row:
            self._require_all(ids, "reset_async")
            require_idle(self.outstanding, "reset_async")
            ids = None
        rows = self.batch_size if ids is None else len(ids)
        if rows < self.batch_size and not self.capabilities.reset_mask:
            unable(self.name, f"reset {rows} of {self.batch_size} environments", self.why)
        mask = None if ids is None else np.isin(np.arange(self.batch_size), ids)
        self.begin_reset(Call(Phase.WAITING_RESET, rows, by_row), seeds, mask, options)

    def step(self, actions: Any) -> None:
        require_idle(self.outstanding, "step_async")
        self.begin_step(Call(Phase.WAITING_STEP, self.batch_size, by_row=False), actions)

    def send(self, actions: Any, env_id: Any) -> None:
        if env_id is not None:
            self._require_all(env_ids_of(env_id, self.batch_size), "send")
        require_idle(self.outstanding, "send")
        self.begin_step(Call(Phase.WAITING_STEP, self.batch_size, by_row=True), actions)

    def answer(self, kind: Phase, deadline: float | None) -> Stepped | None:
        call = self.outstanding
        if deadline is not None and not self.wait(deadline):
            return None
        steps = call.rows if call.kind is Phase.WAITING_STEP else 0
        self.gives(call, steps, call.rows - steps)
        return self.read(call.kind)

    def recv(self, count: int | None, deadline: float | None) -> Stepped | None:
        total, outstanding = self.batch_size, self.outstanding
        if count not in (None, total):
            unable(self.name, f"recv {count} of {total} environments", "all of them are done at the same time")
        require_no_step(outstanding)
        if outstanding.rows < total:
            raise NoAsyncCallError(
                f"Calling `recv` for {total} environments, but only {outstanding.rows} are in flight and 0 are ready: "
                "send() more first.",
                "recv",
            )
        stepped = self.answer(outstanding.kind, deadline)
        if stepped is not None:
            stepped[4].update(env_id=np.arange(total, dtype=np.intp), _env_id=np.ones(total, np.bool_))
        return stepped

    def _require_all(self, ids: npt.NDArray[np.intp] | None, method: str) -> None:
        if not np.array_equal(ids, np.arange(self.batch_size)):  # type: ignore[arg-type]
            unable(self.name, f"{method} to some environments", f"{self.why}: name all of them, in order, or none")
