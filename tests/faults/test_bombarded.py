"""Tests of a real timer that interrupts steps, resets, ``send`` and ``recv`` at random moments.

After each interrupted call, a test does what a user would do: it waits if a step is pending, resets if a reset is needed,
and otherwise continues. It compares each result with the expected one: an observation holds the row, the seed of its last
reset, the number of steps since, and the last action.
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
MAX_CALL_SECONDS = 10.0


class CountingEnv(gymnasium.Env[Any, Any]):
    """An environment with observations (row, seed, steps, last action)."""

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


class TimerExpired(BaseException):
    """The exception that the signal handler raises."""


class Timer:
    """A timer that raises :class:`TimerExpired` during a call."""

    armed = False

    @classmethod
    def handle_signal(cls, *_: Any) -> None:
        if cls.armed:
            cls.armed = False
            raise TimerExpired

    @classmethod
    def interrupt(cls, function: Callable[[], Any], delay: float) -> tuple[Any, bool]:
        """Call a function; return its result and ``True``, or ``None`` and ``False`` if it was interrupted.

        The function must be a Python function: after a C function, such as a ``partial``, the handler could run before the
        result is stored.
        """
        try:
            cls.armed = True
            signal.setitimer(signal.ITIMER_REAL, delay)
            try:
                result = function()
            finally:
                cls.armed = False
        except TimerExpired:
            return None, False
        finally:
            cls.armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        return result, True


@pytest.fixture(autouse=True)
def timer_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, Timer.handle_signal)
    yield
    signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def check_no_descriptors_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def open_engine(workers: int, restart: bool) -> Any:
    options: dict[str, Any] = {"on_failure": Restart(10**9, 1e9)} if restart else {}
    return AsyncVectorEnv([partial(CountingEnv, row) for row in range(ROWS)], num_workers=workers, context="fork", **options)


def draw_delay(rng: random.Random) -> float:
    return rng.choice([1e-6, 5e-5, 2e-4, 4e-4]) * rng.random() + 1e-6


def kill_worker(rng: random.Random, envs: Any) -> None:
    os.kill(rng.choice(envs.processes).pid, signal.SIGKILL)


def check_rows(observations: Any, seed: int, steps: int, action: int, rows: Any = range(ROWS)) -> None:
    """Check observations of rows that were reset with ``seed`` plus their index and then took the same actions."""
    for row in rows:
        assert observations[row].tolist() == [row, seed + row, steps, action]


def reset_until_complete(rng: random.Random, envs: Any) -> int:
    """Reset until one reset completes, and return its seed. Some resets are interrupted."""
    while True:
        seed = rng.randrange(1000)
        delay = rng.random() * 2e-3 if rng.random() < 0.3 else 10.0
        try:
            result, completed = Timer.interrupt(lambda s=seed: envs.reset(seed=s), delay)
        except WorkerDied:
            continue
        if completed:
            check_rows(result[0], seed, 0, -1)
            return seed


@pytest.mark.parametrize(
    ("workers", "restart", "kill_every"), [(1, False, 0), (2, False, 0), (3, False, 0), (2, False, 50), (2, True, 50)]
)
def test_interrupted_step_returns_the_right_rows_or_needs_a_reset(workers: int, restart: bool, kill_every: int) -> None:
    with check_no_descriptors_left():
        check_interrupted_steps(workers, restart, kill_every)


def check_interrupted_steps(workers: int, restart: bool, kill_every: int) -> None:
    rng = random.Random(workers)
    with closing(open_engine(workers, restart)) as envs:
        seed = reset_until_complete(rng, envs)
        steps = interrupted = resets = 0
        for call in range(CALLS):
            action = rng.randrange(900)
            if kill_every and call % kill_every == kill_every - 1:
                kill_worker(rng, envs)
            started_at = time.monotonic()
            try:
                result, completed = Timer.interrupt(lambda a=action: envs.step(np.full(ROWS, a)), draw_delay(rng))
                if not completed:
                    interrupted += 1
                    try:
                        result = envs.step_wait(timeout=20)
                    except NoAsyncCallError:  # the step was not submitted
                        continue
            except (ResetNeeded, WorkerDied, EnvFailed) as error:
                assert kill_every or isinstance(error, ResetNeeded)
                resets += isinstance(error, ResetNeeded)
                seed, steps = reset_until_complete(rng, envs), 0
                continue
            assert time.monotonic() - started_at < MAX_CALL_SECONDS
            steps += 1
            observations, rewards, _, truncations, _ = result
            stepped = np.flatnonzero(~truncations).tolist()
            check_rows(observations, seed, steps, action, stepped)
            assert all(rewards[row] == steps for row in stepped)
            if len(stepped) < ROWS:  # restarted rows have new seeds, which the test does not know
                assert restart
                seed, steps = reset_until_complete(rng, envs), 0
        assert interrupted > CALLS / 10
        assert resets < interrupted / 2, "most interruptions should occur during a wait, and need no reset"


@pytest.mark.parametrize(("workers", "kill_every"), [(1, 0), (2, 0), (3, 0), (2, 50), (3, 50)])
def test_interrupted_send_and_recv_return_each_row_once_or_need_a_reset(workers: int, kill_every: int) -> None:
    with check_no_descriptors_left():
        check_interrupted_rows(workers, kill_every)


def check_interrupted_rows(workers: int, kill_every: int) -> None:
    rng = random.Random(workers + 10)
    with closing(open_engine(workers, bool(kill_every))) as envs:
        seeds: list[int | None] = []
        steps: list[int] = []
        actions_in_flight: dict[int, int] = {}

        def reset_all() -> None:
            seed = reset_until_complete(rng, envs)
            seeds[:], steps[:] = [seed + row for row in range(ROWS)], [0] * ROWS
            actions_in_flight.clear()

        reset_all()
        for _ in range(CALLS):
            if kill_every and rng.random() < 1 / kill_every:
                kill_worker(rng, envs)
            idle = [row for row in range(ROWS) if row not in actions_in_flight]
            try:
                if idle and (not actions_in_flight or rng.random() < 0.5):
                    rows = rng.sample(idle, rng.choice([len(idle), rng.randint(1, len(idle))]))
                    actions = np.array([rng.randrange(900) for _ in rows])

                    def send(actions: Any = actions, rows: list[int] = rows) -> None:
                        envs.send(actions, env_id=rows)

                    if not Timer.interrupt(send, draw_delay(rng))[1]:
                        with contextlib.suppress(AlreadyPendingCallError):  # the interrupted call has sent the rows
                            send()
                    actions_in_flight.update(zip(rows, actions.tolist(), strict=True))
                    continue
                count = rng.choice([len(actions_in_flight), rng.randint(1, len(actions_in_flight))])
                result, completed = Timer.interrupt(lambda n=count: envs.recv(count=n), draw_delay(rng))
                if not completed:
                    result = envs.recv(timeout=20, count=count)
            except ResetNeeded:
                reset_all()
                continue
            observations, rewards, _, truncations, infos = result
            for position, row in enumerate(infos["env_id"].tolist()):
                action = actions_in_flight.pop(row)
                if truncations[position]:  # the row was restarted, and its next step resets it with a new seed
                    assert kill_every
                    seeds[row], steps[row] = None, -1
                    continue
                steps[row] += 1
                observation = observations[position].tolist()
                if steps[row] == 0:
                    seeds[row] = observation[1]
                assert observation == [row, seeds[row], steps[row], action if steps[row] else -1]
                assert rewards[position] == steps[row]
