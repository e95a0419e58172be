"""Environments and helpers for the tests of pools. The actions of :class:`Words` select faults."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np

from vecenv.aio import EpisodeEnv, Pool

T = TypeVar("T")


class Words(gym.Env[str, str]):
    """An environment with text observations: a number from the seed and the actions so far. Episodes have ``length`` steps.
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
        return self._line(), {"options": options, "pid": os.getpid()}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._actions.append(action)
        self._apply(action)
        reward = float(self.np_random.normal())
        return self._line(), reward, len(self._actions) >= self._length, False, {"step": len(self._actions), "of": [action]}

    def _line(self) -> str:
        return f"{len(self._actions)} {''.join(self._actions)[-20:]} {self.np_random.integers(1 << 30)}"

    def _apply(self, action: str) -> None:
        what, _, how = action.partition(" ")
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "abort":
            os.abort()
        elif what == "hang":
            time.sleep(1000)
        elif what == "raise":
            raise ValueError(f"wrong: {how}")
        elif what == "wait":
            time.sleep(float(how))
        elif what == "compute":
            until = time.perf_counter() + float(how)
            while time.perf_counter() < until:
                pass

    def twice(self, number: int) -> int:
        """Double a number, as a method for ``call``."""
        if number < 0:
            raise KeyError(number)
        return 2 * number


class Walk(gym.Env[np.ndarray, np.ndarray]):
    """A random walk in shared memory, with some infos that fit there and some that do not."""

    def __init__(self, length: int = 6) -> None:
        self.observation_space = gym.spaces.Box(-1e6, 1e6, (3,), np.float64)
        self.action_space = gym.spaces.Box(-1, 1, (3,), np.float64)
        self._length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._at, self._steps = self.np_random.normal(size=3), 0
        return self._at.copy(), {"begins": True}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._at += action + self.np_random.normal(size=3)
        self._steps += 1
        info: dict[str, Any] = {"steps": self._steps, "at": self._at.copy()}
        if self._steps % 3 == 0:
            info["text"] = f"step {self._steps}"
        ended = self._steps >= self._length
        return self._at.copy(), float(self._at.sum()), ended and self._steps % 2 == 0, ended and self._steps % 2 == 1, info


def run(main: Coroutine[Any, Any, T], loop: str = "asyncio", seconds: float = 60.0) -> T:
    """Run a program; tasks that it leaves pending are an error."""

    async def bounded() -> T:
        result = await asyncio.wait_for(main, seconds)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, others
        return result

    factory = None
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(bounded())


def step_directly(env: gym.Env[Any, Any], seed: int, actions: list[Any]) -> list[Any]:
    """Return the results of an environment that is stepped directly."""
    results: list[Any] = [env.reset(seed=seed)]
    results += [env.step(action) for action in actions]
    return results


async def check_all_slots(pool: Pool, act: Callable[[EpisodeEnv], Awaitable[Any]] | None = None) -> None:
    """Check that all slots can be entered at the same time, and that each returns its own results."""
    entered = 0
    all_there = asyncio.Event()

    async def one(seed: int) -> None:
        nonlocal entered
        async with pool.episode(seed=seed) as env:
            entered += 1
            if entered == pool.size:
                all_there.set()
            await all_there.wait()
            results: list[Any] = [env.observation]
            results += [(await env.step(word))[:4] for word in ("a", f"b{seed}", "c")]
        expected = step_directly(Words(), seed, ["a", f"b{seed}", "c"])
        assert results == [expected[0][0], *(each[:4] for each in expected[1:])]

    await asyncio.wait_for(asyncio.gather(*map(one, range(pool.size))), 30)
    assert repr(pool).partition(", workers")[0] == f"Pool(size={pool.size}"
    assert f"episodes=0, free={pool.size}, waiting=0" in repr(pool), pool
