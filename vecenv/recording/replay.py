"""Replays a flight record: repeats the recorded requests in this process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.link.messages import (
    Failure,
    Outcome,
    PackedError,
    decode_outcome,
    encode_outcome,
    find_bad_infos,
    original_summary,
    pack_error,
    unpack_error,
)  # fmt: skip
from vecenv.recording.file import KILLED, LASTING, Failed, Header, Message, Record, UnreadableRecord
from vecenv.shm.layout import Layout
from vecenv.state.snapshots import Snapshot
from vecenv.system.supervision import location_in_traceback
from vecenv.worker.main import make_rows

AGAIN, STOPPED = "happened again", "stopped"
DIFFERENT, CANNOT = "did not happen again", "cannot be replayed"
_RESULT_COLUMNS: Final = ("rewards", "terminations", "truncations")


class ReplayResult(NamedTuple):
    """The result of a replay.

    Attributes:
        status: ``AGAIN``, ``STOPPED``, ``DIFFERENT`` or ``CANNOT``.
        text: A sentence that explains it.
        step: Number of the step that failed, in the latest episode; 0: the reset before step 1; ``None``: neither of these.
        location: ``file:line in function`` of the failure; empty if it is unknown or in this package.
        stack: The traceback of the exception, or the last Python stack of the process; empty if there is none.
    """

    status: str
    text: str
    step: int | None = None
    location: str = ""
    stack: str = ""

    @classmethod
    def from_failure(
        cls, recorded: Failed | None, where: str, failure: str, *, same: bool, more: str = "", **found: Any
    ) -> ReplayResult:
        """Return the result of a replay that ended in a failure. ``same``: the failure is the recorded one."""
        if same:
            return cls(AGAIN, f"happened again {where}: {failure}{more}", **found)
        recorded_text = "the record has no failure" if recorded is None else f"the record has: {recorded.text}"
        return cls(DIFFERENT, f"did not happen again: another failure {where}: {failure} ({recorded_text}){more}", **found)


class Replay:
    """The replay of one record in this process.

    Args:
        header, record: The content of a file.
        begin: The starting point: the ``"latest"`` or ``"first"`` message that resets with a seed or loads a state, or the
            ``"snapshot"``.
        wrap_env_fn: A function that receives the function that builds the environment, and returns a substitute for it.

    Attributes:
        place: Index of the next step of the record.
        step_number: Number of the next step in the latest episode; below 1: its automatic reset, or a step of an earlier
            episode.
        where: The latest request, as part of a sentence, such as ``at step 3``.
        step: The step number of the latest request; 0 for the reset before step 1; ``None`` for other requests.
        is_last: True if the latest request is the last one in the record.
        env: The environment.
        failure: The exception that the environment raised.
        result: The result; ``None`` until :meth:`run` has ended.

    Raises:
        UnreadableRecord: The record cannot be replayed. The text gives the reason.
    """

    def __init__(
        self, header: Header, record: Record, *, begin: str = "latest",
        wrap_env_fn: Callable[[Callable[[], Any]], Callable[[], Any]] | None = None,
    ) -> None:  # fmt: skip
        self.header, self.record = header, record
        self.failure: BaseException | None = None
        self.result: ReplayResult | None = None
        self.where, self.is_last = "while it was built", False
        self.step: int | None = None
        if isinstance(record.env_fn, str):
            raise UnreadableRecord(f"cannot be replayed, because {record.env_fn}")
        env_fn = _unpickle(record.env_fn, f"the function that builds {header.env_id}")
        messages, self._pickled_actions = _unpickle(record.requests, f"the requests to {header.env_id}")
        record.columns["rewards"] = record.columns["rewards"].astype(np.float64)
        self._missing_note = ""  # about calls that the record lacks, if they may explain a difference
        self._restart_message = messages[0] if messages and record.restarted else None
        self._snapshot: Snapshot | None = None
        self._setup_messages, self._messages, self.place = self._find_start(messages, begin)
        self._first_step = max(self.step_number, 1)
        self._first_difference = ""
        self._build(env_fn if wrap_env_fn is None else wrap_env_fn(env_fn))

    # -- where to begin -----------------------------------------------------------------------------------------------

    def _find_start(self, messages: list[Message], begin: str) -> tuple[list[Message], list[Message], int]:
        """Return the messages to repeat before the start, those from the start on, and the index of the first step."""
        record = self.record
        starts = [number for number in range(len(messages)) if self._is_start(messages, number)]
        if begin == "snapshot" or not starts or (record.lacks_calls and record.snapshot is not None):
            if record.snapshot is not None:
                place, number, self._snapshot = record.snapshot
                return [], messages[number:], place
            why = f" ({record.why_no_snapshot})" if record.why_no_snapshot else ""
            if begin != "snapshot":
                raise UnreadableRecord(
                    f"cannot be replayed, because the record has neither a reset with a seed nor a snapshot{why}"
                )
            why = record.why_no_snapshot or "a replay from the reset takes less than five seconds"
            raise UnreadableRecord(f"cannot be replayed from a snapshot, because there is none: {why}")
        number = starts[0 if begin == "first" else -1]
        place, name, _ = messages[number]
        if name == "load":
            return [], messages[number:], place
        if record.lacks_calls:
            self._missing_note = "; earlier calls, which may have changed the environment, are no longer in the record"
        lasting = [message for message in messages[:number] if message.name in (*LASTING, "set_next_options")]
        return lasting, messages[number:], place

    def _is_start(self, messages: list[Message], number: int) -> bool:
        """True if a replay can begin with a message: it loads a state, or resets with a seed.

        It cannot begin with a reset after ``set_next_options`` and a step, because that step may have used the options.
        """
        place, name, arguments = messages[number]
        if place < 0 or arguments is None:
            return False
        if name == "load":
            return bool(arguments[0].row.used)
        earlier = [message.place for message in messages[:number] if message.name == "set_next_options"]
        return name == "reset" and arguments[0] is not None and all(other == place for other in earlier)

    # -- the environment ----------------------------------------------------------------------------------------------

    def _build(self, env_fn: Callable[[], Any]) -> None:
        plan, row = self.record.plan, self.record.row
        recorded = plan.layout
        layout = Layout.for_spaces(recorded.observations, recorded.actions, row + 1, 1, final=recorded.final)
        self._plan = replace(plan, layout=layout, env_threads=1)
        self._arrays = layout.view(bytearray(layout.size))
        self._rows = make_rows([env_fn], row, 0, self._plan, self._arrays)

    @property
    def env(self) -> Any:
        return self._rows.envs[0]

    @property
    def step_number(self) -> int:
        return self.place + 1 + self.record.steps_before

    @property
    def action(self) -> Any:
        """The action of the next step."""
        if self.place in self._pickled_actions:
            return self._pickled_actions[self.place]
        if self._arrays.actions is None or "actions/0" not in self.record.columns:
            raise UnreadableRecord("cannot be replayed, because the action of a step could not be pickled")
        for index, leaf in enumerate(self._arrays.actions):
            leaf[self.record.row] = self.record.columns[f"actions/{index}"][self.place]
        return self._rows.read_actions(None)[0]

    def run(self) -> Iterator[int]:
        """Replay the record and set :attr:`result`.

        Yields:
            Before each step, its number; before each message, 0.
        """
        record = self.record
        failures, _ = self._rows.build()
        if failures:
            if isinstance(failures[0].error, UnreadableRecord):
                raise failures[0].error
            self._end_with_failure(failures)
            assert self.result is not None
            was_built = record.steps > 0 or len(self._messages) > 1  # else the recorded failure may be the constructor's
            if self.result.status == DIFFERENT and (was_built or isinstance(failures[0].error, ImportError)):
                text = f"cannot be replayed, because the environment cannot be built here: {failures[0].text}"
                self.result = self.result._replace(status=CANNOT, text=text)
            return
        if self._snapshot is not None:
            yield self._announce("load")
            self._load(self._snapshot)
        for message in self._setup_messages:
            yield self._announce(message.name)
            self._repeat(message)
        messages = list(self._messages)
        while self.result is None:
            while messages and messages[0].place <= self.place:
                message = messages.pop(0)
                yield self._announce(message.name, last=not messages and self.place == record.steps)
                failures = self._repeat(message)
                if self._is_end(failures):
                    self._end_with_failure(failures)
                    return
            if self.place == record.steps:
                break
            yield self._announce("", last=not messages and self.place == record.steps - 1)
            failures = self._step()
            was_dropped = np.isnan(record.columns["rewards"][self.place])
            reset_follows = bool(messages) and messages[0].place == self.place + 1 and messages[0].name == "reset"
            if self._is_end(failures) and not (was_dropped and reset_follows):
                self._end_with_failure(failures)
                return
            self.place += 1
        self._end_without_failure()

    def _is_end(self, failures: list[Failure]) -> bool:
        """True if the replay ends with these failures: the environment is gone, or they may be the recorded one."""
        may_be_recorded = self.is_last and self.record.failed is not None
        return any(failure.fatal or may_be_recorded for failure in failures)

    def _announce(self, name: str, *, last: bool = False) -> int:
        """Announce a request (a step if ``name`` is empty): set the attributes that describe it.

        Returns:
            The number of the step; 0 for a message.
        """
        number, self.is_last = self.step_number, last
        has_reset_steps = self.record.plan.autoreset_mode is AutoresetMode.NEXT_STEP  # step 0 is the automatic reset
        if number < (0 if has_reset_steps else 1):
            self.where, self.step = "in an earlier episode", None
        elif name == "reset" or (not name and number == 0):
            self.where, self.step = "in the reset before step 1", 0
        elif not name:
            self.where, self.step = f"at step {number}", number
        else:
            self.where, self.step = "in the last call" if last else f"in a call before step {max(number, 1)}", None
        return 0 if name else number

    @property
    def stopped(self) -> ReplayResult:
        """The result of a replay that ends before the latest request."""
        before = f"stopped before {self._latest_request.removesuffix(' before step 1')}"
        if self._first_difference:
            return ReplayResult(DIFFERENT, f"{before}: {self._difference_text}")
        return ReplayResult(STOPPED, f"{before}: everything matched the record")

    def _load(self, snapshot: Snapshot) -> list[Failure]:
        if failures := self._rows.check([(0, snapshot)]).failures:
            raise UnreadableRecord(f"cannot be replayed, because its snapshot does not fit here: {failures[0].text}")
        return self._rows.load([0]).failures

    def _repeat(self, message: Message) -> list[Failure]:
        rows, name, arguments = self._rows, message.name, message.arguments
        if arguments is None:
            raise UnreadableRecord(f"cannot be replayed, because the arguments of {name} could not be pickled")
        if name == "load":
            return self._load(arguments[0])
        if name == "reset":
            due = message is self._restart_message
            return self._find_failures(rows.reset(None, [arguments[0]], arguments[1], reset_due=due))
        if name == "set_attr":
            return rows.set_attr(arguments[0], [arguments[1]]).failures
        if name == "set_next_options":
            return rows.set_next([(arguments[0], arguments[1])]).failures
        return (rows.exec([0], *arguments) if name == "exec_func" else rows.call(*arguments)).failures

    def _step(self) -> list[Failure]:
        record, row, place = self.record, self.record.row, self.place
        outcome = self._rows.step(None, [self.action])
        if np.isnan(record.columns["rewards"][place]):
            if place == record.steps - 1 and not outcome.failures and outcome.has_payload():
                outcome = decode_outcome(encode_outcome(outcome))  # as a worker does, because encoding may fail
            return self._find_failures(outcome)
        if outcome.failures:
            return outcome.failures
        for name in _RESULT_COLUMNS:
            actual, expected = getattr(self._arrays, name), record.columns[name][place]
            if actual[row].tobytes() != expected.tobytes() and not self._first_difference:
                text = f"{name[:-1]} {actual[row]!s}, but the record has {expected!s}"
                self._first_difference = f"{self.where}: {text}"
        return []

    def _find_failures(self, outcome: Outcome) -> list[Failure]:
        """Return the failures of a step or reset, with infos that are not dicts if one may be the recorded failure."""
        may_be_recorded = self.is_last and self.record.failed is not None and self.record.failed.how == "raised"
        return outcome.failures or (find_bad_infos(outcome) if may_be_recorded else [])

    # -- the result ---------------------------------------------------------------------------------------------------

    @property
    def _difference_text(self) -> str:
        return f"first difference from the record {self._first_difference}"

    def _end_with_failure(self, failures: list[Failure]) -> None:
        failed, text, error = self.record.failed, failures[0].text, failures[0].error
        self.failure = error if isinstance(error, BaseException) else None
        difference = f"; {self._difference_text}" if self._first_difference else ""
        packed = error if isinstance(error, PackedError) else pack_error(error)
        texts = text, original_summary(unpack_error(packed, ""))
        known = [each.removesuffix(": ") for each in texts]  # version 0.1 recorded an error without text as "Type: "
        same = failed is not None and failed.how == "raised" and failed.text.removesuffix(": ") in known
        self.result = ReplayResult.from_failure(
            failed, self.where, text, same=same, more=difference if same else difference + self._missing_note,
            step=self.step, location=location_in_traceback(packed.text), stack=packed.text,
        )  # fmt: skip

    def _end_without_failure(self) -> None:
        record, status = self.record, DIFFERENT
        if self._first_difference:
            text = f"did not happen again; {self._difference_text}{self._missing_note}"
        elif record.failed is None:
            steps = f"all {record.steps} steps" if record.steps != 1 else "its one step"
            status, text = AGAIN, f"nothing had failed, and {steps} matched the record"
        else:
            matched, last = self._matched_steps_text, self._latest_request
            killed = record.failed.how == "died" and record.failed.exitcode == KILLED
            external = "; a kill from outside is not repeated" if killed else ""
            text = f"did not happen again: {matched}{last} returned, but failed in the record{self._missing_note}{external}"
        self.result = ReplayResult(status, text)

    @property
    def _latest_request(self) -> str:
        return self.where.partition(" ")[2]

    @property
    def _matched_steps_text(self) -> str:
        """A text about the matching steps of the latest episode before the latest request; empty if there are none."""
        last = self.step_number - 1 - (1 if self.step else 0)
        if last < self._first_step:
            return ""
        return f"step {last} matched; " if last == self._first_step else f"steps {self._first_step} to {last} matched; "

    def close(self) -> None:
        """Close the environment."""
        self._rows.close()


def _unpickle(blob: bytes, name: str) -> Any:
    try:
        return pickle.loads(blob)
    except Exception as error:
        text = f"{name} cannot be loaded: {type(error).__name__}: {error}"
        raise UnreadableRecord(f"cannot be replayed, because {text}") from error
