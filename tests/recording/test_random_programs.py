"""Replays repeat failures at the end of random programs: exactly the requests that reached an environment are recorded.

A program is a random list of public calls to environments that return a checksum of all that they received. Some calls
fail or are refused, and the program continues. Finally, all environments fail.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from history_envs import ChecksumEnv

import vecenv
from vecenv.recording import recorder as recorder_module
from vecenv.recording.file import UnreadableRecord, read, read_header
from vecenv.recording.replay import AGAIN, Replay

ENGINES: tuple[dict[str, Any], ...] = (
    {"num_workers": 0}, {"num_workers": 1}, {"num_workers": 2}, {"num_workers": 1, "env_threads": 2}, {},
    {"num_workers": 1, "use_caller": True},
)  # fmt: skip
STEPS = 7
"""Actions below this number cause no fault."""


def note(env: Any, number: int) -> int:
    return int(env.unwrapped.note("exec", number))


def raise_after(env: Any, number: int) -> None:
    env.unwrapped.raise_after(number)


class Program:
    """A random program.

    Attributes:
        call_names: The names of the calls so far, for messages of failed tests.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.count = self.random.randint(2, 4)
        self.engine = self.random.choice(ENGINES)
        self.mode = self.random.choice(["NextStep", "SameStep", "Disabled"])
        self.restarts = self.random.random() < 0.35
        self.is_local = "use_caller" in self.engine or self.engine.get("num_workers") == 0
        self.reset_on_seed = self.random.random() < 0.5
        self.snapshots: list[Any] = []
        self.call_names: list[str] = []

    def open(self, folder: Path) -> Any:
        every = None if self.mode == "Disabled" else self.random.choice([None, 5])
        return vecenv.AsyncVectorEnv(
            [partial(ChecksumEnv, self.reset_on_seed)] * self.count, autoreset_mode=self.mode,
            on_failure=vecenv.Restart(limit=200) if self.restarts else "raise",
            record_failures=vecenv.FlightRecorder(folder, snapshot_every=every, keep=1000), **self.engine,
        )  # fmt: skip

    def run(self, folder: Path) -> list[Path]:
        """Run the program, and return the files about its environments."""
        with contextlib.closing(self.open(folder)) as envs:
            self.envs = envs
            self.attempt(partial(envs.reset, seed=self.seed()))
            for _ in range(self.random.randint(1, 12)):
                envs._recorder._next_snapshot_time = 0.0
                calls = self.calls() if self.random.random() < 0.7 else self.failures()
                name = self.random.choice(list(calls))
                self.call_names.append(name)
                if self.attempt(calls[name]):
                    recover = [self.recover, self.recover_by_row, self.recover_by_load, list]  # `list` does nothing
                    self.attempt(self.random.choice(recover))
            self.attempt(partial(envs.step, self.actions()))
            self.recover()
            files = [envs.record(row, folder / f"{row}.record") for row in range(self.count)]
            for _ in range(2):  # the first may be an automatic reset
                self.attempt(partial(envs.step, [ChecksumEnv.RAISES] * self.count))
            return files + [Path(record.recorded) for record in envs.errors if record.recorded]

    def attempt(self, call: Callable[[], object]) -> bool:
        """Make a call, and return ``True`` if it fails or is refused. Afterwards, nothing is pending."""
        failed = False
        try:
            call()
        except Exception:
            failed = True
        while "WAITING_STEP" in repr(self.envs):
            with contextlib.suppress(Exception):
                self.envs.step_wait()
        while len(self.envs.in_flight):
            try:
                self.envs.recv(count=1)
            except Exception:
                failed = True
        return failed

    # -- arguments --------------------------------------------------------------------------------------------------------

    def actions(self, count: int | None = None) -> Any:
        return np.array([self.random.randrange(STEPS) for _ in range(self.count if count is None else count)])

    def actions_with(self, special: int) -> Any:
        actions = self.actions()
        actions[self.rows()] = special
        return actions

    def rows(self) -> list[int]:
        return self.random.sample(range(self.count), self.random.randint(1, self.count))

    def mask(self, rows: Iterable[int] | None = None) -> Any:
        return np.isin(np.arange(self.count), list(self.rows() if rows is None else rows))

    def seed(self) -> int | None:
        return self.random.choice([None, self.random.randrange(1000)])

    # -- calls ------------------------------------------------------------------------------------------------------------

    def calls(self) -> dict[str, Callable[[], object]]:
        envs, number, rows = self.envs, self.random.randrange(1000), self.rows()
        found: dict[str, Callable[[], object]] = {
            "step": lambda: [envs.step(self.actions()) for _ in range(self.random.randint(1, 5))],
            "step with a list": lambda: envs.step(self.actions().tolist()),
            "reset": lambda: envs.reset(seed=self.seed()),
            "reset some": lambda: envs.reset(seed=self.seed(), options={"reset_mask": self.mask(), "start": number}),
            "reset with options": lambda: envs.reset(options=[{"start": number + row} for row in range(self.count)]),
            "set_attr": lambda: envs.set_attr("knob", [number + row for row in range(self.count)]),
            "call": lambda: envs.call("note", number),
            "exec": lambda: envs.exec_func(note, rows, number),
            "next": lambda: envs.set_next_options({"start": number}, seed=self.seed(), env_id=rows),
            "save": lambda: self.snapshots.append(envs.save(verify=False)),
            "send": self.send,
            "send, and drop by a reset": lambda: (self.send_only(), envs.reset(seed=self.seed())),
            "send, and drop by a reset of some": lambda: (self.send_only(), envs.reset(options={"reset_mask": self.mask()})),
        }
        if self.snapshots:
            saved = self.random.choice(self.snapshots)
            found["load"] = lambda: envs.load(saved)
            found["load some"] = lambda: envs.load([saved[row] for row in rows], env_id=rows)
            found["load another row's"] = lambda: envs.load([saved[0]], env_id=rows[:1])
        return found

    def failures(self) -> dict[str, Callable[[], object]]:
        """Return calls that fail or are refused."""
        envs, number, rows = self.envs, self.random.randrange(1000), self.rows()
        found: dict[str, Callable[[], object]] = {
            "raise": lambda: envs.step(self.actions_with(ChecksumEnv.RAISES)),
            "raise by recv": lambda: envs.send(self.actions_with(ChecksumEnv.RAISES), range(self.count)),
            "raise in call": lambda: envs.call("raise_after", number),
            "raise in exec": lambda: envs.exec_func(raise_after, rows, number),
            "too many actions": lambda: envs.step(self.actions(self.count + 1)),
            "no such row": lambda: envs.send([1], [self.count]),
            "bad mask": lambda: envs.reset(options={"reset_mask": np.ones(self.count + 1, bool)}),
            "snapshot of another environment": lambda: envs.load([_cartpole()], env_id=rows[:1]),
            "snapshots, one of another environment": lambda: envs.load([*self.snapshots[0][:-1], _cartpole()]),
            "another call during a step": lambda: (envs.step_async(self.actions()), self.refused_call(rows)()),
            "another call during send": lambda: (self.send_only(rows), self.refused_call(rows)()),
        }
        if not self.restarts:  # with restarts, the reset would fail until they are exhausted
            found["raise in reset"] = lambda: envs.reset(options={"breaks": True, "reset_mask": self.mask()})
        if not self.is_local:
            lock = threading.Lock()
            found |= {
                "die": lambda: envs.step(self.actions_with(ChecksumEnv.DIES)),
                "be abandoned": lambda: (envs.step_async(self.actions()), envs.abandon(rows), envs.step_wait()),
                "info without pickle": lambda: envs.step(self.actions_with(ChecksumEnv.UNPICKLABLE)),
                "info without pickle by recv": lambda: envs.send(
                    self.actions_with(ChecksumEnv.UNPICKLABLE), range(self.count)
                ),
                "options without pickle": lambda: envs.reset(seed=number, options={"lock": lock}),
                "options of some without pickle": lambda: envs.reset(options={"lock": lock, "reset_mask": self.mask()}),
                "next options without pickle": lambda: envs.set_next_options({"lock": lock}),
                "actions without pickle": lambda: envs.step([lock] * self.count),
                "actions of some without pickle": lambda: envs.send([lock] * len(rows), rows),
                "argument without pickle": lambda: envs.call("note", lock),
            }
        return found

    def refused_call(self, rows: list[int]) -> Callable[[], object]:
        """Return a call that is refused while these rows are in flight."""
        envs = self.envs
        return self.random.choice([
            lambda: envs.step(self.actions()), lambda: envs.call("note", 1), lambda: envs.set_attr("knob", 3),
            lambda: envs.send(self.actions(len(rows)), rows), lambda: envs.exec_func(note, rows, 3),
            lambda: envs.reset_async(env_id=rows),
        ])  # fmt: skip

    def send_only(self, rows: list[int] | None = None) -> list[int]:
        rows = self.rows() if rows is None else rows
        self.envs.send(self.actions(len(rows)), rows)
        return rows

    def send(self) -> None:
        """Step some rows and perhaps reset another one; receive them in any order, and step some of them again."""
        sent = self.send_only()
        others = [row for row in range(self.count) if row not in sent]
        if others and self.random.random() < 0.5:
            self.envs.reset_async(seed=self.seed(), env_id=others[:1])
        while in_flight := len(self.envs.in_flight):
            received = self.envs.recv(count=self.random.randint(1, in_flight))[-1]["env_id"].tolist()
            if self.random.random() < 0.3:
                self.send_only(received)

    def failed_rows(self) -> list[int]:
        return sorted(self.envs._driver.failures.failed)

    def recover(self) -> None:
        if rows := self.failed_rows():
            self.envs.reset(seed=self.seed(), options={"reset_mask": self.mask(rows)})

    def recover_by_row(self) -> None:
        if rows := self.failed_rows():
            self.envs.reset_async(seed=self.seed(), env_id=rows)

    def recover_by_load(self) -> None:
        if (rows := self.failed_rows()) and self.snapshots:
            self.envs.load([self.snapshots[-1][row] for row in rows], env_id=rows)


def _cartpole() -> Any:
    with contextlib.closing(vecenv.AsyncVectorEnv([partial(gym.make, "CartPole-v1")], num_workers=0)) as envs:
        envs.reset(seed=1)
        return envs.save(verify=False)[0]


def replay_file(path: Path, begin: str) -> tuple[str, str]:
    header, body = read_header(path)
    try:
        with contextlib.closing(Replay(header, read(header, body), begin=begin)) as replay:
            for _ in replay.run():
                pass
    except UnreadableRecord as error:
        return "cannot be replayed", str(error)
    assert replay.result is not None
    return replay.result[:2]


def require_failures_repeat(seed: int, folder: Path) -> None:
    program = Program(seed)
    for path in program.run(folder):
        record = read(*read_header(path))
        if record.failed is not None and record.failed.how == "died":
            continue
        begins = ["latest", "first"]
        found = {begin: replay_file(path, begin) for begin in begins}
        if program.reset_on_seed and not np.isnan(record.columns["rewards"][:-1]).any():
            begins.remove("first")
        assert any(found[begin][0] == AGAIN for begin in begins), (seed, vars(program), path.name, found)
        if record.snapshot is not None:
            assert replay_file(path, "snapshot")[0] == AGAIN, (seed, vars(program), path.name)


@pytest.mark.filterwarnings("ignore::UserWarning")  # the log of the failures
@pytest.mark.parametrize(
    ("first", "count"), [(0, 4), *(pytest.param(first, 12, marks=pytest.mark.long) for first in range(4, 112, 12))]
)
def test_replay_repeats_failures_of_random_programs(
    first: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "_LONG_REPLAY_SECONDS", -1.0)
    monkeypatch.setattr(recorder_module, "_RING_BYTES", 2**20)
    for seed in range(first, first + count):
        require_failures_repeat(seed, tmp_path / str(seed))
