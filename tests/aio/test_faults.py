"""One environment of many is killed, aborts, hangs, raises or is cancelled: that episode is lost, and no other."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from worlds import Words, alone, run, whole

from vecenv.aio import EpisodeEnv, Pool
from vecenv.errors import EnvFailed, RestartsExhausted, StartupTimeout, StepTimeout, WorkerDied
from vecenv.testing.faulty import FaultyConstructor

MANY = pytest.param(64, marks=[pytest.mark.long])
FAULTS = {
    "kill": WorkerDied, "abort": WorkerDied, "hang": StepTimeout, "raise it": EnvFailed, "cancel": asyncio.CancelledError,
}  # fmt: skip
HOW = [
    pytest.param({}, id="each"),
    pytest.param({"num_workers": 2}, id="two"),
    pytest.param({"num_workers": 2, "env_threads": 8}, id="threads"),
]


def died(error: BaseException) -> bool:
    return isinstance(error, WorkerDied | StepTimeout)


@pytest.mark.parametrize("size", [6, MANY])
@pytest.mark.parametrize("on_failure", ["restart", pytest.param("raise", marks=pytest.mark.long)])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("workers", ["each", "two", "threads"])
def test_one_fault_ends_one_episode(fault: str, workers: str, on_failure: Any, size: int) -> None:
    """With several environments in a worker that dies: those of this worker, and each is told."""
    how: dict[str, Any] = {} if workers == "each" else {"num_workers": 2}
    if workers == "threads":
        how["env_threads"] = size
    limit = 5.0 if size > 10 and workers == "two" else 0.5

    async def main() -> None:
        async with Pool(
            partial(Words, 8), size, step_timeout=limit, cancel_timeout=2.0, on_failure=on_failure, **how
        ) as pool:
            ends = await asyncio.gather(*(one(pool, n) for n in range(size)))
            lost = [n for n, end in enumerate(ends) if end is not None]
            beside = next(rows for rows in pool._envs.worker_rows if episodes[0].env_id in rows)
            if fault in ("raise it", "cancel"):
                assert lost == [0]
            else:
                hit = {episodes[n].env_id for n in lost}
                if workers == "threads" and fault == "hang":  # the others had half a second to end their episodes
                    assert hit <= set(beside), ends
                else:
                    assert hit == set(beside), ends
                assert all(died(ends[n]) for n in lost)
            assert type(ends[0]) is FAULTS[fault], ends[0]
            await whole(pool)

    episodes: dict[int, EpisodeEnv] = {}

    async def one(pool: Pool, number: int) -> BaseException | None:
        actions = [f"step {step}" for step in range(8)]
        try:
            async with pool.episode(seed=number) as env:
                episodes[number] = env
                said: list[Any] = [env.observation]
                for place, action in enumerate(actions):
                    if number == 0 and place == 3:
                        await go_wrong(env)
                    await asyncio.sleep(0.02)
                    said.append((await env.step(action))[:4])
        except (WorkerDied, StepTimeout, EnvFailed, asyncio.CancelledError) as error:
            if number and not isinstance(error, StepTimeout):
                assert "died" in str(error) or "failed earlier" in str(error), error
            return error
        wanted = alone(Words(8), number, actions)
        assert said == [wanted[0][0], *(each[:4] for each in wanted[1:])]
        return None

    async def go_wrong(env: EpisodeEnv) -> None:
        if fault != "cancel":
            await env.step(fault)
        step = asyncio.create_task(env.step("wait 0.2"))
        await asyncio.sleep(0.01)
        step.cancel()
        await step

    run(main(), seconds=100)


@pytest.mark.long
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_the_other_start_methods(context: Any, on_failure: Any) -> None:
    async def main() -> None:
        async with Pool(Words, 4, num_workers=2, context=context, on_failure=on_failure) as pool:
            for fault in ("kill", "raise it", "abort"):
                async with pool.episode() as env:
                    with pytest.raises((WorkerDied, EnvFailed)):
                        await env.step(fault)
            await whole(pool)

    run(main(), seconds=200)


async def test_what_is_said_of_each_failure() -> None:
    async with Pool(Words, 3, step_timeout=0.3, cancel_timeout=0.1) as pool:
        async with pool.episode() as env:
            with pytest.raises(EnvFailed, match=rf"env {env.env_id}, worker .* step: ValueError: wrong: abc") as told:
                await env.step("raise abc")
            assert isinstance(told.value.__cause__, ValueError)
            assert env.failure is told.value
            with pytest.raises(EnvFailed, match=rf"env {env.env_id} failed earlier .*by reset\(\) first: ValueError"):
                await env.step("x")
            with pytest.raises(EnvFailed, match="failed earlier"):
                await env.save()
            await env.reset()
            await env.step("x")
            with pytest.raises(WorkerDied, match=r"died during step: killed by SIGKILL") as death:
                await env.step("kill")
            assert death.value.envs == (env.env_id,)
            await env.reset()
            with pytest.raises(StepTimeout, match=r"hung for more than 0.3 seconds .* at worlds.py:\d+ in _go"):
                await env.step("hang")
            await env.reset()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(env.step("wait 0.05"), 0.01)
            with pytest.raises(EnvFailed, match="its step was cancelled"):
                await env.step("x")
            await env.reset()
            with pytest.raises(EnvFailed, match="during reset: ValueError: wrong: b"):
                await env.reset(options={"begin": "raise b"})
            await env.reset()
        with pytest.raises(EnvFailed, match="during reset"):
            async with pool.episode(options={"begin": "raise b"}):
                raise AssertionError
        assert {record.command for record in pool.errors} == {"step", "reset"}
        await whole(pool)


async def test_a_cancelled_step_that_does_not_end_costs_its_worker_after_a_while() -> None:
    async with Pool(Words, 3, cancel_timeout=0.2, on_failure="restart", restart_limit=0) as pool:
        for _ in range(3):  # which is no restart of the budget
            async with pool.episode() as env:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await env.step("hang")
        await whole(pool)
        assert pool.stats()["restarts"] == 3


async def test_a_cancelled_step_that_ends_in_time_costs_nothing_but_its_episode() -> None:
    async with Pool(Words, 1, cancel_timeout=5) as pool:
        (process,) = pool._envs.processes
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), pool.episode() as env:
                await env.step("wait 0.2")
        await whole(pool)  # behind the late answer, which is given to nothing
        assert pool._envs.processes == [process]


async def test_a_cancelled_step_that_waits_for_others_does_not_cost_them_their_worker() -> None:
    async with Pool(Words, 4, num_workers=1, cancel_timeout=0.1) as pool:
        async with pool.episode() as one, pool.episode() as two, pool.episode() as three:
            before = asyncio.create_task(one.step("wait 0.3"))
            behind = asyncio.create_task(two.step("wait 0.01"))
            last = asyncio.create_task(three.step("x"))
            await asyncio.sleep(0.02)
            behind.cancel()
            assert (await before)[4]["of"] == ["wait 0.3"]
            assert (await last)[4]["of"] == ["x"]
        await whole(pool)
        assert pool.stats()["restarts"] == 0


async def test_a_process_that_cannot_be_started_yet_costs_one_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Pool(Words, 1, num_workers=1, on_failure="restart", restart_limit=1) as pool:
        start_anew, refused = pool._slots._workers.start_anew, []

        def refuse_once(worker: Any) -> Any:
            if refused:
                return start_anew(worker)
            refused.append(worker)
            raise BlockingIOError

        monkeypatch.setattr(pool._slots._workers, "start_anew", refuse_once)
        async with pool.episode() as one:
            with pytest.raises(WorkerDied):
                await one.step("kill")
        await whole(pool)
        assert refused


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
async def test_deaths_are_noticed_where_no_descriptor_tells_of_it(on_failure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError

    monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)

    async with Pool(Words, 4, num_workers=2, on_failure=on_failure) as pool:
        async with pool.episode() as one, pool.episode() as two:
            with pytest.raises(WorkerDied):
                await one.step("kill")
            os.kill(await two.call("pid"), signal.SIGKILL)
            await asyncio.sleep(0.3)
            with pytest.raises(WorkerDied):
                await two.step("x")
        await whole(pool)


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
async def test_workers_that_die_while_no_episode_has_them(on_failure: Any) -> None:
    async with Pool(Words, 6, num_workers=3, on_failure=on_failure) as pool:
        for process in pool._envs.processes:
            os.kill(process.pid, signal.SIGKILL)
        await asyncio.sleep(0.3)  # the kernel tells
        await whole(pool)


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
async def test_an_episode_whose_worker_dies_while_it_thinks_is_told_with_its_next_call(on_failure: Any) -> None:
    async with Pool(Words, 4, num_workers=2, on_failure=on_failure) as pool:
        async with pool.episode() as env:
            os.kill(await env.call("pid"), signal.SIGKILL)
            await asyncio.sleep(0.3)
            with pytest.raises(WorkerDied, match="died while idle"):
                await env.call("pid")
            with pytest.raises(EnvFailed, match="failed earlier"):
                await env.step("x")
        await whole(pool)


async def test_a_worker_that_dies_too_often_is_given_up_and_the_others_go_on() -> None:
    async with Pool(Words, 2, on_failure="restart", restart_limit=1) as pool:
        async with pool.episode() as bad:
            with pytest.raises(WorkerDied):
                await bad.step("kill")
            await bad.reset()
            with pytest.raises(WorkerDied):
                await bad.step("kill")
            with pytest.raises(RestartsExhausted, match="more than 1 restarts"):
                await bad.reset()
        for _ in range(4):
            async with pool.episode() as good:
                await good.step("x")
                assert good.env_id != bad.env_id
        assert "given_up=1" in repr(pool)
        async with pool.episode() as good:
            waiter = asyncio.create_task(pool.episode().__aenter__())
            with pytest.raises(WorkerDied):
                await good.step("kill")
        with pytest.raises(RestartsExhausted):
            await waiter
        with pytest.raises(RestartsExhausted):
            async with pool.episode():
                raise AssertionError


class OnceWell:
    """Builds an environment for as long as a file is not there."""

    def __init__(self, flag: Path) -> None:
        self._flag = flag

    def __call__(self) -> Words:
        if self._flag.exists():
            time.sleep(1000)
        return Words()


def test_a_worker_that_does_not_get_ready_again() -> None:
    async def main(flag: Path) -> None:
        async with Pool(OnceWell(flag), 1, start_timeout=0.5) as pool:
            flag.touch()
            async with pool.episode() as env:
                with pytest.raises(WorkerDied):
                    await env.step("kill")
                with pytest.raises(WorkerDied, match=r"not ready within 0.5 seconds"):
                    await env.reset()
                flag.unlink()
                await env.reset()
                await env.step("x")
            await whole(pool)

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        run(main(Path(folder) / "flag"))


def test_a_pool_that_does_not_start_leaves_nothing() -> None:
    with pytest.raises(StartupTimeout):
        Pool(FaultyConstructor(Words, "sleep"), 2, start_timeout=0.5, dummy_env=True)
    with pytest.raises(ZeroDivisionError):
        Pool(lambda: Words(1 // 0), 2)


def test_the_loop_goes_on_while_workers_are_started_anew_and_closed() -> None:
    """An environment that takes half a second to build, and as long to close, holds up nothing else."""

    class Slow(Words):
        def __init__(self) -> None:
            super().__init__()
            time.sleep(0.4)

        def close(self) -> None:
            time.sleep(0.4)

    async def main() -> list[float]:
        late: list[float] = []

        async def watch() -> None:
            while True:
                began = time.perf_counter()
                await asyncio.sleep(0.005)
                late.append(time.perf_counter() - began - 0.005)

        async with Pool(Slow, 2, on_failure="restart") as pool:
            watching = asyncio.create_task(watch())
            async with pool.episode() as env:
                with pytest.raises(WorkerDied):
                    await env.step("kill")
                await env.reset()
            async with pool.episode():
                pass
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        return late

    late = run(main())
    assert len(late) > 60
    assert sorted(late)[-3] < 0.2, sorted(late)[-5:]


@pytest.mark.parametrize("episodes", [300, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
@pytest.mark.parametrize("how", HOW)
def test_random_cancels_leak_no_place_no_process_and_no_descriptor(episodes: int, how: dict[str, Any]) -> None:
    """(Processes and descriptors are counted around every test.) What is not cancelled says what it has to."""

    async def one(pool: Pool, number: int) -> None:
        rng = random.Random(number)
        actions = [f"{number} {step}" for step in range(3)]
        async with pool.episode(seed=number) as env:
            said: list[Any] = [env.observation]
            for action in actions:
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.random() * 0.002)
                said.append((await env.step(action))[:4])
        wanted = alone(Words(), number, actions)
        assert said == [wanted[0][0], *(each[:4] for each in wanted[1:])]
        done.append(number)

    done: list[int] = []

    async def main() -> None:
        rng = random.Random(1)
        async with Pool(Words, 8, **how) as pool:
            before = len(os.listdir("/proc/self/fd"))
            left = iter(range(episodes))

            async def some() -> None:
                for number in left:
                    task = asyncio.create_task(one(pool, number))
                    if rng.random() < 0.5:
                        await asyncio.sleep(rng.random() * 0.01)
                        task.cancel()
                    (end,) = await asyncio.gather(task, return_exceptions=True)
                    assert end is None or isinstance(end, asyncio.CancelledError), end

            await asyncio.gather(*(some() for _ in range(16)))
            await whole(pool)
            assert len(os.listdir("/proc/self/fd")) == before
            assert pool.stats()["restarts"] == 0
            assert not pool._engine.requests

    run(main(), seconds=800)
    assert episodes * 0.4 < len(done) < episodes
