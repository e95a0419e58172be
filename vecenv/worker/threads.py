"""Rows whose environments wait, for a service, a robot, another program: a worker steps several of them at the same time.

The environments are run in threads first; then the step loop of :mod:`vecenv.worker.rows` goes over what they have said, in
order, as if it had just asked them. So what a step means is written down once, and an environment that raises there costs
its siblings nothing here either. Each environment is in one thread at a time, and not always in the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from threading import Lock
from typing import Any

from gymnasium.vector import AutoresetMode

from vecenv.link.messages import Op, Outcome
from vecenv.worker.keeping import SnapshotRows
from vecenv.worker.rows import clock

__all__ = ["OverlappingRows", "Said", "ThreadedRows"]


class Said:
    """What a call gave, or raised, to be given or raised again; and how long it took."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        began = clock()
        self._error: BaseException | None = None
        self._answer: Any = None
        try:
            self._answer = ask()
        except BaseException as error:
            self._error = error
        self.seconds = clock() - began

    def __call__(self, *_: Any) -> Any:
        if self._error is None:
            return self._answer
        try:
            raise self._error
        finally:
            self._error = None  # a cycle, with the environment's frames in it


class ThreadedRows(SnapshotRows):
    """As :class:`SnapshotRows`, with at most that many environments at once. For worker processes: nothing interrupts them.

    Args:
        env_threads: How many.
        rows, how: As of :class:`~vecenv.worker.rows.EnvRows`.
    """

    def __init__(self, env_threads: int, *rows: Any, **how: Any) -> None:
        super().__init__(*rows, **how)
        self._pool = ThreadPoolExecutor(env_threads, "environment")
        self._resets_itself = how["autoreset_mode"] is AutoresetMode.SAME_STEP
        self._begun: dict[int, Said] = {}  # row -> what the reset has said that the loop is about to ask for

    def step(self, seq: int, ks: list[int] | None, actions: Sequence[Any]) -> Outcome:
        which = range(self.count) if ks is None else ks
        asked = self._steps
        began = clock()
        said = list(self._pool.map(lambda k, action: Said(lambda: self._stepped(k, action)), which, actions))
        elapsed = clock() - began
        self._steps = asked.copy()  # (a reset in next-step mode has put the true one back into ``asked``)
        for k, one in zip(which, said, strict=True):
            self._steps[k] = one
        out = super().step(seq, ks, actions)
        for k, one in zip(which, said, strict=True):
            if self._steps[k] is one:  # and nothing else came of it
                self._steps[k] = asked[k]
        self._begun.clear()
        self._times.add(elapsed, zip(which, (one.seconds for one in said), strict=True))
        return out

    def _stepped(self, k: int, action: Any) -> Any:
        """In a thread: a step, and the reset at the end of an episode that belongs to it."""
        answer = self._steps[k](action)
        self.leave_if_forked()
        if self._resets_itself and isinstance(answer, tuple) and len(answer) == 5 and (answer[2] or answer[3]):
            # kept before the reset: an environment may reuse the very objects it returned
            observation, reward, terminated, truncated, info = answer
            answer = deepcopy(observation), reward, terminated, truncated, deepcopy(info)
            self._begun[k] = Said(lambda: super(ThreadedRows, self)._begin_next(k))
            self.leave_if_forked()
        return answer

    def _begin_next(self, k: int) -> tuple[Any, Any]:
        begun = self._begun.pop(k, None)
        answer: tuple[Any, Any] = super()._begin_next(k) if begun is None else begun()
        return answer

    def reset(self, seq: int, ks: list[int] | None, seeds: Sequence[Any], options: Any, *, pending: bool = False) -> Outcome:
        which = range(self.count) if ks is None else ks
        each = options if isinstance(options, list) else [options] * len(seeds)

        def one(k: int, seed: Any, own: Any) -> tuple[int, Said]:
            return k, Said(lambda: super(ThreadedRows, self)._reset(k, seed, own))

        self._begun.update(self._pool.map(one, which, seeds, each))
        out = super().reset(seq, ks, seeds, options, pending=pending)
        self._begun.clear()
        return out

    def _reset(self, k: int, seed: Any, options: Any) -> tuple[Any, Any]:
        answer: tuple[Any, Any] = self._begun[k]()
        return answer

    def close(self) -> Outcome:
        out = super().close()
        self._pool.shutdown()
        return out


class OverlappingRows(ThreadedRows):
    """Rows that are stepped, reset and called each by a message of its own, at the same time as others.

    :meth:`run` runs the environment, in whatever thread it is called. What comes after, between taking :attr:`turn` and
    giving it back, is that of :class:`SnapshotRows`, for one message at a time. No message is about a row whose last one is
    not answered.

    Attributes:
        turn: Held while a message is carried out, apart from what its environment does.
    """

    def __init__(self, env_threads: int, *rows: Any, **how: Any) -> None:
        super().__init__(env_threads, *rows, **how)
        self.turn = Lock()

    def submit(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function in a thread, as soon as one of them is free."""
        self._pool.submit(function, *args)

    def run(self, op: int, seq: int, payload: Any) -> None:
        """Run the environment that a message is about; what it says is kept for the turn."""
        if op == Op.STEP_SOME:
            (k,), (action,) = self.chosen(seq), payload
            self._begun[k] = Said(lambda: self._steps[k](action))
        elif op == Op.RESET_SOME:
            (k,), ((seed,), options) = self.chosen(seq), payload or ((None,), None)
            own = options[0] if isinstance(options, list) else options
            self._begun[k] = Said(lambda: SnapshotRows._reset(self, k, seed, own))
        elif op == Op.EXEC:
            (k,), function, args, kwargs = payload
            self._begun[k] = Said(lambda: function(self._env(k), *args, **kwargs))
        self.leave_if_forked()

    def step(self, seq: int, ks: list[int] | None, actions: Sequence[Any]) -> Outcome:
        assert ks is not None
        (k,) = ks
        step, said = self._steps[k], self._begun.pop(k)
        self._steps[k] = said
        out = SnapshotRows.step(self, seq, ks, actions)
        if self._steps[k] is said:  # it has not failed
            self._steps[k] = step
        self._times.add(said.seconds, [(k, said.seconds)])
        return out

    def reset(self, seq: int, ks: list[int] | None, seeds: Sequence[Any], options: Any, *, pending: bool = False) -> Outcome:
        return SnapshotRows.reset(self, seq, ks, seeds, options, pending=pending)

    def _reset(self, k: int, seed: Any, options: Any) -> tuple[Any, Any]:
        answer: tuple[Any, Any] = self._begun.pop(k)()
        return answer

    def execute(self, seq: int, ks: Sequence[int], *function: Any) -> Outcome:
        return self._each(seq, ks, lambda k: self._begun.pop(k)())

    def close(self) -> Outcome:
        self._pool.shutdown()
        return SnapshotRows.close(self)
