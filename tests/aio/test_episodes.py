"""Episodes of an asynchronous pool, the example, and awaits that are cancelled."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Generator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from worlds import Walk, Words, alone, run, whole

import vecenv
from vecenv.aio import EpisodeEnv, Pool
from vecenv.errors import NotRestorable, SnapshotMismatch, VecEnvError
from vecenv.testing import assert_identical

# --- Pools and episodes as they are meant to be used, under asyncio and uvloop ------------------

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
async def test_every_place_answers_what_it_was_asked(loop: str, how: dict[str, Any]) -> None:
    async with Pool(Words, 6, **how) as pool:
        await whole(pool)
        await whole(pool)


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


async def test_reset_begins_another_episode_in_the_same_place_with_its_seed_and_options() -> None:
    async with Pool(Words, 1) as pool, pool.episode(seed=1, options={"task": [1, 2]}) as env:
        assert env.info["options"] == {"task": [1, 2]}
        assert env.env_id == 0
        first = env.observation
        await env.step("x")
        assert await env.reset(seed=1) == (first, {"options": None, "pid": env.info["pid"]})
        assert (await env.reset())[0] != first


async def test_a_call_runs_in_one_environment_and_what_it_raises_is_its_own() -> None:
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


@pytest.mark.parametrize("how", [{"num_workers": 1}, {"num_workers": 1, "env_threads": 3}], ids=["plain", "threads"])
async def test_many_branches_go_on_from_one_saved_state(how: dict[str, Any]) -> None:
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


async def test_a_state_that_does_not_fit_is_refused_and_the_episode_goes_on() -> None:
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


class Locked(Words):
    """Has what cannot be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = (number for number in range(3))


async def test_what_cannot_be_saved_says_so_and_goes_on() -> None:
    async with Pool(Locked, 1) as pool, pool.episode() as env:
        with pytest.raises(NotRestorable, match="generator"):
            await env.save()
        await env.step("x")


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


async def test_evaluate_raises_what_the_policy_raises_and_leaves_the_pool_whole() -> None:
    async def policy(observation: str) -> str:
        if observation.startswith("3 "):
            raise ZeroDivisionError
        return "x"

    async with Pool(Words, 3) as pool:
        with pytest.raises(ZeroDivisionError):
            await pool.evaluate(policy, 10)
        await whole(pool)


async def test_evaluate_begins_an_episode_again_that_failed_and_then_says_why() -> None:
    async def policy(observation: str) -> str:
        return "raise now" if observation.startswith("2 ") else "x"

    async with Pool(Words, 2) as pool:
        results = await pool.evaluate(policy, 3, seed=0, retries=1)
        assert [(each.attempts, type(each.error)) for each in results] == [(2, vecenv.errors.EnvFailed)] * 3


async def test_large_messages_do_not_stop_the_others() -> None:
    """Longer than a pipe takes: sent and read in parts, while the loop goes on."""
    async with Pool(Words, 3, num_workers=2) as pool:
        async with pool.episode(seed=0) as one, pool.episode(seed=1) as two:
            long = "x" * (5 << 20)
            sent = asyncio.create_task(one.step(long))
            for _ in range(20):
                await two.reset()
            assert (await sent)[4]["of"] == [long]
        await whole(pool)


# --- ``examples/agent_pool.py``, with games that kill their workers: every game comes to an end -

PROGRAM = Path(__file__).parents[2] / "examples" / "agent_pool.py"


@pytest.mark.long
@pytest.mark.parametrize("crash", [0.0, 0.02])
def test_every_game_is_played(crash: float) -> None:
    pytest.importorskip("rich", reason="needs pip install 'vecenv[examples]'")
    options = ["--episodes=60", "--size=12", "--workers=3", f"--crash={crash}"]
    ran = subprocess.run([sys.executable, PROGRAM, *options], capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert re.search(r"60 games in [\d.]+ s: mean return [\d.]+,", ran.stdout), ran.stdout
    assert "100%" in ran.stdout
    restarts = int(re.findall(r"started anew: (\d+)", ran.stdout)[0])
    assert (restarts > 0) == (crash > 0)


# --- ``CancelledError`` at every await of every call, alone and together with an answer or a worker's death
# A program is cancelled in the moment in which it waits for the n-th time, for every n. Afterwards no question is left,
# every place answers what it is asked, and what the others were told meanwhile is right.

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
WAYS = [
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
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(
    ("program", "least"),
    [
        (everything, 9),
        (waiting_for_a_place, 4),
        (evaluating, 1),  # the second, of tasks that are done, Python 3.12 does not wait in
    ],
)
def test_every_await_of_every_program(program: Any, least: int, how: dict[str, Any], moment: Any) -> None:
    assert moments(program, 2, how, moment) > least


@pytest.mark.parametrize("moment", [at_once, a_while_later, with_a_death])
async def test_every_await_of_the_end_of_a_pool(moment: Any) -> None:
    """Cancelled while it is closed: it is closed. (What is left behind is looked for around every test.)"""

    async def waiting(watched: Watched) -> None:
        await watched

    pool = Pool(Words, 3, num_workers=2)
    await pool.__aenter__()
    async with pool.episode() as env:
        busy = asyncio.create_task(env.step("wait 1"))
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


@pytest.mark.parametrize("path", ["return", "raise", "cancel", "break off"])
async def test_the_block_of_a_pool_closes_it_on_every_path_out(path: str) -> None:
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

    task = asyncio.create_task(leave())
    if path == "cancel":
        await asyncio.sleep(0.3)
        task.cancel()
    (end,) = await asyncio.gather(task, return_exceptions=True)
    wanted = {"return": type(None), "raise": ZeroDivisionError}
    assert type(end) is wanted.get(path, asyncio.CancelledError)
    (pool,) = kept
    assert pool._envs.closed


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


async def test_a_step_whose_answer_was_cancelled_is_never_the_next_ones() -> None:
    """Late answers have the right number of the wrong question: nothing shifts."""

    async def check(env: EpisodeEnv, number: int) -> None:
        wanted = alone(Words(), number, ["y"])
        assert env.observation == wanted[0][0]
        assert (await env.step("y"))[:4] == wanted[1][:4]

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


async def test_a_reset_that_is_cancelled_as_its_worker_gets_ready_leaves_those_beside_it_going() -> None:
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

