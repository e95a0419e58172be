"""A game of words whose actions say what goes wrong, and what the tests of pools share."""

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

__all__ = ["Walk", "Words", "alone", "run", "whole"]

T = TypeVar("T")


class Words(gym.Env[str, str]):
    """Each step says a number that follows from the seed, and the actions so far; an episode has ``length`` steps."""

    def __init__(self, length: int = 6) -> None:
        self.observation_space = gym.spaces.Text(100)
        self.action_space = gym.spaces.Text(100, min_length=0)
        self._length = length
        self.pid = os.getpid()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._said: list[str] = []
        self._go(str((options or {}).get("begin", "")))
        return self._line(), {"options": options, "pid": os.getpid()}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._said.append(action)
        self._go(action)
        reward = float(self.np_random.normal())
        return self._line(), reward, len(self._said) >= self._length, False, {"step": len(self._said), "of": [action]}

    def _line(self) -> str:
        return f"{len(self._said)} {''.join(self._said)[-20:]} {self.np_random.integers(1 << 30)}"

    def _go(self, action: str) -> None:
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
        """For calls."""
        if number < 0:
            raise KeyError(number)
        return 2 * number


class Walk(gym.Env[np.ndarray, np.ndarray]):
    """Numbers in shared memory, with infos that go there and infos that do not."""

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
    """Run a program; what it leaves pending is an error."""

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


def alone(env: gym.Env[Any, Any], seed: int, actions: list[Any]) -> list[Any]:
    """What an environment says that is stepped by itself."""
    said: list[Any] = [env.reset(seed=seed)]
    said += [env.step(action) for action in actions]
    return said


async def whole(pool: Pool, act: Callable[[EpisodeEnv], Awaitable[Any]] | None = None) -> None:
    """Every place can be taken at the same time, and each answers what it was asked."""
    entered = 0
    all_there = asyncio.Event()

    async def one(seed: int) -> None:
        nonlocal entered
        async with pool.episode(seed=seed) as env:
            entered += 1
            if entered == pool.size:
                all_there.set()
            await all_there.wait()
            said: list[Any] = [env.observation]
            said += [(await env.step(word))[:4] for word in ("a", f"b{seed}", "c")]
        wanted = alone(Words(), seed, ["a", f"b{seed}", "c"])
        assert said == [wanted[0][0], *(each[:4] for each in wanted[1:])]

    await asyncio.wait_for(asyncio.gather(*map(one, range(pool.size))), 30)
    assert repr(pool).partition(", workers")[0] == f"Pool(size={pool.size}"
    assert f"episodes=0, free={pool.size}, waiting=0" in repr(pool), pool
