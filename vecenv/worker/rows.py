"""Some environments over their rows of the batch: steps, resets, the three autoreset modes, and what is written where.

:class:`EnvRows` knows nothing of processes and messages; the same object lives in a worker process, in the caller's own
process (``num_workers=0``, ``use_caller=True``) or on another machine. What does not fit into shared memory comes back in an
:class:`Outcome`, which is empty for a plain step. One environment's failure is recorded in the outcome and never touches its
siblings; a failed environment is closed at once and built anew by its next reset.

The step loop is the hot path of the whole package: everything it needs is bound to local names, and what an autoreset mode
does at the end of an episode is looked up in a table and called only there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from operator import length_hint
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.errors import EnvError
from vecenv.link.infos import BY_PICKLE, NO_INFO, InfoWriter
from vecenv.link.messages import PLAIN_OUTCOME, Failure, Outcome
from vecenv.link.observations import KEPT, Put, direct_rows
from vecenv.shm.layout import Array, Batch, Tree, memory_of
from vecenv.system.generators import look_at_torch
from vecenv.worker.envs import Envs, Expected

__all__ = ["EnvRows", "clock"]

_LONG: Final = 1e-3  # seconds; a message that takes as long is followed by one that is timed, too
_UNTIMED_MOST: Final = 31
_SAMPLE_EVERY: Final = 64  # in every so many messages that are timed, the environments are timed one by one
clock: Final = time.perf_counter


class EnvRows(Envs):
    """Environments ``first .. first + len(env_fns) - 1`` of the batch, stepped and reset; see :class:`Envs`.

    Args:
        worker: Which row of the per-worker counters to write.
        batch: Views of the whole shared block.
        put: Writes an observation of row k (:data:`~vecenv.link.observations.Put`).
        put_final: The same for final observations, or ``None`` where they travel by pickle.
        observation_tree: Structure of an observation of fixed size, else ``None``.
        action_tree: Structure of an action of fixed size, else ``None``.
        autoreset_mode: What to do when an episode ends.
        interrupts: A ``KeyboardInterrupt`` belongs to the person at the keyboard (in the caller's own process) and is
            passed on; in a worker it is the environment's own.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        first: int,
        worker: int,
        batch: Batch,
        put: Put,
        put_final: Put | None,
        observation_tree: Tree | None,
        action_tree: Tree | None,
        autoreset_mode: AutoresetMode,
        expected: Expected | None = None,
        interrupts: bool = False,
    ) -> None:
        count = len(env_fns)
        mine = slice(first, first + count)
        leaves = [leaf[mine] for leaf in batch.observations] if batch.observations is not None else []
        super().__init__(env_fns, first, observation_tree, leaves, expected, interrupts)
        self._put = put
        self._put_final = put_final
        self._action_tree = action_tree
        self._at_end = {
            AutoresetMode.NEXT_STEP: self._reset_next_step,
            AutoresetMode.SAME_STEP: self._reset_same_step,
            AutoresetMode.DISABLED: self._reset_never,
        }[autoreset_mode]
        self._actions = [leaf[mine] for leaf in batch.actions] if batch.actions is not None else []
        self._reward_cells = memory_of(batch.rewards[mine])
        self._termination_cells = memory_of(batch.terminations[mine])
        self._truncation_cells = memory_of(batch.truncations[mine])
        self._requested = batch.requested[mine]
        self._schemas = batch.info_schemas[mine]
        self._final = batch.final[mine]
        cells = (memory_of(counter[worker : worker + 1]) for counter in (batch.worker_time, batch.worker_steps))
        self._times = StepClock(batch.step_time[mine], *cells)
        self._infos = InfoWriter(self._schemas, batch.infos[mine])
        leaf = observation_tree.leaf if observation_tree is not None else None
        # what the step loop writes observations of one array into, the common case; ``None`` refuses them all
        self._direct_rows = direct_rows(leaf, leaves[0]) if leaf is not None and leaves else [None] * count
        self._out = Outcome()
        self._seq = -1  # the message that is being carried out, or was last
        self._silent = -1  # the latest that ended without a word in the outcome
        self._done = 0  # how many of its rows are done
        self._walk: Any = None  # the rows that are being gone through
        self._dirty = True  # some row's info columns or final flag are set, by a worker that died before this one perhaps

    # -- stepping ---------------------------------------------------------------------------------------------------

    def chosen(self, seq: int) -> list[int]:
        """The rows that message ``seq`` is about."""
        return np.flatnonzero(self._requested == seq).tolist()

    def actions(self, ks: Sequence[int] | None) -> Sequence[Any]:
        """The rows' actions out of shared memory, each the environment's own: a scalar or a writeable array."""
        assert self._action_tree is not None
        tree = self._action_tree
        if tree.leaf is not None:
            return _own(self._actions[0], ks)
        columns = [_own(leaf, ks) for leaf in self._actions]
        return [tree.build(iter(leaves)) for leaves in zip(*columns, strict=True)]

    def _begin(self, seq: int, ks: Sequence[int] | None, *, batch: bool = True) -> None:
        """Begin to carry out message ``seq``. One that was interrupted is asked for again by the same number, and goes on.

        What goes on: the rows that are done are not done again, and what they said is in the outcome already. So in the
        caller's own process an exception may come out of any line, and no environment is stepped twice or left out.
        """
        out = self._out
        if not batch or not out.is_plain():
            out = self._out = Outcome()
        if batch and self._dirty:
            self._clean(ks)
            out.columns = False
        self._done = 0
        self._walk = None
        self._seq = seq

    def _stopped(self, ks: Sequence[int] | None, begun: int, done: int) -> None:
        """An exception that is no environment's got out of a loop over rows: note where to go on.

        Args:
            ks: The rows of the message; ``None``: all.
            begun: The row whose environment was run last; -1: none.
            done: The row that was done last.
        """
        if self.generators is not None:
            self.generators.done()
        if begun != done:  # its state is unknown
            row = self.first + begun
            if not any(failure.env == row for failure in self._out.failures):
                self._out.failures.append(Failure(row, EnvError(f"env {row} was interrupted: it has to be built anew")))
            self._drop(begun)
        if begun >= 0:
            self._done = (begun if ks is None else list(ks).index(begun)) + 1
        self._walk = None

    def _lost_place(self, ks: Sequence[int] | None) -> None:
        """As :meth:`_stopped`, without a note of progress: the row that was begun last may or may not be done."""
        every = list(range(self.count) if ks is None else ks)[self._done :]
        taken = len(every) - length_hint(self._walk)
        self._stopped(ks, every[taken - 1] if taken else -1, -1)

    def _begin_step(
        self, seq: int, ks: list[int] | None, steps: list[Callable[[Any], Any]], actions: Sequence[Any]
    ) -> tuple[Sequence[int], list[Callable[[Any], Any]], list[Any], Sequence[Any]]:
        """Begin a step of some rows, or after one that left something, or go on with one that was interrupted.

        Returns:
            The rows to be stepped, and of each: its step function, what its observation is written into, its action.
        """
        if seq != self._seq:
            self._begin(seq, ks)
        elif self._walk is not None:
            self._lost_place(ks)
        where: Sequence[int] = range(self.count)
        rows = self._direct_rows
        if ks is not None:
            where, steps, rows = ks, [steps[k] for k in ks], [rows[k] for k in ks]
        if start := self._done:  # it was interrupted
            where, steps, rows, actions = list(where)[start:], steps[start:], rows[start:], list(actions)[start:]
        return where, steps, rows, actions

    def step(self, seq: int, ks: list[int] | None, actions: Sequence[Any]) -> Outcome:
        """Step the environments of rows ``ks`` (``None``: all of them), in order; see :meth:`_begin`."""
        steps, times, began = self._steps, self._times, None
        if times.untimed:
            times.untimed -= 1
        else:
            steps, began = times.of_each(steps), clock()
        where: Sequence[int] = range(self.count)
        rows = self._direct_rows
        if ks is None and seq != self._seq and self._silent == self._seq and not self._dirty:  # nearly always
            self._done, self._seq = 0, seq
        else:
            where, steps, rows, actions = self._begin_step(seq, ks, steps, actions)
        begun = done = -1
        walk = self._walk = iter(where)
        out, at_end, write, note = self._out, self._at_end, self._write, self._note
        forked = self.forked
        rewards, terminations, truncations = self._reward_cells, self._termination_cells, self._truncation_cells
        try:
            if self.generators is not None:
                steps = self.generators.steps(steps, where, walk)
            for k, step, row, action in zip(walk, steps, rows, actions, strict=True):
                try:
                    begun = k
                    observation, reward, terminated, truncated, info = step(action)
                    if forked:
                        os._exit(0)
                    if terminated or truncated:
                        observation, info = at_end(k, observation, info, out)
                    try:
                        row[:] = observation
                    except (TypeError, ValueError):  # another dtype or shape, or no array at all
                        write(k, observation, out)
                    if info or info.__class__ is not dict:
                        note(k, info, out)
                    if reward.__class__ is not float:
                        reward = self._number(k, "reward", reward, np.float64)
                    rewards[k] = reward
                    if terminated.__class__ is not bool or truncated.__class__ is not bool:
                        terminated = self._number(k, "terminated", terminated, np.bool_)
                        truncated = self._number(k, "truncated", truncated, np.bool_)
                    terminations[k] = terminated
                    truncations[k] = truncated
                except BaseException as error:
                    self._fail(k, error, out)
                    rewards[k], terminations[k], truncations[k] = 0.0, False, False
                done = k
        except BaseException:
            self._stopped(ks, begun, done)
            raise
        self._done, self._walk = self.count, None
        if self.generators is not None:
            self.generators.done()
        if began is not None:
            self._times.count(clock() - began, len(steps))
        return self._finish()

    # What happens when an episode ends, one function a mode: takes and returns (observation, info).

    def _reset_next_step(self, k: int, observation: Any, info: Any, out: Outcome) -> tuple[Any, Any]:
        self._steps[k] = self._step_by_reset(k)
        return observation, info

    def _reset_never(self, k: int, observation: Any, info: Any, out: Outcome) -> tuple[Any, Any]:
        return observation, info

    def _reset_same_step(self, k: int, observation: Any, info: Any, out: Outcome) -> tuple[Any, Any]:
        # Both are kept before the reset: an environment may reuse the very objects it returned.
        if isinstance(info, dict):
            info = deepcopy(info)
        exact = None
        if self._put_final is not None and self._observation_tree is not None:
            exact = self._observation_tree.exact(observation)
        if exact is not None and self._put_final is not None:
            self._put_final(k, observation)
            kept = None
        else:
            kept = deepcopy(observation)
        reset_observation, reset_info = self._begin_next(k)
        self.leave_if_forked()
        if "final_obs" in reset_info or "final_info" in reset_info:  # Gymnasium lets the reset's own keys win
            final = deepcopy(observation) if kept is None else kept
            return reset_observation, {"final_info": info, "final_obs": final, **reset_info}
        if exact is not None:
            self._final[k] = True
            self._dirty = out.columns = True
        else:
            out.finals[self.first + k] = kept
        return reset_observation, {"final_info": info, **reset_info}

    # -- resetting --------------------------------------------------------------------------------------------------

    def reset(self, seq: int, ks: list[int] | None, seeds: Sequence[Any], options: Any, *, pending: bool = False) -> Outcome:
        """Reset the environments of rows ``ks``, building those that had failed.

        Args:
            seq: The number of the message; see :meth:`_begin`.
            ks: Which rows; ``None``: all.
            seeds: One per row of ``ks``.
            options: A dict or ``None`` for every environment, each its own copy; or a list of them, one per row of ``ks``.
            pending: Let the next step begin with an automatic reset (after a restart in next-step mode).
        """
        if seq != self._seq:
            self._begin(seq, ks)
        elif self._walk is not None:
            self._lost_place(ks)
        look_at_torch()
        out, start = self._out, self._done
        begun = done = -1
        walk = self._walk = iter(list(range(self.count) if ks is None else ks)[start:])
        each = options if isinstance(options, list) else [options] * len(seeds)
        try:
            for k, seed, own in zip(walk, list(seeds)[start:], each[start:], strict=True):
                try:
                    begun = k
                    observation, info = self._reset(k, seed, own)
                    self.leave_if_forked()
                    self._steps[k] = self._first_step(k, pending)
                    self._used[k] = True
                    self._write(k, observation, out)
                    if info or info.__class__ is not dict:
                        self._note(k, info, out)
                except BaseException as error:
                    self._fail(k, error, out)
                done = k
        except BaseException:
            self._stopped(ks, begun, done)
            raise
        self._done, self._walk = self.count, None
        return self._finish()

    def rebuild(self, seq: int, ks: list[int] | None, seeds: Sequence[Any], options: Any, *, pending: bool) -> Outcome:
        """Replace the environments of rows ``ks`` by new ones (unless they are new already) and reset those."""
        if seq != self._seq:
            self._begin(seq, ks)
        elif self._walk is not None:
            self._lost_place(ks)
        for k in list(range(self.count) if ks is None else ks)[self._done :]:
            if self._used[k]:
                self._drop(k)
        return self.reset(seq, ks, seeds, options, pending=pending)

    # -- calls ------------------------------------------------------------------------------------------------------

    def call(self, seq: int, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Outcome:
        """``env.get_wrapper_attr(name)`` of every environment, called if it can be."""

        def one(k: int) -> Any:
            attribute = self._env(k).get_wrapper_attr(name)
            return attribute(*args, **kwargs) if callable(attribute) else attribute

        return self._each(seq, range(self.count), one)

    def set_attr(self, seq: int, name: str, values: Sequence[Any]) -> Outcome:
        """``env.set_wrapper_attr(name, value)``, a value a row."""

        def one(k: int) -> None:
            self._env(k).set_wrapper_attr(name, values[k])

        return self._each(seq, range(self.count), one)

    def set_next(self, seq: int, given: Sequence[tuple[Any, Any] | None]) -> Outcome:
        """Seed and options of the next episode that autoreset begins, a pair a row; ``None``: what there is stays."""

        def one(k: int) -> None:
            self._env(k)
            if (own := given[k]) is not None:
                self._next[k] = own

        return self._each(seq, range(self.count), one)

    def execute(
        self, seq: int, ks: Sequence[int], function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Outcome:
        """``function(env, *args, **kwargs)`` for the rows ``ks``."""
        return self._each(seq, ks, lambda k: function(self._env(k), *args, **kwargs))

    def _each(self, seq: int, ks: Sequence[int], function: Callable[[int], Any]) -> Outcome:
        if seq != self._seq:
            self._begin(seq, ks, batch=False)
        out = self._out
        for k in ks[self._done :]:
            try:
                self._done += 1  # whatever comes of it, it is not called twice
                with self._turn(k):
                    out.results[self.first + k] = function(k)
            except BaseException as error:
                out.failures.append(Failure(self.first + k, self._named(k, error), fatal=False))
                self._let_through(error)
        return out

    @property
    def _running(self) -> int | None:
        if self._building is None and isinstance(self._walk, type(iter(range(0)))):
            return self.count - 1 - length_hint(self._walk)
        return self._building

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _write(self, k: int, observation: Any, out: Outcome) -> None:
        """Keep an observation, unless the environment has written it in place."""
        if observation is not None and observation is self._offered[k]:
            return
        if (travels := self._put(k, observation)) is not KEPT:
            out.observations[self.first + k] = travels

    def _note(self, k: int, info: Any, out: Outcome) -> None:
        """Keep an info that is not empty."""
        self._dirty = True
        if info.__class__ is dict and self._infos.write(k, info):
            out.columns = True
        else:
            self._schemas[k] = BY_PICKLE
            out.infos[self.first + k] = info

    def _clean(self, ks: Sequence[int] | None) -> None:
        where: Any = slice(None) if ks is None else ks
        self._schemas[where] = NO_INFO
        self._final[where] = False
        self._dirty = ks is not None and bool(self._schemas.any() or self._final.any())

    def _finish(self) -> Outcome:
        """The outcome of this message, to be read before the next one."""
        out = self._out
        if out.columns:
            self._infos.send_new(out.schemas)
        if self.warnings:
            out.warnings.extend(self.warnings)
            self.warnings.clear()
        if out.columns or not out.is_plain():
            return out
        self._silent = self._seq
        return PLAIN_OUTCOME

    def _fail(self, k: int, error: BaseException, out: Outcome) -> None:
        self.leave_if_forked()
        row = self.first + k
        out.failures.append(Failure(row, self._named(k, error)))
        self._drop(k)
        out.observations.pop(row, None)
        out.infos.pop(row, None)
        self._let_through(error)

    def _drop(self, k: int) -> None:
        """Close an environment that is not to be used any more."""
        env, self.envs[k] = self.envs[k], None
        self._steps[k] = self._step_failed(k)
        self._schemas[k] = NO_INFO
        self._final[k] = False
        self._used[k] = False
        self._next.pop(k, None)
        if env is not None:
            try:
                with self._turn(k):
                    env.close()
            except BaseException as error:
                self._let_through(error)


def _own(leaf: Array, ks: Sequence[int] | None) -> Sequence[Any]:
    """Scalars, or rows of a copy made at once, and never views of the shared block."""
    return list(leaf.copy() if ks is None else leaf[ks])


class StepClock:
    """How long a worker's environments take, by samples: two looks at the clock take a tenth of a step of a CartPole.

    The shorter messages are, the fewer of them are timed, but one in 32 at least, so that a single long one cannot stand for
    very many.

    Args:
        each: Seconds of each row's latest step that was timed.
        seconds, steps: Cells of shared memory for what this worker has spent stepping, and for how many steps.

    Attributes:
        untimed: Messages to come that are not timed.
    """

    def __init__(self, each: Array, seconds: Any, steps: Any) -> None:
        self.untimed = 0
        self._each, self._seconds, self._steps = each, seconds, steps
        self._counted = 0  # messages that were timed
        self._weight = 1  # for how many the next one that is timed stands

    def of_each(self, steps: list[Callable[[Any], Any]]) -> list[Callable[[Any], Any]]:
        """The rows' step functions for a message that is timed: now and then each by itself."""
        if self._counted % _SAMPLE_EVERY < _SAMPLE_EVERY - 1:
            return steps
        return [self._timed(k, step) for k, step in enumerate(steps)]

    def count(self, elapsed: float, steps: int) -> None:
        """Count a message that was timed, once for itself and once for each before it that was not."""
        self._seconds[0] += self._weight * elapsed
        self._steps[0] += self._weight * steps
        self.untimed = min(_UNTIMED_MOST, int(_LONG / max(elapsed, 1e-9)))
        self._weight = self.untimed + 1
        self._counted += 1

    def add(self, elapsed: float, each: Iterable[tuple[int, float]]) -> None:
        """Time that was spent outside of the messages that are counted, and how long single rows took in it."""
        self._seconds[0] += elapsed
        for k, seconds in each:
            self._each[k] = seconds

    def _timed(self, k: int, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        times = self._each

        def timed(action: Any) -> Any:
            began = clock()
            result = step(action)
            times[k] = clock() - began
            return result

        return timed
