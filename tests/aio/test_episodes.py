"""Pools and episodes as they are meant to be used, under asyncio and uvloop."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import subprocess
import sys
from contextlib import closing
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from worlds import Walk, Words, alone, run, whole

import vecenv
from vecenv.aio import Pool
from vecenv.errors import NotRestorable, SnapshotMismatch
from vecenv.testing import assert_identical

LOOPS = ["asyncio", *(["uvloop"] if importlib.util.find_spec("uvloop") else [])]
HOW = [
    pytest.param({}, id="each"),
    pytest.param({"num_workers": 2}, id="two"),
    pytest.param({"num_workers": 2, "env_threads": 3}, id="threads"),
]
MANY = pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(600)])


def test_the_package_is_imported_without_asyncio() -> None:
    program = "import sys, vecenv; print('asyncio' in sys.modules); vecenv.aio; print('asyncio' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["False", "True"]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("how", HOW)
def test_every_place_answers_what_it_was_asked(loop: str, how: dict[str, Any]) -> None:
    async def main() -> None:
        async with Pool(Words, 6, **how) as pool:
            await whole(pool)
            await whole(pool)

    run(main(), loop)


@pytest.mark.parametrize("schedules", [15, MANY])
@pytest.mark.parametrize("world", [Words, Walk])
@pytest.mark.parametrize("how", HOW)
def test_values_are_those_of_environments_by_themselves(schedules: int, world: Any, how: dict[str, Any]) -> None:
    """Episodes of random lengths, begun and stepped at random moments, against the same actions one by one."""

    async def main() -> None:
        rng = random.Random(0)
        async with Pool(world, 4, **how) as pool:
            for schedule in range(schedules):
                await asyncio.gather(*(one(pool, random.Random(rng.random()), 100 * schedule + n) for n in range(6)))

    async def one(pool: Pool, rng: random.Random, seed: int) -> None:
        plain = world()
        plain.action_space.seed(seed)
        actions = [plain.action_space.sample() for _ in range(rng.randrange(7))]
        said: list[Any] = []
        await pause(rng)
        async with pool.episode(seed=seed) as env:
            said.append((env.observation, env.info))
            for action in actions:
                await pause(rng)
                said.append(await env.step(action))
            assert env.over == (len(actions) == 6)
        wanted = alone(plain, seed, actions)
        for got in (said, wanted):
            got[0][1].pop("pid", None)
        assert_identical(said, wanted, f"seed {seed}")

    async def pause(rng: random.Random) -> None:
        for _ in range(rng.choice([0, 0, 1, 3])):
            await asyncio.sleep(0)
        if rng.random() < 0.1:
            await asyncio.sleep(0.001)

    run(main(), seconds=500)


@pytest.mark.parametrize("loop", LOOPS)
def test_environments_that_wait_do_so_at_the_same_time_in_threads(loop: str) -> None:
    async def main() -> float:
        async with Pool(Words, 16, num_workers=2, env_threads=8) as pool:
            ticks = asyncio.get_running_loop().time
            began = ticks()
            await asyncio.gather(*(one(pool, n) for n in range(16)))
            return ticks() - began

    async def one(pool: Pool, number: int) -> None:
        async with pool.episode(seed=number) as env:
            for step in range(3):
                await asyncio.sleep(0.01 * ((number + step) % 4))  # never together
                await env.step("wait 0.1")

    seconds = run(main(), loop)
    assert seconds < 16 * 3 * 0.1 / 4, seconds  # one after the other in each of 2 workers: 2.4


def test_more_episodes_than_places_wait_in_their_order() -> None:
    async def main() -> list[int]:
        began: list[int] = []

        async def one(number: int) -> None:
            async with pool.episode(seed=number) as env:
                began.append(number)
                await env.step("wait 0.002")

        async with Pool(Words, 1) as pool:
            await asyncio.gather(*map(one, range(20)))
        return began

    assert run(main()) == list(range(20))


def test_reset_begins_another_episode_in_the_same_place_with_its_seed_and_options() -> None:
    async def main() -> None:
        async with Pool(Words, 1) as pool, pool.episode(seed=1, options={"task": [1, 2]}) as env:
            assert env.info["options"] == {"task": [1, 2]}
            assert env.env_id == 0
            first = env.observation
            await env.step("x")
            assert await env.reset(seed=1) == (first, {"options": None, "pid": env.info["pid"]})
            assert (await env.reset())[0] != first

    run(main())


def test_a_call_runs_in_one_environment_and_what_it_raises_is_its_own() -> None:
    async def main() -> None:
        async with Pool(Words, 3, num_workers=1) as pool:
            async with pool.episode() as one, pool.episode() as two:
                waiting = asyncio.create_task(two.step("wait 0.05"))
                assert await one.call("twice", 4) == 8
                assert await one.call("twice", number=5) == 10
                assert await one.call("pid") == pool._envs.processes[0].pid
                with pytest.raises(KeyError, match="-1"):
                    await one.call("twice", -1)
                await one.step("still well")
                await waiting
            assert len(pool.errors) == 1

    run(main())


@pytest.mark.parametrize("how", [{"num_workers": 1}, {"num_workers": 1, "env_threads": 3}], ids=["plain", "threads"])
def test_many_branches_go_on_from_one_saved_state(how: dict[str, Any]) -> None:
    async def main() -> None:
        async with Pool(partial(gym.make, "CartPole-v1"), 4, **how) as pool:
            async with pool.episode(seed=3) as env:
                await env.step(1)
                kept = await env.save()
                steps = [await env.step(action) for action in (0, 1, 1)]

            async def branch() -> list[Any]:
                async with pool.episode() as env:
                    assert np.array_equal(await env.load(kept), env.observation)
                    return [await env.step(action) for action in (0, 1, 1)]

            for other in await asyncio.gather(*(branch() for _ in range(12))):
                assert_identical(other, steps)
            assert pool._engine.proved

    run(main())


def test_a_state_that_does_not_fit_is_refused_and_the_episode_goes_on() -> None:
    async def main() -> None:
        async with (
            Pool(Walk, 1) as walks,
            Pool(partial(gym.make, "CartPole-v1"), 1) as carts,
            walks.episode(seed=1) as walk,
            carts.episode(seed=1) as cart,
        ):
            kept = await walk.save(verify=False)
            with pytest.raises(SnapshotMismatch):
                await cart.load(kept)
            with pytest.raises(SnapshotMismatch):
                await cart.load("no snapshot")  # type: ignore[arg-type]
            await cart.step(1)

    run(main())


class Locked(Words):
    """Has what cannot be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = (number for number in range(3))


def test_what_cannot_be_saved_says_so_and_goes_on() -> None:
    async def main() -> None:
        async with Pool(Locked, 1) as pool, pool.episode() as env:
            with pytest.raises(NotRestorable, match="generator"):
                await env.save()
            await env.step("x")

    run(main())


def test_evaluate_gives_what_the_synchronous_one_gives() -> None:
    async def policy(observation: np.ndarray) -> int:
        await asyncio.sleep(0)
        return int(observation[2] > 0)

    async def main() -> Any:
        async with Pool(partial(gym.make, "CartPole-v1"), 4, num_workers=2) as pool:
            return await pool.evaluate(policy, 12, seed=5, on_episode=told.append)

    told: list[Any] = []
    results = run(main())
    with closing(vecenv.make_vec("CartPole-v1", num_envs=3)) as envs:
        wanted = vecenv.evaluate(envs, lambda observations: (observations[:, 2] > 0).astype(int), 12, seed=5)
    assert results.returns.tolist() == wanted.returns.tolist()
    assert [each.seed for each in results] == [each.seed for each in wanted]
    assert sorted(each.index for each in told) == list(range(12))


def test_evaluate_raises_what_the_policy_raises_and_leaves_the_pool_whole() -> None:
    async def policy(observation: str) -> str:
        if observation.startswith("3 "):
            raise ZeroDivisionError
        return "x"

    async def main() -> None:
        async with Pool(Words, 3) as pool:
            with pytest.raises(ZeroDivisionError):
                await pool.evaluate(policy, 10)
            await whole(pool)

    run(main())


def test_evaluate_begins_an_episode_again_that_failed_and_then_says_why() -> None:
    async def policy(observation: str) -> str:
        return "raise now" if observation.startswith("2 ") else "x"

    async def main() -> None:
        async with Pool(Words, 2) as pool:
            results = await pool.evaluate(policy, 3, seed=0, retries=1)
            assert [(each.attempts, type(each.error)) for each in results] == [(2, vecenv.errors.EnvFailed)] * 3

    run(main())


def test_large_messages_do_not_stop_the_others() -> None:
    """Longer than a pipe takes: sent and read in parts, while the loop goes on."""

    async def main() -> None:
        async with Pool(Words, 3, num_workers=2) as pool:
            async with pool.episode(seed=0) as one, pool.episode(seed=1) as two:
                long = "x" * (5 << 20)
                sent = asyncio.create_task(one.step(long))
                for _ in range(20):
                    await two.reset()
                assert (await sent)[4]["of"] == [long]
            await whole(pool)

    run(main())
