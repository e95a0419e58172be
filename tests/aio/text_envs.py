"""Environments and helpers for the tests of pools."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np

from vecenv.aio import Pool

T = TypeVar("T")


class TextEnv(gym.Env[str, str]):
    """An environment with text observations, which contain the actions so far and a random number from the seed.

    Some actions are faults: "kill", "abort", "hang", "raise TEXT", "wait SECONDS" and "compute SECONDS". The option
    ``begin`` of a reset may be a fault, too.

    Args:
        length: The number of steps per episode.
    """

    def __init__(self, length: int = 6) -> None:
        self.observation_space = gym.spaces.Text(100)
        self.action_space = gym.spaces.Text(100, min_length=0)
        self._length = length
        self.pid = os.getpid()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._actions: list[str] = []
        self._apply(str((options or {}).get("begin", "")))
        return self._observe(), {"options": options, "pid": os.getpid()}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._actions.append(action)
        self._apply(action)
        reward = float(self.np_random.normal())
        steps = len(self._actions)
        return self._observe(), reward, steps >= self._length, False, {"step": steps, "action": [action]}

    def _observe(self) -> str:
        return f"{len(self._actions)} {''.join(self._actions)[-20:]} {self.np_random.integers(1 << 30)}"

    def _apply(self, action: str) -> None:
        fault, _, argument = action.partition(" ")
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "abort":
            os.abort()
        elif fault == "hang":
            time.sleep(1000)
        elif fault == "raise":
            raise ValueError(f"wrong: {argument}")
        elif fault == "wait":
            time.sleep(float(argument))
        elif fault == "compute":
            deadline = time.perf_counter() + float(argument)
            while time.perf_counter() < deadline:
                pass

    def double(self, number: int) -> int:
        """Return twice a non-negative number. Tests of ``call`` use this method."""
        if number < 0:
            raise KeyError(number)
        return 2 * number


class RandomWalk(gym.Env[np.ndarray, np.ndarray]):
    """A random walk with observations in shared memory. Some of its infos fit there, and others do not."""

    def __init__(self, length: int = 6) -> None:
        self.observation_space = gym.spaces.Box(-1e6, 1e6, (3,), np.float64)
        self.action_space = gym.spaces.Box(-1, 1, (3,), np.float64)
        self._length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._position, self._steps = self.np_random.normal(size=3), 0
        return self._position.copy(), {"begins": True}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._position += action + self.np_random.normal(size=3)
        self._steps += 1
        info: dict[str, Any] = {"steps": self._steps, "position": self._position.copy()}
        if self._steps % 3 == 0:
            info["text"] = f"step {self._steps}"
        ended, even = self._steps >= self._length, self._steps % 2 == 0
        return self._position.copy(), float(self._position.sum()), ended and even, ended and not even, info


def run(coroutine: Coroutine[Any, Any, T], loop: str = "asyncio", seconds: float = 60.0) -> T:
    """Run a coroutine in a new event loop with a time limit, and fail if it leaves tasks pending."""

    async def run_within_limit() -> T:
        result = await asyncio.wait_for(coroutine, seconds)
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        assert not pending, pending
        return result

    factory = None
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(run_within_limit())


def step_directly(env: gym.Env[Any, Any], seed: int, actions: list[Any]) -> list[Any]:
    """Return the results of a reset and of steps of an environment without a pool."""
    results: list[Any] = [env.reset(seed=seed)]
    results += [env.step(action) for action in actions]
    return results


async def check_all_slots(pool: Pool) -> None:
    """Check that all slots can be entered at the same time, and that each returns its own results."""
    entered = 0
    all_entered = asyncio.Event()

    async def play(seed: int) -> None:
        nonlocal entered
        async with pool.episode(seed=seed) as env:
            entered += 1
            if entered == pool.size:
                all_entered.set()
            await all_entered.wait()
            results: list[Any] = [env.observation]
            results += [(await env.step(action))[:4] for action in ("a", f"b{seed}", "c")]
        expected = step_directly(TextEnv(), seed, ["a", f"b{seed}", "c"])
        assert results == [expected[0][0], *(each[:4] for each in expected[1:])]

    await asyncio.wait_for(asyncio.gather(*map(play, range(pool.size))), 30)
    assert repr(pool).partition(", workers")[0] == f"Pool(size={pool.size}"
    assert f"episodes=0, free={pool.size}, waiting=0" in repr(pool), pool
