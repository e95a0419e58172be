"""Tests that replays repeat the failures of random programs.

This requires that exactly the requests that reach environments are recorded.

A program is a random list of public calls to environments that return a checksum of everything they received. Some calls
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
NUM_HARMLESS_ACTIONS = 7
"""Actions below this number cause no failure."""


def update_checksum(env: Any, number: int) -> int:
    return int(env.unwrapped.update_checksum("exec", number))


def update_and_raise(env: Any, number: int) -> None:
    env.unwrapped.update_and_raise(number)


class Program:
    """A random program.

    Attributes:
        call_names: The names of the calls so far, for the messages of failed assertions.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.count = self.random.randint(2, 4)
        self.engine = self.random.choice(ENGINES)
        self.mode = self.random.choice(["NextStep", "SameStep", "Disabled"])
        self.restarts = self.random.random() < 0.35
        self.has_envs_in_caller = "use_caller" in self.engine or self.engine.get("num_workers") == 0
        self.reset_on_seed = self.random.random() < 0.5
        self.snapshots: list[Any] = []
        self.call_names: list[str] = []

    def build_envs(self, folder: Path) -> Any:
        every = None if self.mode == "Disabled" else self.random.choice([None, 5])
        return vecenv.AsyncVectorEnv(
            [partial(ChecksumEnv, self.reset_on_seed)] * self.count, autoreset_mode=self.mode,
            on_failure=vecenv.Restart(limit=200) if self.restarts else "raise",
            record_failures=vecenv.FlightRecorder(folder, snapshot_every=every, keep=1000), **self.engine,
        )  # fmt: skip

    def run(self, folder: Path) -> list[Path]:
        """Run the program, and return the records of its environments."""
        with contextlib.closing(self.build_envs(folder)) as envs:
            self.envs = envs
            self.attempt(partial(envs.reset, seed=self.draw_seed()))
            for _ in range(self.random.randint(1, 12)):
                envs._recorder._next_snapshot_time = 0.0
                calls = self.list_calls() if self.random.random() < 0.7 else self.list_failing_calls()
                name = self.random.choice(list(calls))
                self.call_names.append(name)
                if self.attempt(calls[name]):
                    recoveries = [self.recover, self.recover_by_row, self.recover_by_load, lambda: None]
                    self.attempt(self.random.choice(recoveries))
            self.attempt(partial(envs.step, self.draw_actions()))
            self.recover()
            files = [envs.record(row, folder / f"{row}.record") for row in range(self.count)]
            for _ in range(2):  # the first step may be an automatic reset
                self.attempt(partial(envs.step, [ChecksumEnv.RAISES] * self.count))
            return files + [Path(record.recorded) for record in envs.errors if record.recorded]

    def attempt(self, call: Callable[[], object]) -> bool:
        """Make a call, and receive all pending results. Return ``True`` if the call or a result raises."""
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

    def draw_actions(self, count: int | None = None) -> Any:
        return np.array([self.random.randrange(NUM_HARMLESS_ACTIONS) for _ in range(self.count if count is None else count)])

    def draw_actions_with(self, special: int) -> Any:
        actions = self.draw_actions()
        actions[self.draw_rows()] = special
        return actions

    def draw_rows(self) -> list[int]:
        return self.random.sample(range(self.count), self.random.randint(1, self.count))

    def mask_rows(self, rows: Iterable[int] | None = None) -> Any:
        """Return a mask of these rows, by default of random ones."""
        return np.isin(np.arange(self.count), list(self.draw_rows() if rows is None else rows))

    def draw_seed(self) -> int | None:
        return self.random.choice([None, self.random.randrange(1000)])

    # -- calls ------------------------------------------------------------------------------------------------------------

    def list_calls(self) -> dict[str, Callable[[], object]]:
        envs, number, rows = self.envs, self.random.randrange(1000), self.draw_rows()
        calls: dict[str, Callable[[], object]] = {
            "step": lambda: [envs.step(self.draw_actions()) for _ in range(self.random.randint(1, 5))],
            "step with a list": lambda: envs.step(self.draw_actions().tolist()),
            "reset": lambda: envs.reset(seed=self.draw_seed()),
            "reset some": lambda: envs.reset(
                seed=self.draw_seed(), options={"reset_mask": self.mask_rows(), "start": number}
            ),
            "reset with options": lambda: envs.reset(options=[{"start": number + row} for row in range(self.count)]),
            "set_attr": lambda: envs.set_attr("knob", [number + row for row in range(self.count)]),
            "call": lambda: envs.call("update_checksum", number),
            "exec": lambda: envs.exec_func(update_checksum, rows, number),
            "next": lambda: envs.set_next_options({"start": number}, seed=self.draw_seed(), env_id=rows),
            "save": lambda: self.snapshots.append(envs.save(verify=False)),
            "send": self.send_and_receive,
            "send, and reset": lambda: (self.send_actions(), envs.reset(seed=self.draw_seed())),
            "send, and reset some": lambda: (self.send_actions(), envs.reset(options={"reset_mask": self.mask_rows()})),
        }
        if self.snapshots:
            saved = self.random.choice(self.snapshots)
            calls["load"] = lambda: envs.load(saved)
            calls["load some"] = lambda: envs.load([saved[row] for row in rows], env_id=rows)
            calls["load another row's"] = lambda: envs.load([saved[0]], env_id=rows[:1])
        return calls

    def list_failing_calls(self) -> dict[str, Callable[[], object]]:
        """Return calls that fail or are refused, by name."""
        envs, number, rows = self.envs, self.random.randrange(1000), self.draw_rows()
        calls: dict[str, Callable[[], object]] = {
            "raise": lambda: envs.step(self.draw_actions_with(ChecksumEnv.RAISES)),
            "raise by recv": lambda: envs.send(self.draw_actions_with(ChecksumEnv.RAISES), range(self.count)),
            "raise in call": lambda: envs.call("update_and_raise", number),
            "raise in exec": lambda: envs.exec_func(update_and_raise, rows, number),
            "too many actions": lambda: envs.step(self.draw_actions(self.count + 1)),
            "no such row": lambda: envs.send([1], [self.count]),
            "bad mask": lambda: envs.reset(options={"reset_mask": np.ones(self.count + 1, bool)}),
            "snapshot of another environment": lambda: envs.load([_save_cartpole()], env_id=rows[:1]),
            "snapshots, one of another environment": lambda: envs.load([*self.snapshots[0][:-1], _save_cartpole()]),
            "another call during a step": lambda: (envs.step_async(self.draw_actions()), self.choose_refused_call(rows)()),
            "another call during send": lambda: (self.send_actions(rows), self.choose_refused_call(rows)()),
        }
        if not self.restarts:  # with restarts, the reset would fail until they are exhausted
            calls["raise in reset"] = lambda: envs.reset(options={"breaks": True, "reset_mask": self.mask_rows()})
        if not self.has_envs_in_caller:
            lock = threading.Lock()
            calls |= {
                "die": lambda: envs.step(self.draw_actions_with(ChecksumEnv.DIES)),
                "abandon": lambda: (envs.step_async(self.draw_actions()), envs.abandon(rows), envs.step_wait()),
                "unpicklable info": lambda: envs.step(self.draw_actions_with(ChecksumEnv.UNPICKLABLE)),
                "unpicklable info by recv": lambda: envs.send(
                    self.draw_actions_with(ChecksumEnv.UNPICKLABLE), range(self.count)
                ),
                "unpicklable options": lambda: envs.reset(seed=number, options={"lock": lock}),
                "unpicklable options of some": lambda: envs.reset(options={"lock": lock, "reset_mask": self.mask_rows()}),
                "unpicklable next options": lambda: envs.set_next_options({"lock": lock}),
                "unpicklable actions": lambda: envs.step([lock] * self.count),
                "unpicklable actions of some": lambda: envs.send([lock] * len(rows), rows),
                "unpicklable argument": lambda: envs.call("update_checksum", lock),
            }
        return calls

    def choose_refused_call(self, rows: list[int]) -> Callable[[], object]:
        """Return a call that is refused while these rows are in flight."""
        envs = self.envs
        return self.random.choice([
            lambda: envs.step(self.draw_actions()),
            lambda: envs.call("update_checksum", 1),
            lambda: envs.set_attr("knob", 3),
            lambda: envs.send(self.draw_actions(len(rows)), rows),
            lambda: envs.exec_func(update_checksum, rows, 3),
            lambda: envs.reset_async(env_id=rows),
        ])  # fmt: skip

    def send_actions(self, rows: list[int] | None = None) -> list[int]:
        rows = self.draw_rows() if rows is None else rows
        self.envs.send(self.draw_actions(len(rows)), rows)
        return rows

    def send_and_receive(self) -> None:
        """Step some rows and perhaps reset another one. Receive them in any order, and step some of them again."""
        sent = self.send_actions()
        others = [row for row in range(self.count) if row not in sent]
        if others and self.random.random() < 0.5:
            self.envs.reset_async(seed=self.draw_seed(), env_id=others[:1])
        while in_flight := len(self.envs.in_flight):
            received = self.envs.recv(count=self.random.randint(1, in_flight))[-1]["env_id"].tolist()
            if self.random.random() < 0.3:
                self.send_actions(received)

    def get_failed_rows(self) -> list[int]:
        return sorted(self.envs._driver.failure_log.failed)

    def recover(self) -> None:
        if rows := self.get_failed_rows():
            self.envs.reset(seed=self.draw_seed(), options={"reset_mask": self.mask_rows(rows)})

    def recover_by_row(self) -> None:
        if rows := self.get_failed_rows():
            self.envs.reset_async(seed=self.draw_seed(), env_id=rows)

    def recover_by_load(self) -> None:
        if (rows := self.get_failed_rows()) and self.snapshots:
            self.envs.load([self.snapshots[-1][row] for row in rows], env_id=rows)


def _save_cartpole() -> Any:
    with contextlib.closing(vecenv.AsyncVectorEnv([partial(gym.make, "CartPole-v1")], num_workers=0)) as envs:
        envs.reset(seed=1)
        return envs.save(verify=False)[0]


def replay_file(path: Path, begin: str) -> tuple[str, str]:
    """Replay a file in this process, and return the status and the text of the result."""
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
        results = {begin: replay_file(path, begin) for begin in begins}
        if program.reset_on_seed and not np.isnan(record.columns["rewards"][:-1]).any():
            begins.remove("first")
        assert any(results[begin][0] == AGAIN for begin in begins), (seed, vars(program), path.name, results)
        if record.snapshot is not None:
            assert replay_file(path, "snapshot")[0] == AGAIN, (seed, vars(program), path.name)


@pytest.mark.filterwarnings("ignore::UserWarning")  # the engine logs the failures as warnings
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
