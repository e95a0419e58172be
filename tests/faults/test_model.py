"""Every call in any order, with faults and interruptions, against a model: one plain environment per row.

By default a few seconds; ``PYTHONPATH=tests python tests/faults/test_model.py 1000`` makes 1,000 runs, ``pytest -m soak -s``
goes on for ``VECENV_SOAK_SECONDS`` (3,600 if it is not set), and both print the numbers of runs and moves.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from at_random import AtRandom, ignored
from at_random import handler as alarmed
from counting import DIE, RAISE, Counting, Drawing, echo
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from interrupted_calls import (
    RESTART,
    SETTINGS,
    UNDISTURBED,
    Hung,
    Setting,
    Watchdog,
    brief,
    children,
    drops_calls,
    in_flight,
    kill,
    needs_reset,
    within,
)
from interruption import Interruption, Stopped
from observe import FAULTS, PATIENCE, still_running
from sampling import each_once
from signals import pythons_own_ctrl_c

from vecenv.errors import EnvFailed, StepTimeout, WorkerDied

pytestmark = [mark for mark in FAULTS if mark.name != "timeout"]

COUNT, BATCH, LENGTH = 4, 2, 4
OWN = Setting({"num_workers": 2, "generators": "own"}, kind=Drawing)
BASES = {
    **SETTINGS,
    "generators": OWN,
    "generators, in process": replace(OWN, options={**OWN.options, "num_workers": 0}, local=(0, 1, 2, 3)),
    "generators, caller's share": replace(OWN, options={**OWN.options, "use_caller": True}, local=(0,)),
}
CHOICES: dict[str, Setting] = {
    name: replace(BASES[base], options={**BASES[base].options, "batch_size": BATCH, **more}, length=LENGTH)
    for name, base, more in [
        ("in process", "in process", {}),
        ("caller's share", "caller's share", {}),
        ("one worker", "one worker", {}),
        ("two workers", "batch_size", {}),
        ("two workers of a fork server", "batch_size", {"context": "forkserver"}),
        ("same step", "same step", {}),
        ("same step, restart", "same step", RESTART),
        ("same step, in process", "in process", {"autoreset_mode": "SameStep"}),
        ("no autoreset", "batch_size", {"autoreset_mode": "Disabled"}),
        ("no autoreset, restart", "batch_size", {"autoreset_mode": "Disabled", **RESTART}),
        ("restart", "restart", {}),
        ("max_concurrency", "max_concurrency", {}),
        ("list actions", "list actions", {}),
        ("Text actions, restart", "Text actions", RESTART),
        ("Text observations", "Text observations", {}),
        ("no shared memory, restart", "no shared memory", RESTART),
        ("env_threads", "batch_size", {"env_threads": 2}),
        ("env_threads, restart", "batch_size", {"env_threads": 2, **RESTART}),
        ("generators", "generators", {}),
        ("generators, in process", "generators, in process", {}),
        ("generators, caller's share", "generators, caller's share", {}),
        ("generators, restart", "generators", RESTART),
    ]
}
POLLS = [None, 0.0, 30.0]
COUNTS = {"runs": 0, "moves": 0, "interrupted": 0, "excused": 0}


class Row:
    """One environment and its expected row, with the autoreset mode implemented by hand."""

    def __init__(self, setting: Setting, index: int) -> None:
        self.env: Counting = setting.kind(index, setting.length)
        self.mode = AutoresetMode(setting.options.get("autoreset_mode", "NextStep"))
        self.done = False
        self.last: Any = None
        self.next_seed: int | None = None  # of the episode that autoreset begins

    def reset(self, seed: int | None) -> tuple[Any, ...]:
        if isinstance(self.env, Drawing):
            self.env.begin(seed)
        self.last, info = self.env.reset(seed=seed)
        self.done = False
        return self.last, 0.0, False, False, info

    def _begin_next(self) -> tuple[Any, ...]:
        seed, self.next_seed = self.next_seed, None
        return self.reset(seed)

    def step(self, action: Any) -> tuple[Any, ...]:
        if self.done and self.mode is AutoresetMode.NEXT_STEP:
            return self._begin_next()
        result = self.env.step(action)
        self.last, self.done = result[0], result[2]
        if self.done and self.mode is AutoresetMode.SAME_STEP:
            first, *_, info = self._begin_next()
            return first, *result[1:4], {**info, "final_obs": result[0], "final_info": result[4]}
        return result


def assert_row(result: tuple[Any, ...], at: int, wanted: tuple[Any, ...], name: str) -> None:
    """Assert that row ``at`` of a result, of a step or of a reset, equals this row."""
    observation = result[0][at]
    assert type(observation) is str or observation.dtype == wanted[0].dtype
    assert np.array_equal(observation, wanted[0]), f"{name} says {observation}, wanted {wanted[0]}"
    if len(result) == 5:
        found = tuple(column[at] for column in result[1:4])
        assert found == wanted[1:4], f"{name} says {found}, wanted {wanted[1:4]}"
    check_infos(result[-1], at, wanted[4], name)


def check_infos(infos: dict[str, Any], at: int, wanted: dict[str, Any], name: str) -> None:
    here = row_of(infos, at)
    here.pop("env_id", None)
    final, last = here.pop("final_obs", None), wanted.get("final_obs")
    assert np.array_equal(final, last), f"{name} ended with {final}, wanted {last}"
    assert here == {key: value for key, value in wanted.items() if key != "final_obs"}, f"infos of {name}: {here}"


def row_of(infos: dict[str, Any], at: int) -> dict[str, Any]:
    """Return one row's info from a dict of arrays with masks."""
    here = [key for key in infos if not key.startswith("_") and infos[f"_{key}"][at]]
    return {key: row_of(infos[key], at) if isinstance(infos[key], dict) else infos[key][at] for key in here}


class Model:
    """An engine, the expected rows, and the pending call.

    Attributes:
        pending: The kind of the pending call, and the check of its result.
        in_flight: Rows that were sent and not received, with their expected values.
        kept: The last saved state, how it is loaded, and the rows at that time.
        armed: The interruption of the next call.
    """

    def __init__(self, name: str) -> None:
        self.setting = CHOICES[name]
        self.restart = "on_failure" in self.setting.options
        self.autoresets = self.setting.options.get("autoreset_mode") != "Disabled"
        if self.setting.options.get("context") == "forkserver":
            self.setting.open().close()  # its fork server stays
        self.known = children()
        self.log: list[object] = [name]
        self.tick = 0
        self.envs: Any = None
        self.kept: list[tuple[bool, Any, list[Row]]] = []
        self.open()

    def open(self) -> None:
        self.envs = self.setting.open()
        self.rows = [Row(self.setting, index) for index in range(COUNT)]
        self.pending: tuple[str, Callable[[Any], None]] | None = None
        self.in_flight: dict[int, tuple[Any, ...]] = {}
        self.armed: list[Interruption] = []
        self.recover()
        self.proved = not self.setting.local

    def close_and_build(self, timeout: float | None, really: bool) -> None:
        if really:
            self.close(timeout=timeout)
            self.open()

    def prove(self) -> None:
        """Prove snapshots exact now, because an exception of a trace function during a proof would count as the
        environment's.
        """
        self.envs.save()
        self.proved = True

    def close(self, **options: Any) -> None:
        envs, self.envs = self.envs, None
        if envs is not None:
            with warnings.catch_warnings(), Watchdog(self.known, 5.0):
                warnings.simplefilter("ignore")
                envs.close(**options)
        left = children() - self.known
        kill(left)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        assert not (left and envs is not None), f"processes {left} were left by close()"

    # the state that every move needs

    def seed(self) -> int:
        self.tick += 1
        return 100 * self.tick

    def recover(self) -> None:
        """Reset with a seed after a fault; everything is known again."""
        seed = self.seed()
        for _ in range(COUNT + 1):
            try:
                observations, infos = self.envs.reset(seed=seed)
            except WorkerDied:
                continue  # another failure that the model has not seen yet
            self.all_began(infos, seed, range(COUNT))
            break
        # an environment loaded from another row reports that row until it is rebuilt
        self.envs.set_attr("index", list(range(COUNT)))
        observations, _ = self.envs.reset(seed=seed)
        for index, row in enumerate(self.rows):
            row.env.index = index
            wanted = row.reset(seed + index)[0]
            assert np.array_equal(observations[index], wanted), f"after reset() env {index} says {observations[index]}"
            row.next_seed = None
        if self.autoresets:
            self.envs.set_next_options()  # an environment that failed has forgotten them, and the others have not
        self.pending = None
        self.in_flight = {}

    def all_began(self, infos: dict[str, Any], seed: int, ids: Any) -> None:
        """Check that these rows begin anew, without values from before. (``load`` may have changed their index.)"""
        assert {key.removeprefix("_") for key in infos} <= {"resets", "tag", "restarted"}, infos
        for index in ids:
            assert infos["resets"][index] == 1
            assert infos["tag"][index].partition(" ")[2] == f"reset {seed + index}.1", infos["tag"][index]

    def guard(self, move: Callable[[], None]) -> None:
        """Make a move with a time limit; it may fail if an environment of this process was hit itself."""
        with Watchdog(self.known) as watchdog:
            try:
                move()
            except ResetNeeded:
                if not self.was_interrupted:
                    raise
                COUNTS["resets"] = COUNTS.get("resets", 0) + 1
                self.recover()
                self.learn_calls()
            except Exception as error:
                if watchdog.bit:
                    raise Hung(f"it hung; after its workers were killed: {brief(error)}") from None
                if isinstance(error, AssertionError) or not self.excused(error):
                    raise
                COUNTS["excused"] += 1
                if self.envs._state.value != "default":
                    raise AssertionError(f"the error came, and {self.envs._state.value} is still pending") from error
                self.recover()
        assert not watchdog.bit, "it went on only when its workers were killed"

    def learn_calls(self) -> None:
        """Read the effect of an interrupted call: it may have been carried out."""
        for name in ("calls", "marks", "mark"):
            for row, value in zip(self.rows, self.envs.get_attr(name), strict=True):
                setattr(row.env, "_mark" if name == "mark" else name, value)

    def require_state(self, *, is_call: bool = False) -> None:
        """Raise if an interruption left only a reset, or a call that may have been carried out."""
        if needs_reset(self.envs) or (is_call and drops_calls(self.envs)):
            raise ResetNeeded

    def excused(self, error: Exception) -> bool:
        named = re.search(r"\benvs? \[?(\d+)", brief(error, whole=True))
        return self.was_interrupted and bool(self.setting.local) and named is not None

    was_interrupted = False

    def interruption(self) -> Any:
        if not self.armed:
            return UNDISTURBED
        COUNTS["interrupted"] += 1
        self.was_interrupted = True
        self.log.append(self.armed[0])
        return self.armed.pop(0)

    def until_done(self, first: Callable[[], Any], again: Callable[[], Any] | None, kind: str) -> Any:
        """Return the result of a call that may be interrupted: repeat it if it was not submitted, wait if it is pending.

        Args:
            first: Makes it.
            again: Waits for it, as ``first`` does if they are the same; ``None``: ``first`` only submits a call.
            kind: The state while it is pending.
        """
        todo, begun, before = first, False, len(self.envs.errors)
        while True:
            returned, result, interruption = False, None, self.interruption()
            with interruption:
                result, returned = todo(), True
            if interruption is not UNDISTURBED:
                assert not interruption.swallowed or self.on_record(before), f"swallowed: {interruption}"
            if not returned:
                begins = todo is first and first is not again  # otherwise only this process's own share can be lost
                self.require_state(is_call=kind == "call" and (begins or bool(self.setting.local)))
            state = self.envs._state.value
            if not returned and state == "default":
                self.fell_into_an_environment(interruption)
            if returned:
                assert state == ("default" if again is not None else kind), state
                return result
            assert state in ("default", kind), state
            assert state == kind or not begun, "the answer is pending, and the state says default"
            begun = begun or state == kind
            if begun:
                if again is None:
                    return None
                todo = again

    def fell_into_an_environment(self, interruption: Any) -> None:
        """True if the exception hit an environment in this process; its notes name the environment."""
        if self.setting.local and re.search(r"\benvs? \[?(\d+)", getattr(interruption, "note", "")):
            raise RuntimeError(interruption.note)

    def on_record(self, before: int) -> list[int]:
        """Return the environments of this process that have failed since that many records."""
        return [record.env for record in list(self.envs.errors)[before:] if record.env in self.setting.local]

    def fell_into_what_was_dropped(self, before: int) -> None:
        """True if a reset carried out a pending request of an environment that was hit: that failure is only on record."""
        if (hit := self.on_record(before)) and self.was_interrupted:
            if self.envs._state.value == "reset":
                self.envs.reset_wait()
            raise RuntimeError(f"env {hit[0]} was interrupted in a step that a reset dropped")

    def all_rows(self, result: tuple[Any, ...], wanted: list[tuple[Any, ...]]) -> None:
        for index in range(COUNT):
            assert_row(result, index, wanted[index], f"env {index}")

    def actions(self, numbers: list[int]) -> Any:
        return self.setting.actions(numbers)

    def action_of(self, number: int) -> Any:
        return self.setting.actions([number])[0]

    # moves

    def stepped(self, numbers: list[int]) -> list[tuple[Any, ...]]:
        return [row.step(self.action_of(number)) for row, number in zip(self.rows, numbers, strict=True)]

    def step(self, numbers: list[int]) -> None:
        wanted = self.stepped(numbers)
        actions = self.actions(numbers)
        self.all_rows(self.until_done(lambda: self.envs.step(actions), self.envs.step_wait, "step"), wanted)

    def step_async(self, numbers: list[int]) -> None:
        wanted = self.stepped(numbers)
        actions = self.actions(numbers)
        self.until_done(lambda: self.envs.step_async(actions), None, "step")
        self.pending = "step", lambda result: self.all_rows(result, wanted)

    def reset_rows(self, seed: int | None, mask: list[bool] | None) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
        wanted = []
        for index, row in enumerate(self.rows):
            if mask is None or mask[index]:
                wanted.append(row.reset(None if seed is None else seed + index))
            else:
                wanted.append((row.last, 0.0, False, False, {}))
        options = {} if mask is None else {"options": {"reset_mask": np.array(mask)}}
        return {"seed": seed, **options}, wanted

    def reset(self, seed: int | None, mask: list[bool] | None) -> None:
        arguments, wanted = self.reset_rows(seed, mask)
        before = len(self.envs.errors)
        result = self.until_done(lambda: self.envs.reset(**arguments), self.envs.reset_wait, "reset")
        self.fell_into_what_was_dropped(before)
        self.all_rows(result, wanted)
        self.in_flight = {}

    def reset_async(self, seed: int | None) -> None:
        arguments, wanted = self.reset_rows(seed, None)
        before = len(self.envs.errors)
        self.until_done(lambda: self.envs.reset_async(**arguments), None, "reset")
        self.fell_into_what_was_dropped(before)
        self.in_flight = {}
        self.launched = dict(enumerate(wanted))
        self.pending = "reset", lambda result: self.all_rows(result, wanted)

    def wait(self, timeout: float | None) -> None:
        """Wait for the pending call; if it is late, it stays pending."""
        assert self.pending is not None
        kind, check = self.pending
        wait = getattr(self.envs, f"{kind}_wait")
        while True:
            try:
                # with the same timeout again: a stopped worker continues only afterwards
                fetch = functools.partial(wait, timeout=timeout)
                result = self.until_done(fetch, fetch, kind)
                break
            except StepTimeout:
                assert timeout is not None
                assert self.envs._state.value == kind
                return
        self.pending = None
        check(result)

    def call(self, name: str, begin_only: bool) -> None:
        self.tick += 1
        word, envs = f"word {self.tick}", self.envs
        plain = [row.env for row in self.rows]

        def same(wanted: Any) -> Callable[[Any], None]:
            def check(result: Any) -> None:
                assert result == wanted, (result, wanted)

            return check

        if name == "get_attr":
            same(tuple(env.marks for env in plain))(self.until_done(lambda: envs.get_attr("marks"), envs.call_wait, "call"))
        elif name == "set_attr":
            marks = [f"{word} of {index}" for index in range(COUNT)]
            for env, mark in zip(plain, marks, strict=True):
                env.mark = mark
            result = self.until_done(lambda: envs.set_attr("mark", marks), envs.call_wait, "call")
            assert result in (None, (None,) * COUNT)
            assert envs.get_attr("mark") == tuple(marks)
        elif name == "set_next_options" and not self.autoresets:
            with pytest.raises(ValueError, match="begins no episodes"):
                envs.set_next_options()
        elif name == "set_next_options":
            seeds = [None if (self.tick + index) % 3 == 0 else self.seed() for index in range(COUNT)]
            for row, seed in zip(self.rows, seeds, strict=True):
                row.next_seed = seed
            result = self.until_done(lambda: envs.set_next_options(seed=seeds), envs.call_wait, "call")
            assert result in (None, (None,) * COUNT)
        elif name == "exec_func":
            wanted = tuple(echo(env, word) if index in (0, 3) else None for index, env in enumerate(plain))
            if begin_only:
                self.until_done(lambda: envs.exec_func_send(echo, [3, 0], word), None, "call")
                self.pending = "call", same(wanted)
            else:
                same(wanted)(self.until_done(lambda: envs.exec_func(echo, [3, 0], word), envs.call_wait, "call"))
        else:
            wanted = tuple(echo(env, word) for env in plain)
            if begin_only:
                self.until_done(lambda: envs.call_async("echo", word), None, "call")
                self.pending = "call", same(wanted)
            else:
                same(wanted)(self.until_done(lambda: envs.call("echo", word), envs.call_wait, "call"))

    def save(self, whole: bool) -> None:
        """Save the state of all rows, for several later loads."""
        found = self.until_done(self.envs.state_dict if whole else self.envs.save, self.envs.call_wait, "call")
        self.kept = [*self.kept[-2:], (whole, found, copy.deepcopy(self.rows))]

    def load(self, which: int, ids: list[int]) -> None:
        """Load the saved state into some rows or all, each from its own or all from one."""
        whole, kept, then = self.kept[which % len(self.kept)]
        if whole:
            ids, load = list(range(COUNT)), lambda: self.envs.load_state_dict(kept)
        elif len(ids) == COUNT:
            load = lambda: self.envs.load([kept[index] for index in ids], ids)  # noqa: E731
        else:
            then = [then[ids[0]]] * COUNT
            load = lambda: self.envs.load(kept[ids[0]], ids)  # noqa: E731
        observations = self.until_done(load, self.envs.call_wait, "call")
        for at, index in enumerate(ids):
            self.rows[index] = copy.deepcopy(then[index])
            assert np.array_equal(observations[at], then[index].last), f"env {index} was loaded and says {observations[at]}"

    def send(self, ids: list[int], numbers: list[int]) -> None:
        ids = [index for index in ids if index not in self.in_flight]
        if not ids:
            return
        numbers = numbers[: len(ids)]
        actions, before = self.actions(numbers), in_flight(self.envs)
        while True:
            with self.interruption():
                self.envs.send(actions, np.array(ids))
            self.require_state()
            more = in_flight(self.envs) - before
            assert more in (0, len(ids)), f"{more} of {len(ids)} rows were sent"
            if more:
                break
        for index, number in zip(ids, numbers, strict=True):
            self.in_flight[index] = self.rows[index].step(self.action_of(number))

    def recv(self, timeout: float | None) -> None:
        result = None
        while result is None:
            try:
                interruption = self.interruption()
                with interruption:
                    result = self.envs.recv(timeout)
                if result is None:
                    self.require_state()
                    self.fell_into_an_environment(interruption)
            except StepTimeout:
                assert timeout is not None
                timeout = None
        if self.pending is not None:  # a reset, received row by row
            self.in_flight, self.pending = self.launched, None
        ids = result[-1]["env_id"].tolist()
        assert len(set(ids)) == BATCH
        for at, index in enumerate(ids):
            assert index in self.in_flight, f"row {index} was received without being in flight"
            assert_row(result, at, self.in_flight.pop(index), f"env {index}")

    def go_wrong(self, numbers: list[int]) -> None:
        """Make a step in which some environments raise, and some kill their worker with all its rows."""
        self.recover()
        if self.setting.local:  # the caller's own share has no worker to kill
            numbers = [RAISE if number == DIE else number for number in numbers]
        raising = {index for index, number in enumerate(numbers) if number == RAISE}
        dying = {index for index, number in enumerate(numbers) if number == DIE}
        lost = {
            row
            for worker in range(len(self.worker_pids()))
            for row in self.rows_of(worker)
            if dying & {*self.rows_of(worker)}
        }
        self.remember()
        calm = [1 if index in raising | lost else number for index, number in enumerate(numbers)]
        wanted = self.stepped(calm)
        if self.restart:
            self.restarted(self.envs.step(self.actions(numbers)), wanted, raising | lost)
        else:
            with pytest.raises((ValueError, WorkerDied)) as raised:
                self.envs.step(self.actions(numbers))
            text = brief(raised.value, whole=True)
            assert raising - lost <= rows_in(text), text
            assert bool(lost) == ("died during step" in text), text
            assert raising - lost or set(raised.value.envs) == lost, text  # type: ignore[attr-defined]
            with pytest.raises(EnvFailed):
                self.envs.step(self.actions([1] * COUNT))
        self.recover()

    def remember(self) -> None:
        """Return the last values of every row."""
        self.handed = [copy.copy(row.last) for row in self.rows]

    def restarted(self, result: tuple[Any, ...], wanted: list[tuple[Any, ...]], lost: set[int]) -> None:
        for index in range(COUNT):
            if index in lost:
                assert (result[1][index], result[2][index], result[3][index]) == (0.0, False, True)
                assert result[4]["restarted"][index]
                assert np.array_equal(result[4]["final_obs"][index], self.handed[index])
            else:
                assert_row(result, index, wanted[index], f"env {index}")

    def worker_pids(self) -> list[int]:
        return [process.pid for process in self.envs.processes]

    def die(self, which: int, discovered: str) -> None:
        """Kill a worker silently; a step, a call or a reset notices it."""
        self.recover()
        pids = self.worker_pids()
        victim = which % len(pids)
        os.kill(pids[victim], signal.SIGKILL)
        assert not still_running([pids[victim]], PATIENCE)
        self.remember()
        rows = self.rows_of(victim)
        if discovered == "step":
            wanted = [row.step(self.action_of(1)) for row in self.rows]
            if self.restart:
                self.restarted(self.envs.step(self.actions([1] * COUNT)), wanted, set(rows))
            else:
                with pytest.raises(WorkerDied):
                    self.envs.step(self.actions([1] * COUNT))
        elif discovered == "call":
            with pytest.raises((WorkerDied, EnvFailed)):
                self.envs.call("echo", "x")
        elif discovered == "reset of some":
            self.reset_around(rows, which)
        self.recover()

    def rows_of(self, worker: int) -> list[int]:
        share = COUNT // len(self.worker_pids())
        return list(range(worker * share, (worker + 1) * share))

    def reset_around(self, lost: list[int], which: int) -> None:
        """Reset rows of a dead worker, with another row or not, by a mask or by index."""
        chosen = sorted({*lost, which})
        others = [index for index in range(COUNT) if index not in chosen]
        for _ in range(2):
            seed = self.seed()
            mask = np.isin(np.arange(COUNT), chosen)
            try:
                observations, infos = self.envs.reset(seed=seed, options={"reset_mask": mask})
                break
            except WorkerDied:
                assert not self.restart
        self.all_began(infos, seed, chosen)
        assert not infos["_tag"][others].any()
        for index in others:
            assert np.array_equal(observations[index], self.handed[index])

    def die_in_flight(self, which: int) -> None:
        """Kill a worker, twice, while rows are received one by one."""
        self.recover()
        self.remember()
        victim = which % len(self.worker_pids())
        for _ in range(2 if self.restart else 1):
            os.kill(self.worker_pids()[victim], signal.SIGKILL)
            expected = [row.step(self.action_of(1)) for row in self.rows]
            self.envs.send(self.actions([1] * COUNT), np.arange(COUNT))
            seen: set[int] = set()
            died = False
            while in_flight(self.envs) and not (died and in_flight(self.envs) < BATCH):
                try:
                    result = self.envs.recv()
                except WorkerDied:
                    assert not self.restart
                    assert not died
                    died = True
                    continue
                for at, index in enumerate(result[4]["env_id"].tolist()):
                    assert index not in seen
                    seen.add(index)
                    if result[4].get("_restarted", np.zeros(BATCH, bool))[at]:
                        assert index in self.rows_of(victim)
                        assert np.array_equal(result[4]["final_obs"][at], self.handed[index])
                        begun = self.setting.options.get("autoreset_mode") == "SameStep"
                        assert np.array_equal(result[0][at], self.handed[index]) != begun
                        assert result[3][at]
                    else:
                        assert index not in self.rows_of(victim)
                        assert_row(result, at, expected[index], f"env {index}")
                    self.handed[index] = copy.copy(result[0][at])
            assert died or seen == set(range(COUNT))
        self.recover()

    def abandon(self, which: int) -> None:
        """Abandon a row; the call may be interrupted and repeated."""
        while True:
            returned = False
            with self.interruption():
                self.envs.abandon([which])
                returned = True
            self.require_state()
            if returned:
                return

    def die_at_work(self, which: int, abandoned: bool) -> None:
        """Kill a worker during a step, or abandon its row, after it has replied or before."""
        self.recover()
        pids = self.worker_pids()
        self.remember()
        wanted = [row.step(self.action_of(1)) for row in self.rows]
        self.envs.step_async(self.actions([1] * COUNT))
        victim = which % len(pids)
        if abandoned:
            self.abandon(victim * (COUNT // len(pids)))
        else:
            os.kill(pids[victim], signal.SIGKILL)
        try:
            result = self.until_done(self.envs.step_wait, self.envs.step_wait, "step")
        except WorkerDied:
            assert not self.restart
        else:
            lost = set(np.flatnonzero(result[4].get("_restarted", np.zeros(COUNT, bool))).tolist())
            assert self.restart or not lost
            self.restarted(result, wanted, lost)
        assert abandoned or not still_running([pids[victim]], PATIENCE)
        self.recover()

    def stop_and_go(self, which: int, numbers: list[int]) -> None:
        """Stop a worker until its reply is late, and continue it."""
        pids = self.worker_pids()
        victim = pids[which % len(pids)]
        os.kill(victim, signal.SIGSTOP)
        try:
            self.step_async(numbers)
            self.wait(0.02)
        finally:
            os.kill(victim, signal.SIGCONT)
        if self.pending is not None:
            self.wait(None)

    def wrong_calls(self) -> None:
        """Make calls out of order: they are refused and change nothing."""
        envs = self.envs
        waits = {kind: getattr(envs, f"{kind}_wait") for kind in ("step", "reset", "call")}
        if self.pending is not None:
            resets = (envs.reset_async, envs.reset)
            others = (
                lambda: envs.step_async(self.actions([1] * COUNT)), lambda: envs.call_async("echo", "x"),
                lambda: envs.get_attr("marks"), lambda: envs.set_attr("mark", 1), envs.save,
            )  # fmt: skip
            refused = (*resets, *others)
            if envs._driver.is_interrupted:  # resets drop a request after an interrupted wait, and all calls drop a call
                refused = () if self.pending[0] == "call" else others
            for call in refused:
                with pytest.raises(AlreadyPendingCallError):
                    call()
            del waits[self.pending[0]]
        for wait in waits.values():
            with pytest.raises(NoAsyncCallError):
                wait()
        with pytest.raises((ValueError, AlreadyPendingCallError)):
            envs.step(self.actions([1] * (COUNT - 1)))
        if self.in_flight:
            with pytest.raises(AlreadyPendingCallError):
                envs.send(self.actions([1]), np.array([next(iter(self.in_flight))]))


NUMBERS = st.lists(st.integers(0, RAISE - 1), min_size=COUNT, max_size=COUNT)
WRONG = st.lists(st.sampled_from([0, 1, 2, 3, RAISE, RAISE, DIE]), min_size=COUNT, max_size=COUNT).filter(
    lambda numbers: max(numbers) >= RAISE
)
CALLS = ["call", "get_attr", "set_attr", "set_next_options", "exec_func"]
DISCOVERED = ["step", "call", "reset", "reset of some"]
SEEDS = st.one_of(st.none(), st.integers(10, 99))


def chosen(most: int) -> st.SearchStrategy[list[int]]:
    """Return some rows, in any order."""
    return st.builds(lambda order, many: order[:many], st.permutations(range(most)), st.integers(1, most))


def idle(model: Model) -> bool:
    return model.pending is None and not model.in_flight


def may_fail(model: Model) -> bool:
    return idle(model) and not model.armed


def may_kill(model: Model) -> bool:
    return may_fail(model) and not model.setting.local


def a_move(name: str, condition: Callable[[Model], Any] = lambda model: True, /, **arguments: Any) -> Any:
    """Declare a rule that is a move of the model if it is possible now, and does nothing otherwise.

    It is not a precondition, because the pending state depends on timing, and hypothesis could not repeat its draws.
    """

    def play(self: Calm, **drawn: Any) -> None:
        if condition(self.model):
            self.move(f"{name}({', '.join(map(str, drawn.values()))})", lambda: getattr(self.model, name)(**drawn))

    return rule(**arguments)(play)


WORKER = st.integers(0, COUNT - 1)
SELDOM = st.sampled_from([False, False, False, True])  # it takes longer than all others


class Calm(RuleBasedStateMachine):
    """A hypothesis state machine with all faults, and without interruptions."""

    model: Model

    @initialize(name=st.sampled_from(sorted(CHOICES)))
    def start(self, name: str) -> None:
        COUNTS["runs"] += 1
        self.model = Model(name)

    def move(self, text: str, move: Callable[[], None]) -> None:
        model = self.model
        COUNTS["moves"] += 1
        model.log.append(text)
        model.was_interrupted = False
        try:
            model.guard(move)
        except BaseException as error:
            note("; ".join(map(str, model.log[-25:])))
            error.add_note("the last moves: " + "; ".join(map(str, model.log[-12:])))
            raise
        if model.was_interrupted:
            model.armed = []

    step = a_move("step", idle, numbers=NUMBERS)
    step_async = a_move("step_async", idle, numbers=NUMBERS)
    reset = a_move("reset", lambda model: model.pending is None, seed=SEEDS, mask=st.none())
    reset_some = a_move("reset", idle, seed=SEEDS, mask=st.lists(st.booleans(), min_size=COUNT, max_size=COUNT).filter(any))
    reset_async = a_move("reset_async", idle, seed=SEEDS)
    wait = a_move("wait", lambda model: model.pending is not None, timeout=st.sampled_from(POLLS))
    call = a_move("call", idle, name=st.sampled_from(CALLS), begin_only=st.booleans())
    save = a_move("save", idle, whole=st.booleans())
    load = a_move("load", lambda model: idle(model) and model.kept, which=st.integers(0, 2), ids=chosen(COUNT))
    send = a_move(
        "send", lambda model: model.pending is None and len(model.in_flight) < COUNT, ids=chosen(COUNT), numbers=NUMBERS
    )
    recv = a_move(
        "recv", lambda model: len(model.in_flight) >= BATCH or (model.pending or " ")[0] == "reset",
        timeout=st.sampled_from(POLLS),
    )  # fmt: skip
    environments_fail = a_move("go_wrong", may_fail, numbers=WRONG)
    a_worker_is_killed = a_move("die", may_kill, which=WORKER, discovered=st.sampled_from(DISCOVERED))
    a_worker_is_killed_at_work = a_move("die_at_work", may_kill, which=WORKER, abandoned=st.just(False))
    a_worker_is_killed_in_flight = a_move("die_in_flight", may_kill, which=WORKER)
    a_worker_is_abandoned = a_move(
        "die_at_work", lambda model: idle(model) and not model.setting.local, which=WORKER, abandoned=st.just(True)
    )
    a_worker_is_stopped = a_move(
        "stop_and_go", lambda model: idle(model) and not model.setting.local, which=WORKER, numbers=NUMBERS
    )
    wrong_calls = a_move("wrong_calls")
    close_and_build = a_move("close_and_build", timeout=st.sampled_from([None, 1.0]), really=SELDOM)

    @invariant()
    def the_state_is_what_is_pending(self) -> None:
        model = getattr(self, "model", None)
        if model is None or model.envs is None:
            return
        kind = model.pending[0] if model.pending is not None else "default"
        assert model.envs._state.value == kind
        assert in_flight(model.envs) == len(model.in_flight) + (COUNT if kind in ("reset", "step") else 0)

    def teardown(self) -> None:
        model = getattr(self, "model", None)
        if model is not None:
            model.close(terminate=sys.exc_info()[0] is not None)


def rows_in(text: str) -> set[int]:
    """The rows that a text names: ``env 3``, ``envs 1-3, 7``."""
    listed = " ".join(re.findall(r"\benvs? (\d[-\d, ]*)", text))
    spans = re.findall(r"(\d+)(?:-(\d+))?", listed)
    return {row for first, last in spans for row in range(int(first), int(last or first) + 1)}


class Machine(Calm):
    """A hypothesis state machine with all faults and with interruptions."""

    @rule(
        kind=st.sampled_from(["line", "call"]), moment=st.integers(0, 160), again=st.integers(0, 60),
        error=st.sampled_from([KeyboardInterrupt, Stopped]),
    )  # fmt: skip
    def interrupt_the_next_call(self, kind: str, moment: int, again: int, error: type[BaseException]) -> None:
        if self.model.armed:
            return
        if not self.model.proved:
            if not idle(self.model):
                return
            self.move("prove", self.model.prove)
        files = within(self.model.setting)
        self.model.armed = [Interruption(kind, moment, error, files)]
        if again < 20:
            self.model.armed.append(Interruption(kind, again, Stopped, files))

    @rule(delay=st.floats(1e-5, 3e-3), again=st.booleans())
    def a_timer_goes_off_in_the_next_call(self, delay: float, again: bool) -> None:
        """Set a real timer with a handler that raises in the next call."""
        self.model.armed = self.model.armed or [AtRandom("ALARM", delay), *([AtRandom("ALARM", delay / 3)] if again else [])]


@contextlib.contextmanager
def alarms() -> Iterator[None]:
    """Allow a real signal to raise in the calls that :class:`AtRandom` guards."""
    with pythons_own_ctrl_c(), contextlib.ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, alarmed))
        stack.callback(setattr, sys, "unraisablehook", sys.unraisablehook)
        sys.unraisablehook = ignored  # a timer that fires in a finalizer, or in a call of the collector
        yield


def play(machine: type[Calm], examples: int, moves: int) -> None:
    with alarms():
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=moves,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                database=None,
                phases=[Phase.generate],  # shrinking takes minutes; the last moves are in the note
            ),
        )


def send_and_receive(model: Model) -> None:
    """Send and receive rows; the interrupted wait is the one for the last of them."""
    armed, model.armed = model.armed, []
    model.send([3, 0, 2, 1], [1, 2, 3, 4])
    model.recv(None)
    model.armed = armed
    model.recv(None)


EXAMPLES: dict[str, Callable[[Model], None]] = {
    "step": lambda model: model.step([1, 2, 3, 4]),
    "reset": lambda model: model.reset(50, None),
    "reset of some": lambda model: model.reset(50, [True, False, True, False]),
    **{name: lambda model, name=name: model.call(name, False) for name in CALLS},
    "save": lambda model: model.save(False),
    "send, recv": send_and_receive,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("choice", "call"),
    each_once(["one worker", "two workers", "max_concurrency", "list actions", "restart", "same step"], list(EXAMPLES)),
)
def test_time_limit_during_a_wait_loses_nothing(choice: str, call: str) -> None:
    """A worker is stopped for a moment, and the call that waits for it is interrupted, twice."""
    with alarms():
        model = Model(choice)
        pid = model.worker_pids()[-1]
        go_on = threading.Timer(0.5, os.kill, (pid, signal.SIGCONT))
        try:
            model.step([1, 2, 3, 4])
            os.kill(pid, signal.SIGSTOP)
            go_on.start()
            model.armed = [AtRandom("ALARM", 0.1), AtRandom("ALARM", 0.1)]
            model.guard(lambda: EXAMPLES[call](model))
            model.armed = []
            model.step([4, 3, 2, 1])
        finally:
            go_on.join()
            model.close(terminate=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("choice", ["two workers", "same step, restart"])
@pytest.mark.parametrize("numbers", [[1, RAISE, 2, DIE], [DIE, 1, DIE, 1], [RAISE, 1, RAISE, 1]], ids=str)
def test_several_failures_in_one_step_are_all_reported(choice: str, numbers: list[int]) -> None:
    model = Model(choice)
    try:
        model.go_wrong(numbers)
        model.step([1, 2, 3, 4])
    finally:
        model.close(terminate=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("runs", [3, pytest.param(20, marks=pytest.mark.long)])
def test_any_order(runs: int) -> None:
    """A few runs with all faults and interruptions."""
    play(Machine, runs, 50)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("runs", [2, pytest.param(6, marks=pytest.mark.long)])
def test_any_order_without_interruptions(runs: int) -> None:
    """The same runs undisturbed: the model holds for an engine without interruptions."""
    play(Calm, runs, 50)


@pytest.mark.soak
@pytest.mark.timeout(10**6)
def test_any_order_soak() -> None:
    """Runs for ``VECENV_SOAK_SECONDS``."""
    deadline = time.monotonic() + float(os.environ.get("VECENV_SOAK_SECONDS", "3600"))
    COUNTS.update(dict.fromkeys(COUNTS, 0))
    try:
        while time.monotonic() < deadline:
            play(Machine, 20, 100)
    finally:
        print(", ".join(f"{count} {name}" for name, count in COUNTS.items()))


def main(runs: int) -> None:
    """Make this many runs, or until one fails."""
    started = time.monotonic()
    try:
        while COUNTS["runs"] < runs:
            play(Machine, min(20, runs - COUNTS["runs"]), 50)
            print(f"{time.monotonic() - started:.0f} s:", COUNTS, flush=True)
    finally:
        print("the end:", COUNTS, flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]))
