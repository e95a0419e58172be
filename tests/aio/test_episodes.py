"""Tests of episodes of an asynchronous pool, of the example program, and of cancelled awaits."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from text_envs import RandomWalk, TextEnv, check_all_slots, run, step_directly

import vecenv
from vecenv.aio import EpisodeEnv, Pool
from vecenv.errors import NotRestorable, SnapshotMismatch, VecEnvError
from vecenv.testing import assert_identical
from vecenv.wrappers import ActionChunks

# --- pools and episodes in normal use, under asyncio and uvloop ---------------------------------

LOOPS = ["asyncio", *(["uvloop"] if importlib.util.find_spec("uvloop") else [])]
WORKER_OPTIONS = [
    pytest.param({}, id="process-per-env"),
    pytest.param({"num_workers": 2}, id="two-workers"),
    pytest.param({"num_workers": 2, "env_threads": 3}, id="threads"),
]
SCHEDULE_COUNTS = [
    15,
    pytest.param(150, marks=pytest.mark.long),
    pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
]


def test_importing_the_package_does_not_import_asyncio() -> None:
    program = "import sys, vecenv; print('asyncio' in sys.modules); vecenv.aio; print('asyncio' in sys.modules)"
    results = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert results.split() == ["False", "True"]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("options", WORKER_OPTIONS)
async def test_every_slot_returns_its_own_results(loop: str, options: dict[str, Any]) -> None:
    async with Pool(TextEnv, 6, **options) as pool:
        await check_all_slots(pool)
        await check_all_slots(pool)  # the slots can be used again


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule_count", SCHEDULE_COUNTS)
@pytest.mark.parametrize("env_class", [TextEnv, RandomWalk])
@pytest.mark.parametrize("options", WORKER_OPTIONS)
def test_results_equal_directly_stepped_environments(schedule_count: int, env_class: Any, options: dict[str, Any]) -> None:
    """Episodes start and step at random moments, and return the results of an environment without a pool."""

    async def main() -> None:
        rng = random.Random(0)
        async with Pool(env_class, 4, **options) as pool:
            for schedule in range(schedule_count):
                seeds = range(100 * schedule, 100 * schedule + 6)
                await asyncio.gather(*(play(pool, random.Random(rng.random()), seed) for seed in seeds))

    async def play(pool: Pool, rng: random.Random, seed: int) -> None:
        reference = env_class()
        reference.action_space.seed(seed)
        actions = [reference.action_space.sample() for _ in range(rng.randrange(7))]
        results: list[Any] = []
        await pause(rng)
        async with pool.episode(seed=seed) as env:
            results.append((env.observation, env.info))
            for action in actions:
                await pause(rng)
                results.append(await env.step(action))
            assert env.over == (len(actions) == 6)  # an episode has six steps
        expected = step_directly(reference, seed, actions)
        for episode in (results, expected):
            episode[0][1].pop("pid", None)  # the reference is in this process
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
        async with Pool(TextEnv, 16, num_workers=2, env_threads=8) as pool:
            loop_time = asyncio.get_running_loop().time
            started_at = loop_time()
            await asyncio.gather(*(play(pool, number) for number in range(16)))
            return loop_time() - started_at

    async def play(pool: Pool, number: int) -> None:
        async with pool.episode(seed=number) as env:
            for step in range(3):
                await asyncio.sleep(0.01 * ((number + step) % 4))  # so that not all steps are sent at once
                await env.step("wait 0.1")

    seconds = run(main(), loop)
    assert seconds < 16 * 3 * 0.1 / 4, seconds  # 2.4 s if each of the 2 workers runs them one after another


def test_waiting_episodes_get_slots_in_order() -> None:
    async def main() -> list[int]:
        started: list[int] = []

        async def play(number: int) -> None:
            async with pool.episode(seed=number) as env:
                started.append(number)
                await env.step("wait 0.002")

        async with Pool(TextEnv, 1) as pool:
            await asyncio.gather(*map(play, range(20)))
        return started

    assert run(main()) == list(range(20))


async def test_reset_starts_an_episode_in_the_same_slot_with_seed_and_options() -> None:
    async with Pool(TextEnv, 1) as pool, pool.episode(seed=1, options={"task": [1, 2]}) as env:
        assert env.info["options"] == {"task": [1, 2]}
        assert env.env_id == 0
        first = env.observation
        await env.step("x")
        assert await env.reset(seed=1) == (first, {"options": None, "pid": env.info["pid"]})
        assert (await env.reset())[0] != first


async def test_seeds_may_be_numpy_integers() -> None:
    expected, _ = gym.make("CartPole-v1").reset(seed=2**33)
    async with Pool(partial(gym.make, "CartPole-v1"), 1) as pool, pool.episode(seed=np.int64(2**33)) as env:
        assert_identical(env.observation, expected)
        await env.reset(seed=np.uint64(2**33))
        assert_identical(env.observation, expected)


async def test_options_may_be_changed_after_the_call() -> None:
    options: dict[str, Any] = {"task": 1, "goals": [1]}
    async with Pool(TextEnv, 1) as pool:
        episode = pool.episode(options=options)
        options["task"] = 2
        options["goals"].append(2)
        async with episode as env:
            assert env.info["options"] == {"task": 1, "goals": [1]}


async def test_call_runs_in_one_environment_and_raises_its_error() -> None:
    async with Pool(TextEnv, 3, num_workers=1) as pool:
        async with pool.episode() as first, pool.episode() as second:
            step = asyncio.create_task(second.step("wait 0.05"))
            assert await first.call("double", 4) == 8
            assert await first.call("double", number=5) == 10
            assert await first.call("pid") == pool._envs.processes[0].pid
            assert await first.call("get_wrapper_attr", name="pid") == pool._envs.processes[0].pid
            with pytest.raises(KeyError, match="-1"):
                await first.call("double", -1)
            await first.step("x")
            await step
        assert len(pool.errors) == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{"num_workers": 1}, {"num_workers": 1, "env_threads": 3}], ids=["plain", "threads"])
async def test_many_branches_continue_from_one_saved_state(options: dict[str, Any]) -> None:
    async with Pool(partial(gym.make, "CartPole-v1"), 4, **options) as pool:
        async with pool.episode(seed=3) as env:
            await env.step(1)
            snapshot = await env.save()
            steps = [await env.step(action) for action in (0, 1, 1)]

        async def branch() -> list[Any]:
            async with pool.episode() as env:
                assert np.array_equal(await env.load(snapshot), env.observation)
                return [await env.step(action) for action in (0, 1, 1)]

        for results in await asyncio.gather(*(branch() for _ in range(12))):
            assert_identical(results, steps)
        assert pool._slots.submissions.verified


async def test_load_of_a_state_before_the_first_reset_returns_no_observation() -> None:
    with closing(vecenv.AsyncVectorEnv([partial(gym.make, "CartPole-v1")])) as envs:
        snapshots = envs.save()
        assert envs.load(snapshots) is None
    async with Pool(partial(gym.make, "CartPole-v1"), 1) as pool, pool.episode(seed=1) as env:
        assert await env.load(snapshots[0]) is None
        assert env.observation is None
        await env.reset(seed=1)
        await env.step(0)


async def test_load_of_another_environments_snapshot_raises_and_the_episode_continues() -> None:
    async with (
        Pool(RandomWalk, 1) as walks,
        Pool(partial(gym.make, "CartPole-v1"), 1) as carts,
        walks.episode(seed=1) as walk,
        carts.episode(seed=1) as cart,
    ):
        snapshot = await walk.save(verify=False)
        with pytest.raises(SnapshotMismatch):
            await cart.load(snapshot)
        with pytest.raises(SnapshotMismatch):
            await cart.load("no snapshot")  # type: ignore[arg-type]
        await cart.step(1)


class UnsaveableEnv(TextEnv):
    """An environment that cannot be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = (number for number in range(3))


async def test_save_of_an_unsaveable_environment_raises_and_the_episode_continues() -> None:
    async with Pool(UnsaveableEnv, 1) as pool, pool.episode() as env:
        with pytest.raises(NotRestorable, match="generator"):
            await env.save()
        await env.step("x")


def test_evaluate_equals_the_synchronous_evaluate() -> None:
    async def policy(observation: np.ndarray) -> int:
        await asyncio.sleep(0)
        return int(observation[2] > 0)

    async def main() -> Any:
        async with Pool(partial(gym.make, "CartPole-v1"), 4, num_workers=2) as pool:
            return await pool.evaluate(policy, 12, seed=5, on_episode=reported.append)

    reported: list[Any] = []
    results = run(main())
    with closing(vecenv.make_vec("CartPole-v1", num_envs=3)) as envs:
        expected = vecenv.evaluate(envs, lambda observations: (observations[:, 2] > 0).astype(int), 12, seed=5)
    assert results.returns.tolist() == expected.returns.tolist()
    assert [result.seed for result in results] == [result.seed for result in expected]
    assert sorted(result.index for result in reported) == list(range(12))


def test_evaluate_runs_named_environments_like_the_synchronous_evaluate() -> None:
    choice = vecenv.EnvChoice({f"walk-{length}": partial(RandomWalk, length) for length in (3, 5, 8)})
    episodes = [vecenv.Episode(env=f"walk-{length}", seed=seed) for seed in range(3) for length in (8, 3, 5)]

    async def policy(observation: np.ndarray) -> np.ndarray:
        return np.sin(observation)

    async def main() -> Any:
        async with Pool(choice, 4, num_workers=2) as pool:
            for unknown_episode, text in [
                (vecenv.Episode(env="walk-4"), r"episodes\[0\]: there is no environment 'walk-4'; did you mean"),
                (vecenv.Episode(), r"episodes\[0\] names no environment"),
            ]:
                with pytest.raises(ValueError, match=text):
                    await pool.evaluate(policy, [unknown_episode])
            assert pool.stats()["resets"] == 0
            return await pool.evaluate(policy, episodes)

    results = run(main())
    with closing(vecenv.AsyncVectorEnv([choice] * 3, num_workers=0)) as envs:
        expected = vecenv.evaluate(envs, np.sin, episodes)
    assert results.returns.tolist() == expected.returns.tolist()
    assert results.lengths.tolist() == expected.lengths.tolist() == [8, 3, 5] * 3
    assert [result.env for result in results] == [episode.env for episode in episodes]


async def test_evaluate_of_a_named_environment_without_env_choice_raises_after_a_death() -> None:
    async with Pool(TextEnv, 1) as pool:
        async with pool.episode() as env:
            os.kill(await env.call("pid"), signal.SIGKILL)
        with pytest.raises(ValueError, match=r"names the environment 'x', but Pool has none to choose from"):
            await pool.evaluate(lambda _: asyncio.sleep(0, "x"), [vecenv.Episode(env="x")])
        await check_all_slots(pool)


def test_evaluate_counts_the_steps_of_action_chunks() -> None:
    make_env = partial(_make_chunked_walk, horizon=4)

    async def main() -> Any:
        async with Pool(make_env, 2) as pool:
            results = await pool.evaluate(lambda _: asyncio.sleep(0, np.ones((4, 3))), 3, seed=5)
            assert pool.stats()["steps"] == results.lengths.sum()
            return results

    results = run(main())
    with closing(vecenv.AsyncVectorEnv([make_env] * 2, num_workers=0)) as envs:
        expected = vecenv.evaluate(envs, lambda observations: np.ones((len(observations), 4, 3)), 3, seed=5)
    assert results.lengths.tolist() == expected.lengths.tolist() == [6] * 3
    assert results.returns.tolist() == expected.returns.tolist()


def _make_chunked_walk(horizon: int) -> ActionChunks:
    return ActionChunks(RandomWalk(), horizon)


async def test_evaluate_raises_policy_errors_and_the_pool_stays_usable() -> None:
    async def policy(observation: str) -> str:
        if observation.startswith("3 "):
            raise ZeroDivisionError
        return "x"

    async with Pool(TextEnv, 3) as pool:
        with pytest.raises(ZeroDivisionError):
            await pool.evaluate(policy, 10)
        await check_all_slots(pool)


async def test_evaluate_retries_a_failed_episode_and_then_returns_its_error() -> None:
    async def policy(observation: str) -> str:
        return "raise now" if observation.startswith("2 ") else "x"

    async with Pool(TextEnv, 2) as pool:
        results = await pool.evaluate(policy, 3, seed=0, retries=1)
        assert [(result.attempts, type(result.error)) for result in results] == [(2, vecenv.errors.EnvFailed)] * 3


class TaskEnv(TextEnv):
    """An environment with a required reset option."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        assert options is not None
        return super().reset(seed=seed, options=options)


async def test_evaluate_after_a_failure_resets_only_with_the_options_of_episodes() -> None:
    async def policy(observation: str) -> str:
        return "raise now" if observation.startswith("2 ") else "x"

    async with Pool(TaskEnv, 1) as pool:
        for _ in range(2):
            (result,) = await pool.evaluate(policy, [vecenv.Episode(options={"begin": ""})])
            assert str(result.error).endswith("step: ValueError: wrong: now")


async def test_large_messages_do_not_block_other_episodes() -> None:
    """Messages that do not fit into a pipe are sent and read in parts, while the loop continues."""
    async with Pool(TextEnv, 3, num_workers=2) as pool:
        async with pool.episode(seed=0) as first, pool.episode(seed=1) as second:
            long_action = "x" * (5 << 20)
            step = asyncio.create_task(first.step(long_action))
            for _ in range(20):
                await second.reset()
            assert (await step)[4]["action"] == [long_action]
        await check_all_slots(pool)


# --- ``examples/agent_pool.py``, also with games that kill their workers ------------------------

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent_pool.py"


@pytest.mark.long
@pytest.mark.parametrize("crash", [0.0, 0.02])
def test_agent_pool_example_finishes_every_game(crash: float) -> None:
    pytest.importorskip("rich", reason="needs pip install 'vecenv[examples]'")
    options = ["--episodes=60", "--size=12", "--workers=3", f"--crash={crash}"]
    process = subprocess.run([sys.executable, EXAMPLE, *options], capture_output=True, text=True, timeout=200, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    assert re.search(r"60 games in [\d.]+ s: mean return [\d.]+,", process.stdout), process.stdout
    assert "100%" in process.stdout
    restarts = int(re.findall(r"restarts: (\d+)", process.stdout)[0])
    assert (restarts > 0) == (crash > 0)


@pytest.mark.long
def test_agent_pool_example_ends_if_every_guess_kills_its_worker() -> None:
    pytest.importorskip("rich", reason="needs pip install 'vecenv[examples]'")
    options = ["--episodes=3", "--size=2", "--workers=1", "--crash=1"]
    process = subprocess.run([sys.executable, EXAMPLE, *options], capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert "RestartsExhausted: more than 3 restarts" in process.stderr


# --- CancelledError at every await of every call, alone and together with a reply or a worker's death
# A program is interrupted at its n-th await, for every n. Afterwards no request is pending, and every slot returns correct
# results.

Act = Callable[[Any], None]


class CountedAwaits:
    """An awaitable that runs a coroutine. Before wait number ``number``, it calls ``act`` with the awaited future.

    Attributes:
        act: The function to call.
        waits: The number of waits so far.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], number: int) -> None:
        self._coroutine, self._number = coroutine, number
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
            if self.waits == self._number:
                self.act(future)
            value = error = None
            try:
                value = yield future
            except BaseException as thrown:
                error = thrown


def kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # an idle worker may end as soon as the pool closes
            os.kill(pid, signal.SIGKILL)


# Each of the following functions returns an ``act`` for :class:`CountedAwaits`, which its docstring describes.


def cancel_at_once(task: asyncio.Task[Any], get_pids: Callable[[], list[int]]) -> Act:
    """Cancel the task as soon as it waits."""

    def act(_: Any) -> None:
        asyncio.get_running_loop().call_soon(task.cancel)

    return act


def cancel_when_done(task: asyncio.Task[Any], get_pids: Callable[[], list[int]]) -> Act:
    """Cancel the task after its future is done and before the task continues."""

    def act(future: Any) -> None:
        if future is None:  # a plain `yield`, as in `asyncio.sleep(0)`
            task.cancel()
        else:
            future.add_done_callback(lambda _: task.cancel())

    return act


def cancel_later(task: asyncio.Task[Any], get_pids: Callable[[], list[int]]) -> Act:
    """Cancel the task after three milliseconds."""

    def act(_: Any) -> None:
        asyncio.get_running_loop().call_later(0.003, task.cancel)

    return act


def cancel_and_kill(task: asyncio.Task[Any], get_pids: Callable[[], list[int]]) -> Act:
    """Cancel the task and kill all workers at the same moment."""

    def act(_: Any) -> None:
        kill_all(get_pids())
        asyncio.get_running_loop().call_soon(task.cancel)

    return act


def cancel_during_restart(task: asyncio.Task[Any], get_pids: Callable[[], list[int]]) -> Act:
    """Cancel the task while workers are restarted."""

    def act(_: Any) -> None:
        kill_all(get_pids())
        asyncio.get_running_loop().call_later(0.02, task.cancel)

    return act


def kill_only(task: asyncio.Task[Any], get_pids: Callable[[], list[int]]) -> Act:
    """Kill all workers, and cancel nothing."""
    return lambda _: kill_all(get_pids())


INTERRUPTIONS = [cancel_at_once, cancel_when_done, cancel_later, cancel_and_kill, cancel_during_restart, kill_only]
INTERRUPTED_POOL_OPTIONS = [
    pytest.param({"num_workers": 1}, id="one-worker"),
    pytest.param({}, id="process-per-env", marks=pytest.mark.long),
    pytest.param({"num_workers": 1, "env_threads": 2}, id="threads", marks=pytest.mark.long),
]


async def make_every_call(pool: Pool) -> None:
    """Make every kind of call in one episode, and check the results."""
    async with pool.episode(seed=7) as env:
        expected = step_directly(TextEnv(), 7, ["a", "wait 0.01", "b"])
        assert env.observation == expected[0][0]
        assert (await env.step("a"))[:4] == expected[1][:4]
        snapshot = await env.save()
        assert await env.call("double", 3) == 6
        assert (await env.step("wait 0.01"))[:4] == expected[2][:4]
        assert await env.load(snapshot) == expected[1][0]
        assert (await env.step("wait 0.01"))[:4] == expected[2][:4]
        await env.reset(seed=7, options={"begin": "wait 0.01"})
        assert env.observation == expected[0][0]
        assert (await env.step("a"))[:4] == expected[1][:4]


async def wait_for_a_slot(pool: Pool) -> None:
    """Begin an episode while all slots are occupied. One of them becomes free after 0.01 seconds."""
    episodes = [pool.episode(seed=seed) for seed in range(pool.size)]
    try:
        for episode in episodes:
            await episode.__aenter__()
        asyncio.get_running_loop().call_later(0.01, lambda: asyncio.ensure_future(episodes.pop().__aexit__()))
        async with pool.episode(seed=1) as env:
            await env.step("x")
    finally:
        for episode in episodes:
            await episode.__aexit__()


async def evaluate_episodes(pool: Pool) -> None:
    async def policy(observation: str) -> str:
        await asyncio.sleep(0)
        return "x"

    await pool.evaluate(policy, 3, seed=1, retries=0)


def interrupt_every_await(
    program: Callable[[Pool], Coroutine[Any, Any, None]], size: int, options: dict[str, Any], interruption: Any
) -> int:
    """Run a program repeatedly in one pool, and interrupt the n-th run at its n-th await. Return the number of awaits."""

    async def main() -> int:
        # no request hangs here, but a shorter timeout could kill the worker of a slow request, and end its other episodes
        async with Pool(TextEnv, size, cancel_timeout=60, on_failure=vecenv.Restart(10_000), **options) as pool:
            number = 0
            killed_pids: set[int] = set()

            def get_pids() -> list[int]:
                return [process.pid for process in pool._envs.processes]

            def get_pids_to_kill() -> list[int]:
                killed_pids.update(get_pids())
                return get_pids()

            while True:
                number += 1
                counted = CountedAwaits(program(pool), number)
                task = asyncio.ensure_future(counted)
                counted.act = interruption(task, get_pids_to_kill)
                (outcome,) = await asyncio.gather(task, return_exceptions=True)
                assert outcome is None or isinstance(outcome, asyncio.CancelledError | VecEnvError), repr(outcome)
                while not killed_pids.isdisjoint(get_pids()):  # a death that is detected later could fail a later episode
                    await asyncio.sleep(0.001)
                killed_pids.clear()
                await check_all_slots(pool)
                assert not pool.stats()["in_flight"]
                if counted.waits < number:
                    return number - 1

    return run(main(), seconds=100)


@pytest.mark.sampled(
    "make_every_call-9-one-worker-cancel_at_once",
    "wait_for_a_slot-4-one-worker-cancel_and_kill",
    "wait_for_a_slot-4-one-worker-kill_only",
    "evaluate_episodes-1-one-worker-cancel_during_restart",
)
@pytest.mark.parametrize("interruption", INTERRUPTIONS)
@pytest.mark.parametrize("options", INTERRUPTED_POOL_OPTIONS)
@pytest.mark.parametrize(
    ("program", "min_awaits"),
    [
        (make_every_call, 9),
        (wait_for_a_slot, 4),
        (evaluate_episodes, 1),  # Python 3.12 does not suspend at the second await, because its tasks have finished
    ],
)
def test_interruption_at_any_await_leaves_all_slots_usable(
    program: Any, min_awaits: int, options: dict[str, Any], interruption: Any
) -> None:
    assert interrupt_every_await(program, 2, options, interruption) >= min_awaits


@pytest.mark.parametrize("interruption", [cancel_at_once, cancel_later, cancel_and_kill])
async def test_close_cancelled_at_its_first_await_closes_the_pool(interruption: Any) -> None:
    """The fixture around every test checks for leaks."""
    pool = Pool(TextEnv, 3, num_workers=2)
    await pool.__aenter__()
    async with pool.episode() as env:
        step = asyncio.create_task(env.step("wait 1"))
        await asyncio.sleep(0)
        counted = CountedAwaits(pool.close(), 1)
        task = asyncio.ensure_future(counted)
        counted.act = interruption(task, lambda: [process.pid for process in pool._envs.processes if process.pid])
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError)
        (error,) = await asyncio.gather(step, return_exceptions=True)
        assert "after a call to `close()`" in str(error)
    assert pool._envs.closed
    await pool.close()


@pytest.mark.parametrize("way_out", ["return", "raise", "cancel", "cancel itself"])
async def test_leaving_the_with_block_always_closes_the_pool(way_out: str) -> None:
    pools: list[Pool] = []

    async def enter_and_leave() -> None:
        async with Pool(TextEnv, 2) as pool:
            pools.append(pool)
            async with pool.episode() as env:
                if way_out == "cancel":
                    await env.step("wait 5")
                await env.step("x")
                if way_out == "raise":
                    raise ZeroDivisionError
                if way_out == "cancel itself":
                    asyncio.current_task().cancel()  # type: ignore[union-attr]
                    await env.step("x")

    task = asyncio.create_task(enter_and_leave())
    if way_out == "cancel":
        await asyncio.sleep(0.3)
        task.cancel()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    expected = {"return": type(None), "raise": ZeroDivisionError}
    assert type(outcome) is expected.get(way_out, asyncio.CancelledError)
    (pool,) = pools
    assert pool._envs.closed


def test_end_of_the_loop_closes_the_pool_of_a_running_task() -> None:
    """``asyncio.run`` cancels the tasks that are still running when its coroutine returns."""
    pools: list[Pool] = []

    async def play(pool: Pool, number: int) -> None:
        while True:
            async with pool.episode(seed=number) as env:
                while not env.over:
                    await env.step("wait 0.01")

    async def play_forever() -> None:
        async with Pool(TextEnv, 4, num_workers=2) as pool:
            pools.append(pool)
            await asyncio.gather(*(play(pool, number) for number in range(8)))

    async def main() -> asyncio.Task[None]:
        task = asyncio.create_task(play_forever())
        while not pools:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        return task

    task = asyncio.run(main())
    assert task.cancelled()
    (pool,) = pools
    assert pool._envs.closed


async def test_result_of_a_cancelled_step_is_not_returned_by_the_next_step() -> None:
    """The late reply belongs to the cancelled request."""

    async def check_episode(env: EpisodeEnv, seed: int) -> None:
        expected = step_directly(TextEnv(), seed, ["y"])
        assert env.observation == expected[0][0]
        assert (await env.step("y"))[:4] == expected[1][:4]

    rng = np.random.default_rng(0)
    async with Pool(TextEnv, 2, num_workers=1) as pool:
        for seed in range(60):
            async with pool.episode(seed=seed) as env:
                task = asyncio.create_task(env.step("wait 0.001"))
                await asyncio.sleep(rng.uniform(0, 0.003))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await env.reset(seed=seed)
                await check_episode(env, seed)


async def test_cancelled_reset_does_not_stop_other_resets_of_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Pool(TextEnv, 2, num_workers=1) as pool, pool.episode() as first, pool.episode() as second:
        with pytest.raises(VecEnvError):
            await first.step("kill")
        with pytest.raises(VecEnvError):
            await second.step("x")
        first_reset, second_reset = (asyncio.create_task(env.reset(seed=5)) for env in (first, second))
        await asyncio.sleep(0)  # both wait for the new worker
        make_available = pool._slots._make_available

        def cancel_and_make_available(group: Any) -> None:
            if first_reset.cancel():
                make_available(group)

        monkeypatch.setattr(pool._slots, "_make_available", cancel_and_make_available)
        with pytest.raises(asyncio.CancelledError):
            await first_reset
        observation, _ = await asyncio.wait_for(second_reset, 20)
        assert observation == TextEnv().reset(seed=5)[0]
