"""Signals at random moments, from a real timer, in every call of the engine: nothing hangs, shifts or leaks.

After each interrupted call the program does what a user does: if a step is pending it waits for it; if a reset is needed it
resets; otherwise it continues. Each result is compared with a model: an observation holds the row, the seed of its last
reset,
the steps since, and the last action.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded
from observe import LINUX

from vecenv import Restart
from vecenv.engine.vector_env import AsyncVectorEnv
from vecenv.errors import EnvFailed, WorkerDied

pytestmark = [pytest.mark.long, pytest.mark.timeout(240), pytest.mark.skipif(not LINUX, reason="counts /proc/self/fd")]

ROWS = 6
CALLS = 600
WORST_SECONDS = 10.0


class Witness(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Box(-1e9, 1e9, (4,), np.float64)
    action_space = gymnasium.spaces.Discrete(1000)

    def __init__(self, row: int) -> None:
        self.row, self.seed = row, -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.seed, self.steps = self.seed if seed is None else seed, 0
        return self.observe(-1), {"steps": 0}

    def observe(self, action: int) -> Any:
        return np.array([self.row, self.seed, self.steps, action], np.float64)

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.observe(action), float(self.steps), False, False, {"steps": self.steps}


class Stop(BaseException):
    """The exception that the handler raises."""


class Alarm:
    """A timer that raises :class:`Stop` at a random moment of a call."""

    armed = False

    @classmethod
    def ring(cls, *_: Any) -> None:
        if cls.armed:
            cls.armed = False
            raise Stop

    @classmethod
    def interrupt(cls, function: Callable[[], Any], delay: float) -> tuple[Any, bool]:
        """Call a function; return its result, and ``False`` if it was interrupted.

        It has to be a Python function: after a C function, such as a ``partial``, a handler can run before the result is
        stored here.
        """
        try:
            cls.armed = True
            signal.setitimer(signal.ITIMER_REAL, delay)
            try:
                result = function()
            finally:
                cls.armed = False
        except Stop:
            return None, False
        finally:
            cls.armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        return result, True


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, Alarm.ring)
    yield
    signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def open_engine(workers: int, restart: bool) -> Any:
    options: dict[str, Any] = {"on_failure": Restart(10**9, 1e9)} if restart else {}
    return AsyncVectorEnv([partial(Witness, row) for row in range(ROWS)], num_workers=workers, context="fork", **options)


def random_delay(rng: random.Random) -> float:
    return rng.choice([1e-6, 5e-5, 2e-4, 4e-4]) * rng.random() + 1e-6


def kill_one(rng: random.Random, envs: Any) -> None:
    os.kill(rng.choice(envs.processes).pid, signal.SIGKILL)


def check(observations: Any, seed: int, steps: int, action: int, rows: Any = range(ROWS)) -> None:
    for row in rows:
        assert observations[row].tolist() == [row, seed + row, steps, action]


def reset_until_done(rng: random.Random, envs: Any) -> int:
    """Reset, sometimes interrupted; return the seed."""
    while True:
        seed = rng.randrange(1000)
        delay = rng.random() * 2e-3 if rng.random() < 0.3 else 10.0
        try:
            result, done = Alarm.interrupt(lambda s=seed: envs.reset(seed=s), delay)
        except WorkerDied:
            continue
        if done:
            check(result[0], seed, 0, -1)
            return seed


@pytest.mark.parametrize(
    ("workers", "restart", "kill_every"), [(1, False, 0), (2, False, 0), (3, False, 0), (2, False, 50), (2, True, 50)]
)
def test_interrupted_steps_are_right_or_a_reset_is_needed(workers: int, restart: bool, kill_every: int) -> None:
    with no_descriptors_left():
        interrupt_steps(workers, restart, kill_every)


def interrupt_steps(workers: int, restart: bool, kill_every: int) -> None:
    rng = random.Random(workers)
    with closing(open_engine(workers, restart)) as envs:
        seed, steps, interrupted, resets = reset_until_done(rng, envs), 0, 0, 0
        for call in range(CALLS):
            action = rng.randrange(900)
            if kill_every and call % kill_every == kill_every - 1:
                kill_one(rng, envs)
            started_at = time.monotonic()
            try:
                result, done = Alarm.interrupt(lambda a=action: envs.step(np.full(ROWS, a)), random_delay(rng))
                if not done:
                    interrupted += 1
                    try:
                        result, done = envs.step_wait(timeout=20), True
                    except NoAsyncCallError:  # it was not submitted
                        continue
            except (ResetNeeded, WorkerDied, EnvFailed) as error:
                assert kill_every or isinstance(error, ResetNeeded)
                resets += isinstance(error, ResetNeeded)
                seed, steps = reset_until_done(rng, envs), 0
                continue
            assert time.monotonic() - started_at < WORST_SECONDS
            steps += 1
            observations, rewards, _, truncations, _ = result
            alive = np.flatnonzero(~truncations).tolist()
            check(observations, seed, steps, action, alive)
            assert all(rewards[row] == steps for row in alive)
            if len(alive) < ROWS:  # restarted rows have other seeds from now on
                assert restart
                seed, steps = reset_until_done(rng, envs), 0
        assert interrupted > CALLS / 10
        assert resets < interrupted / 2, "most interruptions fall into waits"


@pytest.mark.parametrize(("workers", "kill_every"), [(1, 0), (2, 0), (3, 0), (2, 50), (3, 50)])
def test_interrupted_rows_come_once_and_right_or_a_reset_is_needed(workers: int, kill_every: int) -> None:
    with no_descriptors_left():
        interrupt_rows(workers, kill_every)


def interrupt_rows(workers: int, kill_every: int) -> None:
    rng = random.Random(workers + 10)
    with closing(open_engine(workers, bool(kill_every))) as envs:
        seeds: list[int | None] = []
        steps: list[int] = []
        action_of: dict[int, int] = {}  # of the rows in flight

        def begin() -> None:
            seed = reset_until_done(rng, envs)
            seeds[:], steps[:] = [seed + row for row in range(ROWS)], [0] * ROWS
            action_of.clear()

        begin()
        for _ in range(CALLS):
            if kill_every and rng.random() < 1 / kill_every:
                kill_one(rng, envs)
            free = [row for row in range(ROWS) if row not in action_of]
            try:
                if free and (not action_of or rng.random() < 0.5):
                    rows = rng.sample(free, rng.choice([len(free), rng.randint(1, len(free))]))
                    actions = np.array([rng.randrange(900) for _ in rows])
                    send = lambda a=actions, r=rows: envs.send(a, env_id=r)  # noqa: E731
                    if not Alarm.interrupt(send, random_delay(rng))[1]:
                        with contextlib.suppress(AlreadyPendingCallError):  # it was submitted
                            send()
                    action_of.update(zip(rows, actions.tolist(), strict=True))
                    continue
                wanted = rng.choice([len(action_of), rng.randint(1, len(action_of))])
                result, done = Alarm.interrupt(lambda n=wanted: envs.recv(count=n), random_delay(rng))
                if not done:
                    result = envs.recv(timeout=20, count=wanted)
            except ResetNeeded:
                begin()
                continue
            observations, rewards, _, truncations, infos = result
            for position, row in enumerate(infos["env_id"].tolist()):
                action = action_of.pop(row)
                if truncations[position]:  # restarted; its next step resets it, with a seed of its own
                    assert kill_every
                    seeds[row], steps[row] = None, -1
                    continue
                steps[row] += 1
                found = observations[position].tolist()
                if steps[row] == 0:
                    seeds[row] = found[1]
                assert found == [row, seeds[row], steps[row], action if steps[row] else -1]
                assert rewards[position] == steps[row]
