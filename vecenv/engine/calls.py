"""Calls on the environments themselves: methods, attributes, functions, frames."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import cloudpickle

from vecenv.engine.answers import Answers, wait_name
from vecenv.engine.pending import Request, Worker, WorkerRequest
from vecenv.front.arguments import deadline_of
from vecenv.link.messages import Op
from vecenv.state.snapshots import Row

__all__ = ["Calls"]


class Calls(Answers):
    """What an engine does for calls that are no step and no reset. Arguments were checked, and nothing is pending."""

    def episodes_of(self, row: int) -> Any:
        """Where the seeds of a row's episodes come from; ``None``: its environment draws them."""

    def were_loaded(self, known: Mapping[int, Row]) -> None:
        """These rows go on from snapshots. It may be done again."""

    def begin_call(self, name: str, args: Any, kwargs: Any) -> None:
        """Call a method, or read an attribute, of every environment."""
        payload = (name, args, kwargs)
        self._require_picklable(payload)
        self.ask_call(Op.CALL, lambda worker: payload, "call")

    def begin_exec(self, func: Callable[..., Any], rows: Collection[int], args: Any, kwargs: Any) -> None:
        """Call a function with each of some environments."""
        self._require_picklable((func, args, kwargs))
        chosen = set(rows)

        def payload(worker: Worker) -> Any:
            ks = [row - worker.rows[0] for row in worker.rows if row in chosen]
            return (ks, func, args, kwargs) if ks else None

        self.ask_call(Op.EXEC, payload, "exec_func")

    def begin_set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Set an attribute of every environment."""
        self._require_picklable(values)
        self.ask_call(Op.SET_ATTR, lambda worker: (name, [values[row] for row in worker.rows]), "set_attr")

    def begin_set_next(self, rows: Collection[int], given: Sequence[Any]) -> None:
        """Give some environments the seed and the options of their next episode, of which there are some for every row."""
        self._require_picklable(given)
        chosen = set(rows)

        def payload(worker: Worker) -> Any:
            own = [given[row] if row in chosen else None for row in worker.rows]
            return own if any(item is not None for item in own) else None

        self.ask_call(Op.SET_NEXT, payload, "set_next_options")

    def call_answer(self, timeout: float | None) -> Any:
        """The answer to the call that is pending: one result an environment, or what its sequel makes of them.

        Raises:
            StepTimeout: Not within ``timeout`` seconds; the answer is still pending.
            Exception: What the call raised in an environment.
        """
        return self.answer_by(deadline_of(timeout), timeout)

    def answer_by(self, deadline: float | None, timeout: float | None) -> Any:
        """As :meth:`call_answer`, by a moment that was ``timeout`` seconds away when the call was made."""
        call = self.call
        assert call is not None
        sequel, command = call.sequel, call.command
        finished = self.finish(call, deadline)
        del call  # it holds the exception, whose traceback would hold it
        if finished is None:
            raise self.too_late(wait_name(command), timeout)
        result, error = finished
        if error is not None:
            try:
                self.raise_answer(error)
            finally:
                del error, finished
        if sequel is None:
            return tuple(result.results.get(row) for row in range(self.num_envs))
        return sequel(result, deadline, timeout)

    def ask_call(
        self,
        op: Op,
        payload_of: Callable[[Worker], Any],
        command: str,
        *,
        sequel: Any = None,
        alone: bool = False,
        workers: Sequence[Worker] | None = None,
    ) -> None:
        """A call that is no step and no reset; workers for which ``payload_of`` gives ``None`` are left out.

        Args:
            op, command: Which.
            payload_of: What goes with it.
            sequel: See :class:`~vecenv.engine.pending.Request`.
            alone: It takes the place of the call whose sequel it is, at once.
            workers: The workers to ask; ``None``: those that have rows.
        """
        asked = [(worker, payload) for worker in workers or self.pool.workers if (payload := payload_of(worker)) is not None]
        if dead := [row for worker, _ in asked if worker.death is not None for row in worker.rows]:
            self.ledger.refuse({row: self.failed.get(row, "its worker died") for row in dead})
        request = Request(self.pool.next_seq(), command, ())
        request.parts = {
            worker.index: self.pool.stage(WorkerRequest(worker, worker.rows, op, payload), request.seq)
            for worker, payload in asked
        }
        request.workers = tuple(part.worker for part in request.parts.values())
        request.sequel = sequel
        self.pool.ask(request, alone=alone)

    def _require_picklable(self, payload: Any) -> None:
        """Arguments that cannot travel are the caller's to know, before anything is sent."""
        if not all(worker.local for worker in self.pool.workers):
            cloudpickle.dumps(payload)
