"""Builds, steps, resets, calls and closes the environments of one worker, which are rows of the batch.

:class:`EnvRows` is independent of processes and messages; the same class works in a worker process and in the caller's own
process (``num_workers=0``, ``use_caller=True``). Results that do not fit into shared memory are returned in an
:class:`Outcome`, which is empty for a plain step. A failure of one environment is recorded in the outcome and does not
affect the others. An environment that fails in a step or a reset is closed immediately, and rebuilt by its next reset.

The step loop is the hot path of the whole package. It mostly uses local variables, and the autoreset mode costs nothing
until an episode ends: a table maps it to the function that is called then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from functools import partial
from typing import Any, Final, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import write_to_shared_memory

from vecenv.errors import EnvFailed, EpisodeOver, ObservationError, VecEnvError, envs_text
from vecenv.link.envs import WorkerPlan, build_env, call_env, explain_bad_step, same_object_error, unpack_reset
from vecenv.link.infos import BY_PICKLE, NO_INFO, InfoWriter, Places
from vecenv.link.messages import COLUMNS_OUTCOME, PLAIN_OUTCOME, Failure, Outcome, copy_if_possible
from vecenv.link.observations import (
    WRITTEN,
    ObservationWriter,
    find_buffer_method,
    make_exact_rows,
    make_observation_writer,
    make_reply_writer,
)
from vecenv.shm.layout import Array, Leaf, SharedArrays, Tree
from vecenv.system.process_settings import SettingsGuard, describe_shared_clients
from vecenv.system.shared_generators import describe_draws
from vecenv.system.signals import call_with_fallback, raised_by_handler
from vecenv.worker.row_writer import CompiledRow, make_compiled_rows

_LONG_MESSAGE_SECONDS: Final = 1e-3  # after a message that takes longer, the next one is timed too
_MAX_UNTIMED: Final = 31
_SAMPLE_EVERY: Final = 64  # one in this many timed messages also times each environment separately
clock: Final = time.perf_counter


class EnvRows:
    """Environments ``first .. first + len(env_fns) - 1`` of the batch.

    Args:
        env_fns: Functions that build them.
        first: Index of the first one.
        worker: Index into the per-worker counters.
        plan: The settings that all workers share.
        arrays: Views of the whole shared memory.
        in_caller: True in the caller's own process, where calls raise all exceptions of signal handlers, and other methods
            raise ``KeyboardInterrupt``. In a worker, these exceptions count as failures of an environment.
    """

    def __init__(
        self, env_fns: Sequence[Callable[[], Any]], first: int, worker: int, plan: WorkerPlan, arrays: SharedArrays,
        *, in_caller: bool = False,
    ) -> None:  # fmt: skip
        self.first, self.count, self.plan = first, len(env_fns), plan
        self.env_fns = list(env_fns)
        self.envs: list[gymnasium.Env[Any, Any] | None] = [None] * self.count
        self.forked: list[bool] = []  # not empty if this process is a fork of the worker; see exit_if_forked()
        self.warnings: list[tuple[str, str]] = []
        self._returned_none = False
        self._warned_of_finished = False
        self.guard: SettingsGuard | None = None
        self._clients_checked = self.count == 1
        self._in_caller = in_caller
        self._steps: list[Callable[[Any], Any]] = [partial(self._step_failed, k) for k in range(self.count)]
        self._used = [False] * self.count
        self._next_episodes: dict[int, tuple[Any, Any]] = {}  # k -> seed and options for the next automatic reset
        self._buffers: list[Any] = [None] * self.count  # buffers of environments that write observations in place
        self._on_episode_end = {
            AutoresetMode.NEXT_STEP: self._reset_next_step,
            AutoresetMode.SAME_STEP: self._reset_same_step,
            AutoresetMode.DISABLED: self._reset_never,
        }[plan.autoreset_mode]
        own_rows = slice(first, first + self.count)
        self._tree = plan.layout.observations
        self._current_cell, self._in_place = arrays.current.data, arrays.in_place
        leaf = self._tree.leaf if self._tree is not None else None
        batches = arrays.observations, *arrays.spare_observations
        self._batch_writers = [self._make_batch_writer(leaf, leaves, arrays, own_rows) for leaves in batches]
        self._has_spares = len(self._batch_writers) > 1
        self._use_current_batch()
        self._write_final_row: ObservationWriter | None = None
        if self._tree is not None and arrays.final_observations is not None:
            finals = [leaf[own_rows] for leaf in arrays.final_observations]
            self._write_final_row = make_observation_writer(self._tree, finals, first, self._warn)
        actions = [leaf[own_rows] for leaf in arrays.actions or ()]
        self.read_actions = _make_action_reader(plan.layout.actions, actions, self.count)
        # memoryviews, which read and write single numbers in a fraction of the time that arrays take
        self._cells: Any = [each[own_rows].data for each in (arrays.rewards, arrays.terminations, arrays.truncations)]
        self._requested = arrays.requested[own_rows]
        self._schemas = arrays.info_schemas[own_rows]
        self._final = arrays.final[own_rows]
        cells = (counter[worker : worker + 1].data for counter in (arrays.worker_time, arrays.worker_steps))
        self._step_clock = StepClock(arrays.step_time[own_rows], *cells)
        self._running_cell = arrays.running[worker : worker + 1].data
        self.note_running(-1)
        compiled = [writer.compiled for writer in self._batch_writers]
        learners = [partial(_learn, rows) for rows in zip(*compiled, strict=True)]
        self._infos = InfoWriter(self._schemas, arrays.infos[own_rows], learners)
        self._out = Outcome()
        self._has_old_results = True  # True if info columns or final flags may be set, for example by a worker that died

    def _make_batch_writer(
        self, leaf: Leaf | None, batch_leaves: list[Array] | None, arrays: SharedArrays, own_rows: slice
    ) -> _BatchWriter:
        leaves = [each[own_rows] for each in batch_leaves or ()]
        targets: list[Any] = [_ObservationTarget(self, k) for k in range(self.count)]
        if leaf is not None and leaves:  # one array, the common case
            targets = make_exact_rows(leaf, leaves[0])
        compiled = make_compiled_rows(leaf, leaves, arrays, own_rows)
        write_results: list[Any] = [row.write for row in compiled] or [None] * self.count
        return _BatchWriter(leaves, self._make_writer(leaves, arrays), targets, write_results, compiled)

    def _use_current_batch(self) -> None:
        """Write observations into the batch that the caller has chosen."""
        self._current_batch = self._current_cell[0]
        self._leaves, self._write_row, self._targets, self._write_results, _ = self._batch_writers[self._current_batch]

    def _make_writer(self, leaves: list[Array], arrays: SharedArrays) -> ObservationWriter:
        """Return a function that writes an observation into row k, or returns it to be sent in the outcome."""
        tree, first = self._tree, self.first
        if tree is not None and arrays.observations is not None:
            return make_observation_writer(tree, leaves, first, self._warn)
        if self.plan.registered is not None:
            space, memory = self.plan.registered

            def write(k: int, observation: Any) -> Any:
                write_to_shared_memory(space, first + k, observation, memory)
                return WRITTEN

            return write
        # in the caller nothing is pickled, and the environment may change its object later
        space = self.plan.expected.observation_space
        return make_reply_writer(space, first, self._warn, self.count, copies=self._in_caller)

    def _warn(self, field: str, text: str) -> None:
        """Warn that an observation was changed to fit its space."""
        self.warnings.append((field, text))

    # -- environments -----------------------------------------------------------------------------------------------

    @property
    def span(self) -> str:
        """The environments, for messages: ``env 3`` or ``envs 4-7``."""
        return envs_text(range(self.first, self.first + self.count))

    def note_running(self, k: int) -> None:
        """Record the environment about to be called (-1: none). The caller names it if this worker dies or hangs."""
        self._running_cell[0] = k

    def guard_settings(self) -> None:
        """Watch for changes of process settings if there are several environments. Call this before building them."""
        if self.count > 1:
            self.guard = SettingsGuard(self._name_running)
            self.guard.watch_calls()

    def _name_running(self) -> str:
        """Return the environment that is running, such as ``"env 7"``, or an empty string."""
        k = self._running_cell[0]
        return f"env {self.first + k}" if k >= 0 else ""

    def _check_settings(self, guard: SettingsGuard) -> None:
        for name, culprit in guard.find_changes():
            self.warnings.append((
                f"settings: {name}",
                f"{culprit or 'an environment'} changed the {name} of its process, which {self.span} share: this may "
                "affect the others, so results may depend on the number of workers. num_workers=None gives each environment "
                "a process of its own",
            ))  # fmt: skip
        if guard.draws:
            self.warnings.append(("settings: generators", describe_draws("an environment", guard.draws)))

    def _check_clients(self) -> None:
        """Warn if several environments use the same client of a physics library. Checked once, when all have been reset."""
        if self._clients_checked or not all(self._used):
            return
        self._clients_checked = True
        if found := describe_shared_clients(self.count):
            self.warnings.append((
                "physics clients",
                f"{self.span} influence each other: {found}. Pass `physicsClientId` to every call, for example with "
                "pybullet_utils.bullet_client.BulletClient, or give each environment its own process with num_workers=None",
            ))  # fmt: skip

    def build(self) -> tuple[list[Failure], list[tuple[int, str, str]]]:
        """Build all environments. Return the failures, and (env, kind, repr of the space) for each mismatching space."""
        failures: list[Failure] = []
        mismatches: list[tuple[int, str, str]] = []
        first_ks: dict[int, int] = {}  # id of an environment -> its first position
        for k in range(self.count):
            self.note_running(k)
            if k == 1 and self.guard is not None:  # ignore the changes that the first one and its imports made
                self.guard.restart()
            try:
                env = self._build(k)
                first_k = first_ks.setdefault(id(getattr(env, "unwrapped", env)), k)
                if first_k != k:
                    raise same_object_error((self.first + first_k, self.first + k), env)
                mismatch = self.plan.expected.find_mismatch(env)
            except BaseException as error:
                self._reraise_interrupt(error)
                failures.append(Failure(self.first + k, error))
                continue
            if mismatch is not None:
                mismatches.append((self.first + k, *mismatch))
        if self.guard is not None:
            self._check_settings(self.guard)
        return failures, mismatches

    def _build(self, k: int) -> gymnasium.Env[Any, Any]:
        env: gymnasium.Env[Any, Any] = build_env(self.env_fns[k], self.first + k)
        self.envs[k] = env
        self._steps[k] = env.step
        self._used[k] = False
        return env

    def _offer_buffer(self, k: int, env: gymnasium.Env[Any, Any]) -> None:
        """Give a buffer to an environment that can write its observations in place."""
        accept_buffer = find_buffer_method(env)
        if accept_buffer is not None and self._tree is not None:
            self._in_place[0] = True
            self._use_current_batch()
            views = [leaf[k : k + 1].reshape(leaf.shape[1:]) for leaf in self._leaves]
            self._buffers[k] = self._tree.build(iter(views))
            accept_buffer(self._buffers[k])

    def _env(self, k: int) -> gymnasium.Env[Any, Any]:
        env = self.envs[k]
        if env is None:
            raise EnvFailed(f"env {self.first + k} failed earlier; reset() rebuilds it")
        return env

    # Replacements of a row's `env.step`, after a failure or the end of an episode.

    def _step_failed(self, k: int, _: Any) -> Any:
        return self._env(k)  # raises EnvFailed

    def _step_by_reset(self, k: int, _: Any) -> Any:
        """Reset the environment and ignore the action: the step after an episode's end in next-step mode."""
        self._steps[k] = self._env(k).step
        observation, info = self._auto_reset(k)
        return observation, 0.0, False, False, info

    def _step_finished(self, k: int, action: Any) -> Any:
        """Handle a step after the end of an episode, without autoreset: raise, or warn once and step."""
        text = (
            f"env {self.first + k} was stepped after the end of its episode: with autoreset_mode='Disabled', reset finished "
            "environments first, by reset(options={'reset_mask': done})"
        )
        if self.plan.refuses_finished:
            raise EpisodeOver(text)
        if not self._warned_of_finished:
            self._warned_of_finished = True
            self.warnings.append(("finished", f"{text}. It receives the action, as in Gymnasium's AsyncVectorEnv"))
        self._steps[k] = self._env(k).step
        return self._steps[k](action)

    def _step_after_reset(self, k: int, reset_due: bool) -> Callable[[Any], Any]:
        """Return the step function of a row after a reset or load. ``reset_due``: see :meth:`_is_reset_due`."""
        if not reset_due:
            return self._env(k).step
        is_disabled = self.plan.autoreset_mode is AutoresetMode.DISABLED
        return partial(self._step_finished if is_disabled else self._step_by_reset, k)

    def _reset(self, k: int, seed: Any, options: Any) -> tuple[Any, Any]:
        """Execute a requested reset. If the environment has failed, rebuild it first."""
        env = self.envs[k]
        env = self._build(k) if env is None else env
        if not self._used[k]:  # not before: its row may have a result of the environment that it replaces
            self._offer_buffer(k, env)
        return self._call_reset(k, env, seed, options)

    def _auto_reset(self, k: int) -> tuple[Any, Any]:
        """Execute an automatic reset, with the seed and options that were set for it."""
        if self.guard is not None:
            self.guard.on_reset()
        seed, options = self._next_episodes.pop(k, (None, None)) if self._next_episodes else (None, None)
        if seed is None and options is None:
            return unpack_reset(self._env(k).reset(), self.first + k)
        return self._call_reset(k, self._env(k), seed, options)

    def _call_reset(self, k: int, env: Any, seed: Any, options: Any) -> tuple[Any, Any]:
        is_shared = self._in_caller or self.count > 1
        own_options = None if options is None else dict(copy_if_possible(options) if is_shared else options)
        return unpack_reset(env.reset(seed=seed, options=own_options), self.first + k)

    def _is_reset_due(self, k: int) -> bool:
        """True if the row's episode has ended, so that its next step is an automatic reset or, without those, refused."""
        return getattr(self._steps[k], "func", None) in (self._step_by_reset, self._step_finished)

    def exit_if_forked(self) -> None:
        """End this process if it is a child that an environment forked and that has returned from the environment's code.

        Such a child must never write results into the rows, which belong to the worker.
        """
        if self.forked:
            os._exit(0)

    def _reraise_interrupt(self, error: BaseException) -> None:
        """Raise ``KeyboardInterrupt`` again if this is the caller's own process."""
        if self._in_caller and isinstance(error, KeyboardInterrupt):
            raise error

    def _convert_number(self, k: int, name: str, value: Any, kind: type[np.float64] | type[np.bool_]) -> Any:
        """Convert a reward or flag to ``kind``, as Gymnasium does; squeeze an array of size 1."""
        if isinstance(value, (np.bool_, np.floating, np.integer, int)):
            return kind(value)
        try:
            array = np.array(value, dtype=kind)
            if value is None and not self._returned_none:
                self._returned_none = True
                text = f"env {self.first + k} returned the {name} None, which becomes {kind(array)}, as in Gymnasium"
                self.warnings.append((f"{name} None", text))
            if array.size == 1:
                return kind(array.reshape(())[()])
            problem: Exception | None = None
        except (ValueError, TypeError) as error:
            problem = error
        raise ObservationError(
            f"env {self.first + k}: {name}: got {type(value).__name__} {value!r}, expected one {np.dtype(kind)}"
        ) from problem

    def close(self) -> Outcome:
        """Close all environments, even if some of them raise."""
        out = Outcome()
        for k in range(self.count):
            self.note_running(k)
            if (error := self._close_env(k)) is not None:
                out.failures.append(Failure(self.first + k, error))
        return out

    def release(self) -> None:
        """Drop the closed environments, and all references to shared memory. Idempotent."""
        self.__dict__.clear()
        self.envs, self.count = [], 0

    # -- stepping ---------------------------------------------------------------------------------------------------

    def requested_ks(self, seq: int) -> Array:
        """Return the positions ``k`` of the rows that message ``seq`` is about, in order."""
        ks: Array = (self._requested == seq).nonzero()[0]  # 3x faster than `flatnonzero`
        return ks

    def step(self, ks: list[int] | None, actions: Sequence[Any]) -> Outcome:
        """Step the environments of rows ``ks`` (``None``: all), in order."""
        if self._has_spares and self._current_cell[0] != self._current_batch:
            self._use_current_batch()
        steps, step_clock, began = self._steps, self._step_clock, None
        if step_clock.untimed:
            step_clock.untimed -= 1
        else:
            steps, began = step_clock.step_functions(steps), clock()
        if self._has_old_results:
            self._clear_results(ks)
        where: Sequence[int] = range(self.count)
        targets, write_results = self._targets, self._write_results
        if ks is not None:
            where, steps, write_results = ks, [steps[k] for k in ks], [write_results[k] for k in ks]
        out, on_episode_end, running = self._out, self._on_episode_end, self._running_cell
        forked = self.forked
        rewards, terminations, truncations = self._cells
        misfit = False
        for k, step, write_result, action in zip(where, steps, write_results, actions, strict=True):
            try:
                running[0] = k
                result = step(action)
                if forked:
                    os._exit(0)
                if write_result is not None and (written := write_result(result)):
                    if written == 2:  # with an info
                        self._has_old_results = out.columns = True
                    continue
                observation, reward, terminated, truncated, info = result
                # written first, because a reset in the same step may change the objects that the environment returned
                if reward.__class__ is not float:
                    reward = self._convert_number(k, "reward", reward, np.float64)
                rewards[k] = reward
                if terminated.__class__ is not bool or truncated.__class__ is not bool:
                    terminated = self._convert_number(k, "terminated", terminated, np.bool_)
                    truncated = self._convert_number(k, "truncated", truncated, np.bool_)
                terminations[k] = terminated
                truncations[k] = truncated
                if terminated or truncated:
                    observation, info = on_episode_end(k, observation, info, out)
                try:  # a fast path for observations of exactly the space's dtype and shape, except scalars
                    targets[k][:] = observation
                except (TypeError, ValueError, BufferError):  # `_store_observation` converts the observation, or raises
                    misfit = True
                if misfit:  # outside `except`, so that its errors have no misleading context
                    misfit = False
                    self._store_observation(k, observation, out)
                if info or info.__class__ is not dict:
                    self._store_info(k, info, out)
            except BaseException as error:
                self._record_failure(k, error, out)
        if began is not None:
            step_clock.count(clock() - began, len(steps))
        return self._finish()

    # Functions for the end of an episode, one per autoreset mode. They return the observation and info of the step.

    def _reset_next_step(self, k: int, observation: Any, info: Any, out: Outcome) -> tuple[Any, Any]:
        self._steps[k] = partial(self._step_by_reset, k)
        return observation, info

    def _reset_never(self, k: int, observation: Any, info: Any, out: Outcome) -> tuple[Any, Any]:
        self._steps[k] = partial(self._step_finished, k)
        return observation, info

    def _reset_same_step(self, k: int, observation: Any, info: Any, out: Outcome) -> tuple[Any, Any]:
        # Copied before the reset, because an environment may reuse the objects that it returned.
        info = copy_info(info, lists=True)
        final = self._keep_final(k, observation)
        reset_observation, reset_info = self._auto_reset(k)
        self.exit_if_forked()
        if reset_info.__class__ is not dict and not isinstance(reset_info, Mapping):
            kind = type(reset_info).__name__
            text = f"env {self.first + k}: reset() returned an info that is not a dict but a {kind}"
            self.warnings.append(("reset info", f"{text}; with same-step autoreset it is dropped"))
            reset_info = {}
        if "final_obs" not in reset_info:  # otherwise the reset's own wins, as in Gymnasium
            if final is WRITTEN:
                self._final[k] = True
                self._has_old_results = out.columns = True
            else:
                out.finals[self.first + k] = final
        return reset_observation, {"final_info": info, **reset_info}

    def _keep_final(self, k: int, observation: Any) -> Any:
        """Save an episode's last observation. Return ``WRITTEN`` if it is in shared memory, else a copy for the outcome."""
        if self._write_final_row is None or self._tree is None or self._tree.match(observation) is None:
            return deepcopy(observation)
        return self._write_final_row(k, observation)

    # -- resetting --------------------------------------------------------------------------------------------------

    def reset(self, ks: list[int] | None, seeds: Sequence[Any], options: Any, *, reset_due: bool = False) -> Outcome:
        """Reset the environments of rows ``ks``. Failed environments are rebuilt.

        Args:
            ks: The rows; ``None``: all.
            seeds: One per row of ``ks``.
            options: A dict or ``None`` for all environments, each of which receives its own copy; or a list with one per
                row of ``ks``.
            reset_due: True if the next step is an automatic reset (after a restart in next-step mode).
        """
        out = self._out = Outcome()  # an interrupted step may have left results in the previous one
        if self._has_spares and self._current_cell[0] != self._current_batch:
            self._use_current_batch()
        if self._has_old_results:
            self._clear_results(ks)
        if ks is None:
            self._infos.repeat_definitions()
        options_by_row = options if isinstance(options, list) else [options] * len(seeds)
        for k, seed, env_options in zip(range(self.count) if ks is None else ks, seeds, options_by_row, strict=True):
            try:
                self.note_running(k)
                observation, info = self._reset(k, seed, env_options)
                self.exit_if_forked()
                if self.guard is not None and self.guard.first_reset:  # ignore changes by the first reset
                    self.guard.restart()
                    self.guard.first_reset, self.guard.due = False, True
                self._steps[k] = self._step_after_reset(k, reset_due)
                self._used[k] = True
                self._store_observation(k, observation, out)
                if info or info.__class__ is not dict:
                    self._store_info(k, info, out)
            except BaseException as error:
                self._record_failure(k, error, out)
        self._check_clients()
        if self.guard is not None:
            self.guard.on_reset()
        return self._finish()

    def rebuild(self, ks: list[int], seeds: Sequence[Any], options: Any, *, reset_due: bool) -> Outcome:
        """Reset rows ``ks`` after failures; this builds environments that were closed when they raised.

        An environment that is still open although its row failed (its result could not be sent, or its info is not a dict)
        is closed first. A new process has just built its environments, so they are only reset.
        """
        for k in ks:
            if self._used[k]:
                self._discard_env(k)
        return self.reset(ks, seeds, options, reset_due=reset_due)

    # -- calls ------------------------------------------------------------------------------------------------------

    def call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Outcome:
        """Call the attribute ``name`` of every environment, or return it if it is not callable."""
        arguments = [(args, kwargs)] * self.count

        def call_row(k: int) -> Any:
            own_args, own_kwargs = self._own_value(k, arguments) if args or kwargs else (args, kwargs)
            return call_env(self._env(k), name, own_args, own_kwargs)

        return self._call_each(range(self.count), call_row)

    def set_attr(self, name: str, values: Sequence[Any]) -> Outcome:
        """Call ``env.set_wrapper_attr(name, value)``, with one value per row."""
        return self._call_each(range(self.count), lambda k: self._env(k).set_wrapper_attr(name, self._own_value(k, values)))

    def _own_value(self, k: int, values: Sequence[Any]) -> Any:
        """Return the value of row ``k``, for all but the last row a copy: values of several rows may share objects."""
        return values[k] if k == self.count - 1 else self._own_copy(values[k])

    def _own_copy(self, value: Any) -> Any:
        """Return a copy of a value for one of several environments; in the caller's own process, the value itself.

        So environments in workers do not share it, as in Gymnasium's class, unless it cannot be copied.
        """
        return value if self._in_caller or self.count == 1 else copy_if_possible(value)

    def set_next(self, pairs: Sequence[tuple[Any, Any] | None]) -> Outcome:
        """Set the seed and options of the next automatic reset, one pair per row; ``None``: no change."""

        chosen = {k: pair for k, pair in enumerate(pairs) if pair is not None}

        def set_row(k: int) -> None:
            self._env(k)  # raises if it failed
            self._next_episodes[k] = copy_if_possible(chosen[k])

        return self._call_each(list(chosen), set_row)

    def exec(self, ks: Sequence[int], function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Outcome:
        """Call ``function(env, *args, **kwargs)`` for the rows ``ks``."""
        arguments = args, kwargs

        def call_row(k: int) -> Any:
            own_args, own_kwargs = arguments if k == ks[-1] else self._own_copy(arguments)
            return function(self._env(k), *own_args, **own_kwargs)

        return self._call_each(ks, call_row)

    def _call_each(self, ks: Sequence[int], function: Callable[[int], Any], *, fatal: bool = False) -> Outcome:
        """Call ``function(k)`` for each of the rows ``ks``, and return the results.

        With ``fatal``, an environment is closed if its call fails, because its state is then unknown.
        """
        out = Outcome()
        for k in ks:
            try:
                self.note_running(k)
                out.results[self.first + k] = function(k)
            except BaseException as error:
                if self._in_caller and raised_by_handler(error):
                    raise _find_root_cause(error)  # noqa: B904 - it is one of the causes
                if fatal:
                    self._discard_env(k)
                out.failures.append(Failure(self.first + k, error, fatal=fatal))
        self.note_running(-1)
        return out

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _store_observation(self, k: int, observation: Any, out: Outcome) -> None:
        """Store an observation, unless the environment wrote it in place."""
        if observation is not None and observation is self._buffers[k]:
            return
        if (to_send := self._write_row(k, observation)) is not WRITTEN:
            out.observations[self.first + k] = to_send

    def _store_info(self, k: int, info: Any, out: Outcome) -> None:
        """Store an info that is not an empty dict."""
        self._has_old_results = True
        try:
            if info.__class__ is dict and self._infos.write(k, info):
                out.columns = True
            else:
                self._schemas[k] = BY_PICKLE
                out.infos[self.first + k] = copy_info(info)
        except RecursionError:
            raise RecursionError("info: it contains itself, or is nested too deeply") from None

    def _clear_results(self, ks: Sequence[int] | None) -> None:
        """Clear the infos and final flags of rows (``None``: all) before their next step or reset.

        Also clears ``columns`` of the outcome, which is reused.
        """
        self._out.columns = False
        if ks is None:
            self._schemas.fill(NO_INFO)
            self._final.fill(False)
            self._has_old_results = False
        else:
            self._schemas[ks] = NO_INFO
            self._final[ks] = False
            self._has_old_results = bool(self._schemas.any() or self._final.any())

    def _finish(self) -> Outcome:
        """Return the outcome of this message: ``_out`` if it has a payload, otherwise a shared constant.

        In the first case, the next message gets a new ``_out``.
        """
        if self.guard is not None and self.guard.due:
            self._check_settings(self.guard)
        self._running_cell[0] = -1  # the death of an idle worker is no environment's fault
        out = self._out
        if self.warnings:
            out.warnings.extend(self.warnings)
            self.warnings.clear()
        if out.columns:
            self._infos.add_new_definitions(out.schemas)
        if out.has_payload():
            self._out = Outcome()
            return out
        return COLUMNS_OUTCOME if out.columns else PLAIN_OUTCOME

    def _record_failure(self, k: int, error: BaseException, out: Outcome) -> None:
        self.exit_if_forked()
        row = self.first + k
        if isinstance(error, EpisodeOver):
            out.failures.append(Failure(row, error, fatal=False, refused=True))
            return
        self._discard_env(k)
        self._reraise_interrupt(error)
        out.failures.append(Failure(row, explain_bad_step(error, row) or error))
        out.observations.pop(row, None)
        out.infos.pop(row, None)

    def _discard_env(self, k: int) -> None:
        """Close an environment that must not be used any more, and clear the info and final flag of its row."""
        self._schemas[k] = NO_INFO
        self._final[k] = False
        self._close_env(k)

    def _close_env(self, k: int) -> BaseException | None:
        """Close an environment, and return the exception of its ``close()`` or ``None``.

        Its row in shared memory is not changed, because it may belong to another worker by now.
        """
        env, self.envs[k] = self.envs[k], None
        self._steps[k] = partial(self._step_failed, k)
        self._used[k] = False
        self._next_episodes.pop(k, None)
        try:
            if env is not None:
                env.close()
        except BaseException as error:
            self._reraise_interrupt(error)
            return error
        return None


class _BatchWriter(NamedTuple):
    """One of the batches of observations, with functions that write into the worker's rows of it.

    Attributes:
        leaves: The rows, one array per leaf.
        write_row: Checks an observation and writes it, or returns it to be sent.
        targets: One per row, for assignments ``target[:] = observation``.
        write_results: One per row, which writes the result of a step if it is of the usual kind; ``None`` for each if
            :func:`make_compiled_rows` returns no writers.
        compiled: The compiled writers with the methods in ``write_results``.
    """

    leaves: list[Array]
    write_row: ObservationWriter
    targets: list[Any]
    write_results: list[Callable[[Any], int] | None]
    compiled: Sequence[CompiledRow]


def _learn(rows: Sequence[CompiledRow], number: int, places: Places) -> None:
    for row in rows:
        row.learn(number, places)


class _ObservationTarget:
    """The target of assignments ``target[:] = observation`` for a row, unless it is one array in shared memory."""

    __slots__ = ("_k", "_rows")

    def __init__(self, rows: EnvRows, k: int) -> None:
        self._rows, self._k = rows, k

    def __setitem__(self, _: slice, observation: Any) -> None:
        self._rows._store_observation(self._k, observation, self._rows._out)


def copy_info(value: Any, *, lists: bool = False) -> Any:
    """Copy the parts of an info that Gymnasium copies into arrays, before any environment changes them.

    These are dicts and arrays. Other objects are not copied, because some, such as locks, cannot be.

    Args:
        value: The info, or a value in it.
        lists: Copy lists, tuples and sets too, and the dicts and arrays in them.
    """
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        items = {key: copy_info(item, lists=lists) for key, item in value.items()}
        if value.__class__ is dict:
            return items
        return call_with_fallback(partial(_copy_with, value, items), lambda _: value, Exception)
    if lists and value.__class__ in (list, tuple, set):
        return value.__class__(copy_info(item, lists=True) for item in value)
    return value


def _copy_with(value: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dict of the class of ``value``, with these items."""
    copied = copy(value)
    for key, item in items.items():
        copied[key] = item  # not `update`, which in a Counter adds the values
    return copied


def _find_root_cause(error: BaseException) -> BaseException:
    """Return the exception that caused an exception of vecenv, or ``error`` itself."""
    while isinstance(error, VecEnvError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _make_action_reader(tree: Tree | None, leaves: Sequence[Array], count: int) -> Callable[[Array | None], Sequence[Any]]:
    """Return a function that reads the actions of some rows (``None``: all): scalars, writeable arrays or trees of these."""

    def copies(leaf: Array, ks: Array | None) -> Sequence[Any]:
        """Return rows of a copy, never views of the shared memory."""
        return list(leaf.copy() if ks is None else leaf[ks])

    def scalars(ks: Array | None) -> Sequence[Any]:
        return list(leaves[0].flat if ks is None else leaves[0][ks].flat)  # 2x faster than the array's own iterator

    def trees(ks: Array | None) -> Sequence[Any]:
        assert tree is not None
        if not leaves:  # the only value of a space without parts
            return [tree.build(iter(())) for _ in range(count if ks is None else len(ks))]
        return [tree.build(iter(parts)) for parts in zip(*[copies(leaf, ks) for leaf in leaves], strict=True)]

    if tree is None or tree.leaf is None:
        return trees
    return scalars if leaves[0].ndim == 1 else partial(copies, leaves[0])


class StepClock:
    """A sampling clock for the steps of a worker, because timing a message takes more than a tenth of a CartPole step.

    The shorter the messages are, the fewer are timed. At least one in 32 is timed, so that a single long message never
    counts for more than 32.

    Args:
        row_seconds: Seconds of each row's latest timed step.
        seconds, steps: Cells of shared memory: this worker's time in steps, and the number of steps.

    Attributes:
        untimed: The number of messages to skip before the next timed one.
    """

    def __init__(self, row_seconds: Array, seconds: Any, steps: Any) -> None:
        self.untimed = 0
        self._row_seconds, self._seconds, self._steps = row_seconds, seconds, steps
        self._counted = 0  # number of timed messages
        self._weight = 1  # number of messages that the next timed one represents

    def step_functions(self, steps: list[Callable[[Any], Any]]) -> list[Callable[[Any], Any]]:
        """Return the rows' step functions for a timed message, occasionally timing each of them separately."""
        if self._counted % _SAMPLE_EVERY != 1:  # not the first one, which may load or compile code
            return steps
        return [self._timed(k, step) for k, step in enumerate(steps)]

    def count(self, elapsed: float, steps: int) -> None:
        """Count a timed message, weighted for the untimed ones before it."""
        self._seconds[0] += self._weight * elapsed
        self._steps[0] += self._weight * steps
        self.untimed = min(_MAX_UNTIMED, int(_LONG_MESSAGE_SECONDS / max(elapsed, 1e-9)))
        self._weight = self.untimed + 1
        self._counted += 1

    def add(self, elapsed: float, row_seconds: Iterable[tuple[int, float]]) -> None:
        """Add time spent outside of counted messages, and the seconds that the steps of single rows took in it."""
        self._seconds[0] += elapsed
        for k, seconds in row_seconds:
            self._row_seconds[k] = seconds

    def _timed(self, k: int, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        row_seconds = self._row_seconds

        def timed(action: Any) -> Any:
            began = clock()
            result = step(action)
            row_seconds[k] = clock() - began
            return result

        return timed
