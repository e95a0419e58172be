"""A checker for ``send`` and ``recv``, with a reference environment per row."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from counting import RAISE
from gymnasium.error import ResetNeeded
from gymnasium.vector import SyncVectorEnv
from interrupted_calls import (
    RESTART,
    UNINTERRUPTED,
    HangError,
    Setting,
    Watchdog,
    child_pids,
    describe_error,
    in_flight,
    kill_children,
    needs_reset,
)

from vecenv.testing import assert_identical


class RowStream:
    """A checker that sends and receives the rows of an engine, and compares each with a reference environment.

    The k-th action of a row depends only on the row and on k, so the order in which rows arrive does not matter.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting, self.count = setting, setting.count
        self.known = child_pids()
        self.envs: Any = None
        self.tolerated = 0
        self.open()

    def open(self) -> None:
        self.envs = self.setting.open()
        self.references = [SyncVectorEnv([env_fn]) for env_fn in self.setting.env_fns()]
        self.seed = 0
        self.reset_all()

    def reset_all(self) -> None:
        """Reset all rows with a seed; none is in flight afterwards."""
        self.seed += 100
        observations, _ = self.envs.reset(seed=self.seed)
        for row, reference in enumerate(self.references):
            assert_identical(observations[row], reference.reset(seed=self.seed + row)[0][0], f"reset of {row}")
        self.sent = [0] * self.count
        self.expected: dict[int, tuple[Any, ...]] = {}

    def end(self) -> None:
        envs, self.envs = self.envs, None
        if envs is not None:
            with Watchdog(self.known, 2.0):
                envs.close(terminate=True)

    def renew(self) -> None:
        with contextlib.suppress(Exception):
            self.end()
        kill_children(self.known)
        self.open()

    def send(self, ids: list[int], interruption: Any = UNINTERRUPTED) -> None:
        """Send rows, and check that an interrupted call has sent all of them or none; if none, send them again."""
        actions = np.array([(3 * row + self.sent[row]) % RAISE for row in ids])
        before = in_flight(self.envs)
        with interruption:
            self.envs.send(actions, np.array(ids))
        self.raise_if_reset_needed()
        sent = in_flight(self.envs) - before
        assert sent in (0, len(ids)), f"{sent} of {len(ids)} rows were sent"
        if not sent:
            self.envs.send(actions, np.array(ids))
        for row, action in zip(ids, actions, strict=True):
            self.sent[row] += 1
            self.expected[row] = self.references[row].step(np.array([action]))

    def reset_async(self, interruption: Any = UNINTERRUPTED) -> None:
        assert not self.expected
        self.seed += 100
        with interruption:
            self.envs.reset_async(seed=self.seed)
        self.raise_if_reset_needed()
        if not in_flight(self.envs):
            self.envs.reset_async(seed=self.seed)
        assert in_flight(self.envs) == self.count
        for row, reference in enumerate(self.references):
            observations, infos = reference.reset(seed=self.seed + row)
            self.expected[row] = (observations, np.zeros(1), np.zeros(1, bool), np.zeros(1, bool), infos)

    def receive(self, *interruptions: Any, timeout: float | None = None, at_least: bool = False) -> list[int]:
        """Receive a batch, and check it. Each of ``interruptions`` interrupts one attempt.

        With ``at_least``, the batch may also have the rows that arrive within the next millisecond.
        """
        options = {"count": self.count, "at_least": self.envs.batch_size, "within": 0.001} if at_least else {}
        result = None
        attempts = [*interruptions, UNINTERRUPTED]
        while result is None:
            before = in_flight(self.envs)
            interruption = attempts.pop(0)
            with interruption:
                result = self.envs.recv(timeout, **options)
            if result is None:
                self.raise_if_reset_needed()
                if self.setting.names_local_env(interruption.note):
                    raise RuntimeError(interruption.note)
                assert in_flight(self.envs) == before, "rows were lost"
        ids = result[-1]["env_id"].tolist()
        assert len(set(ids)) == len(ids), f"a row was received twice: {ids}"
        assert len(ids) >= self.envs.batch_size if at_least else len(ids) == self.envs.batch_size
        for position, row in enumerate(ids):
            assert row in self.expected, f"row {row} was received without being in flight"
            expected = self.expected.pop(row)
            for field, name in enumerate(("observations", "rewards", "terminations", "truncations")):
                assert_identical(result[field][position], expected[field][0], f"{name} of env {row}")
            self.check_infos(result[-1], position, expected[-1])
        return ids

    def check_infos(self, infos: dict[str, Any], position: int, expected: dict[str, Any]) -> None:
        present = {key for key in infos if not key.startswith("_") and infos[f"_{key}"][position]} - {"env_id"}
        assert present == {key for key in expected if not key.startswith("_")}, present
        for key in present:
            assert infos[key][position] == expected[key][0], (key, infos[key][position], expected[key][0])

    def raise_if_reset_needed(self) -> None:
        """Raise ``ResetNeeded`` if only a reset is allowed after an interruption, and check that the engine raises it."""
        if needs_reset(self.envs):
            with pytest.raises(ResetNeeded):
                self.envs.recv()
            raise ResetNeeded

    def cycle(self, interrupted_call: str, interruptions: Sequence[Any], tick: int) -> None:
        """Send and receive all rows, then reset and receive them. Interrupt one of these calls.

        The second of ``interruptions``, if there is one, interrupts a repeated ``recv``.
        """
        rows = list(range(self.count)) if tick % 2 else list(reversed(range(self.count)))
        interruption = interruptions[0]
        timeout = None if tick % 2 else 30.0
        with Watchdog(self.known) as watchdog:
            try:
                self.send(rows, interruption if interrupted_call == "send" else UNINTERRUPTED)
                at_least = interrupted_call == "recv at least"
                in_first_recv = at_least or interrupted_call == "recv"
                ids = self.receive(*interruptions if in_first_recv else (), timeout=timeout, at_least=at_least)
                self.send(ids)
                self.receive(*interruptions if interrupted_call == "recv of the rest" else (), timeout=timeout)
                while self.expected:
                    self.receive()
                self.reset_async(interruption if interrupted_call == "reset_async" else UNINTERRUPTED)
                self.receive(*interruptions if interrupted_call == "recv of a reset" else (), timeout=timeout)
                while self.expected:
                    self.receive()
                self.sent = [0] * self.count
                assert in_flight(self.envs) == 0
            except ResetNeeded:
                self.reset_all()
                return
            except BaseException as error:
                if watchdog.fired:
                    raise HangError(f"the cycle hung; after its workers were killed: {describe_error(error)}") from None
                if isinstance(error, AssertionError) or not self.setting.names_local_env(describe_error(error, whole=True)):
                    raise
                self.tolerated += 1
                self.reset_all()
                return
        assert not watchdog.fired
        assert not interruption.swallowed, "the exception was swallowed"


FIRST_READY = {  # settings of engines that return first-ready batches
    "two of four": Setting({"num_workers": 2, "batch_size": 2}),
    "one of eight": Setting({"num_workers": 4, "batch_size": 1}, count=8),
    "two messages": Setting({"num_workers": 2, "batch_size": 2}, rows_per_message=1),
    "all of four": Setting({"num_workers": 4, "batch_size": 4}),
    "list actions": Setting({"num_workers": 4, "batch_size": 2}, list_actions=True),
    "max_concurrency": Setting({"num_workers": 4, "batch_size": 2, "max_concurrency": 2}),
    "restart": Setting({"num_workers": 2, "batch_size": 2, **RESTART}),
    "no shared memory": Setting({"num_workers": 2, "batch_size": 2, "shared_memory": False}),
    "in process": Setting({"num_workers": 0, "batch_size": 2}, local_envs=(0, 1, 2, 3)),
    "caller's share": Setting({"num_workers": 1, "use_caller": True, "batch_size": 2}, local_envs=(0, 1, 2, 3)),
}
