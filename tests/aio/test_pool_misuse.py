"""Tests of misuse of a pool: each kind raises its own error, with the text that the synchronous engine uses."""

from __future__ import annotations

import asyncio
import gc
import os
import traceback
from typing import Any

import pytest
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from text_envs import TextEnv, check_all_slots

from vecenv.aio import Pool
from vecenv.errors import BusyError, ForkedError, LoopError


async def test_second_task_in_one_episode_raises() -> None:
    async with Pool(TextEnv, 2) as pool, pool.episode() as env:
        step = asyncio.create_task(env.step("wait 0.05"))
        await asyncio.sleep(0)
        for call in (env.step("x"), env.reset(), env.save(), env.call("pid")):
            with pytest.raises(BusyError, match=r"another task is in `step` of this EpisodeEnv .env \d.; `\w+` was re"):
                await call
        assert (await step)[4]["action"] == ["wait 0.05"]
        await env.step("x")


async def test_step_after_the_end_of_the_episode_raises() -> None:
    async with Pool(TextEnv, 1) as pool:
        async with pool.episode(seed=1) as env:
            while not env.over:
                await env.step("x")
            with pytest.raises(ResetNeeded, match=r"the episode of env 0 is over: reset\(\) begins a new one"):
                await env.step("x")
            await env.reset()
            await env.step("x")
        for call in (env.step("x"), env.reset(), env.save(), env.call("pid")):
            with pytest.raises(ClosedEnvironmentError, match="Trying to operate on `EpisodeEnv`, outside of its"):
                await call
        with pytest.raises(ClosedEnvironmentError, match="a second time"):
            await env.__aenter__()


async def test_pending_step_raises_if_its_block_is_left() -> None:
    async with Pool(TextEnv, 1) as pool:
        async with pool.episode() as env:
            step = asyncio.create_task(env.step("wait 0.05"))
            await asyncio.sleep(0)
        with pytest.raises(ClosedEnvironmentError, match="outside of its `async with`"):
            await step
        async with pool.episode(options={"begin": "wait 0.05"}) as env:
            await env.step("x")
        await check_all_slots(pool)


async def test_calls_on_a_closed_pool_raise() -> None:
    async with Pool(TextEnv, 1) as pool:
        env = pool.episode()
        await env.__aenter__()
        unentered_episode = pool.episode()
        waiting_task = asyncio.create_task(pool.episode().__aenter__())
        await asyncio.sleep(0)
    text = r"Trying to operate on `Pool`, after a call to `close\(\)`"
    calls = waiting_task, env.step("x"), pool.evaluate(env.step, 1), pool.__aenter__(), unentered_episode.__aenter__()
    for call in calls:
        with pytest.raises(ClosedEnvironmentError, match=text):
            await call
    with pytest.raises(ClosedEnvironmentError, match=text):
        pool.episode()
    await pool.close()
    assert repr(pool) == "Pool(size=1, closed)"


def test_pool_raises_in_another_loop_or_without_one() -> None:
    async def enter_pool(pool: Pool) -> None:
        with pytest.raises(LoopError, match="belongs to no event loop yet"):
            pool.episode()
        await pool.__aenter__()
        await check_all_slots(pool)

    async def check_that_calls_raise(pool: Pool) -> None:
        for call in (pool.__aenter__(), pool.close()):
            with pytest.raises(LoopError, match=r"this Pool belongs to another event loop; `.*` was refused"):
                await call
        with pytest.raises(LoopError, match="`episode` was refused"):
            pool.episode()

    with asyncio.Runner() as first, asyncio.Runner() as second:
        pool = Pool(TextEnv, 2)
        first.run(enter_pool(pool))
        second.run(check_that_calls_raise(pool))
        first.run(check_all_slots(pool))
        first.run(pool.close())


async def test_pool_raises_in_a_forked_child() -> None:
    async def check_that_calls_raise(pool: Pool, env: Any) -> None:
        for call in (pool.__aenter__(), pool.close(), env.step("x")):
            with pytest.raises(ForkedError, match=r"belongs to another process \(pid \d+\); a forked child"):
                await call

    async with Pool(TextEnv, 2) as pool:
        async with pool.episode() as env:
            child = os.fork()
            if not child:
                exit_code = 1
                try:
                    asyncio.new_event_loop().run_until_complete(check_that_calls_raise(pool, env))
                    exit_code = 0
                except BaseException:
                    traceback.print_exc()
                os._exit(exit_code)
            ended_pid = 0
            while not ended_pid:
                await asyncio.sleep(0.01)
                ended_pid, status = os.waitpid(child, os.WNOHANG)
            assert status == 0
            await env.step("x")
        await check_all_slots(pool)


async def test_unpicklable_arguments_raise_before_anything_is_sent() -> None:
    async with Pool(TextEnv, 1) as pool, pool.episode() as env:
        with pytest.raises(TypeError, match="pickle"):
            await env.step(iter(number for number in range(3)))
        with pytest.raises(TypeError, match="pickle"):
            await env.reset(options={"task": (number for number in range(3))})
        await env.step("x")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"size": 0}, "size must be"),
        ({"size": True}, "size must be"),
        ({"num_workers": 0}, "num_workers must be"),
        ({"num_workers": "auto"}, "num_workers must be"),
        ({"on_failure": "ignore"}, "`on_failure` must be"),
        ({"step_timeout": "long"}, "step_timeout"),
        ({"env_threads": 2, "num_workers": 1, "generators": "own"}, "generators"),
        ({"record_failures": "failures"}, "AsyncVectorEnv, MultiAgentVecEnv and RayVectorEnv record failures"),
    ],
)
def test_invalid_options_raise(options: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        Pool(TextEnv, **{"size": 2, **options})


async def test_policy_that_is_not_async_raises() -> None:
    async with Pool(TextEnv, 1) as pool:
        with pytest.raises(TypeError, match="policy must be an `async def` function of one observation; it returned 'x'"):
            await pool.evaluate(lambda observation: "x", 1)  # type: ignore[arg-type,return-value]


async def test_invalid_seeds_options_and_retries_raise() -> None:
    async with Pool(TextEnv, 1) as pool:
        with pytest.raises(TypeError, match="seed must be an integer or None, got 'one'"):
            pool.episode(seed="one")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="options must be a dict or None"):
            pool.episode(options=["begin"])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="retries must be a non-negative integer, got -1"):
            await pool.evaluate(lambda _: asyncio.sleep(0, "x"), 1, retries=-1)
        await check_all_slots(pool)


def test_dropped_pool_ends_its_workers_and_warns() -> None:
    pool = Pool(TextEnv, 2)
    with pytest.warns(ResourceWarning, match="unclosed"):  # noqa: PT031
        del pool
        gc.collect()
