"""Random programs of calls to a pool, compared with an environment that is stepped directly.

Environments fail, workers die and calls are cancelled at random. Until the next reset, the calls of such an episode raise;
all other results equal those of the directly stepped environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
import zlib
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from text_envs import run

import vecenv
from vecenv.aio import EpisodeEnv, Pool
from vecenv.errors import EnvFailed, WorkerDied

FAULTS = ("raise", "unpicklable info", "wrong shape", "kill")
SEEDS = [pytest.param(seed, marks=[] if seed in (13, 15) else pytest.mark.long) for seed in range(32)]


class ChecksumEnv(gym.Env[Any, Any]):
    """An environment with results that depend on everything since its latest reset. It takes faults as actions."""

    observation_space = gym.spaces.Box(0, 2**32, (2,), np.float64)
    action_space = gym.spaces.Discrete(1000)

    def update(self, *received: Any) -> int:
        self.checksum = zlib.crc32(repr((self.checksum, *received)).encode())
        return self.checksum

    def fail(self, fault: str) -> None:
        if fault == "raise":
            raise ValueError("it failed")
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.checksum = self.steps = 0
        self.fault = (options or {}).get("fault", "")
        self.fail((options or {}).get("reset", ""))
        return self.observe(seed), {"seed": seed}

    def observe(self, *received: Any) -> Any:
        return np.array([self.update(*received), self.steps], np.float64)

    def step(self, action: Any) -> Any:
        self.steps += 1
        fault = action if isinstance(action, str) else self.fault if self.steps == 3 else ""
        self.fail(fault)
        observation = np.zeros(3) if fault == "wrong shape" else self.observe(action)
        info: Any = {"checksum": self.checksum} if self.checksum % 2 else {}
        if fault == "unpicklable info":
            info = {"lock": threading.Lock()}
        terminated, truncated = self.checksum % 9 == 0 or self.steps > 20, self.checksum % 11 == 0
        return observation, float(self.checksum % 100), terminated, truncated, info


class Program:
    """A random program of the calls of one episode."""

    def __init__(self, pool: Pool, rng: random.Random) -> None:
        self.pool, self.rng, self.reference, self.has_failed = pool, rng, ChecksumEnv(), False

    async def run(self) -> None:
        options = {"reset": self.rng.choice(["", "", "raise", "kill"])}
        with contextlib.suppress(EnvFailed, WorkerDied):
            async with self.pool.episode(seed=1, options=options) as env:
                assert options["reset"] == ""
                self.check((env.observation, env.info), self.reference.reset(seed=1))
                for _ in range(self.rng.randrange(25)):
                    try:
                        async with asyncio.timeout(0.001 * self.rng.random() if self.rng.random() < 0.1 else None):
                            await self.rng.choice([self.step, self.step, self.step, self.reset, self.call, self.load])(env)
                    except (EnvFailed, WorkerDied, TimeoutError):
                        self.has_failed = True

    def check(self, found: Any, expected: Any) -> None:
        assert np.array_equal(found[0], expected[0])
        assert found[1:] == expected[1:]

    async def step(self, env: EpisodeEnv) -> None:
        action = self.rng.choice(FAULTS) if self.rng.random() < 0.05 else self.rng.randrange(1000)
        if env.over and not self.has_failed:
            await self.reset(env)
        result = await env.step(action)
        assert not self.has_failed
        assert action not in FAULTS
        self.check(result, self.reference.step(action))

    async def reset(self, env: EpisodeEnv) -> None:
        seed, options = self.rng.randrange(100), {"reset": self.rng.choice(["", "", "", "raise"])}
        result = await env.reset(seed=seed, options=options)
        assert options["reset"] == ""
        self.check(result, self.reference.reset(seed=seed))
        self.has_failed = False

    async def call(self, env: EpisodeEnv) -> None:
        argument = b"a" * self.rng.choice([10, 300_000])
        checksum = await env.call("update", argument)
        assert not self.has_failed
        assert checksum == self.reference.update(argument)

    async def load(self, env: EpisodeEnv) -> None:
        snapshot = await env.save(verify=False)
        assert not self.has_failed
        observation = env.observation
        if not env.over:
            await env.step(5)
        assert np.array_equal(await env.load(snapshot), observation)


@pytest.mark.parametrize("seed", SEEDS)
def test_results_of_random_programs_equal_a_directly_stepped_environment(seed: int) -> None:
    rng = random.Random(seed)
    options: dict[str, Any] = {
        "num_workers": rng.choice([None, 1, 2]), "on_failure": rng.choice(["raise", vecenv.Restart(float("inf"))]),
        "cancel_timeout": rng.choice([0.02, 5.0]), "shared_memory": rng.choice([True, False]),
    }  # fmt: skip

    async def main() -> None:
        async with Pool(ChecksumEnv, 4, **options) as pool:
            await asyncio.gather(*(Program(pool, random.Random(rng.random())).run() for _ in range(12)))

    run(main())


@pytest.mark.parametrize("seed", SEEDS)
def test_evaluate_of_random_faults_returns_all_other_episodes(seed: int) -> None:
    rng = random.Random(seed)
    faults = [rng.choice(["", "", "", *FAULTS]) for _ in range(12)]
    episodes = [vecenv.Episode(index, {"fault": fault}) for index, fault in enumerate(faults)]
    expected = [_play(index) if not fault or _play(index)[1] < 3 else None for index, fault in enumerate(faults)]

    async def policy(observation: Any) -> int:
        await asyncio.sleep(0.001 * rng.random())
        return int(observation[0]) % 1000

    async def main() -> None:
        async with Pool(ChecksumEnv, 4, num_workers=rng.choice([None, 1, 2])) as pool:
            for _ in range(2):
                for process in rng.sample(pool._envs.processes, rng.choice([0, 1])):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
                results = await pool.evaluate(policy, episodes, retries=1)
                for result, return_and_length in zip(results, expected, strict=True):
                    found = None if result.error else (result.episode_return, result.length)
                    assert found == return_and_length, result

    run(main())


def _play(seed: int) -> tuple[float, int]:
    """Return the return and the length of an episode without faults."""
    env = ChecksumEnv()
    observation, _ = env.reset(seed=seed)
    total, ended = 0.0, False
    while not ended:
        observation, reward, terminated, truncated, _ = env.step(int(observation[0]) % 1000)
        total, ended = total + reward, terminated or truncated
    return total, env.steps
