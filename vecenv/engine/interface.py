"""Gymnasium's vector interface over an engine.

Everything a program written for ``gymnasium.vector.AsyncVectorEnv`` can see is honoured here: arguments and their order,
attributes, the phases and their errors, how seeds, masks, actions, infos and copies behave. What is done differently is what
hurts there: an answer is never given to another question, a failed environment does not take the others along, and closing
always ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
from gymnasium.core import ActType, ObsType
from gymnasium.error import AlreadyPendingCallError

from vecenv.engine import published
from vecenv.engine.attributes import Attributes
from vecenv.engine.keeping import Keeping
from vecenv.engine.owner import EngineOwner
from vecenv.engine.pending import Request, Result
from vecenv.front.arguments import ResetOptions, count_of, env_ids_of, least_of, reset_mask_of, seeds_of
from vecenv.front.deadlines import seconds_of
from vecenv.front.guard import exclusive
from vecenv.front.phases import Phase, advance

__all__ = ["EngineVectorEnv"]

R = TypeVar("R")


class EngineVectorEnv(Keeping, Attributes, EngineOwner[ObsType, ActType]):  # type: ignore[misc]  # as Gymnasium's, and guarded
    """What callers see of an engine, whatever its workers are: processes, the calling process, hosts on other machines."""

    # -- reset ------------------------------------------------------------------------------------------------------

    @exclusive
    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: ResetOptions = None,
    ) -> tuple[ObsType, dict[str, Any]]:
        """Reset all environments, or those of ``options["reset_mask"]``; see :meth:`reset_async`."""
        self._begin_reset(seed, options, None)
        return self._reset_answer(None)

    @exclusive
    def reset_async(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: ResetOptions = None,
        *,
        env_id: Any = None,
    ) -> None:
        """Begin a reset. The answer is fetched by :meth:`reset_wait` for all environments, or by :meth:`recv` as it comes.

        Args:
            seed: An int gives environment i ``seed + i``; a sequence gives each its own; ``None`` none.
            options: Handed to every environment, except ``"reset_mask"``, a bool array ``(num_envs,)``: only those
                environments are reset, the others keep their last observation. Environments that failed are built anew; one
                that the mask leaves out has an observation of zeros meanwhile, as it may have been written in part. A
                sequence of ``num_envs`` dicts (or ``None``) gives each its own.
            env_id: Only these environments, which must not be in flight, while others may be; :meth:`recv` fetches the
                answers. A sequence of seeds, or of options, has one for each of them, in their order.

        Raises:
            TypeError, ValueError: Seeds, options, mask or indices of the wrong length, type or shape; nothing was sent.
            AlreadyPendingCallError: A call is pending; with ``env_id``, one of these environments is in flight.
        """
        self._begin_reset(seed, options, env_id)

    def _begin_reset(self, seed: Any, options: ResetOptions, env_id: Any) -> None:
        rows = None if env_id is None else env_ids_of(env_id, self.num_envs).tolist()
        seeds = seeds_of(seed, self.num_envs, rows)
        if (phase := self._driver.phase) is not Phase.DEFAULT:
            advance(phase, "reset_async", self)
        mask, options = reset_mask_of(options, self.num_envs, rows)
        if rows is not None:
            if mask is not None:
                raise ValueError("env_id and options['reset_mask'] both say which environments are to be reset: give one")
            self._require_idle("reset_async", rows)
        if self._driver.card is None and published.asked_for(self._driver):
            self._publish(None)
        if rows is None:
            self._driver.ask_reset(seeds, options, mask)
        else:
            self._driver.ask_reset_rows(rows, seeds, options)

    @exclusive
    def reset_wait(self, timeout: float | None = None) -> tuple[ObsType, dict[str, Any]]:
        """Fetch the answer to :meth:`reset_async`.

        Raises:
            StepTimeout: Not within ``timeout`` seconds; the answer is still owed, call again.
            Exception: What an environment raised.
        """
        return self._reset_answer(timeout)

    def _reset_answer(self, timeout: float | None) -> tuple[ObsType, dict[str, Any]]:
        result = self._finish("reset_wait", Phase.WAITING_RESET, timeout)
        engine = self._driver
        if engine.card is not None:
            engine.card.update()
        try:
            return engine.store.batch(self.copy), engine.infos(result)
        except Exception as error:
            self._blame(error, lambda: (engine.store.batch(self.copy), engine.infos(result)))
            raise

    # -- step -------------------------------------------------------------------------------------------------------

    @exclusive
    def step(
        self, actions: ActType
    ) -> tuple[ObsType, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]]:
        """Step all environments; see :meth:`step_async` and :meth:`step_wait`."""
        return self._step_answer(self._told(self._driver.finish(self._ask_step(actions), None)))

    @exclusive
    def step_async(self, actions: ActType) -> None:
        """Begin a step.

        Args:
            actions: A batch of ``action_space``, or whatever ``gymnasium.vector.utils.iterate`` takes for it. Each
                environment gets its action as it is passed here, uncast and unclipped, as an array of its own.

        Raises:
            TypeError, ValueError: Wrong structure, too few or too many; nothing was sent.
            EnvFailed: An environment that failed was not reset since.
        """
        self._ask_step(actions)

    def _ask_step(self, actions: ActType) -> Request:
        engine = self._driver
        if engine.pending.requests or engine.pending.ready:
            advance(engine.phase, "step_async", self)
            engine.require_no_rows("step_async")
        if engine.failed and not engine.policy.restart:
            engine.ledger.refuse(engine.failed)
        return engine.ask_step(engine.stage.put(actions))

    @exclusive
    def step_wait(
        self, timeout: float | None = None
    ) -> tuple[ObsType, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]]:
        """Fetch the answer to :meth:`step_async`.

        Raises:
            StepTimeout: Not within ``timeout`` seconds; the answer is still owed, call again.
            WorkerDied: A worker process ended; the next ``reset()`` starts it anew.
            Exception: What an environment raised, after all the others have been stepped.
        """
        return self._step_answer(self._finish("step_wait", Phase.WAITING_STEP, timeout))

    _halves: ClassVar[dict[str, Any]] = {
        "step_async": step_async, "step_wait": step_wait, "reset_async": reset_async, "reset_wait": reset_wait,
        **{name: vars(Attributes)[name] for name in ("call_async", "call_wait", "exec_func_send", "exec_func_fetch")},
    }  # fmt: skip

    def _step_answer(
        self, result: Result
    ) -> tuple[ObsType, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]]:
        engine = self._driver
        batch = engine.batch
        if engine.card is not None:
            engine.card.update()
        try:
            return (
                engine.store.batch(self.copy),
                batch.rewards.copy(),
                batch.terminations.copy(),
                batch.truncations.copy(),
                engine.infos(result) if result.columns else {},
            )
        except Exception as error:
            self._blame(error, lambda: (engine.store.batch(self.copy), engine.infos(result)))
            raise

    def _blame(self, error: Exception, again: Callable[[], object]) -> None:
        """What environments said does not go together, unless it does at the second look: then somebody interrupted."""
        try:
            again()
        except Exception as same:
            if type(same) is type(error):
                self._driver.pending_error = error

    def _finish(self, method: str, wanted: Phase, timeout: float | None) -> Result:
        """The answer to the call that is pending."""
        call = self._driver.call
        if call is None or call.phase is not wanted:
            advance(self._driver.phase, method, self)
        assert call is not None
        try:
            return self._told(self._driver.finish(call, seconds_of(timeout)))
        finally:
            del call  # it holds the exception, whose traceback would hold it

    def _told(self, answer: tuple[R, Exception | None]) -> R:
        """What there is to be dressed; or the exception that is the answer, raised where no frame keeps it."""
        if answer[1] is None:
            return answer[0]
        self._driver.pending_error = answer[1]
        try:
            raise answer[1]
        finally:
            del answer

    # -- first-ready batches ----------------------------------------------------------------------------------------

    @exclusive
    def send(self, actions: Any, env_id: Any = None) -> None:
        """Step some idle environments, without waiting.

        Args:
            actions: A batch of as many actions as there are environments in ``env_id``, in its order.
            env_id: Which environments, distinct indices; ``None``: those of the latest :meth:`recv`, or all at first.

        Raises:
            ValueError: Indices out of range or twice, or a number of actions that does not go with them.
            AlreadyPendingCallError: One of them is in flight, or was not received yet.
            EnvFailed: One of them failed and was not reset since.
        """
        engine = self._driver
        if engine.call is not None:
            advance(engine.phase, "step_async", self)
        rows = engine.pending.latest if env_id is None else env_ids_of(env_id, self.num_envs)
        listed = rows.tolist()
        self._require_idle("send", listed)
        if engine.failed and not engine.policy.restart and (failed := engine.failed.keys() & set(listed)):
            engine.ledger.refuse({row: engine.failed[row] for row in failed})
        engine.ask_rows(listed, engine.stage.put_some(actions, rows))

    def _require_idle(self, method: str, rows: Sequence[int]) -> None:
        """None of these environments is in flight."""
        driver = self._driver
        if driver.pending.requests or driver.pending.ready:
            on_their_way = set(driver.waiting())
            if waiting := [row for row in rows if row in on_their_way]:
                raise AlreadyPendingCallError(
                    f"Calling `{method}` for envs {waiting}, which are still in flight: `recv` them first.", "send"
                )

    @exclusive
    def recv(
        self,
        timeout: float | None = None,
        *,
        count: int | None = None,
        at_least: int | None = None,
        within: float | None = None,
    ) -> tuple[Any, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]]:
        """The next ``count`` environments that are done, in the order in which they were done.

        Args:
            timeout: Seconds to wait at most.
            count: How many, 1 to ``num_envs``; ``None``: ``batch_size``.
            at_least: That many are enough once ``within`` seconds have passed; the others stay in flight. Default 1 where
                ``within`` is given.
            within: Seconds from the call on; default 0 where ``at_least`` is given: what is there, as soon as it is
                that many. Where fewer than ``count`` are in flight, it waits for no more than these.

        Returns:
            What ``step`` returns, with ``count`` rows instead of ``num_envs``, all of them fresh arrays.
            ``infos["env_id"]``, int ``(count,)``, tells which environments they are. Environments come in the order in
            which they finished. Rows of a reset have reward 0 and both flags False.

        Raises:
            NoAsyncCallError: Fewer than ``count`` environments, or than are enough, are in flight or ready.
            TypeError, ValueError: ``timeout``, ``count``, ``at_least`` or ``within`` without a meaning.
            StepTimeout: Not within ``timeout`` seconds; nothing is lost, call again.
            Exception: What an environment raised; the rows of the others are kept for the next call.
        """
        engine = self._driver
        number = self.batch_size if count is None else count_of(count, self.batch_size, self.num_envs)
        least = None if at_least is within is None else least_of(at_least, within, number)
        if (call := engine.call) is not None:
            if call.phase is not Phase.WAITING_RESET:
                advance(call.phase, "reset_async", self)
            engine.launch(call)
        rows, infos, finals = self._told(engine.receive(number, seconds_of(timeout), least))
        if self._driver.card is not None:
            self._driver.card.update()
        batch = engine.batch
        try:
            said = engine.infos_of(rows, infos, finals)
            observations = engine.store.take(rows)
        except Exception as wrong:
            self._blame(wrong, lambda: (engine.infos_of(rows, infos, finals), engine.store.take(rows)))
            raise
        said["env_id"], said["_env_id"] = rows.copy(), rows >= 0
        return observations, batch.rewards[rows], batch.terminations[rows], batch.truncations[rows], said

    @exclusive
    def abandon(self, env_id: Any) -> None:
        """Wait no longer for some environments: the workers that owe their answers are killed.

        What these were asked is answered by :class:`~vecenv.errors.WorkerDied`, of all their environments; or, with
        ``on_failure="restart"``, by rows of new ones. Those that owe nothing, and the calling process, are left alone.

        Args:
            env_id: Which environments, distinct indices.

        Raises:
            ValueError: Indices out of range or twice.
        """
        rows = set(env_ids_of(env_id, self.num_envs).tolist())
        late = [
            worker
            for worker in self._pool.workers
            if not worker.local and not rows.isdisjoint(worker.rows) and self._driver.is_pending(worker)
        ]
        self._driver.end_late(late, None)

    # The second set of names: the same methods.

    reset_send = reset_async
    reset_fetch = reset_wait
    step_send = step_async
    step_fetch = step_wait
