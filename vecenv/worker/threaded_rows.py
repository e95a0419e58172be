"""Rows of environments that mostly wait: for a service, a robot or another program.

A worker runs several of them at the same time, in threads, and records the results. The step loop of
:mod:`vecenv.worker.rows` then processes the results in order, as if it were calling the environments. So there is only one
step loop, and here too a failing environment does not affect the others. Each environment runs in one thread at a time, but
not always in the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from threading import Lock
from typing import Any, Final

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.link.messages import Op, Outcome
from vecenv.worker.rows import clock, copy_info
from vecenv.worker.snapshot_rows import SnapshotRows

_FLAGS: Final = ("terminated", "truncated")


class RecordedCall:
    """A finished call, which took ``seconds``. Calling this object returns the result or raises the exception."""

    def __init__(self, function: Callable[[], Any]) -> None:
        began = clock()
        self._error: BaseException | None = None
        self._result: Any = None
        try:
            self._result = function()
        except BaseException as error:
            self._error = error
        self.seconds = clock() - began

    def __call__(self, *_: Any) -> Any:
        if self._error is None:
            return self._result
        try:
            raise self._error
        finally:
            self._error = None  # breaks a reference cycle that would keep the environment's frames alive


class ThreadedRows(SnapshotRows):
    """A :class:`SnapshotRows` with at most ``env_threads`` environments running at once. For worker processes only.

    Each overlapping message is about one row, and the worker replies before the next one about that row arrives. :meth:`run`
    runs its environment in the calling thread. The rest is done for one message at a time, under :attr:`message_lock`.

    Attributes:
        message_lock: A lock that is held while an overlapping message is executed, except while its environment runs.
        snapshot_lock: A lock that is held, instead, while an overlapping message saves or loads a state.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._running_cell = memoryview(bytearray(4)).cast("i")  # not shared: several environments run at once
        self.message_lock, self.snapshot_lock = Lock(), Lock()
        self._pool = ThreadPoolExecutor(self.plan.env_threads, "environment")
        self._resets_in_thread = self.plan.autoreset_mode is AutoresetMode.SAME_STEP
        self._recorded_steps: dict[int, RecordedCall] = {}  # k -> its step
        self._recorded_calls: dict[int, RecordedCall] = {}  # k -> its reset or call

    def submit(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function in the next free thread of the pool."""
        self._pool.submit(function, *args)

    def run(self, op: int, seq: int, payload: Any) -> None:
        """Run the environment that a message is about, and record its step, reset or call."""
        if op == Op.STEP_SOME:
            (k,), (action,) = self.requested_ks(seq).tolist(), payload
            self._run_step(k, action)
        elif op == Op.RESET_SOME:
            (k,), ((seed,), options) = self.requested_ks(seq).tolist(), payload or ((None,), None)
            self._run_reset(k, seed, options[0] if isinstance(options, list) else options)
        elif op == Op.EXEC:
            (k,), function, args, kwargs = payload
            self._recorded_calls[k] = RecordedCall(lambda: function(self._env(k), *args, **kwargs))
        self.exit_if_forked()

    def _run_step(self, k: int, action: Any) -> None:
        self._recorded_steps[k] = RecordedCall(lambda: self._step_and_reset(k, action))

    def _run_reset(self, k: int, seed: Any, options: Any) -> None:
        self._recorded_calls[k] = RecordedCall(lambda: super(ThreadedRows, self)._reset(k, seed, options))

    def _step_and_reset(self, k: int, action: Any) -> Any:
        """Step the environment of row k; in same-step mode, reset it at the end of an episode. Called in a thread."""
        result = self._steps[k](action)
        self.exit_if_forked()
        if self._resets_in_thread and isinstance(result, tuple) and len(result) == 5:
            observation, reward, *flags, info = result
            flags = [self._convert_number(k, name, flag, np.bool_) for name, flag in zip(_FLAGS, flags, strict=True)]
            if not any(flags):
                return result
            # copied before the reset, because an environment may reuse the objects that it returned
            result = deepcopy(observation), deepcopy(reward), *flags, copy_info(info, lists=True)
            self._recorded_calls[k] = RecordedCall(lambda: super(ThreadedRows, self)._auto_reset(k))
            self.exit_if_forked()
        return result

    def step(self, ks: list[int] | None, actions: Sequence[Any]) -> Outcome:
        """Run the step loop over recorded steps. If there are none, step the environments in threads first."""
        rows = range(self.count) if ks is None else ks
        began = clock()
        if ks is None or ks[0] not in self._recorded_steps:
            list(self._pool.map(self._run_step, rows, actions))
        recorded = {k: self._recorded_steps.pop(k) for k in rows}
        seconds = max([clock() - began, *(call.seconds for call in recorded.values())])
        steps = {k: self._steps[k] for k in recorded}
        for k, call in recorded.items():
            self._steps[k] = call
        out = super().step(ks, actions)
        for k, call in recorded.items():
            self._recorded_calls.pop(k, None)
            if self._steps[k] is call:  # not if the step loop has set another function
                self._steps[k] = steps[k]
        self._step_clock.add(seconds, [(k, call.seconds) for k, call in recorded.items()])
        return out

    def _auto_reset(self, k: int) -> tuple[Any, Any]:
        recorded = self._recorded_calls.pop(k, None)
        result: tuple[Any, Any] = super()._auto_reset(k) if recorded is None else recorded()
        return result

    def reset(self, ks: list[int] | None, seeds: Sequence[Any], options: Any, *, reset_due: bool = False) -> Outcome:
        if ks is None or ks[0] not in self._recorded_calls:
            rows = range(self.count) if ks is None else ks
            options_by_row = options if isinstance(options, list) else [options] * len(seeds)
            list(self._pool.map(self._run_reset, rows, seeds, options_by_row))
        return super().reset(ks, seeds, options, reset_due=reset_due)

    def _reset(self, k: int, seed: Any, options: Any) -> tuple[Any, Any]:
        result: tuple[Any, Any] = self._recorded_calls.pop(k)()
        return result

    def exec(self, ks: Sequence[int], *arguments: Any) -> Outcome:
        if ks[0] not in self._recorded_calls:
            return super().exec(ks, *arguments)
        return self._call_each(ks, lambda k: self._recorded_calls.pop(k)())

    def close(self) -> Outcome:
        self._pool.shutdown()
        return super().close()
