"""Episodes of an asynchronous pool, the example program, and cancelled awaits."""

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
from text_envs import Walk, Words, check_all_slots, run, step_directly

import vecenv
from vecenv.aio import EpisodeEnv, Pool
from vecenv.errors import NotRestorable, SnapshotMismatch, VecEnvError
from vecenv.testing import assert_identical
from vecenv.wrappers import ActionChunks

# --- pools and episodes in normal use, under asyncio and uvloop ---------------------------------

LOOPS = ["asyncio", *(["uvloop"] if importlib.util.find_spec("uvloop") else [])]
HOW = [
    pytest.param({}, id="each"),
    pytest.param({"num_workers": 2}, id="two"),
    pytest.param({"num_workers": 2, "env_threads": 3}, id="threads"),
]
MANY = [pytest.param(150, marks=pytest.mark.long), pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]


def test_importing_the_package_does_not_import_asyncio() -> None:
    program = "import sys, vecenv; print('asyncio' in sys.modules); vecenv.aio; print('asyncio' in sys.modules)"
    results = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert results.split() == ["False", "True"]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kwargs", HOW)
async def test_every_slot_returns_its_own_results(loop: str, kwargs: dict[str, Any]) -> None:
    async with Pool(Words, 6, **kwargs) as pool:
        await check_all_slots(pool)
        await check_all_slots(pool)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedules", [15, *MANY])
@pytest.mark.parametrize("world", [Words, Walk])
@pytest.mark.parametrize("kwargs", HOW)
def test_results_equal_directly_stepped_environments(schedules: int, world: Any, kwargs: dict[str, Any]) -> None:
    """Episodes of random lengths, begun and stepped at random moments, equal the same actions one by one."""

    async def main() -> None:
        rng = random.Random(0)
        async with Pool(world, 4, **kwargs) as pool:
            for schedule in range(schedules):
                await asyncio.gather(*(one(pool, random.Random(rng.random()), 100 * schedule + n) for n in range(6)))

    async def one(pool: Pool, rng: random.Random, seed: int) -> None:
        plain = world()
        plain.action_space.seed(seed)
        actions = [plain.action_space.sample() for _ in range(rng.randrange(7))]
        results: list[Any] = []
        await pause(rng)
        async with pool.episode(seed=seed) as env:
            results.append((env.observation, env.info))
            for action in actions:
                await pause(rng)
                results.append(await env.step(action))
            assert env.over == (len(actions) == 6)
        expected = step_directly(plain, seed, actions)
        for got in (results, expected):
            got[0][1].pop("pid", None)
        assert_identical(results, expected, f"seed {seed}")

    async def pause(rng: random.Random) -> None:
        for _ in range(rng.choice([0, 0, 1, 3])):
            await asyncio.sleep(0)
        if rng.random() < 0.1:
            await asyncio.sleep(0.001)

    run(main(), seconds=500)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("loop", LOOPS)
def test_blocking_environments_wait_concurrently_in_threads(loop: str) -> None:
    async def main() -> float:
        async with Pool(Words, 16, num_workers=2, env_threads=8) as pool:
            ticks = asyncio.get_running_loop().time
            began = ticks()
            await asyncio.gather(*(one(pool, n) for n in range(16)))
            return ticks() - began

    async def one(pool: Pool, number: int) -> None:
        async with pool.episode(seed=number) as env:
            for step in range(3):
                await asyncio.sleep(0.01 * ((number + step) % 4))  # never two at once
                await env.step("wait 0.1")

    seconds = run(main(), loop)
    assert seconds < 16 * 3 * 0.1 / 4, seconds  # 2.4 s if each of the 2 workers runs them one after another


def test_waiting_episodes_get_slots_in_order() -> None:
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


async def test_reset_starts_an_episode_in_the_same_slot_with_seed_and_options() -> None:
    async with Pool(Words, 1) as pool, pool.episode(seed=1, options={"task": [1, 2]}) as env:
        assert env.info["options"] == {"task": [1, 2]}
        assert env.env_id == 0
        first = env.observation
        await env.step("x")
        assert await env.reset(seed=1) == (first, {"options": None, "pid": env.info["pid"]})
        assert (await env.reset())[0] != first


async def test_call_runs_in_one_environment_and_raises_its_error() -> None:
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kwargs", [{"num_workers": 1}, {"num_workers": 1, "env_threads": 3}], ids=["plain", "threads"])
async def test_many_branches_continue_from_one_saved_state(kwargs: dict[str, Any]) -> None:
    async with Pool(partial(gym.make, "CartPole-v1"), 4, **kwargs) as pool:
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
        assert pool._slots.submissions.verified


async def test_load_of_a_foreign_state_is_refused_and_the_episode_continues() -> None:
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


class Unsaveable(Words):
    """An environment that cannot be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = (number for number in range(3))


async def test_save_of_an_unsaveable_environment_raises_and_the_episode_continues() -> None:
    async with Pool(Unsaveable, 1) as pool, pool.episode() as env:
        with pytest.raises(NotRestorable, match="generator"):
            await env.save()
        await env.step("x")


def test_evaluate_equals_the_synchronous_evaluate() -> None:
    async def policy(observation: np.ndarray) -> int:
        await asyncio.sleep(0)
        return int(observation[2] > 0)

    async def main() -> Any:
        async with Pool(partial(gym.make, "CartPole-v1"), 4, num_workers=2) as pool:
            return await pool.evaluate(policy, 12, seed=5, on_episode=told.append)

    told: list[Any] = []
    results = run(main())
    with closing(vecenv.make_vec("CartPole-v1", num_envs=3)) as envs:
        expected = vecenv.evaluate(envs, lambda observations: (observations[:, 2] > 0).astype(int), 12, seed=5)
    assert results.returns.tolist() == expected.returns.tolist()
    assert [each.seed for each in results] == [each.seed for each in expected]
    assert sorted(each.index for each in told) == list(range(12))


def test_evaluate_runs_named_environments_like_the_synchronous_evaluate() -> None:
    choice = vecenv.EnvChoice({f"walk-{length}": partial(Walk, length) for length in (3, 5, 8)})
    episodes = [vecenv.Episode(env=f"walk-{length}", seed=seed) for seed in range(3) for length in (8, 3, 5)]

    async def policy(observation: np.ndarray) -> np.ndarray:
        return np.sin(observation)

    async def main() -> Any:
        async with Pool(choice, 4, num_workers=2) as pool:
            for wrong, text in [
                (vecenv.Episode(env="walk-4"), r"episodes\[0\]: there is no environment 'walk-4'; did you mean"),
                (vecenv.Episode(), r"episodes\[0\] names no environment"),
            ]:
                with pytest.raises(ValueError, match=text):
                    await pool.evaluate(policy, [wrong])
            assert pool.stats()["resets"] == 0
            return await pool.evaluate(policy, episodes)

    results = run(main())
    with closing(vecenv.AsyncVectorEnv([choice] * 3, num_workers=0)) as envs:
        expected = vecenv.evaluate(envs, np.sin, episodes)
    assert results.returns.tolist() == expected.returns.tolist()
    assert results.lengths.tolist() == expected.lengths.tolist() == [8, 3, 5] * 3
    assert [each.env for each in results] == [episode.env for episode in episodes]


async def test_evaluate_refuses_names_if_there_is_no_choice_also_after_a_death() -> None:
    async with Pool(Words, 1) as pool:
        async with pool.episode() as env:
            os.kill(await env.call("pid"), signal.SIGKILL)
        with pytest.raises(ValueError, match=r"names the environment 'x', but Pool has none to choose from"):
            await pool.evaluate(lambda _: asyncio.sleep(0, "x"), [vecenv.Episode(env="x")])
        await check_all_slots(pool)


def test_evaluate_counts_the_steps_of_chunks() -> None:
    make_env = partial(_chunked_walk, horizon=4)

    async def main() -> Any:
        async with Pool(make_env, 2) as pool:
            results = await pool.evaluate(lambda _: asyncio.sleep(0, np.ones((4, 3))), 3, seed=5)
            assert pool.stats()["steps"] == results.lengths.sum()
            return results

    results = run(main())
    with closing(vecenv.AsyncVectorEnv([make_env] * 2, num_workers=0)) as envs:
        expected = vecenv.evaluate(envs, lambda seen: np.ones((len(seen), 4, 3)), 3, seed=5)
    assert results.lengths.tolist() == expected.lengths.tolist() == [6] * 3
    assert results.returns.tolist() == expected.returns.tolist()


def _chunked_walk(horizon: int) -> ActionChunks:
    return ActionChunks(Walk(), horizon)


async def test_evaluate_raises_policy_errors_and_the_pool_stays_usable() -> None:
    async def policy(observation: str) -> str:
        if observation.startswith("3 "):
            raise ZeroDivisionError
        return "x"

    async with Pool(Words, 3) as pool:
        with pytest.raises(ZeroDivisionError):
            await pool.evaluate(policy, 10)
        await check_all_slots(pool)


async def test_evaluate_retries_a_failed_episode_and_then_raises() -> None:
    async def policy(observation: str) -> str:
        return "raise now" if observation.startswith("2 ") else "x"

    async with Pool(Words, 2) as pool:
        results = await pool.evaluate(policy, 3, seed=0, retries=1)
        assert [(each.attempts, type(each.error)) for each in results] == [(2, vecenv.errors.EnvFailed)] * 3


async def test_large_messages_do_not_block_other_episodes() -> None:
    """Messages longer than a pipe are sent and read in parts, while the loop continues."""
    async with Pool(Words, 3, num_workers=2) as pool:
        async with pool.episode(seed=0) as one, pool.episode(seed=1) as two:
            long = "x" * (5 << 20)
            sent = asyncio.create_task(one.step(long))
            for _ in range(20):
                await two.reset()
            assert (await sent)[4]["of"] == [long]
        await check_all_slots(pool)


# --- ``examples/agent_pool.py``, with games that kill their workers: every game comes to an end -

PROGRAM = Path(__file__).parents[2] / "examples" / "agent_pool.py"


@pytest.mark.long
@pytest.mark.parametrize("crash", [0.0, 0.02])
def test_every_game_ends(crash: float) -> None:
    pytest.importorskip("rich", reason="needs pip install 'vecenv[examples]'")
    options = ["--episodes=60", "--size=12", "--workers=3", f"--crash={crash}"]
    ran = subprocess.run([sys.executable, PROGRAM, *options], capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert re.search(r"60 games in [\d.]+ s: mean return [\d.]+,", ran.stdout), ran.stdout
    assert "100%" in ran.stdout
    restarts = int(re.findall(r"restarts: (\d+)", ran.stdout)[0])
    assert (restarts > 0) == (crash > 0)


# --- CancelledError at every await of every call, alone and together with a reply or a worker's death
# The program is cancelled at its n-th await, for every n. Afterwards no request is left, every slot replies to its own
# requests, and the results of the other tasks are correct.

Act = Callable[[Any], None]


class CountedAwaits:
    """An awaitable that runs a coroutine and calls ``act`` the ``at``-th time that it waits.

    Attributes:
        act: The function to call.
        waits: The number of waits so far.
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


def cancel_at_once(task: asyncio.Task[Any], workers: Callable[[], list[int]]) -> Act:
    """Cancel the task as soon as it waits."""
    return lambda future: asyncio.get_running_loop().call_soon(task.cancel) and None


def cancel_when_done(task: asyncio.Task[Any], workers: Callable[[], list[int]]) -> Act:
    """Cancel the task when its future is done, before the task runs."""
    return lambda future: future.add_done_callback(lambda _: task.cancel()) if future is not None else task.cancel() and None


def cancel_later(task: asyncio.Task[Any], workers: Callable[[], list[int]]) -> Act:
    return lambda future: asyncio.get_running_loop().call_later(0.003, task.cancel) and None


def cancel_and_kill(task: asyncio.Task[Any], workers: Callable[[], list[int]]) -> Act:
    """Cancel the task and kill all workers at the same moment."""

    def act(_: Any) -> None:
        for pid in workers():
            os.kill(pid, signal.SIGKILL)
        asyncio.get_running_loop().call_soon(task.cancel)

    return act


def cancel_during_restart(task: asyncio.Task[Any], workers: Callable[[], list[int]]) -> Act:
    """Cancel the task while workers are restarted."""

    def act(_: Any) -> None:
        for pid in workers():
            os.kill(pid, signal.SIGKILL)
        asyncio.get_running_loop().call_later(0.02, task.cancel)

    return act


def kill_only(task: asyncio.Task[Any], workers: Callable[[], list[int]]) -> Act:
    def act(_: Any) -> None:
        for pid in workers():
            os.kill(pid, signal.SIGKILL)

    return act


MOMENTS = [cancel_at_once, cancel_when_done, cancel_later, cancel_and_kill, cancel_during_restart, kill_only]
WAYS = [
    pytest.param({"num_workers": 1}, id="one"),
    pytest.param({}, id="each", marks=pytest.mark.long),
    pytest.param({"num_workers": 1, "env_threads": 2}, id="threads", marks=pytest.mark.long),
]


async def every_call(pool: Pool) -> None:
    """Make every call of a pool and check its result."""
    async with pool.episode(seed=7) as env:
        expected = step_directly(Words(), 7, ["a", "wait 0.01", "b"])
        assert env.observation == expected[0][0]
        assert (await env.step("a"))[:4] == expected[1][:4]
        kept = await env.save()
        assert await env.call("twice", 3) == 6
        assert (await env.step("wait 0.01"))[:4] == expected[2][:4]
        assert await env.load(kept) == expected[1][0]
        assert (await env.step("wait 0.01"))[:4] == expected[2][:4]
        await env.reset(seed=7, options={"begin": "wait 0.01"})
        assert env.observation == expected[0][0]
        assert (await env.step("a"))[:4] == expected[1][:4]


async def waiting_for_a_slot(pool: Pool) -> None:
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


def interrupt_every_await(
    program: Callable[[Pool], Coroutine[Any, Any, None]], size: int, kwargs: dict[str, Any], moment: Any
) -> int:
    """Run a program once for each of its awaits, in one pool; return the number of awaits."""

    async def main() -> int:
        # no request hangs here, and a worker that is killed for a late one takes other episodes with it
        async with Pool(Words, size, cancel_timeout=60, on_failure=vecenv.Restart(10_000), **kwargs) as pool:
            at = 0
            killed: set[int] = set()

            def pids() -> list[int]:
                return [process.pid for process in pool._envs.processes]

            def to_kill() -> list[int]:
                killed.update(pids())
                return pids()

            while True:
                at += 1
                counted = CountedAwaits(program(pool), at)
                task = asyncio.ensure_future(waiting(counted))
                counted.act = moment(task, to_kill)
                (end,) = await asyncio.gather(task, return_exceptions=True)
                assert end is None or isinstance(end, asyncio.CancelledError | VecEnvError), repr(end)
                while not killed.isdisjoint(pids()):  # until then, a death would be another episode's
                    await asyncio.sleep(0.001)
                killed.clear()
                await check_all_slots(pool)
                assert not pool.stats()["in_flight"]
                if counted.waits < at:
                    return at

    async def waiting(counted: CountedAwaits) -> None:
        await counted

    return run(main(), seconds=100)


@pytest.mark.sampled(
    "every_call-9-one-cancel_at_once",
    "waiting_for_a_slot-4-one-cancel_and_kill",
    "waiting_for_a_slot-4-one-kill_only",
    "evaluating-1-one-cancel_during_restart",
)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kwargs", WAYS)
@pytest.mark.parametrize(
    ("program", "least"),
    [
        (every_call, 9),
        (waiting_for_a_slot, 4),
        (evaluating, 1),  # Python 3.12 does not wait in the second, that of finished tasks
    ],
)
def test_cancel_at_every_await_of_every_program(program: Any, least: int, kwargs: dict[str, Any], moment: Any) -> None:
    assert interrupt_every_await(program, 2, kwargs, moment) > least


@pytest.mark.parametrize("moment", [cancel_at_once, cancel_later, cancel_and_kill])
async def test_close_cancelled_at_every_await_closes_the_pool(moment: Any) -> None:
    """A pool that is cancelled while it closes is closed. (The fixture around every test looks for leaks.)"""

    async def waiting(counted: CountedAwaits) -> None:
        await counted

    pool = Pool(Words, 3, num_workers=2)
    await pool.__aenter__()
    async with pool.episode() as env:
        busy = asyncio.create_task(env.step("wait 1"))
        await asyncio.sleep(0)
        counted = CountedAwaits(pool.close(), 1)
        task = asyncio.ensure_future(waiting(counted))
        counted.act = moment(task, lambda: [process.pid for process in pool._envs.processes if process.pid])
        (end,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(end, asyncio.CancelledError)
        (told,) = await asyncio.gather(busy, return_exceptions=True)
        assert "after a call to `close()`" in str(told)
    assert pool._envs.closed
    await pool.close()


@pytest.mark.parametrize("path", ["return", "raise", "cancel", "break off"])
async def test_leaving_the_with_block_always_closes_the_pool(path: str) -> None:
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
    expected = {"return": type(None), "raise": ZeroDivisionError}
    assert type(end) is expected.get(path, asyncio.CancelledError)
    (pool,) = kept
    assert pool._envs.closed


def test_loop_that_ends_early_leaves_nothing() -> None:
    """``asyncio.run`` cancels the remaining tasks, which closes the pool."""

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


async def test_cancelled_step_never_returns_to_the_next_step() -> None:
    """A late reply has a valid sequence number of another request: no result shifts to the next step."""

    async def check(env: EpisodeEnv, number: int) -> None:
        expected = step_directly(Words(), number, ["y"])
        assert env.observation == expected[0][0]
        assert (await env.step("y"))[:4] == expected[1][:4]

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


async def test_cancelled_reset_leaves_other_resets_of_its_worker_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Pool(Words, 2, num_workers=1) as pool, pool.episode() as one, pool.episode() as other:
        with pytest.raises(VecEnvError):
            await one.step("kill")
        with pytest.raises(VecEnvError):
            await other.step("x")
        first, second = (asyncio.create_task(env.reset(seed=5)) for env in (one, other))
        await asyncio.sleep(0)  # both wait for the new worker
        ready = pool._slots._make_available
        monkeypatch.setattr(pool._slots, "_make_available", lambda group: first.cancel() and ready(group))
        with pytest.raises(asyncio.CancelledError):
            await first
        observation, _ = await asyncio.wait_for(second, 20)
        assert observation == Words().reset(seed=5)[0]

