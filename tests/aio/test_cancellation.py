"""``CancelledError`` at every await of every call, alone and together with an answer or a worker's death.

A program is cancelled in the moment in which it waits for the n-th time, for every n. Afterwards no question is left, every
place answers what it is asked, and what the others were told meanwhile is right.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import numpy as np
import pytest
from worlds import Words, alone, run, whole

from vecenv.aio import EpisodeEnv, Pool
from vecenv.errors import VecEnvError

Act = Callable[[Any], None]


class Watched:
    """Awaits a coroutine, and does something the ``at``-th time that it waits.

    Attributes:
        act: What it does.
        waits: How often it has waited.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], at: int) -> None:
        self._coroutine, self._at = coroutine, at
        self.act: Act
        self.waits = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                future = self._coroutine.send(value) if error is None else self._coroutine.throw(error)
            except StopIteration as end:
                return end.value
            self.waits += 1
            if self.waits == self._at:
                self.act(future)
            value = error = None
            try:
                value = yield future
            except BaseException as thrown:
                error = thrown


def at_once(task: asyncio.Task[Any], workers: Callable[[], list[int]]) -> Act:
    """Cancelled as soon as it waits."""
    return lambda future: asyncio.get_running_loop().call_soon(task.cancel) and None


def with_the_answer(task: asyncio.Task[Any], workers: Callable[[], list[int]]) -> Act:
    """Cancelled when what it waits for is there, before it has been told."""
    return lambda future: future.add_done_callback(lambda _: task.cancel()) if future is not None else task.cancel() and None


def a_while_later(task: asyncio.Task[Any], workers: Callable[[], list[int]]) -> Act:
    return lambda future: asyncio.get_running_loop().call_later(0.003, task.cancel) and None


def with_a_death(task: asyncio.Task[Any], workers: Callable[[], list[int]]) -> Act:
    """Cancelled in the moment in which all workers die."""

    def act(_: Any) -> None:
        for pid in workers():
            os.kill(pid, signal.SIGKILL)
        asyncio.get_running_loop().call_soon(task.cancel)

    return act


def after_a_death(task: asyncio.Task[Any], workers: Callable[[], list[int]]) -> Act:
    """Cancelled while workers are started anew."""

    def act(_: Any) -> None:
        for pid in workers():
            os.kill(pid, signal.SIGKILL)
        asyncio.get_running_loop().call_later(0.02, task.cancel)

    return act


def only_a_death(task: asyncio.Task[Any], workers: Callable[[], list[int]]) -> Act:
    def act(_: Any) -> None:
        for pid in workers():
            os.kill(pid, signal.SIGKILL)

    return act


MOMENTS = [at_once, with_the_answer, a_while_later, with_a_death, after_a_death, only_a_death]
HOW = [
    pytest.param({"num_workers": 1}, id="one"),
    pytest.param({}, id="each", marks=pytest.mark.long),
    pytest.param({"num_workers": 1, "env_threads": 2}, id="threads", marks=pytest.mark.long),
]


async def everything(pool: Pool) -> None:
    """Every call there is; each has to say what it has to."""
    async with pool.episode(seed=7) as env:
        wanted = alone(Words(), 7, ["a", "wait 0.01", "b"])
        assert env.observation == wanted[0][0]
        assert (await env.step("a"))[:4] == wanted[1][:4]
        kept = await env.save()
        assert await env.call("twice", 3) == 6
        assert (await env.step("wait 0.01"))[:4] == wanted[2][:4]
        assert await env.load(kept) == wanted[1][0]
        assert (await env.step("wait 0.01"))[:4] == wanted[2][:4]
        await env.reset(seed=7, options={"begin": "wait 0.01"})
        assert env.observation == wanted[0][0]
        assert (await env.step("a"))[:4] == wanted[1][:4]


async def waiting_for_a_place(pool: Pool) -> None:
    taken = [pool.episode(seed=n) for n in range(pool.size)]
    try:
        for episode in taken:
            await episode.__aenter__()
        asyncio.get_running_loop().call_later(0.01, lambda: asyncio.ensure_future(taken.pop().__aexit__()))
        async with pool.episode(seed=1) as env:
            await env.step("x")
    finally:
        for episode in taken:
            await episode.__aexit__()


async def evaluating(pool: Pool) -> None:
    async def policy(observation: str) -> str:
        await asyncio.sleep(0)
        return "x"

    await pool.evaluate(policy, 3, seed=1, retries=0)


def moments(program: Callable[[Pool], Coroutine[Any, Any, None]], size: int, how: dict[str, Any], moment: Any) -> int:
    """Run a program once for every await of it, in one pool; returns how many there were."""

    async def main() -> int:
        # `whole` needs all workers again, and may be told of a death that is nobody's
        async with Pool(Words, size, cancel_timeout=0.3, on_failure="restart", restart_limit=10_000, **how) as pool:
            at = 0
            while True:
                at += 1
                watched = Watched(program(pool), at)
                task = asyncio.ensure_future(waiting(watched))
                watched.act = moment(task, lambda: [process.pid for process in pool._envs.processes])
                (end,) = await asyncio.gather(task, return_exceptions=True)
                assert end is None or isinstance(end, asyncio.CancelledError | VecEnvError), repr(end)
                await asyncio.sleep(0.05 if "death" in moment.__name__ else 0)
                await whole(pool)
                assert not pool._engine.requests
                if watched.waits < at:
                    return at

    async def waiting(watched: Watched) -> None:
        await watched

    return run(main(), seconds=100)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("how", HOW)
def test_every_await_of_every_call(moment: Any, how: dict[str, Any]) -> None:
    assert moments(everything, 2, how, moment) > 9


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("moment", MOMENTS)
def test_every_await_of_a_task_that_waits_for_a_place(moment: Any, how: dict[str, Any]) -> None:
    assert moments(waiting_for_a_place, 2, how, moment) > 4


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("moment", MOMENTS)
def test_every_await_of_evaluate(moment: Any, how: dict[str, Any]) -> None:
    assert moments(evaluating, 2, how, moment) > 1  # the second, of tasks that are done, Python 3.12 does not wait in


@pytest.mark.parametrize("moment", [at_once, a_while_later, with_a_death])
def test_every_await_of_the_end_of_a_pool(moment: Any) -> None:
    """Cancelled while it is closed: it is closed. (What is left behind is looked for around every test.)"""

    async def main() -> None:
        pool = Pool(Words, 3, num_workers=2)
        await pool.__aenter__()
        async with pool.episode() as env:
            busy = asyncio.create_task(env.step("wait 0.1"))
            await asyncio.sleep(0)
            watched = Watched(pool.close(), 1)
            task = asyncio.ensure_future(waiting(watched))
            watched.act = moment(task, lambda: [process.pid for process in pool._envs.processes if process.pid])
            (end,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(end, asyncio.CancelledError)
            (told,) = await asyncio.gather(busy, return_exceptions=True)
            assert "after a call to `close()`" in str(told)
        assert pool._envs.closed
        await pool.close()

    async def waiting(watched: Watched) -> None:
        await watched

    run(main())


@pytest.mark.parametrize("path", ["return", "raise", "cancel", "break off"])
def test_the_block_of_a_pool_closes_it_on_every_path_out(path: str) -> None:
    kept: list[Pool] = []

    async def leave() -> None:
        async with Pool(Words, 2) as pool:
            kept.append(pool)
            async with pool.episode() as env:
                if path == "cancel":
                    await env.step("wait 5")
                await env.step("x")
                if path == "raise":
                    raise ZeroDivisionError
                if path == "break off":
                    asyncio.current_task().cancel()  # type: ignore[union-attr]
                    await env.step("x")

    async def main() -> None:
        task = asyncio.create_task(leave())
        if path == "cancel":
            await asyncio.sleep(0.3)
            task.cancel()
        (end,) = await asyncio.gather(task, return_exceptions=True)
        wanted = {"return": type(None), "raise": ZeroDivisionError}
        assert type(end) is wanted.get(path, asyncio.CancelledError)
        (pool,) = kept
        assert pool._envs.closed

    run(main())


def test_a_loop_that_ends_in_the_middle_of_it_all_leaves_nothing() -> None:
    """``asyncio.run`` cancels what is left, and the pool is closed by that."""

    async def play(pool: Pool, number: int) -> None:
        while True:
            async with pool.episode(seed=number) as env:
                while not env.over:
                    await env.step("wait 0.01")

    async def forever() -> None:
        async with Pool(Words, 4, num_workers=2) as pool:
            await asyncio.gather(*(play(pool, number) for number in range(8)))

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.3, task.cancel)
        await task

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        task = loop.create_task(forever())
        with pytest.raises(asyncio.CancelledError):
            runner.run(main())


def test_a_step_whose_answer_was_cancelled_is_never_the_next_ones() -> None:
    """Late answers have the right number of the wrong question: nothing shifts."""

    async def main() -> None:
        rng = np.random.default_rng(0)
        async with Pool(Words, 2, num_workers=1) as pool:
            for number in range(60):
                async with pool.episode(seed=number) as env:
                    task = asyncio.create_task(env.step("wait 0.001"))
                    await asyncio.sleep(rng.uniform(0, 0.003))
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    await env.reset(seed=number)
                    await check(env, number)

    async def check(env: EpisodeEnv, number: int) -> None:
        wanted = alone(Words(), number, ["y"])
        assert env.observation == wanted[0][0]
        assert (await env.step("y"))[:4] == wanted[1][:4]

    run(main())


def test_a_reset_that_is_cancelled_as_its_worker_gets_ready_leaves_those_beside_it_going() -> None:
    async def main() -> None:
        async with Pool(Words, 2, num_workers=1) as pool, pool.episode() as one, pool.episode() as other:
            with pytest.raises(VecEnvError):
                await one.step("kill")
            with pytest.raises(VecEnvError):
                await other.step("x")
            first, second = (asyncio.create_task(env.reset(seed=5)) for env in (one, other))
            await asyncio.sleep(0)  # both wait for the new worker
            watch = pool._slots._workers
            ready = watch._on_ready
            watch._on_ready = lambda worker: first.cancel() and ready(worker)
            with pytest.raises(asyncio.CancelledError):
                await first
            observation, _ = await asyncio.wait_for(second, 20)
            assert observation == Words().reset(seed=5)[0]

    run(main())
