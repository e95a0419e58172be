"""First-ready rows, each checked against a reference environment."""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any

import numpy as np
import pytest
from counting import RAISE
from gymnasium.error import ResetNeeded
from gymnasium.vector import SyncVectorEnv
from interrupted_calls import RESTART, UNDISTURBED, Hung, Setting, Watchdog, brief, children, in_flight, kill, needs_reset
from interruption import Interruption, Stopped

from vecenv.testing import assert_identical


class Stream:
    """Rows that are sent and received; a copy of each environment that runs alone gives the expected values.

    Its k-th action depends on the environment and on k only, so the order in which rows arrive does not matter.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting, self.count = setting, setting.count
        self.known = children()
        self.envs: Any = None
        self.excused = self.resets = 0
        self.begin()

    def begin(self) -> None:
        self.envs = self.setting.open()
        self.twins = [SyncVectorEnv([make]) for make in self.setting.env_fns()]
        self.seed = 0
        self.restart()

    def restart(self) -> None:
        """Reset with a seed; nothing is in flight afterwards."""
        self.seed += 100
        observations, _ = self.envs.reset(seed=self.seed)
        for row, one in enumerate(self.twins):
            assert_identical(observations[row], one.reset(seed=self.seed + row)[0][0], f"reset of {row}")
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
        left = children() - self.known
        kill(left)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self.begin()

    def send(self, ids: list[int], interruption: Any = UNDISTURBED) -> None:
        """Send all of these rows; if an interruption prevented that, none was sent, and they are sent again."""
        actions = np.array([(3 * row + self.sent[row]) % RAISE for row in ids])
        before = in_flight(self.envs)
        with interruption:
            self.envs.send(actions, np.array(ids))
        self.require_state()
        more = in_flight(self.envs) - before
        assert more in (0, len(ids)), f"of {len(ids)} rows {more} were sent"
        if not more:
            self.envs.send(actions, np.array(ids))
        for row, action in zip(ids, actions, strict=True):
            self.sent[row] += 1
            self.expected[row] = self.twins[row].step(np.array([action]))

    def reset_async(self, interruption: Any = UNDISTURBED) -> None:
        assert not self.expected
        self.seed += 100
        with interruption:
            self.envs.reset_async(seed=self.seed)
        self.require_state()
        if not in_flight(self.envs):
            self.envs.reset_async(seed=self.seed)
        assert in_flight(self.envs) == self.count
        for row, one in enumerate(self.twins):
            observations, infos = one.reset(seed=self.seed + row)
            self.expected[row] = (observations, np.zeros(1), np.zeros(1, bool), np.zeros(1, bool), infos)

    def receive(self, *interruptions: Any, timeout: float | None = None, at_least: bool = False) -> list[int]:
        """Receive some rows and check their numbers and infos; ``at_least``: as many as arrive within a millisecond."""
        enough = {"count": self.count, "at_least": self.envs.batch_size, "within": 0.001} if at_least else {}
        result = None
        waiting = [*interruptions, UNDISTURBED]
        while result is None:
            before = in_flight(self.envs)
            interruption = waiting.pop(0)
            with interruption:
                result = self.envs.recv(timeout, **enough)
            if result is None:
                self.require_state()
            if result is None and self.names_a_local(note := interruption.note):
                raise RuntimeError(note)
            assert result is not None or in_flight(self.envs) == before, "rows were lost"
        ids = result[-1]["env_id"].tolist()
        assert len(ids) == len(set(ids)) >= self.envs.batch_size
        assert at_least or len(ids) == self.envs.batch_size
        for at, row in enumerate(ids):
            assert row in self.expected, f"row {row} was received without being in flight"
            wanted = self.expected.pop(row)
            for field, name in enumerate(("observations", "rewards", "terminations", "truncations")):
                assert_identical(result[field][at], wanted[field][0], f"{name} of env {row}")
            self.check_infos(result[-1], at, wanted[-1])
        return ids

    def check_infos(self, infos: dict[str, Any], at: int, wanted: dict[str, Any]) -> None:
        present = {key for key in infos if not key.startswith("_") and infos[f"_{key}"][at]} - {"env_id"}
        assert present == {key for key in wanted if not key.startswith("_")}, present
        for key in present:
            assert infos[key][at] == wanted[key][0], (key, infos[key][at], wanted[key][0])

    def require_state(self) -> None:
        """Raise if an interruption left only a reset."""
        if needs_reset(self.envs):
            with pytest.raises(ResetNeeded):
                self.envs.recv()
            raise ResetNeeded

    def names_a_local(self, text: str) -> bool:
        """True if the text names an environment of this process, which may have been hit itself."""
        named = re.search(r"\benvs? \[?(\d+)", text)
        return named is not None and int(named[1]) in self.setting.local

    def cycle(self, which: str, interruption: Interruption, tick: int) -> None:
        """Send, receive all, reset, receive all; one of these is interrupted."""
        all_rows = list(range(self.count))
        again = Interruption(interruption.kind, tick * 11 % 40, Stopped)
        timeout = None if tick % 2 else 30.0
        with Watchdog(self.known) as watchdog:
            try:
                self.send(all_rows[:: 1 if tick % 2 else -1], interruption if which == "send" else UNDISTURBED)
                many = which == "recv at least"
                hit = many or which == "recv"
                ids = self.receive(*[interruption, again] if hit else [], timeout=timeout, at_least=many)
                self.send(ids)
                self.receive(*[interruption, again] if which == "recv of the rest" else [], timeout=timeout)
                while self.expected:
                    self.receive()
                self.reset_async(interruption if which == "reset_async" else UNDISTURBED)
                self.receive(*[interruption, again] if which == "recv of a reset" else [], timeout=timeout)
                while self.expected:
                    self.receive()
                self.sent = [0] * self.count
                assert in_flight(self.envs) == 0
            except ResetNeeded:
                self.resets += 1
                self.restart()
                return
            except BaseException as error:
                if watchdog.bit:
                    raise Hung(f"it hung; ended by force it raised: {brief(error)}") from None
                if isinstance(error, AssertionError) or not self.names_a_local(brief(error, whole=True)):
                    raise
                self.excused += 1
                self.restart()
                return
        assert not watchdog.bit
        assert not interruption.swallowed, "the exception was swallowed"


FIRST_READY = {
    "two of four": Setting({"num_workers": 2, "batch_size": 2}),
    "one of eight": Setting({"num_workers": 4, "batch_size": 1}, count=8),
    "two messages": Setting({"num_workers": 2, "batch_size": 2}, at_once=1),
    "all of four": Setting({"num_workers": 4, "batch_size": 4}),
    "list actions": Setting({"num_workers": 4, "batch_size": 2}, listed=True),
    "max_concurrency": Setting({"num_workers": 4, "batch_size": 2, "max_concurrency": 2}),
    "restart": Setting({"num_workers": 2, "batch_size": 2, **RESTART}),
    "no shared memory": Setting({"num_workers": 2, "batch_size": 2, "shared_memory": False}),
    "in process": Setting({"num_workers": 0, "batch_size": 2}, local=(0, 1, 2, 3)),
    "caller's share": Setting({"num_workers": 1, "use_caller": True, "batch_size": 2}, local=(0, 1, 2, 3)),
}
