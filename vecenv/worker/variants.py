"""Rows of other kinds: environments that wait, and environments that begin episodes ahead of time.

Where environments wait for a service, a robot, another program, a worker steps several of them at the same time. They are
run in threads first; then the step loop of :mod:`vecenv.worker.rows` goes over what they have said, in order, as if it had
just asked them. So what a step means is written down once, and an environment that raises there costs its siblings nothing
here either. Each environment is in one thread at a time, and not always in the same one.

A spare environment may begin an episode before a call asks for it, and moves from row to row. The caller decides when the
reset is made. Its result or error is kept until the row's own step or reset asks for it. So the step of the row returns what
the environment would have returned at that time.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from threading import Lock
from typing import Any

import cloudpickle
from gymnasium.vector import AutoresetMode

from vecenv.errors import NotRestorable
from vecenv.link.messages import Failure, Op, Outcome
from vecenv.shm.layout import Batch
from vecenv.worker.keeping import SnapshotRows
from vecenv.worker.rows import clock


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
    """As :class:`SnapshotRows`, with at most ``env_threads`` environments at once. For worker processes: nothing interrupts
    them.

    Where messages overlap (``WorkerPlan.overlaps``), each is about one row, and no message is about a row whose last one is
    not answered. :meth:`run` runs its environment, in whatever thread it is called. What comes after is done between taking
    :attr:`turn` and giving it back, for one message at a time.

    Attributes:
        turn: Held while a message is carried out, apart from what its environment does.
    """

    def __init__(self, *rows: Any, **how: Any) -> None:
        super().__init__(*rows, **how)
        self.turn = Lock()
        self._pool = ThreadPoolExecutor(self.plan.env_threads, "environment")
        self._resets_itself = self.plan.autoreset_mode is AutoresetMode.SAME_STEP
        self._stepped: dict[int, Said] = {}  # row -> what its step has said
        self._begun: dict[int, Said] = {}  # row -> what the reset or call has said that the loop is about to ask for

    def submit(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function in a thread, as soon as one of them is free."""
        self._pool.submit(function, *args)

    def run(self, op: int, seq: int, payload: Any) -> None:
        """Run the environment that a message is about; what it says is kept for the turn."""
        if op == Op.STEP_SOME:
            (k,), (action,) = self.chosen(seq).tolist(), payload
            self._ask_step(k, action)
        elif op == Op.RESET_SOME:
            (k,), ((seed,), options) = self.chosen(seq).tolist(), payload or ((None,), None)
            self._ask_reset(k, seed, options[0] if isinstance(options, list) else options)
        elif op == Op.EXEC:
            (k,), function, args, kwargs = payload
            self._begun[k] = Said(lambda: function(self._env(k), *args, **kwargs))
        self.leave_if_forked()

    def _ask_step(self, k: int, action: Any) -> None:
        self._stepped[k] = Said(lambda: self._step_and_reset(k, action))

    def _ask_reset(self, k: int, seed: Any, options: Any) -> None:
        self._begun[k] = Said(lambda: super(ThreadedRows, self)._reset(k, seed, options))

    def _step_and_reset(self, k: int, action: Any) -> Any:
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

    def step(self, seq: int, ks: list[int] | None, actions: Sequence[Any]) -> Outcome:
        """The step loop over what environments have said."""
        which = range(self.count) if ks is None else ks
        began = clock()
        if not self.plan.overlaps:
            list(self._pool.map(self._ask_step, which, actions))
        said = {k: self._stepped.pop(k) for k in which}
        seconds = max([clock() - began, *(one.seconds for one in said.values())])
        asked = {k: self._steps[k] for k in said}
        for k, one in said.items():
            self._steps[k] = one
        out = super().step(seq, ks, actions)
        for k, one in said.items():
            self._begun.pop(k, None)
            if self._steps[k] is one:  # and nothing else came of it
                self._steps[k] = asked[k]
        self._times.add(seconds, [(k, one.seconds) for k, one in said.items()])
        return out

    def _begin_next(self, k: int) -> tuple[Any, Any]:
        begun = self._begun.pop(k, None)
        answer: tuple[Any, Any] = super()._begin_next(k) if begun is None else begun()
        return answer

    def reset(self, seq: int, ks: list[int] | None, seeds: Sequence[Any], options: Any, *, pending: bool = False) -> Outcome:
        if not self.plan.overlaps:
            which = range(self.count) if ks is None else ks
            each = options if isinstance(options, list) else [options] * len(seeds)
            list(self._pool.map(self._ask_reset, which, seeds, each))
        return super().reset(seq, ks, seeds, options, pending=pending)

    def _reset(self, k: int, seed: Any, options: Any) -> tuple[Any, Any]:
        answer: tuple[Any, Any] = self._begun.pop(k)()
        return answer

    def exec(self, seq: int, ks: Sequence[int], *function: Any) -> Outcome:
        if not self.plan.overlaps:
            return super().exec(seq, ks, *function)
        return self._each(seq, ks, lambda k: self._begun.pop(k)())

    def close(self) -> Outcome:
        self._pool.shutdown()
        return super().close()


class WithAttributes:
    """Builds an environment and sets what ``set_attr`` has set in all: it may run the episodes of any row.

    Args:
        env_fn: Builds it.
        attributes: Name -> value, pickled, in the order in which they were set. A change applies to what is built next.
    """

    def __init__(self, env_fn: Callable[[], Any], attributes: dict[str, bytes]) -> None:
        self._env_fn, self._attributes = env_fn, attributes

    def __call__(self) -> Any:
        env = self._env_fn()
        for name, value in self._attributes.items():
            env.set_wrapper_attr(name, pickle.loads(value))
        return env

    def __repr__(self) -> str:
        return repr(self._env_fn)

    def keep(self, name: str, value: Any) -> None:
        """This was set in what was built before."""
        blob = cloudpickle.dumps(value)
        self._attributes.pop(name, None)
        self._attributes[name] = blob


class SpareRows(SnapshotRows):
    """As :class:`SnapshotRows`, of one row."""

    _latest = 0  # preparation
    _kept: tuple[int, Said] | None = None
    """The seed of an episode that was begun and not asked for, and what its reset gave."""

    def set_attr(self, seq: int, name: str, values: Sequence[Any]) -> Outcome:
        outcome = super().set_attr(seq, name, values)
        if self.envs[0] is None or not outcome.failures:  # one that failed has it when it is built anew
            for env_fn in self.env_fns:
                if isinstance(env_fn, WithAttributes):
                    env_fn.keep(name, values[0])
        return outcome

    def save(self, seq: int, ks: Sequence[int]) -> Outcome:
        if self._kept is not None:
            error = NotRestorable("a step that was interrupted has begun its next episode: step first")
            return Outcome(failures=[Failure(self.first, error, fatal=False)])
        return super().save(seq, ks)

    def load(self, seq: int, ks: Sequence[int]) -> Outcome:
        self._kept = None
        return super().load(seq, ks)

    def at_place(self, batch: Batch, place: int, number: int, seed: int) -> SpareRows:
        """The environment in another row, or in the same, with an episode begun ahead of time.

        Args:
            batch: Views of the whole shared block.
            place: Which row.
            number: Of the preparation; nothing is begun where it is the latest one.
            seed: Of the episode.
        """
        rows = self
        if place != self.first:
            rows = SpareRows(self.env_fns, place, place, self.plan, batch)
            rows.follow(self)
            rows._latest, rows._kept = self._latest, self._kept
        if number != rows._latest:
            rows._latest = number
            rows._kept = seed, Said(lambda: rows._begun(seed))
            rows._used[0] = True
        if rows._kept is not None:
            rows._steps[0] = rows._step_by_kept
        batch.ahead[number % len(batch.ahead)] = number
        return rows

    def _begun(self, seed: int) -> tuple[Any, Any]:
        """A reset of the environment, which is built anew if it had failed; kept from what it may write into."""
        answer = super()._reset(0, seed, None)
        self.leave_if_forked()
        return deepcopy(answer)

    def _step_by_kept(self, _: Any) -> Any:
        """The step after an episode's end in next-step mode."""
        assert self._kept is not None
        (_, said), self._kept = self._kept, None
        observation, info = said()
        self._steps[0] = self._env(0).step
        return observation, 0.0, False, False, info

    def _reset_same_step(self, k: int, observation: Any, info: Any, out: Outcome) -> tuple[Any, Any]:
        """Only the end of the episode: the caller asks for the next one, in the worker that has begun it."""
        self._note_final(k, self._kept_final(k, observation), out)
        return observation, {"final_info": deepcopy(info)}

    def _reset(self, k: int, seed: Any, options: Any) -> tuple[Any, Any]:
        kept, self._kept = self._kept, None
        if kept is not None and options is None and kept[0] == seed:
            answer: tuple[Any, Any] = kept[1]()
            return answer
        return super()._reset(k, seed, options)
