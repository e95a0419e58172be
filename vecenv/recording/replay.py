"""Asks an environment again what a file says it was asked, and compares what comes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.link.messages import Failure, Op
from vecenv.recording.file import LASTING, RESETS, Header, Message, Record, Unreadable, digest
from vecenv.shm import Layout
from vecenv.worker.main import answer, make_rows

__all__ = ["AGAIN", "CANNOT", "DIFFERENT", "Replay", "ReplayResult"]

AGAIN, DIFFERENT, CANNOT = "happened again", "did not happen again", "cannot be replayed"


class ReplayResult(NamedTuple):
    """What came of a replay: one of three things, and the sentence that says it."""

    which: str
    text: str


class Replay:
    """Replays a record in this process.

    Args:
        header, record: What a file holds.
        begin: With the ``"latest"`` reset that has a seed, with the ``"first"`` one, or with the ``"snapshot"``.
        change: What is made of the environment before anything is asked of it.

    Attributes:
        place: How many steps of the record are made, or were before its beginning.
        at: The number of the step that is being made, in the latest episode; negative: in an earlier one.
        env: The environment.
        failure: The exception that it raised.
        result: What came of it, at the end of :meth:`run`.

    Raises:
        Unreadable: It cannot be replayed; says why.
    """

    def __init__(
        self, header: Header, record: Record, *, begin: str = "latest", change: Callable[[Any], Any] | None = None
    ) -> None:
        self.header, self.record = header, record
        self.failure: BaseException | None = None
        made = self._env_fn()
        self._make = made if change is None else lambda: change(made())
        self.result: ReplayResult | None = None
        self._snapshot: Any = None
        self._marks = dict(record.marks)
        self._before, self._messages, self.place = self._start(begin)
        self._different = ""
        self._seq = 0
        self._build()

    def _env_fn(self) -> Callable[[], Any]:
        blob = self.record.env_fn
        if isinstance(blob, str):
            raise Unreadable(f"cannot be replayed, because {blob}")
        try:
            made: Callable[[], Any] = pickle.loads(blob)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise Unreadable(f"cannot be replayed, because what builds {self.header.env_id} is not here: {text}") from error
        return made

    def _start(self, begin: str) -> tuple[list[Message], list[Message], int]:
        """What is to be said before, what follows, and the first step."""
        record, messages = self.record, self.record.messages
        if begin == "snapshot":
            if record.snapshot is None:
                why = record.why_no_snapshot or "a replay from the reset takes less than five seconds"
                raise Unreadable(f"cannot be replayed from a snapshot, because there is none: {why}")
            place, said, self._snapshot = record.snapshot
            self._marks = {at: mark for at, mark in record.marks if at > place}
            return [], messages[said:], place
        starts = [start for number in range(len(messages)) if (start := self._start_at(number)) is not None]
        if not starts and record.snapshot is not None:
            return self._start("snapshot")
        if not starts:
            why = f", and no snapshot ({record.why_no_snapshot})" if record.why_no_snapshot else ""
            raise Unreadable(f"cannot be replayed, because the record holds no reset with a seed any more{why}")
        return starts[0 if begin == "first" else -1]

    def _start_at(self, number: int) -> tuple[list[Message], list[Message], int] | None:
        """How to begin with a message: what is to be said before, what follows, and the first step; ``None``: not at all."""
        messages = self.record.messages
        message = messages[number]
        if any(later.op is Op.THAW for later in messages[number:]):
            return None
        before = [one for one in messages[:number] if one.op in LASTING or self._waits(one, message.place)]
        if message.op is Op.TAKE:  # a spare worker's episode, which begins in the next step
            begin = Message(message.place, Op.RESET, pickle.dumps(([pickle.loads(message.payload or b"")], None)))
            return [*before, begin], messages[number + 1 :], message.place + 1
        if message.op not in RESETS or not message.payload or pickle.loads(message.payload)[0][0] is None:
            return None
        return [] if message.op is Op.REBUILD_SOME else before, messages[number:], message.place

    def _waits(self, message: Message, until: int) -> bool:
        """Whether a message is about an automatic reset that has not come before step ``until``."""
        if message.op is not Op.SET_NEXT:
            return False
        record, late = self.record, int(self.record.how.autoreset_mode is AutoresetMode.NEXT_STEP)
        none = np.zeros(0, np.bool_)
        over = record.columns.get("terminations", none) | record.columns.get("truncations", none)
        by_caller = {one.place for one in record.messages if one.op in RESETS}
        return not any(over[at] and at + late not in by_caller for at in range(max(message.place - late, 0), until - late))

    def _build(self) -> None:
        record, plan = self.record, self.record.how
        row, known = record.row, plan.layout
        layout = Layout.of(known.observations, known.actions, row + 1, 1, final=known.final, spares=int(plan.ahead))
        self._plan = replace(plan, layout=layout, registered=None, env_threads=1, overlaps=False)
        self._batch = layout.view(bytearray(layout.size))
        self._rows = make_rows([self._make], row, 0, self._plan, self._batch)
        self._rows.use_generators(plan.generators)

    @property
    def env(self) -> Any:
        return self._rows.envs[0]

    @property
    def at(self) -> int:
        return self.place + 1 + self.record.steps_before

    @property
    def action(self) -> Any:
        """What the next step is given."""
        sent = self.record.actions.get(self.place)
        if sent is not None:
            return pickle.loads(sent)
        assert self._batch.actions is not None
        for index, leaf in enumerate(self._batch.actions):
            leaf[self.record.row] = self.record.columns[f"actions/{index}"][self.place]
        return self._rows.actions(None)[0]

    @property
    def fails_in_step(self) -> bool:
        """What happened came in the last step, and not in a reset or another call."""
        failed = self.record.failed
        return failed is not None and failed.command in ("step", "recv")

    def run(self, until: int | None = None) -> Iterator[int]:
        """Replay; yields the number of each step before it is made, and 0 before each message. Ends with :attr:`result`.

        Args:
            until: The number of the step in the latest episode to stop before.
        """
        record = self.record
        failures, _ = self._rows.build()
        if failures:
            if isinstance(failures[0].error, Unreadable):
                raise failures[0].error
            self._failed(failures, "while it was built")
            return
        if self._snapshot is not None:
            yield 0
            self._load(self._snapshot)
        for message in self._before:
            yield 0
            self._say(message)
        messages = list(self._messages)
        while self.result is None:
            while messages and messages[0].place <= self.place:
                yield 0
                last = len(messages) == 1 and self.place == record.steps
                failures = self._say(messages.pop(0))
                if failures and (last or any(failure.fatal for failure in failures)):
                    self._failed(failures, "in the last call" if last else f"before step {self.at}")
                    return
            if self.place in self._marks:
                self._compare(self._marks[self.place])
            if self.place == record.steps or (until is not None and 0 < until <= self.at):
                break
            yield self.at
            failures = self._step()
            if failures:
                self._failed(failures, f"at step {self.at}")
                return
            self.place += 1
        self._ended(until)

    def _load(self, snapshot: Any) -> None:
        for op, payload in ((Op.CHECK, [(0, snapshot)]), (Op.LOAD, [0])):
            if failures := answer(self._rows, op, self._next(), payload).failures:
                text = failures[0].text
                raise Unreadable(f"cannot be replayed from its snapshot, because that does not fit here: {text}")

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _say(self, message: Message) -> list[Failure]:
        if message.payload == b"":
            raise Unreadable(f"cannot be replayed, because what a {message.op.name.lower()} was given cannot be pickled")
        given = None if message.payload is None else pickle.loads(message.payload)
        if message.op is Op.TAKE:
            return self._rows.set_next(self._next(), [(given, None)]).failures
        self._batch.requested[self.record.row] = seq = self._next()
        return answer(self._rows, message.op, seq, given).failures

    def _step(self) -> list[Failure]:
        record, row, place = self.record, self.record.row, self.place
        out = self._rows.step(self._next(), None, [self.action])
        if out.failures or (place == record.steps - 1 and self.fails_in_step):
            return out.failures
        batch = self._batch
        for name in ("rewards", "terminations", "truncations"):
            came, wanted = getattr(batch, name), record.columns[name][place]
            if came[row].tobytes() != wanted.tobytes() and not self._different:
                self._different = f"step {self.at}: {name[:-1]} {came[row]!s}, recorded was {wanted!s}"
        return []

    def _compare(self, wanted: bytes) -> None:
        tree, leaves = self._plan.layout.observations, self._batch.observations
        if tree is None or leaves is None or self._different or not wanted:
            return
        if digest(tree.build(iter([leaf[self.record.row] for leaf in leaves])), tree) != wanted:
            self._different = f"step {self.at}: the observation before it is another"

    def _failed(self, failures: list[Failure], where: str) -> None:
        """The environment raised."""
        failed, text = self.record.failed, failures[0].text
        error = failures[0].error
        self.failure = error if isinstance(error, BaseException) else None
        first = f"; first difference from the record at {self._different}" if self._different else ""
        if failed is not None and failed.how == "raised" and text == failed.text:
            self.result = ReplayResult(AGAIN, f"happened again {where}: {text}{first}")
        else:
            was = "nothing had failed" if failed is None else f"recorded was: {failed.text}"
            self.result = ReplayResult(DIFFERENT, f"did not happen again: another failure {where}: {text} ({was}){first}")

    def _ended(self, until: int | None) -> None:
        """The end was reached, or the step to stop before."""
        record, different = self.record, f"first difference from the record at {self._different}"
        which = DIFFERENT if self._different or record.failed is not None else AGAIN
        steps = f"all {record.steps} steps" if record.steps != 1 else "its one step"
        if until is not None and self.place < record.steps:
            which = DIFFERENT if self._different else AGAIN
            text = f"stopped before step {self.at}: {different if self._different else 'all as recorded'}"
        elif self._different:
            text = f"did not happen again; {different}"
        elif record.failed is None:
            text = f"nothing had failed, and {steps} gave what was recorded"
        else:
            text = f"did not happen again, though {steps} gave what was recorded"
        self.result = ReplayResult(which, text)

    def close(self) -> None:
        """Close the environment."""
        self._rows.close()
