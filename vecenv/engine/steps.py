"""Steps: actions on their way in, and answers on their way out, of a call as a whole or row by row.

A call is made in one step and taken in another. *Asking* writes what it is about, and then puts a request into the table
(:mod:`vecenv.engine.pending`); before that nothing has happened. *Answering* computes, from what lies in the table, what the
caller gets and what the table is to be afterwards (``next_pending``); the guard puts that in place when it hands the answer
over. How far answering has got stands in the table, too, so that an interrupted wait goes on where it stopped.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np
from gymnasium import Space, logger, spaces
from gymnasium.error import AlreadyPendingCallError, CustomSpaceError, NoAsyncCallError
from gymnasium.vector.utils import batch_space, iterate

from vecenv.engine.pending import (
    ALL,
    COLUMNS,
    NOTHING,
    ONLY_COLUMNS,
    PLAIN,
    Answer,
    Pending,
    Request,
    Result,
    Settlement,
    Worker,
    WorkerRequest,
)
from vecenv.engine.recovery import Recovery
from vecenv.front.arguments import deadline_of, env_ids_of, wrong_shape
from vecenv.front.driver import Phase, Stepped, advance, still_pending
from vecenv.link.infos import NO_INFO
from vecenv.link.messages import Op, decode_outcome
from vecenv.recording.recorder import Recorder
from vecenv.shm import Layout, Tree
from vecenv.shm.layout import Array
from vecenv.system.supervision import place

Received: TypeAlias = tuple[Array, dict[int, Any], dict[int, Any]]
"""Rows, and by row the infos and the last observations that came with them by pickle."""
_Seen: TypeAlias = dict[tuple[int, int], Request]
"""Answers that were looked at, as in :attr:`~vecenv.engine.pending.Pending.arrived`."""


# -- actions on their way in -------------------------------------------------------------------------------------------
#
# An environment gets what ``gymnasium.vector.utils.iterate`` would give it: type, dtype and shape as the caller passed.
# Only a batch whose containers, dtypes and shapes are the action space's to the letter can take the fast way without
# changing that; lists, generators, other dtypes, ``Text`` and the like go by pickle. Either way everything is checked before
# anything is sent.

class ActionStage:
    """Puts batches of actions where the workers find them.

    Args:
        single_space: Action space of one environment.
        space: Its batch.
        num_envs: Number of environments.
        tree: Structure of one action of fixed size, else ``None``.
        leaves: The shared arrays, a row per environment.
    """

    def __init__(
        self, single_space: Space[Any], space: Space[Any], num_envs: int, tree: Tree | None, leaves: list[Array] | None
    ) -> None:
        self._single_space = single_space
        self._spaces = {num_envs: space}
        self._num_envs = num_envs
        self._tree = tree
        self._leaves = leaves or []
        self._warned = False
        leaf = tree.leaf if tree is not None else None  # an action space of one array: the common case
        self._dtype = leaf.dtype if leaf is not None else None
        self._shape = (num_envs, *leaf.shape) if leaf is not None else None

    def put(self, actions: Any) -> list[Any] | None:
        """Stage one action for every environment; ``None`` if they are in shared memory, else the actions themselves.

        Raises:
            TypeError, ValueError: The structure is wrong, or there are too few or too many. Nothing was written.
        """
        if actions.__class__ is np.ndarray and actions.shape == self._shape:
            dtype = actions.dtype
            if dtype is self._dtype or dtype == self._dtype:  # `==` is three times the price, and samples of a space need it
                self._leaves[0][...] = actions
                return None
        return self.put_some(actions, ..., self._num_envs)

    def put_some(self, actions: Any, rows: Any, count: int) -> list[Any] | None:
        """Stage one action for each of ``rows``, in their order, which are that many; results as of :meth:`put`."""
        if self._tree is not None:
            exact = self._tree.exact(actions, count)
            if exact is not None:
                for leaf, values in zip(self._leaves, exact, strict=True):
                    leaf[rows] = values
                return None
        return self._split(actions, count)

    def _split(self, actions: Any, count: int) -> list[Any]:
        space = self._spaces.get(count)
        if space is None:
            space = self._spaces[count] = batch_space(self._single_space, count)
        _check_counts(self._single_space, space, actions, count, "actions")
        if not self._warned and hasattr(actions, "__array__") and not isinstance(actions, np.ndarray):
            self._warned = True
            logger.warn(
                f"actions are a {type(actions).__module__.partition('.')[0]} {type(actions).__name__}, and so is what each "
                "environment gets, as in Gymnasium; many take NumPy's values only. Pass numpy.asarray(actions): faster, too"
            )
        try:
            items = list(iterate(space, actions))
        except CustomSpaceError as error:  # Gymnasium makes one of whatever is raised, a signal handler's exception as well
            if error.__cause__ is None or isinstance(error.__cause__, TypeError):
                raise
            raise error.__cause__  # noqa: B904 - it is the one that was raised
        if len(items) != count:
            raise ValueError(f"got {len(items)} actions for {count} environments; nothing was sent")
        return items


def _check_counts(single: Space[Any], space: Space[Any], actions: Any, count: int, name: str) -> None:
    """Every leaf of a structured batch has a row per environment; ``zip`` would silently drop what one leaf has too many.

    What holds the parts may be anything that has them by their keys, as for ``iterate``: a list is as good as a tuple.
    """
    if isinstance(space, spaces.Dict) and isinstance(single, spaces.Dict):
        parts = [_part(actions, key) for key in space.spaces]
        if any(part is _MISSING for part in parts):
            got = f"a dict with {list(actions)}" if isinstance(actions, dict) else type(actions).__name__
            raise ValueError(f"{name}: got {got}, wanted a dict with {list(space.spaces)}; nothing was sent")
        for key, part in zip(space.spaces, parts, strict=True):
            _check_counts(single.spaces[key], space.spaces[key], part, count, f"{name}[{key!r}]")
    elif isinstance(space, spaces.Tuple) and isinstance(single, spaces.Tuple):  # of others, a batch is a tuple as well
        size = len(space.spaces)
        parts = [_part(actions, index) for index in range(size)]
        if any(part is _MISSING for part in parts) or (isinstance(actions, Sized) and len(actions) != size):
            length = f" of {len(actions)}" if isinstance(actions, Sized) else ""
            raise ValueError(f"{name}: got a {type(actions).__name__}{length}, wanted a tuple of {size}; nothing was sent")
        for index, part in enumerate(parts):
            _check_counts(single.spaces[index], space.spaces[index], part, count, f"{name}[{index}]")
    elif not _can_iterate(actions) or getattr(actions, "shape", None) == ():
        got = "a scalar" if getattr(actions, "shape", None) == () else f"{type(actions).__name__} {actions!r}"
        raise TypeError(f"{name}: got {got}, wanted {count}, one per environment; nothing was sent")
    elif isinstance(actions, Sized) and len(actions) != count:
        raise ValueError(f"{name}: got {len(actions)}, wanted {count}, one per environment; nothing was sent")
    elif type(single) in _ARRAYS and (shape := _shape_of(actions)) not in (None, wanted := (count, *(single.shape or ()))):
        raise wrong_shape(name, shape, wanted)


_ARRAYS: Final = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_MISSING: Final = object()


def _can_iterate(actions: Any) -> bool:
    """Whether ``iter`` takes it: also what has no ``__iter__``, but items by their index."""
    return isinstance(actions, Iterable) or hasattr(type(actions), "__getitem__")


def _shape_of(actions: Any) -> tuple[int, ...] | None:
    """The shape of an array; ``None``: it is none. What is in a list goes to the environments as it is, as in Gymnasium."""
    shape = getattr(actions, "shape", None)
    return tuple(shape) if isinstance(shape, tuple) and getattr(actions, "dtype", None) != np.dtype(object) else None


def _part(actions: Any, key: Any) -> Any:
    try:
        return actions[key]
    except (KeyError, IndexError, TypeError, ValueError):  # ValueError: an array without such a field
        return _MISSING


class Steps(Recovery):
    """What an engine does with steps, and with answers of any kind.

    Attributes:
        stage: Puts actions where workers find them.
        rows_at_once: At most that many rows of one worker in one message of a ``send``; ``None``: all it is about.
        said: Warnings of environments by name, each of which is given once.
        recorder: Notes what is answered, for files about what fails; ``None``: there is none.
        card: The file that ``vecenv top`` reads, where there is one.
    """

    layout: Layout
    stage: ActionStage
    rows_at_once: int | None = None
    said: dict[str, str]
    recorder: Recorder | None = None
    card: Any = None

    # -- asking -------------------------------------------------------------------------------------------------------

    def step(self, actions: Any) -> None:
        pending = self.pending
        if pending.requests or pending.ready:
            self.require_idle("step_async")
        if self.recorder is not None and self.recorder.due:
            self.recorder.snapshot(self.store.row)
        if self.failed and not self.policy.restart:
            self.ledger.refuse(self.failed)
        self.ask_step(self.stage.put(actions))

    def ask_step(self, actions: list[Any] | None) -> None:
        """Step every row. ``actions``: one per row, or ``None`` if they are in shared memory."""
        failed = self.failed
        if actions is None and not failed:
            self.pool.ask_plain_step()
            return
        if failed and not self.policy.restart:
            self.ledger.refuse(failed)
        rows = range(self.num_envs)
        request = self._request(
            "step", Op.STEP, Op.STEP_SOME, rows, lambda mine: actions and [actions[row] for row in mine]
        )  # fmt: skip
        self.pool.ask(request)

    def send(self, actions: Any, env_id: Any) -> None:
        if self.call is not None:
            advance(self.phase, "step_async", self)
        rows = self.pending.latest if env_id is None else env_ids_of(env_id, self.num_envs)
        listed = rows.tolist()
        self._require_not_in_flight("send", listed)
        if self.failed and not self.policy.restart and (failed := self.failed.keys() & set(listed)):
            self.ledger.refuse({row: self.failed[row] for row in failed})
        self.ask_rows(listed, self.stage.put_some(actions, rows, len(listed)))

    def _require_not_in_flight(self, method: str, rows: Sequence[int]) -> None:
        if self.pending.requests or self.pending.ready:
            in_flight = set(self.waiting())
            if not in_flight.isdisjoint(rows):
                waiting = [row for row in rows if row in in_flight]
                raise AlreadyPendingCallError(
                    f"Calling `{method}` for envs {waiting}, which are still in flight: `recv` them first.", "send"
                )

    def ask_rows(self, rows: Sequence[int], actions: list[Any] | None) -> None:
        """Step some rows, to be received one by one. ``actions`` in their order; ``None``: they are in shared memory."""
        of_row = None if actions is None else dict(zip(rows, actions, strict=True))

        def payload_of(mine: list[int]) -> Any:
            return of_row and [of_row[row] for row in mine]

        some, ordered = Op.STEP_SOME, sorted(rows)
        if self.rows_at_once is None:
            self.pool.ask(self._request("step", some, some, ordered, payload_of, by_row=True))
            return
        messages = self._in_messages(ordered, self.rows_at_once)
        first, *others = [self._request("step", some, some, mine, payload_of, by_row=True) for mine in messages]
        self.pool.ask(first, others)

    def _in_messages(self, rows: list[int], most: int) -> list[list[int]]:
        """Rows in order, parted so that each part has ``most`` of one worker: it goes on while the caller reads."""
        parts: list[list[int]] = []
        began = 0
        for worker in self.pool.workers:
            ended = bisect_left(rows, worker.rows.stop, began)
            for number, first in enumerate(range(began, ended, most)):
                if number == len(parts):
                    parts.append([])
                parts[number] += rows[first : min(first + most, ended)]
            began = ended
        return parts

    def ask_some(self, command: str, op: Op, rows: Sequence[int], payload_of: Callable[[list[int]], Any]) -> None:
        """Ask about some rows, in words of one's own."""
        self.pool.ask(self._request(command, op, op, rows, payload_of), alone=command == "reset")

    def _request(
        self, command: str, whole: Op, some: Op, rows: Sequence[int], payload_of: Callable[[list[int]], Any], *,
        by_row: bool = False, **about: Any,
    ) -> Request:  # fmt: skip
        """What the workers of some rows are to be asked, each about its own; those that have failed are left out of a step.

        Args:
            command: What it is called.
            whole, some: The message about all rows of a worker, and that about some.
            rows: Which, in order.
            payload_of: What goes with the message about some of them.
            by_row: They are received one by one.
            about: Other attributes of the request.
        """
        left = list(rows)
        if lost := [row for row in left if row in self.failed] if self.failed and command == "step" else []:
            left = [row for row in left if row not in self.failed]
        parts: list[WorkerRequest] = []
        began = 0
        for worker in self.pool.workers:  # in the order of their rows
            ended = bisect_left(left, worker.rows.stop, began)
            if ended > began:
                mine = left[began:ended]
                op = some if len(mine) < len(worker.rows) else whole
                parts.append(WorkerRequest(worker, mine, op, payload_of(mine)))
                began = ended
        request = self.composed(command, parts)
        request.by_row, request.lost = by_row, lost
        self.batch.requested[left] = request.seq
        if command == "step":
            request.steps = len(left)
        elif command == "reset":
            request.resets = len(left)
        for name, value in about.items():
            setattr(request, name, value)
        return request

    # -- the answer to a call as a whole ------------------------------------------------------------------------------

    def answer(self, kind: Phase, deadline: float | None) -> Stepped | None:
        request = next(iter(self.pending.requests.values()))
        finished = self.finish(request, deadline)
        if finished is None:
            return None
        result, error = finished
        if error is not None:
            try:
                self.raise_answer(error)
            finally:
                del error, finished, request  # they hold the exception, whose traceback would hold them
        if self.card is not None:
            self.card.update()
        batch = self.batch
        try:
            infos = self.infos(result) if result.columns else {}
            observations = self.store.batch(self.copies)
        except Exception as wrong:
            self._confirm(wrong, lambda: (self.store.batch(self.copies), self.infos(result)))
            raise
        if kind is Phase.WAITING_RESET:
            return observations, None, None, None, infos
        return observations, batch.rewards.copy(), batch.terminations.copy(), batch.truncations.copy(), infos

    def finish(self, request: Request, deadline: float | None) -> tuple[Result, Exception | None] | None:
        """Wait for the answers to a call: what they come to, and the exception that is to be raised.

        ``next_pending`` is the table without the call, for the guard.

        Args:
            request: The call.
            deadline: Of ``time.monotonic()``.

        Returns:
            ``None`` where the answers are not there by then; the call is still pending.

        Raises:
            StepTimeout: Not within the engine's own ``step_timeout``; the call is still pending.
        """
        if len(request.answers) < len(request.workers) and not self.wait_for(request, deadline):
            return None
        result = NOTHING
        for answer in request.answers.values():
            if answer is not PLAIN:
                result = COLUMNS
                if answer is not ONLY_COLUMNS:
                    break
        else:
            if not request.lost and request.command == "step":
                if self.policy.restart:
                    self.remembered.keep(range(self.num_envs), all_rows=True)
                if self.recorder is not None:
                    if request.parts is None:  # as `answered` does, one call less of every step
                        self.recorder.stepped(request.seq)
                    else:
                        self.recorder.answered(request)
                now, then = self.pending, Pending()  # as `emptied` does
                then.requests, then.latest, then.steps, then.resets = {}, now.latest, now.steps + request.steps, now.resets
                self.next_pending = then
                return result, None
        settlement = self.settlement_of(request)
        if self.recorder is not None:
            self.recorder.answered(request)
        error = self.resolve(settlement)
        if error is None and self.policy.restart and request.command in ("step", "reset"):
            self.remembered.keep(range(self.num_envs), all_rows=True)
        self.next_pending = self.emptied(request.steps, request.resets)
        assert settlement.result is not None
        try:
            return settlement.result, error
        finally:
            del settlement, error  # in this process the exception's frames hold this one

    def wait_for(self, request: Request, deadline: float | None) -> bool:
        """Wait for all answers to a call; whether they are there by the deadline.

        Raises:
            StepTimeout: There is no deadline, and they did not come within the engine's own ``step_timeout``.
        """
        limit = self.policy.step_timeout if deadline is None and request.command in ("step", "reset") else None
        if limit is not None:
            deadline = deadline_of(limit)
        late = self.pool.gather(request, deadline)
        if late and limit is None:
            return False
        if late:
            self.end_hanging(late, wait_name(request.command), limit)
        return True

    def raise_answer(self, error: Exception) -> NoReturn:
        """Raise the exception that is the answer to a call, where no frame keeps it."""
        self.pending_error = error
        try:
            raise error
        finally:
            del error

    def end_hanging(self, late: Sequence[Worker], method: str, limit: float | None) -> None:
        """The engine's ``step_timeout`` is over: end the workers that hang, if they are to be started anew.

        Raises:
            StepTimeout: They are not.
        """
        if not self.policy.restart:
            error = self.too_late(method, limit)
            self.ledger.record_late(error, late, limit, self.pending.requests.values())
            raise error
        self.end_late(late, limit)

    def settlement_of(self, request: Request) -> Settlement:
        """The answers to a call, read."""
        settlement = self.settlement(request, ALL)
        if settlement.result is None:
            if request.command == "reset":
                for row in settlement.rows:
                    self.ledger.mark_recovered(row)
            settlement.result = self.read((worker, request.answers[worker.index]) for worker in request.workers)
        return settlement

    def read(self, answers: Iterable[tuple[Worker, Answer]]) -> Result:
        """All answers together. It may be done again: to read an answer twice does no harm.

        A result with nothing of its own in it is a shared one, and not to be written to.
        """
        result = NOTHING
        for worker, answer in answers:
            if answer is PLAIN or (answer is ONLY_COLUMNS and result.columns):
                continue
            if answer is ONLY_COLUMNS and result is NOTHING:
                result = COLUMNS
                continue
            if result is NOTHING or result is COLUMNS:
                result = Result(columns=result.columns)
            self._add(result, worker, answer)
        return result

    def _add(self, result: Result, worker: Worker, answer: Answer) -> None:
        if answer.columns:
            result.columns = True
        if answer.death is not None:
            result.deaths.append(answer.death)
        out = answer.outcome if answer.sealed is None else decode_outcome(answer.sealed)
        if out is None:
            return
        self._infos.learn(out.schemas)
        result.infos.update(out.infos)
        result.finals.update(out.finals)
        result.results.update(out.results)
        for row, observation in out.observations.items():
            self.store.accept(row, observation)
        result.failures.extend((failure, worker) for failure in out.failures)
        for name, text in out.warnings:
            if name not in self.said:
                self.said[name] = text
                logger.warn("%s", text)

    def end_late(self, late: Sequence[Worker], limit: float | None) -> None:
        """Kill workers that hang."""
        for worker in late:
            if self.recorder is not None and limit is not None:
                self.recorder.limits[worker.pid] = limit
            stack = worker.stack()
            at = f" at {found}" if (found := place(stack)) else ""
            worker.signal(9)
            worker.mark_dead(
                ("its answer was no longer wanted" if limit is None else f"it hung for more than {limit} seconds")
                + f" and was killed{at}"
                + (f"\nits stack:\n{stack}" if stack else "")
            )

    def _lateness(self, seconds: float | None) -> str:
        text = ""
        late = [(worker, busy) for worker in self.pool.workers if (busy := self.oldest_of(worker)) is not None]
        for worker, busy in late[:4]:
            worker.overdue = True
            if not worker.local:
                stack = f"\n{found}" if seconds and (found := worker.stack()) else ""  # a poll asks nothing of a worker
                state = " It is stopped (SIGSTOP)." if worker.is_stopped() else ""
                rows = list(busy.rows_of(worker))
                text += f"\nenvs {rows}, {worker.label}, during {busy.command}: no answer yet.{state}{stack}"
        return text

    def _confirm(self, error: Exception, again: Callable[[], object]) -> None:
        """What environments said does not go together, unless it does at the second look: then this was interrupted."""
        try:
            again()
        except Exception as same:
            if type(same) is type(error):
                self.pending_error = error

    def infos(self, result: Result) -> dict[Any, Any]:
        """The infos of all rows as one dict of arrays."""
        if not result.columns:
            return {}
        ended = self.batch.final
        finals = result.finals
        if b"\1" in ended.tobytes():  # a tenth of what `any` takes
            finals = self.finals(np.flatnonzero(ended).tolist()) | finals
        return self._infos.read(None, self.num_envs, result.infos, finals)

    def finals(self, rows: Sequence[int]) -> dict[int, Any]:
        """Row -> last observation of its episode, for those of ``rows`` that have one in shared memory."""
        tree, leaves = self.layout.observations, self.batch.final_observations
        if leaves is None or tree is None:
            return {}
        flags = self.batch.final
        return {row: tree.build(iter([leaf[row].copy() for leaf in leaves])) for row in rows if flags[row]}

    def infos_of(self, rows: Array, infos: dict[int, Any], finals: dict[int, Any]) -> dict[Any, Any]:
        """The infos of some rows, compact; ``infos`` and ``finals`` came by pickle, by row."""
        if not (infos or finals) and self.batch.final_observations is None:
            return self._infos.read(rows, len(rows), infos, finals)
        listed = rows.tolist()
        finals = self.finals(listed) | finals
        positions = {row: position for position, row in enumerate(listed)}
        return self._infos.read(
            rows,
            len(listed),
            {positions[row]: info for row, info in infos.items()},
            {positions[row]: observation for row, observation in finals.items()},
        )

    # -- row by row: those that were sent, in the order in which they were answered -----------------------------------

    def recv(self, count: int | None, deadline: float | None, least: tuple[int, float] | None = None) -> Stepped | None:
        if (call := self.call) is not None:
            if call.phase is not Phase.WAITING_RESET:
                advance(call.phase, "reset_async", self)
            self.launch(call)
        received = self.receive(self.batch_size if count is None else count, deadline, least)
        if received is None:
            return None
        (rows, infos, finals), error = received
        if error is not None:
            try:
                self.raise_answer(error)
            finally:
                del error, received, call
        if self.card is not None:
            self.card.update()
        batch = self.batch
        try:
            columns = self.infos_of(rows, infos, finals)
            observations = self.store.take(rows)
        except Exception as wrong:
            self._confirm(wrong, lambda: (self.infos_of(rows, infos, finals), self.store.take(rows)))
            raise
        columns["env_id"], columns["_env_id"] = rows.copy(), rows >= 0
        return observations, batch.rewards[rows], batch.terminations[rows], batch.truncations[rows], columns

    def recv_enough(self, count: int | None, deadline: float | None, least: int, moment: float) -> Stepped | None:
        return self.recv(count, deadline, (least, moment))

    def launch(self, request: Request) -> None:
        """Let the answers to a call as a whole be received row by row, as they come."""
        pending = self.pending
        if pending.arrived is Pending.arrived:
            pending.arrived = {}
        for index in request.answers:
            pending.arrived.setdefault((request.seq, index), request)
        request.by_row = True

    def receive(
        self, count: int, deadline: float | None, least: tuple[int, float] | None = None
    ) -> tuple[Received, Exception | None] | None:
        """The next ``count`` rows, in the order in which they became ready; or the exception that is to be raised instead.

        ``next_pending`` is the table without them, for the guard.

        Args:
            count: How many.
            deadline: Of ``time.monotonic()``.
            least: That many are enough from this moment of ``time.monotonic()`` on, or if no more are in flight.

        Returns:
            ``None`` where they are not there by the deadline; nothing is lost.

        Raises:
            NoAsyncCallError: There are not that many.
            StepTimeout: There is no deadline, and they did not come within the engine's own ``step_timeout``.
        """
        pending = self.pending
        limit = self.policy.step_timeout if deadline is None else None
        if limit is not None:
            deadline = deadline_of(limit)
        seen, ready = _Seen(), list(pending.ready)
        pickled = pending.infos.copy(), pending.finals.copy()
        while True:
            error = self._look(seen, ready, *pickled)
            if error is not None:
                try:
                    return (pending.latest, {}, {}), error
                finally:
                    del error  # in this process the exception's frames hold this one
            if len(ready) >= count:
                break
            underway = len(self.underway())
            enough = count if least is None else least[0]
            if len(ready) + underway < enough:
                raise NoAsyncCallError(
                    f"Calling `recv` for {enough} environments, but only {underway} are in flight and "
                    f"{len(ready)} are ready: send() more first.",
                    "recv",
                )
            if least is not None and len(ready) >= enough:
                if not underway or self._looked_until(least[1], seen, deadline):
                    break
            elif not self._more(seen, deadline):
                if limit is None:
                    return None
                self._end_all_hanging(limit)
        taken = ready[:count]
        rows = np.array(taken, np.intp)
        infos, finals = [{row: table.pop(row) for row in taken if row in table} if table else {} for table in pickled]
        self._set_next(seen, ready[count:], *pickled, rows)
        return (rows, infos, finals), None

    def _end_all_hanging(self, limit: float | None) -> None:
        self.end_hanging([worker for worker in self.pool.workers if self.is_pending(worker)], "recv", limit)

    def _looked_until(self, moment: float, seen: _Seen, deadline: float | None) -> bool:
        """Wait for more than is enough; whether it is time to go, with what there is."""
        until = moment if deadline is None else min(moment, deadline)
        return not self._more(seen, None if until == math.inf else until) or time.monotonic() >= until

    def _more(self, seen: _Seen, deadline: float | None) -> bool:
        """Wait until an answer has arrived that was not ``seen``; false when the time was up."""
        while len(self.pending.arrived) == len(seen):
            if not self.pool.wait_any(deadline, len(seen)):
                return False
        return True

    def _look(self, seen: _Seen, ready: list[int], infos: dict[int, Any], finals: dict[int, Any]) -> Exception | None:
        """Add to ``ready`` the rows of all answers that were not ``seen``, and what came with them by pickle.

        Returns:
            The exception that one of them is to raise.
        """
        pending = self.pending
        if self.policy.restart:
            for request in list(pending.requests.values()):
                if request.by_row and request.lost and ALL not in request.answers:
                    self.deliver(request.seq, ALL, PLAIN)
        while len(pending.arrived) > len(seen):  # answers arrive behind those that are there; rebuilding may let some in
            for key, request in list(pending.arrived.items())[len(seen) :]:
                seen[key] = request
                if self.recorder is not None and key[1] != ALL:
                    self.recorder.answered(request, key[1])
                rows = self._plain(request, key[1])
                if rows is not None:
                    ready += rows
                    continue
                settlement = self._absorb(request, key[1])
                assert settlement.result is not None
                for row in settlement.ready or ():
                    ready.append(row)
                    if row in settlement.result.infos:
                        infos[row] = settlement.result.infos[row]
                    if row in settlement.result.finals:
                        finals[row] = settlement.result.finals[row]
                if settlement.error is not None:
                    self._set_next(seen, ready, infos, finals, pending.latest)
                    return settlement.error
        return None

    def _set_next(
        self, seen: _Seen, ready: list[int], infos: dict[int, Any], finals: dict[int, Any], latest: Array
    ) -> None:
        """The table without the answers that were ``seen``."""
        now, then = self.pending, Pending()
        arrived, requests = now.arrived, now.requests.copy()
        if len(arrived) > len(seen):
            then.arrived = {key: request for key, request in arrived.items() if key not in seen}
        else:
            then.arrived = {}
        waiting = {seq for seq, _ in then.arrived}
        for request in now.requests.values() if self.policy.restart else seen.values():  # rebuilding has requests of its own
            if request.seq not in waiting and (request.answered or not request.by_row):
                requests.pop(request.seq, None)
        if now.settlements:
            then.settlements = {key: one for key, one in now.settlements.items() if key not in seen and key[0] in requests}
        steps = resets = 0
        for (_, index), request in seen.items():
            if index != ALL:
                count = len(request.rows_at(index))
                steps, resets = steps + count * (request.command == "step"), resets + count * (request.command == "reset")
        then.requests, then.ready, then.latest = requests, ready, latest
        if infos or finals:
            then.infos, then.finals = infos, finals
        then.steps, then.resets = now.steps + steps, now.resets + resets
        self.next_pending = then

    def _plain(self, request: Request, index: int) -> Sequence[int] | None:
        """The rows of a worker that has stepped them and has nothing else to say, which is nearly always. Idempotent."""
        if request.command != "step" or index == ALL or request.parts is None or self.policy.restart:
            return None
        answer, part = request.answers[index], request.parts[index]
        return part.rows if answer is PLAIN or answer is ONLY_COLUMNS else None

    def _absorb(self, request: Request, index: int) -> Settlement:
        """Read one worker's answer, see to what failed, and make its rows ready. It can be called again."""
        settlement = self.settlement(request, index)
        if settlement.ready is not None:
            return settlement
        rows, answer = list(settlement.rows), request.answers[index]
        if settlement.result is None:
            settlement.result = self._read(request, index, rows)
        error = self.resolve(settlement)
        good = rows
        if error is not None:
            bad = set(rows)
            if answer.death is None and index != ALL:
                bad = {failure.env for failure, _ in settlement.result.failures if failure.fatal or self.policy.restart}
                bad.update(answer.lost)  # a host's, with a worker of its own that died
            good = [row for row in rows if row not in bad]
        if self.policy.restart:
            self.remembered.keep(good, all_rows=False)
        settlement.ready = good
        return settlement

    def _read(self, request: Request, index: int, rows: list[int]) -> Result:
        """What one worker's answer says. Idempotent."""
        answer = request.answers[index]
        if request.command == "reset":
            self.batch.rewards[rows] = 0.0
            self.batch.terminations[rows] = False
            self.batch.truncations[rows] = False
            for row in rows:
                self.ledger.mark_recovered(row)
        if not answer.columns:
            self.batch.info_schemas[rows] = NO_INFO
        worker = next((worker for worker in request.workers if worker.index == index), None)
        return self.read([] if worker is None else [(worker, answer)])

    def require_idle(self, method: str) -> None:
        """Refuse a call as a whole while another is pending, or rows are in flight or ready.

        Raises:
            AlreadyPendingCallError: One is, or some are.
        """
        if (phase := self.phase) is not Phase.DEFAULT:
            raise AlreadyPendingCallError(still_pending(method, phase), phase.value)
        if not self.idle:
            underway = len(self.underway())
            raise AlreadyPendingCallError(
                f"Calling `{method}` while {underway} environments are in flight by `send` and "
                f"{len(self.waiting()) - underway} are ready for `recv`.",
                "send",
            )


def wait_name(command: str) -> str:
    """The method that fetches the answer to a call, by the call's command."""
    if command in ("set_attr", "set_next_options"):
        return command
    return "exec_func_fetch" if command == "exec_func" else f"{command}_wait"
