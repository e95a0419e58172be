"""Some environments over their rows of the batch: built, stepped, reset in three autoreset modes, called, and closed.

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
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from operator import length_hint
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.errors import EnvError, EnvFailed, ObservationError
from vecenv.link.infos import BY_PICKLE, NO_INFO, InfoWriter
from vecenv.link.messages import PLAIN_OUTCOME, Failure, Outcome, summary
from vecenv.link.observations import KEPT, Put, checked_value, direct_rows, tree_writer
from vecenv.shm.layout import Array, Batch, Tree, fixed_tree, memory_of
from vecenv.system import generators
from vecenv.worker.envs import WorkerPlan, called, made_by, misreturned, observation_and_info

_LONG: Final = 1e-3  # seconds; a message that takes as long is followed by one that is timed, too
_UNTIMED_MOST: Final = 31
_SAMPLE_EVERY: Final = 64  # in every so many messages that are timed, the environments are timed one by one
clock: Final = time.perf_counter
_NO_TURN: Final = nullcontext()


class EnvRows:
    """Environments ``first .. first + len(env_fns) - 1`` of the batch.

    Args:
        env_fns: What builds them.
        first: Index of the first one.
        worker: Which row of the per-worker counters to write.
        plan: What all workers are told alike.
        batch: Views of the whole shared block.
        interrupts: A ``KeyboardInterrupt`` belongs to the person at the keyboard (in the caller's own process) and is
            passed on; in a worker it is the environment's own.
    """

    def __init__(
        self, env_fns: Sequence[Callable[[], Any]], first: int, worker: int, plan: WorkerPlan, batch: Batch,
        *, interrupts: bool = False,
    ) -> None:  # fmt: skip
        self.first, self.count, self.plan = first, len(env_fns), plan
        self.env_fns = list(env_fns)
        self.envs: list[gymnasium.Env[Any, Any] | None] = [None] * self.count
        self.forked: list[bool] = []  # not empty in a copy of the worker that an environment forked; see leave_if_forked()
        self.generators: generators.RowGenerators | None = None  # of rows that have their own
        self.warnings: list[tuple[str, str]] = []
        self._interrupts = interrupts
        self._building: int | None = None
        self._steps: list[Callable[[Any], Any]] = [partial(self._step_failed, k) for k in range(self.count)]
        self._used = [False] * self.count
        self._next: dict[int, tuple[Any, Any]] = {}  # row -> seed and options of the next episode that autoreset begins
        self._offered: list[Any] = [None] * self.count  # what an environment with an observation_buffer writes into
        self._at_end = {
            AutoresetMode.NEXT_STEP: self._reset_next_step,
            AutoresetMode.SAME_STEP: self._reset_same_step,
            AutoresetMode.DISABLED: self._reset_never,
        }[plan.autoreset_mode]
        mine = slice(first, first + self.count)
        self._tree = plan.layout.observations
        self._leaves = [leaf[mine] for leaf in batch.observations or ()]
        self._put = self._writer(batch)
        self._put_final: Put | None = None
        if self._tree is not None and batch.final_observations is not None:
            self._put_final = tree_writer(self._tree, [leaf[mine] for leaf in batch.final_observations], first, self._warn)
        leaf = self._tree.leaf if self._tree is not None else None
        # what the step loop writes observations of one array into, the common case; ``None`` refuses them all
        self._direct_rows = direct_rows(leaf, self._leaves[0]) if leaf is not None and self._leaves else [None] * self.count
        self.actions = _action_reader(plan.layout.actions, [leaf[mine] for leaf in batch.actions or ()])
        self._cells = tuple([memory_of(each[mine]) for each in (batch.rewards, batch.terminations, batch.truncations)])
        self._requested = batch.requested[mine]
        self._schemas = batch.info_schemas[mine]
        self._final = batch.final[mine]
        cells = (memory_of(counter[worker : worker + 1]) for counter in (batch.worker_time, batch.worker_steps))
        self._times = StepClock(batch.step_time[mine], *cells)
        self._infos = InfoWriter(self._schemas, batch.infos[mine])
        self._out = Outcome()
        self._seq = -1  # the message that is being carried out, or was last
        self._silent = -1  # the latest that ended without a word in the outcome
        self._done = 0  # how many of its rows are done
        self._walk: Any = None  # the rows that are being gone through
        self._dirty = True  # some row's info columns or final flag are set, by a worker that died before this one perhaps

    def _writer(self, batch: Batch) -> Put:
        """Keeps an observation of row k, in the way in which they travel."""
        tree, first = self._tree, self.first
        if tree is not None and batch.observations is not None:
            return tree_writer(tree, self._leaves, first, self._warn)
        if self.plan.registered is not None:
            from gymnasium.vector.utils import write_to_shared_memory

            space, memory = self.plan.registered

            def put(k: int, observation: Any) -> Any:
                write_to_shared_memory(space, first + k, observation, memory)
                return KEPT

            return put
        if (fixed := fixed_tree(self.plan.expected.observation_space)) is not None:
            return checked_value(fixed, first, self._warn, self.count)
        return lambda k, observation: observation

    def _warn(self, field: str, text: str) -> None:
        """An observation was changed to fit its space."""
        if self.plan.strict:
            raise ObservationError(text)
        self.warnings.append((field, text))

    # -- environments -----------------------------------------------------------------------------------------------

    @property
    def span(self) -> str:
        """Which environments, in words."""
        return f"{self.first}-{self.first + self.count - 1}"

    def use_generators(self, option: generators.GeneratorsOption) -> None:
        """Before environments are built: let each row have its own, or note which rows draw from those of the process."""
        if option == "own":
            self.generators = generators.RowGenerators(self.count)
        elif not self._interrupts:
            generators.watch(self.saw)

    def saw(self, generator: str) -> None:
        """An environment draws from a generator of the process: there is a warning about it."""
        row = f"env {self.first + self._running}" if self._running is not None else f"one of envs {self.span}"
        env = next((env for env in self.envs[self._running or 0 :] if env is not None), None)
        name = getattr(getattr(env, "spec", None), "id", None) or (type(env.unwrapped).__name__ if env is not None else "it")
        self.warnings.append((
            "generators",
            f"{row} ({name}) draws from the generator of {generator}, which everything in its process shares: what it says "
            "depends on which environments are beside it, so that the same seeds may give other results with another number "
            "of workers, and vecenv.evaluate other results with another number of environments. generators='own' gives each "
            "environment its own",
        ))  # fmt: skip

    @property
    def _running(self) -> int | None:
        """The row whose environment runs just now, if that can be told."""
        if self._building is None and isinstance(self._walk, type(iter(range(0)))):
            return self.count - 1 - length_hint(self._walk)
        return self._building

    def _turn(self, k: int, seed: Any = None, *, begins: bool = False) -> AbstractContextManager[None]:
        """Around every call into an environment but ``step``; ``begins``: it is a reset, with this seed."""
        return _NO_TURN if self.generators is None else generators.InUse(self.generators.each[k], seed, begins)

    def build(self) -> tuple[list[Failure], list[tuple[int, str, str]]]:
        """Build all environments; what raised, and (env, which space, its repr) for spaces that do not match."""
        failures: list[Failure] = []
        mismatches: list[tuple[int, str, str]] = []
        for k in range(self.count):
            try:
                env = self._build(k)
                wrong = self.plan.expected.mismatch(env)
            except BaseException as error:
                self._let_through(error)
                failures.append(Failure(self.first + k, error))
                continue
            if wrong is not None:
                mismatches.append((self.first + k, *wrong))
        return failures, mismatches

    def _build(self, k: int) -> gymnasium.Env[Any, Any]:
        self._building = k
        try:
            with self._turn(k):
                env: gymnasium.Env[Any, Any] = made_by(self.env_fns[k], self.first + k)
                self.envs[k] = env
                self._steps[k] = env.step
                self._used[k] = False
                self._offer(k, env)
        finally:
            self._building = None
        return env

    def _offer(self, k: int, env: gymnasium.Env[Any, Any]) -> None:
        """Let an environment that can write its observations in place do so."""
        # looked up on the class so that an environment's __getattr__ cannot pretend to have one
        offered = getattr(type(env.unwrapped), "observation_buffer", None)
        if callable(offered) and self._tree is not None:
            views = [leaf[k : k + 1].reshape(leaf.shape[1:]) for leaf in self._leaves]
            self._offered[k] = self._tree.build(iter(views))
            offered(env.unwrapped, self._offered[k])

    def _env(self, k: int) -> gymnasium.Env[Any, Any]:
        env = self.envs[k]
        if env is None:
            raise EnvFailed(f"env {self.first + k} failed earlier; reset() builds it anew")
        return env

    # What stands in for a row's `env.step` when the row is not to be stepped.

    def _step_failed(self, k: int, _: Any) -> Any:
        return self._env(k)

    def _step_by_reset(self, k: int, _: Any) -> Any:
        """The step after an episode's end in next-step mode: ignores its action and resets."""
        self._steps[k] = self._env(k).step
        observation, info = self._begin_next(k)
        return observation, 0.0, False, False, info

    def _first_step(self, k: int, pending: bool) -> Callable[[Any], Any]:
        """The step of a row that was just reset; ``pending``: it is to begin with an automatic reset."""
        return partial(self._step_by_reset, k) if pending else self._env(k).step

    def _reset(self, k: int, seed: Any, options: Any) -> tuple[Any, Any]:
        """The reset that was asked for, of an environment that is built anew if it had failed."""
        return self._call_reset(k, self.envs[k] or self._build(k), seed, options)

    def _begin_next(self, k: int) -> tuple[Any, Any]:
        """The reset of autoreset, with what was set for it."""
        if self.generators is None and k not in self._next:  # nearly always: `_turn` takes 0.4 us
            return observation_and_info(self._env(k).reset(), self.first + k)
        seed, options = self._next.pop(k, (None, None))
        return self._call_reset(k, self._env(k), seed, options, bare=seed is None and options is None)

    def _call_reset(self, k: int, env: Any, seed: Any, options: Any, *, bare: bool = False) -> tuple[Any, Any]:
        given = {} if bare else {"seed": seed, "options": None if options is None else dict(options)}
        with self._turn(k, seed, begins=True):
            return observation_and_info(env.reset(**given), self.first + k)

    def _is_pending(self, k: int) -> bool:
        """Whether the row's next step begins with an automatic reset."""
        return getattr(self._steps[k], "func", None) == self._step_by_reset

    def leave_if_forked(self) -> None:
        """End a copy of the worker, which an environment forked and which has come back here.

        It is not the worker, and what it has to say, however late, must not get into the rows.
        """
        if self.forked:
            os._exit(0)

    def _let_through(self, error: BaseException) -> None:
        if self._interrupts and isinstance(error, KeyboardInterrupt):
            raise error

    def _named(self, k: int, error: BaseException) -> BaseException:
        """What is said of an environment that raised ``error``: it, unless that is the person's at the keyboard, or was
        raised where the five values of a step were taken apart."""
        if self._interrupts and isinstance(error, KeyboardInterrupt):
            return EnvError(f"env {self.first + k} was interrupted: {summary(error)}")
        return misreturned(error, self.first + k) or error

    def _number(self, k: int, name: str, value: Any, kind: type[np.float64] | type[np.bool_]) -> Any:
        """A reward or flag that is no plain Python one: converted as Gymnasium does, an array of one squeezed."""
        if isinstance(value, (np.bool_, np.floating, np.integer, int)):
            return kind(value)
        try:
            array = np.array(value, dtype=kind)
            if array.size == 1:
                return kind(array.reshape(())[()])
            problem: Exception | None = None
        except (ValueError, TypeError) as error:
            problem = error
        raise ObservationError(
            f"env {self.first + k}: {name}: got {type(value).__name__} {value!r}, wanted one {np.dtype(kind)}"
        ) from problem

    def close(self) -> Outcome:
        """Close all environments, whatever any of them raises."""
        out = Outcome()
        for k in range(self.count):
            if (error := self._close_env(k)) is not None:
                out.failures.append(Failure(self.first + k, error))
        if self.generators is not None:
            self.generators = None
            generators.uninstall()
        return out

    def forget(self) -> None:
        """Let go of everything, the shared memory first of all; nothing can be asked of it any more."""
        self.__dict__.clear()

    # -- stepping ---------------------------------------------------------------------------------------------------

    def chosen(self, seq: int) -> Array:
        """The rows that message ``seq`` is about, in order."""
        rows: Array = (self._requested == seq).nonzero()[0]  # a third of what `flatnonzero` takes
        return rows

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

    def _resume(self, seq: int, ks: Sequence[int] | None) -> None:
        """Begin message ``seq``, or find out how far it had come."""
        if seq != self._seq:
            self._begin(seq, ks)
        elif self._walk is not None:
            self._lost_place(ks)

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
        if seq != self._seq:  # as `_resume` does, one call less of every step of some rows
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
        rewards, terminations, truncations = self._cells
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
        self._steps[k] = partial(self._step_by_reset, k)
        return observation, info

    def _reset_never(self, k: int, observation: Any, info: Any, out: Outcome) -> tuple[Any, Any]:
        return observation, info

    def _reset_same_step(self, k: int, observation: Any, info: Any, out: Outcome) -> tuple[Any, Any]:
        # Both are kept before the reset: an environment may reuse the very objects it returned.
        if isinstance(info, dict):
            info = deepcopy(info)
        kept = self._kept_final(k, observation)
        reset_observation, reset_info = self._begin_next(k)
        self.leave_if_forked()
        if "final_obs" in reset_info or "final_info" in reset_info:  # Gymnasium lets the reset's own keys win
            final = deepcopy(observation) if kept is KEPT else kept
            return reset_observation, {"final_info": info, "final_obs": final, **reset_info}
        self._note_final(k, kept, out)
        return reset_observation, {"final_info": info, **reset_info}

    def _kept_final(self, k: int, observation: Any) -> Any:
        """Keep an episode's last observation: in shared memory (``KEPT``), or as a copy that travels."""
        if self._put_final is None or self._tree is None or self._tree.exact(observation) is None:
            return deepcopy(observation)
        return self._put_final(k, observation)

    def _note_final(self, k: int, kept: Any, out: Outcome) -> None:
        if kept is KEPT:
            self._final[k] = True
            self._dirty = out.columns = True
        else:
            out.finals[self.first + k] = kept

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
        self._resume(seq, ks)
        generators.look_at_torch()
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
        self._resume(seq, ks)
        for k in list(range(self.count) if ks is None else ks)[self._done :]:
            if self._used[k]:
                self._drop(k)
        return self.reset(seq, ks, seeds, options, pending=pending)

    # -- calls ------------------------------------------------------------------------------------------------------

    def call(self, seq: int, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Outcome:
        """``env.get_wrapper_attr(name)`` of every environment, called if it can be."""
        return self._each(seq, range(self.count), lambda k: called(self._env(k), name, args, kwargs))

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

    def exec(
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
        if self.warnings:
            out.warnings.extend(self.warnings)
            self.warnings.clear()
        if out.columns:
            self._infos.send_new(out.schemas)
        elif out.is_plain():
            self._silent = self._seq
            return PLAIN_OUTCOME
        return out

    def _fail(self, k: int, error: BaseException, out: Outcome) -> None:
        self.leave_if_forked()
        row = self.first + k
        out.failures.append(Failure(row, self._named(k, error)))
        self._drop(k)
        out.observations.pop(row, None)
        out.infos.pop(row, None)
        self._let_through(error)

    def _drop(self, k: int) -> None:
        """Close an environment that is not to be used any more, and clear its row."""
        self._schemas[k] = NO_INFO
        self._final[k] = False
        self._close_env(k)

    def _close_env(self, k: int) -> BaseException | None:
        """Close an environment, and return what it raised. Its row may be another worker's by now."""
        env, self.envs[k] = self.envs[k], None
        self._steps[k] = partial(self._step_failed, k)
        self._used[k] = False
        self._next.pop(k, None)
        try:
            if env is not None:
                with self._turn(k):
                    env.close()
        except BaseException as error:
            self._let_through(error)
            return error
        return None


def _action_reader(tree: Tree | None, leaves: Sequence[Array]) -> Callable[[Array | None], Sequence[Any]]:
    """What reads the actions of some rows (``None``: of all) out of shared memory: scalars, or writeable arrays."""

    def copies(leaf: Array, ks: Array | None) -> Sequence[Any]:
        """Rows of a copy made at once, and never views of the shared block."""
        return list(leaf.copy() if ks is None else leaf[ks])

    def scalars(ks: Array | None) -> Sequence[Any]:
        return list(leaves[0].flat if ks is None else leaves[0][ks].flat)  # half of what the array's own iterator takes

    def trees(ks: Array | None) -> Sequence[Any]:
        assert tree is not None
        return [tree.build(iter(parts)) for parts in zip(*[copies(leaf, ks) for leaf in leaves], strict=True)]

    if tree is None or tree.leaf is None:
        return trees
    return scalars if leaves[0].ndim == 1 else partial(copies, leaves[0])


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
